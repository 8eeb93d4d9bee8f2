"""Values of the papers' released code, formed densely: what ``released=True`` returns.

Facts, from reading and running the released code of "Dispersion Loss Counteracts Embedding Condensation"
(2026-05); docs/reference/training.md lists how it differs from the published formulas. Vectors are divided by
their length plus 0.01; cosines are clamped to +-(1 - clamp) with the gradient of the unclamped one; 0.01 is
added to every exponent; l2-repel counts the diagonal and adds a tenth of the mean square. Memory is quadratic
in t.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lmeval_dispersion.training.pairing import Points, full_precision, group_counts, group_sums

EPSILON = 0.01
NORM_WEIGHT = 0.1
CLAMP = 0.25


def released_angular(p: Points, tau: float, clamp: float) -> tuple[Tensor, Tensor]:
    """Log-mean of exp(0.01 - D/tau) over i != j of each group; and which groups count, both (groups,)."""
    ok = _ok(p)
    terms = torch.exp(EPSILON - _distance(p, clamp) / tau)
    counts = group_counts(p, ok)
    mean = _sum(p, terms, _pairs(p, ok, diagonal=False)) / (counts * (counts - 1)).clamp(min=1.0)
    return torch.where(counts > 1, mean, 1.0).log(), counts > 1


def released_orthogonalization(p: Points, margin: float, clamp: float) -> tuple[Tensor, Tensor]:
    """Mean of max(0, margin - D)^2 over i != j of each group; and which groups count, both (groups,)."""
    ok = _ok(p)
    terms = (margin - _distance(p, clamp)).clamp(min=0.0).square()
    counts = group_counts(p, ok)
    mean = _sum(p, terms, _pairs(p, ok, diagonal=False)) / (counts * (counts - 1)).clamp(min=1.0)
    return mean, counts > 1


def released_l2(p: Points, tau: float) -> tuple[Tensor, Tensor]:
    """Log-mean of exp(0.01 - |z_i - z_j|^2/tau) over all i, j of each group, both (groups,).

    The norm term is the caller's.
    """
    ok = _ok(p)
    squares = p.z.square().sum(-1)
    with full_precision(p.z.device):
        gap = squares.unsqueeze(-1) + squares.unsqueeze(1) - 2.0 * p.z @ p.z.mT
    # The diagonal is exp(0.01) exactly: rounding must not decide what dominates the sum.
    gap = gap.clamp(min=0.0) * (1.0 - torch.eye(gap.shape[-1], dtype=gap.dtype, device=gap.device))
    counts = group_counts(p, ok)
    mean = _sum(p, torch.exp(EPSILON - gap / tau), _pairs(p, ok, diagonal=True)) / counts.square().clamp(
        min=1.0
    )
    return torch.where(counts > 0, mean, 1.0).log(), counts > 0


def _distance(p: Points, clamp: float) -> Tensor:
    norm = p.z.square().sum(-1, keepdim=True).clamp(min=torch.finfo(p.z.dtype).tiny).sqrt()
    u = p.z / (norm + EPSILON)
    with full_precision(u.device):
        cosine = u @ u.mT
    bounded = cosine.clamp(-1.0 + clamp, 1.0 - clamp)
    return torch.arccos(cosine + (bounded - cosine).detach()) / math.pi


def _ok(p: Points) -> Tensor:
    return torch.ones(p.z.shape[:2], dtype=torch.bool, device=p.z.device) if p.valid is None else p.valid


def _pairs(p: Points, ok: Tensor, *, diagonal: bool) -> Tensor:
    pair = ok.unsqueeze(-1) & ok.unsqueeze(1)
    if p.owner is not None:
        pair &= p.owner.unsqueeze(-1) == p.owner.unsqueeze(1)
    if not diagonal:
        pair.diagonal(dim1=1, dim2=2).fill_(False)
    return pair


def _sum(p: Points, terms: Tensor, pair: Tensor) -> Tensor:
    return group_sums(p, torch.where(pair, terms, 0.0).sum(-1))
