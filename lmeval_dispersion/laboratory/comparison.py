"""Comparison of two studies of one kind, and statistics shared with the analyses.

Every metric, its difference, the difference's 95 % interval. Studies that saw
the same tokens (their hashes agree) are compared text by text, cluster by cluster or draw by draw, which
removes the texts' variation; others as independent samples. ``paired`` records this. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from lmeval_dispersion import statistics
from lmeval_dispersion.errors import GeometryError, UsageError
from lmeval_dispersion.laboratory import frames
from lmeval_dispersion.laboratory.frames import FrameReport, bounded, table
from lmeval_dispersion.laboratory.study import Study, read_study
from lmeval_dispersion.report import Chart, Col, Table
from lmeval_dispersion.report.cells import json_value, short_names
from lmeval_dispersion.statistics import Array

SEQUENCE = "sequence"  # perplexity of the whole segment; "last@16" is that of the token after 16

_SHOWN = 5  # clearest differences of each metric in a default answer
_CLEAREST = {"row": Col("Row"), **bounded("difference", "Difference", "+.4g")}
_EVERY = {
    "row": Col("Row"),
    "figure": Col("Metric"),
    "first": Col("First", ".4g", drop=2),
    "second": Col("Second", ".4g", drop=2),
    **_CLEAREST,
    "paired": Col("Paired", drop=3, hint="whether both studies saw the same tokens"),
}


class Correlated(NamedTuple):
    """A correlation over bins with its interval and its bootstrap samples."""

    interval: statistics.Interval
    samples: Array

    def on_fishers_scale(self) -> Array:
        """Fisher's z of the value, then of each sample, shape (1 + samples,)."""
        return statistics.fisher([self.interval.value, *self.samples])


def leading(bins: pd.DataFrame) -> Array:
    """The perplexity in r: mean perplexity of segments, mean log perplexity of single tokens."""
    plain = bins["perplexity"].iloc[0] == SEQUENCE
    return np.asarray(bins["mean_perplexity" if plain else "mean_nll"].to_numpy(), dtype=np.float64)


def correlated(bins: pd.DataFrame, measure: str, seed: int) -> Correlated:
    """Pearson r of perplexity and a measure over bins."""
    x, y = leading(bins), bins[measure].to_numpy()
    value, samples = statistics.correlation(x, y), statistics.resampled_correlations(x, y, seed=seed)
    return Correlated(
        statistics.Interval(value, *statistics.correlation_bounds(value, samples, len(x))), samples
    )


def bounds_together(values: ArrayLike, samples: ArrayLike) -> tuple[Array, Array]:
    """Lower and upper bounds (m,) that hold for all ``values`` (m,) at once in 95 % of cases.

    The bound is the estimate ± q standard deviations of its samples, with q the 95 % point of the largest
    deviation in a resample, in standard deviations (Efron and Tibshirani 1993; Mammen 1993).
    """
    centre, drawn = np.asarray(values, dtype=np.float64), np.asarray(samples, dtype=np.float64)
    low, high = np.full(len(centre), np.nan), np.full(len(centre), np.nan)
    known = np.isfinite(centre) & (np.isfinite(drawn).mean(axis=0) > statistics.LEVEL)
    if known.any():
        sd = np.nanstd(drawn[:, known], axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):
            deviations = np.abs(drawn[:, known] - centre[known]) / sd
        # Never narrower than a normal estimate's bound.
        largest = np.nanmax(np.where(np.isfinite(deviations), deviations, 0.0), axis=1)
        q = max(float(np.quantile(largest, statistics.LEVEL)), statistics.NORMAL_975)
        low[known], high[known] = centre[known] - q * sd, centre[known] + q * sd
    return low, high


def pairs_left_out(apart: Array) -> Array:
    """Mean over pairs of n members without each of them, from each one's mean over the others (n,)."""
    return np.asarray(apart.mean() + (apart.mean() - apart) * 2 / (len(apart) - 2))


