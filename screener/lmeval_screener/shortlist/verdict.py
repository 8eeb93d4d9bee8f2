"""Whether a screen works for those who ran it: its short list against the results that came back.

*Works* needs more agreement inside groups than orders drawn at random have (permutation p of at most 5 %,
two-sided). That test is exact whichever checkpoints were evaluated, as they were chosen by G and by chance
only. *No better than chance* needs a narrow interval, not a large p. All else is *not enough results*.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.report import Document, Reportable
from lmeval_dispersion.statistics import Interval, normal_point
from lmeval_screener.accuracies import Rated, find_accuracies
from lmeval_screener.agreement import Agreement, agreement
from lmeval_screener.shortlist.estimates import GroupResults, Missed, decision_accuracy, missed
from lmeval_screener.shortlist.manifest import Candidate, Manifest

Outcome = Literal["works", "misleads", "chance", "unknown"]
LEVEL = 0.05
USELESS = 0.65  # decision accuracy below which a screen is called no better than chance
USEFUL = 2 / 3  # decision accuracy that results should be enough to show
_DRAWS = 9_999
_SEED = 20260501
_NUMBERS = 2**21  # of drawn orders held at a time


@dataclass(frozen=True, eq=False)
class GroupVerdict:
    """One group, or all of them.

    Attributes:
        name: Family and scale; empty for all groups together.
        candidates: How many were screened.
        listed: How many were on the short list.
        audited: How many were drawn at random.
        results: How many have a result.
        stands_for_all: Whether the pairs stand for those of all candidates, not only of those with results.
        agreement: Rank correlations of G with the results, inside groups.
        decisions: Share of pairs in the right order, with its interval.
        missed: What the list missed; None where none of it has a result, and for all groups together.
        separate: Whether the group by itself is told apart from chance, all groups counted (Holm).
    """

    name: str
    candidates: int
    listed: int
    audited: int
    results: int
    stands_for_all: bool
    agreement: Agreement
    decisions: Interval
    missed: Missed | None
    separate: bool = False

    @property
    def outcome(self) -> Outcome:
        """What the results say."""
        line = self.agreement
        if not math.isnan(line.spearman) and line.spearman_p <= LEVEL:
            return "works" if line.spearman > 0 else "misleads"
        # Pairs inside a list differ little in G: an order that they do not show may be there all the same.
        useless = self.stands_for_all and self.decisions.high < USELESS
        return "chance" if useless else "unknown"


@dataclass(frozen=True)
class Rival:
    """Something beside G that could have ranked.

    Attributes:
        name: What it is.
        n: Results of groups in which all have it.
        spearman: Rank correlation with the results, inside groups.
    """

    name: str
    n: int
    spearman: float


@dataclass(frozen=True)
class Exploration:
    """G among everything that could have ranked.

    Attributes:
        rivals: G and the others, the strongest first, whichever its sign.
        p: Permutation p of the strongest of so many.
        draws: Orders that were drawn for it.
    """

    rivals: tuple[Rival, ...]
    p: float
    draws: int


@dataclass(frozen=True, repr=False)
class Verdict(Reportable):
    """A screen against the results that came back.

    Attributes:
        manifest: The screening.
        meaning: What the results are, a line for each source.
        groups: One verdict a group.
        overall: Over all groups, compared only inside each.
        without: Labels of those that were to be evaluated and have no result.
        exploration: G beside the controls; None where there is nothing beside it.
        hours: GPU hours that one model costs; None where nobody said.
    """

    manifest: Manifest
    meaning: tuple[str, ...]
    groups: tuple[GroupVerdict, ...]
    overall: GroupVerdict
    without: tuple[str, ...]
    exploration: Exploration | None
    hours: float | None = None

    @property
    def saved(self) -> float | None:
        """GPU hours saved against evaluating every candidate; None without a cost."""
        if self.hours is None:
            return None
        return self.hours * (self.overall.candidates - self.overall.listed - self.overall.audited)

    def answer(self) -> list[str]:
        """The verdict in sentences; the first says whether the screen works here."""
        sentences = [_first(self.overall)]
        if len(self.groups) > 1 and (found := [one for one in self.groups if one.separate]):
            names = ", ".join(
                f"{one.name} ({'right' if one.outcome == 'works' else 'reversed'} order)" for one in found
            )
            sentences.append(
                f"Told apart from chance by itself, all {len(self.groups)} groups counted: {names}."
            )
        sentences += _missed_sentences(self.groups)
        if self.saved is not None:
            spent, whole = self.overall.listed + self.overall.audited, self.overall.candidates
            sentences.append(
                f"GPU hours: {self.hours_of(spent)} in place of {self.hours_of(whole)}, "
                f"{self.saved:,.4g} saved."
            )
        if self.without:
            some = ", ".join(self.without[:3]) + (", …" if len(self.without) > 3 else "")
            sentences.append(f"{len(self.without)} of those to be evaluated have no result: {some}.")
        if self.exploration is not None:
            sentences.append(_explored(self.exploration))
        return sentences

    def hours_of(self, models: float) -> str:
        """The cost of so many models, as a short number."""
        return f"{(self.hours or 0.0) * models:,.4g}"

    def document(self) -> Document:
        """The report that ``dispersion verify`` prints."""
        from lmeval_screener.shortlist.document import verdict_document

        return verdict_document(self)


def verify(manifest: Manifest, sources: Sequence[str], *, hours: float | None = None) -> Verdict:
    """The verdict on a short list.

    Args:
        manifest: The screening.
        sources: Where the results are; see :func:`lmeval_screener.accuracies.read_accuracies`.
        hours: GPU hours that one model costs.

    Raises:
        UsageError: A source cannot be read or fits no candidate, or two give one candidate different results.
    """
    values, meaning = _results(manifest, sources)
    names = {c.group: " · ".join(c.group) for c in manifest.candidates}
    members = {group: [i for i, c in enumerate(manifest.candidates) if c.group == group] for group in names}
    results = {group: _group(manifest, values, places) for group, places in members.items()}
    lines = agreement(
        [c.scores["G"] for c in manifest.candidates],
        values.tolist(),
        [names[c.group] for c in manifest.candidates],
        kendall=False,
    )
    of_group = {line.group: line for line in lines if line.scope == "group"}
    groups = [
        group_verdict(names[group], [one], of_group[names[group]], missed(one))
        for group, one in results.items()
    ]
    whole = next((line for line in lines if line.scope == "within groups"), lines[0])
    return Verdict(
        manifest,
        tuple(meaning),
        tuple(_told_apart(groups)),
        group_verdict("", list(results.values()), whole, None),
        tuple(
            c.label
            for c, value in zip(manifest.candidates, values, strict=True)
            if c.chosen and math.isnan(value)
        ),
        _exploration([[manifest.candidates[i] for i in places] for places in members.values()],
                     [values[places] for places in members.values()]),
        hours,
    )  # fmt: skip


def _group(manifest: Manifest, values: np.ndarray, places: Sequence[int]) -> GroupResults:
    chosen = [manifest.candidates[i].chosen for i in places]
    return GroupResults(
        np.array([manifest.candidates[i].scores["G"] for i in places]),
        values[list(places)],
        np.array([why in ("rank", "tied") for why in chosen]),
        np.array([why == "audit" for why in chosen]),
    )


def group_verdict(
    name: str, results: Sequence[GroupResults], line: Agreement, what_missed: Missed | None
) -> GroupVerdict:
    """The verdict on groups that are compared only inside each, or on one of them.

    Args:
        name: Of the group; empty for several.
        results: Of each group.
        line: How far G and the results agree.
        what_missed: What the list missed; None for several groups.
    """
    compared = [one for one in results if len(one.gaps) > 1]
    return GroupVerdict(
        name,
        sum(len(one.gaps) for one in results),
        sum(int(one.listed.sum()) for one in results),
        sum(int(one.audited.sum()) for one in results),
        sum(int(one.known.sum()) for one in results),
        bool(compared) and all(one.stands_for_all for one in compared),
        line,
        decision_accuracy(results),
        what_missed,
    )


def _told_apart(groups: Sequence[GroupVerdict]) -> list[GroupVerdict]:
    """The groups, with those that Holm's procedure tells apart from chance."""
    order = sorted(
        (i for i, one in enumerate(groups) if not math.isnan(one.agreement.spearman_p)),
        key=lambda i: groups[i].agreement.spearman_p,
    )
    apart: set[int] = set()
    for done, i in enumerate(order):
        if groups[i].agreement.spearman_p > LEVEL / (len(order) - done):
            break
        apart.add(i)
    return [replace(one, separate=i in apart) for i, one in enumerate(groups)]


