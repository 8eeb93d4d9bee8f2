"""Parts of charts in Vega-Lite: channels, marks and panels, in the colours of page.css."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmeval_dispersion.report.cells import json_value

Spec = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]
DASHED: Spec = {"type": "rule", "strokeDash": [4, 4], "color": "var(--muted)"}
FILLED: Spec = {"type": "point", "filled": True}
POINT: Spec = {**FILLED, "size": 80}
#: A mark's words on hover and for screen readers: the field ``says`` of its row.
SAYS: Spec = {
    channel: {"field": "says", "type": "nominal"} for channel in ("description", "tooltip")
}


def numeric(
    field: str, title: str | None = None, *, axis: Spec | None = None, **scale: Any
) -> Spec:
    """Return a quantitative channel of Vega-Lite for ``field``.

    ``axis`` and ``scale`` are properties of Vega-Lite's axis and scale. Without ``scale`` the axis
    need not include zero.
    """
    channel: Spec = {
        "field": field,
        "type": "quantitative",
        "title": title,
        "scale": scale or {"zero": False},
    }
    if axis is not None:
        channel["axis"] = axis
    return channel


def name(field: str, order: Sequence[Any] | None = None, **more: Any) -> Spec:
    """Return a nominal channel of Vega-Lite for ``field``, sorted by ``order``.

    Without ``order``, values are in the order of the rows.

    ``more`` are further properties of the channel.
    """
    return {"field": field, "type": "nominal", "title": None, "sort": order, **more}


def mark(kind: str | Spec, **encoding: Any) -> Spec:
    """Return a layer with a mark of the type ``kind`` and its encoding channels."""
    return {"mark": kind, "encoding": encoding}


def span(axis: str, low: Spec, high: str) -> Spec:
    """Return the two channels of a bar or band along ``axis`` (``x`` or ``y``).

    The bar reaches from the channel ``low`` to the field ``high``.
    """
    return {axis: low, f"{axis}2": {"field": high}}


def values_of(rows: Rows, field: str) -> list[Any]:
    """Return the distinct values of a field, in the order of the rows."""
    return list(dict.fromkeys(row[field] for row in rows))


def colour(rows: Rows, field: str, **more: Any) -> Spec:
    """Return the colour channel for ``field``; empty if all rows have the same value."""
    order = values_of(rows, field)
    if len(order) < 2:
        return {}
    return {"color": name(field, order, **more)}


def tooltip(rows: Rows, *fields: str) -> list[Spec]:
    """Return the channels that show the values of ``fields`` on hover."""
    channels = []
    for field in fields:
        is_text = bool(rows) and isinstance(rows[0].get(field), str)
        channels.append(
            {
                "field": field,
                "type": "nominal" if is_text else "quantitative",
                "title": field.replace("_", " "),
            }
        )
    return channels


def names_apart(
    values: Rows, x: str, y: str, *, length: float, line: float, most: float
) -> list[dict[str, Any]]:
    """Place the names of points at their right so that no two overlap.

    Returns the rows with a further key ``place``, the y of the name: the y of the point, or a lower
    one if another name is in the way; None if the name would be more than ``most`` lines away from
    its point. ``length`` and ``line`` are the width and height of a name, in units of the fields
    ``x`` and ``y``.

    >>> points = [{"x": 0, "y": 0.5}, {"x": 1, "y": 0.5}, {"x": 9, "y": 0.5}, {"x": 0, "y": 0.49}]
    >>> [row["place"] for row in names_apart(points, "x", "y", length=2, line=0.25, most=1)]
    [0.5, 0.25, 0.5, None]
    """
    placed: dict[int, float] = {}
    from_the_top = sorted(range(len(values)), key=lambda number: -values[number][y])
    for number in from_the_top:
        point = values[number]
        lowest = point[y]
        for other, place in placed.items():
            if abs(values[other][x] - point[x]) <= length:
                lowest = min(lowest, place - line)
        if point[y] - lowest <= most * line:
            placed[number] = lowest
    return [{**row, "place": placed.get(number)} for number, row in enumerate(values)]


def dots(
    rows: Sequence[Any],
    named: str,
    value: str,
    bounds: tuple[str, str],
    title: str,
    axis: Spec | None,
) -> Spec:
    """Return a chart with one dot per dataclass row, and a dashed vertical line at 0.

    ``rows`` are instances of one dataclass. The dot is at the field ``value``, on a bar between the
    two fields ``bounds``; ``named`` is the field with the row's name. ``title`` and ``axis`` are
    those of the horizontal axis.
    """
    return {
        "data": {"values": json_value(rows)},
        "height": 18 * len(rows) + 20,
        "encoding": {"y": name(named, axis={"labelOverlap": False})},
        "layer": [
            {"data": {"values": [{"x": 0.0}]}, **mark(DASHED, x=numeric("x"), y=None)},
            mark("rule", **span("x", numeric(bounds[0], title, axis=axis), bounds[1])),
            mark(FILLED, x=numeric(value)),
        ],
    }


def course(rows: Rows, field: str, title: str | None, digits: int) -> Spec:
    """Return a chart of ``field`` as a line over training steps, with vertical error bars.

    Each row has the keys ``step``, ``name`` (of the step), ``field``, and ``low`` and ``high``, the
    ends of the error bar. On hover a point shows the name, and the value with ``digits`` decimals.
    """
    values = []
    positive = []
    for row in rows:
        says = f"{row['name']}; {field} {row[field]:.{digits}f}"
        values.append({**row, "says": says})
        if row["step"] > 0:
            positive.append(row["step"])
    is_wide = bool(positive) and max(positive) > 500 * min(positive)
    scale = "symlog" if is_wide else "linear"
    x = numeric("step", "training step", type=scale, nice=not is_wide)
    y = numeric(field, title)
    bar = {"type": "rule", "strokeWidth": 1.5, "color": "var(--axis)", "aria": False}
    return {
        "data": {"values": values},
        "height": 280,
        "encoding": {"x": x},
        "layer": [
            mark(bar, **span("y", numeric("low", title), "high")),
            mark({"type": "line", "aria": False}, y=y),
            mark(POINT, y=y, **SAYS),
        ],
    }


def accuracy_points(rows: Rows, figure: str, title: str, **marks: Any) -> Spec:
    """Return a chart of accuracy against another number, with one point per row.

    Each row has the keys ``label``, ``group``, ``figure`` (the other number) and ``accuracy``. Each
    group has a colour; with a single group ``marks`` are further channels of the points.
    """
    says = "{label}; {group}; " + f"{figure} {{{figure}:.3f}}" + "; accuracy {accuracy:.3g}"
    rows = [{**row, "says": says.format(**row)} for row in rows]
    if len(values_of(rows, "group")) > 1:
        marks = {"color": {"field": "group", "title": None}}
    layers = [mark(POINT, **SAYS, **marks)]
    if len(rows) <= 15:
        text = {"type": "text", "align": "left", "dx": 9, "fontSize": 12, "aria": False}
        length = 0.16 * _range(rows, figure)
        line = 0.05 * _range(rows, "accuracy")
        rows = names_apart(rows, figure, "accuracy", length=length, line=line, most=1.2)
        layers.append(
            mark(text, text={"field": "label"}, y={"field": "place", "type": "quantitative"})
        )
    x = numeric(figure, title, zero=False, padding=20)
    y = numeric("accuracy", "accuracy", zero=False, padding=14, nice=False)
    return {"data": {"values": rows}, "height": 340, "encoding": {"x": x, "y": y}, "layer": layers}


def _range(rows: Rows, field: str) -> float:
    """The difference of a field's largest and smallest value."""
    values = [float(row[field]) for row in rows]
    return max(values) - min(values)


def facets(
    rows: Rows,
    field: str,
    panel: Spec,
    *,
    columns: int = 3,
    title: str | None = None,
    independent: Sequence[str] = (),
) -> Spec:
    """Return a chart with one panel for each value of ``field``, ``columns`` of them in a row.

    The panels share their axes, except the channels in ``independent``, such as ``x``.
    """
    names = values_of(rows, field)
    return {
        "data": {"values": rows},
        "facet": {**name(field, names), "title": title},
        "columns": min(columns, len(names)),
        "spec": panel,
        "resolve": {"scale": dict.fromkeys(independent, "independent")},
    }
