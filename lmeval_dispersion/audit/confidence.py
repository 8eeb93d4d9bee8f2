"""The model's own confidence in its answer, from the log-probabilities of the choices.

Log-probabilities of one document's choices are brought to probabilities that sum to one over the choices
(the harness's ``acc`` view: no length normalisation). Documents with fewer than two choices, or none of
finite log-probability, have NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Confidence(NamedTuple):
    """Three scores a document, each of shape (n,).

    Attributes:
        top_probability: Largest probability, in [1/choices, 1].
        margin: Largest minus second largest probability, in [0, 1].
        entropy: Entropy of the choices in nats, 0 for certainty.
    """

    top_probability: Array
    margin: Array
    entropy: Array


def confidences(logprobs: Sequence[Sequence[float]]) -> Confidence:
    """Confidence of each document from the log-probabilities of its choices.

    >>> [round(float(v[0]), 3) for v in confidences([[0.0, 0.0, -1e9, -1e9]])]
    [0.5, 0.0, 0.693]
    """
    n = len(logprobs)
    top, margin, entropy = (np.full(n, np.nan) for _ in range(3))
    lengths = np.array([len(values) for values in logprobs], dtype=np.int64)
    for choices in np.unique(lengths[lengths >= 2]):
        rows = np.flatnonzero(lengths == choices)
        values = np.array([logprobs[int(row)] for row in rows], dtype=np.float64)
        # -inf is a probability of 0 and fine, unless every choice has it; NaN and inf are no log-probability.
        usable = np.isfinite(values).any(axis=1) & (values < np.inf).all(axis=1)
        rows, values = rows[usable], values[usable]
        if not len(rows):
            continue
        weights = np.exp(values - values.max(axis=1, keepdims=True))
        p = np.sort(weights / weights.sum(axis=1, keepdims=True), axis=1)
        top[rows], margin[rows] = p[:, -1], p[:, -1] - p[:, -2]
        entropy[rows] = -(p * np.log(np.where(p > 0, p, 1.0))).sum(axis=1)
    return Confidence(top, margin, entropy)
