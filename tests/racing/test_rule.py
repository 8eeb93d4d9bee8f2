"""The rule of the race: exact at the last question, valid before it, and an independent slow derivation."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest

from lmeval_dispersion.racing.rule import _STAKES, is_below, log_won


def _slow(differences: list[Fraction], of: int, bound: Fraction) -> list[float]:
    """What the bets have made of 1, with fractions and loops."""
    purses = [Fraction(1)] * len(_STAKES)
    made, past = [], Fraction(0)
    for i, d in enumerate(differences):
        fair = (of * bound - past) / (of - i)
        purses = [
            p * (1 + Fraction(float(s)) * (fair - d) / (1 - fair))
            for p, s in zip(purses, _STAKES, strict=True)
        ]
        made.append(float(sum(purses) / len(purses)))
        past += d
    return made


@pytest.mark.parametrize("bound", [Fraction(0), Fraction(1, 50)])
def test_the_bets_equal_a_slow_count(bound: Fraction) -> None:
    rng = np.random.default_rng(3)
    differences = [Fraction(int(x), 4) for x in rng.integers(-4, 5, 30)]
    won = np.exp(log_won(np.array(differences, float), 60, float(bound)))
    assert won == pytest.approx(_slow(differences, 60, bound), rel=1e-9)


def test_no_order_of_the_questions_makes_a_bet_pay_in_the_mean() -> None:
    """Over all orders of six differences with a mean at the bound, the mean of what was won is 1 or less."""
    differences = np.array([1.0, -1, -1, 0.5, 0.25, 0.25])
    won = np.array([np.exp(log_won(np.array(order), 6)) for order in permutations(differences)])
    assert won[:, :5].mean(axis=0) == pytest.approx(np.ones(5), abs=1e-6)
    assert (won.max(axis=1) >= 2).mean() <= 0.5


def test_the_last_question_decides() -> None:
    better = np.array([-1.0] * 9 + [1.0] * 10)
    assert not is_below(better, 19, 0.05)
    assert is_below(-better, 19, 0.05)
    assert not is_below(np.zeros(19), 19, 0.05)


def test_what_can_no_longer_be_reached_is_below() -> None:
    """Behind by six with five left: no chance is involved."""
    assert log_won(-np.ones(5), 11)[-1] < math.inf
    assert is_below(-np.ones(6), 13, 1e-9) is False
    assert is_below(np.concatenate([np.zeros(3), -np.ones(6)]), 14, 1e-300) is True
