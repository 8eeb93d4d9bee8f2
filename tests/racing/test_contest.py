"""The error of a whole race, its margin, and that nobody who is clearly behind goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lmeval_dispersion.racing.contest import Contest, Scores, run

Array = NDArray[np.float64]
Table = Callable[[np.random.Generator], tuple[Array, Array]]
N = 200


def _drawn(chances: Any, rng: np.random.Generator) -> tuple[Array, Array]:
    """Right or wrong of checkpoints that share how hard a question is; probabilities near the chances."""
    hard = rng.random(N)
    own = rng.random((len(chances), N))
    mixed = np.where(rng.random((len(chances), N)) < 0.6, hard, own)
    chances = np.asarray(chances)[:, None]
    return (mixed < chances).astype(float), np.clip(chances + 0.2 * (own - 0.5), 0, 1)


PLANTED: dict[str, Table] = {
    "all equal": lambda rng: _drawn([0.6] * 8, rng),
    "a giant, last": lambda rng: _drawn([0.4] * 7 + [0.9], rng),
    "near ties, the best last": lambda rng: _drawn([0.6] * 7 + [0.64], rng),
    "each a little better than the one before": lambda rng: _drawn(np.linspace(0.5, 0.68, 8), rng),
    "continuous": lambda rng: (_drawn(np.linspace(0.5, 0.6, 8), rng)[1],) * 2,
    "rarely right, then far ahead": lambda rng: (
        (
            np.where(
                rng.random((6, N)) < np.array([[0.0]] * 5 + [[0.04]]), 1.0, np.array([[0.02]] * 5 + [[0.0]])
            ),
        )
        * 2
    ),
}


def _raced(
    score: Array, probability: Array, rng: np.random.Generator, *, side_by_side: bool = False, **settings: Any
) -> Contest:
    order = rng.permutation(score.shape[1])
    contest = Contest(score.shape[1], side_by_side=len(score) if side_by_side else 0, **settings)

    def ask(i: int) -> Callable[[int, int], Scores]:
        return lambda a, b: Scores(score[i][order[a:b]], probability[i][order[a:b]])

    if not side_by_side:
        for i in range(len(score)):
            run(contest, str(i), ask(i))
        return contest
    going = {str(i): 0 for i in range(len(score))}
    while going:
        label = str(rng.choice(sorted(going)))
        at = going[label]
        going[label] = end = min(at + 25, contest.questions)
        if contest.add(label, ask(int(label))(at, end)) != "running":
            del going[label]
    return contest


def _wrong(table: Table, races: int, **settings: Any) -> float:
    """Share of races whose best is worse than the truly best by more than the margin."""
    rng, wrong = np.random.default_rng(7), 0
    for _ in range(races):
        score, probability = table(rng)
        contest = _raced(score, probability, rng, **settings)
        assert contest.best is not None
        means = score.mean(axis=1)
        wrong += bool(means.max() > means[int(contest.best)] + contest.margin + 1e-9)
    return wrong / races


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("side_by_side", [False, True])
def test_the_best_is_rarely_lost(name: str, side_by_side: bool) -> None:
    assert _wrong(PLANTED[name], 60, side_by_side=side_by_side) <= 0.1


@pytest.mark.slow
@pytest.mark.parametrize("margin", [0.0, 0.01])
@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("side_by_side", [False, True])
def test_the_level_holds(name: str, side_by_side: bool, margin: float) -> None:
    """Two thousand races a case: at most the error, and a bit for chance."""
    assert _wrong(PLANTED[name], 2000, side_by_side=side_by_side, margin=margin) <= 0.06


def test_the_clearly_worse_are_dropped_early_and_equal_ones_are_asked_all() -> None:
    rng = np.random.default_rng(1)
    score, probability = _drawn([0.95, 0.2, 0.2], rng)
    contest = _raced(score, probability, rng)
    assert contest.best == "0"
    assert contest.standing["1"] == contest.standing["2"] == "behind"
    assert contest.asked < N + 4 * 25
    same = _raced(score[[0, 0]], probability[[0, 0]], rng, margin=0.0)
    assert same.best == "0"
    assert same.asked == 2 * N


def test_what_differs_by_less_than_the_margin_is_not_told_apart() -> None:
    rng = np.random.default_rng(2)
    score = (rng.random((1, N)) < 0.5).astype(float).repeat(2, axis=0)
    score[1, 0] = 1 - score[1, 0]
    contest = _raced(score, score, rng, margin=0.05)
    assert contest.standing["1"] == "not better"
    assert contest.asked < 2 * N


def test_probability_drops_sooner_but_never_names_the_best() -> None:
    rng = np.random.default_rng(4)
    score, probability = _drawn([0.7, 0.55], rng)
    plain, quick = (
        _raced(score, probability, np.random.default_rng(5), by_probability=by) for by in (False, True)
    )
    assert quick.standing["1"] == "behind"
    assert quick.asked < plain.asked
    surer = _raced(score[::-1].copy(), np.array([[0.9] * N, [0.1] * N]), rng, by_probability=True)
    assert surer.best is not None
    assert surer.mean(surer.best) == max(map(surer.mean, surer.answered))


@pytest.mark.parametrize(("right", "standing"), [(0.5, "running"), (0.45, "behind")])
def test_without_a_margin_probability_drops_only_whom_the_score_puts_behind(
    right: float, standing: str
) -> None:
    contest, even = Contest(N, margin=0.0, by_probability=True), np.arange(N) % 2 * 1.0
    contest.add("first", Scores(even, np.full(N, 0.9)))
    mine = even[:100].copy()
    mine[1 : round(200 * (0.5 - right)) : 2] = 0
    assert contest.add("second", Scores(mine, np.full(100, 0.1))) == standing


def test_whom_a_failed_checkpoint_alone_had_dropped_runs_again() -> None:
    right = {"giant": 1.0, "good": 0.5, "bad": 0.0}
    contest = Contest(N, side_by_side=3, margin=0.0)
    for label in right:
        contest.add(label, Scores(np.full(50, right[label]), np.full(50, np.nan)))
    assert contest.standing == {"giant": "running", "good": "behind", "bad": "behind"}
    contest.fail("giant")
    assert contest.standing == {"giant": "failed", "good": "running", "bad": "behind"}
    assert contest.asked == 150


def test_two_that_drop_each_other_side_by_side_are_not_both_lost() -> None:
    """One is right on 40 questions that the other has wrong, and wrong on the next 1,000."""
    score = np.zeros((2, 2000))
    score[0, 25:65] = score[1, 65:1065] = 1
    contest = Contest(2000, side_by_side=2)
    for label, end in ((1, 1500), (0, 25), (0, 150), (1, 1525)):
        begin = len(contest.answered[str(label)].score) if str(label) in contest.answered else 0
        contest.add(str(label), Scores(*(score[label, begin:end],) * 2))
    assert contest.standing == {"1": "running", "0": "behind"}
    contest.judge_again()
    assert contest.standing == {"1": "running", "0": "behind"}


def test_a_failure_changes_nothing_for_those_that_others_dropped() -> None:
    rng = np.random.default_rng(8)
    score, probability = _drawn([0.5, 0.2, 0.9], rng)
    contest = _raced(score, probability, rng)
    before = dict(contest.standing)
    assert before == {"0": "complete", "1": "behind", "2": "complete"}
    contest.fail("3")
    assert contest.standing == {**before, "3": "failed"}
