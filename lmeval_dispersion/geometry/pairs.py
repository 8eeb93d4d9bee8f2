"""Vectors as rows, scaled to length one, and mean distances over their pairs, with errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmeval_dispersion.errors import GeometryError, NoDirectionError, TooFewVectorsError
from lmeval_dispersion.statistics import jackknife_se

Array = NDArray[np.float64]

_NUMBERS = 16_384  # numbers scaled to length one at a time: 128 kB


def valid_rows(x: ArrayLike) -> NDArray[np.bool_]:
    """Return whether each row has a direction: is finite and not all zero. Shape (n,), bool."""
    rows = matrix(x)
    return np.asarray(np.isfinite(rows).all(axis=1) & (rows != 0).any(axis=1))


def unit_rows(x: ArrayLike) -> Array:
    """Scale the rows of ``x`` to length one.

    Values that are very large or very small do not over- or underflow.

    Args:
        x: Shape (n, d).

    Returns:
        Shape (n, d), float64.

    Raises:
        NoDirectionError: A row is zero, or has NaN or infinity.
        GeometryError: ``x`` has another shape.

    >>> unit_rows([[3.0, 4.0]]).tolist()
    [[0.6, 0.8]]
    """
    # A row has a direction if its largest magnitude is finite and not zero. In blocks: temporaries that fit
    # into a processor's cache are several times as fast.
    given = (
        x
        if isinstance(x, np.ndarray) and x.dtype.kind == "f" and x.ndim == 2 and x.size
        else matrix(x)
    )
    rows = np.empty(given.shape)
    valid = np.ones(len(rows), dtype=bool)
    step = max(_NUMBERS // given.shape[1], 1)
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
            f"expected vectors with a direction, got {bad.size} of {len(rows)} that "
            f"are zero or not finite (rows {shown}); drop them and report how many",
            bad.tolist(),
        )
    return rows


def matrix(x: ArrayLike) -> Array:
    """Return ``x`` as an array of shape (n, d), float64.

    Raises:
        GeometryError: ``x`` has another shape, or d is 0.
    """
    rows = np.asarray(x, dtype=np.float64)
    if rows.ndim != 2 or rows.shape[1] == 0:
        raise GeometryError(f"expected `x` of shape (n, d) with d >= 1, got {rows.shape}")
    return rows


def at_least(rows: NDArray[Any], n: int) -> None:
    """Raise TooFewVectorsError if there are fewer than ``n`` rows."""
    if len(rows) < n:
        raise TooFewVectorsError(
            f"expected at least {n} vectors, got an array of shape {rows.shape}; pass more vectors"
        )


Metric = Literal["cosine", "euclidean"]
METRICS: tuple[Metric, ...] = ("cosine", "euclidean")

_FAR = 0.05  # share of the squares about the centre below which rows count as close together, far from 0
_COLUMNS = 1024  # columns of rows that are multiplied with one another at a time
_BLOCK = 2048  # rows a side of one block of pairs: 32 MB in float64


class PairMean(NamedTuple):
    """The mean distance over pairs of vectors, with two standard errors.

    Attributes:
        mean: The mean distance over all pairs.
        se: The jackknife standard error over vectors.
        se_pairs: The standard deviation over pairs divided by sqrt(pairs), as papers print it. It
            is too small, since pairs share vectors.
        pairs: The number of pairs.
        left_out: Shape (n,), the mean with each vector of ``x`` left out in turn.
        left_out_other: Shape (m,), the mean with each vector of ``y`` left out in turn, from
            :func:`between`; empty from :func:`within`.
    """

    mean: float
    se: float
    se_pairs: float
    pairs: int
    left_out: Array
    left_out_other: Array


def within(x: ArrayLike, metric: Metric = "cosine") -> PairMean:
    """Return the mean distance over all pairs of rows, with its standard errors.

    Args:
        x: Shape (n, d) with n >= 3.
        metric: ``cosine`` or ``euclidean``.

    Raises:
        TooFewVectorsError: There are fewer than three rows.
        NoDirectionError: A row has NaN or infinity or, for the cosine, is zero.
        GeometryError: ``x`` has another shape, or ``metric`` is unknown.

    Source: RD section 3.2 (the paper cited in :mod:`lmeval_dispersion.geometry`).
    """
    rows = _prepared(x, metric)
    at_least(rows, 3)
    return _within(_distance_blocks(rows, rows, metric), len(rows))


def _within(blocks: Iterable[tuple[int, int, Array]], n: int) -> PairMean:
    row_sums, squares = np.zeros(n), 0.0
    for i, j, block in blocks:
        if i == j:
            np.fill_diagonal(block, 0.0)
        row_sums[i : i + len(block)] += block.sum(axis=1)
        squares += float(np.square(block).sum())
    total, pairs = float(row_sums.sum()) / 2, n * (n - 1) // 2
    left_out = (total - row_sums) / ((n - 1) * (n - 2) / 2)
    return PairMean(
        mean=total / pairs,
        se=jackknife_se(left_out),
        se_pairs=_se_pairs(total, squares / 2, pairs),
        pairs=pairs,
        left_out=left_out,
        left_out_other=np.empty(0),
    )


def between(x: ArrayLike, y: ArrayLike, metric: Metric = "cosine") -> PairMean:
    """Return the mean distance over all pairs of a row of ``x`` and a row of ``y``.

    Args:
        x: Shape (n, d) with n >= 2.
        y: Shape (m, d) with m >= 2.
        metric: ``cosine`` or ``euclidean``.

    Returns:
        The mean with its standard errors.

    Raises:
        TooFewVectorsError: ``x`` or ``y`` has fewer than two rows.
        NoDirectionError: A row has NaN or infinity or, for the cosine, is zero.
        GeometryError: A shape does not fit, or ``metric`` is unknown.

    Source: RD section 3.2 (the paper cited in :mod:`lmeval_dispersion.geometry`).
    """
    a, b = _prepared(x, metric), _prepared(y, metric)
    at_least(a, 2)
    at_least(b, 2)
    if a.shape[1] != b.shape[1]:
        raise GeometryError(
            f"expected vectors of one width, got {a.shape[1]} and {b.shape[1]}; pass vectors of one "
            "model"
        )
    return _between(_distance_blocks(a, b, metric), len(a), len(b))


class Contrast(NamedTuple):
    """The mean distances within and between two sets of vectors, ``x`` and ``y``.

    Attributes:
        within: Mean distance over the pairs inside ``x``.
        between: Mean distance over the pairs of one vector of ``x`` and one of ``y``.
        within_other: Mean distance over the pairs inside ``y``.

    Each is a `PairMean`.
    """

    within: PairMean
    between: PairMean
    within_other: PairMean


def contrasts(x: ArrayLike, y: ArrayLike) -> dict[Metric, Contrast]:
    """Return the mean distances within and between two sets of vectors, for each metric.

    The results are those of `within` and `between`. Up to 2048 float32 rows take a single matrix
    product for both metrics. Rows that lie close together but far from the origin are centred
    first, since their distances would otherwise be small differences of large numbers.

    Args:
        x: Shape (n, d) with n >= 3.
        y: Shape (m, d) with m >= 3.

    Returns:
        A `Contrast` for each metric, ``cosine`` and ``euclidean``.

    Raises:
        TooFewVectorsError: ``x`` or ``y`` has fewer than three rows.
        NoDirectionError: A row is zero, or has NaN or infinity.
        GeometryError: A shape does not fit.
    """
    a, b = np.asarray(x), np.asarray(y)
    plain = (
        a.dtype == b.dtype == np.float32 and a.ndim == b.ndim == 2 and a.shape[1] == b.shape[1] > 0
    )
    n, both = len(a), len(a) + len(b)
    if plain and both <= _BLOCK and n >= 3 and both - n >= 3:
        with np.errstate(
            invalid="ignore"
        ):  # the lengths show values that are not finite, refused below
            products = _products(a, b, centred=False)
        squares = np.diagonal(products)
        lengths = np.sqrt(squares)
        if np.isfinite(lengths).all() and (lengths > 0).all():
            cosine = 1.0 - products / lengths / lengths[:, None]
            total = squares.sum()
            if total - products.sum() / both < _FAR * total:  # sum of squares about the centre
                products = _products(a, b, centred=True)
                squares = np.diagonal(products)
            euclidean = np.sqrt(np.maximum(squares[:, None] + squares - 2 * products, 0.0))
            return {"cosine": _contrast(cosine, n), "euclidean": _contrast(euclidean, n)}
    return {m: Contrast(within(x, m), between(x, y, m), within(y, m)) for m in METRICS}


def _products(x: NDArray[np.float32], y: NDArray[np.float32], *, centred: bool) -> Array:
    """Products of all rows with one another, in float64; moved to their common centre on request."""
    n, both = len(x), len(x) + len(y)
    products = np.zeros((both, both))
    rows = np.empty((both, min(_COLUMNS, x.shape[1])))
    for begin in range(0, x.shape[1], _COLUMNS):
        some = rows[:, : x.shape[1] - begin]
        some[:n], some[n:] = x[:, begin : begin + _COLUMNS], y[:, begin : begin + _COLUMNS]
        if centred:
            some -= some.mean(axis=0)
        products += some @ some.T
    return products


def _contrast(distances: Array, n: int) -> Contrast:
    """From the distances of all rows; the first ``n`` belong to x."""
    m = len(distances) - n
    return Contrast(
        _within([(0, 0, distances[:n, :n])], n),
        _between([(0, 0, distances[:n, n:])], n, m),
        _within([(0, 0, distances[n:, n:])], m),
    )


def _between(blocks: Iterable[tuple[int, int, Array]], n: int, m: int) -> PairMean:
    sums_a, sums_b, squares = np.zeros(n), np.zeros(m), 0.0
    for i, j, block in blocks:
        sums_a[i : i + block.shape[0]] += block.sum(axis=1)
        sums_b[j : j + block.shape[1]] += block.sum(axis=0)
        squares += float(np.square(block).sum())
    total = float(sums_a.sum())
    left_a = (total - sums_a) / ((n - 1) * m)
    left_b = (total - sums_b) / (n * (m - 1))
    return PairMean(
        mean=total / (n * m),
        se=jackknife_se(left_a, left_b),
        se_pairs=_se_pairs(total, squares, n * m),
        pairs=n * m,
        left_out=left_a,
        left_out_other=left_b,
    )


def _prepared(x: ArrayLike, metric: Metric) -> Array:
    if metric == "cosine":
        return unit_rows(x)
    if metric != "euclidean":
        raise GeometryError(f"expected the metric {' or '.join(METRICS)}, got {metric!r}")
    rows = matrix(x)
    bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if bad.size:
        raise NoDirectionError(
            f"expected finite vectors, got NaN or infinity in {bad.size} of {len(rows)} rows; "
            "leave these rows out",
            bad.tolist(),
        )
    return rows


def _distance_blocks(a: Array, b: Array, metric: Metric) -> Iterator[tuple[int, int, Array]]:
    """Blocks of the distance matrix with their offsets; the blocks may be written to."""
    for i in range(0, len(a), _BLOCK):
        for j in range(0, len(b), _BLOCK):
            left, right = a[i : i + _BLOCK], b[j : j + _BLOCK]
            if metric == "cosine":
                yield i, j, 1.0 - left @ right.T
            else:
                # |a-b|^2 from a Gram matrix of rows moved to a common centre: far from the origin the plain
                # expansion loses the digits of small distances.
                centre = b.mean(axis=0)
                right = right - centre
                left = right if a is b and i == j else left - centre
                squares = _squares(left)[:, None] + _squares(right)
                yield i, j, np.sqrt(np.maximum(squares - 2 * (left @ right.T), 0.0))


def _squares(rows: Array) -> Array:
    """Squared length of each row."""
    return np.asarray(np.einsum("ij,ij->i", rows, rows))


def _se_pairs(total: float, squares: float, pairs: int) -> float:
    if pairs < 2:
        return float("nan")
    variance = max(squares - total * total / pairs, 0.0) / (pairs - 1)
    return float(np.sqrt(variance / pairs))
