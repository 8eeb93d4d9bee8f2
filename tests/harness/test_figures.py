"""A figure is over the documents that it is given, and a group's over those of all its tasks."""

from __future__ import annotations

import json
import math
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lmeval_dispersion.geometry import dispersion_estimate
from lmeval_dispersion.harness import requests
from lmeval_dispersion.harness.records import DocRecord, DocState, Figure

VALUE, ERROR = Figure("dispersion"), Figure("dispersion", error=True)


def task_records(*sizes: int) -> list[list[DocRecord]]:
    rng = np.random.default_rng(3)
    tasks = []
    for n in sizes:
        rows = rng.normal(0.5, 1, (n, 1, 5)).astype(np.float32)
        states = [DocState({"last": row}, [3], [False], [2.0]) for row in rows]
        tasks.append([DocRecord(state, i, i % 2, "none", {}) for i, state in enumerate(states)])
    return tasks


def matrix(records: list[DocRecord]) -> Any:
    return np.concatenate([record.state.vectors["last"] for record in records])


@pytest.mark.parametrize("weigh", [True, False])
@pytest.mark.parametrize("sizes", [(2, 9), (1, 1, 4), (0, 3), (1, 1), (5, 5, 5, 2)])
def test_a_groups_figure_is_that_of_all_its_tasks_documents(sizes: tuple[int, ...], weigh: bool) -> None:
    from lm_eval.api.group import Group
    from lm_eval.api.task import ConfigurableTask

    requests.install()
    tasks = task_records(*sizes)
    metrics = [{"metric": name, "weight_by_size": weigh} for name in ("dispersion", "acc")]
    inner, group = (Group.from_config({"group": g, "aggregate_metric_list": metrics}) for g in ("in", "out"))
    results: dict[str, dict[str, Any]] = {"other": {"dispersion,none": VALUE(task_records(9)[0])}}
    for i, records in enumerate(tasks):
        leaf = object.__new__(ConfigurableTask)
        leaf._config = SimpleNamespace(task=f"leaf{i}", _qualified_name=None)
        (inner if i else group).add(leaf)
        results[f"leaf{i}"] = {
            "dispersion,none": VALUE(records),
            "dispersion_stderr,none": ERROR(records),
            "acc,none": 0.5,
            "sample_len": len(records),
        }
    group.add(inner)
    combined = json.loads(json.dumps(group.aggregate(results)))
    expected = dispersion_estimate(matrix([record for task in tasks for record in task]))
    assert combined["dispersion,none"] == pytest.approx(expected.mean, rel=1e-12)
    assert combined["dispersion_stderr,none"] == pytest.approx(expected.se, rel=1e-12, nan_ok=True)
    assert combined["acc,none"] == 0.5


def test_a_single_value_is_a_float_that_serialises_plainly() -> None:
    records = task_records(4)[0]
    value = VALUE(records)
    assert value == pytest.approx(dispersion_estimate(matrix(records)).mean, rel=1e-12)
    assert json.loads(json.dumps({"x": value}))["x"] == float(value)
    assert type(pickle.loads(pickle.dumps(value))) is float


def test_only_the_chosen_documents_count_each_once_and_too_few_are_nan() -> None:
    records = task_records(6)[0]
    right = Figure("dispersion_correct")
    expected = dispersion_estimate(matrix(records[1::2])).mean
    assert right(records) == pytest.approx(expected, rel=1e-12)
    assert right([*records, *records[3:]]) == right(records[::-1]) == right(records)
    assert math.isnan(right(records[:2]))
