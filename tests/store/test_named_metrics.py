"""``--metric`` of single tasks and groups, read once for logs, races and comparisons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmeval_dispersion.errors import DispersionError, UsageError
from lmeval_dispersion.logs.judging import NamedMetrics
from lmeval_dispersion.store.groups import groups_of, mean_score, question_weights
from lmeval_dispersion.store.samples import read_logged


@pytest.mark.parametrize(
    ("text", "default", "own"),
    [
        (None, None, {}),
        ("", None, {}),
        ("acc", "acc", {}),
        ("none/acc", "none/acc", {}),
        ("gsm8k=exact_match", None, {"gsm8k": "exact_match"}),
        (" acc , gsm8k = strict-match/exact_match ", "acc", {"gsm8k": "strict-match/exact_match"}),
        ("a=acc,b=acc_norm,acc,acc", "acc", {"a": "acc", "b": "acc_norm"}),
    ],
)
def test_a_metric_is_read(text: str | None, default: str | None, own: dict[str, str]) -> None:
    assert NamedMetrics.of(text) == NamedMetrics(default, own)


def test_a_tasks_own_metric_comes_before_a_groups() -> None:
    named = NamedMetrics.of("acc,group=acc_norm,task=f1")
    assert named.judge("task", "group") == "f1"
    assert named.judge("other", "inner", "group") == "acc_norm"
    assert named.judge("alone") == "acc"


def logged(folder: Path) -> Path:
    """A run of two tasks with two metrics each, in a group that weighs them alike, and a third task."""
    folder.mkdir()
    scores = {"long": [1, 1, 1, 0], "short": [0], "alone": [1, 0]}
    for task, right in scores.items():
        lines = []
        for i, score in enumerate(right):
            line = {
                **{"doc_id": i, "doc": {"q": i}, "target": "0", "filter": "none"},
                **{"arguments": {"gen_args_0": {"arg_0": f"{task} {i}", "arg_1": {"until": []}}}},
                **{"resps": [["a"]], "filtered_resps": ["a"]},
                **{"metrics": ["acc", "other"], "acc": float(score), "other": float(1 - score)},
            }
            lines.append(json.dumps(line) + "\n")
        (folder / f"samples_{task}_2026-01-01T00-00-00.jsonl").write_text("".join(lines))
    means = {task: sum(right) / len(right) for task, right in scores.items()}
    results = {
        "results": {
            **{task: {"acc,none": mean, "other,none": 1 - mean} for task, mean in means.items()},
            "pair": {"acc,none": (means["long"] + means["short"]) / 2},
        },
        "group_subtasks": {"pair": ["inner"], "inner": ["long", "short"]},
        "configs": {task: {"output_type": "generate_until"} for task in scores},
        "n-samples": {task: {"effective": len(right)} for task, right in scores.items()},
        "config": {"model_args": "pretrained=m"},
        "model_name": "m",
    }
    (folder / "results_2026-01-01T00-00-00.json").write_text(json.dumps(results))
    return folder


@pytest.mark.parametrize(
    ("metric", "judges"),
    [
        (None, ("acc", "acc", "acc")),
        ("other", ("other", "other", "other")),
        ("long=other", ("other", "acc", "acc")),
        ("other,long=acc", ("acc", "other", "other")),
        ("inner=other,short=acc", ("other", "acc", "acc")),
        ("pair=none/other", ("other", "other", "acc")),
    ],
)
def test_logs_are_scored_by_tasks_own_metrics(
    metric: str | None, judges: tuple[str, ...], tmp_path: Path
) -> None:
    store = read_logged(logged(tmp_path / "run"), metric)
    by = store.manifest["judges"]
    assert tuple(by[task] for task in ("long", "short", "alone")) == judges
    means = store.documents.groupby("task")["correct"].mean()
    assert means["long"] == (0.75 if judges[0] == "acc" else 0.25)


@pytest.mark.parametrize("metric", ["lung=acc", "long=f1", "acc,long=f1", "f1", "f1,long=acc"])
def test_a_metric_that_no_task_has_is_one_sentence(metric: str, tmp_path: Path) -> None:
    with pytest.raises(DispersionError) as raised:
        read_logged(logged(tmp_path / "run"), metric)
    assert ("long" if "lung" in metric else "f1") in str(raised.value)


def test_two_metrics_for_all_are_refused() -> None:
    with pytest.raises(UsageError, match="one metric for all tasks, got acc and none"):
        NamedMetrics.of("acc,none")  # a key of lm-eval's results


def test_logs_have_the_units_of_a_race(tmp_path: Path) -> None:
    store = read_logged(logged(tmp_path / "run"))
    groups = store.manifest["groups"]
    assert groups == {"pair": {"tasks": ["long", "short"], "by_size": False}}
    tasks = store.documents["task"].tolist()
    scores = store.documents["correct"].to_numpy(float)
    expected = ((0.75 + 0.0) / 2 + 0.5) / 2
    assert mean_score(tasks, scores, groups) == pytest.approx(expected)
    weights = question_weights(tasks, groups)
    assert weights is not None
    assert (weights * scores).mean() == pytest.approx(expected)
    assert weights.mean() == pytest.approx(1)


def leaderboard(**figures: dict[str, Any]) -> dict[str, Any]:
    """Results of a group whose tasks have different metrics, as Open LLM Leaderboard's."""
    scores: dict[str, dict[str, Any]] = {
        "mmlu_pro": {"acc,none": 0.2},
        "bbh_a": {"acc_norm,none": 0.4},
        "bbh_b": {"acc_norm,none": 0.6},
    }
    members = {"leaderboard": ["mmlu_pro", "bbh"], "bbh": ["bbh_a", "bbh_b"]}
    return {"results": {**scores, **figures}, "group_subtasks": members}


def test_a_group_of_several_metrics_stands_for_its_members() -> None:
    """Each of its figures is of some tasks alone."""
    results = leaderboard(
        leaderboard={"acc,none": 0.2, "acc_norm,none": 0.5}, bbh={"acc_norm,none": 0.5}
    )
    assert groups_of(results) == {"bbh": {"tasks": ["bbh_a", "bbh_b"], "by_size": True}}


def test_a_group_whose_tasks_share_a_metric_counts_once() -> None:
    results = leaderboard(leaderboard={"acc,none": 0.4})
    for name in ("bbh_a", "bbh_b"):
        results["results"][name]["acc,none"] = 0.5
    assert list(groups_of(results)) == ["leaderboard"]
