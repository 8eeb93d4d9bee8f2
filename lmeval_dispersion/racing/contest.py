"""Who stays in a race: scores come in block by block, and what is clearly behind is asked no more.

The error of the whole race. Checkpoints come one after the other, and each is compared with one other, the
reference: the first one, and then each that was asked everything and is better than the reference by more
than the margin. Had no comparison gone wrong, which ones become the reference would be fixed by the answers
alone, not by the order of the questions; so the best is lost only if one of these, or itself, was dropped by
the reference before it. Comparisons with the m-th reference have 0.8 * 0.2^(m - 1) of the error, which adds
up to all of it, however many checkpoints there are. Side by side, where any may be compared with any other,
each of the k - 1 comparisons that could drop the best has error / (k - 1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.racing.rule import is_below

Array = NDArray[np.float64]
#: ``running``: asked on. ``complete``: was asked everything. ``behind``: clearly worse than another.
#: ``not better``: than another by more than the margin, clearly. ``failed``: could not be asked on.
Standing = Literal["running", "complete", "behind", "not better", "failed"]

ERROR, MARGIN, BLOCK = 0.05, 0.01, 25
_FIRST, _RATIO = 0.8, 0.2  # shares of the error: of the first reference, and of each next to the one before


class Scores(NamedTuple):
    """Answers to n questions.

    Attributes:
        score: The task's own metric, in [0, 1]. Shape (n,).
        probability: Of the right answer, in [0, 1]; NaN where the task has no choices. Shape (n,).
    """

    score: Array
    probability: Array

    def __add__(self, later: Scores) -> Scores:  # type: ignore[override]
        return Scores(*(np.concatenate(parts) for parts in zip(self, later, strict=True)))


NOTHING = Scores(np.empty(0), np.empty(0))


@dataclass
class Contest:
    """All that was answered, and who is still in.

    Args:
        questions: How many each may be asked, N.
        error: Chance, at most, that the best of those raced (over all N questions) is dropped and another is
            named that is worse by more than ``margin``.
        margin: Smallest difference in score that counts.
        by_probability: Whether a checkpoint is dropped also where its mean probability of the right answer is
            clearly lower and its score so far is lower by the margin. ``error`` then holds (one after the
            other by simulation only) for a best checkpoint that is the best by probability too.
        side_by_side: How many race in all where several race at once, 0 where they come one after the other.
    """

    questions: int
    error: float = ERROR
    margin: float = MARGIN
    by_probability: bool = False
    side_by_side: int = 0
    answered: dict[str, Scores] = field(default_factory=dict)
    standing: dict[str, Standing] = field(default_factory=dict)
    references: list[str] = field(default_factory=list)

    def add(self, label: str, block: Scores) -> Standing:
        """Take the answers to the next questions, in the race's order; returns whether it is asked on."""
        self.answered[label] = mine = self.answered.get(label, NOTHING) + block
        self.standing[label] = standing = self._judged(label, mine)
        if standing == "complete" and (
            not self.references or self.mean(label) > self.mean(self.references[-1]) + self.margin
        ):
            self.references.append(label)
        return standing

    def fail(self, label: str) -> None:
        """Take out a checkpoint that cannot be asked on; those that it alone dropped are running again."""
        self.standing[label] = "failed"
        if self.side_by_side:  # else it was never a reference
            self.judge_again()

    def judge_again(self) -> None:
        """Compare all with all that is known by now, whatever the order in which it came."""
        for label, standing in self.standing.items():
            if standing != "failed":
                self.add(label, NOTHING)

    def _judged(self, label: str, mine: Scores) -> Standing:
        if len(mine.score) == self.questions:
            return "complete"
        inside = [k for k, standing in self.standing.items() if standing in ("running", "complete")]
        if self.side_by_side and not {*inside} - {label}:
            return "running"  # two that drop each other are not both lost
        found = (self._against(self.answered[rival], mine) for rival in self._rivals(label))
        return next((standing for standing in found if standing != "running"), "running")

    def _against(self, theirs: Scores, mine: Scores) -> Standing:
        n = min(len(mine.score), len(theirs.score))
        difference = mine.score[:n] - theirs.score[:n]
        allowed = self._allowed()
        if is_below(difference, self.questions, allowed):
            return "behind"
        if self.by_probability and 0 > difference.mean() <= -self.margin:
            chances = mine.probability[:n] - theirs.probability[:n]
            if not np.isnan(chances).any() and is_below(chances, self.questions, allowed):
                return "behind"
        whole = len(theirs.score) == self.questions
        if whole and self.margin and is_below(difference, self.questions, allowed, self.margin):
            return "not better"
        return "running"

    def _rivals(self, label: str) -> list[str]:
        """The checkpoints that a running one is compared with, the best first."""
        if not self.side_by_side:
            return self.references[-1:]
        others = [other for other in self.answered if other != label and self.standing[other] != "failed"]
        return sorted(others, key=self.mean, reverse=True)

    def _allowed(self) -> float:
        """The error of one comparison."""
        error = self.error / 2 if self.by_probability else self.error  # two tests
        if self.side_by_side:
            return error / max(1, self.side_by_side - 1)
        return error * _FIRST * _RATIO ** (len(self.references) - 1)

    def mean(self, label: str) -> float:
        """The score so far."""
        return float(self.answered[label].score.mean())

    @property
    def asked(self) -> int:
        """Questions asked of all together."""
        return sum(len(scores.score) for scores in self.answered.values())

    @property
    def best(self) -> str | None:
        """The highest score among those that were asked everything, the first of equal ones."""
        complete = [label for label, standing in self.standing.items() if standing == "complete"]
        return max(complete, key=self.mean, default=None)


#: Answers of a checkpoint to the questions ``begin`` to ``end`` of the race's order.
Ask = Callable[[int, int], Scores]


def run(contest: Contest, label: str, ask: Ask, block: int = BLOCK) -> Standing:
    """Ask a checkpoint block by block until it is dropped or was asked everything."""
    standing: Standing = "running"
    while standing == "running":
        begin = len(contest.answered.get(label, NOTHING).score)
        standing = contest.add(label, ask(begin, min(begin + block, contest.questions)))
    return standing
