"""``dispersion watch``: a watched run as a report, which may follow the run."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.options import Output, add_examples, add_output
from lmeval_dispersion.report import Chart, Column, Document, Note, Part, Section, Table, render
from lmeval_dispersion.statistics import LEVEL
from lmeval_dispersion.watching.records import FORMAT, MEASURES, change, read_records

if TYPE_CHECKING:
    import altair

_SHOWN = 20  # measurements of a table on a terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``dispersion watch``."""
    parser.add_argument("folder", metavar="FOLDER", help="output folder of a watched training run")
    parser.add_argument(
        "--follow",
        type=_seconds,
        metavar="SECONDS",
        help="write the page again every so many seconds, until interrupted (default: once)",
    )
    add_output(parser)
    add_examples(parser, "OUTPUT_FOLDER", "OUTPUT_FOLDER -o watch.html --follow 30")


def run(args: argparse.Namespace) -> int:
    """Run ``dispersion watch``."""
    output = Output.of(args)
    if args.follow and (output.path is None or output.format != "html"):
        raise UsageError("--follow writes a page again and again: name it with -o FILE.html")
    if not args.follow:
        output.write(watch_document(read_records(args.folder), args.folder))
        return 0
    output.say(f"following {args.folder}; open {output.path}, end with Ctrl-C")
    before: tuple[int, int] | None = None
    while True:
        records = read_records(args.folder)
        seen = (len(records), records[-1]["step"])
        if seen != before:
            text = render(watch_document(records, args.folder), "html")
            again = f'<meta http-equiv="refresh" content="{args.follow}">'
            output.write_text(text.replace("<head>", f"<head>\n{again}", 1))
            before = seen
        time.sleep(args.follow)


def watch_document(records: Sequence[Mapping[str, Any]], folder: str | Path) -> Document:
    """A watched run as a report; ``records`` are those of :func:`read_records`."""
    domains = list(records[-1]["domains"])
    rows = [_row(record, domains) for record in records]
    columns = [Column("step", "Step", "d")]
    for name in domains:
        columns.append(Column(f"gap_{name}", f"G {name}", ".4f", error=f"gap_{name}_se"))
    columns += [
        Column("dispersion", "Dispersion", ".4f", drop=1, hint="Of the fixed texts' last tokens."),
        Column(
            "condensation", "Condensation", ".4f", drop=2, hint="Mean similarity of the tokens of one text."
        ),
        Column("effective_rank", "Effective rank", ".1f", drop=3, hint="Of all tokens of the fixed texts."),
        Column("saved", "Saved", drop=4),
    ]
    warnings = [f"Step {record['step']}: {text}." for record in records for text in record["warnings"]]
    charts: list[Part] = [_chart(rows, f"gap_{name}", f"G of {name}", f"gap_{name}_se") for name in domains]
    charts += [
        _chart(rows, name, name.replace("_", " ").capitalize())
        for name in MEASURES
        if sum(row.get(name) is not None for row in rows) > 1
    ]
    first = max(0, len(rows) - _SHOWN)
    table = Table(rows, columns, "Every measurement", excerpt=range(first, len(rows)) if first else ())
    return Document(
        title=f"Watched training: {folder}",
        answer=[*(_sentence(records, name, len(domains)) for name in domains), _warned(warnings)],
        sections=[
            Section("", [*map(partial(Note, kind="warning"), warnings), *(charts if len(rows) > 1 else [])]),
            Section("Measurements", [table]),
        ],
        limits=[
            "Errors are those of the choice of tokens: they say nothing of another seed of the training.",
            "G compares a model with itself; a rise is no proof that its accuracy rose.",
        ],
        rows=rows,
        libraries=("numpy",),
        guide="docs/reference/watching.md",
    )


def _sentence(records: Sequence[Mapping[str, Any]], domain: str, domains: int) -> str:
    """How G of a domain moved from the first measurement to the last."""
    last = records[-1]
    known = [record for record in records if domain in record["domains"]]
    now = last["domains"][domain]
    start = f"G of {domain} is {now['gap']:.4f} ± {now['se']:.4f} at step {last['step']}"
    if len(known) < 2:
        return f"{start}, the only measurement."
    difference = change(last, known[0], domain)
    since = f"since step {known[0]['step']}"
    moved = f"{difference.mean:+.4f}, paired error {difference.se:.4f}"
    if difference.p >= (1 - LEVEL) / domains:
        return f"{start}; a change {since} is not shown ({moved})."
    return f"{start}; it {'rose' if difference.mean > 0 else 'fell'} {since} ({moved})."


def _warned(warnings: Sequence[str]) -> str:
    if not warnings:
        return "No fall over the saves is larger than its paired error allows."
    return f"{len(warnings)} warning{'s' if len(warnings) > 1 else ''} of falls; the last: {warnings[-1]}"


def _row(record: Mapping[str, Any], domains: Sequence[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"format": FORMAT, "step": record["step"]}
    for name in domains:
        found = record["domains"].get(name, {})
        row |= {f"gap_{name}": found.get("gap"), f"gap_{name}_se": found.get("se")}
    row |= {name: record.get(name) for name in MEASURES}
    return {**row, "saved": record["saved"], "seconds": record["seconds"]}


def _chart(rows: Sequence[Mapping[str, Any]], name: str, title: str, error: str = "") -> Chart:
    values = [row for row in rows if row.get(name) is not None]
    first, last = values[0], values[-1]
    return Chart(
        partial(_lines, values, name, title, error),
        f"{title} by step",
        f"{title}: {first[name]:.4f} at step {first['step']}, {last[name]:.4f} at step {last['step']}.",
        "The band is ± one standard error over tokens; for changes the error is smaller." if error else "",
    )


def _lines(rows: Sequence[Mapping[str, Any]], name: str, title: str, error: str) -> altair.TopLevelMixin:
    import altair as alt

    data = [
        {
            "step": row["step"],
            "value": row[name],
            **({"low": row[name] - row[error], "high": row[name] + row[error]} if error else {}),
        }
        for row in rows
    ]
    base = alt.Chart(alt.Data(values=data)).encode(x=alt.X("step:Q", title="Step"))
    y = alt.Y("value:Q", title=title).scale(zero=False)
    line = base.mark_line(point=True).encode(y=y, tooltip=["step:Q", "value:Q"])
    if not error:
        return line.properties(width=640, height=200)
    band = base.mark_area(opacity=0.2).encode(y=alt.Y("low:Q", title=title).scale(zero=False), y2="high:Q")
    return alt.layer(band, line).properties(width=640, height=240)


def _seconds(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("expected at least 1 second")
    return value


COMMANDS = {"watch": (add_arguments, run)}
