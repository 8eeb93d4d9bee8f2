"""Semantic clusters: do contexts with one continuation stay together while all contexts spread?

A cluster holds the contexts before one recurring n-gram. The vector of a context is the state of
its last token, which predicts the first token of the n-gram. ``within`` is the mean cosine distance
of the members to the centroid of their cluster; ``between`` is the mean distance over the pairs of
centroids.

Source: RD section 2.3.

N-grams are found by their hashes, then compared token by token. Occurrences never overlap: if one
frequent n-gram is a shifted copy of another, the more frequent one counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lmeval_dispersion import statistics
from lmeval_dispersion.arguments import takes
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.files import hashed
from lmeval_dispersion.geometry import contributions, unit_rows
from lmeval_dispersion.geometry.dispersion import jackknifed
from lmeval_dispersion.geometry.dispersion import left_out as dispersions_left_out
from lmeval_dispersion.laboratory import charts
from lmeval_dispersion.laboratory.arguments import Clusters
from lmeval_dispersion.laboratory.models import CausalModel, last_vectors
from lmeval_dispersion.laboratory.report import (
    StudyResult,
    bounded,
    jackknife_bounds,
    records,
    table,
    with_ends,
)
from lmeval_dispersion.laboratory.segments import (
    Segments,
    Unit,
    affixes_of,
    blocks,
    gap_of,
    tokenised,
)
from lmeval_dispersion.laboratory.study import Study, TableRow, studied
from lmeval_dispersion.model.texts import Texts
from lmeval_dispersion.report import Chart, Col, Table
from lmeval_dispersion.statistics import Array

_SHOWN_NGRAMS = 20

_RATIOS = {
    "model": Col("Model"),
    "layer": Col("Layer"),
    "within": Col("Within", ".4f", hint="mean distance of a cluster's contexts to its centroid"),
    **bounded("ratio", "Ratio", ".2f", ("ratio_low", "ratio_high")),
}
_DISTANCES = {
    **_RATIOS,
    "between": Col(
        "Between", ".4f", error="between_se", drop=1, hint="mean distance over pairs of centroids"
    ),
    "clusters": Col("Clusters", "d", drop=2),
    "perplexity": Col("Perplexity", ".2f", drop=3),
}
_NGRAMS = {
    "cluster": Col("Cluster", "d"),
    "ngram": Col("N-gram"),
    "occurrences": Col("Occurrences", "d"),
}


@dataclass(frozen=True, repr=False)
class ClustersResult(StudyResult):
    """The distances within and between clusters of contexts, for one or several models.

    A cluster holds contexts that are followed by the same n-gram.

    Attributes:
        summary: One row for each model and layer: the number of ``clusters``, the mean distances
            ``within`` and ``between`` clusters, ``ratio`` = between / within, and the
            ``perplexity`` of the contexts. ``within`` and ``ratio`` have 95 % bounds, ``between``
            has a standard error; all come from a jackknife over clusters.
        clusters: One row for each model, layer and cluster: ``within``, the mean cosine distance of
            the members to the cluster's centroid, and ``apart``, the mean distance of this centroid
            to the centroids of the other clusters.
        ngrams: One row for each model and cluster: the n-gram, and how often it occurs in the text
            without overlaps and with a whole context before it.
        manifest: The settings; for each model its identity, the library versions, and how many
            texts and segments were read.
    """

    summary: pd.DataFrame
    clusters: pd.DataFrame
    ngrams: pd.DataFrame

    kind = "clusters"
    main = "summary"
    template = "clusters.jinja"

    def tables(self) -> dict[str, Table]:
        """Return the tables of the report by name.

        - ``some``: the ratios between / within, for at most 12 pairs of a model and a layer;
        - ``summary``: all distances;
        - ``ngrams``: the n-grams of the first model, at most the 20 most frequent ones.
        """
        first = self.ngrams["model"].iloc[0]
        ngrams = self.ngrams[self.ngrams["model"] == first]
        more = ""
        if len(ngrams) > _SHOWN_NGRAMS:
            more = f"The JSON output lists all {len(ngrams)} n-grams of {first}."
        caption = "Ratio of the distances between and within clusters"
        return {
            "some": table(self.summary, caption, _RATIOS, most=12),
            "summary": table(
                self.summary, "All distances, and the perplexity of the contexts", _DISTANCES
            ),
            "ngrams": table(ngrams.head(_SHOWN_NGRAMS), "The n-grams", _NGRAMS, more=more),
        }

    def charts(self) -> dict[str, Chart]:
        """Return one chart, ``distances``: the mean distances within and between clusters."""
        draw = partial(charts.cluster_lines, self.summary)
        return {
            "distances": Chart(
                draw, "Distances within and between clusters", "One panel for each layer."
            )
        }

    def context(self) -> dict[str, Any]:
        """Return the values that the report's template needs.

        In addition to those of `StudyResult` these are:

        - ``rows``: the rows of ``summary`` at one layer (``last``, or the last that was measured);
        - ``defined``: whether there are at least three clusters and every row has a finite ratio;
        - ``against``: a comparison with the first model, empty if not ``defined``. Each entry is a
          pair: ``further apart``, ``closer together`` or ``neither clearly further apart nor closer
          together``, and the names of the models of which this is true.
        """
        layers = list(dict.fromkeys(self.summary["layer"]))
        layer = "last" if "last" in layers else layers[-1]
        summary = self.summary[self.summary["layer"] == layer]
        rows = records(summary)
        has_ratios = bool(np.isfinite(summary["ratio"]).all())
        defined = rows[0]["clusters"] >= 3 and has_ratios
        return {
            **super().context(),
            "rows": rows,
            "defined": defined,
            "against": self._against(rows, layer) if defined else [],
        }

    def _against(self, rows: list[dict[str, Any]], layer: str) -> list[tuple[str, list[str]]]:
        """The models whose clusters lie further apart or closer than the first model's."""
        left_out = {}
        at_layer = self.clusters[self.clusters["layer"] == layer]
        for model, frame in at_layer.groupby("model"):
            within = frame["within"].to_numpy()
            apart = frame["apart"].to_numpy()
            left_out[model] = log_ratios_left_out(within, apart)
        first = rows[0]
        further = "further apart"
        closer = "closer together"
        unclear = "neither clearly further apart nor closer together"
        groups: dict[str, list[str]] = {further: [], closer: [], unclear: []}
        for row in rows[1:]:
            value = float(np.log(row["ratio"] / first["ratio"]))
            change = left_out[row["model"]] - left_out[first["model"]]
            low, high = jackknife_bounds(value, change, len(rows) - 1)
            words = unclear
            if low > 0:
                words = further
            elif high < 0:
                words = closer
            groups[words].append(row["model"])
        return [group for group in groups.items() if group[1]]


