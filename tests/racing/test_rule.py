"""The rule of the race: exact at the last question, valid before it, and an independent slow derivation."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from lmeval_dispersion.racing.rule import _STAKES, BLOCK, Array, Bets


def _won(scores: Array, of: int, level: float, **more: Any) -> list[float]:
    """What the bets had made of 1 at the most, after each score."""
    bets = Bets(of, level, **more)
    return [math.exp(bets.take(scores[i : i + 1])) for i in range(len(scores))]


def _slow(
    scores: list[Fraction], of: int, level: Fraction, expected: list[Fraction]
) -> list[float]:
    """The same with fractions and loops; ``expected`` are predictions of all, in order."""
    purses = [Fraction(1)] * len(_STAKES)
    made, past = [], Fraction(0)
    for i, score in enumerate(scores):
        fair = (of * level - past - sum(expected[i:])) / (of - i)
        highest = 1 - min(expected)
        gain = (fair - score + expected[i]) / (highest - fair)
        purses = [p * (1 + Fraction(float(s)) * gain) for p, s in zip(purses, _STAKES, strict=True)]
        made.append(float(sum(purses) / len(purses)))
        past += score
    return list(np.maximum.accumulate(made))


@pytest.mark.parametrize("level", [Fraction(0), Fraction(1, 50)])
def test_the_bets_equal_a_slow_count(level: Fraction) -> None:
    """On differences, as side by side."""
    rng = np.random.default_rng(3)
    scores = [Fraction(int(x), 4) for x in rng.integers(-4, 5, 30)]
    assert _won(np.array(scores, float), 60, float(level)) == pytest.approx(
        _slow(scores, 60, level, [Fraction(0)] * 60), rel=1e-9
    )


def test_the_bets_on_a_first_block_equal_a_slow_count_with_predictions() -> None:
    """Before any answer the prediction is the columns' own, of which the first has the weight 0.6."""
    rng = np.random.default_rng(3)
    known = [Fraction(int(x), 4) for x in rng.integers(0, 5, 100)]
    mean = sum(known) / len(known)
    expected = [
        min(max(mean + (x - mean) * Fraction(3, 5), Fraction(0)), Fraction(1)) for x in known
    ]
    scores = [Fraction(int(x), 4) for x in rng.integers(0, 5, BLOCK)]
    bets = Bets(100, 0.5, np.array(known, float)[:, None])
    assert math.exp(bets.take(np.array(scores, float))) == pytest.approx(
        _slow(scores, 100, Fraction(1, 2), expected)[-1], rel=1e-9
    )


@pytest.mark.parametrize("known", [None, [1.0, 0, 0, 0.5, 1, 0.25], [0.0, 1, 1, 0.5, 0, 0.75]])
def test_no_order_of_the_questions_makes_a_bet_pay_in_the_mean(known: list[float] | None) -> None:
    """Over all orders of six scores with a mean at the level, whatever is predicted."""
    scores = np.array([1.0, 0, 0, 0.5, 1, 0.25])
    level, won = float(scores.mean()), []
    for order in permutations(range(6)):
        columns = None if known is None else np.array(known)[[*order]][:, None]
        bets = Bets(6, level, columns)
        bets.take(scores[[*order[:5]]])
        won.append((np.exp(bets._won).mean(), bets.most))
    last, most = np.array(won).T
    assert last.mean() == pytest.approx(1, abs=1e-6) if known is None else last.mean() <= 1 + 1e-6
    assert (np.exp(most) >= 2).mean() <= 0.5


def test_bets_against_a_lower_level_never_win_more() -> None:
    rng = np.random.default_rng(5)
    for _ in range(20):
        scores, columns = 1.0 * (rng.random(75) < 0.5), rng.random((200, 2))
        for known in (None, columns):
            most = [Bets(200, level, known).take(scores) for level in (0.4, 0.5, 0.55, 0.6)]
            assert most == sorted(most)


def test_a_prediction_tells_sooner_and_a_wrong_one_is_unlearnt() -> None:
    """In the mean over thirty; of a wrong one the regression learns that it is the other way round."""
    most = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        mine = 1.0 * (rng.random(400) < 0.6)
        known = np.where(rng.random(400) < 0.1, 1 - mine, mine)
        for columns in (known[:, None], 1 - known[:, None], None):
            bets = Bets(400, 0.75, columns)
            most.append((bets.take(mine[:BLOCK]), bets.take(mine[BLOCK:200])))
    told, wrong, plain = np.mean(np.reshape(most, (30, 3, 2)), axis=0)
    assert (told > plain).all()
    assert wrong[0] < plain[0]
    assert abs(wrong[1] - plain[1]) < 0.2 * plain[1]


def test_plain_questions_are_bet_on_as_without_columns() -> None:
    rng = np.random.default_rng(7)
    scores, columns = 1.0 * (rng.random(50) < 0.5), rng.random((100, 1))
    mixed, plain = Bets(100, 0.6, columns, plain=BLOCK), Bets(100, 0.6)
    assert mixed.take(scores[:BLOCK]) == plain.take(scores[:BLOCK])
    assert mixed.take(scores[BLOCK:]) != plain.take(scores[BLOCK:])


def test_the_parts_in_which_answers_come_change_nothing() -> None:
    rng = np.random.default_rng(8)
    scores, columns = 1.0 * (rng.random(100) < 0.5), rng.random((200, 2))
    parts, whole = Bets(200, 0.6, columns), Bets(200, 0.6, columns)
    for begin in range(0, 100, BLOCK):
        parts.take(scores[begin : begin + BLOCK])
    assert parts.most == whole.take(scores)


def test_what_can_no_longer_be_reached_is_below() -> None:
    """Behind by six with five left: no chance is involved."""
    level = Bets(11, 0.0)
    assert level.take(-np.ones(5)) < math.inf
    ended = Bets(14, 0.0)
    ended.take(np.concatenate([np.zeros(3), -np.ones(6)]))
    assert ended.refutes(1e-300)
