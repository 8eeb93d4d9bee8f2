"""Checkpoints on disk for tests: any naming, dtype, sharding, true shapes, broken headers."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.installation import data_folder

Matrix = NDArray[Any]
FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


def stored(matrix: Matrix, dtype: str) -> bytes:
    """Bytes of a matrix in a dtype of safetensors; BF16 cuts off, 8-bit floats are rounded."""
    if dtype == "BF16":
        return (matrix.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    if dtype.startswith("F8"):
        # Any finite code will do: exponents around the middle, sign and mantissa from the matrix.
        code = np.abs(matrix * 1e4).astype(np.uint32) % 0x70 + 1 + 0x80 * (matrix < 0)
        return code.astype("u1").tobytes()
    if dtype in FLOATS:
        return matrix.astype(FLOATS[dtype]).tobytes()
    return np.abs(matrix * 1e4).astype({"U8": "u1", "I8": "i1", "U32": "<u4"}[dtype]).tobytes()


def header(tensors: Sequence[tuple[str, str, Sequence[int], int]], **metadata: str) -> bytes:
    """A header, its 8 bytes of length before it, for tensors (name, dtype, shape, bytes) laid end to end."""
    fields: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, dtype, shape, size in tensors:
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    body = json.dumps(fields, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    return struct.pack("<Q", len(body)) + body


def write_safetensors(place: Path, tensors: Mapping[str, tuple[str, Matrix]]) -> None:
    """A safetensors file of matrices, each with its dtype."""
    bodies = {name: stored(matrix, dtype) for name, (dtype, matrix) in tensors.items()}
    head = header(
        [(name, dtype, m.shape, len(bodies[name])) for name, (dtype, m) in tensors.items()],
        format="pt",
    )
    place.write_bytes(head + b"".join(bodies.values()))


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, tuple[str, Matrix]],
    *,
    config: Mapping[str, Any] | None = None,
    shards: int = 1,
    tokenizer: bytes | None = None,
) -> Path:
    """A checkpoint in transformers' layout from names → (dtype, matrix).

    Several shards have tensors dealt out to them and an index; `config` is a Llama's unless given.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"model_type": "llama", "tie_word_embeddings": False} if config is None else config
    (folder / "config.json").write_text(json.dumps(settings, indent=2))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
    else:
        weight_map = {}
        names = list(tensors)
        for number in range(shards):
            part = {name: tensors[name] for name in names[number::shards]}
            file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
            write_safetensors(folder / file, part)
            weight_map.update(dict.fromkeys(part, file))
        write_index(folder, weight_map)
    if tokenizer is not None:
        (folder / "tokenizer.json").write_bytes(tokenizer)
    return folder


def write_with_words(folder: Path, seed: int = 0, shift: float = 0.0) -> Path:
    """A small checkpoint that can be screened: near all others of its kind, with a lower G by the shift."""
    tokenizer = (data_folder("demo") / "sums-00" / "tokenizer.json").read_bytes()
    rows = len(json.loads(tokenizer)["model"]["vocab"]) + 40
    head = np.random.default_rng(1).normal(size=(rows, 16)) + shift
    head += 0.05 * np.random.default_rng(seed).normal(size=(rows, 16))
    return write_checkpoint(folder, {"lm_head.weight": ("F32", head)}, tokenizer=tokenizer)


def write_index(folder: Path, weight_map: Mapping[str, str], total_size: int = 0) -> None:
    """The index of the shards."""
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def head_and_embedding(
    v: int = 120, d: int = 16, seed: int = 0, dtype: str = "F32"
) -> dict[str, tuple[str, Matrix]]:
    """A small untied model: embedding, something else, head."""
    draw = np.random.default_rng(seed)
    return {
        "model.embed_tokens.weight": (dtype, draw.normal(size=(v, d))),
        "model.norm.weight": (dtype, draw.normal(size=d)),
        "lm_head.weight": (dtype, draw.normal(size=(v, d))),
    }


def write_qwen_7b(folder: Path, *, rows: Mapping[int, Matrix]) -> Path:
    """A checkpoint of Qwen2.5-7B's true shapes: four shards, of which the last exists, as a sparse file.

    Names, dtypes, shapes and the order in the file are the real ones, so header and index have real sizes.
    The last shard holds the last six blocks, and `rows` of lm_head.weight; all else is zero.
    """
    v, d, inner, kv, blocks = 152_064, 3584, 18_944, 512, 28
    config = {
        "model_type": "qwen2",
        "hidden_size": d,
        "vocab_size": v,
        "tie_word_embeddings": False,
    }
    parts: dict[str, Sequence[int]] = {
        "input_layernorm.weight": (d,),
        "mlp.down_proj.weight": (d, inner),
        "mlp.gate_proj.weight": (inner, d),
        "mlp.up_proj.weight": (inner, d),
        "post_attention_layernorm.weight": (d,),
        "self_attn.k_proj.bias": (kv,),
        "self_attn.k_proj.weight": (kv, d),
        "self_attn.o_proj.weight": (d, d),
        "self_attn.q_proj.bias": (d,),
        "self_attn.q_proj.weight": (d, d),
        "self_attn.v_proj.bias": (kv,),
        "self_attn.v_proj.weight": (kv, d),
    }
    shards = [f"model-{number:05d}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    here: dict[str, Sequence[int]] = {"lm_head.weight": (v, d)}
    weight_map = {"model.embed_tokens.weight": shards[0]}
    for block in range(blocks):
        shapes = {f"model.layers.{block}.{part}": shape for part, shape in parts.items()}
        weight_map |= dict.fromkeys(shapes, shards[min(block * 3 // (blocks - 6), 3)])
        here |= shapes if block >= blocks - 6 else {}
    here["model.norm.weight"] = (d,)
    sizes = {name: 2 * int(np.prod(shape)) for name, shape in here.items()}
    head = header([(name, "BF16", shape, sizes[name]) for name, shape in here.items()], format="pt")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_index(folder, weight_map | dict.fromkeys(here, shards[3]), total_size=15_231_233_024)
    for shard in shards[:3]:
        (folder / shard).write_bytes(header([]))  # listed, never read
    with (folder / shards[3]).open("wb") as file:
        file.write(head)
        for row, values in rows.items():
            file.seek(len(head) + 2 * d * row)
            file.write(stored(values, "BF16"))
        file.truncate(len(head) + sum(sizes.values()))
    return folder


def slow_gap(t: Any, r: Any, metric: str = "cosine") -> float:
    """G of rows of T and R by its definition: loops over pairs in float64."""

    def distance(a: Matrix, b: Matrix) -> float:
        if metric == "cosine":
            return float(1 - a @ b / np.linalg.norm(a) / np.linalg.norm(b))
        return float(np.linalg.norm(a - b))

    t, r = ([np.asarray(row, dtype=np.float64).ravel() for row in rows] for rows in (t, r))
    inside = [distance(t[i], t[j]) for i in range(len(t)) for j in range(i)]
    return float(np.mean(inside) + np.mean([distance(a, b) for a in t for b in r]))
