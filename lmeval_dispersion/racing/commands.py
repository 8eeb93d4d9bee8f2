"""The command ``dispersion race``.

The functions that do the work are imported when it runs, so that ``--help`` needs no numpy.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from lmeval_dispersion.arguments import add_options, options_from
from lmeval_dispersion.asking import Judge, LmEval, Questions
from lmeval_dispersion.errors import UsageError, require_extra
from lmeval_dispersion.options import add_examples, add_output
from lmeval_dispersion.output import Output, prints_to_stderr
from lmeval_dispersion.racing.arguments import How, Racing, Which

if TYPE_CHECKING:
    from lmeval_dispersion.racing.replay import Replay
    from lmeval_dispersion.racing.report import Race


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``dispersion race`` to a parser."""
    add_options(parser, Racing, "checkpoints")
    add_options(parser.add_argument_group("which race"), Which)
    add_options(parser.add_argument_group("how"), How)
    group = parser.add_argument_group("as for lm_eval")
    add_options(group, Questions)
    add_options(group, Judge)
    add_options(group, LmEval, dashed=False)
    recorded = parser.add_mutually_exclusive_group()
    recorded.add_argument(
        "--replay",
        nargs="+",
        metavar="RESULTS",
        help="race finished evaluations: for each model, the results of `lm_eval --log_samples` "
        "or a store; or the folder of one race. If CHECKPOINT is a folder that `dispersion screen "
        "--emit` wrote, only the models on its short list are raced (default: none)",
    )
    recorded.add_argument(
        "--demo",
        nargs="?",
        const="family",
        choices=("family", "released"),
        help="race recorded answers: of the bundled tiny models (family), or of 43 released models to "
        "GSM8K (released) (default: family)",
    )
    add_output(parser)
    add_examples(
        parser,
        "--demo released",
        "myruns --tasks gsm8k --batch_size auto",
        "myruns --tasks gsm8k --batch_size auto --budget 10%",
        "'runs/*' --tasks my_task --include_path tasks -o race.html",
        "--replay results/MODEL_A results/MODEL_B",
        more="\nexit status: 0 the race ran, 1 no checkpoint could be raced, 2 wrong usage,\n"
        "3 some checkpoints failed, 130 interrupted (run the same command to go on)\n",
    )


#: Arguments of a race that asks models.
_LIVE = ("family", "domain", "base", "tasks", "limit", "engine", "output_path", "hours", "answers")


def run(args: argparse.Namespace) -> int:
    """Run ``dispersion race`` and return its exit status.

    The exit status is 0 after a race, 3 if a checkpoint failed, and 130 if the user interrupted the
    race. A race on recorded answers (``--demo``, ``--replay``) always gives 0.

    Raises:
        UsageError: The arguments do not fit together, or one has a wrong value.
        DispersionError: No checkpoint could be raced, or an error such as a full disk stopped the
            race.
    """
    from lmeval_dispersion.racing import replay
    from lmeval_dispersion.racing.race import check_settings

    output = Output.of(args)
    if not (args.demo or args.replay):
        return _race(args, output)
    unused = [*_LIVE]
    if args.demo:
        unused += ["by", "metric"]
    if args.demo == "family":
        unused.append("budget")
    for name in unused:
        if getattr(args, name) is not None:
            raise _recorded(f"--{name}")
    if args.demo and args.checkpoints:
        raise _recorded(args.checkpoints[0])
    racing = options_from(Racing, args)
    check_settings(racing)
    rule: dict[str, Any] = {
        name: getattr(args, name) for name in ("seed", "error", "margin", "top")
    }
    if args.demo == "released":
        output.write(replay.released(budget=args.budget, **rule).document())
    elif args.demo:
        output.write(replay.demo(**rule).document())
    else:
        output.write((_judged(args, racing) or _replayed(args, rule)).document())
    return 0


def _judged(args: argparse.Namespace, how: How) -> Race | None:
    """The race of a folder, judged by its own questions; None for other results."""
    from lmeval_dispersion.racing import replay

    if len(args.replay) > 1 or args.checkpoints:
        return None
    race = replay.judged(args.replay[0], how)
    if race is None:
        return None
    for name, default in (("metric", None), ("by", None), ("budget", None), ("weigh", "units")):
        if getattr(args, name) != default:
            raise UsageError(
                f"a race's folder is judged by the settings of that race; leave out --{name}"
            )
    return race


def _recorded(name: str) -> UsageError:
    return UsageError(f"--demo and --replay race recorded answers; leave out {name}")


def _replayed(args: argparse.Namespace, rule: dict[str, Any]) -> Replay:
    """Races on finished evaluations, of all or of those that a list's folder names."""
    from lmeval_dispersion.racing import replay
    from lmeval_dispersion.racing.lineup import listed_results, questions_of
    from lmeval_dispersion.racing.rule import SHARED

    recorded = replay.read_answers(args.replay, args.metric)
    if args.weigh == "questions":
        recorded = recorded._replace(weights=None)
    answers = recorded.answers
    listed = list[str]()
    if args.checkpoints:
        names = listed_results(args.checkpoints, [*answers, *recorded.failed])
        listed = [name for name in names if name in answers]
        if not listed:
            raise UsageError(
                "expected a checkpoint on the short list whose log-probabilities are all finite, "
                "got none; evaluate the checkpoints again with model_args dtype=float32"
            )
    by = args.by or ("rows" if listed else "block")
    is_sorted = len(args.replay) > 1 and args.replay == sorted(args.replay)
    shuffled = by == "rows" and not listed and is_sorted
    if args.budget is not None:
        first = next(iter(answers.values()))
        rule["budget"] = questions_of(args.budget, len(listed or answers) * len(first.score))
    if by == "block":
        rule["sharing"] = SHARED
        rule["cut"] = bool(listed)
    return replay.replay(recorded, listed=listed, shuffled=shuffled, quiet=args.quiet, **rule)


def _race(args: argparse.Namespace, output: Output) -> int:
    from lmeval_dispersion.racing.race import ended_race

    require_extra("models", "`dispersion race`")
    try:
        with prints_to_stderr():
            result, stopped = ended_race(options_from(Racing, args))
    except KeyboardInterrupt:
        output.say(
            "dispersion race: interrupted before a question was asked, so nothing was written; run "
            "the same command to begin again"
        )
        return 130
    if isinstance(stopped, KeyboardInterrupt):
        output.say("dispersion race: interrupted; run the same command to go on")
    output.write(result.document())
    if isinstance(stopped, KeyboardInterrupt):
        return 130
    if stopped is not None:
        raise stopped
    return 3 if any(c.status == "failed" for c in result.checkpoints) else 0


COMMANDS = {"race": (add_arguments, run)}
