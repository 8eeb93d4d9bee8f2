"""PyTorch's own format: tensors of a zip archive by ranges, with a pickle that is read but never run.

``torch.save`` writes an uncompressed zip: ``NAME/data.pkl`` lists the tensors, ``NAME/data/KEY`` holds the
numbers of a storage. The archive's directory is at its end, so that three ranges (end, local header of the
pickle, pickle) locate every tensor's bytes. The pickle is a program; Python's own unpickler follows it, but
replaces every name in it by a stand-in that builds a description: nothing that the pickle names is imported
or called, and names that are not on the list are refused.

Source: https://docs.pytorch.org/docs/stable/notes/serialization.html.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from lmeval_screener.errors import ScreeningError
from lmeval_screener.weights.tensors import DTYPE_BITS, Header, Tensor, WeightFile

#: torch's names of element types -> those of safetensors.
DTYPES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "UntypedStorage": "U8",
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_TAIL = 65_633  # the longest end of a zip: its records and a comment
_MAX_DIRECTORY, _MAX_PICKLE = 16 * 2**20, 4 * 2**20
_LOCAL, _UTF8 = b"PK\3\4", 0x800


async def read_header(file: WeightFile) -> Header:
    """Every tensor of a file that ``torch.save`` wrote, located as far as its directory allows."""
    what = file.what
    entries = await _directory(file)
    pickles = [name for name in entries if name.endswith("data.pkl")]
    if len(pickles) != 1 or pickles[0].count("/") != 1:
        raise _bad(what, f"it holds {len(pickles)} data.pkl, expected one: it may be a TorchScript model")
    root = pickles[0].removesuffix("data.pkl")
    if f"{root}byteorder" in entries:
        order = await _content(file, entries, f"{root}byteorder")
        if order.strip() != b"little":
            raise _bad(what, f"its numbers are {order[:16]!r}-endian")
    program = await _content(file, entries, pickles[0])
    try:
        state = _Unpickler(io.BytesIO(program), encoding="latin1").load()
    except _UnsafeError as error:
        raise ScreeningError(
            "UnsafePickle",
            f"refused because the pickle of {what} {error}, which no state dictionary needs; none of it "
            "was executed",
        ) from error
    except Exception as error:  # whatever else a broken program raises in Python's reader
        raise _bad(what, f"its pickle is broken ({type(error).__name__})") from error
    inner = [state.get(key) for key in ("state_dict", "model", "module")] if isinstance(state, dict) else []
    for tensors in (state, *inner):
        named = tensors.items() if isinstance(tensors, dict) else ()
        described = {k: t for k, t in named if isinstance(k, str) and isinstance(t, _Described)}
        if described:
            return Header({k: _placed(k, t, entries, root, what) for k, t in described.items()})
    raise _bad(what, "it holds no named tensors: check that it is a state dictionary")


async def locate(file: WeightFile, tensor: Tensor, offset: int, name: str) -> Tensor:
    """Find a tensor's exact bytes in an archive, by a small read of its entry's local header."""
    shift = await _start(file, offset, name) - _least_start(offset, name)
    located = tensor._replace(begin=tensor.begin + shift, end=tensor.end + shift, entry=None)
    if located.end > file.size:
        raise _bad(file.what, f"{tensor.name!r} reaches beyond the file")
    return located


async def _directory(file: WeightFile) -> dict[str, zipfile.ZipInfo]:
    """The archive's entries by name, if they are uncompressed and do not overlap."""
    size, what = file.size, file.what
    head = await file.read(0, min(4, size))
    if head[:1] == b"\x80":
        raise ScreeningError(
            "LegacyPickle",
            f"cannot be screened because {what} was written by torch before 1.6, as a bare pickle; load it "
            "and save it with save_pretrained",
        )
    if head != _LOCAL:
        raise _bad(what, f"it begins with {head!r}, unlike a zip archive")
    begin = max(0, size - _TAIL)
    body = await file.read(begin, size)
    while True:
        try:
            # `zipfile` finds a directory at the end of whatever it is given.
            with zipfile.ZipFile(io.BytesIO(body)) as archive:
                break
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error) as error:
            if begin == 0 or len(body) > _MAX_DIRECTORY:
                raise _bad(what, f"its directory cannot be read ({error})") from error
        earlier = max(0, size - 8 * len(body))
        begin, body = earlier, await file.read(earlier, begin) + body
    listed, directory = archive.infolist(), begin + archive.start_dir
    # `zipfile` trusts one of several records and shifts places to fit: a record that differs is forged.
    count, length, start = struct.unpack_from("<HII", body, len(body) - len(archive.comment) - 12)
    held = sum(46 + len(_name(entry)) + len(entry.extra) + len(entry.comment) for entry in listed)
    right = (len(listed), 0xFFFF), (held, 0xFFFFFFFF), (directory, 0xFFFFFFFF)
    if any(said not in known for said, known in zip((count, length, start), right, strict=True)):
        raise _bad(what, f"its record announces {count} entries at byte {start}, which is not its directory")
    entries: dict[str, zipfile.ZipInfo] = {}
    end = 0
    for entry in sorted(listed, key=lambda entry: entry.header_offset):
        name = _name(entry).decode("utf-8", "replace")
        if name.startswith("/") or "\\" in name or ".." in name.split("/") or "\0" in name or name in entries:
            raise _bad(what, f"an entry is called {name!r}" + (" like another" if name in entries else ""))
        if entry.flag_bits & 1 or entry.compress_type or entry.compress_size != entry.file_size:
            raise _bad(what, f"the entry {name!r} is compressed or encrypted, which torch does not write")
        entry.header_offset += begin
        if entry.header_offset < end:
            raise _bad(what, f"the entry {name!r} overlaps the entry before it")
        end = entry.header_offset + 30 + entry.file_size
        if end > directory:
            raise _bad(what, f"the entry {name!r} reaches beyond byte {directory}")
        entries[name] = entry
    return entries


