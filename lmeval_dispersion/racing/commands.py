"""The command ``dispersion race``."""

from __future__ import annotations

import argparse

from lmeval_dispersion.options import add_examples, add_output, add_seed
from lmeval_dispersion.output import Output
from lmeval_dispersion.racing import replay


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``dispersion race``."""
    recorded = parser.add_mutually_exclusive_group(required=True)
    recorded.add_argument(
        "--replay",
        nargs="+",
        metavar="RESULTS",
        help="race on finished evaluations, one a model: lm-eval's results with --log_samples, or stores",
    )
    recorded.add_argument("--demo", action="store_true", help="race the bundled models by recorded answers")
    add_seed(parser)
    add_output(parser)
    add_examples(parser, "--demo", "--replay results/*", "--replay results/MODEL_A results/MODEL_B")


def run(args: argparse.Namespace) -> int:
    """Run ``dispersion race``."""
    output = Output.of(args)
    if args.demo:
        output.write(replay.demo(args.seed).document())
        return 0
    given, shuffled = replay.read_answers(args.replay), args.replay == sorted(args.replay)
    output.write(replay.replay(*given, shuffled=shuffled, seed=args.seed, quiet=args.quiet).document())
    return 0


COMMANDS = {"race": (add_arguments, run)}
