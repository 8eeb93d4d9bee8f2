"""The laboratory's charts, drawn by altair."""

from __future__ import annotations

from typing import Any

import altair as alt
import pandas as pd

_WIDTH, _HEIGHT = 260, 200


def law_scatter(points: pd.DataFrame) -> Any:
    """Mean perplexity against dispersion: one point a bin, one panel a perplexity and layer."""
    several = points["split"].nunique() > 1
    color = alt.Color("split:N", title="Text") if several else alt.value("var(--series-1)")
    shown = points[["split", "perplexity", "layer", "bin", "mean_perplexity", "dispersion"]]
    return (
        alt.Chart(shown)
        .mark_circle(size=40, opacity=0.8)
        .encode(
            alt.X("mean_perplexity:Q", title="Mean perplexity of a bin").scale(type="log"),
            alt.Y("dispersion:Q", title="Dispersion").scale(zero=False),
            color=color,
            tooltip=["split", "bin", "mean_perplexity", "dispersion"],
        )
        .properties(width=_WIDTH, height=_HEIGHT)
        .facet(
            row=alt.Row("perplexity:N", title=None, sort=list(points["perplexity"].unique())),
            column=alt.Column("layer:N", title=None, sort=list(points["layer"].unique())),
        )
        .resolve_scale(x="independent", y="independent")
    )


def law_layers(correlations: pd.DataFrame, controls: pd.DataFrame | None) -> Any:
    """Pearson r of perplexity and dispersion by layer with its interval; controls as lines beside it."""
    rows = correlations[correlations["measure"] == "dispersion"].assign(series=lambda frame: frame["split"])
    if controls is not None:
        others = controls[controls["measure"] == "dispersion"]
        rows = pd.concat([rows, others.assign(series=others["split"] + ", " + others["control"])])
    columns = ["series", "perplexity", "layer", "pearson", "low", "high"]
    rows = rows[columns].replace({"series": {r"^data(, )?": ""}}, regex=True)
    rows["series"] = rows["series"].replace({"": "model"})
    order = list(dict.fromkeys(rows["series"]))
    layers = list(dict.fromkeys(rows["layer"]))
    rows = rows.assign(low=rows["low"].where(rows["series"] == "model"))
    several = len(order) > 1
    color = alt.Color("series:N", title=None, sort=order) if several else alt.value("var(--series-1)")
    x = alt.X(
        "layer:N",
        title=None,
        sort=layers,
        axis=alt.Axis(labelAngle=-60 if len(layers) > 8 else 0, labelOverlap=False),
    )
    base = alt.Chart(rows).encode(x=x, color=color)
    y = alt.Y("pearson:Q", title="r with dispersion").scale(domain=[-1, 1])
    bars = base.transform_filter("isValid(datum.low)").mark_rule().encode(y="low:Q", y2="high:Q")
    marks = base.mark_point(filled=True, size=45).encode(y=y, tooltip=columns)
    lines = base.mark_line(strokeWidth=1, opacity=0.5).encode(y=y)
    zero = alt.Chart(rows).mark_rule(strokeDash=[4, 4]).encode(y=alt.datum(0))
    width = max(_WIDTH * 2, 22 * len(layers))
    return (
        alt.layer(zero, bars, lines, marks)
        .properties(width=width, height=_HEIGHT)
        .facet(row=alt.Row("perplexity:N", title=None, sort=list(dict.fromkeys(rows["perplexity"]))))
    )


def law_heat(points: pd.DataFrame) -> Any:
    """Dispersion by layer and bin, each layer in standard deviations of its bins; one panel a perplexity."""
    shown = points[["split", "perplexity", "layer", "bin", "mean_perplexity", "dispersion"]].copy()
    groups = shown.groupby(["split", "perplexity", "layer"], sort=False)["dispersion"]
    shown["deviation"] = (shown["dispersion"] - groups.transform("mean")) / groups.transform("std")
    shown["place"] = shown.groupby(["split", "perplexity", "layer"], sort=False).cumcount() + 1
    shown["panel"] = shown["perplexity"] + shown["split"].map(
        lambda split: "" if split == "data" else f", {split}"
    )
    layers, panels = list(dict.fromkeys(shown["layer"])), list(dict.fromkeys(shown["panel"]))
    ticks = alt.Axis(labelAngle=0, values=list(range(5, int(shown["place"].max()) + 1, 5)))
    return (
        alt.Chart(shown.drop(columns="split").round(4))
        .mark_rect()
        .encode(
            alt.X("place:O", title="Bin, from easy to hard", axis=ticks),
            alt.Y("layer:N", title=None, sort=layers[::-1], axis=alt.Axis(labelOverlap=False)),
            color=alt.Color("deviation:Q", title="Deviation (SD)").scale(scheme="blueorange", domainMid=0),
            tooltip=["layer", "bin", "mean_perplexity", "dispersion", "deviation"],
        )
        .properties(width=_WIDTH, height=14 * len(layers))
        .facet(alt.Facet("panel:N", title=None, sort=panels), columns=3)
    )


