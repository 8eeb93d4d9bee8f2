"""One run as the audit sees it: documents with a direction, their labels, confidence and centred vectors."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.audit.confidence import Confidence, confidences
from lmeval_dispersion.audit.points import Points
from lmeval_dispersion.errors import StoreError
from lmeval_dispersion.store import Store, read_store

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]

CORRECT_FROM = 0.5  # a score from here on counts as a correct answer where two classes are needed


@dataclass(frozen=True)
class Run:
    """The documents of a store that have a direction, row by row with their vectors.

    Attributes:
        store: Where they come from.
        layer: Layer of the vectors.
        documents: One row a document, index 0..n-1.
        points: Their vectors.
        score: ``correct`` as stored, in [0, 1]; NaN where there is no label. Shape (n,).
        confidence: The model's own confidence.
        without_direction: Documents left out because their vector is zero or not finite.
    """

    store: Store
    layer: str
    documents: pd.DataFrame
    points: Points
    score: Array
    confidence: Confidence
    without_direction: int
    notes: list[str] = field(default_factory=list)

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


def read_run(path: str | Path, layer: str | None = None) -> Run:
    """Read a store for an audit.

    Raises:
        StoreError: No usable store, no such layer, or no document with a direction.
    """
    return prepared_run(read_store(path), layer)


def prepared_run(store: Store, layer: str | None = None) -> Run:
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
    run = Run(
        store, name, documents, Points(unit), score, confidences(documents["logprobs"].tolist()), without
    )
    _note(run)
    return run


def _note(run: Run) -> None:
    n = len(run.points)
    if run.without_direction:
        run.notes.append(
            f"{run.without_direction} of {n + run.without_direction} documents have a zero or non-finite "
            "vector and are left out."
        )
    if truncated := int(run.documents["truncated"].sum()):
        run.notes.append(f"{truncated} prompts were too long for the model and lost their beginning.")
    unlabelled = n - len(run.labelled)
    if 0 < unlabelled < n:
        run.notes.append(f"{unlabelled} of {n} documents have no label and count for dispersion only.")
    between = int(((run.score > 0) & (run.score < 1)).sum())
    if between:
        run.notes.append(
            f"{between} documents have a score between 0 and 1; from {CORRECT_FROM} on it counts as correct "
            "in mixtures, calibration and ranking."
        )


def described(run: Run) -> dict[str, Any]:
    """The run's part of a report: what was measured on what."""
    manifest = run.store.manifest
    keys = ("model", "revision", "num_fewshot", "chat_template", "prompt_format", "limit", "created")
    return {
        **{key: manifest.get(key) for key in keys},
        "tasks": manifest.get("tasks") or {task: None for task in sorted(run.documents["task"].unique())},
        "layer": run.layer,
        "width": int(run.points.rows.shape[1]),
        "documents": len(run.points),
        "without_direction": run.without_direction,
        "labelled": len(run.labelled),
    }
