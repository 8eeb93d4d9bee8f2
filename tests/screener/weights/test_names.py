"""Names as a loader reads them, with transformers' own loading as the judge."""

from __future__ import annotations

from typing import Any

import pytest
from hub_client import refused
from lmeval_screener.weights.architectures import NORMS, TABLES
from lmeval_screener.weights.names import loaded_name, notes_on, refuse_names, refuse_part

LLAMA = {"model_type": "llama", "num_hidden_layers": 2}
PARTS = ("input_layernorm.weight", "self_attn.q_proj.weight", "mlp.up_proj.weight")
NAMES = [
    *("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"),
    *(f"model.layers.{layer}.{part}" for layer in (0, 1) for part in PARTS),
]


def shapes(names: Any = NAMES, **more: Any) -> dict[str, Any]:
    return dict.fromkeys(names, (4, 4)) | more


@pytest.mark.parametrize(
    "rename",
    [
        str,
        lambda name: name.removeprefix("model."),
        lambda name: f"model.{name}",
        lambda name: name.replace("lm_head", "model.lm_head"),
    ],
    ids=["as saved", "without its prefix", "with it twice", "a head with the prefix"],
)
def test_names_that_transformers_loads_are_those_of_the_class(rename):
    """Each was loaded by transformers 5.24 without a missing key (tests/field)."""
    names = [rename(name) for name in NAMES]
    refuse_names(shapes(names), LLAMA)
    assert [loaded_name(name, "llama") for name in names] == NAMES


@pytest.mark.parametrize(
    ("prefix", "says"),
    [
        ("_orig_mod.", ("compiled", "`_orig_mod.`", "model._orig_mod.save_pretrained")),
        ("module._orig_mod.", ("compiled", "save_pretrained")),
        ("module.", ("`module.`", "unwrap_model")),
        ("module.module.", ("`module.`", "unwrap_model")),
        ("_fsdp_wrapped_module.", ("FSDP", "get_state_dict")),
        ("_forward_module.", ("Lightning", "unwrap_model")),
        ("base_model.model.", ("PEFT", "merge_and_unload")),
        ("_module.", ("Opacus", "model._module")),
        ("policy.", ("`policy.`", "save_pretrained")),
        ("actor.model.", ("`actor.model.`", "save_pretrained")),
        ("model.model.", ("save_pretrained",)),
        ("language_model.", ("`language_model.`",)),
        ("model.language_model.", ("`model.language_model.`",)),
        ("transformer.", ("`transformer.`",)),
    ],
)
def test_a_wrapped_model_is_refused_with_its_cause_and_the_step(prefix, says):
    for names in (NAMES, [name for name in NAMES if not name.startswith("lm_head")]):
        wrapped = shapes(f"{prefix}{name}" for name in names)
        error = refused(refuse_names, wrapped, LLAMA, code="RandomWeights")
        for words in says:
            assert words in str(error)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("model.", "model._orig_mod.", "compiled"),
        ("model.layers.1.", "model.layers.1._orig_mod.", "compiled"),
        (
            "model.layers.1.",
            "model.layers.1._checkpoint_wrapped_module.",
            "activation checkpointing",
        ),
        ("model.layers.1.", "model.layers.1._fsdp_wrapped_module.", "FSDP"),
        ("mlp.up_proj.weight", "mlp._flat_param", "flattened"),
        ("model.layers.", "language_model.layers.", "language_model"),
        ("q_proj.weight", "q_proj.base_layer.weight", "merge_and_unload"),
        ("q_proj.weight", "q_proj.lora_A.default.weight", "merge_and_unload"),
        ("up_proj.weight", "up_proj.original_module.weight", "merge_and_unload"),
        ("lm_head.weight", "lm_head.modules_to_save.mine.weight", "merge_and_unload"),
        (
            "model.embed_tokens.weight",
            "model.embed_tokens.token_adapter.base_layer.weight",
            "merge_and_unload",
        ),
        ("up_proj.weight", "up_proj.hada_w1_a.default", "merge_and_unload"),
        ("model.layers.1.", "model.layers.2.", "layer 1 of 3"),
        ("model.norm.weight", "model.other.weight", "final norm"),
    ],
)
def test_a_part_that_a_loader_would_start_at_random(old, new, says):
    names = [name.replace(old, new) for name in NAMES]
    refused(refuse_names, shapes(names), LLAMA, code="RandomWeights", says=says)


