"""Which tensor is the output projection: tied or not, packed, absent; every naming is in test_full_matrix."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from checkpoints import head_and_embedding, header, write_checkpoint, write_index, write_safetensors
from hub_client import read, refused, unread
from lmeval_screener.checkpoints.snapshot import open_folder
from lmeval_screener.weights.architectures import UNTIED_BY_DEFAULT, choose_tensor
from lmeval_screener.weights.projection import find_projection

V, D = 40, 8


def matrix(seed=0, v=V, d=D):
    return np.random.default_rng(seed).normal(size=(v, d))


def found(folder):
    return asyncio.run(find_projection(open_folder(folder)))


def test_a_head_under_an_unknown_wrapper_is_found_and_a_draft_head_is_not():
    names = ["base.wrapper.lm_head.weight", "model.embed_tokens.weight", "mtp.0.lm_head.weight"]
    assert choose_tensor(names, {"tie_word_embeddings": False}, []) == (
        "base.wrapper.lm_head.weight",
        False,
    )
    names = ["draft_model.lm_head.weight", "model.mtp.lm_head.weight", "model.embed_tokens.weight"]
    assert choose_tensor(names, {"tie_word_embeddings": True}, []) == (
        "model.embed_tokens.weight",
        True,
    )


@pytest.mark.parametrize(
    ("config", "warning"),
    [
        ({"tie_word_embeddings": True}, "lm_head.weight is stored: the stored head was read"),
        ({"model_type": "new_type", "vocab_size": V - 5}, None),  # padding
        ({"model_type": "new_type", "vocab_size": V + 5}, f"only {V} rows are stored"),
    ],
)
def test_a_stored_head_is_read_with_what_contradicts_it(tmp_path, config, warning):
    projection = found(write_checkpoint(tmp_path / "m", head_and_embedding(V, D), config=config))
    assert (projection.name, projection.tied) == ("lm_head.weight", False)
    assert [warning in text for text in projection.warnings] == ([True] if warning else [])


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"tie_word_embeddings": False}, "because config.json says"),
        ({"model_type": "llama"}, "because llama does not tie"),
    ],
)
def test_untied_without_a_head_is_a_contradiction(tmp_path, config, says):
    tensors = {"model.embed_tokens.weight": ("F32", matrix())}
    folder = write_checkpoint(tmp_path / "m", tensors, config=config)
    refused(found, folder, code="NoOutputProjection", says=says)
    for shape in ((V,), (V, D, 2), (0, D)):
        folder = write_checkpoint(
            tmp_path / "m", {"lm_head.weight": ("F32", np.zeros(shape))}, config=config
        )
        assert refused(found, folder).code == "NoOutputProjection"


def test_no_config_at_all_ties_with_a_warning(tmp_path):
    folder = write_checkpoint(tmp_path / "m", {"wte.weight": ("F32", matrix())})
    (folder / "config.json").unlink()
    projection = found(folder)
    assert projection.tied
    assert "does not say whether embeddings are tied" in projection.warnings[0]


@pytest.mark.filterwarnings("ignore")  # deprecations of transformers' own configurations
def test_defaults_are_those_of_the_installed_transformers():
    """Every default that transformers' own configurations have is the one we know."""
    pytest.importorskip("torch")  # without it transformers names no architecture
    transformers = pytest.importorskip("transformers")
    wrong, unbuilt, checked = [], {}, 0
    for config_class in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        try:
            config = config_class()
        except Exception as error:
            unbuilt[config_class.__name__] = error
            continue
        ties = getattr(config, "tie_word_embeddings", None)
        if ties is False:
            ties = getattr(config.get_text_config(), "tie_word_embeddings", False)
        checked += ties is not None
        if ties is not None and ties is (config.model_type in UNTIED_BY_DEFAULT):
            wrong.append(config.model_type)
    assert wrong == []
    assert len(unbuilt) <= 3, unbuilt  # a few cannot be made without arguments
    assert checked > 150


