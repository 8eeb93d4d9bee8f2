"""The model that runs segments: what it refuses, and what it tells of states that are no numbers."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_models
import torch

from lmeval_dispersion import condensation, law
from lmeval_dispersion.errors import DispersionError, NonFiniteStateError, UsageError
from lmeval_dispersion.laboratory.causal_model import CausalModel, Segments, last_vectors
from lmeval_dispersion.model.loading import LoadedModel, ModelChoice


def test_nan_states_are_told_with_layer_and_text(tmp_path, data):
    broken = tiny_models.llama()
    with torch.no_grad():
        broken.model.embed_tokens.weight[tiny_models.VOCABULARY["w1"], 0] = float("inf")
    path = tiny_models.saved(tmp_path / "broken", broken)
    with pytest.raises(NonFiniteStateError, match=r"at embeddings in text \d+ of .*; check the checkpoint"):
        condensation(path, data, segment=30, segments=20)
    later = tiny_models.llama()
    with torch.no_grad():
        later.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    path = tiny_models.saved(tmp_path / "later", later)
    with pytest.raises(NonFiniteStateError, match=r"at layer\.1 in text \d+ of .*text\.jsonl"):
        law(path, data, segment=30, bins=3, bin_size=8, layers="all", contexts=())


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
    loaded = LoadedModel(peeking, tiny_models.tokenizer(), "peeking", None, device, ModelChoice("peeking"))
    with pytest.raises(UsageError, match="left-to-right language model, got peeking"):
        law(loaded, data, segment=30, bins=3, bin_size=8)


OUT_OF_MEMORY = [
    torch.cuda.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"),
    MemoryError(),
]


TOKENS = np.random.default_rng(0).integers(3, 90, (5, 12)).astype(np.uint32)
SEGMENTS = Segments(TOKENS, np.zeros((5, 2), dtype=np.int64), "planted")
EVERY = np.arange(5)


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["cuda", "cpu", "python"])
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
    with pytest.raises(DispersionError, match="one segment of 12 tokens does not fit on cpu"):
        run()
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        run()


def capped():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 8, "final_logit_softcapping": 1.0}
    return tiny_models.model(Gemma2Config, Gemma2ForCausalLM, **shape)


@pytest.mark.parametrize("build", [tiny_models.llama, capped])
def test_losses_are_those_of_the_models_own_logits(tmp_path, build):
    causal = CausalModel(tiny_models.saved(tmp_path / "model", build()), batch=2)
    found = causal.run(SEGMENTS, EVERY, [], last_vectors, losses=True)["nll"]
    ids = torch.tensor(TOKENS.astype(np.int64))
    logp = causal.loaded.model(ids).logits.double().log_softmax(-1)
    expected = -logp[:, :-1].gather(2, ids[:, 1:, None])[..., 0].numpy()
    assert np.abs(found - expected).max() < 1e-5


def test_no_logits_are_computed_where_no_token_is_scored(model, monkeypatch):
    causal = CausalModel(model, batch=5)
    head, rows = causal.decoder.head, []
    forward = head.forward

    def counted(states):
        rows.append(states.shape[-2])
        return forward(states)

    monkeypatch.setattr(head, "forward", counted)
    seen = causal.run(SEGMENTS, EVERY, ["layer.0", "last"], lambda states: states.numpy())
    assert sum(rows) == 0
    assert seen["last"].shape == (5, 12, causal.width)
    causal.run(SEGMENTS, EVERY, [], last_vectors, losses=True)
    assert sum(rows) == 12
    assert head.forward is counted
