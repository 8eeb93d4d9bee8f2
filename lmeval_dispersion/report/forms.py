"""A report as JSON, CSV and Markdown, and the choice of its format.

The terminal and the page have modules of their own.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmeval_dispersion.errors import UsageError, printable, require_extra
from lmeval_dispersion.report.cells import (
    cell,
    first_of_texts,
    guarded,
    is_numeric,
    json_value,
    more_of,
    plain,
    shown,
    visible_lines,
)
from lmeval_dispersion.report.document import LIMITS, Document, Facts, Note, Part, Table, Text

_TAG = re.compile(r"<(?!/?(?:details|summary)>)(?=[A-Za-z/!?])")  # of HTML, in a name

#: Every format of a report, by its name in ``--format``.
FORMATS = ("table", "markdown", "csv", "json", "html")
#: Every format of a report's first chart alone, which only a file can have.
PICTURES = ("svg", "png", "pdf")

_SUFFIXES = {
    ".txt": "table",
    ".md": "markdown",
    ".csv": "csv",
    ".json": "json",
    ".html": "html",
    ".htm": "html",
    ".svg": "svg",
    ".png": "png",
    ".pdf": "pdf",
}


def form_of(path: Path, step: str = "rename it", *, argument: str = "path") -> str:
    """Return the output format for a file's suffix, such as ``html`` for ``.htm``.

    ``step`` and ``argument`` are the next step and the argument that the error names.

    Raises:
        UsageError: The suffix is unknown.
    """
    suffix = path.suffix.lower()
    if suffix not in _SUFFIXES:
        raise UsageError(
            f"expected one of the suffixes {', '.join(_SUFFIXES)}, got {path}; {step}",
            argument=argument,
        )
    return _SUFFIXES[suffix]


def require(output_format: str) -> None:
    """Check, before any work is done, that a format can be written.

    Raises:
        UsageError: The format is unknown.
        MissingExtraError: A library that the format needs is not installed; the message names it.
    """
    if output_format in PICTURES:
        require_extra("html", "a picture")
    elif output_format not in FORMATS:
        raise UsageError(f"expected one of the formats {', '.join(FORMATS)}, got {output_format!r}")
    elif output_format == "html":
        require_extra("html", "a page")


def file_bytes(document: Document, output_format: str, *, details: bool = False) -> bytes:
    """Return the content of a report's file: the rendered text in UTF-8, or a picture of its chart.

    Raises:
        UsageError: The format is unknown, or it is that of a picture and the report has no chart.
        MissingExtraError: The format needs a library that is not installed.
    """
    if output_format not in PICTURES:
        text = render(document, output_format, details=details)
        return text.encode("utf-8", "backslashreplace")
    require(output_format)
    if document.figure is None:
        raise UsageError(
            f"expected a report with a chart, but {document.title!r} has none; write it as .html or "
            ".md",
            argument="output",
        )
    from lmeval_dispersion.report.charts import picture

    return picture(document.figure, output_format)


def render(
    document: Document,
    output_format: str,
    *,
    width: int | None = None,
    colour: bool = False,
    encoding: str = "utf-8",
    details: bool = False,
) -> str:
    """Return a report as text in one of :data:`FORMATS`, ending in a newline.

    Equal documents give equal text.

    Args:
        document: The report.
        output_format: ``table`` (text for a terminal), ``markdown``, ``csv``, ``json`` or ``html``.
        width: Width of ``table`` in characters; None for 160, or 100 for a short report. Other
            formats ignore it.
        colour: Whether ``table`` uses colours (escape sequences).
        encoding: The terminal's encoding; ``table`` spells out characters that it lacks, ``±`` as
            ``+/-``.
        details: Whether ``table`` shows the details of a short report too.

    Raises:
        UsageError: The format is unknown.
        MissingExtraError: The format needs a library that is not installed.
    """
    require(output_format)
    if output_format == "markdown":
        return markdown_text(document)
    if output_format == "csv":
        return csv_text(document)
    if output_format == "json":
        return json_text(document)
    if output_format == "html":
        from lmeval_dispersion.report.html_page import html_text

        return html_text(document)
    from lmeval_dispersion.report.terminal import terminal_text

    width = width or (100 if document.short else 160)
    return terminal_text(document, width=width, colour=colour, encoding=encoding, details=details)


def json_text(document: Document) -> str:
    """Return the report as JSON text: what ``document.contract`` returns, if there is one.

    Otherwise the JSON has the schema ``dispersion-tables/1``: title, answer, limits, command and
    tables.
    """
    if document.contract is not None:
        return document.contract()
    tables = {}
    for name, table in document.tables().items():
        tables[name] = {"caption": table.caption, "rows": table.rows}
    content = {
        "schema": "dispersion-tables/1",
        "title": document.title,
        "answer": document.answer,
        "limits": document.limits,
        "command": document.command,
        "tables": tables,
    }
    return json_lines(json_value(content))


def json_lines(content: Any) -> str:
    """Return plain values as indented JSON text, one value a line, ending in a newline.

    Raises:
        ValueError: A value is NaN or infinite.
    """
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def csv_text(document: Document) -> str:
    """Return ``document.rows`` as CSV under one header, or the first table if there are none.

    Missing keys, None and NaN become empty fields, and booleans ``True`` or ``False``. A float has
    the shortest form that reads back equal; the items of a list are separated by spaces. Lines end
    in a line feed. A text that a spreadsheet would run as a formula gets an apostrophe before it
    (see `cells.guarded`).
    """
    import csv

    rows = document.rows
    names: dict[str, None] = {}  # in order
    for row in rows:
        names.update(dict.fromkeys(row))
    tables = document.tables()
    if tables and not rows:
        table = next(iter(tables.values()))
        rows = table.rows
        for column in table.columns:
            names[column.key] = None
            if column.error:
                names[column.error] = None
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(map(guarded, names))
    for row in rows:
        writer.writerow([_field(row.get(name)) for name in names])
    return stream.getvalue()


def _field(value: Any) -> Any:
    value = plain(value)
    if isinstance(value, (list, tuple)):
        if all(isinstance(item, int | float) for item in value):
            return " ".join(map(str, value))  # also of negative numbers
        value = " ".join(map(str, value))
    if isinstance(value, str):
        return guarded(value)
    if isinstance(value, float) and math.isnan(value):
        return ""
    return value


# --- Markdown -------------------------------------------------------------------------------------------


def markdown_text(document: Document) -> str:
    """Return the report in GitHub's Markdown; details are folded, charts are left out.

    Backticks in sentences stay code; everything in a table's cell is text.
    """
    blocks = [f"## {document.title}"]
    for place, sentence in enumerate(document.answer):
        blocks.append(sentence if place else f"**{sentence}**")
    hints_shown: set[str] = set()
    for section in document.sections:
        parts: list[str] = []
        for part in section.parts:
            parts += _blocks(part, hints_shown)
        if not parts:
            continue
        if section.details:
            heading = section.heading.replace("&", "&amp;")
            blocks += [f"<details><summary>{heading}</summary>", *parts, "</details>"]
            continue
        if section.heading:
            blocks.append(f"### {section.heading}")
        blocks += parts
    if document.limits:
        blocks += [f"### {LIMITS}", "\n".join(f"- {limit}" for limit in document.limits)]
    blocks = [_TAG.sub("&lt;", block) for block in blocks]
    blocks.append("### How this was made")
    if document.command:
        blocks.append(_fenced(printable(document.command)))
    blocks.append("\n".join(f"- {name}: {value}" for name, value in document.origin().items()))
    return "\n\n".join(blocks) + "\n"


def _blocks(part: Part, hints_shown: set[str]) -> Iterator[str]:
    if isinstance(part, Text):
        yield part.text
    elif isinstance(part, Note):
        yield f"> **{part.kind.capitalize()}:** " + part.text.replace("\n", "\n> ")
    elif isinstance(part, Facts):
        yield "\n".join(f"- {name}: {shown(value)}" for name, value in part.facts.items())
    elif isinstance(part, Table):
        if part.caption:
            yield f"**{part.caption}**"
        yield _table(part)
        more = more_of(part)
        if more:
            yield more
        hints = []
        for column in part.columns:
            hint = f"- {column.heading}: {column.hint}"
            if column.hint and hint not in hints_shown:
                hints.append(hint)
        hints_shown.update(hints)
        if hints:
            yield "\n".join(hints)


def _table(table: Table) -> str:
    if not table.columns:
        return "none"
    rule = "".join("--:|" if is_numeric(table, column) else "---|" for column in table.columns)
    lines = [_line([column.heading for column in table.columns]), f"|{rule}"]
    named = first_of_texts(table) or table.columns[0]
    for cut, row in visible_lines(table):
        if cut:
            lines.append(_line([f"— {cut} —" if c is named else "" for c in table.columns]))
        if row is None:
            lines.append(_line(["…"]))
        else:
            lines.append(_line([cell(row, column) for column in table.columns]))
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    texts = [" ".join(text.split()).replace("|", "\\|") for text in cells]
    return f"| {' | '.join(texts)} |"


def _fenced(text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text.rstrip()}\n{fence}"
