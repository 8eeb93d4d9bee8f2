"""A race of checkpoints on lm-eval's tasks, and the folder that keeps it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmeval_dispersion.errors import DispersionError, UsageError, require_extra
from lmeval_dispersion.harness.cli import failure_sentence
from lmeval_dispersion.output import progress_bar, write_whole
from lmeval_dispersion.racing.contest import ERROR, MARGIN, Contest, Scores
from lmeval_dispersion.racing.contest import run as run_checkpoint
from lmeval_dispersion.racing.lineup import Entry, Lineup, lineup, manifest_in
from lmeval_dispersion.racing.report import Race, race_of
from lmeval_dispersion.store.identity import SUFFIX

if TYPE_CHECKING:
    from lmeval_screener import Result

    from lmeval_dispersion.racing.evaluation import Entrant, Evaluation

SETTINGS, MANIFEST = "race.json", "manifest.json"
_BACKEND = {"model": "hf", "model_args": "", "batch_size": None, "device": None}


@dataclass
class Plan:
    """A race and its folder: all that a process needs to run one of its checkpoints."""

    tasks: str
    options: Mapping[str, Any]  # arguments of the evaluation
    backend: Mapping[str, Any]  # model, model_args, batch_size and device
    folder: Path
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

        try:
            return Evaluation(self.tasks, **self.options)
        except OSError as error:  # the task's data
            raise DispersionError(failure_sentence(error) or str(error)) from error

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "evaluation"}

    def entrant(self, entry: Entry) -> Entrant:
        """A checkpoint with what the folder has of it."""
        from lmeval_dispersion.racing.evaluation import Entrant

        names = [re.sub(r"[^\w.@-]+", "_", e.label) for e in self.lineup.entries]
        place = [e.label for e in self.lineup.entries].index(entry.label)
        name = names[place] + (f"-{place}" if names.count(names[place]) > 1 else "")
        place_of = self.folder / name
        return Entrant(self.evaluation, entry.label, place_of, self.date, entry.arguments, **self.backend)

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

    def keep(self, settings: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
        """Write the settings of a new race, or refuse to go on with one of other settings."""
        now = json.loads(json.dumps(settings))
        for key in now if kept else ():
            if kept.get(key) != now[key]:
                raise UsageError(
                    f"{self.folder} is of a race with another {key} ({kept.get(key)}, now {now[key]}); name "
                    "another --output_path, or remove the folder"
                )
        if kept:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"expected --output_path to be a folder, got {self.folder} ({error})") from error
        if self.lineup.manifest is not None:
            write_whole(self.folder / MANIFEST, json.dumps(self.lineup.manifest, indent=1).encode())
        now |= {"date": self.date, "checkpoints": self.lineup.entries, "notes": self.lineup.notes}
        write_whole(self.folder / SETTINGS, json.dumps(now, indent=1).encode())

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
            not_loaded=[e.label for e in entries if e.label not in {**contest.answered, **self.failed}],
            audit_sample=[entry.label for entry in entries if entry.chosen == "audit"],
            notes=self.lineup.notes,
        )


def race(
    checkpoints: str | Iterable[str] | Result = (),
    *,
    tasks: str | None = None,
    family: str | None = None,
    domain: str | None = None,
    base: str | None = None,
    all: bool = False,
    audit_sample: int = 0,
    error: float = ERROR,
    margin: float = MARGIN,
    by_probability: bool = False,
    output_path: str | Path | None = None,
    engine: str | None = None,
    gpus_per_checkpoint: float | None = None,
    quiet: bool = False,
    **options: Any,
) -> Race:
    """The best of many checkpoints, by questions of lm-eval's tasks that most of them are not asked.

    The checkpoints are screened, and a third of each group is raced in the screen's order (at least 3, with
    those tied at the cut, at most half). Each is loaded once and asked the same questions in the same random
    order; what is clearly behind is asked no more. Every block of answers is kept: the same call goes on.

    Args:
        checkpoints: As :func:`screen` takes them, its result, or the folder of a short list (``--emit``).
        tasks: lm-eval's ``NAME,NAME``, tasks and groups; the score is the mean over all questions. Default:
            those of the short list.
        family: As :func:`screen` takes it; so is ``base``, which is not raced.
        domain: Token set of the screen, needed where the answer tokens of no task are known.
        base: The checkpoint that the others were trained from.
        all: Whether all race; those that are named in the order given, without a screen.
        audit_sample: How many others of each group race as well, drawn at random.
        error: Chance, at most, over the whole race that the best of those raced is dropped for one that is
            worse by more than ``margin``.
        margin: Of the score, in [0, 1): checkpoints that differ by no more are not told apart.
        by_probability: Whether a checkpoint is dropped as well where its probability of the right answer is
            clearly lower, and its score is lower so far.
        output_path: Folder that keeps the answers. Default: ``race-TASKS``.
        engine: ``ray`` for checkpoints side by side, on the cluster of ``RAY_ADDRESS`` or of this machine.
        gpus_per_checkpoint: Of the cluster's; by default 1 where it has GPUs.
        quiet: Whether to show no progress.
        options: ``seed`` of the questions' order, ``limit`` (the most questions of a checkpoint), ``metric``
            (``METRIC`` or ``FILTER/METRIC``), and lm-eval's ``model``, ``model_args``, ``batch_size``,
            ``device``, ``num_fewshot``, ``include_path``, ``apply_chat_template``,
            ``confirm_run_unsafe_code``.

    Raises:
        UsageError: An argument cannot be used as given, or the folder is of another race.
        DispersionError: No checkpoint could be asked, or a block could not be written.
        KeyboardInterrupt: Ctrl-C; its ``race`` is the result so far.
    """
    start = time.perf_counter()
    if not 0 < error < 1 or not 0 <= margin < 1 or (options.get("limit") or 1) < 1:
        raise UsageError(
            f"expected --error and --margin from 0 to 1 and --limit of at least 1, got {error}, {margin} and "
            f"{options.get('limit')}"
        )
    if engine not in (None, "ray") or (gpus_per_checkpoint is not None and not engine):
        raise UsageError(f"expected --engine ray, which --gpus-per-checkpoint needs, got {engine or 'none'}")
    if engine:
        require_extra("ray", "--engine ray")
    named: Any = [checkpoints] if isinstance(checkpoints, str) else checkpoints
    labels = [c.label for c in named.checkpoints] if hasattr(named, "groups") else list(named)
    named = named if hasattr(named, "groups") else labels
    tasks = tasks or ",".join(manifest_in(named).get("tasks", ()))
    tasks = ",".join(name.strip().removesuffix(SUFFIX) for name in tasks.split(","))
    if not tasks:
        raise UsageError("expected --tasks NAME,NAME, which lm-eval has and checkpoints race on, got none")
    folder = Path(output_path or f"race-{re.sub(r'[^A-Za-z0-9_.-]+', '-', tasks)}").expanduser()
    which: dict[str, Any] = {"family": family, "domain": domain, "base": base, "all": all}
    which["audit_sample"] = audit_sample
    backend = {key: options.pop(key, default) for key, default in _BACKEND.items()}
    options = {"seed": 0, "metric": None, **options}
    kept = _kept(folder)
    known = Lineup([Entry(*entry) for entry in kept["checkpoints"]], kept["notes"]) if kept else None
    date = kept.get("date") or datetime.now().strftime("%Y-%m-%dT%H-%M-%S")
    plan = Plan(tasks, options, backend, folder, known or lineup(named, tasks, **which), date)
    count = len(plan.evaluation.questions)
    settings = {
        "named": labels,
        **which,
        "tasks": tasks,
        "questions": count,
        "error": error,
        "margin": margin,
    }
    settings |= {"by_probability": by_probability, "lm_eval": version("lm_eval")}
    settings |= {key: (options | backend)[key] for key in ("seed", "metric", "model", "model_args")}
    plan.keep(settings | {"prompts": plan.evaluation.identity()}, kept)
    contest = Contest(count, error, margin, by_probability, len(plan.raced) if engine else 0)
    try:
        if engine:
            from lmeval_dispersion.racing.tune import race_on_ray

            race_on_ray(plan, contest, gpus=gpus_per_checkpoint, hidden=quiet)
        else:
            plan.run(contest, quiet=quiet)
    except KeyboardInterrupt as interrupt:
        interrupt.race = plan.result(contest, time.perf_counter() - start)  # type: ignore[attr-defined]
        raise
    if plan.failed and not contest.answered:
        label, said = next(iter(plan.failed.items()))
        raise DispersionError(f"none of the {len(plan.failed)} checkpoints could be raced; {label}: {said}")
    return plan.result(contest, time.perf_counter() - start)


def _kept(folder: Path) -> dict[str, Any]:
    """The settings of the race in a folder; empty without one."""
    try:
        content: dict[str, Any] = json.loads((folder / SETTINGS).read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"expected a race in {folder}, got {error}; name another --output_path") from error
    return content
