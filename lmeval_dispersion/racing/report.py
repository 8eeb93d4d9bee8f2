"""The report of ``dispersion race``: its best checkpoint, and how far each got."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import comb
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.evidence import CUT, LOST
from lmeval_dispersion.harness.failures import as_their_base
from lmeval_dispersion.racing.contest import NOTHING, Contest, Scores
from lmeval_dispersion.racing.lineup import Entry
from lmeval_dispersion.racing.rule import SHARED
from lmeval_dispersion.report import Chart, Col, Report, Table
from lmeval_dispersion.report.cells import short_names
from lmeval_dispersion.report.declared import count, listed
from lmeval_dispersion.report.document import Mark
from lmeval_dispersion.report.vega import mark, names_apart, numeric, span
from lmeval_dispersion.statistics import LEVEL
from lmeval_dispersion.store.sanity import alike

if TYPE_CHECKING:
    from lmeval_dispersion.racing.agreement import Agreed

#: ``undecided``: was still in, or not asked yet, when the race was interrupted.
#: ``left out``: not among the best after a first block. ``deleted``: its files are gone.
#: ``base``: the adapters' base, cannot be the best.
Status = Literal[
    "best",
    "behind",
    "within",
    "not better",
    "left out",
    "deleted",
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
_FEW_LINES = 15  # of a chart, each of which has its name
_NAMED_LINES = 6  # of more lines, the best ones, which have a name
_NAMED = 3  # undecided checkpoints that the first sentence names


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
    agreement: Annotated[
        float | None,
        Col("Agreement", ".3f", error="agreement_se", hint="with the mean answer of all; no label"),
    ] = None
    agreement_se: float | None = None


@dataclass(frozen=True)
class MarginAt:
    """The margin that was shown when so many questions were asked, of all together."""

    questions: int
    margin: float


@dataclass(frozen=True)
class UnitScore:
    """A checkpoint's mean score over the questions of one unit that it was asked."""

    unit: Annotated[str, Col("Task")]
    label: Annotated[str, Col("Checkpoint")]
    questions: Annotated[int, Col("Questions", "d", short="Asked")]
    score: Annotated[float, Col("Score", ".3f", dots="both")]


