"""Tiny checkpoints with a real tokenizer, by the field's own libraries, and their right values by numpy.

The right values come from the true matrices alone, without any code of the package:

- ratio: mean Euclidean distance between the rows of the ten digits (times the final norm's multiplier), over
  the same of the everyday words;
- gap: mean cosine distance between the digits' rows plus that of digits to everyday words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from scipy.spatial.distance import cdist, pdist
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

WIDTH = 16
DIGITS = list("0123456789")
# The everyday words of the bundled reference set.
_WORDS = (
    "house kitchen garden street village town beach river mountain forest flower grass fruit bird dog "
    "horse cow sheep bread milk cheese apple sugar coffee tea dinner breakfast lunch mother father "
    "brother sister uncle baby woman girl boy hair mouth neck skin leg foot shoulder shirt hat dress "
    "shoes bed chair door morning afternoon evening night midnight weather rain storm wind sun moon "
    "sky music song eat drink laugh smile cry shout sing dance swim ride cook wash buy wear love hope "
    "dream enjoy remember travel happy sad angry tired warm wet fresh sweet bitter beautiful lovely "
    "pretty young quiet gentle funny brave bright heavy dirty"
)
EVERYDAY = _WORDS.split()
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_SPACES = {"byte": "Ġ", "sentencepiece": "▁"}
_CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
}


def tokenizer(kind: str = "byte") -> Tokenizer:
    """A tokenizer with real merges: byte-level (Qwen, Llama 3) or in SentencePiece's spelling (Gemma)."""
    space = _SPACES[kind]
    pieces: dict[str, int] = {}
    merges: list[tuple[str, str]] = []
    letters = sorted(set("".join(EVERYDAY)) | set("abcdefghijklmnopqrstuvwxyz.,:=()"))
    for sign in [*DIGITS, *letters, space]:
        pieces.setdefault(sign, len(pieces))
    for word in EVERYDAY:
        parts = [space, *word]
        while len(parts) > 1:
            merged = parts[0] + parts[1]
            if merged not in pieces:
                merges.append((parts[0], parts[1]))
                pieces[merged] = len(pieces)
            parts[:2] = [merged]
    made = Tokenizer(models.BPE(vocab=pieces, merges=merges))
    if kind == "byte":
        split = pre_tokenizers.Split(Regex(r"\p{N}| ?[^\s\p{N}]+|\s+"), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([split, level])
        made.decoder = decoders.ByteLevel()
    else:
        made.normalizer = normalizers.Replace(" ", space)
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        made.decoder = decoders.Sequence([decoders.Replace(space, " "), decoders.Fuse()])
    made.add_special_tokens([AddedToken(piece, special=True) for piece in SPECIALS])
    return made


def save_tokenizer(folder: Path, kind: str = "byte") -> None:
    """Save the tokenizer as transformers does."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(kind), eos_token=SPECIALS[0], pad_token=SPECIALS[0]
    )
    fast.save_pretrained(folder)


def token_rows(kind: str = "byte") -> tuple[list[int], list[int]]:
    """Row numbers of the digits and of the everyday words."""
    made = tokenizer(kind)
    digits = [made.token_to_id(digit) for digit in DIGITS]
    words = [made.token_to_id(_SPACES[kind] + word) for word in EVERYDAY]
    return digits, words


def tiny(kind: str = "qwen2", tied: bool = True, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A tiny model with random weights; its final norm is not constant, and each seed has its own ratio."""
    config_class, model_class = _CLASSES[kind]
    rows = tokenizer().get_vocab_size() + 5
    torch.manual_seed(seed)
    config = {
        "vocab_size": rows,
        "hidden_size": WIDTH,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": rows - 6,
        "pad_token_id": None,
    }
    model: PreTrainedModel = model_class(config_class(**(config | settings))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 2.0)
        digits, _ = token_rows()
        model.get_output_embeddings().weight[digits] *= 1.3 + 0.25 * seed
    return model


def head_and_norm(model: PreTrainedModel) -> tuple[Any, Any]:
    """The output matrix (v, d) and the final norm's weight (d,) of one of `tiny`'s models."""
    head = model.get_output_embeddings().weight.detach().float().numpy()
    norm = model.model.norm.weight.detach().float().numpy()
    return head, norm


def right(matrix: Any, multiplier: Any = None, kind: str = "byte") -> dict[str, float]:
    """``gap`` and, with the final norm's true multiplier, ``ratio`` of a true output matrix."""
    digits, words = token_rows(kind)
    rows = np.asarray(matrix, dtype=np.float64)
    inside = pdist(rows[digits], "cosine").mean()
    across = cdist(rows[digits], rows[words], "cosine").mean()
    values = {"gap": float(inside + across)}
    if multiplier is not None:
        seen = rows * np.asarray(multiplier, dtype=np.float64)
        values["ratio"] = float(pdist(seen[digits]).mean() / pdist(seen[words]).mean())
    return values


def right_of(model: PreTrainedModel) -> dict[str, float]:
    """The right values of one of `tiny`'s models."""
    return right(*head_and_norm(model))


def write_weights(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Any = None) -> None:
    """Write a safetensors file of these tensors, none of them shared."""
    owned = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    save_file(owned, path, metadata=metadata or {"format": "pt"})


def write_config(folder: Path, model: PreTrainedModel, **changes: Any) -> None:
    """Write config.json as save_pretrained does, with ``changes``."""
    model.config.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.setdefault("architectures", [type(model).__name__])
    path.write_text(json.dumps(config | changes, indent=2))
