"""The commands ``dispersion audit``, ``calibrate``, ``predict`` and ``rank``."""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from lmeval_dispersion.audit import calibrator as calibrators
from lmeval_dispersion.audit.grouping import by_column
from lmeval_dispersion.audit.mixtures import SIZE
from lmeval_dispersion.audit.ranked import (
    FORMATS,
    check_output,
    check_writable,
    ranked_documents,
    save_ranked,
)
from lmeval_dispersion.audit.ranking import ranking_report
from lmeval_dispersion.audit.report import audit_report, report_json
from lmeval_dispersion.audit.run import Run, read_run
from lmeval_dispersion.audit.tail import hard_tail
from lmeval_dispersion.audit.text import ranking_text, report_text, tail_text, text_table, wrapped
from lmeval_dispersion.errors import DispersionError, UsageError
from lmeval_dispersion.store import is_store

_AUDIT_FORMATS, _PREDICT_FORMATS = ("table", "json", "csv", "html"), ("table", "json", "csv")
_HEAD = 20  # documents of the low tail that `rank` prints


def add_audit_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``dispersion audit``."""
    _add_run(parser)
    parser.add_argument(
        "--slice",
        action="append",
        default=[],
        metavar="COLUMN",
        help="also slice by this column of the documents; may be repeated",
    )
    _add_output(parser, _AUDIT_FORMATS)
    _add_seed(parser)


def run_audit(args: argparse.Namespace) -> int:
    """Run ``dispersion audit``; 3 where a part of the report is missing."""
    if args.output:
        check_writable(args.output)
    with _doing(f"auditing {args.run}"):
        report = audit_report(read_run(args.run, args.layer), slices=args.slice, seed=args.seed)
        chosen = _format(args, _AUDIT_FORMATS)
        if chosen == "json":
            text = report_json(report)
        elif chosen == "csv":
            text = _slices_csv(report)
        elif chosen == "html":
            from lmeval_dispersion.audit.report_page import report_html

            text = report_html(report)
        else:
            text = report_text(report)
    _emit(text, args.output)
    missing = [name for name in ("mixtures", "calibration", "ranking") if "missing" in report[name]]
    for name in missing:
        print(f"dispersion audit: {name} not available: {report[name]['missing']}", file=sys.stderr)
    return 3 if missing else 0


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``dispersion calibrate``."""
    _add_run(parser)
    parser.add_argument("-o", "--output", required=True, help="the calibrator to write, JSON")
    parser.add_argument(
        "--slice-size",
        type=_at_least_20,
        default=SIZE,
        help=f"documents of the slices to be predicted later (default: {SIZE})",
    )
    _add_seed(parser)


def run_calibrate(args: argparse.Namespace) -> int:
    """Run ``dispersion calibrate``."""
    if args.output:
        check_writable(args.output)
    with _doing(f"calibrating on {args.run}"):
        run = read_run(args.run, args.layer)
        found = calibrators.fitted_calibrator(run, size=args.slice_size, seed=args.seed)
    calibrators.save_calibrator(args.output, found)
    rows = [{"regression": kind, "mae": mae} for kind, mae in found["validation_mae"].items()]
    print(
        text_table(
            rows,
            [("regression", "regression", ""), ("mae", "mean absolute error on validation (points)", ".2f")],
        )
    )
    half = 100 * found["interval"]["half_width"]
    print(f"\n{found['regression']['kind']} chosen; predictions are ± {half:.1f} points (95 %)")
    print(_worth(found["validation_mae"][found["regression"]["kind"]], found["blind_mae"]))
    if found["slice_size"] < args.slice_size:
        print(
            f"slices of {found['slice_size']} documents instead of {args.slice_size}: "
            "the labelled documents allow no more",
            file=sys.stderr,
        )
    print(f"next: dispersion predict {args.output} RUN", file=sys.stderr)
    return 0


def add_predict_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``dispersion predict``."""
    parser.add_argument("calibrator", help="file of `dispersion calibrate`")
    parser.add_argument("run", help="folder of the run whose accuracy is to be estimated")
    parser.add_argument("--by", default="subject", metavar="COLUMN", help="slices (default: subject)")
    _add_output(parser, _PREDICT_FORMATS)
    _add_seed(parser)


def run_predict(args: argparse.Namespace) -> int:
    """Run ``dispersion predict``; 3 where some slices are too small."""
    if args.output:
        check_writable(args.output)
    found = calibrators.read_calibrator(args.calibrator)
    run = _run_for(found, args.run)
    groups = by_column(run, args.by)
    result = calibrators.predictions(found, run, groups if len(groups) > 1 else [], seed=args.seed)
    rows = result["slices"]
    chosen = _format(args, _PREDICT_FORMATS)
    if chosen == "json":
        text = report_json(result)
    elif chosen == "csv":
        text = _csv(pd.DataFrame(rows))
    else:
        columns = [
            ("slice", args.by, ""),
            ("documents", "documents", "d"),
            ("dispersion", "dispersion", ".4f"),
            ("predicted", "predicted", ".3f"),
            ("low", "95 % from", ".3f"),
            ("high", "to", ".3f"),
            ("outside_calibrated_range", "outside range", ".2f"),
            ("true", "true", ".3f"),
            ("reason", "", ""),
        ]
        labelled = found["labelled"]
        about = (
            f"{result['regression']} on slices of {result['slice_size']} documents; the "
            f"{labelled['documents']} labelled documents had an accuracy of {labelled['accuracy']:.3f}. "
            "Intervals hold for mixtures of such documents, not for other ones. "
            + _worth(result["validation_mae"], result["blind_mae"])
        )
        text = f"{text_table(rows, columns)}\n\n{wrapped(about)}"
    _emit(text, args.output)
    return 3 if any(row["reason"] for row in rows) else 0


def _worth(error: float, blind: float) -> str:
    """What a calibration is worth beside guessing the middle of all mixtures."""
    text = f"On mixtures held out it is {error:.1f} points off, a guess blind to dispersion {blind:.1f}"
    return f"{text}." if error < 0.8 * blind else f"{text}: dispersion says little about accuracy here."


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``dispersion rank``."""
    parser.add_argument(
        "source", help="folder of a run, or a text, JSONL or parquet file (then with --model)"
    )
    parser.add_argument("--model", help="Hub id or folder of the model to run over the texts")
    parser.add_argument("--layer", help="layer of the vectors (default: the store's own; last for texts)")
    parser.add_argument("--column", default="text", help="field with the text (default: text)")
    parser.add_argument(
        "-o", "--output", help=f"write every document with its rank; by suffix one of {', '.join(FORMATS)}"
    )
    _add_seed(parser)


