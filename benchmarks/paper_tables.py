"""Which figure orders the paper's own tables: `python benchmarks/paper_tables.py`.

Tables 9 to 12 of RD (`paper_gap_tables.json`) hold, for released models, the mean distances inside T, between
T and R and inside R, and an accuracy. A pair is two models of one table and one scale; it is in order if the
one with the larger figure has the higher accuracy. Euclidean figures: tables 9, 11; cosine ones: 10 and 12,
of the same twelve models, so the same nine pairs. They share models, and no test is made of so few.

The ratio here lacks the final norm's weight, which the tables do not have: it is not quite the screener's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

TABLES = Path(__file__).with_name("paper_gap_tables.json")
Row = Mapping[str, Any]

#: Figure -> its value for a row of a table.
FIGURES: dict[str, Callable[[Row], float]] = {
    "G = within(T) + between(T, R)": lambda row: row["within_domain"] + row["between"],
    "within(T) / within(R), no norm's weight": lambda row: (
        row["within_domain"] / row["within_reference"]
    ),
    "within(R) alone, the control": lambda row: row["within_reference"],
}


def pairs_in_order(table: Mapping[str, Any], figure: Callable[[Row], float]) -> tuple[int, int]:
    """How many pairs of one scale a figure has in the order of accuracy, and the number of pairs."""
    right = pairs = 0
    for a, b in combinations(table["rows"], 2):
        if a["scale"] == b["scale"]:
            pairs += 1
            right += (figure(a) - figure(b)) * (a["accuracy"] - b["accuracy"]) > 0
    return right, pairs


def main() -> None:
    """Print the pairs in order of every figure, by distance and table."""
    tables = {
        name: table for name, table in json.loads(TABLES.read_text()).items() if name != "_source"
    }
    print(
        f"{'pairs of one scale in the order of accuracy':<44}{'MATH':>10}{'HumanEval':>12}{'both':>10}"
    )
    for metric in ("euclidean", "cosine"):
        chosen = [table for table in tables.values() if table["metric"] == metric]
        for name, figure in FIGURES.items():
            counts = [pairs_in_order(table, figure) for table in chosen]
            counts.append((sum(right for right, _ in counts), sum(pairs for _, pairs in counts)))
            first, second, both = (f"{right} of {pairs}" for right, pairs in counts)
            print(f"{f'{metric}: {name}':<51}{first:>7}{second:>10}{both:>10}")


if __name__ == "__main__":
    main()
