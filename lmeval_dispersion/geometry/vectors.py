"""Vectors as rows of a matrix: checked, widened to float64, brought to length one."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmeval_dispersion.errors import GeometryError, NoDirectionError, TooFewVectorsError

Array = NDArray[np.float64]


def valid_rows(x: ArrayLike) -> NDArray[np.bool_]:
    """Which rows have a direction: all finite, not all zero. Shape (n,), bool."""
    rows = matrix(x)
    return np.asarray(np.isfinite(rows).all(axis=1) & (rows != 0).any(axis=1))


def unit_rows(x: ArrayLike) -> Array:
    """The rows of ``x`` (n, d) at length one, float64.

    Rows are first divided by their largest magnitude, so that neither tiny nor huge values over- or
    underflow.

    Raises:
        NoDirectionError: A row is zero or not finite; ``.rows`` has their indices. Drop them with
            :func:`valid_rows` and say how many.

    >>> unit_rows([[3.0, 4.0]]).tolist()
    [[0.6, 0.8]]
    """
    rows = matrix(x)
    bad = np.flatnonzero(~valid_rows(rows))
    if bad.size:
        shown = ", ".join(map(str, bad[:5])) + (", ..." if bad.size > 5 else "")
        raise NoDirectionError(
            f"expected vectors with a direction, got {bad.size} of {len(rows)} zero or non-finite "
            f"(rows {shown}); drop them and report how many",
            bad.tolist(),
        )
    if not len(rows):
        return rows
    scaled = rows / np.abs(rows).max(axis=1, keepdims=True)
    return np.asarray(scaled / np.sqrt(np.einsum("ij,ij->i", scaled, scaled))[:, None])


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
