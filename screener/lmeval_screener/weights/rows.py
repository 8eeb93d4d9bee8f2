"""Matrices that are read row by row: coalesced ranges, read side by side, kept on disk.

Neighbouring rows become one range where the bytes in between are cheaper than another request. All gaps that
are bridged together stay within `SLACK` of the needed bytes: the smallest go first.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lmeval_screener.checkpoints import Snapshot, content_key
from lmeval_screener.errors import ScreeningError
from lmeval_screener.weights.tensors import DTYPE_BITS, Tensor, decode_rows, row_bytes

#: Bytes that scattered rows may cost over a network, where rows are stored column by column.
MOST_SCATTERED = 64 * 2**20
#: Share of the needed bytes that may be read beside them to save requests.
SLACK = 0.2
#: Bytes between rows of scales and other narrow matrices that are cheaper than another request.
BRIDGE = 65_536


async def side_by_side(*parts: Coroutine[Any, Any, Any]) -> list[Any]:
    """The results of all parts; where one fails, the others are stopped, not left running behind."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class Rows(Protocol):
    """A matrix whose rows can be read."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and width."""
        ...

    async def read(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Rows by number.

        Returns:
            Array of shape (len(ids), width).
        """
        ...


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows that one file holds: exactly the stored numbers, those of blocks dequantised.

    Attributes:
        snapshot: Whose file it is.
        file: The file.
        name: Name of the tensor.
        dtype: A dtype of safetensors or a type of GGUF's.
        shape: Rows and width.
        begin: Absolute offset of its first byte in the file.
        strides: Bytes from row to row and from column to column, where rows do not lie end to end.
        bridge: Bytes between two rows that are read rather than another request made; 0: by `coalesced`.
    """

    snapshot: Snapshot
    file: str
    name: str
    dtype: str
    shape: tuple[int, int]
    begin: int
    strides: tuple[int, int] | None = None
    bridge: int = 0

    @classmethod
    def of(cls, snapshot: Snapshot, file: str, tensor: Tensor, bridge: int = 0) -> Matrix:
        """A stored tensor of two dimensions; one of fewer is a column."""
        shape = tensor.shape if len(tensor.shape) == 2 else (tensor.elements, 1)
        strides = None
        if tensor.strides is not None and len(tensor.strides) == 2 and tensor.strides != (shape[1], 1):
            element = DTYPE_BITS[tensor.dtype] // 8
            strides = tensor.strides[0] * element, tensor.strides[1] * element
        return cls(
            snapshot, file, tensor.name, tensor.dtype, (shape[0], shape[1]), tensor.begin, strides, bridge
        )

    async def read(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """See `Rows`."""
        stored = await self._stored(ids)
        return decode_rows(b"".join(stored[i] for i in ids), self.dtype, self.shape[1])

    async def _stored(self, ids: Sequence[int]) -> dict[int, bytes]:
        """Bytes of each row, from the cache as far as it goes."""
        width, cache = row_bytes(self.dtype, self.shape[1]), self.snapshot.cache
        key = f"{content_key(self.snapshot, self.file)}#{self.name}#{self.begin}#{width}"
        content = cache.read("rows", key) if cache else None
        known: dict[int, bytes] = {}
        if content is not None:
            head, _, body = content.partition(b"\n")
            known = {i: body[at * width : (at + 1) * width] for at, i in enumerate(json.loads(head))}
        missing = [i for i in ids if i not in known]
        if not missing:
            return known
        if self.strides is not None:
            known.update(await self._strided(missing, width, self.strides))
        else:
            runs = _bridged(missing, self.bridge // width) if self.bridge else coalesced(missing)
            spans = [(self.begin + a * width, self.begin + b * width) for a, b in runs]
            bodies = await self.snapshot.ranges(self.file, spans)
            for (a, b), body in zip(runs, bodies, strict=True):
                known.update((i, body[(i - a) * width : (i - a + 1) * width]) for i in range(a, b))
        if cache:
            order = sorted(known)
            rows = b"".join([known[i] for i in order])
            cache.write("rows", key, json.dumps(order).encode() + b"\n", rows)
        return known

    async def _strided(self, ids: Sequence[int], width: int, strides: tuple[int, int]) -> dict[int, bytes]:
        """Rows of a view: of a wider matrix, or of one that is stored column by column."""
        row, column = strides
        d = self.shape[1]
        element = width // d
        if column == element:
            spans = [(self.begin + i * row, self.begin + i * row + width) for i in ids]
            return dict(zip(ids, await self.snapshot.ranges(self.file, spans), strict=True))
        first, last = ids[0], ids[-1]
        reach = (last - first) * row + element
        self.refuse_scattered(d * reach, "column by column", f"for {len(ids)} rows")
        start = self.begin + first * row
        spans = [(start + j * column, start + j * column + reach) for j in range(d)]
        columns = await self.snapshot.ranges(self.file, spans)
        at = {i: (i - first) * row for i in ids}
        return {i: b"".join(body[at[i] : at[i] + element] for body in columns) for i in ids}

    def refuse_scattered(self, size: int, how: str, why: str) -> None:
        """Refuse to read so many bytes over a network."""
        if self.snapshot.cache is not None and size > MOST_SCATTERED:
            raise ScreeningError(
                "ScatteredRows",
                f"cannot be screened from afar because {self.name} is stored {how}: {size / 1e6:.0f} MB "
                f"would have to be read {why}; download the checkpoint and screen the folder",
            )


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """Rows of 8-bit floats with a number that multiplies each block.

    Attributes:
        codes: The floats.
        scales: One row for each row of blocks.
        block: Rows and columns that one number covers.
    """

    codes: Matrix
    scales: Matrix
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and width."""
        return self.codes.shape

    async def read(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """See `Rows`."""
        high, wide = self.block
        blocks = sorted({i // high for i in ids})
        codes, scales = await side_by_side(self.codes.read(ids), self.scales.read(blocks))
        place = {block: at for at, block in enumerate(blocks)}
        spread = np.repeat(scales[[place[i // high] for i in ids]], wide, axis=1)
        result: NDArray[np.float32] = codes * spread[:, : self.shape[1]]
        return result


@dataclass(frozen=True, slots=True)
class PiecedRows:
    """Rows of a matrix that is stored in slices.

    Attributes:
        shape: Rows and width of the whole.
        pieces: Each slice with the row and column of the whole where it begins.
    """

    shape: tuple[int, int]
    pieces: tuple[tuple[Matrix, int, int], ...]

    async def read(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """See `Rows`."""
        numbers = np.array(ids, dtype=int)
        rows = np.empty((len(ids), self.shape[1]), dtype=np.float32)

        async def fill(matrix: Matrix, row: int, column: int) -> None:
            here = np.flatnonzero((numbers >= row) & (numbers < row + matrix.shape[0]))
            if len(here):
                part = await matrix.read((numbers[here] - row).tolist())
                rows[here, column : column + matrix.shape[1]] = part

        await side_by_side(*(fill(*piece) for piece in self.pieces))
        return rows


def coalesced(ids: Sequence[int], slack: float = SLACK) -> list[tuple[int, int]]:
    """Half-open runs of rows that cover `ids`, bridging the smallest gaps first.

    Returns:
        Runs (first, last + 1), ascending.

    Example:
        >>> coalesced([3, 4, 6, 90], slack=0.25)
        [(3, 7), (90, 91)]
    """
    if not ids:
        return []
    budget = math.floor(slack * len(ids))
    bridged = set()
    for gap, at in sorted((b - a - 1, at) for at, (a, b) in enumerate(pairwise(ids), start=1)):
        if gap > budget:
            break
        budget -= gap
        bridged.add(at)
    starts = [0, *(at for at in range(1, len(ids)) if at not in bridged), len(ids)]
    return [(ids[a], ids[b - 1] + 1) for a, b in pairwise(starts)]


def _bridged(ids: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Half-open runs of rows, two of which are one where at most so many rows lie between them."""
    runs = [(ids[0], ids[0] + 1)]
    for i in ids[1:]:
        first, end = runs[-1]
        runs[-1:] = [(first, i + 1)] if i - end <= most else [(first, end), (i, i + 1)]
    return runs
