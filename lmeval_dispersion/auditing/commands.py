"""The commands ``dispersion audit``, ``dispersion calibrate`` and ``dispersion predict``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.auditing.calibration import calibrate
from lmeval_dispersion.auditing.calibrator import (
    calibrator_json,
    read_calibrator,
)
from lmeval_dispersion.auditing.features import CLUSTERS, FEATURES, FEWEST_DOCUMENTS
from lmeval_dispersion.auditing.prediction import predict, run_for
from lmeval_dispersion.auditing.report import audit
from lmeval_dispersion.auditing.run import Run, read_run
from lmeval_dispersion.auditing.selection import labels_of, rows_of_file, rows_where
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.options import (
    Output,
    add_examples,
    add_format,
    add_layer,
    add_metrics,
    add_one_slice,
    add_output,
    add_quiet,
    add_seed,
    add_slice,
    report_beside,
)
from lmeval_dispersion.paths import data_folder

Rows = NDArray[np.int64]


def add_audit_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``dispersion audit``."""
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="folder of a finished run (its store), or of several of one model; a second RUN is compared "
        "with the first",
    )
    parser.add_argument(
        "--demo", action="store_true", help="audit the bundled run: 204 questions of MMLU, by a tiny model"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--worst",
        type=int,
        metavar="N",
        help="the N documents that the model tells least from the others (default: none)",
    )
    kind.add_argument(
        "--budget", action="store_true", help="how many labelled documents the run's estimates are worth"
    )
    add_layer(parser)
    add_slice(parser)
    add_metrics(parser)
    add_output(parser)
    add_seed(parser)
    add_examples(parser, "--demo", "RUN -o report.html", "RUN --worst 20", "RUN --budget", "BASELINE_RUN RUN")


def run_audit(args: argparse.Namespace) -> int:
    """Run ``dispersion audit``; 3 where a part of the report is missing."""
    output = Output.of(args)
    if args.demo and args.runs:
        raise UsageError(f"expected a RUN or --demo, got both: {args.runs[0]}")
    if not args.demo and not args.runs:
        raise UsageError("expected a RUN, the folder of a finished run; --demo audits the bundled one")
    path, *others = [data_folder("demo_run")] if args.demo else args.runs
    short = output.format == "table" and not output.details
    if others:
        from lmeval_dispersion.auditing.compare import compare_runs

        if args.worst or args.budget or len(args.slice) > 1:
            raise UsageError("--worst, --budget and several --slice are for one run, got two")
        by = args.slice[0] if args.slice else "subject"
        output.write(compare_runs(args.runs, by=by, layer=args.layer, short=short).document())
        return 0
    run = read_run(path, args.layer)
    if args.worst is not None:
        from lmeval_dispersion.auditing.worst import rank

        if args.worst < 1:
            raise UsageError(f"expected --worst to be 1 or more, got {args.worst}")
        output.write(rank(run, count=args.worst, seed=args.seed).document())
        return 0
    if args.budget:
        by = args.slice[0] if args.slice else None
        output.write(calibrate(run, by=by, seed=args.seed).document())
        return 0
    with _doing(f"auditing {path}", args.quiet):
        report = audit(
            run, slices=args.slice, metrics=args.metrics, seed=args.seed, details=output.details, short=short
        )
    output.write(report.document())
    for name, reason in report.missing.items():
        output.say(f"dispersion audit: {name.replace('_', ' ')} not available: {reason}")
    return 3 if report.missing else 0


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``dispersion calibrate``."""
    parser.add_argument(
        "run", metavar="RUN", help="folder of a finished run (its store), or of several of one model"
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="the calibrator to write, JSON"
    )
    add_format(parser, default="table")
    parser.add_argument("--details", action="store_true", help="show every table on the terminal")
    add_quiet(parser)
    _add_selection(parser, "learn only from documents that satisfy this", "documents that count as labelled")
    add_one_slice(parser, default=None, otherwise=f"subject; {CLUSTERS} where too few")
    parser.add_argument(
        "--feature",
        action="append",
        default=[],
        metavar="FEATURE",
        choices=list(FEATURES),
        help=f"what to estimate from: {', '.join(FEATURES)}; may be repeated (default: all)",
    )
    parser.add_argument(
        "--slice-size",
        type=_slice_size,
        metavar="N",
        help="documents of the slices to be estimated (default: slices as they are)",
    )
    add_layer(parser)
    add_seed(parser)
    add_examples(
        parser,
        "RUN -o calibrator.json",
        "RUN -o calibrator.json --where \"subject in ('anatomy', 'virology')\" --slice-size 50",
    )


def run_calibrate(args: argparse.Namespace) -> int:
    """Run ``dispersion calibrate``."""
    output, file = report_beside(args, "json")
    run = read_run(args.run, args.layer)
    chosen = _chosen(args, run)
    if chosen is not None:
        run = labels_of(run, chosen)
    calibration = calibrate(
        run, by=args.slice, features=args.feature, slice_size=args.slice_size, seed=args.seed
    )
    file.write_text(calibrator_json(calibration.calibrator))
    output.write(calibration.document())
    output.say(f"next: dispersion predict {args.output} RUN")
    return 0


def add_predict_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``dispersion predict``."""
    parser.add_argument("calibrator", metavar="CALIBRATOR", help="file of `dispersion calibrate`")
    parser.add_argument(
        "run", metavar="RUN", nargs="?", help="folder of the run whose accuracy is to be estimated"
    )
    _add_selection(parser, "estimate only documents that satisfy this", "documents to leave out")
    add_one_slice(parser, default=None, otherwise="those that the calibrator was fitted on")
    parser.add_argument(
        "--force",
        action="store_true",
        help="also where the calibrator did not beat knowing nothing, or the slices differ from the labelled",
    )
    add_output(parser)
    add_seed(parser)
    add_examples(parser, "calibrator.json RUN", "calibrator.json RUN --slice category -o predicted.csv")
    # Optional for argparse alone, which would name RUN where the calibrator is missing.
    parser.usage = parser.format_usage().removeprefix("usage: ").replace("[RUN]", "RUN").rstrip()


