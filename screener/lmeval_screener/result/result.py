"""The result of a screening and its report, whose layout is in ``screening.jinja``.

The JSON output, ``screen-checkpoints/3``, is documented in docs/reference/screening.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from lmeval_dispersion.errors import NothingScreenedError, UsageError, count
from lmeval_dispersion.evidence import OUR_MODELS, Slope
from lmeval_dispersion.report import Chart, Column, Report, Row, Table
from lmeval_dispersion.report.cells import json_value, shown
from lmeval_dispersion.report.declared import listed
from lmeval_dispersion.report.document import Mark, fields_of
from lmeval_screener.chance import WITHIN, Own
from lmeval_screener.figures import difference
from lmeval_screener.orders import DISTANCES, Distance, RankBy
from lmeval_screener.ranking import Agreement, agreements
from lmeval_screener.result import answer, columns
from lmeval_screener.result.gate import Gate
from lmeval_screener.screened import (
    RANKED,
    Failed,
    Group,
    Screened,
    grouped,
)
from lmeval_screener.tokens.sets import Token
from lmeval_screener.weights import copies

if TYPE_CHECKING:
    from lmeval_screener.registry.news import News
    from lmeval_screener.shortlist.choice import Shortlist
    from lmeval_screener.shortlist.verdict import Verdict

SCHEMA = "screen-checkpoints/3"
_SCOPES = {"within groups": "all, inside groups", "overall": "all, across groups (not supported)"}
_LONG = 40  # rows of a group that a terminal shows whole
# Rows that it shows of a longer group.
_TOP = 15
_BOTTOM = 3
_NO_CUTS: Mapping[int, str] = MappingProxyType({})


@dataclass(frozen=True, repr=False)
class Result(Report):
    """The result of a screening.

    Attributes:
        domain: Name of the token set of the domain, from whose words the gap G is computed.
        task: Name of the task that was asked for; empty for none.
        answers: Name of the set of answer tokens that the ratio uses; empty if it uses the
            domain's tokens.
        reference: Name of the token set of everyday words, with which the domain is compared.
        ranked_by: The requested ranking figure, ``ratio`` or ``gap`` (G); if none was requested,
            that of the first group.
        base: Label of the base that the other checkpoints were trained from, or the labels of
            several groups' bases, joined by commas; empty if unknown.
        checkpoints: The screened checkpoints, group by group and best first.
        failed: The checkpoints that could not be screened, with reasons.
        of_base: Adapters that leave the head unchanged and whose base could not be read
            (``RowsOfBase``); they count neither as screened nor as failed.
        seconds: Wall time of the screening, in seconds.
        bytes_read: Bytes transferred, including those for failed checkpoints and for listings.
        requests: Number of requests, including those for failed checkpoints and for listings.
        gate: The answer of ``--fail-if-below``; None without that option.
        chosen: The short list that the report shows; None if it shows all checkpoints.
        accuracy: What the supplied accuracies are, in words; empty if not described.
        news: What has changed in the registry; None if that was not asked for.
        slope: How strongly ranks predicted accuracy in the user's own results, from which chances
            are computed; None to compute chances from our own models.
    """

    template: ClassVar[str] = "screening.jinja"
    schema: ClassVar[str] = SCHEMA
    libraries: ClassVar[Sequence[str]] = ("numpy", "huggingface-hub")
    guide: ClassVar[str] = "docs/reference/screening.md"
    each: ClassVar[str] = "checkpoints"

    _INNER: ClassVar[Set[str]] = {*Report._INNER, "head", "shown", "chosen"}

    domain: str
    reference: str
    checkpoints: tuple[Screened, ...]
    failed: tuple[Failed, ...]
    seconds: float
    bytes_read: int
    requests: int
    gate: Gate | None = None
    chosen: Shortlist | None = None
    accuracy: str = ""
    news: News | None = None
    task: str = ""
    answers: str = ""
    ranked_by: RankBy = "ratio"
    base: str = ""
    slope: Own | None = None
    of_base: tuple[Failed, ...] = ()

    @property
    def subject(self) -> str:
        """What was screened for: the task if one was named, else the domain."""
        return self.task or self.domain

    @property
    def metric(self) -> Distance:
        """The distance that G uses in the first group; ``cosine`` if nothing was screened.

        `Screened.metric` is the distance for a single checkpoint.
        """
        return self.groups[0].metric if self.groups else "cosine"

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups; the checkpoints of each are ranked against one another, best first."""
        return grouped(self.checkpoints, self.slope)

    @property
    def _everyone(self) -> int:
        """Number of requested checkpoints; a registry may have older figures of failed ones."""
        labels = {f.label for f in (*self.failed, *self.of_base)}
        labels.update(c.label for c in self.checkpoints)
        return len(labels)

    @property
    def best(self) -> Screened:
        """The checkpoint that ranks first in the first group.

        Raises:
            NothingScreenedError: No checkpoint was screened, or only the base; the message says
                why.
        """
        if not self.checkpoints:
            sentences = answer.rows_of_base(self.of_base, alone=True)
            if self.failed:
                sentences = [answer.not_screened(self.failed), *sentences]
            raise NothingScreenedError(f"there is no best checkpoint: {' '.join(sentences)}")
        if not self.groups[0].candidates:
            base = self.groups[0].checkpoints[0].label
            raise NothingScreenedError(
                f"there is no best checkpoint: only the base {base} was screened; name other "
                "checkpoints too"
            )
        return self.groups[0].candidates[0]

    @property
    def exit_code(self) -> int:
        """Exit status of the command: the first of these that applies.

        - 4: the gate (``--fail-if-below``) found checkpoints below its reference.
        - 1: the gate could compare nothing.
        - 5: the registry has news that is worth an evaluation.
        - 3: some checkpoints failed; with news, only if they failed for the first time or all did.
        - 1: all checkpoints failed, and no older figures are known.
        - 0: otherwise.
        """
        if self.gate is not None and self.gate.below:
            return 4
        if self.gate is not None and not self.gate.passed:
            return 1
        if self.news is not None and self.news.worth:
            return 5
        if self.news is not None and len(self.failed) < self._everyone:
            return self.news.status
        if not self.failed:
            return 0
        return 3 if self.checkpoints or self.of_base else 1

    def chance(self, better: str, worse: str) -> float | None:
        """Return the chance that one checkpoint is more accurate than another; None if unknown.

        The chance applies to two checkpoints whose accuracies differ by more than 0.01.

        Args:
            better: Label of the first checkpoint.
            worse: Label of the second checkpoint.

        Raises:
            UnknownNameError: One of the labels belongs to no checkpoint.
            UsageError: The two checkpoints are in different groups.
        """
        groups = {c: group for group in self.groups for c in group.checkpoints}
        first: Screened = self[better]
        second: Screened = self[worse]
        if groups[first] is not groups[second]:
            raise UsageError(
                f"expected two checkpoints of one group, got {better} of {groups[first].title} and "
                f"{worse} of {groups[second].title}; choose both from one of `groups`"
            )
        return groups[first].chance(first, second)

    def first_for(self, chance: float = WITHIN) -> int:
        """Return how many of the top ranks are needed to include the most accurate checkpoint.

        This is the smallest number of ranks that contain it with a chance of at least ``chance``,
        or the number of all ranks if that is not reached or no chances are known.

        Raises:
            UsageError: ``chance`` is not above 0 and at most 1, or there is not exactly one group
                (use `Group.first_for`).
        """
        if not 0 < chance <= 1:
            raise UsageError(
                f"expected a number above 0 and at most 1, got {chance}", argument="chance"
            )
        if len(self.groups) != 1:
            raise UsageError(
                f"expected a screening with one group, got {len(self.groups)}; call "
                f"first_for({chance}) on each of `groups`, if there are several"
            )
        return self.groups[0].first_for(chance)

    def shortlist(self, k: int | None = None, *, audit_sample: int = 0, seed: int = 0) -> Shortlist:
        """Choose the first ranks of each group, and some of the other checkpoints at random.

        Args:
            k: Number of ranks; None for as many as contain the best checkpoint with a chance of
                90 % (`Group.first_for`).
            audit_sample: Number of other checkpoints of each group to add at random.
            seed: Seed of the random sample.

        Raises:
            UsageError: ``k`` is below 1, or ``audit_sample`` below 0.
        """
        from lmeval_screener.shortlist.choice import shortlist

        return shortlist(self.groups, k, audit_sample=audit_sample, seed=seed)

    def verify(self, *results: str | Path) -> Verdict:
        """Compare the screen's order with measured results, and return the verdict.

        The verdict is on the short list if there is one, otherwise on every checkpoint.

        Args:
            results: Results or samples of lm-eval, logs of Inspect, folders of these, or CSV files.

        Raises:
            DispersionError: Results cannot be read or do not fit; see `shortlist.verdict.verify`.
        """
        from lmeval_screener.shortlist.manifest import manifest_dict, shortlist_manifest
        from lmeval_screener.shortlist.verdict import verify

        everything = max((len(group.checkpoints) for group in self.groups), default=1)
        chosen = self.chosen or self.shortlist(everything)
        content = manifest_dict(self.head(), chosen, tasks=(), command="")
        return verify(shortlist_manifest(content, "the screening"), results)

    def race(self, tasks: str, **options: Any) -> Any:
        """Race the checkpoints of the short list on lm-eval's tasks.

        Without a short list, that of ``shortlist()`` is raced. ``options`` and the result are those
        of `lmeval_dispersion.race`.
        """
        import lmeval_dispersion

        return lmeval_dispersion.race(self, tasks=tasks, **options)

    def shown(self, chosen: Shortlist) -> Result:
        """Return this result with a short list, to which reports are then limited."""
        marked: dict[str, Screened] = {}
        for choice in chosen.groups:
            marked.update((c.label, c) for c in choice.group.checkpoints)
        checkpoints = tuple(marked.get(c.label, c) for c in self.checkpoints)
        return replace(self, checkpoints=checkpoints, chosen=chosen)

    @cached_property
    def agreement(self) -> list[Agreement]:
        """Rank correlation of the ranking figure with supplied accuracies, by group and overall.

        Empty if no accuracies were supplied.
        """
        figures = []
        accuracies = []
        names = []
        for group in self.groups:
            for c in group.checkpoints:
                if c.accuracy is not None and not c.is_set_aside:
                    figures.append(c.figure.mean)
                    accuracies.append(c.accuracy)
                    names.append(group.name)
        return agreements(figures, accuracies, names)

    # --- forms for programs -----------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON output, ``screen-checkpoints/3``, as plain Python values."""
        content = self.head() | {"answer": self.answer()}
        for group, members in self._members.items():
            content["checkpoints"] += [columns.entry(c, group) for c in members]
        if self.agreement:
            content["agreement"] = json_value(self.agreement)
        if self.chosen is not None:
            content["shortlist"] = self.chosen.to_dict()
        return content

    def head(self) -> dict[str, Any]:
        """Return the JSON output without answer, agreement and short list; ``checkpoints`` is empty."""
        head = {
            "schema": SCHEMA,
            "domain": self.domain,
            "task": self.task or None,
            "answers": self._answers(),
            "reference": self.reference,
            "metric": self.metric,
            "ranked_by": self.ranked_by,
            "base": self.base or None,
            "slope": self.slope and self.slope.to_dict(),
            "se_covers": "choice of tokens",  # not training: runs that differ only in their seed differ too
            "checkpoints": [],
            "tokens": self._tokens(),
            "failed": list(map(_entry, self.failed)),
            "of_base": list(map(_entry, self.of_base)),
            "totals": {
                "checkpoints": len(self.checkpoints),
                "bytes_read": self.bytes_read,
                "requests": self.requests,
                "seconds": round(self.seconds, 3),
            },
        }
        if self.gate is not None:
            head["gate"] = self.gate.to_dict()
        return head

    @cached_property
    def _members(self) -> dict[Group, list[Screened]]:
        """The checkpoints of a short list, else all; a training in the order of its steps."""
        members = {}
        for group in self.groups:
            shown = _in_order(group)
            if self.chosen is not None:
                shown = [c for c in shown if c.chosen is not None]
            members[group] = shown
        return members

    def rows(self) -> Sequence[Row]:
        """Return the rows of CSV and of the data frame, one for each checkpoint.

        If the report is limited to a short list, so are the rows.
        """
        rows = []
        for group, members in self._members.items():
            rows += [columns.flat_row(c, group) for c in members]
        return rows

    def _tokens(self) -> list[dict[str, Any]]:
        """T and R of each tokenizer group, once: members compare the same pieces at the same rows."""
        entries: dict[str, dict[str, Any]] = {}
        for c in self.checkpoints:
            if c.family in entries:
                continue
            entry = entries[c.family] = {
                "family": c.family,
                "domain": _pieces(c.resolution.domain),
                "reference": _pieces(c.resolution.reference),
            }
            if c.resolution.answers:
                entry["answers"] = _pieces(c.resolution.answers)
        return list(entries.values())

    def _answers(self) -> dict[str, Any] | None:
        """The answers of the ratio, and the number of their tokens in each tokenizer group."""
        if not self.answers:
            return None
        counts = {}
        for c in self.checkpoints:
            if c.resolution.answers:
                counts[c.family] = len(c.resolution.answers)
        return {"name": self.answers, "tokens": counts}

    # --- the report -------------------------------------------------------------------------------------

    def tables(self) -> Mapping[str, Table]:
        """Return the tables of the report by name.

        Group N, counted from 0, has the tables ``rankingN`` and ``figuresN``. The tables of the
        whole screening are ``failed``, ``of_base``, ``read``, ``agreement`` and ``tokens``.
        """
        tables: dict[str, Table] = {}
        everyone: list[Row] = []
        for place, (group, members) in enumerate(self._members.items()):
            first = answer.first_of(group, self._list_places.get(group.name))
            rows = {c: _row(c, group, first) for c in members}
            tables[f"ranking{place}"] = self._ranking(group, rows, first)
            tables[f"figures{place}"] = _figures(group, rows)
            everyone += rows.values()
        return tables | {
            "failed": Table(_failures(self.failed), _FAILED, "", "failed"),
            "of_base": Table(_failures(self.of_base), _FAILED, "", "of_base"),
            "read": Table(everyone, columns.read_columns(), "", "read").filled(),
            "agreement": Table(self._agreement_rows(), _AGREEMENT, "", "agreement"),
            "tokens": Table(self._token_rows(), _TOKENS, "", "tokens"),
        }

    def _agreement_rows(self) -> list[Row]:
        rows: list[Row] = []
        for line in self.agreement:
            kind = "all" if line.exact else "drawn"
            names = {
                "group": line.group or _SCOPES[line.scope],
                "permutations": line.reason or f"{kind}: {line.permutations:,}",
            }
            rows.append(fields_of(line) | names)
        return rows

    def _token_rows(self) -> list[Row]:
        sets = {
            "domain": f"T, {self.domain}",
            "reference": f"R, {self.reference}",
            "answers": f"T of the ratio, answers of {self.answers}",
        }
        rows: list[Row] = []
        for tokens in self._tokens():
            for side, name in sets.items():
                if side in tokens:
                    pieces = tokens[side]["pieces"]
                    rows.append(
                        {
                            "family": tokens["family"],
                            "set": name,
                            "variant": " and ".join(tokens[side]["variants"]),
                            "tokens": " ".join(f"{piece}:{row}" for piece, row in pieces.items()),
                        }
                    )
        return rows

    def _ranking(
        self, group: Group, rows: Mapping[Screened, Row], first: Sequence[Screened]
    ) -> Table:
        """A group's ranking, each figure with its meaning; ``first`` are to be evaluated first."""
        placed = {c: row for c, row in rows.items() if not c.is_set_aside}
        cuts = self._cuts(group, list(placed), first)
        are_shares = all((c.accuracy or 0) <= 1 for c in rows)
        alike = len({c.rank for c in group.candidates}) == 1 < len(group.candidates)
        columns = []
        if not group.is_noise and not alike:
            columns.append(Column("rank", "Rank", "d", short="#"))
        columns += [
            _NAMES_OF[bool(group.steps)],
            *self._ranking_figures(group, rows),
            self._against_base(group),
            Column("chosen", "Chosen", drop=2),
            Column("accuracy", "Accuracy", ".3f" if are_shares else ".1f", short="Acc.", drop=3),
        ]
        return Table(
            list(placed.values()),
            columns,
            "",
            f"ranking-{group.anchor}",
            excerpt=_excerpt(len(placed), is_training=bool(group.steps), cuts=cuts),
            marks=_marks(list(placed), first),
            cuts=cuts,
        ).filled()

    def _ranking_figures(self, group: Group, members: Iterable[Screened]) -> list[Column]:
        """The columns of ratio and G, the one that ranks first."""
        domain = f"{self.domain} tokens"
        others = "everyday words"
        if self.reference != "reference":
            others = f"the words of {self.reference}"
        gap = f"how far the model keeps {domain} from one another and from {others}"
        if group.metric != "cosine":
            gap += f", {DISTANCES[group.metric]} distance"
        answers = group.checkpoints[0].resolution.answers
        if answers:
            domain = f"{len(answers)} answer tokens of {self.answers}"
        format_of_gap = f".{answer.decimals([c.gap for c in members])}f"
        figures = [
            Column("ratio", "Ratio", ".3f", hint=f"spread of {domain} divided by that of {others}"),
            Column(f"gap_{group.metric}", "G", format_of_gap, hint=gap),
        ]
        if group.figure == "G":
            figures.reverse()
        ranking, other = figures
        if group.steps:
            error = "2 standard errors of the difference from the step before"
            ranking = replace(ranking, dots="below", reach="twice", whisker=error)
        else:
            error = "2 standard errors over the choice of tokens"
            ranking = replace(ranking, dots="both", reach="reach", whisker=error)
        return [ranking, replace(other, drop=1)]

    def _against_base(self, group: Group) -> Column:
        sides = [c.against for c in group.checkpoints if c.against is not None]
        return Column(
            "against_base",
            "Against the base",
            f".{answer.decimals(sides)}f",
            "against_base_se",
            "the ratio minus the base's ratio, with the paired standard error",
            drop=1,
        )

    @cached_property
    def _list_places(self) -> dict[str, int]:
        """The places of the user's own short list, by group; none where it takes all."""
        choices = self.chosen.groups if self.chosen else ()
        return {choice.group.name: choice.k for choice in choices if choice.k < choice.places}

    def _cuts(
        self, group: Group, members: Sequence[Screened], first: Sequence[Screened]
    ) -> dict[int, str]:
        """The line below the checkpoints to evaluate first, with their chance if it is measured."""
        if not first or group.chances is None or not group.is_measured:
            return {}
        last = first[-1].rank
        held = f"{100 * float(group.chances.holds_best[last - 1]):.0f} %"
        for place, c in enumerate(members):
            if group.has_place(c) and c.rank > last:
                return {place: f"{held} chance that the best is above"}
        return {}

    def charts(self) -> Mapping[str, Chart]:
        """Return the charts of the report by name.

        Group N, counted from 0, has the chart ``rankingN`` of its ranking figure. A group that is
        ranked by G also has ``partsN``, the parts of G. The steps of a training run that the ratio
        ranks also have ``gapN``, G along the steps. ``accuracy`` shows supplied accuracies.
        """
        # The parts of G come first: a picture (`-o fig.svg`) is the first chart, and this one is
        # figure 9 of the RD paper.
        drawn: dict[str, Chart] = {}
        for place, group in enumerate(self.groups):
            if group.steps:
                drawn[f"ranking{place}"] = _course_chart(group, group.figure)
                if group.figure == "ratio":
                    drawn[f"gap{place}"] = _course_chart(group, "G")
                continue
            if group.figure == "G":
                drawn[f"parts{place}"] = _parts_chart(group)
            drawn[f"ranking{place}"] = _ranking_chart(group)
        if self.agreement:
            drawn["accuracy"] = Chart(
                partial(_draw, "accuracy_chart", self.groups),
                f"Accuracy against {self._figure}",
                "One point for each checkpoint with an accuracy, by group.",
                name="accuracy",
            )
        return drawn

    def context(self) -> Mapping[str, Any]:
        """Return the values that the report's template uses, such as sentences and notes, by name."""
        members = list(itertools.chain.from_iterable(self._members.values()))
        set_aside: list[Screened] = []
        slopes: dict[Slope, None] = {}  # in order
        distances: set[str] = set()
        higher = ""
        for group in self.groups:
            set_aside += group.set_aside
            distances.add(DISTANCES[group.metric])
            if group.slope is not None:
                slopes[group.slope] = None
            if group.steps or answer.first_of(group):
                higher = RANKED[members[0].ranked_by].replace("highest", "Higher")
        whole = [line for line in self.agreement if line.scope != "group"] or self.agreement
        of_groups = answer.sentences_of(self.groups, self.subject, self.domain, self._list_places)
        of_base = answer.rows_of_base(self.of_base, alone=not self.checkpoints)
        ranked = [c for c in members if not c.is_set_aside]
        return {
            "sentences": [*of_groups, *of_base],
            "answered_groups": len(of_groups),
            "most_failed": len(self.failed) > self._everyone / 2,
            "failures": answer.failures(self.failed, self._everyone),
            "notes": answer.labels_by_note((note, c) for c in members for note in c.notes),
            "unknown": [
                *answer.unknown(ranked, alone=len(members) == 1),
                *self._without_base(),
                *self._without_own(),
            ],
            "higher": higher,
            "set_aside": answer.unknown(set_aside, alone=False),
            "copies": copies.said(members),
            "agreed": next(iter(whole), None),
            "figure": self._figure,
            "our_models": OUR_MODELS,
            "distances": listed(sorted(distances)),
            "slopes": slopes,
            "read": self._facts(),
        }

    @property
    def _figure(self) -> str:
        """The figure that ranks all groups; G if it ranks some."""
        return "G" if any(group.figure == "G" for group in self.groups) else "ratio"

    def _without_base(self) -> list[str]:
        """Groups that are not compared with the base, if there is a base."""
        titles = [g.title for g in self.groups if g.base is None or g.base.ratio is None]
        if not self.base or not titles:
            return []
        reason = "the tokenizer or the scale differs from the base's, or the base has no ratio"
        for failed in self.failed:
            if failed.label == self.base:
                reason = failed.error
        return [f"Not compared with the base {self.base} ({reason}): {listed(titles)}."]

    def _without_own(self) -> list[str]:
        """The note that no group is of the kind of the user's own slope."""
        if self.slope is None or any(group.slope is self.slope for group in self.groups):
            return []
        return [
            f"Your own slope was measured on {self.slope.kind}, so no chance here is computed from it."
        ]

    def _facts(self) -> dict[str, str]:
        """The tokens and what was transferred, by name; empty if none was screened."""
        if not self.checkpoints:
            return {}
        tokens = self.checkpoints[0].resolution
        facts = {
            "Tokens": f"T: {len(tokens.domain)} tokens of {self.domain}, "
            f"R: {len(tokens.reference)} tokens of {self.reference}; "
            f"digit scheme: {tokens.digit_scheme}"
        }
        if tokens.answers:
            facts["Ratio over"] = f"{len(tokens.answers)} answer tokens of {self.answers}"
        for name, words in (("T", tokens.dropped), ("R", tokens.dropped_reference)):
            if words:
                dropped = ", ".join(word.strip() for word in words)
                facts[f"Words of {name} that are not single tokens"] = dropped
        facts["Read"] = (
            f"{len(self.checkpoints)} screened, {len(self.failed)} failed; "
            f"{shown(self.bytes_read, 'bytes')} in {count(self.requests, 'request')}"
        )
        return facts


