"""Every decoder architecture, tiny and random: states against output_hidden_states and hand-written sums."""

import contextlib

import pytest
import torch
import transformers
from torch import nn

from lmeval_dispersion.errors import CaptureError, UsageError
from lmeval_dispersion.model.capture import Decoder, capture, resolve, unwrapped

SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
KV = {"num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 97}

# architecture -> (configuration, attention's contribution, feed-forward's contribution), both as modules of a
# block whose output is added to the residual stream, read off the architecture's own forward().
CASES = {
    "Llama": (SIZES | KV, "self_attn", "mlp"),
    "Qwen2": (SIZES | KV, "self_attn", "mlp"),
    "Qwen3": (SIZES | KV | {"head_dim": 8}, "self_attn", "mlp"),
    "Mistral": (SIZES | KV, "self_attn", "mlp"),
    "Gemma": (SIZES | KV | {"head_dim": 8}, "self_attn", "mlp"),
    "Gemma2": (
        SIZES | KV | {"head_dim": 8},
        "post_attention_layernorm",
        "post_feedforward_layernorm",
    ),
    "Gemma3Text": (
        SIZES | KV | {"head_dim": 8},
        "post_attention_layernorm",
        "post_feedforward_layernorm",
    ),
    "Olmo": (SIZES, "self_attn", "mlp"),
    "Olmo2": (SIZES, "post_attention_layernorm", "post_feedforward_layernorm"),
    "Phi": (SIZES, "self_attn", "mlp"),
    "Phi3": (SIZES | KV, "self_attn", "mlp"),
    "StableLm": (SIZES | KV | {"use_parallel_residual": True}, "self_attn", "mlp"),
    "Cohere": (SIZES | KV, "self_attn", "mlp"),
    "GPTNeoX": (SIZES | {"use_parallel_residual": True}, "attention", "mlp"),
    "GPTNeoX-sequential": (SIZES | {"use_parallel_residual": False}, "attention", "mlp"),
    "GPT2": (GPT, "attn", "mlp"),
    "GPTJ": (GPT | {"rotary_dim": 4}, "attn", "mlp"),
    "GPTNeo": (SIZES | {"attention_types": [[["global", "local", "global"], 1]]}, "attn", "mlp"),
    "Bloom": (SIZES, "self_attention.dense", "mlp.x"),
    "Mpt": (
        {"d_model": 32, "n_layers": 3, "n_heads": 4, "vocab_size": 97},
        "attn",
        "ffn.down_proj",
    ),
    "Falcon": (SIZES | {"parallel_attn": True}, "self_attention", "mlp.x"),
    "Falcon-sequential": (
        SIZES | {"parallel_attn": False, "bias": True},
        "self_attention",
        "mlp.x",
    ),
    "OPT": (SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32}, "self_attn", "fc2"),
    "Mixtral": (SIZES | KV | {"num_local_experts": 4}, "self_attn", "mlp"),
    "Qwen2Moe": (SIZES | KV | EXPERTS, "self_attn", "mlp"),
    "Qwen3Moe": (SIZES | KV | EXPERTS | {"head_dim": 8}, "self_attn", "mlp"),
    "Granite": (SIZES | KV | {"residual_multiplier": 0.5}, "0.5*self_attn", "0.5*mlp"),
    "RecurrentGemma": (SIZES | {"attention_window_size": 16}, "temporal_block", "mlp_block"),
}
IDS = torch.tensor([[3, 9, 27, 81, 50, 5, 13], [4, 16, 64, 62, 54, 22, 88]])


def tiny(arch):
    """A random model of ``arch``; norms too, so that no two places hold the same numbers by accident."""
    torch.manual_seed(0)
    name = arch.split("-")[0]
    config = getattr(transformers, f"{name}Config")(**CASES[arch][0])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    assert isinstance(model, nn.Module)
    return model


def output_of(block, path, run):
    """The output of the block's sub-module ``path``, times the factor before ``*``."""
    factor, _, name = path.rpartition("*")
    module = block.get_submodule(name)
    outputs = []
    handle = module.register_forward_hook(lambda _m, _a, out: outputs.append(out))
    run()
    handle.remove()
    out = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
    return float(factor or 1) * out


@pytest.mark.parametrize("arch", CASES)
def test_every_layer_is_the_models_own_hidden_state_and_attn_the_sum_between(arch):
    model = tiny(arch)
    _, attention, feed_forward = CASES[arch]
    decoder = Decoder.of(model)
    blocks, last = decoder.blocks, len(decoder) - 1

    def run():
        with torch.no_grad():
            return model(IDS, output_hidden_states=True).hidden_states

    with capture(model, decoder.names()) as states:
        hidden = run()
    assert len(hidden) == len(decoder) + 1
    assert torch.equal(states["last"], hidden[-1])
    assert torch.equal(states["norm"], hidden[-1])
    assert torch.equal(states["embeddings"], hidden[0])
    for k in range(last):
        assert torch.equal(states[f"layer.{k}"], hidden[k + 1])
        assert torch.equal(states[f"layer.{k}.ffn"], hidden[k + 1])
    assert not torch.equal(states[f"layer.{last}"], hidden[-1])
    assert decoder.norm is None or torch.equal(decoder.norm(states[f"layer.{last}"]), hidden[-1])
    x, attn, ffn = (states[name] for name in ("layer.0", "layer.1.attn", "layer.1.ffn"))
    close = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(attn, x + output_of(blocks[1], attention, run), **close)
    if not feed_forward.endswith(
        ".x"
    ):  # Bloom and Falcon add inside or in place: no module's output is left
        put_out = output_of(blocks[1], feed_forward, run).reshape(ffn.shape)
        torch.testing.assert_close(ffn, attn + put_out, **close)
    assert (ffn - attn).abs().max() > 1e-4


