"""Which stored tensor is the output projection: names by architecture, and the rule that chooses.

Names as they are *stored*, which is not always as transformers' modules are called: published files come from
many programs. Collected from the causal-LM classes of transformers 5.23 and from the headers of published
checkpoints; anything new under ``….lm_head.weight`` is found without a line here.

The rule is transformers' own: a stored head if there is one (also where config.json says *tied*: then a
warning says so); without one the input embedding, if config.json or the architecture's default ties the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from lmeval_screener.errors import ScreeningError

#: Output projections, likeliest first. A multimodal or omni wrapper puts a prefix of `WRAPPERS` before it.
HEADS = (
    "lm_head.weight",
    "embed_out.weight",  # GPT-NeoX
    "output.weight",  # Llama's own format, InternLM2
    "output_layer.weight",  # ChatGLM
    "transformer.output_layer.weight",
    "output_projection.weight",  # BioGPT, fairseq
    "head.weight",  # RWKV
    "model.transformer.ff_out.weight",  # OLMo 1 as first released
    "transformer.ff_out.weight",
    "lm_head.decoder.weight",
    "unembed.weight",  # Inkling
)
_HEAD_BIASES = (
    *(name.removesuffix("weight") + "bias" for name in HEADS),
    *("decoder.bias", "pred_layer.proj.bias"),  # ModernBERT, XLM
)

#: Input embeddings, which serve as output projection where the two are tied.
EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "transformer.wte.weight",  # GPT-2 family
    "wte.weight",  # openai-community/gpt2 as stored
    "model.decoder.embed_tokens.weight",  # OPT
    "decoder.embed_tokens.weight",
    "transformer.word_embeddings.weight",  # BLOOM, Falcon
    "word_embeddings.weight",
    "backbone.embeddings.weight",  # Mamba
    "backbone.embedding.weight",
    "gpt_neox.embed_in.weight",
    "embed_tokens.weight",
    "tok_embeddings.weight",  # Llama's own format
    "model.tok_embeddings.weight",
    "transformer.embedding.word_embeddings.weight",  # ChatGLM
    "model.transformer.wte.weight",
    "model.embeddings.weight",
    "model.embeddings.tok_embeddings.weight",
    "biogpt.embed_tokens.weight",
    "rwkv.embeddings.weight",
    "transformer.embeddings.weight",
    "gpt_neox_japanese.embed_in.weight",
    "transformer.tokens_embed.weight",  # GPT
    "tokens_embed.weight",  # openai-community/openai-gpt as stored
    "transformer.w.weight",  # CTRL
    "w.weight",
)

#: Prefixes under which wrappers keep their language model.
WRAPPERS = (
    *("", "language_model.", "model.language_model.", "text_model.", "model.text_model.", "model.", "llm."),
    *("thinker.", "language_model.model.", "model.llm."),
)

#: Weights of the final norm, which stands before the output projection, likeliest first; after a wrapper too.
FINAL_NORMS = (
    "lm_head.norm.weight",  # ModernBERT: inside the head, behind a norm of the model
    "model.norm.weight",
    "transformer.ln_f.weight",  # GPT-2 family, Falcon, BLOOM
    "ln_f.weight",
    "gpt_neox.final_layer_norm.weight",
    "model.decoder.final_layer_norm.weight",  # OPT
    "model.decoder.layer_norm.weight",  # Whisper, Pegasus, mBART, Blenderbot
    "gpt_neox_japanese.final_layer_norm.weight",
    "transformer.layernorm.weight",  # CTRL
    "layernorm.weight",
    "decoder.final_layer_norm.weight",
    "model.final_layernorm.weight",  # Phi, Jamba, Bamba
    "transformer.norm_f.weight",  # MPT
    "backbone.norm_f.weight",  # Mamba
    "model.norm_f.weight",
    "backbone.out_norm.weight",
    "embedding_norm.weight",  # LFM2, in spite of its name
    "model.final_norm.weight",
    "transformer.encoder.final_layernorm.weight",  # ChatGLM
    "model.transformer.ln_f.weight",
    "rwkv.ln_out.weight",
    "biogpt.layer_norm.weight",
    "model.layer_norm.weight",
    "norm.weight",  # Llama's own format
)

NormKind = Literal["rms", "layer"]
# Which and whether 1 is added to the stored weight, of each ``model_type``.
_NORMS: dict[tuple[NormKind, bool], str] = {
    ("rms", False): """
