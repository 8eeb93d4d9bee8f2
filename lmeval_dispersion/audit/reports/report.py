"""The whole audit of one run as one JSON-able dict; docs/reference/audit.md is its contract.

A part that cannot be had is ``{"missing": sentence}``, and the others still appear. Numbers are rounded to
seven significant digits, and undefined ones are null, so that the same store and seed give the same bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmeval_dispersion.audit.answers import answers_report
from lmeval_dispersion.audit.calibration.evaluation import calibration_report, calibration_sentence
from lmeval_dispersion.audit.calibration.paper_protocol import paper_protocol_report
from lmeval_dispersion.audit.mixtures import mixture_curves
from lmeval_dispersion.audit.ranking import ranking_report
from lmeval_dispersion.audit.reports.conclusions import pools_sentence, ranking_sentence, slices_sentence
from lmeval_dispersion.audit.run import Run
from lmeval_dispersion.audit.slices import all_documents, slice_row, slice_table, slicings
from lmeval_dispersion.audit.tail import hard_tail
from lmeval_dispersion.errors import DispersionError

FORMAT = "dispersion-audit/3"
_DIGITS = 7

NOT_SUPPORTED = [
    "Dispersion is relative: it compares slices of one model, or a model with its siblings, never two "
    "unrelated models.",
    "It is a correlation: a slice may be dispersed because its texts differ in topic or length, not because "
    "the model answers it better.",
    "A calibration holds for this model, layer, prompt format, tasks and slice size only.",
    "Mixtures are artificial: real slices differ in more than their share of right answers.",
]
RANKS_NOT_SUPPORTED = (
    "RankMe and its like rise with the number of documents: they compare slices of about one size only."
)


def audit_report(
    run: Run, *, slices: Sequence[str] = (), metrics: str = "dispersion", seed: int = 0
) -> dict[str, Any]:
    """Every part of the audit of one run, with plain numbers (NaN where undefined).

    Where ``metrics`` is ``all``, every slice has the four figures of its vectors' spectrum.

    Raises:
        UsageError: A column of ``slices`` is not there.
    """
    raw = run.raw_vectors if metrics == "all" else None
    report: dict[str, Any] = {
        "format": FORMAT,
        "seed": seed,
        "run": run.describe(),
        "overall": slice_row(run, all_documents(run), raw),
        "answers": answers_report(run),
        "notes": list(run.notes),
        "slices": {name: slice_table(run, parts, raw) for name, parts in slicings(run, slices).items()},
        "mixtures": part_of(mixture_curves, run, seed=seed),
        "calibration": part_of(calibration_report, run, seed=seed),
        "paper_protocol": part_of(paper_protocol_report, run, seed=seed),
        "ranking": part_of(ranking_report, run),
        "hard_tail": part_of(hard_tail, run, seed=seed),
        "not_supported": [*NOT_SUPPORTED, *([] if raw is None else [RANKS_NOT_SUPPORTED])],
    }
    return {**report, "summary": summary(report)}


def plural(by: str) -> str:
    """What slices by a column are called."""
    return {"category": "categories", "length": "bands of length", "confidence": "bands of confidence"}.get(
        by, f"{by}s"
    )


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
    """What the run says: weak slices, right and wrong answers, documents to look at, calibration.

    Where right and wrong answers are no evidence, why comes first, and nothing that depends on them is said.
    """
    if not report["run"]["labelled"]:
        unlabelled = "No document has a label: what dispersion says about right answers cannot be tested."
        return [slices_sentence(report), unlabelled]
    if cautions := report["answers"]["cautions"]:
        silent = "What dispersion says about right answers is therefore not judged."
        return [*cautions[:-1], f"{cautions[-1]} {silent}", slices_sentence(report, judged=False)]
    return [
        slices_sentence(report),
        pools_sentence(report["mixtures"]),
        ranking_sentence(report["ranking"]),
        calibration_sentence(report["calibration"]),
    ]
