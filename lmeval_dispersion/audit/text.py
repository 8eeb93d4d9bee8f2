"""A report as text for a terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

_WIDTH = 100
_SHOWN_SLICES = 20


def text_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[tuple[str, str, str]]) -> str:
    """Aligned columns; each column is (key, heading, number format).

    None is an empty cell and NaN a dash.
    """
    cells = [[heading for _, heading, _ in columns]]
    cells += [[_cell(row.get(key), spec) for key, _, spec in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    right = [bool(spec) for _, _, spec in columns]
    return "\n".join(
        "  ".join(
            text.rjust(width) if flush else text.ljust(width)
            for text, width, flush in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in cells
    )


def report_text(report: Mapping[str, Any]) -> str:
    """The audit as text: sentences first, then a table a part."""
    run = report["run"]
    parts = [
        f"{run['model']}, layer {run['layer']}, {run['documents']} documents of {_tasks(run['tasks'])}",
        "\n".join(wrapped(sentence) for sentence in report["summary"]),
    ]
    if report["notes"]:
        parts.append("\n".join(wrapped(f"Note: {note}") for note in report["notes"]))
    parts += [_slices(name, table, report["overall"]) for name, table in report["slices"].items()]
    if not report["slices"]:
        parts.append(_slices("slice", {"rows": [], "association": {"missing": ""}}, report["overall"]))
    parts.append(_section("Controlled mixtures", report["mixtures"], _mixtures))
    parts.append(_section("Calibration", report["calibration"], _calibration))
    parts.append(_section("Ranking", report["ranking"], ranking_text))
    parts.append(_section("Hard tail", report["hard_tail"], tail_text))
    limits = [textwrap.fill(f"- {line}", _WIDTH, subsequent_indent="  ") for line in report["not_supported"]]
    parts.append("\n".join(["What this does not support", *limits]))
    return "\n\n".join(parts)


def _tasks(tasks: Mapping[str, Any]) -> str:
    return ", ".join(tasks) if len(tasks) <= 4 else f"{len(tasks)} tasks"


def wrapped(text: str) -> str:
    """A sentence in lines of at most 100 characters."""
    return textwrap.fill(text, _WIDTH, subsequent_indent="  ")


def _cell(value: Any, spec: str) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and math.isnan(value):
        return "-"
    if isinstance(value, float):
        return format(value, spec)
    return str(value)


def _section(heading: str, part: Mapping[str, Any], write: Any) -> str:
    body = wrapped(f"Not available: {part['missing']}.") if "missing" in part else write(part)
    return f"{heading}\n{body}"


def _slices(name: str, table: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    rows = sorted(table["rows"], key=lambda r: math.inf if math.isnan(r["dispersion"]) else r["dispersion"])
    shown = rows[:_SHOWN_SLICES]
    columns = [
        ("slice", name, ""),
        ("documents", "documents", "d"),
        ("dispersion", "dispersion", ".4f"),
        ("dispersion_se", "± se", ".4f"),
        ("accuracy", "accuracy", ".3f"),
        ("accuracy_low", "95 % from", ".3f"),
        ("accuracy_high", "to", ".3f"),
        ("query_perplexity", "perplexity", ".2f"),
        ("confidence", "confidence", ".3f"),
        ("prompt_tokens", "tokens", ".0f"),
        ("reason", "", ""),
    ]
    text = f"Slices by {name}, least dispersed first\n{text_table([*shown, whole], columns)}"
    if len(rows) > len(shown):
        text += f"\n({len(rows) - len(shown)} more; --format csv or json has them all)"
    found = table["association"]
    if "spearman" in found:
        text += (
            f"\nSpearman of dispersion with accuracy over {found['slices']} slices: {interval_text(found)}"
        )
    return text


def _mixtures(part: Mapping[str, Any]) -> str:
    columns = [
        ("target_accuracy", "accuracy %", "d"),
        ("dispersion", "dispersion", ".4f"),
        ("dispersion_se", "± se", ".4f"),
        ("query_perplexity", "perplexity", ".3f"),
        ("query_perplexity_se", "± se", ".3f"),
    ]
    lines = [
        f"{part['seeds']} draws of {part['documents_per_mixture']} documents for each share of correct ones",
        text_table(part["curve"], columns),
    ]
    if part["unreachable_targets"]:
        targets = ", ".join(f"{target} %" for target in part["unreachable_targets"])
        lines.append(
            f"out of reach with {part['correct_documents']} correct and {part['incorrect_documents']} "
            f"incorrect documents: {targets}"
        )
    for name, key in (("dispersion", "dispersion_trend"), ("perplexity", "query_perplexity_trend")):
        lines.append(trend_text(name, part[key]))
    lines.append(pools_text(part["pools"]))
    return "\n".join(lines)


def pools_text(pools: Mapping[str, Any]) -> str:
    """One line on the two pools: their dispersions and the difference."""
    if math.isnan(pools["difference"]):
        return "too few correct or incorrect documents to compare their dispersions"
    return (
        f"all correct documents {pools['correct']:.4f} ± {pools['correct_se']:.4f}, all incorrect "
        f"{pools['incorrect']:.4f} ± {pools['incorrect_se']:.4f}; difference {pools['difference']:+.4f} "
        f"(95 % {pools['difference_low']:+.4f} to {pools['difference_high']:+.4f})"
    )


def interval_text(found: Mapping[str, Any]) -> str:
    """A Spearman correlation with its interval, or why it has none."""
    if math.isnan(found["low"]):
        return f"{found['spearman']:.2f} (too few slices for an interval)"
    return f"{found['spearman']:.2f} (95 % {found['low']:.2f} to {found['high']:.2f})"


def trend_text(name: str, trend: Mapping[str, Any]) -> str:
    """One line on a curve: its shape and rank correlation."""
    if "missing" in trend:
        return f"{name}: {trend['missing']}"
    return (
        f"{name}: {trend['shape']}, Spearman {trend['spearman']:.2f} "
        f"(95 % {trend['low']:.2f} to {trend['high']:.2f}), {len(trend['against'])} steps the other way"
    )


def _calibration(part: Mapping[str, Any]) -> str:
    lines = [
        f"mean absolute error in points of accuracy, {part['seeds']} splits of 20/10/70 %, batches of "
        f"{part['documents_per_batch']} documents"
    ]
    names = list(
        dict.fromkeys(row["estimator"] for p in part["protocols"].values() for row in p.get("estimators", []))
    )
    rows = []
    for name in names:
        row: dict[str, Any] = {"estimator": name}
        for protocol, judged in part["protocols"].items():
            for found in judged.get("estimators", []):
                if found["estimator"] == name:
                    row[protocol] = f"{found['mae']:.2f} ({found['low']:.2f} to {found['high']:.2f})"
        rows.append(row)
    lines.append(text_table(rows, [("estimator", "estimator", ""), *((p, p, "") for p in part["protocols"])]))
    for protocol, judged in part["protocols"].items():
        verdict = judged.get("missing") or f"dispersion is {judged['verdict']}; best: {judged['winner']}"
        lines.append(f"{protocol}: {verdict}")
    chosen = ", ".join(f"{kind} {count}" for kind, count in part["chosen"].items())
    return "\n".join([*lines, f"regression chosen on validation: {chosen}"])


def ranking_text(part: Mapping[str, Any]) -> str:
    """Signals with their AUROC and error shares, and what the contribution follows."""
    rows = [
        {**row, **{f"e{share}": value for share, value in row.get("error_share", {}).items()}}
        for row in part["signals"]
    ]
    columns = [
        ("signal", "signal (low = probably wrong)", ""),
        ("auroc", "AUROC", ".3f"),
        ("auroc_low", "95 % from", ".3f"),
        ("auroc_high", "to", ".3f"),
        ("e5", "errors in lowest 5 %", ".3f"),
        ("e10", "10 %", ".3f"),
        ("e20", "20 %", ".3f"),
        ("missing", "", ""),
    ]
    lines = [text_table(rows, columns)]
    lines += [
        f"contribution against {row['signal']}: {row['difference']:+.3f} (95 % {row['low']:+.3f} to "
        f"{row['high']:+.3f}), {row['verdict']}"
        for row in part["against"]
    ]
    lines += [
        f"contribution and {row['quantity']}: Spearman {_cell(row['spearman'], '.2f')}; AUROC "
        f"{_cell(row['auroc_within_bands'], '.3f')} where it is held equal"
        for row in part["confounds"]
    ]
    return "\n".join(lines)


def tail_text(part: Mapping[str, Any]) -> str:
    """Clusters of the low tail by their most typical texts."""
    lines = [f"the {part['documents']} documents of lowest contribution, clustered"]
    for cluster in part["clusters"]:
        subjects = ", ".join(f"{s['subject']} {s['documents']}" for s in cluster["subjects"])
        accuracy = _cell(cluster["accuracy"], ".2f")
        lines.append(f"{cluster['documents']} documents, accuracy {accuracy}: {subjects}")
        for document in cluster["typical"]:
            text = " ".join((document["text"] or f"document {document['doc_id']}").split())
            lines.append(f"    {textwrap.shorten(text, _WIDTH - 4, placeholder=' …')}")
    return "\n".join(lines)
