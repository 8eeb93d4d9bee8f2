"""The hidden states of a document with its scored answer, and a task's metrics over documents."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save

from lmeval_dispersion.errors import HarnessError
from lmeval_dispersion.files import write_whole
from lmeval_dispersion.geometry import Estimate, dispersion_estimate, valid_rows
from lmeval_dispersion.harness.seams import Pooled
from lmeval_dispersion.store.format import CORRECT_ABOVE

Vectors = NDArray[np.float32]

# Our metric -> the documents that it counts, by their score.
METRICS = {
    "dispersion": "all",
    "dispersion_correct": "correct",
    "dispersion_incorrect": "incorrect",
}


@dataclass
class DocState:
    """Hidden states and measures of one document, from the forward pass that answered its request.

    A document has one state (m = 1). With ``loglikelihood_rolling`` it has one for each segment of
    its text, and none (m = 0) if the text is empty.

    Attributes:
        vectors: For each layer, the states, shape (m, d), float32; the reported layer is first. The
            dict is empty if m = 0.
        prompt_tokens: For each state, the number of tokens of its prompt before any truncation.
        truncated: For each state, whether tokens were cut on the left because the prompt exceeds
            the model's context.
        perplexity: For each state, the perplexity of the question's own tokens, or of the segment;
            NaN if unknown.
    """

    vectors: dict[str, Vectors]
    prompt_tokens: list[int]
    truncated: list[bool]
    perplexity: list[float]


def save_states(file: Path, states: Sequence[tuple[DocState, Any]]) -> None:
    """Write pairs of a document's state and a JSON value to a safetensors file.

    Raises:
        DispersionError: The file cannot be written.
    """
    tensors = dict[str, Vectors]()
    rest = list[Any]()
    for i, (state, more) in enumerate(states):
        for layer, rows in state.vectors.items():
            tensors[f"{i} {layer}"] = rows
        rest.append(({**vars(state), "vectors": [*state.vectors]}, more))
    write_whole(file, save(tensors, {"states": json.dumps(rest)}))


def load_states(file: Path) -> Iterator[tuple[DocState, Any]]:
    """Yield the pairs in a file of :func:`save_states`, in the order in which they were written.

    Raises:
        SafetensorError, KeyError: The file is damaged.
    """
    with safe_open(file, framework="numpy") as tensors:
        for i, (state, more) in enumerate(json.loads(tensors.metadata()["states"])):
            vectors = {layer: tensors.get_tensor(f"{i} {layer}") for layer in state["vectors"]}
            yield DocState(**{**state, "vectors": vectors}), more


@dataclass
class Prompt:
    """A prompt from logged samples, which can be run in place of one of lm-eval's requests.

    Attributes:
        args: Arguments of the request, the prompt first.
        query: The question as the task renders it; None if unknown.
        task_name: Name of the task.
        dispersion_layers: Names of the layers whose states are recorded.
        idx: Number of the request within its document; a document's state is that of request 0.
        dispersion_state: The `DocState`, once the prompt has been run; None before.
        answer: What the model answers: the log-probability of the logged answer (of the whole text
            for ``loglikelihood_rolling``) in nats, or the first token that the model generates, as
            text; None before the prompt has been run.
    """

    args: tuple[Any, ...]
    query: str | None
    task_name: str
    dispersion_layers: tuple[str, ...] = ()
    idx: int = 0
    dispersion_state: Any = None
    answer: float | str | None = None

    @property
    def key(self) -> str:
        """A text that identifies the model's input: prompts with equal keys are run only once."""
        return json.dumps([self.args, self.query], sort_keys=True, default=str)


@dataclass(eq=False)
class DocRecord:
    """A document's state and score, which lm-eval passes around as the value of our metrics.

    Attributes:
        state: The hidden states; None for a logged document whose prompt has not been run yet.
        doc_id: Index of the document in the task's split.
        correct: How right the answer is, from 0 to 1; NaN if the task has no labels.
        filter: Name of the filter whose answer was scored.
        columns: Further columns of the document in the store.
    """

    state: DocState
    doc_id: int
    correct: float
    filter: str
    columns: dict[str, Any]

    def __repr__(self) -> str:
        # lm-eval writes str() of every metric's value into the samples file: no vectors there.
        return f"<state of document {self.doc_id}>"


@dataclass(frozen=True)
class AggregatedMetric:
    """The function with which lm-eval aggregates one of our metrics, or its standard error.

    The value depends only on the given records: lm-eval may call the function on any sample of
    them, in any process, any number of times. A repeated document counts once.

    Attributes:
        metric: Name of the metric, a key of :data:`METRICS`.
        error: Whether the value is the metric's jackknife standard error.
        keep: Function that is called with all given records before they are aggregated; None for no
            such function.
    """

    metric: str
    error: bool = False
    # Records of other processes reach a task only here.
    keep: Callable[[Sequence[DocRecord]], None] | None = None

    def __call__(self, records: Sequence[DocRecord]) -> Pooled:
        """Return the value as a float that remembers its records, so that groups can pool them."""
        if self.keep is not None:
            self.keep(records)
        return Pooled.of(records_of(self.metric, with_states(records)), self.measure)

    def measure(self, records: tuple[DocRecord, ...]) -> float:
        """Return the dispersion of ``records``, or its standard error if ``error`` is set.

        The result is NaN if there are too few records; see :func:`estimate`.
        """
        figure = estimate(records)
        return figure.se if self.error else figure.mean

    def __reduce__(self) -> tuple[Any, ...]:
        return AggregatedMetric, (self.metric, self.error)


