"""Stored tensors: where their bytes lie, by a safetensors header, and those bytes as numbers.

Written for untrusted and remote files. A safetensors header is accepted only if it fits its file exactly: a
length that is off by ten shifts every row and is seen by nothing but the sum 8 + N + data = file size.

Source: the format's description, https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_screener.checkpoints import FileEntry, Snapshot, content_key
from lmeval_screener.errors import ScreeningError

#: Bits per element of every dtype that the format knows; sub-byte ones count in bits.
DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
#: Dtypes whose numbers are the weights themselves. Everything else is packed or scaled.
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
#: Those that may have scales beside them.
SCALED_DTYPES = ("F8_E4M3", "F8_E5M2")
#: The format's own limit.
MAX_HEADER = 100_000_000


class Tensor(NamedTuple):
    """A tensor of one file, at its absolute byte range ``[begin, end)``.

    Attributes:
        strides: Elements between neighbours, dimension by dimension; None: they lie end to end.
        entry: Of a tensor in an archive, whose exact place is not known yet: offset of its entry and the
            entry's name; see ``torch_archive.locate``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    strides: tuple[int, ...] | None = None
    entry: tuple[int, str] | None = None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file of weights.

    Attributes:
        tensors: Every tensor by name, as stored.
        slices: Offsets of those that torch's distributed checkpoint stored as a slice under the usual name
            (``DCP_SHARDING_INFO``); None where the entry is no list of offsets.
        pairs: The values of a GGUF header that are read, by key.
    """

    tensors: Mapping[str, Tensor]
    slices: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)
    pairs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """Elements of all tensors together; those that share their bytes count once."""
        return sum({(t.begin, t.end): t.elements for t in self.tensors.values() if t.elements}.values())


class WeightFile:
    """A file of weights whose header is to be read; `keep` keeps on disk what turned out right."""

    def __init__(self, snapshot: Snapshot, entry: FileEntry) -> None:
        self.snapshot, self.path, self.size = snapshot, entry.path, entry.size
        self.what = f"{entry.path} of {snapshot.repo}"
        self._fetched: dict[str, bytes] = {}

    async def read(self, begin: int, end: int) -> bytes:
        """The bytes ``[begin, end)``."""
        cache, key = self.snapshot.cache, f"{content_key(self.snapshot, self.path)}[{begin}:{end}]"
        body = cache.read("headers", key) if cache else None
        if body is None:
            (body,) = await self.snapshot.ranges(self.path, [(begin, end)])
            self._fetched[key] = body
        return body

    def keep(self) -> None:
        """Keep what was read."""
        for key, body in self._fetched.items():
            if self.snapshot.cache:
                self.snapshot.cache.write("headers", key, body)


async def read_header(file: WeightFile, guess: int = 65_536) -> Header:
    """Header of a ``.safetensors`` file, in one request if it fits the guess (bytes), else in two."""
    size = file.size
    start = await file.read(0, min(guess, size))
    length = parse_length(start, size, file.what)
    body = start[8 : 8 + length]
    if len(body) < length:
        body += await file.read(len(start), 8 + length)
    return parse_header(body, size, file.what)


def parse_length(start: bytes, file_size: int, what: str) -> int:
    """Length of the JSON header, from the first 8 bytes."""
    if len(start) < 8 or file_size < 10:
        raise _bad(what, f"the file is {file_size} bytes, too short for a safetensors file")
    (length,) = struct.unpack("<Q", start[:8])
    if length > MAX_HEADER or 8 + length > file_size:
        raise _bad(what, f"its first 8 bytes announce a header of {length} bytes in a file of {file_size}")
    return int(length)


def parse_header(body: bytes, file_size: int, what: str) -> Header:
    """Tensors of a header, if everything in it holds.

    Checked: JSON without duplicate keys, every value of its type (numbers are ints, not bools, floats or
    strings), known dtypes, shape × dtype = bytes, and the tensors laid end to end from the first byte of data
    to the last byte of the file.
    """
    try:
        fields = json.loads(body.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise _bad(what, f"it is not valid JSON ({reason})") from error
    if not isinstance(fields, dict):
        raise _bad(what, "it is not a JSON object")
    slices = _slices(fields.pop("__metadata__", None))
    at = 8 + len(body)
    tensors = {name: _tensor(name, entry, at, what) for name, entry in fields.items()}
    for tensor in sorted(tensors.values(), key=lambda t: (t.begin, t.end)):
        if tensor.begin != at:
            word = "overlaps the one before it" if tensor.begin < at else "leaves a gap before it"
            raise _bad(what, f"tensor {tensor.name!r} {word} (begins at {tensor.begin}, expected {at})")
        at = tensor.end
    if at != file_size:
        raise _bad(what, f"its tensors end at byte {at}, but the file has {file_size} bytes")
    return Header(tensors, slices)


def _tensor(name: str, entry: Any, offset: int, what: str) -> Tensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _bad(what, f"the entry of {name!r} is not exactly dtype, shape and data_offsets")
    dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _bad(what, f"the dtype {dtype!r} of {name!r} is unknown")
    if not _naturals(shape):
        raise _bad(what, f"the shape {shape!r} of {name!r} is not a list of natural numbers")
    if not _naturals(span) or len(span) != 2:
        raise _bad(what, f"the data_offsets {span!r} of {name!r} are not two natural numbers")
    tensor = Tensor(name, dtype, tuple(shape), offset + span[0], offset + span[1])
    if tensor.elements * DTYPE_BITS[dtype] != 8 * (span[1] - span[0]):
        raise _bad(what, f"{name!r}: {dtype} of shape {tuple(shape)} does not fill {span[1] - span[0]} bytes")
    return tensor


def _slices(metadata: Any) -> dict[str, tuple[int, ...] | None]:
    """Offsets by tensor, from the metadata that torch 2.9 and later write with distributed checkpoints."""
    stated = metadata.get("DCP_SHARDING_INFO") if isinstance(metadata, dict) else None
    try:
        entries = json.loads(stated) if isinstance(stated, str) else None
    except (ValueError, RecursionError):
        entries = None
    slices: dict[str, tuple[int, ...] | None] = {}
    for name, entry in entries.items() if isinstance(entries, dict) else ():
        offsets = entry.get("saved_offsets") if isinstance(entry, dict) else None
        slices[name] = tuple(offsets) if offsets and _naturals(offsets) else None
    return slices


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(n) is int and 0 <= n < 2**62 for n in values)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key occurs twice")
    return fields


def _bad(what: str, reason: str) -> ScreeningError:
    return ScreeningError(
        "BadHeader",
        f"the safetensors header of {what} is broken: {reason}; the file was damaged on its way or at its "
        "source, compare its sha256 or upload it again",
    )


def decode_rows(body: bytes, dtype: str, width: int) -> NDArray[np.float32]:
    """Rows of a matrix as float32: exact but for F64, which is rounded (beyond float32's range to infinity).

    Returns:
        Array of shape (rows, width).
    """
    flat: NDArray[np.float32]
    if dtype == "BF16":
        flat = (np.frombuffer(body, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    elif dtype in _CODES:
        flat = _CODES[dtype][np.frombuffer(body, np.uint8)]
    else:
        with np.errstate(over="ignore"):
            flat = np.frombuffer(body, f"<f{DTYPE_BITS[dtype] // 8}").astype(np.float32)
    return flat.reshape(-1, width)


def _codes() -> dict[str, NDArray[np.float32]]:
    """All 256 values of the 8-bit floats (OCP 8-bit formats): parts of float16, or an exponent alone."""
    code = np.arange(256, dtype="<u2")
    e4m3 = ((code & 0x7F) << 7 | (code & 0x80) << 8).view("<f2").astype(np.float32) * np.float32(256)
    e4m3[[0x7F, 0xFF]] = np.nan
    e8m0 = np.where(code == 255, np.nan, np.exp2(code - 127.0))
    e5m2 = (code << 8).view("<f2")
    return {"F8_E4M3": e4m3, "F8_E5M2": e5m2.astype(np.float32), "F8_E8M0": e8m0.astype(np.float32)}


_CODES = _codes()