def run_predict(args: argparse.Namespace) -> int:
    """Run ``dispersion predict``; 3 where some slices have no estimate, 1 where none has."""
    output = Output.of(args)
    if args.run is None:
        lacking = "RUN" if Path(args.calibrator).is_file() else "CALIBRATOR"
        raise UsageError(
            f"expected CALIBRATOR and RUN, got no {lacking}; `dispersion calibrate` writes a calibrator"
        )
    run = run_for(read_calibrator(args.calibrator), args.run)
    result = predict(
        args.calibrator,
        run,
        by=args.slice,
        rows=_left(args, run),
        force=args.force,
        seed=args.seed,
        short=output.format == "table" and not output.details,
    )
    output.write(result.document())
    refused = [row.reason is not None for row in result.slices]
    return 1 if all(refused) else 3 if any(refused) else 0


def _add_selection(parser: argparse.ArgumentParser, where: str, labelled: str) -> None:
    parser.add_argument(
        "--where",
        metavar="EXPR",
        help=f"{where}, such as \"subject in ('anatomy', 'virology')\" (default: all)",
    )
    parser.add_argument(
        "--labelled",
        metavar="FILE",
        help=f"{labelled}: one doc_id a line, or CSV with task,doc_id (default: none)",
    )


def _chosen(args: argparse.Namespace, run: Run) -> Rows | None:
    """The rows that both --where and --labelled allow; None where neither is given."""
    allowed = [rows_where(run, args.where)] if args.where else []
    if args.labelled:
        allowed.append(rows_of_file(run, args.labelled))
    if not allowed:
        return None
    rows = np.intersect1d(allowed[0], allowed[-1])
    if not len(rows):
        raise UsageError("no document is both in --labelled and satisfies --where; drop one of them")
    return rows


def _left(args: argparse.Namespace, run: Run) -> Rows | None:
    """The rows that --where allows and --labelled does not list; None where neither is given."""
    if not args.where and not args.labelled:
        return None
    rows = rows_where(run, args.where) if args.where else np.arange(len(run.vectors))
    if args.labelled:
        rows = np.setdiff1d(rows, rows_of_file(run, args.labelled))
    if not len(rows):
        raise UsageError("--labelled lists every document that --where allows; nothing is left to estimate")
    return rows


def _slice_size(text: str) -> int:
    value = int(text)
    if value < FEWEST_DOCUMENTS:
        raise argparse.ArgumentTypeError(f"expected at least {FEWEST_DOCUMENTS} documents a slice")
    return value


@contextmanager
def _doing(what: str, quiet: bool) -> Iterator[None]:
    """Say on a terminal's stderr what takes a while, unless the user wants it quiet."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal and not quiet:
        with console.status(what):
            yield
    else:
        yield


COMMANDS = {
    "audit": (add_audit_arguments, run_audit),
    "calibrate": (add_calibrate_arguments, run_calibrate),
    "predict": (add_predict_arguments, run_predict),
}
