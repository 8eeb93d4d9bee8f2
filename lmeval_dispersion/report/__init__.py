"""Reports: results as data, and their formats: terminal, Markdown, CSV, JSON and page.

A result declares its rows, charts and sentences; every format comes from these three::

    @dataclass(frozen=True)
    class Row:
        checkpoint: Annotated[str, Col("Checkpoint")]
        G: Annotated[float, Col("G", ".3f", dots="below", reach="reach")]
        reach: float | None  # not shown, but in CSV and JSON

    @dataclass(frozen=True, repr=False)
    class Screening(Report):
        template = "screening.jinja"  # next to this module: title, answer, sections; see Report
        schema = "screen-checkpoints/3"
        ranking: Sequence[Row]

        def tables(self) -> dict[str, Table]:
            return {"ranking": Table.of(self.ranking, "Ranking")}

        def charts(self) -> dict[str, Chart]:
            return {"ranking": Chart({"mark": "point", "data": …}, "G of each", "One dot a checkpoint.")}

    Output.of(args).write(Screening(rows).document())

A terminal shows the answer and sections without ``(details)``; ``--details`` shows all. A column
with ``dots`` is drawn on one axis. Its modules are private; the names are here.
"""

from __future__ import annotations

from lmeval_dispersion.report.declared import Report, nullable
from lmeval_dispersion.report.document import (
    Chart,
    Col,
    Column,
    Document,
    Facts,
    Note,
    Part,
    Row,
    Section,
    Table,
    Text,
)
from lmeval_dispersion.report.forms import FORMATS, Format, render, require

__all__ = [
    "FORMATS",
    "Chart",
    "Col",
    "Column",
    "Document",
    "Facts",
    "Format",
    "Note",
    "Part",
    "Report",
    "Row",
    "Section",
    "Table",
    "Text",
    "nullable",
    "render",
    "require",
]
