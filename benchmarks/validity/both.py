"""Whether pairs that both figures order are right, by the screener's own errors and the rule of both.yaml.

Each seed's recipes are one group, as a user would screen them; pairs whose accuracies differ by more than two
standard errors are judged. Intervals resample recipes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lmeval_screener import screen
from lmeval_screener.ranking import rank_gaps

from benchmarks.validity.analysis import RESAMPLES
from benchmarks.validity.texts import DOMAINS, own_words

QUESTIONS = 400


class Judged(NamedTuple):
    """Two recipes, the first above the second by G; whether G and whether both order them, and rightly."""

    first: str
    second: str
    alone: bool
    both: bool
    right: bool


def counts(rows: Sequence[dict[str, Any]], runs: Path) -> dict[str, Any]:
    """By domain: pairs, share ordered and share right of G alone, of both, and where only G orders."""
    by_domain = {}
    for domain in DOMAINS:
        pairs = [
            pair
            for seed in sorted({row["seed"] for row in rows})
            for pair in judged(runs, [row for row in rows if row["seed"] == seed], domain)
        ]
        parts = {
            "alone": [pair for pair in pairs if pair.alone],
            "both": [pair for pair in pairs if pair.both],
            "only G": [pair for pair in pairs if pair.alone and not pair.both],
        }
        by_domain[domain] = {"pairs": len(pairs)} | {
            name: {"ordered": round(len(some) / max(1, len(pairs)), 4), **share(some)}
            for name, some in parts.items()
        }
    return by_domain


def judged(runs: Path, rows: Sequence[dict[str, Any]], domain: str) -> list[Judged]:
    """The judged pairs of one group."""
    last = {row["recipe"]: row["checkpoints"][-1] for row in rows}
    folders = {row["recipe"]: runs / row["name"] / f"step{last[row['recipe']]['step']}" for row in rows}
    result = screen([str(folder) for folder in folders.values()], domain=own_words(domain), rank_by="gap")
    (group,) = result.groups
    recipe_of = {str(folder): recipe for recipe, folder in folders.items()}
    members = {recipe_of[c.repo]: c for c in group.checkpoints}
    by_g = rank_gaps([c.gaps["cosine"] for c in group.checkpoints])
    alone = {recipe_of[c.repo]: set(s.ties) for c, s in zip(group.checkpoints, by_g, strict=True)}
    pairs = []
    for a, b in itertools.combinations(members, 2):  # best first by G
        x, y = last[a]["accuracy"][domain], last[b]["accuracy"][domain]
        middle = (x + y) / 2
        if abs(x - y) <= 2 * math.sqrt(2 * middle * (1 - middle) / QUESTIONS):
            continue
        rank = members[b].rank
        pairs.append(Judged(a, b, rank not in alone[a], not members[a].tied_to(rank), x > y))
    return pairs


def share(pairs: Sequence[Judged]) -> dict[str, float]:
    """Share of pairs that are right, with its 95 % interval over recipes."""
    if not pairs:
        return {}
    recipes = sorted({name for pair in pairs for name in pair[:2]})
    place = {name: i for i, name in enumerate(recipes)}
    draw = np.random.default_rng(20260501)
    right = np.array([pair.right for pair in pairs], float)
    first, second = (np.array([place[pair[side]] for pair in pairs]) for side in (0, 1))
    samples = []
    for _ in range(RESAMPLES):
        drawn = np.bincount(draw.integers(len(recipes), size=len(recipes)), minlength=len(recipes))
        weights = drawn[first] * drawn[second]
        if weights.sum():
            samples.append(float(weights @ right / weights.sum()))
    low, high = np.quantile(samples, [0.025, 0.975])
    return {
        name: round(float(value), 4)
        for name, value in (("right", right.mean()), ("low", low), ("high", high))
    }
