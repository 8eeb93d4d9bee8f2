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
    """The scores of a checkpoint's answers to n questions.

    Attributes:
        score: Score of each answer by the task's metric, in [0, 1]. Shape (n,).
        probability: The probability that the checkpoint gave to the right answer, in [0, 1]; NaN
            where it is unknown. Shape (n,).
    """

    score: Array
    probability: Array

    def __add__(self, later: Scores) -> Scores:  # type: ignore[override]
        return Scores(
            np.concatenate([self.score, later.score]),
            np.concatenate([self.probability, later.probability]),
        )

    def at(self, places: NDArray[np.int64]) -> Scores:
        """Return the scores at ``places``, which are indices of shape (k,)."""
        return Scores(self.score[places], self.probability[places])

    def first(self, count: int) -> Scores:
        """Return the scores of the first ``count`` answers."""
        return Scores(self.score[:count], self.probability[:count])


NOTHING = Scores(np.empty(0), np.empty(0))


class Shown(NamedTuple):
    """The best checkpoints so far, and by how much another one may still be better.

    Attributes:
        labels: Labels of the best checkpoints, as in :attr:`Contest.named`.
        margin: No other checkpoint is better than the last one in ``labels`` by more than this
            difference in score; None if nothing can be shown yet. The probability that any margin
            shown during the race is too small is at most :attr:`Contest.error`.
    """

    labels: list[str]
    margin: float | None


class Phase(NamedTuple):
    """A phase of shared questions, in which the best checkpoints so far are asked more questions.

    Attributes:
        checkpoints: Number of checkpoints that are asked in this phase.
        questions: Number of shared questions that each of these has been asked when the phase ends.
        after: Number of shared questions by which these checkpoints are chosen; 0 in the first
            phase, which asks all.
    """

    checkpoints: int
    questions: int
    after: int


