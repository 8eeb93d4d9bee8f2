"""The commands ``dispersion audit`` and ``dispersion rank``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from lmeval_dispersion.audit.ranking import ranked_documents, ranking_report
from lmeval_dispersion.audit.reports.document import (
    audit_document,
    ranking_document,
)
from lmeval_dispersion.audit.reports.report import audit_report, part_of
from lmeval_dispersion.audit.run import Run, read_run
from lmeval_dispersion.audit.tail import hard_tail
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.options import (
    Output,
    add_column,
    add_examples,
    add_layer,
    add_metrics,
    add_output,
    add_seed,
    add_slice,
    report_beside,
    write_whole,
)
from lmeval_dispersion.store import is_store

_MOST_SLICES = 20  # of one table on a terminal
_DATA = (".parquet", ".csv", ".jsonl")  # files that `rank` writes every document to


def add_audit_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``dispersion audit``."""
    _add_run(parser)
    add_slice(parser)
    add_metrics(parser)
    add_output(parser)
    add_seed(parser)
    add_examples(parser, "RUN -o report.html", "RUN --slice category --layer last --metrics all")


def run_audit(args: argparse.Namespace) -> int:
    """Run ``dispersion audit``; 3 where a part of the report is missing."""
    output = Output.of(args)
    with _doing(f"auditing {args.run}", args.quiet):
        report = audit_report(
            read_run(args.run, args.layer), slices=args.slice, metrics=args.metrics, seed=args.seed
        )
    output.write(audit_document(report, most_slices=_MOST_SLICES if output.format == "table" else None))
    parts = ("mixtures", "calibration", "paper_protocol", "ranking")
    missing = [name for name in parts if "missing" in report[name]]
    for name in missing:
        print(
            f"dispersion audit: {name.replace('_', ' ')} not available: {report[name]['missing']}",
            file=sys.stderr,
        )
    return 3 if missing else 0


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``dispersion rank``."""
    parser.add_argument(
        "source",
        metavar="RUN|FILE",
        help="folder of a run, or a text, JSONL or parquet file (then with --model)",
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="Hub id or folder of the model to run over texts (default: none)"
    )
    add_layer(parser, default="the run's own; last for texts")
    add_column(parser)
    add_output(parser)
    add_seed(parser)
    add_examples(
        parser,
        "RUN -o ranked.parquet",
        "questions.jsonl --model Qwen/Qwen2.5-0.5B --column question",
        more=f"-o with the suffix {', '.join(_DATA)} writes every document and prints the report.",
    )


def run_rank(args: argparse.Namespace) -> int:
    """Run ``dispersion rank``."""
    if args.output is not None and args.output.suffix in _DATA:
        output, file = report_beside(args, "csv")
    else:
        output, file = Output.of(args), None
    with tempfile.TemporaryDirectory() as folder:
        if is_store(args.source):
            run = read_run(args.source, args.layer)
        elif args.model is None and not Path(args.source).exists():
            raise UsageError(f"expected a run or a file of texts, got {args.source}, which does not exist")
        elif args.model is None:
            raise UsageError(
                f"{args.source} is no run; texts need a model: dispersion rank {args.source} --model MODEL"
            )
        else:
            run = _run_of_texts(args, Path(folder))
        frame = ranked_documents(run)
        if file is not None:
            write_whole(args.output, _file_content(frame, args.output.suffix))
            output.say(f"{len(frame)} documents, low tail first: {args.output}")
        rows: Any = frame.to_dict("records")
        tail = hard_tail(run, seed=args.seed)
        output.write(ranking_document(run.store.model, rows, part_of(ranking_report, run), tail))
    return 0


def _file_content(frame: pd.DataFrame, suffix: str) -> bytes:
    if suffix == ".parquet":
        return bytes(frame.to_parquet(None, index=False))
    if suffix == ".csv":
        return frame.to_csv(None, index=False).encode()
    return str(frame.to_json(None, orient="records", lines=True, force_ascii=False)).encode()


def _run_of_texts(args: argparse.Namespace, folder: Path) -> Run:
    from lmeval_dispersion.model.loading import load_model
    from lmeval_dispersion.model.texts import Texts
    from lmeval_dispersion.text_run import write_text_run

    texts = Texts(args.source, column=args.column)
    with _doing(f"running {args.model} over {args.source}", args.quiet):
        write_text_run(load_model(args.model), texts, folder / "store", layers=[args.layer or "last"])
    return read_run(folder / "store")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", help="folder of a finished run (its store), or of several of one model"
    )
    add_layer(parser)


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
    "rank": (add_rank_arguments, run_rank),
}
