"""Results against a screen: by brute force, and over all draws of small registries."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from lmeval_screener.shortlist.estimates import (
    GroupResults,
    best_at_random,
    count_bounds,
    decision_accuracy,
    missed,
)
from scipy import stats

BETTER = ("better", "better_low", "better_high")


def group(gaps, accuracies, listed, audited=()):
    chosen = (np.isin(np.arange(len(gaps)), places) for places in (listed, audited))
    return GroupResults(np.asarray(gaps, float), np.asarray(accuracies, float), *chosen)


def planted(draw, count, skill, listed):
    """Gaps, best first, and accuracies that follow them with correlation ``skill``."""
    gaps = draw.normal(size=count)
    accuracies = skill * gaps + math.sqrt(1 - skill**2) * draw.normal(size=count)
    order = np.argsort(-gaps)
    return gaps[order], accuracies[order], list(range(listed))


def audited(gaps, accuracies, listed, drawn):
    """The same where only the list and the drawn are known."""
    seen = np.where(np.isin(np.arange(len(gaps)), [*listed, *drawn]), accuracies, np.nan)
    return group(gaps, seen, listed, drawn)


def share_by_hand(gaps, accuracies):
    right = 0.0
    pairs = list(itertools.combinations(range(len(gaps)), 2))
    for i, j in pairs:
        product = (gaps[i] - gaps[j]) * (accuracies[i] - accuracies[j])
        right += 1.0 if product > 0 else 0.5 if product == 0 else 0.0
    return right / len(pairs)


def test_decision_accuracy_is_the_share_of_pairs_ties_half():
    draw = np.random.default_rng(0)
    gaps, accuracies = draw.integers(0, 4, 9), draw.integers(0, 4, 9)
    found = decision_accuracy([group(gaps, accuracies, [0])])
    assert found.value == pytest.approx(share_by_hand(gaps, accuracies))
    two = decision_accuracy([group(gaps, accuracies, [0]), group(gaps, -accuracies, [0])])
    assert two.value == pytest.approx(0.5)


def test_the_interval_of_decision_accuracy_is_that_of_a_jackknife_over_checkpoints():
    gaps, accuracies, listed = planted(np.random.default_rng(5), 12, 0.5, 3)
    found = decision_accuracy([group(gaps, accuracies, listed)])
    left_out = [share_by_hand(np.delete(gaps, i), np.delete(accuracies, i)) for i in range(12)]
    se = math.sqrt(11 * np.var(left_out))
    half = stats.t.ppf(0.975, 10) * se / (found.value * (1 - found.value))
    centre = math.log(found.value / (1 - found.value))
    assert (found.low, found.high) == pytest.approx(
        [1 / (1 + math.exp(-centre + s * half)) for s in (1, -1)]
    )


def test_estimates_from_an_audit_are_without_bias_over_all_its_draws():
    draw = np.random.default_rng(1)
    for count, size, drawn in ((7, 2, 2), (8, 3, 3), (6, 1, 4)):
        gaps, accuracies, listed = planted(draw, count, 0.4, size)
        best = accuracies[listed].max()
        found = [
            audited(gaps, accuracies, listed, sample)
            for sample in itertools.combinations(range(size, count), drawn)
        ]
        assert {results.design for results in found} == {"audit"}
        shares = [decision_accuracy([results]).value for results in found]
        assert np.mean(shares) == pytest.approx(share_by_hand(gaps, accuracies))
        what = [missed(results) for results in found]
        others = accuracies[size:]
        assert np.mean([figures["better"] for figures in what]) == pytest.approx(
            (others > best).sum()
        )
        assert np.mean([figures["excess"] for figures in what]) == pytest.approx(
            np.maximum(others - best, 0).mean()
        )
        truth = max(accuracies.max() - best, 0)
        assert all(figures["seen"] <= truth + 1e-12 for figures in what)
        covered = [
            figures["better_low"] <= (others > best).sum() <= figures["better_high"]
            for figures in what
        ]
        assert np.mean(covered) >= 0.95


def test_regret_and_what_as_many_at_random_would_miss_by_enumeration():
    draw = np.random.default_rng(2)
    gaps, accuracies, listed = planted(draw, 7, 0.1, 3)
    found = missed(group(gaps, accuracies, listed))
    assert found["regret"] == pytest.approx(accuracies.max() - accuracies[:3].max())
    draws = [max(c) for c in itertools.combinations(accuracies, 3)]
    assert best_at_random(accuracies, 3) == pytest.approx(np.mean(draws))
    assert found["at_random"] == pytest.approx(accuracies.max() - np.mean(draws))
    better = (accuracies[3:] > accuracies[:3].max()).sum()
    assert [found[name] for name in BETTER] == [better] * 3


def test_the_interval_of_a_count_covers_every_truth_and_is_not_wider_than_it_must_be():
    others, drawn = 14, 5
    for better in range(others + 1):
        chance = dict(enumerate(stats.hypergeom(others, better, drawn).pmf(range(drawn + 1))))
        bounds = {hits: count_bounds(hits, drawn, others) for hits, p in chance.items() if p}
        assert (
            sum(chance[hits] for hits, (low, high) in bounds.items() if low <= better <= high)
            >= 0.95
        )
    assert count_bounds(0, 5, 5) == (0, 0)
    assert count_bounds(5, 5, 5) == (5, 5)
    # One more would give 0 of 8 in less than 2.5 % of draws.
    low, high = count_bounds(0, 8, 28)
    none_at, none_above = (math.comb(28 - int(high) - i, 8) / math.comb(28, 8) for i in (0, 1))
    assert low == 0
    assert none_at > 0.025 > none_above


@pytest.mark.parametrize(
    ("known", "drawn", "design", "all_pairs"),
    [
        ([0, 1, 2, 3, 4, 5], [3], "all", True),
        ([0, 1, 3, 4], [3, 4], "audit", True),
        ([0, 1, 3], [3, 4], "audit", False),  # one draw shows no pair of two others
        ([0, 1], [3, 4], "list", False),
        ([0, 3, 4], [3, 4], "list", False),  # part of the list is missing
        ([0], [], "none", False),
    ],
)
def test_what_results_stand_for(known, drawn, design, all_pairs):
    accuracies = np.where(np.isin(np.arange(6), known), np.arange(6.0), np.nan)
    results = group(np.arange(6.0)[::-1], accuracies, [0, 1], drawn)
    assert (results.design, results.stands_for_all) == (design, all_pairs)


def test_what_is_known_beside_an_audit_is_no_sample_and_takes_no_part():
    draw = np.random.default_rng(3)
    gaps, accuracies, listed = planted(draw, 9, 0.5, 2)
    results = audited(gaps, accuracies, listed, (4, 6))
    more = group(gaps, np.where(np.arange(9) == 8, 99.0, results.accuracies), listed, (4, 6))
    assert decision_accuracy([more]) == decision_accuracy([results])
    assert [missed(more)[name] for name in BETTER] == [missed(results)[name] for name in BETTER]
    assert missed(more)["seen"] > missed(results)["seen"]


def test_little_data_gives_wide_intervals_and_none_gives_none():
    assert np.isnan(decision_accuracy([group([2, 1], [np.nan, 1.0], [0])]).value)
    assert tuple(decision_accuracy([group([2, 1], [2.0, 1.0], [0])])) == (1.0, 0.0, 1.0)
    right = decision_accuracy([group(range(12), range(12), [0])])
    assert right.high == 1
    assert right.low == pytest.approx(0.025 ** (1 / 6))
    wrong = decision_accuracy([group(range(12), range(12)[::-1], [0])])
    assert (wrong.low, wrong.high) == (0, pytest.approx(1 - right.low))
    assert missed(group([2, 1], [np.nan, 1.0], [0])) == {}


@pytest.mark.parametrize(
    ("groups", "count", "listed", "drawn"),
    [(1, 12, 3, None), (3, 8, 2, None), (1, 40, 6, 8), (3, 20, 2, 4)],
)
def test_intervals_of_decision_accuracy_hold_the_truth(groups, count, listed, drawn):
    draw = np.random.default_rng(4)
    for skill in (0.0, 0.6):
        truth = 0.5 + math.asin(skill) / math.pi
        held, values = 0, []
        for _ in range(150):
            found = []
            for _ in range(groups):
                whole = planted(draw, count, skill, listed)
                sample = (
                    draw.choice(np.arange(listed, count), drawn, replace=False) if drawn else None
                )
                found.append(group(*whole) if sample is None else audited(*whole, sample))
            interval = decision_accuracy(found)
            held += interval.low <= truth <= interval.high
            values.append(interval.value)
        assert held >= 150 * 0.92  # 95 % less 1.7 standard deviations of the count
        assert abs(np.mean(values) - truth) < 4 * np.std(values) / math.sqrt(150)
