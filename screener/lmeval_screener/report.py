"""A screening as a report: per group a table, the parts of G and a trajectory's curve, then agreement."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmeval_dispersion.report import Chart, Column, Document, Note, Part, Section, Table, Text
from lmeval_dispersion.report.cells import shown
from lmeval_screener.accuracies import agreement_dict, agreements
from lmeval_screener.agreement import Agreement
from lmeval_screener.controls import NAMES, Control
from lmeval_screener.result import FLAT_COLUMNS, Group, Result, Screened, control, flat_row
from lmeval_screener.targets import step_number

if TYPE_CHECKING:
    import altair as alt

UNSUPPORTED = (
    "G compares checkpoints of one tokenizer and one scale. It does not compare across scales or families, "
    "and it predicts no accuracy."
)
_CONTROLS = (
    "One vector added to every row moves no prediction, but it moves the cosine G; a scale moved between the "
    "final norm's weight γ and the rows moves the Euclidean one. Centring by the mean of a sample of rows "
    "takes the first out; the ratio of Euclidean distances of rows times γ is moved by neither."
)
_PARTS = {"within_domain": "within(T)", "between": "between(T, R)", "within_reference": "within(R), control"}
_SHORT = {"within_domain": "in T", "between": "T, R", "within_reference": "in R"}
_SCOPES = {"within groups": "all, inside groups", "overall": "all, across groups (not supported)"}


def report(result: Result, *, command: str = "", tokens: bool = False) -> Document:
    """The report of a screening.

    Args:
        result: What was screened.
        command: The command that did it; empty where none did.
        tokens: Whether to list the pieces and rows of T and R.
    """
    found = agreements(result)
    sections = [_group(group, result) for group in result.groups]
    if tokens:
        sections.append(tokens_section(result))
    if (controls := controls_section(result)) is not None:
        sections.append(controls)
    if found:
        sections.append(_agreement(found, result))
    if result.failed:
        sections.append(_failed(result))
    sections.append(Section("What was read", [Text(f"{_read(result)}.")], name="read", details=True))
    return Document(
        title=f"Checkpoints screened for {result.domain}",
        answer=(_lead(result),),
        sections=sections,
        limits=(UNSUPPORTED,),
        command=command,
        rows=[flat_row(c) for c in result.checkpoints],
        fields=FLAT_COLUMNS,
        contract=lambda: json_text(result),
    )


def labels(result: Result, top: int) -> str:
    """The labels of the ``top`` best of each group, one a line."""
    return "".join(f"{c.label}\n" for group in result.groups for c in group.checkpoints[:top])


def json_text(result: Result) -> str:
    """The contract ``screen-checkpoints/1``, with ``agreement`` where accuracies were supplied."""
    content: dict[str, Any] = result.to_dict()
    found = agreements(result)
    if found:
        content["agreement"] = [agreement_dict(line) for line in found]
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _lead(result: Result) -> str:
    return (
        f"{result.domain}: {result.metric} gap G = within(T) + between(T, R); within(R) is a control, no "
        f"part of G; everyday tokens R: {result.reference}; ± is one jackknife standard error."
    )


def _read(result: Result) -> str:
    return (
        f"{len(result.checkpoints)} screened, {len(result.failed)} failed; "
        f"read {shown(result.bytes_read, 'bytes')} in {result.requests} requests, {result.seconds:.2f} s"
    )


# --- one group ------------------------------------------------------------------------------------------


def _group(group: Group, result: Result) -> Section:
    count = len(group.checkpoints)
    name = f"{_name(group)} · {count} checkpoint{'s' if count != 1 else ''}"
    return Section(name, list(_group_parts(group, result)), name="-".join((group.family, group.scale)))


def _group_parts(group: Group, result: Result) -> Iterator[Part]:
    best, trajectory = group.checkpoints[0], group.trajectory()
    yield _ranking(group, result)
    yield Text(_tokens(group))
    for c in group.checkpoints:
        for note in c.notes:
            yield Note(f"{c.label}: {note}")
    yield Chart(
        _drawn(_parts_chart, group, result),
        caption=f"Parts of the {result.metric} gap, with one standard error",
        description="Bars of within(T), between(T, R) and the control within(R) for each checkpoint; "
        f"the largest G is that of {best.label}.",
        name=f"parts-{group.family}-{group.scale}",
    )
    if trajectory:
        yield Chart(
            _drawn(_trajectory_chart, group, result),
            caption=f"G along the training of {best.repo}",
            description=f"G against the training step; largest at {best.requested_revision}.",
            name=f"trajectory-{group.family}-{group.scale}",
        )


def _ranking(group: Group, result: Result) -> Table:
    """One group, best first; a trajectory in the order of its steps."""
    trajectory = group.trajectory()
    members = trajectory or group.checkpoints
    digits = f".{_digits(members, result)}f"
    columns = [
        Column("label", "Revision, by step" if trajectory else "Checkpoint"),
        Column("rank", "Rank", "d", short="#"),
        Column("G", "G", digits, error="G_se"),
    ]
    if any(c.not_separated_from for c in members):
        hint = "Ranks that this one is not separated from: G within two paired standard errors."
        columns.append(Column("tied", "≈", hint=hint, drop=1))
    if any(c.accuracy is not None for c in members):
        shares = all((c.accuracy or 0) <= 1 for c in members)
        columns.append(Column("accuracy", "Accuracy", ".3f" if shares else ".1f", short="Acc.", drop=2))
    columns += [
        Column(key, heading, digits, error=f"{key}_se", short=_SHORT[key], drop=3)
        for key, heading in _PARTS.items()
    ]
    columns += [
        Column("bytes", "Read", "bytes", drop=4),
        Column("requests", "Requests", "d", drop=4),
        Column("seconds", "Seconds", ".2f", short="s", drop=4),
    ]
    if any(c.revision for c in members):
        columns.append(Column("revision", "Commit", drop=5))
    rows = [_row(c, group, result) for c in members]
    return Table(rows, columns, f"{result.metric} gap", name=f"ranking-{group.family}-{group.scale}")


def _row(c: Screened, group: Group, result: Result) -> dict[str, Any]:
    gap = c.gaps[result.metric]
    row: dict[str, Any] = {
        "label": _member(c, group),
        "rank": c.rank,
        "G": gap.mean,
        "G_se": gap.se,
        "tied": ", ".join(str(o.rank) for o in group.checkpoints if o.label in c.not_separated_from),
        "accuracy": c.accuracy,
        "bytes": c.bytes_read,
        "requests": c.requests,
        "seconds": c.seconds,
        "revision": c.revision[:12] if c.revision else None,
    }
    for key in _PARTS:
        part = getattr(gap, key)
        row[key], row[f"{key}_se"] = part.mean, part.se
    return row


def _digits(checkpoints: Sequence[Screened], result: Result) -> int:
    """Decimals at which the smallest error of G still shows two digits; 3 to 6."""
    errors = [c.gaps[result.metric].se for c in checkpoints if c.gaps[result.metric].se > 0]
    digits = 3
    while errors and digits < 6 and min(errors) * 10**digits < 10:
        digits += 1
    return digits


def _name(group: Group) -> str:
    return f"{group.family} · {group.scale}"


def _member(checkpoint: Screened, group: Group) -> str:
    """How a group names a member: a folder by its last part, a trajectory's member by its revision."""
    if group.trajectory():
        return checkpoint.requested_revision or "default branch"
    if checkpoint.revision is None:
        names = [Path(c.repo).name for c in group.checkpoints]
        short = Path(checkpoint.repo).name
        return short if names.count(short) == 1 else checkpoint.label
    return checkpoint.label


