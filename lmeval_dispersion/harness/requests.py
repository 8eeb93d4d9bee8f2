"""Request types that bring states back, as methods of lm-eval's models beside its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows, hash_string

from lmeval_dispersion.errors import HarnessError
from lmeval_dispersion.harness.recording import (
    ContextRecorder,
    OneTokenRecorder,
    PrefillRecorder,
    SegmentRecorder,
    Wanted,
    unseen,
)
from lmeval_dispersion.harness.records import DocState
from lmeval_dispersion.harness.seams import add_request_types, with_state

# lm-eval's request type -> ours. Request caches hold these names: they stay.
REQUEST_TYPES = {
    "loglikelihood": "dispersion_loglikelihood",
    "loglikelihood_rolling": "dispersion_loglikelihood_rolling",
    "generate_until": "dispersion_generate_until",
}

# Recording stands on these.
_NEEDED = (
    "loglikelihood",
    "loglikelihood_rolling",
    "generate_until",
    "tok_encode",
    "tok_batch_encode",
    "_loglikelihood_tokens",
    "_model_call",
    "_model_generate",
    "_select_cont_toks",
)


def install() -> None:
    """Add the request types to lm-eval's models. Raises HarnessError if this lm-eval lacks what they need."""
    add_request_types(_METHODS, _refusal, _NEEDED)


def check_model(lm: Any, tasks: str) -> None:
    """Raise HarnessError with the next step if ``lm`` cannot give hidden states."""
    inner = getattr(lm, "lm", lm)  # --use_cache wraps the model
    kind = type(inner).__name__
    if not isinstance(inner, HFLM):
        raise HarnessError(
            f"{tasks} needs hidden states, which {kind} does not give; use --model hf, or run the stock task"
        )
    if inner.backend != "causal":
        raise HarnessError(
            f"{tasks} needs a decoder-only model, got an encoder-decoder; run the stock task for it"
        )


def _refusal(self: Any, requests: Sequence[Any], **_: Any) -> Any:
    check_model(self, str(getattr(requests[0], "task_name", None) or "this task"))
    raise HarnessError(f"{type(self).__name__} cannot run dispersion tasks; use --model hf")


def _loglikelihood(self: Any, requests: Sequence[Any], **options: Any) -> list[Any]:
    check_model(self, str(requests[0].task_name))
    _check_texts(requests)
    queries = [(r.args[0], getattr(r, "query", None)) if r.idx == 0 else None for r in requests]
    recorder = ContextRecorder(self, _layers_of(requests), queries)
    with recorder.running():
        answers = self.loglikelihood(requests, **options)
    seen = recorder.seen()
    _same_number(seen, requests)
    return [
        answer if wanted is None else with_state(answer, state_for(request, [wanted]))
        for answer, wanted, request in zip(answers, seen, requests, strict=True)
    ]


def _loglikelihood_rolling(self: Any, requests: Sequence[Any], **options: Any) -> list[Any]:
    check_model(self, str(requests[0].task_name))
    recorder = SegmentRecorder(self, _layers_of(requests))
    with recorder.running():
        answers = self.loglikelihood_rolling(requests, **options)
    seen = recorder.seen()
    _same_number(recorder.texts, requests)
    carried = []
    bounds = segment_bounds(self, recorder.texts)
    for answer, request, (start, stop) in zip(answers, requests, bounds, strict=True):
        wanted = [w for w in seen[start:stop] if w is not None]
        state = state_for(request, wanted)
        state.perplexity = [recorder.perplexity(i) for i in range(start, stop)]
        carried.append(with_state(answer, state))
    return carried


def segment_bounds(lm: Any, texts: Sequence[list[int]]) -> list[tuple[int, int]]:
    """Of each text, given as tokens: its segments' places [start, stop) among the segments of all texts."""
    bounds, start = [], 0
    for tokens in texts:
        windows = get_rolling_token_windows(
            token_list=tokens, prefix_token=lm.prefix_token_id, max_seq_len=lm.max_length, context_len=1
        )
        stop = start + sum(1 for _ in windows)
        bounds.append((start, stop))
        start = stop
    return bounds


def _generate_until(self: Any, requests: Sequence[Any], **options: Any) -> list[Any]:
    check_model(self, str(requests[0].task_name))
    return _generated(self, requests, PrefillRecorder(self, _layers_of(requests)), **options)


def prefilled(lm: Any, requests: Sequence[Any]) -> list[Any]:
    """Answers with states as the request types give them, but of every generation its first token only."""
    if requests[0].request_type == REQUEST_TYPES["generate_until"]:
        return _generated(lm, requests, OneTokenRecorder(lm, _layers_of(requests)))
    answers: list[Any] = getattr(lm, requests[0].request_type)(requests)
    return answers


def _generated(self: Any, requests: Sequence[Any], recorder: PrefillRecorder, **options: Any) -> list[Any]:
    _check_texts(requests)
    with recorder.running():
        answers = self.generate_until(requests, **options)
    missing = sum(request.args[0] not in recorder.results for request in requests)
    if missing:
        raise HarnessError(unseen(missing, len(requests)))
    return [
        with_state(answer, state_for(request, [recorder.results[request.args[0]]]))
        for answer, request in zip(answers, requests, strict=True)
    ]


_METHODS = {
    "dispersion_loglikelihood": _loglikelihood,
    "dispersion_loglikelihood_rolling": _loglikelihood_rolling,
    "dispersion_generate_until": _generate_until,
}


def _check_texts(requests: Sequence[Any]) -> None:
    """Raise HarnessError where prompts hold images: lm-eval sends those past what is recorded here."""
    if any(len(request.args) > 2 for request in requests):
        name = str(getattr(requests[0], "task_name", None) or "this task")
        raise HarnessError(
            f"{name} has images in its prompts, whose states cannot be kept; run the stock task, or one of "
            "texts alone"
        )


def _layers_of(requests: Sequence[Any]) -> list[str]:
    """Layers that any of the requests asks for, each once."""
    names = [name for request in requests for name in getattr(request, "dispersion_layers", ("last",))]
    return list(dict.fromkeys(names))


def state_for(request: Any, wanted: Sequence[Wanted]) -> DocState:
    """The state of one request, from all that was seen for it."""
    return DocState(
        doc_id=request.doc_id,
        vectors={name: np.stack([w.vectors[name] for w in wanted]) for name in wanted[0].vectors}
        if wanted
        else {},
        prompt_tokens=[w.prompt_tokens for w in wanted],
        truncated=[w.truncated for w in wanted],
        perplexity=[w.perplexity for w in wanted],
        prompt_hash=hash_string(request.args[0]),
        query=getattr(request, "query", None),
    )


def _same_number(seen: Sequence[Any], requests: Sequence[Any]) -> None:
    if len(seen) != len(requests):
        raise HarnessError(unseen(abs(len(requests) - len(seen)), len(requests)))
