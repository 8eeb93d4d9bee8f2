"""How often the ratio's order is the order of accuracy: the first part of siblings.yaml, by its rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lmeval_screener.chance import NEAR, Chances, is_noise, normal_scores
from lmeval_screener.figures import Ratio
from numpy.typing import NDArray
from scipy.stats import norm

from benchmarks.validity import records
from benchmarks.validity.analysis import (
    FAILS,
    HOLDS,
    INCONCLUSIVE,
    Estimate,
    Floats,
    Grouped,
    Resampled,
    Verdict,
    drawn,
    share_of,
)
from benchmarks.validity.page import markdown
from benchmarks.validity.records import unpacked, unpacked_bytes, unpacked_halves
from benchmarks.validity.texts import DOMAINS
from lmeval_dispersion import evidence

STUDY = Path(__file__).parent / "siblings.yaml"
KINDS = {"mix": "random mixtures", "tuned": "fine-tunes"}
SLOPES = {"mix": 1.05, "tuned": 0.70}
BINS = (0.6, 0.7, 0.8, 0.9, 0.97, 1.0)
TOO_SURE, HELD, FEWEST = 0.07, 0.85, 30
RIVAL = 0.56  # of the square root of t
WORST_FIRST = (FAILS, INCONCLUSIVE, HOLDS)
FITTED = np.arange(0.2, 3.0, 0.01)
#: Fields of a cell that have a line for each checkpoint.
ARRAYS = ("accuracy", "truth", "right", "probability", "answers", "log_ratio", "left_out")


@dataclass(frozen=True, eq=False)
class Cell:
    """A group's checkpoints in one domain.

    Attributes:
        kind: ``mix``, ``tuned``, ``lora``, ``copies-scratch`` or ``copies-tuned``.
        accuracy: Over both pools, (checkpoints,).
        truth: Over the pool that nothing is asked of, (checkpoints,).
        right: Answers to the pool ``labels``, (checkpoints, questions); ``probability`` of the right answer.
        answers: Probabilities of the answer tokens at the first 25 answers' places, (checkpoints, 25, |T|).
        log_ratio: Logarithm of the ratio, (checkpoints,); empty where all rows are the base's.
        left_out: The same without each token of T, then of R, less ``log_ratio``; (checkpoints, |T| + |R|).
    """

    kind: str
    seed: int
    domain: str
    accuracy: Floats
    truth: Floats
    right: Floats
    probability: Floats
    answers: Floats
    log_ratio: Floats
    left_out: Floats

    @property
    def group(self) -> str:
        return f"{self.kind} {self.seed}"

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """The screen's: highest ratio first."""
        return np.argsort(-self.log_ratio, kind="stable")

    def among(self, members: NDArray[np.int64]) -> Cell:
        """A subgroup."""
        return replace(self, **{name: getattr(self, name)[members] for name in ARRAYS})

    def near_best(self, count: int) -> bool:
        """Whether one within 0.01 of the best accuracy is among the first of the order."""
        return bool(self.accuracy[self.order[:count]].max() >= self.accuracy.max() - NEAR - 1e-9)

    @property
    def sides(self) -> list[Floats]:
        """``left_out`` of T and of R."""
        return np.split(self.left_out, [self.answers.shape[2]], axis=1)

    @cached_property
    def variances(self) -> Floats:
        """Of the difference of each two, over the choice of tokens, (checkpoints, checkpoints)."""
        parts = [(s - s.mean(1, keepdims=True)) * np.sqrt(1 - 1 / s.shape[1]) for s in self.sides]
        rows = np.concatenate(parts, axis=1)
        squares = np.square(rows).sum(1)
        return np.maximum(squares[:, None] + squares - 2 * rows @ rows.T, 0)

    @cached_property
    def is_noise(self) -> bool:
        """Whether noise of the tokens may explain the spread of the ratios, as registered."""
        bound = 1 + 2.33 * np.sqrt(2 / (len(self.log_ratio) - 1))
        squares = np.square(self.log_ratio[:, None] - self.log_ratio)
        return bool(squares.mean() <= bound * self.variances.mean())

    @cached_property
    def is_noise_by_product(self) -> bool:
        """The same by the guard as it is shipped."""
        left = [self.log_ratio[:, None] + side for side in self.sides]
        ratios = zip(self.log_ratio, *left, strict=True)
        return is_noise(
            [Ratio(float(np.exp(m)), 0.0, 0.0, np.exp(t), np.exp(r)) for m, t, r in ratios]
        )

    @cached_property
    def telling(self) -> bool:
        """Whether accuracies span enough that an order of them can be asked for."""
        return bool(np.ptp(self.accuracy) >= 0.10)


