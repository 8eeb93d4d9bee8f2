"""The three sentences that open a report, made from its numbers."""

from __future__ import annotations

import math
from typing import Any

from lmeval_dispersion.audit.text import interval_text

_PROTOCOLS = {
    "slices": "of unlabelled slices",
    "whole": "of the unlabelled rest of the data",
}
_UNTESTED = "Whether accuracy can be read off dispersion could not be tested"


def summary(report: dict[str, Any]) -> list[str]:
    """What the run says in three sentences: weak slices, accuracy by calibration, documents to look at."""
    return [_weak_slices(report), calibration_sentence(report["calibration"]), _ranking(report["ranking"])]


def calibration_sentence(calibration: dict[str, Any]) -> str:
    """Whether accuracy can be read off the dispersion of unlabelled data, judged on natural batches."""
    if "missing" in calibration:
        return f"{_UNTESTED}: {calibration['missing']}."
    found = [p for p in _PROTOCOLS if "missing" not in calibration["protocols"][p]]
    if not found:
        return f"{_UNTESTED}: no test batch was large enough."
    judged = calibration["protocols"][found[0]]
    errors = {row["estimator"]: row["mae"] for row in judged["estimators"]}
    winner, rival = judged["winner"], judged["rival"]
    text = (
        f"The accuracy {_PROTOCOLS[found[0]]} read off their dispersion is {errors['dispersion']:.1f} points "
        f"off on average, {'better' if judged['better'] else 'no better'} than the {rival} predictor "
        f"({errors[rival]:.1f})"
    )
    if winner in ("dispersion", rival):
        return f"{text}."
    return f"{text}; the best estimator is {winner} ({errors[winner]:.1f})."


def _weak_slices(report: dict[str, Any]) -> str:
    whole, count = report["overall"], report["run"]["documents"]
    start = f"The {count} documents have a dispersion of {_number(whole['dispersion'], '.4f')}"
    if not math.isnan(whole["accuracy"]):
        start += f" at {100 * whole['accuracy']:.1f} % accuracy"
    name = next(iter(report["slices"]), None)
    if name is None:
        return f"{start}, and nothing divides them into slices."
    rows = report["slices"][name]["rows"]
    usable = [row for row in rows if row["documents"] >= 3] or rows
    lowest = min(usable, key=lambda row: math.inf if math.isnan(row["dispersion"]) else row["dispersion"])
    text = f"{start}; the least dispersed {name} is {lowest['slice']}"
    text += f" ({_number(lowest['dispersion'], '.4f')})"
    found = report["slices"][name]["association"]
    if "missing" in found:
        return f"{text}."
    if found["low"] > 0:
        sign = "rises with"
    elif found["high"] < 0:
        sign = "falls with"
    else:
        sign = "shows no clear order by"
    order = f"{sign} dispersion (Spearman {interval_text(found)})"
    return f"{text}, and over {found['slices']} slices accuracy {order}."


def _ranking(ranking: dict[str, Any]) -> str:
    if "missing" in ranking:
        reason = ranking["missing"]
        return f"Whether hard documents can be found by their contribution could not be tested: {reason}."
    ours = next(row for row in ranking["signals"] if row["signal"] == "contribution")
    rivals = [row for row in ranking["signals"] if row is not ours and "auroc" in row]
    low, high = ours["auroc_low"], ours["auroc_high"]
    if low > 0.5:
        verdict = "points at wrong answers"
    elif high < 0.5:
        verdict = "points the wrong way, the low tail is answered better"
    else:
        verdict = "is no better than chance at finding wrong answers"
    text = (
        f"A low contribution {verdict} (AUROC {ours['auroc']:.2f}, 95 % {low:.2f} to {high:.2f}); the lowest "
        f"tenth of the documents holds {100 * ours['error_share']['10']:.0f} % of the errors"
    )
    if rivals:
        best = max(rivals, key=lambda row: float(row["auroc"]))
        text += f"; the best other signal is {best['signal']} (AUROC {best['auroc']:.2f})"
    return f"{text}."


def _number(value: float, spec: str) -> str:
    return "an undefined value" if math.isnan(value) else format(value, spec)
