"""The charts of an audit, with what each means; Altair is imported when one is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lmeval_dispersion.audit.reports.conclusions import interval_text
from lmeval_dispersion.report import Chart

if TYPE_CHECKING:
    import altair

_HEIGHT = 320
_SLICE_HEIGHT, _WIDTH = 230, 1000  # of the first chart, which stands in the first screen with the answer
_NAMED, _OUTLIERS = 15, 6  # slices named in a chart: all of so few, else the ones farthest out
_SERIES = ["var(--series-8)", "var(--series-2)", "var(--series-1)"]  # of batches, the likest to use last
_WORTH = ("worth", "worth_low", "worth_high", "mae")
_PROTOCOLS = {"whole": "whole test part", "slices": "one batch a slice", "mixtures": "artificial mixtures"}


def slice_chart(name: str, table: Mapping[str, Any]) -> Chart | None:
    """Accuracy against dispersion, one point a slice with error bars; None below three usable slices."""
    rows = [
        {
            **row,
            "low": row["dispersion"] - 1.96 * row["dispersion_se"],
            "high": row["dispersion"] + 1.96 * row["dispersion_se"],
        }
        for row in table["rows"]
        if row["documents"] >= 3 and row["labelled"] >= 1
    ]
    if len(rows) < 3 or any(math.isnan(row["dispersion_se"]) for row in rows):
        return None
    lowest = min(rows, key=lambda row: float(row["dispersion"]))
    highest = max(rows, key=lambda row: float(row["dispersion"]))
    found = table["association"]
    if "spearman" in found:
        order = f"{interval_text(found)}, over {found['slices']} slices"
    else:
        order = f"no correlation: {found['missing']}"
    return Chart(
        partial(_slice_points, name, rows),
        f"Accuracy against dispersion by {name}",
        f"{len(rows)} points. {order}. Least dispersed: {lowest['slice']}, {_where(lowest)}; "
        f"most dispersed: {highest['slice']}, {_where(highest)}.",
        "Bars are 95 % intervals. If points rise to the right, the slices that the model spreads out are "
        "the ones it answers better. Slices also differ in topic and length, so one slice below another is "
        "a place to look, not a proof.",
    )


def named_slices(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The slices whose names stand in the chart: all up to fifteen, else the six farthest out."""
    if len(rows) <= _NAMED:
        return list(rows)
    points = np.array([[row["dispersion"], row["accuracy"]] for row in rows])
    scale = np.where(points.std(axis=0) > 0, points.std(axis=0), 1)
    away = np.square((points - points.mean(axis=0)) / scale).sum(axis=1)
    return [rows[i] for i in np.argsort(-away, kind="stable")[:_OUTLIERS]]


def _slice_points(name: str, rows: Sequence[Mapping[str, Any]]) -> altair.TopLevelMixin:
    import altair as alt

    base = alt.Chart(alt.Data(values=_plain(rows)))
    title = "dispersion (mean cosine distance)"
    x = alt.X("dispersion:Q", title=title, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=6))
    y = alt.Y("accuracy:Q", title="accuracy", axis=alt.Axis(format="%"), scale=alt.Scale(zero=False))
    hover = [
        alt.Tooltip("slice:N", title=name),
        alt.Tooltip("dispersion:Q", format=".4f"),
        alt.Tooltip("accuracy:Q", format=".1%"),
        alt.Tooltip("documents:Q"),
    ]
    faint = {"opacity": 0.35, "color": "var(--series-1)"}
    low = alt.X("low:Q", title=title, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=6))
    across = base.mark_rule(**faint).encode(x=low, x2="high:Q", y=y)
    up = base.mark_rule(**faint).encode(x=x, y="accuracy_low:Q", y2="accuracy_high:Q")
    points = base.mark_point(color="var(--series-1)", size=70).encode(x=x, y=y, tooltip=hover)
    labels = [
        alt.Chart(alt.Data(values=_plain([row])))
        .mark_text(align=align, dx=8 if align == "left" else -8, dy=dy, fontSize=11, color="var(--ink)")
        .encode(x=x, y=y, text="slice:N")
        for row, align, dy in _label_places(named_slices(rows), rows)
    ]
    return alt.layer(across, up, points, *labels).properties(height=_SLICE_HEIGHT)


