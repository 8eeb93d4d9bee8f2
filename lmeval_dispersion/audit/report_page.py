"""The report of a run as one self-contained HTML page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lmeval_dispersion.audit.charts import (
    Figure,
    calibration_figure,
    mixture_figures,
    ranking_figures,
    slice_figure,
)
from lmeval_dispersion.audit.text import interval_text, pools_text, trend_text
from lmeval_dispersion.report.page import Column, Page

_SLICES = [
    Column("documents", "Documents", "d"),
    Column("dispersion", "Dispersion", ".4f", error="dispersion_se", hint="Mean cosine distance over all "
           "pairs of the slice's documents, ± jackknife standard error; 0 all alike, 1 orthogonal."),
    Column("accuracy", "Accuracy", ".1%"),
    Column("interval", "95 % interval (%)", hint="Wilson interval of the accuracy."),
    Column("query_perplexity", "Perplexity", ".2f", hint="Mean perplexity of the queries."),
    Column("confidence", "Confidence", ".3f", hint="Mean probability of the chosen answer."),
    Column("prompt_tokens", "Tokens", ".0f", hint="Mean prompt length."),
]  # fmt: skip


def report_html(report: Mapping[str, Any]) -> str:
    """The page of a report; equal reports give equal bytes."""
    run = report["run"]
    page = Page(f"Dispersion audit: {run['model']}", "\n\n".join(report["summary"]))
    page.facts(_facts(report))
    for note in report["notes"]:
        page.note(note)
    _slices(page, report)
    _part(page, "Controlled mixtures", report["mixtures"], _mixtures)
    _part(page, "Calibration", report["calibration"], _calibration)
    _part(page, "Which documents to look at first", report["ranking"], _ranking)
    _part(page, "The hard tail", report["hard_tail"], _tail)
    page.section("What this does not support")
    page.note("\n\n".join(report["not_supported"]), kind="warning")
    return page.html()


def _facts(report: Mapping[str, Any]) -> dict[str, object]:
    run, whole = report["run"], report["overall"]
    tasks = list(run["tasks"])
    facts: dict[str, object] = {
        "Documents": run["documents"],
        "Tasks": ", ".join(tasks) if len(tasks) <= 4 else f"{len(tasks)} tasks",
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


def _part(page: Page, heading: str, part: Mapping[str, Any], write: Any) -> None:
    page.section(heading)
    if "missing" in part:
        page.note(f"Not available: {part['missing']}.", kind="warning")
    else:
        write(page, part)


def _figure(page: Page, figure: Figure) -> None:
    page.chart(figure.chart, caption=figure.caption, description=figure.description)
    page.text(figure.meaning)


def _slices(page: Page, report: Mapping[str, Any]) -> None:
    page.section("Slices", "Low dispersion marks slices whose documents the model hardly tells apart.")
    if not report["slices"]:
        page.note("Nothing divides the documents into slices: one subject, no lengths, no confidences.")
    for position, (name, table) in enumerate(report["slices"].items()):
        if position == 0 and (figure := slice_figure(name, table)):
            _figure(page, figure)
        rows = sorted(table["rows"], key=_dispersion)
        reasons = any(row["reason"] for row in rows)
        # How to read the columns is said once.
        shown = _SLICES if position == 0 else [column._replace(hint="") for column in _SLICES]
        columns = [Column("slice", name.capitalize()), *shown]
        page.table(
            [{**row, "interval": _interval(row)} for row in rows],
            [*columns, Column("reason", "Remark")] if reasons else columns,
            caption=f"{len(rows)} slices by {name}, least dispersed first",
        )
        found = table["association"]
        if "spearman" in found:
            page.text(
                f"Over these {found['slices']} slices the Spearman correlation of dispersion with accuracy "
                f"is {interval_text(found)}."
            )
        elif report["run"]["labelled"]:
            page.text(f"No correlation with accuracy is given: {found['missing']}.")


def _mixtures(page: Page, part: Mapping[str, Any]) -> None:
    if part["unreachable_targets"]:
        targets = ", ".join(f"{target} %" for target in part["unreachable_targets"])
        page.note(
            f"{part['correct_documents']} correct and {part['incorrect_documents']} incorrect documents do "
            f"not reach these targets with {part['documents_per_mixture']} documents a mixture: {targets}."
        )
    if part["documents_per_mixture"] < part["asked_documents_per_mixture"]:
        page.note(
            f"A mixture has {part['documents_per_mixture']} documents instead of "
            f"{part['asked_documents_per_mixture']}: the smaller pool has no more."
        )
    if part["share_of_smaller_pool"] > 0.5:
        page.note("The draws at one end share most of their documents, so their error bars are too short.")
    for figure in mixture_figures(part):
        _figure(page, figure)
    trends = (("Dispersion", "dispersion_trend"), ("Perplexity", "query_perplexity_trend"))
    for name, key in trends:
        page.text(f"{trend_text(name, part[key])}.")
    page.text(
        f"Dispersion of {pools_text(part['pools'])}. This interval is about other documents of the same "
        "kind; the error bars of the curves are about other draws from these ones, and shorter."
    )
    page.table(
        part["curve"],
        [
            Column("target_accuracy", "Correct documents (%)", "d"),
            Column("dispersion", "Dispersion", ".4f", error="dispersion_se"),
            Column("query_perplexity", "Query perplexity", ".3f", error="query_perplexity_se"),
        ],
        caption="The two curves, mean ± standard error over the draws",
    )


def _calibration(page: Page, part: Mapping[str, Any]) -> None:
    page.text(
        "Can the accuracy of documents without labels be read off their dispersion? The labelled documents "
        f"were split 20/10/70 into calibration, validation and test, {part['seeds']} times; batches have "
        f"{part['documents_per_batch']} documents."
    )
    for name, judged in part["protocols"].items():
        title = {"whole": "Whole test part", "slices": "One batch a slice", "mixtures": "Mixtures"}[name]
        if "missing" in judged:
            page.note(f"{title}: not available, {judged['missing']}.")
            continue
        page.table(
            [{**row, "interval": _range(row["low"], row["high"], ".2f")} for row in judged["estimators"]],
            [
                Column("estimator", "Estimator"),
                Column("mae", "Mean absolute error (points)", ".2f"),
                Column("interval", "95 % interval"),
                Column("bias", "Bias (points)", "+.2f"),
            ],
            caption=f"{title}: dispersion is {judged['verdict']}; best is {judged['winner']}",
        )
    page.text(
        "`dispersion` is the regression chosen on the validation part; `trivial` is the calibration part's "
        "own accuracy; `constant` the middle of all targets; `mean confidence` and `ATC` (average "
        "thresholded confidence) use the model's answer probabilities and no vectors. Splits share "
        "documents, so the intervals are a little too narrow."
    )
    _figure(page, calibration_figure(part))


def _ranking(page: Page, part: Mapping[str, Any]) -> None:
    for figure in ranking_figures(part):
        _figure(page, figure)
    page.table(
        [
            {
                **row,
                **{f"e{share}": value for share, value in row.get("error_share", {}).items()},
                "interval": _range(row["auroc_low"], row["auroc_high"], ".3f") if "auroc" in row else None,
            }
            for row in part["signals"]
        ],
        [
            Column("signal", "Signal", hint="Turned so that a low value means: probably wrong."),
            Column("auroc", "AUROC", ".3f", hint="Chance that a wrong document ranks below a right one; "
                   "0.5 says nothing."),
            Column("interval", "95 % interval", hint="DeLong."),
            Column("e5", "Errors in lowest 5 %", ".1%"),
            Column("e10", "10 %", ".1%"),
            Column("e20", "20 %", ".1%"),
            Column("e50", "50 %", ".1%"),
        ],
        caption="How well each signal finds wrong answers",
    )  # fmt: skip
    if part["against"]:
        page.table(
            [{**row, "interval": _range(row["low"], row["high"], "+.3f")} for row in part["against"]],
            [
                Column("signal", "Against"),
                Column("difference", "AUROC of contribution minus its", "+.3f"),
                Column("interval", "95 % interval"),
                Column("verdict", "Contribution is"),
            ],
            caption="The contribution against every other signal, on the same documents",
        )
    if part["confounds"]:
        page.table(
            part["confounds"],
            [
                Column("quantity", "Quantity"),
                Column("spearman", "Spearman with contribution", ".2f"),
                Column("auroc_within_bands", "AUROC where it is held equal", ".3f", hint="The ranking inside "
                       "single subjects, or inside five bands of the quantity, averaged."),
            ],
            caption="What else the contribution follows",
        )  # fmt: skip


def _tail(page: Page, part: Mapping[str, Any]) -> None:
    page.text(
        f"The {part['documents']} documents of lowest contribution in {len(part['clusters'])} clusters, each "
        "with the texts nearest to its centre. They show what the model hardly tells apart, whether or not "
        "it answers it well."
    )
    page.table(
        [
            {
                "cluster": number,
                "documents": cluster["documents"],
                "accuracy": cluster["accuracy"],
                "subjects": ", ".join(f"{s['subject']} {s['documents']}" for s in cluster["subjects"]),
                "typical": " ¶ ".join(_short(document) for document in cluster["typical"]),
            }
            for number, cluster in enumerate(part["clusters"], 1)
        ],
        [
            Column("cluster", "Cluster", "d"),
            Column("documents", "Documents", "d"),
            Column("accuracy", "Accuracy", ".1%"),
            Column("subjects", "Commonest subjects"),
            Column("typical", "Most typical texts"),
        ],
        caption="Clusters of the hard tail, largest first",
    )


def _short(document: Mapping[str, Any]) -> str:
    text = " ".join(str(document["text"] or f"document {document['doc_id']}").split())
    return text if len(text) <= 160 else f"{text[:159]}…"


def _interval(row: Mapping[str, Any]) -> str | None:
    if math.isnan(row["accuracy"]):
        return None
    return _range(100 * row["accuracy_low"], 100 * row["accuracy_high"], ".1f")


def _range(low: float, high: float, spec: str) -> str:
    """Two numbers on one line: with spaces that do not break."""
    return f"{low:{spec}} to {high:{spec}}".replace(" ", "\u00a0").replace("-", "−")


def _dispersion(row: Mapping[str, Any]) -> float:
    return math.inf if math.isnan(row["dispersion"]) else float(row["dispersion"])
