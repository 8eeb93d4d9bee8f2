"""Losses over all pairs of points, block by block: no t x t matrix is ever kept.

For a block of rows I and the columns J >= I, the block of inner products gives every pair's term and its
slope; both are added up for the rows and, transposed, for the columns, so that each pair is formed once.
The gradient is made in the same pass (sum over j of slope_ij x_j, one number a row away from the final one)
and is all that is kept besides the points: memory is linear in t.

Formulas are those of "Dispersion Loss Counteracts Embedding Condensation", as means over ordered pairs
i != j: of a term of the angular distance D = arccos(cosine)/pi in [0, 1], or of exp(-|z_i - z_j|^2 / tau)
under a logarithm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lmeval_dispersion.training.pairing import (
    Points,
    at_points,
    full_precision,
    group_counts,
    group_sums,
    padded_groups,
    unit_scale,
)

GUARD = 1e-6  # cosines are held this far from +-1, where arccos has no finite slope
_CPU_ROWS = 128
_CACHE_NUMBERS = 1 << 16  # 128 x 512: one block, its slope and a temporary stay in a core's second cache
_GPU_NUMBERS = 1 << 24  # numbers in one block of all groups: 64 MB


class Term(Protocol):
    """What one pair of unit vectors adds to a loss, from its cosine."""

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


def angular(p: Points, term: Term) -> tuple[Tensor, Tensor]:
    """Value of every group over its pairs of unit vectors, and which groups have a pair; both (groups,)."""
    value, counts = _AngularPairs.apply(p.z, p, term)  # type: ignore[no-untyped-call]
    return value, counts > 1


def euclidean(p: Points, inverse_tau: Tensor) -> tuple[Tensor, Tensor]:
    """Log of the mean of exp(-|z_i - z_j|^2 / tau) of every group, with ``inverse_tau`` (groups,)."""
    value, counts = _EuclideanPairs.apply(p.z, p, inverse_tau)  # type: ignore[no-untyped-call]
    return value, counts > 1


def median_distance(p: Points, most: int = 128) -> Tensor:
    """Median squared distance over the pairs of each group, (groups,), NaN where it has none.

    Over ``most`` evenly spaced points of a group that has more; of an even number of pairs the lower middle.
    """
    z, valid = padded_groups(p)
    z = z.detach()
    counts, width = valid.sum(1, keepdim=True), min(most, z.shape[1])
    place = torch.arange(width, device=z.device)
    real_first = (~valid).to(torch.uint8).argsort(dim=1, stable=True)
    chosen = real_first.gather(1, torch.where(counts > width, place * counts // width, place))
    rows = z.gather(1, chosen.unsqueeze(-1).expand(-1, -1, z.shape[2]))
    real = place < counts
    rows = rows - (rows * real.unsqueeze(-1)).sum(1, keepdim=True) / real.sum(1).clamp(min=1).view(-1, 1, 1)
    squares = rows.square().sum(-1)
    with full_precision(z.device):
        gap = torch.bmm(rows, rows.mT).mul_(-2.0).add_(squares.unsqueeze(-1)).add_(squares.unsqueeze(1))
    pair = real.unsqueeze(-1) & real.unsqueeze(1)
    pair.diagonal(dim1=1, dim2=2).fill_(False)
    return gap.clamp_(min=0.0).masked_fill_(~pair, float("nan")).flatten(1).nanmedian(-1).values


class _AngularPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, p: Points, term: Term) -> tuple[Tensor, Tensor]:
        scale = unit_scale(z)
        ok = scale != 0
        counts = group_counts(p, ok)
        owner = _pair_owner(p, ok)
        sums, pull = torch.zeros_like(scale), torch.zeros_like(z)
        with full_precision(z.device):
            for some in _chunks(z):
                u = z[some] * scale[some].unsqueeze(-1)
                own = None if owner is None else owner[some]
                _add_pairs(u, own, term, sums[some], pull[some], ctx.needs_input_grad[0])
                # Only what turns a vector moves its direction.
                if ctx.needs_input_grad[0]:
                    along = (pull[some] * u).sum(-1).neg_()
                    pull[some].addcmul_(along.unsqueeze(-1), u)
        total = group_sums(p, sums)
        pairs = (counts * (counts - 1)).clamp(min=1.0)
        value = torch.where(counts > 1, _finished(total / pairs, term.logarithm), 0.0)
        # Each unordered pair moves both its points: the ordered mean's derivative has the factor 2.
        weight = 2.0 * term.slope / (total.clamp(min=torch.finfo(z.dtype).tiny) if term.logarithm else pairs)
        ctx.points = p.without_vectors()
        ctx.save_for_backward(pull, scale, torch.where(counts > 1, weight, 0.0))
        ctx.mark_non_differentiable(counts)
        return value, counts

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        pull, scale, weight = ctx.saved_tensors
        return pull * (scale * at_points(ctx.points, grad * weight)).unsqueeze(-1), None, None


class _EuclideanPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, p: Points, inverse_tau: Tensor) -> tuple[Tensor, Tensor]:
        ok = torch.ones(z.shape[:2], dtype=torch.bool, device=z.device) if p.valid is None else p.valid
        counts = group_counts(p, ok)
        owner = _pair_owner(p, ok)
        # Distances do not see a shift of a whole row; without it their differences keep more digits.
        centre = z.sum(1, keepdim=True) / ok.sum(1).clamp(min=1).view(-1, 1, 1)
        z = (z - centre).mul_(ok.unsqueeze(-1))
        squares = z.square().sum(-1)
        rate = at_points(p, inverse_tau).expand_as(squares)
        top = torch.full_like(squares, -math.inf)
        sums, pull = torch.zeros_like(squares), torch.zeros_like(z)
        with full_precision(z.device):
            for some in _chunks(z):
                own = None if owner is None else owner[some]
                args = (z[some], own, squares[some], rate[some])
                _largest_exponent(*args, top[some])
            shift = _group_max(p, top)
            shift_at = at_points(p, shift).expand_as(squares)
            for some in _chunks(z):
                own = None if owner is None else owner[some]
                args = (z[some], own, squares[some], rate[some])
                _add_exponentials(*args, shift_at[some], sums[some], pull[some], ctx.needs_input_grad[0])
        total = group_sums(p, sums)
        pairs = (counts * (counts - 1)).clamp(min=1.0)
        value = torch.where(counts > 1, (total / pairs).log() + shift, 0.0)
        weight = torch.where(counts > 1, 4.0 * inverse_tau / total, 0.0)
        if ctx.needs_input_grad[0]:
            pull.addcmul_(sums.unsqueeze(-1), z, value=-1.0)
        ctx.points = p.without_vectors()
        ctx.save_for_backward(pull, weight)
        ctx.mark_non_differentiable(counts)
        return value, counts

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        pull, weight = ctx.saved_tensors
        return pull * at_points(ctx.points, grad * weight).unsqueeze(-1), None, None


def _add_pairs(
    u: Tensor, owner: Tensor | None, term: Term, sums: Tensor, pull: Tensor, gradient: bool
) -> None:
    """Add every pair's term to ``sums`` (g, t) and slope times partner to ``pull`` (g, t, d)."""
    for rows, cols, behind in _blocks(u):
        value, slope = term.of(torch.bmm(u[:, rows], u[:, cols].mT))
        _only_pairs(owner, rows, cols, value, slope)
        _add_block(u, rows, cols, behind, value, slope, sums, pull, gradient)


