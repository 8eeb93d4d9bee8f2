"""How the laboratory's frames are shown: as tables, and as charts in Vega-Lite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from lmeval_dispersion.report import Col, Table
from lmeval_dispersion.report.document import Column

Spec = dict[str, Any]

_HEIGHT = 200
_ZERO: Spec = {"mark": {"type": "rule", "strokeDash": [4, 4]}, "encoding": {"y": {"datum": 0}}}


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame as mappings."""
    return [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]


def table(
    frame: pd.DataFrame, caption: str, columns: Mapping[str, Column], *, most: int = 0, more: str = ""
) -> Table:
    """A table of a frame's columns, without those that are empty; of ``most`` rows, spread evenly."""
    if 0 < most < len(frame):
        more = f"{most} of {len(frame)} rows; --details shows all."
        frame = frame.iloc[np.linspace(0, len(frame) - 1, most).round().astype(int)]
    shown = [
        replace(column, key=name)
        for name, column in columns.items()
        if name in frame and frame[name].astype(str).ne("").any()
    ]
    return Table(records(frame), shown, caption, more=more)


def bounded(
    key: str, heading: str, format: str, ends: tuple[str, str] = ("low", "high"), **options: Any
) -> dict[str, Column]:
    """The columns of a value and of the two ends of its interval."""
    low, high = ends
    return {
        key: Col(heading, format, dots="both", reach=f"{low} {high}", **options),
        low: Col("95 % from", format, short="from", drop=1),
        high: Col("to", format, drop=1),
    }


