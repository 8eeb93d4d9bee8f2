"""The shared statistics against scipy, scikit-learn and slow re-derivations."""

import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from planted_law import bootstrap_correlation
from scipy import stats
from sklearn.metrics import roc_auc_score

from lmeval_dispersion import statistics
from lmeval_dispersion.errors import GeometryError

PEERS = {"pearson": stats.pearsonr, "spearman": stats.spearmanr}
tied = st.lists(st.integers(-3, 3), min_size=3, max_size=12)


@pytest.mark.parametrize("shape", [(1,), (9,), (4, 7), (2, 3, 5), (3, 1), (0,), (2, 0)])
@pytest.mark.parametrize("tie", [True, False])
def test_ranks_are_scipys(shape, tie):
    rng = np.random.default_rng(0)
    values = rng.integers(0, 4, shape) if tie else rng.normal(size=shape)
    expected = stats.rankdata(values, axis=-1) if values.size else values
    np.testing.assert_array_equal(statistics.ranks(values), expected)


@given(tied, st.sampled_from(sorted(PEERS)), st.randoms(use_true_random=False))
@settings(max_examples=150)
def test_correlations_are_scipys(values, kind, random):
    other = [random.randint(-3, 3) for _ in values]
    assume(len(set(values)) > 1 and len(set(other)) > 1)
    assert statistics.correlation(values, other, kind) == pytest.approx(
        PEERS[kind](values, other).statistic, abs=1e-12
    )


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([1, 2], [1, 2], "two arrays of equal length, at least 3"),
        ([1, 2, 3], [1, 2, 3, 4], "two arrays of equal length"),
        ([1, 1, 1], [1, 2, 3], "constant"),
        ([1, 2, np.nan], [1, 2, 3], "finite"),
    ],
)
def test_undefined_correlations_raise(x, y, message):
    with pytest.raises(GeometryError, match=message):
        statistics.correlation(x, y)


def test_bootstrap_interval_is_that_of_a_loop_over_resamples():
    """Its coverage is that of the laboratory's intervals."""
    rng = np.random.default_rng(1)
    x = rng.integers(0, 9, 25).astype(float)
    y = -x + rng.normal(size=25).round(1)
    found = bootstrap_correlation(x, y, seed=3)
    draws = np.random.default_rng(3).integers(0, 25, size=(2000, 25))
    z = np.arctanh([stats.pearsonr(x[d], y[d]).statistic for d in draws])
    r = stats.pearsonr(x, y).statistic
    half = stats.t.ppf(0.975, 23) * z.std()
    expected = (r, np.tanh(np.arctanh(r) - half), np.tanh(np.arctanh(r) + half))
    assert tuple(found) == pytest.approx(expected, abs=1e-10)


def test_the_jackknife_of_means_is_the_textbook_error():
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=12), rng.normal(size=30)

    def left_out(values):
        return [np.delete(values, i).mean() for i in range(len(values))]

    one, two = (v.std(ddof=1) / math.sqrt(len(v)) for v in (x, y))
    assert statistics.jackknife_se(left_out(x)) == pytest.approx(one)
    assert statistics.jackknife_se(left_out(x), left_out(y)) == pytest.approx(math.hypot(one, two))
    assert statistics.jackknife_se() == 0.0


@given(st.integers(1, 400), st.floats(0, 1))
def test_wilson_is_scipys(n, share):
    right = round(share * n)
    expected = stats.binomtest(right, n).proportion_ci(method="wilson")
    assert tuple(statistics.wilson(right / n, n)) == pytest.approx(
        (expected.low, expected.high), abs=1e-12
    )


def test_normal_and_student_intervals():
    assert pytest.approx(stats.norm.ppf(0.975), abs=1e-15) == statistics.NORMAL_975
    values = np.random.default_rng(6).normal(size=9)
    expected = stats.ttest_1samp(values, 0).confidence_interval()
    assert tuple(statistics.student_interval(values)) == pytest.approx(
        (expected.low, expected.high)
    )
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.99)
    assert tuple(statistics.student_interval(values, 0.99)) == pytest.approx(
        (expected.low, expected.high)
    )
    assert all(math.isnan(bound) for bound in statistics.student_interval([1.0]))


