"""How a metric of a model's layers moves with depth: rank correlations of the layer means."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lmeval_dispersion.errors import GeometryError
from lmeval_dispersion.statistics import (
    Array,
    Interval,
    correlation,
    percentiles,
    rank_correlations,
    resampled_means,
)


class DepthTrend(NamedTuple):
    """How a quantity moves with depth: Spearman rho and Kendall tau with intervals over texts."""

    spearman: Interval
    kendall: Interval


def depth_trend(per_text: ArrayLike, seed: int = 0) -> DepthTrend:
    """Rank correlation with depth of the column means of ``per_text`` (n texts, layers).

    +1: the mean rises with every layer, -1: it falls with every layer. The interval resamples texts.

    Raises:
        GeometryError: Fewer than 3 layers, a non-finite value, or the same mean in all layers.

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