# --- charts -----------------------------------------------------------------------------------------------


def _draw(name: str, *values: Any) -> dict[str, Any]:
    """A chart by its function in `charts`, which is imported only for a page."""
    from lmeval_screener.result import charts

    specification: dict[str, Any] = getattr(charts, name)(*values)
    return specification


def _ranking_chart(group: Group) -> Chart:
    """The ranking figure of each checkpoint, or of the best if they are many."""
    ranked = len(group.checkpoints) - len(group.set_aside)
    most = f", the {answer.DRAWN} best of {ranked}" if ranked > answer.DRAWN else ""
    best = group.names[group.checkpoints[0]]
    return Chart(
        partial(_draw, "ranking", group),
        f"{_capital(group.figure)} of each checkpoint{most}",
        f"A dot for the {group.figure} of each checkpoint, best first; {best} is first.",
        "Error bars: ± two standard errors. They cover only the choice of tokens.",
        f"ranking-{group.anchor}",
    )


def _capital(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}"


def _course_chart(group: Group, figure: str) -> Chart:
    """The figure that ranks a training, or G, along its steps, with the accuracy where it is known.

    As figure 33 of the RD paper draws them: the caption has their rank correlation and its p-value.
    """
    name = _capital(figure)
    caption = f"{name} along the training of {group.title}"
    is_ranking = figure == group.figure
    figures = []
    accuracies = []
    for c in group.steps:
        if c.accuracy is not None:
            figures.append(c.figure.mean if is_ranking else c.gap.mean)
            accuracies.append(c.accuracy)
    if accuracies:
        agreed = Agreement.of("group", group.name, [(figures, accuracies)])
        correlation = agreed.reason
        if not correlation:
            p = shown(agreed.spearman_p, "p-value")
            correlation = f"Spearman {agreed.spearman:.3f}, p {p}, of {agreed.n} checkpoints"
        caption = f"{caption}, and the accuracy ({correlation})"
    draw = partial(_draw, "steps", group, figure)
    if not is_ranking:
        description = f"{name} against the training step."
        return Chart(draw, caption, description, name=f"gap-{group.anchor}")
    best = group.names[group.checkpoints[0]]
    return Chart(
        draw,
        caption,
        f"{name} against the training step; largest at {best}.",
        "Error bars: ± two standard errors of the difference from the previous step. They cover "
        "only the choice of tokens.",
        f"ranking-{group.anchor}",
    )


