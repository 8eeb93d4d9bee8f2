"""What ``dispersion calibrate`` and ``dispersion predict`` report, as documents."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lmeval_dispersion.audit.calibration.calibrator import calibrator_json, no_gain
from lmeval_dispersion.audit.calibration.evaluation import estimator_rows
from lmeval_dispersion.audit.calibration.features import CLUSTERS, FEATURES
from lmeval_dispersion.audit.calibration.paper_calibrator import beats_blind
from lmeval_dispersion.audit.reports.charts import prediction_chart
from lmeval_dispersion.audit.reports.report import report_json
from lmeval_dispersion.report import Column, Document, Facts, Note, Row, Section, Table, Text

_FEATURE_COLUMNS = {
    "dispersion": Column("dispersion", "Dispersion", ".4f", drop=2),
    "confidence": Column("confidence", "Confidence", ".3f", drop=5),
    "atc": Column("atc", "ATC", ".3f", hint="Share of documents more confident than the labelled accuracy's "
                  "threshold.", drop=6),
    "log_perplexity": Column("log_perplexity", "Log perplexity", ".2f", drop=7),
    "prompt_tokens": Column("prompt_tokens", "Tokens", ".0f", drop=8),
}  # fmt: skip


def calibrator_document(calibrator: Mapping[str, Any]) -> Document:
    """What a calibration is worth; its JSON is the calibrator's file."""
    return _paper(calibrator) if calibrator["protocol"] == "paper" else _natural(calibrator)


def _natural(calibrator: Mapping[str, Any]) -> Document:
    validation = calibrator["validation"]
    by, count = calibrator["by"], validation["slices"]
    slices = f"{count} {'clusters of vectors' if by == CLUSTERS else f'slices by {by}'}"
    smallest, largest = calibrator["documents_a_slice"]
    estimators = estimator_rows(validation)
    beats = calibrator["beats_trivial"]
    half = 100 * _typical_half_width(calibrator)
    level = f"{100 * calibrator['level']:.0f} %"
    used = ", ".join(FEATURES[name] for name in calibrator["used"])
    return Document(
        title=f"Accuracy of unlabelled slices: {calibrator['model']}",
        answer=[
            worth_sentence(calibrator),
            f"Judged on {slices} of {_span(smallest, largest)} documents, each estimated by a fit to the "
            f"others; an estimate is about ± {half:.0f} points ({level})."
            + ("" if beats else " The file holds the labelled accuracy as its estimate."),
        ],
        sections=[
            Section(
                "",
                [
                    Facts(
                        {
                            "Layer": calibrator["layer"],
                            "Labelled documents": calibrator["labelled"]["documents"],
                            "Accuracy of those": f"{100 * calibrator['labelled']['accuracy']:.1f} %",
                            "Features used": used or "none: shrunk to the labelled accuracy",
                        }
                    ),
                    *_few_slices(calibrator),
                    estimator_table(estimators),
                ],
            )
        ],
        limits=[
            "Intervals cover slices that could have been among the labelled ones (exchangeable); for other "
            "topics they are without guarantee.",
        ],
        rows=estimators,
        contract=lambda: calibrator_json(calibrator),
        float_format="%.7g",
    )


def estimator_table(rows: Sequence[Row]) -> Table:
    """Errors on slices held out, of :func:`lmeval_dispersion.audit.calibration.evaluation.estimator_rows`."""
    return Table(
        rows,
        [
            Column("estimator", "Estimator"),
            Column("mae", "Mean absolute error (points)", ".2f", short="MAE"),
            Column("rmse", "Root mean squared error", ".2f", short="RMSE"),
        ],
        "Errors on held-out slices, sampling noise of their accuracies included",
        name="calibration-estimators",
    )


