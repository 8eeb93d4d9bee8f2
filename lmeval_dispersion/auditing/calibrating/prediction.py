"""The accuracy of a run's slices, estimated by a calibrator, or why a slice has no estimate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from lmeval_dispersion.auditing.calibrating.calibration import Calibration
from lmeval_dispersion.auditing.calibrating.calibrator import (
    CLUSTERS,
    FIGURES,
    Applied,
    Calibrator,
    Validation,
    among,
    check_fits,
    check_worth,
    documents_digest,
    fitted_elsewhere,
    rows_of_ids,
    slice_figures,
    vector_clusters,
)
from lmeval_dispersion.auditing.figures import RunReport, both_ends
from lmeval_dispersion.auditing.run import Array, AuditRun, Rows, rows_where
from lmeval_dispersion.auditing.slices import Slice, by_column
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.report import Chart, Col, Table
from lmeval_dispersion.report.vega import dots, numeric
from lmeval_dispersion.statistics import student_quantile
from lmeval_dispersion.store import read_store

_KNOWN = {  # crosses at known accuracies
    "transform": [{"filter": "isValid(datum.true)"}],
    "mark": {"type": "point", "shape": "cross", "angle": 45, "filled": True, "color": "var(--series-2)"},
    "encoding": {"x": numeric("true")},
}


@dataclass(frozen=True)
class Prediction:
    """One slice; ``reason`` explains a missing estimate."""

    slice: Annotated[str, Col("Slice")]
    documents: Annotated[int, Col("Documents", "d", drop=4)]
    predicted: Annotated[float | None, Col("Estimate", ".3f")] = None
    low: Annotated[float | None, Col("from", ".3f")] = None
    high: Annotated[float | None, Col("to", ".3f")] = None
    true: Annotated[float | None, Col("True", ".3f", drop=3)] = None
    dispersion: Annotated[float | None, Col("Dispersion", ".4f", drop=2)] = None
    confidence: Annotated[float | None, Col("Confidence", ".3f", drop=5)] = None
    reason: Annotated[str | None, Col("No estimate because", drop=1)] = None
    too_small: bool = False


@dataclass(frozen=True, repr=False)
class Predictions(RunReport):
    """The estimated accuracy of every slice; of several, the whole first.

    Attributes:
        level: Of the intervals, in (0, 1).
        exchangeable: Whether the slices were made like the labelled ones, as the intervals require.
        figure: What the calibrator reads accuracy off: ``dispersion`` or ``confidence``.
        shifted: Whether the slices as a whole differ from the labelled ones in that figure.
        beats_trivial: Whether the calibrator beat the labelled accuracy alone; else that is the estimate.
        validation: The calibrator's errors in points on held-out slices.
    """

    template = "predictions.jinja"
    schema = "dispersion-predictions/3"
    libraries = ("numpy", "pandas")
    each = "slices"

    model: str
    layer: str
    by: str
    labelled_accuracy: float
    notes: Sequence[str]
    level: float
    exchangeable: bool
    figure: str
    shifted: bool
    beats_trivial: bool
    validation: Validation
    slices: Sequence[Prediction]

    def tables(self) -> dict[str, Table]:
        """The slices with their estimates, intervals and, where labelled, accuracies."""
        headings = {"slice": self.by.capitalize(), "low": f"{100 * self.level:.0f} % from"}
        caption = f"Estimated accuracy by {self.by}"
        table = Table.of(self.slices, caption, name="slices", headings=headings)
        return {"slices": replace(table, brief=replace(table, excerpt=both_ends(len(self.slices))))}

    def charts(self) -> dict[str, Chart]:
        """The estimates with their intervals; empty without estimates."""
        rows = [row for row in self.slices if row.reason is None]
        if not rows:
            return {}
        known = [row for row in rows if row.true is not None]
        inside = sum((row.low or 0) <= (row.true or 0) <= (row.high or 0) for row in known)
        coverage = f"{inside} of {len(known)} known accuracies lie in their interval. " if known else ""
        level = f"{100 * self.level:.0f} %"
        title = f"accuracy, with {level} interval"
        return {
            "estimates": Chart(
                dots(rows, "slice", "predicted", ("low", "high"), title, _KNOWN, line=self.labelled_accuracy),
                "Estimated accuracy, slice by slice",
                f"{coverage}The labelled documents had {self.labelled_accuracy:.3f}.",
                f"Dots are estimates with their {level} intervals, "
                f"{'crosses the accuracies that are known, ' if known else ''}"
                "the dashed line is the labelled accuracy.",
                name="estimates",
            )
        }

    def context(self) -> dict[str, Any]:
        """Words for the sentences."""
        return {
            "level": f"{100 * self.level:.0f} %",
            "figure": FIGURES[self.figure],
        }


def predict(
    calibrator: Calibration | Calibrator | str | Path,
    run: AuditRun | str | Path,
    *,
    where: str | None = None,
    by: str | None = None,
    force: bool = False,
) -> Predictions:
    """Estimate the accuracy of every slice from its figure, as ``dispersion predict`` does.

    The calibrator's own documents are left out; a slice without an estimate has a reason.

    Args:
        calibrator: Of :func:`lmeval_dispersion.calibrate`, or the file of ``dispersion calibrate``.
        run: Folder of the store, or a folder that holds the stores of one run.
        where: Estimate only documents that satisfy this.
        by: Column of the documents that makes the slices; default: that of the calibrator.
        force: Whether to estimate although the calibrator did not beat the labelled accuracy, or the slices
            differ from the labelled ones.

    Raises:
        UsageError: The calibrator does not fit the run or did not beat the labelled accuracy, or there is no
            such column.
    """
    name: str | Path = "the calibrator"
    if isinstance(calibrator, Calibration):
        calibrator = calibrator.calibrator
    elif not isinstance(calibrator, Calibrator):
        name, calibrator = calibrator, Calibrator.read(calibrator)
    run = _run_for(calibrator, run)
    notes = check_fits(calibrator, run)
    if not force:
        check_worth(calibrator, name)
    rows, fitted = _unlabelled_rows(calibrator, run, where)
    if fitted:
        notes.append(f"{fitted} documents of this run were labelled for the calibrator and are left out.")
    by = by or calibrator.by
    parts = _slices(calibrator, run, rows, by)
    if not parts:
        raise UsageError(f"no document to estimate has a value of {by!r}; choose another column")
    figures = slice_figures(run, [part.rows for part in parts], calibrator.figure)
    shifted = calibrator.differs(figures[~np.isnan(figures)])
    unlike = f"unlike the labelled slices in {FIGURES[calibrator.figure]}" if shifted and not force else None
    documents = np.array([len(part.rows) for part in parts])
    applied = calibrator.applied(np.nan_to_num(figures), documents)
    slices = [
        _prediction(run, part, calibrator, applied, i, unlike, float(figures[i]))
        for i, part in enumerate(parts)
    ]
    whole = _whole(run, parts, slices, applied, documents)
    return Predictions(
        model=str(run.store.manifest.get("model")),
        layer=run.layer,
        by=by,
        labelled_accuracy=calibrator.labelled.accuracy,
        notes=notes,
        level=calibrator.level,
        exchangeable=by == calibrator.by and by != CLUSTERS and not shifted,
        figure=calibrator.figure,
        shifted=shifted,
        beats_trivial=calibrator.beats_trivial,
        validation=calibrator.validation,
        slices=[whole, *(slices if len(slices) > 1 else [])],
    )


def _run_for(calibrator: Calibrator, run: AuditRun | str | Path) -> AuditRun:
    """The run in the calibrator's layer; another model is refused before reading vectors."""
    if isinstance(run, AuditRun):
        return run
    store, layer = read_store(run), calibrator.layer
    if store.model == calibrator.model and layer not in store.layers:
        raise fitted_elsewhere(f"for layer {layer!r}, and the run has {', '.join(store.layers)}")
    return AuditRun.of(store, layer if layer in store.layers else None)


