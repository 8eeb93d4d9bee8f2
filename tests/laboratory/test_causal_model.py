"""The model that runs segments: what it refuses, and what it tells of states that are no numbers."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_models
import torch

from lmeval_dispersion.errors import DispersionError, NonFiniteStateError, UsageError
from lmeval_dispersion.laboratory import condensation, law, sublayers
from lmeval_dispersion.laboratory.causal_model import CausalModel
from lmeval_dispersion.model.loading import LoadedModel, ModelChoice


def test_nan_states_are_told_with_layer_and_text(place, data):
    broken = tiny_models.llama()
    with torch.no_grad():
        broken.model.embed_tokens.weight[tiny_models.VOCABULARY["w1"], 0] = float("inf")
    path = tiny_models.saved(place / "broken", broken)
    with pytest.raises(NonFiniteStateError, match=r"at embeddings in text \d+ of .*; check the checkpoint"):
        condensation(path, data, segment=30, texts=20)
    with pytest.raises(NonFiniteStateError, match=r"at layer\.2\.(attn|ffn) in text \d+"):
        sublayers(path, data, segment=30, sizes=(10,))


def test_nan_of_a_later_block_names_it(data, tmp_path):
    broken = tiny_models.llama()
    with torch.no_grad():
        broken.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    path = tiny_models.saved(tmp_path / "broken", broken)
    with pytest.raises(
        NonFiniteStateError, match=r"NaN or infinity at layer\.1 in text \d+ of .*text\.jsonl"
    ):
        law(path, data, segment=30, bins=3, bin_size=8, layers="all", contexts=())


def test_a_model_that_reads_both_ways_is_refused(data):
    class Peeking(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.config, self.model, self.lm_head = (
                inner,
                inner.config,
                inner.model,
                inner.lm_head,
            )
            self.dtype = inner.dtype

        def forward(self, input_ids, **options):
            out = self.inner(input_ids=input_ids, **options)
            out.logits = out.logits + out.logits.mean(dim=1, keepdim=True)
            return out

    inner = tiny_models.llama()
    loaded = LoadedModel(
        Peeking(inner), tiny_models.tokenizer(), "peeking", None, torch.device("cpu"), ModelChoice("peeking")
    )
    with pytest.raises(UsageError, match="left-to-right language model, got peeking"):
        law(loaded, data, segment=30, bins=3, bin_size=8)


def test_a_batch_that_does_not_fit_is_run_in_halves(model, monkeypatch):
    causal = CausalModel(model)
    tokens = np.random.default_rng(0).integers(3, 90, (5, 8)).astype(np.uint32)

    def found():
        states, losses = np.zeros((5, 8, causal.width)), np.zeros((5, 7))

        def see(_layer, first, batch):
            states[first : first + len(batch)] = batch.numpy()

        def score(first, batch):
            losses[first : first + len(batch)] = batch.numpy()

        causal.forward(tokens, ["layer.1"], see, score)
        return states, losses

    whole = found()
    forward, sizes = causal.loaded.model.forward, []

    def short_of_memory(input_ids, **options):
        sizes.append(len(input_ids))
        if len(input_ids) > most:
            raise torch.cuda.OutOfMemoryError
        return forward(input_ids=input_ids, **options)

    monkeypatch.setattr(causal.loaded.model, "forward", short_of_memory)
    most = 2
    halved = found()
    assert sizes == [5, 2, 3, 1, 2]
    for a, b in zip(whole, halved, strict=True):
        assert np.abs(a).min(axis=-1).max() > 0
        assert np.allclose(a, b, atol=1e-5)
    most = 0
    with pytest.raises(DispersionError, match="one segment of 8 tokens does not fit on cpu"):
        found()
