"""A loss's points, and means over their pairs, with gradients formed in the same pass.

States have shape (l, b, t, d): l layers of one batch, so that a GPU can process all layers together. Pairs
are formed inside a *group*: one sequence, one packed document of it, or the whole batch, always of one layer.
Padding is never a point.

Means of cosines and of squared correlations have closed forms without pairs. The others go block by block:
no t x t matrix is kept, each pair is formed once, and its slope is added up for both its points,
so that memory is linear in t.

Sources: RD section 3.4 and B.4.2 (mean cosine), LD (the others), the papers of
:mod:`lmeval_dispersion.training.losses`, as means over ordered pairs i != j.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from lmeval_dispersion.errors import GeometryError, UsageError

Pairs = Literal["sequence", "batch"]
PAIRS: tuple[Pairs, ...] = ("sequence", "batch")

NO_DIRECTION = 1e-12  # vectors up to this length count as zero: they have no direction
GUARD = 1e-6  # cosines are kept this far from +-1, where the slope of arccos is infinite
_SUMMED_ROWS = 64  # added in float32 before summing in float64: D is right to about 1e-7
_CPU_ROWS = 128
_CACHE_NUMBERS = (
    1 << 16
)  # 128 x 512: one block, its slope and a temporary stay in a core's second cache
_GPU_NUMBERS = 1 << 24  # numbers in one block of all groups: 64 MB

# A value per group, (groups,), and whether each has a pair.
Means: TypeAlias = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Points:
    """The tokens of which a loss forms pairs, in padded rows, with the group of each.

    Pairs are formed only inside a group: a sequence, a packed document or the whole batch, always
    of one layer.

    Attributes:
        z: Shape (rows, t, d), float32 or float64: the states, zero where ``real`` is false.
        real: Shape (rows, t), true on tokens that count.
        owner: Shape (rows, t), the group of each token, from 0 to groups - 1; None if row i is
            group i.
        groups: Number of groups in all layers together, a multiple of ``layers``.
        layers: Number of layers.
    """

    z: Tensor
    real: Tensor
    owner: Tensor | None
    groups: int
    layers: int

    def sums(self, rows: Tensor) -> Tensor:
        """Sum the values of the tokens of each group.

        Args:
            rows: Shape (rows, t), one value for each token; 0 on padding.

        Returns:
            Shape (groups,).
        """
        if self.owner is None:
            return rows.sum(-1)
        sums = torch.zeros(self.groups, dtype=rows.dtype, device=rows.device)
        return sums.index_add_(0, self.owner.flatten(), rows.flatten())

    def counts(self, ok: Tensor) -> Tensor:
        """Return for each group the number of tokens for which ``ok`` is true.

        Args:
            ok: Shape (rows, t).

        Returns:
            Shape (groups,), in the dtype of ``z``.
        """
        return self.sums(ok.to(self.z.dtype))

    def layer_means(self, values: Tensor, counted: Tensor) -> Tensor:
        """Average the values of each layer's groups.

        Args:
            values: Shape (groups,).
            counted: Shape (groups,), true for the groups that count.

        Returns:
            Shape (layers,); 0 for a layer in which no group counts.
        """
        counted = counted.view(self.layers, -1).to(values.dtype)
        total = torch.where(counted > 0, values.view(self.layers, -1), 0.0).sum(-1)
        return total / counted.sum(-1).clamp(min=1.0)

    def by_group(self) -> tuple[Tensor, Tensor]:
        """Return the tokens' states in one padded row for each group.

        Returns:
            The states, shape (groups, longest, d), and a mask, shape (groups, longest), true on
            tokens.
        """
        if self.owner is None:
            return self.z, self.real
        used = self.real.flatten().nonzero().squeeze(-1)
        owner, order = self.owner.flatten()[used].sort(stable=True)
        counts = torch.bincount(owner, minlength=self.groups)
        longest = int(counts.max()) if len(used) else 1
        starts = pad(counts.cumsum(0), (1, 0))[:-1]
        place = owner * longest + torch.arange(len(owner), device=owner.device) - starts[owner]
        rows = self.z.new_zeros(self.groups * longest, self.z.shape[2])
        rows = rows.index_copy(0, place, self.z.flatten(0, 1)[used[order]])
        inside = self.real.new_zeros(self.groups * longest).index_fill_(0, place, True)
        return rows.view(self.groups, longest, -1), inside.view(self.groups, longest)


def points(
    z: Tensor,
    *,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    pairs: Pairs = "sequence",
    max_tokens: int | None = None,
    generator: torch.Generator | None = None,
) -> Points:
    """Select the tokens of which a loss forms pairs.

    Args:
        z: Shape (b, t, d) or (l, b, t, d), any float dtype; converted to float32 unless it is
            float64.
        mask: Shape (b, t), true on real tokens; None if all are real.
        segments: Shape (b, t), the document of each token in packed rows; None for one document a
            row.
        pairs: ``sequence`` makes each document of a row a group, ``batch`` makes the whole batch
            one group.
        max_tokens: Maximum number of tokens that are drawn from each row, anew for each layer; None
            for all.
        generator: The random generator of this draw; None for the same draw at every call.

    Returns:
        The selected tokens of all layers, with their groups.

    Raises:
        GeometryError: A shape or dtype does not fit.
        UsageError: ``pairs`` or ``max_tokens`` cannot be used.
    """
    z = z.unsqueeze(0) if z.dim() == 3 else z
    _check(z, mask, segments, pairs, max_tokens)
    layers, b, t, d = z.shape
    padded = mask is not None
    real = (
        torch.ones((b, t), dtype=torch.bool, device=z.device)
        if mask is None
        else mask.to(z.device) != 0
    )
    real = real.expand(layers, b, t)
    owner, documents = None, b
    if segments is not None and pairs == "sequence":
        ids, documents = _documents(segments.to(z.device))
        owner = ids + documents * torch.arange(layers, device=z.device).view(-1, 1, 1)
    if max_tokens is not None and max_tokens < t:
        generator = generator or torch.Generator(z.device).manual_seed(0)
        keys = torch.rand((layers, b, t), generator=generator, device=z.device)
        keys = keys.masked_fill(~real, -1.0) if padded else keys
        chosen = keys.topk(max_tokens, dim=-1, sorted=False).indices
        # Copy whole rows by one flat index; gather along an expanded axis would read one index per number.
        flat = (torch.arange(layers * b, device=z.device).view(layers, b, 1) * t + chosen).flatten()
        z = z.reshape(-1, d).index_select(0, flat).view(layers, b, max_tokens, d)
        real = real.gather(-1, chosen)
        owner = None if owner is None else owner.gather(-1, chosen)
        t = max_tokens
    z = z if z.dtype in (torch.float32, torch.float64) else z.float()
    if padded:
        # Padding, which may be NaN, must not reach the sums or the gradient.
        z = z.masked_fill(~real.unsqueeze(-1), 0.0)
    shape = (layers, b * t) if pairs == "batch" else (layers * b, t)
    owner = None if owner is None else owner.reshape(shape)
    groups = layers if pairs == "batch" else layers * documents
    return Points(z.reshape(*shape, d), real.reshape(shape), owner, groups, layers)


def mean_cosine(p: Points, *, across_ranks: bool = False) -> Means:
    """Return the mean cosine over the pairs of each group.

    It is (|s|^2 - n) / (n (n - 1)), where s is the sum of the group's n unit vectors.

    Args:
        p: The tokens.
        across_ranks: Whether pairs span all ranks of the default process group. Once a wrapper such
            as DDP has averaged the gradients over ranks, the gradients are those of one process
            with the whole batch.

    Returns:
        Two tensors, shape (groups,): the means, and whether each group has a pair.
    """
    z, ranks = p.z, 1
    with torch.no_grad():
        scale = unit_scale(z)
        sums, counts = unit_sums(p, scale), p.counts(scale != 0).double()
        if across_ranks:
            everything = torch.cat([sums, counts.unsqueeze(-1)], dim=-1)
            dist.all_reduce(everything)
            sums, counts, ranks = everything[:, :-1], everything[:, -1], dist.get_world_size()
        pairs = (counts * (counts - 1)).clamp(min=1.0)
        value = torch.where(counts > 1, (sums.square().sum(-1) - counts) / pairs, 0.0).to(z.dtype)
        # Every rank holds the whole loss; averaging over ranks divides by their number.
        weight = (2.0 * ranks) / pairs.to(z.dtype)
    turned = _Turned.apply(z, value, scale, sums.to(z.dtype), weight, p.owner)  # type: ignore[no-untyped-call]
    return turned, counts > 1


def cross_domain_cosine(p: Points, domains: Tensor) -> Means:
    """Return the mean cosine over the pairs of tokens whose sequences have different domains.

    Args:
        p: The tokens, with one row for each sequence.
        domains: Shape (b,), the domain of each sequence as an integer.

    Returns:
        Two tensors, shape (layers,): the means, and whether each layer has a pair.
    """
    z, b = p.z, len(domains)
    with torch.no_grad(), full_precision(z.device):
        other = (domains.unsqueeze(0) != domains.unsqueeze(1)).to(z.device).double()
        scale = unit_scale(z)
        sums = unit_sums(p, scale).view(p.layers, b, -1)
        counts = p.counts(scale != 0).double().view(p.layers, b)
        opposite = torch.matmul(other, sums)  # for each sequence, the sum over the other domains
        counted = (counts * torch.matmul(counts, other)).sum(-1)
        pairs = counted.clamp(min=1.0)
        value = (sums * opposite).sum((-2, -1)) / pairs
        # Each sequence takes its share of a layer's value, and carries the gradient of all.
        shares = torch.zeros_like(counts)
        shares[:, 0] = value
        weight = (2.0 / pairs).to(z.dtype).repeat_interleave(b)
    target = opposite.flatten(0, 1).to(z.dtype)
    shared = _Turned.apply(z, shares.flatten().to(z.dtype), scale, target, weight, None)  # type: ignore[no-untyped-call]
    return shared.view(p.layers, b).sum(-1), counted > 0


def squared_correlations(p: Points, *, of_tokens: bool) -> Means:
    """Return the mean squared correlation over the pairs of columns of each group.

    With X (n, d) standardised so that every column has length one, C = X^T X has the correlations
    of the columns. The sum of their squares is |X^T X|^2 = |X X^T|^2, so the smaller product is
    formed; the diagonal is subtracted.

    Args:
        p: The tokens.
        of_tokens: Whether the columns are tokens; otherwise they are features.

    Returns:
        Two tensors, shape (groups,): the means, and whether each group has a pair.
    """
    z, real = p.by_group()
    along = 2 if of_tokens else 1  # the averaged axis
    with torch.no_grad(), full_precision(z.device):
        keep = real.unsqueeze(-1).to(z.dtype)
        count = torch.full_like(keep[:, :1], z.shape[2]) if of_tokens else keep.sum(1, keepdim=True)
        count = count.clamp(min=1.0)
        x = z - z.sum(along, keepdim=True) / count
        x.mul_(keep)
        norm = torch.linalg.vector_norm(x, dim=along, keepdim=True)
        # A constant has no correlation, and its rounding errors do not count as variation.
        size = torch.linalg.vector_norm(z, dim=along, keepdim=True)
        flat = norm <= torch.maximum(
            size * (8 * torch.finfo(z.dtype).eps), size.new_tensor(NO_DIRECTION)
        )
        scale = torch.where(flat, 0.0, norm.reciprocal())
        x.mul_(scale)
        columns = (scale != 0).sum((1, 2)).to(z.dtype)
        pairs = (columns * (columns - 1)).clamp(min=1.0)
        wide = x.shape[1] <= x.shape[2]
        gram = torch.bmm(x, x.mT) if wide else torch.bmm(x.mT, x)
        value = (torch.linalg.vector_norm(gram, dim=(1, 2)).square() - columns) / pairs
        pull = torch.bmm(gram, x) if wide else torch.bmm(x, gram)
        pull.addcmul_((pull * x).sum(along, keepdim=True).neg_(), x)
        pull.sub_(pull.sum(along, keepdim=True) / count).mul_(keep).mul_(scale)
    return _pulled(z, value, pull, 4.0 / pairs, columns > 1, None)


def angular_exponentials(p: Points, tau: float) -> Means:
    """Return the log of the mean of exp(-D / tau) over each group's pairs, D = arccos(cos) / pi.

    Args:
        p: The tokens.
        tau: The temperature.

    Returns:
        Two tensors, shape (groups,): the values, and whether each group has a pair.
    """
    slope = 1.0 / (math.pi * tau)

    def terms(cosine: Tensor) -> tuple[Tensor, Tensor]:
        steepness = _steepness(cosine)
        term = cosine.acos_().mul_(-slope).exp_()
        return term, steepness.mul_(term)

    total, pairs, pull = _over_angles(p, terms)
    # Each unordered pair moves both its points: the ordered mean's derivative has the factor 2.
    weight = 2.0 * slope / total.clamp(min=torch.finfo(total.dtype).tiny)
    return _pulled(p.z, (total / pairs.clamp(min=1.0)).log(), pull, weight, pairs > 0, p.owner)


def angular_hinges(p: Points, margin: float) -> Means:
    """Return the mean of max(0, margin - D)^2 over each group's pairs, D = arccos(cos) / pi.

    Args:
        p: The tokens.
        margin: The distance D up to which pairs are pushed apart.

    Returns:
        Two tensors, shape (groups,): the values, and whether each group has a pair.
    """

    def terms(cosine: Tensor) -> tuple[Tensor, Tensor]:
        steepness = _steepness(cosine)
        short = cosine.acos_().mul_(-1.0 / math.pi).add_(margin).clamp_(min=0.0)
        return short.square(), steepness.mul_(short)

    total, pairs, pull = _over_angles(p, terms)
    number = pairs.clamp(min=1.0)
    return _pulled(p.z, total / number, pull, 4.0 / math.pi / number, pairs > 0, p.owner)


def distance_exponentials(p: Points, rate: Tensor) -> Means:
    """Return the log of the mean of exp(-|z_i - z_j|^2 * rate) over the pairs of each group.

    Args:
        p: The tokens.
        rate: Shape (groups,), one factor for each group.

    Returns:
        Two tensors, shape (groups,): the values, and whether each group has a pair.
    """
    needs_gradient = _needs_gradient(p.z)
    with torch.no_grad(), full_precision(p.z.device):
        ok, owner = p.real, _pair_owner(p, p.real)
        counts = p.counts(ok)
        # A shift of a whole row changes no distance; without it differences keep more digits.
        centre = p.z.sum(1, keepdim=True) / ok.sum(1).clamp(min=1).view(-1, 1, 1)
        z = (p.z - centre).mul_(ok.unsqueeze(-1))
        squares = z.square().sum(-1)
        rates = _at(p.owner, rate).expand_as(squares)

        def exponents(block: _Block) -> Tensor:
            """With the rate of each row; pairs across groups are dropped later."""
            gap = torch.bmm(z[block.rows], z[block.columns].mT).mul_(-2.0)
            gap.add_(squares[block.rows].unsqueeze(-1)).add_(squares[block.columns].unsqueeze(1))
            return gap.clamp_(min=0.0).mul_(-rates[block.rows].unsqueeze(-1))

        top = torch.full_like(squares, -math.inf)
        for block in _blocks(z):
            exponent = exponents(block)
            _only_pairs((exponent,), owner, block, fill=-math.inf)
            top[block.rows] = torch.maximum(top[block.rows], exponent.amax(2))
            top[block.columns] = torch.maximum(top[block.columns], exponent.amax(1))
        shift = _group_max(p, top)
        shifts = _at(p.owner, shift).expand_as(squares)
        sums, pull = torch.zeros_like(squares), torch.zeros_like(z) if needs_gradient else None
        for block in _blocks(z):
            value = exponents(block).sub_(shifts[block.rows].unsqueeze(-1)).exp_()
            _only_pairs((value,), owner, block)
            _add_block(z, block, value, value, sums, pull)
        total = p.sums(sums)
        value = (total / (counts * (counts - 1)).clamp(min=1.0)).log() + shift
        if pull is not None:
            pull.addcmul_(sums.unsqueeze(-1), z, value=-1.0)
    return _pulled(p.z, value, pull, 4.0 * rate / total, counts > 1, p.owner)


def median_distance(p: Points, most: int = 128) -> Tensor:
    """Return the median squared distance over the pairs of each group.

    If the number of pairs is even, it is the lower of the two middle values.

    Args:
        p: The tokens.
        most: Maximum number of tokens that are taken from a group; from a larger group, tokens at
            even distances are taken.

    Returns:
        Shape (groups,); NaN for a group without a pair.
    """
    z, real = p.by_group()
    z = z.detach()
    counts, width = real.sum(1, keepdim=True), min(most, z.shape[1])
    place = torch.arange(width, device=z.device)
    real_first = (~real).to(torch.uint8).argsort(dim=1, stable=True)
    chosen = real_first.gather(1, torch.where(counts > width, place * counts // width, place))
    rows = z.gather(1, chosen.unsqueeze(-1).expand(-1, -1, z.shape[2]))
    used = place < counts
    rows = rows - (rows * used.unsqueeze(-1)).sum(1, keepdim=True) / used.sum(1).clamp(min=1).view(
        -1, 1, 1
    )
    squares = rows.square().sum(-1)
    with full_precision(z.device):
        gap = (
            torch.bmm(rows, rows.mT)
            .mul_(-2.0)
            .add_(squares.unsqueeze(-1))
            .add_(squares.unsqueeze(1))
        )
    pair = used.unsqueeze(-1) & used.unsqueeze(1)
    pair.diagonal(dim1=1, dim2=2).fill_(False)
    return gap.clamp_(min=0.0).masked_fill_(~pair, float("nan")).flatten(1).nanmedian(-1).values


class _Turned(torch.autograd.Function):
    """A value per group with the gradient weight (target - (target.u) u)/|z|; keeps only z."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, value: Tensor, *kept: Tensor | None) -> Tensor:
        ctx.save_for_backward(z, *kept)
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, scale, targets, weight, owner = ctx.saved_tensors
        with full_precision(z.device):
            if owner is None:
                along = torch.bmm(z, targets.unsqueeze(-1)).squeeze(-1)
                target = targets.unsqueeze(1)
            else:
                target = targets[owner]
                along = (z * target).sum(-1)
        along = along.mul_(scale.square()).neg_()
        out = torch.addcmul(target, along.unsqueeze(-1), z)
        return out.mul_((scale * _at(owner, grad * weight)).unsqueeze(-1)), *[None] * 5


