"""One document's states and measures, and how the task judged its answer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from lm_eval.utils import handle_non_serializable, hash_string
from numpy.typing import NDArray

from lmeval_dispersion.errors import HarnessError

Vectors = NDArray[np.float32]

# Which metric says whether a document was answered correctly: the first of these that the task has.
CORRECT = ("acc", "exact_match", "prompt_level_strict_acc", "pass@1", "em", "acc_norm")


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


@dataclass(eq=False)
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
        filter: The filter whose answer was judged.
    """

    state: DocState
    doc_id: int
    correct: float
    prediction: str | None
    target: str | None
    logprobs: list[float]
    doc_hash: str
    subject: str | None
    filter: str = "none"

    def __repr__(self) -> str:
        return f"<state of document {self.doc_id}>"


def record_of(
    doc: Any,
    state: DocState,
    answers: Sequence[Any],
    *,
    doc_id: int,
    correct: float,
    target: Any,
    choices: bool,
    alias: str | None,
    filter_name: str = "none",
) -> DocRecord:
    """The record of one document."""
    # A list where a cache that speaks JSON has held it.
    pairs = [a for a in answers if isinstance(a, tuple | list) and len(a) == 2 and isinstance(a[0], float)]
    logprobs = [float(a[0]) for a in pairs] or [float(a) for a in answers if isinstance(a, float)]
    prediction: str | None = None
    if choices:
        texts = [text.strip() for text in state.continuations]
        scores = logprobs[: len(texts)]
        prediction = texts[scores.index(max(scores))] if scores else None
        if isinstance(target, int) and 0 <= target < len(texts):
            target = texts[target]
    elif isinstance(answers[0], str):
        prediction = answers[0]
    subject = doc.get("subject") if isinstance(doc, Mapping) else None
    # As lm-eval's own evaluator hashes a document.
    dumped = json.dumps(doc, indent=2, default=handle_non_serializable, ensure_ascii=False)
    return DocRecord(
        state=state,
        doc_id=doc_id,
        correct=correct,
        prediction=prediction,
        target=None if target is None else str(target),
        logprobs=logprobs,
        doc_hash=hash_string(dumped),
        subject=subject if isinstance(subject, str) else alias,
        filter=filter_name,
    )


def split_judge(named: str | None) -> tuple[str | None, str | None]:
    """Filter and metric of ``FILTER/METRIC`` or ``METRIC``; None for what is not named.

    >>> split_judge("flexible-extract/exact_match")
    ('flexible-extract', 'exact_match')
    >>> split_judge("acc_norm")
    (None, 'acc_norm')
    """
    chosen, slash, metric = (named or "").rpartition("/")
    return (chosen or None) if slash else None, metric or None


def check_judge(task: str, named: str | None, filters: Sequence[str], metrics: Iterable[str]) -> None:
    """Raise HarnessError unless the task has the filter and the metric that ``named`` names."""
    chosen, metric = split_judge(named)
    metrics = list(metrics)
    if (chosen is None or chosen in filters) and (metric is None or metric in metrics):
        return
    names = metrics if len(filters) < 2 else [f"{f}/{m}" for f in filters for m in metrics]
    raise HarnessError(f"{task} has no {named!r} to tell correct answers by; it has {', '.join(names)}")


def correctness(metrics: Mapping[str, Any], named: str | None) -> tuple[str | None, float]:
    """Name and value of the metric that tells correct answers: ``named`` or the first known; (None, NaN)."""
    for name in (named,) if named else CORRECT:
        if name in metrics and isinstance(metrics[name], int | float):
            return name, float(metrics[name])
    return None, math.nan
