"""A task's metrics from its documents' records."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import HarnessError
from lmeval_dispersion.geometry import Estimate, streamed_dispersion_estimate, valid_rows
from lmeval_dispersion.harness.compat import pooled
from lmeval_dispersion.harness.records import DocRecord, Vectors

log = logging.getLogger(__name__)

# Metric -> which documents it is over, by their score.
METRICS = {"dispersion": "all", "dispersion_correct": "correct", "dispersion_incorrect": "incorrect"}

# A matrix of raw vectors (n, d) and the indices of the rows that count.
Part = tuple[NDArray[np.float32], NDArray[np.int64]]

_BLOCK = 4096
_latest: list[tuple[tuple[Part, ...], Estimate]] = []  # a value and its error ask for the same one


def estimate(parts: tuple[Part, ...]) -> Estimate:
    """Dispersion over the rows of all parts with its jackknife error; NaN below two rows."""
    for known, found in _latest:
        if len(known) == len(parts) and all(
            a[0] is b[0] and a[1] is b[1] for a, b in zip(known, parts, strict=True)
        ):
            return found
    found = _estimate(parts)
    _latest[:] = [(parts, found), *_latest[:5]]
    return found


def _estimate(parts: tuple[Part, ...]) -> Estimate:
    n = sum(len(rows) for _, rows in parts)
    if n < 2:
        return Estimate(math.nan, math.nan, n)

    def blocks() -> Iterator[NDArray[np.float32]]:
        for matrix, rows in parts:
            for i in range(0, len(rows), _BLOCK):
                yield matrix[rows[i : i + _BLOCK]]

    return streamed_dispersion_estimate(blocks)


def pooled_dispersion(parts: tuple[Part, ...]) -> Any:
    """The dispersion of ``parts`` as a float that groups combine to that of all their documents."""
    return pooled(parts, _mean)


def pooled_error(parts: tuple[Part, ...]) -> Any:
    """Its jackknife standard error, likewise."""
    return pooled(parts, _error, error=True)


def _mean(parts: tuple[Part, ...]) -> float:
    return estimate(parts).mean


def _error(parts: tuple[Part, ...]) -> float:
    return estimate(parts).se


class TaskMetrics:
    """Metrics of one task over all of its documents, computed once a filter.

    Args:
        task: Name, for messages.
        records: Records in any order (ranks hand theirs in one after the other); duplicates are dropped.
        layers: Captured layers, the default one first.

    Attributes:
        records: In the order of their true index.
        vectors: Layer -> raw states (n, d), a row each document or segment.
    """

    def __init__(self, task: str, records: Sequence[DocRecord], layers: Sequence[str]) -> None:
        self.task = task
        # An empty text has no segment, and with it no state.
        unique = {record.doc_id: record for record in records if record.state.prompt_tokens}
        self.records = [unique[doc_id] for doc_id in sorted(unique)]
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
        sizes = [len(record.state.prompt_tokens) for record in self.records]
        self.correct = np.repeat([record.correct for record in self.records], sizes)
        self.valid = {layer: valid_rows(rows) for layer, rows in self.vectors.items()}
        self.parts = {metric: self.part(metric) for metric in METRICS}
        self.truncated = sum(any(record.state.truncated) for record in self.records)

    def part(self, metric: str, layer: str | None = None) -> Part:
        """The matrix of a layer and the rows that ``metric`` is over."""
        layer = layer or self.layers[0]
        chosen: NDArray[np.bool_] = self.valid[layer]
        which = METRICS[metric]
        if which != "all":
            # NaN is neither: a task without labels has no correct and no incorrect documents.
            chosen = chosen & (self.correct > 0.5 if which == "correct" else self.correct <= 0.5)
        return self.vectors[layer], np.flatnonzero(chosen)

    def value(self, metric: str) -> Any:
        """The metric as a float that groups can pool."""
        return pooled_dispersion((self.parts[metric],))

    def error(self, metric: str) -> Any:
        """Its jackknife standard error, likewise."""
        return pooled_error((self.parts[metric],))

    def warn(self) -> None:
        """Say what a metric cannot show by itself."""
        for metric, which in METRICS.items():
            n = len(self.parts[metric][1])
            if n < 2 and not (which != "all" and np.isnan(self.correct).all()):
                kind = "" if which == "all" else f"{which} "
                log.warning("%s: %s is NaN: %d %sdocuments, two are needed", self.task, metric, n, kind)
        for layer, valid in self.valid.items():
            if not valid.all():
                log.warning(
                    "%s: %d of %d states of %s are zero or not finite and left out; try --model_args "
                    "dtype=float32",
                    self.task,
                    int((~valid).sum()),
                    len(valid),
                    layer,
                )
        if self.truncated:
            log.warning(
                "%s: %d of %d prompts were longer than the model's context and cut on the left",
                self.task,
                self.truncated,
                len(self.records),
            )

    def summary(self) -> dict[str, Any]:
        """The metrics of every layer for lm-eval's results JSON; NaN is null."""
        layers = {}
        for layer in self.layers:
            found = {metric: estimate((self.part(metric, layer),)) for metric in METRICS}
            layers[layer] = {
                f"{metric}{suffix}": value
                for metric, measured in found.items()
                for suffix, value in (
                    ("", _json_number(measured.mean)),
                    ("_stderr", _json_number(measured.se)),
                    ("_n", measured.n),
                )
            }
        return {
            "layer": self.layers[0],
            "documents": len(self.records),
            "vectors": len(self.correct),
            "truncated": self.truncated,
            "without_direction": {layer: int((~valid).sum()) for layer, valid in self.valid.items()},
            "layers": layers,
        }


def _json_number(value: float) -> float | None:
    """A number for strict JSON, which has no NaN."""
    return None if math.isnan(value) else float(value)
