"""Semantic clusters: do contexts that go on with the same words stay together while all of them spread?

Each cluster holds contexts that one recurring n-gram follows; a context's vector is the state of its last
token, which predicts the n-gram's first. ``within``: mean cosine distance of members to their cluster's
centroid; ``between``: mean pair distance of the centroids.

Source: RD section 2.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.geometry import contributions, dispersion_estimate, unit_rows
from lmeval_dispersion.laboratory.causal_model import (
    CausalModel,
    batch_size,
    check_finite,
    last_vectors,
    perplexity,
)
from lmeval_dispersion.laboratory.inputs import (
    DataLike,
    as_models,
    as_texts,
    data_settings,
    input_names,
    labels,
    model_settings,
)
from lmeval_dispersion.laboratory.measures.claims import jackknife_bounds, log_ratios_left_out
from lmeval_dispersion.laboratory.ngrams import Contexts, recurring_contexts, write_corpus
from lmeval_dispersion.laboratory.reports.results import StudyResult
from lmeval_dispersion.laboratory.segments import digest
from lmeval_dispersion.laboratory.study import Folder, Study, opened
from lmeval_dispersion.model.loading import ModelLike
from lmeval_dispersion.model.texts import Texts
from lmeval_dispersion.report import nullable
from lmeval_dispersion.statistics import Array, Interval


@dataclass(frozen=True, repr=False)
class ClustersResult(StudyResult):
    """Distances within and between clusters of one model or several.

    Attributes:
        summary: One row a model and layer: ``within`` with 95 % bounds over clusters, ``between`` with its
            jackknife error over clusters, ``ratio`` = between / within with 95 % bounds (jackknife of its
            logarithm over clusters), ``perplexity`` of the contexts.
        clusters: One row a model, layer and cluster: its ``within``, and ``apart``, the mean distance of its
            centroid to the others.
        ngrams: One row a cluster: its n-gram and how often it occurs.
        manifest: Settings, counts and what was run.
    """

    summary: pd.DataFrame
    clusters: pd.DataFrame
    ngrams: pd.DataFrame
    manifest: dict[str, Any]

    kind = "clusters"

    @classmethod
    def of(cls, study: Study) -> ClustersResult:
        """The result of a complete study."""
        tables = study.tables()
        return cls(tables["summary"], tables["clusters"], tables["ngrams"], study.manifest)

    def to_frame(self) -> pd.DataFrame:
        """The distances, tidy."""
        return nullable(self.summary)

    def plot(self) -> Any:
        """Both distances of every model, one panel a layer."""
        from lmeval_dispersion.laboratory.reports.charts import cluster_lines

        return cluster_lines(self.summary)


def clusters(
    models: ModelLike | Sequence[ModelLike],
    data: DataLike,
    *,
    ngram: int = 10,
    occurrences: int = 100,
    contexts: int = 100,
    context: int = 100,
    clusters: int = 500,
    layers: str | Sequence[str] = "last",
    pack: bool = False,
    seed: int = 0,
    batch: int | None = None,
    folder: Folder = None,
    quiet: bool = True,
) -> ClustersResult:
    """Distances within and between clusters of contexts of ``data``, in every model.

    Args:
        models: Checkpoints with one tokenizer, such as revisions of one training.
        data: A file or Hub data set, see :mod:`lmeval_dispersion.model.texts`; all of it is read.
        ngram: Tokens of the n-gram that the contexts of a cluster share as their continuation.
        occurrences: How often it must occur.
        contexts: Contexts a cluster.
        context: Tokens a context.
        clusters: The most clusters; the most frequent n-grams come first.
        layers: ``last``, ``all``, or names.
        pack: Join the texts to one stream.
        seed: Of the draw and the bootstrap.
        batch: Contexts a forward pass; by memory if None.
        folder: Where the study is kept and can be resumed; a temporary place if None.
        quiet: Whether to say nothing on stderr.

    Raises:
        UsageError: Too few n-grams recur, tokenizers differ, or what was asked for does not fit a model.
        NonFiniteStateError: A model produces NaN.
    """
    several, source = as_models(models), as_texts(data)
    settings = {
        "models": [model_settings(model) for model in several],
        "data": data_settings(source),
        **{"ngram": ngram, "occurrences": occurrences, "contexts": contexts, "context": context},
        **{"clusters": clusters, "layers": layers, "pack": pack, "seed": seed},
    }
    names = input_names(several, source)
    with opened("clusters", settings, names, folder, quiet) as study:
        if not study.complete:
            _work(study, several, source, settings, batch)
        return ClustersResult.of(study)


def _work(
    study: Study, models: list[ModelLike], source: Texts, settings: dict[str, Any], batch: int | None
) -> None:
    causal = CausalModel(models[0])
    tokenizer = causal.loaded.tokenizer
    found = _contexts(study, source, tokenizer, settings)
    summaries, distances, described = [], [], []
    names = labels(models)
    for number, (model, name) in enumerate(zip(models, names, strict=True)):
        causal = causal if number == 0 else CausalModel(model)
        if causal.loaded.tokenizer.get_vocab() != tokenizer.get_vocab():
            raise UsageError(
                f"expected checkpoints with one tokenizer, got that of {name}, which differs from "
                f"{names[0]}'s; give them studies of their own"
            )
        summary, each = _one_model(study, causal, number, name, found, settings, batch)
        summaries.append(summary)
        distances.append(each)
        described.append({"model": name, **causal.summary()})
    ngrams = pd.DataFrame(
        {
            "cluster": np.arange(len(found.ngrams)),
            "ngram": [tokenizer.decode(ids.tolist()) for ids in found.ngrams],
            "occurrences": found.occurrences,
        }
    )
    study.finish(
        {"summary": pd.concat(summaries), "clusters": pd.concat(distances), "ngrams": ngrams},
        models=described,
    )


def _contexts(study: Study, source: Texts, tokenizer: Any, settings: dict[str, Any]) -> Contexts:
    names = ("ngram", "occurrences", "contexts", "context", "clusters", "seed")

    def find() -> dict[str, Any]:
        counts = write_corpus(study.work_folder, source, tokenizer, settings["pack"])
        found = recurring_contexts(study.work_folder, tokenizer, **{name: settings[name] for name in names})
        for name, array in found._asdict().items():
            np.save(study.work_folder / f"contexts.{name}.npy", array)
        return {"counts": counts.as_dict(), "clusters": len(found.tokens), "sha256": digest(found.tokens)}

    study.once("segments.contexts", find)
    return Contexts(*(np.load(study.work_folder / f"contexts.{name}.npy") for name in Contexts._fields))


def _one_model(
    study: Study,
    causal: CausalModel,
    number: int,
    name: str,
    found: Contexts,
    settings: dict[str, Any],
    batch: int | None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    layers = causal.layers(settings["layers"])
    causal.check_segment(settings["context"])
    count, members, length = found.tokens.shape
    size = batch_size(study, causal, batch, length, len(layers))
    within = study.rows(f"m{number}.within", (count, len(layers)))
    centroids = study.rows(f"m{number}.centroids", (count, len(layers), causal.width))
    nll = study.rows(f"m{number}.nll", (count,))
    origins = np.stack([np.arange(members), np.zeros(members, dtype=np.int64)], axis=1)

    def one_cluster(which: int) -> None:
        held: dict[str, list[NDArray[np.float32]]] = {layer: [] for layer in layers}
        losses: list[float] = []
        for start in range(0, members, size):
            causal.forward(
                found.tokens[which, start : start + size],
                layers,
                lambda layer, _first, states: partial(held[layer].append, last_vectors(states)),
                lambda _first, nlls: losses.extend(nlls.mean(dim=1).tolist()),
            )
        for place, layer in enumerate(layers):
            vectors = np.concatenate(held[layer])
            check_finite(vectors, layer, origins, f"cluster {which}")
            centroid = vectors.mean(axis=0, dtype=np.float64)
            centroids[which, place] = centroid
            difference = unit_rows(vectors) - unit_rows(centroid[None])
            within[which, place] = np.square(difference).sum(axis=1).mean() / 2
        nll[which] = np.mean(losses)

    study.work(f"m{number}.pass", count, one_cluster)
    summaries, each = [], []
    for place, layer in enumerate(layers):
        between = dispersion_estimate(centroids[:, place])
        summaries.append(
            {
                "model": name,
                "layer": layer,
                "clusters": count,
                **_named("within", within_interval(within[:, place])),
                "between": between.mean,
                "between_se": between.se,
                **_named("ratio", ratio_interval(within[:, place], contributions(centroids[:, place]))),
                "perplexity": float(perplexity(np.mean(nll))),
            }
        )
        columns = {
            "cluster": np.arange(count),
            "within": within[:, place],
            "apart": contributions(centroids[:, place]),
        }
        each.append(pd.DataFrame({"model": name, "layer": layer, **columns}))
    return pd.DataFrame(summaries), pd.concat(each)


def _named(name: str, found: Interval) -> dict[str, float]:
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}


def within_interval(within: Array) -> Interval:
    """Mean of ``within`` (n,) over clusters, with the 95 % bounds of a jackknife of its logarithm."""
    mean, n = float(within.mean()), len(within)
    if n < 3 or within.min() <= 0:
        return Interval(mean, float("nan"), float("nan"))
    return _exponential(np.log(mean), np.log((within.sum() - within) / (n - 1)))


def ratio_interval(within: Array, apart: Array) -> Interval:
    """Mean of ``apart`` over that of ``within``, (n,) both, with 95 % bounds likewise; NaN below three."""
    if len(within) < 3 or within.mean() <= 0 or apart.mean() <= 0:
        return Interval(*[float("nan")] * 3)
    return _exponential(np.log(apart.mean()) - np.log(within.mean()), log_ratios_left_out(within, apart))


def _exponential(value: float, left_out: Array) -> Interval:
    low, high = jackknife_bounds(value, left_out)
    return Interval(*np.exp([value, low, high]).tolist())
