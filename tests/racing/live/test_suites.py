"""The score of several tasks: the mean over the units named, inside of a group as in lm-eval."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from json_schemas import faults
from lm_eval.api.group import Group

from lmeval_dispersion.asking import Asking, LmEval
from lmeval_dispersion.cli import main
from lmeval_dispersion.errors import HarnessError, UsageError
from lmeval_dispersion.harness import seams
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.racing.evaluation import Evaluation, batch_of

pytestmark = pytest.mark.usefixtures("named_tasks_alone")
MEAN = {"aggregation": "mean", "higher_is_better": True}
SIZES = {"long": 60, "short": 10, "middle": 30, "alone": 20, "written": 8}
GROUPS: dict[str, dict[str, Any]] = {
    "by_size": {"task": ["long", "short"], "aggregate_metric_list": [{"metric": "acc"}]},
    "alike": {
        "task": ["long", "short"],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": False}],
    },
    # lm-eval weighs the tasks below a group, whatever the groups between say.
    "nested": {"task": ["alike", "middle"], "aggregate_metric_list": [{"metric": "acc"}]},
    "nested_alike": {
        "task": ["by_size", "middle"],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": False}],
    },
    "without": {"task": ["by_size", "middle"]},
    # As Open LLM Leaderboard's: a figure for each metric, of the tasks that have it.
    "several": {
        "task": ["by_size", "written"],
        "aggregate_metric_list": [{"metric": "acc"}, {"metric": "exact_match"}],
    },
    "filtered": {
        "task": ["long", "short"],
        "aggregate_metric_list": [
            {"metric": "acc", "filter_list": "other", "weight_by_size": False},
            {"metric": "acc_norm", "filter_list": "none"},
        ],
    },
}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tasks of several sizes, and groups of them."""
    folder = tmp_path_factory.mktemp("suite")
    for name, size in SIZES.items():
        rows = [json.dumps({"q": f"{name} question {i}"}) + "\n" for i in range(size)]
        (folder / f"{name}.jsonl").write_text("".join(rows))
        config = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}},
            "test_split": "test",
            "doc_to_text": "{{q}}",
            "output_type": "multiple_choice",
            "doc_to_choice": ["a", "b"],
            "doc_to_target": 0,
            "metric_list": [{"metric": "acc", **MEAN}, {"metric": "acc_norm", **MEAN}],
        }
        if name == "written":
            config |= {
                "output_type": "generate_until",
                "metric_list": [{"metric": "exact_match", **MEAN}],
            }
            config |= {"doc_to_target": "a"}
            del config["doc_to_choice"]
        if name in ("middle", "alone"):
            config["tag"] = "tagged"
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    for name, group in GROUPS.items():
        (folder / f"_{name}.yaml").write_text(yaml.safe_dump({"group": name, **group}))
    return folder


@pytest.fixture
def evaluation(suite: Path, in_world: Path) -> Any:
    """Makes an Evaluation of the suite's tasks."""

    def made(tasks: str, **options: Any) -> Evaluation:
        return Evaluation(Asking(tasks=tasks, include_path=str(suite), **options))

    return made


def scores_of(evaluation: Evaluation, means: dict[str, float]) -> np.ndarray[Any, Any]:
    """Right and wrong answers (N,) whose share by task is as given."""
    scores = np.full(len(evaluation.questions), np.nan)
    for task, places in evaluation.places.items():
        right = round(means[task] * len(places))
        assert right == pytest.approx(means[task] * len(places))
        scores[places] = np.arange(len(places)) < right
    return scores


# Of one checkpoint long is right, of the other all else: the two means name different bests.
ON_LONG = {"long": 0.9, "short": 0.3, "middle": 0.4, "alone": 0.4, "written": 0.25}
ELSEWHERE = {"long": 0.4, "short": 0.9, "middle": 0.6, "alone": 0.9, "written": 0.5}
MACRO = (0.9 + 0.3) / 2
MICRO = (60 * 0.9 + 10 * 0.3) / 70


