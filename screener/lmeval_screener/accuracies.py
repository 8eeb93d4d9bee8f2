"""Accuracies that somebody supplied, beside the gaps."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lmeval_screener.agreement import Agreement, accuracies_from_file, agreement
from lmeval_screener.result import Result


def with_accuracies(result: Result, path: str | Path) -> Result:
    """The result with the accuracies of a CSV file.

    Raises:
        UsageError: See :func:`lmeval_screener.agreement.accuracies_from_file`.
    """
    # Failed checkpoints may be in the file too; that is no mistake of its author.
    known = [(c.repo, c.requested_revision) for c in result.checkpoints]
    known += [(failed.repo, failed.revision) for failed in result.failed]
    found = accuracies_from_file(path, known)
    checkpoints = tuple(
        replace(c, accuracy=None if math.isnan(value) else value)
        for c, value in zip(result.checkpoints, found, strict=False)
    )
    return replace(result, checkpoints=checkpoints)


def agreements(result: Result) -> list[Agreement]:
    """Agreement of G with the supplied accuracies, per group and overall; empty without any."""
    rated = [(group, c) for group in result.groups for c in group.checkpoints if c.accuracy is not None]
    return agreement(
        [c.gaps[result.metric].mean for _, c in rated],
        [float(c.accuracy or 0.0) for _, c in rated],
        [f"{group.family} · {group.scale}" for group, _ in rated],
    )


def agreement_dict(line: Agreement) -> dict[str, Any]:
    """One line for JSON, where an undefined figure is null."""
    values = asdict(line)
    return {
        key: None if isinstance(value, float) and math.isnan(value) else value
        for key, value in values.items()
    }
