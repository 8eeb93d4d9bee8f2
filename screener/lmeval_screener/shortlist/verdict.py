"""The verdict on a screen: its short list against lm-eval's results.

*Works* needs more agreement inside groups than random orders have (permutation p of at most 5 %, two-sided).
That test is exact whichever checkpoints were evaluated, as they were chosen by rows and by chance only. *No
better than chance* needs a narrow interval, not a large p. Everything else is *not enough results*.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from lmeval_dispersion.arguments import takes
from lmeval_dispersion.errors import DispersionError, UsageError
from lmeval_dispersion.evidence import FINE_TUNES, SLOPES, Slope
from lmeval_dispersion.report import Chart, Col, Report, Table
from lmeval_dispersion.report.document import fields_of
from lmeval_dispersion.report.vega import Spec, accuracy_points
from lmeval_dispersion.statistics import holm, normal_point
from lmeval_screener.chance import NEAR, WITHIN, Chances, fitted, keep_slope, normal_scores
from lmeval_screener.orders import DISTANCES
from lmeval_screener.ranking import Agreement, agreements
from lmeval_screener.screened import RANKED, title_of
from lmeval_screener.shortlist.accuracies import Accuracies, Rated, read_accuracies
from lmeval_screener.shortlist.arguments import Verifying
from lmeval_screener.shortlist.estimates import GroupResults, decision_accuracy, missed
from lmeval_screener.shortlist.manifest import Candidate, Manifest, read_shortlist_manifest
from lmeval_screener.targets.names import Target

Outcome = Literal["works", "misleads", "chance", "unknown"]
LEVEL = 0.05
USELESS = 0.65  # decision accuracy below which a screen is called no better than chance
USEFUL = 2 / 3  # decision accuracy that results should be enough to show


@dataclass(frozen=True)
class GroupVerdict:
    """The verdict on one group, or on all together; None if a figure is not defined.

    Its last fields are those of `missed`, if a group has results on its list.

    Attributes:
        outcome: ``works``, ``misleads``, ``chance`` (no better than it) or ``unknown``.
        candidates: Number of screened checkpoints; ``results`` of them have one, ``listed`` were on the list.
        spearman: Rank correlation of the screen's order with the results, inside groups; ``p`` by
            permutation, two-sided.
        right: Share of pairs that the screen orders as the results do; ``low`` to ``high``: 95 % interval.
        audited: Number of others that were drawn at random to be evaluated.
        stands_for_all: Whether the pairs represent all candidates, not only those with results.
        separate: Whether the group differs from chance on its own, corrected for all groups (Holm).
        reason: Why the correlation is missing; empty if it is defined.
    """

    group: Annotated[str, Col("Group")]
    outcome: Outcome
    results: Annotated[int, Col("Results", "d")]
    candidates: Annotated[int, Col("of", "d", drop=1)]
    spearman: Annotated[float | None, Col("Spearman", ".2f", drop=2)]
    p: Annotated[float | None, Col("p", "p-value", drop=2)]
    right: Annotated[
        float | None,
        Col("Pairs right", ".0%", dots="both", reach="low high", whisker="95% interval"),
    ]
    low: Annotated[float | None, Col("95% CI from", ".0%", drop=1)]
    high: Annotated[float | None, Col("to", ".0%", drop=1)]
    listed: Annotated[int, Col("List", "d")]
    audited: int
    stands_for_all: bool
    separate: bool = False
    reason: str = ""
    best: Annotated[float | None, Col("Best of it", ".3g")] = None
    regret: Annotated[float | None, Col("Lost", ".3g")] = None
    at_random: Annotated[float | None, Col("Lost at random", ".3g")] = None
    seen: Annotated[float | None, Col("Lost at least", ".3g", drop=1)] = None
    others: Annotated[int | None, Col("Others", "d")] = None
    drawn: Annotated[int | None, Col("Drawn", "d")] = None
    better_seen: int | None = None
    better: Annotated[float | None, Col("Others better", ".3g")] = None
    better_low: Annotated[float | None, Col("from", ".0f")] = None
    better_high: Annotated[float | None, Col("to", ".0f")] = None
    excess: Annotated[float | None, Col("Mean excess", ".3g", drop=2)] = None


# Columns only in the table of details, and only in the first table.
_DETAILS = (
    "low",
    "high",
    "listed",
    "best",
    "at_random",
    "seen",
    "others",
    "drawn",
    "better",
    "better_low",
    "better_high",
    "excess",
)
_FIRST = ("results", "candidates", "spearman", "p", "right", "low", "high", "regret")


@dataclass(frozen=True)
class Point:
    """A candidate with a result; ``chosen`` is ``rank``, ``audit`` or None, ``ratio`` None where unknown."""

    label: Annotated[str, Col("Checkpoint")]
    group: Annotated[str, Col("Group", drop=1)]
    ratio: Annotated[float | None, Col("Ratio", ".3f")]
    G: Annotated[float, Col("G", ".3f", drop=2)]
    accuracy: Annotated[float, Col("Accuracy", ".3g")]
    chosen: Annotated[str | None, Col("Chosen", drop=1)]


@dataclass(frozen=True, repr=False)
class Verdict(Report):
    """A screen compared with lm-eval's results.

    Attributes:
        outcome: The verdict over all groups, as in `GroupVerdict`.
        groups: One verdict per group; ``overall``: over all, compared only inside each.
        results: A line for each source of results.
        without: Labels of the checkpoints to evaluate that have no result.
        points: Figures and result of each candidate with a result.
        list: The rule by which the list was chosen.
        task: The task of the screening; empty if none was named.
        order: The figure that ranked, and the base, if any; empty if unknown.
        slope: How far ranks order accuracies by these results, shrunk to ``ours``; None where no chance is
            known of the ranks, without two results in a group, and where only a race's survivors have one.
        ours: The same, as measured on checkpoints of their kind; None where no chance is known.
        dropped: Number of a race's checkpoints that were not asked everything.
        places: Number of places in the largest group of ``slope``.
        metric: The distance of G; empty if unknown.
    """

    template = "verdict.jinja"
    schema = "screen-checkpoints-verdict/2"
    libraries = ("numpy",)
    guide = "docs/reference/screening.md"
    each = "points"

    domain: str
    outcome: Outcome
    groups: tuple[GroupVerdict, ...]
    overall: GroupVerdict
    results: tuple[str, ...]
    without: tuple[str, ...]
    points: tuple[Point, ...]
    manifest: str
    list: str
    task: str = ""
    order: str = ""
    slope: Slope | None = None
    ours: Slope | None = None
    dropped: int = 0
    places: int = 0
    metric: str = ""

    def keep(self, path: str | Path) -> str:
        """Write the slope to ``path``, a file for screenings; returns a sentence on it.

        Raises:
            UsageError: The file exists and does not hold an earlier slope.
            DispersionError: Nothing to keep, as no slope was fitted; or the file cannot be written.
        """
        if self.slope is None or self.ours is None:
            why = "this screening's ranks have no known chance; rank by the ratio"
            if self.ours is not None:
                why = "a group needs two results; evaluate more of the list"
                if self.dropped:
                    why = (
                        f"a race drops by result; evaluate the {self.dropped} more that are missing"
                    )
            raise DispersionError(f"kept no slope in {path}: {why}")
        keep_slope(Path(path), self.slope, self.ours.kind, self.task or self.domain)
        kept = f"kept your slope k {self.slope.k:.2f} of {self.ours.kind} in {path}"
        return f"{kept}; `screen-checkpoints … --slope {path}` takes it"

    def tables(self) -> Mapping[str, Table]:
        """The groups' verdicts, their lists compared with the others, and each checkpoint."""
        lines = self.groups
        if len(lines) > 1:
            lines = (*lines, self.overall)
        return {
            "groups": Table.of(lines, "", name="groups", hide=_DETAILS),
            "lists": Table.of(self.groups, "", name="lists", hide=_FIRST),
            "points": Table.of(self.points, "", name="points"),
        }

    def charts(self) -> Mapping[str, Chart]:
        """Accuracy against the figure that ranked, for every checkpoint with a result."""
        figure = "ratio"
        title = "ratio"
        by_gap = self.order.startswith(RANKED["gap"])
        if by_gap or any(point.ratio is None for point in self.points):
            figure = "G"
            title = f"{DISTANCES.get(self.metric, '')} gap G".strip()

        def draw() -> Spec:
            return accuracy_points([fields_of(point) for point in self.points], figure, title)

        description = f"{len(self.points)} checkpoints with a result, by group."
        return {"points": Chart(draw, f"Accuracy against {figure}", description, name="accuracy")}

    def context(self) -> Mapping[str, Any]:
        """Template values: groups by kind of evidence, results needed, and places to evaluate first."""
        exact = []
        drawn = []
        for group in self.groups:
            if group.best is not None and group.others:
                if group.regret is not None:
                    exact.append(group)
                elif group.drawn:
                    drawn.append(group)
        return {
            "enough": enough_results(USEFUL),
            "exact": exact,
            "drawn": drawn,
            "apart": [group for group in self.groups if group.separate],
            "first_for": lambda slope: Chances(self.places, slope).first_for(),
            "within": WITHIN,
        }


