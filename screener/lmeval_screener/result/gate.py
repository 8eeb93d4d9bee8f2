"""The answer of ``--fail-if-below``: which checkpoints lie below a reference, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmeval_dispersion.report.cells import json_value
from lmeval_dispersion.report.declared import listed
from lmeval_screener.figures import Gap, Ratio
from lmeval_screener.ranking import against_base
from lmeval_screener.result.answer import decimals
from lmeval_screener.screened import Failed, Group, Screened

_HARDLY = 0.1  # chance to beat a gate's reference at which a checkpoint fails it
_NAMED = 3  # most checkpoints whose distance a sentence gives


@dataclass(frozen=True)
class Distance:
    """One checkpoint's distance from a gate's reference.

    Attributes:
        label: The checkpoint's label.
        difference: Its figure minus the reference's, paired over tokens.
        se: The difference's jackknife standard error.
        chance: Its chance to be more accurate than the reference; None where no chance is known.
    """

    label: str
    difference: float
    se: float
    chance: float | None

    def said(self, figure: str) -> str:
        """The checkpoint with its distance, as a sentence names it."""
        places = decimals([self])
        error = f" ± {self.se:.{places}f}" if self.se > 0 else ""
        side = "lower" if self.difference < 0 else "higher"
        words = f"{figure} {side} by {abs(self.difference):.{places}f}{error}"
        if self.chance is not None and self.chance <= _HARDLY:
            words += f", chance to be better {self.chance:.0%} as on our own models or by `--slope`"
        return f"{self.label} ({words})"


@dataclass(frozen=True)
class Gate:
    """The checkpoints of a group that lie below ``reference``, the label of another.

    One lies below by a paired difference of the ratio (or of G, where that ranks), or if its chance to be
    more accurate is at most 10 %.

    Attributes:
        reference: Label of the checkpoint that no other may fall behind.
        below: Labels of those that lie below it.
        compared: Number of others that were compared.
        not_compared: Number of all other others.
        failed: The error code if the reference was not screened, ``NoRatio`` if it was set aside, else None.
        figure: ``ratio`` or ``G``, which ranks the group; empty if nothing was compared.
        distances: Every compared checkpoint's distance, best first.
    """

    reference: str
    below: tuple[str, ...]
    compared: int
    not_compared: int
    failed: str | None = None
    figure: str = ""
    distances: tuple[Distance, ...] = ()

    @classmethod
    def of(cls, groups: Sequence[Group], failed: Sequence[Failed], reference: str) -> Gate:
        """Compare every checkpoint with ``reference``, the label of a screened or a failed one."""
        # A registry may have figures of failed checkpoints.
        errors = {f.label: f.error for f in failed}
        everyone = {reference, *errors}
        floor = None
        for group in groups:
            for c in group.checkpoints:
                if not c.is_base:
                    everyone.add(c.label)
                if floor is None and c.label == reference:
                    floor = c
                    of_floor = group
        others = len(everyone) - 1
        if floor is None:
            return cls(reference, (), 0, others, errors[reference])
        if floor.is_set_aside:
            return cls(reference, (), 0, others, "NoRatio")
        group = of_floor
        figures: dict[Screened, Gap | Ratio] = {
            c: c.figure for c in group.candidates if c is not floor
        }
        sides = against_base(floor.figure, figures)
        below = []
        distances = []
        for c, side in sides.items():
            chance = group.chance(c, floor)
            distances.append(Distance(c.label, side.difference, side.se, chance))
            if side.side == "below" or (chance is not None and chance <= _HARDLY):
                below.append(c.label)
        compared = len(figures)
        return cls(
            reference,
            tuple(below),
            compared,
            others - compared,
            figure=group.figure if compared else "",
            distances=tuple(distances),
        )

    @property
    def passed(self) -> bool:
        """Whether at least one checkpoint was compared, and none is below."""
        return not self.below and self.compared > 0

    def to_dict(self) -> dict[str, Any]:
        """The JSON of a gate as plain Python values."""
        content: dict[str, Any] = json_value(self)
        return content | {"passed": self.passed}

    def sentence(self) -> str:
        """Passed or failed, by whom and by how much; or why the gate cannot be judged."""
        if self.failed == "NoRatio":
            return (
                f"The gate cannot be judged: {self.reference} has no ratio, which ranks its group."
            )
        if self.failed is not None:
            return f"The gate cannot be judged: {self.reference} was not screened ({self.failed})."
        rest = ""
        if self.not_compared:
            rest = f" {self.not_compared} not compared with it."
        if not self.compared:
            alone = f"no other checkpoint has the tokenizer and scale of {self.reference}"
            return f"The gate cannot be judged: {alone}.{rest}"
        if self.passed:
            lowest = min(self.distances, key=lambda distance: distance.difference)
            if self.compared == 1:
                alone = lowest.said(self.figure)
                return f"Passed: {alone} does not lie below {self.reference}.{rest}"
            closest = f"the lowest is {lowest.said(self.figure)}"
            return f"Passed: none of {self.compared} lies below {self.reference}; {closest}.{rest}"
        names = []
        for distance in self.distances:
            if distance.label in self.below:
                names.append(distance.said(self.figure))
        lie = "lies" if len(names) == 1 else "lie"
        if len(names) > _NAMED:
            names[_NAMED:] = [f"{len(names) - _NAMED} more"]
        return f"Failed: {listed(names)} {lie} below {self.reference} ({self.compared} compared).{rest}"
