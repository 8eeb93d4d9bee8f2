"""A screening's result as a report; its sentences are in ``screening.jinja``.

The JSON contract, ``screen-checkpoints/3``, is documented in docs/reference/screening.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from lmeval_dispersion.errors import NothingScreenedError, UsageError
from lmeval_dispersion.evidence import OUR_MODELS
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
from lmeval_screener.weights import copies

if TYPE_CHECKING:
    from lmeval_screener.registry.news import News
    from lmeval_screener.shortlist.choice import Shortlist
    from lmeval_screener.shortlist.verdict import Verdict

SCHEMA = "screen-checkpoints/3"
_SCOPES = {"within groups": "all, inside groups", "overall": "all, across groups (not supported)"}
_LONG = 40  # rows of a group that a terminal shows whole
_TOP, _BOTTOM = 15, 3  # rows that it shows of a longer group
_NO_CUTS: Mapping[int, str] = MappingProxyType({})


@dataclass(frozen=True, repr=False)
class Result(Report):
    """A whole screening.

    Attributes:
        domain: Name of the domain token set.
        task: The named task; empty for none.
        answers: Name of the answer set of the ratio; empty if the ratio uses T of G.
        reference: Name of the reference token set.
        ranked_by: The figure asked for, ``gap`` or ``ratio``; else that of the first group.
        base: Label of the base that the others were trained from; empty if unknown.
        checkpoints: Screened checkpoints in the order of their groups, best first inside.
        failed: The others, with the reason.
        of_base: Adapters that leave the head to a base that could not be read (``RowsOfBase``): nothing was
            compared, and nothing failed.
        seconds: Wall time of the whole.
        bytes_read: Bytes transferred, including failed checkpoints and listings.
        requests: Requests likewise.
        gate: The answer of ``--fail-if-below``; None without that option.
        chosen: The short list that the report shows; None for all checkpoints.
        accuracy: The supplied accuracies, in words; empty if undescribed.
        news: The registry's news; None if they were not requested.
        slope: The slope of the user's own results, which the chances of its kind follow; None for ours.
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
        """The subject of the screening: the named task, else the domain."""
        return self.task or self.domain

    @property
    def metric(self) -> Distance:
        """The distance of G in the first group; `Screened.metric` has each checkpoint's."""
        return self.groups[0].metric if self.groups else "cosine"

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups in order, each with its checkpoints best first."""
        return grouped(self.checkpoints, self.slope)

    @property
    def _everyone(self) -> int:
        """Number of requested checkpoints; a registry may have older figures of failed ones."""
        unread = {f.label for f in (*self.failed, *self.of_base)}
        return len({c.label for c in self.checkpoints} | unread)

    @property
    def best(self) -> Screened:
        """The best checkpoint of the first group.

        Raises:
            NothingScreenedError: None was screened, or only the base: the message says why.
        """
        if not self.checkpoints:
            sentences = answer.rows_of_base(self.of_base, alone=True)
            if self.failed:
                sentences = [answer.not_screened(self.failed), *sentences]
            raise NothingScreenedError(f"there is no best checkpoint: {' '.join(sentences)}")
        if not self.groups[0].candidates:
            base = self.groups[0].checkpoints[0].label
            raise NothingScreenedError(
                f"there is no best checkpoint: only the base {base} was screened"
            )
        return self.groups[0].candidates[0]

    @property
    def exit_code(self) -> int:
        """Exit status of the command, the first that applies.

        4: some are below the gate; 1: it compared none; 5: news worth an evaluation; 3: some failed (with
        news: began to fail, or all failed); 1: all failed, without older figures; else 0.
        """
        if self.gate is not None and not self.gate.passed:
            return 4 if self.gate.below else 1
        if self.news is not None and self.news.worth:
            return 5
        if self.news is not None and len(self.failed) < self._everyone:
            return self.news.status
        if not self.failed:
            return 0
        return 3 if self.checkpoints or self.of_base else 1

    def chance(self, better: str, worse: str) -> float | None:
        """The chance that one checkpoint is more accurate than another, by their labels; None if unknown.

        It holds for two whose accuracies differ by more than 0.01; UsageError unless both are in one group.
        """
        places = {
            c.label: (group, c) for group in self.groups for c in group.checkpoints if not c.is_base
        }
        if missing := [label for label in (better, worse) if label not in places]:
            raise UsageError(
                f"expected a screened checkpoint, got {missing[0]!r}; see labels in `checkpoints`"
            )
        (group, a), (other, b) = places[better], places[worse]
        if group is not other:
            raise UsageError(
                f"expected two checkpoints of one group, got {better} of {group.title}, {worse} of "
                f"{other.title}"
            )
        return group.chance(a, b)

    def first_for(self, chance: float = WITHIN) -> int:
        """Number of first places that hold the best with this chance, or all; UsageError if not one group."""
        if not 0 < chance <= 1:
            raise UsageError(f"expected above 0, at most 1, got {chance}", argument="chance")
        if len(self.groups) != 1:
            raise UsageError(
                f"expected one group, got {len(self.groups)}; ask each of `groups`: Group.first_for({chance})"
            )
        return self.groups[0].first_for(chance)

    def shortlist(self, k: int | None = None, *, audit_sample: int = 0, seed: int = 0) -> Shortlist:
        """Choose the first places of each group, and some others at random.

        Args:
            k: Number of places; None for as many as hold the best with a chance of 90 % (`Group.first_for`).
            audit_sample: Number of others in each group to add at random.
            seed: Seed of the random sample.

        Raises:
            UsageError: ``k`` is below 1, or ``audit_sample`` below 0.
        """
        from lmeval_screener.shortlist.choice import shortlist

        return shortlist(self.groups, k, audit_sample=audit_sample, seed=seed)

    def verify(self, *results: str | Path) -> Verdict:
        """Check the order against results: the short list's if there is one, else all.

        Args:
            results: lm-eval's results or folders of them, or CSV files; raises as `shortlist.verdict.verify`.
        """
        from lmeval_screener.shortlist.manifest import manifest_dict, shortlist_manifest
        from lmeval_screener.shortlist.verdict import verify

        everything = max((len(group.checkpoints) for group in self.groups), default=1)
        chosen = self.chosen or self.shortlist(everything)
        content = manifest_dict(self.head(), chosen, tasks=(), command="")
        return verify(shortlist_manifest(content, "the screening"), results)

    def race(self, tasks: str, **options: Any) -> Any:
        """Race the short list, by default that of ``shortlist()``, on lm-eval's tasks; see ``race``."""
        import lmeval_dispersion

        return lmeval_dispersion.race(self, tasks=tasks, **options)

    def shown(self, chosen: Shortlist) -> Result:
        """The same result, reported with a short list."""
        of = {c.label: c for choice in chosen.groups for c in choice.group.checkpoints}
        return replace(
            self, checkpoints=tuple(of.get(c.label, c) for c in self.checkpoints), chosen=chosen
        )

    @cached_property
    def agreement(self) -> list[Agreement]:
        """Agreement of the ranking figure with supplied accuracies, per group and overall; empty for none."""
        rated = [
            (c.figure.mean, c.accuracy, group.name)
            for group in self.groups
            for c in group.checkpoints
            if c.accuracy is not None and not c.is_set_aside
        ]
        return agreements(
            [gap for gap, _, _ in rated],
            [accuracy for _, accuracy, _ in rated],
            [name for _, _, name in rated],
        )

    # --- forms for programs -----------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract ``screen-checkpoints/3`` as plain Python values."""
        content = self.head() | {"answer": self.answer()}
        content["checkpoints"] = [
            columns.entry(c, g) for g, members in self._members.items() for c in members
        ]
        if self.agreement:
            content["agreement"] = json_value(self.agreement)
        if self.chosen is not None:
            content["shortlist"] = self.chosen.to_dict()
        return content

    def head(self) -> dict[str, Any]:
        """The JSON contract without answer, agreement and short list; ``checkpoints`` is empty."""
        return {
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
            "failed": [_entry(f) for f in self.failed],
            "of_base": [_entry(f) for f in self.of_base],
            "totals": {
                "checkpoints": len(self.checkpoints),
                "bytes_read": self.bytes_read,
                "requests": self.requests,
                "seconds": round(self.seconds, 3),
            },
            **({} if self.gate is None else {"gate": self.gate.to_dict()}),
        }

    @cached_property
    def _members(self) -> dict[Group, list[Screened]]:
        """The checkpoints of a short list, else all; a training in the order of its steps."""
        return {
            group: [c for c in _in_order(group) if self.chosen is None or c.chosen is not None]
            for group in self.groups
        }

    def rows(self) -> Sequence[Row]:
        """The rows of CSV and of the data frame, one per checkpoint (of the short list, if one is shown)."""
        return [
            columns.flat_row(c, group) for group, members in self._members.items() for c in members
        ]

    def _tokens(self) -> list[dict[str, Any]]:
        """T and R of each tokenizer group, once: members compare the same pieces at the same rows."""
        first = {c.family: c.resolution for c in reversed(self.checkpoints)}
        return [
            {"family": family}
            | {
                side: {
                    "variants": sorted(
                        {"space" if t.text.startswith(" ") else "bare" for t in tokens}
                    ),
                    "pieces": {token.piece: token.id for token in tokens},
                }
                for side, tokens in (
                    ("domain", resolution.domain),
                    ("reference", resolution.reference),
                    *([("answers", resolution.answers)] if resolution.answers else []),
                )
            }
            for family, resolution in reversed(first.items())
        ]

    def _answers(self) -> dict[str, Any] | None:
        """The answers of the ratio, and the number of their tokens in each tokenizer group."""
        counts = {
            c.family: len(c.resolution.answers) for c in self.checkpoints if c.resolution.answers
        }
        return {"name": self.answers, "tokens": counts} if self.answers else None

    # --- the report -------------------------------------------------------------------------------------

    def tables(self) -> Mapping[str, Table]:
        """By name: each group's ranking and figures, failures, columns read, agreement and tokens."""
        tables, everyone = dict[str, Table](), list[Row]()
        for place, (group, members) in enumerate(self._members.items()):
            first = answer.first_of(group, self._places.get(group.name))
            rows = [
                columns.flat_row(c, group)
                | self._cells(c, group)
                | {"called": _marked(f"{group.names[c]}{' (base)' * c.is_base}", c, first)}
                for c in members
            ]
            everyone += rows
            placed = [c for c in members if not c.is_set_aside]
            of_placed = [row for row, c in zip(rows, members, strict=True) if not c.is_set_aside]
            cuts = self._cuts(group, placed, first)
            excerpt = _excerpt(placed, training=bool(group.steps), cuts=cuts)
            decimals = answer.decimals([c.gap for c in members])
            shares = all((c.accuracy or 0) <= 1 for c in members)
            ranking = self._ranking(decimals, ".3f" if shares else ".1f", group)
            figures = _figures(decimals, group, self._chance_of(group))
            drawn = _table(of_placed, ranking, f"ranking-{group.anchor}", excerpt)
            tables[f"ranking{place}"] = replace(drawn, marks=_marks(placed, first), cuts=cuts)
            of_all = _excerpt(members, training=bool(group.steps))
            tables[f"figures{place}"] = _table(rows, figures, f"figures-{group.anchor}", of_all)
        agreement = [
            fields_of(line)
            | {
                "group": line.group or _SCOPES[line.scope],
                "permutations": line.reason
                or f"{'all' if line.exact else 'drawn'}: {line.permutations:,}",
            }
            for line in self.agreement
        ]
        tokens = [
            {
                "family": tokens["family"],
                "set": name,
                "variant": " and ".join(tokens[side]["variants"]),
                "tokens": " ".join(
                    f"{piece}:{row}" for piece, row in tokens[side]["pieces"].items()
                ),
            }
            for tokens in self._tokens()
            for side, name in (
                ("domain", f"T, {self.domain}"),
                ("reference", f"R, {self.reference}"),
                ("answers", f"T of the ratio, answers of {self.answers}"),
            )
            if side in tokens
        ]
        return tables | {
            "failed": _table(_failures(self.failed), _FAILED, "failed"),
            "of_base": _table(_failures(self.of_base), _FAILED, "of_base"),
            "read": _table(everyone, columns.read_columns(), "read"),
            "agreement": _table(agreement, _AGREEMENT, "agreement"),
            "tokens": _table(tokens, _TOKENS, "tokens"),
        }

    def _cells(self, c: Screened, group: Group) -> dict[str, Any]:
        """The cells of a row for readers only."""
        other = group.neighbours.get(c)
        change = None if other is None else difference(c.figure, other.figure)
        return {
            "delta": change and change.mean,
            "delta_se": change and change.se,
            "twice": change and 2 * change.se,
            "reach": 2 * c.figure.se,
            "chosen": c.chosen,
            "commit": c.revision[:12] if c.revision else "a folder",
        }

    def _ranking(self, decimals: int, accuracy: str, group: Group) -> list[Column]:
        """The columns of a ranking, each figure with its meaning."""
        T, R = f"{self.domain} tokens", f"those of {self.reference}"
        R = "everyday words" if self.reference == "reference" else R
        gap = f"how far the model keeps {T} from one another and from {R}"
        if group.metric != "cosine":
            gap += f", {DISTANCES[group.metric]} distance"
        answers = group.checkpoints[0].resolution.answers
        of_ratio = f"{len(answers)} answer tokens of {self.answers}" if answers else T
        ratio = f"spread of {of_ratio} divided by that of {R}"
        against = "ratio minus the base's, with its paired standard error"
        of_base = answer.decimals([c.against for c in group.checkpoints if c.against is not None])
        figures = [
            Column("ratio", "Ratio", ".3f", hint=ratio),
            Column(f"gap_{group.metric}", "G", f".{decimals}f", hint=gap),
        ]
        if group.figure == "G":
            figures.reverse()
        figures[1] = replace(figures[1], drop=1)
        if group.steps:
            error = "2 standard errors to the step before"
            figures[0] = replace(figures[0], dots="below", reach="twice", whisker=error)
        else:
            error = "2 standard errors over the choice of tokens"
            figures[0] = replace(figures[0], dots="both", reach="reach", whisker=error)
        alike = len({c.rank for c in group.candidates}) == 1 < len(group.candidates)
        ranks = [] if group.is_noise or alike else [Column("rank", "Rank", "d", short="#")]
        return [
            *ranks,
            Column("called", "Step" if group.steps else "Checkpoint"),
            *figures,
            Column(
                "against_base",
                "Against the base",
                f".{of_base}f",
                "against_base_se",
                against,
                drop=1,
            ),
            Column("chosen", "Chosen", drop=2),
            Column("accuracy", "Accuracy", accuracy, short="Acc.", drop=3),
        ]

    @cached_property
    def _places(self) -> dict[str, int]:
        """The places of the user's own short list, by group; none where it takes all."""
        if self.chosen is None:
            return {}
        return {
            choice.group.name: choice.k for choice in self.chosen.groups if choice.k < choice.places
        }

    def _cuts(
        self, group: Group, members: Sequence[Screened], first: Sequence[Screened]
    ) -> dict[int, str]:
        """The line below the checkpoints to evaluate first, with their chance if it is measured."""
        if not first or group.chances is None or not group.is_measured:
            return {}
        last = first[-1].rank
        below = [place for place, c in enumerate(members) if group.has_place(c) and c.rank > last]
        if not below:
            return {}
        held = f"{100 * float(group.chances.holds_best[last - 1]):.0f} %"
        return {below[0]: f"these hold the best with {held}"}

    def _chance_of(self, group: Group) -> str:
        """The meaning of a group's cumulative chance, in a sentence."""
        whose = f"as among our own {OUR_MODELS}"
        if isinstance(group.slope, Own):
            whose = "by your own results"
        return f"chance that ranks 1 to here hold it, {whose}"

    def charts(self) -> Mapping[str, Chart]:
        """Each group's ranking figure (along a training also G), and accuracy against it.

        The parts of G come first where it ranks: a picture (``-o fig.svg``) is the first chart, and
        this one is the paper's figure 9.
        """
        drawn: dict[str, Chart] = {}
        for place, group in enumerate(self.groups):
            best = group.names[group.checkpoints[0]]
            count = len(group.checkpoints) - len(group.set_aside)
            figure = group.figure
            if figure == "G" and not group.steps:
                drawn[f"parts{place}"] = _parts_chart(group)
            if group.steps:
                drawn[f"ranking{place}"] = _course_chart(group, figure)
            else:
                most = f", the {answer.DRAWN} best of {count}" if count > answer.DRAWN else ""
                drawn[f"ranking{place}"] = Chart(
                    partial(_draw, "ranking", group),
                    f"{figure[0].upper()}{figure[1:]} of each checkpoint{most}",
                    f"Dots of {figure}, best first, from {best}.",
                    "Lines: two standard errors (choice of tokens).",
                    f"ranking-{group.anchor}",
                )
            if group.steps and figure == "ratio":
                drawn[f"gap{place}"] = _course_chart(group, "G")
        if self.agreement:
            drawn["accuracy"] = Chart(
                partial(_draw, "accuracy_chart", self.groups),
                f"Accuracy against {self._figure}",
                "One point a checkpoint with an accuracy, by group.",
                name="accuracy",
            )
        return drawn

    def context(self) -> Mapping[str, Any]:
        """Template values: sentences by group, notes, facts."""
        members = [c for members in self._members.values() for c in members]
        ranked = [c for c in members if not c.is_set_aside]
        set_aside = [c for group in self.groups for c in group.set_aside]
        ordered = any(group.steps or answer.first_of(group) for group in self.groups)
        whole = [line for line in self.agreement if line.scope != "group"] or self.agreement
        of_groups = answer.sentences_of(self.groups, self.subject, self.domain, self._places)
        of_base = answer.rows_of_base(self.of_base, alone=not self.checkpoints)
        return {
            "sentences": [*of_groups, *of_base],
            "groups_told": len(of_groups),
            "most_failed": len(self.failed) > self._everyone / 2,
            "failures": answer.failures(self.failed, self._everyone),
            "notes": answer.who((note, c) for c in members for note in c.notes),
            "unknown": [
                *answer.unknown(ranked, alone=len(members) == 1),
                *self._without_base(),
                *self._without_own(),
            ],
            "ranked": RANKED[members[0].ranked_by].replace("highest", "Higher") if ordered else "",
            "set_aside": answer.unknown(set_aside, alone=False),
            "copies": copies.said(members),
            "agreed": whole[0] if whole else None,
            "figure": self._figure,
            "our_models": OUR_MODELS,
            "distances": listed(sorted({DISTANCES[group.metric] for group in self.groups})),
            "chances": [of for of in dict.fromkeys(g.slope for g in self.groups) if of],
            "facts_of_all": self._facts() if self.checkpoints else None,
        }

    @property
    def _figure(self) -> str:
        """The figure that ranks all groups; G if it ranks some."""
        return "G" if any(group.figure == "G" for group in self.groups) else "ratio"

    def _without_base(self) -> list[str]:
        """Groups that are not compared with the base, if there is a base."""
        alone = [
            group.title for group in self.groups if group.base is None or group.base.ratio is None
        ]
        if not self.base or not alone:
            return []
        why = next(
            (f.error for f in self.failed if f.label == self.base),
            "other tokenizer or scale, or no ratio",
        )
        return [f"Not compared with the base {self.base} ({why}): {listed(alone)}."]

    def _without_own(self) -> list[str]:
        """The note that no group is of the kind of the user's own slope."""
        if self.slope is None or any(group.slope is self.slope for group in self.groups):
            return []
        return [f"Your own slope is of {self.slope.kind}; no chance here is by it."]

    def _facts(self) -> dict[str, str]:
        tokens = self.checkpoints[0].resolution
        facts = {
            "Tokens": f"T: {len(tokens.domain)} of {self.domain}, R: {len(tokens.reference)} of "
            f"{self.reference}; digit scheme: {tokens.digit_scheme}",
            "Ratio over": f"{len(tokens.answers)} answer tokens of {self.answers}"
            if tokens.answers
            else "",
            "Words of T that are not single tokens": ", ".join(
                word.strip() for word in tokens.dropped
            ),
            "Words of R that are not single tokens": ", ".join(
                w.strip() for w in tokens.dropped_reference
            ),
            "Read": f"{len(self.checkpoints)} screened, {len(self.failed)} failed; "
            f"{shown(self.bytes_read, 'bytes')} in {self.requests} requests",
        }
        return {name: text for name, text in facts.items() if text}


