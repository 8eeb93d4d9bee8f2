"""Metrics of tasks and groups: over which documents they are, and when they are not defined."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness_world import evaluate, hflm, records, tiny_llama

from lmeval_dispersion.geometry import dispersion, dispersion_estimate
from lmeval_dispersion.harness.records import METRICS
from lmeval_dispersion.harness.task import DispersionTask
from lmeval_dispersion.store import read_store

pytestmark = pytest.mark.usefixtures("in_world")


@pytest.mark.parametrize(
    ("name", "leaves", "categories"),
    [
        ("mmlu_stem_dispersion", 19, {"stem"}),
        pytest.param(
            "mmlu_dispersion", 57, {"stem", "other", "social sciences", "humanities"}, marks=pytest.mark.slow
        ),
    ],
)
def test_groups_are_pooled_over_all_documents(
    name: str,
    leaves: int,
    categories: set[str],
    tokenizer: Any,
    task_manager: Callable[..., Any],
    tmp_path: Path,
) -> None:
    lm = hflm(tiny_llama(tokenizer), tokenizer, batch_size=16)
    manager = task_manager(dispersion_store=str(tmp_path / "store"), dispersion_layers="last+layer.0")
    results = evaluate(lm, [name], manager)
    tasks = list(results["samples"])
    assert len(tasks) == leaves
    every = [record for task in tasks for record in records(results, task)]
    rows = np.concatenate([record.state.vectors["last"] for record in every])
    right = np.array([record.correct for record in every]) == 1.0
    group = results["groups"][name]
    expected = dispersion_estimate(rows)
    assert group["dispersion,none"] == pytest.approx(expected.mean, rel=1e-9)
    assert group["dispersion_stderr,none"] == pytest.approx(expected.se, rel=1e-9)
    assert group["dispersion_correct,none"] == pytest.approx(dispersion(rows[right]), rel=1e-9)
    assert group["dispersion_incorrect,none"] == pytest.approx(dispersion(rows[~right]), rel=1e-9)
    mean_of_means = np.mean([results["results"][task]["dispersion,none"] for task in tasks])
    assert abs(group["dispersion,none"] - mean_of_means) > 1e-3
    store = read_store(tmp_path / "store")
    assert len(store.documents) == len(every) == 4 * leaves
    assert set(store.documents["category"]) == categories
    assert store.documents["subject"].nunique() == leaves
    assert store.layers == ["last", "layer.0"]
    order = {record.columns["doc_hash"]: i for i, record in enumerate(every)}
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


@pytest.mark.parametrize("task", ["gsm8k_dispersion", "wikitext_dispersion"])
def test_a_bootstrap_of_our_metrics_changes_no_figure_and_no_store(
    task: str,
    tokenizer: Any,
    task_manager: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """lm-eval 0.5 bootstraps every aggregation that is no mean, in this process or in others."""
    import lm_eval.evaluator_utils as evaluator

    def run(name: str) -> tuple[dict[str, Any], Any]:
        lm = hflm(tiny_llama(tokenizer), tokenizer, batch_size=3, max_length=512)
        manager = task_manager(dispersion_store=str(tmp_path / name), dispersion_layers="last+layer.0")
        results = evaluate(lm, [task], manager, gen_kwargs={"max_gen_toks": 4})
        figures = {k: v for k, v in results["results"][task].items() if k.startswith("dispersion")}
        figures["summary"] = results["configs"][task]["metadata"]["dispersion"] | {"store": None}
        return figures, read_store(tmp_path / name)

    def bootstrapped(metric: Any, bootstrap_iters: int) -> Any:
        assert bootstrap_iters == 100000

        def error(items: Sequence[Any]) -> str:
            if type(metric).__module__.startswith("lmeval_dispersion"):
                draw = random.Random(0)
                samples = [draw.choices(items, k=len(items)) for _ in range(3)]
                copied, again = pickle.loads(pickle.dumps((metric, samples)))  # as in another process
                for sample, copy in zip(samples, again, strict=True):
                    np.testing.assert_allclose(copied(copy), metric(sample), rtol=1e-12)
                bootstraps.append(metric)
            return "N/A"

        return error

    expected, store = run("plain")
    bootstraps: list[Any] = []
    monkeypatch.setattr(evaluator, "stderr_for_metric", bootstrapped)
    figures, again = run("bootstrapped")
    filters = 2 if "gsm8k" in task else 1
    assert len(bootstraps) == 2 * len(METRICS) * filters
    assert str(figures) == str(expected)
    assert again.documents.equals(store.documents)
    for layer in store.layers:
        np.testing.assert_array_equal(again.vectors(layer), store.vectors(layer))


def test_records_of_other_processes_are_kept_whatever_samples_of_them_are_drawn(
    tokenizer: Any, task_manager: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = "arc_easy_dispersion"
    lm = hflm(tiny_llama(tokenizer), tokenizer)
    plain = evaluate(lm, [task], task_manager(dispersion_store=str(tmp_path / "plain")))
    items = records(plain, task)
    results = evaluate(lm, [task], task_manager(dispersion_store=str(tmp_path / "two")), limit=4)
    assert results["results"][task]["dispersion,none"] != plain["results"][task]["dispersion,none"]
    dumped = DispersionTask.dump_config

    def gathered(self: Any) -> Any:
        if not self._summary:
            figure = self.aggregation()["dispersion"]
            for sample in (items, random.Random(1).choices(items, k=8)):
                assert math.isfinite(figure(sample))
                assert type(pickle.loads(pickle.dumps(figure))).__name__ == "Figure"
        return dumped(self)

    monkeypatch.setattr(DispersionTask, "dump_config", gathered)
    evaluate(lm, [task], task_manager(dispersion_store=str(tmp_path / "gathered")), limit=4)
    same = ["doc_id", "doc_hash", "correct"]
    expected = read_store(tmp_path / "plain").documents[same]
    assert read_store(tmp_path / "gathered").documents[same].equals(expected)
    assert len(read_store(tmp_path / "two").documents) == 4


def test_a_task_that_runs_twice_stores_its_latest_run(
    tokenizer: Any, task_manager: Callable[..., Any], tmp_path: Path
) -> None:
    import lm_eval

    lm = hflm(tiny_llama(tokenizer), tokenizer)
    loaded = task_manager(dispersion_store=str(tmp_path / "first")).load(["arc_easy_dispersion"])
    task = loaded["tasks"]["arc_easy_dispersion"]
    lm_eval.evaluate(lm=lm, task_dict=loaded)
    task.config.metadata["dispersion_store"] = str(tmp_path / "second")
    results = lm_eval.evaluate(lm=lm, task_dict=loaded, limit=3)
    assert len(read_store(tmp_path / "first").documents) == 8
    assert read_store(tmp_path / "second").documents["doc_id"].tolist() == [0, 1, 2]
    summary = results["configs"]["arc_easy_dispersion"]["metadata"]["dispersion"]
    assert summary["documents"] == 3
