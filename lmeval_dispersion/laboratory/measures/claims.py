"""Bounds that hold for all rows of a table together, for sentences about many of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from lmeval_dispersion.statistics import LEVEL, NORMAL_975, Array, Bounds, jackknife_se, student_quantile


def bounds_together(values: ArrayLike, samples: ArrayLike) -> tuple[Array, Array]:
    """Lower and upper bounds (m,) that hold for all ``values`` (m,) at once in 95 % of cases.

    Args:
        values: The estimates; NaN where there is none.
        samples: Bootstrap samples (repeats, m), every row one resample of the data for all estimates. Where
            estimates move together, as neighbouring layers do, the bounds are hardly wider than for one.

    The bound is the estimate ± q standard deviations of its samples, with q the 95 % point of the largest
    deviation in a resample, in standard deviations (Efron and Tibshirani 1993; Mammen 1993).
    """
    centre, drawn = np.asarray(values, dtype=np.float64), np.asarray(samples, dtype=np.float64)
    low, high = np.full(len(centre), np.nan), np.full(len(centre), np.nan)
    known = np.isfinite(centre) & (np.isfinite(drawn).mean(axis=0) > LEVEL)
    if known.any():
        sd = np.nanstd(drawn[:, known], axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):
            deviations = np.abs(drawn[:, known] - centre[known]) / sd
        # Never narrower than a normal estimate's own bound.
        largest = np.nanmax(np.where(np.isfinite(deviations), deviations, 0.0), axis=1)
        q = max(float(np.quantile(largest, LEVEL)), NORMAL_975)
        low[known], high[known] = centre[known] - q * sd, centre[known] + q * sd
    return low, high


def student_bounds(values: ArrayLike, claims: int = 1) -> Bounds:
    """Bounds of the mean of independent ``values`` (n,) that hold for all ``claims`` such means in 95 %.

    Student's interval with Bonferroni's correction; NaN for fewer than two values.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if len(numbers) < 2:
        return Bounds(float("nan"), float("nan"))
    q = student_quantile(1 - (1 - LEVEL) / 2 / claims, len(numbers) - 1)
    half = q * float(numbers.std(ddof=1)) / np.sqrt(len(numbers))
    return Bounds(float(numbers.mean() - half), float(numbers.mean() + half))


def jackknife_bounds(value: float, left_out: ArrayLike, claims: int = 1) -> Bounds:
    """Bounds of ``value`` from its values without each of n members, for all ``claims`` of them in 95 %."""
    values = np.asarray(left_out, dtype=np.float64)
    half = student_quantile(1 - (1 - LEVEL) / 2 / claims, len(values) - 1) * jackknife_se(values)
    return Bounds(value - half, value + half)


def places(chosen: Sequence[str], every: Sequence[str]) -> str:
    """Where something holds, for a sentence: ``at last``, ``at 3 of 31 layers (layer.2 to layer.4)``.

    >>> places(["layer.1", "layer.2", "last"], ["layer.0", "layer.1", "layer.2", "layer.3", "last"])
    'at 3 of 5 layers (layer.1 to layer.2, last)'
    """
    if len(every) <= 2:
        return "at " + " and ".join(chosen)
    if len(chosen) == len(every):
        return f"at all {len(every)} layers"
    numbers = [place for place, layer in enumerate(every) if layer in set(chosen)]
    breaks = [place for place, (a, b) in enumerate(pairwise(numbers)) if b != a + 1 or every[b] == "last"]
    starts, ends = [0, *(b + 1 for b in breaks)], [*breaks, len(numbers) - 1]
    runs = [(every[numbers[a]], every[numbers[b]]) for a, b in zip(starts, ends, strict=True)]
    shown = ", ".join(a if a == b else f"{a} to {b}" for a, b in runs)
    return f"at {len(numbers)} of {len(every)} layers ({shown})"


def log_ratios_left_out(within: Array, apart: Array) -> Array:
    """Log of between over within without each cluster in turn, shape (n,), for a jackknife.

    Args:
        within: Mean distance of each cluster's members to its centroid, (n >= 3,).
        apart: Mean distance of each centroid to the others.
    """
    n = len(within)
    inside = (within.sum() - within) / (n - 1)
    # Leaving a centroid out of the mean over pairs.
    between = apart.mean() + (apart.mean() - apart) * 2 / (n - 2)
    return np.asarray(np.log(between) - np.log(inside))
