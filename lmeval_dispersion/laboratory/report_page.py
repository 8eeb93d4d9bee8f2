"""The HTML page of one run: plots, tables, what each number means and does not."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd

from lmeval_dispersion.laboratory import plots
from lmeval_dispersion.laboratory.report import known_columns, shown_tables
from lmeval_dispersion.laboratory.wording import COLUMNS, LEADS, LIMITS, TITLES
from lmeval_dispersion.report.page import Column, Page


def report_page(result: Any) -> Page:
    """The page of ``result``, of any of the four analyses."""
    manifest = result.manifest
    models = manifest.get("models") or [manifest["model"]]
    names = ", ".join(str(model.get("model", model["name"])) for model in models)
    page = Page(f"{TITLES[result.kind]}: {names}", LEADS[result.kind])
    page.section("Plots")
    for chart, caption, description in _charts(result):
        page.chart(chart, caption=caption, description=description)
    page.section("Tables")
    for caption, frame in shown_tables(result):
        page.table(frame, page_columns(frame), caption=caption)
    page.section("What these numbers do not say").note(LIMITS[result.kind], "warning")
    page.section("What was run")
    for model in models:
        page.facts(model)
    page.facts({key: _plain(value) for key, value in manifest["settings"].items() if key != "models"})
    page.facts({**manifest["versions"], "created": manifest["created"]})
    return page


def page_columns(frame: pd.DataFrame) -> list[Column]:
    """The columns of a frame that a page shows, with headings and how to read them."""
    return [Column(name, *COLUMNS[name][:2], hint=COLUMNS[name][2]) for name in known_columns(frame)]


def _charts(result: Any) -> list[tuple[Any, str, str]]:
    if result.kind == "law":
        signs = result.correlations.query("measure == 'dispersion'")["pearson"]
        about = f"Pearson r lies between {signs.min():.2f} and {signs.max():.2f} over panels."
        charts = [(result.plot(), "Mean perplexity and dispersion of every chosen bin", about)]
        if result.correlations["layer"].nunique() > 1:
            layers = plots.law_layers(result.correlations)
            charts.append((layers, "Pearson r by layer, with 95 % intervals over bins", about))
        return charts
    if result.kind == "condensation":
        trend = "; ".join(f"{row.model}: Spearman {row.spearman:+.2f}" for row in result.summary.itertuples())
        lines = plots.condensation_lines(result.layers)
        return [
            (lines, "Mean cosine similarity by depth", f"One line a model. {trend}."),
            (result.plot(), "How the similarities are distributed at every depth", f"Heat map. {trend}."),
        ]
    if result.kind == "sublayers":
        best = result.recommendation.iloc[0]
        about = (
            f"{best['layer']} lies above {best['second']} in {best['draws_won']} of {best['draws']} draws."
        )
        return [(result.plot(), "Dispersion of every draw", about)]
    about = "; ".join(
        f"{row.model}, {row.layer}: within {row.within:.3f}, between {row.between:.3f}"
        for row in result.summary.itertuples()
    )
    return [(result.plot(), "Distances within and between clusters", about)]


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (dict, list)) else value
