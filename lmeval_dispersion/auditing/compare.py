"""Runs of several models or checkpoints on the same documents: paired differences a slice.

Documents are matched by task and id, and must be the same ones (their hashes agree). The difference of two
dispersions over shared documents has the jackknife error of the differences of leave-one-out values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from lmeval_dispersion.auditing.figures import RunReport, both_ends, dots
from lmeval_dispersion.auditing.run import Rows, Run, read_run
from lmeval_dispersion.auditing.slices import Slice, by_column
from lmeval_dispersion.errors import MixedStoresError, UsageError
from lmeval_dispersion.geometry.dispersion import left_out
from lmeval_dispersion.report import Chart, Col, Table
from lmeval_dispersion.report.document import fields_of
from lmeval_dispersion.statistics import NORMAL_975, jackknife_se, normal_bounds
from lmeval_dispersion.store import check_comparable

_KEY = ["task", "doc_id"]
_WIDE = ("dispersion", "dispersion_low", "dispersion_high", "accuracy", "accuracy_low", "accuracy_high")


@dataclass(frozen=True)
class Difference:
    """One slice of a run beside the same slice of the first run; NaN where undefined."""

    slice: Annotated[str, Col("Slice")]
    documents: Annotated[int, Col("Documents", "d", drop=2, short="Docs")]
    dispersion: Annotated[float, Col("Dispersion", ".4f", drop=4)] = math.nan
    dispersion_baseline: float = math.nan
    dispersion_difference: Annotated[
        float, Col("Difference", "+.4f", dots="both", reach="dispersion_reach")
    ] = math.nan
    dispersion_reach: float = math.nan
    dispersion_low: Annotated[float, Col("95 % from", "+.4f", drop=5)] = math.nan
    dispersion_high: Annotated[float, Col("to", "+.4f", drop=5)] = math.nan
    accuracy: Annotated[float, Col("Accuracy", ".3f", drop=3)] = math.nan
    accuracy_baseline: float = math.nan
    accuracy_difference: Annotated[float, Col("Difference", "+.3f", error="accuracy_reach")] = math.nan
    accuracy_reach: float = math.nan
    accuracy_low: Annotated[float, Col("95 % from", "+.3f", drop=1)] = math.nan
    accuracy_high: Annotated[float, Col("to", "+.3f", drop=1)] = math.nan
    reason: Annotated[str | None, Col("Remark")] = None


@dataclass(frozen=True)
class Compared:
    """One run beside the first; the slices begin with all documents."""

    run: str
    layer: str
    slices: Sequence[Difference]


@dataclass(frozen=True, repr=False)
class Comparison(RunReport):
    """Runs beside the first of them, over the documents that all share.

    Attributes:
        left_out: Documents of each run that others lack.
        notes: Other differences between the runs.
    """

    template = "comparison.jinja"
    schema = "dispersion-comparison/2"

    baseline: str
    layer: str
    by: str
    documents: int
    left_out: Sequence[int]
    others: Sequence[Compared]
    notes: Sequence[str]
    _short: bool = False

    def rows(self) -> list[Mapping[str, Any]]:
        """Every slice of every other run."""
        return [{"run": other.run, **fields_of(row)} for other in self.others for row in other.slices]

    def tables(self) -> dict[str, Table]:
        """The slices of each run, all documents first, then by their difference."""
        return {f"run-{i}": self._table(other) for i, other in enumerate(self.others)}

    def _table(self, other: Compared) -> Table:
        whole, *parts = other.slices
        parts.sort(key=lambda row: -row.dispersion_difference if row.reason is None else math.inf)
        return Table.of(
            [whole, *parts],
            f"{other.run} (layer {other.layer}) minus {self.baseline}",
            headings={"slice": self.by.capitalize(), "dispersion_difference": "Δ dispersion",
                      "accuracy_difference": "Δ accuracy ± 95 %"},
            hide=_WIDE if self._short else (),
            excerpt=both_ends(len(other.slices)) if self._short else (),
        )  # fmt: skip

    def charts(self) -> dict[str, Chart]:
        """Differences of dispersion with their intervals, a row a slice; none where none is known."""
        charts = {}
        for i, other in enumerate(self.others):
            rows = [row for row in other.slices if math.isfinite(row.dispersion_low)]
            clear = sum(row.dispersion_low > 0 or row.dispersion_high < 0 for row in rows)
            if rows:
                bounds = ("dispersion_low", "dispersion_high")
                title = "Difference, with 95 % interval"
                charts[f"run-{i}"] = Chart(
                    dots(rows, "slice", "dispersion_difference", bounds, title, line=0.0),
                    "Difference of dispersion, slice by slice; the dashed line is no difference",
                    f"{clear} of {len(rows)} intervals leave out 0; by chance about one in twenty does.",
                )
        return charts


def compare_runs(
    paths: Sequence[str | Path], *, by: str = "subject", layer: str | None = None, short: bool = False
) -> Comparison:
    """Runs beside the first of them, with paired intervals: what ``dispersion compare`` reports.

    Args:
        paths: Folders of two runs or more.
        by: Column of the documents that makes the slices.
        layer: Layer of all of them; default: each store's own.
        short: Whether texts show only the slices that differ most.

    Raises:
        UsageError: Fewer than two runs.
        MixedStoresError: No shared documents, or other prompts or documents under the same ids.
    """
    if len(paths) < 2:
        raise UsageError(f"comparing needs two runs or more, got {len(paths)}")
    runs = [read_run(path, layer) for path in paths]
    rows = shared_rows(runs)
    first = runs[0]
    everything = Slice("all documents", np.arange(len(rows[0])))
    parts = [Slice(part.name, np.flatnonzero(np.isin(rows[0], part.rows))) for part in by_column(first, by)]
    names = _names(runs, paths)
    return Comparison(
        baseline=names[0],
        layer=first.layer,
        by=by,
        documents=len(rows[0]),
        left_out=[len(run.vectors) - len(rows[0]) for run in runs],
        others=[
            Compared(
                name,
                run.layer,
                [_difference(part, first, rows[0], run, shared) for part in (everything, *parts)],
            )
            for name, run, shared in zip(names[1:], runs[1:], rows[1:], strict=True)
        ],
        notes=list(_notes(runs)),
        _short=short,
    )


def shared_rows(runs: Sequence[Run]) -> list[Rows]:
    """For every run the rows of the documents that all of them have, in one order."""
    frames = [
        run.documents[[*_KEY, "doc_hash"]].assign(**{f"row_{k}": np.arange(len(run.vectors))})
        for k, run in enumerate(runs)
    ]
    shared = frames[0]
    for run, frame in zip(runs[1:], frames[1:], strict=True):
        shared = shared.merge(frame, on=_KEY, suffixes=("", "_other"))
        both = shared["doc_hash"].notna() & shared["doc_hash_other"].notna()
        unlike = shared[both & (shared["doc_hash"] != shared["doc_hash_other"])]
        if len(unlike):
            raise MixedStoresError(
                f"document {unlike.iloc[0]['doc_id']} of task {unlike.iloc[0]['task']} is another one in "
                f"{run.store.path} than in {runs[0].store.path} ({len(unlike)} such documents); "
                "compare runs on one version of the data"
            )
        shared = shared.drop(columns="doc_hash_other")
    if shared.empty:
        tasks = sorted({task for run in runs for task in run.documents["task"].unique()})
        raise MixedStoresError(
            f"the runs share no document; compare runs of the same tasks, got {', '.join(tasks)}"
        )
    return [shared[f"row_{k}"].to_numpy(dtype=np.int64) for k in range(len(runs))]


def _difference(part: Slice, a: Run, rows_a: Rows, b: Run, rows_b: Rows) -> Difference:
    n = len(part.rows)
    in_a, in_b = rows_a[part.rows], rows_b[part.rows]
    numbers: dict[str, float] = {}
    if n >= 3:
        first, second = a.vectors.contributions(in_a), b.vectors.contributions(in_b)
        error = jackknife_se(left_out(second) - left_out(first))
        numbers |= _interval("dispersion", float(first.mean()), float(second.mean()), error)
    x, y = a.score[in_a], b.score[in_b]
    both = ~np.isnan(x) & ~np.isnan(y)
    x, y = x[both], y[both]
    if len(x) >= 2:
        error = float((y - x).std(ddof=1) / np.sqrt(len(x)))
        numbers |= _interval("accuracy", float(x.mean()), float(y.mean()), error)
    reason = None if n >= 3 else f"a paired error needs three shared documents, got {n}"
    return Difference(part.name, n, reason=reason, **numbers)


def _interval(name: str, first: float, second: float, error: float) -> dict[str, float]:
    low, high = normal_bounds(second - first, error)
    return {
        name: second,
        f"{name}_baseline": first,
        f"{name}_difference": second - first,
        f"{name}_reach": NORMAL_975 * error,
        f"{name}_low": low,
        f"{name}_high": high,
    }


def _names(runs: Sequence[Run], paths: Sequence[str | Path]) -> list[str]:
    """Names for the runs: their models, with the revision or the folder where these are alike."""
    models = [run.store.model for run in runs]
    revisions = [f"{run.store.model}@{run.store.manifest.get('revision')}" for run in runs]
    return next(
        (names for names in (models, revisions) if len(set(names)) == len(names)), [str(p) for p in paths]
    )


def _notes(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs[1:]:
        yield from (f"{note}." for note in check_comparable(runs[0].store.parts, run.store.parts))
    widths = sorted({run.vectors.rows.shape[1] for run in runs})
    if len(widths) > 1:
        yield (
            f"the models have different widths ({', '.join(map(str, widths))}); dispersion compares siblings "
            "of one size only."
        )
    if len({str(run.store.manifest.get("prompt_format")) for run in runs}) > 1:
        yield "the prompts were shaped differently; part of the difference may be theirs."
    if any((run.documents["truncated"] == True).any() for run in runs):  # noqa: E712
        yield "some prompts were truncated, and not necessarily the same ones in every run."
