"""A run's saves raced while it trains: what is logged and kept, what is best, what ends it."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from live_training import QUESTIONS, model, raced, rows, trainer
from lmeval_screener.screening.arguments import ScreenArguments
from lmeval_screener.screening.selection import select
from tiny_decoders import TRAINERS_WARN
from transformers import EarlyStoppingCallback, TrainerCallback

from lmeval_dispersion import RaceCallback, race
from lmeval_dispersion.asking import Asking
from lmeval_dispersion.cli import main
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.training.live_race import LiveRace

pytestmark = TRAINERS_WARN


def callback(task: Path, **options: Any) -> RaceCallback:
    return RaceCallback("words", **{"questions": 20, "include_path": task, **options})


def trained(run: Path, raced_by: RaceCallback, **options: Any) -> Any:
    given = trainer(run, **options)
    given.add_callback(raced_by)
    given.train()
    return given


class Tracker(TrainerCallback):
    """The figures that a tracker such as TensorBoard gets."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "race/score" in logs:
            self.steps.append(state.global_step)


def best_of(log_history: list[dict[str, Any]], run: Path) -> int:
    """The step of the highest score; of equal ones of the most probable right answers."""
    heights = {}
    for step, entry in raced(log_history).items():
        (file,) = (run / "race-words" / f"checkpoint-{step}").glob("samples_*.jsonl")
        likely = []
        for line in file.read_text().splitlines():
            sample = json.loads(line)
            logs = np.array([float(pair[0][0]) for pair in sample["resps"]])
            likely.append(
                np.exp(logs - logs.max())[int(sample["target"])] / np.exp(logs - logs.max()).sum()
            )
        heights[step] = (entry["race/score"], round(float(np.mean(likely)), 9))
    return max(heights, key=lambda step: heights[step])


