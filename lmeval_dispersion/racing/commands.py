"""The command ``dispersion race``."""

from __future__ import annotations

import argparse
from typing import Any

from lmeval_dispersion.errors import UsageError, require_extra
from lmeval_dispersion.options import (
    Once,
    add_examples,
    add_lm_eval,
    add_metric,
    add_output,
    add_seed,
    add_tasks,
)
from lmeval_dispersion.output import Output, prints_to_stderr
from lmeval_dispersion.racing import replay
from lmeval_dispersion.racing.contest import ERROR, MARGIN
from lmeval_dispersion.racing.lineup import listed_results
from lmeval_dispersion.racing.race import check_settings, race
from lmeval_dispersion.racing.rule import SHARED

_ERROR = f"chance, at most, that the best of those raced is dropped (default: {ERROR})"
_MARGIN = f"smallest difference in score that counts (default: {MARGIN})"


def add_evaluation(parser: argparse.ArgumentParser, tasks: str, **more: Any) -> None:
    """Add the options for an evaluation kept in a race's folder; ``tasks`` is the help of ``--tasks``."""
    group = add_lm_eval(parser)
    add_tasks(group, tasks, **more)
    add = group.add_argument
    add(
        "--limit",
        type=int,
        metavar="N",
        help="the most questions of a checkpoint (default: all there are)",
    )
    add_metric(group)
    folder = (
        "keeps all answers: the same command goes on, more checkpoints join (default: race-TASKS)"
    )
    add("--output_path", metavar="FOLDER", help=folder)
    add_seed(parser)


