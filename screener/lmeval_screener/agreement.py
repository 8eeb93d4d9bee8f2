"""Do gaps rank checkpoints as accuracies do? Rank correlations with permutation p-values.

Checkpoints are ranked inside groups (family and scale), so the
answer has one line per group, one over all groups that compares only inside them, and one across them all,
which the published evidence does not support.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lmeval_dispersion.geometry import Metric
from lmeval_dispersion.statistics import rank_agreement
from lmeval_screener.screened import Group

Scope = Literal["group", "within groups", "overall"]


@dataclass(frozen=True)
class Agreement:
    """How far two orders of the same checkpoints agree.

    Attributes:
        scope: ``group`` (one group), ``within groups`` (all groups, compared only inside each), ``overall``.
        group: The group's name; empty for the other scopes.
        n: Checkpoints that have both a gap and an accuracy.
        spearman: Rank correlation in [-1, 1]: 1 same order, 0 no relation, -1 opposite. NaN where undefined.
            *Within groups*: the same sum of products over ranks inside the groups.
        spearman_p: Two-sided: the share of all orders of the accuracies whose |Spearman| is at least as
            large. Two checkpoints always give 1, three give at least 1/3: it is reported as it is.
        exact: All orders were enumerated (groups of up to nine). Otherwise ``permutations`` were drawn with a
            fixed seed, and p = (1 + as large) / (1 + drawn).
        permutations: Orders that were enumerated or drawn.
        reason: Why the figures are NaN; empty where they are not.
    """

    scope: Scope
    group: str
    n: int
    spearman: float
    spearman_p: float
    exact: bool
    permutations: int
    reason: str = ""


def agreement(gaps: Sequence[float], accuracies: Sequence[float], groups: Sequence[str]) -> list[Agreement]:
    """Agreement of gaps with accuracies, per group and overall.

    Returns:
        One line per group in order of appearance; with more than one group also *within groups* and
        *overall*.

    >>> [line.spearman for line in agreement([1.0, 2.0, 3.0], [10, 30, 20], ["7B"] * 3)]
    [0.5]
    """
    if not len(gaps) == len(accuracies) == len(groups):
        raise ValueError(f"expected equal lengths, got {len(gaps)}, {len(accuracies)} and {len(groups)}")
    members: dict[str, tuple[list[float], list[float]]] = {group: ([], []) for group in groups}
    for gap, accuracy, group in zip(gaps, accuracies, groups, strict=True):
        if math.isfinite(gap) and math.isfinite(accuracy):
            members[group][0].append(gap)
            members[group][1].append(accuracy)
    lines = [_line("group", group, [pair]) for group, pair in members.items()]
    if len(members) > 1:
        everything = (
            [x for xs, _ in members.values() for x in xs],
            [y for _, ys in members.values() for y in ys],
        )
        lines.append(_line("within groups", "", list(members.values())))
        lines.append(_line("overall", "", [everything]))
    return lines


def _line(scope: Scope, group: str, strata: list[tuple[list[float], list[float]]]) -> Agreement:
    """One line of the result; orders are permuted inside each stratum."""
    n = sum(len(xs) for xs, _ in strata)
    figures = rank_agreement(strata)
    if figures is not None:
        return Agreement(scope, group, n, **figures._asdict())
    if all(len(xs) < 2 for xs, _ in strata):
        reason = "fewer than two checkpoints to compare"
    else:
        reason = f"all {'gaps' if all(len(set(xs)) < 2 for xs, _ in strata) else 'accuracies'} are equal"
    return Agreement(scope, group, n, math.nan, math.nan, True, 0, reason)


def agreements(groups: Sequence[Group], metric: Metric) -> list[Agreement]:
    """Agreement of G with the supplied accuracies, per group and overall; empty without any."""
    rated = [(group, c) for group in groups for c in group.checkpoints if c.accuracy is not None]
    return agreement(
        [c.gaps[metric].mean for _, c in rated],
        [float(c.accuracy or 0.0) for _, c in rated],
        [f"{group.family} · {group.scale}" for group, _ in rated],
    )
