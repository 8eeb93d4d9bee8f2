"""Charts of a page: Altair's specification in the page's colours, and the script that draws it."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Mapping
from typing import Any

from lmeval_dispersion.report.document import Chart

_AUTOMATIC = re.compile(r"\b(param|view|concat|selector)_\d+\b")

# Colours are the page's CSS variables (page.css), which change with dark mode and print.
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
    "header": {"labelColor": "var(--ink)", "titleColor": "var(--ink)", "labelFontSize": 12},
    "legend": {
        "labelColor": "var(--ink)",
        "labelFontSize": 12,
        "labelLimit": 260,
        "orient": "top",
        "symbolOpacity": 1,
        "titleColor": "var(--muted)",
        "titleFontSize": 12,
        "titleFontWeight": "normal",
    },
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


def chart_spec(chart: Chart) -> dict[str, Any]:
    """The chart's Vega-Lite specification in the page's colours and width, with null for NaN and infinity.

    Raises:
        ValueError: The chart's data are not inside it.
    """
    with contextlib.suppress(ModuleNotFoundError):
        import altair

        altair.data_transformers.enable("default", max_rows=None)
    spec: dict[str, Any] = _finite(_counted_from_one(chart.specification(), {}))
    spec["description"] = chart.description
    spec["config"] = _merged(_CHART_CONFIG, spec.get("config", {}))
    if ("mark" in spec or "layer" in spec) and "width" not in spec:
        spec["width"] = "container"
        spec.setdefault("autosize", {"type": "fit-x", "contains": "padding"})
        # Vega-Lite's own count gives a wide chart a label every 40 pixels.
        spec["config"].setdefault("axisXQuantitative", {"tickCount": {"expr": "max(4, ceil(width / 90))"}})
    return spec


def _counted_from_one(node: Any, names: dict[str, str]) -> Any:
    """The same specification with Altair's automatic names counted anew; data are left alone.

    Altair counts them through the whole process, so that equal charts would give unequal bytes.

    Raises:
        ValueError: Data are somewhere else, at a URL.
    """
    if isinstance(node, str):
        return _AUTOMATIC.sub(
            lambda found: names.setdefault(found[0], f"{found[1]}_{len(names) + 1}"),
            node,
        )
    if isinstance(node, list):
        return [_counted_from_one(item, names) for item in node]
    if isinstance(node, dict):
        if isinstance(node.get("data"), dict) and "url" in node["data"]:
            raise ValueError(f"expected a chart with its data inside, got data at {node['data']['url']}")
        return {
            key: value if key in ("datasets", "values") else _counted_from_one(value, names)
            for key, value in node.items()
        }
    return node


def _finite(node: Any) -> Any:
    """The same tree with None where JSON has no number."""
    if isinstance(node, float):
        return node if math.isfinite(node) else None
    if isinstance(node, list):
        return [_finite(item) for item in node]
    return {key: _finite(value) for key, value in node.items()} if isinstance(node, dict) else node


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
        merged[key] = _merged(base[key], value) if both else value
    return merged


@functools.cache
def vega_script() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, in the version that the installed Altair writes for."""
    import altair
    import vl_convert

    version = ".".join(altair.SCHEMA_VERSION.split(".")[:2])
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=version)
    return bundle.replace("</script", "<\\/script")
