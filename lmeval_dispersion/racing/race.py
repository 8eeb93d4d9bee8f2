"""A race of checkpoints on lm-eval's tasks, and the folder that keeps it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmeval_dispersion.errors import DispersionError, UsageError, require_extra
from lmeval_dispersion.racing.contest import ERROR, MARGIN, Contest
from lmeval_dispersion.racing.folder import RaceFolder, kept_race
from lmeval_dispersion.racing.lineup import Entry, Lineup, lineup, manifest_in
from lmeval_dispersion.racing.report import Race

if TYPE_CHECKING:
    from lmeval_screener import Result


_BACKEND = {"model": "hf", "model_args": "", "batch_size": None, "device": None}


def race(
    checkpoints: str | Path | Iterable[str | Path] | Result = (),
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
    limit = options.get("limit")
    if not 0 < error < 1 or not 0 <= margin < 1 or (limit is not None and limit < 1):
        got = f"{error}, {margin} and {limit}"
        raise UsageError(f"expected --error and --margin from 0 to 1, --limit of at least 1, got {got}")
    if options.get("seed", 0) < 0:
        raise UsageError(f"expected --seed of at least 0, got {options['seed']}")
    if engine not in (None, "ray") or (gpus_per_checkpoint is not None and not engine):
        raise UsageError(f"expected --engine ray, which --gpus-per-checkpoint needs, got {engine or 'none'}")
    if engine:
        require_extra("ray", "--engine ray")
    named: Any = [checkpoints] if isinstance(checkpoints, str | os.PathLike) else checkpoints
    labels = [c.label for c in named.checkpoints] if hasattr(named, "groups") else [*map(os.fspath, named)]
    named = named if hasattr(named, "groups") else labels
    if not labels and not family:
        raise UsageError(
            "expected checkpoints to race, got none: name a folder of them, ORG/NAME or --family"
        )
    tasks = tasks or ",".join(manifest_in(named).get("tasks", ()))
    tasks = ",".join(name.strip() for name in tasks.split(","))
    if not tasks:
        raise UsageError("expected --tasks NAME,NAME, which lm-eval has and checkpoints race on, got none")
    path = Path(output_path or f"race-{re.sub(r'[^A-Za-z0-9_.-]+', '-', tasks)}").expanduser()
    which: dict[str, Any] = {"family": family, "domain": domain, "base": base, "all": all}
    which["audit_sample"] = audit_sample
    backend = {key: options.pop(key, default) for key, default in _BACKEND.items()}
    given = [pair.partition("=")[0].strip() for pair in backend["model_args"].split(",")]
    if own := [key for key in given if key in ("pretrained", "model", "revision")]:
        raise UsageError(
            f"expected --model_args that all checkpoints share, got {own[0]}, which is each one's own; name "
            "the checkpoints before the options"
        )
    options = {"seed": 0, "metric": None, **options}
    from lmeval_dispersion.harness.recording import check_model  # imports torch
    from lmeval_dispersion.harness.seams import TemplateAPI
    from lmeval_dispersion.harness.seams import backend as backend_of

    kind = backend_of(backend["model"])
    kept = kept_race(path)
    known = Lineup([Entry(*entry) for entry in kept["checkpoints"]], kept["notes"]) if kept else None
    date = kept.get("date") or datetime.now().strftime("%Y-%m-%dT%H-%M-%S")
    folder = RaceFolder(
        tasks,
        options,
        backend,
        path,
        known or lineup(named, tasks, **which, api=issubclass(kind, TemplateAPI)),
        date,
    )
    count = len(folder.evaluation.questions)
    if recorded := folder.evaluation.recorded:
        check_model(kind, ",".join(recorded))
    settings = {"named": labels, **which, "tasks": tasks, "questions": count, "lm_eval": version("lm_eval")}
    settings |= {"error": error, "margin": margin, "by_probability": by_probability}
    settings |= {key: (options | backend)[key] for key in ("seed", "metric", "model", "model_args")}
    with folder.alone():
        folder.keep(settings | {"prompts": folder.evaluation.identity()}, kept)
        contest = Contest(count, error, margin, by_probability, len(folder.raced) if engine else 0)
        try:
            if engine:
                from lmeval_dispersion.racing.tune import race_on_ray

                race_on_ray(folder, contest, gpus=gpus_per_checkpoint, hidden=quiet)
            else:
                folder.run(contest, quiet=quiet)
        except KeyboardInterrupt as interrupt:
            interrupt.race = folder.result(contest, time.perf_counter() - start)  # type: ignore[attr-defined]
            raise
    if folder.failed and not contest.answered:
        label, said = next(iter(folder.failed.items()))
        raise DispersionError(f"none of the {len(folder.failed)} checkpoints could be raced; {label}: {said}")
    return folder.result(contest, time.perf_counter() - start)
