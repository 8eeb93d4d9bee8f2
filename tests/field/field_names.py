"""Tensor names and configurations as programs leave them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from field_case import Cases, Expected
from gguf import GGUFWriter
from peft import LoHaConfig, LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny_checkpoints import (
    head_and_norm,
    right,
    right_of,
    save_tokenizer,
    tiny,
    token_rows,
    tokenizer,
    write_config,
    write_weights,
)
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

NAMES = Cases()


@NAMES.case("https://github.com/pytorch/pytorch/issues/101107")
def compiled_sibling(folder: Path) -> Expected:
    """Four fine-tunes, and one that was saved from a compiled model."""
    values = {}
    for seed, name in enumerate(["ft-a", "ft-b", "ft-c", "ft-d", "ft-compiled"], start=1):
        place = folder / name
        place.mkdir()
        model = tiny("llama", tied=False, seed=seed)
        state = torch.compile(model).state_dict() if name == "ft-compiled" else model.state_dict()
        write_weights(place / "model.safetensors", state)
        write_config(place, model)
        save_tokenizer(place)
        if name != "ft-compiled":
            values[name] = right_of(model)
    order = sorted(values, key=lambda name: -values[name]["ratio"])
    refused = {"ft-compiled": ("_orig_mod.", "compiled", "save_pretrained")}
    return Expected(values=values, refused=refused, order=tuple(order))


@NAMES.case("https://github.com/TinyLLaVA/TinyLLaVA_Factory/issues/174")
def sibling_of_an_unknown_type(folder: Path) -> Expected:
    """Three fine-tunes, and one whose config.json names an architecture of its own: it has no ratio."""
    values = {}
    for seed, name in enumerate(["ft-a", "ft-b", "ft-c", "ft-remote"], start=1):
        place = folder / name
        place.mkdir()
        model = tiny("llama", tied=False, seed=seed)
        write_weights(place / "model.safetensors", model.state_dict())
        changes = {"model_type": "ourllama"} if name == "ft-remote" else {}
        write_config(place, model, **changes)
        save_tokenizer(place)
        values[name] = right_of(model)
    del values["ft-remote"]["ratio"]
    order = sorted(values.keys() - {"ft-remote"}, key=lambda name: -values[name]["ratio"])
    return Expected(values=values, order=tuple(order), set_aside=("ft-remote",))


def one(
    folder: Path,
    state: Mapping[str, torch.Tensor],
    model: PreTrainedModel,
    metadata: Mapping[str, str] | None = None,
    **changes: Any,
) -> None:
    """A whole checkpoint of one file: tensors under any names, config.json, and the tokenizer."""
    folder.mkdir(exist_ok=True)
    write_weights(folder / "model.safetensors", state, metadata)
    write_config(folder, model, **changes)
    save_tokenizer(folder)


def renamed(
    model: PreTrainedModel, tied: bool, rename: Callable[[str], str]
) -> dict[str, torch.Tensor]:
    """A model's tensors under other names, without the head that a tied model does not store."""
    state = model.state_dict()
    if tied:
        del state["lm_head.weight"]
    return {rename(name): tensor for name, tensor in state.items()}


def missing(folder: Path) -> list[str]:
    """The names that transformers starts at random when it loads a folder."""
    _, information = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    return sorted(information["missing_keys"])


_WRAPPED = {
    "compiled": ("_orig_mod.{}", ("_orig_mod.", "save_pretrained")),
    "compiled_and_ddp": ("module._orig_mod.{}", ("_orig_mod.", "save_pretrained")),
    "ddp": ("module.{}", ("module.", "unwrap_model")),
    "fsdp": ("_fsdp_wrapped_module.{}", ("FSDP", "get_state_dict")),
    "fabric": ("_forward_module.{}", ("_forward_module.", "unwrap_model")),
    "peft": ("base_model.model.{}", ("base_model.model.", "merge_and_unload")),
    "policy": ("policy.{}", ("policy.", "save_pretrained")),
}