@takes(Clusters)
def clusters(asked: Clusters) -> ClustersResult:
    """Measure cosine distances within and between clusters of contexts.

    A cluster holds contexts that the same n-gram follows; see `ClustersResult` for the distances.

    The text is read whole. Its most frequent n-grams are looked up, and a context is the run of
    tokens before one occurrence of an n-gram. All models must share one tokenizer, as checkpoints
    of one training do.

    Raises:
        UsageError: Fewer than two n-grams occur often enough, the source holds no text, the models'
            tokenizers differ, or a setting does not fit a model.
        NonFiniteStateError: A model produces NaN or infinity; the message names the layer and the
            text.
    """
    settings = {
        "ngram": asked.ngram,
        "occurrences": asked.occurrences,
        "clusters": asked.clusters,
        "layers": asked.layers,
    }
    manifest, tables = studied("clusters", _measure, asked.models, asked.data, settings, asked)
    return ClustersResult(manifest, **tables)


def _measure(study: Study) -> Iterator[TableRow]:
    """Rows of every table; clusters compare only models of one tokenizer."""
    settings = study.settings
    causal, layers = study.loaded(losses=True)
    tokenizer = causal.loaded.tokenizer
    tokens = sorted(tokenizer.get_vocab().items())
    vocabulary = hashed(json.dumps(tokens))
    study.facts["vocabulary"] = vocabulary
    first = study.earlier[0] if study.earlier else {"vocabulary": vocabulary}
    if first["vocabulary"] != vocabulary:
        raise UsageError(
            f"expected models with the same tokenizer, but the tokenizer of {study.label} differs "
            f"from that of {first['model']}; measure the models of each tokenizer separately"
        )
    names = ("ngram", "occurrences", "segment", "clusters", "seed", "pack")
    options = {name: settings[name] for name in names}
    find = partial(recurring_contexts, tokenizer=tokenizer, **options)
    drawn, arrays = study.drawn("contexts", "data", find)
    count = len(arrays["ngrams"])
    members = len(drawn.tokens) // count
    one_cluster = partial(_measured, causal, layers, drawn)
    losses = []
    distances = []
    centroids = []
    for unit in study.kept("clusters", blocks(len(drawn.tokens), members), one_cluster):
        losses.append(unit["nll"])
        distances.append(unit["within"])
        centroids.append(unit["centroids"])
    perplexity = float(np.exp(np.mean(losses)))
    within = np.stack(distances, axis=1)  # (layers, clusters)
    centres = np.stack(centroids, axis=1)  # (layers, clusters, d)
    for place, layer in enumerate(layers):
        inside = within[place]
        apart = contributions(centres[place])
        yield "summary", {**_summary(layer, inside, apart), "perplexity": perplexity}
        for number in range(count):
            row = {
                "layer": layer,
                "cluster": number,
                "within": inside[number],
                "apart": apart[number],
            }
            yield "clusters", row
    for number, ids in enumerate(arrays["ngrams"].tolist()):
        row = {
            "cluster": number,
            "ngram": tokenizer.decode(ids),
            "occurrences": arrays["occurrences"][number],
        }
        yield "ngrams", row


