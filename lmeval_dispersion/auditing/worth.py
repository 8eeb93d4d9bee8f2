"""What estimates of slices are worth in labelled documents, and what labels themselves would have told.

Labels of k documents, drawn at random without replacement, estimate an accuracy by their mean. Where scores
are right or wrong the number of right ones is hypergeometric, and the expected error and the interval of the
estimate are exact sums over its distribution. Other scores have the same mean squared error by its closed
form v (1/k - 1/n) (Cochran, Sampling Techniques, 1977, 2.6); their absolute error and interval are those of
draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.auditing import shrinkage
from lmeval_dispersion.report import Col
from lmeval_dispersion.statistics import NORMAL_975

Array = NDArray[np.float64]

LABELS = (10, 20, 50, 100, 200, 500, 1000)
_DRAWS = 4000  # of scores between right and wrong
_HALF_WIDTH = 0.05  # of the interval that `labels_enough` asks for


@dataclass(frozen=True)
class Estimator:
    """Errors in points of one estimate of slices that its fit did not see, and its worth in labels."""

    estimator: Annotated[str, Col("Estimate")]
    feature: str
    mae: Annotated[float, Col("Mean error (points)", ".2f")]
    rmse: Annotated[float, Col("RMSE", ".2f", drop=1)]
    worth: Annotated[float, Col("Worth labels a slice", ".0f")]
    worth_low: Annotated[float, Col("95 % from", ".0f", drop=2)]
    worth_high: Annotated[float, Col("to", ".0f", drop=2)]
    better: Annotated[bool, Col("Beats the labelled accuracy", drop=3)]

    @classmethod
    def of(
        cls,
        name: str,
        pairs: shrinkage.Pairs,
        estimate: Array,
        trivial: Array,
        *,
        feature: str = "",
        seed: int = 0,
    ) -> Estimator:
        """From estimates of left-out slices (r,) beside those of the labelled accuracy alone (r,)."""
        gain = shrinkage.gain(pairs, estimate, trivial)
        worth = shrinkage.worth(pairs, estimate, seed)
        return cls(name, feature, gain.mae, gain.rmse, *worth, gain.better)


@dataclass(frozen=True)
class LabelError:
    """Expected errors in points of so many labels, and the estimates between which 95 % of draws lie."""

    labels: Annotated[int, Col("Labels", "d")]
    mae: Annotated[float, Col("Expected error (points)", ".2f")]
    rmse: Annotated[float, Col("RMSE", ".2f", drop=1)]
    low: Annotated[float | None, Col("95 % of draws from", ".1%")] = None
    high: Annotated[float | None, Col("to", ".1%")] = None
    whole_slices: Annotated[
        int | None, Col("Slices with no more", "d", hint="They have all labels: no error.")
    ] = None


def label_error(scores: Array, k: int, rng: np.random.Generator) -> LabelError:
    """How the mean of ``k`` scores, drawn from ``scores`` (n,) without replacement, is off their own."""
    n = len(scores)
    k = min(k, n)
    mean = float(scores.mean())
    variance = float(scores.var(ddof=1)) * (1 / k - 1 / n) if n > 1 else 0.0
    if np.isin(scores, (0.0, 1.0)).all():
        from scipy.stats import hypergeom

        law = hypergeom(n, int(scores.sum()), k)
        values = np.arange(k + 1)
        mae = float(law.pmf(values) @ np.abs(values / k - mean))
        low, high = float(law.ppf(0.025)) / k, float(law.ppf(0.975)) / k
    else:
        drawn = np.array([rng.choice(scores, size=k, replace=False).mean() for _ in range(_DRAWS)])
        mae = float(np.abs(drawn - mean).mean())
        low, high = map(float, np.quantile(drawn, [0.025, 0.975]))
    return LabelError(k, 100 * mae, 100 * math.sqrt(variance), low, high)


def slice_label_errors(slices: Sequence[Array], rng: np.random.Generator) -> Iterator[LabelError]:
    """Mean over slices of the errors of k labels each; smaller slices have all their labels."""
    for k in LABELS:
        if k < max(map(len, slices), default=0):
            errors = [label_error(scores, k, rng) for scores in slices]
            yield LabelError(
                k,
                float(np.mean([error.mae for error in errors])),
                math.sqrt(float(np.mean([error.rmse**2 for error in errors]))),
                whole_slices=sum(len(scores) <= k for scores in slices),
            )


def labels_enough(scores: Array) -> int:
    """Labels of the whole run whose mean is within 5 points in 95 % of draws, by the normal law."""
    n, variance = len(scores), float(scores.var(ddof=1))
    return min(n, math.ceil(variance / ((_HALF_WIDTH / NORMAL_975) ** 2 + variance / n)))
