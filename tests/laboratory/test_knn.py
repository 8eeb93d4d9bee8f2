"""The kNN-LM against brute force."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from lmeval_dispersion.laboratory import sublayers
from lmeval_dispersion.laboratory.sublayer_choice import _Votes, agreement


def test_neighbours_vote_as_a_slow_knn_would():
    faiss = pytest.importorskip("faiss")
    rng = np.random.default_rng(2)
    keys, queries = (
        rng.normal(size=(4, 6, 5)).astype(np.float32),
        rng.normal(size=(2, 3, 5)).astype(np.float32),
    )
    values, targets = rng.integers(0, 3, 24), rng.integers(0, 3, (2, 3))
    index = faiss.IndexFlatL2(5)
    index.add(keys.reshape(-1, 5))
    votes = _Votes(index, queries, values, targets)
    nearest = []
    for q in queries.reshape(-1, 5):
        nearest.append(min(float(((q - k) ** 2).sum()) for k in keys.reshape(-1, 5)))
    scale = np.median(nearest)
    for temperature in (0.3, 2.0):
        got = votes.probability(temperature).ravel()
        for q, t, p in zip(queries.reshape(-1, 5), targets.ravel(), got, strict=True):
            w = [math.exp(-float(((q - k) ** 2).sum()) / scale / temperature) for k in keys.reshape(-1, 5)]
            expected = sum(x for x, v in zip(w, values, strict=True) if v == t) / sum(w)
            assert p == pytest.approx(expected, rel=1e-3)
    model = np.full((2, 3), 0.25)
    mixed = votes.losses(model, 0.4, 0.3)
    assert mixed == pytest.approx(-np.log(0.6 * 0.25 + 0.4 * votes.probability(0.3)))
    weight, temperature = votes.best(model)
    assert votes.losses(model, weight, temperature).mean() <= mixed.mean() + 1e-12


def test_a_knn_lm_is_built_and_measured_on_segments_of_its_own(model, data):
    pytest.importorskip("faiss")
    found = sublayers(model, data, segment=30, sizes=(20,), knn=True)
    knn = found.knn.set_index("layer")
    assert knn["keys"].tolist() == [(60 - 2 * 6) * 29] * 2
    assert knn["base_perplexity"].nunique() == 1
    assert (knn["perplexity"] < knn["base_perplexity"]).all()  # a random model knows less than its neighbours
    best = knn["perplexity"].idxmin()
    assert found.recommendation["lowest_perplexity"].item() == best
    difference = found.knn_differences.iloc[0]
    assert found.recommendation["knn"].item() == agreement(
        found.recommendation["layer"].item(), found.knn_differences
    )
    expected = np.log(
        knn.loc[difference["first"], "perplexity"] / knn.loc[difference["second"], "perplexity"]
    )
    assert difference["difference"] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("bounds", "verdict"),
    [
        ([(-0.3, -0.1), (-0.2, -0.1)], "agrees"),
        ([(-0.3, -0.1), (-0.2, 0.1)], "not told apart"),
        ([(-0.3, 0.1), (0.1, 0.2)], "contradicts"),
        ([(-0.3, -0.1), (0.1, 0.2)], "contradicts"),
    ],
)
def test_a_knn_lm_agrees_only_where_the_difference_is_sure(bounds, verdict):
    (a, b), (c, d) = bounds
    # The recommended one is first in one pair and second in the other.
    frame = pd.DataFrame(
        {"first": ["best", "y", "x"], "second": ["x", "best", "y"], "low": [a, -d, -1], "high": [b, -c, 1]}
    )
    assert agreement("best", frame) == verdict
