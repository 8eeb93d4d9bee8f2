"""The short list of checkpoints to evaluate.

The order of the K-th of a ranking and the next checkpoints is seldom clear, so a list also takes those tied
with the K-th, up to a cap. An audit sample is drawn at random from the others: only it shows the checkpoints
that the list missed.
"""

from __future__ import annotations

import math
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
CAP = 2  # times K: the most that a list holds
LEAST, SHARE = 3, 1 / 3  # of a group, for a race; with ties at most half


@dataclass(frozen=True, eq=False)
class GroupChoice:
    """The checkpoints of one group to evaluate.

    Attributes:
        group: Its candidates. ``chosen`` of each is ``rank`` for the K best, ``tied`` for those behind them
            that have no clear order with the K-th, up to the cap, ``audit`` for those drawn at random from
            the others; ``inclusion_probability`` is 1 on the list, else the audit's share.
        tied_behind: How many behind the K-th have no clear order with it, including those beyond the cap.
        cap: The most that the list may hold.
    """

    group: Group
    k: int
    tied_behind: int
    cap: int

    def of(self, *reasons: Why) -> tuple[Screened, ...]:
        """The members chosen for any of these reasons, best first."""
        return tuple(c for c in self.group.checkpoints if c.chosen in reasons)

    @cached_property
    def listed(self) -> tuple[Screened, ...]:
        """The short list of the group, best first."""
        return self.of("rank", "tied")

    @cached_property
    def audit(self) -> tuple[Screened, ...]:
        """The members drawn at random."""
        return self.of("audit")

    @property
    def chosen(self) -> tuple[Screened, ...]:
        """All members to evaluate: the list, then the audit sample."""
        return (*self.listed, *self.audit)

    def sentence(self) -> str:
        """How the list was chosen, without the group's name.

        Such as ``12 of 40: the 8 best and 4 not separated from the 8th (cap 16)``.
        """
        total, listed, tied = len(self.group.checkpoints), len(self.listed), len(self.of("tied"))
        if self.k >= total:
            text = "the only one" if total == 1 else f"all {total}"
        else:
            text = f"{listed} of {total}: the {'best' if self.k == 1 else f'{self.k} best'}"
            if self.tied_behind:
                of = f" of the {self.tied_behind}" if self.tied_behind > tied else ""
                text += f" and {tied}{of} not separated from the {_ordinal(self.k)} (cap {self.cap})"
            else:
                last = "" if self.k == 1 else f" the {_ordinal(self.k)}"
                text += f",{last} separated from all behind it"
        return text + (f", and {len(self.audit)} of the others at random" if self.audit else "")


@dataclass(frozen=True, eq=False)
class Shortlist:
    """The checkpoints of a whole screening to evaluate: one choice per group."""

    k: int
    audit_sample: int
    seed: int
    groups: tuple[GroupChoice, ...]

    def __repr__(self) -> str:
        return f"<Shortlist> {', '.join(c.label for c in self.chosen)}"

    @property
    def chosen(self) -> tuple[Screened, ...]:
        """All checkpoints to evaluate, group by group."""
        return tuple(c for choice in self.groups for c in choice.chosen)

    def to_dict(self) -> dict[str, Any]:
        """The settings and each group's list in numbers, as in JSON and manifest."""
        return {
            "k": self.k,
            "audit_sample": self.audit_sample,
            "seed": self.seed,
            "groups": [
                {
                    "family": choice.group.family,
                    "scale": choice.group.scale,
                    "k": choice.k,
                    "cap": choice.cap,
                    "candidates": len(choice.group.checkpoints),
                    "listed": len(choice.listed),
                    "tied": choice.tied_behind,
                    "audited": len(choice.audit),
                    "sentence": choice.sentence(),
                }
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


def shortlist(
    groups: Sequence[Group], metric: Metric, k: int | None, *, audit_sample: int = 0, seed: int = 0
) -> Shortlist:
    """The short list of a screening; without a K a third of each group, as in a race."""
    if k is not None and k < 1:
        raise UsageError(f"expected at least 1, got {k}", argument="k")
    if audit_sample < 0:
        raise UsageError(f"expected at least 0, got {audit_sample}", argument="audit_sample")
    groups = [replace(group, checkpoints=group.candidates) for group in groups if group.candidates]
    choices = tuple(_choice(group, metric, k, audit_sample, seed) for group in groups)
    return Shortlist(k or max(choice.k for choice in choices), audit_sample, seed, choices)


def _choice(group: Group, metric: Metric, k: int | None, audit_sample: int, seed: int) -> GroupChoice:
    total, cap = len(group.checkpoints), CAP * (k or 0)
    if k is None:
        k = min(total, max(LEAST, math.ceil(total * SHARE)))
        cap = max(k, total // 2)
    members = sorted(group.checkpoints, key=lambda c: c.copy_of is not None)  # copies do not displace others
    tied = [c for c in members[k:] if members[k - 1].tied_to(c.rank) and c.copy_of is None]
    listed = tied[: cap - k]
    # The best by each figure, if the two disagree.
    rivals = [c for c in group.rivals(metric) if c not in (*members[:k], *listed)][: cap - k]
    listed = [*listed[: cap - k - len(rivals)], *rivals]
    tied += [c for c in rivals if c not in tied]
    why: dict[Screened, Why] = {**dict.fromkeys(members[:k], "rank"), **dict.fromkeys(listed, "tied")}
    others = sorted((c for c in members if c not in why), key=lambda c: (c.name, c.revision or ""))
    draw = np.random.default_rng([seed, zlib.crc32(f"{group.family}\n{group.scale}".encode())])
    places = draw.choice(len(others), min(audit_sample, len(others)), replace=False) if others else ()
    probability = dict.fromkeys(why, 1.0) | dict.fromkeys(others, len(places) / max(len(others), 1))
    why |= dict.fromkeys((others[i] for i in places), "audit")
    checkpoints = tuple(
        replace(c, chosen=why.get(c), inclusion_probability=probability[c]) for c in group.checkpoints
    )
    return GroupChoice(replace(group, checkpoints=checkpoints), k, len(tied), cap)


def _ordinal(number: int) -> str:
    last = number % 10 if number % 100 not in (11, 12, 13) else 0
    return f"{number}{dict(enumerate(('st', 'nd', 'rd'), 1)).get(last, 'th')}"
