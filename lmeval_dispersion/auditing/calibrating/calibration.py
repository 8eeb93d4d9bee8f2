"""The report of ``dispersion calibrate``: errors on held-out slices, and their worth in labels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from lmeval_dispersion.arguments import takes
from lmeval_dispersion.auditing.arguments import Calibrating
from lmeval_dispersion.auditing.calibrating.calibrator import (
    CLUSTERS,
    MUST_AGREE,
    NAMES,
    TRIVIAL,
    Calibrator,
    FittedSlice,
    Labelled,
    Pairs,
    confidence_threshold,
    cross_fitted,
    document_ids,
    documents_digest,
    labelled_slices,
    no_gain,
)
from lmeval_dispersion.auditing.figures import RunReport, predicted_against_true
from lmeval_dispersion.auditing.run import (
    Array,
    AuditRun,
    Rows,
    check_labels,
    labels_of,
    read_run,
    rows_where,
)
from lmeval_dispersion.errors import UsageError, count
from lmeval_dispersion.report import Chart, Col, Table
from lmeval_dispersion.statistics import (
    LEVEL,
    NORMAL_975,
    percentiles,
    resampled_means,
    student_quantile,
)

_ROUNDING = 1e-9  # share of the dispersion: closer values count as equal
_HALF_WIDTH = 0.05  # half width that `labels_enough` aims at


@dataclass(frozen=True)
class Estimator:
    """A way to estimate a slice's accuracy: its errors on held-out slices, and its worth in labels.

    The mean of k of a slice's n labels, drawn without replacement, has the variance v (1/k - 1/n),
    where v is the variance of the slice's scores (Cochran, Sampling Techniques, 1977, 2.6). The
    estimator is worth k labels if its mean squared error equals this variance, averaged over the
    slices: k = mean(v) / (mean squared error + mean(v / n)), as in Fu et al., arXiv 2305.14802.

    Attributes:
        estimator: Name of the estimator, as reports show it.
        mae: Mean absolute error over the slices, in percentage points.
        rmse: Root of the mean squared error over the slices, in percentage points.
        worth: The number of labels per slice, k above, whose mean would be as far off.
        worth_low: Lower end of the 95 % bootstrap interval (over slices) of ``worth``.
        worth_high: Upper end of that interval.
        better: Whether the estimator beats the labelled accuracy alone, that is, the mean score of
            all other slices: its squared error is lower, by a one-sided paired Student test over
            slices at 5 %, and its mean absolute error is lower.
    """

    estimator: Annotated[str, Col("Estimate")]
    mae: Annotated[float, Col("Mean error (points)", ".2f")]
    rmse: Annotated[float, Col("RMSE", ".2f", drop=1)]
    worth: Annotated[float, Col("Worth labels a slice", ".0f")]
    worth_low: Annotated[float, Col("95 % from", ".0f", drop=2)]
    worth_high: Annotated[float, Col("to", ".0f", drop=2)]
    better: Annotated[bool, Col("Beats the labelled accuracy", drop=3)]

    @classmethod
    def of(cls, name: str, pairs: Pairs, estimate: Array, *, seed: int = 0) -> Estimator:
        """Return the errors and the worth of the estimator ``name``.

        ``estimate`` (S,), in [0, 1], are its estimates for the S slices in ``pairs``, each made
        without the slice's own labels. ``seed`` is that of the bootstrap.
        """
        ours = 100 * (estimate - pairs.accuracy)
        theirs = 100 * (pairs.trivial - pairs.accuracy)
        n = len(ours)
        mae = float(np.abs(ours).mean())
        gain = np.square(theirs) - np.square(ours)
        margin = student_quantile(LEVEL, n - 1) * gain.std(ddof=1) / math.sqrt(n)
        better = bool(gain.mean() > margin and mae < np.abs(theirs).mean())
        off = np.square(estimate - pairs.accuracy) + pairs.variance / pairs.documents
        columns = np.stack([pairs.variance, off], axis=1)
        samples = resampled_means(columns, seed)
        bounds = percentiles(samples[:, 0] / samples[:, 1])
        worth = float(columns[:, 0].mean() / columns[:, 1].mean())
        return cls(name, mae, math.sqrt(np.square(ours).mean()), worth, *bounds, better)


@dataclass(frozen=True)
class HeldOut:
    """A held-out slice, with its accuracy estimated by the fit to the other slices.

    Attributes:
        slice: Name of the slice.
        documents: Number of labelled documents in the slice.
        predicted: Estimated accuracy, in [0, 1].
        true: Mean score of the slice's labelled documents, in [0, 1].
    """

    slice: str
    documents: int
    predicted: float
    true: float


@dataclass(frozen=True, repr=False)
class Calibration(RunReport):
    """A fitted calibrator, with the errors of its estimates on held-out slices.

    Attributes:
        model: Name of the model.
        revision: Revision of the model; None if the run did not record one.
        layer: Layer of the vectors.
        tasks: lm-eval's tasks of the run -> their versions.
        by: Column that the documents are sliced by, or ``cluster`` for clusters of vectors.
        slices: Number of slices.
        documents_a_slice: Numbers of labelled documents in the smallest and in the largest slice.
        documents: Number of labelled documents.
        accuracy: Accuracy over the labelled documents, in [0, 1].
        better: Whether the calibrator beats the labelled accuracy alone, that is, taking the mean
            score of all other slices for each slice.
        level: Confidence level of the intervals, such as 0.95; lower with fewer than 19 slices.
        half_width: Half width of the interval for a slice of average size, as a share: 0.05 is 5
            percentage points.
        cautions: Sentences on why the answers allow no conclusion, for example because they are no
            better than guessing; empty if they allow one.
        estimators: Errors and worth of each estimator: the calibrator first, the labelled accuracy
            alone last.
        enough_for_five_points: How many labels, drawn at random, give the run's accuracy to within
            5 percentage points; see :func:`labels_enough`.
        points: Every slice with its accuracy, estimated by the fit to the other slices.
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
        """The fitted calibrator, which :func:`predict` takes; its method ``save`` writes a file."""
        return self._calibrator

    def tables(self) -> dict[str, Table]:
        """Return the table ``estimators``: the errors and the worth of each estimator."""
        smallest, largest = self.documents_a_slice
        sizes = str(smallest) if smallest == largest else f"{smallest} to {largest}"
        caption = f"Errors on held-out slices: {self.where} of {sizes} documents"
        return {"estimators": Table.of(self.estimators, caption, name="estimators")}

    def charts(self) -> dict[str, Chart]:
        """Return the chart ``points``: each slice's estimate against its true accuracy.

        There is no chart if there are cautions.
        """
        if self.cautions:
            return {}
        ours, trivial = self.calibrator.errors
        chart = Chart(
            predicted_against_true(self.points),
            "Each slice's accuracy, estimated without its labels, against its true accuracy",
            f"{len(self.points)} slices, each estimated by a fit to the others. On average the "
            f"estimate is {ours:.1f} points off, the {TRIVIAL} {trivial:.1f} points.",
            "On the dashed line the estimate is right. Points on a vertical line have the same "
            "estimate. True accuracies scatter by sampling, most in small slices.",
        )
        return {"points": chart}

    @property
    def where(self) -> str:
        """Number and kind of the slices, such as ``12 subjects``."""
        if self.by == CLUSTERS:
            return f"{self.slices} clusters of vectors"
        return count(self.slices, self.by, "categories" if self.by == "category" else "")

    def context(self) -> dict[str, Any]:
        """Return the template's variables.

        They are ``ours`` and ``alone``, the errors of the calibrator and of the labelled accuracy
        alone (see `Estimator`); ``other``, which is :attr:`better_one`; and ``no_gain``, the clause
        that says why a calibrator that is not better is refused.
        """
        return {
            "ours": self.estimators[0],
            "alone": self.estimators[-1],
            "other": self.better_one,
            "no_gain": no_gain(self._calibrator),
        }

    @property
    def better_one(self) -> Estimator | None:
        """The first estimator that beats the labelled accuracy alone, or None; see `Estimator`."""
        return next((row for row in self.estimators if row.better), None)


