"""Races for a budget on real models: shared questions, phases, the proof that follows, orders without labels."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from json_schemas import faults
from test_race import DEMO, asked_of, interrupted_after, raced, samples, standing, words

import lmeval_dispersion
from lmeval_dispersion.cli import main
from lmeval_dispersion.harness import seams
from lmeval_dispersion.racing.contest import phases

pytestmark = pytest.mark.usefixtures("named_tasks_alone")
MODELS = ("sums-00", "sums-80", "sums-10", "sums-30", "sums-20", "sums-45")
COUNT = 40  # questions of the task


def given(tasks: Path, out: Path, *models: str, task: str = "sums") -> list[str]:
    """The words of a race of all models, in the order of shared questions."""
    plain = words(tasks, out, *(models or MODELS), task=task)
    at = plain.index("--by")
    return plain[:at] + plain[at + 2 :]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which models were loaded, one after the other."""
    loaded = list[str]()
    load = seams.loaded_lm

    def noted(kind: str, arguments: Any, *more: Any, **options: Any) -> Any:
        loaded.append(Path(arguments["pretrained"]).name)
        return load(kind, arguments, *more, **options)

    monkeypatch.setattr(seams, "loaded_lm", noted)
    return loaded


def test_a_budget_is_spent_in_the_phases_that_a_dry_run_prints(
    in_world: Path,
    tasks: Path,
    tmp_path: Path,
    loads: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = [*given(tasks, tmp_path / "out"), "--budget", "40%"]
    planned = raced(capsys, *command, "--dry-run")
    assert not (tmp_path / "out").exists()
    budget = int(0.4 * len(MODELS) * COUNT)
    plan = phases(len(MODELS), COUNT, budget)
    for phase in plan:
        assert f"up to {phase.questions} shared questions" in planned["plan"]
    assert f"{sum(phase.checkpoints for phase in plan)} loads" in planned["plan"]
    result = raced(capsys, *command)
    assert len(loads) == sum(phase.checkpoints for phase in plan) <= 1.5 * len(MODELS)
    assert result["budget"] == budget
    assert result["questions"] <= budget
    asked = sorted((row["questions"] for row in result["checkpoints"]), reverse=True)
    assert asked[: plan[-1].checkpoints] == [plan[-1].questions] * plan[-1].checkpoints
    assert asked[-1] == plan[0].questions
    assert (result["best"], result["checkpoints"][0]["status"]) == ("sums-80", "best")
    assert 0 < result["margin_shown"] < 1
    assert (
        "questions of sums; no other checkpoint in the race is better by more than 0."
        in result["answer"][0]
    )
    assert "without a budget goes on until the best is proven" in result["answer"][0]
    kept = json.loads((tmp_path / "out" / "race.json").read_text())
    assert kept["split"] == len(MODELS)
    assert sorted(kept["shared"].values(), reverse=True) == asked
    # What is shared is the same for all.
    first = [question for _, question in asked_of("sums", tasks).questions[: asked[-1]]]
    for name in MODELS:
        mine = [document for _, document in samples(tmp_path / "out" / name)]
        assert mine[: len(first)] == sorted(first)
    loads.clear()
    assert standing(raced(capsys, *command)) == standing(result)  # all is there
    assert loads == []
    judged = raced(capsys, "race", "--replay", str(tmp_path / "out"), "--format", "json")
    assert standing(judged) == standing(result)
    assert judged["margin_shown"] == result["margin_shown"]
    # The same command without a budget goes on to the proof; then the budget is of turns.
    proven = raced(capsys, *given(tasks, tmp_path / "out"))
    assert proven["best"] == "sums-80"
    assert proven["margin_shown"] <= proven["margin"]
    assert "Undecided" not in proven["answer"][0]
    for row in proven["checkpoints"]:
        assert row["questions"] >= asked[-1]
    again = raced(capsys, "race", "--replay", str(tmp_path / "out"), "--format", "json")
    assert standing(again) == standing(proven)
    assert again["margin_shown"] == proven["margin_shown"]
    # A checkpoint that joins shares its own number of questions, and meets the best at its turn.
    grown = raced(capsys, *given(tasks, tmp_path / "out", *MODELS, "sums-05"))
    assert {row["label"] for row in grown["checkpoints"]} == {*MODELS, "sums-05"}
    kept = json.loads((tmp_path / "out" / "race.json").read_text())
    assert kept["shared"]["sums-05"] == 25


def test_a_race_that_is_stopped_shows_what_is_known(
    in_world: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    command = [*given(tasks, tmp_path / "out", "sums-80", "sums-00", "sums-30"), "--budget", "90"]
    with monkeypatch.context() as patch:
        interrupted_after(1, "sums-00", patch)
        result = raced(capsys, *command, code=130)
    assert result["best"] == "sums-80"
    assert result["answer"][0].startswith("Best so far: sums-80")
    with monkeypatch.context() as patch:
        interrupted_after(0, "sums-30", patch)
        with pytest.raises(KeyboardInterrupt):
            lmeval_dispersion.race(
                [DEMO / name for name in ("sums-80", "sums-00", "sums-30")], tasks="sums", all=True,
                budget=90, include_path=str(tasks), output_path=tmp_path / "out", batch_size=16,
                device="cpu", quiet=True,
            )  # fmt: skip
    assert raced(capsys, *command)["best"] == "sums-80"


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            ["--budget", "2"],
            "--budget: expected at least 3, one question for each checkpoint, got 2",
        ),
        (
            ["--budget", "many"],
            "--budget: expected a number of questions, or a share such as 10%, got many",
        ),
        (["--budget", "200%"], "got 200%"),
        (["--budget", "0"], "expected a number of questions, or a share such as 10%, got 0"),
        (["--budget", "many", "--dry-run"], "got many"),
        (["--answers", "none"], "--answers: a race without the right answers"),
        (["--answers", "none", "--budget", "12"], "5 questions for each"),
        (["--gpus-per-checkpoint", "2"], "add `--engine ray`"),
    ],
)
def test_a_budget_that_cannot_be_spent_is_one_sentence(
    more: list[str], sentence: str, in_world: Path, tasks: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert main([*given(tasks, tmp_path / "out", "sums-80", "sums-00", "sums-30"), *more]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("dispersion race: ")
    assert sentence in last
    assert not (tmp_path / "out").exists()


def test_the_former_command_names_what_does_its_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "runs", "--task", "gsm8k"]) == 2
    assert "race … --budget" in capsys.readouterr().err


