"""The figures of a checkpoint as one array of numbers, for a registry or another process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lmeval_dispersion.geometry import METRICS, Array, Metric, PairMean
from lmeval_screener.ranking.gap import Gap
from lmeval_screener.ranking.ratio import Ratio

PARTS = ("within_domain", "between", "within_reference")
_NONE = np.zeros(0)


def numbers_of(gaps: Mapping[Metric, Gap], ratio: Ratio | None) -> Array:
    """The figures as float64, one after the other; a ratio that is not known is NaN.

    For each metric in the order of ``METRICS``, then for the ratio: its numbers, and those without each token
    of T, then of R.
    """
    parts: list[Sequence[float] | Array] = []
    for metric in METRICS:
        gap = gaps[metric]
        parts.append([gap.mean, gap.se])
        for name in PARTS:
            part: PairMean = getattr(gap, name)
            parts.append([part.mean, part.se, part.se_pairs, part.pairs])
        parts += [gap.left_out_domain, gap.left_out_reference]
    if ratio is None:
        parts.append(np.full(3 + len(gap.left_out_domain) + len(gap.left_out_reference), math.nan))
    else:
        parts += [[ratio.mean, ratio.se, ratio.rounding], ratio.left_out_domain, ratio.left_out_reference]
    return np.concatenate(parts)


def figures_of(numbers: Array, domain: int) -> tuple[dict[Metric, Gap], Ratio | None]:
    """The figures that :func:`numbers_of` took, of so many tokens of T, without the errors of G's parts."""
    tokens = (len(numbers) - len(METRICS) * 14 - 3) // (len(METRICS) + 1)
    place = 0

    def take(count: int) -> Array:
        nonlocal place
        place += count
        return numbers[place - count : place]

    def left_out() -> Iterator[Array]:
        yield take(domain)
        yield take(tokens - domain)

    gaps = {}
    for metric in METRICS:
        mean, se = map(float, take(2))
        inside, across, control = (
            PairMean(float(value), float(error), float(by_pairs), int(pairs), _NONE, _NONE)
            for value, error, by_pairs, pairs in take(12).reshape(-1, 4)
        )
        gaps[metric] = Gap(metric, mean, se, inside, across, control, *left_out())
    mean, se, rounding = map(float, take(3))
    return gaps, None if math.isnan(mean) else Ratio(mean, se, rounding, *left_out())