def _measured(
    causal: CausalModel, layers: list[str], drawn: Segments, rows: NDArray[np.int64]
) -> Unit:
    """One cluster, the contexts ``rows``: its spread and its centroid at every layer, and NLL."""
    states = causal.run(drawn, rows, layers, last_vectors, losses=True)
    centroids = []
    within = []
    for layer in layers:
        centroid = states[layer].mean(axis=0, dtype=np.float64)
        (centre,) = unit_rows(centroid[None])
        differences = unit_rows(states[layer]) - centre
        squares = np.square(differences).sum(axis=1)
        centroids.append(centroid)
        within.append(squares.mean() / 2)
    means = states["nll"].mean(axis=1)
    return {
        "within": np.array(within),
        "centroids": np.array(centroids),
        "nll": means.mean(),
    }


def _summary(layer: str, within: Array, apart: Array) -> dict[str, Any]:
    """A layer's row: distances within and between its clusters, and their ratio."""
    between = jackknifed(apart)
    return {
        "layer": layer,
        "clusters": len(within),
        **with_ends("within", within_interval(within)),
        "between": between.mean,
        "between_se": between.se,
        **with_ends("ratio", ratio_interval(within, apart)),
    }


def within_interval(within: Array) -> statistics.Interval:
    """Return the mean distance within clusters and its 95 % bounds.

    The bounds come from a jackknife over clusters, on the logarithm of the mean.

    Args:
        within: Shape (clusters,), the mean distance within each cluster.

    Returns:
        The mean and its bounds. The bounds are NaN with fewer than three clusters, or if a distance
        is 0.
    """
    mean = float(within.mean())
    n = len(within)
    if n < 3 or within.min() <= 0:
        return statistics.Interval(mean, float("nan"), float("nan"))
    left_out = (within.sum() - within) / (n - 1)
    return _exponential(np.log(mean), np.log(left_out))