def _label_places(
    named: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any], Literal["left", "right"], int]]:
    """Side and height of every name: towards the middle, where there is room, and clear of other names."""
    left, right = min(row["low"] for row in rows), max(row["high"] for row in rows)
    low, high = min(row["accuracy_low"] for row in rows), max(row["accuracy_high"] for row in rows)
    taken: list[tuple[float, float, float]] = []
    found = []
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
        found.append((row, align, dy))
    return found


def mixture_charts(part: Mapping[str, Any]) -> list[Chart]:
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
    charts = []
    for key, title in titles.items():
        rows = _curve_rows("all documents", part["curve"], key)
        beside = [] if key != "dispersion" else [
            row
            for name, found in part["inside"].items()
            for row in _curve_rows(f"inside {name}s", found.get("curve", ()), key)
        ]  # fmt: skip
        trend = part[f"{key}_trend"]
        if len(rows) < 2 or "missing" in trend:
            continue
        charts.append(
            Chart(
                partial(_curve, [*rows, *beside], title),
                f"{title.capitalize()} of mixtures, by their share of correct documents",
                f"From {rows[0]['value']:.4g} at {rows[0]['target']} % to {rows[-1]['value']:.4g} at "
                f"{rows[-1]['target']} %; {trend['shape']}, Spearman {trend['spearman']:.2f}.",
                meaning[key],
            )
        )
    return charts


def calibration_chart(part: Mapping[str, Any]) -> Chart:
    """The estimate of every slice that was held out against its true accuracy."""
    points = [{**point, "kind": "slice held out"} for point in part["points"]]
    return Chart(
        partial(_predicted_against_true, points, ["slice held out"], [_SERIES[-1]]),
        "Accuracy estimated without a slice's labels against its true accuracy",
        f"{len(points)} slices, each estimated by a fit to the others: {part['verdict']}.",
        "On the dashed line the estimate is right. An upright line of points is the trivial predictor, the "
        "labelled accuracy for every slice. True accuracies scatter by sampling, most in small slices.",
    )


def paper_protocol_chart(part: Mapping[str, Any]) -> Chart:
    """Predicted against true accuracy of every test batch of the paper's protocol."""
    texts = [
        f"{_PROTOCOLS[name]}: {judged.get('missing') or judged['verdict']}"
        for name, judged in part["protocols"].items()
    ]
    points = [{**point, "kind": _PROTOCOLS[point["protocol"]]} for point in part["points"]]
    kinds = [kind for kind in reversed(_PROTOCOLS.values()) if any(p["kind"] == kind for p in points)]
    return Chart(
        partial(_predicted_against_true, points, kinds, _SERIES[-len(kinds) :]),
        "The paper's protocol: accuracy predicted from dispersion against true accuracy, documents held out",
        f"{len(points)} batches over {part['seeds']} splits. " + "; ".join(texts) + ".",
        "On the dashed line the prediction is right. A cloud that lies flat or upright says that dispersion "
        "carries no accuracy there. Artificial mixtures are the easy case; batches of real slices are what a "
        "user will meet.",
    )


def _predicted_against_true(
    points: Sequence[Mapping[str, Any]], kinds: Sequence[str], colours: Sequence[str]
) -> altair.TopLevelMixin:
    import altair as alt

    base = alt.Chart(alt.Data(values=_plain(points)))
    whole = alt.Scale(domain=[0, 1])
    x = alt.X("predicted:Q", title="predicted accuracy", axis=alt.Axis(format="%"), scale=whole)
    y = alt.Y("true:Q", title="true accuracy", axis=alt.Axis(format="%"), scale=whole)
    legend = alt.Legend() if len(kinds) > 1 else None
    named = "slice" if "slice" in points[0] else "kind"
    marks = base.mark_point(size=45, opacity=0.65).encode(
        x=x,
        y=y,
        color=alt.Color(
            "kind:N", title="test batch", scale=alt.Scale(domain=kinds, range=colours), legend=legend
        ),
        shape=alt.Shape("kind:N", title="test batch", scale=alt.Scale(domain=kinds), legend=legend),
        tooltip=[
            alt.Tooltip(f"{named}:N", title="batch"),
            alt.Tooltip("predicted:Q", format=".1%"),
            alt.Tooltip("true:Q", format=".1%"),
        ],
    )
    return alt.layer(_diagonal(), marks).properties(height=_HEIGHT)


