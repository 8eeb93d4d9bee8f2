"""Condensation: do the tokens of a text point ever more the same way as they pass through the layers?

Per text and layer: the mean cosine similarity over pairs of different tokens, and their histogram. Depth 0
is what enters the first block, depth k the output of block k, the last depth the final layer after its norm:
the ``hidden_states`` of transformers. Similarity is 1 - dispersion over the tokens of one text.

Source: LD section 2. The released code counts every token's similarity with itself, divides by max(norm,
1e-3), averages the matrices of all texts and takes the histogram of that average.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmeval_dispersion.errors import GeometryError, UsageError
from lmeval_dispersion.laboratory import charts
from lmeval_dispersion.laboratory.analysis import Analysis, DataLike, StudyResult, analyse, table
from lmeval_dispersion.laboratory.causal_model import (
    CausalModel,
    as_controls,
    control_model,
    token_dispersions,
    unit_tokens,
)
from lmeval_dispersion.laboratory.claims import depth_trend, student_bounds, text_trends
from lmeval_dispersion.laboratory.study import Folder
from lmeval_dispersion.model.loading import ModelLike
from lmeval_dispersion.report import Chart, Col, Table
from lmeval_dispersion.statistics import Array, Interval, mean_interval

BINS = 128

_SHOWN = 12  # depths of a default answer


@dataclass(frozen=True, repr=False)
class CondensationResult(StudyResult):
    """Condensation of one model or several.

    Attributes:
        summary: One row a model and control (empty for the model itself): ``spearman`` and ``kendall`` of
            the layer mean against depth (+1: tokens grow alike with every layer) with percentiles over
            resampled texts, ``trend``: the mean over texts of each text's own Spearman, with a Student
            interval over texts, ``last_mean``: similarity averaged over the last depths.
        layers: One row a model and depth: ``mean`` similarity over pairs of different tokens with bounds.
        histogram: One row a model, depth and bin of similarity: ``density`` (integrates to 1 over [-1, 1]).
        texts: One row a model, depth and text: its mean; what comparisons pair on.
        manifest: Settings, counts and what was run.
    """

    summary: pd.DataFrame
    layers: pd.DataFrame
    histogram: pd.DataFrame
    texts: pd.DataFrame

    kind = "condensation"
    main = "layers"
    template = "condensation.jinja"

    def tables(self) -> dict[str, Table]:
        """``trends`` a model and control where there are several, else ``some`` depths; ``layers``: all."""
        caption = "Mean cosine similarity of two tokens"
        tables = {"layers": table(_Depth, self.layers, caption)}
        if len(self.summary) == 1:
            tables["some"] = table(_Depth, self.layers, caption, most=_SHOWN, hide=("model",))
        else:
            curves = {trend.model: trend.curve for trend in self._trends()}
            known = self.summary.assign(
                curve=self.summary["model"].map(curves).where(self.summary["control"] == "", ""),
            )
            hidden = ("curve", "last_mean", "kendall", "texts")
            caption = "Spearman of similarity and depth"
            tables["trends"] = table(_Trend, known, caption, most=_SHOWN, hide=hidden)
            tables["every_trend"] = table(_Trend, known, caption)
        return tables

    def charts(self) -> dict[str, Chart]:
        """``lines``: mean similarity by depth; ``heat``: its distribution at every depth."""
        lines, heat = (
            partial(charts.condensation_lines, self.layers),
            partial(charts.condensation_heat, self.histogram),
        )
        return {
            "lines": Chart(lines, "Mean cosine similarity by depth", "One line a model."),
            "heat": Chart(heat, "How the similarities are distributed at every depth", "A heat map a model."),
        }

    def context(self) -> dict[str, Any]:
        """For the template: whether tokens grow alike with depth, per model, beside its controls."""
        controls = [name for name in dict.fromkeys(self.summary["control"]) if name]
        return {**super().context(), "trends": self._trends(), "controls": controls}

    def _trends(self) -> list[Verdict]:
        models = list(dict.fromkeys(self.texts["model"]))
        return [verdict(name, self.texts[self.texts["model"] == name], len(models)) for name in models]


@dataclass(frozen=True)
class _Depth:
    """Similarity at one depth."""

    model: Annotated[str, Col("Model")]
    control: Annotated[str, Col("Control", hint="random weights, or the tokens of each text in random order")]
    depth: Annotated[
        int, Col("Depth", "d", hint="0 enters the first block; the last is after the final norm")
    ]
    layer: Annotated[str, Col("Layer")]
    mean: Annotated[float, Col("Mean", ".4f", dots="both", reach="low high")]
    low: Annotated[float, Col("95 % from", ".4f", short="from", drop=1)]
    high: Annotated[float, Col("to", ".4f", drop=1)]


@dataclass(frozen=True)
class _Trend:
    """A model's trend with depth, or a control's."""

    model: Annotated[str, Col("Model")]
    control: Annotated[str, Col("Control", hint="random weights, or the tokens of each text in random order")]
    trend: Annotated[
        float,
        Col(
            "Spearman",
            "+.2f",
            dots="both",
            reach="trend_low trend_high",
            hint="of each text's own similarity and depth, averaged",
        ),
    ]
    trend_low: Annotated[float, Col("95 % from", "+.2f", short="from", drop=1)]
    trend_high: Annotated[float, Col("to", "+.2f", drop=1)]
    curve: Annotated[str, Col("Curve")]
    last_mean: Annotated[float, Col("Mean of the last depths", ".3f", short="Last mean", drop=2)]
    kendall: Annotated[float, Col("Kendall of the means", "+.2f", short="Kendall", drop=4)]
    texts: Annotated[int, Col("Texts", "d", drop=3)]
    reason: Annotated[str, Col("Why undefined")] = ""


class Verdict(NamedTuple):
    """A model's trend: ``alike``, ``apart``, ``turns``, ``none`` or ``undefined``, and its controls'."""

    model: str
    verdict: str
    value: float
    low: float
    high: float
    curve: str
    controls: dict[str, float]
    like: list[str]
    beyond: list[str]

    @property
    def key(self) -> str:
        """A text that is the same for models of one verdict."""
        return " ".join([self.verdict, *self.like, "/", *self.beyond])


def verdict(model: str, texts: pd.DataFrame, claims: int) -> Verdict:
    """The trend of one model's texts, with bounds that hold for ``claims`` models together.

    Tokens grow alike where each text's own Spearman of similarity and depth is above 0 on average, and apart
    where it is below. A curve that turns for sure within the first two thirds of the depth does neither.
    """
    similarities = {
        str(control): frame.pivot(index="text", columns="depth", values="mean").to_numpy()
        for control, frame in texts.groupby("control", sort=False)
    }
    trends = {control: text_trends(values) for control, values in similarities.items()}
    mine = trends.pop("")
    others = {
        control: float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")
        for control, values in trends.items()
    }
    known = mine[np.isfinite(mine)]
    if len(known) < 2:
        nan = float("nan")
        return Verdict(model, "undefined", nan, nan, nan, "", others, [], [])
    low, high = student_bounds(known, claims)
    trend = float(known.mean()), low, high
    sign = 1 if low > 0 else -1 if high < 0 else 0
    if not sign:
        return Verdict(model, "none", *trend, "", others, [], [])
    if turn := _turn(sign * similarities[""], claims):
        words = ("rises", "falls")[::sign]
        curve = f"{words[0]} to depth {turn} of {similarities[''].shape[1] - 1}, then {words[1]}"
        return Verdict(model, "turns", *trend, curve, others, [], [])
    like = []
    for control, values in trends.items():
        apart = sign * (mine - values)
        if not student_bounds(apart[np.isfinite(apart)], claims * len(trends)).low > 0:
            like.append(control)
    word = "alike" if sign > 0 else "apart"
    return Verdict(model, word, *trend, "", others, like, [] if like else list(trends))


def _turn(values: Array, claims: int) -> int:
    """The depth within the first two thirds from which values (texts, depths) fall for sure; 0 for none."""
    last = values.shape[1] - 1
    peak = int(values.mean(axis=0).argmax())
    if not 0 < peak <= last * 2 / 3:
        return 0
    fall = values[:, peak] - values[:, peak + 1 :].mean(axis=1)
    # The peak is chosen among all depths, so the bound holds for each of them.
    return peak if student_bounds(fall[np.isfinite(fall)], claims * last).low > 0 else 0


def condensation(
    models: ModelLike | Sequence[ModelLike],
    data: DataLike,
    *,
    segment: int = 512,
    texts: int = 100,
    tokens: int = 512,
    last: int = 3,
    control: str | Sequence[str] | None = None,
    pack: bool = False,
    seed: int = 0,
    batch: int | None = None,
    folder: Folder = None,
    quiet: bool = True,
) -> CondensationResult:
    """Similarity of the tokens of a text, layer by layer, of one model or several.

    Args:
        models: One model or several: a family by size, a training trajectory by revision.
        data: A file or Hub data set, see :mod:`lmeval_dispersion.model.texts`.
        segment: Tokens a text.
        texts: Texts to draw.
        tokens: Tokens of a text that are compared; drawn at random, the same ones in all layers, where the
            text has more.
        last: How many of the last depths the summary averages.
        control: ``untrained``, ``shuffled`` or both, run beside every model on the same texts.
        pack: Join the texts to one stream before cutting.
        seed: Of the draws and the bootstrap.
        batch: Texts a forward pass; by memory if None.
        folder: Where the study is kept and can be resumed; a temporary place if None.
        quiet: Whether to say nothing on stderr.

    Raises:
        UsageError: What was asked for does not fit a model or the data.
        NonFiniteStateError: A model produces NaN; names layer and text.
    """
    if tokens < 2 or last < 1:
        raise UsageError(f"expected at least 2 tokens and 1 last layer, got {tokens} and {last}")
    settings = {
        **{"segment": segment, "texts": texts, "tokens": min(tokens, segment), "last": last},
        **{"control": as_controls(control), "pack": pack, "seed": seed},
    }
    return analyse(CondensationResult, _measure, models, data, settings, batch, folder, quiet)


def _measure(analysis: Analysis) -> None:
    settings = analysis.settings
    length, kept, seed = settings["segment"], settings["tokens"], settings["seed"]

    def reduce(states: Tensor, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Of each text the mean similarity, then the histogram."""
        if kept < length:  # a draw that depends on the text's number only, so that layers and models share it
            draws = [np.random.default_rng([seed, n]).choice(length, kept, replace=False) for n in numbers]
            states = torch.stack([text[np.sort(draw)] for text, draw in zip(states, draws, strict=True)])
        return np.column_stack([1 - token_dispersions(states), [similarity_counts(text) for text in states]])

    parts: dict[str, list[pd.DataFrame]] = {}
    described = []
    for number, (label, model) in enumerate(analysis.models.items()):
        causal = CausalModel(model)
        # The places whose states are transformers' ``hidden_states``, in order.
        names = ["embeddings", *(f"layer.{k}" for k in range(len(causal.decoder) - 1)), "last"]
        drawn = analysis.segments(f"m{number}.texts", causal, count=settings["texts"])
        for control in ("", *settings["control"]):
            other = control_model(control, causal, seed)
            units = analysis.over(f"m{number}{control}", other, drawn, names, reduce, control=control)
            each = np.stack([units.joined(name) for name in names], axis=1)
            tables = model_tables(label, names, each[..., 0], each[..., 1:].sum(axis=0), settings)
            for name, frame in tables.items():
                frame.insert(1, "control", control)
                parts.setdefault(name, []).append(frame)
        described.append({"model": label, **causal.summary()})
    analysis.study.finish({name: pd.concat(frames) for name, frames in parts.items()}, models=described)


