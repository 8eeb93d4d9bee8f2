"""The report of ``dispersion race``: its best checkpoint, and how far each got."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import comb
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from lmeval_dispersion.evidence import LOST
from lmeval_dispersion.harness.failures import as_their_base
from lmeval_dispersion.racing.contest import NOTHING, Contest, Scores
from lmeval_dispersion.racing.lineup import Entry
from lmeval_dispersion.racing.rule import SHARED
from lmeval_dispersion.report import Chart, Col, Report, Table
from lmeval_dispersion.report.cells import short_names
from lmeval_dispersion.report.declared import listed
from lmeval_dispersion.report.document import Mark
from lmeval_dispersion.report.vega import mark, names_apart, numeric, span
from lmeval_dispersion.statistics import LEVEL
from lmeval_dispersion.store.sanity import alike

#: ``undecided``: was still in, or not asked yet, when the race was interrupted.
#: ``left out``: not among the best after a first block. ``base``: the adapters' base, cannot be the best.
Status = Literal[
    "best",
    "behind",
    "within",
    "not better",
    "left out",
    "base",
    "undecided",
    "not loaded",
    "failed",
]
_COLOURS: Mapping[Status, str] = {
    "best": "var(--series-2)",
    "within": "var(--series-1)",
    "not better": "var(--series-4)",
}
_MARKS: Mapping[Status, Mark] = {"best": "pick", "base": "control"}
_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Raced:
    """One checkpoint in a race; the score is the mean over the questions that it was asked."""

    rank: Annotated[
        int | None, Col("Screen", "d", short="#", drop=1)
    ]  # from 1; None without a screen
    label: Annotated[str, Col("Checkpoint")]
    questions: Annotated[int, Col("Questions", "d", short="Asked", drop=2)]
    score: Annotated[float | None, Col("Score", ".3f", error="se", dots="both")]
    se: float | None  # standard error over questions
    best_there: Annotated[
        float | None,
        Col(
            "The best there",
            ".3f",
            hint="the best one's score on the same questions",
            short="Best",
            drop=1,
        ),
    ]
    status: Status
    outcome: Annotated[str, Col("Status")]  # the same in words
    seconds: float | None  # time to load and ask it
    message: str  # why it failed


@dataclass(frozen=True, repr=False)
class Race(Report):
    """A race's best checkpoint; and all: it, the others asked by falling score, failed, not loaded ones."""

    template: ClassVar[str] = "race.jinja"
    schema: ClassVar[str] = "dispersion-race/1"
    libraries: ClassVar[Sequence[str]] = ("numpy", "lm-eval", "torch", "transformers")
    guide: ClassVar[str] = "docs/reference/race.md"
    each: ClassVar[str] = "checkpoints"

    best: str | None  # None: no checkpoint was asked everything
    top: Sequence[str]  # the best that were wanted, of those asked everything
    task: str
    metric: str
    error: float  # chance, at most, that a checkpoint better by more than the margin was dropped
    margin: float
    loaded: int  # checkpoints loaded, out of ``of`` on the list
    of: int
    questions: int  # questions asked, over all checkpoints
    questions_all: int  # most questions for all on the list and the base
    questions_each: int  # most questions for one checkpoint
    questions_there: int  # questions in the tasks; more than ``questions_each`` with --limit
    tasks: int  # number of tasks; the score is the mean over all their questions
    seconds: float | None
    seed: int  # seed of the questions' orders
    checkpoints: Sequence[Raced]
    audit_sample: Sequence[str]  # labels of random others, raced with the list
    notes: Sequence[str]
    plan: str = ""  # a dry run's forecast, in a sentence
    _answered: Mapping[str, Scores] = field(default_factory=dict)

    def tables(self) -> dict[str, Table]:
        """``race``: the checkpoints; a terminal shows those asked or failed, and others up to a dozen."""
        table = Table.of(self.checkpoints, f"In random orders of the questions (seed {self.seed})")
        shown = max(12, sum(row.status != "not loaded" for row in self.checkpoints))
        marks = {
            place: _MARKS[row.status]
            for place, row in enumerate(self.checkpoints)
            if row.status in _MARKS
        }
        return {
            "race": replace(
                table, excerpt=range(shown) if len(table.rows) > shown else (), marks=marks
            )
        }

    def charts(self) -> dict[str, Chart]:
        """``race``: running mean score against questions, a line a checkpoint; no chart without answers."""
        asked = [row for row in self.checkpoints if row.label in self._answered]
        if not asked:
            return {}
        values = list[dict[str, Any]]()
        for row, name in zip(asked, short_names([row.label for row in asked]), strict=True):
            scores = self._answered[row.label].score
            for n in sorted(
                {*range(SHARED, len(scores), max(SHARED, len(scores) // 60)), len(scores)}
            ):
                so_far = {"questions": n, "score": scores[:n].mean()}
                values.append({"name": name, "status": row.status, **so_far})
            low, high = np.clip(
                [scores.mean() + sign * (row.se or 0.0) for sign in (-2, 2)], 0, 1
            ).tolist()
            says = f"{row.label} {scores.mean():.3f}, {row.outcome}"
            values[-1] |= {"low": low, "high": high, "says": says}
            same = next(
                v
                for v in values
                if "says" in v and v["questions"] == n and v["score"] == scores.mean()
            )
            same["ends"] = f"{same['ends']}, {name}" if "ends" in same else name
        kinds = list(dict.fromkeys(row.status for row in asked))
        colours = {"domain": kinds, "range": [_COLOURS.get(kind, "var(--axis)") for kind in kinds]}
        questions: dict[str, Any] = {
            "field": "questions",
            "type": "quantitative",
            "title": "Questions asked",
        }
        questions["scale"] = {"zero": True}
        encoding = {"x": questions, "color": {"field": "status", "title": None, "scale": colours}}
        y = numeric("score", self.metric)
        said = {"field": "says", "type": "nominal"}
        ends: dict[str, Any] = {"transform": [{"filter": "isValid(datum.says)"}]}
        text = {"type": "text", "align": "left", "dx": 8, "fontSize": 12}
        last = [value for value in values if "says" in value]
        line = (
            0.05 * (max(value["high"] for value in last) - min(value["low"] for value in last))
            or 1.0
        )
        length = 0.15 * max(value["questions"] for value in last)
        named = [value for value in last if "ends" in value]
        names = names_apart(named, "questions", "score", length=length, line=line, most=4)
        layers = [
            mark("line", y=y, detail={"field": "name"}),
            {**ends, **mark("rule", **span("y", {**y, "field": "low"}, "high"))},
            {**ends, **mark("point", y=y, description=said, tooltip=said)},
            {
                "data": {"values": names},
                **mark(text, y={**y, "field": "place"}, text={"field": "ends"}),
            },
        ]
        drawn = {"data": {"values": values}, "height": 320, "encoding": encoding, "layer": layers}
        meaning = "A line ends where its checkpoint was dropped, with ± two standard errors over questions."
        numbers = "; ".join(value["says"] for value in values if "says" in value)
        return {"race": Chart(drawn, "Score against questions asked", numbers, meaning)}

    def context(self) -> dict[str, Any]:
        """Template values: the parts of the sentences."""
        best = self._answered[self.best].score if self.best else np.zeros(1)
        right = bool(np.isin(best, (0, 1)).all())
        rivals = [row for row in self._judged() if row.label != self.best]
        near = [row for row in rivals if row.status == "within"]  # the highest score first
        left_out = [row for row in rivals if row.status == "left out"]
        unread = any(row.rank and row.status == "not loaded" for row in self.checkpoints)
        base = next((row.score for row in self.checkpoints if row.status == "base"), None)
        whole = [row.score or 0.0 for row in rivals if row.questions == self.questions_each]
        whole += [best.mean()] if self.best else []
        return {
            "amount": f"{100 * best.mean():.1f} %" if right else f"{self.metric} {best.mean():.3f}",
            "rivals": {row.status for row in rivals} - {"left out"},
            "others": "that went on" if left_out else "raced",
            "nearest": near and f"{near[0].label}, {near[0].score:.3f}",
            "undecided": [row.label for row in self.checkpoints if row.status == "undecided"],
            "sample": self._sampled(),
            "lost": LOST if unread and not self.plan else None,
            "left_out": len(left_out),
            "block": min((row.questions for row in left_out), default=0),
            "base": base,
            "saved": self._saved(),
            "whole": len(whole),
            "above": sum(score > (base or 0.0) for score in whole),
        }

    def _saved(self) -> float:
        """Seconds that the unasked questions would have taken, by the asked ones' time."""
        spent = sum(row.seconds or 0.0 for row in self.checkpoints)
        return spent / max(1, self.questions) * max(0, self.questions_all - self.questions)

    def _judged(self) -> list[Raced]:
        return [
            row
            for row in self.checkpoints
            if row.questions and row.status not in ("failed", "base")
        ]

    def _sampled(self) -> str:
        """A sentence on checkpoints that were not loaded, by random others raced with the list."""
        others = [row for row in self._judged() if row.label in self.audit_sample]
        whole = [row for row in self._judged() if row.questions == self.questions_each]
        best = max((row.score or 0.0 for row in whole if row not in others), default=None)
        if not others or best is None or any(row.status == "undecided" for row in self.checkpoints):
            return ""
        better = [
            row.label for row in whole if row in others and (row.score or 0.0) - best > self.margin
        ]
        n, left = (
            len(others),
            len(others) + sum(row.status == "not loaded" for row in self.checkpoints),
        )
        more = f" by more than {self.margin:g}" if self.margin else ""
        if better:
            return (
                f"Of {n} random others, {listed(better)} did better{more}: race more of the list."
            )
        if (
            sum(row.rank == 1 for row in self.checkpoints) > 1
        ):  # equally many per group, small or large
            return f"None of {n} random others did better{more}."
        # The most better ones that a sample without any does not rule out (hypergeometric).
        most = max(k for k in range(left) if comb(left - k, n) > (1 - LEVEL) * comb(left, n))
        of = f"of the {left} that the screen left out at most {most} would ({100 * LEVEL:.0f} % confidence)"
        return f"None of {n} random others did better{more}; {of}."


def race_of(
    contest: Contest, entries: Sequence[Entry], *, task: str, metric: str, wall: float | None = None,
    seconds: Mapping[str, float] = _NONE, failed: Mapping[str, str] = _NONE, there: int | None = None,
    tasks: int = 1, as_base: Sequence[str] = (), notes: Sequence[str] = (), plan: str = "",
) -> Race:  # fmt: skip
    """Build the Race from a contest, finished or interrupted, over some of a list's ``entries``.

    By label, ``seconds`` is the time to load and ask, and ``failed`` a sentence on the failure. ``there``
    is the number of questions in the ``tasks`` tasks, by default the contest's; ``as_base`` are adapters
    that answer as their base. The other arguments are named as the Race's attributes.
    """
    best, rows, answered = contest.best, [], contest.answered
    for entry in entries:
        label, scores = entry.label, answered.get(entry.label, NOTHING).score
        n, mean = len(scores), float(scores.mean()) if len(scores) else None
        se = float(scores.std(ddof=1)) / n**0.5 if n > 1 else None
        status: Status = "undecided" if entry.chosen else "not loaded"
        words = _status(contest, label, best) if n else (status, str(status))
        if label in failed and label != best:
            words = "failed", "failed"
        times = (seconds.get(label), failed.get(label, ""))
        rows.append(
            Raced(entry.rank, label, n, mean, se, _best_there(contest, label, n), *words, *times)
        )
    last = ["failed", "not loaded"]
    rows.sort(
        key=lambda row: (
            (1 + last.index(row.status),) if row.status in last else (0, -(row.score or 0))
        )
    )
    rows.sort(key=lambda row: row.label != best)
    of, loaded = (sum(label != contest.reference for label in each) for each in (
        [entry.label for entry in entries], answered))  # fmt: skip
    audit_sample = [entry.label for entry in entries if entry.chosen == "audit"]
    return Race(
        best, contest.ranked[: contest.top], task, metric, contest.error, contest.margin, loaded, of,
        contest.asked, (of + bool(contest.reference)) * contest.questions, contest.questions,
        there or contest.questions, tasks, wall, contest.seed, rows, audit_sample,
        [*notes, *as_their_base(as_base), *_alike(answered, as_base)], plan, dict(answered),
    )  # fmt: skip


def _alike(answered: Mapping[str, Scores], explained: Sequence[str]) -> list[str]:
    """Notes on checkpoints whose probabilities are the same to the last bit, beyond 0 and 1."""
    first = {
        label: scores.probability[:SHARED]
        for label, scores in answered.items()
        if label not in explained
    }
    return [
        f"{listed(same)} answered alike to the last digit: copies, or a server that answers unknown names "
        "with its default model."
        for same in alike(first)
    ]


def _best_there(contest: Contest, label: str, count: int) -> float | None:
    """The best one's mean over the first ``count`` questions that another was asked; None for the best."""
    if contest.best in (None, label) or not count:
        return None
    scores = contest.answered[str(contest.best)].score
    by_question = scores[np.argsort(contest.order(str(contest.best)))]
    return float(by_question[contest.order(label)[:count]].mean())


def _status(contest: Contest, label: str, best: str | None) -> tuple[Status, str]:
    """The status of a checkpoint that was asked something, and its words."""
    standing, by = contest.standing[label], f"{contest.margin:g}"
    if standing == "running":
        return "undecided", "undecided"
    if standing == "not better" and best and contest.levels[label] < contest.mean(best):
        standing = "behind"
    if label == contest.reference:
        return "base", "base"
    if standing in ("behind", "not better", "left out"):
        return standing, f"{standing} after {len(contest.answered[label].score):,}"
    if best is None or label == best:
        return "best", "best"
    behind = contest.mean(best) - contest.mean(label) > contest.margin + 1e-12
    return (
        ("behind", "behind")
        if behind
        else ("within", f"within {by}" if contest.margin else "equal")
    )
