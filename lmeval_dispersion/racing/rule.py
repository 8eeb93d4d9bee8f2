"""When a race drops a checkpoint: a test that may be looked at after every answer.

N questions are asked of a checkpoint in random order; its scores lie in [0, 1]. The test bets, question by
question, that their mean over all N lies below a level (Waudby-Smith & Ramdas 2020, *Confidence sequences
for sampling without replacement*; 2024, *Estimating means of bounded random variables by betting*). Were the
mean the level or more, the remaining scores would have a mean of at least (N * level - seen) / left;
a stake of 1 then has an expectation of at most 1 after every question, so the chance that it ever reaches
1 / error is at most ``error`` (Ville 1939). No approximation is involved: it holds for scores
of every kind and any number of looks, and knows that at the last question nothing is uncertain.

Each bet is on the residual of a score after a prediction (a ridge regression on the answers of others, by
those seen before the block). The prediction is of all N questions and fixed before the block, so it may be
wrong without harm to the error. Neither it nor the stakes know the level, except for a question's least worth
(``fair``): so the bets against a lower level never win more.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

BLOCK = 25
_STAKES = np.array(
    [0.08, 0.2, 0.35, 0.5, 0.7, 0.9]
)  # shares of the largest stake; each gets an equal part of the bet
_RIDGE, _START, _PRETENDED = (
    25.0,
    0.6,
    5,
)  # regression: penalty, starting sum of weights, pseudo-answers


class Bets:
    """Bets against "the mean of all scores is the level or more", as scores come in.

    Args:
        of: Number of questions in all, N.
        level: The level, a mean score.
        columns: Predictors of each question, in the order asked; the first column is a score. None for none.
            Shape (N, c).
        plain: Number of first questions, which are bet on without the columns.

    Attributes:
        taken: Number of questions bet on.
        most: Logarithm of the highest value that a stake of 1 reached; infinite once the mean can no longer
            reach the level.
    """

    def __init__(self, of: int, level: float, columns: Array | None = None, plain: int = 0) -> None:
        self.of, self.level, self.plain = of, level, plain
        self.taken, self.most = 0, -math.inf
        self._columns, self._scores = columns, np.empty(0)
        self._won = np.zeros(len(_STAKES))

    def take(self, scores: Array) -> float:
        """Bet on the next scores, block by block; returns ``most``."""
        step = len(scores) if self._columns is None else BLOCK
        for begin in range(0, len(scores), step or 1):
            self.most = max(self.most, self._bet(scores[begin : begin + step]))
        return self.most

    def refutes(self, error: float) -> bool:
        """Whether the mean is shown to lie below the level; wrongly so with a chance of at most ``error``."""
        return self.most >= -math.log(error)

    def _bet(self, scores: Array) -> float:
        left = self.of - self.taken - np.arange(len(scores))
        predicted = self._predicted()
        mine, totals = predicted[: len(scores)], self._scores.sum() + np.cumsum(scores)
        ahead = predicted.sum() - np.cumsum(mine) + mine
        # Least mean of the remaining residuals if the mean of all scores reaches the level.
        fair = (self.of * self.level - totals + scores - ahead) / left
        most = np.maximum((1 - predicted).max() - fair, 1e-9)
        gains = np.log1p(np.maximum(_STAKES[:, None] * (fair - scores + mine) / most, 1e-12 - 1))
        won = self._won[:, None] + np.cumsum(gains, axis=1)
        self._won, self._scores = won[:, -1], np.concatenate([self._scores, scores])
        self.taken += len(scores)
        if (self.of * self.level - totals > left - 1 + 1e-9).any():
            return math.inf
        highest = won.max(axis=0)
        return float((highest + np.log(np.exp(won - highest).mean(axis=0))).max())

    def _predicted(self) -> Array:
        """The scores of the questions left."""
        n, columns = self.taken, self._columns
        if columns is None or n < self.plain:
            return np.zeros(self.of - n)
        weights = np.full(columns.shape[1], _START / columns.shape[1])
        middle = (self._scores.sum() + _PRETENDED * columns[:, 0].mean()) / (n + _PRETENDED)
        if n:
            seen = columns[:n] - columns[:n].mean(axis=0)
            penalty = _RIDGE * np.diag(columns.var(axis=0) + 1e-6)
            known = seen.T @ (self._scores - self._scores.mean()) + penalty @ weights
            weights = np.linalg.solve(seen.T @ seen + penalty, known)
        found: Array = np.clip((columns[n:] - columns.mean(axis=0)) @ weights + middle, 0, 1)
        return found
