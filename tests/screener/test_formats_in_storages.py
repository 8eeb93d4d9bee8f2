"""Every format in every storage: G of the whole matrix, by the format's own library."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import test_gguf
import torch
from faulty_proxy import WebServer
from hub_client import full_matrix, gap_of
from lmeval_screener import screen
from safetensors.torch import load_file

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


@pytest.fixture(params=["s3_server", "azure_server", "gcs_server", "web", "bucket"])
def storage(request, folders, monkeypatch, hub):
    """The address of the folders in each storage."""
    if request.param == "web":
        with WebServer(folders[0]) as server:
            yield server.endpoint
    elif request.param == "bucket":
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        yield hub.add_bucket("org/box", folders[0])
    else:
        store = request.getfixturevalue(request.param)
        store.use(monkeypatch)
        yield store.put(folders[0], "formats")


@pytest.mark.parametrize("kind", FORMATS)
def test_g_is_that_of_the_whole_matrix(folders, tmp_path, monkeypatch, storage, kind):
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    made, quantised = folders
    is_file = storage.startswith("http") and kind == "gguf"
    address = f"{storage}/{kind}" + ("/m-Q8_0.gguf" if is_file else "")
    (found,) = screen([address]).checkpoints
    plain = full_matrix(DEMO / "model-00001-of-00002.safetensors", "lm_head.weight")
    expected = gap_of(quantised if kind == "gguf" else plain, found)
    assert found.gaps["cosine"].mean == pytest.approx(expected, abs=1e-6)
    stored = sum(place.stat().st_size for place in (made / kind).iterdir())
    assert 0 < found.bytes_read < 1.5 * stored
    assert 0 < found.requests < 150
    assert np.isfinite(found.gaps["euclidean"].mean)
