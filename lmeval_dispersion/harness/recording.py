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
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmeval_dispersion.errors import HarnessError
from lmeval_dispersion.harness.query_tokens import query_tokens
from lmeval_dispersion.harness.records import Vectors
from lmeval_dispersion.harness.seams import shadowed
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
    """Common ground: hooks on the chosen layers, shadowed methods, states moved off the device late.

    A subclass names the methods of HFLM that it shadows, and has a method of the same name without leading
    underscore for each: called in its place, with the original first.
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
            # Hooks that come after a model was compiled are not seen: it runs as it was written.
            if hasattr(torch.compiler, "set_stance"):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            for site in self.sites:
                for handle in site.hook(self._taker(site.name)):
                    stack.callback(handle.remove)
            replacements = {name: getattr(self, name.lstrip("_")) for name in self.shadows}
            stack.enter_context(shadowed(self.lm, replacements))
            yield
        self.flush()

    def flush(self) -> None:
        """Move what is still on the device to the requests that want it."""

    def see(self, name: str, state: Tensor) -> None:
        """Take from a layer's state (b, t, d) what is wanted."""
        raise NotImplementedError

    def _taker(self, name: str) -> Any:
        return lambda state: self.see(name, state)


class TokenRecorder(Recorder):
    """Records requests that lm-eval scores through ``_loglikelihood_tokens``."""

    shadows: tuple[str, ...] = ("_loglikelihood_tokens", "_model_call", "_select_cont_toks")

    def __init__(self, lm: Any, layers: Sequence[str]) -> None:
        super().__init__(lm, layers)
        self.results: list[Wanted | None] = []
        self.by_tokens: dict[bytes, list[Wanted]] = {}
        self.rows: list[tuple[int, Wanted]] = []  # (row of the running batch, who wants it)
        self.input: Tensor | None = None
        self.row = 0
        self.sums: list[tuple[Wanted, Tensor]] = []

    def plan(self, index: int, context: list[int], continuation: list[int]) -> Wanted | None:
        """The state that request ``index`` (counted over the recorder's life) wants; None for nothing."""
        raise NotImplementedError

    def loglikelihood_tokens(self, original: Any, requests: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of HFLM's method: note the requests, then let it run."""
        self.by_tokens = {}
        longest = self.lm.max_length
        for _, context, continuation in requests:
            wanted = self.plan(len(self.results), context, continuation)
            self.results.append(wanted)
            if wanted is not None:
                tokens = (context + continuation)[-(longest + 1) :][:-1]
                self.by_tokens.setdefault(_key(np.array(tokens, dtype=np.int64)), []).append(wanted)
        answers = original(requests, *args, **kwargs)
        self.flush()
        return answers

    def model_call(self, original: Any, inps: Tensor, *args: Any, **kwargs: Any) -> Any:
        """In place of HFLM's method: find out whose rows these are, then let it run."""
        self.flush()
        self.input, self.row = inps, 0
        rows = inps.detach().cpu().numpy().astype(np.int64, copy=False)
        self.rows = [
            (i, wanted)
            for i, tokens in enumerate(rows)
            for wanted in self.by_tokens.get(_key(tokens), ())
            if wanted.position < len(tokens)
        ]
        return original(inps, *args, **kwargs)

    def see(self, name: str, state: Tensor) -> None:
        """Take the wanted positions of the wanted rows; prompt tuning shifts them by its virtual tokens."""
        if not self.rows or self.input is None:
            return
        shift = state.shape[1] - self.input.shape[1]
        rows = torch.tensor([row for row, _ in self.rows], device=state.device)
        positions = torch.tensor([w.position + shift for _, w in self.rows], device=state.device)
        self.fresh[name] = state[rows, positions]

    def select_cont_toks(self, original: Any, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        """In place of HFLM's method, which is called once a row with that row's log-probabilities (t, v).

        They are normalised already, so the query's own perplexity is a gather and costs no pass.
        """
        if self.input is not None and self.row < len(self.input):
            shift = logits.shape[0] - self.input.shape[1]
            for row, wanted in self.rows:
                start, stop = wanted.span
                if row == self.row and stop > start:
                    tokens = self.input[row, start:stop].to(logits.device)
                    scores = logits[start - 1 + shift : stop - 1 + shift].gather(1, tokens[:, None])
                    self.sums.append((wanted, scores.sum(dtype=torch.float64)))
        self.row += 1
        return original(logits, *args, **kwargs)

    def flush(self) -> None:
        """Move the last batch's states and sums off the device.

        Done when the next batch starts: by then lm-eval has waited for the device itself.
        """
        for name, states in self.fresh.items():
            values = states.detach().to("cpu", torch.float32).numpy()
            for (_, wanted), vector in zip(self.rows, values, strict=True):
                wanted.vectors[name] = vector
        if self.sums:
            for (wanted, _), value in zip(
                self.sums, torch.stack([s for _, s in self.sums]).tolist(), strict=True
            ):
                wanted.logprob = value
        self.fresh, self.sums, self.rows, self.input = {}, [], [], None

    def seen(self) -> list[Wanted | None]:
        """The results in the order of the requests; raises where a state was never seen."""
        wanted = [w for w in self.results if w is not None]
        missing = sum(len(w.vectors) < len({site.name for site in self.sites}) for w in wanted)
        if missing:
            raise HarnessError(unseen(missing, len(wanted)))
        return self.results


class ContextRecorder(TokenRecorder):
    """Records ``loglikelihood`` requests: the state of the last context token of those that ask for it."""

    def __init__(
        self, lm: Any, layers: Sequence[str], queries: Sequence[tuple[str, str | None] | None]
    ) -> None:
        super().__init__(lm, layers)
        self.queries = queries

    def plan(self, index: int, context: list[int], continuation: list[int]) -> Wanted | None:
        """The last context token, and the query's tokens for their perplexity."""
        query = self.queries[index] if index < len(self.queries) else None
        if query is None:
            return None
        total, longest = len(context) + len(continuation), self.lm.max_length
        dropped = max(0, total - (longest + 1))
        start, stop = query_tokens(self.lm, *query, context)
        return Wanted(
            position=total - dropped - 1 - len(continuation),
            span=(max(start - dropped, 1), max(stop - dropped, 1)),
            prompt_tokens=len(context),
            truncated=dropped > 0,
        )


class SegmentRecorder(TokenRecorder):
    """Records ``loglikelihood_rolling`` requests: the last state of every segment that the model sees."""

    shadows = (*TokenRecorder.shadows, "tok_encode")

    def __init__(self, lm: Any, layers: Sequence[str]) -> None:
        super().__init__(lm, layers)
        self.texts: list[list[int]] = []
        self.answers: list[float] = []
        self.lengths: list[int] = []

    def tok_encode(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of HFLM's method, which is called once a request here: note its tokens."""
        tokens = original(*args, **kwargs)
        self.texts.append(tokens)
        return tokens

    def plan(self, index: int, context: list[int], continuation: list[int]) -> Wanted | None:
        """The last input position: the state that predicts the segment's last token."""
        self.lengths.append(len(continuation))
        total, longest = len(context) + len(continuation), self.lm.max_length
        length = min(total, longest + 1) - 1
        return Wanted(length - 1, (0, 0), len(continuation), truncated=False)

    def loglikelihood_tokens(self, original: Any, requests: Any, *args: Any, **kwargs: Any) -> Any:
        """Also note the answers, which hold each segment's perplexity."""
        answers = super().loglikelihood_tokens(original, requests, *args, **kwargs)
        self.answers += [logprob for logprob, _ in answers]
        return answers

    def perplexity(self, index: int) -> float:
        """Perplexity of segment ``index``."""
        return math.exp(min(-self.answers[index] / self.lengths[index], 700.0))


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


class OneTokenRecorder(PrefillRecorder):
    """The same where generation itself is not wanted: it ends after one token, prompts are cut as usual."""

    def model_generate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of HFLM's method."""
        context = kwargs["context"] if "context" in kwargs else args[0]
        return super().model_generate(original, *args, **{**kwargs, "max_length": context.shape[1] + 1})


def unseen(missing: int, of: int) -> str:
    """The sentence for states that never came."""
    return (
        f"the states of {missing} of {of} requests were not seen: lm-eval {version('lm_eval')} runs this "
        "model in a way that this version does not know; use lm-eval 0.4.13, or the stock task"
    )


def _key(tokens: Any) -> bytes:
    """Tokens without trailing zeros, lm-eval's padding; a real trailing 0 is the same input there."""
    used = np.flatnonzero(tokens)
    return bytes(tokens[: used[-1] + 1 if used.size else 0].tobytes())
