"""Table values as text, as dots on an axis and as JSON, equal in every format; short names."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmeval_dispersion.report.document import Column, Row, Table, fields_of

_FORMULA = re.compile(r"'*[=+\-@\t\r\n]")  # what begins a formula, also behind apostrophes
AXIS = (12, 32)  # characters of an axis on a terminal, at least and at most


def cell(row: Row, column: Column) -> str:
    """Return the text of a cell: the value, with ``± error`` if it has a standard error."""
    value = row.get(column.key)
    error = row.get(column.error)
    text = shown(value, column.format)
    if number(value) is not None and number(error) is not None:
        text += f" ± {shown(error, column.format.lstrip('+'))}"
    return text


def shown(value: Any, spec: str = "") -> str:
    """Return a value as text.

    None becomes "", NaN becomes ``undefined``, and a boolean becomes ``yes`` or ``no``. The items
    of a list are separated by commas.

    Args:
        value: Any value; scalars of numpy and pandas are treated like Python's.
        spec: Format of numbers, as in :attr:`Column.format`.
    """
    value = plain(value)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(shown(item, spec) for item in value)
    if not isinstance(value, (int, float)):
        return str(value)
    if math.isnan(value):
        return "undefined"
    if spec == "bytes":
        return _size(value)
    if spec == "p-value":
        return "< 0.001" if value < 0.001 else f"{value:.3f}"
    if spec.endswith("d"):
        return format(int(value), spec) if math.isfinite(value) else str(value)
    if not spec and isinstance(value, float):
        spec = ".4g"
    text = format(value, spec)
    is_zero = not text.strip("-0.%")
    if is_zero:  # a zero has no minus sign
        return text.replace("-", "+" if "+" in spec else "")
    return text


def plain(value: Any) -> Any:
    """Return a scalar of numpy or pandas as a Python value; None for pandas' missing values."""
    if hasattr(value, "item"):
        value = value.item()
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    return value


def number(value: Any) -> int | float | None:
    """Return ``value`` if it is a finite number and not a boolean, else None."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not math.isfinite(value):
        return None
    return value


def visible_rows(table: Table) -> Sequence[Row]:
    """Return the rows of a table that the terminal and Markdown show."""
    return [row for _, row in visible_lines(table) if row is not None]


def visible_lines(table: Table) -> list[tuple[str, Row | None]]:
    """Return the lines of a table that the terminal and Markdown show, each as a pair.

    The pair has the text of the dividing line above the row ("" without one), and the row. Where
    rows are left out, a pair has None in place of a row.
    """
    lines: list[tuple[str, Row | None]] = []
    before = -1
    for place in table.excerpt or range(len(table.rows)):
        if place > before + 1:
            lines.append(("", None))
        lines.append((table.cuts.get(place, ""), table.rows[place]))
        before = place
    return lines


def more_of(table: Table) -> str:
    """Return the sentence below a table on rows that are left out; "" if there is none."""
    if not table.excerpt:
        return table.more
    count = f"{len(table.excerpt)} of {len(table.rows)} rows"
    text = f"{count}; --format csv or -o page.html has all of them."
    return f"{text} {table.more}".strip()


def short_names(names: Sequence[str]) -> list[str]:
    """Shorten names that are paths, for charts.

    Each keeps the same number of last parts: the smallest number with which the names still differ.

    >>> short_names(["org/a-7b", "ours/b-7b"]), short_names(["x/run/last", "y/run/last", "y/top"])
    (['a-7b', 'b-7b'], ['x/run/last', 'y/run/last', 'y/top'])
    """
    parts = [name.rstrip("/").split("/") for name in names]
    longest = max(map(len, parts), default=0)
    for count in range(1, longest + 1):
        short = ["/".join(words[-count:]) for words in parts]
        if len(set(short)) == len(set(names)):
            return short
    return list(names)


def guarded(text: str) -> str:
    """Return a text for CSV, with an apostrophe before what a spreadsheet would run as a formula.

    A formula that has an apostrophe already gets another one, so that `unguarded` can undo this.

    >>> [guarded(text) for text in ("=1+1", "'=1+1", "org/a", "")]
    ["'=1+1", "''=1+1", 'org/a', '']
    """
    return f"'{text}" if _FORMULA.match(text) else text


def unguarded(text: str) -> str:
    """Return ``text`` without the apostrophe that `guarded` put before it, if there is one.

    >>> [unguarded(text) for text in ("'=1+1", "'quoted'", "-3")]
    ['=1+1', "'quoted'", '-3']
    """
    if text.startswith("'") and _FORMULA.match(text[1:]):
        return text[1:]
    return text


def is_numeric(table: Table, column: Column) -> bool:
    """Whether a column holds a finite number and, apart from empty cells, nothing but numbers."""
    has_number = False
    for row in table.rows:
        value = plain(row.get(column.key))
        if not isinstance(value, int | float | None):
            return False
        has_number = has_number or number(value) is not None
    return has_number


def _size(count: float) -> str:
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB"):
        count /= 1000
        if count < 1000:
            return f"{count:.3g} {unit}"
    return f"{count / 1000:.3g} GB"


def first_of_texts(table: Table) -> Column | None:
    """Return the first column that holds texts; None if all columns are numeric."""
    for column in table.columns:
        if not is_numeric(table, column):
            return column
    return None


def public_fields(value: Any) -> dict[str, Any]:
    """Return a dataclass as a mapping from field to value, without names that begin with "_"."""
    return {name: item for name, item in fields_of(value).items() if not name.startswith("_")}


def json_value(value: Any) -> Any:
    """Convert a value to one that JSON can hold.

    Dataclasses become mappings of their public fields, and tuples and sets become lists. NaN,
    infinity and missing values of pandas become None; other objects become text.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = public_fields(value)
    value = plain(value)
    if isinstance(value, float):
        return number(value)
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [json_value(item) for item in value]
    if isinstance(value, int | str | None):
        return value
    return str(value)


