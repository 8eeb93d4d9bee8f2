"""A race of a run's saves, asked while it trains; `dispersion race RUN` goes on in its folder.

All saves answer the same questions, the first of the order that the folder has drawn. Two saves are
compared question by question: bets on the differences of their scores
(:mod:`lmeval_dispersion.racing.rule`) are valid for any two saves that were fixed beforehand. The
best so far is chosen by the answers, so every statement is paid for all pairs from which it may
have been chosen:

- *No other save is better than the best by more than the margin*: the save that is truly best is
  fixed, the one that looks best is one of the k - 1 others, and each of these comparisons has
  error / (k - 1). It holds at each save by itself, not at all together.
- *Worse than the best*, which may end the run: save k has a share of the error, and each of its
  comparisons with the k - 1 earlier ones an equal part of it. The shares are error / K where K
  saves are planned, else 6 error / (pi k)^2; they add up to the error at most, so all that is
  shown holds together. It says nothing of saves after the end.
"""

from __future__ import annotations

import copy
import math
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch.distributed as dist
from lmeval_screener.tokens.answers import tasks_in

from lmeval_dispersion.asking import ERROR, Asking
from lmeval_dispersion.errors import DispersionError
from lmeval_dispersion.harness.seams import free_memory, halve_batch, live_lm
from lmeval_dispersion.racing.contest import NOTHING, Contest, Scores
from lmeval_dispersion.racing.evaluation import Entrant
from lmeval_dispersion.racing.folder import RaceFolder, race_name
from lmeval_dispersion.racing.kept import kept_race
from lmeval_dispersion.racing.lineup import Entry, Lineup
from lmeval_dispersion.racing.rule import FINE, Bets

T = TypeVar("T")
_WARMING = 2  # questions that are asked before the clock starts
_TIMED = 8
#: Part of the questions that two saves are taken to answer differently, for the forecast alone.
_DISAGREEMENT = 0.2
#: The settings of `dispersion race RUN` without options, which then goes on without a screen.
_WHICH = {"family": None, "domain": None, "base": None, "all": False, "audit_sample": 0}


class Place(NamedTuple):
    """The standing of a run after a save.

    Attributes:
        score: The save's mean score.
        margin: Smallest margin by which no other save is shown to be better than the best.
        best: Step of the best save.
        best_kept: Step of the best save whose files are there; None without one.
        worse: Number of saves in a row, this one the last, that are shown to be worse than the
            best.
    """

    score: float
    margin: float
    best: int
    best_kept: int | None
    worse: int


class Standings:
    """The saves by their answers to the shared questions.

    Args:
        contest: The contest of all questions, in whose common order the saves are asked.
        planned: Number of saves; None where it is not known.

    Attributes:
        asked: Steps of the saves, in their order.
    """

    def __init__(self, contest: Contest, planned: int | None = None) -> None:
        self.contest = contest
        self.planned = planned
        self.asked: list[int] = []
        self._worse: dict[int, bool] = {}

    def take(self, step: int, scores: Scores) -> None:
        """Take a save's answers to the first questions of the common order."""
        if step in self.asked:
            self.asked.remove(step)
        before = list(self.asked)
        self.asked.append(step)
        self.contest.hold(str(step), scores)
        self._worse[step] = False
        if before:
            error = self._share(len(self.asked)) / len(before)
            bets = self._bets(step, self.best(before))
            self._worse[step] = error > 0 and bets.refutes(0.0, error)

    def score(self, step: int) -> float:
        """A save's mean score."""
        return self.contest.mean(str(step))

    def best(self, steps: Sequence[int]) -> int:
        """The highest score; of equal ones the most probable right answers, then the first."""

        def height(step: int) -> tuple[float, float]:
            scores = self.contest.answered[str(step)]
            likely = np.where(np.isnan(scores.probability), scores.score, scores.probability)
            return self.score(step), float(likely.mean())

        return max(steps, key=height)

    def margin(self) -> float:
        """The smallest margin by which no other save is shown to be better than the best."""
        best = self.best(self.asked)
        others = [step for step in self.asked if step != best]
        margin = 0.0
        for step in others:
            bets = self._bets(step, best)
            error = self.contest.error / len(others)
            highest = bets.lowest(error)
            # `lowest` does not look for 0 itself.
            if highest > FINE or not bets.refutes(0.0, error):
                margin = max(margin, highest)
        return margin

    def worse_in_a_row(self, step: int) -> int:
        """Number of saves in a row, up to that of ``step``, shown to be worse than the best."""
        count = 0
        for other in reversed(self.asked[: self.asked.index(step) + 1]):
            if not self._worse[other]:
                break
            count += 1
        return count

    def _share(self, number: int) -> float:
        """The part of the error for the comparisons of the ``number``-th save."""
        error = self.contest.error
        if self.planned is None:
            return 6 * error / (math.pi * number) ** 2
        return error / self.planned if number <= self.planned else 0.0

    def _bets(self, step: int, other: int) -> Bets:
        """Bets that a save's mean score is not so much higher than another's."""
        weights = self.contest.weights
        if weights is not None:
            weights = weights[self.contest.order(str(step))]
        bets = Bets(self.contest.questions, weights=weights)
        answered = self.contest.answered
        bets.take(answered[str(step)].score - answered[str(other)].score)
        return bets


