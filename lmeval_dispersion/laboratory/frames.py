"""Display of the laboratory's frames: tables, and charts in Vega-Lite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from lmeval_dispersion.report import Col, Report, Table, nullable
from lmeval_dispersion.report.document import Column

Spec = dict[str, Any]

_HEIGHT = 200
_WORDS = ("distance", "layer", "model", "perplexity", "row", "series", "split")  # fields of words
_DASHED: Spec = {"type": "rule", "strokeDash": [4, 4]}


class FrameReport(Report):
    """A report whose CSV and data frame are one of its frames."""

    main: ClassVar[str]  # the name of that field

    def rows(self) -> list[dict[str, Any]]:
        """Its rows."""
        return records(getattr(self, self.main))

    def to_frame(self) -> pd.DataFrame:
        """The frame, tidy."""
        return nullable(getattr(self, self.main))


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


def with_ends(key: str, interval: Sequence[float]) -> dict[str, float]:
    """The entries of a row for a value and the two ends of its interval."""
    return dict(zip((key, f"{key}_low", f"{key}_high"), interval, strict=True))


def law_layers(correlations: pd.DataFrame, controls: pd.DataFrame | None) -> Spec:
    """Pearson r of perplexity and dispersion by layer with its interval; controls as further lines."""
    rows = correlations[correlations["measure"] == "dispersion"]
    rows = rows.assign(series=rows["split"].replace({"data": "model"}))
    if controls is not None:
        others = controls[controls["measure"] == "dispersion"]
        names = (others["split"] + ", " + others["control"]).str.removeprefix("data, ")
        rows = pd.concat([rows, others.assign(series=names)])
    rows = rows.assign(low=rows["low"].where(rows["series"] == "model"))
    shown = ["series", "perplexity", "layer", "pearson", "low", "high"]
    layers = _unique(rows, "layer")
    angle = {"labelAngle": -60 if len(layers) > 8 else 0, "labelOverlap": len(layers) > 40}
    y = _value("pearson", "r with dispersion", domain=[-1, 1])
    bars = {"y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}}
    drawn = [
        {"transform": [{"filter": "isValid(datum.low)"}], **_mark("rule", **bars)},
        _mark({"type": "line", "strokeWidth": 1, "opacity": 0.5}, y=y),
        _mark({"type": "point", "filled": True, "size": 45}, y=y, tooltip=_tips(shown)),
    ]
    encoding = {"x": {**_name("layer", layers), "axis": angle}, **_colour("series", rows)}
    zero = _mark(_DASHED, y={"datum": 0})
    spec = {"layer": [zero, {"encoding": encoding, "layer": drawn}], "height": _HEIGHT}
    return _faceted(rows[shown], "perplexity", spec, columns=1)


def law_bins(points: pd.DataFrame) -> Spec:
    """Mean perplexity against dispersion: one dot a bin, one panel a perplexity and layer."""
    panel = points["perplexity"] + ", " + points["layer"]
    rows = points.assign(panel=panel, logarithm=np.log(points["mean_perplexity"]))
    shown = ["split", "bin", "mean_perplexity", "dispersion"]
    # Vega-Lite's logarithmic axis draws a line for every digit, most of a page's bytes.
    ticks = {"labelExpr": "format(exp(datum.value), ',.3~r')", "tickCount": 4}
    spec = _mark(
        {"type": "circle", "size": 40, "opacity": 0.8},
        x={**_value("logarithm", "Mean perplexity of a bin"), "axis": ticks},
        y={**_value("dispersion", "Dispersion"), "axis": {"tickCount": 5}},
        tooltip=_tips(shown),
        **_colour("split", rows),
    )
    rows = rows[[*shown, "panel", "logarithm"]].round(4)
    return _faceted(rows, "panel", {**spec, "height": _HEIGHT}, resolve=_independent("x", "y"))


def sublayer_draws(draws: pd.DataFrame) -> Spec:
    """Every draw's dispersion by size of draw, one colour a candidate."""
    layers = _unique(draws, "layer")
    spec = _mark(
        {"type": "tick", "thickness": 2},
        x=_value("dispersion", "Dispersion of one draw"),
        y=_name("layer", layers),
        tooltip=_tips(["layer", "segments", "draw", "dispersion"]),
        **_colour("layer", draws, legend=None),
    )
    title = "Segments a draw"
    return _faceted(draws, "segments", {**spec, "height": 24 * len(layers)}, columns=1, title=title)


