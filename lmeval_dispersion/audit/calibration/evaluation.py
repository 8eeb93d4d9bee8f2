"""What ``dispersion calibrate`` is worth on a run: the accuracy of its slices, each told without its labels.

The estimator is that of ``calibrator``, fitted to all labelled slices and judged on each by a fit that did
not see it. The paper's protocol, which learns from artificial mixtures, is ``paper_protocol``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lmeval_dispersion.audit.calibration.calibrator import fit_calibrator
from lmeval_dispersion.audit.calibration.features import CLUSTERS, FEATURES
from lmeval_dispersion.audit.calibration.shrinkage import Fit
from lmeval_dispersion.audit.run import Run

OURS, TRIVIAL = "this estimate", "labelled accuracy alone"


def calibration_report(run: Run, *, seed: int = 0) -> dict[str, Any]:
    """Errors of the estimate, of every feature alone and of the trivial predictor on slices held out.

    Raises:
        UsageError: Too few labelled documents or slices, or labels all right or all wrong.
    """
    found = fit_calibrator(run, seed=seed)
    validation = found["validation"]
    part = {
        "by": found["by"],
        "slices": validation["slices"],
        "documents_a_slice": found["documents_a_slice"],
        "labelled_accuracy": found["labelled"]["accuracy"],
        "features": list(found["features"]),
        "used": found["used"],
        "better": found["beats_trivial"],
        "estimators": estimator_rows(validation),
        "worth": found["worth"],
        "points": _held_out(found),
    }
    return {**part, "verdict": _verdict(part)}


def estimator_rows(validation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Errors of a calibrator on slices held out, beside its features' and the trivial predictor's."""
    return [
        {"estimator": TRIVIAL, "mae": validation["trivial_mae"], "rmse": validation["trivial_rmse"]},
        *(
            {"estimator": f"{FEATURES[row['estimator']]} alone", "mae": row["mae"], "rmse": row["rmse"]}
            for row in validation["single_features"]
        ),
        {"estimator": OURS, "mae": validation["mae"], "rmse": validation["rmse"]},
    ]


def calibration_sentence(part: Mapping[str, Any]) -> str:
    """Whether the accuracy of unlabelled slices can be told, judged on slices held out."""
    if "missing" in part:
        return f"Whether accuracy can be read off unlabelled slices could not be tested: {part['missing']}."
    held_out = f"On {part['slices']} {_kind(part['by'])} held out"
    if not part["better"]:
        features = _words(part["features"], "or") if part["features"] else "what they show"
        return f"{held_out}, an estimate read off {features} is {part['verdict']}."
    worth = part["worth"]
    alone = f"{FEATURES['dispersion']} alone"
    errors = {row["estimator"]: row["mae"] for row in part["estimators"]}
    beside = "" if part["used"] == ["dispersion"] or alone not in errors else f"; {alone} {errors[alone]:.1f}"
    read = f"{held_out}, the accuracy read off {_words(part['used'], 'and')} is {part['verdict']}{beside}"
    return (
        f"{read}. That is worth {worth['labels']:.0f} labelled documents a slice (95 % {worth['low']:.0f} "
        f"to {worth['high']:.0f}), the labelled accuracy alone {worth['trivial']['labels']:.0f}."
    )


def _verdict(part: Mapping[str, Any]) -> str:
    errors = {row["estimator"]: row["mae"] for row in part["estimators"]}
    if part["better"]:
        return f"{errors[OURS]:.1f} points off on average, better than the {TRIVIAL} ({errors[TRIVIAL]:.1f})"
    return (
        f"no better than the trivial predictor, the {TRIVIAL} ({errors[OURS]:.1f} and {errors[TRIVIAL]:.1f} "
        "points off on average)"
    )


def _held_out(calibrator: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every slice with what the fit to the others says of it; that is trivial where none is better."""
    features = calibrator["features"]
    fits = [Fit(fold["intercept"], np.array(fold["coefficients"])) for fold in calibrator["folds"]]
    points = []
    for part in calibrator["slices"]:
        z = [(part["features"][name] - about["centre"]) / about["scale"] for name, about in features.items()]
        estimate = float(fits[part["fold"]].predict(np.array([z]))[0])
        about = {key: part[key] for key in ("slice", "documents")}
        points.append({**about, "predicted": estimate, "true": part["accuracy"]})
    return points


def _kind(by: str) -> str:
    if by == CLUSTERS:
        return "clusters of vectors"
    return {"category": "categories"}.get(by, f"{by}s")


def _words(names: Sequence[str], last: str) -> str:
    words = [FEATURES[name] for name in names]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
