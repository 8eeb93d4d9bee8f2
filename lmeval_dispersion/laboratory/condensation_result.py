"""What a condensation study found: tables and plots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lmeval_dispersion.errors import GeometryError
from lmeval_dispersion.laboratory.runs import Run
from lmeval_dispersion.laboratory.statistics import Interval, correlation, depth_trend, mean_interval

SCALE = 2.0**40  # the integer unit of summed similarities


@dataclass(frozen=True)
class CondensationResult:
    """Condensation of one model or several.

    Attributes:
        summary: One row a model: ``spearman`` and ``kendall`` of the layer mean against depth with 95 %
            bounds over texts (+1: tokens grow alike with every layer), ``last_mean``: similarity averaged
            over the last depths.
        layers: One row a model and depth: ``mean`` similarity over pairs of different tokens with bounds;
            ``reference_mean`` includes each token with itself, as released.
        histogram: One row a model, depth and bin of similarity: ``density`` (integrates to 1 over [-1, 1]);
            ``reference_density`` is that of the matrix averaged over texts, as released.
        texts: One row a model, depth and text: its mean; what comparisons pair on.
        manifest: Settings, counts and what was run.
    """

    summary: pd.DataFrame
    layers: pd.DataFrame
    histogram: pd.DataFrame
    texts: pd.DataFrame
    manifest: dict[str, Any]

    kind = "condensation"

    @classmethod
    def of(cls, run: Run) -> CondensationResult:
        """The result of a complete run."""
        tables = run.tables()
        return cls(tables["summary"], tables["layers"], tables["histogram"], tables["texts"], run.manifest)

    def to_frame(self) -> pd.DataFrame:
        """The layer means, tidy."""
        return self.layers

    def plot(self) -> Any:
        """Heat map of depth by similarity, one panel a model."""
        from lmeval_dispersion.laboratory.plots import condensation_heat

        return condensation_heat(self.histogram)


def model_tables(
    model: str,
    names: list[str],
    means: NDArray[np.float64],
    sums: dict[str, NDArray[np.int64]],
    settings: dict[str, Any],
) -> dict[str, pd.DataFrame]:
    """The tables of one model, from its texts' means (n, depths) and its summed counts."""
    seed, last = settings["seed"], settings["last"]
    depth = np.arange(len(names))
    bounds = [mean_interval(means[:, place], seed) for place in depth]
    layers = pd.DataFrame(
        {
            "model": model,
            "depth": depth,
            "layer": names,
            "mean": [b.value for b in bounds],
            "low": [b.low for b in bounds],
            "high": [b.high for b in bounds],
        }
    )
    counts = sums["histogram"]
    edges = np.linspace(-1, 1, counts.shape[1] + 1)
    histogram = pd.DataFrame(
        {
            "model": model,
            "depth": np.repeat(depth, counts.shape[1]),
            "low": np.tile(edges[:-1], len(names)),
            "high": np.tile(edges[1:], len(names)),
            "density": _density(counts).ravel(),
        }
    )
    summary = _summary(model, means, last, seed)
    if "matrix" in sums:
        matrices = sums["matrix"] / (SCALE * len(means))
        released = np.stack([np.histogram(m, bins=edges)[0] for m in matrices])
        layers["reference_mean"] = matrices.mean(axis=(1, 2))
        histogram["reference_density"] = _density(released).ravel()
        for kind in ("spearman", "kendall"):
            try:
                summary[f"reference_{kind}"] = correlation(depth, layers["reference_mean"], kind)
            except GeometryError:
                summary[f"reference_{kind}"] = float("nan")
    texts = pd.DataFrame(
        {
            "model": model,
            "depth": np.tile(depth, len(means)),
            "text": np.repeat(np.arange(len(means)), len(names)),
            "mean": means.ravel(),
        }
    )
    return {"summary": pd.DataFrame([summary]), "layers": layers, "histogram": histogram, "texts": texts}


def _summary(model: str, means: NDArray[np.float64], last: int, seed: int) -> dict[str, Any]:
    nan = float("nan")
    reason = ""
    try:
        rho, tau = depth_trend(means, seed)
    except GeometryError as error:
        rho = tau = Interval(nan, nan, nan)
        reason = str(error)
    tail = mean_interval(means[:, -last:].mean(axis=1), seed)
    record: dict[str, Any] = {"model": model, "texts": len(means), "depths": means.shape[1]}
    for name, interval in (("spearman", rho), ("kendall", tau), ("last_mean", tail)):
        record.update({name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high})
    return {**record, "last": min(last, means.shape[1]), "reason": reason}


def _density(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Counts (layers, bins) over [-1, 1] as densities; NaN where a layer has none."""
    with np.errstate(invalid="ignore"):
        return np.asarray(counts / counts.sum(axis=1, keepdims=True) * counts.shape[1] / 2)
