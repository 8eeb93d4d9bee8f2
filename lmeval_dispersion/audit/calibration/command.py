"""The commands ``dispersion calibrate`` and ``dispersion predict``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.audit.calibration.batches import SIZE
from lmeval_dispersion.audit.calibration.calibrator import (
    calibrator_json,
    check_fits,
    check_worth,
    fit_calibrator,
    fit_paper_calibrator,
    predict_slices,
    read_calibrator,
)
from lmeval_dispersion.audit.calibration.document import calibrator_document, prediction_document
from lmeval_dispersion.audit.calibration.features import CLUSTERS, FEATURES, FEWEST_DOCUMENTS
from lmeval_dispersion.audit.calibration.selection import labels_of, rows_of_file, rows_where
from lmeval_dispersion.audit.reports.results import run_for
from lmeval_dispersion.audit.run import Run, read_run
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.options import (
    Output,
    add_examples,
    add_format,
    add_layer,
    add_one_slice,
    add_output,
    add_quiet,
    add_seed,
    report_beside,
)

Rows = NDArray[np.int64]

_SMALLEST_PAPER = 20


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``dispersion calibrate``."""
    parser.add_argument(
        "run", metavar="RUN", help="folder of a finished run (its store), or of several of one model"
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="the calibrator to write, JSON"
    )
    add_format(parser, default="table")
    add_quiet(parser)
    _add_selection(parser, "learn only from documents that satisfy this", "documents that count as labelled")
    parser.add_argument(
        "--protocol",
        choices=("natural", "paper"),
        default="natural",
        help="natural: the run's own slices; paper: mixtures of every accuracy (default: natural)",
    )
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
        help=f"documents of the slices to be estimated (default: slices as they are; paper: {SIZE})",
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
    if args.protocol == "paper":
        found = _fit_paper(args, run, output)
    else:
        found = fit_calibrator(
            run, by=args.slice, features=args.feature, slice_size=args.slice_size, seed=args.seed
        )
    file.write_text(calibrator_json(found))
    output.write(calibrator_document(found))
    output.say(f"next: dispersion predict {args.output} RUN")
    return 0


def _fit_paper(args: argparse.Namespace, run: Run, output: Output) -> dict[str, Any]:
    if args.slice or args.feature:
        raise UsageError("--slice and --feature belong to --protocol natural; leave them out")
    size = args.slice_size or SIZE
    if size < _SMALLEST_PAPER:
        raise UsageError(f"expected at least {_SMALLEST_PAPER} documents a slice, got --slice-size {size}")
    found = fit_paper_calibrator(run, size=size, seed=args.seed)
    if found["slice_size"] < size:
        output.say(
            f"slices of {found['slice_size']} documents instead of {size}: "
            "the labelled documents allow no more"
        )
    return found


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
    found = read_calibrator(args.calibrator)
    run = run_for(found, args.run)
    check_fits(found, run)
    if not args.force:
        check_worth(found, args.calibrator)
    result = predict_slices(
        found, run, by=args.slice, rows=_left(args, run), force=args.force, seed=args.seed
    )
    output.write(prediction_document(result))
    refused = [row["reason"] is not None for row in result["slices"]]
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
    found = [rows_where(run, args.where)] if args.where else []
    if args.labelled:
        found.append(rows_of_file(run, args.labelled))
    if not found:
        return None
    rows = np.intersect1d(found[0], found[-1])
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


COMMANDS = {
    "calibrate": (add_calibrate_arguments, run_calibrate),
    "predict": (add_predict_arguments, run_predict),
}
