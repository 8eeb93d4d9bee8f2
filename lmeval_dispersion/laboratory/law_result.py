"""What the perplexity law found: tables, correlations, plots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lmeval_dispersion.errors import GeometryError
from lmeval_dispersion.laboratory.runs import Run
from lmeval_dispersion.laboratory.statistics import (
    bootstrap_correlation,
    correlation,
    mean_interval,
    perplexity,
)
from lmeval_dispersion.laboratory.sums import GROUPS, dispersion_of

MEASURES = (
    "dispersion",
    "vendi_score",
    "effective_rank",
    "token_dispersion",
    "token_effective_rank",
    "diff_erank",
)


@dataclass(frozen=True)
class LawResult:
    """The perplexity law of one model on one or two sources.

    Attributes:
        correlations: One row a split, perplexity, layer and measure: ``pearson`` with ``low`` and ``high``
            (95 % bootstrap over bins), ``spearman``, ``pearson_log`` (with log perplexity), ``bins``;
            ``line_r2``: how much of the variance over this split's bins the line fitted on the bins of
            ``data`` explains (in-sample on ``data``, and negative where it is worse than the mean);
            ``reason`` where a number is undefined (NaN).
        points: One row a chosen bin and layer: its mean perplexity and every measure.
        overall: One row a split and layer: dispersion over all texts, token dispersion, perplexity.
        manifest: Settings, counts and what was run.
    """

    correlations: pd.DataFrame
    points: pd.DataFrame
    overall: pd.DataFrame
    manifest: dict[str, Any]

    kind = "law"

    @classmethod
    def of(cls, run: Run) -> LawResult:
        """The result of a complete run."""
        tables = run.tables()
        return cls(tables["correlations"], tables["points"], tables["overall"], run.manifest)

    def to_frame(self) -> pd.DataFrame:
        """The correlations, tidy."""
        return self.correlations

    def plot(self) -> Any:
        """Mean perplexity against dispersion, one point a bin, one panel a perplexity and layer."""
        from lmeval_dispersion.laboratory.plots import law_scatter

        return law_scatter(self.points)


def overall(
    split: str,
    layers: list[str],
    nll: NDArray[np.float64],
    tokens: NDArray[np.float64],
    sums: NDArray[np.int64],
    seed: int,
) -> pd.DataFrame:
    """One row a layer: dispersion over all texts with its jackknife error, token dispersion, perplexity."""
    records = []
    for place, layer in enumerate(layers):
        estimate = dispersion_of(sums[place]).estimate()
        token = mean_interval(tokens[:, place], seed)
        records.append(
            {
                "split": split,
                "layer": layer,
                "texts": estimate.n,
                "dispersion": estimate.mean,
                "dispersion_se": estimate.se,
                "token_dispersion": token.value,
                "token_dispersion_low": token.low,
                "token_dispersion_high": token.high,
                "perplexity": float(perplexity(nll.mean())),
            }
        )
    return pd.DataFrame.from_records(records)


def left_out(
    split: str, layers: list[str], nll: NDArray[np.float64], sums: NDArray[np.int64]
) -> pd.DataFrame:
    """Dispersion and mean NLL without each jackknife group of texts; what comparisons pair on."""
    groups = np.arange(len(nll)) % GROUPS
    frames = []
    for place, layer in enumerate(layers):
        total = sums[place].sum(axis=0)
        for group in np.unique(groups):
            rest = np.zeros_like(sums[place])
            rest[0] = total - sums[place][group]
            key = {"split": split, "layer": layer, "group": int(group)}
            values = {"dispersion": dispersion_of(rest).mean(), "nll": float(nll[groups != group].mean())}
            frames.append({**key, **values})
    return pd.DataFrame.from_records(frames)


def correlations(points: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Correlation of the bins' mean perplexity with every measure, per split, perplexity and layer."""
    records = []
    for (kind, layer), both in points.groupby(["perplexity", "layer"], sort=False):
        fitted: dict[str, tuple[float, float]] = {}
        for split, bins in both.groupby("split", sort=False):
            for measure in (m for m in MEASURES if m in bins and bins[m].notna().any()):
                x, y = bins["mean_perplexity"].to_numpy(), bins[measure].to_numpy()
                found = _one(x, y, seed)
                if split == "data" and not found["reason"]:
                    slope, intercept = np.polyfit(x, y, 1)
                    fitted[measure] = (float(slope), float(intercept))
                if measure in fitted and np.ptp(y) > 0:
                    slope, intercept = fitted[measure]
                    left = np.square(y - (slope * x + intercept)).sum()
                    found["line_r2"] = float(1 - left / np.square(y - y.mean()).sum())
                records.append(
                    {
                        "split": split,
                        "perplexity": kind,
                        "layer": layer,
                        "measure": measure,
                        "bins": len(x),
                        **found,
                    }
                )
    return pd.DataFrame.from_records(records)


def _one(x: NDArray[np.float64], y: NDArray[np.float64], seed: int) -> dict[str, Any]:
    nan = float("nan")
    names = ("pearson", "low", "high", "spearman", "pearson_log", "line_r2")
    try:
        interval = bootstrap_correlation(x, y, seed=seed)
        rank, log = correlation(x, y, "spearman"), correlation(np.log(x), y)
    except GeometryError as error:
        return {**dict.fromkeys(names, nan), "reason": str(error)}
    return {**dict(zip(names, (*interval, rank, log, nan), strict=True)), "reason": ""}
