"""Statistics for the whole package, on plain arrays, with numpy alone.

The functions know nothing of models, vectors or files. They use no scipy, which the screener's base
install lacks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmeval_dispersion.errors import GeometryError, TooFewVectorsError

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Correlation = Literal["pearson", "spearman"]
K = TypeVar("K", bound=Hashable)

NORMAL_975 = 1.959963984540054  # 97.5 % point of the normal distribution
REPEATS = 2000  # bootstrap samples
LEVEL = 0.95

_FEW = 50  # documents up to which two added ones count whole
_COUNTS = 2**21  # resampling counts held at a time: 16 MB
_EXACT_UP_TO = 9  # 9! = 362,880 orders are enumerated; larger strata are sampled
_DRAWS = 9_999


class Bounds(NamedTuple):
    """The two ends of an interval, of 95 % if no other level is stated; NaN if it is undefined.

    Attributes:
        low: The lower end.
        high: The upper end.
    """

    low: float
    high: float


UNDEFINED = Bounds(math.nan, math.nan)


class PairedTest(NamedTuple):
    """The result of a test of a paired difference.

    Attributes:
        low: Lower end of the 95 % interval of the difference.
        high: Upper end of that interval.
        p: Two-sided p-value of the hypothesis that there is no difference.
    """

    low: float
    high: float
    p: float


class Interval(NamedTuple):
    """A number with its 95 % interval.

    Attributes:
        value: The number.
        low: Lower end of the interval; NaN where none is defined.
        high: Upper end of the interval; NaN where none is defined.
    """

    value: float
    low: float
    high: float

    def side(self, nothing: float) -> int:
        """Return 1 if the interval lies above ``nothing``, -1 if it lies below, and 0 otherwise.

        ``nothing`` is the value that means no effect. The result is 0 for an interval of NaN.
        """
        return int(self.low > nothing) - int(self.high < nothing)


# --- ranks and correlations --------------------------------------------------------------------------------


def ranks(values: ArrayLike) -> Array:
    """Return ranks from 1 along the last axis of ``values``, in the same shape.

    Equal values get their mean rank. A row with a NaN has only NaN ranks.

    >>> ranks([10, 30, 10, 20]).tolist()
    [1.5, 4.0, 1.5, 3.0]
    """
    x = np.asarray(values, dtype=np.float64)
    if not x.size:
        return x.copy()
    order = np.argsort(x, axis=-1, kind="stable")
    ordered = np.take_along_axis(x, order, axis=-1)
    differs = ordered[..., 1:] != ordered[..., :-1]
    edge = np.ones((*x.shape[:-1], 1), dtype=bool)
    n = x.shape[-1]
    place = np.arange(n)
    first = np.maximum.accumulate(
        np.where(np.concatenate([edge, differs], axis=-1), place, 0), axis=-1
    )
    is_last = np.concatenate([differs, edge], axis=-1)
    last = np.minimum.accumulate(np.where(is_last, place, n)[..., ::-1], axis=-1)[..., ::-1]
    means = np.empty_like(x)
    np.put_along_axis(means, order, (first + last) / 2 + 1, axis=-1)
    means[np.isnan(x).any(axis=-1)] = np.nan
    return means


def correlation(x: ArrayLike, y: ArrayLike, kind: Correlation = "pearson") -> float:
    """Return the correlation of ``x`` and ``y`` (n,), in [-1, 1].

    ``kind`` is ``pearson`` or ``spearman``.

    Raises:
        GeometryError: The shapes differ, n < 3, a number is not finite, or an array is constant.
    """
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1 or len(a) < 3:
        raise GeometryError(
            "expected two arrays of equal length, at least 3, for a correlation, got the shapes "
            f"{a.shape} and {b.shape}"
        )
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise GeometryError(
            "expected finite numbers for a correlation, got NaN or infinity; leave out those points"
        )
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        raise GeometryError("a correlation with a constant is not defined")
    rows = paired_rank_correlations if kind == "spearman" else paired_correlations
    return float(rows(a[None], b[None])[0])


def paired_correlations(first: ArrayLike, second: ArrayLike) -> Array:
    """Return the Pearson correlation of each row of ``first`` with the same row of ``second``.

    ``first`` is (m, k), or (1, k) for one row against all; ``second`` is (m, k). The result has the
    shape (m,), with values in [-1, 1]; NaN where a row is constant or holds a NaN.
    """
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    p, q = a - a.mean(axis=1, keepdims=True), b - b.mean(axis=1, keepdims=True)
    scale = np.sqrt(np.square(p).sum(axis=1) * np.square(q).sum(axis=1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.clip((p * q).sum(axis=1) / scale, -1, 1))


def paired_rank_correlations(first: ArrayLike, second: ArrayLike) -> Array:
    """Return the Spearman correlation of each row of ``first`` with the same row of ``second``.

    Shapes and values are as in :func:`paired_correlations`.
    """
    return paired_correlations(ranks(first), ranks(second))


def rank_correlations(x: ArrayLike, rows: ArrayLike) -> Array:
    """Return the Spearman correlation of ``x`` (k,) with each of ``rows`` (m, k), shape (m,).

    The result is NaN for a row that is constant or holds a NaN.
    """
    return paired_rank_correlations(np.asarray(x, dtype=np.float64)[None], rows)


def spearman_bounds(rho: float, n: int) -> Bounds:
    """Return the 95 % interval of a Spearman correlation of ``n`` independent pairs, in [-1, 1].

    The interval is NaN for n < 8, or if ``rho`` is NaN. It is computed on the scale of Fisher's z
    with the variance (1 + rho^2 / 2) / (n - 3), where ±1 counts as the nearest possible correlation
    inside (-1, 1). If the two numbers of a pair are independent, the interval excludes 0 in at most
    5 % of cases; a bootstrap interval does so in up to 13 %.

    Source: Bonett and Wright, Psychometrika 65 (2000).
    """
    if n < 8 or np.isnan(rho):
        return UNDEFINED
    next_to_one = 1 - 12 / (n * (n * n - 1))  # two neighbours swapped
    inner = float(np.clip(rho, -next_to_one, next_to_one))
    half = NORMAL_975 * math.sqrt((1 + inner**2 / 2) / (n - 3))
    low, high = math.tanh(math.atanh(inner) - half), math.tanh(math.atanh(inner) + half)
    return Bounds(low if rho > -1 else -1.0, high if rho < 1 else 1.0)


def fisher(r: ArrayLike) -> Array:
    """Return Fisher's z of correlations, in their shape; ±1 give ±8.4.

    The standard error of z hardly depends on the correlation.
    """
    return np.arctanh(np.clip(np.asarray(r, dtype=np.float64), -1 + 1e-7, 1 - 1e-7))


def correlation_bounds(r: float, samples: ArrayLike, n: int) -> Bounds:
    """Return the 95 % interval of a correlation ``r`` of ``n`` points, from bootstrap ``samples``.

    The interval is NaN for n < 4 or without finite samples. On the scale of Fisher's z its half
    width is the standard deviation of the samples times the quantile of Student's t with n - 2
    degrees of freedom. In simulations with ten or more points it covers the true correlation in 94
    to 99 % of cases (``tests/laboratory/test_intervals.py``); the interval between percentiles of
    the samples covers it in 86 to 91 %.
    """
    z = fisher(samples)
    z = z[np.isfinite(z)]
    if n < 4 or not len(z):
        return UNDEFINED
    half = student_quantile((1 + LEVEL) / 2, n - 2) * float(z.std())
    centre = float(fisher(r))
    return Bounds(math.tanh(centre - half), math.tanh(centre + half))


def correlation_difference(
    first: Interval, second: Interval, samples: tuple[ArrayLike, ArrayLike]
) -> Bounds:
    """Return the 95 % interval of the second correlation minus the first.

    The two correlations may depend on each other, as they do if both come from the same points.

    Args:
        first: The first correlation with its 95 % interval.
        second: The second correlation with its 95 % interval.
        samples: Bootstrap samples of the first and the second correlation, each of shape (k,);
            sample i of both comes from the same resample of the points.

    Source: Zou, Psychological Methods 12 (2007), eq. 15 (MOVER).
    """
    a, b = (np.asarray(values, dtype=np.float64) for values in samples)
    known = np.isfinite(a) & np.isfinite(b)
    together = 0.0
    if known.any() and a[known].std() > 0 and b[known].std() > 0:
        together = float(np.corrcoef(a[known], b[known])[0, 1])
    difference = second.value - first.value

    def distance(up: float, down: float) -> float:
        return math.sqrt(max(up**2 + down**2 - 2 * together * up * down, 0.0))

    return Bounds(
        difference - distance(second.value - second.low, first.high - first.value),
        difference + distance(second.high - second.value, first.value - first.low),
    )


def resampled_correlations(x: ArrayLike, y: ArrayLike, seed: int = 0) -> Array:
    """Return the Pearson correlation of ``x`` and ``y`` (n,) in bootstrap resamples of the points.

    Shape (REPEATS,), that is 2,000; NaN for a resample in which ``x`` or ``y`` is constant.
    """
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    draws = np.random.default_rng(seed).integers(0, len(a), size=(REPEATS, len(a)))
    return paired_correlations(a[draws], b[draws])


# --- resampling --------------------------------------------------------------------------------------------


def resampled_means(values: ArrayLike, seed: int = 0) -> Array:
    """Return the means of bootstrap resamples of the rows of ``values`` (n, k); shape (REPEATS, k).

    ``REPEATS`` is 2,000. With one seed, arrays of equal length are resampled alike, so that the
    differences of their means are paired.
    """
    rows = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    n = len(rows)
    # Counts times values gives a resample's mean without REPEATS x n x k numbers.
    even = np.full(n, 1 / n)
    block = max(1, _COUNTS // n)
    sizes = [min(block, REPEATS - start) for start in range(0, REPEATS, block)]
    return np.concatenate([rng.multinomial(n, even, size=size) @ rows / n for size in sizes])


def mean_interval(values: ArrayLike, seed: int = 0) -> Interval:
    """Return the mean of ``values`` (n,) with its 95 % percentile bootstrap interval.

    The ends of the interval are NaN for n = 1.

    Raises:
        TooFewVectorsError: There are no values.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if not len(numbers):
        raise TooFewVectorsError("expected at least one value, got none; pass one or more")
    mean = float(numbers.mean())
    if len(numbers) < 2:
        return Interval(mean, *UNDEFINED)
    return Interval(mean, *percentiles(resampled_means(numbers[:, None], seed)[:, 0]))


