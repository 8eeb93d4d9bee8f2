"""Tensors beside a matrix: scales of 8-bit floats, which are applied, and all others, which are refused.

A matrix of 8-bit floats is ``code × scale``. Programs store the scales in one form under two names
(``weight_scale`` of compressed-tensors, fbgemm and ModelOpt; ``weight_scale_inv`` of DeepSeek and
transformers, which in spite of its name multiplies too): one number for the matrix, one for each row, or one
for each block, most often of 128 × 128.

Sources: https://github.com/deepseek-ai/DeepSeek-V3 (README_WEIGHTS.md), transformers'
``integrations/finegrained_fp8.py``, compressed-tensors' ``quantization/lifecycle/forward.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from lmeval_screener.weights.tensors import SCALED_DTYPES, Tensor

#: Scales that are applied, by their names beside a ``weight``.
SCALES = ("weight_scale", "weight_scale_inv")
SCALE_DTYPES = ("F32", "F16", "BF16", "F64", "F8_E8M0")
#: What may stand beside a matrix without changing its rows: scales of its *input*, a bias, further rows.
_HARMLESS = re.compile(
    r"bias|embed_scale|(input|output)_(scale|scale_inv|zero_point|global_scale|amax)|"
    r"additional_(fc|embedding)\.(weight|bias)"
)
#: What stands in place of a ``weight`` that is packed, split or not merged with its adapter.
_PACKED = re.compile(
    r"(qweight|q_weight|qzeros|scales|q_scale\w*|g_idx|weight_packed|weight_scale\w*|weight_zero_point|weight\..+|"
    r"_weight_\w+|SCB|W_q|trellis|suh|svh|codes|codebooks|absmax|weight_[gvq]\w*|tq_\w+|parametrizations\..+|"
    r"base_layer\..+|lora_\w+(\..+)?)"
)
_USUAL_BLOCK = 128


def packed(stored: Iterable[str], stems: Iterable[str]) -> str | None:
    """A stored tensor that stands in place of a head's weight, if there is one."""
    ends = tuple(stems)
    for name in sorted(stored):
        stem = next((stem for stem in ends if name.startswith(stem)), None)
        if stem is not None and _PACKED.fullmatch(name.removeprefix(stem)):
            return name
    return None


def companions(name: str, stored: Iterable[str]) -> list[str]:
    """Tensors beside a matrix that change what its rows mean, by names without the matrix's own stem."""
    stem = name.removesuffix("weight")
    beside = sorted(other.removeprefix(stem) for other in stored if other.startswith(stem) and other != name)
    return [word for word in beside if not _HARMLESS.fullmatch(word)]


class Blocks(NamedTuple):
    """How scales cover a matrix: rows and columns of blocks, and those of the matrix in one block."""

    shape: tuple[int, int]
    size: tuple[int, int]


def blocks_of(tensor: Tensor, scale: Tensor, quantization: Mapping[str, Any] | None) -> Blocks | str:
    """How stored scales cover a matrix of 8-bit floats; where that is not known, a clause that says why."""
    v, d = tensor.shape
    shape = scale.shape
    if tensor.dtype not in SCALED_DTYPES or scale.dtype not in SCALE_DTYPES:
        return f"with {scale.name} of {scale.dtype} beside it"
    if scale.elements == 1:
        rows, columns = 1, 1
    elif len(shape) == 1 and shape[0] == v:
        rows, columns = v, 1
    elif len(shape) == 2:
        rows, columns = shape
    else:
        return f"with {scale.name} of shape {shape} beside it"
    said = _blocks(quantization)
    high, wide = _side(v, rows, [b[0] for b in said]), _side(d, columns, [b[1] for b in said])
    if high is None or wide is None:
        return f"with {scale.name} of shape {shape} beside it, blocks of no known size"
    return Blocks((rows, columns), (high, wide))


def _side(length: int, count: int, said: list[int]) -> int | None:
    """Weights on one side of a block, where ``count`` blocks cover ``length`` weights."""
    if count == 1:
        return length
    if count == length:
        return 1
    if not said:
        said = [_USUAL_BLOCK] + ([length // count] if count and length % count == 0 else [])
    fitting = {size for size in said if size > 0 and -(-length // size) == count}
    return fitting.pop() if len(fitting) == 1 else None


def _blocks(quantization: Mapping[str, Any] | None) -> list[tuple[int, int]]:
    """Sizes of blocks in config.json: ``weight_block_size``, or those of compressed-tensors' groups."""
    if not isinstance(quantization, Mapping):
        return []
    named = [quantization.get("weight_block_size")]
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            named.append(weights.get("block_structure"))
            size = weights.get("group_size")
            named.append([1, size] if type(size) is int else None)
    blocks = []
    for size in named:
        parts = size.split("x") if isinstance(size, str) else size
        if isinstance(parts, list) and len(parts) == 2 and all(str(part).isdecimal() for part in parts):
            blocks.append((int(parts[0]), int(parts[1])))
    return blocks