@pytest.mark.parametrize("freedom", [1.0, 2.0, 2.5, 3.0, 6.0, 31.0, 1000.0])
def test_student_s_distribution_is_scipys(freedom):
    for p in (0.01, 0.5, 0.6, 0.975, 0.995, 1 - 0.025 / 100):
        found = statistics.student_quantile(p, freedom)
        # SciPy 1.10 inverts to 3e-9 only; its distribution function is exact in every version.
        assert found == pytest.approx(stats.t.ppf(p, freedom), rel=1e-8, abs=1e-12)
        assert stats.t.cdf(found, freedom) == pytest.approx(p, rel=1e-12)
    for t in (0.0, 0.3, 1.0, 2.0, 4.5, 12.0):
        assert statistics.student_p(t, freedom) == pytest.approx(
            2 * stats.t.sf(t, freedom), rel=1e-10, abs=1e-14
        )
        assert statistics.student_p(t, math.inf) == pytest.approx(
            2 * stats.norm.sf(t), rel=1e-10, abs=1e-14
        )


@pytest.mark.parametrize("tie", [True, False])
def test_auroc_is_scikit_learns_and_its_error_is_delongs(tie):
    rng = np.random.default_rng(0)
    signal = rng.integers(0, 6, 40).astype(float) if tie else rng.normal(size=40)
    right = rng.random(40) < 0.6
    found = statistics.auroc(signal, right)
    assert found.value == pytest.approx(roc_auc_score(right, signal))
    kernel = np.array([[(a > b) + (a == b) / 2 for b in signal[~right]] for a in signal[right]])
    variance = sum(kernel.mean(axis=1 - i).var(ddof=1) / kernel.shape[i] for i in (0, 1))
    assert found.se == pytest.approx(math.sqrt(variance))


@functools.cache
def centred_ranks(values):
    return stats.rankdata(values) - (len(values) + 1) / 2


def enumerated(strata):
    """Correlation and two-sided p by going through every order of every stratum, with scipy's ranks."""

    def rho(pairs):
        centred = [[centred_ranks(tuple(side)) for side in pair] for pair in pairs]
        return sum(x @ y for x, y in centred) / math.sqrt(
            math.prod(sum(pair[side] @ pair[side] for pair in centred) for side in (0, 1))
        )

    seen = rho(strata)
    null = [
        rho([(x, order) for (x, _), order in zip(strata, orders, strict=True)])
        for orders in itertools.product(*(itertools.permutations(y) for _, y in strata))
    ]
    return seen, np.mean([abs(value) >= abs(seen) - 1e-9 for value in null]), len(null)


pair = st.integers(1, 3).flatmap(
    lambda n: st.tuples(*[st.lists(st.integers(0, 3), min_size=n, max_size=n)] * 2)
)


@given(st.lists(pair, min_size=1, max_size=3))
@example([([0, 1, 1, 2, 3], [1, 0, 2, 2, 3]), ([0, 3], [1, 0])])
@settings(max_examples=40)
def test_permutations_are_plain_enumeration(strata):
    varied = [any(len(set(members[side])) > 1 for members in strata) for side in (0, 1)]
    found = statistics.rank_agreement(strata)
    if not all(varied):
        assert found is None
        return
    rho, p, count = enumerated([members for members in strata if len(members[0]) > 1])
    assert tuple(found) == pytest.approx((rho, p, True, count))


def test_many_permutations_are_drawn():
    x, y = np.random.default_rng(30).integers(0, 6, (2, 30))
    found = statistics.rank_agreement([(x, y)])
    assert found.spearman == pytest.approx(stats.spearmanr(x, y).statistic)
    assert (found.exact, found.permutations) == (False, 9999)


def test_spearman_bounds_leave_out_zero_in_at_most_five_per_cent_of_independent_pairs():
    rng = np.random.default_rng(0)
    for n in (8, 12, 57):
        x, y = rng.normal(size=(4000, n)), rng.normal(size=(4000, n))
        bounds = [
            statistics.spearman_bounds(rho, n) for rho in statistics.paired_rank_correlations(x, y)
        ]
        assert 0.02 < np.mean([not low < 0 < high for low, high in bounds]) < 0.06


