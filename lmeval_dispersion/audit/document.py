"""What the audit's commands report, as documents: the answer in sentences, tables, charts and limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lmeval_dispersion.audit.charts import calibration_chart, mixture_charts, ranking_charts, slice_chart
from lmeval_dispersion.audit.report import interval_text, ranking_sentence, report_json
from lmeval_dispersion.report import Column, Document, Facts, Note, Part, Row, Section, Table, Text

_SLICE_COLUMNS = [
    Column("documents", "Documents", "d"),
    Column("dispersion", "Dispersion", ".4f", error="dispersion_se", hint="Mean cosine distance over all "
           "pairs of the slice's documents, ± jackknife standard error; 0 all alike, 1 orthogonal."),
    Column("accuracy", "Accuracy", ".1%"),
    Column("interval", "95 % interval (%)", hint="Wilson interval of the accuracy.", drop=1),
    Column("query_perplexity", "Perplexity", ".2f", hint="Mean perplexity of the queries.", drop=2),
    Column("confidence", "Confidence", ".3f", hint="Mean probability of the chosen answer.", drop=3),
    Column("prompt_tokens", "Tokens", ".0f", hint="Mean prompt length.", drop=4),
]  # fmt: skip
_REMARK = Column("reason", "Remark")
_PROTOCOLS = {"whole": "Whole test part", "slices": "One batch a slice", "mixtures": "Mixtures"}
_LOWEST = 20  # documents of the low end that a ranking shows


def audit_document(report: Mapping[str, Any], *, most_slices: int | None = None) -> Document:
    """The audit of one run.

    Args:
        report: Of :func:`lmeval_dispersion.audit.report.audit_report`.
        most_slices: Slices that a table shows at most, the least dispersed ones; None for all. CSV and JSON
            always have all.
    """
    slicings = {"all": {"rows": [report["overall"]]}, **report["slices"]}
    return Document(
        title=f"Dispersion audit: {report['run']['model']}",
        answer=report["summary"],
        sections=[
            Section("", [Facts(_facts(report)), *map(Note, report["notes"])]),
            Section("Slices", _slices(report, most_slices)),
            _section("Controlled mixtures", report["mixtures"], _mixtures),
            _section("Calibration", report["calibration"], _calibration),
            _section("Which documents to look at first", report["ranking"], _ranking),
            _section("The hard tail", report["hard_tail"], _tail),
        ],
        limits=report["not_supported"],
        rows=[{"by": name, **row} for name, table in slicings.items() for row in table["rows"]],
        contract=lambda: f"{report_json(report)}\n",
        float_format="%.7g",
    )


def ranking_document(
    model: str, documents: Sequence[Row], ranking: Mapping[str, Any], tail: Mapping[str, Any]
) -> Document:
    """The documents of a run from the lowest contribution on, and what that order is worth.

    Args:
        model: The run's model.
        documents: Every document, lowest first; CSV holds them all.
        ranking: Of :func:`lmeval_dispersion.audit.ranking.ranking_report`, or why there is none.
        tail: Of :func:`lmeval_dispersion.audit.tail.hard_tail`.
    """
    lowest = [{**row, "text": _short(row["text"], 60)} for row in documents[:_LOWEST]]
    return Document(
        title=f"Documents by contribution: {model}",
        answer=[ranking_sentence(ranking)],
        sections=[
            Section(
                "",
                [
                    Table(
                        lowest,
                        [
                            Column("rank", "Rank", "d"),
                            Column("subject", "Subject", drop=2),
                            Column("doc_id", "doc_id", "d"),
                            Column("contribution", "Contribution", ".4f"),
                            Column("correct", "Correct", ".2f", drop=1),
                            Column("text", "Text"),
                        ],
                        f"The {len(lowest)} documents of lowest contribution of {len(documents)}",
                    )
                ],
            ),
            _section("What the order is worth", ranking, _ranking),
            _section("The hard tail", tail, _tail),
        ],
        rows=documents,
    )


def _facts(report: Mapping[str, Any]) -> dict[str, object]:
    run, whole = report["run"], report["overall"]
    tasks = list(run["tasks"])
    facts: dict[str, object] = {
        "Documents": run["documents"],
        "Tasks": ", ".join(tasks) if len(tasks) <= 4 else len(tasks),
        "Layer": f"{run['layer']} (width {run['width']})",
        "Dispersion": f"{whole['dispersion']:.4f} ± {whole['dispersion_se']:.4f}",
    }
    if not math.isnan(whole["accuracy"]):
        facts["Accuracy"] = f"{100 * whole['accuracy']:.1f} %"
    if run["revision"]:
        facts["Revision"] = str(run["revision"])[:12]
    if run["num_fewshot"] is not None:
        facts["Few-shot examples"] = run["num_fewshot"]
    return facts


def _section(
    heading: str, part: Mapping[str, Any], parts: Callable[[Mapping[str, Any]], list[Part]]
) -> Section:
    missing = part.get("missing")
    return Section(heading, [Note(f"Not available: {missing}.", "warning")] if missing else parts(part))


def _slices(report: Mapping[str, Any], most: int | None) -> list[Part]:
    parts: list[Part] = [Text("Low dispersion marks slices whose documents the model hardly tells apart.")]
    whole = report["overall"]
    if not report["slices"]:
        nothing = "Nothing divides the documents into slices: one subject, no lengths, no confidences."
        parts += [Note(nothing), _slice_table("slice", [], whole, most, hints=True)]
    for position, (name, table) in enumerate(report["slices"].items()):
        if position == 0 and (chart := slice_chart(name, table)):
            parts.append(chart)
        # How to read the columns is said once.
        parts.append(_slice_table(name, table["rows"], whole, most, hints=position == 0))
        found = table["association"]
        if "spearman" in found:
            parts.append(
                Text(
                    f"Over these {found['slices']} slices the Spearman correlation of dispersion with "
                    f"accuracy is {interval_text(found)}."
                )
            )
        elif report["run"]["labelled"]:
            parts.append(Text(f"No correlation with accuracy is given: {found['missing']}."))
    return parts


def _slice_table(name: str, rows: Sequence[Row], whole: Row, most: int | None, *, hints: bool) -> Table:
    ordered = sorted(rows, key=lambda row: math.inf if math.isnan(row["dispersion"]) else row["dispersion"])
    shown = [*ordered[:most], whole]
    columns = [Column("slice", name.capitalize()), *_SLICE_COLUMNS]
    if any(row["reason"] for row in shown):
        columns.append(_REMARK)
    left_out = len(ordered) - len(shown) + 1
    return Table(
        [{**row, "interval": _accuracy_interval(row)} for row in shown],
        columns if hints else [replace(column, hint="") for column in columns],
        f"{len(rows)} slices by {name}, least dispersed first",
        name=f"slices-{name}",
        more=f"{left_out} more; --format csv or json has them all" if left_out else "",
    )


def _mixtures(part: Mapping[str, Any]) -> list[Part]:
    parts: list[Part] = []
    if part["unreachable_targets"]:
        targets = ", ".join(f"{target} %" for target in part["unreachable_targets"])
        parts.append(
            Note(
                f"{part['correct_documents']} correct and {part['incorrect_documents']} incorrect documents "
                f"do not reach these targets with {part['documents_per_mixture']} documents a mixture: "
                f"{targets}."
            )
        )
    if part["documents_per_mixture"] < part["asked_documents_per_mixture"]:
        parts.append(
            Note(
                f"A mixture has {part['documents_per_mixture']} documents instead of "
                f"{part['asked_documents_per_mixture']}: the smaller pool has no more."
            )
        )
    if part["share_of_smaller_pool"] > 0.5:
        parts.append(
            Note("The draws at one end share most of their documents, so their error bars are too short.")
        )
    return [
        *parts,
        *mixture_charts(part),
        Text(
            f"{part['seeds']} draws of {part['documents_per_mixture']} documents for each share of correct "
            "ones."
        ),
        Text(_trend("Dispersion", part["dispersion_trend"])),
        Text(_trend("Perplexity", part["query_perplexity_trend"])),
        Text(_pools(part["pools"])),
        Text(
            "This interval is about other documents of the same kind; the error bars of the curves are about "
            "other draws from these ones, and shorter."
        ),
        Table(
            part["curve"],
            [
                Column("target_accuracy", "Correct documents (%)", "d"),
                Column("dispersion", "Dispersion", ".4f", error="dispersion_se"),
                Column("query_perplexity", "Query perplexity", ".3f", error="query_perplexity_se"),
            ],
            "The two curves, mean ± standard error",
            name="mixtures",
        ),
    ]


def _trend(name: str, trend: Mapping[str, Any]) -> str:
    """One line on a curve: its shape and rank correlation."""
    if "missing" in trend:
        return f"{name}: {trend['missing']}."
    return (
        f"{name}: {trend['shape']}, Spearman {trend['spearman']:.2f} "
        f"(95 % {trend['low']:.2f} to {trend['high']:.2f}), {len(trend['against'])} steps the other way."
    )


def _pools(pools: Mapping[str, Any]) -> str:
    """One line on the two pools: their dispersions and the difference."""
    if math.isnan(pools["difference"]):
        return "There are too few correct or incorrect documents to compare their dispersions."
    return (
        f"All correct documents {pools['correct']:.4f} ± {pools['correct_se']:.4f}, all incorrect "
        f"{pools['incorrect']:.4f} ± {pools['incorrect_se']:.4f}; difference {pools['difference']:+.4f} "
        f"(95 % {pools['difference_low']:+.4f} to {pools['difference_high']:+.4f})."
    )


def _calibration(part: Mapping[str, Any]) -> list[Part]:
    chosen = ", ".join(f"{kind} {count}" for kind, count in part["chosen"].items())
    parts: list[Part] = [
        Text(
            "Can the accuracy of documents without labels be read off their dispersion? The labelled "
            f"documents were split 20/10/70 into calibration, validation and test, {part['seeds']} times; "
            f"batches have {part['documents_per_batch']} documents. Validation chose: {chosen}."
        )
    ]
    for name, judged in part["protocols"].items():
        if "missing" in judged:
            parts.append(Note(f"{_PROTOCOLS[name]}: not available, {judged['missing']}."))
            continue
        parts += [
            Table(
                [{**row, "interval": _range(row["low"], row["high"], ".2f")} for row in judged["estimators"]],
                [
                    Column("estimator", "Estimator"),
                    Column("mae", "Mean absolute error (points)", ".2f", short="Error (points)"),
                    Column("interval", "95 % interval"),
                    Column("bias", "Bias (points)", "+.2f", drop=1),
                ],
                _PROTOCOLS[name],
                name=f"calibration-{name}",
            ),
            Text(f"{_PROTOCOLS[name]}: dispersion is {judged['verdict']}; best: {judged['winner']}."),
        ]
    return [
        *parts,
        Text(
            "`dispersion` is the regression chosen on the validation part; `trivial` is the calibration "
            "part's own accuracy; `constant` the middle of all targets; `mean confidence` and `ATC` (average "
            "thresholded confidence) use the model's answer probabilities and no vectors. Splits share "
            "documents, so the intervals are a little too narrow."
        ),
        calibration_chart(part),
    ]


def _ranking(part: Mapping[str, Any]) -> list[Part]:
    signals = [
        {
            **row,
            **{f"e{share}": value for share, value in row.get("error_share", {}).items()},
            "interval": _range(row["auroc_low"], row["auroc_high"], ".3f") if "auroc" in row else None,
        }
        for row in part["signals"]
    ]
    columns = [
        Column("signal", "Signal", hint="Turned so that a low value means: probably wrong."),
        Column("auroc", "AUROC", ".3f", hint="Chance that a wrong document ranks below a right one; "
               "0.5 says nothing."),
        Column("interval", "95 % interval", hint="DeLong."),
        Column("e5", "Errors in lowest 5 %", ".1%", short="5 %", drop=2),
        Column("e10", "10 %", ".1%", drop=1),
        Column("e20", "20 %", ".1%", drop=3),
        Column("e50", "50 %", ".1%", drop=4),
    ]  # fmt: skip
    if any("missing" in row for row in signals):
        columns.append(Column("missing", "Remark"))
    parts: list[Part] = [
        *ranking_charts(part),
        Table(signals, columns, "How well each signal finds wrong answers", name="signals"),
    ]
    if part["against"]:
        parts.append(
            Table(
                [{**row, "interval": _range(row["low"], row["high"], "+.3f")} for row in part["against"]],
                [
                    Column("signal", "Against"),
                    Column("difference", "AUROC of contribution minus its", "+.3f", short="AUROC difference"),
                    Column("interval", "95 % interval"),
                    Column("verdict", "Contribution is"),
                ],
                "The contribution against every other signal, on the same documents",
                name="against",
            )
        )
    if part["confounds"]:
        parts.append(
            Table(
                part["confounds"],
                [
                    Column("quantity", "Quantity"),
                    Column("spearman", "Spearman with contribution", ".2f", short="Spearman"),
                    Column("auroc_within_bands", "AUROC where it is held equal", ".3f", hint="The ranking "
                           "inside single subjects, or inside five bands of the quantity, averaged."),
                ],
                "What else the contribution follows",
                name="confounds",
            )
        )  # fmt: skip
    return parts


def _tail(part: Mapping[str, Any]) -> list[Part]:
    clusters = [
        {
            **cluster,
            "cluster": number,
            "subjects": ", ".join(f"{s['subject']} {s['documents']}" for s in cluster["subjects"]),
        }
        for number, cluster in enumerate(part["clusters"], 1)
    ]
    typical = [
        {
            "cluster": number,
            "subject": document["subject"],
            "text": _short(document["text"] or f"document {document['doc_id']}", 160),
        }
        for number, cluster in enumerate(part["clusters"], 1)
        for document in cluster["typical"]
    ]
    return [
        Text(
            f"The {part['documents']} documents of lowest contribution in {len(clusters)} clusters, each "
            "with the texts nearest to its centre. They show what the model hardly tells apart, whether or "
            "not it answers it well."
        ),
        Table(
            clusters,
            [
                Column("cluster", "Cluster", "d"),
                Column("documents", "Documents", "d"),
                Column("accuracy", "Accuracy", ".1%"),
                Column("subjects", "Commonest subjects"),
            ],
            "Clusters of the hard tail, largest first",
            name="clusters",
        ),
        Table(
            typical,
            [Column("cluster", "Cluster", "d"), Column("subject", "Subject", drop=1), Column("text", "Text")],
            "Most typical texts of each cluster",
            name="typical",
        ),
    ]


def _short(text: object, length: int) -> str:
    line = " ".join(text.split()) if isinstance(text, str) else ""
    return line if len(line) <= length else f"{line[: length - 1]}…"


def _accuracy_interval(row: Row) -> str | None:
    if math.isnan(row["accuracy"]):
        return None
    return _range(100 * row["accuracy_low"], 100 * row["accuracy_high"], ".1f")


def _range(low: float, high: float, spec: str) -> str:
    return f"{low:{spec}} to {high:{spec}}"
