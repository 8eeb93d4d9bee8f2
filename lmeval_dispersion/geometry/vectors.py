"""Vectors as rows of a matrix: checked, widened to float64, brought to length one."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmeval_dispersion.errors import GeometryError, NoDirectionError, TooFewVectorsError

Array = NDArray[np.float64]

_BLOCK = 16_384  # numbers that are brought to length one at a time: 128 kB


def valid_rows(x: ArrayLike) -> NDArray[np.bool_]:
    """Which rows have a direction: all finite, not all zero. Shape (n,), bool."""
    rows = matrix(x)
    return np.asarray(np.isfinite(rows).all(axis=1) & (rows != 0).any(axis=1))


def unit_rows(x: ArrayLike) -> Array:
    """The rows of ``x`` (n, d) at length one, float64.

    Rows are first divided by their largest magnitude, so that neither tiny nor huge values over- or
    underflow.

    >>> unit_rows([[3.0, 4.0]]).tolist()
    [[0.6, 0.8]]
    """
    # A row has a direction where its largest magnitude is finite and not zero. In blocks: what fits into a
    # processor's cache is several times as fast as temporaries of the whole.
    given = x if isinstance(x, np.ndarray) and x.dtype.kind == "f" and x.ndim == 2 and x.size else matrix(x)
    rows = np.empty(given.shape)
    valid = np.ones(len(rows), dtype=bool)
    step = max(_BLOCK // given.shape[1], 1)
    for at in range(0, len(rows), step):
        part = rows[at : at + step]
        part[...] = given[at : at + step]
        largest = np.abs(part).max(axis=1)
        valid[at : at + step] = np.isfinite(largest) & (largest > 0)
        if valid[at : at + step].all():
            part /= largest[:, None]
            part /= np.sqrt(np.einsum("ij,ij->i", part, part))[:, None]
    bad = np.flatnonzero(~valid)
    if bad.size:
        shown = ", ".join(map(str, bad[:5])) + (", ..." if bad.size > 5 else "")
        raise NoDirectionError(
            f"expected vectors with a direction, got {bad.size} of {len(rows)} zero or non-finite "
            f"(rows {shown}); drop them and report how many",
            bad.tolist(),
        )
    return rows


def matrix(x: ArrayLike) -> Array:
    """``x`` as float64 of shape (n, d). Raises GeometryError for any other shape."""
    rows = np.asarray(x, dtype=np.float64)
    if rows.ndim != 2 or rows.shape[1] == 0:
        raise GeometryError(f"expected `x` of shape (n, d), got {rows.shape}")
    return rows


def at_least(rows: Array, n: int) -> None:
    """Raise TooFewVectorsError where there are fewer than ``n`` rows."""
    if len(rows) < n:
        raise TooFewVectorsError(f"expected `x` of shape (n >= {n}, d), got {rows.shape}; pass more vectors")