@takes(Verifying)
def verify(asked: Verifying) -> Verdict:
    """Check the screen against results: the verdict on a short list.

    Raises:
        UsageError: No manifest, a source of results that cannot be read or has none of its checkpoints, or
            two results of one checkpoint that differ.
    """
    results = asked.results
    if isinstance(asked.manifest, Manifest):
        manifest = asked.manifest
    else:
        place = Path(asked.manifest)
        results = results or [place if place.is_dir() else place.parent]
        manifest = read_shortlist_manifest(place)
    candidates, sources = _rated(manifest, [str(source) for source in results], asked.metric)
    titles = _titles(candidates)
    members: dict[str, list[Candidate]] = {}
    for c, title in zip(candidates, titles, strict=True):
        members.setdefault(title, []).append(c)
    results_of = {title: _group(alike) for title, alike in members.items()}
    # Whichever figure ranked, the verdict is on the order that the screen gave.
    lines = agreements([-c.rank for c in candidates], [c.accuracy for c in candidates], titles)
    verdicts = []
    within = lines[0]
    for line in lines:
        if line.scope == "group":
            verdicts.append(_verdict(line.group, [results_of[line.group]], line))
        elif line.scope == "within groups":
            within = line
    separate = holm({i: verdict.p for i, verdict in enumerate(verdicts) if verdict.p is not None})
    for i in separate:
        verdicts[i] = replace(verdicts[i], separate=True)
    overall = _verdict("all groups", list(results_of.values()), within)
    points = []
    without = []
    for c, title in zip(candidates, titles, strict=True):
        if not math.isnan(c.accuracy):
            points.append(Point(c.target.label, title, c.ratio, c.G, c.accuracy, c.chosen))
        elif c.chosen:
            without.append(c.target.label)
    order = [RANKED.get(manifest.ranked_by), manifest.base and f"base {manifest.base}"]
    dropped = sum(accuracies.dropped for accuracies in sources)
    return Verdict(
        domain=manifest.domain,
        outcome=overall.outcome,
        groups=tuple(verdicts),
        overall=overall,
        results=tuple(accuracies.meaning for accuracies in sources),
        without=tuple(without),
        points=tuple(points),
        manifest=manifest.place,
        list=f"the {manifest.k} best of each group, {manifest.audit_sample} others drawn at random",
        task=manifest.task,
        metric=manifest.metric,
        order=", ".join(filter(None, order)),
        dropped=dropped,
        **_slopes(manifest, candidates, survivors=dropped > 0),
    )


