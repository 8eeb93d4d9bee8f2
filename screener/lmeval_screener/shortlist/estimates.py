"""Results against a screen: pairs in the right order and the list's losses, with design-based estimates.

Where only the list and a random audit sample have results, everything that is a mean or a share over all
candidates or pairs of a group is estimated without bias by weights of one over the probability of inclusion.
The best of all is no mean: no estimator without bias exists for it (with one of two others seen,
its value would have to be max(a, b) from a or b alone). So regret is given where all are known; elsewhere
stand what was seen of it, how many others are better, and by how much on average.

Sources: Horvitz and Thompson, Journal of the American Statistical Association 47 (1952), for the weights;
Hoeffding, Annals of Mathematical Statistics 19 (1948), for the variance of means over pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.statistics import Bounds, Interval, student_quantile

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Design = Literal["all", "audit", "list", "none"]

_NAN = float("nan")
_BLOCK = 512  # rows of pairs held at a time
_HARDLY = 0.5  # wrong ones of as many independent pairs as there are, below which errors say nothing


@dataclass(frozen=True, eq=False)
class GroupResults:
    """Scores and results of the candidates of one group.

    Attributes:
        gaps: The figure that ranks them, shape (n,).
        accuracies: Shape (n,), NaN where there is no result.
        listed: Which were on the short list, shape (n,).
        audited: Which were drawn at random from the others, shape (n,).
        second: Another figure, shape (n,): only pairs that both order alike are ordered. None for one figure.
    """

    gaps: Array
    accuracies: Array
    listed: Flags
    audited: Flags
    second: Array | None = None

    @property
    def known(self) -> Flags:
        """Which have a result."""
        return np.isfinite(self.accuracies)

    @cached_property
    def design(self) -> Design:
        """The population that the results stand for.

        ``all`` candidates are known; the list and a random sample (``audit``; what has no result counts as
        not drawn); the ``list`` alone, or whatever else is known; ``none``: fewer than two results.
        """
        if self.known.sum() < 2:
            return "none"
        if self.known.all():
            return "all"
        drawn = int((self.audited & self.known).sum())
        if self.known[self.listed].all() and self.listed.any() and drawn:
            return "audit"
        return "list"

    @cached_property
    def used(self) -> NDArray[np.int64]:
        """Positions of the results that pairs are made of; those outside an audit are no sample."""
        mask = self.known & (self.listed | self.audited) if self.design == "audit" else self.known
        return np.flatnonzero(mask)

    @property
    def others(self) -> int:
        """Candidates that are not on the list."""
        return int((~self.listed).sum())

    @property
    def stands_for_all(self) -> bool:
        """The pairs with results stand for all pairs; a single draw shows no pair of two others."""
        drawn = int((self.audited & self.known).sum())
        return self.design == "all" or (self.design == "audit" and (drawn > 1 or self.others == 1))

    def pair_sums(self) -> tuple[Array, Array]:
        """For each used result, over its pairs: weights of those in the right order, and all weights.

        A weight is one over the probability that both are there, 0 where two figures do not agree; a tie
        counts half. Shapes (used,), (used,).
        """
        gaps, accuracies = self.gaps[self.used], self.accuracies[self.used]
        drawn = self.audited[self.used]
        m, others = int(drawn.sum()), self.others
        single = double = 1.0
        if self.design == "audit" and self.stands_for_all:
            single = others / m
            double = others * (others - 1) / (m * (m - 1)) if m > 1 else 1.0
        table = np.array([[1.0, single], [single, double]])
        right, total = np.zeros(len(gaps)), np.zeros(len(gaps))
        # Rows in blocks: ten thousand results make 50 million pairs.
        for start in range(0, len(gaps), _BLOCK):
            rows = slice(start, start + _BLOCK)
            weights = table[drawn[rows, None].astype(int), drawn[None].astype(int)]
            weights[np.arange(len(weights)), np.arange(start, start + len(weights))] = 0
            order = np.sign(gaps[rows, None] - gaps)
            if self.second is not None:
                second = self.second[self.used]
                alike = np.sign(second[rows, None] - second) == order
                weights *= alike & (order != 0)
            agree = order * np.sign(accuracies[rows, None] - accuracies)
            right[rows] = (weights * (1 + agree)).sum(axis=1) / 2
            total[rows] = weights.sum(axis=1)
        return right, total


def decision_accuracy(groups: Sequence[GroupResults]) -> Interval:
    """Share of the pairs inside groups that scores order as accuracies do, with its 95 % interval.

    Over all pairs of candidates where all, or the list and two or more of the audit sample, are known,
    without bias; elsewhere over the pairs of what is known. The interval is of checkpoints like these:
    Hoeffding's variance of a mean over pairs, each checkpoint counted once, on the logit's scale with
    Student's t. Where hardly a pair is wrong, errors say nothing, and an end is that of as many independent
    pairs, all right, as the checkpoints make. NaN without a pair. With a second figure: of the pairs that
    both order alike.
    """
    parts = [group.pair_sums() for group in groups if group.design != "none"]
    if not parts:
        return Interval(_NAN, _NAN, _NAN)
    agreeing, weights = (np.concatenate(side) for side in zip(*parts, strict=True))
    total = float(weights.sum()) / 2
    if total == 0:
        return Interval(_NAN, _NAN, _NAN)
    share = float(agreeing.sum()) / 2 / total
    projections = (agreeing - share * weights) / total
    variance = float(np.square(projections).sum())
    # As many checkpoints as weigh alike (Kish): of a list and a small audit hardly more than the audit.
    count = float(weights.sum() ** 2 / np.square(weights).sum())
    freedom = int(count + 1e-9) - len(parts) - 1
    if freedom < 1:
        return Interval(share, 0.0, 1.0)
    variance *= count * (count - 1) / (count - 2) ** 2
    se = math.sqrt(variance)
    pairs = max(count / 2, 1)
    edge = 0.025 ** (1 / pairs)
    low, high = 0.0, 1.0
    if 0 < share < 1 and se > 0:
        centre = math.log(share / (1 - share))
        half = student_quantile(0.975, freedom) * se / (share * (1 - share))
        low, high = 1 / (1 + math.exp(half - centre)), 1 / (1 + math.exp(-half - centre))
    elif 0 < share < 1:
        return Interval(share, low, high)
    if pairs * (1 - share) < _HARDLY:
        low = min(low, edge) if low else edge
    if pairs * share < _HARDLY:
        high = max(high, 1 - edge) if high < 1 else 1 - edge
    return Interval(share, low, high)


class Missed(NamedTuple):
    """Better checkpoints that the short list of one group missed; None where a figure is not known.

    Attributes:
        best: The best accuracy on the list.
        regret: Best of all minus ``best``, where all are known.
        seen: The same among what is known: the regret is at least this.
        at_random: Regret, on average, of as many drawn at random, where all are known.
        others: Candidates that are not on the list.
        drawn: Those of them that were drawn at random and have a result, where not all have one.
        better_seen: Drawn ones that are better than ``best``.
        better: How many of the others are better: known, or estimated without bias.
        better_low: Lower end of its 95 % interval, exact.
        better_high: Upper end.
        excess: By how much an other is better than ``best``, on average over all others, 0 where it is not.
    """

    best: float
    regret: float | None
    seen: float
    at_random: float | None
    others: int
    drawn: int
    better_seen: int
    better: float | None = None
    better_low: float | None = None
    better_high: float | None = None
    excess: float | None = None


def missed(group: GroupResults) -> Missed | None:
    """Better checkpoints outside a group's list; None where none of the list has a result."""
    listed = group.accuracies[group.listed & group.known]
    if not len(listed):
        return None
    best, known = float(listed.max()), group.accuracies[group.known]
    seen = float(known.max()) - best
    if group.design == "all":
        outside = group.accuracies[~group.listed]
        better = float((outside > best).sum())
        excess = float(np.maximum(outside - best, 0).mean()) if len(outside) else 0.0
        random = float(known.max()) - best_at_random(known, len(listed))
        return Missed(best, seen, seen, random, len(outside), 0, 0, better, better, better, excess)
    if group.design != "audit":
        return Missed(best, None, seen, None, group.others, 0, 0)
    sample = group.accuracies[group.audited & group.known]
    count, hits = len(sample), int((sample > best).sum())
    low, high = count_bounds(hits, count, group.others)
    excess = float(np.maximum(sample - best, 0).mean())
    share = hits * group.others / count
    return Missed(best, None, seen, None, group.others, count, hits, share, low, high, excess)


