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
from lmeval_screener.registry.database import stored
from lmeval_screener.registry.queries import (
    Move,
    history,
    identity_named,
    moved,
    named,
    ranked_rows,
    sets_of,
    since_time,
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
        width = sum(
            2 + max(len(name), *(len(str(row[name])) for row in self.entries)) for name in names
        )
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
        """The rows as they are, whatever their table looks like."""
        return self.entries if self.entries and isinstance(self.entries[0], dict) else super().rows()


def query(
    connection: sqlite3.Connection,
    metric: Metric,
    domain: str | None,
    family: str | None,
    scale: str | None,
    top: int | None,
) -> Answer:
    """The latest of every checkpoint, ranked across runs."""
    sets = sets_of(connection, domain)
    seen = stored(connection, sets.tokens)
    ...
