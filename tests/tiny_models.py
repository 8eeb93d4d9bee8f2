"""Tiny real models with a real tokenizer, saved as the folders that users have."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = [f"w{i}" for i in range(90)]
VOCABULARY = {"<unk>": 0, "<s>": 1, "</s>": 2, **{word: i + 3 for i, word in enumerate(WORDS)}}
SIZE = len(VOCABULARY)


def tokenizer(*, pad: bool = False, bos: bool = False) -> PreTrainedTokenizerFast:
    """A word-level tokenizer: "w0 w1 …" are the words it knows."""
    core = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    if bos:
        from tokenizers.processors import TemplateProcessing

        core.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=core, **names, **({"pad_token": "</s>"} if pad else {})
    )


def model(
    config_class: type, model_class: type, seed: int = 0, **settings: object
) -> torch.nn.Module:
    """A model of random weights, wide enough that directions differ."""
    torch.manual_seed(seed)
    built = model_class(config_class(vocab_size=SIZE, **settings)).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3)
    return built


def saved(folder: Path, built: torch.nn.Module, **settings: bool) -> Path:
    """The folder, holding the model and its tokenizer."""
    built.save_pretrained(folder)
    tokenizer(**settings).save_pretrained(folder)
    return folder


def text_file(path: Path, texts: Iterable[str]) -> Path:
    """The file, holding the texts as lines of JSON."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def llama(seed: int = 0, **settings: object) -> torch.nn.Module:
    """A Llama of three layers, width 32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {
        **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
    }
    return model(LlamaConfig, LlamaForCausalLM, seed, **{**shape, **settings})
