"""The chance of an order, how many places hold the best, an own slope, and noise of the tokens."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmeval_screener.chance import NEAR, Chances, fitted, is_noise, normal_scores
from lmeval_screener.figures import Ratio, gaps, ratio
from lmeval_screener.weights.projection import FinalNorm
from scipy import stats

from lmeval_dispersion.evidence import FINE_TUNES, FROM_SCRATCH, SLOPES

OURS, SCRATCH = SLOPES[FINE_TUNES], SLOPES[FROM_SCRATCH]


def with_slope(k):
    return replace(OURS, k=k)


# --- the chance and the places to evaluate --------------------------------------------------------------


@pytest.mark.parametrize(
    ("slope", "places"),
    [
        (OURS, {2: 2, 6: 4, 12: 6, 24: 9, 32: 11, 48: 14, 100: 22, 300: 44, 1000: 94, 3000: 186}),
        (SCRATCH, {6: 3, 12: 4, 24: 6, 32: 7, 48: 8, 100: 11, 300: 18, 1000: 30, 3000: 47}),
    ],
)
def test_how_many_places_hold_the_best(slope, places):
    assert {n: Chances(n, slope).first_for() for n in places} == places


@pytest.mark.parametrize(
    ("n", "k", "draws"),
    [
        *((6, 0.7, 60_000), (24, 1.05, 20_000), (24, -0.4, 20_000)),
        pytest.param(300, 0.7, 20_000, marks=pytest.mark.slow),
        pytest.param(3000, 1.05, 4_000, marks=pytest.mark.slow),
    ],
)
def test_the_best_is_where_a_draw_of_the_model_has_it(n, k, draws):
    draw, rho = np.random.default_rng(n), k * math.sqrt(2 / (1 + 2 * k * k))
    places = []
    for _ in range(draws * n // 2_000_000 + 1):
        accuracy = draw.normal(size=(min(draws, 2_000_000 // n), n))
        seen = rho * accuracy + math.sqrt(1 - rho**2) * draw.normal(size=accuracy.shape)
        best = np.take_along_axis(seen, accuracy.argmax(axis=1)[:, None], axis=1)
        places.append((seen > best).sum(axis=1))
    drawn = np.cumsum(np.bincount(np.concatenate(places), minlength=n)) / sum(map(len, places))
    error = 4 * np.sqrt(0.25 / sum(map(len, places)))
    assert np.abs(Chances(n, with_slope(k)).holds_best - drawn).max() < error


@settings(max_examples=30)
@given(st.integers(1, 60), st.floats(-0.9, 2.9), st.floats(0.01, 1), st.floats(0.01, 1))
def test_chances_are_those_of_one_model(n, k, some, more):
    chances = Chances(n, with_slope(k))
    held = chances.holds_best
    assert held.shape == (n,)
    assert held[-1] == pytest.approx(1, abs=1e-9)
    assert np.diff(held, prepend=0).min() > -1e-12
    assert chances.first_for(min(some, more)) <= chances.first_for(max(some, more)) <= n
    assert held[chances.first_for(some) - 1] >= some - 1e-9
    for a, b in itertools.islice(itertools.combinations(range(1, n + 1), 2), 20):
        assert chances.between(a, b) + chances.between(b, a) == pytest.approx(1)
        assert (
            (chances.between(a, b) > 0.5) == (k > 0) or k == 0 or math.isclose(k, 0, abs_tol=1e-9)
        )


def test_of_two_and_without_any_relation_the_chances_have_a_closed_form():
    rho = 0.7 * math.sqrt(2 / (1 + 2 * 0.49))
    assert Chances(2, OURS).holds_best[0] == pytest.approx(0.5 + math.asin(rho) / math.pi, abs=2e-3)
    assert Chances(40, with_slope(0.0)).holds_best == pytest.approx(np.arange(1, 41) / 40, abs=2e-3)
    assert Chances(1, OURS).first_for() == 1
    between = stats.norm.cdf(
        0.7 * (stats.norm.ppf(23.625 / 24.25) - stats.norm.ppf(15.625 / 24.25))
    )
    assert Chances(24, OURS).between(1, 9) == pytest.approx(between)
    assert Chances(24, OURS).between(5, 5) == 0.5


# --- the slope of one's own results ---------------------------------------------------------------------


def group_of(draw, n, k):
    """Normal scores of n ranks, and accuracies on a scale from 0 to 1 of the model with slope k."""
    rho = k * math.sqrt(2 / (1 + 2 * k * k))
    figure = -np.sort(-draw.normal(size=n))
    return normal_scores(n), 0.5 + 0.08 * (
        rho * figure + math.sqrt(1 - rho**2) * draw.normal(size=n)
    )


@pytest.mark.parametrize(
    ("n", "evaluated", "groups", "repeats"),
    [
        (24, slice(0, 9), 1, 150),
        (24, "audit", 1, 150),
        (8, slice(None), 1, 150),
        pytest.param(24, slice(None), 1, 1500, marks=pytest.mark.slow),
        pytest.param(24, "audit", 1, 1500, marks=pytest.mark.slow),
        pytest.param(300, slice(0, 44), 1, 600, marks=pytest.mark.slow),
        pytest.param(8, slice(None), 4, 600, marks=pytest.mark.slow),
    ],
)
def test_the_interval_of_an_own_slope_covers_it_in_nineteen_of_twenty(
    n, evaluated, groups, repeats
):
    """The slope of each user is drawn from what was measured between groups."""
    draw, covered = np.random.default_rng(1), 0
    for _ in range(repeats):
        k, own = OURS.k + OURS.spread * draw.normal(), []
        for _ in range(groups):
            scores, accuracies = group_of(draw, n, k)
            of = evaluated
            if evaluated == "audit":
                of = np.r_[np.arange(9), draw.choice(np.arange(9, n), 5, replace=False)]
            own.append((scores[of], accuracies[of]))
        slope = fitted(own, OURS)
        covered += slope.low <= k <= slope.high
    assert covered >= stats.binom.ppf(0.01, repeats, 0.95)
    assert covered <= stats.binom.ppf(0.995, repeats, 0.99)  # nor is it much too wide


def test_an_own_slope_begins_at_ours_and_follows_the_results():
    scores = normal_scores(24)
    nothing = fitted([], OURS)
    assert (nothing.k, nothing.groups) == (pytest.approx(OURS.k, abs=0.01), 0)
    assert (nothing.low, nothing.high) == pytest.approx(
        (OURS.k - 1.96 * OURS.spread, OURS.k + 1.96 * OURS.spread), abs=0.02
    )
    right, wrong = fitted([(scores, scores)], OURS), fitted([(scores, -scores)], OURS)
    assert wrong.k < 0 < nothing.k < right.k
    assert (right.kind, right.groups) == ("yours", 24)
    assert right.high - right.low < nothing.high - nothing.low
    # Accuracies that hardly differ say nothing; nor does their unit matter.
    assert fitted([(scores, scores * NEAR / 9)], OURS).k == nothing.k
    draw = np.random.default_rng(3)
    scores, accuracies = group_of(draw, 24, 0.7)
    assert fitted([(scores, 100 * accuracies)], OURS, near=1.0) == fitted(
        [(scores, accuracies)], OURS
    )


# --- noise of the tokens --------------------------------------------------------------------------------


def siblings(draw, n, *, tokens=10, like="rows", noise=0.05, words=105, width=64):
    """Ratios of one matrix with noise: in each row, near copies of eleven models, or along one direction."""
    base = draw.normal(size=(tokens + words, width)) + 0.6 * draw.normal(size=width)
    size = noise * np.linalg.norm(base, axis=1, keepdims=True) / np.sqrt(width)
    models = [base + size * draw.normal(size=base.shape) for _ in range(11)]
    direction, norm, found = (
        size * draw.normal(size=base.shape),
        FinalNorm("norm", np.ones(width), "rms"),
        [],
    )
    for i in range(n):
        own = size * draw.normal(size=base.shape)
        rows = {
            "rows": base + own,
            "copies": models[i % 11] + own / 20,
            "direction": base + draw.normal() * direction + own / 10,
        }[like]
        found.append(ratio(rows[:tokens], rows[tokens:], norm, "F32"))
    return found


def drawn(draw, n, *, tokens=10, words=105, spread=0.0):
    """Ratios whose logarithm is a mean over tokens, made without rows: for large groups."""
    parts = [0.1 * draw.normal(size=(n, size)) for size in (tokens, words)]
    logs = spread * draw.normal(size=n) + parts[0].mean(axis=1) - parts[1].mean(axis=1)
    without = [
        sign * (part.mean(axis=1, keepdims=True) - part) / (part.shape[1] - 1)
        for sign, part in zip((1, -1), parts, strict=True)
    ]
    sides = [np.exp(logs[:, None] + side) for side in without]
    return [Ratio(float(np.exp(x)), 0.0, 0.0, t, r) for x, t, r in zip(logs, *sides, strict=True)]


@pytest.mark.parametrize(
    ("n", "kind", "groups"),
    [
        *((2, "rows", 100), (6, "rows", 75), (6, "direction", 75), (24, "copies", 25)),
        *((300, "drawn", 40), (3000, "drawn", 5)),
        pytest.param(2, "rows", 1000, marks=pytest.mark.slow),
        pytest.param(2, "direction", 1000, marks=pytest.mark.slow),
        *(
            pytest.param(6, kind, 1000, marks=pytest.mark.slow, id=f"6-{kind}-slow")
            for kind in ("rows", "copies", "direction")
        ),
        *(
            pytest.param(24, kind, 400, marks=pytest.mark.slow, id=f"24-{kind}-slow")
            for kind in ("rows", "copies", "direction")
        ),
        pytest.param(300, "rows", 40, marks=pytest.mark.slow),
        pytest.param(300, "copies", 40, marks=pytest.mark.slow),
        pytest.param(3000, "drawn", 60, marks=pytest.mark.slow, id="3000-drawn-slow"),
    ],
)
def test_noise_of_tokens_passes_for_a_difference_in_at_most_one_group_of_twenty(n, kind, groups):
    draw = np.random.default_rng([n, groups])
    passed = sum(
        not is_noise(drawn(draw, n) if kind == "drawn" else siblings(draw, n, like=kind))
        for _ in range(groups)
    )
    assert passed <= stats.binom.isf(0.01, groups, 0.05)


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("n", [2, 3, 7])
def test_the_guard_judges_g_as_it_judges_ratios(n, metric):
    """Random rows differ in G by noise; rows of another length differ in Euclidean G only."""
    draw = np.random.default_rng([n, 9])
    groups = 60

    def drawn_gaps(scale):
        rows = [draw.normal(size=(88, 64)) * (1 + scale * number) for number in range(n)]
        return [gaps(each[:10], each[10:])[metric] for each in rows]

    passed = sum(not is_noise(drawn_gaps(0.0)) for _ in range(groups))
    assert passed <= stats.binom.isf(0.01, groups, 0.05)
    longer = [is_noise(drawn_gaps(0.5)) for _ in range(10)]
    assert sum(longer) == 0 if metric == "euclidean" else sum(longer) >= 7


@pytest.mark.parametrize("tokens", [7, 10, 48])
def test_a_difference_is_none_of_noise(tokens):
    draw = np.random.default_rng(tokens)
    for n in (6, 24, 300):
        assert not any(is_noise(drawn(draw, n, tokens=tokens, spread=0.2)) for _ in range(5))
        # Noise passes in one group of twenty.
        assert sum(is_noise(drawn(draw, n, tokens=tokens)) for _ in range(10)) >= 7


def test_one_alone_is_not_noise_and_equals_are():
    (one,) = siblings(np.random.default_rng(0), 1)
    assert not is_noise([one])
    assert not is_noise([])
    assert is_noise([one, one])
    twice = replace(one, mean=2 * one.mean)
    still = [
        replace(r, left_out_domain=np.ones(10), left_out_reference=np.ones(105))
        for r in (one, twice)
    ]
    assert not is_noise(still)  # no token moves either
    equal = replace(one, mean=0.0, left_out_domain=np.zeros(10), left_out_reference=np.zeros(105))
    assert not is_noise([one, equal])