def test_fewer_layers_than_stated_and_placeholders_without_numbers():
    refused(refuse_names, shapes(), LLAMA | {"num_hidden_layers": 3}, says="layer 2 of 3")
    refuse_names(
        shapes(), LLAMA | {"num_hidden_layers": 1}
    )  # a layer more: transformers leaves it out
    refuse_names(shapes(), LLAMA | {"num_hidden_layers": True})
    empty = dict.fromkeys(NAMES, (0,))
    refused(refuse_names, empty, LLAMA, code="RandomWeights", says="zero_to_fp32.py")
    refused(refuse_names, shapes() | {"model.norm.weight": (0,)}, LLAMA, says="1 of its 9 tensors")
    counts = {"model_type": "whisper", "num_hidden_layers": 32, "decoder_layers": 1}
    decoder = [
        *("model.decoder.embed_tokens.weight", "model.decoder.layer_norm.weight"),
        "model.decoder.layers.0.fc1.weight",
    ]
    refuse_names(shapes(decoder), counts)


@pytest.mark.parametrize(
    ("names", "config"),
    [
        ([*NAMES, "d2t", "t2d"], {}),
        (NAMES, {"draft_vocab_size": 100}),
        (NAMES, {"architectures": ["LlamaForCausalLMEagle3"]}),
        (NAMES, {"architectures": ["MedusaModel"]}),
        (["embed_tokens.weight", "fc.weight", "layers.0.self_attn.q_proj.weight"], {}),
    ],
)
def test_a_draft_is_no_model(names, config):
    refused(refuse_names, shapes(names), LLAMA | config, code="NoOutputProjection", says="draft")


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "our_own"},
        {"architectures": ["Eagle2_5_VLForConditionalGeneration"], "model_type": "eagle_2_5_vl"},
        {"model_type": "llava", "text_config": {"model_type": "llama", "num_hidden_layers": 2}},
    ],
)
def test_what_no_class_is_known_of_is_not_judged_by_its_prefix(config):
    refuse_names(shapes(f"language_model.{name}" for name in NAMES), config)


def test_names_in_another_case():
    refused(
        refuse_names,
        shapes(n.upper() for n in NAMES),
        LLAMA,
        code="RandomWeights",
        says="other capital letters",
    )


def test_adapters_of_a_class_are_not_those_of_peft():
    native = [*NAMES, "model.layers.0.mlp.up_proj.lora_A.vision.weight"]
    refuse_names(shapes(native), {"model_type": "phi4mm"})


def test_a_slice_of_the_output_projection_is_refused():
    config = LLAMA | {"vocab_size": 100, "hidden_size": 8}
    for shape in ((50, 8), (100, 4)):
        refused(refuse_part, "lm_head.weight", shape, config, says="tensor parallelism")
    refused(refuse_part, "lm_head.weight", (104, 8), config, says="correct config.json")
    refuse_part("lm_head.weight", (100, 8), config)
    refuse_part("lm_head.weight", (100, 4), config | {"word_embed_proj_dim": 4})
    refuse_part("lm_head.weight", (50, 8), config | {"model_type": "our_own"})


def test_notes_on_what_was_trained_for_something_else():
    assert notes_on(NAMES, LLAMA | {"architectures": ["LlamaForCausalLM"]}) == []
    (note,) = notes_on(
        [*NAMES, "score.weight"], {"architectures": ["LlamaForSequenceClassification"]}
    )
    assert "score.weight is stored" in note
    assert "LlamaForSequenceClassification" in note
    assert notes_on([*NAMES, "v_head.summary.weight"], {})


def test_every_type_with_a_prefix_of_its_own_is_known():
    known = {name for types in TABLES["prefixes"].values() for name in types.split()}
    assert known - set(NORMS) <= {"dory", "openai-gpt"}
