"""Recorded states: every vector against the model run alone, unpadded; what gives none is refused."""

import math

import numpy as np
import pytest
import torch
import transformers
from harness_world import ARC, SIZES, alone, check_vectors, hflm, hooks_left, records, tiny_llama

from lmeval_dispersion.errors import HarnessError, UsageError
from lmeval_dispersion.harness import recording
from lmeval_dispersion.harness.records import Prompt
from lmeval_dispersion.model.loading import load_model
from lmeval_dispersion.store import read_store

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is:FutureWarning"
)  # peft's

ARCHITECTURES = (
    "Llama",
    "Qwen2",
    "Qwen3",
    "GPT2",
    "GPTNeoX",
    "Gemma2",
    "Gemma3Text",
    "Mistral",
    "Olmo2",
    "Phi",
)
MIXTURES = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}


@pytest.mark.parametrize("batch_size", [1, "auto"])
def test_vectors_equal_the_model_alone_whatever_the_batch(batch_size, world):
    lm = world.lm(batch_size=batch_size, max_batch_size=4, max_length=256)
    tasks = (ARC, "mmlu_astronomy_dispersion")
    results = world.run(lm, *tasks, layers="last+layer.0.attn")
    for task in tasks:
        for layer in ("last", "layer.0.attn"):
            check_vectors(lm, results, task, layer)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "Mixtral", "Qwen2Moe"])
def test_vectors_equal_the_model_alone_in_every_architecture(architecture, world):
    torch.manual_seed(0)
    special = {
        "pad_token_id": 2,
        "eos_token_id": 1,
        "bos_token_id": 1,
        "vocab_size": len(world.tokenizer),
    }
    heads = {"num_key_value_heads": 2, "head_dim": 8}
    config = getattr(transformers, f"{architecture}Config")(**SIZES, **heads, **MIXTURES, **special)
    lm = world.lm(transformers.AutoModelForCausalLM.from_config(config).eval())
    check_vectors(lm, world.run(lm, limit=5))


def test_truncated_few_shot_and_chat_prompts(world, caplog):
    task = "mmlu_astronomy_dispersion"
    short = world.lm(max_length=40)
    results = world.run(short, task)
    states = [record.state for record in records(results, task)]
    assert all(state.truncated == [True] for state in states)
    assert results["configs"][task]["metadata"]["dispersion"]["truncated"] == len(states)
    assert "prompts exceeded the model's context" in caplog.text
    check_vectors(short, results, task)
    lm = world.lm()
    for settings in ({"num_fewshot": 2}, {"apply_chat_template": True, "num_fewshot": 1}):
        results = world.run(lm, task, **settings)
        check_vectors(lm, results, task)
        assert all(
            record.columns["text"].endswith("\nAnswer:") for record in records(results, task)
        )


def test_generation_is_seen_after_the_prompt(world):
    lm = world.lm(batch_size=3, max_length=300)
    results = world.run(lm, "ifeval_dispersion", gen_kwargs={"max_gen_toks": 250})
    for sample in results["samples"]["ifeval_dispersion"]:
        state = sample["dispersion"].state
        tokens = lm.tok_encode(sample["arguments"][0][0])
        assert state.prompt_tokens == [len(tokens)]
        assert state.truncated == [len(tokens) > 50]
        vector, _ = alone(lm, tokens[-50:])
        np.testing.assert_allclose(state.vectors["last"][0], vector, atol=1e-5, rtol=0)
        assert math.isnan(state.perplexity[0])


def test_rolling_requests_give_every_segments_last_state_and_perplexity(world, tmp_path):
    lm = world.lm(batch_size=3, max_length=128)
    results = world.run(lm, "wikitext_dispersion", store=tmp_path)
    documents = read_store(tmp_path).documents
    assert documents["doc_id"].tolist() == list(range(len(documents)))
    for sample in results["samples"]["wikitext_dispersion"]:
        state = sample["dispersion"].state
        tokens = lm.tok_encode(sample["arguments"][0][0])
        rows = documents[documents["document"] == sample["doc_id"]]
        assert rows["segment"].tolist() == list(range(len(state.perplexity)))
        assert rows["query_perplexity"].tolist() == state.perplexity
        assert rows["correct"].isna().all()
        assert len(state.perplexity) == len(state.prompt_tokens) == math.ceil(len(tokens) / 128)
        assert sum(state.prompt_tokens) == len(tokens)
        total = -sum(
            n * math.log(p) for n, p in zip(state.prompt_tokens, state.perplexity, strict=True)
        )
        assert total == pytest.approx(sample["resps"][0][0], rel=1e-6)
        first, _ = alone(lm, [lm.prefix_token_id, *tokens][: min(128, len(tokens))])
        np.testing.assert_allclose(state.vectors["last"][0], first, atol=1e-5, rtol=0)


def test_peft_prompt_tuning_and_bfloat16_match(world):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    lora = peft.LoraConfig(target_modules=["q_proj", "lm_head"], r=2, init_lora_weights=False)
    # Prompt tuning shifts all positions by its virtual tokens.
    tuning = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    for config in (lora, tuning):
        lm = world.lm(peft.get_peft_model(tiny_llama(world.tokenizer), config).eval())
        check_vectors(lm, world.run(lm))
    half = world.lm(tiny_llama(world.tokenizer).to(torch.bfloat16))
    check_vectors(half, world.run(half), within=0.02)


