"""GGUF files of random numbers, written by the ``gguf`` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from lmeval_screener.tokens.sets import load_token_set

WIDTH = 256
WORDS = [
    text
    for group in load_token_set("reference", "reference").groups.values()
    for text in group.texts()
]


# A control token, a byte piece, one that is unused, the ten digits, every reference word, filling.
TOKENS = ["<s>", "<0x37>", "+", *"0123456789", *(f"Ġ{word.strip()}" for word in WORDS)]
TOKENS += [f"filling{n}" for n in range(400 - len(TOKENS))]


def write(
    place: Path,
    tensors: dict[str, tuple[str, np.ndarray]],
    *,
    parts: int = 0,
    architecture: str = "llama",
    tokens: list[str] = TOKENS,
    **pairs: Any,
) -> list[Path]:
    """A GGUF file by the format's own writer; tensors are name -> (type, float32 matrix or raw bytes)."""
    writer = GGUFWriter(place, architecture, split_max_tensors=parts)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_array("tokenizer.ggml.scores", [0.5] * len(tokens))
    writer.add_token_list(tokens)
    writer.add_token_types(
        [3, 6, 5, *[1] * (len(tokens) - 3)] if tokens is TOKENS else [1] * len(tokens)
    )
    writer.add_token_merges([f"a b{n}" for n in range(500)])
    for key, value in pairs.items():
        writer.add_string(key, value)
    for name, (dtype, matrix) in tensors.items():
        kind = GGMLQuantizationType[dtype]
        if dtype in ("F32", "F16", "F64"):
            writer.add_tensor(
                name, matrix.astype({"F32": "<f4", "F16": "<f2", "F64": "<f8"}[dtype])
            )
        else:
            raw = matrix if matrix.dtype == np.uint8 else quantize(matrix, kind)
            writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(place.parent.glob("*.gguf"))


def matrix(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(len(TOKENS), WIDTH)).astype(np.float32)


def truth(dtype: str, stored: np.ndarray) -> np.ndarray:
    kind = GGMLQuantizationType[dtype]
    if dtype in ("F32", "F16"):
        return stored.astype("<f2" if dtype == "F16" else "<f4").astype(np.float64)
    raw = stored if stored.dtype == np.uint8 else quantize(stored, kind)
    return dequantize(raw, kind).astype(np.float64)
