"""Files of every format, damaged at random: refused by a sentence, or read as the format's own library does.

Seeds are fixed. An error that is not ours, an alarm after `PATIENCE` seconds of CPU, and more than `MEMORY`
bytes fail a test. The slow turn has 50,000 files of each format, or as many
as the environment variable FUZZ_FILES says.
"""

from __future__ import annotations

import asyncio
import copy
import io
import json
import os
import random
import resource
import signal
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import write_with_words
from gguf import GGUFReader
from gguf_files import matrix, write
from hub_client import FILE
from lmeval_screener.checkpoints.snapshot import open_folder
from lmeval_screener.errors import ScreeningError
from lmeval_screener.tokens.resolution import load_domain, resolve_tokens
from lmeval_screener.tokens.sets import load_token_set
from lmeval_screener.tokens.vocabulary import Vocabulary
from lmeval_screener.weights.files.safetensors import parse_header
from lmeval_screener.weights.files.zip_archive import locate
from lmeval_screener.weights.projection import find_projection, read_rows
from lmeval_screener.weights.rows import WeightFiles
from lmeval_screener.weights.tensors import WeightFile
from safetensors import SafetensorError, deserialize, safe_open
from token_cases import TINY
from tokenizers import Tokenizer

from lmeval_dispersion.errors import LONGEST_MESSAGE, UsageError
from lmeval_dispersion.installation import data_folder

#: Seconds of CPU for one file, and bytes for all: what only a hang and a flood exceed.
PATIENCE, MEMORY = 20, 300 * 2**20
#: Files of the slow turn.
MANY = int(os.environ.get("FUZZ_FILES", "50000"))
TURNS = [0, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
EDGES: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 255, 2**31, 2**53, 2**62, 2**70, 10**400, 0.5, -0.0, 1e308),
    *(
        "",
        "a",
        "²",
        "x" * 5000,
        "9" * 5000,
        "\x00",
        "\ud800",
        "a.b.c",
        "__metadata__",
        "F32",
        "I64",
        "Ġthe",
    ),
    *(
        [],
        [[]],
        {},
        {"": {}},
        [0, 2**62],
        [1, 2, 3],
        ["a", "b"],
        [None] * 30,
        {"a": []},
        {"type": "Sequence"},
    ),
]
EDGES.append(json.loads("[" * 200 + "]" * 200))


@contextmanager
def bounded() -> Iterator[None]:
    """Fail a file that takes too long, instead of waiting for it."""

    def ring(*_: object) -> None:
        raise AssertionError("a file took too long")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def flood(count: int, usual: int, one: Callable[[random.Random], bool]) -> None:
    """Try ``count`` damaged files (0: ``usual``); some must be read, and some refused."""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    read = 0
    refusals = []
    for seed in range(count or usual):
        with bounded():
            try:
                read += one(random.Random(seed))
            except (ScreeningError, UsageError) as error:
                refusals.append(str(error))
            except BaseException as error:
                raise AssertionError(f"seed {seed}") from error
    assert 0 < read < (count or usual)
    assert max(map(len, refusals)) < LONGEST_MESSAGE + 100
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - memory < MEMORY


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values inside a JSON value."""
    inner = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in inner:
        yield (*path, key)
        yield from places(value, (*path, key))


def damaged_json(tree: Any, rng: random.Random) -> Any:
    """A copy with a few values replaced, removed, renamed or doubled."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        every = list(places(tree))
        if not every:
            return tree
        *above, key = rng.choice(every)
        holder = tree
        for step in above:
            holder = holder[step]
        act = rng.randrange(5)
        if act < 3:
            holder[key] = copy.deepcopy(rng.choice(EDGES))
        elif act == 3:
            del holder[key]
        elif isinstance(holder, dict):
            holder[str(rng.choice(EDGES))[:300]] = holder.pop(key)
        else:
            holder.append(copy.deepcopy(rng.choice(holder)))
    return tree


def text_of(tree: Any) -> bytes:
    """JSON as a file; what no writer would write is escaped."""
    return json.dumps(tree).encode()


def damaged_bytes(body: bytes, rng: random.Random) -> bytes:
    """A copy with bytes flipped, cut, inserted or repeated."""
    raw = bytearray(body)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(raw) + 1)
        act = rng.randrange(4)
        if act == 0 and at < len(raw):
            raw[at] = rng.randrange(256)
        elif act == 1:
            del raw[at : at + rng.choice((1, 2, 8, 100))]
        elif act == 2:
            raw[at:at] = rng.choice(
                (b"\xff" * 8, b"\0", b"[", b'"', struct.pack("<Q", 2**40), b"9" * 50)
            )
        else:
            raw[at:at] = raw[at : at + rng.choice((1, 8, 64))] * rng.choice((1, 3, 50))
    return bytes(raw)


# --- safetensors -----------------------------------------------------------------------------------------

HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "U8", "shape": [], "data_offsets": [32, 33]},
}
DATA = bytes(range(33))