def _add_exponentials(
    z: Tensor,
    owner: Tensor | None,
    squares: Tensor,
    rate: Tensor,
    shift: Tensor,
    sums: Tensor,
    pull: Tensor,
    gradient: bool,
) -> None:
    for rows, cols, behind in _blocks(z):
        exponent = _exponents(z, squares, rate, rows, cols)
        value = exponent.sub_(shift[:, rows].unsqueeze(-1)).exp_()
        _only_pairs(owner, rows, cols, value)
        _add_block(z, rows, cols, behind, value, value, sums, pull, gradient)


def _largest_exponent(z: Tensor, owner: Tensor | None, squares: Tensor, rate: Tensor, top: Tensor) -> None:
    for rows, cols, _ in _blocks(z):
        exponent = _exponents(z, squares, rate, rows, cols)
        _only_pairs(owner, rows, cols, exponent, fill=-math.inf)
        top[:, rows] = torch.maximum(top[:, rows], exponent.amax(2))
        top[:, cols] = torch.maximum(top[:, cols], exponent.amax(1))


def _exponents(z: Tensor, squares: Tensor, rate: Tensor, rows: slice, cols: slice) -> Tensor:
    """-|z_i - z_j|^2 / tau, by the rate 1/tau of the row (pairs across groups are dropped later)."""
    gap = torch.bmm(z[:, rows], z[:, cols].mT).mul_(-2.0)
    gap.add_(squares[:, rows].unsqueeze(-1)).add_(squares[:, cols].unsqueeze(1)).clamp_(min=0.0)
    return gap.mul_(-rate[:, rows].unsqueeze(-1))


