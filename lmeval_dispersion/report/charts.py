"""Charts for HTML reports: a Vega-Lite specification as a picture (SVG) in the report's colours."""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmeval_dispersion.report.cells import json_value
from lmeval_dispersion.report.document import Chart

WIDTHS = {"wide": 860, "narrow": 340}
_VEGA_LITE = "6.4"
_PIXELS = 2  # of a PNG, for a pixel of the page
_CAPTION = 100  # characters in a line of the caption above a picture
_COLOUR = re.compile(r"var\((--[\w-]+)\)")
_IDENTIFIERS = re.compile(r'(\bid="|url\(#|href="#)')

# Colours are CSS variables of the page (page.css), which change in dark mode and print.
_CHART_CONFIG: dict[str, Any] = {
    "background": "transparent",
    "font": "system-ui, sans-serif",
    "view": {"stroke": "transparent"},
    "axis": {
        "domainColor": "var(--axis)",
        "gridColor": "var(--grid)",
        "labelColor": "var(--muted)",
        "labelFlush": False,
        "labelFontSize": 12,
        "labelLimit": 260,
        "labelOverlap": "parity",
        "labelSeparation": 8,
        "tickColor": "var(--axis)",
        "titleColor": "var(--ink)",
        "titleFontSize": 12,
        "titleFontWeight": "normal",
    },
    # A reader's font may be wider than the font that labels are measured with.
    "axisY": {"titlePadding": 12},
    "header": {"labelColor": "var(--ink)", "titleColor": "var(--ink)", "labelFontSize": 12},
    "legend": {
        "columnPadding": 28,
        "labelColor": "var(--ink)",
        "labelFontSize": 12,
        "labelLimit": 260,
        "orient": "top",
        "symbolOpacity": 1,
        "titleColor": "var(--muted)",
        "titleFontSize": 12,
        "titleFontWeight": "normal",
    },
    "tooltipFormat": {"numberFormat": ".4~f"},  # the tables' digits
    "title": {"color": "var(--ink)", "subtitleColor": "var(--muted)", "anchor": "start"},
    "mark": {"color": "var(--series-1)"},
    "text": {"color": "var(--ink)"},
    "rule": {"color": "var(--axis)"},
    "errorbar": {"color": "var(--ink)"},
    "line": {"strokeWidth": 2},
    "point": {"filled": True, "opacity": 1, "size": 60},
    "range": {
        "category": [f"var(--series-{i})" for i in range(1, 9)],
        "diverging": {"scheme": "blueorange"},
        "heatmap": {"scheme": "viridis"},
        "ramp": {"scheme": "viridis"},
    },
}
_NARROW: dict[str, Any] = {"axis": {"labelLimit": 110}, "legend": {"columns": 1}}


def chart_svg(chart: Chart, name: str, width: str) -> str:
    """Draw a chart as SVG, with ids that are unique in the HTML report.

    A single chart has the width of :data:`WIDTHS`; charts side by side share that width, or are
    stacked if it is narrow. In the narrow width, the names next to points are left out, since they
    would overlap; the names of lines stay.

    Args:
        chart: The chart.
        name: The chart's anchor in the HTML report, with which its ids begin.
        width: A key of :data:`WIDTHS`.
    """
    import vl_convert

    spec = chart_spec(chart, width)
    svg: str = vl_convert.vegalite_to_svg(spec, vl_version=_VEGA_LITE)
    # A legend is one row, unless it is wider than the picture.
    for columns in (6, 4, 3, 2, 1):
        drawn = re.search(r'width="([\d.]+)"', svg)
        if drawn is None or float(drawn[1]) <= WIDTHS[width] + 1:
            break
        spec["config"]["legend"]["columns"] = columns
        svg = vl_convert.vegalite_to_svg(spec, vl_version=_VEGA_LITE)
    return _IDENTIFIERS.sub(rf"\g<1>{name}-{width}-", svg)


def picture(chart: Chart, form: str) -> bytes:
    """Draw a chart with its caption above it, and return the bytes of the picture's file.

    The colours are those of an HTML report on a light background.

    ``form`` is ``svg``, ``png`` or ``pdf``.
    """
    import vl_convert

    title = textwrap.wrap(chart.caption, _CAPTION)
    titled = replace(chart, draw={**chart.specification(), "title": {"text": title}})
    svg = _COLOUR.sub(lambda match: _light_colours()[match[1]], chart_svg(titled, "chart", "wide"))
    paper = f'><rect width="100%" height="100%" fill="{_light_colours()["--paper"]}"/>'
    svg = svg.replace(">", paper, 1)
    if form == "svg":
        return svg.encode("utf-8")
    if form == "pdf":
        pdf: bytes = vl_convert.svg_to_pdf(svg)
        return pdf
    png: bytes = vl_convert.svg_to_png(svg, scale=_PIXELS)
    return png


@functools.cache
def _light_colours() -> dict[str, str]:
    """The page's colours outside dark mode and print, by the names of their CSS variables."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    light = style.partition("}")[0]
    return dict(re.findall(r"(--[\w-]+): (#\w+);", light))


def chart_spec(chart: Chart, width: str = "wide") -> dict[str, Any]:
    """Return a chart's Vega-Lite specification in the HTML report's colours.

    ``width`` is a key of :data:`WIDTHS`, on which the sizes of labels and panels depend.
    """
    spec = chart.specification()
    layers = spec.get("layer", [])
    config = _CHART_CONFIG
    if width == "narrow":
        config = _merged(config, _NARROW)
        if layers and not any(_is(layer, "line") for layer in layers):
            spec["layer"] = [layer for layer in layers if not _is(layer, "text")]
    spec = dict(json_value(spec))  # JSON has no NaN
    spec["config"] = _merged(config, spec.get("config", {}))
    spec["description"] = chart.description
    # A reader's font may be wider than the font that the picture was measured with.
    spec.setdefault("padding", {"left": 18, "right": 18, "top": 5, "bottom": 5})
    whole = WIDTHS[width]
    if "mark" in spec or "layer" in spec:
        spec["width"] = min(whole, spec.get("width", whole))
        spec.setdefault("autosize", {"type": "fit-x", "contains": "padding"})
        # Vega-Lite's default gives a wide chart a label every 40 pixels.
        spec["config"].setdefault("axisXQuantitative", {"tickCount": max(4, spec["width"] // 90)})
    elif "facet" in spec and "spec" in spec:
        columns = min(spec.get("columns", 2), 3)
        if width == "narrow":
            columns = 1
        spec["columns"] = columns
        spec["spec"] = {**spec["spec"], "width": whole // columns - 75}
    return spec


def _is(layer: Mapping[str, Any], kind: str) -> bool:
    mark = layer.get("mark")
    return mark == kind or (isinstance(mark, Mapping) and mark.get("type") == kind)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            value = _merged(base[key], value)
        merged[key] = value
    return merged
