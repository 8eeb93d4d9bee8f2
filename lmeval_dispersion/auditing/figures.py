"""Shared by reports on runs: numbers with intervals, claims about them, and parts of charts.

A claim is made only where the interval over all documents leaves out "nothing is there". The same number
inside subjects (or tasks) follows: the claim holds there too, is reversed, or lies between the subjects; if
neither is clear nothing is claimed, since subjects that happen to differ look alike.
`benchmarks/audit_conclusions.py` counts how often each sentence is wrong on noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

from lmeval_dispersion.report import Report
from lmeval_dispersion.report.cells import json_value, shown
from lmeval_dispersion.statistics import Interval

T = TypeVar("T")

HEIGHT = 320  # of a chart
SHOWN = 16  # rows up to which a short table shows all
ENDS = 5  # slices of each end that a short table shows


class RunReport(Report):
    """A report on runs."""

    libraries: ClassVar[Sequence[str]] = ("numpy", "pandas", "scikit-learn")
    guide = "docs/reference/audit.md"


def interval_text(interval: Interval, spec: str, level: str = "95 % ") -> str:
    """A number and its interval in words; a sentence gives the level once."""
    value = shown(interval.value, spec)
    low, high = (shown(end, spec.lstrip("+")) for end in (interval.low, interval.high))
    return f"{value}, no interval" if math.isnan(interval.low) else f"{value}, {level}{low} to {high}"


class Claim(NamedTuple):
    """The words for a number over all documents: no effect; an effect; only between parts; not clear."""

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
    """The sentence that a number supports, with the same number inside ``parts``.

    ``nothing`` is its value without an effect, ``spec`` and ``name`` its format and name.
    """
    side, numbers = figure.side(nothing), f"{name}{interval_text(figure, spec)}"
    if inside is None:
        return f"{claim.holds if side else claim.nothing} ({numbers})."
    there, beside = inside.side(nothing), interval_text(inside, spec, "")
    both = f"({numbers}; inside {parts} {beside})"
    if not side:
        return f"{claim.nothing} {both}."
    if there:
        ends = f"inside {parts} too" if there == side else f"but the reverse inside {parts}"
        return f"{claim.holds} ({numbers}), {ends} ({beside})."
    # Inside the parts it differs clearly from the number over all, or from neither that nor no effect.
    if inside.side(figure.value):
        return f"{claim.between} {both}: the difference lies between {parts}."
    return f"{claim.unclear} {both}."


def without_nan(row: T) -> T:
    """A dataclass row for a table: None, an empty cell, in place of NaN."""
    values = {field.name: getattr(row, field.name) for field in fields(row)}  # type: ignore[arg-type]
    nans = {name: None for name, value in values.items() if isinstance(value, float) and math.isnan(value)}
    return replace(row, **nans)  # type: ignore[type-var]


def shortened(text: object, length: int) -> str:
    """A text in one line of at most ``length`` characters."""
    line = " ".join(text.split()) if isinstance(text, str) else ""
    return line if len(line) <= length else f"{line[: length - 1]}…"


def both_ends(rows: int) -> list[int]:
    """Rows that a short table shows: the first, and :data:`ENDS` at each end of the others.

    Empty up to :data:`SHOWN` rows: all are shown.
    """
    return [*range(ENDS + 1), *range(rows - ENDS, rows)] if rows > SHOWN else []


def axis(field: str, title: str | None = None, **more: Any) -> dict[str, Any]:
    """A quantitative channel that need not include zero."""
    return {"field": field, "type": "quantitative", "title": title, "scale": {"zero": False}, **more}


def dots(
    rows: Sequence[Any],
    named: str,
    value: str,
    bounds: tuple[str, str],
    title: str,
    *more: Mapping[str, Any],
    line: float,
    dot: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Rows of a dataclass: a dot at ``value``, a bar between ``bounds``, and a dashed upright ``line``.

    ``more`` are further layers, ``dot`` changes the dot's.
    """
    y = {"field": named, "type": "nominal", "title": None, "sort": None, "axis": {"labelOverlap": False}}
    dashed = {"type": "rule", "strokeDash": [4, 4], "color": "var(--muted)"}
    bar = {"x": axis(bounds[0], title), "x2": {"field": bounds[1]}}
    point = {"mark": {"type": "point", "filled": True}, "encoding": {}, **(dot or {})}
    return {
        "data": {"values": json_value(rows)},
        "height": 18 * len(rows) + 20,
        "encoding": {"y": y},
        "layer": [
            {"data": {"values": [{"x": line}]}, "mark": dashed, "encoding": {"x": axis("x"), "y": None}},
            {"mark": "rule", "encoding": bar},
            *more,
            {**point, "encoding": {"x": axis(value), **point["encoding"]}},
        ],
    }


def lines(
    rows: Sequence[Mapping[str, Any]], x: dict[str, Any], y: dict[str, Any], *, bars: bool = False
) -> dict[str, Any]:
    """One line a series, in its own colour and dash, with bars from ``low`` to ``high`` if asked."""
    names = list(dict.fromkeys(row["series"] for row in rows))
    scale = {"domain": names, "range": [f"var(--series-{i + 1})" for i in range(len(names))]}
    colour = {"field": "series", "type": "nominal", "title": None, "scale": scale}
    if len(names) == 1:
        colour["legend"] = None
    dash = {**colour, "scale": {"domain": names}}
    tooltip = [{"field": "series", "type": "nominal"}, *({"field": a["field"]} for a in (x, y))]
    line = {
        "mark": {"type": "line", "point": {"size": 45, "filled": True}},
        "encoding": {"x": x, "y": y, "color": colour, "strokeDash": dash, "tooltip": tooltip},
    }
    bar = {
        "mark": "rule",
        "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": colour},
    }
    return {"data": {"values": list(rows)}, "height": HEIGHT, "layer": [*([bar] if bars else []), line]}


def predicted_against_true(points: Sequence[Any], x: str = "predicted accuracy") -> dict[str, Any]:
    """Points with ``predicted`` and ``true`` accuracies around a dashed diagonal."""
    both = {"type": "quantitative", "scale": {"domain": [0, 1]}, "axis": {"format": "%"}}
    encoding: dict[str, Any] = {
        "x": {"field": "predicted", "title": x, **both},
        "y": {"field": "true", "title": "true accuracy", **both},
    }
    mark = {"type": "point", "size": 45, "opacity": 0.65}
    cloud = {"data": {"values": json_value(points)}, "mark": mark, "encoding": encoding}
    diagonal = {
        "data": {"values": [{"a": 0, "b": 0}, {"a": 1, "b": 1}]},
        "mark": {"type": "line", "color": "var(--muted)", "strokeDash": [4, 4], "strokeWidth": 1.5},
        "encoding": {key: {"field": end, "type": "quantitative"} for key, end in (("x", "a"), ("y", "b"))},
    }
    return {"height": HEIGHT, "layer": [diagonal, cloud]}