def _draw(name: str, of: Any) -> dict[str, Any]:
    """A chart by its function in `charts`, which is imported only for a page."""
    from lmeval_screener.result import charts

    specification: dict[str, Any] = getattr(charts, name)(of)
    return specification


def _course_chart(group: Group, figure: str) -> Chart:
    """The figure that ranks a training, or G, along its steps, with the accuracy where it is known.

    As figure 33 of the RD paper draws them: the caption has their rank correlation and its p-value.
    """
    called = f"{figure[0].upper()}{figure[1:]}"
    caption = f"{called} along the training of {group.title}"
    rated = [c for c in group.steps if c.accuracy is not None]
    if rated:
        figures = [c.figure.mean if figure == group.figure else c.gap.mean for c in rated]
        agreed = Agreement.of(
            "group", group.name, [(figures, [c.accuracy for c in rated if c.accuracy is not None])]
        )
        correlation = agreed.reason
        if not correlation:
            p = shown(agreed.spearman_p, "p-value")
            correlation = f"Spearman {agreed.spearman:.3f}, p {p}, of {agreed.n} checkpoints"
        caption = f"{caption}, and the accuracy ({correlation})"
    description = f"{called} against the training step."
    if figure != group.figure:
        return Chart(
            partial(_draw, "gap_steps", group), caption, description, name=f"gap-{group.anchor}"
        )
    best = group.names[group.checkpoints[0]]
    return Chart(
        partial(_draw, "steps", group),
        caption,
        f"{called} against the training step; largest at {best}.",
        "Lines: two standard errors of the difference to the step before (choice of tokens).",
        f"ranking-{group.anchor}",
    )


