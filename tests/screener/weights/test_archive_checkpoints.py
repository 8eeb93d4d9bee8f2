"""pytorch_model.bin: one G with its safetensors sibling, whole and sharded, tied and transposed."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_client import ours, unread
from lmeval_screener import screening
from lmeval_screener.weights import rows as reader
from safetensors.torch import load_file

from lmeval_dispersion.installation import data_folder

DEMO = data_folder("demo") / "sums-20"


def tensors() -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(DEMO.glob("*.safetensors")) for k, v in load_file(file).items()}


def folder(place: Path, **files: Any) -> Path:
    """The demo checkpoint with its weights in archives: file name -> state dictionary."""
    place.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, place / name)
    for name, content in files.items():
        torch.save(content, place / f"{name}.bin")
    return place


def screened(*names: Path) -> Any:
    result = screening.screen([str(name) for name in names])
    assert not result.failed, result.failed
    return result.checkpoints


LAYOUTS = {
    "whole": lambda head: head,
    "a transposed matrix": lambda head: head.t().contiguous().t(),
    "a part of a wider matrix": lambda head: torch.cat([head.flip(1), head], dim=1)[:, head.shape[1] :],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_g_with_the_safetensors_sibling(tmp_path, layout):
    state = tensors()
    state["lm_head.weight"] = LAYOUTS[layout](state["lm_head.weight"])
    found = {c.file: c for c in screened(folder(tmp_path / "bin", pytorch_model=state), DEMO)}
    ours, theirs = found["pytorch_model.bin"], found["model-00001-of-00002.safetensors"]
    for kind in ("cosine", "euclidean"):
        assert ours.gaps[kind].mean == theirs.gaps[kind].mean
    assert ours.ratio.mean == theirs.ratio.mean
    assert (ours.scale, ours.dtype, ours.shape) == (theirs.scale, "BF16", theirs.shape)
    assert not ours.notes


def test_of_an_archive_only_what_is_read_is_located(hub, tmp_path, monkeypatch):
    """A hundred matrices cost no requests of their own: bytes stay within 1.5 of what is needed."""
    state = tensors() | {f"model.layers.9.{n}.weight": torch.randn(64, 64) for n in range(100)}
    d = 1024
    state["lm_head.weight"] = torch.randn(len(state["lm_head.weight"]), d).bfloat16()
    place = folder(tmp_path / "bin", pytorch_model=state)
    hub.add("org/model", place)
    monkeypatch.setattr(screening, "Hub", lambda **options: ours(hub, tmp_path / "cache"))
    (found,) = screening.screen(["org/model"]).checkpoints
    rows = len(found.resolution.domain) + len(found.resolution.reference)
    with zipfile.ZipFile(place / "pytorch_model.bin") as archive:
        directory = sum(46 + len(entry.filename) + len(entry.extra) for entry in archive.infolist())
        program = archive.getinfo("pytorch_model/data.pkl").file_size
    files = sum((place / name).stat().st_size for name in ("config.json", "tokenizer.json"))
    needed = rows * d * 2 + directory + program + files
    assert needed < found.bytes_read < 1.5 * needed
    assert found.requests < rows + 20


def test_shards_by_their_index(tmp_path):
    state = tensors()
    head = {"lm_head.weight": state.pop("lm_head.weight")}
    names = ["pytorch_model-00001-of-00002", "pytorch_model-00002-of-00002"]
    place = folder(tmp_path / "bin", **dict(zip(names, (state, head), strict=True)))
    weights = dict.fromkeys(state, f"{names[0]}.bin") | {"lm_head.weight": f"{names[1]}.bin"}
    index = {"metadata": {"total_size": 1}, "weight_map": weights}
    (place / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (ours, theirs) = sorted(screened(place, DEMO), key=lambda c: c.file, reverse=True)
    assert ours.file == f"{names[1]}.bin"
    assert ours.gaps["cosine"].mean == theirs.gaps["cosine"].mean
    (place / f"{names[1]}.bin").unlink()
    unread(place, "BadIndex", names[1])


def test_a_tied_head_is_the_embedding_stored_once(tmp_path):
    state = tensors()
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    place = folder(tmp_path / "bin", pytorch_model=state)
    config = json.loads((place / "config.json").read_text()) | {"tie_word_embeddings": True}
    (place / "config.json").write_text(json.dumps(config))
    (found,) = screened(place)
    assert found.tied
    assert not found.notes, "nothing contradicts anything"
    own = folder(tmp_path / "own", pytorch_model=state | {"lm_head.weight": state["lm_head.weight"].clone()})
    (place / "config.json").replace(own / "config.json")
    (found,) = screened(own)
    assert not found.tied
    assert "tied" in found.notes[0]


def test_from_afar_a_transposed_matrix_that_is_large_is_refused(hub, tmp_path, monkeypatch):
    state = tensors()
    state["lm_head.weight"] = LAYOUTS["a transposed matrix"](state["lm_head.weight"])
    hub.add("org/model", folder(tmp_path / "bin", pytorch_model=state))
    monkeypatch.setattr(screening, "Hub", lambda **options: ours(hub, tmp_path / "cache"))
    monkeypatch.setattr(reader, "MOST_SCATTERED", 1000)
    unread("org/model", "ScatteredRows", "download the checkpoint")
