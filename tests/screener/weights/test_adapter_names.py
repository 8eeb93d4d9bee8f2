"""Names of an adapter's tensors against those of its base, with PEFT's own names of transformers' classes."""

from __future__ import annotations

import pytest
import transformers
from lmeval_screener.weights.adapters.names import BaseModules, module_of
from peft import LoraConfig, VeraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file

pytestmark = pytest.mark.filterwarnings("ignore")
_SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
_OF_GPT2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2}
CONFIGS = {
    "llama": transformers.LlamaConfig(**_SIZES),
    "tied": transformers.LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "gpt2": transformers.GPT2Config(**_OF_GPT2),
    "neox": transformers.GPTNeoXConfig(**_SIZES),
    "mixtral": transformers.MixtralConfig(**_SIZES, num_local_experts=2),
    "opt": transformers.OPTConfig(
        vocab_size=40,
        hidden_size=16,
        word_embed_proj_dim=16,
        ffn_dim=16,
        num_hidden_layers=2,
        num_attention_heads=2,
    ),
}


def stored_names(model, folder):
    """Names of the tensors of a saved model."""
    model.save_pretrained(folder)
    return [*load_file(folder / "model.safetensors")]


def adapter_names(model, settings):
    """Names of the tensors of an adapter of a model."""
    return [*get_peft_model_state_dict(get_peft_model(model, settings))]


def lora_of(model):
    """A LoRA of every layer, the head, and the embedding."""
    modules = dict(model.named_modules())
    ends = [model.get_output_embeddings(), model.get_input_embeddings()]
    names = [name for name, module in modules.items() if module in ends]
    kinds = (transformers.pytorch_utils.Conv1D, type(ends[0]))
    names += [
        name for name, module in modules.items() if isinstance(module, kinds) and module not in ends
    ]
    return LoraConfig(r=2, target_modules=names)


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_name_of_an_adapter_fits_its_base(kind, tmp_path):
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind])
    base = BaseModules(stored_names(model, tmp_path), [model.config.model_type])
    names = adapter_names(model, lora_of(model))
    assert len(names) > 8
    assert [name for name in names if not base.fits(name)] == []


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "opt"])
def test_of_a_base_without_a_head_the_causal_models_names_fit_and_no_others(kind, tmp_path):
    """transformers puts the class's prefix before the names of a model that was saved without its head."""
    headless = transformers.AutoModel.from_config(CONFIGS[kind])
    names = adapter_names(
        transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]), lora_in(kind)
    )
    base = BaseModules(stored_names(headless, tmp_path), [headless.config.model_type])
    assert [name for name in names if not base.fits(name)] == []
    others = adapter_names(transformers.AutoModel.from_config(CONFIGS[kind]), lora_in(kind))
    assert not any(base.fits(name) for name in others)


def lora_in(kind):
    """A LoRA of the attention."""
    modules = {"gpt2": ["c_attn"], "neox": ["query_key_value"]}
    return LoraConfig(r=2, target_modules=modules.get(kind, ["q_proj", "v_proj"]))


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(
    ("surplus", "cause"),
    [("base_model.model.", "get_peft_model"), ("_orig_mod.", "compiled"), ("module.", "DDP")],
)
def test_names_with_a_surplus_fit_nothing_and_the_cause_is_known(kind, surplus, cause, tmp_path):
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind])
    base = BaseModules(stored_names(model, tmp_path), [model.config.model_type])
    names = [
        name.replace("base_model.model.", f"base_model.model.{surplus}", 1)
        for name in adapter_names(model, lora_in(kind))
    ]
    assert not any(base.fits(name) for name in names)
    assert cause in base.mistake(names)
    assert surplus in base.mistake(names)


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_adapter_of_automodel_fits_nothing_and_the_cause_is_known(kind, tmp_path):
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind])
    base = BaseModules(stored_names(model, tmp_path), [model.config.model_type])
    names = adapter_names(transformers.AutoModel.from_config(CONFIGS[kind]), lora_in(kind))
    assert not any(base.fits(name) for name in names)
    assert "AutoModel" in base.mistake(names)


def test_tensors_that_all_modules_share_belong_to_no_module(tmp_path):
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"])
    base = BaseModules(stored_names(model, tmp_path))
    names = adapter_names(model, VeraConfig(r=2, target_modules=["q_proj"]))
    assert {module_of(name) for name in names if "vera_lambda" not in name} == {""}
    assert all(base.fits(name) for name in names)


def test_a_name_of_dots_is_looked_at_in_part():
    name = "a." * 1_000_000
    assert len(module_of(name)) < 100
    assert not BaseModules([name, "model.layers.0.q_proj.weight"]).fits(name)
