"""A report as one self-contained HTML page: text, sortable tables and charts.

The page is readable without a network and loads nothing: styles, scripts and pictures are inside,
and a content security policy forbids the rest. Charts are SVG in two widths and in the page's
colours, so that they follow dark mode and print. Equal documents give equal bytes. The markup is
``page.html.jinja``, which escapes every value.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmeval_dispersion.installation import __version__
from lmeval_dispersion.report.cells import (
    AXIS,
    Axis,
    axis_of,
    cell,
    is_numeric,
    number,
    shown,
    whisker,
)
from lmeval_dispersion.report.document import (
    LIMITS,
    Chart,
    Column,
    Document,
    Names,
    Note,
    Part,
    Row,
    Section,
    Table,
)

if TYPE_CHECKING:
    import jinja2
    from markupsafe import Markup

_HERE = Path(__file__).resolve().parent
_SHORT = 16  # characters that fit into one line on a phone
# Pixels of a table and of a column's dots (page.css): on a laptop, and on a phone.
_WIDEST = {"extra": 1080, "spare": 430}
_DRAWN = {"extra": 175, "spare": 84}
# Pixels of a character in the widest system font, and around a cell.
_SIGN = 9.5
_SPACE = 23
_SENTENCE_END = re.compile(r"(?<=\.) (?=[A-Z])")
_LAST = 0.5  # `drop` of the dots of a column that never goes: they go after all that go
_FOLDED = 14  # least characters for a text of several words


def html_text(document: Document) -> str:
    """Return the report as a whole HTML page, which loads nothing from elsewhere."""
    from markupsafe import Markup

    sections = _Page().sections(document)
    script = _asset("page.js")
    digest = hashlib.sha256(script.encode()).digest()
    answer = list(document.answer)
    if answer:
        # The heading is one sentence, though a line of the answer may hold several, one per group.
        answer[:1] = _SENTENCE_END.split(answer[0], maxsplit=1)
    text = _template().render(
        fragment=False,
        document=document,
        answer=answer,
        sections=sections,
        contents=[section for section in sections if section["heading"]],
        script=Markup(script),
        script_hash=Markup(base64.b64encode(digest).decode()),
        style=Markup(_asset("page.css")),
        version=__version__,
    )
    return text.rstrip("\n") + "\n"


def html_fragment(document: Document) -> str:
    """Return the report's text and tables as HTML for a notebook.

    Styles, scripts and charts are left out.
    """
    sections = _Page(styled=False).sections(document)
    text = _template().render(fragment=True, document=document, sections=sections)
    return text.strip() + "\n"


class _Page:
    """Each part for the template, with unique anchors; charts and dots only where styles are."""

    def __init__(self, *, styled: bool = True) -> None:
        self._styled = styled
        self._names = Names()
        self._hints_shown: set[tuple[str, str]] = set()

    def sections(self, document: Document) -> list[dict[str, Any]]:
        sections = list(document.sections)
        if document.limits:
            note = Note("\n\n".join(document.limits), "warning")
            sections.append(Section(LIMITS, [note], name="limits"))
        drawn = []
        for section in sections:
            parts = section.parts
            if not self._styled:
                parts = [part for part in parts if not isinstance(part, Chart)]
            if parts:
                drawn.append(self._section(section, parts))
        return drawn

    def _section(self, section: Section, parts: Sequence[Part]) -> dict[str, Any]:
        name = ""
        if section.heading:
            name = self._names.of(section.name, section.heading)
        return {
            "name": name,
            "heading": section.heading,
            "details": section.details,
            "parts": [self._part(part) for part in parts],
        }

    def _part(self, part: Part) -> Part | dict[str, Any]:
        """The part as the template takes it."""
        if isinstance(part, Table):
            return self._table(part)
        if isinstance(part, Chart):
            return self._chart(part)
        return part

    def _table(self, table: Table) -> dict[str, Any]:
        axes: dict[str, Axis] = {}
        for column in table.columns:
            if self._styled and column.dots:
                axis = axis_of(table.rows, column, AXIS[1])
                if axis is not None:
                    axes[column.key] = axis
        kinds = [_kind(table, column) for column in table.columns]
        room = _Room(table, kinds, axes)
        columns = []
        for column, kind in zip(table.columns, kinds, strict=True):
            axis = axes.get(column.key)
            hidden = room.hidden(column.drop)
            columns.append(
                {
                    "heading": column.heading,
                    "error": column.error,
                    "kind": " ".join([kind, *hidden]).strip(),
                    "dots": " ".join(["dots", *room.hidden(column.drop or _LAST)]),
                    "ends": axis and axis.heading.split(),
                }
            )
        # The column of names may be folded, but not into slivers.
        names = (shown(row.get(table.columns[0].key)) for row in table.rows)
        return {
            "kind": "table",
            "name": self._names.of(table.name, table.caption),
            "caption": table.caption,
            "more": table.more,
            "hints": self._hints(table, axes),
            "sortable": self._styled and len(table.rows) > 1,
            "name_width": max(map(len, names), default=0),
            "columns": columns,
            "rows": _rows(table, [str(column["kind"]) for column in columns], axes),
        }

    def _hints(self, table: Table, axes: Mapping[str, Axis]) -> list[tuple[str, str]]:
        """The explanations of columns and whiskers that no earlier table had."""
        hints = [(column.heading, column.hint) for column in table.columns]
        for column in table.columns:
            if column.key in axes:
                hints.append((f"Line of {column.heading}", column.whisker))
        new = [pair for pair in hints if pair[1] and pair not in self._hints_shown]
        self._hints_shown.update(new)
        return new

    def _chart(self, chart: Chart) -> dict[str, Any]:
        from markupsafe import Markup

        from lmeval_dispersion.report.charts import WIDTHS, chart_svg

        name = self._names.of(chart.name, chart.caption)
        return {
            "kind": "chart",
            "name": name,
            "caption": chart.caption,
            "description": chart.description,
            "meaning": chart.meaning,
            "pictures": [(width, Markup(chart_svg(chart, name, width))) for width in WIDTHS],
        }


def _rows(
    table: Table, kinds: Sequence[str], axes: Mapping[str, Axis]
) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """Each row's line above it, mark and cells.

    Made while they are written: the cells of ten thousand rows at once slow Python's collector down.
    """
    for place, row in enumerate(table.rows):
        cells = []
        for column, kind in zip(table.columns, kinds, strict=True):
            value = row.get(column.key)
            cells.append(
                {
                    "text": _value(_text(table, row, column), value),
                    "value": number(value),
                    "error": number(row.get(column.error)),
                    "kind": kind,
                    "dots": _dots(row, column, axes.get(column.key)),
                }
            )
        yield table.cuts.get(place, ""), table.marks.get(place, ""), cells


def _text(table: Table, row: Row, column: Column) -> str:
    """The text of a cell, with the ends of an interval that terminals draw, unless they have columns."""
    text = cell(row, column)
    keys = column.reach.split()
    if len(keys) < 2 or any(other.key in keys for other in table.columns):
        return text
    low, high = [shown(row.get(key), column.format) for key in keys]
    return f"{text} ({low}–{high})" if low and high else text


def _kind(table: Table, column: Column) -> str:
    """The class of a column's cells: numbers flush right, short texts in one line, others folded."""
    if is_numeric(table, column):
        return "number"
    longest = max((len(cell(row, column)) for row in table.rows), default=0)
    return "short" if longest <= _SHORT else ""


