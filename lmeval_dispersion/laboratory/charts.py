"""The charts of the laboratory's reports, in Vega-Lite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from lmeval_dispersion.laboratory.report import records
from lmeval_dispersion.report.cells import shown
from lmeval_dispersion.report.vega import (
    DASHED,
    FILLED,
    Spec,
    colour,
    facets,
    mark,
    name,
    numeric,
    span,
    tooltip,
    values_of,
)

_HEIGHT = 200


def in_words(perplexity: str) -> str:
    """Return the title of a panel for a kind of perplexity.

    >>> in_words("sequence")
    'whole segments'
    >>> in_words("last@64")
    'after 64 tokens'
    """
    kind, _, context = perplexity.partition("@")
    return f"after {context} tokens" if context else f"whole {kind.replace('sequence', 'segment')}s"


def law_layers(correlations: pd.DataFrame, controls: pd.DataFrame | None) -> Spec:
    """Draw r, the correlation of perplexity and dispersion over bins of segments, at each layer.

    There is a panel for each kind of perplexity: that of whole segments, or that of the single
    token after a given number of tokens. The dots of the model itself have a 95 % interval.
    Controls and the held-out text have lines of their own.

    Args:
        correlations: The table ``correlations`` of a `LawResult`.
        controls: The table ``controls`` of the same result; None if no control was run.
    """
    frame = correlations[correlations["measure"] == "dispersion"]
    frame = frame.assign(
        series=frame["split"].replace({"data": "model"}),
        low=frame["all_low"],
        high=frame["all_high"],
    )
    if controls is not None:
        others = controls[controls["measure"] == "dispersion"]
        names = others["split"] + ", " + others["control"]
        others = others.assign(series=names.str.removeprefix("data, "))
        frame = pd.concat([frame, others])
    is_model = frame["series"] == "model"
    frame = frame.assign(
        low=frame["low"].where(is_model),
        perplexity=frame["perplexity"].map(in_words),
    )
    rows = records(frame[["series", "perplexity", "layer", "pearson", "low", "high"]])
    layers = values_of(rows, "layer")
    angle = {
        "labelAngle": -60 if len(layers) > 8 else 0,
        "labelOverlap": len(layers) > 40,
    }
    y = numeric("pearson", "r with dispersion", domain=[-1, 1])
    interval = span("y", {"field": "low", "type": "quantitative"}, "high")
    has_interval = {"transform": [{"filter": "isValid(datum.low)"}]}
    marks = [
        {**has_interval, **mark("rule", **interval)},
        mark({"type": "line", "strokeWidth": 1, "opacity": 0.5}, y=y),
        mark({**FILLED, "size": 45}, y=y, tooltip=tooltip(rows, *rows[0])),
    ]
    zero = mark(DASHED, y={"datum": 0})
    encoding = {
        "x": name("layer", layers, axis=angle),
        **colour(rows, "series"),
    }
    panel = {
        "layer": [zero, {"encoding": encoding, "layer": marks}],
        "height": _HEIGHT,
    }
    return facets(rows, "perplexity", panel, columns=1)


def law_bins(points: pd.DataFrame) -> Spec:
    """Draw dispersion against mean perplexity, one panel for each kind of perplexity and layer.

    Every bin of segments is a dot, coloured by its text (``data`` or ``held-out``). The axis of
    perplexity is logarithmic.

    Args:
        points: The table ``points`` of a `LawResult`.
    """
    panels = points["perplexity"].map(in_words) + ", " + points["layer"]
    return _bins(points, panels, columns=3)


def law_grid(points: pd.DataFrame, rows: Sequence[Mapping[str, Any]]) -> Spec:
    """Draw dispersion against mean perplexity, one panel for each model and text.

    Every bin of segments is a dot; only bins by the perplexity of whole segments are drawn. With
    several texts, each row of panels is a model and each column a text. The title of a panel gives
    the correlation r.

    Args:
        points: The table ``points`` of a `LawResult`.
        rows: One mapping for each panel, with ``model``, ``data``, ``layer`` and ``pearson``.
    """
    studies = []
    panels = []
    for row in rows:
        of_study = points["perplexity"] == "sequence"
        for name_of in ("model", "data", "layer"):
            of_study &= points[name_of] == row[name_of]
        studies.append(points[of_study])
        title = f"{row['model']}, {row['data']}: r {shown(row['pearson'], '+.2f')}"
        panels += [title] * int(of_study.sum())
    frame = pd.concat(studies)
    titles = pd.Series(panels, index=frame.index)
    texts = {row["data"] for row in rows}
    columns = len(texts) if len(texts) > 1 else 3
    return _bins(frame, titles, columns)


def _bins(points: pd.DataFrame, panels: pd.Series[str], columns: int) -> Spec:
    """A dot for every bin at its mean perplexity and dispersion, in its panel."""
    fields = ["split", "bin", "mean_perplexity", "dispersion"]
    frame = points[fields].assign(
        panel=panels,
        logarithm=np.log10(points["mean_perplexity"]),
    )
    rows = records(frame.round(4))
    # Vega-Lite's logarithmic axis draws a line for every digit, most of a page's bytes.
    last = math.ceil(max(row["logarithm"] for row in rows))
    values = []
    for power in range(last):
        for digit in (1, 2, 5):
            values.append(power + math.log10(digit))
    ticks = {
        "values": values,
        "labelExpr": "format(pow(10, datum.value), '.3~s')",
        "labelOverlap": "greedy",
        "grid": False,
    }
    spec = mark(
        {"type": "circle", "size": 40, "opacity": 0.8},
        x=numeric("logarithm", "Mean perplexity of a bin", axis=ticks),
        y=numeric("dispersion", "Dispersion", axis={"tickCount": 5}),
        tooltip=tooltip(rows, *fields),
        **colour(rows, "split"),
    )
    return facets(
        rows,
        "panel",
        {**spec, "height": _HEIGHT},
        columns=columns,
        independent=("x", "y"),
    )


def sublayer_draws(draws: pd.DataFrame) -> Spec:
    """Plot the dispersion of every random draw of segments, one row of ticks for each layer.

    There is a panel for each number of segments in a draw.

    Args:
        draws: The table ``draws`` of a `SublayersResult`.
    """
    rows = records(draws)
    layers = values_of(rows, "layer")
    spec = mark(
        {"type": "tick", "thickness": 2},
        x=numeric("dispersion", "Dispersion of one draw"),
        y=name("layer", layers),
        tooltip=tooltip(rows, "layer", "segments", "draw", "dispersion"),
        **colour(rows, "layer", legend=None),
    )
    return facets(
        rows,
        "segments",
        {**spec, "height": 24 * len(layers)},
        columns=1,
        title="Segments in a draw",
    )


def condensation_lines(layers: pd.DataFrame) -> Spec:
    """Draw the mean similarity of tokens by depth, one line with a 95 % band for each model.

    Controls have lines of their own. The axis of depth runs from 0 (the input of the first block)
    to 1 (the last layer), so that models with different numbers of layers can be compared.

    Args:
        layers: The table ``layers`` of a `CondensationResult`.
    """
    fields = ["model", "fraction", "depth", "layer", "mean", "low", "high"]
    rows = records(with_control(layers)[fields])
    y = numeric("mean", "Mean similarity")
    low = {"field": "low", "type": "quantitative", "title": y["title"]}
    band = span("y", low, "high")
    return {
        "data": {"values": rows},
        "encoding": {
            "x": numeric("fraction", "Layer fraction", domain=[0, 1]),
            **colour(rows, "model"),
        },
        "layer": [
            mark({"type": "area", "opacity": 0.2}, **band),
            mark({"type": "line", "point": True}, y=y, tooltip=tooltip(rows, *rows[0])),
        ],
        "height": _HEIGHT * 1.2,
    }


def condensation_heat(histogram: pd.DataFrame) -> Spec:
    """Draw how the similarity of tokens is distributed at each depth, one heat map for each model.

    Controls have heat maps of their own.

    Args:
        histogram: The table ``histogram`` of a `CondensationResult`.
    """
    is_filled = histogram["density"] > 0
    frame = with_control(histogram[is_filled])
    fields = ["model", "depth", "low", "high", "density"]
    rows = records(frame[fields].round(4))
    depth = {
        "field": "depth",
        "type": "ordinal",
        "title": "Depth",
        "axis": {"labelAngle": 0},
    }
    low = numeric("low", "Cosine similarity of two tokens", domain=[-1, 1])
    spec = mark(
        "rect",
        x=depth,
        **span("y", low, "high"),
        color=numeric("density", "Density", scheme="viridis", type="sqrt"),
        tooltip=tooltip(rows, "model", "depth", "low", "density"),
    )
    return facets(rows, "model", {**spec, "height": _HEIGHT * 1.4}, columns=2)


def cluster_lines(summary: pd.DataFrame) -> Spec:
    """Draw the mean distances within and between clusters, for the models in the order given.

    A cluster holds the contexts that the same n-gram follows. There is a panel for each layer.

    Args:
        summary: The table ``summary`` of a `ClustersResult`.
    """
    long = summary.melt(
        id_vars=["model", "layer"],
        value_vars=["within", "between"],
        var_name="distance",
        value_name="value",
    )
    rows = records(long)
    spec = mark(
        {"type": "line", "point": True},
        x=name("model", values_of(rows, "model")),
        y=numeric("value", "Mean cosine distance"),
        tooltip=tooltip(rows, "model", "layer", "distance", "value"),
        **colour(rows, "distance"),
    )
    return facets(rows, "layer", {**spec, "height": _HEIGHT}, independent=("y",))


def with_control(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with the name of the control appended to the name of the model.

    A control is the same measurement with random weights or on shuffled tokens. The rows of the
    model itself, whose ``control`` is empty, stay unchanged.

    Args:
        frame: Rows with the columns ``model`` and ``control``.
    """
    is_control = frame["control"] != ""
    with_name = frame["model"] + ", " + frame["control"]
    return frame.assign(model=frame["model"].mask(is_control, with_name))
