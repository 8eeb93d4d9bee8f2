"""The types of a screening: a checkpoint as read, as ranked or as failed, and a group of them.

Their forms for programs are in ``columns.py``.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np

from lmeval_dispersion.geometry import Metric
from lmeval_dispersion.statistics import LEVEL
from lmeval_screener.figures import Gap, Ratio, difference, rank_places
from lmeval_screener.targets.labels import shared_name
from lmeval_screener.targets.names import Target, label
from lmeval_screener.targets.runs import run_and_step, step_key
from lmeval_screener.tokens.answers import left_out_note
from lmeval_screener.tokens.resolution import Resolution


@dataclass(frozen=True, eq=False)
class Reading:
    """One checkpoint as read, before its group is known.

    Attributes:
        target: The checkpoint as requested.
        repo: Repository after renames, or the folder.
        revision: The commit that was read, 40 hex digits; None for a folder.
        tensor: Name of the output projection.
        file: The file that stores it.
        dtype: Its element type as stored.
        shape: Rows and columns.
        tied: Whether it is the input embedding.
        parameters: All parameters as stored; None if unknown.
        tokenizer: Digest of the tokenizer file.
        resolution: The rows of T and R; checkpoints of one tokenizer share it.
        gaps: The gap in every metric.
        warnings: Remarks that a reader of the number should know.
        bytes_read: Bytes transferred, including an adapter's base; 0 from a cache.
        requests: Requests likewise.
        seconds: From the first request to the last row.
        ratio: The ratio; None if the final norm is not known, and G stands alone.
        no_ratio: Why the ratio is missing, one clause; empty if it is known.
        sketch: Identifies its copies (`lmeval_screener.copies`); empty if no claim is made.
        base: The ``place`` of its base, from an adapter's configuration or the Hub; empty for none.
    """

    target: Target
    repo: str
    revision: str | None
    tensor: str
    file: str
    dtype: str
    shape: tuple[int, int]
    tied: bool
    parameters: int | None
    tokenizer: str
    resolution: Resolution
    gaps: Mapping[Metric, Gap]
    warnings: tuple[str, ...]
    bytes_read: int
    requests: int
    seconds: float
    ratio: Ratio | None = None
    no_ratio: str = ""
    sketch: bytes = b""
    base: str = ""

    @property
    def name(self) -> str:
        """``repo``, ``repo@revision`` or ``repo:file``, as the user would write it."""
        return label(self.repo, self.target.revision, self.target.file)

    @property
    def place(self) -> str:
        """``name``, or a folder's whole path: as others name it as their base."""
        return str(Path(self.repo).resolve()) if self.target.local else self.name

    @property
    def label(self) -> str:
        """Its name in reports; unique in a screening."""
        return self.target.labelled or self.name

    @property
    def accuracy(self) -> float | None:
        """Accuracy that somebody supplied, None otherwise."""
        return self.target.accuracy

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks that a reader of the number should know: contradictions, dropped words."""
        tokens, notes = self.resolution, list(self.warnings)
        if tokens.never_made:
            more = len(tokens.never_made) - 5
            notes.append(
                "words dropped because the tokenizer never makes their piece: "
                + ", ".join(tokens.never_made[:5])
                + (f" and {more} more" if more > 0 else "")
            )
        if tokens.one_row:
            notes.append(f"counted once because they share a row: {', '.join(tokens.one_row)}")
        if tokens.answers and (note := left_out_note(tokens.answers[0].group, tokens.left_out)):
            notes.append(note)
        if tokens.vocabulary > self.shape[0]:
            notes.append(
                f"the tokenizer names {tokens.vocabulary} rows, {self.tensor} has only {self.shape[0]}"
            )
        return tuple(notes)


#: Start of the family of checkpoints given by name; their tokenizer's short hash follows.
TOKENIZER = "tokenizer:"


RankBy = Literal["gap", "ratio", "both"]
#: The figure that ranks by default.
RANK_BY: RankBy = "ratio"
RANKED = {"gap": "highest G", "ratio": "highest ratio", "both": "highest mean rank of G and ratio"}


Finite = Annotated[float, ("type", "number")]  # never null in JSON
Side = Literal["above", "below", "level", "equal"]


class Against(NamedTuple):
    """A checkpoint's ratio minus its base's, paired over tokens, and its side of the base.

    ``side`` is ``above``, ``below``, ``level`` if neither is clear, or ``equal`` if all rows are the
    base's.
    """

    difference: Finite
    se: Annotated[Finite, ("minimum", 0)]
    side: Side


class Next(NamedTuple):
    """G of a checkpoint minus G of the next in rank, paired; whether the order of the two is clear."""

    difference: Finite
    se: Finite
    separated: bool


class Ranks:
    """Ranks of a group, ascending: a bit each, as those of a large group would not fit into memory.

    >>> list(Ranks([8, 6, 6])), 6 in Ranks([6]), Ranks([5, 2, 3]).runs()
    ([6, 8], True, [(2, 3), (5, 5)])
    """

    __slots__ = ("_bits",)

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        places = np.asarray(ranks if isinstance(ranks, np.ndarray) else list(ranks), dtype=np.int64)
        flags = np.zeros(places.max(initial=-1) + 1, dtype=bool)
        flags[places] = True
        self._bits = np.packbits(flags).tobytes()

    def __iter__(self) -> Iterator[int]:
        """Each rank."""
        return iter(np.flatnonzero(self._flags()).tolist())

    def __contains__(self, rank: int) -> bool:
        """Whether a rank is among them."""
        return rank >> 3 < len(self._bits) and bool(self._bits[rank >> 3] & 128 >> (rank & 7))

    def runs(self) -> list[tuple[int, int]]:
        """First and last of every run of ranks."""
        edges = np.flatnonzero(np.diff(self._flags().astype(np.int8), prepend=0, append=0))
        return [(int(begin), int(end) - 1) for begin, end in edges.reshape(-1, 2)]

    def _flags(self) -> np.ndarray:
        return np.unpackbits(np.frombuffer(self._bits, np.uint8))


@dataclass(frozen=True, eq=False, repr=False)
class Screened(Reading):
    """One screened checkpoint: its reading, and its rank in its group.

    Attributes:
        family: Family, or the tokenizer's short hash for checkpoints given by name.
        scale: Size as the field names it.
        rank: Rank within (family, scale), 1 for the best by ``ranked_by``; equal ones share the better rank.
        ranked_by: The figure that ranks: ``gap``, ``ratio``, or the mean rank of ``both``; G if some of the
            group have no ratio.
        is_base: Whether it is the base that the others of the group were trained from: it is never chosen.
        against: The ratio against the base's; None without a base, or a ratio.
        ties: Ranks without a clear order with it by G and ratio together (`lmeval_screener.ranking`): at most
            one group in twenty has a pair that is ordered by the choice of tokens alone.
        next: The difference from the next in rank; None for the last.
        copy_of: Label of its original in the group; None if it is not a copy. A copy gets its original's
            rank, whatever its own G.
        copy_rounded: Whether the two agree only within the rounding of their types.
        chosen: Why it is on a short list: ``rank``, ``tied`` or ``audit``; None if it is not.
        inclusion_probability: Its probability of being chosen; None without a short list.
    """

    family: str = ""
    scale: str = ""
    rank: int = 0
    ties: Ranks = field(default_factory=Ranks)
    next: Next | None = None
    copy_of: str | None = None
    copy_rounded: bool = False
    chosen: str | None = None
    inclusion_probability: float | None = None
    ranked_by: RankBy = "gap"
    is_base: bool = False
    against: Against | None = None

    @property
    def tied_with(self) -> tuple[int, ...]:
        """The ranks of the group with which it has no clear order, ascending."""
        return tuple(self.ties)

    def tied_to(self, rank: int) -> bool:
        """Whether it has no clear order with the checkpoints of a rank."""
        return rank in self.ties

    @property
    def training_and_step(self) -> tuple[str, str | None]:
        """Its training run and step name, from its revision or its folder; itself and None if it has none."""
        if self.revision is None:
            return run_and_step(self.repo) or (self.repo, None)
        return self.repo, self.target.revision

    @property
    def step(self) -> str | None:
        """The name of its step in a training; None for none."""
        return self.training_and_step[1]

    def __repr__(self) -> str:
        gaps = ", ".join(f"{metric} G {gap.mean:.3f} ± {gap.se:.3f}" for metric, gap in self.gaps.items())
        return f"<Screened> {self.label}: {gaps}; rank {self.rank} of {self.family}, {self.scale}"


@dataclass(frozen=True)
class Failed:
    """One checkpoint that was not screened: the target, a stable word, and a sentence."""

    target: Target
    error: str
    message: str

    @property
    def repo(self) -> str:
        """Repository or folder, as requested."""
        return self.target.shown

    @property
    def revision(self) -> str | None:
        """Revision as requested; None for the default branch."""
        return self.target.revision

    @property
    def label(self) -> str:
        """Its name in reports."""
        return self.target.label


@dataclass(frozen=True, repr=False)
class Group:
    """Comparable checkpoints: one family (or tokenizer) and one scale, best first.

    ``tokenizer`` names their tokenizer in titles, if the checkpoints belong to no family.
    """

    family: str
    scale: str
    checkpoints: tuple[Screened, ...]
    tokenizer: str = "one tokenizer"

    def __repr__(self) -> str:
        more = f" and {len(self.checkpoints) - 5} more" if len(self.checkpoints) > 5 else ""
        return f"<Group> {self.name}: {', '.join(c.label for c in self.checkpoints[:5])}{more}"

    @cached_property
    def trajectory(self) -> tuple[Screened, ...]:
        """The members in the order of their steps if all belong to one training, else none.

        They are revisions of one repository, or folders of one local run, whose own folder holds the last.
        """
        of_training = {c: c.training_and_step for c in self.checkpoints}
        if len(of_training) < 2 or len({training for training, _ in of_training.values()}) > 1:
            return ()
        steps = {c: step for c, (_, step) in of_training.items()}
        members = sorted(steps, key=lambda c: (steps[c] is None, step_key(steps[c] or "")))
        return tuple(members) if steps[members[0]] else ()

    @cached_property
    def steps(self) -> tuple[Screened, ...]:
        """The members of a training that have a step, in order; empty if the group is not a training."""
        members = tuple(c for c in self.trajectory if c.step is not None)
        return members if len(members) > 1 else ()

    @property
    def drawn(self) -> Literal["G", "ratio"]:
        """The figure that its reports draw: the one that ranks; G along a training, and where both rank."""
        return "ratio" if not self.steps and self.checkpoints[0].ranked_by == "ratio" else "G"

    @property
    def name(self) -> str:
        """Family and scale."""
        return f"{self.family} · {self.scale}"

    @cached_property
    def title(self) -> str:
        """Its name in reports: a family, the shared part of its checkpoints' names, or a training's model."""
        if not self.trajectory:
            return title_of(self.family, self.scale, [c.target for c in self.checkpoints], self.tokenizer)
        training, _ = self.trajectory[0].training_and_step
        local = self.trajectory[0].revision is None
        return Path(training).resolve().name if local else training.rpartition("/")[2]

    @property
    def anchor(self) -> str:
        """Its name in a page's addresses."""
        return re.sub(r"[^\w-]+", "-", f"{self.family}-{self.scale}")

    @cached_property
    def names(self) -> dict[Screened, str]:
        """The name of each member in its tables: the step of a training, else the label."""
        if self.trajectory:
            last = "default branch" if self.trajectory[0].revision else "final model"
            return {c: c.step or last for c in self.trajectory}
        return {c: c.label for c in self.checkpoints}

    @cached_property
    def ratio_ranks(self) -> dict[Screened, int]:
        """Rank by the ratio, 1 for the largest, of each member that has one."""
        rated = {c: c.ratio.mean for c in self.checkpoints if c.ratio is not None}
        return dict(zip(rated, rank_places(list(rated.values())), strict=True))

    @cached_property
    def candidates(self) -> tuple[Screened, ...]:
        """The members without their base, best first."""
        return tuple(c for c in self.checkpoints if not c.is_base)

    @cached_property
    def base(self) -> Screened | None:
        """The base of the others; None if it is unknown, or in another group."""
        return next((c for c in self.checkpoints if c.is_base), None)

    def rivals(self, metric: Metric) -> tuple[Screened, ...]:
        """The best by G and the best by the ratio, if each figure separates them in opposite order.

        They were chosen among all pairs of the group, so each test is corrected for them (Bonferroni).
        """
        among = [c for c in self.candidates if c.copy_of is None]
        if any(c.ratio is None for c in among[:1]):
            return ()
        first = max(among, key=lambda c: c.gaps[metric].mean, default=None)
        best = max(among, key=lambda c: c.ratio.mean if c.ratio else -math.inf, default=None)
        if not (first and first.ratio and best and best.ratio) or not best.ratio.above(first.ratio):
            return ()
        tests = difference(first.gaps[metric], best.gaps[metric]), difference(best.ratio, first.ratio)
        level = (1 - LEVEL) / math.comb(len(among), 2)
        return (first, best) if all(test.p < level for test in tests) else ()


def title_of(family: str, scale: str, targets: Sequence[Target], tokenizer: str = "one tokenizer") -> str:
    """A group's name for readers; for checkpoints given by name, the shared part of their names."""
    if not family.startswith(TOKENIZER):
        return f"{family} · {scale}"
    return " · ".join(filter(None, (shared_name(targets), scale, tokenizer)))


def grouped(checkpoints: Iterable[Screened]) -> tuple[Group, ...]:
    """The groups of ranked checkpoints, in their order, with unique titles."""
    members: dict[tuple[str, str], list[Screened]] = {}
    for checkpoint in checkpoints:
        members.setdefault((checkpoint.family, checkpoint.scale), []).append(checkpoint)
    groups = [Group(*name, tuple(group)) for name, group in members.items()]
    titles = Counter(group.title for group in groups)
    return tuple(
        replace(g, tokenizer=f"tokenizer of {g.checkpoints[0].label}") if titles[g.title] > 1 else g
        for g in groups
    )