@pytest.mark.parametrize("labels", [True, False])
def test_without_labels_the_order_is_by_agreement_and_says_that_nothing_is_shown(
    labels: bool, in_world: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answer tokens' probabilities alone order: the same with labels in the task as without."""
    place = Path(shutil.copytree(tasks, tmp_path / "tasks"))
    task = yaml.safe_load((place / "sums_letter.yaml").read_text())
    if not labels:
        task["doc_to_target"] = ""
    (place / "sums_letter.yaml").write_text(yaml.safe_dump(task))
    models = ("sums-00", "sums-10", "sums-80", "sums-45")
    command = [*given(place, tmp_path / "out", *models, task="sums_letter"), "--answers", "none"]
    result = raced(capsys, *command, "--budget", "40")
    assert faults(result) == []
    assert (result["by"], result["margin_shown"]) == ("agreement", None)
    assert result["answer"][0].startswith(f"Best by agreement: {result['best']} (agreement 0.")
    assert result["answer"][0].endswith("without labels there is neither a margin nor an error.")
    rows = result["checkpoints"]
    assert [row["questions"] for row in rows] == [10] * 4
    assert {row["score"] for row in rows} == {None}
    ordered = sorted(rows, key=lambda row: -row["agreement"])
    assert [row["label"] for row in rows] == [row["label"] for row in ordered]


def test_answers_that_are_no_tokens_are_refused_by_the_first_checkpoint(
    in_world: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The choices of sums are numbers of two digits; the others are not loaded to learn that."""
    out = tmp_path / "out"
    command = [*given(tasks, out, "sums-80", "sums-00", "sums-30", "sums-10"), "--answers", "none"]
    for _ in range(2):
        assert main([*command, "--budget", "40"]) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert "expected the probabilities of answer tokens" in last
        assert "`dispersion tokens`" in last
        assert len([*out.glob("*/results_*.json")]) == 1