def _add_block(
    x: Tensor,
    rows: slice,
    cols: slice,
    behind: int,
    value: Tensor,
    slope: Tensor,
    sums: Tensor,
    pull: Tensor,
    gradient: bool,
) -> None:
    """Add one block for its rows, and for the columns beyond the diagonal block transposed."""
    sums[:, rows] += value.sum(2)
    later = slice(rows.stop, cols.stop)
    sums[:, later] += value[:, :, behind:].sum(1)
    if gradient:
        pull[:, rows].baddbmm_(slope, x[:, cols])
        if later.start < later.stop:
            pull[:, later].baddbmm_(slope[:, :, behind:].mT, x[:, rows])


def _only_pairs(owner: Tensor | None, rows: slice, cols: slice, *blocks: Tensor, fill: float = 0.0) -> None:
    """Overwrite the diagonal and the pairs that cross groups or touch a token that is no point."""
    for block in blocks:
        block.diagonal(dim1=1, dim2=2).fill_(fill)
    if owner is not None:
        apart = owner[:, rows].unsqueeze(-1) != owner[:, cols].unsqueeze(1)
        for block in blocks:
            block.masked_fill_(apart, fill)


def _pair_owner(p: Points, ok: Tensor) -> Tensor | None:
    """Group of each point, a number of its own where there is none; None where every pair of a row counts.

    Whether all are points is looked up on the CPU only: on a GPU the question would stop the queue.
    """
    if p.owner is None and ok.device.type == "cpu" and bool(ok.all()):
        return None
    owner = torch.zeros(ok.shape, dtype=torch.long, device=ok.device) if p.owner is None else p.owner
    return torch.where(ok, owner, -1 - torch.arange(ok.shape[1], device=ok.device))


def _group_max(p: Points, rows: Tensor) -> Tensor:
    """Largest value of every group, 0 where it has no pair."""
    if p.owner is None:
        top = rows.amax(-1)
    else:
        top = torch.full((p.groups,), -math.inf, dtype=rows.dtype, device=rows.device)
        top.scatter_reduce_(0, p.owner.flatten(), rows.flatten(), "amax")
    return torch.where(top == -math.inf, 0.0, top)


def _finished(mean: Tensor, logarithm: bool) -> Tensor:
    return mean.log() if logarithm else mean


def _chunks(x: Tensor) -> list[slice]:
    """Groups handled together: as many as a CPU's cache takes; all at once elsewhere."""
    g, t, _ = x.shape
    size = max(1, _CACHE_NUMBERS // (min(t, _CPU_ROWS) * t)) if x.device.type == "cpu" else g
    return [slice(i, min(i + size, g)) for i in range(0, g, size)]


def _blocks(x: Tensor) -> list[tuple[slice, slice, int]]:
    """Blocks of the upper triangle: rows, all columns from there on, and the width of the diagonal part."""
    g, t, _ = x.shape
    size = _CPU_ROWS if x.device.type == "cpu" else max(_CPU_ROWS, _GPU_NUMBERS // (g * t))
    return [(slice(i, min(i + size, t)), slice(i, t), min(i + size, t) - i) for i in range(0, t, size)]


def _sine_squared(cosine: Tensor) -> Tensor:
    return torch.addcmul(torch.ones((), dtype=cosine.dtype, device=cosine.device), cosine, cosine, value=-1.0)
