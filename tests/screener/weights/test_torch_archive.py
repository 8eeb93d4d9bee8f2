"""Files of torch.save: what torch itself loads, no pickle that runs, one G with the safetensors sibling."""

from __future__ import annotations

import asyncio
import collections
import io
import json
import os
import pickle
import re
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hub_client import refused, unread
from lmeval_screener import screen
from lmeval_screener.checkpoints.snapshot import open_folder
from lmeval_screener.errors import ScreeningError
from lmeval_screener.weights import rows
from lmeval_screener.weights.files.zip_archive import locate
from lmeval_screener.weights.rows import WeightFiles
from lmeval_screener.weights.tensors import DTYPE_BITS, WeightFile
from safetensors.torch import load_file

from lmeval_dispersion.installation import data_folder

FILE = "pytorch_model.bin"
TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TORCH |= {"F64": torch.float64, "I64": torch.int64}


def read(folder):
    return asyncio.run(WeightFiles(open_folder(folder)).header(FILE)).tensors


def placed(folder, tensor):
    """A described tensor with its exact bytes."""
    snapshot = open_folder(folder)
    return asyncio.run(locate(WeightFile(snapshot, snapshot.files[FILE]), tensor, *tensor.entry))


def refusal(folder: Path, content: bytes, **expected: str) -> ScreeningError:
    (folder / FILE).write_bytes(content)
    return refused(read, folder, **expected)


def values(folder: Path, tensor: Any) -> np.ndarray:
    """The numbers of a described tensor, straight from the file's bytes."""
    raw = (folder / FILE).read_bytes()
    size = DTYPE_BITS[tensor.dtype] // 8
    (rows, columns), (a, b) = tensor.shape, tensor.strides
    begins = [tensor.begin + size * (i * a + j * b) for i in range(rows) for j in range(columns)]
    numbers = b"".join(raw[begin : begin + size] for begin in begins)
    return (
        torch.frombuffer(bytearray(numbers), dtype=TORCH[tensor.dtype])
        .reshape(rows, columns)
        .double()
    )


def unannounced(content: bytes) -> bytes:
    """An archive whose name is UTF-8 without the flag that says so, as older versions of torch write it."""
    content = re.sub(rb"(?s)(PK\x03\x04..|PK\x01\x02....)\x08\x08", b"\\1\x08\x00", content)
    return content.replace(b"pytorch_model/", "pytörch_möd/".encode())


@pytest.mark.parametrize("change", [bytes, unannounced])
def test_every_tensor_is_where_torch_finds_it(tmp_path, change):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(9, 5, generator=generator)
    saved = {
        "plain": weight,
        "half": weight.half(),
        "bf16": weight.bfloat16(),
        "double": weight.double(),
        "longs": torch.arange(12).reshape(3, 4),
        "transposed": weight.t(),
        "slice": weight[2:7, 1:4],
        "parameter": torch.nn.Parameter(weight * 2),
        "empty": torch.zeros(0, 5),
        "scalar": torch.tensor(3.0),
    }
    torch.save(collections.OrderedDict(saved), tmp_path / FILE)
    loaded = torch.load(tmp_path / FILE)
    (tmp_path / FILE).write_bytes(change((tmp_path / FILE).read_bytes()))
    found = read(tmp_path)
    assert found.keys() == saved.keys()
    for key, tensor in saved.items():
        assert found[key].shape == tuple(tensor.shape), key
        if tensor.dim() == 2 and tensor.numel():
            expected = loaded[key].detach().double().numpy()
            np.testing.assert_array_equal(values(tmp_path, placed(tmp_path, found[key])), expected)
    assert found["plain"].entry == found["transposed"].entry == found["slice"].entry
    assert found["plain"].entry != found["parameter"].entry


def test_a_vector_with_gaps_is_read_as_torch_reads_it(tmp_path):
    torch.save({"scales": torch.arange(12.0)[1::3]}, tmp_path / FILE)

    async def numbers():
        files = WeightFiles(open_folder(tmp_path))
        matrix = await files.matrix(FILE, (await files.header(FILE)).tensors["scales"])
        return await matrix.read([0, 2, 3])

    assert asyncio.run(numbers()).tolist() == [[1.0], [7.0], [10.0]]