@pytest.mark.parametrize(
    ("tasks", "units", "score"),
    [
        ("long,short", ["long", "short"], MACRO),
        ("long", ["long"], 0.9),
        ("by_size", ["by_size"], MICRO),
        ("alike", ["alike"], MACRO),
        ("by_size,alone", ["by_size", "alone"], (MICRO + 0.4) / 2),
        ("alike,alone", ["alike", "alone"], (MACRO + 0.4) / 2),
        ("nested,alone", ["nested", "alone"], (69 / 100 + 0.4) / 2),
        ("nested_alike", ["nested_alike"], (0.9 + 0.3 + 0.4) / 3),
        ("without,alone", ["by_size", "middle", "alone"], (MICRO + 0.4 + 0.4) / 3),
        ("several", ["by_size", "written"], (MICRO + 0.25) / 2),
        ("filtered", ["filtered"], MICRO),
        ("tagged,long", ["alone", "middle", "long"], (0.4 + 0.4 + 0.9) / 3),
        ("long,long,short", ["long", "short"], MACRO),
    ],
)
def test_the_score_is_the_mean_over_what_was_named(
    tasks: str, units: list[str], score: float, evaluation: Any
) -> None:
    made = evaluation(tasks)
    scores = scores_of(made, ON_LONG)
    assert list(made.units) == units
    assert made.mean(scores) == pytest.approx(score)
    weights = np.ones(len(scores)) if made.weights is None else made.weights
    assert weights.mean() == pytest.approx(1)
    assert (weights * scores).mean() == pytest.approx(score)
    by_unit = made.by_unit(scores)
    assert sum(count for count, _ in by_unit.values()) == len(scores)
    assert np.mean([mean for _, mean in by_unit.values()]) == pytest.approx(score)


def test_units_and_questions_name_different_bests(evaluation: Any) -> None:
    units = evaluation("long,short")
    questions = evaluation("long,short", weigh="questions")
    means = {
        way: [made.mean(scores_of(made, each)) for each in (ON_LONG, ELSEWHERE)]
        for way, made in (("units", units), ("questions", questions))
    }
    assert means["units"] == pytest.approx([0.6, 0.65])
    assert means["questions"] == pytest.approx([(54 + 3) / 70, (24 + 9) / 70])
    assert questions.weights is None
    assert questions.weighing is None
    assert questions.questions == seams.drawn_questions(questions.tasks, None, 0)[0]
    assert questions.questions == units.questions
    assert list(questions.units) == ["long", "short"]
    assert questions.by_unit(scores_of(questions, ON_LONG))["short"] == (10, pytest.approx(0.3))


@pytest.mark.parametrize("tasks", ["alike", "nested", "nested_alike", "by_size"])
def test_a_group_has_lm_evals_own_figure(tasks: str, suite: Path, in_world: Path) -> None:
    made = Evaluation(Asking(tasks=tasks, include_path=str(suite)))
    _, groups = seams.loaded_suite(tasks, None, str(suite))
    scores = scores_of(made, ON_LONG)
    figures = {
        name: {"acc,none": ON_LONG[name], "sample_len": len(places)}
        for name, places in made.places.items()
    }
    assert made.mean(scores) == pytest.approx(groups[tasks].aggregate(figures)["acc,none"])


@pytest.mark.parametrize("asked", [["long"], ["long", "short"], ["short", "alone"]], ids="+".join)
def test_of_what_was_asked_the_score_is_lm_evals(asked: list[str], evaluation: Any) -> None:
    made = evaluation("alike,alone")
    scores = scores_of(made, ON_LONG)
    for task, places in made.places.items():
        if task not in asked:
            scores[places] = np.nan
    group = [ON_LONG[task] for task in ("long", "short") if task in asked]
    units = [np.mean(group), *([ON_LONG["alone"]] if "alone" in asked else [])]
    assert made.mean(scores) == pytest.approx(np.mean(units))
    assert np.isnan(made.mean(np.full(len(scores), np.nan)))
    if "alone" not in asked:
        count, mean = made.by_unit(scores)["alone"]
        assert count == 0
        assert np.isnan(mean)


def test_equal_tasks_are_drawn_and_scored_as_ever(evaluation: Any) -> None:
    """So that a folder of earlier answers goes on."""
    for tasks in ("long", "by_size"):
        made = evaluation(tasks, seed=3)
        assert made.weights is None
        assert made.weighing is None
        assert made.questions == seams.drawn_questions(made.tasks, None, 3)[0]


