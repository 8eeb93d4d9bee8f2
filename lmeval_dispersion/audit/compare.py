"""Runs of several models or checkpoints on the same documents: paired differences a slice.

Documents are matched by task and id, and must be the same ones (their hashes agree). The difference of two
dispersions over shared documents has the paired jackknife error: the leave-one-out values of the two runs
are subtracted before their spread is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lmeval_dispersion.audit.reports.charts import difference_chart
from lmeval_dispersion.audit.reports.document import GUIDE, LIBRARIES
from lmeval_dispersion.audit.reports.report import report_json
from lmeval_dispersion.audit.run import Run, read_run
from lmeval_dispersion.audit.slices import Slice, by_column
from lmeval_dispersion.audit.vectors import left_out
from lmeval_dispersion.errors import MixedStoresError, UsageError
from lmeval_dispersion.report import Column, Document, Note, Part, Section, Table
from lmeval_dispersion.statistics import jackknife_se, normal_bounds
from lmeval_dispersion.store import check_comparable

FORMAT = "dispersion-comparison/1"
Rows = NDArray[np.int64]

_KEY = ["task", "doc_id"]


def compared_stores(
    paths: Sequence[str | Path],
    *,
    by: str = "subject",
    layer: str | None = None,
) -> dict[str, Any]:
    """Compare runs with the first of them, over all shared documents and per slice.

    Args:
        paths: Folders of at least two stores.
        by: Column whose values are the slices; see :func:`lmeval_dispersion.audit.slices.by_column`.
        layer: Layer of all of them; by default each store's own default.

    Raises:
        UsageError: Fewer than two stores.
        MixedStoresError: No shared documents, or other prompts or documents under the same ids.
    """
    if len(paths) < 2:
        raise UsageError(f"comparing needs two runs or more, got {len(paths)}")
    runs = [read_run(path, layer) for path in paths]
    rows = shared_rows(runs)
    first = runs[0]
    everything = Slice("all documents", np.arange(len(rows[0])))
    position = {row: i for i, row in enumerate(rows[0].tolist())}
    slices = [
        Slice(part.name, np.array([position[r] for r in part.rows.tolist() if r in position], dtype=np.int64))
        for part in by_column(first, by)
    ]
    names = _names(runs, paths)
    parts = (everything, *slices)
    others: list[dict[str, Any]] = [
        {
            "run": names[k],
            "layer": runs[k].layer,
            "slices": [_difference(part, first, rows[0], runs[k], rows[k]) for part in parts],
        }
        for k in range(1, len(runs))
    ]
    return {
        "format": FORMAT,
        "baseline": {"run": names[0], "layer": first.layer},
        "by": by,
        "documents": len(rows[0]),
        "left_out": [len(run.vectors) - len(rows[0]) for run in runs],
        "others": others,
        "notes": _notes(runs),
    }


def shared_rows(runs: Sequence[Run]) -> list[Rows]:
    """For every run the rows of the documents that all of them have, in one order.

    Raises:
        MixedStoresError: None is shared, or one id stands for different documents.
    """
    first = runs[0].documents[[*_KEY, "doc_hash"]].assign(row_0=np.arange(len(runs[0].vectors)))
    for k, run in enumerate(runs[1:], 1):
        other = run.documents[[*_KEY, "doc_hash"]].assign(**{f"row_{k}": np.arange(len(run.vectors))})
        first = first.merge(other, on=_KEY, how="inner", suffixes=("", "_other"))
        both = first["doc_hash"].notna() & first["doc_hash_other"].notna()
        unlike = both & (first["doc_hash"] != first["doc_hash_other"])
        if unlike.any():
            example = first[unlike].iloc[0]
            raise MixedStoresError(
                f"document {example['doc_id']} of task {example['task']} is another one in "
                f"{run.store.path} than in {runs[0].store.path} ({int(unlike.sum())} such documents); "
                "compare runs on one version of the data"
            )
        first = first.drop(columns="doc_hash_other")
    if first.empty:
        raise MixedStoresError(
            "the runs share no document; compare runs of the same tasks, "
            f"got {', '.join(sorted({t for run in runs for t in run.documents['task'].unique()}))}"
        )
    return [first[f"row_{k}"].to_numpy(dtype=np.int64) for k in range(len(runs))]


def comparison_document(comparison: Mapping[str, Any]) -> Document:
    """A comparison of :func:`compared_stores` as a report."""
    base = comparison["baseline"]["run"]
    answer = [
        f"{comparison['documents']} shared documents; every difference is RUN minus {base} (layer "
        f"{comparison['baseline']['layer']})."
    ]
    return Document(
        title=f"Runs compared with {base}",
        answer=[*(_answer(other, base) for other in comparison["others"]), *answer],
        sections=[
            *(_section(other, comparison) for other in comparison["others"]),
            Section("Notes", [Note(note) for note in comparison["notes"]]),
        ],
        limits=[
            "Intervals are for the documents that were drawn. With many slices some leave out 0 by chance: "
            "about one in twenty.",
            "Widths and tokenizers must match for dispersions to be comparable.",
        ],
        rows=[{"run": other["run"], **row} for other in comparison["others"] for row in other["slices"]],
        contract=lambda: f"{report_json(comparison)}\n",
        float_format="%.9g",
        libraries=LIBRARIES,
        guide=GUIDE,
    )


def _answer(other: Mapping[str, Any], base: str) -> str:
    whole = other["slices"][0]
    if whole["reason"]:
        return f"{other['run']} against {base}: {whole['reason']}."
    text = f"{other['run']} against {base}: dispersion {_signed(whole, 'dispersion', '.4f')}"
    if np.isfinite(whole["accuracy_difference"]):
        text += f", accuracy {_signed(whole, 'accuracy', '.3f')}"
    return f"{text}."


def _signed(row: Mapping[str, Any], name: str, spec: str) -> str:
    difference, low, high = (row[f"{name}_{key}"] for key in ("difference", "low", "high"))
    return f"{difference:+{spec}} (95 % {low:+{spec}} to {high:+{spec}})"


def _section(other: Mapping[str, Any], comparison: Mapping[str, Any]) -> Section:
    columns = [
        Column("slice", str(comparison["by"]).capitalize()),
        Column("documents", "Documents", "d", drop=2),
        Column("dispersion", "Dispersion", ".4f", drop=3),
        Column("dispersion_difference", "Difference", "+.4f"),
        Column("dispersion_low", "95 % from", "+.4f"),
        Column("dispersion_high", "to", "+.4f"),
        Column("accuracy", "Accuracy", ".3f", drop=4),
        Column("accuracy_difference", "Difference", "+.3f"),
        Column("accuracy_low", "95 % from", "+.3f", drop=1),
        Column("accuracy_high", "to", "+.3f", drop=1),
    ]
    if any(row["reason"] for row in other["slices"]):
        columns.append(Column("reason", "Remark"))
    chart = difference_chart(other["slices"])
    charts: list[Part] = [chart] if chart else []
    caption = f"{other['run']} (layer {other['layer']}) and {comparison['baseline']['run']}"
    return Section(str(other["run"]), [*charts, Table(other["slices"], columns, caption)])


def _difference(part: Slice, a: Run, rows_a: Rows, b: Run, rows_b: Rows) -> dict[str, Any]:
    n = len(part.rows)
    nan = float("nan")
    row: dict[str, Any] = {"slice": part.name, "documents": n, "reason": None}
    keys = ("baseline", "", "difference", "low", "high")
    row |= {_name("dispersion", key): nan for key in keys} | {_name("accuracy", key): nan for key in keys}
    in_a, in_b = rows_a[part.rows], rows_b[part.rows]
    if n < 3:
        row["reason"] = f"a paired error needs three shared documents, got {n}"
    else:
        first, second = a.vectors.contributions(in_a), b.vectors.contributions(in_b)
        error = jackknife_se(left_out(second) - left_out(first))
        row |= _interval("dispersion", float(first.mean()), float(second.mean()), error)
    both = ~np.isnan(a.score[in_a]) & ~np.isnan(b.score[in_b])
    x, y = a.score[in_a][both], b.score[in_b][both]
    if len(x) >= 2:
        error = float((y - x).std(ddof=1) / np.sqrt(len(x)))
        row |= _interval("accuracy", float(x.mean()), float(y.mean()), error)
    return row


def _interval(name: str, first: float, second: float, error: float) -> dict[str, float]:
    difference = second - first
    values = (first, second, difference, *normal_bounds(difference, error))
    keys = ("baseline", "", "difference", "low", "high")
    return {_name(name, key): value for key, value in zip(keys, values, strict=True)}


def _name(name: str, key: str) -> str:
    return f"{name}_{key}" if key else name


def _names(runs: Sequence[Run], paths: Sequence[str | Path]) -> list[str]:
    """What to call the runs: their models, with the revision or the folder where these are alike."""
    models = [run.store.model for run in runs]
    if len(set(models)) == len(models):
        return models
    revisions = [f"{run.store.model}@{run.store.manifest.get('revision')}" for run in runs]
    return revisions if len(set(revisions)) == len(revisions) else [str(path) for path in paths]


def _notes(runs: Sequence[Run]) -> list[str]:
    notes = [
        f"{note}." for run in runs[1:] for note in check_comparable(runs[0].store.parts, run.store.parts)
    ]
    widths = {run.vectors.rows.shape[1] for run in runs}
    if len(widths) > 1:
        notes.append(
            "the models have different widths "
            f"({', '.join(str(w) for w in sorted(widths))}); dispersion compares siblings of one size only."
        )
    if len({str(run.store.manifest.get("prompt_format")) for run in runs}) > 1:
        notes.append("the prompts were shaped differently; part of the difference may be theirs.")
    if any(pd.notna(run.documents["truncated"]).any() and run.documents["truncated"].any() for run in runs):
        notes.append("some prompts were truncated, and not necessarily the same ones in every run.")
    return notes
