"""The final norm in front of the rows: the same numbers from every format, read beside the rows."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_distributed_checkpoint as distributed
from checkpoints import head_and_embedding, write_checkpoint, write_qwen_7b
from hub_client import within
from lmeval_screener.checkpoints.account import Account
from lmeval_screener.checkpoints.hub import Hub
from lmeval_screener.checkpoints.snapshot import open_folder
from lmeval_screener.weights.projection import FinalNorm, find_projection, read_rows_and_norm

IDS = [7, 3, 90, 119]


def norm_of(folder: Path, ids: list[int] = IDS) -> FinalNorm:
    async def work() -> FinalNorm:
        return (await read_rows_and_norm(await find_projection(open_folder(folder)), ids))[1]

    return asyncio.run(work())


def tensors(dtype: str = "F32", norm: str = "model.norm.weight", **more: Any) -> dict[str, Any]:
    stored = head_and_embedding(dtype=dtype)
    stored[norm] = ("F32", np.linspace(-1, 2, 16))
    stored.pop("model.norm.weight") if norm != "model.norm.weight" else None
    return stored | more


GAMMA = np.linspace(-1, 2, 16).astype(np.float32)


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3"])
def test_of_safetensors_in_the_heads_file_or_another(tmp_path, shards, dtype):
    found = norm_of(write_checkpoint(tmp_path / "m", tensors(dtype), shards=shards))
    assert (found.name, found.kind, found.reason) == ("model.norm.weight", "rms", "")
    np.testing.assert_array_equal(found.weight, GAMMA)


def test_of_an_archive(tmp_path):
    torch = pytest.importorskip("torch")
    folder = write_checkpoint(tmp_path / "m", {})
    (folder / "model.safetensors").unlink()
    state = {"lm_head.weight": torch.randn(120, 16), "model.norm.weight": torch.tensor(GAMMA)}
    torch.save(state, folder / "pytorch_model.bin")
    np.testing.assert_array_equal(norm_of(folder).weight, GAMMA)
    torch.save(state | {"model.norm.weight": torch.randn(32)[::2]}, folder / "pytorch_model.bin")
    assert "16 floating-point numbers" in norm_of(folder).reason


@pytest.mark.parametrize("cuts", [[0, 4], [0, 1, 4], [0, 2, 3, 4]])
def test_of_slices(tmp_path, cuts):
    gamma = distributed.torch.tensor([0.5, -2.0, 3.0, 1.0])
    for number, (a, b) in enumerate(pairwise(cuts)):
        first = 5 * number
        rows = distributed.HEAD[first : first + 5 if b < 4 else None]
        slices = {"lm_head.weight": ([first, 0], rows), "model.norm.weight": ([a], gamma[a:b])}
        distributed.write_slices(tmp_path, number + 1, **slices)
    np.testing.assert_array_equal(norm_of(tmp_path, [0, 19]).weight, gamma)


@pytest.mark.parametrize(
    ("config", "changes", "kind", "plus"),
    [
        ({"model_type": "gemma2"}, {}, "rms", 1),
        ({"model_type": "cohere"}, {}, "layer", 0),
        ({"model_type": "stablelm"}, {"model.norm.bias": ("F32", np.zeros(16))}, "layer", 0),
        ({"model_type": "new_wrapper", "text_config": {"model_type": "gemma3_text"}}, {}, "rms", 1),
        ({"model_type": "olmo"}, {"model.norm.weight": None}, "layer", None),
    ],
)
def test_kinds_of_norm(tmp_path, config, changes, kind, plus):
    config = {"tie_word_embeddings": False} | config
    stored = {name: value for name, value in tensors(**changes).items() if value}
    found = norm_of(write_checkpoint(tmp_path / "m", stored, config=config))
    assert found.kind == kind
    weight = np.ones(16) if plus is None else GAMMA.astype(float) + plus
    np.testing.assert_allclose(found.weight, weight, rtol=1e-7)
    rows = np.random.default_rng(0).normal(size=(3, 16)).astype(np.float32)
    expected = rows.astype(float) * weight
    expected -= expected.mean(axis=1, keepdims=True) if kind == "layer" else 0
    np.testing.assert_allclose(found.effective(rows), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("config", "norm", "reason"),
    [
        ({}, "model.norm.weight", "config.json has no model_type"),
        (
            {"model_type": "foo"},
            "model.norm.weight",
            "the final normalisation layer of foo is not known",
        ),
        (
            {"model_type": "llama", "text_config": {"model_type": "foo"}},
            "model.norm.weight",
            "layer of foo",
        ),
        (
            {"model_type": "hf_olmo", "layer_norm_type": "new"},
            "model.norm.weight",
            "the final normalisation layer of hf_olmo",
        ),
        ({"model_type": "bart"}, "model.norm.weight", "bart has no final norm"),
        ({"model_type": "llama"}, "model.last.weight", "no final norm with a known name is stored"),
    ],
)
def test_what_is_not_known_is_said(tmp_path, config, norm, reason):
    settings = {"tie_word_embeddings": False} | config
    found = norm_of(write_checkpoint(tmp_path / "m", tensors(norm=norm), config=settings))
    assert (found.weight, found.kind) == (None, None)
    assert reason in found.reason
    with pytest.raises(ValueError, match="expected a known final norm"):
        found.effective(np.ones((3, 16)))


@pytest.fixture
def from_afar(hub, tmp_path):
    """The norm of a folder on a Hub, with the requests and bytes that rows and norm cost."""

    def read(folder: Path) -> tuple[FinalNorm, int, int]:
        hub.add("org/m", folder)

        async def work(client: Hub, account: Account) -> tuple[FinalNorm, int, int]:
            snapshot = await client.snapshot("org/m", None, account)
            projection = await find_projection(snapshot)
            start = snapshot.account.requests, snapshot.account.bytes_read
            _, norm = await read_rows_and_norm(projection, IDS)
            return (
                norm,
                snapshot.account.requests - start[0],
                snapshot.account.bytes_read - start[1],
            )

        return within(work, tmp_path / "cache", endpoint=hub.endpoint)

    return read


def test_from_afar_it_costs_one_range_and_7_kb(from_afar, tmp_path):
    draw = np.random.default_rng(0)
    rows = {i: draw.normal(size=3584) for i in IDS}
    norm, requests, size = from_afar(write_qwen_7b(tmp_path / "m", rows=rows))
    assert requests == len(IDS) + 1
    assert size == (len(IDS) + 1) * 3584 * 2
    assert "zero" in norm.reason, "the sparse file holds no numbers there"


def test_from_afar_in_another_shard_it_costs_that_shards_header(from_afar, tmp_path):
    blocks = {
        f"model.layers.{n}.mlp.up_proj.weight": ("F32", np.zeros((16, 512))) for n in range(40)
    }
    norm, requests, size = from_afar(write_checkpoint(tmp_path / "m", tensors() | blocks, shards=3))
    np.testing.assert_array_equal(norm.weight, GAMMA)
    assert requests <= len(IDS) + 4  # where the shard lies, its header, the weight
    assert size < len(IDS) * 64 + 6000
