"""Logs that no working model writes: what audit, compare and a replay say of them, and of sound logs not.

Public reports: NaN log-probabilities (github.com/EleutherAI/lm-evaluation-harness/issues/1340 and 714), a
server that gives none (github.com/ggml-org/llama.cpp/issues/27174), a cache that two models share
(lm-evaluation-harness/issues/4063), an adapter that was not applied
(github.com/huggingface/peft/issues/515), documents under other numbers (lm-evaluation-harness/issues/4084).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from logged_runs import LoggedTask, write_run

from lmeval_dispersion import audit, compare
from lmeval_dispersion.cli import main

N = 120
_NAN, _INF = math.nan, math.inf
_RNG = np.random.default_rng(5)
_LUCK = _RNG.random(N)
_RIGHT = _LUCK < 0.7
_LESS = (_LUCK < 0.6) & (_RNG.random(N) < 0.9)


def sound(
    right: np.ndarray = _RIGHT, seed: int = 1, targets: list[int] | None = None
) -> LoggedTask:
    return LoggedTask.of_choices(right.tolist(), seed, targets or [])


def with_rows(values: list[float], count: int, task: LoggedTask | None = None) -> LoggedTask:
    """The first ``count`` documents have these log-probabilities, and lm-eval's score for them."""
    task = task or sound()
    chosen = int(
        np.argmax(values)
    )  # as lm-eval chooses: the place of a NaN, or the first of equal ones
    scores = [float(target == chosen) for target in task.targets[:count]]
    return replace(
        task,
        logprobs=[values] * count + list(task.logprobs[count:]),
        scores=scores + list(task.scores[count:]),
    )


def generated(texts: list[str]) -> LoggedTask:
    return LoggedTask([float(t == "42") for t in texts], texts=texts, metric="exact_match")


def run(folder: Path, name: str, task: LoggedTask) -> str:
    return write_run(folder / name, f"org/{name}", {"quiz": task})


# --- not finite --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ([_NAN, -1.0, -2.0, -3.0], False),
        ([-1.0, -2.0, _NAN, -3.0], False),
        ([_INF, -1.0, -2.0, -3.0], False),
        ([-_INF, -_INF, -_INF, -_INF], False),
        ([-1.0, -_INF, -2.0, -3.0], True),
        ([-1.0, -2.0, -3.0, -4.0], True),
    ],
)
def test_only_answers_that_are_not_finite_are_said_and_counted(
    values: list[float], finite: bool, tmp_path: Path
) -> None:
    task = with_rows(values, 30)
    as_logged = np.mean(task.scores)
    as_wrong = sum(task.scores[30:]) / N
    odd = run(tmp_path, "odd", task)
    other = run(tmp_path, "other", sound(_LESS, 2))
    for said in (audit(odd).answer(), compare([other, odd]).answer()):
        text = " ".join(said[:2])
        assert ("of 30 of 120 documents are not finite" in text or "30 of 120" in text) != finite
        assert (f"{100 * as_wrong:.1f} % with these documents counted as wrong" in text) != finite
        assert f"{100 * as_logged:.1f} %" in " ".join(said)


def test_no_answer_is_finite(tmp_path: Path) -> None:
    odd = run(tmp_path, "odd", with_rows([_NAN] * 4, N))
    said = audit(odd).answer()
    assert said[0].startswith(
        "No verdict: the log-probabilities or scores of all 120 documents are not finite"
    )
    assert "answers choice" not in " ".join(said)
    answer = " ".join(compare([run(tmp_path, "other", sound()), odd]).answer())
    assert "No verdict on odd against other" in answer
    assert "answers more" not in answer
    assert "answers fewer" not in answer


@pytest.mark.parametrize(
    ("count", "verdict"),
    [
        (3, "odd answers more documents right than other"),
        (40, "No verdict on odd against other"),
    ],
)
def test_a_verdict_that_changes_with_the_count_is_not_printed(
    count: int, verdict: str, tmp_path: Path
) -> None:
    """NaN where the right choice is the first scores 1 in lm-eval; counted as wrong the gain is gone."""
    task = sound(_LUCK < 0.9, targets=[0] * N)
    odd = run(tmp_path, "odd", with_rows([_NAN, -1.0, -1.0, -1.0], count, task))
    found = compare([run(tmp_path, "other", sound(_LUCK < 0.55, 2, [0] * N)), odd])
    assert any(sentence.startswith(verdict) for sentence in found.answer())
    whole = found.others[0].slices[0]
    assert whole.not_finite == count
    assert whole.changes == verdict.startswith("No verdict")


