"""The contest: scores come in, and a checkpoint that cannot be much better is dropped.

**The error of the whole race.** Checkpoints come one after the other, each asked in a random order
of its own, and are compared with a level: the best mean of those that were asked everything by
then, plus the margin. When an order is drawn, all earlier answers are fixed, and with them the
level and the predictions of the scores; so the best is lost only if it is dropped at its own turn,
which has at most the error, however many checkpoints there are. Questions that several share before
the turns count, by the argument of `rule`.

**The margin at any moment.** Let u of a checkpoint be the lowest level that its own bets refute (1
where it was not asked), R the best of those asked everything, and m = max(0, the highest u - mean
of R). If some checkpoint is better than R by more than m, the truly best one's mean is at or above
its own u: its own bets failed, which has a chance of at most the error, at all moments together.
The others' bets may fail as they like. For the best K of a list R is the last of K named ones; one
of the K truly best is not named then, so each one's bets have error / K.

Where R may be one that was not asked everything, that is fixed before the start: half of the error
is for u, and of the other half each of the checkpoints has its share for a lower bound of its mean,
by bets on 1 - score. To choose the form by whether R was asked everything would cost up to 1.5
times the error.

**Left out.** Of a long list only the first by their shared answers may go on, and a training that
keeps its best saves deletes others. The error is then of those that went on; who is the best of
them depends on the shared answers, so the bets on these do not count.

**Side by side** all are asked in one order, and the level is unknown at first. Half of the error is
for any two, compared question by question: each of the k - 1 comparisons that could drop the best
has its share. The other half is for the level, once a checkpoint was asked everything, and for u:
bets against the levels that the best meets win at most as much as bets against its own mean,
whatever the others answered.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.asking import ERROR, MARGIN
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.racing.rule import STEP, Array, Bets

#: ``running``: asked on. ``complete``: was asked everything. ``not better``: clearly not better than the best
#: so far by more than the margin. ``behind``: clearly worse than another, side by side. ``failed``: could not
#: be asked on. ``left out``: not among the first by the shared questions. ``deleted``: its files are gone.
Standing = Literal["running", "complete", "behind", "not better", "left out", "deleted", "failed"]

LONG = 24  # from so many checkpoints on, shared questions with probabilities leave a third
LEAST = 5  # at least so many go on
LOADS = 1.5  # of each checkpoint, at most in the mean, in the phases of a budget
_STAY = 3  # one of so many stays after a phase
_STAY_KEPT = 1.5  # the same where all stay loaded
_DEEPER = 0.9  # questions of a phase: the number of its checkpoints to this power less


class Scores(NamedTuple):
    """Answers to n questions.

    Attributes:
        score: The task's own metric, in [0, 1]. Shape (n,).
        probability: The right answer's, in [0, 1]; NaN where it is not known. Shape (n,).
    """

    score: Array
    probability: Array

    def __add__(self, later: Scores) -> Scores:  # type: ignore[override]
        return Scores(*(np.concatenate(parts) for parts in zip(self, later, strict=True)))

    def at(self, places: NDArray[np.int64]) -> Scores:
        """The scores of the questions at ``places``."""
        return Scores(*(part[places] for part in self))

    def first(self, count: int) -> Scores:
        """The scores of the first ``count`` questions."""
        return Scores(self.score[:count], self.probability[:count])


NOTHING = Scores(np.empty(0), np.empty(0))


class Shown(NamedTuple):
    """The best so far, and what is shown of all others.

    Attributes:
        labels: Those named, the best first; fewer than wanted where too few can be named yet.
        margin: No other is better than the last of those named by more than this; None without them.
        error: Chance, at most, that this is wrong or ever was, at all moments together.
    """

    labels: list[str]
    margin: float | None
    error: float


class Phase(NamedTuple):
    """A phase of shared questions: so many checkpoints are asked on, up to so many questions.

    Attributes:
        checkpoints: Number of checkpoints, the best so far.
        questions: Number of shared questions of each when the phase ends.
        after: Number of shared questions by which they are chosen.
    """

    checkpoints: int
    questions: int
    after: int


@dataclass
class Contest:
    """All answers so far, and the checkpoints still in the race.

    Args:
        questions: Most questions for each checkpoint, N.
        error: Chance, at most, that the best of those raced (over all N questions) is dropped and another is
            named that is worse by more than ``margin``; and that a margin shown is too small.
        margin: Smallest difference in score that counts.
        seed: Seed of the questions' orders.
        side_by_side: Number of checkpoints where several race at once, 0 where they come one after the other.
        sharing: Number of first questions that all are asked before the turns, 0 where each has its own
            order from the start.
        reference: A checkpoint that is asked everything and cannot be the best, as the base is.
        top: Number of best checkpoints wanted; each is compared with the last of them, with its part of the
            error.
        step: Number of questions of a bet's step.
        split: Number of checkpoints among which half of the error is split, so that a margin may be shown for a
            best one that was not asked everything; 0 where it is not. Fixed before the first question.
        weights: The questions' weights in the mean score, by question; None for equal ones. Shape (N,).
        shared: Label -> number of first questions that it shares, where that is not ``sharing``.
        may_stop: Whether the answers to shared questions may have ended the training that made the
            checkpoints. Who is the best of those that there are then depends on these answers, so the bets
            on them do not count.

    Attributes:
        answered: Label -> answers, in the checkpoint's own order.
        levels: Label -> the mean that it had to reach when it was last compared with one.
        against: Label -> labels asked everything before its turn began; in the order of the turns.
    """

    questions: int
    error: float = ERROR
    margin: float = MARGIN
    seed: int = 0
    side_by_side: int = 0
    sharing: int = 0
    reference: str = ""
    top: int = 1
    step: int = STEP
    split: int = 0
    weights: Array | None = None
    shared: dict[str, int] = field(default_factory=dict)
    may_stop: bool = False
    answered: dict[str, Scores] = field(default_factory=dict)
    standing: dict[str, Standing] = field(default_factory=dict)
    levels: dict[str, float] = field(default_factory=dict)
    against: dict[str, list[str]] = field(default_factory=dict)
    _bets: dict[str, Bets] = field(default_factory=dict)
    _by_question: dict[str, Array] = field(default_factory=dict)
    _factors: dict[int, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.weights is not None and np.ptp(self.weights) == 0:
            self.weights = None
        if self.weights is not None:
            self.weights = self.weights * (self.questions / self.weights.sum())

    def order(self, label: str) -> NDArray[np.int64]:
        """Indices of the questions, (N,), in a checkpoint's order; the first ones are those that it shares.

        With weights each next question is one of those left with a chance proportional to its weight.
        """
        count = self.questions if self.side_by_side else self.sharing_of(label)
        own = int.from_bytes(hashlib.sha256(label.encode()).digest()[:8], "big")
        if self.weights is None:
            common = np.arange(self.questions)  # drawn at random before
            order = np.random.default_rng([self.seed, own]).permutation(self.questions)
        else:
            common = self._drawn(self.seed, 0, 0)
            order = self._drawn(self.seed, own)
        is_shared = np.zeros(self.questions, bool)
        is_shared[common[:count]] = True
        return np.concatenate([common[:count], order[~is_shared[order]]])

    def _drawn(self, *seeds: int) -> NDArray[np.int64]:
        """All questions, each drawn of those left with a chance proportional to its weight."""
        assert self.weights is not None
        times = np.random.default_rng(seeds).exponential(size=self.questions)
        return np.argsort(times / self.weights, kind="stable")

    def sharing_of(self, label: str) -> int:
        """Number of first questions that a checkpoint shares with others."""
        return self.shared.get(label, self.sharing)

    def share(self, phase: Phase, labels: Sequence[str]) -> list[str]:
        """Begin a phase of shared questions; returns the labels to ask on, up to ``phase.questions``.

        They are the best by the questions that the phase before had; the reference is in the first phase
        alone. Failed ones have no phase, and those whose turn began share no more questions.
        """
        going = [label for label in labels if self.standing.get(label) != "failed"]
        if phase.after:
            others = [label for label in going if label != self.reference]
            going = [label for label in others if self._count(label) >= phase.after]
            going.sort(key=lambda label: self._worth(label, phase.after), reverse=True)
            going = going[: phase.checkpoints]
        going = [label for label in going if label not in self.against]
        for label in going:
            before = 0
            if label in self.shared or self._count(label):
                before = self.sharing_of(label)
            self.shared[label] = max(before, phase.questions)
        return going

    def hold(self, label: str, answers: Scores) -> None:
        """Take all of a checkpoint's answers so far, before its turn."""
        self.answered[label] = answers
        is_whole = self._count(label) == self.questions
        self.standing[label] = "complete" if is_whole else "running"

    def delete(self, label: str) -> None:
        """Leave out a checkpoint whose files are gone, unless it was asked everything."""
        if self.standing.get(label) != "complete":
            self.standing[label] = "deleted"

    def add(self, label: str, batch: Scores) -> Standing:
        """Take a checkpoint's answers to its next questions; returns its standing."""
        self.answered[label] = self.answered.get(label, NOTHING) + batch
        if self._count(label) == self.questions:
            standing: Standing = "complete"
        elif self.side_by_side:
            standing = self._beside(label)
        else:
            standing = self._at_its_turn(label)
        self.standing[label] = standing
        return standing

    def turns(self, labels: Sequence[str], *, cut: bool = False) -> list[str]:
        """Labels in the order of their turns: those that began before, the reference, then the others.

        After shared questions the others follow by these: those that share most, and the highest mean
        probability of the right answer (else the score); who shares none comes last. Failed ones have no
        turn, and those that are to share questions and have no answer yet.

        Args:
            labels: All that race.
            cut: Whether the worst two thirds of a long list may be left out. They are where all shared
                answers have probabilities, as few that are right or wrong do not tell who is best.
        """
        going = list[str]()
        for label in labels:
            is_ready = self._count(label) > 0 or not self.sharing_of(label)
            if is_ready and self.standing.get(label) != "failed":
                going.append(label)
        others = [label for label in going if label != self.reference]
        if self.sharing or self.shared:
            unasked = [label for label in others if not self._count(label)]
            others = [*self._by_shared(others, self._worth), *unasked]
            is_known = not unasked and all(map(self._has_probabilities, others))
            if cut and len(others) >= LONG and is_known:
                others = self._cut(others)
        turns = [label for label in self.against if label in going]
        if self.reference in going:
            turns.append(self.reference)
        return list(dict.fromkeys([*turns, *others]))

    def _cut(self, labels: list[str]) -> list[str]:
        """Leave out all but the first third by the questions that all share; those that began stay."""
        count = min(map(self._count, labels))
        best = sorted(labels, key=lambda label: self._worth(label, count), reverse=True)
        going = {*best[: max(LEAST, math.ceil(len(labels) / 3))], *self.against}
        for label in labels:
            if label not in going:
                self.standing[label] = "left out"
        return [label for label in labels if label in going]

    def _has_probabilities(self, label: str) -> bool:
        shared = self.answered[label].first(self.sharing_of(label))
        return bool(np.isfinite(shared.probability).all())

    @property
    def left_out(self) -> list[str]:
        """Labels that were left out after the shared questions."""
        return [label for label, standing in self.standing.items() if standing == "left out"]

    def begin(self, label: str) -> None:
        """Begin a checkpoint's turn: its rivals are those asked everything by now, and none later."""
        if label in self.against:
            return
        self.against[label] = []
        for other, standing in self.standing.items():
            if standing == "complete":
                self.against[label].append(other)

    def fail(self, label: str) -> None:
        """Take out a checkpoint that failed; side by side, those that it alone dropped run again."""
        self.standing[label] = "failed"
        if self.side_by_side:  # in turns it dropped nobody
            self.judge_again()

    def judge_again(self) -> None:
        """Set every standing but ``failed`` anew from all answers, whatever the order in which they came."""
        for label, standing in self.standing.items():
            if standing != "failed":
                self.add(label, NOTHING)

    def shown(self, labels: Iterable[str]) -> Shown:
        """The best of ``labels``, all that race, and the smallest margin that is shown by now."""
        named = self.named
        others = list[str]()
        for label in dict.fromkeys([*labels, *self.answered]):
            if label not in named and self._counts(label):
                others.append(label)
        if not named or (others and len(named) < self.top):
            return Shown(named, None, self.error)
        least = min(map(self._at_least, named))
        most = max(map(self._at_most, others), default=0.0)
        return Shown(named, max(0.0, most - least), self.error)

    def _counts(self, label: str) -> bool:
        """Whether a checkpoint may be the best of those that the error is about."""
        # Behind: by the half of the error for pairs.
        lost = ("failed", "left out", "deleted", "behind")
        return label != self.reference and self.standing.get(label) not in lost

    @property
    def named(self) -> list[str]:
        """Labels of the best so far, up to ``top``: of those asked everything, else by shared questions."""
        ranked = self.ranked
        if self.split and len(ranked) < self.top:
            rest = [label for label in self.answered if self._counts(label)]
            ranked += [label for label in self._by_shared(rest, self._score) if label not in ranked]
        return ranked[: self.top]

    @property
    def _part(self) -> float:
        """The part of the error that a checkpoint's bets have."""
        halves = 2 if self.side_by_side or self.split else 1
        return self.error / halves / self.top

    def _at_most(self, label: str) -> float:
        """A checkpoint's mean is at most this, but for its part of the error."""
        if self._count(label) == self.questions:
            return self.mean(label)
        if not self._count(label):
            return 1.0
        highest = self._bets_of(label).lowest(self._part)
        if self.standing[label] == "not better":
            return min(highest, self.levels[label])
        return highest

    def _at_least(self, label: str) -> float:
        """A named checkpoint's mean is at least this, but for its share of the error's other half."""
        if self._count(label) == self.questions:
            return self.mean(label)
        bets = self._bets_of(label)
        columns = None if bets.columns is None else 1 - bets.columns
        below = Bets(self.questions, columns, bets.shared, self._weights_of(label), self.step)
        below.take(1 - self.answered[label].score)
        return 1 - below.lowest(self.error / 2 / max(self.split, len(self.standing)))

    def _bets_of(self, label: str) -> Bets:
        """A checkpoint's bets, on all of its answers."""
        if label not in self._bets:
            weights = self._weights_of(label)
            self._bets[label] = Bets(self.questions, weights=weights, step=self.step)
        bets = self._bets[label]
        if bets.columns is None and not self.side_by_side:
            bets.shared = self.sharing_of(label)
        is_chosen = self.may_stop or self.left_out or "deleted" in self.standing.values()
        bets.begin = bets.shared if is_chosen else 0
        bets.take(self.answered[label].score[bets.taken :])
        return bets

    def _weights_of(self, label: str) -> Array | None:
        return None if self.weights is None else self.weights[self.order(label)]

    def _at_its_turn(self, label: str) -> Standing:
        self.begin(label)
        if label == self.reference:
            return "running"
        if label not in self._bets or self._bets[label].taken <= self.sharing_of(label):
            self._meet(label)
        if label not in self.levels:
            return "running"
        is_below = self._bets_of(label).refutes(self.levels[label], self._part)
        return "not better" if is_below else "running"

    def _meet(self, label: str) -> None:
        """Fix the level that a checkpoint has to reach, and what predicts its scores."""
        whole = [other for other in self.against[label] if self.standing.get(other) == "complete"]
        # Of equal ones the first in order: every process has to predict by the same answers.
        rivals = [other for other in whole if other != self.reference]
        rivals.sort(key=self.mean, reverse=True)
        if len(rivals) >= self.top:
            self.levels[label] = self.mean(rivals[self.top - 1]) + self.margin
        if whole and label not in self._bets:
            self._bets[label] = Bets(
                self.questions, weights=self._weights_of(label), step=self.step
            )
        if whole and self._bets[label].columns is None:
            bets = self._bets[label]
            bets.shared = self.sharing_of(label)
            bets.columns = self._columns([*rivals, *whole][0], whole)[self.order(label)]

    def _columns(self, best: str, whole: Sequence[str]) -> Array:
        """Answers to each question by checkpoints asked everything: the best one's, and the mean."""
        for label in whole:
            if label not in self._by_question:
                mine = self.answered[label]
                columns = np.stack([mine.score, _likely(mine)], axis=1)
                self._by_question[label] = columns[np.argsort(self.order(label))]
        first = self._by_question[best]
        if len(whole) == 1:
            return first
        return np.hstack([first, np.mean([self._by_question[label] for label in whole], axis=0)])

    def _beside(self, label: str) -> Standing:
        others = list[str]()
        for other in self.answered:
            if other != label and self.standing[other] != "failed":
                others.append(other)
        if not any(self.standing[other] in ("running", "complete") for other in others):
            return "running"  # two that drop each other are not both lost
        mine = self.answered[label].score
        if self.best is not None:
            self.levels[label] = level = self.mean(self.best) + self.margin
            if self._bets_of(label).refutes(level, self._part):
                return "not better"
        part = self.error / 2 / max(1, self.side_by_side - 1)
        for other in sorted(others, key=self.mean, reverse=True):
            theirs = self.answered[other].score
            count = min(len(mine), len(theirs))
            bets = Bets(self.questions, weights=self._weights_of(label), step=self.step)
            bets.take(mine[:count] - theirs[:count])
            if bets.refutes(0.0, part):
                return "behind"
        return "running"

    def _count(self, label: str) -> int:
        return len(self.answered.get(label, NOTHING).score)

    def mean(self, label: str) -> float:
        """A checkpoint's mean score so far; with weights an estimate, exact of all questions."""
        return self._score(label, self._count(label))

    def _score(self, label: str, count: int) -> float:
        return self._estimate(label, self.answered[label].score[:count])

    def _worth(self, label: str, count: int) -> float:
        """The mean probability of the right answer, or else the score, in the first ``count`` answers."""
        return self._estimate(label, _likely(self.answered[label].first(count)))

    def _estimate(self, label: str, values: Array) -> float:
        """The mean over all questions, by the ``values`` of the first ones in a checkpoint's order."""
        if self.weights is None:
            return float(values.mean())
        factors = self._factors_of(len(values))[self.order(label)[: len(values)]]
        return float(factors @ values / factors.sum())

    def _factors_of(self, count: int) -> Array:
        """Each question's weight by its chance to be among ``count`` drawn ones. Shape (N,).

        Each is drawn by a time at which it comes, exponential with its weight as rate; the chance is to come
        before the time by which ``count`` are expected.
        """
        assert self.weights is not None
        if count == self.questions:
            return self.weights
        if count not in self._factors:
            low = 0.0
            high = 1.0
            while -np.expm1(-self.weights * high).sum() < count:
                high *= 2
            for _ in range(60):
                middle = (low + high) / 2
                if -np.expm1(-self.weights * middle).sum() < count:
                    low = middle
                else:
                    high = middle
            self._factors[count] = self.weights / -np.expm1(-self.weights * high)
        return self._factors[count]

    def _by_shared(self, labels: Sequence[str], value: Callable[[str, int], float]) -> list[str]:
        """Labels with an answer: those that share most questions first, then by the ``value`` in these."""
        by_number = dict[int, list[str]]()
        for label in labels:
            if self._count(label):
                by_number.setdefault(self.sharing_of(label), []).append(label)
        ordered = list[str]()
        for number, alike in sorted(by_number.items(), reverse=True):
            values = dict[str, float]()
            shared = min(number, *map(self._count, alike))
            for label in alike:
                values[label] = value(label, shared or self._count(label))
            ordered += sorted(alike, key=lambda label: -values[label])
        return ordered

    @property
    def asked(self) -> int:
        """Number of questions asked so far, over all checkpoints."""
        return sum(len(scores.score) for scores in self.answered.values())

    @property
    def best(self) -> str | None:
        """Label of the highest score among those asked everything, the first of equal ones; else None."""
        return next(iter(self.ranked), None)

    @property
    def ranked(self) -> list[str]:
        """Labels of those asked everything, the best first."""
        whole = list[str]()
        for label, standing in self.standing.items():
            if standing == "complete" and label != self.reference:
                whole.append(label)
        return sorted(whole, key=self.mean, reverse=True)


