"""The HTML page of a comparison of two laboratory runs."""

from __future__ import annotations

import altair as alt
import pandas as pd

from lmeval_dispersion.analysis.report import known_columns
from lmeval_dispersion.analysis.wording import COLUMNS
from lmeval_dispersion.page import Column, Page


def comparison_page(frame: pd.DataFrame, first: str, second: str) -> Page:
    """Differences with their intervals, as a plot and a table."""
    page = Page("Two runs compared", f"{second} minus {first}.")
    about = [
        name
        for name in frame.columns
        if name not in ("first", "second", "difference", "low", "high", "paired")
    ]
    label = [", ".join(str(v) for v in row if str(v)) for row in frame[about].itertuples(index=False)]
    shown = frame.assign(row=label)
    base = alt.Chart(shown).encode(y=alt.Y("row:N", title=None, sort=None))
    bars = base.mark_rule().encode(x=alt.X("low:Q", title="Difference, with 95 % interval"), x2="high:Q")
    points = base.mark_point(filled=True).encode(
        x="difference:Q", tooltip=["row", "difference", "low", "high"]
    )
    zero = alt.Chart(pd.DataFrame({"x": [0.0]})).mark_rule(strokeDash=[4, 4]).encode(x="x:Q")
    clear = shown[(shown["low"] > 0) | (shown["high"] < 0)]
    said = f"{len(clear)} of {len(shown)} intervals leave out 0."
    page.section("Differences")
    chart = alt.layer(zero, bars, points).properties(height=18 * len(shown) + 20)
    page.chart(
        chart, caption="Difference of every figure; the dashed line is no difference", description=said
    )
    columns = [Column(name, *COLUMNS[name][:2], hint=COLUMNS[name][2]) for name in known_columns(frame)]
    page.table(frame, columns, caption="Both runs")
    return page.note(
        "Intervals are for the texts that were drawn. With many rows some leave out 0 by chance: about one "
        "in twenty. Widths and tokenizers must match for dispersions to be comparable.",
        "warning",
    )
