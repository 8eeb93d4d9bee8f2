"""Controlled mixtures, documents with an exact share of right answers, and the paper's two uses of them.

*Curves*: does dispersion rise with that share? For every target accuracy 0, 10, ..., 100 %, 100 documents
with exactly that share of correct ones are drawn without replacement, ten times; the mean and standard error
over the draws of their dispersion and of their mean query perplexity are the two curves. Whether the curve
would rise over other documents too is another question: its ends are the wrong and the right documents, so
the difference of these two pools, with an error over documents, answers it; once more with the same share of
each subject (or task) on both sides.

*Protocol*: can accuracy be read off dispersion, learnt on mixtures? Per seed the labelled documents are split
20/10/70. Mixtures of the calibration part give pairs (dispersion, accuracy); linear, polynomial, isotonic and
random-forest regressions are fitted to them; the validation part picks one; the test part judges it, beside
estimators that use no dispersion. Test batches are the ``whole`` test part (the paper's figure), one batch of
each subject (``slices``: the hardest, and the one that users need) and ``mixtures`` of every accuracy.

Source: RD sections 3.1, B.1.2 and B.1.3. Average thresholded confidence (ATC): Garg et al., "Leveraging
unlabeled data to predict out-of-distribution performance", ICLR 2022.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lmeval_dispersion.auditing.figures import Claim, axis, claim_sentence, lines, without_nan
from lmeval_dispersion.auditing.run import FEWEST, Array, AuditRun, Missing, Rows, check_labels
from lmeval_dispersion.auditing.slices import Slice, by_value, strata
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.geometry import Estimate
from lmeval_dispersion.report import Chart, Col, Table
from lmeval_dispersion.statistics import Interval, normal_bounds, rank_correlations, student_interval

if TYPE_CHECKING:
    from sklearn.base import RegressorMixin

TARGETS = tuple(range(0, 101, 10))
SIZE, SEEDS = 100, 10  # documents a mixture, draws of each
SMALLEST = 20  # documents a mixture may shrink to

DISPERSION, TRIVIAL, CONSTANT = "dispersion", "trivial", "constant"
REGRESSIONS = ("linear", "polynomial", "isotonic", "random forest")
KINDS = {"whole": "Whole test part", "slices": "One batch a slice", "mixtures": "Mixtures"}
CALIBRATION, VALIDATION = 0.2, 0.1  # shares of the labelled documents
STEP = 2  # per cent between the target accuracies of calibration
REPEATS = 4  # batches a target on the calibration part; half as many on the others
FEWEST_TARGETS = 5


# --- drawing -----------------------------------------------------------------------------------------------


class Pools(NamedTuple):
    """Correct and incorrect documents to draw mixtures from."""

    correct: Rows
    incorrect: Rows

    @property
    def smaller(self) -> int:
        """Documents of the smaller one."""
        return min(len(self.correct), len(self.incorrect))

    def reaches(self, size: int, correct: int) -> bool:
        """Whether ``correct`` of ``size`` documents can be drawn correct, and the others incorrect."""
        return correct <= len(self.correct) and size - correct <= len(self.incorrect)

    def draw(self, rng: np.random.Generator, size: int, correct: int) -> Rows:
        """A mixture of exactly ``correct`` correct documents among ``size``."""
        parts = (
            rng.choice(self.correct, size=correct, replace=False),
            rng.choice(self.incorrect, size=size - correct, replace=False),
        )
        return np.concatenate(parts)


def pools(run: AuditRun, rows: Rows) -> Pools:
    """The labelled ones of ``rows``, split by whether the model answered them correctly."""
    labelled = rows[~np.isnan(run.score[rows])]
    right = run.right[labelled]
    return Pools(labelled[right], labelled[~right])


def mixture_size(smaller: int) -> int:
    """Documents a mixture: :data:`SIZE`, or less where the smaller of the two pools holds fewer.

    A multiple of ten, so that every share in steps of 10 % is exact, and at least :data:`SMALLEST`.
    """
    return max(min(SIZE, smaller // 10 * 10), SMALLEST)


# --- the curves --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trend:
    """How a curve moves with its level.

    Attributes:
        spearman: Rank correlation of the means with the levels: 1 rises always, -1 falls always. It has no
            interval: the means share documents.
        shape: ``increasing``, ``decreasing`` or ``not monotone`` (ties allowed), of the means as they are.
        against: Steps that go against the direction of ``spearman``.
    """

    spearman: float
    shape: str
    against: int


def trend(levels: ArrayLike, means: ArrayLike) -> Trend | Missing:
    """How ``means`` (k,) move with ``levels`` (k,), ascending or not; levels with a NaN mean are left out.

    >>> trend([0, 50, 100], [1.0, 2.0, 3.0]).shape
    'increasing'
    """
    x, y = np.asarray(levels, dtype=np.float64), np.asarray(means, dtype=np.float64)
    x, y = x[~np.isnan(y)], y[~np.isnan(y)]
    y = y[np.argsort(x, kind="stable")]
    if len(y) < 3 or np.ptp(y) == 0:
        return Missing("the curve has fewer than three different known values")
    rho = float(rank_correlations(np.sort(x), y[None])[0])
    sign = 1.0 if rho >= 0 else -1.0
    against = int((sign * np.diff(y) < 0).sum())
    return Trend(rho, "not monotone" if against else "increasing" if sign > 0 else "decreasing", against)


@dataclass(frozen=True)
class CurvePoint:
    """Mixtures of one target accuracy: means over draws, with their standard errors."""

    target_accuracy: Annotated[int, Col("Correct documents (%)", "d")]
    dispersion: Annotated[float, Col("Dispersion", ".4f", error="dispersion_se")]
    dispersion_se: float
    query_perplexity: Annotated[float, Col("Query perplexity", ".3f", error="query_perplexity_se")]
    query_perplexity_se: float


@dataclass(frozen=True)
class PoolContrast:
    """A number of the correct and of the incorrect documents, and their difference with its 95 % interval.

    The curves' error bars are about draws from these documents; this interval is about other documents of
    the same kind. NaN where a pool has fewer than three documents, the interval where it has fewer than 20.
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
        """From the two numbers."""
        difference = correct.mean - incorrect.mean
        error = math.hypot(correct.se, incorrect.se)
        if min(correct.n, incorrect.n) < FEWEST or not error > 0:
            error = math.nan
        bounds = normal_bounds(difference, error)
        return cls(correct.mean, correct.se, incorrect.mean, incorrect.se, difference, *bounds)

    @property
    def figure(self) -> Interval:
        """The difference with its interval."""
        return Interval(self.difference, self.difference_low, self.difference_high)


