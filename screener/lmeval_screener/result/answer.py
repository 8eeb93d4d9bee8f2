"""A screening in sentences: checkpoints to evaluate first, how far the order is clear, a run's course.

Along a training every step is compared with every other, so the bound grows with their number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

from lmeval_dispersion.geometry import Metric
from lmeval_dispersion.report.declared import count, listed, some, spans
from lmeval_screener.figures import Gap, Ratio, difference
from lmeval_screener.ranking import ERROR_RATE, flat_from
from lmeval_screener.screened import RANKED, Failed, Group, Ranks, Screened

GROUPS = 4  # groups that get a sentence each
DRAWN = 40  # checkpoints of a group that a chart shows
_FIRST = 3  # checkpoints to evaluate first: a usual budget
_MOST = 5  # and including those without a clear order with the last of them
_FLAT = 3  # least steps of a flat stretch
_SIDES = {
    "above": "Above the base {} by the ratio: {}.",
    "below": "Below the base {} by the ratio: {}.",
    "equal": "Rows equal those of the base {}: {}; rows cannot compare them, ask a few questions: "
    "dispersion probe.",
    "level": "No difference from the base {} by rows: {}.",
}
STEP = (
    "Within one training run the step number orders at least as well: use both figures to see sudden "
    "changes, not to rank steps."
)


def not_screened(failed: Sequence[Failed]) -> str:
    """Why no checkpoint was screened, in one line."""
    if len(failed) == 1:
        return f"{failed[0].label}: {failed[0].error}: {failed[0].message}"
    return (
        f"none of the {len(failed)} checkpoints could be screened ({_errors(failed)}); the first: "
        f"{failed[0].label}: {failed[0].message}"
    )


def failures(failed: Sequence[Failed], everyone: int) -> str:
    """How many checkpoints failed, with the most frequent reasons; empty if none did."""
    if not failed:
        return ""
    return f"{len(failed)} of {everyone} checkpoints could not be screened ({_errors(failed, 3)})."


def _errors(failed: Sequence[Failed], most: int | None = None) -> str:
    words = Counter(failure.error for failure in failed).most_common(most)
    return ", ".join(f"{count} {word}" for word, count in words)


def who(texts: Iterable[tuple[str, Screened]], everyone: int = 0) -> dict[str, str]:
    """Map each note to its checkpoint's label, or to how many checkpoints share it."""
    labels: dict[str, list[str]] = {}
    for text, c in texts:
        labels.setdefault(text, []).append(c.label)
    names = {text: of[0] if len(of) == 1 else f"{len(of)} checkpoints" for text, of in labels.items()}
    return names | {text: f"all {everyone}" for text, of in labels.items() if len(of) == everyone > 1}


def unknown(members: Sequence[Screened], *, alone: bool) -> list[str]:
    """Which checkpoints have no ratio and why, so that G alone orders them, or stands alone."""
    reasons = ((c.no_ratio or "it was not read", c) for c in members if c.ratio is None)
    all_of = f"all {len(members)}"
    ending = "G stands alone" if alone else "the order is by G alone"
    return [
        f"No ratio{'' if whose == all_of else f' of {whose}'}: {reason}; {ending}."
        for reason, whose in who(reasons, len(members)).items()
    ]


def group_sentences(group: Group, metric: Metric, domain: str) -> list[str]:
    """The sentences of one group."""
    members, names = group.candidates, group.names
    places = decimals(members, metric)
    if group.steps:
        return [
            course([c.gaps[metric] for c in group.steps], [c.step or "" for c in group.steps], places),
            STEP,
        ]
    if not members:
        return [f"No other checkpoint has the tokenizer and scale of the base {names[group.checkpoints[0]]}."]
    said = base_sentences(group)
    if len(members) == 1 and not said:
        value = f"{members[0].gaps[metric].mean:.{places}f}"
        return [
            f"Only {names[members[0]]} (G {value}) was screened; a screen orders siblings, "
            "and says nothing alone."
        ]
    if len(members) == 1:
        return said
    if rivals := [names[c] for c in group.rivals(metric)]:
        said.append(
            f"G and ratio disagree about the best: {rivals[0]} by G, {rivals[1]} by the ratio; evaluate both."
        )
    why = f"{RANKED[members[0].ranked_by]} of {len(members)}; {domain}"
    return [*said, *order(group, why, group.rivals(metric))]


class Ordered(Protocol):
    """Comparable checkpoints, each with ``rank``, ``ties``, ``tied_to(rank)`` and ``copy_of``."""

    @property
    def checkpoints(self) -> Sequence[Any]:
        """Best first."""

    @property
    def candidates(self) -> Sequence[Any]:
        """The checkpoints to choose from: all except their base."""

    @property
    def names(self) -> Mapping[Any, str]:
        """Each checkpoint's name in a sentence."""


def order(group: Ordered, why: str, rivals: Sequence[Screened] = ()) -> list[str]:
    """Which of several checkpoints to evaluate first, and how far their order is clear."""
    members, names, best = group.candidates, group.names, first_of(group, rivals)
    if not best:
        everyone = listed([names[c] for c in members]) if len(members) <= _MOST else f"all {len(members)}"
        return [f"No checkpoint stands apart: {everyone} have no clear order; evaluate any."]
    first = ", ".join(c if isinstance(c, str) else names[c] for c in best)
    return [f"Evaluate first: {first} ({why}).", _clear(group)]


def base_sentences(group: Group, members: Sequence[Screened] | None = None) -> list[str]:
    """On which side of their base members of a group (all) lie; empty if the base is not known."""
    if group.base is None or group.base.ratio is None:
        return []
    base, sides = group.names[group.base], dict[str, list[str]]()
    for c in group.candidates if members is None else members:
        if c.against is not None:
            sides.setdefault(c.against.side, []).append(group.names[c])
    return [words.format(base, some(names)) for side, words in _SIDES.items() if (names := sides.get(side))]


