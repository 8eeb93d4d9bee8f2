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
    """A cell's text: the value, with ``± error`` where both are numbers."""
    value = row.get(column.key)
    text = shown(value, column.format)
    error = row.get(column.error) if column.error else None
    if number(value) is not None and number(error) is not None:
        text += f" ± {shown(error, column.format.lstrip('+'))}"
    return text


def shown(value: Any, spec: str = "") -> str:
    """A value as text: empty for None, ``undefined`` for NaN, ``yes`` and ``no``, items with commas.

    Args:
        value: Any value; numpy's and pandas' scalars count as Python's.
        spec: As ``Column.format``.
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
    text = format(value, spec or ("" if isinstance(value, int) else ".4g"))
    is_zero = not text.strip("-0.%")  # without a minus sign
    return text.replace("-", "+" if "+" in spec else "") if is_zero else text


def plain(value: Any) -> Any:
    """A Python value for a scalar of numpy or pandas; None for pandas' missing values."""
    value = value.item() if hasattr(value, "item") else value
    return None if type(value).__name__ in ("NAType", "NaTType") else value


def number(value: Any) -> int | float | None:
    """``value`` if it is a finite number, else None."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def text_rows(table: Table) -> tuple[list[Row | None], str]:
    """The rows that terminal and Markdown show, None at gaps, and a sentence with their number."""
    if not table.excerpt:
        return list(table.rows), table.more
    rows: list[Row | None] = []
    before = -1
    for place in table.excerpt:
        rows += [*([None] if place > before + 1 else []), table.rows[place]]
        before = place
    count = f"{len(table.excerpt)} of {len(table.rows)} rows; all of them: --format csv, or -o page.html."
    return rows, f"{count} {table.more}".strip()


def text_cuts(table: Table) -> dict[int, str]:
    """The lines between those rows that `text_rows` gives, by the position of the row below among them."""
    if not table.excerpt:
        return dict(table.cuts)
    cuts: dict[int, str] = {}
    shown_rows = 0
    before = -1
    for place in table.excerpt:
        shown_rows += place > before + 1
        if place in table.cuts:
            cuts[shown_rows] = table.cuts[place]
        shown_rows += 1
        before = place
    return cuts


def short_names(names: Sequence[str]) -> list[str]:
    """Short names for charts: the last parts of paths and repositories, as few as differ.

    >>> short_names(["org/a-7b", "ours/b-7b"]), short_names(["x/run/last", "y/run/last", "y/top"])
    (['a-7b', 'b-7b'], ['x/run/last', 'y/run/last', 'y/top'])
    """
    most = max((name.rstrip("/").count("/") + 1 for name in names), default=0)
    for count in range(1, most + 1):
        short = ["/".join(name.rstrip("/").rsplit("/", count)[-count:]) for name in names]
        if len(set(short)) == len(set(names)):
            return short
    return list(names)


def guarded(text: str) -> str:
    """A text for CSV: with an apostrophe before what a spreadsheet would run as a formula.

    >>> [guarded(text) for text in ("=1+1", "'=1+1", "org/a", "")]
    ["'=1+1", "''=1+1", 'org/a', '']
    """
    return f"'{text}" if _FORMULA.match(text) else text


def unguarded(text: str) -> str:
    """The text that `guarded` made ``text`` from; any other is unchanged.

    >>> [unguarded(text) for text in ("'=1+1", "'quoted'", "-3")]
    ['=1+1', "'quoted'", '-3']
    """
    return text[1:] if text.startswith("'") and _FORMULA.match(text[1:]) else text


def is_numeric(table: Table, column: Column) -> bool:
    """Whether a column holds only numbers, so that it is aligned right."""
    values = [plain(row.get(column.key)) for row in table.rows]
    return any(number(value) is not None for value in values) and all(
        value is None or isinstance(value, (int, float)) for value in values
    )


def _size(count: float) -> str:
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{count:.0f} B" if unit == "B" else f"{value:.3g} {unit}"


def json_value(value: Any) -> Any:
    """A value as JSON: public fields of dataclasses, tuples and sets as lists, null for NaN, infinity."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {name: item for name, item in fields_of(value).items() if not name.startswith("_")}
    value = plain(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [json_value(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


@dataclass(frozen=True)
class Axis:
    """A line of characters on which values are drawn as dots.

    Attributes:
        low: The value at its first character.
        high: The value at its last character.
        width: Number of characters.
        heading: Its ends, for the column's heading; empty where they have no room.
    """

    low: float
    high: float
    width: int
    heading: str

    def drawn(self, value: float, below: float, above: float) -> str:
        """The axis with a dot at ``value``, whiskers, and a bar at zero where the axis has it.

        A value beyond the axis is an arrow at its edge.

        >>> Axis(-1, 1, 9, "").drawn(0.5, 0.3, 0.3), Axis(-1, 1, 9, "").drawn(2, 0.3, 0.3)
        ('    │─●─ ', '    │   ▸')
        """
        signs = [" "] * self.width
        if self.low <= 0 <= self.high:
            signs[self._place(0)] = "│"
        if not self.low <= value <= self.high:
            signs[0 if value < self.low else -1] = "◂" if value < self.low else "▸"
            return "".join(signs)
        for place in range(self._place(value - below), self._place(value + above) + 1):
            signs[place] = "─"
        signs[self._place(value)] = "●"
        return "".join(signs)

    def share(self, value: float) -> float:
        """A value's place from 0 at the low end to 1 at the high end, clipped to these."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def _place(self, value: float) -> int:
        return round(self.share(value) * (self.width - 1))


def axis_of(rows: Sequence[Row], column: Column, width: int) -> Axis | None:
    """The axis for all dots and whiskers of a column; None without room or spread.

    Rows marked ``aside`` do not stretch it, those marked ``undrawn`` are not on it. It
    includes 0 for differences, whose format has a sign.
    """
    spans = [whisker(row, column) for row in rows if not row.get("aside")]
    ends = [
        end for span in spans if span is not None for end in (span[0] - span[1], span[0] + span[2])
    ]
    if ends and column.format.startswith("+"):
        ends.append(0.0)
    if width < AXIS[0] or not ends or max(ends) == min(ends):
        return None
    low, high = min(ends), max(ends)
    for spec in (column.format, "+.2g" if column.format.startswith("+") else ".2g"):
        left, right = (shown(end, spec) if end else "0" for end in (low, high))
        if (space := width - len(left) - len(right)) > 0:
            return Axis(low, high, width, f"{left}{' ' * space}{right}")
    return Axis(low, high, width, "")


def whisker(row: Row, column: Column) -> tuple[float, float, float] | None:
    """A row's value and its whisker's lengths below and above; None without a number, or ``undrawn``."""
    value = number(row.get(column.key))
    if value is None or row.get("undrawn"):
        return None
    if " " in column.reach:
        ends = (number(row.get(key)) for key in column.reach.split())
        below, above = (abs(value - (value if end is None else end)) for end in ends)
        return float(value), below, above
    reach = abs(number(row.get(column.reach or column.error)) or 0.0)
    return float(value), reach, 0.0 if column.dots == "below" else reach