@dataclass
class Contest:
    """The answers given so far, and the checkpoints that are still in the race.

    Checkpoints take turns: each is asked, batch by batch, until it is dropped or was asked
    everything. Shared questions come before the turns. Checkpoints that race at the same time
    (``side_by_side``) have no turns, and share the order of all questions.

    Args:
        questions: Number of questions in all, N; no checkpoint is asked more.
        error: Largest probability of a wrong outcome: that the best checkpoint (over all N
            questions) is dropped and one is named that is worse by more than ``margin``, or that a
            margin is reported too small.
        margin: The smallest difference in score that counts.
        seed: Seed of the orders in which the questions are asked.
        side_by_side: Number of checkpoints, if several race at the same time; 0 if they take turns.
        sharing: Number of shared questions, which every checkpoint is asked first; 0 if each has
            its own order from the start.
        reference: Label of a checkpoint that is asked too and cannot be the best, such as the base
            model of adapters; empty without one.
        top: Number of best checkpoints wanted. Every other checkpoint is compared with the worst
            of these, with an error of ``error`` / ``top``.
        step: Number of questions between two updates of the predictions that the bets use (see
            :class:`~lmeval_dispersion.racing.rule.Bets`).
        split: Number of checkpoints that share half of ``error``, so that a margin can be reported
            for a best one that was not asked everything; 0 for no such margin. Set it before the
            first question.
        weights: Weight of each question in the mean score; None if all are equal. Shape (N,).
        shared: Label -> number of shared questions of this checkpoint, where it is not ``sharing``.
        may_stop: Whether answers to shared questions may have stopped the training run that makes
            the checkpoints. Which checkpoints exist then depends on these answers, so bets on the
            answers do not count.

    Attributes:
        answered: Label -> scores of the answers so far, in the order in which this checkpoint is
            asked.
        standing: Label -> the checkpoint's state in the race, one of :data:`Standing`.
        levels: Label -> the mean score that this checkpoint had to reach in its last comparison.
        against: Label -> labels of the checkpoints that had been asked everything when this
            checkpoint's turn began. The keys are in the order of the turns.
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
        """Return the order in which a checkpoint is asked the questions.

        The order is an array of indices, shape (N,), int64. The questions that the checkpoint
        shares with others come first. If questions have weights, each question is drawn from the
        remaining ones with a chance proportional to its weight.
        """
        count = self.questions if self.side_by_side else self.sharing_of(label)
        digest = hashlib.sha256(label.encode()).digest()
        own = int.from_bytes(digest[:8], "big")
        if self.weights is None:
            common = np.arange(self.questions)  # drawn at random before
            rng = np.random.default_rng([self.seed, own])
            order = rng.permutation(self.questions)
        else:
            common = self._drawn(self.seed, 0, 0)
            order = self._drawn(self.seed, own)
        first = common[:count]
        is_shared = np.zeros(self.questions, bool)
        is_shared[first] = True
        rest = order[~is_shared[order]]
        return np.concatenate([first, rest])

    def _drawn(self, *seeds: int) -> NDArray[np.int64]:
        """All questions, each drawn of those left with a chance proportional to its weight."""
        assert self.weights is not None
        rng = np.random.default_rng(seeds)
        times = rng.exponential(size=self.questions)
        return np.argsort(times / self.weights, kind="stable")

    def sharing_of(self, label: str) -> int:
        """Return how many of a checkpoint's first questions are shared with other checkpoints."""
        return self.shared.get(label, self.sharing)

    def share(self, phase: Phase, labels: Sequence[str]) -> list[str]:
        """Begin a phase of shared questions, and return the labels of the checkpoints to ask.

        Each of these checkpoints is to be asked until it has ``phase.questions`` answers. They are
        the best of ``labels`` by their first ``phase.after`` answers; the first phase takes all.
        Checkpoints that failed, or whose turn has begun, are not asked; ``reference`` is asked in
        the first phase only.
        """
        sound = [label for label in labels if self.standing.get(label) != "failed"]
        chosen = self._best_after(phase, sound) if phase.after else sound
        going = [label for label in chosen if label not in self.against]
        for label in going:
            before = 0
            if label in self.shared or self.count(label):
                before = self.sharing_of(label)
            self.shared[label] = max(before, phase.questions)
        return going

    def _best_after(self, phase: Phase, labels: Sequence[str]) -> list[str]:
        """The best by the questions of the phases before, without the reference."""
        asked = list[str]()
        for label in labels:
            if label != self.reference and self.count(label) >= phase.after:
                asked.append(label)
        asked.sort(key=lambda label: self._worth(label, phase.after), reverse=True)
        return asked[: phase.checkpoints]

    def hold(self, label: str, answers: Scores) -> None:
        """Set all answers that a checkpoint has given so far, before its turn begins.

        Its standing becomes ``complete`` if it was asked everything, and ``running`` if not.
        """
        self.answered[label] = answers
        is_whole = self.count(label) == self.questions
        self.standing[label] = "complete" if is_whole else "running"

    def delete(self, label: str) -> None:
        """Mark a checkpoint as deleted, because its files no longer exist.

        A checkpoint that was asked everything keeps its standing.
        """
        if self.standing.get(label) != "complete":
            self.standing[label] = "deleted"

    def add(self, label: str, batch: Scores) -> Standing:
        """Add a checkpoint's answers to its next questions, and return its new standing."""
        before = self.answered.get(label, NOTHING)
        self.answered[label] = before + batch
        if self.count(label) == self.questions:
            standing: Standing = "complete"
        elif self.side_by_side:
            standing = self._beside(label)
        else:
            standing = self._at_its_turn(label)
        self.standing[label] = standing
        return standing

    def turns(self, labels: Sequence[str], *, cut: bool = False) -> list[str]:
        """Return the labels of the checkpoints that have a turn, in the order of their turns.

        Checkpoints whose turn has begun come first, then ``reference``, then all others. If there
        are shared questions, the others are ordered by their number of shared questions, the most
        first, then by the mean probability of the right answer (or the mean score, where
        probabilities are unknown); checkpoints without answers come last. A checkpoint has no turn
        if it failed, was left out, or has shared questions but no answer yet.

        Args:
            labels: Labels of all checkpoints in the race, in the order of the list.
            cut: Whether the worst two thirds may be left out if 24 or more checkpoints have a turn.
                This happens only if each of these has answered shared questions, and all answers
                to them have probabilities: a few answers that are just right or wrong do not show
                which checkpoints are the best.
        """
        going = list[str]()
        for label in labels:
            is_ready = self.count(label) > 0 or not self.sharing_of(label)
            if is_ready and self.standing.get(label) != "failed":
                going.append(label)
        others = [label for label in going if label != self.reference]
        if self.sharing or self.shared:
            unasked = [label for label in others if not self.count(label)]
            others = self._by_shared(others, self._worth)
            others += unasked
            is_known = not unasked and all(map(self._has_probabilities, others))
            if cut and len(others) >= LONG and is_known:
                others = self._cut(others)
        turns = [label for label in self.against if label in going]
        if self.reference in going:
            turns.append(self.reference)
        return list(dict.fromkeys([*turns, *others]))

    def _cut(self, labels: list[str]) -> list[str]:
        """Leave out all but the first third by the questions that all share; those that began stay."""
        count = min(map(self.count, labels))
        best = sorted(labels, key=lambda label: self._worth(label, count), reverse=True)
        third = math.ceil(len(labels) / 3)
        staying = {*best[: max(LEAST, third)], *self.against}
        going = list[str]()
        for label in labels:
            if label in staying:
                going.append(label)
            else:
                self.standing[label] = "left out"
        return going

    def _has_probabilities(self, label: str) -> bool:
        shared = self.answered[label].first(self.sharing_of(label))
        return bool(np.isfinite(shared.probability).all())

    @property
    def left_out(self) -> list[str]:
        """Labels of the checkpoints that were left out after the shared questions."""
        return [label for label, standing in self.standing.items() if standing == "left out"]

    def begin(self, label: str) -> None:
        """Begin a checkpoint's turn, and fix the checkpoints that it is compared with.

        These are the checkpoints that have been asked everything by now. A second call changes
        nothing.
        """
        if label in self.against:
            return
        self.against[label] = []
        for other, standing in self.standing.items():
            if standing == "complete":
                self.against[label].append(other)

    def fail(self, label: str) -> None:
        """Take a failed checkpoint out of the race.

        If checkpoints race at the same time, those that were dropped only because they were worse
        than the failed one are back in the race.
        """
        self.standing[label] = "failed"
        if self.side_by_side:  # in turns it dropped nobody
            self.judge_again()

    def judge_again(self) -> None:
        """Judge all checkpoints anew by their answers, except for those that failed.

        The outcome does not depend on the order in which the answers came.
        """
        for label, standing in self.standing.items():
            if standing != "failed":
                self.add(label, NOTHING)

    def shown(self, labels: Iterable[str]) -> Shown:
        """Return the best checkpoints so far, and the smallest margin that the answers support.

        ``labels`` are the labels of all checkpoints in the race, asked or not.
        """
        named = self.named
        others = list[str]()
        for label in dict.fromkeys([*labels, *self.answered]):
            if label not in named and self._counts(label):
                others.append(label)
        if not named or (others and len(named) < self.top):
            return Shown(named, None)
        least = min(map(self._at_least, named))
        most = max(map(self._at_most, others), default=0.0)
        margin = max(0.0, most - least)
        return Shown(named, margin)

    def _counts(self, label: str) -> bool:
        """Whether a checkpoint may be the best of those that the error is about."""
        # Behind: by the half of the error for pairs.
        lost = ("failed", "left out", "deleted", "behind")
        return label != self.reference and self.standing.get(label) not in lost

    @property
    def named(self) -> list[str]:
        """Labels of the best checkpoints so far, the best first; at most ``top``.

        They are the best of the checkpoints that were asked everything. If these are fewer than
        ``top`` and ``split`` is set, the best by the shared questions follow.
        """
        ranked = self.ranked
        if self.split and len(ranked) < self.top:
            rest = list[str]()
            for label in self.answered:
                if label not in ranked and self._counts(label):
                    rest.append(label)
            ranked += self._by_shared(rest, self._score)
        return ranked[: self.top]

    @property
    def _part(self) -> float:
        """The part of the error that a checkpoint's bets have."""
        halves = 2 if self.side_by_side or self.split else 1
        return self.error / halves / self.top

    def _at_most(self, label: str) -> float:
        """A checkpoint's mean is at most this, but for its part of the error."""
        count = self.count(label)
        if count == self.questions:
            return self.mean(label)
        if not count:
            return 1.0
        highest = self._bets_of(label).lowest(self._part)
        if self.standing[label] == "not better":
            return min(highest, self.levels[label])
        return highest

    def _at_least(self, label: str) -> float:
        """A named checkpoint's mean is at least this, but for its share of the error's other half."""
        if self.count(label) == self.questions:
            return self.mean(label)
        bets = self._bets_of(label)
        below = Bets(
            self.questions,
            columns=None if bets.columns is None else 1 - bets.columns,
            shared=bets.shared,
            weights=self._weights_of(label),
            step=self.step,
        )
        below.take(1 - self.answered[label].score)
        sharers = max(self.split, len(self.standing))
        return 1 - below.lowest(self.error / 2 / sharers)

    def _bets_of(self, label: str) -> Bets:
        """A checkpoint's bets, on all of its answers."""
        if label not in self._bets:
            self._bets[label] = self.new_bets(label)
        bets = self._bets[label]
        if bets.columns is None and not self.side_by_side:
            bets.shared = self.sharing_of(label)
        is_chosen = self.may_stop or self.left_out or "deleted" in self.standing.values()
        bets.begin = bets.shared if is_chosen else 0
        scores = self.answered[label].score
        bets.take(scores[bets.taken :])
        return bets

    def new_bets(self, label: str) -> Bets:
        """Return the bets on a checkpoint's answers, in the state before its first answer."""
        return Bets(self.questions, weights=self._weights_of(label), step=self.step)

    def _weights_of(self, label: str) -> Array | None:
        if self.weights is None:
            return None
        return self.weights[self.order(label)]

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
            last = rivals[self.top - 1]
            self.levels[label] = self.mean(last) + self.margin
        if not whole:
            return
        if label not in self._bets:
            self._bets[label] = self.new_bets(label)
        bets = self._bets[label]
        if bets.columns is None:
            best = rivals[0] if rivals else whole[0]
            columns = self._columns(best, whole)
            bets.shared = self.sharing_of(label)
            bets.columns = columns[self.order(label)]

    def _columns(self, best: str, whole: Sequence[str]) -> Array:
        """Answers to each question by checkpoints asked everything: the best one's, and the mean."""
        for label in whole:
            if label not in self._by_question:
                mine = self.answered[label]
                columns = np.stack([mine.score, likely(mine)], axis=1)
                places = np.argsort(self.order(label))
                self._by_question[label] = columns[places]
        first = self._by_question[best]
        if len(whole) == 1:
            return first
        of_all = [self._by_question[label] for label in whole]
        return np.hstack([first, np.mean(of_all, axis=0)])

    def _beside(self, label: str) -> Standing:
        others = list[str]()
        for other in self.answered:
            if other != label and self.standing[other] != "failed":
                others.append(other)
        if not any(self.standing[other] in ("running", "complete") for other in others):
            return "running"  # two that drop each other are not both lost
        mine = self.answered[label].score
        if self.best is not None:
            level = self.mean(self.best) + self.margin
            self.levels[label] = level
            if self._bets_of(label).refutes(level, self._part):
                return "not better"
        rivals = max(1, self.side_by_side - 1)
        part = self.error / 2 / rivals
        for other in sorted(others, key=self.mean, reverse=True):
            theirs = self.answered[other].score
            count = min(len(mine), len(theirs))
            bets = self.new_bets(label)
            bets.take(mine[:count] - theirs[:count])
            if bets.refutes(0.0, part):
                return "behind"
        return "running"

    def count(self, label: str) -> int:
        """Return how many questions a checkpoint was asked."""
        answers = self.answered.get(label, NOTHING)
        return len(answers.score)

    def by_question(self, label: str) -> Array:
        """Return a checkpoint's score on each of the N questions; NaN where it was not asked.

        Shape (N,). The checkpoint must have answered a question.
        """
        scores = np.full(self.questions, np.nan)
        asked = self.order(label)[: self.count(label)]
        scores[asked] = self.answered[label].score
        return scores

    def mean(self, label: str) -> float:
        """Return a checkpoint's mean score over the questions that it was asked so far.

        If questions have weights, this is an estimate of the weighted mean over all questions; it
        is exact once all were asked. The checkpoint must have answered a question.
        """
        return self._score(label, self.count(label))

    def _score(self, label: str, count: int) -> float:
        scores = self.answered[label].score
        return self._estimate(label, scores[:count])

    def _worth(self, label: str, count: int) -> float:
        """The mean probability of the right answer, or else the score, in the first ``count`` answers."""
        answers = self.answered[label].first(count)
        return self._estimate(label, likely(answers))

    def _estimate(self, label: str, values: Array) -> float:
        """The mean over all questions, by the ``values`` of the first ones in a checkpoint's order."""
        if self.weights is None:
            return float(values.mean())
        count = len(values)
        asked = self.order(label)[:count]
        factors = self._factors_of(count)[asked]
        return float(factors @ values / factors.sum())

    def _factors_of(self, count: int) -> Array:
        """Each question's weight by its chance to be among ``count`` drawn ones. Shape (N,).

        Each is drawn by a time at which it comes, exponential with its weight as rate; the chance is to come
        before the time by which ``count`` are expected.
        """
        assert self.weights is not None
        if count == self.questions:
            return self.weights
        if count in self._factors:
            return self._factors[count]
        low = 0.0
        high = 1.0
        while _chances(self.weights, high).sum() < count:
            high *= 2
        for _ in range(60):
            middle = (low + high) / 2
            if _chances(self.weights, middle).sum() < count:
                low = middle
            else:
                high = middle
        factors = self.weights / _chances(self.weights, high)
        self._factors[count] = factors
        return factors

    def _by_shared(self, labels: Sequence[str], value: Callable[[str, int], float]) -> list[str]:
        """Labels with an answer: those that share most questions first, then by the ``value`` in these."""
        by_number = dict[int, list[str]]()
        for label in labels:
            if self.count(label):
                by_number.setdefault(self.sharing_of(label), []).append(label)
        ordered = list[str]()
        for number, alike in sorted(by_number.items(), reverse=True):
            shared = min(number, *map(self.count, alike))
            values = dict[str, float]()
            for label in alike:
                count = shared or self.count(label)
                values[label] = -value(label, count)
            ordered += sorted(alike, key=values.__getitem__)
        return ordered

    @property
    def asked(self) -> int:
        """Number of questions asked so far, summed over the checkpoints."""
        return sum(len(scores.score) for scores in self.answered.values())

    @property
    def best(self) -> str | None:
        """Label of the best checkpoint of those that were asked everything, without ``reference``.

        None if there is none. Of checkpoints with equal scores, it is the one that was asked first.
        """
        return next(iter(self.ranked), None)

    @property
    def ranked(self) -> list[str]:
        """Labels of the checkpoints that were asked everything, the best first.

        ``reference`` is left out.
        """
        whole = list[str]()
        for label, standing in self.standing.items():
            if standing == "complete" and label != self.reference:
                whole.append(label)
        return sorted(whole, key=self.mean, reverse=True)


