"""A report as data, without its appearance.

A command builds a `Document`; the renderers of this package turn it into text for a terminal,
Markdown, CSV, JSON or a page. The document knows none of them: it holds sentences, tables with
typed columns, charts that are drawn only on a page, and the limits of the numbers.
"""

from __future__ import annotations

import contextlib
import functools
import re
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, get_type_hints

from lmeval_dispersion.installation import __version__

Row = Mapping[str, Any]
Mark = Literal["pick", "control"]  # a row's mark: look at it first; or it only checks or sums up
SITE = "https://lmeval-dispersion.github.io/lmeval-dispersion/"
LIMITS = "Limits"  # heading of `Document.limits`


@dataclass(frozen=True)
class Column:
    """How one column of a table is displayed.

    Attributes:
        key: Key of the value in a row.
        heading: Heading of the column.
        format: Format specification for numbers, such as ``.3f``. Empty shows integers in full and
            other numbers with four significant digits. Two more are allowed: ``bytes`` (812 B, 1.31
            MB) and ``p-value`` (three decimals, ``< 0.001`` for smaller numbers).
        error: Key of the value's standard error, shown as ``± …`` in the same format.
        hint: One sentence that explains the column, shown with the table.
        short: Heading for narrow places; empty to use ``heading``.
        drop: Order in which columns are left out of a table that is too wide, the largest number
            first. 0 is never left out; 9 is also left out to make room for an axis.
        dots: How values are drawn as dots on an axis next to the column: with a whisker (a line for
            the uncertainty) to both sides (``both``; ``page``: on pages only) or to the left only
            (``below``). Empty draws none.
        reach: Key of the whisker's length, or the keys of its two ends as ``low high``; empty to
            use the standard error.
        whisker: What the whisker means, in a few words, shown where dots are drawn.
    """

    key: str
    heading: str
    format: str = ""
    error: str = ""
    hint: str = ""
    short: str = ""
    drop: int = 0
    dots: Literal["", "both", "below", "page"] = ""
    reach: str = ""
    whisker: str = ""


#: A column for the annotation of a field, such as ``Annotated[float, Col("G")]``; its key is the field.
Col = functools.partial(Column, "")


@functools.cache
def columns_of(row_type: type) -> Mapping[str, Column]:
    """Return the columns of a row class by key: its fields annotated with a `Col`, in order."""
    columns = {}
    for name, hint in get_type_hints(row_type, include_extras=True).items():
        for mark in getattr(hint, "__metadata__", ()):
            if isinstance(mark, Column):
                columns[name] = mark
    return columns


@dataclass(frozen=True)
class Table:
    """Rows with their displayed columns; the first column names the row.

    A missing key or None is shown as an empty cell, and NaN as ``undefined``.

    Attributes:
        rows: The rows, as mappings from key to value.
        columns: The columns that are shown, in order.
        caption: What the table contains, in one line.
        name: Anchor on a page and key in JSON; empty to derive it from the caption.
        more: A sentence on rows that were left out; else empty.
        excerpt: Positions of the rows that the terminal and Markdown show, which then state the total
            number of rows; empty to show all. Pages show all.
        brief: A shorter table that the terminal shows instead unless ``--details`` is given; None
            to show this one.
        marks: Position of a row that pages highlight -> kind of the mark: ``pick`` (to look at
            first) or ``control`` (a check or a sum).
        cuts: Position of a row -> text of the dividing line above it: a few words on the rows above
            the line.
    """

    rows: Sequence[Row]
    columns: Sequence[Column]
    caption: str
    name: str = ""
    more: str = ""
    excerpt: Sequence[int] = ()
    brief: Table | None = None
    marks: Mapping[int, Mark] = field(default_factory=dict)
    cuts: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        rows: Sequence[Any],
        caption: str,
        *,
        columns: Mapping[str, Column] | None = None,
        name: str = "",
        more: str = "",
        excerpt: Sequence[int] = (),
        hide: Sequence[str] = (),
        headings: Mapping[str, str] = types.MappingProxyType({}),
    ) -> Table:
        """Build a table from rows, without columns that are empty.

        Args:
            rows: Objects of one dataclass, or mappings.
            caption: What the table contains, in one line.
            columns: Key -> column; by default the fields of the dataclass that have a `Col`.
            name: Anchor on a page and key in JSON; empty to derive it from the caption.
            more: A sentence on rows that were left out.
            excerpt: Positions of the rows that the terminal and Markdown show; empty for all.
            hide: Keys of columns to leave out.
            headings: Key -> heading that replaces the column's own.
        """
        values = [row if isinstance(row, Mapping) else fields_of(row) for row in rows]
        if columns is None:
            row_type: type = type(rows[0]) if rows else object
            columns = columns_of(row_type)
        shown = []
        for key, column in columns.items():
            if key not in hide:
                heading = headings.get(key, column.heading)
                shown.append(replace(column, key=key, heading=heading))
        return cls(values, shown, caption, name, more, excerpt).filled()

    def filled(self) -> Table:
        """Return the table without the columns in which every cell is empty."""
        columns = []
        for column in self.columns:
            if not all(_is_empty(row.get(column.key)) for row in self.rows):
                columns.append(column)
        return replace(self, columns=columns)


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | tuple) and not value)


