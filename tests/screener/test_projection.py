"""Which tensor is the output projection: every naming, tied or not, wrapped, sharded, packed."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from checkpoints import head_and_embedding, header, write_checkpoint, write_index, write_safetensors
from lmeval_screener.checkpoints.hub import Hub
from lmeval_screener.checkpoints.snapshots import open_folder
from lmeval_screener.errors import ScreeningError
from lmeval_screener.weights.architectures import (
    EMBEDDINGS,
    HEADS,
    UNTIED_BY_DEFAULT,
    WRAPPERS,
    choose_tensor,
)
from lmeval_screener.weights.projection import find_projection

V, D = 40, 8


def matrix(seed=0, v=V, d=D):
    return np.random.default_rng(seed).normal(size=(v, d))


def found(folder):
    return asyncio.run(find_projection(open_folder(folder)))


def refusal(folder):
    with pytest.raises(ScreeningError) as error:
        found(folder)
    return error.value


@pytest.mark.parametrize("config", [{"tie_word_embeddings": True}, {"model_type": "gemma2"}])
def test_every_naming(config):
    """What is read of them is in test_full_matrix."""
    others = [
        "model.norm.weight",
        "visual.embed_tokens.weight",
        "model.layers.0.lm_head.weight",
        "mtp.lm_head.weight",
    ]
    for wrapper in WRAPPERS:
        for name in EMBEDDINGS:
            warnings = []
            assert choose_tensor([wrapper + name, *others], config, warnings) == (wrapper + name, True)
            assert warnings == []
        for name in HEADS:
            stored = ["model.embed_tokens.weight", wrapper + name, *others]
            assert choose_tensor(stored, {"model_type": "llama"}, []) == (wrapper + name, False)


def test_a_head_under_an_unknown_wrapper_is_found_and_a_draft_head_is_not():
    names = ["base.wrapper.lm_head.weight", "model.embed_tokens.weight", "mtp.0.lm_head.weight"]
    assert choose_tensor(names, {"tie_word_embeddings": False}, []) == ("base.wrapper.lm_head.weight", False)
    names = ["draft_model.lm_head.weight", "model.mtp.lm_head.weight", "model.embed_tokens.weight"]
    assert choose_tensor(names, {"tie_word_embeddings": True}, []) == ("model.embed_tokens.weight", True)


def test_tied_in_the_config_but_stored_reads_the_stored_one_and_says_so(tmp_path):
    folder = write_checkpoint(tmp_path / "m", head_and_embedding(), config={"tie_word_embeddings": True})
    projection = found(folder)
    assert (projection.name, projection.tied) == ("lm_head.weight", False)
    assert "lm_head.weight is stored" in projection.warnings[0]


@pytest.mark.parametrize("config", [{"tie_word_embeddings": False}, {"model_type": "llama"}])
def test_untied_without_a_head_is_a_contradiction(tmp_path, config):
    tensors = {"model.embed_tokens.weight": ("F32", matrix())}
    error = refusal(write_checkpoint(tmp_path / "m", tensors, config=config))
    assert error.code == "NoOutputProjection"
    assert str(error).startswith("cannot be screened because config.json says")


def test_no_config_at_all_ties_with_a_warning(tmp_path):
    folder = write_checkpoint(tmp_path / "m", {"wte.weight": ("F32", matrix())})
    (folder / "config.json").unlink()
    projection = found(folder)
    assert projection.tied
    assert "silent" in projection.warnings[0]


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
        says = getattr(config, "tie_word_embeddings", None)
        checked += says is not None
        if says is False and config.model_type not in UNTIED_BY_DEFAULT:
            inner = getattr(config.get_text_config(), "tie_word_embeddings", False)
            if not inner:
                wrong.append(config.model_type)
        if says is True and config.model_type in UNTIED_BY_DEFAULT:
            wrong.append(config.model_type)
    assert wrong == []
    assert len(unbuilt) <= 3, unbuilt  # a few cannot be made without arguments
    assert checked > 150


def test_padding_is_silent_and_a_short_vocabulary_is_not(tmp_path):
    config = {"model_type": "llama", "vocab_size": V - 5}
    assert found(write_checkpoint(tmp_path / "a", head_and_embedding(V, D), config=config)).warnings == ()
    config["vocab_size"] = V + 5
    warnings = found(write_checkpoint(tmp_path / "b", head_and_embedding(V, D), config=config)).warnings
    assert f"only {V} rows" in warnings[0]


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.qweight",
        "lm_head.weight_packed",
        "lm_head.q_weight",
        "lm_head.trellis",
        "lm_head.W_q",
        "lm_head._weight_qdata",
        "lm_head.parametrizations.weight.original0",
        "lm_head.base_layer.weight",
        "lm_head.weight_g",
        "language_model.lm_head.qweight",
        "output.qweight",
        "embed_out.qweight",
    ],
)
def test_a_head_packed_under_another_name(tmp_path, name):
    """Where the embedding is stored plainly beside it, the embedding is not what the model multiplies by."""
    tensors = {"model.embed_tokens.weight": ("F16", matrix()), name: ("U32", matrix())}
    error = refusal(write_checkpoint(tmp_path / "m", tensors, config={"model_type": "gemma"}))
    assert error.code == "QuantizedTensor"
    assert name in str(error)


@pytest.mark.parametrize("beside", ["bias", "input_scale", "additional_fc.weight", "input_zero_point"])
def test_what_does_not_change_the_rows_may_stand_beside_them(tmp_path, beside):
    tensors = {"lm_head.weight": ("F32", matrix()), f"lm_head.{beside}": ("F32", np.ones(1))}
    assert found(write_checkpoint(tmp_path / "m", tensors)).name == "lm_head.weight"


@pytest.mark.parametrize(
    ("stored", "screened"),
    [
        pytest.param({"qweight": "U32", "qzeros": "U32", "scales": "F16", "g_idx": "U32"}, False, id="GPTQ"),
        pytest.param({"qweight": "U32", "qzeros": "U32", "scales": "F16"}, False, id="AWQ"),
        pytest.param(
            {"weight_packed": "U32", "weight_scale": "BF16"}, False, id="compressed-tensors, packed"
        ),
        pytest.param({"weight": "U32", "scales": "F16", "biases": "F16"}, False, id="MLX"),
        pytest.param(
            {"weight_packed": "U8", "weight_scale": "F8_E4M3", "weight_global_scale": "F32"},
            False,
            id="NVFP4",
        ),
        pytest.param({"q_weight": "U32", "q_scale": "U32", "q_perm": "I8"}, False, id="EXL2"),
        pytest.param({"weight": "I8", "SCB": "F32"}, False, id="bitsandbytes, 8 bits"),
        pytest.param({"weight": "U8", "weight.absmax": "F32"}, False, id="bitsandbytes, 4 bits"),
        pytest.param({"weight": "BF16"}, True, id="only the layers are quantised"),
    ],
)
@pytest.mark.parametrize("shards", [1, 3])
def test_layouts_of_quantised_models(tmp_path, stored, screened, shards):
    inner = {f"model.layers.0.mlp.up_proj.{part}": ("U32", matrix()) for part in ("qweight", "scales")}
    head = {f"lm_head.{part}": (dtype, matrix()) for part, dtype in stored.items()}
    tensors = {"model.embed_tokens.weight": ("F16", matrix()), **inner, **head}
    config = {"model_type": "llama", "tie_word_embeddings": False, "quantization_config": {"bits": 4}}
    folder = write_checkpoint(tmp_path / "m", tensors, config=config, shards=shards)
    if screened:
        assert found(folder).name == "lm_head.weight"
    else:
        error = refusal(folder)
        assert error.code == "QuantizedTensor"
        assert "lm_head." in str(error)
        assert "unquantised" in str(error)


CARD = "---\nbase_model: org/base\nbase_model_relation: quantized\n---\n# A card\n"


@pytest.mark.parametrize(
    ("files", "config", "step"),
    [
        ({"README.md": CARD}, {}, "screen org/base, which its README.md names"),
        ({}, {}, "screen the unquantised model"),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_head_names_what_to_screen_instead(tmp_path, files, config, step, tied):
    stem = "model.embed_tokens" if tied else "lm_head"
    tensors = {f"{stem}.weight": ("U32", matrix()), f"{stem}.scales": ("F16", matrix())}
    settings = {"model_type": "llama", "tie_word_embeddings": tied} | config
    folder = write_checkpoint(tmp_path / "m", tensors, config=settings)
    for name, text in files.items():
        (folder / name).write_text(text)
    error = refusal(folder)
    assert error.code == "QuantizedTensor"
    assert str(error).startswith(
        f"cannot be screened because {stem}.weight is stored as U32 with {stem}.scales"
    )
    assert step in str(error)


@pytest.mark.parametrize("shape", [(V,), (V, D, 2), (0, D)])
def test_a_head_that_is_no_matrix(tmp_path, shape):
    tensors = {"lm_head.weight": ("F32", np.zeros(shape))}
    assert refusal(write_checkpoint(tmp_path / "m", tensors)).code == "NoOutputProjection"


@pytest.mark.parametrize(
    ("files", "code", "says"),
    [
        (["weights.bin"], "NoSafetensors", ".bin"),
        (["consolidated.00.pth"], "NoSafetensors", ".pth"),
        ([], "NoSafetensors", "no weights"),
        (["adapter_config.json", "adapter_model.safetensors"], "AdapterOnly", "adapter"),
        (["adapter_config.json", "adapter_model.bin"], "AdapterOnly", "adapter"),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], "NoSafetensors", "index"),
    ],
)
def test_what_cannot_be_screened_says_why(tmp_path, files, code, says):
    (tmp_path / "config.json").write_text("{}")
    for file in files:
        (tmp_path / file).write_bytes(header([]))
    error = refusal(tmp_path)
    assert error.code == code
    assert says in str(error)
    assert str(error).startswith("cannot be screened because")


def test_an_adapter_beside_its_base_does_not_disturb(tmp_path):
    folder = write_checkpoint(tmp_path / "m", head_and_embedding())
    write_safetensors(folder / "adapter_model.safetensors", {"x.lora_A.weight": ("F32", matrix())})
    (folder / "adapter_config.json").write_text("{}")
    projection = found(folder)
    assert projection.file == "model.safetensors"
    assert projection.warnings == (
        "adapter_model.safetensors lies beside the weights and was not applied to them",
    )


def test_an_index_beside_a_single_file_is_stale(tmp_path):
    folder = write_checkpoint(tmp_path / "m", head_and_embedding())
    write_index(folder, {"lm_head.weight": "model-00001-of-00002.safetensors"})
    projection = found(folder)
    assert projection.file == "model.safetensors"
    assert "both" in projection.warnings[0]


@pytest.mark.parametrize(
    "index",
    [
        b"{",
        b"[]",
        b"{}",
        b'{"weight_map": []}',
        b'{"weight_map": {"lm_head.weight": 3}}',
        b'{"weight_map": {"lm_head.weight": "model-00009-of-00002.safetensors"}}',
        b'{"weight_map": {"lm_head.weight": "../../etc/passwd"}}',
        b'{"weight_map": {"lm_head.weight": "config.json"}}',
        b'{"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}',
    ],
)
def test_a_broken_or_stale_index_is_refused(tmp_path, index):
    folder = write_checkpoint(tmp_path / "m", head_and_embedding(), shards=2)
    assert json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shard = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]["lm_head.weight"]
    if b"00001-of" in index and shard == "model-00001-of-00002.safetensors":
        index = index.replace(b"00001-of", b"00002-of")
    (folder / "model.safetensors.index.json").write_bytes(index)
    assert refusal(folder).code == "BadIndex"


@pytest.mark.parametrize("config", [b"{", b"[1]", b'{"a":' * 50_000, b"\xff"])
def test_a_broken_config_is_refused(tmp_path, config):
    folder = write_checkpoint(tmp_path / "m", head_and_embedding())
    (folder / "config.json").write_bytes(config)
    assert refusal(folder).code == "BadConfig"


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"total_parameters": 77, "total_size": 9999}, 77),
        ({"total_size": 15_231_233_024}, 7_615_616_512),
        ({"total_size": 15_231_233_024.0}, 7_615_616_512),
        ({"total_size": "much"}, None),
        ({"total_size": True}, None),
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

    async def work():
        async with Hub(endpoint=hub.endpoint, cache=tmp_path / "cache") as pool:
            return await find_projection(await pool.snapshot("org/m"))

    assert asyncio.run(work()).parameters == expected
