"""A report as one self-contained HTML page: text, sortable tables and charts, readable without a network.

The page loads nothing: styles, scripts and pictures are inside, and a content security policy forbids the
rest. Charts are SVG in two widths and in the page's colours, so that they follow dark mode and print. Equal
documents give equal bytes. The markup is ``page.html.jinja``, which escapes every value.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Set
from dataclasses import replace
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
    Facts,
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
_WIDEST = {
    "extra": 1080,
    "spare": 430,
}  # pixels of a table, on a laptop and on a phone, by the next line
_SIGN, _SPACE = 9.5, 23  # pixels of a character in the widest system font, and around a cell
_DRAWN = {"extra": 175, "spare": 84}  # pixels of a column's dots (page.css)
_SENTENCE_END = re.compile(r"(?<=\.) (?=[A-Z])")
_FOLDED = 14  # least characters for a text of several words


def html_text(document: Document) -> str:
    """The whole page as UTF-8 text without outside references."""
    from markupsafe import Markup

    page = _Page()
    sections = page.sections(document)
    script = _asset("page.js")
    text = (
        _environment()
        .get_template("page.html.jinja")
        .render(
            fragment=False,
            document=document,
            # The heading is one sentence, though a line of the answer may hold several, one per group.
            answer=[
                *(
                    part
                    for line in document.answer[:1]
                    for part in _SENTENCE_END.split(line, maxsplit=1)
                ),
                *document.answer[1:],
            ],
            sections=sections,
            contents=[section for section in sections if section["heading"]],
            script=Markup(script),
            script_hash=Markup(_hash(script)),
            style=Markup(_asset("page.css")),
            version=__version__,
        )
    )
    return text.rstrip("\n") + "\n"


def html_fragment(document: Document) -> str:
    """The report's text and tables for a notebook, without styles, scripts and charts."""
    sections = [
        replace(section, parts=[part for part in section.parts if not isinstance(part, Chart)])
        for section in document.sections
    ]
    page = _Page(styled=False)
    template = _environment().get_template("page.html.jinja")
    text = template.render(
        fragment=True,
        document=document,
        sections=page.sections(replace(document, sections=sections)),
    )
    return text.strip() + "\n"


class _Page:
    """Each part for the template, with unique anchors."""

    def __init__(self, *, styled: bool = True) -> None:
        self._styled = styled
        self._names = Names()
        self._hints_shown: set[tuple[str, str]] = set()

    def sections(self, document: Document) -> list[dict[str, Any]]:
        sections = [section for section in document.sections if section.parts]
        if document.limits:
            note = Note("\n\n".join(document.limits), "warning")
            sections.append(Section(LIMITS, [note], name="limits"))
        return [self.section(section) for section in sections]

    def section(self, section: Section) -> dict[str, Any]:
        name = self._names.of(section.name, section.heading) if section.heading else ""
        parts = [self._part(part) for part in section.parts]
        return {
            "name": name,
            "heading": section.heading,
            "details": section.details,
            "parts": parts,
        }

    def _part(self, part: Part) -> dict[str, Any]:
        if isinstance(part, Table):
            return self._table(part)
        if isinstance(part, Chart):
            return self._chart(part)
        if isinstance(part, Facts):
            facts = [(name, _value(shown(value), value)) for name, value in part.facts.items()]
            return {"kind": "facts", "facts": facts}
        if isinstance(part, Note):
            return {"kind": part.kind, "text": part.text}
        return {"kind": "text", "text": part.text}

    def _table(self, table: Table) -> dict[str, Any]:
        axes = {
            column.key: axis
            for column in table.columns
            if self._styled and column.dots and (axis := axis_of(table.rows, column, AXIS[1]))
        }
        kinds = [_kind(table, column) for column in table.columns]
        hidden = _hidden(table, kinds, set(axes))
        kinds = [
            " ".join([kind, *its]).strip() for kind, (its, _) in zip(kinds, hidden, strict=True)
        ]
        dots = {
            c.key: " ".join(["dots", *its])
            for c, (_, its) in zip(table.columns, hidden, strict=True)
        }
        hints = [(column.heading, column.hint) for column in table.columns if column.hint]
        hints += [
            (f"Line of {c.heading}", c.whisker)
            for c in table.columns
            if c.key in axes and c.whisker
        ]
        new = [pair for pair in hints if pair not in self._hints_shown]
        self._hints_shown.update(new)
        # Made while they are written: the cells of ten thousand rows at once slow Python's collector down.
        rows = (
            [
                {
                    "text": _value(_text(table, row, column), row.get(column.key)),
                    "value": number(row.get(column.key)),
                    "error": number(row.get(column.error)) if column.error else None,
                    "kind": kind,
                    "dots": _dots(row, column, axes.get(column.key)),
                }
                for column, kind in zip(table.columns, kinds, strict=True)
            ]
            for row in table.rows
        )
        return {
            "kind": "table",
            "name": self._names.of(table.name, table.caption),
            "caption": table.caption,
            "more": table.more,
            "hints": new,
            "sortable": self._styled and len(table.rows) > 1,
            # The column of names may be folded, but not into slivers.
            "name_width": max(
                (len(shown(row.get(table.columns[0].key))) for row in table.rows), default=0
            ),
            "columns": [
                {
                    "heading": column.heading,
                    "error": column.error,
                    "kind": kind,
                    "dots": dots[column.key],
                    "ends": axes[column.key].heading.split() if column.key in axes else None,
                }
                for column, kind in zip(table.columns, kinds, strict=True)
            ],
            "rows": (
                (table.cuts.get(place, ""), table.marks.get(place, ""), row)
                for place, row in enumerate(rows)
            ),
        }

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


