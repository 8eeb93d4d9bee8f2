"""Clusters of contexts against `geometry.cluster_distances`."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import tiny_models
from slow_states import hidden_states, token_ids

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.geometry import cluster_distances
from lmeval_dispersion.laboratory import clusters
from lmeval_dispersion.laboratory.context_clusters import recurring_contexts, write_corpus
from lmeval_dispersion.model.texts import Texts


def test_clusters_are_geometrys_distances(model, repeating, tmp_path):
    options = {"ngram": 4, "occurrences": 20, "contexts": 12, "context": 6, "layers": "layer.1,last"}
    found = clusters(model, repeating, batch=5, **options)
    write_corpus(tmp_path, Texts(repeating), tiny_models.tokenizer(), pack=False)
    settings = {"ngram": 4, "occurrences": 20, "contexts": 12, "context": 6, "clusters": 500, "seed": 0}
    contexts = recurring_contexts(tmp_path, tiny_models.tokenizer(), **settings)
    labels = np.repeat(np.arange(len(contexts.tokens)), 12)
    for depth, layer in ((2, "layer.1"), (3, "last")):
        vectors = [hidden_states(model, c)[depth][-1] for group in contexts.tokens.tolist() for c in group]
        expected = cluster_distances(np.array(vectors), labels)
        row = found.summary[found.summary["layer"] == layer].iloc[0]
        assert row["within"] == pytest.approx(expected.within, abs=1e-5)
        assert row["between"] == pytest.approx(expected.between, abs=1e-5)
        assert row["clusters"] == expected.clusters
        each = found.clusters[found.clusters["layer"] == layer]
        assert each["within"].mean() == pytest.approx(row["within"])
        assert each["apart"].mean() == pytest.approx(row["between"])
    assert all(len(text.split()) == 4 for text in found.ngrams["ngram"])


def test_clusters_need_recurrence_and_one_tokenizer(model, repeating, place):
    with pytest.raises(UsageError, match=r"at least 2 9-grams that occur 20 times .* lower --ngram"):
        clusters(model, repeating, ngram=9, occurrences=20, contexts=12, context=6)
    with pytest.raises(UsageError, match=r"as many occurrences as contexts"):
        clusters(model, repeating, ngram=4, occurrences=20, contexts=30, context=6)
    other = tiny_models.saved(place / "other-words", tiny_models.llama(seed=4))
    path = other / "tokenizer.json"
    path.write_text(path.read_text().replace('"w7"', '"x7"'))
    with pytest.raises(UsageError, match="checkpoints with one tokenizer"):
        clusters([model, other], repeating, ngram=4, occurrences=20, contexts=12, context=6)


def slow_ngrams(documents, n, before):
    """Counts of n-grams with whole contexts before them."""
    return Counter(tuple(ids[i : i + n]) for ids in documents for i in range(before, len(ids) - n + 1))


def test_recurring_ngrams_are_found_with_their_contexts(repeating, tmp_path):
    tokenizer = tiny_models.tokenizer()
    write_corpus(tmp_path, Texts(repeating), tokenizer, pack=False)
    settings = {"ngram": 4, "occurrences": 20, "contexts": 12, "context": 6, "clusters": 9, "seed": 0}
    found = recurring_contexts(tmp_path, tokenizer, **settings)
    documents = token_ids(repeating)
    counts = slow_ngrams(documents, 4, 6)
    expected = {gram: c for gram, c in counts.items() if c >= 20}
    assert {
        tuple(g): int(c) for g, c in zip(found.ngrams.tolist(), found.occurrences, strict=True)
    } == expected
    assert found.occurrences.tolist() == sorted(found.occurrences, reverse=True)
    whole = {tuple(ids[i - 6 : i + 4]) for ids in documents for i in range(6, len(ids) - 3)}
    for gram, contexts in zip(found.ngrams.tolist(), found.tokens.tolist(), strict=True):
        assert all((*context, *gram) in whole for context in contexts)


def test_a_longer_phrase_is_one_cluster_and_not_its_shifted_copies(repeating, tmp_path):
    write_corpus(tmp_path, Texts(repeating), tiny_models.tokenizer(), pack=False)
    settings = {"ngram": 3, "occurrences": 20, "contexts": 12, "context": 6, "clusters": 99, "seed": 0}
    found = recurring_contexts(tmp_path, tiny_models.tokenizer(), **settings)
    assert len(found.ngrams) == 4  # four phrases of four tokens hold eight frequent 3-grams
