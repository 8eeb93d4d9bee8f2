"""The paper's protocol of calibration: can accuracy be read off dispersion, learnt on artificial mixtures?

Per seed the labelled documents are split 20/10/70. Mixtures drawn from the calibration part give pairs
(dispersion, accuracy); linear, polynomial, isotonic and random-forest regressions are fitted to them; the
validation part picks one; the test part judges it, beside estimators that use no dispersion.

Three kinds of test batch, because they answer three questions:

* ``whole``: the whole test part, one prediction a seed. The paper's figure.
* ``slices``: one batch of each subject. What a user wants to know, and the hardest.
* ``mixtures``: artificial batches of every accuracy, as in calibration.

Source: RD B.1.3. Average thresholded confidence (ATC): Garg et al., "Leveraging unlabeled data to predict
out-of-distribution performance", ICLR 2022.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.audit.calibration.batches import (
    CALIBRATION_SHARE,
    FEWEST_TARGETS,
    REPEATS,
    SEEDS,
    SIZE,
    VALIDATION_SHARE,
    Batches,
    batch_size,
    mixture_batches,
    natural_batches,
    split,
)
from lmeval_dispersion.audit.calibration.regressors import REGRESSIONS, Regression, best_regression, fit_all
from lmeval_dispersion.audit.run import Run, check_labels
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.statistics import student_interval

Array = NDArray[np.float64]
Rows = NDArray[np.int64]

DISPERSION, TRIVIAL, CONSTANT = "dispersion", "trivial", "constant"
PROTOCOLS = ("whole", "slices", "mixtures")


def paper_protocol_report(run: Run, *, size: int = SIZE, seeds: int = SEEDS, seed: int = 0) -> dict[str, Any]:
    """Errors of every estimator under every kind of test batch, over ``seeds`` splits.

    Raises:
        UsageError: Too few labelled documents, or all correct or all incorrect.
    """
    check_labels(run)
    rows = run.labelled
    used = batch_size(run, rows, VALIDATION_SHARE, size)
    errors: dict[str, dict[str, list[float]]] = {p: {} for p in PROTOCOLS}
    bias: dict[str, dict[str, list[float]]] = {p: {} for p in PROTOCOLS}
    points: list[dict[str, Any]] = []
    chosen: list[str] = []
    for k in range(seeds):
        rng = np.random.default_rng([seed, k])
        parts = split(rows, rng)
        calibration = mixture_batches(run, parts.calibration, used, repeats=REPEATS, rng=rng)
        validation = mixture_batches(run, parts.validation, used, repeats=REPEATS // 2, rng=rng)
        _enough(calibration, validation, len(rows), used)
        fits = fit_all(calibration.dispersion, calibration.accuracy, seed=k)
        best = best_regression(fits, validation.dispersion, validation.accuracy)
        chosen.append(best.kind)
        estimators = _estimators(run, parts.calibration, calibration, fits, best)
        for protocol, batches in _tests(run, parts.test, used, rng).items():
            for name, estimator in estimators.items():
                if name == CONSTANT and protocol != "mixtures":
                    continue
                difference = estimator.predict(batches) - batches.accuracy
                if not len(difference) or np.isnan(difference).any():
                    continue
                errors[protocol].setdefault(name, []).append(100 * float(np.abs(difference).mean()))
                bias[protocol].setdefault(name, []).append(100 * float(difference.mean()))
            if len(batches.rows):
                guesses = estimators[DISPERSION].predict(batches)
                points += [
                    {"protocol": protocol, "seed": k, "dispersion": d, "predicted": g, "true": t}
                    for d, g, t in zip(
                        batches.dispersion.tolist(), guesses.tolist(), batches.accuracy.tolist(), strict=True
                    )
                ]
    return {
        "documents_per_batch": used,
        "asked_documents_per_batch": size,
        "seeds": seeds,
        "split": {"calibration": CALIBRATION_SHARE, "validation": VALIDATION_SHARE, "test": 0.7},
        "chosen": {kind: chosen.count(kind) for kind in REGRESSIONS if kind in chosen},
        "protocols": {
            protocol: _judged(errors[protocol], bias[protocol], seeds, used) for protocol in PROTOCOLS
        },
        "points": points,
    }


class Estimator(Protocol):
    """What guesses the accuracy of batches of unlabelled documents."""

    def predict(self, batches: Batches) -> Array:
        """Accuracy of each batch, in [0, 1]."""


@dataclass(frozen=True)
class ByDispersion:
    """Reads it off the dispersion."""

    regression: Regression

    def predict(self, batches: Batches) -> Array:
        """Accuracy of each batch, in [0, 1]."""
        return self.regression.predict(batches.dispersion)


@dataclass(frozen=True)
class Blind:
    """Says the same of every batch."""

    accuracy: float

    def predict(self, batches: Batches) -> Array:
        """Accuracy of each batch, in [0, 1]."""
        return np.full(len(batches.rows), self.accuracy)


@dataclass(frozen=True)
class MeanConfidence:
    """Believes the model: the mean probability of its answers, ``confidence`` (n,) of every document."""

    confidence: Array

    def predict(self, batches: Batches) -> Array:
        """Accuracy of each batch, in [0, 1]."""
        return np.array([self.confidence[rows].mean() for rows in batches.rows])


@dataclass(frozen=True)
class ThresholdedConfidence:
    """Average thresholded confidence (ATC): the share of documents above a threshold."""

    confidence: Array
    threshold: float

    @classmethod
    def fit(cls, confidence: Array, labelled: Rows, accuracy: float) -> ThresholdedConfidence:
        """The threshold above which a share ``accuracy`` of the ``labelled`` documents lies."""
        return cls(confidence, float(np.quantile(confidence[labelled], 1.0 - accuracy)))

    def predict(self, batches: Batches) -> Array:
        """Accuracy of each batch, in [0, 1]."""
        return np.array([(self.confidence[rows] > self.threshold).mean() for rows in batches.rows])


def _enough(calibration: Batches, validation: Batches, labelled: int, size: int) -> None:
    for name, batches in (("calibration", calibration), ("validation", validation)):
        reached = len(np.unique(batches.accuracy))
        if reached < FEWEST_TARGETS:
            raise UsageError(
                f"the {name} part of {labelled} labelled documents reaches {reached} target accuracies with "
                f"{size} documents a batch, and {FEWEST_TARGETS} are needed; label more documents"
            )


def _estimators(
    run: Run, labelled: Rows, calibration: Batches, fits: Iterable[Regression], best: Regression
) -> dict[str, Estimator]:
    """Every estimator by name, knowing the labels of the calibration part only."""
    own = float(run.right[labelled].mean())
    found: dict[str, Estimator] = {
        DISPERSION: ByDispersion(best),
        TRIVIAL: Blind(own),
        CONSTANT: Blind(float(np.median(calibration.accuracy))),
    }
    found |= {f"{DISPERSION}, {fit.kind}": ByDispersion(fit) for fit in fits}
    top = run.confidence.top_probability
    if not np.isnan(top[run.labelled]).any():
        found["mean confidence"] = MeanConfidence(top)
        found["ATC"] = ThresholdedConfidence.fit(top, labelled, own)
    return found


def _tests(run: Run, test: Rows, size: int, rng: np.random.Generator) -> dict[str, Batches]:
    whole = Batches([test], run.vectors.dispersions([test]), np.array([run.right[test].mean()]))
    return {
        "whole": whole,
        "slices": natural_batches(run, test, size, rng),
        "mixtures": mixture_batches(run, test, size, repeats=REPEATS // 2, step=10, rng=rng),
    }


def _judged(
    errors: dict[str, list[float]], bias: dict[str, list[float]], seeds: int, size: int
) -> dict[str, Any]:
    """The errors of one kind of batch, who wins, and whether dispersion beats knowing nothing."""
    full = {name: np.array(values) for name, values in errors.items() if len(values) == seeds}
    if DISPERSION not in full:
        return {"missing": f"fewer than two slices have {size} documents in every test part"}
    table = [
        {
            "estimator": name,
            "mae": float(values.mean()),
            **student_interval(values)._asdict(),
            "bias": float(np.mean(bias[name])),
        }
        for name, values in sorted(full.items(), key=lambda item: item[0].startswith(f"{DISPERSION},"))
    ]
    entrants = {name: values.mean() for name, values in full.items() if not name.startswith(f"{DISPERSION},")}
    # Mixtures have every accuracy alike, so there the best blind guess is the middle one.
    rival = min((name for name in (TRIVIAL, CONSTANT) if name in full), key=lambda name: entrants[name])
    difference = full[DISPERSION] - full[rival]
    low, high = student_interval(difference)
    by = f"{abs(difference.mean()):.2f} points"
    if high < 0:
        verdict = f"better than the {rival} predictor by {by}"
    else:
        verdict = f"no better than the {rival} predictor" + (f": worse by {by}" if low > 0 else "")
    return {
        "estimators": table,
        "winner": min(entrants, key=lambda name: entrants[name]),
        "rival": rival,
        "difference": float(difference.mean()),
        "difference_low": low,
        "difference_high": high,
        "better": high < 0,
        "verdict": verdict,
    }
