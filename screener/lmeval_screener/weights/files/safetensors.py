"""Headers of safetensors files.

Written for untrusted and remote files. A header is accepted only if it fits its file exactly: a
length that is off by ten shifts every row, and only the sum 8 + N + data = file size reveals it.

Source: the format's description, https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from lmeval_dispersion.errors import count
from lmeval_screener.budgets import DIMENSIONS, HEADER, NAME, in_steps, parsed
from lmeval_screener.weights.tensors import DTYPE_BITS, DamagedError, Header, Tensor, WeightFile

#: One object for each dtype's name: a header repeats them for every tensor.
_DTYPES = {name: name for name in DTYPE_BITS}
_KEYS = {"dtype", "shape", "data_offsets"}


class _Entry(NamedTuple):
    """A tensor as its header describes it: a fraction of the memory of the entry's mapping and lists."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


async def read_header(file: WeightFile) -> Header:
    """Read the header of a safetensors file, in one request or two.

    Raises:
        ScreeningError: ``BadHeader``: the header is broken, or contradicts the file.
    """
    start = await file.read(0, min(file.guess, file.size))
    length = parse_length(start, file.size)
    body = start[8 : 8 + length]
    if len(body) < length:
        body += await file.read(len(start), 8 + length)
    return parse_header(body, file.size)


def parse_length(start: bytes, file_size: int) -> int:
    """Return the length of the JSON header in bytes, which the first 8 bytes of a file state.

    Args:
        start: The first bytes of the file.
        file_size: Size of the whole file in bytes.

    Raises:
        ScreeningError: ``BadHeader``: the file is too short for a header, or for the stated length,
            or that length is above the limit.
    """
    if len(start) < 8 or file_size < 10:
        size = count(file_size, "byte")
        raise _bad(f"the file has only {size}, too few for a safetensors file")
    (length,) = struct.unpack("<Q", start[:8])
    if length > HEADER.size:
        raise _bad(
            f"its first 8 bytes announce a header of {length:,} bytes, above the limit of "
            f"{HEADER.size:,}"
        )
    if 8 + length > file_size:
        raise _bad(
            f"its first 8 bytes announce a header of {length:,} bytes, but the file has only "
            f"{file_size:,} bytes"
        )
    return int(length)


def parse_header(body: bytes, file_size: int) -> Header:
    """Parse the JSON header of a safetensors file, and check it against the file's size.

    The header must be JSON without duplicate keys, with known dtypes, and with whole numbers as
    shapes and offsets. The shape and dtype of each tensor must give its number of bytes, and the
    tensors must lie end to end, up to the last byte of the file.

    Args:
        body: The header, without the 8 bytes that state its length.
        file_size: Size of the whole file in bytes.

    Raises:
        ScreeningError: ``BadHeader``: the header breaks one of these rules.
    """
    if not body.startswith(b"{"):
        raise _bad(f"it begins with {body[:1]!r}, not with a brace")
    try:
        fields = parsed(body, HEADER, hook=_of_pairs)
    except ValueError as error:
        raise _bad(f"it is not valid JSON ({error})") from error
    if not isinstance(fields, dict):
        raise _bad(
            "it is the entry of one tensor (dtype, shape, data_offsets), where an object with an "
            "entry for each tensor is expected",
            "save the model again with save_pretrained",
        )
    metadata = fields.pop("__metadata__", None)
    if not isinstance(metadata, dict):
        metadata = {}
    writer = metadata.get("format")
    at = 8 + len(body)
    tensors = {}
    for name in in_steps(list(fields)):
        tensors[name] = _tensor(name, fields.pop(name), at)
    for tensor in sorted(tensors.values(), key=lambda t: (t.begin, t.end)):
        if tensor.begin != at:
            word = (
                "overlaps the tensor before it" if tensor.begin < at else "leaves a gap before it"
            )
            raise _bad(f"tensor {tensor.name!r} {word} (begins at {tensor.begin}, expected {at})")
        at = tensor.end
    if at != file_size:
        raise _bad(f"its tensors end at byte {at:,}, but the file has {file_size:,} bytes")
    return Header(tensors, _slices(metadata), writer=writer if isinstance(writer, str) else "")


def _tensor(name: str, entry: Any, offset: int) -> Tensor:
    if len(name) > NAME:
        raise _bad(
            f"a tensor's name has {len(name):,} characters, above the limit of {NAME:,} "
            f"({name[:40]!r}…)"
        )
    if not isinstance(entry, _Entry):
        raise _bad(f"the entry of {name!r} {_fault(entry)}")
    tensor = Tensor(name, entry.dtype, entry.shape, offset + entry.begin, offset + entry.end)
    size = entry.end - entry.begin
    bits = tensor.elements * DTYPE_BITS[entry.dtype]
    if bits != 8 * size:
        needed = f"{bits} bits" if bits % 8 else f"{bits // 8} bytes"
        raise _bad(
            f"{name!r}: {entry.dtype} of shape {entry.shape} takes {needed}, but its data_offsets "
            f"span {size} bytes"
        )
    return tensor


def _of_pairs(pairs: list[tuple[str, Any]]) -> Any:
    """An object of the header: an `_Entry` if it is one; ValueError for a key that occurs twice."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key occurs twice")
    if fields.keys() != _KEYS or _fault(fields):
        return fields
    begin, end = fields["data_offsets"]
    return _Entry(_DTYPES[fields["dtype"]], tuple(fields["shape"]), begin, end)


def _fault(entry: Any) -> str:
    """What is wrong with a tensor's entry; empty if nothing is."""
    if not isinstance(entry, dict) or entry.keys() != _KEYS:
        return "is not an object with exactly the keys dtype, shape and data_offsets"
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        return f"has the unknown dtype {dtype!r}"
    shape = entry["shape"]
    if not _naturals(shape):
        return f"has the shape {shape!r}, which is not a list of natural numbers"
    if len(shape) > DIMENSIONS:
        return f"has {len(shape)} dimensions, above the limit of {DIMENSIONS}"
    span = entry["data_offsets"]
    if not _naturals(span) or len(span) != 2:
        return f"has the data_offsets {span!r}, which are not two natural numbers"
    return ""


def _slices(metadata: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    """Offsets by tensor, from the metadata that torch 2.9 and later write with distributed checkpoints."""
    try:
        # It has no more to say than the header itself, whose budget it is part of.
        entries = json.loads(metadata["DCP_SHARDING_INFO"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return {}
    slices: dict[str, tuple[int, ...] | None] = {}
    if isinstance(entries, dict):
        for name, entry in entries.items():
            offsets = entry.get("saved_offsets") if isinstance(entry, dict) else None
            slices[name] = tuple(offsets) if offsets and _naturals(offsets) else None
    return slices


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(n) is int and 0 <= n < 2**62 for n in values)


def _bad(reason: str, step: str = "") -> DamagedError:
    return DamagedError("the safetensors header of", reason, step=step)
