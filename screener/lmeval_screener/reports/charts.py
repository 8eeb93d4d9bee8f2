"""The charts of a screening, as Vega-Lite data; colours are the page's variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmeval_dispersion.geometry import Metric
from lmeval_dispersion.report import Chart
from lmeval_dispersion.report.cells import short_names
from lmeval_screener.ranking.gap import difference
from lmeval_screener.screened import Group, Screened
from lmeval_screener.targets import step_number

PARTS = {"within_domain": "within(T)", "between": "between(T, R)", "within_reference": "within(R), control"}
_DRAWN = 40  # checkpoints of a group that a chart shows
_AXIS = {"labelLimit": 200, "labelOverlap": False}
_LINE = "var(--axis)"


def dots_chart(group: Group, metric: Metric) -> Chart:
    """G of each checkpoint, best first."""
    members = group.checkpoints[:_DRAWN]
    count = len(group.checkpoints)
    of = f", the {len(members)} best of {count}" if len(members) < count else ""
    values = [
        {
            "checkpoint": name,
            "rank": c.rank,
            "G": c.gaps[metric].mean,
            "reach": c.gaps[metric].mean - 2 * (c.next.se if c.next else 0.0),
            "ratio": None if c.ratio is None else c.ratio.mean,
            "no clear order with": ", ".join(map(str, c.tied_with)),
            "kind": "control" if c.negative_control else "checkpoint",
        }
        for c, name in zip(members, short_names([c.label for c in members]), strict=True)
    ]
    x = {"field": "G", "type": "quantitative", "title": f"{metric} gap G", "scale": {"zero": False}}
    tooltip = [
        {"field": name, "type": "quantitative", "format": ".4f"}
        if name in ("G", "ratio")
        else {"field": name}
        for name in ("checkpoint", "rank", "G", "ratio", "no clear order with")
    ]
    spec = {
        "data": {"values": values},
        "height": max(60, 24 * len(members)),
        "encoding": {"y": {"field": "checkpoint", "sort": None, "title": None, "axis": _AXIS}},
        "layer": [
            {"mark": {"type": "rule", "strokeWidth": 2, "color": _LINE},
             "encoding": {"x": x, "x2": {"field": "reach"}}},
            {"mark": {"type": "point", "filled": True, "size": 80},
             "encoding": {"x": x, "tooltip": tooltip, **_marks(values)}},
        ],
    }  # fmt: skip
    return Chart(
        spec,
        caption=f"G of each checkpoint{of}",
        description=f"Dots of G, best first, from {members[0].label}.",
        meaning="The line to the left of a dot is two standard errors of its difference to the next rank.",
        name=f"gap-{group.anchor}",
    )


def _marks(values: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Another mark for checkpoints that are known not to have learned, where there are some."""
    if all(value["kind"] == "checkpoint" for value in values):
        return {}
    kinds = ["checkpoint", "control"]
    return {
        "shape": {"field": "kind", "title": None, "scale": {"domain": kinds, "range": ["circle", "diamond"]}},
        "color": {
            "field": "kind",
            "title": None,
            "scale": {"domain": kinds, "range": ["var(--series-1)", "var(--series-7)"]},
        },
    }


def steps_chart(group: Group, metric: Metric) -> Chart:
    """G along the steps of a training."""
    values = []
    members = group.steps
    for place, c in enumerate(members):
        number = step_number(c.step or "")
        se = difference(c.gaps[metric], members[place - 1].gaps[metric]).se if place else 0.0
        G = c.gaps[metric].mean
        values.append(
            {
                "step": float(place) if number is None else number,
                "name": c.step,
                "G": G,
                "low": G - 2 * se,
                "high": G + 2 * se,
            }
        )
    best = group.names[group.checkpoints[0]]
    return Chart(
        _curve(values, "G", f"{metric} gap G", ("low", "high")),
        caption=f"G along the training of {group.title}",
        description=f"G against the training step; largest at {best}.",
        meaning="Bars: two paired standard errors of the change from the step before.",
        name=f"gap-{group.anchor}",
    )


def ratio_chart(group: Group) -> Chart | None:
    """The ratio along the steps of a training; None where it is not known."""
    values = [
        {"step": float(place) if number is None else number, "name": c.step, "ratio": c.ratio.mean}
        for place, c in enumerate(group.steps)
        for number in [step_number(c.step or "")]
        if c.ratio is not None
    ]
    if not values:
        return None
    return Chart(
        _curve(values, "ratio", "ratio", None),
        caption=f"Ratio along the training of {group.title}",
        description="within(T) / within(R) of rows times the final norm, against the training step.",
        name=f"ratio-{group.anchor}",
    )


