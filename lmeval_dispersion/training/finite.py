"""Looking for NaN without making a GPU wait."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmeval_dispersion.errors import NonFiniteLossError


class FiniteWatch:
    """Raises for the first non-finite loss: at once on the CPU, at a later look on a GPU.

    There the values are copied in the background and read when the copy has arrived.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Any, list[int], int]] = []

    def look(self, values: dict[int, Tensor], step: int) -> None:
        """Check the losses of layers at a step, and those of earlier steps that have arrived.

        Raises:
            NonFiniteLossError: One is NaN or infinite.
        """
        layers = list(values)
        losses = torch.stack([value.to(values[layers[-1]].device) for value in values.values()])
        if losses.device.type != "cuda":
            _raise_for(losses, layers, step)
            return
        while self._waiting and self._waiting[0][1].query():
            arrived, _, before, when = self._waiting.pop(0)
            _raise_for(arrived, before, when)
        host = torch.empty(losses.shape, dtype=losses.dtype, pin_memory=True)
        host.copy_(losses, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._waiting.append((host, event, layers, step))


def _raise_for(losses: Tensor, layers: list[int], step: int) -> None:
    for layer, value in zip(layers, losses.tolist(), strict=True):
        if value != value or value in (float("inf"), float("-inf")):
            raise NonFiniteLossError(layer, step)
