"""Bins of texts with a planted correlation, and clusters of contexts with planted distances."""

import numpy as np

from lmeval_dispersion.geometry import contributions
from lmeval_dispersion.geometry.pairs import unit_rows
from lmeval_dispersion.laboratory.perplexity_law import SEQUENCE, sorted_bins, uniform_bins
from lmeval_dispersion.statistics import (
    Interval,
    correlation,
    correlation_bounds,
    resampled_correlations,
)


def planted_perplexities(rng, *, bins, kind=SEQUENCE, segments=800, size=20):
    """Perplexities of the bins that the law chooses, mean or mean log, which r is taken with; (bins,)."""
    nll = rng.normal(3.0, 0.5, size=segments)
    values = nll[sorted_bins(nll, size)]
    means = (np.exp(values) if kind == SEQUENCE else values).mean(axis=1)
    return means[uniform_bins(means, bins)]


def planted_bins(rng, rho, studies, **options):
    """Perplexities x (studies, bins) and dispersions y whose correlation is ``rho``."""
    x = np.array([planted_perplexities(rng, **options) for _ in range(studies)])
    noise = rng.normal(size=x.shape)
    return x, rho * (x - x.mean()) / x.std() + np.sqrt(1 - rho**2) * noise


def planted_clusters(rng, count, *, members=20, d=48):
    """``within`` and ``apart`` (count,) of clusters of different spreads, as the study has them."""
    spread = 0.6 * np.exp(0.4 * rng.normal(size=count))
    places = (
        0.8 * np.exp(0.3 * rng.normal(size=(count, 1))) * rng.normal(size=(count, d)) / np.sqrt(d)
    )
    places[:, 0] += 1.0
    noise = rng.normal(size=(count, members, d)) / np.sqrt(d)
    vectors = places[:, None] + spread[:, None, None] * noise
    centroids = vectors.mean(axis=1)
    units = unit_rows(vectors.reshape(-1, d)).reshape(vectors.shape)
    within = np.square(units - unit_rows(centroids)[:, None]).sum(axis=2).mean(axis=1) / 2
    return within, contributions(centroids)


def bootstrap_correlation(x, y, seed=0):
    """A correlation with its 95 % interval over the points, as the laboratory gives it."""
    value, samples = correlation(x, y), resampled_correlations(x, y, seed)
    return Interval(value, *correlation_bounds(value, samples, len(x)))
