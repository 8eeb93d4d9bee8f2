"""A race of checkpoints on lm-eval's tasks: open, line up, ask, judge, answer."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from lmeval_dispersion.arguments import takes
from lmeval_dispersion.errors import DispersionError, UsageError, require_extra
from lmeval_dispersion.racing.arguments import How, Racing
from lmeval_dispersion.racing.contest import Contest, Phase
from lmeval_dispersion.racing.folder import Limits, RaceFolder, begun_in_run, contest_of
from lmeval_dispersion.racing.lineup import Lineup, Named, Plan, choice_of, lineup, questions_of
from lmeval_dispersion.racing.report import Race
from lmeval_dispersion.report.cells import shown


@takes(Racing)
def race(racing: Racing) -> Race:
    """Find the best of many checkpoints while asking most of them only a few of the questions.

    The checkpoints are screened first. In each group (a family at one size), the first ranks race:
    as many as hold the best checkpoint with a chance of 90 % (`Group.first_for`), or all if no
    chance is known. Each checkpoint is loaded once, in the order of the ranks, and is asked
    lm-eval's questions in a random order of its own. It is dropped when it is clearly not better
    than the best so far. Where the screen cannot rank checkpoints, all are first asked 25 shared
    questions, and then race in the order of their mean probability of the right answer. A budget
    is spent on shared questions, in phases after which the worst checkpoints are dropped. Every
    batch of answers is kept: the same call goes on where it stopped, and without the budget it
    goes on until the best is proven.

    Raises:
        UsageError: An argument cannot be used as given, or the folder holds another race.
        DispersionError: No checkpoint can be asked, or an answer cannot be written.
        MissingExtraError: torch or lm-eval is not installed.
    """
    ended = ended_race(racing)
    if ended.stopped is not None:
        raise ended.stopped
    return ended.result


class Ended(NamedTuple):
    """The result of a race, and what stopped the race before its end.

    Attributes:
        result: The race so far.
        stopped: ``KeyboardInterrupt``, or an error such as that of a full disk; None if nothing
            stopped it.
    """

    result: Race
    stopped: BaseException | None = None


def ended_race(racing: Racing) -> Ended:
    """Run :func:`race`, and return its result even if it is stopped before its end.

    Raises:
        UsageError: An argument cannot be used as given, or the folder holds another race.
        DispersionError: No checkpoint can be asked.
        MissingExtraError: torch or lm-eval is not installed.
    """
    start = time.perf_counter()
    check_settings(racing)
    if racing.answers == "none" and racing.budget is None:
        raise UsageError(
            "a race without the right answers needs a budget of questions, got none; add a "
            "budget, such as 5%",
            argument="answers",
        )
    if racing.demo:
        from lmeval_dispersion.racing import replay

        return Ended(
            replay.demo(racing.seed, error=racing.error, margin=racing.margin, top=racing.top)
        )
    _check_engine(racing)
    named = Named.of(racing.checkpoints, racing.family)
    if not named.words and not racing.family:
        raise UsageError(
            "expected checkpoints to race, got none; name a folder of checkpoints, ORG/NAME or a "
            "family"
        )
    # With all, the names for another backend are its own.
    if not racing.family and (racing.model == "hf" or not racing.all):
        named.check_there(all_of_them=racing.all)
    racing = replace(racing, tasks=racing.tasks or ",".join(named.tasks))
    if racing.output_path is None:
        racing = replace(racing, output_path=begun_in_run(named.words, racing.tasks or ""))
    folder = _opened(racing)
    line = _lined_up(folder, named, racing)
    folder.take(line.lineup)
    plan = _planned(folder, racing)
    if racing.dry_run:
        contest = Contest(plan.questions, racing.error, racing.margin, racing.seed)
        size = shown(line.lineup.bytes, "bytes") if line.lineup.bytes else ""
        return Ended(folder.result(contest, time.perf_counter() - start, plan.words(size)))
    with folder.alone():
        _keep(folder, line, plan, racing)
        side_by_side = len(folder.raced) if racing.engine else 0
        contest = contest_of(folder.kept, racing, side_by_side=side_by_side)
        stopped = _asked(folder, contest, plan, racing)
    if folder.failed and not contest.answered:
        label, reason = next(iter(folder.failed.items()))
        raise DispersionError(
            f"no checkpoint could be raced ({len(folder.failed)} failed); {label}: {reason}"
        )
    seconds = time.perf_counter() - start
    if racing.answers == "none" and stopped is None:
        from lmeval_dispersion.racing.shared import agreed

        agreements = agreed(folder.evaluation, contest)
        return Ended(folder.result(contest, seconds, agreed=agreements))
    return Ended(folder.result(contest, seconds), stopped)


# --- open ----------------------------------------------------------------------------------------


def check_settings(racing: Racing) -> None:
    """Check those arguments of a race that can be checked without its folder or a model.

    Raises:
        UsageError: A number is out of its range, or the budget cannot be read.
    """
    ranges = {
        "error": (0 < racing.error < 1, "above 0 and below 1"),
        "margin": (0 <= racing.margin < 1, "from 0 to below 1"),
    }
    for name, (is_inside, wanted) in ranges.items():
        if not is_inside:
            raise UsageError(f"expected {wanted}, got {getattr(racing, name)}", argument=name)
    if racing.budget is not None:
        questions_of(racing.budget, 1)  # refused before anything is loaded


def _check_engine(how: How) -> None:
    """Raise UsageError for what the engine cannot do; MissingExtraError."""
    if how.engine is None:
        if how.gpus_per_checkpoint is not None:
            raise UsageError(
                "expected the engine ray if GPUs for each checkpoint are given, got no engine; add "
                "`--engine ray`, or leave out the GPUs",
                argument="gpus_per_checkpoint",
            )
        return
    if how.top > 1:
        raise UsageError(
            f"expected 1 with an engine, got {how.top}; leave out the engine to find several best "
            "checkpoints",
            argument="top",
        )
    require_extra("ray", "the engine ray")


def _opened(racing: Racing) -> RaceFolder:
    """The race's folder; UsageError where its race has turns in another order."""
    require_extra("models", "a race")
    folder = RaceFolder.opened(racing)
    began_by = folder.lineup.by
    if folder.kept.get("turns") and racing.by not in (None, began_by):
        raise UsageError(
            f"expected {began_by}, the order in which the race in {folder.path} began, got "
            f"{racing.by}; name no order, or name another folder",
            argument="by",
        )
    return folder


