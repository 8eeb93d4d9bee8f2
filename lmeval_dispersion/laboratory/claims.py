"""Statistics of the laboratory: bounds that hold for many rows together, jackknives, trends with depth."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lmeval_dispersion.errors import GeometryError
from lmeval_dispersion.statistics import (
    LEVEL,
    NORMAL_975,
    Array,
    Bounds,
    Interval,
    correlation,
    jackknife_se,
    percentiles,
    rank_correlations,
    resampled_means,
    student_interval,
    student_quantile,
)


def bounds_together(values: ArrayLike, samples: ArrayLike) -> tuple[Array, Array]:
    """Lower and upper bounds (m,) that hold for all ``values`` (m,) at once in 95 % of cases.

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
    return student_interval(values, 1 - (1 - LEVEL) / claims)


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
    """Log of between over within without each cluster in turn, shape (n,), for a jackknife."""
    n = len(within)
    inside = (within.sum() - within) / (n - 1)
    # Leaving a centroid out of the mean over pairs.
    between = apart.mean() + (apart.mean() - apart) * 2 / (n - 2)
    return np.asarray(np.log(between) - np.log(inside))


class DepthTrend(NamedTuple):
    """How a quantity moves with depth: Spearman rho and Kendall tau with intervals over texts."""

    spearman: Interval
    kendall: Interval


def depth_trend(per_text: ArrayLike, seed: int = 0) -> DepthTrend:
    """Rank correlation with depth of the column means of ``per_text`` (n texts, layers).

    +1: the mean rises with every layer, -1: it falls with every layer. The interval resamples texts.

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


def text_trends(per_text: ArrayLike) -> Array:
    """Spearman correlation with depth of every text's own values (n texts, layers); shape (n,), in [-1, 1].

    Texts are independent, so the mean of these has an honest interval also where layers hardly differ; there
    the bootstrap of the layer means' rank correlation leaves out 0 far too often.
    """
    values = np.asarray(per_text, dtype=np.float64)
    return rank_correlations(np.arange(values.shape[1]), values)


def depth_samples(values: Array, seed: int = 0) -> tuple[Array, Array]:
    """Spearman and Kendall of the layer mean with depth in REPEATS resamples of the texts.

    One seed resamples any two studies of as many texts alike, so their differences are paired.
    """
    depth = np.arange(values.shape[1])
    samples = resampled_means(values, seed)
    rhos = rank_correlations(depth, samples)
    upper = np.triu_indices(len(depth), 1)
    # Depth has no ties, so tau-b needs only the ties of the samples.
    signs = np.sign(samples[:, upper[1]] - samples[:, upper[0]])
    with np.errstate(invalid="ignore", divide="ignore"):
        taus = signs.sum(axis=1) / np.sqrt(np.abs(signs).sum(axis=1) * len(upper[0]))
    return rhos, np.asarray(taus)
