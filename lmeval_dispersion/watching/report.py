"""The record of a watched run, one JSON line per measurement, and ``dispersion watch``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from lmeval_screener.figures import FigureDifference, paired_difference

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.options import add_examples, add_output
from lmeval_dispersion.output import Output
from lmeval_dispersion.report import Chart, Col, Report, Table
from lmeval_dispersion.report.vega import course
from lmeval_dispersion.statistics import LEVEL

FORMAT = "dispersion-watch/2"  # 1 had warnings too
FILE = "dispersion_watch.jsonl"
MEASURES = ("dispersion", "condensation", "effective_rank")
_SHOWN = 12  # measurements in a terminal's table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``dispersion watch``."""
    parser.add_argument("folder", metavar="FOLDER", help="output folder of a watched training run")
    add_output(parser)
    add_examples(parser, "OUTPUT_FOLDER", "OUTPUT_FOLDER -o watch.html")


def run(args: argparse.Namespace) -> int:
    """Run ``dispersion watch``; returns the exit code 0, or raises as :meth:`Watched.of`."""
    output = Output.of(args)
    output.write(Watched.of(args.folder).document())
    return 0


@dataclass(frozen=True)
class Measurement:
    """A measurement of a domain's G; the change is None at the first, the spread without fixed texts."""

    step: Annotated[int, Col("Step")]
    domain: Annotated[str, Col("Domain")]
    gap: Annotated[float, Col("G", ".4f", error="se")]
    se: float
    change: Annotated[
        float | None,
        Col(
            "Since the first",
            ".4f",
            error="change_se",
            dots="both",
            hint="± one paired error over tokens",
        ),
    ]
    change_se: float | None
    change_p: float | None  # two-sided p-value of no change
    dispersion: Annotated[
        float | None, Col("Dispersion", ".4f", hint="of the last tokens of the fixed texts")
    ]
    condensation: Annotated[
        float | None, Col("Condensation", ".4f", hint="mean similarity of the tokens of one text")
    ]
    effective_rank: Annotated[
        float | None, Col("Effective rank", ".1f", hint="of all tokens of the fixed texts")
    ]
    saved: Annotated[bool, Col("Saved", drop=1)]


@dataclass(frozen=True, repr=False)
class Watched(Report):
    """A watched run's measurements of each domain, in the order of their steps."""

    template: ClassVar[str] = "watched.jinja"
    schema: ClassVar[str] = "dispersion-watched/1"
    libraries: ClassVar[Sequence[str]] = ("numpy",)
    guide: ClassVar[str] = "docs/reference/watching.md"
    each: ClassVar[str] = "measurements"

    folder: str
    measurements: Sequence[Measurement]

    @classmethod
    def of(cls, folder: str | Path) -> Watched:
        """Build it from a run's output folder; raises as :func:`read_records` and :func:`change`."""
        records = read_records(folder)
        rows = [
            _measurement(record, name, records)
            for name in records[-1]["domains"]
            for record in records
            if name in record["domains"]
        ]
        return cls(str(folder), rows)

    def domains(self) -> dict[str, list[Measurement]]:
        """Each domain's measurements, in the order of their steps."""
        names = dict.fromkeys(row.domain for row in self.measurements)
        return {name: [row for row in self.measurements if row.domain == name] for name in names}

    def tables(self) -> dict[str, Table]:
        """Each domain's G and its change, then the spread of the fixed batch."""
        domains = self.domains()
        tables = {}
        for name, rows in domains.items():
            key = "measurements" if len(domains) == 1 else name
            tables[name] = _table(rows, f"G of {name}", key, ("domain", *MEASURES))
        hidden = ("domain", "gap", "change", "saved")
        return tables | {
            "spread": _table(next(iter(domains.values())), "The fixed texts", "spread", hidden)
        }

    def rows(self) -> list[dict[str, Any]]:
        """Every measurement."""
        return [vars(row) for row in self.measurements]

    def charts(self) -> dict[str, Chart]:
        """Each domain's change of G with its paired error, and the spread of the fixed batch."""
        charts = {}
        for name, rows in self.domains().items():
            if len(rows) > 1:
                points = [(row.step, row.change or 0.0, row.change_se or 0.0) for row in rows]
                charts[f"gap_{name}"] = _chart(
                    points, f"G of {name}, change since step {rows[0].step}"
                )
        first = next(iter(self.domains().values()))
        for measure in MEASURES:
            points = [
                (row.step, value, 0.0)
                for row in first
                if (value := getattr(row, measure)) is not None
            ]
            if len(points) > 1:
                charts[measure] = _chart(points, measure.replace("_", " ").capitalize())
        return charts

    def context(self) -> dict[str, Any]:
        """Template values: ``ends``, each domain's first and last measurement, and whether G moved (5 %)."""
        ends = []
        for rows in self.domains().values():
            p = rows[-1].change_p
            ends.append(
                (rows[0], rows[-1], p is not None and p < (1 - LEVEL) / len(self.domains()))
            )
        return {"ends": ends}