def test_saves_are_logged_and_the_best_is_named(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    given = trained(run, callback(task))
    log = raced(given.state.log_history)
    assert list(log) == [4, 8, 12]
    best = best_of(given.state.log_history, run)
    assert log[12]["race/best_step"] == best
    assert given.state.best_model_checkpoint == str(run / f"checkpoint-{best}")
    assert log[4]["race/margin"] == 0
    assert 0 < log[12]["race/margin"] < 1
    begun = " ".join(capsys.readouterr().err.split())
    assert f"20 of {QUESTIONS} questions" in begun
    assert "a difference of about 0." in begun
    assert "for each save, " in begun
    assert "for all 3 saves." in begun
    # The entry is in the state of the next save.
    state = json.loads((run / "checkpoint-8" / "trainer_state.json").read_text())
    assert list(raced(state["log_history"])) == [4]


def test_trackers_get_the_figures_of_an_attached_callback(task: Path, tmp_path: Path) -> None:
    given = trainer(tmp_path / "run", logging_steps=4)
    tracker = Tracker()
    given.add_callback(tracker)
    attached = callback(task, every=2)
    assert attached.attach(given) is attached
    attached.attach(given)
    given.train()
    assert tracker.steps == [2, 4, 6, 8, 10, 12]
    assert [entry["step"] for entry in given.state.log_history if "loss" in entry] == [4, 8, 12]
    assert list(raced(given.state.log_history)) == tracker.steps
    with pytest.raises(UsageError, match="ask\\(\\)"):
        callback(task).attach(model())


def test_the_race_goes_on_to_the_proof_in_the_folder(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    given = trained(run, callback(task))
    asked = raced(given.state.log_history)
    lines = {
        step: (run / "race-words" / f"checkpoint-{step}").glob("samples_*.jsonl") for step in asked
    }
    before = {step: next(files).read_text() for step, files in lines.items()}
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    words = ["race", "run", "--tasks", "words", "--include_path", str(task), "--device", "cpu"]
    assert main([*words, "--format", "json", "-q"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["of"] == 3
    assert {row["status"] for row in result["checkpoints"]} <= {
        "best",
        "behind",
        "within",
        "not better",
    }
    assert result["checkpoints"][0]["questions"] == QUESTIONS
    assert not (tmp_path / "race-words").exists()
    assert not select(
        ScreenArguments(["run"])
    ).left_out  # the race's folder is no checkpoint that failed
    for step, text in before.items():  # what was asked in the training is not asked again
        (file,) = (run / "race-words" / f"checkpoint-{step}").glob("samples_*.jsonl")
        assert file.read_text().startswith(text)
    # Another callback takes the shared answers from there.
    again = LiveRace(Asking(tasks="words", include_path=str(task)), run, 20)
    again.resume(12)
    scores = {step: again.standing(step).score for step in again.standings.asked}
    assert scores == {step: entry["race/score"] for step, entry in asked.items()}


def test_the_best_save_is_spared_and_deleted_ones_keep_their_answers(
    learned: Any, task: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    given = trainer(run, built=learned, learning_rate=0.0, save_steps=2, save_total_limit=2)
    given.add_callback(callback(task, questions=40))
    given.add_callback(Forgetting(4))
    given.train()
    log = raced(given.state.log_history)
    best = log[12]["race/best_step"]
    assert best in (2, 4)
    kept = sorted(int(folder.name.split("-")[1]) for folder in run.glob("checkpoint-*"))
    assert kept == [best, 12]
    result = race([str(run)], tasks="words", include_path=str(task), device="cpu", quiet=True)
    standing = {row.label: row for row in result.checkpoints}
    assert len(standing) == 6
    for step in range(2, 13, 2):
        row = standing[f"checkpoint-{step}"]
        assert (row.status == "deleted") == (step not in kept)
        if step not in kept:
            assert row.questions == 40
            assert row.score == pytest.approx(log[step]["race/score"])
    assert result.best == f"checkpoint-{best}"


def test_the_trainers_own_metric_wins(task: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    given = trainer(
        run,
        held_out=rows(8),
        eval_strategy="steps",
        eval_steps=4,
        load_best_model_at_end=True,
        learning_rate=0.001,
    )
    given.add_callback(callback(task))
    given.add_callback(EarlyStoppingCallback(3))
    given.train()
    entries = [entry for entry in given.state.log_history if "eval_loss" in entry]
    lowest = min(entries, key=lambda entry: entry["eval_loss"])["step"]
    assert given.state.best_model_checkpoint == str(run / f"checkpoint-{lowest}")
    assert list(raced(given.state.log_history)) == [4, 8, 12]


@pytest.fixture
def learned(tmp_path: Path) -> Any:
    """A model that has learned the task."""
    given = trainer(tmp_path / "learned", max_steps=60, save_strategy="no")
    given.train()
    return given.model


class Forgetting(TrainerCallback):
    """From a step on the weights are noise."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step >= self.step:
            with torch.no_grad():
                for parameter in given["model"].parameters():
                    parameter.normal_(0.0, 0.1)


def test_a_run_ends_after_saves_that_are_shown_to_be_worse(
    learned: Any, task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that knew the answers forgets them."""
    run = tmp_path / "run"
    given = trainer(run, built=learned, learning_rate=0.0, save_steps=1, max_steps=20)
    given.add_callback(callback(task, questions=40, stop_after=2))
    given.add_callback(Forgetting(3))
    given.train()
    assert given.state.global_step == 5
    assert given.state.best_model_checkpoint in {
        str(run / f"checkpoint-{step}") for step in (1, 2, 3)
    }
    shown = " ".join(capsys.readouterr().err.split())
    assert "the last 2 saves" in shown
    assert "Later saves" in shown
    (file,) = run.glob("race-*/race.json")
    assert json.loads(file.read_text())["may_stop"] is True


@pytest.mark.parametrize("failing", ["asking", "writing"])
def test_a_failure_is_a_warning_and_the_training_goes_on(
    failing: str,
    task: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from lmeval_dispersion.harness import seams
    from lmeval_dispersion.racing import evaluation

    calls = []

    def failed(*given: Any, **options: Any) -> Any:
        calls.append(given)
        if failing == "asking":
            raise ZeroDivisionError("a task's own mistake")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "samples")

    given = trainer(tmp_path / "run")
    given.add_callback(callback(task))
    if failing == "asking":
        monkeypatch.setattr(seams, "evaluated", failed)
    else:
        monkeypatch.setattr(evaluation.os, "fsync", failed)
    with caplog.at_level(logging.WARNING):
        given.train()
    assert given.state.global_step == 12
    assert calls
    assert raced(given.state.log_history) == {}
    assert given.state.best_model_checkpoint is None
    warned = [record.message for record in caplog.records if "race at step" in record.message]
    reason = "a task's own mistake" if failing == "asking" else "No space left"
    assert sum(reason in line and "continues" in line for line in warned) >= 3
    monkeypatch.undo()


def test_wrong_usage_is_refused_before_the_first_step(task: Path, tmp_path: Path) -> None:
    for options in (
        {"questions": 0},
        {"every": 0},
        {"stop_after": 0},
        {"share": 1.5},
        {"shots": 1},
    ):
        with pytest.raises(UsageError):
            callback(task, **options)
    given = trainer(tmp_path / "run")
    given.add_callback(RaceCallback("wrods", include_path=task))
    with pytest.raises(UsageError, match="did you mean words"):
        given.train()
    assert given.state.global_step == 0
    with pytest.raises(UsageError, match="folder of the saves"):
        callback(task).ask(model(), 1)
    with pytest.raises(UsageError, match="tokenizer"):
        callback(task, run=tmp_path).ask(model(), 1)


def test_a_resumed_run_asks_what_is_new_and_knows_the_best(
    task: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    whole = trained(tmp_path / "whole", callback(task))
    first = trainer(run)
    first.add_callback(callback(task))
    first.add_callback(Killed(10))
    with pytest.raises(KeyboardInterrupt):
        first.train()
    assert sorted(folder.name for folder in run.glob("checkpoint-*")) == [
        "checkpoint-4",
        "checkpoint-8",
    ]
    # As after a lost node: the run goes on from an earlier save, and passes step 8 again.
    again = trainer(run)
    again.add_callback(callback(task))
    again.train(resume_from_checkpoint=str(run / "checkpoint-4"))
    wanted = raced(whole.state.log_history)
    log = raced(again.state.log_history)
    assert list(log) == [4, 8, 12]
    for step in log:
        assert log[step]["race/score"] == wanted[step]["race/score"]
        assert log[step]["race/best_step"] == wanted[step]["race/best_step"]
        assert log[step]["race/margin"] == wanted[step]["race/margin"]
    assert not [record for record in caplog.records if "race at step" in record.message]


class Killed(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def test_a_loop_of_ones_own(task: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    tokenizer = tiny_models.tokenizer()
    built = model()
    optimizer = torch.optim.AdamW(built.parameters(), lr=0.01)
    batch = torch.tensor([row["input_ids"] for row in rows(16)])
    asked = callback(task, run=run, tokenizer=tokenizer)
    figures = {}
    for step in range(1, 13):
        built(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 0:
            built.save_pretrained(run / f"checkpoint-{step}")
            tokenizer.save_pretrained(run / f"checkpoint-{step}")
            figures[step] = asked.ask(built, step)
    assert built.training
    assert {"race/score", "race/margin", "race/best_step"} <= figures[12].keys()
    again = race(
        [str(run)],
        tasks="words",
        all=True,
        include_path=str(task),
        device="cpu",
        quiet=True,
        output_path=tmp_path / "again",
    )
    assert {row.label for row in again.checkpoints} == {f"checkpoint-{step}" for step in figures}


def test_a_share_of_the_time_lowers_the_questions(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LiveRace, "timed", lambda *_: 1.0)  # seconds a question: dear
    given = trained(tmp_path / "run", callback(task, questions=40, share=0.01))
    kept = json.loads((tmp_path / "run" / "race-words" / "race.json").read_text())
    assert kept["may_stop"] is False
    assert set(kept["shared"].values()) == {10}
    assert list(raced(given.state.log_history)) == [4, 8, 12]
