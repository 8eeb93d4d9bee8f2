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
from lmeval_dispersion.harness.compat import check_groups
from lmeval_dispersion.harness.metrics import estimate, pooled_dispersion, pooled_error


def parts(*sizes: int) -> list[Any]:
    rng = np.random.default_rng(3)
    found = []
    for n in sizes:
        matrix = rng.normal(0.5, 1, (n, 5)).astype(np.float32)
        found.append((matrix, np.arange(n)))
    return found


@pytest.mark.parametrize("weigh", [True, False])
@pytest.mark.parametrize("sizes", [(2, 9), (1, 1, 4), (0, 3), (5, 5, 5, 2)])
def test_lm_evals_formulas_give_the_dispersion_of_all_vectors(sizes: tuple[int, ...], weigh: bool) -> None:
    from lm_eval.api.metrics import aggregate_subtask_metrics, pooled_sample_stderr, unweighted_mean_stderr

    given = parts(*sizes)
    expected = dispersion_estimate(np.concatenate([m for m, _ in given]))
    values = [pooled_dispersion((part,)) for part in given]
    errors = [pooled_error((part,)) for part in given]
    assert aggregate_subtask_metrics(values, list(sizes), weigh) == pytest.approx(expected.mean, rel=1e-12)
    error = pooled_sample_stderr(errors, list(sizes)) if weigh else unweighted_mean_stderr(errors)
    assert error == pytest.approx(expected.se, rel=1e-12)


def test_a_single_value_is_a_float_that_serialises_plainly() -> None:
    part = parts(4)[0]
    value = pooled_dispersion((part,))
    assert value == pytest.approx(dispersion_estimate(part[0]).mean, rel=1e-12)
    assert json.loads(json.dumps({"x": value}))["x"] == float(value)
    assert f"{value:.4f}" == f"{float(value):.4f}"
    assert type(pickle.loads(pickle.dumps(value))) is float
    assert copy.deepcopy(value) == value


def test_only_the_chosen_rows_count_and_too_few_are_nan() -> None:
    matrix, _ = parts(6)[0]
    rows = np.array([0, 2, 5])
    assert estimate(((matrix, rows),)).mean == pytest.approx(
        dispersion_estimate(matrix[rows]).mean, rel=1e-12
    )
    assert math.isnan(pooled_dispersion(((matrix, rows[:1]),)))


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
