"""A race of a run's saves, asked while it trains; `dispersion race RUN` goes on in its folder.

All saves answer the same questions, the first of the order that the folder has drawn. Two saves are compared
question by question: bets on the differences of their scores (:mod:`lmeval_dispersion.racing.rule`) are valid
for any two saves that were fixed beforehand. The best so far is chosen by the answers, so every statement is
paid for all pairs from which it may have been chosen:

- *No other save is better than the best by more than the margin*: the save that is truly best is fixed, the
  one that looks best is one of the k - 1 others, and each of these comparisons has error / (k - 1).
- *Worse than the best*, which may end the run: save k has a share of the error, and each of its k - 1
  comparisons with earlier ones an equal part of it. The shares are error / K where K saves are planned, else
  6 error / (pi k)^2; they add up to the error at most, so all that is shown holds together. It says nothing of
  saves after the end.
"""

from __future__ import annotations

import copy
import math
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from lmeval_dispersion.errors import DispersionError
from lmeval_dispersion.harness.seams import live_lm
from lmeval_dispersion.racing.contest import Contest, Scores
from lmeval_dispersion.racing.evaluation import Entrant
from lmeval_dispersion.racing.folder import RaceFolder, race_name
from lmeval_dispersion.racing.kept import kept_race
from lmeval_dispersion.racing.lineup import Entry, Lineup
from lmeval_dispersion.racing.rule import Bets

T = TypeVar("T")
_WARMING = 2  # questions that are asked before the clock starts
_TIMED = 8
#: Part of the questions that two saves of a run are taken to answer differently, for the forecast alone.
_DISAGREEMENT = 0.2
_FINENESS = 0.001  # of a margin
#: The settings of `dispersion race RUN` without options, which then goes on without a screen.
_WHICH = {"family": None, "domain": None, "base": None, "all": False, "audit_sample": 0}


class Place(NamedTuple):
    """The standing of a run after a save.

    Attributes:
        score: The save's mean score.
        margin: Smallest margin by which no other save is shown to be better than the best.
        best: Step of the best save.
        best_kept: Step of the best save whose files are there; None without one.
        worse: Number of saves in a row, this one the last, that are shown to be worse than the best.
    """

    score: float
    margin: float
    best: int
    best_kept: int | None
    worse: int


class LiveRace:
    """The saves of a run, asked while they are in memory, and the folder that keeps their answers.

    Every process of a distributed training has one and calls the same methods; the first one writes.

    Args:
        run: The folder of the saves.
        tasks: lm-eval's ``NAME,NAME``.
        questions: Number of questions for each save.
        planned: Number of saves; None where it is not known.
        options: Those of :func:`~lmeval_dispersion.race` on tasks, lm-eval and the error.

    Attributes:
        asked: Step -> scores of the shared questions, in the order of the saves.
        questions: Number of questions for each save; that of the folder where it has answers.
        available: Number of questions in the tasks.

    Raises:
        UsageError: An option cannot be used as given, or the folder has answers to other questions.
    """

    def __init__(
        self,
        run: Path,
        tasks: str,
        questions: int,
        *,
        planned: int | None = None,
        error: float = 0.05,
        **options: Any,
    ) -> None:
        self.run = run
        self.error = error
        self.planned = planned
        self.folder = _opened(tasks, run, options)
        self.available = len(self.folder.evaluation.questions)
        shared = self.folder.kept.get("shared", {})
        self.questions = min(next(iter(shared.values()), questions), self.available)
        self.has_answers = bool(shared)
        self.asked: dict[int, Scores] = {}
        self._worse: dict[int, bool] = {}
        self._settings = {
            key: value
            for key, value in self.folder.backend.items()
            if key in ("batch_size", "device") and value is not None
        }

    def resume(self, step: int) -> None:
        """Read the answers of earlier saves, up to ``step``."""
        shared = self.folder.kept.get("shared", {})
        for entry in sorted(self.folder.lineup.entries, key=lambda entry: step_of(entry.label)):
            number = step_of(entry.label)
            if entry.label in shared and 0 <= number <= step:
                known = self._entrant(entry).known
                if len(known.score) >= self.questions:
                    self._take(number, known.at(np.arange(self.questions)))

    def is_saved(self, step: int) -> bool:
        """Whether the files of a save are there, as the first process sees them."""
        return from_first(self._place(step).is_dir())

    def lower(self, questions: int) -> None:
        """Ask fewer questions of each save, in every process as many as in the first."""
        self.questions = min(self.questions, from_first(questions))
        self.has_answers = True

    def forecast(self, pace: float) -> str:
        """The start in words: questions, what they show, and their cost at ``pace`` seconds a question."""
        if self.questions == self.available:
            asked = f"all {self.questions:,} questions, which compare saves without an error"
        else:
            asked = (
                f"{self.questions:,} of {self.available:,} questions, which show differences of about "
                f"{self.power():.2f} between two saves"
            )
        cost = ""
        if pace:
            cost = f"; about {_duration(self.questions * pace)} a save"
            if self.planned:
                cost += f", {_duration(self.planned * self.questions * pace)} for {self.planned}"
        return (
            f"race of {self.folder.tasks}: each save answers {asked}{cost}. "
            f"`dispersion race {shlex.quote(str(self.run))} --tasks {self.folder.tasks}` goes on to the proof."
        )

    def timed(self, model: Any, tokenizer: Any) -> float:
        """Seconds a question, by a few that are not kept."""
        lm = self._lm(model, tokenizer)
        places = list(range(min(_WARMING + _TIMED, self.available)))
        self.folder.evaluation.ask(lm, places[:_WARMING])
        start = time.perf_counter()
        timed = places[_WARMING:] or places
        self.folder.evaluation.ask(lm, timed)
        return from_first((time.perf_counter() - start) / len(timed))

    def ask(self, model: Any, tokenizer: Any, step: int) -> Place:
        """Ask the model of a save; its answers are kept under the name of the save's folder.

        Raises:
            DispersionError: It could not be asked, or its answers not be kept.
        """
        problem = ""
        places: list[int] = []
        entrant: Entrant | None = None
        with ExitStack() as stack:
            if rank() == 0:
                try:
                    stack.enter_context(self.folder.alone())
                    entrant = self._joined(f"checkpoint-{step}")
                    first = len(entrant.known.score)
                    places = list(range(first, self.questions))
                except (DispersionError, OSError) as error:
                    problem = str(error)
            places, problem = from_first((places, problem))
            if problem:
                raise DispersionError(problem)
            scores: Scores | None = None
            try:
                scores = self._answers(model, tokenizer, entrant, places)
            except DispersionError as error:
                problem = str(error)
            except Exception as error:  # lm-eval's, transformers', torch's
                problem = f"{type(error).__name__}: {error}"
            scores, problem = from_first((scores, problem))
        if scores is None:
            raise DispersionError(problem)
        self._take(step, scores)
        return self.standing(step)

    def _answers(
        self, model: Any, tokenizer: Any, entrant: Entrant | None, places: Sequence[int]
    ) -> Scores | None:
        """The answers to the shared questions in the first process, which keeps them; others help it."""
        lm = self._lm(model, tokenizer) if places else None
        if entrant is None:
            if places:
                self.folder.evaluation.ask(lm, places)
            return None
        entrant.live = lm
        try:
            return entrant.ask(0, self.questions)
        finally:
            entrant.close()
            entrant.store()

    def standing(self, step: int) -> Place:
        """The standing after the save of a step that was asked."""
        steps = list(self.asked)
        best = self._best(steps)
        kept = from_first([other for other in steps if self._place(other).is_dir()])
        worse = 0
        for other in reversed(steps[: steps.index(step) + 1]):
            if not self._worse[other]:
                break
            worse += 1
        return Place(
            score=float(self.asked[step].score.mean()),
            margin=self._margin(best),
            best=best,
            best_kept=self._best(kept) if kept else None,
            worse=worse,
        )

    def power(self) -> float:
        """Difference of two saves that so many questions show, about, with a chance of one half."""
        left = 1 - self.questions / self.available
        variance = _DISAGREEMENT * left / self.questions
        return math.sqrt(2 * math.log(1 / self.error) * variance)

    def _take(self, step: int, scores: Scores) -> None:
        before = [other for other in self.asked if other != step]
        self.asked[step] = scores
        self._worse[step] = False
        if before:
            best = self._best(before)
            differences = scores.score - self.asked[best].score
            error = self._share(len(before) + 1) / len(before)
            self._worse[step] = _is_below(differences, 0.0, self.available, error)

    def _share(self, number: int) -> float:
        """The part of the error for the comparisons of the ``number``-th save."""
        if self.planned is not None and number <= self.planned:
            return self.error / self.planned
        if self.planned is not None:
            return 0.0
        return 6 * self.error / (math.pi * number) ** 2

    def _best(self, steps: Sequence[int]) -> int:
        """The highest score; of equal ones the most probable right answers, then the first."""

        def height(step: int) -> tuple[float, float]:
            scores = self.asked[step]
            likely = np.where(np.isnan(scores.probability), scores.score, scores.probability)
            return float(scores.score.mean()), float(likely.mean())

        return max(steps, key=height)

    def _margin(self, best: int) -> float:
        others = [step for step in self.asked if step != best]
        margin = 0.0
        for step in others:
            differences = self.asked[step].score - self.asked[best].score
            error = self.error / len(others)
            margin = max(margin, _margin_of(differences, self.available, error))
        return margin

    def _place(self, step: int) -> Path:
        return self.run / f"checkpoint-{step}"

    def _lm(self, model: Any, tokenizer: Any) -> Any:
        return live_lm(model, copy.deepcopy(tokenizer), **self._settings)

    def _entrant(self, entry: Entry) -> Entrant:
        # The shared questions are the first ones of the drawn order.
        contest = Contest(self.available, block=self.available)
        return self.folder.entrant(entry, contest)

    def _joined(self, label: str) -> Entrant:
        """A save's entrant, without answers of other weights; the save is in the folder's list."""
        kept = kept_race(self.folder.path)  # a race may have gone on in the folder
        self.folder.kept = kept
        entries = {other.label: other for other in kept.get("checkpoints", ())}
        if label not in entries:
            entries[label] = Entry(label, {"pretrained": str(self.run / label)}, None, "named")
        lineup = Lineup([*entries.values()], kept.get("notes", ()), by=kept.get("order", "block"))
        shared = {**kept.get("shared", {}), label: self.questions}
        settings = {"which": kept.get("which", _WHICH), "times": kept.get("times", 1)}
        self.folder.keep(lineup, shared=shared, **settings)
        entrant = self._entrant(entries[label])
        if entrant.is_stale:
            shutil.rmtree(self.folder.path / label)
            entrant = self._entrant(entries[label])
        return entrant


def step_of(label: str) -> int:
    """The step in the name of a save; -1 of another name."""
    number = label.removeprefix("checkpoint-")
    return int(number) if number.isdigit() else -1


def rank() -> int:
    """This process's number in a distributed training, 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def from_first(value: T) -> T:
    """The first process's value, in all of them."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _opened(tasks: str, run: Path, options: Mapping[str, Any]) -> RaceFolder:
    """The race's folder in a run's."""
    defaults = {
        "seed": 0,
        "limit": None,
        "metric": None,
        "model": "hf",
        "model_args": "",
        "batch_size": None,
        "device": None,
    }
    return RaceFolder.opened(tasks, run / race_name(tasks), **{**defaults, **options})


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 5400:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"


def _is_below(differences: NDArray[np.float64], level: float, of: int, error: float) -> bool:
    """Whether the mean of ``of`` differences is shown to lie below the level, by the first of them."""
    if len(differences) == of:
        return bool(differences.mean() < level)
    if error <= 0:
        return False
    bets = Bets(of, level)
    bets.take(differences)
    return bets.refutes(error)


def _margin_of(differences: NDArray[np.float64], of: int, error: float) -> float:
    """The lowest level, at least 0, below which the mean of the differences is shown to lie."""
    if len(differences) == of:
        return max(0.0, float(differences.mean()))
    low = 0.0
    high = 1.0
    if _is_below(differences, low, of, error):
        return low
    while high - low > _FINENESS:
        middle = (low + high) / 2
        if _is_below(differences, middle, of, error):
            high = middle
        else:
            low = middle
    return high
