"""Losses over all pairs in closed form: no pair is ever visited.

Push-away, squeeze and cross-domain push-away are made of the mean cosine. With u = z/|z| and s the sum of a
group's n unit vectors, the mean of u_i.u_j over i != j is (|s|^2 - n) / (n (n - 1)): O(t d) instead of
O(t^2 d). The gradient, (2 / (n (n - 1))) (s - (s.u_i) u_i) / |z_i|, is formed in the backward pass from z, so
nothing but z is kept.

Decorrelation is made of squared correlations. With X (n, d) standardised so that every column has length one,
C = X^T X holds the correlations of the columns, and sum of C_mn^2 over all m, n = |X^T X|^2 = |X X^T|^2. So
the smaller side is formed, min(n, d)^2 numbers, and the diagonal, one for each column that varies, is taken
off. Constant columns have no correlation and drop out.

Sources: "On the Predictive Power of Representation Dispersion in Language Models", section 3.4 and appendix
B.4.2 (mean cosine); "Dispersion Loss Counteracts Embedding Condensation" (decorrelation; the released code
correlates tokens, ``axis="tokens"``).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lmeval_dispersion.training.pairing import (
    NO_DIRECTION,
    Points,
    at_points,
    full_precision,
    group_counts,
    padded_groups,
    unit_scale,
)

Axis = Literal["features", "tokens"]
AXES: tuple[Axis, ...] = ("features", "tokens")

_CHUNK = 64  # rows added in float32 before the sum goes on in float64: keeps D right to about 1e-7


def mean_cosine(p: Points, *, across_ranks: bool = False) -> tuple[Tensor, Tensor]:
    """Mean cosine over the pairs of each group and which groups have a pair; both (groups,).

    Args:
        p: The points.
        across_ranks: Sum over the ranks of the default process group first, so that pairs span ranks.
            Gradients are those of one process with the whole batch once a wrapper such as DDP has averaged
            them over ranks.
    """
    value, counts = _MeanCosine.apply(p.z, p, across_ranks)  # type: ignore[no-untyped-call]
    return value, counts > 1


def cross_domain_cosine(p: Points, domains: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cosine over pairs of points whose sequences have different ``domains`` (b,); both (layers,)."""
    same = (domains.unsqueeze(0) == domains.unsqueeze(1)).to(device=p.z.device, dtype=p.z.dtype)
    value, pairs = _CrossCosine.apply(p.z, p, 1.0 - same)  # type: ignore[no-untyped-call]
    return value, pairs > 0


def squared_correlations(p: Points, axis: Axis) -> tuple[Tensor, Tensor]:
    """Mean squared off-diagonal correlation of every group and which groups have one; both (groups,)."""
    z, valid = padded_groups(p)
    value, columns = _Correlations.apply(z, valid, axis == "tokens")  # type: ignore[no-untyped-call]
    return value, columns > 1


class _MeanCosine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, p: Points, across_ranks: bool) -> tuple[Tensor, Tensor]:
        scale = unit_scale(z)
        sums, counts = _unit_sums(p, z, scale), group_counts(p, scale != 0).double()
        ctx.ranks = 1
        if across_ranks:
            everything = torch.cat([sums, counts.unsqueeze(-1)], dim=-1)
            dist.all_reduce(everything)
            sums, counts = everything[:, :-1], everything[:, -1]
            ctx.ranks = dist.get_world_size()
        pairs = (counts * (counts - 1)).clamp(min=1.0)
        value = (sums.square().sum(-1) - counts) / pairs
        value = torch.where(counts > 1, value, 0.0)
        ctx.points = p.without_vectors()
        ctx.save_for_backward(z, scale, sums.to(z.dtype), pairs.to(z.dtype))
        ctx.mark_non_differentiable(counts)
        return value.to(z.dtype), counts

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        z, scale, sums, pairs = ctx.saved_tensors
        # Every rank holds the whole loss; averaging over ranks divides by their number.
        return _pulled(ctx.points, z, scale, sums, grad * (2.0 * ctx.ranks) / pairs), None, None


