"""Results against a screen: pairs in the right order and the list's losses, with design-based estimates.

If only the list and a random audit sample have results, every mean or share over all candidates or pairs of a
group is estimated without bias, with weights of one over the probability of inclusion (Horvitz and Thompson,
Journal of the American Statistical Association 47, 1952). The best of all is not a mean and has no unbiased
estimator, so regret is given if all are known, and otherwise the part of it that was seen.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.statistics import Bounds, Interval, student_quantile

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Design = Literal["all", "audit", "list", "none"]

_NAN = float("nan")
_HARDLY = 0.5  # wrong pairs, as if all were independent, below which errors say nothing


@dataclass(frozen=True, eq=False)
class GroupResults:
    """The accuracies of one group's n candidates, with the figure that ranks them.

    Attributes:
        figure: The ranking figure, shape (n,); higher is better.
        accuracies: The measured accuracies, shape (n,); NaN for a candidate without a result.
        listed: Whether each candidate was on the short list, shape (n,).
        audited: Whether each candidate was drawn at random from those not on the short list, shape
            (n,).
    """

    figure: Array
    accuracies: Array
    listed: Flags
    audited: Flags

    @property
    def known(self) -> Flags:
        """Whether each candidate has a result, shape (n,)."""
        return np.isfinite(self.accuracies)

    @cached_property
    def design(self) -> Design:
        """Which of the candidates have results, in one word.

        ``none``: fewer than two; ``all``: every candidate; ``audit``: not all, but every candidate
        on the short list and at least one drawn at random; ``list``: two or more in any other case.
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
        """Positions of the results that form pairs, shape (used,).

        All results form pairs; with the design ``audit``, only those of candidates that were on the
        list or drawn at random.
        """
        mask = self.known
        if self.design == "audit":
            mask = mask & (self.listed | self.audited)
        return np.flatnonzero(mask)

    @property
    def others(self) -> int:
        """Number of candidates that are not on the short list."""
        return int((~self.listed).sum())

    @property
    def stands_for_all(self) -> bool:
        """Whether the pairs with results represent all pairs of candidates.

        They do if all candidates have results. With the design ``audit`` they do if at least two of
        the candidates drawn at random have results, or if only one candidate is not on the list. A
        single drawn result says nothing about pairs in which neither candidate is on the list.
        """
        drawn = int((self.audited & self.known).sum())
        return self.design == "all" or (self.design == "audit" and (drawn > 1 or self.others == 1))

    def pair_sums(self) -> tuple[Array, Array]:
        """Sum the weights of the pairs of each result in ``used``.

        With the design ``audit``, if ``stands_for_all`` is true, a pair weighs one over the
        probability that both of its candidates were evaluated, so that estimates over all pairs of
        candidates have no bias. Otherwise every pair weighs 1.

        Returns:
            For each result, the total weight of its pairs in the right order, where a tie counts
            half; and the total weight of all its pairs. Both have the shape (used,).
        """
        drawn = self.audited[self.used]
        m = int(drawn.sum())
        others = self.others
        single = 1.0
        double = 1.0
        if self.design == "audit" and self.stands_for_all:
            single = others / m
            if m > 1:
                double = others * (others - 1) / (m * (m - 1))
        weights = np.ones((len(drawn), len(drawn)))
        weights[drawn[:, None] | drawn] = single
        weights[drawn[:, None] & drawn] = double
        np.fill_diagonal(weights, 0)
        agree = _signs(self.figure[self.used]) * _signs(self.accuracies[self.used])
        return (weights * (1 + agree)).sum(axis=1) / 2, weights.sum(axis=1)


def _signs(values: Array) -> Array:
    """The sign of each value minus each other value."""
    return np.sign(values[:, None] - values)


def decision_accuracy(groups: Sequence[GroupResults]) -> Interval:
    """Estimate the share of pairs of checkpoints that the figures order as the accuracies do.

    Pairs are formed inside each group. The estimate is for all pairs of candidates where
    ``stands_for_all`` is true, and otherwise for the pairs with results.

    The 95 % interval generalises to further checkpoints of the same kind. It uses the variance of a
    mean over pairs (Hoeffding, Annals of Mathematical Statistics 19, 1948), on the logit scale with
    Student's t. If almost all pairs are in the right order (or almost none is), the end of the
    interval nearest to 0.5 lies at least as far out as it would for n/2 independent pairs that all
    are (or none is), where n is the effective number of checkpoints.

    Returns:
        The share, in [0, 1], with its interval; all NaN if there is no pair. The interval is 0 to 1
        if the error cannot be estimated, as with too few checkpoints.
    """
    parts = [group.pair_sums() for group in groups if group.design != "none"]
    if not parts:
        return Interval(_NAN, _NAN, _NAN)
    agreeing = np.concatenate([agreed for agreed, _ in parts])
    weights = np.concatenate([whole for _, whole in parts])
    total = float(weights.sum()) / 2
    share = float(agreeing.sum()) / 2 / total
    projections = (agreeing - share * weights) / total
    variance = float(np.square(projections).sum())
    # The effective number of checkpoints (Kish): for a list and a small audit, hardly more than the audit.
    count = float(weights.sum() ** 2 / np.square(weights).sum())
    freedom = int(count + 1e-9) - len(parts) - 1
    if freedom < 1:
        return Interval(share, 0.0, 1.0)
    variance *= count * (count - 1) / (count - 2) ** 2
    se = math.sqrt(variance)
    pairs = max(count / 2, 1)
    edge = 0.025 ** (1 / pairs)
    low = 0.0
    high = 1.0
    if 0 < share < 1:
        if se == 0:
            return Interval(share, low, high)
        centre = math.log(share / (1 - share))
        half = student_quantile(0.975, freedom) * se / (share * (1 - share))
        low = 1 / (1 + math.exp(half - centre))
        high = 1 / (1 + math.exp(-half - centre))
    if pairs * (1 - share) < _HARDLY:
        low = min(low, edge) if low else edge
    if pairs * share < _HARDLY:
        high = max(high, 1 - edge) if high < 1 else 1 - edge
    return Interval(share, low, high)