@dataclass(frozen=True, repr=False)
class Race(Report):
    """A race's best checkpoint; and all: it, the others asked by falling score, failed, not loaded ones."""

    template: ClassVar[str] = "race.jinja"
    schema: ClassVar[str] = "dispersion-race/1"
    libraries: ClassVar[Sequence[str]] = ("numpy", "lm-eval", "torch", "transformers")
    guide: ClassVar[str] = "docs/reference/race.md"
    each: ClassVar[str] = "checkpoints"

    best: str | None  # None: none can be named yet
    top: Sequence[str]  # the best that were wanted
    task: str
    metric: str
    error: float  # chance, at most, that a checkpoint better by more than the margin was dropped
    margin: float
    margin_shown: (
        float | None
    )  # no other is better by more, with that error; None: nothing is shown
    by: Literal["score", "agreement"]  # agreement: without labels, with neither margin nor error
    budget: int | None  # shared questions of all together; None for a race to its end
    loaded: int  # checkpoints loaded, out of ``of`` on the list
    of: int
    questions: int  # questions asked, over all checkpoints
    questions_all: int  # most questions for all on the list and the base
    questions_each: int  # most questions for one checkpoint
    questions_there: int  # questions in the tasks; more than ``questions_each`` with --limit
    tasks: int  # number of tasks
    seconds: float | None
    seed: int  # seed of the questions' orders
    checkpoints: Sequence[Raced]
    audit_sample: Sequence[str]  # labels of random others, raced with the list
    notes: Sequence[str]
    units: Sequence[UnitScore] = ()  # of several tasks, by task and falling score
    margins: Sequence[MarginAt] = ()  # as it became smaller
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
        excerpt = range(shown) if len(table.rows) > shown else ()
        return {
            "race": replace(table, excerpt=excerpt, marks=marks),
            "units": Table.of(self.units, "By task"),
        }

    def charts(self) -> dict[str, Chart]:
        """``race``: running mean score against questions; ``margin``: the margin shown against all asked."""
        charts = self._running_means()
        if len(self.margins) > 1:
            charts["margin"] = self._margins()
        return charts

    def _margins(self) -> Chart:
        last = MarginAt(self.questions, self.margins[-1].margin)
        rows = [{"questions": at.questions, "margin": at.margin} for at in (*self.margins, last)]
        x = numeric("questions", "Questions asked, of all together")
        x["scale"] = {"zero": True}
        y = numeric("margin", "Margin shown")
        y["scale"] = {"zero": True}
        line = {"type": "line", "interpolate": "step-after"}
        drawn = {
            "data": {"values": rows},
            "height": 220,
            "encoding": {"x": x, "y": y},
            "mark": line,
        }
        numbers = "; ".join(f"{at.questions:,}: {at.margin:.3f}" for at in self.margins[-12:])
        meaning = (
            f"No other is better than the best so far by more, with an error of {self.error:g}."
        )
        return Chart(drawn, "Margin shown against questions asked", numbers, meaning)

    def _running_means(self) -> dict[str, Chart]:
        """A line for each checkpoint; none without answers."""
        asked = [row for row in self.checkpoints if row.label in self._answered]
        if not asked:
            return {}
        values = list[dict[str, Any]]()
        names = short_names([row.label for row in asked])
        named_rows = asked if len(asked) <= _FEW_LINES else asked[:_NAMED_LINES]
        for row, name in zip(asked, names, strict=True):
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
            if row not in named_rows:
                continue
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
        placed = names_apart(named, "questions", "score", length=length, line=line, most=4)
        layers = [
            mark("line", y=y, detail={"field": "name"}),
            {**ends, **mark("rule", **span("y", {**y, "field": "low"}, "high"))},
            {**ends, **mark("point", y=y, description=said, tooltip=said)},
            {
                "data": {"values": placed},
                **mark(text, y={**y, "field": "place"}, text={"field": "ends"}),
            },
        ]
        drawn = {"data": {"values": values}, "height": 320, "encoding": encoding, "layer": layers}
        meaning = "A line ends where its checkpoint was dropped, with ± two standard errors over questions."
        if len(asked) > _FEW_LINES:
            meaning += (
                f" The best {_NAMED_LINES} have names; point at another one's end to see its own."
            )
        numbers = "; ".join(value["says"] for value in values if "says" in value)
        return {"race": Chart(drawn, "Score against questions asked", numbers, meaning)}

    def context(self) -> dict[str, Any]:
        """Template values: the first sentence, and the parts of the others."""
        rivals = [row for row in self._judged() if row.label != self.best]
        unread = any(row.rank and row.status == "not loaded" for row in self.checkpoints)
        base = self._base_score()
        whole = [row.score or 0.0 for row in rivals if row.questions == self.questions_each]
        best = next((row for row in self.checkpoints if row.label == self.best), None)
        if best is not None and best.questions == self.questions_each:
            whole.append(best.score or 0.0)
        has_scores = self.by == "score"
        return {
            "first": self.first_sentence(),
            "sample": self._sampled() if has_scores else "",
            "lost": LOST if unread and not self.plan and has_scores else None,
            "base": base if has_scores else None,
            "saved": self._saved(),
            "whole": len(whole),
            "above": sum(score > (base or 0.0) for score in whole),
        }

    def first_sentence(self) -> str:
        """The answer: the best, and what is shown of the others."""
        if self.plan:
            return self.plan
        undecided = [
            row.label
            for row in self.checkpoints
            if row.status == "undecided" and row.label != self.best
        ]
        row = next((row for row in self.checkpoints if row.label == self.best), None)
        if row is None:
            return self._no_best(bool(undecided))
        if self.by == "agreement":
            return (
                f"Best by agreement: {row.label}, {row.agreement or 0.0:.3f} with the mean answer of all over "
                f"{count(row.questions, 'question')} of {self.task}; without labels this has no margin and "
                "no error."
            )
        is_whole = row.questions == self.questions_each
        so_far = "" if is_whole and not undecided else " so far"
        base = self._base_score()
        beside_base = ""
        if is_whole and base is not None and base >= (row.score or 0.0):
            beside_base = f" It does not score higher than the base ({base:.3f})."
        return (
            f"Best{so_far}: {row.label}, {self._amount(row)}; {self._others(undecided)}."
            f"{beside_base}{self._left_to_do(undecided)}"
        )

    def _base_score(self) -> float | None:
        """The base's score, if it answered everything: a budget asks it a few questions alone."""
        for row in self.checkpoints:
            if row.status == "base" and row.questions == self.questions_each:
                return row.score
        return None

    def _no_best(self, is_undecided: bool) -> str:
        questions = f"{self.questions_each:,} drawn questions"
        if self.questions_each == self.questions_there:
            questions = count(self.questions_each, "question")
        goes_on = ""
        if is_undecided:
            without = "" if self.budget is None else " without a budget"
            goes_on = f"; {self._command()}{without} goes on"
        return f"No best yet: no checkpoint was asked all {questions} of {self.task}{goes_on}."

    def _amount(self, row: Raced) -> str:
        """The best one's score, and over which questions."""
        scores = self._answered[row.label].score
        score = f"{self.metric} {row.score or 0.0:.3f}"
        if np.isin(scores, (0, 1)).all():
            score = f"{100 * (row.score or 0.0):.1f} %"
        there = count(self.questions_there, "question")
        each = f"{self.questions_each:,} of {there}"
        if row.questions < self.questions_each:
            return f"{score} of {row.questions:,} of {there} of {self.task}"
        is_part = self.questions_each < self.questions_there
        if self.tasks > 1:
            over = each if is_part else there
            return f"{score} of {self.task} ({over})"
        return f"{score} of {self.task} ({each})" if is_part else f"{score} of {self.task}"

    def _others(self, undecided: Sequence[str]) -> str:
        """What is shown of the others, with its error."""
        rivals = [row for row in self._judged() if row.label != self.best]
        left_out = [row for row in rivals if row.status == "left out"]
        going = [row for row in rivals if row.status != "left out"]
        deleted = [row for row in self.checkpoints if row.status == "deleted" and row.questions]
        is_part = bool(left_out or deleted)  # not all that were asked can be the best
        if not going and not undecided:
            return "no other was raced"
        error = f"(error ≤ {100 * self.error:.3g} %)"
        if self.margin_shown is None or self.margin_shown >= 1:
            shown = "nothing is shown of the others yet"
        elif not undecided and {row.status for row in going} == {"behind"}:
            shown = f"better than all others {'that went on' if is_part else 'raced'} {error}"
        else:
            who = "of those that went on no other" if is_part else "no other raced"
            than = ""
            if len(self.top) > 1:  # the margin is to the last of those named
                who = f"no other {'that went on' if is_part else 'raced'} than the best {len(self.top)}"
                than = " than the last of them"
            margin = margin_words(self.margin_shown)
            by = f" by more than {margin}" if margin else ""
            shown = f"{who} is better{than}{by} {error}"
        near = next((row for row in going if row.status == "within"), None)
        if near is not None and not undecided:
            shown += f"; nearest: {near.label}, {near.score:.3f}"
        if left_out:
            loss, low, high, data = CUT
            answers = min(row.questions for row in left_out)
            shown += (
                f"; {len(left_out)} others were left out by {answers} answers, which in our studies cost "
                f"{loss:g} of accuracy ({low:g} to {high:g}, {data})"
            )
        return shown

    def _left_to_do(self, undecided: Sequence[str]) -> str:
        """Who is undecided, and how the race goes on."""
        if not undecided:
            return ""
        names = listed(undecided)
        if len(undecided) > _NAMED:
            names = f"{len(undecided)} of {self.loaded}"
        goes_on = f"{self._command().capitalize()} goes on."
        if self.budget is not None:
            goes_on = "The same command without a budget goes on to the proof."
        return f" Undecided: {names}. {goes_on}"

    def _command(self) -> str:
        """What goes on: not a command that judged a folder's answers, and so took no time."""
        return "the same command" if self.seconds is not None else "the race's own command"

    def _saved(self) -> float:
        """Seconds that the unasked questions would have taken, by the asked ones' time."""
        spent = sum(row.seconds or 0.0 for row in self.checkpoints)
        return spent / max(1, self.questions) * max(0, self.questions_all - self.questions)

    def _judged(self) -> list[Raced]:
        return [
            row
            for row in self.checkpoints
            if row.questions and row.status not in ("failed", "base", "deleted")
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


def add_margin(margins: list[MarginAt], contest: Contest, labels: Sequence[str]) -> None:
    """Add the margin that is shown by now of ``labels``, all that race, where it has become smaller."""
    margin = contest.shown(labels).margin
    if margin is not None and (not margins or margin < margins[-1].margin):
        margins.append(MarginAt(contest.asked, margin))


def margin_words(margin: float) -> str:
    """A margin as a sentence has it, never below what is shown; empty for none.

    >>> margin_words(0.04213), margin_words(0.05), margin_words(0.0)
    ('0.043', '0.05', '')
    """
    digits = math.ceil(round(1000 * margin, 6)) / 1000
    return f"{digits:g}" if digits else ""


def race_of(
    contest: Contest, entries: Sequence[Entry], *, task: str, metric: str, wall: float | None = None,
    seconds: Mapping[str, float] = _NONE, failed: Mapping[str, str] = _NONE, there: int | None = None,
    tasks: int = 1, as_base: Sequence[str] = (), notes: Sequence[str] = (), plan: str = "",
    margins: Sequence[MarginAt] = (), units: Sequence[UnitScore] = (),
    agreed: Mapping[str, Agreed] = _NONE, budget: int | None = None,
) -> Race:  # fmt: skip
    """Build the Race from a contest, finished or interrupted, over some of a list's ``entries``.

    By label, ``seconds`` is the time to load and ask, ``failed`` a sentence on the failure, and ``agreed``
    the agreement that orders without labels. ``there`` is the number of questions in the ``tasks`` tasks, by
    default the contest's; ``as_base`` are adapters that answer as their base. The other arguments are named
    as the Race's attributes.
    """
    raced = [entry.label for entry in entries if entry.chosen]
    shown = contest.shown(raced)
    top = shown.labels
    margin = shown.margin
    if agreed:
        top = sorted(agreed, key=lambda label: -agreed[label].mean)[: contest.top]
        margin = None
    best = top[0] if top else None
    rows = [_row(contest, entry, best, seconds, failed, agreed) for entry in entries]
    last = ["failed", "not loaded"]

    def place(row: Raced) -> tuple[int, float]:
        if row.status in last:
            return 1 + last.index(row.status), 0.0
        return 0, -(row.agreement if agreed and row.agreement is not None else row.score or 0.0)

    rows.sort(key=place)
    rows.sort(key=lambda row: row.label != best)
    of = sum(entry.label != contest.reference for entry in entries)
    return Race(
        best=best,
        top=top,
        task=task,
        metric=metric,
        error=contest.error,
        margin=contest.margin,
        margin_shown=margin,
        by="agreement" if agreed else "score",
        budget=budget,
        loaded=sum(label != contest.reference for label in contest.answered),
        of=of,
        questions=contest.asked,
        questions_all=(of + bool(contest.reference)) * contest.questions,
        questions_each=contest.questions,
        questions_there=there or contest.questions,
        tasks=tasks,
        seconds=wall,
        seed=contest.seed,
        checkpoints=rows,
        audit_sample=[entry.label for entry in entries if entry.chosen == "audit"],
        notes=[*notes, *as_their_base(as_base), *_alike(contest.answered, as_base)],
        units=units,
        margins=margins,
        plan=plan,
        _answered=dict(contest.answered),
    )


def _row(
    contest: Contest,
    entry: Entry,
    best: str | None,
    seconds: Mapping[str, float],
    failed: Mapping[str, str],
    agreed: Mapping[str, Agreed],
) -> Raced:
    """One checkpoint of a list."""
    label = entry.label
    scores = contest.answered.get(label, NOTHING).score
    asked = len(scores)
    status: Status = "undecided" if entry.chosen else "not loaded"
    words = (status, str(status))
    if asked:
        words = _status(contest, label, best)
    if label in agreed and label != best:
        words = ("undecided", "by agreement")
    if label in failed and label != best:
        words = ("failed", "failed")
    mean = contest.mean(label) if asked else None
    se = float(scores.std(ddof=1)) / asked**0.5 if asked > 1 else None
    own = agreed.get(label)
    if own is not None:  # without labels a score says nothing
        mean = None
        se = None
    return Raced(
        rank=entry.rank,
        label=label,
        questions=asked,
        score=mean,
        se=se,
        best_there=None if agreed else _best_there(contest, label, best),
        status=words[0],
        outcome=words[1],
        seconds=seconds.get(label),
        message=failed.get(label, ""),
        agreement=own.mean if own else None,
        agreement_se=own.se if own else None,
    )


def unit_scores(
    contest: Contest, by_unit: Callable[[NDArray[np.float64]], Mapping[str, tuple[int, float]]]
) -> list[UnitScore]:
    """The scores by unit of all that were asked, of several units; ``by_unit`` takes (N,), NaN unasked."""
    rows = list[UnitScore]()
    for label, answers in contest.answered.items():
        scores = np.full(contest.questions, np.nan)
        scores[contest.order(label)[: len(answers.score)]] = answers.score
        for unit, (number, score) in by_unit(scores).items():
            if number:
                rows.append(UnitScore(unit, label, number, score))
    units = list(dict.fromkeys(row.unit for row in rows))
    if len(units) < 2:
        return []
    return sorted(rows, key=lambda row: (units.index(row.unit), -row.score))


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


def _best_there(contest: Contest, label: str, best: str | None) -> float | None:
    """The best one's mean over those of another's questions that it was asked; None for the best itself."""
    asked = len(contest.answered.get(label, NOTHING).score)
    if best in (None, label) or not asked:
        return None
    scores = contest.answered[str(best)].score
    by_question = np.full(contest.questions, np.nan)
    by_question[contest.order(str(best))[: len(scores)]] = scores
    there = by_question[contest.order(label)[:asked]]
    there = there[~np.isnan(there)]
    return float(there.mean()) if len(there) else None


def _status(contest: Contest, label: str, best: str | None) -> tuple[Status, str]:
    """The status of a checkpoint that was asked something, and its words."""
    if label == contest.reference:
        return "base", "base"
    standing, by = contest.standing[label], f"{contest.margin:g}"
    if standing == "running":
        asked = f"after {len(contest.answered[label].score):,}"
        return ("best", f"best {asked}") if label == best else ("undecided", f"undecided {asked}")
    if standing == "not better" and best and contest.levels[label] < contest.mean(best):
        standing = "behind"
    if standing in ("behind", "not better", "left out", "deleted"):
        return standing, f"{standing} after {len(contest.answered[label].score):,}"
    if best is None or label == best:
        return "best", "best"
    behind = contest.mean(best) - contest.mean(label) > contest.margin + 1e-12
    return (
        ("behind", "behind")
        if behind
        else ("within", f"within {by}" if contest.margin else "equal")
    )