def _likely(scores: Scores) -> Array:
    """The probabilities of the right answers, or the scores where there are none."""
    return np.where(np.isnan(scores.probability), scores.score, scores.probability)


def phases(
    checkpoints: int,
    questions: int,
    budget: int,
    *,
    top: int = 1,
    kept: bool = False,
    reference: bool = False,
) -> list[Phase]:
    """Plan shared questions for a budget: phases after each of which the worst leave.

    A third stays each time, and each checkpoint is loaded 1.5 times in the mean at most; where all are
    ``kept`` loaded two thirds stay, in as many phases as that takes. The fewer are left, the more questions
    each one has been asked.

    Args:
        checkpoints: Number of checkpoints, K, without the reference.
        questions: Number of questions in all, N.
        budget: The most questions over all checkpoints, the reference included.
        top: Number of best checkpoints wanted; one more is left at the end.
        kept: Whether all stay loaded.
        reference: Whether a reference is asked as well; it is in the first phase alone.

    Raises:
        UsageError: The budget has no question for each.
    """
    first = checkpoints + reference
    if checkpoints < 1 or budget < first:
        raise UsageError(
            f"expected at least {first}, a question of each checkpoint, got {budget}",
            argument="budget",
        )
    sizes = _sizes(checkpoints, top + 1, kept)
    shares = [(checkpoints / size) ** _DEEPER for size in sizes]

    def planned(unit: float) -> list[int]:
        return [min(questions, max(1, int(unit * share))) for share in shares]

    def cost(counts: Sequence[int]) -> int:
        more = np.diff(counts, prepend=0)
        return int(np.array([first, *sizes[1:]]) @ more)

    low = 0.0
    high = float(questions)
    for _ in range(40):
        middle = (low + high) / 2
        if cost(planned(middle)) <= budget:
            low = middle
        else:
            high = middle
    counts = planned(low)
    if cost(planned(high)) <= budget:
        counts = planned(high)
    planned_phases = list[Phase]()
    before = 0
    for size, count in zip(sizes, counts, strict=True):
        if count > before:
            planned_phases.append(Phase(size, count, before))
        before = count
    return planned_phases


