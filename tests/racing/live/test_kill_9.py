"""Races and trainings that end in the middle of a block by kill -9: the same command goes on."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import live_training
import pytest
import test_budget
from forks import Forks
from test_race import MID_BLOCK, raced, samples, standing, words
from tiny_decoders import TRAINERS_WARN

from lmeval_dispersion.cli import main
from lmeval_dispersion.racing.rule import STEP

pytestmark = pytest.mark.usefixtures("named_tasks_alone")


@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_same_command_goes_on(
    kills: int,
    forks: Forks,
    in_world: Path,
    tasks: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = words(tasks, tmp_path / "whole", "sums-80", "sums-30", task="sums,sums_written")
    expected = raced(capsys, *whole)
    again = words(tasks, tmp_path / "out", "sums-80", "sums-30", task="sums,sums_written")
    for blocks in range(1, kills + 1):
        ended = forks.run(*again, at_append=MID_BLOCK)
        assert ended.code == -signal.SIGKILL, ended.err[-2000:]
        results = json.loads(next((tmp_path / "out" / "sums-80").glob("results_*")).read_text())
        assert results["race"]["questions"] == STEP * blocks
        sizes = {
            file.name.split("_2")[0]: file.stat().st_size
            for file in (tmp_path / "out" / "sums-80").glob("samples*")
        }
        assert sum(sizes.values()) > sum(results["race"]["bytes"].values())  # half a block
    result = raced(capsys, *again)
    assert standing(result) == standing(expected)
    for name in ("sums-80", "sums-30"):
        assert samples(tmp_path / "out" / name) == samples(tmp_path / "whole" / name)
    once_more = raced(capsys, *again)  # of what is there, no model is loaded
    assert standing(once_more) == standing(expected)
    (samples_file,) = (tmp_path / "out" / "sums-30").glob("samples_sums_2*")
    samples_file.write_text(samples_file.read_text()[:-9])
    assert main(again) == 1
    assert "is not as the race left it" in capsys.readouterr().err


def test_a_budget_goes_on_in_a_shared_phase(
    forks: Forks, in_world: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = ("sums-00", "sums-80", "sums-30")
    whole_words = test_budget.given(tasks, tmp_path / "whole", *models)
    whole = raced(capsys, *whole_words, "--budget", "60")
    again = [*test_budget.given(tasks, tmp_path / "out", *models), "--budget", "60"]
    ended = forks.run(*again, at_append=MID_BLOCK)
    assert ended.code == -signal.SIGKILL, ended.err[-2000:]
    result = raced(capsys, *again)
    assert standing(result) == standing(whole)
    assert result["margin_shown"] == whole["margin_shown"]
    for name in models:
        assert samples(tmp_path / "out" / name) == samples(tmp_path / "whole" / name)


@TRAINERS_WARN
def test_a_training_with_a_race_goes_on(forks: Forks, in_world: Path, tmp_path: Path) -> None:
    """Killed while the second save's answers are written."""
    task = live_training.write_task(tmp_path / "tasks")
    run = tmp_path / "run"
    ended = forks.run(run, task, at_append=1, main="live_training")
    assert ended.code == -signal.SIGKILL, ended.err[-2000:]
    assert (run / "checkpoint-4").exists()
    given = live_training.raced_trainer(run, task)
    given.train(resume_from_checkpoint=True)
    assert list(live_training.raced(given.state.log_history)) == [4, 8, 12]
