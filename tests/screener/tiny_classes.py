"""Every causal and image-text class of transformers as a tiny model, and how its logits come about."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers.models.auto import modeling_auto

V, LAYERS = 96, 2
#: Small sizes by names of settings; the first pattern that fits counts.
SIZES = {
    r"(\w+_)?vocab_size(_per_layer_input)?": V,
    r"(num_)?((hidden|encoder|decoder)_)?layers|n_layers?|depth|num_blocks|num_layers_per_stack": LAYERS,
    r"(swa_)?num_key_value_heads|num_kv_heads|num_query_groups": 2,
    r"mamba_(n|num)_heads|n_mamba_heads": 8,
    r"(\w+_)?(num|n)(_\w+)?_heads?|((encoder|decoder)_)?attention_heads": 4,
    r"qk_head_dim": 16,
    r"(\w+_)?head_dim|mamba_headdim|d_kv|d_head|dim_head|kv_channels|mamba_d_head|attention_head_size": 8,
    r"rotary_dim": 4,
    r"hidden_size(_global)?|(\w+_)?embed(ding)?_(size|dim)|emb_dim|d_model|n_embd|word_embed_proj_dim": 32,
    r"(out|text|encoder|attention|backbone|projector|image_text)_hidden_size|projection_dim|hidden_dim": 32,
    r"lru_width|(\w+_)?(out|output)_dim|projector_input_dim|input_size|base_channels|latent_channels": 32,
    r".*intermediate_size(_mlp)?|.*ffn_(dim|hidden_size)|dim_ff|d_ff|dff|d_inner|mlp_dim|mamba_d_ssm": 64,
    r"feed_forward_size|num_embeddings|codebook_size|encoder_hash_byte_group_vocab": 64,
    r"max_position_embeddings|n_positions|max_target_positions|n_ctx|context_length|max_seq_len": 64,
    r"(num|num_local|n_routed|moe_num)_experts|zero_expert_num": 4,
    r"num_experts_per_tok(en)?|moe_topk|moe_k|(moe_)?top_k": 2,
    r"n_group|topk_group|num_expert_groups?": 1,
    r"(kv|q|o)_lora_rank|mamba_dt_rank|time_step_rank|adapter_rank|laurel_rank|.*chunk_size": 8,
    r"mamba_d_state|(ssm_)?state_size|hidden_size_per_layer_input": 8,
    r"image_size": 28,
    r"patch_size": 14,
}
_COUNTS = r"num_hidden_layers|n_layers?|num_layers|depth|decoder_layers"
_LEFT_OUT = ("transformers_version", "architectures", "_name_or_path", "dtype")
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


class Case(NamedTuple):
    """A class of transformers, by the ``model_type`` that leads to it."""

    model_type: str
    name: str


def cases() -> list[Case]:
    """The classes behind AutoModelForCausalLM and AutoModelForImageTextToText."""
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return sorted(
        Case(*item)
        for item in {
            *causal.items(),
            *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items(),
        }
    )


def tiny(case: Case, settings: Mapping[str, Any]) -> torch.nn.Module:
    """A model of random numbers in every tensor, small by `SIZES` and the settings given."""
    torch.manual_seed(0)
    config_class = transformers.CONFIG_MAPPING[case.model_type]
    config = config_class(**_merged(_small(config_class().to_dict()), settings))
    model_class = getattr(transformers, case.name)
    if isinstance(text := getattr(config, "text_config", None), model_class.config_class):
        config = text
    model = model_class(config).eval()
    if sum(parameter.numel() for parameter in model.parameters()) > 2e7:
        raise MemoryError(f"{case.name} is not tiny: name its sizes")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def _merged(settings: dict[Any, Any], more: Mapping[Any, Any]) -> dict[Any, Any]:
    for key, value in more.items():
        inner = settings.get(key)
        settings[key] = (
            _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
        )
    return settings


def _small(settings: Mapping[Any, Any]) -> dict[Any, Any]:
    """Settings with small sizes; of a list with an item a layer two stay, of two kinds if it has them."""
    counts = (value for key, value in settings.items() if re.fullmatch(_COUNTS, str(key)))
    count = next((value for value in counts if type(value) is int), 0)
    lists = [v for v in settings.values() if isinstance(v, list) and len(v) == count > LAYERS]
    kinds = next((v for v in lists if isinstance(v[0], str)), [])
    keep = [0, next((i for i, kind in enumerate(kinds) if kind != kinds[0]), 1)]

    def shrunk(key: str, value: Any) -> Any:
        if key == "mrope_section":
            return [2, 1, 1]
        if key == "per_layer_config" and isinstance(value, dict):
            return {
                i: _small(value[k])
                for i, old in enumerate(keep)
                for k in (old, str(old))
                if k in value
            }
        if isinstance(value, dict):
            return _small(value)
        if isinstance(value, list) and key.endswith("token_id"):
            return [2]
        if any(value is kept for kept in lists):
            return [value[i] for i in keep]
        if type(value) is not int or value <= 0:
            return value
        if key.endswith(("token_id", "token_index")):
            return min(value, _SPECIAL.get(key, V - 1))
        if key == "num_key_value_heads" and value == settings.get("num_attention_heads"):
            return min(value, 4)
        return min(
            [value, *(size for pattern, size in SIZES.items() if re.fullmatch(pattern, key))][:2]
        )

    return {key: shrunk(str(key), value) for key, value in settings.items() if key not in _LEFT_OUT}


class Seen(NamedTuple):
    """A forward pass: rows (V, d) of the head, and γ (d,) up to a factor, None where no norm fits."""

    rows: NDArray[np.float64]
    weight: NDArray[np.float64] | None
    kind: str
    bias: bool


def seen(model: torch.nn.Module, **inputs: Any) -> Seen:
    """The head and the norm in front of it by a forward pass, without a look at names.

    The head is the last module with V rows or more whose outcome orders as the logits do. Between its input y
    and some state x before it stands the norm, if y = γ ∘ x/rms(x), or γ ∘ (x - mean)/sd + β, for some γ, β.
    """
    states: list[torch.Tensor] = []
    heads: list[tuple[torch.nn.Module, torch.Tensor, torch.Tensor, int]] = []

    def note(module: torch.nn.Module, given: tuple[Any, ...], made: Any) -> None:
        tensors = [
            t for t in (*given, made) if isinstance(t, torch.Tensor) and t.is_floating_point()
        ]
        states.extend(t.detach() for t in tensors if t.dim() > 1)
        weight = getattr(module, "weight", None)
        if len(tensors) == 2 and weight is not None and weight.dim() == 2 and len(weight) >= V:
            heads.append((module, tensors[0].detach(), tensors[1].detach(), len(states)))

    hooks = [module.register_forward_hook(note) for module in model.modules()]
    ids = torch.randint(3, V - 8, (2, 16), generator=torch.Generator().manual_seed(1))
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "use_cache": False,
        **inputs,
    }
    if (
        model.config.is_encoder_decoder
        and "decoder_input_ids" in inspect.signature(model.forward).parameters
    ):
        inputs["decoder_input_ids"] = ids
    with torch.no_grad():
        logits = model(**inputs).logits
    for hook in hooks:
        hook.remove()
    head, before_head, outcome, before = heads[-1]
    n = min(logits.shape[-1], outcome.shape[-1])
    assert torch.isfinite(logits).all()
    assert torch.equal(*(t[..., :n].reshape(-1, n).argsort(-1) for t in (outcome, logits)))
    rows, bias = head.weight.detach().double().numpy(), getattr(head, "bias", None) is not None
    y = before_head.reshape(-1, before_head.shape[-1]).double().numpy()
    for state in reversed(states[:before]):
        if state.shape[-1] != y.shape[1] or state.numel() != y.size:
            continue
        x = state.reshape(y.shape).double().numpy()
        if _close((x * y).sum() / (x * x).sum() * x, y):
            continue  # y itself, or a multiple: a norm without weight would seem to fit it
        for kind in ("rms", "layer"):
            unit = x - x.mean(axis=1, keepdims=True) if kind == "layer" else x
            unit = unit / np.sqrt(np.square(unit).mean(axis=1, keepdims=True) + 1e-12)
            centre, shift = (unit.mean(0), y.mean(0)) if kind == "layer" else (0, 0)
            weight = ((unit - centre) * (y - shift)).sum(0) / np.square(unit - centre).sum(0)
            if _close(weight * (unit - centre) + shift, y):
                return Seen(rows, weight, kind, bias)
    return Seen(rows, None, "", bias)


def _close(made: NDArray[np.float64], wanted: NDArray[np.float64]) -> bool:
    return bool(np.abs(made - wanted).max() < 1e-3 * np.abs(wanted).max())