@pytest.mark.parametrize("key", ["state_dict", "model", "my_key"])
def test_a_state_dict_of_a_module_is_read_and_one_inside_a_checkpoint_is_named(tmp_path, key):
    """transformers 5.24 ends in an AttributeError for a dictionary inside one."""
    module = torch.nn.Sequential(torch.nn.Embedding(7, 3), torch.nn.Linear(3, 2))
    torch.save(module.state_dict(), tmp_path / FILE)
    assert set(read(tmp_path)) == set(module.state_dict())
    torch.save({"epoch": 3, "loss": 0.5, key: module.state_dict()}, tmp_path / FILE)
    refused(read, tmp_path, code="RandomWeights", says=f"torch.load(FILE)['{key}']")


class _Runs:
    """Anything that a pickle can be made to call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def archive(program: bytes) -> bytes:
    """A zip in torch's layout around a pickle."""
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w") as target:
        target.writestr("a/data.pkl", program)
    return body.getvalue()


class _Built:
    def __setstate__(self, state: Any) -> None:
        os._exit(1)


def attacks(marker: Path) -> dict[str, bytes]:
    """Pickles that do something when they are loaded."""
    touch = _Runs(os.system, f"touch {marker}")
    newobj = b"\x80\x02cos\nsystem\n(X\x05\x00\x00\x00touchtR\x81."
    deep = b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b"."
    laughs = b"\x80\x02)" + b"q\x00h\x00\x86" * 200 + b"}h\x00K\x01s."
    return {
        "os.system": pickle.dumps(touch, 2),
        "os.system in a list": pickle.dumps([1, {"a": touch}], 4),
        "eval": pickle.dumps(_Runs(eval, "__import__('os').abort()"), 2),
        "exec by stack": pickle.dumps(_Runs(exec, "import os; os.abort()"), 4),
        "getattr chain": pickle.dumps(_Runs(getattr, _Runs(__import__, "os"), "abort"), 2),
        "nested pickle": pickle.dumps(_Runs(pickle.loads, pickle.dumps(touch)), 2),
        "torch.load": pickle.dumps(_Runs(torch.load, str(marker)), 2),
        "storage from bytes": b"\x80\x02ctorch.storage\n_load_from_bytes\nC\x01a\x85R.",
        "object state": pickle.dumps(_Built(), 2),
        "new object": newobj,
        "inst": b"(X\x05\x00\x00\x00touchios\nsystem\n.",
        "obj": b"(cos\nsystem\nX\x05\x00\x00\x00toucho.",
        "extension": b"\x80\x02\x82\x01.",
        "persistent id that is no storage": b"\x80\x02X\x01\x00\x00\x00aQ.",
        "unknown storage": b"\x80\x02(X\7\0\0\0storagecos\nsystem\nX\1\0\0\x000X\3\0\0\0cpuK\1tQ.",
        "deep nesting": deep,
        "shared nesting as a key": laughs,
        "stack empty": b"\x80\x020.",
        "memo unknown": b"\x80\x02h\x05.",
        "no stop": b"\x80\x02}",
        "no pickle": b"hello",
        "nothing": b"",
        "a number": pickle.dumps(7, 2),
        "a stand-in's state": b"\x80\x02ctorch._utils\n_rebuild_tensor\n}X\x0c\x00\x00\x00__defaults__)sb.",
        "an array of 2^40 bytes": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".",
        "a set of nested tuples": b"\x80\x04\x8f(" + b")" + b"\x94\x68\x00\x86" * 60 + b"\x90.",
        "tensors of another program": pickle.dumps({"a": np.float64(3.0)}, 2),
    }


def test_no_pickle_runs(tmp_path):
    marker = tmp_path / "marker"
    for number, (name, program) in enumerate(attacks(marker).items()):
        error = refusal(tmp_path, archive(program))
        assert error.code in ("UnsafePickle", "BadArchive"), name
        assert number > 10 or error.code == "UnsafePickle", name
        assert not marker.exists(), name


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    place = tmp_path_factory.mktemp("good") / FILE
    torch.save({"lm_head.weight": torch.randn(8, 4)}, place)
    return place.read_bytes()


def zipped(good: bytes, change: Any) -> bytes:
    """The same archive written again, entry by entry."""
    body = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(good)) as source, zipfile.ZipFile(body, "w") as target:
        for info in source.infolist():
            change(target, info.filename, source.read(info))
    return body.getvalue()


