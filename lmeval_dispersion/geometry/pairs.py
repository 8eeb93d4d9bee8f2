"""Mean distances over pairs of vectors, with errors; see :mod:`lmeval_dispersion.geometry`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lmeval_dispersion.errors import GeometryError, NoDirectionError, TooFewVectorsError
from lmeval_dispersion.geometry.vectors import Array, at_least, matrix, unit_rows
from lmeval_dispersion.statistics import jackknife_se

Metric = Literal["cosine", "euclidean"]
METRICS: tuple[Metric, ...] = ("cosine", "euclidean")

_BLOCK = 2048  # rows a side of one block of pairs: 32 MB in float64


class PairMean(NamedTuple):
    """Mean pair distance with two errors and what is needed for paired comparisons.

    Attributes:
        mean: Mean distance over all pairs.
        se: Jackknife standard error over vectors.
        se_pairs: sd over pairs / sqrt(pairs), as the papers print it; too small, since pairs share vectors.
        pairs: Number of pairs.
        left_out: The mean without vector i, one value a vector of ``x``; shape (n,).
        left_out_other: The same for the vectors of ``y`` in :func:`between`; empty in :func:`within`.
    """

    mean: float
    se: float
    se_pairs: float
    pairs: int
    left_out: Array
    left_out_other: Array


def within(x: ArrayLike, metric: Metric = "cosine") -> PairMean:
    """Mean distance over all pairs of rows of ``x`` (n >= 3, d), with errors.

    Raises:
        TooFewVectorsError: n < 3, below which there is no error bar; :func:`dispersion` takes two.
        NoDirectionError: A zero or non-finite row (Euclidean: non-finite).

    Source: RD section 3.2.
    """
    return _within(_prepared(x, metric), metric)


def _within(rows: Array, metric: Metric, *, moved: bool = False) -> PairMean:
    at_least(rows, 3)
    n = len(rows)
    row_sums, squares = np.zeros(n), 0.0
    for i, j, block in _distance_blocks(rows, rows, metric, moved=moved):
        if i == j:
            np.fill_diagonal(block, 0.0)
        row_sums[i : i + len(block)] += block.sum(axis=1)
        squares += float(np.square(block).sum())
    total, pairs = float(row_sums.sum()) / 2, n * (n - 1) // 2
    left_out = (total - row_sums) / ((n - 1) * (n - 2) / 2)
    return PairMean(
        total / pairs,
        jackknife_se(left_out),
        _se_pairs(total, squares / 2, pairs),
        pairs,
        left_out,
        np.empty(0),
    )


def between(x: ArrayLike, y: ArrayLike, metric: Metric = "cosine") -> PairMean:
    """Mean distance over all pairs with one row of ``x`` (n >= 2, d) and one of ``y`` (m >= 2, d).

    Raises:
        TooFewVectorsError: Fewer than two rows on a side.
        GeometryError: The widths differ.
        NoDirectionError: A zero or non-finite row (Euclidean: non-finite).

    Source: RD section 3.2.
    """
    return _between(_prepared(x, metric), _prepared(y, metric), metric)


def within_and_between(
    x: ArrayLike, y: ArrayLike, metric: Metric = "cosine"
) -> tuple[PairMean, PairMean, PairMean]:
    """:func:`within` of ``x``, :func:`between` both, and :func:`within` of ``y``, with less work.

    Raises:
        GeometryError: As they do.
    """
    a, b = _prepared(x, metric), _prepared(y, metric)
    if metric != "euclidean" or not len(a) or not len(b) or a.shape[1] != b.shape[1]:
        return _within(a, metric), _between(a, b, metric), _within(b, metric)
    # Each is moved once for both that it serves; x to its own centre for its inside.
    centre = b.mean(axis=0)
    inside = _within(a - a.mean(axis=0), metric, moved=True)
    b = b - centre
    return inside, _between(a - centre, b, metric, moved=True), _within(b, metric, moved=True)


def _between(a: Array, b: Array, metric: Metric, *, moved: bool = False) -> PairMean:
    at_least(a, 2)
    at_least(b, 2)
    if a.shape[1] != b.shape[1]:
        raise GeometryError(f"expected vectors of one width, got {a.shape[1]} and {b.shape[1]}")
    n, m = len(a), len(b)
    sums_a, sums_b, squares = np.zeros(n), np.zeros(m), 0.0
    for i, j, block in _distance_blocks(a, b, metric, moved=moved):
        sums_a[i : i + block.shape[0]] += block.sum(axis=1)
        sums_b[j : j + block.shape[1]] += block.sum(axis=0)
        squares += float(np.square(block).sum())
    total = float(sums_a.sum())
    left_a = (total - sums_a) / ((n - 1) * m)
    left_b = (total - sums_b) / (n * (m - 1))
    return PairMean(
        total / (n * m),
        jackknife_se(left_a, left_b),
        _se_pairs(total, squares, n * m),
        n * m,
        left_a,
        left_b,
    )


class ClusterDistances(NamedTuple):
    """Mean distance of members to their own centroid, and mean pair distance of the centroids."""

    within: float
    between: float
    clusters: int


def cluster_distances(x: ArrayLike, labels: ArrayLike, metric: Metric = "cosine") -> ClusterDistances:
    """Distances within and between labelled clusters of rows.

    ``within`` is the mean over all members of the distance to their cluster's centroid (the mean of the raw
    rows), ``between`` the mean distance over pairs of centroids.

    Args:
        x: Vectors, shape (n, d).
        labels: Cluster of each row, shape (n,), any comparable type.
        metric: ``cosine`` or ``euclidean``.

    Raises:
        GeometryError: ``labels`` has another length than ``x``.
        TooFewVectorsError: Fewer than two clusters.

    Source: RD section 2.3.
    """
    rows = matrix(x)
    names, index = np.unique(np.asarray(labels), return_inverse=True)
    if index.shape != (len(rows),):
        raise GeometryError(f"expected one label a row, got {index.size} labels for {len(rows)} rows")
    if len(names) < 2:
        raise TooFewVectorsError(f"expected at least 2 clusters, got {len(names)}")
    sums = np.zeros((len(names), rows.shape[1]))
    np.add.at(sums, index, rows)
    centroids = _prepared(sums / np.bincount(index)[:, None], metric)
    members = _prepared(rows, metric)
    difference = members - centroids[index]
    squares = np.einsum("ij,ij->i", difference, difference)
    # For unit vectors 1 - u.v = |u - v|^2 / 2.
    to_centroid = squares / 2 if metric == "cosine" else np.sqrt(squares)
    total = 0.0
    for i, j, block in _distance_blocks(centroids, centroids, metric):
        if i == j:
            np.fill_diagonal(block, 0.0)
        total += float(block.sum())
    k = len(names)
    return ClusterDistances(float(to_centroid.mean()), total / (k * (k - 1)), k)


def _prepared(x: ArrayLike, metric: Metric) -> Array:
    if metric == "cosine":
        return unit_rows(x)
    if metric != "euclidean":
        raise GeometryError(f"expected a metric of {', '.join(METRICS)}, got {metric!r}")
    rows = matrix(x)
    bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if bad.size:
        raise NoDirectionError(
            f"expected finite vectors, got {bad.size} of {len(rows)} that are not", bad.tolist()
        )
    return rows


def _distance_blocks(
    a: Array, b: Array, metric: Metric, *, moved: bool = False
) -> Iterator[tuple[int, int, Array]]:
    """Blocks of the distance matrix with their offsets; the blocks may be written to.

    ``moved`` says that the rows lie about their common centre already.
    """
    for i in range(0, len(a), _BLOCK):
        for j in range(0, len(b), _BLOCK):
            left, right = a[i : i + _BLOCK], b[j : j + _BLOCK]
            if metric == "cosine":
                yield i, j, 1.0 - left @ right.T
            else:
                # |a-b|^2 from a Gram matrix of rows moved to a common centre: far from the origin the plain
                # expansion loses the digits of small distances.
                if not moved:
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