class _CrossCosine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, p: Points, other: Tensor) -> tuple[Tensor, Tensor]:
        scale = unit_scale(z)
        b = len(other)
        sums = _unit_sums(p, z, scale).view(p.layers, b, -1)
        counts = (scale != 0).sum(-1).double().view(p.layers, b)
        wide = other.double()
        with full_precision(z.device):
            opposite = torch.matmul(wide, sums)  # for each sequence, the sum over the other domains
            pairs = (counts * torch.matmul(counts, wide)).sum(-1)
        value = (sums * opposite).sum((-2, -1)) / pairs.clamp(min=1.0)
        ctx.points = p.without_vectors()
        ctx.save_for_backward(z, scale, opposite.flatten(0, 1).to(z.dtype), pairs.clamp(min=1.0).to(z.dtype))
        ctx.mark_non_differentiable(pairs)
        return value.to(z.dtype), pairs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        z, scale, opposite, pairs = ctx.saved_tensors
        weight = (grad * 2.0 / pairs).repeat_interleave(len(opposite) // len(pairs))
        return _pulled(ctx.points, z, scale, opposite, weight), None, None


class _Correlations(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, valid: Tensor, tokens: bool) -> tuple[Tensor, Tensor]:
        along = 2 if tokens else 1  # the axis that is averaged over
        keep = valid.unsqueeze(-1).to(z.dtype)
        count = torch.full_like(keep[:, :1], z.shape[2]) if tokens else keep.sum(1, keepdim=True)
        x = z - z.sum(along, keepdim=True) / count.clamp(min=1.0)
        x.mul_(keep)
        norm = torch.linalg.vector_norm(x, dim=along, keepdim=True)
        # What rounding leaves of a constant is no variation.
        size = torch.linalg.vector_norm(z, dim=along, keepdim=True)
        flat = norm <= torch.maximum(size * (8 * torch.finfo(z.dtype).eps), size.new_tensor(NO_DIRECTION))
        scale = torch.where(flat, 0.0, norm.reciprocal())
        x.mul_(scale)
        columns = (scale != 0).sum((1, 2)).to(z.dtype)
        pairs = (columns * (columns - 1)).clamp(min=1.0)
        with full_precision(z.device):
            wide = x.shape[1] <= x.shape[2]
            gram = torch.bmm(x, x.mT) if wide else torch.bmm(x.mT, x)
            total = torch.linalg.vector_norm(gram, dim=(1, 2)).square()
            value = torch.where(columns > 1, (total - columns) / pairs, 0.0)
            pull = torch.bmm(gram, x) if wide else torch.bmm(x, gram)
        pull.addcmul_((pull * x).sum(along, keepdim=True).neg_(), x)
        pull.sub_(pull.sum(along, keepdim=True) / count.clamp(min=1.0)).mul_(keep)
        ctx.save_for_backward(pull.mul_(scale), torch.where(columns > 1, 4.0 / pairs, 0.0))
        ctx.mark_non_differentiable(columns)
        return value, columns

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        pull, weight = ctx.saved_tensors
        return pull * (grad * weight).view(-1, 1, 1), None, None


def _unit_sums(p: Points, z: Tensor, scale: Tensor) -> Tensor:
    """Sum of unit vectors of every group, (groups, d) in float64."""
    g, t, d = z.shape
    with full_precision(z.device):
        if p.owner is not None:
            sums = torch.zeros(p.groups, d, dtype=z.dtype, device=z.device)
            return sums.index_add_(0, p.owner.flatten(), (z * scale.unsqueeze(-1)).view(-1, d)).double()
        whole = t - t % _CHUNK
        if not whole:
            return torch.bmm(scale.unsqueeze(1), z).squeeze(1).double()
        head = torch.matmul(
            scale[:, :whole].reshape(g, -1, 1, _CHUNK), z[:, :whole].reshape(g, -1, _CHUNK, d)
        )
        total = head.squeeze(2).double().sum(1)
        if whole < t:
            total += torch.bmm(scale[:, whole:].unsqueeze(1), z[:, whole:]).squeeze(1)
        return total


def _pulled(p: Points, z: Tensor, scale: Tensor, sums: Tensor, weight: Tensor) -> Tensor:
    """The vectors weight (sums - (sums.u) u) / |z| at each point, from a sum and a weight a group."""
    with full_precision(z.device):
        if p.owner is None:
            along = torch.bmm(z, sums.unsqueeze(-1)).squeeze(-1)
            target = sums.unsqueeze(1)
        else:
            target = sums[p.owner]
            along = (z * target).sum(-1)
    along = along.mul_(scale.square()).neg_()
    out = torch.addcmul(target, along.unsqueeze(-1), z)
    return out.mul_((scale * at_points(p, weight)).unsqueeze(-1))