@NAMES.case("https://github.com/FareedKhan-dev/train-llm-from-scratch/pull/37")
def wrapped(folder: Path) -> Expected:
    """Models saved from the program's wrapper, with tied and with untied embeddings."""
    refused = {}
    for tied in (False, True):
        model = tiny("qwen2" if tied else "llama", tied=tied)
        for name, (pattern, words) in _WRAPPED.items():
            place = folder / f"{name}-{'tied' if tied else 'untied'}"
            one(place, renamed(model, tied, pattern.format), model)
            assert len(missing(place)) == len(model.state_dict())
            refused[place.name] = words
    return Expected(refused=refused)


@NAMES.case("https://github.com/huggingface/transformers/issues/9209")
def loaded_all_the_same(folder: Path) -> Expected:
    """Names without the class's prefix, and with it twice (Lightning's module): transformers loads them."""
    values = {}
    copies = {}
    for tied in (False, True):
        model = tiny("qwen2" if tied else "llama", tied=tied, seed=3 + tied)
        names = {
            "bare": lambda name: name.removeprefix("model."),
            "lightning": lambda name: f"model.{name}",
        }
        kind = "tied" if tied else "untied"
        one(folder / kind, renamed(model, tied, str), model)
        values[kind] = right_of(model)
        for name, rename in names.items():
            place = folder / f"{kind}-{name}"
            one(place, renamed(model, tied, rename), model)
            assert missing(place) == []
            values[place.name] = right_of(model)
            copies[place.name] = kind
    return Expected(values=values, copies=copies)


@NAMES.case("https://github.com/pytorch/pytorch/issues/101107")
def wrapped_inside(folder: Path) -> Expected:
    """Only the body or one layer was compiled or wrapped: the head is whole."""
    model = tiny("llama", tied=False, num_hidden_layers=2)
    parts = {
        "body": ("model.", "model._orig_mod.", ("_orig_mod.", "compiled", "save_pretrained")),
        "layer": ("layers.1.", "layers.1._orig_mod.", ("_orig_mod.", "compiled")),
        "checkpointed": ("layers.1.", "layers.1._checkpoint_wrapped_module.", ("checkpointing",)),
        "fsdp-layer": ("layers.1.", "layers.1._fsdp_wrapped_module.", ("FSDP",)),
    }
    for name, (old, new, _) in parts.items():
        state = renamed(model, False, lambda stored, old=old, new=new: stored.replace(old, new))
        one(folder / name, state, model)
        assert missing(folder / name)
    return Expected(refused={name: words for name, (_, _, words) in parts.items()})


@NAMES.case("https://github.com/verl-project/verl/issues/4761")
def unmerged_adapters(folder: Path) -> Expected:
    """PEFT models saved whole, without merging: of the layers, of the head, and with a copy of the head."""
    kinds = {
        "layers": LoraConfig(target_modules=["q_proj"]),
        "all": LoraConfig(target_modules=["q_proj", "lm_head"]),
        "saved": LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]),
        "tokens": LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 2]),
        "loha": LoHaConfig(target_modules=["up_proj"]),
    }
    refused = {}
    for name, config in kinds.items():
        model = tiny("llama", tied=False)
        wrapper = get_peft_model(model, config)
        states = {
            name: wrapper.state_dict(),
            f"{name}-unwrapped": wrapper.get_base_model().state_dict(),
        }
        for place, state in states.items():
            one(folder / place, state, model)
            refused[place] = ("adapter was not merged", "merge_and_unload")
    return Expected(refused=refused)


