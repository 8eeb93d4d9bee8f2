"""Sentences that answer a screening: what to evaluate first, and how often such an order was right.

Along a training run every step is compared with every other: the more steps, the smaller a p-value
must be.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from lmeval_dispersion.errors import count
from lmeval_dispersion.report.declared import listed, some
from lmeval_dispersion.statistics import LEVEL
from lmeval_screener.chance import Own, is_noise
from lmeval_screener.figures import Gap, Ratio, difference
from lmeval_screener.orders import DISTANCES
from lmeval_screener.ranking import flat_from
from lmeval_screener.screened import RANKED, Failed, Group, Screened
from lmeval_screener.tokens.sets import some_words
from lmeval_screener.weights import copies
from lmeval_screener.weights.body import SAME_ROWS

_GROUPS = 4  # groups that get a sentence each
DRAWN = 40  # most checkpoints of a group in a chart
_FIRST = 3  # places to evaluate first where no chance is known
_NAMED = 5  # most checkpoints in these places that a sentence names
_FLAT = 3  # fewest steps in a flat stretch
_NO_PLACES: Mapping[str, int] = MappingProxyType({})
_SIDES = {
    "above": "Above {} by the ratio: {}.",
    "below": "Below {} by the ratio: {}.",
    "level": "The ratio does not separate {1} from {0}{2}.",
}
# Measured in code alone: in math pairs below their base are ordered as others are.
_BELOW = (
    "For code, the order among checkpoints below their base means nothing: a checkpoint that was "
    "not trained on code looks like one that was trained on wrong code."
)
_BY_GAP = "how often an order by G is right is not known"
_NOT_KNOWN = (
    "how often such an order is right is not known for these checkpoints; "
    "`dispersion verify` estimates it from your results"
)
STEP = (
    "Within one training run, the step number orders checkpoints at least as well: use the ratio and "
    "G to see sudden changes, not to rank steps."
)


def not_screened(failed: Sequence[Failed]) -> str:
    """Return the sentence for a screening in which every checkpoint failed.

    It gives the number of checkpoints with each error code and the first message of each code; for
    a single checkpoint, the label, the code and the message.
    """
    if len(failed) == 1:
        return f"{failed[0].label}: {failed[0].error}: {failed[0].message}"
    first_messages: dict[str, str] = {}
    for failure in failed:
        first_messages.setdefault(failure.error, f"{failure.label}: {failure.message}")
    first = "the first" if len(first_messages) == 1 else "the first of each"
    return (
        f"none of the {len(failed)} checkpoints could be screened ({_errors(failed)}); "
        f"{first}: {'; '.join(first_messages.values())}"
    )


def failures(failed: Sequence[Failed], everyone: int) -> str:
    """Return a sentence on how many checkpoints failed, with the three most frequent error codes.

    ``everyone`` is the number of checkpoints asked for. The sentence is empty if none failed.
    """
    if not failed:
        return ""
    checkpoints = count(everyone, "checkpoint")
    return f"{len(failed)} of {checkpoints} could not be screened ({_errors(failed, 3)})."


def _errors(failed: Sequence[Failed], most: int | None = None) -> str:
    counts = Counter(failure.error for failure in failed).most_common(most)
    numbers = [f"{number} {error}" for error, number in counts]
    others = len(failed) - sum(number for _, number in counts)
    if others == 1:
        numbers.append("1 with another error")
    elif others:
        numbers.append(f"{others} with other errors")
    return ", ".join(numbers)


def labels_by_note(notes: Iterable[tuple[str, Screened]], everyone: int = 0) -> dict[str, str]:
    """Map each note to a text that names the checkpoints with that note.

    The text is the label of a single checkpoint, ``all N`` if all ``everyone`` checkpoints have the
    note, and otherwise ``N checkpoints``.
    """
    members: dict[str, list[Screened]] = {}
    for note, c in notes:
        members.setdefault(note, []).append(c)
    labels = {}
    for note, alike in members.items():
        if len(alike) == 1:
            labels[note] = alike[0].label
        elif len(alike) == everyone:
            labels[note] = f"all {everyone}"
        else:
            labels[note] = f"{len(alike)} checkpoints"
    return labels


def unknown(members: Sequence[Screened], *, alone: bool) -> list[str]:
    """Return one sentence for each reason why checkpoints have no ratio.

    ``alone`` says that no group has two checkpoints, so that there is no order.
    """
    notes = []
    for c in members:
        if c.ratio is None:
            ending = "the order is by G alone"
            if c.is_set_aside:
                ending = "set aside, without a rank"
            elif alone:
                ending = "G is the only figure"
            notes.append((f"{c.no_ratio or 'it was not computed'}; {ending}", c))
    sentences = []
    for note, labels in labels_by_note(notes, len(members)).items():
        if labels == f"all {len(members)}":
            sentences.append(f"No ratio: {note}.")
        else:
            sentences.append(f"No ratio of {labels}: {note}.")
    return sentences


def sentences_of(
    groups: Sequence[Group], subject: str, domain: str, places: Mapping[str, int] = _NO_PLACES
) -> list[str]:
    """Return sentences on which checkpoints to evaluate first.

    With one group, they are those of `group_sentences`, which also explains ``subject`` and
    ``domain``. With several groups, each of the first four has one text, ``TITLE: SENTENCES``.
    ``places`` maps a group's name to the length of the short list that the user asked for.
    """
    if len(groups) == 1:
        return group_sentences(groups[0], subject, domain, places.get(groups[0].name))
    answers = []
    for group in groups[:_GROUPS]:
        sentences = group_sentences(group, subject, domain, places.get(group.name))
        answers.append(f"{group.title}: {' '.join(sentences)}")
    return answers


def group_sentences(
    group: Group, subject: str, domain: str = "", places: int | None = None
) -> list[str]:
    """Return sentences on which checkpoints of a group to evaluate first, most important first.

    For the steps of a training run, the sentences say how the ranking figure rises and falls.

    Args:
        group: The group.
        subject: What was screened for, as sentences name it: the task, else the domain.
        domain: The domain; ``code`` adds a caveat on checkpoints below their base.
        places: Length of the short list; see `first_of`.
    """
    members = group.candidates
    names = group.names
    if group.steps:
        figures = [c.figure for c in group.steps]
        course = course_sentence(group.figure, figures, [c.step or "" for c in group.steps])
        return [course, *base_sentences(group), STEP]
    if not members:
        base = names[group.checkpoints[0]]
        return [f"No other checkpoint has the tokenizer and scale of the base {base}."]
    against = base_sentences(group)
    equal, asked = equal_rows(group)
    distinct = {c for c in members if c.copy_of is None}
    if asked and distinct.issubset(asked):
        return ["Nothing to rank: " + equal[0], *equal[1:], *against]
    if not distinct or (len(distinct) == 1 and len(members) > 1):
        return ["Nothing to rank: " + copies.said(members)[0], *against]
    if len(members) == 1:
        value = f"{group.figure} {members[0].figure.mean:.3f}"
        alone = f"Only {names[members[0]]} ({value}) can be ranked here"
        return against or [
            f"{alone}; a screen compares checkpoints and says nothing about a single one."
        ]
    if against and group.places < 2:
        return [*equal, *against]
    below = 0
    for c in members:
        if c.against is not None and c.against.side == "below":
            below += 1
    if domain == "code" and below > 1:
        against.append(_BELOW)
    first = first_of(group, places)
    if not first:
        no_order = (
            f"Screened for {subject}, these {len(members)} checkpoints get no order from their "
            "output rows. Race them all, or ask each a few questions: `dispersion race --all "
            "--budget 5%`."
        )
        return [*against, no_order, *equal]
    success = _success(group, first[-1].rank)
    return [
        _first_line(group, first, subject),
        *by_figure(group),
        f"{success[0].upper()}{success[1:]}.",
        *against,
        *equal,
    ]


def _first_line(group: Group, first: Sequence[Screened], subject: str) -> str:
    """The sentence that names the members to evaluate first."""
    named = some_words([group.names[c] for c in first], _NAMED)
    highest = RANKED[first[0].ranked_by]
    order = f"{highest} of {len(group.candidates)}"
    if len(first) == sum(c.copy_of is None for c in group.placed):
        order = f"all {len(first)}, {highest} first"
    return f"Evaluate first: {named} ({order}; {subject})."


def _success(group: Group, last: int) -> str:
    """How often such an order is right down to rank ``last``: a sentence without its full stop."""
    if group.chances is None:
        return _BY_GAP
    slope = group.chances.slope
    compared = last if last > 1 else group.places
    far = group.chances.between(1, compared)
    if isinstance(slope, Own):
        chances = []
        if last < group.places:
            ranks = "rank 1 holds"
            if last > 1:
                ranks = f"ranks 1–{last} hold"
            held = group.chances.holds_best[last - 1]
            chances.append(f"{ranks} the best checkpoint with a chance of {held:.0%}")
        if last > 1:
            chances.append(f"rank 1 is better than rank {last} with a chance of {far:.0%}")
        return f"{slope.said()}: {'; '.join(chances)}"
    if not group.is_like_ours:
        return _NOT_KNOWN
    return slope.counts(compared, far, is_list=last == group.first_for()) or _NOT_KNOWN


def by_figure(group: Group) -> list[str]:
    """Return a list with one sentence: which figure orders a group, the ratio or the gap G.

    If the other figure would put another checkpoint first (see `first_by_other`), the sentence says
    which. If it would not, and the ratio orders the group, the list is empty.
    """
    other = first_by_other(group)
    gap = f"G, the paper's figure ({DISTANCES[group.metric]} distance)"
    if group.figure == "G":
        ratio = "" if other is None else f"; by the ratio {group.names[other]} is first"
        return [f"The order is by {gap}{ratio}."]
    if other is None:
        return []
    return [f"The order is by the ratio; by {gap}, {group.names[other]} is first."]


def first_by_other(group: Group) -> Screened | None:
    """Return the checkpoint that would be first by the figure that does not rank the group.

    That figure is G if the ratio ranks the group, and otherwise the ratio. None if the checkpoint
    at rank 1 would also be first, if a checkpoint lacks that figure, or if noise alone may explain
    its differences (`is_noise`).
    """
    # A copy's own G may have moved without any change of its predictions: only originals count.
    figures: dict[Screened, Gap | Ratio] = {}
    for c in group.placed:
        if c.copy_of is not None:
            continue
        figure = c.ratio if group.figure == "G" else c.gap
        if figure is None:
            return None
        figures[c] = figure
    if len(figures) < 2 or is_noise([*figures.values()]):
        return None
    best = max(figures, key=lambda c: (figures[c].mean, -c.rank))
    if best.rank == 1:
        return None
    return best


def equal_rows(group: Group) -> tuple[list[str], list[Screened]]:
    """Return sentences on checkpoints with equal output rows, and the checkpoints to compare.

    Output rows cannot rank such checkpoints; the last sentence has the command that compares their
    answers instead. Both lists are empty if no checkpoints have equal rows.
    """
    clauses: list[str] = []
    asked: list[Screened] = []
    for alike in group.by_rows.values():
        named_bases = {c.base for c in alike}
        siblings: list[Screened] = []
        bases: set[str] = set()
        for c in alike:
            if c.is_base or c.place in named_bases:
                bases.add(group.names[c])
            else:
                siblings.append(c)
        if not bases:
            for c in siblings:
                if any(note.startswith(SAME_ROWS) for note in c.warnings):
                    bases.add(c.base.rpartition("/")[2])
        if not siblings or (len(alike) == 1 and not bases):
            continue
        clauses.append(_equal([group.names[c] for c in siblings], bases))
        # One alone is asked against its base.
        asked += siblings if len(siblings) > 1 else alike
    if not clauses:
        return [], []
    return [f"{'; '.join(clauses)}.", _ask(asked)], asked


def rows_of_base(adapters: Sequence[Failed], *, alone: bool) -> list[str]:
    """Return sentences on adapters whose output rows are those of a base that could not be read.

    ``alone`` says that there are no other checkpoints, so that nothing can be ranked. The list is
    empty if there are no such adapters.
    """
    if not adapters:
        return []
    names: list[str] = []
    bases: set[str] = set()
    causes: dict[str, None] = {}  # in order
    for f in adapters:
        names.append(f.label)
        bases.add(f.base)
        causes[f.cause] = None
    their = "their" if len(names) > 1 else "its"
    start = "Nothing to rank: " if alone else ""
    first, *more_causes = causes
    if more_causes:
        first += f" (and {count(len(more_causes), 'other cause')})"
    that = "that base"
    unread = "The base"
    if len(bases) > 1:
        that = "these bases"
        unread = "Their bases"
    return [
        f"{start}{_equal(names, bases)} if {their} tensor names fit {that}.",
        f"{unread} could not be read: {first}.",
        _ask(adapters),
    ]


def _equal(names: Sequence[str], bases: Set[str]) -> str:
    """A clause: these have equal rows, or those of their ``bases``."""
    have = "has"
    their = "its"
    if len(names) > 1:
        have = "have"
        their = "their"
    if not bases:
        return f"{some(names)} {have} equal output rows"
    base = "base" if len(bases) == 1 else "bases"
    return f"{some(names)} {have} the output rows of {their} {base} ({listed(sorted(bases))})"


def _ask(members: Sequence[Screened] | Sequence[Failed]) -> str:
    """The command that compares checkpoints by their answers.

    It names the folder that holds them all, if there is one: a base's folder may hold others too.
    """
    folders: set[str] = set()
    names: list[str] = []
    for c in members:
        is_sibling = c.target.local and not (isinstance(c, Screened) and c.is_base)
        folders.add(str(Path(c.repo).parent) if is_sibling else "")
        names.append(c.name if isinstance(c, Screened) else c.target.name)
    if len(names) == 1 and members[0].base:
        places = f"{names[0]} {members[0].base}"
        return (
            f"Compare its answers with those of its base: `dispersion race {places} --tasks TASK`."
        )
    places = " ".join(names[:_NAMED])
    if len(names) > _NAMED:
        places = f"{places} …"
    if len(names) > 1 and len(folders) == 1:
        places = folders.pop() or places
    return f"Compare their answers: `dispersion race {places} --tasks TASK`."


def first_of(group: Group, places: int | None = None) -> list[Screened]:
    """Return the checkpoints of a group to evaluate first, best first; empty if there is no order.

    These are the checkpoints of the first ``places`` ranks, without copies of other checkpoints. By
    default, ``places`` is the number of ranks that contain the best checkpoint with a chance of
    90 % (`Group.first_for`), or three if no chance is known.
    """
    if group.trajectory or group.is_noise or group.places < 2:
        return []
    if places is None:
        places = _FIRST
        if group.chances:
            places = group.first_for()
    return [c for c in group.placed if c.rank <= places and c.copy_of is None]


def base_sentences(group: Group, members: Sequence[Screened] | None = None) -> list[str]:
    """Return sentences on which checkpoints the ratio puts above, below or level with their base.

    ``members`` are the checkpoints to name; None for all of the group's candidates. Checkpoints
    without a ratio, or with the rows of the base, are left out. The list is empty if none is left,
    or if the group has no base or a base without a ratio.
    """
    if group.base is None or group.base.ratio is None:
        return []
    name = group.names[group.base]
    base = "the base"
    if name != "base":
        base = f"the base {name}"
    if members is None:
        members = group.candidates
    sides: dict[str, list[str]] = {}
    for c in members:
        if c.against is not None:
            sides.setdefault(c.against.side, []).append(group.names[c])
    sentences = []
    for side, words in _SIDES.items():
        if side in sides:
            each = ", each taken alone" if len(sides[side]) > 1 else ""
            sentences.append(words.format(base, some(sides[side]), each))
    return sentences


class WithError(Protocol):
    """A figure with a standard error."""

    @property
    def se(self) -> float:
        """The standard error, in the unit of the figure."""


def decimals(figures: Sequence[WithError]) -> int:
    """Return the number of decimals, 3 to 6, that show two digits of the smallest positive error.

    The number is 3 if no error is positive.
    """
    smallest = min((figure.se for figure in figures if figure.se > 0), default=math.inf)
    for places in range(3, 6):
        if smallest * 10**places >= 10:
            return places
    return 6


def course_sentence(figure: str, values: Sequence[Gap | Ratio], names: Sequence[str]) -> str:
    """Return a sentence on how a figure rises and falls over two or more training steps.

    Two steps differ if the p-value of their paired difference is below 5 % divided by the number of
    pairs (Bonferroni). So the chance that the sentence claims a change where there is none is at
    most 5 %, up to the error of the jackknife.

    Args:
        figure: Name of the figure, ``ratio`` or ``G``.
        values: The figure at each step, in the order of the steps.
        names: Name of each step.
    """
    steps = range(len(values))
    last = steps[-1]
    level = (1 - LEVEL) / math.comb(len(values), 2)
    means = [value.mean for value in values]
    high = max(steps, key=means.__getitem__)
    low = min(steps, key=means.__getitem__)
    digits = decimals(values)
    name = f"{figure[0].upper()}{figure[1:]}"

    def differ(one: int, other: int) -> bool:
        return difference(values[one], values[other]).p < level

    def at(step: int) -> str:
        return f"{means[step]:.{digits}f} at {names[step]}"

    since = flat_from(values, level)
    if since == 0:
        return f"{name} does not change from {names[0]} to {names[last]}: no two steps differ."
    flat = ""
    if since <= len(values) - _FLAT:
        flat = f", flat since {names[since]}"
    if differ(high, 0) and differ(high, last):
        return f"{name} rises from {at(0)} to {at(high)}, then falls to {at(last)}{flat}."
    if differ(low, 0) and differ(low, last):
        return f"{name} falls from {at(0)} to {at(low)}, then rises to {at(last)}{flat}."
    if differ(0, last):
        changes = "rises" if means[last] > means[0] else "falls"
        return f"{name} {changes} from {at(0)} to {at(last)}{flat}."
    return (
        f"{name} moves between {at(low)} and {at(high)}, but the first and last steps do not "
        f"differ{flat}."
    )
