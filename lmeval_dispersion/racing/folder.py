"""A race and its folder: all that a process needs to run one of its checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.output import progress_bar, write_whole
from lmeval_dispersion.racing.contest import Contest, Scores
from lmeval_dispersion.racing.contest import run as run_checkpoint
from lmeval_dispersion.racing.lineup import Entry, Lineup
from lmeval_dispersion.racing.report import Race, race_of

if TYPE_CHECKING:
    from lmeval_dispersion.racing.evaluation import Entrant, Evaluation

SETTINGS, MANIFEST = "race.json", "manifest.json"


@dataclass
class RaceFolder:
    """A race in its folder."""

    tasks: str
    options: Mapping[str, Any]  # arguments of the evaluation
    backend: Mapping[str, Any]  # model, model_args, batch_size and device
    path: Path
    lineup: Lineup
    date: str  # in the names of the files of results
    failed: dict[str, str] = field(default_factory=dict)  # label -> why it could not be loaded or asked
    seconds: dict[str, float] = field(default_factory=dict)  # label -> to load and ask it

    @property
    def raced(self) -> list[Entry]:
        """The checkpoints that race, in order."""
        return [entry for entry in self.lineup.entries if entry.chosen]

    @cached_property
    def evaluation(self) -> Evaluation:
        """The questions; another process loads the tasks itself."""
        from lmeval_dispersion.racing.evaluation import Evaluation

        return Evaluation(self.tasks, **self.options)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "evaluation"}

    def entrant(self, entry: Entry) -> Entrant:
        """A checkpoint with what the folder has of it."""
        from lmeval_dispersion.racing.evaluation import Entrant

        place = self.path / self._names[entry.label]
        return Entrant(self.evaluation, entry.label, place, self.date, entry.arguments, **self.backend)

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

    def run(self, contest: Contest, *, quiet: bool) -> None:
        """Race, one checkpoint after the other."""
        from lmeval_dispersion.racing.evaluation import CheckpointError

        most = contest.questions * len(self.raced)
        with progress_bar(hidden=quiet) as update:
            for entry in self.raced:
                entrant = self.entrant(entry)

                def ask(begin: int, end: int, entrant: Entrant = entrant) -> Scores:
                    best = f"{entrant.label}, best {contest.best}" if contest.best else entrant.label
                    update(contest.asked, most, best)
                    return entrant.ask(begin, end)

                try:
                    run_checkpoint(contest, entry.label, ask)
                except CheckpointError as error:
                    self.failed[entry.label] = str(error)
                    contest.fail(entry.label)
                finally:
                    self.seconds[entry.label] = entrant.seconds
                    entrant.close()
                    entrant.store()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Make the folder, and keep other races out of it."""
        lock = FileLock(self.path / ".lock", timeout=0)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except Timeout:
            raise UsageError(
                f"another race runs in {self.path}; wait until it ends, or name another --output_path"
            ) from None
        except OSError as error:
            raise UsageError(f"expected --output_path to be a folder, got {self.path} ({error})") from error
        try:
            yield
        finally:
            lock.release()

    def keep(self, settings: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
        """Write the settings of a new race, or refuse to go on with one of other settings."""
        now = json.loads(json.dumps(settings))
        for key in now if kept else ():
            if kept.get(key) != now[key]:
                raise UsageError(
                    f"{self.path} is of a race with another {key} ({kept.get(key)}, now {now[key]}); name "
                    "another --output_path, or remove the folder"
                )
        if kept:
            return
        if self.lineup.manifest is not None:
            write_whole(self.path / MANIFEST, json.dumps(self.lineup.manifest, indent=1).encode())
        now |= {"date": self.date, "checkpoints": self.lineup.entries, "notes": self.lineup.notes}
        write_whole(self.path / SETTINGS, json.dumps(now, indent=1).encode())

    def result(self, contest: Contest, wall: float) -> Race:
        """The race so far."""
        entries = self.lineup.entries
        return race_of(
            contest,
            task=self.tasks,
            metric=self.evaluation.metric,
            of=len(entries),
            seed=self.evaluation.seed,
            ranks={entry.label: entry.rank for entry in entries if entry.rank is not None},
            seconds=self.seconds,
            wall=wall,
            failed=self.failed,
            waiting=[e.label for e in self.raced if e.label not in {**contest.answered, **self.failed}],
            not_loaded=[e.label for e in entries if not e.chosen],
            audit_sample=[entry.label for entry in entries if entry.chosen == "audit"],
            notes=self.lineup.notes,
        )


def kept_race(path: Path) -> dict[str, Any]:
    """The settings of the race in a folder; empty without one.

    Raises:
        UsageError: The folder holds something else.
    """
    try:
        content: dict[str, Any] = json.loads((path / SETTINGS).read_text("utf-8"))
        if content.keys() >= {"checkpoints", "notes", "date", "prompts"}:
            return content
        error: Exception = ValueError(f"another {SETTINGS}")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as wrong:
        error = wrong
    raise UsageError(f"expected a race in {path}, got {error}; name another --output_path") from error
