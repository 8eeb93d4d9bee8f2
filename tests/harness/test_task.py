"""Dispersion tasks inside lm-eval: vectors against the model run alone, answers against the stock task."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from harness_world import evaluate, hflm, reference, tiny_llama

from lmeval_dispersion.errors import HarnessError, UsageError
from lmeval_dispersion.geometry import dispersion, dispersion_estimate
from lmeval_dispersion.harness import install
from lmeval_dispersion.harness.states import DocRecord
from lmeval_dispersion.store import read_store

pytestmark = [
    pytest.mark.usefixtures("in_world"),
    pytest.mark.filterwarnings("ignore"),  # lm-eval, datasets and transformers warn about themselves
]

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}
KV = {"num_key_value_heads": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": SIZES | {"tie_word_embeddings": True},
    "Qwen2": SIZES | KV,
    "Qwen3": SIZES | KV | {"head_dim": 8},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 2048},
    "GPTNeoX": SIZES,
    "Gemma2": SIZES | KV | {"head_dim": 8},
    "Gemma3Text": SIZES | KV | {"head_dim": 8},
    "Mistral": SIZES | KV,
    "Olmo2": SIZES,
    "Phi": SIZES,
    "Mixtral": SIZES | KV | {"num_local_experts": 4},
}


def records(results: Any, task: str) -> list[DocRecord]:
    found = [sample["dispersion"] for sample in results["samples"][task]]
    assert all(isinstance(record, DocRecord) for record in found)
    return found


def check_vectors(lm: Any, results: Any, task: str, layer: str = "last") -> None:
    """Every captured vector equals the model on the unpadded prompt alone; so does the query's perplexity."""
    samples = results["samples"][task]
    assert samples
    for sample in samples:
        state = sample["dispersion"].state
        context, continuation = sample["arguments"][0]
        vector, logprobs = reference(lm, context, continuation, layer)
        assert state.vectors[layer].shape == (1, len(vector))
        np.testing.assert_allclose(state.vectors[layer][0], vector, atol=1e-5, rtol=0)
        assert state.prompt_tokens == [len(logprobs) + 1] or state.truncated == [True]
        if state.query:
            tokens = len(lm.tok_encode(context.rstrip()[: context.rindex(state.query)] or ""))
            own = logprobs[max(tokens, 1) - 1 :]
            if state.truncated == [False] and context.rstrip().endswith(state.query.rstrip()):
                assert state.perplexity[0] == pytest.approx(math.exp(-float(np.mean(own))), rel=1e-4)


@pytest.mark.parametrize("batch_size", [1, 7, "auto"])
def test_vectors_equal_the_model_alone_whatever_the_batch(
    batch_size: Any, tokenizer: Any, task_manager: Callable[..., Any]
) -> None:
    lm = hflm(tiny_llama(tokenizer), tokenizer, batch_size=batch_size, max_batch_size=4, max_length=256)
    manager = task_manager(dispersion_layers="last+layer.0.attn")
    tasks = ["arc_easy_dispersion", "mmlu_astronomy_dispersion"]
    results = evaluate(lm, tasks, manager)
    for task in tasks:
        check_vectors(lm, results, task)
        check_vectors(lm, results, task, "layer.0.attn")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_vectors_equal_the_model_alone_in_every_architecture(
    architecture: str, tokenizer: Any, task_manager: Callable[..., Any]
) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(
        **ARCHITECTURES[architecture],
        vocab_size=len(tokenizer),
        pad_token_id=2,
        eos_token_id=1,
        bos_token_id=1,
    )
    lm = hflm(transformers.AutoModelForCausalLM.from_config(config).eval(), tokenizer)
    results = evaluate(lm, ["arc_easy_dispersion"], task_manager(), limit=5)
    check_vectors(lm, results, "arc_easy_dispersion")