def _name(entry: zipfile.ZipInfo) -> bytes:
    """The name as stored: torch writes UTF-8, even if the entry does not say so."""
    return entry.orig_filename.encode("utf-8" if entry.flag_bits & _UTF8 else "cp437")


async def _start(file: WeightFile, offset: int, name: str) -> int:
    """The offset of an entry's content: after its local header, whose length the directory omits."""
    head = await file.read(offset, _least_start(offset, name))
    name_size, extra_size = struct.unpack_from("<HH", head, 26)
    if head[:4] != _LOCAL or head[30 : 30 + name_size] != name.encode():
        raise _bad(file.what, f"the entry {name!r} is not where the directory says")
    return offset + 30 + int(name_size) + int(extra_size)


def _least_start(offset: int, name: str) -> int:
    """The offset of an entry's content if its local header holds only the name."""
    return offset + 30 + len(name.encode())


async def _content(file: WeightFile, entries: Mapping[str, zipfile.ZipInfo], name: str) -> bytes:
    entry = entries[name]
    if entry.file_size > _MAX_PICKLE:
        raise _bad(file.what, f"{name!r} has {entry.file_size} bytes, more than {_MAX_PICKLE}")
    start = await _start(file, entry.header_offset, name)
    return await file.read(start, start + entry.file_size)


class _UnsafeError(Exception):
    """A request of the pickle that no state dictionary makes."""


class _Dtype(NamedTuple):
    name: str


class _Storage(NamedTuple):
    dtype: str
    key: str
    elements: int | None


class _Described(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _described(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _Described:
    numbers = [offset, *shape, *strides]
    if not isinstance(storage, _Storage) or len(shape) != len(strides):
        raise ValueError("a tensor is described by something other than a storage")
    if any(type(n) is not int or not 0 <= n < 2**48 for n in numbers):
        raise ValueError("a tensor has an offset, a shape or strides that are not natural numbers")
    return _Described(storage, offset, tuple(shape), tuple(strides))


def _described_v3(storage: Any, offset: Any, shape: Any, strides: Any, *more: Any) -> _Described:
    """A tensor whose type is stated apart from its untyped storage: the third value after the strides."""
    return _described(storage._replace(dtype=more[2].name, elements=None), offset, shape, strides)


def _ordered(pairs: Any = ()) -> dict[Any, Any]:
    pairs = list(pairs)
    _plain([key for key, _ in pairs])
    return dict(pairs)


def _plain(keys: Sequence[Any]) -> None:
    """Refuse keys other than plain values: the hash of a nested tuple can take forever."""
    if not all(key is None or isinstance(key, str | bytes | int | float) for key in keys):
        raise ValueError("a key is not a plain value")


#: The stand-in that answers each call in a pickle.
_STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): _ordered,
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor"): _described,
    ("torch._utils", "_rebuild_tensor_v2"): _described,
    ("torch._utils", "_rebuild_tensor_v3"): _described_v3,
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    ("torch._utils", "_rebuild_parameter_with_state"): lambda data, *_: data,
}


