"""``dispersion race``: checkpoints asked in the screen's order, each until it is clearly behind."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmeval_dispersion.errors import DispersionError, UsageError
from lmeval_dispersion.harness.cli import failure_sentence
from lmeval_dispersion.output import progress_bar, write_whole
from lmeval_dispersion.racing.contest import ERROR, MARGIN, Contest
from lmeval_dispersion.racing.contest import run as run_checkpoint
from lmeval_dispersion.racing.lineup import Entry, Lineup, lineup, manifest_in
from lmeval_dispersion.racing.report import Race, race_of

if TYPE_CHECKING:
    from lmeval_screener import Result

    from lmeval_dispersion.racing.evaluation import Entrant, Evaluation

SETTINGS, MANIFEST = "race.json", "manifest.json"


@dataclass
class Plan:
    """A race and its folder: all that a process needs to run one of its checkpoints.

    Attributes:
        options: Arguments of the evaluation.
        backend: ``model``, ``model_args``, ``batch_size`` and ``device``.
        date: In the names of the files of results.
        failed: Label -> why it could not be loaded or asked.
        seconds: Label -> seconds to load and ask it.
    """

    tasks: str
    options: Mapping[str, Any]
    backend: Mapping[str, Any]
    folder: Path
    lineup: Lineup
    date: str
    failed: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def raced(self) -> list[Entry]:
        """The checkpoints that race, in order."""
        return [entry for entry in self.lineup.entries if entry.chosen]

    @cached_property
    def evaluation(self) -> Evaluation:
        """The questions: the tasks are loaded once."""
        from lmeval_dispersion.racing.evaluation import Evaluation

        try:
            return Evaluation(self.tasks, **self.options)
        except OSError as error:  # the task's data
            raise DispersionError(failure_sentence(error) or str(error)) from error

    def entrant(self, entry: Entry) -> Entrant:
        """The checkpoint, with what its folder has of it."""
        from lmeval_dispersion.racing.evaluation import Entrant

        labels = [e.label for e in self.lineup.entries]
        names = [re.sub(r"[^\w.@-]+", "_", label) for label in labels]
        name = (
            names[place]
            if names.count(names[place := labels.index(entry.label)]) < 2
            else f"{names[place]}-{place}"
        )
        return Entrant(
            self.evaluation, entry.label, self.folder / name, self.date, entry.arguments, **self.backend
        )

    def __getstate__(self) -> dict[str, Any]:
        """Without the tasks, which another process loads itself."""
        return {key: value for key, value in vars(self).items() if key != "evaluation"}

    def agree(self, settings: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
        """Refuse to go on with a race of other settings; keep those of a new one."""
        now = json.loads(json.dumps(settings, default=str))
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
            raise UsageError(
                f"expected --output_path to be a folder, got {self.folder}: {error.strerror}"
            ) from error
        if self.lineup.manifest is not None:
            write_whole(self.folder / MANIFEST, json.dumps(self.lineup.manifest, indent=1).encode())
        listed = {
            "checkpoints": [asdict(entry) for entry in self.lineup.entries],
            "notes": [*self.lineup.notes],
        }
        write_whole(self.folder / SETTINGS, json.dumps(now | {"date": self.date} | listed, indent=1).encode())

    def run(self, contest: Contest, *, hidden: bool = False) -> None:
        """Race, one checkpoint after the other."""
        from lmeval_dispersion.racing.evaluation import CheckpointError

        with progress_bar(hidden=hidden) as update:
            for entry in self.raced:
                entrant = self.entrant(entry)

                def ask(begin: int, end: int, entrant: Entrant = entrant) -> Any:
                    best = f", best {contest.best}" if contest.best else ""
                    update(contest.asked, contest.questions * len(self.raced), f"{entrant.label}{best}")
                    return entrant.ask(begin, end)

                try:
                    run_checkpoint(contest, entry.label, ask)
                except CheckpointError as error:
                    self.failed[entry.label] = str(error)
                finally:
                    self.seconds[entry.label] = entrant.seconds
                    entrant.close()

    def race(self, contest: Contest, wall: float) -> Race:
        """The result so far."""
        ranks = {entry.label: entry.rank for entry in self.lineup.entries if entry.rank is not None}
        return race_of(
            contest,
            task=self.tasks,
            metric=self.evaluation.metric,
            of=len(self.lineup.entries),
            seed=self.evaluation.seed,
            ranks=ranks,
            seconds=self.seconds,
            wall=wall,
            failed=self.failed,
            not_loaded=[
                e.label for e in self.lineup.entries if e.label not in {**contest.answered, **self.failed}
            ],
            audit_sample=[e.label for e in self.lineup.entries if e.chosen == "audit"],
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
    metric: str | None = None,
    by_probability: bool = False,
    seed: int = 0,
    output_path: str | Path | None = None,
    model: str = "hf",
    model_args: str = "",
    batch_size: int | str | None = None,
    device: str | None = None,
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
        family: As :func:`screen` takes it; ``base`` likewise, which is not raced.
        domain: Token set of the screen, needed where the answer tokens of no task are known.
        base: The checkpoint that the others were trained from.
        all: Whether all race; those that are named in the order given, without a screen.
        audit_sample: How many others of each group race as well, drawn at random.
        error: Chance, at most, over the whole race that the best of those raced is dropped for one that is
            worse by more than ``margin``.
        margin: Of the score, in [0, 1): checkpoints that differ by no more are not told apart.
        metric: ``METRIC`` or ``FILTER/METRIC``, in [0, 1] for each question. Default: each task's first.
        by_probability: Whether a checkpoint is dropped as well where its probability of the right answer is
            clearly lower, and its score is lower so far.
        seed: Of the questions' order.
        output_path: Folder that keeps the answers. Default: ``race-TASKS``.
        model: lm-eval's backend; ``model_args``, ``batch_size`` and ``device`` are its own too.
        model_args: More arguments of the backend, ``key=value,key=value``.
        batch_size: A number or ``auto``.
        device: Such as ``cuda:1``.
        quiet: Whether to show no progress.
        options: ``limit`` (the most questions that a checkpoint is asked), ``num_fewshot``, ``include_path``,
            ``apply_chat_template`` and ``confirm_run_unsafe_code``, as lm-eval has them.

    Raises:
        UsageError: An argument cannot be used as given, or the folder is of another race.
        DispersionError: No checkpoint could be asked, or a block could not be written.
        KeyboardInterrupt: Ctrl-C; its ``race`` is the result so far.
    """
    start = time.perf_counter()
    for name, value, right in (
        ("error", error, 0 < error < 1),
        ("margin", margin, 0 <= margin < 1),
        ("limit", options.get("limit"), (options.get("limit") or 1) >= 1),
    ):
        if not right:
            raise UsageError(
                f"expected --{name} {'of at least 1' if name == 'limit' else 'from 0 to 1'}, got {value}"
            )
    named: Any = [checkpoints] if isinstance(checkpoints, str) else checkpoints
    named = named if hasattr(named, "groups") else list(named)
    tasks = tasks or ",".join((manifest_in(named) or {}).get("tasks", ()))
    if not tasks:
        raise UsageError("expected --tasks NAME,NAME, which lm-eval has and checkpoints race on, got none")
    folder = Path(output_path or f"race-{re.sub(r'[^A-Za-z0-9_.-]+', '-', tasks)}").expanduser()
    which: dict[str, Any] = {
        "family": family,
        "domain": domain,
        "base": base,
        "all": all,
        "audit_sample": audit_sample,
    }
    kept = _kept(folder)
    plan = Plan(
        tasks,
        {**options, "seed": seed, "metric": metric},
        {"model": model, "model_args": model_args, "batch_size": batch_size, "device": device},
        folder,
        Lineup([Entry(**entry) for entry in kept["checkpoints"]], kept["notes"])
        if kept
        else lineup(named, tasks, **which),
        kept["date"] if kept else datetime.now().strftime("%Y-%m-%dT%H-%M-%S"),
    )
    count = len(plan.evaluation.questions)
    plan.agree(
        {
            "named": [c.label for c in named.checkpoints] if hasattr(named, "groups") else named,
            **{**which, "tasks": tasks, "questions": count, "seed": seed, "metric": metric, "error": error},
            **{"margin": margin, "by_probability": by_probability, "model": model, "model_args": model_args},
            **{"lm_eval": version("lm_eval"), "prompts": plan.evaluation.identity()},
        },
        kept,
    )
    contest = Contest(count, error, margin, by_probability)
    try:
        plan.run(contest, hidden=quiet)
    except KeyboardInterrupt as interrupt:
        interrupt.race = plan.race(contest, time.perf_counter() - start)  # type: ignore[attr-defined]
        raise
    if plan.failed and not contest.answered:
        label, said = next(iter(plan.failed.items()))
        raise DispersionError(f"none of the {len(plan.failed)} checkpoints could be raced; {label}: {said}")
    return plan.race(contest, time.perf_counter() - start)


def _kept(folder: Path) -> dict[str, Any]:
    """The settings of the race in a folder; empty without one."""
    try:
        content: dict[str, Any] = json.loads((folder / SETTINGS).read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"expected a race in {folder}, got {error}; name another --output_path") from error
    return content
