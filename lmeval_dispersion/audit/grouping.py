"""Which documents belong to which slice: columns of the data, or quantiles of a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import UsageError

if TYPE_CHECKING:
    from lmeval_dispersion.audit.run import Run

BANDS = 5
_DISTINCT = 12  # a numeric column with more values than this is cut into bands
_NOT_SLICES = ("logprobs", "text", "doc_id", "doc_hash", "prompt_hash")


class Group(NamedTuple):
    """One slice: its name and the rows of its documents, ascending."""

    name: str
    rows: NDArray[np.int64]


def groupings(run: Run, extra: Sequence[str] = ()) -> dict[str, list[Group]]:
    """Every way to slice a run: what -> its slices, in the order of the report.

    ``subject``, ``category`` and ``task`` where they tell documents apart, bands of ``length`` (prompt
    tokens) and ``confidence`` (probability of the chosen answer), and the columns named in ``extra``.

    Raises:
        UsageError: A column of ``extra`` is not there or cannot slice.
    """
    found: dict[str, list[Group]] = {}
    for name in ("subject", "category", "task"):
        groups = by_value(run.documents[name].tolist())
        if len(groups) > 1 and all(_differ(groups, other) for other in found.values()):
            found[name] = groups
    for name, values in (("length", run.length), ("confidence", run.confidence.top_probability)):
        bands = by_band(values)
        if len(bands) > 1:
            found[name] = bands
    for name in extra:
        found.setdefault(name, by_column(run, name))
    return found


def by_column(run: Run, name: str) -> list[Group]:
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


def by_value(values: Sequence[object]) -> list[Group]:
    """One slice a distinct value, sorted by name; missing values belong to none."""
    rows: dict[str, list[int]] = {}
    for row, value in enumerate(values):
        if value is not None and value == value:  # NaN differs from itself
            rows.setdefault(str(value), []).append(row)
    return [Group(name, np.array(found, dtype=np.int64)) for name, found in sorted(rows.items())]


def by_band(values: NDArray[np.float64], bands: int = BANDS) -> list[Group]:
    """Slices of about equal size by quantiles of a number; equal values stay together, NaN is left out."""
    known = np.flatnonzero(~np.isnan(values))
    if not known.size:
        return []
    edges = np.unique(np.quantile(values[known], np.linspace(0, 1, bands + 1)))
    index = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, max(len(edges) - 2, 0))
    found = []
    for band in range(max(len(edges) - 1, 1)):
        rows = known[index[known] == band]
        if rows.size:
            name = f"{values[rows].min():.4g} to {values[rows].max():.4g}"
            found.append(Group(name, rows))
    return found


def _differ(groups: list[Group], other: list[Group]) -> bool:
    """Whether two groupings put the documents into different slices."""
    first = sorted(tuple(group.rows.tolist()) for group in groups)
    return first != sorted(tuple(group.rows.tolist()) for group in other)
