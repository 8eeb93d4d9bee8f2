"""A dispersion task beside the stock one: the same answers, document by document, for every kind of task."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness_world import check_vectors, evaluate, hflm, hooks_left, records, tiny_llama

from lmeval_dispersion.geometry import dispersion, dispersion_estimate
from lmeval_dispersion.harness import install

pytestmark = pytest.mark.usefixtures("in_world")


METABENCH = ["arc", "gsm8k", "hellaswag", "mmlu", "truthfulqa", "winogrande"]


def check_same(ours: str, stock: str, results: Any, plain: Any) -> None:
    """Every answer and metric is the stock task's; the figures are those of the states."""
    for mine, theirs in zip(results["samples"][ours], plain["samples"][stock], strict=True):
        for key in ("doc_id", "doc_hash", "prompt_hash", "target_hash", "resps", "filtered_resps", "filter"):
            assert mine[key] == theirs[key], key
        for metric in theirs["metrics"]:
            assert mine[metric] == theirs[metric]
    metrics = {key: value for key, value in plain["results"][stock].items() if "," in key}
    assert metrics
    for key, value in metrics.items():
        assert results["results"][ours][key] == value, key
    assert results["versions"][ours] == plain["versions"][stock]
    states = {record.doc_id: record.state for record in records(results, ours)}.values()
    rows = np.concatenate([state.vectors["last"] for state in states])
    for name in {sample["filter"] for sample in results["samples"][ours]}:
        figures = [results["results"][ours][f"dispersion{part},{name}"] for part in ("", "_stderr")]
        assert figures[0] == pytest.approx(dispersion(rows), rel=1e-9)
        assert figures[1] == pytest.approx(dispersion_estimate(rows).se, rel=1e-9, nan_ok=True)


@pytest.mark.parametrize(
    ("stock", "family", "settings"),
    [
        ("arc_easy", "arc", {}),
        ("arc_challenge", "arc", {"num_fewshot": 1}),
        ("mmlu_anatomy", "mmlu", {"num_fewshot": 2}),
        ("hellaswag", "hellaswag", {"apply_chat_template": True}),
        ("truthfulqa_mc1", "truthfulqa", {}),
        ("m_mmlu_de", "okapi/mmlu_multilingual", {}),
        ("gsm8k", "gsm8k", {"gen_kwargs": {"max_gen_toks": 8}, "num_fewshot": 1}),
        ("ifeval", "ifeval", {"gen_kwargs": {"max_gen_toks": 8}}),
        ("humaneval", "humaneval", {"gen_kwargs": {"max_gen_toks": 3}, "confirm_run_unsafe_code": True}),
        ("wikitext", "wikitext", {}),
        ("quail", "quail", {}),
    ],
)
def test_answers_are_the_stock_tasks_own_document_by_document(
    stock: str, family: str, settings: dict[str, Any], tokenizer: Any, task_manager: Callable[..., Any]
) -> None:
    lm = hflm(tiny_llama(tokenizer), tokenizer, batch_size=3, max_length=1024)
    families = () if stock == "quail" else (family,)
    manager = task_manager(*families)
    ours = f"{stock}_dispersion"
    plain = evaluate(lm, [stock], manager, **settings)
    results = evaluate(lm, [ours], manager, **settings)
    check_same(ours, stock, results, plain)
    assert not hooks_left(lm.model)
    assert not {"_model_call", "_loglikelihood_tokens", "tok_encode", "_model_generate"} & set(lm.__dict__)


def test_predict_only_is_the_stock_task(tokenizer: Any, task_manager: Callable[..., Any]) -> None:
    lm = hflm(tiny_llama(tokenizer), tokenizer)
    results = evaluate(lm, ["arc_easy_dispersion"], task_manager(), predict_only=True)
    sample = results["samples"]["arc_easy_dispersion"][0]
    assert "dispersion" not in sample
    assert not any("dispersion" in key for key in results["results"]["arc_easy_dispersion"])


def test_the_recipe_for_any_task(tokenizer: Any, task_manager: Callable[..., Any], tmp_path: Path) -> None:
    from lm_eval.tasks import TaskManager

    boolq = install.harness_tasks() / "super_glue/boolq/default.yaml"
    (tmp_path / "boolq_dispersion.yaml").write_text(
        f"include: {boolq}\n"
        "task: boolq_dispersion\n"
        "class: !function lmeval_dispersion.harness.DispersionTask\n"
    )
    lm = hflm(tiny_llama(tokenizer), tokenizer)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    results = evaluate(lm, ["boolq_dispersion"], manager)
    check_vectors(lm, results, "boolq_dispersion")
    assert math.isfinite(results["results"]["boolq_dispersion"]["dispersion,none"])