def test_a_score_that_is_nan_is_left_out_and_said(tmp_path: Path) -> None:
    scores = [_NAN] * 30 + [1.0] * 90
    odd = run(tmp_path, "odd", replace(sound(np.ones(N, bool)), scores=scores))
    other = run(tmp_path, "other", sound(_LUCK < 0.85, 2))
    found = compare([other, odd])
    text = " ".join(found.answer())
    assert (
        "30 of 120 documents are not finite: the mean score is 100.0 % as lm-eval gives it, and 75"
        in text
    )
    assert "odd answers more documents right" not in text
    assert found.others[0].slices[0].labelled == 90
    assert "30 of 120 documents are not finite" in audit(odd).answer()[0]


def test_a_run_without_any_finite_score_is_said(tmp_path: Path) -> None:
    odd = run(tmp_path, "odd", replace(sound_texts(), scores=[_NAN] * N))
    said = compare([run(tmp_path, "other", sound_texts()), odd]).answer()
    assert said[0] == "odd: no shared document has a finite score."
    assert not any("against" in line for line in said)


def test_confidence_is_not_judged_right_in_all_while_a_quarter_is_not_finite(
    tmp_path: Path,
) -> None:
    task = with_rows([_NAN] * 4, 30, sound(np.ones(N, bool)))
    odd = audit(run(tmp_path, "odd", task))
    assert "confident: " not in " ".join(odd.answer())
    assert "100.0 % of answers are right" not in odd.to_markdown()
    assert odd.reliability.not_finite == 30
    whole = audit(run(tmp_path, "whole", sound(np.ones(N, bool))))
    assert "The model is underconfident: " in " ".join(whole.answer())


# --- answers that say more of the settings -----------------------------------------------------------------


def tied(value: float) -> Callable[[], LoggedTask]:
    return lambda: with_rows([value] * 4, N)


@pytest.mark.parametrize(
    ("make", "clause"),
    [
        (tied(0.0), "all choices have the same log-probability (0) in 120 of 120 documents"),
        (tied(-3.5), "all choices have the same log-probability in 120 of 120 documents"),
        (
            lambda: with_rows([0.0] * 4, 80),
            "all choices have the same log-probability (0) in 80 of 120",
        ),
        (lambda: with_rows([-1.0, -2.0, -3.0, -4.0], 118), "answers choice 0 in 98 % of cases"),
        (lambda: generated(["[invalid]"] * 70 + ["42"] * 50), "70 of 120 answers are [invalid]"),
        (lambda: with_rows([0.0] * 4, 40), None),
        (lambda: with_rows([-1.0, -2.0, -3.0, -4.0], 20), None),
        (lambda: generated(["[invalid]"] * 50 + ["42"] * 70), None),
        (sound, None),
    ],
)
def test_odd_answers_are_said_and_sound_ones_not(
    make: Callable[[], LoggedTask], clause: str | None, tmp_path: Path
) -> None:
    clauses = ("same log-probability", "answers choice", "[invalid]:")
    task = make()
    odd = run(tmp_path, "odd", task)
    plain = (
        generated(["42" if luck < 0.5 else "41" for luck in _LUCK])
        if len(task.texts)
        else sound(_LESS, 2)
    )
    other = run(tmp_path, "other", plain)
    found = compare([other, odd])
    for text in (audit(odd).to_markdown(), found.to_markdown()):
        lower = text.lower().replace("\\", "")
        assert any(words.lower() in lower for words in clauses) == (clause is not None)
        if clause is not None:
            assert clause.lower() in lower
    if clause is not None and "same log" in clause:
        assert any(line.startswith("No verdict on odd against other") for line in found.answer())


def test_one_odd_task_of_several_is_named_and_takes_no_verdict_from_the_others(
    tmp_path: Path,
) -> None:
    odd = {"quiz": sound(), "worked": generated(["[invalid]"] * 70 + ["42"] * 50)}
    plain = {"quiz": sound(_LESS, 2), "worked": sound_texts()}
    names = [
        write_run(tmp_path / name, f"org/{name}", run)
        for name, run in (("plain", plain), ("odd", odd))
    ]
    said = compare(names).answer()
    assert any(line.startswith("odd: in worked: 70 of 120 answers are [invalid]") for line in said)
    assert any("in the mean over 2 tasks" in line for line in said)
    assert audit(names[1]).answer()[0].startswith("In worked: 70 of 120 answers are [invalid]")
    assert "[invalid]" not in audit(names[0]).to_markdown()


