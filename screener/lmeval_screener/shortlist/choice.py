"""Which checkpoints to evaluate: the best of each group, what is tied with the last of them, some at random.

The K-th of a ranking is seldom told apart from the next ones: to stop at K would be a throw of the tokens. So
a list takes what is tied with the K-th too, up to a cap. An audit sample is drawn at random from the others:
without it nobody learns what the list missed.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.geometry import Metric
from lmeval_screener.screened import Group, Screened

Why = Literal["rank", "tied", "audit"]
CAP = 2  # times K: what a list holds at most


@dataclass(frozen=True, eq=False)
class GroupChoice:
    """What of one group is to be evaluated.

    Attributes:
        group: The group.
        k: How many were asked for; 0 where a diverse list had no place left for the group.
        best: Its K best.
        tied: Those behind them that are tied with the K-th, best first, up to the cap.
        open: How many are tied with the K-th behind it, those beyond the cap included.
        audit: Those drawn at random from the others.
        others: How many the audit sample of this group, or of a diverse list, was drawn from.
        drawn: How many were drawn from them.
    """

    group: Group
    k: int
    best: tuple[Screened, ...]
    tied: tuple[Screened, ...]
    open: int
    audit: tuple[Screened, ...] = ()
    others: int = 0
    drawn: int = 0

    @property
    def listed(self) -> tuple[Screened, ...]:
        """The short list of the group, best first."""
        return (*self.best, *self.tied)

    @property
    def chosen(self) -> tuple[Screened, ...]:
        """All that is to be evaluated: the list, then the audit sample."""
        return (*self.listed, *self.audit)

    @cached_property
    def _reasons(self) -> dict[Screened, Why]:
        found: dict[Screened, Why] = dict.fromkeys(self.best, "rank")
        found.update(dict.fromkeys(self.tied, "tied"))
        found.update(dict.fromkeys(self.audit, "audit"))
        return found

    @property
    def cap(self) -> int:
        """The most that the list may hold."""
        return CAP * self.k

    def why(self, checkpoint: Screened) -> Why | None:
        """Why a member is to be evaluated; None where it is not."""
        return self._reasons.get(checkpoint)

    def probability(self, checkpoint: Screened) -> float:
        """The probability with which a member was to be evaluated: 1 on the list, else the audit's share."""
        if self.why(checkpoint) in ("rank", "tied"):
            return 1.0
        return self.drawn / self.others if self.others else 0.0

    def sentence(self) -> str:
        """How the list came about, without the group's name.

        Such as ``12 of 40: the 8 best and 4 not separated from the 8th (cap 16)``.
        """
        total = len(self.group.checkpoints)
        if not self.listed:
            text = f"none of {total}"
        elif len(self.best) == total:
            text = "the only one" if total == 1 else f"all {total}"
        else:
            text = f"{len(self.listed)} of {total}: the {'best' if self.k == 1 else f'{self.k} best'}"
            if self.open:
                of = f" of the {self.open}" if self.open > len(self.tied) else ""
                text += (
                    f" and {len(self.tied)}{of} not separated from the {_ordinal(self.k)} (cap {self.cap})"
                )
            elif total > self.k:
                last = "" if self.k == 1 else f" the {_ordinal(self.k)}"
                text += f",{last} separated from all behind it"
        if self.drawn:
            text += f", and {len(self.audit)} of the others at random"
        return text


@dataclass(frozen=True, eq=False)
class Shortlist:
    """What of a whole screening is to be evaluated.

    Attributes:
        k: How many were asked for: of each group, or in all where ``diverse``.
        diverse: Whether K is shared out over the groups.
        audit: How many others were asked for at random, likewise.
        seed: Of the random sample.
        groups: One choice a group, in the order of the result.
    """

    k: int
    diverse: bool
    audit: int
    seed: int
    groups: tuple[GroupChoice, ...]

    @property
    def chosen(self) -> tuple[Screened, ...]:
        """All that is to be evaluated, group by group."""
        return tuple(c for one in self.groups for c in one.chosen)

    @cached_property
    def _places(self) -> dict[Screened, GroupChoice]:
        return {c: one for one in self.groups for c in one.group.checkpoints}

    def why(self, checkpoint: Screened) -> Why | None:
        """Why a checkpoint is to be evaluated; None where it is not."""
        return self._places[checkpoint].why(checkpoint)

    def probability(self, checkpoint: Screened) -> float:
        """The probability with which a checkpoint was to be evaluated."""
        return self._places[checkpoint].probability(checkpoint)

    def to_dict(self) -> dict[str, Any]:
        """What was asked for and what each group gave, as JSON and manifest have it."""
        return {
            "k": self.k,
            "diverse": self.diverse,
            "audit_sample": self.audit,
            "seed": self.seed,
            "groups": [
                {"family": one.group.family, "scale": one.group.scale, "k": one.k, "cap": one.cap}
                | {"candidates": len(one.group.checkpoints), "listed": len(one.listed), "tied": one.open}
                | {"audited": len(one.audit), "sentence": one.sentence()}
                for one in self.groups
            ],
        }

    def sentence(self) -> str:
        """The list in one sentence."""
        if len(self.groups) == 1:
            return f"Short list: {self.groups[0].sentence()}."
        total = sum(len(one.group.checkpoints) for one in self.groups)
        listed = sum(len(one.listed) for one in self.groups)
        drawn = sum(len(one.audit) for one in self.groups)
        more = f", and {drawn} of the others at random" if drawn else ""
        return f"Short list: {listed} of {total} in {len(self.groups)} groups{more}."

    def of(self, group: Group) -> GroupChoice:
        """The choice of a group of the result."""
        return next(
            one for one in self.groups if (one.group.family, one.group.scale) == (group.family, group.scale)
        )


