"""Trends with depth against scipy and a loop."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from lmeval_dispersion.errors import GeometryError
from lmeval_dispersion.laboratory.claims import depth_trend


def test_depth_trend_is_scipys_on_the_layer_means():
    rng = np.random.default_rng(3)
    values = rng.normal(size=(30, 8)) + 0.2 * np.arange(8)
    trend = depth_trend(values)
    means = values.mean(axis=0)
    assert trend.spearman.value == pytest.approx(stats.spearmanr(np.arange(8), means).statistic)
    assert trend.kendall.value == pytest.approx(stats.kendalltau(np.arange(8), means).statistic)
    assert trend.kendall.low <= trend.kendall.value <= trend.kendall.high
    steady = depth_trend(np.arange(8)[None, :] + 0.001 * rng.normal(size=(5, 8)))
    assert steady.spearman == pytest.approx((1, 1, 1))
    assert steady.kendall == pytest.approx((1, 1, 1))
    assert np.isnan(depth_trend(values[:1]).spearman.low)


def test_depth_trend_resamples_texts_as_a_loop_would():
    values = np.random.default_rng(4).normal(size=(6, 5)).round(1)
    trend = depth_trend(values)
    rng, taus = np.random.default_rng(5), []
    for _ in range(3000):
        sample = values[rng.integers(0, 6, 6)].mean(axis=0)
        taus.append(stats.kendalltau(np.arange(5), sample).statistic)
    low, high = np.quantile(taus, [0.025, 0.975])
    assert trend.kendall.low == pytest.approx(low, abs=0.21)
    assert trend.kendall.high == pytest.approx(high, abs=0.21)


def test_all_pairs_of_tied_means_leave_tau_undefined_not_zero():
    for values in itertools.islice([np.ones((3, 4)), np.zeros((2, 5))], 2):
        with pytest.raises(GeometryError, match="constant"):
            depth_trend(values)