def missed(group: GroupResults) -> dict[str, float | None]:
    """Find what the short list of one group missed, as fields of a `GroupVerdict`.

    Returns:
        Empty if no checkpoint on the list has a result. Otherwise, in every case:

        - ``best``: best accuracy on the list;
        - ``seen``: best known accuracy minus ``best``;
        - ``others``: number of candidates that are not on the list;
        - ``drawn``: with the design ``audit``, number of results of candidates drawn at random;
          else 0;
        - ``better_seen``: number of the ``drawn`` results that are better than ``best``.

        With the designs ``all`` (counted) and ``audit`` (estimated from the ``drawn`` results):

        - ``better``: number of the ``others`` that are better than ``best``;
        - ``better_low``: lower end of the exact 95 % interval of ``better``;
        - ``better_high``: upper end of this interval;
        - ``excess``: by how much the ``others`` are better than ``best`` on average, where worse
          ones count 0.

        With the design ``all`` only:

        - ``regret``: best accuracy of all candidates minus ``best``;
        - ``at_random``: expected regret of an equally long list that is drawn at random.
    """
    listed = group.accuracies[group.listed & group.known]
    if not len(listed):
        return {}
    best = float(listed.max())
    known = group.accuracies[group.known]
    figures: dict[str, float | None] = {
        "best": best,
        "seen": float(known.max()) - best,
        "others": group.others,
        "drawn": 0,
        "better_seen": 0,
    }
    if group.design == "all":
        outside = group.accuracies[~group.listed]
        better = float((outside > best).sum())
        return figures | {
            "regret": figures["seen"],
            "at_random": float(known.max()) - best_at_random(known, len(listed)),
            "better": better,
            "better_low": better,
            "better_high": better,
            "excess": _mean_lead(outside, best),
        }
    if group.design != "audit":
        return figures
    sample = group.accuracies[group.audited & group.known]
    hits = int((sample > best).sum())
    low, high = count_bounds(hits, len(sample), group.others)
    return figures | {
        "drawn": len(sample),
        "better_seen": hits,
        "better": hits * group.others / len(sample),
        "better_low": low,
        "better_high": high,
        "excess": _mean_lead(sample, best),
    }


def _mean_lead(accuracies: Array, best: float) -> float:
    """The mean lead of other checkpoints over the list's best, 0 for worse ones and without others."""
    return float(np.maximum(accuracies - best, 0).mean()) if len(accuracies) else 0.0


def best_at_random(values: Array, size: int) -> float:
    """Return the expected maximum of ``size`` values drawn at random without replacement.

    The k-th smallest of the n values is the maximum in C(k - 1, size - 1) of C(n, size) draws.

    Args:
        values: The values to draw from, shape (n,).
        size: Number of values in a draw, at most n.
    """
    whole = _log_choose(len(values), size)
    chances = []
    for k in range(size, len(values) + 1):
        ways = _log_choose(k - 1, size - 1)
        chances.append(math.exp(ways - whole))
    largest = np.sort(values)[size - 1 :]
    return float(np.asarray(chances) @ largest)


def count_bounds(hits: int, drawn: int, others: int) -> Bounds:
    """Return the 95 % interval of the number of hits in a population, given a random sample.

    A hit is a member with some property, such as being better than the short list's best. The
    interval holds every number that an exact hypergeometric test at 2.5 % on each side does not
    reject; it covers the true number in at least 95 % of draws.

    Args:
        hits: Number of hits in the sample.
        drawn: Size of the sample.
        others: Size of the population from which the sample was drawn.
    """
    whole = _log_choose(others, drawn)

    def chance(number: int, seen: Iterable[int]) -> float:
        """The distribution of hits among the drawn, if ``number`` of the others are hits."""
        chances = []
        for x in seen:
            if x <= number and drawn - x <= others - number:
                ways = _log_choose(number, x) + _log_choose(others - number, drawn - x)
                chances.append(math.exp(ways - whole))
        return math.fsum(chances)

    # Both tails are monotone in the number of hits.
    possible = range(hits, others - (drawn - hits) + 1)
    as_many = range(hits, drawn + 1)
    as_few = range(hits + 1)
    low = bisect.bisect_left(possible, True, key=lambda n: chance(n, as_many) > 0.025)
    high = bisect.bisect_left(possible, True, key=lambda n: chance(n, as_few) <= 0.025)
    return Bounds(float(possible[low]), float(possible[high - 1]))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
