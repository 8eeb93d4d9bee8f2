"""Metrics of tasks and groups: over which documents they are, and when they are not defined."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness_world import evaluate, hflm, records, tiny_llama

from lmeval_dispersion.geometry import dispersion, dispersion_estimate
from lmeval_dispersion.store import read_store

pytestmark = pytest.mark.usefixtures("in_world")


def test_groups_are_pooled_over_all_documents(
    tokenizer: Any, task_manager: Callable[..., Any], tmp_path: Path
) -> None:
    lm = hflm(tiny_llama(tokenizer), tokenizer, batch_size=16)
    manager = task_manager(dispersion_store=str(tmp_path / "store"), dispersion_layers="last+layer.0")
    results = evaluate(lm, ["mmlu_dispersion"], manager)
    assert len(results["group_subtasks"]["mmlu_stem_dispersion"]) == 19
    leaves = [task for task in results["samples"] if task.startswith("mmlu_")]
    assert len(leaves) == 57
    every = [record for task in leaves for record in records(results, task)]
    rows = np.concatenate([record.state.vectors["last"] for record in every])
    right = np.array([record.correct for record in every]) == 1.0
    group = results["groups"]["mmlu_dispersion"]
    expected = dispersion_estimate(rows)
    assert group["dispersion,none"] == pytest.approx(expected.mean, rel=1e-9)
    assert group["dispersion_stderr,none"] == pytest.approx(expected.se, rel=1e-9)
    assert group["dispersion_correct,none"] == pytest.approx(dispersion(rows[right]), rel=1e-9)
    assert group["dispersion_incorrect,none"] == pytest.approx(dispersion(rows[~right]), rel=1e-9)
    mean_of_means = np.mean([results["results"][task]["dispersion,none"] for task in leaves])
    assert abs(group["dispersion,none"] - mean_of_means) > 1e-3
    stem = [r for t in results["group_subtasks"]["mmlu_stem_dispersion"] for r in records(results, t)]
    assert results["groups"]["mmlu_stem_dispersion"]["dispersion,none"] == pytest.approx(
        dispersion(np.concatenate([r.state.vectors["last"] for r in stem])), rel=1e-9
    )
    store = read_store(tmp_path / "store")
    assert len(store.documents) == len(every) == 228
    assert set(store.documents["category"]) == {"stem", "other", "social sciences", "humanities"}
    assert store.documents["subject"].nunique() == 57
    assert store.layers == ["last", "layer.0"]
    order = {(record.doc_hash): i for i, record in enumerate(every)}
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    picked = units[[order[h] for h in store.documents["doc_hash"]]]
    np.testing.assert_allclose(store.vectors("last"), picked, atol=1e-3)
    assert store.documents["query_perplexity"].between(1, 1e6).all()
    assert store.documents["correct"].mean() == pytest.approx(group["acc,none"])
    assert store.documents["text"].str.endswith("Answer:").mean() > 0.9  # longer ones are shortened
    assert set(store.documents["prediction"]) <= set("ABCD")


def test_nan_states_are_left_out_and_said(
    tokenizer: Any, task_manager: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_llama(tokenizer)
    lm = hflm(model, tokenizer)
    token = lm.tok_encode(" bees")[0]
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = float("nan")
    results = evaluate(lm, ["arc_easy_dispersion"], task_manager())
    metadata = results["configs"]["arc_easy_dispersion"]["metadata"]["dispersion"]
    bad = metadata["without_direction"]["last"]
    assert 0 < bad < 8
    assert metadata["layers"]["last"]["dispersion_n"] == 8 - bad
    assert math.isfinite(results["results"]["arc_easy_dispersion"]["dispersion,none"])
    assert f"{bad} of 8 states of last are zero or not finite and left out" in caplog.text


def test_undefined_figures_are_nan_with_a_reason(
    tokenizer: Any, task_manager: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    lm = hflm(tiny_llama(tokenizer), tokenizer)
    results = evaluate(lm, ["arc_easy_dispersion"], task_manager(), limit=1)
    figures = results["results"]["arc_easy_dispersion"]
    assert math.isnan(figures["dispersion,none"])
    assert "arc_easy_dispersion: dispersion is NaN: 1 documents, two are needed" in caplog.text
    layers = results["configs"]["arc_easy_dispersion"]["metadata"]["dispersion"]["layers"]
    assert layers["last"]["dispersion"] is None
