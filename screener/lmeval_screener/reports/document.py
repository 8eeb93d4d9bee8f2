"""A screening as a report: the answer, each group as picture and ranking, accuracy, parts of G, details."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import TYPE_CHECKING, Any

from lmeval_dispersion.report import Chart, Column, Document, Facts, Made, Note, Part, Section, Table, Text
from lmeval_dispersion.report.cells import short_names, shown
from lmeval_screener.agreement import Agreement, agreement_dict, agreements
from lmeval_screener.ranking.controls import NAMES, Control, Controls
from lmeval_screener.ranking.gap import Difference, difference
from lmeval_screener.reports.answer import (
    Ties,
    answer,
    digits,
    names,
    places_for,
    skipped,
    spans,
    step_of,
    steps,
    ties_of,
    title,
)
from lmeval_screener.reports.provenance import provenance
from lmeval_screener.result import FLAT_COLUMNS, Group, Result, Screened, control, flat_row
from lmeval_screener.targets.target import step_number

if TYPE_CHECKING:
    import altair as alt

    from lmeval_screener.shortlist.choice import GroupChoice, Shortlist

UNSUPPORTED = (
    "G compares checkpoints of one tokenizer and one scale. It does not compare across scales or families, "
    "and it predicts no accuracy."
)
# The ranges over the three seeds of every checkpoint of the demo, and the steps between neighbours at its
# first seed: docs/results/demo.md has the figures.
SEEDS = (
    "The errors cover the choice of tokens, not the training seed. G of each of the demo's 11 checkpoints, "
    "trained from 3 seeds, spans 0.048 to 0.110, and neighbours there differ by 0.003 to 0.085: do not read "
    "a difference of that size between separate trainings as one of skill."
)
_CONTROLS = (
    "One vector added to every row moves no prediction, but it moves the cosine G; a scale moved between the "
    "final norm's weight γ and the rows moves the Euclidean one. Centring by the mean of a sample of rows "
    "takes the first out; the ratio of Euclidean distances of rows times γ is moved by neither."
)
_PLAIN = (
    "These figures could order checkpoints too; `dispersion verify` says whether one of them, or G, orders "
    "results. The random sets' G moves with training as well, so z is shown and nothing is ranked by it."
)
_PARTS = {"within_domain": "within(T)", "between": "between(T, R)", "within_reference": "within(R), control"}
_SHORT = {"within_domain": "in T", "between": "T, R", "within_reference": "in R"}
_SCOPES = {"within groups": "all, inside groups", "overall": "all, across groups (not supported)"}
_LONG = 40  # rows of a group that a terminal shows whole
_TOP, _BOTTOM = 15, 3  # rows that it shows of a longer one, beside those tied with the last of the top
_DRAWN = 40  # checkpoints of a group that a chart shows
_NAMED = 15  # points that all carry their names; of more, only as many outliers do


def report(
    result: Result,
    *,
    command: str = "",
    accuracy: str = "",
    chosen: Shortlist | None = None,
    tokens: bool = False,
) -> Document:
    """The report of a screening.

    Args:
        result: What was screened.
        command: The command that did it; empty where none did.
        accuracy: What the supplied accuracies are, in words; empty where nobody says.
        chosen: The short list to show; None for all. The answer and the errors are of all.
        tokens: Whether to list the pieces and rows of T and R.
    """
    left = result if chosen is None else replace(result, checkpoints=chosen.chosen)
    groups = [_Shown(group, result, None if chosen is None else chosen.of(group)) for group in result.groups]
    groups = [one for one in groups if one.members]
    answered = [*answer(result), *([] if chosen is None or not result.checkpoints else [chosen.sentence()])]
    found = agreements(result)
    sections = [Section(one.heading, list(_group(one)), name=one.name) for one in groups]
    if found:
        sections.append(_agreement(found, result, accuracy))
    if groups:
        parts = [part for one in groups for part in (_parts(one), _parts_table(one))]
        sections.append(Section("Parts of G", parts, name="parts"))
    if tokens:
        sections.append(tokens_section(result))
    if (controls := controls_section(result)) is not None:
        sections.append(controls)
    if result.failed:
        sections.append(_failed(result))
    if result.checkpoints:
        sections.append(provenance(result))
    sections.append(_details(groups, result))
    return Document(
        title=f"Checkpoints screened for {result.domain}",
        answer=answered,
        sections=sections,
        limits=(UNSUPPORTED,),
        command=command,
        rows=Made(lambda i: _flat(left.checkpoints[i], chosen), len(left.checkpoints)),
        fields=FLAT_COLUMNS if chosen is None else [*FLAT_COLUMNS, *_CHOSEN],
        contract=lambda: json_pieces(left, answered, chosen),
        libraries=("numpy", "huggingface-hub"),
        guide="docs/reference/screening.md",
    )


def json_text(result: Result, answered: Sequence[str] = (), chosen: Shortlist | None = None) -> str:
    """`json_pieces` in one text."""
    return "".join(json_pieces(result, answered, chosen))


def json_pieces(
    result: Result, answered: Sequence[str] = (), chosen: Shortlist | None = None
) -> Iterator[str]:
    """The contract ``screen-checkpoints/3``, with ``agreement`` where accuracies were supplied, row by row.

    With a short list, ``result`` holds only what is chosen; ``shortlist`` says of how many.
    """
    content: dict[str, Any] = {**result.head(), "answer": list(answered or answer(result))}
    found = agreements(result)
    if found:
        content["agreement"] = [agreement_dict(line) for line in found]
    if chosen is not None:
        content["shortlist"] = chosen.to_dict()
    before = "{\n"
    for name, value in content.items():
        yield f'{before}  "{name}": '
        before = ",\n"
        if name != "checkpoints" or not result.checkpoints:
            yield _indented(value, "  ")
            continue
        comma = "["
        for entry, c in result.entries():
            yield f"{comma}\n    {_indented(entry | _chosen_row(c, chosen), '    ')}"
            comma = ","
        yield "\n  ]"
    yield "\n}\n"


def _indented(value: object, indent: str) -> str:
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    return text.replace("\n", f"\n{indent}")  # a line break inside a text is escaped


def _flat(checkpoint: Screened, chosen: Shortlist | None) -> dict[str, Any]:
    return flat_row(checkpoint) | _chosen_row(checkpoint, chosen)


_CHOSEN = ("chosen", "inclusion_probability")


def _chosen_row(checkpoint: Screened, chosen: Shortlist | None) -> dict[str, Any]:
    """Why a checkpoint is on the short list, and how probable that was; empty without a list."""
    if chosen is None:
        return {}
    return {"chosen": chosen.why(checkpoint), "inclusion_probability": chosen.probability(checkpoint)}


# --- one group ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shown:
    """A group as the report shows it."""

    group: Group
    result: Result
    choice: GroupChoice | None

    @property
    def name(self) -> str:
        return f"{self.group.family}-{self.group.scale}"

    @property
    def heading(self) -> str:
        count = len(self.group.checkpoints)
        return f"{title(self.group)} · {count} checkpoint{'s' if count != 1 else ''}"

    @property
    def is_training(self) -> bool:
        return len(steps(self.group)) > 1

    @property
    def members(self) -> tuple[Screened, ...]:
        """Those that are shown, in the order of the table."""
        best = self.group.checkpoints
        if self.choice is not None:
            best = tuple(c for c in best if self.choice.why(c) is not None)
        in_order = self.group.trajectory() if self.is_training else None
        shown = set(best)
        return tuple(c for c in in_order if c in shown) if in_order else best

    def difference(self, a: Screened, b: Screened) -> Difference:
        return difference(a.gaps[self.result.metric], b.gaps[self.result.metric])


def _group(one: _Shown) -> Iterator[Part]:
    yield _trajectory(one) if one.is_training else _ranked(one)
    yield _ranking(one)
    if not one.is_training and len(one.group.checkpoints) > 1:
        for sentence in skipped(one.group):
            yield Text(sentence)
        yield Text(SEEDS)
    notes: dict[str, list[str]] = {}
    for c in one.members:
        for note in c.notes:
            notes.setdefault(note, []).append(c.label)
    for note, of in notes.items():
        yield Note(f"{of[0] if len(of) == 1 else f'{len(of)} checkpoints'}: {note}")


def _ranking(one: _Shown) -> Table:
    """One group, best first; a training in the order of its steps."""
    members, metric = one.members, one.result.metric
    changes = _changes(one)
    columns = [
        Column("label", "Step" if one.is_training else "Checkpoint"),
        Column("rank", "Rank", "d", short="#"),
        Column("G", "G", f".{digits(members, metric)}f"),
    ]
    if any(changes):
        spec = f".{places_for([change[1] for change in changes if change is not None])}f"
        heading, short, what = (
            ("Δ from previous", "Δ prev.", "G minus that of the step before")
            if one.is_training
            else ("Δ to next", "Δ next", "G minus that of the next rank")
        )
        hint = f"{what}, ± the standard error of this difference, paired over the same tokens."
        columns.append(Column("delta", heading, spec, error="delta_se", short=short, hint=hint, drop=1))
    ties, called = ties_of(one.group), names(one.group)
    order = one.group.checkpoints
    places = {c: place for place, c in enumerate(order)}
    if any(ties.of(places[c]) for c in members):
        hint = "ranks that this one is not told apart from, all pairs of the group counted."
        columns.append(Column("tied", "Tied with", hint=hint, short="Tied", drop=2))
    if one.choice is not None and one.choice.chosen != one.choice.best:
        hint = "rank: among the K best; tied: with the K-th; audit: drawn at random from the others."
        columns.append(Column("chosen", "Chosen", hint=hint, drop=2))
    if any(c.accuracy is not None for c in members):
        shares = all((c.accuracy or 0) <= 1 for c in members)
        columns.append(Column("accuracy", "Accuracy", ".3f" if shares else ".1f", short="Acc.", drop=3))

    def row(place: int) -> dict[str, Any]:
        c, change = members[place], changes[place]
        return {
            "label": called[c],
            "rank": c.rank,
            "G": c.gaps[metric].mean,
            "delta": None if change is None else change[0],
            "delta_se": None if change is None else change[1],
            "tied": spans([order[i].rank for i in ties.of(places[c])]),
            "chosen": None if one.choice is None else one.choice.why(c),
            "accuracy": c.accuracy,
        }

    return Table(
        Made(row, len(members)),
        columns,
        f"{metric.capitalize()} gap",
        name=f"ranking-{one.name}",
        more="" if one.choice is None else f"Short list: {one.choice.sentence()}.",
        excerpt=_excerpt(members, one),
    )


def _changes(one: _Shown) -> Sequence[tuple[float, float] | None]:
    """Differences and their errors, to the next rank; along a training, from the step before."""
    if one.is_training:
        order = steps(one.group)
        before = dict(zip(order[1:], order, strict=False))
        found = [one.difference(c, before[c]) if c in before else None for c in one.members]
        return [None if change is None else (change.mean, change.se) for change in found]

    def to_next(place: int) -> tuple[float, float] | None:
        after = one.members[place].next
        return None if after is None else (after.difference, after.se)

    return Made(to_next, len(one.members))


def _excerpt(members: Sequence[Screened], one: _Shown) -> tuple[int, ...]:
    """Rows of a long ranking that short texts show: the top, what is tied with its last, and the bottom."""
    count = len(members)
    if count <= _LONG:
        return ()
    if one.is_training:
        # A course needs its ends and what lies between, evenly.
        return tuple(sorted({round(i * (count - 1) / (_TOP + _BOTTOM)) for i in range(_TOP + _BOTTOM + 1)}))
    cut = [place for place in ties_of(one.group).of(_TOP - 1) if _TOP <= place < count]
    return tuple(sorted({*range(_TOP), *cut[: _LONG - _TOP - _BOTTOM], *range(count - _BOTTOM, count)}))


def _parts_table(one: _Shown) -> Table:
    """G's parts and the control, in the order of the ranking."""
    spec = f".{digits(one.members, one.result.metric)}f"
    columns = [Column("label", "Step" if one.is_training else "Checkpoint")]
    columns += [
        Column(key, heading, spec, error=f"{key}_se", short=_SHORT[key], drop=drop)
        for drop, (key, heading) in enumerate(_PARTS.items())
    ]
    called = names(one.group)
    members = one.members

    def row(place: int) -> dict[str, Any]:
        c, found = members[place], {}
        for key in _PARTS:
            part = getattr(c.gaps[one.result.metric], key)
            found[key], found[f"{key}_se"] = part.mean, part.se
        return {"label": called[c], **found}

    caption = f"Parts of the {one.result.metric} gap, {title(one.group)}"
    return Table(
        Made(row, len(members)),
        columns,
        caption,
        name=f"parts-table-{one.name}",
        excerpt=_excerpt(one.members, one),
    )


