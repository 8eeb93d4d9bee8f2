"""Checkpoints in S3: addresses, globs, runs, single files, credentials, the cache and what it costs."""

from __future__ import annotations

import asyncio
import shutil

import numpy as np
import pytest
from certificates import make_certificate
from checkpoints import head_and_embedding, slow_gap, write_checkpoint
from faulty_proxy import FaultyProxy
from hub_client import full_matrix
from lmeval_screener import screen
from lmeval_screener.checkpoints import Cache, Meter
from lmeval_screener.checkpoints.hub import Hub
from lmeval_screener.checkpoints.limits import Budget
from lmeval_screener.checkpoints.object_store import ObjectStore
from lmeval_screener.checkpoints.source import Sources
from lmeval_screener.errors import ScreeningError
from lmeval_screener.targets import parse_target
from storages import S3, expand, read, truth

from lmeval_dispersion.paths import data_folder


@pytest.fixture
def proxied(s3_server, monkeypatch):
    """The settings of AWS's own tools, toward a proxy that counts."""
    with FaultyProxy(s3_server.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        monkeypatch.delenv("AWS_PROFILE", raising=False)
        yield proxy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("made") / "m", head_and_embedding(v=5000, d=64))


def test_rows_bytes_and_requests(s3_server, proxied, folder, tmp_path):
    address = s3_server.put(folder, "plain/m")
    found = read(address, tmp_path)
    np.testing.assert_array_equal(found.rows, truth(folder))
    meter = found.snapshot.meter
    assert meter.requests == len(proxied.requests)
    rows, header = len(found.rows) * 64 * 4, 65_536  # the header's first piece, whatever its length
    assert rows < meter.bytes_read <= 1.2 * rows + header + (folder / "config.json").stat().st_size
    assert all("if-match" in request.headers for request in proxied.ranges())
    proxied.heal()
    again = read(address, tmp_path)
    np.testing.assert_array_equal(again.rows, found.rows)
    assert again.snapshot.meter.requests == len(proxied.requests) == 1, "the listing names the versions"
    assert again.snapshot.meter.bytes_read == 0


def test_one_that_is_replaced_while_it_is_read_is_never_mixed(s3_server, proxied, folder, tmp_path):
    address = s3_server.put(folder, "moving/m")
    other = write_checkpoint(tmp_path / "other", head_and_embedding(seed=1))

    async def work(budget):
        async with Hub(cache=tmp_path / "cache", endpoint="http://127.0.0.1:9") as hub:
            snapshot = await Sources(hub).snapshot(parse_target(address), budget)
            await snapshot.ranges("model.safetensors", [(0, 8)])
            s3_server.put(other, "moving/m")
            await snapshot.ranges("model.safetensors", [(8, 64)])

    with pytest.raises(ScreeningError, match="changed while it was read") as raised:
        asyncio.run(work(Budget(20)))
    assert raised.value.code == "BadResponse"


def steps(folder, s3_server, prefix, *names):
    for name in names:
        s3_server.put(folder, f"{prefix}/{name}")


def test_a_run_and_globs(s3_server, proxied, folder, tmp_path):
    steps(folder, s3_server, "run1", "checkpoint-5", "checkpoint-10", "checkpoint-100", "logs")
    steps(folder, s3_server, "run2/checkpoints", "step_2/actor/huggingface")
    steps(folder, s3_server, "verl", "global_step_7/actor/huggingface")
    three = [f"s3://box/run1/checkpoint-{n}" for n in (5, 10, 100)]
    assert expand("s3://box/run1", tmp_path) == (three, 4)
    assert expand("s3://box/run1/", tmp_path)[0] == three
    assert expand("s3://box/run1/checkpoint-1*", tmp_path)[0] == three[1:]
    assert expand("s3://box/run[12]", tmp_path)[0] == [
        *three,
        "s3://box/run2/checkpoints/step_2/actor/huggingface",
    ]
    assert expand("s3://box/ver?/*", tmp_path)[0] == ["s3://box/verl/global_step_7/actor/huggingface"]
    assert expand("s3://box/run*/checkpoint-5", tmp_path)[0] == three[:1]
    assert expand("s3://box/run1/logs", tmp_path) == (["s3://box/run1/logs"], 1)
    with pytest.raises(ScreeningError, match="nothing matches"):
        expand("s3://box/none-*", tmp_path)


def test_a_single_file(s3_server, proxied, folder, tmp_path):
    address = s3_server.put(folder, "single/m")
    s3_server.client.put_object(Bucket="box", Key="single/m/other.safetensors", Body=b"x" * 100)
    s3_server.client.put_object(Bucket="box", Key="single/m/model.safetensors.index.json", Body=b"{}")
    found = read(f"{address}/model.safetensors", tmp_path)
    assert set(found.snapshot.files) == {"config.json", "model.safetensors"}
    np.testing.assert_array_equal(found.rows, truth(folder))
    with pytest.raises(ScreeningError, match=r"there is no file .*none.safetensors"):
        read(f"{address}/none.safetensors", tmp_path)


