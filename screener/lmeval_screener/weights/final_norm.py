"""The final norm's weight γ, which stands between the last state and the output projection.

A softmax sees ``row · (γ ∘ x)``, x being the normed state: what a token's row does is ``γ ∘ row``. A scale
that moves between γ and the rows moves no prediction.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lmeval_screener.weights.architectures import (
    FINAL_NORMS,
    NORMS_LESS_ONE,
    NORMS_OF_MEAN,
    NORMS_UNCLEAR,
    NORMS_WITHOUT_WEIGHT,
    WRAPPERS,
)
from lmeval_screener.weights.files import WeightFiles
from lmeval_screener.weights.tensors import FLOAT_DTYPES

NormKind = Literal["rms", "layer"]


@dataclass(frozen=True, eq=False)
class FinalNorm:
    """The final norm in front of the output projection, as far as it is known.

    Attributes:
        name: Name of the tensor; None where the architecture's norm has no weight, or it is not known.
        weight: γ, shape (d,), float64, ones where the norm has no weight; None where it is not known.
        kind: ``layer``: a normed state sums to 0, so that a constant along the width of ``γ ∘ row`` moves no
            prediction either.
        reason: Why the weight or the kind is not known; empty where both are.
    """

    name: str | None = None
    weight: NDArray[np.float64] | None = None
    kind: NormKind | None = None
    reason: str = ""

    def effective(self, rows: NDArray[Any]) -> NDArray[np.float64]:
        """Rows (n, d) as the normed state meets them: what a softmax can see of them."""
        if self.weight is None:
            raise ValueError(f"expected a known final norm: {self.reason}")
        seen = rows.astype(np.float64) * self.weight
        return seen - seen.mean(axis=1, keepdims=True) if self.kind == "layer" else seen


@dataclass(frozen=True, eq=False)
class StoredNorm:
    """Where a checkpoint keeps its final norm's weight.

    Attributes:
        files: The files of its weights.
        name: Name of the tensor; None where the norm has no weight.
        holders: The files that hold it: one, or one for each slice.
        kind: RMSNorm or LayerNorm.
        plus_one: Whether the norm multiplies by 1 + weight.
        guess: Bytes of the first request for a holder's header, where it is another file than the head's.
    """

    files: WeightFiles
    name: str | None
    holders: Sequence[str]
    kind: NormKind
    plus_one: bool = False
    guess: int = 16_384

    async def read(self, width: int) -> FinalNorm:
        """The norm in front of rows of a width."""
        if self.name is None:
            return FinalNorm(None, np.ones(width), self.kind)
        weight = np.full(width, np.nan)
        for file in self.holders:
            header = await self.files.header(file, self.guess)
            tensor = header.tensors.get(self.name)
            if tensor is None:
                return FinalNorm(reason=f"{self.name} is not in {file}")
            offsets = header.slices.get(self.name) or (0,)
            begin = offsets[0]
            end = begin + tensor.elements
            other = len(self.holders) == 1 and tensor.elements != width
            vector = len(tensor.shape) == len(offsets) == 1 and tensor.strides in (None, (1,))
            if tensor.dtype not in FLOAT_DTYPES or not vector or end > width or other:
                got = f"{tensor.dtype} of shape {tensor.shape}"
                return FinalNorm(reason=f"{self.name} is {got}, expected {width} numbers")
            weight[begin:end] = await self.files.vector(file, tensor)
        if self.plus_one:
            weight += 1
        if not np.isfinite(weight).all() or not weight.any():
            return FinalNorm(reason=f"{self.name} is zero or not finite")
        return FinalNorm(self.name, weight, self.kind)


def find_norm(
    files: WeightFiles, stored: Mapping[str, Sequence[str]], types: Sequence[str]
) -> StoredNorm | str:
    """Where the final norm of a checkpoint in transformers' layout is.

    A clause that says why where unknown.
    """
    if not types:
        return "config.json names no model_type, which says how the final norm is applied"
    for kind in types:
        if kind in NORMS_WITHOUT_WEIGHT:
            return StoredNorm(files, None, (), norm_kind(NORMS_WITHOUT_WEIGHT[kind]))
        if kind in NORMS_UNCLEAR:
            return f"how {kind} applies its final norm is not known"
    name = norm_name(stored)
    if name is None:
        return "no final norm of a known name is stored"
    takes_mean = name.removesuffix("weight") + "bias" in stored or any(t in NORMS_OF_MEAN for t in types)
    return StoredNorm(
        files, name, stored[name], norm_kind(takes_mean), any(t in NORMS_LESS_ONE for t in types)
    )


def norm_kind(takes_mean: bool) -> NormKind:
    """LayerNorm takes the mean, RMSNorm does not."""
    return "layer" if takes_mean else "rms"


def norm_name(stored: Container[str]) -> str | None:
    """Name of the final norm's weight among stored tensors."""
    return next((w + norm for norm in FINAL_NORMS for w in WRAPPERS if w + norm in stored), None)
