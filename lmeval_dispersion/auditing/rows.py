"""The rows and tables of an audit, from what its parts computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from lmeval_dispersion.auditing.conclusions import inside_figure
from lmeval_dispersion.auditing.run import FEWEST
from lmeval_dispersion.report import Col, Table
from lmeval_dispersion.statistics import NORMAL_975

Found = Mapping[str, Any]


@dataclass(frozen=True)
class SliceLine:
    """One slice in the short table."""

    slice: Annotated[str, Col("Slice")]
    documents: Annotated[int, Col("Docs", "d")]
    dispersion: Annotated[float, Col("Dispersion", ".4f", dots="both", reach="reach")]
    reach: float
    accuracy: Annotated[str, Col("Accuracy (95 %)")]


@dataclass(frozen=True)
class SliceShown:
    """One slice in the whole table."""

    slice: Annotated[str, Col("Slice")]
    documents: Annotated[int, Col("Documents", "d")]
    dispersion: Annotated[
        float,
        Col(
            "Dispersion",
            ".4f",
            error="dispersion_se",
            hint="Mean cosine distance over all pairs of the slice's documents, ± jackknife standard error; "
            "0 all alike, 1 orthogonal.",
        ),
    ]
    dispersion_se: float
    accuracy: Annotated[float | None, Col("Accuracy", ".1%")]
    interval: Annotated[str | None, Col("95 % interval (%)", hint="Wilson interval of the accuracy.", drop=1)]
    query_perplexity: Annotated[
        float | None, Col("Perplexity", ".2f", hint="Mean perplexity of the queries.", drop=2)
    ]
    confidence: Annotated[
        float | None, Col("Confidence", ".3f", hint="Mean probability of the chosen answer.", drop=3)
    ]
    prompt_tokens: Annotated[float | None, Col("Tokens", ".0f", hint="Mean prompt length.", drop=4)]
    rankme: Annotated[float | None, Col("RankMe", ".4g", drop=5)] = None
    effective_rank: Annotated[float | None, Col("Effective rank", ".4g", drop=6)] = None
    participation_ratio: Annotated[float | None, Col("Participation ratio", ".4g", drop=7)] = None
    stable_rank: Annotated[float | None, Col("Stable rank", ".4g", drop=8)] = None
    reason: Annotated[str | None, Col("Remark")] = None


def slices_table(name: str, rows: Sequence[Found], whole: Found, *, ends: int = 0) -> Table:
    """The slices of one slicing, least dispersed first, then all documents.

    With ``ends`` the short lines, of which texts show so many of each end.
    """
    ordered = sorted(rows, key=lambda row: math.inf if math.isnan(row["dispersion"]) else row["dispersion"])
    caption = f"{len(rows)} slices by {name}, least dispersed first"
    heading, anchor = {"slice": name.capitalize()}, f"slices-{name}"
    if not ends:
        full = [
            SliceShown(
                **{
                    key: known(row.get(key)) if key != "dispersion" else row[key]
                    for key in SliceShown.__dataclass_fields__
                    if key != "interval"
                },
                interval=_accuracy_interval(row),
            )
            for row in [*ordered, whole]
        ]
        return Table.of(full, caption, name=anchor, headings=heading)
    lines = [
        SliceLine(
            row["slice"],
            row["documents"],
            row["dispersion"],
            NORMAL_975 * row["dispersion_se"],
            _accuracy(row),
        )
        for row in [*ordered, whole]
    ]
    last = len(lines) - 1
    some = [*range(ends), *range(last - ends, last + 1)] if last > 2 * ends else []
    return Table.of(lines, caption, name=anchor, headings=heading, excerpt=some)


def _accuracy(row: Found) -> str:
    if math.isnan(row["accuracy"]):
        return ""
    return f"{row['accuracy']:.0%} ({100 * row['accuracy_low']:.0f}–{100 * row['accuracy_high']:.0f})"


def known(value: Any) -> Any:
    """None for NaN, which leaves a cell empty."""
    return None if isinstance(value, float) and math.isnan(value) else value


def run_facts(run: Found, whole: Found, answers: Found) -> dict[str, object]:
    """What was audited, in a few names and values."""
    tasks = list(run["tasks"])
    facts: dict[str, object] = {
        "Documents": run["documents"],
        "Tasks": ", ".join(tasks) if len(tasks) <= 4 else len(tasks),
        "Layer": f"{run['layer']} (width {run['width']})",
    }
    if not math.isnan(whole["dispersion"]):
        error = "" if math.isnan(whole["dispersion_se"]) else f" ± {whole['dispersion_se']:.4f}"
        facts["Dispersion"] = f"{whole['dispersion']:.4f}{error}"
    if not math.isnan(whole["accuracy"]):
        facts["Accuracy"] = f"{100 * whole['accuracy']:.1f} %"
    if not math.isnan(answers["chance"]):
        facts["Guessing"] = f"{100 * answers['chance']:.1f} %"
    # An answer that is a whole text is no choice that could be given again and again.
    if answers["commonest"] and answers["commonest_documents"] > 1:
        facts["Commonest answer"] = (
            f"{short(answers['commonest'], 40)} ({100 * answers['commonest_share']:.1f} %)"
        )
    if run["revision"]:
        facts["Revision"] = str(run["revision"])[:12]
    if run["num_fewshot"] is not None:
        facts["Few-shot examples"] = run["num_fewshot"]
    return facts


@dataclass(frozen=True)
class CurvePoint:
    """One target accuracy of the mixtures."""

    target_accuracy: Annotated[int, Col("Correct documents (%)", "d")]
    dispersion: Annotated[float, Col("Dispersion", ".4f", error="dispersion_se")]
    dispersion_se: float
    inside_subject: Annotated[
        float | None,
        Col(
            "Inside subjects",
            ".4f",
            error="inside_subject_se",
            drop=1,
            hint="The same number of documents of each in all mixtures.",
        ),
    ]
    inside_subject_se: float | None
    inside_task: Annotated[float | None, Col("Inside tasks", ".4f", error="inside_task_se", drop=1)]
    inside_task_se: float | None
    query_perplexity: Annotated[float | None, Col("Query perplexity", ".3f", error="query_perplexity_se")]
    query_perplexity_se: float | None


def curve_table(part: Found) -> Table:
    """The curves over target accuracies, those inside subjects and tasks beside them."""
    inside = {
        name: {point["target_accuracy"]: point for point in inner.get("curve", ())}
        for name, inner in part["inside"].items()
    }
    rows = []
    for point in part["curve"]:
        beside = {
            f"inside_{name}{key}": inside.get(name, {})
            .get(point["target_accuracy"], {})
            .get(f"dispersion{key}")
            for name in ("subject", "task")
            for key in ("", "_se")
        }
        rows.append(CurvePoint(**{key: known(value) for key, value in (point | beside).items()}))
    return Table.of(rows, "The curves, mean ± standard error over draws", name="mixtures")


def mixture_lines(part: Found) -> list[str]:
    """One line on each curve and on each difference of right and wrong documents."""
    lines = [_trend("Dispersion", part["dispersion_trend"]), _pools("dispersion", ".4f", part["pools"])]
    for name, inner in part["inside"].items():
        if "missing" in inner:
            lines.append(f"Inside {name}s: not available, {inner['missing']}.")
        else:
            lines.append(
                f"Inside {name}s (as many documents of each of {inner['parts']} {name}s on both sides): "
                f"difference in dispersion {_difference(inner['pools'], '.4f')}."
            )
    lines.append(_trend("Query perplexity", part["query_perplexity_trend"]))
    return [*lines, _pools("query perplexity", ".3f", part["perplexity_pools"])]


def _trend(name: str, trend: Found) -> str:
    if "missing" in trend:
        return f"{name}: {trend['missing']}."
    steps = len(trend["against"])
    return (
        f"{name}: {trend['shape']}, Spearman {trend['spearman']:.2f}, {steps} step{'s' * (steps != 1)} the "
        "other way."
    )


def _pools(name: str, spec: str, pools: Found) -> str:
    if math.isnan(pools["difference"]):
        return f"There are too few correct or incorrect documents to compare their {name}."
    ends = (f"{pools[side]:{spec}} ± {pools[f'{side}_se']:{spec}}" for side in ("correct", "incorrect"))
    text = "All correct documents {}, all incorrect {}".format(*ends)
    return f"{text}; difference in {name} {_difference(pools, spec)}."


def _difference(pools: Found, spec: str) -> str:
    low, high = pools["difference_low"], pools["difference_high"]
    bounds = f"95 % {low:+{spec}} to {high:+{spec}}"
    few = f"no interval, {FEWEST} documents a side are needed"
    return f"{pools['difference']:+{spec}} ({few if math.isnan(low) else bounds})"


@dataclass(frozen=True)
class SignalRow:
    """How well one signal finds wrong answers."""

    signal: Annotated[str, Col("Signal", hint="Turned so that a low value means: probably wrong.")]
    auroc: Annotated[
        float | None,
        Col("AUROC", ".3f", hint="Chance that a wrong document ranks below a right one; 0.5 says nothing."),
    ]
    interval: Annotated[str | None, Col("95 % interval", hint="DeLong, by the logit.")]
    inside: Annotated[float | None, Col("Inside", ".3f", hint="Only pairs of one subject or task count.")]
    inside_interval: Annotated[str | None, Col("95 % inside", drop=1)]
    e5: Annotated[float | None, Col("Errors in lowest 5 %", ".1%", short="5 %", drop=2)]
    e10: Annotated[float | None, Col("10 %", ".1%", drop=1)]
    e20: Annotated[float | None, Col("20 %", ".1%", drop=3)]
    e50: Annotated[float | None, Col("50 %", ".1%", drop=4)]
    missing: Annotated[str | None, Col("Remark")] = None


@dataclass(frozen=True)
class AgainstRow:
    """The contribution against one other signal, on the same documents."""

    signal: Annotated[str, Col("Against")]
    difference: Annotated[float, Col("AUROC of contribution minus its", "+.3f", short="AUROC difference")]
    interval: Annotated[str, Col("95 % interval", hint="They hold together, for all signals.")]
    verdict: Annotated[str, Col("Contribution is")]


@dataclass(frozen=True)
class ConfoundRow:
    """A quantity that the contribution may follow."""

    quantity: Annotated[str, Col("Quantity")]
    spearman: Annotated[float, Col("Spearman with contribution", ".2f", short="Spearman")]
    auroc_within_bands: Annotated[
        float,
        Col(
            "AUROC where it is held equal",
            ".3f",
            hint="The ranking inside five bands of the quantity, averaged.",
        ),
    ]


def ranking_tables(part: Found) -> dict[str, Table]:
    """Signals, the contribution against the others, and what else it follows."""
    signals = [_signal(row) for row in part["signals"]]
    against = [
        AgainstRow(row["signal"], row["difference"], bounds(row["low"], row["high"], "+.3f"), row["verdict"])
        for row in part["against"]
    ]
    inside = next((f"Inside {name}s" for name in part["signals"][0].get("inside", {})), "Inside")
    tables = {
        "signals": Table.of(
            signals, "How well each signal finds wrong answers", name="signals", headings={"inside": inside}
        )
    }
    if against:
        caption = "The contribution against every other signal, on the same documents"
        tables["against"] = Table.of(against, caption, name="against")
    if part["confounds"]:
        rows = [ConfoundRow(**row) for row in part["confounds"]]
        tables["confounds"] = Table.of(rows, "What else the contribution follows", name="confounds")
    return tables


def _signal(row: Found) -> SignalRow:
    inside = inside_figure(row, "auroc")[1] if "auroc" in row else None
    share = row.get("error_share", {})
    return SignalRow(
        row["signal"],
        row.get("auroc"),
        bounds(row["auroc_low"], row["auroc_high"], ".3f") if "auroc" in row else None,
        inside.value if inside else None,
        bounds(inside.low, inside.high, ".3f") if inside else None,
        share.get("5"),
        share.get("10"),
        share.get("20"),
        share.get("50"),
        row.get("missing"),
    )


@dataclass(frozen=True)
class TailCluster:
    """One cluster of the hard tail."""

    cluster: Annotated[int, Col("Cluster", "d")]
    documents: Annotated[int, Col("Documents", "d")]
    accuracy: Annotated[float | None, Col("Accuracy", ".1%")]
    subjects: Annotated[str, Col("Commonest subjects")]


@dataclass(frozen=True)
class TypicalText:
    """A text near the centre of a cluster."""

    cluster: Annotated[int, Col("Cluster", "d")]
    subject: Annotated[str, Col("Subject", drop=1)]
    text: Annotated[str, Col("Text")]


def tail_tables(part: Found) -> dict[str, Table]:
    """The clusters of the hard tail, and the texts nearest to their centres."""
    clusters = [
        TailCluster(
            number,
            cluster["documents"],
            known(cluster["accuracy"]),
            ", ".join(f"{s['subject']} {s['documents']}" for s in cluster["subjects"]),
        )
        for number, cluster in enumerate(part["clusters"], 1)
    ]
    typical = [
        TypicalText(
            number, document["subject"], short(document["text"] or f"document {document['doc_id']}", 160)
        )
        for number, cluster in enumerate(part["clusters"], 1)
        for document in cluster["typical"]
    ]
    return {
        "clusters": Table.of(clusters, "Clusters of the hard tail, largest first", name="clusters"),
        "typical": Table.of(typical, "Most typical texts of each cluster", name="typical"),
    }


def short(text: object, length: int) -> str:
    """A text in one line of at most ``length`` characters."""
    line = " ".join(text.split()) if isinstance(text, str) else ""
    return line if len(line) <= length else f"{line[: length - 1]}…"


def _accuracy_interval(row: Found) -> str | None:
    if math.isnan(row["accuracy"]):
        return None
    return bounds(100 * row["accuracy_low"], 100 * row["accuracy_high"], ".1f")


def bounds(low: float, high: float, spec: str) -> str:
    """An interval in words; ``none`` where it has no bounds."""
    return "none" if math.isnan(low) else f"{low:{spec}} to {high:{spec}}"
