"""Request types that bring states back, as methods of lm-eval's models beside its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lm_eval.models.huggingface import HFLM

from lmeval_dispersion.errors import HarnessError
from lmeval_dispersion.harness.recording import (
    ContextRecorder,
    OneTokenRecorder,
    PrefillRecorder,
    Recorder,
    SegmentRecorder,
)
from lmeval_dispersion.harness.records import Prompt
from lmeval_dispersion.harness.seams import add_request_types, pool_groups
from lmeval_dispersion.model.capture import resolve

MakesRecorder = Callable[[Any, Sequence[str], Sequence[Any]], Recorder]

RECORDERS: dict[str, MakesRecorder] = {
    "loglikelihood": ContextRecorder,
    "loglikelihood_rolling": SegmentRecorder,
    "generate_until": PrefillRecorder,
}
# The same where of every generation its first token is enough.
PREFILL: dict[str, MakesRecorder] = {**RECORDERS, "generate_until": OneTokenRecorder}

# lm-eval's request type -> ours. Request caches hold these names: they stay.
REQUEST_TYPES = {kind: f"dispersion_{kind}" for kind in RECORDERS}

# Recording stands on these.
_NEEDED = (
    *RECORDERS,
    "tok_encode",
    "tok_batch_encode",
    "_loglikelihood_tokens",
    "_model_call",
    "_model_generate",
    "_select_cont_toks",
)


def install() -> None:
    """Add the request types to lm-eval's model. Raises HarnessError if this lm-eval lacks what they need."""
    add_request_types({REQUEST_TYPES[kind]: _method(kind) for kind in RECORDERS}, _NEEDED)
    pool_groups()


def check_model(lm: Any, tasks: str) -> None:
    """Raise HarnessError with the next step if ``lm`` cannot give hidden states."""
    if not isinstance(lm, HFLM):
        kind = type(lm).__name__
        raise HarnessError(
            f"{tasks} needs hidden states, which {kind} does not give; use --model hf, or run the stock task"
        )
    if lm.backend != "causal":
        raise HarnessError(
            f"{tasks} needs a decoder-only model, got an encoder-decoder; run the stock task for it"
        )


def prefilled(
    lm: Any, kind: str, prompts: Sequence[Prompt], recorders: Mapping[str, MakesRecorder] = PREFILL
) -> None:
    """Run prompts for their states, and for answers where transformers runs; they hold both then."""
    answers = _recorded(lm, kind, prompts, recorders[kind])
    for prompt, answer in zip(prompts, answers, strict=True):
        if recorders is PREFILL:
            prompt.answer = answer[0] if isinstance(answer, tuple) else answer


def _method(kind: str) -> Callable[..., list[Any]]:
    """The method of lm-eval's model for our request type: as its own for ``kind``, with states."""

    def run(self: Any, requests: Sequence[Any], **options: Any) -> list[Any]:
        return _recorded(self, kind, requests, RECORDERS[kind], **options)

    return run


def _recorded(
    lm: Any, kind: str, requests: Sequence[Any], recorder_of: MakesRecorder, **options: Any
) -> list[Any]:
    """lm-eval's answers to requests; the states are left on the requests as ``dispersion_state``."""
    name = str(requests[0].task_name)
    check_model(lm, name)
    if any(len(request.args) > 2 for request in requests):  # lm-eval sends images past what is recorded here
        raise HarnessError(
            f"{name} has images in its prompts, whose states cannot be kept; run the stock task, or one of "
            "texts alone"
        )
    canonical = {
        layers: tuple(dict.fromkeys(site.name for site in resolve(lm.model, layers)))
        for layers in {request.dispersion_layers for request in requests}
    }
    for request in requests:
        request.dispersion_layers = canonical.get(request.dispersion_layers, request.dispersion_layers)
    recorder = recorder_of(lm, list(dict.fromkeys(sum(canonical.values(), ()))), requests)
    with recorder.running():
        answers: list[Any] = getattr(lm, kind)(requests, **options)
    for request, state in zip(requests, recorder.states(), strict=True):
        request.dispersion_state = state
    return answers
