"""Rows of the output projection: coalesced ranges, read side by side, kept on disk.

Neighbouring rows become one range where the bytes in between are cheaper than another request. All gaps that
are bridged together stay within `SLACK` of the needed bytes: the smallest go first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lmeval_screener.checkpoints.snapshot import Snapshot, content_key
from lmeval_screener.errors import ScreeningError
from lmeval_screener.weights.gguf import decode_blocks
from lmeval_screener.weights.projection import OutputProjection
from lmeval_screener.weights.safetensors import DTYPE_BITS, decode_rows

#: Bytes that scattered rows may cost over a network, where rows are stored column by column.
MOST_SCATTERED = 64 * 2**20
#: Share of the needed bytes that may be read beside them to save requests.
SLACK = 0.2


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
        Array of shape (len(ids), d) in the order of `ids`, exactly the stored numbers
        (for quantised blocks of GGUF the numbers that they stand for).

    Raises:
        ScreeningError: ``BadRows`` if a row is outside the matrix, zero, or not finite: such a row has no
            direction, and hiding it would change the result. Or an error of the connection.
    """
    v, d = projection.shape
    outside = sorted({i for i in ids if not 0 <= i < v})
    if outside:
        raise _bad(
            snapshot, outside, f"are outside the {v} rows of {projection.name}", "its vocabulary is too short"
        )
    wanted = sorted(set(ids))
    width = projection.row_bytes
    stored = await _stored_rows(snapshot, projection, wanted, width)
    decode = decode_rows if projection.dtype in DTYPE_BITS else decode_blocks
    matrix = decode(b"".join(stored[i] for i in wanted), projection.dtype, d)
    finite = np.isfinite(matrix).all(axis=1)
    if not finite.all():
        raise _bad(
            snapshot, np.asarray(wanted)[~finite].tolist(), "hold NaN or Inf", "the checkpoint is damaged"
        )
    zero = ~matrix.any(axis=1)
    if directions and zero.any():
        raise _bad(snapshot, np.asarray(wanted)[zero].tolist(), "are zero", "these tokens were never trained")
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


async def _stored_rows(
    snapshot: Snapshot, projection: OutputProjection, wanted: Sequence[int], width: int
) -> dict[int, bytes]:
    """Bytes of each wanted row, from the cache as far as it goes."""
    key = f"{content_key(snapshot, projection.file)}#{projection.name}#{projection.begin}#{width}"
    known = _kept(snapshot, key, width)
    missing = [i for i in wanted if i not in known]
    if not missing:
        return known
    if projection.strides is not None:
        known.update(await _strided_rows(snapshot, projection, missing, width))
    else:
        runs = coalesced(missing)
        spans = [(projection.begin + a * width, projection.begin + b * width) for a, b in runs]
        bodies = await snapshot.ranges(projection.file, spans)
        for (a, b), body in zip(runs, bodies, strict=True):
            known.update((i, body[(i - a) * width : (i - a + 1) * width]) for i in range(a, b))
    if snapshot.cache is not None:
        order = sorted(known)
        content = json.dumps(order).encode() + b"\n" + b"".join(known[i] for i in order)
        snapshot.cache.write("rows", key, content)
    return known


async def _strided_rows(
    snapshot: Snapshot, projection: OutputProjection, wanted: Sequence[int], width: int
) -> dict[int, bytes]:
    """Rows of a view: of a wider matrix, or of one that is stored column by column."""
    assert projection.strides is not None
    row, column = projection.strides
    d = projection.shape[1]
    element = width // d
    if column == element:
        spans = [(projection.begin + i * row, projection.begin + i * row + width) for i in wanted]
        return dict(zip(wanted, await snapshot.ranges(projection.file, spans), strict=True))
    first, last = wanted[0], wanted[-1]
    reach = (last - first) * row + element
    if snapshot.cache is not None and d * reach > MOST_SCATTERED:
        raise ScreeningError(
            "ScatteredRows",
            f"cannot be screened from afar because {projection.name} is stored column by column: "
            f"{d * reach / 1e6:.0f} MB would have to be read for {len(wanted)} rows; download the checkpoint "
            "and screen the folder",
        )
    start = projection.begin + first * row
    spans = [(start + j * column, start + j * column + reach) for j in range(d)]
    columns = await snapshot.ranges(projection.file, spans)
    return {
        i: b"".join(body[(i - first) * row : (i - first) * row + element] for body in columns) for i in wanted
    }


def _kept(snapshot: Snapshot, key: str, width: int) -> dict[int, bytes]:
    content = snapshot.cache.read("rows", key) if snapshot.cache is not None else None
    if content is None:
        return {}
    head, _, body = content.partition(b"\n")
    return {i: body[at * width : (at + 1) * width] for at, i in enumerate(json.loads(head))}


def _bad(snapshot: Snapshot, ids: Sequence[int], what: str, why: str) -> ScreeningError:
    shown = ", ".join(map(str, ids[:8])) + (", …" if len(ids) > 8 else "")
    return ScreeningError(
        "BadRows", f"rows {shown} of {snapshot.repo} {what}: {why}; screen another revision"
    )