def command_options(asking: Asking) -> list[str]:
    """The options of `dispersion race` that ask the same questions in the same way."""
    words = list[str]()
    for field in fields(asking):
        value = getattr(asking, field.name)
        if field.name in ("tasks", "output_path") or value == field.default:
            continue
        words.append(f"--{field.name}")
        if value is not True:
            words.append(str(value))
    return words


class LiveRace:
    """The saves of a run, asked while they are in memory, and the folder that keeps their answers.

    Every process of a distributed training has one and calls the same methods; the first one
    writes.

    Args:
        asking: What is asked, and how; its folder is set to that of the run.
        run: The folder of the saves.
        questions: Number of questions for each save.
        planned: Number of saves; None where it is not known.
        error: Chance, at most, that a statement is wrong.
        may_stop: Whether the answers may end the run.

    Attributes:
        standings: The saves that were asked.
        questions: Number of questions for each save; no more than the folder's earlier saves had.
        available: Number of questions in the tasks.

    Raises:
        UsageError: An option cannot be used as given, or the folder has answers to other questions.
    """

    def __init__(
        self,
        asking: Asking,
        run: Path,
        questions: int,
        *,
        planned: int | None = None,
        error: float = ERROR,
        may_stop: bool = False,
    ) -> None:
        self.run = run
        self._may_stop = may_stop
        self._options = command_options(asking)
        tasks = ",".join(tasks_in(asking.tasks or ""))
        self.folder = RaceFolder.opened(replace(asking, output_path=run / race_name(tasks)))
        evaluation = self.folder.evaluation
        self.available = len(evaluation.questions)
        shared = self.folder.kept.get("shared", {})
        self.questions = min(*shared.values(), questions, self.available)
        self.has_answers = bool(shared)
        contest = Contest(
            self.available,
            error,
            seed=evaluation.seed,
            sharing=self.available,
            weights=evaluation.weights,
        )
        self.standings = Standings(contest, planned)
        self._order = contest.order("")  # the common one

    def resume(self, step: int) -> None:
        """Read the answers of earlier saves, up to ``step``."""
        shared = self.folder.kept.get("shared", {})
        for entry in sorted(self.folder.lineup.entries, key=lambda entry: step_of(entry.label)):
            number = step_of(entry.label)
            if entry.label in shared and 0 <= number <= step:
                known = self.folder.entrant(entry, self.standings.contest).known
                if len(known.score) >= self.questions:
                    self.standings.take(number, known.first(self.questions))

    def agree(self) -> None:
        """Take the first process's number of questions; another node may not see the folder."""
        self.questions = from_first(self.questions)
        self.has_answers = from_first(self.has_answers)

    def is_saved(self, step: int) -> bool:
        """Whether the files of a save are there, as the first process sees them."""
        return from_first(self._place(step).is_dir())

    def lower(self, questions: int) -> None:
        """Ask fewer questions of each save, in every process as many as in the first."""
        self.questions = min(self.questions, from_first(questions))
        self.has_answers = True

    def forecast(self, pace: float) -> str:
        """The start in words: questions, what they show, their cost at ``pace`` seconds each."""
        error = self.standings.contest.error
        difference = shown_difference(self.questions, self.available, error)
        if self.questions == self.available:
            asked = f"all {self.questions:,} questions, which compare saves without an error"
        else:
            asked = (
                f"{self.questions:,} of {self.available:,} questions, which show differences of "
                f"about {difference:.2f} between two saves"
            )
        cost = ""
        if pace:
            cost = f"; about {_duration(self.questions * pace)} a save"
            planned = self.standings.planned
            if planned:
                cost += f", {_duration(planned * self.questions * pace)} for {planned}"
        tasks = self.folder.tasks
        command = shlex.join(
            ["dispersion", "race", str(self.run), "--tasks", tasks, *self._options]
        )
        return (
            f"race of {tasks}: each save answers {asked}{cost}. `{command}` goes on to the proof."
        )

    def timed(self, model: Any, tokenizer: Any) -> float:
        """Seconds a question, by a few that are not kept; DispersionError if they could not be asked."""
        places = self._order[: _WARMING + _TIMED].tolist()
        timed = places[_WARMING:] or places

        def seconds() -> float:
            lm = self._lm(model, tokenizer)
            self.folder.evaluation.ask(lm, places[:_WARMING])
            start = time.perf_counter()
            self.folder.evaluation.ask(lm, timed)
            return (time.perf_counter() - start) / len(timed)

        return together(seconds)

    def ask(self, model: Any, tokenizer: Any, step: int) -> Place:
        """Ask the model of a save; its answers are kept under the name of the save's folder.

        Raises:
            DispersionError: It could not be asked, or its answers not be kept.
        """
        entrant: Entrant | None = None
        with ExitStack() as stack:

            def new_places() -> list[int]:
                nonlocal entrant
                if process_number() > 0:
                    return []
                stack.enter_context(self.folder.alone())
                entrant = self._joined(f"checkpoint-{step}")
                known = len(entrant.known.score)
                return list(self._order[known : self.questions].tolist())

            def put_away() -> None:
                if entrant is not None:
                    entrant.close()
                    entrant.store()

            places = together(new_places)
            lm = self._lm(model, tokenizer) if places else None
            try:
                scores = self._answers(lm, entrant, places)
            finally:
                together(put_away)
        self.standings.take(step, scores)
        return self.standing(step)

    def _answers(self, lm: Any, entrant: Entrant | None, places: Sequence[int]) -> Scores:
        """The shared answers, from the first process, which keeps them; others help it.

        The processes of a sharded model compute each batch together. So all of them ask again, with half
        the batch, where the first one ran out of memory.
        """

        def answers() -> Scores:
            if entrant is not None:
                entrant.live = lm
                return entrant.ask(0, self.questions)
            if places:
                self.folder.evaluation.ask(lm, places)
            return NOTHING

        try:
            return together(answers)
        except DispersionError as error:
            if not str(error).startswith("out of memory") or not halve_batch(lm):
                raise
        free_memory()  # outside of the handler, whose traceback holds the tensors
        return together(answers)

    def standing(self, step: int) -> Place:
        """The standing after the save of a step that was asked."""
        standings = self.standings
        kept = [other for other in standings.asked if self._place(other).is_dir()]
        place = Place(
            score=standings.score(step),
            margin=standings.margin(),
            best=standings.best(standings.asked),
            best_kept=standings.best(kept) if kept else None,
            worse=standings.worse_in_a_row(step),
        )
        return from_first(place)

    def _place(self, step: int) -> Path:
        return self.run / f"checkpoint-{step}"

    def _lm(self, model: Any, tokenizer: Any) -> Any:
        given = {"batch_size": self.folder.asking.batch_size, "device": self.folder.asking.device}
        settings = {name: value for name, value in given.items() if value is not None}
        return live_lm(model, copy.deepcopy(tokenizer), **settings)

    def _joined(self, label: str) -> Entrant:
        """A save's entrant, without answers of other weights; the save is in the folder's list."""
        kept = kept_race(self.folder.path)  # a race may have gone on in the folder
        self.folder.kept = kept
        entries = {other.label: other for other in kept.get("checkpoints", ())}
        if label not in entries:
            entries[label] = Entry(label, {"pretrained": str(self.run / label)}, None, "named")
        lineup = Lineup([*entries.values()], kept.get("notes", ()), by=kept.get("order", "block"))
        shared = dict(kept.get("shared", {}))
        shared[label] = max(shared.get(label, 0), self.questions)
        settings = {"which": kept.get("which", _WHICH), "times": kept.get("times", 1)}
        may_stop = self._may_stop or kept.get("may_stop", False)
        self.folder.keep(lineup, shared=shared, may_stop=may_stop, **settings)
        entrant = self.folder.entrant(entries[label], self.standings.contest)
        if entrant.is_stale:
            shutil.rmtree(self.folder.path / label)
            entrant = self.folder.entrant(entries[label], self.standings.contest)
        return entrant


