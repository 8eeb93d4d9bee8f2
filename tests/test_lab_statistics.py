"""The laboratory's statistics, against slow re-derivations and what must hold of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lmeval_dispersion.errors import GeometryError, TooFewVectorsError
from lmeval_dispersion.laboratory.statistics import (
    bootstrap_correlation,
    correlation,
    depth_trend,
    effective_rank,
    mean_interval,
    sorted_bins,
    uniform_bins,
)


def slow_algorithm_1(means, k):
    """The paper's pseudocode, line by line."""
    selected = set()
    for step in range(k):
        target = means[0] + (step / (k - 1) if k > 1 else 0) * (means[-1] - means[0])
        best = min(range(len(means)), key=lambda j: (abs(means[j] - target), j))
        selected.add(best)
    for j in range(len(means)):
        if len(selected) >= k:
            break
        selected.add(j)
    return sorted(selected)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=40, unique=True), st.integers(1, 45))
def test_uniform_bins_are_algorithm_1(means, k):
    means = sorted(means)
    chosen = uniform_bins(means, k).tolist()
    assert len(chosen) == min(k, len(means))
    if k < len(means):
        assert chosen == slow_algorithm_1(means, k)
    if k >= 2:
        assert 0 in chosen
        assert len(means) - 1 in chosen


def test_bins_are_sorted_runs_and_leave_out_the_highest():
    values = np.random.default_rng(0).permutation(107).astype(float)
    bins = sorted_bins(values, 10)
    assert bins.shape == (10, 10)
    assert [sorted(values[b]) for b in bins] == [list(range(10 * i, 10 * i + 10)) for i in range(10)]
    with pytest.raises(TooFewVectorsError, match="at least one bin of 10 segments, got 9"):
        sorted_bins(values[:9], 10)


@pytest.mark.parametrize(
    ("kind", "peer"),
    [("pearson", stats.pearsonr), ("spearman", stats.spearmanr), ("kendall", stats.kendalltau)],
)
def test_correlations_are_scipys_with_an_interval_that_holds_them(kind, peer):
    rng = np.random.default_rng(1)
    x = rng.normal(size=40)
    y = -x + rng.normal(size=40)
    expected = peer(x, y).statistic
    assert correlation(x, y, kind) == pytest.approx(expected, abs=1e-12)
    interval = bootstrap_correlation(x, y, kind)
    assert interval.value == pytest.approx(expected, abs=1e-12)
    assert -1 <= interval.low < interval.value < interval.high <= 1
    assert interval == bootstrap_correlation(x, y, kind)


def test_the_bootstrap_interval_covers_the_truth_about_as_often_as_it_says():
    rng, inside = np.random.default_rng(2), 0
    for trial in range(100):
        pair = rng.multivariate_normal([0, 0], [[1, -0.6], [-0.6, 1]], size=60)
        interval = bootstrap_correlation(pair[:, 0], pair[:, 1], seed=trial)
        inside += interval.low <= -0.6 <= interval.high
    assert 84 <= inside <= 100


def test_undefined_correlations_raise():
    for x, y in (([1, 2], [1, 2]), ([1, 1, 1], [1, 2, 3]), ([1, 2, np.nan], [1, 2, 3])):
        with pytest.raises(GeometryError):
            correlation(x, y)


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


def test_effective_rank_against_singular_values_and_its_range():
    rng = np.random.default_rng(6)
    for n, d in ((5, 9), (40, 7)):
        x = rng.normal(size=(n, d)) + 3
        z = x - x.mean(axis=0)
        z /= np.linalg.norm(z, axis=1, keepdims=True)
        p = np.linalg.svd(z, compute_uv=False) ** 2
        p /= p.sum()
        p = p[p > 1e-15]
        assert effective_rank(x) == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-9)
        assert 1 <= effective_rank(x) <= min(n, d)
        turn = np.linalg.qr(rng.normal(size=(d, d)))[0]
        assert effective_rank(x @ turn * 5 + 7) == pytest.approx(effective_rank(x), rel=1e-6)
    line = np.outer(np.arange(1.0, 6), rng.normal(size=4))
    assert effective_rank(line) == pytest.approx(1)
    with pytest.raises(GeometryError, match="all the same"):
        effective_rank(np.ones((4, 3)) / 3)


def test_mean_interval_shrinks_with_the_root_of_n():
    rng = np.random.default_rng(7)
    few, many = (mean_interval(rng.normal(size=n)) for n in (100, 10000))
    assert (few.high - few.low) / (many.high - many.low) == pytest.approx(10, rel=0.4)
    assert all(np.isnan(v) for v in mean_interval([2.0])[1:])
    with pytest.raises(TooFewVectorsError):
        mean_interval([])


def test_all_pairs_of_tied_means_leave_tau_undefined_not_zero():
    for values in itertools.islice([np.ones((3, 4)), np.zeros((2, 5))], 2):
        with pytest.raises(GeometryError, match="constant"):
            depth_trend(values)
