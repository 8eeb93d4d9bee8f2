"""What a model is given for each request, as lm-eval's own code tokenises and cuts it, without running it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lm_eval.utils import get_rolling_token_windows
from torch import Tensor

from lmeval_dispersion.harness.recording import ContextRecorder, PrefillRecorder, SegmentRecorder, Wanted


@dataclass(frozen=True)
class Inputs:
    """The inputs of one request.

    Attributes:
        wanted: The states that it wants: one, or one a segment of a whole text.
        tokens: For each of them the tokens up to its position: their last state is the wanted one.
    """

    wanted: list[Wanted]
    tokens: list[list[int]]


def model_inputs(lm: Any, requests: Sequence[Any]) -> list[Inputs]:
    """The inputs of requests of one type, in their order. ``lm`` is lm-eval's HFLM; it does not run."""
    kind = requests[0].request_type
    if kind.endswith("generate_until"):
        prompts = _PromptInputs(lm, [])
        with prompts.running():
            lm.generate_until(requests, disable_tqdm=True)
        return [Inputs([prompts.results[r.args[0]]], [prompts.tokens[r.args[0]]]) for r in requests]
    if kind.endswith("loglikelihood_rolling"):
        segments = _SegmentInputs(lm, [])
        with segments.running():
            lm.loglikelihood_rolling(requests, disable_tqdm=True)
        found, start = [], 0
        for tokens in segments.texts:
            windows = get_rolling_token_windows(
                token_list=tokens, prefix_token=lm.prefix_token_id, max_seq_len=lm.max_length, context_len=1
            )
            stop = start + sum(1 for _ in windows)
            wanted = [w for w in segments.results[start:stop] if w is not None]
            found.append(Inputs(wanted, segments.tokens[start:stop]))
            start = stop
        return found
    contexts = _ContextInputs(lm, [], [(r.args[0], getattr(r, "query", None)) for r in requests])
    with contexts.running():
        lm.loglikelihood(requests, disable_tqdm=True)
    return [
        Inputs([wanted], [tokens])
        for wanted, tokens in zip(contexts.results, contexts.tokens, strict=True)
        if wanted is not None
    ]


def _not_run(recorder: Any, requests: Any) -> list[tuple[float, bool]]:
    """In place of scoring: the tokens up to each wanted position are kept, and nothing is computed."""
    longest = recorder.lm.max_length
    for _, context, continuation in requests:
        wanted = recorder.plan(len(recorder.results), context, continuation)
        recorder.results.append(wanted)
        tokens = (context + continuation)[-(longest + 1) :][:-1]
        recorder.tokens.append(tokens[: wanted.position + 1])
    return [(math.nan, False)] * len(requests)


class _ContextInputs(ContextRecorder):
    shadows = ("_loglikelihood_tokens",)

    def __init__(self, lm: Any, layers: Sequence[str], queries: Sequence[Any]) -> None:
        super().__init__(lm, layers, queries)
        self.tokens: list[list[int]] = []

    def loglikelihood_tokens(self, original: Any, requests: Any, *args: Any, **kwargs: Any) -> Any:
        return _not_run(self, requests)


class _SegmentInputs(SegmentRecorder):
    shadows = ("_loglikelihood_tokens", "tok_encode")

    def __init__(self, lm: Any, layers: Sequence[str]) -> None:
        super().__init__(lm, layers)
        self.tokens: list[list[int]] = []

    def loglikelihood_tokens(self, original: Any, requests: Any, *args: Any, **kwargs: Any) -> Any:
        return _not_run(self, requests)


class _PromptInputs(PrefillRecorder):
    def __init__(self, lm: Any, layers: Sequence[str]) -> None:
        super().__init__(lm, layers)
        self.mask: Tensor | None = None
        self.tokens: dict[str, list[int]] = {}

    def tok_batch_encode(self, original: Any, strings: Any, *args: Any, **kwargs: Any) -> Any:
        ids, mask = super().tok_batch_encode(original, strings, *args, **kwargs)
        for prompt, row, kept in zip(self.prompts, ids, mask.bool(), strict=True):
            self.tokens[prompt] = row[kept].tolist()
        return ids, mask

    def model_generate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        context = kwargs["context"] if "context" in kwargs else args[0]
        self.results.update(zip(self.prompts, self.wanted, strict=True))
        return torch.cat([context, context[:, -1:]], dim=1)