def corruptions(good: bytes) -> dict[str, bytes]:
    end = good.rindex(b"PK\5\6")
    directory = struct.unpack_from("<I", good, end + 16)[0]

    def patch(at: int, kind: str, value: int) -> bytes:
        body = struct.pack("<" + kind, value)
        return good[:at] + body + good[at + len(body) :]

    def deflated(target: zipfile.ZipFile, name: str, content: bytes) -> None:
        bomb = b"\0" * 50_000_000 if name.endswith("data/0") else content
        target.writestr(name, bomb, compress_type=zipfile.ZIP_DEFLATED)

    def renamed(new: str) -> Any:
        return lambda target, name, content: target.writestr(
            re.sub("^.*/data/0$", new, name), content
        )

    def twice(target: zipfile.ZipFile, name: str, content: bytes) -> None:
        target.writestr(name, content)
        if name.endswith("data/0"):
            target.writestr(name.replace("data/0", "data/O"), content)

    root = zipfile.ZipFile(io.BytesIO(good)).namelist()[0].split("/")[0]
    return {
        "zip bomb": zipped(good, deflated),
        "parent path": zipped(good, renamed("../../etc/passwd")),
        "absolute path": zipped(good, renamed("/etc/passwd")),
        "backslashes": zipped(good, renamed(r"a\\..\\b")),
        "entry twice": zipped(good, twice).replace(b"data/O", b"data/0"),
        "storage missing": zipped(good, renamed(f"{root}/data/9")),
        "short storage": zipped(
            good, lambda t, n, c: t.writestr(n, c[:-4] if n.endswith("data/0") else c)
        ),
        "big endian": zipped(
            good, lambda t, n, c: t.writestr(n, b"big" if n.endswith("order") else c)
        ),
        "no pickle": zipped(good, lambda t, n, c: None if n.endswith(".pkl") else t.writestr(n, c)),
        "cut off": good[: len(good) // 2],
        "no end": good[:end],
        "directory outside": patch(end + 16, "I", 2**31),
        "directory of 4 GB": patch(end + 12, "I", 2**32 - 2),
        "too many entries": patch(end + 10, "H", 60_000),
        "directory overwritten": patch(directory, "I", 0),
        "entry outside": patch(directory + 42, "I", 2**31),
        "encrypted": patch(directory + 8, "H", 1),
        "a later version of zip": patch(directory + 6, "H", 99),
        "offset of another": patch(directory + 42, "I", 8),
        "not a zip": b"MZ" + good[2:],
        "a page": b"<!doctype html>" * 40,
        "empty": b"",
    }


def test_a_broken_archive_is_named(tmp_path, good):
    broken = corruptions(good)
    assert {
        name: refusal(tmp_path, content).code for name, content in broken.items()
    } == dict.fromkeys(broken, "BadArchive")


def test_a_bare_pickle_says_what_to_do(tmp_path):
    body = io.BytesIO()
    torch.save({"a": torch.zeros(2, 2)}, body, _use_new_zipfile_serialization=False)
    refusal(tmp_path, body.getvalue(), code="LegacyPickle", says="save_pretrained")


class _WithStorages(pickle.Pickler):
    """Writes (key, elements) in a named tuple as torch writes a storage of float32."""

    def persistent_id(self, thing: Any) -> Any:
        return (
            ("storage", torch.FloatStorage, thing.key, "cpu", thing.elements)
            if type(thing) is Stored
            else None
        )


Stored = collections.namedtuple("Stored", "key elements")


@pytest.mark.parametrize(
    ("storage", "offset", "shape", "strides"),
    [
        (Stored("0", 32), -1, (8, 4), (4, 1)),
        (Stored("0", 32), 1, (8, 4), (4, 1)),
        (Stored("0", 32), 0, (8, 4.0), (4, 1)),
        (Stored("0", 32), 0, (8, 4), (4,)),
        (Stored("0", 32), 0, (8, 4), (2**50, 1)),
        (Stored("0", 33), 0, (8, 4), (4, 1)),
        (Stored("0", -32), 0, (8, 4), (4, 1)),
        (Stored("../0", 32), 0, (8, 4), (4, 1)),
        (Stored(0, 32), 0, (8, 4), (4, 1)),
        (7, 0, (8, 4), (4, 1)),
    ],
)
def test_numbers_that_no_tensor_has_are_refused(tmp_path, good, storage, offset, shape, strides):
    def with_program(*arguments: Any) -> bytes:
        body, build = io.BytesIO(), torch._utils._rebuild_tensor_v2
        tensor = _Runs(build, *arguments, False, collections.OrderedDict())
        _WithStorages(body, 2).dump({"lm_head.weight": tensor})
        program = body.getvalue()
        return zipped(good, lambda t, n, c: t.writestr(n, program if n.endswith(".pkl") else c))

    refusal(tmp_path, with_program(storage, offset, shape, strides), code="BadArchive")
    (tmp_path / FILE).write_bytes(with_program(Stored("0", 32), 0, (8, 4), (4, 1)))
    assert read(tmp_path)["lm_head.weight"].shape == (8, 4)


# --- checkpoints of such files ----------------------------------------------------------------------------

DEMO = data_folder("demo") / "sums-20"


def tensors() -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(DEMO.glob("*.safetensors")) for k, v in load_file(file).items()}


