"""What a slice shows without labels: its dispersion, the model's confidence, perplexity and prompt length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.auditing.run import Run
from lmeval_dispersion.auditing.slices import Slice, by_column, by_value
from lmeval_dispersion.auditing.tail import clustered
from lmeval_dispersion.errors import UsageError

Array = NDArray[np.float64]
Rows = NDArray[np.int64]

# Key -> how a sentence calls it. All are means over documents but the dispersion, a mean over pairs.
FEATURES = {
    "dispersion": "dispersion",
    "confidence": "mean confidence",
    "atc": "ATC",
    "log_perplexity": "log query perplexity",
    "prompt_tokens": "prompt length",
}
CLUSTERS = "cluster"  # slices by k-means on the vectors, where no column makes enough
FEWEST_SLICES = 8
FEWEST_DOCUMENTS = 5  # labelled ones of a slice that is fitted
_CLUSTER, _MOST_CLUSTERS = 25, 40  # documents a cluster, clusters of a calibration
_BATCHES = 8  # of a slice, where slices are cut


class Slicing(NamedTuple):
    """Slices, and what they were made by: a column, or :data:`CLUSTERS`."""

    by: str
    slices: list[Slice]


def confidence_threshold(run: Run) -> float:
    """ATC's threshold: above it lies a share of the labelled documents that equals their accuracy.

    Source: Garg et al., "Leveraging unlabeled data to predict out-of-distribution performance", ICLR 2022.
    """
    rows = run.labelled
    return float(np.quantile(run.confidence.top_probability[rows], 1.0 - run.score[rows].mean()))


def available_features(run: Run, rows: Rows) -> list[str]:
    """The features that every one of these documents has."""
    have = {
        "dispersion": True,
        "confidence": _known(run.confidence.top_probability[rows]),
        "atc": _known(run.confidence.top_probability[rows]),
        "log_perplexity": _known(np.log(np.where(run.perplexity[rows] > 0, run.perplexity[rows], np.nan))),
        "prompt_tokens": _known(run.length[rows]),
    }
    return [name for name in FEATURES if have[name]]


def slice_features(run: Run, parts: Sequence[Rows], names: Sequence[str], threshold: float) -> Array:
    """Features of sets of rows, shape (parts, names); NaN where a document lacks one or a set has no pair."""
    confidence = run.confidence.top_probability
    with np.errstate(divide="ignore"):
        log_perplexity = np.log(run.perplexity)
    by_document = {
        "confidence": confidence,
        "atc": np.where(np.isnan(confidence), np.nan, confidence > threshold),
        "log_perplexity": np.where(np.isfinite(log_perplexity), log_perplexity, np.nan),
        "prompt_tokens": run.length,
    }
    values = np.full((len(parts), len(names)), np.nan)
    for j, name in enumerate(names):
        if name == "dispersion":
            enough = [i for i, rows in enumerate(parts) if len(rows) > 1]
            values[enough, j] = run.vectors.dispersions([parts[i] for i in enough])
        else:
            values[:, j] = [by_document[name][rows].mean() if len(rows) else np.nan for rows in parts]
    return values


def labelled_slices(run: Run, by: str | None = None, *, seed: int = 0) -> Slicing:
    """The slices to learn from: by ``by``; else subjects, else categories, else tasks, else clusters.

    Only labelled documents count, and slices of at least :data:`FEWEST_DOCUMENTS` of them.

    Raises:
        UsageError: Fewer than :data:`FEWEST_SLICES` of them.
    """
    rows = run.labelled
    for name in (by,) if by else ("subject", "category", "task"):
        if name == CLUSTERS:
            break
        slices = slices_of(run, name, rows) if by else _valued(run, name, rows)
        large = [part for part in slices if len(part.rows) >= FEWEST_DOCUMENTS]
        if len(large) >= FEWEST_SLICES:
            return Slicing(name, large)
        if by:
            raise UsageError(
                f"{name!r} makes {len(large)} slices of at least {FEWEST_DOCUMENTS} labelled documents, and "
                f"{FEWEST_SLICES} are needed; label more, or cut by vectors: --slice={CLUSTERS}"
            )
    count = min(len(rows) // _CLUSTER, _MOST_CLUSTERS)
    large = []
    if count >= FEWEST_SLICES:
        slices = vector_clusters(run, rows, count, seed=seed)
        large = [part for part in slices if len(part.rows) >= FEWEST_DOCUMENTS]
    if len(large) < FEWEST_SLICES:
        raise UsageError(
            f"the {len(rows)} labelled documents make fewer than {FEWEST_SLICES} slices or clusters of at "
            f"least {FEWEST_DOCUMENTS}; label {FEWEST_SLICES * _CLUSTER} documents or more"
        )
    return Slicing(CLUSTERS, large)


def slices_of(run: Run, by: str, rows: Rows) -> list[Slice]:
    """The slices of one column, with the documents of ``rows`` only.

    Raises:
        UsageError: No such column, or one that cannot slice.
    """
    parts = [Slice(part.name, np.intersect1d(part.rows, rows)) for part in by_column(run, by)]
    return [part for part in parts if len(part.rows)]


def vector_clusters(run: Run, rows: Rows, count: int, *, seed: int = 0) -> list[Slice]:
    """k-means clusters of these documents by their vectors."""
    labels, _ = clustered(run.vectors.rows[rows], max(count, 1), seed=seed)
    return [
        Slice(f"cluster {k + 1}", np.sort(rows[labels == label])) for k, label in enumerate(np.unique(labels))
    ]


def batches_of(part: Slice, size: int | None, rng: np.random.Generator) -> list[Rows]:
    """A slice as it is, or up to eight random batches of ``size`` of its documents, disjoint."""
    if size is None:
        return [part.rows]
    order = rng.permutation(part.rows)
    return [order[i * size : (i + 1) * size] for i in range(min(len(order) // size, _BATCHES))]


def _valued(run: Run, name: str, rows: Rows) -> list[Slice]:
    values = run.documents[name].iloc[rows].tolist()
    return [Slice(part.name, rows[part.rows]) for part in by_value(values)]


def _known(values: Array) -> bool:
    return bool(len(values)) and not np.isnan(values).any()
