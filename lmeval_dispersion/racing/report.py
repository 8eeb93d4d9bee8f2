"""The report of ``dispersion race``: its best checkpoint, and how far each got."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import comb
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import count
from lmeval_dispersion.evidence import CUT, LOST
from lmeval_dispersion.harness.failures import as_their_base
from lmeval_dispersion.racing.contest import NOTHING, Contest, Scores
from lmeval_dispersion.racing.lineup import Entry, time_words
from lmeval_dispersion.racing.rule import SHARED
from lmeval_dispersion.report import Chart, Col, Report, Table
from lmeval_dispersion.report.cells import short_names
from lmeval_dispersion.report.declared import listed
from lmeval_dispersion.report.document import Mark
from lmeval_dispersion.report.vega import SAYS, mark, names_apart, numeric, span
from lmeval_dispersion.statistics import LEVEL
from lmeval_dispersion.store.sanity import alike

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
_FEW_LINES = 15  # of a chart, each of which has its name
_NAMED_LINES = 6  # of more lines, the best ones, which have a name
_NAMED = 3  # undecided checkpoints that the first sentence names


@dataclass(frozen=True)
class Agreed:
    """How well a checkpoint's answers match the mean answer of all checkpoints.

    Attributes:
        mean: Mean agreement over the questions, in [0, 1].
        se: Standard error of this mean.
    """

    mean: float
    se: float


@dataclass(frozen=True)
class Asked:
    """What is known of the checkpoints in a race, besides their answers.

    Attributes:
        seconds: Label -> seconds that loading and asking the checkpoint took.
        failed: Label -> a sentence on why the checkpoint could not be loaded or asked.
        as_base: Labels of the adapters that answer exactly as their base.
        agreed: Label -> agreement with the mean answer, by which a race with ``answers="none"``
            orders the checkpoints; empty for any other race.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    as_base: Sequence[str] = ()
    agreed: Mapping[str, Agreed] = field(default_factory=dict)


@dataclass(frozen=True)
class Raced:
    """A checkpoint's row in a race.

    Attributes:
        rank: Rank by the screen, from 1; None without a screen.
        label: Name of the checkpoint.
        questions: Number of questions that it was asked.
        score: Mean score over these questions; None if there are none, or in a race with
            ``answers="none"``.
        se: Standard error of the score over questions; None if ``score`` is, or if there are fewer
            than two questions.
        best_there: Mean score of the best checkpoint over the questions that both were asked. None
            for the best checkpoint itself, if there are no such questions, or in a race with
            ``answers="none"``.
        status: What became of the checkpoint, one of :data:`Status`.
        outcome: The status in words, such as ``behind after 250``.
        seconds: Seconds that loading and asking it took; None if unknown.
        message: Why it failed; empty if it did not.
        agreement: Mean agreement with the mean answer of all checkpoints, in a race with
            ``answers="none"``; None in any other race.
        agreement_se: Standard error of the agreement; None if ``agreement`` is.
    """

    rank: Annotated[int | None, Col("Screen", "d", short="#", drop=1)]
    label: Annotated[str, Col("Checkpoint")]
    questions: Annotated[int, Col("Questions", "d", short="Asked", drop=2)]
    score: Annotated[float | None, Col("Score", ".3f", error="se", dots="both")]
    se: float | None
    best_there: Annotated[
        float | None,
        Col(
            "The best there",
            ".3f",
            hint="the best checkpoint's score on the same questions",
            short="Best",
            drop=1,
        ),
    ]
    status: Status
    outcome: Annotated[str, Col("Status")]
    seconds: float | None
    message: str
    agreement: Annotated[
        float | None,
        Col(
            "Agreement",
            ".3f",
            error="agreement_se",
            hint="agreement with the mean answer of all checkpoints; right answers are not used",
        ),
    ] = None
    agreement_se: float | None = None


@dataclass(frozen=True)
class MarginAt:
    """A margin that was shown, and the number of questions asked by then.

    Attributes:
        questions: Questions asked, summed over the checkpoints.
        margin: No other checkpoint was better than the best one so far (if several are wanted, than
            the last of these) by more than this difference in score.
    """

    questions: int
    margin: float


