"""The figures, their errors and the paired comparison, against plain re-computations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from checkpoints import slow_gap
from lmeval_screener.figures import difference, gap, ranks, ratio
from lmeval_screener.weights.projection import FinalNorm

from lmeval_dispersion.errors import GeometryError
from lmeval_dispersion.geometry import METRICS

GAMMA = np.random.default_rng(9).uniform(0.5, 2, size=24)


def sample(seed=0, shift=0.4):
    generator = np.random.default_rng(seed)
    return generator.normal(size=(10, 24)) + shift, generator.normal(size=(30, 24)) + shift


def slow_ratio(t, r):
    def distances(rows):
        return np.linalg.norm(rows[:, None] - rows[None], axis=2)[np.triu_indices(len(rows), 1)]

    return distances(t * GAMMA).mean() / distances(r * GAMMA).mean()


@pytest.mark.parametrize("figure", [*METRICS, "ratio"])
def test_a_figure_and_its_jackknife_against_leaving_tokens_out_by_hand(figure):
    t, r = sample()
    if figure == "ratio":
        found, slow = ratio(t, r, FinalNorm("n", GAMMA, "rms"), "F32"), slow_ratio
    else:
        found, slow = gap(t, r, figure), lambda t, r: slow_gap(t, r, figure)
    assert found.mean == pytest.approx(slow(t, r))
    left_t = [slow(np.delete(t, i, 0), r) for i in range(10)]
    left_r = [slow(t, np.delete(r, i, 0)) for i in range(30)]
    np.testing.assert_allclose(found.left_out_domain, left_t)
    np.testing.assert_allclose(found.left_out_reference, left_r)
    variance = sum((len(v) - 1) / len(v) * np.square(v - np.mean(v)).sum() for v in (left_t, left_r))
    assert found.se == pytest.approx(math.sqrt(variance))


def test_the_control_is_no_part_of_the_gap():
    t, r = sample()
    spread = r * np.linspace(0.1, 3, 24)
    assert gap(t, spread).within_reference.mean != gap(t, r).within_reference.mean
    assert gap(t, r).mean == gap(t, r).within_domain.mean + gap(t, r).between.mean


def test_paired_difference_against_leaving_tokens_out_by_hand():
    t, r = sample()
    moved = t + np.random.default_rng(1).normal(size=t.shape) * 0.05 + 0.02
    a, b = gap(t, r), gap(moved, r)
    found = difference(b, a)
    left = [slow_gap(np.delete(moved, i, 0), r) - slow_gap(np.delete(t, i, 0), r) for i in range(10)]
    assert found.mean == pytest.approx(slow_gap(moved, r) - slow_gap(t, r))
    # Only T changed, but leaving a reference token out moves both gaps by nearly the same.
    assert found.se >= math.sqrt(9 / 10 * np.square(left - np.mean(left)).sum()) - 1e-12
    assert found.se < 0.5 * math.hypot(a.se, b.se)


def test_the_same_rows_are_not_separated_and_a_spread_domain_is():
    t, r = sample()
    a = gap(t, r)
    assert not difference(a, gap(t * 3, r * 0.5)).separated
    spread = difference(gap(t - t.mean(axis=0), r), a)
    assert spread.separated
    assert spread.mean > 0


def test_differences_need_one_metric_and_one_token_set():
    t, r = sample()
    for other in (gap(t, r, "euclidean"), gap(t[:9], r), gap(t, r[:20])):
        with pytest.raises(GeometryError, match="same tokens"):
            difference(gap(t, r), other)


def test_ranks_count_from_the_largest_and_ties_share():
    assert ranks([0.1, 0.5, 0.5, 0.9]) == [4, 2, 2, 1]