def _slopes(
    manifest: Manifest, candidates: Sequence[Candidate], *, survivors: bool
) -> dict[str, Any]:
    """The slope of the results and ours, and the places of the largest group, as fields of a verdict.

    A race's survivors were chosen by their results: where a race dropped any, its random sample counts
    alone, if it was asked everything.
    """
    places: dict[tuple[str, str], int] = {}
    evaluated: dict[tuple[str, str], list[Candidate]] = {}
    is_complete = True
    for c in candidates:
        if c.group not in manifest.kinds:
            continue
        places[c.group] = max(c.rank, places.get(c.group, 0))
        of_group = evaluated.setdefault(c.group, [])
        is_random = c.chosen == "audit"
        if math.isnan(c.accuracy):
            is_complete = is_complete and not is_random
        elif is_random or not survivors:
            of_group.append(c)
    if not places:
        return {}
    # Without a single kind, or with the user's slope, the smaller one.
    (kind, *others) = set(manifest.kinds.values())
    ours = SLOPES[FINE_TUNES] if others else SLOPES.get(kind, SLOPES[FINE_TUNES])
    fields: dict[str, Any] = {"ours": ours, "places": max(places.values())}
    if survivors and not is_complete:
        return fields
    groups = []
    near = NEAR
    for group, members in evaluated.items():
        if len(members) > 1:
            scores = normal_scores(places[group])[[c.rank - 1 for c in members]]
            accuracies = np.array([c.accuracy for c in members])
            groups.append((scores, accuracies))
            if accuracies.max() > 1:  # per cent
                near = 100 * NEAR
    if groups:
        fields["slope"] = fitted(groups, ours, near)
    return fields