def overlaps(group: Ordered) -> list[tuple[int, int]]:
    """First and last rank of every run of ranks connected by ties, best first."""
    runs: list[tuple[int, int]] = []
    for c in group.checkpoints:
        last = max(c.ties, default=0)
        if runs and c.rank <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(runs[-1][1], last)
        elif last >= c.rank:
            runs.append((c.rank, last))
    return runs


def _clear(group: Ordered) -> str:
    """How far the order of a group is clear."""
    ranks, runs = sorted({c.rank for c in group.checkpoints}), overlaps(group)
    if not runs:
        copies = any(c.copy_of for c in group.checkpoints)
        return f"The order of all {'but copies' if copies else len(group.checkpoints)} is clear."
    before = [rank for rank in ranks if rank < runs[0][0]]
    shared = listed([spans(range(first, last + 1)) for first, last in runs[:GROUPS]])
    rest = len(runs) - GROUPS
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


def ranks_of(ranks: Ranks) -> str:
    """Ranks for a reader: one by one if few, then as runs, then as a count within a span."""
    numbers = list(ranks)
    if len(numbers) <= 6:
        return " ".join(map(str, numbers))
    return spans(numbers) if len(ranks.runs()) <= 4 else f"{len(numbers):,} of {numbers[0]}–{numbers[-1]}"


def first_of(group: Ordered, rivals: Sequence[Screened]) -> list[Any]:
    """The checkpoints for a budget of three evaluations, in words if they are some of many tied.

    Empty if there is one checkpoint, or no two have a clear order.
    """
    # A copy would be evaluated twice.
    members = [c for c in group.candidates if c.copy_of is None]
    all_ranks = {c.rank for c in members}
    if all(all_ranks - {c.rank} <= set(c.ties) for c in members):
        return []
    budget = _FIRST if len(members) > _FIRST else 1
    last = members[budget - 1]
    behind = [c for c in members[budget:] if last.tied_to(c.rank)]
    extra = [c for c in rivals if c not in (*members[:budget], *behind)]
    if budget + len(behind) + len(extra) <= _MOST:
        return [*members[:budget], *behind, *extra]
    # Checkpoints tied across the cut are equally good.
    sure = [c for c in members[: budget - 1] if not last.tied_to(c.rank)]
    unsure = sorted({c.rank for c in (*members[:budget], *behind) if c not in sure})
    few = len(Ranks(unsure).runs()) <= 4
    ranks = f"ranks {spans(unsure)}" if few else f"{len(unsure):,} of ranks {unsure[0]}–{unsure[-1]}"
    return [*sure, f"any {budget - len(sure)} of {ranks}", *extra]


def decimals(checkpoints: Sequence[Screened], metric: Metric) -> int:
    """Decimals at which the smallest positive error of G still shows two digits; 3 to 6."""
    errors = [c.gaps[metric].se for c in checkpoints if c.gaps[metric].se > 0]
    smallest = min(errors, default=math.inf)
    return next((places for places in range(3, 6) if smallest * 10**places >= 10), 6)


def drawn_figure(c: Screened, group: Group, metric: Metric) -> Gap | Ratio:
    """The figure of a checkpoint that its group's reports draw."""
    return c.ratio if group.drawn == "ratio" and c.ratio else c.gaps[metric]


def reaches(group: Group, metric: Metric) -> dict[Screened, float]:
    """Two standard errors of the drawn figure's difference to the next rank, or from the step before."""
    pairs = [(c, before) for before, c in pairwise(group.steps)]
    if not pairs:
        first = {c.rank: c for c in reversed(group.checkpoints)}
        after = dict(pairwise(sorted(first)))
        pairs = [(c, first[after[c.rank]]) for c in group.checkpoints if c.rank in after]
    return {
        a: 2 * difference(drawn_figure(a, group, metric), drawn_figure(b, group, metric)).se for a, b in pairs
    }


def course(gaps: Sequence[Gap], names: Sequence[str], places: int = 3) -> str:
    """The course of G over two or more steps of a training, as far as paired errors allow.

    Two of all pairs of steps differ where their p-value is below 5 % over the number of pairs (Bonferroni):
    the chance of a claim about a training without any change is 5 % at most, up to the error of the
    jackknife.
    """
    steps = range(len(gaps))
    last = steps[-1]
    level = ERROR_RATE / math.comb(len(gaps), 2)
    values = [gap.mean for gap in gaps]
    high, low = max(steps, key=values.__getitem__), min(steps, key=values.__getitem__)

    def differ(*pairs: tuple[int, int]) -> bool:
        return all(difference(gaps[i], gaps[j]).p < level for i, j in pairs)

    def at(step: int) -> str:
        return f"{values[step]:.{places}f} at {names[step]}"

    since = flat_from(gaps, level)
    flat = f", flat since {names[since]}" if 0 < since <= len(gaps) - _FLAT else ""
    if since == 0:
        return f"G does not change from {names[0]} to {names[last]}: no two steps differ."
    if differ((high, 0), (high, last)):
        return f"G rises from {at(0)} to {at(high)}, then falls to {at(last)}{flat}."
    if differ((low, 0), (low, last)):
        return f"G falls from {at(0)} to {at(low)}, then rises to {at(last)}{flat}."
    if differ((0, last)):
        return f"G {'rises' if values[last] > values[0] else 'falls'} from {at(0)} to {at(last)}{flat}."
    return f"G moves between {at(low)} and {at(high)}, but its first and last step do not differ{flat}."
