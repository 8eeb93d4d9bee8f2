"""The report of ``dispersion calibrate --from``: each slice's estimated accuracy, or why it has none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from lmeval_dispersion.arguments import takes
from lmeval_dispersion.auditing.calibrating.arguments import Predicting
from lmeval_dispersion.auditing.calibrating.calibration import Calibration
from lmeval_dispersion.auditing.calibrating.calibrator import (
    CLUSTERS,
    Applied,
    Calibrator,
    check_fits,
    check_worth,
    cut_to,
    documents_digest,
    rows_of_ids,
    vector_clusters,
)
from lmeval_dispersion.auditing.figures import RunReport, both_ends
from lmeval_dispersion.auditing.run import AuditRun, Rows, rows_where
from lmeval_dispersion.auditing.slices import Slice, by_column, known_mean
from lmeval_dispersion.errors import UsageError, count
from lmeval_dispersion.report import Col, Table
from lmeval_dispersion.statistics import student_quantile
from lmeval_dispersion.store import read_store


@dataclass(frozen=True)
class Prediction:
    """The estimated accuracy of one slice.

    Attributes:
        slice: Name of the slice.
        documents: Number of documents in the slice.
        predicted: Estimated accuracy in [0, 1]; None without an estimate.
        low: Lower end of the interval of ``predicted``; None without an estimate.
        high: Upper end of that interval; None without an estimate.
        true: Mean score of the slice's documents; None if they have no labels.
        dispersion: Mean cosine distance over all pairs of the slice's documents; None with fewer
            than two documents.
        reason: Why the slice has no estimate; None if it has one.
        too_small: Whether there is no estimate because the slice has fewer documents than the
            smallest labelled slice.
    """

    slice: Annotated[str, Col("Slice")]
    documents: Annotated[int, Col("Documents", "d", drop=4)]
    predicted: Annotated[float | None, Col("Estimate", ".3f", dots="page", reach="low high")] = None
    low: Annotated[float | None, Col("from", ".3f")] = None
    high: Annotated[float | None, Col("to", ".3f")] = None
    true: Annotated[float | None, Col("True", ".3f", drop=3)] = None
    dispersion: Annotated[float | None, Col("Dispersion", ".4f", drop=2)] = None
    reason: Annotated[str | None, Col("No estimate because", drop=1)] = None
    too_small: bool = False


@dataclass(frozen=True, repr=False)
class Predictions(RunReport):
    """The estimated accuracy of every slice, and of all slices together.

    Attributes:
        model: Name of the model.
        layer: Layer of the vectors.
        by: Column that the documents are sliced by, or ``cluster`` for clusters of vectors.
        labelled_accuracy: Accuracy of the documents to which the calibrator was fitted, in [0, 1].
        notes: Sentences on documents that were left out, and on what could not be checked.
        level: Confidence level of the intervals, such as 0.95; lower if the calibrator was fitted
            to fewer than 19 slices.
        exchangeable: Whether the slices count as exchangeable with the labelled slices, as the
            intervals require: they are slices by the same column, not clusters, and ``shifted`` is
            false.
        shifted: Whether the dispersions of the slices differ so much from those of the labelled
            slices that no slice has an estimate.
        mae: The calibrator's mean absolute error on held-out slices, in percentage points.
        trivial_mae: The same for the labelled accuracy alone, that is, for taking the mean score of
            all other slices.
        slices: The estimates. If there are two slices or more, all slices together come first.
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
    shifted: bool
    mae: float
    trivial_mae: float
    slices: Sequence[Prediction]

    def tables(self) -> dict[str, Table]:
        """Return the table ``slices``: each slice's estimate with its interval.

        The true accuracy is shown for slices with labels.
        """
        headings = {"slice": self.by.capitalize(), "low": f"{100 * self.level:.0f} % from"}
        caption = f"Estimated accuracy by {self.by}"
        table = Table.of(self.slices, caption, name="slices", headings=headings)
        return {"slices": replace(table, brief=replace(table, excerpt=both_ends(len(self.slices))))}

    def context(self) -> dict[str, Any]:
        """Return the template's variables.

        They are ``level``, the level of the intervals as text; ``known``, the number of rows with
        both an estimate and a true accuracy; and ``inside``, the number of these rows whose true
        accuracy lies in the interval.
        """
        known = 0
        inside = 0
        for row in self.slices:
            if row.true is not None and row.low is not None and row.high is not None:
                known += 1
                inside += row.low <= row.true <= row.high
        return {"level": f"{100 * self.level:.0f} %", "known": known, "inside": inside}


