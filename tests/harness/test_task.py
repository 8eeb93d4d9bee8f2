"""A dispersion task beside the stock one: the same answers, document by document, for every kind of task."""

from __future__ import annotations

import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness_world import ARC, World, check_vectors, evaluate, hooks_left, records

from lmeval_dispersion.geometry import dispersion_estimate
from lmeval_dispersion.harness import install

METABENCH = ["arc", "gsm8k", "hellaswag", "mmlu", "truthfulqa", "winogrande"]
OURS = "class: !function lmeval_dispersion.harness.DispersionTask\n"


def check_same(ours: str, stock: str, results: Any, plain: Any) -> None:
    """Every answer and metric is the stock task's; the figures are those of the states."""
    for mine, theirs in zip(results["samples"][ours], plain["samples"][stock], strict=True):
        keys = ("doc_id", "doc_hash", "prompt_hash", "target_hash", "resps", "filtered_resps", "filter")
        for key in (*keys, *theirs["metrics"]):
            assert mine[key] == theirs[key], key
    metrics = {key: value for key, value in plain["results"][stock].items() if "," in key}
    assert metrics
    for key, value in metrics.items():
        assert results["results"][ours][key] == value, key
    assert results["versions"][ours] == plain["versions"][stock]
    states = {record.doc_id: record.state for record in records(results, ours)}.values()
    expected = dispersion_estimate(np.concatenate([state.vectors["last"] for state in states]))
    for name in {sample["filter"] for sample in results["samples"][ours]}:
        figures = [results["results"][ours][f"dispersion{part},{name}"] for part in ("", "_stderr")]
        assert figures == pytest.approx([expected.mean, expected.se], rel=1e-9, nan_ok=True)


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
        ("quail", "", {}),
    ],
)
def test_answers_are_the_stock_tasks_own_document_by_document(
    stock: str, family: str, settings: dict[str, Any], world: World
) -> None:
    lm = world.lm(batch_size=3, max_length=1024)
    families = (family,) if family else ()
    plain = world.run(lm, stock, families=families, **settings)
    ours = f"{stock}_dispersion"
    check_same(ours, stock, world.run(lm, ours, families=families, **settings), plain)
    assert not hooks_left(lm.model)
    assert not {"_model_call", "_loglikelihood_tokens", "tok_encode", "_model_generate"} & set(lm.__dict__)


def test_predict_only_is_the_stock_task(world: World) -> None:
    results = world.run(world.lm(), predict_only=True)
    assert "dispersion" not in results["samples"][ARC][0]
    assert not any("dispersion" in key for key in results["results"][ARC])


def test_the_recipe_for_any_task_and_plain_loglikelihoods(world: World, tmp_path: Path) -> None:
    from lm_eval.tasks import TaskManager

    boolq = install.harness_tasks() / "super_glue/boolq/default.yaml"
    (tmp_path / "stock.yaml").write_text(
        "task: endings\ndataset_path: aps/super_glue\ndataset_name: boolq\noutput_type: loglikelihood\n"
        'validation_split: validation\ndoc_to_text: "{{passage}}"\ndoc_to_target: " {{question}}"\n'
        "metric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
        "  - metric: perplexity\n    aggregation: perplexity\n    higher_is_better: false\n"
    )
    for name, include in (("endings", "stock.yaml"), ("boolq", boolq)):
        text = f"include: {include}\ntask: {name}_dispersion\n{OURS}"
        (tmp_path / f"{name}_dispersion.yaml").write_text(text)
    lm = world.lm()
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    check_vectors(lm, evaluate(lm, ["boolq_dispersion"], manager), "boolq_dispersion")
    results = evaluate(lm, ["endings_dispersion"], manager)
    check_vectors(lm, results, "endings_dispersion")
    check_same("endings_dispersion", "endings", results, evaluate(lm, ["endings"], manager))


def test_the_group_of_languages_loads_and_answers(world: World) -> None:
    group = world.run(world.lm(batch_size=16), "m_mmlu_dispersion", limit=3)["groups"]["m_mmlu_dispersion"]
    assert group["sample_len"] == 18
    assert math.isfinite(group["dispersion,none"])


def test_tiny_benchmarks_answer_as_the_stock_tasks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def estimate(items: Any, benchmark: str) -> Any:
        """In place of the tinyBenchmarks package, which is on no index: an estimate that is no plain mean."""
        weights = np.arange(1, len(items) + 1)
        return {benchmark: {"gpirt": float(weights @ np.asarray(items) / weights.sum())}}

    module = types.ModuleType("tinyBenchmarks")
    monkeypatch.setattr(module, "evaluate", estimate, raising=False)
    monkeypatch.setitem(sys.modules, "tinyBenchmarks", module)
    lm = world.lm(max_length=1024)
    names = ["tinyArc", "tinyHellaswag", "tinyMMLU"]
    settings: dict[str, Any] = {"families": ("tinyBenchmarks",), "num_fewshot": 1}
    plain = world.run(lm, *names, **settings)
    results = world.run(lm, *[f"{name}_dispersion" for name in names], **settings)
    for name in names:
        check_same(f"{name}_dispersion", name, results, plain)
    check_vectors(lm, results, "tinyMMLU_dispersion")


def test_metabench_answers_as_the_stock_group(world: World) -> None:
    stock = {path.stem for path in (install.harness_tasks() / "metabench").glob("*.yaml")}
    assert {f"{name}_dispersion" for name in stock} <= set(install.task_names())
    lm = world.lm(max_length=2000, batch_size=16)
    settings: dict[str, Any] = {"families": ("metabench",), "gen_kwargs": {"max_gen_toks": 4}}
    plain = world.run(lm, "metabench", "metabench_arc_secondary", **settings)
    results = world.run(lm, "metabench_dispersion", "metabench_arc_secondary_dispersion", **settings)
    for name in [*METABENCH, "arc_secondary"]:
        check_same(f"metabench_{name}_dispersion", f"metabench_{name}", results, plain)
    group = results["groups"]["metabench_dispersion"]
    assert group["acc,none"] == plain["groups"]["metabench"]["acc,none"]
    assert math.isfinite(group["dispersion,none"])