def ratio_interval(within: Array, apart: Array) -> statistics.Interval:
    """Return the ratio of the distances between and within clusters, and its 95 % bounds.

    The bounds come from a jackknife over clusters, on the logarithm of the ratio.

    Args:
        within: Shape (clusters,), the mean distance within each cluster.
        apart: Shape (clusters,), the mean distance of each centroid to the other centroids.

    Returns:
        The ratio and its bounds; all are NaN with fewer than three clusters, or if the mean of
        ``within`` or ``apart`` is 0.
    """
    inside = within.mean()
    between = apart.mean()
    if len(within) < 3 or inside <= 0 or between <= 0:
        return statistics.Interval(float("nan"), float("nan"), float("nan"))
    left_out = log_ratios_left_out(within, apart)
    return _exponential(np.log(between) - np.log(inside), left_out)


def log_ratios_left_out(within: Array, apart: Array) -> Array:
    """Return the log of the ratio of distances, with each cluster left out in turn.

    The ratio is the mean distance between clusters over the mean distance within clusters.

    Args:
        within: Shape (clusters,), the mean distance within each cluster.
        apart: Shape (clusters,), the mean distance of each centroid to the other centroids.

    Returns:
        Shape (clusters,), float64: entry i is computed without cluster i.
    """
    inside = (within.sum() - within) / (len(within) - 1)
    between = dispersions_left_out(apart)
    return np.asarray(np.log(between) - np.log(inside))


def _exponential(value: float, left_out: Array) -> statistics.Interval:
    low, high = jackknife_bounds(value, left_out)
    exponentials = np.exp([value, low, high])
    return statistics.Interval(*exponentials.tolist())


def recurring_contexts(
    texts: Texts,
    tokenizer: Any,
    *,
    ngram: int,
    occurrences: int,
    segment: int,
    clusters: int,
    seed: int = 0,
    pack: bool = False,
) -> Unit:
    """Cut out the contexts before the most frequent n-grams of a text.

    For each n-gram, ``occurrences`` of its places in the text are drawn at random, from those with
    a whole context before the n-gram.

    Args:
        texts: The texts, which are read whole.
        tokenizer: A tokenizer of transformers.
        ngram: Number of tokens in an n-gram.
        occurrences: How often an n-gram must occur; also the number of contexts in its cluster.
        segment: Number of tokens in a context, special tokens included.
        clusters: Maximum number of clusters, one for each n-gram.
        seed: Seed of the draw.
        pack: Whether to join all texts into one.

    Returns:
        These arrays by name, for c clusters; the first two are ordered by cluster.

        - ``tokens``: Shape (c * occurrences, segment), uint32, the contexts.
        - ``origins``: Shape (c * occurrences, 2), int64: the number of the text in its source, and
            the place of the context's first token in its document.
        - ``ngrams``: Shape (c, ngram), uint32, the tokens of each n-gram.
        - ``occurrences``: Shape (c,), int64, how often each n-gram occurs without overlaps and with
            a whole context before it.

    Raises:
        UsageError: Fewer than two n-grams occur ``occurrences`` times, a length is too small, or
            the source holds no text.
    """
    prefix, _ = affixes_of(tokenizer)
    body = segment - len(prefix)
    if body < 1 or ngram < 1 or occurrences < 2:
        raise UsageError(
            f"expected segment to be at least {len(prefix) + 1}, ngram at least 1 and occurrences "
            f"at least 2, got segment {segment}, ngram {ngram} and occurrences {occurrences}"
        )
    corpus = _corpus(texts, tokenizer, pack)
    frequent, most = _frequent(corpus, ngram, body, occurrences)
    taken = np.zeros(len(corpus.tokens), dtype=bool)
    rng = np.random.default_rng(seed)
    chosen: list[NDArray[np.int64]] = []
    counts: list[int] = []
    for places in frequent:
        free = _without_overlaps(places, ngram, taken)
        if len(free) < occurrences:
            continue
        tokens = free[:, None] + np.arange(ngram)
        taken[tokens.ravel()] = True
        places_drawn = rng.choice(free, occurrences, replace=False)
        chosen.append(np.sort(places_drawn))
        counts.append(len(free))
        if len(chosen) == clusters:
            break
    if len(chosen) < 2:
        raise UsageError(
            f"expected two or more {ngram}-grams that occur {occurrences} times with {body} tokens "
            f"before them, got {len(chosen)} (occurrences of the most frequent one, overlaps "
            f"included: {most}); pass more text, or lower ngram, occurrences or segment"
        )
    begin = np.concatenate(chosen) - body
    context = begin[:, None] + np.arange(body)
    drawn = np.empty((len(begin), segment), dtype=np.uint32)
    drawn[:, : len(prefix)] = prefix
    drawn[:, len(prefix) :] = corpus.tokens[context]
    first_places = np.array([places[0] for places in chosen])
    in_ngrams = first_places[:, None] + np.arange(ngram)
    return {
        "tokens": drawn,
        "origins": np.stack([corpus.documents[begin], corpus.places[begin]], axis=1),
        "ngrams": corpus.tokens[in_ngrams],
        "occurrences": np.array(counts),
    }