def _unlabelled_rows(calibrator: Calibrator, run: AuditRun, where: str | None) -> tuple[Rows, int]:
    """The rows to estimate, without those the calibrator was fitted on, and the number of the latter."""
    rows = np.arange(len(run)) if where is None else rows_where(run, where)
    fitted = np.empty(0, dtype=np.int64)
    if calibrator.labelled.documents_sha256 == documents_digest(run):
        fitted = np.intersect1d(rows, rows_of_ids(run, calibrator.labelled.doc_ids))
    left = np.setdiff1d(rows, fitted)
    if not len(left):
        raise UsageError(
            f"the calibrator was fitted on the labels of all {len(rows)} documents; name another run, or "
            "calibrate on a part of this one"
        )
    return left, len(fitted)


def _slices(calibrator: Calibrator, run: AuditRun, rows: Rows, by: str) -> list[Slice]:
    if by != CLUSTERS:
        return among(by_column(run, by), rows)
    a_slice = float(np.mean([part.documents for part in calibrator.slices]))
    return vector_clusters(run, rows, round(len(rows) / a_slice), seed=calibrator.seed)


def _prediction(
    run: AuditRun,
    part: Slice,
    calibrator: Calibrator,
    applied: Applied,
    i: int,
    unlike: str | None,
    figure: float,
) -> Prediction:
    """The estimate of slice ``i``, or the reason for none."""
    row, n = _empty(run, part), len(part.rows)
    if unlike:
        return replace(row, reason=unlike)
    fewest = calibrator.documents_a_slice[0]
    if n < fewest:
        reason = f"{n} documents, and the smallest fitted slice has {fewest}"
        return replace(row, reason=reason, too_small=True)
    if math.isnan(figure):
        return replace(row, reason=f"some of its documents have no {calibrator.figure}")
    low, high = calibrator.range
    if not low <= figure <= high:
        name = FIGURES[calibrator.figure]
        reason = f"outside the fitted range: {name} {figure:.4g}, fitted from {low:.4g} to {high:.4g}"
        return replace(row, reason=reason)
    low, high = applied.interval(i)
    return replace(row, predicted=float(applied.value[i]), low=low, high=high)