def _titles(candidates: Sequence[Candidate]) -> list[str]:
    """The title of each candidate's group; with its family if two titles would be the same."""
    members: dict[tuple[str, str], list[Target]] = {}
    for c in candidates:
        members.setdefault(c.group, []).append(c.target)
    titles = {group: title_of(*group, targets) for group, targets in members.items()}
    if len(set(titles.values())) < len(titles):
        titles = {group: " · ".join(group) for group in members}
    return [titles[c.group] for c in candidates]


def _group(members: Sequence[Candidate]) -> GroupResults:
    """A group's results against the order that the screen gave."""
    ranks = []
    accuracies = []
    reasons = []
    for c in members:
        ranks.append(float(c.rank))
        accuracies.append(c.accuracy)
        reasons.append(c.chosen)
    chosen = np.array(reasons)
    return GroupResults(-np.array(ranks), np.array(accuracies), chosen == "rank", chosen == "audit")


def _verdict(name: str, results: Sequence[GroupResults], line: Agreement) -> GroupVerdict:
    """The verdict on groups, compared only inside each, or on one group."""
    numbers: Counter[str] = Counter()
    compared = []
    for group in results:
        numbers["results"] += int(group.known.sum())
        numbers["candidates"] += len(group.figure)
        numbers["listed"] += int(group.listed.sum())
        numbers["audited"] += int(group.audited.sum())
        if len(group.figure) > 1:
            compared.append(group)
    right, low, high = map(_defined, decision_accuracy(results))
    stands_for_all = bool(compared) and all(group.stands_for_all for group in compared)
    outside: dict[str, Any] = missed(results[0]) if len(results) == 1 else {}
    return GroupVerdict(
        group=name,
        outcome=_outcome(line, high, stands_for_all),
        results=numbers["results"],
        candidates=numbers["candidates"],
        listed=numbers["listed"],
        audited=numbers["audited"],
        spearman=_defined(line.spearman),
        p=_defined(line.spearman_p),
        right=right,
        low=low,
        high=high,
        stands_for_all=stands_for_all,
        reason=line.reason,
        **outside,
    )


def _outcome(line: Agreement, high: float | None, stands_for_all: bool) -> Outcome:
    if not math.isnan(line.spearman) and line.spearman_p <= LEVEL:
        return "works" if line.spearman > 0 else "misleads"
    # Pairs inside a list differ little: the order may exist even if they do not show it.
    return "chance" if stands_for_all and high is not None and high < USELESS else "unknown"


def enough_results(share: float) -> int:
    """Fewest results in a group, 4 or more, that show a decision accuracy ``share`` > 0.5 in 4 of 5 cases.

    At 5 %, two-sided, by the variance of tau without any relation, 2 (2n + 5) / (9n (n - 1)): Kendall (1938).
    """
    tau = 2 * share - 1
    point = normal_point(1) + 0.8416
    n = 4
    while point * math.sqrt(2 * (2 * n + 5) / (9 * n * (n - 1))) > tau:
        n += 1
    return n


def _rated(
    manifest: Manifest, sources: Sequence[str], metric: str | None
) -> tuple[list[Candidate], list[Accuracies]]:
    """The candidates with their accuracies, and each source's accuracies."""
    targets = [c.target for c in manifest.candidates]
    places: dict[int, str] = {}
    read = []
    for source in sources:
        accuracies = read_accuracies(source, metric)
        renamed = [_by_label(rated, manifest.candidates) for rated in accuracies.rated]
        accuracies = replace(accuracies, rated=tuple(renamed))
        read.append(accuracies)
        for i, target in enumerate(accuracies.of(targets)):
            known = targets[i].accuracy
            if target.accuracy is None:
                continue
            if known is not None and known != target.accuracy:
                raise UsageError(
                    f"{target.name}: expected one result, got {known:g} in {places[i]} and "
                    f"{target.accuracy:g} in {source}; give one source of each, or name one task with :TASK"
                )
            targets[i] = target
            places[i] = source
    pairs = zip(manifest.candidates, targets, strict=True)
    return [replace(c, target=target) for c, target in pairs], read


def _by_label(rated: Rated, candidates: Sequence[Candidate]) -> Rated:
    """A result for the screened commit, under the requested revision and file."""
    if rated.revision is None:
        return rated
    for c in candidates:
        if (c.target.repo, c.revision) != (rated.name, rated.revision):
            continue
        file = c.target.file
        if rated.file is None or (file and file.lower() in rated.file.lower()):
            return replace(rated, name=c.target.label, revision=None)
    return rated


def _defined(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
