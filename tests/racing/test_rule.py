"""The rule of the race: exact at the last question, valid before it, and an independent slow derivation."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from lmeval_dispersion.racing.rule import _GAPS, FINE, STEP, Array, Bets

HALF = Fraction(1, 2)


def _won(scores: Array, of: int, level: float, **more: Any) -> list[float]:
    """What the bets had made of 1, after each score."""
    bets = Bets(of, **more)
    bets.take(scores)
    return np.exp(bets.wealth(level)).tolist()


def _variance(values: list[Fraction], before: Fraction) -> Fraction:
    mean = sum(values) / len(values) if values else Fraction(0)
    squares = sum(((value - mean) ** 2 for value in values), Fraction(0))
    return max(Fraction(1, 100), (20 * before + squares) / (20 + len(values)))


def _slow(
    scores: list[Fraction],
    of: int,
    level: Fraction,
    expected: list[Fraction] | None = None,
    weights: list[int] | None = None,
) -> list[float]:
    """The same with fractions and loops; ``expected`` are predictions of all, in order, for one step."""
    purses = [Fraction(1)] * len(_GAPS)
    weights = weights or [1] * of
    guess = expected or [Fraction(0)] * of
    before = Fraction(1, 5)
    if expected:
        of_each = [w * h * (1 - h) for w, h in zip(weights, expected, strict=True)]
        before = Fraction(sum(of_each), sum(weights))
    made = []
    for i, score in enumerate(scores):
        seen = sum(w * s for w, s in zip(weights[:i], scores[:i], strict=True))
        ahead = sum(w * h for w, h in zip(weights[i:], guess[i:], strict=True))
        fair = (sum(weights) * level - seen - ahead) / sum(weights[i:])
        residuals = [s - h for s, h in zip(scores, guess, strict=False)]
        spread = _variance(residuals[: i // STEP * STEP], before)
        for place, gap in enumerate(map(Fraction, _GAPS.tolist())):
            stake = gap / (spread + gap**2)
            stake = min(stake, Fraction(0.95) / (1 - min(guess) - fair))
            purses[place] *= 1 + stake * (fair - score + guess[i])
        made.append(float(sum(purses) / len(purses)))
    return made


@pytest.mark.parametrize("level", [Fraction(0), Fraction(1, 50)])
def test_the_bets_equal_a_slow_count(level: Fraction) -> None:
    """On differences, as side by side."""
    rng = np.random.default_rng(3)
    scores = [Fraction(int(x), 4) for x in rng.integers(-4, 5, 35)]
    assert _won(np.array(scores, float), 60, float(level)) == pytest.approx(
        _slow(scores, 60, level), rel=1e-9
    )


def test_weighted_bets_equal_a_slow_count() -> None:
    rng = np.random.default_rng(4)
    scores = [Fraction(int(x), 4) for x in rng.integers(0, 5, 35)]
    weights = rng.integers(1, 6, 60)
    found = _won(np.array(scores, float), 60, 0.5, weights=weights * (60 / weights.sum()))
    assert found == pytest.approx(_slow(scores, 60, HALF, weights=weights.tolist()), rel=1e-9)


def test_the_bets_of_a_step_equal_a_slow_count_with_predictions() -> None:
    """Before any answer the prediction is the columns' own, of which the first has the weight 0.6."""
    rng = np.random.default_rng(3)
    known = [Fraction(int(x), 4) for x in rng.integers(0, 5, 100)]
    mean = sum(known) / len(known)
    expected = [
        min(max(mean + (x - mean) * Fraction(3, 5), Fraction(0)), Fraction(1)) for x in known
    ]
    scores = [Fraction(int(x), 4) for x in rng.integers(0, 5, STEP)]
    found = _won(np.array(scores, float), 100, 0.5, columns=np.array(known, float)[:, None])
    assert found == pytest.approx(_slow(scores, 100, HALF, expected), rel=1e-9)


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("known", [None, [1.0, 0, 0, 0.5, 1], [0.0, 1, 1, 0.5, 0]])
def test_no_order_of_the_questions_makes_a_bet_pay_in_the_mean(
    known: list[float] | None, shared: int
) -> None:
    """Over all orders of five scores with a mean at the level, whatever is predicted."""
    scores = np.array([1.0, 0, 0, 0.5, 1])
    level = float(scores.mean())
    last = []
    most = []
    for order in permutations(range(5)):
        columns = None if known is None else np.array(known)[[*order]][:, None]
        bets = Bets(5, columns, shared, step=2)
        bets.take(scores[[*order[:4]]])
        wealth = np.exp(bets.wealth(level))
        last.append(wealth[-1])
        most.append(wealth.max())
    assert np.mean(last) == pytest.approx(1, abs=1e-6)
    assert (np.array(most) >= 2).mean() <= 0.5


