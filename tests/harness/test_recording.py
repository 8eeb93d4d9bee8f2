"""Recorded states: every vector against the model run alone, on the unpadded prompt."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from harness_world import check_vectors, evaluate, hflm, hidden, records, reference, tiny_llama

from lmeval_dispersion.store import read_store

pytestmark = pytest.mark.usefixtures("in_world")
peft_asks_transformers = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is:FutureWarning")


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
    "Qwen2Moe": SIZES
    | KV
    | {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
}


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
            assert record.columns["text"].endswith("\nAnswer:")


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


@peft_asks_transformers
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


@peft_asks_transformers
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
