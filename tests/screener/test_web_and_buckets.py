"""Checkpoints on plain web servers, in buckets of the Hub, in file systems of fsspec, and as single files."""

from __future__ import annotations

import json
import shutil

import fsspec
import numpy as np
import pytest
from checkpoints import head_and_embedding, write_checkpoint
from faulty_proxy import WebServer
from hub_client import full_matrix, whole_gap
from lmeval_screener import screen
from storages import expand, read, refused, refused_change, truth

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


def test_a_folder_and_a_file_of_a_web_server(web, folder, tmp_path):
    for number, address in enumerate(("/m/", "/m", "/m/model.safetensors")):
        web.heal()
        found = read(web.endpoint + address, tmp_path / str(number))
        np.testing.assert_array_equal(found.rows, truth(folder / "m"))
        meter = found.snapshot.meter
        assert meter.requests == len(web.requests)
        assert len(found.rows) * 256 < meter.bytes_read < 70_000
    web.heal()
    again = read(web.endpoint + address, tmp_path / "2")
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
        expired = address.replace("s3cret", "exp1red")
        error = refused(read, expired, tmp_path)
        assert error.code == "AccessDenied"
        assert "ask for a new one" in str(error)
        result = screen([address, expired])
        assert len(result.failed) == 2, "this one has no tokenizer"
        for secret in ("s3cret", "exp1red"):
            assert secret not in json.dumps(result.to_dict()) + str(error)


def test_what_a_web_server_does_not_have(web, tmp_path):
    for address, code in (
        (f"{web.endpoint}/none/model.safetensors", "FileNotFound"),
        (f"{web.endpoint}/none", "FolderNotFound"),
        ("http://127.0.0.1:9/m", "Unreachable"),
    ):
        assert refused(read, address, tmp_path, timeout=1.0).code == code
    error = refused(expand, f"{web.endpoint}/run/checkpoint-*", tmp_path)
    assert error.code == "BadName"
    assert "lists no folders" in str(error)


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
    error = refused(read, "hf://buckets/org/none", tmp_path, endpoint=hub.endpoint)
    assert error.code == "RepoNotFound"
    assert "hf://buckets/org/none" in str(error)
    made = write_checkpoint(tmp_path / "box" / "m", head_and_embedding())
    other = write_checkpoint(tmp_path / "other", head_and_embedding(seed=1))
    address = hub.add_bucket("org/box", tmp_path / "box")
    assert refused(read, f"{address}/none", tmp_path, endpoint=hub.endpoint).code == "FolderNotFound"

    def replace():
        shutil.copy(other / "model.safetensors", made / "model.safetensors")

    error = refused_change(f"{address}/m", replace, tmp_path / "cache", endpoint=hub.endpoint)
    assert error.code == "BadResponse"


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
    error = refused_change(
        "memory://disk/m", lambda: memory.pipe("/disk/m/model.safetensors", bytes(2_000_000)), tmp_path
    )
    assert error.code == "BadResponse"
    assert "changed while it was read" in str(error)
    assert refused(read, "memory://disk/none", tmp_path).code == "FolderNotFound"
    assert refused(read, "nonsense://disk/none", tmp_path).code == "BadName"


def test_a_file_on_disk(folder, tmp_path, monkeypatch):
    """With what lies beside it; alone, with a tokenizer from elsewhere."""
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    np.testing.assert_array_equal(
        read(str(folder / "m" / "model.safetensors"), tmp_path).rows, truth(folder / "m")
    )
    demo = data_folder("demo") / "sums-80"
    (tmp_path / "alone").mkdir()
    alone = tmp_path / "alone" / "weights.safetensors"
    shutil.copy(min(demo.glob("*.safetensors")), alone)
    (found,) = screen([str(alone)], tokenizer=str(demo)).checkpoints
    assert found.gaps["cosine"].mean == pytest.approx(whole_gap(alone.parent, found), abs=1e-6)