def with_states(records: Sequence[DocRecord]) -> list[DocRecord]:
    """Return the records that have a hidden state, one for each document, sorted by document index.

    Documents with an empty text have no hidden state.
    """
    records_by_id = {record.doc_id: record for record in records if record.state.prompt_tokens}
    return [record for _, record in sorted(records_by_id.items())]


def records_of(metric: str, records: Sequence[DocRecord]) -> tuple[DocRecord, ...]:
    """Return the records that a metric counts: all, the right ones or the wrong ones.

    A record is right if its ``correct`` exceeds 0.5, and neither right nor wrong if that is NaN, as
    in a task without labels.
    """
    # A task without labels has no correct and no incorrect documents.
    if metric == "dispersion_correct":
        return tuple(record for record in records if record.correct > CORRECT_ABOVE)
    if metric == "dispersion_incorrect":
        return tuple(record for record in records if record.correct <= CORRECT_ABOVE)
    return tuple(records)


@lru_cache(maxsize=1)  # lm-eval asks for a value and then for its error
def estimate(records: tuple[DocRecord, ...], layer: str | None = None) -> Estimate:
    """Return the dispersion of the records' states of a layer, with its jackknife standard error.

    States that are zero or not finite are left out. The dispersion is NaN for fewer than two states
    and its error for fewer than three. ``layer`` is None for the reported layer, the first one.
    """
    parts = []
    for record in records:
        vectors = record.state.vectors
        rows = vectors[layer] if layer else next(iter(vectors.values()))
        parts.append(rows[valid_rows(rows)])
    n = sum(map(len, parts))
    if n < 2:
        return Estimate(math.nan, math.nan, n)
    return dispersion_estimate(np.concatenate(parts))


class TaskMetrics:
    """The documents, vectors and metrics of one finished task.

    Attributes:
        task: Name of the task.
        records: The records with a state, one for each document, sorted by index.
        layers: Names of the layers, the reported one first.
        vectors: For each layer, the states of all records, shape (n, d), float32.
        without_direction: For each layer, the number of states that are zero or not finite.
        truncated: Number of documents whose prompts were cut on the left.

    Raises:
        HarnessError: No document has a state, because all texts are empty.
    """

    def __init__(self, task: str, records: Sequence[DocRecord]) -> None:
        self.task = task
        self.records = with_states(records)
        if not self.records:
            raise HarnessError(
                f"{task}: expected texts with at least one token, got only empty ones; check the data"
            )
        self.layers = list(self.records[0].state.vectors)
        self.vectors = dict[str, Vectors]()
        self.without_direction = dict[str, int]()
        for layer in self.layers:
            rows = np.concatenate([record.state.vectors[layer] for record in self.records])
            self.vectors[layer] = rows
            self.without_direction[layer] = int((~valid_rows(rows)).sum())
        self.truncated = sum(any(record.state.truncated) for record in self.records)

    def remarks(self) -> list[tuple[str, str]]:
        """Return warnings on the metrics, each in two wordings.

        The first wording is the same for all tasks with this warning, so that tasks can be listed
        together; the second has this task's figures.
        """
        warnings = []
        labelled = any(not math.isnan(record.correct) for record in self.records)
        for metric, which in METRICS.items():
            n = estimate(records_of(metric, self.records)).n
            if n < 2 and (labelled or which == "all"):
                kind = "" if which == "all" else f"{which} "
                shared = f"{metric} is NaN (fewer than two {kind}documents)"
                own = (
                    f"{metric} is NaN: expected two or more {kind}documents, got {n}; evaluate more"
                )
                warnings.append((shared, own))
        for layer, bad in self.without_direction.items():
            if bad:
                are = "is" if bad == 1 else "are"
                why = "zero or not finite, and left out; try model_args dtype=float32"
                shared = f"states of {layer} are {why}"
                own = f"{bad} of {len(self.vectors[layer])} states of {layer} {are} {why}"
                warnings.append((shared, own))
        if self.truncated:
            why = "prompts exceeded the model's context and lost their first tokens"
            warnings.append((why, f"{self.truncated} of {len(self.records)} {why}"))
        return warnings

    def summary(self) -> dict[str, Any]:
        """Return counts and every layer's metrics for lm-eval's results JSON; None in place of NaN."""
        layers: dict[str, dict[str, float | None]] = {}
        for layer in self.layers:
            figures = layers[layer] = {}
            for metric in METRICS:
                mean, error, n = estimate(records_of(metric, self.records), layer)
                figures[metric] = None if math.isnan(mean) else mean
                figures[f"{metric}_stderr"] = None if math.isnan(error) else error
                figures[f"{metric}_n"] = n
        return {
            "layer": self.layers[0],
            "documents": len(self.records),
            "vectors": len(self.vectors[self.layers[0]]),
            "truncated": self.truncated,
            "without_direction": self.without_direction,
            "layers": layers,
        }
