"""A screening's charts, as Vega-Lite data; colours are the page's variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmeval_dispersion.report.cells import short_names
from lmeval_dispersion.report.vega import (
    POINT,
    SAYS,
    Spec,
    accuracy_points,
    course,
    mark,
    numeric,
    span,
)
from lmeval_screener.figures import difference
from lmeval_screener.orders import DISTANCES
from lmeval_screener.result.answer import DRAWN, decimals
from lmeval_screener.screened import Group, Screened
from lmeval_screener.targets.runs import step_number

# Controls are known not to have learned the domain, such as two of the demo.
_KINDS = ["checkpoint", "control: trained on wrong answers"]
_PARTS = ["D–D", "D–NM", "G"]
_SERIES = ["var(--series-2)", "var(--series-3)", "var(--series-1)"]


def _drawn(group: Group) -> dict[str, Screened]:
    """The checkpoints of a group that charts show, by a short name: the first 40 with a rank."""
    members = [c for c in group.checkpoints if not c.is_set_aside][:DRAWN]
    return dict(zip(short_names([c.label for c in members]), members, strict=True))


def ranking(group: Group) -> Spec:
    """Return the chart of the figure that ranks a group, with two standard errors on each side.

    The chart shows the first 40 checkpoints, best first, without checkpoints that have no rank
    because they lack the figure.
    """
    values = []
    for name, c in _drawn(group).items():
        figure = c.figure.mean
        error = 2 * c.figure.se
        place = f"rank {c.rank}"
        if c.is_base:
            place = "the base"
        elif not group.has_place(c):
            place = "rows of the base"
        values.append(
            {
                "checkpoint": name,
                group.figure: figure,
                "low": figure - error,
                "high": figure + error,
                "kind": _KINDS[c.target.negative_control],
                "says": (
                    f"{c.label}; {place}; {group.figure} {figure:.3f}, standard error "
                    f"{c.figure.se:.3f}"
                ),
            }
        )
    axis = {"labelLimit": 200, "labelOverlap": False}
    x = numeric(group.figure, _title(group, group.figure))
    return {
        "data": {"values": values},
        "height": max(60, 24 * len(values)),
        "encoding": {"y": {"field": "checkpoint", "sort": None, "title": None, "axis": axis}},
        "layer": [
            mark("rule", **span("x", {**x, "field": "low"}, "high")),
            mark(POINT, x=x, **SAYS, **_marks(values)),
        ],
    }


def _title(group: Group, figure: str) -> str:
    """The title of an axis of a figure."""
    return f"{DISTANCES[group.metric]} gap G" if figure == "G" else figure


def gap_parts(group: Group) -> Spec:
    """Return the chart of G and its two parts as bars, and of supplied accuracies as a line.

    The chart has the form of figure 9 of the paper on representation dispersion (RD), and shows the
    first 40 checkpoints of a group. D–D, or within(T), is the mean distance among domain tokens;
    D–NM, or between(T, R), is the mean distance from domain tokens to everyday words; G is their
    sum.
    """
    members = _drawn(group)
    values = []
    accuracies = []
    for name, c in members.items():
        parts = {"D–D": c.gap.within_domain.mean, "D–NM": c.gap.between.mean, "G": c.gap.mean}
        for part, value in parts.items():
            says = f"{c.label}; {part} {value:.3f}"
            values.append({"checkpoint": name, "part": part, "distance": value, "says": says})
        if c.accuracy is not None:
            accuracies.append({"checkpoint": name, **_accuracy(c, c.label)})
    axis = {"labelAngle": -30, "labelLimit": 160, "labelOverlap": False}
    bars = mark(
        "bar",
        y=numeric("distance", f"mean {DISTANCES[group.metric]} distance", zero=True),
        xOffset={"field": "part", "sort": _PARTS},
        color={
            "field": "part",
            "title": None,
            "sort": _PARTS,
            "scale": {"domain": _PARTS, "range": _SERIES},
        },
        **SAYS,
    )
    layers = [{"data": {"values": values}, **bars}]
    if accuracies:
        layers.append(_accuracy_line(accuracies))
    return {
        "height": 280,
        "encoding": {
            "x": {
                "field": "checkpoint",
                "type": "nominal",
                "sort": list(members),
                "title": None,
                "axis": axis,
            }
        },
        "layer": layers,
        "resolve": {"scale": {"y": "independent"}},
    }


def steps(group: Group, figure: str) -> Spec:
    """Return the chart of a figure, ``ratio`` or ``G``, along the steps of a training run.

    Error bars are two standard errors of the difference from the step before. Supplied accuracies
    are drawn as a second line, with an axis of its own.
    """
    values = []
    accuracies = []
    along = [c.gap if figure == "G" else c.figure for c in group.steps]
    before = along[0]
    for place, (c, value) in enumerate(zip(group.steps, along, strict=True)):
        number = step_number(c.step or "")
        step = float(place) if number is None else number
        error = 2 * difference(value, before).se
        ends = {"low": value.mean - error, "high": value.mean + error}
        values.append({"step": step, "name": c.step, figure: value.mean, **ends})
        before = value
        if c.accuracy is not None:
            accuracies.append({"step": step, **_accuracy(c, c.step)})
    drawn = course(values, figure, _title(group, figure), decimals(along))
    if not accuracies:
        return drawn
    return {
        "height": drawn["height"],
        "encoding": drawn["encoding"],
        "layer": [
            {"data": drawn["data"], "layer": drawn["layer"]},
            _accuracy_line(accuracies),
        ],
        "resolve": {"scale": {"y": "independent"}},
    }


def _accuracy(c: Screened, name: str | None) -> dict[str, Any]:
    """The values of a point of `_accuracy_line`."""
    return {"accuracy": c.accuracy, "says": f"{name}; accuracy {c.accuracy:.3g}"}


def _accuracy_line(rows: list[dict[str, Any]]) -> Spec:
    """Accuracies as a line with points, on an axis at the right; rows have ``accuracy``, ``says``."""
    line = {"type": "line", "color": "var(--ink)", "aria": False}
    y = numeric("accuracy", "accuracy", axis={"orient": "right", "grid": False}, zero=False)
    points = mark({**POINT, "color": "var(--ink)"}, y=y, **SAYS)
    return {"data": {"values": rows}, "layer": [mark(line, y=y), points]}


def accuracy_chart(groups: Sequence[Group]) -> Spec:
    """Return the chart of supplied accuracies against the ratio, or against G.

    G is drawn if it ranks one of the groups that have accuracies.
    """
    values = []
    figure = "ratio"
    rated_groups = []
    for group in groups:
        rated = [c for c in group.checkpoints if c.accuracy is not None and not c.is_set_aside]
        if rated:
            rated_groups.append(group)
        if rated and group.figure == "G":
            figure = "G"
        for c in rated:
            values.append(
                {
                    "label": c.label,
                    "group": group.title,
                    "G": c.gap.mean,
                    "ratio": c.ratio and c.ratio.mean,
                    "accuracy": c.accuracy,
                    "kind": _KINDS[c.target.negative_control],
                }
            )
    titles = {_title(group, figure) for group in rated_groups}
    title = titles.pop() if len(titles) == 1 else "gap G"
    return accuracy_points(values, figure, title, **_marks(values))


def _marks(values: Sequence[Mapping[str, Any]]) -> Spec:
    """Another mark for controls, if there are any."""
    if all(value["kind"] == _KINDS[0] for value in values):
        return {}
    ranges = {"shape": ["circle", "diamond"], "color": ["var(--series-1)", "var(--axis)"]}
    channels = {}
    for channel, marks in ranges.items():
        scale = {"domain": _KINDS, "range": marks}
        channels[channel] = {"field": "kind", "title": None, "scale": scale}
    return channels