def similarity_counts(states: Tensor) -> NDArray[np.int64]:
    """Histogram of the cosine similarity over pairs i < j of tokens (t, d), BINS even bins over [-1, 1]."""
    units, valid = unit_tokens(states[None])
    unit = units[0][valid[0]]
    similarity = (unit @ unit.T).clamp(-1, 1)
    similarity.fill_diagonal_(1.0)
    counts = torch.histc(similarity, BINS, -1, 1).cpu().numpy().astype(np.int64)
    counts[-1] -= len(unit)  # the diagonal
    return np.asarray(counts // 2)


def model_tables(
    model: str,
    names: list[str],
    means: NDArray[np.float64],
    counts: NDArray[np.float64],
    settings: Mapping[str, Any],
) -> dict[str, pd.DataFrame]:
    """The tables of one model, from its texts' means (n, depths) and the histograms (depths, bins)."""
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
    texts = pd.DataFrame(
        {
            "model": model,
            "depth": np.tile(depth, len(means)),
            "text": np.repeat(np.arange(len(means)), len(names)),
            "mean": means.ravel(),
        }
    )
    summary = pd.DataFrame([_summary(model, means, last, seed)])
    return {"summary": summary, "layers": layers, "histogram": histogram, "texts": texts}


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
    each = text_trends(means)
    each = each[np.isfinite(each)]
    trend = Interval(float(each.mean()) if len(each) else nan, *student_bounds(each))
    for name, interval in (("trend", trend), ("spearman", rho), ("kendall", tau), ("last_mean", tail)):
        record.update({name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high})
    return {**record, "last": min(last, means.shape[1]), "reason": reason}


def _density(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Counts (layers, bins) over [-1, 1] as densities; NaN where a layer has none."""
    with np.errstate(invalid="ignore"):
        return np.asarray(counts / counts.sum(axis=1, keepdims=True) * counts.shape[1] / 2)
