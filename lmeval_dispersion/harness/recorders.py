"""Seeing hidden states during lm-eval's own requests: no forward pass is added and no answer changes.

A recorder shadows attributes of one HFLM object while a request method runs (instance attributes, removed
afterwards) and hooks the model. Rows of a batch are matched to requests by their tokens, so that sorting,
padding, grouping and batch size do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lmeval_dispersion.harness.states import Vectors
from lmeval_dispersion.model.capture import Site, resolve


@dataclass
class Wanted:
    """One state that a request wants, and what came back for it.

    Attributes:
        position: Position in the request's input, counted from its left end.
        span: Tokens [start, stop) of the input whose log-probabilities are wanted; empty: none.
        prompt_tokens: Tokens of the context before truncation.
        truncated: Whether the input was cut on the left.
        vectors: Layer name -> state (d,), filled when the row was seen.
        logprob: Sum over the span, NaN until seen.
    """

    position: int
    span: tuple[int, int]
    prompt_tokens: int
    truncated: bool
    vectors: dict[str, Vectors] = field(default_factory=dict)
    logprob: float = math.nan

    @property
    def perplexity(self) -> float:
        """Exp of the mean negative log-probability over the span, NaN where it is empty."""
        tokens = self.span[1] - self.span[0]
        return math.exp(min(-self.logprob / tokens, 700.0)) if tokens > 0 else math.nan


class Recorder:
    """Common ground: hooks on the chosen layers, shadowed attributes, states moved off the device late.

    Args:
        lm: lm-eval's HFLM, or a subclass of it.
        layers: Names as :mod:`lmeval_dispersion.model.capture` takes them.
    """

    shadows: tuple[str, ...] = ()

    def __init__(self, lm: Any, layers: Sequence[str]) -> None:
        self.lm = lm
        self.sites: list[Site] = resolve(lm.model, layers)
        self.fresh: dict[str, Tensor] = {}  # this forward pass's states, on the device

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record while inside; everything is put back afterwards, whatever happens."""
        with ExitStack() as stack:
            for site in self.sites:
                for handle in site.hook(self._taker(site.name)):
                    stack.callback(handle.remove)
            for name in self.shadows:
                before = self.lm.__dict__.get(name)
                stack.callback(self._restore, name, before)
                setattr(self.lm, name, self._bound(name, getattr(self.lm, name)))
            yield
        self.flush()

    def flush(self) -> None:
        """Move what is still on the device to the requests that want it."""

    def see(self, name: str, state: Tensor) -> None:
        """Take from a layer's state (b, t, d) what is wanted."""
        raise NotImplementedError

    def _taker(self, name: str) -> Any:
        return lambda state: self.see(name, state)

    def _bound(self, name: str, original: Any) -> Any:
        shadow = getattr(self, name.lstrip("_"))
        return lambda *args, **kwargs: shadow(original, *args, **kwargs)

    def _restore(self, name: str, before: Any) -> None:
        if before is None:
            self.lm.__dict__.pop(name, None)
        else:
            setattr(self.lm, name, before)


class PrefillRecorder(Recorder):
    """Records ``generate_until`` requests: the state after the prompt, when generation starts."""

    shadows = ("tok_batch_encode", "_model_generate")

    def __init__(self, lm: Any, layers: Sequence[str]) -> None:
        super().__init__(lm, layers)
        self.prompts: list[str] = []
        self.wanted: list[Wanted] = []
        self.armed = False
        self.results: dict[str, Wanted] = {}

    def tok_batch_encode(self, original: Any, strings: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of HFLM's method: note the batch's prompts and how many tokens they have."""
        ids, mask = original(strings, *args, **kwargs)
        self.prompts = list(strings)
        counts = mask.sum(dim=1).tolist()
        limit = kwargs.get("left_truncate_len")
        self.wanted = []
        for prompt, count in zip(self.prompts, counts, strict=True):
            # The batch is cut as one piece: only a row that fills it can have lost tokens.
            full = limit is not None and count >= limit
            tokens = len(self.lm.tok_encode(prompt)) if full else count
            self.wanted.append(Wanted(-1, (0, 0), tokens, truncated=tokens > count))
        return ids, mask

    def model_generate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of HFLM's method: the first pass of each layer is the prompt's."""
        self.armed, self.fresh = True, {}
        try:
            return original(*args, **kwargs)
        finally:
            self.armed = False
            self.flush()

    def see(self, name: str, state: Tensor) -> None:
        """Take the last position (padding is on the left); beams repeat every row."""
        if self.armed and name not in self.fresh and self.prompts:
            beams = state.shape[0] // len(self.prompts)
            self.fresh[name] = state[:: max(beams, 1), -1]

    def flush(self) -> None:
        """Move the batch's states off the device."""
        for name, states in self.fresh.items():
            values = states.detach().to("cpu", torch.float32).numpy()
            for wanted, vector in zip(self.wanted, values, strict=True):
                wanted.vectors[name] = vector
        if self.fresh:
            self.results.update(zip(self.prompts, self.wanted, strict=True))
        self.fresh = {}


def unseen(missing: int, of: int) -> str:
    """The sentence for states that never came."""
    from importlib.metadata import version

    return (
        f"the states of {missing} of {of} requests were not seen: lm-eval {version('lm_eval')} runs this "
        "model in a way that this version does not know; use lm-eval 0.4.13, or the stock task"
    )