@dataclass(frozen=True)
class Axis:
    """A line of characters on which values are drawn as dots.

    Attributes:
        low: Value at the first character.
        high: Value at the last character.
        width: Number of characters.
        heading: Text with both ends, for the column's heading; empty if there is no room for them.
    """

    low: float
    high: float
    width: int
    heading: str

    def drawn(self, value: float, below: float, above: float) -> str:
        """Return the axis as text, with a dot at ``value``, whiskers, and a bar at 0.

        ``below`` and ``above`` are the lengths of the whiskers. The bar is drawn only if 0 is on
        the axis. A value beyond an end of the axis is drawn as an arrow at that end.

        >>> Axis(-1, 1, 9, "").drawn(0.5, 0.3, 0.3), Axis(-1, 1, 9, "").drawn(2, 0.3, 0.3)
        ('    │─●─ ', '    │   ▸')
        """
        signs = [" "] * self.width
        if self.low <= 0 <= self.high:
            signs[self._place(0)] = "│"
        if not self.low <= value <= self.high:
            if value < self.low:
                signs[0] = "◂"
            else:
                signs[-1] = "▸"
            return "".join(signs)
        for place in range(self._place(value - below), self._place(value + above) + 1):
            signs[place] = "─"
        signs[self._place(value)] = "●"
        return "".join(signs)

    def share(self, value: float) -> float:
        """Return where a value lies on the axis: 0 at the low end, 1 at the high end.

        Values beyond an end are clipped to it.
        """
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def _place(self, value: float) -> int:
        return round(self.share(value) * (self.width - 1))


def axis_of(rows: Sequence[Row], column: Column, width: int) -> Axis | None:
    """Return the axis for the dots and whiskers of a column.

    It is None if ``width`` is below 12 characters, if no row has a value to draw, or if the axis
    would have no length because all values are equal and have no whiskers. Rows with a true value
    under the key ``aside`` do not stretch the axis, and rows with one under ``undrawn`` are not on
    it. If the column's format has a sign, as for differences, the axis includes 0.
    """
    ends: list[float] = []
    for row in rows:
        if row.get("aside"):
            continue
        drawn = whisker(row, column)
        if drawn is not None:
            value, below, above = drawn
            ends += [value - below, value + above]
    is_signed = column.format.startswith("+")
    if ends and is_signed:
        ends.append(0.0)
    if width < AXIS[0] or not ends or max(ends) == min(ends):
        return None
    low = min(ends)
    high = max(ends)
    short = "+.2g" if is_signed else ".2g"
    for spec in (column.format, short):
        left = shown(low, spec) if low else "0"
        right = shown(high, spec) if high else "0"
        space = width - len(left) - len(right)
        if space > 0:
            heading = left + " " * space + right
            return Axis(low, high, width, heading)
    return Axis(low, high, width, "")


def whisker(row: Row, column: Column) -> tuple[float, float, float] | None:
    """Return a row's value and the lengths of its whisker below and above.

    None if the value is not a finite number, or if the row has a true value under ``undrawn``.
    """
    value = number(row.get(column.key))
    if value is None or row.get("undrawn"):
        return None
    low_key, _, high_key = column.reach.partition(" ")
    if high_key:
        low = number(row.get(low_key))
        high = number(row.get(high_key))
        below = 0.0 if low is None else abs(value - low)
        above = 0.0 if high is None else abs(value - high)
        return float(value), below, above
    length = abs(number(row.get(column.reach or column.error)) or 0.0)
    above = length
    if column.dots == "below":
        above = 0.0
    return float(value), length, above