# --- line up -------------------------------------------------------------------------------------


class _Line(NamedTuple):
    """Who races: the list, and the choice that gave it, as kept."""

    lineup: Lineup
    which: dict[str, Any]
    is_new: bool  # the folder does not have it yet


def _lined_up(folder: RaceFolder, named: Named, racing: Racing) -> _Line:
    """The folder's list; with the checkpoints that this command adds, which are screened."""
    known = folder.lineup
    unlisted = list[str]()
    arguments: dict[str, dict[str, str]] = {}
    try:
        taken = racing.all and folder.api and not racing.family
        arguments = named.arguments(taken=taken)
    except DispersionError:  # no checkpoint joins while the names cannot be listed
        if not folder.kept:
            raise
        unlisted = [] if racing.family else [*named.words]
    folder.name([*arguments.values()], unlisted)
    which = choice_of(racing)
    shared = not racing.engine and racing.answers is None
    is_known = which == folder.kept.get("which")
    if is_known and not folder.lacks([*arguments.values()]):
        if _shares(folder, racing):
            known = known.ordered("block", shared=shared)
        return _Line(known, which, is_new=False)
    listed = lineup(
        named, racing.tasks or "", racing, api=folder.api, count=partial(_counted, folder)
    )
    folder.name([entry.arguments for entry in listed.entries])
    before = None
    if folder.kept:
        listed = known.joined(listed)
        before = known.by
    if _shares(folder, racing):
        before = "block"
    return _Line(listed.ordered(racing.by or before, shared=shared), which, is_new=True)


def _counted(folder: RaceFolder) -> tuple[Counter[str], int]:
    """Counts of the answers in the tasks' documents, and the number of documents."""
    from lmeval_dispersion.harness.answers import counted_answers

    return counted_answers([*folder.evaluation.tasks.values()])


def _shares(folder: RaceFolder, racing: Racing) -> bool:
    """Whether a budget is spent on shared questions; where turns began it ends these early."""
    has_begun = bool(folder.kept.get("turns"))
    return racing.budget is not None and not (has_begun or racing.by == "rows" or racing.engine)


def _planned(folder: RaceFolder, racing: Racing) -> Plan:
    """What is loaded and asked; UsageError where the budget has no question for each."""
    count = len(folder.evaluation.questions)
    raced = folder.raced
    budget = None
    if _shares(folder, racing):
        budget = questions_of(racing.budget or 0, len(raced) * count)
        folder.budget = budget
    answered = folder.answered
    if racing.answers == "none" and budget is not None:
        from lmeval_dispersion.racing.shared import check_agreement

        each = min(count, budget // max(1, len(raced)))
        check_agreement(len(raced), each)
        phases = [Phase(len(raced), each, 0)]
        return Plan(raced, count, phases, folder.lineup.by, folder.api, answered)
    return Plan.of(
        folder.lineup,
        raced,
        count,
        budget=budget,
        api=folder.api,
        top=racing.top,
        answered=answered,
    )


# --- ask and judge -------------------------------------------------------------------------------


def _keep(
    folder: RaceFolder,
    line: _Line,
    plan: Plan,
    racing: Racing,
) -> None:
    """Write the list, and what is fixed before the first question, to the folder."""
    kept = folder.kept
    if racing.answers == "none":
        from lmeval_dispersion.racing.shared import asking_tokens

        folder.more = asking_tokens(kept, folder.path, racing.tasks or "")
    if "drawn" not in kept:
        is_split = bool(plan.phases) and racing.answers is None
        kept["split"] = plan.checkpoints if is_split else 0
    begun = {
        "error": kept.get("error", racing.error),
        "margin": kept.get("margin", racing.margin),
        "top": kept.get("top", racing.top),
    }
    if line.is_new:
        kept.pop("margins", None)  # of the list before
        folder.keep(
            line.lineup,
            which=line.which,
            times=kept.get("times", 0) + 1,
            **begun,
        )
    elif kept.get("order") != line.lineup.by or "error" not in kept:  # as a training leaves it
        folder.keep(line.lineup, **begun)


def _asked(
    folder: RaceFolder,
    contest: Contest,
    plan: Plan,
    racing: Racing,
) -> BaseException | None:
    """Ask until the contest is decided, or something stops it, which is returned.

    Raises:
        DispersionError: The race is at fault, or nothing was answered.
    """
    budget = None
    if racing.budget is not None and not plan.phases:
        budget = questions_of(racing.budget, len(plan.entries) * plan.questions)
    folder.allowance = Limits(budget, racing.hours)
    try:
        if racing.engine:
            from lmeval_dispersion.racing.tune import race_on_ray

            race_on_ray(folder, contest, gpus=racing.gpus_per_checkpoint, hidden=racing.quiet)
        else:
            folder.run(contest, plan, quiet=racing.quiet)
    except KeyboardInterrupt as interrupt:
        return interrupt
    except UsageError:
        raise
    except DispersionError as error:
        if not contest.answered:
            raise
        return error
    return None
