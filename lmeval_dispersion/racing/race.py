"""A race of checkpoints on lm-eval's tasks, and the folder that keeps it."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lmeval_screener.shortlist.manifest import shortlist_manifest
from lmeval_screener.tokens.answers import tasks_in

from lmeval_dispersion.errors import DispersionError, UsageError, require_extra
from lmeval_dispersion.racing.contest import ERROR, MARGIN, Contest
from lmeval_dispersion.racing.folder import Limits, RaceFolder
from lmeval_dispersion.racing.lineup import lineup, manifest_in, named_arguments
from lmeval_dispersion.racing.report import Race
from lmeval_dispersion.racing.rule import SHARED
from lmeval_dispersion.report.cells import shown

if TYPE_CHECKING:
    from lmeval_screener import Result


def check_settings(
    error: float, margin: float, seed: int, limit: int | None = None, top: int = 1
) -> None:
    """Raise UsageError for the first number that is out of its range."""
    for name, value, fits, wanted in (
        ("error", error, 0 < error < 1, "above 0 and below 1"),
        ("margin", margin, 0 <= margin < 1, "from 0 to below 1"),
        ("seed", seed, seed >= 0, "at least 0"),
        ("limit", limit, limit is None or limit >= 1, "at least 1"),
        ("top", top, top >= 1, "at least 1"),
    ):
        if not fits:
            raise UsageError(f"expected {wanted}, got {value}", argument=name)


def race(
    checkpoints: str | Path | Iterable[str | Path] | Result = (),
    *,
    tasks: str | None = None,
    family: str | None = None,
    domain: str | None = None,
    base: str | None = None,
    all: bool = False,
    by: Literal["rows", "block"] | None = None,
    audit_sample: int = 0,
    error: float = ERROR,
    margin: float = MARGIN,
    top: int = 1,
    budget: int | None = None,
    hours: float | None = None,
    output_path: str | Path | None = None,
    dry_run: bool = False,
    engine: str | None = None,
    gpus_per_checkpoint: float | None = None,
    quiet: bool = False,
    seed: int = 0,
    limit: int | None = None,
    metric: str | None = None,
    model: str = "hf",
    model_args: str = "",
    batch_size: int | str | None = None,
    device: str | None = None,
    num_fewshot: int | None = None,
    include_path: str | None = None,
    apply_chat_template: bool | str = False,
    confirm_run_unsafe_code: bool = False,
    demo: bool = False,
) -> Race:
    """Find the best of many checkpoints, most of which are asked a part of lm-eval's questions.

    The checkpoints are screened, and as many of each group as hold the best with a chance of 90 % are raced
    in the screen's order (`Group.first_for`; all where no chance is known). Each is loaded once and asked the
    same questions, in a random order of its own; one that is clearly not better than the best so far is
    dropped. Where rows give no order all answer one block of questions first, and race in the order of their
    mean probability of the right answer. Every block of answers is kept: the same call goes on.

    Args:
        checkpoints: As :func:`screen` takes them, its result, or the folder of a short list (``--emit``).
        tasks: lm-eval's ``NAME,NAME``, tasks and groups, or a file of answers, which names its tasks; the
            score is the mean over all questions. Default: those of the short list.
        family: As :func:`screen` takes it; so is ``base``, which is not raced.
        domain: Token set of the screen. Default: the answer tokens of the first task that has known ones,
            else those of the tasks' own documents.
        base: The checkpoint that the others were trained from.
        all: Whether all named checkpoints race, without a screen.
        by: Order of those that race: ``rows`` (the screen's order; with ``all`` the order given) or a
            first ``block`` of questions that all answer. Default: rows where they differ.
        audit_sample: Number of others in each group that race as well, drawn at random.
        error: Chance, at most, over the whole race that the best of those raced is dropped for one that is
            worse by more than ``margin``.
        margin: Smallest difference in score that counts, in [0, 1).
        top: Number of best checkpoints wanted; none is dropped before so many were asked everything.
        budget: The most questions to ask now, of all checkpoints together; then the best so far is named.
        hours: The longest time to go on, likewise.
        output_path: Folder that keeps the answers. Default: ``race-TASKS``.
        dry_run: Whether to screen alone, and say what would be loaded and asked.
        engine: ``ray`` for checkpoints side by side, on the cluster of ``RAY_ADDRESS`` or of this machine.
        gpus_per_checkpoint: GPUs of the cluster for each checkpoint; by default 1 where it has GPUs.
        quiet: Whether to show no progress.
        seed: Seed of the questions' orders.
        limit: The most questions of a checkpoint.
        metric: ``METRIC`` or ``FILTER/METRIC``. Default: ``acc``, ``exact_match`` and their like.
        model: lm-eval's backend; so are all below lm-eval's.
        model_args: More arguments of the backend, ``K=V,K=V``.
        batch_size: Number or ``auto``.
        device: Such as ``cuda:0``.
        num_fewshot: Examples before a question.
        include_path: Folder with more tasks.
        apply_chat_template: Whether to use the model's chat template, or the name of one.
        confirm_run_unsafe_code: Whether tasks may run the code that models write.
        demo: Whether to race the bundled models by recorded answers instead; no model is loaded.

    Raises:
        UsageError: An argument cannot be used as given, or the folder is of another race.
        DispersionError: No checkpoint could be asked, or a block could not be written.
        MissingExtraError: torch or lm-eval is not installed.
        KeyboardInterrupt: Ctrl-C; its ``race`` is the result so far.
    """
    start = time.perf_counter()
    check_settings(error, margin, seed, limit, top)
    if demo:
        from lmeval_dispersion.racing import replay

        return replay.demo(seed, error=error, margin=margin, top=top)
    if engine and top > 1:
        raise UsageError("needs a race one by one; leave out the engine", argument="top")
    if engine not in (None, "ray") or (gpus_per_checkpoint is not None and not engine):
        raise UsageError(
            f"expected ray, which GPUs a checkpoint need, got {engine or 'none'}", argument="engine"
        )
    if engine:
        require_extra("ray", "the engine ray")
    named: Any = [checkpoints] if isinstance(checkpoints, str | os.PathLike) else checkpoints
    labels = (
        [c.label for c in named.checkpoints]
        if hasattr(named, "groups")
        else [*map(os.fspath, named)]
    )
    named = named if hasattr(named, "groups") else labels
    if not labels and not family:
        raise UsageError(
            "expected checkpoints to race, got none: name a folder of them, ORG/NAME or a family"
        )
    given = tasks or ",".join(_tasks_of(named))
    tasks = ",".join(tasks_in(given))
    if not tasks:
        raise UsageError(
            "expected NAME,NAME, got none; `dispersion run ls tasks` lists the tasks",
            argument="tasks",
        )
    require_extra("models", "a race")
    folder = RaceFolder.opened(
        tasks, output_path, seed=seed, limit=limit, metric=metric, model=model, model_args=model_args,
        batch_size=batch_size, device=device, num_fewshot=num_fewshot, include_path=include_path,
        apply_chat_template=apply_chat_template, confirm_run_unsafe_code=confirm_run_unsafe_code,
    )  # fmt: skip
    known, kept, count = folder.lineup, dict(folder.kept), len(folder.evaluation.questions)
    if kept.get("turns") and by not in (None, known.by):
        raise UsageError(
            f"expected {known.by}, by which the race in {folder.path} began, got {by}; leave it out",
            argument="by",
        )
    which: dict[str, Any] = {"family": family, "domain": domain, "base": base, "all": all}
    which["audit_sample"] = audit_sample
    chosen = known
    named_now: dict[str, dict[str, str]] = {}
    unlisted = list[str]()
    try:
        named_now = named_arguments(named, family, taken=all and folder.api and not family)
    except DispersionError:  # no checkpoint joins while the names cannot be listed
        if not kept:
            raise
        unlisted = [] if family else labels
    folder.name([*named_now.values()], unlisted)
    names = [*named_now]
    is_new = which != kept.get("which") or not {*names} <= {*kept.get("seen", ())}
    if is_new or folder.lacks([*named_now.values()]):
        found = lineup(
            named, given, **which, by=by, api=folder.api, count=partial(_counted, folder)
        )
        folder.name([entry.arguments for entry in found.entries])
        found, before = (known.joined(found), known.by) if kept else (found, None)
        chosen = found.ordered(by or before, shared=not engine)
    if dry_run:
        folder.lineup = chosen
        few, many = folder.expected(count)
        raced = f"{sum(entry.chosen != 'base' for entry in folder.raced)}"
        raced += f" (about {shown(chosen.bytes, 'bytes')})" if chosen.bytes else ""
        plan = f"Nothing was loaded (dry run): {raced} would be, and asked {few:,} to {many:,} questions."
        return folder.result(Contest(count, error, margin, seed), time.perf_counter() - start, plan)
    with folder.alone():
        if chosen is not known:
            seen = sorted({*kept.get("seen", ()), *names} - {*chosen.failed})
            times = kept.get("times", 0) + 1
            first = {"error": kept.get("error", error), "margin": kept.get("margin", margin)}
            folder.keep(chosen, which=which, seen=seen, times=times, **first)
        contest = Contest(
            count, error, margin, folder.evaluation.seed, len(folder.raced) if engine else 0
        )
        contest.against, contest.top = dict(kept.get("turns", {})), top
        folder.allowance = Limits(budget, hours)
        if folder.lineup.by == "block" and not engine:
            contest.sharing, contest.reference = min(SHARED, count), folder.lineup.reference
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
        raise DispersionError(
            f"none of the {len(folder.failed)} checkpoints could be raced; {label}: {said}"
        )
    return folder.result(contest, time.perf_counter() - start)


def _tasks_of(named: Any) -> Sequence[str]:
    """The tasks in the manifest of a list's folder; none without one."""
    content = manifest_in(named)
    return shortlist_manifest(content, str(named[0])).tasks if content else ()


def _counted(folder: RaceFolder) -> tuple[Counter[str], int]:
    """Counts of the answers in the tasks' documents, and the number of documents."""
    from lmeval_dispersion.harness.answers import counted_answers

    return counted_answers([*folder.evaluation.tasks.values()])
