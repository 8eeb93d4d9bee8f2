"""Numbers with intervals, claims about them, and parts of charts, for all reports on runs.

A claim is made only where the interval over all documents excludes no effect. The same number inside
subjects (or tasks) qualifies it: the effect holds there too, is reversed, or lies between the subjects. Where
none of these is clear nothing is claimed: subjects that differ by chance would give the same numbers.
`benchmarks/audit_conclusions.py` counts how often each sentence is wrong on noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, TypeVar

from lmeval_dispersion.report import Report
from lmeval_dispersion.report.cells import json_value, shown
from lmeval_dispersion.report.document import fields_of
from lmeval_dispersion.report.vega import DASHED, Spec, colour, mark, numeric, span, tooltip
from lmeval_dispersion.statistics import Interval

T = TypeVar("T")

HEIGHT = 320  # pixels of a chart
SHOWN = 16  # rows up to which a short table shows all
ENDS = 5  # slices that a short table shows at each end


class RunReport(Report):
    """A report on one or several finished runs."""

    libraries: ClassVar[Sequence[str]] = ("numpy", "pandas", "scikit-learn")
    guide = "docs/reference/audit.md"


def interval_text(interval: Interval, spec: str, level: str = "95 % ") -> str:
    """``VALUE, 95 % LOW to HIGH``, or ``VALUE, no interval``; ``level`` replaces ``95 %``."""
    value = shown(interval.value, spec)
    if math.isnan(interval.low):
        return f"{value}, no interval"
    unsigned = spec.lstrip("+")
    return f"{value}, {level}{shown(interval.low, unsigned)} to {shown(interval.high, unsigned)}"


class Claim(NamedTuple):
    """Four wordings for a number over all documents: no effect, an effect, only between parts, unclear."""

    nothing: str
    holds: str
    between: str
    unclear: str


def claim_sentence(
    claim: Claim,
    figure: Interval,
    parts: str,
    inside: Interval | None,
    *,
    nothing: float,
    spec: str,
    name: str = "",
) -> str:
    """The sentence that fits a number over all documents and the same number inside ``parts``.

    ``nothing`` is its value without an effect, ``spec`` and ``name`` its format and name; ``inside`` may be
    None, if not known.
    """
    side = figure.side(nothing)
    numbers = f"{name}{interval_text(figure, spec)}"
    if inside is None:
        return f"{claim.holds if side else claim.nothing} ({numbers})."
    side_inside = inside.side(nothing)
    numbers_inside = interval_text(inside, spec, "")
    both = f"({numbers}; inside {parts} {numbers_inside})"
    if not side:
        return f"{claim.nothing} {both}."
    if side_inside:
        same = side_inside == side
        end = f"inside {parts} too" if same else f"but the reverse inside {parts}"
        return f"{claim.holds} ({numbers}), {end} ({numbers_inside})."
    # Inside the parts: clearly different from the overall value, or undecided.
    if inside.side(figure.value):
        return f"{claim.between} {both}: the difference lies between {parts}."
    return f"{claim.unclear} {both}."


def without_nan(row: T) -> T:
    """A copy of a dataclass row with None, an empty cell, in place of NaN."""
    nans = dict[str, None]()
    for name, value in fields_of(row).items():
        if isinstance(value, float) and math.isnan(value):
            nans[name] = None
    return replace(row, **nans)  # type: ignore[type-var]


def shortened(text: object, length: int) -> str:
    """``text`` on one line, cut to ``length`` characters; empty for anything but a string."""
    line = " ".join(text.split()) if isinstance(text, str) else ""
    return line if len(line) <= length else f"{line[: length - 1]}…"


def both_ends(rows: int) -> list[int]:
    """Indices of the rows in a short table: the first, and :data:`ENDS` at each end of the others.

    Empty up to :data:`SHOWN` rows: the table shows all.
    """
    return [*range(ENDS + 1), *range(rows - ENDS, rows)] if rows > SHOWN else []


def lines(rows: Sequence[Mapping[str, Any]], x: Spec, y: Spec, *, bars: bool = False) -> Spec:
    """Vega-Lite of a line per ``series``, in its own colour and dash; ``bars`` draws ``low`` to ``high``."""
    series = colour(rows, "series")
    if series:
        series["strokeDash"] = series["color"]
    point = {"type": "line", "point": {"size": 45, "filled": True}}
    hover = tooltip(rows, "series", x["field"], y["field"])
    layer = [mark(point, x=x, y=y, tooltip=hover, **series)]
    if bars:
        layer.insert(0, mark("rule", x=x, **span("y", {**y, "field": "low"}, "high")))
    return {"data": {"values": list(rows)}, "height": HEIGHT, "layer": layer}


def predicted_against_true(points: Sequence[Any], x: str = "predicted accuracy") -> Spec:
    """Vega-Lite of points, ``predicted`` against ``true`` accuracy in [0, 1], around a dashed diagonal."""
    percent = {"format": "%"}
    ends = [{"predicted": end, "true": end} for end in (0, 1)]
    diagonal = {**DASHED, "type": "line", "strokeWidth": 1.5}
    return {
        "height": HEIGHT,
        "encoding": {
            "x": numeric("predicted", x, axis=percent, domain=[0, 1]),
            "y": numeric("true", "true accuracy", axis=percent, domain=[0, 1]),
        },
        "layer": [
            {"data": {"values": ends}, "mark": diagonal},
            {
                "data": {"values": json_value(points)},
                "mark": {"type": "point", "size": 45, "opacity": 0.65},
            },
        ],
    }
