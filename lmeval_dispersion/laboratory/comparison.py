"""Two studies of one kind side by side: every metric, its difference, the difference's 95 % interval.

Studies that saw the same tokens (their hashes agree) are compared text by text, cluster by cluster or draw by
draw, which takes the texts' own variation out; others as independent samples. ``paired`` says which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd

from lmeval_dispersion.errors import GeometryError, UsageError
from lmeval_dispersion.laboratory import charts
from lmeval_dispersion.laboratory.claims import depth_samples, depth_trend
from lmeval_dispersion.laboratory.study import Study, read_study
from lmeval_dispersion.report import Chart, Col, Report, Table, nullable
from lmeval_dispersion.report.cells import json_value, short_names
from lmeval_dispersion.statistics import (
    NORMAL_975,
    Array,
    Bounds,
    Interval,
    correlation,
    correlation_bounds,
    correlation_difference,
    jackknife_se,
    normal_bounds,
    normal_point,
    percentiles,
    resampled_correlations,
    resampled_means,
)

Record = dict[str, Any]

_SHOWN = 5  # clearest differences of each metric in a default answer


@dataclass(frozen=True, repr=False)
class StudiesCompared(Report):
    """Two studies side by side, see :func:`compare_studies`.

    Attributes:
        differences: A row a metric: both values, their difference and its 95 % interval.
        first: Folder of the baseline.
        second: Folder of the other study.
    """

    template = "studies.jinja"
    schema = "dispersion-lab-comparison/2"
    guide = "docs/reference/laboratory.md"
    differences: pd.DataFrame
    first: str
    second: str

    def rows(self) -> list[dict[str, Any]]:
        """The differences."""
        return [
            {str(key): value for key, value in row.items()} for row in self.differences.to_dict("records")
        ]

    def to_frame(self) -> pd.DataFrame:
        """The differences, tidy."""
        return nullable(self.differences)

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract: the answer, both folders and every difference."""
        content = {"answer": self.answer(), "first": self.first, "second": self.second, "rows": self.rows()}
        return {"schema": self.schema, **json_value(content)}

    def tables(self) -> dict[str, Table]:
        """``differences``: all; and of each metric the clearest."""
        frame = self._named().sort_values("clear", ascending=False, kind="stable")
        tables = {"differences": _table(self._named(), "First, second, and second minus first")}
        for figure, rows in frame.groupby("figure", sort=False):
            more = f"{_SHOWN} of {len(rows)} rows; --details shows all." if len(rows) > _SHOWN else ""
            tables[str(figure)] = _table(rows.head(_SHOWN).sort_index(), str(figure), more=more, hide=_HIDDEN)
        return tables

    def charts(self) -> dict[str, Chart]:
        """``differences``: each with its interval."""
        draw = partial(charts.differences, self._named())
        return {
            "differences": Chart(draw, "Difference of every metric; the dashed line is none", "A dot a row.")
        }

    def context(self) -> dict[str, Any]:
        """For the template: the differences that are clear of 0, and the clearest of each metric."""
        frame = self._named()
        sure = frame[told_apart(self.differences)]
        surest = sure.loc[sorted(sure.groupby("figure")["clear"].idxmax())]
        first, second = short_names([self.first, self.second])
        return {"first": first, "second": second, "sure": len(sure), "surest": surest.to_dict("records")}

    def _named(self) -> pd.DataFrame:
        """The differences, with what each is about in words, and how clear of 0 it is."""
        frame = self.differences
        about = [name for name in frame if name not in ("figure", *_VALUES)]
        reach = (frame["high"] - frame["low"]) / 2
        return frame.assign(
            row=[
                ", ".join(str(value) for value in row if str(value))
                for row in frame[about].itertuples(index=False)
            ],
            clear=frame["difference"].abs() / reach.clip(lower=1e-12),
        )


_HIDDEN = ("figure", "first", "second", "paired")  # in a default answer
_VALUES = ("first", "second", "difference", "low", "high", "paired")


@dataclass(frozen=True)
class _Row:
    """One difference."""

    row: Annotated[str, Col("Row")]
    figure: Annotated[str, Col("Metric")]
    first: Annotated[float, Col("First", ".4g", drop=2)]
    second: Annotated[float, Col("Second", ".4g", drop=2)]
    difference: Annotated[float, Col("Difference", "+.4g", dots="both", reach="low high")]
    low: Annotated[float, Col("95 % from", "+.4g", short="from", drop=1)]
    high: Annotated[float, Col("to", "+.4g", drop=1)]
    paired: Annotated[bool, Col("Paired", drop=3, hint="whether both studies saw the same tokens")]


def _table(frame: pd.DataFrame, caption: str, **options: Any) -> Table:
    names = [field.name for field in fields(_Row)]
    return Table.of([_Row(*row) for row in frame[names].itertuples(index=False)], caption, **options)


