"""Which checkpoints of a group are told apart: at most 5 % that any pair is told apart wrongly.

Two procedures keep that rate over all pairs of a group, and which one runs depends on its size alone:

- up to `ALL_PAIRS` checkpoints, Holm's step-down procedure over the p-values of all pairs;
- above, an interval around each checkpoint's G less the group's mean, all n of them at 1 - 5 %/n
  (Bonferroni, Student's t). With a probability of 95 % every interval holds its value, so no two whose
  intervals are disjoint can be equal, whichever pairs are looked at. It takes n errors, not
  n (n - 1) / 2.

Either way a pair is told apart only where the second figure, the ratio, says the same (`Ratio.above`): what
moves no prediction moves G, and orders nothing. That can only tie more pairs.

For a few checkpoints a pair's own error is the sharper one; for many, 5 %/n is a far milder level than 5 %
over the number of pairs. `benchmarks/separation.py` simulates both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.geometry import Array
from lmeval_dispersion.statistics import student_points
from lmeval_screener.ranking.gap import Gap, difference, ranks
from lmeval_screener.ranking.ratio import Ratio

#: Chance that any two of a group are told apart although they do not differ.
ERROR_RATE = 0.05
#: Checkpoints of a group up to which all pairs are compared.
ALL_PAIRS = 64
_BLOCK = 256  # gaps of a large group that are looked at at once


class Next(NamedTuple):
    """G of a checkpoint minus G of the next in rank.

    Attributes:
        difference: In the metric that ranks, 0 or more.
        se: Paired jackknife standard error over the choice of tokens.
        separated: Whether the two are told apart once all pairs of the group are counted.
    """

    difference: float
    se: float
    separated: bool


class Ranks:
    """Ranks of a group, ascending: a bit each, as those of a large group would not fit into memory.

    >>> list(Ranks([8, 6, 6])), 6 in Ranks([6]), bool(Ranks([]))
    ([6, 8], True, False)
    """

    __slots__ = ("_bits",)

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        places = np.fromiter(ranks, dtype=np.int64)
        flags = np.zeros(places.max(initial=0) + 1, dtype=bool)
        flags[places] = True
        self._bits = np.packbits(flags).tobytes() if len(places) else b""

    def __iter__(self) -> Iterator[int]:
        """Each rank."""
        return iter(np.flatnonzero(np.unpackbits(np.frombuffer(self._bits, np.uint8))).tolist())

    def __contains__(self, rank: int) -> bool:
        """Whether a rank is among them."""
        return rank >> 3 < len(self._bits) and bool(self._bits[rank >> 3] & 128 >> (rank & 7))

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._bits)

    def runs(self) -> list[tuple[int, int]]:
        """First and last of every run of ranks."""
        flags = np.unpackbits(np.frombuffer(self._bits, np.uint8))
        edges = np.flatnonzero(np.diff(flags.astype(np.int8), prepend=0, append=0))
        return [(int(begin), int(end) - 1) for begin, end in edges.reshape(-1, 2)]


class Standing(NamedTuple):
    """Where one gap of a group stands.

    Attributes:
        rank: 1 for the largest; equal means share the better rank.
        ties: Ranks that it is not told apart from. Its own rank is among them where another gap shares it.
        next: Against the gap of the next rank; None for the last.
    """

    rank: int
    ties: Ranks
    next: Next | None

    @property
    def tied_with(self) -> tuple[int, ...]:
        """``ties`` one by one, ascending."""
        return tuple(self.ties)


def rank_gaps(gaps: Sequence[Gap], ratios: Sequence[Ratio | None] = ()) -> list[Standing]:
    """The standing of each gap in its group, in the order given; see the module's text."""
    ratios = ratios or [None] * len(gaps)
    return (_all_pairs if len(gaps) <= ALL_PAIRS else _intervals)(gaps, ratios)


def agree(better: Ratio | None, worse: Ratio | None) -> bool:
    """Whether the ratio does not object to an order: it says the same, or is not known of both."""
    return better is None or worse is None or better.above(worse)


def _all_pairs(gaps: Sequence[Gap], ratios: Sequence[Ratio | None]) -> list[Standing]:
    places = ranks([gap.mean for gap in gaps])
    order = sorted(range(len(gaps)), key=lambda i: places[i])
    pairs = {(i, j): difference(gaps[i], gaps[j]) for at, i in enumerate(order) for j in order[at + 1 :]}
    apart = _told_apart({pair: change.p for pair, change in pairs.items()})
    apart = {(i, j) for i, j in apart if agree(ratios[i], ratios[j])}
    following = dict(pairwise(order))
    ties: list[list[int]] = [[] for _ in places]
    for i, j in pairs:
        if (i, j) not in apart:
            ties[i].append(places[j])
            ties[j].append(places[i])
    standings = []
    for i, rank in enumerate(places):
        pair = (i, following[i]) if i in following else None
        after = None if pair is None else Next(pairs[pair].mean, pairs[pair].se, pair in apart)
        standings.append(Standing(rank, Ranks(ties[i]), after))
    return standings