def _parts_chart(group: Group) -> Chart:
    """The parts of G with the accuracy, as figure 9 of the RD paper draws them."""
    caption = f"The parts of G ({DISTANCES[group.metric]} distance)"
    description = (
        "Bars: mean distance among domain tokens (D–D), from domain tokens to everyday words (D–NM), "
        "and their sum G; best first."
    )
    if any(c.accuracy is not None for c in group.checkpoints):
        caption += " and the accuracy"
        description += " Line: accuracy, on its own axis."
    draw = partial(_draw, "gap_parts", group)
    meaning = "D–D: within(T), among domain tokens. D–NM: between(T, R), from domain tokens to everyday words."
    return Chart(draw, caption, description, meaning, f"parts-{group.anchor}")


# --- tables: columns over the rows of CSV ---------------------------------------------------------------


_NAMES_OF = {True: Column("called", "Step"), False: Column("called", "Checkpoint")}


def _row(c: Screened, group: Group, first: Sequence[Screened]) -> dict[str, Any]:
    """A row of CSV, with the cells for readers only; those of ``first`` have a marked name."""
    name = group.names[c]
    if c.is_base:
        name += " (base)"
    if c in first:
        name = f"▶ {name}"
    elif first:
        name = f"  {name}"
    row = columns.flat_row(c, group) | {
        "called": name,
        "reach": 2 * c.figure.se,
        "chosen": c.chosen,
        "commit": c.revision[:12] if c.revision else "a folder",
    }
    other = group.neighbours.get(c)
    if other is not None:
        change = difference(c.figure, other.figure)
        row |= {"delta": change.mean, "delta_se": change.se, "twice": 2 * change.se}
    return row


