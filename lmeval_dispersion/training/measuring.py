"""Measures a model in memory: the screener's G, and the spread of fixed texts by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lmeval_screener.figures import Gap, gap
from lmeval_screener.tokens.resolution import Resolution, resolve_tokens
from lmeval_screener.tokens.sets import load_token_set
from lmeval_screener.tokens.vocabulary import Vocabulary
from numpy.typing import NDArray
from torch import Tensor, nn

from lmeval_dispersion.errors import GeometryError, UsageError
from lmeval_dispersion.geometry import dispersion, effective_rank
from lmeval_dispersion.model import states_after_blocks
from lmeval_dispersion.model.capture import Decoder, capture, head, unwrapped
from lmeval_dispersion.training.no_trace import without_trace

# The default fixed batch: short texts of several kinds, the same for every run.
TEXTS = (
    "The weather was fine, and the two of them walked along the river until it was dark.",
    "A train leaves at 9:40 and arrives at 12:15; the journey takes 155 minutes.",
    "def mean(values):\n    return sum(values) / len(values)",
    "Water boils at a lower temperature on a high mountain, because the pressure of the air is "
    "lower.",
    "12 + 30 = 42, and 42 - 7 = 35.",
    "She opened the letter, read it twice, and put it back without a word.",
    "The parties agree that any dispute shall be settled by the courts of the seller's country.",
    "Bread is made of flour, water, salt and yeast.",
)
_TOKENS = 32  # most tokens of a text


class Measuring:
    """Measures a model in memory: G of token sets, and how spread the states of fixed texts are.

    G is the mean cosine distance over the pairs of a domain's rows of the output projection, plus
    the mean distance between these rows and the rows of everyday words.

    Args:
        tokenizer: The model's tokenizer, from transformers.
        domains: Token sets, by a name or a file as in the screener's ``--domain``. If empty, G is
            not measured.
        reference: The token set of everyday words, by a name or a file.
        texts: The fixed texts; if empty, no states are measured.
        layers: The layers whose states are measured, as in `DispersionRegularizer`; ``last`` is
            after the final norm.

    Attributes:
        layers: The layers whose states are measured, as given.
        resolutions: For each domain by name, the token ids of the domain's words and of the
            everyday words, which are numbers of rows of the output projection.

    Raises:
        UsageError: An argument cannot be used, or fewer than two texts have two tokens.
        ScreeningError: The tokenizer lacks too many words of a token set.
    """

    def __init__(
        self,
        tokenizer: Any,
        domains: Sequence[str] = (),
        *,
        reference: str = "reference",
        texts: Sequence[str] = TEXTS,
        layers: str | Sequence[str | int] = "last",
    ) -> None:
        for name, given in (("domains", domains), ("texts", texts)):
            if isinstance(given, str):
                raise UsageError(f"expected a list of {name} such as [{given!r}], got {given!r}")
        self.layers = layers
        self.resolutions: dict[str, Resolution] = {}
        if domains:
            vocabulary = Vocabulary.of(tokenizer)
            everyday = load_token_set(reference, "reference")
            for name in domains:
                domain = load_token_set(name, "domain")
                self.resolutions[name] = resolve_tokens(domain, everyday, vocabulary)
        self._batch: list[list[int]] = []
        for text in texts:
            ids = tokenizer(text, add_special_tokens=False).input_ids
            if len(ids) > 1:
                self._batch.append(ids[:_TOKENS])
        if texts and len(self._batch) < 2:
            raise UsageError(
                "expected at least 2 texts of 2 or more tokens each, got "
                f"{len(self._batch)}; pass more or longer texts"
            )

    def measure(self, model: nn.Module) -> dict[str, float]:
        """Return all figures, by the names that trackers show.

        The names are ``geometry/gap_DOMAIN``, its standard error ``geometry/gap_DOMAIN_se``, and
        ``geometry/FIGURE/LAYER`` for each figure of :meth:`spread` (``geometry/FIGURE`` for the
        layer ``last``). In distributed training, every process of a sharded model must call this
        method.

        Raises:
            GeometryError: A row of the output projection or a state is zero, NaN or infinite, or
                all states of a layer are equal.
            UsageError: The model has no such layer, no output projection in one piece, or fewer
                rows than the tokenizer's ids need.
            CaptureError: The model has no list of decoder blocks.
        """
        figures: dict[str, float] = {}
        with without_trace(model):
            for name, difference in self.gaps(model).items():
                figures[f"geometry/gap_{name}"] = difference.mean
                figures[f"geometry/gap_{name}_se"] = difference.se
            for layer, spread in self.spread(model).items():
                place = "" if layer == "last" else f"/{layer}"
                for name, value in spread.items():
                    figures[f"geometry/{name}{place}"] = value
        return figures

    def gaps(self, model: nn.Module) -> dict[str, Gap]:
        """Return G of every domain with its standard error, by the domain's name.

        The rows are those of the model's output projection. Without domains the result is empty.

        Raises:
            GeometryError: A row is zero, NaN or infinite.
            UsageError: The model has no output projection in one piece, or fewer rows than the
                tokenizer's ids need.
        """
        if not self.resolutions:
            return {}
        needed = set[int]()
        for tokens in self.resolutions.values():
            needed.update(tokens.domain_ids, tokens.reference_ids)
        ids = sorted(needed)
        rows = _rows(model, ids)
        gaps = {}
        for name, tokens in self.resolutions.items():
            domain = rows[np.searchsorted(ids, tokens.domain_ids)]
            reference = rows[np.searchsorted(ids, tokens.reference_ids)]
            gaps[name] = gap(domain, reference)
        return gaps

    def spread(self, model: nn.Module) -> dict[str, dict[str, float]]:
        """Return three figures of the fixed texts' states, for each layer.

        - ``dispersion``: the mean cosine distance over all pairs of the texts' last tokens;
        - ``condensation``: the mean cosine similarity of the tokens inside a text, averaged over
          texts;
        - ``effective_rank``: the effective rank of all tokens of all texts.

        Without texts the result is empty.

        Raises:
            GeometryError: A state is zero, NaN or infinite, or all states of a layer are equal.
            UsageError: The model has no such layer.
            CaptureError: The model has no list of decoder blocks.
        """
        spread = {}
        for layer, texts in self._states(model).items():
            last_tokens = np.stack([states[-1] for states in texts])
            similarities = [1 - dispersion(states) for states in texts]
            spread[layer] = {
                "dispersion": dispersion(last_tokens),
                "condensation": float(np.mean(similarities)),
                "effective_rank": effective_rank(np.concatenate(texts)),
            }
        return spread

    def _states(self, model: nn.Module) -> Mapping[str, list[NDArray[np.float32]]]:
        """States of the tokens of each text, (t, d), by layer."""
        if not self._batch:
            return {}
        decoder = Decoder.of(model)
        places = {name: name for name in states_after_blocks(self.layers, len(decoder))}
        if "last" in places and "norm" in decoder.names():
            places["last"] = "norm"  # needs no logits; a few models lack that norm
        device = next(model.parameters()).device
        longest = max(map(len, self._batch))
        # Padded on the right: no token of a text sees later tokens.
        padded = [text + [0] * (longest - len(text)) for text in self._batch]
        ids = torch.tensor(padded, device=device)
        lengths = torch.tensor([len(text) for text in self._batch], device=device)
        mask = (torch.arange(longest, device=device) < lengths[:, None]).long()
        with capture(model, list(dict.fromkeys(places.values()))) as captured:
            model(input_ids=ids, attention_mask=mask, use_cache=False)
        states = {}
        for layer, place in places.items():
            of_layer = captured[place].float().cpu().numpy()
            texts = zip(self._batch, of_layer, strict=True)
            states[layer] = [state[: len(text)] for text, state in texts]
            if not all(np.isfinite(state).all() for state in states[layer]):
                raise GeometryError(
                    f"expected finite states of the texts at {layer}, got NaN or infinity; the "
                    "training has diverged: lower its learning rate, or go back to an earlier "
                    "checkpoint"
                )
        return states


def _rows(model: nn.Module, ids: Sequence[int]) -> NDArray[np.float64]:
    """Rows of the output projection, of ascending ids."""
    projection = head(unwrapped(model))
    weight = None if projection is None else getattr(projection, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise UsageError(
            "expected a model with an output projection of shape (vocabulary, width) in this "
            f"process, got {type(model).__name__} without one; measure a causal language model "
            "whose parameters are whole or sharded by FSDP2"
        )
    if ids[-1] >= weight.shape[0]:
        raise UsageError(
            f"expected token ids below {weight.shape[0]}, the number of rows of the output "
            f"projection, got {ids[-1]}; pass the tokenizer of this model"
        )
    weight = weight.detach()
    if hasattr(weight, "full_tensor"):  # a DTensor: gathered by all processes
        weight = weight.full_tensor()
    rows = weight[torch.tensor(ids, device=weight.device)]
    return np.asarray(rows.to("cpu", torch.float64).numpy())
