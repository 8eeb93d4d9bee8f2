"""``dispersion compare``: two runs side by side, whatever kind of run they are.

Stores of harness runs go to the audit, folders of laboratory runs to the laboratory.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from lmeval_dispersion.errors import UsageError

FORMATS = ("table", "json", "csv", "html")
FORMAT = "dispersion-comparison/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``dispersion compare``."""
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="folders of two runs; the first is the baseline"
    )
    parser.add_argument("--format", choices=FORMATS, help="default: the suffix of --output, else table")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write there, not to standard output"
    )
    stores = parser.add_argument_group("runs of the harness")
    stores.add_argument("--by", default="subject", metavar="COLUMN", help="slices (default: subject)")
    stores.add_argument("--layer", help="layer of the vectors (default: the store's own)")


def run(args: argparse.Namespace) -> int:
    """Run ``dispersion compare``."""
    if len(args.runs) < 2:
        raise UsageError(f"expected two runs, got {len(args.runs)}")
    if args.output is not None and not args.output.absolute().parent.is_dir():
        raise UsageError(f"expected --output in an existing folder, got {args.output}")
    suffix = args.output.suffix.removeprefix(".") if args.output else ""
    output_format = args.format or (suffix if suffix in FORMATS else "table")
    for path in args.runs:
        if not Path(path).is_dir():
            raise UsageError(f"expected the folder of a run, got {path}, which is none; check the path")
    laboratory = [is_laboratory_run(path) for path in args.runs]
    if all(laboratory):
        text = _laboratory(args.runs, output_format)
    elif any(laboratory):
        kinds = ", ".join("laboratory" if lab else "harness" for lab in laboratory)
        raise UsageError(f"expected runs of one kind, got {kinds}")
    else:
        text = _stores(args, output_format)
    if args.output is None:
        sys.stdout.write(text)
    else:
        args.output.write_text(text, encoding="utf-8")
        print(f"wrote {args.output}", file=sys.stderr)
    return 0


def is_laboratory_run(folder: str | Path) -> bool:
    """Whether ``folder`` is a run of the laboratory, complete or not."""
    try:
        manifest = json.loads((Path(folder) / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and str(manifest.get("format", "")).startswith("dispersion-lab/")


def _laboratory(runs: list[str], output_format: str) -> str:
    if len(runs) != 2:
        raise UsageError(f"expected two laboratory runs, got {len(runs)}; compare them pair by pair")
    from lmeval_dispersion.laboratory.comparison import compared
    from lmeval_dispersion.laboratory.report import records, text_table

    frame = compared(runs[0], runs[1])
    if output_format == "json":
        document = {"format": FORMAT, "first": runs[0], "second": runs[1], "rows": records(frame)}
        return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    if output_format == "csv":
        return str(frame.to_csv(index=False, float_format="%.9g"))
    if output_format == "html":
        from lmeval_dispersion.compare_page import laboratory_page
        from lmeval_dispersion.laboratory.report_page import page_columns

        return laboratory_page(frame, page_columns(frame), runs[0], runs[1]).html()
    return f"{runs[1]} minus {runs[0]}\n\n{text_table(frame)}\n"


def _stores(args: argparse.Namespace, output_format: str) -> str:
    from lmeval_dispersion.audit.compare import compared_stores, comparison_text
    from lmeval_dispersion.audit.report import report_json

    found: dict[str, Any] = compared_stores(args.runs, by=args.by, layer=args.layer)
    if output_format == "json":
        return report_json(found) + "\n"
    if output_format == "table":
        return comparison_text(found) + "\n"
    rows = [{"run": other["run"], **row} for other in found["others"] for row in other["slices"]]
    if output_format == "csv":
        return str(pd.DataFrame(rows).to_csv(index=False, float_format="%.9g"))
    from lmeval_dispersion.compare_page import stores_page

    return stores_page(found, rows).html()


COMMANDS = {"compare": (add_arguments, run)}
