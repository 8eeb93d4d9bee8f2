"""Controlled mixtures: does dispersion rise when more of the documents are ones the model answers right?

For every target accuracy 0, 10, ..., 100 %, 100 documents with exactly that share of correct ones are drawn
without replacement, ten times; the mean and standard error over the draws of their dispersion and of their
mean query perplexity are the two curves. `trend` describes any curve from its means and standard errors, also
those of the paper's tables.

Whether the curve would rise over other documents too is another question: its ends are the wrong and the
right documents, so the difference of these two pools, with an error over documents, answers it. Both are
asked again inside subjects and tasks: every mixture of one draw then has the same number of documents of
each subject, and only the share of right ones changes.

Source: RD sections 3.1 and B.1.2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmeval_dispersion.auditing.run import FEWEST, Run
from lmeval_dispersion.auditing.slices import Slice, strata
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.geometry import Estimate
from lmeval_dispersion.statistics import normal_bounds, rank_correlations

Rows = NDArray[np.int64]

TARGETS = tuple(range(0, 101, 10))
SIZE, SEEDS = 100, 10  # documents a mixture, draws of each
SMALLEST = 20  # documents a mixture may shrink to


class Mixture(NamedTuple):
    """One drawn slice: its rows and how many of them are correct."""

    rows: Rows
    correct: int


class Pools(NamedTuple):
    """Correct and incorrect documents to draw mixtures from, without replacement inside a mixture."""

    correct: Rows
    incorrect: Rows

    def reaches(self, size: int, correct: int) -> bool:
        """Whether ``correct`` of ``size`` documents can be drawn correct, and the others incorrect."""
        return correct <= len(self.correct) and size - correct <= len(self.incorrect)

    def draw(self, rng: np.random.Generator, size: int, correct: int) -> Mixture:
        """A mixture of exactly ``correct`` correct documents among ``size``."""
        parts = (
            rng.choice(self.correct, size=correct, replace=False),
            rng.choice(self.incorrect, size=size - correct, replace=False),
        )
        return Mixture(np.concatenate(parts), correct)


def pools(run: Run, rows: Rows) -> Pools:
    """The labelled ones of ``rows``, split by whether the model answered them correctly."""
    labelled = rows[~np.isnan(run.score[rows])]
    right = run.right[labelled]
    return Pools(labelled[right], labelled[~right])


def mixture_size(smaller: int, wanted: int = SIZE) -> int:
    """Documents a mixture: ``wanted``, or less where the smaller of the two pools holds fewer.

    A multiple of ten, so that every share in steps of 10 % is exact, and at least :data:`SMALLEST`.
    """
    return max(min(wanted, smaller // 10 * 10), min(SMALLEST, wanted))


class Step(NamedTuple):
    """One step of a curve against its direction: levels, change of the mean, and change / its error."""

    from_level: float
    to_level: float
    change: float
    z: float


class Trend(NamedTuple):
    """How a curve moves with its level.

    Attributes:
        spearman: Rank correlation of the means with the levels: 1 rises always, -1 falls always; NaN where
            fewer than three levels or all means equal. It has no interval: the means share documents.
        shape: ``increasing``, ``decreasing`` or ``not monotone`` (ties allowed), of the means as they are.
        against: Steps that go against the direction of ``spearman``.
    """

    spearman: float
    shape: str
    against: list[Step]


def trend(levels: ArrayLike, means: ArrayLike, errors: ArrayLike) -> Trend:
    """How ``means`` (k,) with standard ``errors`` (k,) move with ``levels`` (k,), ascending or not.

    A NaN error counts as 0; levels with a NaN mean are left out.

    >>> trend([0, 50, 100], [1.0, 2.0, 3.0], [0.0, 0.0, 0.0]).shape
    'increasing'
    """
    x, y, e = (np.asarray(values, dtype=np.float64) for values in (levels, means, errors))
    keep = ~np.isnan(y)
    order = np.argsort(x[keep], kind="stable")
    x, y, e = x[keep][order], y[keep][order], np.nan_to_num(e[keep][order])
    if len(x) < 3 or np.ptp(y) == 0:
        return Trend(float("nan"), "undefined", [])
    rho = float(rank_correlations(x, y[None])[0])
    sign = 1.0 if rho >= 0 else -1.0
    steps, step_errors = np.diff(y), np.sqrt(e[1:] ** 2 + e[:-1] ** 2)
    against = [
        Step(float(x[i]), float(x[i + 1]), float(steps[i]), _ratio(steps[i], step_errors[i]))
        for i in np.flatnonzero(sign * steps < 0)
    ]
    shape = "not monotone" if against else ("increasing" if sign > 0 else "decreasing")
    return Trend(rho, shape, against)


def mixture_curves(
    run: Run, *, size: int = SIZE, seeds: int = SEEDS, seed: int = 0, curves: bool = True
) -> dict[str, Any]:
    """The two curves over target accuracies with their trends; without ``curves`` only their ends, the pools.

    Raises:
        UsageError: No labels, or all documents correct or all incorrect.
    """
    pool = pools(run, run.labelled)
    smaller = min(len(pool.correct), len(pool.incorrect))
    if not len(run.labelled):
        raise UsageError("mixtures need labelled documents, and none of these has a label")
    if not smaller:
        side = "correctly" if len(pool.correct) else "wrongly"
        raise UsageError(
            f"mixtures need right and wrong answers, and all {len(run.labelled)} were answered {side}"
        )
    ends = {
        "correct_documents": len(pool.correct),
        "incorrect_documents": len(pool.incorrect),
        "pools": pool_contrast(run, pool),
        "perplexity_pools": perplexity_contrast(run, pool),
        "inside": {
            name: _inside(run, parts, size, seeds if curves else 0, np.random.default_rng([seed, 7]))
            for name, parts in strata(run).items()
        },
    }
    if not curves:
        return {**ends, "curve": []}
    size_used = mixture_size(smaller, size)
    # Shares are multiples of 10 %, and sizes multiples of ten: every count is whole.
    counts = {target: round(target * size_used / 100) for target in TARGETS}
    reached = [target for target in TARGETS if pool.reaches(size_used, counts[target])]
    chosen = [
        pool.draw(np.random.default_rng([seed, draw, target]), size_used, counts[target])
        for target in reached
        for draw in range(seeds)
    ]
    shape = (len(reached), seeds)
    dispersions = run.vectors.dispersions([m.rows for m in chosen]).reshape(shape)
    perplexities = np.array([_mean_perplexity(run, m.rows) for m in chosen]).reshape(shape)
    return {
        "documents_per_mixture": size_used,
        "asked_documents_per_mixture": size,
        "seeds": seeds,
        **ends,
        "unreachable_targets": [target for target in TARGETS if target not in reached],
        # Near 1 the draws are nearly the same documents, and their spread says nothing.
        "share_of_smaller_pool": min(size_used / smaller, 1.0),
        "curve": [
            {
                "target_accuracy": target,
                **_point("dispersion", dispersions[i]),
                **_point("query_perplexity", perplexities[i]),
            }
            for i, target in enumerate(reached)
        ],
        "dispersion_trend": _trend(reached, dispersions),
        "query_perplexity_trend": _trend(reached, perplexities),
    }


def pool_contrast(run: Run, pool: Pools) -> dict[str, float]:
    """Dispersion of all correct and of all incorrect documents, and their difference with a 95 % interval.

    The curves' error bars are about draws from these documents; this interval is about other documents of
    the same kind. NaN where a pool has fewer than three documents, the interval where it has fewer than 20.
    """
    nan = float("nan")
    correct, incorrect = (
        run.vectors.estimate(rows) if len(rows) >= 3 else Estimate(nan, nan, len(rows))
        for rows in (pool.correct, pool.incorrect)
    )
    return _contrast(correct, incorrect)


def perplexity_contrast(run: Run, pool: Pools) -> dict[str, float]:
    """Mean query perplexity of the correct minus that of the incorrect documents, as pool_contrast."""
    estimates = []
    for rows in (pool.correct, pool.incorrect):
        values = run.perplexity[rows]
        values = values[np.isfinite(values)]
        n = len(values)
        error = float(values.std(ddof=1) / np.sqrt(n)) if n >= 3 else float("nan")
        estimates.append(Estimate(float(values.mean()) if n >= 3 else float("nan"), error, n))
    return _contrast(*estimates)


def _contrast(correct: Estimate, incorrect: Estimate) -> dict[str, float]:
    difference = correct.mean - incorrect.mean
    error = float(np.hypot(correct.se, incorrect.se))
    if min(correct.n, incorrect.n) < FEWEST or not error > 0:
        error = float("nan")
    low, high = normal_bounds(difference, error)
    return {
        "correct": correct.mean,
        "correct_se": correct.se,
        "incorrect": incorrect.mean,
        "incorrect_se": incorrect.se,
        "difference": difference,
        "difference_low": low,
        "difference_high": high,
    }


def _inside(run: Run, parts: list[Slice], size: int, seeds: int, rng: np.random.Generator) -> dict[str, Any]:
    """The curve and the pools with the same composition of parts at every share of right documents.

    A part counts with the smaller of its two numbers of right and wrong documents, two at least.
    """
    kept = [
        pool for part in parts if min(len((pool := pools(run, part.rows)).correct), len(pool.incorrect)) > 1
    ]
    smaller = np.array([min(len(pool.correct), len(pool.incorrect)) for pool in kept], dtype=np.int64)
    total = int(smaller.sum())
    if total < SMALLEST:
        return {"missing": f"its parts hold {total} pairs of a right and a wrong document, {SMALLEST} needed"}
    shares = smaller / total
    correct = run.vectors.composed([pool.correct for pool in kept], shares)
    incorrect = run.vectors.composed([pool.incorrect for pool in kept], shares)
    ends = {
        "parts": len(kept),
        "of_parts": len(parts),
        "correct_documents": correct.n,
        "incorrect_documents": incorrect.n,
        "pools": _contrast(correct, incorrect),
    }
    if not seeds:
        return {**ends, "curve": []}
    size = mixture_size(total, size)
    places = np.repeat(np.arange(len(kept)), smaller)
    composition = [rng.choice(places, size, replace=False) for _ in range(seeds)]
    counts = [round(target * size / 100) for target in TARGETS]
    drawn = [_of_composition(kept, chosen, count, rng) for count in counts for chosen in composition]
    values = run.vectors.dispersions(drawn).reshape(len(TARGETS), seeds)
    return {
        **ends,
        "documents_per_mixture": size,
        "curve": [
            {"target_accuracy": target, **_point("dispersion", values[i])} for i, target in enumerate(TARGETS)
        ],
        "dispersion_trend": _trend(list(TARGETS), values),
    }


def _of_composition(kept: list[Pools], places: Rows, correct: int, rng: np.random.Generator) -> Rows:
    """Rows of one mixture with one document of the part that each of ``places`` names, ``correct`` right."""
    turned = rng.permutation(len(places)) < correct
    rows = []
    for right in (True, False):
        for part, count in zip(*np.unique(places[turned == right], return_counts=True), strict=True):
            pool = kept[part].correct if right else kept[part].incorrect
            rows.append(rng.choice(pool, size=int(count), replace=False))
    return np.concatenate(rows)


def _mean_perplexity(run: Run, rows: Rows) -> float:
    values = run.perplexity[rows]
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")


def _point(name: str, values: NDArray[np.float64]) -> dict[str, float]:
    return {name: float(values.mean()), f"{name}_se": _error(values)}


def _error(values: NDArray[np.float64]) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


def _trend(targets: list[int], values: NDArray[np.float64]) -> dict[str, Any]:
    curve = trend(targets, values.mean(axis=1), [_error(row) for row in values])
    if curve.shape == "undefined":
        return {"missing": "the curve has fewer than three different known values"}
    return {**curve._asdict(), "against": [step._asdict() for step in curve.against]}


def _ratio(change: float, error: float) -> float:
    return float(change / error) if error > 0 else float("nan")
