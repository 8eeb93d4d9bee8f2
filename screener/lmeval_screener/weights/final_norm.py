"""The final norm's weight γ, which stands between the last state and the output projection.

A softmax sees ``row · (γ ∘ x)``, x being the normed state: what a token's row does is ``γ ∘ row``. A scale
that moves between γ and the rows moves no prediction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmeval_screener.checkpoints.snapshot import Snapshot
from lmeval_screener.weights.architectures import (
    FINAL_NORMS,
    NORMS_LESS_ONE,
    NORMS_OF_MEAN,
    NORMS_UNCLEAR,
    NORMS_WITHOUT_WEIGHT,
    WRAPPERS,
)
from lmeval_screener.weights.projection import OutputProjection, layout, model_types, read_contents
from lmeval_screener.weights.safetensors import FLOAT_DTYPES, decode_rows
from lmeval_screener.weights.torch_archive import locate


@dataclass(frozen=True, eq=False)
class FinalNorm:
    """What the final norm does to a row of the output projection.

    Attributes:
        name: Name of the tensor; None where the architecture's norm has no weight.
        weight: γ, shape (d,), float64; ones where there is none.
        takes_mean: Whether it is a LayerNorm: a normed state sums to 0, so that a constant along the width of
            ``γ ∘ row`` moves no prediction either.
    """

    name: str | None
    weight: NDArray[np.float64]
    takes_mean: bool

    def effective(self, rows: NDArray[Any]) -> NDArray[np.float64]:
        """Rows (n, d) as the normed state meets them: what a softmax can see of them."""
        seen = rows.astype(np.float64) * self.weight
        return seen - seen.mean(axis=1, keepdims=True) if self.takes_mean else seen


async def read_final_norm(snapshot: Snapshot, projection: OutputProjection) -> FinalNorm | str:
    """The final norm of a checkpoint; where it is not known, a sentence that says why.

    Args:
        snapshot: The checkpoint.
        projection: Its output projection.

    Raises:
        ScreeningError: An error of the connection, or a broken header.
    """
    if projection.adapter is not None:
        if projection.adapter.norm:
            return "the adapter changes the final norm"
        return await read_final_norm(projection.adapter.base, projection.adapter.projection)
    if projection.file.endswith(".gguf"):
        return await _of_gguf(snapshot, projection)
    config, stored = await layout(snapshot)
    types = model_types(config)
    d = projection.shape[1]
    if not types:
        return "config.json names no model_type, which says how the final norm is applied"
    for kind in types:
        if kind in NORMS_WITHOUT_WEIGHT:
            return FinalNorm(None, np.ones(d), NORMS_WITHOUT_WEIGHT[kind])
        if kind in NORMS_UNCLEAR:
            return f"how {kind} applies its final norm is not known"
    name = next((w + norm for norm in FINAL_NORMS for w in WRAPPERS if w + norm in stored), None)
    if name is None:
        return "no final norm of a known name is stored"
    file = stored[name]
    tensor = (await read_contents(snapshot, file)).tensors.get(name)
    if (
        tensor is None
        or tensor.dtype not in FLOAT_DTYPES
        or tensor.shape != (d,)
        or tensor.strides not in (None, (1,))
    ):
        found = "is not in its file" if tensor is None else f"is {tensor.dtype} of shape {tensor.shape}"
        return f"{name} {found}, expected {d} numbers"
    if tensor.entry is not None:
        (tensor,) = await locate(snapshot, file, [tensor])
    (body,) = await snapshot.ranges(file, [(tensor.begin, tensor.end)])
    weight = decode_rows(body, tensor.dtype, d)[0].astype(np.float64)
    if any(kind in NORMS_LESS_ONE for kind in types):
        weight = weight + 1
    if not np.isfinite(weight).all() or not weight.any():
        return f"{name} is zero or not finite"
    bias = name.removesuffix("weight") + "bias"
    return FinalNorm(name, weight, bias in stored or any(kind in NORMS_OF_MEAN for kind in types))


async def _of_gguf(snapshot: Snapshot, projection: OutputProjection) -> FinalNorm | str:
    place, d = projection.final_norm, projection.shape[1]
    if place is None:
        return "the GGUF file holds no output_norm.weight in plain numbers"
    if place.weight is None:
        return FinalNorm(None, np.ones(d), place.takes_mean)
    own = place.weight
    if own.shape[0] != d:
        return f"{own.name} is {own.dtype} of shape ({own.shape[0]},), expected {d} numbers"
    (body,) = await snapshot.ranges(own.file, [(own.begin, own.begin + d * own.row_bytes)])
    weight = decode_rows(body, own.dtype, d)[0].astype(np.float64)
    if not np.isfinite(weight).all() or not weight.any():
        return f"{own.name} is zero or not finite"
    return FinalNorm(own.name, weight, place.takes_mean)
