"""Controlled mixtures: does dispersion rise when more of the documents are ones the model answers right?

For every target accuracy 0, 10, ..., 100 %, 100 documents with exactly that share of correct ones are drawn
without replacement, ten times; the mean and standard error over the draws of their dispersion and of their
mean query perplexity are the two curves. `trend` judges any curve from its means and standard errors, also
those of the paper's tables.

Source: RD sections 3.1 and B.1.2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmeval_dispersion.audit.batches import SEEDS, SIZE, Pools, mixture_size, pools
from lmeval_dispersion.audit.run import Run
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.geometry import Estimate
from lmeval_dispersion.statistics import normal_bounds, percentiles, rank_correlations

Rows = NDArray[np.int64]

TARGETS = tuple(range(0, 101, 10))
_DRAWS = 2000  # of a curve, within its errors


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
    low, high = percentiles(rank_correlations(x, drawn))
    steps, step_errors = np.diff(y), np.sqrt(e[1:] ** 2 + e[:-1] ** 2)
    against = [
        Step(float(x[i]), float(x[i + 1]), float(steps[i]), _ratio(steps[i], step_errors[i]))
        for i in np.flatnonzero(sign * steps < 0)
    ]
    shape = "not monotone" if against else ("increasing" if sign > 0 else "decreasing")
    monotone = (sign * np.diff(drawn, axis=1) >= 0).all(axis=1)
    return Trend(rho, min(low, rho), max(high, rho), shape, float(monotone.mean()), against)


def mixture_curves(run: Run, *, size: int = SIZE, seeds: int = SEEDS, seed: int = 0) -> dict[str, Any]:
    """The two curves over target accuracies with their trends.

    Raises:
        UsageError: No labels, or all documents correct or all incorrect.
    """
    pool = pools(run, run.labelled)
    smaller = min(len(pool.correct), len(pool.incorrect))
    if not len(run.labelled):
        raise UsageError("mixtures need labelled documents, and none of these has a label")
    if not smaller:
        side = "correctly" if len(pool.correct) else "wrongly"
        raise UsageError(
            f"mixtures need right and wrong answers, and all {len(run.labelled)} were answered {side}"
        )
    size_used = mixture_size(smaller, size)
    # Shares are multiples of 10 %, and sizes multiples of ten: every count is whole.
    counts = {target: round(target * size_used / 100) for target in TARGETS}
    reached = [target for target in TARGETS if pool.reaches(size_used, counts[target])]
    chosen = [
        pool.draw(np.random.default_rng([seed, draw, target]), size_used, counts[target])
        for target in reached
        for draw in range(seeds)
    ]
    shape = (len(reached), seeds)
    dispersions = run.vectors.dispersions([m.rows for m in chosen]).reshape(shape)
    perplexities = np.array([_mean_perplexity(run, m.rows) for m in chosen]).reshape(shape)
    return {
        "documents_per_mixture": size_used,
        "asked_documents_per_mixture": size,
        "seeds": seeds,
        "correct_documents": len(pool.correct),
        "incorrect_documents": len(pool.incorrect),
        "pools": pool_contrast(run, pool),
        "unreachable_targets": [target for target in TARGETS if target not in reached],
        # Near 1 the draws are nearly the same documents, and their spread says nothing.
        "share_of_smaller_pool": min(size_used / smaller, 1.0),
        "curve": [
            {
                "target_accuracy": target,
                **_point("dispersion", dispersions[i]),
                **_point("query_perplexity", perplexities[i]),
            }
            for i, target in enumerate(reached)
        ],
        "dispersion_trend": _trend(reached, dispersions, seed),
        "query_perplexity_trend": _trend(reached, perplexities, seed),
    }


def pool_contrast(run: Run, pool: Pools) -> dict[str, float]:
    """Dispersion of all correct and of all incorrect documents, and their difference with a 95 % interval.

    The curves' error bars are about draws from these documents; this interval is about other documents of
    the same kind. NaN where a pool has fewer than three.
    """
    nan = float("nan")
    found: dict[str, float] = {}
    for name, rows in (("correct", pool.correct), ("incorrect", pool.incorrect)):
        estimate = run.vectors.estimate(rows) if len(rows) >= 3 else Estimate(nan, nan, len(rows))
        found |= {name: estimate.mean, f"{name}_se": estimate.se}
    difference = found["correct"] - found["incorrect"]
    low, high = normal_bounds(difference, float(np.hypot(found["correct_se"], found["incorrect_se"])))
    return {**found, "difference": difference, "difference_low": low, "difference_high": high}


def _mean_perplexity(run: Run, rows: Rows) -> float:
    values = run.perplexity[rows]
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")


def _point(name: str, values: NDArray[np.float64]) -> dict[str, float]:
    return {name: float(values.mean()), f"{name}_se": _error(values)}


def _error(values: NDArray[np.float64]) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


def _trend(targets: list[int], values: NDArray[np.float64], seed: int) -> dict[str, Any]:
    found = trend(targets, values.mean(axis=1), [_error(row) for row in values], seed=seed)
    if found.shape == "undefined":
        return {"missing": "the curve has fewer than three different known values"}
    return {**found._asdict(), "against": [step._asdict() for step in found.against]}


def _ratio(change: float, error: float) -> float:
    return float(change / error) if error > 0 else float("nan")