def test_plain_loglikelihood_tasks(tokenizer: Any, tmp_path: Path) -> None:
    from lm_eval.tasks import TaskManager

    (tmp_path / "stock.yaml").write_text(
        "task: endings\ndataset_path: aps/super_glue\ndataset_name: boolq\noutput_type: loglikelihood\n"
        'validation_split: validation\ndoc_to_text: "{{passage}}"\ndoc_to_target: " {{question}}"\n'
        "metric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
        "  - metric: perplexity\n    aggregation: perplexity\n    higher_is_better: false\n"
    )
    (tmp_path / "ours.yaml").write_text(
        "include: stock.yaml\n"
        "task: endings_dispersion\n"
        "class: !function lmeval_dispersion.harness.DispersionTask\n"
    )
    lm = hflm(tiny_llama(tokenizer), tokenizer)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    plain = evaluate(lm, ["endings"], manager)
    results = evaluate(lm, ["endings_dispersion"], manager)
    check_vectors(lm, results, "endings_dispersion")
    ours = results["results"]["endings_dispersion"]
    assert ours["perplexity,none"] == plain["results"]["endings"]["perplexity,none"]
    assert math.isfinite(ours["dispersion,none"])


def test_every_configuration_that_is_shipped_loads_and_answers(
    tokenizer: Any, task_manager: Callable[..., Any]
) -> None:
    lm = hflm(tiny_llama(tokenizer), tokenizer, batch_size=16)
    manager = task_manager()
    tasks = ["quail_dispersion", "m_mmlu_dispersion", "truthfulqa_mc1_dispersion", "arc_challenge_dispersion"]
    results = evaluate(lm, tasks, manager, limit=3)
    assert results["groups"]["m_mmlu_dispersion"]["sample_len"] == 18
    for task in tasks:
        assert math.isfinite(results["results"][task]["dispersion,none"])


@pytest.mark.slow
def test_a_group_of_generations_in_chats_is_pooled(tokenizer: Any, task_manager: Callable[..., Any]) -> None:
    lm = hflm(tiny_llama(tokenizer), tokenizer, batch_size=16)
    manager = task_manager("llama3/instruct/mmlu_th")
    settings = {"gen_kwargs": {"max_gen_toks": 2}, "apply_chat_template": True}
    thai = evaluate(lm, ["mmlu_th_llama_dispersion"], manager, limit=1, **settings)
    assert len(thai["samples"]) == 57
    group = thai["groups"]["mmlu_th_llama_dispersion"]
    rows = np.concatenate([r.state.vectors["last"] for t in thai["samples"] for r in records(thai, t)])
    assert group["dispersion,strict_match"] == pytest.approx(dispersion(rows), rel=1e-9)


@pytest.fixture
def tiny_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the tinyBenchmarks package, which is on no index: an estimate that is no plain mean."""

    def estimate(items: Any, benchmark: str) -> Any:
        weights = np.arange(1, len(items) + 1)
        return {benchmark: {"gpirt": float(weights @ np.asarray(items) / weights.sum())}}

    module = types.ModuleType("tinyBenchmarks")
    monkeypatch.setattr(module, "evaluate", estimate, raising=False)
    monkeypatch.setitem(sys.modules, "tinyBenchmarks", module)


@pytest.mark.usefixtures("tiny_package")
def test_tiny_benchmarks_answer_as_the_stock_tasks(tokenizer: Any, task_manager: Callable[..., Any]) -> None:
    lm = hflm(tiny_llama(tokenizer), tokenizer, max_length=1024)
    manager = task_manager("tinyBenchmarks")
    names = ["tinyArc", "tinyHellaswag", "tinyMMLU"]
    plain = evaluate(lm, names, manager, num_fewshot=1)
    results = evaluate(lm, [f"{name}_dispersion" for name in names], manager, num_fewshot=1)
    for name in names:
        check_same(f"{name}_dispersion", name, results, plain)
    check_vectors(lm, results, "tinyMMLU_dispersion")


def test_metabench_answers_as_the_stock_group(tokenizer: Any, task_manager: Callable[..., Any]) -> None:
    lm = hflm(tiny_llama(tokenizer), tokenizer, max_length=2000, batch_size=16)
    manager = task_manager("metabench")
    settings = {"gen_kwargs": {"max_gen_toks": 4}}
    plain = evaluate(lm, ["metabench", "metabench_arc_secondary"], manager, **settings)
    ours = ["metabench_dispersion", "metabench_arc_secondary_dispersion"]
    results = evaluate(lm, ours, manager, **settings)
    for name in [*METABENCH, "arc_secondary"]:
        check_same(f"metabench_{name}_dispersion", f"metabench_{name}", results, plain)
    group = results["groups"]["metabench_dispersion"]
    assert group["acc,none"] == plain["groups"]["metabench"]["acc,none"]
    assert math.isfinite(group["dispersion,none"])


def test_every_task_of_metabench_has_its_counterpart() -> None:
    stock = {path.stem for path in (install.harness_tasks() / "metabench").glob("*.yaml")}
    assert {f"{name}_dispersion" for name in stock} <= set(install.task_names())
