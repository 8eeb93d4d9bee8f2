"""What a screening yields, in every form: the sentences stand in ``screening.jinja`` beside this module.

The JSON contract, ``screen-checkpoints/3``, is documented in docs/reference/screening.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from lmeval_dispersion.geometry import Metric
from lmeval_dispersion.report import Chart, Col, Report, Row, Table
from lmeval_dispersion.report.cells import json_value, shown
from lmeval_screener.agreement import Agreement, agreements
from lmeval_screener.contract import entry, flat_row
from lmeval_screener.ranking.gap import difference
from lmeval_screener.reports import answer, charts
from lmeval_screener.screened import Failed, Gate, Group, Screened, TokenInfo
from lmeval_screener.shortlist.choice import Shortlist, shortlist

if TYPE_CHECKING:
    from lmeval_screener.shortlist.verdict import Verdict

SCHEMA = "screen-checkpoints/3"
#: What every standard error of a gap is of. Not of training: runs that differ in their seed alone differ too.
SE_COVERS = "choice of tokens"
_SCOPES = {"within groups": "all, inside groups", "overall": "all, across groups (not supported)"}
_LONG = 40  # rows of a group that a terminal shows whole
_TOP, _BOTTOM = 15, 3  # rows that it shows of a longer one, beside those tied with the last of the top


@dataclass(frozen=True)
class RankedRow:
    """A checkpoint in the table of its group."""

    rank: Annotated[int, Col("Rank", "d", short="#")]
    label: Annotated[str, Col("Checkpoint")]
    G: Annotated[float, Col("G", ".3f", dots="below", reach="reach")]
    reach: float | None
    ratio: Annotated[float | None, Col("Ratio", ".3f")]
    no_clear_order_with: Annotated[str, Col("No clear order with", short="No clear order", drop=1)]
    chosen: Annotated[str | None, Col("Chosen", drop=2)]
    accuracy: Annotated[float | None, Col("Accuracy", ".3f", short="Acc.", drop=3)]


@dataclass(frozen=True)
class FiguresRow:
    """Both figures of a checkpoint with their errors, and the parts of G."""

    label: Annotated[str, Col("Checkpoint")]
    G: Annotated[float, Col("G", ".3f", error="G_se")]
    G_se: float
    delta: Annotated[float | None, Col("Δ to next", ".4f", error="delta_se", short="Δ", drop=2)]
    delta_se: float | None
    ratio: Annotated[float | None, Col("Ratio", ".3f", error="ratio_se")]
    ratio_se: float | None
    within_T: Annotated[float, Col("within(T)", ".3f", error="within_T_se", drop=3)]
    within_T_se: float
    between: Annotated[float, Col("between(T, R)", ".3f", error="between_se", short="T, R", drop=3)]
    between_se: float
    within_R: Annotated[float, Col("within(R), control", ".3f", error="within_R_se", short="in R", drop=3)]
    within_R_se: float


@dataclass(frozen=True)
class ReadRow:
    """What a checkpoint was computed from, and what that cost."""

    label: Annotated[str, Col("Checkpoint")]
    revision: Annotated[str, Col("Commit", drop=3)]
    matrix: Annotated[str, Col("Rows of", drop=2)]
    dtype: Annotated[str, Col("Type", drop=1)]
    bytes_read: Annotated[int, Col("Read", "bytes")]
    requests: Annotated[int, Col("Requests", "d")]
    seconds: Annotated[float, Col("Seconds", ".2f", short="s")]


@dataclass(frozen=True)
class FailedRow:
    """A checkpoint that failed, or some that failed alike."""

    label: Annotated[str, Col("Checkpoint")]
    error: Annotated[str, Col("Error")]
    message: Annotated[str, Col("Why, and what to do")]


@dataclass(frozen=True)
class AgreementRow:
    """Rank correlations of G with supplied accuracies."""

    group: Annotated[str, Col("Group")]
    n: Annotated[int, Col("n", "d")]
    spearman: Annotated[float, Col("Spearman", ".3f")]
    spearman_p: Annotated[float, Col("p", "p-value")]
    permutations: Annotated[str, Col("Permutations", drop=1)]


@dataclass(frozen=True)
class TokensRow:
    """The tokens of one set in one tokenizer."""

    family: Annotated[str, Col("Family")]
    set: Annotated[str, Col("Set")]
    variant: Annotated[str, Col("Variant")]
    tokens: Annotated[str, Col("Piece:row")]


@dataclass(frozen=True, repr=False)
class Result(Report):
    """A whole screening.

    Attributes:
        domain: Name of the domain token set.
        reference: Name of the reference token set.
        metric: The metric that ranks.
        checkpoints: Screened checkpoints in the order of their groups, best first inside.
        failed: The others, with the reason.
        seconds: Wall time of the whole.
        bytes_read: Bytes that travelled, those of failed checkpoints and of listings included.
        requests: Requests likewise.
        domain_words: Words of T as they were looked up, a leading space included.
        gate: What ``--fail-if-below`` found; None where it was not asked for.
        chosen: The short list that the report shows; None for all checkpoints.
        accuracy: What the supplied accuracies are, in words; empty where nothing says.
        show_tokens: Whether the report lists the pieces and rows of T and R.
    """

    template: ClassVar[str] = "screening.jinja"
    schema: ClassVar[str] = SCHEMA
    libraries: ClassVar[Sequence[str]] = ("numpy", "huggingface-hub")
    guide: ClassVar[str] = "docs/reference/screening.md"

    domain: str
    reference: str
    metric: Metric
    checkpoints: tuple[Screened, ...]
    failed: tuple[Failed, ...]
    seconds: float
    bytes_read: int
    requests: int
    domain_words: tuple[str, ...] = ()
    gate: Gate | None = None
    chosen: Shortlist | None = None
    accuracy: str = ""
    show_tokens: bool = False

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups in order, each with its checkpoints best first."""
        groups: dict[tuple[str, str], list[Screened]] = {}
        for checkpoint in self.checkpoints:
            groups.setdefault((checkpoint.family, checkpoint.scale), []).append(checkpoint)
        return tuple(Group(family, scale, tuple(members)) for (family, scale), members in groups.items())

    @property
    def best(self) -> Screened:
        """The checkpoint with the largest G of the first group.

        Raises:
            IndexError: Nothing was screened.
        """
        return self.checkpoints[0]

    def shortlist(self, k: int, *, audit_sample: int = 0, seed: int = 0) -> Shortlist:
        """The K best of each group, those without a clear order with the K-th, and some others at random.

        Args:
            k: How many of each group.
            audit_sample: How many others of each group to add at random.
            seed: Of the random sample.

        Raises:
            UsageError: ``k`` below 1, or ``audit_sample`` below 0.
        """
        return shortlist(self.groups, self.metric, k, audit_sample=audit_sample, seed=seed)

    def verify(self, *results: str | Path) -> Verdict:
        """Whether the order agrees with results: of the short list where there is one, else of all.

        Args:
            results: lm-eval's results or folders of them, CSV files, or ``hub:TASK``.

        Raises:
            UsageError: A source cannot be read or fits no checkpoint.
        """
        from lmeval_screener.shortlist.manifest import manifest_dict, manifest_of
        from lmeval_screener.shortlist.verdict import verify

        everything = max((len(group.checkpoints) for group in self.groups), default=1)
        chosen = self.chosen or self.shortlist(everything)
        content = manifest_dict(self.head(), chosen, tasks=(), command="")
        return verify(manifest_of(content, "the screening"), [str(source) for source in results])

    def shown(self, chosen: Shortlist | None, *, accuracy: str = "", tokens: bool = False) -> Result:
        """The same result as a report shows it: a short list, in words what accuracies are, all tokens."""
        checkpoints = self.checkpoints
        if chosen is not None:
            checkpoints = tuple(
                replace(c, chosen=chosen.why(c), inclusion_probability=chosen.probability(c))
                for c in checkpoints
            )
        return replace(self, checkpoints=checkpoints, chosen=chosen, accuracy=accuracy, show_tokens=tokens)

    # --- forms for programs -----------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract ``screen-checkpoints/3`` as plain Python values."""
        content = self.head() | {"answer": self.answer()}
        content["checkpoints"] = self._entries
        if self.agreement:
            content["agreement"] = json_value(self.agreement)
        if self.chosen is not None:
            content["shortlist"] = self.chosen.to_dict()
        return content

    def head(self) -> dict[str, Any]:
        """The contract without its entries."""
        return {
            "schema": SCHEMA,
            "domain": self.domain,
            "reference": self.reference,
            "metric": self.metric,
            "se_covers": SE_COVERS,
            "checkpoints": [],
            "tokens": self._tokens(),
            "failed": [
                {"label": f.label, "repo": f.repo, "revision": f.revision}
                | {"error": f.error, "message": f.message}
                for f in self.failed
            ],
            "totals": {
                "checkpoints": len(self.checkpoints),
                "bytes_read": self.bytes_read,
                "requests": self.requests,
                "seconds": round(self.seconds, 3),
            },
            **({} if self.gate is None else {"gate": self.gate.to_dict()}),
        }

    @cached_property
    def _entries(self) -> list[dict[str, Any]]:
        """Of all that is shown: the short list where there is one."""
        return [entry(c, group) for group in self.groups for c in self._members(group)]

    def rows(self) -> Sequence[Row]:
        """The rows of CSV and of the data frame: one checkpoint each."""
        return [flat_row(row) for row in self._entries]

    def _tokens(self) -> list[dict[str, Any]]:
        """T and R of each tokenizer group, once: the members compare the same pieces at the same rows."""
        first = {c.family: c.tokens for c in reversed(self.checkpoints)}
        return [
            {"family": family}
            | {
                side: {"variants": info.variants(tokens), "pieces": {t.piece: t.id for t in tokens}}
                for side, tokens in (
                    ("domain", info.domain_tokens),
                    ("reference", info.reference_tokens),
                )
            }
            for family, info in reversed(first.items())
        ]

    # --- the report -------------------------------------------------------------------------------------

    @cached_property
    def agreement(self) -> list[Agreement]:
        """Agreement of G with the supplied accuracies, per group and overall; empty without any."""
        return agreements(self.groups, self.metric)

    def _members(self, group: Group) -> tuple[Screened, ...]:
        """The members that are shown, in the order of the table: a training in that of its steps."""
        members = (group.trajectory if group.steps else None) or group.checkpoints
        return members if self.chosen is None else tuple(c for c in members if c.chosen is not None)

    def tables(self) -> Mapping[str, Table]:
        """The rankings of the groups, their figures, what failed, what was read."""
        tables = {"failed": Table.of(_failures(self.failed), "", name="failed")}
        for place, group in enumerate(self.groups):
            members = self._members(group)
            name = group.anchor
            excerpt = _excerpt(members, training=bool(group.steps))
            rows = [self._ranked_row(c, group) for c in members]
            headings = {"label": "Step"} if group.steps else {}
            ranking = Table.of(rows, "", name=f"ranking-{name}", excerpt=excerpt, headings=headings)
            figures = Table.of(
                [self._figures_row(c, group) for c in members],
                "",
                name=f"figures-{name}",
                excerpt=excerpt,
                headings=headings | ({"delta": "Δ from previous"} if group.steps else {}),
            )
            shares = 3 if all((c.accuracy or 0) <= 1 for c in members) else 1
            places = answer.digits(members, self.metric) if members else 3
            tables |= {
                f"ranking{place}": _with_decimals(ranking, G=places, accuracy=shares),
                f"figures{place}": _with_decimals(figures, G=places),
            }
        everyone = [c for group in self.groups for c in self._members(group)]
        tables["read"] = Table.of([_read_row(c) for c in everyone], "", name="read")
        tables["agreement"] = Table.of(
            [_agreement_row(line) for line in self.agreement], "", name="agreement"
        )
        tables["tokens"] = Table.of(self._token_rows() if self.show_tokens else [], "", name="tokens")
        return tables

    def charts(self) -> Mapping[str, Chart]:
        """G of each group, its parts, and accuracy against G."""
        drawn: dict[str, Chart] = {}
        for place, group in enumerate(self.groups):
            if not self._members(group):
                continue
            draw = charts.steps_chart if group.steps else charts.dots_chart
            drawn[f"ranking{place}"] = draw(group, self.metric)
            if group.steps and (ratio := charts.ratio_chart(group)) is not None:
                drawn[f"ratio{place}"] = ratio
            drawn[f"parts{place}"] = charts.parts_chart(group, self.metric)
        if self.agreement:
            drawn["accuracy"] = charts.accuracy_chart(self.groups, self.metric)
        return drawn

    def context(self) -> Mapping[str, Any]:
        """The sentences of each group, notes, and the words of T."""
        groups = self.groups
        members = [c for group in groups for c in self._members(group)]
        notes: dict[str, list[str]] = {}
        for c in members:
            for note in c.notes:
                notes.setdefault(note, []).append(c.label)
        unknown: dict[str, list[str]] = {}
        for c in members:
            if c.ratio is None:
                unknown.setdefault(c.no_ratio or "it was not read", []).append(c.label)
        tokens = self.checkpoints[0].tokens if self.checkpoints else None
        dropped = {word for c in self.checkpoints for word in c.tokens.dropped}
        whole = [line for line in self.agreement if line.scope != "group"] or self.agreement
        return {
            "sentences": [
                answer.sentences(group, self.metric, self.domain) for group in groups[: answer.GROUPS]
            ],
            "most_failed": len(self.failed) > len(self.checkpoints),
            "failures": answer.failures(self.failed, len(self.checkpoints)) if self.failed else "",
            "shown_groups": [(i, group) for i, group in enumerate(groups) if self._members(group)],
            "notes": {note: _who(labels) for note, labels in notes.items()},
            "unknown": {reason: _who(labels, len(members)) for reason, labels in unknown.items()},
            "agreed": whole[0] if whole else None,
            "facts_of_all": self._facts(tokens) if tokens is not None else {},
            "words": "  ".join(w.replace(" ", "␣") for w in self.domain_words if w not in dropped),
        }

    def _facts(self, tokens: TokenInfo) -> dict[str, str]:
        facts = {
            "Tokens": f"T: {tokens.domain} of {self.domain}, R: {tokens.reference} of {self.reference}; "
            f"digit scheme: {tokens.digit_scheme}",
            "Words of T that are no single token": ", ".join(word.strip() for word in tokens.dropped),
            "Words of R that are no single token": ", ".join(w.strip() for w in tokens.dropped_reference),
            "Read": f"{len(self.checkpoints)} screened, {len(self.failed)} failed; "
            f"{shown(self.bytes_read, 'bytes')} in {self.requests} requests, {self.seconds:.2f} s",
        }
        return {name: text for name, text in facts.items() if text}

    def _ranked_row(self, c: Screened, group: Group) -> RankedRow:
        reach = self._change(c, group)
        return RankedRow(
            c.rank,
            group.names[c],
            c.gaps[self.metric].mean,
            None if reach is None else 2 * reach[1],
            None if c.ratio is None else c.ratio.mean,
            answer.ranks_of(c.ties),
            c.chosen,
            c.accuracy,
        )

    def _change(self, c: Screened, group: Group) -> tuple[float, float] | None:
        """The difference to the next rank and its error; along a training, from the step before."""
        steps = group.steps
        if not steps:
            return None if c.next is None else (c.next.difference, c.next.se)
        if c not in steps or c is steps[0]:
            return None
        change = difference(c.gaps[self.metric], steps[steps.index(c) - 1].gaps[self.metric])
        return change.mean, change.se

    def _figures_row(self, c: Screened, group: Group) -> FiguresRow:
        gap, change = c.gaps[self.metric], self._change(c, group) or (None, None)
        inside, across, control = gap.within_domain, gap.between, gap.within_reference
        return FiguresRow(
            group.names[c],
            gap.mean,
            gap.se,
            *change,
            *((None, None) if c.ratio is None else (c.ratio.mean, c.ratio.se)),
            *(number for part in (inside, across, control) for number in (part.mean, part.se)),
        )

    def _token_rows(self) -> list[TokensRow]:
        return [
            TokensRow(
                tokens["family"],
                name,
                " and ".join(tokens[side]["variants"]),
                " ".join(f"{piece}:{row}" for piece, row in tokens[side]["pieces"].items()),
            )
            for tokens in self._tokens()
            for side, name in (("domain", f"T, {self.domain}"), ("reference", f"R, {self.reference}"))
        ]