def told_apart(differences: pd.DataFrame) -> pd.Series[bool]:
    """Which differences leave out 0 with bounds that hold for all rows together.

    Each bound is moved outwards as a normal estimate's would be for Bonferroni's correction.
    """
    value = differences["difference"]
    factor = normal_point(int(value.notna().sum())) / NORMAL_975
    below, above = (value - differences["low"]) * factor, (differences["high"] - value) * factor
    return (value > below) & (value > 0) | (-value > above) & (value < 0)


def compare_studies(first: str | Path, second: str | Path) -> StudiesCompared:
    """Two complete studies of one kind, the second minus the first.

    Raises:
        UsageError: See :func:`compared`.
    """
    return StudiesCompared(compared(first, second), str(first), str(second))


def compared(first: str | Path, second: str | Path) -> pd.DataFrame:
    """All metrics that two studies of one kind share.

    Columns: what the row is about, ``figure``, ``first``, ``second``, ``difference`` (second minus first)
    with ``low`` and ``high``, ``paired``.
    """
    a, b = read_study(first), read_study(second)
    kinds = a.manifest["kind"], b.manifest["kind"]
    if kinds[0] != kinds[1]:
        raise UsageError(f"expected two studies of one kind, got {kinds[0]} and {kinds[1]}")
    records = list(_KINDS[kinds[0]](a, b))
    if not records:
        raise UsageError(f"{first} and {second} share no layer, split or model; make both with the same ones")
    return pd.DataFrame.from_records(records)


def _law(a: Study, b: Study) -> Iterator[Record]:
    before_tables, after_tables = a.tables(), b.tables()
    keys = ["split", "layer"]
    folds = [dict(list(tables["jackknife"].groupby(keys))) for tables in (before_tables, after_tables)]
    for _, row in (
        before_tables["overall"].merge(after_tables["overall"], on=keys, suffixes=("_a", "_b")).iterrows()
    ):
        left = [fold[(row["split"], row["layer"])] for fold in folds]
        paired = _same(a, b, row["split"]) and len(left[0]) == len(left[1])
        for metric, column, log in (("dispersion", "dispersion", False), ("log perplexity", "nll", True)):
            source = "perplexity" if log else "dispersion"
            values = _pair(np.log(row[f"{source}_{x}"]) if log else row[f"{source}_{x}"] for x in "ab")
            before, after = (fold[column].to_numpy() for fold in left)
            error = jackknife_se(after - before) if paired else jackknife_se(before, after)
            about = {"split": row["split"], "perplexity": "", "layer": row["layer"]}
            yield {**about, **_normal(metric, values, error, paired)}
    keys = ["split", "perplexity", "layer"]
    points = [
        dict(list(tables["points"].groupby(keys, sort=False))) for tables in (before_tables, after_tables)
    ]
    for key in (key for key in points[0] if key in points[1]):
        try:
            yield {**dict(zip(keys, key, strict=True)), **_correlations(points[0][key], points[1][key])}
        except GeometryError:
            continue


def _correlations(x: pd.DataFrame, y: pd.DataFrame) -> Record:
    """Pearson r of perplexity and dispersion: bins are another choice in each study, so never paired."""
    pairs = [(frame["mean_perplexity"].to_numpy(), frame["dispersion"].to_numpy()) for frame in (x, y)]
    samples = [resampled_correlations(*pair, seed=seed) for seed, pair in enumerate(pairs)]
    values = [correlation(*pair) for pair in pairs]
    first, second = (
        Interval(value, *correlation_bounds(value, drawn, len(pair[0])))
        for value, drawn, pair in zip(values, samples, pairs, strict=True)
    )
    bounds = correlation_difference(first, second, (samples[0], samples[1]), paired=False)
    return _record("pearson r", (first.value, second.value), bounds, paired=False)


def _sublayers(a: Study, b: Study) -> Iterator[Record]:
    draws = [study.tables()["draws"] for study in (a, b)]
    settings = [
        (study.manifest["settings"]["seed"], study.manifest["settings"]["repeats"]) for study in (a, b)
    ]
    paired = _same(a, b, "pool") and settings[0] == settings[1]
    keys = ["layer", "segments"]
    groups = [dict(list(frame.groupby(keys, sort=False)["dispersion"])) for frame in draws]
    for key in (key for key in groups[0] if key in groups[1]):
        x, y = (group[key].to_numpy() for group in groups)
        # The sd over draws is the error of one draw of that size; their mean is no better known, since all
        # draws come from one pool.
        error = (y - x).std(ddof=1) if paired else np.hypot(x.std(ddof=1), y.std(ddof=1))
        about = dict(zip(keys, key, strict=True))
        yield {**about, **_normal("dispersion", _pair((x.mean(), y.mean())), float(error), paired)}


def _condensation(a: Study, b: Study) -> Iterator[Record]:
    for (name, i, x), (other, j, y) in _models(a, b, "texts"):
        tables = [_texts_by_depth(frame) for frame in (x, y)]
        paired = _hash(a, f"m{i}.texts") == _hash(b, f"m{j}.texts") and len(tables[0]) == len(tables[1])
        seeds = (0, 0) if paired else (0, 1)
        model = name if name == other else f"{name} → {other}"
        for depth, record in _depth_records(tables, seeds, _last(a), _last(b), paired):
            yield {"model": model, "depth": depth, **record}