def _marks(members: Sequence[Screened], first: Sequence[Screened]) -> dict[int, Mark]:
    """Marks of rows: checkpoints that the answer recommends, controls, and the base."""
    marks: dict[int, Mark] = {}
    for place, c in enumerate(members):
        if c in first:
            marks[place] = "pick"
        elif c.is_base or c.target.negative_control:
            marks[place] = "control"
    return marks


def _figures(group: Group, rows: Mapping[Screened, Row]) -> Table:
    """Both figures of a group with their errors, the parts of G, and the chances that ranks hold the best."""
    metric = group.metric
    digits = answer.decimals([c.gap for c in rows])
    figures = [
        Column("ratio", "Ratio", ".3f", "ratio_se"),
        Column(f"gap_{metric}", "G", f".{digits}f", f"gap_{metric}_se"),
    ]
    if group.figure == "G":
        figures.reverse()
    change = "Δ from previous" if group.steps else "Δ to next"
    figures.insert(1, Column("delta", change, ".4f", "delta_se", short="Δ", drop=2))
    parts = {
        "within_domain": ("within(T)", ""),
        "between": ("between(T, R)", "T, R"),
        "within_reference": ("within(R), control", "in R"),
    }
    for part, (heading, short) in parts.items():
        key = f"{part}_{metric}"
        figures.append(Column(key, heading, ".3f", f"{key}_se", short=short, drop=3))
    source = f"measured on our own {OUR_MODELS}"
    if isinstance(group.slope, Own):
        source = "by your own results"
    chance = f"chance that the best checkpoint is at this rank or above, {source}"
    figures.append(Column("holds_best", "Holds the best", ".0%", hint=chance, drop=1))
    return Table(
        list(rows.values()),
        [_NAMES_OF[bool(group.steps)], *figures],
        "",
        f"figures-{group.anchor}",
        excerpt=_excerpt(len(rows), is_training=bool(group.steps)),
    ).filled()


