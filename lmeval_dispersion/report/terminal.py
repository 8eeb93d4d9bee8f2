"""A report as text for a terminal, in its width; narrow terminals get fewer columns."""

from __future__ import annotations

import importlib.util
import io
import re
import unicodedata
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text as RichText

from lmeval_dispersion.report.cells import (
    AXIS,
    Axis,
    axis_of,
    cell,
    first_of_texts,
    is_numeric,
    more_of,
    shown,
    visible_lines,
    visible_rows,
    whisker,
)
from lmeval_dispersion.report.document import (
    Chart,
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

# A line under the head, and between rows where a section ends.
_RULED = box.Box("    \n    \n ── \n    \n ── \n    \n    \n    \n")
_PROSE = 100  # longer lines are hard to read
_FOLDED = 20  # width to which a text column may be folded before a column is left out
_SLIVER = 10  # and if no column can be left out
_SPELLED = {
    **dict.fromkeys("−–—·─", "-"),
    **{"±": "+/-", "≈": "~", "…": "...", "τ": "tau", "Δ": "delta", "×": "x", "→": "->"},
    **{"≤": "<=", "≥": ">=", "¶": "/", "’": "'", "●": "o", "│": "|", "◂": "<", "▸": ">", "▶": ">"},
}
# Signs in a text that would move a terminal's cursor, colour it or break a line.
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_GLUE = "\ue000"  # a space at which no line breaks
_GLUED = re.compile(r"(?<=\d) (?=%|±)|(?<=±) (?=\d)")
MORE = "More: --details, or -o page.html"


def terminal_text(
    document: Document, *, width: int, colour: bool, encoding: str = "utf-8", details: bool = False
) -> str:
    """Return the report as lines of at most ``width`` characters.

    Charts and the command are left out, and so are the details and limits of a short report unless
    ``details`` is True. In a table that is too wide, columns take their short headings and are then
    left out in the order of ``Column.drop``. Numbers are never cut; if they do not fit, lines are
    longer. A column's hint is printed once, below the first table that has it.

    Args:
        document: The report.
        width: Number of columns of the terminal.
        colour: Whether to use escape sequences.
        encoding: The terminal's encoding; characters that it lacks are spelled out before tables
            are laid out.
        details: Whether to show the details and limits of a short report too.
    """
    return _Writer(width, colour, encoding, details).text(document)


def spelled(text: str, encoding: str) -> str:
    """Return ``text`` with the characters that an encoding lacks replaced.

    ``±`` becomes ``+/-`` and ``é`` becomes ``e``; a character without such a spelling becomes
    ``?``.
    """
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return "".join(_sign(sign, encoding) for sign in text)
    return text


def _sign(sign: str, encoding: str) -> str:
    for form in (sign, _SPELLED.get(sign, ""), unicodedata.normalize("NFKD", sign)[0]):
        try:
            form.encode(encoding)
        except UnicodeEncodeError:
            continue
        if form:
            return form
    return "?"


class _Writer:
    def __init__(self, width: int, colour: bool, encoding: str, details: bool) -> None:
        self._details = details
        self._buffer = io.StringIO()
        self._width = width
        self._encoding = encoding
        self._hints_shown: set[str] = set()
        self._console = Console(
            file=self._buffer,
            force_terminal=colour,
            no_color=not colour,
            width=width,
            highlight=False,
            legacy_windows=False,
        )

    def text(self, document: Document) -> str:
        first, *others = document.answer or [document.title]
        self._prose(first, "bold")
        for sentence in others:
            self._prose(sentence)
        whole = self._details or not document.short
        if document.answer and whole:
            self._prose(document.title, "dim")
        has_more = bool(document.limits)
        for section in document.sections:
            has_more = has_more or section.details
            if whole or not section.details:
                self._section(section)
        if document.limits and whole:
            self._console.print()
            for limit in document.limits:
                self._prose(limit, "dim")
        if has_more and not whole:
            has_pages = importlib.util.find_spec("vl_convert") is not None
            needs = "" if has_pages else " (needs lmeval-dispersion[html])"
            self._prose(f"{MORE}{needs}.", "dim")
        lines = self._buffer.getvalue().replace(_GLUE, " ").splitlines()
        return spelled("".join(f"{line.rstrip()}\n" for line in lines), self._encoding)

    def _section(self, section: Section) -> None:
        if all(isinstance(part, Chart) for part in section.parts):
            return
        if section.heading:
            self._console.print()
            self._prose(section.heading, "bold underline")
        self._headed = bool(section.heading)
        for part in section.parts:
            if self._details or not (section.details and isinstance(part, Table)):
                self._part(part)
                self._headed &= isinstance(part, Chart)

    def _part(self, part: Part) -> None:
        if isinstance(part, Text):
            self._prose(part.text)
        elif isinstance(part, Note):
            label = RichText(f"{part.kind} ", style="yellow")
            text = label.append(self._fit(part.text), style="not yellow")
            self._console.print(self._wrapped(text))
        elif isinstance(part, Facts):
            for name, value in part.facts.items():
                self._prose(f"{name}: {shown(value)}")
        elif isinstance(part, Table):
            self._table(part)

    def _table(self, table: Table) -> None:
        if table.brief and not self._details:
            table = table.brief
        columns, short, folded = self._columns(table)
        natural = [self._least(table, column, short, self._width) for column in columns]
        axes = self._axes(table, columns, self._width - _together(natural))
        grid = RichTable(
            title=RichText(self._fit(table.caption), style="bold"),
            title_justify="left",
            box=_RULED,
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        widths = []
        for column in columns:
            numeric = is_numeric(table, column)
            least = self._least(table, column, short, folded)
            widths.append(least)
            grid.add_column(
                RichText(self._heading(column, short)),
                justify="right" if numeric else "left",
                no_wrap=numeric,
                overflow="fold",
                min_width=least,
            )
            axis = axes.get(column.key)
            if axis is not None:
                widths.append(axis.width)
                grid.add_column(RichText(self._fit(axis.heading)), no_wrap=True)
        cuts = []
        for cut, row in visible_lines(table):
            if cut:
                cuts.append(self._fit(cut))
                grid.add_section()
            texts = ["…"] if row is None else _cells(row, columns, axes)
            grid.add_row(*(RichText(self._fit(text)) for text in texts))
        if table.caption or not self._headed:
            self._console.print()
        # If even the permanent columns do not fit, lines are too long rather than digits cut.
        width = max(self._width, _together(widths))
        with self._console.capture() as drawn:
            self._console.print(grid, width=width, crop=False, no_wrap=True)
        self._buffer.write(_with_words(drawn.get(), cuts))
        if not table.rows:
            self._prose("none")
        more = more_of(table)
        if more:
            self._prose(more, "dim")
        for line in self._hints(columns, short, axes):
            self._prose(line, "dim")

    def _hints(self, columns: Sequence[Column], short: bool, axes: Mapping[str, Axis]) -> list[str]:
        """The lines below a table that explain its columns, without what an earlier table said."""
        hints = []
        whiskers = []
        for column in columns:
            if column.hint:
                hints.append(f"{self._heading(column, short)}: {column.hint}")
            if column.whisker and column.key in axes:
                whiskers.append(f"─ {column.whisker}")
        lines: list[str] = []
        for text in [*hints, *whiskers]:
            if text in self._hints_shown:
                continue
            self._hints_shown.add(text)
            if lines and text in whiskers and len(lines[-1]) + 3 + len(text) <= self._width:
                lines[-1] += f"   {text}"
            else:
                lines.append(text)
        return lines

    def _axes(self, table: Table, columns: Sequence[Column], room: int) -> dict[str, Axis]:
        """An axis for each column that is drawn as dots, if there is room."""
        dotted = [column for column in columns if column.dots not in ("", "page")]
        axes: dict[str, Axis] = {}
        for column in dotted:
            width = min(AXIS[1], room // len(dotted) - 2)
            axis = axis_of(visible_rows(table), column, width)
            if axis is not None:
                axes[column.key] = axis
        return axes

    def _columns(self, table: Table) -> tuple[Sequence[Column], bool, int]:
        """The columns that fit, whether under short headings, and how far texts may be folded."""
        columns = list(table.columns)
        while True:
            # Columns with `drop` 9 also make room for an axis.
            has_dots = any(column.dots for column in columns)
            has_nines = any(column.drop == 9 for column in columns)
            room = self._width
            if has_dots and has_nines:
                room -= AXIS[0] + 4
            for short in (False, True):
                widths = [self._least(table, column, short, _FOLDED) for column in columns]
                if _together(widths) <= room:
                    return columns, short, _FOLDED
            last = max(reversed(columns), key=lambda column: column.drop)
            if last.drop == 0:
                return columns, True, _SLIVER
            columns.remove(last)

    def _least(self, table: Table, column: Column, short: bool, folded: int) -> int:
        """Least width of a column: numbers are kept whole, texts may be folded."""
        texts = [self._fit(cell(row, column)) for row in visible_rows(table)]
        natural = max(map(len, [self._heading(column, short), *texts]))
        if is_numeric(table, column):
            return natural
        if folded == _FOLDED and column is first_of_texts(table):
            # Leave out columns before breaking a name.
            longest = max(map(len, " ".join(texts).split()), default=0)
            folded = max(folded, min(longest, self._width // 2))
        return min(natural, folded)

    def _heading(self, column: Column, short: bool) -> str:
        heading = column.heading
        if short and column.short:
            heading = column.short
        return self._fit(heading)

    def _prose(self, text: str, style: str = "") -> None:
        text = _GLUED.sub(_GLUE, self._fit(text.replace("`", "")))
        self._console.print(self._wrapped(RichText(text, style=style)))

    def _wrapped(self, text: RichText) -> Padding:
        return Padding(text, (0, max(0, self._width - _PROSE), 0, 0))

    def _fit(self, text: str) -> str:
        return spelled(_CONTROL.sub(" ", text), self._encoding)


def _with_words(text: str, words: Sequence[str]) -> str:
    """A drawn table, its lines between rows (all but the first, which is the head's) with their words."""
    lines = text.splitlines(keepends=True)
    rules = []
    for place, line in enumerate(lines):
        if line.strip() and not line.strip("─ \n"):
            rules.append(place)
    for place, cut in zip(rules[1:], words, strict=True):
        width = len(lines[place].rstrip())
        lines[place] = f"── {cut} ".ljust(width, "─") + "\n"
    return "".join(lines)


def _cells(row: Row, columns: Sequence[Column], axes: Mapping[str, Axis]) -> list[str]:
    """The texts of a row, each drawn column followed by its dots."""
    texts = []
    for column in columns:
        texts.append(cell(row, column))
        axis = axes.get(column.key)
        if axis is not None:
            drawn = whisker(row, column)
            texts.append("" if drawn is None else axis.drawn(*drawn))
    return texts


def _together(widths: Sequence[int]) -> int:
    """How wide columns are side by side, two spaces apart."""
    return sum(widths) + 2 * (len(widths) - 1)
