"""What the tables say of each claim: the rules of the configuration's ``claims``, as code.

A verdict is one of four: holds, holds in part, does not hold here, not tested.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.validity.analysis import BESIDE, Estimate

HOLDS, PART, FAILS, UNTESTED = "holds", "holds in part", "does not hold here", "not tested"


@dataclass(frozen=True)
class Verdict:
    """One line of the page.

    Attributes:
        claim: What is claimed.
        run: What was run.
        result: What came out, with its interval.
        control: What it stands beside.
        papers: What the papers say.
        verdict: One of the four.
    """

    claim: str
    run: str
    result: str
    control: str
    papers: str
    verdict: str


def shown(estimate: Estimate, digits: int = 2) -> str:
    """A figure with its interval."""
    if not math.isfinite(estimate.value):
        return "undefined"
    if not math.isfinite(estimate.low):
        return f"{estimate.value:.{digits}f}"
    return f"{estimate.value:.{digits}f} ({estimate.low:.{digits}f} to {estimate.high:.{digits}f})"


def includes(estimate: Estimate, point: float) -> bool:
    """Whether the interval holds a point; an undefined one holds all."""
    return not (estimate.low > point or estimate.high < point)


def by_name(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, Mapping[str, Any]]:
    """Rows by the value of a column."""
    return {str(row[key]): row for row in rows}


def verdicts(tables: Mapping[str, Any]) -> list[Verdict]:
    """All lines of part A, in the order of the configuration's claims."""
    return [
        orders(tables), trajectory(tables), seeds(tables), sizes(tables), adds(tables), rivals(tables),
        _labels(tables), _frequency(tables), _optimiser(tables), _gauge(tables), _domains(tables),
        _variant(tables),
    ]  # fmt: skip


def _untested(claim: str, run: str) -> Verdict:
    return Verdict(claim, run, "", "", "", UNTESTED)


def orders(tables: Mapping[str, Any], domain: str = "math") -> Verdict:
    """Whether G orders recipes."""
    claim, rows = (
        f"G orders recipes by {domain} accuracy (one size, one step)",
        tables["ordering"].get(domain),
    )
    if not rows:
        return _untested(claim, "small models, last step")
    found = by_name(rows, "predictor")
    rho = found["G (cosine)"]["rho"]
    verdict = FAILS if includes(rho, 0) or rho.value <= 0 else HOLDS if rho.low > 0.5 else PART
    other = found.get("accuracy of another seed")
    control = f"another seed's accuracy: {shown(other['rho'])}" if other else ""
    return Verdict(
        claim, tables["what"],
        f"rho {shown(rho)}; decision accuracy {shown(found['G (cosine)']['decision'])}",
        control, "RD claims > 0.95; its tables give 0.14 over all scales", verdict,
    )  # fmt: skip


def trajectory(tables: Mapping[str, Any]) -> Verdict:
    """Whether G orders the checkpoints of a run, and better than their steps do."""
    claim, own = "G orders the checkpoints of one run", tables["along"]
    if not own["runs"]:
        return _untested(claim, "runs that learn math")
    found = by_name(own["rows"], "predictor")
    rho, step = found["G (cosine)"]["rho"], found["step"]["rho"]
    verdict = FAILS if includes(rho, 0) or rho.value <= 0 or step.value >= rho.value else HOLDS
    return Verdict(
        claim, f"{own['runs']} runs that learn math, {tables['trained_steps']} steps each",
        f"mean rho {shown(rho)}",
        f"the step alone: {shown(step)}", "2509.23024: spread falls late while accuracy rises", verdict,
    )  # fmt: skip


def seeds(tables: Mapping[str, Any]) -> Verdict:
    """Whether G tells seeds apart."""
    claim, own = "G tells which seed of a recipe is better", tables["seeds"]
    if not own or not own["pairs"]:
        return _untested(claim, "pairs of seeds that the questions tell apart")
    share = own["share"]
    verdict = FAILS if includes(share, 0.5) or share.value <= 0.5 else HOLDS if share.low > 0.75 else PART
    return Verdict(
        claim, f"{own['pairs']} pairs of seeds that {tables.get('questions', 400)} questions tell apart",
        f"right: {shown(share)}",
        f"chance 0.5; sd over seeds: accuracy {own['sd_accuracy']:.3f}, G {own['sd_gap']:.3f}", "none",
        verdict,
    )  # fmt: skip


