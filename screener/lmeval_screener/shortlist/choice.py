"""The short list of checkpoints to evaluate.

Without a number it takes as many places as hold the best with a chance of 90 % (`Group.first_for`), all where
no chance is known. An audit sample is drawn at random from the others: only it shows the checkpoints that the
list missed.
"""

from __future__ import annotations

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
    """The checkpoints of one group to evaluate.

    Attributes:
        group: Its candidates. ``chosen`` of each is ``rank`` in the first places, ``audit`` for those drawn
            at random from the others; ``inclusion_probability`` is 1 on the list, else the audit's share.
        k: Number of places that the list takes, out of ``places``; checkpoints with equal rows share one.
        unranked: Number of listed checkpoints with their base's rows, and so without a place.
        kind: The group's kind, as in `Group.kind`.
    """

    group: Group
    k: int
    places: int
    unranked: int
    kind: str

    def of(self, *reasons: Why) -> tuple[Screened, ...]:
        """The members chosen for any of these reasons, best first."""
        return tuple(c for c in self.group.checkpoints if c.chosen in reasons)

    @cached_property
    def listed(self) -> tuple[Screened, ...]:
        """The group's short list, best first."""
        return self.of("rank")

    @cached_property
    def audit(self) -> tuple[Screened, ...]:
        """The members drawn at random."""
        return self.of("audit")

    @property
    def chosen(self) -> tuple[Screened, ...]:
        """All members to evaluate: the list, then the audit sample."""
        return (*self.listed, *self.audit)

    def sentence(self) -> str:
        """The rule of the choice without the group's name, such as ``9 of 24: ranks 1–9``."""
        total, listed = len(self.group.checkpoints), len(self.listed)
        if self.k >= self.places or listed == total:
            text = "the only one" if total == 1 else f"all {total}"
            text = text if listed == total else f"{listed} of {total}, all but copies"
        else:
            text = f"{listed} of {total}: {'rank 1' if self.k == 1 else f'ranks 1–{self.k}'}"
            text += f", and {self.unranked} with the rows of their base" if self.unranked else ""
        return text + (f", and {len(self.audit)} of the others at random" if self.audit else "")


@dataclass(frozen=True, eq=False)
class Shortlist:
    """A screening's checkpoints to evaluate: one choice per group.

    ``k`` is the number of places asked for in each group, else the most of any; ``seed`` draws the audit.
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
                    "kind": choice.kind or None,
                    "candidates": len(choice.group.checkpoints),
                    "listed": len(choice.listed),
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
    groups: Sequence[Group], k: int | None = None, *, audit_sample: int = 0, seed: int = 0
) -> Shortlist:
    """Choose each group's first ``k`` places, with ``audit_sample`` of the others drawn at random.

    Without ``k`` a group's list holds its best with a chance of 90 %. Of the groups, which need one candidate
    at least, those without any are left out.

    Raises:
        UsageError: ``k`` is below 1, or ``audit_sample`` below 0.
    """
    if k is not None and k < 1:
        raise UsageError(f"expected at least 1, got {k}", argument="k")
    if audit_sample < 0:
        raise UsageError(f"expected at least 0, got {audit_sample}", argument="audit_sample")
    choices = tuple(_choice(group, k, audit_sample, seed) for group in groups if group.candidates)
    return Shortlist(
        k or max((choice.k for choice in choices), default=0), audit_sample, seed, choices
    )


def _choice(group: Group, k: int | None, audit_sample: int, seed: int) -> GroupChoice:
    total, first = group.places, k or group.first_for()
    candidates = group.candidates
    # Rows do not order members without a place, so all are listed. A copy follows its original.
    listed = (
        c for c in candidates if not c.copy_of and (c.rank <= first or not group.has_place(c))
    )
    why: dict[Screened, Why] = dict.fromkeys(listed, "rank")
    others = sorted(
        (c for c in candidates if c not in why), key=lambda c: (c.name, c.revision or "")
    )
    draw = np.random.default_rng([seed, zlib.crc32(f"{group.family}\n{group.scale}".encode())])
    places = (
        draw.choice(len(others), min(audit_sample, len(others)), replace=False) if others else ()
    )
    probability = dict.fromkeys(why, 1.0) | dict.fromkeys(others, len(places) / max(len(others), 1))
    why |= dict.fromkeys((others[i] for i in places), "audit")
    checkpoints = tuple(
        replace(c, chosen=why.get(c), inclusion_probability=probability[c]) for c in candidates
    )
    unranked = sum(not group.has_place(c) for c in why if why[c] == "rank")
    return GroupChoice(replace(group, checkpoints=checkpoints), first, total, unranked, group.kind)