class _Pulled(torch.autograd.Function):
    """A value per group with the gradient ``pull`` times the group's weight."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, value: Tensor, *kept: Tensor | None) -> Tensor:
        ctx.save_for_backward(*kept)
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        pull, weight, owner = ctx.saved_tensors
        return pull * _at(owner, grad * weight).unsqueeze(-1), *[None] * 4


def _pulled(
    z: Tensor,
    value: Tensor,
    pull: Tensor | None,
    weight: Tensor,
    counted: Tensor,
    owner: Tensor | None,
) -> Means:
    value = torch.where(counted, value, 0.0)
    if pull is not None:
        value = _Pulled.apply(z, value, pull, torch.where(counted, weight, 0.0), owner)  # type: ignore[no-untyped-call]
    return value, counted


def _over_angles(
    p: Points, terms: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sum of a term of the cosine over the ordered pairs of each group, their number, and the pull.

    ``terms`` gives the terms of a block of cosines, which it may overwrite, and their slopes.
    """
    needs_gradient = _needs_gradient(p.z)
    with torch.no_grad(), full_precision(p.z.device):
        scale = unit_scale(p.z)
        ok = scale != 0
        owner, counts = _pair_owner(p, ok), p.counts(ok)
        u = p.z * scale.unsqueeze(-1)
        sums, pull = torch.zeros_like(scale), torch.zeros_like(u) if needs_gradient else None
        for block in _blocks(u):
            value, slope = terms(torch.bmm(u[block.rows], u[block.columns].mT))
            _only_pairs((value, slope), owner, block)
            _add_block(u, block, value, slope, sums, pull)
            if pull is not None and block.is_last:  # the pull of these groups is complete
                # Only the part orthogonal to a vector moves its direction.
                part, turned = pull[block.groups], u[block.groups]
                along = (part * turned).sum(-1, keepdim=True).neg_()
                part.addcmul_(along, turned).mul_(scale[block.groups].unsqueeze(-1))
        return p.sums(sums), counts * (counts - 1), pull


