"""Accuracy of slices from a few features: a ridge regression that shrinks to the labelled accuracy.

The estimate is ``a + b·z``: ``a`` is the accuracy of all labelled documents, ``z`` the slice's standardised
features. The features (none, one of them, or all) and the ridge penalty minimise the squared error on slices
left out, one at a time; *none* wins unless the best is better by a standard error of the paired difference
(Hastie, Tibshirani and Friedman, The Elements of Statistical Learning, 7.10). The whole rule is judged from
outside: every slice is estimated by a fit that chose without it.

Intervals are jackknife+ (Barber, Candès, Ramdas and Tibshirani, Annals of Statistics 49, 2021) on errors
divided by the size of error of a slice of as many documents: 95 % for slices exchangeable with the labelled
ones (proven: 90 %; simulated: ``benchmarks/audit_coverage.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.report import Col
from lmeval_dispersion.statistics import (
    LEVEL,
    Bounds,
    correlation,
    percentiles,
    resampled_means,
    student_quantile,
)

Array = NDArray[np.float64]

PENALTIES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # of coefficients, in units of a feature's variance
_MOST_FOLDS = 200
_MARGIN = 0.25  # of the fitted range, on either side: with 40 similar slices it refuses about 1 %
_SHIFT = 0.01  # how often similar slices may be called different


@dataclass(frozen=True)
class Fit:
    """Accuracy = intercept + coefficients · z, clipped to [0, 1]; trivial where all coefficients are 0."""

    intercept: float
    coefficients: Sequence[float]

    def value(self, z: Array) -> Array:
        """The estimates before they are clipped, for standardised features (S, F)."""
        return np.asarray(self.intercept + z @ np.asarray(self.coefficients))

    def predict(self, z: Array) -> Array:
        """The estimates in [0, 1], for standardised features (S, F)."""
        return np.clip(self.value(z), 0.0, 1.0)


class Pairs(NamedTuple):
    """Labelled slices with their features.

    Attributes:
        z: Standardised features, shape (S, F).
        accuracy: Mean score, shape (S,), in [0, 1].
        documents: Labelled documents, shape (S,); also the weight in a fit.
        variance: Variance of the scores inside the slice (n - 1 in the denominator), shape (S,).
    """

    z: Array
    accuracy: Array
    documents: Array
    variance: Array

    def take(self, rows: NDArray[np.bool_]) -> Pairs:
        """Some of the slices."""
        return Pairs(*(values[rows] for values in self))


def families(features: int) -> list[tuple[int, ...]]:
    """Which features a fit may use: one of them, or all."""
    single: list[tuple[int, ...]] = [(i,) for i in range(features)]
    return [*single, tuple(range(features))] if features > 1 else single


def shrunken_fit(pairs: Pairs, allowed: Sequence[tuple[int, ...]]) -> Fit:
    """The fit with the least error on left-out slices, over allowed sets of features; or the trivial fit."""
    ridges = [_Ridge(pairs, columns) for columns in allowed]
    trivial = _Ridge(pairs, ())
    losses = [ridge.held_out_losses() for ridge in ridges]  # (penalties, S) each
    none = trivial.held_out_losses()[0]
    if ridges:
        means = np.array([loss.mean(axis=1) for loss in losses])
        best, penalty = np.unravel_index(int(means.argmin()), means.shape)
        gain = none - losses[best][penalty]
        if gain.mean() > gain.std(ddof=1) / np.sqrt(len(gain)):
            return ridges[best].fit(PENALTIES[penalty])
    return trivial.fit(1.0)


class _Ridge:
    """Weighted ridge regression on some columns, for every penalty at once; the intercept is not shrunk."""

    def __init__(self, pairs: Pairs, columns: tuple[int, ...]) -> None:
        self.pairs, self.columns = pairs, list(columns)
        weight = pairs.documents / pairs.documents.sum()
        self.root = np.sqrt(weight)
        self.mean = weight @ pairs.z[:, self.columns]
        self.centre = float(weight @ pairs.accuracy)
        x = self.root[:, None] * (pairs.z[:, self.columns] - self.mean)
        self.u, self.s, self.v = np.linalg.svd(x, full_matrices=False)
        self.y = self.root * (pairs.accuracy - self.centre)

    def fit(self, penalty: float) -> Fit:
        coefficients = np.zeros(self.pairs.z.shape[1])
        if self.columns:
            coefficients[self.columns] = self.v.T @ (self.s / (self.s**2 + penalty) * (self.u.T @ self.y))
        return Fit(self.centre - float(self.mean @ coefficients[self.columns]), coefficients.tolist())

    def held_out_losses(self) -> Array:
        """Mean squared error on each slice by the fit to the others, shape (penalties, S); closed form."""
        kept = self.s**2 / (self.s**2 + np.array(PENALTIES)[:, None])  # (penalties, rank)
        residual = self.y - (kept * (self.u.T @ self.y)) @ self.u.T
        leverage = self.root**2 + kept @ (self.u.T**2)
        return np.asarray(np.square(residual / (1 - leverage) / self.root))


class Folds(NamedTuple):
    """Fits that each leave some slices out, and their estimates for those.

    Attributes:
        fold: The fold of every slice, shape (S,).
        fits: One for each fold.
        estimate: Of every slice by the fit that did not see it, shape (S,).
    """

    fold: NDArray[np.int64]
    fits: list[Fit]
    estimate: Array


def cross_fitted(pairs: Pairs, allowed: Sequence[tuple[int, ...]], fit: Any = shrunken_fit) -> Folds:
    """The whole rule, choices included, with every slice left out once (beyond 200 slices: 200 folds)."""
    slices = len(pairs.accuracy)
    fold = np.arange(slices, dtype=np.int64) % min(slices, _MOST_FOLDS)
    estimate, fits = np.empty(slices), []
    for k in range(int(fold.max()) + 1):
        out = fold == k
        fits.append(fit(pairs.take(~out), allowed))
        estimate[out] = fits[-1].predict(pairs.z[out])
    return Folds(fold, fits, estimate)


def isotonic_fit(pairs: Pairs, allowed: Sequence[tuple[int, ...]]) -> Any:
    """Accuracy as a monotone function of the one allowed feature.

    Slices weigh by documents; Spearman's correlation sets the direction, and the ends continue flat.
    Source: Barlow et al., Statistical Inference under Order Restrictions, 1972.
    """
    from sklearn.isotonic import IsotonicRegression

    ((column,),) = allowed
    rises = correlation(pairs.z[:, column], pairs.accuracy, "spearman") > 0
    fit = IsotonicRegression(increasing=rises, out_of_bounds="clip")
    fit.fit(pairs.z[:, column], pairs.accuracy, sample_weight=pairs.documents)
    return SimpleNamespace(predict=lambda z: fit.predict(z[:, column]))


@dataclass(frozen=True)
class ErrorSize:
    """Error of estimates of slices: sqrt(between + within / documents).

    Attributes:
        between: Mean squared error against a slice's true accuracy, 0 if none is visible.
        within: Mean variance of the scores inside slices; over n documents it makes the sampling noise.
    """

    between: float
    within: float

    @classmethod
    def of(cls, pairs: Pairs, estimate: Array) -> ErrorSize:
        """Error size of estimates by fits that did not see the slices."""
        within = float(pairs.variance.mean())
        excess = np.square(estimate - pairs.accuracy) - within / pairs.documents
        return cls(max(float(excess.mean()), 0.0), within)

    def at(self, documents: Array | float) -> Array:
        """Standard error of an estimate of slices with this many documents."""
        size = np.sqrt(self.between + self.within / documents)
        return np.where(size > 0, size, 1.0)


def level_reached(slices: int) -> float:
    """The level of a conformal interval over so many slices: 95 %, from 19 slices on; S / (S + 1) below."""
    return LEVEL if slices >= 19 else slices / (slices + 1)


def conformal_rank(slices: int, level: float) -> int:
    """Rank, from 1, of the held-out error that bounds a new slice's interval."""
    return min(math.ceil((slices + 1) * level - 1e-9), slices)


