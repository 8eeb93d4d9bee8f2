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
    is_epoch,
    possible_runs,
    run_and_step,
    step_key,
)
from lmeval_screener.tokens.answers import left_out_note
from lmeval_screener.tokens.resolution import Resolution
from lmeval_screener.tokens.sets import some_words
from lmeval_screener.weights.body import UNKNOWN, Likeness


@dataclass(frozen=True, eq=False)
class Reading:
    """One checkpoint as it was read, before it is ranked in a group.

    Attributes:
        target: The checkpoint as requested.
        repo: Present name of the repository, or the folder or address.
        revision: The commit that was read, 40 hex digits; None for a folder or another storage.
        tensor: Name of the tensor that is the output projection.
        file: Name of the file that stores this tensor.
        dtype: Element type in which the tensor is stored, such as ``BF16``.
        shape: Numbers of rows and columns of this tensor.
        tied: Whether the output projection is the input embedding.
        parameters: Number of parameters as stored; None if unknown.
        tokenizer: Digest of the tokenizer file, or of a GGUF file's vocabulary.
        resolution: The rows of the domain's tokens (T), of everyday tokens (R) and of a task's
            answer tokens in the tokenizer; checkpoints with the same tokenizer share it.
        gaps: Distance, ``cosine`` or ``euclidean`` -> the gap G.
        warnings: Sentences to read along with the figures.
        bytes_read: Bytes read over the network, including those of an adapter's base; 0 if all came
            from the disk, the cache or a registry.
        requests: Number of requests, including those for an adapter's base; 0 in the same cases.
        seconds: Time from the first request to the last row, in seconds.
        ratio: The ratio; None if the final norm is not known.
        no_ratio: Why there is no ratio, as a clause; empty if there is one.
        sketch: Fingerprint of the rows (`lmeval_screener.weights.copies`), by which equal rows are
            recognised; empty if unknown.
        base: The ``place`` of the base model that an adapter or the Hub names; empty if none is
            named.
        body: Fingerprint of the weights before the final norm (`read_body`), by which copies are
            recognised; the digest of the weights files if these weights were not read.
        common: Digest of the tokenizer by which this checkpoint is compared with others; empty
            before that is decided.
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
        """The name as a user writes it: ``repo``, with ``@revision`` and ``:file`` if requested."""
        return label(self.repo, self.target.revision, self.target.file)

    @property
    def place(self) -> str:
        """The name by which other checkpoints refer to this one as their base.

        It is ``name`` for a repository or an address, and the absolute path for a folder.
        """
        return self.target.place if self.target.local else self.name

    @property
    def label(self) -> str:
        """The checkpoint's name in reports; unique in a screening."""
        return self.target.labelled or self.name

    @property
    def training_and_step(self) -> tuple[str, str | None]:
        """The training run (repository or folder) and the name of its step (revision or folder).

        On the Hub the step is the requested revision, None for the default branch. Elsewhere it is
        the name of the folder, such as ``checkpoint-500``, or None if that is not named after a
        step.
        """
        if self.revision is None:
            # As `run_and_step` spells a run: an address loses a slash of its ``//``.
            return run_and_step(self.repo) or (str(Path(self.repo)), None)
        return self.repo, self.target.revision

    @property
    def possible_runs(self) -> tuple[str, ...]:
        """The training runs that this checkpoint may belong to.

        There is one if the checkpoint's step or commit is known. Otherwise there are two, the
        checkpoint's folder and the folder above (see `runs.possible_runs`).
        """
        run, step = self.training_and_step
        if step is not None or self.revision is not None:
            return (run,)
        return possible_runs(self.repo)

    @property
    def step(self) -> str | None:
        """Name of the training step; see `training_and_step`."""
        return self.training_and_step[1]

    @property
    def accuracy(self) -> float | None:
        """The supplied accuracy, in the unit of its source; None if there is none."""
        return self.target.accuracy

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences to read along with the figures.

        These are the ``warnings``, and notes on words that were dropped and on rows that the matrix
        lacks.
        """
        tokens = self.resolution
        notes = list(self.warnings)
        if tokens.never_made:
            words = some_words(tokens.never_made, 5)
            notes.append(f"words dropped because the tokenizer never produces their piece: {words}")
        if tokens.one_row:
            notes.append(
                f"words counted once because they share a row: {', '.join(tokens.one_row)}"
            )
        if tokens.answers:
            notes.append(left_out_note(tokens.answers[0].group, tokens.left_out))
        if tokens.vocabulary > self.shape[0]:
            notes.append(
                f"the tokenizer has {tokens.vocabulary} tokens, but {self.tensor} has only "
                f"{self.shape[0]} rows"
            )
        return tuple(filter(None, notes))


#: Start of the family of checkpoints given by name; their tokenizer's short hash follows.
TOKENIZER = "tokenizer:"


RANKED = {"gap": "highest G", "ratio": "highest ratio"}


Finite = Annotated[float, ("type", "number")]  # never null in JSON
Side = Literal["above", "below", "level", "equal"]


class Against(NamedTuple):
    """How a checkpoint's ratio compares with that of its base.

    Attributes:
        difference: The checkpoint's ratio minus that of the base, paired over tokens.
        se: Jackknife standard error of the difference.
        side: ``above`` or ``below`` the base if the difference is significant and larger than
            rounding explains; ``equal`` for a copy of the base, or if the rows are those of the
            base; else ``level``.
    """

    difference: Finite
    se: Annotated[Finite, ("minimum", 0)]
    side: Side


@dataclass(frozen=True, eq=False, repr=False)
class Screened(Reading):
    """One screened checkpoint: a reading with its rank in a group.

    Attributes:
        family: Family; ``tokenizer:`` and a short hash for checkpoints of no family.
        scale: Size class, such as ``7B``.
        rank: Rank in its group (family and scale), 1 for the best by ``ranked_by``. Checkpoints
            with equal rows share a rank. The base, and checkpoints with its rows, are not counted;
            their rank is 1 plus the number of ranks whose figure is higher than theirs. Checkpoints
            that are set aside (``is_set_aside``) get one more than the last rank.
        ranked_by: The figure that ranks the group: ``ratio``, or ``gap`` for G.
        metric: Distance that reports use for G: the requested one, else that of the family's file,
            else ``cosine``.
        is_base: Whether the other members of its group were trained from this checkpoint. A base is
            never recommended.
        against: The comparison with the ratio of the base; None for the base itself, without a
            base, or if the checkpoint or the base has no ratio.
        copy_of: Label of the checkpoint in the group of which this one is a copy; None if it is not
            a copy. A copy has the rank of its original, even if its own G differs.
        copy_rounded: Whether copy and original agree only within the rounding of their element
            types.
        equal_rows_with: Label of another checkpoint of the group with the same rows, of which this
            one is not a copy; None if there is none. An adapter often has the rows of its base.
        same_rows: Number that identifies the rows within the group: checkpoints with the same
            number have the same rows. None if unknown.
        bodies: The comparison of the other weights with those of ``copy_of``, or else of
            ``equal_rows_with``.
        chosen: Why the checkpoint is to be evaluated: ``rank`` if it is on a short list, ``audit``
            if it was drawn at random from the checkpoints that are not on it; else None.
        inclusion_probability: Probability of being chosen; None without a short list.
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
        """G by the distance that reports use for this group (``metric``)."""
        return self.gaps[self.metric]

    @property
    def equals(self) -> str | None:
        """Label of the checkpoint that this one copies or shares rows with; None if there is none."""
        return self.copy_of or self.equal_rows_with

    @property
    def figure(self) -> Gap | Ratio:
        """The figure that ranks this checkpoint: its ratio, or G."""
        if self.ranked_by == "ratio" and self.ratio is not None:
            return self.ratio
        return self.gap

    @property
    def is_set_aside(self) -> bool:
        """Whether the checkpoint has no rank because it lacks the figure that ranks its group."""
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
    """One checkpoint that could not be screened.

    Attributes:
        target: The checkpoint as requested.
        error: Code of the error, a key of `SCREENING_CODES`.
        message: What went wrong, and what to do about it.
        base: For an adapter that keeps the output projection of its base, the name of that base
            if it cannot be read; otherwise empty.
        cause: Why the base cannot be read; otherwise empty.
    """

    target: Target
    error: str
    message: str
    base: str = ""
    cause: str = ""

    @property
    def repo(self) -> str:
        """Repository, folder or address, as requested."""
        return self.target.shown

    @property
    def revision(self) -> str | None:
        """Revision as requested; None for the default branch."""
        return self.target.revision

    @property
    def label(self) -> str:
        """The checkpoint's name in reports."""
        return self.target.label

    def __repr__(self) -> str:
        return f"<Failed> {self.label}: {self.error}: {self.message}"


