"""A race's folder: its settings, list and answers, from which any process can run its checkpoints."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from fnmatch import fnmatch
from functools import cached_property
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from lmeval_screener.checkpoints.snapshot import COMMIT
from lmeval_screener.tokens.answers import tasks_in

from lmeval_dispersion.asking import Asking
from lmeval_dispersion.errors import DispersionError, UsageError
from lmeval_dispersion.errors import count as counted
from lmeval_dispersion.files import remove_parts, write_whole
from lmeval_dispersion.model_args import key_values
from lmeval_dispersion.output import progress_bar, say_above_progress
from lmeval_dispersion.racing.arguments import How
from lmeval_dispersion.racing.contest import Contest, Phase, Scores
from lmeval_dispersion.racing.contest import run as run_checkpoint
from lmeval_dispersion.racing.kept import SCHEMA, SETTINGS, RaceResults, kept_race, race_results
from lmeval_dispersion.racing.lineup import Entry, Lineup, Plan, base_of, may_cut
from lmeval_dispersion.racing.report import (
    Agreed,
    Asked,
    MarginAt,
    Race,
    add_margin,
    race_of,
    unit_scores,
)
from lmeval_dispersion.racing.rule import SHARED, STEP
from lmeval_dispersion.report.declared import listed

if TYPE_CHECKING:
    from lmeval_dispersion.racing.evaluation import CheckpointError, Entrant, Evaluation, More

MANIFEST = "manifest.json"
MANY = 2000  # questions from which a random part is enough
LINES = 30.0  # seconds between two lines of progress in a log
#: lm-eval's arguments that an entry of ``race.json`` may give; others come from the command line alone.
KEPT_ARGUMENTS = ("pretrained", "model", "revision", "peft", "tokenizer", "gguf_file", "dtype")
_OWN = ("pretrained", "model", "revision")  # keys of --model_args that differ by checkpoint
_PARTS = {"prompts": "prompts or examples"}
_SETTINGS = {
    "questions": "another number of questions",
    "lm_eval": "another lm-eval",
    "weighing": "another weighing of the tasks",
}


@dataclass
class Limits:
    """The limits of one command on new questions and on time, and what it has used so far.

    Attributes:
        questions: Maximum number of new questions, summed over the checkpoints; None for no limit.
        hours: Maximum number of hours; None for no limit.
        asked: Number of questions that this command has asked so far.
        start: When the command began, in seconds of the monotonic clock.
    """

    questions: int | None = None
    hours: float | None = None
    asked: int = 0
    start: float = field(default_factory=time.monotonic)

    @property
    def spent(self) -> bool:
        """Whether the command has used up its questions or its hours."""
        late = self.hours is not None and time.monotonic() - self.start >= 3600 * self.hours
        return late or (self.questions is not None and self.asked >= self.questions)


#: Shows questions asked, the most that there may be, and what is at work.
Update = Callable[[int, int, str], None]


class _Asking(NamedTuple):
    """A checkpoint that is asked: its next answers, those known, and how many questions at once."""

    ask: Callable[[int, int], Scores]
    known: Scores
    batch: int


class Spent(Exception):
    """A question is not asked: a limit is reached, or the command does not name the checkpoint."""


@dataclass
class RaceFolder:
    """A race, and the folder that keeps its list of checkpoints, its questions and its answers.

    Attributes:
        asking: The options that say what is asked, and how, with the tasks as ``NAME,NAME``.
        path: The folder.
        lineup: The list of checkpoints.
        date: Date in the names of the results files.
        failed: Label -> why the checkpoint could not be loaded or asked.
        seconds: Label -> seconds that loading and asking the checkpoint took.
        as_base: Labels of the adapters that answer exactly as their base.
        kept: Content of ``race.json``.
        allowance: The limits of this command, and what it has asked so far.
        more: Called to add probabilities to the answers to shared questions; None for
            :func:`shared.complete`.
        named: (name, GGUF file) of each checkpoint that the command names -> lm-eval's arguments
            for it. None if every checkpoint of the list may be loaded.
        patterns: Words of the command that could not be resolved to checkpoints.
        left_out: Label -> name on the command line, for each checkpoint that is not loaded because
            the command does not name it (see :meth:`may_load`).
        margins: The margins shown so far (see :class:`~lmeval_dispersion.racing.report.MarginAt`),
            one for each time that the margin became smaller.
        budget: Maximum number of shared questions that this command may ask of all checkpoints
            together; None without a budget.
    """

    asking: Asking
    path: Path
    lineup: Lineup
    date: str
    failed: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    as_base: list[str] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)
    allowance: Limits = field(default_factory=Limits)
    more: More | None = None
    named: dict[tuple[str, str], Mapping[str, str]] | None = None
    patterns: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    margins: list[MarginAt] = field(default_factory=list)
    budget: int | None = None
    _to_forecast: Plan | None = None  # until the forecast of the time was printed

    @classmethod
    def opened(cls, asking: Asking) -> RaceFolder:
        """Open the folder of a race: a new one, or one with answers to the same questions.

        Raises:
            UsageError: No task is named, an argument cannot be used as given, or the folder has
                answers to other tasks or by other settings.
            HarnessError: A dispersion task needs hidden states, and the backend does not give them;
                or a task lacks the filter or metric that is named for it.
        """
        tasks = ",".join(tasks_in(asking.tasks or ""))
        if not tasks:
            raise UsageError(
                "expected the names of tasks, got none; `dispersion run ls tasks` lists them",
                argument="tasks",
            )
        for key in key_values(asking.model_args):
            if key in _OWN:
                raise UsageError(
                    f"expected arguments that all checkpoints share, got {key}; name each "
                    "checkpoint as CHECKPOINT or CHECKPOINT@REVISION instead",
                    argument="model_args",
                )
        path = Path(asking.output_path or race_name(tasks)).expanduser()
        kept = kept_race(path)
        entries = kept.get("checkpoints", ())
        lineup = Lineup(entries, kept.get("notes", ()), by=kept.get("order", "rows"))
        date = kept.get("date") or datetime.now().strftime("%Y-%m-%dT%H-%M-%S")
        folder = cls(replace(asking, tasks=tasks), path, lineup, date, kept=kept, named={})
        folder._check()
        recorded = folder.evaluation.recorded
        if recorded:
            from lmeval_dispersion.harness.recording import check_model

            check_model(folder.kind, ",".join(recorded))
        return folder

    @property
    def tasks(self) -> str:
        """The names of the tasks, ``NAME,NAME``."""
        return self.asking.tasks or ""

    @cached_property
    def kind(self) -> type:
        """lm-eval's class of the backend.

        Raises:
            UsageError: lm-eval has no backend of this name.
        """
        from lmeval_dispersion.harness.seams import backend

        return backend(self.asking.model)

    @property
    def api(self) -> bool:
        """Whether the backend is a server, which knows checkpoints by names of its own."""
        from lmeval_dispersion.harness.seams import TemplateAPI

        return issubclass(self.kind, TemplateAPI)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings on which the answers depend, as ``race.json`` keeps them."""
        return {
            "tasks": self.tasks,
            "questions": len(self.evaluation.questions),
            "seed": self.asking.seed,
            "metric": self.asking.metric,
            "model": self.asking.model,
            "model_args": self.asking.model_args,
            "weighing": self.evaluation.weighing,
            "lm_eval": version("lm_eval"),
            "identity": self.evaluation.identity(),
        }

    @property
    def entries(self) -> list[Entry]:
        """The checkpoints of the list.

        A checkpoint that the command does not name, and that has no answers, does not race: its
        ``chosen`` is None.
        """
        entries = list[Entry]()
        for entry in self.lineup.entries:
            if entry.chosen and not self.may_load(entry) and not self._has_answers(entry):
                if not is_deleted(entry):
                    self.left_out[entry.label] = _as_named(entry.arguments)
                entry = entry._replace(chosen=None)
            entries.append(entry)
        return entries

    @property
    def raced(self) -> list[Entry]:
        """The checkpoints that race, in the order of the list."""
        return [entry for entry in self.entries if entry.chosen]

    def going(self, contest: Contest) -> list[str]:
        """Return the labels of the checkpoints that are still in the race and may be loaded.

        See :meth:`may_load`. Checkpoints that were asked everything are left out.
        """
        going = list[str]()
        for entry in self.raced:
            is_running = contest.standing.get(entry.label, "running") == "running"
            if is_running and self.may_load(entry):
                going.append(entry.label)
        return going

    def name(self, arguments: Sequence[Mapping[str, str]], patterns: Sequence[str] = ()) -> None:
        """Add checkpoints to those that the command names; only named checkpoints are loaded.

        Args:
            arguments: lm-eval's arguments for loading each checkpoint.
            patterns: Words of the command that could not be resolved to checkpoints, such as
                ``ORG/*``.

        Raises:
            UsageError: ``race.json`` gives a named checkpoint an argument that only the command may
                give.
        """
        self.named = dict(self.named or {})
        for given in arguments:
            self.named[what_loads(given)] = given
        vars(self).pop("_bases", None)
        for pattern in patterns:
            path = os.path.abspath(os.path.expanduser(pattern))
            self.patterns += [pattern.partition("@")[0], path]
            if os.path.isdir(path):
                self.patterns.append(f"{path}/*")
        allowed = {*KEPT_ARGUMENTS, *self._model_args}
        for entry in self.lineup.entries:
            missing = [key for key in entry.arguments if key not in allowed]
            if missing and self.may_load(entry):
                pair = f"{missing[0]}={entry.arguments[missing[0]][:60]}"
                raise UsageError(
                    f"expected {pair}, which {self.path / SETTINGS} has for {entry.label}, got "
                    "none; the file alone may not set this argument: give it in the command as "
                    "well, or remove it from the file",
                    argument="model_args",
                )

    def lacks(self, arguments: Sequence[Mapping[str, str]]) -> bool:
        """Whether one of the ``arguments`` loads a checkpoint that is not on the list."""
        there = {what_loads(entry.arguments) for entry in self.lineup.entries}
        return any(what_loads(given) not in there for given in arguments)

    def may_load(self, entry: Entry) -> bool:
        """Whether the command may load an entry's checkpoint.

        It may if the command names the checkpoint, a pattern that matches it, or an adapter whose
        base it is. If the command names the checkpoint itself, and the entry's revision is a branch
        or a tag, the command has to name the same revision. True for every entry if ``named`` is
        None.
        """
        if self.named is None:
            return True
        name, file = what_loads(entry.arguments)
        given = self.named.get((name, file))
        if given is not None:
            revision = entry.arguments.get("revision")
            is_commit = revision is None or COMMIT.fullmatch(revision) is not None
            return is_commit or revision == given.get("revision")
        if entry.chosen == "base":
            return (name, file) in self._bases
        return any(fnmatch(name, pattern) for pattern in self.patterns)

    @cached_property
    def _bases(self) -> dict[tuple[str, str], dict[str, str]]:
        """The bases that the configurations of named adapters name."""
        bases = [base_of(given) for given in (self.named or {}).values()]
        return {what_loads(base): base for base in bases if base}

    @property
    def _model_args(self) -> dict[str, str]:
        return key_values(self.asking.model_args)

    @property
    def runs_code(self) -> bool:
        """Whether the command lets checkpoints run code of their own (``trust_remote_code``)."""
        given = self._model_args.get("trust_remote_code", "")
        return given.lower() not in ("", "false", "0", "no", "none")

    def _arguments(self, entry: Entry) -> dict[str, str]:
        """An entry's arguments for loading it, of which the folder gives no more than `KEPT_ARGUMENTS`.

        Where checkpoints run code all come from the command: a base, a tokenizer or a commit that the folder
        names would bring code that nobody asked for.
        """
        if self.runs_code and entry.chosen == "base":
            return self._bases.get(what_loads(entry.arguments), {}) | {"peft": ""}
        if self.runs_code:
            name, file = what_loads(entry.arguments)
            given = (self.named or {}).get((name, file))
            if given is not None:
                return dict(given)
            return {"pretrained": name, "gguf_file": file} if file else {"pretrained": name}
        return {key: value for key, value in entry.arguments.items() if key in KEPT_ARGUMENTS}

    def _results_of(self, entry: Entry) -> Path:
        return self.path / self._names[entry.label] / f"results_{self.date}.json"

    def _has_answers(self, entry: Entry) -> bool:
        return self._results_of(entry).is_file()

    @property
    def answered(self) -> dict[str, int]:
        """Number of questions to which the folder has answers, by the checkpoint's label.

        Checkpoints without answers, and those whose results file is damaged, are left out.
        """
        counts = dict[str, int]()
        for entry in self.raced:
            if not self._has_answers(entry):
                continue
            try:
                results = race_results(self._results_of(entry), RaceResults)
            except UsageError:  # its own turn says what is damaged
                continue
            counts[entry.label] = results["race"]["questions"]
        return counts

    @cached_property
    def evaluation(self) -> Evaluation:
        """The questions of the race. Each process loads the tasks itself."""
        from lmeval_dispersion.racing.evaluation import Evaluation

        return Evaluation(self.asking)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "evaluation"}

    def entrant(self, entry: Entry, contest: Contest) -> Entrant:
        """Return the checkpoint of an entry, ready to be asked, with its answers from the folder.

        Raises:
            HarnessError: The checkpoint's answers were changed after they were written.
            DispersionError: The checkpoint's folder cannot be read or written.
        """
        from lmeval_dispersion.racing.evaluation import Entrant

        place = self.path / self._names[entry.label]
        order = contest.order(entry.label)
        arguments = self._arguments(entry) if self.may_load(entry) else entry.arguments
        return Entrant(
            self.evaluation,
            entry.label,
            place,
            self.date,
            arguments,
            order,
            pinned=not self.runs_code,
        )

    @cached_property
    def _names(self) -> dict[str, str]:
        """Label -> name of the folder within this folder."""
        names: dict[str, str] = {}
        for entry in self.lineup.entries:
            name = plain = re.sub(r"[^\w.@-]+|^[.]+", "_", entry.label)
            for number in count(2):
                if name not in names.values():
                    break
                name = f"{plain}-{number}"
            names[entry.label] = name
        return names

    def run(self, contest: Contest, plan: Plan, *, quiet: bool) -> None:
        """Ask all checkpoints the shared questions, then race them one after the other.

        Args:
            contest: The contest, without answers; the answers in the folder are entered first.
            plan: The race's plan. If it has the phases of a budget, only these are asked.
            quiet: Whether to hide the progress and the forecast of the time.

        Raises:
            DispersionError: Checkpoints fail in the same way, or an answer cannot be written.
        """
        self._to_forecast = None if quiet else plan
        self.margins = margins_of(self.kept, contest)
        deleted = list[Entry]()
        entries = dict[str, Entry]()
        for entry in self.raced:
            if is_deleted(entry):
                deleted.append(entry)
            else:
                entries[entry.label] = entry
        phases = plan.phases
        if contest.sharing and not phases:
            phases = [Phase(len(entries), contest.sharing, 0)]
        try:
            with progress_bar(hidden=quiet, every=LINES) as update:
                self._hold_known(contest, entries)
                for entry in deleted:
                    contest.hold(entry.label, self.entrant(entry, contest).known)
                    contest.delete(entry.label)
                for phase in phases:
                    labels = contest.share(phase, [*entries])
                    if contest.shared != self.kept.get("shared", {}):
                        self.write(shared=dict(contest.shared))
                    for label in labels:
                        self._share(contest, entries[label], update, phase.questions)
                    if self.allowance.spent:
                        self._keep_margins(contest)
                        return
                if not plan.phases:
                    for label in contest.turns([*entries], cut=may_cut(self.raced)):
                        self._at_its_turn(contest, entries[label], update)
        finally:
            self.evaluation.models.release()
        self._keep_margins(contest)

    def _hold_known(self, contest: Contest, entries: Mapping[str, Entry]) -> None:
        """Take the answers to shared questions that the folder has of an earlier command."""
        for label, entry in entries.items():
            count = contest.sharing_of(label)
            if count and self._has_answers(entry):
                known = self.entrant(entry, contest).known.first(count)
                if len(known.score):
                    contest.hold(label, known)

    def _share(
        self,
        contest: Contest,
        entry: Entry,
        update: Update,
        count: int,
    ) -> None:
        """Ask a checkpoint its first ``count`` questions, which others are asked as well."""
        from lmeval_dispersion.racing.shared import complete

        with self._asking(contest, entry, update, self.more or complete) as asking:
            known = asking.known.first(count)
            self._check_tokens(entry.label, contest, known)
            while len(known.score) < count:
                begin = len(known.score)
                known += asking.ask(begin, min(begin + asking.batch, count))
                self._check_tokens(entry.label, contest, known)
                contest.hold(entry.label, known)
                self._watch(contest)
            contest.hold(entry.label, known)
        self._watch(contest)

    def _check_tokens(self, label: str, contest: Contest, known: Scores) -> None:
        """Raise UsageError for answers that cannot be ordered by, before more are asked."""
        if self.more:
            from lmeval_dispersion.racing.shared import tokens_of

            tokens_of(self.evaluation, label, contest.order(label)[: len(known.score)])

    def _at_its_turn(self, contest: Contest, entry: Entry, update: Update) -> None:
        """Ask a checkpoint on until it is dropped or was asked everything."""
        with self._asking(contest, entry, update) as asking:

            def ask(begin: int, end: int) -> Scores:
                self._check_may_ask(entry)
                if entry.label not in self.kept["turns"]:
                    self.write(turns=dict(contest.against))
                self._watch(contest)
                return asking.ask(begin, end)

            run_checkpoint(contest, entry.label, ask, asking.batch, asking.known)
        self._watch(contest)

    @contextmanager
    def _asking(
        self,
        contest: Contest,
        entry: Entry,
        update: Update,
        more: More | None = None,
    ) -> Iterator[_Asking]:
        """A checkpoint that is asked; a race goes on where it fails, or nothing may be asked any more."""
        from lmeval_dispersion.racing.evaluation import CheckpointError

        entrant = self.entrant(entry, contest)

        def ask(begin: int, end: int) -> Scores:
            update(*progress(contest, len(self.raced), entrant.label))
            self._check_may_ask(entry)
            self.allowance.asked += end - begin
            start = time.perf_counter()
            is_first = not contest.answered
            scores = entrant.ask(begin, end, more)
            if is_first and self._to_forecast:
                asking = (time.perf_counter() - start - entrant.loading) / (end - begin)
                say_above_progress(self._to_forecast.forecast(entrant.loading, asking))
            self._to_forecast = None
            return scores

        try:
            yield _Asking(ask, entrant.known, self.evaluation.batch)
        except Spent:
            pass  # it is undecided
        except CheckpointError as error:
            take_out(self.failed, contest, entry.label, error)
        finally:
            self.ended(entrant)
            entrant.close()
            entrant.store()

    def _check_may_ask(self, entry: Entry) -> None:
        """Raise Spent where the command does not name a checkpoint, or nothing may be asked any more."""
        if not self.may_load(entry):
            self.left_out[entry.label] = _as_named(entry.arguments)
            raise Spent
        if self.allowance.spent:
            raise Spent

    def _keep_margins(self, contest: Contest) -> None:
        """Write the margins shown, where they are of the error and the top with which the race began."""
        margins = [[at.questions, at.margin] for at in self.margins]
        if _is_as_begun(self.kept, contest) and margins != self.kept.get("margins", []):
            self.write(margins=margins)

    def _watch(self, contest: Contest) -> None:
        """Record the margin that is shown by now, where it has become smaller."""
        add_margin(self.margins, contest, [entry.label for entry in self.raced])

    def ended(self, entrant: Entrant) -> None:
        """Record the time that loading and asking a checkpoint took.

        An adapter that answers exactly as its base is added to ``as_base``.
        """
        self.seconds[entrant.label] = entrant.seconds
        if entrant.as_base and entrant.label not in self.as_base:
            self.as_base.append(entrant.label)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Create the folder, and keep other races out of it while the context lasts.

        Raises:
            UsageError: The folder cannot be created, or another race runs in it.
        """
        lock = FileLock(self.path / ".lock", timeout=0)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock.acquire()
            remove_parts(self.path)
        except Timeout:
            raise UsageError(
                f"another race runs in {self.path}; wait until it ends, or name another folder"
            ) from None
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(
                f"expected a folder that can be written, got {self.path} ({reason}); check its "
                "permissions, or name another folder",
                argument="output_path",
            ) from error
        try:
            yield
        finally:
            lock.release()

    def _check(self) -> None:
        """Raise UsageError if the kept answers belong to other tasks or settings."""
        if not self.kept:
            return
        for key, now in json.loads(json.dumps(self.settings)).items():
            before = self.kept.get(key)
            if before != now:
                raise UsageError(
                    f"{self.path} has the answers of a race with {_difference(key, before, now)}; name "
                    "another folder",
                    argument="output_path",
                )

    def write(self, **more: Any) -> None:
        """Add entries to the folder's ``race.json``.

        Raises:
            DispersionError: The file cannot be written.
        """
        self.kept |= {"schema": SCHEMA, **more}
        write_whole(self.path / SETTINGS, json.dumps(self.kept, indent=1).encode())

    def take(self, lineup: Lineup) -> None:
        """Replace the list of checkpoints, without writing it to the folder."""
        self.lineup = lineup
        vars(self).pop("_names", None)  # of the list before

    def keep(self, lineup: Lineup, **more: Any) -> None:
        """Replace the list of checkpoints, and write it to the folder.

        The short list's manifest and the drawn questions are written as well. ``more`` are further
        entries of ``race.json``.

        Raises:
            DispersionError: A file cannot be written.
        """
        self.take(lineup)
        if lineup.manifest is not None:
            write_whole(self.path / MANIFEST, json.dumps(lineup.manifest, indent=1).encode())
        samples: dict[str, list[int]] = {}  # as lm-eval's --samples takes them
        # Sorted: lm-eval up to 0.4.13 logs documents under the numbers of an unsorted list (its issue 4084).
        for task, i in sorted(self.evaluation.questions):
            samples.setdefault(task, []).append(i)
        write_whole(self.path / "samples.json", json.dumps(samples).encode())
        if "drawn" not in self.kept:
            weights = self.evaluation.weights
            more |= self.settings
            more |= {"drawn": self.evaluation.questions, "turns": {}, "step": STEP}
            more["weights"] = None if weights is None else weights.tolist()
        self.write(
            date=self.date, checkpoints=lineup.entries, notes=lineup.notes, order=lineup.by, **more
        )

    def _many(self) -> list[str]:
        there = self.evaluation.available
        if there <= MANY or len(self.evaluation.questions) < there:
            return []
        return [
            f"Each checkpoint may be asked {there:,} questions. `--limit 1500` asks "
            f"{150_000 / there:.0f} % of them, drawn at random; in our studies this cost at most 0.001 of "
            "accuracy."
        ]

    def _unnamed(self) -> list[str]:
        """A note on checkpoints of the folder that were not loaded, and how they are."""
        if not self.left_out:
            return []
        labels = listed([*self.left_out])
        were = "was" if len(self.left_out) == 1 else "were"
        them = "it" if len(self.left_out) == 1 else "them"
        places = shlex.join([*self.left_out.values()])
        folder = shlex.quote(str(self.path))
        return [
            f"{labels} {were} not loaded, because this command does not name {them}; to include "
            f"{them}, run `dispersion race … {places} --tasks {self.tasks} --output_path {folder}`."
        ]

    def result(
        self,
        contest: Contest,
        wall: float,
        plan: str = "",
        agreed: Mapping[str, Agreed] | None = None,
    ) -> Race:
        """Return the result of the race so far.

        Args:
            contest: The contest with all answers.
            wall: Seconds that this command has taken.
            plan: The sentence of a dry run; empty for a race.
            agreed: Label -> agreement with the mean answer, in a race that ignores the right
                answers; None in any other race.
        """
        entries = self.entries
        failed = dict(self.failed)
        labels = {entry.label for entry in entries}
        for unscreened in self.lineup.failed:
            if unscreened.label not in labels:
                entries.append(Entry(unscreened.label, {}, None, None))
                failed[unscreened.label] = f"it could not be screened: {unscreened.message}"
        notes = [
            *self.lineup.notes,
            *self._unnamed(),
            *deleted_note(contest),
            *self._many(),
            *changes_since_begun(self.kept, contest),
            *self.evaluation.notes(),
        ]
        race = race_of(
            contest,
            entries,
            Asked(self.seconds, failed, self.as_base, agreed or {}),
            task=self.tasks,
            metric=self.evaluation.metric,
            notes=notes,
        )
        return replace(
            race,
            seconds=wall,
            questions_there=self.evaluation.available,
            tasks=len(self.evaluation.tasks),
            plan=plan,
            margins=self.margins,
            budget=self.budget,
            units=unit_scores(contest, self.evaluation.by_unit),
        )


def contest_of(kept: Mapping[str, Any], how: How, *, side_by_side: int = 0) -> Contest:
    """Return the race that ``race.json`` describes, in its state before any answer.

    Checkpoints whose turn began in an earlier command are entered in it.

    Args:
        kept: Content of ``race.json``.
        how: The error, the margin and the number of best checkpoints wanted.
        side_by_side: Number of checkpoints, if several race at the same time; 0 if they take turns.
    """
    count = len(kept["drawn"])
    weights = kept.get("weights")
    contest = Contest(
        count,
        how.error,
        how.margin,
        kept["seed"],
        side_by_side=side_by_side,
        top=how.top,
        step=kept.get("step", STEP),
        split=kept.get("split", 0),
        weights=np.array(weights) if weights else None,
        shared=dict(kept.get("shared", {})),
        may_stop=kept.get("may_stop", False),
        against=dict(kept["turns"]),
    )
    if kept["order"] == "block" and not side_by_side:
        contest.sharing = min(SHARED, count)
        contest.reference = Lineup(kept["checkpoints"]).reference
    return contest


def is_deleted(entry: Entry) -> bool:
    """Whether an entry's checkpoint was a local folder that no longer exists."""
    name = what_loads(entry.arguments)[0]
    return os.path.isabs(name) and not os.path.exists(name)


