"""Rows of the output projection: coalesced ranges, read side by side, kept on disk.

Neighbouring rows become one range where the bytes in between are cheaper than another request. All gaps that
are bridged together stay within `SLACK` of the needed bytes: the smallest go first.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lmeval_screener.checkpoints.snapshot import Snapshot, content_key
from lmeval_screener.errors import ScreeningError
from lmeval_screener.weights.adapters import AdaptedMatrix
from lmeval_screener.weights.gguf import decode_blocks
from lmeval_screener.weights.matrices import Matrix
from lmeval_screener.weights.projection import OutputProjection
from lmeval_screener.weights.safetensors import DTYPE_BITS, decode_rows
from lmeval_screener.weights.slices import Piece

#: Bytes that scattered rows may cost over a network, where rows are stored column by column.
MOST_SCATTERED = 64 * 2**20
#: Share of the needed bytes that may be read beside them to save requests.
SLACK = 0.2
#: Bytes between rows of scales and other narrow matrices that are cheaper than another request.
_BRIDGE = 65_536


async def read_rows(
    snapshot: Snapshot, projection: OutputProjection, ids: Sequence[int], *, directions: bool = True
) -> NDArray[np.float32]:
    """Rows of the output projection.

    Args:
        snapshot: The checkpoint.
        projection: Its output projection, from `lmeval_screener.weights.projection.find_projection`.
        ids: Token ids, in any order, repetitions allowed.
        directions: Whether every row must have a direction; a sample for a mean may hold zero rows.

    Returns:
        Array of shape (len(ids), d) in the order of `ids`, exactly the stored numbers; for quantised blocks
        of GGUF and 8-bit floats with scales the numbers that they stand for, for an adapter those of the
        merged model in float32.

    Raises:
        ScreeningError: ``BadRows`` if a row is outside the matrix, zero, or not finite: such a row has no
            direction, and hiding it would change the result. Or an error of the connection.
    """
    v = projection.shape[0]
    outside = sorted({i for i in ids if not 0 <= i < v})
    if outside:
        raise _bad(
            snapshot, outside, f"are outside the {v} rows of {projection.name}", "its vocabulary is too short"
        )
    wanted = sorted(set(ids))
    matrix = await _numbers(snapshot, projection, wanted)
    finite = np.isfinite(matrix).all(axis=1)
    if not finite.all():
        raise _bad(
            snapshot, np.asarray(wanted)[~finite].tolist(), "hold NaN or Inf", "the checkpoint is damaged"
        )
    zero = ~matrix.any(axis=1)
    if directions and zero.any():
        raise _bad(snapshot, np.asarray(wanted)[zero].tolist(), "are zero", "these tokens were never trained")
    if directions and len(wanted) > 1 and _parallel(matrix):
        raise _bad(snapshot, wanted, "all point the same way", "the matrix was never trained, or is damaged")
    place = {i: at for at, i in enumerate(wanted)}
    result: NDArray[np.float32] = matrix[[place[i] for i in ids]]
    return result


def coalesced(ids: Sequence[int], slack: float = SLACK) -> list[tuple[int, int]]:
    """Half-open runs of rows that cover `ids`, bridging the smallest gaps first.

    Args:
        ids: Distinct row numbers, ascending.
        slack: Share of ``len(ids)`` that all bridged rows together may reach.

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


