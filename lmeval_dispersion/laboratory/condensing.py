"""Condensation: do the tokens of a text point ever more the same way as they pass through the layers?

Per text and layer: the mean cosine similarity over pairs of different tokens, and their histogram. Depth 0
is what enters the first block, depth k the output of block k, the last depth the final layer after its norm:
the ``hidden_states`` of transformers. Similarity is 1 - dispersion over the tokens of one text.

Nothing of a text is kept but one mean a layer; histograms and the released code's mean matrices are sums
of integers.

Source: LD section 2. The released code counts every token's similarity with itself, divides by max(norm,
1e-3), averages the matrices of all texts and takes the histogram of that average; ``reference=True`` gives
its numbers beside ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.laboratory.condensation_result import SCALE, CondensationResult, model_tables
from lmeval_dispersion.laboratory.engine import Engine, token_dispersions, unit_tokens
from lmeval_dispersion.laboratory.runs import Run
from lmeval_dispersion.laboratory.study import (
    DataLike,
    Folder,
    as_models,
    as_texts,
    batch_size,
    batches,
    check_finite,
    data_settings,
    label,
    model_settings,
    opened,
    segments_of,
    summary_of,
)
from lmeval_dispersion.model.loading import ModelLike
from lmeval_dispersion.model.texts import Texts

BINS = 128

_RELEASED_EPS = 1e-3


def condensation(
    models: ModelLike | Sequence[ModelLike],
    data: DataLike,
    *,
    segment: int = 512,
    texts: int = 100,
    tokens: int = 512,
    last: int = 3,
    reference: bool = False,
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
        reference: Also the released code's numbers.
        pack: Join the texts to one stream before cutting.
        seed: Of the draws and the bootstrap.
        batch: Texts a forward pass; by memory if None.
        folder: Where the run is kept and can be resumed; a temporary place if None.
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
        **{"reference": reference, "pack": pack, "seed": seed},
    }
    with opened("condensation", settings, folder, quiet) as run:
        if not run.complete:
            _study(run, several, source, settings, batch)
        return CondensationResult.of(run)


def _study(
    run: Run, models: list[ModelLike], source: Texts, settings: dict[str, Any], batch: int | None
) -> None:
    parts: dict[str, list[pd.DataFrame]] = {}
    summaries = []
    for number, model in enumerate(models):
        engine = Engine(model)
        name = label(model)
        found = _one_model(run, engine, number, source, settings, batch)
        for table, frame in model_tables(name, *found, settings).items():
            parts.setdefault(table, []).append(frame)
        summaries.append({"model": name, **summary_of(engine)})
    run.finish({table: pd.concat(frames) for table, frames in parts.items()}, models=summaries)


def depths(engine: Engine) -> list[str]:
    """The places whose states are transformers' ``hidden_states``, in order."""
    return ["embeddings", *(f"layer.{k}" for k in range(len(engine.decoder) - 1)), "last"]


def _one_model(
    run: Run, engine: Engine, number: int, source: Texts, settings: dict[str, Any], batch: int | None
) -> tuple[list[str], NDArray[np.float64], dict[str, NDArray[np.int64]]]:
    names = depths(engine)
    index = {name: place for place, name in enumerate(names)}
    length, kept = settings["segment"], settings["tokens"]
    drawn = segments_of(
        run,
        f"m{number}.texts",
        source,
        engine,
        length=length,
        count=settings["texts"],
        seed=settings["seed"],
        pack=settings["pack"],
    )
    n = len(drawn.tokens)
    means = run.rows(f"m{number}.means", (n, len(names)))
    sums = {"histogram": np.zeros((len(names), BINS), dtype=np.int64)}
    if settings["reference"]:
        sums["matrix"] = np.zeros((len(names), kept, kept), dtype=np.int64)
    size = batch_size(run, engine, batch, length, 1)
    dtype = str(engine.loaded.model.dtype).removeprefix("torch.")

    def see(layer: str, first: int, states: Tensor) -> None:
        place = index[layer]
        rows = slice(first, first + len(states))
        states = torch.stack(
            [text[c] for text, c in zip(states, _chosen(rows, length, kept, settings), strict=True)]
        )
        means[rows, place] = 1 - token_dispersions(states)
        check_finite(means[rows, place], layer, drawn.origins[rows], source.source, dtype)
        for text in states:
            sums["histogram"][place] += similarity_counts(text)
            if "matrix" in sums:
                sums["matrix"][place] += released_similarities(text)

    def one_batch(which: int) -> None:
        start = which * size
        engine.run(drawn.tokens[start : start + size], names, see, first=start)

    total = run.work(f"m{number}.pass", batches(n, size), one_batch, sums)
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