def run_rank(args: argparse.Namespace) -> int:
    """Run ``dispersion rank``."""
    if args.output:
        check_output(args.output)
    with tempfile.TemporaryDirectory() as folder:
        if is_store(args.source):
            run = read_run(args.source, args.layer)
        elif args.model is None:
            raise UsageError(
                f"{args.source} is no run; texts need a model: dispersion rank {args.source} --model MODEL"
            )
        else:
            run = _embedded(args, Path(folder))
        frame = ranked_documents(run)
        if args.output:
            save_ranked(frame, args.output)
            print(f"{len(frame)} documents, low tail first: {args.output}", file=sys.stderr)
        _print_ranking(run, frame, args.seed)
    return 0


def _print_ranking(run: Run, frame: pd.DataFrame, seed: int) -> None:
    head = frame.head(_HEAD)
    rows: Any = head.assign(text=head["text"].map(_short)).to_dict("records")
    columns = [
        ("rank", "rank", "d"),
        ("subject", "subject", ""),
        ("doc_id", "doc_id", "d"),
        ("contribution", "contribution", ".4f"),
        ("correct", "correct", ".2f"),
        ("text", "text", ""),
    ]
    print(f"the {len(rows)} documents of lowest contribution of {len(frame)}\n{text_table(rows, columns)}\n")
    try:
        print(f"{ranking_text(ranking_report(run))}\n")
    except DispersionError as error:
        print(f"{wrapped(f'No ranking quality: {error}.')}\n")
    print(tail_text(hard_tail(run, run.vectors.contributions(), seed=seed)))


def _embedded(args: argparse.Namespace, folder: Path) -> Run:
    from lmeval_dispersion.audit.embed import store_texts
    from lmeval_dispersion.model.loading import load_model
    from lmeval_dispersion.model.texts import Texts

    texts = Texts(args.source, column=args.column)
    with _doing(f"running {args.model} over {args.source}"):
        store_texts(load_model(args.model), texts, folder / "store", layers=[args.layer or "last"])
    return read_run(folder / "store")


def _run_for(found: dict[str, Any], path: str) -> Run:
    """The run, in the calibrator's layer; another model is refused before its vectors are read."""
    from lmeval_dispersion.audit.run import prepared_run
    from lmeval_dispersion.store import read_store

    store = read_store(path)
    if store.model == found["model"] and found["layer"] not in store.layers:
        raise UsageError(
            f"this calibrator was fitted for layer {found['layer']!r}, and the run has "
            f"{', '.join(store.layers)}; run it with that layer, or calibrate on another"
        )
    return prepared_run(store, found["layer"] if found["layer"] in store.layers else None)


def _slices_csv(report: dict[str, Any]) -> str:
    frames = [
        pd.DataFrame([{"by": name, **row} for row in rows])
        for name, rows in (
            ("all", [report["overall"]]),
            *((name, table["rows"]) for name, table in report["slices"].items()),
        )
    ]
    return _csv(pd.concat(frames, ignore_index=True) if len(frames) > 1 else frames[0])


def _csv(frame: pd.DataFrame) -> str:
    stream = io.StringIO()
    frame.to_csv(stream, index=False, float_format="%.7g")
    return stream.getvalue().rstrip("\n")


def _short(text: object) -> str:
    line = " ".join(str(text).split()) if isinstance(text, str) else ""
    return line if len(line) <= 60 else f"{line[:59]}…"


def _emit(text: str, output: str | None) -> None:
    if output is None:
        print(text)
        return
    Path(output).write_text(text + "\n", "utf-8")
    print(f"written: {output}", file=sys.stderr)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="folder of a finished run (its store), or of several of one model")
    parser.add_argument("--layer", help="layer of the vectors (default: the store's own)")


def _add_output(parser: argparse.ArgumentParser, formats: tuple[str, ...]) -> None:
    parser.add_argument("--format", choices=formats, help="default: by the suffix of --output, else table")
    parser.add_argument("-o", "--output", help="write to this file instead of the screen")


def _format(args: argparse.Namespace, formats: tuple[str, ...]) -> str:
    suffix = Path(args.output or "").suffix.removeprefix(".")
    return str(args.format or (suffix if suffix in formats else "table"))


def _add_seed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="seed of all draws (default: 0)")


def _at_least_20(text: str) -> int:
    value = int(text)
    if value < 20:
        raise argparse.ArgumentTypeError("expected at least 20 documents a slice")
    return value


@contextmanager
def _doing(what: str) -> Iterator[None]:
    """Say on a terminal's stderr what takes a while."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        yield


COMMANDS = {
    "audit": (add_audit_arguments, run_audit),
    "calibrate": (add_calibrate_arguments, run_calibrate),
    "predict": (add_predict_arguments, run_predict),
    "rank": (add_rank_arguments, run_rank),
}
