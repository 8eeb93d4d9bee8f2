"""A result as a table for the terminal, JSON, CSV or one HTML page."""

from __future__ import annotations

import json
import math
import textwrap
from typing import Any

import pandas as pd

from lmeval_dispersion.laboratory.wording import COLUMNS, LEADS, LIMITS, TITLES

FORMATS = ("table", "json", "csv", "html")
REPORT_FORMAT = "dispersion-lab-report/1"


def report(result: Any, output_format: str) -> str:
    """``result`` (of any of the four analyses) in one of :data:`FORMATS`, ending in a newline.

    JSON holds the manifest and every table; CSV the frame of ``to_frame()``.
    """
    if output_format == "json":
        return report_json(result)
    if output_format == "csv":
        return str(result.to_frame().to_csv(index=False, float_format="%.9g"))
    if output_format == "html":
        from lmeval_dispersion.laboratory.report_page import report_page

        return report_page(result).html()
    parts = [f"{TITLES[result.kind]}: {LEADS[result.kind]}"]
    parts += [f"{caption}\n{text_table(frame)}" for caption, frame in shown_tables(result)]
    return "\n\n".join([*parts, textwrap.fill(LIMITS[result.kind], 100)]) + "\n"


def report_json(result: Any) -> str:
    """Manifest and tables; NaN is null."""
    document = {"format": REPORT_FORMAT, "kind": result.kind, "manifest": result.manifest}
    document["tables"] = {name: records(frame) for name, frame in tables_of(result).items()}
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def tables_of(result: Any) -> dict[str, pd.DataFrame]:
    """Every table of a result by its name."""
    return {name: value for name, value in vars(result).items() if isinstance(value, pd.DataFrame)}


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as plain values, undefined numbers as None."""
    rows = []
    for row in frame.to_dict("records"):
        plain = {str(key): value.item() if hasattr(value, "item") else value for key, value in row.items()}
        rows.append({key: None if _undefined(value) else value for key, value in plain.items()})
    return rows


def shown_tables(result: Any) -> list[tuple[str, pd.DataFrame]]:
    """The tables that a reader sees, with captions: what matters, and not every row of a big one."""
    if result.kind == "law":
        chosen = result.correlations.rename(columns={"perplexity": "perplexity_kind"})
        return [
            ("Correlation of the bins' mean perplexity with each measure", chosen),
            ("All texts", result.overall),
        ]
    if result.kind == "sublayers":
        shown = [("Recommended key", result.recommendation), ("Dispersion of draws", result.summary)]
        if result.knn is not None:
            shown.append(("kNN-LM from each key, on segments that neither built nor tuned it", result.knn))
            shown.append(("Difference of the keys, nats a token, first minus second", result.knn_differences))
        return shown
    if result.kind == "condensation":
        return [("Trend with depth", result.summary), ("Mean cosine similarity of two tokens", result.layers)]
    return [("Distances", result.summary), ("The n-grams", result.ngrams.head(20))]


def known_columns(frame: pd.DataFrame) -> list[str]:
    """The columns that are shown: those with a heading, a reason only where there is one."""
    return [
        name
        for name in frame.columns
        if name in COLUMNS and (name != "reason" or (frame["reason"] != "").any())
    ]


def text_table(frame: pd.DataFrame) -> str:
    """A frame as aligned text under plain headings."""
    names = known_columns(frame)
    cells = [[COLUMNS[name][0] for name in names]]
    cells += [[_shown(row[name], COLUMNS[name][1]) for name in names] for row in frame.to_dict("records")]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    right = [pd.api.types.is_numeric_dtype(frame[name]) and frame[name].dtype != bool for name in names]
    lines = [
        "  ".join(
            cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True)
        )
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


def _shown(value: Any, spec: str) -> str:
    if _undefined(value):
        return "undefined"
    if isinstance(value, (str, bool)):
        return str(value)
    return format(int(value) if spec == "d" else value, spec or (".4g" if isinstance(value, float) else ""))


def _undefined(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))
