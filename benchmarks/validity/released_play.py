"""Races, by the product's own code, and their rivals on the recorded answers of released models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.validity import earlier_rule
from lmeval_dispersion.asking import ERROR, MARGIN
from lmeval_dispersion.racing.contest import Contest, Scores, run
from lmeval_dispersion.racing.replay import raced
from lmeval_dispersion.racing.rule import SHARED, STEP, Bets

Floats = NDArray[np.float64]
Lanes = NDArray[np.int64]

ZERO_EVAL = 1319  # questions of its file, which does not say so


class Matrix(NamedTuple):
    """Recorded answers.

    Attributes:
        name: Of the file.
        scores: In [0, 1], (models, questions).
        families: Architecture and size of each model; "" where unknown.
    """

    name: str
    scores: Floats
    families: Sequence[str]


def read_matrix(path: Path) -> Matrix:
    """A file of packed right-or-wrong answers, or of scores up to 1 or in per cent.

    Raises:
        ValueError: Neither is in the file.
    """
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    packed = arrays.get("bits", arrays.get("right"))
    if packed is not None:
        count = int(arrays.get("questions", ZERO_EVAL))
        scores = np.unpackbits(packed, axis=1)[:, :count].astype(float)
    else:
        tables = [table for table in arrays.values() if table.ndim == 2]
        if len(tables) != 1:
            shapes = {name: table.shape for name, table in arrays.items()}
            raise ValueError(f"{path}: expected one table of scores, got {shapes}")
        scores = tables[0].astype(float)
        if scores.max() > 1:
            scores /= 100
    families = arrays.get("family", np.full(len(scores), ""))
    return Matrix(path.stem, scores, [str(family) for family in families])


# --- races ----------------------------------------------------------------------------------------------


class Look(NamedTuple):
    """What a race says when it is looked at.

    Attributes:
        best: The line named.
        margin: No other is shown to be better by more.
    """

    best: int
    margin: float


class Race(NamedTuple):
    """A race in turns, the best by shared questions first.

    Attributes:
        best: The line named at the end.
        questions: Asked of all together.
        questions_before: The same by the rule before, with the same questions in the same orders.
        best_before: The line that it names.
        looks: At shares of all questions, then at the end; None where no checkpoint was asked everything yet.
    """

    best: int
    questions: int
    best_before: int
    questions_before: int
    looks: list[Look | None]


def race(
    scores: Floats,
    seed: int,
    looks: Sequence[float] = (),
    *,
    likely: Floats | None = None,
    sharing: int = SHARED,
) -> Race:
    """Race all as `raced` does, and look at it after shares of all questions.

    Args:
        scores: Of all, (checkpoints, N).
        seed: Draws the questions and their orders.
        looks: When to look at it.
        likely: Probabilities of the right answers, (checkpoints, N), where there are any.
        sharing: Number of shared questions; 0 for turns in the order given.
    """
    answers = _answers(scores, likely)
    labels = list(answers)
    drawn = np.random.default_rng(seed).permutation(scores.shape[1])
    contest = Contest(len(drawn), seed=seed, sharing=sharing)
    if sharing:
        for label in labels:
            contest.hold(label, answers[label].at(drawn[:sharing]))
    waiting = [share * scores.size for share in looks]
    shown: list[Look | None] = []
    turns = contest.turns(labels)
    for label in turns:
        order = drawn[contest.order(label)]

        def ask(begin: int, end: int, label: str = label, order: Lanes = order) -> Scores:
            while waiting and contest.asked + end - begin > waiting[0]:
                waiting.pop(0)
                shown.append(_look(contest, labels))
            return answers[label].at(order[begin:end])

        run(contest, label, ask, STEP if contest.best else len(drawn))
    shown += [_look(contest, labels)] * (1 + len(waiting))
    before = _before(scores, scores if likely is None else likely, contest, turns, drawn)
    return Race(int(str(contest.best)), contest.asked, *before, shown)


def _answers(scores: Floats, likely: Floats | None = None) -> dict[str, Scores]:
    """The answers of each line, which is its label."""
    unknown = np.full(scores.shape, np.nan)
    probabilities = unknown if likely is None else likely
    rows = zip(scores, probabilities, strict=True)
    return {str(line): Scores(*row) for line, row in enumerate(rows)}


def _look(contest: Contest, labels: Sequence[str]) -> Look | None:
    shown = contest.shown(labels)
    if shown.margin is None:
        return None
    return Look(int(shown.labels[0]), shown.margin)


def _before(
    scores: Floats, likely: Floats, contest: Contest, turns: Sequence[str], drawn: Lanes
) -> tuple[int, int]:
    """The best and the number of questions by the rule before, in the orders of a contest."""
    means = scores.mean(axis=1)
    count = len(drawn)
    questions = 0
    whole: list[int] = []
    for label in turns:
        line = int(label)
        asked = count
        if whole:
            best = max(whole, key=lambda other: means[other])
            order = drawn[contest.order(label)]
            columns = _columns(scores, likely, best, whole)[order]
            level = float(means[best]) + MARGIN
            asked = earlier_rule.asked(scores[line, order], columns, contest.sharing, level, ERROR)
        questions += asked
        if asked == count:
            whole.append(line)
    return max(whole, key=lambda other: means[other]), questions


def _columns(scores: Floats, likely: Floats, best: int, whole: Sequence[int]) -> Floats:
    """What predicts the scores: answers of the best so far, and the mean of all asked everything."""
    first = np.stack([scores[best], likely[best]], axis=1)
    if len(whole) == 1:
        return first
    mean = np.stack([scores[whole].mean(axis=0), likely[whole].mean(axis=0)], axis=1)
    return np.hstack([first, mean])


def is_lost(scores: Floats, rival: Floats, seed: int) -> bool:
    """Whether the bets drop a checkpoint of this mean by its own level: the worst case of the error.

    Args:
        scores: Its answers, (N,).
        rival: Answers of the one that it is compared with, (N,).
        seed: Draws the order.
    """
    order = np.random.default_rng(seed).permutation(len(scores))
    bets = Bets(len(scores), np.stack([rival, rival], axis=1)[order], SHARED)
    bets.take(scores[order][:-1])
    return bets.refutes(float(scores.mean()), ERROR)


class Named(NamedTuple):
    """What a way names: the line, how many questions it asked, and the margin it shows; NaN for none."""

    best: int
    questions: int
    margin: float = math.nan


def with_budget(scores: Floats, seed: int, budget: int) -> Named:
    """The answer to so many questions, all checkpoints kept loaded."""
    contest = raced(_answers(scores), seed=seed, budget=budget, kept=True)
    shown = contest.shown(list(contest.answered))
    margin = math.nan if shown.margin is None else shown.margin
    return Named(int(shown.labels[0]), contest.asked, margin)


# --- rivals ---------------------------------------------------------------------------------------------


def same_for_all(scores: Floats, rng: np.random.Generator, share: float) -> Named:
    """A random subset of the questions, the same for all."""
    size, count = scores.shape
    some = rng.permutation(count)[: max(1, round(share * count))]
    return Named(int(scores[:, some].mean(axis=1).argmax()), size * len(some))


def synchronised_rejects(scores: Floats, rng: np.random.Generator, share: float) -> Named:
    """Successive rejects on shared questions: the idea of SySRs (arXiv 2606.07726), by its abstract.

    Phases are those of Audibert, Bubeck and Munos (2010); of several worst ones chance chooses.
    """
    size, count = scores.shape
    shuffled = scores[:, rng.permutation(count)]
    scale = 0.5 + sum(1 / i for i in range(2, size + 1))
    alive = np.arange(size)
    reached = 0
    questions = 0
    for phase in range(1, size):
        now = math.ceil((share * size * count - size) / (scale * (size + 1 - phase)))
        now = min(count, max(reached, now))
        questions += len(alive) * (now - reached)
        reached = now
        totals = shuffled[alive, :reached].sum(axis=1)
        worst = np.flatnonzero(totals <= totals.min() + 1e-9)
        alive = np.delete(alive, rng.choice(worst))
    return Named(int(alive[0]), questions)


def halving(scores: Floats, rng: np.random.Generator, share: float) -> Named:
    """Sequential halving on shared questions: equal parts of the budget for each half."""
    size, count = scores.shape
    shuffled = scores[:, rng.permutation(count)]
    rounds = max(1, math.ceil(math.log2(size)))
    alive = np.arange(size)
    reached = 0
    questions = 0
    while len(alive) > 1:
        more = int(share * size * count / rounds / len(alive))
        now = min(count, reached + more)
        questions += len(alive) * (now - reached)
        reached = now
        means = shuffled[alive, : max(1, reached)].mean(axis=1)
        alive = alive[np.argsort(-means, kind="stable")][: math.ceil(len(alive) / 2)]
    return Named(int(alive[0]), questions)


def ucb_e(scores: Floats, rng: np.random.Generator, share: float) -> Named:
    """UCB-E, a question at a time to the highest mean + sqrt(1 / asked); the best mean is named."""
    size, count = scores.shape
    sums = np.cumsum(rng.permuted(scores, axis=1), axis=1)
    asked = np.ones(size, int)
    means = sums[:, 0].copy()
    bounds = means + 1.0
    for _ in range(int(share * size * count) - size):
        line = int(bounds.argmax())
        if math.isinf(bounds[line]):
            break
        asked[line] += 1
        means[line] = sums[line, asked[line] - 1] / asked[line]
        bounds[line] = means[line] + math.sqrt(1 / asked[line])
        if asked[line] == count:
            bounds[line] = -math.inf
    return Named(int(means.argmax()), int(asked.sum()))


def hoeffding_race(scores: Floats, rng: np.random.Generator) -> Named:
    """All on shared questions; who is worse than another by Hoeffding and Serfling's bounds leaves."""
    size, count = scores.shape
    sums = np.cumsum(scores[:, rng.permutation(count)], axis=1)
    asked = np.zeros(size, int)
    alive = np.arange(size)
    looks = range(STEP, count, STEP)
    each = ERROR / (size * len(looks))
    for now in looks:
        asked[alive] = now
        means = sums[alive, now - 1] / now
        radius = math.sqrt((1 - (now - 1) / count) * math.log(2 / each) / (2 * now))
        alive = alive[means + 2 * radius >= means.max() + MARGIN]
        if len(alive) <= 1:
            break
    if len(alive) != 1:
        asked[alive] = count
    reached = int(asked.max())
    whole = np.flatnonzero(asked == reached)
    return Named(int(whole[sums[whole, reached - 1].argmax()]), int(asked.sum()))


#: With as many questions as the race.
RIVALS: Mapping[str, Callable[[Floats, np.random.Generator, float], Named]] = {
    "a random subset": same_for_all,
    "halving": halving,
    "UCB-E": ucb_e,
    "SySRs": synchronised_rejects,
}