# --- results --------------------------------------------------------------------------------------------


def _results(manifest: Manifest, sources: Sequence[str]) -> tuple[np.ndarray, list[str]]:
    """The accuracy of every candidate, NaN for none, and what the sources are."""
    targets = [c.target for c in manifest.candidates]
    commits: dict[tuple[str, str | None], list[Candidate]] = {}
    for c in manifest.candidates:
        if c.revision is not None:
            commits.setdefault((c.repo, c.revision), []).append(c)
    values = np.full(len(targets), math.nan)
    places: dict[int, str] = {}
    meanings = []
    for source in sources:
        found = find_accuracies(source, targets)
        found = replace(found, rated=tuple(_by_name(one, commits) for one in found.rated))
        found.check(targets)
        meanings.append(found.meaning)
        for i, target in enumerate(found.of(targets)):
            if target.accuracy is None:
                continue
            if i in places and values[i] != target.accuracy:
                raise UsageError(
                    f"{target.label}: expected one result, got {values[i]:g} in {places[i]} and "
                    f"{target.accuracy:g} in {source}; give one source of each, or name one task with :TASK"
                )
            values[i], places[i] = target.accuracy, source
    return values, meanings


def _by_name(one: Rated, commits: Mapping[tuple[str, str | None], Sequence[Candidate]]) -> Rated:
    """A result that names the commit that was screened, under the revision and file that were asked for."""
    found = commits.get((one.name, one.revision), ())
    if one.file is not None:
        found = [c for c in found if c.file and c.file.lower() in one.file.lower()]
    return replace(one, name=found[0].label, revision=None) if found else one