def _told_apart(p_values: dict[tuple[int, int], float]) -> set[tuple[int, int]]:
    """Pairs that Holm's step-down procedure rejects at 5 % for all pairs together."""
    apart: set[tuple[int, int]] = set()
    for done, (pair, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        if p > ERROR_RATE / (len(p_values) - done):
            break
        apart.add(pair)
    return apart


def _intervals(gaps: Sequence[Gap], ratios: Sequence[Ratio | None]) -> list[Standing]:
    count = len(gaps)
    # `difference` refuses gaps of other tokens or another metric; against one of them is enough.
    for gap in gaps:
        gap.comparable(gaps[0])
    means = np.array([gap.mean for gap in gaps])
    order = np.argsort(-means, kind="stable")
    means = means[order]
    error, freedom, after = _interval_errors(gaps, order)
    half = student_points(ERROR_RATE / count, freedom) * error
    low, high = means - half, means + half
    # Without a ratio, a checkpoint is above all and below all by it.
    bounds = [
        (math.inf, -math.inf) if r is None else (r.mean - r.rounding, r.mean + r.rounding) for r in ratios
    ]
    least, most = np.array(bounds)[order].T
    places = 1 + np.searchsorted(-means, -means, side="left")
    standings: list[Standing] = [None] * count  # type: ignore[list-item]
    for at, i in enumerate(order):
        # In the order of G: those before it are better, those behind it worse.
        tied = np.concatenate(
            [
                ~((low[:at] > high[at]) & (least[:at] > most[at])),
                [False],
                ~((low[at] > high[at + 1 :]) & (least[at] > most[at + 1 :])),
            ]
        )
        following = None
        if at + 1 < count:
            gain = float(means[at] - means[at + 1])
            following = Next(gain, float(after[at]), not tied[at + 1])
        standings[i] = Standing(int(places[at]), Ranks(places[tied]), following)
    return standings


def _interval_errors(gaps: Sequence[Gap], order: NDArray[np.intp]) -> tuple[Array, Array, Array]:
    """Errors and degrees of freedom of each gap less the mean of all, and errors of each less the next."""
    # A block of gaps at a time, so that memory does not grow with their number.
    count = len(gaps)
    middle = [np.zeros_like(side) for side in _sides(gaps[0])]
    for gap in gaps:
        for total, side in zip(middle, _sides(gap), strict=True):
            total += side / count
    error, freedom, after = np.empty(count), np.empty(count), np.empty(max(count - 1, 0))
    for begin in range(0, count, _BLOCK):
        some = [_sides(gaps[i]) for i in order[begin : begin + _BLOCK + 1]]
        sides = [np.stack([pair[side] for pair in some]) for side in (0, 1)]
        end = min(begin + _BLOCK, count)
        deviations = [side[: end - begin] - mean for side, mean in zip(sides, middle, strict=True)]
        error[begin:end], freedom[begin:end] = _errors(deviations)
        steps, _ = _errors([side[:-1] - side[1:] for side in sides])
        after[begin : begin + len(steps)] = steps
    return error, freedom, after


def _sides(gap: Gap) -> tuple[Array, Array]:
    return gap.left_out_domain, gap.left_out_reference


def _errors(sides: Sequence[Array]) -> tuple[Array, Array]:
    """Jackknife errors and Welch's degrees of freedom of differences, a row each; see `paired_difference`."""
    parts, spread = np.zeros(len(sides[0])), np.zeros(len(sides[0]))
    for side in sides:
        size = side.shape[1]
        part = (size - 1) / size * np.square(side - side.mean(axis=1, keepdims=True)).sum(axis=1)
        parts += part
        spread += part**2 / (size - 1)
    freedom = np.divide(parts**2, spread, out=np.full(len(parts), np.inf), where=spread > 0)
    return np.sqrt(parts), freedom


class Changes:
    """Whether one of many gaps differs from any after it, in the order given, at a level for one pair.

    Args:
        gaps: Two or more of one metric and the same tokens.
        level: Two-sided level of one comparison.
    """

    def __init__(self, gaps: Sequence[Gap], level: float) -> None:
        self._gaps, self._level = gaps, level
        if len(gaps) <= ALL_PAIRS:
            return
        self._means = np.array([gap.mean for gap in gaps])
        self._sides = [
            np.stack([gap.left_out_domain for gap in gaps]),
            np.stack([gap.left_out_reference for gap in gaps]),
        ]
        # Welch's degrees of freedom lie between those of the smaller side and those of both.
        sizes = [side.shape[1] - 1 for side in self._sides]
        self._freedom = np.geomspace(min(sizes), sum(sizes), 33)
        self._beyond = student_points(level, self._freedom)

    def any_after(self, place: int) -> bool:
        """Whether the gap at a place differs from any later one."""
        if len(self._gaps) <= ALL_PAIRS:
            gap = self._gaps[place]
            return any(difference(gap, other).p < self._level for other in self._gaps[place + 1 :])
        errors, freedom = _errors([side[place] - side[place + 1 :] for side in self._sides])
        beyond = np.interp(np.log(freedom), np.log(self._freedom), self._beyond)
        gains = np.abs(self._means[place] - self._means[place + 1 :])
        return bool(((gains > beyond * errors) & (gains > 0)).any())
