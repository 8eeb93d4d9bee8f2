"""A report as CSV: the flat rows that a program or a spreadsheet reads."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from typing import Any

from lmeval_dispersion.report.cells import plain
from lmeval_dispersion.report.document import Document, Row


def csv_text(document: Document) -> str:
    """All of `csv_lines` in one text."""
    return "".join(csv_lines(document))


def csv_lines(document: Document) -> Iterator[str]:
    """``document.rows`` under one header, or the first table where there are none.

    None and NaN are empty, floats follow ``document.float_format`` or are written in the shortest form that
    reads back equal, truth is ``True`` and ``False``; lines end in a line feed. A key that a row lacks is
    empty in it.
    """
    rows, fields = _content(document)
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(fields)
    for row in rows:
        writer.writerow([_field(row.get(name), document.float_format) for name in fields])
        yield stream.getvalue()
        stream.seek(0)
        stream.truncate()
    yield stream.getvalue()


def _content(document: Document) -> tuple[Sequence[Row], Sequence[str]]:
    if not document.rows and not document.fields:
        for table in document.tables().values():
            pairs = ((column.key, column.error) for column in table.columns)
            return table.rows, [key for pair in pairs for key in pair if key]
    return document.rows, document.fields or list(dict.fromkeys(key for row in document.rows for key in row))


def _field(value: Any, float_format: str) -> Any:
    value = plain(value)
    if isinstance(value, float):
        if math.isnan(value):
            return ""
        return float_format % value if float_format else value
    return value