# --- sentences ------------------------------------------------------------------------------------------


def _first(one: GroupVerdict) -> str:
    line, share = one.agreement, one.decisions
    if math.isnan(line.spearman):
        reason = line.reason or "fewer than two results to compare"
        return f"Not enough results to tell whether the screen works here: {reason}."
    pairs = "pairs" if one.stands_for_all else "pairs with results"
    bounds = f"95 %: {_percent(share.low)} to {_percent(share.high)}"
    facts = f"{_percent(share.value)} of {pairs} in the right order ({bounds}), p {_p(line.spearman_p)}"
    if one.outcome == "works":
        return f"The screen works here: {facts}, {one.results} results."
    if one.outcome == "misleads":
        return f"The screen misleads here, its order is reversed: {facts}, {one.results} results."
    if one.outcome == "chance":
        return f"The screen is no better than chance here, or hardly: {facts}, {one.results} results."
    enough = enough_results(USEFUL)
    more = (
        f"; about {enough} in one group would show a screen that orders two pairs of three right"
        if one.results < enough
        else ""
    )
    return f"Not enough results to tell whether the screen works here: {facts}, {one.results} results{more}."


def enough_results(share: float) -> int:
    """Results of one group with which a true decision accuracy is found in four of five cases.

    From the variance of tau without any relation, 2 (2n + 5) / (9n (n - 1)): Kendall (1938).
    """
    tau, point = 2 * share - 1, normal_point(1) + 0.8416
    n = 4
    while point * math.sqrt(2 * (2 * n + 5) / (9 * n * (n - 1))) > tau:
        n += 1
    return n


def _missed_sentences(groups: Sequence[GroupVerdict]) -> list[str]:
    """What the lists missed: a fact where all are known, else what the audit sample shows."""
    if len(groups) == 1:
        found = groups[0].missed
        return [] if found is None or not found.others else [_missed_sentence(found)]
    rated = [one.missed for one in groups if one.missed is not None and one.missed.others]
    if not rated:
        return []
    exact = [one for one in rated if not math.isnan(one.regret)]
    sentences = []
    if exact:
        held = sum(one.regret == 0 for one in exact)
        mean = sum(one.regret for one in exact) / len(exact)
        sentences.append(
            f"The lists hold the best of {held} of {len(exact)} groups with all results; "
            f"mean regret {mean:.3g}."
        )
    drawn = [one for one in rated if one.drawn and math.isnan(one.regret)]
    if drawn:
        better, total = sum(one.better_seen for one in drawn), sum(one.drawn for one in drawn)
        sentences.append(
            f"Of {total} others drawn at random, {better or 'none'} {'is' if better == 1 else 'are'} "
            "better than the best of their group's list."
        )
    return sentences