def cells(rows: Iterable[Mapping[str, Any]], questions: int) -> tuple[list[Cell], dict[str, Cell]]:
    """All cells, and those of the bases, one checkpoint each, by "SEED DOMAIN"."""
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: str(row["name"])):
        kind, *rest = row["recipe"].split("-")
        copies = kind == "copies"
        groups.setdefault(
            (f"{kind}-{rest[0]}" if copies else kind, 0 if copies else row["seed"]), []
        ).append(row)
    made = [
        _cell(kind, seed, domain, [row[domain] for row in group], questions)
        for (kind, seed), group in sorted(groups.items())
        for domain in DOMAINS
    ]
    bases = {f"{cell.seed} {cell.domain}": cell for cell in made if cell.kind == "base"}
    return [cell for cell in made if cell.kind != "base"], bases


def _cell(
    kind: str, seed: int, domain: str, rows: Sequence[Mapping[str, Any]], questions: int
) -> Cell:
    right = np.array([unpacked(row["right"], questions) for row in rows], float)
    truth = np.array([row["truth"] for row in rows]) / questions
    answers = np.array([unpacked_bytes(row["answers"]) for row in rows]).reshape(len(rows), 25, -1)
    ratios, left = np.zeros(0), np.zeros((0, 0))
    if "ratio" in rows[0]:
        ratios = np.log([row["ratio"] for row in rows])
        left = np.array([unpacked_halves(row["left_out"]) for row in rows])
    probability = np.array([unpacked_bytes(row["probability"]) for row in rows])
    accuracy = (right.mean(1) + truth) / 2
    return Cell(kind, seed, domain, accuracy, truth, right, probability, answers, ratios, left)


# --- the chance -----------------------------------------------------------------------------------------


class Pairs(NamedTuple):
    """Pairs of a cell whose accuracies differ: the checkpoints of the better and of the worse rank.

    Attributes:
        right: Whether the better rank has the better accuracy, (pairs,).
        scores: Difference of their normal scores, (pairs,).
        t: Difference of their log ratios over its error, (pairs,).
    """

    first: NDArray[np.int64]
    second: NDArray[np.int64]
    right: NDArray[np.bool_]
    scores: Floats
    t: Floats

    @classmethod
    def of(cls, cell: Cell) -> Pairs:
        i, j = np.triu_indices(len(cell.order), 1)
        z = normal_scores(len(cell.order))
        first, second = cell.order[i], cell.order[j]
        lead = cell.accuracy[first] - cell.accuracy[second]
        kept = np.abs(lead) > NEAR + 1e-9
        first, second, scores = first[kept], second[kept], (z[i] - z[j])[kept]
        apart = cell.log_ratio[first] - cell.log_ratio[second]
        t = apart / np.sqrt(np.maximum(cell.variances[first, second], 1e-12))
        return cls(first, second, lead[kept] > 0, scores, t)


class Bin(NamedTuple):
    """Mean chance said, share right, and by how much the chance is too sure."""

    said: float
    was: float
    too_sure: Grouped

    def __str__(self) -> str:
        return f"{self.said:.2f} → {self.was:.2f}"


