"""What is drawn from the labelled documents: mixtures of right and wrong ones, parts, batches of slices."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.audit.run import Run
from lmeval_dispersion.audit.slices import Slice, by_value

Array = NDArray[np.float64]
Rows = NDArray[np.int64]

SIZE, SEEDS = 100, 10  # documents a mixture, draws of each
SMALLEST = 20  # documents a mixture may shrink to
CALIBRATION_SHARE, VALIDATION_SHARE = 0.2, 0.1
STEP = 2  # per cent between the target accuracies of calibration
REPEATS = 4  # batches a target on the calibration part; half as many on the others
FEWEST_TARGETS = 5


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


class Split(NamedTuple):
    """Rows of the three disjoint parts of the labelled documents."""

    calibration: Rows
    validation: Rows
    test: Rows


class Batches(NamedTuple):
    """Batches of documents with their dispersion and their known accuracy, arrays of one length."""

    rows: list[Rows]
    dispersion: Array
    accuracy: Array


def split(rows: Rows, rng: np.random.Generator) -> Split:
    """A random split, 20 % calibration, 10 % validation, 70 % test."""
    order = rng.permutation(rows)
    first = round(len(order) * CALIBRATION_SHARE)
    second = first + round(len(order) * VALIDATION_SHARE)
    return Split(order[:first], order[first:second], order[second:])


def batch_size(run: Run, rows: Rows, share: float, wanted: int) -> int:
    """Documents a batch, such that a part with ``share`` of ``rows`` likely reaches every target."""
    found = pools(run, rows)
    smaller = min(len(found.correct), len(found.incorrect))
    # 0.8: parts are random, and some hold fewer of the rarer kind than their share of it.
    return mixture_size(int(0.8 * share * smaller), wanted)


def mixture_batches(
    run: Run, rows: Rows, size: int, *, repeats: int, step: int = STEP, rng: np.random.Generator
) -> Batches:
    """Mixtures of ``size`` documents of these rows at every reachable target accuracy in ``step`` % steps."""
    pool = pools(run, rows)
    counts = sorted({round(target * size / 100) for target in range(0, 101, step)})
    drawn = [
        pool.draw(rng, size, count) for count in counts if pool.reaches(size, count) for _ in range(repeats)
    ]
    return _measured(run, drawn, size)


def natural_batches(run: Run, rows: Rows, size: int, rng: np.random.Generator) -> Batches:
    """One random batch of each subject (else category) that has ``size`` documents among these rows.

    Its accuracy is the share of correct documents in the batch. Empty where fewer than two slices are
    large enough.
    """
    for column in ("subject", "category"):
        slices = by_value(run.documents[column].iloc[rows].tolist())
        large = [Slice(g.name, rows[g.rows]) for g in slices if len(g.rows) >= size]
        if len(large) >= 2:
            chosen = [rng.choice(g.rows, size=size, replace=False) for g in large]
            return _measured(run, [Mixture(c, int(run.right[c].sum())) for c in chosen], size)
    return Batches([], np.empty(0), np.empty(0))


def _measured(run: Run, drawn: list[Mixture], size: int) -> Batches:
    rows = [m.rows for m in drawn]
    return Batches(rows, run.vectors.dispersions(rows), np.array([m.correct for m in drawn]) / size)
