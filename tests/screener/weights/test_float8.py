"""Heads of 8-bit floats: their scales are applied as transformers and compressed-tensors apply them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hub_client import read, read_folder, refused
from safetensors.torch import save_file

V, D = 384, 256
IDS = [0, 1, 127, 128, 255, 256, 383]
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
SCALES = {
    "tensor": (1,),
    "number": (),
    "rows": (V, 1),
    "row list": (V,),
    "blocks": (3, 2),
    "groups": (V, 8),
}


def codes(v=V, d=D, dtype=torch.float8_e4m3fn):
    return (torch.randn(v, d, generator=torch.Generator().manual_seed(0)) * 30).to(dtype)


def scales(shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.01


def write(folder, tensors, config=None):
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    settings = {"model_type": "llama", "tie_word_embeddings": False} | (config or {})
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def rows(folder, ids=IDS):
    return read_folder(folder, ids).rows


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("blocks", ["blocks", "tensor"])
def test_as_transformers_dequantises_them(tmp_path, dtype, blocks):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight, scale = codes(dtype=dtype), scales(SCALES[blocks])
    grid = scale if blocks == "blocks" else scale.reshape(1, 1)
    expected = Fp8Dequantize(None)._dequantize_one(weight, grid)
    folder = write(
        tmp_path,
        {"lm_head.weight": weight, "lm_head.weight_scale_inv": scale},
        {"quantization_config": FP8},
    )
    np.testing.assert_array_equal(rows(folder), expected.numpy()[IDS])
    # The scales matter: the bare codes are another matrix.
    assert np.abs(rows(folder) - weight.float().numpy()[IDS]).max() > 1


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ("tensor", {"strategy": "tensor"}),
        ("number", {"strategy": "tensor"}),
        ("rows", {"strategy": "channel"}),
        ("blocks", {"strategy": "block", "block_structure": [128, 128]}),
        ("groups", {"strategy": "group", "group_size": 32}),
    ],
)
def test_as_compressed_tensors_dequantises_them(tmp_path, shape, settings):
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    weight, scale = codes(), scales(SCALES[shape])
    arguments = QuantizationArgs(num_bits=8, type="float", symmetric=True, **settings)
    expected = dequantize(weight, scale, args=arguments)
    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    config["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": settings}}
    tensors = {
        "lm_head.weight": weight,
        "lm_head.weight_scale": scale,
        "lm_head.input_scale": scales((1,)),
    }
    folder = write(tmp_path, tensors, {"quantization_config": config})
    np.testing.assert_array_equal(rows(folder), expected.numpy()[IDS])


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e8m0fnu]
)
@pytest.mark.parametrize("config", [None, {"quantization_config": FP8}])
def test_scales_of_every_type_whose_blocks_are_cut_off_at_the_edge(tmp_path, dtype, config):
    weight, scale = codes(301, 201), scales((3, 2)).to(dtype)
    folder = write(tmp_path, {"lm_head.weight": weight, "lm_head.weight_scale_inv": scale}, config)
    ids = [127, 128, 255, 256, 300]
    wide = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[:301, :201]
    np.testing.assert_array_equal(rows(folder, ids), (weight.float() * wide).numpy()[ids])


def test_a_tied_embedding_and_scales_in_another_shard(tmp_path):
    weight, scale = codes(), scales((V, 1))
    folder = write(tmp_path, {"model.embed_tokens.weight": weight}, {"tie_word_embeddings": True})
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    save_file(
        {"model.embed_tokens.weight_scale": scale}, folder / "model-00002-of-00002.safetensors"
    )
    parts = {"weight": "1", "weight_scale": "2"}
    index = {
        f"model.embed_tokens.{n}": f"model-0000{k}-of-00002.safetensors" for n, k in parts.items()
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    np.testing.assert_array_equal(rows(folder), (weight.float() * scale).numpy()[IDS])


@pytest.mark.parametrize(
    ("weight", "beside", "block", "says"),
    [
        (codes(), {"weight_scale": (5, 2)}, None, "block size is not known"),
        (codes(), {"weight_scale": (2, 2, 2)}, None, "of shape (2, 2, 2)"),
        (
            codes(),
            {"weight_scale": (V, 1), "weight_zero_point": (V, 1)},
            None,
            "weight_zero_point next to it",
        ),
        (
            codes(),
            {"weight_scale": (V, 1), "weight_scale_2": (1,)},
            None,
            "weight_scale_2 next to it",
        ),
        (
            codes(),
            {"weight_scale": (V, 1), "weight_scale_inv": (V, 1)},
            None,
            "weight_scale next to it",
        ),
        (codes(), {"scale": (3, 2)}, None, "lm_head.scale next to it"),
        (codes(), {"SCB": (V,)}, None, "lm_head.SCB next to it"),
        (codes(), {"weight_scale_inv": (3, 2)}, [64, 64], "block size is not known"),
        # 250 rows in two blocks: of 128 and 122, or of 125 each?
        (codes(250), {"weight_scale_inv": (2, 2)}, None, "block size is not known"),
        (codes(250), {"weight_scale_inv": (2, 2)}, [128, 128], None),
        (codes(), {}, [128, 128], "without the scales"),
        (codes(), {}, None, None),
        (
            codes().bfloat16(),
            {"weight_scale": (V, 1)},
            None,
            "as BF16 with lm_head.weight_scale next to it",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path, weight, beside, block, says):
    tensors = {"lm_head.weight": weight} | {f"lm_head.{n}": scales(s) for n, s in beside.items()}
    config = {"quantization_config": FP8 | {"weight_block_size": block}} if block else None
    folder = write(tmp_path, tensors, config)
    if says is None:
        factor = 1 if not beside else scales((2, 2))[0, 0]
        np.testing.assert_array_equal(
            rows(folder, [0])[0, :128], (weight.float()[0, :128] * factor).numpy()
        )
    else:
        refused(rows, folder, code="QuantizedTensor", says=says)


@pytest.mark.parametrize("shape", [(V, 1), (3, 2), (1,)])
def test_from_afar_scales_cost_few_requests_and_come_from_the_cache(hub, tmp_path, shape):
    weight, scale = codes(), scales(shape)
    folder = write(tmp_path / "m", {"lm_head.weight": weight, "lm_head.weight_scale": scale})
    hub.add("org/m", folder)

    read(hub, tmp_path / "cache", "org/m", ids=())
    first = read(hub, tmp_path / "cache", "org/m", ids=tuple(IDS))
    np.testing.assert_array_equal(first.rows, rows(folder))
    assert first.snapshot.account.requests <= 7  # the branch, five runs of rows and one of scales
    again = read(hub, tmp_path / "cache", "org/m", ids=tuple(IDS))
    np.testing.assert_array_equal(again.rows, first.rows)
    assert again.snapshot.account.requests == 1