async def _numbers(
    snapshot: Snapshot, projection: OutputProjection, wanted: Sequence[int]
) -> NDArray[np.float32]:
    """Rows by ascending distinct number, put together from wherever they are stored."""
    if projection.adapter is not None:
        return await _adapted(snapshot, projection.adapter, wanted)
    if projection.pieces is not None:
        return await _pieced(snapshot, projection.pieces, wanted, projection.shape[1])
    rows = await read_matrix(snapshot, projection.matrix, wanted)
    scale = projection.scale
    if scale is not None:
        which = scale.rows(wanted)
        read = await read_matrix(snapshot, scale.matrix, which, bridge=_BRIDGE)
        place = {row: at for at, row in enumerate(which)}
        scales = read[[place[i // scale.block[0]] for i in wanted]]
        rows = rows * scale.spread(scales, projection.shape[1])
    return rows


async def _pieced(
    snapshot: Snapshot, pieces: Sequence[Piece], wanted: Sequence[int], width: int
) -> NDArray[np.float32]:
    """Rows of a matrix that is stored in slices."""
    numbers = np.array(wanted)
    rows = np.empty((len(wanted), width), dtype=np.float32)

    async def one(piece: Piece) -> None:
        own = piece.matrix
        here = np.flatnonzero((numbers >= piece.row) & (numbers < piece.row + own.shape[0]))
        if len(here):
            part = await read_matrix(snapshot, own, (numbers[here] - piece.row).tolist())
            rows[here, piece.column : piece.column + own.shape[1]] = part

    await asyncio.gather(*(one(piece) for piece in pieces))
    return rows


async def _adapted(snapshot: Snapshot, adapter: AdaptedMatrix, wanted: Sequence[int]) -> NDArray[np.float32]:
    """Rows of a base with an adapter's changes."""
    if adapter.replaced is not None:
        rows = await read_matrix(snapshot, adapter.replaced, wanted)
    else:
        rows = await _numbers(adapter.base, adapter.projection, wanted)
    for update in adapter.updates:
        a, b = update.a, update.b
        if update.embedding:
            _bounded(snapshot, a)
            left = (await read_matrix(snapshot, a, range(a.shape[0])))[:, list(wanted)].T
            right = (await read_matrix(snapshot, b, range(b.shape[0]))).T
        else:
            left = await read_matrix(snapshot, b, wanted, bridge=_BRIDGE)
            right = await read_matrix(snapshot, a, range(a.shape[0]))
        magnitude = None
        if update.magnitude is not None:
            magnitude = await read_matrix(snapshot, update.magnitude, wanted, bridge=_BRIDGE)
        rows = update.applied(rows, left, right, magnitude)
    if adapter.tokens is not None:
        place = {token: at for at, token in enumerate(adapter.tokens.ids)}
        here = [at for at, i in enumerate(wanted) if i in place]
        if here:
            asked = sorted({place[wanted[at]] for at in here})
            new = await read_matrix(snapshot, adapter.tokens.matrix, asked)
            rows = rows.copy()
            rows[here] = new[[asked.index(place[wanted[at]]) for at in here]]
    return rows


def _bounded(snapshot: Snapshot, matrix: Matrix) -> None:
    size = matrix.shape[0] * matrix.row_bytes
    if snapshot.cache is not None and size > MOST_SCATTERED:
        raise ScreeningError(
            "ScatteredRows",
            f"cannot be screened from afar because {matrix.name} is stored with a column a token: all "
            f"{size / 1e6:.0f} MB would have to be read; download the adapter and screen the folder",
        )


async def read_matrix(
    snapshot: Snapshot, matrix: Matrix, wanted: Sequence[int], *, bridge: int = 0
) -> NDArray[np.float32]:
    """Rows of a stored matrix as float32.

    Args:
        snapshot: The checkpoint that holds it.
        matrix: Where it lies.
        wanted: Row numbers, ascending and distinct.
        bridge: Bytes between two rows that are read rather than another request made; 0: by `coalesced`.

    Returns:
        Array of shape (len(wanted), width).

    Raises:
        ScreeningError: ``ScatteredRows``, or an error of the connection.
    """
    stored = await _stored_rows(snapshot, matrix, wanted, bridge)
    decode = decode_rows if matrix.dtype in DTYPE_BITS else decode_blocks
    return decode(b"".join(stored[i] for i in wanted), matrix.dtype, matrix.shape[1])


async def _stored_rows(
    snapshot: Snapshot, matrix: Matrix, wanted: Sequence[int], bridge: int
) -> dict[int, bytes]:
    """Bytes of each wanted row, from the cache as far as it goes."""
    width = matrix.row_bytes
    key = f"{content_key(snapshot, matrix.file)}#{matrix.name}#{matrix.begin}#{width}"
    known = _kept(snapshot, key, width)
    missing = [i for i in wanted if i not in known]
    if not missing:
        return known
    if matrix.strides is not None:
        known.update(await _strided_rows(snapshot, matrix, missing, width))
    else:
        runs = _bridged(missing, bridge // width) if bridge else coalesced(missing)
        spans = [(matrix.begin + a * width, matrix.begin + b * width) for a, b in runs]
        bodies = await snapshot.ranges(matrix.file, spans)
        for (a, b), body in zip(runs, bodies, strict=True):
            known.update((i, body[(i - a) * width : (i - a + 1) * width]) for i in range(a, b))
    if snapshot.cache is not None:
        order = sorted(known)
        rows = b"".join([known[i] for i in order])
        snapshot.cache.write("rows", key, json.dumps(order).encode() + b"\n", rows)
    return known


def _bridged(ids: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Half-open runs of rows, two of which are one where at most so many rows lie between them."""
    runs = [(ids[0], ids[0] + 1)]
    for i in ids[1:]:
        first, end = runs[-1]
        runs[-1:] = [(first, i + 1)] if i - end <= most else [(first, end), (i, i + 1)]
    return runs


async def _strided_rows(
    snapshot: Snapshot, matrix: Matrix, wanted: Sequence[int], width: int
) -> dict[int, bytes]:
    """Rows of a view: of a wider matrix, or of one that is stored column by column."""
    assert matrix.strides is not None
    row, column = matrix.strides
    d = matrix.shape[1]
    element = width // d
    if column == element:
        spans = [(matrix.begin + i * row, matrix.begin + i * row + width) for i in wanted]
        return dict(zip(wanted, await snapshot.ranges(matrix.file, spans), strict=True))
    first, last = wanted[0], wanted[-1]
    reach = (last - first) * row + element
    if snapshot.cache is not None and d * reach > MOST_SCATTERED:
        raise ScreeningError(
            "ScatteredRows",
            f"cannot be screened from afar because {matrix.name} is stored column by column: "
            f"{d * reach / 1e6:.0f} MB would have to be read for {len(wanted)} rows; download the checkpoint "
            "and screen the folder",
        )
    start = matrix.begin + first * row
    spans = [(start + j * column, start + j * column + reach) for j in range(d)]
    columns = await snapshot.ranges(matrix.file, spans)
    return {
        i: b"".join(body[(i - first) * row : (i - first) * row + element] for body in columns) for i in wanted
    }


def _kept(snapshot: Snapshot, key: str, width: int) -> dict[int, bytes]:
    content = snapshot.cache.read("rows", key) if snapshot.cache is not None else None
    if content is None:
        return {}
    head, _, body = content.partition(b"\n")
    return {i: body[at * width : (at + 1) * width] for at, i in enumerate(json.loads(head))}


def _parallel(matrix: NDArray[np.float32]) -> bool:
    """Whether all rows (n, d) have one direction, up to float32's rounding."""
    rows = matrix.astype(np.float64)
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return bool(np.abs(units - units[0]).max() < 1e-6)


def _bad(snapshot: Snapshot, ids: Sequence[int], what: str, why: str) -> ScreeningError:
    shown = ", ".join(map(str, ids[:8])) + (", …" if len(ids) > 8 else "")
    return ScreeningError(
        "BadRows", f"rows {shown} of {snapshot.repo} {what}: {why}; screen another revision"
    )