LAYOUTS = {
    "GPTQ": {"qweight": "U32", "qzeros": "U32", "scales": "F16", "g_idx": "U32"},
    "AWQ": {"qweight": "U32", "qzeros": "U32", "scales": "F16"},
    "compressed-tensors, packed": {"weight_packed": "U32", "weight_scale": "BF16"},
    "MLX": {"weight": "U32", "scales": "F16", "biases": "F16"},
    "NVFP4": {"weight_packed": "U8", "weight_scale": "F8_E4M3", "weight_global_scale": "F32"},
    "EXL2": {"q_weight": "U32", "q_scale": "U32", "q_perm": "I8"},
    "bitsandbytes, 8 bits": {"weight": "I8", "SCB": "F32"},
    "bitsandbytes, 4 bits": {"weight": "U8", "weight.absmax": "F32"},
    "only the layers are quantised": {"weight": "BF16"},
    "what does not change the rows": {
        **{"weight": "F32", "bias": "F32", "input_scale": "F32"},
        **{"additional_fc.weight": "F32", "input_zero_point": "F32"},
    },
    **{
        part: {part: "U32"}
        for part in ("weight_packed", "trellis", "W_q", "_weight_qdata", "weight_g")
    },
    "parametrised": {"parametrizations.weight.original0": "U32"},
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("stem", ["lm_head", "language_model.lm_head", "embed_out"])
@pytest.mark.parametrize("shards", [1, 3])
def test_layouts_of_quantised_models(tmp_path, name, stem, shards):
    """Where the embedding is stored plainly beside it, the embedding is not what the model multiplies by."""
    inner = {
        f"model.layers.0.mlp.up_proj.{part}": ("U32", matrix()) for part in ("qweight", "scales")
    }
    head = {f"{stem}.{part}": (dtype, matrix()) for part, dtype in LAYOUTS[name].items()}
    rest = {
        "model.embed_tokens.weight": ("F16", matrix()),
        "model.norm.weight": ("F16", matrix()[0]),
    }
    tensors = rest | inner | head
    config = {
        "model_type": "new_wrapper",
        "quantization_config": {"bits": 4},
        "tie_word_embeddings": True,
    }
    folder = write_checkpoint(tmp_path / "m", tensors, config=config, shards=shards)
    if LAYOUTS[name].get("weight") in ("BF16", "F32"):
        assert found(folder).name == f"{stem}.weight"
    else:
        error = refused(found, folder, code="QuantizedTensor", says=f"{stem}.")
        assert "unquantised" in str(error)


def test_a_packed_embedding_names_what_to_screen_instead(tmp_path):
    stem = "model.embed_tokens"
    tensors = {f"{stem}.weight": ("U32", matrix()), f"{stem}.scales": ("F16", matrix())}
    folder = write_checkpoint(tmp_path / "m", tensors, config={"tie_word_embeddings": True})
    because = f"cannot be screened because {stem}.weight is stored as U32 with {stem}.scales"
    assert str(refused(found, folder)).startswith(because)
    (folder / "README.md").write_text(CARD)
    assert "; screen org/base, which its README.md names" in str(refused(found, folder))


CARD = "---\nlicense: mit\nbase_model:\n- org/base\n---\n# Title\n"
ADAPTER = json.dumps({"base_model_name_or_path": "org/base"})
SHARDS = ["model-00001-of-00002", "model-00002-of-00002"]
BASE = "screen org/base, which its "


@pytest.mark.parametrize(
    ("files", "code", "says"),
    [
        ({"weights.bin": "{}"}, "NoSafetensors", "only as weights.bin, where model.safetensors or"),
        (
            {f"pytorch_{name}.bin": "{}" for name in SHARDS},
            "NoSafetensors",
            f"{SHARDS[1]}.bin, where",
        ),
        (
            {f"{name}.safetensors": "" for name in SHARDS},
            "NoSafetensors",
            "no model.safetensors.index",
        ),
        ({"README.md": CARD.replace("\n- org", " org")}, "NoSafetensors", f"{BASE}README.md"),
        ({"adapter_config.json": ADAPTER}, "AdapterOnly", f"{BASE}adapter_config.json"),
        ({"adapter_model.bin": "", "README.md": CARD}, "AdapterOnly", f"{BASE}README.md"),
        # A readme that says nothing usable costs only the hint.
        *(
            (
                {"README.md": card},
                "NoSafetensors",
                "it holds no weights; check the name",
            )
            for card in ("", "---\n[", "---\nbase_model: 'a b; rm'\n---", "---\n- x\n---")
        ),
    ],
)
def test_what_cannot_be_screened_says_why_and_what_to_screen(tmp_path, files, code, says):
    # None has a tokenizer, which is not what to complain of.
    for name, text in files.items():
        (tmp_path / name).write_bytes(text.encode() or header([]))
    message = unread(tmp_path, code, says).message
    assert message.startswith("cannot be screened because")
    if "it holds no weights" in message:
        assert ("or screen" in message) == says.startswith(BASE)


def test_an_adapter_without_its_configuration_and_a_stale_index_are_noted(tmp_path):
    folder = write_checkpoint(tmp_path / "m", head_and_embedding())
    write_safetensors(folder / "adapter_model.safetensors", {"x.lora_A.weight": ("F32", matrix())})
    projection = found(folder)
    note = (
        "adapter_model.safetensors has no adapter_config.json: no program applies it to the weights"
    )
    assert (projection.file, projection.warnings) == ("model.safetensors", (note,))
    write_index(folder, {"lm_head.weight": "model-00001-of-00002.safetensors"})
    projection = found(folder)
    assert projection.file == "model.safetensors"
    assert any("both" in warning for warning in projection.warnings)


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *((INDEX, content) for content in (b"{", b"[]", b"{}", b'{"weight_map": []}')),
        (INDEX, b'{"weight_map": {"lm_head.weight": 3}}'),
        (INDEX, b'{"weight_map": {"lm_head.weight": "model-00009-of-00002.safetensors"}}'),
        (INDEX, b'{"weight_map": {"lm_head.weight": "../../etc/passwd"}}'),
        (INDEX, b'{"weight_map": {"lm_head.weight": "config.json"}}'),
        (INDEX, b'{"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}'),
        *(("config.json", content) for content in (b"{", b"[1]", b'{"a":' * 50_000, b"\xff")),
    ],
)
def test_a_broken_or_stale_index_and_a_broken_config_are_refused(tmp_path, file, content):
    folder = write_checkpoint(tmp_path / "m", head_and_embedding(), shards=2)
    assert found(folder).file == "model-00001-of-00002.safetensors"
    (folder / file).write_bytes(content)
    assert refused(found, folder).code == ("BadIndex" if file == INDEX else "BadConfig")


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"total_parameters": 77, "total_size": 9999}, 77),
        ({"total_size": 15_231_233_024.0}, 7_615_616_512),
        ({"total_size": "much"}, None),
        ({"total_size": float("inf")}, None),
        (["nothing"], None),
    ],
)
def test_parameters_of_a_remote_checkpoint_that_nobody_counted(hub, tmp_path, metadata, expected):
    """Mirrors and private repositories do not say how many there are; the index says it in bytes."""
    folder = write_checkpoint(tmp_path / "m", head_and_embedding(V, D, dtype="BF16"), shards=2)
    place = folder / "model.safetensors.index.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "metadata": metadata}))
    hub.add("org/m", folder)

    assert read(hub, tmp_path / "cache", "org/m", ids=(0,)).projection.parameters == expected


@pytest.mark.parametrize("tied", [True, False])
def test_a_factor_for_each_logit_is_refused(tmp_path, tied):
    """Dory: its logits are those of the head times a learned vector, also where the head is tied."""
    head = {} if tied else {"lm_head.weight": ("F32", matrix())}
    tensors = {
        "model.embed_tokens.weight": ("F32", matrix()),
        "lm_head.logit_scale": ("F32", np.ones(V)),
    }
    config = {"model_type": "dory", "tie_word_embeddings": tied}
    folder = write_checkpoint(tmp_path / "m", tensors | head, config=config)
    refused(found, folder, code="NoOutputProjection", says="learned lm_head.logit_scale")
