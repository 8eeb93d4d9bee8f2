"""What a screening says in sentences: which checkpoint is best, which are tied, how a training went.

A sentence about a difference is printed only where the paired errors carry it. Whether two checkpoints of a
ranking are tied is decided in ``ranking.groups``; along a training every step is compared with every other,
so the bound grows with their number.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

from lmeval_dispersion.geometry import Metric
from lmeval_screener.ranking.gap import Gap, difference
from lmeval_screener.ranking.ties import ALL_PAIRS, Changes
from lmeval_screener.result import Group, Result, Screened
from lmeval_screener.targets.training_runs import training_and_step

_GROUPS = 4  # groups that get a sentence each
_FIRST = 3  # checkpoints to evaluate first: a usual budget
_MOST = 5  # and with those that are tied with the last of them
_LEVEL = 0.05  # chance that a training without any change is said to have one
_FLAT = 3  # steps that it takes to call a stretch flat


def answer(result: Result) -> list[str]:
    """The answer of a screening: that of its gate first, then one to three sentences, or one a group."""
    return [*([] if result.gate is None else [result.gate.sentence]), *_answer(result)]


def _answer(result: Result) -> list[str]:
    if not result.checkpoints:
        words = Counter(failed.error for failed in result.failed)
        if len(result.failed) == 1:
            return [f"Nothing was screened: the only checkpoint failed ({result.failed[0].error})."]
        why = ", ".join(f"{count} {word}" for word, count in words.items())
        return [f"Nothing was screened: all {len(result.failed)} failed ({why})."]
    groups = result.groups
    if len(groups) == 1:
        sentences = _sentences(groups[0], result.metric)
    else:
        sentences = [f"{title(group)}: {_head(group, result.metric)}" for group in groups[:_GROUPS]]
        if len(groups) > _GROUPS:
            count = len(groups) - _GROUPS
            sentences.append(f"{count} more group{'s' if count > 1 else ''} below.")
    if result.failed:
        total = len(result.failed) + len(result.checkpoints)
        sentences.append(f"{len(result.failed)} of {total} checkpoints could not be screened.")
    return sentences


# --- names ----------------------------------------------------------------------------------------------


def title(group: Group) -> str:
    """A group's name; a training's is its model and never a path."""
    if members := group.trajectory():
        training, _ = training_and_step(members[0].repo, None, local=members[0].revision is None)
        return Path(training).resolve().name if members[0].revision is None else training.rpartition("/")[2]
    return f"{group.family} · {group.scale}"


def names(group: Group) -> dict[Screened, str]:
    """How a group's tables name its members: by the step of a training, else by the label."""
    if members := group.trajectory():
        return {c: step_of(c) or ("default branch" if c.revision else "final model") for c in members}
    return {c: c.label for c in group.checkpoints}


def step_of(checkpoint: Screened) -> str | None:
    """The name of a checkpoint's step in its training; None for none."""
    local = checkpoint.revision is None
    return training_and_step(checkpoint.repo, checkpoint.requested_revision, local=local)[1]


# --- a ranking ------------------------------------------------------------------------------------------


def digits(checkpoints: Sequence[Screened], metric: Metric) -> int:
    """Decimals at which the smallest error of G still shows two digits; 3 to 6."""
    return places_for([c.gaps[metric].se for c in checkpoints])


def places_for(errors: Sequence[float]) -> int:
    """Decimals at which the smallest positive error still shows two digits; 3 to 6."""
    smallest = min((error for error in errors if error > 0), default=math.inf)
    return next((places for places in range(3, 6) if smallest * 10**places >= 10), 6 if smallest < 1 else 3)


class Ties:
    """Which members of a group are tied, by their places (from 0, best first)."""

    def __init__(self, group: Group) -> None:
        self._ranks = [c.rank for c in group.checkpoints]
        self._ties = [c.ties for c in group.checkpoints]

    def of(self, place: int) -> list[int]:
        """The places that one is tied with, in order."""
        return [i for begin, end in self._spans(place) for i in range(begin, end) if i != place]

    def _spans(self, place: int) -> list[tuple[int, int]]:
        """First places and ends of the runs that one is tied with."""
        return [
            (bisect_left(self._ranks, run.start), bisect_left(self._ranks, run.stop))
            for run in self._ties[place]
        ]

    @cached_property
    def bands(self) -> list[tuple[int, int]]:
        """First and last place of every longest run of neighbours of which no two are separated."""
        found: list[tuple[int, int]] = []
        first, count = 0, len(self._ranks)
        for place in range(count):
            begin = place  # of the neighbours before it that it is tied with
            for start, end in reversed(self._spans(place)):
                begin = min(begin, start) if end >= begin else begin
            if begin > first:
                found += [(first, place - 1)] if place - 1 > first else []
                first = begin
        return [*found, (first, count - 1)] if count - 1 > first else found

    @property
    def all_tied(self) -> bool:
        """Whether no two members are separated."""
        return self.bands == [(0, len(self._ranks) - 1)]

    def skips(self) -> list[tuple[int, list[int], list[int]]]:
        """Places that are tied across others: the place, those tied with it there, those apart between."""
        found = []
        for place in self._skipping():
            others = self.of(place)
            for side in ([i for i in others if i > place], [i for i in others if i < place]):
                ends = (place, max(side)) if side and max(side) > place else (min(side, default=place), place)
                between = [i for i in range(ends[0] + 1, ends[1]) if i not in others]
                if between:
                    beyond = [i for i in side if abs(i - place) > min(abs(k - place) for k in between)]
                    found.append((place, beyond, between))
        return found

    @property
    def gapped(self) -> int:
        """How many places are tied across one that is apart."""
        return len(self._skipping())

    def _skipping(self) -> list[int]:
        """Places whose ties, with themselves, are not neighbours all."""
        found = []
        for place in range(len(self._ranks)):
            spans = sorted([*self._spans(place), (place, place + 1)])
            if any(begin > max(end for _, end in spans[:at]) for at, (begin, _) in enumerate(spans) if at):
                found.append(place)
        return found


