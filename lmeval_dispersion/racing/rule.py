"""When a checkpoint is behind another: a test that may be looked at after every question.

The same N questions in one random order are asked of both; d is the difference of their scores, in
[-1, 1]. The test bets, question by question, that the mean of all N differences lies below a bound
(Waudby-Smith & Ramdas 2020, *Confidence sequences for sampling without replacement*; 2024, *Estimating means
of bounded random variables by betting*). Where the mean lies at the bound or above, what the bets have made
of 1 has an expectation of at most 1 after every question, so the chance that it ever reaches 1/error is at
most ``error`` (Ville 1939). No approximation is involved: it holds for scores of every kind and any number of
looks, and knows that at the last question nothing is uncertain.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_STAKES = np.array(
    [0.08, 0.2, 0.35, 0.5, 0.7, 0.9]
)  # shares of what may be staked; an equal part is bet by each


def log_won(differences: Array, of: int, bound: float = 0.0) -> Array:
    """Logarithm of what the bets against "the mean of all is ``bound`` or more" have made of 1.

    Args:
        differences: The first n of all differences, in random order, in [-1, 1]. Shape (n,).
        of: How many there are in all, N >= n.
        bound: In [-1, 1).

    Returns:
        After each question; infinite from where the mean can no longer reach the bound. Shape (n,).
    """
    totals = np.cumsum(differences)
    left = of - np.arange(len(differences))
    # The mean of those left, at the least, if the mean of all reaches the bound.
    fair = np.minimum((of * bound - totals + differences) / left, 1 - 1e-9)
    refuted = of * bound - totals > left - 1
    gains = np.log1p(_STAKES[:, None] * np.maximum((fair - differences) / (1 - fair), -1))
    won = np.cumsum(gains, axis=1)
    most = won.max(axis=0)
    mixed = most + np.log(np.exp(won - most).mean(axis=0))
    return np.where(np.logical_or.accumulate(refuted), np.inf, mixed)


def is_below(differences: Array, of: int, error: float, bound: float = 0.0) -> bool:
    """Whether the mean of all N differences lies below a bound, by the first n of them.

    Wrongly so, at any n up to N, with a chance of at most ``error``; with all N the mean itself decides.
    """
    if len(differences) == of:
        return bool(differences.mean() < bound)
    return bool(log_won(differences, of, bound).max(initial=-math.inf) >= -math.log(error))