# --- all groups -----------------------------------------------------------------------------------------


def _agreement(found: Sequence[Agreement], result: Result, accuracy: str) -> Section:
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
    source = f" Accuracy: {accuracy}." if accuracy else ""
    return Section(
        "Accuracy against G",
        [
            Chart(
                lambda: _accuracy_chart(result),
                caption="Accuracy against G",
                description="One point a checkpoint with an accuracy, by group.",
                name="accuracy",
            ),
            Text(f"Rank correlation of G with accuracy; p by permutation.{source}"),
            Table(rows, columns, "Agreement per group and overall", name="agreement-table"),
        ],
        name="agreement",
    )


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
    return Section(
        "What moves no prediction", [table, *parts, Text(_PLAIN), _plain_table(result)], name="controls"
    )


def _plain_table(result: Result) -> Table:
    """Figures that could rank as well as G does, and where G stands among random tokens."""
    rows = []
    for c in result.checkpoints:
        kind, value = c.step_or_date or ("", 0.0)
        row: dict[str, Any] = {
            "label": c.label,
            "rank": c.rank,
            "when": date.fromordinal(int(value)).isoformat()
            if kind == "date"
            else f"{value:.0f}"
            if kind
            else None,
            "within_reference": c.gaps[result.metric].within_reference.mean,
        }
        if isinstance(c.controls, Controls):
            row["norm"] = c.controls.row_norm
            if not isinstance(c.controls.effective_rank, str):
                row["effective_rank"] = c.controls.effective_rank
            if not isinstance(c.controls.random_tokens, str):
                row["z"] = c.controls.random_tokens.z
        rows.append(row)
    columns = [Column("label", "Checkpoint"), Column("rank", "Rank", "d", short="#")]
    if any(row["when"] for row in rows):
        columns.append(Column("when", "Step or date", short="When"))
    columns += [
        Column("norm", "Norm of rows", ".3f", short="Norm"),
        Column("within_reference", "within(R)", ".3f"),
        Column("effective_rank", "Effective rank of T", ".2f", short="Eff. rank"),
        Column(
            "z", "z of G", ".1f", hint="among random sets of tokens of T's range of ids; never ranked by."
        ),
    ]
    return Table(rows, columns, "Figures that could rank too", name="plain-controls-table")


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