def ranking_charts(part: Mapping[str, Any]) -> list[Chart]:
    """Accuracy by decile, and the share of errors found against the share of documents looked at."""
    signals = [row for row in part["signals"] if "auroc" in row]
    if not signals or signals[0] is not part["signals"][0]:
        return []
    ours = signals[0]
    shown = [ours, *sorted(signals[1:], key=lambda row: -float(row["auroc"]))[:3]]
    areas = "; ".join(f"{row['signal']} {row['auroc']:.3f}" for row in shown)
    tenth = "; ".join(f"{row['signal']} {100 * row['error_share']['10']:.0f} %" for row in shown)
    first, last = ours["deciles"][0]["accuracy"], ours["deciles"][-1]["accuracy"]
    return [
        Chart(
            partial(_decile_lines, shown),
            "Accuracy by decile of each signal",
            f"By contribution, accuracy goes from {100 * first:.1f} % in the lowest tenth to "
            f"{100 * last:.1f} % in the highest. AUROC: {areas}.",
            "A useful signal rises from left to right. The contribution and the three best other signals are "
            "shown; the table has all.",
        ),
        Chart(
            partial(_error_lines, shown),
            "Errors found by looking at the lowest documents first",
            f"Errors in the lowest tenth: {tenth}. Chance finds 10 %.",
            "The further above the dashed line, the more errors a reader finds per document looked at.",
        ),
    ]


def _decile_lines(signals: Sequence[Mapping[str, Any]]) -> altair.TopLevelMixin:
    import altair as alt

    rows = [
        {"signal": row["signal"], "decile": i, **decile}
        for row in signals
        for i, decile in enumerate(row["deciles"], 1)
    ]
    return (
        _signal_lines(signals, rows)
        .encode(
            x=alt.X(
                "decile:O", title="tenth of the documents, lowest signal first", axis=alt.Axis(labelAngle=0)
            ),
            y=alt.Y("accuracy:Q", title="accuracy", axis=alt.Axis(format="%"), scale=alt.Scale(zero=False)),
            tooltip=["signal:N", "decile:O", alt.Tooltip("accuracy:Q", format=".1%"), "documents:Q"],
        )
        .properties(height=_HEIGHT)
    )


def _error_lines(signals: Sequence[Mapping[str, Any]]) -> altair.TopLevelMixin:
    import altair as alt

    rows = [
        {"signal": row["signal"], "share": share / 100, "found": value}
        for row in signals
        for share, value in ((0, 0.0), *((int(s), v) for s, v in row["error_share"].items()), (100, 1.0))
    ]
    lines = _signal_lines(signals, rows).encode(
        x=alt.X("share:Q", title="share of documents looked at", axis=alt.Axis(format="%")),
        y=alt.Y("found:Q", title="share of errors found", axis=alt.Axis(format="%")),
        tooltip=["signal:N", alt.Tooltip("share:Q", format=".0%"), alt.Tooltip("found:Q", format=".1%")],
    )
    return alt.layer(_diagonal(), lines).properties(height=_HEIGHT)