@pytest.mark.parametrize(
    ("tasks", "limit", "drawn"),
    [
        ("long,short,alone", 30, {"long": 10, "short": 10, "alone": 10}),
        ("long,short,alone", 60, {"long": 30, "short": 10, "alone": 20}),
        ("long,alone", 25, {"long": 13, "alone": 12}),
        ("alone,long", 25, {"long": 12, "alone": 13}),
        ("long,short", 500, {"long": 60, "short": 10}),
        ("several", 4, {"written": 2}),
        ("without,alone", 75, {"middle": 27, "alone": 20}),
    ],
)
def test_a_limit_draws_equally_of_each_unit(
    tasks: str, limit: int, drawn: dict[str, int], evaluation: Any
) -> None:
    made = evaluation(tasks, limit=limit, seed=1)
    counts = Counter(task for task, _ in made.questions)
    assert {task: counts[task] for task in drawn} == drawn
    assert len(made.questions) == min(limit, made.available)
    assert made.questions == evaluation(tasks, limit=limit, seed=1).questions
    assert made.questions != evaluation(tasks, limit=limit, seed=2).questions
    assert len(set(made.questions)) == len(made.questions)
    assert made.weighing == "units"


def test_the_units_of_a_limit_come_in_random_order(evaluation: Any) -> None:
    # The first questions are shared: a small unit is among them with its part.
    positions = []
    for seed in range(40):
        made = evaluation("long,short", limit=20, seed=seed)
        short = [place for place, (task, _) in enumerate(made.questions) if task == "short"]
        positions.append(np.mean(short))
    assert len(short) == 10
    # Of 10 among 20 at random: 9.5, with a standard error of 0.2 over 40 draws.
    assert abs(np.mean(positions) - 9.5) < 1


@pytest.mark.parametrize("tasks", ["long", "by_size", "nested"])
def test_a_limit_of_one_unit_draws_as_ever(tasks: str, evaluation: Any) -> None:
    made = evaluation(tasks, limit=25, seed=4)
    order = np.random.default_rng(4).permutation(made.available)[:25]
    every = [(name, i) for name, task in made.tasks.items() for i in range(len(task.eval_docs))]
    assert made.questions == [every[place] for place in order]
    assert made.weighing is None


def test_a_limit_below_the_number_of_units_is_refused(evaluation: Any) -> None:
    with pytest.raises(
        UsageError, match="at least 3 questions, one for each of long, short, alone, got 2"
    ):
        evaluation("long,short,alone", limit=2)
    assert len(evaluation("long,short,alone", limit=2, weigh="questions").questions) == 2


@pytest.mark.parametrize(
    ("metric", "judges"),
    [
        (None, {"long": "acc", "written": "exact_match"}),
        ("long=acc_norm", {"long": "acc_norm", "short": "acc"}),
        ("acc_norm,written=exact_match", {"long": "acc_norm", "written": "exact_match"}),
        ("by_size=acc_norm,short=acc", {"long": "acc_norm", "short": "acc"}),
        ("several=none/acc,written=none/exact_match", {"long": "acc", "written": "exact_match"}),
    ],
)
def test_a_task_or_group_may_have_a_metric_of_its_own(
    metric: str | None, judges: dict[str, str], evaluation: Any
) -> None:
    made = evaluation("several", metric=metric)
    for task, judge in judges.items():
        assert made._check_metric(task) == judge


@pytest.mark.parametrize(
    ("metric", "cause"),
    [
        (
            "longer=acc",
            "for a task or group that is scored, got longer=acc; name one of these: long",
        ),
        ("long=f1", "expected a metric of long, got 'f1'; name one of acc, acc_norm"),
        ("acc", "a metric of written, got 'acc'"),
        ("long=acc,long=acc_norm", "one metric for long, got acc and acc_norm"),
        ("acc,acc_norm", "one metric for all tasks, got acc and acc_norm"),
        ("long=", r"expected \[TASK=\]\[FILTER/\]METRIC"),
        ("acc,,long=acc", r"expected \[TASK=\]\[FILTER/\]METRIC"),
        ("=acc", r"expected \[TASK=\]\[FILTER/\]METRIC"),
    ],
)
def test_a_metric_that_fits_nothing_is_one_sentence(
    metric: str, cause: str, evaluation: Any
) -> None:
    with pytest.raises((UsageError, HarnessError), match=cause):
        evaluation("several", metric=metric)


def test_results_have_the_groups_figure(evaluation: Any) -> None:
    made = evaluation("alike,alone")
    made.judges = {task: ("none", "acc") for task in made.tasks}
    figures, counts = made.figures(scores_of(made, ON_LONG))
    assert figures["alike"]["acc,none"] == pytest.approx(MACRO)
    assert figures["long"]["acc,none"] == pytest.approx(0.9)
    assert counts["short"] == {"original": 10, "effective": 10}
    assert made.group_members == {"alike": ["long", "short"]}