afmoe apertus arcee aria aria_text axk1 axk2 bailing_hybrid bailing_moe bamba beam bitnet chameleon
cosmos3_edge cosmos3_edge_text cosmos3_omni cwm deepseek deepseek_ocr2 deepseek_ocr2_text deepseek_v2
deepseek_v3 deepseek_v32 deepseek_v4 deepseek_vl deepseek_vl_hybrid diffllama doge dots1 dots3_note
dots3_note_text emu3 emu3_text_model ernie4_5 ernie4_5_moe ernie4_5_vl_moe ernie4_5_vl_moe_text evolla
exaone exaone4 exaone4_5 exaone_moe falcon_h1 falcon_mamba fast_vlm flex_olmo flint gemma3n gemma3n_text
gemma4 gemma4_text gemma4_unified gemma4_unified_assistant gemma4_unified_text glm glm4 glm46v glm4_moe
glm4_moe_lite glm4v glm4v_moe glm4v_moe_text glm4v_text glm5_next glm5_next_text glm_moe_dsa glm_ocr
glm_ocr_text glmga got_ocr2 gpt_oss granite granite_docling granite_docling_text granite_swa granitemoe
granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl
hunyuan_vl_text hy_v3 hy_v4 hyperclovax hyperclovax_vision_v2 idefics2 idefics3 inkling2 inkling2_text
inkling_mm_model inkling_text internlm2 internlm3 internvl iquestcoder jamba janus jetmoe kimi_k25
kimi_linear kolibri1 laguna lfm2 lfm2_moe lfm2_vl lfm3 lfm3_vl lighton_ocr llama llama4 llama4_text llava
llava_next llava_next_video llava_onevision longcat_flash mamba mamba2 mellum mimo mimo_v2_flash minicpm
minicpm3 minimax minimax_m2 ministral ministral3 mistral mistral3 mistral4 mistral_large4
mistral_large4_text mixtral mllama mllama_text_model molmo2 molmo2_text moshi moss_transcribe_diarize
muse_glimmer muse_glimmer_text muse_spark muse_spark_text nanochat nemotron-nas nemotron_h nemotron_h_omni
olmo2 olmo3 olmo_hybrid olmoe ovis2 paddleocr_vl paddleocr_vl_text perception_lm phi3 phi4_multimodal
pix2struct pix2struct_text_model pp_chart2table qianfan_ocr qwen qwen2 qwen2_5_omni_text
qwen2_5_omni_thinker qwen2_5_vl qwen2_5_vl_text qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_moe
qwen3_omni_moe_text qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_text seed_oss
smollm3 smolvlm solar_open unlimited_ocr unlimited_ocr_text video_llama_3 video_llava vipllava xlstm xverse
youtu zamba zamba2 zaya
""",
    ("rms", True): """
gemma gemma2 gemma3 gemma3_text minicpm_ocr minicpmv4_6 minicpmv4_7 minimax_m3_vl minimax_m3_vl_text
paligemma qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma shieldgemma2 step3p5
step3p7 vaultgemma
""",
    ("layer", False): """