def sizes(tables: Mapping[str, Any]) -> Verdict:
    """Whether G of small models orders larger ones."""
    claim, rows = "G of small models orders larger ones", tables["sizes"]
    if not rows:
        return _untested(claim, "the larger size is not trained yet")
    found = by_name(rows, "predictor")
    rho = found["G (cosine) of the small models"]["rho"]
    control = found["accuracy of the small models"]["rho"]
    verdict = FAILS if includes(rho, 0) or rho.value <= 0 else HOLDS if rho.low > 0.5 else PART
    return Verdict(
        claim, f"{rows[0]['recipes']} recipes at both sizes", f"rho {shown(rho)}",
        f"accuracy of the small models: {shown(control)}", "RD: not across scales", verdict,
    )  # fmt: skip


def adds(tables: Mapping[str, Any]) -> Verdict:
    """Whether G adds to all rivals together."""
    claim, rows = "G adds to all cheap rivals together", tables["partial"]
    if not rows:
        return _untested(claim, "")
    found = by_name(rows, "taken out")
    rho = found["all of these"]["rho"]
    verdict = FAILS if includes(rho, 0) or rho.value <= 0 else HOLDS
    return Verdict(
        claim, f"all trained checkpoints of the small size, {len(rows) - 2} rivals taken out",
        f"partial rho {shown(rho)}",
        f"nothing taken out: {shown(found['nothing']['rho'])}", "none", verdict,
    )  # fmt: skip