class _Unpickler(pickle._Unpickler):  # Python's own, written in Python: its steps can be replaced
    """Builds descriptions in plain containers and refuses any other request of a pickle."""

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _STAND_INS:
            return _STAND_INS[module, name]
        if module in ("torch", "torch.storage") and name in DTYPES:
            return _Dtype(DTYPES[name])
        raise _UnsafeError(f"calls {module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        match pid:
            case ("storage", _Dtype() as dtype, key, _, elements):
                pass
            case _:
                raise _UnsafeError("refers to something that is not a storage")
        if not isinstance(key, str) or not key.replace("_", "").isalnum():
            raise ValueError("a storage has a name that torch does not use")
        if type(elements) is not int or not 0 <= elements < 2**48:
            raise ValueError("a storage has a number of elements that is not a natural number")
        return _Storage(dtype.name, key, elements)

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        if self.stack[-1] not in _STAND_INS.values():
            raise _UnsafeError(f"calls a {type(self.stack[-1]).__name__}")
        self.stack[-1] = self.stack[-1](*arguments)

    def load_build(self) -> None:
        self.stack.pop()  # the state of an ordered dictionary: versions of the layout
        if not isinstance(self.stack[-1], dict):
            raise _UnsafeError(f"sets the state of a {type(self.stack[-1]).__name__}")

    def load_setitem(self) -> None:
        _plain(self.stack[-2:-1])
        super().load_setitem()  # type: ignore[misc]

    def load_setitems(self) -> None:
        _plain(self.stack[::2])
        super().load_setitems()  # type: ignore[misc]

    def load_dict(self) -> None:
        _plain(self.stack[::2])
        super().load_dict()  # type: ignore[misc]

    def refuse(self) -> None:
        raise _UnsafeError("asks for more than tensors in plain containers")

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.DICT[0]] = load_dict
    for _code in (
        *(pickle.INST, pickle.OBJ, pickle.NEWOBJ, pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4),
        *(pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.BYTEARRAY8, pickle.NEXT_BUFFER),
    ):
        dispatch[_code[0]] = refuse


def _placed(
    name: str, tensor: _Described, entries: Mapping[str, zipfile.ZipInfo], root: str, what: str
) -> Tensor:
    """A tensor with its bytes, as if its entry's local header held nothing but the name; see `locate`."""
    storage, called = tensor.storage, f"{root}data/{tensor.storage.key}"
    if called not in entries:
        raise _bad(what, f"the storage {storage.key!r} is missing")
    entry, size = entries[called], DTYPE_BITS[storage.dtype] // 8
    if storage.elements is not None and storage.elements * size != entry.file_size:
        raise _bad(what, f"the storage of {name!r} does not have the announced {storage.elements} elements")
    last = tensor.offset + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
    if math.prod(tensor.shape) and (last + 1) * size > entry.file_size:
        raise _bad(what, f"{name!r} reaches beyond its storage")
    start = _least_start(entry.header_offset, called)
    begin, end = start + tensor.offset * size, start + (last + 1) * size
    place = entry.header_offset, called
    return Tensor(name, storage.dtype, tensor.shape, begin, end, tensor.strides, place)


def _bad(what: str, reason: str) -> ScreeningError:
    return ScreeningError(
        "BadArchive",
        f"the archive {what} is broken: {reason}; the file was damaged in transit or at its source: compare "
        "its sha256 or upload it again",
    )
