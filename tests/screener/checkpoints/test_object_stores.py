"""Checkpoints in S3: a trajectory, tokenizers from elsewhere, credentials, certificates, proxies."""

from __future__ import annotations

import shutil
import sys

import numpy as np
import pytest
from certificates import make_certificate
from checkpoints import head_and_embedding, write_checkpoint
from faulty_proxy import FaultyProxy
from hub_client import refused, truth, unread, whole_gap
from hub_faults import closed
from lmeval_screener import screen
from storages import read, s3_client

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.installation import data_folder


@pytest.fixture
def proxied(s3_server, monkeypatch):
    """The settings of AWS's own tools, toward a proxy that counts."""
    with FaultyProxy(s3_server.port) as proxy:
        s3_server.use(monkeypatch, proxy.endpoint)
        yield proxy


def test_a_trajectory_end_to_end(s3_server, proxied, tmp_path):
    """Three steps of a run: G of each is that of its whole matrix, and the tokenizer is read once for all."""
    for step, name in ((10, "sums-00"), (20, "sums-10"), (30, "sums-80")):
        s3_server.put(data_folder("demo") / name, f"train/checkpoint-{step}")
    (tmp_path / "a.csv").write_text("repo,accuracy\ncheckpoint-10,0.1\ncheckpoint-30,0.9\n")
    result = screen(["s3://box/train"], results=tmp_path / "a.csv")
    assert not result.failed
    accuracies = {c.repo.rpartition("-")[2]: c.accuracy for c in result.checkpoints}
    assert accuracies == {"10": 0.1, "20": None, "30": 0.9}
    (group,) = result.groups
    assert [c.repo.rpartition("/")[2] for c in group.trajectory] == [
        f"checkpoint-{n}" for n in (10, 20, 30)
    ]
    for c, name in zip(group.trajectory, ("sums-00", "sums-10", "sums-80"), strict=True):
        assert c.gaps["cosine"].mean == pytest.approx(
            whole_gap(data_folder("demo") / name, c), abs=1e-6
        )
    asked = [request.path for request in proxied.ranges()]
    assert sum(path.endswith("tokenizer.json") for path in asked) == 1
    assert result.requests == len(proxied.requests)
    assert result.to_dict()["totals"]["bytes_read"] > 0


def test_a_run_with_folder_markers_and_one_tokenizer(s3_server, proxied, tmp_path):
    """Zero-byte objects named as folders (the console, Hadoop); the run's folder alone has a tokenizer."""
    names = ("checkpoint-10", "checkpoint-20", "merged")
    for name, model in zip(names, ("sums-00", "sums-10", "sums-80"), strict=True):
        folder = tmp_path / name
        shutil.copytree(
            data_folder("demo") / model, folder, ignore=shutil.ignore_patterns("tokenizer*")
        )
        s3_server.put(folder, f"marked/{name}")
    for marker in (
        "marked/",
        "marked/checkpoint-10/",
        "marked/checkpoint-20_$folder$",
        "marked/logs/",
    ):
        s3_server.upload(marker, b"")
    s3_server.upload(
        "marked/tokenizer.json", (data_folder("demo") / "sums-00/tokenizer.json").read_bytes()
    )
    result = screen(["s3://box/marked/"])
    assert not result.failed
    (group,) = result.groups
    assert [group.names[c] for c in group.trajectory] == [*names]
    asked = [request.path for request in proxied.ranges()]
    assert sum(path.endswith("tokenizer.json") for path in asked) == 1


LAYOUTS = {
    "megatron": (["iter_0000500/mp_rank_00/model_optim_rng.pt"], "shards of Megatron"),
    "verl": (
        [
            "global_step_20/actor/huggingface/config.json",
            "global_step_20/actor/model_world_size_1_rank_0.pt",
        ],
        "copy s3://box/verl/global_step_20/actor to FOLDER, and merge them: "
        "`python -m verl.model_merger merge --backend fsdp --local_dir FOLDER",
    ),
    "zero": (
        ["checkpoint-5/config.json", "checkpoint-5/zero_to_fp32.py"],
        "copy s3://box/zero/checkpoint-5 to FOLDER, and join them: `cd FOLDER && python zero_to_fp32.py",
    ),
}