@dataclass(frozen=True, repr=False)
class StudiesCompared(FrameReport):
    """Two studies compared; ``differences`` has one row per metric, see docs/reference/laboratory.md."""

    template = "studies.jinja"
    schema = "dispersion-lab-comparison/2"
    guide = "docs/reference/laboratory.md"
    main = "differences"
    differences: pd.DataFrame
    first: str
    second: str

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract: the answer, both folders and every difference."""
        content = {"answer": self.answer(), "first": self.first, "second": self.second, "rows": self.rows()}
        return {"schema": self.schema, **json_value(content)}

    def tables(self) -> dict[str, Table]:
        """``differences``: all; and of each metric the clearest."""
        tables = {"differences": table(self._named(), "First, second, and second minus first", _EVERY)}
        frame = self._named().sort_values("clear", ascending=False, kind="stable")
        for figure, rows in frame.groupby("figure", sort=False):
            more = f"{_SHOWN} of {len(rows)} rows; the details show all." if len(rows) > _SHOWN else ""
            tables[str(figure)] = table(rows.head(_SHOWN).sort_index(), str(figure), _CLEAREST, more=more)
        return tables

    def charts(self) -> dict[str, Chart]:
        """``differences``: each with its interval."""
        caption = "Difference of every metric; the dashed line marks 0"
        return {"differences": Chart(partial(frames.differences, self._named()), caption, "A dot a row.")}

    def context(self) -> dict[str, Any]:
        """For the template: the differences that are clear of 0, and the clearest of each metric."""
        sure = self._named()[clear_of_zero(self.differences)]
        surest = sure.loc[sorted(sure.groupby("figure")["clear"].idxmax())]
        first, second = short_names([self.first, self.second])
        return {"first": first, "second": second, "sure": len(sure), "surest": surest.to_dict("records")}

    def _named(self) -> pd.DataFrame:
        """The differences, each with its description and distance from 0."""
        frame = self.differences
        about = frame[[name for name in frame if name not in ("figure", *_EVERY)]].astype(str)
        reach = (frame["high"] - frame["low"]) / 2
        rows = [", ".join(filter(None, row)) for row in about.itertuples(index=False)]
        return frame.assign(row=rows, clear=frame["difference"].abs() / reach.clip(lower=1e-12))


def clear_of_zero(differences: pd.DataFrame) -> pd.Series[bool]:
    """Which differences leave out 0 with bounds that hold for all rows together."""
    value = differences["difference"]
    factor = statistics.normal_point(int(value.notna().sum())) / statistics.NORMAL_975
    below, above = (value - differences["low"]) * factor, (differences["high"] - value) * factor
    return (value > below) & (value > 0) | (-value > above) & (value < 0)


def compare_studies(first: str | Path, second: str | Path) -> StudiesCompared:
    """Two complete studies of one kind, the second minus the first.

    Raises:
        UsageError: One is not a study, not complete or of another kind, or they share nothing.
    """
    studies = read_study(first), read_study(second)
    kinds = [study.manifest["kind"] for study in studies]
    if kinds[0] != kinds[1]:
        raise UsageError(f"expected two studies of one kind, got {kinds[0]} and {kinds[1]}")
    metrics = _KINDS[kinds[0]]
    keys = dict.fromkeys([key for metric in metrics for key in metric.keys], "")
    rows = [row for metric in metrics for row in _differences(metric, keys, *studies)]
    if not rows:
        raise UsageError(f"{first} and {second} share no layer, split or model; run both with the same ones")
    return StudiesCompared(pd.DataFrame.from_records(rows), str(first), str(second))


# Both values of a metric, and the bounds of their difference.
_Pair = tuple[float, float, statistics.Bounds]


class _Metric(NamedTuple):
    """A metric: the column with its samples, the keys of a row, and the comparison of two samples."""

    name: str
    table: str
    column: str
    keys: tuple[str, ...]
    segments: str  # the manifest's key of the tokens that both must have seen to be paired; "" for never
    compare: Callable[[pd.DataFrame, pd.DataFrame, str, bool], _Pair]


def _differences(metric: _Metric, keys: dict[str, str], a: Study, b: Study) -> Iterator[dict[str, Any]]:
    """The rows of a metric that both studies have."""
    tables = [study.tables()[metric.table] for study in (a, b)]
    for names in _models(*tables) if "model" in tables[0] else [("", "")]:
        about = {"model": names[0] if names[0] == names[1] else " → ".join(names)} if any(names) else {}
        of_both = list(zip((a, b), tables, names, strict=True))
        parts = [frame[frame["model"] == name] if name else frame for _, frame, name in of_both]
        groups = [dict(list(part.groupby(list(metric.keys), sort=False))) for part in parts]
        for key in (key for key in groups[0] if key in groups[1]):
            x, y = groups[0][key], groups[1][key]
            known = dict(zip(metric.keys, key, strict=True))
            paired = bool(metric.segments) and len(x) == len(y)
            if paired:
                entries = [metric.segments.format(**known, model=name) for name in names]
                seen = [s.manifest[entry]["sha256"] for s, entry in zip((a, b), entries, strict=True)]
                paired = seen[0] == seen[1]
            try:
                first, second, bounds = metric.compare(x, y, metric.column, paired)
            except GeometryError:
                continue  # not defined in one of them
            row = {"figure": metric.name, "first": first, "second": second, "difference": second - first}
            row |= {**bounds._asdict(), "paired": paired}
            yield {**about, **keys, **known, **row}


def _models(x: pd.DataFrame, y: pd.DataFrame) -> list[tuple[str, str]]:
    """Models with the same name in both studies; else the single model of each."""
    first, second = (list(dict.fromkeys(frame["model"])) for frame in (x, y))
    if shared := [(name, name) for name in first if name in second]:
        return shared
    if len(first) == len(second) == 1:
        return [(first[0], second[0])]
    raise UsageError(
        f"expected studies that share a model, or of one model each, got {', '.join(first)} and "
        f"{', '.join(second)}"
    )


def _correlations(x: pd.DataFrame, y: pd.DataFrame, column: str, _paired: bool) -> _Pair:
    """Each study chooses its own bins."""
    a, b = (correlated(bins, column, seed) for seed, bins in enumerate((x, y)))
    bounds = statistics.correlation_difference(a.interval, b.interval, (a.samples, b.samples), paired=False)
    return a.interval.value, b.interval.value, bounds


def _draws(x: pd.DataFrame, y: pd.DataFrame, column: str, paired: bool) -> _Pair:
    """The sd over draws is the error: all come from one pool, so their mean is no better known."""
    a, b = x[column].to_numpy(), y[column].to_numpy()
    error = (b - a).std(ddof=1) if paired else np.hypot(a.std(ddof=1), b.std(ddof=1))
    return _normal(a.mean(), b.mean(), float(error))


def _jackknifed(x: pd.DataFrame, y: pd.DataFrame, column: str, paired: bool) -> _Pair:
    """The value of all texts comes first, then those without each group of texts."""
    (first, *a), (second, *b) = x[column], y[column]
    error = statistics.jackknife_se(np.subtract(b, a)) if paired else statistics.jackknife_se(a, b)
    return _normal(first, second, error)


def _pair_means(x: pd.DataFrame, y: pd.DataFrame, column: str, paired: bool) -> _Pair:
    """Mean over pairs of centroids."""
    a, b = x[column].to_numpy(), y[column].to_numpy()
    left = [pairs_left_out(each) if len(each) > 2 else each * np.nan for each in (a, b)]
    error = statistics.jackknife_se(left[1] - left[0]) if paired else statistics.jackknife_se(*left)
    return _normal(a.mean(), b.mean(), error)


def _normal(first: float, second: float, error: float) -> _Pair:
    return float(first), float(second), statistics.normal_bounds(float(second - first), error)


def _means(x: pd.DataFrame, y: pd.DataFrame, column: str, paired: bool) -> _Pair:
    """Means over texts or clusters, which are resampled."""
    a, b = x[column].to_numpy(), y[column].to_numpy()
    earlier = statistics.resampled_means(a[:, None], 0)
    later = statistics.resampled_means(b[:, None], 0 if paired else 1)
    return float(a.mean()), float(b.mean()), statistics.percentiles(later - earlier)


_BY_SPLIT, _BY_MODEL = "segments.{split}", "segments.{model}"
_KINDS = {
    "law": (
        _Metric("dispersion", "jackknife", "dispersion", ("split", "layer"), _BY_SPLIT, _jackknifed),
        _Metric("log perplexity", "jackknife", "nll", ("split", "layer"), _BY_SPLIT, _jackknifed),
        _Metric("pearson r", "points", "dispersion", ("split", "perplexity", "layer"), "", _correlations),
    ),
    "sublayers": (
        _Metric("dispersion", "draws", "dispersion", ("layer", "segments"), "segments.pool", _draws),
    ),
    "condensation": (
        _Metric("trend", "trends", "trend", ("control",), _BY_MODEL, _means),
        _Metric("last mean", "trends", "last_mean", ("control",), _BY_MODEL, _means),
        _Metric("mean", "texts", "mean", ("control", "layer"), _BY_MODEL, _means),
    ),
    "clusters": (
        _Metric("within", "clusters", "within", ("layer",), "segments.contexts", _means),
        _Metric("between", "clusters", "apart", ("layer",), "segments.contexts", _pair_means),
    ),
}
