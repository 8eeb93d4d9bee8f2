"""``docs/results/siblings.md``, made of the results alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from benchmarks.validity.analysis import (
    FAILS,
    HOLDS,
    INCONCLUSIVE,
    Estimate,
    Grouped,
    Resampled,
    Verdict,
)
from benchmarks.validity.study import Study

HOME = "https://github.com/lmeval-dispersion/lmeval-dispersion/blob/main/benchmarks/validity"
FRONT = "---\nsearch:\n  boost: 0.3 # how-tos come first\n---"
MARKS = {HOLDS: "✓", FAILS: "✗", INCONCLUSIVE: "?"}


class Page(NamedTuple):
    """A page: its first sentences, its claims, and the tables below."""

    head: list[str]
    lines: list[Verdict]
    texts: list[str]

    def written(self, title: str) -> str:
        """The whole page, in Markdown, which the site's search lists last."""
        head = "\n".join(self.head)
        parts = [
            f"# {title}",
            f"**{counted(self.lines)}**",
            head,
            verdicts_of(self.lines),
            *self.texts,
        ]
        return "\n\n".join([FRONT, *parts]) + "\n"


def cell(value: object) -> str:
    """A value of a table."""
    if isinstance(value, Grouped | Resampled):
        return str(value.estimate)
    if isinstance(value, float) and not isinstance(value, Estimate):
        return f"{value:.0e}" if 0 < abs(value) < 0.0005 else f"{value:.3f}"
    return str(value)


def markdown(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table."""
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    return "\n".join([*lines, *(f"| {' | '.join(map(cell, row))} |" for row in rows)])


def provenance(study: Study, rows: Sequence[dict[str, Any]]) -> str:
    """How many of the planned models there are, by which commits, on what, how long."""
    planned = len(study.runs())
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    machines = "; ".join(sorted({row["machine"] for row in rows}))
    minutes = sum(row["processor_seconds"] for row in rows) / 60
    text = f"{len(rows)} of {planned} models; commit {commits}; {machines}; {minutes:.0f} minutes of one core."
    if len(rows) < planned:
        text += (
            " The run was stopped before its end; what is missing was not left out by its outcome."
        )
    return text


def counted(lines: Sequence[Verdict]) -> str:
    """How many claims came out how."""
    hold, fail, open_ = (sum(line.verdict == word for line in lines) for word in MARKS)
    do = "does" if fail == 1 else "do"
    return f"Of {len(lines)} claims {hold} hold, {open_} are inconclusive and {fail} {do} not hold."


def verdicts_of(lines: Sequence[Verdict]) -> str:
    """The table of claims: each once, then a line for each kind of models, which its text ends with."""
    groups: dict[str, list[Sequence[str]]] = {}
    for line in lines:
        claim, _, models = line.claim.rpartition(": ")
        rows = groups.setdefault(claim, [])
        rows.append(
            ["" if rows else claim, models, f"{MARKS[line.verdict]} {line.verdict}", line.result]
        )
    return markdown(
        ["claim", "models", "verdict", "result (95 %)"],
        [row for rows in groups.values() for row in rows],
    )