@pytest.mark.parametrize("count", TURNS)
def test_safetensors_headers(count):
    def one(rng: random.Random) -> bool:
        body = text_of(damaged_json(HEADER, rng) if rng.random() < 0.7 else HEADER)
        if rng.random() < 0.3:
            body = damaged_bytes(body, rng)
        whole = struct.pack("<Q", len(body)) + body + DATA
        found = parse_header(body, len(whole)).tensors
        with suppress(SafetensorError, ValueError):
            theirs = dict(deserialize(whole))
            assert theirs.keys() == found.keys()
            for name, tensor in found.items():
                assert tuple(theirs[name]["shape"]) == tensor.shape
                assert bytes(theirs[name]["data"]) == whole[tensor.begin : tensor.end]
        return True

    flood(count, 2000, one)


# --- configuration and index -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_with_words(tmp_path_factory.mktemp("fuzz") / "m")


async def rows_of(folder: Path) -> tuple[Any, np.ndarray]:
    projection = await find_projection(open_folder(folder))
    return projection, await read_rows(projection, [0, 5, 7])


def read_as_stored(folder: Path) -> bool:
    """Read the model in a folder: its rows are those that safetensors' reader gives for that name."""
    projection, rows = asyncio.run(rows_of(folder))
    with safe_open(folder / projection.file, "numpy") as file:
        np.testing.assert_array_equal(rows, file.get_tensor(projection.name)[[0, 5, 7]])
    return True


