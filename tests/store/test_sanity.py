"""What counts as an answer, and what no working model logs."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from lmeval_dispersion.store.sanity import (
    Fingerprints,
    Logged,
    alike,
    as_wrong,
    counted_as_wrong,
    equal_answers,
    failure,
    finite_answer,
    finite_score,
    not_finite_sentence,
    renumbered,
)

_NAN, _INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("values", "is_answer"),
    [
        ([-1.0, -2.0], True),
        ([-1.0, -_INF], True),
        ([0.0, 0.0], True),
        ([], True),
        ([_NAN, -1.0], False),
        ([-1.0, _NAN], False),
        ([_INF, -1.0], False),
        ([-_INF, -_INF], False),
        ([-_INF], False),
        ([_NAN, _NAN, _NAN, _NAN], False),
    ],
)
def test_what_counts_as_an_answer(values: list[float], is_answer: bool) -> None:
    neighbours = [[-1.0], [-1.0, -2.0], []]
    assert finite_answer([*neighbours, values]).tolist() == [True, True, True, is_answer]
    assert finite_answer([np.array(values)]).tolist() == [is_answer]


def test_no_documents() -> None:
    assert finite_answer([]).tolist() == []


def test_the_sentence_counts() -> None:
    assert "of 1 question are" in not_finite_sentence(1)
    assert "of 1,200 questions are" in not_finite_sentence(1200)
    assert "float32" in not_finite_sentence(3)


def test_alike_to_the_last_digit() -> None:
    values = np.array([0.25, 0.5, 1.0])
    nearly = np.nextafter(values, 0)
    certain = np.array([0.0, 1.0, 1.0])
    runs = {"a": values, "b": values.copy(), "c": nearly, "d": certain, "e": certain.copy()}
    assert alike(runs) == [["a", "b"]]


def _prints(rows: list[list[float]], scores: list[float] | None = None) -> Fingerprints:
    return Fingerprints.of(rows, np.array([1.0] * len(rows) if scores is None else scores))


def _rows(count: int, seed: int) -> list[list[float]]:
    values = np.random.default_rng(seed).normal(-5, 1, size=(count, 4)).astype(np.float32)
    return [[float(value) for value in row] for row in values]


@pytest.mark.parametrize(
    ("shared", "half", "equal"),
    [
        (60, False, 60),
        (60, True, 60),
        (20, False, 20),
        (19, False, 0),
        (40, True, 0),
        (0, False, 0),
    ],
)
def test_equal_answers_are_counted_from_twenty_on(shared: int, half: bool, equal: int) -> None:
    first = _rows(60, 0)
    if half:
        first = [[float(np.float16(value)) for value in row] for row in first]
    second = first[:shared] + _rows(60, 1)[shared:]
    assert equal_answers(_prints(first), _prints(second)) == (equal, 60)


def test_rows_that_tell_nothing_do_not_count_as_equal() -> None:
    empty: list[list[float]] = [[]] * 30 + [[0.0, 0.0]] * 30 + [[_NAN, _NAN]] * 30
    assert equal_answers(_prints(empty), _prints(empty)) == (0, 0)
    rows = _rows(30, 0)
    assert equal_answers(_prints(rows), _prints(rows, [0.0] + [1.0] * 29)) == (
        0,
        30,
    )  # other scores


def test_documents_under_other_numbers_are_counted_by_their_hash() -> None:
    def documents(*rows: tuple[str, int, str | None]) -> pd.DataFrame:
        return pd.DataFrame(rows, columns=["task", "doc_id", "doc_hash"])

    first = documents(*(("t", i, f"h{i}") for i in range(5)))
    assert renumbered(first, first) == 0
    swapped = documents(("t_dispersion", 0, "h1"), ("t", 1, "h0"), ("t", 2, "h2"))
    assert renumbered(first, swapped) == 2
    assert renumbered(first, documents(("u", 0, "h1"), ("t", 9, "other"), ("t", 4, None))) == 0
    twice = documents(("t", 0, "h"), ("t", 1, "h"), ("t", 2, "k"))
    assert renumbered(twice, documents(("t", 1, "h"), ("t", 0, "k"))) == 1
    # A task and its dispersion task in one run.
    order = [*enumerate("abcd")]
    other_order = [*enumerate("dcba")]
    both = ("t", "t_dispersion")
    one = documents(*((task, number, text) for task in both for number, text in order))
    other = documents(*((task, number, text) for task in both for number, text in other_order))
    assert renumbered(one, other) == 4


def test_why_a_checkpoint_fails() -> None:
    sound = _rows(3, 0)
    assert failure(sound, np.array([1.0, 0.0, 1.0])) == ""
    assert failure([*sound, [_NAN]], np.ones(4)).startswith(
        "the log-probabilities of 1 question are"
    )
    assert failure(sound, np.array([1.0, _NAN, _INF])).startswith(
        "2 questions have no finite score; "
    )


def test_counting_as_wrong_changes_no_finite_score() -> None:
    scores = np.array([1.0, 0.5, _NAN, 0.0, 1.0])
    finite = np.array([True, True, False, True, False])
    assert as_wrong(scores, finite).tolist() == [1.0, 0.5, 0.0, 0.0, 0.0]
    assert as_wrong(scores, finite, lower_is_better=True).tolist() == [1.0, 0.5, 1.0, 0.0, 1.0]
    both = counted_as_wrong(scores, finite)
    assert (both.documents, both.not_finite) == (5, 2)
    assert (both.score, both.as_wrong) == (pytest.approx(0.625), pytest.approx(0.3))
    assert finite_score(scores, ["a"] * 5).tolist() == [True, True, False, True, True]
    assert finite_score(np.array([_NAN, _NAN, 1.0]), ["a", "a", "b"]).all()


@pytest.mark.parametrize(
    ("tied", "last"),
    [
        (2, "in tied1: answers choice 1 in 100 % of cases (20 of 20)"),
        (3, "1 more doubt about single tasks is not shown"),
        (4, "3 more doubts about single tasks are not shown"),
    ],
)
def test_doubts_that_are_not_shown_are_counted_not_their_tasks(tied: int, last: str) -> None:
    """A task whose choices are all equally likely gives two doubts."""
    tasks = [f"tied{row // 20}" for row in range(20 * tied)] + ["sound"] * 200
    rows = [[-1.0] * 4] * (20 * tied) + _rows(200, 0)
    logged = Logged(
        tasks=tasks,
        log_probabilities=rows,
        predictions=[None] * len(rows),
        targets=[None] * len(rows),
        scores=np.array([0.0, 1.0] * (len(rows) // 2)),
    )
    clauses = logged.doubts_by_task()
    assert clauses[-1] == last
    assert len(clauses) == min(2 * tied, 6)
