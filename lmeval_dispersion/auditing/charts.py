"""The charts of an audit, as Vega-Lite, with what each means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from lmeval_dispersion.auditing.conclusions import interval_text
from lmeval_dispersion.report import Chart
from lmeval_dispersion.report.cells import json_value
from lmeval_dispersion.statistics import NORMAL_975

Found = Mapping[str, Any]

_HEIGHT = 320
_SLICE_HEIGHT, _WIDTH = 230, 1000  # of the first chart, which stands in the first screen with the answer
_NAMED, _OUTLIERS = 15, 6  # slices named in a chart: all of so few, else the ones farthest out


def axis(field: str, title: str | None = None, **more: Any) -> dict[str, Any]:
    """A quantitative channel that need not hold zero."""
    return {"field": field, "type": "quantitative", "title": title, "scale": {"zero": False}, **more}


def dots(
    rows: Sequence[Any],
    named: str,
    value: str,
    bounds: tuple[str, str],
    title: str,
    line: float,
    *more: Found,
    dot: Found | None = None,
) -> dict[str, Any]:
    """Rows of a dataclass: a dot at ``value``, a bar between ``bounds``, and a dashed upright ``line``."""
    y = {"field": named, "type": "nominal", "title": None, "sort": None, "axis": {"labelOverlap": False}}
    dashed = {"type": "rule", "strokeDash": [4, 4], "color": "var(--muted)"}
    bar = {"x": axis(bounds[0], title), "x2": {"field": bounds[1]}}
    point = {"mark": {"type": "point", "filled": True}, "encoding": {}, **(dot or {})}
    return {
        "data": {"values": json_value(rows)},
        "height": 18 * len(rows) + 20,
        "encoding": {"y": y},
        "layer": [
            {"data": {"values": [{"x": line}]}, "mark": dashed, "encoding": {"x": axis("x"), "y": None}},
            {"mark": "rule", "encoding": bar},
            *more,
            {**point, "encoding": {"x": axis(value), **point["encoding"]}},
        ],
    }


def predicted_against_true(points: Sequence[Any], **colour: str) -> dict[str, Any]:
    """Points with ``predicted`` and ``true`` accuracies around a dashed diagonal; ``color`` names a field."""
    both = {"type": "quantitative", "scale": {"domain": [0, 1]}, "axis": {"format": "%"}}
    encoding: dict[str, Any] = {
        "x": {"field": "predicted", "title": "predicted accuracy", **both},
        "y": {"field": "true", "title": "true accuracy", **both},
        **{channel: {"field": field, "type": "nominal", "title": None} for channel, field in colour.items()},
    }
    mark = {"type": "point", "size": 45, "opacity": 0.65}
    cloud = {"data": {"values": json_value(points)}, "mark": mark, "encoding": encoding}
    return {"height": _HEIGHT, "layer": [diagonal(), cloud]}


def slice_chart(name: str, table: Found) -> Chart | None:
    """Accuracy against dispersion, one point a slice with error bars; None below three usable slices."""
    rows = [
        {
            **row,
            "low": row["dispersion"] - NORMAL_975 * row["dispersion_se"],
            "high": row["dispersion"] + NORMAL_975 * row["dispersion_se"],
        }
        for row in table["rows"]
        if row["documents"] >= 3 and row["labelled"] >= 1
    ]
    if len(rows) < 3 or any(math.isnan(row["dispersion_se"]) for row in rows):
        return None
    lowest = min(rows, key=lambda row: float(row["dispersion"]))
    highest = max(rows, key=lambda row: float(row["dispersion"]))
    association = table["association"]
    if "spearman" in association:
        order = f"{interval_text(association)}, over {association['slices']} slices"
    else:
        order = f"no correlation: {association['missing']}"
    return Chart(
        _slice_points(name, rows),
        f"Accuracy against dispersion by {name}",
        f"{len(rows)} points. {order}. Least dispersed: {lowest['slice']}, {_where(lowest)}; "
        f"most dispersed: {highest['slice']}, {_where(highest)}.",
        "Bars are 95 % intervals. If points rise to the right, the slices that the model spreads out are "
        "the ones it answers better. Slices also differ in topic and length, so one slice below another is "
        "a place to look, not a proof.",
        name="slices",
    )


def _where(row: Found) -> str:
    return f"dispersion {row['dispersion']:.4f}, accuracy {100 * row['accuracy']:.1f} %"


def named_slices(rows: Sequence[Found]) -> list[Found]:
    """The slices whose names stand in the chart: all up to fifteen, else the six farthest out."""
    if len(rows) <= _NAMED:
        return list(rows)
    points = np.array([[row["dispersion"], row["accuracy"]] for row in rows])
    scale = np.where(points.std(axis=0) > 0, points.std(axis=0), 1)
    away = np.square((points - points.mean(axis=0)) / scale).sum(axis=1)
    return [rows[i] for i in np.argsort(-away, kind="stable")[:_OUTLIERS]]


def _slice_points(name: str, rows: Sequence[Found]) -> dict[str, Any]:
    keys = ("slice", "documents", "dispersion", "low", "high", "accuracy", "accuracy_low", "accuracy_high")
    title = "dispersion (mean cosine distance)"
    x = axis("dispersion", title, axis={"tickCount": 6})
    y = axis("accuracy", "accuracy", axis={"format": "%"})
    faint = {"type": "rule", "opacity": 0.35, "color": "var(--series-1)"}
    hover = [
        {"field": "slice", "type": "nominal", "title": name},
        {"field": "dispersion", "format": ".4f"},
        {"field": "accuracy", "format": ".1%"},
        {"field": "documents"},
    ]
    labels = [
        {
            "data": {"values": [{key: row[key] for key in keys}]},
            "mark": {"type": "text", "align": align, "dx": 8 if align == "left" else -8, "dy": dy,
                     "fontSize": 11, "color": "var(--ink)"},
            "encoding": {"x": x, "y": y, "text": {"field": "slice"}},
        }
        for row, align, dy in _label_places(named_slices(rows), rows)
    ]  # fmt: skip
    return {
        "data": {"values": [{key: row[key] for key in keys} for row in rows]},
        "height": _SLICE_HEIGHT,
        "layer": [
            {"mark": faint, "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": y}},
            {"mark": faint, "encoding": {"x": x, "y": {**y, "field": "accuracy_low"},
                                         "y2": {"field": "accuracy_high"}}},
            {"mark": {"type": "point", "color": "var(--series-1)", "size": 70},
             "encoding": {"x": x, "y": y, "tooltip": hover}},
            *labels,
        ],
    }  # fmt: skip


def _label_places(
    named: Sequence[Found], rows: Sequence[Found]
) -> list[tuple[Found, Literal["left", "right"], int]]:
    """Side and height of every name: towards the middle, where there is room, and clear of other names."""
    left, right = min(row["low"] for row in rows), max(row["high"] for row in rows)
    low, high = min(row["accuracy_low"] for row in rows), max(row["accuracy_high"] for row in rows)
    taken: list[tuple[float, float, float]] = []
    chosen = []
    for row in named:
        x = _WIDTH * (row["dispersion"] - left) / ((right - left) or 1)
        y = _SLICE_HEIGHT * (high - row["accuracy"]) / ((high - low) or 1)
        inner: tuple[Literal["left", "right"], ...] = ("left", "right")
        places = []
        for align in inner if x < _WIDTH / 2 else inner[::-1]:
            for dy in (-9, 11):
                width = 6.2 * len(str(row["slice"]))
                start = x + 8 if align == "left" else x - 8 - width
                clear = all(
                    abs(y + dy - other) > 11 or start > end or start + width < begin
                    for begin, end, other in taken
                )
                places.append((not clear, align, dy, (start, start + width, y + dy)))
        _, align, dy, box = min(places, key=lambda place: place[0])
        taken.append(box)
        chosen.append((row, align, dy))
    return chosen


def mixture_charts(part: Found) -> dict[str, Chart]:
    """The curves of dispersion and of query perplexity over the share of correct documents."""
    meaning = {
        "dispersion": f"Every point is the mean of {part['seeds']} draws of "
        f"{part['documents_per_mixture']} documents with exactly that share of right answers; bars are one "
        "standard error over the draws. A rising line says that dispersion follows the share of right "
        "answers when nothing else is changed on purpose; inside subjects not even the subjects change. It "
        "does not say that real slices of equal accuracy have equal dispersion.",
        "query_perplexity": "The same draws measured by how surprising the queries are to the model: the "
        "baseline that dispersion has to beat.",
    }
    titles = {"dispersion": "dispersion", "query_perplexity": "mean query perplexity"}
    charts = {}
    for key, title in titles.items():
        rows = _curve_rows("all documents", part["curve"], key)
        for name, inner in part["inside"].items() if key == "dispersion" else ():
            rows += _curve_rows(f"inside {name}s", inner.get("curve", ()), key)
        trend = part[f"{key}_trend"]
        if len(rows) < 2 or "missing" in trend:
            continue
        first, *_, last = [row for row in rows if row["series"] == "all documents"]
        charts[f"mixtures_{key}"] = Chart(
            _lines(rows, axis("target", "correct documents (%)", axis={"values": list(range(0, 101, 20))}),
                   axis("value", title), bars=True),
            f"{title.capitalize()} of mixtures, by their share of correct documents",
            f"From {first['value']:.4g} at {first['target']} % to {last['value']:.4g} at "
            f"{last['target']} %; {trend['shape']}, Spearman {trend['spearman']:.2f}.",
            meaning[key],
        )  # fmt: skip
    return charts


def _curve_rows(series: str, curve: Sequence[Found], key: str) -> list[dict[str, Any]]:
    rows = []
    for point in curve:
        if not math.isnan(point[key]):
            error = 0.0 if math.isnan(point[f"{key}_se"]) else point[f"{key}_se"]
            ends = {"low": point[key] - error, "high": point[key] + error}
            rows.append({"series": series, "target": point["target_accuracy"], "value": point[key], **ends})
    return rows


def paper_protocol_chart(protocol: Any) -> Chart:
    """Predicted against true accuracy of every test batch of the paper's protocol."""
    return Chart(
        predicted_against_true(protocol.points, color="kind"),
        "The paper's protocol: accuracy predicted from dispersion against true accuracy, documents held out",
        f"{len(protocol.points)} batches over {protocol.seeds} splits. "
        + " ".join(verdict.sentence for verdict in protocol.verdicts),
        "On the dashed line the prediction is right. A cloud that lies flat or upright says that dispersion "
        "carries no accuracy there. Artificial mixtures are the easy case; batches of real slices are what a "
        "user will meet.",
    )


