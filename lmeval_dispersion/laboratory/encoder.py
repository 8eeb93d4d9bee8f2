"""A model without a causal head, which may read both ways (BERT, ALBERT, RoBERTa …).

Its states are the ``hidden_states`` of transformers: the input of the first block, then the output
of every block, also where blocks share their weights (ALBERT). Segments have the special tokens with
which the tokenizer begins and ends a text, inside their length.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from numpy.typing import NDArray

from lmeval_dispersion.errors import CaptureError, UsageError
from lmeval_dispersion.laboratory.causal_model import CausalModel, Reduce
from lmeval_dispersion.laboratory.precision import check_memory
from lmeval_dispersion.laboratory.segments import Unit, affixes_of
from lmeval_dispersion.model.capture import unwrapped
from lmeval_dispersion.model.loading import (
    LoadedModel,
    ModelLike,
    has_causal_head,
    loaded_model,
    model_choice,
)


class EncoderModel(CausalModel):
    """A model without a causal head, ready to run segments; it gives no log-probabilities."""

    def _find_layers(self) -> None:
        self.blocks = int(self.config.num_hidden_layers)
        self.suffix = affixes_of(self.loaded.tokenizer)[1]

    def layers(self, wanted: str | Sequence[str]) -> list[str]:
        """Names of all depths, the only choice: ``embeddings``, ``layer.K`` and ``last``."""
        if wanted != "depths":
            raise UsageError(f"expected all depths of an encoder, got {wanted}")
        return ["embeddings", *(f"layer.{k}" for k in range(self.blocks - 1)), "last"]

    def check_segment(self, length: int) -> None:
        """Raise UsageError if segments exceed the model's context, or its tokenizer's longest text."""
        super().check_segment(length)
        longest = int(self.loaded.tokenizer.model_max_length)  # RoBERTa counts two positions more
        if length > longest:
            raise UsageError(
                f"{self.loaded.name} takes at most {longest} tokens, got segments of {length}; "
                "shorten them (--segment)"
            )

    @torch.no_grad()
    def _pass(
        self, tokens: NDArray[Any], *, layers: Sequence[str], reduce: Reduce, losses: bool
    ) -> Unit:
        """Run one batch in one forward pass."""
        ids = self._on_device(tokens)
        states = self.loaded.model(
            input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True
        ).hidden_states
        if states is None or len(states) != len(layers):
            raise CaptureError(
                f"expected {len(layers)} hidden states of {self.loaded.name}, got "
                f"{len(states or ())}; its class does not give the states of its blocks"
            )
        return {name: reduce(state) for name, state in zip(layers, states, strict=True)}

    def _at_random(self, model: Any) -> Any:
        """A model like this one, in float32, whose weights are random."""
        return type(model)(model.config)


def read_either_way(model: ModelLike) -> CausalModel:
    """A decoder or an encoder, ready to run segments; raises as :func:`load_model`."""
    check_memory(model)
    if not isinstance(model, LoadedModel):
        model = loaded_model(replace(model_choice(model), encoder=True))
    if has_causal_head(unwrapped(model.model).config):
        # Some heads for causal models read later tokens too (BertLMHeadModel, XLNet).
        with suppress(UsageError):
            return CausalModel(model)
    return EncoderModel(model)
