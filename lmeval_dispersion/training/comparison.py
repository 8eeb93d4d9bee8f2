"""The arms of a comparison side by side, and what their seeds let one say."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from lmeval_dispersion.report import Column, Document, Section, Table
from lmeval_dispersion.statistics import student_quantile
from lmeval_dispersion.training.settings import BASE, Settings

_COLUMNS = (
    Column("arm", "arm"),
    Column("domain", "domain"),
    Column("seeds", "seeds", drop=4),
    Column("before", "perplexity before", ".2f", short="before", drop=2),
    Column("perplexity", "perplexity", ".2f", short="ppl", hint="on the held-out texts, mean over seeds"),
    Column("sd", "sd", ".2f", hint="standard deviation over seeds", drop=5),
    Column(
        "versus_base",
        "against base, %",
        "+.2f",
        short="vs base, %",
        hint="100 log(perplexity / base's with the same seed), mean over seeds; below 0 is better",
    ),
    Column("low", "from", "+.2f", hint="interval of the mean over seeds, all comparisons together 95 %"),
    Column("high", "to", "+.2f"),
    Column("tokens_before", "token dispersion before", ".3f", short="tokens before", drop=3),
    Column("tokens", "token dispersion", ".3f", short="tokens", drop=1, hint="last layer, after training"),
    Column("texts", "text dispersion", ".3f", short="texts", drop=1, hint="last layer, after training"),
)


def compared(settings: Settings, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row an arm and domain, over its seeds.

    ``perplexity`` is the mean over seeds of the perplexity after training, ``sd`` their standard deviation
    (None for one seed); ``before`` that of the start. ``versus_base`` is the mean over shared seeds of
    log(perplexity / the base's with the same seed), in per cent, ``versus_base_sd`` its standard deviation
    over seeds. ``tokens_before``, ``tokens`` and ``texts`` are dispersions of the last layer, see
    :func:`~lmeval_dispersion.training.arm.evaluated`.
    """
    rows = []
    base = {r["seed"]: r for r in results if r["arm"] == BASE}
    for arm in settings.arms:
        of_arm = [r for r in results if r["arm"] == arm]
        if not of_arm:
            continue
        for domain, (source, _) in enumerate(settings.domains):
            after = [_evaluation(r, -1, domain) for r in of_arm]
            before = [_evaluation(r, 0, domain) for r in of_arm]
            ppl = [e["perplexity"] for e in after]
            shifts = [
                100 * math.log(e["perplexity"] / _evaluation(base[r["seed"]], -1, domain)["perplexity"])
                for r, e in zip(of_arm, after, strict=True)
                if arm != BASE and r["seed"] in base
            ]
            texts = [e["texts"][-1] for e in after if e["texts"][-1] is not None]
            rows.append(
                {
                    "arm": arm,
                    "domain": source,
                    "seeds": len(of_arm),
                    "before": fmean(e["perplexity"] for e in before),
                    "perplexity": fmean(ppl),
                    "sd": stdev(ppl) if len(ppl) > 1 else None,
                    "versus_base": fmean(shifts) if shifts else None,
                    "versus_base_sd": stdev(shifts) if len(shifts) > 1 else None,
                    "tokens_before": fmean(e["tokens"][-1] for e in before),
                    "tokens": fmean(e["tokens"][-1] for e in after),
                    "texts": fmean(texts) if texts else None,
                }
            )
    return rows


def json_of(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of :func:`compared` as ``comparison.json`` holds them."""
    return json.dumps(rows, indent=1) + "\n"


def report(rows: Sequence[dict[str, Any]], command: str = "") -> Document:
    """The rows of :func:`compared` as a report that says which arms are better than base, or that none is.

    Arms are compared with base by the t interval of ``versus_base`` over seeds, Bonferroni-corrected for the
    number of rows that are compared: all intervals hold together with 95 %.
    """
    tested = [row for row in rows if row["versus_base_sd"] is not None]
    shown = []
    for row in rows:
        low = high = None
        if row in tested:
            quantile = student_quantile(1 - 0.025 / len(tested), row["seeds"] - 1)
            half = quantile * row["versus_base_sd"] / math.sqrt(row["seeds"])
            low, high = row["versus_base"] - half, row["versus_base"] + half
        shown.append({**row, "low": low, "high": high})
    limits = []
    if tested:
        together = f"the {len(tested)} intervals together have 95 %" if len(tested) > 1 else "95 %"
        limits.append(
            f"Intervals are of the mean over seeds (Student's t, {together}): they cover the draws that a "
            "seed makes, and not the choice of texts, model, weight or learning rate."
        )
    return Document(
        "Training with a dispersion loss, against base",
        answer=_answer(shown),
        sections=[Section("", [Table(shown, _COLUMNS, "Held-out perplexity and dispersion", "arms")])],
        limits=limits,
        command=command,
        rows=rows,
        contract=lambda: json_of(rows),
        libraries=("torch", "transformers"),
        guide="docs/reference/training.md",
    )


def _answer(rows: Sequence[dict[str, Any]]) -> list[str]:
    names = {row["domain"]: row["domain"].replace("\\", "/").rstrip("/").split("/")[-1] for row in rows}
    if len(set(names.values())) < len(names):
        names = {domain: domain for domain in names}
    where = {domain: f" on {name}" if len(names) > 1 else "" for domain, name in names.items()}
    others = [row for row in rows if row["arm"] != BASE]
    if not any(row["versus_base"] is not None for row in others):
        best = min(rows, key=lambda row: float(row["perplexity"]))
        return [
            f"Nothing is compared: that takes the arm {BASE} and another. The lowest held-out perplexity is "
            f"{best['perplexity']:.2f}, of {best['arm']}{where[best['domain']]}."
        ]
    if all(row["low"] is None for row in others):
        told = ", ".join(
            f"{row['arm']}{where[row['domain']]} {row['versus_base']:+.2f} %"
            for row in others
            if row["versus_base"] is not None
        )
        return [
            f"One seed tells nothing apart from {BASE}: {told}. Pass --seed more than once for an interval."
        ]
    better = [_told(row, where) for row in others if row["high"] is not None and row["high"] < 0]
    worse = [_told(row, where) for row in others if row["low"] is not None and row["low"] > 0]
    apart = [_told(row, where) for row in others if row["low"] is not None and row["low"] <= 0 <= row["high"]]
    first = f"Better than {BASE}: {'; '.join(better)}." if better else f"No arm is better than {BASE}."
    return [
        first,
        *([f"Worse than {BASE}: {'; '.join(worse)}."] if worse else []),
        *([f"Not told apart from {BASE}: {'; '.join(apart)}."] if apart else []),
    ]


def _told(row: dict[str, Any], where: dict[str, str]) -> str:
    return (
        f"{row['arm']}{where[row['domain']]}, perplexity {row['versus_base']:+.2f} % "
        f"({row['low']:+.2f} to {row['high']:+.2f}, {row['seeds']} seeds)"
    )


def _evaluation(result: dict[str, Any], which: int, domain: int) -> dict[str, Any]:
    found: dict[str, Any] = result["evaluations"][which]["domains"][domain]
    return found
