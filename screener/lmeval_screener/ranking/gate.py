"""``--fail-if-below``: whether any checkpoint is told apart below the one that it must not fall behind."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmeval_screener.result import Result, Screened
    from lmeval_screener.targets.target import Target

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


def with_reference(targets: Sequence[Target], reference: Target) -> tuple[list[Target], Target]:
    """The targets with the gate's reference among them, and the reference as it stands there."""
    for item in targets:
        same = (item.revision, item.file) == (reference.revision, reference.file)
        if same and _place(item.repo, item.local) == _place(reference.repo, reference.local):
            return list(targets), item
    return [*targets, reference], reference


def judged(result: Result, reference: Target) -> Result:
    """A result with the gate's finding in it."""
    everything = len(result.checkpoints) + len(result.failed)
    for group in result.groups:
        for own in group.checkpoints:
            if _is(own, reference):
                below = tuple(
                    c.label
                    for c in group.checkpoints
                    if c.rank > own.tied_with[1] and own.rank < c.tied_with[0]
                )
                compared = len(group.checkpoints) - 1
                gate = Gate(own.label, below, compared, everything - compared - 1)
                return replace(result, gate=gate)
    failed = next((f.error for f in result.failed if f.label == reference.label), "not found")
    return replace(result, gate=Gate(reference.label, (), 0, everything - 1, failed))


def _is(checkpoint: Screened, reference: Target) -> bool:
    """Whether a screened checkpoint is the reference: by its place or its pinned commit."""
    if (checkpoint.requested_revision, checkpoint.file) != (reference.revision, reference.file):
        return False
    here = _place(checkpoint.repo, checkpoint.revision is None)
    pinned = checkpoint.revision is not None and checkpoint.revision == reference.revision
    return pinned or here == _place(reference.repo, reference.local)


def _place(repo: str, local: bool) -> str:
    return str(Path(repo).resolve()) if local else repo