@dataclass(frozen=True)
class Inside:
    """The pools with the same share of each part on both sides, of how many parts and documents."""

    parts: int
    of_parts: int
    correct_documents: int
    incorrect_documents: int
    pools: PoolContrast


@dataclass(frozen=True)
class Mixtures:
    """The two curves over target accuracies with their trends, and the pools that are their ends.

    Attributes:
        documents_per_mixture, asked_documents_per_mixture, seeds: Size used and wanted; draws a target.
        correct_documents, incorrect_documents: The pools.
        share_of_smaller_pool: Near 1 the draws are nearly the same documents, and their spread says nothing.
        unreachable_targets: Target accuracies that the pools do not allow.
        pools: Dispersion of the pools.
        inside: ``subject`` or ``task`` -> the same inside these.
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

    def tables(self) -> dict[str, Table]:
        """The curves over target accuracies."""
        points = [without_nan(point) for point in self.curve]
        return {"mixtures": Table.of(points, "The curves, mean ± standard error over draws", name="mixtures")}

    def charts(self) -> dict[str, Chart]:
        """Dispersion over the share of correct documents."""
        trend = self.dispersion_trend
        if isinstance(trend, Missing):
            return {}
        rows = [
            {"series": "all documents", "target": point.target_accuracy, "value": point.dispersion,
             "low": point.dispersion - point.dispersion_se, "high": point.dispersion + point.dispersion_se}
            for point in self.curve
        ]  # fmt: skip
        first, *_, last = self.curve
        share = axis("target", "correct documents (%)", axis={"values": list(range(0, 101, 20))})
        chart = Chart(
            lines(rows, share, axis("value", "dispersion"), bars=True),
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
    """The two curves with their trends, and the pools."""
    check_labels(run, "mixtures need")
    pool = pools(run, run.labelled)
    used = mixture_size(pool.smaller)
    # Shares are multiples of 10 %, and sizes multiples of ten: every count is whole.
    counts = {target: round(target * used / 100) for target in TARGETS}
    reached = [target for target in TARGETS if pool.reaches(used, counts[target])]
    drawn = [
        pool.draw(np.random.default_rng([seed, draw, target]), used, counts[target])
        for target in reached
        for draw in range(SEEDS)
    ]
    shape = (len(reached), SEEDS)
    dispersions = run.vectors.dispersions(drawn).reshape(shape)
    perplexities = np.array([_mean_perplexity(run, rows) for rows in drawn]).reshape(shape)
    return Mixtures(
        documents_per_mixture=used,
        asked_documents_per_mixture=SIZE,
        seeds=SEEDS,
        correct_documents=len(pool.correct),
        incorrect_documents=len(pool.incorrect),
        share_of_smaller_pool=min(used / pool.smaller, 1.0),
        unreachable_targets=[target for target in TARGETS if target not in reached],
        pools=PoolContrast.of(*(_dispersion(run, rows) for rows in pool)),
        curve=[
            CurvePoint(target, *_mean_and_error(dispersion), *_mean_and_error(perplexity))
            for target, dispersion, perplexity in zip(reached, dispersions, perplexities, strict=True)
        ],
        dispersion_trend=trend(reached, dispersions.mean(axis=1)),
        query_perplexity_trend=trend(reached, perplexities.mean(axis=1)),
        inside={name: _inside(run, parts) for name, parts in strata(run).items()},
    )


def _mean_perplexity(run: AuditRun, rows: Rows) -> float:
    values = run.perplexity[rows]
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else math.nan


def _dispersion(run: AuditRun, rows: Rows) -> Estimate:
    return run.vectors.estimate(rows) if len(rows) >= 3 else Estimate(math.nan, math.nan, len(rows))


def _mean_and_error(values: Array) -> tuple[float, float]:
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


def _inside(run: AuditRun, parts: list[Slice]) -> Inside | Missing:
    """A part counts with the smaller of its two numbers of right and wrong documents, two at least."""
    kept = [pool for pool in (pools(run, part.rows) for part in parts) if pool.smaller > 1]
    smaller = np.array([pool.smaller for pool in kept], dtype=np.int64)
    total = int(smaller.sum())
    if total < SMALLEST:
        return Missing(f"its parts hold {total} pairs of a right and a wrong document, {SMALLEST} needed")
    sides = zip(*kept, strict=True)
    correct, incorrect = (run.vectors.composed(list(side), smaller / total) for side in sides)
    return Inside(len(kept), len(parts), correct.n, incorrect.n, PoolContrast.of(correct, incorrect))


def pools_sentence(mixtures: Mixtures | Missing) -> str:
    """Whether right answers are more dispersed than wrong ones, over all and inside subjects or tasks."""
    if isinstance(mixtures, Missing):
        return f"Whether right answers are more dispersed could not be tested: {mixtures.missing}."
    figure = mixtures.pools.figure
    if math.isnan(figure.low):
        return (
            f"Whether right answers are more dispersed is not clear with {mixtures.correct_documents} "
            f"right and {mixtures.incorrect_documents} wrong documents: {FEWEST} of each are needed."
        )
    known = [(f"{name}s", part) for name, part in mixtures.inside.items() if isinstance(part, Inside)]
    parts, inside = (known[0][0], known[0][1].pools.figure) if known else ("", None)
    word = "more" if figure.side(0) > 0 else "less"
    claim = Claim(
        "Right and wrong answers do not differ clearly in dispersion",
        f"Right answers are {word} dispersed than wrong ones",
        f"Right answers are {word} dispersed over all",
        f"Whether right answers are {word} dispersed, or come from {word} dispersed {parts}, is not clear",
    )
    return claim_sentence(claim, figure, parts, inside, nothing=0.0, spec="+.4f")


# --- the protocol ------------------------------------------------------------------------------------------


class Batches(NamedTuple):
    """Batches of documents with their dispersion and their known accuracy, arrays of one length."""

    rows: list[Rows]
    dispersion: Array
    accuracy: Array


Predictor = Callable[[Batches], Array]  # the estimated accuracy of every batch


@dataclass(frozen=True)
class PaperError:
    """Errors in points of one estimator on one kind of test batch, over splits."""

    kind: Annotated[str, Col("Test batches")]
    estimator: Annotated[str, Col("Estimator")]
    mae: Annotated[float, Col("Mean absolute error (points)", ".2f", short="Error (points)")]
    low: Annotated[float, Col("95 % from", ".2f")]
    high: Annotated[float, Col("to", ".2f")]
    bias: Annotated[float, Col("Bias (points)", "+.2f", drop=1)]


@dataclass(frozen=True)
class PaperVerdict:
    """Whether dispersion beats the better blind guess on one kind of test batch; bounds over splits."""

    kind: str
    winner: str
    rival: str
    difference: float
    difference_low: float
    difference_high: float
    better: bool


@dataclass(frozen=True)
class PaperProtocol:
    """The protocol over several splits.

    Attributes:
        documents_per_batch: Used; the labelled documents may allow fewer than were asked for.
        seeds: Splits.
        chosen: Regression -> in how many splits validation picked it.
        errors: Of every estimator under every kind of test batch.
        verdicts: One for each kind of test batch that every split has.
    """

    documents_per_batch: int
    seeds: int
    chosen: Mapping[str, int]
    errors: Sequence[PaperError]
    verdicts: Sequence[PaperVerdict]

    def tables(self) -> dict[str, Table]:
        """The errors of every estimator."""
        caption = "Errors of the paper's protocol"
        return {"paper": Table.of(self.errors, caption, name="paper-protocol")}


def paper_protocol(run: AuditRun, *, seeds: int = SEEDS, seed: int = 0) -> PaperProtocol:
    """Errors of every estimator under every kind of test batch, over ``seeds`` splits."""
    check_labels(run, "calibration needs")
    # 0.8: parts are random, and some hold fewer of the rarer kind than their share of it.
    size = mixture_size(int(0.8 * VALIDATION * pools(run, run.labelled).smaller))
    errors: dict[tuple[str, str], list[Array]] = {}  # (kind, estimator) -> those of every split's batches
    chosen = []
    for k in range(seeds):
        best, of_split = _split_errors(run, size, k, np.random.default_rng([seed, k]))
        chosen.append(best)
        for key, values in of_split.items():
            errors.setdefault(key, []).append(values)
    errors = {key: splits for key, splits in errors.items() if len(splits) == seeds}
    return PaperProtocol(
        documents_per_batch=size,
        seeds=seeds,
        chosen={kind: chosen.count(kind) for kind in REGRESSIONS if kind in chosen},
        errors=[
            _paper_error(kind, name, errors[kind, name])
            for kind in KINDS
            for name in sorted((n for of, n in errors if of == kind), key=_is_single_regression)
        ],
        verdicts=[_verdict(kind, errors) for kind in KINDS if (kind, DISPERSION) in errors],
    )


def _is_single_regression(name: str) -> bool:
    return name.startswith(f"{DISPERSION},")


def _split_errors(
    run: AuditRun, size: int, k: int, rng: np.random.Generator
) -> tuple[str, dict[tuple[str, str], Array]]:
    """The regression that validation picked in split ``k``, and the errors in points on every test batch."""
    order = rng.permutation(run.labelled)
    first = round(len(order) * CALIBRATION)
    second = first + round(len(order) * VALIDATION)
    labelled, test = order[:first], order[second:]
    calibration = mixture_batches(run, labelled, size, repeats=REPEATS, rng=rng)
    validation = mixture_batches(run, order[first:second], size, repeats=REPEATS // 2, rng=rng)
    _check_targets({"calibration": calibration, "validation": validation}, len(order), size)
    tests = {
        "whole": _measured(run, [test]),
        "slices": natural_batches(run, test, size, rng),
        "mixtures": mixture_batches(run, test, size, repeats=REPEATS // 2, step=10, rng=rng),
    }
    fits = {kind: _read_off(fit) for kind, fit in fit_all(calibration, seed=k).items()}
    off = {kind: np.abs(fit(validation) - validation.accuracy).mean() for kind, fit in fits.items()}
    best = min(off, key=lambda kind: off[kind])
    return best, {
        (kind, name): 100 * (estimate(batches) - batches.accuracy)
        for name, estimate in _estimators(run, labelled, calibration, fits, best).items()
        for kind, batches in tests.items()
        if len(batches.rows) and (name != CONSTANT or kind == "mixtures")
    }


def mixture_batches(
    run: AuditRun, rows: Rows, size: int, *, repeats: int, step: int = STEP, rng: np.random.Generator
) -> Batches:
    """Mixtures of ``size`` documents of these rows at every reachable target accuracy in ``step`` % steps."""
    pool = pools(run, rows)
    counts = sorted({round(target * size / 100) for target in range(0, 101, step)})
    drawn = [
        pool.draw(rng, size, count) for count in counts if pool.reaches(size, count) for _ in range(repeats)
    ]
    return _measured(run, drawn)


def natural_batches(run: AuditRun, rows: Rows, size: int, rng: np.random.Generator) -> Batches:
    """One random batch of each subject (else category) that has ``size`` documents among these rows.

    Empty where fewer than two slices are large enough.
    """
    for column in ("subject", "category"):
        slices = by_value(run.documents[column].iloc[rows].tolist())
        large = [rows[part.rows] for part in slices if len(part.rows) >= size]
        if len(large) >= 2:
            return _measured(run, [rng.choice(part, size=size, replace=False) for part in large])
    return _measured(run, [])


def _measured(run: AuditRun, rows: list[Rows]) -> Batches:
    accuracy = np.array([run.right[batch].sum() / len(batch) for batch in rows])
    return Batches(rows, run.vectors.dispersions(rows), accuracy)


def _check_targets(parts: Mapping[str, Batches], labelled: int, size: int) -> None:
    for name, batches in parts.items():
        reached = len(np.unique(batches.accuracy))
        if reached < FEWEST_TARGETS:
            raise UsageError(
                f"the {name} part of {labelled} labelled documents reaches {reached} target accuracies with "
                f"{size} documents a batch, and {FEWEST_TARGETS} are needed; label more documents"
            )


def fit_all(batches: Batches, *, seed: int = 0) -> dict[str, RegressorMixin]:
    """Every regression of the paper, fitted to pairs of dispersion and accuracy."""
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.isotonic import IsotonicRegression
    from sklearn.linear_model import LinearRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PolynomialFeatures, StandardScaler

    rising = not rank_correlations(batches.dispersion, batches.accuracy[None])[0] < 0
    models = (
        LinearRegression(),
        make_pipeline(PolynomialFeatures(3), LinearRegression()),
        IsotonicRegression(increasing=rising, out_of_bounds="clip"),
        RandomForestRegressor(n_estimators=50, min_samples_leaf=10, random_state=seed),
    )
    x = batches.dispersion[:, None]
    return {
        name: make_pipeline(StandardScaler(), model).fit(x, batches.accuracy)
        for name, model in zip(REGRESSIONS, models, strict=True)
    }


def _read_off(fit: Any) -> Predictor:
    return lambda batches: np.clip(fit.predict(batches.dispersion[:, None]), 0.0, 1.0)


def _estimators(
    run: AuditRun, labelled: Rows, calibration: Batches, fits: Mapping[str, Predictor], best: str
) -> dict[str, Predictor]:
    """Every estimator by name, knowing the labels of the calibration part only."""
    accuracy, middle = float(run.right[labelled].mean()), float(np.median(calibration.accuracy))
    estimators: dict[str, Predictor] = {
        DISPERSION: fits[best],
        TRIVIAL: lambda batches: np.full(len(batches.rows), accuracy),
        CONSTANT: lambda batches: np.full(len(batches.rows), middle),
        **{f"{DISPERSION}, {kind}": fit for kind, fit in fits.items()},
    }
    top = run.confidence
    if not np.isnan(top[run.labelled]).any():
        threshold = float(np.quantile(top[labelled], 1.0 - accuracy))
        estimators["mean confidence"] = lambda b: np.array([top[rows].mean() for rows in b.rows])
        estimators["ATC"] = lambda b: np.array([(top[rows] > threshold).mean() for rows in b.rows])
    return estimators


def _paper_error(kind: str, name: str, splits: Sequence[Array]) -> PaperError:
    sizes = [float(np.abs(values).mean()) for values in splits]
    bias = float(np.mean([values.mean() for values in splits]))
    return PaperError(kind, name, float(np.mean(sizes)), *student_interval(sizes), bias)


def _verdict(kind: str, errors: Mapping[tuple[str, str], Sequence[Array]]) -> PaperVerdict:
    """Who wins, and whether dispersion beats knowing nothing."""
    sizes = {
        name: np.array([np.abs(values).mean() for values in splits])
        for (of, name), splits in errors.items()
        if of == kind and not _is_single_regression(name)
    }
    # Mixtures have every accuracy alike, so there the best blind guess is the middle one.
    rival = min((name for name in (TRIVIAL, CONSTANT) if name in sizes), key=lambda name: sizes[name].mean())
    difference = sizes[DISPERSION] - sizes[rival]
    low, high = student_interval(difference)
    winner = min(sizes, key=lambda name: sizes[name].mean())
    return PaperVerdict(kind, winner, rival, float(difference.mean()), low, high, high < 0)
