"""Segments: what is cut, drawn and counted, and how a model runs them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import tiny_models
import torch

from lmeval_dispersion import condensation, law
from lmeval_dispersion.errors import DispersionError, NonFiniteStateError, UsageError
from lmeval_dispersion.laboratory.models import CausalModel, last_vectors
from lmeval_dispersion.laboratory.segments import Segments, affixes_of, draw_segments, report
from lmeval_dispersion.model.loading import LoadedModel, ModelChoice
from lmeval_dispersion.model.texts import Texts


@pytest.fixture
def source(tmp_path):
    """Texts of the words with these numbers."""

    def written(*texts):
        rows = (" ".join(f"w{number}" for number in numbers) for numbers in texts)
        return Texts(tiny_models.text_file(tmp_path / "a.jsonl", rows))

    return written


def cut(source, tokenizer=None, **options):
    """Origin and words of every segment, in order."""
    drawn = draw_segments(
        source, tokenizer or tiny_models.tokenizer(), length=3, most=99, **options
    )
    pairs = zip(drawn["origins"].tolist(), drawn["tokens"].tolist(), strict=True)
    return sorted((*origin, *(token - 3 for token in tokens)) for origin, tokens in pairs)


def test_documents_are_cut_from_their_start_and_never_across(source):
    texts = source(range(7), [1], range(10, 16))
    assert cut(texts) == [(0, 0, 0, 1, 2), (0, 3, 3, 4, 5), (2, 0, 10, 11, 12), (2, 3, 13, 14, 15)]
    assert texts.skipped["too_short"] == 1


def test_packed_texts_are_one_stream_and_name_the_text_a_segment_starts_in(source):
    # A word-level tokenizer has no token for the blank line between texts.
    texts = source([0, 1], [2], [3, 4, 5], [6])
    assert cut(texts, pack=True) == [(0, 0, 0, 1, 2), (2, 3, 3, 4, 5)]


def test_a_segment_begins_as_the_tokenizer_begins_a_text(source):
    tokenizer = tiny_models.tokenizer(bos=True)
    assert affixes_of(tokenizer)[0] == [1]
    assert affixes_of(tiny_models.tokenizer())[0] == []
    assert cut(source(range(4)), tokenizer) == [(0, 0, 1 - 3, 0, 1), (0, 2, 1 - 3, 2, 3)]


def test_the_draw_is_even_and_repeats_with_its_seed(source):
    texts, tokenizer, hits = (
        source(*([n, n] for n in range(40))),
        tiny_models.tokenizer(),
        Counter(),
    )
    for seed in range(200):
        drawn = draw_segments(texts, tokenizer, length=2, most=10, seed=seed)["tokens"][
            :, 0
        ].tolist()
        assert len(set(drawn)) == 10
        hits.update(drawn)
    assert len(hits) == 40
    assert min(hits.values()) > 20
    assert max(hits.values()) < 85  # 50 expected, sd 6
    assert (
        draw_segments(texts, tokenizer, length=2, most=10, seed=199)["tokens"][:, 0].tolist()
        == drawn
    )


def test_what_cannot_be_tokenised_is_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "w1 w2"}\n{"text": "\\ud800 x"}\n{"text": ""}\n')
    texts = Texts(tmp_path / "a.jsonl")
    assert len(draw_segments(texts, tiny_models.tokenizer(), length=2, most=5)["tokens"]) == 1
    assert texts.skipped == {"empty": 1, "undecodable": 0, "untokenised": 1, "too_short": 0}
    counts = {"texts": texts.read, **texts.skipped, "kept": 1}
    assert report("a.jsonl", counts) == "a.jsonl: 1 segment from 3 texts (1 empty, 1 untokenised)"


def test_too_little_text_says_what_to_do(source, tmp_path):
    for length, message in (
        (8, r"one segment of 8 tokens from .*2 too short.*pack"),
        (1, "segments of at least 2 tokens, got 1"),
    ):
        with pytest.raises(UsageError, match=message):
            draw_segments(source([1], [2, 3]), tiny_models.tokenizer(), length=length, most=5)
    (tmp_path / "a.txt").write_text("w1 w2")  # one document, which packing does not change
    with pytest.raises(UsageError, match=r"use shorter segments, or more text$"):
        draw_segments(Texts(tmp_path / "a.txt"), tiny_models.tokenizer(), length=8, most=5)
    with pytest.raises(UsageError, match="segments of at least 2 tokens, got 1"):
        draw_segments(source([1]), tiny_models.tokenizer(bos=True), length=1, most=5)


def test_states_that_are_no_numbers_are_named_by_layer_and_text(tmp_path, data):
    first, later = tiny_models.llama(), tiny_models.llama()
    with torch.no_grad():
        first.model.embed_tokens.weight[tiny_models.VOCABULARY["w1"], 0] = float("inf")
        later.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    path = tiny_models.saved(tmp_path / "first", first)
    with pytest.raises(
        NonFiniteStateError, match=r"at embeddings in text \d+ of .*; check the checkpoint"
    ):
        condensation(path, data, segment=30, segments=20)
    path = tiny_models.saved(tmp_path / "later", later)
    with pytest.raises(NonFiniteStateError, match=r"at layer\.1 in text \d+ of .*text\.jsonl"):
        law(path, data, segment=30, bins=8, bin_size=3, layers="all", contexts=())


def test_a_model_that_reads_both_ways_is_refused(data):
    class Peeking(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.config, self.dtype = inner, inner.config, inner.dtype
            self.model, self.lm_head = inner.model, inner.lm_head

        def forward(self, input_ids, **options):
            out = self.inner(input_ids=input_ids, **options)
            out.logits = out.logits + out.logits.mean(dim=1, keepdim=True)
            return out

    peeking, device = Peeking(tiny_models.llama()), torch.device("cpu")
    loaded = LoadedModel(
        peeking, tiny_models.tokenizer(), "peeking", None, device, ModelChoice("peeking")
    )
    with pytest.raises(UsageError, match="left-to-right language model, got peeking"):
        law(loaded, data, segment=30, bins=8, bin_size=3)


TOKENS = np.random.default_rng(0).integers(3, 90, (5, 12)).astype(np.uint32)
SEGMENTS = Segments(TOKENS, np.zeros((5, 2), dtype=np.int64), "planted")
EVERY = np.arange(5)


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory"),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
        ),
        MemoryError(),
    ],
    ids=["cuda", "cpu", "python"],
)
def test_a_batch_that_does_not_fit_is_run_in_halves(model, monkeypatch, error):
    causal = CausalModel(model, batch=64)

    def run():
        return causal.run(SEGMENTS, EVERY, ["layer.1"], lambda states: states.numpy(), losses=True)

    whole = run()
    # The memory runs out at the end of the pass, when its states have been seen.
    norm, sizes = causal.loaded.model.model.norm, []
    forward = norm.forward

    def short_of_memory(states):
        sizes.append(len(states))
        if len(states) > most:
            raise error
        return forward(states)

    monkeypatch.setattr(norm, "forward", short_of_memory)
    most = 2
    halved = run()
    assert sizes == [5, 2, 3, 1, 2]
    for name, values in whole.items():  # each text is kept once, failed passes or not
        assert np.abs(values).min(axis=-1).max() > 0
        assert np.allclose(values, halved[name], atol=1e-5)
    most = 0
    with pytest.raises(
        DispersionError, match="one segment of 12 tokens does not fit into the memory of cpu"
    ):
        run()
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        run()


def capped():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    shape |= {"num_key_value_heads": 2, "head_dim": 8, "final_logit_softcapping": 1.0}
    return tiny_models.model(Gemma2Config, Gemma2ForCausalLM, **shape)


@pytest.mark.parametrize("build", [tiny_models.llama, capped])
def test_losses_are_those_of_the_models_own_logits_which_nothing_else_computes(tmp_path, build):
    causal = CausalModel(tiny_models.saved(tmp_path / "model", build()), batch=2)
    rows = []
    count = causal.decoder.head.register_forward_hook(
        lambda _m, given, _o: rows.append(given[0].shape[1])
    )
    seen = causal.run(SEGMENTS, EVERY, ["layer.0", "last"], lambda states: states.numpy())
    assert seen["last"].shape == (5, 12, causal.width)
    assert rows == [0, 0, 0]
    losses = causal.run(SEGMENTS, EVERY, [], last_vectors, losses=True)["nll"]
    assert rows == [0, 0, 0, 12, 12, 12]
    count.remove()
    ids = torch.tensor(TOKENS.astype(np.int64))
    logp = causal.loaded.model(ids).logits.double().log_softmax(-1)
    expected = -logp[:, :-1].gather(2, ids[:, 1:, None])[..., 0].detach().numpy()
    assert np.abs(losses - expected).max() < 1e-5
