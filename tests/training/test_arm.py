"""Held-out perplexity and dispersion against plain recomputation; embeddings drawn anew."""

import math

import numpy as np
import pytest
import torch
from tiny_decoders import tiny_gpt2, tokens

from lmeval_dispersion.geometry import dispersion
from lmeval_dispersion.training.arm import ActiveForgetting, evaluated


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


def test_active_forgetting_resets_rows_and_their_optimizer_state():
    model, ids = tiny_gpt2(), tokens()
    optimizer = torch.optim.AdamW(model.parameters())
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    weight = model.get_input_embeddings().weight
    before = weight.detach().clone()

    class State:
        global_step, max_steps = 3, 9

    callback = ActiveForgetting(every=3, seed=1)
    callback.on_step_end(None, State(), None, model=model, optimizer=optimizer)
    first = weight.detach().clone()
    assert not torch.equal(first, before)
    assert float(first.std()) == pytest.approx(model.config.initializer_range, rel=0.2)
    assert not optimizer.state[weight]["exp_avg"].any()
    assert optimizer.state[model.transformer.h[0].mlp.c_fc.weight]["exp_avg"].any()
    for step in (4, 9):  # not its turn; the last step
        State.global_step = step
        callback.on_step_end(None, State(), None, model=model, optimizer=optimizer)
        assert torch.equal(weight, first)
