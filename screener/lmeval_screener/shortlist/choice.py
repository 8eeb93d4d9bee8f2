"""The short list of checkpoints to evaluate.

By default the list takes as many ranks as hold the best checkpoint with a chance of 90 % (`Group.first_for`),
and all ranks where no chance is known. An audit sample is drawn at random from the checkpoints that are not on
the list: only this sample shows what the list missed.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from lmeval_dispersion.errors import UsageError
from lmeval_screener.screened import Group, Screened

Why = Literal["rank", "audit"]


@dataclass(frozen=True, eq=False)
class GroupChoice:
    """The checkpoints of one group that are to be evaluated.

    Attributes:
        group: The group's candidates, with two more fields set. ``chosen`` is ``rank`` for those on
            the short list, ``audit`` for those drawn at random from the rest, and None for all
            others. ``inclusion_probability`` is 1 on the list, and otherwise the share of the rest
            that is drawn.
        k: Number of ranks, from the first, that the list takes; checkpoints with equal rows share a
            rank.
        places: Number of ranks in the group.
        unranked: Number of checkpoints on the list that have no rank, as they have the rows of
            their base.
        kind: Kind of the group, as in `Group.kind`.
    """

    group: Group
    k: int
    places: int
    unranked: int
    kind: str

    @cached_property
    def listed(self) -> tuple[Screened, ...]:
        """The short list of the group, best first."""
        return tuple(c for c in self.group.checkpoints if c.chosen == "rank")

    @cached_property
    def audit(self) -> tuple[Screened, ...]:
        """The candidates that were drawn at random from those not on the list, best first."""
        return tuple(c for c in self.group.checkpoints if c.chosen == "audit")

    @property
    def chosen(self) -> tuple[Screened, ...]:
        """All candidates to evaluate: the short list, then those drawn at random."""
        return (*self.listed, *self.audit)

    def sentence(self) -> str:
        """Return how the group was chosen, without its name, such as ``9 of 24: ranks 1–9``."""
        total = len(self.group.checkpoints)
        listed = len(self.listed)
        if listed == total:
            text = "the only one" if total == 1 else f"all {total}"
        elif self.k >= self.places:
            text = f"{listed} of {total}, all except copies"
        else:
            ranks = "rank 1" if self.k == 1 else f"ranks 1–{self.k}"
            text = f"{listed} of {total}: {ranks}"
            if self.unranked:
                text += f", and {self.unranked} with the rows of the base"
        return text + _drawn(len(self.audit))


@dataclass(frozen=True, eq=False)
class Shortlist:
    """The checkpoints of a screening that are to be evaluated.

    Attributes:
        k: Number of ranks, from the first, that were asked for in each group. If no number was
            given, the largest number that a group's list takes.
        audit_sample: Number of checkpoints to draw at random from those of each group that are not
            on its list; all of these if there are fewer.
        seed: Seed of the random draw.
        groups: The choice in each group.
    """

    k: int
    audit_sample: int
    seed: int
    groups: tuple[GroupChoice, ...]

    def __repr__(self) -> str:
        return f"<Shortlist> {', '.join(c.label for c in self.chosen)}"

    @property
    def chosen(self) -> tuple[Screened, ...]:
        """All checkpoints to evaluate, group by group."""
        return tuple(itertools.chain.from_iterable(choice.chosen for choice in self.groups))

    def to_dict(self) -> dict[str, Any]:
        """Return the settings and a summary of each group's list, as in JSON and the manifest."""
        groups = []
        for choice in self.groups:
            groups.append(
                {
                    "family": choice.group.family,
                    "scale": choice.group.scale,
                    "k": choice.k,
                    "kind": choice.kind or None,
                    "candidates": len(choice.group.checkpoints),
                    "listed": len(choice.listed),
                    "audited": len(choice.audit),
                    "sentence": choice.sentence(),
                }
            )
        return {
            "k": self.k,
            "audit_sample": self.audit_sample,
            "seed": self.seed,
            "groups": groups,
        }

    def sentence(self) -> str:
        """Return one sentence that says how many checkpoints are on the list, and of how many."""
        if len(self.groups) == 1:
            return f"Short list: {self.groups[0].sentence()}."
        total = 0
        listed = 0
        drawn = 0
        for choice in self.groups:
            total += len(choice.group.checkpoints)
            listed += len(choice.listed)
            drawn += len(choice.audit)
        return f"Short list: {listed} of {total} in {len(self.groups)} groups{_drawn(drawn)}."


def _drawn(number: int) -> str:
    return f", and {number} of the others at random" if number else ""


def shortlist(
    groups: Sequence[Group], k: int | None = None, *, audit_sample: int = 0, seed: int = 0
) -> Shortlist:
    """Choose the checkpoints of each group that are to be evaluated.

    Groups without a candidate are left out.

    Args:
        groups: The ranked groups.
        k: Number of ranks to take in each group, from the first. Default: as many as hold the best
            checkpoint with a chance of 90 %; all if no chances are known.
        audit_sample: Number of checkpoints to draw at random in each group from those that are not
            on the list.
        seed: Seed of the random draw.

    Raises:
        UsageError: ``k`` is below 1, or ``audit_sample`` below 0.
    """
    if k is not None and k < 1:
        raise UsageError(f"expected at least 1 rank, got {k}", argument="k")
    if audit_sample < 0:
        raise UsageError(
            f"expected at least 0 checkpoints, got {audit_sample}", argument="audit_sample"
        )
    choices = []
    most = 0
    for group in groups:
        if group.candidates:
            choice = _choice(group, k, audit_sample, seed)
            choices.append(choice)
            most = max(most, choice.k)
    return Shortlist(k or most, audit_sample, seed, tuple(choices))


def _choice(group: Group, k: int | None, audit_sample: int, seed: int) -> GroupChoice:
    first = k or group.first_for()
    # Rows do not order members without a place, so all are listed. A copy follows its original.
    listed: set[Screened] = set()
    others: list[Screened] = []
    for c in group.candidates:
        is_first = c.rank <= first or not group.has_place(c)
        if is_first and not c.copy_of:
            listed.add(c)
        else:
            others.append(c)
    others.sort(key=lambda c: (c.name, c.revision or ""))
    draw = np.random.default_rng([seed, zlib.crc32(f"{group.family}\n{group.scale}".encode())])
    size = min(audit_sample, len(others))
    places = draw.choice(len(others), size, replace=False) if others else ()
    drawn = {others[place] for place in places}
    checkpoints = []
    unranked = 0
    for c in group.candidates:
        chosen: Why | None = "audit" if c in drawn else None
        probability = size / max(len(others), 1)
        if c in listed:
            chosen = "rank"
            probability = 1.0
            unranked += not group.has_place(c)
        checkpoints.append(replace(c, chosen=chosen, inclusion_probability=probability))
    members = replace(group, checkpoints=tuple(checkpoints))
    return GroupChoice(members, first, group.places, unranked, group.kind)
