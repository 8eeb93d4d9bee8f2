"""PyTorch's own format: tensors of a zip archive by ranges, and a pickle that is read and never run.

``torch.save`` writes an uncompressed zip: ``NAME/data.pkl`` says which tensors there are, ``NAME/data/KEY``
holds the numbers of a storage. The archive's directory stands at its end, so that three ranges (end,
directory, pickle) tell where a tensor's bytes are. The pickle is a program; here its instructions are
followed on plain data: a call is recognised by its name and answered by a description, nothing that it names
is imported or called, and whatever is not on the list is refused.

Source: https://docs.pytorch.org/docs/stable/notes/serialization.html; the zip format, APPNOTE 6.3.10.
"""

from __future__ import annotations

import json
import pickletools
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lmeval_screener.checkpoints.snapshot import Snapshot, content_key
from lmeval_screener.errors import ScreeningError
from lmeval_screener.weights.safetensors import Tensor

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
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1}

_TAIL = 65_557  # the longest end of a zip: its record and a comment
_MAX_DIRECTORY, _MAX_PICKLE = 16 * 2**20, 4 * 2**20
_END, _END64, _LOCATOR, _ENTRY, _LOCAL = b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\1\2", b"PK\3\4"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of an archive.

    Attributes:
        dtype: As safetensors names it.
        shape: Its shape.
        strides: Elements between neighbours, dimension by dimension.
        storage: Name of its storage; tied tensors share one.
        begin: Absolute byte of its first element, if its entry's local header held nothing but the name; what
            else it holds is known once it is read, by `locate`.
        end: Absolute byte behind its last element, likewise.
        entry: Where its storage's entry begins, and the entry's name.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: str
    begin: int
    end: int
    entry: tuple[int, str]


class _Entry(NamedTuple):
    offset: int
    size: int


async def read_archive(snapshot: Snapshot, path: str) -> Mapping[str, StoredTensor]:
    """Every tensor of a file that ``torch.save`` wrote, by name.

    Raises:
        ScreeningError: ``LegacyPickle``, ``BadArchive``, ``UnsafePickle``, or an error of the connection.
    """
    what = f"{path} of {snapshot.repo}"
    key = f"torch/2:{content_key(snapshot, path)}"
    kept = snapshot.cache.read("headers", key) if snapshot.cache is not None else None
    if kept is not None:
        return {
            name: StoredTensor(dtype, tuple(shape), tuple(strides), storage, begin, end, (place, entry))
            for name, (dtype, shape, strides, storage, begin, end, (place, entry)) in json.loads(kept).items()
        }
    size = await snapshot.size(path)
    entries = await _directory(snapshot, path, size, what)
    pickles = [name for name in entries if name.endswith("data.pkl")]
    if len(pickles) != 1 or pickles[0].count("/") != 1:
        raise _bad(what, f"it holds {len(pickles)} data.pkl, expected one; is it a TorchScript model?")
    root = pickles[0].removesuffix("data.pkl")
    if f"{root}byteorder" in entries:
        order = await _content(snapshot, path, entries, f"{root}byteorder", what, 16)
        if order.strip() != b"little":
            raise _bad(what, f"its numbers are {order[:16]!r}-endian")
    program = await _content(snapshot, path, entries, pickles[0], what, _MAX_PICKLE)
    described = _tensors(follow(program, what), what)
    starts = {}
    for storage in sorted({tensor.storage.key for tensor in described.values()}):
        name = f"{root}data/{storage}"
        if name not in entries:
            raise _bad(what, f"the storage {storage!r} is missing")
        starts[storage] = entries[name]
    found = _placed(described, starts, f"{root}data/", what)
    if snapshot.cache is not None:
        fields = {
            name: (t.dtype, t.shape, t.strides, t.storage, t.begin, t.end, t.entry)
            for name, t in found.items()
        }
        snapshot.cache.write("headers", key, json.dumps(fields).encode())
    return found


