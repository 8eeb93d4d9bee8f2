"""A vLLM server gives the store that transformers gives; another answer is refused with its figures.

The server here plants defects (`engine_server.py`); `scripts/try_vllm.sh` runs the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_server import serving
from harness_world import arguments

from lmeval_dispersion.errors import HarnessError, UsageError
from lmeval_dispersion.harness.from_samples import stores_from_samples
from lmeval_dispersion.harness.vllm import agreement
from lmeval_dispersion.store import read_store

pytestmark = pytest.mark.usefixtures("in_world")


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Iterator[str]:
    """Address of a server that answers as vLLM does, on the tiny model."""
    with serving(model_folder) as address:
        yield address


def test_a_server_gives_the_store_of_transformers(
    server: str, stock: Callable[..., Path], model_folder: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"gen_kwargs": {"max_gen_toks": 300}, "num_fewshot": 1, "limit": 6}
    tasks = ("mmlu_anatomy", "gsm8k", "wikitext")
    logged = stock(*tasks, families=("mmlu", "gsm8k", "wikitext"), **settings)
    given = arguments(model_folder)

    def store(name: str, base_url: str | None = server, **options: Any) -> Path:
        return stores_from_samples(logged, given, tmp_path / name, base_url=base_url, **options)

    store("hf", None, layers="last+norm")
    store("vllm")
    for task in tasks:
        expected = read_store(tmp_path / "hf" / f"{task}_dispersion")
        found = read_store(tmp_path / "vllm" / f"{task}_dispersion")
        assert found.layers == ["norm"]
        assert found.manifest["identity"] == expected.manifest["identity"]
        for column in expected.documents:
            values = expected.documents[column].tolist(), found.documents[column].tolist()
            if column == "query_perplexity":
                assert np.isnan(values[1]).all()
            else:
                assert repr(values[0]) == repr(values[1]), column
        np.testing.assert_allclose(found.vectors("norm"), expected.vectors("norm"), atol=1e-3)  # float16
        np.testing.assert_allclose(found.norms("norm"), expected.norms("norm"), rtol=1e-4)
        told = found.manifest["samples"]
        assert told["engine"] == "vllm"
        assert told["engine_model"] == "tiny"
        assert told["engine_check"]["states"] >= 8
        assert told["engine_check"]["difference_max"] < 1e-4
        assert any("gives no log-probabilities" in note for note in told["notes"])
    truncated = read_store(tmp_path / "vllm" / "gsm8k_dispersion").documents["truncated"]
    assert truncated.any()

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
        store("refused", layers="last")
    with pytest.raises(UsageError, match="other samples, another model or other layers"):
        store("vllm", None, layers="norm")
    with pytest.raises(HarnessError, match=r"no server answers at http://127\.0\.0\.1:9/v1/models"):
        store("refused", "http://127.0.0.1:9", tasks=["gsm8k"])


def test_the_tolerance_is_fixed_by_the_precision() -> None:
    random = np.random.default_rng(0)
    alone = random.normal(size=(8, 1024)) + 3.0

    def moved(share: float) -> Any:
        noise = random.normal(size=alone.shape)
        return alone + share * noise * np.linalg.norm(alone, axis=1, keepdims=True) / np.linalg.norm(
            noise, axis=1, keepdims=True
        )

    assert agreement(moved(0.009), alone, "float32").holds
    assert not agreement(moved(0.02), alone, "float32").holds
    assert agreement(moved(0.045), alone, "bfloat16").holds
    assert agreement(moved(0.045), alone, "float16").holds
    assert not agreement(moved(0.055), alone, "bfloat16").holds
    # Parallel shifts move few vectors' directions much, and the dispersion all the same.
    shifted = alone + 0.049 * np.linalg.norm(alone, axis=1, keepdims=True) * np.ones(1024) / 32.0
    both = agreement(shifted, alone, "bfloat16")
    assert both.difference_max < 0.05
    assert abs(both.dispersion - both.hf_dispersion) > 0.0025
    assert not both.holds
    with pytest.raises(HarnessError, match="width 32, and the model has 1024"):
        agreement(alone[:, :32], alone, "float32")
    one = agreement(alone[:1], alone[:1], "float32")
    assert one.dispersion is None
    assert one.holds
