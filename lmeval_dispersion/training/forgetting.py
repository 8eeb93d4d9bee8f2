"""Active forgetting, a baseline of LD: the input embeddings are drawn anew every so many steps."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback


class ActiveForgetting(TrainerCallback):  # type: ignore[misc]
    """Resets the input embeddings and their optimizer state every ``every`` steps, but not after the last.

    Where the output projection is tied to them it is reset too, as in LD's released code for GPT-2. New
    rows are normal with the model's ``initializer_range``, drawn from the seed and the step alone.

    Args:
        every: Steps between resets.
        seed: Seed of the draws.

    Source: LD, baselines, after Chen et al. (2023), "Improving language plasticity via pretraining with
    active forgetting".
    """

    def __init__(self, every: int, seed: int) -> None:
        self.every, self.seed = every, seed

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Reset, if it is time."""
        if state.global_step % self.every or state.global_step >= state.max_steps:
            return
        weight = model.get_input_embeddings().weight
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + state.global_step)
        scale = getattr(model.config, "initializer_range", 0.02)
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
        inner = getattr(optimizer, "optimizer", optimizer)
        for value in inner.state.get(weight, {}).values():
            if isinstance(value, torch.Tensor) and value.shape == weight.shape:
                value.zero_()
