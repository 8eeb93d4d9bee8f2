"""A race as a result: its best checkpoint, and how far each got."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from lmeval_dispersion.racing.contest import NOTHING, Contest, Scores
from lmeval_dispersion.report import Col, Report, Table

#: ``unfinished``: was still in when the race was interrupted.
Status = Literal["best", "behind", "within", "unfinished", "not loaded", "failed"]
_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Raced:
    """One checkpoint of a race.

    Attributes:
        rank: In the screen's order, from 1; None where there was no screen.
        questions: How many it was asked.
        score: Mean of the metric over these; None without one. ``se`` is its standard error over questions.
        seconds: To load it and ask it; None where that is not known.
        message: Why it failed; empty otherwise.
    """

    rank: Annotated[int | None, Col("Screen", "d", short="#", drop=1)]
    label: Annotated[str, Col("Checkpoint")]
    questions: Annotated[int, Col("Questions", "d", short="Asked")]
    score: Annotated[float | None, Col("Score", ".3f", error="se", dots="both")]
    se: float | None
    status: Annotated[Status, Col("Status")]
    seconds: Annotated[float | None, Col("Seconds", ".0f", drop=2)]
    message: str


@dataclass(frozen=True, repr=False)
class Race(Report):
    """The best of the checkpoints that were raced.

    Attributes:
        best: Its label; None where no checkpoint was asked everything.
        error: Chance, at most, that a checkpoint better by more than ``margin`` was dropped for it.
        loaded: How many checkpoints were asked anything, of ``of`` on the list.
        questions: Asked of all together, of ``questions_all`` that all on the list could be asked.
        seconds: Of the whole race; None where that is not known.
        seed: Of the order of the questions.
        checkpoints: The best, the others that were asked by score, those that failed, those not loaded.
        audit_sample: Labels of checkpoints outside the list that were drawn at random and raced as well.
    """

    template: ClassVar[str] = "race.jinja"
    schema: ClassVar[str] = "dispersion-race/1"
    libraries: ClassVar[Sequence[str]] = ("lm-eval", "torch", "transformers")
    guide: ClassVar[str] = "docs/reference/race.md"

    best: str | None
    task: str
    metric: str
    error: float
    margin: float
    by_probability: bool
    loaded: int
    of: int
    questions: int
    questions_all: int
    seconds: float | None
    seed: int
    checkpoints: Sequence[Raced]
    audit_sample: Sequence[str]
    notes: Sequence[str]
    _answered: Mapping[str, Scores] = field(default_factory=dict)

    def tables(self) -> dict[str, Table]:
        """The checkpoints."""
        return {"checkpoints": Table.of(self.checkpoints, "Checkpoints")}


def race_of(
    contest: Contest,
    *,
    task: str,
    metric: str,
    of: int,
    seed: int = 0,
    ranks: Mapping[str, int] = _NONE,
    seconds: Mapping[str, float] = _NONE,
    wall: float | None = None,
    failed: Mapping[str, str] = _NONE,
    not_loaded: Sequence[str] = (),
    audit_sample: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Race:
    """The result of a contest.

    Args:
        contest: All answers; those of interrupted checkpoints too.
        task: What was asked, as a reader calls it.
        metric: The task's own, whose values the scores are.
        of: Checkpoints on the whole list, from which those raced were taken.
        seed: Of the order of the questions.
        ranks: Label -> rank in the screen's order.
        seconds: Label -> seconds to load it and ask it.
        wall: Seconds of the whole race; by default the sum of ``seconds``.
        failed: Label -> why it could not be loaded or asked, in a sentence.
        not_loaded: Labels that were not raced, in the screen's order.
        audit_sample: Labels among those raced that are random others, beside the list's first.
        notes: Sentences that a reader of the numbers should know.
    """
    best = contest.best if contest.best not in failed else None
    rows = []
    for label in {**contest.answered, **dict.fromkeys(failed), **dict.fromkeys(not_loaded)}:
        scores = contest.answered.get(label, NOTHING).score
        n = len(scores)
        mean = float(scores.mean()) if n else None
        error = float(scores.std(ddof=1) / math.sqrt(n)) if n > 1 else None
        status = _status(contest, label, best) if n and label not in failed else None
        rows.append(
            Raced(
                ranks.get(label), label, n, mean, error,
                status or ("failed" if label in failed else "not loaded"),
                seconds.get(label), failed.get(label, ""),
            )
        )  # fmt: skip
    last = ("failed", "not loaded")
    rows.sort(
        key=lambda row: (row.label != best, row.status in last and last.index(row.status) + 1,
                         -(row.score or 0.0) if row.status not in last else row.rank or math.inf)
    )  # fmt: skip
    return Race(
        best=best,
        task=task,
        metric=metric,
        error=contest.error,
        margin=contest.margin,
        by_probability=contest.by_probability,
        loaded=len(contest.answered),
        of=of,
        questions=contest.asked,
        questions_all=of * contest.questions,
        seconds=wall if wall is not None else sum(seconds.values()) if seconds else None,
        seed=seed,
        checkpoints=rows,
        audit_sample=list(audit_sample),
        notes=list(notes),
        _answered=dict(contest.answered),
    )


def _status(contest: Contest, label: str, best: str | None) -> Status:
    """Of a checkpoint that was asked something; complete ones are behind by more than the margin."""
    standing = contest.standing[label]
    if standing == "running":
        return "unfinished"
    if standing != "complete":
        return standing
    if best is None or label == best:
        return "best"
    lost = contest.answered[best].score.mean() - contest.answered[label].score.mean()
    return "behind" if lost > contest.margin + 1e-12 else "within"
