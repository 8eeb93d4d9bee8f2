"""A report as data, without its appearance.

A tool builds a `Document`; the renderers of this package turn it into text for a terminal, Markdown, CSV,
JSON or a page. A document knows none of them: it holds sentences, tables with typed columns, charts that
are drawn only for a page, and the limits of the numbers.
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
    """The display of one table column.

    Attributes:
        key: The value's key in a row.
        heading: The column's heading.
        format: A format specification for numbers, such as ``.3f``; empty shows integers whole and other
            numbers with four significant digits. Two more words: ``bytes`` (812 B, 1.31 MB) and ``p-value``
            (three decimals, ``< 0.001`` below that).
        error: Key of the value's standard error, shown as ``± …`` in the same format.
        hint: One sentence that explains the column, shown with the table.
        short: A heading for narrow places; empty for the same.
        drop: When a table is too wide, columns with the largest number go first; 0 never goes, and 9 goes
            also to make room for an axis.
        dots: The values are drawn as dots on one axis next to the column, with a whisker to both sides
            (``both``; ``page``: on pages only) or to the left (``below``); empty for no drawing.
        reach: Key of the whisker's length, or the keys of its two ends, ``low high``; empty for the error's.
        whisker: Its meaning in a few words, shown where dots are drawn.
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
    """A row class's shown columns by key: its fields that are annotated with a `Col`, in order."""
    columns = {}
    for name, hint in get_type_hints(row_type, include_extras=True).items():
        for mark in getattr(hint, "__metadata__", ()):
            if isinstance(mark, Column):
                columns[name] = mark
    return columns


@dataclass(frozen=True)
class Table:
    """Rows under typed columns; the first column names the row.

    A missing key or None is an empty cell; NaN is shown as undefined.

    Attributes:
        rows: Mappings from key to value.
        columns: The shown columns, in order.
        caption: The table's content in one line.
        name: Anchor on a page, key among JSON tables; empty for one made from the caption.
        more: A sentence on rows that were left out; else empty.
        excerpt: Positions of the rows that texts (terminal, Markdown) show; empty for all. They give the
            total; pages show all.
        brief: The table that a terminal shows in its place without ``--details``; None for the same.
        marks: The rows that pages set off, by position.
        cuts: Lines between two rows, each with a few words on the rows above it, by the position of the row
            below.
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
        """Build a table, without its empty columns.

        Args:
            rows: Objects of one dataclass, or mappings.
            caption: See the attribute.
            columns: Columns by key; default: the fields of the dataclass with a `Col`.
            name: See the attribute.
            more: See the attribute.
            excerpt: See the attribute.
            hide: Keys of columns to leave out.
            headings: Headings that replace the columns', by key.
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
        """The table without its empty columns."""
        columns = []
        for column in self.columns:
            if not all(_is_empty(row.get(column.key)) for row in self.rows):
                columns.append(column)
        return replace(self, columns=columns)


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | tuple) and not value)


def fields_of(row: Any) -> dict[str, Any]:
    """A dataclass row as a mapping from field to value, one level deep."""
    return {field.name: getattr(row, field.name) for field in fields(row)}


@dataclass(frozen=True)
class Chart:
    """A chart, drawn only where pictures can be shown.

    Attributes:
        draw: The Vega-Lite specification with its data inside, or a function that makes it.
        caption: The chart's content in one line.
        description: The same for screen readers, with the important numbers.
        meaning: How to read it and its limits; may be empty.
        name: Anchor on a page and name of a saved picture; empty for one made from the caption.
    """

    draw: Mapping[str, Any] | Callable[[], Mapping[str, Any]]
    caption: str
    description: str
    meaning: str = ""
    name: str = ""

    def specification(self) -> dict[str, Any]:
        """The chart as Vega-Lite."""
        return dict(self.draw() if callable(self.draw) else self.draw)


@dataclass(frozen=True)
class Text:
    """Paragraphs, separated by an empty line; `backticks` mark code."""

    text: str
    kind: ClassVar[str] = "text"


@dataclass(frozen=True)
class Note:
    """A highlighted paragraph: a ``note`` is a caveat, a ``warning`` a limit of the evidence."""

    text: str
    kind: Literal["note", "warning"] = "note"


@dataclass(frozen=True)
class Facts:
    """A short list of names and values, such as inputs and settings."""

    facts: Mapping[str, object]
    kind: ClassVar[str] = "facts"


Part = Table | Chart | Text | Note | Facts


@dataclass(frozen=True)
class Section:
    """A heading and its content.

    Attributes:
        heading: The heading; empty above the first heading.
        parts: Everything below it, in order.
        name: Anchor on a page; empty for one made from the heading.
        details: Whether it is folded on a page and may be left out of a short text.
    """

    heading: str
    parts: Sequence[Part]
    name: str = ""
    details: bool = False


@dataclass(frozen=True, repr=False)
class Document:
    """A whole report.

    Attributes:
        title: Its heading.
        answer: The answer, a sentence or two each; the first is the first line of every format for readers.
        sections: The evidence for the answer, in order.
        limits: Claims that the numbers do not support, one sentence each.
        command: The command that made it, or empty.
        rows: The lines of CSV, a flat mapping each; empty for the first table.
        contract: Returns the tool's versioned JSON, ending in a newline. None: JSON holds the tables.
        libraries: Distributions whose versions decide the numbers; Python's and ours are always given.
        guide: The documentation page that explains the report, such as
            ``docs/reference/screening.md``.
        short: Whether a terminal leaves out details and limits.
        figure: The chart that a picture of the report shows; None without a chart.
        made: The day, as in 2026-01-31, by UTC.
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
        """Every table by its anchor, in order."""
        names = Names()
        tables = {}
        for section in self.sections:
            for part in section.parts:
                if isinstance(part, Table):
                    tables[names.of(part.name, part.caption)] = part
        return tables

    def origin(self) -> dict[str, str]:
        """Link to the guide, versions that made the report, and the day, by label."""
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
    """Unique anchors: a name unchanged, a heading in lower case with hyphens.

    >>> names = Names()
    >>> names.of("", "Accuracy against G"), names.of("", "Accuracy against G"), names.of("cost", "Bytes")
    ('accuracy-against-g', 'accuracy-against-g-2', 'cost')
    """

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def of(self, name: str, heading: str) -> str:
        """A part's anchor: ``name``, or one made from ``heading``, numbered if it is taken."""
        wanted = name or re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-") or "part"
        anchor = wanted
        count = 1
        while anchor in self._taken:
            count += 1
            anchor = f"{wanted}-{count}"
        self._taken.add(anchor)
        return anchor
