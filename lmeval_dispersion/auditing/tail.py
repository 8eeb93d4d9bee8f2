"""The hard tail in words: the documents of lowest contribution, clustered, each cluster by its typical texts.

Clusters are found by k-means on the unit vectors (for which Euclidean and cosine k-means agree up to the
centroids' lengths), from a seeded start, in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.auditing.run import Run

Array = NDArray[np.float64]
Rows = NDArray[np.int64]

SHARE = 0.1  # of the documents, from the low end
_MOST = 2000  # documents clustered at most: the lowest ones
_CLUSTERS, _TYPICAL = 8, 3


def hard_tail(run: Run, *, seed: int = 0) -> dict[str, Any]:
    """Clusters of the lowest tenth of the documents, largest first.

    Raises:
        TooFewVectorsError: One document.
    """
    contribution = run.vectors.contributions()
    order = np.argsort(contribution, kind="stable")
    rows = order[: min(max(round(len(order) * SHARE), 1), _MOST)]
    labels, distance = clustered(run.vectors.rows[rows], _cluster_count(len(rows)), seed=seed)
    clusters = []
    for label in np.unique(labels):
        inside = np.flatnonzero(labels == label)
        typical = inside[np.argsort(distance[inside], kind="stable")][:_TYPICAL]
        clusters.append(_cluster(run, rows[inside], rows[typical], contribution))
    clusters.sort(key=lambda cluster: -cluster["documents"])
    return {"documents": len(rows), "share": len(rows) / len(order), "clusters": clusters}


def clustered(x: NDArray[np.float32], k: int, *, seed: int = 0) -> tuple[NDArray[np.int64], Array]:
    """Cluster of every row of ``x`` (n, d) and its squared distance to the cluster's mean.

    Fewer than ``k`` clusters where fewer rows are distinct.
    """
    from sklearn.cluster import KMeans

    # One start and one thread's order of sums: equal input gives equal bytes.
    model = KMeans(min(k, len(np.unique(x, axis=0))), n_init=1, random_state=seed, algorithm="lloyd")
    rows = x.astype(np.float64)
    labels = model.fit_predict(rows).astype(np.int64)
    return labels, np.square(rows - model.cluster_centers_[labels]).sum(axis=1)


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