@takes(Predicting)
def predict(asked: Predicting) -> Predictions:
    """Estimate each slice's accuracy from its dispersion, as ``dispersion calibrate --from`` does.

    Documents to which the calibrator was fitted are left out. The ``reason`` of a slice says why it
    has no estimate.

    Raises:
        UsageError: The calibrator cannot be read, does not apply to the run, or does not estimate
            better than the accuracy of the labelled documents; the run has no vectors; ``slice``
            names no column; ``where`` is invalid or true for no document; or no document is left to
            estimate.
        StoreError: The run cannot be read.
    """
    name: str | Path = "the calibrator"
    if isinstance(asked.calibrator, Calibration):
        calibrator = asked.calibrator.calibrator
    elif isinstance(asked.calibrator, Calibrator):
        calibrator = asked.calibrator
    else:
        name = asked.calibrator
        calibrator = Calibrator.read(name)
    run = _run_for(calibrator, asked.run)
    notes = check_fits(calibrator, run)
    check_worth(calibrator, name)
    rows, fitted = _unlabelled_rows(calibrator, run, asked.where)
    if fitted:
        notes.append(
            "Left out, as the calibrator was fitted to their labels: "
            f"{count(fitted, 'document')} of this run."
        )
    by = asked.slice or calibrator.by
    parts = _slices(calibrator, run, rows, by)
    if not parts:
        raise UsageError(
            f"no document to estimate has a value in the column {by!r}; choose another column"
        )
    blank = [_without_estimate(run, part) for part in parts]
    known = [row.dispersion for row in blank if row.dispersion is not None]
    shifted = calibrator.differs(np.array(known))
    applied = calibrator.applied(
        np.array([row.dispersion or 0.0 for row in blank]),
        np.array([row.documents for row in blank]),
    )
    slices = []
    for i, row in enumerate(blank):
        if shifted:
            slices.append(
                replace(
                    row, reason="the slices' dispersions are unlike those of the labelled slices"
                )
            )
        else:
            slices.append(_estimated(row, calibrator, applied, i))
    whole = _whole(run, calibrator, parts, slices, applied)
    mae, trivial_mae = calibrator.errors
    return Predictions(
        model=run.store.model,
        layer=run.layer,
        by=by,
        labelled_accuracy=calibrator.labelled.accuracy,
        notes=notes,
        level=calibrator.level,
        exchangeable=by == calibrator.by and by != CLUSTERS and not shifted,
        shifted=shifted,
        mae=mae,
        trivial_mae=trivial_mae,
        slices=[whole, *slices] if len(slices) > 1 else [whole],
    )


def _run_for(calibrator: Calibrator, run: AuditRun | str | Path) -> AuditRun:
    """The run in the calibrator's layer; another model is refused before reading vectors."""
    if isinstance(run, AuditRun):
        return run
    store = read_store(run)
    layer = calibrator.layer
    if store.model == calibrator.model and layer not in store.layers:
        vectors = "no vectors"
        if store.layers:
            vectors = f"vectors of {', '.join(store.layers)} only"
        raise UsageError(
            f"this calibrator was fitted on the layer {layer!r}, but the run has {vectors}; make "
            "the run's store again with this layer (`dispersion_layers` in the `--metadata` of "
            "lm-eval, or `--layer` of `dispersion embed`)"
        )
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
            "the calibrator was fitted to the labels of all documents whose accuracy is to be "
            f"estimated ({count(len(rows), 'document')}); name another run, or calibrate again on a "
            "part of this run (`--where`)"
        )
    return left, len(fitted)


def _slices(calibrator: Calibrator, run: AuditRun, rows: Rows, by: str) -> list[Slice]:
    if by != CLUSTERS:
        return cut_to(by_column(run, by), rows)
    a_slice = float(np.mean([part.documents for part in calibrator.slices]))
    return vector_clusters(run, rows, round(len(rows) / a_slice), seed=calibrator.seed)


def _without_estimate(run: AuditRun, part: Slice) -> Prediction:
    true = known_mean(run.score[part.rows])
    dispersion = None
    if len(part.rows) > 1:
        dispersion = float(run.vectors.dispersions([part.rows])[0])
    return Prediction(
        part.name,
        len(part.rows),
        true=None if math.isnan(true) else true,
        dispersion=dispersion,
    )


def _estimated(row: Prediction, calibrator: Calibrator, applied: Applied, i: int) -> Prediction:
    """Slice ``i`` with its estimate, or the reason for none."""
    fewest = calibrator.documents_a_slice[0]
    if row.documents < fewest or row.dispersion is None:
        documents = count(row.documents, "document")
        reason = f"it has {documents}, and the smallest labelled slice has {fewest}"
        return replace(row, reason=reason, too_small=True)
    low, high = calibrator.range
    if not low <= row.dispersion <= high:
        reason = f"its dispersion of {row.dispersion:.4g} is outside the range for estimates"
        return replace(row, reason=f"{reason}, {low:.4g} to {high:.4g}")
    value, low, high = (float(values[i]) for values in applied[:3])
    return replace(row, predicted=value, low=low, high=high)


def _whole(
    run: AuditRun,
    calibrator: Calibrator,
    parts: Sequence[Slice],
    slices: Sequence[Prediction],
    applied: Applied,
) -> Prediction:
    """All slices with an estimate together: their estimates weighted by documents."""
    if len(slices) == 1:
        return replace(slices[0], slice="all documents")
    used = [i for i, row in enumerate(slices) if row.reason is None]
    everything = range(len(parts))
    name = "all documents"
    if 0 < len(used) < len(slices):
        name = f"{len(used)} of {len(slices)} slices"
    rows = np.sort(np.concatenate([parts[i].rows for i in used or everything]))
    whole = _without_estimate(run, Slice(name, rows))
    if not used:
        return replace(whole, reason="no slice can be estimated")
    documents = np.array([slices[i].documents for i in used])
    weight = documents / documents.sum()
    estimate = float(weight @ applied.value[used])
    shared = applied.folds[:, used] @ weight
    own = float(np.square(weight * applied.size[used]).sum())
    variance = own + (len(shared) - 1) * float(shared.var())
    # A sum cannot have a higher level than its slices.
    half = student_quantile((1 + calibrator.level) / 2, len(shared) - 1) * math.sqrt(variance)
    low = max(estimate - half, 0.0)
    return replace(whole, predicted=estimate, low=low, high=min(estimate + half, 1.0))