@dataclass(frozen=True, repr=False)
class Group:
    """Comparable checkpoints: those of one family (or tokenizer) and one scale, best first.

    Attributes:
        family: Name of the family; ``tokenizer:`` and a short hash for checkpoints of no family.
        scale: Size class, such as ``7B``.
        checkpoints: The members, best first.
        tokenizer: Name of the tokenizer in titles, for checkpoints of no family.
        own: How strongly ranks predicted accuracy in the user's own results; None if there are
            none. It is used only if its ``kind`` is that of the group.
    """

    family: str
    scale: str
    checkpoints: tuple[Screened, ...]
    tokenizer: str = "one tokenizer"
    own: Own | None = None

    def __repr__(self) -> str:
        return f"<Group> {self.name}: {some_words([c.label for c in self.checkpoints], 5)}"

    @cached_property
    def trajectory(self) -> tuple[Screened, ...]:
        """All members in the order of their training steps; empty unless all are of one training run.

        They are then revisions of one repository, or folders of one training run. Members without a
        step come last: first models next to the steps (such as ``merged`` or ``final``), then the
        model in the run's own folder or on the default branch. A base that is not of the run is
        left out.
        """
        runs = {c.training_and_step[0] for c in self.checkpoints if c.step is not None}
        if not runs and len(self.checkpoints) > 1:
            # A model and what lies in its folder, such as merged, are of one training too.
            own = [c.training_and_step[0] for c in self.checkpoints if not c.is_base]
            outermost = min(own, key=len, default="")
            for c in self.checkpoints:
                if outermost in c.possible_runs and c.training_and_step[0] != outermost:
                    runs = {outermost}
        if len(runs) != 1:
            return ()
        (run,) = runs
        members: list[Screened] = []
        for c in self.checkpoints:
            if c.step is not None or run in c.possible_runs:
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
        """The members that are steps of a training run, in order.

        Steps without the figure that ranks the group are left out. Empty for fewer than two steps.
        Epochs count as steps only in a run without other steps.
        """
        members = [c for c in self.trajectory if c.step is not None and not c.is_set_aside]
        numbered = [c for c in members if not is_epoch(c.step or "")]
        members = numbered or members
        return tuple(members) if len(members) > 1 else ()

    @cached_property
    def neighbours(self) -> dict[Screened, Screened]:
        """Member -> the first member at the next rank; in a training run, the step before.

        Members without such a neighbour, like the member at the last rank, are left out.
        """
        if self.steps:
            return dict(pairwise(reversed(self.steps)))
        first = {c.rank: c for c in reversed(self.placed)}
        return {c: first[c.rank + 1] for c in self.placed if c.rank + 1 in first}

    @property
    def figure(self) -> Literal["G", "ratio"]:
        """Name of the figure that ranks the group: ``ratio`` or ``G``."""
        return "ratio" if self.checkpoints[0].ranked_by == "ratio" else "G"

    @property
    def metric(self) -> Distance:
        """The distance that reports use for G in this group."""
        return self.checkpoints[0].metric

    # --- chances --------------------------------------------------------------------------------------

    @cached_property
    def is_noise(self) -> bool:
        """Whether the choice of tokens alone may explain how far the members' figures differ.

        False for the checkpoints of a training run.
        """
        figures = {c.rank: c.figure for c in reversed(self.placed)}
        return not self.trajectory and is_noise([*figures.values()])

    @cached_property
    def kind(self) -> str:
        """The kind of the checkpoints, a key of `evidence.SLOPES`; empty if chances are unknown.

        The members count as fine-tunes, whose ranks predict accuracy less well, unless a family's
        file calls each of them a base and none names a base of its own: then they were trained from
        scratch.
        """
        if self.figure != "ratio" or self.trajectory or self.is_noise:
            return ""
        for c in self.checkpoints:
            if c.target.kind != "base" or c.base or c.against:
                return FINE_TUNES
        return FROM_SCRATCH

    @property
    def slope(self) -> Slope | None:
        """How strongly ranks predict accuracy for this kind of group; None if unknown.

        It follows from the user's own results if they are of the group's ``kind``, and otherwise
        from our studies (`SLOPES`).
        """
        if self.own and self.own.kind == self.kind:
            return self.own
        return SLOPES.get(self.kind)

    @cached_property
    def is_like_ours(self) -> bool:
        """Whether the group resembles the groups of our own models that gave the `SLOPES`.

        Those groups had 8 to 32 siblings with 50,000 to 1,000,000 parameters, all trained from
        scratch or from one known base.
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
        """Whether the chances were measured on checkpoints like these.

        They were if they follow from the user's own results, or if ``is_like_ours`` is true.
        """
        return isinstance(self.slope, Own) or self.is_like_ours

    @cached_property
    def chances(self) -> Chances | None:
        """The chances that follow from the ranks; None if they are unknown.

        They are unknown if G ranks the group, if the members are checkpoints of one training run,
        if noise may explain their order, or if there are fewer than two ranks.
        """
        if self.slope is None or self.places < 2:
            return None
        return Chances(self.places, self.slope)

    @cached_property
    def places(self) -> int:
        """Number of ranks that the members take."""
        return max((c.rank for c in self.placed), default=0)

    def first_for(self, chance: float = WITHIN) -> int:
        """Return how many of the top ranks are needed to include the best checkpoint.

        This is the smallest number of ranks that include it with a probability of at least
        ``chance``; all ranks if no chances are known.
        """
        return self.chances.first_for(chance) if self.chances else self.places

    @cached_property
    def by_rows(self) -> dict[int, list[Screened]]:
        """The members that are not copies, gathered by their rows, each list best first.

        The keys are ``same_rows``; a member for which that is unknown has a negative key of its
        own.
        """
        alike: dict[int, list[Screened]] = {}
        for c in self.checkpoints:
            if c.copy_of is None:
                rows = -id(c) if c.same_rows is None else c.same_rows
                alike.setdefault(rows, []).append(c)
        return alike

    def holds_best(self, c: Screened) -> float | None:
        """Return the chance that the best checkpoint has this member's rank or a better one.

        None if the chances are unknown or the member takes no rank.
        """
        if self.chances is None or not self.has_place(c):
            return None
        return float(self.chances.holds_best[c.rank - 1])

    def chance(self, better: Screened, worse: Screened) -> float | None:
        """Return the chance that ``better`` is more accurate than ``worse``; None if unknown.

        The chance holds for checkpoints whose accuracies differ by more than 0.01.
        """
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
        """The group's name in reports.

        A training run has the name of its model; other groups have their family and scale, or what
        their checkpoints' names share.
        """
        if not self.trajectory:
            targets = [c.target for c in self.checkpoints]
            return title_of(self.family, self.scale, targets, self.tokenizer)
        if self.trajectory[0].revision is None:
            return Path(self._run).resolve().name
        return self._run.rpartition("/")[2]

    @property
    def anchor(self) -> str:
        """The group's name in links to its place on a page."""
        return re.sub(r"[^\w-]+", "-", f"{self.family}-{self.scale}")

    @cached_property
    def names(self) -> dict[Screened, str]:
        """Member -> its name in the group's tables.

        In a training run this is the step, ``default branch``, ``final model`` or the name of the
        folder; otherwise it is the label.
        """
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
        """The members that may be recommended, best first: all but the base and ``set_aside``."""
        return tuple(c for c in self.checkpoints if not c.is_base and not c.is_set_aside)

    @cached_property
    def set_aside(self) -> tuple[Screened, ...]:
        """The members that have no rank because they lack the figure that ranks the group."""
        return tuple(c for c in self.checkpoints if c.is_set_aside)

    def has_place(self, c: Screened) -> bool:
        """Whether a member takes a rank.

        The base, members with the rows of the base, and members that are set aside take none.
        """
        if c.is_base or c.is_set_aside:
            return False
        return self.base is None or c.same_rows is None or c.same_rows != self.base.same_rows

    @cached_property
    def placed(self) -> tuple[Screened, ...]:
        """The members that take a rank, best first."""
        return tuple(c for c in self.checkpoints if self.has_place(c))

    @cached_property
    def base(self) -> Screened | None:
        """The member that the others were trained from; None if unknown or not in this group."""
        return next((c for c in self.checkpoints if c.is_base), None)


def title_of(
    family: str, scale: str, targets: Sequence[Target], tokenizer: str = "one tokenizer"
) -> str:
    """Return a group's name, as reports show it.

    The name is the family and the scale, joined by ``·``. Checkpoints of no family have three parts
    instead: what their names have in common, if anything, then the scale, then ``tokenizer``.
    """
    if not family.startswith(TOKENIZER):
        return f"{family} · {scale}"
    return " · ".join(filter(None, (shared_name(targets), scale, tokenizer)))


def grouped(checkpoints: Iterable[Screened], own: Own | None = None) -> tuple[Group, ...]:
    """Gather ranked checkpoints into groups with unique titles, in order of appearance.

    Args:
        checkpoints: Ranked checkpoints.
        own: How strongly ranks predicted accuracy in the user's own results; None if there are
            none.
    """
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
