"""What one document brought back from the model, and answers that carry it through lm-eval's pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]


@dataclass
class DocState:
    """States and measures of one document's request, taken in the forward pass that answered it.

    Attributes:
        doc_id: Position of the document among those that were run (lm-eval's ``Instance.doc_id``).
        vectors: Layer name -> states, shape (m, d) float32; m is 1, or the number of segments of a rolling
            request.
        prompt_tokens: Tokens of the prompt before any truncation, one number for each of the m.
        truncated: Whether tokens were cut off on the left for want of context, likewise.
        perplexity: Perplexity of the query's own tokens (of the segment's, for rolling), NaN: not known.
        prompt_hash: lm-eval's hash of the prompt.
        query: The query as the task renders it, without few-shot examples; None where it has none.
        continuations: The texts whose log-probabilities were asked for, in order.
    """

    doc_id: int
    vectors: dict[str, Vectors]
    prompt_tokens: list[int]
    truncated: list[bool]
    perplexity: list[float]
    prompt_hash: str
    query: str | None = None
    continuations: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        # lm-eval writes str() of every metric's value into the samples file: no vectors there.
        return f"<state of document {self.doc_id}>"


@dataclass
class DocRecord:
    """A document's state with how the task judged the answer; the value of every metric of ours.

    Attributes:
        state: What the model gave.
        doc_id: True index in the task's split.
        correct: Share in [0, 1], NaN where the task has no label.
        prediction: The answer in words, or None.
        target: The right answer in words, or None.
        logprobs: Log-probability of each continuation.
        doc_hash: lm-eval's hash of the document.
        subject: The document's own ``subject``, else the task's alias, or None.
    """

    state: DocState
    doc_id: int
    correct: float
    prediction: str | None
    target: str | None
    logprobs: list[float]
    doc_hash: str
    subject: str | None

    def __repr__(self) -> str:
        return f"<state of document {self.doc_id}>"


def _same(value: Any) -> Any:
    return value


class _Carrier:
    """Mixin of answers with a state; pickles as the plain answer, so that states travel only once."""

    plain: Any
    state: DocState

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self.plain,)


class _Tuple(_Carrier, tuple):  # type: ignore[type-arg]
    pass


class _Text(_Carrier, str):
    pass


class _Number(_Carrier, float):
    pass


class _List(_Carrier, list):  # type: ignore[type-arg]
    pass


class _Other(_Carrier):
    def __init__(self, value: Any) -> None:
        self.plain = value

    def __repr__(self) -> str:
        return repr(self.plain)


def with_state(answer: Any, state: DocState) -> Any:
    """``answer`` as an equal object that has ``.state`` and ``.plain``, the answer itself."""
    carrier: type[_Carrier] = _Other
    # bool and int stay out: a float would print differently where lm-eval logs the answer.
    for base, kind in ((tuple, _Tuple), (str, _Text), (float, _Number), (list, _List)):
        if isinstance(answer, base):
            carrier = kind
            break
    carried: Any = carrier(answer)  # type: ignore[call-arg]
    carried.plain = answer
    carried.state = state
    return carried


def state_of(answer: Any) -> DocState | None:
    """The state that an answer carries, or None."""
    return getattr(answer, "state", None) if isinstance(answer, _Carrier) else None


def plain(answer: Any) -> Any:
    """The answer without its state."""
    return answer.plain if isinstance(answer, _Carrier) else answer
