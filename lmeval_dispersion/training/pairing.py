"""Which tokens are points of a loss, and which of them form pairs.

States come as (l, b, t, d): l layers of one batch, so that a GPU can treat all layers in one go. Pairs are
formed inside a *group*: one sequence, one packed document of it, or the whole batch, always of one layer.
Padding is never a point.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from lmeval_dispersion.errors import GeometryError, UsageError

Pairs = Literal["sequence", "batch"]
PAIRS: tuple[Pairs, ...] = ("sequence", "batch")

NO_DIRECTION = 1e-12  # vectors up to this length count as zero: they have no direction


@dataclass(frozen=True)
class Points:
    """Vectors in rows, and the group of each.

    Attributes:
        z: (g, t, d), float32 or float64, zero where ``valid`` is false.
        valid: (g, t) true on points; None where all are.
        owner: (g, t) group of each point, in [0, groups); None where row i is group i.
        groups: Number of groups over all layers, a multiple of ``layers``.
        layers: Number of layers.
    """

    z: Tensor
    valid: Tensor | None
    owner: Tensor | None
    groups: int
    layers: int

    def without_vectors(self) -> Points:
        """The same without ``z``, for autograd contexts, which must hold tensors as saved ones only."""
        return replace(self, z=self.z.new_empty(0))


def points(
    z: Tensor,
    *,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    pairs: Pairs = "sequence",
    max_tokens: int | None = None,
    generator: torch.Generator | None = None,
) -> Points:
    """The points of ``z`` (l, b, t, d), with ``mask`` and ``segments`` of shape (b, t).

    With ``max_tokens`` that many positions of every row are drawn among the real ones, anew for each layer,
    from ``generator`` (without one: always the same draw), never from the global one.

    Raises:
        GeometryError: A shape does not fit.
        UsageError: ``pairs`` or ``max_tokens`` is not usable.
    """
    check(z, mask, segments, pairs, max_tokens)
    layers, b, t, d = z.shape
    valid = None if mask is None else mask.to(device=z.device, dtype=torch.bool).expand(layers, b, t)
    owner, documents = None, b
    if segments is not None and pairs == "sequence":
        ids, documents = _documents(segments.to(z.device))
        owner = ids.expand(layers, b, t)
    if max_tokens is not None and max_tokens < t:
        keys = torch.rand((layers, b, t), generator=generator or _fixed(z.device), device=z.device)
        if valid is not None:
            keys = keys.masked_fill(~valid, -1.0)
        chosen = keys.topk(max_tokens, dim=-1, sorted=False).indices
        # Whole rows are copied by one flat index; gather along an expanded axis would read an index a number.
        flat = (torch.arange(layers * b, device=z.device).view(layers, b, 1) * t + chosen).flatten()
        z = z.reshape(-1, d).index_select(0, flat).view(layers, b, max_tokens, d)
        valid = None if valid is None else valid.gather(-1, chosen)
        owner = None if owner is None else owner.gather(-1, chosen)
        t = max_tokens
    z = z if z.dtype in (torch.float32, torch.float64) else z.float()
    if valid is not None:
        # Whatever padding holds, NaN included, must reach neither the sums nor the gradient.
        z = z.masked_fill(~valid.unsqueeze(-1), 0.0)
    rows, length = (layers, b * t) if pairs == "batch" else (layers * b, t)
    if owner is not None:
        owner = owner + documents * torch.arange(layers, device=z.device).view(-1, 1, 1)
    return Points(
        z.reshape(rows, length, d),
        None if valid is None else valid.reshape(rows, length),
        None if owner is None else owner.reshape(rows, length),
        layers if pairs == "batch" else layers * documents,
        layers,
    )


def unit_scale(z: Tensor) -> Tensor:
    """1/|z| along the last axis, 0 for vectors without a direction, NaN for those that are not finite."""
    norm = torch.linalg.vector_norm(z, dim=-1)
    # An infinite norm must not look like a vector to leave out: inf - inf is NaN.
    return torch.where(norm <= NO_DIRECTION, 0.0, norm.reciprocal() + (norm - norm))


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Products in the operands' own precision: no autocast, no TF32."""
    with torch.autocast(device.type, enabled=False):
        if device.type != "cuda" or torch.get_float32_matmul_precision() == "highest":
            yield
            return
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


