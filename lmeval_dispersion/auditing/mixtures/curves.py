"""Controlled mixtures: documents with an exact share of right answers. Does dispersion rise with that share?

For every target accuracy 0, 10, ..., 100 %, 100 documents (fewer of a small pool) with exactly that share of
correct ones are drawn without replacement, ten times; the mean and standard error over the draws of their
dispersion and of their mean query perplexity are the two curves. Whether other documents would show this too
is another question. The curve's ends are the wrong and the right documents, so the difference of these two
pools, with an error over documents, answers it; also with the same share of each subject (or task) on both
sides.

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
from lmeval_dispersion.geometry import Estimate
from lmeval_dispersion.report import Chart, Col, Table
from lmeval_dispersion.report.declared import count
from lmeval_dispersion.report.vega import numeric
from lmeval_dispersion.statistics import NORMAL_975, Interval, rank_correlations

TARGETS = tuple(range(0, 101, 10))
SIZE = 100  # documents per mixture
SEEDS = 10  # draws per target accuracy
SMALLEST = 20  # fewest documents in a mixture


# --- drawing -----------------------------------------------------------------------------------------------


class Pools(NamedTuple):
    """Rows of the correct and of the incorrect documents, from which mixtures are drawn."""

    correct: Rows
    incorrect: Rows

    @property
    def smaller(self) -> int:
        """Number of documents in the smaller pool."""
        return min(len(self.correct), len(self.incorrect))

    def reaches(self, size: int, correct: int) -> bool:
        """Whether the pools hold enough for ``size`` documents with exactly ``correct`` correct ones."""
        return correct <= len(self.correct) and size - correct <= len(self.incorrect)

    def draw(self, rng: np.random.Generator, size: int, correct: int) -> Rows:
        """Rows of ``size`` documents, each once, ``correct`` of them correct; ValueError if not reached."""
        parts = (
            rng.choice(self.correct, size=correct, replace=False),
            rng.choice(self.incorrect, size=size - correct, replace=False),
        )
        return np.concatenate(parts)


def pools(run: AuditRun, rows: Rows) -> Pools:
    """Labelled ``rows``, split into right and wrong answers."""
    labelled = rows[~np.isnan(run.score[rows])]
    right = run.right[labelled]
    return Pools(labelled[right], labelled[~right])


def mixture_size(smaller: int) -> int:
    """Documents per mixture: :data:`SIZE`, or fewer if the smaller pool holds fewer.

    A multiple of ten, so that every share in steps of 10 % is exact, and at least :data:`SMALLEST`.
    """
    return max(min(SIZE, smaller // 10 * 10), SMALLEST)


# --- the curves --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trend:
    """Whether a curve rises or falls with its level.

    Attributes:
        spearman: Rank correlation of the means with the levels: 1 rises always, -1 falls always. It has no
            interval: the means share documents.
        shape: ``increasing``, ``decreasing`` or ``not monotone`` (ties allowed).
        against: Number of steps against the direction of ``spearman``.
    """

    spearman: float
    shape: str
    against: int


def trend(levels: ArrayLike, means: ArrayLike) -> Trend | Missing:
    """The trend of ``means`` (k,) over ``levels`` (k,), in any order; levels with a NaN mean are left out.

    Missing with fewer than three means, or only equal ones.

    >>> trend([0, 50, 100], [1.0, 2.0, 3.0]).shape
    'increasing'
    """
    x = np.asarray(levels, dtype=np.float64)
    y = np.asarray(means, dtype=np.float64)
    is_known = ~np.isnan(y)
    x = x[is_known]
    y = y[is_known]
    y = y[np.argsort(x, kind="stable")]
    if len(y) < 3 or np.ptp(y) == 0:
        return Missing("the curve has fewer than three different known values")
    rho = float(rank_correlations(np.sort(x), y[None])[0])
    sign = 1.0 if rho >= 0 else -1.0
    against = int((sign * np.diff(y) < 0).sum())
    shape = "increasing" if sign > 0 else "decreasing"
    if against:
        shape = "not monotone"
    return Trend(rho, shape, against)


@dataclass(frozen=True)
class CurvePoint:
    """Means over the mixtures of one target accuracy, with standard errors over draws; NaN where unknown."""

    target_accuracy: Annotated[int, Col("Correct documents (%)", "d")]
    dispersion: Annotated[float, Col("Dispersion", ".4f", error="dispersion_se")]
    dispersion_se: float
    query_perplexity: Annotated[float, Col("Query perplexity", ".3f", error="query_perplexity_se")]
    query_perplexity_se: float


@dataclass(frozen=True)
class PoolContrast:
    """Dispersions of the correct and the incorrect documents, and their difference with a 95 % interval.

    The curves' error bars are for other draws from these documents; this interval is for other documents
    of the same kind. NaN where a pool has fewer than three documents, the interval where it has fewer than
    20.
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
        """Build it from the correct and the incorrect documents' estimates."""
        difference = correct.mean - incorrect.mean
        error = math.hypot(correct.se, incorrect.se)
        if min(correct.n, incorrect.n) < FEWEST or not error > 0:
            error = math.nan
        bounds = difference - NORMAL_975 * error, difference + NORMAL_975 * error
        return cls(correct.mean, correct.se, incorrect.mean, incorrect.se, difference, *bounds)

    @property
    def figure(self) -> Interval:
        """The difference, correct minus incorrect, with its interval."""
        return Interval(self.difference, self.difference_low, self.difference_high)


