"""The table "What G reads and what it leaves out" of docs/explanation/gap.md: every row on a tiny model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from hub_client import read_folder
from lmeval_screener import screen
from lmeval_screener.errors import ScreeningError
from lmeval_screener.weights.architectures import choose_tensor
from safetensors.torch import load_file
from test_figures import TOKENIZER
from test_figures import V as WORDS

V, D = 48, 16
SHAPE = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
CAPPED = {"head_dim": 8, "final_logit_softcapping": 0.5}
UNTIED = {"tie_word_embeddings": False}
IDS = torch.tensor([[3, 9, 4, 17]])


def build(name, **settings):
    """A model of transformers by the stem of its class, with numbers that nothing shares by chance."""
    torch.manual_seed(0)
    kind = f"{name}{'Text' if name == 'Gemma3' else ''}Config"
    config = getattr(transformers, kind)(**SHAPE | settings)
    return moved(getattr(transformers, f"{name}ForCausalLM")(config).eval())


def moved(model):
    """Every vector away from zeros and ones, so that leaving it out shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def logits(model):
    """The states before the head, and what the model makes of them."""
    seen = []
    hook = model.get_output_embeddings().register_forward_hook(
        lambda _m, inputs, _o: seen.append(inputs[0])
    )
    with torch.no_grad():
        out = model(input_ids=IDS).logits
    hook.remove()
    return seen[0][0].double().numpy(), out[0].double().numpy()


def close(found, expected):
    return np.allclose(found, expected, atol=1e-5, rtol=1e-5)


def test_a_folded_final_norm_moves_g_and_not_the_ratio(tmp_path):
    """γ multiplied into the rows: the same logits, other rows; the ratio is of γ ∘ row in both."""
    plain = build("Llama", vocab_size=WORDS, **UNTIED)
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
    assert [c.copy_of for c in result.groups[0].checkpoints] == [None, "plain"]


@pytest.mark.parametrize(
    ("name", "settings", "left_out"),
    [
        ("Cohere", {"logit_scale": 0.25}, lambda scores, _: scores * 0.25),
        ("Granite", {"logits_scaling": 8.0}, lambda scores, _: scores / 8),
        ("Gemma2", CAPPED, lambda scores, _: np.tanh(scores * 2) / 2),
        ("Phi", UNTIED, lambda scores, stored: scores + stored["lm_head.bias"].double().numpy()),
        ("Mixtral", UNTIED | {"num_local_experts": 2, "num_experts_per_tok": 1}, None),
        ("Qwen2Moe", UNTIED | EXPERTS | {"shared_expert_intermediate_size": 8}, None),
        ("Olmoe", EXPERTS | {"tie_word_embeddings": True}, None),
        # Their layers see √d times the row, the head the row itself.
        ("Gemma", {"head_dim": 8}, None),
        ("Gemma2", CAPPED | {"final_logit_softcapping": None}, None),
        ("Gemma3", {"head_dim": 8}, None),
    ],
)
def test_factors_caps_biases_and_scales_of_the_input_are_left_out_and_experts_have_one_head(
    tmp_path, name, settings, left_out
):
    model = build(name, **settings)
    model.save_pretrained(tmp_path)
    states, out = logits(model)
    found = read_folder(tmp_path, range(V))
    scores = states @ found.rows.T
    assert close(scores, out) is (left_out is None)
    if left_out is not None:
        assert close(left_out(scores, load_file(tmp_path / "model.safetensors")), out)
    assert found.projection.tied is model.config.tie_word_embeddings


@pytest.mark.parametrize("outside", [{}, UNTIED, {"tie_word_embeddings": True}])
@pytest.mark.parametrize("inside", [{}, UNTIED, {"tie_word_embeddings": True}])
def test_wrappers_and_what_their_nested_configuration_says(tmp_path, inside, outside):
    """The language model's head, tied or not as transformers ties it, whatever the two levels say."""
    vision = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vision |= {"image_size": 8, "patch_size": 4, "projection_dim": 8}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**SHAPE | inside),
        vision_config=transformers.CLIPVisionConfig(**vision),
        image_token_index=V - 1,
        **outside,
    )
    torch.manual_seed(0)
    moved(transformers.LlavaForConditionalGeneration(config)).save_pretrained(tmp_path)
    theirs = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path).eval()
    found = read_folder(tmp_path, range(V))
    np.testing.assert_array_equal(
        found.rows, theirs.get_output_embeddings().weight.detach().numpy()
    )
    assert found.projection.tied is (
        theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
    )
    states, out = logits(theirs)
    assert close(states @ found.rows.T, out)


HEAD = "model.transformer.ff_out.weight"
EMBEDDING = "model.transformer.wte.weight"


@pytest.mark.parametrize(
    ("weight_tying", "stored", "read"),
    [
        (True, [], EMBEDDING),
        (False, [HEAD], HEAD),
        (False, [], None),
    ],
)
def test_hf_olmos_own_word_for_tying(weight_tying, stored, read):
    """As its class is built: `ff_out` exists unless `weight_tying`; the blocks' own `ff_out` is no head."""
    # The other word is one that its class does not look at, as transformers 4 may have written it.
    config = {
        "model_type": "hf_olmo",
        "weight_tying": weight_tying,
        "tie_word_embeddings": not weight_tying,
    }
    names, warnings = [EMBEDDING, "model.transformer.blocks.0.ff_out.weight", *stored], []
    if read is None:
        with pytest.raises(ScreeningError, match="embeddings are not tied"):
            choose_tensor(names, config, warnings)
    else:
        assert choose_tensor(names, config, warnings) == (read, weight_tying)
        assert warnings == []
