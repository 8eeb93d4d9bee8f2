"""The contest: scores come in block by block, and a checkpoint that cannot be much better is dropped.

The error of the whole race. Checkpoints come one after the other, each asked in a random order of its own,
and are compared with a level: the best mean of those that were asked everything by then, plus the margin.
When an order is drawn, all earlier answers are fixed, and with them the level and the predictions of the
scores; so the best is lost only if it is dropped at its own turn, which has at most the error, however many
checkpoints there are.

A first block of questions that all are asked may order the turns, and count. Its bets know no answers of
others, so those against the level that the best meets, which is below its mean, win at most as much as those
against its mean; the later questions have an order of their own, in which all else is fixed.

Side by side all are asked in one order, and the level is unknown at first. Half of the error is for
any two, compared question by question: each of the k - 1 comparisons that could drop the best has its share.
The other half is for the level, once a checkpoint was asked everything: bets against the levels that the best
meets win at most as much as bets against its own mean, whatever the others answered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.racing.rule import BLOCK, Array, Bets

#: ``running``: asked on. ``complete``: was asked everything. ``not better``: clearly not better than the best
#: so far by more than the margin. ``behind``: clearly worse than another, side by side. ``failed``: could not
#: be asked on. ``left out``: not among the first by the first block.
Standing = Literal["running", "complete", "behind", "not better", "left out", "failed"]

ERROR, MARGIN = 0.05, 0.01


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


NOTHING = Scores(np.empty(0), np.empty(0))


@dataclass
class Contest:
    """All answers so far, and the checkpoints still in the race.

    Args:
        questions: Most questions for each checkpoint, N.
        error: Chance, at most, that the best of those raced (over all N questions) is dropped and another is
            named that is worse by more than ``margin``.
        margin: Smallest difference in score that counts.
        seed: Seed of the questions' orders.
        side_by_side: Number of checkpoints where several race at once, 0 where they come one after the other.
        block: Number of first questions that all are asked, 0 where each has its own order from the start.
        reference: A checkpoint that is asked everything and cannot be the best, as the base is.
        top: Number of best checkpoints wanted; each is compared with the last of them, with its part of the
            error.

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
    block: int = 0
    reference: str = ""
    top: int = 1
    answered: dict[str, Scores] = field(default_factory=dict)
    standing: dict[str, Standing] = field(default_factory=dict)
    levels: dict[str, float] = field(default_factory=dict)
    against: dict[str, list[str]] = field(default_factory=dict)
    _bets: dict[str, Bets] = field(default_factory=dict)

    def order(self, label: str) -> NDArray[np.int64]:
        """Indices of the questions, (N,), in a checkpoint's order; side by side all have one order."""
        common = self.questions if self.side_by_side else self.block
        own = int.from_bytes(hashlib.sha256(label.encode()).digest()[:8], "big")
        order = np.random.default_rng([self.seed, own]).permutation(self.questions)
        return np.concatenate([np.arange(common), order[order >= common]])

    def add(self, label: str, block: Scores) -> Standing:
        """Take a checkpoint's answers to its next questions; returns its standing."""
        self.answered[label] = mine = self.answered.get(label, NOTHING) + block
        if len(mine.score) == self.questions:
            standing: Standing = "complete"
        else:
            standing = self._beside(label) if self.side_by_side else self._at_its_turn(label)
        self.standing[label] = standing
        return standing

    def hold(self, label: str, block: Scores) -> None:
        """Take a checkpoint's answers to the first block before its turn."""
        self.answered[label], self.standing[label] = block, "running"

    def turns(self, labels: Sequence[str], keep: int | None = None) -> list[str]:
        """Labels in the order of their turns: those that began before, the reference, then the others.

        After a first block the others follow by their mean probability of the right answer in it (else the
        score); new ones past ``keep`` (None: none) become ``left out``. Failed ones, and those without the
        block, have no turn.
        """
        going = [label for label in labels if self.standing.get(label) != "failed"]
        going = [label for label in going if not self.block or label in self.answered]
        others = [label for label in going if label != self.reference]
        if self.block:
            others.sort(key=lambda label: -_likely(self.answered[label])[: self.block].mean())
            for label in () if keep is None else {*others[keep:]} - {*self.against}:
                self.standing[label] = "left out"
            others = others[:keep]
        began = [label for label in self.against if label in going]
        return [*dict.fromkeys([*began, *({self.reference} & {*going}), *others])]

    def begin(self, label: str) -> None:
        """Begin a checkpoint's turn: its rivals are those asked everything by now, and none later."""
        if label not in self.against:
            self.against[label] = [
                other for other, how in self.standing.items() if how == "complete"
            ]

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

    def _at_its_turn(self, label: str) -> Standing:
        self.begin(label)
        whole = [other for other in self.against[label] if self.standing.get(other) == "complete"]
        rivals = sorted({*whole} - {self.reference}, key=self.mean, reverse=True)
        if label == self.reference or len(rivals) < self.top:
            return "running"
        if label not in self._bets:
            self.levels[label] = level = self.mean(rivals[self.top - 1]) + self.margin
            columns = self._columns(rivals[0], whole)[self.order(label)]
            self._bets[label] = Bets(self.questions, level, columns, self.block)
        bets = self._bets[label]
        bets.take(self.answered[label].score[bets.taken :])
        return "not better" if bets.refutes(self.error / self.top) else "running"

    def _columns(self, best: str, whole: Sequence[str]) -> Array:
        """Answers to each question by checkpoints asked everything: the best one's, and the mean."""
        known = {
            label: np.stack([mine.score, _likely(mine)], axis=1)[np.argsort(self.order(label))]
            for label, mine in ((label, self.answered[label]) for label in whole)
        }
        first = known[best]
        return first if len(known) == 1 else np.hstack([first, np.mean([*known.values()], axis=0)])

    def _beside(self, label: str) -> Standing:
        others = [
            other for other in self.answered if other != label and self.standing[other] != "failed"
        ]
        if not any(self.standing[other] in ("running", "complete") for other in others):
            return "running"  # two that drop each other are not both lost
        mine = self.answered[label].score
        if self.best is not None:
            self.levels[label] = level = self.mean(self.best) + self.margin
            if self._below(mine, level, self.error / 2):
                return "not better"
        for other in sorted(others, key=self.mean, reverse=True):
            theirs = self.answered[other].score
            n = min(len(mine), len(theirs))
            if self._below(
                mine[:n] - theirs[:n], 0.0, self.error / 2 / max(1, self.side_by_side - 1)
            ):
                return "behind"
        return "running"

    def _below(self, scores: Array, level: float, error: float) -> bool:
        if len(scores) == self.questions:
            return bool(scores.mean() < level)
        bets = Bets(self.questions, level)
        bets.take(scores)
        return bets.refutes(error)

    def mean(self, label: str) -> float:
        """A checkpoint's mean score so far."""
        return float(self.answered[label].score.mean())

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
        whole = [label for label, standing in self.standing.items() if standing == "complete"]
        return sorted(
            (label for label in whole if label != self.reference), key=self.mean, reverse=True
        )


def _likely(scores: Scores) -> Array:
    """The probabilities of the right answers, or the scores where there are none."""
    return np.where(np.isnan(scores.probability), scores.score, scores.probability)


#: Answers of a checkpoint to the questions ``begin`` to ``end`` of its order.
Ask = Callable[[int, int], Scores]


def run(
    contest: Contest, label: str, ask: Ask, block: int = BLOCK, known: Scores = NOTHING
) -> Standing:
    """Ask a checkpoint, after its ``known`` answers, until it is dropped or done; returns its standing."""
    begin = len(contest.answered.get(label, NOTHING).score)
    more = known.at(np.arange(begin, max(begin, len(known.score))))
    contest.begin(label)
    standing = contest.add(label, more) if begin or len(more.score) else "running"
    while standing == "running":
        begin = len(contest.answered.get(label, NOTHING).score)
        standing = contest.add(label, ask(begin, min(begin + block, contest.questions)))
    return standing
