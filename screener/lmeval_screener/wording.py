"""The words and figures that every output format shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lmeval_screener.agreement import Agreement
from lmeval_screener.result import Group, Result, Screened

UNSUPPORTED = (
    "G compares checkpoints of one tokenizer and one scale. It does not compare across scales or families, "
    "and it predicts no accuracy."
)
ACROSS_SCALES = (
    "The evidence does not support an order over all groups: in the source paper's own tables G does not "
    "rank across scales (Spearman 0.14 with accuracy for the cosine gap over eight checkpoints)."
)

_SCOPES = {"within groups": "all, inside groups", "overall": "all, across groups (not supported)"}
SEPARATION = "≈ ranks whose G is within two paired standard errors: not separated."


def size(count: int) -> str:
    """Bytes for people: ``812 B``, ``1.31 MB``."""
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            break
        if unit != "GB":
            value /= 1000
    return f"{count} B" if unit == "B" else f"{value:.3g} {unit}"


def figure(mean: float, se: float, digits: int) -> str:
    """``1.256 ± 0.021``."""
    return f"{mean:.{digits}f} ± {se:.{digits}f}"


def digits_for(checkpoints: Sequence[Screened], result: Result) -> int:
    """Decimals at which the smallest error of G still shows two digits; 3 to 6."""
    errors = [c.gaps[result.metric].se for c in checkpoints if c.gaps[result.metric].se > 0]
    digits = 3
    while errors and digits < 6 and min(errors) * 10**digits < 10:
        digits += 1
    return digits


def accuracy_digits(checkpoints: Sequence[Screened]) -> int:
    """Decimals of accuracies: 3 where they are shares, 1 where they are percentages."""
    return 3 if all((c.accuracy or 0) <= 1 for c in checkpoints) else 1


def not_separated(checkpoint: Screened, group: Group) -> str:
    """The ranks of the siblings that a checkpoint is not separated from: ``2, 3``."""
    others = [c for c in group.checkpoints if c.label in checkpoint.not_separated_from]
    return ", ".join(str(c.rank) for c in others)


class Grid(NamedTuple):
    """A table as text: column names, which of them hold numbers, and rows of cells."""

    columns: tuple[str, ...]
    numeric: tuple[bool, ...]
    rows: Sequence[tuple[str, ...]]


def group_grid(group: Group, result: Result, *, narrow: bool = False) -> Grid:
    """One group, best first; a trajectory in the order of its steps.

    Args:
        group: The group.
        result: What it belongs to.
        narrow: Whether to leave out the parts' errors and what each checkpoint cost.
    """
    trajectory = group.trajectory()
    members = trajectory or group.checkpoints
    digits = digits_for(members, result)
    with_accuracy = any(c.accuracy is not None for c in members)
    rows = []
    for c in members:
        gap = c.gaps[result.metric]
        parts = (gap.within_domain, gap.between, gap.within_reference)
        accuracy = "" if c.accuracy is None else f"{c.accuracy:.{accuracy_digits(members)}f}"
        cost = (size(c.bytes_read), str(c.requests), f"{c.seconds:.2f}")
        rows.append(
            (
                str(c.rank),
                member_name(c, group),
                figure(gap.mean, gap.se, digits),
                not_separated(c, group),
                *([accuracy] if with_accuracy else []),
                *(f"{p.mean:.{digits}f}" if narrow else figure(p.mean, p.se, digits) for p in parts),
                *(() if narrow else cost),
            )
        )
    name = "revision, by step" if trajectory else "checkpoint"
    if narrow:
        columns = ("#", name, "G", "≈", *(["acc."] if with_accuracy else []), "in T", "T,R", "in R")
    else:
        columns = ("rank", name, "G", "≈", *(["accuracy"] if with_accuracy else []))
        columns += ("within T", "between T,R", "within R", "read", "requests", "s")
    return Grid(columns, tuple(column not in (name, "≈") for column in columns), rows)


def member_name(checkpoint: Screened, group: Group) -> str:
    """How a group names a member: a folder by its last part, a trajectory's member by its revision."""
    if group.trajectory():
        return checkpoint.requested_revision or "default branch"
    if checkpoint.revision is None:
        names = [Path(c.repo).name for c in group.checkpoints]
        short = Path(checkpoint.repo).name
        return short if names.count(short) == 1 else checkpoint.label
    return checkpoint.label


def across_scales_grid(result: Result) -> Grid:
    """All checkpoints by G, whatever their group; to be shown with ``ACROSS_SCALES``."""
    ordered = sorted(result.checkpoints, key=lambda c: (-c.gaps[result.metric].mean, c.label))
    digits = digits_for(ordered, result)
    gaps = [c.gaps[result.metric] for c in ordered]
    rows = [
        (str(place), c.label, f"{c.family} · {c.scale}", figure(gap.mean, gap.se, digits))
        for place, (c, gap) in enumerate(zip(ordered, gaps, strict=True), start=1)
    ]
    return Grid(("place", "checkpoint", "group", "G"), (True, False, False, True), rows)


def failed_grid(result: Result) -> Grid:
    """What was not screened, and why."""
    rows = [(failed.label, failed.error, failed.message) for failed in result.failed]
    return Grid(("checkpoint", "error", "why, and what to do"), (False, False, False), rows)


def agreement_grid(found: Sequence[Agreement]) -> Grid:
    """Rank correlations of G with supplied accuracies."""
    rows = []
    for line in found:
        figures = [
            *(_figure(line.spearman), _p_value(line.spearman_p)),
            *(_figure(line.kendall), _p_value(line.kendall_p)),
        ]
        how = f"{'all' if line.exact else 'drawn'}: {line.permutations:,}"
        rows.append((line.group or _SCOPES[line.scope], str(line.n), *figures, line.reason or how))
    columns = ("group", "n", "Spearman", "p", "Kendall τ-b", "p ", "permutations")
    return Grid(columns, (False, True, True, True, True, True, False), rows)


def _figure(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "undefined"


def _p_value(value: float) -> str:
    return "< 0.001" if value < 0.001 else _figure(value)


def heading(group: Group) -> str:
    """``qwen2.5 · 7B`` with the number of checkpoints."""
    n = len(group.checkpoints)
    return f"{group.family} · {group.scale} · {n} checkpoint{'s' if n != 1 else ''}"


def lead(result: Result) -> str:
    """What was computed."""
    return (
        f"{result.domain}: {result.metric} gap G = within(T) + between(T, R); within R is a control, no part "
        f"of G; everyday tokens R: {result.reference}; ± is one jackknife standard error"
    )


def notes(group: Group) -> list[str]:
    """What a reader of the numbers should know of single checkpoints."""
    return [f"{c.label}: {note}" for c in group.checkpoints for note in c.notes]


def tokens_line(group: Group) -> str:
    """What was compared: counts, how numbers are written, dropped words."""
    tokens = group.checkpoints[0].tokens
    text = f"T: {tokens.domain} tokens, R: {tokens.reference} tokens; digit scheme: {tokens.digit_scheme}"
    for name, dropped in (("T", tokens.dropped), ("R", tokens.dropped_reference)):
        if dropped:
            text += (
                f"; words of {name} that are no single token: {', '.join(word.strip() for word in dropped)}"
            )
    return text


def read_line(result: Result) -> str:
    """What the whole screening cost."""
    n = len(result.checkpoints)
    return (
        f"{n} screened, {len(result.failed)} failed; read {size(result.bytes_read)} in "
        f"{result.requests} requests, {result.seconds:.2f} s"
    )