@NAMES.case("https://github.com/huggingface/transformers/issues/20082")
def placeholders(folder: Path) -> Expected:
    """ZeRO-3 without gathering: every tensor, or all but the norms, has shape [0]; also in shards."""
    model = tiny("llama", tied=False)
    state = model.state_dict()
    empty = {name: tensor.new_zeros(0) for name, tensor in state.items()}
    one(folder / "all", empty, model)
    one(folder / "matrices", empty | {n: t for n, t in state.items() if t.dim() == 1}, model)
    one(folder / "shards", {}, model)
    (folder / "shards" / "model.safetensors").unlink()
    weight_map = {}
    for number, names in enumerate((list(state)[:6], list(state)[6:]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        write_weights(folder / "shards" / file, {name: empty[name] for name in names})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "shards" / "model.safetensors.index.json").write_text(json.dumps(index))
    words = ("ZeRO-3", "zero_to_fp32.py . OUT")
    return Expected(refused=dict.fromkeys(("all", "matrices", "shards"), words))


@NAMES.case("https://github.com/SafeAILab/EAGLE/issues/222")
def drafts(folder: Path) -> Expected:
    """Drafts for speculative decoding: with a map of its vocabulary, by config.json, by the class's name."""
    model = tiny("llama", tied=False)
    state = model.state_dict()
    rows = len(state["lm_head.weight"])
    maps = {"d2t": torch.zeros(rows, dtype=torch.long), "t2d": torch.ones(rows, dtype=torch.bool)}
    one(folder / "mapped", state | maps, model)
    one(folder / "configured", state, model, draft_vocab_size=rows - 9)
    one(folder / "named", state, model, architectures=["LlamaForCausalLMEagle3"])
    bare = {
        name.removeprefix("model."): tensor
        for name, tensor in state.items()
        if "lm_head" not in name
    }
    one(folder / "first", bare | {"fc.weight": torch.zeros(16, 32)}, model)
    words = ("draft", "screen the model that it drafts for")
    return Expected(refused=dict.fromkeys(("mapped", "configured", "named", "first"), words))


@NAMES.case("https://github.com/hpcaitech/ColossalAI/issues/6108")
def slices(folder: Path) -> Expected:
    """One rank's slice of the vocabulary under the usual names: transformers refuses the shapes."""
    model = tiny("llama", tied=False)
    state = model.state_dict()
    matrices = ("model.embed_tokens.weight", "lm_head.weight")
    halves = {name: state[name][: len(state[name]) // 2] for name in matrices}
    columns = {name: state[name][:, :8] for name in matrices}
    padded = {name: torch.cat([state[name], torch.ones(3, 16)]) for name in matrices}
    refused = {}
    for name, part in {
        "rows": halves,
        "columns": columns,
        "embedding": {matrices[0]: halves[matrices[0]]},
        "padded": padded,
    }.items():
        one(folder / name, state | part, model)
        with pytest.raises(RuntimeError):
            missing(folder / name)
        refused[name] = ("config.json", "save_pretrained")
    return Expected(refused=refused)


@NAMES.case("https://github.com/Lightning-AI/pytorch-lightning/issues/5567")
def incomplete(folder: Path) -> Expected:
    """Files that lack a layer, the last layers or the final norm, which transformers starts at random."""
    model = tiny("llama", tied=False, num_hidden_layers=3)
    state = model.state_dict()
    parts = {
        "hole": ("model.layers.1.", "layer 1 of 3"),
        "short": ("model.layers.2.", "layer 2 of 3"),
        "norm": ("model.norm.", "final norm"),
    }
    refused = {}
    for name, (part, words) in parts.items():
        one(folder / name, {n: t for n, t in state.items() if not n.startswith(part)}, model)
        assert missing(folder / name)
        refused[name] = (words, "download it again")
    # A layer too many is left out by transformers, too.
    one(folder / "long", state, model, num_hidden_layers=2)
    assert missing(folder / "long") == []
    return Expected(refused=refused, values={"long": right_of(model)})


_NEXT = {
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
}


def next_model(kind: str) -> PreTrainedModel:
    """A tiny model of the kinds whose norms multiply by 1 + their weight, of one layer of each attention."""
    config_class, model_class = _NEXT[kind]
    torch.manual_seed(len(kind))
    config = config_class(
        vocab_size=tokenizer().get_vocab_size() + 5,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=0,
        mlp_only_layers=[0, 1],
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(-0.5, 1.0)
            elif parameter.dim() > 1:
                parameter.normal_(0, 0.3)
        model.lm_head.weight[token_rows()[0]] *= 1.5
    return model


@NAMES.case("https://github.com/ml-explore/mlx-lm/blob/main/mlx_lm/models/qwen3_next.py")
def mlx_norms(folder: Path) -> Expected:
    """mlx_lm's conversions store 1 + the weight of each norm; the original is the same model."""
    values = {}
    for kind in _NEXT:
        model = next_model(kind)
        model.save_pretrained(folder / kind)
        save_tokenizer(folder / kind)
        state = load_file(folder / kind / "model.safetensors")
        added = (".input_layernorm.weight", ".post_attention_layernorm.weight", "model.norm.weight")
        ends = (*added, ".q_norm.weight", ".k_norm.weight")
        converted = {}
        for name, tensor in state.items():
            converted[name] = tensor + 1 if name.endswith(ends) else tensor
            if "conv1d.weight" in name:
                converted[name] = tensor.movedim(2, 1)
        one(folder / f"{kind}-mlx", converted, model, {"format": "mlx"})
        head, norm = head_and_norm(model)
        both = right(head, 1 + norm)
        values |= {kind: both, f"{kind}-mlx": both}
    notes = {"qwen3_next-mlx": ("mlx_lm",), "qwen3_5_text-mlx": ("mlx_lm",)}
    return Expected(values=values, notes=notes, copies={f"{kind}-mlx": kind for kind in _NEXT})


@NAMES.case("https://github.com/huggingface/transformers/issues/45216")
def wrapped_inside_a_wrapper(folder: Path) -> Expected:
    """Qwen3.5 with its language model's prefix three times (5.5.0), and with PEFT's inside (InternVL#593)."""
    text = next_model("qwen3_5_text").config.to_dict()
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 16,
    }
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    model = Qwen3_5ForConditionalGeneration(config)
    prefix = "model.language_model."
    parts = {
        "thrice": (f"{prefix}language_model.language_model.", ("final norm", "save_pretrained")),
        "peft": (f"{prefix}base_model.model.", ("PEFT", "merge_and_unload")),
        "compiled": (f"{prefix}_orig_mod.", ("compiled", "save_pretrained")),
    }
    for name, (new, _) in parts.items():
        state = renamed(model, False, lambda stored, new=new: stored.replace(prefix, new))
        one(folder / name, state, model)
        assert missing(folder / name)
    return Expected(refused={name: words for name, (_, words) in parts.items()})


@NAMES.case("https://github.com/axolotl-ai-cloud/axolotl/pull/2150")
def only_the_head_of_a_tied_model(folder: Path) -> Expected:
    """A tied model saved without its embedding, or with a head that differs (transformers#45127)."""
    model = tiny("qwen2", tied=True)
    state = model.state_dict()
    head = state["lm_head.weight"] + 0.3 * torch.randn(state["lm_head.weight"].shape)
    alone = {name: tensor for name, tensor in state.items() if "embed_tokens" not in name}
    one(folder / "alone", alone, model)
    one(folder / "apart", state | {"lm_head.weight": head}, model)
    for name, rows in (("alone", state["lm_head.weight"]), ("apart", head)):
        loaded = AutoModelForCausalLM.from_pretrained(folder / name)
        assert torch.equal(loaded.lm_head.weight, rows)
    apart = right(head.numpy(), model.model.norm.weight.detach().numpy())
    return Expected(
        values={"alone": right_of(model), "apart": apart},
        notes={"apart": ("stored head was read",)},
    )


@NAMES.case("https://github.com/RLHFlow/RLHF-Reward-Modeling/issues/22")
def reward_models(folder: Path) -> Expected:
    """Reward models: of a tied model, whose rows are whole, and of one whose head was not saved."""
    tied = tiny("qwen2", tied=True)
    score = {"score.weight": torch.zeros(1, 16)}
    state = renamed(tied, True, str) | score
    one(folder / "tied", state, tied, architectures=["Qwen2ForSequenceClassification"])
    one(
        folder / "value",
        renamed(tied, True, str) | {"v_head.summary.weight": torch.zeros(1, 16)},
        tied,
    )
    untied = tiny("llama", tied=False)
    bare = {
        name: tensor for name, tensor in untied.state_dict().items() if "lm_head" not in name
    } | score
    one(folder / "untied", bare, untied, architectures=["LlamaForSequenceClassification"])
    assert missing(folder / "untied") == ["lm_head.weight"]
    return Expected(
        values=dict.fromkeys(("tied", "value"), right_of(tied)),
        notes={
            "tied": ("score.weight", "SequenceClassification"),
            "value": ("v_head.summary.weight",),
        },
        refused={"untied": ("LlamaForSequenceClassification", "head")},
    )


@NAMES.case("https://github.com/huggingface/transformers/pull/45857")
def tying_of_wrappers(folder: Path) -> Expected:
    """Qwen2.5-VL without a stored head: the class ties where either level says so."""
    values = {}
    refused = {}
    for outer, inner in product((None, False, True), repeat=2):
        torch.manual_seed(5)
        text = Qwen2Config(
            **dict.fromkeys(("num_hidden_layers", "num_key_value_heads"), 1),
            **{
                "vocab_size": tokenizer().get_vocab_size() + 5,
                "hidden_size": 16,
                "intermediate_size": 32,
            },
            **{"num_attention_heads": 2, "bos_token_id": None, "eos_token_id": None},
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        ).to_dict()
        vision = {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 16,
        }
        config = Qwen2_5_VLConfig(
            text_config=text | {"model_type": "qwen2_5_vl_text"}, vision_config=vision
        )
        model = Qwen2_5_VLForConditionalGeneration(config)
        place = folder / f"{outer}-{inner}"
        one(place, {n: t for n, t in model.state_dict().items() if "lm_head" not in n}, model)
        saved = json.loads((place / "config.json").read_text())
        for level, value in ((saved, outer), (saved["text_config"], inner)):
            level.pop("tie_word_embeddings", None)
            if value is not None:
                level["tie_word_embeddings"] = value
        (place / "config.json").write_text(json.dumps(saved))
        _, information = AutoModelForImageTextToText.from_pretrained(
            place, output_loading_info=True
        )
        assert ("lm_head.weight" in information["missing_keys"]) is not (
            outer is True or inner is True
        )
        if outer is True or inner is True:
            rows = model.model.language_model.embed_tokens.weight.detach().numpy()
            values[place.name] = right(
                rows, model.model.language_model.norm.weight.detach().numpy()
            )
        else:
            refused[place.name] = ("tie", "no output projection is stored")
    return Expected(values=values, refused=refused)


@NAMES.case("https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp")
def gguf_of_gemma4(folder: Path) -> Expected:
    """Gemma 4's GGUF names its vocabulary gemma4: merges, over pieces that are spelled with ▁."""
    model = tiny("llama", tied=True, seed=2)
    head, norm = head_and_norm(model)
    pieces = sorted(tokenizer("sentencepiece").get_vocab().items(), key=lambda item: item[1])
    writer = GGUFWriter(folder / "gemma-4-E2B-it-BF16.gguf", "gemma4")
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list([piece for piece, _ in pieces])
    writer.add_token_types([3 if piece.startswith("<|") else 1 for piece, _ in pieces])
    writer.add_token_merges(["a b"])
    writer.add_tensor("token_embd.weight", head[: len(pieces)].copy())
    writer.add_tensor("output_norm.weight", norm)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Expected(values={folder.name: right(head, norm, kind="sentencepiece")})
