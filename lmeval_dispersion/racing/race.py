"""A race of checkpoints on lm-eval's tasks, from what is named to the answer: open, line up, ask, judge."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from lmeval_dispersion.arguments import takes
from lmeval_dispersion.asking import How, Racing
from lmeval_dispersion.errors import DispersionError, UsageError, require_extra
from lmeval_dispersion.racing.contest import Contest
from lmeval_dispersion.racing.folder import Limits, RaceFolder, begun_in_run
from lmeval_dispersion.racing.lineup import Lineup, Named, lineup
from lmeval_dispersion.racing.report import Race
from lmeval_dispersion.racing.rule import SHARED
from lmeval_dispersion.report.cells import shown


@takes(Racing)
def race(racing: Racing) -> Race:
    """Find the best of many checkpoints, most of which are asked a part of lm-eval's questions.

    The checkpoints are screened, and as many of each group as hold the best with a chance of 90 % are raced
    in the screen's order (`Group.first_for`; all where no chance is known). Each is loaded once and asked the
    same questions, in a random order of its own; one that is clearly not better than the best so far is
    dropped. Where rows give no order all answer one block of questions first, and race in the order of their
    mean probability of the right answer. Every block of answers is kept: the same call goes on.

    Raises:
        UsageError: An argument cannot be used as given, or the folder is of another race.
        DispersionError: No checkpoint could be asked, or a block could not be written.
        MissingExtraError: torch or lm-eval is not installed.
    """
    ended = raced(racing)
    if ended.stopped is not None:
        raise ended.stopped
    return ended.result


class Ended(NamedTuple):
    """A race's result, and what stopped it before its end: Ctrl-C, or a disk that is full."""

    result: Race
    stopped: BaseException | None = None


def raced(racing: Racing) -> Ended:
    """Race, and keep the result of a race that was stopped; raises as :func:`race`."""
    start = time.perf_counter()
    check_settings(racing)
    if racing.demo:
        from lmeval_dispersion.racing import replay

        shown = replay.demo(racing.seed, error=racing.error, margin=racing.margin, top=racing.top)
        return Ended(shown)
    _check_engine(racing)
    named = Named.of(racing.checkpoints)
    if not named.words and not racing.family:
        raise UsageError(
            "expected checkpoints to race, got none: name a folder of them, ORG/NAME or a family"
        )
    racing = replace(racing, tasks=racing.tasks or ",".join(named.tasks))
    if racing.output_path is None:
        racing = replace(racing, output_path=begun_in_run(named.words, racing.tasks or ""))
    folder = _opened(racing)
    line = _lined_up(folder, named, racing)
    if racing.dry_run:
        return Ended(_planned(folder, line, racing, start))
    with folder.alone():
        contest = _contest(folder, line, racing)
        stopped = _asked(folder, contest, racing)
    if folder.failed and not contest.answered:
        label, reason = next(iter(folder.failed.items()))
        raise DispersionError(
            f"none of the {len(folder.failed)} checkpoints could be raced; {label}: {reason}"
        )
    return Ended(folder.result(contest, time.perf_counter() - start), stopped)


# --- open -------------------------------------------------------------------------------------------------


def check_settings(racing: Racing) -> None:
    """Raise UsageError for the first number that is out of its range."""
    limit = racing.limit
    for name, value, fits, wanted in (
        ("error", racing.error, 0 < racing.error < 1, "above 0 and below 1"),
        ("margin", racing.margin, 0 <= racing.margin < 1, "from 0 to below 1"),
        ("seed", racing.seed, racing.seed >= 0, "at least 0"),
        ("limit", limit, limit is None or limit >= 1, "at least 1"),
        ("top", racing.top, racing.top >= 1, "at least 1"),
    ):
        if not fits:
            raise UsageError(f"expected {wanted}, got {value}", argument=name)


def _check_engine(how: How) -> None:
    """Raise UsageError for an engine that is not known, or what it cannot do; MissingExtraError."""
    if how.engine not in (None, "ray"):
        raise UsageError(f"expected ray or none, got {how.engine}", argument="engine")
    if how.engine is None:
        if how.gpus_per_checkpoint is not None:
            raise UsageError(
                f"expected `--engine ray` with {how.gpus_per_checkpoint:g} GPUs for each checkpoint, got "
                "none; add it, or leave out the GPUs",
                argument="gpus_per_checkpoint",
            )
        return
    if how.top > 1:
        raise UsageError("needs a race one by one; leave out the engine", argument="top")
    require_extra("ray", "the engine ray")