@lru_cache(maxsize=32)
def ties_of(group: Group) -> Ties:
    """The ties of a group, found once."""
    return Ties(group)


def spans(numbers: Sequence[int]) -> str:
    """Numbers as ranges.

    >>> spans([2, 3, 4, 7, 9, 10])
    '2–4, 7, 9–10'
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def _sentences(group: Group, metric: Metric) -> list[str]:
    if _course(group, metric):
        return [f"{title(group)}: {_head(group, metric)}"]
    ties = ties_of(group)
    head, evaluate = _head(group, metric), _evaluate(group, ties)
    later = [band for band in ties.bands if band[0] > 0]
    if later:
        listed = _and([_ranks(group, band) for band in later[:_GROUPS]])
        rest = len(later) - _GROUPS
        more = f", and {rest} more run{'s' if rest > 1 else ''} of ranks" if rest > 0 else ""
        head += f" Ranks {listed} are tied{more}."
    return [head, evaluate] if evaluate else [head]


def _head(group: Group, metric: Metric) -> str:
    """The sentence that matters most of a group."""
    if course := _course(group, metric):
        return course.sentence()
    members, called, ties = group.checkpoints, names(group), ties_of(group)
    best = f"{called[members[0]]} (G {members[0].gaps[metric].mean:.{digits(members, metric)}f})"
    if len(members) == 1:
        return f"Only {best} was screened; G orders siblings, and says nothing alone."
    if ties.all_tied:
        listed = _and([called[c] for c in members]) if len(members) <= _MOST else f"all {len(members)}"
        return f"No checkpoint stands apart: {listed} are tied; evaluate any."
    if others := ties.of(0):
        ranks = spans([members[place].rank for place in others])
        return f"Best: {best}, tied with rank{'s' if len(others) > 1 else ''} {ranks}."
    return f"Best: {best}, apart from all others."


def skipped(group: Group) -> list[str]:
    """Ties that skip a rank between them, in words: the bands cannot show them."""
    ranks = [c.rank for c in group.checkpoints]
    if len(ranks) > ALL_PAIRS:
        count = ties_of(group).gapped
        ends = " is" if count == 1 else "s are"
        return [f"{count} rank{ends} tied across one that is apart."] if count else []
    sentences = [
        f"Rank {ranks[place]} is tied with {spans([ranks[i] for i in others])}, though apart from "
        f"{spans([ranks[i] for i in between])}."
        for place, others, between in ties_of(group).skips()
    ]
    more = len(sentences) - _GROUPS
    if more <= 0:
        return sentences
    return [
        *sentences[:_GROUPS],
        f"{more} more rank{'s are' if more > 1 else ' is'} tied across one that is apart.",
    ]


def _evaluate(group: Group, ties: Ties) -> str:
    """What to spend a budget of three evaluations on."""
    members, called = group.checkpoints, names(group)
    if len(members) == 1 or ties.all_tied:
        return ""
    count = _FIRST if len(members) > _FIRST else 1
    open_places = [count - 1, *(place for place in ties.of(count - 1) if place >= count)]
    chosen = [*range(count - 1), *open_places]
    if len(chosen) <= _MOST:
        return f"Evaluate first: {', '.join(called[members[place]] for place in chosen)}."
    # Those that are tied across the cut are no better than one another.
    open_places = sorted({*open_places, *(p for p in range(count - 1) if p in ties.of(count - 1))})
    sure = [place for place in range(count - 1) if place not in open_places]
    ranks = f"any {count - len(sure)} of ranks {spans([members[place].rank for place in open_places])}"
    return f"Evaluate first: {', '.join([*(called[members[place]] for place in sure), ranks])}."


def _ranks(group: Group, band: tuple[int, int]) -> str:
    first, last = group.checkpoints[band[0]].rank, group.checkpoints[band[1]].rank
    return f"{first}–{last}" if first != last else f"{first} (shared)"


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


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


def steps(group: Group) -> tuple[Screened, ...]:
    """The members of a training that have a step, in order; empty where the group is no training."""
    return tuple(c for c in group.trajectory() or () if step_of(c) is not None)


def _course(group: Group, metric: Metric) -> Course | None:
    members = steps(group)
    if len(members) < 2:
        return None
    found = course([c.gaps[metric] for c in members], [step_of(c) or "" for c in members])
    return replace(found, digits=digits(members, metric))


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