async def locate(snapshot: Snapshot, path: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of an archive with their exact bytes: one small range for each entry's local header.

    Raises:
        ScreeningError: ``BadArchive``, or an error of the connection.
    """
    what = f"{path} of {snapshot.repo}"
    # The directory's sizes play no part here.
    entries = {t.entry[1]: _Entry(t.entry[0], 0) for t in tensors if t.entry is not None}
    starts = await _starts(snapshot, path, entries, what)
    found = []
    for tensor in tensors:
        shift = 0
        if tensor.entry is not None:
            offset, name = tensor.entry
            shift = starts[name] - offset - 30 - len(name.encode())
        moved = replace(tensor, begin=tensor.begin + shift, end=tensor.end + shift, entry=None)
        if moved.end > await snapshot.size(path):
            raise _bad(what, f"{tensor.name!r} reaches beyond the file")
        found.append(moved)
    return found


async def _directory(snapshot: Snapshot, path: str, size: int, what: str) -> dict[str, _Entry]:
    """Entries of the archive: name -> offset of the local header and bytes of content."""
    begin = max(0, size - _TAIL - 76)
    if size < 22:
        raise _bad(what, f"it has {size} bytes, too few for an archive")
    head, tail = await snapshot.ranges(path, [(0, 4), (begin, size)])
    if head != _LOCAL:
        raise _not_a_zip(head, what)
    at = tail.rfind(_END)
    while at >= 0 and (
        at + 22 > len(tail) or at + 22 + struct.unpack_from("<H", tail, at + 20)[0] != len(tail)
    ):
        at = tail.rfind(_END, 0, at)
    if at < 0:
        raise _bad(what, "it has no directory at its end; the download may be incomplete")
    _, _, _, count, length, start = struct.unpack_from("<4HII", tail, at + 4)
    if at >= 20 and tail[at - 20 : at - 16] == _LOCATOR:
        (place,) = struct.unpack_from("<Q", tail, at - 12)
        if not 0 <= place <= size - 56:
            raise _bad(what, f"its directory's end is said to lie at byte {place}")
        (record,) = await snapshot.ranges(path, [(place, place + 56)])
        if record[:4] != _END64:
            raise _bad(what, "its zip64 record is missing")
        long = struct.unpack_from("<QQQ", record, 32)
        unsaid = (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
        if any(a not in (b, c) for a, b, c in zip((count, length, start), long, unsaid, strict=True)):
            raise _bad(what, "its two directory records contradict each other")
        count, length, start = long
    if length > _MAX_DIRECTORY or start + length > size or count * 46 > length:
        raise _bad(what, f"its directory has {count} entries in {length} bytes at byte {start} of {size}")
    if start >= begin:
        body = tail[start - begin : start - begin + length]
    else:
        (body,) = await snapshot.ranges(path, [(start, start + length)])
    return _entries(body, count, start, what)


def _entries(body: bytes, count: int, limit: int, what: str) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    at = 0
    for _ in range(count):
        if body[at : at + 4] != _ENTRY or at + 46 > len(body):
            raise _bad(what, "its directory is cut off or overwritten")
        flags, method = struct.unpack_from("<HH", body, at + 8)
        packed, size = struct.unpack_from("<II", body, at + 20)
        name_size, extra_size, comment_size = struct.unpack_from("<HHH", body, at + 28)
        (offset,) = struct.unpack_from("<I", body, at + 42)
        end = at + 46 + name_size + extra_size + comment_size
        if end > len(body):
            raise _bad(what, "its directory is cut off")
        name = body[at + 46 : at + 46 + name_size].decode("utf-8", "replace")
        extra = body[at + 46 + name_size : at + 46 + name_size + extra_size]
        packed, size, offset = _long_fields(extra, packed, size, offset, what)
        at = end
        parts = name.split("/")
        if name.startswith("/") or "\\" in name or ".." in parts or "\0" in name:
            raise _bad(what, f"an entry is called {name!r}")
        if name in entries:
            raise _bad(what, f"the entry {name!r} occurs twice")
        if flags & 1 or method != 0 or packed != size:
            raise _bad(what, f"the entry {name!r} is compressed or encrypted, which torch does not write")
        if offset + 30 + size > limit:
            raise _bad(what, f"the entry {name!r} lies at byte {offset} with {size} bytes, outside the file")
        entries[name] = _Entry(offset, size)
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].offset):
        if entry.offset < at:
            raise _bad(what, f"the entry {name!r} overlaps the one before it")
        at = entry.offset + 30 + entry.size
    return entries


def _long_fields(extra: bytes, packed: int, size: int, offset: int, what: str) -> tuple[int, int, int]:
    """Sizes and offset that do not fit 32 bits stand in the zip64 field, in this order."""
    values = [size, packed, offset]
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            place = at + 4
            for index, value in enumerate(values):
                if value == 0xFFFFFFFF:
                    if place + 8 > min(at + 4 + length, len(extra)):
                        raise _bad(what, "a zip64 field is too short")
                    (values[index],) = struct.unpack_from("<Q", extra, place)
                    place += 8
        at += 4 + length
    return values[1], values[0], values[2]


async def _starts(snapshot: Snapshot, path: str, entries: Mapping[str, _Entry], what: str) -> dict[str, int]:
    """Where the content of each entry begins: behind its local header, whose length the directory omits."""
    names = list(entries)
    spans = [(entries[n].offset, entries[n].offset + 30 + len(n.encode())) for n in names]
    heads = await snapshot.ranges(path, spans)
    starts = {}
    for name, head in zip(names, heads, strict=True):
        name_size, extra_size = struct.unpack_from("<HH", head, 26)
        if head[:4] != _LOCAL or head[30 : 30 + name_size] != name.encode():
            raise _bad(what, f"the entry {name!r} is not where the directory says")
        starts[name] = entries[name].offset + 30 + name_size + extra_size
    return starts


async def _content(
    snapshot: Snapshot, path: str, entries: Mapping[str, _Entry], name: str, what: str, most: int
) -> bytes:
    entry = entries[name]
    if entry.size > most:
        raise _bad(what, f"{name!r} has {entry.size} bytes, more than {most}")
    start = (await _starts(snapshot, path, {name: entry}, what))[name]
    (body,) = await snapshot.ranges(path, [(start, start + entry.size)])
    return body


class _Global(NamedTuple):
    module: str
    name: str


class _Storage(NamedTuple):
    dtype: str
    key: str
    elements: int


class _Described(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_MARK = object()
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "INT", "LONG", "FLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("BINSTRING", "SHORT_BINSTRING", "STRING"),
}


def follow(program: bytes, what: str) -> Any:
    """The object that a pickle describes, with tensors as descriptions; nothing in it is called.

    Args:
        program: The pickle.
        what: How to call the file in an error.

    Raises:
        ScreeningError: ``UnsafePickle`` where it asks for anything but tensors in plain containers,
            ``BadArchive`` where it is no pickle.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        operations: Any = pickletools.genops(program)
        for operation, argument, _ in operations:
            name = operation.name
            if name in ("PROTO", "FRAME"):
                continue
            if name == "STOP":
                return stack.pop()
            if name in _LITERALS:
                stack.append(argument)
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name in ("EMPTY_DICT", "EMPTY_LIST"):
                stack.append({} if name == "EMPTY_DICT" else [])
            elif name == "MARK":
                stack.append(_MARK)
            elif name == "POP":
                stack.pop()
            elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
                memo[argument] = stack[-1]
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET", "GET"):
                stack.append(memo[argument])
            elif name in ("TUPLE", "LIST", "DICT"):
                items = _marked(stack)
                stack.append(tuple(items) if name == "TUPLE" else items if name == "LIST" else _dict(items))
            elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
                count = int(name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            elif name in ("SETITEMS", "SETITEM"):
                items = _marked(stack) if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
                stack[-1].update(_dict(items))
            elif name in ("APPENDS", "APPEND"):
                items = _marked(stack) if name == "APPENDS" else [stack.pop()]
                stack[-1].extend(items)
            elif name == "GLOBAL":
                module, _, attribute = argument.partition(" ")
                stack.append(_Global(module, attribute))
            elif name == "STACK_GLOBAL":
                attribute = stack.pop()
                stack.append(_Global(str(stack.pop()), str(attribute)))
            elif name == "BINPERSID":
                stack.append(_storage(stack.pop(), what))
            elif name == "REDUCE":
                arguments = stack.pop()
                stack.append(_called(stack.pop(), arguments, what))
            elif name == "BUILD":
                stack.pop()  # the state of an ordered dictionary: versions of the layout
                if not isinstance(stack[-1], dict):
                    raise _unsafe(what, f"sets the state of {_named(stack[-1])}")
            else:
                raise _unsafe(what, f"uses the instruction {name}")
    except ScreeningError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise _bad(what, f"its pickle is broken ({type(error).__name__})") from error
    raise _bad(what, "its pickle has no end")


def _called(function: Any, arguments: Any, what: str) -> Any:
    """What a call by name stands for."""
    if function == _Global("collections", "OrderedDict"):
        pairs = arguments[0] if arguments else []
        return _dict([part for pair in pairs for part in pair])
    if isinstance(function, _Global) and function.module == "torch._utils":
        if function.name in ("_rebuild_tensor_v2", "_rebuild_tensor", "_rebuild_tensor_v3"):
            storage, offset, shape, strides = arguments[:4]
            if function.name == "_rebuild_tensor_v3":
                storage = storage._replace(dtype=_dtype(arguments[6], what), elements=-1)
            return _described(storage, offset, shape, strides, what)
        if function.name in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
            return arguments[0]
    if function == _Global("torch", "Size"):
        return tuple(arguments[0])
    raise _unsafe(what, f"calls {_named(function)}")


def _described(storage: Any, offset: Any, shape: Any, strides: Any, what: str) -> _Described:
    numbers = [offset, *shape, *strides]
    if not isinstance(storage, _Storage) or len(shape) != len(strides):
        raise _bad(what, "a tensor is described by something else than a storage")
    if any(type(n) is not int or not 0 <= n < 2**48 for n in numbers):
        raise _bad(what, "a tensor has an offset, a shape or strides that are no natural numbers")
    return _Described(storage, offset, tuple(shape), tuple(strides))


def _storage(described: Any, what: str) -> _Storage:
    if not isinstance(described, tuple) or len(described) != 5 or described[0] != "storage":
        raise _unsafe(what, "refers to something that is no storage")
    _, kind, key, _, elements = described
    if not isinstance(key, str) or not key or not key.replace("_", "").isalnum():
        raise _bad(what, "a storage has a name that torch does not give")
    if type(elements) is not int or not 0 <= elements < 2**48:
        raise _bad(what, "a storage has a number of elements that is no natural number")
    untyped = kind == _Global("torch.storage", "UntypedStorage")
    return _Storage("U8" if untyped else _dtype(kind, what), key, elements)


def _dtype(kind: Any, what: str) -> str:
    if not isinstance(kind, _Global) or kind.module != "torch" or kind.name not in DTYPES:
        raise _unsafe(what, f"has elements of the type {_named(kind)}")
    return DTYPES[kind.name]


def _tensors(content: Any, what: str) -> dict[str, _Described]:
    if isinstance(content, dict):
        names = ("state_dict", "model", "module")
        inner = next((content[name] for name in names if isinstance(content.get(name), dict)), None)
        for candidate in (content, inner or {}):
            found = {k: v for k, v in candidate.items() if isinstance(k, str) and isinstance(v, _Described)}
            if found:
                return found
    raise _bad(what, "it holds no tensors by name; is it a state dictionary?")


def _placed(
    described: Mapping[str, _Described], entries: Mapping[str, _Entry], folder: str, what: str
) -> dict[str, StoredTensor]:
    """Tensors with their bytes, as near as the archive's directory tells."""
    found = {}
    for name, tensor in described.items():
        storage, size = tensor.storage, _BYTES[tensor.storage.dtype]
        entry = entries[storage.key]
        if storage.elements >= 0 and storage.elements * size != entry.size:
            raise _bad(what, f"the storage of {name!r} has not the {storage.elements} elements announced")
        last = tensor.offset + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
        if 0 not in tensor.shape and (last + 1) * size > entry.size:
            raise _bad(what, f"{name!r} reaches beyond its storage")
        called = f"{folder}{storage.key}"
        start = entry.offset + 30 + len(called.encode())
        found[name] = StoredTensor(
            storage.dtype,
            tensor.shape,
            tensor.strides,
            storage.key,
            start + tensor.offset * size,
            start + (last + 1) * size,
            (entry.offset, called),
        )
    return found


def _marked(stack: list[Any]) -> list[Any]:
    """What was pushed since the last mark."""
    items = []
    while (item := stack.pop()) is not _MARK:
        items.append(item)
    return items[::-1]


def _dict(items: list[Any]) -> dict[Any, Any]:
    """Pairs as a dictionary. Keys are plain: the hash of a nested tuple can take forever."""
    if not all(key is None or isinstance(key, str | bytes | int | float) for key in items[::2]):
        raise TypeError("a key is no plain value")
    return dict(zip(items[::2], items[1::2], strict=True))


def _named(value: Any) -> str:
    return f"{value.module}.{value.name}" if isinstance(value, _Global) else f"a {type(value).__name__}"


def _not_a_zip(head: bytes, what: str) -> ScreeningError:
    if head[:1] == b"\x80":
        return ScreeningError(
            "LegacyPickle",
            f"cannot be screened because {what} was written by torch before 1.6, as a bare pickle; load it "
            "and save it with save_pretrained",
        )
    return _bad(what, f"it begins with {head!r}, not as a zip archive")


def _unsafe(what: str, does: str) -> ScreeningError:
    return ScreeningError(
        "UnsafePickle",
        f"refused because the pickle of {what} {does}, which no state dictionary needs; nothing of it "
        "was run",
    )


def _bad(what: str, reason: str) -> ScreeningError:
    return ScreeningError(
        "BadArchive",
        f"the archive {what} is broken: {reason}; the file was damaged on its way or at its source, compare "
        "its sha256 or upload it again",
    )