aya_vision biogpt blenderbot blip-2 bloom codegen cohere cohere2 cohere2_moe cohere2_vision cohere_compass
cohere_compass_text ctrl dbrx falcon fuyu gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gptj
instructblip instructblipvideo jais2 kosmos-2 kosmos-2.5 kosmos_2_5_text_model kosmos_2_text_model mbart
modernbert-decoder mpt olmo opt orion pegasus persimmon phi phi3small phimoe rwkv stablelm stablelm_epoch
starcoder2 whisper xglm
""",
    ("layer", True): "nemotron",
}
#: Kind of the final norm, and whether it multiplies by 1 + its weight, by the ``model_type`` of the language
#: model. Every entry was seen in a forward pass (`tests/screener/test_architectures.py`) or, where
#: transformers has no such class, read in the source that publishes it. No other type has a ratio.
NORMS = {name: norm for norm, types in _NORMS.items() for name in types.split()}
#: Those whose final norm has no weight.
NORMS_WITHOUT_WEIGHT = frozenset(["olmo", "nanochat", "hrm_text"])

#: Parts of a name that belong to something other than the model's own head or embedding.
NOT_THE_MODEL = (
    *("mtp", "draft", "medusa", "eagle", "vision", "visual", "audio", "speech", "talker", "code_predictor"),
)

_UNTIED = """
afmoe apertus aquila arcee aria_text axk1 axk2 baichuan bailing_hybrid bamba beam bitnet blt chatglm codegen
cwm dbrx deepseek deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dots1 dots3_note
dots3_note_text emu3 exaone exaone4 exaone_moe falcon_h1 flex_olmo flint fuyu git glm glm4 glm4_moe
glm4_moe_lite glm_moe_dsa gpt_neox gpt_oss gptj granite granitemoe granitemoe_swa granitemoehybrid
granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling2_text
inkling_text internlm internlm2 internlm3 iquestcoder jais2 jamba kimi_linear kolibri1 laguna llama llama4
llama4_text longcat_flash mamba2 mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text ministral
ministral3 mistral mistral3 mixtral mllama moshi nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid
olmoe orion persimmon phi phi3 phi3small phi4_multimodal phimoe pixtral qwen qwen2 qwen2_moe qwen3 qwen3_5
qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen4_exp qwen4_exp_text reformer rembert
rwkv rwkv5 rwkv6 seed_oss solar_open stablelm stablelm_epoch xlstm xverse yi
"""
#: Values of ``model_type`` whose class does *not* tie when config.json is silent; every other known one does.
UNTIED_BY_DEFAULT = frozenset(_UNTIED.split())

#: Scales that are applied, by their names beside a ``weight``.
SCALES = ("weight_scale", "weight_scale_inv")
#: Tensors beside a matrix that do not change its rows: scales of its *input*, a bias, further rows.
_HARMLESS = re.compile(
    r"bias|embed_scale|(input|output)_(scale|scale_inv|zero_point|global_scale|amax)|"
    r"additional_(fc|embedding)\.(weight|bias)"
)
#: Tensors in place of a ``weight`` that is packed, split or not merged with its adapter.
_PACKED = re.compile(
    r"(qweight|q_weight|qzeros|scales|q_scale\w*|g_idx|weight_packed|weight_scale\w*|weight_zero_point|weight\..+|"
    r"_weight_\w+|SCB|W_q|trellis|suh|svh|codes|codebooks|absmax|weight_[gvq]\w*|tq_\w+|parametrizations\..+|"
    r"base_layer\..+|lora_\w+(\..+)?)"
)
#: Begins the warning that a head is stored although the configuration ties it.
SAYS_TIED = "config.json says that embeddings are tied"


def choose_tensor(names: Iterable[str], config: Mapping[str, Any], warnings: list[str]) -> tuple[str, bool]:
    """Name of the output projection among stored tensors, and whether it is the tied input embedding."""
    stored = set(names)
    head = stored_name(stored, HEADS) or _only_head(stored)
    ties = _says_tied(config)
    if head:
        if ties:
            warnings.append(
                f"{SAYS_TIED}, but {head} is stored: the stored one was read, "
                "as transformers 5 does (transformers 4 would tie)"
            )
        return head, False
    embedding = stored_name(stored, EMBEDDINGS)
    if packed := _packed(stored, HEADS) or (None if embedding else _packed(stored, EMBEDDINGS)):
        reason = f"its output projection is stored packed or in parts ({packed})"
        raise cannot("QuantizedTensor", reason, "screen the unquantised model")
    if embedding is None:
        some = ", ".join(sorted(stored)[:3]) or "none"
        raise cannot(
            "NoOutputProjection",
            f"none of its {len(stored)} tensors ({some}, …) is a known output projection or input embedding",
            "check that it is a causal language model",
        )
    if ties is None:
        types = model_types(config)
        ties = not any(name in UNTIED_BY_DEFAULT for name in types)
        if not types:
            warnings.append(
                f"config.json is silent on tied embeddings and no head is stored; read {embedding}"
            )
    if not ties:
        raise cannot(
            "NoOutputProjection",
            f"config.json says that embeddings are not tied, but no head is stored, only {embedding}",
            "it may be a base model without a head, or an incomplete upload",
        )
    return embedding, True


def stored_name(stored: Iterable[str], candidates: tuple[str, ...]) -> str | None:
    """The likeliest of some names that is stored, under any wrapper."""
    names = set(stored)
    return next((w + name for name in candidates for w in WRAPPERS if w + name in names), None)


def head_bias(stored: Iterable[str]) -> list[str]:
    """The warning that a bias of the head is stored, if one is."""
    bias = stored_name(stored, _HEAD_BIASES)
    return [f"{bias} is stored: neither G nor the ratio holds a head's bias"] if bias else []


def companions(name: str, stored: Iterable[str]) -> list[str]:
    """Tensors beside a matrix that change what its rows mean, by names without the matrix's own stem.

    Unknown ones come first: an error names them.
    """
    stem = name.removesuffix("weight")
    beside = {other.removeprefix(stem) for other in stored if other.startswith(stem) and other != name}
    return sorted((w for w in beside if not _HARMLESS.fullmatch(w)), key=lambda word: (word in SCALES, word))


def model_types(config: Mapping[str, Any]) -> list[str]:
    """``model_type`` of config.json and of the language model inside it, the outermost first."""
    return [level["model_type"] for level in levels(config) if isinstance(level.get("model_type"), str)]


def final_norm(model_type: str, config: Mapping[str, Any]) -> tuple[NormKind, bool, bool] | None:
    """A final norm's kind, whether it multiplies by 1 + weight, whether it has one; None: unknown."""
    if model_type == "hf_olmo":  # OLMo as first released, and DataDecide: by settings (olmo/model.py)
        kinds: dict[Any, NormKind] = {"default": "layer", "low_precision": "layer", "rms": "rms"}
        kind, has_weight = kinds.get(config.get("layer_norm_type")), config.get("layer_norm_with_affine")
        return (kind, False, has_weight) if kind and isinstance(has_weight, bool) else None
    if model_type == "chatglm" and config.get("rmsnorm") is True:
        return "rms", False, True
    norm = NORMS.get(model_type)
    return norm and (*norm, model_type not in NORMS_WITHOUT_WEIGHT)


