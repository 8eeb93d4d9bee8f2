"""Charts of a page: Altair's specification in the page's colours, and the script that draws it."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import altair

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
    "point": {"filled": True, "size": 60},
    "range": {
        "category": [f"var(--series-{i})" for i in range(1, 9)],
        "diverging": {"scheme": "blueorange"},
        "heatmap": {"scheme": "viridis"},
        "ramp": {"scheme": "viridis"},
    },
}


def chart_spec(chart: altair.TopLevelMixin, description: str) -> dict[str, Any]:
    """The chart's Vega-Lite specification in the page's colours and width."""
    import altair

    with altair.data_transformers.enable("default", max_rows=None):
        spec: dict[str, Any] = chart.to_dict()
    text = json.dumps(spec, sort_keys=True)
    if '"url":' in text:
        raise ValueError("expected a chart with its data inside, got one that refers to a url")
    # Altair numbers names by a counter of the process: count from 1, so that equal charts give equal bytes.
    names = dict.fromkeys(re.findall(r"\b(?:param|view|concat|selector)_\d+", text))
    order = {name: f"{name.rsplit('_', 1)[0]}_{position}" for position, name in enumerate(names, 1)}
    text = re.sub(r"\b(?:param|view|concat|selector)_\d+", lambda name: order[name[0]], text)
    spec = json.loads(text)
    spec["description"] = description
    spec["config"] = _merged(_CHART_CONFIG, spec.get("config", {}))
    if ("mark" in spec or "layer" in spec) and "width" not in spec:
        spec["width"] = "container"
        spec.setdefault("autosize", {"type": "fit-x", "contains": "padding"})
    return spec


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
