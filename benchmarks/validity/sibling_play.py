"""Play the races of siblings.yaml on the answers of its population."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.validity.sibling_races import (
    BLOCK_ORDERS,
    BY_BLOCK,
    ORDERS,
    POOLED,
    RACE,
    SHORT,
    Lanes,
    Named,
    all_asked,
    halved,
    label,
)
from benchmarks.validity.siblings import ARRAYS, Cell, first_for
from benchmarks.validity.texts import DOMAINS
from lmeval_dispersion.asking import MARGIN
from lmeval_dispersion.racing.contest import Scores
from lmeval_dispersion.racing.replay import raced
from lmeval_dispersion.racing.rule import SHARED

BASE = "base"


def race(
    cell: Cell, lanes: Lanes, seed: int, *, base: Cell | None = None, **settings: Any
) -> Named:
    """The race of some checkpoints of a cell, in this order, by the product's own code."""
    answers = {str(i): Scores(cell.right[i], cell.probability[i]) for i in lanes}
    if base is not None:
        answers = {BASE: Scores(base.right[0], base.probability[0]), **answers}
        settings["reference"] = BASE
    contest = raced(answers, seed=seed, **settings)
    best, scores = int(str(contest.best)), cell.right[lanes].mean(1)
    again = (
        sum(len(mine.score) > SHARED for mine in contest.answered.values())
        if contest.sharing
        else 0
    )
    wrong = bool(scores.max() > cell.right[best].mean() + MARGIN + 1e-9)
    return Named(best, contest.asked, len(answers) + again, wrong)


def ways(cell: Cell, rng: np.random.Generator, base: Cell | None) -> dict[str, Named]:
    """One order of the questions: what each way names."""
    size, count = cell.right.shape
    every, third = np.arange(size), math.ceil(size / 3)
    seed, order = int(rng.integers(2**32)), rng.permutation(count)
    right = cell.right[:, order]
    found = {
        "everything": all_asked(right, every, count),
        "a random third": all_asked(right, np.sort(rng.permutation(size)[:third]), count),
        "25 labels": all_asked(right, every, SHARED),
        "successive halving": halved(right, every),
    }
    listed = every
    if cell.kind != "lora":
        listed = cell.order
        lanes = listed[: first_for(cell.kind, size)]
        found[RACE] = race(cell, lanes, seed)
        found[BLOCK_ORDERS] = race(cell, lanes, seed, sharing=SHARED)
    found[BY_BLOCK] = race(cell, listed, seed, base=base, sharing=SHARED, cut=True)
    return found | {"a race of all": race(cell, listed, seed)}


def means(cell: Cell, runs: Sequence[Mapping[str, Named]]) -> dict[str, dict[str, float]]:
    """Means over the orders by way; lost on the pool that nothing is asked of."""
    return {
        way: {
            "lost": float(
                np.mean([cell.truth.max() - cell.truth[each[way].best] for each in runs])
            ),
            "share": float(np.mean([each[way].questions for each in runs])) / cell.right.size,
            "loads": float(np.mean([each[way].loads for each in runs])),
            "wrong": float(np.mean([each[way].wrong for each in runs])),
        }
        for way in runs[0]
    }


def shortened(cell: Cell, count: int) -> Cell:
    """The same with the first questions alone."""
    return replace(cell, right=cell.right[:, :count], probability=cell.probability[:, :count])


def joined(parts: Sequence[Cell]) -> Cell:
    """Several groups of a domain in one list."""
    return replace(
        parts[0], **{name: np.concatenate([getattr(p, name) for p in parts]) for name in ARRAYS}
    )


def played(
    cells: Sequence[Cell], bases: Mapping[str, Cell], orders: int = ORDERS
) -> dict[str, Any]:
    """The content of siblings-races.json: means by number of questions, table and way; the pooled lists."""
    raced_kinds = [cell for cell in cells if cell.kind in ("mix", "tuned", "lora")]
    content: dict[str, Any] = {"pooled": {}}
    for count in (SHORT, 1319):
        content[str(count)] = {}
        for whole in raced_kinds:
            cell = shortened(whole, count)
            rng = np.random.default_rng([cell.seed, DOMAINS.index(cell.domain)])
            base = bases.get(f"{cell.seed} {cell.domain}") if cell.kind == "lora" else None
            shown = None if base is None else shortened(base, count)
            content[str(count)][label(cell)] = means(
                cell, [ways(cell, rng, shown) for _ in range(orders)]
            )
    by_name = {label(cell): shortened(cell, SHORT) for cell in raced_kinds}
    for kind, lists in POOLED.items():
        for seeds in lists:
            for number, domain in enumerate(DOMAINS):
                parts = [by_name.get(f"{kind} {seed} {domain}") for seed in seeds]
                if any(part is None for part in parts):
                    continue
                cell = joined([part for part in parts if part is not None])
                rng = np.random.default_rng([*seeds, number])
                lanes = cell.order[: first_for(kind, len(cell.order))]
                runs = [
                    {RACE: race(cell, lanes, s), "the first 32": race(cell, cell.order[:32], s)}
                    for s in map(int, rng.integers(2**32, size=orders))
                ]
                content["pooled"][f"{kind} {' '.join(map(str, seeds))} {domain}"] = means(
                    cell, runs
                )
    return content
