"""Rows of stored matrices: plain, scaled or in slices, by coalesced ranges, read concurrently and cached.

Neighbouring rows become one range if the bytes in between are cheaper than another request. All
bridged gaps together stay within a share of the needed bytes; the smallest are bridged first.

A matrix of 8-bit floats is ``code × scale`` under two names (``weight_scale_inv`` multiplies too,
in spite of its name): one number for the matrix, for each row, or for each block, most often of 128
× 128. Sources: DeepSeek-V3's README_WEIGHTS.md, transformers' ``integrations/finegrained_fp8.py``,
compressed-tensors' ``quantization/lifecycle/forward.py``.

``HuggingFaceStorageWriter(save_distributed=True)`` lets every process write files of its own, in
which a tensor's usual name means a slice. The slice's offset is in the file's metadata; the size of
the whole is in config.json. Source: torch 2.13, ``torch/distributed/checkpoint/_hf_utils.py``,
``hf_storage.py``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import count
from lmeval_screener.budgets import in_steps
from lmeval_screener.checkpoints.concurrency import side_by_side
from lmeval_screener.checkpoints.snapshot import Snapshot
from lmeval_screener.errors import ScreeningError, cannot
from lmeval_screener.formats import format_of
from lmeval_screener.weights.tensors import (
    DTYPE_BITS,
    Header,
    Tensor,
    WeightFile,
    decode_rows,
)

#: Most bytes of scattered rows over a network, if rows are stored column by column.
MOST_SCATTERED = 64 * 2**20
#: Share of the needed bytes that may be read in addition to save requests.
SLACK = 0.2
#: Bytes per row that may be read in addition for scales and other narrow matrices.
BRIDGE = 65_536
_SCALE_DTYPES = ("F32", "F16", "BF16", "F64", "F8_E8M0")
_USUAL_BLOCK = 128
#: Name of a file in which a process of torch's distributed checkpoint stores its slices.
SLICE = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")


class WeightFiles:
    """The weights files of a checkpoint, whose headers are kept once they have been read.

    Attributes:
        snapshot: The files of the checkpoint.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._headers: dict[str, Header] = {}

    async def header(self, path: str, guess: int = 65_536) -> Header:
        """Return the header of a weights file.

        Args:
            path: Path of the file in the checkpoint.
            guess: Expected size of the header in bytes: the size of the first request.

        Raises:
            ScreeningError: The file is missing or broken.
        """
        if path not in self._headers:
            entry = await self.snapshot.look_up(path)
            file = WeightFile(self.snapshot, entry, guess)
            reading = format_of(path).read_header(file)
            self._headers[path] = await file.understood(reading)
        return self._headers[path]

    async def matrix(self, path: str, tensor: Tensor, narrow: bool = False) -> Matrix:
        """Return a stored tensor as a `Matrix`; one without two dimensions becomes a single column.

        Args:
            path: The file that holds the tensor.
            tensor: The tensor, from the header of the file.
            narrow: Whether the rows are so short that reading the bytes between two of them costs
                less than another request.

        Raises:
            ScreeningError: The file is a torch archive that does not hold the tensor where the
                archive's central directory says.
        """
        if tensor.entry is not None:
            from lmeval_screener.weights.files import zip_archive

            entry = await self.snapshot.look_up(path)
            file = WeightFile(self.snapshot, entry)
            locating = zip_archive.locate(file, tensor, *tensor.entry)
            tensor = await file.understood(locating)
        shape = tensor.shape
        if len(shape) != 2:
            shape = (tensor.elements, 1)
        strides = tensor.strides
        if strides is not None and len(strides) == 1 and strides != (1,):
            tensor = tensor._replace(strides=(*strides, 1))
        return Matrix(self.snapshot, path, tensor, (shape[0], shape[1]), narrow)