@pytest.mark.parametrize("count", TURNS)
def test_configurations(count, model, tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    config |= {
        "text_config": {"model_type": "llama", "tie_word_embeddings": False},
        "model_type": "hf_olmo",
    }
    config |= {
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "quantization_config": {"bits": 4},
    }
    (folder / "config.json").unlink()

    def one(rng: random.Random) -> bool:
        body = text_of(damaged_json(config, rng))
        (folder / "config.json").write_bytes(
            damaged_bytes(body, rng) if rng.random() < 0.2 else body
        )
        return read_as_stored(folder)

    flood(count, 300, one)


@pytest.mark.parametrize("count", TURNS)
def test_indices_of_shards(count, model, tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    shard = "model-00001-of-00001.safetensors"
    for file in model.iterdir():
        (folder / (shard if file.name == FILE else file.name)).symlink_to(file)
    with safe_open(model / FILE, "numpy") as stored:
        index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(stored.keys(), shard)}

    def one(rng: random.Random) -> bool:
        body = text_of(damaged_json(index, rng))
        place = folder / f"{FILE}.index.json"
        place.write_bytes(damaged_bytes(body, rng) if rng.random() < 0.2 else body)
        return read_as_stored(folder)

    flood(count, 300, one)


# --- torch.save ------------------------------------------------------------------------------------------


def archive(program: bytes, storages: dict[str, bytes]) -> bytes:
    """A zip as torch.save writes it, around any pickle."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr("m/data.pkl", program)
        for name, body in storages.items():
            file.writestr(f"m/data/{name}", body)
        file.writestr("m/version", "3\n")
    return content.getvalue()


#: Pieces of pickles: operations that copy, repeat, nest and name.
PIECES = [
    *(
        b"]",
        b"(",
        b"}",
        b"t",
        b"R",
        b"b",
        b"a",
        b"e",
        b"s",
        b"u",
        b"q\x01",
        b"h\x01",
        b"h\x05",
        b"0",
        b"2",
    ),
    *(
        b"\x85",
        b"\x86",
        b"Q",
        b"N",
        b"K\x07",
        b"J\xff\xff\xff\x7f",
        b"p999999999999\n",
        b"\x8a\x04\xff\xff\xff\x7f",
    ),
    *(
        b"X\x01\x00\x00\x00a",
        b"ctorch\nSize\n",
        b"ccollections\nOrderedDict\n",
        b"cos\nsystem\n",
        b"(lp0\n",
    ),
]


@pytest.mark.parametrize("count", TURNS)
def test_archives_of_torch(count, tmp_path):
    place = tmp_path / "pytorch_model.bin"
    weight = torch.arange(12.0).reshape(3, 4)
    torch.save({"a": weight, "b": weight.t(), "c": torch.arange(3).to(torch.bfloat16)}, place)
    with zipfile.ZipFile(place) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    program = next(body for name, body in parts.items() if name.endswith("data.pkl"))
    storages = {name.rpartition("/")[2]: body for name, body in parts.items() if "/data/" in name}
    whole = place.read_bytes()

    async def described() -> dict[str, Any]:
        snapshot = open_folder(tmp_path)
        found = (await WeightFiles(snapshot).header(place.name)).tensors
        file = WeightFile(snapshot, snapshot.files[place.name])
        return {name: await locate(file, tensor, *tensor.entry) for name, tensor in found.items()}

    def one(rng: random.Random) -> bool:
        if rng.random() < 0.3:
            raw = damaged_bytes(whole, rng)
        elif rng.random() < 0.5:
            raw = archive(damaged_bytes(program, rng), storages)
        else:
            at = rng.randrange(2, len(program))
            inserted = b"".join(rng.choices(PIECES, k=rng.choice((1, 3, 20)))) * rng.choice(
                (1, 1, 50)
            )
            raw = archive(program[:at] + inserted + program[at:], storages)
        place.write_bytes(raw)
        found = asyncio.run(described())
        try:
            theirs = torch.load(place, weights_only=True)
        except Exception:
            return True  # more is refused there
        for name, tensor in found.items():
            if isinstance(theirs, dict) and isinstance(theirs.get(name), torch.Tensor):
                assert tuple(theirs[name].shape) == tensor.shape, name
                if tensor.shape and tensor.is_contiguous and theirs[name].is_contiguous():
                    stored = theirs[name].view(torch.uint8).numpy().tobytes()
                    assert raw[tensor.begin : tensor.end] == stored, name
        return True

    flood(count, 500, one)


# --- GGUF ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", TURNS)
@pytest.mark.filterwarnings("ignore")  # of GGUFReader, on damaged files
def test_gguf_headers(count, tmp_path):
    (place,) = write(
        tmp_path / "m.gguf",
        {"output.weight": ("F16", matrix()), "output_norm.weight": ("F32", matrix()[:1])},
    )
    raw = place.read_bytes()
    end = raw.index(b"output_norm.weight") + 60

    async def tensors() -> dict[str, Any]:
        snapshot = open_folder(tmp_path)
        return dict((await WeightFiles(snapshot).header(place.name)).tensors)

    def one(rng: random.Random) -> bool:
        start = rng.choice((0, 0, 4, end - 200))
        place.write_bytes(raw[:start] + damaged_bytes(raw[start:end], rng) + raw[end:])
        found = asyncio.run(tensors())
        if rng.random() < 0.1:  # their reader is slow
            try:
                theirs = {tensor.name: tensor for tensor in GGUFReader(place).tensors}
            except Exception:
                return True
            for name, tensor in found.items():
                assert theirs[name].data_offset == tensor.begin
                assert tuple(int(n) for n in theirs[name].shape)[::-1] == tensor.shape
        return True

    flood(count, 500, one)


# --- tokenizers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", TURNS)
def test_tokenizers(count):
    data = json.loads((data_folder("demo") / "sums-20" / "tokenizer.json").read_text("utf-8"))
    data["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}]}
    # A few merges and pieces: a copy of all for each file would take most of the time.
    model = data["model"]
    model["merges"] = model["merges"][:200]
    model["vocab"] = {piece: row for piece, row in model["vocab"].items() if row < 500}
    few = {key: value for key, value in data.items() if key != "model"}
    few["model"] = {key: value for key, value in model.items() if key not in ("vocab", "merges")}
    sets = load_domain("math"), load_token_set("reference", "reference")

    def one(rng: random.Random) -> bool:
        tree = damaged_json(few, rng)
        if isinstance(tree.get("model"), dict):
            tree["model"] |= {"vocab": model["vocab"], "merges": model["merges"]}
            if rng.random() < 0.4:
                key = rng.choice(("vocab", "merges"))
                tree["model"][key] = damaged_json(tree["model"][key], rng)
        body = text_of(tree)
        body = damaged_bytes(body, rng) if rng.random() < 0.1 else body
        vocabulary = Vocabulary.from_file("tokenizer.json", body)
        with suppress(ScreeningError):
            resolve_tokens(*sets, vocabulary)
        try:
            theirs = Tokenizer.from_str(body.decode())
        except Exception:
            return True
        except BaseException as panic:  # of Rust
            if type(panic).__name__ != "PanicException":
                raise
            return True
        for word in ("7", " the", "+"):
            row = vocabulary.row(word)
            if row is not None:
                assert theirs.token_to_id(row[1]) == row[0]
        return True

    flood(count, 400, one)


# --- token sets ------------------------------------------------------------------------------------------

#: Pieces of YAML that repeat, name types, nest, and look like dates and numbers.
YAML = [
    *(
        "&a ",
        "*a",
        "<<: *a\n",
        "!!timestamp ",
        "!!int ",
        "!!set ",
        "!!python/name:os.system ",
        "2026-13-45",
        "0x_",
        "1e999",
    ),
    *(
        "[" * 50,
        "{a: ",
        "- ",
        "? ",
        "|\n ",
        "%YAML 9.9\n",
        "---\n",
        "\x00",
        "\ufeff",
        ".inf",
        "1:99:99",
        "'",
        '"\\ud800"',
    ),
]


@pytest.mark.parametrize("count", TURNS)
def test_token_sets(count, tmp_path):
    place = tmp_path / "own.yaml"
    text = f"{TINY}notes: &a [1, 2026-01-02, {{b: c}}]\nsources: *a\n"

    def one(rng: random.Random) -> bool:
        changed = text
        for _ in range(rng.choice((1, 1, 3))):
            at = rng.randrange(len(changed))
            changed = (
                changed[:at]
                + rng.choice(YAML) * rng.choice((1, 1, 20))
                + changed[at + rng.choice((0, 0, 5)) :]
            )
        body = changed.encode()
        place.write_bytes(damaged_bytes(body, rng) if rng.random() < 0.2 else body)
        return bool(load_token_set(str(place)).groups)

    flood(count, 300, one)
