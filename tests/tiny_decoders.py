"""Tiny real decoders for the training tests, built from configs."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

VOCABULARY = 40


def tiny_gpt2(layers=3, seed=0, **options):
    torch.manual_seed(seed)
    config = GPT2Config(
        n_layer=layers,
        n_embd=16,
        n_head=2,
        vocab_size=VOCABULARY,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        **options,
    )
    return GPT2LMHeadModel(config).train()


def tiny_llama(layers=3, seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def tokens(b=4, t=12, seed=0):
    return torch.randint(1, VOCABULARY, (b, t), generator=torch.Generator().manual_seed(seed))


def gradients(model):
    return {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found, wanted, rtol=1e-5, atol=1e-7):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )
