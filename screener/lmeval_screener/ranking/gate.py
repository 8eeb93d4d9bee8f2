"""``--fail-if-below``: whether any checkpoint is told apart below the one that it must not fall behind."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmeval_dispersion.errors import UsageError
from lmeval_screener.targets.target import Target, labelled
from lmeval_screener.targets.training_runs import parse_targets

if TYPE_CHECKING:
    from lmeval_screener.result import Result

#: Exit status where a checkpoint is below.
EXIT_BELOW = 4
_SHOWN = 5


def add_gate_options(parser: argparse._ActionsContainer) -> None:
    """Add ``--fail-if-below CHECKPOINT``."""
    parser.add_argument(
        "--fail-if-below",
        metavar="CHECKPOINT",
        help="end with status 4 if a checkpoint of its group is told apart below this one, which is screened "
        "too; tied ones pass (default: none)",
    )


@dataclass(frozen=True)
class Gate:
    """What a gate found.

    Attributes:
        reference: Label of the checkpoint that none may fall below.
        below: Labels of those that are told apart below it, all pairs of the group counted.
        compared: Checkpoints of its group beside it.
        not_compared: Checkpoints of another tokenizer or scale, or that failed.
        failed: Code of the reference's own failure; empty where it was screened.
    """

    reference: str
    below: tuple[str, ...]
    compared: int
    not_compared: int
    failed: str = ""

    @property
    def passed(self) -> bool:
        """Whether something was compared, and nothing is below."""
        return not self.below and self.compared > 0

    @property
    def exit_code(self) -> int | None:
        """Exit status that it asks for; None for the screening's own."""
        return EXIT_BELOW if self.below else None if self.passed else 1

    @property
    def sentence(self) -> str:
        """The answer of the gate."""
        rest = f" {self.not_compared} not compared with it." if self.not_compared else ""
        if self.failed:
            return f"The gate cannot be judged: {self.reference} was not screened ({self.failed})."
        if not self.compared:
            return (
                f"The gate cannot be judged: no other checkpoint has the tokenizer and scale of "
                f"{self.reference}.{rest}"
            )
        if not self.below:
            return f"Passed: none of {self.compared} is told apart below {self.reference}.{rest}"
        shown = ", ".join(self.below[:_SHOWN])
        more = f" and {len(self.below) - _SHOWN} more" if len(self.below) > _SHOWN else ""
        return f"Failed: {shown}{more} told apart below {self.reference} ({self.compared} compared).{rest}"

    def to_dict(self) -> dict[str, Any]:
        """The gate in the JSON."""
        return {
            "reference": self.reference,
            "passed": self.passed,
            "below": list(self.below),
            "compared": self.compared,
            "not_compared": self.not_compared,
            "failed": self.failed or None,
        }


def reference_among(targets: Sequence[Target], text: str, tokenizer: str | None = None) -> Target:
    """The checkpoint that ``--fail-if-below`` names: by its label in the report, or as any other is named.

    Raises:
        UsageError: It stands for several checkpoints.
    """
    by_label = next((item for item in labelled(targets) if item.label == text), None)
    if by_label is not None:
        return by_label
    wanted = parse_targets([text], tokenizer)
    if len(wanted) != 1 or wanted[0].is_glob:
        raise UsageError(f"expected one checkpoint with --fail-if-below, got {text!r}, which names several")
    place = _place(wanted[0])
    return next((item for item in targets if _place(item) == place), wanted[0])


def judged(result: Result, reference: Target) -> Result:
    """A result with the gate's finding in it."""
    everything = len(result.checkpoints) + len(result.failed)
    for group in result.groups:
        for own in group.checkpoints:
            if own.label == reference.label:
                below = tuple(
                    c.label for c in group.checkpoints if c.rank > own.rank and not own.tied_to(c.rank)
                )
                compared = len(group.checkpoints) - 1
                gate = Gate(own.label, below, compared, everything - compared - 1)
                return replace(result, gate=gate)
    failed = next((f.error for f in result.failed if f.label == reference.label), "not found")
    return replace(result, gate=Gate(reference.label, (), 0, everything - 1, failed))


def _place(target: Target) -> tuple[str, str | None, str | None]:
    repo = str(Path(target.repo).resolve()) if target.local else target.repo
    return repo, target.revision, target.file
