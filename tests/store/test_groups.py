"""The mean over tasks is lm-eval's own: a group counts once, and its tasks weigh as in lm-eval's figure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lm_eval.api.metrics import aggregate_subtask_metrics

from lmeval_dispersion.store.groups import document_weights, groups_of

_SIZES = {"a1": 10, "a2": 40, "b": 25}
_SCORES = {"a1": 0.5, "a2": 0.25, "b": 0.8}


def results(by_size: bool, *, nested: bool = False) -> dict[str, Any]:
    """Results as lm-eval writes them: a group of two tasks, and a task alone."""
    members = ["a1", "a2"]
    figure = aggregate_subtask_metrics(
        [_SCORES[m] for m in members], [_SIZES[m] for m in members], by_size
    )
    children: dict[str, list[str]] = {"a": members}
    if nested:
        children = {"all": ["a", "b"], "a": ["half"], "half": members}
    return {
        "results": {
            "a": {"alias": "a", "acc,none": figure, "acc_stderr,none": 0.1},
            "all": {"alias": "all"},
            "half": {"alias": " - half", "acc,none": figure},
            **{
                task: {"acc,none": score, "acc_stderr,none": 0.1} for task, score in _SCORES.items()
            },
        },
        "group_subtasks": children,
        "n-samples": {task: {"original": 99, "effective": size} for task, size in _SIZES.items()},
    }


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("by_size", [False, True])
def test_the_weighted_mean_is_the_mean_of_lm_evals_figures(by_size: bool, nested: bool) -> None:
    written = results(by_size, nested=nested)
    groups = groups_of(written)
    assert groups == {"a": {"tasks": ["a1", "a2"], "by_size": by_size}}
    tasks = [task for task, size in _SIZES.items() for _ in range(size)]
    scores = np.concatenate([np.full(size, _SCORES[task]) for task, size in _SIZES.items()])
    weights = document_weights(tasks, groups)
    assert weights.sum() == pytest.approx(1)
    assert weights @ scores == pytest.approx((written["results"]["a"]["acc,none"] + 0.8) / 2)


def test_without_groups_each_task_counts_once() -> None:
    weights = document_weights(["x"] * 30 + ["y"] * 10, {})
    assert weights[:30].sum() == pytest.approx(weights[30:].sum()) == pytest.approx(0.5)
    assert groups_of({}) == {}


def test_only_the_shared_tasks_of_a_group_count() -> None:
    groups = groups_of(results(by_size=True))
    weights = document_weights(["a2"] * 4 + ["b"] * 2, groups)
    assert weights.tolist() == pytest.approx([0.125] * 4 + [0.25] * 2)


def test_a_circle_of_groups_ends() -> None:
    many = {f"g{i}": [f"g{(i + k) % 60}" for k in range(1, 9)] for i in range(60)}
    figures = {name: {"acc,none": 0.5} for name in [*many, "top"]}
    assert groups_of({"group_subtasks": many, "results": figures}) == {}
    found = groups_of({"group_subtasks": {**many, "top": ["g1"]}, "results": figures})
    assert found == {"top": {"tasks": [], "by_size": True}}


def test_tasks_that_an_older_lm_eval_names_as_groups_are_tasks() -> None:
    """lm-eval 0.4.0 to 0.4.2: every task has a list of its own, an empty one."""
    written = results(by_size=False)
    written["group_subtasks"] |= {"a1": [], "a2": [], "b": []}
    assert groups_of(written) == {"a": {"tasks": ["a1", "a2"], "by_size": False}}


@pytest.mark.parametrize(
    "damaged",
    [
        {"group_subtasks": None, "results": None, "n-samples": None},
        {"group_subtasks": ["a"], "results": [1], "n-samples": "b"},
        {
            "group_subtasks": {"a": None, "b": "c", "d": [1, None]},
            "results": {"a": 3, "d": {"acc,none": 1}},
        },
        {
            "group_subtasks": {"a": ["b"]},
            "results": {"a": {"acc,none": "N/A"}},
            "n-samples": {"b": 3},
        },
    ],
)
def test_what_is_damaged_is_no_group_and_no_traceback(damaged: dict[str, Any]) -> None:
    assert all(not group["tasks"] for group in groups_of(damaged).values())


def test_a_task_in_two_groups_counts_in_the_first() -> None:
    written = results(by_size=True)
    written["group_subtasks"]["other"] = ["a1", "b"]
    written["results"]["other"] = {"acc,none": 0.5}
    assert [group["tasks"] for group in groups_of(written).values()] == [["a1", "a2"], ["b"]]