def worth_sentence(calibrator: Mapping[str, Any]) -> str:
    """Whether to use a natural calibrator, and what it is worth."""
    validation, worth = calibrator["validation"], calibrator["worth"]
    ours, blind = validation["mae"], validation["trivial_mae"]
    if not calibrator["beats_trivial"]:
        return f"Do not use: {no_gain(validation)}."
    used = [FEATURES[name] for name in calibrator["used"]]
    subject = used[0] if len(used) == 1 else f"{', '.join(used[:-1])} and {used[-1]} together"
    verb = "beats" if len(used) == 1 else "beat"
    return (
        f"{subject[0].upper()}{subject[1:]} {verb} knowing nothing by {blind - ours:.1f} points on held-out "
        f"slices ({ours:.1f} against {blind:.1f}): worth {worth['labels']:.0f} labelled documents a slice "
        f"(95 % {worth['low']:.0f} to {worth['high']:.0f}), the labelled accuracy alone "
        f"{worth['trivial']['labels']:.0f}."
    )


def _few_slices(calibrator: Mapping[str, Any]) -> list[Note]:
    if calibrator["level"] >= 0.95:
        return []
    count = calibrator["validation"]["slices"]
    return [
        Note(
            f"{count} slices allow intervals of {100 * calibrator['level']:.0f} % at most; 95 % needs 19.",
            "warning",
        )
    ]


def _typical_half_width(calibrator: Mapping[str, Any]) -> float:
    """Of the interval at the mean slice: the quantile of the errors of left-out slices."""
    size = calibrator["error_size"]
    slices = calibrator["slices"]
    documents = sum(part["documents"] for part in slices) / len(slices)
    scores = sorted(part["score"] for part in slices)
    rank = min(math.ceil((len(scores) + 1) * calibrator["level"] - 1e-9), len(scores))
    return float(scores[rank - 1] * math.sqrt(size["between"] + size["within"] / documents))


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


def _paper(calibrator: Mapping[str, Any]) -> Document:
    kind = calibrator["regression"]["kind"]
    errors = [{"regression": name, "mae": mae} for name, mae in calibrator["validation_mae"].items()]
    half = 100 * calibrator["interval"]["half_width"]
    error, blind = calibrator["validation_mae"][kind], calibrator["blind_mae"]
    if beats_blind(calibrator):
        first = f"On mixtures held out it is {error:.1f} points off, a guess blind to dispersion {blind:.1f}."
    else:
        first = (
            f"Do not use: on mixtures held out it is {error:.1f} points off, a guess blind to dispersion "
            f"{blind:.1f}; dispersion says little about accuracy here."
        )
    return Document(
        title=f"Accuracy by dispersion, the paper's protocol: {calibrator['model']}",
        answer=[
            first,
            f"{kind.capitalize()} chosen; predictions are ± {half:.1f} points (95 % of mixtures).",
        ],
        sections=[
            Section(
                "",
                [
                    Facts(
                        {
                            "Layer": calibrator["layer"],
                            "Labelled documents": calibrator["labelled"]["documents"],
                            "Documents a slice": calibrator["slice_size"],
                        }
                    ),
                    Table(
                        errors,
                        [
                            Column("regression", "Regression"),
                            Column("mae", "Mean absolute error (points)", ".2f"),
                        ],
                        "Errors on mixtures held out for validation",
                    ),
                ],
            )
        ],
        limits=[_MIXTURES_ONLY],
        rows=errors,
        contract=lambda: calibrator_json(calibrator),
        float_format="%.7g",
    )


_MIXTURES_ONLY = (
    "Fitted to mixtures of every accuracy: estimates of natural slices tend to the middle, and their "
    "intervals are without guarantee."
)


