"""Semantic clusters: do contexts that go on with the same words stay together while all of them spread?

Each cluster holds contexts that one recurring n-gram follows; a context's vector is the state of its last
token, which predicts the n-gram's first. ``within``: mean cosine distance of members to their cluster's
centroid; ``between``: mean pair distance of the centroids.

Source: RD section 2.3.

The text is written once as a flat file of tokens. Every n-gram is hashed; a table of counters, whose size
does not depend on the text, says which hashes can be frequent, and only their places are kept and compared
token by token. Occurrences never overlap: where one frequent n-gram is a shifted copy of another, the more
frequent one takes the place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.geometry import contributions, dispersion_estimate, unit_rows
from lmeval_dispersion.laboratory import charts
from lmeval_dispersion.laboratory.analysis import Analysis, DataLike, StudyResult, analyse, records, table
from lmeval_dispersion.laboratory.causal_model import CausalModel, last_vectors, perplexity
from lmeval_dispersion.laboratory.claims import jackknife_bounds, log_ratios_left_out
from lmeval_dispersion.laboratory.segments import Counts, digest, prefix_of, tokenised
from lmeval_dispersion.laboratory.study import Folder, Unit
from lmeval_dispersion.model.loading import ModelLike
from lmeval_dispersion.model.texts import Texts
from lmeval_dispersion.report import Chart, Col, Table
from lmeval_dispersion.statistics import Array, Interval

_SHOWN = 12  # rows of a default answer
_SHOWN_NGRAMS = 20


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

    kind = "clusters"
    main = "summary"
    template = "clusters.jinja"

    def tables(self) -> dict[str, Table]:
        """``some`` distances; ``summary``: all of them; ``ngrams``: of each cluster."""
        more = (
            f"{len(self.ngrams) - _SHOWN_NGRAMS} more; --format json has them."
            if len(self.ngrams) > _SHOWN_NGRAMS
            else ""
        )
        return {
            "some": table(
                _Distances,
                self.summary,
                "Distance between clusters over that within them",
                most=_SHOWN,
                hide=("between", "clusters", "perplexity"),
            ),
            "summary": table(_Distances, self.summary, "All distances, with the contexts' perplexity"),
            "ngrams": table(_Ngram, self.ngrams.head(_SHOWN_NGRAMS), "The n-grams", more=more),
        }

    def charts(self) -> dict[str, Chart]:
        """``distances``: within and between clusters."""
        draw = partial(charts.cluster_lines, self.summary)
        return {"distances": Chart(draw, "Distances within and between clusters", "One panel a layer.")}

    def context(self) -> dict[str, Any]:
        """For the template: the layer that stands for all, and which models differ there from the first."""
        layers = list(dict.fromkeys(self.summary["layer"]))
        layer = "last" if "last" in layers else layers[-1]
        summary = self.summary[self.summary["layer"] == layer]
        rows = records(summary)
        defined = rows[0]["clusters"] >= 3 and bool(np.isfinite(summary["ratio"]).all())
        against = self._against(rows, layer) if defined else []
        return {**super().context(), "rows": rows, "defined": defined, "against": against}

    def _against(self, rows: list[dict[str, Any]], layer: str) -> list[tuple[str, list[str]]]:
        each = {
            model: log_ratios_left_out(frame["within"].to_numpy(), frame["apart"].to_numpy())
            for model, frame in self.clusters[self.clusters["layer"] == layer].groupby("model")
        }
        first = rows[0]
        groups: dict[str, list[str]] = {
            "further apart": [],
            "closer together": [],
            "not clearly differently": [],
        }
        for row in rows[1:]:
            value = float(np.log(row["ratio"] / first["ratio"]))
            low, high = jackknife_bounds(value, each[row["model"]] - each[first["model"]], len(rows) - 1)
            groups[
                "further apart" if low > 0 else "closer together" if high < 0 else "not clearly differently"
            ].append(row["model"])
        return [(words, names) for words, names in groups.items() if names]


@dataclass(frozen=True)
class _Distances:
    """Distances in one model at one layer."""

    model: Annotated[str, Col("Model")]
    layer: Annotated[str, Col("Layer")]
    within: Annotated[float, Col("Within", ".4f", hint="of members to their centroid")]
    between: Annotated[
        float, Col("Between", ".4f", error="between_se", drop=1, hint="over pairs of centroids")
    ]
    between_se: float
    ratio: Annotated[float, Col("Ratio", ".2f", dots="both", reach="ratio_low ratio_high")]
    ratio_low: Annotated[float, Col("95 % from", ".2f", short="from")]
    ratio_high: Annotated[float, Col("to", ".2f")]
    clusters: Annotated[int, Col("Clusters", "d", drop=2)]
    perplexity: Annotated[float, Col("Perplexity", ".2f", drop=3)]


@dataclass(frozen=True)
class _Ngram:
    """The n-gram of a cluster."""

    cluster: Annotated[int, Col("Cluster", "d")]
    ngram: Annotated[str, Col("N-gram")]
    occurrences: Annotated[int, Col("Occurrences", "d")]


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
    settings = {
        **{"ngram": ngram, "occurrences": occurrences, "contexts": contexts, "context": context},
        **{"clusters": clusters, "layers": layers, "pack": pack, "seed": seed},
    }
    return analyse(ClustersResult, _measure, models, data, settings, batch, folder, quiet)


def _measure(analysis: Analysis) -> None:
    clusters: Contexts | None = None
    parts, described = [], []
    for number, (label, model) in enumerate(analysis.models.items()):
        causal = CausalModel(model)
        if clusters is None:
            tokenizer = causal.loaded.tokenizer
            vocabulary, first = tokenizer.get_vocab(), label
            clusters = _contexts(analysis, causal)
        elif causal.loaded.tokenizer.get_vocab() != vocabulary:
            raise UsageError(
                f"expected checkpoints with one tokenizer, got that of {label}, which differs from "
                f"{first}'s; give them studies of their own"
            )
        parts.append(_one_model(analysis, causal, number, label, clusters))
        described.append({"model": label, **causal.summary()})
    assert clusters is not None
    tables = {
        "summary": pd.concat([summary for summary, _ in parts]),
        "clusters": pd.concat([each for _, each in parts]),
        "ngrams": pd.DataFrame(
            {
                "cluster": np.arange(len(clusters.ngrams)),
                "ngram": [tokenizer.decode(ids.tolist()) for ids in clusters.ngrams],
                "occurrences": clusters.occurrences,
            }
        ),
    }
    analysis.study.finish(tables, models=described)


def _contexts(analysis: Analysis, causal: CausalModel) -> Contexts:
    folder, settings = analysis.study.work_folder, analysis.settings
    tokenizer, source = causal.loaded.tokenizer, analysis.texts["data"]
    names = ("ngram", "occurrences", "contexts", "context", "clusters", "seed")

    def find() -> dict[str, object]:
        counts = write_corpus(folder, source, tokenizer, settings["pack"])
        clusters = recurring_contexts(folder, tokenizer, **{name: settings[name] for name in names})
        np.savez(folder / "contexts.npz", **clusters._asdict())
        return {"counts": asdict(counts), "clusters": len(clusters.tokens), "sha256": digest(clusters.tokens)}

    analysis.study.once("segments.contexts", find)
    with np.load(folder / "contexts.npz") as kept:
        return Contexts(**kept)


def _one_model(
    analysis: Analysis, causal: CausalModel, number: int, label: str, clusters: Contexts
) -> tuple[pd.DataFrame, pd.DataFrame]:
    layers = causal.layers(analysis.settings["layers"])
    count, members, length = clusters.tokens.shape
    causal.check_segment(length)
    size = analysis.batch_size(causal, length, len(layers))
    origins = np.stack([np.arange(members), np.zeros(members, dtype=np.int64)], axis=1)

    def one_cluster(which: int) -> Unit:
        states, losses = causal.run(
            clusters.tokens[which], layers, lambda _layer, x, _first: last_vectors(x), batch=size, losses=True
        )
        within, centroids = [], []
        for layer in layers:
            vectors = np.concatenate(states[layer])
            causal.check_finite(vectors, layer, origins, f"cluster {which}")
            centroid = vectors.mean(axis=0, dtype=np.float64)
            difference = unit_rows(vectors) - unit_rows(centroid[None])
            within.append(np.square(difference).sum(axis=1).mean() / 2)
            centroids.append(centroid)
        return {
            "within": np.array(within),
            "centroids": np.array(centroids),
            "nll": losses.mean(axis=1).mean(),
        }

    units = analysis.study.units(f"m{number}", count, one_cluster)
    within, centroids, nll = (units.stacked(key) for key in ("within", "centroids", "nll"))
    summaries, each = [], []
    for place, layer in enumerate(layers):
        between, apart = dispersion_estimate(centroids[:, place]), contributions(centroids[:, place])
        about = {"model": label, "layer": layer}
        summaries.append(
            {
                **about,
                "clusters": count,
                **_named("within", within_interval(within[:, place])),
                "between": between.mean,
                "between_se": between.se,
                **_named("ratio", ratio_interval(within[:, place], apart)),
                "perplexity": float(perplexity(np.mean(nll))),
            }
        )
        columns = {"cluster": np.arange(count), "within": within[:, place], "apart": apart}
        each.append(pd.DataFrame({**about, **columns}))
    return pd.DataFrame(summaries), pd.concat(each)


def _named(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


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


_COUNTERS = 2**24
_CHUNK = 2**20  # places hashed at a time


class Contexts(NamedTuple):
    """Contexts that end where a recurring n-gram begins.

    Attributes:
        tokens: Shape (clusters, contexts, length), uint32.
        ngrams: The n-gram of each cluster, shape (clusters, n).
        occurrences: How often it occurs with a whole context before it, shape (clusters,).
    """

    tokens: NDArray[np.uint32]
    ngrams: NDArray[np.uint32]
    occurrences: NDArray[np.int64]


class _Corpus(NamedTuple):
    """All tokens, flat, and for each the offset of its document's start."""

    tokens: Any
    starts: NDArray[np.int64]  # of every document, ascending

    def usable(self, begin: int, end: int, n: int, before: int) -> NDArray[np.int64]:
        """Places in [begin, end) where an n-gram fits whose document has ``before`` tokens before it."""
        places = np.arange(begin, min(end, len(self.tokens) - n + 1))
        document = np.searchsorted(self.starts, places, side="right") - 1
        ends = np.append(self.starts[1:], len(self.tokens))[document]
        return places[(places - self.starts[document] >= before) & (places + n <= ends)]