def _whole(
    run: AuditRun, parts: Sequence[Slice], slices: Sequence[Prediction], applied: Applied, documents: Rows
) -> Prediction:
    """All slices with an estimate together: their estimates weighted by documents."""
    if len(slices) == 1:
        return replace(slices[0], slice="all documents")
    used = [i for i, row in enumerate(slices) if row.reason is None]
    rows = np.sort(np.concatenate([parts[i].rows for i in used or range(len(parts))]))
    if not used:
        return replace(_empty(run, Slice("all documents", rows)), reason="no slice can be estimated")
    weight = documents[used] / documents[used].sum()
    estimate = float(weight @ applied.value[used])
    shared = applied.folds[:, used] @ weight
    variance = float(np.square(weight * applied.size[used]).sum()) + (len(shared) - 1) * float(shared.var())
    # A sum cannot have a higher level than its slices.
    half = student_quantile((1 + applied.level) / 2, len(shared) - 1) * math.sqrt(variance)
    name = "all documents" if len(used) == len(slices) else f"{len(used)} of {len(slices)} slices"
    return replace(
        _empty(run, Slice(name, rows)),
        predicted=estimate,
        low=max(estimate - half, 0.0),
        high=min(estimate + half, 1.0),
    )


def _empty(run: AuditRun, part: Slice) -> Prediction:
    known = run.score[part.rows]
    known = known[~np.isnan(known)]
    return Prediction(
        part.name,
        len(part.rows),
        true=float(known.mean()) if known.size else None,
        dispersion=known_or_none(slice_figures(run, [part.rows], "dispersion")),
        confidence=known_or_none(slice_figures(run, [part.rows], "confidence")),
    )


def known_or_none(values: Array) -> float | None:
    """One number, None where it is NaN."""
    return None if np.isnan(values[0]) else float(values[0])