def arguments_of(args: argparse.Namespace) -> dict[str, Any]:
    """A command's options, without those of its output, as keyword arguments."""
    output = ("output", "format", "details", "command")
    return {
        name: value for name, value in vars(args).items() if name not in output and name[0] != "_"
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``dispersion race``."""
    named = "as `dispersion screen` has it, or --emit's folder"
    parser.add_argument("checkpoints", nargs="*", metavar="CHECKPOINT", help=named)
    add = parser.add_argument_group("which race").add_argument
    add("--family", metavar="NAME", help="all checkpoints of a family (default: none)")
    add("--domain", metavar="SET", help="token set of the screen (default: the tasks' answers)")
    add(
        "--base",
        action=Once,
        metavar="CHECKPOINT",
        help="that the others were trained from; it does not race (default: none)",
    )
    add("--all", action="store_true", help="race all, without a screen")
    order = "what orders those that race (default: rows; a first block where rows are equal, and of --all)"
    add("--by", choices=("rows", "block"), help=order)
    sample = "random others of each group race as well (default: 0)"
    add("--audit-sample", type=int, default=0, metavar="N", help=sample)
    add = parser.add_argument_group("how").add_argument
    add("--error", type=float, default=ERROR, metavar="X", help=_ERROR)
    add("--margin", type=float, default=MARGIN, metavar="X", help=_MARGIN)
    add(
        "--top",
        type=int,
        default=1,
        metavar="K",
        help="how many of the best are wanted (default: 1)",
    )
    spend = "the most questions to ask now, of all together; the same command goes on (default: all needed)"
    add("--budget", type=int, metavar="N", help=spend)
    add(
        "--hours",
        type=float,
        metavar="X",
        help="the longest to go on, likewise (default: to the end)",
    )
    engine = (
        "side by side on the Ray cluster of RAY_ADDRESS, or of this machine (default: one by one)"
    )
    add("--engine", choices=("ray",), help=engine)
    gpus = "of the cluster's; a part of 1 too (default: 1 where it has GPUs)"
    add("--gpus-per-checkpoint", type=float, metavar="X", help=gpus)
    add("--dry-run", action="store_true", help="screen, and say what would be loaded and asked")
    add_evaluation(parser, "tasks and groups, or a set's file (default: those of --emit)")
    recorded = parser.add_mutually_exclusive_group()
    recorded.add_argument(
        "--replay",
        nargs="+",
        metavar="RESULTS",
        help="finished evaluations, one a model: lm-eval's with --log_samples; stores; a race's folder; "
        "after --emit's folder, by its list (default: none)",
    )
    demo = (
        "race recorded answers: of the bundled tiny models, or of 43 released ones to GSM8K "
        "(default: family)"
    )
    recorded.add_argument(
        "--demo", nargs="?", const="family", choices=("family", "released"), help=demo
    )
    add_output(parser)
    add_examples(
        parser,
        "--demo released",
        "myruns --tasks gsm8k --batch_size auto",
        "'runs/*' --tasks my_task --include_path tasks -o race.html",
        "--replay results/MODEL_A results/MODEL_B",
        more="\nexit status: 0 raced, 1 none, 2 wrong usage, 3 some failed, 130 interrupted (run it again)\n",
    )


def run(args: argparse.Namespace) -> int:
    """Run ``dispersion race``; returns 0, 3 if a checkpoint failed, 130 if interrupted."""
    output = Output.of(args)
    if not (args.demo or args.replay):
        return _race(args, output)
    live = (
        "family",
        "domain",
        "base",
        "tasks",
        "limit",
        "engine",
        "output_path",
        "hours",
    )
    unused = [f"--{name}" for name in live if getattr(args, name) is not None]
    if args.demo:
        own = ("by", "budget", "metric")
        unused += [f"--{name}" for name in own if getattr(args, name) is not None]
    if unused := [*(args.checkpoints if args.demo else ()), *unused]:
        raise UsageError(f"--demo and --replay race what is recorded; leave out {unused[0]}")
    check_settings(args.error, args.margin, args.seed, top=args.top)
    rule: dict[str, Any] = {
        name: getattr(args, name) for name in ("seed", "error", "margin", "top")
    }
    if args.demo == "released":
        output.write(replay.released(**rule).document())
    elif args.demo:
        output.write(replay.demo(**rule).document())
    elif (
        len(args.replay) == 1
        and not args.checkpoints
        and (
            race := replay.judged(
                args.replay[0], error=args.error, margin=args.margin, top=args.top
            )
        )
    ):
        for name in ("metric", "by", "budget"):
            if getattr(args, name) is not None:
                raise UsageError(f"a race's folder is judged by the race's own; leave out --{name}")
        output.write(race.document())
    else:
        recorded = replay.read_answers(args.replay, args.metric)
        answers = recorded.answers
        names = [*answers, *recorded.failed]
        listed = listed_results(args.checkpoints, names) if args.checkpoints else []
        if listed and not {*listed} & {*answers}:
            raise UsageError("expected a listed checkpoint whose answers are finite, got none")
        listed = [name for name in listed if name in answers]
        by = args.by or ("rows" if listed else "block")
        is_sorted = len(args.replay) > 1 and args.replay == sorted(args.replay)
        shuffled = by == "rows" and not listed and is_sorted
        rule["budget"] = args.budget
        if by == "block":
            rule["sharing"] = SHARED
            rule["cut"] = bool(listed)
        races = replay.replay(recorded, listed=listed, shuffled=shuffled, quiet=args.quiet, **rule)
        output.write(races.document())
    return 0


def _race(args: argparse.Namespace, output: Output) -> int:
    require_extra("models", "`dispersion race`")
    given = {
        key: value for key, value in arguments_of(args).items() if key not in ("replay", "demo")
    }
    try:
        with prints_to_stderr():
            result = race(**given)
    except KeyboardInterrupt as interrupt:
        if not hasattr(interrupt, "race"):
            raise
        output.say("dispersion race: interrupted; the same command goes on")
        output.write(interrupt.race.document())
        return 130
    output.write(result.document())
    return 3 if any(c.status == "failed" for c in result.checkpoints) else 0


COMMANDS = {"race": (add_arguments, run)}
