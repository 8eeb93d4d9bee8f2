"""The gap, its errors and the paired comparison, against plain re-computations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from checkpoints import slow_gap
from lmeval_screener.figures import difference, gap, ranks

from lmeval_dispersion.errors import GeometryError
from lmeval_dispersion.geometry import METRICS


def sample(seed=0, shift=0.4):
    generator = np.random.default_rng(seed)
    return generator.normal(size=(10, 24)) + shift, generator.normal(size=(30, 24)) + shift


@pytest.mark.parametrize("metric", METRICS)
def test_gap_and_its_jackknife_against_leaving_tokens_out_by_hand(metric):
    t, r = sample()
    found = gap(t, r, metric)
    assert found.mean == pytest.approx(slow_gap(t, r, metric), abs=1e-12)
    left_t = [slow_gap(np.delete(t, i, 0), r, metric) for i in range(10)]
    left_r = [slow_gap(t, np.delete(r, i, 0), metric) for i in range(30)]
    np.testing.assert_allclose(found.left_out_domain, left_t, atol=1e-12)
    np.testing.assert_allclose(found.left_out_reference, left_r, atol=1e-12)
    variance = sum((len(v) - 1) / len(v) * np.square(v - np.mean(v)).sum() for v in (left_t, left_r))
    assert found.se == pytest.approx(math.sqrt(variance))


def test_the_control_is_no_part_of_the_gap():
    t, r = sample()
    spread = r * np.linspace(0.1, 3, 24)
    assert gap(t, spread).within_reference.mean != gap(t, r).within_reference.mean
    assert gap(t, r).mean == gap(t, r).within_domain.mean + gap(t, r).between.mean


def test_paired_difference_against_leaving_tokens_out_by_hand():
    t, r = sample()
    noise = np.random.default_rng(1).normal(size=t.shape) * 0.05
    a, b = gap(t, r), gap(t + noise + 0.02, r)
    found = difference(b, a)
    left = [
        slow_gap(np.delete(t + noise + 0.02, i, 0), r, "cosine") - slow_gap(np.delete(t, i, 0), r, "cosine")
        for i in range(10)
    ]
    assert found.mean == pytest.approx(slow_gap(t + noise + 0.02, r, "cosine") - slow_gap(t, r, "cosine"))
    # Only T changed, but leaving a reference token out moves both gaps by nearly the same.
    assert found.se >= math.sqrt(9 / 10 * np.square(left - np.mean(left)).sum()) - 1e-12
    assert found.se < 0.5 * math.hypot(a.se, b.se)


def test_the_same_rows_are_not_separated_and_a_spread_domain_is():
    t, r = sample()
    a = gap(t, r)
    assert not difference(a, gap(t * 3, r * 0.5)).separated
    assert difference(gap(t - t.mean(axis=0), r), a).separated
    assert difference(gap(t - t.mean(axis=0), r), a).mean > 0


def test_differences_need_one_metric_and_one_token_set():
    t, r = sample()
    for other in (gap(t, r, "euclidean"), gap(t[:9], r), gap(t, r[:20])):
        with pytest.raises(GeometryError, match="same tokens"):
            difference(gap(t, r), other)


def test_ranks_count_from_the_largest_and_ties_share():
    assert ranks([0.1, 0.5, 0.5, 0.9]) == [4, 2, 2, 1]
