"""Condensation of encoders against the states that transformers and their own blocks give."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_models
import torch
from slow_states import mean_pair_distance
from tokenizers.processors import TemplateProcessing

from lmeval_dispersion import condensation, law
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.laboratory.models import EncoderModel, read_either_way
from lmeval_dispersion.laboratory.segments import draw_segments
from lmeval_dispersion.model.texts import Texts

SHAPE = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
SHAPE |= {"num_hidden_layers": 4, "max_position_embeddings": 64, "pad_token_id": 2}


def saved(folder, config_class, model_class, **settings):
    """An encoder with a tokenizer that puts each text between two special tokens."""
    built = tiny_models.model(config_class, model_class, **{**SHAPE, **settings})
    built.save_pretrained(folder)
    tokenizer = tiny_models.tokenizer(pad=True)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.model_max_length = 64
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def albert(place):
    from transformers import AlbertConfig, AlbertForMaskedLM

    return saved(place / "albert", AlbertConfig, AlbertForMaskedLM, embedding_size=16)


@pytest.fixture(scope="module")
def bert(place):
    from transformers import BertConfig, BertModel

    return saved(place / "bert", BertConfig, BertModel, num_hidden_layers=2)


@pytest.fixture(scope="module")
def bodies(albert, bert):
    """The models and the module that each runs once a block."""
    from transformers import AlbertForMaskedLM, BertModel

    shared = AlbertForMaskedLM.from_pretrained(albert).eval()
    plain = BertModel.from_pretrained(bert).eval()
    blocks = [*plain.encoder.layer]
    return {
        "albert": (shared, [shared.albert.encoder.albert_layer_groups[0].albert_layers[0]]),
        "bert": (plain, blocks),
    }


@pytest.mark.parametrize("name", ["albert", "bert"])
def test_an_encoder_s_condensation_is_that_of_what_enters_and_leaves_its_blocks(
    name, place, data, bodies
):
    found = condensation(place / name, data, segment=12, segments=20, batch=7)
    model, blocks = bodies[name]
    seen = []
    hooks = [block.register_forward_pre_hook(lambda m, a: seen.append(a[0])) for block in blocks]
    hooks += [
        block.register_forward_hook(lambda m, a, out: seen.append(_first(out))) for block in blocks
    ]
    drawn = draw_segments(
        Texts(data), read_either_way(place / name).loaded.tokenizer, length=12, most=20, suffix=[2]
    )
    expected = []
    for tokens in drawn["tokens"].astype(np.int64):
        assert (tokens[0], tokens[-1]) == (1, 2)
        seen.clear()
        with torch.no_grad():
            model(torch.tensor(tokens[None]))
        # What enters a block is what left the one before it.
        states = [*seen[::2], seen[-1]]
        expected.append([1 - mean_pair_distance(state[0].double().numpy()) for state in states])
    for hook in hooks:
        hook.remove()
    assert found.layers["mean"].to_numpy() == pytest.approx(np.mean(expected, axis=0), abs=1e-5)
    depths = len(expected[0])
    assert found.layers["fraction"].to_numpy() == pytest.approx(np.linspace(0, 1, depths))
    last = found.last.set_index("last")["mean"]
    for count in range(1, min(5, depths) + 1):
        assert last[str(count)] == pytest.approx(np.array(expected)[:, -count:].mean(), abs=1e-5)
    half = (depths - 1) // 2
    assert last["half"] == pytest.approx(np.array(expected)[:, -half:].mean(), abs=1e-5)
    assert ("5" in last.index) == (depths >= 5)


def _first(output):
    return output if isinstance(output, torch.Tensor) else output[0]


def test_a_family_of_encoders_is_one_call_with_its_teacher_and_controls(albert, bert, data):
    options = {"segment": 12, "segments": 20, "control": ("untrained", "shuffled")}
    found = condensation([albert, bert], data, teacher=albert, **options)
    assert found.summary["control"].tolist() == ["", "untrained", "shuffled"] * 2
    assert found.sizes["models"].tolist() == ["albert, bert"]
    assert found.pairs["relation"].tolist() == ["size", "teacher"]
    own = found.texts[found.texts["control"] == ""]
    means = {}
    for model, depths in (("albert", 5), ("bert", 3)):
        wide = own[own["model"] == model].pivot(index="text", columns="depth", values="mean")
        means[model] = wide[range(depths - 3, depths)].mean(axis=1).to_numpy()
    assert found.pairs["difference"].to_numpy() == pytest.approx(
        [(means["bert"] - means["albert"]).mean()] * 2
    )
    assert found.sizes["change"].item() == pytest.approx((means["bert"] - means["albert"]).mean())


def test_a_shuffled_segment_keeps_its_special_tokens_at_both_ends(bert):
    model = read_either_way(bert)
    assert isinstance(model, EncoderModel)
    rows = np.array([[1, *range(10, 20), 2]], dtype=np.uint32)
    mixed = model.control("shuffled", 0)._ordered(rows, np.array([0]))
    assert (mixed[0, 0], mixed[0, -1]) == (1, 2)
    assert sorted(mixed[0]) == sorted(rows[0])
    assert mixed.tolist() != rows.tolist()


def test_measures_that_score_tokens_still_refuse_an_encoder(albert, data):
    with pytest.raises(UsageError, match=r"decoder-only language model, got .*AlbertForMaskedLM"):
        law(albert, data, segment=12)
    with pytest.raises(UsageError, match="takes at most 64 tokens, got segments of 65"):
        condensation(albert, data, segment=65)


def test_a_causal_head_that_reads_later_tokens_is_an_encoder_here(place, data):
    from transformers import BertConfig, BertLMHeadModel

    both_ways = saved(place / "both-ways", BertConfig, BertLMHeadModel)
    found = condensation(both_ways, data, segment=12, segments=5)
    assert found.layers["layer"].tolist() == ["embeddings", "layer.0", "layer.1", "layer.2", "last"]
    with pytest.raises(UsageError, match="expected a left-to-right language model"):
        law(both_ways, data, segment=12)