def _opened(racing: Racing) -> RaceFolder:
    """The race's folder; UsageError where its race has turns in another order."""
    require_extra("models", "a race")
    folder = RaceFolder.opened(racing)
    began_by = folder.lineup.by
    if folder.kept.get("turns") and racing.by not in (None, began_by):
        raise UsageError(
            f"expected {began_by}, by which the race in {folder.path} began, got {racing.by}; leave it out",
            argument="by",
        )
    return folder


# --- line up ----------------------------------------------------------------------------------------------


class _Line(NamedTuple):
    """Who races: the list, its names by this command, and the choice that gave it, as the folder keeps it."""

    lineup: Lineup
    names: list[str]
    which: dict[str, Any]
    is_new: bool  # the folder does not have it yet


def _lined_up(folder: RaceFolder, named: Named, racing: Racing) -> _Line:
    """The folder's list; with the checkpoints that this command adds, which are screened."""
    known = folder.lineup
    unlisted = list[str]()
    arguments: dict[str, dict[str, str]] = {}
    try:
        taken = racing.all and folder.api and not racing.family
        arguments = named.arguments(racing.family, taken=taken)
    except DispersionError:  # no checkpoint joins while the names cannot be listed
        if not folder.kept:
            raise
        unlisted = [] if racing.family else [*named.words]
    folder.name([*arguments.values()], unlisted)
    which = {
        "family": racing.family,
        "domain": racing.domain,
        "base": racing.base,
        "all": racing.all,
        "audit_sample": racing.audit_sample,
    }
    names = [*arguments]
    is_known = which == folder.kept.get("which")
    if is_known and not folder.lacks([*arguments.values()]):
        return _Line(known, names, which, is_new=False)
    found = lineup(
        named, racing.tasks or "", racing, api=folder.api, count=partial(_counted, folder)
    )
    folder.name([entry.arguments for entry in found.entries])
    before = None
    if folder.kept:
        found = known.joined(found)
        before = known.by
    found = found.ordered(racing.by or before, shared=not racing.engine)
    return _Line(found, names, which, is_new=True)


def _counted(folder: RaceFolder) -> tuple[Counter[str], int]:
    """Counts of the answers in the tasks' documents, and the number of documents."""
    from lmeval_dispersion.harness.answers import counted_answers

    return counted_answers([*folder.evaluation.tasks.values()])


def _planned(folder: RaceFolder, line: _Line, racing: Racing, start: float) -> Race:
    """A dry run's result: what would be loaded and asked."""
    folder.lineup = line.lineup
    count = len(folder.evaluation.questions)
    few, many = folder.expected(count)
    raced = f"{sum(entry.chosen != 'base' for entry in folder.raced)}"
    if line.lineup.bytes:
        raced += f" (about {shown(line.lineup.bytes, 'bytes')})"
    plan = (
        f"Nothing was loaded (dry run): {raced} would be, and asked {few:,} to {many:,} questions."
    )
    contest = Contest(count, racing.error, racing.margin, racing.seed)
    return folder.result(contest, time.perf_counter() - start, plan)


# --- ask and judge ----------------------------------------------------------------------------------------


def _contest(folder: RaceFolder, line: _Line, racing: Racing) -> Contest:
    """The contest that judges the answers, after the list is written to the folder."""
    kept = dict(folder.kept)
    if line.is_new:
        folder.keep(
            line.lineup,
            which=line.which,
            seen=sorted({*kept.get("seen", ()), *line.names} - {*line.lineup.failed}),
            times=kept.get("times", 0) + 1,
            error=kept.get("error", racing.error),
            margin=kept.get("margin", racing.margin),
        )
    count = len(folder.evaluation.questions)
    side_by_side = len(folder.raced) if racing.engine else 0
    contest = Contest(count, racing.error, racing.margin, racing.seed, side_by_side)
    contest.against = dict(kept.get("turns", {}))
    contest.top = racing.top
    if folder.lineup.by == "block" and not racing.engine:
        contest.sharing = min(SHARED, count)
        contest.reference = folder.lineup.reference
    return contest


def _asked(folder: RaceFolder, contest: Contest, racing: Racing) -> BaseException | None:
    """Ask until the contest is decided, or something stops it, which is returned.

    Raises:
        DispersionError: The race is at fault, or nothing was answered.
    """
    folder.allowance = Limits(None, racing.hours)
    try:
        if racing.engine:
            from lmeval_dispersion.racing.tune import race_on_ray

            race_on_ray(folder, contest, gpus=racing.gpus_per_checkpoint, hidden=racing.quiet)
        else:
            folder.run(contest, quiet=racing.quiet)
    except KeyboardInterrupt as interrupt:
        return interrupt
    except UsageError:
        raise
    except DispersionError as error:
        if not contest.answered:
            raise
        return error
    return None
