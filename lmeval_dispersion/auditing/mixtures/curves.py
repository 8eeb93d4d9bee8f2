"""Controlled mixtures: does dispersion rise with the share of right answers?

For every target accuracy 0, 10, ..., 100 % a mixture of 100 documents (fewer of a small pool) with
exactly that share of right answers is drawn without replacement, ten times. The two curves are the
mean dispersion and the mean query perplexity over the draws, with their standard errors.

Whether other documents would show this too is another question. The curve's ends are all wrong and
all right documents, so the difference of these two pools, with an error over documents, answers it;
also with the same share of each subject (or task) on both sides.

Source: RD sections 3.1 and B.1.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lmeval_dispersion.auditing.figures import (
    Claim,
    claim_sentence,
    interval_text,
    lines,
    without_nan,
)
from lmeval_dispersion.auditing.run import FEWEST, Array, AuditRun, Missing, Rows, check_labels
from lmeval_dispersion.auditing.slices import Slice, known_mean, strata
from lmeval_dispersion.errors import count
from lmeval_dispersion.geometry import Estimate
from lmeval_dispersion.report import Chart, Col, Table
from lmeval_dispersion.report.vega import numeric
from lmeval_dispersion.statistics import NORMAL_975, Interval, rank_correlations

TARGETS = tuple(range(0, 101, 10))
SIZE = 100  # documents per mixture
SEEDS = 10  # draws per target accuracy
SMALLEST = 20  # fewest documents in a mixture


# --- drawing -----------------------------------------------------------------------------------------------


class Pools(NamedTuple):
    """The documents from which mixtures are drawn, as rows of the run.

    Attributes:
        correct: Rows of the documents that were answered right.
        incorrect: Rows of the documents that were answered wrong.
    """

    correct: Rows
    incorrect: Rows

    @property
    def smaller(self) -> int:
        """Number of right or of wrong documents, whichever is lower."""
        return min(len(self.correct), len(self.incorrect))

    def reaches(self, size: int, correct: int) -> bool:
        """Whether ``size`` documents, ``correct`` of them right, can be drawn from the pools."""
        return correct <= len(self.correct) and size - correct <= len(self.incorrect)

    def draw(self, rng: np.random.Generator, size: int, correct: int) -> Rows:
        """Draw ``size`` documents, of which ``correct`` are right, and return their rows.

        Raises:
            ValueError: A pool has too few documents.
        """
        parts = (
            rng.choice(self.correct, size=correct, replace=False),
            rng.choice(self.incorrect, size=size - correct, replace=False),
        )
        return np.concatenate(parts)


def pools(run: AuditRun, rows: Rows) -> Pools:
    """Split the documents ``rows`` into right and wrong answers, without unlabelled documents."""
    labelled = rows[~np.isnan(run.score[rows])]
    right = run.right[labelled]
    return Pools(labelled[right], labelled[~right])


def mixture_size(smaller: int) -> int:
    """Return the number of documents per mixture: :data:`SIZE`, or fewer if a pool is smaller.

    The pools are the right and the wrong answers. ``smaller`` is the number of right or of wrong
    documents, whichever is lower. The result is a multiple of ten, so that every share in steps of
    10 % is exact, and at least :data:`SMALLEST`.
    """
    return max(min(SIZE, smaller // 10 * 10), SMALLEST)


# --- the curves --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trend:
    """Whether a curve over the target accuracies rises or falls.

    Attributes:
        spearman: Rank correlation of the curve with the target accuracies: 1 if it always rises, -1
            if it always falls. There is no interval, as the mixtures share documents.
        shape: ``increasing``, ``decreasing`` or ``not monotone`` (ties allowed).
        against: Number of steps from one target accuracy to the next that go against the sign of
            ``spearman``.
    """

    spearman: float
    shape: str
    against: int


def trend(levels: ArrayLike, means: ArrayLike) -> Trend | Missing:
    """Return the trend of a curve, ``means`` (k,) over the target accuracies ``levels`` (k,).

    The points may be in any order; those with a NaN mean are left out. The result is `Missing` with
    fewer than three points, or if all means are equal.

    >>> trend([0, 50, 100], [1.0, 2.0, 3.0]).shape
    'increasing'
    """
    x = np.asarray(levels, dtype=np.float64)
    y = np.asarray(means, dtype=np.float64)
    is_known = ~np.isnan(y)
    x = x[is_known]
    y = y[is_known]
    y = y[np.argsort(x, kind="stable")]
    if len(y) < 3:
        return Missing(f"a trend needs three known values of the curve, got {len(y)}")
    if np.ptp(y) == 0:
        return Missing("all values of the curve are equal")
    rho = float(rank_correlations(np.sort(x), y[None])[0])
    sign = 1.0 if rho >= 0 else -1.0
    against = int((sign * np.diff(y) < 0).sum())
    shape = "increasing" if sign > 0 else "decreasing"
    if against:
        shape = "not monotone"
    return Trend(rho, shape, against)


@dataclass(frozen=True)
class CurvePoint:
    """Means over the mixtures of one target accuracy; NaN where a number is not known.

    Attributes:
        target_accuracy: Share of right answers in the mixtures, in percent.
        dispersion: Mean dispersion of the mixtures.
        dispersion_se: Standard error of ``dispersion`` over the draws.
        query_perplexity: Mean over the mixtures of the mean perplexity of their queries.
        query_perplexity_se: Standard error of ``query_perplexity`` over the draws.
    """

    target_accuracy: Annotated[int, Col("Correct documents (%)", "d")]
    dispersion: Annotated[float, Col("Dispersion", ".4f", error="dispersion_se")]
    dispersion_se: float
    query_perplexity: Annotated[float, Col("Query perplexity", ".3f", error="query_perplexity_se")]
    query_perplexity_se: float


@dataclass(frozen=True)
class PoolContrast:
    """The dispersions of right and of wrong answers, and their difference with a 95 % interval.

    The interval allows for other documents of the same kind; the error bars of the curves allow
    only for other draws from these documents. A dispersion is NaN for fewer than three documents.
    The ends of the interval are NaN for fewer than 20 right or 20 wrong documents, and if both
    standard errors are 0.

    Attributes:
        correct: Dispersion of the documents that were answered right.
        correct_se: Standard error of ``correct``.
        incorrect: Dispersion of the documents that were answered wrong.
        incorrect_se: Standard error of ``incorrect``.
        difference: ``correct - incorrect``.
        difference_low: Lower end of the 95 % interval of ``difference``.
        difference_high: Upper end of that interval.
    """

    correct: float
    correct_se: float
    incorrect: float
    incorrect_se: float
    difference: float
    difference_low: float
    difference_high: float

    @classmethod
    def of(cls, correct: Estimate, incorrect: Estimate) -> PoolContrast:
        """Return the contrast of the estimated dispersions of right and of wrong answers."""
        difference = correct.mean - incorrect.mean
        error = math.hypot(correct.se, incorrect.se)
        if min(correct.n, incorrect.n) < FEWEST or not error > 0:
            error = math.nan
        bounds = difference - NORMAL_975 * error, difference + NORMAL_975 * error
        return cls(correct.mean, correct.se, incorrect.mean, incorrect.se, difference, *bounds)

    @property
    def figure(self) -> Interval:
        """Difference in dispersion, right minus wrong answers, with its 95 % interval."""
        return Interval(self.difference, self.difference_low, self.difference_high)


@dataclass(frozen=True)
class Inside:
    """Right against wrong answers, with the same share of each subject (or task) on both sides.

    Attributes:
        parts: Number of subjects (or tasks) with at least two right and two wrong answers, which
            are used.
        of_parts: Number of all subjects (or tasks).
        correct_documents: Number of right answers that are used.
        incorrect_documents: Number of wrong answers that are used.
        pools: The dispersions of these right and wrong answers, and their difference.
    """

    parts: int
    of_parts: int
    correct_documents: int
    incorrect_documents: int
    pools: PoolContrast


@dataclass(frozen=True)
class Mixtures:
    """Dispersion and query perplexity of mixtures, and the contrast of right and wrong answers.

    A mixture is drawn with a set share of right answers, the target accuracy. The right and the
    wrong answers of the run are the two pools from which it is drawn.

    Attributes:
        documents_per_mixture: Number of documents in each mixture.
        asked_documents_per_mixture: Number of documents in a mixture if the pools are large enough.
        seeds: Number of draws per target accuracy.
        correct_documents: Number of documents that were answered right.
        incorrect_documents: Number of documents that were answered wrong.
        share_of_smaller_pool: ``documents_per_mixture`` over the number of documents in the smaller
            pool, at most 1. Near 1, all draws hold nearly the same documents, and the error bars
            are too short.
        unreachable_targets: Target accuracies, in percent, for which the pools have too few
            documents.
        pools: The dispersions of all right and all wrong answers, and their difference.
        curve: One point for every target accuracy for which the pools have enough documents.
        dispersion_trend: Trend of the dispersion over the target accuracies.
        query_perplexity_trend: Trend of the query perplexity over the target accuracies.
        inside: ``subject`` or ``task``, if it divides the run -> the contrast with equal shares of
            each subject or task on both sides, or `Missing`.
    """

    documents_per_mixture: int
    asked_documents_per_mixture: int
    seeds: int
    correct_documents: int
    incorrect_documents: int
    share_of_smaller_pool: float
    unreachable_targets: Sequence[int]
    pools: PoolContrast
    curve: Sequence[CurvePoint]
    dispersion_trend: Trend | Missing
    query_perplexity_trend: Trend | Missing
    inside: Mapping[str, Inside | Missing]

    def sentences(self) -> list[str]:
        """Return the report's sentences on the curves, and on right against wrong answers.

        Right and wrong answers are compared over all documents, and inside subjects or tasks.
        """
        pools = self.pools
        ends = (
            f"The dispersion of all correct documents is {pools.correct:.4f} ± {pools.correct_se:.4f}, of "
            f"all incorrect documents {pools.incorrect:.4f} ± {pools.incorrect_se:.4f}; the difference is "
            f"{interval_text(pools.figure, '+.4f')}."
        )
        if math.isnan(pools.difference):
            ends = "There are too few correct or incorrect documents to compare them."
        return [
            f"For each share of correct documents, {self.seeds} mixtures of "
            f"{self.documents_per_mixture} documents are drawn.",
            _trend_sentence("Dispersion", self.dispersion_trend),
            ends,
            *(_inside_sentence(name, part) for name, part in self.inside.items()),
            _trend_sentence("Query perplexity", self.query_perplexity_trend),
            "The intervals allow for other documents of the same kind. The curves' error bars allow "
            "only for other draws from these documents, and are shorter.",
        ]

    def tables(self) -> dict[str, Table]:
        """Return the table ``mixtures``: dispersion and query perplexity by target accuracy."""
        points = [without_nan(point) for point in self.curve]
        caption = "Mean over the draws for each target accuracy, ± its standard error"
        return {"mixtures": Table.of(points, caption, name="mixtures")}

    def charts(self) -> dict[str, Chart]:
        """Return the chart ``mixtures``: dispersion against the share of right answers.

        There is no chart if the curve has no trend: with fewer than three points, or if all values
        are equal.
        """
        trend = self.dispersion_trend
        if isinstance(trend, Missing):
            return {}
        rows = []
        for point in self.curve:
            rows.append(
                {
                    "series": "all documents",
                    "target": point.target_accuracy,
                    "value": point.dispersion,
                    "low": point.dispersion - point.dispersion_se,
                    "high": point.dispersion + point.dispersion_se,
                }
            )
        first, *_, last = self.curve
        share = numeric("target", "correct documents (%)", axis={"values": list(range(0, 101, 20))})
        chart = Chart(
            lines(rows, share, numeric("value", "dispersion"), bars=True),
            "Dispersion of mixtures, by their share of correct documents",
            f"From {first.dispersion:.4g} at {first.target_accuracy} % to {last.dispersion:.4g} at "
            f"{last.target_accuracy} %; {trend.shape}, Spearman {trend.spearman:.2f}.",
            f"Every point is the mean of {self.seeds} draws of {self.documents_per_mixture} documents with "
            "exactly that share of right answers; bars are one standard error over the draws. A rising line "
            "says that dispersion follows the share of right answers when nothing else is changed on "
            "purpose. It does not say that real slices of equal accuracy have equal dispersion.",
        )
        return {"mixtures": chart}


def mixture_curves(run: AuditRun, *, seed: int = 0) -> Mixtures:
    """Draw mixtures from a run; return their curves and the contrast of right and wrong answers.

    A mixture consists of documents of which a set share was answered right.

    Raises:
        UsageError: The run has no vectors, or its answers are all right or all wrong.
    """
    check_labels(run, "mixtures need")
    pool = pools(run, run.labelled)
    used = mixture_size(pool.smaller)
    curve = []
    for target in TARGETS:
        # Shares are multiples of 10 %, and sizes multiples of ten: every count is whole.
        correct = round(target * used / 100)
        if not pool.reaches(used, correct):
            continue
        draws = [
            pool.draw(np.random.default_rng([seed, draw, target]), used, correct)
            for draw in range(SEEDS)
        ]
        dispersions = run.vectors.dispersions(draws)
        perplexities = np.array([known_mean(run.perplexity[rows]) for rows in draws])
        curve.append(
            CurvePoint(target, *_mean_and_error(dispersions), *_mean_and_error(perplexities))
        )
    reached = [point.target_accuracy for point in curve]
    return Mixtures(
        documents_per_mixture=used,
        asked_documents_per_mixture=SIZE,
        seeds=SEEDS,
        correct_documents=len(pool.correct),
        incorrect_documents=len(pool.incorrect),
        share_of_smaller_pool=min(used / pool.smaller, 1.0),
        unreachable_targets=[target for target in TARGETS if target not in reached],
        pools=PoolContrast.of(_dispersion(run, pool.correct), _dispersion(run, pool.incorrect)),
        curve=curve,
        dispersion_trend=trend(reached, [point.dispersion for point in curve]),
        query_perplexity_trend=trend(reached, [point.query_perplexity for point in curve]),
        inside={name: _inside(run, parts) for name, parts in strata(run).items()},
    )


def _dispersion(run: AuditRun, rows: Rows) -> Estimate:
    return run.vectors.estimate(rows) if len(rows) >= 3 else Estimate(math.nan, math.nan, len(rows))


def _mean_and_error(values: Array) -> tuple[float, float]:
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


def _inside(run: AuditRun, parts: list[Slice]) -> Inside | Missing:
    """A part counts the smaller of its numbers of right and wrong documents, at least two."""
    divided = [pools(run, part.rows) for part in parts]
    kept = [pool for pool in divided if pool.smaller > 1]
    smaller = np.array([pool.smaller for pool in kept], dtype=np.int64)
    total = int(smaller.sum())
    if total < SMALLEST:
        return Missing(
            f"a comparison needs {SMALLEST} pairs of a right and a wrong answer, got {total}"
        )
    correct = run.vectors.composed([pool.correct for pool in kept], smaller / total)
    incorrect = run.vectors.composed([pool.incorrect for pool in kept], smaller / total)
    contrast = PoolContrast.of(correct, incorrect)
    return Inside(len(kept), len(parts), correct.n, incorrect.n, contrast)


def _trend_sentence(name: str, trend: Trend | Missing) -> str:
    if isinstance(trend, Missing):
        return f"{name}: {trend.missing}."
    steps = count(trend.against, "step")
    return f"{name}: {trend.shape}, Spearman {trend.spearman:.2f}, {steps} against the trend."


def _inside_sentence(name: str, part: Inside | Missing) -> str:
    if isinstance(part, Missing):
        return f"Inside {name}s, right and wrong answers are not compared: {part.missing}."
    weights = f"each of the {part.parts} {name}s has the same weight in both"
    if part.parts == 1:
        weights = f"only one {name} has enough of both"
    return (
        f"Inside {name}s, the dispersion of right answers minus that of wrong ones is "
        f"{interval_text(part.pools.figure, '+.4f')}; {weights}."
    )


def pools_sentence(mixtures: Mixtures | Missing) -> str:
    """Return a sentence on whether right answers are more dispersed than wrong ones.

    They are compared over all documents and, if possible, inside subjects or tasks.
    """
    if isinstance(mixtures, Missing):
        return f"Whether right answers are more dispersed could not be tested: {mixtures.missing}."
    figure = mixtures.pools.figure
    fewest = min(mixtures.correct_documents, mixtures.incorrect_documents)
    if math.isnan(figure.low) and fewest >= FEWEST:
        return (
            "Whether right answers are more dispersed could not be tested: neither their "
            "dispersion nor that of wrong answers has a standard error above 0."
        )
    if math.isnan(figure.low):
        return (
            f"Whether right answers are more dispersed is not clear with {mixtures.correct_documents} "
            f"right and {mixtures.incorrect_documents} wrong answers: {FEWEST} of each are needed."
        )
    parts = ""
    inside = None
    for name, part in mixtures.inside.items():
        if isinstance(part, Inside):
            parts = f"{name}s"
            inside = part.pools.figure
            break
    word = "more" if figure.side(0) > 0 else "less"
    claim = Claim(
        "Right and wrong answers do not differ clearly in dispersion",
        f"Right answers are {word} dispersed than wrong ones",
        f"Right answers are {word} dispersed overall",
        f"Whether right answers are {word} dispersed, or only come from {word} dispersed {parts}, "
        "is not clear",
    )
    return claim_sentence(claim, figure, parts, inside, nothing=0.0, spec="+.4f")
