"""A calibration's worth, compared with labels: the report of ``dispersion calibrate``.

Labels of k documents, drawn at random without replacement, estimate an accuracy by their mean. Where scores
are right or wrong the number of right ones is hypergeometric, and the expected error and the interval of the
estimate are exact sums over its distribution. Other scores have the same mean squared error by its closed
form v (1/k - 1/n) (Cochran, Sampling Techniques, 1977, 2.6); their absolute error and interval come from
draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from lmeval_dispersion.auditing.calibrating.calibrator import (
    CLUSTERS,
    FIGURES,
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
    answers_of,
    labels_of,
    read_run,
    rows_where,
)
from lmeval_dispersion.report import Chart, Col, Table
from lmeval_dispersion.report.declared import count
from lmeval_dispersion.statistics import NORMAL_975

LABELS = (10, 20, 50, 100, 200, 500, 1000)
_DRAWS = 4000  # for scores between right and wrong
_HALF_WIDTH = 0.05  # half width that `labels_enough` aims at


@dataclass(frozen=True)
class HeldOut:
    """A slice with its estimate by the fit to the others, whose errors are printed."""

    slice: str
    documents: int
    predicted: float
    true: float


@dataclass(frozen=True)
class LabelError:
    """Expected error in points with a number of labels, and the central 95 % of draws."""

    labels: Annotated[int, Col("Labels", "d")]
    mae: Annotated[float, Col("Expected error (points)", ".2f")]
    rmse: Annotated[float, Col("RMSE", ".2f", drop=1)]
    low: Annotated[float | None, Col("95 % of draws from", ".1%")] = None
    high: Annotated[float | None, Col("to", ".1%")] = None


@dataclass(frozen=True, repr=False)
class Calibration(RunReport):
    """A fitted calibrator, with the errors of its estimates on held-out slices and of labels.

    Attributes:
        by, slices, documents_a_slice: The column of the slices, their number, fewest and most documents.
        documents, accuracy: The number of labelled documents, and their accuracy in [0, 1].
        figure: The slices' figure that the estimate is read off: ``dispersion`` or ``confidence``.
        better: Whether the estimate beats the labelled accuracy alone.
        level, half_width: The intervals' level in (0, 1), and half width for the mean slice.
        cautions: Why right and wrong answers support no conclusion.
        estimators, points: Errors and worth of every estimate; every slice with its estimate.
        whole, enough_for_five_points: Errors of labels of the whole run, and labels for ± 5 points.
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
    figure: str
    better: bool
    level: float
    half_width: float
    cautions: Sequence[str]
    estimators: Sequence[Estimator]
    whole: Sequence[LabelError]
    enough_for_five_points: int
    points: Sequence[HeldOut]
    _calibrator: Calibrator

    @property
    def calibrator(self) -> Calibrator:
        """The fit, which ``dispersion predict`` reads from a file."""
        return self._calibrator

    def estimator(self, name: str) -> Estimator | None:
        """The row of an estimate, by its name or its figure."""
        return next((row for row in self.estimators if name in (row.estimator, row.figure)), None)

    def tables(self) -> dict[str, Table]:
        """Every estimate; labels of the whole run."""
        smallest, largest = self.documents_a_slice
        sizes = str(smallest) if smallest == largest else f"{smallest} to {largest}"
        return {
            "estimators": Table.of(
                self.estimators,
                f"Errors on {slices_of(self.slices, self.by)} of {sizes} documents, each by a fit that did "
                "not see it",
                name="estimators",
            ),
            "whole": Table.of(
                self.whole,
                f"Accuracy estimated from labels drawn from all {self.documents} documents",
                name="labels",
            ),
        }

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

    def context(self) -> dict[str, Any]:
        """Words for the sentences."""
        return {
            "ours": self.estimators[0],
            "alone": self.estimators[-1],
            "dispersion": self.estimator("dispersion"),
            "no_gain": no_gain(self._calibrator.validation),
            "where": slices_of(self.slices, self.by),
            "figure": FIGURES[self.figure],
            "draws": self.whole[min(3, len(self.whole) - 1)] if self.whole else None,
        }


