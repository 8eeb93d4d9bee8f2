"""A dispersion task beside the stock one: the same answers, document by document, for every kind of task."""

import numpy as np
import pytest
from harness_world import (
    ARC,
    check_same_store,
    check_vectors,
    evaluate,
    from_folder,
    hooks_left,
    records,
)

from lmeval_dispersion.geometry import dispersion_estimate
from lmeval_dispersion.harness import install
from lmeval_dispersion.store import read_store

OURS = "class: !function lmeval_dispersion.harness.DispersionTask\n"


def check_same(ours, stock, results, plain):
    """Every answer and metric is the stock task's; the figures are those of the states."""
    for mine, theirs in zip(results["samples"][ours], plain["samples"][stock], strict=True):
        keys = (
            "doc_id",
            "doc_hash",
            "prompt_hash",
            "target_hash",
            "resps",
            "filtered_resps",
            "filter",
        )
        for key in (*keys, *theirs["metrics"]):
            assert mine[key] == theirs[key], key
        answer = mine["dispersion"].columns
        if answer["prediction"] is not None and "acc" in theirs:
            assert (answer["prediction"] == answer["target"]) == bool(theirs["acc"])
    metrics = {key: value for key, value in plain["results"][stock].items() if "," in key}
    assert metrics
    for key, value in metrics.items():
        assert results["results"][ours][key] == value, key
    assert not [key for key in results["results"][ours] if "_stderr_stderr" in key]
    assert results["versions"][ours] == plain["versions"][stock]
    states = {record.doc_id: record.state for record in records(results, ours)}.values()
    expected = dispersion_estimate(np.concatenate([state.vectors["last"] for state in states]))
    for name in {sample["filter"] for sample in results["samples"][ours]}:
        figures = [results["results"][ours][f"dispersion{part},{name}"] for part in ("", "_stderr")]
        assert figures == pytest.approx([expected.mean, expected.se], rel=1e-9, nan_ok=True)


@pytest.mark.parametrize(
    ("task", "family", "settings"),
    [
        ("arc_easy", "arc", {}),
        ("arc_challenge", "arc", {"num_fewshot": 1}),
        ("mmlu_anatomy", "mmlu", {"num_fewshot": 2}),
        ("hellaswag", "hellaswag", {"apply_chat_template": True}),
        ("truthfulqa_mc1", "truthfulqa", {}),
        ("metabench_winogrande", "metabench", {}),
        ("gsm8k", "gsm8k", {"gen_kwargs": {"max_gen_toks": 8}, "num_fewshot": 1}),
        ("ifeval", "ifeval", {"gen_kwargs": {"max_gen_toks": 8}}),
        (
            "humaneval",
            "humaneval",
            {"gen_kwargs": {"max_gen_toks": 480}, "confirm_run_unsafe_code": True},
        ),
        ("wikitext", "wikitext", {}),
        ("quail", "", {}),
    ],
)
def test_answers_are_the_stock_tasks_own_and_its_samples_give_the_same_store(
    task, family, settings, world, stock, from_samples, model_folder, tmp_path
):
    ours, lm, layers = f"{task}_dispersion", from_folder(model_folder), "last+layer.0.attn"
    options = {"families": (family,) if family else (), **settings}
    logged, plain = stock(task, **options)
    check_same(
        ours, task, world.run(lm, ours, store=tmp_path / "ours", layers=layers, **options), plain
    )
    assert not hooks_left(lm.model)
    assert not {"_model_call", "_loglikelihood_tokens", "tok_encode", "_model_generate"} & set(
        lm.__dict__
    )

    expected, store = read_store(tmp_path / "ours"), from_samples(logged, layers=layers)
    check_same_store(store, expected)
    perplexities = (s.documents["query_perplexity"].tolist() for s in (store, expected))
    np.testing.assert_allclose(*perplexities, rtol=1e-4)
    for key in (
        "layers",
        "prompt_format",
        "tasks",
        "num_fewshot",
        "chat_template",
        "default_layer",
    ):
        assert store.manifest[key] == expected.manifest[key], key
    assert store.manifest["figures"]["correct_by"] == expected.manifest["figures"]["correct_by"]
    assert expected.documents["truncated"].any() == (task == "humaneval")
    checked = store.manifest["samples"]
    assert checked.get("first_token_agreement", 1.0) > 0.8  # a token may be half a character
    assert checked.get("logprob_difference_max", 0.0) < 1e-3


def test_predict_only_is_the_stock_task(world):
    results = world.run(world.lm(), predict_only=True)
    assert "dispersion" not in results["samples"][ARC][0]
    assert not any("dispersion" in key for key in results["results"][ARC])


def test_the_recipe_for_any_task_and_plain_loglikelihoods(world, tmp_path):
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
