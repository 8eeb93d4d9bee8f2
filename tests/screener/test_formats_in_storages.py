"""Every format in every storage: G of the whole matrix, by the format's own library."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import test_gguf
import torch
from checkpoints import slow_gap
from hub_client import full_matrix
from lmeval_screener import screen
from safetensors.torch import load_file
from storages import ACCOUNT, KEY, put_azure, put_gcs
from web_server import WebServer

from lmeval_dispersion.paths import data_folder

DEMO = data_folder("demo") / "sums-20"
FORMATS = ("safetensors", "bin", "gguf")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder for each format; the matrix of the GGUF."""
    made = tmp_path_factory.mktemp("formats")
    shutil.copytree(DEMO, made / "safetensors")
    shutil.copytree(DEMO, made / "bin", ignore=shutil.ignore_patterns("*.safetensors*"))
    state = {k: v for file in sorted(DEMO.glob("*.safetensors")) for k, v in load_file(file).items()}
    torch.save(state, made / "bin" / "pytorch_model.bin")
    (made / "gguf").mkdir()
    matrix = test_gguf.matrix()
    test_gguf.write(
        made / "gguf" / "m-Q8_0.gguf",
        {"token_embd.weight": ("F16", test_gguf.matrix(1)), "output.weight": ("Q8_0", matrix)},
    )
    return made, test_gguf.truth("Q8_0", matrix)


@pytest.fixture(scope="module")
def s3(folders, s3_server):
    for kind in FORMATS:
        s3_server.put(folders[0] / kind, kind)
    settings = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    return "s3://box", {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3_server.port}", **settings}


@pytest.fixture(scope="module")
def azure(folders, azure_port):
    for kind in FORMATS:
        put_azure(azure_port, folders[0] / kind, kind)
    account = f"AccountName={ACCOUNT};AccountKey={KEY}"
    place = f"BlobEndpoint=http://127.0.0.1:{azure_port}/{ACCOUNT}"
    return "az://box", {"AZURE_STORAGE_CONNECTION_STRING": f"{account};{place}"}


@pytest.fixture(scope="module")
def gcs(folders, gcs_port):
    for kind in FORMATS:
        put_gcs(gcs_port, folders[0] / kind, kind)
    return "gs://box", {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{gcs_port}"}


@pytest.fixture(scope="module")
def web(folders):
    with WebServer(folders[0]) as server:
        yield server.endpoint, {}


@pytest.fixture
def bucket(hub, folders, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
    return hub.add_bucket("org/box", folders[0]), {}


@pytest.mark.parametrize("storage", ["s3", "azure", "gcs", "web", "bucket"])
@pytest.mark.parametrize("kind", FORMATS)
def test_g_is_that_of_the_whole_matrix(folders, request, tmp_path, monkeypatch, storage, kind):
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    made, quantised = folders
    start, settings = request.getfixturevalue(storage)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    address = f"{start}/{kind}" + ("/m-Q8_0.gguf" if storage == "web" and kind == "gguf" else "")
    (found,) = screen([address]).checkpoints
    if kind == "gguf":
        assert found.gaps["cosine"].mean == pytest.approx(test_gguf.whole_gap(quantised), abs=1e-6)
    else:
        matrix = full_matrix(DEMO / "model-00001-of-00002.safetensors", "lm_head.weight")
        ids = [[t.id for t in side] for side in (found.resolution.domain, found.resolution.reference)]
        assert found.gaps["cosine"].mean == pytest.approx(slow_gap(matrix[ids[0]], matrix[ids[1]]), abs=1e-6)
    stored = sum(place.stat().st_size for place in (made / kind).iterdir())
    assert 0 < found.bytes_read < 1.5 * stored
    assert 0 < found.requests < 150
    assert np.isfinite(found.gaps["euclidean"].mean)