def write_corpus(folder: Path, texts: Texts, tokenizer: Any, pack: bool) -> Counts:
    """Write the tokens of ``texts`` and where their documents start to ``folder``."""
    counts = Counts()
    starts: list[int] = []
    total = 0
    document = -1
    gap = tokenizer("\n\n", add_special_tokens=False).input_ids
    with (folder / "corpus.u32").open("wb") as file:
        for text, ids in tokenised(texts, tokenizer, counts):
            joins = starts and (pack or text.document == document)
            if not joins:
                starts.append(total)
            document = text.document
            ids = [*gap, *ids] if joins else ids
            np.array(ids, dtype=np.uint32).tofile(file)
            total += len(ids)
    counts.read(texts)
    if not total:
        raise UsageError(f"expected text, got none: {counts.report(texts.source)}")
    np.save(folder / "corpus.starts.npy", np.array(starts, dtype=np.int64))
    return counts


def recurring_contexts(
    folder: Path,
    tokenizer: Any,
    *,
    ngram: int,
    occurrences: int,
    contexts: int,
    context: int,
    clusters: int,
    seed: int,
) -> Contexts:
    """The contexts of the most frequent n-grams of the corpus in ``folder``."""
    starts = np.load(folder / "corpus.starts.npy")
    corpus = _Corpus(np.memmap(folder / "corpus.u32", dtype=np.uint32, mode="r"), starts)
    prefix = prefix_of(tokenizer)
    body = context - len(prefix)
    if body < 1 or ngram < 1 or contexts < 2 or occurrences < contexts:
        raise UsageError(
            f"expected contexts of at least {len(prefix) + 1} tokens, n-grams of at least 1, and at least as "
            f"many occurrences as contexts (2 or more), got {context}, {ngram}, {occurrences} and {contexts}"
        )
    frequent, most = _frequent(corpus, ngram, body, occurrences)
    taken = np.zeros(len(corpus.tokens), dtype=bool)
    rng = np.random.default_rng(seed)
    drawn: list[tuple[NDArray[np.int64], int]] = []
    for places in frequent:
        free = _apart(places, ngram, taken)
        if len(free) < occurrences:
            continue
        for place in free:
            taken[place : place + ngram] = True
        drawn.append((np.sort(rng.choice(free, contexts, replace=False)), len(free)))
        if len(drawn) == clusters:
            break
    if len(drawn) < 2:
        raise UsageError(
            f"expected at least 2 {ngram}-grams that occur {occurrences} times with {body} tokens before "
            f"them, got {len(drawn)} (the most frequent one occurs {most} times); pass more text, or lower "
            "--ngram, --occurrences or --context"
        )
    chosen = np.stack([places for places, _ in drawn])
    tokens = np.empty((*chosen.shape, context), dtype=np.uint32)
    tokens[..., : len(prefix)] = prefix
    tokens[..., len(prefix) :] = corpus.tokens[chosen[..., None] + np.arange(-body, 0)]
    ngrams = corpus.tokens[chosen[:, :1] + np.arange(ngram)]
    return Contexts(tokens, np.asarray(ngrams), np.array([count for _, count in drawn], dtype=np.int64))


