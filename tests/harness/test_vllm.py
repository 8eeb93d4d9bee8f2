"""Adapters on vLLM answer as on transformers; where vLLM is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness_world import tiny_llama
from lm_eval.api.instance import Instance
from peft import LoraConfig, get_peft_model

from lmeval_dispersion.harness import seams
from lmeval_dispersion.harness.swapping import SharedBase

pytest.importorskip("vllm")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # vLLM's own warnings
ADAPTERS = {
    "attention": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "all": {"r": 20, "target_modules": "all-linear", "use_rslora": True},
}
TEXTS = [("7+5=12. 13+14=", "27."), ("7+5=12. 13+14=", "28."), ("7+5=12. 31+20=", "51.")]


@pytest.fixture
def places(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A base whose heads vLLM's kernels have, and two adapters of it, one of which asks for more room."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    base = tmp_path / "base"
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 256}
    tiny_llama(tokenizer, **sizes).save_pretrained(base)
    tokenizer.save_pretrained(base)
    found = {"pretrained": str(base), "base": ""}
    for name, settings in ADAPTERS.items():
        config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
        get_peft_model(tiny_llama(tokenizer, **sizes), config).save_pretrained(tmp_path / name)
        found[name] = str(tmp_path / name)
    return found


def test_adapters_in_turn_have_the_log_likelihoods_of_transformers(
    places: dict[str, str],
) -> None:
    given = {"pretrained": places["pretrained"], "dtype": "float32"}
    engine = {**given, "max_model_len": 256, "enforce_eager": True}
    answers = dict[tuple[str, str], Any]()
    for model, arguments in (("hf", given), ("vllm", engine)):
        shared = SharedBase()
        for name in ("base", "attention", "all", "base"):
            lm = shared.loaded(model, {**arguments, "peft": places[name]}, lambda _: None)
            requests = [Instance("loglikelihood", {}, text, i) for i, text in enumerate(TEXTS)]
            logs = np.array([log for log, _ in seams.log_likelihoods(lm, requests)])
            before = answers.setdefault((model, name), logs)
            np.testing.assert_allclose(logs, before, atol=1e-4)
            del lm  # an engine that ends takes the next one's process groups along
        shared.release()
    for name in ("base", "attention", "all"):
        np.testing.assert_allclose(answers["vllm", name], answers["hf", name], atol=1e-3)
    for name in ADAPTERS:
        assert abs(answers["hf", name] - answers["hf", "base"]).max() > 0.05
