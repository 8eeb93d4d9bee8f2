"""Which checkpoints to evaluate: the best of each group, those tied with the last of them, some at random.

The K-th of a ranking is seldom told apart from the next ones, so a list takes those that are tied with the
K-th too, up to a cap. An audit sample is drawn at random from the others: only it shows what the list missed.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """The checkpoints of one group that are to be evaluated.

    Attributes:
        group: The group.
        k: How many were asked for.
        best: Its K best.
        tied: Those behind them that are tied with the K-th, best first, up to the cap.
        open: How many are tied with the K-th behind it, those beyond the cap included.
        audit: Those drawn at random from the others.
    """

    group: Group
    k: int
    best: tuple[Screened, ...]
    tied: tuple[Screened, ...]
    open: int
    audit: tuple[Screened, ...] = ()

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
        reasons: dict[Screened, Why] = dict.fromkeys(self.best, "rank")
        reasons.update(dict.fromkeys(self.tied, "tied"))
        reasons.update(dict.fromkeys(self.audit, "audit"))
        return reasons

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
        return len(self.audit) / max(len(self.group.checkpoints) - len(self.listed), 1)

    def sentence(self) -> str:
        """How the list came about, without the group's name.

        Such as ``12 of 40: the 8 best and 4 not separated from the 8th (cap 16)``.
        """
        total = len(self.group.checkpoints)
        if len(self.best) == total:
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
        if self.audit:
            text += f", and {len(self.audit)} of the others at random"
        return text


@dataclass(frozen=True, eq=False)
class Shortlist:
    """The checkpoints of a whole screening that are to be evaluated.

    Attributes:
        k: How many were asked for of each group.
        audit: How many others of each group were asked for at random.
        seed: Of the random sample.
        groups: One choice a group, in the order of the result.
    """

    k: int
    audit: int
    seed: int
    groups: tuple[GroupChoice, ...]

    @property
    def chosen(self) -> tuple[Screened, ...]:
        """All that is to be evaluated, group by group."""
        return tuple(c for choice in self.groups for c in choice.chosen)

    @cached_property
    def _places(self) -> dict[Screened, GroupChoice]:
        return {c: choice for choice in self.groups for c in choice.group.checkpoints}

    def why(self, checkpoint: Screened) -> Why | None:
        """Why a checkpoint is to be evaluated; None where it is not."""
        return self._places[checkpoint].why(checkpoint)

    def probability(self, checkpoint: Screened) -> float:
        """The probability with which a checkpoint was to be evaluated."""
        return self._places[checkpoint].probability(checkpoint)

    def to_dict(self) -> dict[str, Any]:
        """The settings and each group's list in numbers, as JSON and manifest have them."""
        return {
            "k": self.k,
            "audit_sample": self.audit,
            "seed": self.seed,
            "groups": [
                {"family": choice.group.family, "scale": choice.group.scale, "k": choice.k, "cap": choice.cap}
                | {
                    "candidates": len(choice.group.checkpoints),
                    "listed": len(choice.listed),
                    "tied": choice.open,
                }
                | {"audited": len(choice.audit), "sentence": choice.sentence()}
                for choice in self.groups
            ],
        }

    def sentence(self) -> str:
        """The list in one sentence."""
        if len(self.groups) == 1:
            return f"Short list: {self.groups[0].sentence()}."
        total = sum(len(choice.group.checkpoints) for choice in self.groups)
        listed = sum(len(choice.listed) for choice in self.groups)
        drawn = sum(len(choice.audit) for choice in self.groups)
        more = f", and {drawn} of the others at random" if drawn else ""
        return f"Short list: {listed} of {total} in {len(self.groups)} groups{more}."

    def of(self, group: Group) -> GroupChoice:
        """The choice of a group of the result."""
        return next(
            choice
            for choice in self.groups
            if (choice.group.family, choice.group.scale) == (group.family, group.scale)
        )


def shortlist(
    groups: Sequence[Group], metric: Metric, k: int, *, audit_sample: int = 0, seed: int = 0
) -> Shortlist:
    """The short list of a screening."""
    if k < 1:
        raise UsageError(f"expected --shortlist of at least 1, got {k}")
    if audit_sample < 0:
        raise UsageError(f"expected --audit-sample of at least 0, got {audit_sample}")
    return Shortlist(
        k, audit_sample, seed, tuple(_chosen(group, metric, k, audit_sample, seed) for group in groups)
    )


def _chosen(group: Group, metric: Metric, k: int, audit_sample: int, seed: int) -> GroupChoice:
    members = group.checkpoints
    tied = [c for c in members[k:] if members[k - 1].tied_to(c.rank)]
    listed = tied[: (CAP - 1) * k]
    if (rival := group.rival(metric)) is not None and rival not in (*members[:k], *listed):
        listed = [*listed[: (CAP - 1) * k - 1], rival]  # the best by the ratio, where the two disagree
        tied = tied if rival in tied else [*tied, rival]
    choice = GroupChoice(group, k, members[:k], tuple(listed), len(tied))
    others = sorted((c for c in members if choice.why(c) is None), key=lambda c: (c.name, c.revision or ""))
    draw = np.random.default_rng([seed, zlib.crc32(f"{group.family}\n{group.scale}".encode())])
    places = draw.choice(len(others), min(audit_sample, len(others)), replace=False) if others else ()
    drawn = {others[i] for i in places}
    return replace(choice, audit=tuple(c for c in members if c in drawn))


def _ordinal(number: int) -> str:
    last = number % 10 if number % 100 not in (11, 12, 13) else 0
    return f"{number}{dict(enumerate(('st', 'nd', 'rd'), 1)).get(last, 'th')}"
