"""The table "What G reads and what it leaves out" of docs/explanation/gap.md: every row on a tiny model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from checkpoints import write_checkpoint
from lmeval_screener import screen
from lmeval_screener.checkpoints.snapshots import open_folder
from lmeval_screener.errors import ScreeningError
from lmeval_screener.weights.projection import OutputProjection, find_projection, read_rows
from safetensors.torch import load_file
from test_ratio import TOKENIZER
from test_ratio import V as WORDS

V, D = 48, 16
SHAPE = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IDS = torch.tensor([[3, 9, 4, 17]])


def build(name: str, seed: int = 0, **settings: Any) -> Any:
    """A model of transformers by the stem of its class, with numbers that nothing shares by chance."""
    torch.manual_seed(seed)
    kind = f"{name}{'Text' if name == 'Gemma3' else ''}Config"
    config = getattr(transformers, kind)(**settings)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    return moved(model)


def moved(model: Any) -> Any:
    """Every vector away from zeros and ones, so that leaving it out shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def reading(folder: Path) -> tuple[OutputProjection, np.ndarray]:
    async def work() -> tuple[OutputProjection, np.ndarray]:
        snapshot = open_folder(folder)
        found = await find_projection(snapshot)
        return found, await read_rows(found, list(range(found.shape[0])))

    return asyncio.run(work())


def logits(model: Any, ids: torch.Tensor = IDS) -> tuple[np.ndarray, np.ndarray]:
    """The states before the head, and what the model makes of them."""
    seen: list[torch.Tensor] = []
    hook = model.get_output_embeddings().register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0]))
    with torch.no_grad():
        out = model(input_ids=ids).logits
    hook.remove()
    return seen[0][0].double().numpy(), out[0].double().numpy()


def loaded(folder: Path, name: str) -> Any:
    return getattr(transformers, name).from_pretrained(folder).eval()


def close(found: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.allclose(found, expected, atol=1e-5, rtol=1e-5))


def test_a_folded_final_norm_moves_g_and_not_the_ratio(tmp_path):
    """γ multiplied into the rows: the same logits, other rows; the ratio is of γ ∘ row in both."""
    plain = build("Llama", **SHAPE | {"vocab_size": WORDS, "tie_word_embeddings": False})
    with torch.no_grad():
        plain.model.norm.weight.copy_(torch.rand(D) * 2 + 0.3)
    plain.save_pretrained(tmp_path / "plain")
    before = logits(plain)[1]
    with torch.no_grad():
        plain.lm_head.weight.mul_(plain.model.norm.weight)
        plain.model.norm.weight.fill_(1.0)
    assert close(logits(plain)[1], before)
    plain.save_pretrained(tmp_path / "folded")
    for name in ("plain", "folded"):
        (tmp_path / name / "tokenizer.json").write_bytes(TOKENIZER)
    result = screen([str(tmp_path / "plain"), str(tmp_path / "folded")])
    a, b = sorted(result.checkpoints, key=lambda c: c.repo)
    assert abs(a.gaps["cosine"].mean - b.gaps["cosine"].mean) > 0.01
    assert a.ratio.mean == pytest.approx(b.ratio.mean, abs=1e-5)
    assert not result.groups[0].checkpoints[0].next.separated


@pytest.mark.parametrize(
    ("name", "settings", "factor"),
    [
        ("Cohere", {"logit_scale": 0.25}, 0.25),
        ("Granite", {"logits_scaling": 8.0}, 1 / 8),
    ],
)
def test_a_factor_of_the_logits_is_left_out(tmp_path, name, settings, factor):
    model = build(name, **SHAPE | settings)
    model.save_pretrained(tmp_path)
    states, out = logits(model)
    _, rows = reading(tmp_path)
    assert close(states @ rows.T * factor, out)
    assert not close(states @ rows.T, out)


def test_a_cap_on_the_logits_is_left_out(tmp_path):
    model = build("Gemma2", **SHAPE, head_dim=8, final_logit_softcapping=0.5)
    model.save_pretrained(tmp_path)
    states, out = logits(model)
    _, rows = reading(tmp_path)
    assert close(0.5 * np.tanh(states @ rows.T / 0.5), out)
    assert not close(states @ rows.T, out)


