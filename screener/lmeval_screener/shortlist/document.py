"""A verdict as a report: the answer, agreement, what the lists missed, and what else could have ranked."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from lmeval_dispersion.report import Chart, Column, Document, Facts, Note, Part, Section, Table, Text
from lmeval_dispersion.report.declared import json_value
from lmeval_screener.shortlist.verdict import GroupVerdict, Verdict

if TYPE_CHECKING:
    import altair as alt

SCHEMA = "screen-checkpoints-verdict/1"
_LIMITS = (
    "Accuracies are taken as they are: no figure here allows for the choice of their questions.",
    "A verdict is of this task, these groups and checkpoints like these; G predicts no accuracy.",
    "The best of all cannot be estimated from a sample without bias: where not all are known, the "
    "regret is at least what was seen.",
)


def verdict_document(verdict: Verdict) -> Document:
    """The report of a verdict."""
    lines = [*verdict.groups, *([verdict.overall] if len(verdict.groups) > 1 else [])]
    sections = [_agreement(verdict, lines), _missed(verdict)]
    if verdict.exploration is not None:
        sections.append(_exploration(verdict))
    sections.append(_details(verdict))
    return Document(
        title=f"Verdict on a short list for {verdict.manifest.domain}",
        answer=verdict.answer(),
        sections=sections,
        limits=_LIMITS,
        rows=[_row(one) for one in lines],
        contract=lambda: _json(verdict),
        libraries=("numpy",),
        guide="docs/reference/screening.md",
    )


def _agreement(verdict: Verdict, lines: list[GroupVerdict]) -> Section:
    columns = [
        Column("group", "Group"),
        Column("candidates", "Candidates", "d", short="Cand.", drop=2),
        Column("results", "Results", "d", short="n"),
        Column("spearman", "Spearman", ".3f"),
        Column("p", "p", "p-value", hint="by permutation inside groups, two-sided."),
        Column("share", "Right order", ".2f", hint="share of pairs that G orders as the results do."),
        Column("low", "from", ".2f"),
        Column("high", "to", ".2f", hint="95 % interval, for checkpoints like these."),
        Column(
            "pairs",
            "Pairs",
            hint="all: estimated for every pair of candidates; known: of those with results.",
        ),
        Column("reason", "Remark", drop=1),
    ]
    rows = [
        {
            "group": one.name or "all, inside groups",
            "candidates": one.candidates,
            "results": one.results,
            "spearman": one.agreement.spearman,
            "p": one.agreement.spearman_p,
            "share": one.decisions.value,
            "low": one.decisions.low,
            "high": one.decisions.high,
            "pairs": "all" if one.stands_for_all else "known",
            "reason": one.agreement.reason,
        }
        for one in lines
    ]
    if not any(row["reason"] for row in rows):
        columns = columns[:-1]
    parts: list[Part] = [
        Chart(
            lambda: _chart(lines),
            caption="Share of pairs in the right order",
            description="One dot a group with its 95 % interval; a half is chance.",
            name="decisions",
        ),
        Table(rows, columns, "G against the results", name="agreement-table"),
    ]
    return Section("G against the results", parts, name="agreement")


def _missed(verdict: Verdict) -> Section:
    columns = [
        Column("group", "Group"),
        Column("listed", "List", "d"),
        Column("best", "Best of it", ".3g"),
        Column("regret", "Regret", ".3g", hint="best of all minus best of the list, where all are known."),
        Column(
            "at_random", "At random", ".3g", hint="regret of as many drawn at random, on average.", drop=1
        ),
        Column(
            "seen", "Seen", ".3g", hint="the same among what is known: the regret is at least this.", drop=2
        ),
        Column("drawn", "Audited", "d"),
        Column(
            "better", "Others better", ".3g", hint="than the best of the list, of all others, without bias."
        ),
        Column("better_low", "from", ".0f"),
        Column("better_high", "to", ".0f", hint="95 % interval, exact."),
        Column(
            "excess", "Mean excess", ".3g", drop=1, hint="by how much an other is better, 0 where it is not."
        ),
    ]
    rows: list[dict[str, Any]] = []
    for one in verdict.groups:
        found = one.missed
        row: dict[str, Any] = {"group": one.name, "listed": one.listed}
        if found is not None:
            row |= {"best": found.best, "regret": _there(found.regret), "at_random": _there(found.at_random)}
            row |= {"seen": found.seen, "drawn": found.drawn, "better": _there(found.better.value)}
            row |= {"better_low": _there(found.better.low), "better_high": _there(found.better.high)}
            row |= {"excess": _there(found.excess)}
        rows.append(row)
    return Section(
        "What the list missed",
        [Table(rows, columns, "Lists against the others", name="missed-table")],
        name="missed",
    )


def _exploration(verdict: Verdict) -> Section:
    found = verdict.exploration
    assert found is not None
    columns = [Column("name", "Figure"), Column("n", "n", "d"), Column("spearman", "Spearman", ".3f")]
    rows = [{"name": one.name, "n": one.n, "spearman": one.spearman} for one in found.rivals]
    text = (
        "Everything in the manifest that could have ranked these checkpoints, the strongest first, whichever "
        f"its sign. p {found.p:.4f} is of the strongest of all {len(rows)}: {found.draws:,} orders of the "
        "results were drawn inside groups. Exploratory: test what is chosen here on other checkpoints."
    )
    table = Table(rows, columns, "Figures that could have ranked", name="exploration-table")
    return Section("What else could have ranked", [table, Text(text)], name="exploration")


def _details(verdict: Verdict) -> Section:
    facts: dict[str, object] = {
        "Manifest": verdict.manifest.place,
        "Results": "; ".join(verdict.meaning),
        "List": f"K {verdict.manifest.k}, audit sample {verdict.manifest.audit_sample}"
        + (", over all groups together" if verdict.manifest.diverse else ", of each group"),
    }
    if verdict.saved is not None:
        facts["GPU hours saved"] = f"{verdict.saved:,.4g}, at {verdict.hours:g} a model"
    parts: list[Part] = [Facts(facts)]
    if verdict.without:
        parts.append(Note(f"No result of: {', '.join(verdict.without)}"))
    return Section("Details", parts, name="details", details=True)


def _chart(lines: list[GroupVerdict]) -> alt.LayerChart:
    import altair as alt

    values = [
        {
            "group": one.name or "all",
            "share": one.decisions.value,
            "low": one.decisions.low,
            "high": one.decisions.high,
        }
        for one in lines
        if math.isfinite(one.decisions.value)
    ]
    x = alt.X("share:Q", title="pairs in the right order", scale=alt.Scale(domain=[0, 1]))
    base = alt.Chart(alt.Data(values=values)).encode(y=alt.Y("group:N", sort=None, title=None))
    chance = alt.Chart(alt.Data(values=[{"chance": 0.5}])).mark_rule(strokeDash=[4, 4], color="var(--axis)")
    layers = [
        chance.encode(x="chance:Q"),
        base.mark_rule(strokeWidth=2, color="var(--axis)").encode(x="low:Q", x2="high:Q"),
        base.mark_point(filled=True, size=80).encode(
            x=x, tooltip=["group:N", alt.Tooltip("share:Q", format=".3f")]
        ),
    ]
    return alt.layer(*layers).properties(height=max(60, 26 * len(values)))


# --- as data --------------------------------------------------------------------------------------------


def _there(value: float) -> float | None:
    """None for what is not defined: an empty cell rather than the word."""
    return None if math.isnan(value) else value


def _row(one: GroupVerdict) -> dict[str, Any]:
    """One group as a flat row."""
    found = one.missed
    row: dict[str, Any] = {
        "group": one.name or "all",
        "outcome": one.outcome,
        "candidates": one.candidates,
        "listed": one.listed,
        "audited": one.audited,
        "results": one.results,
        "spearman": _there(one.agreement.spearman),
        "spearman_p": _there(one.agreement.spearman_p),
        "decision_accuracy": _there(one.decisions.value),
        "decision_accuracy_low": _there(one.decisions.low),
        "decision_accuracy_high": _there(one.decisions.high),
        "stands_for_all": one.stands_for_all,
        "separate": one.separate,
    }
    names = ("best", "regret", "seen", "at_random", "excess")
    row |= {name: None if found is None else _there(getattr(found, name)) for name in names}
    row |= {
        name: None if found is None else getattr(found, name) for name in ("others", "drawn", "better_seen")
    }
    return row | {
        f"better{end}": None if found is None else _there(found.better[i])
        for i, end in enumerate(("", "_low", "_high"))
    }


def _json(verdict: Verdict) -> str:
    """The contract ``screen-checkpoints-verdict/1``."""
    found = verdict.exploration
    content = {
        "schema": SCHEMA,
        "answer": verdict.answer(),
        "outcome": verdict.overall.outcome,
        "domain": verdict.manifest.domain,
        "metric": verdict.manifest.metric,
        "results": list(verdict.meaning),
        "groups": [_row(one) | {"agreement": json_value(one.agreement)} for one in verdict.groups],
        "overall": _row(verdict.overall) | {"agreement": json_value(verdict.overall.agreement)},
        "without": list(verdict.without),
        "hours_per_model": verdict.hours,
        "hours_saved": verdict.saved,
        "exploration": found
        and {
            "p": found.p,
            "draws": found.draws,
            "figures": [{"name": one.name, "n": one.n, "spearman": one.spearman} for one in found.rivals],
        },
    }
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
