"""torch's distributed checkpoints in safetensors: slices are put together, or refused by name."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from checkpoints import header, write_index
from hub_client import read, read_folder, refused
from lmeval_screener import screen
from test_figures import TOKENIZER
from test_figures import V as WORDS

torch = pytest.importorskip("torch")
V, D = 20, 4
CONFIG = {"model_type": "llama", "tie_word_embeddings": False, "vocab_size": V, "hidden_size": D}
HEAD = torch.arange(1.0, V * D + 1).reshape(V, D)


def write_by_torch(folder: Path, parts, config=CONFIG):
    """Files that several processes write, by torch's own writer and planner.

    Each writes its ``parts``: slices of the head, (row, column, numbers).
    """
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import (
        SavePlan,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    v = max(row + part.shape[0] for process in parts for row, _, part in process)
    d = max(column + part.shape[1] for process in parts for _, column, part in process)
    plans, planners = [], []
    for process in parts:
        items, numbers = [], {}
        for row, column, part in process:
            offsets = torch.Size([row, column])
            index = MetadataIndex("lm_head.weight", offsets)
            chunk = ChunkStorageMetadata(offsets, part.shape)
            data = TensorWriteData(
                chunk, TensorProperties.create_from_tensor(part), torch.Size([v, d])
            )
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            numbers[index] = part.contiguous()

        class Planner(checkpoint.DefaultSavePlanner):
            held = numbers

            def resolve_data(self, write_item):
                return self.held[write_item.index]

        plans.append(SavePlan(items))
        planners.append(Planner())
    writer = checkpoint.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    for plan, planner in zip(writer.prepare_global_plan(plans), planners, strict=True):
        writer.write_data(plan, planner).wait()
    return folder


def rows(folder, ids):
    return read_folder(folder, tuple(ids)).rows


def refusal(folder) -> str:
    error = refused(rows, folder, [0])
    assert error.code == "SlicedTensor"
    assert "enable_consolidation=True" in str(error)
    return str(error)


def write_slices(folder, number, **slices):
    """A file as each of several processes writes it: slices by name, and where each begins."""
    bodies = {name: part.contiguous().numpy().tobytes() for name, (_, part) in slices.items()}
    stored = [(name, "F32", part.shape, len(bodies[name])) for name, (_, part) in slices.items()]
    offsets = {name: {"saved_offsets": begin} for name, (begin, _) in slices.items()}
    head = header(stored, DCP_VERSION="1.0", DCP_SHARDING_INFO=json.dumps(offsets))
    place = folder / f"shard-{number:05d}-model-00001-of-00001.safetensors"
    place.write_bytes(head + b"".join(bodies.values()))
    (folder / "config.json").write_text(json.dumps(CONFIG))


def write_slice(folder, number, offsets, rows):
    write_slices(folder, number, **{"lm_head.weight": (offsets, rows)})


def cut(*places):
    """The head cut at (first row, last row, first column, last column)."""
    return [[(a, c, HEAD[a:b, c:d])] for a, b, c, d in places]


@pytest.mark.parametrize("settings", [{"enable_consolidation": True}, {}])
def test_what_one_process_stores_is_read_consolidated_or_not(tmp_path, settings):
    from torch.distributed import checkpoint

    writer = checkpoint.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = {"lm_head.weight": HEAD, "model.norm.weight": torch.ones(D)}
        checkpoint.save(tensors, storage_writer=writer, no_dist=True)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    np.testing.assert_array_equal(rows(tmp_path, [0, 19]), HEAD.numpy()[[0, 19]])


@pytest.mark.parametrize(
    "places",
    [
        pytest.param([(0, 10, 0, D), (10, V, 0, D)], id="by rows"),
        pytest.param([(0, V, 0, 1), (0, V, 1, D)], id="by columns"),
        pytest.param([(0, 7, 0, 2), (0, 7, 2, D), (7, V, 0, 2), (7, V, 2, D)], id="by both"),
        pytest.param([(0, 7, 0, D), (7, V, 0, 3), (7, V, 3, D)], id="unevenly"),
        pytest.param([(i, i + 1, 0, D) for i in range(V)], id="a row each"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_are_put_together(tmp_path, places, dtype):
    parts = [[(row, column, part.to(dtype)) for row, column, part in p] for p in cut(*places)]
    folder = write_by_torch(tmp_path / "m", parts)
    assert len(list(folder.glob("shard-*.safetensors"))) == len(places)
    np.testing.assert_array_equal(rows(folder, list(range(V))), HEAD.to(dtype).float().numpy())
    np.testing.assert_array_equal(rows(folder, [19, 0, 9]), HEAD.numpy()[[19, 0, 9]])


def test_from_afar_only_the_slices_with_needed_rows_are_read(hub, tmp_path):
    hub.add(
        "org/m", write_by_torch(tmp_path / "m", cut((0, 5, 0, D), (5, 10, 0, D), (10, V, 0, D)))
    )

    read(hub, tmp_path / "cache", "org/m", ids=())  # the headers
    before = len(hub.seen("cdn"))
    found = read(hub, tmp_path / "cache", "org/m", ids=(6, 7)).rows
    np.testing.assert_array_equal(found, HEAD.numpy()[[6, 7]])
    assert len(hub.seen("cdn")) - before == 1


@pytest.mark.parametrize(
    ("slices", "says"),
    [
        # As many numbers as the whole has, and yet row 9 twice and row 19 never, by any count of numbers.
        ([([0, 0], HEAD[:10]), ([9, 0], HEAD[9:19, :2]), ([10, 2], HEAD[10:, 2:])], "overlap"),
        ([([0, 0], HEAD[:10])], "fill only 10 × 4 of a matrix of 20 × 4"),  # one process's own disk
        ([([10, 0], HEAD[10:])], "do not fill a matrix of 20 × 4"),
        ([([0, 0], HEAD[:, :2])], "fill only 20 × 2 of a matrix of 20 × 4"),
        ([([0, 0], HEAD[:8]), ([10, 0], HEAD[10:])], "do not fill"),
        ([([0, 0], HEAD[:12]), ([10, 0], HEAD[10:])], "overlap"),
        ([([0, 0], HEAD[:10]), ([0, 0], HEAD[:10]), ([10, 0], HEAD[10:15])], "overlap"),
        ([([0, 0.5], HEAD)], "does not say which rows"),
        ([("x", HEAD)], "does not say which rows"),
    ],
)
def test_what_is_not_known_to_be_the_whole_is_refused_by_name(tmp_path, slices, says):
    for number, (offsets, part) in enumerate(slices, start=1):
        write_slice(tmp_path, number, offsets, part)
    assert says in refusal(tmp_path)


def test_fewer_rows_than_the_tokenizer_names_are_never_taken(tmp_path):
    """config.json may be that of a smaller vocabulary: the rows that T and R need are there nevertheless."""
    head = torch.randn(WORDS, 8, generator=torch.Generator().manual_seed(0))
    names = []
    for count in (WORDS - 10, WORDS):
        parts = [[(0, 0, head[:200])], [(200, 0, head[200:count])]]
        config = CONFIG | {"vocab_size": count, "hidden_size": 8}
        folder = write_by_torch(tmp_path / str(count), parts, config)
        (folder / "tokenizer.json").write_bytes(TOKENIZER)
        names.append(str(folder))
    result = screen(names)
    (failed,), (whole,) = result.failed, result.checkpoints
    assert failed.error == "SlicedTensor"
    assert (
        f"its {WORDS - 10} rows are fewer than the {WORDS} tokens of the tokenizer"
        in failed.message
    )
    assert whole.shape == (WORDS, 8)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00001.safetensors"])
def test_slices_under_the_usual_file_names_are_refused_too(tmp_path, name):
    write_slice(tmp_path, 1, [0, 0], HEAD[:10])
    (file,) = tmp_path.glob("shard*")
    file.rename(tmp_path / name)
    write_index(tmp_path, {"lm_head.weight": name})  # of no meaning beside model.safetensors
    assert "fill only 10 × 4 of a matrix of 20 × 4" in refusal(tmp_path)


def test_without_sizes_in_the_configuration_nothing_says_that_it_is_whole(tmp_path):
    write_slice(tmp_path, 1, [0, 0], HEAD)
    assert rows(tmp_path, [1]).shape == (1, D)
    (tmp_path / "config.json").write_text("{}")
    assert "does not state vocab_size and hidden_size" in refusal(tmp_path)