def shortlist(
    groups: Sequence[Group],
    metric: Metric,
    k: int,
    *,
    diverse: bool = False,
    audit_sample: int = 0,
    seed: int = 0,
) -> Shortlist:
    """The short list of a screening.

    Args:
        groups: Those of the screening.
        metric: Which gap ranks.
        k: How many of each group; in all where ``diverse``.
        diverse: Share K out over the groups, one each in turn, the largest group first. G does not compare
            groups, so no group comes first by its G.
        audit_sample: How many others to add at random: of each group; in all where ``diverse``.
        seed: Of the sample. A group's sample depends on its name and members and on no other group.

    Raises:
        UsageError: ``k`` below 1, or ``audit_sample`` below 0.
    """
    if k < 1:
        raise UsageError(f"expected --shortlist of at least 1, got {k}")
    if audit_sample < 0:
        raise UsageError(f"expected --audit-sample of at least 0, got {audit_sample}")
    counts = _shared(k, groups) if diverse else [k] * len(groups)
    lists = [_listed(group, count, metric) for group, count in zip(groups, counts, strict=True)]
    if diverse:
        lists = _audited(lists, audit_sample, np.random.default_rng(seed))
    else:
        lists = [
            _audited([one], audit_sample, np.random.default_rng([seed, _number(one.group)]))[0]
            for one in lists
        ]
    return Shortlist(k, diverse, audit_sample, seed, tuple(lists))


def _shared(k: int, groups: Sequence[Group]) -> list[int]:
    """K over the groups, one each in turn, the largest first, none more than it has."""
    counts = [0] * len(groups)
    order = sorted(range(len(groups)), key=lambda i: -len(groups[i].checkpoints))
    while k > 0 and any(counts[i] < len(groups[i].checkpoints) for i in order):
        for i in order:
            if k > 0 and counts[i] < len(groups[i].checkpoints):
                counts[i] += 1
                k -= 1
    return counts


def _listed(group: Group, k: int, metric: Metric) -> GroupChoice:
    members = group.checkpoints
    if k == 0 or len(members) <= k:
        return GroupChoice(group, k, members if k else (), (), 0)
    last = members[k - 1]
    tied = [c for c in members[k:] if last.tied_to(c.rank)]
    listed = tied[: (CAP - 1) * k]
    if (rival := group.rival(metric)) is not None and rival not in (*members[:k], *listed):
        listed = [*listed[: (CAP - 1) * k - 1], rival]  # the best by the ratio, where the two disagree
        tied = tied if rival in tied else [*tied, rival]
    return GroupChoice(group, k, members[:k], tuple(listed), len(tied))


def _audited(lists: Sequence[GroupChoice], size: int, draw: np.random.Generator) -> list[GroupChoice]:
    """The lists with a simple random sample of all that none of them holds."""
    others = sorted((c for one in lists for c in one.group.checkpoints if one.why(c) is None), key=_identity)
    size = min(size, len(others))
    drawn = {others[i] for i in draw.choice(len(others), size, replace=False)} if size else set()
    return [
        GroupChoice(
            one.group,
            one.k,
            one.best,
            one.tied,
            one.open,
            tuple(c for c in one.group.checkpoints if c in drawn),
            len(others),
            size,
        )
        for one in lists
    ]


def _identity(checkpoint: Screened) -> tuple[str, str]:
    return checkpoint.name, checkpoint.revision or ""


def _number(group: Group) -> int:
    return zlib.crc32(f"{group.family}\n{group.scale}".encode())


def _ordinal(number: int) -> str:
    last = number % 10 if number % 100 not in (11, 12, 13) else 0
    return f"{number}{dict(enumerate(('st', 'nd', 'rd'), 1)).get(last, 'th')}"