def _text(table: Table, row: Row, column: Column) -> str:
    """The text of a cell, with the ends of an interval that terminals draw, unless they have columns."""
    own = {column.key for column in table.columns}
    ends = [shown(row.get(key), column.format) for key in column.reach.split() if key not in own]
    return cell(row, column) + (f" ({ends[0]}–{ends[1]})" if len(ends) == 2 and all(ends) else "")


def _kind(table: Table, column: Column) -> str:
    """The class of a column's cells: numbers flush right, short texts in one line, others folded."""
    if is_numeric(table, column):
        return "number"
    return "short" if all(len(cell(row, column)) <= _SHORT for row in table.rows) else ""


def _dots(row: Row, column: Column, axis: Axis | None) -> dict[str, float] | None:
    """The places of a dot, its whisker's ends and zero on its axis, in per cent."""
    drawn = whisker(row, column) if axis else None
    if axis is None or drawn is None or not axis.low <= drawn[0] <= axis.high:
        return None
    value, below, above = drawn
    places = {"at": value, "low": value - below, "high": value + above}
    if axis.low < 0 < axis.high:
        places["zero"] = 0.0
    return {name: round(4 + 92 * axis.share(place), 1) for name, place in places.items()}


def _hidden(table: Table, kinds: list[str], drawn: Set[str]) -> list[tuple[list[str], list[str]]]:
    """For each column the classes that hide it and its dots on narrow pages: the largest `drop` goes first.

    Dots of a column that never goes are hidden after all that go.
    """
    widths = [
        _SPACE
        + _SIGN
        * max(
            0,
            *(len(word) + 2 for word in column.heading.split()),
            max((_least(_text(table, row, column), kind) for row in table.rows), default=0),
        )
        for column, kind in zip(table.columns, kinds, strict=True)
    ]
    drops = [column.drop for column in table.columns]
    dots = [column.drop or 0.5 for column in table.columns if column.key in drawn]

    def classes(drop: float) -> list[str]:  # the two ends of an interval go together
        left = sum(width for width, its in zip(widths, drops, strict=True) if its <= drop)
        shown = sum(its <= drop for its in dots)
        return [
            name
            for name, widest in _WIDEST.items()
            if drop and left + shown * _DRAWN[name] > widest
        ]

    return [(classes(drop), classes(drop or 0.5)) for drop in drops]


def _least(text: str, kind: str) -> int:
    """Width of a cell's narrowest layout, in characters."""
    return len(text) if kind else min(len(text), max(_FOLDED, *map(len, text.split()), 0))


def _value(text: str, value: object) -> Markup:
    """The text of a value, escaped, with true minus signs in numbers; a long name may break inside."""
    from markupsafe import Markup, escape

    if text == "undefined":
        return Markup('<span class="undefined">undefined</span>')
    if number(value) is not None:
        text = text.replace("-", "−")
    return (
        Markup(re.sub("[/_]", r"\g<0><wbr>", str(escape(text))))
        if len(text) > _SHORT
        else escape(text)
    )


def _prose(text: str) -> Markup:
    """One line of text, escaped: `code` is marked, minus signs are true, % stays with its number."""
    from markupsafe import Markup, escape

    words = str(escape(text)).split("`")
    if len(words) % 2 == 0:  # an unpaired backquote
        words[-2:] = ["`".join(words[-2:])]
    for at in range(0, len(words), 2):
        words[at] = re.sub(r"(?<![\w.-])-(?=\d)", "−", re.sub(r"(?<=\d) %", "\u00a0%", words[at]))
    for at in range(1, len(words), 2):
        words[at] = f"<code>{words[at]}</code>"
    return Markup("".join(words))


def _paragraphs(text: str) -> list[str]:
    return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]


@functools.cache
def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["prose"] = _prose
    environment.filters["paragraphs"] = _paragraphs
    return environment


@functools.cache
def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