def test_weighted_draws_make_no_bet_pay_in_the_mean() -> None:
    """Over all orders, each with its chance when questions are drawn by weight without replacement."""
    scores = np.array([1.0, 0, 0, 0.5, 1])
    weights = np.array([1.0, 2, 3, 0.5, 1.5])
    weights *= 5 / weights.sum()
    level = float(weights @ scores) / 5
    mean = 0.0
    for order in map(list, permutations(range(5))):
        left = np.cumsum(weights[order][::-1])[::-1]
        chance = float(np.prod(weights[order] / left))
        bets = Bets(5, 1 - scores[order][:, None], weights=weights[order], step=2)
        bets.take(scores[order[:4]])
        mean += chance * float(np.exp(bets.wealth(level))[-1])
    assert mean == pytest.approx(1, abs=1e-6)


def test_bets_against_a_lower_level_never_win_more() -> None:
    rng = np.random.default_rng(5)
    levels = np.linspace(-0.2, 1.2, 60)
    for trial in range(40):
        scores = rng.random(75) if trial % 2 else 1.0 * (rng.random(75) < rng.random())
        weights = rng.uniform(0.2, 3, 200)
        columns = rng.random((200, 2)) if trial % 4 else None
        bets = Bets(200, columns, trial % 3 * 7, weights * (200 / weights.sum()))
        bets.take(scores)
        wealth = np.array([bets.wealth(level) for level in levels])
        assert (np.diff(wealth, axis=0) >= -1e-9).all()


def test_the_lowest_level_is_refuted_and_what_lies_below_is_not() -> None:
    rng = np.random.default_rng(6)
    for rate in (0.02, 0.3, 0.9):
        scores = 1.0 * (rng.random(300) < rate)
        bets = Bets(300)
        before = 1.0
        for begin in range(0, 300, 20):
            bets.take(scores[begin : begin + 20])
            lowest = bets.lowest(0.05)
            assert lowest <= before
            assert lowest == 1 or bets.refutes(lowest + 1e-9, 0.05)
            assert not bets.refutes(lowest - 1.01 * FINE, 0.05)
            before = lowest
        assert lowest == pytest.approx(scores.mean(), abs=FINE)
    assert Bets(300).lowest(0.05) == 1


def test_a_prediction_tells_sooner_and_a_wrong_one_is_unlearnt() -> None:
    """In the mean over thirty; of a wrong one the regression learns that it is the other way round."""
    most = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        mine = 1.0 * (rng.random(400) < 0.6)
        known = np.where(rng.random(400) < 0.1, 1 - mine, mine)
        for columns in (known[:, None], 1 - known[:, None], None):
            bets = Bets(400, columns)
            bets.take(mine[:200])
            wealth = bets.wealth(0.75)
            most.append((wealth[:25].max(), wealth.max()))
    told, wrong, plain = np.mean(np.reshape(most, (30, 3, 2)), axis=0)
    assert (told > plain).all()
    assert wrong[0] < plain[0]
    assert wrong[1] > 0.8 * plain[1]


def test_shared_questions_are_bet_on_as_without_columns() -> None:
    rng = np.random.default_rng(7)
    scores = 1.0 * (rng.random(50) < 0.5)
    columns = rng.random((100, 1))
    mixed = _won(scores, 100, 0.6, columns=columns, shared=25)
    plain = _won(scores, 100, 0.6)
    assert mixed[:25] == plain[:25]
    assert mixed[25:] != plain[25:]


def test_columns_may_come_after_the_shared_questions() -> None:
    rng = np.random.default_rng(7)
    scores = 1.0 * (rng.random(50) < 0.5)
    columns = rng.random((100, 1))
    late = Bets(100, shared=17)
    late.take(scores[:17])
    late.columns = columns
    late.take(scores[17:])
    assert np.exp(late.wealth(0.6)).tolist() == _won(scores, 100, 0.6, columns=columns, shared=17)


@pytest.mark.parametrize("known", [True, False])
def test_the_parts_in_which_answers_come_change_nothing(known: bool) -> None:
    rng = np.random.default_rng(8)
    scores = 1.0 * (rng.random(113) < 0.5)
    columns = rng.random((200, 2)) if known else None
    whole = Bets(200, columns, 17)
    whole.take(scores)
    for size in (1, 7, 10, 25, 32):
        parts = Bets(200, columns, 17)
        for begin in range(0, 113, size):
            parts.take(scores[begin : begin + size])
        assert parts.wealth(0.6).tolist() == whole.wealth(0.6).tolist()


def test_bets_that_do_not_count_change_nothing() -> None:
    scores = np.zeros(40)
    bets = Bets(200, shared=25)
    bets.take(scores)
    bets.begin = 25
    wealth = bets.wealth(0.5)
    assert wealth[:25].tolist() == pytest.approx([0] * 25)
    assert wealth[-1] > math.log(20)


def test_what_can_no_longer_be_reached_is_below() -> None:
    """Behind by six with five left: no chance is involved."""
    bets = Bets(11)
    bets.take(-np.ones(5))
    assert not bets.refutes(0.0, 1e-300)
    ended = Bets(14)
    ended.take(np.concatenate([np.zeros(3), -np.ones(6)]))
    assert ended.refutes(0.0, 1e-300)
