"""A fitted calibration as a file: what it was fitted on, its parameters, and predictions inside that.

The file is JSON with the format ``dispersion-calibrator/1`` (docs/audit.md). A calibration holds for one
model, layer, prompt format, set of tasks and number of documents a slice; anything else is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lmeval_dispersion import __version__
from lmeval_dispersion.audit.batches import FEWEST_TARGETS, REPEATS, SIZE, batch_size, mixture_batches
from lmeval_dispersion.audit.calibration import check_labels
from lmeval_dispersion.audit.regressors import best_regression, fit_all, regression_of
from lmeval_dispersion.audit.run import Run
from lmeval_dispersion.audit.slices import Slice, all_documents
from lmeval_dispersion.errors import UsageError

FORMAT = "dispersion-calibrator/1"
LEVEL = 0.95
_FITTED_SHARE = 2 / 3  # the paper's 20 : 10 of calibration to validation
_PERMUTATIONS = 10

# Manifest key -> how a message calls it. `tasks` and `width` are compared by their own rules.
_MUST_AGREE = {
    "model": "model",
    "revision": "revision",
    "layer": "layer",
    "width": "vector width",
    "prompt_format": "prompt format",
    "chat_template": "chat template",
    "num_fewshot": "number of few-shot examples",
}


def fit_calibrator(run: Run, *, size: int = SIZE, seed: int = 0) -> dict[str, Any]:
    """Fit on two thirds of the labelled documents; the others pick the regression and give the interval.

    The interval is a split-conformal one: 95 % of the validation batches lie inside it. It holds for
    mixtures of these documents, not for a shift of what is asked.

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
    about = run.describe()
    return {
        "format": FORMAT,
        **{key: about[key] for key in (*_MUST_AGREE, "tasks")},
        "slice_size": used,
        "labelled": {"documents": len(order), "accuracy": float(run.score[order].mean())},
        "regression": best.parameters(),
        "dispersion_range": [float(training.dispersion.min()), float(training.dispersion.max())],
        "interval": {"level": LEVEL, "half_width": float(ordered[rank - 1])},
        "validation_mae": {name: 100 * float(values.mean()) for name, values in residuals.items()},
        "blind_mae": 100 * float(np.abs(validation.accuracy - np.median(training.accuracy)).mean()),
        "seed": seed,
        "run_created": about["created"],
        "version": __version__,
    }


def calibrator_json(calibrator: Mapping[str, Any]) -> str:
    """The file of a calibrator."""
    return json.dumps(calibrator, indent=1, ensure_ascii=False) + "\n"


def read_calibrator(path: str | Path) -> dict[str, Any]:
    """Read a calibrator.

    Raises:
        UsageError: No such file, not a calibrator, or one of another version of the format.
    """
    file = Path(path)
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"expected a calibrator from `dispersion calibrate`, got {file}: {error}") from None
    kind = content.get("format") if isinstance(content, dict) else None
    if not str(kind).startswith("dispersion-calibrator/"):
        raise UsageError(f"{file} is not a calibrator; `dispersion calibrate RUN -o {file}` writes one")
    if kind != FORMAT:
        raise UsageError(f"{file} was written as {kind!r} and this version reads {FORMAT!r}; calibrate again")
    wanted = {*_MUST_AGREE, "tasks", "slice_size", "labelled", "regression", "dispersion_range", "interval"}
    wanted |= {"validation_mae", "blind_mae"}
    if missing := sorted(wanted - set(content)):
        raise UsageError(f"{file} lacks {missing[0]!r}; it is damaged, calibrate again")
    return dict(content)


def check_fits(calibrator: dict[str, Any], run: Run) -> None:
    """Raise UsageError with the reason unless the calibrator may speak about this run."""
    about = run.describe()
    for key, name in _MUST_AGREE.items():
        if calibrator[key] != about[key]:
            raise UsageError(
                f"this calibrator was fitted for {name} {calibrator[key]!r}, and the run has {about[key]!r}; "
                "a calibration does not carry over, label some documents of this run and calibrate on them"
            )
    for task, version in about["tasks"].items():
        if task not in calibrator["tasks"]:
            known = ", ".join(calibrator["tasks"])
            raise UsageError(
                f"this calibrator was fitted on {known}, and the run has task {task!r}; "
                "label some documents of it and calibrate on them"
            )
        fitted_on = calibrator["tasks"][task]
        if fitted_on != version:
            raise UsageError(
                f"this calibrator was fitted on version {fitted_on} of task {task!r}, and the run has "
                f"version {version}; run the same version"
            )


def predict_slices(
    calibrator: dict[str, Any], run: Run, slices: list[Slice], *, seed: int = 0
) -> dict[str, Any]:
    """Estimated accuracy of every slice with its interval; a slice that is too small has a reason instead.

    A slice larger than the calibrator's is cut at random into batches of exactly that size, ten times over,
    and the predictions of the batches are averaged.

    Raises:
        UsageError: The calibrator does not fit the run, or no slice is large enough.
    """
    check_fits(calibrator, run)
    size = int(calibrator["slice_size"])
    rows = [_prediction(calibrator, run, part, size, seed) for part in (all_documents(run), *slices)]
    if all(row["reason"] for row in rows):
        raise UsageError(
            f"this calibrator was fitted for slices of {size} documents, and the run has {len(run.vectors)}; "
            "run more documents, or calibrate with a smaller --slice-size"
        )
    return {
        "format": "dispersion-predictions/1",
        "model": run.store.manifest.get("model"),
        "layer": run.layer,
        "slice_size": size,
        "regression": calibrator["regression"]["kind"],
        "level": calibrator["interval"]["level"],
        "labelled_accuracy": calibrator["labelled"]["accuracy"],
        "validation_mae": calibrator["validation_mae"][calibrator["regression"]["kind"]],
        "blind_mae": calibrator["blind_mae"],
        "slices": rows,
    }


def _prediction(calibrator: dict[str, Any], run: Run, part: Slice, size: int, seed: int) -> dict[str, Any]:
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
    estimate = float(regression_of(calibrator["regression"]).predict(found).mean())
    half = float(calibrator["interval"]["half_width"])
    low, high = calibrator["dispersion_range"]
    row.update(
        dispersion=float(found.mean()),
        predicted=estimate,
        low=max(estimate - half, 0.0),
        high=min(estimate + half, 1.0),
        outside_calibrated_range=float(((found < low) | (found > high)).mean()),
    )
    return row