def deleted_note(contest: Contest) -> list[str]:
    """Return a list with one note on the deleted checkpoints; empty if none of them was asked."""
    labels = list[str]()
    for label, standing in contest.standing.items():
        if standing == "deleted" and len(contest.answered[label].score):
            labels.append(label)
    if not labels:
        return []
    best = max(labels, key=contest.mean)
    number = len(contest.answered[best].score)
    score = f"{contest.mean(best):.3f} over {counted(number, 'question')}"
    which = f"the best of them, {best}, had" if len(labels) > 1 else "it had"
    return [
        f"Not judged any more, because the files were deleted: {listed(labels)}; {which} a mean "
        f"score of {score}."
    ]


def race_name(tasks: str) -> str:
    """Return the name of the folder of a race on ``tasks``, names separated by commas.

    It is ``race-`` and the tasks, in which ``-`` replaces every sequence of characters other than
    ASCII letters, digits, ``_``, ``.`` and ``-``.

    >>> race_name("gsm8k,mmlu")
    'race-gsm8k-mmlu'
    """
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", tasks)
    return f"race-{plain}"


def _as_named(arguments: Mapping[str, str]) -> str:
    """A checkpoint's name on the command line, with its branch or tag and its GGUF file."""
    name, file = what_loads(arguments)
    revision = arguments.get("revision")
    if revision and not arguments.get("peft") and not COMMIT.fullmatch(revision):
        name = f"{name}@{revision}"
    return f"{name}:{file}" if file else name


