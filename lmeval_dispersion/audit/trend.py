"""Does a curve rise with its level? Rank correlation and steps that go the other way, with errors.

The same code judges the mixture curves of a run and the tables of the paper: it needs only means and
standard errors.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

_DRAWS = 2000


class Step(NamedTuple):
    """One step of a curve against its direction: levels, change of the mean, and change / its error."""

    from_level: float
    to_level: float
    change: float
    z: float


class Trend(NamedTuple):
    """How a curve moves with its level.

    Attributes:
        spearman: Rank correlation of the means with the levels: 1 rises always, -1 falls always; NaN where
            fewer than three levels or all means equal.
        low: Lower end of a 95 % interval, from redrawing every mean within its error. It is wide: the
            means carry their noise already.
        high: Upper end.
        shape: ``increasing``, ``decreasing`` or ``not monotone`` (ties allowed), of the means as they are.
        share_monotone: Share of the redrawn curves that are monotone in the curve's own direction.
        against: Steps that go against the direction of ``spearman``.
    """

    spearman: float
    low: float
    high: float
    shape: str
    share_monotone: float
    against: list[Step]


def trend(levels: ArrayLike, means: ArrayLike, errors: ArrayLike, *, seed: int = 0) -> Trend:
    """How ``means`` (k,) with standard ``errors`` (k,) move with ``levels`` (k,), ascending or not.

    A NaN error counts as 0 in the redrawing; levels with a NaN mean are left out.

    >>> trend([0, 50, 100], [1.0, 2.0, 3.0], [0.0, 0.0, 0.0]).shape
    'increasing'
    """
    x, y, e = (np.asarray(values, dtype=np.float64) for values in (levels, means, errors))
    keep = ~np.isnan(y)
    order = np.argsort(x[keep], kind="stable")
    x, y, e = x[keep][order], y[keep][order], np.nan_to_num(e[keep][order])
    if len(x) < 3 or np.ptp(y) == 0:
        return Trend(float("nan"), float("nan"), float("nan"), "undefined", float("nan"), [])
    rho = float(rank_correlations(x, y[None])[0])
    sign = 1.0 if rho >= 0 else -1.0
    drawn = y + e * np.random.default_rng(seed).standard_normal((_DRAWS, len(y)))
    rhos = rank_correlations(x, drawn)
    rhos = rhos[~np.isnan(rhos)]
    low, high = np.quantile(rhos, [0.025, 0.975]) if len(rhos) else (np.nan, np.nan)
    steps, step_errors = np.diff(y), np.sqrt(e[1:] ** 2 + e[:-1] ** 2)
    against = [
        Step(float(x[i]), float(x[i + 1]), float(steps[i]), _ratio(steps[i], step_errors[i]))
        for i in np.flatnonzero(sign * steps < 0)
    ]
    shape = "not monotone" if against else ("increasing" if sign > 0 else "decreasing")
    monotone = (sign * np.diff(drawn, axis=1) >= 0).all(axis=1)
    return Trend(rho, min(float(low), rho), max(float(high), rho), shape, float(monotone.mean()), against)


def rank_correlations(x: ArrayLike, rows: ArrayLike) -> NDArray[np.float64]:
    """Spearman correlation of ``x`` (k,) with every row of ``rows`` (m, k); NaN for constant ones."""
    return paired_rank_correlations(np.asarray(x, dtype=np.float64)[None], rows)


def paired_rank_correlations(first: ArrayLike, second: ArrayLike) -> NDArray[np.float64]:
    """Spearman correlation of every row of ``first`` with the same row of ``second``, both (m, k)."""
    from scipy.stats import rankdata

    a = rankdata(np.asarray(first, dtype=np.float64), axis=1)
    b = rankdata(np.asarray(second, dtype=np.float64), axis=1)
    a, b = a - a.mean(axis=1, keepdims=True), b - b.mean(axis=1, keepdims=True)
    norms = np.sqrt(np.square(a).sum(axis=1) * np.square(b).sum(axis=1))
    return np.asarray(np.divide((a * b).sum(axis=1), norms, out=np.full(len(norms), np.nan), where=norms > 0))


def _ratio(change: float, error: float) -> float:
    return float(change / error) if error > 0 else float("nan")
