"""Floats that carry vectors: lm-eval's own group arithmetic gives the dispersion of all of them."""

from __future__ import annotations

import copy
import json
import math
import pickle
from typing import Any

import numpy as np
import pytest

from lmeval_dispersion.errors import HarnessError
from lmeval_dispersion.geometry import dispersion_estimate
from lmeval_dispersion.harness.metrics import Figure
from lmeval_dispersion.harness.records import DocRecord, DocState
from lmeval_dispersion.harness.seams import check_groups

VALUE, ERROR = Figure("dispersion", "last"), Figure("dispersion", "last", error=True)


def task_records(*sizes: int) -> list[list[DocRecord]]:
    rng = np.random.default_rng(3)
    tasks = []
    for n in sizes:
        states = [
            DocState(i, {"last": rng.normal(0.5, 1, (1, 5)).astype(np.float32)}, [3], [False], [2.0], "h")
            for i in range(n)
        ]
        tasks.append([DocRecord(s, s.doc_id, s.doc_id % 2, None, None, [], "d", None) for s in states])
    return tasks


def matrix(records: list[DocRecord]) -> Any:
    return np.concatenate([record.state.vectors["last"] for record in records])


@pytest.mark.parametrize("weigh", [True, False])
@pytest.mark.parametrize("sizes", [(2, 9), (1, 1, 4), (0, 3), (5, 5, 5, 2)])
def test_lm_evals_formulas_give_the_dispersion_of_all_vectors(sizes: tuple[int, ...], weigh: bool) -> None:
    from lm_eval.api.metrics import aggregate_subtask_metrics, pooled_sample_stderr, unweighted_mean_stderr

    tasks = task_records(*sizes)
    expected = dispersion_estimate(matrix([record for task in tasks for record in task]))
    values = [VALUE(task) for task in tasks]
    errors = [ERROR(task) for task in tasks]
    assert aggregate_subtask_metrics(values, list(sizes), weigh) == pytest.approx(expected.mean, rel=1e-12)
    error = pooled_sample_stderr(errors, list(sizes)) if weigh else unweighted_mean_stderr(errors)
    assert error == pytest.approx(expected.se, rel=1e-12)


def test_a_single_value_is_a_float_that_serialises_plainly() -> None:
    records = task_records(4)[0]
    value = VALUE(records)
    assert value == pytest.approx(dispersion_estimate(matrix(records)).mean, rel=1e-12)
    assert json.loads(json.dumps({"x": value}))["x"] == float(value)
    assert f"{value:.4f}" == f"{float(value):.4f}"
    assert type(pickle.loads(pickle.dumps(value))) is float
    assert copy.deepcopy(value) == value


def test_only_the_chosen_documents_count_each_once_and_too_few_are_nan() -> None:
    records = task_records(6)[0]
    right = Figure("dispersion_correct", "last")
    expected = dispersion_estimate(matrix(records[1::2])).mean
    assert right(records) == pytest.approx(expected, rel=1e-12)
    assert right([*records, *records[3:]]) == right(records[::-1]) == right(records)
    assert math.isnan(right(records[:2]))


def test_the_guard_passes_on_this_lm_eval_and_fails_where_groups_are_averaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import lm_eval.api.metrics as metrics

    check_groups()
    monkeypatch.setattr(
        metrics, "aggregate_subtask_metrics", lambda values, sizes, weigh=True: float(np.mean(values))
    )
    with pytest.raises(HarnessError, match="combines the tasks of a group in a way"):
        check_groups()
