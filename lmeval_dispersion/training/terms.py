"""What one pair of unit vectors adds to a loss, and how that changes with their cosine.

Source: LD; D is the angular distance arccos(cosine)/pi in [0, 1].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

GUARD = 1e-6  # cosines are held this far from +-1, where arccos has no finite slope


class Term(Protocol):
    """What one pair adds, from its cosine."""

    @property
    def logarithm(self) -> bool:
        """Whether the loss is the logarithm of the mean term."""

    @property
    def slope(self) -> float:
        """Common factor of the derivatives."""

    def of(self, cosine: Tensor) -> tuple[Tensor, Tensor]:
        """Terms of the pairs (may overwrite ``cosine``), and their derivatives by it over ``slope``."""


@dataclass(frozen=True)
class Angular:
    """exp(-D/tau), D = arccos(cosine)/pi."""

    tau: float
    logarithm = True

    @property
    def slope(self) -> float:
        """Common factor of the derivatives."""
        return 1.0 / (math.pi * self.tau)

    def of(self, cosine: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Term`."""
        cosine.clamp_(-1.0 + GUARD, 1.0 - GUARD)
        steepness = _sine_squared(cosine).rsqrt_()
        term = cosine.acos_().mul_(-self.slope).exp_()
        return term, steepness.mul_(term)


@dataclass(frozen=True)
class Hinge:
    """max(0, margin - D)^2, D = arccos(cosine)/pi."""

    margin: float
    logarithm = False
    slope = 2.0 / math.pi

    def of(self, cosine: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Term`."""
        cosine.clamp_(-1.0 + GUARD, 1.0 - GUARD)
        steepness = _sine_squared(cosine).rsqrt_()
        short = cosine.acos_().mul_(-1.0 / math.pi).add_(self.margin).clamp_(min=0.0)
        return short.square(), steepness.mul_(short)


def _sine_squared(cosine: Tensor) -> Tensor:
    return torch.addcmul(torch.ones((), dtype=cosine.dtype, device=cosine.device), cosine, cosine, value=-1.0)