@dataclass(frozen=True)
class UnitScore:
    """A checkpoint's score on one unit of a race.

    Attributes:
        unit: Name of the unit: a task, or a group with one figure in lm-eval.
        label: Name of the checkpoint.
        questions: Number of the unit's questions that it was asked.
        score: Mean score over these questions.
    """

    unit: Annotated[str, Col("Task")]
    label: Annotated[str, Col("Checkpoint")]
    questions: Annotated[int, Col("Questions", "d", short="Asked")]
    score: Annotated[float, Col("Score", ".3f", dots="both")]


@dataclass(frozen=True, repr=False)
class Race(Report):
    """The result of a race.

    Attributes:
        best: Label of the best checkpoint so far; None if none can be named yet.
        top: Labels of the best checkpoints, the best first; at most as many as were wanted.
        task: Names of the tasks, ``NAME,NAME``.
        metric: Names of the metrics that score the tasks, joined by commas.
        error: Largest probability that a checkpoint better than the best by more than the margin
            was dropped.
        margin: The smallest difference in score that counts.
        margin_shown: No other checkpoint is better than the last in ``top`` by more than this
            difference in score, with the same ``error``; None if no margin can be shown yet.
        by: By what ``top`` is ordered: ``score``; or ``agreement`` in a race with
            ``answers="none"``, to which ``margin`` and ``error`` do not apply.
        budget: Maximum number of shared questions, summed over the checkpoints; None for a race
            without a budget.
        loaded: Number of checkpoints that were asked, without the base.
        of: Number of checkpoints on the list, without the base.
        questions: Number of questions asked, summed over the checkpoints.
        questions_all: Number of questions of all checkpoints on the list, and of the base.
        questions_each: Maximum number of questions for one checkpoint.
        questions_there: Number of questions in the tasks; more than ``questions_each`` with
            ``--limit``.
        tasks: Number of tasks.
        seconds: Seconds that the command took; None for recorded answers.
        seed: Seed of the orders in which the questions are asked.
        checkpoints: The best checkpoint; the others, the highest score (or agreement) first; those
            that failed; those that were not loaded.
        audit_sample: Labels of the checkpoints outside of the short list that were drawn at random
            to race.
        notes: Sentences on what to know about the answers.
        units: Scores by task or group, if there are several; within each, the highest score first.
        margins: The margins shown so far, one for each time that the margin became smaller.
        plan: The sentence of a dry run; empty for a race.
    """

    template: ClassVar[str] = "race.jinja"
    schema: ClassVar[str] = "dispersion-race/1"
    libraries: ClassVar[Sequence[str]] = ("numpy", "lm-eval", "torch", "transformers")
    guide: ClassVar[str] = "docs/reference/race.md"
    each: ClassVar[str] = "checkpoints"

    best: str | None
    top: Sequence[str]
    task: str
    metric: str
    error: float
    margin: float
    margin_shown: float | None
    by: Literal["score", "agreement"]
    budget: int | None
    loaded: int
    of: int
    questions: int
    questions_all: int
    questions_each: int
    questions_there: int
    tasks: int
    seconds: float | None
    seed: int
    checkpoints: Sequence[Raced]
    audit_sample: Sequence[str]
    notes: Sequence[str]
    units: Sequence[UnitScore] = ()
    margins: Sequence[MarginAt] = ()
    plan: str = ""
    _answered: Mapping[str, Scores] = field(default_factory=dict)
    _racing: int = 0

    def tables(self) -> dict[str, Table]:
        """Return the table ``race`` of the checkpoints, and ``units`` of their scores by task.

        A terminal and Markdown leave out the rows with the status ``not loaded``, but show at least
        twelve rows.
        """
        table = Table.of(
            self.checkpoints,
            f"Checkpoints of the race (questions in random orders, seed {self.seed})",
        )
        loaded = sum(row.status != "not loaded" for row in self.checkpoints)
        shown = max(12, loaded)
        marks = dict[int, Mark]()
        for place, row in enumerate(self.checkpoints):
            if row.status in _MARKS:
                marks[place] = _MARKS[row.status]
        excerpt = range(shown) if len(table.rows) > shown else ()
        return {
            "race": replace(table, excerpt=excerpt, marks=marks),
            "units": Table.of(self.units, "By task"),
        }

    def charts(self) -> dict[str, Chart]:
        """Return the charts ``race`` and ``margin``; a chart without data is left out.

        ``race`` draws each checkpoint's mean score as more questions are asked of it. ``margin``
        draws the smallest margin that the answers support, against the number of questions asked of
        all checkpoints together.
        """
        charts = dict[str, Chart]()
        if any(row.label in self._answered for row in self.checkpoints):
            charts["race"] = self._running_means()
        if len(self.margins) > 1:
            charts["margin"] = self._margins()
        return charts

    def _margins(self) -> Chart:
        last = MarginAt(self.questions, self.margins[-1].margin)
        rows = list[dict[str, Any]]()
        for at in (*self.margins, last):
            rows.append({"questions": at.questions, "margin": at.margin})
        x = numeric("questions", "Questions asked, of all together", zero=True)
        y = numeric("margin", "Margin shown", zero=True)
        drawn = {
            "data": {"values": rows},
            "height": 220,
            "encoding": {"x": x, "y": y},
            "mark": {"type": "line", "interpolate": "step-after"},
        }
        numbers = "; ".join(f"{at.questions:,}: {at.margin:.3f}" for at in self.margins[-12:])
        compared = "the best so far"
        if len(self.top) > 1:
            compared = f"the last of the best {len(self.top)} so far"
        meaning = (
            f"With a probability of at least {1 - self.error:g}, no other checkpoint is better than "
            f"{compared} by more than the margin."
        )
        return Chart(drawn, "Margin shown against questions asked", numbers, meaning)

    def _running_means(self) -> Chart:
        """A line for each checkpoint that was asked."""
        asked = [row for row in self.checkpoints if row.label in self._answered]
        values = list[dict[str, Any]]()
        ends = list[dict[str, Any]]()
        names = short_names([row.label for row in asked])
        for row, name in zip(asked, names, strict=True):
            values += self._running_mean(row, name)
            ends.append(values[-1])
        statuses = list(dict.fromkeys(row.status for row in asked))
        colours = [_COLOURS.get(status, "var(--axis)") for status in statuses]
        scale = {"domain": statuses, "range": colours}
        y = numeric("score", self.metric)
        at_ends: dict[str, Any] = {"transform": [{"filter": "isValid(datum.says)"}]}
        text = {"type": "text", "align": "left", "dx": 8, "fontSize": 12}
        named = ends if len(ends) <= _FEW_LINES else ends[:_NAMED_LINES]
        texts = mark(text, y={**y, "field": "place"}, text={"field": "ends"})
        drawn = {
            "data": {"values": values},
            "height": 320,
            "encoding": {
                "x": numeric("questions", "Questions asked", zero=True),
                "color": {"field": "status", "title": None, "scale": scale},
            },
            "layer": [
                mark("line", y=y, detail={"field": "name"}),
                {**at_ends, **mark("rule", **span("y", {**y, "field": "low"}, "high"))},
                {**at_ends, **mark("point", y=y, **SAYS)},
                {"data": {"values": _names_at(named, ends)}, **texts},
            ],
        }
        meaning = (
            "A line ends at the last question that its checkpoint was asked; the bar at its end is ± two "
            "standard errors over questions."
        )
        if len(asked) > _FEW_LINES:
            meaning += (
                f" The best {_NAMED_LINES} lines are named; point at the end of another line to see its "
                "name."
            )
        numbers = "; ".join(end["says"] for end in ends)
        return Chart(drawn, "Score against questions asked", numbers, meaning)

    def _running_mean(self, row: Raced, name: str) -> list[dict[str, Any]]:
        """The mean score after more and more questions; the last point says what became of it."""
        scores = self._answered[row.label].score
        step = max(SHARED, len(scores) // 60)
        points = list[dict[str, Any]]()
        for number in sorted({*range(SHARED, len(scores), step), len(scores)}):
            point = {
                "name": name,
                "status": row.status,
                "questions": number,
                "score": float(scores[:number].mean()),
            }
            points.append(point)
        mean = float(scores.mean())
        reach = 2 * (row.se or 0.0)
        points[-1]["low"] = max(0.0, mean - reach)
        points[-1]["high"] = min(1.0, mean + reach)
        points[-1]["says"] = f"{row.label} {mean:.3f}, {row.outcome}"
        return points

    def context(self) -> dict[str, Any]:
        """Return the sentences that the report's template shows."""
        sentences = list[str]()
        if len(self.top) > 1:
            sentences.append(f"The best {len(self.top)}: {listed(self.top)}.")
        saved = self._saved()
        if saved > 90:
            time = time_words(saved)
            sentences.append(f"Asking all checkpoints everything would take about {time} more.")
        sentences.append(self._base_sentence())
        sampled = self._sampled()
        is_unread = any(row.rank and row.status == "not loaded" for row in self.checkpoints)
        if LOST and is_unread and not self.plan and self.by == "score" and not sampled:
            loss, low, high, data = LOST
            sampled = (
                f"In our studies, not loading the other checkpoints cost {loss:.3f} of accuracy "
                f"(95 % interval {low:.3f} to {high:.3f}) on {data}."
            )
        sentences.append(sampled)
        return {
            "first": self.first_sentence(),
            "extent": "" if self.plan else self._extent(),
            "sentences": [sentence for sentence in sentences if sentence],
        }

    def _extent(self) -> str:
        """How many checkpoints and questions it took, and how long."""
        raced = "raced" if self.seconds is None else "loaded"  # of recorded answers nothing is
        part = None if self.budget is None else self._racing * self.questions_each
        time = f", {time_words(self.seconds)}" if self.seconds else ""
        return (
            f"{self.loaded} of {count(self.of, 'checkpoint')} {raced}, "
            f"{asked_words(self.questions, self.questions_all, part)}{time}."
        )

    def _base_sentence(self) -> str:
        """How many of those asked everything are better than their base, if that was asked too."""
        base = self._base_score()
        if base is None or self.by != "score":
            return ""
        judged = [row for row in self._judged() if row.questions == self.questions_each]
        above = sum((row.score or 0.0) > base for row in judged)
        if not above:
            return ""
        if len(judged) == 1:
            return f"{judged[0].label} scores higher than the base ({base:.3f})."
        scores = "score" if above > 1 else "scores"
        return (
            f"Of the {len(judged)} checkpoints that were asked everything, {above} {scores} higher than "
            f"the base ({base:.3f})."
        )

    def first_sentence(self) -> str:
        """Return the answer: the best checkpoint, and how much better another checkpoint may be.

        For a dry run, return the plan; without a best checkpoint, why there is none.
        """
        if self.plan:
            return self.plan
        best = None
        undecided = list[str]()
        for row in self.checkpoints:
            if row.label == self.best:
                best = row
            elif row.status == "undecided":
                undecided.append(row.label)
        if best is None:
            return self._no_best(bool(undecided))
        if self.by == "agreement":
            return (
                f"Best by agreement: {best.label} (agreement {best.agreement or 0.0:.3f} with the mean answer "
                f"of all checkpoints to {count(best.questions, 'question')} of {self.task}); without "
                "labels there is neither a margin nor an error."
            )
        is_whole = best.questions == self.questions_each
        so_far = "" if is_whole and not undecided else " so far"
        base = self._base_score()
        against_base = ""
        if is_whole and base is not None and base >= (best.score or 0.0):
            against_base = f" It does not score higher than the base ({base:.3f})."
        return (
            f"Best{so_far}: {best.label}, {self._amount(best)}; {self._others(undecided)}."
            f"{against_base}{self._left_to_do(undecided)}"
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
            goes_on = f"; to continue the race, run {self._command()}{without}"
        return f"No best checkpoint yet: none was asked all {questions} of {self.task}{goes_on}."

    def _amount(self, row: Raced) -> str:
        """The best one's score, and over which questions."""
        scores = self._answered[row.label].score
        score = f"{self.metric} {row.score or 0.0:.3f}"
        if np.isin(scores, (0, 1)).all():
            score = f"{100 * (row.score or 0.0):.1f} %"
        there = count(self.questions_there, "question")
        if row.questions < self.questions_each:
            return f"{score} on {row.questions:,} of the {there} of {self.task}"
        if self.questions_each < self.questions_there:
            return f"{score} on {self.task} ({self.questions_each:,} of {there})"
        if self.tasks > 1:
            return f"{score} on {self.task} ({there})"
        return f"{score} on {self.task}"

    def _others(self, undecided: Sequence[str]) -> str:
        """What is shown of the others, with its error."""
        left_out = list[Raced]()
        going = list[Raced]()
        for row in self._judged():
            if row.status == "left out":
                left_out.append(row)
            elif row.label != self.best:
                going.append(row)
        is_deleted = any(row.status == "deleted" and row.questions for row in self.checkpoints)
        is_part = bool(left_out) or is_deleted  # not all that were asked can be the best
        if not going and not undecided:
            return "no other checkpoint was raced"
        shown = shown_words(self.margin_shown, self.error, len(self.top), is_part=is_part)
        is_shown = self.margin_shown is not None and self.margin_shown < 1
        if is_shown and not undecided and {row.status for row in going} == {"behind"}:
            others = "all others that went on" if is_part else "all others raced"
            shown = f"better than {others} (error ≤ {100 * self.error:.3g} %)"
        near = next((row for row in going if row.status == "within"), None)
        if near is not None and not undecided:
            shown += f"; nearest: {near.label}, {near.score:.3f}"
        if left_out:
            loss, low, high, data = CUT
            answers = min(row.questions for row in left_out)
            were = "was" if len(left_out) == 1 else "were"
            shown += (
                f"; {count(len(left_out), 'other')} {were} left out after {answers} answers (in our "
                f"studies on {data}, this cost {loss:g} of accuracy, 95 % interval "
                f"{low:g} to {high:g})"
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
            goes_on = "The same command without a budget goes on until the best is proven."
        return f" Undecided: {names}. {goes_on}"

    def _command(self) -> str:
        """What goes on: not a command that judged a folder's answers, and so took no time."""
        return "the same command" if self.seconds is not None else "the race's own command"

    def _saved(self) -> float:
        """Seconds that the unasked questions would have taken, by the asked ones' time."""
        spent = sum(row.seconds or 0.0 for row in self.checkpoints)
        return spent / max(1, self.questions) * max(0, self.questions_all - self.questions)

    def _judged(self) -> list[Raced]:
        others = ("failed", "base", "deleted")
        return [row for row in self.checkpoints if row.questions and row.status not in others]

    def _sampled(self) -> str:
        """A sentence on checkpoints that were not loaded, by random others raced with the list."""
        if self.by != "score":
            return ""
        if any(row.status == "undecided" for row in self.checkpoints):
            return ""
        n = 0
        best = None
        of_others = dict[str, float]()
        for row in self._judged():
            is_other = row.label in self.audit_sample
            n += is_other
            if row.questions < self.questions_each:
                continue
            score = row.score or 0.0
            if is_other:
                of_others[row.label] = score
            elif best is None or score > best:
                best = score
        if not n or best is None:
            return ""
        better = [label for label, score in of_others.items() if score - best > self.margin]
        left = n + sum(row.status == "not loaded" for row in self.checkpoints)
        more = f" by more than {self.margin:g}" if self.margin else ""
        drawn = f"{count(n, 'checkpoint')} drawn at random from outside the short list"
        if better:
            return f"Of {drawn}, {listed(better)} did better{more}: race a longer short list."
        # Of several groups as many are drawn of each, whether small or large.
        if sum(row.rank == 1 for row in self.checkpoints) > 1:
            return f"Of {drawn}, none did better{more}."
        # The most better ones that a sample without any does not rule out (hypergeometric).
        least_chance = (1 - LEVEL) * comb(left, n)
        most = max(k for k in range(left) if comb(left - k, n) > least_chance)
        return (
            f"Of {drawn}, none did better{more}; of the {left} that the screen left out, at most "
            f"{most} would ({100 * LEVEL:.0f} % confidence)."
        )


def add_margin(margins: list[MarginAt], contest: Contest, labels: Sequence[str]) -> None:
    """Add the margin that the answers support, if it is smaller than the last in ``margins``.

    Args:
        margins: The margins shown so far, changed in place. An empty list gets any margin.
        contest: The race so far.
        labels: Labels of all checkpoints in the race.
    """
    margin = contest.shown(labels).margin
    if margin is not None and (not margins or margin < margins[-1].margin):
        margins.append(MarginAt(contest.asked, margin))


def margin_words(margin: float) -> str:
    """Return a margin as text, rounded up to three decimals; empty for 0.

    >>> margin_words(0.04213), margin_words(0.05), margin_words(0.0)
    ('0.043', '0.05', '')
    """
    digits = math.ceil(round(1000 * margin, 6)) / 1000
    return f"{digits:g}" if digits else ""


def shown_words(
    margin: float | None,
    error: float,
    top: int,
    *,
    is_part: bool,
) -> str:
    """Return a clause on how much better another checkpoint may be than the last of the best ones.

    Args:
        margin: The margin that the race has shown, in score; None if it has shown none.
        error: Upper bound on the probability that the clause is wrong.
        top: Number of best checkpoints that are named.
        is_part: Whether some checkpoints were left out or deleted, so that the clause is only about
            those that went on.
    """
    if margin is None or margin >= 1:
        return "how much better another checkpoint may be is not known yet"
    others = "no other checkpoint in the race"
    if is_part:
        others = "no other checkpoint that went on"
    better = "is better"
    if top > 1:  # the margin is to the last of those named
        better = f"is better than the last of the best {top}"
    words = margin_words(margin)
    if words:
        better = f"{better} by more than {words}"
    return f"{others} {better} (error ≤ {100 * error:.3g} %)"


def asked_words(questions: int, everything: int, part: int | None = None) -> str:
    """Return a clause on the number of questions asked, with their share.

    Args:
        questions: Number of questions asked.
        everything: Number of questions that all checkpoints have together.
        part: Number of questions that the checkpoints in the race have together; None without a
            budget.

    >>> asked_words(500, 50_000)
    '500 of 50,000 questions asked (1 %)'
    >>> asked_words(500, 50_000, 5_000)
    '500 of 50,000 questions asked (1 %; 10 % of the 5,000 for the checkpoints in the race)'
    """
    share = f"{100 * questions / everything:.0f} %"
    if part is not None and part < everything:
        own = f"{100 * questions / part:.0f} %"
        share += f"; {own} of the {part:,} for the checkpoints in the race"
    return f"{questions:,} of {count(everything, 'question')} asked ({share})"


def race_of(
    contest: Contest,
    entries: Sequence[Entry],
    asked: Asked | None = None,
    *,
    task: str,
    metric: str,
    notes: Sequence[str] = (),
) -> Race:
    """Return the result of a contest, finished or interrupted.

    What a contest does not know (``seconds``, ``budget``, ``units`` and so on) is set as for a race
    on recorded answers to one task; a caller that knows more replaces it.

    Args:
        contest: The contest.
        entries: The checkpoints of the list.
        asked: What is known of the checkpoints, besides their answers; None if nothing is.
        task: The race's tasks, ``NAME,NAME``.
        metric: Names of the metrics that score the tasks, joined by commas.
        notes: Sentences for the report.
    """
    asked = asked or Asked()
    agreed = asked.agreed
    raced = [entry.label for entry in entries if entry.chosen]
    shown = contest.shown(raced)
    top = shown.labels
    if agreed:
        ordered = sorted(agreed, key=lambda label: -agreed[label].mean)
        top = ordered[: contest.top]
    best = top[0] if top else None
    rows = [_row(contest, entry, best, asked) for entry in entries]
    rows.sort(key=_place)
    rows.sort(key=lambda row: row.label != best)
    of = sum(entry.label != contest.reference for entry in entries)
    everyone = of + 1 if contest.reference else of
    return Race(
        best=best,
        top=top,
        task=task,
        metric=metric,
        error=contest.error,
        margin=contest.margin,
        margin_shown=None if agreed else shown.margin,
        by="agreement" if agreed else "score",
        budget=None,
        loaded=sum(label != contest.reference for label in contest.answered),
        of=of,
        questions=contest.asked,
        questions_all=everyone * contest.questions,
        questions_each=contest.questions,
        questions_there=contest.questions,
        tasks=1,
        seconds=None,
        seed=contest.seed,
        checkpoints=rows,
        audit_sample=[entry.label for entry in entries if entry.chosen == "audit"],
        notes=[*notes, *as_their_base(asked.as_base), *_alike(contest.answered, asked.as_base)],
        _answered=dict(contest.answered),
        _racing=len(raced),
    )


def _place(row: Raced) -> tuple[int, float]:
    """The place of a row: those asked by falling agreement or score, failed ones, the others."""
    if row.status == "failed":
        return 1, 0.0
    if row.status == "not loaded":
        return 2, 0.0
    height = row.score if row.agreement is None else row.agreement
    return 0, -(height or 0.0)


def _row(
    contest: Contest,
    entry: Entry,
    best: str | None,
    asked: Asked,
) -> Raced:
    """One checkpoint of a list."""
    label = entry.label
    scores = contest.answered.get(label, NOTHING).score
    number = len(scores)
    status: Status = "undecided" if entry.chosen else "not loaded"
    outcome = str(status)
    if number:
        status, outcome = _status(contest, label, best)
    if label in asked.agreed and label != best:
        status = "undecided"
        outcome = "by agreement"
    if label in asked.failed and label != best:
        status = "failed"
        outcome = "failed"
    mean = None
    se = None
    own = asked.agreed.get(label)
    if own is None:  # without labels a score says nothing
        if number:
            mean = contest.mean(label)
        if number > 1:
            se = float(scores.std(ddof=1)) / number**0.5
    return Raced(
        rank=entry.rank,
        label=label,
        questions=number,
        score=mean,
        se=se,
        best_there=None if asked.agreed else _best_there(contest, label, best),
        status=status,
        outcome=outcome,
        seconds=asked.seconds.get(label),
        message=asked.failed.get(label, ""),
        agreement=own.mean if own else None,
        agreement_se=own.se if own else None,
    )


def unit_scores(
    contest: Contest, by_unit: Callable[[NDArray[np.float64]], Mapping[str, tuple[int, float]]]
) -> list[UnitScore]:
    """Return the scores of the checkpoints by unit; empty if there is only one unit.

    Args:
        contest: The race so far.
        by_unit: Called with the score on each question, shape (N,), NaN where it was not asked;
            returns the number of scores and their mean for each unit.
    """
    rows = list[UnitScore]()
    for label in contest.answered:
        for unit, (number, score) in by_unit(contest.by_question(label)).items():
            if number:
                rows.append(UnitScore(unit, label, number, score))
    units = list(dict.fromkeys(row.unit for row in rows))
    if len(units) < 2:
        return []
    return sorted(rows, key=lambda row: (units.index(row.unit), -row.score))


def _alike(answered: Mapping[str, Scores], explained: Sequence[str]) -> list[str]:
    """Notes on checkpoints whose probabilities are the same to the last bit, beyond 0 and 1."""
    first = dict[str, NDArray[np.float64]]()
    for label, scores in answered.items():
        if label not in explained:
            first[label] = scores.probability[:SHARED]
    notes = list[str]()
    for labels in alike(first):
        notes.append(
            f"{listed(labels)} gave the same answers to the last digit: they are copies, or a server "
            "answers unknown names with its default model."
        )
    return notes


def _best_there(contest: Contest, label: str, best: str | None) -> float | None:
    """The best one's mean over those of another's questions that it was asked; None for the best itself."""
    count = contest.count(label)
    if best is None or best == label or not count:
        return None
    asked = contest.order(label)[:count]
    there = contest.by_question(best)[asked]
    known = there[~np.isnan(there)]
    return float(known.mean()) if len(known) else None


def _status(contest: Contest, label: str, best: str | None) -> tuple[Status, str]:
    """The status of a checkpoint that was asked something, and its words."""
    if label == contest.reference:
        return "base", "base"
    standing = contest.standing[label]
    after = f"after {len(contest.answered[label].score):,}"
    if standing == "running":
        status: Status = "best" if label == best else "undecided"
        return status, f"{status} {after}"
    if standing == "not better" and best and contest.levels[label] < contest.mean(best):
        return "behind", f"behind {after}"
    if standing in ("behind", "not better", "left out", "deleted"):
        return standing, f"{standing} {after}"
    if best is None or label == best:
        return "best", "best"
    if contest.mean(best) - contest.mean(label) > contest.margin + 1e-12:
        return "behind", "behind"
    return "within", f"within {contest.margin:g}" if contest.margin else "equal"


def _names_at(named: Sequence[Mapping[str, Any]], ends: Sequence[Mapping[str, Any]]) -> Any:
    """The names of lines where these end, one text for those that end at the same point."""
    together = dict[tuple[int, float], dict[str, Any]]()
    for end in named:
        at = (end["questions"], end["score"])
        if at in together:
            together[at]["ends"] += f", {end['name']}"
        else:
            together[at] = {**end, "ends": end["name"]}
    height = max(end["high"] for end in ends) - min(end["low"] for end in ends)
    length = 0.15 * max(end["questions"] for end in ends)
    points = list(together.values())
    return names_apart(
        points,
        "questions",
        "score",
        length=length,
        line=0.05 * height or 1.0,
        most=4,
    )