def test_names_with_a_group_before_them_are_results_names() -> None:
    """As lm-eval 0.5 has them."""
    group = Group(
        "g",
        aggregate_metric_list=[
            SimpleNamespace(metric="acc", filter_list=None, weight_by_size=True)
        ],
    )
    task = SimpleNamespace(task_name="x", _qualified_name="g::x")
    group._children["x"] = task  # type: ignore[assignment]
    assert seams.group_entries({"g": group}) == {"g": ("g", ["g::x"])}


@pytest.mark.parametrize("budget", [["--budget", "50%"], []])
def test_a_race_of_a_suite_weighs_its_units_and_is_judged_alike_by_its_folder(
    budget: list[str], suite: Path, in_world: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """60 questions of one task count as much as 10 of another."""
    models = [str(data_folder("demo") / name) for name in ("sums-00", "sums-80", "sums-30")]
    given = ["--tasks", "long,short", "--include_path", str(suite), "--device", "cpu"]
    given += ["--output_path", str(tmp_path / "out"), "--format", "json", "-q"]
    assert main(["race", *models, "--all", *given, *budget]) == 0
    result = json.loads(capsys.readouterr().out)
    assert faults(result) == []
    assert {row["unit"] for row in result["units"]} == {"long", "short"}
    by_label = {row["label"]: row for row in result["checkpoints"]}
    for label, row in by_label.items():
        mine = [each for each in result["units"] if each["label"] == label]
        assert sum(each["questions"] for each in mine) == row["questions"]
        if row["questions"] == result["questions_each"]:
            assert row["score"] == pytest.approx(np.mean([each["score"] for each in mine]))
    if not budget:
        assert by_label[result["best"]]["questions"] == result["questions_each"] == 70
    assert main(["race", "--replay", str(tmp_path / "out"), "--format", "json"]) == 0
    judged = json.loads(capsys.readouterr().out)
    for key in ("best", "margin_shown", "questions"):
        assert judged[key] == result[key]
    by_unit = [
        {(row["unit"], row["label"]): row["score"] for row in race["units"]}
        for race in (judged, result)
    ]
    assert by_unit[0] == pytest.approx(by_unit[1])
    for row in judged["checkpoints"]:
        assert row["score"] == pytest.approx(by_label[row["label"]]["score"])
        assert row["status"] == by_label[row["label"]]["status"]
    assert main(["race", "--replay", str(tmp_path / "out"), "--weigh", "questions"]) == 2
    assert "leave out --weigh" in capsys.readouterr().err
    other = [*given, "--weigh", "questions"]
    assert main(["race", *models, "--all", *other]) == 2
    assert "another weighing of the tasks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "requests", "batch"),
    [
        (None, 4, 10),
        (16, 4, 10),
        (64, 4, 16),
        ("64", 1, 64),
        ("auto", 4, 25),
        ("auto:4", 1, 25),
        (1, 1, 10),
    ],
)
def test_what_is_asked_at_once_fills_the_device_and_is_a_step_at_least(
    size: int | str | None, requests: int, batch: int
) -> None:
    assert batch_of(LmEval(batch_size=size), requests) == batch


def test_lm_evals_advice_on_an_option_of_its_own_is_left_out(
    in_world: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """lm-eval gives it for every task whose documents a function makes."""
    (tmp_path / "made.py").write_text(
        "import datasets\n"
        "def rows(**_):\n"
        "    rows = [{'q': f'{n}+1=', 'choices': ['1', '2'], 'label': 1} for n in range(30)]\n"
        "    return {'test': datasets.Dataset.from_list(rows)}\n"
    )
    (tmp_path / "made.yaml").write_text(
        "task: made\ncustom_dataset: !function made.rows\ntest_split: test\n"
        "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: '{{label}}'\nmetric_list: [{metric: acc, aggregation: mean, "
        "higher_is_better: true}]\n"
    )
    caplog.set_level(logging.WARNING, logger="lm_eval")
    assert len(Evaluation(Asking(tasks="made", include_path=str(tmp_path))).questions) == 30
    assert "--metadata" not in caplog.text
    seams.loaded_suite("made", None, str(tmp_path))
    assert "--metadata" in caplog.text
