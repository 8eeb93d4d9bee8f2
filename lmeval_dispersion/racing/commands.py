"""The command ``dispersion race``."""

from __future__ import annotations

import argparse

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.options import add_examples, add_output, add_seed
from lmeval_dispersion.output import Output
from lmeval_dispersion.racing import replay


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``dispersion race``."""
    parser.add_argument(
        "--replay",
        nargs="+",
        metavar="RESULTS",
        help="race on finished evaluations, one a model: lm-eval's results with --log_samples, or stores",
    )
    parser.add_argument("--demo", action="store_true", help="race the bundled models by recorded answers")
    add_seed(parser)
    add_output(parser)
    add_examples(parser, "--demo", "--replay results/*", "--replay results/MODEL_A results/MODEL_B")


def run(args: argparse.Namespace) -> int:
    """Run ``dispersion race``."""
    output = Output.of(args)
    if args.demo and args.replay:
        raise UsageError("expected --demo or --replay, got both")
    if args.demo:
        output.write(replay.demo(args.seed).document())
    elif args.replay:
        given = replay.read_answers(args.replay)
        shuffled = args.replay == sorted(args.replay)
        result = replay.replay(*given, shuffled=shuffled, seed=args.seed, quiet=args.quiet)
        output.write(result.document())
    else:
        raise UsageError("expected --replay RESULTS, or --demo")
    return 0


COMMANDS = {"race": (add_arguments, run)}
