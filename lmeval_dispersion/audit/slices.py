"""Dispersion of every slice of a run beside its accuracy, and whether the two move together."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.audit.grouping import Group
from lmeval_dispersion.audit.run import Run
from lmeval_dispersion.audit.trend import paired_rank_correlations, rank_correlations

Array = NDArray[np.float64]

_DRAWS = 2000
_FEWEST = 8  # slices for an interval: with five of noise the bootstrap excludes 0 in 13 % of cases, not 5 %
_Z = 1.959963984540054  # 97.5 % point of the normal distribution


class Interval(NamedTuple):
    """A 95 % interval."""

    low: float
    high: float


def wilson(share: float, n: int) -> Interval:
    """95 % Wilson interval of a share of ``n`` documents; it stays inside [0, 1].

    >>> [round(v, 3) for v in wilson(0.5, 100)]
    [0.404, 0.596]
    """
    if n < 1 or np.isnan(share):
        return Interval(float("nan"), float("nan"))
    centre = (share + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * np.sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2))
    return Interval(max(float(centre - half), 0.0), min(float(centre + half), 1.0))


def slice_row(run: Run, group: Group) -> dict[str, Any]:
    """One line of the slice table; undefined numbers are NaN and ``reason`` says why."""
    rows, n = group.rows, len(group.rows)
    scores = run.score[rows]
    scores = scores[~np.isnan(scores)]
    accuracy = float(scores.mean()) if scores.size else float("nan")
    interval = wilson(accuracy, len(scores))
    reason = None
    dispersion = error = float("nan")
    if n < 2:
        reason = "one document has no pair to be distant from"
    else:
        estimate = run.points.estimate(rows)
        dispersion, error = estimate.mean, estimate.se
        if n == 2:
            reason = "two documents give no error bar"
    return {
        "slice": group.name,
        "documents": n,
        "labelled": len(scores),
        "dispersion": dispersion,
        "dispersion_se": error,
        "accuracy": accuracy,
        "accuracy_low": interval.low,
        "accuracy_high": interval.high,
        "query_perplexity": _mean(run.perplexity[rows]),
        "confidence": _mean(run.confidence.top_probability[rows]),
        "prompt_tokens": _mean(run.length[rows]),
        "reason": reason,
    }


def association(rows: list[dict[str, Any]], *, seed: int = 0) -> dict[str, Any]:
    """Spearman correlation of dispersion with accuracy over slices, with a bootstrap over slices.

    1: the more dispersed slice is always the more accurate one; 0: no order; negative: the reverse.
    Slices with fewer than three documents or labels do not count; below eight slices there is no interval.
    """
    usable = [r for r in rows if r["documents"] >= 3 and r["labelled"] >= 3]
    if len(usable) < 4:
        return {
            "missing": f"a correlation over slices needs 4 slices of 3 labelled documents, got {len(usable)}"
        }
    x = np.array([r["dispersion"] for r in usable])
    y = np.array([r["accuracy"] for r in usable])
    rho = float(rank_correlations(x, y[None])[0])
    if np.isnan(rho):
        return {"missing": "all slices have the same accuracy or the same dispersion"}
    if len(usable) < _FEWEST:
        return {"spearman": rho, "low": float("nan"), "high": float("nan"), "slices": len(usable)}
    rng = np.random.default_rng(seed)
    index = rng.integers(len(x), size=(_DRAWS, len(x)))
    drawn = paired_rank_correlations(x[index], y[index])
    low, high = np.quantile(drawn[~np.isnan(drawn)], [0.025, 0.975])
    return {"spearman": rho, "low": float(low), "high": float(high), "slices": len(usable)}


def slice_table(run: Run, groups: list[Group], *, seed: int = 0) -> dict[str, Any]:
    """All slices of one grouping, and how their dispersion and accuracy go together."""
    rows = [slice_row(run, group) for group in groups]
    return {"rows": rows, "association": association(rows, seed=seed)}


def overall(run: Run) -> dict[str, Any]:
    """The whole run as one slice."""
    return slice_row(run, Group("all documents", np.arange(len(run.points))))


def _mean(values: Array) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")
