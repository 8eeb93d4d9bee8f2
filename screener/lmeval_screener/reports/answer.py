"""What a screening says in sentences: what to evaluate first, how far the order is clear, how a run went.

The order of two checkpoints is clear where both figures carry it (`ranking.ties`). Along a training every
step is compared with every other, so the bound grows with their number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lmeval_dispersion.geometry import Metric
from lmeval_dispersion.report.declared import count, listed, spans
from lmeval_screener.ranking.gap import Gap, difference
from lmeval_screener.ranking.ties import Changes, Ranks
from lmeval_screener.screened import Failed, Group, Screened

GROUPS = 4  # groups that get a sentence each
_FIRST = 3  # checkpoints to evaluate first: a usual budget
_MOST = 5  # and with those that have no clear order with the last of them
_LEVEL = 0.05  # chance that a training without any change is said to have one
_FLAT = 3  # steps that it takes to call a stretch flat
STEP = (
    "Along one training run the step alone orders at least as well: both figures are for seeing breaks, "
    "not for ranking."
)


def not_screened(failed: Sequence[Failed]) -> str:
    """Why nothing was screened, in one line."""
    if len(failed) == 1:
        return f"{failed[0].label}: {failed[0].error}: {failed[0].message}"
    words = Counter(failure.error for failure in failed)
    why = ", ".join(f"{count} {word}" for word, count in words.items())
    return (
        f"none of the {len(failed)} checkpoints could be screened ({why}); the first: {failed[0].label}: "
        f"{failed[0].message}"
    )


def failures(failed: Sequence[Failed], screened: int) -> str:
    """How many failed, with the most frequent reasons."""
    words = Counter(failure.error for failure in failed).most_common(3)
    why = ", ".join(f"{count} {word}" for word, count in words)
    return f"{len(failed)} of {len(failed) + screened} checkpoints could not be screened ({why})."


def sentences(group: Group, metric: Metric, domain: str) -> list[str]:
    """What one group says."""
    members, called = group.checkpoints, group.names
    steps = group.steps
    if steps:
        course_of_run = course([c.gaps[metric] for c in steps], [c.step or "" for c in steps])
        return [replace(course_of_run, digits=digits(members, metric)).sentence(), STEP]
    if len(members) == 1:
        value = f"{members[0].gaps[metric].mean:.{digits(members, metric)}f}"
        return [
            f"Only {called[members[0]]} (G {value}) was screened; G orders siblings, and says nothing alone."
        ]
    said = []
    if (rival := group.rival(metric)) is not None:
        said.append(
            f"G and ratio disagree about the best: {called[members[0]]} by G, {called[rival]} by the ratio; "
            "evaluate both."
        )
    return [*said, *_order(group, domain, rival)]


def _order(group: Group, domain: str, rival: Screened | None) -> list[str]:
    members, called = group.checkpoints, group.names
    if _all_tied(group):
        everyone = listed([called[c] for c in members]) if len(members) <= _MOST else f"all {len(members)}"
        return [f"No checkpoint stands apart: {everyone} have no clear order; evaluate any."]
    return [f"Evaluate first: {first(group, rival)} (highest G of {len(members)}; {domain}).", clear(group)]


def _all_tied(group: Group) -> bool:
    ranks = {c.rank for c in group.checkpoints}
    return all(ranks - {c.rank} <= set(c.ties) for c in group.checkpoints)


def overlaps(group: Group) -> list[tuple[int, int]]:
    """First and last rank of every run of ranks that hang together by ties, best first."""
    runs: list[tuple[int, int]] = []
    for c in group.checkpoints:
        last = max(c.ties, default=0)
        if runs and c.rank <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(runs[-1][1], last)
        elif last >= c.rank:
            runs.append((c.rank, last))
    return runs


def clear(group: Group) -> str:
    """How far the order of a group is clear."""
    ranks, runs = sorted({c.rank for c in group.checkpoints}), overlaps(group)
    if not runs:
        return f"The order of all {len(group.checkpoints)} is clear."
    before = [rank for rank in ranks if rank < runs[0][0]]
    shared = listed([spans(range(a, b + 1)) for a, b in runs[:GROUPS]])
    rest = len(runs) - GROUPS
    more = f" and {count(rest, 'more run')}" if rest > 0 else ""
    if len(runs) > 1 or runs[0][1] < ranks[-1]:
        return f"Ranks {shared}{more} overlap; the order of the others is clear."
    if not before:
        return f"Ranks {shared} overlap, though not each with every other."
    if len(before) == 1:
        return f"Rank 1 is clear of all others; ranks {shared} overlap."
    return f"The order of ranks {spans(before)} is clear; ranks {shared} overlap."


def _spans(ranks: set[int]) -> str:
    few = len(Ranks(ranks).runs()) <= 4
    return f"ranks {spans(sorted(ranks))}" if few else f"{len(ranks):,} of ranks {min(ranks)}–{max(ranks)}"


def ranks_of(ranks: Ranks) -> str:
    """Ranks for a reader: one by one where they are few, then as runs, then how many between which."""
    runs = ranks.runs()
    count = sum(last - begin + 1 for begin, last in runs)
    if count <= 6:
        return " ".join(map(str, ranks))
    if len(runs) <= 4:
        return spans(list(ranks))
    return f"{count:,} of {runs[0][0]}–{runs[-1][1]}"


def first(group: Group, rival: Screened | None) -> str:
    """What to spend a budget of three evaluations on."""
    members, called = group.checkpoints, group.names
    budget = _FIRST if len(members) > _FIRST else 1
    last = members[budget - 1]
    behind = [c for c in members[budget:] if last.tied_to(c.rank)]
    chosen = [*members[:budget], *behind]
    if rival is not None and rival not in chosen:
        chosen.append(rival)
    if len(chosen) <= _MOST:
        return ", ".join(called[c] for c in chosen)
    # Those that are tied across the cut are no better than one another.
    unsure = {c for c in members[: budget - 1] if last.tied_to(c.rank)} | {last, *behind}
    sure = [called[c] for c in members[: budget - 1] if c not in unsure]
    rest = f"any {budget - len(sure)} of {_spans({c.rank for c in unsure})}"
    return ", ".join([*sure, rest, *([called[rival]] if rival is not None and rival not in unsure else [])])


def digits(checkpoints: Sequence[Screened], metric: Metric) -> int:
    """Decimals at which the smallest error of G still shows two digits; 3 to 6."""
    return places_for([c.gaps[metric].se for c in checkpoints])


def places_for(errors: Sequence[float]) -> int:
    """Decimals at which the smallest positive error still shows two digits; 3 to 6."""
    smallest = min((error for error in errors if error > 0), default=math.inf)
    return next((places for places in range(3, 6) if smallest * 10**places >= 10), 6 if smallest < 1 else 3)


# --- a training -----------------------------------------------------------------------------------------


Kind = Literal["rises", "falls", "peaks", "dips", "moves", "flat"]


@dataclass(frozen=True)
class Course:
    """How G went along a training, as far as paired errors carry it.

    Attributes:
        kind: ``rises``, ``falls``, ``peaks`` (rises, then falls), ``dips`` (falls, then rises), ``moves``
            (some steps differ, the ends do not) or ``flat`` (no two steps differ).
        points: Names and G of the steps that the sentence names: first, turn where there is one, last.
        flat_since: The step since which no two differ; empty for none.
        digits: Decimals of G.
    """

    kind: Kind
    points: tuple[tuple[str, float], ...]
    flat_since: str
    digits: int = 3

    def sentence(self) -> str:
        """The course in one sentence."""
        at = [f"{value:.{self.digits}f} at {name}" for name, value in self.points]
        flat = f", flat since {self.flat_since}" if self.flat_since else ""
        if self.kind == "flat":
            return f"G does not change from {self.points[0][0]} to {self.points[-1][0]}: no two steps differ."
        if self.kind == "moves":
            low, high = sorted(self.points, key=lambda point: point[1])
            return (
                f"G moves between {low[1]:.{self.digits}f} at {low[0]} and {high[1]:.{self.digits}f} at "
                f"{high[0]}, but its first and last step do not differ{flat}."
            )
        if self.kind == "peaks":
            return f"G rises from {at[0]} to {at[1]}, then falls to {at[2]}{flat}."
        if self.kind == "dips":
            return f"G falls from {at[0]} to {at[1]}, then rises to {at[2]}{flat}."
        return f"G {self.kind} from {at[0]} to {at[1]}{flat}."


def course(gaps: Sequence[Gap], called: Sequence[str]) -> Course:
    """How G went over two or more steps.

    All pairs of steps are compared at once: two differ where the p-value of their paired difference is below
    5 % over the number of pairs (Bonferroni), so that the chance of a claim about a training without any
    change is 5 % at most, up to the error of the jackknife.
    """
    count = len(gaps)
    level = _LEVEL / (count * (count - 1) / 2)

    def apart(i: int, j: int) -> bool:
        return difference(gaps[i], gaps[j]).p < level

    changes = Changes(gaps, level)
    values = [gap.mean for gap in gaps]
    last = count - 1
    high, low = max(range(count), key=values.__getitem__), min(range(count), key=values.__getitem__)
    flat = last
    while flat > 0 and not changes.any_after(flat - 1):
        flat -= 1
    kind: Kind
    if flat == 0:
        kind, named = "flat", [0, last]
    elif apart(high, 0) and apart(high, last):
        kind, named = "peaks", [0, high, last]
    elif apart(low, 0) and apart(low, last):
        kind, named = "dips", [0, low, last]
    elif apart(0, last):
        kind, named = ("rises" if values[last] > values[0] else "falls"), [0, last]
    else:
        kind, named = "moves", [low, high]
    since = called[flat] if 0 < flat <= count - _FLAT else ""
    return Course(kind, tuple((called[i], values[i]) for i in named), since)