def _failed(result: Result) -> Section:
    """Failures, equal ones in one line."""
    columns = [
        Column("label", "Checkpoint"),
        Column("error", "Error"),
        Column("message", "Why, and what to do"),
    ]
    equal: dict[tuple[str, str], list[str]] = {}
    for f in result.failed:
        equal.setdefault(
            (f.error, f.message.replace(f.label, "ORG/NAME").replace(f.repo, "ORG/NAME")), []
        ).append(f.label)
    own = {f.label: f.message for f in result.failed}
    rows = [
        {
            "label": of[0] if len(of) == 1 else f"{len(of)} checkpoints: {_some(of)}",
            "error": error,
            "message": own[of[0]] if len(of) == 1 else message,
        }
        for (error, message), of in equal.items()
    ]
    table = Table(rows, columns, "Checkpoints that failed, and why", name="failed-table")
    return Section("Not screened", [table], name="failed")


def _some(words: Sequence[str], most: int = 3) -> str:
    return ", ".join(words[:most]) + (", …" if len(words) > most else "")


def _details(groups: Sequence[_Shown], result: Result) -> Section:
    facts: dict[str, object] = {
        "G": f"within(T) + between(T, R), mean {result.metric} distances; within(R) is a control, not in it",
        "Errors": "± is one jackknife standard error over the tokens of T and R",
    }
    for one in groups:
        of = f" ({title(one.group)})" if len(groups) > 1 else ""
        tokens = one.group.checkpoints[0].tokens
        facts[f"Tokens{of}"] = (
            f"T: {tokens.domain} of {result.domain}, R: {tokens.reference} of {result.reference}; "
            f"digit scheme: {tokens.digit_scheme}"
        )
        for name, dropped in (("T", tokens.dropped), ("R", tokens.dropped_reference)):
            if dropped:
                words = ", ".join(word.strip() for word in dropped)
                facts[f"Words of {name} that are no single token{of}"] = words
    facts["Read"] = (
        f"{len(result.checkpoints)} screened, {len(result.failed)} failed; "
        f"{shown(result.bytes_read, 'bytes')} in {result.requests} requests, {result.seconds:.2f} s"
    )
    columns = [
        Column("label", "Checkpoint"),
        Column("bytes", "Read", "bytes"),
        Column("requests", "Requests", "d"),
        Column("seconds", "Seconds", ".2f", short="s"),
    ]
    members = []
    for one in groups:
        called = names(one.group)
        members += [(c, called[c]) for c in one.members]
    if any(c.revision for c, _ in members):
        columns.append(Column("revision", "Commit"))

    def row(place: int) -> dict[str, Any]:
        c, name = members[place]
        return {
            "label": c.label if c.revision else name,
            "bytes": c.bytes_read,
            "requests": c.requests,
            "seconds": c.seconds,
            "revision": c.revision[:12] if c.revision else None,
        }

    rows = Made(row, len(members))
    table = [Table(rows, columns, "What each checkpoint cost", name="cost")] if rows else []
    return Section("Details", [Facts(facts), *table], name="details", details=True)


