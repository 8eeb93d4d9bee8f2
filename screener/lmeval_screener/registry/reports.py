"""The answers of a registry as reports."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.geometry import Metric
from lmeval_dispersion.report import Column, Report, Table
from lmeval_dispersion.report.cells import json_value
from lmeval_dispersion.report.declared import count, listed
from lmeval_screener.registry.database import stored
from lmeval_screener.registry.queries import (
    Move,
    Ranked,
    checkpoint_named,
    history,
    is_gone,
    moved,
    named,
    ranked,
    sets_of,
)

_WIDE = 100  # characters of a line from which on each value of a row has a line of its own


@dataclass(frozen=True, repr=False)
class Answer(Report):
    """Sentences and rows.

    Attributes:
        title: Its heading.
        name: Name of its table.
        sentences: The answer.
        entries: Rows, of one dataclass or mappings.
    """

    template = "answer.jinja"
    schema = "dispersion-registry/1"
    guide = "docs/reference/registry.md"

    title: str
    name: str
    sentences: Sequence[str]
    entries: Sequence[Any]

    def tables(self) -> Mapping[str, Table]:
        """The rows; as one line a value where they are too wide."""
        if not self.entries or not isinstance(self.entries[0], dict):
            return {self.name: Table.of(self.entries, self.title, name=self.name)}
        names = list(self.entries[0])
        width = sum(2 + max(len(name), *(len(str(row[name])) for row in self.entries)) for name in names)
        if width <= _WIDE:
            columns = [Column(name, name) for name in names]
            return {self.name: Table(self.entries, columns, self.title, self.name)}
        columns = [Column("row", "Row", "d"), Column("column", "Column"), Column("value", "Value")]
        lines = [
            {"row": number, "column": name, "value": value}
            for number, row in enumerate(self.entries, 1)
            for name, value in row.items()
        ]
        return {self.name: Table(lines, columns, self.title, self.name)}

    def rows(self) -> Sequence[Mapping[str, Any]]:
        """The rows as CSV has them: whatever their table looks like, ranks with spaces."""
        plain = self.entries if self.entries and isinstance(self.entries[0], dict) else super().rows()
        return [
            {
                key: " ".join(map(str, value)) if isinstance(value, tuple) else value
                for key, value in row.items()
            }
            for row in plain
        ]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: the answer and the rows."""
        return {"schema": self.schema, "answer": list(self.sentences), "rows": json_value(self.entries)}


def query(
    connection: sqlite3.Connection,
    metric: Metric,
    domain: str | None,
    family: str | None,
    scale: str | None,
    top: int | None,
) -> Answer:
    """The latest of every checkpoint, ranked across runs."""
    tokens, domain, reference = sets_of(connection, domain)
    seen = named(stored(connection, tokens))
    gone = {entry.target.label: entry for entry in seen if is_gone(entry)}
    checkpoints = [
        c
        for c in ranked([entry for entry in seen if entry.target.label not in gone], metric)
        if (family is None or c.family == family) and (scale is None or c.scale == scale)
    ]
    groups: Counter[tuple[str, str]] = Counter()
    rows = []
    for c in checkpoints:
        groups[c.family, c.scale] += 1
        if top is None or groups[c.family, c.scale] <= top:
            rows.append(
                Ranked(
                    c.label, f"{c.family} · {c.scale}", c.rank, c.tied_with, c.gaps[metric].mean,
                    c.gaps[metric].se, None if c.ratio is None else c.ratio.mean, c.revision, None,
                )
            )  # fmt: skip
    if family is None and scale is None and top is None:
        rows += [Ranked(label, None, None, (), None, None, None, None, "deleted") for label in gone]
    failed = sum(bool(entry.error) and entry.target.label not in gone for entry in seen)
    counts = f"{count(len(checkpoints), 'checkpoint')} in {count(len(groups), 'group')}"
    sentence = f"{counts} for {domain} against {reference}"
    others = [
        f"{number} {what}" for number, what in ((len(gone), "deleted"), (failed, "failed when last seen"))
    ]
    return Answer("Checkpoints of the registry", "checkpoints", [f"{sentence}; {', '.join(others)}."], rows)


def answered(connection: sqlite3.Connection, statement: str) -> Answer:
    """The answer to SQL."""
    try:
        rows = [dict(row) for row in connection.execute(statement)]
    except (sqlite3.Error, sqlite3.Warning) as error:
        raise UsageError(
            f"the registry could not answer: {error}; it takes one SELECT of SQLite's"
        ) from error
    rows = [{key: _plain(value) for key, value in row.items()} for row in rows]
    return Answer("Answer of the registry", "answer", [f"{count(len(rows), 'row')}."], rows)


def _plain(value: Any) -> Any:
    """A value as text forms can show it."""
    return f"{len(value)} bytes" if isinstance(value, bytes) else value


def shown(connection: sqlite3.Connection, text: str) -> Answer:
    """All that was seen of the checkpoint that a user names."""
    rows = history(connection, *checkpoint_named(connection, text))
    commits = len({row.state for row in rows if row.state})
    sentence = f"{text}: {count(commits, 'commit')} seen, last on {rows[0].last[:16]}"
    sentence += f"; it failed then ({rows[0].error})." if rows[0].error else "."
    return Answer(f"History of {text}", "history", [sentence], rows)


def diff(connection: sqlite3.Connection, tokens: str, time: str, metric: Metric) -> Answer:
    """The moves since a time, and which of what is new is worth an evaluation."""
    moves = moved(connection, tokens, time, metric)
    arrived = [move for move in moves if move.what in ("new", "recovered")]
    groups = {
        "Worth evaluating, above the former best": [m for m in arrived if m.apart and (m.gain or 0) > 0],
        "No clear order with the former best": [m for m in arrived if m.apart is False],
        "Best of a new group": [m for m in arrived if m.gain is None and m.rank == 1],
        "Changed for the better": [m for m in moves if m.what == "changed" and m.apart and (m.gain or 0) > 0],
    }
    sentences = [f"{words}: {_names(some)}." for words, some in groups.items() if some]
    if arrived and not sentences:
        sentences = ["Nothing new is level with the former best."]
    kinds = Counter(move.what for move in moves)
    counts = ", ".join(f"{number} {kind}" for kind, number in kinds.items()) or "nothing moved"
    sentences.append(f"Since {time[:16]} UTC: {counts}.")
    return Answer("What moved", "moved", sentences, moves)


def _names(moves: Sequence[Move]) -> str:
    """Their labels, the first five by name."""
    names = [f"{move.checkpoint} (rank {move.rank})" for move in moves]
    return listed(names if len(names) <= 5 else [*names[:5], f"{len(names) - 5} others"])
