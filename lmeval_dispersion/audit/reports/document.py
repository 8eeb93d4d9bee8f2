"""What the audit's commands report, as documents: the answer in sentences, tables, charts and limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lmeval_dispersion.audit.calibration.document import estimator_table
from lmeval_dispersion.audit.reports.charts import (
    calibration_chart,
    mixture_charts,
    paper_protocol_chart,
    ranking_charts,
    slice_chart,
)
from lmeval_dispersion.audit.reports.conclusions import (
    found_sentence,
    inside_figure,
    interval_text,
    ranking_sentence,
)
from lmeval_dispersion.audit.reports.report import report_json
from lmeval_dispersion.audit.run import FEWEST
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
_SPECTRUM_COLUMNS = [
    Column("rankme", "RankMe", ".4g", hint="Exp of the entropy of the singular values.", drop=5),
    Column("effective_rank", "Effective rank", ".4g", hint="The same of centred rows at length one.", drop=6),
    Column("participation_ratio", "Participation ratio", ".4g", hint="(Σλ)²/Σλ² of the covariance.", drop=7),
    Column("stable_rank", "Stable rank", ".4g", hint="Squared Frobenius over squared spectral norm.", drop=8),
]
_REMARK = Column("reason", "Remark")
_PROTOCOLS = {"whole": "Whole test part", "slices": "One batch a slice", "mixtures": "Mixtures"}
LIBRARIES = ("numpy", "pandas", "scikit-learn")
GUIDE = "docs/reference/audit.md"
_LOWEST = 20  # documents of the low end that a ranking shows


def audit_document(report: Mapping[str, Any], *, most_slices: int | None = None) -> Document:
    """The audit of one run.

    Args:
        report: Of :func:`lmeval_dispersion.audit.reports.report.audit_report`.
        most_slices: Slices that a table shows at most, the least dispersed ones; None for all. CSV and JSON
            always have all.
    """
    slicings = {"all": {"rows": [report["overall"]]}, **report["slices"]}
    cautions = report["answers"]["cautions"]
    # The picture that shows the answer comes first.
    picture = next((slice_chart(name, table) for name, table in report["slices"].items()), None)
    first: list[Part] = [picture] if picture else []
    return Document(
        title=f"Dispersion audit: {report['run']['model']}",
        answer=report["summary"],
        sections=[
            Section("", [*first, Facts(_facts(report)), *map(Note, report["notes"])]),
            Section("Slices", _slices(report, most_slices)),
            _section("Controlled mixtures", report["mixtures"], _mixtures, cautions),
            _section("Calibration", report["calibration"], _calibration, cautions),
            _section(
                "Calibration: the paper's protocol", report["paper_protocol"], _paper_protocol, cautions
            ),
            _section("Which documents to look at first", report["ranking"], _ranking, cautions),
            _section("The hard tail", report["hard_tail"], _tail),
        ],
        limits=report["not_supported"],
        rows=[{"by": name, **row} for name, table in slicings.items() for row in table["rows"]],
        contract=lambda: f"{report_json(report)}\n",
        float_format="%.7g",
        libraries=LIBRARIES,
        guide=GUIDE,
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
        answer=[ranking_sentence(ranking), *([found_sentence(ranking)] if _judged(ranking) else [])],
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
        libraries=LIBRARIES,
        guide=GUIDE,
    )


def _judged(ranking: Mapping[str, Any]) -> bool:
    return "missing" not in ranking and bool(found_sentence(ranking))


def _facts(report: Mapping[str, Any]) -> dict[str, object]:
    run, whole, answers = report["run"], report["overall"], report["answers"]
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
        share = 100 * answers["commonest_share"]
        facts["Commonest answer"] = f"{_short(answers['commonest'], 40)} ({share:.1f} %)"
    if run["revision"]:
        facts["Revision"] = str(run["revision"])[:12]
    if run["num_fewshot"] is not None:
        facts["Few-shot examples"] = run["num_fewshot"]
    return facts


def _section(
    heading: str,
    part: Mapping[str, Any],
    parts: Callable[[Mapping[str, Any]], list[Part]],
    cautions: Sequence[str] = (),
) -> Section:
    if missing := part.get("missing"):
        return Section(heading, [Note(f"Not available: {missing}.", "warning")])
    warning = f"{' '.join(cautions)} Nothing in this section is a finding."
    return Section(heading, [*([Note(warning, "warning")] if cautions else []), *parts(part)])


def _slices(report: Mapping[str, Any], most: int | None) -> list[Part]:
    parts: list[Part] = [Text("Low dispersion marks slices whose documents the model hardly tells apart.")]
    whole = report["overall"]
    if not report["slices"]:
        nothing = "Nothing divides the documents into slices: one subject, no lengths, no confidences."
        parts += [Note(nothing), _slice_table("slice", [], whole, most, hints=True)]
    for position, (name, table) in enumerate(report["slices"].items()):
        # How to read the columns is said once.
        parts.append(_slice_table(name, table["rows"], whole, most, hints=position == 0))
        found = table["association"]
        if "spearman" in found:
            parts.append(Text(_correlation(found)))
        elif report["run"]["labelled"]:
            parts.append(Text(f"No correlation with accuracy is given: {found['missing']}."))
    return parts


def _correlation(found: Mapping[str, Any]) -> str:
    """The correlation over slices, and inside tasks, as numbers."""
    text = f"Dispersion with accuracy over these {found['slices']} slices: {interval_text(found)}."
    if inside := found.get("inside_tasks"):
        text += (
            f" Over the {inside['slices']} slices inside {inside['tasks']} tasks: Spearman "
            f"{inside['spearman']:.2f}, p = {inside['p']:.3f} (permutations inside tasks)."
        )
    return text


def _slice_table(name: str, rows: Sequence[Row], whole: Row, most: int | None, *, hints: bool) -> Table:
    ordered = sorted(rows, key=lambda row: math.inf if math.isnan(row["dispersion"]) else row["dispersion"])
    shown = [*ordered[:most], whole]
    columns = [Column("slice", name.capitalize()), *_SLICE_COLUMNS]
    if "rankme" in whole:
        columns += _SPECTRUM_COLUMNS
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
        Text(_pools("dispersion", ".4f", part["pools"])),
        *(Text(_inside_pools(name, found)) for name, found in part["inside"].items()),
        Text(_trend("Query perplexity", part["query_perplexity_trend"])),
        Text(_pools("query perplexity", ".3f", part["perplexity_pools"])),
        Text(
            "These intervals are about other documents of the same kind; the error bars of the curves are "
            "about other draws from these ones, and shorter. The rank correlation of a curve has no "
            "interval: its ends are the right and the wrong documents, and their difference has one."
        ),
        Table(
            _curves(part),
            [
                Column("target_accuracy", "Correct documents (%)", "d"),
                Column("dispersion", "Dispersion", ".4f", error="dispersion_se"),
                *(
                    Column(f"inside_{name}", f"Inside {name}s", ".4f", error=f"inside_{name}_se", drop=1,
                           hint="The same number of documents of each in all mixtures.")
                    for name, found in part["inside"].items()
                    if "missing" not in found
                ),
                Column("query_perplexity", "Query perplexity", ".3f", error="query_perplexity_se"),
            ],
            "The curves, mean ± standard error over draws",
            name="mixtures",
        ),
    ]  # fmt: skip


def _curves(part: Mapping[str, Any]) -> list[Row]:
    """Rows of the plain curves with those inside subjects and tasks beside them."""
    rows: list[Row] = []
    for point in part["curve"]:
        row = dict(point)
        for name, found in part["inside"].items():
            for inner in found.get("curve", ()):
                if inner["target_accuracy"] == point["target_accuracy"]:
                    row[f"inside_{name}"] = inner["dispersion"]
                    row[f"inside_{name}_se"] = inner["dispersion_se"]
        rows.append(row)
    return rows


def _trend(name: str, trend: Mapping[str, Any]) -> str:
    """One line on a curve: its shape and rank correlation."""
    if "missing" in trend:
        return f"{name}: {trend['missing']}."
    steps = len(trend["against"])
    return (
        f"{name}: {trend['shape']}, Spearman {trend['spearman']:.2f}, {steps} step{'s' * (steps != 1)} the "
        "other way."
    )


def _pools(name: str, spec: str, pools: Mapping[str, Any]) -> str:
    """One line on the two pools: their values and the difference."""
    if math.isnan(pools["difference"]):
        return f"There are too few correct or incorrect documents to compare their {name}."
    ends = (f"{pools[side]:{spec}} ± {pools[f'{side}_se']:{spec}}" for side in ("correct", "incorrect"))
    text = "All correct documents {}, all incorrect {}".format(*ends)
    return f"{text}; difference in {name} {_difference(pools, spec)}."


def _inside_pools(name: str, found: Mapping[str, Any]) -> str:
    if "missing" in found:
        return f"Inside {name}s: not available, {found['missing']}."
    return (
        f"Inside {name}s (as many documents of each of {found['parts']} {name}s on both sides): difference "
        f"in dispersion {_difference(found['pools'], '.4f')}."
    )


def _difference(pools: Mapping[str, Any], spec: str) -> str:
    low, high = pools["difference_low"], pools["difference_high"]
    bounds = f"95 % {low:+{spec}} to {high:+{spec}}"
    few = f"no interval, {FEWEST} documents a side are needed"
    return f"{pools['difference']:+{spec}} ({few if math.isnan(low) else bounds})"


def _calibration(part: Mapping[str, Any]) -> list[Part]:
    worth, trivial = part["worth"], part["worth"]["trivial"]
    text = (
        f"the labelled accuracy alone is worth {trivial['labels']:.0f} labelled documents a slice (95 % "
        f"{trivial['low']:.0f} to {trivial['high']:.0f})."
    )
    if part["better"]:
        text = (
            f"the estimate is worth {worth['labels']:.0f} labelled documents a slice (95 % "
            f"{worth['low']:.0f} to {worth['high']:.0f}), {text}"
        )
    return [
        Text(
            "Can the accuracy of a slice be told without its labels? Every slice is estimated by a fit to "
            f"the others ({part['slices']} in all, by {part['by']}), from what it shows without labels, "
            f"shrunk towards the labelled accuracy: {part['verdict']}. `dispersion calibrate` writes this "
            "estimator to a file."
        ),
        estimator_table(part["estimators"]),
        Text(
            f"{text[0].upper()}{text[1:]} All this holds for slices that could have been among these, and "
            "for no others."
        ),
        calibration_chart(part),
    ]


def _paper_protocol(part: Mapping[str, Any]) -> list[Part]:
    chosen = ", ".join(f"{kind} {count}" for kind, count in part["chosen"].items())
    parts: list[Part] = [
        Text(
            "The paper learns from artificial mixtures of every accuracy, which real slices are not. The "
            f"labelled documents were split 20/10/70 into calibration, validation and test, {part['seeds']} "
            f"times; batches have {part['documents_per_batch']} documents. Validation chose: {chosen}."
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
                name=f"paper-protocol-{name}",
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
        paper_protocol_chart(part),
    ]


def _ranking(part: Mapping[str, Any]) -> list[Part]:
    signals = [
        {
            **row,
            **{f"e{share}": value for share, value in row.get("error_share", {}).items()},
            **_signal_intervals(row),
        }
        for row in part["signals"]
    ]
    parts_of = next((f"{name}s" for name in part["signals"][0].get("inside", {})), "")
    columns = [
        Column("signal", "Signal", hint="Turned so that a low value means: probably wrong."),
        Column("auroc", "AUROC", ".3f", hint="Chance that a wrong document ranks below a right one; "
               "0.5 says nothing."),
        Column("interval", "95 % interval", hint="DeLong, by the logit."),
        *([Column("inside", f"Inside {parts_of}", ".3f", hint=f"Only pairs inside {parts_of} count."),
           Column("inside_interval", "95 % inside", drop=1)] if parts_of else []),
        Column("e5", "Errors in lowest 5 %", ".1%", short="5 %", drop=2),
        Column("e10", "10 %", ".1%", drop=1),
        Column("e20", "20 %", ".1%", drop=3),
        Column("e50", "50 %", ".1%", drop=4),
    ]  # fmt: skip
    if any("missing" in row for row in signals):
        columns.append(Column("missing", "Remark"))
    few = min(part["wrong"], part["documents"] - part["wrong"])
    unreliable = (
        [
            Note(
                f"With {few} {'wrong' if 2 * part['wrong'] < part['documents'] else 'right'} documents the "
                f"intervals are unreliable; {FEWEST} are needed."
            )
        ]
        if few < FEWEST
        else []
    )
    parts: list[Part] = [
        *unreliable,
        *([Text(sentence)] if (sentence := found_sentence(part)) else []),
        *ranking_charts(part),
        Table(signals, columns, "How well each signal finds wrong answers", name="signals"),
    ]
    if part["against"]:
        parts.append(
            Table(
                [{**row, "interval": _bounds(row["low"], row["high"], "+.3f")} for row in part["against"]],
                [
                    Column("signal", "Against"),
                    Column("difference", "AUROC of contribution minus its", "+.3f", short="AUROC difference"),
                    Column("interval", "95 % interval", hint="They hold together, for all signals."),
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
                           "inside five bands of the quantity, averaged."),
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


def _signal_intervals(row: Row) -> dict[str, Any]:
    """Interval cells of a signal, over all and inside the first stratification that has a number."""
    if "auroc" not in row:
        return {}
    inside = inside_figure(row, "auroc")[1]
    return {
        "interval": _bounds(row["auroc_low"], row["auroc_high"], ".3f"),
        "inside": inside.value if inside else None,
        "inside_interval": _bounds(inside.low, inside.high, ".3f") if inside else None,
    }


def _short(text: object, length: int) -> str:
    line = " ".join(text.split()) if isinstance(text, str) else ""
    return line if len(line) <= length else f"{line[: length - 1]}…"


def _accuracy_interval(row: Row) -> str | None:
    if math.isnan(row["accuracy"]):
        return None
    return _range(100 * row["accuracy_low"], 100 * row["accuracy_high"], ".1f")


def _bounds(low: float, high: float, spec: str) -> str:
    return "none" if math.isnan(low) else _range(low, high, spec)


def _range(low: float, high: float, spec: str) -> str:
    return f"{low:{spec}} to {high:{spec}}"
