"""Recording hidden states during lm-eval's own requests, without extra forward passes.

The answers do not change. For each request type of lm-eval, its model gets a method for a request
type of ours: it runs the same requests under a recorder, which leaves a :class:`DocState` on each.

A recorder hooks the model and, while a request method runs, replaces methods of one HFLM object. Rows
of a batch are matched to requests by their tokens: sorting, padding, grouping and batch size do not
matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows
from torch import Tensor

from lmeval_dispersion.errors import HarnessError
from lmeval_dispersion.harness.install import task_names
from lmeval_dispersion.harness.records import DocState, Prompt, Vectors
from lmeval_dispersion.harness.seams import (
    RunningEvaluation,
    add_request_types,
    compile_templates_once,
    one_sentence,
    pool_groups,
    shadowed,
)
from lmeval_dispersion.model.capture import resolve


@dataclass
class Wanted:
    """A hidden state to record for a request, and what has been recorded of it.

    Attributes:
        position: Position of the token in the input, from 0; -1 for the last token.
        span: Tokens [start, stop) of the input whose perplexity is recorded; an empty range if none
            is recorded.
        prompt_tokens: Number of tokens of the context, before truncation; for a segment of a text,
            the number of its tokens.
        truncated: Whether the input was cut on the left.
        vectors: For each layer, the recorded state, shape (d,), float32; empty before the
            forward pass.
        perplexity: Perplexity of the span, or of the segment; NaN before the forward pass, or if
            there is no span.
    """

    position: int
    span: tuple[int, int]
    prompt_tokens: int
    truncated: bool
    vectors: dict[str, Vectors] = field(default_factory=dict)
    perplexity: float = math.nan


class Recorder:
    """Base class of recorders, which keep hidden states while lm-eval's model answers requests.

    A recorder hooks the chosen layers and replaces methods of the model. A subclass lists these
    HFLM methods in ``shadows``. For each of them it defines a method of the same name, without the
    leading underscore, which is called instead, with the original method as its first argument.

    Args:
        lm: lm-eval's transformers model (HFLM).
        layers: Names of the layers to record.
        requests: The requests, with lm-eval's ``args`` (the prompt first) and ``idx``, and our
            ``query`` and ``dispersion_layers``.
    """

    shadows: tuple[str, ...] = ()

    def __init__(self, lm: Any, layers: Sequence[str], requests: Sequence[Any]) -> None:
        self.lm, self.requests = lm, requests
        self.sites = resolve(lm.model, layers)
        self.fresh: dict[str, Tensor] = {}  # this forward pass's states, on the device

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record inside this context; hooks are removed and methods restored even after an error."""
        with ExitStack() as stack:
            # A compiled model does not see later hooks: it runs uncompiled.
            if hasattr(torch.compiler, "set_stance"):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            for site in self.sites:
                for handle in site.hook(partial(self.see, site.name)):
                    stack.callback(handle.remove)
            replacements = {name: getattr(self, name.lstrip("_")) for name in self.shadows}
            stack.enter_context(shadowed(self.lm, replacements))
            yield
        self.flush()

    def see(self, name: str, state: Tensor) -> None:
        """Pick the states to record from a layer's output; a hook calls this in each forward pass.

        Args:
            name: Name of the layer.
            state: Output of the layer, shape (batch, tokens, d).
        """
        raise NotImplementedError

    def wanted(self) -> list[list[Wanted]]:
        """Return for each request the list of states to record; the list may be empty."""
        raise NotImplementedError

    def flush(self) -> None:
        """Copy the recorded states from the device to their requests."""

    def states(self) -> list[DocState | None]:
        """Return what was recorded, as one `DocState` for each request.

        It is None for the later requests of a document, whose state comes from the first request.

        Raises:
            HarnessError: A state was not captured, because lm-eval runs the model in an
                unsupported way.
        """
        of_requests = self.wanted()
        flat = [wanted for of_request in of_requests for wanted in of_request]
        missing = sum(len(wanted.vectors) < len(self.sites) for wanted in flat)
        missing += abs(len(of_requests) - len(self.requests))
        if missing:
            raise HarnessError(
                f"{missing} of {len(flat)} hidden states were not captured, because lm-eval "
                f"{version('lm_eval')} runs this model in an unsupported way; if this lm-eval is "
                "newer than 0.4.13, install lm-eval 0.4.13, otherwise run the stock task"
            )
        return [_state(request, w) for request, w in zip(self.requests, of_requests, strict=True)]