def _parts_chart(group: Group) -> Chart:
    """The parts of G with the accuracy, as figure 9 of the RD paper draws them."""
    accuracies = any(c.accuracy is not None for c in group.checkpoints)
    what = f"The parts of G ({DISTANCES[group.metric]} distance)"
    caption = f"{what} and the accuracy" if accuracies else what
    bars = "Bars: domain to domain (D–D), domain to everyday words (D–NM), and their sum G; best first."
    line = " Line: accuracy, on its own axis." if accuracies else ""
    meaning = "D–D: domain to domain, within(T). D–NM: domain to everyday words, between(T, R)."
    draw = partial(_draw, "gap_parts", group)
    return Chart(draw, caption, bars + line, meaning, f"parts-{group.anchor}")


# --- tables: columns over the rows of CSV ---------------------------------------------------------------


def _marks(members: Sequence[Screened], first: Sequence[Screened]) -> dict[int, Mark]:
    """Marks of rows: checkpoints that the answer recommends, controls, and the base."""
    marks: dict[int, Mark] = {}
    for place, c in enumerate(members):
        if c in first or c.is_base or c.target.negative_control:
            marks[place] = "pick" if c in first else "control"
    return marks


def _marked(name: str, c: Screened, first: Sequence[Screened]) -> str:
    """A name of a ranking, marked if the answer recommends it."""
    return f"▶ {name}" if c in first else f"  {name}" if first else name


