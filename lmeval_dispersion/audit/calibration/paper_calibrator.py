"""The paper's calibration: a regression from dispersion to accuracy, fitted to mixtures of every accuracy.

Kept as it is published (RD B.1.3) and said to be no more than that: mixtures hold every accuracy alike often,
natural slices do not, so the estimate of a slice tends to the middle of 0 and 1. The default is
:mod:`lmeval_dispersion.audit.calibration.calibrator`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lmeval_dispersion.audit.calibration.batches import (
    FEWEST_TARGETS,
    REPEATS,
    SIZE,
    batch_size,
    mixture_batches,
)
from lmeval_dispersion.audit.calibration.regressors import best_regression, fit_all, regression_of
from lmeval_dispersion.audit.run import Run, check_labels
from lmeval_dispersion.audit.slices import Slice
from lmeval_dispersion.errors import UsageError

FORMAT = "dispersion-calibrator/1"
LEVEL = 0.95
_FITTED_SHARE = 2 / 3  # the paper's 20 : 10 of calibration to validation
_PERMUTATIONS = 10
_BLIND = 0.8  # of the blind error: what a calibrator has to get below


def fit_mixtures(run: Run, *, size: int = SIZE, seed: int = 0) -> dict[str, Any]:
    """Fit on two thirds of the labelled documents; the others pick the regression and give the interval.

    The interval is a split-conformal one: 95 % of the validation mixtures lie inside. It holds for
    mixtures of these documents, not for natural slices.

    Raises:
        UsageError: Too few labelled documents, or all correct or all incorrect.
    """
    check_labels(run)
    rng = np.random.default_rng(seed)
    order = rng.permutation(run.labelled)
    cut = round(len(order) * _FITTED_SHARE)
    used = batch_size(run, run.labelled, 1 - _FITTED_SHARE, size)
    training = mixture_batches(run, order[:cut], used, repeats=REPEATS, rng=rng)
    validation = mixture_batches(run, order[cut:], used, repeats=REPEATS // 2, rng=rng)
    if min(len(np.unique(b.accuracy)) for b in (training, validation)) < FEWEST_TARGETS:
        raise UsageError(
            f"{len(order)} labelled documents reach fewer than {FEWEST_TARGETS} target accuracies with "
            f"{used} documents a batch; label more documents"
        )
    fits = fit_all(training.dispersion, training.accuracy, seed=seed)
    residuals = {fit.kind: np.abs(fit.predict(validation.dispersion) - validation.accuracy) for fit in fits}
    best = best_regression(fits, validation.dispersion, validation.accuracy)
    ordered = np.sort(residuals[best.kind])
    rank = min(math.ceil((len(ordered) + 1) * LEVEL), len(ordered))
    return {
        "slice_size": used,
        "regression": best.parameters(),
        "dispersion_range": [float(training.dispersion.min()), float(training.dispersion.max())],
        "interval": {"level": LEVEL, "half_width": float(ordered[rank - 1])},
        "validation_mae": {name: 100 * float(values.mean()) for name, values in residuals.items()},
        "blind_mae": 100 * float(np.abs(validation.accuracy - np.median(training.accuracy)).mean()),
    }


def beats_blind(calibrator: Mapping[str, Any]) -> bool:
    """Whether the chosen regression's error on held-out mixtures is below 80 % of a blind guess's."""
    error = float(calibrator["validation_mae"][calibrator["regression"]["kind"]])
    return error < _BLIND * float(calibrator["blind_mae"])


def predictions(
    calibrator: Mapping[str, Any], run: Run, parts: Sequence[Slice], *, seed: int = 0
) -> dict[str, Any]:
    """Estimated accuracy of slices, the whole first, and what the calibrator says of itself.

    A slice larger than the calibrator's is cut at random into batches of exactly that size, ten times over,
    and the predictions of the batches are averaged. A slice has a reason instead of a number where it is
    smaller, or where more than half of its batches lie outside the dispersions seen in calibration.
    """
    return {
        "slice_size": int(calibrator["slice_size"]),
        "regression": calibrator["regression"]["kind"],
        "level": calibrator["interval"]["level"],
        "exchangeable": False,
        "beats_trivial": beats_blind(calibrator),
        "validation_mae": calibrator["validation_mae"][calibrator["regression"]["kind"]],
        "blind_mae": calibrator["blind_mae"],
        "slices": [_prediction(calibrator, run, part, int(calibrator["slice_size"]), seed) for part in parts],
    }


def _prediction(calibrator: Mapping[str, Any], run: Run, part: Slice, size: int, seed: int) -> dict[str, Any]:
    n = len(part.rows)
    scores = run.score[part.rows]
    known = scores[~np.isnan(scores)]
    row: dict[str, Any] = {
        "slice": part.name,
        "documents": n,
        "dispersion": float("nan"),
        "predicted": float("nan"),
        "low": float("nan"),
        "high": float("nan"),
        "outside_calibrated_range": float("nan"),
        "true": float(known.mean()) if known.size else float("nan"),
        "reason": None,
    }
    if n < size:
        row["reason"] = f"{n} documents, and the calibrator was fitted for slices of {size}"
        return row
    rng = np.random.default_rng([seed, n])
    batches = []
    for _ in range(_PERMUTATIONS):
        order = rng.permutation(part.rows)
        batches += [order[i * size : (i + 1) * size] for i in range(n // size)]
    found = run.vectors.dispersions(batches)
    low, high = calibrator["dispersion_range"]
    outside = float(((found < low) | (found > high)).mean())
    row.update(dispersion=float(found.mean()), outside_calibrated_range=outside)
    if outside > 0.5:
        row["reason"] = f"outside what was fitted: dispersion, fitted from {low:.4g} to {high:.4g}"
        return row
    estimate = float(regression_of(calibrator["regression"]).predict(found).mean())
    half = float(calibrator["interval"]["half_width"])
    row.update(predicted=estimate, low=max(estimate - half, 0.0), high=min(estimate + half, 1.0))
    return row
