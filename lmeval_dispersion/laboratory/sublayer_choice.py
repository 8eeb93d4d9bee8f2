"""Which sub-layer of a block should key a kNN-LM datastore: the one whose states lie further apart.

Draws of N segments, the same ones for every candidate, over several seeds: mean and standard deviation of the
dispersion of their last-token states. The candidates' difference is taken seed by seed, since a draw moves
both. ``knn=True`` checks the recommendation: it builds the datastore from each candidate and measures.

Source: RD section 3.3, table 1, B.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.geometry import dispersion
from lmeval_dispersion.laboratory.engine import Engine, last_vectors
from lmeval_dispersion.laboratory.knn import knn_tables, require_faiss
from lmeval_dispersion.laboratory.runs import Run
from lmeval_dispersion.laboratory.study import (
    DataLike,
    Folder,
    as_texts,
    batch_size,
    batches,
    check_finite,
    data_settings,
    model_settings,
    opened,
    segments_of,
    summary_of,
)
from lmeval_dispersion.laboratory.sublayer_result import SublayersResult, recommendation
from lmeval_dispersion.model.loading import ModelLike
from lmeval_dispersion.model.texts import Texts

SIZES = (10, 50, 100)
REPEATS = 10

_POOL = 10  # segments to draw from, as a multiple of the largest draw


def sublayers(
    model: ModelLike,
    data: DataLike,
    *,
    layers: str | Sequence[str] = "layer.-1.attn,layer.-1.ffn",
    segment: int = 512,
    sizes: Sequence[int] = SIZES,
    repeats: int = REPEATS,
    knn: bool = False,
    knn_tokens: int = 100_000,
    pack: bool = False,
    seed: int = 0,
    batch: int | None = None,
    folder: Folder = None,
    quiet: bool = True,
) -> SublayersResult:
    """Dispersion of the candidates' states, the recommended one, and the proof where it is asked for.

    Args:
        model: Hub id, folder, :class:`~lmeval_dispersion.model.loading.ModelChoice`, or a loaded model.
        data: A file or Hub data set, see :mod:`lmeval_dispersion.model.texts`.
        layers: The candidates; by default both sub-layers of the last block.
        segment: Tokens a segment.
        sizes: Segments a draw; those that the data cannot fill are left out, with a note.
        repeats: Draws a size, each with a seed of its own.
        knn: Build a kNN-LM from each candidate and report its interpolated perplexity (needs faiss).
        knn_tokens: Tokens of the datastore; a tenth as many more tune it, and as many test it.
        pack: Join the texts to one stream.
        seed: Of the draws.
        batch: Segments a forward pass; by memory if None.
        folder: Where the run is kept and can be resumed; a temporary place if None.
        quiet: Whether to say nothing on stderr.

    Raises:
        UsageError: What was asked for does not fit the model (the message lists its sub-layers) or the data.
        MissingExtraError: ``knn`` without faiss.
        NonFiniteStateError: The model produces NaN; names layer and text.
    """
    source = as_texts(data)
    if knn:
        require_faiss()
    if not sizes or min(sizes) < 2 or repeats < 2:
        raise UsageError(
            f"expected draws of at least 2 segments and 2 repeats, got {list(sizes)} and {repeats}"
        )
    settings = {
        "model": model_settings(model),
        "data": data_settings(source),
        **{"layers": layers, "segment": segment, "sizes": sorted(set(sizes)), "repeats": repeats},
        **{"knn": knn, "knn_tokens": knn_tokens if knn else None, "pack": pack, "seed": seed},
    }
    with opened("sublayers", settings, folder, quiet) as run:
        if not run.complete:
            _study(run, Engine(model), source, settings, batch)
        return SublayersResult.of(run)


def _study(run: Run, engine: Engine, source: Texts, settings: dict[str, Any], batch: int | None) -> None:
    names = engine.layers(settings["layers"])
    if len(names) < 2:
        raise UsageError(
            f"expected at least two candidates to choose from, got {', '.join(names)}; pass --layers"
        )
    vectors = _vectors(run, engine, names, source, settings, batch)
    sizes = [size for size in settings["sizes"] if size <= len(vectors)]
    if not sizes:
        raise UsageError(
            f"expected at least {settings['sizes'][0]} segments of {settings['segment']} tokens, got "
            f"{len(vectors)}; pass more text or shorter segments"
        )
    draws = _draws(vectors, names, sizes, settings)
    tables = {"draws": draws, "summary": _summary(draws), "recommendation": recommendation(draws)}
    if settings["knn"]:
        tables.update(knn_tables(run, engine, names, source, settings, batch))
    left_out = [size for size in settings["sizes"] if size not in sizes]
    run.finish(tables, model=summary_of(engine), pool=len(vectors), left_out_sizes=left_out)


def _vectors(
    run: Run, engine: Engine, names: list[str], source: Texts, settings: dict[str, Any], batch: int | None
) -> NDArray[np.float32]:
    """Last-token states of every segment of the pool at every candidate, shape (n, candidates, width)."""
    length = settings["segment"]
    drawn = segments_of(
        run,
        "pool",
        source,
        engine,
        length=length,
        count=_POOL * settings["sizes"][-1],
        seed=settings["seed"],
        pack=settings["pack"],
    )
    n = len(drawn.tokens)
    vectors = run.rows("pool.vectors", (n, len(names), engine.width), np.float32)
    size = batch_size(run, engine, batch, length, len(names))
    dtype = str(engine.loaded.model.dtype).removeprefix("torch.")

    def see(layer: str, first: int, states: Tensor) -> None:
        rows = slice(first, first + len(states))
        vectors[rows, names.index(layer)] = found = last_vectors(states)
        check_finite(found, layer, drawn.origins[rows], source.source, dtype)

    def one_batch(number: int) -> None:
        start = number * size
        engine.run(drawn.tokens[start : start + size], names, see, first=start)

    run.work("pool.pass", batches(n, size), one_batch)
    return np.asarray(vectors)


def _draws(
    vectors: NDArray[np.float32], names: list[str], sizes: list[int], settings: dict[str, Any]
) -> pd.DataFrame:
    records = []
    for size in sizes:
        for repeat in range(settings["repeats"]):
            # The same segments for every candidate, so that a difference is no difference of texts.
            rng = np.random.default_rng([settings["seed"], size, repeat])
            chosen = rng.choice(len(vectors), size, replace=False)
            for place, name in enumerate(names):
                value = dispersion(vectors[chosen, place])
                records.append({"layer": name, "segments": size, "draw": repeat, "dispersion": value})
    return pd.DataFrame.from_records(records)


def _summary(draws: pd.DataFrame) -> pd.DataFrame:
    """Mean and standard deviation over draws, as in the paper's table 1."""
    grouped = draws.groupby(["layer", "segments"], sort=False)["dispersion"]
    return grouped.agg(mean="mean", sd="std", draws="count").reset_index()