def _tokens(group: Group) -> str:
    """What was compared: counts, how numbers are written, dropped words."""
    tokens = group.checkpoints[0].tokens
    text = f"T: {tokens.domain} tokens, R: {tokens.reference} tokens; digit scheme: {tokens.digit_scheme}"
    for name, dropped in (("T", tokens.dropped), ("R", tokens.dropped_reference)):
        if dropped:
            words = ", ".join(word.strip() for word in dropped)
            text += f"; words of {name} that are no single token: {words}"
    return text


def tokens_section(result: Result) -> Section:
    """The pieces and rows of T and R, once for each family or tokenizer."""
    rows = [
        {"family": entry["family"], "set": name, "variant": " and ".join(entry[side]["variants"])}
        | {"tokens": " ".join(f"{piece}:{row}" for piece, row in entry[side]["pieces"].items())}
        for entry in result.to_dict()["tokens"]
        for side, name in (("domain", f"T, {result.domain}"), ("reference", f"R, {result.reference}"))
    ]
    columns = [
        Column("family", "Family"),
        Column("set", "Set"),
        Column("variant", "Variant"),
        Column("tokens", "Piece:row"),
    ]
    return Section("Tokens compared", [Table(rows, columns, "Tokens", name="tokens-table")], name="tokens")


def controls_section(result: Result) -> Section | None:
    """The gauge controls of every checkpoint beside its G; None where they were not asked for."""
    rows: list[dict[str, Any]] = []
    parts: list[Part] = [Text(_CONTROLS)]
    for group in result.groups:
        for c in group.checkpoints:
            row: dict[str, Any] = {"label": c.label, "rank": c.rank, "G": c.gaps[result.metric].mean}
            for name in NAMES:
                found = control(c, name)
                if isinstance(found, Control):
                    row |= {name: found.mean, f"{name}_se": found.se}
                    row[f"{name}_rank"] = group.control_rank(c, name)
                elif found is not None:
                    parts.append(Note(f"{c.label}: no {NAMES[name]}: {found}"))
            rows.append(row)
        parts += [Note(text) for text in group.control_warnings()]
    if all(c.controls is None for c in result.checkpoints):
        return None
    columns = [Column("label", "Checkpoint"), Column("rank", "Rank", "d", short="#"), Column("G", "G", ".3f")]
    for name, heading in (("centred", "G, centred rows"), ("final_norm", "within(T)/within(R), rows × γ")):
        columns.append(Column(name, heading, ".3f", error=f"{name}_se"))
        columns.append(Column(f"{name}_rank", "Rank", "d", short="#"))
    table = Table(rows, columns, "Gauge controls", name="controls-table")
    return Section("What moves no prediction", [table, *parts], name="controls")