def fields_of(row: Any) -> dict[str, Any]:
    """Return a dataclass row as a mapping from field to value, one level deep."""
    return {field.name: getattr(row, field.name) for field in fields(row)}


@dataclass(frozen=True)
class Chart:
    """A chart, which is drawn on pages, in notebooks and in picture files.

    Attributes:
        draw: The Vega-Lite specification with its data inside, or a function that makes it.
        caption: What the chart shows, in one line.
        description: A text for screen readers, with the important numbers.
        meaning: How to read the chart, and its limits; may be empty.
        name: Anchor on a page and name of a saved picture; empty to derive it from the caption.
    """

    draw: Mapping[str, Any] | Callable[[], Mapping[str, Any]]
    caption: str
    description: str
    meaning: str = ""
    name: str = ""

    def specification(self) -> dict[str, Any]:
        """Return the chart's Vega-Lite specification."""
        return dict(self.draw() if callable(self.draw) else self.draw)


@dataclass(frozen=True)
class Text:
    """Paragraphs of text.

    Attributes:
        text: The paragraphs, separated by an empty line; `backticks` mark code.
    """

    text: str
    kind: ClassVar[str] = "text"


@dataclass(frozen=True)
class Note:
    """A highlighted paragraph.

    Attributes:
        text: The paragraph.
        kind: ``note`` for a caveat, ``warning`` for a limit of the evidence.
    """

    text: str
    kind: Literal["note", "warning"] = "note"


@dataclass(frozen=True)
class Facts:
    """A short list of names and values, such as inputs and settings.

    Attributes:
        facts: Name -> value, in order.
    """

    facts: Mapping[str, object]
    kind: ClassVar[str] = "facts"


Part = Table | Chart | Text | Note | Facts


@dataclass(frozen=True)
class Section:
    """A section of a report: a heading and the parts below it.

    Attributes:
        heading: The heading; empty for parts above the first heading.
        parts: Texts, notes, facts, tables and charts, in order.
        name: Anchor on a page; empty to derive it from the heading.
        details: Whether the section is folded on a page, and left out of a short report on a
            terminal.
    """

    heading: str
    parts: Sequence[Part]
    name: str = ""
    details: bool = False


@dataclass(frozen=True, repr=False)
class Document:
    """A whole report.

    Attributes:
        title: Title of the report.
        answer: Paragraphs of one or two sentences that answer the question. The first one stands at
            the top of the report: on a page, its first sentence is the heading.
        sections: The sections with the evidence for the answer, in order.
        limits: Sentences on claims that the numbers do not support.
        command: The command that made the report; empty if it was made in Python.
        rows: The rows of CSV, as flat mappings; if empty, CSV has the first table.
        contract: Function that returns the versioned JSON text of the report, ending in a newline;
            None for JSON with the tables.
        libraries: Packages whose versions affect the numbers, in addition to Python and this one.
        guide: The documentation page that explains the report, such as
            ``docs/reference/screening.md``.
        short: Whether a terminal leaves out details and limits.
        figure: The chart that a picture of the report shows; None without a chart.
        made: Date of the report in UTC, such as 2026-01-31.
    """

    title: str
    answer: Sequence[str] = ()
    sections: Sequence[Section] = ()
    limits: Sequence[str] = ()
    command: str = ""
    rows: Sequence[Row] = ()
    contract: Callable[[], str] | None = field(default=None, repr=False)
    libraries: Sequence[str] = ()
    guide: str = ""
    short: bool = False
    figure: Chart | None = None
    made: str = field(default_factory=lambda: time.strftime("%Y-%m-%d", time.gmtime()))

    def __repr__(self) -> str:
        return f"<Document> {' '.join([self.title, *self.answer[:1]])}"

    def tables(self) -> dict[str, Table]:
        """Return every table by its anchor, in the order of the report."""
        names = Names()
        tables = {}
        for section in self.sections:
            for part in section.parts:
                if isinstance(part, Table):
                    tables[names.of(part.name, part.caption)] = part
        return tables

    def origin(self) -> dict[str, str]:
        """Return, by label, the link to the guide, the versions used, and the date."""
        import platform
        from importlib import metadata  # importing it takes as long as numpy's arrays

        versions = [f"lmeval-dispersion {__version__}", f"Python {platform.python_version()}"]
        for library in self.libraries:
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions.append(f"{library} {metadata.version(library)}")
        facts = {}
        if self.guide:
            page = self.guide.removeprefix("docs/").removesuffix(".md")
            facts["How to read it"] = f"{SITE}{page}/"
        return facts | {"Made with": ", ".join(versions), "Made on": self.made}


class Names:
    """Maker of anchors that are unique in a report.

    >>> names = Names()
    >>> names.of("", "Accuracy against G"), names.of("", "Accuracy against G")
    ('accuracy-against-g', 'accuracy-against-g-2')
    >>> names.of("cost", "Bytes")
    'cost'
    """

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def of(self, name: str, heading: str) -> str:
        """Return the anchor of a part: ``name``, or one made from ``heading``.

        A heading becomes lower case with hyphens. An anchor that an earlier part has gets a number
        at its end.
        """
        wanted = name or re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-") or "part"
        anchor = wanted
        count = 1
        while anchor in self._taken:
            count += 1
            anchor = f"{wanted}-{count}"
        self._taken.add(anchor)
        return anchor