def _pieces(tokens: Sequence[Token]) -> dict[str, Any]:
    """The JSON of one side's tokens: their variants, and each piece with its row."""
    variants = {"space" if token.text.startswith(" ") else "bare" for token in tokens}
    return {
        "variants": sorted(variants),
        "pieces": {token.piece: token.id for token in tokens},
    }


_FAILED = [
    Column("label", "Checkpoint"),
    Column("error", "Error"),
    Column("message", "Why, and what to do"),
]
_AGREEMENT = [
    Column("group", "Group"),
    Column("n", "n", "d"),
    Column("spearman", "Spearman", ".3f"),
    Column("spearman_p", "p", "p-value"),
    Column("permutations", "Permutations", drop=1),
]
_TOKENS = [
    Column("family", "Family"),
    Column("set", "Set"),
    Column("variant", "Variant"),
    Column("tokens", "Piece:row"),
]


def _in_order(group: Group) -> list[Screened]:
    """A group's members for its tables: a training by its steps, after a base of another place."""
    if not group.steps:
        return list(group.checkpoints)
    others = [c for c in group.checkpoints if c not in group.trajectory]
    return [*others, *group.trajectory]


def _excerpt(
    count: int, *, is_training: bool, cuts: Mapping[int, str] = _NO_CUTS
) -> tuple[int, ...]:
    """Rows of a long ranking for short texts: the top, the rows next to ``cuts``, and the bottom."""
    if count <= _LONG:
        return ()
    if is_training:
        # A course needs its ends and evenly spaced steps between.
        parts = _TOP + _BOTTOM
        return tuple(sorted({round(i * (count - 1) / parts) for i in range(parts + 1)}))
    places = {*range(_TOP), *range(count - _BOTTOM, count)}
    for cut in cuts:
        places |= {cut - 1, cut}
    return tuple(sorted(places))


def _entry(f: Failed) -> dict[str, Any]:
    """The JSON entry of a checkpoint that was not screened."""
    return {name: getattr(f, name) for name in ("label", "repo", "revision", "error", "message")}


def _failures(failed: Sequence[Failed]) -> list[Row]:
    """The rows of failures, similar failures in one row."""
    similar: dict[tuple[str, str], list[Failed]] = {}
    for f in failed:
        message = f.message.replace(f.label, "ORG/NAME").replace(f.repo, "ORG/NAME")
        similar.setdefault((f.error, message), []).append(f)
    rows: list[Row] = []
    for (error, message), alike in similar.items():
        label = alike[0].label
        if len(alike) == 1:
            message = alike[0].message
        else:
            labels = ", ".join(f.label for f in alike[:3])
            more = ", …" if len(alike) > 3 else ""
            label = f"{len(alike)} checkpoints: {labels}{more}"
        rows.append({"label": label, "error": error, "message": message})
    return rows