def _sizes(checkpoints: int, fewest: int, kept: bool) -> list[int]:
    """Numbers of checkpoints in the phases of a budget, down to the ``fewest``."""
    sizes = [checkpoints]
    part = _STAY_KEPT if kept else _STAY
    while True:
        size = max(fewest, round(sizes[-1] / part))
        loads = sum(sizes) + size
        if size >= sizes[-1] or (not kept and loads > LOADS * checkpoints):
            return sizes
        sizes.append(size)


#: Answers of a checkpoint to the questions ``begin`` to ``end`` of its order.
Ask = Callable[[int, int], Scores]


def run(
    contest: Contest, label: str, ask: Ask, batch: int = STEP, known: Scores = NOTHING
) -> Standing:
    """Ask a checkpoint, after its ``known`` answers, until it is dropped or done; returns its standing.

    ``batch`` questions are asked at once. The bets do not depend on it, only when they are looked at.
    """
    begin = len(contest.answered.get(label, NOTHING).score)
    more = known.at(np.arange(begin, max(begin, len(known.score))))
    contest.begin(label)
    standing = contest.add(label, more) if begin or len(more.score) else "running"
    while standing == "running":
        begin = len(contest.answered.get(label, NOTHING).score)
        standing = contest.add(label, ask(begin, min(begin + batch, contest.questions)))
    return standing
