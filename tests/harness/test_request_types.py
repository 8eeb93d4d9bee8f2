"""States that cannot be recorded are refused: before the model runs where possible, else loudly after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from harness_world import evaluate, hflm, hooks_left, tiny_llama

from lmeval_dispersion.errors import HarnessError, UsageError

pytestmark = pytest.mark.usefixtures("in_world")


def test_wrong_layers_and_finished_stores_are_refused_before_the_model_runs(
    tokenizer: Any, task_manager: Callable[..., Any], tmp_path: Path
) -> None:
    lm = hflm(tiny_llama(tokenizer), tokenizer)
    calls = []
    lm.model.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(UsageError, match=r"expected layers among last, norm, embeddings, layer\.0"):
        evaluate(lm, ["arc_easy_dispersion"], task_manager(dispersion_layers="layer.9"))
    assert not calls
    manager = task_manager(dispersion_store=str(tmp_path))
    evaluate(lm, ["arc_easy_dispersion"], manager, limit=2)
    calls.clear()
    with pytest.raises(UsageError, match="holds a finished store already"):
        evaluate(lm, ["arc_easy_dispersion"], manager, limit=2)
    assert not calls


def test_models_without_states_are_refused_before_any_request(task_manager: Callable[..., Any]) -> None:
    from lm_eval.api.registry import get_model

    dummy = get_model("dummy")()
    with pytest.raises(
        HarnessError, match="needs hidden states, which DummyLM does not give; use --model hf"
    ):
        evaluate(dummy, ["arc_easy_dispersion"], task_manager())


def test_encoder_decoders_are_refused(tokenizer: Any, task_manager: Callable[..., Any]) -> None:
    config = transformers.T5Config(
        vocab_size=len(tokenizer), d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2
    )
    lm = hflm(transformers.T5ForConditionalGeneration(config).eval(), tokenizer)
    with pytest.raises(HarnessError, match="needs a decoder-only model, got an encoder-decoder"):
        evaluate(lm, ["arc_easy_dispersion"], task_manager())


def test_a_backend_that_runs_requests_otherwise_ends_the_run_loudly(
    tokenizer: Any, task_manager: Callable[..., Any]
) -> None:
    from lm_eval.models.huggingface import HFLM

    class Elsewhere(HFLM):  # type: ignore[misc]
        """Scores without the model: what a later lm-eval with another way of running would look like."""

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return [(-1.0, False)] * len(requests)

    lm = Elsewhere(pretrained=tiny_llama(tokenizer), tokenizer=tokenizer)
    with pytest.raises(
        HarnessError, match=r"the states of 8 of 8 requests were not seen: lm-eval .* use lm-eval"
    ):
        evaluate(lm, ["arc_easy_dispersion"], task_manager())
    assert not hooks_left(lm.model)


def test_an_lm_eval_without_what_recording_stands_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.models.huggingface import HFLM

    from lmeval_dispersion.harness import requests

    monkeypatch.delattr(HFLM, "_select_cont_toks")
    with pytest.raises(
        HarnessError, match=r"has no HFLM\._select_cont_toks, which dispersion tasks need; install"
    ):
        requests.install()
