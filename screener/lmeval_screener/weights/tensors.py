"""Stored tensors: the place of their bytes in a file, and those bytes as numbers."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from lmeval_screener.checkpoints.snapshot import FileEntry, Snapshot
from lmeval_screener.errors import ScreeningError

T = TypeVar("T")

#: Dtype of the format -> bits per element.
DTYPE_BITS = {
    **dict.fromkeys(
        ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8
    ),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
#: Dtypes in which models are trained and published. Others are quantised.
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
#: Dtypes that may have separate scales.
SCALED_DTYPES = ("F8_E4M3", "F8_E5M2")
#: Dtypes whose numbers are the weights themselves. All others are packed or scaled.
FLOAT_DTYPES = PLAIN_DTYPES + SCALED_DTYPES


class Tensor(NamedTuple):
    """A tensor in a file.

    Attributes:
        name: The name as stored.
        dtype: The element type, such as ``BF16``: a key of `DTYPE_BITS`, or a type of GGUF.
        shape: The length of each dimension.
        begin: Position of the tensor's first byte in the file.
        end: Position after the tensor's last byte.
        strides: For each dimension, the number of elements from one index to the next; None if the
            tensor is contiguous.
        entry: In a torch archive, the offset and the name of the entry that holds the tensor, until
            `zip_archive.locate` has found the exact ``begin``; else None.
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

    @property
    def is_contiguous(self) -> bool:
        """Whether the tensor's elements lie row by row without gaps."""
        if self.strides is None:
            return True
        strides: list[int] = []
        for dimension in range(len(self.shape)):
            strides.append(math.prod(self.shape[dimension + 1 :]))
        return self.strides == tuple(strides)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a weights file.

    Attributes:
        tensors: Every tensor in the file, by its stored name.
        slices: For each tensor that torch's distributed checkpoint stored as a slice, the slice's
            first index in each dimension; None if the file's metadata does not give numbers.
        pairs: The entries of a GGUF file's metadata that the screener needs, by key; empty for
            other formats.
        writer: The ``format`` in a safetensors file's metadata, such as ``pt`` or ``mlx``; empty if
            it is not stated, and for other formats.
    """

    tensors: Mapping[str, Tensor]
    slices: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)
    pairs: Mapping[str, Any] = field(default_factory=dict)
    writer: str = ""

    @property
    def parameters(self) -> int:
        """Number of elements in all tensors; tensors that share their bytes count once."""
        elements = {}
        for tensor in self.tensors.values():
            if tensor.elements:
                elements[tensor.begin, tensor.end] = tensor.elements
        return sum(elements.values())


class DamagedError(ScreeningError):
    """The header or the archive of a weights file is damaged, or larger than any known real one.

    Args:
        part: The part that cannot be read, as it is written before the file's name: ``the GGUF
            header of``.
        reason: Why the part cannot be read, as a clause.
        code: The error's code.
        step: What to do about it, as an imperative; empty if the file seems to be damaged.
    """

    def __init__(self, part: str, reason: str, code: str = "BadHeader", step: str = "") -> None:
        super().__init__(code, f"{part.removesuffix(' of')} cannot be read: {reason}")
        self.part = part
        self.reason = reason
        self.step = step


class WeightFile:
    """A weights file whose header is being read.

    Attributes:
        size: Size of the file in bytes.
        what: Name of the file in messages, such as ``model.safetensors of ORG/NAME``.
        guess: Expected size of the header in bytes: the size of the first request.
    """

    def __init__(self, snapshot: Snapshot, entry: FileEntry, guess: int = 65_536) -> None:
        self.size = entry.size
        self.what = f"{entry.path} of {snapshot.repo}"
        self.guess = guess
        self._snapshot = snapshot
        self._path = entry.path
        self._fetched: dict[str, bytes] = {}

    async def read(self, begin: int, end: int) -> bytes:
        """Read the bytes ``[begin, end)``, from the cache if they are there.

        Raises:
            ScreeningError: The bytes cannot be read; see `Snapshot.ranges`.
        """
        cache = self._snapshot.cache
        key = f"{self._snapshot.content_key(self._path)}[{begin}:{end}]"
        body = cache.read("headers", key) if cache else None
        if body is None:
            (body,) = await self._snapshot.ranges(self._path, [(begin, end)])
            self._fetched[key] = body
        return body

    async def understood(self, work: Awaitable[T]) -> T:
        """Await a coroutine that reads this file; if it succeeds, cache the bytes that it read.

        Args:
            work: The coroutine, which reads by the method `read`.

        Returns:
            The coroutine's result.

        Raises:
            ScreeningError: ``work`` raised a `DamagedError`; the message adds the file's name and
                what to do.
        """
        try:
            result = await work
        except DamagedError as error:
            step = "compare its SHA-256, or upload it again"
            how = f"the file was damaged in transit or at its source: {step}"
            if self._snapshot.is_local:
                step = "wait until it is complete, or save it again"
                how = f"the file is still being written, or is damaged: {step}"
            what = f"{error.part} {self.what} cannot be read: {error.reason}"
            raise ScreeningError(error.code, f"{what}; {error.step or how}") from error
        cache = self._snapshot.cache
        if cache:
            for key, body in self._fetched.items():
                cache.write("headers", key, body)
        return result


def decode_rows(body: bytes, dtype: str, width: int) -> NDArray[np.float32]:
    """Decode the bytes of rows to float32 of shape (rows, width).

    The numbers are exact, except for F64: they are rounded, and become infinite if they exceed the
    range of float32.

    Args:
        body: The bytes of the rows, one after the other.
        dtype: The type in which the rows are stored, such as ``BF16``.
        width: Number of elements in a row.
    """
    flat: NDArray[np.float32]
    if dtype == "BF16":
        halves = np.frombuffer(body, "<u2").astype(np.uint32)
        flat = (halves << np.uint32(16)).view(np.float32)
    elif dtype in _CODES:
        codes = np.frombuffer(body, np.uint8)
        flat = _CODES[dtype][codes]
    else:
        size = DTYPE_BITS[dtype] // 8
        with np.errstate(over="ignore"):
            flat = np.frombuffer(body, f"<f{size}").astype(np.float32)
    return flat.reshape(-1, width)


def _codes() -> dict[str, NDArray[np.float32]]:
    """All 256 values of the 8-bit floats (OCP 8-bit formats): parts of float16, or an exponent alone."""
    code = np.arange(256, dtype="<u2")
    magnitude = (code & 0x7F) << 7
    sign = (code & 0x80) << 8
    halves = (magnitude | sign).view("<f2")
    e4m3 = halves.astype(np.float32) * np.float32(256)
    e4m3[[0x7F, 0xFF]] = np.nan
    e5m2 = (code << 8).view("<f2")
    e8m0 = np.where(code == 255, np.nan, np.exp2(code - 127.0))
    return {
        "F8_E4M3": e4m3,
        "F8_E5M2": e5m2.astype(np.float32),
        "F8_E8M0": e8m0.astype(np.float32),
    }


_CODES = _codes()
