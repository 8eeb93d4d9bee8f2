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
    """Figures and results of one group's candidates, arrays of shape (n,); NaN without a result.

    ``figure`` is the one that ranks them. ``listed`` were on the short list, ``audited`` were drawn at random
    from the others.
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
        """Known results: ``none`` (below two), ``all``, ``audit`` (the list, some drawn), else ``list``."""
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
        """Positions of the results that form pairs, shape (used,); in an audit, only of listed and drawn."""
        mask = self.known
        if self.design == "audit":
            mask = mask & (self.listed | self.audited)
        return np.flatnonzero(mask)

    @property
    def others(self) -> int:
        """Number of candidates that are not on the list."""
        return int((~self.listed).sum())

    @property
    def stands_for_all(self) -> bool:
        """Whether pairs with results represent all pairs; one audited candidate gives no audited pair."""
        drawn = int((self.audited & self.known).sum())
        return self.design == "all" or (self.design == "audit" and (drawn > 1 or self.others == 1))

    def pair_sums(self) -> tuple[Array, Array]:
        """For each used result, over its pairs: weight of the pairs in the right order, and of all pairs.

        A weight is one over the probability that both are included; a tie counts half. Shapes (used,),
        (used,).
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
    """Share of pairs inside groups that figures order as accuracies do, with its 95 % interval.

    Over all pairs of candidates if all, or the list and two or more of the audit sample, are known;
    otherwise over the pairs with results. The interval is for checkpoints like these: the variance of a
    mean over pairs (Hoeffding, Annals of Mathematical Statistics 19, 1948), on the logit's scale with
    Student's t. If hardly a pair is wrong, an end is that of equally many independent pairs, all right. All
    NaN without a pair; 0 to 1 where checkpoints are too few for an error.
    """
    parts = [group.pair_sums() for group in groups if group.design != "none"]
    if not parts:
        return Interval(_NAN, _NAN, _NAN)
    agreeing = np.concatenate([agreed for agreed, _ in parts])
    weights = np.concatenate([whole for _, whole in parts])
    total = float(weights.sum()) / 2
    if total == 0:
        return Interval(_NAN, _NAN, _NAN)
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
    """Better checkpoints that the short list of one group missed; empty if none of the list has a result.

    A verdict's fields. ``best``: best accuracy on the list; ``regret``: the best of all minus that, ``seen``
    among known results, ``at_random`` the mean for as many drawn at random. Of ``others``, off the list,
    ``better`` (estimated: with an exact 95 % interval) beat it; ``excess`` is the mean lead of all others, 0
    for worse ones. ``drawn`` counts audited results, ``better_seen`` those that beat it; both 0 unless the
    audit estimates. ``regret``, ``at_random`` need all results; ``better``, ``excess`` these or an audit.
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
    """Expected maximum of ``size`` <= n values drawn at random from ``values`` (n,).

    The k-th smallest is the best of C(k - 1, size - 1) of the C(n, size) draws.
    """
    whole = _log_choose(len(values), size)
    chances = []
    for k in range(size, len(values) + 1):
        ways = _log_choose(k - 1, size - 1)
        chances.append(math.exp(ways - whole))
    largest = np.sort(values)[size - 1 :]
    return float(np.asarray(chances) @ largest)


def count_bounds(hits: int, drawn: int, others: int) -> Bounds:
    """95 % interval of the number of hits among ``others``, given ``hits`` in ``drawn`` of them.

    Every number that an exact hypergeometric test does not reject, 2.5 % on each side: it covers in at
    least 95 % of draws.
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
