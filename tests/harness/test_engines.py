"""A vLLM server gives the store that transformers gives; another answer is refused with its figures.

The server here plants defects (`engine_server.py`); `scripts/try_vllm.sh` runs the real one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_server import serving
from harness_world import arguments, check_same_documents

from lmeval_dispersion.errors import HarnessError, UsageError
from lmeval_dispersion.harness.from_samples import stores_from_samples
from lmeval_dispersion.harness.vllm import agreement
from lmeval_dispersion.store import read_store


@pytest.mark.usefixtures("in_world")
def test_a_server_gives_the_store_of_transformers(
    stock: Callable[..., Path], model_folder: Path, tmp_path: Path
) -> None:
    tasks = ("mmlu_anatomy", "gsm8k", "wikitext")
    settings: dict[str, Any] = {"gen_kwargs": {"max_gen_toks": 300}, "num_fewshot": 1, "limit": 6}
    logged = stock(*tasks, families=("mmlu", "gsm8k", "wikitext"), **settings)

    def store(name: str, base_url: str | None, **options: Any) -> Path:
        given = arguments(model_folder)
        return stores_from_samples(logged, given, tmp_path / name, base_url=base_url, **options)

    with serving(model_folder) as server:
        store("hf", None, layers="last+norm")
        store("vllm", server)
        for task in tasks:
            expected, found = (read_store(tmp_path / name / f"{task}_dispersion") for name in ("hf", "vllm"))
            assert found.layers == ["norm"]
            assert found.manifest["identity"] == expected.manifest["identity"]
            check_same_documents(found, expected, but="query_perplexity")
            assert found.documents["query_perplexity"].isna().all()
            np.testing.assert_allclose(found.vectors("norm"), expected.vectors("norm"), atol=1e-3)  # float16
            np.testing.assert_allclose(found.norms("norm"), expected.norms("norm"), rtol=1e-4)
            told = found.manifest["samples"]
            assert (told["engine"], told["engine_model"]) == ("vllm", "tiny")
            assert told["engine_check"]["states"] >= 8
            assert told["engine_check"]["difference_max"] < 1e-4
            assert any("gives no log-probabilities" in note for note in told["notes"])
        assert read_store(tmp_path / "vllm" / "gsm8k_dispersion").documents["truncated"].any()

        for defect, message in (
            ("unit", r"differ by up to \d+.*it divides them by their length.*vllm serve"),
            ("before-norm", r"vllm does not give the states of transformers: \d+ states"),
            ("below", r"vllm does not give the states of transformers: \d+ states"),
            ("shifted", r"another model, precision, layer or tokenizer; start it with `vllm"),
            ("short", r"expected \d+ states from .* got \d+"),
            ("none/other", r"status 404\): .*Not Found"),
        ):
            with pytest.raises(HarnessError, match=message):
                store("refused", f"{server}/{defect}", tasks=["mmlu_anatomy"])
            assert not list((tmp_path / "refused").rglob("manifest.json"))
        store("forced", f"{server}/unit", tasks=["mmlu_anatomy"], force=True)
        notes = read_store(tmp_path / "forced").manifest["samples"]["notes"]
        assert any("does not give the states of transformers" in note for note in notes)
        with pytest.raises(UsageError, match="vllm gives the layer 'norm' alone, not 'last'"):
            store("refused", server, layers="last")
        with pytest.raises(UsageError, match="other samples, another model or other layers"):
            store("vllm", None, layers="norm")
    with pytest.raises(HarnessError, match=r"no server answers at http://127\.0\.0\.1:9/v1/models"):
        store("refused", "http://127.0.0.1:9", tasks=["gsm8k"])


def test_the_tolerance_is_fixed_by_the_precision() -> None:
    random = np.random.default_rng(0)
    alone = random.normal(size=(8, 1024)) + 3.0
    lengths = np.linalg.norm(alone, axis=1, keepdims=True)
    noise = random.normal(size=alone.shape)
    noise *= lengths / np.linalg.norm(noise, axis=1, keepdims=True)
    for share, dtype, holds in (
        (0.009, "float32", True),
        (0.02, "float32", False),
        (0.045, "bfloat16", True),
        (0.045, "float16", True),
        (0.055, "bfloat16", False),
    ):
        assert agreement(alone + share * noise, alone, dtype).holds == holds
    # Parallel shifts move few vectors' directions much, and the dispersion all the same.
    both = agreement(alone + 0.049 * lengths * np.ones(1024) / 32.0, alone, "bfloat16")
    assert both.difference_max < 0.05
    assert abs(both.dispersion - both.hf_dispersion) > 0.0025
    assert not both.holds
    with pytest.raises(HarnessError, match="width 32, and the model has 1024"):
        agreement(alone[:, :32], alone, "float32")
    single = agreement(alone[:1], alone[:1], "float32")
    assert single.dispersion is None
    assert single.holds
