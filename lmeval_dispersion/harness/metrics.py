"""A task's metrics from its documents' records."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import HarnessError
from lmeval_dispersion.geometry import Estimate, streamed_dispersion_estimate, valid_rows
from lmeval_dispersion.harness.records import DocRecord, Vectors
from lmeval_dispersion.harness.seams import pooled

# Metric -> which documents it is over, by their score.
METRICS = {"dispersion": "all", "dispersion_correct": "correct", "dispersion_incorrect": "incorrect"}

_BLOCK = 4096


@dataclass(frozen=True)
class Figure:
    """lm-eval's aggregation for one of :data:`METRICS`, or for its jackknife standard error.

    A pure function of the records that it is given: lm-eval may call it on any sample of them, in any process
    and any number of times. A document that comes twice counts once.

    Attributes:
        metric: Name of the metric.
        layer: Captured layer, as the records have it.
        error: Whether it gives the standard error.
    """

    metric: str
    layer: str
    error: bool = False

    def __call__(self, records: Sequence[DocRecord]) -> Any:
        """A float that lm-eval's group arithmetic combines to the figure over all the group's documents."""
        return pooled(over(self.metric, unique(records)), self.measure, error=self.error)

    def measure(self, records: tuple[DocRecord, ...]) -> float:
        """The figure over exactly these records."""
        figure = estimate(records, self.layer)
        return figure.se if self.error else figure.mean


def unique(records: Sequence[DocRecord]) -> list[DocRecord]:
    """Each document once, by its index; an empty text has no segment, and with it no state."""
    records_by_id = {record.doc_id: record for record in records if record.state.prompt_tokens}
    return [records_by_id[doc_id] for doc_id in sorted(records_by_id)]


def over(metric: str, records: Sequence[DocRecord]) -> tuple[DocRecord, ...]:
    """The records that ``metric`` is over."""
    which = METRICS[metric]
    if which == "all":
        return tuple(records)
    # NaN is neither: a task without labels has no correct and no incorrect documents.
    return tuple(r for r in records if (r.correct > 0.5 if which == "correct" else r.correct <= 0.5))


@lru_cache(maxsize=1)  # lm-eval asks for a value and then for its error
def estimate(records: tuple[DocRecord, ...], layer: str) -> Estimate:
    """Dispersion over the records' states with its jackknife error; NaN below two states with a direction."""
    n = 0
    for rows in _blocks(records, layer):
        n += len(rows)
        if n > 1:
            return streamed_dispersion_estimate(lambda: _blocks(records, layer))
    return Estimate(math.nan, math.nan, n)


def _blocks(records: Sequence[DocRecord], layer: str) -> Iterator[Vectors]:
    for start in range(0, len(records), _BLOCK):
        states = [record.state.vectors for record in records[start : start + _BLOCK]]
        rows = np.concatenate([v[layer] if layer in v else next(iter(v.values())) for v in states])
        if (valid := valid_rows(rows)).any():
            yield rows[valid]


class TaskMetrics:
    """The documents of one finished task: what its store holds, and its metrics by layer."""

    def __init__(self, task: str, records: Sequence[DocRecord], layers: Sequence[str]) -> None:
        self.task = task
        self.records = unique(records)
        if not self.records:
            raise HarnessError(f"{task}: no document brought a state back: all of its texts are empty")
        # Names are canonical on the records; here only where lm-eval's model could be asked beforehand.
        held = list(self.records[0].state.vectors)
        self.layers = [name for name in layers if name in held] or held
        self.vectors: dict[str, Vectors] = {}
        for layer in self.layers:
            self.vectors[layer] = np.concatenate([r.state.vectors[layer] for r in self.records])
            start = 0
            for record in self.records:  # views: the states are held once
                stop = start + len(record.state.prompt_tokens)
                record.state.vectors[layer] = self.vectors[layer][start:stop]
                start = stop
        self.valid: dict[str, NDArray[np.bool_]] = {n: valid_rows(rows) for n, rows in self.vectors.items()}
        self.truncated = sum(any(record.state.truncated) for record in self.records)

    def remarks(self) -> list[tuple[str, str]]:
        """Warnings about the metrics: words that many tasks share, and the same with this task's figures."""
        warnings = []
        labelled = any(not math.isnan(record.correct) for record in self.records)
        for metric, which in METRICS.items():
            n = self._estimate(metric, self.layers[0]).n
            if n < 2 and (labelled or which == "all"):
                kind = "" if which == "all" else f"{which} "
                shared = f"{metric} is NaN (fewer than two {kind}documents)"
                warnings.append((shared, f"{metric} is NaN: {n} {kind}documents, two are needed"))
        for layer, valid in self.valid.items():
            if not valid.all():
                why = f"states of {layer} are zero or not finite and left out; try --model_args dtype=float32"
                warnings.append((why, f"{int((~valid).sum())} of {len(valid)} {why}"))
        if self.truncated:
            why = "prompts were longer than the model's context and cut on the left"
            warnings.append((why, f"{self.truncated} of {len(self.records)} {why}"))
        return warnings

    def summary(self) -> dict[str, Any]:
        """The metrics of every layer for lm-eval's results JSON; NaN is null."""
        layers = {}
        for layer in self.layers:
            estimates = {metric: self._estimate(metric, layer) for metric in METRICS}
            layers[layer] = {
                f"{metric}{suffix}": value
                for metric, measured in estimates.items()
                for suffix, value in (
                    ("", _json_number(measured.mean)),
                    ("_stderr", _json_number(measured.se)),
                    ("_n", measured.n),
                )
            }
        return {
            "layer": self.layers[0],
            "documents": len(self.records),
            "vectors": len(self.vectors[self.layers[0]]),
            "truncated": self.truncated,
            "without_direction": {layer: int((~valid).sum()) for layer, valid in self.valid.items()},
            "layers": layers,
        }

    def _estimate(self, metric: str, layer: str) -> Estimate:
        return estimate(over(metric, self.records), layer)


def _json_number(value: float) -> float | None:
    """A number for strict JSON, which has no NaN."""
    return None if math.isnan(value) else float(value)
