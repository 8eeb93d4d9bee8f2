"""The whole audit of one run as one JSON-able dict; docs/audit.md is its contract.

A part that cannot be had is ``{"missing": sentence}``, and the others still appear. Numbers are rounded to
seven significant digits, and undefined ones are null, so that the same store and seed give the same bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmeval_dispersion.audit.calibration import calibration_report
from lmeval_dispersion.audit.mixtures import mixture_curves
from lmeval_dispersion.audit.ranking import ranking_report
from lmeval_dispersion.audit.run import Run
from lmeval_dispersion.audit.slices import all_documents, slice_row, slice_table, slicings
from lmeval_dispersion.audit.tail import hard_tail
from lmeval_dispersion.errors import DispersionError

FORMAT = "dispersion-audit/1"
_DIGITS = 7
_PROTOCOLS = {
    "slices": "of unlabelled slices",
    "whole": "of the unlabelled rest of the data",
}
_UNTESTED = "Whether accuracy can be read off dispersion could not be tested"

NOT_SUPPORTED = [
    "Dispersion is relative: it compares slices of one model, or a model with its siblings, never two "
    "unrelated models.",
    "It is a correlation: a slice may be dispersed because its texts differ in topic or length, not because "
    "the model answers it better.",
    "A calibration holds for this model, layer, prompt format, tasks and slice size only.",
    "Mixtures are artificial: real slices differ in more than their share of right answers.",
]


def audit_report(run: Run, *, slices: Sequence[str] = (), seed: int = 0) -> dict[str, Any]:
    """Every part of the audit of one run, with plain numbers (NaN where undefined).

    Raises:
        UsageError: A column of ``slices`` is not there.
    """
    found = slicings(run, slices)
    report: dict[str, Any] = {
        "format": FORMAT,
        "seed": seed,
        "run": run.describe(),
        "overall": slice_row(run, all_documents(run)),
        "notes": list(run.notes),
        "slices": {name: slice_table(run, parts, seed=seed) for name, parts in found.items()},
        "mixtures": part_of(mixture_curves, run, seed=seed),
        "calibration": part_of(calibration_report, run, seed=seed),
        "ranking": part_of(ranking_report, run),
        "hard_tail": part_of(hard_tail, run, seed=seed),
        "not_supported": NOT_SUPPORTED,
    }
    return {**report, "summary": summary(report)}


def report_json(report: Mapping[str, Any]) -> str:
    """The report as JSON text: undefined numbers are null, others have seven significant digits."""
    return json.dumps(plain(report), indent=1, ensure_ascii=False, allow_nan=False)


def plain(value: Any) -> Any:
    """``value`` with rounded floats and None for undefined ones."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return value


def part_of(build: Callable[..., dict[str, Any]], run: Run, **options: Any) -> dict[str, Any]:
    """A part of a report, or why it cannot be had: ``{"missing": sentence}``."""
    try:
        return build(run, **options)
    except DispersionError as error:
        return {"missing": str(error)}


def summary(report: dict[str, Any]) -> list[str]:
    """What the run says in three sentences: weak slices, accuracy by calibration, documents to look at."""
    return [
        _weak_slices(report),
        calibration_sentence(report["calibration"]),
        ranking_sentence(report["ranking"]),
    ]


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


def ranking_sentence(ranking: Mapping[str, Any]) -> str:
    """Whether wrong answers can be found by a low contribution."""
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


def interval_text(found: Mapping[str, Any]) -> str:
    """A Spearman correlation with its interval, or why it has none."""
    if math.isnan(found["low"]):
        return f"{found['spearman']:.2f} (too few slices for an interval)"
    return f"{found['spearman']:.2f} (95 % {found['low']:.2f} to {found['high']:.2f})"
