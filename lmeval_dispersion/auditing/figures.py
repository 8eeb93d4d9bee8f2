"""Numbers with intervals, claims about them, and parts of charts, for all reports on runs.

A claim is made only where the interval over all documents excludes the value of no effect. The same
number inside subjects (or tasks) qualifies the claim: the effect holds there too, is reversed, or
lies between the subjects. Where none of these is clear, nothing is claimed: subjects that differ by
chance would give the same numbers. `benchmarks/audit_conclusions.py` counts how often each sentence
is wrong on noise.
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
    """Base class of the reports on one or several finished runs."""

    libraries: ClassVar[Sequence[str]] = ("numpy", "pandas", "scikit-learn")
    guide = "docs/reference/audit.md"


def interval_text(interval: Interval, spec: str, level: str = "95 % ") -> str:
    """Return ``VALUE, 95 % LOW to HIGH``, or ``VALUE, no interval`` if the ends are NaN.

    ``spec`` is the format of the numbers, such as ``+.2f``; ``level`` is the text before LOW.
    """
    value = shown(interval.value, spec)
    if math.isnan(interval.low):
        return f"{value}, no interval"
    unsigned = spec.lstrip("+")
    return f"{value}, {level}{shown(interval.low, unsigned)} to {shown(interval.high, unsigned)}"


class Claim(NamedTuple):
    """The wordings of a claim about an effect over all documents, for each of four findings.

    Attributes:
        nothing: Wording if the effect over all documents is not clear.
        holds: Wording if the effect over all documents is clear, and that inside the parts
            (subjects or tasks) is not known, or is clear too, in the same or in the other
            direction.
        between: Wording if the effect over all documents is clear, and that inside the parts is not
            clear and clearly differs from it: the effect lies between the parts.
        unclear: Wording if the effect over all documents is clear, and that inside the parts is
            undecided.
    """

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
    """Return the sentence that fits a number over all documents and the same number inside parts.

    Args:
        claim: The wordings.
        figure: The number over all documents, with its interval.
        parts: Plural noun for the parts, such as ``subjects``.
        inside: The same number inside the parts; None if it is not known.
        nothing: Value of the number if there is no effect.
        spec: Format of the number, such as ``+.2f``.
        name: Text before the number.
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
    """Return a copy of a dataclass instance with None, a blank cell, in place of NaN."""
    nans = dict[str, None]()
    for name, value in fields_of(row).items():
        if isinstance(value, float) and math.isnan(value):
            nans[name] = None
    return replace(row, **nans)  # type: ignore[type-var]


def both_ends(rows: int) -> list[int]:
    """Return the indices of the rows that a short table shows, out of ``rows`` rows.

    They are the first row, and :data:`ENDS` rows at each end of the rest. The list is empty for up
    to :data:`SHOWN` rows, which are all shown.
    """
    return [*range(ENDS + 1), *range(rows - ENDS, rows)] if rows > SHOWN else []


def lines(rows: Sequence[Mapping[str, Any]], x: Spec, y: Spec, *, bars: bool = False) -> Spec:
    """Return the Vega-Lite specification of a line chart, with a line for each ``series`` of rows.

    Each line has a colour and a dash pattern of its own. ``x`` and ``y`` are the encodings of the
    axes; ``bars`` adds error bars from each row's ``low`` to ``high``.
    """
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
    """Return the Vega-Lite specification of a scatter plot of true against predicted accuracy.

    ``points`` have the fields ``predicted`` and ``true``, in [0, 1]. ``x`` is the title of the
    horizontal axis. A dashed diagonal marks equal values.
    """
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
