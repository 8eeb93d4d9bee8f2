"""How often intervals cover and verdicts are wrong, on simulated scores whose truth is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import t as student

from lmeval_dispersion.auditing.paired import SharedAnswers, best_of, paired_scores
from lmeval_dispersion.store.groups import document_weights

Array = NDArray[np.float64]
_POOL = 50_000  # documents of each simulated pair, whose mean difference is the truth


def _preferences(
    rng: np.random.Generator, rates: tuple[float, float], spread: float
) -> list[Array]:
    """Scores near 0 or 1, as a judge's preferences: two models of these mean scores."""
    hard = rng.normal(size=_POOL)
    scores = []
    for rate in rates:
        chance = np.clip(rate + 0.3 * hard * min(rate, 1 - rate), 0.001, 0.999)
        scores.append(rng.beta(spread * chance, spread * (1 - chance)))
    return scores


def _passes(rng: np.random.Generator, rates: tuple[float, float]) -> list[Array]:
    """pass@1 of ten programs."""
    ease = rng.beta(0.3, 0.3, size=_POOL)
    return [rng.binomial(10, np.clip(2 * ease * rate, 0, 1)) / 10 for rate in rates]


def _mostly_nothing(rng: np.random.Generator, shares: tuple[float, float]) -> list[Array]:
    """f1 that is 0 for these shares of the documents."""
    common = rng.random(_POOL)
    scores = []
    for share in shares:
        luck = np.where(rng.random(_POOL) < 0.7, common, rng.random(_POOL))
        scores.append(np.where(luck < share, 0.0, rng.beta(2, 2, size=_POOL)))
    return scores


def _jumps(rng: np.random.Generator, share: float, up: float) -> list[Array]:
    """Nearly equal scores; a few documents go from one end to the other."""
    first = rng.beta(0.2, 2, size=_POOL)
    near = np.clip(first + rng.normal(0, 0.01, _POOL), 0, 1)
    jumped = (rng.random(_POOL) < up).astype(float)
    return [first, np.where(rng.random(_POOL) < share, jumped, near)]


def _long_tails(rng: np.random.Generator, width: float) -> list[Array]:
    first = np.minimum(rng.lognormal(-3, width, _POOL), 1)
    return [first, np.minimum(first * rng.lognormal(0.1, width, _POOL), 1)]


def _pairs() -> Iterator[tuple[str, Callable[[np.random.Generator], list[Array]]]]:
    """Pairs of models by name, each as a function that draws their scores."""
    for rates in ((0.02, 0.05), (0.05, 0.05), (0.05, 0.15), (0.2, 0.3), (0.5, 0.6), (0.9, 0.95)):
        for spread in (0.1, 0.4):
            yield f"preferences {rates} {spread}", partial(_preferences, rates=rates, spread=spread)
    for rates in ((0.3, 0.35), (0.05, 0.08), (0.5, 0.5)):
        yield f"passes {rates}", partial(_passes, rates=rates)
    for shares in ((0.7, 0.6), (0.95, 0.9), (0.98, 0.98)):
        yield f"f1 {shares}", partial(_mostly_nothing, shares=shares)
    for share in (0.03, 0.05, 0.08, 0.12):
        for up in (0.8, 1.0):
            yield f"jumps {share} {up}", partial(_jumps, share=share, up=up)
    for width in (1.0, 2.0):
        yield f"long tails {width}", partial(_long_tails, width=width)


def _coverage(n: int, draws: int, seed: int) -> tuple[dict[str, float], dict[str, float]]:
    """The share of intervals that hold the truth, pair by pair: ours, and Student's."""
    rng = np.random.default_rng(seed)
    ours = dict[str, float]()
    students = dict[str, float]()
    for name, simulate in _pairs():
        x, y = simulate(rng)
        truth = float((y - x).mean())
        held = 0
        held_by_student = 0
        for rows in rng.integers(0, _POOL, size=(draws, n)):
            found = paired_scores(x[rows], y[rows])
            held += found.low <= truth <= found.high
            change = (y - x)[rows]
            reach = student.ppf(0.975, n - 1) * change.std(ddof=1) / math.sqrt(n)
            held_by_student += abs(change.mean() - truth) <= reach
        ours[name] = held / draws
        students[name] = held_by_student / draws
    return ours, students


