"""How often a verdict says what is false, and what its intervals cover, on planted registries.

    python benchmarks/verdict.py                2,000 registries of each kind
    python benchmarks/verdict.py --draws 100    a quick look

G and accuracy are two normal numbers of a set correlation, so that the share of pairs in the right order is
known: 1/2 + arcsin(r) / pi. `all`: every candidate has a result. `audit`: the list and a random sample have.
`right order` and `better`, `excess` are the means of estimate minus truth, in the estimate's unit; `covers`
is how often an interval holds the truth; a claim is *works* or *misleads* (false where r is 0).
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from pathlib import Path

import numpy as np
from lmeval_screener.agreement import agreement
from lmeval_screener.shortlist.estimates import GroupResults, missed
from lmeval_screener.shortlist.verdict import GroupVerdict, group_verdict

REGISTRIES = {
    "1 x 8, all": (1, 8, 2, None),
    "1 x 20, all": (1, 20, 4, None),
    "1 x 60, all": (1, 60, 6, None),
    "5 x 8, all": (5, 8, 2, None),
    "1 x 30, audit 6": (1, 30, 6, 6),
    "1 x 100, audit 8": (1, 100, 8, 8),
    "1 x 300, audit 20": (1, 300, 10, 20),
    "5 x 30, audit 4": (5, 30, 4, 4),
}
SKILLS = (0.0, 0.3, 0.6, 0.9)


def planted(
    draw: np.random.Generator, count: int, listed: int, audit: int | None, skill: float
) -> tuple[GroupResults, np.ndarray]:
    """One group, best first, and the accuracies of all of it."""
    gaps = np.sort(draw.normal(size=count))[::-1]
    accuracies = skill * gaps + math.sqrt(1 - skill**2) * draw.normal(size=count)
    on_list, drawn = np.arange(count) < listed, np.zeros(count, dtype=bool)
    seen = accuracies.copy()
    if audit is not None:
        drawn[draw.choice(np.arange(listed, count), audit, replace=False)] = True
        seen[~(on_list | drawn)] = np.nan
    return GroupResults(gaps, seen, on_list, drawn), accuracies


def judged(groups: list[GroupResults]) -> GroupVerdict:
    """The verdict over all groups."""
    names = [str(i) for i, group in enumerate(groups) for _ in group.gaps]
    gaps, values = (np.concatenate([getattr(g, name) for g in groups]) for name in ("gaps", "accuracies"))
    lines = agreement(gaps.tolist(), values.tolist(), names, kendall=False)
    whole = next((line for line in lines if line.scope == "within groups"), lines[0])
    return group_verdict("", groups, whole, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--output", type=Path, help="write the table there too")
    args = parser.parse_args()
    rows = [
        f"{'registry':<20} {'r':>4} {'works':>6} {'mislead':>7} {'chance':>6} {'right order':>16} "
        f"{'covers':>6} "
        f"{'better':>14} {'covers':>6} {'excess':>15}"
    ]
    print(rows[0])
    for name, (groups, count, listed, audit) in REGISTRIES.items():
        for skill in SKILLS:
            draw = np.random.default_rng(20261122)
            truth = 0.5 + math.asin(skill) / math.pi
            outcomes: Counter[str] = Counter()
            found: dict[str, list[float]] = {
                key: [] for key in ("share", "held", "better", "count", "excess")
            }
            for _ in range(args.draws):
                drawn = [planted(draw, count, listed, audit, skill) for _ in range(groups)]
                verdict = judged([group for group, _ in drawn])
                outcomes[verdict.outcome] += 1
                found["share"].append(verdict.decisions.value - truth)
                found["held"].append(verdict.decisions.low <= truth <= verdict.decisions.high)
                for group, accuracies in drawn:
                    what = missed(group)
                    if what is None or audit is None:
                        continue
                    over = accuracies[listed:] - accuracies[:listed].max()
                    found["better"].append(what.better.value - float((over > 0).sum()))
                    found["count"].append(what.better.low <= (over > 0).sum() <= what.better.high)
                    found["excess"].append(what.excess - float(np.maximum(over, 0).mean()))
            shares = [outcomes[key] / args.draws for key in ("works", "misleads", "chance")]
            line = f"{name:<20} {skill:>4} {shares[0]:>6.3f} {shares[1]:>7.3f} {shares[2]:>6.3f} "
            line += f"{_mean(found['share'], 4)} {np.mean(found['held']):>6.3f}"
            if audit is not None:
                line += f" {_mean(found['better'], 2)} {np.mean(found['count']):>6.3f} "
                line += _mean(found["excess"], 4)
            rows.append(line)
            print(line, flush=True)
    if args.output is not None:
        args.output.write_text("\n".join(rows) + "\n", encoding="utf-8")


def _mean(values: list[float], places: int) -> str:
    error = float(np.std(values)) / math.sqrt(len(values))
    return f"{np.mean(values):>+{places + 4}.{places}f}±{error:.{places}f}"


if __name__ == "__main__":
    main()
