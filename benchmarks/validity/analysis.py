"""From results to figures. Every interval is 95 %, from resampling recipes or groups.

Nothing is chosen here by its outcome: what refutes a claim stands in the configurations.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

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