def archived(place: Path, **files: Any) -> Path:
    """The demo checkpoint with its weights in archives: file name -> state dictionary."""
    place.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, place / name)
    for name, content in files.items():
        torch.save(content, place / f"{name}.bin")
    return place


def screened(*names: Path) -> Any:
    result = screen([str(name) for name in names])
    assert not result.failed, result.failed
    return result.checkpoints


LAYOUTS = {
    "whole": lambda head: head,
    "a transposed matrix": lambda head: head.t().contiguous().t(),
    "a part of a wider matrix": lambda head: torch.cat([head.flip(1), head], dim=1)[
        :, head.shape[1] :
    ],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_g_with_the_safetensors_sibling(tmp_path, layout):
    state = tensors()
    state["lm_head.weight"] = LAYOUTS[layout](state["lm_head.weight"])
    found = {c.file: c for c in screened(archived(tmp_path / "bin", pytorch_model=state), DEMO)}
    ours, theirs = found["pytorch_model.bin"], found["model-00001-of-00002.safetensors"]
    for kind in ("cosine", "euclidean"):
        assert ours.gaps[kind].mean == theirs.gaps[kind].mean
    assert ours.ratio.mean == theirs.ratio.mean
    assert (ours.scale, ours.dtype, ours.shape) == (theirs.scale, "BF16", theirs.shape)
    assert not ours.notes


def test_of_an_archive_only_what_is_read_is_located(hub, tmp_path, monkeypatch):
    """A hundred matrices cost no requests of their own: bytes stay within 1.5 of what is needed."""
    state = tensors() | {f"model.layers.0.{n}.weight": torch.randn(64, 64) for n in range(100)}
    d = 1024
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        state[name] = torch.randn(len(state[name]), d).bfloat16()
    place = archived(tmp_path / "bin", pytorch_model=state)
    config = json.loads((place / "config.json").read_text()) | {"hidden_size": d}
    (place / "config.json").write_text(json.dumps(config))
    hub.add("org/model", place)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
    (found,) = screen(["org/model"]).checkpoints
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
    place = archived(tmp_path / "bin", **dict(zip(names, (state, head), strict=True)))
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
    place = archived(tmp_path / "bin", pytorch_model=state)
    config = json.loads((place / "config.json").read_text()) | {"tie_word_embeddings": True}
    (place / "config.json").write_text(json.dumps(config))
    (found,) = screened(place)
    assert found.tied
    assert not found.notes, "nothing contradicts anything"
    own = archived(
        tmp_path / "own", pytorch_model=state | {"lm_head.weight": state["lm_head.weight"].clone()}
    )
    (place / "config.json").replace(own / "config.json")
    (found,) = screened(own)
    assert not found.tied
    assert "tied" in found.notes[0]


def test_from_afar_a_transposed_matrix_that_is_large_is_refused(hub, tmp_path, monkeypatch):
    state = tensors()
    state["lm_head.weight"] = LAYOUTS["a transposed matrix"](state["lm_head.weight"])
    hub.add("org/model", archived(tmp_path / "bin", pytorch_model=state))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
    monkeypatch.setattr(rows, "MOST_SCATTERED", 1000)
    unread("org/model", "ScatteredRows", "download the checkpoint")