def ranking_charts(part: Found) -> dict[str, Chart]:
    """Accuracy by decile, and the share of errors found against the share of documents looked at."""
    signals = [row for row in part["signals"] if "auroc" in row]
    if not signals or signals[0] is not part["signals"][0]:
        return {}
    ours = signals[0]
    shown = [ours, *sorted(signals[1:], key=lambda row: -float(row["auroc"]))[:3]]
    areas = "; ".join(f"{row['signal']} {row['auroc']:.3f}" for row in shown)
    tenth = "; ".join(f"{row['signal']} {100 * row['error_share']['10']:.0f} %" for row in shown)
    first, last = ours["deciles"][0]["accuracy"], ours["deciles"][-1]["accuracy"]
    deciles = [
        {"series": row["signal"], "decile": i, "accuracy": decile["accuracy"]}
        for row in shown
        for i, decile in enumerate(row["deciles"], 1)
    ]
    errors = [
        {"series": row["signal"], "share": share / 100, "found": value}
        for row in shown
        for share, value in ((0, 0.0), *((int(s), v) for s, v in row["error_share"].items()), (100, 1.0))
    ]
    tenths = {"field": "decile", "type": "ordinal", "axis": {"labelAngle": 0},
              "title": "tenth of the documents, lowest signal first"}  # fmt: skip
    share = axis("share", "share of documents looked at", axis={"format": "%"})
    lines = _lines(errors, share, axis("found", "share of errors found", axis={"format": "%"}))
    return {
        "deciles": Chart(
            _lines(deciles, tenths, axis("accuracy", "accuracy", axis={"format": "%"})),
            "Accuracy by decile of each signal",
            f"By contribution, accuracy goes from {100 * first:.1f} % in the lowest tenth to "
            f"{100 * last:.1f} % in the highest. AUROC: {areas}.",
            "A useful signal rises from left to right. The contribution and the three best other signals are "
            "shown; the table has all.",
        ),
        "errors": Chart(
            {"height": _HEIGHT, "layer": [diagonal(), lines]},
            "Errors found by looking at the lowest documents first",
            f"Errors in the lowest tenth: {tenth}. Chance finds 10 %.",
            "The further above the dashed line, the more errors a reader finds per document looked at.",
        ),
    }


