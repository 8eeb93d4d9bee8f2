"""One run as the audit sees it: documents with a direction, their labels, confidence and centred vectors.

A document's confidence is that of the model in its answer: log-probabilities of the choices are brought to
probabilities that sum to one over the choices (the harness's ``acc`` view: no length normalisation).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.auditing.vectors import CentredVectors
from lmeval_dispersion.errors import StoreError, UsageError
from lmeval_dispersion.store import Store, read_store

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]

FEWEST = 20  # right, and wrong, documents for an interval that has its level
CORRECT_FROM = 0.5  # a score from here on counts as a correct answer where two classes are needed


class Confidence(NamedTuple):
    """Three scores a document, each of shape (n,).

    Attributes:
        top_probability: Largest probability, in [1/choices, 1].
        margin: Largest minus second largest probability, in [0, 1].
        entropy: Entropy of the choices in nats, 0 for certainty.
    """

    top_probability: Array
    margin: Array
    entropy: Array


@dataclass(frozen=True)
class Run:
    """The documents of a store that have a direction, row by row with their vectors.

    Attributes:
        store: Where they come from.
        layer: Layer of the vectors.
        documents: One row a document, index 0..n-1.
        vectors: Their vectors, centred.
        score: ``correct`` as stored, in [0, 1]; NaN where there is no label. Shape (n,).
        confidence: The model's own confidence.
        choices: Answer choices of each document, 0 where there are none. Shape (n,).
        chosen: Place of the likeliest choice from 0, -1 where there is none. Shape (n,).
        without_direction: Documents left out because their vector is zero or not finite.
    """

    store: Store
    layer: str
    documents: pd.DataFrame
    vectors: CentredVectors
    score: Array
    confidence: Confidence
    choices: NDArray[np.int64]
    chosen: NDArray[np.int64]
    without_direction: int
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, store: Store, layer: str | None = None) -> Run:
        """A store's documents with their vectors of one layer (default: the store's default layer).

        Raises:
            StoreError: No such layer, or no document with a direction.
        """
        name = layer or store.default_layer
        unit = store.vectors(name)
        usable = ~np.isnan(unit[:, 0])
        without = int(len(usable) - usable.sum())
        if not usable.any():
            raise StoreError(
                f"none of the {len(usable)} documents in {store.path} has a usable vector of layer {name!r}; "
                "the run produced zero or non-finite states, run it again"
                if len(usable)
                else f"{store.path} holds no documents; run it again"
            )
        documents = store.documents
        if without:
            unit, documents = unit[usable], documents[usable].reset_index(drop=True)
        score = documents["correct"].to_numpy(dtype=np.float64)
        outside = int(((score < 0) | (score > 1)).sum())
        if outside:
            raise StoreError(
                f"expected scores in [0, 1] in the column `correct` of {store.path}, got {outside} outside; "
                "divide them by their maximum"
            )
        run = cls(
            store=store,
            layer=name,
            documents=documents,
            vectors=CentredVectors(unit),
            score=score,
            confidence=confidences(logprobs := documents["logprobs"].tolist()),
            choices=np.array([len(values) for values in logprobs], dtype=np.int64),
            chosen=np.array([_place(values) for values in logprobs], dtype=np.int64),
            without_direction=without,
        )
        run.notes.extend(_notes(run))
        return run

    @property
    def labelled(self) -> NDArray[np.int64]:
        """Rows with a label."""
        return np.flatnonzero(~np.isnan(self.score))

    @property
    def right(self) -> NDArray[np.bool_]:
        """Whether each document was answered correctly; False where there is no label. Shape (n,)."""
        return np.asarray(self.score >= CORRECT_FROM)

    @property
    def perplexity(self) -> Array:
        """Perplexity of each query's own tokens; NaN where not known. Shape (n,)."""
        return self.documents["query_perplexity"].to_numpy(dtype=np.float64)

    @property
    def length(self) -> Array:
        """Prompt length in tokens; NaN where not known. Shape (n,)."""
        tokens = self.documents["prompt_tokens"].to_numpy(dtype=np.float64)
        return np.where(tokens > 0, tokens, np.nan)

    @property
    def raw_vectors(self) -> NDArray[np.float32]:
        """The vectors at their own lengths, shape (n, d).

        Raises:
            StoreError: The store's lengths do not fit its vectors.
        """
        norms = self.store.norms(self.layer)
        norms = norms[np.isfinite(norms) & (norms > 0)]
        if len(norms) != len(self.vectors):
            raise StoreError(
                f"expected {len(self.vectors)} lengths of vectors in {self.store.path}, got {len(norms)}; "
                "the store is damaged, run it again"
            )
        unit = self.vectors.rows + self.vectors.mean.astype(np.float32)
        return np.asarray(unit * norms[:, None].astype(np.float32))

    def describe(self) -> dict[str, Any]:
        """What was measured on what, as reports carry it."""
        manifest = self.store.manifest
        keys = ("model", "revision", "num_fewshot", "chat_template", "prompt_format", "limit", "created")
        tasks = {task: None for task in sorted(self.documents["task"].unique())}
        return {
            **{key: manifest.get(key) for key in keys},
            "tasks": manifest.get("tasks") or tasks,
            "layer": self.layer,
            "width": int(self.vectors.rows.shape[1]),
            "documents": len(self.vectors),
            "without_direction": self.without_direction,
            "labelled": len(self.labelled),
        }


