"""Numbers with intervals, claims about them, and parts of charts, for all reports on runs.

A claim is made only where the interval over all documents excludes no effect. The same number inside
subjects (or tasks) qualifies it: the effect holds there too, is reversed, or lies between the subjects. Where
none of these is clear nothing is claimed: subjects that differ by chance would give the same numbers.
`benchmarks/audit_conclusions.py` counts how often each sentence is wrong on noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

from lmeval_dispersion.report import Report
from lmeval_dispersion.report.cells import json_value, shown
from lmeval_dispersion.report.vega import DASHED, Spec, mark, numeric, span, values_of
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
    low, high = (shown(end, spec.lstrip("+")) for end in (interval.low, interval.high))
    return (
        f"{value}, no interval" if math.isnan(interval.low) else f"{value}, {level}{low} to {high}"
    )


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
    side, numbers = figure.side(nothing), f"{name}{interval_text(figure, spec)}"
    if inside is None:
        return f"{claim.holds if side else claim.nothing} ({numbers})."
    there, within = inside.side(nothing), interval_text(inside, spec, "")
    both = f"({numbers}; inside {parts} {within})"
    if not side:
        return f"{claim.nothing} {both}."
    if there:
        ends = f"inside {parts} too" if there == side else f"but the reverse inside {parts}"
        return f"{claim.holds} ({numbers}), {ends} ({within})."
    # Inside the parts: clearly different from the overall value, or undecided.
    if inside.side(figure.value):
        return f"{claim.between} {both}: the difference lies between {parts}."
    return f"{claim.unclear} {both}."


def without_nan(row: T) -> T:
    """A copy of a dataclass row with None, an empty cell, in place of NaN."""
    values = {field.name: getattr(row, field.name) for field in fields(row)}  # type: ignore[arg-type]
    nans = {
        name: None
        for name, value in values.items()
        if isinstance(value, float) and math.isnan(value)
    }
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
    names = values_of(rows, "series")
    scale = {"domain": names, "range": [f"var(--series-{i + 1})" for i in range(len(names))]}
    colour = {"field": "series", "type": "nominal", "title": None, "scale": scale}
    if len(names) == 1:
        colour["legend"] = None
    dash = {**colour, "scale": {"domain": names}}
    tooltip = [{"field": "series", "type": "nominal"}, *({"field": a["field"]} for a in (x, y))]
    point = {"type": "line", "point": {"size": 45, "filled": True}}
    line = mark(point, x=x, y=y, color=colour, strokeDash=dash, tooltip=tooltip)
    bar = mark("rule", x=x, **span("y", {**y, "field": "low"}, "high"), color=colour)
    return {
        "data": {"values": list(rows)},
        "height": HEIGHT,
        "layer": [*([bar] if bars else []), line],
    }


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
