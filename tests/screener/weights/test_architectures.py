"""Which rows and which final norm are read of every class that the installed transformers has."""

from __future__ import annotations

import asyncio
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from lmeval_screener.checkpoints.snapshot import open_folder  # noqa: E402
from lmeval_screener.errors import ScreeningError  # noqa: E402
from lmeval_screener.figures import gap, ratio  # noqa: E402
from lmeval_screener.weights.architectures import NORMS, model_types  # noqa: E402
from lmeval_screener.weights.projection import find_projection, read_rows_and_norm  # noqa: E402
from tiny_classes import Case, cases, seen, tiny  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations inside transformers

_MROPE = {"text_config": {"rope_parameters": {"mrope_section": [2, 1, 1]}}}
_OMNI = {"vision_start_token_id": 90, "vision_end_token_id": 91}
_ROPE = {
    f"{kind}_attention": {"rope_type": "default", "rope_theta": 1e4} for kind in ("full", "sliding")
}
_INDEXED = {
    **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8},
    **{
        "indexer_compress_ratio": 4,
        "ple_embed_dim": 32,
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 2,
    },
    "hc_lowrank": 8,
}
#: Settings that the rules of `tiny_classes` leave without a value, or at one that does not fit the others.
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: _MROPE for name in ("glm46v", "glm4v", "glmga", "glm_ocr", "paddleocr_vl")},
    **{name: _MROPE for name in ("qwen2_vl", "qwen2_5_vl")},
    **{name: _MROPE | _OMNI for name in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")},
    **{name: {"head_dim": 8} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe")},
    **{name: {"vocabulary_map": {"<image>": 95}} for name in ("chameleon", "emu3")},
    "apertus1p5": {
        "audio_config": {"codebook_dim": 32, "codebook_size": 16},
        "vision_config": {"codebook_size": 16},
        **{"image_token_offset": 64, "audio_token_offset": 80},
    },
    "cohere_compass": {"text_config": {"rope_parameters": _ROPE}},
    "cohere_compass_text": {"rope_parameters": _ROPE},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"moe_num_experts": 2, "moe_top_k": 1, "ffn_hidden_size": 32},
    },
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2}
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffusion_gemma": {
        "text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    },
    "dory": {"num_hidden_layers": 6, "layer_types": ["full_attention", "mlp"] * 3}
    | {f"n_{part}_layers": 2 for part in ("input", "recurrent", "output")},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {
        "vision_config": {"adapter_in_dim": 32},
        "audio_config": {"adapter_input_size": 32},
    },
    "ernie4_5_vl_moe": {
        "text_config": {
            "moe_intermediate_size": [16, 16],
            "rope_parameters": {"mrope_section": [1, 1, 2]},
        }
    },
    "florence2": {
        "vision_config": {
            "embed_dim": [8] * 4,
            "depths": [1] * 4,
            "num_heads": [2] * 4,
            "num_groups": [2] * 4,
        }
    },
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "glm4v_moe": {"text_config": {"rope_parameters": {"mrope_section": [1, 1, 0]}}},
    "glm5_next": {"text_config": {"num_key_value_heads": 4}},
    "hunyuan_vl": {
        "text_config": {"head_dim": 8, "rope_parameters": {"xdrope_section": [1, 1, 1, 1]}}
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": {"head_dim": 8, "num_key_value_heads": 2},
    "mistral4": {"rope_parameters": {"partial_rotary_factor": 1.0}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {"text_config": _INDEXED},
    "qwen4_exp_text": _INDEXED,
    "reformer": {"is_decoder": True, "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16]}
    | {"attn_layers": ["local", "lsh"]},
    "step3p7": {
        "text_config": {
            "sliding_window": 8,
            "share_expert_dim": 16,
            "num_sliding_attention_heads": 4,
        }
    },
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4}
    | {"n_mamba_heads": 2, "attention_head_dim": 32, "attention_hidden_size": 64},
    "zamba2": {"attention_head_dim": 16, "attention_hidden_size": 64, "hybrid_layer_ids": [1]},
}
#: The language model of those whose own forward pass asks for a picture, or fails in 5.24.0 (llama4).
PARTS = {
    "llama4": "language_model",
    **dict.fromkeys(("blip-2", "instructblip", "instructblipvideo"), "language_model"),
    **{"kosmos-2": "text_model", "pix2struct": "decoder"},
}
#: Classes without both figures, by the reason. This list may only become shorter.
G_ALONE = {
    "the last layer's own norm is the final one": """
        bart bigbird_pegasus blenderbot-small git marian mvp openai-gpt plbart trocr xlm
    """,
    "its norm is of two halves, of four streams or of bytes": "blt qwen4_exp qwen4_exp_text reformer",
    "no language model that writes on: a prompt of states, a diffusion": "cpmant diffusion_gemma",
    "its forward pass asks for pictures or states, and did not run here": "idefics pi0 pp_formulanet",
}
REFUSED = {
    "a head of BERT's kind, which no released language model has": """
        bert bert-generation big_bird blip camembert data2vec-text electra ernie megatron-bert rembert roberta
        roberta-prelayernorm roc_bert roformer vision-encoder-decoder xlm-roberta xlm-roberta-xl xlnet xmod
    """,
    "a learned factor for each token's logit": "dory",
    "an encoder and a decoder under names of their own": "florence2 prophetnet t5gemma2 udop",
}
UNBUILT = {
    "its pictures need timm; its language model is tested by itself": "fast_vlm gemma3n perception_lm",
    "it drafts for another model, whose states it reads": "gemma4_assistant gemma4_unified_assistant",
    "its default configuration cannot be built": "granite4_vision",
    "a head for each codebook": "musicgen musicgen_melody",
}
#: No class of transformers: read in the models of sglang 0.5.23.
PUBLISHED = """
bailing_moe deepseek exaone internlm2 mimo minicpm nemotron-nas orion phi3small qwen stablelm_epoch xverse
"""
FAST = """
bert cohere_compass_text ctrl gemma3_text gpt2 lfm2_vl llama modernbert-decoder nemotron olmo openai-gpt
whisper
"""
LISTED = {
    name: outcome
    for outcome, reasons in (("G alone", G_ALONE), ("refused", REFUSED), ("unbuilt", UNBUILT))
    for names in reasons.values()
    for name in names.split()
}
T, R = range(10, 20), range(30, 60)


def plain(rows, weight, kind):
    """G (cosine) and ratio of rows of T and R behind a norm, pair by pair."""

    def mean(metric, pairs, x):
        return np.mean([metric(x[i], x[j]) for i, j in pairs])

    def cosine(a, b):
        return 1 - a @ b / np.sqrt(a @ a * (b @ b))

    pairs_t, pairs_r = list(combinations(T, 2)), list(combinations(R, 2))
    g = mean(cosine, pairs_t, rows) + mean(cosine, [(i, j) for i in T for j in R], rows)
    if weight is None:
        return g, None
    behind = rows * weight
    behind -= behind.mean(1, keepdims=True) if kind == "layer" else 0
    lengths = [
        mean(lambda a, b: np.linalg.norm(a - b), pairs, behind) for pairs in (pairs_t, pairs_r)
    ]
    return g, lengths[0] / lengths[1]


def outcome(case: Case, folder: Path) -> str:
    """How a class fares: right, G alone, refused or unbuilt; asserts that nothing is wrong."""
    try:
        model = tiny(case, SETTINGS.get(case.model_type, {}))
    except Exception as error:
        return f"unbuilt: {error!r}"
    model.save_pretrained(folder)

    async def work():
        projection = await find_projection(open_folder(folder))
        return projection, *(await read_rows_and_norm(projection, [*T, *R]))

    try:
        projection, rows, norm = asyncio.run(work())
    except ScreeningError as error:
        return "refused" if error.code == "NoOutputProjection" else f"failed: {error}"
    domain, reference = np.split(rows, [len(T)])
    try:
        truth = seen(getattr(model, PARTS.get(case.model_type, ""), model))
    except (ValueError, TypeError) as error:
        return "G alone" if norm.weight is None else f"no forward pass: {error!r}"
    g, share = plain(truth.rows, truth.weight, truth.kind)
    assert gap(domain, reference).mean == pytest.approx(g, abs=1e-6)
    # Reformer's head stores a bias that its class does not add.
    noted = any("bias" in warning for warning in projection.warnings)
    assert noted is (truth.bias or case.model_type == "reformer")
    if norm.weight is None:
        model_type = model_types(json.loads((folder / "config.json").read_text()))[-1]
        assert norm.reason in (
            f"the final normalisation layer of {model_type} is not known",
            f"{model_type} has no final norm",
        )
        return "G alone"
    assert share is not None
    assert norm.kind == truth.kind
    assert ratio(domain, reference, norm, "F32").mean == pytest.approx(share, rel=1e-4)
    return "right"


def marked(case: Case):
    marks = () if case.model_type in FAST.split() else pytest.mark.slow
    return pytest.param(case, marks=marks, id=f"{case.model_type}-{case.name}")


@pytest.mark.parametrize("case", [marked(case) for case in cases()])
def test_both_figures_of_every_class_are_right_or_its_reason_is_listed(case, tmp_path):
    found = outcome(case, tmp_path)
    expected = LISTED.get(case.model_type, "right" if case.model_type in NORMS else None)
    known = expected is not None and transformers.__version__.startswith("5.24.")
    if not known and found.startswith("unbuilt"):
        pytest.skip(f"{case.name} is new or differs here, and has no tiny configuration: {found}")
    if expected is None:
        # A type that no list knows: its G was right above, and its ratio is that of a known language model.
        assert found in ("G alone", "refused", "right")
    else:
        assert found.partition(":")[0] == expected, found


@pytest.mark.slow
def test_every_type_whose_norm_is_known_was_seen_or_is_published_elsewhere():
    """A wrapper's own type stands for the language model that it has where config.json names none."""
    unseen = set(NORMS) - {case.model_type for case in cases()} - set(PUBLISHED.split())
    for model_type in {case.model_type for case in cases()} & set(NORMS):
        try:
            text = transformers.CONFIG_MAPPING[model_type]().to_dict().get("text_config")
        except Exception:
            continue
        if text:
            unseen.discard(text["model_type"])
            assert NORMS[model_type] == NORMS[text["model_type"]], model_type
    assert unseen == set()
