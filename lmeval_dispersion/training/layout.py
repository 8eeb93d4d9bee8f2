"""Which tokens of a forward pass are real and which documents they belong to, from its own arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmeval_dispersion.errors import GeometryError

READ = ("attention_mask", "position_ids", "seq_idx", "cu_seq_lens_q")


class Layout(NamedTuple):
    """``mask`` (b, t), true on real tokens; ``segments`` (b, t), document ids. None: all real, one a row."""

    mask: Tensor | None
    segments: Tensor | None


def layout(arguments: dict[str, Any], b: int, t: int) -> Layout:
    """The layout of states (b, t, d) from the arguments that the decoder was called with.

    ``attention_mask`` gives the mask; a mask over a cache or a prefix too is cut to the last t columns.
    Documents are those of ``seq_idx``, else of ``cu_seq_lens_q``, else they begin wherever ``position_ids``
    is 0.

    Raises:
        GeometryError: An argument has a shape that says neither; pass the layout yourself.
    """
    mask = arguments.get("attention_mask")
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[0] != b or mask.shape[1] < t:
            shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise GeometryError(
                f"expected an attention_mask of shape (b, t) = ({b}, {t}), got {shape}; "
                "say which tokens are real with describe(mask=..., segments=...)"
            )
        mask = mask[:, -t:] != 0
        if mask.device.type == "cpu" and bool(mask.all()):
            mask = None
    return Layout(mask, _documents(arguments, b, t))


def _documents(arguments: dict[str, Any], b: int, t: int) -> Tensor | None:
    ids = arguments.get("seq_idx")
    if isinstance(ids, Tensor):
        return _fitting("seq_idx", ids, b, t)
    bounds = arguments.get("cu_seq_lens_q")
    if isinstance(bounds, Tensor) and b == 1:
        place = torch.arange(t, device=bounds.device)
        return torch.bucketize(place, bounds[1:].to(place.dtype), right=True).unsqueeze(0)
    positions = arguments.get("position_ids")
    if not isinstance(positions, Tensor):
        return None
    if positions.dim() == 3:  # several axes of rotary positions; the first counts tokens
        positions = positions[0]
    if positions.shape[0] == 1 and b > 1:
        positions = positions.expand(b, -1)
    starts = _fitting("position_ids", positions, b, t) == 0
    if starts.device.type == "cpu" and not bool(starts[:, 1:].any()):
        return None
    return starts.cumsum(-1)


def _fitting(name: str, given: Tensor, b: int, t: int) -> Tensor:
    if given.shape != (b, t):
        raise GeometryError(
            f"expected {name} of shape (b, t) = ({b}, {t}), got {tuple(given.shape)}; "
            "say which document each token belongs to with describe(segments=...)"
        )
    return given
