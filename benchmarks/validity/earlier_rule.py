"""The race's rule before stakes by gap (a389e275), to say how many questions these save.

Each stake is a share of the largest one possible, and predictions stay for 25 questions; the first
``plain`` are bet on without any. All else is `lmeval_dispersion.racing.rule`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

STEP = 25
STAKES = np.array([0.08, 0.2, 0.35, 0.5, 0.7, 0.9])  # each gets an equal part of the bet
RIDGE, START, PRETENDED = 25.0, 0.6, 5


def asked(scores: Floats, columns: Floats, plain: int, level: float, error: float) -> int:
    """How many questions it takes to show that the mean is below the level; N where that is not shown.

    Args:
        scores: In the order asked, (N,).
        columns: Predictors of each question, (N, c); the first is a score.
        plain: Number of first questions that are bet on without a prediction.
        level: A mean score.
        error: Chance, at most, that the mean reaches the level all the same.
    """
    count = len(scores)
    won = np.zeros(len(STAKES))
    for begin in range(0, count, STEP):
        end = min(begin + STEP, count)
        predicted = np.zeros(count - begin)
        if begin >= plain:
            predicted = _predicted(scores[:begin], columns)
        mine = predicted[: end - begin]
        now = scores[begin:end]
        left = count - np.arange(begin, end)
        totals = scores[:begin].sum() + np.cumsum(now)
        ahead = predicted.sum() - np.cumsum(mine) + mine
        fair = (count * level - totals + now - ahead) / left
        largest = np.maximum((1 - predicted).max() - fair, 1e-9)
        stakes = STAKES[:, None] / largest
        gains = np.log1p(np.maximum(stakes * (fair - now + mine), 1e-12 - 1))
        path = won[:, None] + np.cumsum(gains, axis=1)
        won = path[:, -1]
        highest = path.max(axis=0)
        value = highest + np.log(np.exp(path - highest).mean(axis=0))
        out_of_reach = count * level - totals > left - 1 + 1e-9
        if (value >= -math.log(error)).any() or out_of_reach.any():
            return end
    return count


def _predicted(seen_scores: Floats, columns: Floats) -> Floats:
    """The scores of the questions left."""
    n = len(seen_scores)
    weights = np.full(columns.shape[1], START / columns.shape[1])
    middle = (seen_scores.sum() + PRETENDED * columns[:, 0].mean()) / (n + PRETENDED)
    if n:
        seen = columns[:n] - columns[:n].mean(axis=0)
        penalty = RIDGE * np.diag(columns.var(axis=0) + 1e-6)
        known = seen.T @ (seen_scores - seen_scores.mean()) + penalty @ weights
        weights = np.linalg.solve(seen.T @ seen + penalty, known)
    scores: Floats = np.clip((columns[n:] - columns.mean(axis=0)) @ weights + middle, 0, 1)
    return scores
