"""torch's distributed checkpoints in safetensors: a slice is never taken for the whole."""

from __future__ import annotations

import asyncio
import json
import shutil
import warnings

import numpy as np
import pytest
from checkpoints import header
from lmeval_screener.checkpoints.local import open_folder
from lmeval_screener.errors import ScreeningError
from lmeval_screener.weights.projection import find_projection
from lmeval_screener.weights.rows import read_rows

torch = pytest.importorskip("torch")
V, D = 20, 4
CONFIG = {"model_type": "llama", "tie_word_embeddings": False, "vocab_size": V, "hidden_size": D}
HEAD = torch.arange(1.0, V * D + 1).reshape(V, D)


@pytest.fixture
def save(tmp_path):
    """Saves tensors by torch's own writer, one process."""

    def one(**settings):
        from torch.distributed import checkpoint

        writer = checkpoint.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True, **settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tensors = {"lm_head.weight": HEAD, "model.norm.weight": torch.ones(D)}
            checkpoint.save(tensors, storage_writer=writer, no_dist=True)
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        return tmp_path

    return one


def rows(folder, ids):
    async def work():
        snapshot = open_folder(folder)
        return await read_rows(snapshot, await find_projection(snapshot), ids)

    return asyncio.run(work())


def write_slice(folder, number, offsets, rows):
    """A file as each of several processes writes it: a slice and where it begins."""
    info = json.dumps({"lm_head.weight": {"saved_offsets": offsets}})
    body = rows.numpy().astype("<f4").tobytes()
    head = header(
        [("lm_head.weight", "F32", rows.shape, len(body))], DCP_VERSION="1.0", DCP_SHARDING_INFO=info
    )
    (folder / f"shard-{number:05d}-model-00001-of-00001.safetensors").write_bytes(head + body)
    (folder / "config.json").write_text(json.dumps(CONFIG))


def test_a_consolidated_checkpoint_is_read(save):
    folder = save(enable_consolidation=True)
    np.testing.assert_array_equal(rows(folder, [0, 19]), HEAD.numpy()[[0, 19]])


def test_one_process_stores_the_whole(save):
    np.testing.assert_array_equal(rows(save(), [3, 19]), HEAD.numpy()[[3, 19]])


@pytest.mark.parametrize(
    "slices",
    [
        [([0, 0], HEAD[:10]), ([10, 0], HEAD[10:])],  # by rows
        [([0, 0], HEAD[:, :2]), ([0, 2], HEAD[:, 2:])],  # by columns
        [([0, 0], HEAD[:10])],  # one process's own disk
        [([10, 0], HEAD[10:])],
        [([0, 0], HEAD[:, :2].contiguous())],
        [([0, 0.5], HEAD)],
        [("x", HEAD)],
    ],
)
def test_slices_are_refused_by_name(tmp_path, slices):
    for number, (offsets, part) in enumerate(slices, start=1):
        write_slice(tmp_path, number, offsets, part.contiguous())
    with pytest.raises(ScreeningError, match="enable_consolidation=True") as raised:
        rows(tmp_path, [0])
    assert raised.value.code == "SlicedTensor"


@pytest.mark.parametrize("name", ["model.safetensors", "index"])
def test_slices_under_the_usual_file_names_are_refused_too(tmp_path, name):
    write_slice(tmp_path, 1, [0, 0], HEAD[:10])
    (file,) = tmp_path.glob("shard*")
    if name == "index":
        content = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
        name = "model-00001-of-00001.safetensors"
    shutil.move(file, tmp_path / name)
    with pytest.raises(ScreeningError) as raised:
        rows(tmp_path, [0])
    assert raised.value.code == "SlicedTensor"


def test_without_sizes_in_the_configuration_nothing_says_that_it_is_whole(tmp_path):
    write_slice(tmp_path, 1, [0, 0], HEAD)
    assert rows(tmp_path, [1]).shape == (1, D)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ScreeningError) as raised:
        rows(tmp_path, [0])
    assert raised.value.code == "SlicedTensor"
