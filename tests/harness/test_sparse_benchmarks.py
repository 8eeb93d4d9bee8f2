"""tinyBenchmarks and metabench with dispersion: the answers and accuracies of the stock tasks."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness_world import check_vectors, evaluate, hflm, records, tiny_llama

from lmeval_dispersion.geometry import dispersion
from lmeval_dispersion.harness import install

pytestmark = pytest.mark.usefixtures("in_world")

METABENCH = ["arc", "gsm8k", "hellaswag", "mmlu", "truthfulqa", "winogrande"]


@pytest.fixture
def tiny_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the tinyBenchmarks package, which is on no index: an estimate that is no plain mean."""

    def estimate(items: Any, benchmark: str) -> Any:
        weights = np.arange(1, len(items) + 1)
        return {benchmark: {"gpirt": float(weights @ np.asarray(items) / weights.sum())}}

    module = types.ModuleType("tinyBenchmarks")
    monkeypatch.setattr(module, "evaluate", estimate, raising=False)
    monkeypatch.setitem(sys.modules, "tinyBenchmarks", module)


def same(ours: str, stock: str, results: Any, plain: Any) -> None:
    for mine, theirs in zip(results["samples"][ours], plain["samples"][stock], strict=True):
        for key in ("doc_id", "doc_hash", "prompt_hash", "target_hash", "resps", "filtered_resps", "filter"):
            assert mine[key] == theirs[key], key
    metrics = {key: value for key, value in plain["results"][stock].items() if "," in key}
    assert metrics
    for key, value in metrics.items():
        assert results["results"][ours][key] == value, key
    assert results["versions"][ours] == plain["versions"][stock]
    found = {r.doc_id: r for r in records(results, ours)}.values()
    rows = np.concatenate([record.state.vectors["last"] for record in found])
    name = next(sample["filter"] for sample in results["samples"][ours])
    assert results["results"][ours][f"dispersion,{name}"] == pytest.approx(dispersion(rows), rel=1e-9)


@pytest.mark.usefixtures("tiny_package")
def test_tiny_benchmarks_answer_as_the_stock_tasks(tokenizer: Any, task_manager: Callable[..., Any]) -> None:
    lm = hflm(tiny_llama(tokenizer), tokenizer, max_length=1024)
    manager = task_manager("tinyBenchmarks")
    names = ["tinyArc", "tinyHellaswag", "tinyMMLU"]
    plain = evaluate(lm, names, manager, num_fewshot=1)
    results = evaluate(lm, [f"{name}_dispersion" for name in names], manager, num_fewshot=1)
    for name in names:
        same(f"{name}_dispersion", name, results, plain)
    check_vectors(lm, results, "tinyMMLU_dispersion")


def test_metabench_answers_as_the_stock_group(tokenizer: Any, task_manager: Callable[..., Any]) -> None:
    lm = hflm(tiny_llama(tokenizer), tokenizer, max_length=2000, batch_size=16)
    manager = task_manager("metabench")
    settings = {"gen_kwargs": {"max_gen_toks": 4}}
    plain = evaluate(lm, ["metabench", "metabench_arc_secondary"], manager, **settings)
    ours = ["metabench_dispersion", "metabench_arc_secondary_dispersion"]
    results = evaluate(lm, ours, manager, **settings)
    for name in [*METABENCH, "arc_secondary"]:
        same(f"metabench_{name}_dispersion", f"metabench_{name}", results, plain)
    group = results["groups"]["metabench_dispersion"]
    assert group["acc,none"] == plain["groups"]["metabench"]["acc,none"]
    assert math.isfinite(group["dispersion,none"])


def test_every_task_of_metabench_has_its_counterpart() -> None:
    stock = {path.stem for path in (install.harness_tasks() / "metabench").glob("*.yaml")}
    assert {f"{name}_dispersion" for name in stock} <= set(install.task_names())
