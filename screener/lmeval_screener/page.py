"""A result as one self-contained HTML page: per group a table, bars of the parts, a trajectory's curve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmeval_dispersion.report.page import Column, Page
from lmeval_screener.accuracies import agreements
from lmeval_screener.result import Group, Result, Screened
from lmeval_screener.targets import step_number
from lmeval_screener.wording import (
    ACROSS_SCALES,
    UNSUPPORTED,
    Grid,
    accuracy_digits,
    across_scales_grid,
    agreement_grid,
    digits_for,
    failed_grid,
    heading,
    lead,
    member_name,
    not_separated,
    notes,
    read_line,
    tokens_line,
)

if TYPE_CHECKING:
    import altair as alt

_PARTS = {"within_domain": "within(T)", "between": "between(T, R)", "within_reference": "within(R), control"}


def page_html(result: Result, *, across_scales: bool) -> str:
    """The page; it asks for nothing beyond itself."""
    page = Page(f"Checkpoints screened for {result.domain}", lead(result) + ".")
    page.text(read_line(result) + ".")
    page.note(UNSUPPORTED)
    for group in result.groups:
        _group(page, group, result)
    if across_scales and len(result.groups) > 1:
        page.section("Across scales").note(ACROSS_SCALES, "warning")
        _grid(page, across_scales_grid(result), "All checkpoints by G")
    found = agreements(result)
    if found:
        page.section(
            "Agreement with the supplied accuracies", "Rank correlation of G with accuracy; p by permutation."
        )
        _grid(page, agreement_grid(found), "Agreement per group and overall")
        page.chart(
            _accuracy_chart(result),
            caption="Accuracy against G",
            description="One point a checkpoint that has an accuracy, by group; G with its standard error.",
        )
    if result.failed:
        page.section("Not screened")
        _grid(page, failed_grid(result), "Checkpoints that failed, and why")
    return page.html()


def _group(page: Page, group: Group, result: Result) -> None:
    page.section(heading(group), tokens_line(group))
    for note in notes(group):
        page.note(note)
    members = group.trajectory() or group.checkpoints
    digits = f".{digits_for(members, result)}f"
    columns = [
        Column("label", "Checkpoint"),
        Column("rank", "Rank", "d"),
        Column("G", "G", digits, error="G_se"),
    ]
    columns.append(
        Column(
            "apart", "≈", hint="Ranks that this one is not separated from: within two paired standard errors."
        )
    )
    if any(c.accuracy is not None for c in members):
        columns.append(Column("accuracy", "Accuracy", f".{accuracy_digits(members)}f"))
    columns += [Column(key, name, digits, error=f"{key}_se") for key, name in _PARTS.items()]
    columns += [
        Column("bytes", "Bytes read", ",d"),
        Column("requests", "Requests", "d"),
        Column("s", "Seconds", ".2f"),
    ]
    columns.append(Column("revision", "Commit"))
    rows = [_row(c, group, result) for c in members]
    page.table(rows, columns, caption=f"{heading(group)}, {result.metric} gap")
    best = group.checkpoints[0]
    page.chart(
        _parts_chart(group, result),
        caption=f"Parts of the {result.metric} gap, with one standard error",
        description="Bars of within(T), between(T, R) and the control within(R) for each checkpoint; "
        f"the largest G is that of {best.label}.",
    )
    if group.trajectory():
        page.chart(
            _trajectory_chart(group, result),
            caption=f"G along the training of {group.checkpoints[0].repo}",
            description=f"G against the training step; largest at {best.requested_revision}.",
        )


def _row(c: Screened, group: Group, result: Result) -> dict[str, Any]:
    gap = c.gaps[result.metric]
    row: dict[str, Any] = {
        "rank": c.rank,
        "label": member_name(c, group),
        "G": gap.mean,
        "G_se": gap.se,
        "apart": not_separated(c, group),
        "accuracy": c.accuracy,
        "bytes": c.bytes_read,
        "requests": c.requests,
        "s": c.seconds,
        "revision": c.revision[:12] if c.revision else None,
    }
    for key in _PARTS:
        part = getattr(gap, key)
        row[key], row[f"{key}_se"] = part.mean, part.se
    return row


def _grid(page: Page, grid: Grid, caption: str) -> None:
    keys = [f"c{index}" for index in range(len(grid.columns))]
    columns = [Column(key, name.strip()) for key, name in zip(keys, grid.columns, strict=True)]
    page.table([dict(zip(keys, row, strict=True)) for row in grid.rows], columns, caption=caption)


def _parts_chart(group: Group, result: Result) -> alt.LayerChart:
    import altair as alt

    values = [
        {
            "checkpoint": member_name(c, group),
            "part": name,
            "mean": part.mean,
            "low": part.mean - part.se,
            "high": part.mean + part.se,
        }
        for c in group.trajectory() or group.checkpoints
        for name, part in ((name, getattr(c.gaps[result.metric], key)) for key, name in _PARTS.items())
    ]
    names = list(_PARTS.values())
    base = alt.Chart(alt.Data(values=values)).encode(
        y=alt.Y("checkpoint:N", sort=None, title=None, axis=alt.Axis(labelLimit=260)),
        yOffset=alt.YOffset("part:N", sort=names),
        tooltip=["checkpoint:N", "part:N", alt.Tooltip("mean:Q", format=".4f")],
    )
    bars = base.mark_bar().encode(
        x=alt.X("mean:Q", title=f"mean {result.metric} distance"),
        color=alt.Color("part:N", sort=names, title=None, legend=alt.Legend(orient="top")),
    )
    errors = base.mark_rule(strokeWidth=1.5, color="var(--ink)").encode(x="low:Q", x2="high:Q")
    return (bars + errors).properties(height=max(120, 48 * len(group.checkpoints)))


def _trajectory_chart(group: Group, result: Result) -> alt.LayerChart:
    import altair as alt

    values = []
    for place, c in enumerate(group.trajectory() or ()):
        gap, step = c.gaps[result.metric], step_number(c.requested_revision or "")
        values.append(
            {
                "step": float(place) if step is None else step,
                "revision": c.requested_revision,
                "G": gap.mean,
                "low": gap.mean - gap.se,
                "high": gap.mean + gap.se,
            }
        )
    base = alt.Chart(alt.Data(values=values)).encode(
        x=alt.X("step:Q", title="training step, from the revision's name"),
        tooltip=["revision:N", alt.Tooltip("G:Q", format=".4f")],
    )
    y = alt.Y("G:Q", title=f"{result.metric} gap G", scale=alt.Scale(zero=False))
    line = base.mark_line(point=True).encode(y=y)
    return (line + base.mark_rule().encode(y=alt.Y("low:Q"), y2="high:Q")).properties(height=280)


def _accuracy_chart(result: Result) -> alt.LayerChart:
    import altair as alt

    values = []
    for group in result.groups:
        for c in group.checkpoints:
            if c.accuracy is not None:
                gap = c.gaps[result.metric]
                values.append(
                    {
                        "checkpoint": c.label,
                        "group": f"{group.family} · {group.scale}",
                        "accuracy": c.accuracy,
                        "G": gap.mean,
                        "low": gap.mean - gap.se,
                        "high": gap.mean + gap.se,
                    }
                )
    base = alt.Chart(alt.Data(values=values)).encode(
        y=alt.Y("accuracy:Q", scale=alt.Scale(zero=False)),
        color=alt.Color("group:N", title=None, legend=alt.Legend(orient="top")),
        tooltip=["checkpoint:N", "group:N", alt.Tooltip("G:Q", format=".4f"), "accuracy:Q"],
    )
    x = alt.X("G:Q", title=f"{result.metric} gap G", scale=alt.Scale(zero=False))
    points = base.mark_point(filled=True, size=60).encode(x=x)
    return (points + base.mark_rule().encode(x=alt.X("low:Q"), x2="high:Q")).properties(height=300)
