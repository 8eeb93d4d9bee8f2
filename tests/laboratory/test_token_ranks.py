"""Effective rank and Diff-eRank against singular values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lmeval_dispersion.errors import GeometryError
from lmeval_dispersion.geometry import effective_rank
from lmeval_dispersion.laboratory import law
from lmeval_dispersion.laboratory.inputs import as_texts
from lmeval_dispersion.model.loading import load_model


def test_effective_rank_against_singular_values_and_its_range():
    rng = np.random.default_rng(6)
    for n, d in ((5, 9), (40, 7)):
        x = rng.normal(size=(n, d)) + 3
        z = x - x.mean(axis=0)
        z /= np.linalg.norm(z, axis=1, keepdims=True)
        p = np.linalg.svd(z, compute_uv=False) ** 2
        p /= p.sum()
        p = p[p > 1e-15]
        assert effective_rank(x) == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-9)
        assert 1 <= effective_rank(x) <= min(n, d)
        turn = np.linalg.qr(rng.normal(size=(d, d)))[0]
        assert effective_rank(x @ turn * 5 + 7) == pytest.approx(effective_rank(x), rel=1e-6)
    line = np.outer(np.arange(1.0, 6), rng.normal(size=4))
    assert effective_rank(line) == pytest.approx(1)
    with pytest.raises(GeometryError, match="all the same"):
        effective_rank(np.ones((4, 3)) / 3)


def test_diff_erank_is_that_of_each_text_averaged(model, data):
    found = law(model, data, segment=30, bins=3, bin_size=8, contexts=(), diff_erank=True)
    loaded = load_model(model)
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    fresh = AutoModelForCausalLM.from_config(loaded.model.config, dtype=torch.float32).eval()
    ids = torch.tensor([loaded.tokenizer(text.text).input_ids for text in as_texts(data)])
    with torch.no_grad():
        nll = torch.nn.functional.cross_entropy(
            loaded.model(ids).logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none"
        ).mean(1)
        hidden = [
            m(ids, output_hidden_states=True).hidden_states[-1].double().numpy()
            for m in (loaded.model, fresh)
        ]
    easiest = nll.argsort(stable=True)[:8].tolist()

    def erank(x):
        z = x - x.mean(0)
        z = z[np.linalg.norm(z, axis=1) > 1e-9]
        z /= np.linalg.norm(z, axis=1, keepdims=True)
        s = np.linalg.svd(z, compute_uv=False) ** 2
        p = s / s.sum()
        p = p[p > 1e-15]
        return np.exp(-(p * np.log(p)).sum())

    row = found.points.iloc[0]
    trained, untrained = (np.mean([erank(h[i]) for i in easiest]) for h in hidden)
    assert row["token_effective_rank"] == pytest.approx(trained, rel=1e-3)
    assert row["untrained_effective_rank"] == pytest.approx(untrained, rel=1e-3)
    assert row["diff_erank"] == pytest.approx(untrained - trained, rel=1e-3, abs=1e-3)
