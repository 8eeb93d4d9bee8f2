"""When a race drops a checkpoint: a test that may be looked at after every answer.

N questions are drawn of a checkpoint one by one, at random and without replacement; its scores s
lie in [0, 1]. The test bets, question by question, that their mean over all N lies below a level
(Waudby-Smith & Ramdas 2020, *Confidence sequences for sampling without replacement*; 2024,
*Estimating means of bounded random variables by betting*).

**One bet.** Question q has the weight w (1 without weights; W in all), and each draw takes one of
those left with a chance proportional to it. Each bet is on the residual s - h of a prediction h.
Were the mean the level or more, the residuals of those left would have a mean of at least

    fair = (W level - sum of w s over those seen - sum of w h over those left) / W left.

A purse of 1 becomes 1 + λ (fair - (s - h)); with λ fixed before the draw its expectation is at most
1 then. It never loses more than .95, as λ (largest s - h - fair) <= .95. So the chance that the
mean of a few purses, each with stakes of its own, ever reaches 1 / error is at most ``error``
(Ville 1939). No approximation is involved: it holds for scores of every kind and any number of
looks, and knows that at the last question nothing is uncertain.

**Stakes by gap.** A purse that expects the mean to lie d below the level stakes λ = d / (v + d²), v
the variance of the residuals so far. Neither h nor v knows the level; so λ depends on it through
the cap alone, and no purse wins less against a higher level: where fair - (s - h) = g is positive,
λ g is the lesser of two terms that rise with the level, d g / (v + d²) and .95 g / (largest -
fair); where it is negative, the greater of them.

**Several levels at once.** Let u be the lowest level that the bets have refuted by now. A mean μ at
or above u was refuted itself, as the bets against μ won at least as much: so the chance that u ever
falls to μ or below is at most ``error``, over all questions and all levels, though u was looked for
afterwards. That needs predictions and stakes that do not depend on the level, and nothing else.

**Shared questions.** The first few questions may be asked of all checkpoints in one order. A level
that depends on what the others answered is not fixed then, and the bets hold all the same: they use
no answers of others there (h is 0, v is of the checkpoint's own scores), so the purses against its
own mean are fair in the common order, whatever is looked at; and against a level that lies below
its mean they win at most as much. How many of its questions are shared may depend on all answers to
them. What follows is drawn anew, in an order of its own: given all answers that others gave by
then, the rest is a random order again, in which predictions may use them.

**Steps.** A prediction (a ridge regression on the answers of others, by the checkpoint's own
answers so far) and v are fixed for a step of questions, counted from the start and from the first
question that is not shared. So the bets do not depend on how many questions are asked at once.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SHARED = 25  # questions that all are asked at first
STEP = 10  # questions of a bet's step
FINE = 1e-3  # a lowest level is exact to this, and never too low
_GAPS = np.array([0.03, 0.06, 0.12, 0.25, 0.5])  # d of each purse; equal parts of the bet
_MOST = 0.95  # of the largest stake
_SPREAD = 0.2  # variance of the residuals before any
_ASSUMED = 20  # answers as which it counts
_LEAST = 0.01  # of a variance
_RIDGE = 25.0  # penalty of the regression
_START = 0.6  # its starting sum of weights
_PRETENDED = 5  # pseudo-answers


class Bets:
    """Test by betting: large winnings show that a checkpoint's mean score is below a level.

    The bets test, for every level at the same time, the claim that the mean of all N scores is at
    least the level. If the claim is true, they do not win on average.

    Args:
        of: Number of questions in all, N.
        columns: Predictors of the scores, such as other checkpoints' scores, with a row for each
            question in the order asked. The first column must be a checkpoint's score, or 1 minus
            it; its mean is the first guess of the mean score. None to predict nothing. May be set
            later, but before the first question that is not shared is taken. Shape (N, c).
        shared: How many questions, from the first, are also asked of other checkpoints. Their
            scores are not predicted; the columns' rows for them only serve to fit the predictions
            of later questions.
        weights: Weight of each question in the order asked, with a mean of 1; None if all are
            equal. Shape (N,).
        step: Number of questions between two updates of the predictions.

    Attributes:
        of: Number of questions in all, N.
        columns: The predictors, as for the argument; None without any.
        shared: How many questions, from the first, are also asked of other checkpoints.
        taken: Number of questions that were bet on.
        begin: Bets on the first ``begin`` questions do not count.
    """

    def __init__(
        self,
        of: int,
        columns: Array | None = None,
        shared: int = 0,
        weights: Array | None = None,
        step: int = STEP,
    ) -> None:
        self.of = of
        self.shared = shared
        self.taken = 0
        self.begin = 0
        self.columns = columns
        self._step = step
        self._weights = np.ones(of) if weights is None else weights
        self._left = np.cumsum(self._weights[::-1])[::-1]  # before each question, with it
        self._scores = np.zeros(of)
        self._predicted = np.zeros(of)
        self._ahead = np.zeros(of)  # weighted sum of the predictions of those left, with this one
        self._highest = np.ones(of)  # residual that a question left may have
        self._spread = np.full(of, _SPREAD)
        self._fixed: tuple[Array, Array] | None = None  # the columns' means, and the penalty
        self._lowest: dict[tuple[float, int], int] = {}  # in steps of FINE

    def take(self, scores: Array) -> None:
        """Bet on the next k questions, and enter their ``scores``, shape (k,)."""
        end = self.taken + len(scores)
        self._scores[self.taken : end] = scores
        plain = end if self.columns is None else min(end, self.shared)
        if self.taken < plain:
            self._bet_plainly(plain)
        while self.taken < end:
            step_begin = self.taken - (self.taken - self.shared) % self._step
            if step_begin == self.taken:
                self._predict()
            self.taken = min(end, step_begin + self._step)

    def _bet_plainly(self, end: int) -> None:
        """Go on to the question ``end`` without a prediction; the variance is that of the scores."""
        known = self._scores[:end]
        begins = np.arange(self.taken, end) // self._step * self._step
        sums = np.concatenate([[0.0], np.cumsum(known)])[begins]
        squares = np.concatenate([[0.0], np.cumsum(known**2)])[begins]
        spread = squares - sums**2 / np.maximum(begins, 1)
        spread = (_ASSUMED * _SPREAD + spread) / (_ASSUMED + begins)
        self._spread[self.taken : end] = np.maximum(spread, _LEAST)
        self.taken = end

    def _predict(self) -> None:
        """Fix the predictions of a step's questions and the variance of their residuals."""
        n = self.taken
        step = slice(n, n + self._step)
        weights = self._weights[n:]
        predicted = self._regression()
        self._predicted[step] = predicted[: self._step]
        self._ahead[step] = np.cumsum((weights * predicted)[::-1])[::-1][: self._step]
        self._highest[step] = 1 - predicted.min()
        residuals = self._scores[self.shared : n] - self._predicted[self.shared : n]
        spread = float(weights @ (predicted * (1 - predicted))) / self._left[n]
        total = _ASSUMED * spread + len(residuals) * (residuals.var() if len(residuals) else 0.0)
        self._spread[step] = max(_LEAST, total / (_ASSUMED + len(residuals)))

    def _regression(self) -> Array:
        """The predicted scores of the questions left."""
        n = self.taken
        columns = self.columns
        assert columns is not None
        if self._fixed is None:
            penalty = _RIDGE * np.diag(columns.var(axis=0) + 1e-6)
            self._fixed = self._weights @ columns / self.of, penalty
        middle, penalty = self._fixed
        start = np.full(columns.shape[1], _START / columns.shape[1])
        scores = self._scores[:n]
        height = (scores.sum() + _PRETENDED * middle[0]) / (n + _PRETENDED)
        slopes = start
        if n:
            seen = columns[:n] - columns[:n].mean(axis=0)
            known = seen.T @ (scores - scores.mean()) + penalty @ start
            slopes = np.linalg.solve(seen.T @ seen + penalty, known)
        found: Array = np.clip((columns[n:] - middle) @ slopes + height, 0, 1)
        return found

    def wealth(self, level: float) -> Array:
        """Return the logarithm of the wealth after each bet that the mean score is below ``level``.

        The initial wealth is 1 (logarithm 0), and is not included. Shape (taken,), float64.
        """
        n = self.taken
        seen = (
            np.cumsum(self._weights[:n] * self._scores[:n]) - self._weights[:n] * self._scores[:n]
        )
        fair = (self.of * level - seen - self._ahead[:n]) / self._left[:n]
        gaps = _GAPS[:, None]
        stakes = gaps / (self._spread[:n] + gaps**2)
        stakes = np.minimum(stakes, _MOST / np.maximum(self._highest[:n] - fair, 1e-9))
        gains = np.log1p(stakes * (fair - self._scores[:n] + self._predicted[:n]))
        gains[:, : self.begin] = 0.0
        won = np.cumsum(gains, axis=1)
        highest = won.max(axis=0)
        wealth: Array = highest + np.log(np.exp(won - highest).mean(axis=0))
        return wealth

    @property
    def reach(self) -> float:
        """The highest mean score still possible, with a score of 1 for all questions left."""
        n = self.taken
        left = float(self._left[n]) if n < self.of else 0.0
        return (float(self._weights[:n] @ self._scores[:n]) + left) / self.of

    def refutes(self, level: float, error: float) -> bool:
        """Whether the scores so far show that the mean of all N scores is below ``level``.

        The probability of a wrong True is at most ``error``.
        """
        if level > self.reach + 1e-9 / self.of:
            return True
        return self.taken > 0 and bool(self.wealth(level).max() >= -math.log(error))

    def lowest(self, error: float) -> float:
        """Return the lowest level for which :meth:`refutes` is true; 1 if it is true for none.

        The result may be up to `FINE` too high, and is never too low. Levels are tried in whole
        steps of `FINE`, so that the result does not depend on earlier calls.
        """
        high = self._lowest.get((error, self.begin), round(1 / FINE))
        if self.taken and self.refutes((high - 1) * FINE, error):
            low = 0
            high -= 1
            while high - low > 1:
                middle = (low + high) // 2
                if self.refutes(middle * FINE, error):
                    high = middle
                else:
                    low = middle
        self._lowest[error, self.begin] = high
        return min(high * FINE, self.reach)
