"""A document's states with its scored answer, and a task's metrics over its documents."""

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
    """States and measures of one document's request, taken in the forward pass that answered it.

    All have m entries: one, or a rolling request's number of segments.
    """

    vectors: dict[str, Vectors]  # layer -> states (m, d) float32, the reported layer first
    prompt_tokens: list[int]  # tokens of the prompt before any truncation
    truncated: list[bool]  # whether tokens were cut on the left, beyond the context
    perplexity: list[float]  # of the query's own tokens, or of the segment's; NaN: not known


def save_states(file: Path, states: Sequence[tuple[DocState, Any]]) -> None:
    """Write states, each with a JSON value; raises DispersionError."""
    tensors = dict[str, Vectors]()
    rest = list[Any]()
    for i, (state, more) in enumerate(states):
        for layer, rows in state.vectors.items():
            tensors[f"{i} {layer}"] = rows
        rest.append(({**vars(state), "vectors": [*state.vectors]}, more))
    write_whole(file, save(tensors, {"states": json.dumps(rest)}))


def load_states(file: Path) -> Iterator[tuple[DocState, Any]]:
    """Read a file of :func:`save_states`, in order; SafetensorError, KeyError or others if it is damaged."""
    with safe_open(file, framework="numpy") as tensors:
        for i, (state, more) in enumerate(json.loads(tensors.metadata()["states"])):
            vectors = {layer: tensors.get_tensor(f"{i} {layer}") for layer in state["vectors"]}
            yield DocState(**{**state, "vectors": vectors}), more


@dataclass
class Prompt:
    """A logged prompt, with the attributes that lm-eval's model and the recorders read from requests."""

    args: tuple[Any, ...]  # the request's arguments, the prompt first
    query: str | None  # the question as the task renders it
    task_name: str
    dispersion_layers: tuple[str, ...] = ()
    idx: int = 0  # first of its document, whose state is kept
    dispersion_state: Any = None  # a DocState once it has run
    # The model's own log-probability or first token; None: not requested.
    answer: float | str | None = None

    @property
    def key(self) -> str:
        """A key of the model's input: prompts with equal keys are run once."""
        return json.dumps([self.args, self.query], sort_keys=True, default=str)


@dataclass(eq=False)
class DocRecord:
    """A document's state and score; lm-eval aggregates it as the value of each of our metrics."""

    state: DocState  # for a logged document, set once its prompt has run
    doc_id: int  # true index in the task's split
    correct: float  # share in [0, 1], NaN where the task has no label
    filter: str  # the filter whose answer was scored
    columns: dict[str, Any]  # more columns of the store's documents

    def __repr__(self) -> str:
        # lm-eval writes str() of every metric's value into the samples file: no vectors there.
        return f"<state of document {self.doc_id}>"


@dataclass(frozen=True)
class AggregatedMetric:
    """lm-eval's aggregation for one of :data:`METRICS`, or for its jackknife standard error.

    Its value depends only on the given records: lm-eval may call it on any sample of them, in any process,
    any number of times. A repeated document counts once.
    """

    metric: str
    error: bool = False
    # Called with the records: those of other processes reach a task only here.
    keep: Callable[[Sequence[DocRecord]], None] | None = None

    def __call__(self, records: Sequence[DocRecord]) -> Pooled:
        """A float that knows its documents, so that a group's figure is over those of all its tasks."""
        if self.keep is not None:
            self.keep(records)
        return Pooled.of(records_of(self.metric, with_states(records)), self.measure)

    def measure(self, records: tuple[DocRecord, ...]) -> float:
        """Dispersion over exactly these records, or its jackknife standard error."""
        figure = estimate(records)
        return figure.se if self.error else figure.mean

    def __reduce__(self) -> tuple[Any, ...]:
        return AggregatedMetric, (self.metric, self.error)


def with_states(records: Sequence[DocRecord]) -> list[DocRecord]:
    """The documents with a state, each once, by index; an empty text has no segment and no state."""
    records_by_id = {record.doc_id: record for record in records if record.state.prompt_tokens}
    return [record for _, record in sorted(records_by_id.items())]


def records_of(metric: str, records: Sequence[DocRecord]) -> tuple[DocRecord, ...]:
    """The documents that ``metric`` counts: all, the correct or the incorrect."""
    # A task without labels has no correct and no incorrect documents.
    if metric == "dispersion_correct":
        return tuple(record for record in records if record.correct > CORRECT_ABOVE)
    if metric == "dispersion_incorrect":
        return tuple(record for record in records if record.correct <= CORRECT_ABOVE)
    return tuple(records)


@lru_cache(maxsize=1)  # lm-eval asks for a value and then for its error
def estimate(records: tuple[DocRecord, ...], layer: str | None = None) -> Estimate:
    """Dispersion over the records' states of a layer (default: the reported one) with its jackknife error.

    NaN below two states with a direction; the error is NaN below three.
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
    """One finished task's documents, vectors by layer, and metrics; HarnessError if all texts are empty."""

    def __init__(self, task: str, records: Sequence[DocRecord]) -> None:
        self.task = task
        self.records = with_states(records)
        if not self.records:
            raise HarnessError(f"{task}: no document has a state, as all texts are empty")
        self.layers = list(self.records[0].state.vectors)
        self.vectors = dict[str, Vectors]()
        self.without_direction = dict[str, int]()
        for layer in self.layers:
            rows = np.concatenate([record.state.vectors[layer] for record in self.records])
            self.vectors[layer] = rows
            self.without_direction[layer] = int((~valid_rows(rows)).sum())
        self.truncated = sum(any(record.state.truncated) for record in self.records)

    def remarks(self) -> list[tuple[str, str]]:
        """Warnings on the metrics, as pairs: wording shared between tasks, and with this task's figures."""
        warnings = []
        labelled = any(not math.isnan(record.correct) for record in self.records)
        for metric, which in METRICS.items():
            n = estimate(records_of(metric, self.records)).n
            if n < 2 and (labelled or which == "all"):
                kind = "" if which == "all" else f"{which} "
                shared = f"{metric} is NaN (fewer than two {kind}documents)"
                warnings.append((shared, f"{metric} is NaN: {n} {kind}documents, two are needed"))
        for layer, bad in self.without_direction.items():
            if bad:
                why = f"states of {layer} are zero or not finite and left out; try model_args dtype=float32"
                warnings.append((why, f"{bad} of {len(self.vectors[layer])} {why}"))
        if self.truncated:
            why = "prompts were longer than the model's context and cut on the left"
            warnings.append((why, f"{self.truncated} of {len(self.records)} {why}"))
        return warnings

    def summary(self) -> dict[str, Any]:
        """Every layer's metrics for lm-eval's results JSON; NaN is null."""
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
