"""What a screening yields: the dataclasses behind every output format, and the JSON contract.

The contract, ``screen-checkpoints/3``, is that of docs/reference/screening.md; :meth:`Result.to_dict` is it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

from lmeval_dispersion.errors import MissingExtraError
from lmeval_dispersion.geometry import METRICS, Metric, PairMean
from lmeval_dispersion.report import Document, Reportable
from lmeval_screener.ranking.controls import NAMES, Control, Controls, reversals
from lmeval_screener.ranking.gap import Gap
from lmeval_screener.ranking.ties import ALL_PAIRS, Next
from lmeval_screener.targets.target import label, step_key
from lmeval_screener.targets.training_runs import step_or_date, training_and_step
from lmeval_screener.tokens.resolution import Token

if TYPE_CHECKING:
    import pandas as pd

    from lmeval_screener.ranking.gate import Gate

SCHEMA = "screen-checkpoints/3"
#: What every standard error of a gap is of. Not of training: runs that differ in their seed alone differ too.
SE_COVERS = "choice of tokens"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The matrix that the rows came from: name, file, stored dtype, shape (v, d), tied or not."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, int]
    tied: bool


@dataclass(frozen=True)
class TokenInfo:
    """How many tokens of each set were compared, and what was not.

    Attributes:
        domain: Tokens of T.
        reference: Tokens of R.
        dropped: Words of T that are no single piece of the tokenizer.
        dropped_reference: Words of R likewise.
        digit_scheme: How the tokenizer writes numbers.
        domain_tokens: The tokens of T: surface form, piece, id, group.
        reference_tokens: Those of R.
    """

    domain: int
    reference: int
    dropped: tuple[str, ...]
    dropped_reference: tuple[str, ...]
    digit_scheme: str
    domain_tokens: tuple[Token, ...] = ()
    reference_tokens: tuple[Token, ...] = ()

    @staticmethod
    def variants(tokens: Sequence[Token]) -> list[str]:
        """How the words of a set are looked up: ``bare``, ``space``, or both."""
        return sorted({"space" if token.text.startswith(" ") else "bare" for token in tokens})


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Screened:
    """One checkpoint that was screened.

    Attributes:
        repo: Repository after renames, or the folder.
        requested_revision: What the user asked for, None for the default branch.
        revision: The commit that was read, 40 hex digits; None for a folder.
        family: Family, or the tokenizer's short hash where checkpoints were given by name.
        scale: Size as the field names it.
        gaps: The gap in every metric.
        tensor: Which matrix was read.
        tokens: Which tokens were read.
        bytes_read: Bytes that travelled, headers and small files included; from a cache 0.
        requests: Requests that were made.
        seconds: From the first request to the last row.
        notes: What a reader of the number should know (contradictory configuration and the like).
        accuracy: Accuracy that somebody supplied, None otherwise.
        negative_control: Whether it is known not to have learned what the others learned.
        rank: Rank within (family, scale), 1 for the largest G; equal means share the better rank.
        ties: Ranks that it is not told apart from, as ranges: all pairs of the group counted
            (`ranking.ties`), so at most one group in twenty has a pair told apart by the choice of tokens
            alone.
        next: The difference from the next in rank; None for the last.
        controls: Gauge controls where they were asked for; a sentence where they could not be read.
        file: The GGUF file or quantisation that the user chose; None for the checkpoint's own weights.
        changed: When the repository changed last, where a list of repositories said it (ISO 8601, UTC).
        labelled: What reports call it, where that is settled.
    """

    repo: str
    requested_revision: str | None
    revision: str | None
    family: str
    scale: str
    gaps: Mapping[Metric, Gap]
    tensor: TensorInfo
    tokens: TokenInfo
    bytes_read: int
    requests: int
    seconds: float
    notes: tuple[str, ...] = ()
    accuracy: float | None = None
    negative_control: bool = False
    rank: int = 0
    ties: tuple[range, ...] = ()
    next: Next | None = None
    controls: Controls | str | None = None
    file: str | None = None
    changed: str | None = None
    labelled: str | None = None

    @property
    def name(self) -> str:
        """``repo``, ``repo@revision`` or ``repo:file``, as the user would write it."""
        return label(self.repo, self.requested_revision, self.file)

    @property
    def label(self) -> str:
        """What reports call it; unique among those that were screened together."""
        return self.labelled or self.name

    @property
    def tied_with(self) -> tuple[int, ...]:
        """The ranks of the group that it is not told apart from, ascending; empty where there are none."""
        return tuple(chain(*self.ties))

    def tied_to(self, rank: int) -> bool:
        """Whether it is not told apart from the checkpoints of a rank."""
        return any(rank in ranks for ranks in self.ties)

    @property
    def step_or_date(self) -> tuple[str, float] | None:
        """``step`` or ``date`` (in days) and its number, as the name of revision or folder tells it.

        Where it tells none, the date of the repository's last change, if a list of repositories said it.
        """
        training, step = training_and_step(self.repo, self.requested_revision, local=self.revision is None)
        found = step_or_date(step or training.rpartition("/")[2])
        return step_or_date(self.changed[:10]) if found is None and self.changed else found

    def __repr__(self) -> str:
        gaps = ", ".join(f"{metric} G {gap.mean:.3f} ± {gap.se:.3f}" for metric, gap in self.gaps.items())
        return f"<Screened> {self.label}: {gaps}; rank {self.rank} of {self.family}, {self.scale}"


@dataclass(frozen=True)
class Failed:
    """One checkpoint that was not screened: a stable word and a sentence."""

    repo: str
    revision: str | None
    error: str
    message: str
    file: str | None = None
    labelled: str | None = None

    @property
    def label(self) -> str:
        """What reports call it."""
        return self.labelled or label(self.repo, self.revision, self.file)


@dataclass(frozen=True, repr=False)
class Group:
    """Checkpoints that may be compared: one family (or tokenizer) and one scale, best first."""

    family: str
    scale: str
    checkpoints: tuple[Screened, ...]

    def __repr__(self) -> str:
        return f"<Group> {self.family}, {self.scale}: {', '.join(c.label for c in self.checkpoints[:5])}" + (
            f" and {len(self.checkpoints) - 5} more" if len(self.checkpoints) > 5 else ""
        )

    def trajectory(self) -> tuple[Screened, ...] | None:
        """The members in the order of their steps where all are of one training, else None.

        They are revisions of one repository, or folders of one local run, whose own folder holds the last.
        """
        training: str | None = None
        steps: dict[Screened, str | None] = {}
        for c in self.checkpoints:
            own, step = training_and_step(c.repo, c.requested_revision, local=c.revision is None)
            if training is not None and own != training:
                return None
            training, steps[c] = own, step
        if len(steps) < 2 or not any(steps.values()):
            return None
        return tuple(sorted(steps, key=lambda c: (steps[c] is None, step_key(steps[c] or ""))))

    def control_rank(self, checkpoint: Screened, name: str) -> int | None:
        """Rank of a member by a control, ``centred`` or ``final_norm``; None where it is not known."""
        own = control(checkpoint, name)
        if not isinstance(own, Control):
            return None
        means = self._control_means[name]
        return 1 + len(means) - bisect_right(means, own.mean)

    @cached_property
    def _control_means(self) -> dict[str, list[float]]:
        found = {name: [control(c, name) for c in self.checkpoints] for name in NAMES}
        return {
            name: sorted(one.mean for one in values if isinstance(one, Control))
            for name, values in found.items()
        }

    def control_warnings(self) -> list[str]:
        """Sentences on pairs that G tells apart and a control orders the other way.

        Of a large group, each member is compared with the first that is told apart from it.
        """
        members = [
            (c.label, c.controls if isinstance(c.controls, Controls) else None) for c in self.checkpoints
        ]
        return reversals(members, self._apart())

    def _apart(self) -> list[tuple[int, int]]:
        """Places (better, worse) that are told apart; of a large group one pair for each of the better."""
        members = self.checkpoints
        if len(members) > ALL_PAIRS:
            ranks = [c.rank for c in members]
            nearest = [
                (i, bisect_right(ranks, max(c.rank, c.ties[-1][-1] if c.ties else 0)))
                for i, c in enumerate(members)
            ]
            return [(i, j) for i, j in nearest if j < len(members)]
        return [
            (i, j)
            for j, worse in enumerate(members)
            for i, better in enumerate(members[:j])
            if not better.tied_to(worse.rank)
        ]


def control(checkpoint: Screened, name: str) -> Control | str | None:
    """One control of a checkpoint by name: the figure, why there is none, or None if none was asked for."""
    found = checkpoint.controls
    return getattr(found, name) if isinstance(found, Controls) else found


@dataclass(frozen=True, repr=False)
class Result(Reportable):
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
    """

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

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups in order, each with its checkpoints best first."""
        found: dict[tuple[str, str], list[Screened]] = {}
        for checkpoint in self.checkpoints:
            found.setdefault((checkpoint.family, checkpoint.scale), []).append(checkpoint)
        return tuple(Group(family, scale, tuple(members)) for (family, scale), members in found.items())

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract ``screen-checkpoints/3`` as plain Python values."""
        return self.head() | {"checkpoints": [entry for entry, _ in self.entries()]}

    def entries(self) -> Iterator[tuple[dict[str, Any], Screened]]:
        """The contract's entries of the checkpoints, one after the other."""
        for group in self.groups:
            for c in group.checkpoints:
                yield _checkpoint_dict(c) | _controls_dict(c, group), c

    def head(self) -> dict[str, Any]:
        """The contract without its entries: they need not all be in memory at once."""
        return {
            "schema": SCHEMA,
            "domain": self.domain,
            "reference": self.reference,
            "metric": self.metric,
            "se_covers": SE_COVERS,
            "checkpoints": [],
            **self._control_warnings(),
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

    def _tokens(self) -> list[dict[str, Any]]:
        """T and R of each tokenizer group, once: the members compare the same pieces at the same rows."""
        first = {c.family: c.tokens for c in reversed(self.checkpoints)}
        return [
            {"family": family}
            | {
                side: {"variants": TokenInfo.variants(tokens), "pieces": {t.piece: t.id for t in tokens}}
                for side, tokens in (
                    ("domain", info.domain_tokens),
                    ("reference", info.reference_tokens),
                )
            }
            for family, info in reversed(first.items())
        ]

    def _control_warnings(self) -> dict[str, Any]:
        if all(c.controls is None for c in self.checkpoints):
            return {}
        return {"control_warnings": [text for group in self.groups for text in group.control_warnings()]}

    def to_frame(self) -> pd.DataFrame:
        """One row a screened checkpoint; flat columns such as ``gap_cosine`` and ``gap_cosine_se``.

        Types are pandas' nullable ``Int64``, ``boolean`` and ``string``, and ``float64`` with NaN.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingExtraError(
                "a data frame needs pandas: pip install 'lmeval-dispersion[audit]' (or `pip install pandas`)"
            ) from error

        frame = pd.DataFrame([flat_row(c) for c in self.checkpoints], columns=FLAT_COLUMNS)
        return frame.astype({name: _TYPES.get(name, "string") for name in FLAT_COLUMNS})

    def document(self) -> Document:
        """The report that ``screen-checkpoints`` prints."""
        from lmeval_screener.reports.document import report

        return report(self)


_PARTS = ("within_domain", "between", "within_reference")
FLAT_COLUMNS = [
    *("label", "repo", "requested_revision", "revision", "family", "scale", "rank", "tied_with"),
    *(f"{part}_{metric}{end}" for metric in METRICS for part in ("gap", *_PARTS) for end in ("", "_se")),
    *("accuracy", "tensor", "dtype", "tied", "tokens_domain", "tokens_reference", "dropped", "digit_scheme"),
    *("bytes_read", "requests", "seconds", "notes"),
]


# Types of a frame's columns; the others hold text.
_TYPES = {
    **{name: "float64" for name in FLAT_COLUMNS if name.endswith(METRICS) or name.endswith("_se")},
    **dict.fromkeys(("accuracy", "seconds"), "float64"),
    **dict.fromkeys(("rank", "tokens_domain", "tokens_reference", "bytes_read", "requests"), "Int64"),
    "tied": "boolean",
}


def flat_row(checkpoint: Screened) -> dict[str, Any]:
    """One checkpoint as a flat row; the keys are ``FLAT_COLUMNS``."""
    c = checkpoint
    row: dict[str, Any] = {
        "label": c.label,
        "repo": c.repo,
        "requested_revision": c.requested_revision,
        "revision": c.revision,
        "family": c.family,
        "scale": c.scale,
        "rank": c.rank,
        "tied_with": " ".join(map(str, c.tied_with)),
    }
    for metric, gap in c.gaps.items():
        row[f"gap_{metric}"], row[f"gap_{metric}_se"] = gap.mean, gap.se
        for part in _PARTS:
            mean: PairMean = getattr(gap, part)
            row[f"{part}_{metric}"], row[f"{part}_{metric}_se"] = mean.mean, mean.se
    row |= {
        "accuracy": c.accuracy,
        "tensor": c.tensor.name,
        "dtype": c.tensor.dtype,
        "tied": c.tensor.tied,
        "tokens_domain": c.tokens.domain,
        "tokens_reference": c.tokens.reference,
        "dropped": " ".join(word.strip() for word in (*c.tokens.dropped, *c.tokens.dropped_reference)),
        "digit_scheme": c.tokens.digit_scheme,
        "bytes_read": c.bytes_read,
        "requests": c.requests,
        "seconds": round(c.seconds, 3),
        "notes": "; ".join(c.notes),
    }
    return row


def _checkpoint_dict(c: Screened) -> dict[str, Any]:
    return {
        "label": c.label,
        "repo": c.repo,
        "requested_revision": c.requested_revision,
        "revision": c.revision,
        "family": c.family,
        "scale": c.scale,
        "rank": c.rank,
        "tied_with": list(c.tied_with),
        "next": None if c.next is None else c.next._asdict(),
        "gap": {m: {"mean": g.mean, "se": g.se} for m, g in c.gaps.items()},
        **{part: {m: _part_dict(getattr(g, part)) for m, g in c.gaps.items()} for part in _PARTS},
        "tensor": {
            "name": c.tensor.name,
            "file": c.tensor.file,
            "dtype": c.tensor.dtype,
            "shape": list(c.tensor.shape),
            "tied": c.tensor.tied,
        },
        "tokens": {
            "domain": c.tokens.domain,
            "reference": c.tokens.reference,
            "dropped": [word.strip() for word in (*c.tokens.dropped, *c.tokens.dropped_reference)],
            "digit_scheme": c.tokens.digit_scheme,
        },
        "accuracy": c.accuracy,
        "notes": list(c.notes),
        "bytes_read": c.bytes_read,
        "requests": c.requests,
        "seconds": round(c.seconds, 3),
    }


def _controls_dict(c: Screened, group: Group) -> dict[str, Any]:
    """``controls`` of a checkpoint, where they were asked for."""
    if c.controls is None:
        return {}
    found: dict[str, Any] = {}
    for name in NAMES:
        own = control(c, name)
        figure = {"mean": own.mean, "se": own.se} if isinstance(own, Control) else {"mean": None, "se": None}
        reason = own if isinstance(own, str) else None
        found[name] = figure | {"rank": group.control_rank(c, name), "reason": reason}
    read = c.controls if isinstance(c.controls, Controls) else None
    found |= {"sample": read and read.sample, "tensor": read and read.tensor}
    if read is not None:
        rank, null = read.effective_rank, read.random_tokens
        found |= {"row_norm": read.row_norm, "effective_rank": None if isinstance(rank, str) else rank}
        found["random_tokens"] = (
            {"reason": null} if isinstance(null, str) else asdict(null) | {"reason": None}
        )
    kind, value = c.step_or_date or (None, None)
    return {
        "controls": found
        | {"step": value if kind == "step" else None}
        | {"date": date.fromordinal(int(value)).isoformat() if kind == "date" and value else None}
    }


def _part_dict(part: PairMean) -> dict[str, float | None]:
    values = {"mean": part.mean, "se": part.se, "se_pairs": part.se_pairs}
    return {name: None if math.isnan(value) else value for name, value in values.items()}