def group_counts(p: Points, ok: Tensor) -> Tensor:
    """Number of points of every group, shape (groups,); ``ok`` (g, t) is true on points."""
    if p.owner is None:
        return ok.sum(-1).to(p.z.dtype)
    counts = torch.zeros(p.groups, dtype=p.z.dtype, device=p.z.device)
    return counts.index_add_(0, p.owner.flatten(), ok.flatten().to(p.z.dtype))


def group_sums(p: Points, rows: Tensor) -> Tensor:
    """Sums of a value a point, (g, t) -> (groups,)."""
    if p.owner is None:
        return rows.sum(-1)
    sums = torch.zeros(p.groups, dtype=rows.dtype, device=rows.device)
    return sums.index_add_(0, p.owner.flatten(), rows.flatten())


def at_points(p: Points, values: Tensor) -> Tensor:
    """A value a group, (groups,), at each of its points: (g, t), or (g, 1) where rows are groups."""
    return values.unsqueeze(-1) if p.owner is None else values[p.owner]


def layer_means(p: Points, values: Tensor, counted: Tensor) -> Tensor:
    """Mean over the groups that count, for each layer: (groups,) -> (layers,); 0 where none does."""
    counted = counted.view(p.layers, -1).to(values.dtype)
    total = torch.where(counted > 0, values.view(p.layers, -1), 0.0).sum(-1)
    return total / counted.sum(-1).clamp(min=1.0)


def padded_groups(p: Points) -> tuple[Tensor, Tensor]:
    """Points as one padded row a group, (groups, longest, d), with the mask (groups, longest)."""
    valid = torch.ones(p.z.shape[:2], dtype=torch.bool, device=p.z.device) if p.valid is None else p.valid
    if p.owner is None:
        return p.z, valid
    used = valid.flatten().nonzero().squeeze(-1)
    owner, order = p.owner.flatten()[used].sort(stable=True)
    counts = torch.bincount(owner, minlength=p.groups)
    longest = int(counts.max()) if len(used) else 1
    starts = pad(counts.cumsum(0), (1, 0))[:-1]
    place = owner * longest + torch.arange(len(owner), device=owner.device) - starts[owner]
    rows = p.z.new_zeros(p.groups * longest, p.z.shape[2])
    rows = rows.index_copy(0, place, p.z.flatten(0, 1)[used[order]])
    inside = torch.zeros(p.groups * longest, dtype=torch.bool, device=p.z.device).index_fill_(0, place, True)
    return rows.view(p.groups, longest, -1), inside.view(p.groups, longest)


def layers_of(z: Tensor) -> Tensor:
    """States as a stack of layers: (b, t, d) -> (1, b, t, d)."""
    return z.unsqueeze(0) if z.dim() == 3 else z


def like_given(z: Tensor, by_layer: Tensor) -> Tensor:
    """A scalar where ``z`` was one layer, a loss a layer where it was a stack."""
    return by_layer[0] if z.dim() == 3 else by_layer


def check(
    z: Tensor, mask: Tensor | None, segments: Tensor | None, pairs: str, max_tokens: int | None
) -> None:
    """Raise a sentence for what does not fit."""
    if z.dim() != 4 or not z.is_floating_point():
        shape = tuple(z.shape[1:]) if z.dim() and z.shape[0] == 1 else tuple(z.shape)
        raise GeometryError(f"expected floating-point states of shape (b, t, d), got {z.dtype} {shape}")
    for name, given in (("mask", mask), ("segments", segments)):
        if given is not None and given.shape != z.shape[1:3]:
            raise GeometryError(
                f"expected `{name}` of shape (b, t) = {tuple(z.shape[1:3])}, got {tuple(given.shape)}"
            )
    if z.numel() == 0:
        raise GeometryError(f"expected states with at least one token, got {tuple(z.shape[1:])}")
    if pairs not in PAIRS:
        raise UsageError(f"expected pairs of {', '.join(PAIRS)}, got {pairs!r}")
    if max_tokens is not None and max_tokens < 2:
        raise UsageError(f"expected max_tokens of at least 2, got {max_tokens}; leave it out to take all")


def _fixed(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def _documents(segments: Tensor) -> tuple[Tensor, int]:
    """Documents numbered through the rows of ``segments`` (b, t): two rows never share one."""
    row = torch.arange(len(segments), device=segments.device).unsqueeze(-1).expand_as(segments)
    keys = torch.stack([row.flatten(), segments.flatten().to(torch.long)])
    found, owner = torch.unique(keys, dim=1, return_inverse=True)
    return owner.view(segments.shape), found.shape[1]