def _who(labels: Sequence[str], everyone: int = 0) -> str:
    if len(labels) == 1:
        return labels[0]
    return f"all {everyone}" if len(labels) == everyone else f"{len(labels)} checkpoints"


def _with_decimals(table: Table, **places: int) -> Table:
    columns = [
        replace(column, format=f".{places[column.key]}f") if column.key in places else column
        for column in table.columns
    ]
    return replace(table, columns=columns)


def _excerpt(members: Sequence[Screened], *, training: bool) -> tuple[int, ...]:
    """Rows of a long ranking that short texts show: the top, what is tied with its last, and the bottom."""
    count = len(members)
    if count <= _LONG:
        return ()
    if training:
        # A course needs its ends and what lies between, evenly.
        return tuple(sorted({round(i * (count - 1) / (_TOP + _BOTTOM)) for i in range(_TOP + _BOTTOM + 1)}))
    last = members[_TOP - 1]
    cut = [place for place in range(_TOP, count) if last.tied_to(members[place].rank)]
    return tuple(sorted({*range(_TOP), *cut[: _LONG - _TOP - _BOTTOM], *range(count - _BOTTOM, count)}))


def _agreement_row(line: Agreement) -> AgreementRow:
    return AgreementRow(
        line.group or _SCOPES[line.scope],
        line.n,
        line.spearman,
        line.spearman_p,
        line.reason or f"{'all' if line.exact else 'drawn'}: {line.permutations:,}",
    )


def _read_row(c: Screened) -> ReadRow:
    return ReadRow(
        c.label,
        c.revision[:12] if c.revision else "a folder",
        c.tensor.name,
        c.tensor.dtype,
        c.bytes_read,
        c.requests,
        c.seconds,
    )


def _failures(failed: Sequence[Failed]) -> list[FailedRow]:
    """Failures, equal ones in one line."""
    equal: dict[tuple[str, str], list[Failed]] = {}
    for f in failed:
        message = f.message.replace(f.label, "ORG/NAME").replace(f.repo, "ORG/NAME")
        equal.setdefault((f.error, message), []).append(f)
    rows = []
    for (error, message), alike in equal.items():
        some = ", ".join(f.label for f in alike[:3]) + (", …" if len(alike) > 3 else "")
        alone = len(alike) == 1
        label = alike[0].label if alone else f"{len(alike)} checkpoints: {some}"
        rows.append(FailedRow(label, error, alike[0].message if alone else message))
    return rows
