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
            alt.X("mean_perplexity:Q", title="Mean perplexity of a bin").scale(type="log", zero=False),
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


def law_layers(correlations: pd.DataFrame) -> Any:
    """Pearson r of perplexity and dispersion by layer, with its interval."""
    rows = correlations[correlations["measure"] == "dispersion"]
    several = rows["split"].nunique() > 1
    color = alt.Color("split:N", title="Text") if several else alt.value("var(--series-1)")
    base = alt.Chart(rows).encode(
        x=alt.X("layer:N", title="Layer", sort=list(rows["layer"].unique())),
        color=color,
    )
    marks = base.mark_point(filled=True, size=50).encode(
        y=alt.Y("pearson:Q", title="Pearson r"), tooltip=["split", "layer", "pearson", "low", "high"]
    )
    bars = base.mark_rule().encode(y=alt.Y("low:Q", title="Pearson r"), y2="high:Q")
    return (
        alt.layer(bars, marks)
        .properties(width=_WIDTH * 2, height=_HEIGHT)
        .facet(row=alt.Row("perplexity:N", title=None, sort=list(rows["perplexity"].unique())))
    )


def condensation_heat(histogram: pd.DataFrame) -> Any:
    """Density of the similarity by depth, one panel a model."""
    shown = histogram[histogram["density"] > 0][["model", "depth", "low", "high", "density"]]
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
        .facet(alt.Facet("model:N", title=None, sort=list(histogram["model"].unique())), columns=2)
    )


def condensation_lines(layers: pd.DataFrame) -> Any:
    """Mean similarity by depth as a share of the model's depth, one line a model, with its interval."""
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
        .facet(row=alt.Row("layer:N", title=None, sort=list(summary["layer"].unique())))
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
