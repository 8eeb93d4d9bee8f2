"""The hard tail in words: the documents of lowest contribution, clustered, each cluster by its typical texts.

Clusters are found by k-means on the unit vectors (for which Euclidean and cosine k-means agree up to the
centroids' lengths), from a seeded k-means++ start, in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.audit.run import Run

Array = NDArray[np.float64]
Rows = NDArray[np.int64]

SHARE = 0.1  # of the documents, from the low end
_MOST = 2000  # documents clustered at most: the lowest ones
_CLUSTERS, _TYPICAL, _ROUNDS = 8, 3, 50


def hard_tail(run: Run, contribution: Array, *, seed: int = 0) -> dict[str, Any]:
    """Clusters of the lowest tenth of the documents, largest first."""
    order = np.argsort(contribution, kind="stable")
    rows = order[: min(max(round(len(order) * SHARE), 1), _MOST)]
    labels, distance = clustered(run.points.rows[rows], _cluster_count(len(rows)), seed=seed)
    found = []
    for label in np.unique(labels):
        inside = np.flatnonzero(labels == label)
        typical = inside[np.argsort(distance[inside], kind="stable")][:_TYPICAL]
        found.append(_cluster(run, rows[inside], rows[typical], contribution))
    found.sort(key=lambda cluster: -cluster["documents"])
    return {"documents": len(rows), "share": len(rows) / len(order), "clusters": found}


def clustered(x: NDArray[np.float32], k: int, *, seed: int = 0) -> tuple[NDArray[np.int64], Array]:
    """Cluster of every row of ``x`` (n, d) and its squared distance to the cluster's mean."""
    rng = np.random.default_rng(seed)
    squares = np.einsum("ij,ij->i", x, x, dtype=np.float64)
    centres = _spread_start(x, squares, k, rng)
    labels = np.full(len(x), -1, dtype=np.int64)
    for _ in range(_ROUNDS):
        distances = _distances(x, squares, centres)
        new = distances.argmin(axis=1)
        if np.array_equal(new, labels):
            break
        labels = new
        member = (labels[:, None] == np.arange(len(centres))).astype(np.float32)
        sums = (member.T @ x).astype(np.float64)
        counts = member.sum(axis=0)
        centres = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], centres)
    return labels, _distances(x, squares, centres)[np.arange(len(x)), labels]


def _spread_start(x: NDArray[np.float32], squares: Array, k: int, rng: np.random.Generator) -> Array:
    """k-means++: every next centre with a probability proportional to its squared distance."""
    chosen = [int(rng.integers(len(x)))]
    nearest = _distances(x, squares, x[chosen].astype(np.float64))[:, 0]
    while len(chosen) < k and nearest.sum() > 0:
        chosen.append(int(rng.choice(len(x), p=nearest / nearest.sum())))
        nearest = np.minimum(nearest, _distances(x, squares, x[chosen[-1:]].astype(np.float64))[:, 0])
    return np.asarray(x[chosen], dtype=np.float64)


def _distances(x: NDArray[np.float32], squares: Array, centres: Array) -> Array:
    inner = x @ centres.astype(np.float32).T
    lengths = np.einsum("ij,ij->i", centres, centres)
    return np.asarray(np.maximum(squares[:, None] - 2 * inner + lengths, 0.0))


def _cluster_count(n: int) -> int:
    return max(1, min(_CLUSTERS, int(np.sqrt(n / 2))))


def _cluster(run: Run, rows: Rows, typical: Rows, contribution: Array) -> dict[str, Any]:
    scores = run.score[rows]
    labelled = scores[~np.isnan(scores)]
    subjects = run.documents["subject"].iloc[rows].value_counts(sort=False)
    common = sorted(subjects.items(), key=lambda item: (-item[1], str(item[0])))[:3]
    return {
        "documents": len(rows),
        "accuracy": float(labelled.mean()) if labelled.size else float("nan"),
        "contribution": float(contribution[rows].mean()),
        "subjects": [{"subject": str(name), "documents": int(count)} for name, count in common],
        "typical": [document_summary(run, int(row), contribution) for row in typical],
    }


def document_summary(run: Run, row: int, contribution: Array) -> dict[str, Any]:
    """One document as reports show it."""
    document = run.documents.iloc[row]
    score, text = float(run.score[row]), document["text"]
    return {
        "task": str(document["task"]),
        "doc_id": int(document["doc_id"]),
        "subject": str(document["subject"]),
        "contribution": float(contribution[row]),
        "correct": score,
        "text": text if isinstance(text, str) else None,
    }
