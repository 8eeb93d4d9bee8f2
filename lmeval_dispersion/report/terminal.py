"""A report as text for a terminal, in its width; narrow terminals get fewer columns."""

from __future__ import annotations

import importlib.util
import io
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence

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
    is_numeric,
    shown,
    text_cuts,
    text_rows,
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
_GLUE, _GLUED = "\ue000", re.compile(r"(?<=\d) (?=%|±)|(?<=±) (?=\d)")  # non-breaking spaces
MORE = "More: --details, or -o page.html"


def terminal_text(
    document: Document, *, width: int, colour: bool, encoding: str = "utf-8", details: bool = False
) -> str:
    """The report as lines of at most ``width`` characters, without charts, command and tables of details.

    A table that is too wide takes its columns' short headings, then leaves out columns by ``Column.drop``;
    numbers are never cut, lines are then longer. A hint is printed once, below the first table with it.

    Args:
        document: The report.
        width: Columns of the terminal.
        colour: Whether to use escape sequences.
        encoding: The terminal's; missing characters are spelled out before tables are laid out.
        details: Whether to show details and limits too.
    """
    return _Writer(width, colour, encoding, details).text(document)


def spelled(text: str, encoding: str) -> str:
    """``text`` in an encoding's characters: ``±`` as ``+/-``, ``é`` as ``e``, others as ``?``."""
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
        self._hints_shown: set[tuple[str, str]] = set()
        self._console = Console(
            file=self._buffer,
            force_terminal=colour,
            no_color=not colour,
            width=width,
            highlight=False,
            legacy_windows=False,
        )

    def text(self, document: Document) -> str:
        self._prose(document.title if not document.answer else document.answer[0], "bold")
        for sentence in document.answer[1:]:
            self._prose(sentence)
        whole = self._details or not document.short
        if document.answer and whole:
            self._prose(document.title, "dim")
        for section in document.sections:
            if whole or not section.details:
                self._section(section)
        if document.limits and whole:
            self._break()
            for limit in document.limits:
                self._prose(limit, "dim")
        if not whole and (document.limits or any(section.details for section in document.sections)):
            without = (
                "."
                if importlib.util.find_spec("vl_convert")
                else " (needs lmeval-dispersion[html])."
            )
            self._prose(MORE + without, "dim")
        lines = self._buffer.getvalue().replace(_GLUE, " ").splitlines()
        return spelled("".join(f"{line.rstrip()}\n" for line in lines), self._encoding)

    def _section(self, section: Section) -> None:
        if all(not isinstance(part, (Table, Text, Note, Facts)) for part in section.parts):
            return
        if section.heading:
            self._break()
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
            self._console.print(
                self._wrapped(label.append(self._fit(part.text), style="not yellow"))
            )
        elif isinstance(part, Facts):
            for name, value in part.facts.items():
                self._prose(f"{name}: {shown(value)}")
        elif isinstance(part, Table):
            self._table(part)

    def _table(self, table: Table) -> None:
        if table.brief and not self._details:
            table = table.brief
        columns, short, folded = self._columns(table)
        least = [self._least(table, column, short, folded) for column in columns]
        lines = RichTable(
            title=RichText(self._fit(table.caption), style="bold"),
            title_justify="left",
            box=_RULED,
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        natural = [self._least(table, column, short, self._width) for column in columns]
        axes = self._axes(table, columns, self._width - _together(natural))
        for column, narrowest in zip(columns, least, strict=True):
            numeric = is_numeric(table, column)
            lines.add_column(
                RichText(self._heading(column, short)),
                justify="right" if numeric else "left",
                no_wrap=numeric,
                overflow="fold",
                min_width=narrowest,
            )
            if column.key in axes:
                lines.add_column(RichText(self._fit(axes[column.key].heading)), no_wrap=True)
        rows, more = text_rows(table)
        cuts = text_cuts(table)
        for place, row in enumerate(rows):
            texts = ["…"] if row is None else list(_cells(row, columns, axes))
            lines.add_row(
                *(RichText(self._fit(text)) for text in texts), end_section=place + 1 in cuts
            )
        if table.caption or not self._headed:
            self._break()
        # If even the permanent columns do not fit, lines are too long rather than digits cut.
        least += [axis.width for axis in axes.values()]
        width = max(self._width, _together(least))
        with self._console.capture() as drawn:
            self._console.print(lines, width=width, crop=False, no_wrap=True)
        self._buffer.write(_with_words(drawn.get(), [self._fit(words) for words in cuts.values()]))
        if not table.rows:
            self._prose("none")
        if more:
            self._prose(more, "dim")
        hints = [
            (f"{self._heading(column, short)}: ", column.hint) for column in columns if column.hint
        ]
        hints += [
            ("─ ", column.whisker) for column in columns if column.key in axes and column.whisker
        ]
        new = [hint for hint in dict.fromkeys(hints) if hint not in self._hints_shown]
        self._hints_shown.update(new)
        said = [""]
        for text in map("".join, new):
            joined = f"{said[-1]}   {text}"
            fits = text.startswith("─") and len(said[-1]) > 0 and len(joined) <= self._width
            said[-1:] = [joined] if fits else [said[-1], text]
        for line in said[1:]:
            self._prose(line, "dim")

    def _axes(self, table: Table, columns: Sequence[Column], room: int) -> dict[str, Axis]:
        """An axis for each column that is drawn as dots, if there is room."""
        dotted = [column for column in columns if column.dots not in ("", "page")]
        axes: dict[str, Axis] = {}
        for column in dotted:
            width = min(AXIS[1], room // len(dotted) - 2)
            axis = axis_of([row for row in text_rows(table)[0] if row is not None], column, width)
            if axis is not None:
                axes[column.key] = axis
        return axes

    def _columns(self, table: Table) -> tuple[Sequence[Column], bool, int]:
        """The columns that fit, whether under short headings, and how far texts may be folded."""
        columns = list(table.columns)
        while True:
            # Columns with `drop` 9 also make room for an axis.
            drawn = any(c.dots for c in columns) and any(c.drop == 9 for c in columns)
            room = self._width - (AXIS[0] + 4 if drawn else 0)
            for short in (False, True):
                if _together([self._least(table, c, short, _FOLDED) for c in columns]) <= room:
                    return columns, short, _FOLDED
            last = max(reversed(columns), key=lambda column: column.drop)
            if last.drop == 0:
                return columns, True, _SLIVER
            columns.remove(last)

    def _least(self, table: Table, column: Column, short: bool, folded: int) -> int:
        """Least width of a column: numbers are kept whole, texts may be folded."""
        texts = [self._fit(cell(row, column)) for row in text_rows(table)[0] if row is not None]
        natural = max(map(len, [self._heading(column, short), *texts]))
        if is_numeric(table, column):
            return natural
        if folded == _FOLDED and column is next(
            c for c in table.columns if not is_numeric(table, c)
        ):
            # Leave out columns before breaking a name.
            folded = max(
                folded, min(max(map(len, " ".join(texts).split()), default=0), self._width // 2)
            )
        return min(natural, folded)

    def _heading(self, column: Column, short: bool) -> str:
        return self._fit((column.short if short else "") or column.heading)

    def _prose(self, text: str, style: str = "") -> None:
        text = _GLUED.sub(_GLUE, self._fit(text.replace("`", "")))
        self._console.print(self._wrapped(RichText(text, style=style)))

    def _wrapped(self, text: RichText) -> Padding:
        return Padding(text, (0, max(0, self._width - _PROSE), 0, 0))

    def _break(self) -> None:
        self._console.print()

    def _fit(self, text: str) -> str:
        return spelled(_CONTROL.sub(" ", text), self._encoding)


def _with_words(text: str, words: Sequence[str]) -> str:
    """A drawn table, its lines between rows (all but the first, which is the head's) with their words."""
    lines = text.splitlines(keepends=True)
    rules = [place for place, line in enumerate(lines) if line.strip() and not line.strip("─ \n")]
    for place, own in zip(rules[1:], words, strict=True):
        rule = lines[place].rstrip()
        lines[place] = f"── {own} ".ljust(len(rule), "─") + "\n"
    return "".join(lines)


def _cells(row: Row, columns: Sequence[Column], axes: Mapping[str, Axis]) -> Iterator[str]:
    """The texts of a row, each drawn column followed by its dots."""
    for column in columns:
        yield cell(row, column)
        if column.key in axes:
            place = whisker(row, column)
            yield "" if place is None else axes[column.key].drawn(*place)


def _together(widths: Sequence[int]) -> int:
    """How wide columns are side by side, two spaces apart."""
    return sum(widths) + 2 * (len(widths) - 1)