def rivals_of(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows of figures that need no label and are no G."""
    return [
        row
        for row in rows
        if not row["predictor"].startswith("G ")
        and not row["predictor"].endswith(("labels", "seed"))
        and row["predictor"] not in BESIDE
    ]


def rivals(tables: Mapping[str, Any], domain: str = "math") -> Verdict:
    """Whether G orders better than each of them."""
    claim, rows = "G orders better than each rival alone", tables["ordering"].get(domain)
    if not rows:
        return _untested(claim, "")
    own = by_name(rows, "predictor")["G (cosine)"]["rho"]
    best = max(rivals_of(rows), key=lambda row: row["rho"].value)
    verdict = FAILS if best["rho"].value >= own.value else HOLDS if best["rho"].high < own.low else PART
    return Verdict(
        claim, tables["what"], f"rho {shown(own)}",
        f"best of {len(rivals_of(rows))}: {best['predictor']}, {shown(best['rho'])}",
        "2602.20433: whole-matrix figures do not predict", verdict,
    )  # fmt: skip


def _labels(tables: Mapping[str, Any]) -> Verdict:
    claim, rows = "G orders better than 25 labelled questions", tables["ordering"].get("math")
    if not rows:
        return _untested(claim, "")
    found = by_name(rows, "predictor")
    g, labels = found["G (cosine)"]["decision"].value, found["25 labels"]["decision"].value
    many = found.get("100 labels", found["25 labels"])["decision"].value
    return Verdict(
        claim, tables["what"], f"decision accuracy {g:.2f}", f"25 labels {labels:.2f}, 100 labels {many:.2f}",
        "2506.07673: a random labelled sample is hard to beat", HOLDS if g > labels else FAILS,
    )  # fmt: skip


def _frequency(tables: Mapping[str, Any]) -> Verdict:
    claim, own = "G is not the frequency of digits", tables["frequency"]
    if not own:
        return _untested(claim, "")
    above = [row for row in own if row["above"] > row["seeds"] / 2 and row["accuracy"] < row["other"]]
    result = "; ".join(
        f"{row['recipe']} above sums-05 in {row['above']} of {row['seeds']} seeds" for row in own
    )
    verdict = FAILS if above else HOLDS
    return Verdict(
        claim, "recipes with many digits and nothing to learn", result,
        "accuracy: sums-05 "
        + f"{own[0]['other']:.2f}, "
        + ", ".join(f"{row['recipe']} {row['accuracy']:.2f}" for row in own),
        "none", verdict,
    )  # fmt: skip


def _optimiser(tables: Mapping[str, Any]) -> Verdict:
    claim, rows, spread = (
        "Optimiser settings move G less than recipes do",
        tables["settings"],
        tables["spread"],
    )
    own = [row for row in rows if row["setting"] != "default"]
    if not own or spread is None:
        return _untested(claim, "settings are not trained yet")
    values = [row["cosine"].value for row in rows]
    moved = max(values) - min(values)
    follows = tables["settings_rho"]
    verdict = HOLDS if moved < spread / 2 else PART if follows > 0.5 else FAILS
    return Verdict(
        claim, f"{len(own)} settings of one recipe",
        f"range of G {moved:.2f}; G orders {tables['settings_decision']:.2f} of the pairs of settings, rho "
        f"{follows:.2f}",
        f"range over recipes {spread:.2f}", "2602.20433: geometry follows batch size and weight decay",
        verdict,
    )  # fmt: skip


def _gauge(tables: Mapping[str, Any]) -> Verdict:
    claim, rows = "G does not move where no prediction moves", tables["trials"]["same"]
    if not rows or tables["smallest"] is None:
        return _untested(claim, "trials are not run yet")
    worst = max(rows, key=lambda row: row["cosine"])
    safe = max(rows, key=lambda row: row["ratio_folded"])
    moved = [row["change"] for row in rows if row["cosine"] > tables["smallest"]]
    return Verdict(
        claim,
        f"{len(rows)} changes of {worst['checkpoints']} checkpoints each, none moves a log-probability by "
        f"more than {max(row['shift'] for row in rows):.0e}",
        f"G moves by up to {worst['cosine']:.2f} ({worst['change']})"
        + (f"; moved by {', '.join(moved)}" if moved else ""),
        f"within(T) / within(R) of folded rows: up to {safe['ratio_folded']:.3f}; neighbours in rank differ "
        f"by at least {tables['smallest']:.4f}",
        "none", FAILS if moved else HOLDS,
    )  # fmt: skip


def _domains(tables: Mapping[str, Any]) -> Verdict:
    claim, rows = "G of a domain follows that domain's skill", tables["matrix"]
    if not rows:
        return _untested(claim, "")
    cell = {(row["domain"], row["skill"]): row["rho"] for row in rows}
    parts, held = [], []
    for domain in ("math", "code", "legal"):
        own = cell[domain, domain]
        skill, other = max(
            ((s, cell[domain, s]) for s in ("math", "code", "legal", "text") if s != domain),
            key=lambda x: x[1].value,
        )
        if own.value > other.value and own.low > 0:
            held.append(domain)
        parts.append(f"{domain} {shown(own)} against {skill} {other.value:.2f}")
    verdict = HOLDS if len(held) == 3 else PART if held else FAILS
    return Verdict(
        claim, tables["what"], f"{len(held)} of 3 domains",
        "rho with the own skill against the highest other: " + "; ".join(parts),
        "RD: math and code only", verdict,
    )  # fmt: skip


def _variant(tables: Mapping[str, Any]) -> Verdict:
    claim, rows = "A variant that nothing moves orders better than the cosine G", tables["variants"]
    if not rows:
        return _untested(claim, "")
    chosen = max((row for row in rows if row["unmoved"]), key=lambda row: row["choose"])
    difference = chosen["difference"]
    verdict = HOLDS if difference.low > 0 else FAILS
    return Verdict(
        claim, "chosen on one half of recipes and seeds, reported on the other",
        f"{chosen['variant']}: rho {shown(chosen['report'])}, difference {shown(difference)}",
        f"cosine G there: {shown(by_name(rows, 'variant')['cosine']['report'])}", "none", verdict,
    )  # fmt: skip