def test_truncated_few_shot_and_chat_prompts(
    tokenizer: Any, task_manager: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_llama(tokenizer)
    short = hflm(model, tokenizer, max_length=40)
    results = evaluate(short, ["mmlu_astronomy_dispersion"], task_manager())
    found = records(results, "mmlu_astronomy_dispersion")
    assert all(record.state.truncated == [True] for record in found)
    assert results["configs"]["mmlu_astronomy_dispersion"]["metadata"]["dispersion"]["truncated"] == len(
        found
    )
    assert "prompts were longer than the model's context" in caplog.text
    check_vectors(short, results, "mmlu_astronomy_dispersion")
    lm = hflm(model, tokenizer)
    for settings in ({"num_fewshot": 2}, {"apply_chat_template": True, "num_fewshot": 1}):
        results = evaluate(lm, ["mmlu_astronomy_dispersion"], task_manager(), **settings)
        check_vectors(lm, results, "mmlu_astronomy_dispersion")
        for record in records(results, "mmlu_astronomy_dispersion"):
            assert record.state.query is not None
            assert record.state.query.endswith("\nAnswer:")


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
    for mine, theirs in zip(results["samples"][ours], plain["samples"][stock], strict=True):
        for key in ("doc_id", "doc_hash", "prompt_hash", "target_hash", "resps", "filtered_resps", "filter"):
            assert mine[key] == theirs[key], key
        for metric in theirs["metrics"]:
            assert mine[metric] == theirs[metric]
    for key, value in plain["results"][stock].items():
        if "," in key:
            assert results["results"][ours][key] == value, key
    assert results["versions"][ours] == plain["versions"][stock]
    figure = results["results"][ours]
    filters = {sample["filter"] for sample in results["samples"][ours]}
    for name in filters:
        rows = np.concatenate([r.state.vectors["last"] for r in unique(records(results, ours))])
        assert figure[f"dispersion,{name}"] == pytest.approx(dispersion(rows), rel=1e-9)
        assert figure[f"dispersion_stderr,{name}"] == pytest.approx(
            dispersion_estimate(rows).se, rel=1e-9, nan_ok=True
        )
    assert not hooks_left(lm.model)
    assert not {"_model_call", "_loglikelihood_tokens", "tok_encode", "_model_generate"} & set(lm.__dict__)


def unique(found: list[DocRecord]) -> list[DocRecord]:
    return list({record.doc_id: record for record in found}.values())


def hooks_left(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_generation_is_seen_after_the_prompt(tokenizer: Any, task_manager: Callable[..., Any]) -> None:
    lm = hflm(tiny_llama(tokenizer), tokenizer, batch_size=3, max_length=300)
    settings = {"gen_kwargs": {"max_gen_toks": 250}}
    results = evaluate(lm, ["ifeval_dispersion"], task_manager(), **settings)
    for sample in results["samples"]["ifeval_dispersion"]:
        state = sample["dispersion"].state
        tokens = lm.tok_encode(sample["arguments"][0][0])
        assert state.prompt_tokens == [len(tokens)]
        assert state.truncated == [len(tokens) > 50]
        vector = hidden(lm, tokens[-50:], "last")[-1]
        np.testing.assert_allclose(state.vectors["last"][0], vector, atol=1e-5, rtol=0)
        assert math.isnan(state.perplexity[0])


def hidden(lm: Any, tokens: list[int], layer: str) -> Any:
    assert layer == "last"
    with torch.no_grad():
        return lm.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0].numpy()


def test_rolling_requests_give_every_segments_last_state_and_perplexity(
    tokenizer: Any, task_manager: Callable[..., Any], tmp_path: Path
) -> None:
    lm = hflm(tiny_llama(tokenizer), tokenizer, batch_size=3, max_length=128)
    results = evaluate(lm, ["wikitext_dispersion"], task_manager(dispersion_store=str(tmp_path)))
    documents = read_store(tmp_path).documents
    assert documents["doc_id"].tolist() == list(range(len(documents)))
    for sample in results["samples"]["wikitext_dispersion"]:
        state = sample["dispersion"].state
        tokens = lm.tok_encode(sample["arguments"][0][0])
        own = documents[documents["document"] == sample["doc_id"]]
        assert own["segment"].tolist() == list(range(len(state.perplexity)))
        assert own["query_perplexity"].tolist() == state.perplexity
        assert own["correct"].isna().all()
        assert len(state.perplexity) == len(state.prompt_tokens) == math.ceil(len(tokens) / 128)
        assert sum(state.prompt_tokens) == len(tokens)
        total = -sum(n * math.log(p) for n, p in zip(state.prompt_tokens, state.perplexity, strict=True))
        assert total == pytest.approx(sample["resps"][0][0], rel=1e-6)
        first = hidden(lm, ([lm.prefix_token_id, *tokens])[:128], "last")[min(127, len(tokens) - 1)]
        np.testing.assert_allclose(state.vectors["last"][0], first, atol=1e-5, rtol=0)


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


def test_samples_limit_and_true_document_ids(
    tokenizer: Any, task_manager: Callable[..., Any], tmp_path: Path
) -> None:
    lm = hflm(tiny_llama(tokenizer), tokenizer)
    manager = task_manager(dispersion_store=str(tmp_path / "some"))
    evaluate(lm, ["arc_easy_dispersion"], manager, samples={"arc_easy_dispersion": [1, 4, 6]})
    some = read_store(tmp_path / "some").documents
    assert some["doc_id"].tolist() == [1, 4, 6]
    evaluate(lm, ["arc_easy_dispersion"], task_manager(dispersion_store=str(tmp_path / "all")))
    every = read_store(tmp_path / "all").documents.set_index("doc_id")
    assert some["doc_hash"].tolist() == every.loc[[1, 4, 6], "doc_hash"].tolist()
    evaluate(lm, ["arc_easy_dispersion"], task_manager(dispersion_store=str(tmp_path / "two")), limit=2)
    assert read_store(tmp_path / "two").documents["doc_id"].tolist() == [0, 1]


def test_caches_of_answers_and_of_requests_change_nothing(
    tokenizer: Any, task_manager: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval.caching.cache as cache

    monkeypatch.setattr(cache, "PATH", str(tmp_path / "requests"))
    lm = hflm(tiny_llama(tokenizer), tokenizer)
    settings = {"use_cache": str(tmp_path / "answers"), "cache_requests": True}
    figures = []
    for _ in range(2):  # the second run hits both caches
        results = evaluate(lm, ["arc_easy_dispersion"], task_manager(), **settings)
        check_vectors(lm, results, "arc_easy_dispersion")
        figures.append(results["results"]["arc_easy_dispersion"]["dispersion,none"])
    assert figures[0] == figures[1]
    assert list((tmp_path / "requests").glob("*arc_easy_dispersion*"))
    assert list(tmp_path.glob("answers*.db"))


def test_predict_only_is_the_stock_task(tokenizer: Any, task_manager: Callable[..., Any]) -> None:
    lm = hflm(tiny_llama(tokenizer), tokenizer)
    results = evaluate(lm, ["arc_easy_dispersion"], task_manager(), predict_only=True)
    sample = results["samples"]["arc_easy_dispersion"][0]
    assert "dispersion" not in sample
    assert not any("dispersion" in key for key in results["results"]["arc_easy_dispersion"])


def test_peft_and_bfloat16_match(tokenizer: Any, task_manager: Callable[..., Any]) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    base = tiny_llama(tokenizer)
    lora = peft.get_peft_model(
        base, peft.LoraConfig(target_modules=["q_proj", "lm_head"], r=2, init_lora_weights=False)
    ).eval()
    lm = hflm(lora, tokenizer)
    check_vectors(lm, evaluate(lm, ["arc_easy_dispersion"], task_manager()), "arc_easy_dispersion")
    half = hflm(tiny_llama(tokenizer).to(torch.bfloat16), tokenizer)
    results = evaluate(half, ["arc_easy_dispersion"], task_manager())
    for sample in results["samples"]["arc_easy_dispersion"]:
        vector, _ = reference(half, *sample["arguments"][0], "last")
        found = sample["dispersion"].state.vectors["last"][0]
        assert np.linalg.norm(found - vector) < 0.02 * np.linalg.norm(vector)


def test_prompt_tuning_shifts_positions(tokenizer: Any, task_manager: Callable[..., Any]) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    lm = hflm(peft.get_peft_model(tiny_llama(tokenizer), config).eval(), tokenizer, batch_size=3)
    alone = hflm(lm._model, tokenizer, batch_size=1)
    first = evaluate(lm, ["arc_easy_dispersion"], task_manager())
    second = evaluate(alone, ["arc_easy_dispersion"], task_manager())
    for a, b in zip(
        records(first, "arc_easy_dispersion"), records(second, "arc_easy_dispersion"), strict=True
    ):
        np.testing.assert_allclose(a.state.vectors["last"], b.state.vectors["last"], atol=1e-5)
        embedded = lm._model.get_prompt(1)
        tokens = torch.tensor(
            [lm.tok_encode(first["samples"]["arc_easy_dispersion"][a.doc_id]["arguments"][0][0])]
        )
        states = torch.cat([embedded, lm._model.get_base_model().get_input_embeddings()(tokens)], dim=1)
        with torch.no_grad():
            out = lm._model.get_base_model()(inputs_embeds=states, output_hidden_states=True)
        np.testing.assert_allclose(
            a.state.vectors["last"][0], out.hidden_states[-1][0, -1].numpy(), atol=1e-5
        )


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


def test_wrong_layers_and_finished_stores_are_refused_before_the_model_runs(
    tokenizer: Any, task_manager: Callable[..., Any], tmp_path: Path
) -> None:
    lm = hflm(tiny_llama(tokenizer), tokenizer)
    calls = []
    lm.model.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(UsageError, match=r"expected layers among last, norm, embeddings, layer\.0"):
        evaluate(lm, ["arc_easy_dispersion"], task_manager(dispersion_layers="layer.9"))
    assert not calls
    manager = task_manager(dispersion_store=str(tmp_path))
    evaluate(lm, ["arc_easy_dispersion"], manager, limit=2)
    calls.clear()
    with pytest.raises(UsageError, match="holds a finished store already"):
        evaluate(lm, ["arc_easy_dispersion"], manager, limit=2)
    assert not calls


def test_models_without_states_are_refused_before_any_request(task_manager: Callable[..., Any]) -> None:
    from lm_eval.api.registry import get_model

    dummy = get_model("dummy")()
    with pytest.raises(
        HarnessError, match="needs hidden states, which DummyLM does not give; use --model hf"
    ):
        evaluate(dummy, ["arc_easy_dispersion"], task_manager())


def test_encoder_decoders_are_refused(tokenizer: Any, task_manager: Callable[..., Any]) -> None:
    config = transformers.T5Config(
        vocab_size=len(tokenizer), d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2
    )
    lm = hflm(transformers.T5ForConditionalGeneration(config).eval(), tokenizer)
    with pytest.raises(HarnessError, match="needs a decoder-only model, got an encoder-decoder"):
        evaluate(lm, ["arc_easy_dispersion"], task_manager())


def test_a_backend_that_runs_requests_otherwise_ends_the_run_loudly(
    tokenizer: Any, task_manager: Callable[..., Any]
) -> None:
    from lm_eval.models.huggingface import HFLM

    class Elsewhere(HFLM):  # type: ignore[misc]
        """Scores without the model: what a later lm-eval with another way of running would look like."""

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return [(-1.0, False)] * len(requests)

    lm = Elsewhere(pretrained=tiny_llama(tokenizer), tokenizer=tokenizer)
    with pytest.raises(
        HarnessError, match=r"the states of 8 of 8 requests were not seen: lm-eval .* use lm-eval"
    ):
        evaluate(lm, ["arc_easy_dispersion"], task_manager())
    assert not hooks_left(lm.model)


def test_an_lm_eval_without_what_recording_stands_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.models.huggingface import HFLM

    from lmeval_dispersion.harness import backend

    monkeypatch.delattr(HFLM, "_select_cont_toks")
    with pytest.raises(
        HarnessError, match=r"has no HFLM\._select_cont_toks, which dispersion tasks need; install"
    ):
        backend.install()


def test_a_full_disk_costs_the_store_and_not_the_run(
    tokenizer: Any, task_manager: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from lmeval_dispersion.harness import run_store

    lm = hflm(tiny_llama(tokenizer), tokenizer)
    folder = tmp_path / "arc_easy_dispersion"
    blocked = folder / f".vectors.safetensors.{os.getpid()}.tmp"
    (blocked / "in the way").mkdir(parents=True)
    try:
        results = evaluate(lm, ["arc_easy_dispersion"], task_manager(dispersion_store=str(tmp_path)))
        assert run_store.failures == [folder]
    finally:
        run_store.failures.clear()
    assert math.isfinite(results["results"]["arc_easy_dispersion"]["dispersion,none"])
    assert results["configs"]["arc_easy_dispersion"]["metadata"]["dispersion"]["store"] is None
    assert "could not be written" in caplog.text
    with pytest.raises(UsageError, match="partial"):
        read_store(folder)


FULL_DISK = """
import resource, sys
import numpy as np
from lmeval_dispersion.harness import run_store
from lmeval_dispersion.harness.states import DocRecord, DocState
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # as a disk with 50 kB left
state = [DocState(i, {}, [3], [False], [2.0], "h") for i in range(2000)]
records = [DocRecord(s, s.doc_id, 1.0, None, None, [], "d", None) for s in state]
vectors = {"last": np.ones((2000, 32), dtype=np.float32)}
folder = run_store.Path(sys.argv[1])
run_store.begin(folder)
assert run_store.write(folder, "t", records, vectors, {}, None) is None
assert run_store.failures == [folder]
"""


def test_a_store_that_does_not_fit_is_partial(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "store")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "could not be written" in done.stderr
    assert not list((tmp_path / "store").glob("*.tmp"))
    with pytest.raises(UsageError, match="partial"):
        read_store(tmp_path / "store")


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
    manager = task_manager("llama3/instruct/mmlu_th")
    tasks = ["quail_dispersion", "m_mmlu_dispersion", "truthfulqa_mc1_dispersion", "arc_challenge_dispersion"]
    results = evaluate(lm, tasks, manager, limit=3)
    assert results["groups"]["m_mmlu_dispersion"]["sample_len"] == 18
    for task in tasks:
        assert math.isfinite(results["results"][task]["dispersion,none"])
    settings = {"gen_kwargs": {"max_gen_toks": 2}, "apply_chat_template": True}
    thai = evaluate(lm, ["mmlu_th_llama_dispersion"], manager, limit=1, **settings)
    assert len(thai["samples"]) == 57
    group = thai["groups"]["mmlu_th_llama_dispersion"]
    rows = np.concatenate([r.state.vectors["last"] for t in thai["samples"] for r in records(thai, t)])
    assert group["dispersion,strict_match"] == pytest.approx(dispersion(rows), rel=1e-9)


def test_a_model_spread_over_devices(
    tokenizer: Any, task_manager: Callable[..., Any], tmp_path: Path
) -> None:
    import accelerate

    # Without GPUs, "disk" is the second device: accelerate's hooks move weights and inputs all the same.
    model = accelerate.dispatch_model(
        tiny_llama(tokenizer),
        {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu"}
        | {"model.layers.0": "cpu", "model.layers.1": "disk", "lm_head": "disk"},
        main_device="cpu",
        offload_dir=str(tmp_path),
    )
    lm = hflm(model, tokenizer)
    results = evaluate(lm, ["arc_easy_dispersion"], task_manager(dispersion_layers="last+layer.1.attn"))
    check_vectors(lm, results, "arc_easy_dispersion")
    plain = hflm(tiny_llama(tokenizer), tokenizer)
    expected = evaluate(plain, ["arc_easy_dispersion"], task_manager(dispersion_layers="layer.1.attn"))
    for mine, theirs in zip(
        records(results, "arc_easy_dispersion"), records(expected, "arc_easy_dispersion"), strict=True
    ):
        np.testing.assert_allclose(
            mine.state.vectors["layer.1.attn"], theirs.state.vectors["layer.1.attn"], atol=1e-5
        )