def read_run(run: Run | str | Path, layer: str | None = None) -> Run:
    """The run whose store is in a folder; a run that was read already is given back.

    Raises:
        StoreError: No usable store, no such layer, or no document with a direction.
    """
    return run if isinstance(run, Run) else Run.of(read_store(run), layer)


def check_labels(run: Run) -> None:
    """Raise UsageError unless there are labels, right answers and wrong ones."""
    rows = run.labelled
    right = int(run.right[rows].sum())
    if not len(rows):
        raise UsageError("calibration needs labelled documents, and none of these has a label")
    if right in (0, len(rows)):
        side = "correctly" if right else "wrongly"
        raise UsageError(
            f"calibration needs right and wrong answers, and all {len(rows)} documents were answered {side}"
        )


def _notes(run: Run) -> list[str]:
    notes = []
    n = len(run.vectors)
    if run.without_direction:
        notes.append(
            f"{run.without_direction} of {n + run.without_direction} documents have a zero or non-finite "
            "vector and are left out."
        )
    if truncated := int(run.documents["truncated"].sum()):
        notes.append(f"{truncated} prompts were too long for the model and lost their beginning.")
    unlabelled = n - len(run.labelled)
    if 0 < unlabelled < n:
        notes.append(f"{unlabelled} of {n} documents have no label and count for dispersion only.")
    between = int(((run.score > 0) & (run.score < 1)).sum())
    if between:
        notes.append(
            f"{between} documents have a score between 0 and 1; from {CORRECT_FROM} on it counts as correct "
            "in mixtures, calibration and ranking."
        )
    return notes


def _place(values: Sequence[float]) -> int:
    return int(np.nanargmax(values)) if len(values) >= 2 and np.isfinite(values).any() else -1


def confidences(logprobs: Sequence[Sequence[float]]) -> Confidence:
    """Confidence of each document from the log-probabilities of its choices.

    NaN where there are fewer than two choices, or none of finite log-probability.

    >>> [round(float(v[0]), 3) for v in confidences([[0.0, 0.0, -1e9, -1e9]])]
    [0.5, 0.0, 0.693]
    """
    n = len(logprobs)
    top, margin, entropy = (np.full(n, np.nan) for _ in range(3))
    lengths = np.array([len(values) for values in logprobs], dtype=np.int64)
    for choices in np.unique(lengths[lengths >= 2]):
        rows = np.flatnonzero(lengths == choices)
        values = np.array([logprobs[int(row)] for row in rows], dtype=np.float64)
        # -inf is a probability of 0 and fine, unless every choice has it; NaN and inf are no log-probability.
        usable = np.isfinite(values).any(axis=1) & (values < np.inf).all(axis=1)
        rows, values = rows[usable], values[usable]
        if not len(rows):
            continue
        weights = np.exp(values - values.max(axis=1, keepdims=True))
        p = np.sort(weights / weights.sum(axis=1, keepdims=True), axis=1)
        top[rows], margin[rows] = p[:, -1], p[:, -1] - p[:, -2]
        entropy[rows] = -(p * np.log(np.where(p > 0, p, 1.0))).sum(axis=1)
    return Confidence(top, margin, entropy)
