"""Condensation against transformers' own hidden states."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_models
import torch
from slow_states import mean_pair_distance, slow_pass, token_ids

from lmeval_dispersion import condensation
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.laboratory.token_condensation import similarity_counts
from lmeval_dispersion.model.loading import ModelChoice, load_model


def test_condensation_is_the_mean_over_pairs_of_different_tokens(model, data):
    found = condensation(model, data, segment=30, segments=999, batch=7)
    plain = load_model(model).model
    states = [slow_pass(plain, ids)[1] for ids in token_ids(data)]
    for depth, row in enumerate(found.layers.itertuples()):
        expected = np.mean([1 - mean_pair_distance(text[depth]) for text in states])
        assert row.mean == pytest.approx(expected, abs=1e-5)
        assert row.low < row.mean < row.high
        density = found.histogram.query("depth == @depth")
        assert (density["density"] * (density["high"] - density["low"])).sum() == pytest.approx(1)
        middle = (density["low"] + density["high"]) / 2
        assert (density["density"] * middle).sum() * 2 / 128 == pytest.approx(row.mean, abs=1 / 128)
    assert found.layers["layer"].tolist() == ["embeddings", "layer.0", "layer.1", "last"]
    wide = found.texts.pivot(index="text", columns="depth", values="mean")
    assert found.summary["last_mean"].item() == pytest.approx(
        wide.to_numpy()[:, -3:].mean(), abs=1e-9
    )


def test_histograms_count_every_pair_once():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(50, 4)).astype(np.float32)
    u = x / np.linalg.norm(x, axis=1, keepdims=True)
    pairs = [float(u[i] @ u[j]) for i in range(50) for j in range(i)]
    expected = np.histogram(pairs, bins=np.linspace(-1, 1, 129))[0]
    got = similarity_counts(torch.tensor(x))
    assert got.sum() == 50 * 49 // 2
    assert np.abs(got - expected).sum() <= 4
    same = similarity_counts(torch.ones(6, 3))
    assert same[-1] == 15
    assert (
        similarity_counts(torch.tensor([[1.0, 0], [0, 0], [-1, 0]]))[0] == 1
    )  # a zero row has no direction


def test_half_precision_is_the_same_study_within_its_rounding(model, data):
    plain = condensation(model, data, segment=30, segments=30).layers["mean"]
    half = condensation(ModelChoice(str(model), dtype="bfloat16"), data, segment=30, segments=30)
    assert half.manifest["models"][0]["dtype"] == "bfloat16"
    assert 0 < np.abs(plain - half.layers["mean"]).max() < 0.02


def test_several_models_stand_side_by_side(model, data, place):
    second = tiny_models.saved(place / "second", tiny_models.llama(seed=1, num_hidden_layers=2))
    found = condensation([model, ModelChoice(str(second))], data, segment=30, segments=20)
    assert found.summary["model"].tolist() == ["model", "second"]
    assert found.summary["depths"].tolist() == [4, 3]
    alone = condensation(second, data, segment=30, segments=20)
    both = found.layers.query("model == 'second'")
    assert np.array_equal(both["mean"], alone.layers["mean"])
    with pytest.raises(UsageError, match=r"different models, got .*model, .*model"):
        condensation([model, model], data)