def test_scores_that_are_all_equal_are_said(tmp_path: Path) -> None:
    zero = run(tmp_path, "zero", generated(["41", "40"] * 60))
    other = run(tmp_path, "other", generated(["42", "41"] * 60))
    sentences = " ".join(compare([other, zero]).answer())
    assert "zero: every one of 120 documents has the score 0; read some answers" in sentences
    assert "every one" not in " ".join(
        compare([other, run(tmp_path, "half", sound_texts())]).answer()
    )


def sound_texts() -> LoggedTask:
    return generated(["42" if luck < 0.6 else "41" for luck in _LUCK])


# --- two logs with one another -----------------------------------------------------------------------------


def half(row: list[float]) -> list[float]:
    return [float(np.float16(value)) for value in row]


@pytest.mark.parametrize(
    ("shared", "precise", "sentence", "verdict"),
    [
        (N, True, "of all 120 documents are equal to the last digit", False),
        (N, False, "of all 120 documents are equal to the last digit", False),
        (30, True, "of 30 of 120 documents are equal to the last digit", True),
        (30, False, None, True),
        (10, True, None, True),
        (0, True, None, True),
    ],
)
def test_answers_alike_to_the_last_digit(
    shared: int, precise: bool, sentence: str | None, verdict: bool, tmp_path: Path
) -> None:
    first = sound(_RIGHT, 1)
    second = sound(np.where(np.arange(N) < shared, _RIGHT, _LESS), 2)
    second = replace(second, logprobs=[*first.logprobs[:shared], *second.logprobs[shared:]])
    if not precise:
        first = replace(first, logprobs=[half(row) for row in first.logprobs])
        second = replace(second, logprobs=[half(row) for row in second.logprobs])
    names = [run(tmp_path, "one", first), run(tmp_path, "two", second)]
    text = " ".join(compare(names).answer())
    assert ("equal to the last digit" in text) == (sentence is not None)
    assert sentence is None or sentence in text
    assert ("No verdict on two against one" in text) != verdict


def test_documents_under_other_numbers_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As lm-eval 0.4.13 numbers the documents of an unsorted --samples."""
    moved = [1, 0, *range(2, N)]
    names = [
        run(tmp_path, "one", sound()),
        run(tmp_path, "two", replace(sound(_LESS, 2), numbers=moved)),
    ]
    assert main(["race", "--replay", *names, "-q"]) == 0
    assert "2 documents have different numbers than in the first run" in " ".join(
        capsys.readouterr().out.split()
    )
    assert main(["compare", *names, "-q"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "2 documents have different numbers than in the first run" in text
    assert f"{N} shared documents;" in text  # by their hashes
    plain = run(tmp_path, "three", sound(_LESS, 2))
    assert main(["race", "--replay", names[0], plain, "-q"]) == 0
    assert "another number" not in capsys.readouterr().out


# --- a replay ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "fails"),
    [([_NAN, -1.0, -1.0, -1.0], True), ([-_INF] * 4, True), ([-1.0, -_INF, -2.0, -3.0], False)],
)
def test_one_answer_that_is_not_finite_fails_a_checkpoint_in_a_replay(
    values: list[float], fails: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint of NaN scores 100 % where the right choice is the first."""
    odd = run(tmp_path, "odd", with_rows(values, 1, sound(np.ones(N, bool))))
    others = [run(tmp_path, "good", sound()), run(tmp_path, "less", sound(_LESS, 2))]
    assert main(["race", "--replay", odd, *others, "-q"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "org/odd failed and does not race: the log-probabilities of 1 question are not finite"
        in text
    ) == fails
    assert f"the same best, org/{'good' if fails else 'odd'}," in text
    assert main(["race", "--replay", odd, others[0], "-q"]) == (2 if fails else 0)
    assert ("expected two or more models with finite answers" in capsys.readouterr().err) == fails


def test_a_replay_says_what_is_odd_in_a_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = sound()
    names = [
        run(tmp_path, "one", same),
        run(tmp_path, "two", same),
        run(tmp_path, "zero", with_rows([0.0] * 4, N)),
    ]
    assert main(["race", "--replay", *names, "-q"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "org/one and org/two: the log-probabilities of all 120 documents are equal to the last"
        in text
    )
    assert "org/zero: all choices have the same log-probability (0)" in text