def test_a_bias_of_the_head_is_left_out(tmp_path):
    model = build("Phi", **SHAPE, tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    states, out = logits(model)
    found, rows = reading(tmp_path)
    bias = load_file(tmp_path / "model.safetensors")["lm_head.bias"].double().numpy()
    assert found.name == "lm_head.weight"
    assert close(states @ rows.T + bias, out)
    assert not close(states @ rows.T, out)


@pytest.mark.parametrize("name", ["Gemma", "Gemma2", "Gemma3"])
def test_gemmas_scale_of_its_input_is_left_out(tmp_path, name):
    model = build(
        name, **SHAPE, head_dim=8, **({"final_logit_softcapping": None} if name == "Gemma2" else {})
    )
    model.save_pretrained(tmp_path)
    entered: list[torch.Tensor] = []
    hook = model.model.layers[0].register_forward_pre_hook(
        lambda _m, positional, named: entered.append(positional[0] if positional else named["hidden_states"]),
        with_kwargs=True,
    )
    states, out = logits(model)
    hook.remove()
    found, rows = reading(tmp_path)
    assert found.tied
    assert close(states @ rows.T, out)
    # The layers see √d times the row, the head the row itself.
    assert np.allclose(entered[0][0].detach().numpy(), rows[IDS[0]] * np.sqrt(D), rtol=1e-2)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Mixtral", {"num_local_experts": 2, "num_experts_per_tok": 1, "tie_word_embeddings": False}),
        ("Qwen2Moe", {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
                      "shared_expert_intermediate_size": 8, "tie_word_embeddings": False}),
        ("Olmoe", {"num_experts": 2, "num_experts_per_tok": 1, "tie_word_embeddings": True}),
    ],
)  # fmt: skip
def test_a_mixture_of_experts_has_one_head(tmp_path, name, settings):
    model = build(name, **SHAPE | settings)
    model.save_pretrained(tmp_path)
    states, out = logits(model)
    found, rows = reading(tmp_path)
    assert close(states @ rows.T, out)
    assert found.tied is settings["tie_word_embeddings"]


def llava(tied_inside: bool | None, tied_outside: bool | None) -> Any:
    torch.manual_seed(0)
    text = SHAPE | ({} if tied_inside is None else {"tie_word_embeddings": tied_inside})
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 8, "patch_size": 4, "projection_dim": 8}
    outside = {} if tied_outside is None else {"tie_word_embeddings": tied_outside}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**text),
        vision_config=transformers.CLIPVisionConfig(**vision),
        image_token_index=V - 1,
        **outside,
    )
    return moved(transformers.LlavaForConditionalGeneration(config).eval())


@pytest.mark.parametrize("outside", [True, False, None])
@pytest.mark.parametrize("inside", [True, False, None])
def test_wrappers_and_what_their_nested_configuration_says(tmp_path, inside, outside):
    """The language model's head, tied or not as transformers ties it, whatever the two levels say."""
    model = llava(inside, outside)
    model.save_pretrained(tmp_path)
    theirs = loaded(tmp_path, "LlavaForConditionalGeneration")
    found, rows = reading(tmp_path)
    np.testing.assert_array_equal(rows, theirs.get_output_embeddings().weight.detach().numpy())
    shared = theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
    assert found.tied is shared
    states, out = logits(theirs)
    assert close(states @ rows.T, out)


@pytest.mark.parametrize(
    ("config", "stored", "read"),
    [
        ({"weight_tying": True}, False, "model.transformer.wte.weight"),
        ({"weight_tying": False}, True, "model.transformer.ff_out.weight"),
        ({"weight_tying": False}, False, None),
        # The word that its class does not look at, as transformers 4 may have written it.
        ({"weight_tying": False, "tie_word_embeddings": True}, False, None),
        ({"weight_tying": False, "tie_word_embeddings": True}, True, "model.transformer.ff_out.weight"),
        ({"weight_tying": True, "tie_word_embeddings": False}, False, "model.transformer.wte.weight"),
    ],
)
def test_hf_olmos_own_word_for_tying(tmp_path, config, stored, read):
    """As its class is built: `ff_out` exists unless `weight_tying`; the blocks' own `ff_out` is no head."""
    draw = np.random.default_rng(0)
    tensors = {"model.transformer.wte.weight": ("F32", draw.normal(size=(V, D)))}
    tensors["model.transformer.blocks.0.ff_out.weight"] = ("F32", draw.normal(size=(D, D)))
    if stored:
        tensors["model.transformer.ff_out.weight"] = ("F32", draw.normal(size=(V, D)))
    folder = write_checkpoint(tmp_path / "m", tensors, config={"model_type": "hf_olmo"} | config)
    if read is None:
        with pytest.raises(ScreeningError) as caught:
            reading(folder)
        assert caught.value.code == "NoOutputProjection"
        assert "embeddings are not tied" in str(caught.value)
    else:
        found, rows = reading(folder)
        assert found.name == read
        assert found.warnings == ()
        np.testing.assert_array_equal(rows, tensors[read][1].astype(np.float32))