def levels(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """config.json and the configurations of a language model inside it."""
    inner = [config.get(key) for key in ("text_config", "language_config", "llm_config", "thinker_config")]
    return [config, *(level for level in inner if isinstance(level, dict))]


def cannot(code: str, reason: str, step: str) -> ScreeningError:
    """The error of a checkpoint that holds nothing that can be read: why, and what to do."""
    return ScreeningError(code, f"cannot be screened because {reason}; {step}")


def _packed(stored: set[str], candidates: tuple[str, ...]) -> str | None:
    """A stored tensor that stands in place of one of some weights, if there is one."""
    stems = tuple(w + name.removesuffix("weight") for name in candidates for w in WRAPPERS)
    for name in sorted(stored):
        stem = next((stem for stem in stems if name.startswith(stem)), None)
        if stem is not None and _PACKED.fullmatch(name.removeprefix(stem)):
            return name
    return None


def _only_head(stored: set[str]) -> str | None:
    """A head under an unknown wrapper, if there is exactly one."""
    heads = [
        name
        for name in stored
        if name.endswith(".lm_head.weight")
        and not any(word in name for word in NOT_THE_MODEL)
        and not any(part.isdigit() for part in name.split("."))
    ]
    return heads[0] if len(heads) == 1 else None


def _says_tied(config: Mapping[str, Any]) -> bool | None:
    """Ties by config.json; the outermost level that says anything decides. None if it is silent."""
    for level in levels(config):
        # OLMo as first released says it in a word of its own, and its class looks at no other.
        for key in ("weight_tying", "tie_word_embeddings"):
            value = level.get(key)
            if isinstance(value, bool):
                return value
    return None
