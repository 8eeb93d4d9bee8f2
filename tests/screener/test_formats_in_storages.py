"""Every format in every storage: G of the whole matrix, by the format's own library."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import test_gguf
import torch
from hub_client import full_matrix
from lmeval_screener import screen
from safetensors.torch import load_file
from storages import ACCOUNT, KEY, azurite, fake_gcs, moto, put_azure, put_gcs, slow_gap
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
def servers(folders):
    """Address of a format's folder, by storage."""
    made, _ = folders
    with (
        moto() as s3,
        azurite() as azure,
        fake_gcs() as gcs,
        WebServer(made) as web,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3.port}",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AZURE_STORAGE_CONNECTION_STRING": f"AccountName={ACCOUNT};AccountKey={KEY};"
            f"BlobEndpoint=http://127.0.0.1:{azure}/{ACCOUNT}",
            "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{gcs}",
        }.items():
            patch.setenv(name, value)
        for kind in FORMATS:
            s3.put(made / kind, kind)
            put_azure(azure, made / kind, kind)
            put_gcs(gcs, made / kind, kind)
        yield {"s3": "s3://box", "azure": "az://box", "gcs": "gs://box", "web": web.endpoint}


@pytest.mark.parametrize("storage", ["s3", "azure", "gcs", "web", "bucket"])
@pytest.mark.parametrize("kind", FORMATS)
def test_g_is_that_of_the_whole_matrix(servers, folders, hub, tmp_path, monkeypatch, storage, kind):
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
    made, quantised = folders
    start = hub.add_bucket("org/box", made) if storage == "bucket" else servers[storage]
    address = f"{start}/{kind}" + ("/m-Q8_0.gguf" if storage == "web" and kind == "gguf" else "")
    (found,) = screen([address]).checkpoints
    if kind == "gguf":
        assert found.gaps["cosine"].mean == pytest.approx(test_gguf.slow_gap(quantised), abs=1e-6)
    else:
        matrix = full_matrix(DEMO / "model-00001-of-00002.safetensors", "lm_head.weight")
        ids = [[t.id for t in side] for side in (found.tokens.domain_tokens, found.tokens.reference_tokens)]
        assert found.gaps["cosine"].mean == pytest.approx(slow_gap(matrix, *ids), abs=1e-6)
    stored = sum(place.stat().st_size for place in (made / kind).iterdir())
    assert 0 < found.bytes_read < 1.5 * stored
    assert 0 < found.requests < 150
    assert np.isfinite(found.gaps["euclidean"].mean)
