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
        return float(row_correlations(a[None], b[None])[0])
    if kind == "spearman":
        return float(row_correlations(stats.rankdata(a)[None], stats.rankdata(b)[None])[0])
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
    return row_correlations(left, right)


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


def row_correlations(a: Array, b: Array) -> Array:
    """Row by row correlation of ``a`` and ``b`` (r, n); NaN where a row is constant."""
    p, q = a - a.mean(axis=1, keepdims=True), b - b.mean(axis=1, keepdims=True)
    scale = np.sqrt(np.square(p).sum(axis=1) * np.square(q).sum(axis=1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.clip((p * q).sum(axis=1) / scale, -1, 1))
