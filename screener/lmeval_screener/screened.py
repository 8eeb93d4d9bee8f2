"""A screening's types: a checkpoint as read, ranked or failed, and a group of checkpoints.

Their JSON and CSV are in ``columns.py``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from lmeval_dispersion.evidence import (
    FINE_TUNES,
    FROM_SCRATCH,
    OUR_GROUPS,
    OUR_SIZES,
    SLOPES,
    Slope,
)
from lmeval_dispersion.geometry import Metric
from lmeval_screener.chance import WITHIN, Chances, Own, is_noise
from lmeval_screener.figures import Gap, Ratio
from lmeval_screener.orders import Distance, RankBy
from lmeval_screener.targets.names import Target, label, shared_name
from lmeval_screener.targets.runs import (
    belongs_to_run,
    is_epoch,
    possible_runs,
    run_and_step,
    step_key,
)
from lmeval_screener.tokens.answers import left_out_note
from lmeval_screener.tokens.resolution import Resolution
from lmeval_screener.weights.body import UNKNOWN, Likeness


@dataclass(frozen=True, eq=False)
class Reading:
    """One checkpoint as read, before its group is known.

    Attributes:
        target: The checkpoint as requested.
        repo: Repository after renames, or the folder.
        revision: The commit that was read, 40 hex digits; None for a folder or a storage.
        tensor: Name of the output projection.
        file: The file that stores it.
        dtype: Its element type as stored.
        shape: Rows and columns.
        tied: Whether it is the input embedding.
        parameters: All parameters as stored; None if unknown.
        tokenizer: Digest of the tokenizer file, or of a GGUF file's vocabulary.
        resolution: The rows of T and R; checkpoints of one tokenizer share it.
        gaps: The gap in every metric.
        warnings: Remarks for readers of the figures.
        bytes_read: Bytes transferred, including an adapter's base; 0 from a cache.
        requests: Requests, counted likewise.
        seconds: Time from the first request to the last row.
        ratio: The ratio; None if the final norm is not known, and G stands alone.
        no_ratio: Why the ratio is missing, one clause; empty if it is known.
        sketch: Identifies equal rows (`lmeval_screener.weights.copies`); empty if not known.
        body: Its body in brief (`read_body`), which identifies copies; if not read, its files' digest.
        base: The ``place`` of its base, from an adapter's configuration or the Hub; empty for none.
        common: Digest of the tokenizer whose words compare it with others; empty until that is known.
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
    body: bytes = b""
    common: str = ""

    @property
    def name(self) -> str:
        """``repo``, ``repo@revision``, or either with ``:file``, as the user would write it."""
        return label(self.repo, self.target.revision, self.target.file)

    @property
    def place(self) -> str:
        """The name that other checkpoints give for it as a base: ``name``, or a folder's absolute path."""
        return self.target.place if self.target.local else self.name

    @property
    def label(self) -> str:
        """Its name in reports; unique in a screening."""
        return self.target.labelled or self.name

    @property
    def training_and_step(self) -> tuple[str, str | None]:
        """Training run (repository or folder), and step's name (revision or folder); None without a step."""
        if self.revision is None:
            # As `run_and_step` spells a run: an address loses a slash of its ``//``.
            return run_and_step(self.repo) or (str(Path(self.repo)), None)
        return self.repo, self.target.revision

    @property
    def possible_runs(self) -> tuple[str, ...]:
        """Training runs to which it may belong, with or without a step."""
        run, step = self.training_and_step
        if step is not None or self.revision is not None:
            return (run,)
        return possible_runs(self.repo)

    def lies_in(self, run: str) -> bool:
        """Whether it lies in a training run's folder, without a step; False for a repository."""
        return self.revision is None and belongs_to_run(self.repo, run)

    @property
    def step(self) -> str | None:
        """Name of its step in a training; else None."""
        return self.training_and_step[1]

    @property
    def gap(self) -> Gap:
        """G as reports show it, by the cosine distance."""
        return self.gaps["cosine"]

    @property
    def accuracy(self) -> float | None:
        """Supplied accuracy, in its source's unit; None without one."""
        return self.target.accuracy

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for readers of the figures: ``warnings``, dropped words, rows that the matrix lacks."""
        tokens = self.resolution
        notes = list(self.warnings)
        if tokens.never_made:
            words = _first_five(tokens.never_made)
            notes.append(f"words dropped because the tokenizer never makes their piece: {words}")
        if tokens.one_row:
            notes.append(f"counted once because they share a row: {', '.join(tokens.one_row)}")
        if tokens.answers:
            notes.append(left_out_note(tokens.answers[0].group, tokens.left_out))
        if tokens.vocabulary > self.shape[0]:
            notes.append(
                f"the tokenizer names {tokens.vocabulary} rows, {self.tensor} has only {self.shape[0]}"
            )
        return tuple(filter(None, notes))


def _first_five(names: Sequence[str]) -> str:
    """The first five names, and the number of others."""
    words = ", ".join(names[:5])
    if len(names) > 5:
        words += f" and {len(names) - 5} more"
    return words


#: Start of the family of checkpoints given by name; their tokenizer's short hash follows.
TOKENIZER = "tokenizer:"


RANKED = {"gap": "highest G", "ratio": "highest ratio"}


Finite = Annotated[float, ("type", "number")]  # never null in JSON
Side = Literal["above", "below", "level", "equal"]


class Against(NamedTuple):
    """A checkpoint's ratio minus its base's, paired over tokens, and its side of the base.

    ``se`` is the difference's jackknife standard error. ``side`` is ``above``, ``below``, ``level`` if it is
    on neither, or ``equal`` if all rows are the base's.
    """

    difference: Finite
    se: Annotated[Finite, ("minimum", 0)]
    side: Side


@dataclass(frozen=True, eq=False, repr=False)
class Screened(Reading):
    """One screened checkpoint: its reading, and its rank in its group.

    Attributes:
        family: Family, or ``tokenizer:`` and a short hash for checkpoints given by name.
        scale: Size class, such as ``7B``.
        rank: Place within (family, scale), 1 for the best by ``ranked_by``; equal ones share a place. The
            base, and those with its rows, take none: their rank is that of the first one not above them. Nor
            do those set aside: theirs is one more than the last.
        ranked_by: The figure that ranks: ``gap`` or ``ratio``; G if fewer than two of the group have a ratio.
        metric: The distance of its G in reports: that of its family, else ``cosine``.
        is_base: Whether it is the base that the others of the group were trained from: it is never chosen.
        against: The ratio against the base's; None without a base, or a ratio.
        copy_of: Label of its original in the group; None if it is not a copy. A copy gets its original's
            rank, whatever its own G.
        copy_rounded: Whether the two agree only within the rounding of their types.
        equal_rows_with: Label of another of the group that has the same rows and that it is not a copy of, as
            an adapter has its base's; None for none. They share a rank.
        same_rows: A number that those of the group with the same rows share; None if nothing is known.
        bodies: How far its body was compared with that of ``copy_of``, else of ``equal_rows_with``.
        chosen: Why it is on a short list: ``rank`` or ``audit``; None if it is not.
        inclusion_probability: Its probability of being chosen; None without a short list.
    """

    family: str = ""
    scale: str = ""
    rank: int = 0
    copy_of: str | None = None
    copy_rounded: bool = False
    equal_rows_with: str | None = None
    same_rows: int | None = None
    bodies: Likeness = UNKNOWN
    chosen: str | None = None
    inclusion_probability: float | None = None
    ranked_by: RankBy = "gap"
    metric: Distance = "cosine"
    is_base: bool = False
    against: Against | None = None

    @property
    def gap(self) -> Gap:
        """G as reports show it, by the distance of its group."""
        return self.gaps[self.metric]

    @property
    def equals(self) -> str | None:
        """Label of the checkpoint that it copies or whose rows it shares; else None."""
        return self.copy_of or self.equal_rows_with

    @property
    def figure(self) -> Gap | Ratio:
        """The figure that ranks: the ratio, or G."""
        if self.ranked_by == "ratio" and self.ratio is not None:
            return self.ratio
        return self.gap

    @property
    def is_set_aside(self) -> bool:
        """Whether it has no rank because it lacks the figure that ranks its group."""
        return self.ranked_by == "ratio" and self.ratio is None

    def __repr__(self) -> str:
        figures = [f"{metric} G {gap.mean:.3f} ± {gap.se:.3f}" for metric, gap in self.gaps.items()]
        if self.ratio is not None:
            figures.insert(0, f"ratio {self.ratio.mean:.3f} ± {self.ratio.se:.3f}")
        rank = f"rank {self.rank}"
        if self.is_set_aside:
            rank = "without a rank"
        if self.is_base:
            rank = "the base"
        return (
            f"<Screened> {self.label}: {', '.join(figures)}; {rank} of {self.family}, {self.scale}"
        )


@dataclass(frozen=True, repr=False)
class Failed:
    """One checkpoint that was not screened.

    Attributes:
        target: The checkpoint as requested.
        error: A code of `SCREENING_CODES`.
        message: A sentence.
        base: The base of an adapter that leaves the head to it, where it cannot be read; else empty.
        cause: Why it cannot be read.
    """

    target: Target
    error: str
    message: str
    base: str = ""
    cause: str = ""

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

    def __repr__(self) -> str:
        return f"<Failed> {self.label}: {self.error}: {self.message}"


@dataclass(frozen=True, repr=False)
class Group:
    """Comparable checkpoints: one family (or tokenizer) and one scale, best first.

    ``tokenizer`` names their tokenizer in titles, if the checkpoints belong to no family. ``own`` is the
    slope of the user's own results, for groups of its kind.
    """

    family: str
    scale: str
    checkpoints: tuple[Screened, ...]
    tokenizer: str = "one tokenizer"
    own: Own | None = None

    def __repr__(self) -> str:
        return f"<Group> {self.name}: {_first_five([c.label for c in self.checkpoints])}"

    @cached_property
    def trajectory(self) -> tuple[Screened, ...]:
        """The members in the order of their steps if all belong to one training; else empty.

        They are revisions of one repository, or folders of one run. Those without a step come last: models
        next to the steps (``merged``, ``final``), then the run's own. A base of another place is left out.
        """
        runs = {c.training_and_step[0] for c in self.checkpoints if c.step is not None}
        if not runs and len(self.checkpoints) > 1:
            # A model and what lies in its folder, such as merged, are of one training too.
            own = [c.training_and_step[0] for c in self.checkpoints if not c.is_base]
            outermost = min(own, key=len, default="")
            for c in self.checkpoints:
                if c.lies_in(outermost) and c.training_and_step[0] != outermost:
                    runs = {outermost}
        if len(runs) != 1:
            return ()
        (run,) = runs
        members: list[Screened] = []
        for c in self.checkpoints:
            if c.step is not None or c.training_and_step[0] == run or c.lies_in(run):
                members.append(c)
            elif not c.is_base:
                return ()
        if len(members) < 2:
            return ()

        def order(c: Screened) -> tuple[object, ...]:
            is_own = c.step is None and c.training_and_step[0] == run
            return c.step is None, is_own, step_key(c.step or c.label)

        return tuple(sorted(members, key=order))

    @cached_property
    def steps(self) -> tuple[Screened, ...]:
        """A training's members with a step and the figure that ranks, in order; empty for fewer than two.

        Epochs are steps of a run that has no others.
        """
        members = [c for c in self.trajectory if c.step is not None and not c.is_set_aside]
        numbered = [c for c in members if not is_epoch(c.step or "")]
        members = numbered or members
        return tuple(members) if len(members) > 1 else ()

    @cached_property
    def neighbours(self) -> dict[Screened, Screened]:
        """Member -> the next place's first member; along a training, the step before; none for the last."""
        if self.steps:
            return dict(pairwise(reversed(self.steps)))
        first = {c.rank: c for c in reversed(self.placed)}
        return {c: first[c.rank + 1] for c in self.placed if c.rank + 1 in first}

    @property
    def figure(self) -> Literal["G", "ratio"]:
        """Name of the figure that ranks: ``ratio`` or ``G``."""
        return "ratio" if self.checkpoints[0].ranked_by == "ratio" else "G"

    @property
    def metric(self) -> Distance:
        """The distance of G in this group."""
        return self.checkpoints[0].metric

    # --- chances --------------------------------------------------------------------------------------

    @cached_property
    def is_noise(self) -> bool:
        """Whether the choice of tokens may explain the differences of the figure; False for trainings."""
        figures = {c.rank: c.figure for c in reversed(self.placed)}
        return not self.trajectory and is_noise([*figures.values()])

    @cached_property
    def kind(self) -> str:
        """The kind of `evidence.SLOPES` that fits the group; empty where no chance is known.

        Fine-tunes, whose chances are smaller, by default; from scratch if a family's file calls each of
        them a base, and nothing names a base of theirs.
        """
        if self.figure != "ratio" or self.trajectory or self.is_noise:
            return ""
        for c in self.checkpoints:
            if c.target.kind != "base" or c.base or c.against:
                return FINE_TUNES
        return FROM_SCRATCH

    @property
    def slope(self) -> Slope | None:
        """How well ranks order accuracies, by the user's results for its kind, else ours; None if unknown."""
        if self.own and self.own.kind == self.kind:
            return self.own
        return SLOPES.get(self.kind)

    @cached_property
    def is_like_ours(self) -> bool:
        """Whether it is such a list as was counted on our own models.

        These are 8 to 32 siblings of their size that were trained from scratch, or from one base that is
        known.
        """
        fewest, most = OUR_GROUPS
        least, largest = OUR_SIZES
        if not self.kind or not fewest <= len(self.placed) <= most:
            return False
        if any(not least <= (c.parameters or 0) <= largest for c in self.placed):
            return False
        if self.kind == FROM_SCRATCH or self.base is not None:
            return True
        bases = {c.base for c in self.placed}
        return len(bases) == 1 and "" not in bases

    @property
    def is_measured(self) -> bool:
        """Whether its chances are of checkpoints like these: by the user's own results, or by ours."""
        return isinstance(self.slope, Own) or self.is_like_ours

    @cached_property
    def chances(self) -> Chances | None:
        """The order's chances; None for G, for training steps, for noise, and for a single place."""
        if self.slope is None or self.places < 2:
            return None
        return Chances(self.places, self.slope)

    @cached_property
    def places(self) -> int:
        """Number of places that its members take."""
        return max((c.rank for c in self.placed), default=0)

    def first_for(self, chance: float = WITHIN) -> int:
        """Fewest first places that hold the best with this chance; all where no chance is known."""
        return self.chances.first_for(chance) if self.chances else self.places

    @cached_property
    def by_rows(self) -> dict[int, list[Screened]]:
        """Members that are not copies, by ``same_rows`` (None: a negative key each), each list best first."""
        alike: dict[int, list[Screened]] = {}
        for c in self.checkpoints:
            if c.copy_of is None:
                rows = -id(c) if c.same_rows is None else c.same_rows
                alike.setdefault(rows, []).append(c)
        return alike

    def holds_best(self, c: Screened) -> float | None:
        """Chance that the places from 1 to this member's hold the best; None if unknown."""
        if self.chances is None or not self.has_place(c):
            return None
        return float(self.chances.holds_best[c.rank - 1])

    def chance(self, better: Screened, worse: Screened) -> float | None:
        """Chance that ``better`` is more accurate, if the two differ by more than 0.01; None if unknown."""
        if self.chances is None or not (self.has_place(better) and self.has_place(worse)):
            return None
        return self.chances.between(better.rank, worse.rank)

    # --- names ----------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Family and scale, in one text."""
        return f"{self.family} · {self.scale}"

    @cached_property
    def title(self) -> str:
        """Name in reports: a family, the shared part of its checkpoints' names, or a training's model."""
        if not self.trajectory:
            targets = [c.target for c in self.checkpoints]
            return title_of(self.family, self.scale, targets, self.tokenizer)
        if self.trajectory[0].revision is None:
            return Path(self._run).resolve().name
        return self._run.rpartition("/")[2]

    @property
    def anchor(self) -> str:
        """Name in a page's addresses."""
        return re.sub(r"[^\w-]+", "-", f"{self.family}-{self.scale}")

    @cached_property
    def names(self) -> dict[Screened, str]:
        """Member -> its name in the group's tables: a training's step, else the label."""
        names: dict[Screened, str] = {}
        for c in self.trajectory:
            run, step = c.training_and_step
            if step is not None:
                names[c] = step
            elif c.revision is not None:
                names[c] = "default branch"
            elif run == self._run:
                names[c] = "final model"
            else:
                names[c] = Path(c.repo).name
        for c in self.checkpoints:
            names.setdefault(c, c.label)
        return names

    @property
    def _run(self) -> str:
        """The repository or folder of a training, in which the folders of its other models lie."""
        return min((c.training_and_step[0] for c in self.trajectory), key=len)

    @cached_property
    def candidates(self) -> tuple[Screened, ...]:
        """The members without their base and those set aside, best first."""
        return tuple(c for c in self.checkpoints if not c.is_base and not c.is_set_aside)

    @cached_property
    def set_aside(self) -> tuple[Screened, ...]:
        """The members without the figure that ranks: one of them never changes the order of the others."""
        return tuple(c for c in self.checkpoints if c.is_set_aside)

    def has_place(self, c: Screened) -> bool:
        """Whether a member is ranked: a base, members with its rows, and those set aside are not."""
        if c.is_base or c.is_set_aside:
            return False
        return self.base is None or c.same_rows is None or c.same_rows != self.base.same_rows

    @cached_property
    def placed(self) -> tuple[Screened, ...]:
        """The members that are ranked, best first."""
        return tuple(c for c in self.checkpoints if self.has_place(c))

    @cached_property
    def base(self) -> Screened | None:
        """The others' base; None if it is unknown, or in another group."""
        return next((c for c in self.checkpoints if c.is_base), None)


def title_of(
    family: str, scale: str, targets: Sequence[Target], tokenizer: str = "one tokenizer"
) -> str:
    """A group's name for readers: family and scale, or the shared part of names, scale and tokenizer."""
    if not family.startswith(TOKENIZER):
        return f"{family} · {scale}"
    return " · ".join(filter(None, (shared_name(targets), scale, tokenizer)))


def grouped(checkpoints: Iterable[Screened], own: Own | None = None) -> tuple[Group, ...]:
    """Groups of ranked checkpoints, in their order, with unique titles; ``own`` as in `Group`."""
    members: dict[tuple[str, str], list[Screened]] = {}
    for checkpoint in checkpoints:
        members.setdefault((checkpoint.family, checkpoint.scale), []).append(checkpoint)
    groups = [Group(*name, tuple(group), own=own) for name, group in members.items()]
    titles = Counter(group.title for group in groups)
    for place, group in enumerate(groups):
        if titles[group.title] > 1:
            tokenizer = f"tokenizer of {group.checkpoints[0].label}"
            groups[place] = replace(group, tokenizer=tokenizer)
    return tuple(groups)