def _frequent(corpus: _Corpus, n: int, before: int, least: int) -> tuple[list[NDArray[np.int64]], int]:
    """Places of every n-gram with at least ``least`` of them, most frequent first; and the highest count."""
    counters = np.zeros(_COUNTERS, dtype=np.int32)
    for _, hashes in _hashed(corpus, n, before):
        counters += np.bincount(hashes % _COUNTERS, minlength=_COUNTERS).astype(np.int32)
    most = int(counters.max())
    kept_places, kept_hashes = [np.empty(0, np.int64)], [np.empty(0, np.uint64)]
    for places, hashes in _hashed(corpus, n, before):
        can = counters[hashes % _COUNTERS] >= least
        kept_places.append(places[can])
        kept_hashes.append(hashes[can])
    places, hashes = np.concatenate(kept_places), np.concatenate(kept_hashes)
    order = np.argsort(hashes, kind="stable")
    places, hashes = places[order], hashes[order]
    cuts = np.flatnonzero(hashes[1:] != hashes[:-1]) + 1
    frequent = []
    for alike in np.split(places, cuts):
        # Two n-grams of one hash are told apart; the first one's stays.
        same = (
            corpus.tokens[alike[:, None] + np.arange(n)] == corpus.tokens[alike[:1, None] + np.arange(n)]
        ).all(1)
        if same.sum() >= least:
            frequent.append(alike[same])
    return sorted(frequent, key=lambda places: (-len(places), int(places[0]))), most


def _hashed(corpus: _Corpus, n: int, before: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint64]]]:
    """Usable places with the hash of the n-gram that starts there, chunk by chunk."""
    factors = np.random.default_rng(0).integers(2**63, size=n, dtype=np.uint64) * 2 + 1
    for begin in range(0, len(corpus.tokens), _CHUNK):
        places = corpus.usable(begin, begin + _CHUNK, n, before)
        if not len(places):
            continue
        piece = np.asarray(corpus.tokens[begin : begin + _CHUNK + n], dtype=np.uint64) + np.uint64(1)
        piece *= piece * np.uint64(0x9E3779B97F4A7C15) + np.uint64(
            0x632BE59BD9B4E019
        )  # mixes; wraps by intent
        hashes = np.zeros(len(places), dtype=np.uint64)
        for j, factor in enumerate(factors):
            hashes += piece[places - begin + j] * factor
        yield places, hashes ^ (hashes >> np.uint64(31))


def _apart(places: NDArray[np.int64], n: int, taken: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The places whose n-grams overlap nothing taken, nor one another."""
    free: list[int] = []
    last = -n
    for place in places.tolist():
        if place - last >= n and not taken[place : place + n].any():
            free.append(place)
            last = place
    return np.array(free, dtype=np.int64)
