"""Squared correlations between features (or between tokens), without the larger of the two Gram matrices.

With X (n, d) standardised so that every column has length one, C = X^T X holds the correlations of the
columns, and sum of C_mn^2 over all m, n = |X^T X|^2 = |X X^T|^2. So the smaller side is formed, min(n, d)^2
numbers, and the diagonal, one for each column that varies, is taken off. Constant columns have no
correlation and drop out.

Source: LD, decorrelation. The released code correlates tokens (``axis="tokens"``).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lmeval_dispersion.training.points import NO_DIRECTION, Points, full_precision, padded_groups

Axis = Literal["features", "tokens"]
AXES: tuple[Axis, ...] = ("features", "tokens")


def squared_correlations(p: Points, axis: Axis) -> tuple[Tensor, Tensor]:
    """Mean squared off-diagonal correlation of every group and which groups have one; both (groups,)."""
    z, valid = padded_groups(p)
    value, columns = _Correlations.apply(z, valid, axis == "tokens")  # type: ignore[no-untyped-call]
    return value, columns > 1


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