@dataclass(frozen=True)
class Inside:
    """The contrast at equal shares of the ``parts`` (subjects or tasks) with two right and two wrong ones."""

    parts: int
    of_parts: int
    correct_documents: int
    incorrect_documents: int
    pools: PoolContrast


@dataclass(frozen=True)
class Mixtures:
    """The two curves over target accuracies with their trends, and the pools that are their ends.

    Attributes:
        documents_per_mixture: Size used.
        asked_documents_per_mixture: Size wanted.
        seeds: Draws per target.
        correct_documents, incorrect_documents: Sizes of the pools.
        share_of_smaller_pool: Documents per mixture over the smaller pool's, at most 1. Near 1 all draws hold
            nearly the same documents, and their spread is too small.
        unreachable_targets: Target accuracies that the pools cannot reach.
        pools: The pools' dispersions.
        inside: The contrast inside ``subject`` and ``task``, where these divide the run.
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
        """Sentences on the curves' trends and on the pools at their ends."""
        pools = self.pools
        ends = (
            f"All correct documents {pools.correct:.4f} ± {pools.correct_se:.4f}, all incorrect "
            f"{pools.incorrect:.4f} ± {pools.incorrect_se:.4f}; difference in dispersion "
            f"{interval_text(pools.figure, '+.4f')}."
        )
        if math.isnan(pools.difference):
            ends = "There are too few correct or incorrect documents to compare them."
        return [
            f"{self.seeds} draws of {self.documents_per_mixture} documents for each share of correct ones.",
            _trend_sentence("Dispersion", self.dispersion_trend),
            ends,
            *(_inside_sentence(name, part) for name, part in self.inside.items()),
            _trend_sentence("Query perplexity", self.query_perplexity_trend),
            "These intervals are for other documents of the same kind; the curves' error bars are for other "
            "draws of these documents, and shorter.",
        ]

    def tables(self) -> dict[str, Table]:
        """``mixtures``: the curves over target accuracies."""
        points = [without_nan(point) for point in self.curve]
        caption = "The curves, mean ± standard error over draws"
        return {"mixtures": Table.of(points, caption, name="mixtures")}

    def charts(self) -> dict[str, Chart]:
        """``mixtures``: dispersion over the share of correct documents; no chart without a trend."""
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
    """A run's curves and pools; UsageError without vectors, or without right and wrong answers."""
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
            f"its parts hold {total} pairs of a right and a wrong document, {SMALLEST} needed"
        )
    correct = run.vectors.composed([pool.correct for pool in kept], smaller / total)
    incorrect = run.vectors.composed([pool.incorrect for pool in kept], smaller / total)
    contrast = PoolContrast.of(correct, incorrect)
    return Inside(len(kept), len(parts), correct.n, incorrect.n, contrast)


def _trend_sentence(name: str, trend: Trend | Missing) -> str:
    if isinstance(trend, Missing):
        return f"{name}: {trend.missing}."
    steps = count(trend.against, "step")
    return f"{name}: {trend.shape}, Spearman {trend.spearman:.2f}, {steps} the other way."


def _inside_sentence(name: str, part: Inside | Missing) -> str:
    if isinstance(part, Missing):
        return f"Inside {name}s: not available, {part.missing}."
    return (
        f"Inside {name}s (as many documents of each of {part.parts} {name}s on both sides): difference in "
        f"dispersion {interval_text(part.pools.figure, '+.4f')}."
    )


def pools_sentence(mixtures: Mixtures | Missing) -> str:
    """A sentence: are right answers more dispersed than wrong ones, over all and inside subjects or tasks?"""
    if isinstance(mixtures, Missing):
        return f"Whether right answers are more dispersed could not be tested: {mixtures.missing}."
    figure = mixtures.pools.figure
    if math.isnan(figure.low):
        return (
            f"Whether right answers are more dispersed is not clear with {mixtures.correct_documents} "
            f"right and {mixtures.incorrect_documents} wrong documents: {FEWEST} of each are needed."
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
        f"Right answers are {word} dispersed over all",
        f"Whether right answers are {word} dispersed, or come from {word} dispersed {parts}, is not clear",
    )
    return claim_sentence(claim, figure, parts, inside, nothing=0.0, spec="+.4f")