@pytest.mark.parametrize("run", LAYOUTS)
def test_what_other_programs_leave_is_named_and_copied_before_their_commands(
    s3_server, proxied, run
):
    names, says = LAYOUTS[run]
    for name in names:
        s3_server.upload(f"{run}/{name}", b"{}")
    (failed,) = screen([f"s3://box/{run}"]).failed
    assert failed.error == "NoSafetensors"
    assert says in failed.message


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("AWS_ACCESS_KEY_ID", None, "for a public bucket AWS_SKIP_SIGNATURE=true"),
        ("AWS_PROFILE", "nobody", "nobody"),
    ],
)
def test_without_credentials(proxied, tmp_path, monkeypatch, setting, value, says):
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv(setting) if value is None else monkeypatch.setenv(setting, value)
    refused(read, "s3://box/m", tmp_path / "cache", code="AccessDenied", says=says)
    assert not proxied.requests


def test_a_profile_and_no_signature(s3_server, proxied, tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "m", head_and_embedding())
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
    proxied.requests.clear()
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxied.endpoint)
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    for name in ("config.json", "model.safetensors"):
        s3_client(s3_server.port).put_object_acl(
            Bucket="box", Key=f"profiles/m/{name}", ACL="public-read"
        )
    read(address, tmp_path / "other")
    assert not any("authorization" in request.headers for request in proxied.requests)


def test_a_tokenizer_from_elsewhere(s3_server, proxied, tmp_path):
    """For what stores none: from a folder, a file under any name, and another address."""
    demo = data_folder("demo") / "sums-10"
    bare = shutil.copytree(demo, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    expected = screen([str(demo)]).checkpoints[0].gaps["cosine"].mean
    shutil.copy(demo / "tokenizer.json", tmp_path / "words.json")
    addresses = s3_server.put(bare, "bare/m"), s3_server.put(demo, "whole/m")
    for tokenizer in (
        demo,
        tmp_path / "words.json",
        addresses[1],
        f"{addresses[1]}/tokenizer.json",
    ):
        result = screen([addresses[0]], tokenizer=str(tokenizer))
        assert [c.gaps["cosine"].mean for c in result.checkpoints] == [expected], result.failed
    unread(addresses[0], "TokenizerNotFound", "name a tokenizer (")
    with pytest.raises(UsageError, match="tokenizer"):
        screen([addresses[0]], tokenizer=str(bare))


@pytest.mark.parametrize("name", ["expired-runs", "redirected/m", "a\\1"])
def test_names_are_no_reasons(s3_server, proxied, tmp_path, name):
    proxied.fault("*", closed(reset=True))
    assert (
        refused(read, f"s3://{name}", tmp_path).code
        == refused(read, f"s3://box/{name}", tmp_path).code
    )
    assert refused(read, f"s3://box/{name}", tmp_path).code == "Unreachable"


def test_without_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    refused(read, "s3://box/m", tmp_path, code="MissingExtra", says="lmeval-dispersion[cloud]")


def test_a_bucket_behind_a_certificate_of_ones_own(s3_server, tmp_path, monkeypatch):
    """Its server is reached only by those who trust it, and the error says how."""
    tls = make_certificate(tmp_path / "server.pem")
    with FaultyProxy(s3_server.port, tls) as proxy:
        s3_server.use(monkeypatch, proxy.endpoint)
        error = refused(read, "s3://box/nothing", tmp_path)
        assert (error.code, proxy.requests) == ("Unreachable", [])
        assert "SSL_CERT_FILE or REQUESTS_CA_BUNDLE" in str(error)
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "server.pem"))
        assert refused(read, "s3://box/nothing", tmp_path).code == "FolderNotFound"
        assert proxy.requests


@pytest.mark.parametrize("excluded", ["127.0.0.1:{port}", "127.0.0.0/8", "127.0.0.1"])
def test_a_bucket_past_the_proxy(s3_server, tmp_path, monkeypatch, excluded):
    folder = write_checkpoint(tmp_path / "m", head_and_embedding())
    address = s3_server.put(folder, "past/m")
    s3_server.use(monkeypatch)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", excluded.format(port=s3_server.port))
    for name in ("http_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    np.testing.assert_array_equal(read(address, tmp_path / "cache").rows, truth(folder))
