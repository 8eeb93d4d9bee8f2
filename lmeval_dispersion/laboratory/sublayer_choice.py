"""Which sub-layer of a block should key a kNN-LM datastore: the one whose states lie further apart.

Draws of N segments, the same ones for every candidate, over several seeds: mean and standard deviation of the
dispersion of their last-token states. The candidates' difference is taken seed by seed, since a draw moves
both. ``knn=True`` checks the recommendation: it builds the datastore from each candidate and measures.

Source: RD section 3.3, table 1, B.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.geometry import dispersion
from lmeval_dispersion.laboratory.causal_model import (
    CausalModel,
    batch_size,
    batches,
    check_finite,
    last_vectors,
)
from lmeval_dispersion.laboratory.inputs import DataLike, as_texts, data_settings, input_names, model_settings
from lmeval_dispersion.laboratory.knn import agreement, knn_tables, require_faiss
from lmeval_dispersion.laboratory.reports.results import StudyResult
from lmeval_dispersion.laboratory.segments import segments_of
from lmeval_dispersion.laboratory.study import Folder, Study, opened
from lmeval_dispersion.model.loading import ModelLike
from lmeval_dispersion.model.texts import Texts
from lmeval_dispersion.report import nullable

SIZES = (10, 50, 100)
REPEATS = 10

MARGIN = 2.0  # of the lead, in standard deviations of one draw's

_POOL = 10  # segments to draw from, as a multiple of the largest draw


@dataclass(frozen=True, repr=False)
class SublayersResult(StudyResult):
    """Dispersion of candidate sub-layers.

    Attributes:
        summary: One row a candidate and size of draw: ``mean`` and ``sd`` over draws.
        recommendation: One row: the ``layer`` of highest mean in the largest draws, ``second``, and the
            ``margin``: mean difference over draws divided by the standard deviation of one draw's difference.
            Below ``MARGIN`` the draws do not tell them apart (``told_apart``). Where the kNN-LM was built,
            ``lowest_perplexity`` and ``knn``: whether it ``agrees``, ``contradicts``, or leaves the two
            ``not told apart``.
        draws: One row a candidate, size and draw.
        knn: One row a candidate of the kNN-LM, or None where it was not asked for: ``base_perplexity`` of the
            model alone, ``perplexity`` interpolated, ``weight`` and ``temperature`` as tuned on other
            segments, ``gain`` in nats a token with bounds over segments.
        knn_differences: One row a pair of candidates, first minus second in nats a token, with bounds.
        manifest: Settings, counts and what was run.
    """

    summary: pd.DataFrame
    recommendation: pd.DataFrame
    draws: pd.DataFrame
    knn: pd.DataFrame | None
    knn_differences: pd.DataFrame | None
    manifest: dict[str, Any]

    kind = "sublayers"

    @classmethod
    def of(cls, study: Study) -> SublayersResult:
        """The result of a complete study."""
        tables = study.tables()
        knn, differences = tables.get("knn"), tables.get("knn_differences")
        chosen = tables["recommendation"]
        if knn is not None and differences is not None:
            best = knn["layer"].to_numpy()[int(knn["perplexity"].to_numpy().argmin())]
            verdict = agreement(str(chosen["layer"].iloc[0]), differences)
            chosen = chosen.assign(lowest_perplexity=best, knn=verdict)
        return cls(tables["summary"], chosen, tables["draws"], knn, differences, study.manifest)

    def to_frame(self) -> pd.DataFrame:
        """Mean and sd of every candidate and size, tidy."""
        return nullable(self.summary)

    def plot(self) -> Any:
        """Every draw's dispersion, one column a size, one colour a candidate."""
        from lmeval_dispersion.laboratory.reports.charts import sublayer_draws

        return sublayer_draws(self.draws)


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
        folder: Where the study is kept and can be resumed; a temporary place if None.
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
    names = input_names([model], source)
    with opened("sublayers", settings, names, folder, quiet) as study:
        if not study.complete:
            _work(study, CausalModel(model), source, settings, batch)
        return SublayersResult.of(study)


def _work(
    study: Study, causal: CausalModel, source: Texts, settings: dict[str, Any], batch: int | None
) -> None:
    names = causal.layers(settings["layers"])
    if len(names) < 2:
        raise UsageError(
            f"expected at least two candidates to choose from, got {', '.join(names)}; pass --layer for each"
        )
    vectors = _vectors(study, causal, names, source, settings, batch)
    sizes = [size for size in settings["sizes"] if size <= len(vectors)]
    if not sizes:
        raise UsageError(
            f"expected at least {settings['sizes'][0]} segments of {settings['segment']} tokens, got "
            f"{len(vectors)}; pass more text or shorter segments"
        )
    draws = _draws(vectors, names, sizes, settings)
    tables = {
        "draws": draws,
        "summary": _summary(draws),
        "recommendation": recommendation(draws, len(vectors)),
    }
    if settings["knn"]:
        tables.update(knn_tables(study, causal, names, source, settings, batch))
    left_out = [size for size in settings["sizes"] if size not in sizes]
    study.finish(tables, model=causal.summary(), pool=len(vectors), left_out_sizes=left_out)


def _vectors(
    study: Study,
    causal: CausalModel,
    names: list[str],
    source: Texts,
    settings: dict[str, Any],
    batch: int | None,
) -> NDArray[np.float32]:
    """Last-token states of every segment of the pool at every candidate, shape (n, candidates, width)."""
    length = settings["segment"]
    drawn = segments_of(
        study,
        "pool",
        source,
        causal,
        length=length,
        count=_POOL * settings["sizes"][-1],
        seed=settings["seed"],
        pack=settings["pack"],
    )
    n = len(drawn.tokens)
    vectors = study.rows("pool.vectors", (n, len(names), causal.width), np.float32)
    size = batch_size(study, causal, batch, length, len(names))
    dtype = str(causal.loaded.model.dtype).removeprefix("torch.")

    def see(layer: str, first: int, states: Tensor) -> None:
        rows = slice(first, first + len(states))
        vectors[rows, names.index(layer)] = found = last_vectors(states)
        check_finite(found, layer, drawn.origins[rows], source.source, dtype)

    def one_batch(number: int) -> None:
        start = number * size
        causal.forward(drawn.tokens[start : start + size], names, see, first=start)

    study.work("pool.pass", batches(n, size), one_batch)
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


def recommendation(draws: pd.DataFrame, pool: int) -> pd.DataFrame:
    """The candidate of highest mean in the largest draws, with its margin over the second.

    Draws of s of a pool's n segments share some, so they vary less than draws of new text would; their
    standard deviation is divided by sqrt(1 - s / n) for that. A draw of the whole pool has no margin.
    """
    size = int(draws["segments"].max())
    wide = draws[draws["segments"] == size].pivot(index="draw", columns="layer", values="dispersion")
    best, second = wide.mean().sort_values(ascending=False, kind="stable").index[:2]
    difference = (wide[best] - wide[second]).to_numpy()
    new = 1 - size / pool
    spread = float(np.std(difference, ddof=1)) / np.sqrt(new) if new > 0 else float("nan")
    margin = float(difference.mean()) / spread if spread > 0 else float("nan")
    record = {
        "layer": best,
        "second": second,
        "segments": size,
        "difference": float(difference.mean()),
        "difference_sd": spread,
        "margin": margin,
        "told_apart": margin >= MARGIN,
        "draws_won": int((difference > 0).sum()),
        "draws": len(difference),
    }
    return pd.DataFrame([record])