def _figures(decimals: int, group: Group, chance: str) -> list[Column]:
    """Both figures with their errors, the parts of G, and the cumulative ``chance``, which it explains."""
    parts = {
        "within_domain": ("within(T)", ""),
        "between": ("between(T, R)", "T, R"),
        "within_reference": ("within(R), control", "in R"),
    }
    metric = group.metric
    change = "Δ from previous" if group.steps else "Δ to next"
    figures = [
        Column("ratio", "Ratio", ".3f", "ratio_se"),
        Column(f"gap_{metric}", "G", f".{decimals}f", f"gap_{metric}_se"),
    ]
    if group.figure == "G":
        figures.reverse()
    figures.insert(1, Column("delta", change, ".4f", "delta_se", short="Δ", drop=2))
    return [
        Column("called", "Step" if group.steps else "Checkpoint"),
        *figures,
        *(
            Column(f"{name}_{metric}", heading, ".3f", f"{name}_{metric}_se", short=short, drop=3)
            for name, (heading, short) in parts.items()
        ),
        Column("holds_best", "Holds the best", ".0%", hint=chance, drop=1),
    ]


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


def _table(
    rows: Sequence[Row], columns: Sequence[Column], name: str, excerpt: Sequence[int] = ()
) -> Table:
    """Rows with those columns that are not empty."""
    filled = [
        column for column in columns if any(row.get(column.key) not in (None, "") for row in rows)
    ]
    return Table(rows, filled, "", name, excerpt=excerpt)


