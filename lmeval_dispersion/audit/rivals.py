"""The rivals of dispersion on a run: spectrum metrics of its vectors, and which orders its slices best.

The metrics are those of :mod:`lmeval_dispersion.geometry.spectrum`, on the vectors as the model gave them:
unit rows times their lengths, both of which every store keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.audit.run import Run
from lmeval_dispersion.audit.slices import Slice, all_documents, slice_row
from lmeval_dispersion.errors import StoreError
from lmeval_dispersion.geometry import SPECTRUM, jackknife_groups, spectrum_estimates
from lmeval_dispersion.geometry.ordering import DISPERSION, ordering
from lmeval_dispersion.statistics import FEWEST_PAIRS

Rows = NDArray[np.int64]

FEWEST_DOCUMENTS = 4  # of a slice, for values with an error


def raw_vectors(run: Run) -> NDArray[np.float32]:
    """The vectors of a run's documents at their own lengths, shape (n, d).

    Raises:
        StoreError: The store's lengths do not fit its vectors.
    """
    norms = run.store.norms(run.layer)
    norms = norms[np.isfinite(norms) & (norms > 0)]
    if len(norms) != len(run.vectors):
        raise StoreError(
            f"expected {len(run.vectors)} lengths of vectors in {run.store.path}, got {len(norms)}; "
            "the store is damaged, run it again"
        )
    unit = run.vectors.rows + run.vectors.mean.astype(np.float32)
    return np.asarray(unit * norms[:, None].astype(np.float32))


def rivals_report(run: Run, slicings: dict[str, list[Slice]], *, seed: int = 0) -> dict[str, Any]:
    """Every metric of all documents and of each slice, and which of them orders the slices best by accuracy.

    The slices are those of the first way to slice the run that makes eight of four labelled documents,
    else of the first one.
    """
    raw = raw_vectors(run)
    n, d = raw.shape
    by = next((name for name, parts in slicings.items() if len(_usable(run, parts)) >= FEWEST_PAIRS), None)
    by = by or next(iter(slicings), None)
    parts = slicings[by] if by else []
    rows = [rival_row(run, raw, part) for part in parts]
    usable = [row for row in rows if row["documents"] >= FEWEST_DOCUMENTS and row["labelled"] >= 3]
    metrics = {name: [row[name] for row in usable] for name in (DISPERSION, *SPECTRUM)}
    return {
        "by": by,
        "groups": jackknife_groups(n, d),
        "overall": rival_row(run, raw, all_documents(run)),
        "slices": rows,
        "ordering": ordering(
            metrics,
            [row["accuracy"] for row in usable],
            [row["labelled"] for row in usable],
            seed=seed,
        ),
    }


def rival_row(run: Run, raw: NDArray[np.float32], part: Slice) -> dict[str, Any]:
    """One slice with its accuracy and every metric with its error; NaN where there are too few documents."""
    row = slice_row(run, part)
    keys = ("slice", "documents", "labelled", "dispersion", "dispersion_se", "accuracy", "reason")
    found = {key: row[key] for key in keys}
    if len(part.rows) < FEWEST_DOCUMENTS:
        nan = float("nan")
        found |= {f"{name}{suffix}": nan for name in SPECTRUM for suffix in ("", "_se")}
        found["reason"] = f"{FEWEST_DOCUMENTS} documents are needed, got {len(part.rows)}"
        return found
    for name, estimate in spectrum_estimates(raw[part.rows]).items():
        found |= {name: estimate.value, f"{name}_se": estimate.se}
    return found


def _usable(run: Run, parts: Sequence[Slice]) -> list[Slice]:
    return [part for part in parts if (~np.isnan(run.score[part.rows])).sum() >= FEWEST_DOCUMENTS]
