"""Tables of a page: cells, sortable heads, hints. Everything is escaped here."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class Column(NamedTuple):
    """How one column of a table is shown.

    Attributes:
        key: The value's key in a row.
        heading: What the column's head says.
        format: A format specification for numbers, such as ``.3f``; empty shows four significant digits.
        error: Key of the value's standard error, shown as ``± …`` in the same format.
        hint: One sentence on how to read the column, shown under the table.
    """

    key: str
    heading: str
    format: str = ""
    error: str = ""
    hint: str = ""


def table_html(
    rows: list[Mapping[str, Any]], columns: list[Column], name: str, caption: str, sortable: bool
) -> str:
    """A table as HTML; see ``Page.table``.

    Args:
        rows: What it holds; a missing key counts as None.
        columns: What is shown; the first names the row.
        name: Id of its caption.
        caption: The caption's text.
        sortable: Whether the heads are buttons.
    """
    numeric = [
        any(_number(row.get(column.key)) is not None for row in rows)
        and all(row.get(column.key) is None or _is_number(row.get(column.key)) for row in rows)
        for column in columns
    ]
    head = ""
    for column, is_number in zip(columns, numeric, strict=True):
        text = html.escape(column.heading)
        kind = ' class="number"' if is_number else ""
        if sortable:
            head += f'<th scope="col"{kind} aria-sort="none"><button type="button">{text}</button></th>'
        else:
            head += f'<th scope="col"{kind}>{text}</th>'
    body = ""
    for row in rows:
        cells = ""
        for position, (column, is_number) in enumerate(zip(columns, numeric, strict=True)):
            tag, scope = ("th", ' scope="row"') if position == 0 else ("td", "")
            kind = ' class="number"' if is_number else ""
            number = _number(row.get(column.key))
            value = f' data-value="{number!r}"' if number is not None else ""
            cells += f"<{tag}{scope}{kind}{value}>{_cell(row, column)}</{tag}>"
        body += f"<tr>{cells}</tr>\n"
    if not rows:
        body = f'<tr><td colspan="{len(columns)}">none</td></tr>\n'
    # The column of names may be broken into lines, but not into slivers.
    name_width = max((len(str(row.get(columns[0].key))) for row in rows), default=0)
    hints = "".join(
        f"<div><dt>{html.escape(column.heading)}</dt><dd>{inline(column.hint)}</dd></div>"
        for column in columns
        if column.hint
    )
    return (
        f'<div class="table" role="region" tabindex="0" aria-labelledby="{name}">'
        f'<table style="--name:{name_width}ch"><caption id="{name}"><span>{inline(caption)}</span></caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>"
        + (f'<dl class="hints">{hints}</dl>' if hints else "")
    )


def _cell(row: Mapping[str, Any], column: Column) -> str:
    value, error = row.get(column.key), row.get(column.error) if column.error else None
    text = shown(value, column.format)
    if _number(value) is not None and _number(error) is not None:
        text += f" ± {shown(error, column.format)}"
    return text


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) or hasattr(value, "dtype")


def _number(value: Any) -> float | int | None:
    """A finite number, or None for anything else."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def shown(value: Any, spec: str = "") -> str:
    """A value as escaped text of a cell."""
    value = value.item() if hasattr(value, "item") else value
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and math.isnan(value):
        return '<span class="undefined">undefined</span>'
    if isinstance(value, (int, float)):
        default = "" if isinstance(value, int) else ".4g"
        return html.escape(format(value, spec or default).replace("-", "−"))
    if isinstance(value, (list, tuple)):
        return ", ".join(shown(item, spec) for item in value)
    text = str(value)
    shown_text = html.escape(text)
    # A long name, such as a repository's, may break after a slash.
    return shown_text.replace("/", "/<wbr>") if len(text) > 30 else shown_text


def inline(text: str) -> str:
    """One line of plain text, escaped, with `code` marked."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def paragraphs(text: str) -> str:
    """Paragraphs of plain text (parted by an empty line) as HTML."""
    return "".join(f"<p>{inline(part.strip())}</p>" for part in re.split(r"\n\s*\n", text) if part.strip())
