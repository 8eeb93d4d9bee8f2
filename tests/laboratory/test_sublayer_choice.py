"""Sub-layers against the states that the block's own modules see."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tiny_models
from slow_states import slow_pass, token_ids

from lmeval_dispersion import sublayers
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.geometry import dispersion
from lmeval_dispersion.laboratory.segments import draw_segments
from lmeval_dispersion.model.loading import load_model
from lmeval_dispersion.model.texts import Texts


def test_sublayer_draws_are_those_of_the_same_segments(model, data):
    found = sublayers(model, data, segment=30, sizes=(5, 20, 50), batch=9)
    assert set(found.summary["layer"]) == {"layer.2.attn", "layer.2.ffn"}
    loaded = load_model(model)
    block = loaded.model.model.layers[2]
    seen, rows = {}, {}
    block.register_forward_hook(
        lambda m, a, out: seen.update(ffn=out[0] if isinstance(out, tuple) else out)
    )
    block.post_attention_layernorm.register_forward_pre_hook(lambda m, a: seen.update(attn=a[0]))
    for ids in token_ids(data):
        slow_pass(loaded.model, ids)
        rows[tuple(ids)] = {
            key: states.reshape(30, -1)[-1].numpy().copy() for key, states in seen.items()
        }
    # The pool's order is a draw of its own: read it as the study does.
    pool = draw_segments(Texts(data), loaded.tokenizer, length=30, most=500)["tokens"].tolist()
    summary = found.summary.set_index(["layer", "segments"])
    for part, size in itertools.product(("attn", "ffn"), (5, 50)):
        vectors = np.array([rows[tuple(ids)][part] for ids in pool])
        draws = [
            np.random.default_rng([0, size, r]).choice(60, size, replace=False) for r in range(10)
        ]
        expected = [dispersion(vectors[chosen]) for chosen in draws]
        row = summary.loc[(f"layer.2.{part}", size)]
        assert row["mean"] == pytest.approx(np.mean(expected), abs=1e-5)
        assert row["sd"] == pytest.approx(np.std(expected, ddof=1), abs=1e-5)
    chosen = found.recommendation.iloc[0]
    by_hand = found.summary.query("segments == 50").sort_values("mean")["layer"].tolist()
    assert [chosen["second"], chosen["layer"]] == by_hand
    wide = found.draws.query("segments == 50").pivot(
        index="draw", columns="layer", values="dispersion"
    )
    difference = wide[chosen["layer"]] - wide[chosen["second"]]
    # Draws of 50 of 60 segments share most of them.
    assert chosen["margin"] == pytest.approx(
        difference.mean() / (difference.std() / np.sqrt(1 - 50 / 60))
    )
    assert chosen["told_apart"] == (chosen["margin"] >= 2)


def test_a_model_without_the_sub_layer_lists_what_there_is(place, data):
    from transformers import MambaConfig, MambaForCausalLM

    settings = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    path = tiny_models.saved(
        place / "mamba", tiny_models.model(MambaConfig, MambaForCausalLM, **settings)
    )
    with pytest.raises(UsageError, match=r"layer\.0 \.\.\. layer\.1.*got 'layer\.-1\.attn'"):
        sublayers(path, data, segment=30)
    found = sublayers(path, data, segment=30, layers="layer.0,last", sizes=(20,))
    assert set(found.summary["layer"]) == {"layer.0", "last"}
