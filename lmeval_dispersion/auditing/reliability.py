"""How well the model's confidence matches its accuracy: ECE, Brier score and a reliability table.

Confidence is the probability of the likeliest choice (softmax over the choices' log-probabilities).
An answer is right if its stored score is above one half. No vectors are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.auditing.figures import interval_text, predicted_against_true
from lmeval_dispersion.auditing.run import FEWEST, Array, AuditRun
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.report import Chart, Col, Table
from lmeval_dispersion.statistics import Interval, student_interval, wilson

BINS = 10
_DRAWS = 1000  # simulated runs whose accuracy equals the confidence


@dataclass(frozen=True)
class Bin:
    """The documents with a confidence from ``low`` to below ``high`` (in the last bin: to 1).

    Attributes:
        low: Lower limit of the confidence.
        high: Upper limit of the confidence.
        documents: Number of documents in the bin, at least 1.
        confidence: Mean confidence of these documents.
        accuracy: Share of these documents that were answered right, in [0, 1].
        accuracy_low: Lower end of the 95 % Wilson interval of the accuracy.
        accuracy_high: Upper end of that interval.
    """

    low: Annotated[float, Col("From", ".1f")]
    high: Annotated[float, Col("To", ".1f")]
    documents: Annotated[int, Col("Documents", "d", short="Docs", drop=2)]
    confidence: Annotated[float, Col("Mean confidence", ".1%", short="Confidence")]
    accuracy: Annotated[float, Col("Accuracy", ".1%")]
    accuracy_low: Annotated[
        float, Col("95 % from", ".1%", hint="Wilson interval of the accuracy.", drop=1)
    ]
    accuracy_high: Annotated[float, Col("to", ".1%", drop=1)]


@dataclass(frozen=True)
class Reliability:
    """Confidence and accuracy over the labelled documents that have choices and a finite answer.

    Attributes:
        documents: Number of documents that are judged.
        not_finite: Number of documents with choices that are left out, as their answer is not
            finite.
        changes: Whether the verdict (over- or underconfident) changes if those left out count as
            wrong answers at the mean confidence.
        confidence: Mean confidence, in [0, 1].
        accuracy: Share of right answers, in [0, 1].
        gap: Mean confidence minus accuracy; above 0 the model is overconfident.
        gap_low: Lower end of Student's 95 % interval of ``gap``.
        gap_high: Upper end of that interval.
        ece: Expected calibration error over ten equal bins, in [0, 1] (Guo et al., ICML 2017).
        ece_by_chance: 95th percentile of the ECE in simulated runs whose confidence is right.
        brier: Mean squared difference between the confidence and 1 (right) or 0 (wrong), in [0, 1].
        bins: Those of ten bins of equal width that hold documents.
    """

    documents: int
    not_finite: int
    changes: bool
    confidence: float
    accuracy: float
    gap: float
    gap_low: float
    gap_high: float
    ece: float
    ece_by_chance: float
    brier: float
    bins: Sequence[Bin]

    def tables(self) -> dict[str, Table]:
        """Return the table ``reliability``: confidence and accuracy in each bin of confidence."""
        caption = "Accuracy of the answers by the model's confidence in them"
        return {"reliability": Table.of(self.bins, caption, name="reliability")}

    def charts(self) -> dict[str, Chart]:
        """Return the chart ``reliability``: accuracy against confidence, a point for each bin."""
        points = [{"predicted": row.confidence, "true": row.accuracy} for row in self.bins]
        chart = Chart(
            predicted_against_true(points, "mean confidence"),
            "Accuracy against confidence",
            f"{len(points)} bins of confidence. {reliability_sentence(self)}",
            "On the dashed line confidence equals accuracy; below it the model is overconfident.",
            name="confidence",
        )
        return {"reliability": chart}


def reliability(run: AuditRun, *, seed: int = 0) -> Reliability:
    """Compare confidence with accuracy over a run's labelled documents with choices.

    Raises:
        UsageError: Fewer than 20 labelled documents have choices and a finite answer.
    """
    labelled = ~np.isnan(run.score)
    rows = np.flatnonzero(~np.isnan(run.confidence) & labelled & run.finite)
    not_finite = int((~run.finite & (run.choices >= 2)).sum())
    if len(rows) < FEWEST:
        raise UsageError(
            f"judging confidence needs {FEWEST} or more labelled documents with choices and finite "
            f"log-probabilities, got {len(rows)}; use a run with more multiple-choice questions"
        )
    confidence = run.confidence[rows]
    right = run.right[rows].astype(float)
    places = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(_DRAWS):
        simulated = (rng.random(len(rows)) < confidence).astype(float)
        drawn.append(_ece(confidence, simulated, places))
    bins = []
    for place in np.unique(places).tolist():
        inside = places == place
        low = place / BINS
        high = (place + 1) / BINS
        count = int(inside.sum())
        mean = float(confidence[inside].mean())
        accuracy = float(right[inside].mean())
        bins.append(Bin(low, high, count, mean, accuracy, *wilson(accuracy, count)))
    gap = confidence - right
    bounds = student_interval(gap)
    counted = student_interval(np.append(gap, np.full(not_finite, confidence.mean())))
    side = Interval(0.0, *bounds).side(0)
    return Reliability(
        documents=len(rows),
        not_finite=not_finite,
        changes=side != Interval(0.0, *counted).side(0),
        confidence=float(confidence.mean()),
        accuracy=float(right.mean()),
        gap=float(gap.mean()),
        gap_low=bounds.low,
        gap_high=bounds.high,
        ece=_ece(confidence, right, places),
        ece_by_chance=float(np.quantile(drawn, 0.95)),
        brier=float(np.square(gap).mean()),
        bins=bins,
    )


def _ece(confidence: Array, right: Array, places: NDArray[np.int64]) -> float:
    gaps = np.bincount(places, confidence - right, minlength=BINS)
    return float(np.abs(gaps).sum() / len(right))


def reliability_sentence(judged: Reliability) -> str:
    """Return a sentence on whether the model's confidence matches its accuracy."""
    if judged.changes:
        return (
            f"The model's confidence is not judged: {judged.not_finite:,} of "
            f"{judged.documents + judged.not_finite:,} documents have log-probabilities that are "
            "not finite, and counting these as wrong would change the verdict."
        )
    answers = "the finite answers" if judged.not_finite else "answers"
    figure = Interval(100 * judged.gap, 100 * judged.gap_low, 100 * judged.gap_high)
    shares = (
        f"its mean confidence is {100 * judged.confidence:.1f} % and {100 * judged.accuracy:.1f} % of "
        f"{answers} are right ({interval_text(figure, '+.1f')} points; ECE {judged.ece:.3f}, Brier "
        f"{judged.brier:.3f})"
    )
    side = figure.side(0)
    if side:
        word = "overconfident" if side > 0 else "underconfident"
        return f"The model is {word}: {shares}."
    if judged.ece > judged.ece_by_chance:
        return (
            "The model's confidence is right on average, but wrong at some levels of confidence: "
            f"{shares}; by chance alone the ECE would stay below {judged.ece_by_chance:.3f} in "
            "95 % of runs."
        )
    return f"The model's confidence is not clearly wrong: {shares}."