def _lines(
    rows: Sequence[Found], x: dict[str, Any], y: dict[str, Any], *, bars: bool = False
) -> dict[str, Any]:
    """One line a series, in its own colour and dash, with bars from ``low`` to ``high`` if asked."""
    names = list(dict.fromkeys(row["series"] for row in rows))
    scale = {"domain": names, "range": [f"var(--series-{i + 1})" for i in range(len(names))]}
    colour = {"field": "series", "type": "nominal", "title": None, "scale": scale}
    if len(names) == 1:
        colour["legend"] = None
    dash = {**colour, "scale": {"domain": names}}
    tooltip = [{"field": "series", "type": "nominal"}, *({"field": a["field"]} for a in (x, y))]
    line = {
        "mark": {"type": "line", "point": {"size": 45, "filled": True}},
        "encoding": {"x": x, "y": y, "color": colour, "strokeDash": dash, "tooltip": tooltip},
    }
    bar = {
        "mark": "rule",
        "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": colour},
    }
    return {"data": {"values": list(rows)}, "height": _HEIGHT, "layer": [*([bar] if bars else []), line]}


def diagonal() -> dict[str, Any]:
    """The dashed line from (0, 0) to (1, 1)."""
    ends = {"values": [{"a": 0, "b": 0}, {"a": 1, "b": 1}]}
    mark = {"type": "line", "color": "var(--muted)", "strokeDash": [4, 4], "strokeWidth": 1.5}
    encoding = {key: {"field": field, "type": "quantitative"} for key, field in (("x", "a"), ("y", "b"))}
    return {"data": ends, "mark": mark, "encoding": encoding}
