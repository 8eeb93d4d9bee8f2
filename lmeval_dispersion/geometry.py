"""How far apart vectors are: the quantities everything else in this project is made of.

Arrays are numpy, ``x`` has shape (n, d): ``n`` vectors of width ``d``, any float dtype. Arithmetic is in
float64. Cosine distance is ``1 - u_i.u_j`` in [0, 2] with ``u = x/|x|``; Euclidean distance is taken on raw
rows. Undefined quantities raise; nothing here returns a silent NaN or a silent 0, because 0 means
*collapsed*.

Mean pair distances over n vectors cost O(n d) for the cosine by closed forms and O(n^2 d) in blocks for the
Euclidean. Pairs share vectors, so the papers' error (sd over pairs / sqrt(pairs)) is too small; it is
given as ``se_pairs``. ``se`` is a jackknife over vectors.

Source: "On the Predictive Power of Representation Dispersion in Language Models" (ICLR 2026), eq. 1,
sections 2.3 and 3.2, appendix A.5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmeval_dispersion.errors import GeometryError, NoDirectionError, TooFewVectorsError

Array = NDArray[np.float64]
Metric = Literal["cosine", "euclidean"]
METRICS: tuple[Metric, ...] = ("cosine", "euclidean")

_BLOCK = 2048  # rows a side of one block of pairs: 32 MB in float64


class Estimate(NamedTuple):
    """A mean distance with its jackknife standard error over ``n`` vectors (``se`` NaN when n = 2)."""

    mean: float
    se: float
    n: int


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


def valid_rows(x: ArrayLike) -> NDArray[np.bool_]:
    """Which rows have a direction: all finite, not all zero. Shape (n,), bool."""
    rows = _matrix(x)
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
    rows = _matrix(x)
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


def dispersion(x: ArrayLike) -> float:
    """Mean cosine distance over all pairs of rows of ``x`` (n >= 2, d).

    0 all parallel, 1 orthogonal on average, at most n/(n-1). Computed as sum |u_i - mean|^2 / (n - 1), which
    keeps its digits when the vectors are nearly parallel. Compare a model with itself or its siblings
    only.

    Raises:
        TooFewVectorsError: n < 2.
        NoDirectionError: A zero or non-finite row.

    Source: RD eq. 1. Differs from ``torchmetrics.functional.pairwise_cosine_similarity(reduction="mean")``,
    which counts a zeroed diagonal.

    >>> dispersion([[1, 0], [0, 1]])
    1.0
    """
    u = unit_rows(x)
    _at_least(u, 2)
    centred = u - u.mean(axis=0)
    return float(np.einsum("ij,ij->", centred, centred) / (len(u) - 1))


def contributions(x: ArrayLike) -> Array:
    """Mean cosine distance of every row to all the others; shape (n,). Their mean is the dispersion.

    Low values mark texts that the model hardly tells from the rest.

    Raises:
        TooFewVectorsError: n < 2.
        NoDirectionError: A zero or non-finite row.
    """
    u = unit_rows(x)
    _at_least(u, 2)
    # 1 - (u_i.s - 1)/(n-1), written around the mean so that nearly parallel rows keep their digits:
    # the distance of i to the others is (|u_i - m|^2 n + sum_j |u_j - m|^2) / (2 (n-1)).
    n = len(u)
    centred = u - u.mean(axis=0)
    squares = np.einsum("ij,ij->i", centred, centred)
    return np.asarray((n * squares + squares.sum()) / (2 * (n - 1)))


def dispersion_estimate(x: ArrayLike) -> Estimate:
    """:func:`dispersion` with its jackknife standard error over rows, in O(n d).

    Leaving text i out changes the mean by (D - c_i) 2/(n - 2), with c_i its contribution.

    Raises:
        TooFewVectorsError: n < 2.
        NoDirectionError: A zero or non-finite row.
    """
    return _jackknifed(contributions(x))


def streamed_dispersion_estimate(blocks: Callable[[], Iterable[ArrayLike]]) -> Estimate:
    """:func:`dispersion_estimate` of rows that come in blocks; float64 copies are one block large.

    Args:
        blocks: Called twice; gives blocks of rows (n_i, d), the same ones each time.

    Raises:
        TooFewVectorsError: Fewer than two rows in all.
        NoDirectionError: A zero or non-finite row; ``.rows`` counts within its block.
    """
    total: Any = 0.0
    n = 0
    for block in blocks():
        u = unit_rows(block)
        total, n = total + u.sum(axis=0), n + len(u)
    if n < 2:
        raise TooFewVectorsError(f"expected at least 2 vectors, got {n}; pass more texts")
    mean = total / n
    parts = [np.square(unit_rows(block) - mean).sum(axis=1) for block in blocks()]
    squares = np.concatenate(parts)
    return _jackknifed((n * squares + squares.sum()) / (2 * (n - 1)))


def _jackknifed(c: Array) -> Estimate:
    n, mean = len(c), float(c.mean())
    if n == 2:
        return Estimate(mean, float("nan"), n)
    left_out = mean + (mean - c) * 2 / (n - 2)
    return Estimate(mean, jackknife_se(left_out), n)


def jackknife_se(*left_out: ArrayLike) -> float:
    """Standard error from leave-one-out values, one array for each independent sample of vectors.

    sqrt(sum over samples of (n-1)/n * sum (theta_-i - mean)^2). With two arrays it is the two-sample
    jackknife; on differences of leave-one-out values over shared vectors it is the paired one.
    """
    variance = 0.0
    for values in left_out:
        theta = np.asarray(values, dtype=np.float64)
        if theta.size:
            variance += (theta.size - 1) / theta.size * float(np.square(theta - theta.mean()).sum())
    return float(np.sqrt(variance))


def within(x: ArrayLike, metric: Metric = "cosine") -> PairMean:
    """Mean distance over all pairs of rows of ``x`` (n >= 3, d), with errors.

    Raises:
        TooFewVectorsError: n < 3, below which there is no error bar; :func:`dispersion` takes two.
        NoDirectionError: A zero or non-finite row (Euclidean: non-finite).

    Source: RD section 3.2.
    """
    rows = _prepared(x, metric)
    _at_least(rows, 3)
    n = len(rows)
    row_sums, squares = np.zeros(n), 0.0
    for i, j, block in _distance_blocks(rows, rows, metric):
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
    a, b = _prepared(x, metric), _prepared(y, metric)
    _at_least(a, 2)
    _at_least(b, 2)
    if a.shape[1] != b.shape[1]:
        raise GeometryError(f"expected vectors of one width, got {a.shape[1]} and {b.shape[1]}")
    n, m = len(a), len(b)
    sums_a, sums_b, squares = np.zeros(n), np.zeros(m), 0.0
    for i, j, block in _distance_blocks(a, b, metric):
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


def vendi_score(x: ArrayLike) -> float:
    """Effective number of distinct directions: exp of the entropy of the eigenvalues of K/n, K = u u^T.

    1 all parallel, n (or d, if smaller) all orthogonal. Eigenvalues are those of the smaller side.

    Raises:
        TooFewVectorsError: No rows.
        NoDirectionError: A zero or non-finite row.

    Source: RD A.5, after Friedman and Dieng (2023). Equals ``vendi_score.vendi.score_X(u)``.

    >>> round(vendi_score([[1, 0], [0, 1]]), 6)
    2.0
    """
    u = unit_rows(x)
    _at_least(u, 1)
    gram = (u.T @ u if u.shape[1] < len(u) else u @ u.T) / len(u)
    values = np.linalg.eigvalsh(gram)
    values = values[values > 1e-15]
    return float(np.exp(-(values * np.log(values)).sum()))


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
    rows = _matrix(x)
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


class Dispersion:
    """Mergeable accumulator of :func:`dispersion`: two halves, or two ranks, give the figure of the whole.

    The state is a count and sums of unit rows in float64, held in ``groups`` groups that rows join in turn;
    the error is the jackknife over groups, the mean is exact. Memory is ``groups x d`` float64, whatever
    the number of rows.

    Args:
        width: Width ``d`` of the vectors.
        groups: Number of jackknife groups; merged accumulators need the same.

    >>> a, b = Dispersion(2), Dispersion(2)
    >>> a.update([[1, 0]]); b.update([[0, 1]])
    >>> a.merge(b)
    >>> a.mean()
    1.0
    """

    def __init__(self, width: int, groups: int = 32) -> None:
        if width < 1 or groups < 2:
            raise GeometryError(f"expected width >= 1 and groups >= 2, got {width} and {groups}")
        self.sums: Array = np.zeros((groups, width))
        self.counts: NDArray[np.int64] = np.zeros(groups, dtype=np.int64)

    @property
    def count(self) -> int:
        """Rows seen."""
        return int(self.counts.sum())

    def update(self, x: ArrayLike) -> None:
        """Add rows (n, d). Raises NoDirectionError on zero or non-finite ones, adding none of them."""
        u = unit_rows(x)
        if not len(u):
            return
        if u.shape[1] != self.sums.shape[1]:
            raise GeometryError(f"expected vectors of width {self.sums.shape[1]}, got {u.shape[1]}")
        groups = len(self.counts)
        start = self.count % groups
        order = (start + np.arange(len(u))) % groups
        for group in range(min(groups, len(u))):
            self.sums[order[group]] += u[group::groups].sum(axis=0)
        self.counts += np.bincount(order, minlength=groups)

    def merge(self, other: Dispersion) -> None:
        """Add what ``other`` has seen. Raises GeometryError if widths or numbers of groups differ."""
        if self.sums.shape != other.sums.shape:
            raise GeometryError(f"expected an accumulator of shape {self.sums.shape}, got {other.sums.shape}")
        self.sums += other.sums
        self.counts += other.counts

    def mean(self) -> float:
        """The dispersion of all rows seen. Raises TooFewVectorsError below two rows."""
        return self._mean(self.sums.sum(axis=0), self.count)

    def estimate(self) -> Estimate:
        """The dispersion with its grouped-jackknife error (NaN where fewer than three rows were seen)."""
        total, n = self.sums.sum(axis=0), self.count
        mean = self._mean(total, n)
        used = np.flatnonzero(self.counts)
        if n < 3 or len(used) < 2 or n - int(self.counts[used].max()) < 2:
            return Estimate(mean, float("nan"), n)
        left_out = [self._mean(total - self.sums[g], n - int(self.counts[g])) for g in used]
        return Estimate(mean, jackknife_se(left_out), n)

    def state(self) -> dict[str, Any]:
        """The state as plain arrays, to be saved or sent to another process."""
        return {"sums": self.sums, "counts": self.counts}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Dispersion:
        """An accumulator that goes on from :meth:`state`."""
        sums = np.array(state["sums"], dtype=np.float64)
        new = cls(sums.shape[1], sums.shape[0])
        new.sums, new.counts = sums, np.array(state["counts"], dtype=np.int64)
        return new

    @staticmethod
    def _mean(total: Array, n: int) -> float:
        if n < 2:
            raise TooFewVectorsError(f"expected at least 2 vectors, got {n}; pass more texts")
        return 1.0 - (float(total @ total) - n) / (n * (n - 1))


def _matrix(x: ArrayLike) -> Array:
    rows = np.asarray(x, dtype=np.float64)
    if rows.ndim != 2 or rows.shape[1] == 0:
        raise GeometryError(f"expected `x` of shape (n, d), got {rows.shape}")
    return rows


def _prepared(x: ArrayLike, metric: Metric) -> Array:
    if metric == "cosine":
        return unit_rows(x)
    if metric != "euclidean":
        raise GeometryError(f"expected a metric of {', '.join(METRICS)}, got {metric!r}")
    rows = _matrix(x)
    bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if bad.size:
        raise NoDirectionError(
            f"expected finite vectors, got {bad.size} of {len(rows)} that are not", bad.tolist()
        )
    return rows


def _at_least(rows: Array, n: int) -> None:
    if len(rows) < n:
        raise TooFewVectorsError(f"expected `x` of shape (n >= {n}, d), got {rows.shape}; pass more vectors")


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
                left, right = left - centre, right - centre
                squares = np.square(left).sum(axis=1)[:, None] + np.square(right).sum(axis=1)
                yield i, j, np.sqrt(np.maximum(squares - 2 * (left @ right.T), 0.0))


def _se_pairs(total: float, squares: float, pairs: int) -> float:
    if pairs < 2:
        return float("nan")
    variance = max(squares - total * total / pairs, 0.0) / (pairs - 1)
    return float(np.sqrt(variance / pairs))
