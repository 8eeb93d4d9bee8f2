"""Whether pairs that both figures order are right: `python -m benchmarks.validity.both RUNS RESULTS`.

RUNS holds the checkpoints that a study trained, RESULTS is its JSON lines; ``both.yaml`` has the rule. Each
seed's recipes are one group, as a user would screen them; pairs whose accuracies differ by more than two
standard errors are judged. Intervals resample recipes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from pathlib import Path

import numpy as np
from lmeval_screener import screen
from lmeval_screener.ranking import rank_gaps

from benchmarks.validity.measures import DOMAINS

QUESTIONS, DRAWS = 400, 2_000


def main() -> None:
    """Print a line for each domain: pairs, share ordered and share right of G alone and of both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("results", type=Path)
    args = parser.parse_args()
    models = [json.loads(line) for line in args.results.read_text("utf-8").splitlines()]
    print(
        "domain  pairs  G: ordered  right            both: ordered  right            disagree: right",
        flush=True,
    )
    for domain in DOMAINS:
        pairs = [
            pair
            for seed in sorted({model["seed"] for model in models})
            for pair in judged(args.runs, [m for m in models if m["seed"] == seed], domain)
        ]
        alone, both = [p for p in pairs if p[2]], [p for p in pairs if p[3]]
        against = [p for p in pairs if p[2] and not p[3]]
        print(
            f"{domain:6}  {len(pairs):5}  {len(alone) / len(pairs):10.3f}  {share(alone):16}  "
            f"{len(both) / len(pairs):12.3f}  {share(both):16}  {share(against):16} of {len(against)}",
            flush=True,
        )


def judged(runs: Path, models: list[dict], domain: str) -> list[tuple[str, str, bool, bool, bool]]:
    """Each judged pair: its recipes, whether G orders it, whether both do, whether the better is first."""
    last = {m["recipe"]: m["checkpoints"][-1] for m in models}
    folders = {m["recipe"]: runs / m["name"] / f"step{m['checkpoints'][-1]['step']}" for m in models}
    result = screen([str(folder) for folder in folders.values()], domain=domain)
    (group,) = result.groups
    recipe_of = {str(folder): recipe for recipe, folder in folders.items()}
    members = {recipe_of[c.repo]: c for c in group.checkpoints}
    by_g = rank_gaps([c.gaps["cosine"] for c in group.checkpoints])
    alone = {recipe_of[c.repo]: set(s.ties) for c, s in zip(group.checkpoints, by_g, strict=True)}
    found = []
    for a, b in itertools.combinations(members, 2):  # best first by G
        x, y = last[a]["accuracy"][domain], last[b]["accuracy"][domain]
        middle = (x + y) / 2
        if abs(x - y) <= 2 * math.sqrt(2 * middle * (1 - middle) / QUESTIONS):
            continue
        rank = members[b].rank
        found.append((a, b, rank not in alone[a], not members[a].tied_to(rank), x > y))
    return found


def share(pairs: list[tuple[str, str, bool, bool, bool]]) -> str:
    """Share of pairs that are right, with its 95 % interval over recipes."""
    if not pairs:
        return "-"
    recipes = sorted({name for pair in pairs for name in pair[:2]})
    place = {name: i for i, name in enumerate(recipes)}
    draw = np.random.default_rng(20260501)
    right = np.array([pair[4] for pair in pairs], float)
    first, second = (np.array([place[pair[side]] for pair in pairs]) for side in (0, 1))
    samples = []
    for _ in range(DRAWS):
        counts = np.bincount(draw.integers(len(recipes), size=len(recipes)), minlength=len(recipes))
        weights = counts[first] * counts[second]
        if weights.sum():
            samples.append(float(weights @ right / weights.sum()))
    low, high = np.quantile(samples, [0.025, 0.975])
    return f"{right.mean():.3f} ({low:.2f}-{high:.2f})"


if __name__ == "__main__":
    main()
