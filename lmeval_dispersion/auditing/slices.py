"""Slices of a run: which documents belong to which, and the dispersion of each beside its accuracy.

A slice is part of a run's documents: those with one value of a column, or within one band of a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.auditing.run import Run
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.geometry import Spectrum, spectrum
from lmeval_dispersion.statistics import (
    normal_point,
    rank_agreement,
    rank_correlations,
    spearman_bounds,
    student_quantile,
    wilson,
)

Array = NDArray[np.float64]

BANDS = 5
_DISTINCT = 12  # a numeric column with more values than this is cut into bands
_NOT_SLICES = ("logprobs", "text", "doc_id", "doc_hash", "prompt_hash")
_FEWEST_OF_A_TASK = 4  # slices of one task, for its slices to be compared among themselves


class Slice(NamedTuple):
    """A name and the rows of its documents, ascending."""

    name: str
    rows: NDArray[np.int64]


def all_documents(run: Run) -> Slice:
    """The whole run as one slice."""
    return Slice("all documents", np.arange(len(run.vectors)))


def slicings(run: Run, extra: Sequence[str] = ()) -> dict[str, list[Slice]]:
    """Every way to slice a run: what -> its slices, in the order of the report.

    ``subject``, ``category`` and ``task`` where they tell documents apart, bands of ``length`` (prompt
    tokens) and ``confidence`` (probability of the chosen answer), and the columns named in ``extra``.

    Raises:
        UsageError: A column of ``extra`` is not there or cannot slice.
    """
    ways: dict[str, list[Slice]] = {}
    for name in ("subject", "category", "task"):
        slices = by_value(run.documents[name].tolist())
        if len(slices) > 1 and all(_differ(slices, other) for other in ways.values()):
            ways[name] = slices
    for name, values in (("length", run.length), ("confidence", run.confidence.top_probability)):
        bands = by_band(values)
        if len(bands) > 1:
            ways[name] = bands
    for name in extra:
        ways.setdefault(name, by_column(run, name))
    return ways


def strata(run: Run) -> dict[str, list[Slice]]:
    """The parts inside which right and wrong answers are compared again: what -> its slices.

    Subjects and tasks, where they tell documents apart and are not the same parts.
    """
    ways: dict[str, list[Slice]] = {}
    for name in ("subject", "task"):
        slices = by_value(run.documents[name].tolist())
        if len(slices) > 1 and all(_differ(slices, other) for other in ways.values()):
            ways[name] = slices
    return ways


def by_column(run: Run, name: str) -> list[Slice]:
    """The slices of one column of the documents, or of ``length`` or ``confidence``.

    Raises:
        UsageError: No such column, or one that cannot slice.
    """
    if name == "length":
        return by_band(run.length)
    if name == "confidence":
        return by_band(run.confidence.top_probability)
    columns = [column for column in run.documents.columns if column not in _NOT_SLICES]
    if name not in columns:
        known = ", ".join([*columns, "length", "confidence"])
        raise UsageError(f"there is no column {name!r} to slice by; choose from {known}")
    values = run.documents[name]
    if values.isna().all():
        raise UsageError(f"the column {name!r} is empty in this run; choose another")
    if values.dtype.kind in "fiu" and values.nunique() > _DISTINCT:
        return by_band(values.to_numpy(dtype=np.float64))
    return by_value(values.tolist())


def by_value(values: Sequence[object]) -> list[Slice]:
    """One slice a distinct value, sorted by name; missing values belong to none."""
    rows: dict[str, list[int]] = {}
    for row, value in enumerate(values):
        if value is not None and value == value:  # NaN differs from itself
            rows.setdefault(str(value), []).append(row)
    return [Slice(name, np.array(places, dtype=np.int64)) for name, places in sorted(rows.items())]


def by_band(values: NDArray[np.float64], bands: int = BANDS) -> list[Slice]:
    """Slices of about equal size by quantiles of a number; equal values stay together, NaN is left out."""
    known = np.flatnonzero(~np.isnan(values))
    if not known.size:
        return []
    edges = np.unique(np.quantile(values[known], np.linspace(0, 1, bands + 1)))
    index = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, max(len(edges) - 2, 0))
    slices = []
    for band in range(max(len(edges) - 1, 1)):
        rows = known[index[known] == band]
        if rows.size:
            name = f"{values[rows].min():.4g} to {values[rows].max():.4g}"
            slices.append(Slice(name, rows))
    return slices


def slice_row(run: Run, part: Slice, raw: NDArray[np.float32] | None = None) -> dict[str, Any]:
    """One line of the slice table; undefined numbers are NaN and ``reason`` says why.

    With the vectors at their own lengths, ``raw`` (n, d), the four figures of :class:`Spectrum` too.
    """
    rows, n = part.rows, len(part.rows)
    scores = run.score[rows]
    scores = scores[~np.isnan(scores)]
    accuracy = float(scores.mean()) if scores.size else float("nan")
    interval = wilson(accuracy, len(scores))
    reason = None
    dispersion = error = float("nan")
    if n < 2:
        reason = "one document has no pair to be distant from"
    else:
        estimate = run.vectors.estimate(rows)
        dispersion, error = estimate.mean, estimate.se
        if n == 2:
            reason = "two documents give no error bar"
    return {
        "slice": part.name,
        "documents": n,
        "labelled": len(scores),
        "dispersion": dispersion,
        "dispersion_se": error,
        "accuracy": accuracy,
        "accuracy_low": interval.low,
        "accuracy_high": interval.high,
        "query_perplexity": _mean(run.perplexity[rows]),
        "confidence": _mean(run.confidence.top_probability[rows]),
        "prompt_tokens": _mean(run.length[rows]),
        "reason": reason,
        **({} if raw is None else _spectrum(raw[rows])),
    }


def _spectrum(rows: NDArray[np.float32]) -> dict[str, float]:
    return spectrum(rows)._asdict() if len(rows) >= 3 else dict.fromkeys(Spectrum._fields, float("nan"))


def association(rows: list[dict[str, Any]], tasks: Sequence[str | None] = ()) -> dict[str, Any]:
    """Spearman correlation of dispersion with accuracy over slices, with a 95 % interval.

    1: the more dispersed slice is always the more accurate one; 0: no order; negative: the reverse.
    Slices with fewer than three documents or labels do not count; below eight slices there is no interval.

    Args:
        rows: Of :func:`slice_row`.
        tasks: Task of each slice, None for one of several tasks. Where two tasks have four slices each, the
            correlation inside tasks stands beside, with its permutation p-value.
    """
    usable = [i for i, row in enumerate(rows) if row["documents"] >= 3 and row["labelled"] >= 3]
    if len(usable) < 4:
        return {
            "missing": f"a correlation over slices needs 4 slices of 3 labelled documents, got {len(usable)}"
        }
    x = np.array([rows[i]["dispersion"] for i in usable])
    y = np.array([rows[i]["accuracy"] for i in usable])
    rho = float(rank_correlations(x, y[None])[0])
    if np.isnan(rho):
        return {"missing": "all slices have the same accuracy or the same dispersion"}
    low, high = spearman_bounds(rho, len(usable))
    figures = {"spearman": rho, "low": low, "high": high, "slices": len(usable)}
    of_task: dict[str, list[int]] = {}
    for place, i in enumerate(usable):
        if tasks and (task := tasks[i]) is not None:
            of_task.setdefault(task, []).append(place)
    large = [places for places in of_task.values() if len(places) >= _FEWEST_OF_A_TASK]
    if len(large) < 2 or not (inside := rank_agreement([(x[places], y[places]) for places in large])):
        return figures
    return {
        **figures,
        "inside_tasks": {
            "spearman": inside.spearman,
            "p": inside.spearman_p,
            "tasks": len(large),
            "slices": sum(map(len, large)),
        },
    }


def least_dispersed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The slice of lowest dispersion, and how many others are not told apart from it.

    Slices of fewer than three documents do not count. Every pair of slices is held against Student's point
    for as many comparisons as there are pairs, so that slices that are all alike have one called apart from
    another in at most 5 % of runs.
    """
    usable = [row for row in rows if row["documents"] >= 3 and np.isfinite(row["dispersion_se"])]
    if len(usable) < 2:
        return {"missing": f"{len(usable)} of {len(rows)} slices have three documents"}
    lowest = min(usable, key=lambda row: float(row["dispersion"]))
    pairs = len(usable) * (len(usable) - 1) // 2
    tail = NormalDist().cdf(-normal_point(pairs))
    apart = 0
    for row in usable:
        if row is lowest:
            continue
        error = float(np.hypot(row["dispersion_se"], lowest["dispersion_se"]))
        point = student_quantile(1 - tail, min(row["documents"], lowest["documents"]) - 1)
        apart += bool(row["dispersion"] - lowest["dispersion"] > point * error)
    return {
        "slice": lowest["slice"],
        "dispersion": lowest["dispersion"],
        "others": len(usable) - 1,
        "not_told_apart": len(usable) - 1 - apart,
    }


def slice_table(run: Run, slices: list[Slice], raw: NDArray[np.float32] | None = None) -> dict[str, Any]:
    """All slices of one slicing, the least dispersed one, and how dispersion and accuracy go together."""
    rows = [slice_row(run, part, raw) for part in slices]
    tasks = run.documents["task"]
    of_one = [str(names[0]) if len(names := tasks.iloc[part.rows].unique()) == 1 else None for part in slices]
    return {"rows": rows, "least_dispersed": least_dispersed(rows), "association": association(rows, of_one)}


def _differ(slices: list[Slice], other: list[Slice]) -> bool:
    """Whether two slicings put the documents into different slices."""
    first = sorted(tuple(part.rows.tolist()) for part in slices)
    return first != sorted(tuple(part.rows.tolist()) for part in other)


def _mean(values: Array) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")
