"""States that cannot be recorded are refused: before the model runs where possible, else loudly after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from harness_world import World, hooks_left, tiny_llama

from lmeval_dispersion.errors import HarnessError, UsageError
from lmeval_dispersion.harness import requests


def test_wrong_layers_and_finished_stores_are_refused_before_the_model_runs(
    world: World, tmp_path: Path
) -> None:
    lm = world.lm()
    calls: list[int] = []
    lm.model.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(UsageError, match=r"expected layers among last, norm, embeddings, layer\.0"):
        world.run(lm, layers="layer.9")
    assert not calls
    world.run(lm, store=tmp_path, limit=2)
    calls.clear()
    with pytest.raises(UsageError, match="holds a finished store already"):
        world.run(lm, store=tmp_path, limit=2)
    assert not calls


def test_models_without_the_states_of_a_decoder_are_refused(world: World) -> None:
    from lm_eval.api.registry import get_model

    with pytest.raises(HarnessError, match="hidden states, which DummyLM does not give; use --model hf"):
        world.run(get_model("dummy")())
    config = transformers.T5Config(
        vocab_size=len(world.tokenizer), d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2
    )
    with pytest.raises(HarnessError, match="needs a decoder-only model, got an encoder-decoder"):
        world.run(world.lm(transformers.T5ForConditionalGeneration(config).eval()))


def test_a_backend_that_runs_requests_otherwise_ends_the_run_loudly(world: World) -> None:
    from lm_eval.models.huggingface import HFLM

    class Elsewhere(HFLM):  # type: ignore[misc]
        """Scores without the model: what a later lm-eval with another way of running would look like."""

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return [(-1.0, False)] * len(requests)

    lm = Elsewhere(pretrained=tiny_llama(world.tokenizer), tokenizer=world.tokenizer)
    with pytest.raises(HarnessError, match=r"8 of 8 requests were not seen: lm-eval .* use lm-eval"):
        world.run(lm)
    assert not hooks_left(lm.model)


def test_an_lm_eval_without_what_recording_stands_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.models.huggingface import HFLM

    monkeypatch.delattr(HFLM, "_select_cont_toks")
    with pytest.raises(HarnessError, match=r"has no HFLM\._select_cont_toks, which dispersion tasks need"):
        requests.install()