class _Corpus(NamedTuple):
    """All tokens of a source, document after document; every array has one value per token."""

    tokens: NDArray[np.uint32]
    documents: NDArray[np.int64]  # the number of the document's first text in the source
    places: NDArray[np.int64]  # each token's place in its document


def _corpus(texts: Texts, tokenizer: Any, pack: bool) -> _Corpus:
    gap = gap_of(texts, tokenizer, pack)
    parts: list[NDArray[np.int64]] = []
    document = 0
    place = 0
    for number, ids in tokenised(texts, tokenizer):
        if gap is None or not parts:
            document = number
            place = 0
        else:
            ids = [*gap, *ids]
        end = place + len(ids)
        part = [
            np.array(ids, dtype=np.int64),
            np.full(len(ids), document),
            np.arange(place, end),
        ]
        parts.append(np.stack(part))
        place = end
    if not any(map(np.size, parts)):
        raise UsageError(
            f"expected text in {texts.source}, got none (records read: {texts.read}); check the "
            "source and the column"
        )
    tokens, documents, places = np.concatenate(parts, axis=1)
    return _Corpus(tokens.astype(np.uint32), documents, places)


def _frequent(
    corpus: _Corpus, n: int, before: int, least: int
) -> tuple[list[NDArray[np.int64]], int]:
    """Places of every n-gram with at least ``least`` of them, most frequent first; and the highest count.

    Places have ``before`` tokens of their document before them.
    """
    tokens, documents, in_document = corpus
    places = np.arange(max(len(tokens) - n + 1, 0))
    is_whole = documents[places + n - 1] == documents[places]
    has_context = in_document[places] >= before
    places = places[is_whole & has_context]
    mixed = tokens.astype(np.uint64) + np.uint64(1)
    # The products wrap by intent.
    mixed *= mixed * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x632BE59BD9B4E019)
    rng = np.random.default_rng(0)
    factors = rng.integers(2**63, size=n, dtype=np.uint64) * 2 + 1
    hashes = np.zeros(len(places), dtype=np.uint64)
    for j, factor in enumerate(factors):
        hashes += mixed[places + j] * factor
    order = np.argsort(hashes, kind="stable")
    places = places[order]
    hashes = hashes[order]
    is_first = np.append(True, hashes[1:] != hashes[:-1])
    begins = np.flatnonzero(is_first[: len(hashes)])
    sizes = np.diff(np.append(begins, len(hashes)))
    is_frequent = sizes >= least
    frequent = []
    for begin, size in zip(begins[is_frequent], sizes[is_frequent], strict=True):
        alike = places[begin : begin + size]
        grams = tokens[alike[:, None] + np.arange(n)]
        # Two n-grams with one hash: keep the first.
        is_same = (grams == grams[0]).all(axis=1)
        frequent.append(alike[is_same])
    frequent.sort(key=lambda places: (-len(places), int(places[0])))
    return frequent, int(sizes.max(initial=0))


def _without_overlaps(
    places: NDArray[np.int64], n: int, taken: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """The places whose n-grams do not overlap taken ones or one another."""
    free: list[int] = []
    last = -n
    for place in places.tolist():
        is_apart = place - last >= n
        if is_apart and not taken[place : place + n].any():
            free.append(place)
            last = place
    return np.array(free, dtype=np.int64)