# --- charts ---------------------------------------------------------------------------------------------


def _ranked(one: _Shown) -> Chart:
    members = one.members[:_DRAWN]
    best = one.group.checkpoints[0]
    of = (
        f", the {len(members)} best of {len(one.group.checkpoints)}"
        if len(members) < len(one.group.checkpoints)
        else ""
    )
    tied = spans_of_bands(ties_of(one.group), one.group)
    return Chart(
        lambda: _ranked_chart(one, members),
        caption=f"G of each checkpoint{of}",
        description=f"Dots of G, best first, from {best.label}; "
        + (f"tied: ranks {tied}." if tied else "no ties."),
        meaning="A line runs from each dot two standard errors of its difference to the next rank down. "
        "Where it reaches the next dot, the two are not told apart."
        + (" Shaded: ranks that are tied with one another." if tied else ""),
        name=f"gap-{one.name}",
    )


def spans_of_bands(ties: Ties, group: Group) -> str:
    """The bands of a group in words."""
    return ", ".join(f"{group.checkpoints[a].rank}–{group.checkpoints[b].rank}" for a, b in ties.bands)


def _chart_names(one: _Shown) -> dict[Screened, str]:
    called = names(one.group)
    if one.is_training:
        return called
    short = short_names([called[c] for c in one.group.checkpoints])
    return dict(zip(one.group.checkpoints, short, strict=True))


