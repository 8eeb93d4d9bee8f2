"""Recurring n-grams against counting them."""

from __future__ import annotations

from collections import Counter

import tiny_models
from slow_states import token_ids

from lmeval_dispersion.laboratory.context_clusters import recurring_contexts, write_corpus
from lmeval_dispersion.model.texts import Texts


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
