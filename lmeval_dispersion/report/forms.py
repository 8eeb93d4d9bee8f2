"""The forms of a report, and what turns a document into each."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Literal, get_args

from lmeval_dispersion.errors import MissingExtraError, UsageError
from lmeval_dispersion.report.document import Document

Format = Literal["table", "markdown", "csv", "json", "html"]
#: Every form of a report, as ``--format`` names them.
FORMATS: tuple[Format, ...] = get_args(Format)


def require(output_format: str) -> None:
    """Check, before any work, that a format can be written here.

    Raises:
        UsageError: There is no such format.
        MissingExtraError: A library that it needs is not installed; the message says what to install.
    """
    if output_format not in FORMATS:
        raise UsageError(f"expected a format of {', '.join(FORMATS)}, got {output_format!r}")
    if output_format == "html":
        missing = [name for name in ("vl_convert",) if not importlib.util.find_spec(name)]
        if missing:
            raise MissingExtraError(
                f"a page needs {' and '.join(missing)}; run: pip install 'lmeval-dispersion[html]'"
            )


def rendered(document: Document, output_format: str) -> Iterator[str]:
    """`render` for programs, ``csv`` or ``json``, in pieces: a report of many rows need not fit in memory."""
    if output_format == "csv":
        from lmeval_dispersion.report.csv_rows import csv_lines

        yield from csv_lines(document)
    elif output_format == "json":
        from lmeval_dispersion.report.json_tables import json_pieces

        yield from json_pieces(document)
    else:
        yield render(document, output_format)


def render(
    document: Document,
    output_format: str,
    *,
    width: int | None = None,
    colour: bool = False,
    encoding: str = "utf-8",
    details: bool = False,
) -> str:
    """A report in one of :data:`FORMATS`, ending in a newline. Equal documents give equal text.

    Args:
        document: The report.
        output_format: ``table`` (text for a terminal), ``markdown``, ``csv``, ``json`` or ``html``.
        width: Columns that a text may take; None for 160, of a short report 100. Other formats have none.
        colour: Whether a table is coloured by escape sequences.
        encoding: What a terminal can show; a table spells out other characters, ``±`` as ``+/-``.
        details: Whether a table shows the details of a short report too.

    Raises:
        UsageError: There is no such format.
        MissingExtraError: The format needs a library that is not installed.
    """
    require(output_format)
    if output_format == "markdown":
        from lmeval_dispersion.report.markdown import markdown_text

        return markdown_text(document)
    if output_format == "csv":
        from lmeval_dispersion.report.csv_rows import csv_text

        return csv_text(document)
    if output_format == "json":
        from lmeval_dispersion.report.json_tables import json_text

        return json_text(document)
    if output_format == "html":
        from lmeval_dispersion.report.html_page import html_text

        return html_text(document)
    from lmeval_dispersion.report.terminal import terminal_text

    width = width or (100 if document.short else 160)
    return terminal_text(document, width=width, colour=colour, encoding=encoding, details=details)