def law_layers(correlations: pd.DataFrame, controls: pd.DataFrame | None) -> Spec:
    """Pearson r of perplexity and dispersion by layer with its interval; controls as lines beside it."""
    rows = correlations[correlations["measure"] == "dispersion"]
    rows = rows.assign(series=rows["split"].replace({"data": "model"}))
    if controls is not None:
        others = controls[controls["measure"] == "dispersion"]
        names = (others["split"] + ", " + others["control"]).str.removeprefix("data, ")
        rows = pd.concat([rows, others.assign(series=names)])
    rows = rows.assign(low=rows["low"].where(rows["series"] == "model"))
    shown = ["series", "perplexity", "layer", "pearson", "low", "high"]
    order, layers = _unique(rows, "series"), _unique(rows, "layer")
    angle = {"labelAngle": -60 if len(layers) > 8 else 0, "labelOverlap": len(layers) > 40}
    x = {"field": "layer", "type": "nominal", "title": None, "sort": layers, "axis": angle}
    y = _value("pearson", "r with dispersion", domain=[-1, 1])
    bars = {
        "transform": [{"filter": "isValid(datum.low)"}],
        "mark": "rule",
        "encoding": {"y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}},
    }
    line = {"mark": {"type": "line", "strokeWidth": 1, "opacity": 0.5}, "encoding": {"y": y}}
    dots = {
        "mark": {"type": "point", "filled": True, "size": 45},
        "encoding": {"y": y, "tooltip": _tips(shown)},
    }
    encoding = {"x": x, **_colour("series", order)}
    spec = {"layer": [_ZERO, {"encoding": encoding, "layer": [bars, line, dots]}], "height": _HEIGHT}
    return _faceted(rows[shown], "perplexity", spec, columns=1)


def law_bins(points: pd.DataFrame) -> Spec:
    """Mean perplexity against dispersion: one dot a bin, one panel a perplexity and layer."""
    rows = points.assign(
        panel=points["perplexity"] + ", " + points["layer"], logarithm=np.log(points["mean_perplexity"])
    )
    shown = ["split", "panel", "bin", "mean_perplexity", "logarithm", "dispersion"]
    # A logarithmic axis of Vega-Lite has a line for every digit, which makes most of a page's bytes.
    ticks = {"labelExpr": "format(exp(datum.value), ',.3~r')", "tickCount": 4}
    spec = {
        "mark": {"type": "circle", "size": 40, "opacity": 0.8},
        "encoding": {
            "x": {**_value("logarithm", "Mean perplexity of a bin"), "axis": ticks},
            "y": {**_value("dispersion", "Dispersion"), "axis": {"tickCount": 5}},
            **_colour("split", _unique(rows, "split")),
            "tooltip": _tips(["split", "bin", "mean_perplexity", "dispersion"]),
        },
        "height": _HEIGHT,
    }
    panels = rows["panel"].nunique()
    resolve = {"scale": {"x": "independent", "y": "independent"}}
    return _faceted(rows[shown].round(4), "panel", spec, columns=min(3, panels), resolve=resolve)


def law_heat(points: pd.DataFrame) -> Spec:
    """Dispersion by layer and bin, each layer in standard deviations of its bins; one panel a perplexity."""
    keys = ["split", "perplexity", "layer"]
    groups = points.groupby(keys, sort=False)["dispersion"]
    rows = points.assign(
        deviation=(points["dispersion"] - groups.transform("mean")) / groups.transform("std"),
        place=points.groupby(keys, sort=False).cumcount() + 1,
        panel=points["perplexity"]
        + points["split"].map(lambda split: "" if split == "data" else f", {split}"),
    )
    shown = ["panel", "layer", "bin", "place", "mean_perplexity", "dispersion", "deviation"]
    layers = _unique(rows, "layer")
    ticks = {"labelAngle": 0, "values": list(range(5, int(rows["place"].max()) + 1, 5))}
    colour = {"field": "deviation", "type": "quantitative", "title": "Deviation (SD)"}
    spec = {
        "mark": {"type": "rect"},
        "encoding": {
            "x": {"field": "place", "type": "ordinal", "title": "Bin, from easy to hard", "axis": ticks},
            "y": {"field": "layer", "type": "nominal", "title": None, "sort": layers[::-1]},
            "color": {**colour, "scale": {"scheme": "blueorange", "domainMid": 0}},
            "tooltip": _tips(shown),
        },
        "height": 14 * len(layers),
    }
    return _faceted(rows[shown].round(4), "panel", spec, columns=min(3, rows["panel"].nunique()))


def sublayer_draws(draws: pd.DataFrame) -> Spec:
    """Every draw's dispersion by size of draw, one colour a candidate."""
    layers = _unique(draws, "layer")
    spec = {
        "mark": {"type": "tick", "thickness": 2},
        "encoding": {
            "x": _value("dispersion", "Dispersion of one draw"),
            "y": {"field": "layer", "type": "nominal", "title": None, "sort": layers},
            **_colour("layer", layers, legend=None),
            "tooltip": _tips(["layer", "segments", "draw", "dispersion"]),
        },
        "height": 24 * len(layers),
    }
    return _faceted(draws, "segments", spec, columns=1, title="Segments a draw")


def condensation_lines(layers: pd.DataFrame) -> Spec:
    """Mean similarity by depth as a share of the model's depth, one line a model, with its interval."""
    rows = with_control(layers)
    rows = rows.assign(share=rows["depth"] / rows.groupby("model")["depth"].transform("max"))
    shown = ["model", "layer", "share", "mean", "low", "high"]
    low = {"field": "low", "type": "quantitative", "title": "Mean similarity"}
    tips = {"tooltip": _tips(["model", "layer", "mean", "low", "high"])}
    return {
        "data": {"values": records(rows[shown])},
        "encoding": {
            "x": {"field": "share", "type": "quantitative", "title": "Depth as a share of the model's"},
            **_colour("model", _unique(rows, "model")),
        },
        "layer": [
            {"mark": {"type": "area", "opacity": 0.2}, "encoding": {"y": low, "y2": {"field": "high"}}},
            {
                "mark": {"type": "line", "point": True},
                "encoding": {"y": _value("mean", "Mean similarity"), **tips},
            },
        ],
        "height": _HEIGHT * 1.2,
    }


def condensation_heat(histogram: pd.DataFrame) -> Spec:
    """Density of the similarity by depth, one panel a model."""
    rows = with_control(histogram[histogram["density"] > 0])[["model", "depth", "low", "high", "density"]]
    colour = {"field": "density", "type": "quantitative", "title": "Density"}
    spec = {
        "mark": {"type": "rect"},
        "encoding": {
            "x": {"field": "depth", "type": "ordinal", "title": "Depth"},
            "y": _value("low", "Cosine similarity of two tokens", domain=[-1, 1]),
            "y2": {"field": "high"},
            "color": {**colour, "scale": {"scheme": "viridis", "type": "sqrt"}},
            "tooltip": _tips(["model", "depth", "low", "density"]),
        },
        "height": _HEIGHT * 1.4,
    }
    return _faceted(rows.round(4), "model", spec, columns=min(2, rows["model"].nunique()))


def cluster_lines(summary: pd.DataFrame) -> Spec:
    """Distances within and between clusters over the models in the order given."""
    rows = summary.melt(["model", "layer"], ["within", "between"], var_name="distance", value_name="value")
    spec = {
        "mark": {"type": "line", "point": True},
        "encoding": {
            "x": {"field": "model", "type": "nominal", "title": None, "sort": _unique(rows, "model")},
            "y": _value("value", "Mean cosine distance"),
            **_colour("distance", ["within", "between"]),
            "tooltip": _tips(["model", "layer", "distance", "value"]),
        },
        "height": _HEIGHT,
    }
    columns = min(3, rows["layer"].nunique())
    return _faceted(rows, "layer", spec, columns=columns, resolve={"scale": {"y": "independent"}})


def differences(frame: pd.DataFrame) -> Spec:
    """Differences with their intervals, a panel a metric; column ``row`` names them."""
    low = {"field": "low", "type": "quantitative", "title": "Difference, with 95 % interval"}
    tips = {"tooltip": _tips(["row", "difference", "low", "high"])}
    zero = {"mark": _ZERO["mark"], "encoding": {"x": {"datum": 0}}}
    y = {"field": "row", "type": "nominal", "title": None, "sort": None, "axis": {"labelOverlap": False}}
    bars = {"mark": "rule", "encoding": {"y": y, "x": low, "x2": {"field": "high"}}}
    dots = {
        "mark": {"type": "point", "filled": True},
        "encoding": {"y": y, "x": _value("difference", None), **tips},
    }
    spec = {"layer": [zero, bars, dots], "height": {"step": 18}}
    shown = frame[["row", "figure", "difference", "low", "high"]]
    return _faceted(
        shown, "figure", spec, columns=1, resolve={"scale": {"x": "independent", "y": "independent"}}
    )


def with_control(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with a control's name in its model's."""
    names = frame["model"].where(frame["control"] == "", frame["model"] + ", " + frame["control"])
    return frame.assign(model=names)


def _faceted(
    rows: pd.DataFrame, field: str, spec: Spec, *, columns: int, title: str | None = None, **more: Any
) -> Spec:
    facet = {"field": field, "type": "nominal", "title": title, "sort": _unique(rows, field)}
    return {"data": {"values": records(rows)}, "facet": facet, "columns": columns, "spec": spec, **more}


def _unique(rows: pd.DataFrame, column: str) -> list[Any]:
    return list(rows[column].unique().tolist())


def _value(field: str, title: str | None, **scale: Any) -> Spec:
    return {
        "field": field,
        "type": "quantitative",
        "title": title,
        "scale": {**({} if scale else {"zero": False}), **scale},
    }


def _colour(field: str, order: Sequence[Any], **more: Any) -> Spec:
    """A colour for each value, none where there is one."""
    if len(order) == 1:
        return {}
    return {"color": {"field": field, "type": "nominal", "title": None, "sort": list(order), **more}}


def _tips(names: Sequence[str]) -> list[Spec]:
    return [{"field": name} for name in names]
