"""The whole audit of one run as one JSON-able dict; docs/audit.md is its contract.

A part that cannot be had is ``{"missing": sentence}``, and the others still appear. Numbers are rounded to
seven significant digits, and undefined ones are null, so that the same store and seed give the same bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from lmeval_dispersion.audit.calibration import calibration_report
from lmeval_dispersion.audit.grouping import groupings
from lmeval_dispersion.audit.mixtures import mixture_curves
from lmeval_dispersion.audit.ranking import ranking_report
from lmeval_dispersion.audit.run import Run, described
from lmeval_dispersion.audit.sentences import summary
from lmeval_dispersion.audit.slices import overall, slice_table
from lmeval_dispersion.audit.tail import hard_tail
from lmeval_dispersion.errors import DispersionError

FORMAT = "dispersion-audit/1"
_DIGITS = 7

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
    groups = groupings(run, slices)
    report: dict[str, Any] = {
        "format": FORMAT,
        "seed": seed,
        "run": described(run),
        "overall": overall(run),
        "notes": list(run.notes),
        "slices": {name: slice_table(run, found, seed=seed) for name, found in groups.items()},
        "mixtures": _part(lambda: mixture_curves(run, seed=seed)),
        "calibration": _part(lambda: calibration_report(run, seed=seed)),
        "ranking": _part(lambda: ranking_report(run)),
        "hard_tail": _part(lambda: hard_tail(run, run.points.contributions(), seed=seed)),
        "not_supported": NOT_SUPPORTED,
    }
    return {**report, "summary": summary(report)}


def report_json(report: dict[str, Any]) -> str:
    """The report as JSON text: undefined numbers are null, others have seven significant digits."""
    return json.dumps(plain(report), indent=1, ensure_ascii=False, allow_nan=False)


def plain(value: Any) -> Any:
    """``value`` with rounded floats and None for undefined ones."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return value


def _part(build: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return build()
    except DispersionError as error:
        return {"missing": str(error)}
