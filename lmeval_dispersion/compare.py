"""``dispersion compare``: runs, or two laboratory studies, side by side.

Runs go to the audit, studies to the laboratory.
"""

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
        help="folders of two runs (stores, or lm-eval's results with --log_samples), or of two laboratory "
        "studies; the first is the baseline",
    )
    parser.add_argument(
        "--demo", action="store_true", help="compare the bundled runs: 600 sums, by two tiny models"
    )
    add_output(parser)
    stores = parser.add_argument_group("runs")
    add_one_slice(stores)
    add_layer(stores)
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
            f"expected two runs or two studies, got {len(args.runs)}; the bundled ones: "
            "`dispersion compare --demo`"
        )
    output = Output.of(args)
    for path in args.runs:
        if not Path(path).is_dir() and not Path(path).match("results*.json"):
            raise UsageError(
                f"expected the folder of a run or a study, got {path}; check the path, or name lm-eval's "
                "results_*.json"
            )
    from lmeval_dispersion.laboratory.study import is_study

    studies = [is_study(path) for path in args.runs]
    if not any(studies):
        from lmeval_dispersion.auditing.compare import compare_runs

        output.write(compare_runs(args.runs, by=args.by, layer=args.layer).document())
        return 0
    if not all(studies):
        kinds = ", ".join("study" if study else "run" for study in studies)
        raise UsageError(f"expected runs or studies, not both, got {kinds}")
    if len(studies) != 2:
        raise UsageError(f"expected two laboratory studies, got {len(studies)}; compare them pair by pair")
    from lmeval_dispersion.laboratory.comparison import compare_studies

    output.write(compare_studies(*args.runs).document())
    return 0


COMMANDS = {"compare": (_add_arguments, _run)}
