"""LD's losses with the constants of its released code, so that its tables can be compared.

They differ from the published formulas, which :mod:`lmeval_dispersion.training.pairs` computes:

- 0.01 is added to a vector's length before it divides the vector, and to each exponent under a logarithm;
  so a vector of length zero counts, with the cosine 0 to every other;
- a cosine is cut to +-(1 - clamp) before its arccos, whose slope there is the slope beyond it, too;
- l2-repel counts the distance of each point to itself.

Points, groups and means are those of the other losses: without padding, inside a document. A group's t x t
pairs are kept in memory: draw tokens (``max_tokens``), as the released code does from 256 on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lmeval_dispersion.training.pairs import Means, Points, _pulled, full_precision

EPSILON = 0.01
CLAMP = 0.25  # of the released class and its Qwen3 script; its GPT-2 command line has 0.1


def spread_as_released(p: Points, tau: float, clamp: float) -> Means:
    """Return the log of the mean of exp(-D / tau + 0.01) over the pairs of each group.

    D = arccos(c) / pi, where c is the cosine with 0.01 added to the length of each vector, cut to
    [clamp - 1, 1 - clamp].

    Args:
        p: The tokens.
        tau: The temperature.
        clamp: How far from +-1 the cosines are cut.

    Returns:
        Two tensors, shape (groups,): the values, and whether each group has a pair.
    """

    def measure(p: Points) -> Tensor:
        distance, pair = _angles(p, clamp)
        terms = torch.exp(EPSILON - distance / tau)
        mean = _pair_mean(terms, pair)
        return mean.clamp(min=torch.finfo(mean.dtype).tiny).log()

    return _with_gradient(p, measure)


def hinges_as_released(p: Points, margin: float, clamp: float) -> Means:
    """Return the mean of max(0, margin - D)^2 over the pairs of each group.

    D = arccos(c) / pi, where c is the cosine with 0.01 added to the length of each vector, cut to
    [clamp - 1, 1 - clamp].

    Args:
        p: The tokens.
        margin: The distance D up to which pairs are pushed apart.
        clamp: How far from +-1 the cosines are cut.

    Returns:
        Two tensors, shape (groups,): the values, and whether each group has a pair.
    """

    def measure(p: Points) -> Tensor:
        distance, pair = _angles(p, clamp)
        terms = (margin - distance).clamp(min=0.0).square()
        return _pair_mean(terms, pair)

    return _with_gradient(p, measure)


def repulsion_as_released(p: Points, tau: float) -> Means:
    """Return the log of the mean of exp(-|z_i - z_j|^2 / tau + 0.01) over all i, j of each group.

    The pairs i = j count too.

    Args:
        p: The tokens, with states z_i.
        tau: The number by which squared distances are divided.

    Returns:
        Two tensors, shape (groups,): the values, and whether each group has a pair.
    """

    def measure(p: Points) -> Tensor:
        z, real = p.by_group()
        count = real.sum(1).clamp(min=1).to(p.z.dtype)
        # A shift of a whole group changes no distance; without it differences keep more digits.
        centre = z.detach().sum(1, keepdim=True) / count.view(-1, 1, 1)
        z = (z - centre) * real.unsqueeze(-1)
        squares = z.square().sum(-1)
        both_squares = squares.unsqueeze(2) + squares.unsqueeze(1)
        products = torch.bmm(z, z.mT)
        distance = both_squares - 2 * products
        distance = distance.masked_fill(_diagonal(real), 0.0)
        distance = distance.clamp(min=0.0)
        both = real.unsqueeze(2) & real.unsqueeze(1)
        # The value of a group without points does not count, but must be finite.
        empty = ~real.any(1).view(-1, 1, 1)
        exponents = EPSILON - distance / tau
        exponents = exponents.masked_fill(~(both | empty), -math.inf)
        return exponents.logsumexp((1, 2)) - 2 * count.log()

    return _with_gradient(p, measure)


def _pair_mean(terms: Tensor, pair: Tensor) -> Tensor:
    """Each group's mean of its pairs' terms, (groups, t, t) -> (groups,); 0 without a pair."""
    number = pair.sum((1, 2)).clamp(min=1)
    of_pairs = terms.where(pair, 0.0)
    return of_pairs.sum((1, 2)) / number


def _angles(p: Points, clamp: float) -> tuple[Tensor, Tensor]:
    """Angles of each group's points in half turns, and which of them are of pairs, both (groups, t, t)."""
    z, real = p.by_group()
    lengths = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    unit = z / (lengths + EPSILON)
    cosine = torch.bmm(unit, unit.mT)
    limit = 1.0 - clamp
    cut = cosine.clamp(-limit, limit)
    # The cut value, with the gradient of the cosine.
    passed_on = cosine + (cut - cosine).detach()
    both = real.unsqueeze(2) & real.unsqueeze(1)
    pair = both & ~_diagonal(real)
    return passed_on.arccos() / math.pi, pair


def _diagonal(real: Tensor) -> Tensor:
    size = real.shape[1]
    return torch.eye(size, dtype=torch.bool, device=real.device)


def _with_gradient(p: Points, measure: Callable[[Points], Tensor]) -> Means:
    """What ``measure`` gives for each group, its gradient formed at once, in full precision."""
    counted = p.counts(p.real) > 1
    needs_gradient = p.z.requires_grad and torch.is_grad_enabled()
    with full_precision(p.z.device):
        if not needs_gradient:
            value = torch.where(counted, measure(p), 0.0)
            return value, counted
        with torch.enable_grad():
            leaf = p.z.detach().requires_grad_()
            value = measure(replace(p, z=leaf))
            (pull,) = torch.autograd.grad(value.sum(), leaf)
    value = value.detach()
    weight = torch.ones_like(value)
    return _pulled(p.z, value, pull, weight, counted, p.owner)