class TokenRecorder(Recorder):
    """Base class of recorders for requests that lm-eval scores in ``_loglikelihood_tokens``."""

    shadows: tuple[str, ...] = ("_loglikelihood_tokens", "_model_call", "_select_cont_toks")

    def __init__(self, lm: Any, layers: Sequence[str], requests: Sequence[Any]) -> None:
        super().__init__(lm, layers, requests)
        self.planned: list[Wanted | None] = []
        self.by_tokens: dict[bytes, list[Wanted]] = {}
        self.rows: list[tuple[int, Wanted]] = []  # (row of the running batch, its request)
        self.input: Tensor | None = None
        self.row = 0
        self.sums: list[tuple[Wanted, Tensor]] = []

    def plan(self, context: list[int], continuation: list[int]) -> Wanted | None:
        """Return the state to record for a request with these token ids; None to record none."""
        raise NotImplementedError

    def loglikelihood_tokens(self, original: Any, requests: Any, *args: Any, **kwargs: Any) -> Any:
        """Plan which states to record, then call HFLM's ``_loglikelihood_tokens``."""
        self.by_tokens = {}
        for _, context, continuation in requests:
            wanted = self.plan(context, continuation)
            self.planned.append(wanted)
            if wanted is not None:
                tokens = (context + continuation)[-(self.lm.max_length + 1) :][:-1]
                self.by_tokens.setdefault(_key(np.array(tokens, dtype=np.int64)), []).append(wanted)
        answers = original(requests, *args, **kwargs)
        self.flush()
        return answers

    def model_call(self, original: Any, inps: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Match the rows of a batch to requests, then call HFLM's ``_model_call``.

        ``inps`` has the token ids, shape (batch, tokens).
        """
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
        """Pick the states at the planned positions of the requests' rows; see `Recorder.see`.

        Positions are shifted by the number of virtual tokens that prompt tuning adds.
        """
        if not self.rows or self.input is None:
            return
        shift = state.shape[1] - self.input.shape[1]
        rows = torch.tensor([row for row, _ in self.rows], device=state.device)
        positions = torch.tensor([w.position + shift for _, w in self.rows], device=state.device)
        self.fresh[name] = state[rows, positions]

    def select_cont_toks(self, original: Any, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Sum a question's log-probabilities, then call HFLM's ``_select_cont_toks``.

        lm-eval calls this method once for each row of a batch. ``logits`` has the log-probabilities
        of that row, shape (tokens, vocabulary).
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
        """Copy the latest batch's states from the device to their requests.

        The requests also get the perplexities of their questions.
        """
        # lm-eval has synchronised the device by now.
        _keep(self.fresh, [wanted for _, wanted in self.rows])
        if self.sums:
            sums = torch.stack([s for _, s in self.sums]).tolist()
            for (wanted, _), logprob in zip(self.sums, sums, strict=True):
                wanted.perplexity = _perplexity(logprob, wanted.span[1] - wanted.span[0])
        self.fresh, self.sums, self.rows, self.input = {}, [], [], None


class ContextRecorder(TokenRecorder):
    """Recorder for ``loglikelihood``: the state of the last context token of each document.

    The first request of a document gives the state.
    """

    def plan(self, context: list[int], continuation: list[int]) -> Wanted | None:
        """Plan to record the last context token's state and the perplexity of the question.

        Return None for all requests of a document but the first.
        """
        request = (
            self.requests[len(self.planned)] if len(self.planned) < len(self.requests) else None
        )
        if request is None or request.idx != 0:
            return None
        total, longest = len(context) + len(continuation), self.lm.max_length
        dropped = max(0, total - (longest + 1))
        start, stop = query_tokens(self.lm.tokenizer, request.args[0], request.query, context)
        return Wanted(
            position=total - dropped - 1 - len(continuation),
            span=(max(start - dropped, 1), max(stop - dropped, 1)),
            prompt_tokens=len(context),
            truncated=dropped > 0,
        )

    def wanted(self) -> list[list[Wanted]]:
        """Return for each request the list of states to record.

        The list has one state for the first request of a document, and none for its later requests.
        """
        return [[] if wanted is None else [wanted] for wanted in self.planned]


class SegmentRecorder(TokenRecorder):
    """Recorder for ``loglikelihood_rolling``: the last state of each segment of a text.

    Segments are the pieces into which lm-eval cuts a long text before it passes them to the model.
    """

    shadows = (*TokenRecorder.shadows, "tok_encode")

    def __init__(self, lm: Any, layers: Sequence[str], requests: Sequence[Any]) -> None:
        super().__init__(lm, layers, requests)
        self.texts: list[list[int]] = []

    def tok_encode(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Call HFLM's ``tok_encode``, and keep the token ids that it returns.

        lm-eval calls this method once for each request.
        """
        tokens = original(*args, **kwargs)
        self.texts.append(tokens)
        return tokens

    def plan(self, context: list[int], continuation: list[int]) -> Wanted | None:
        """Plan to record the state at the last input position, which predicts the last token."""
        length = min(len(context) + len(continuation), self.lm.max_length + 1) - 1
        return Wanted(length - 1, (0, 0), len(continuation), truncated=False)

    def loglikelihood_tokens(self, original: Any, requests: Any, *args: Any, **kwargs: Any) -> Any:
        """Call HFLM's ``_loglikelihood_tokens``, and compute each segment's perplexity."""
        answers = super().loglikelihood_tokens(original, requests, *args, **kwargs)
        for wanted, (logprob, _) in zip(self.planned[-len(answers) :], answers, strict=True):
            if wanted is not None:
                wanted.perplexity = _perplexity(logprob, wanted.prompt_tokens)
        return answers

    def wanted(self) -> list[list[Wanted]]:
        """Return for each text the list of its segments' states, in order.

        The list of an empty text is empty.
        """
        segments = iter(self.planned)
        of_texts = []
        for tokens in self.texts:
            windows = get_rolling_token_windows(
                tokens, self.lm.prefix_token_id, max_seq_len=self.lm.max_length, context_len=1
            )
            of_texts.append(
                [wanted for _, wanted in zip(windows, segments, strict=False) if wanted]
            )
        return of_texts


class PrefillRecorder(Recorder):
    """Recorder for ``generate_until``: the state of the prompt's last token, before generation."""

    shadows = ("tok_batch_encode", "_model_generate")

    def __init__(self, lm: Any, layers: Sequence[str], requests: Sequence[Any]) -> None:
        super().__init__(lm, layers, requests)
        self.batch: list[Wanted] = []
        self.armed = False
        self.of_prompt: dict[str, Wanted] = {}

    def tok_batch_encode(self, original: Any, strings: Any, *args: Any, **kwargs: Any) -> Any:
        """Call HFLM's ``tok_batch_encode``, and count the tokens of the batch's prompts."""
        ids, mask = original(strings, *args, **kwargs)
        limit = kwargs.get("left_truncate_len")
        self.batch = []
        for prompt, count in zip(strings, mask.sum(dim=1).tolist(), strict=True):
            # The batch is cut as a whole: only a row that fills it can have lost tokens.
            full = limit is not None and count >= limit
            tokens = len(self.lm.tok_encode(prompt)) if full else count
            self.batch.append(Wanted(-1, (0, 0), tokens, truncated=tokens > count))
        self.of_prompt.update(zip(strings, self.batch, strict=True))
        return ids, mask

    def model_generate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Call HFLM's ``_model_generate``, and record its first forward pass.

        The first pass reads the prompt; later passes generate.
        """
        self.armed, self.fresh = True, {}
        try:
            return original(*args, **kwargs)
        finally:
            self.armed = False
            self.flush()

    def see(self, name: str, state: Tensor) -> None:
        """Pick the states at the last position, as padding is on the left; see `Recorder.see`.

        With beam search, each prompt has several equal rows, of which the first is used.
        """
        if self.armed and name not in self.fresh and self.batch:
            beams = state.shape[0] // len(self.batch)
            self.fresh[name] = state[:: max(beams, 1), -1]

    def flush(self) -> None:
        """Copy the batch's states from the device to their prompts."""
        _keep(self.fresh, self.batch)
        self.fresh = {}

    def wanted(self) -> list[list[Wanted]]:
        """Return for each request a list with one `Wanted`.

        It has no vectors if the request's prompt was not run.
        """
        prompts = [request.args[0] for request in self.requests]
        return [[self.of_prompt.get(prompt, Wanted(-1, (0, 0), 0, False))] for prompt in prompts]


class OneTokenRecorder(PrefillRecorder):
    """Recorder for ``generate_until`` that stops every generation after one token.

    Prompts are truncated as in a full run.
    """

    def model_generate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Call HFLM's ``_model_generate``, so that it generates one token."""
        context = kwargs["context"] if "context" in kwargs else args[0]
        return super().model_generate(
            original, *args, **{**kwargs, "max_length": context.shape[1] + 1}
        )


RECORDERS: dict[str, type[Recorder]] = {
    "loglikelihood": ContextRecorder,
    "loglikelihood_rolling": SegmentRecorder,
    "generate_until": PrefillRecorder,
}
# Recorders where each generation's first token is enough.
PREFILL = {**RECORDERS, "generate_until": OneTokenRecorder}

# lm-eval's request type -> ours. Request caches hold these names: they stay.
REQUEST_TYPES = {kind: f"dispersion_{kind}" for kind in RECORDERS}


def prepare_lm_eval() -> None:
    """Add our request types to lm-eval's model, and let its groups pool dispersion over documents.

    Raises:
        HarnessError: This version of lm-eval lacks a method that is needed.
    """
    needed = [*RECORDERS, *(name for recorder in RECORDERS.values() for name in recorder.shadows)]
    add_request_types({REQUEST_TYPES[kind]: _method(kind) for kind in RECORDERS}, needed)
    pool_groups()
    compile_templates_once()


def check_model(lm: Any, tasks: str) -> None:
    """Check that a model of lm-eval gives hidden states.

    Args:
        lm: The model, or its class.
        tasks: What needs the states, such as a task's name, as the subject of a message.

    Raises:
        HarnessError: The model is not lm-eval's transformers model, or is not decoder-only.
    """
    kind = lm if isinstance(lm, type) else type(lm)
    if not issubclass(kind, HFLM):
        raise HarnessError(
            f"{tasks} needs hidden states, which {kind.__name__} does not give; use the model hf, or "
            "run the stock task with log_samples and then `dispersion embed MODEL --from-samples RESULTS`"
        )
    if getattr(lm, "backend", "causal") != "causal":
        raise HarnessError(
            f"{tasks} needs a decoder-only model, got an encoder-decoder; choose another model, or "
            "run the stock task"
        )


def check_choice(lm: Any, evaluation: RunningEvaluation) -> None:
    """Check that a model suits the dispersion tasks and the chat template that were asked for.

    Args:
        lm: lm-eval's model, or its class.
        evaluation: The running evaluation, which says what was asked for.

    Raises:
        HarnessError: A dispersion task needs hidden states, which the model does not give; or a
            chat template was asked for, and the tokenizer has none.
    """
    ours = {*task_names()} & {task for task in evaluation.tasks or () if isinstance(task, str)}
    if ours and not evaluation.predict_only:
        check_model(lm, min(ours))
    tokenizer = getattr(lm, "tokenizer", None)
    if (
        evaluation.apply_chat_template is True
        and tokenizer is not None
        and not tokenizer.chat_template
    ):
        raise HarnessError(
            "the model's tokenizer has no chat template; leave apply_chat_template out, or use a model "
            "whose tokenizer has one"
        )


def prefill(lm: Any, kind: str, prompts: Sequence[Prompt]) -> None:
    """Run prompts, and set each prompt's ``dispersion_state`` and ``answer``.

    Args:
        lm: lm-eval's transformers model.
        kind: lm-eval's request type, such as ``loglikelihood``.
        prompts: The prompts to run. For ``generate_until``, one token is generated after each.

    Raises:
        HarnessError: The model gives no hidden states, or a prompt has images.
    """
    for prompt, answer in zip(prompts, _recorded(lm, kind, prompts, PREFILL[kind]), strict=True):
        prompt.answer = answer[0] if isinstance(answer, tuple) else answer


def _method(kind: str) -> Callable[..., list[Any]]:
    """A method for lm-eval's model that answers like its own for ``kind``, and records."""

    def run(self: Any, requests: Sequence[Any], **options: Any) -> list[Any]:
        with one_sentence():
            return _recorded(self, kind, requests, RECORDERS[kind], **options)

    return run


def _recorded(
    lm: Any, kind: str, requests: Sequence[Any], recorder_of: type[Recorder], **options: Any
) -> list[Any]:
    """lm-eval's answers to requests; the states are left on the requests as ``dispersion_state``."""
    name = str(requests[0].task_name)
    check_model(lm, name)
    if any(len(request.args) > 2 for request in requests):  # images bypass the recorded methods
        raise HarnessError(
            f"{name} has images in its prompts, whose states cannot be recorded; run the stock "
            "task, or a text-only task"
        )
    canonical = {
        layers: tuple(dict.fromkeys(site.name for site in resolve(lm.model, layers)))
        for layers in {request.dispersion_layers for request in requests}
    }
    for request in requests:
        request.dispersion_layers = canonical.get(
            request.dispersion_layers, request.dispersion_layers
        )
    recorder = recorder_of(lm, list(dict.fromkeys(sum(canonical.values(), ()))), requests)
    with recorder.running():
        answers: list[Any] = getattr(lm, kind)(requests, **options)
    for request, state in zip(requests, recorder.states(), strict=True):
        request.dispersion_state = state
    return answers


def query_tokens(
    tokenizer: Any, prompt: str, query: str | None, context: Sequence[int]
) -> tuple[int, int]:
    """Return the range [start, stop) of the tokens in a context that contain the question.

    White space at the ends of the question is ignored. If the question is unknown or not in the
    prompt, the range is the whole context. If the tokenizer gives no character offsets (a slow
    tokenizer), or splits the prompt into other tokens than ``context``, the range is empty.

    Args:
        tokenizer: Tokenizer of the model.
        prompt: The prompt, as text.
        query: The question as the task renders it; None if unknown.
        context: The token ids of the prompt.
    """
    core = (query or "").strip()
    at = prompt.rfind(core) if core else -1
    if at < 0:
        return 0, len(context)
    if not getattr(tokenizer, "is_fast", False):
        return 0, 0
    # With or without special tokens, as lm-eval chose for this prompt.
    for special in (True, False):
        encoded = tokenizer(
            prompt.rstrip(), add_special_tokens=special, return_offsets_mapping=True
        )
        if encoded["input_ids"] == list(context):
            spans = encoded["offset_mapping"]
            held = [
                i for i, (start, stop) in enumerate(spans) if start < at + len(core) and stop > at
            ]
            return (held[0], held[-1] + 1) if held else (0, 0)
    return 0, 0


def _state(request: Any, wanted: Sequence[Wanted]) -> DocState | None:
    """The state of one request, from all captured values; layers in the order of the request."""
    if not wanted and request.idx != 0:
        return None
    layers = request.dispersion_layers
    return DocState(
        vectors={name: np.stack([w.vectors[name] for w in wanted]) for name in layers}
        if wanted
        else {},
        prompt_tokens=[w.prompt_tokens for w in wanted],
        truncated=[w.truncated for w in wanted],
        perplexity=[w.perplexity for w in wanted],
    )


def _keep(fresh: dict[str, Tensor], wanted: Sequence[Wanted]) -> None:
    """Move a batch's states off the device, to their requests."""
    for name, states in fresh.items():
        values = states.detach().to("cpu", torch.float32).numpy()
        for row, vector in zip(wanted, values, strict=True):
            row.vectors[name] = vector


def _perplexity(logprob: float, tokens: int) -> float:
    """Exp of the mean negative log-probability over some tokens."""
    return math.exp(min(-logprob / tokens, 700.0))


def _key(tokens: Any) -> bytes:
    """Tokens without trailing zeros, lm-eval's padding; a real trailing 0 is the same input there."""
    used = np.flatnonzero(tokens)
    return bytes(tokens[: used[-1] + 1 if used.size else 0].tobytes())
