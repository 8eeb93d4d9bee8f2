"""The HTML pages of ``dispersion compare``: differences with their intervals, as a plot and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from lmeval_dispersion.report.page import Column, Page

_CHANCE = (
    "Intervals are for the texts that were drawn. With many rows some leave out 0 by chance: about one in "
    "twenty. Widths and tokenizers must match for dispersions to be comparable."
)


def laboratory_page(frame: pd.DataFrame, columns: Sequence[Column], first: str, second: str) -> Page:
    """Two runs of the laboratory; ``columns`` are those of the table."""
    page = Page("Two runs compared", f"{second} minus {first}.").section("Differences")
    numbers = ("first", "second", "difference", "low", "high", "paired")
    about = [name for name in frame.columns if name not in numbers]
    labels = [", ".join(str(v) for v in row if str(v)) for row in frame[about].itertuples(index=False)]
    _add_plot(page, frame.assign(row=labels), "Difference of every figure")
    return page.table(frame, columns, caption="Both runs").note(_CHANCE, "warning")


def stores_page(comparison: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Page:
    """Runs of the harness: every one against the first, slice by slice."""
    base = comparison["baseline"]
    page = Page(
        f"Runs compared with {base['run']}",
        f"{comparison['documents']} shared documents; every difference is a run minus {base['run']} "
        f"(layer {base['layer']}).",
    )
    for run in dict.fromkeys(row["run"] for row in rows):
        page.section(str(run))
        own = pd.DataFrame([row for row in rows if row["run"] == run])
        shown = pd.DataFrame(
            {
                "row": own["slice"],
                "difference": own["dispersion_difference"],
                "low": own["dispersion_low"],
                "high": own["dispersion_high"],
            }
        ).dropna()
        if len(shown):
            _add_plot(page, shown, "Difference of dispersion, slice by slice")
        columns = [
            Column("slice", str(comparison["by"])),
            Column("documents", "Documents", "d"),
            Column("dispersion", "Dispersion", ".4f"),
            Column("dispersion_difference", "Difference", "+.4f"),
            Column("dispersion_low", "95 % from", "+.4f"),
            Column("dispersion_high", "to", "+.4f"),
            Column("accuracy", "Accuracy", ".3f"),
            Column("accuracy_difference", "Difference", "+.3f"),
            Column("accuracy_low", "95 % from", "+.3f"),
            Column("accuracy_high", "to", "+.3f"),
        ]
        page.table(own, columns, caption=f"{run} and {base['run']}")
    for note in comparison["notes"]:
        page.note(note)
    return page.note(_CHANCE, "warning")


def _add_plot(page: Page, shown: pd.DataFrame, caption: str) -> None:
    every_row = alt.Axis(labelOverlap=False)
    base = alt.Chart(shown).encode(y=alt.Y("row:N", title=None, sort=None, axis=every_row))
    bars = base.mark_rule().encode(x=alt.X("low:Q", title="Difference, with 95 % interval"), x2="high:Q")
    points = base.mark_point(filled=True).encode(
        x="difference:Q", tooltip=["row", "difference", "low", "high"]
    )
    zero = alt.Chart(pd.DataFrame({"x": [0.0]})).mark_rule(strokeDash=[4, 4]).encode(x="x:Q")
    clear = int(((shown["low"] > 0) | (shown["high"] < 0)).sum())
    page.chart(
        alt.layer(zero, bars, points).properties(height=18 * len(shown) + 20),
        caption=f"{caption}; the dashed line is no difference",
        description=f"{clear} of {len(shown)} intervals leave out 0.",
    )
