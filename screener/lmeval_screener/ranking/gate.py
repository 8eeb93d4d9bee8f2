"""``--fail-if-below``: whether any checkpoint is clearly below the one that it must not fall behind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lmeval_dispersion.errors import UsageError
from lmeval_screener.screened import Failed, Gate, Group
from lmeval_screener.targets import Target, labelled, parse_targets


def reference_among(targets: Sequence[Target], text: str, tokenizer: str | None = None) -> Target:
    """The checkpoint that ``--fail-if-below`` names: by its label in the report, or as any other is named."""
    by_label = next((item for item in labelled(targets) if item.label == text), None)
    if by_label is not None:
        return by_label
    wanted = parse_targets([text], tokenizer)
    if len(wanted) != 1 or wanted[0].is_glob:
        raise UsageError(f"expected one checkpoint with --fail-if-below, got {text!r}, which names several")
    place = _place(wanted[0])
    return next((item for item in targets if _place(item) == place), wanted[0])


def judged(groups: Sequence[Group], failed: Sequence[Failed], reference: str) -> Gate:
    """What a gate finds, by the label of its reference."""
    everything = sum(len(group.checkpoints) for group in groups) + len(failed)
    for group in groups:
        for member in group.checkpoints:
            if member.label == reference:
                below = tuple(
                    c.label for c in group.checkpoints if c.rank > member.rank and not member.tied_to(c.rank)
                )
                compared = len(group.checkpoints) - 1
                return Gate(reference, below, compared, everything - compared - 1)
    error = next((f.error for f in failed if f.label == reference), "not found")
    return Gate(reference, (), 0, everything - 1, error)


def _place(target: Target) -> tuple[str, str | None, str | None]:
    repo = str(Path(target.repo).resolve()) if target.local else target.repo
    return repo, target.revision, target.file
