"""What is said of saves by shared questions is wrong as rarely as it says, by simulated answers."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import numpy as np
import pytest

from lmeval_dispersion.asking import Asking
from lmeval_dispersion.racing.commands import add_arguments
from lmeval_dispersion.racing.contest import Contest, Scores
from lmeval_dispersion.racing.rule import FINE, Bets
from lmeval_dispersion.training.live_race import Standings, command_options, shown_difference

N = 200
ASKED = 60
RUNS = 300


def answers(means: list[float], rng: np.random.Generator) -> np.ndarray:
    """Right or wrong answers of saves to N questions, largely in common; (saves, N)."""
    common = rng.random(N)
    own = rng.random((len(means), N))
    is_common = rng.random((len(means), N)) < 0.7
    draws = np.where(is_common, common, own)
    return (draws < np.array(means)[:, None]).astype(float)


def standings(given: np.ndarray, planned: int | None, asked: int = ASKED) -> Standings:
    taken = Standings(Contest(N, 0.05, sharing=N), planned)
    for step, scores in enumerate(given):
        taken.take(step, Scores(scores[:asked], np.full(asked, np.nan)))
    return taken


@pytest.mark.parametrize("means", [[0.5] * 8, [0.5, 0.5, 0.6, 0.6, 0.7, 0.7, 0.7, 0.6]])
def test_a_margin_is_too_small_in_at_most_the_error(means: list[float]) -> None:
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(RUNS):
        given = answers(means, rng)
        taken = standings(given, None)
        truth = given.mean(axis=1)
        best = taken.best(taken.asked)
        wrong += truth.max() - truth[best] > taken.margin() + 1e-9
    assert wrong <= RUNS * 0.05 + 2 * (RUNS * 0.05 * 0.95) ** 0.5


@pytest.mark.parametrize("planned", [8, None])
def test_saves_are_called_worse_wrongly_in_at_most_the_error(planned: int | None) -> None:
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(RUNS):
        given = answers([0.5] * 8, rng)
        truth = given.mean(axis=1)
        taken = Standings(Contest(N, 0.05, sharing=N), planned)
        is_wrong = False
        for step, scores in enumerate(given):
            before = list(taken.asked)
            taken.take(step, Scores(scores[:ASKED], np.full(ASKED, np.nan)))
            if taken.worse_in_a_row(step):
                is_wrong |= bool(truth[step] >= truth[taken.best(before)])
        wrong += is_wrong
    assert wrong <= RUNS * 0.05 + 2 * (RUNS * 0.05 * 0.95) ** 0.5


def test_what_is_clearly_worse_is_shown_and_counted_in_a_row() -> None:
    rng = np.random.default_rng(2)
    taken = standings(answers([0.3, 0.9, 0.2, 0.2, 0.9, 0.2, 0.2, 0.2], rng), 8)
    assert [taken.worse_in_a_row(step) for step in range(8)] == [0, 0, 1, 2, 0, 1, 2, 3]
    assert taken.best(taken.asked) in (1, 4)
    assert taken.margin() < 0.2
    # More saves than were planned have no share of the error.
    later = standings(answers([0.9, 0.2, 0.2], rng), 2)
    assert later.worse_in_a_row(1) == 1
    assert later.worse_in_a_row(2) == 0


def test_all_questions_leave_no_doubt() -> None:
    rng = np.random.default_rng(3)
    given = answers([0.5, 0.6, 0.55], rng)
    taken = standings(given, None, asked=N)
    truth = given.mean(axis=1)
    assert taken.best(taken.asked) == int(truth.argmax())
    assert taken.margin() == 0
    assert taken.score(1) == pytest.approx(truth[1])


def test_no_margin_is_said_only_where_no_better_one_is_possible() -> None:
    """The levels that are looked for begin above 0: the lowest may be refuted, and 0 not."""
    rng = np.random.default_rng(291)
    better = (rng.random(ASKED) < rng.uniform(0.05, 0.3)).astype(float)
    bets = Bets(N)
    bets.take(-better)
    assert bets.lowest(0.05) == FINE
    assert not bets.refutes(0.0, 0.05)
    assert standings(np.stack([better, 0 * better]), None).margin() == FINE


def test_of_equal_scores_the_more_probable_answers_count() -> None:
    taken = Standings(Contest(N, 0.05, sharing=N))
    scores = partial(Scores, np.tile([1.0, 0.0], 30))
    for step, probability in enumerate((0.5, 0.6, 0.4)):
        taken.take(step, scores(np.full(ASKED, probability)))
    assert taken.best(taken.asked) == 1


@pytest.mark.parametrize(("asked", "there"), [(100, 400), (100, 1319), (400, 1319)])
def test_the_forecast_difference_is_shown_about_four_times_in_five(asked: int, there: int) -> None:
    rng = np.random.default_rng(4)
    difference = shown_difference(asked, there, 0.05)
    shown = 0
    for _ in range(100):
        draws = rng.random(there)
        better = (draws < (0.2 + difference) / 2).astype(float)
        worse = ((draws >= (0.2 + difference) / 2) & (draws < 0.2)).astype(float)
        bets = Bets(there)
        bets.take((worse - better)[:asked])
        shown += bets.refutes(0.0, 0.05)
    assert 65 <= shown <= 95


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"include_path": "my tasks", "batch_size": 16},
        {"num_fewshot": 0, "metric": "acc_norm", "seed": 3},
        {"apply_chat_template": True, "confirm_run_unsafe_code": True},
        {"apply_chat_template": "chatml", "weigh": "questions", "device": "cpu"},
    ],
)
def test_the_command_that_goes_on_asks_as_the_callback_did(options: dict[str, Any]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = command_options(Asking(tasks="sums", **options))
    args = vars(parser.parse_args(["run", "--tasks", "sums", *words]))
    plain = vars(parser.parse_args(["run", "--tasks", "sums"]))
    changed = {name: args[name] for name in plain if args[name] != plain[name]}
    assert {name: str(value) for name, value in changed.items()} == {
        name: str(value) for name, value in options.items()
    }