def test_spearman_bounds_have_a_width_and_hold_the_estimate():
    low, high = statistics.spearman_bounds(1.0, 8)
    assert 0 < low < 0.9
    assert high == 1
    assert statistics.spearman_bounds(-1.0, 8) == (-1.0, -low)
    assert np.isnan(statistics.spearman_bounds(0.5, 7).low)


def test_the_logit_interval_of_an_auroc_covers_and_never_leaves_the_unit_interval():
    """Normal signals whose AUROC is known; 0.95 also near 1, where value ± 1.96 se covers 0.87."""
    rng = np.random.default_rng(1)
    for shift, m, n in ((0.0, 20, 200), (1.0, 25, 60), (2.5, 30, 30)):
        truth = 0.5 * (1 + math.erf(shift / 2))
        held = 0
        for _ in range(1500):
            signal = np.concatenate([rng.normal(shift, 1, m), rng.normal(0, 1, n)])
            area = statistics.auroc(signal, np.arange(m + n) < m)
            low, high = statistics.auroc_bounds(area.value, area.se, m, n)
            assert 0 <= low < high <= 1
            held += low <= truth <= high
        assert 0.93 < held / 1500 < 0.99


def test_auroc_bounds_at_the_ends_and_without_an_error():
    edge = 0.025 ** (1 / 5)
    assert statistics.auroc_bounds(1.0, 0.0, 40, 5) == pytest.approx((edge, 1.0))
    assert statistics.auroc_bounds(0.0, 0.0, 40, 5) == pytest.approx((0.0, 1 - edge))
    assert np.isnan(statistics.auroc_bounds(0.5, 0.0, 40, 5).low)
    assert np.isnan(statistics.auroc_bounds(0.7, float("nan"), 1, 5).low)


def test_the_auroc_inside_strata_against_a_loop_over_pairs():
    rng = np.random.default_rng(2)
    signal, right = rng.integers(0, 9, 80).astype(float), rng.random(80) < 0.4
    strata = [np.arange(0, 30), np.arange(30, 78), np.arange(78, 80)]
    wins = pairs = 0.0
    for rows in strata:
        for i in rows[right[rows]]:
            for j in rows[~right[rows]]:
                wins += (signal[i] > signal[j]) + 0.5 * (signal[i] == signal[j])
                pairs += 1
    found = statistics.stratified_auroc(signal, right, strata)
    assert found.value == pytest.approx(wins / pairs)
    assert found.pairs == pairs
    assert statistics.stratified_auroc(signal, np.ones(80, dtype=bool), strata) is None
    whole = statistics.stratified_auroc(signal, right, [np.arange(80)])
    assert (whole.value, whole.se) == pytest.approx(statistics.auroc(signal, right)[:2])


@pytest.mark.parametrize("draws", [150, pytest.param(600, marks=pytest.mark.slow)])
def test_the_auroc_inside_small_strata_has_an_interval_that_covers_chance(draws):
    rng = np.random.default_rng(3)
    strata = [np.arange(4 * i, 4 * i + 4) for i in range(50)]
    held = 0
    for _ in range(draws):
        found = statistics.stratified_auroc(rng.normal(size=200), rng.random(200) < 0.3, strata)
        low, high = statistics.auroc_bounds(found.value, found.se, found.right, found.wrong)
        held += low <= 0.5 <= high
    assert 0.92 < held / draws < 0.99


@pytest.mark.parametrize("value", [1e-9, 0.01, 0.5, 1.0, 2.7, 40.0])
def test_tail_of_f_is_scipys(value):
    for above, below in ((1, 9), (1.3, 12.8), (23, 224.5), (2999, 3e4), (5, 1e6)):
        assert statistics.f_p(value, above, below) == pytest.approx(
            stats.f.sf(value, above, below), rel=1e-8, abs=1e-14
        )
    assert statistics.f_p(0.0, 3, 4) == 1.0
