"""Checkpoints on plain web servers, in buckets of the Hub, in file systems of fsspec, and as single files."""

from __future__ import annotations

import asyncio
import json
import shutil

import fsspec
import numpy as np
import pytest
from checkpoints import head_and_embedding, slow_gap, write_checkpoint
from hub_client import full_matrix
from lmeval_screener import screen
from lmeval_screener.checkpoints.hub import Hub
from lmeval_screener.checkpoints.limits import Budget
from lmeval_screener.checkpoints.source import Sources
from lmeval_screener.errors import ScreeningError
from lmeval_screener.targets import parse_target
from storages import expand, read, truth
from web_server import WebServer

from lmeval_dispersion.paths import data_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("web")
    write_checkpoint(made / "m", head_and_embedding(v=5000, d=64))
    write_checkpoint(made / "sharded", head_and_embedding(v=5000, d=64), shards=3)
    for step in (5, 10):
        shutil.copytree(made / "m", made / "run" / f"checkpoint-{step}")
    return made


@pytest.fixture
def web(folder):
    with WebServer(folder) as server:
        yield server


def code_of(work):
    with pytest.raises(ScreeningError) as raised:
        work()
    return raised.value.code, str(raised.value)


def test_a_folder_and_a_file_of_a_web_server(web, folder, tmp_path):
    for address in (f"{web.endpoint}/m/", f"{web.endpoint}/m", f"{web.endpoint}/m/model.safetensors"):
        web.heal()
        found = read(address, tmp_path / address[-5:])
        np.testing.assert_array_equal(found.rows, truth(folder / "m"))
        meter = found.snapshot.meter
        assert meter.requests == len(web.requests)
        assert len(found.rows) * 256 < meter.bytes_read < 70_000
    web.heal()
    again = read(address, tmp_path / address[-5:])
    np.testing.assert_array_equal(again.rows, found.rows)
    assert again.snapshot.meter.requests == len(web.requests) <= 4, "what is there, and nothing of it"
    sharded = read(f"{web.endpoint}/sharded", tmp_path)
    matrix = full_matrix(folder / "sharded" / sharded.projection.file, "lm_head.weight")
    np.testing.assert_array_equal(sharded.rows, matrix[[7, 3, 4, 6, 90, 119]])


def test_a_signed_address_of_one_file(folder, tmp_path):
    """The signature is of this file: nothing beside it is asked for, and no error shows it."""
    with WebServer(folder, secret="s3cret") as web:
        address = f"{web.endpoint}/m/model.safetensors?signature=s3cret"
        np.testing.assert_array_equal(read(address, tmp_path).rows, truth(folder / "m"))
        assert {request.path for request in web.requests} == {"/m/model.safetensors"}
        code, message = code_of(lambda: read(address.replace("s3cret", "exp1red"), tmp_path))
        assert code == "AccessDenied"
        assert "exp1red" not in message
        result = screen([address, address.replace("s3cret", "exp1red")])
        assert "s3cret" not in json.dumps(result.to_dict())
        assert "exp1red" not in json.dumps(result.to_dict())
        assert len(result.failed) == 2, "this one has no tokenizer"
        assert "ask for a new one" in message


def test_what_a_web_server_does_not_have(web, tmp_path):
    assert code_of(lambda: read(f"{web.endpoint}/none/model.safetensors", tmp_path))[0] == "FileNotFound"
    assert code_of(lambda: read(f"{web.endpoint}/none", tmp_path))[0] == "FolderNotFound"
    code, message = code_of(lambda: expand(f"{web.endpoint}/run/checkpoint-*", tmp_path))
    assert code == "BadName"
    assert "lists no folders" in message
    assert code_of(lambda: read("http://127.0.0.1:9/m", tmp_path, timeout=1.0))[0] == "Unreachable"


def changing(address, replace, cache, endpoint=""):
    """Reads, replaces, reads on."""

    async def work(budget):
        async with Hub(cache=cache, endpoint=endpoint or "http://127.0.0.1:9") as hub:
            snapshot = await Sources(hub).snapshot(parse_target(address), budget)
            await snapshot.ranges("model.safetensors", [(0, 8)])
            replace()
            await snapshot.ranges("model.safetensors", [(8, 64)])

    return code_of(lambda: asyncio.run(work(Budget(20))))