class _Block(NamedTuple):
    """Part of the upper triangle of some groups' pairs: some rows, and all columns from the first row's on.

    ``rows``, ``columns`` and ``later``, the columns behind the rows, are indices into (g, t).
    """

    groups: slice
    rows: tuple[slice, slice]
    columns: tuple[slice, slice]
    later: tuple[slice, slice]
    is_last: bool  # whether it is its groups' last block


def _blocks(x: Tensor) -> Iterator[_Block]:
    """All blocks of x (g, t, d): on a CPU as large as its cache; elsewhere all groups at once."""
    g, t, _ = x.shape
    groups, size = g, max(_CPU_ROWS, _GPU_NUMBERS // (g * t))
    if x.device.type == "cpu":
        groups, size = max(1, _CACHE_NUMBERS // (min(t, _CPU_ROWS) * t)), _CPU_ROWS
    for i in range(0, g, groups):
        here = slice(i, i + groups)
        for j in range(0, t, size):
            end = min(j + size, t)
            yield _Block(
                here, (here, slice(j, end)), (here, slice(j, t)), (here, slice(end, t)), end == t
            )


def _add_block(
    x: Tensor, block: _Block, value: Tensor, slope: Tensor, sums: Tensor, pull: Tensor | None
) -> None:
    """Add terms to ``sums`` (g, t) and slope times partner to ``pull`` (g, t, d), for rows and columns.

    The columns of the diagonal block are its rows.
    """
    width = value.shape[1]
    sums[block.rows] += value.sum(2)
    sums[block.later] += value[:, :, width:].sum(1)
    if pull is not None:
        pull[block.rows].baddbmm_(slope, x[block.columns])
        if not block.is_last:
            pull[block.later].baddbmm_(slope[:, :, width:].mT, x[block.rows])


def _only_pairs(
    matrices: tuple[Tensor, ...], owner: Tensor | None, block: _Block, fill: float = 0.0
) -> None:
    """Overwrite the diagonal and the pairs that cross groups or touch a token that is not a point."""
    for matrix in matrices:
        matrix.diagonal(dim1=1, dim2=2).fill_(fill)
    if owner is not None:
        crossing = owner[block.rows].unsqueeze(-1) != owner[block.columns].unsqueeze(1)
        for matrix in matrices:
            matrix.masked_fill_(crossing, fill)


def _pair_owner(p: Points, ok: Tensor) -> Tensor | None:
    """Group of each point, a unique number for other tokens; None if every pair of a row counts.

    Checks only on the CPU whether all are points: a GPU would have to synchronise.
    """
    if p.owner is None and ok.device.type == "cpu" and bool(ok.all()):
        return None
    owner = (
        torch.zeros(ok.shape, dtype=torch.long, device=ok.device) if p.owner is None else p.owner
    )
    return torch.where(ok, owner, -1 - torch.arange(ok.shape[1], device=ok.device))


def _group_max(p: Points, rows: Tensor) -> Tensor:
    """Each group's largest value, 0 where it has no pair."""
    if p.owner is None:
        top = rows.amax(-1)
    else:
        top = torch.full((p.groups,), -math.inf, dtype=rows.dtype, device=rows.device)
        top.scatter_reduce_(0, p.owner.flatten(), rows.flatten(), "amax")
    return torch.where(top == -math.inf, 0.0, top)


def _at(owner: Tensor | None, values: Tensor) -> Tensor:
    """Each group's value, (groups,), at each of its points: (g, t), or (g, 1) where rows are groups."""
    return values.unsqueeze(-1) if owner is None else values[owner]


def _steepness(cosine: Tensor) -> Tensor:
    """Minus the derivative of arccos, with ``cosine`` kept away from +-1 in place."""
    cosine.clamp_(-1.0 + GUARD, 1.0 - GUARD)
    return torch.addcmul(cosine.new_ones(()), cosine, cosine, value=-1.0).rsqrt_()


def _needs_gradient(z: Tensor) -> bool:
    return z.requires_grad and torch.is_grad_enabled()


def unit_scale(z: Tensor) -> Tensor:
    """Return 1 / |z| for each vector along the last axis, shape (...) for ``z`` of shape (..., d).

    The value is 0 for vectors of length up to 1e-12, which have no direction, and NaN for vectors
    with NaN or infinity.
    """
    norm = torch.linalg.vector_norm(z, dim=-1)
    # An infinite norm must not pass for a vector to leave out: inf - inf is NaN.
    return torch.where(norm <= NO_DIRECTION, 0.0, norm.reciprocal() + (norm - norm))


def unit_sums(p: Points, scale: Tensor) -> Tensor:
    """Return the sum of each group's unit vectors.

    Args:
        p: The tokens.
        scale: Shape (rows, t), what `unit_scale` returns for the tokens.

    Returns:
        Shape (groups, d), float64.
    """
    z = p.z
    g, t, d = z.shape
    with full_precision(z.device):
        if p.owner is not None:
            sums = torch.zeros(p.groups, d, dtype=z.dtype, device=z.device)
            return sums.index_add_(
                0, p.owner.flatten(), (z * scale.unsqueeze(-1)).view(-1, d)
            ).double()
        whole = t - t % _SUMMED_ROWS
        if not whole:
            return torch.bmm(scale.unsqueeze(1), z).squeeze(1).double()
        parts = (
            scale[:, :whole].reshape(g, -1, 1, _SUMMED_ROWS),
            z[:, :whole].reshape(g, -1, _SUMMED_ROWS, d),
        )
        total = torch.matmul(*parts).squeeze(2).double().sum(1)
        if whole < t:
            total += torch.bmm(scale[:, whole:].unsqueeze(1), z[:, whole:]).squeeze(1)
        return total


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute products inside the block in the precision of their operands.

    Autocast and, on CUDA, TF32 are switched off, and restored afterwards.

    Args:
        device: The device of the operands.
    """
    with torch.autocast(device.type, enabled=False):
        before = torch.get_float32_matmul_precision()
        if device.type == "cuda":
            torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            if device.type == "cuda":
                torch.set_float32_matmul_precision(before)


def _check(
    z: Tensor, mask: Tensor | None, segments: Tensor | None, pairs: str, max_tokens: int | None
) -> None:
    """Raise an error for arguments that do not fit."""
    if z.dim() != 4 or not z.is_floating_point():
        shape = tuple(z.shape[1:]) if z.dim() and z.shape[0] == 1 else tuple(z.shape)
        raise GeometryError(
            f"expected floating-point states of shape (b, t, d), got {z.dtype} of shape {shape}"
        )
    for name, given in (("mask", mask), ("segments", segments)):
        if given is not None and given.shape != z.shape[1:3]:
            raise GeometryError(
                f"expected `{name}` of shape (b, t) = {tuple(z.shape[1:3])}, got {tuple(given.shape)}"
            )
    if z.numel() == 0:
        raise GeometryError(
            f"expected states with at least one token, got the shape {tuple(z.shape[1:])}"
        )
    if pairs not in PAIRS:
        raise UsageError(f"expected pairs to be {' or '.join(PAIRS)}, got {pairs!r}")
    if max_tokens is not None and max_tokens < 2:
        raise UsageError(
            f"expected max_tokens of at least 2, got {max_tokens}; leave it out to take all tokens"
        )


def _documents(segments: Tensor) -> tuple[Tensor, int]:
    """Documents numbered across the rows of ``segments`` (b, t): rows never share a number."""
    row = torch.arange(len(segments), device=segments.device).unsqueeze(-1).expand_as(segments)
    keys = torch.stack([row.flatten(), segments.flatten().to(torch.long)])
    documents, owner = torch.unique(keys, dim=1, return_inverse=True)
    return owner.view(segments.shape), documents.shape[1]