def _dots(row: Row, column: Column, axis: Axis | None) -> dict[str, float] | None:
    """The places of a dot, its whisker's ends and zero on its axis, in per cent."""
    if axis is None:
        return None
    drawn = whisker(row, column)
    if drawn is None:
        return None
    value, below, above = drawn
    if not axis.low <= value <= axis.high:
        return None
    places = {"at": value, "low": value - below, "high": value + above}
    if axis.low < 0 < axis.high:
        places["zero"] = 0.0
    shares = {}
    for name, place in places.items():
        shares[name] = round(4 + 92 * axis.share(place), 1)
    return shares


class _Room:
    """How wide a table's columns are, and so which of them have no room on narrow pages."""

    def __init__(self, table: Table, kinds: Sequence[str], drawn: Collection[str]) -> None:
        self._columns: list[tuple[int, float]] = []  # `drop` and width in pixels
        self._dots: list[float] = []  # `drop` of each column's dots
        for column, kind in zip(table.columns, kinds, strict=True):
            signs = [len(word) + 2 for word in column.heading.split()]
            signs += [_least(_text(table, row, column), kind) for row in table.rows]
            self._columns.append((column.drop, _SPACE + _SIGN * max(signs, default=0)))
            if column.key in drawn:
                self._dots.append(column.drop or _LAST)

    def hidden(self, drop: float) -> list[str]:
        """The classes that hide what has this ``drop`` on narrow pages: the largest goes first."""
        width = sum(width for own, width in self._columns if own <= drop)
        drawn = sum(own <= drop for own in self._dots)
        names = []
        for name, widest in _WIDEST.items():
            if drop and width + drawn * _DRAWN[name] > widest:
                names.append(name)
        return names


def _least(text: str, kind: str) -> int:
    """Width of a cell's narrowest layout, in characters."""
    if kind:
        return len(text)
    longest = max(map(len, text.split()), default=0)
    return min(len(text), max(_FOLDED, longest))


def _value(text: str, value: object) -> Markup:
    """The text of a value, escaped, with true minus signs in numbers; a long name may break inside."""
    from markupsafe import Markup, escape

    if text == "undefined":
        return Markup('<span class="undefined">undefined</span>')
    if number(value) is not None:
        text = text.replace("-", "−")
    markup = escape(text)
    if len(text) > _SHORT:
        markup = Markup(re.sub("[/_]", r"\g<0><wbr>", str(markup)))
    return markup


def _fact(value: object) -> Markup:
    return _value(shown(value), value)


def _prose(text: str) -> Markup:
    """One line of text, escaped: `code` is marked, minus signs are true, % stays with its number."""
    from markupsafe import Markup, escape

    words = str(escape(text)).split("`")
    if len(words) % 2 == 0:  # an unpaired backquote
        words[-2:] = ["`".join(words[-2:])]
    for place, word in enumerate(words):
        if place % 2:
            words[place] = f"<code>{word}</code>"
        else:
            word = re.sub(r"(?<=\d) %", "\u00a0%", word)
            words[place] = re.sub(r"(?<![\w.-])-(?=\d)", "−", word)
    return Markup("".join(words))


def _paragraphs(text: str) -> list[str]:
    return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]


@functools.cache
def _template() -> jinja2.Template:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["prose"] = _prose
    environment.filters["fact"] = _fact
    environment.filters["paragraphs"] = _paragraphs
    return environment.get_template("page.html.jinja")


@functools.cache
def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