def test_a_bucket(hub, folder, tmp_path):
    address = hub.add_bucket("org/box", folder)
    found = read(f"{address}/m", tmp_path, endpoint=hub.endpoint)
    np.testing.assert_array_equal(found.rows, truth(folder / "m"))
    assert found.snapshot.meter.requests == len(hub.requests)
    assert found.snapshot.meter.bytes_read < 70_000
    before = len(hub.requests)
    again = read(f"{address}/run/checkpoint-5", tmp_path, endpoint=hub.endpoint)
    np.testing.assert_array_equal(again.rows, found.rows)
    assert len(hub.requests) == before + 1, "the same content under another name is in the cache"
    hub.page = 1
    steps = [f"{address}/run/checkpoint-{n}" for n in (5, 10)]
    assert expand(f"{address}/run", tmp_path, endpoint=hub.endpoint)[0] == steps
    assert expand(f"{address}/run/checkpoint-1?", tmp_path, endpoint=hub.endpoint)[0] == steps[1:]
    single = read(f"{address}/m/model.safetensors", tmp_path / "c", endpoint=hub.endpoint)
    np.testing.assert_array_equal(single.rows, found.rows)


def test_a_bucket_that_is_not_there_or_changes(hub, tmp_path):
    code, message = code_of(lambda: read("hf://buckets/org/none", tmp_path, endpoint=hub.endpoint))
    assert code == "RepoNotFound"
    assert "hf://buckets/org/none" in message
    made = write_checkpoint(tmp_path / "box" / "m", head_and_embedding())
    other = write_checkpoint(tmp_path / "other", head_and_embedding(seed=1))
    address = hub.add_bucket("org/box", tmp_path / "box")
    code, _ = code_of(lambda: read(f"{address}/none", tmp_path, endpoint=hub.endpoint))
    assert code == "FolderNotFound"
    shutil.copy(other / "model.safetensors", tmp_path / "new")
    code, message = changing(
        f"{address}/m",
        lambda: shutil.copy(tmp_path / "new", made / "model.safetensors"),
        tmp_path / "cache",
        hub.endpoint,
    )
    assert code == "BadResponse"


@pytest.fixture
def memory(folder):
    system = fsspec.filesystem("memory")
    system.put(str(folder) + "/", "/disk/", recursive=True)
    yield system
    system.rm("/disk", recursive=True)


def test_any_file_system_of_fsspec(memory, folder, tmp_path):
    found = read("memory://disk/m", tmp_path)
    np.testing.assert_array_equal(found.rows, truth(folder / "m"))
    assert 0 < found.snapshot.meter.bytes_read < 70_000
    assert expand("memory://disk/run", tmp_path)[0] == [f"memory://disk/run/checkpoint-{n}" for n in (5, 10)]
    code, message = changing(
        "memory://disk/m", lambda: memory.pipe("/disk/m/model.safetensors", bytes(2_000_000)), tmp_path
    )
    assert code == "BadResponse"
    assert "changed while it was read" in message
    assert code_of(lambda: read("memory://disk/none", tmp_path))[0] == "FolderNotFound"
    assert code_of(lambda: read("nonsense://disk/none", tmp_path))[0] == "BadName"


def test_a_file_on_disk(folder, tmp_path, monkeypatch):
    """With what lies beside it; alone, with a tokenizer from elsewhere."""
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    np.testing.assert_array_equal(
        read(str(folder / "m" / "model.safetensors"), tmp_path).rows, truth(folder / "m")
    )
    demo = data_folder("demo") / "sums-80"
    head = next(p for p in sorted(demo.glob("*.safetensors")))
    (tmp_path / "alone").mkdir()
    alone = shutil.copy(head, tmp_path / "alone" / "weights.safetensors")
    (failed,) = screen([str(alone)]).failed
    assert failed.error == "TokenizerNotFound"
    assert "name another place of it with" in failed.message
    (found,) = screen([str(alone)], tokenizer=str(demo)).checkpoints
    matrix = full_matrix(alone, found.tensor)
    ids = [[t.id for t in side] for side in (found.resolution.domain, found.resolution.reference)]
    assert found.gaps["cosine"].mean == pytest.approx(slow_gap(matrix[ids[0]], matrix[ids[1]]), abs=1e-6)