def best_at_random(values: Array, size: int) -> float:
    """The best of ``size`` drawn at random from ``values`` (n,), on average over all draws; size <= n.

    The k-th smallest is the best of C(k - 1, size - 1) of the C(n, size) draws.
    """
    ordered, count = np.sort(values), len(values)
    whole = _log_choose(count, size)
    chances = [
        math.exp(_log_choose(k - 1, size - 1) - whole) if k >= size else 0.0 for k in range(1, count + 1)
    ]
    return float(np.asarray(chances) @ ordered)


def count_bounds(hits: int, drawn: int, others: int) -> Bounds:
    """95 % interval of how many of ``others`` are hits, ``hits`` of ``drawn`` at random being so.

    Every number that is not rejected by an exact hypergeometric test, 2.5 % on each side: it covers in at
    least 95 % of draws.
    """
    whole = _log_choose(others, drawn)

    def tails(number: int) -> tuple[float, float]:
        chance = [
            math.exp(_log_choose(number, x) + _log_choose(others - number, drawn - x) - whole)
            if 0 <= x <= number and drawn - x <= others - number
            else 0.0
            for x in range(drawn + 1)
        ]
        return math.fsum(chance[: hits + 1]), math.fsum(chance[hits:])

    # Both tails are monotone in the number of hits.
    low, high = hits, others - (drawn - hits)
    left, right = low, high
    while left < right:  # the smallest number under which so many hits are not too many
        middle = (left + right) // 2
        left, right = (left, middle) if tails(middle)[1] > 0.025 else (middle + 1, right)
    lowest = left
    left, right = low, high
    while left < right:  # the largest number under which so few are not too few
        middle = (left + right + 1) // 2
        left, right = (middle, right) if tails(middle)[0] > 0.025 else (left, middle - 1)
    return Bounds(float(lowest), float(left))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