def condensation_heat(histogram: pd.DataFrame) -> Any:
    """Density of the similarity by depth, one panel a model."""
    shown = _with_control(histogram[histogram["density"] > 0])[["model", "depth", "low", "high", "density"]]
    return (
        alt.Chart(shown.round(4))
        .mark_rect()
        .encode(
            alt.X("depth:O", title="Depth"),
            alt.Y("low:Q", title="Cosine similarity of two tokens").scale(domain=[-1, 1]),
            y2="high:Q",
            color=alt.Color("density:Q", title="Density").scale(scheme="viridis", type="sqrt"),
            tooltip=["model", "depth", "low", "density"],
        )
        .properties(width=_WIDTH, height=_HEIGHT * 1.4)
        .facet(alt.Facet("model:N", title=None, sort=list(shown["model"].unique())), columns=2)
    )


def condensation_lines(layers: pd.DataFrame) -> Any:
    """Mean similarity by depth as a share of the model's depth, one line a model, with its interval."""
    layers = _with_control(layers)
    deepest = layers.groupby("model")["depth"].transform("max")
    shown = layers.assign(share=layers["depth"] / deepest)
    models = list(layers["model"].unique())
    color = (
        alt.Color("model:N", title="Model", sort=models) if len(models) > 1 else alt.value("var(--series-1)")
    )
    base = alt.Chart(shown).encode(x=alt.X("share:Q", title="Depth as a share of the model's"), color=color)
    band = base.mark_area(opacity=0.2).encode(y=alt.Y("low:Q", title="Mean similarity"), y2="high:Q")
    line = base.mark_line(point=True).encode(y="mean:Q", tooltip=["model", "layer", "mean", "low", "high"])
    return alt.layer(band, line).properties(height=_HEIGHT * 1.2)


def _with_control(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with a control's name in its model's."""
    names = frame["model"].where(frame["control"] == "", frame["model"] + ", " + frame["control"])
    return frame.assign(model=names)


def sublayer_draws(draws: pd.DataFrame) -> Any:
    """Every draw's dispersion by size of draw, one colour a candidate."""
    return (
        alt.Chart(draws)
        .mark_tick(thickness=2)
        .encode(
            alt.Y("layer:N", title=None, sort=list(draws["layer"].unique())),
            alt.X("dispersion:Q", title="Dispersion of one draw").scale(zero=False),
            color=alt.Color("layer:N", legend=None, sort=list(draws["layer"].unique())),
            row=alt.Row("segments:O", title="Segments a draw"),
            tooltip=["layer", "segments", "draw", "dispersion"],
        )
        .properties(width=_WIDTH * 2, height=24 * draws["layer"].nunique())
    )


def cluster_lines(summary: pd.DataFrame) -> Any:
    """Distances within and between clusters over the models in the order given."""
    models = list(summary["model"].unique())
    long = summary.melt(["model", "layer"], ["within", "between"], var_name="distance", value_name="value")
    return (
        alt.Chart(long)
        .mark_line(point=True)
        .encode(
            alt.X("model:N", title=None, sort=models),
            alt.Y("value:Q", title="Mean cosine distance").scale(zero=False),
            color=alt.Color("distance:N", title="Distance", sort=["within", "between"]),
            tooltip=["model", "layer", "distance", "value"],
        )
        .properties(width=max(_WIDTH, 60 * len(models)), height=_HEIGHT)
        .facet(alt.Facet("layer:N", title=None, sort=list(summary["layer"].unique())), columns=3)
        .resolve_scale(y="independent")
    )


def differences(frame: pd.DataFrame) -> Any:
    """Differences with their intervals; column ``row`` names them."""
    every_row = alt.Axis(labelOverlap=False)
    base = alt.Chart(frame).encode(y=alt.Y("row:N", title=None, sort=None, axis=every_row))
    bars = base.mark_rule().encode(x=alt.X("low:Q", title="Difference, with 95 % interval"), x2="high:Q")
    points = base.mark_point(filled=True).encode(
        x="difference:Q", tooltip=["row", "difference", "low", "high"]
    )
    zero = alt.Chart(pd.DataFrame({"x": [0.0]})).mark_rule(strokeDash=[4, 4]).encode(x="x:Q")
    return alt.layer(zero, bars, points).properties(height=18 * len(frame) + 20)
