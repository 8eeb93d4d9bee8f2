"""Controlled mixtures: does dispersion rise when more of the documents are ones the model answers right?

For every target accuracy 0, 10, ..., 100 %, 100 documents with exactly that share of correct ones are drawn
without replacement, ten times; the mean and standard error over the draws of their dispersion and of their
mean query perplexity are the two curves.

Source: RD sections 3.1 and B.1.2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.audit.run import Run
from lmeval_dispersion.audit.trend import trend
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.geometry import Estimate

Rows = NDArray[np.int64]

SIZE, SEEDS = 100, 10
_Z = 1.959963984540054  # 97.5 % point of the normal distribution
TARGETS = tuple(range(0, 101, 10))
SMALLEST = 20  # documents a slice may shrink to


class Mixture(NamedTuple):
    """One drawn slice: its rows and how many of them are correct."""

    rows: Rows
    correct: int


class Pools:
    """Correct and incorrect documents to draw mixtures from, without replacement inside a mixture."""

    def __init__(self, correct: Rows, incorrect: Rows) -> None:
        self.correct, self.incorrect = correct, incorrect

    def reaches(self, size: int, correct: int) -> bool:
        """Whether ``correct`` of ``size`` documents can be drawn correct, and the others incorrect."""
        return correct <= len(self.correct) and size - correct <= len(self.incorrect)

    def drawn(self, rng: np.random.Generator, size: int, correct: int) -> Mixture:
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


def slice_size(smaller: int, wanted: int = SIZE) -> int:
    """Documents a mixture: ``wanted``, or less where the smaller of the two pools holds fewer.

    A multiple of ten, so that every share in steps of 10 % is exact, and at least :data:`SMALLEST`.
    """
    return max(min(wanted, smaller // 10 * 10), min(SMALLEST, wanted))


def mixture_curves(run: Run, *, size: int = SIZE, seeds: int = SEEDS, seed: int = 0) -> dict[str, Any]:
    """The two curves over target accuracies with their trends.

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
    size_used = slice_size(smaller, size)
    # Shares are multiples of 10 %, and sizes multiples of ten: every count is whole.
    counts = {target: round(target * size_used / 100) for target in TARGETS}
    reached = [target for target in TARGETS if pool.reaches(size_used, counts[target])]
    chosen = [
        pool.drawn(np.random.default_rng([seed, draw, target]), size_used, counts[target])
        for target in reached
        for draw in range(seeds)
    ]
    shape = (len(reached), seeds)
    dispersions = run.points.dispersions([m.rows for m in chosen]).reshape(shape)
    perplexities = np.array([_mean_perplexity(run, m.rows) for m in chosen]).reshape(shape)
    return {
        "documents_per_mixture": size_used,
        "asked_documents_per_mixture": size,
        "seeds": seeds,
        "correct_documents": len(pool.correct),
        "incorrect_documents": len(pool.incorrect),
        "pools": pool_contrast(run, pool),
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
        "dispersion_trend": _trend(reached, dispersions, seed),
        "query_perplexity_trend": _trend(reached, perplexities, seed),
    }


def pool_contrast(run: Run, pool: Pools) -> dict[str, float]:
    """Dispersion of all correct and of all incorrect documents, and their difference with a 95 % interval.

    The curves' error bars are about draws from these documents; this interval is about other documents of
    the same kind. NaN where a pool has fewer than three.
    """
    nan = float("nan")
    found: dict[str, float] = {}
    for name, rows in (("correct", pool.correct), ("incorrect", pool.incorrect)):
        estimate = run.points.estimate(rows) if len(rows) >= 3 else Estimate(nan, nan, len(rows))
        found |= {name: estimate.mean, f"{name}_se": estimate.se}
    difference = found["correct"] - found["incorrect"]
    half = _Z * float(np.hypot(found["correct_se"], found["incorrect_se"]))
    return {
        **found,
        "difference": difference,
        "difference_low": difference - half,
        "difference_high": difference + half,
    }


def _mean_perplexity(run: Run, rows: Rows) -> float:
    values = run.perplexity[rows]
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")


def _point(name: str, values: NDArray[np.float64]) -> dict[str, float]:
    return {name: float(values.mean()), f"{name}_se": _error(values)}


def _error(values: NDArray[np.float64]) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


def _trend(targets: list[int], values: NDArray[np.float64], seed: int) -> dict[str, Any]:
    found = trend(targets, values.mean(axis=1), [_error(row) for row in values], seed=seed)
    if found.shape == "undefined":
        return {"missing": "the curve has fewer than three different known values"}
    return {**found._asdict(), "against": [step._asdict() for step in found.against]}