# --- all groups -----------------------------------------------------------------------------------------


def _agreement(found: Sequence[Agreement], result: Result) -> Section:
    columns = [
        Column("group", "Group"),
        Column("n", "n", "d"),
        Column("spearman", "Spearman", ".3f"),
        Column("spearman_p", "p", "p-value"),
        Column("kendall", "Kendall τ-b", ".3f", drop=2),
        Column("kendall_p", "p", "p-value", drop=2),
        Column("permutations", "Permutations", drop=1),
    ]
    rows = [
        {
            "group": line.group or _SCOPES[line.scope],
            "n": line.n,
            "spearman": line.spearman,
            "spearman_p": line.spearman_p,
            "kendall": line.kendall,
            "kendall_p": line.kendall_p,
            "permutations": line.reason or f"{'all' if line.exact else 'drawn'}: {line.permutations:,}",
        }
        for line in found
    ]
    return Section(
        "Agreement with the supplied accuracies",
        [
            Text("Rank correlation of G with accuracy; p by permutation."),
            Table(rows, columns, "Agreement per group and overall", name="agreement-table"),
            Chart(
                lambda: _accuracy_chart(result),
                caption="Accuracy against G",
                description="One point a checkpoint with an accuracy, by group; G with its standard error.",
            ),
        ],
        name="agreement",
    )


def _failed(result: Result) -> Section:
    columns = [
        Column("label", "Checkpoint"),
        Column("error", "Error"),
        Column("message", "Why, and what to do"),
    ]
    rows = [{"label": f.label, "error": f.error, "message": f.message} for f in result.failed]
    table = Table(rows, columns, "Checkpoints that failed, and why", name="failed-table")
    return Section("Not screened", [table], name="failed")


# --- charts ---------------------------------------------------------------------------------------------


def _drawn(
    draw: Callable[[Group, Result], alt.LayerChart], group: Group, result: Result
) -> Callable[[], alt.LayerChart]:
    return lambda: draw(group, result)


def _interval(mean: float, se: float) -> dict[str, float]:
    return {"low": mean - se, "high": mean + se}


def _parts_chart(group: Group, result: Result) -> alt.LayerChart:
    import altair as alt

    values = [
        {
            "checkpoint": _member(c, group),
            "part": name,
            "mean": part.mean,
            **_interval(part.mean, part.se),
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
                **_interval(gap.mean, gap.se),
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
                        "group": _name(group),
                        "accuracy": c.accuracy,
                        "G": gap.mean,
                        **_interval(gap.mean, gap.se),
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
