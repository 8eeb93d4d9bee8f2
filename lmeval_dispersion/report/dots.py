"""Values of a column as dots on one axis, with whiskers: the same ends on terminals and pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmeval_dispersion.report.cells import number, shown
from lmeval_dispersion.report.document import Column, Row

AXIS = (12, 32)  # characters of an axis on a terminal, at least and at most


@dataclass(frozen=True)
class Axis:
    """One line of characters on which values are drawn as dots.

    Attributes:
        low: The value of its first character.
        high: The value of its last one.
        width: Its characters.
        heading: Its ends, as the column's head shows them; empty where they have no room.
    """

    low: float
    high: float
    width: int
    heading: str

    def drawn(self, value: float, below: float, above: float) -> str:
        """A dot at a value, a whisker to each side, and a bar at zero where the axis has it.

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
        """The place of a value, from 0 at the low end to 1; values beyond an end are at it."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def _place(self, value: float) -> int:
        return round(self.share(value) * (self.width - 1))


def axis_of(rows: Sequence[Row], column: Column, width: int) -> Axis | None:
    """The axis for all dots and whiskers of a column; None without room or spread.

    Rows marked ``aside`` do not stretch it. It includes 0 for differences, whose format has a sign.
    """
    spans = [whisker(row, column) for row in rows if not row.get("aside")]
    ends = [end for span in spans if span is not None for end in (span[0] - span[1], span[0] + span[2])]
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
    """A value and its whisker's length below and above; None without a number."""
    value = number(row.get(column.key))
    if value is None:
        return None
    if " " in column.reach:
        ends = (number(row.get(key)) for key in column.reach.split())
        below, above = (abs(value - (value if end is None else end)) for end in ends)
        return float(value), below, above
    reach = abs(number(row.get(column.reach or column.error)) or 0.0)
    return float(value), reach, 0.0 if column.dots == "below" else reach
