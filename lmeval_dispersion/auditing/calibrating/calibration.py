"""A calibration's worth, compared with labels: the report of ``dispersion calibrate``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmeval_dispersion.auditing.calibrating.calibrator import (
    CLUSTERS,
    TRIVIAL,
    Calibrator,
    Estimator,
    fit_calibrator,
    no_gain,
)
from lmeval_dispersion.auditing.figures import RunReport, predicted_against_true
from lmeval_dispersion.auditing.run import (
    Answers,
    Array,
    AuditRun,
    Missing,
    answers_of,
    labels_of,
    read_run,
    rows_where,
)
from lmeval_dispersion.report import Chart, Table
from lmeval_dispersion.report.declared import count
from lmeval_dispersion.statistics import NORMAL_975

_HALF_WIDTH = 0.05  # half width that `labels_enough` aims at


@dataclass(frozen=True)
class HeldOut:
    """A slice with its estimate by the fit to the others, whose errors are printed."""

    slice: str
    documents: int
    predicted: float
    true: float


@dataclass(frozen=True, repr=False)
class Calibration(RunReport):
    """A fitted calibrator, with the errors of its estimates on held-out slices.

    Attributes:
        by, slices, documents_a_slice: The column of the slices, their number, fewest and most documents.
        documents, accuracy: The number of labelled documents, and their accuracy in [0, 1].
        better: Whether the estimate beats the labelled accuracy alone.
        level, half_width: The intervals' level in (0, 1), and half width for the mean slice.
        cautions: Why right and wrong answers support no conclusion.
        estimators, points: Errors and worth of every estimate; every slice with its estimate.
        enough_for_five_points: Random labels of the whole run for ± 5 points.
        calibrator: The fit, which ``dispersion predict`` reads from a file.
    """

    template = "calibration.jinja"
    schema = "dispersion-calibration/1"

    model: str
    revision: str | None
    layer: str
    tasks: Mapping[str, Any]
    by: str
    slices: int
    documents_a_slice: Sequence[int]
    documents: int
    accuracy: float
    better: bool
    level: float
    half_width: float
    cautions: Sequence[str]
    estimators: Sequence[Estimator]
    enough_for_five_points: int
    points: Sequence[HeldOut]
    _calibrator: Calibrator

    @property
    def calibrator(self) -> Calibrator:
        """The fit, which ``dispersion predict`` reads from a file."""
        return self._calibrator

    def tables(self) -> dict[str, Table]:
        """Every estimate with its errors and worth."""
        smallest, largest = self.documents_a_slice
        sizes = str(smallest) if smallest == largest else f"{smallest} to {largest}"
        caption = f"Errors on {self.where} of {sizes} documents, held out"
        return {"estimators": Table.of(self.estimators, caption, name="estimators")}

    def charts(self) -> dict[str, Chart]:
        """The estimate of every slice against its accuracy."""
        if self.cautions:
            return {}
        return {
            "points": Chart(
                predicted_against_true(self.points),
                "Accuracy estimated without a slice's labels against its true accuracy",
                f"{len(self.points)} slices, each estimated by a fit to the others: {against_trivial(self)}.",
                "On the dashed line the estimate is right. An upright line is the labelled accuracy "
                "for every slice. True accuracies scatter by sampling, most in small slices.",
            ),
        }

    @property
    def where(self) -> str:
        """The number of slices in words."""
        if self.by == CLUSTERS:
            return f"{self.slices} clusters of vectors"
        return count(self.slices, self.by, "categories" if self.by == "category" else "")

    def context(self) -> dict[str, Any]:
        """Words for the sentences."""
        ours, *others, alone = self.estimators
        other = next((row for row in others if row.better), None)
        return {"ours": ours, "alone": alone, "other": other, "no_gain": no_gain(self._calibrator)}


def calibrate(
    run: AuditRun | str | Path,
    *,
    where: str | None = None,
    layer: str | None = None,
    by: str | None = None,
    seed: int = 0,
    answers: Answers | None = None,
) -> Calibration:
    """A calibrator fitted to a labelled run, with its report: what ``dispersion calibrate`` writes.

    Args:
        run: Folder of the store, or a folder that holds the stores of one run.
        where: Learn only from documents that satisfy this, such as ``"subject in ('anatomy', 'virology')"``.
        layer: Layer of the vectors; default: the store's own.
        by: The column that makes the slices; default: subjects, else categories, tasks, clusters of vectors.
        seed: Seed of all draws.
        answers: The model's answers, if already analysed.

    Raises:
        UsageError: Too few labelled documents or slices, or labels all right or all wrong.
    """
    run = read_run(run, layer)
    if where is not None:
        run = labels_of(run, rows_where(run, where))
    calibrator, estimators = fit_calibrator(run, by=by, seed=seed)
    pairs, (_, held_out) = calibrator.pairs, calibrator.held_out
    typical = calibrator.applied(pairs.dispersion[:1], pairs.documents.mean(keepdims=True))
    return Calibration(
        model=calibrator.model,
        revision=calibrator.revision,
        layer=calibrator.layer,
        tasks=calibrator.tasks,
        by=calibrator.by,
        slices=len(calibrator.slices),
        documents_a_slice=calibrator.documents_a_slice,
        documents=calibrator.labelled.documents,
        accuracy=calibrator.labelled.accuracy,
        better=calibrator.beats_trivial,
        level=calibrator.level,
        half_width=float(typical.half_width[0]),
        cautions=(answers or answers_of(run)).cautions,
        estimators=estimators,
        enough_for_five_points=labels_enough(run.score[run.labelled]),
        points=[
            HeldOut(part.slice, part.documents, float(estimate), part.accuracy)
            for part, estimate in zip(calibrator.slices, held_out, strict=True)
        ],
        _calibrator=calibrator,
    )


def against_trivial(calibration: Calibration) -> str:
    """The estimate's error, compared with the labelled accuracy alone."""
    ours, alone = calibration.estimators[0].mae, calibration.estimators[-1].mae
    if calibration.better:
        return f"{ours:.1f} points off on average, better than the {TRIVIAL} ({alone:.1f})"
    return (
        f"no better than the trivial predictor, the {TRIVIAL} ({ours:.1f} and {alone:.1f} points off on "
        "average)"
    )


def calibration_sentence(calibration: Calibration | Missing) -> str:
    """Whether accuracy can be read off unlabelled slices, for an audit."""
    if isinstance(calibration, Missing):
        reason = calibration.missing
        return f"Whether accuracy can be read off unlabelled slices could not be tested: {reason}."
    ours, alone = calibration.estimators[0], calibration.estimators[-1]
    found = against_trivial(calibration)
    opening = f"On {calibration.where} held out, the accuracy read off dispersion is {found}."
    if not calibration.better:
        return opening
    return (
        f"{opening} That is worth {ours.worth:.0f} labelled documents a slice (95 % {ours.worth_low:.0f} to "
        f"{ours.worth_high:.0f}), the labelled accuracy alone {alone.worth:.0f}."
    )


def labels_enough(scores: Array) -> int:
    """Labels of the whole run for a mean within 5 points in 95 % of draws, by the normal law."""
    n, variance = len(scores), float(scores.var(ddof=1))
    return min(n, math.ceil(variance / ((_HALF_WIDTH / NORMAL_975) ** 2 + variance / n)))