def _in_order(group: Group) -> Sequence[Screened]:
    """A group's members for its tables: a training by its steps, after a base of another place."""
    if not group.steps:
        return group.checkpoints
    return [*(c for c in group.checkpoints if c not in group.trajectory), *group.trajectory]


def _excerpt(
    members: Sequence[Screened], *, training: bool, cuts: Mapping[int, str] = _NO_CUTS
) -> tuple[int, ...]:
    """Rows of a long ranking for short texts: the top, the rows next to ``cuts``, and the bottom."""
    count = len(members)
    if count <= _LONG:
        return ()
    if training:
        # A course needs its ends and evenly spaced steps between.
        return tuple(
            sorted({round(i * (count - 1) / (_TOP + _BOTTOM)) for i in range(_TOP + _BOTTOM + 1)})
        )
    places = {*range(_TOP), *range(count - _BOTTOM, count)}
    for cut in cuts:
        places |= {cut - 1, cut}
    return tuple(sorted(places))


def _entry(f: Failed) -> dict[str, Any]:
    """The JSON entry of a checkpoint that was not screened."""
    return {name: getattr(f, name) for name in ("label", "repo", "revision", "error", "message")}


def _failures(failed: Sequence[Failed]) -> list[Row]:
    """The rows of failures, similar failures in one row."""
    equal: dict[tuple[str, str], list[Failed]] = {}
    for f in failed:
        message = f.message.replace(f.label, "ORG/NAME").replace(f.repo, "ORG/NAME")
        equal.setdefault((f.error, message), []).append(f)
    rows: list[Row] = []
    for (error, message), alike in equal.items():
        some = ", ".join(f.label for f in alike[:3]) + (", …" if len(alike) > 3 else "")
        label = some if len(alike) == 1 else f"{len(alike)} checkpoints: {some}"
        said = alike[0].message if len(alike) == 1 else message
        rows.append({"label": label, "error": error, "message": said})
    return rows