def begun_in_run(words: Sequence[str], tasks: str) -> Path | None:
    """Return the folder of a race that began during a training run; None without one.

    Args:
        words: The checkpoints that a command names. Only a single one, the folder of a training
            run, can have such a race.
        tasks: The race's tasks, ``NAME,NAME``.
    """
    if len(words) != 1:
        return None
    folder = Path(words[0]).expanduser() / race_name(",".join(tasks_in(tasks)))
    return folder if (folder / SETTINGS).is_file() else None


def margins_of(kept: Mapping[str, Any], contest: Contest) -> list[MarginAt]:
    """Return the margins in ``race.json``, one for each time that the margin became smaller.

    The list is empty if the contest's ``error`` or ``top`` is not the one that the race began with.
    """
    if not _is_as_begun(kept, contest):
        return []
    return [MarginAt(*pair) for pair in kept.get("margins", ())]


def _is_as_begun(kept: Mapping[str, Any], contest: Contest) -> bool:
    """Whether a contest has the error and the top with which the folder's race began."""
    return kept.get("error") == contest.error and kept.get("top", contest.top) == contest.top


def changes_since_begun(kept: Mapping[str, Any], contest: Contest) -> list[str]:
    """Return notes on what has changed since the race began; empty if nothing has.

    There is one note if checkpoints joined, one if ``error`` differs, and one if ``top`` differs.
    """
    notes = list[str]()
    if kept.get("times", 1) > 1:
        notes.append(
            "Checkpoints joined this race after it had begun; `--error` limits the probability of "
            "a wrong result before that and, separately, after it."
        )
    error = kept.get("error", contest.error)
    if error != contest.error:
        notes.append(
            f"The error of {contest.error:g} was chosen after answers were seen; the race began with "
            f"{error:g}."
        )
    top = kept.get("top", contest.top)
    if top != contest.top:
        notes.append(
            f"The number of best checkpoints wanted, {contest.top}, was chosen after answers "
            f"were seen; the race began with {top}."
        )
    return notes