def likely(scores: Scores) -> Array:
    """Return the probabilities of the right answers, or the scores where there are none."""
    is_unknown = np.isnan(scores.probability)
    return np.where(is_unknown, scores.score, scores.probability)


def _chances(weights: Array, time: float) -> Array:
    """The chance that each question comes before a time, by its weight as rate. Shape (N,)."""
    return np.asarray(-np.expm1(-weights * time))


def phases(
    checkpoints: int,
    questions: int,
    budget: int,
    *,
    top: int = 1,
    kept: bool = False,
    reference: bool = False,
) -> list[Phase]:
    """Plan how a budget is spent on phases of shared questions, and return the phases in order.

    After each phase the best third of the checkpoints stays, down to ``top`` + 1. Phases are added
    only while each checkpoint is loaded at most 1.5 times on average. If all stay loaded
    (``kept``), the best two thirds stay after each phase, without that limit. The fewer checkpoints
    are left, the more questions each of them is asked.

    Args:
        checkpoints: Number of checkpoints, without the reference.
        questions: Number of questions in all.
        budget: Maximum number of questions, summed over the checkpoints and the reference.
        top: Number of best checkpoints wanted; every phase asks at least one more than these, if
            there are so many.
        kept: Whether all checkpoints stay loaded from phase to phase.
        reference: Whether a reference (see :class:`Contest`) is asked too. It is asked in the first
            phase only.

    Raises:
        UsageError: The budget is less than one question for each checkpoint and the reference, or
            there is no checkpoint.
    """
    first = checkpoints + reference
    if checkpoints < 1 or budget < first:
        raise UsageError(
            f"expected at least {first}, one question for each checkpoint, got {budget}",
            argument="budget",
        )
    sizes = _sizes(checkpoints, top + 1, kept)
    shares = [(checkpoints / size) ** _DEEPER for size in sizes]

    def planned(unit: float) -> list[int]:
        counts = list[int]()
        for share in shares:
            count = max(1, int(unit * share))
            counts.append(min(questions, count))
        return counts

    def cost(counts: Sequence[int]) -> int:
        more = np.diff(counts, prepend=0)
        asked = np.array([first, *sizes[1:]])
        return int(asked @ more)

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
    contest: Contest,
    label: str,
    ask: Ask,
    batch: int = STEP,
    known: Scores = NOTHING,
) -> Standing:
    """Ask a checkpoint until it is dropped or was asked everything, and return its standing.

    Args:
        contest: The race so far.
        label: Label of the checkpoint.
        ask: Called with ``begin`` and ``end``; returns the scores of the answers to the questions
            from ``begin`` up to, not including, ``end`` in the checkpoint's order.
        batch: Number of questions asked at once. It changes only how often the race checks whether
            the checkpoint is dropped.
        known: Scores of the answers from an earlier run, from the checkpoint's first question on.
            They are used before anything is asked.
    """
    begin = contest.count(label)
    more = known.at(np.arange(begin, max(begin, len(known.score))))
    contest.begin(label)
    standing: Standing = "running"
    if begin or len(more.score):
        standing = contest.add(label, more)
    while standing == "running":
        begin = contest.count(label)
        end = min(begin + batch, contest.questions)
        standing = contest.add(label, ask(begin, end))
    return standing
