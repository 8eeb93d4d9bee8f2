"""``dispersion compare``: runs on the same questions, side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.options import add_examples, add_layer, add_one_slice, add_output
from lmeval_dispersion.output import Output


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="folders of two runs or more (stores, or lm-eval's results with --log_samples); the first is "
        "the baseline",
    )
    parser.add_argument(
        "--demo", action="store_true", help="compare the bundled runs: 600 sums, by two tiny models"
    )
    add_one_slice(parser)
    add_layer(parser)
    add_output(parser)
    add_examples(
        parser, "--demo", "BASELINE_RUN RUN", "BASELINE_RUN RUN --slice category -o differences.html"
    )


def _run(args: argparse.Namespace) -> int:
    if args.demo and args.runs:
        raise UsageError(
            f"expected runs, or `dispersion compare --demo` without any, got both: {args.runs[0]}"
        )
    if args.demo:
        args.runs = sorted(map(str, data_folder("demo_runs").glob("sums-*")))
    if len(args.runs) < 2:
        raise UsageError(
            f"expected two runs, got {len(args.runs)}; the bundled ones: `dispersion compare --demo`"
        )
    output = Output.of(args)
    for path in args.runs:
        if not Path(path).is_dir() and not Path(path).match("results*.json"):
            raise UsageError(
                f"expected the folder of a run, got {path}; check the path, or name lm-eval's results_*.json"
            )
    from lmeval_dispersion.auditing.compare import compare_runs

    output.write(compare_runs(args.runs, by=args.by, layer=args.layer).document())
    return 0


COMMANDS = {"compare": (_add_arguments, _run)}