class Population:
    """The cells of one kind, by their groups.

    Args:
        kind: Of `KINDS`.
        all_cells: Of all kinds.
    """

    def __init__(self, kind: str, all_cells: Sequence[Cell]) -> None:
        self.kind, self.name, self.k = kind, KINDS[kind], SLOPES[kind]
        self.cells = [cell for cell in all_cells if cell.kind == kind]
        self.groups = sorted({cell.group for cell in self.cells})
        self.size = len(self.cells[0].accuracy)

    @cached_property
    def subgroups(self) -> list[Cell]:
        """Twenty of eight of each group."""
        draws = {}
        for cell in self.cells:
            rng = np.random.default_rng([cell.seed, 8])
            draws[cell.group] = [
                np.sort(rng.choice(self.size, 8, replace=False)) for _ in range(20)
            ]
        return [cell.among(members) for cell in self.cells for members in draws[cell.group]]

    def sums(self, parts: Sequence[tuple[str, float, float]]) -> Floats:
        """Each group's sums of both numbers of (group, first, second), (groups, 2)."""
        sums = np.zeros((len(self.groups), 2))
        for group, above, below in parts:
            sums[self.groups.index(group)] += above, below
        return sums

    def ratio_of_sums(self, parts: Sequence[tuple[str, float, float]], count: int = 0) -> Grouped:
        """Sum of the first over sum of the second number of (group, first, second)."""
        sums = self.sums(parts)

        def ratio(kept: NDArray[np.bool_]) -> float:
            with np.errstate(invalid="ignore"):
                return float(np.divide(*sums[kept].sum(0)))

        return Grouped.jackknifed(ratio, len(sums), count)

    def bins(self, among: Sequence[Cell], *, rival: bool = False) -> list[Bin]:
        """By the chance said for the better rank; a cell weighs 1."""
        made = [(cell.group, p.right, self.said(p, rival=rival)) for cell, p in self.pairs(among)]
        found = []
        for low, high in pairwise(BINS):
            parts, sums, count = [], np.zeros(3), 0
            for group, right, said in made:
                inside = (said >= low) & ((said < high) | (high == 1))
                own = np.array([said[inside].sum(), right[inside].sum(), inside.sum()]) / len(said)
                parts.append((group, own[0] - own[1], own[2]))
                sums, count = sums + own, count + int(inside.sum())
            said, was = (float(part / sums[2]) if count else float("nan") for part in sums[:2])
            found.append(Bin(said, was, self.ratio_of_sums(parts, count)))
        return found

    def said(self, pairs: Pairs, *, rival: bool = False) -> Floats:
        """The chance said for the better rank, by ranks or by the rival's scale."""
        scale: Floats = RIVAL * np.sqrt(pairs.t) if rival else self.k * pairs.scores
        return np.asarray(norm.cdf(scale))

    def pairs(self, among: Sequence[Cell]) -> list[tuple[Cell, Pairs]]:
        """Those of each cell that has any."""
        made = ((cell, Pairs.of(cell)) for cell in among)
        return [(cell, pairs) for cell, pairs in made if len(pairs.right)]

    def brier(self, *, rival: bool) -> float:
        """Mean squared error of the chance said, a cell weighing 1."""
        errors = [
            np.square(self.said(p, rival=rival) - p.right).mean() for _, p in self.pairs(self.cells)
        ]
        return float(np.mean(errors))

    def slope(self) -> Grouped:
        """k by maximum likelihood, a cell weighing 1."""
        likelihood = np.zeros((len(self.groups), len(FITTED)))
        for cell, p in self.pairs(self.cells):
            signed = np.where(p.right, p.scores, -p.scores)
            logs = norm.logcdf(FITTED[:, None] * signed).mean(1)
            likelihood[self.groups.index(cell.group)] += logs

        def likeliest(kept: NDArray[np.bool_]) -> float:
            return float(FITTED[likelihood[kept].sum(0).argmax()])

        return Grouped.jackknifed(likeliest, len(self.groups))

    def held(self, among: Sequence[Cell]) -> tuple[int, int, Estimate]:
        """`first_for`, in how many cells it held one within 0.01 of the best, and the share."""
        count = first_for(self.kind, len(among[0].accuracy))
        parts = [(cell.group, float(cell.near_best(count)), 1.0) for cell in among]
        hits, counts = self.sums(parts).T
        kept = counts > 0
        return count, int(hits.sum()), share_of(hits[kept], counts[kept])


def first_for(kind: str, places: int) -> int:
    """The product's number of places to evaluate, with the registered k of a kind."""
    return Chances(places, replace(evidence.SLOPES[evidence.FINE_TUNES], k=SLOPES[kind])).first_for(
        0.9
    )


def copies_over(found: Sequence[Cell]) -> Resampled:
    """Chance said less share right over near copies, checkpoints of each cell resampled."""
    value, samples = 0.0, 0.0
    for part, cell in enumerate(found):
        pairs, count = Pairs.of(cell), len(cell.accuracy)
        said = norm.cdf(SLOPES["mix" if cell.kind == "copies-scratch" else "tuned"] * pairs.scores)
        over, weight = np.zeros((2, count, count))
        over[pairs.first, pairs.second] = said - pairs.right
        weight[pairs.first, pairs.second] = 1
        draws = drawn(count, part)
        times = np.stack([(draws == i).sum(1) for i in range(count)], axis=1).astype(float)
        value += over.sum() / weight.sum() / len(found)
        samples = samples + ((times @ over) * times).sum(1) / ((times @ weight) * times).sum(
            1
        ) / len(found)
    return Resampled(float(value), np.asarray(samples))