def _ranked_chart(one: _Shown, members: Sequence[Screened]) -> alt.LayerChart:
    import altair as alt

    called, metric = _chart_names(one), one.result.metric
    changes = dict(zip(one.members, _changes(one), strict=True))
    dots = []
    for c in members:
        change = changes[c]
        dots.append(
            {
                "checkpoint": called[c],
                "rank": c.rank,
                "G": c.gaps[metric].mean,
                "reach": c.gaps[metric].mean - 2 * (change[1] if change else 0.0),
                "kind": "control" if c.negative_control else "checkpoint",
            }
        )
    shaded = [
        {"first": called[members[a]], "last": called[members[min(b, len(members) - 1)]]}
        for a, b in ties_of(one.group).bands
        if a < len(members) - 1
    ]
    order = alt.Scale(domain=[called[c] for c in members])
    axis = alt.Axis(labelLimit=200, labelOverlap=False)
    y = alt.Y("checkpoint:N", sort=None, scale=order, title=None, axis=axis)
    x = alt.X("G:Q", title=f"{metric} gap G", scale=alt.Scale(zero=False))
    base = alt.Chart(alt.Data(values=dots)).encode(y=y)
    layers = (
        [
            alt.Chart(alt.Data(values=shaded))
            .mark_rect(opacity=0.16, color="var(--series-2)", cornerRadius=4)
            .encode(
                y=alt.Y("first:N", sort=None, scale=order, bandPosition=0.08),
                y2=alt.Y2("last:N", bandPosition=0.92),
            )
        ]
        if shaded
        else []
    )
    layers.append(base.mark_rule(strokeWidth=2, color="var(--axis)").encode(x=x, x2="reach:Q"))
    tooltip = ["checkpoint:N", "rank:Q", alt.Tooltip("G:Q", format=".4f")]
    layers.append(base.mark_point(filled=True, size=80).encode(x=x, tooltip=tooltip, **_marks(alt, dots)))
    return alt.layer(*layers).properties(height=max(60, 24 * len(members)))


