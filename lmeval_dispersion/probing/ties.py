"""Checkpoints whose order labelled questions leave open: which to evaluate first, and how far it is clear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from lmeval_dispersion.report.declared import count, listed, spans

_RUNS = 4  # runs of ranks that a sentence names
_FIRST = 3  # checkpoints to evaluate first: a usual budget
_MOST = 5  # and including those without a clear order with the last of them


class Tied(Protocol):
    """A checkpoint at a rank, and the ranks without a clear order with it, ascending."""

    @property
    def label(self) -> str:
        """Its name."""

    @property
    def rank(self) -> int:
        """From 1, equal ones share the better rank."""

    @property
    def tied_with(self) -> tuple[int, ...]:
        """Its own rank is among them if another shares it."""


def order(members: Sequence[Tied], why: str) -> list[str]:
    """Which of several checkpoints, best first, to evaluate first, and how far their order is clear."""
    best = _first_of(members)
    if not best:
        everyone = listed([c.label for c in members]) if len(members) <= _MOST else f"all {len(members)}"
        return [f"No checkpoint stands apart: {everyone} have no clear order; evaluate any."]
    first = ", ".join(c if isinstance(c, str) else c.label for c in best)
    return [f"Evaluate first: {first} ({why}).", _clear(members)]


def overlaps(members: Sequence[Tied]) -> list[tuple[int, int]]:
    """First and last rank of every run of ranks connected by ties, best first."""
    runs: list[tuple[int, int]] = []
    for c in members:
        last = max(c.tied_with, default=0)
        if runs and c.rank <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(runs[-1][1], last)
        elif last >= c.rank:
            runs.append((c.rank, last))
    return runs


def _clear(members: Sequence[Tied]) -> str:
    """How far the order is clear."""
    ranks, runs = sorted({c.rank for c in members}), overlaps(members)
    if not runs:
        return f"The order of all {len(members)} is clear."
    before = [rank for rank in ranks if rank < runs[0][0]]
    shared = listed([spans(range(first, last + 1)) for first, last in runs[:_RUNS]])
    rest = len(runs) - _RUNS
    more = f" and {count(rest, 'more run')}" if rest > 0 else ""
    if {rank for first, last in runs for rank in range(first, last + 1)} >= {*ranks} and len(runs) > 1:
        return f"Ranks {shared}{more} overlap; each of these runs is clear of the others."
    if len(runs) > 1 or runs[0][1] < ranks[-1]:
        return f"Ranks {shared}{more} overlap; the order of the others is clear."
    if not before:
        return f"Ranks {shared} overlap, though not each with every other."
    if len(before) == 1:
        return f"Rank 1 is clear of all others; ranks {shared} overlap."
    return f"The order of ranks {spans(before)} is clear; ranks {shared} overlap."


def _first_of(members: Sequence[Tied]) -> list[Any]:
    """The checkpoints for a budget of three evaluations, in words if they are some of many tied.

    Empty if there is one checkpoint, or no two have a clear order.
    """
    ranks = {c.rank for c in members}
    if all(ranks - {c.rank} <= set(c.tied_with) for c in members):
        return []
    budget = _FIRST if len(members) > _FIRST else 1
    last = members[budget - 1]
    behind = [c for c in members[budget:] if c.rank in last.tied_with]
    if budget + len(behind) <= _MOST:
        return [*members[:budget], *behind]
    # Checkpoints tied across the cut are equally good.
    sure = [c for c in members[: budget - 1] if c.rank not in last.tied_with]
    unsure = sorted({c.rank for c in (*members[:budget], *behind) if c not in sure})
    return [*sure, f"any {budget - len(sure)} of ranks {spans(unsure)}"]
