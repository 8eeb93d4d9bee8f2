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
from lmeval_screener.figures import Gap, Ratio, difference
from lmeval_screener.orders import DISTANCES
from lmeval_screener.result.answer import DRAWN, decimals
from lmeval_screener.screened import Group
from lmeval_screener.targets.runs import step_number

# Controls are known not to have learned the domain, such as two of the demo.
_KINDS = ["checkpoint", "control: trained on wrong answers"]
_PARTS = ["D–D", "D–NM", "G"]


def ranking(group: Group) -> Spec:
    """The ranking figure, ± two errors, of a group's first 40, best first, without those set aside."""
    members = [c for c in group.checkpoints if not c.is_set_aside][:DRAWN]
    values = []
    for c, name in zip(members, short_names([c.label for c in members]), strict=True):
        figure = c.figure.mean
        error = 2 * c.figure.se
        place = "the base" if c.is_base else f"rank {c.rank}"
        values.append(
            {
                "checkpoint": name,
                group.figure: figure,
                "low": figure - error,
                "high": figure + error,
                "kind": _KINDS[c.target.negative_control],
                "says": f"{c.label}; {place}; {group.figure} {figure:.3f} ± {c.figure.se:.3f}",
            }
        )
    axis = {"labelLimit": 200, "labelOverlap": False}
    x = numeric(group.figure, _title(group))
    return {
        "data": {"values": values},
        "height": max(60, 24 * len(members)),
        "encoding": {"y": {"field": "checkpoint", "sort": None, "title": None, "axis": axis}},
        "layer": [
            mark("rule", **span("x", {**x, "field": "low"}, "high")),
            mark(POINT, x=x, **SAYS, **_marks(values)),
        ],
    }


def _title(group: Group, figure: str = "") -> str:
    """The title of an axis of the figure that ranks a group, or of another."""
    figure = figure or group.figure
    return f"{DISTANCES[group.metric]} gap G" if figure == "G" else figure


def gap_parts(group: Group) -> Spec:
    """The parts of G and G as bars, and the accuracy as a line, of a group's first 40 checkpoints.

    As figure 9 of the RD paper draws them: D–D is within(T), D–NM is between(T, R).
    """
    members = [c for c in group.checkpoints if not c.is_set_aside][:DRAWN]
    names = short_names([c.label for c in members])
    values: list[dict[str, Any]] = []
    for c, name in zip(members, names, strict=True):
        parts = {"D–D": c.gap.within_domain.mean, "D–NM": c.gap.between.mean, "G": c.gap.mean}
        for part, value in parts.items():
            says = f"{c.label}; {part} {value:.3f}"
            values.append({"checkpoint": name, "part": part, "distance": value, "says": says})
    accuracies = [
        {
            "checkpoint": name,
            "accuracy": c.accuracy,
            "says": f"{c.label}; accuracy {c.accuracy:.3g}",
        }
        for c, name in zip(members, names, strict=True)
        if c.accuracy is not None
    ]
    axis = {"labelAngle": -30, "labelLimit": 160, "labelOverlap": False}
    bars = mark(
        "bar",
        y=numeric("distance", f"mean {DISTANCES[group.metric]} distance", zero=True),
        xOffset={"field": "part", "sort": _PARTS},
        color={
            "field": "part",
            "title": None,
            "sort": _PARTS,
            "scale": {
                "domain": _PARTS,
                "range": [f"var(--series-{number})" for number in (2, 3, 1)],
            },
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
                "sort": names,
                "title": None,
                "axis": axis,
            }
        },
        "layer": layers,
        "resolve": {"scale": {"y": "independent"}},
    }


def steps(group: Group) -> Spec:
    """The ranking figure along a training's steps, with two standard errors of each step's change."""
    return _along(group, group.figure, [c.figure for c in group.steps])


def gap_steps(group: Group) -> Spec:
    """G along a training's steps, with two standard errors of each step's change."""
    return _along(group, "G", [c.gap for c in group.steps])


def _along(group: Group, name: str, figures: Sequence[Gap | Ratio]) -> Spec:
    """A figure along the steps; supplied accuracies as a second line, on an axis of their own."""
    values, before = [], figures[0]
    for step, c, figure in zip(_steps(group), group.steps, figures, strict=True):
        error = 2 * difference(figure, before).se
        ends = {"low": figure.mean - error, "high": figure.mean + error}
        values.append({"step": step, "name": c.step, name: figure.mean, **ends})
        before = figure
    drawn = course(values, name, _title(group, name), decimals(figures))
    accuracies = [
        {
            "step": step,
            "accuracy": c.accuracy,
            "says": f"{c.step}; accuracy {c.accuracy:.3g}",
        }
        for step, c in zip(_steps(group), group.steps, strict=True)
        if c.accuracy is not None
    ]
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


def _accuracy_line(rows: list[dict[str, Any]]) -> Spec:
    """Accuracies as a line with points, by an axis at the right; rows have ``accuracy``, ``says``."""
    line = {"type": "line", "color": "var(--ink)", "aria": False}
    y = numeric("accuracy", "accuracy", axis={"orient": "right", "grid": False}, zero=False)
    points = mark({**POINT, "color": "var(--ink)"}, y=y, **SAYS)
    return {"data": {"values": rows}, "layer": [mark(line, y=y), points]}


def accuracy_chart(groups: Sequence[Group]) -> Spec:
    """Supplied accuracies against the ratio; against G if it ranks one of these groups."""
    members = [(group, c) for group in groups for c in group.checkpoints]
    rated = [(group, c) for group, c in members if c.accuracy is not None and not c.is_set_aside]
    figure = "ratio" if all(group.figure == "ratio" for group, _ in rated) else "G"
    values = [
        {
            "label": c.label,
            "group": group.title,
            "G": c.gap.mean,
            "ratio": c.ratio and c.ratio.mean,
            "accuracy": c.accuracy,
            "kind": _KINDS[c.target.negative_control],
        }
        for group, c in rated
    ]
    titles = {_title(group, figure) for group, _ in rated}
    return accuracy_points(
        values, figure, titles.pop() if len(titles) == 1 else "gap G", **_marks(values)
    )


def _marks(values: Sequence[Mapping[str, Any]]) -> Spec:
    """Another mark for controls, if there are any."""
    if all(value["kind"] == _KINDS[0] for value in values):
        return {}
    ranges = {"shape": ["circle", "diamond"], "color": ["var(--series-1)", "var(--axis)"]}
    return {
        channel: {"field": "kind", "title": None, "scale": {"domain": _KINDS, "range": marks}}
        for channel, marks in ranges.items()
    }


def _steps(group: Group) -> list[float]:
    """The steps' numbers, or their places if a name has no number."""
    numbers = [step_number(c.step or "") for c in group.steps]
    return [float(place) if step is None else step for place, step in enumerate(numbers)]
