"""Tiny real decoders and trainers' arguments for the tests of training."""

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

VOCABULARY = 40
TRAINERS_WARN = pytest.mark.filterwarnings(
    "ignore:.*pin_memory.*:UserWarning",
    "ignore:.*lr_scheduler.step.*:UserWarning",
    "ignore::DeprecationWarning:trl.*",
    "ignore::FutureWarning:transformers.*",
    "ignore::FutureWarning:trl.*",
)
COMMON = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False}


def tiny_gpt2(layers=3, seed=0, **options):
    torch.manual_seed(seed)
    shape = {"n_layer": layers, "n_embd": 16, "n_head": 2, "n_positions": 64}
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**shape, **no_dropout, **COMMON, **options)).train()


def tiny_llama(layers=3, seed=0):
    torch.manual_seed(seed)
    shape = {"num_hidden_layers": layers, "hidden_size": 16, "intermediate_size": 24}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, pad_token_id=0, **COMMON)).train()


def tokens(b=4, t=12, seed=0):
    return torch.randint(1, VOCABULARY, (b, t), generator=torch.Generator().manual_seed(seed))


def word_tokenizer():
    """A tokenizer of the words w0, w1, …, which are the tokens of these models."""
    words = {f"w{i}": i for i in range(VOCABULARY)}
    core = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="w0", eos_token="w1")


def trainer_arguments(folder, kind=TrainingArguments, **options):
    """Plain steps of one rate on the CPU, and nothing printed."""
    plain = {
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return kind(output_dir=str(folder), **plain | options)


def gradients(model):
    return {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(actual, wanted, rtol=1e-5, atol=1e-7):
    assert actual.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            actual[name], value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )
