"""A race of a run's saves, which are asked during the training; `dispersion race RUN` continues it.

All saves answer the same questions, the first of the order that the folder has drawn. Two saves are
compared question by question: bets on the differences of their scores
(:mod:`lmeval_dispersion.racing.rule`) are valid for any two saves that were fixed beforehand. The
best so far is chosen by the same answers, so the error of a statement is divided among all pairs
that might have been chosen:

- *No other save is better than the best by more than the margin*: the save that is truly best is
  fixed, the one that looks best is one of the k - 1 others, and each of these comparisons has
  error / (k - 1). It holds at each save by itself, not at all together.
- *Worse than the best*, which may end the run: save k has a share of the error, and each of its
  comparisons with the k - 1 earlier ones an equal part of it. The shares are error / K where K
  saves are planned, else 6 error / (pi k)^2; they add up to the error at most, so all that is
  shown holds together. It says nothing of the saves that would have come after the end.
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

import torch.distributed as dist
from lmeval_screener.tokens.answers import tasks_in

from lmeval_dispersion.asking import ERROR, Asking
from lmeval_dispersion.errors import DispersionError
from lmeval_dispersion.harness.seams import free_memory, halve_batch, live_lm
from lmeval_dispersion.racing.arguments import Which
from lmeval_dispersion.racing.contest import NOTHING, Contest, Scores, likely
from lmeval_dispersion.racing.evaluation import Entrant
from lmeval_dispersion.racing.folder import RaceFolder, race_name
from lmeval_dispersion.racing.kept import kept_race
from lmeval_dispersion.racing.lineup import Entry, Lineup, choice_of, time_words
from lmeval_dispersion.racing.rule import FINE, Bets

T = TypeVar("T")
_WARMING = 2  # questions that are asked before the clock starts
_TIMED = 8
#: Part of the questions that two saves are taken to answer differently, for the forecast alone.
_DISAGREEMENT = 0.2


class Place(NamedTuple):
    """How a training run stands after a save, that is, a checkpoint that it wrote.

    Attributes:
        score: The mean score of this save.
        margin: The most by which the mean score of another save may exceed that of the best, as far
            as the answers show.
        best: The step of the best save so far.
        best_kept: The step of the best save whose files still exist; None if none exists.
        worse: How many saves in a row, up to this one, are each shown to be worse than the best
            save before it.
    """

    score: float
    margin: float
    best: int
    best_kept: int | None
    worse: int


class Standings:
    """The saves of a training run, compared by their answers to the same questions.

    A save is a checkpoint that was written while the model trained. Its step identifies it.

    Args:
        contest: The :class:`~lmeval_dispersion.racing.contest.Contest` over all questions. Every
            save is asked the first questions of the contest's common order.
        planned: Number of saves that the run will have; None if it is not known.

    Attributes:
        contest: The contest, which holds the answers of the saves.
        planned: Number of saves that the run will have; None if it is not known.
        asked: The steps of the saves that have answered, in the order of their latest answers.
    """

    def __init__(self, contest: Contest, planned: int | None = None) -> None:
        self.contest = contest
        self.planned = planned
        self.asked: list[int] = []
        self._worse: dict[int, bool] = {}

    def take(self, step: int, scores: Scores) -> None:
        """Add a save's answers to the first questions of the contest's common order.

        If the save has answered before, the new answers replace the earlier ones.

        Args:
            step: The step of the save.
            scores: The scores of its answers.
        """
        if step in self.asked:
            self.asked.remove(step)
        before = list(self.asked)
        self.asked.append(step)
        self.contest.hold(str(step), scores)
        self._worse[step] = False
        if not before:
            return
        error = self._share(len(self.asked)) / len(before)
        bets = self._bets(step, self.best(before))
        self._worse[step] = error > 0 and bets.refutes(0.0, error)

    def score(self, step: int) -> float:
        """Return the mean score of a save."""
        return self.contest.mean(str(step))

    def best(self, steps: Sequence[int]) -> int:
        """Return the step of the save with the highest mean score, among the saves of ``steps``.

        Of saves with equal scores, the one that gives the right answers the highest mean
        probability is taken; if that is equal too, the first.
        """

        def height(step: int) -> tuple[float, float]:
            scores = self.contest.answered[str(step)]
            return self.score(step), float(likely(scores).mean())

        return max(steps, key=height)

    def margin(self) -> float:
        """Return the most by which any other save may be better than the best save, in mean score.

        The probability that this bound is wrong is at most ``contest.error``. The bound is 0 with a
        single save.
        """
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
        """Return how many saves in a row, up to that of ``step``, are shown to be worse.

        A save counts if it is shown to be worse than the best of the saves before it.
        """
        count = 0
        end = self.asked.index(step) + 1
        for other in reversed(self.asked[:end]):
            if not self._worse[other]:
                break
            count += 1
        return count

    def _share(self, number: int) -> float:
        """The part of the error for the comparisons of the ``number``-th save."""
        error = self.contest.error
        if self.planned is None:
            return 6 * error / (math.pi * number) ** 2
        if number > self.planned:
            return 0.0
        return error / self.planned

    def _bets(self, step: int, other: int) -> Bets:
        """Bets that a save's mean score is not so much higher than another's."""
        bets = self.contest.new_bets(str(step))
        answered = self.contest.answered
        mine = answered[str(step)].score
        theirs = answered[str(other)].score
        bets.take(mine - theirs)
        return bets


def command_options(asking: Asking) -> list[str]:
    """Return the options that make ``dispersion race`` ask questions as ``asking`` says.

    The options are words of a command line. The tasks, the output folder, and options that have
    their default values are left out.

    Args:
        asking: The questions, and how they are asked.
    """
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
    """A race between the saves of a training run, each of which answers questions while in memory.

    A save is a checkpoint that the run writes. The answers are kept in a folder. In distributed
    training, every process makes a `LiveRace` and calls the same methods; only the first process
    writes.

    Args:
        asking: The tasks and lm-eval's options.
        run: The folder of the saves.
        questions: Number of questions for each save.
        planned: Number of saves that the run will have; None if it is not known.
        error: Upper bound on the probability that a statement about the saves is wrong.
        may_stop: Whether the answers may end the run.

    Attributes:
        run: The folder of the saves.
        folder: The folder of the race, inside ``run``.
        standings: The saves that have answered, and how they compare.
        questions: Number of questions for each save: the number wanted, but not more than earlier
            saves in the folder were asked, and not more than the tasks have.
        available: Number of questions in the tasks.
        has_answers: Whether the number of questions is fixed, by answers of earlier saves in the
            folder or by :meth:`lower`.

    Raises:
        UsageError: An option cannot be used, or the folder has answers to other questions.
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
        """Restore the standings from the answers in the race's folder.

        Only saves up to ``step`` count. Saves that answered fewer than ``questions`` questions are
        skipped.
        """
        shared = self.folder.kept.get("shared", {})
        for entry in sorted(self.folder.lineup.entries, key=lambda entry: step_of(entry.label)):
            number = step_of(entry.label)
            is_earlier = 0 <= number <= step
            if entry.label not in shared or not is_earlier:
                continue
            entrant = self.folder.entrant(entry, self.standings.contest)
            if len(entrant.known.score) >= self.questions:
                self.standings.take(number, entrant.known.first(self.questions))

    def agree(self) -> None:
        """Set ``questions`` and ``has_answers`` to those of the first process, in every process.

        The other processes may be on nodes that do not see the folder of the race.
        """
        self.questions = from_first(self.questions)
        self.has_answers = from_first(self.has_answers)

    def is_saved(self, step: int) -> bool:
        """Return whether the first process finds the folder of the save of ``step``."""
        return from_first(self._place(step).is_dir())

    def lower(self, questions: int) -> None:
        """Lower the number of questions for each save, and fix it.

        Args:
            questions: The new number; that of the first process is used in every process. A number
                above the present one is ignored.
        """
        self.questions = min(self.questions, from_first(questions))
        self.has_answers = True

    def forecast(self, pace: float) -> str:
        """Return the text that is printed before the training.

        It says how many questions each save answers, how large a difference between two saves these
        questions show (unless all are asked), how long they take (if known), and which command
        continues the race.

        Args:
            pace: Seconds for one question; 0 if the time is not known.
        """
        error = self.standings.contest.error
        difference = shown_difference(self.questions, self.available, error)
        if self.questions == self.available:
            asked = f"all {self.questions:,} questions, so that the comparison of saves is exact"
        else:
            asked = (
                f"{self.questions:,} of {self.available:,} questions, enough to show a "
                f"difference of about {difference:.2f} between two saves"
            )
        cost = ""
        if pace:
            cost = f"; this takes about {time_words(self.questions * pace)} for each save"
            planned = self.standings.planned
            if planned is not None and planned > 1:
                cost += f", {time_words(planned * self.questions * pace)} for all {planned} saves"
        tasks = self.folder.tasks
        command = shlex.join(
            ["dispersion", "race", str(self.run), "--tasks", tasks, *self._options]
        )
        return (
            f"race of {tasks}: each save answers {asked}{cost}. `{command}` continues the race "
            "until the answers show which save is best."
        )

    def timed(self, model: Any, tokenizer: Any) -> float:
        """Ask the model a few questions, and return the mean time for one, in seconds.

        The answers are not kept.

        Raises:
            DispersionError: The model could not be asked.
        """
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
        """Ask a model the questions, and keep the answers under the name ``checkpoint-STEP``.

        Questions that the folder already has answers to are not asked again.

        Args:
            model: The model in memory.
            tokenizer: The model's tokenizer.
            step: The step of the save.

        Returns:
            How the run stands after this save.

        Raises:
            DispersionError: The model could not be asked, or the answers could not be written.
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
        """Return how the run stands after the save of ``step``, which must have answered."""
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
        return live_lm(model, copy.deepcopy(tokenizer), **self.folder.asking.of_model)

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
        settings = {"which": kept.get("which", choice_of(Which())), "times": kept.get("times", 1)}
        may_stop = self._may_stop or kept.get("may_stop", False)
        self.folder.keep(lineup, shared=shared, may_stop=may_stop, **settings)
        entrant = self.folder.entrant(entries[label], self.standings.contest)
        if entrant.is_stale:
            shutil.rmtree(self.folder.path / label)
            entrant = self.folder.entrant(entries[label], self.standings.contest)
        return entrant


def shown_difference(questions: int, available: int, error: float) -> float:
    """Return the difference in mean score between two saves that is shown in about 80 % of cases.

    It is assumed that the two saves answer one question in five differently.

    Args:
        questions: Number of questions that both saves are asked.
        available: Number of questions in the tasks.
        error: Upper bound on the probability that a statement about the saves is wrong.
    """
    variance = _DISAGREEMENT * (1 - questions / available) / questions
    # The factor was found by simulation.
    return math.sqrt(4 * math.log(1 / error) * variance)


def step_of(label: str) -> int:
    """Return the step of a save named ``checkpoint-STEP``; -1 for another name."""
    number = label.removeprefix("checkpoint-")
    return int(number) if number.isdigit() else -1


def process_number() -> int:
    """Return the rank of this process in distributed training; 0 otherwise."""
    return dist.get_rank() if _is_distributed() else 0


def _processes() -> int:
    """Number of processes of a distributed training, 1 without one."""
    return dist.get_world_size() if _is_distributed() else 1


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def from_first(value: T) -> T:
    """Return the first process's ``value`` in every process of distributed training."""
    if _processes() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def together(compute: Callable[[], T]) -> T:
    """Call ``compute`` in every process, and return the first process's result in all of them.

    Raises:
        DispersionError: ``compute`` failed in the first process. All processes raise it.
    """
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
    """Return whether ``value`` is true in every process of distributed training."""
    if _processes() == 1:
        return value
    values = [False] * _processes()
    dist.all_gather_object(values, value)
    return all(values)
