"""Recorders of requests that lm-eval scores through ``_loglikelihood_tokens``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmeval_dispersion.errors import HarnessError
from lmeval_dispersion.harness.recorders import Recorder, Wanted, unseen


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
        """What request ``index`` (counted over the recorder's life) wants; None for nothing."""
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
    """Records ``loglikelihood`` requests: the state of the last context token of those that ask for it.

    Args:
        lm: lm-eval's model.
        layers: Names of the layers.
        queries: For each request None where no state is wanted, else (prompt, query) with query None where
            the task renders none.
    """

    def __init__(
        self, lm: Any, layers: Sequence[str], queries: Sequence[tuple[str, str | None] | None]
    ) -> None:
        super().__init__(lm, layers)
        self.queries = queries
        self.lengths: dict[str, int] = {"": 0}

    def plan(self, index: int, context: list[int], continuation: list[int]) -> Wanted | None:
        """The last context token, and the query's tokens for their perplexity."""
        query = self.queries[index] if index < len(self.queries) else None
        if query is None:
            return None
        total, longest = len(context) + len(continuation), self.lm.max_length
        dropped = max(0, total - (longest + 1))
        start, stop = self.span(*query, len(context))
        return Wanted(
            position=total - dropped - 1 - len(continuation),
            span=(max(start - dropped, 1), max(stop - dropped, 1)),
            prompt_tokens=len(context),
            truncated=dropped > 0,
        )

    def span(self, prompt: str, query: str | None, tokens: int) -> tuple[int, int]:
        """Where the query's tokens are in the prompt's; all of it where the query is not found."""
        at = prompt.rfind(query) if query else -1
        if query is None or at < 0:
            return 0, tokens
        start = self.length(prompt[:at])
        end = at + len(query)
        rest = prompt[end:].strip()
        stop = self.length(prompt[:end]) if rest else tokens
        return start, min(stop, tokens)

    def length(self, text: str) -> int:
        """Tokens of ``text``; few-shot prefixes come again and again, so they are remembered."""
        if text not in self.lengths:
            if len(self.lengths) > 1000:
                self.lengths = {"": 0}
            self.lengths[text] = len(self.lm.tok_encode(text))
        return self.lengths[text]


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


def _key(tokens: Any) -> bytes:
    """Tokens without trailing zeros, lm-eval's padding; a real trailing 0 is the same input there."""
    used = np.flatnonzero(tokens)
    return bytes(tokens[: used[-1] + 1 if used.size else 0].tobytes())
