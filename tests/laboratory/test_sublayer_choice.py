"""Sub-layers against the states that the block's own modules see."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_models
import torch
from slow_states import token_ids

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.geometry import dispersion
from lmeval_dispersion.laboratory import sublayers
from lmeval_dispersion.laboratory.segments import read_segments, write_segments
from lmeval_dispersion.model.loading import load_model
from lmeval_dispersion.model.texts import Texts


def test_sublayer_draws_are_those_of_the_same_segments(model, data):
    found = sublayers(model, data, segment=30, sizes=(5, 20, 50), batch=9)
    assert set(found.summary["layer"]) == {"layer.2.attn", "layer.2.ffn"}
    loaded = load_model(model)
    block = loaded.model.model.layers[2]
    vectors = {"layer.2.attn": [], "layer.2.ffn": []}
    seen = {}
    block.register_forward_hook(lambda m, a, out: seen.update(ffn=out[0] if isinstance(out, tuple) else out))
    block.post_attention_layernorm.register_forward_pre_hook(lambda m, a: seen.update(attn=a[0]))
    rows = {}
    for ids in token_ids(data):
        with torch.no_grad():
            loaded.model(torch.tensor([ids]))
        rows[tuple(ids)] = [seen[k].reshape(1, 30, -1)[0, -1].numpy().copy() for k in ("attn", "ffn")]
    # The pool's order is a draw of its own: read it as the study does.

    written = write_segments(data.parent, "again", Texts(data), loaded.tokenizer, length=30, count=500)
    pool = read_segments(data.parent, "again", written, str(data))
    for name, which in (("layer.2.attn", 0), ("layer.2.ffn", 1)):
        vectors[name] = np.array([rows[tuple(ids)][which] for ids in pool.tokens.tolist()])
        for size in (5, 50):
            expected = [
                dispersion(vectors[name][np.random.default_rng([0, size, r]).choice(60, size, replace=False)])
                for r in range(10)
            ]
            row = found.summary.query("layer == @name and segments == @size").iloc[0]
            assert row["mean"] == pytest.approx(np.mean(expected), abs=1e-5)
            assert row["sd"] == pytest.approx(np.std(expected, ddof=1), abs=1e-5)
    chosen = found.recommendation.iloc[0]
    by_hand = found.summary.query("segments == 50").sort_values("mean")["layer"].tolist()
    assert [chosen["second"], chosen["layer"]] == by_hand
    wide = found.draws.query("segments == 50").pivot(index="draw", columns="layer", values="dispersion")
    difference = wide[chosen["layer"]] - wide[chosen["second"]]
    # Draws of 50 of 60 segments share most of them.
    assert chosen["margin"] == pytest.approx(difference.mean() / (difference.std() / np.sqrt(1 - 50 / 60)))
    assert chosen["told_apart"] == (chosen["margin"] >= 2)


def test_draws_that_the_text_cannot_fill_are_left_out_and_said(model, data):
    found = sublayers(model, data, segment=30)
    assert sorted(found.summary["segments"].unique()) == [10, 50]
    assert found.manifest["left_out_sizes"] == [100]
    with pytest.raises(UsageError, match=r"at least 100 segments of 30 tokens, got 60"):
        sublayers(model, data, segment=30, sizes=(100,))


def test_a_model_without_the_sub_layer_lists_what_there_is(place, data):
    from transformers import MambaConfig, MambaForCausalLM

    settings = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    path = tiny_models.saved(place / "mamba", tiny_models.model(MambaConfig, MambaForCausalLM, **settings))
    with pytest.raises(
        UsageError, match=r"layers among last.*layer\.0 \.\.\. layer\.1.*got 'layer\.-1\.attn'"
    ):
        sublayers(path, data, segment=30)
    found = sublayers(path, data, segment=30, layers="layer.0,last", sizes=(20,))
    assert set(found.summary["layer"]) == {"layer.0", "last"}