def _check(n: int, draws: int) -> None:
    ours, students = _coverage(n, draws, seed=n)
    assert np.mean([*ours.values()]) >= 0.93
    assert min(ours.values()) >= 0.85, min(ours, key=ours.__getitem__)
    assert min(students.values()) < 0.8  # the tails are heavy


def test_few_documents_with_heavy_tails_are_covered() -> None:
    _check(n=20, draws=60)


@pytest.mark.slow
@pytest.mark.parametrize("n", [20, 30, 50])
def test_few_documents_with_heavy_tails_are_covered_at_full_count(n: int) -> None:
    _check(n, draws=2000)


@pytest.mark.parametrize("shift", [0.0, 0.1])
def test_the_interval_of_the_mean_over_tasks_covers_it(shift: float) -> None:
    """Tasks of 20 to 200 documents, right and wrong, whose differences differ; 96 % in 3,000 draws."""
    rng = np.random.default_rng(1)
    sizes = {"a": 20, "b": 60, "c": 200, "d": 40}
    shares = {
        "a": (0.3, 0.3 + 2 * shift),
        "b": (0.6, 0.6),
        "c": (0.5, 0.5 + shift),
        "d": (0.8, 0.8 - shift),
    }
    tasks = [name for name, size in sizes.items() for _ in range(size)]
    weights = document_weights(tasks, {})
    first, second = (np.array([shares[name][side] for name in tasks]) for side in (0, 1))
    truth = float(np.mean([after - before for before, after in shares.values()]))
    held = 0
    for _ in range(400):
        luck = rng.random(len(tasks))
        own = np.where(rng.random(len(tasks)) < 0.6, luck, rng.random(len(tasks)))
        found = paired_scores((luck < first) * 1.0, (own < second) * 1.0, weights=weights)
        held += found.low <= truth <= found.high
        assert found.difference == pytest.approx(
            float(weights @ ((own < second) * 1.0 - (luck < first)))
        )
    assert held / 400 >= 0.92


def _runs(
    rng: np.random.Generator, shares: list[float], n: int, *, partly: bool
) -> list[SharedAnswers]:
    """Runs of these mean scores on n documents, hard and easy ones; right and wrong, or partly right."""
    luck = rng.random(n)
    answers = []
    for share in shares:
        own = np.where(rng.random(n) < 0.6, luck, rng.random(n))
        score = (own < share).astype(float)
        if partly:
            score = np.where(rng.random(n) < 0.5, score, rng.binomial(5, share, size=n) / 5)
        answers.append(SharedAnswers(score, np.ones(n, dtype=bool)))
    return answers


@pytest.mark.parametrize("partly", [False, True])
@pytest.mark.parametrize(
    ("shares", "draws"),
    [
        ([0.5] * 5, 150),
        ([0.7, 0.7, 0.7, 0.4, 0.3], 150),
        pytest.param([0.5] * 8, 2000, marks=pytest.mark.slow),
    ],
)
def test_a_best_run_is_seldom_shown_worse(shares: list[float], draws: int, partly: bool) -> None:
    """Of equally good runs none is; three standard errors of 5 % are allowed."""
    rng = np.random.default_rng(len(shares))
    names = [f"run {i}" for i in range(len(shares))]
    tied = {name for name, share in zip(names, shares, strict=True) if share == max(shares)}
    wrong = 0
    missed = 0
    for _ in range(draws):
        found = best_of(dict(zip(names, _runs(rng, shares, 150, partly=partly), strict=True)))
        assert found is not None
        wrong += bool(tied & {*found.worse})
        missed += len({*names} - tied - {*found.worse})
    assert wrong / draws <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / draws)
    assert missed <= 0.1 * draws * (len(names) - len(tied))


def test_looking_for_the_best_among_many_is_allowed_for() -> None:
    """Twenty equal runs: the highest and the lowest have p < 5 % nearly always, and none is shown worse."""
    rng = np.random.default_rng(3)
    names = [f"run {i}" for i in range(20)]
    naive = 0
    wrong = 0
    for _ in range(12):
        runs = _runs(rng, [0.5] * 20, 150, partly=False)
        scores = [run.score.mean() for run in runs]
        pair = paired_scores(runs[int(np.argmin(scores))].score, runs[int(np.argmax(scores))].score)
        naive += pair.p < 0.05
        found = best_of(dict(zip(names, runs, strict=True)))
        wrong += found is None or bool(found.worse)
    assert naive > 8
    assert wrong <= 3