def _missed_sentence(found: Missed) -> str:
    if not math.isnan(found.regret):
        random = f"as many at random would miss it by {found.at_random:.3g} on average"
        if found.regret == 0:
            return f"The list holds the best of all; {random}."
        return f"The list misses the best of all by {found.regret:.3g}; {random}."
    if not found.drawn:
        return "What the list missed is not known: no other was drawn at random (--audit-sample)."
    low, high = int(found.better.low), int(found.better.high)
    between = f"at most {high}" if low == 0 else f"{low} to {high}" if low < high else f"{low}"
    seen = f", by up to {found.seen:.3g}" if found.better_seen else ""
    are = "is" if found.better_seen == 1 else "are"
    count = found.better_seen or "none"
    return (
        f"Of {found.drawn} others drawn at random {count} {are} better than the list's best{seen}: "
        f"{between} of all {found.others} others (95 %)."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


# --- what else could have ranked ------------------------------------------------------------------------


def _exploration(groups: Sequence[Sequence[Candidate]], values: Sequence[np.ndarray]) -> Exploration | None:
    """G among everything else that the manifest has of every candidate with a result."""
    known = [
        ([c for c, value in zip(members, own, strict=True) if math.isfinite(value)], own[np.isfinite(own)])
        for members, own in zip(groups, values, strict=True)
    ]
    known = [(members, own) for members, own in known if len(members) > 1]
    names = [
        name
        for name in dict.fromkeys(name for members, _ in known for c in members for name in c.scores)
        if all(name in c.scores for members, _ in known for c in members)
    ]
    columns = {
        name: [_standard(np.array([c.scores[name] for c in members])) for members, _ in known]
        for name in names
    }
    columns = {name: sides for name, sides in columns.items() if any(np.ptp(side) > 0 for side in sides)}
    orders = [_standard(own) for _, own in known]
    if len(columns) < 2 or "G" not in columns or not any(np.ptp(own) > 0 for own in orders):
        return None
    rows = np.array([np.concatenate(sides) for sides in columns.values()])
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    own = np.concatenate(orders)
    own /= np.linalg.norm(own)
    found = rows @ own
    rng = np.random.default_rng(_SEED)
    edges = np.cumsum([len(side) for side in orders])[:-1]
    strongest, large = float(np.abs(found).max()), 0
    block = max(1, _NUMBERS // len(own))
    for start in range(0, _DRAWS, block):
        tiles = np.split(np.tile(own, (min(block, _DRAWS - start), 1)), edges, axis=1)
        drawn = np.concatenate([rng.permuted(tile, axis=1) for tile in tiles], axis=1) @ rows.T
        large += int((np.abs(drawn).max(axis=1) >= strongest - 1e-12).sum())
    count = len(own)
    rivals = sorted(
        (Rival(name, count, float(value)) for name, value in zip(columns, found, strict=True)),
        key=lambda one: (-round(abs(one.spearman), 12), one.name != "G"),
    )
    return Exploration(tuple(rivals), (1 + large) / (1 + _DRAWS), _DRAWS)


def _standard(values: np.ndarray) -> np.ndarray:
    from lmeval_dispersion.statistics import ranks

    placed = ranks(values)
    return np.asarray(placed - placed.mean())


def _explored(found: Exploration) -> str:
    """Which would have ranked best, with the correction for having looked at all of them."""
    count, (first, *_) = len(found.rivals), found.rivals
    own = next(one for one in found.rivals if one.name == "G")
    if found.p > LEVEL:
        return (
            f"Exploratory: of {count} figures that could have ranked, none is told apart from chance "
            f"(the strongest {first.name}, Spearman {first.spearman:.2f}, "
            f"p {_p(found.p)} for the best of {count})."
        )
    beside = "" if first.name == "G" else f", G {own.spearman:.2f}"
    return (
        f"Exploratory: of {count} figures that could have ranked, {first.name} orders these results best "
        f"(Spearman {first.spearman:.2f}{beside}; p {_p(found.p)} for the best of {count}); "
        "whether it does elsewhere is not shown."
    )