def test_a_trajectory_end_to_end(s3_server, proxied, tmp_path, monkeypatch):
    """Three steps of a run: G of each is that of its whole matrix, and the tokenizer is read once for all."""
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    for step, name in ((10, "sums-00"), (20, "sums-10"), (30, "sums-80")):
        s3_server.put(data_folder("demo") / name, f"train/checkpoint-{step}")
    (tmp_path / "a.csv").write_text("repo,accuracy\ncheckpoint-10,0.1\ncheckpoint-30,0.9\n")
    result = screen(["s3://box/train"], accuracy=tmp_path / "a.csv")
    assert not result.failed
    assert {c.repo.rpartition("-")[2]: c.accuracy for c in result.checkpoints} == {
        "10": 0.1,
        "20": None,
        "30": 0.9,
    }
    (group,) = result.groups
    assert [c.repo.rpartition("/")[2] for c in group.trajectory] == [f"checkpoint-{n}" for n in (10, 20, 30)]
    for c, name in zip(group.trajectory, ("sums-00", "sums-10", "sums-80"), strict=True):
        matrix = full_matrix(data_folder("demo") / name / c.file, c.tensor)
        ids = [[t.id for t in side] for side in (c.resolution.domain, c.resolution.reference)]
        assert c.gaps["cosine"].mean == pytest.approx(slow_gap(matrix[ids[0]], matrix[ids[1]]), abs=1e-6)
    asked = [request.path for request in proxied.ranges()]
    assert sum(path.endswith("tokenizer.json") for path in asked) == 1
    assert result.requests == len(proxied.requests)
    assert result.to_dict()["totals"]["bytes_read"] > 0


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("AWS_ACCESS_KEY_ID", None, "AWS_SKIP_SIGNATURE=true for a public bucket"),
        ("AWS_PROFILE", "nobody", "nobody"),
    ],
)
def test_without_credentials(proxied, tmp_path, monkeypatch, setting, value, says):
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv(setting) if value is None else monkeypatch.setenv(setting, value)
    with pytest.raises(ScreeningError, match=says) as raised:
        read("s3://box/m", tmp_path / "cache")
    assert raised.value.code == "AccessDenied"
    assert not proxied.requests


def test_a_profile_and_no_signature(s3_server, proxied, folder, tmp_path, monkeypatch):
    address = s3_server.put(folder, "profiles/m")
    (tmp_path / "config").write_text(
        f"[profile lab]\nendpoint_url = {proxied.endpoint}\nregion = eu-west-1\n"
        "aws_access_key_id = LABKEY\naws_secret_access_key = s\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)  # they come before a profile, in Amazon's tools too
    read(address, tmp_path / "cache")
    signed = {request.headers["authorization"] for request in proxied.requests}
    assert all("LABKEY" in text and "eu-west-1" in text for text in signed)
    proxied.heal()
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxied.endpoint)
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    for name in ("config.json", "model.safetensors"):
        s3_server.client.put_object_acl(Bucket="box", Key=f"profiles/m/{name}", ACL="public-read")
    read(address, tmp_path / "other")
    assert not any("authorization" in request.headers for request in proxied.requests)


def test_a_tokenizer_from_elsewhere(s3_server, proxied, tmp_path, monkeypatch):
    """For what stores none: from a folder, a file under any name, and another address."""
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    demo = data_folder("demo") / "sums-10"
    bare = shutil.copytree(demo, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    expected = screen([str(demo)]).checkpoints[0].gaps["cosine"].mean
    shutil.copy(demo / "tokenizer.json", tmp_path / "words.json")
    addresses = s3_server.put(bare, "bare/m"), s3_server.put(demo, "whole/m")
    for tokenizer in (
        str(demo),
        str(tmp_path / "words.json"),
        addresses[1],
        f"{addresses[1]}/tokenizer.json",
    ):
        result = screen([addresses[0]], tokenizer=tokenizer)
        assert [c.gaps["cosine"].mean for c in result.checkpoints] == [expected], result.failed
    failed = {f.error: f.message for f in screen([addresses[0]]).failed}
    assert "name another place of it with" in failed["TokenizerNotFound"]
    (failure,) = screen([addresses[0]], tokenizer=str(bare)).failed
    assert "tokenizer" in failure.message


def test_a_folder_of_s3_costs_no_import_of_the_extra_unless_it_is_met(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "obstore.store", None)
    with pytest.raises(ScreeningError, match=r"lmeval-dispersion\[cloud\]") as raised:
        read("s3://box/m", tmp_path)
    assert raised.value.code == "MissingExtra"
    assert S3(1).bucket == "box"


def test_a_bucket_behind_a_certificate_of_ones_own(tmp_path, monkeypatch):
    """Its server is reached only by those who trust the issuer, and the error says how."""
    certificate, reached = make_certificate(tmp_path / "tls"), []
    for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)

    async def answer(reader, writer):
        reached.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async def listed():
        async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=certificate.context) as server:
            port = server.sockets[0].getsockname()[1]
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://127.0.0.1:{port}")
            with pytest.raises(ScreeningError) as raised:
                await ObjectStore("s3://box", Cache(tmp_path)).listed("m", Meter())
            return raised.value

    error = asyncio.run(listed())
    assert (error.code, reached) == ("Unreachable", [])
    assert "SSL_CERT_FILE or REQUESTS_CA_BUNDLE" in str(error)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate.issuer))
    assert asyncio.run(listed()).code == "FolderNotFound"
    assert len(reached) == 1


@pytest.mark.parametrize("excluded", ["127.0.0.1:{port}", "127.0.0.0/8", "127.0.0.1"])
def test_a_bucket_past_the_proxy(s3_server, folder, tmp_path, monkeypatch, excluded):
    address = s3_server.put(folder, "past/m")
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3_server.port}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "HTTP_PROXY": "http://127.0.0.1:9",
        "NO_PROXY": excluded.format(port=s3_server.port),
    }.items():
        monkeypatch.setenv(name, value)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    np.testing.assert_array_equal(read(address, tmp_path / "cache").rows, truth(folder))
