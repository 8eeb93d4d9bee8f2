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
    """How far one checkpoint is above or below the reference checkpoint of a gate (see `Gate`).

    Attributes:
        label: Label of the checkpoint.
        difference: The checkpoint's ratio (or G) minus that of the reference, paired over tokens.
        se: Jackknife standard error of the difference.
        chance: The chance that the checkpoint is more accurate than the reference; None if
            unknown.
    """

    label: str
    difference: float
    se: float
    chance: float | None

    def said(self, figure: str) -> str:
        """Return the checkpoint's label, with the difference in parentheses, for a sentence.

        The ``chance`` is given, too, if it is at most 10 %. ``figure`` is the name of the figure in
        which ``difference`` is measured, ``ratio`` or ``G``.
        """
        places = decimals([self])
        error = f" ± {self.se:.{places}f}" if self.se > 0 else ""
        side = "lower" if self.difference < 0 else "higher"
        words = f"{figure} {side} by {abs(self.difference):.{places}f}{error}"
        if self.chance is not None and self.chance <= _HARDLY:
            chance = f"an estimated chance of {self.chance:.0%}"
            words += f", with {chance} of being more accurate than the reference"
        return f"{self.label} ({words})"


@dataclass(frozen=True)
class Gate:
    """The answer of ``--fail-if-below``: which checkpoints are below a reference checkpoint.

    A checkpoint is below if its ratio (or G, if that ranks the group) is significantly lower,
    paired over tokens, or if its chance of being more accurate than the reference is at most 10 %.

    Attributes:
        reference: Label of the reference checkpoint.
        below: Labels of the checkpoints below the reference.
        compared: Number of checkpoints that were compared with the reference.
        not_compared: Number of checkpoints that were not compared with the reference, because they
            failed, are in another group, or lack the figure that ranks the group.
        failed: The error code if the reference was not screened, or ``NoRatio`` if the reference
            lacks the ratio by which its group is ranked; else None.
        figure: The figure that ranks the group, ``ratio`` or ``G``; empty if nothing was compared.
        distances: Distance of each compared checkpoint from the reference, best first.
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
        """Compare the checkpoints in the group of a reference with that reference.

        Checkpoints of other groups, and those that failed, count as ``not_compared``.

        Args:
            groups: The groups of a screening.
            failed: The checkpoints that could not be screened.
            reference: Label of a checkpoint in ``groups`` or ``failed``.

        Raises:
            KeyError: No checkpoint has the label ``reference``.
        """
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
        figures: dict[Screened, Gap | Ratio] = {}
        for c in group.candidates:
            if c is not floor:
                figures[c] = c.figure
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
        """Whether at least one checkpoint was compared and none is below the reference."""
        return not self.below and self.compared > 0

    def to_dict(self) -> dict[str, Any]:
        """Return the gate's answer as it stands in the JSON output, as plain Python values."""
        content: dict[str, Any] = json_value(self)
        return content | {"passed": self.passed}

    def sentence(self) -> str:
        """Return a sentence: passed, or which checkpoints are below the reference and by how much.

        If nothing could be compared, the sentence says why.
        """
        if self.failed == "NoRatio":
            return (
                f"The gate cannot be judged: {self.reference} has no ratio, the figure that ranks "
                "its group."
            )
        if self.failed is not None:
            return f"The gate cannot be judged: {self.reference} was not screened ({self.failed})."
        rest = ""
        if self.not_compared:
            rest = f" Not compared with {self.reference}: {self.not_compared}."
        if not self.compared:
            alone = (
                "no other checkpoint of the same tokenizer and scale can be compared with "
                f"{self.reference}"
            )
            return f"The gate cannot be judged: {alone}.{rest}"
        if self.passed:
            lowest = min(self.distances, key=lambda distance: distance.difference)
            if self.compared == 1:
                alone = lowest.said(self.figure)
                return f"Passed: {alone} does not lie below {self.reference}.{rest}"
            closest = f"the lowest is {lowest.said(self.figure)}"
            return (
                f"Passed: none of the {self.compared} checkpoints lies below {self.reference}; "
                f"{closest}.{rest}"
            )
        names = []
        for distance in self.distances:
            if distance.label in self.below:
                names.append(distance.said(self.figure))
        lie = "lies" if len(names) == 1 else "lie"
        if len(names) > _NAMED:
            names[_NAMED:] = [f"{len(names) - _NAMED} more"]
        return f"Failed: {listed(names)} {lie} below {self.reference} ({self.compared} compared).{rest}"