def shown_difference(questions: int, available: int, error: float) -> float:
    """Difference of two saves that so many of the questions show about four times in five.

    Where the two answer one question in five differently; by simulation.
    """
    variance = _DISAGREEMENT * (1 - questions / available) / questions
    return math.sqrt(4 * math.log(1 / error) * variance)


def step_of(label: str) -> int:
    """The step in the name of a save; -1 of another name."""
    number = label.removeprefix("checkpoint-")
    return int(number) if number.isdigit() else -1


def process_number() -> int:
    """This process's number in a distributed training, 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _processes() -> int:
    """Number of processes of a distributed training, 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def from_first(value: T) -> T:
    """The first process's value, in all of them."""
    if _processes() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def together(compute: Callable[[], T]) -> T:
    """What the first process computes, while all of them do; DispersionError in all if it failed in the first."""
    value: T | None = None
    problem: str | None = None
    try:
        value = compute()
    except DispersionError as error:
        problem = str(error)
    except Exception as error:  # lm-eval's, transformers', torch's
        problem = f"{type(error).__name__}: {error}"
    value, problem = from_first((value, problem))
    if problem is not None:
        raise DispersionError(problem)
    return cast(T, value)


def all_agree(value: bool) -> bool:
    """Whether the value is true in every process."""
    if _processes() == 1:
        return value
    values = [False] * _processes()
    dist.all_gather_object(values, value)
    return all(values)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 5400:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