def _marks(alt: Any, dots: Sequence[dict[str, Any]], *, several: bool = False) -> dict[str, Any]:
    """Another mark for controls, where there are some; several groups differ by colour."""
    found: dict[str, Any] = {"color": alt.Color("group:N", title=None)} if several else {}
    if any(dot["kind"] == "control" for dot in dots):
        kinds = ["checkpoint", "control"]
        found["shape"] = alt.Shape(
            "kind:N", scale=alt.Scale(domain=kinds, range=["circle", "diamond"]), title=None
        )
        if not several:
            colours = alt.Scale(domain=kinds, range=["var(--series-1)", "var(--series-7)"])
            found["color"] = alt.Color("kind:N", scale=colours, title=None)
    return found


def _trajectory(one: _Shown) -> Chart:
    best = one.group.checkpoints[0]
    return Chart(
        lambda: _trajectory_chart(one),
        caption=f"G along the training of {title(one.group)}",
        description=f"G against the training step; largest at {names(one.group)[best]}.",
        meaning="Bars: two paired standard errors of the change from the step before.",
        name=f"gap-{one.name}",
    )


def _trajectory_chart(one: _Shown) -> alt.LayerChart:
    import altair as alt

    metric, changes = one.result.metric, dict(zip(one.members, _changes(one), strict=True))
    values = []
    for place, c in enumerate(steps(one.group)):
        number, change = step_number(step_of(c) or ""), changes.get(c)
        G, se = c.gaps[metric].mean, change[1] if change else 0.0
        values.append(
            {
                "step": float(place) if number is None else number,
                "name": step_of(c),
                "G": G,
                "low": G - 2 * se,
                "high": G + 2 * se,
            }
        )
    positive = sorted(float(str(value["step"])) for value in values if float(str(value["step"])) > 0)
    wide = bool(positive) and positive[-1] > 500 * positive[0]
    x = alt.X(
        "step:Q", title="training step", scale=alt.Scale(type="symlog" if wide else "linear", nice=not wide)
    )
    base = alt.Chart(alt.Data(values=values)).encode(
        x=x, tooltip=["name:N", alt.Tooltip("G:Q", format=".4f")]
    )
    y = alt.Y("G:Q", title=f"{metric} gap G", scale=alt.Scale(zero=False))
    bars = base.mark_rule(strokeWidth=1.5, color="var(--axis)").encode(y=alt.Y("low:Q"), y2="high:Q")
    return (bars + base.mark_line(point=True).encode(y=y)).properties(height=280)


def _parts(one: _Shown) -> Chart:
    best = one.group.checkpoints[0]
    return Chart(
        lambda: _parts_chart(one),
        caption=f"Parts of the {one.result.metric} gap, {title(one.group)}",
        description="Bars of within(T), between(T, R) and the control within(R) for each checkpoint, with "
        f"one standard error; the largest G is that of {best.label}.",
        name=f"parts-{one.name}",
    )


def _parts_chart(one: _Shown) -> alt.LayerChart:
    import altair as alt

    called, members = _chart_names(one), one.members[:_DRAWN]
    values = []
    for c in members:
        for key, name in _PARTS.items():
            part = getattr(c.gaps[one.result.metric], key)
            low, high = part.mean - part.se, part.mean + part.se
            values.append(
                {"checkpoint": called[c], "part": name, "mean": part.mean, "low": low, "high": high}
            )
    parts = list(_PARTS.values())
    base = alt.Chart(alt.Data(values=values)).encode(
        y=alt.Y("checkpoint:N", sort=None, title=None, axis=alt.Axis(labelLimit=200)),
        yOffset=alt.YOffset("part:N", sort=parts),
        tooltip=["checkpoint:N", "part:N", alt.Tooltip("mean:Q", format=".4f")],
    )
    bars = base.mark_bar().encode(
        x=alt.X("mean:Q", title=f"mean {one.result.metric} distance"),
        color=alt.Color("part:N", sort=parts, title=None, legend=alt.Legend(orient="top")),
    )
    errors = base.mark_rule(strokeWidth=1.5, color="var(--ink)").encode(x="low:Q", x2="high:Q")
    return (bars + errors).properties(height=max(120, 48 * len(members)))


