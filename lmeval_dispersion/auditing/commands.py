"""The commands ``dispersion audit``, ``calibrate`` and ``compare``.

The functions that do the work are imported when a command runs, so that ``--help`` needs no numpy.
"""

from __future__ import annotations

import argparse
import shlex

from lmeval_dispersion.arguments import add_options, given_of
from lmeval_dispersion.auditing.arguments import (
    Auditing,
    Calibrating,
    Comparing,
    RankArguments,
)
from lmeval_dispersion.auditing.calibrating.arguments import Predicting
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.options import add_examples, add_output
from lmeval_dispersion.output import Output, report_and_file
from lmeval_dispersion.report.declared import listed


def add_audit_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``dispersion audit``."""
    add_options(parser, Auditing, "run", nargs="*")
    add_options(parser, RankArguments, "worst")
    add_options(parser, Auditing, "demo", "layer", "metric", "slice", "metrics")
    add_output(parser)
    add_examples(parser, "--demo", "RUN -o report.html", "RUN --worst 20")


def run_audit(args: argparse.Namespace) -> int:
    """Run ``dispersion audit`` and return its exit status.

    It is 3 if the run has vectors and a part of the report, other than that on confidence, could
    not be computed; else 0. With ``--worst`` it is 0.
    """
    from lmeval_dispersion.auditing.ranking import rank
    from lmeval_dispersion.auditing.report import audit
    from lmeval_dispersion.auditing.run import read_run

    output = Output.of(args)
    if len(args.run) > 1:
        raise UsageError(
            f"expected one RUN, got {len(args.run)}; `dispersion compare {shlex.join(args.run)}` "
            "compares them"
        )
    place = args.run[0] if args.run else None
    run = read_run(place, args.layer, args.metric, demo=args.demo)
    if args.worst is not None:
        if args.slice or args.metrics == "all":
            raise UsageError(
                "`--slice` and `--metrics` have no effect with `--worst`; leave them out"
            )
        output.write(rank(run, worst=args.worst).document())
        return 0
    report = audit(
        run,
        slice=args.slice,
        metrics=args.metrics,
        details=output.details,
        short=output.short,
    )
    output.write(report.document())
    for reason, parts in report.reasons().items():
        output.say(f"dispersion audit: {listed(parts)} could not be computed: {reason}")
    if report.missing and report.run["width"]:
        return 3
    return 0  # without vectors, none of them is expected


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``dispersion calibrate``."""
    add_options(parser, Calibrating, "run")
    add_options(parser, Predicting, "calibrator", required=False, default=None)
    add_options(parser, Calibrating, "where", "slice", "layer")
    add_output(
        parser,
        file="JSON file to write the calibrator to; with --from, file to write the report to "
        "(default: only print the report)",
        form="with --from, by the suffix of --output; else table",
    )
    add_examples(
        parser,
        "RUN",
        "RUN -o calibrator.json --where \"subject in ('anatomy', 'virology')\"",
        "RUN --from calibrator.json",
        "RUN --from calibrator.json --slice category -o estimated.csv",
        more="\nexit status: 0 done, 1 failed or no slice has an estimate, 2 wrong usage, 3 some "
        "slices have none\n",
    )


def run_calibrate(args: argparse.Namespace) -> int:
    """Run ``dispersion calibrate`` and return its exit status.

    It is 0 after a fit, even if the estimates are no better than the accuracy of the labelled
    documents. With ``--from`` it is 0 if all slices have an estimate, 3 if some have none, and 1 if
    no slice has one.
    """
    from lmeval_dispersion.auditing.calibrating.calibration import calibrate

    if args.calibrator is not None:
        return _estimate(args)
    file = None
    if args.output:
        output, file = report_and_file(args, "json")
    else:
        output = Output.of(args)
    calibration = calibrate(**given_of(Calibrating, args))
    if file:
        file.write_text(calibration.calibrator.to_json())
    output.write(calibration.document())
    if file and calibration.better:
        output.say(f"next: dispersion calibrate RUN --from {args.output[0]}")
    return 0


def _estimate(args: argparse.Namespace) -> int:
    """Estimate the accuracy of a run's slices by a fitted calibrator."""
    from lmeval_dispersion.auditing.calibrating.prediction import predict

    output = Output.of(args)
    if args.layer is not None:
        raise UsageError(
            "`--layer` has no effect with `--from`, as the calibrator names its layer; leave out "
            "`--layer`"
        )
    result = predict(**given_of(Predicting, args))
    output.write(result.document())
    without = [row for row in result.slices if row.reason is not None]
    if not without:
        return 0
    return 1 if len(without) == len(result.slices) else 3


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``dispersion compare``."""
    add_options(parser, Comparing, "runs", "demo", "layer", "metric", "slice")
    add_output(parser)
    add_examples(
        parser,
        "--demo",
        "BASELINE_RUN RUN",
        "BASELINE_RUN RUN --slice category -o differences.html",
    )


def run_compare(args: argparse.Namespace) -> int:
    """Run ``dispersion compare`` and return its exit status, 0."""
    from lmeval_dispersion.auditing.compare import compare

    output = Output.of(args)
    output.write(compare(**given_of(Comparing, args)).document())
    return 0


COMMANDS = {
    "audit": (add_audit_arguments, run_audit),
    "calibrate": (add_calibrate_arguments, run_calibrate),
    "compare": (add_compare_arguments, run_compare),
}