def percentiles(samples: ArrayLike) -> Bounds:
    """Return the 2.5 % and 97.5 % percentiles of the finite ``samples``; NaN if none is finite."""
    numbers = np.asarray(samples, dtype=np.float64)
    finite = numbers[np.isfinite(numbers)]
    if not len(finite):
        return UNDEFINED
    low, high = np.quantile(finite, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Bounds(float(low), float(high))


def jackknife_se(*left_out: ArrayLike) -> float:
    """Return the standard error from leave-one-out values, one array for each independent sample.

    It is the root of the sum over samples of (n - 1) / n * sum (theta_-i - mean)^2, where theta_-i
    is the statistic without member i. For a paired difference, pass the differences of the two
    statistics' leave-one-out values.
    """
    variance = 0.0
    for values in left_out:
        theta = np.asarray(values, dtype=np.float64)
        if theta.size:
            variance += (theta.size - 1) / theta.size * float(np.square(theta - theta.mean()).sum())
    return float(np.sqrt(variance))


# --- intervals by formula ----------------------------------------------------------------------------------


def student_bounds(value: float, se: float, n: int, level: float = LEVEL) -> Bounds:
    """Return Student's interval of a mean of ``n`` > 1 documents, at ``level`` in (0, 1).

    It is ``value`` ± t · ``se``, with t the quantile of Student's t for n - 1 degrees of freedom.
    """
    half = student_quantile((1 + level) / 2, n - 1) * se
    return Bounds(value - half, value + half)


def normal_point(comparisons: int) -> float:
    """Return the half width, in standard errors, of intervals for several comparisons at once.

    The probability that at least one of the ``comparisons`` intervals misses its true value is
    then at most 5 % (Bonferroni). The half width is 1.96 for one comparison, 2.58 for five.
    """
    from statistics import NormalDist

    return NormalDist().inv_cdf(1 - (1 - LEVEL) / (2 * max(comparisons, 1)))


def student_p(t: float, freedom: float) -> float:
    """Return the probability that Student's t lies beyond ±``t``, for ``t`` >= 0.

    ``freedom`` > 0 are the degrees of freedom.

    >>> round(student_p(2.262157, 9), 6), round(student_p(1.959964, math.inf), 6)
    (0.05, 0.05)
    """
    if freedom > 1e6:
        return math.erfc(t / math.sqrt(2))
    return f_p(t * t, 1, freedom)


def f_p(value: float, above: float, below: float) -> float:
    """Return the probability that a variable with an F distribution exceeds ``value`` >= 0.

    ``above`` and ``below`` > 0 are the degrees of freedom of numerator and denominator. Computed as
    the incomplete beta function by its continued fraction (Abramowitz and Stegun, 26.6.2 and
    26.5.8).

    >>> round(f_p(4.102821, 2, 10), 6)
    0.05
    """
    if not value:
        return 1.0
    a, b, share = below / 2, above / 2, below / (below + above * value)
    # Not 1 - share, which is 0 for small values.
    rest = above * value / (below + above * value)
    front = (
        math.lgamma(a + b)
        - math.lgamma(a)
        - math.lgamma(b)
        + a * math.log(share)
        + b * math.log(rest)
    )
    if share < (a + 1) / (a + b + 2):
        return math.exp(front) * _beta_fraction(a, b, share) / a
    return 1 - math.exp(front) * _beta_fraction(b, a, rest) / b


def _beta_fraction(a: float, b: float, x: float) -> float:
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 10_000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d, c = 1 / (1 + term * d), 1 + term / c
            value *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return value


@cache
def student_quantile(p: float, freedom: float) -> float:
    """Return the quantile of Student's t at ``p`` in (0, 1).

    ``freedom`` > 0 are the degrees of freedom.

    >>> round(student_quantile(0.975, 2), 6)
    4.302653
    """
    if p <= 0.5:
        return -student_quantile(1 - p, freedom) if p < 0.5 else 0.0
    # The root of log p(t) by the secant through its last two places, in the logarithm of t.
    beyond = 2 * (1 - p)
    places = [math.log(2.0), math.log(3.0)]
    errors = [math.log(student_p(math.exp(at), freedom) / beyond) for at in places]
    for _ in range(100):
        if abs(errors[-1]) < 1e-14 or errors[-1] == errors[-2]:
            break
        step = errors[-1] * (places[-1] - places[-2]) / (errors[-1] - errors[-2])
        # No more than a factor of e: far out the curve is flat, and a secant would leave the numbers.
        places.append(places[-1] - min(max(step, -1.0), 1.0))
        errors.append(math.log(max(student_p(math.exp(places[-1]), freedom), 1e-300) / beyond))
    return math.exp(places[-1])


def student_interval(values: ArrayLike, level: float = LEVEL) -> Bounds:
    """Return Student's interval of the mean of independent ``values`` (n,), at ``level`` in (0, 1).

    The interval is NaN for fewer than two values.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if len(numbers) < 2:
        return UNDEFINED
    se = float(numbers.std(ddof=1)) / math.sqrt(len(numbers))
    return student_bounds(float(numbers.mean()), se, len(numbers), level)


def mcnemar_p(gained: int, lost: int) -> float:
    """Return the two-sided p-value of McNemar's exact test of two models on the same documents.

    ``gained`` is the number of documents that only the second model answers right, ``lost`` the
    number of those that only the first one does. The result is 1 if both are 0. Source: McNemar,
    Psychometrika 12 (1947), with the binomial distribution.

    >>> [round(mcnemar_p(gained, 0), 9) for gained in (5, 6, 0)]
    [0.0625, 0.03125, 1.0]
    """
    n = gained + lost
    ways = math.lgamma(n + 1) - n * math.log(2)
    tail = (
        math.exp(ways - math.lgamma(k + 1) - math.lgamma(n - k + 1))
        for k in range(min(gained, lost) + 1)
    )
    return min(2 * math.fsum(tail), 1.0)


def paired_share_bounds(gained: int, lost: int, n: int) -> Bounds:
    """Return the 95 % interval of the difference between the accuracies of two models.

    The difference is (gained - lost) / n. The interval is Bonett and Price's, with Student's t in
    place of the normal distribution. It lies in [-1, 1] and excludes 0 exactly where
    :func:`mcnemar_p` is below 5 % (enumerated for up to 300 documents).

    Args:
        gained: Number of documents that only the second model answers right.
        lost: Number of documents that only the first model answers right.
        n: Number of all documents, > 1, which both models answered.

    Source: Bonett and Price, Journal of Educational and Behavioral Statistics 37 (2012).
    """
    a = (gained + 1) / (n + 2)
    b = (lost + 1) / (n + 2)
    low, high = student_bounds(a - b, math.sqrt((a + b - (a - b) ** 2) / (n + 2)), n)
    if mcnemar_p(gained, lost) >= 1 - LEVEL:
        low = min(low, 0.0)
        high = max(high, 0.0)
    return Bounds(max(low, -1.0), min(high, 1.0))


def paired_bounds(
    changes: ArrayLike, weights: ArrayLike | None = None, span: float = 1.0
) -> PairedTest:
    """Return the 95 % interval and the p-value of a mean paired difference of scores.

    They are computed as if two more documents had changed by ``span``, one up and one down. Without
    these, Student's interval is too short where changes are large but so rare that a few documents
    show none. With n > 50 documents of equal weight the two added ones count 50/n each. For up to
    50 answers that are right or wrong, centre and standard error are those of Bonett and Price, who
    add two answers; but the quantile is Student's instead of the normal one.

    Args:
        changes: The documents' differences (n,), n > 1, in [-span, span].
        weights: The documents' weights (n,), positive; by default equal. The added documents weigh
            as much as the heaviest.
        span: The largest possible difference of two scores, > 0.

    Source: Bonett and Price, Journal of Educational and Behavioral Statistics 37 (2012). The
    coverage is simulated in ``tests/auditing/test_coverage.py``.
    """
    d = np.asarray(changes, dtype=np.float64)
    shares = np.full(len(d), 1 / len(d))
    freedom = len(d) - 1.0
    if weights is not None:
        shares = np.asarray(weights, dtype=np.float64)
        shares = shares / shares.sum()
        freedom = 1 / float(np.square(shares).sum()) - 1
    heaviest = float(shares.max())
    count = min(1.0, _FEW / (freedom + 1))  # of each added document
    total = 1 + 2 * count * heaviest
    centre = float(shares @ d) / total
    squares = float(np.square(shares) @ np.square(d - centre))
    squares += count * heaviest**2 * ((span - centre) ** 2 + (span + centre) ** 2)
    error = math.sqrt(squares) / total
    half = student_quantile((1 + LEVEL) / 2, freedom) * error
    low = max(centre - half, -span)
    high = min(centre + half, span)
    return PairedTest(low, high, student_p(abs(centre) / error, freedom))


def holm(p_values: Mapping[K, float]) -> set[K]:
    """Return the keys of the tests that Holm's step-down procedure rejects.

    The familywise error rate is at most 5 %. ``p_values`` maps the key of each test to its p-value.
    """
    rejected: set[K] = set()
    for done, (test, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        if p > (1 - LEVEL) / (len(p_values) - done):
            break
        rejected.add(test)
    return rejected


def clearly_worse(tests: Mapping[tuple[K, K], tuple[float, float]]) -> set[K]:
    """Return the members that are clearly worse than another member.

    Holm's procedure is used over all pairs. Therefore the probability that the result contains a
    member that is not truly worse than some other member is at most 5 %. This holds even if the
    best member was chosen by its score, and whichever members are truly equal.

    Args:
        tests: Every pair (first, second) -> (difference, p-value of no difference), where the
            difference is second minus first.

    Source: Hsu, Multiple Comparisons (1996), chapters 4 and 5, for comparisons with an unknown
    best; Holm, Scandinavian Journal of Statistics 6 (1979), which needs no normal scores of equal
    variance.

    >>> tests = {("a", "b"): (0.1, 0.001), ("a", "c"): (0.0, 0.9), ("b", "c"): (-0.1, 0.002)}
    >>> sorted(clearly_worse(tests))
    ['a', 'c']
    """
    losers: set[K] = set()
    for first, second in holm({pair: p for pair, (_, p) in tests.items()}):
        difference = tests[first, second][0]
        if difference > 0:
            losers.add(first)
        if difference < 0:
            losers.add(second)
    return losers


def wilson(share: float, n: int, point: float = NORMAL_975) -> Bounds:
    """Return the 95 % Wilson interval of a share of ``n`` documents, inside [0, 1].

    The interval is NaN if n < 1 or the share is NaN. For several intervals at once, ``point`` is
    that of :func:`normal_point`. Source: Wilson, Journal of the American Statistical Association 22
    (1927).

    >>> [round(v, 3) for v in wilson(0.5, 100)]
    [0.404, 0.596]
    """
    if n < 1 or np.isnan(share):
        return UNDEFINED
    z = point
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return Bounds(max(float(centre - half), 0.0), min(float(centre + half), 1.0))


# --- area under the ROC curve ------------------------------------------------------------------------------


class Auroc(NamedTuple):
    """Area under the ROC curve of a signal (a number for each document), with its standard error.

    Attributes:
        value: The area: 0.5 is chance, 1 separates right from wrong documents perfectly.
        se: Standard error by DeLong's method; from `auroc`, NaN with a single right or a single
            wrong document.
        right: Number of right documents.
        wrong: Number of wrong documents.
        pairs: Number of compared pairs, each of a right and a wrong document.
    """

    value: float
    se: float
    right: int
    wrong: int
    pairs: int


def auroc(signal: Array, right: Flags) -> Auroc:
    """Return the area under the ROC curve (AUROC) of a signal that is lower for wrong documents.

    ``signal`` and ``right`` have the shape (n,); some documents must be right and some wrong. Ties
    count half. Source: DeLong, DeLong and Clarke-Pearson, Biometrics 44 (1988).
    """
    a, b = np.sort(signal[right]), np.sort(signal[~right])
    above = _share_below(b, signal[right])
    below = 1.0 - _share_below(a, signal[~right])
    variance = _variance(above) / len(above) + _variance(below) / len(below)
    return Auroc(float(above.mean()), float(np.sqrt(variance)), len(a), len(b), len(a) * len(b))


def _share_below(ordered: Array, values: Array) -> Array:
    """Share of ``ordered`` that lies below each value, ties counted half."""
    sides = np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")
    return np.asarray(sides / (2 * len(ordered)))


def _variance(values: Array) -> float:
    return float(values.var(ddof=1)) if len(values) > 1 else float("nan")


def stratified_auroc(
    signal: Array, right: Flags, strata: Sequence[NDArray[np.int64]]
) -> Auroc | None:
    """Return the AUROC over pairs of a right and a wrong document of the same stratum.

    The result is the mean over strata, weighted by their numbers of pairs; it is None without such
    a pair. The variance of a stratum is DeLong's; with a single right or a single wrong document it
    is that of an uninformative signal, (right + wrong + 1) / (12 pairs).

    Args:
        signal: Shape (n,), lower for wrong documents.
        right: Which documents are right, shape (n,).
        strata: For each stratum the row numbers of its documents.
    """
    both = (rows for rows in strata if right[rows].any() and not right[rows].all())
    areas = [auroc(signal[rows], right[rows]) for rows in both]
    if not areas:
        return None
    variances = [
        area.se**2
        if min(area.right, area.wrong) > 1
        else (area.right + area.wrong + 1) / (12 * area.pairs)
        for area in areas
    ]
    pairs = np.array([area.pairs for area in areas], dtype=np.float64)
    value = float(pairs @ np.array([area.value for area in areas]) / pairs.sum())
    se = float(np.sqrt(np.square(pairs) @ np.array(variances)) / pairs.sum())
    sides = (sum(area.right for area in areas), sum(area.wrong for area in areas))
    return Auroc(value, se, *sides, int(pairs.sum()))


def auroc_bounds(
    value: float, se: float, right: int, wrong: int, point: float = NORMAL_975
) -> Bounds:
    """Return the 95 % interval of an AUROC, computed on the logit scale.

    On that scale it reaches ``point`` standard errors to both sides (see :func:`normal_point`). For
    an AUROC of 1 it is (0.025^(1/n), 1), with n the smaller one of ``right`` and ``wrong``, and for
    0 its mirror image. In between, it is NaN if ``se`` is 0 or NaN.

    Source: Qin and Hotilovac, Statistical Methods in Medical Research 17 (2008), for the logit.
    """
    if 0 < value < 1:
        if not se > 0:
            return UNDEFINED
        centre, half = math.log(value / (1 - value)), point * se / (value * (1 - value))
        return Bounds(1 / (1 + math.exp(half - centre)), 1 / (1 + math.exp(-half - centre)))
    edge = ((1 - LEVEL) / 2) ** (1 / max(min(right, wrong), 1))
    return Bounds(edge, 1.0) if value == 1 else Bounds(0.0, 1 - edge)


# --- permutation tests inside strata -----------------------------------------------------------------------


class RankAgreement(NamedTuple):
    """Rank correlation inside strata, with its permutation p-value.

    Attributes:
        spearman: Spearman's correlation of ranks inside the strata.
        spearman_p: Two-sided p-value of that correlation.
        exact: Whether all permutations inside the strata were enumerated (strata of up to nine). If
            not, 9,999 were drawn with a fixed seed, and p = (1 + k) / (1 + 9,999), where k of them
            have a correlation at least as large in magnitude.
        permutations: Number of permutations.
    """

    spearman: float
    spearman_p: float
    exact: bool
    permutations: int


def rank_agreement(strata: Sequence[tuple[ArrayLike, ArrayLike]]) -> RankAgreement | None:
    """Return the rank correlation of pairs of finite numbers, compared only inside their stratum.

    ``strata`` has two arrays (n,) for each stratum: the first and the second numbers of its pairs.
    The result is None if no stratum has two pairs, or if the first or the second numbers are
    constant inside every stratum.

    >>> rank_agreement([([1, 2, 3], [10, 20, 30])]).spearman_p
    0.3333333333333333
    """
    used = [(_centred_ranks(xs), _centred_ranks(ys)) for xs, ys in strata if np.size(xs) > 1]
    size_x, size_y = (sum(int(pair[side] @ pair[side]) for pair in used) for side in (0, 1))
    if not size_x or not size_y:
        return None
    # Integers, so that nothing is rounded.
    products = sum(int(x @ y) for x, y in used)
    exact = all(len(x) <= _EXACT_UP_TO for x, _ in used)
    if exact:
        count = math.prod(math.factorial(len(x)) for x, _ in used)
        p = _share([y[_all_orders(len(x))] @ x for x, y in used], abs(products))
    else:
        rng, count = np.random.default_rng(20260501), _DRAWS
        drawn = np.sum([_drawn_products(x, y, rng) for x, y in used], axis=0)
        p = (1 + int((np.abs(drawn) >= abs(products)).sum())) / (1 + _DRAWS)
    return RankAgreement(products / math.sqrt(size_x * size_y), p, exact, count)


_Integers = NDArray[np.int64]


def _drawn_products(x: _Integers, y: _Integers, rng: np.random.Generator) -> _Integers:
    """Sums of products of ``x`` with ``_DRAWS`` drawn orders of ``y``, few orders at a time."""
    block = max(1, _COUNTS // len(x))
    sizes = [min(block, _DRAWS - start) for start in range(0, _DRAWS, block)]
    return np.concatenate([rng.permuted(np.tile(y, (size, 1)), axis=1) @ x for size in sizes])


def _share(nulls: list[_Integers], least: int) -> float:
    """Share of all combinations of the strata's orders whose summed statistic is at least ``least``."""
    total = Counter({0: 1})
    for null in nulls:
        values, counts = np.unique(null, return_counts=True)
        step: Counter[int] = Counter()
        for before, ways in total.items():
            for value, count in zip(values.tolist(), counts.tolist(), strict=True):
                step[before + value] += ways * count
        total = step
    return sum(ways for value, ways in total.items() if abs(value) >= least) / total.total()


def _all_orders(n: int) -> _Integers:
    """All orders of n things, shape (n!, n): built by inserting n - 1 at every place of the shorter ones."""
    orders = np.zeros((1, 1), dtype=np.int64)
    for last in range(1, n):
        orders = np.concatenate(
            [np.insert(orders, place, last, axis=1) for place in range(last + 1)]
        )
    return orders


def _centred_ranks(values: ArrayLike) -> _Integers:
    """Twice the mean rank minus n + 1: integers that sum to zero, ties shared."""
    return np.asarray(2 * ranks(values) - (np.size(values) + 1), dtype=np.int64)
