"""Held-out perplexity and dispersion against plain recomputation."""

import math

import numpy as np
import pytest
import torch
from tiny_decoders import tiny_gpt2, tokens

from lmeval_dispersion.geometry import dispersion
from lmeval_dispersion.training.train import evaluated


@pytest.mark.parametrize("batch", [2, 5])
def test_evaluated_equals_a_loop_over_blocks(batch):
    model, ids = tiny_gpt2(), tokens(5, 12)
    before = torch.random.get_rng_state()
    found = evaluated(model, ids.numpy().astype(np.int32), batch)
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), before)
    model.eval()
    with torch.no_grad():
        outs = [model(row[None], labels=row[None], output_hidden_states=True) for row in ids]
    assert found["perplexity"] == pytest.approx(math.exp(np.mean([float(o.loss) for o in outs])), rel=1e-5)
    for layer in range(3):
        states = [o.hidden_states[layer + 1][0].numpy() for o in outs]
        assert found["tokens"][layer] == pytest.approx(np.mean([dispersion(s) for s in states]), abs=1e-6)
        assert found["texts"][layer] == pytest.approx(dispersion([s[-2] for s in states]), abs=1e-6)
    assert evaluated(model, ids[:1].numpy(), 1)["texts"] == [None] * 3
