"""Tables in Markdown: those of the pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.validity.analysis import Estimate
from benchmarks.validity.verdicts import Verdict, shown


def cell(value: object) -> str:
    """A value of a table."""
    if isinstance(value, Estimate):
        return shown(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.0e}" if 0 < abs(value) < 0.0005 else f"{value:.3f}"
    return str(value)


def markdown(rows: Sequence[Mapping[str, Any]], headings: Mapping[str, str]) -> str:
    """Rows as a table; headings by key, in order."""
    lines = [f"| {' | '.join(headings.values())} |", "|" + "---|" * len(headings)]
    for row in rows:
        lines.append(f"| {' | '.join(cell(row.get(key, '')) for key in headings)} |")
    return "\n".join(lines)


def verdict_table(lines: Sequence[Verdict]) -> str:
    """Verdict, claim and result, beside its control where that is short: the table of the front page."""
    rows = [
        {
            **vars(line),
            "result": "; ".join([line.result, *([line.control] if 0 < len(line.control) < 70 else [])]),
        }
        for line in lines
    ]
    return markdown(
        rows, {"verdict": "verdict", "claim": "claim", "result": "result, and its control (95 %)"}
    )


def claims_table(lines: Sequence[Verdict]) -> str:
    """All that a verdict rests on: the table of the study's own page."""
    return markdown(
        [vars(line) for line in lines],
        {
            "claim": "claim", "run": "what was run", "result": "result (95 %)", "control": "control",
            "papers": "the papers", "verdict": "verdict",
        },
    )  # fmt: skip
