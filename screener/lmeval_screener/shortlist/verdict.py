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
from lmeval_dispersion.errors import DispersionError, UsageError, count
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
    """The verdict on one group, or on all groups together.

    A figure that is not defined is None. The fields from ``best`` on are those of
    `estimates.missed`; they are None in the verdict on several groups, and if no checkpoint on the
    list has a result.

    Attributes:
        group: Title of the group; ``all groups`` for the verdict on all.
        outcome: ``works``; ``misleads``, if the order is reversed; ``chance``, if the order is
            hardly better than a random one; or ``unknown``, if the results show none of these.
        results: Number of candidates with a result.
        candidates: Number of screened checkpoints, without the base and checkpoints that lack the
            figure that ranks their group.
        spearman: Rank correlation of the screen's order with the results, inside groups.
        p: Two-sided p-value of the correlation, by permutation.
        right: Share of pairs that the screen orders as the results do.
        low: Lower end of the 95 % interval of ``right``.
        high: Upper end of this interval.
        listed: Number of candidates on the short list.
        audited: Number of candidates not on the list that were drawn at random to be evaluated.
        stands_for_all: Whether the pairs represent all candidates, not only those with results.
        separate: Whether the order of this group alone differs from a random one, by a test that is
            corrected for the number of groups (Holm).
        reason: Why there is no correlation; empty if there is one.
        best: Best accuracy on the list.
        regret: How much worse ``best`` is than the best accuracy of all candidates.
        at_random: Expected regret of an equally long list that is drawn at random.
        seen: How much worse ``best`` is than the best known accuracy.
        others: Number of candidates that are not on the list.
        drawn: Number of results of candidates that were drawn at random from the ``others``.
        better_seen: Number of the ``drawn`` results that are better than ``best``.
        better: Number of the ``others`` that are better than ``best``, counted or estimated.
        better_low: Lower end of the 95 % interval of ``better``.
        better_high: Upper end of this interval.
        excess: By how much the ``others`` are better than ``best`` on average, where worse ones
            count 0.
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
    best: Annotated[float | None, Col("Best listed", ".3g")] = None
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
    """A candidate with a result.

    Attributes:
        label: Label of the checkpoint.
        group: Title of the checkpoint's group.
        ratio: Ratio of the checkpoint; None if unknown.
        G: Gap G of the checkpoint.
        accuracy: The result, as a share or in per cent, as in its source.
        chosen: Why the checkpoint was to be evaluated: ``rank`` if it was on the short list,
            ``audit`` if it was drawn at random; None if it was not to be evaluated.
    """

    label: Annotated[str, Col("Checkpoint")]
    group: Annotated[str, Col("Group", drop=1)]
    ratio: Annotated[float | None, Col("Ratio", ".3f")]
    G: Annotated[float, Col("G", ".3f", drop=2)]
    accuracy: Annotated[float, Col("Accuracy", ".3g")]
    chosen: Annotated[str | None, Col("Chosen", drop=1)]


@dataclass(frozen=True, repr=False)
class Verdict(Report):
    """Whether the screen works, by the results of a short list.

    Attributes:
        domain: Name of the domain's token set.
        outcome: The verdict on all groups together, as in `GroupVerdict`.
        groups: The verdict on each group.
        overall: The verdict on all groups together; checkpoints are compared only within their
            group.
        results: The sources of results, each in words.
        without: Labels of the checkpoints to evaluate that have no result yet.
        points: The candidates with a result.
        manifest: File of the short list.
        list: The rule by which the list was chosen, in words.
        task: Task of the screening; empty if none was named.
        order: The figure that ranked, and the base if there was one; empty if unknown.
        slope: How strongly the ranks predict accuracy in these results, fitted with ``ours`` as the
            prior. None if the order has no known chances, if no group has two results that count,
            or if a race dropped checkpoints and some of those drawn at random have no result.
        ours: The slope that we measured on checkpoints of the same kind, or on fine-tunes if the
            groups are of several kinds; None if the order has no known chances.
        dropped: Number of checkpoints that a race dropped before they had answered all questions.
        places: Number of ranks in the largest group whose chances are known; 0 if there is none.
        metric: Distance of G; empty if unknown.
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
        """Write ``slope`` to a file for `screen-checkpoints --slope`.

        Returns:
            A sentence that says what was written, and how to use the file.

        Raises:
            UsageError: The file exists and does not hold an earlier slope.
            DispersionError: ``slope`` is None, or the file cannot be written.
        """
        if self.slope is None or self.ours is None:
            why = (
                "a slope needs checkpoints that were ranked by the ratio, whose ratios differ by "
                "more than noise, and that are not steps of one training run; screen these again "
                "with `--rank-by ratio` if they were ranked by G, or else screen others"
            )
            if self.ours is not None:
                why = "no group has two results; evaluate more of the list"
                if self.dropped:
                    why = (
                        "a race drops checkpoints by their results, so those that remain give no "
                        f"slope; evaluate the {count(self.dropped, 'checkpoint')} that it dropped, "
                        "and give these results too"
                    )
            raise DispersionError(f"no slope was written to {path}: {why}")
        keep_slope(Path(path), self.slope, self.ours.kind, self.task or self.domain)
        kept = f"wrote your slope k {self.slope.k:.2f} for {self.ours.kind} to {path}"
        return f"{kept}; use it with `screen-checkpoints … --slope {path}`"

    def tables(self) -> Mapping[str, Table]:
        """Return three tables by name.

        ``groups`` has the verdict on each group, ``lists`` compares each group's short list with
        its other candidates, and ``points`` has each checkpoint with a result.
        """
        lines = self.groups
        if len(lines) > 1:
            lines = (*lines, self.overall)
        return {
            "groups": Table.of(lines, "", name="groups", hide=_DETAILS),
            "lists": Table.of(self.groups, "", name="lists", hide=_FIRST),
            "points": Table.of(self.points, "", name="points"),
        }

    def charts(self) -> Mapping[str, Chart]:
        """Return one chart, ``points``: accuracy against the figure that ranked the checkpoints.

        If a checkpoint has no ratio, the figure is G.
        """
        figure = "ratio"
        title = "ratio"
        by_gap = self.order.startswith(RANKED["gap"])
        if by_gap or any(point.ratio is None for point in self.points):
            figure = "G"
            title = f"{DISTANCES.get(self.metric, '')} gap G".strip()

        def draw() -> Spec:
            return accuracy_points([fields_of(point) for point in self.points], figure, title)

        description = f"{count(len(self.points), 'checkpoint')} with a result, by group."
        return {"points": Chart(draw, f"Accuracy against {figure}", description, name="accuracy")}

    def context(self) -> Mapping[str, Any]:
        """Return the template's values.

        ``enough`` is the number of results that would be enough; ``exact`` are the groups whose
        results are complete, ``drawn`` those with results of candidates drawn at random, and
        ``apart`` those that are ``separate``. ``first_for(slope)`` is the number of ranks that hold
        the best checkpoint with the probability ``within``.
        """
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
    """Check whether the screen works, by the results of a short list.

    Raises:
        UsageError: The manifest or a source of results cannot be read, a source has results of none
            of the manifest's checkpoints, or two results of a checkpoint differ.
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
        list=_rule_of(manifest),
        task=manifest.task,
        metric=manifest.metric,
        order=", ".join(filter(None, order)),
        dropped=dropped,
        **_slopes(manifest, candidates, survivors=dropped > 0),
    )


def _rule_of(manifest: Manifest) -> str:
    """The rule by which a short list was chosen, in words."""
    ranks = "rank 1" if manifest.k == 1 else f"ranks 1–{manifest.k}"
    rule = f"at most {ranks} of each group"
    if manifest.audit_sample:
        rule += f", and {count(manifest.audit_sample, 'other')} of each group drawn at random"
    return rule


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
    """Return how many results in one group are enough to show that a screen works.

    It is the smallest number, at least 4, with which a two-sided test at 5 % succeeds in 4 of 5
    cases, by a normal approximation with the variance of Kendall's tau between unrelated orders,
    2 (2n + 5) / (9n (n - 1)); source: Kendall (1938).

    Args:
        share: The screen's true share of pairs in the right order, above 0.5.
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
                    f"{target.accuracy:g} in {source}; leave one of them out, or name the task "
                    "with :TASK"
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