@takes(Calibrating)
def calibrate(asked: Calibrating) -> Calibration:
    """Fit a calibrator to a labelled run and judge it, as ``dispersion calibrate`` does.

    The calibrator estimates a slice's accuracy from its dispersion. It is judged by its estimates
    for slices that were held out of the fit. Documents whose log-probabilities are not finite are
    left out.

    Raises:
        UsageError: There are too few labelled documents or slices, all answers are right or all
            wrong, all slices have the same dispersion, the run has no vectors, ``slice`` names no
            column, or ``where`` is invalid or true for no document.
        StoreError: The store cannot be read, or has no such layer.
        HarnessError: Samples or logs cannot be read.
    """
    run = read_run(asked.run, asked.layer)
    if asked.where is not None:
        run = labels_of(run, rows_where(run, asked.where))
    run = run.judged
    calibrator, estimators = _fitted(run, asked.slice, asked.seed)
    pairs = calibrator.pairs
    typical = calibrator.applied(pairs.dispersion[:1], pairs.documents.mean(keepdims=True))
    points = []
    for part, estimate in zip(calibrator.slices, calibrator.held_out[1].tolist(), strict=True):
        points.append(HeldOut(part.slice, part.documents, estimate, part.accuracy))
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
        cautions=run.answers.cautions,
        estimators=estimators,
        enough_for_five_points=labels_enough(run.score[run.labelled]),
        points=points,
        _calibrator=calibrator,
    )


