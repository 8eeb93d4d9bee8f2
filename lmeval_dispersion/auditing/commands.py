"""The commands ``dispersion audit``, ``calibrate`` and ``compare``."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from lmeval_dispersion.arguments import add_options
from lmeval_dispersion.auditing.arguments import Auditing, Calibrating, Comparing
from lmeval_dispersion.auditing.calibrating.calibration import calibrate
from lmeval_dispersion.auditing.calibrating.prediction import predict
from lmeval_dispersion.auditing.compare import compare
from lmeval_dispersion.auditing.ranking import rank
from lmeval_dispersion.auditing.report import audit
from lmeval_dispersion.auditing.run import read_run
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.options import add_examples, add_output
from lmeval_dispersion.output import Output, report_and_file
from lmeval_dispersion.report.declared import listed


def add_audit_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``dispersion audit``."""
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="a finished run: folder of its store, lm-eval's samples (folder, results or samples file) or "
        "Inspect's logs",
    )
    parser.add_argument(
        "--worst",
        type=int,
        metavar="N",
        help="list the N documents nearest to all others, probably hard ones (default: none)",
    )
    add_options(parser, Auditing, "demo", "layer", "metric", "slices", "metrics")
    add_output(parser)
    add_examples(parser, "--demo", "RUN -o report.html", "RUN --worst 20")


def run_audit(args: argparse.Namespace) -> int:
    """Run ``dispersion audit``; 3 if a run with vectors lacks a part other than confidence, else 0."""
    output = Output.of(args)
    if args.demo and args.runs:
        raise UsageError(f"expected a RUN or --demo, got both: {args.runs[0]}")
    if not args.demo and not args.runs:
        raise UsageError(
            "expected a RUN, the folder of a finished run; --demo audits the bundled one"
        )
    if args.worst is not None and args.worst < 1:
        raise UsageError(f"expected --worst to be 1 or more, got {args.worst}")
    if len(args.runs) > 1:
        raise UsageError(
            f"expected one RUN, got {len(args.runs)}; run: dispersion compare {shlex.join(args.runs)}"
        )
    if args.worst and (args.slices or args.metrics == "all"):
        raise UsageError(
            "--slice and --metrics change nothing in the order of --worst; leave them out"
        )
    run = read_run(
        data_folder("demo_runs") / "sums-30" if args.demo else args.runs[0], args.layer, args.metric
    )
    if args.worst:
        output.write(rank(run, count=args.worst).document())
        return 0
    report = audit(
        run,
        slices=args.slices,
        metrics=args.metrics,
        details=output.details,
        short=output.short,
    )
    output.write(report.document())
    for reason in dict.fromkeys(report.missing.values()):
        parts = [name.replace("_", " ") for name, why in report.missing.items() if why == reason]
        output.say(f"dispersion audit: {listed(parts)} not available: {reason}")
    return (
        3 if report.missing and report.run["width"] else 0
    )  # without vectors, none of them is expected


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``dispersion calibrate``."""
    parser.add_argument(
        "run",
        metavar="RUN",
        help="folder of a finished run (its store), or of several of one model",
    )
    parser.add_argument(
        "--from",
        dest="fitted",
        type=Path,
        metavar="FILE",
        help="estimate RUN's accuracy by this calibrator, which -o wrote (default: fit one to its labels)",
    )
    add_options(parser, Calibrating, "where", "by", "layer")
    add_output(
        parser,
        file="file of the calibrator, JSON; with --from of the report (default: the report alone, on "
        "standard output)",
        form="table; with --from by the suffix of --output",
    )
    add_examples(
        parser,
        "RUN",
        "RUN -o calibrator.json --where \"subject in ('anatomy', 'virology')\"",
        "RUN --from calibrator.json",
        "RUN --from calibrator.json --slice category -o estimated.csv",
        more="\nexit status: 0 done, 1 failed or no slice has an estimate, 2 wrong usage, 3 some have none\n",
    )


def run_calibrate(args: argparse.Namespace) -> int:
    """Run ``dispersion calibrate``; returns 0, also for a calibrator that does not beat labels.

    With ``--from`` 3 if some slices have no estimate, 1 if none has.
    """
    if args.fitted is not None:
        return _estimate(args)
    file = None
    if args.output:
        output, file = report_and_file(args, "json")
    else:
        output = Output.of(args)
    calibration = calibrate(args.run, where=args.where, layer=args.layer, by=args.by)
    if file:
        file.write_text(calibration.calibrator.to_json())
    output.write(calibration.document())
    if file and calibration.better:
        output.say(f"next: dispersion calibrate RUN --from {args.output[0]}")
    return 0


def _estimate(args: argparse.Namespace) -> int:
    """Estimate the accuracy of a run's slices by a fitted calibrator."""
    output = Output.of(args)
    if args.layer is not None:
        raise UsageError("the calibrator has its own layer; leave out --layer")
    result = predict(args.fitted, args.run, where=args.where, by=args.by)
    output.write(result.document())
    without = [row for row in result.slices if row.reason is not None]
    if not without:
        return 0
    return 1 if len(without) == len(result.slices) else 3


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``dispersion compare``."""
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="two runs or more, each a store's folder, lm-eval's samples (folder, results or samples file) "
        "or Inspect's logs (folder or file); the first is the baseline",
    )
    add_options(parser, Comparing, "demo", "by", "layer", "metric")
    add_output(parser)
    add_examples(
        parser,
        "--demo",
        "BASELINE_RUN RUN",
        "BASELINE_RUN RUN --slice category -o differences.html",
    )


def run_compare(args: argparse.Namespace) -> int:
    """Run ``dispersion compare``; returns 0."""
    if args.demo and args.runs:
        raise UsageError(
            f"expected runs, or `dispersion compare --demo` without any, got both: {args.runs[0]}"
        )
    if len(args.runs) < 2 and not args.demo:
        raise UsageError(
            f"expected two runs, got {len(args.runs)}; the bundled ones: `dispersion compare --demo`"
        )
    output = Output.of(args)
    output.write(
        compare(
            args.runs, by=args.by, layer=args.layer, metric=args.metric, demo=args.demo
        ).document()
    )
    return 0


COMMANDS = {
    "audit": (add_audit_arguments, run_audit),
    "calibrate": (add_calibrate_arguments, run_calibrate),
    "compare": (add_compare_arguments, run_compare),
}