def condensation_lines(layers: pd.DataFrame) -> Spec:
    """Mean similarity by depth, one line a model, with its interval."""
    rows = with_control(layers)
    shown = ["model", "depth", "layer", "mean", "low", "high"]
    x = {"field": "depth", "type": "quantitative", "title": "Depth", "axis": {"tickMinStep": 1}}
    y, ends = "Mean similarity", {"y2": {"field": "high"}}
    low = {"field": "low", "type": "quantitative", "title": y}
    return {
        "data": {"values": records(rows[shown])},
        "encoding": {"x": x, **_colour("model", rows)},
        "layer": [
            _mark({"type": "area", "opacity": 0.2}, y=low, **ends),
            _mark({"type": "line", "point": True}, y=_value("mean", y), tooltip=_tips(shown)),
        ],
        "height": _HEIGHT * 1.2,
    }


def condensation_heat(histogram: pd.DataFrame) -> Spec:
    """Density of the similarity by depth, one panel a model."""
    rows = with_control(histogram[histogram["density"] > 0])[["model", "depth", "low", "high", "density"]]
    spec = _mark(
        "rect",
        x={"field": "depth", "type": "ordinal", "title": "Depth", "axis": {"labelAngle": 0}},
        y=_value("low", "Cosine similarity of two tokens", domain=[-1, 1]),
        y2={"field": "high"},
        color=_value("density", "Density", scheme="viridis", type="sqrt"),
        tooltip=_tips(["model", "depth", "low", "density"]),
    )
    return _faceted(rows.round(4), "model", {**spec, "height": _HEIGHT * 1.4}, columns=2)


def cluster_lines(summary: pd.DataFrame) -> Spec:
    """Distances within and between clusters over the models in the order given."""
    rows = summary.melt(["model", "layer"], ["within", "between"], var_name="distance", value_name="value")
    spec = _mark(
        {"type": "line", "point": True},
        x=_name("model", _unique(rows, "model")),
        y=_value("value", "Mean cosine distance"),
        tooltip=_tips(["model", "layer", "distance", "value"]),
        **_colour("distance", rows),
    )
    return _faceted(rows, "layer", {**spec, "height": _HEIGHT}, resolve=_independent("y"))


def differences(frame: pd.DataFrame) -> Spec:
    """Differences with their intervals, a panel a metric; column ``row`` names them."""
    shown = ["row", "difference", "low", "high"]
    y = {**_name("row", None), "axis": {"labelOverlap": False}}
    low = {"field": "low", "type": "quantitative", "title": "Difference, with 95 % interval"}
    layer = [
        _mark(_DASHED, x={"datum": 0}),
        _mark("rule", y=y, x=low, x2={"field": "high"}),
        _mark({"type": "point", "filled": True}, y=y, x=_value("difference", None), tooltip=_tips(shown)),
    ]
    spec = {"layer": layer, "height": {"step": 18}}
    rows = frame[[*shown, "figure"]]
    return _faceted(rows, "figure", spec, columns=1, resolve=_independent("x", "y"))


def with_control(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with a control's name in its model's."""
    names = frame["model"].where(frame["control"] == "", frame["model"] + ", " + frame["control"])
    return frame.assign(model=names)


def _mark(mark: str | Spec, **encoding: Any) -> Spec:
    return {"mark": mark, "encoding": encoding}


def _faceted(
    rows: pd.DataFrame, field: str, spec: Spec, *, columns: int = 3, title: str | None = None, **more: Any
) -> Spec:
    """One panel per value of ``field``, at most so many in a row."""
    names = _unique(rows, field)
    facet = {**_name(field, names), "title": title}
    columns = min(columns, len(names))
    return {"data": {"values": records(rows)}, "facet": facet, "columns": columns, "spec": spec, **more}


def _independent(*axes: str) -> Spec:
    return {"scale": dict.fromkeys(axes, "independent")}


def _unique(rows: pd.DataFrame, column: str) -> list[Any]:
    return list(rows[column].unique().tolist())


def _value(field: str, title: str | None, **scale: Any) -> Spec:
    return {"field": field, "type": "quantitative", "title": title, "scale": scale or {"zero": False}}


def _name(field: str, order: list[Any] | None) -> Spec:
    return {"field": field, "type": "nominal", "title": None, "sort": order}


def _colour(field: str, rows: pd.DataFrame, **more: Any) -> Spec:
    """A colour for each value, none for a single value."""
    order = _unique(rows, field)
    return {} if len(order) == 1 else {"color": {**_name(field, order), **more}}


def _tips(names: list[str]) -> list[Spec]:
    """The fields of a mark's tooltip; numbers in the page's digits."""
    kinds = {name: "nominal" if name in _WORDS else "quantitative" for name in names}
    return [{"field": name, "type": kind, "title": name.replace("_", " ")} for name, kind in kinds.items()]
