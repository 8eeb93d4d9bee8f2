"""Condensation: do the tokens of a text point ever more the same way as they pass through the layers?

Per text and layer: the mean cosine similarity over pairs of different tokens, and their histogram. Depth 0
is what enters the first block, depth k the output of block k, the last depth the final layer after its norm:
the ``hidden_states`` of transformers. Similarity is 1 - dispersion over the tokens of one text.

Nothing of a text is kept but one mean a layer; histograms and the released code's mean matrices are sums
of integers.

Source: LD section 2. The released code counts every token's similarity with itself, divides by max(norm,
1e-3), averages the matrices of all texts and takes the histogram of that average; ``released=True`` gives
its numbers beside ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmeval_dispersion.errors import GeometryError, UsageError
from lmeval_dispersion.laboratory.causal_model import (
    CausalModel,
    batch_size,
    batches,
    check_finite,
    token_dispersions,
    unit_tokens,
)
from lmeval_dispersion.laboratory.controls import as_controls, control_model, control_tokens
from lmeval_dispersion.laboratory.inputs import (
    DataLike,
    as_models,
    as_texts,
    data_settings,
    input_names,
    labels,
    model_settings,
)
from lmeval_dispersion.laboratory.measures.claims import student_bounds
from lmeval_dispersion.laboratory.measures.depth_trend import depth_trend, text_trends
from lmeval_dispersion.laboratory.measures.integer_sums import SCALE
from lmeval_dispersion.laboratory.reports.results import StudyResult
from lmeval_dispersion.laboratory.segments import Segments, segments_of
from lmeval_dispersion.laboratory.study import Folder, Study, opened
from lmeval_dispersion.model.loading import ModelLike
from lmeval_dispersion.model.texts import Texts
from lmeval_dispersion.report import nullable
from lmeval_dispersion.statistics import Interval, correlation, mean_interval

BINS = 128

_RELEASED_EPS = 1e-3


@dataclass(frozen=True, repr=False)
class CondensationResult(StudyResult):
    """Condensation of one model or several.

    Attributes:
        summary: One row a model and control (empty for the model itself): ``spearman`` and ``kendall`` of
            the layer mean against depth (+1: tokens grow alike with every layer) with percentiles over
            resampled texts, ``trend``: the mean over texts of each text's own Spearman, with a Student
            interval over texts, ``last_mean``: similarity averaged over the last depths.
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
    def of(cls, study: Study) -> CondensationResult:
        """The result of a complete study."""
        tables = study.tables()
        return cls(tables["summary"], tables["layers"], tables["histogram"], tables["texts"], study.manifest)

    def to_frame(self) -> pd.DataFrame:
        """The layer means, tidy."""
        return nullable(self.layers)

    def plot(self) -> Any:
        """Heat map of depth by similarity, one panel a model."""
        from lmeval_dispersion.laboratory.reports.charts import condensation_heat

        return condensation_heat(self.histogram)


