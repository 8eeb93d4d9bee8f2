"""Numbers that the laboratory's analyses share: bins, correlations with intervals, effective rank.

Everything here takes plain arrays and knows nothing of models. Undefined numbers raise
:class:`~lmeval_dispersion.errors.GeometryError`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from lmeval_dispersion.errors import GeometryError, TooFewVectorsError

Array = NDArray[np.float64]
Correlation = Literal["pearson", "spearman", "kendall"]

REPEATS = 2000  # bootstrap samples
LEVEL = 0.95
_COUNTS = 2**21  # resampling counts held at a time: 16 MB


class Interval(NamedTuple):
    """A number with its 95 % interval; ``low`` and ``high`` are NaN where no interval is defined."""

    value: float
    low: float
    high: float


def perplexity(mean_nll: ArrayLike) -> Array:
    """Perplexity, exp of the mean negative log-probability (nats) a token; >= 1, lower is easier."""
    return np.asarray(np.exp(np.asarray(mean_nll, dtype=np.float64)))


def sorted_bins(values: ArrayLike, size: int) -> NDArray[np.int64]:
    """Indices of ``values`` (n,), ascending, cut into bins of ``size``; shape (n // size, size).

    The n mod size highest values fill no bin and are left out. Equal values keep their order.

    Raises:
        TooFewVectorsError: n < size.

    >>> sorted_bins([3.0, 1.0, 2.0, 9.0, 5.0], 2).tolist()
    [[1, 2], [0, 4]]
    """
    numbers = np.asarray(values, dtype=np.float64)
    count = len(numbers) // size
    if count < 1:
        raise TooFewVectorsError(
            f"expected at least one bin of {size} segments, got {len(numbers)}; "
            "pass more text, shorter segments or smaller bins"
        )
    order = np.argsort(numbers, kind="stable")
    return np.asarray(order[: count * size].reshape(count, size), dtype=np.int64)


def uniform_bins(means: ArrayLike, k: int) -> NDArray[np.int64]:
    """Which ``k`` of the bins with ascending ``means`` (g,) cover their range evenly; ascending indices.

    Algorithm 1 of the paper: k targets evenly spaced from the lowest mean to the highest, the bin nearest
    to each (the lower one of two equally near), then the first bins of the sorted list not yet taken until
    there are k. All of them where k >= g.

    Source: RD A.1.2, algorithm 1.

    >>> uniform_bins([1.0, 1.1, 1.2, 5.0, 9.0], 3).tolist()
    [0, 3, 4]
    """
    values = np.asarray(means, dtype=np.float64)
    if k < 1:
        raise GeometryError(f"expected at least 1 bin, got {k}")
    if k >= len(values):
        return np.arange(len(values))
    targets = np.linspace(values[0], values[-1], k)
    chosen = set(np.abs(values[None, :] - targets[:, None]).argmin(axis=1).tolist())
    for extra in range(len(values)):
        if len(chosen) == k:
            break
        chosen.add(extra)
    return np.array(sorted(chosen), dtype=np.int64)


def correlation(x: ArrayLike, y: ArrayLike, kind: Correlation = "pearson") -> float:
    """Correlation of ``x`` and ``y`` (n,), in [-1, 1].

    Raises:
        GeometryError: n < 3, a non-finite value, or one of the two is constant.
    """
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1 or len(a) < 3:
        raise GeometryError(
            f"a correlation needs two rows of at least 3 numbers, got {a.shape} and {b.shape}"
        )
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise GeometryError("a correlation needs finite numbers")
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        raise GeometryError("a correlation with a constant is not defined")
    if kind == "pearson":
        return float(_pearson(a[None], b[None])[0])
    if kind == "spearman":
        return float(_pearson(stats.rankdata(a)[None], stats.rankdata(b)[None])[0])
    return float(stats.kendalltau(a, b).statistic)


def bootstrap_correlation(
    x: ArrayLike, y: ArrayLike, kind: Correlation = "pearson", seed: int = 0
) -> Interval:
    """:func:`correlation` with its percentile bootstrap interval over the n points.

    Raises:
        GeometryError: As :func:`correlation`.
    """
    return Interval(correlation(x, y, kind), *percentiles(resampled_correlations(x, y, kind, seed)))


def resampled_correlations(x: ArrayLike, y: ArrayLike, kind: Correlation = "pearson", seed: int = 0) -> Array:
    """Correlation of ``x`` and ``y`` (n,) in REPEATS resamples of the points; NaN where one is constant."""
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    draws = np.random.default_rng(seed).integers(0, len(a), size=(REPEATS, len(a)))
    left, right = a[draws], b[draws]
    if kind == "kendall":
        varied = (np.ptp(left, axis=1) > 0) & (np.ptp(right, axis=1) > 0)
        samples = np.full(REPEATS, np.nan)
        for row in np.flatnonzero(varied):
            samples[row] = stats.kendalltau(left[row], right[row]).statistic
        return samples
    if kind == "spearman":
        left, right = stats.rankdata(left, axis=1), stats.rankdata(right, axis=1)
    return _pearson(left, right)


class DepthTrend(NamedTuple):
    """How a quantity moves with depth: Spearman rho and Kendall tau with intervals over texts."""

    spearman: Interval
    kendall: Interval


def depth_trend(per_text: ArrayLike, seed: int = 0) -> DepthTrend:
    """Rank correlation with depth of the column means of ``per_text`` (n texts, layers).

    +1: the mean rises with every layer, -1: it falls with every layer. The interval resamples texts.

    Raises:
        GeometryError: Fewer than 3 layers, a non-finite value, or the same mean in all layers.

    Source: LD section 2 (Spearman and Kendall of the layer mean of the cosine similarity).
    """
    values = np.asarray(per_text, dtype=np.float64)
    if values.ndim != 2 or not len(values):
        raise GeometryError(f"expected values of shape (texts >= 1, layers), got {values.shape}")
    depth = np.arange(values.shape[1])
    means = values.mean(axis=0)
    rho, tau = correlation(depth, means, "spearman"), correlation(depth, means, "kendall")
    if len(values) < 2:
        nan = float("nan")
        return DepthTrend(Interval(rho, nan, nan), Interval(tau, nan, nan))
    rhos, taus = depth_samples(values, seed)
    return DepthTrend(Interval(rho, *percentiles(rhos)), Interval(tau, *percentiles(taus)))


def depth_samples(values: Array, seed: int = 0) -> tuple[Array, Array]:
    """Spearman and Kendall of the layer mean with depth in REPEATS resamples of the texts.

    One seed resamples any two studies of as many texts alike, so their differences are paired.
    """
    depth = np.arange(values.shape[1])
    samples = resampled_means(values, seed)
    ranks = stats.rankdata(samples, axis=1)
    rhos = _pearson(np.broadcast_to(depth + 1.0, ranks.shape), ranks)
    upper = np.triu_indices(len(depth), 1)
    # Depth has no ties, so tau-b needs only the ties of the samples.
    signs = np.sign(samples[:, upper[1]] - samples[:, upper[0]])
    with np.errstate(invalid="ignore", divide="ignore"):
        taus = signs.sum(axis=1) / np.sqrt(np.abs(signs).sum(axis=1) * len(upper[0]))
    return rhos, np.asarray(taus)


def resampled_means(values: Array, seed: int = 0) -> Array:
    """Bootstrap means over rows of ``values`` (n, k); shape (REPEATS, k)."""
    rng = np.random.default_rng(seed)
    n = len(values)
    # Counts times values is the mean of a resample, without holding REPEATS x n x k numbers.
    even = np.full(n, 1 / n)
    block = max(1, _COUNTS // n)
    sizes = [min(block, REPEATS - start) for start in range(0, REPEATS, block)]
    return np.concatenate([rng.multinomial(n, even, size=size) @ values / n for size in sizes])


def mean_interval(values: ArrayLike, seed: int = 0) -> Interval:
    """Mean of ``values`` (n,) with its percentile bootstrap interval (NaN bounds where n < 2)."""
    numbers = np.asarray(values, dtype=np.float64)
    if not len(numbers):
        raise TooFewVectorsError("expected at least one value, got none")
    mean = float(numbers.mean())
    if len(numbers) < 2:
        return Interval(mean, float("nan"), float("nan"))
    return Interval(mean, *percentiles(resampled_means(numbers[:, None], seed)[:, 0]))


def percentiles(samples: Array) -> tuple[float, float]:
    """The bounds that hold 95 % of the finite ``samples``; NaN where there are none."""
    finite = samples[np.isfinite(samples)]
    if not len(finite):
        return float("nan"), float("nan")
    low, high = np.quantile(finite, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def effective_rank(x: ArrayLike) -> float:
    """Effective number of dimensions that the rows of ``x`` (n >= 2, d) spread over, in [1, min(n, d)].

    Rows are centred, scaled to length one, and the entropy of the normalised eigenvalues of their
    covariance is exponentiated. Low: the texts (or tokens) lie along few directions around their mean.
    Differs from the Vendi score by the centring.

    Raises:
        TooFewVectorsError: n < 2.
        GeometryError: A non-finite value, or all rows are the same.

    Source: "Diff-eRank: A Novel Rank-Based Metric for Evaluating Large Language Models" (NeurIPS 2024),
    after Roy and Vetterli (2007).

    >>> round(effective_rank([[1, 0], [-1, 0], [0, 1], [0, -1]]), 6)
    2.0
    """
    rows = np.asarray(x, dtype=np.float64)
    if rows.ndim != 2 or len(rows) < 2:
        raise TooFewVectorsError(f"expected `x` of shape (n >= 2, d), got {rows.shape}; pass more vectors")
    if not np.isfinite(rows).all():
        raise GeometryError("the effective rank needs finite vectors")
    centred = rows - rows.mean(axis=0)
    lengths = np.sqrt(np.einsum("ij,ij->i", centred, centred))
    # Below rounding of the rows themselves a distance from the mean is noise, not a direction.
    noise = 1e-12 * np.sqrt(np.einsum("ij,ij->i", rows, rows))
    kept = lengths > noise
    if not kept.any():
        raise GeometryError("the effective rank of rows that are all the same is not defined")
    unit = centred[kept] / lengths[kept, None]
    gram = unit.T @ unit if unit.shape[1] < len(unit) else unit @ unit.T
    values = np.linalg.eigvalsh(gram)
    values = values[values > 0] / values[values > 0].sum()
    values = values[values > 1e-15]
    return float(np.exp(-(values * np.log(values)).sum()))


def _pearson(a: Array, b: Array) -> Array:
    """Row by row correlation of ``a`` and ``b`` (r, n); NaN where a row is constant."""
    p, q = a - a.mean(axis=1, keepdims=True), b - b.mean(axis=1, keepdims=True)
    scale = np.sqrt(np.square(p).sum(axis=1) * np.square(q).sum(axis=1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.clip((p * q).sum(axis=1) / scale, -1, 1))