# --- claims and tables ----------------------------------------------------------------------------------


def held_often(share: Estimate) -> str:
    """Holds where the share reaches the bound, does not where its interval lies below.

    The registered rule asked only that the interval reach it, which a truth of 60 % passes in half of the
    cases.
    """
    if share.value >= HELD:
        return HOLDS
    return FAILS if share.high < HELD else INCONCLUSIVE


def below(figure: Grouped | Resampled, bound: float) -> str:
    """Holds where the interval lies below the bound, does not where it lies above.

    What does not hold by its registered interval stays so: a wider one, chosen later, rescues no claim.
    """
    _, low, high = figure.estimate
    if isinstance(figure, Grouped):
        low = max(low, figure.registered.low)
    return HOLDS if high < bound else FAILS if low > bound else INCONCLUSIVE


def claims(populations: Sequence[Population], near: Sequence[Cell]) -> list[Verdict]:
    """All lines about the screen."""
    lines = []
    for own in populations:
        for among, of in ((own.cells, own.size), (own.subgroups, 8)):
            counted = [each for each in own.bins(among) if each.too_sure.pairs >= FEWEST]
            verdict = min(
                (below(each.too_sure, TOO_SURE) for each in counted), key=WORST_FIRST.index
            )
            worst = max((each.too_sure for each in counted), key=lambda figure: figure.value)
            claim = f"In no bin above .6 is the chance too high by more than .07: {own.name}, {of} in a group"
            result = f"said → was: {', '.join(map(str, counted))}; highest excess {worst.estimate}"
            lines.append(Verdict(verdict, claim, result))
            first, hits, share = own.held(among)
            claim = f"The first hold one within 0.01 of the best (90 % said): {own.name}, {first} of {of}"
            lines.append(Verdict(held_often(share), claim, f"{hits} of {len(among)}: {share}"))
    told = [cell for cell in near if not cell.is_noise and len(Pairs.of(cell).right)]
    claim = "The guard finds no order, or the chance is not too high by more than .07: near copies"
    result = f"no order in {len(near) - len(told)} of {len(near)} cells"
    if not told:
        return [*lines, Verdict(HOLDS, claim, result)]
    over = copies_over(told)
    return [
        *lines,
        Verdict(
            below(over, TOO_SURE), claim, f"{result}; in the others too high by {over.estimate}"
        ),
    ]


def tables(populations: Sequence[Population], near: Sequence[Cell]) -> list[str]:
    """What stands beside the claims."""
    names = [f"{low} to {high}" for low, high in pairwise(BINS)]
    rivals = [[own.name, *map(str, own.bins(own.cells, rival=True))] for own in populations]
    cells, guards = [*(cell for own in populations for cell in own.cells), *near], []
    for kind in dict.fromkeys(cell.kind for cell in cells):
        own_cells = [cell for cell in cells if cell.kind == kind]
        spans = [float(np.ptp(cell.accuracy)) for cell in own_cells]
        silent, shipped = (
            sum(getattr(cell, name) for cell in own_cells)
            for name in ("is_noise", "is_noise_by_product")
        )
        counts = [str(count) for count in (len(own_cells), silent, shipped)]
        guards.append([KINDS.get(kind, kind), *counts, f"{min(spans):.2f} to {max(spans):.2f}"])
    brier = [
        f"{p.name} {p.brier(rival=False):.3f} by ranks, {p.brier(rival=True):.3f} by t"
        for p in populations
    ]
    slopes = [f"{p.name} {p.slope().estimate} (registered {p.k})" for p in populations]
    return [
        "## The chance",
        "*Said → was*: of pairs whose accuracies are more than 0.01 apart, the mean chance that the "
        "better rank is the more accurate, and how often it was, by bins of that chance. "
        f"k fitted anew: {'; '.join(slopes)}. Brier score: {'; '.join(brier)}. The bins by a rival "
        f"scale, {RIVAL} sqrt(t):",
        markdown(["models", *names], rivals),
        "## The guard",
        markdown(
            ["models", "cells", "no order, as registered", "as shipped", "accuracies span"], guards
        ),
    ]


def read(folder: Path) -> list[dict[str, Any]]:
    """All rows, of every kind."""
    return [
        row
        for file in sorted(folder.glob("siblings-*.jsonl"))
        for row in records.checked(file, STUDY)
    ]