def test_a_model_spread_over_devices(world, tmp_path):
    import accelerate

    # Without GPUs, "disk" is the second device: accelerate's hooks move weights and inputs all the same.
    model = accelerate.dispatch_model(
        tiny_llama(world.tokenizer),
        {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu"}
        | {"model.layers.0": "cpu", "model.layers.1": "disk", "lm_head": "disk"},
        main_device="cpu",
        offload_dir=str(tmp_path),
    )
    lm = world.lm(model)
    results = world.run(lm, layers="last+layer.1.attn")
    check_vectors(lm, results)
    check_vectors(world.lm(), results, layer="layer.1.attn")


@pytest.mark.parametrize("how", [pytest.param("wrapped", marks=pytest.mark.slow), "in place"])
def test_compiled_models_give_their_states(how, world):
    model = tiny_llama(world.tokenizer)
    run = model
    if how == "wrapped":
        run = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    run(torch.tensor([[1, 2, 3]]))  # compiled before anything is hooked
    lm = world.lm(run)
    for _ in range(2):
        results = world.run(lm, limit=3)
        # The check asks for hidden states, and transformers leaves hooks of its own for that.
        assert hooks_left(model) <= {"transformers.utils.output_capturing"}
        check_vectors(lm, results)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_weights_in_few_bits_give_their_own_states(bits, world, tmp_path):
    # The 4-bit kernel of the CPU takes widths that are multiples of 64 only.
    tiny_llama(world.tokenizer, hidden_size=64, intermediate_size=128).save_pretrained(
        tmp_path / "plain"
    )
    world.tokenizer.save_pretrained(tmp_path / "plain")
    load_model(tmp_path / "plain", quantize=bits, device="cpu").model.save_pretrained(
        tmp_path / "few"
    )
    world.tokenizer.save_pretrained(tmp_path / "few")
    lm = hflm(
        str(tmp_path / "few"), None, device="cpu", dtype="float32", batch_size=1, max_length=512
    )
    part = lm.model.model.layers[0].mlp.up_proj
    assert "bit" in type(part).__name__
    # In 8 bits, columns with an outlier in any token of a pass stay in 16 bits for all of its tokens: a
    # state depends a little on the answer behind it, which the prompt alone does not have.
    check_vectors(lm, world.run(lm, limit=3), within=0.05 if bits == "8bit" else None)


def test_models_with_eyes_read_texts(world, tmp_path):
    from lm_eval.models.hf_vlms import HFMultimodalLM

    torch.manual_seed(0)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=world.tokenizer.backend_tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**SIZES, image_size=28, patch_size=14),
        text_config=tiny_llama(tokenizer).config,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    images = transformers.CLIPImageProcessor(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
    )
    transformers.LlavaForConditionalGeneration(config).eval().save_pretrained(tmp_path)
    transformers.LlavaProcessor(images, tokenizer, patch_size=14).save_pretrained(tmp_path)
    lm = HFMultimodalLM(str(tmp_path), device="cpu", dtype="float32", batch_size=3, max_length=512)
    check_vectors(lm, world.run(lm, limit=4))
    arguments = ("<image> What is it?", {"until": ["\n"], "max_gen_toks": 4}, {"visual": [None]})
    for kind in ("loglikelihood", "generate_until"):
        with pytest.raises(
            HarnessError, match="t has images in its prompts, whose states cannot be recorded"
        ):
            getattr(lm, f"dispersion_{kind}")([Prompt(arguments, None, "t", ("last",))])


def test_runs_that_cannot_work_are_refused_before_the_model_runs(world, tmp_path):
    from lm_eval.api.registry import get_model

    lm, calls = world.lm(), []
    world.run(lm, store=tmp_path, limit=2)
    lm.model.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(UsageError, match=r"expected layers among last, norm, embeddings, layer\.0"):
        world.run(lm, layers="layer.9")
    with pytest.raises(UsageError, match="already holds a finished store"):
        world.run(lm, store=tmp_path, limit=2)
    assert not calls
    with pytest.raises(
        HarnessError, match="hidden states, which DummyLM does not give; use the model hf"
    ):
        world.run(get_model("dummy")())
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(vocab_size=len(world.tokenizer), **sizes)
    with pytest.raises(HarnessError, match="needs a decoder-only model, got an encoder-decoder"):
        world.run(world.lm(transformers.T5ForConditionalGeneration(config).eval()))


def test_an_lm_eval_that_runs_requests_otherwise_or_lacks_a_method_is_refused(world, monkeypatch):
    from lm_eval.models.huggingface import HFLM

    def without_the_model(_, requests, **__):
        return [(-1.0, False)] * len(requests)

    lm = world.lm()
    monkeypatch.setattr(HFLM, "_loglikelihood_tokens", without_the_model)
    with pytest.raises(
        HarnessError,
        match=r"8 of 8 hidden states were not captured, because lm-eval .* install lm-eval",
    ):
        world.run(lm)
    assert not hooks_left(lm.model)
    monkeypatch.delattr(HFLM, "_select_cont_toks")
    with pytest.raises(
        HarnessError, match=r"has no HFLM\._select_cont_toks, which dispersion tasks need"
    ):
        recording.prepare_lm_eval()