def _accuracy_chart(result: Result) -> alt.LayerChart:
    import altair as alt

    rated = [(group, c) for group in result.groups for c in group.checkpoints if c.accuracy is not None]
    dots: list[dict[str, Any]] = [
        {
            "name": called,
            "group": title(group),
            "accuracy": float(c.accuracy or 0.0),
            "G": c.gaps[result.metric].mean,
            "kind": "control" if c.negative_control else "checkpoint",
        }
        for (group, c), called in zip(rated, _accuracy_names(result, rated), strict=True)
    ]
    x = alt.X("G:Q", title=f"{result.metric} gap G", scale=alt.Scale(zero=False, padding=20))
    y = alt.Y("accuracy:Q", scale=alt.Scale(zero=False, padding=14))
    several = len({dot["group"] for dot in dots}) > 1
    points = (
        alt.Chart(alt.Data(values=dots))
        .mark_point(filled=True, size=80)
        .encode(
            x=x,
            y=y,
            tooltip=["name:N", "group:N", alt.Tooltip("G:Q", format=".4f"), "accuracy:Q"],
            **_marks(alt, dots, several=several),
        )
    )
    layers = [points]
    # Names are placed for a page and, fewer, for a phone; Vega shows those that fit its width.
    for wide, fits in ((620, "width >= 460"), (260, "width < 460")):
        for (align, dx, dy), named in _placed(dots, wide).items():
            style = {"align": align, "dx": dx, "dy": dy, "opacity": alt.expr(f"{fits} ? 1 : 0")}
            text = alt.Chart(alt.Data(values=named)).mark_text(fontSize=12, **style)
            layers.append(text.encode(x=x, y=y, text="name:N"))
    return alt.layer(*layers).properties(height=340)


def _accuracy_names(result: Result, rated: Sequence[tuple[Group, Screened]]) -> list[str]:
    whole = [
        f"{title(group)}/{names(group)[c]}" if len(steps(group)) > 1 else names(group)[c]
        for group, c in rated
    ]
    return short_names(whole)


_Place = tuple[str, int, int]
_PLACES: tuple[_Place, ...] = (
    *(("left", 9, 0), ("right", -9, 0), ("center", 0, -13), ("center", 0, 14)),
    *(("left", 9, -13), ("left", 9, 13), ("right", -9, -13), ("right", -9, 13)),
)


def _placed(dots: Sequence[dict[str, Any]], width: float) -> dict[_Place, list[dict[str, Any]]]:
    """The points that carry their names, by where the name stands: where it hides least of the others.

    Up to `_NAMED` points are all named; of more, those whose ranks by G and by accuracy differ most. On a
    narrow plot a name that would lie on another is left out.

    Args:
        dots: All points.
        width: Of the plot, in pixels.
    """
    by_gap = sorted(range(len(dots)), key=lambda i: dots[i]["G"])
    by_accuracy = sorted(range(len(dots)), key=lambda i: dots[i]["accuracy"])
    far = {i: abs(by_gap.index(i) - by_accuracy.index(i)) for i in range(len(dots))}
    chosen = sorted(far, key=lambda i: -far[i])[:_NAMED]
    height = 290.0

    def scaled(key: str, size: float) -> list[float]:
        values = [dot[key] for dot in dots]
        low, span = min(values), (max(values) - min(values)) or 1.0
        return [(value - low) / span * size for value in values]

    xs, ys = scaled("G", width), [height - y for y in scaled("accuracy", height)]
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in zip(xs, ys, strict=True)]
    found: dict[_Place, list[dict[str, Any]]] = {}
    for i in sorted(chosen, key=lambda i: xs[i]):
        wide = 6.8 * len(dots[i]["name"])
        boxes = {}
        for align, dx, dy in _PLACES:
            left = xs[i] + dx - {"left": 0.0, "center": wide / 2, "right": wide}[align]
            boxes[align, dx, dy] = (left, ys[i] + dy - 7, left + wide, ys[i] + dy + 7)
        best = min(boxes, key=lambda place: _hidden(boxes[place], taken, width))
        if width < 400 and _hidden(boxes[best], taken, width) > 20:
            continue
        taken.append(boxes[best])
        found.setdefault(best, []).append(dots[i])
    return found


def _hidden(
    box: tuple[float, float, float, float], taken: Sequence[tuple[float, float, float, float]], width: float
) -> float:
    """Area of a box that lies on others or beyond the plot."""
    outside = max(0.0, -20 - box[0]) + max(0.0, box[2] - width - 20)
    area = outside * (box[3] - box[1])
    for other in taken:
        wide = min(box[2], other[2]) - max(box[0], other[0])
        high = min(box[3], other[3]) - max(box[1], other[1])
        area += max(wide, 0.0) * max(high, 0.0)
    return area