def test_post_norm_opt_adds_before_its_norm():
    config = transformers.OPTConfig(
        **SIZES, ffn_dim=48, word_embed_proj_dim=16, do_layer_norm_before=False
    )
    model = transformers.OPTForCausalLM(config).eval()
    with torch.no_grad(), capture(model, ["layer.0", "layer.1.attn", "last"]) as states:
        hidden = model(IDS, output_hidden_states=True)
    with torch.no_grad():
        put_out = output_of(Decoder.of(model).blocks[1], "self_attn", lambda: model(IDS))
    torch.testing.assert_close(
        states["layer.1.attn"], states["layer.0"] + put_out, atol=1e-5, rtol=1e-5
    )
    assert states["last"].shape == (2, 7, 16)
    assert torch.equal(model.lm_head(states["last"]), hidden.logits)


RECURRENT = {
    "Mamba": {"state_size": 8},
    "Mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8},
    "FalconMamba": {"state_size": 8},
    "Rwkv": {"attention_hidden_size": 32, "context_length": 16, "rescale_every": 2},
}


@pytest.mark.parametrize("arch", RECURRENT)
def test_recurrent_models_name_the_embeddings_and_count_blocks_from_0(arch):
    """Their ``hidden_states`` begin after the first block, as the documentation says."""
    torch.manual_seed(0)
    shape = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3}
    config = getattr(transformers, f"{arch}Config")(**shape, **RECURRENT[arch])
    model = getattr(transformers, f"{arch}ForCausalLM")(config).eval()
    names = ["embeddings", "layer.0", "layer.1", "layer.2", "norm", "last"]
    with torch.no_grad(), capture(model, names) as states:
        hidden = model(IDS, output_hidden_states=True).hidden_states
        embedded = model.get_input_embeddings()(IDS)
    assert len(hidden) == 4
    assert (
        set(Decoder.of(model).names()) == set(names) or arch == "Rwkv"
    )  # a block of one part has no others
    assert torch.equal(states["embeddings"], embedded)
    assert not any(torch.allclose(embedded, state) for state in hidden)
    for k in range(3):
        halved = arch == "Rwkv" and k % 2
        assert torch.equal(states[f"layer.{k}"] / (2 if halved else 1), hidden[k])
    assert torch.equal(states["norm"], hidden[3])
    assert torch.equal(states["last"], hidden[3])


def test_names_resolve_to_one_place_or_are_refused_with_what_there_is():
    model = tiny("Llama")
    names = [
        site.name for site in resolve(model, ["layer.-1", "layer.2.ffn", "layer.-3.attn", "last"])
    ]
    assert names == ["layer.2", "layer.2", "layer.0.attn", "last"]
    for name in ("layer.3", "layer.-4", "layer", "attn", "layer.1.mlp", "layer.1.attn.x", ""):
        with pytest.raises(
            UsageError, match=r"embeddings, layer\.0 \.\.\. layer\.2 .*\.attn or \.ffn added; got"
        ):
            resolve(model, ["last", name])


def test_models_without_blocks_are_refused_in_one_sentence():
    with pytest.raises(
        CaptureError, match="expected a model with a list of decoder blocks, got Sequential"
    ):
        Decoder.of(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    config = transformers.T5Config(
        vocab_size=97, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2
    )
    with pytest.raises(CaptureError, match="encoder-decoder T5ForConditionalGeneration"):
        Decoder.of(transformers.T5ForConditionalGeneration(config))


@pytest.mark.parametrize("ends", ["well", "in an error", "in a refusal"])
def test_hooks_go_away_however_it_ends(ends):
    model = tiny("Llama")
    names = [*Decoder.of(model).names(), *["nonsense"] * (ends == "in a refusal")]
    with contextlib.suppress(ZeroDivisionError, UsageError), torch.no_grad(), capture(model, names):
        model(IDS)
        assert any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        assert ends == "well" or 1 / 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_place_that_is_never_passed_is_an_error_not_silence():
    model = tiny("Llama")
    model.forward = lambda ids: model.model(ids)  # type: ignore[method-assign,operator,assignment]
    message = r"without reaching last; .*'norm' in place of 'last'"
    with pytest.raises(CaptureError, match=message), torch.no_grad(), capture(model, ["last"]):
        model(IDS)


# peft asks transformers for it.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is:FutureWarning")
def test_wrappers_are_looked_through():
    peft = pytest.importorskip("peft")
    plain = tiny("Llama")
    with torch.no_grad(), capture(plain, ["last", "layer.1.attn"]) as expected:
        plain(IDS)
    bare = plain.model
    assert isinstance(bare, nn.Module)
    with torch.no_grad(), capture(bare, ["last", "layer.1.attn"]) as states:
        bare(IDS)  # no projection: the norm's output
    assert torch.equal(states["last"], expected["last"])
    adapted = peft.get_peft_model(plain, peft.LoraConfig(target_modules=["q_proj", "up_proj"], r=2))
    assert unwrapped(adapted) is plain
    for wrapped in (adapted, nn.DataParallel(adapted)):
        with torch.no_grad(), capture(wrapped, ["last", "layer.1.attn"]) as states:
            wrapped(IDS)
        torch.testing.assert_close(states, expected)  # fresh LoRA weights change nothing
