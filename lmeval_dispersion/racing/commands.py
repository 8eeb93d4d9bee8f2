"""The command ``dispersion race``."""

from __future__ import annotations

import argparse

from lmeval_dispersion.errors import require_extra
from lmeval_dispersion.options import add_examples, add_lm_eval, add_output, add_seed
from lmeval_dispersion.output import Output
from lmeval_dispersion.racing import replay
from lmeval_dispersion.racing.contest import ERROR, MARGIN
from lmeval_dispersion.racing.race import race


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``dispersion race``."""
    parser.add_argument(
        "checkpoints", nargs="*", metavar="CHECKPOINT",
        help="as for `dispersion screen`, or the folder of its --emit",
    )  # fmt: skip
    which = parser.add_argument_group("which race")
    which.add_argument("--family", metavar="NAME", help="all checkpoints of a family (default: none)")
    which.add_argument(
        "--domain", metavar="SET", help="token set of the screen (default: by the tasks' answer tokens)"
    )
    which.add_argument(
        "--base",
        metavar="CHECKPOINT",
        help="what the others were trained from; it does not race (default: none)",
    )
    which.add_argument("--all", action="store_true", help="race all, in the order given, without a screen")
    which.add_argument(
        "--audit-sample", type=int, default=0, metavar="N",
        help="N others of each group race as well, at random (default: 0)",
    )  # fmt: skip
    how = parser.add_argument_group("how")
    how.add_argument(
        "--error", type=float, default=ERROR, metavar="X",
        help="chance, at most, that the best of those raced is dropped (default: %(default)s)",
    )  # fmt: skip
    how.add_argument(
        "--margin", type=float, default=MARGIN, metavar="X",
        help="of the score; what differs by no more is not told apart (default: %(default)s)",
    )  # fmt: skip
    how.add_argument(
        "--metric", metavar="[FILTER/]METRIC", help="what scores a question (default: the task's first)"
    )
    how.add_argument(
        "--by-probability", action="store_true",
        help="drop also by the probability of the right answer, where the score is lower too",
    )  # fmt: skip
    group = add_lm_eval(parser)
    group.add_argument("--tasks", metavar="NAME,NAME", help="tasks and groups (default: those of --emit)")
    group.add_argument("--limit", type=int, metavar="N", help="the most questions (default: all there are)")
    group.add_argument(
        "--output_path",
        metavar="FOLDER",
        help="keeps all answers; the same command goes on (default: race-TASKS)",
    )
    group.add_argument(
        "--confirm_run_unsafe_code", action="store_true", help="let tasks run the code that models write"
    )
    recorded = parser.add_mutually_exclusive_group()
    recorded.add_argument(
        "--replay",
        nargs="+",
        metavar="RESULTS",
        help="race on finished evaluations, one a model: lm-eval's results with --log_samples, or stores",
    )
    recorded.add_argument("--demo", action="store_true", help="race the bundled models by recorded answers")
    add_seed(parser)
    add_output(parser)
    add_examples(
        parser,
        "--demo",
        "myruns --tasks gsm8k --batch_size auto",
        "'runs/*' --tasks my_task --include_path tasks --domain math --limit 400 -o race.html",
        "list --device cuda:0",
        "--replay results/MODEL_A results/MODEL_B",
        more="\nexit status: 0 raced, 1 none, 2 wrong usage, 3 some failed, 130 interrupted: the same "
        "command goes on.\n",
    )


def run(args: argparse.Namespace) -> int:
    """Run ``dispersion race``."""
    output = Output.of(args)
    if args.demo:
        output.write(replay.demo(args.seed).document())
    elif args.replay:
        given = replay.read_answers(args.replay)
        shuffled = args.replay == sorted(args.replay)
        result = replay.replay(*given, shuffled=shuffled, seed=args.seed, quiet=args.quiet)
        output.write(result.document())
    else:
        return _race(args, output)
    return 0


def _race(args: argparse.Namespace, output: Output) -> int:
    require_extra("models", "`dispersion race`")
    ours = ("checkpoints", "replay", "demo", "output", "format", "formats", "details", "command", "quiet")
    given = {key: value for key, value in vars(args).items() if key not in ours and key[0] != "_"}
    try:
        result = race(args.checkpoints, quiet=output.quiet, **given)
    except KeyboardInterrupt as interrupt:
        if not hasattr(interrupt, "race"):
            raise
        output.say("dispersion race: interrupted; the same command goes on")
        output.write(interrupt.race.document())
        return 130
    output.write(result.document())
    return 3 if any(c.status == "failed" for c in result.checkpoints) else 0


COMMANDS = {"race": (add_arguments, run)}