def _signal_lines(signals: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> Any:
    """One line a signal, in its own colour and dash."""
    import altair as alt

    names = [row["signal"] for row in signals]
    colours = [f"var(--series-{i + 1})" for i in range(len(names))]
    lines = alt.Chart(alt.Data(values=_plain(rows)))
    return lines.mark_line(point=alt.OverlayMarkDef(size=45, filled=True)).encode(
        color=alt.Color("signal:N", title=None, scale=alt.Scale(domain=names, range=colours)),
        strokeDash=alt.StrokeDash("signal:N", title=None, scale=alt.Scale(domain=names)),
    )


def _diagonal() -> Any:
    import altair as alt

    line = alt.Chart(alt.Data(values=[{"a": 0, "b": 0}, {"a": 1, "b": 1}]))
    dashed = line.mark_line(color="var(--muted)", strokeDash=[4, 4], strokeWidth=1.5)
    return dashed.encode(x="a:Q", y="b:Q")


def difference_chart(slices: Sequence[Mapping[str, Any]]) -> Chart | None:
    """Differences of dispersion with their intervals, a row a slice; None where none is known."""
    rows = [
        {
            "slice": row["slice"],
            "difference": row["dispersion_difference"],
            "low": row["dispersion_low"],
            "high": row["dispersion_high"],
        }
        for row in slices
        if math.isfinite(row["dispersion_low"])
    ]
    clear = sum(row["low"] > 0 or row["high"] < 0 for row in rows)
    if not rows:
        return None
    return Chart(
        partial(_differences, rows),
        "Difference of dispersion, slice by slice; the dashed line is no difference",
        f"{clear} of {len(rows)} intervals leave out 0; by chance alone about one in twenty does.",
    )


def _differences(rows: Sequence[Mapping[str, Any]]) -> altair.TopLevelMixin:
    import altair as alt

    y = alt.Y("slice:N", title=None, sort=None, axis=alt.Axis(labelOverlap=False))
    base = alt.Chart(alt.Data(values=_plain(rows))).encode(y=y)
    bars = base.mark_rule().encode(x=alt.X("low:Q", title="Difference, with 95 % interval"), x2="high:Q")
    points = base.mark_point(filled=True).encode(
        x="difference:Q", tooltip=["slice:N", "difference:Q", "low:Q", "high:Q"]
    )
    zero = alt.Chart(alt.Data(values=[{"x": 0.0}])).mark_rule(strokeDash=[4, 4]).encode(x="x:Q")
    return alt.layer(zero, bars, points).properties(height=18 * len(rows) + 20)


def prediction_chart(slices: Sequence[Mapping[str, Any]], level: str, labelled: float) -> Chart | None:
    """Estimated accuracies with their intervals, a row a slice; None where there is no estimate."""
    keys = ("slice", "predicted", "low", "high", "true")
    rows = [{key: row[key] for key in keys} for row in slices if row["reason"] is None]
    if not rows:
        return None
    known = [row for row in rows if not math.isnan(row["true"])]
    inside = sum(row["low"] <= row["true"] <= row["high"] for row in known)
    told = f"{inside} of {len(known)} known accuracies lie in their interval. " if known else ""
    return Chart(
        partial(_predictions, rows, level, labelled),
        "Estimated accuracy, slice by slice",
        f"{told}The labelled documents had {labelled:.3f}.",
        f"Dots are estimates with their {level} intervals, "
        f"{'crosses the accuracies that are known, ' if known else ''}"
        "the dashed line is the labelled accuracy.",
        name="estimates",
    )


def _predictions(rows: Sequence[Mapping[str, Any]], level: str, labelled: float) -> altair.TopLevelMixin:
    import altair as alt

    y = alt.Y("slice:N", title=None, sort=None, axis=alt.Axis(labelOverlap=False))
    base = alt.Chart(alt.Data(values=_plain(rows))).encode(y=y)
    scale = alt.Scale(zero=False)
    bars = base.mark_rule().encode(
        x=alt.X("low:Q", title=f"accuracy, with {level} interval", scale=scale), x2="high:Q"
    )
    tooltip = ["slice:N", "predicted:Q", "low:Q", "high:Q", "true:Q"]
    points = base.mark_point(filled=True).encode(x="predicted:Q", tooltip=tooltip)
    known = (
        base.transform_filter("isValid(datum.true)")
        .mark_point(shape="cross", angle=45, filled=True, color="var(--series-2)")
        .encode(x="true:Q", tooltip=tooltip)
    )
    line = alt.Chart(alt.Data(values=[{"x": labelled}])).mark_rule(strokeDash=[4, 4]).encode(x="x:Q")
    return alt.layer(line, bars, known, points).properties(height=18 * len(rows) + 20)


def worth_chart(rows: Sequence[Mapping[str, Any]], alone: str) -> Chart:
    """What estimates are worth in labels, a row each with its interval; ``alone`` names the trivial one."""
    trivial = next(row for row in rows if row["estimator"] == alone)
    best = max(rows, key=lambda row: float(row["worth"]))
    above = sum(bool(row["better"]) for row in rows)
    return Chart(
        partial(_worths, rows, trivial["worth"]),
        "Labelled documents a slice that each estimate is worth",
        f"{above} of {len(rows) - 1} estimates are shown to beat the {alone}, which is worth "
        f"{trivial['worth']:.0f}. The largest worth is that of {best['estimator']}: {best['worth']:.0f} "
        f"({best['worth_low']:.0f} to {best['worth_high']:.0f}).",
        f"Bars are 95 % intervals over slices, the dashed line is the {alone}; the estimates with a filled "
        "dot are shown to beat it.",
        name="worth",
    )


def _worths(rows: Sequence[Mapping[str, Any]], alone: float) -> altair.TopLevelMixin:
    import altair as alt

    y = alt.Y("estimator:N", title=None, sort=None, axis=alt.Axis(labelOverlap=False, labelLimit=260))
    base = alt.Chart(alt.Data(values=_plain(rows))).encode(y=y)
    bars = base.mark_rule(color="var(--series-1)").encode(
        x=alt.X("worth_low:Q", title="labelled documents a slice, with 95 % interval"), x2="worth_high:Q"
    )
    tooltip = ["estimator:N", *(alt.Tooltip(f"{key}:Q", format=".1f") for key in _WORTH), "better:N"]
    points = base.mark_point(
        filled=True, size=70, opacity=1, stroke="var(--series-1)", strokeWidth=1.5
    ).encode(
        x="worth:Q",
        fill=alt.condition("datum.better", alt.value("var(--series-1)"), alt.value("var(--paper)")),
        tooltip=tooltip,
    )
    line = alt.Chart(alt.Data(values=[{"x": alone}])).mark_rule(strokeDash=[4, 4], color="var(--muted)")
    return alt.layer(line.encode(x="x:Q"), bars, points).properties(height=22 * len(rows) + 20)


def _curve_rows(series: str, curve: Sequence[Mapping[str, Any]], key: str) -> list[dict[str, Any]]:
    return [
        {
            "series": series,
            "target": point["target_accuracy"],
            "value": point[key],
            "low": point[key] - _zero(point[f"{key}_se"]),
            "high": point[key] + _zero(point[f"{key}_se"]),
        }
        for point in curve
        if not math.isnan(point[key])
    ]


def _curve(rows: Sequence[Mapping[str, Any]], title: str) -> altair.TopLevelMixin:
    import altair as alt

    names = list(dict.fromkeys(row["series"] for row in rows))
    colours = [f"var(--series-{i + 1})" for i in range(len(names))]
    colour = alt.Color(
        "series:N",
        title=None,
        scale=alt.Scale(domain=names, range=colours),
        legend=alt.Legend() if len(names) > 1 else None,
    )
    base = alt.Chart(alt.Data(values=_plain(rows)))
    x = alt.X("target:Q", title="correct documents (%)", axis=alt.Axis(values=list(range(0, 101, 20))))
    y = alt.Y("value:Q", title=title, scale=alt.Scale(zero=False))
    bars = base.mark_rule().encode(
        x=x, y=alt.Y("low:Q", scale=alt.Scale(zero=False)), y2="high:Q", color=colour
    )
    line = base.mark_line(point=alt.OverlayMarkDef(size=50, filled=True)).encode(
        x=x,
        y=y,
        color=colour,
        tooltip=[
            "series:N",
            alt.Tooltip("target:Q", title="correct (%)"),
            alt.Tooltip("value:Q", title=title, format=".4f"),
        ],
    )
    return alt.layer(bars, line).properties(height=_HEIGHT - 60)


def _where(row: Mapping[str, Any]) -> str:
    return f"dispersion {row['dispersion']:.4f}, accuracy {100 * row['accuracy']:.1f} %"


def _plain(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows with seven significant digits, NaN as null, and nothing nested."""
    return [
        {
            key: (float(f"{value:.7g}") if math.isfinite(value) else None)
            if isinstance(value, float)
            else value
            for key, value in row.items()
            if not isinstance(value, list | dict)
        }
        for row in rows
    ]


def _zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value
