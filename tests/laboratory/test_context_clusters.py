"""Clusters of contexts against distances from all of their vectors."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import tiny_models
from slow_states import slow_pass, token_ids

from lmeval_dispersion import clusters
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.laboratory.context_clusters import recurring_contexts
from lmeval_dispersion.model.loading import load_model
from lmeval_dispersion.model.texts import Texts


def plain_distances(x, labels):
    """Mean cosine distance of members to their centroid, and mean over pairs of centroids."""
    centroids = np.array([x[labels == label].mean(axis=0) for label in np.unique(labels)])
    units = centroids / np.linalg.norm(centroids, axis=1, keepdims=True)
    rows = x / np.linalg.norm(x, axis=1, keepdims=True)
    within = 1 - (rows * units[labels]).sum(axis=1)
    between = 1 - (units @ units.T)[np.triu_indices(len(units), 1)]
    return within.mean(), between.mean()


def test_clusters_are_geometrys_distances(model, repeating):
    options = {"ngram": 4, "occurrences": 20, "segment": 6}
    found = clusters(model, repeating, batch=5, layers="layer.1,last", **options)
    contexts = recurring_contexts(
        Texts(repeating), tiny_models.tokenizer(), clusters=500, **options
    )
    plain = load_model(model).model
    states = [slow_pass(plain, context)[1] for context in contexts["tokens"].tolist()]
    labels = np.repeat(np.arange(len(contexts["ngrams"])), 20)
    for depth, layer in ((2, "layer.1"), (3, "last")):
        expected = plain_distances(np.array([each[depth][-1] for each in states]), labels)
        row = found.summary[found.summary["layer"] == layer].iloc[0]
        assert row["within"] == pytest.approx(expected[0], abs=1e-5)
        assert row["between"] == pytest.approx(expected[1], abs=1e-5)
        assert row["clusters"] == len(set(labels))
        each = found.clusters[found.clusters["layer"] == layer]
        assert each["within"].mean() == pytest.approx(row["within"])
        assert each["apart"].mean() == pytest.approx(row["between"])
    assert all(len(text.split()) == 4 for text in found.ngrams["ngram"])


def test_clusters_need_recurrence_and_one_tokenizer(model, repeating, place):
    with pytest.raises(
        UsageError, match=r"two or more 9-grams that occur 20 times .* lower ngram, "
    ):
        clusters(model, repeating, ngram=9, occurrences=20, segment=6)
    with pytest.raises(UsageError, match=r"occurrences at least 2, got segment 6, ngram 4"):
        clusters(model, repeating, ngram=4, occurrences=1, segment=6)
    other = tiny_models.saved(place / "other-words", tiny_models.llama(seed=4))
    path = other / "tokenizer.json"
    path.write_text(path.read_text().replace('"w7"', '"x7"'))
    with pytest.raises(UsageError, match="models with the same tokenizer"):
        clusters([model, other], repeating, ngram=4, occurrences=20, segment=6)


def test_recurring_ngrams_are_found_with_their_contexts(repeating):
    options = {"ngram": 4, "occurrences": 20, "segment": 6, "clusters": 9}
    found = recurring_contexts(Texts(repeating), tiny_models.tokenizer(), **options)
    documents = token_ids(repeating)
    # Those with a whole context before them.
    counts = Counter(tuple(ids[i : i + 4]) for ids in documents for i in range(6, len(ids) - 3))
    expected = {gram: count for gram, count in counts.items() if count >= 20}
    counted = zip(found["ngrams"].tolist(), found["occurrences"].tolist(), strict=True)
    assert {tuple(gram): count for gram, count in counted} == expected
    assert found["occurrences"].tolist() == sorted(found["occurrences"], reverse=True)
    whole = {tuple(ids[i - 6 : i + 4]) for ids in documents for i in range(6, len(ids) - 3)}
    for row, context in enumerate(found["tokens"].tolist()):
        assert (*context, *found["ngrams"][row // 20].tolist()) in whole
        text, start = found["origins"][row]
        assert documents[text][start : start + 6] == context


def test_a_longer_phrase_is_one_cluster_and_not_its_shifted_copies(repeating):
    options = {"ngram": 3, "occurrences": 20, "segment": 6, "clusters": 99}
    found = recurring_contexts(Texts(repeating), tiny_models.tokenizer(), **options)
    assert len(found["ngrams"]) == 4  # four phrases of four tokens hold eight frequent 3-grams