def _table(rows: Sequence[Measurement], caption: str, name: str, hide: Sequence[str]) -> Table:
    excerpt = range(len(rows) - _SHOWN, len(rows)) if len(rows) > _SHOWN else ()
    return Table.of(rows, caption, name=name, excerpt=excerpt, hide=hide)


def _measurement(
    record: Mapping[str, Any], domain: str, records: Sequence[Mapping[str, Any]]
) -> Measurement:
    first = next(earlier for earlier in records if domain in earlier["domains"])
    moved = None if first is record else change(record, first, domain)
    return Measurement(
        step=record["step"],
        domain=domain,
        gap=record["domains"][domain]["gap"],
        se=record["domains"][domain]["se"],
        change=moved and moved.mean,
        change_se=moved and moved.se,
        change_p=moved and moved.p,
        saved=record["saved"],
        **{name: record.get(name) for name in MEASURES},
    )


def _chart(points: Sequence[tuple[int, float, float]], caption: str) -> Chart:
    """A measure at each step with its error; 0 where none is known."""
    rows = [
        {
            "step": step,
            "name": f"step {step}",
            "value": value,
            "low": value - reach,
            "high": value + reach,
        }
        for step, value, reach in ((step, value, 2 * error) for step, value, error in points)
    ]
    (start, before, _), (end, after, _) = points[0], points[-1]
    return Chart(
        course(rows, "value", None, 4),
        caption,
        f"{before:.4f} at step {start}, {after:.4f} at step {end}.",
        "Lines: two paired standard errors over tokens, as in a screening."
        if any(error for *_, error in points)
        else "",
    )


def append_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON line, after ending a line that a killed process left incomplete; make the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    torn = False
    if path.exists() and path.stat().st_size:
        with path.open("rb") as stream:
            stream.seek(-1, 2)
            torn = stream.read(1) != b"\n"
    with path.open("a", encoding="utf-8") as stream:
        stream.write(("\n" if torn else "") + json.dumps(record, allow_nan=False) + "\n")


def read_records(folder: str | Path) -> list[dict[str, Any]]:
    """A run's measurements by step, a resumed run's in place of older ones; UsageError if there are none."""
    path = Path(folder)
    path = path / FILE if path.is_dir() else path
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"expected the folder of a watched run, with {FILE} in it, got {folder} ({reason}); add "
            "DispersionCallback to the trainer, or name another folder"
        ) from None
    records: list[dict[str, Any]] = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # an incomplete line of a killed process
        if not (
            isinstance(record, dict) and {"format", "step", "domains", "saved"} <= record.keys()
        ):
            raise UsageError(
                f"expected lines of {FORMAT} in {path}, got {line[:60]!r}; name another folder"
            )
        while records and records[-1]["step"] >= record["step"]:
            records.pop()
        records.append(record)
    if not records:
        raise UsageError(
            f"{path} holds no measurement yet; wait for the first log, evaluation or save"
        )
    return records


def change(later: Mapping[str, Any], earlier: Mapping[str, Any], domain: str) -> FigureDifference:
    """G in ``later`` minus that in ``earlier``, with its paired error; UsageError for other tokens."""
    a, b = later["domains"][domain], earlier["domains"][domain]
    if a["tokens"] != b["tokens"]:
        raise UsageError(
            f"steps {earlier['step']} and {later['step']} were measured on other tokens of {domain}; "
            "give the resumed run another folder"
        )
    sides = (
        np.array(a[f"left_out_{side}"]) - np.array(b[f"left_out_{side}"])
        for side in ("domain", "reference")
    )
    return paired_difference(a["gap"] - b["gap"], *sides)


COMMANDS = {"watch": (add_arguments, run)}
