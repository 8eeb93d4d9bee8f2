"""One ranked checkpoint, one that failed, the group in which it is compared, and what a gate found."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lmeval_dispersion.geometry import Metric
from lmeval_screener.ranking.gap import Gap, difference
from lmeval_screener.ranking.ratio import Ratio
from lmeval_screener.ranking.ties import Next, Ranks
from lmeval_screener.targets import label, step_key, training_and_step
from lmeval_screener.tokens import Token

#: Exit status where a checkpoint is below.
EXIT_BELOW = 4
_SHOWN = 5


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
        ties: Ranks that it is not told apart from by G and ratio together (`ranking.ties`): at most one group
            in twenty has a pair told apart by the choice of tokens alone.
        next: The difference from the next in rank; None for the last.
        ratio: The second figure; None where the final norm is not known, and G stands alone.
        no_ratio: Why there is none; empty where there is one.
        file: The GGUF file or quantisation that the user chose; None for the checkpoint's own weights.
        labelled: What reports call it, where that is settled.
        chosen: Why it is on a short list: ``rank``, ``tied`` or ``audit``; None where it is not.
        inclusion_probability: With which it was to be on it; None without a short list.
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
    ties: Ranks = field(default_factory=Ranks)
    next: Next | None = None
    ratio: Ratio | None = None
    no_ratio: str = ""
    file: str | None = None
    labelled: str | None = None
    chosen: str | None = None
    inclusion_probability: float | None = None

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
        return tuple(self.ties)

    def tied_to(self, rank: int) -> bool:
        """Whether it is not told apart from the checkpoints of a rank."""
        return rank in self.ties

    @property
    def step(self) -> str | None:
        """The name of its step in a training; None for none."""
        return training_and_step(self.repo, self.requested_revision, local=self.revision is None)[1]

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

    @cached_property
    def trajectory(self) -> tuple[Screened, ...] | None:
        """The members in the order of their steps where all are of one training, else None.

        They are revisions of one repository, or folders of one local run, whose own folder holds the last.
        """
        training: str | None = None
        steps: dict[Screened, str | None] = {}
        for c in self.checkpoints:
            run, step = training_and_step(c.repo, c.requested_revision, local=c.revision is None)
            if training is not None and run != training:
                return None
            training, steps[c] = run, step
        if len(steps) < 2 or not any(steps.values()):
            return None
        return tuple(sorted(steps, key=lambda c: (steps[c] is None, step_key(steps[c] or ""))))

    @property
    def title(self) -> str:
        """What reports call it; a training by its model and never by a path."""
        if members := self.trajectory:
            local = members[0].revision is None
            training, _ = training_and_step(members[0].repo, None, local=local)
            return Path(training).resolve().name if local else training.rpartition("/")[2]
        return f"{self.family} · {self.scale}"

    @property
    def anchor(self) -> str:
        """Its name in a page's addresses."""
        return re.sub(r"[^\w-]+", "-", f"{self.family}-{self.scale}")

    @cached_property
    def names(self) -> dict[Screened, str]:
        """What its tables call each member: the step of a training, else the label."""
        if members := self.trajectory:
            return {c: c.step or ("default branch" if c.revision else "final model") for c in members}
        return {c: c.label for c in self.checkpoints}

    @cached_property
    def steps(self) -> tuple[Screened, ...]:
        """The members of a training that have a step, in order; empty where the group is no training."""
        members = tuple(c for c in self.trajectory or () if c.step is not None)
        return members if len(members) > 1 else ()

    def rival(self, metric: Metric) -> Screened | None:
        """The best by the ratio, where that is another one than by G and either figure is sure of it."""
        rated = [c for c in self.checkpoints if c.ratio is not None]
        if len(rated) < 2 or rated[0] is not self.checkpoints[0]:
            return None
        first, best = rated[0], max(rated, key=lambda c: c.ratio.mean if c.ratio else 0.0)
        if best is first or first.ratio is None or best.ratio is None or not best.ratio.above(first.ratio):
            return None
        sure = difference(first.gaps[metric], best.gaps[metric]).separated
        return best if sure or best.ratio.minus(first.ratio).separated else None

    def ratio_rank(self, checkpoint: Screened) -> int | None:
        """Rank of a member by the ratio, 1 for the largest; None where it has none."""
        if checkpoint.ratio is None:
            return None
        return 1 + len(self._ratios) - bisect_right(self._ratios, checkpoint.ratio.mean)

    @cached_property
    def _ratios(self) -> list[float]:
        return sorted(c.ratio.mean for c in self.checkpoints if c.ratio is not None)


@dataclass(frozen=True)
class Gate:
    """What a gate found.

    Attributes:
        reference: Label of the checkpoint that none may fall below.
        below: Labels of those that are clearly below it, all pairs of the group counted.
        compared: Checkpoints of its group beside it.
        not_compared: Checkpoints of another tokenizer or scale, or that failed.
        failed: Code of the reference's own failure; empty where it was screened.
    """

    reference: str
    below: tuple[str, ...]
    compared: int
    not_compared: int
    failed: str = ""

    @property
    def passed(self) -> bool:
        """Whether something was compared, and nothing is below."""
        return not self.below and self.compared > 0

    @property
    def exit_code(self) -> int | None:
        """Exit status that it asks for; None for the screening's own."""
        return EXIT_BELOW if self.below else None if self.passed else 1

    @property
    def sentence(self) -> str:
        """The answer of the gate."""
        rest = f" {self.not_compared} not compared with it." if self.not_compared else ""
        if self.failed:
            return f"The gate cannot be judged: {self.reference} was not screened ({self.failed})."
        if not self.compared:
            return (
                f"The gate cannot be judged: no other checkpoint has the tokenizer and scale of "
                f"{self.reference}.{rest}"
            )
        if not self.below:
            return f"Passed: none of {self.compared} is clearly below {self.reference}.{rest}"
        shown = ", ".join(self.below[:_SHOWN])
        more = f" and {len(self.below) - _SHOWN} more" if len(self.below) > _SHOWN else ""
        return f"Failed: {shown}{more} clearly below {self.reference} ({self.compared} compared).{rest}"

    def to_dict(self) -> dict[str, Any]:
        """The gate in the JSON."""
        return {
            "reference": self.reference,
            "passed": self.passed,
            "below": list(self.below),
            "compared": self.compared,
            "not_compared": self.not_compared,
            "failed": self.failed or None,
        }