def _fitted(run: AuditRun, by: str | None, seed: int) -> tuple[Calibrator, list[Estimator]]:
    """The calibrator of a run's labelled slices, and all estimators: its own first, the trivial one last."""
    check_labels(run, "calibration needs")
    made_by, parts = labelled_slices(run, by, seed=seed)
    dispersions = run.vectors.dispersions([part.rows for part in parts])
    slices = []
    for part, dispersion in zip(parts, dispersions.tolist(), strict=True):
        scores = run.score[part.rows]
        variance = float(scores.var(ddof=1))
        slices.append(
            FittedSlice(part.name, len(scores), float(scores.mean()), variance, dispersion)
        )
    pairs = Pairs.of(slices)
    if pairs.dispersion.std() <= _ROUNDING * pairs.dispersion.max():
        raise UsageError(
            "all slices have the same dispersion, so no fit is possible; slice by another column"
        )
    ours = Estimator.of("dispersion, calibrated", pairs, cross_fitted(pairs)[1], seed=seed)
    estimators = [ours]
    others = {**_uncalibrated(run, [part.rows for part in parts]), TRIVIAL: pairs.trivial}
    for name, estimate in others.items():
        estimators.append(Estimator.of(name, pairs, estimate, seed=seed))
    about = run.describe()
    rows = run.labelled
    accuracy = float(run.score[rows].mean())
    calibrator = Calibrator(
        **{key: about[key] for key in (*NAMES, *MUST_AGREE, "tasks")},
        identity=run.store.manifest.get("identity"),
        by=made_by,
        labelled=Labelled(len(rows), accuracy, document_ids(run, rows), documents_digest(run)),
        beats_trivial=ours.better,
        slices=slices,
        seed=seed,
    )
    return calibrator, estimators


def _uncalibrated(run: AuditRun, parts: list[Rows]) -> dict[str, Array]:
    """Mean confidence and ATC (average thresholded confidence) as they are, if every document has them."""
    confidence = run.confidence
    if np.isnan(confidence[run.labelled]).any():
        return {}
    means = []
    above = []
    for part in parts:
        rest = np.concatenate([other for other in parts if other is not part])
        threshold = confidence_threshold(confidence[rest], float(run.score[rest].mean()))
        means.append(confidence[part].mean())
        above.append((confidence[part] > threshold).mean())
    return {"mean confidence, as it is": np.array(means), "ATC, as it is": np.array(above)}


def labels_enough(scores: Array) -> int:
    """Return how many labels, drawn at random, give an accuracy to within 5 percentage points.

    The accuracy is the mean of ``scores`` (n,). The mean of the labels is that close with a
    probability of 95 %, by the normal approximation. The result is at most n.
    """
    n = len(scores)
    variance = float(scores.var(ddof=1))
    return min(n, math.ceil(variance / ((_HALF_WIDTH / NORMAL_975) ** 2 + variance / n)))