def prediction_document(predictions: Mapping[str, Any]) -> Document:
    """The estimated accuracy of every slice, or why it has none."""
    rows: Sequence[Row] = predictions["slices"]
    level = f"{100 * predictions['level']:.0f} %"
    given = [name for name in FEATURES if any(not math.isnan(row.get(name, math.nan)) for row in rows)]
    columns = [
        Column("slice", str(predictions["by"]).capitalize()),
        Column("documents", "Documents", "d", drop=4),
        Column("predicted", "Estimate", ".3f"),
        Column("low", f"{level} from", ".3f"),
        Column("high", "to", ".3f"),
        *(_FEATURE_COLUMNS[name] for name in given),
        Column("true", "True", ".3f", drop=3),
    ]
    if any(row["reason"] for row in rows):
        columns.append(Column("reason", "No estimate because", drop=1))
    answer = [_coverage_sentence(predictions)]
    if rows[0]["reason"] is None:
        answer.append(
            f"{_first_upper(rows[0]['slice'])} together: {rows[0]['predicted']:.3f} ({level} "
            f"{rows[0]['low']:.3f} to {rows[0]['high']:.3f}); the labelled documents had "
            f"{predictions['labelled_accuracy']:.3f}."
        )
    chart = prediction_chart(rows, level, predictions["labelled_accuracy"])
    return Document(
        title=f"Estimated accuracy: {predictions['model']}",
        answer=answer,
        sections=[
            Section(
                "",
                [
                    *([] if predictions["beats_trivial"] else [Note(_FORCED, "warning")]),
                    *([chart] if chart else []),
                    *map(Note, predictions["notes"]),
                    *([Note(_SMALL)] if any(_too_small(row) for row in rows) else []),
                    Text(_how(predictions)),
                    Table(rows, columns, f"Estimated accuracy by {predictions['by']}"),
                ],
            )
        ],
        limits=[_guarantee(predictions, level)],
        rows=rows,
        contract=lambda: f"{report_json(predictions)}\n",
        float_format="%.7g",
    )


_SMALL = "For slices smaller than those fitted, calibrate with --slice-size N: their features are noisier."
_FORCED = "This calibrator did not beat knowing nothing when it was validated; its numbers were forced."


def _coverage_sentence(predictions: Mapping[str, Any]) -> str:
    """How many slices have an estimate, and why the others have none."""
    whole, *parts = predictions["slices"]
    if not parts:
        if whole["reason"]:
            return f"No estimate for the {whole['documents']} documents: {whole['reason']}."
        return f"The accuracy of {whole['documents']} documents can be estimated: {whole['predicted']:.3f}."
    reasons = [row["reason"] for row in parts if row["reason"]]
    small = sum(map(_too_small, parts))
    outside = len(reasons) - small
    if predictions.get("shifted") and not any(row["reason"] is None for row in parts):
        return (
            f"The accuracy of none of the {len(parts)} slices can be estimated: they differ from the "
            f"labelled ones in {FEATURES[predictions['shifted']]}, so nothing learnt there is reliable here."
        )
    kinds = [f"{outside} outside what was fitted"] * (outside > 0) + [f"{small} too small"] * (small > 0)
    estimated = len(parts) - len(reasons)
    if not reasons:
        return f"The accuracy of all {len(parts)} slices can be estimated."
    if not estimated:
        return f"The accuracy of none of the {len(parts)} slices can be estimated: {', '.join(kinds)}."
    return f"The accuracy of {estimated} of {len(parts)} slices can be estimated; {', '.join(kinds)}."


def _too_small(row: Row) -> bool:
    return bool(row["reason"]) and not str(row["reason"]).startswith(("outside", "no ", "not "))


def _how(predictions: Mapping[str, Any]) -> str:
    if predictions["protocol"] == "paper":
        return (
            f"The paper's protocol: {predictions['regression']} on batches of {predictions['slice_size']} "
            f"documents, {predictions['validation_mae']:.1f} points off on mixtures held out (a blind guess: "
            f"{predictions['blind_mae']:.1f})."
        )
    used = ", ".join(FEATURES[name] for name in predictions["used"]) or "no feature: the labelled accuracy"
    validation = predictions["validation"]
    return (
        f"Estimated from {used}. On held-out slices: {validation['mae']:.1f} points off, the labelled "
        f"accuracy alone {validation['trivial_mae']:.1f}."
    )


def _guarantee(predictions: Mapping[str, Any], level: str) -> str:
    if predictions["protocol"] == "paper":
        return _MIXTURES_ONLY
    if predictions["shifted"]:
        return (
            f"These slices differ from the labelled ones in {FEATURES[predictions['shifted']]}: the {level} "
            "intervals are without guarantee."
        )
    if predictions["exchangeable"]:
        return (
            f"Intervals cover {level} of slices that could have been among the labelled ones (exchangeable); "
            "for others they are without guarantee."
        )
    return (
        f"These slices were not made as the labelled ones or are clusters: the {level} intervals are without "
        "guarantee."
    )


def _first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]