def condensation(
    models: ModelLike | Sequence[ModelLike],
    data: DataLike,
    *,
    segment: int = 512,
    texts: int = 100,
    tokens: int = 512,
    last: int = 3,
    released: bool = False,
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
        released: Also the released code's numbers.
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
    several = as_models(models)
    source = as_texts(data)
    if tokens < 2 or last < 1:
        raise UsageError(f"expected at least 2 tokens and 1 last layer, got {tokens} and {last}")
    settings = {
        "models": [model_settings(model) for model in several],
        "data": data_settings(source),
        **{"segment": segment, "texts": texts, "tokens": min(tokens, segment), "last": last},
        **{"released": released, "control": as_controls(control), "pack": pack, "seed": seed},
    }
    names = input_names(several, source)
    with opened("condensation", settings, names, folder, quiet) as study:
        if not study.complete:
            _work(study, several, source, settings, batch)
        return CondensationResult.of(study)


def _work(
    study: Study, models: list[ModelLike], source: Texts, settings: dict[str, Any], batch: int | None
) -> None:
    parts: dict[str, list[pd.DataFrame]] = {}
    described = []
    for number, (model, label) in enumerate(zip(models, labels(models), strict=True)):
        causal = CausalModel(model)
        drawn = segments_of(
            study,
            f"m{number}.texts",
            source,
            causal,
            length=settings["segment"],
            count=settings["texts"],
            seed=settings["seed"],
            pack=settings["pack"],
        )
        for control in ("", *settings["control"]):
            other = control_model(control, causal, settings["seed"])
            found = _one_pass(study, other, f"m{number}{control}", control, drawn, source, settings, batch)
            for table, frame in model_tables(label, *found, settings).items():
                frame.insert(1, "control", control)
                parts.setdefault(table, []).append(frame)
        described.append({"model": label, **causal.summary()})
    study.finish({table: pd.concat(frames) for table, frames in parts.items()}, models=described)


def depths(causal: CausalModel) -> list[str]:
    """The places whose states are transformers' ``hidden_states``, in order."""
    return ["embeddings", *(f"layer.{k}" for k in range(len(causal.decoder) - 1)), "last"]


def _one_pass(
    study: Study,
    causal: CausalModel,
    key: str,
    control: str,
    drawn: Segments,
    source: Texts,
    settings: dict[str, Any],
    batch: int | None,
) -> tuple[list[str], NDArray[np.float64], dict[str, NDArray[np.int64]]]:
    names = depths(causal)
    index = {name: place for place, name in enumerate(names)}
    length, kept = settings["segment"], settings["tokens"]
    n = len(drawn.tokens)
    means = study.rows(f"{key}.means", (n, len(names)))
    sums = {"histogram": np.zeros((len(names), BINS), dtype=np.int64)}
    if settings["released"]:
        sums["matrix"] = np.zeros((len(names), kept, kept), dtype=np.int64)
    size = batch_size(study, causal, batch, length, 1)
    dtype = str(causal.loaded.model.dtype).removeprefix("torch.")

    def see(layer: str, first: int, states: Tensor) -> Callable[[], None]:
        place = index[layer]
        rows = slice(first, first + len(states))
        states = torch.stack(
            [text[c] for text, c in zip(states, _chosen(rows, length, kept, settings), strict=True)]
        )
        means[rows, place] = 1 - token_dispersions(states)
        check_finite(means[rows, place], layer, drawn.origins[rows], source.source, dtype)
        counts = sum(similarity_counts(text) for text in states)
        matrix = sum(released_similarities(text) for text in states) if "matrix" in sums else 0

        def add() -> None:
            sums["histogram"][place] += counts
            if "matrix" in sums:
                sums["matrix"][place] += matrix

        return add

    def one_batch(which: int) -> None:
        start = which * size
        numbers = np.arange(start, min(start + size, n))
        tokens = control_tokens(control, drawn.tokens[numbers], numbers, causal, settings["seed"])
        causal.forward(tokens, names, see, first=start)

    total = study.work(f"{key}.pass", batches(n, size), one_batch, sums)
    return names, np.asarray(means), total


def _chosen(
    rows: slice, length: int, kept: int, settings: dict[str, Any]
) -> Iterator[NDArray[np.int64] | slice]:
    """Which tokens of each text are compared: all, or a draw that depends on the text's number only."""
    for number in range(rows.start, rows.stop):
        if kept >= length:
            yield slice(None)
        else:
            draw = np.random.default_rng([settings["seed"], number]).choice(length, kept, replace=False)
            yield np.sort(draw)


def similarity_counts(states: Tensor) -> NDArray[np.int64]:
    """Histogram of the cosine similarity over pairs i < j of tokens (t, d), BINS even bins over [-1, 1]."""
    units, valid = unit_tokens(states[None])
    unit = units[0][valid[0]]
    similarity = (unit @ unit.T).clamp(-1, 1)
    similarity.fill_diagonal_(1.0)
    counts = torch.histc(similarity, BINS, -1, 1).cpu().numpy().astype(np.int64)
    counts[-1] -= len(unit)  # the diagonal
    return np.asarray(counts // 2)


def released_similarities(states: Tensor) -> NDArray[np.int64]:
    """The released code's similarity matrix of one text's tokens (t, t), diagonal included, times SCALE."""
    x = states.float()
    unit = x / x.norm(dim=-1, keepdim=True).clamp_min(_RELEASED_EPS)
    similarity = (unit @ unit.T).clamp(-1, 1)
    scaled = np.rint(similarity.cpu().numpy().astype(np.float64) * SCALE)
    return np.asarray(scaled, dtype=np.int64)


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
    each = text_trends(means)
    each = each[np.isfinite(each)]
    trend = Interval(float(each.mean()) if len(each) else nan, *student_bounds(each))
    for name, interval in (("trend", trend), ("spearman", rho), ("kendall", tau), ("last_mean", tail)):
        record.update({name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high})
    return {**record, "last": min(last, means.shape[1]), "reason": reason}


def _density(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Counts (layers, bins) over [-1, 1] as densities; NaN where a layer has none."""
    with np.errstate(invalid="ignore"):
        return np.asarray(counts / counts.sum(axis=1, keepdims=True) * counts.shape[1] / 2)