def _last(study: Study) -> int:
    return int(study.manifest["settings"]["last"])


def _texts_by_depth(frame: pd.DataFrame) -> Array:
    wide = frame.pivot(index="text", columns="depth", values="mean")
    return np.asarray(wide.to_numpy(), dtype=np.float64)


def _depth_records(
    tables: list[Array], seeds: tuple[int, int], last_a: int, last_b: int, paired: bool
) -> Iterator[tuple[str, Record]]:
    try:
        trends = [depth_trend(table) for table in tables]
        (rho_a, tau_a), (rho_b, tau_b) = (depth_samples(t, s) for t, s in zip(tables, seeds, strict=True))
        yield "", _sampled("spearman", _pair(t.spearman.value for t in trends), rho_b - rho_a, paired)
        yield "", _sampled("kendall", _pair(t.kendall.value for t in trends), tau_b - tau_a, paired)
    except GeometryError:
        pass  # no trend to compare; the means below are
    tails = [table[:, -last:].mean(axis=1) for table, last in zip(tables, (last_a, last_b), strict=True)]
    earlier, later = (resampled_means(v[:, None], seed)[:, 0] for v, seed in zip(tails, seeds, strict=True))
    yield "", _sampled("last mean", _pair(v.mean() for v in tails), later - earlier, paired)
    if tables[0].shape[1] == tables[1].shape[1]:
        earlier, later = (resampled_means(table, seed) for table, seed in zip(tables, seeds, strict=True))
        for depth in range(tables[0].shape[1]):
            values = _pair(table[:, depth].mean() for table in tables)
            yield str(depth), _sampled("mean", values, later[:, depth] - earlier[:, depth], paired)


def _clusters(a: Study, b: Study) -> Iterator[Record]:
    paired = _same(a, b, "contexts")
    for (name, _, x), (other, _, y) in _models(a, b, "clusters"):
        model = name if name == other else f"{name} → {other}"
        layers = [dict(list(frame.groupby("layer", sort=False))) for frame in (x, y)]
        for layer in (layer for layer in layers[0] if layer in layers[1]):
            about = {"model": model, "layer": layer}
            pair = [group[layer] for group in layers]
            within = [frame["within"].to_numpy() for frame in pair]
            earlier, later = (
                resampled_means(v[:, None], 0 if paired else k)[:, 0] for k, v in enumerate(within)
            )
            yield {**about, **_sampled("within", _pair(v.mean() for v in within), later - earlier, paired)}
            apart = [frame["apart"].to_numpy() for frame in pair]
            # Leaving a centroid out, as in geometry.dispersion_estimate.
            left = [c.mean() + (c.mean() - c) * 2 / (len(c) - 2) if len(c) > 2 else c * np.nan for c in apart]
            error = jackknife_se(left[1] - left[0]) if paired else jackknife_se(*left)
            yield {**about, **_normal("between", _pair(c.mean() for c in apart), error, paired)}


_KINDS = {"law": _law, "sublayers": _sublayers, "condensation": _condensation, "clusters": _clusters}

_Part = tuple[str, int, pd.DataFrame]


def _models(a: Study, b: Study, table: str) -> Iterator[tuple[_Part, _Part]]:
    """Models of the same name in both studies; where there are none, the one model of each."""
    parts = []
    for study in (a, b):
        groups = list(study.tables()[table].groupby("model", sort=False))
        parts.append({str(name): (str(name), number, frame) for number, (name, frame) in enumerate(groups)})
    shared = [name for name in parts[0] if name in parts[1]]
    if shared:
        yield from ((parts[0][name], parts[1][name]) for name in shared)
    elif len(parts[0]) == len(parts[1]) == 1:
        yield next(iter(parts[0].values())), next(iter(parts[1].values()))
    else:
        raise UsageError(
            f"expected studies that share a model, or of one model each, got {', '.join(parts[0])} and "
            f"{', '.join(parts[1])}"
        )


def _hash(study: Study, name: str) -> str:
    return str(study.manifest[f"segments.{name}"]["sha256"])


def _same(a: Study, b: Study, name: str) -> bool:
    return _hash(a, name) == _hash(b, name)


def _pair(values: Iterable[float]) -> tuple[float, float]:
    first, second = values
    return float(first), float(second)


def _normal(metric: str, values: tuple[float, float], error: float, paired: bool) -> Record:
    first, second = values
    return _record(metric, values, normal_bounds(second - first, error), paired)


def _sampled(metric: str, values: tuple[float, float], samples: Array, paired: bool) -> Record:
    return _record(metric, values, percentiles(samples), paired)


def _record(metric: str, values: tuple[float, float], bounds: Bounds, paired: bool) -> Record:
    first, second = values
    known = {"figure": metric, "first": first, "second": second, "difference": second - first}
    return {**known, **bounds._asdict(), "paired": paired}