def calibrate(
    run: AuditRun | str | Path,
    *,
    where: str | None = None,
    layer: str | None = None,
    by: str | None = None,
    seed: int = 0,
    labels: bool = True,
    answers: Answers | None = None,
) -> Calibration:
    """A calibrator fitted to a labelled run, with its report: what ``dispersion calibrate`` writes.

    Args:
        run: Folder of the store, or a folder that holds the stores of one run.
        where: Learn only from documents that satisfy this, such as ``"subject in ('anatomy', 'virology')"``.
        layer: Layer of the vectors; default: the store's own.
        by: The column that makes the slices; default: subjects, else categories, tasks, clusters of vectors.
        seed: Seed of all draws.
        labels: Whether to report the estimates from labels.
        answers: The model's answers, if already analysed.

    Raises:
        UsageError: Too few labelled documents or slices, or labels all right or all wrong.
    """
    run = read_run(run, layer)
    if where is not None:
        run = labels_of(run, rows_where(run, where))
    fitted = fit_calibrator(run, by=by, seed=seed)
    calibrator = fitted.calibrator
    scores, rng = run.score[run.labelled], np.random.default_rng(seed)
    about = run.describe()
    pairs = calibrator.pairs
    typical = calibrator.applied(pairs.figure[:1], pairs.documents.mean(keepdims=True))
    return Calibration(
        model=str(about["model"]),
        revision=about["revision"],
        layer=run.layer,
        tasks=about["tasks"],
        by=calibrator.by,
        slices=len(calibrator.slices),
        documents_a_slice=calibrator.documents_a_slice,
        documents=len(scores),
        accuracy=float(scores.mean()),
        figure=calibrator.figure,
        better=calibrator.beats_trivial,
        level=calibrator.level,
        half_width=float(typical.half_width[0]),
        cautions=(answers or answers_of(run)).cautions,
        estimators=fitted.estimators,
        whole=[label_error(scores, k, rng) for k in LABELS if labels and k < len(scores)],
        enough_for_five_points=labels_enough(scores),
        points=[
            HeldOut(part.slice, part.documents, float(estimate), part.accuracy)
            for part, estimate in zip(calibrator.slices, fitted.held_out, strict=True)
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


def slices_of(number: int, by: str) -> str:
    """The number of slices in words."""
    if by == CLUSTERS:
        return f"{number} clusters of vectors"
    return count(number, by, "categories" if by == "category" else "")


def label_error(scores: Array, k: int, rng: np.random.Generator) -> LabelError:
    """Error of the mean of ``k`` of ``scores`` (n,), drawn without replacement."""
    n = len(scores)
    mean = float(scores.mean())
    variance = float(scores.var(ddof=1)) * (1 / k - 1 / n) if n > 1 else 0.0
    if np.isin(scores, (0.0, 1.0)).all():
        from scipy.stats import hypergeom

        law = hypergeom(n, int(scores.sum()), k)
        values = np.arange(k + 1)
        mae = float(law.pmf(values) @ np.abs(values / k - mean))
        low, high = float(law.ppf(0.025)) / k, float(law.ppf(0.975)) / k
    else:
        drawn = np.array([rng.choice(scores, size=k, replace=False).mean() for _ in range(_DRAWS)])
        mae = float(np.abs(drawn - mean).mean())
        low, high = map(float, np.quantile(drawn, [0.025, 0.975]))
    return LabelError(k, 100 * mae, 100 * math.sqrt(variance), low, high)


def labels_enough(scores: Array) -> int:
    """Labels of the whole run for a mean within 5 points in 95 % of draws, by the normal law."""
    n, variance = len(scores), float(scores.var(ddof=1))
    return min(n, math.ceil(variance / ((_HALF_WIDTH / NORMAL_975) ** 2 + variance / n)))