def _curve(
    values: Sequence[dict[str, Any]], field: str, title: str, bars: tuple[str, str] | None
) -> dict[str, Any]:
    positive = sorted(value["step"] for value in values if value["step"] > 0)
    wide = bool(positive) and positive[-1] > 500 * positive[0]
    x = {
        "field": "step",
        "type": "quantitative",
        "title": "training step",
        "scale": {"type": "symlog" if wide else "linear", "nice": not wide},
    }
    y = {"type": "quantitative", "title": title, "scale": {"zero": False}}
    tooltip = [{"field": "name"}, {"field": field, "type": "quantitative", "format": ".4f"}]
    layers: list[dict[str, Any]] = [
        {"mark": {"type": "line", "point": True}, "encoding": {"y": y | {"field": field}}}
    ]
    if bars is not None:
        rule = {"type": "rule", "strokeWidth": 1.5, "color": _LINE}
        layers.insert(0, {"mark": rule, "encoding": {"y": y | {"field": bars[0]}, "y2": {"field": bars[1]}}})
    return {
        "data": {"values": list(values)},
        "height": 280,
        "encoding": {"x": x, "tooltip": tooltip},
        "layer": layers,
    }


def parts_chart(group: Group, metric: Metric) -> Chart:
    """The parts of G, with one standard error each."""
    members = group.checkpoints[:_DRAWN]
    values = []
    for c, name in zip(members, short_names([c.label for c in members]), strict=True):
        for key, title in PARTS.items():
            part = getattr(c.gaps[metric], key)
            values.append({"checkpoint": name, "part": title, "mean": part.mean, "low": part.mean - part.se,
                           "high": part.mean + part.se})  # fmt: skip
    x = {"field": "mean", "type": "quantitative", "title": f"mean {metric} distance"}
    parts = list(PARTS.values())
    spec = {
        "data": {"values": values},
        "encoding": {
            "y": {"field": "checkpoint", "sort": None, "title": None, "axis": _AXIS},
            "yOffset": {"field": "part", "sort": parts},
        },
        "layer": [
            {"mark": "bar",
             "encoding": {"x": x, "color": {"field": "part", "sort": parts, "title": None},
                          "tooltip": [{"field": "checkpoint"}, {"field": "part"},
                                      {"field": "mean", "type": "quantitative", "format": ".4f"}]}},
            {"mark": {"type": "rule", "color": "var(--ink)"},
             "encoding": {"x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"}}},
        ],
        "height": max(80, 44 * len(members)),
    }  # fmt: skip
    return Chart(
        spec,
        caption=f"Parts of the {metric} gap, {group.title}",
        description="Bars of within(T), between(T, R) and the control within(R), with one standard error.",
        name=f"parts-{group.anchor}",
    )


def accuracy_chart(groups: Sequence[Group], metric: Metric) -> Chart:
    """Accuracy against G, where somebody supplied accuracies; pointing at a dot names it."""
    rated: list[tuple[Group, Screened]] = [
        (group, c) for group in groups for c in group.checkpoints if c.accuracy is not None
    ]
    values = [
        {
            "name": c.label,
            "group": group.title,
            "accuracy": c.accuracy,
            "G": c.gaps[metric].mean,
            "kind": "control" if c.negative_control else "checkpoint",
        }
        for group, c in rated
    ]
    several = len({value["group"] for value in values}) > 1
    x = {"field": "G", "type": "quantitative", "title": f"{metric} gap G",
         "scale": {"zero": False, "padding": 20}}  # fmt: skip
    y = {"field": "accuracy", "type": "quantitative", "scale": {"zero": False, "padding": 14}}
    tooltip = [
        {"field": "name"},
        {"field": "group"},
        {"field": "G", "type": "quantitative", "format": ".4f"},
        {"field": "accuracy"},
    ]
    marks = {"color": {"field": "group", "title": None}} if several else _marks(values)
    layers: list[dict[str, Any]] = [
        {"mark": {"type": "point", "filled": True, "size": 80}, "encoding": {"tooltip": tooltip, **marks}}
    ]
    if len(values) <= 15:
        text = {"type": "text", "align": "left", "dx": 9, "fontSize": 12}
        layers.append({"mark": text, "encoding": {"text": {"field": "name"}}})
    return Chart(
        {"data": {"values": values}, "height": 340, "encoding": {"x": x, "y": y}, "layer": layers},
        caption="Accuracy against G",
        description="One point a checkpoint with an accuracy, by group.",
        name="accuracy",
    )