def jackknife_plus(centres: Array, half: Array, level: float) -> Bounds:
    """Interval of one slice from the estimates of S left-out fits (S,) and S half widths (S,).

    Source: Barber et al. 2021, eq. 1.5: quantiles of centre - half and of centre + half.
    """
    n = len(centres)
    rank = conformal_rank(n, level)
    low, high = np.sort(centres - half)[n - rank], np.sort(centres + half)[rank - 1]
    return Bounds(float(max(low, 0.0)), float(min(high, 1.0)))


@dataclass(frozen=True)
class Estimator:
    """Errors in points of one estimate of slices that its fit did not see, and its worth in labels.

    The mean of k labels of n, drawn without replacement, has the variance v (1/k - 1/n), v that of the scores
    (Cochran, Sampling Techniques, 1977, 2.6). Worth k labels: k = mean v / (mean squared error + mean v / n),
    with a bootstrap over slices. The unit is that of Fu et al., arXiv 2305.14802.

    Attributes:
        mae, rmse: Mean absolute error, and root of the mean squared error, over slices.
        better: Whether the squared error is lower than that of the labelled accuracy alone, by a one-sided
            paired Student test over slices at 5 %, and the mean absolute error is lower.
    """

    estimator: Annotated[str, Col("Estimate")]
    feature: str
    mae: Annotated[float, Col("Mean error (points)", ".2f")]
    rmse: Annotated[float, Col("RMSE", ".2f", drop=1)]
    worth: Annotated[float, Col("Worth labels a slice", ".0f")]
    worth_low: Annotated[float, Col("95 % from", ".0f", drop=2)]
    worth_high: Annotated[float, Col("to", ".0f", drop=2)]
    better: Annotated[bool, Col("Beats the labelled accuracy", drop=3)]

    @classmethod
    def of(
        cls, name: str, pairs: Pairs, estimate: Array, trivial: Array, *, feature: str = "", seed: int = 0
    ) -> Estimator:
        """From estimates of left-out slices (S,) and those of the labelled accuracy alone (S,)."""
        ours, theirs = (100 * (values - pairs.accuracy) for values in (estimate, trivial))
        squares = [np.square(errors) for errors in (ours, theirs)]
        mae, trivial_mae = (float(np.abs(errors).mean()) for errors in (ours, theirs))
        difference = squares[1] - squares[0]
        n = len(difference)
        margin = student_quantile(LEVEL, n - 1) * difference.std(ddof=1) / math.sqrt(n)
        better = bool(difference.mean() > margin and mae < trivial_mae)
        off = np.square(estimate - pairs.accuracy) + pairs.variance / pairs.documents
        columns = np.stack([pairs.variance, off], axis=1)
        samples = resampled_means(columns, seed)
        bounds = percentiles(samples[:, 0] / samples[:, 1])
        worth = float(columns[:, 0].mean() / columns[:, 1].mean())
        return cls(name, feature, mae, math.sqrt(squares[0].mean()), worth, *bounds, better)


def shift(labelled: Array, unlabelled: Array) -> int | None:
    """The feature in which two sets of slices, (S, F) and (s, F), differ most, if they do; else None.

    Two-sample Kolmogorov-Smirnov tests of every feature at 1 % together (Bonferroni). Intervals learnt on
    the labelled slices do not hold for slices that differ.
    """
    from scipy.stats import ks_2samp

    if not labelled.shape[1] or not len(unlabelled):
        return None
    columns = range(labelled.shape[1])
    p = [float(ks_2samp(labelled[:, j], unlabelled[:, j], method="asymp").pvalue) for j in columns]
    worst = int(np.argmin(p))
    return worst if p[worst] < _SHIFT / len(p) else None


def fitted_range(values: Array) -> Bounds:
    """The range of ``values`` (S,), wider by a quarter on either side."""
    low, high = float(values.min()), float(values.max())
    return Bounds(low - _MARGIN * (high - low), high + _MARGIN * (high - low))
