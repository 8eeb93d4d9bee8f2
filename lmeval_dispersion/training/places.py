"""Which blocks of a decoder a loss looks at, and the module that is called with the batch's mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import nn

from lmeval_dispersion.errors import CaptureError, UsageError

Layers = Literal["last", "all", "early_half", "late_half"]
LAYERS: tuple[Layers, ...] = ("last", "all", "early_half", "late_half")


def layer_indices(layers: str | Sequence[int], count: int) -> list[int]:
    """Indices of blocks in [0, count), ascending, that ``layers`` stands for.

    Raises:
        UsageError: An unknown word, an index out of range, or none at all.

    >>> layer_indices("late_half", 5)
    [2, 3, 4]
    """
    half = max(1, count // 2)
    words = {
        "last": range(count - 1, count),
        "all": range(count),
        "early_half": range(half),
        "late_half": range(min(half, count - 1), count),
    }
    if isinstance(layers, str):
        if layers not in words:
            raise UsageError(f"expected layers of {', '.join(LAYERS)} or indices, got {layers!r}")
        return list(words[layers])
    chosen = list(layers)
    bad = [k for k in chosen if isinstance(k, bool) or not isinstance(k, int) or not -count <= k < count]
    if bad or not chosen:
        raise UsageError(f"expected indices of blocks from {-count} to {count - 1}, got {bad or chosen}")
    return sorted({k % count for k in chosen})


def holder(model: nn.Module, block: nn.Module) -> nn.Module:
    """The module whose list the blocks are in: the decoder proper, always called as a module."""
    for module in model.modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) and child[0] is block:
                return module
    raise CaptureError(f"expected decoder blocks in a list inside {type(model).__name__}, found none")
