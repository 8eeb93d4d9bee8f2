"""The page of the study, made of its JSON lines alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.validity import results
from benchmarks.validity.hub.configuration import HubStudy, Suite
from benchmarks.validity.hub.rows import file_of
from benchmarks.validity.hub.tables import Tables, tables_of, verdicts_of
from benchmarks.validity.markdown import claims_table, markdown
from benchmarks.validity.verdicts import FAILS, HOLDS, PART, UNTESTED, Verdict, shown

ORDERING = {
    "predictor": "figure", "rho": "Spearman's rho (95 %)", "decision": "decision accuracy", "pairs": "pairs",
    "regret": "regret of the best three",
}  # fmt: skip
MOST = 40  # lines of what is missing; the JSON lines have all


def page(study: HubStudy, folder: Path) -> str:
    """The whole page, of the suites that have results.

    Raises:
        ValueError: Results of another version of the configuration, or none at all.
    """
    there = {name: results.checked(file_of(folder, name), study.path) for name in study.suites}
    there = {name: rows for name, rows in there.items() if rows}
    if not there:
        raise ValueError(f"{folder}: expected results of a suite, found none; run the study first")
    parts, every = [], []
    for name, rows in there.items():
        text, lines = _suite(study, study.suites[name], rows)
        parts.append(text)
        every += lines
    counted = Counter(line.verdict for line in every)
    commits = sorted({row["commit"] for rows in there.values() for row in rows})
    return (
        "\n\n".join(
            [
                "# Does G order released checkpoints?",
                f"Of {len(every)} lines {counted[HOLDS]} hold, {counted[PART]} hold in part, "
                f"{counted[FAILS]} do not hold here and {counted[UNTESTED]} are not tested. Of 40 lines "
                "about noise one would hold by luck.",
                f"Configuration {study.path.name} ({results.digest(study.path)}), commit "
                f"{', '.join(commits)}. Intervals are 95 %, from resampling recipes with all their seeds, or "
                "runs where a suite has few recipes. A *pair* counts where the questions tell its two "
                "checkpoints apart.",
                *parts,
            ]
        )
        + "\n"
    )


def _suite(study: HubStudy, suite: Suite, rows: Sequence[dict[str, Any]]) -> tuple[str, list[Verdict]]:
    checkpoints = [row for row in rows if "error" not in row]
    missing = [row for row in rows if "error" in row]
    read = [row for row in checkpoints if row["figures"]]
    scored = sum(bool(row["skills"]) for row in read)
    parts = [
        f"## {suite.about}",
        f"{len(read)} of {len(checkpoints)} checkpoints were screened, {scored} of them have a published "
        "score." + ("" if scored else " Nothing could be compared."),
    ]
    lines: list[Verdict] = []
    bodies: list[str] = []
    for pair in suite.pairs:
        tables = tables_of(study, suite, checkpoints, pair)
        if not pair.control:
            lines += verdicts_of(tables, pair)
        bodies += _pair(pair.name + (", a control" if pair.control else ""), tables)
    if lines:
        parts.append(claims_table(lines))
    if missing:
        words = ", ".join(
            f"{count} {word}" for word, count in Counter(row["error"] for row in missing).most_common()
        )

        parts += [
            f"### What is missing ({words})",
            markdown(missing[:MOST], {"name": "what", "error": "word", "message": "why"}),
        ]
        if len(missing) > MOST:
            parts.append(f"{len(missing) - MOST} more are in the JSON lines.")
    return "\n\n".join([*parts, *bodies]), lines


def _pair(name: str, tables: Tables) -> list[str]:
    parts: list[str] = []
    for rows in tables["ordering"].values():
        parts += [f"{tables['what']}.", markdown(rows, ORDERING)]
    if tables["along"]["rows"]:
        parts += [
            f"Along {tables['along']['runs']} runs that end above chance.",
            markdown(tables["along"]["rows"], {"predictor": "figure", "rho": "mean rho (95 %)"}),
        ]
    if own := tables["seeds"]:
        text = shown(own["share"])
        parts.append(
            f"Seeds: of {own['pairs']} pairs that the questions tell apart, G orders {text} right; from seed "
            f"to seed the score moves by {own['sd_accuracy']:.3f}, G by {own['sd_gap']:.3f} (mean sd)."
        )
    if tables.get("all_sizes"):
        parts += [
            "Small against the largest.",
            markdown(
                tables["all_sizes"],
                {"small": "small", "predictor": "figure", "recipes": "recipes", "rho": "rho (95 %)"},
            ),
        ]
    if tables["partial"]:
        parts += [
            "What G adds, all trained checkpoints of that size.",
            markdown(tables["partial"], {"taken out": "taken out", "rho": "partial rho (95 %)"}),
        ]
    parts += [f"Left out: {text}." for text in tables["rivals_left_out"]]
    return [f"### {name} ({tables['checkpoints']} checkpoints)", *parts] if parts else []