def progress(contest: Contest, raced: int, label: str) -> tuple[int, int, str]:
    """Return the number of questions asked, the most that may be asked in all, and a status text.

    Args:
        contest: The race so far.
        raced: Number of checkpoints in the race.
        label: Label of the checkpoint that is asked now.
    """
    out = list[str]()
    for name, standing in contest.standing.items():
        if standing not in ("running", "complete"):
            out.append(name)
    asked = {name: len(scores.score) for name, scores in contest.answered.items()}
    most = sum(asked.get(name, 0) for name in out) + contest.questions * (raced - len(out))
    words = [f"{label} at {asked.get(label, 0):,} of {contest.questions:,} questions"]
    words.append(f"{len({*contest.standing, label})} of {raced} checkpoints")
    if out:
        words.append(f"{len(out)} dropped, last {out[-1]}")
    if contest.best:
        words.append(f"best {contest.best}")
    return contest.asked, most, ", ".join(words)


def take_out(
    failed: dict[str, str],
    contest: Contest,
    label: str,
    error: CheckpointError,
) -> None:
    """Take a checkpoint out of the race, because it could not be loaded or asked.

    Args:
        failed: Label -> why a checkpoint failed; the checkpoint is added to it.
        contest: The race so far.
        label: Label of the checkpoint.
        error: Why the checkpoint could not be loaded or asked.

    Raises:
        DispersionError: All checkpoints so far failed, at least two of them for the same reason, so
            the fault lies with the task or the model's arguments.
    """
    alike = [name for name, reason in failed.items() if reason == str(error)]
    failed[label] = str(error)
    contest.fail(label)
    if error.asked and alike and {*contest.standing.values()} == {"failed"}:
        raise DispersionError(
            f"{error} ({alike[-1]} and {label} failed in the same way, so no other checkpoint was "
            "loaded; check the task and the arguments of the model)"
        )


def _difference(key: str, before: Any, now: Any) -> str:
    """What a race with the kept answers has that differs, in a few words."""
    if key == "identity":
        task = next(name for name in {**before, **now} if before.get(name) != now.get(name))
        if task not in before or task not in now:
            return "other tasks"
        parts = list[str]()
        for part, value in now[task].items():
            if before[task].get(part) != value:
                parts.append(_PARTS.get(part, part))
        return f"other {listed(parts)} of {task}"
    setting = _SETTINGS.get(key, f"another {key}")
    old = "none" if before is None else before
    new = "none" if now is None else now
    return f"{setting} ({old}, now {new})"


def what_loads(arguments: Mapping[str, str]) -> tuple[str, str]:
    """Return the name that a checkpoint is loaded by, and its GGUF file (empty without one).

    The name is a folder, a repository without the commit, or the name by which a server knows the
    model. An adapter is loaded by its own name, not by that of its base.

    Args:
        arguments: lm-eval's model_args of the checkpoint, by name.
    """
    adapter = arguments.get("peft", "")
    if adapter and not os.path.isabs(adapter):
        adapter = adapter.partition("@")[0]
    name = adapter or arguments.get("pretrained") or arguments.get("model", "")
    return name, arguments.get("gguf_file", "")