class Rows(Protocol):
    """A matrix of which single rows can be read."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, and their width."""
        ...

    async def read(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Read the rows with the numbers ``ids``, in that order.

        Returns:
            float32 array of shape (len(ids), width).

        Raises:
            ScreeningError: The rows cannot be read.
        """
        ...


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix stored in one file, whose rows are decoded by `decode_rows`.

    Attributes:
        snapshot: The checkpoint.
        file: The path of the file.
        tensor: The tensor's place in the file.
        shape: Number of rows, and their width.
        narrow: Whether the rows are so short that reading the bytes between two of them costs less
            than another request.
    """

    snapshot: Snapshot
    file: str
    tensor: Tensor
    shape: tuple[int, int]
    narrow: bool = False

    @property
    def row_bytes(self) -> int:
        """Number of bytes in a row."""
        return self.shape[1] * DTYPE_BITS[self.tensor.dtype] // 8

    async def read(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Read rows by their numbers; see `Rows.read`."""
        stored = await self._stored(ids)
        return self.decoded(b"".join(stored[i] for i in ids))

    def decoded(self, body: bytes) -> NDArray[np.float32]:
        """Decode the bytes of n rows, one after the other, to float32 of shape (n, width)."""
        return decode_rows(body, self.tensor.dtype, self.shape[1])

    async def _stored(self, ids: Sequence[int]) -> dict[int, bytes]:
        """Bytes of each row, from the cache if possible."""
        cache = self.snapshot.cache
        place = f"{self.tensor.name}#{self.tensor.begin}#{self.row_bytes}"
        content_key = self.snapshot.content_key(self.file)
        key = f"{content_key}#{place}"
        known: dict[int, bytes] = {}
        content = cache.read("rows", key) if cache else None
        if content is not None:
            head, _, body = content.partition(b"\n")
            known = dict(zip(json.loads(head), self._cut(body), strict=True))
        missing = [i for i in ids if i not in known]
        if not missing:
            return known
        strides = self.tensor.strides
        if strides is not None and len(strides) == 2 and strides != (self.shape[1], 1):
            known |= await self._strided(missing, strides)
        else:
            known |= await self._in_runs(missing)
        if cache:
            order = sorted(known)
            head = json.dumps(order).encode() + b"\n"
            rows = b"".join([known[i] for i in order])
            cache.write("rows", key, head, rows)
        return known

    def _cut(self, body: bytes) -> list[bytes]:
        """The rows in bytes end to end."""
        width = self.row_bytes
        return [body[at : at + width] for at in range(0, len(body), width)]

    async def _in_runs(self, ids: Sequence[int]) -> dict[int, bytes]:
        """Rows that lie one after the other, and those between them that cost less than a request."""
        width = self.row_bytes
        slack = SLACK
        if self.narrow:
            slack = max(1, BRIDGE // width)
        runs = coalesced(ids, slack)
        begin = self.tensor.begin
        spans: list[tuple[int, int]] = []
        for first, end in runs:
            spans.append((begin + first * width, begin + end * width))
        bodies = await self.snapshot.ranges(self.file, spans)
        rows: dict[int, bytes] = {}
        for (first, _), body in zip(runs, bodies, strict=True):
            rows.update(enumerate(self._cut(body), start=first))
        return rows

    async def _strided(self, ids: Sequence[int], strides: tuple[int, ...]) -> dict[int, bytes]:
        """Rows of a view, such as a transposed matrix, from all bytes that the view spans."""
        begin = self.tensor.begin
        end = self.tensor.end
        self.refuse_scattered(end - begin, "as a view", f"for {count(len(ids), 'row')}")
        (body,) = await self.snapshot.ranges(self.file, [(begin, end)])
        element = self.row_bytes // self.shape[1]
        numbers = np.frombuffer(body, f"V{element}")
        steps = [stride * element for stride in strides]
        view = np.lib.stride_tricks.as_strided(numbers, self.shape, steps, writeable=False)
        return {i: view[i].tobytes() for i in ids}

    def refuse_scattered(self, size: int, how: str, why: str) -> None:
        """Raise an error if too many bytes would have to be read over a network.

        Args:
            size: Number of bytes.
            how: How the tensor is stored, such as ``as a view``.
            why: What the bytes are needed for, such as ``for 20 rows``.

        Raises:
            ScreeningError: ``ScatteredRows``, for more than 64 MiB (`MOST_SCATTERED`).
        """
        if self.snapshot.is_local or size <= MOST_SCATTERED:
            return
        raise ScreeningError(
            "ScatteredRows",
            f"cannot be screened remotely because {self.tensor.name} is stored {how}: "
            f"{size / 1e6:.0f} MB would have to be read {why}; download the checkpoint and screen "
            "the folder",
        )


def coalesced(ids: Sequence[int], slack: float = SLACK) -> list[tuple[int, int]]:
    """Join row numbers into runs, each of which can be read by one request.

    Args:
        ids: The row numbers, ascending.
        slack: How many unwanted rows the runs may include, as a share of the wanted ones. The
            smallest gaps are closed first.

    Returns:
        A pair for each run: its first row, and its last row plus one.

    >>> coalesced([3, 4, 6, 90], slack=0.25)
    [(3, 7), (90, 91)]
    """
    if not ids:
        return []
    budget = math.floor(slack * len(ids))
    gaps = np.diff(ids) - 1
    order = np.argsort(gaps, kind="stable")
    sizes = np.cumsum(gaps[order])
    breaks = np.sort(order[sizes > budget])
    firsts = np.concatenate([[0], breaks + 1])
    lasts = np.concatenate([breaks, [len(gaps)]])
    runs: list[tuple[int, int]] = []
    for first, last in zip(firsts, lasts, strict=True):
        runs.append((ids[first], ids[last] + 1))
    return runs


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """Rows of 8-bit floats that are multiplied by scales, one for each block of the matrix.

    Attributes:
        codes: The 8-bit floats.
        scales: The scales, one for each block: entry (i, j) is that of block (i, j).
        block: Number of rows and of columns in a block.
    """

    codes: Matrix
    scales: Matrix
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, and their width."""
        return self.codes.shape

    async def read(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Read rows by their numbers, multiplied by their scales; see `Rows.read`."""
        high, wide = self.block
        width = self.shape[1]
        block_rows = np.asarray(ids, dtype=int) // high
        blocks, place = np.unique(block_rows, return_inverse=True)
        codes, scales = await side_by_side(
            [
                self.codes.read(ids),
                self.scales.read(blocks.tolist()),
            ]
        )
        spread = np.repeat(scales[place], wide, axis=1)
        result: NDArray[np.float32] = codes * spread[:, :width]
        return result


def scaled(codes: Matrix, scales: Matrix, quantization: Any) -> ScaledRows | None:
    """Combine a matrix of 8-bit floats with its scales.

    Args:
        codes: The 8-bit floats, shape (v, d).
        scales: The scales: one for the whole matrix, one for each row, or one for each block.
        quantization: ``quantization_config`` of config.json, which may state ``weight_block_size``.

    Returns:
        The scaled rows; None if the type of the scales or the size of a block is not known.
    """
    v, d = codes.shape
    shape = scales.tensor.shape
    if scales.tensor.elements == 1:
        shape = (1, 1)
    elif shape == (v,):
        shape = (v, 1)
    if scales.tensor.dtype not in _SCALE_DTYPES or len(shape) != 2:
        return None
    stated = None
    if isinstance(quantization, Mapping):
        stated = quantization.get("weight_block_size")
    if not isinstance(stated, list) or list(map(type, stated)) != [int, int]:
        stated = (None, None)
    block_rows, block_columns = shape
    high = _side(v, block_rows, stated[0])
    wide = _side(d, block_columns, stated[1])
    if high is None or wide is None:
        return None
    scales = replace(scales, shape=(block_rows, block_columns))
    return ScaledRows(codes, scales, (high, wide))


def _side(length: int, count: int, stated: int | None) -> int | None:
    """Side of a block in weights, if ``count`` blocks cover ``length`` weights; None if unclear."""
    if count in (1, length):
        return length // count
    sizes = {stated or _USUAL_BLOCK}
    if not stated and count and length % count == 0:
        sizes.add(length // count)
    fitting: list[int] = []
    for size in sizes:
        if size > 0 and -(-length // size) == count:
            fitting.append(size)
    if len(fitting) != 1:
        return None
    return fitting[0]


@dataclass(frozen=True, slots=True)
class PiecedRows:
    """Rows of a matrix that is stored in slices.

    Attributes:
        shape: Number of rows, and their width.
        pieces: The slices, each with the numbers of its first row and column in the whole.
    """

    shape: tuple[int, int]
    pieces: tuple[tuple[Matrix, int, int], ...]

    async def read(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Read rows by their numbers, joined from the slices; see `Rows.read`."""
        numbers = np.array(ids, dtype=int)
        rows = np.empty((len(ids), self.shape[1]), dtype=np.float32)

        async def fill(matrix: Matrix, row: int, column: int) -> None:
            height, width = matrix.shape
            is_inside = (numbers >= row) & (numbers < row + height)
            here = np.flatnonzero(is_inside)
            if not len(here):
                return
            own_numbers = numbers[here] - row
            part = await matrix.read(own_numbers.tolist())
            rows[here, column : column + width] = part

        await side_by_side(fill(*piece) for piece in self.pieces)
        return rows


def pieced(
    name: str, parts: Sequence[tuple[Matrix, Header]], sizes: Sequence[int] | None
) -> PiecedRows:
    """Join the slices of a matrix.

    Args:
        name: The name of the matrix.
        parts: The slices, each with the header of its file.
        sizes: ``vocab_size`` and ``hidden_size`` of config.json; None if it does not state them.

    Raises:
        ScreeningError: ``SlicedTensor``: the slices overlap, have different dtypes or unknown
            places, or do not fill a matrix of these sizes; or ``sizes`` is None.
    """
    pieces = []
    v = d = held = 0
    dtypes = set()
    for matrix, header in parts:
        offsets = header.slices.get(name)
        shape = matrix.tensor.shape
        if offsets is None or len(offsets) != 2 or len(shape) != 2 or 0 in shape:
            raise sliced_error(name, f"{matrix.file} does not say which rows and columns it holds")
        row, column = offsets
        height, width = shape
        pieces.append((matrix, row, column))
        v = max(v, row + height)
        d = max(d, column + width)
        held += height * width
        dtypes.add(matrix.tensor.dtype)
    overlap = any(_share_a_number(*pair) for pair in in_steps(combinations(pieces, 2)))
    if len(dtypes) != 1:
        raise sliced_error(name, f"the slices have different dtypes ({', '.join(sorted(dtypes))})")
    if overlap:
        raise sliced_error(name, "two of the slices found overlap")
    if held != v * d:
        why = f"the slices found do not fill a matrix of {v} × {d} (a file may be missing)"
        raise sliced_error(name, why)
    if sizes is None:
        raise sliced_error(name, "config.json does not state vocab_size and hidden_size")
    all_rows, all_columns = sizes
    if v < all_rows or d != all_columns:
        raise sliced_error(
            name,
            f"the slices found fill only {v} × {d} of a matrix of {all_rows} × {all_columns} (a "
            "file may be missing)",
        )
    in_order = sorted(pieces, key=lambda piece: piece[1:])
    return PiecedRows((v, d), tuple(in_order))


def _share_a_number(first: tuple[Matrix, int, int], second: tuple[Matrix, int, int]) -> bool:
    """Whether two slices, each given with its first row and column, overlap."""
    matrix, *starts = first
    other_matrix, *other_starts = second
    for axis, (start, other_start) in enumerate(zip(starts, other_starts, strict=True)):
        end = start + matrix.shape[axis]
        other_end = other_start + other_matrix.shape[axis]
        if start >= other_end or other_start >= end:
            return False
    return True


def sliced_error(name: str, why: str) -> ScreeningError:
    """Return the error for slices that cannot be joined; the clause ``why`` gives the reason."""
    return cannot(
        "SlicedTensor",
        f"{name} is stored in slices of torch's distributed checkpoint, and {why}",
        "check that all files are there, and join the slices first: save with "
        "`HuggingFaceStorageWriter(..., enable_consolidation=True)`, or call "
        "`torch.distributed.checkpoint._consolidate_hf_safetensors.consolidate_safetensors_files`",
    )
