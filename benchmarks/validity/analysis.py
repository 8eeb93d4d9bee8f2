"""From results to figures. Every interval is 95 %, over groups or from resampling checkpoints.

Nothing is chosen here by its outcome: what refutes a claim stands in the configurations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from lmeval_dispersion.statistics import normal_point, student_quantile

Floats = NDArray[np.float64]
HOLDS, PART, FAILS, INCONCLUSIVE = "holds", "holds in part", "does not hold", "inconclusive"
RESAMPLES = 2000


class Estimate(NamedTuple):
    """A figure with the bounds of its interval; NaN where there is none."""

    value: float
    low: float = float("nan")
    high: float = float("nan")

    def __str__(self) -> str:
        if not np.isfinite(self.value):
            return "undefined"
        if not np.isfinite(self.low):
            return f"{self.value:.2f}"
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


class Resampled(NamedTuple):
    """A figure, its value in each resample of the recipes, and how many pairs it is of."""

    value: float
    samples: Floats
    pairs: int = 0

    @property
    def estimate(self) -> Estimate:
        """With the 2.5th and 97.5th percentile of the resamples."""
        kept = self.samples[np.isfinite(self.samples)]
        if len(kept) < 2 or not np.isfinite(self.value):
            return Estimate(self.value)
        return Estimate(self.value, *map(float, np.percentile(kept, [2.5, 97.5])))

    def less(self, other: Resampled) -> Resampled:
        """The difference, paired in the resamples."""
        return Resampled(self.value - other.value, self.samples - other.samples, self.pairs)


class Grouped(NamedTuple):
    """A figure over a few groups: its value, a part of each group, and how many pairs or cells it is of.

    Of a mean the parts are the groups' values; of other figures, their jackknife's pseudo-values. Intervals
    are Student's: percentiles of resamples of six groups cover 73 to 86 %.
    """

    value: float
    parts: Floats
    pairs: int = 0

    @classmethod
    def jackknifed(
        cls, of: Callable[[NDArray[np.bool_]], float], groups: int, pairs: int = 0
    ) -> Grouped:
        """The figure ``of`` those groups that its argument, (groups,), has."""
        whole = of(np.ones(groups, bool))
        without = np.array([of(np.arange(groups) != left_out) for left_out in range(groups)])
        return cls(whole, groups * whole - (groups - 1) * without, pairs)

    @property
    def estimate(self) -> Estimate:
        """With its interval; without one for a single group, or where a group has no value."""
        count = len(self.parts)
        if count < 2 or not np.isfinite([self.value, *self.parts]).all():
            return Estimate(self.value)
        half = student_quantile(0.975, count - 1) * float(self.parts.std(ddof=1)) / count**0.5
        return Estimate(self.value, self.value - half, self.value + half)

    @property
    def registered(self) -> Estimate:
        """With the registered interval, percentiles of the mean part over resamples of the groups."""
        means = self.parts[drawn(len(self.parts))].mean(1)
        return Estimate(self.value, *map(float, np.percentile(means, [2.5, 97.5])))

    def less(self, other: Grouped) -> Grouped:
        """The difference, paired by group."""
        return Grouped(self.value - other.value, self.parts - other.parts, self.pairs)


def share_of(hits: Floats, counts: Floats) -> Estimate:
    """The share of cells, from each group's hits and number of cells, (groups,), by Wilson.

    Where groups differ by more than independent cells would, there are as many fewer cells.
    """
    count, groups = float(counts.sum()), len(counts)
    share = float(hits.sum()) / count
    independent = share * (1 - share) / count
    if groups > 1 and independent:
        by_group = float((hits / counts).var(ddof=1)) / groups
        count /= max(1.0, by_group / independent)
    z = normal_point(1)
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = (
        z * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5 / (1 + z * z / count)
    )
    return Estimate(share, max(0.0, centre - half), min(1.0, centre + half))


class Verdict(NamedTuple):
    """One line of the page: what came of a claim."""

    verdict: str
    claim: str
    result: str


def outcome(holds: bool, part: bool = False) -> str:
    """The word for a claim whose rule is met, or met in part."""
    return HOLDS if holds else PART if part else FAILS


def correlations(x: Floats, y: Floats) -> Floats:
    """Spearman's rho of each row of ``x`` (b, n) with that of ``y``; NaN where one is constant."""
    a, b = rankdata(x, axis=-1), rankdata(y, axis=-1)
    a, b = a - a.mean(-1, keepdims=True), b - b.mean(-1, keepdims=True)
    size = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(size > 0, (a * b).sum(-1) / size, np.nan)


def drawn(recipes: int, seed: int = 0) -> NDArray[np.int64]:
    """Resamples of so many recipes, (b, recipes)."""
    return np.random.default_rng(seed).integers(recipes, size=(RESAMPLES, recipes))
