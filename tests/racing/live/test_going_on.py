"""A race's folder when the same command is given again, or its checkpoints were moved or deleted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_race import DEMO, raced, standing, words

from lmeval_dispersion.cli import main
from lmeval_dispersion.harness import seams
from lmeval_dispersion.racing.folder import RaceFolder

pytestmark = pytest.mark.usefixtures("named_tasks_alone")
MODELS = ("sums-80", "sums-30", "sums-00")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three saves and the folder of their race, once it is there; to be copied."""
    run = tmp_path_factory.mktemp("finished") / "run"
    for model in MODELS:
        shutil.copytree(DEMO / model, run / model)
    return run


@pytest.fixture
def run(
    finished: Path, in_world: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[Path]:
    """The run at another place, with the files' times; ``standing.json`` is how its race ended."""
    if not (finished / "race-sums").exists():
        ended = standing(raced(capsys, *given(finished, tasks)))
        (finished / "standing.json").write_text(json.dumps(ended))
    away = finished.with_name("away")
    finished.rename(away)
    yield Path(shutil.copytree(away, tmp_path / "moved"))
    away.rename(finished)


def given(run: Path, tasks: Path) -> list[str]:
    """The words of a race of all saves, in their order."""
    return words(tasks, run / "race-sums", *(run / model for model in MODELS))


def statuses(result: dict[str, Any]) -> dict[str, str]:
    return {row["label"]: row["status"] for row in result["checkpoints"]}


def test_a_run_that_was_moved_goes_on_and_is_judged_without_a_load(
    run: Path, tasks: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams, "loaded_lm", None)
    before = [tuple(row) for row in json.loads((run / "standing.json").read_text())]
    assert standing(raced(capsys, *given(run, tasks))) == before
    replayed = raced(capsys, "race", "--replay", str(run / "race-sums"), "--format", "json")
    assert standing(replayed) == before


def test_a_replay_does_not_judge_saves_that_were_deleted(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless all are gone, as where the folder was sent alone: then it tells nothing of them."""
    replay = ["race", "--replay", str(run / "race-sums"), "--format", "json"]
    before = statuses(raced(capsys, *replay))
    shutil.rmtree(run / "sums-00")
    found = raced(capsys, *replay)
    assert statuses(found) == {**before, "sums-00": "deleted"}
    assert any(note.startswith("Not judged any more, because") for note in found["notes"])
    for model in ("sums-30", "sums-80"):
        shutil.rmtree(run / model)
    assert statuses(raced(capsys, *replay)) == before


def test_a_dry_run_counts_what_is_answered(
    run: Path, tasks: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams, "loaded_lm", None)
    answered = raced(capsys, *given(run, tasks))["questions"]
    plan = raced(capsys, *given(run, tasks), "--dry-run")["plan"]
    missing = 3 * 40 - answered
    asked = "0" if missing == 0 else f"0 to {missing}"
    assert plan.endswith(f"and ask {asked} more questions ({answered} are answered).")


def test_another_top_is_noted(run: Path, tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = raced(capsys, *given(run, tasks), "--top", "2")
    note = (
        "The number of best checkpoints wanted, 2, was chosen after answers were seen; the race began "
        "with 1."
    )
    assert note in found["notes"]
    assert note not in raced(capsys, *given(run, tasks))["notes"]


def test_one_that_cannot_be_screened_fails_as_one_that_cannot_be_loaded(
    in_world: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for model in ("sums-00", "sums-80"):
        shutil.copytree(DEMO / model, tmp_path / "runs" / model)
    broken = Path(shutil.copytree(DEMO / "sums-30", tmp_path / "runs" / "broken"))
    (broken / "config.json").write_text("{")
    tail = words(tasks, tmp_path / "out")
    screened = ["race", str(tmp_path / "runs"), "--domain", "math", *tail[tail.index("--tasks") :]]
    for command in (screened, [*screened, "--dry-run"]):
        found = raced(capsys, *command, code=3)
        (row,) = (row for row in found["checkpoints"] if row["label"] == "broken")
        assert row["status"] == "failed"
        assert "it could not be screened: " in row["message"]
        assert (found["of"], "broken" in str(found["notes"])) == (3, False)


@pytest.mark.parametrize(
    ("more", "code"), [(["nothing/here"], 2), (["--all", "nothing/here", "there"], 2)]
)
def test_a_folder_that_is_not_there_is_noticed_before_the_tasks_are_loaded(
    more: list[str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.setattr(RaceFolder, "opened", None)
    assert main(["race", "--tasks", "sums", *more]) == code
    assert "that folder does not exist: check the path" in capsys.readouterr().err


def test_ctrl_c_before_the_first_question_says_that_nothing_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RaceFolder, "opened", interrupted)
    assert main(["race", str(DEMO / "sums-80"), "--all", "--tasks", "sums"]) == 130
    said = capsys.readouterr().err
    assert "interrupted before a question was asked, so nothing was written" in said
