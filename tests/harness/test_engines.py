"""Engines over HTTP give the store that transformers gives; what differs is refused with its figures.

The servers are stand-ins (`engine_server.py`): vLLM and SGLang themselves need a GPU.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness_world import arguments, environment

from lmeval_dispersion.errors import HarnessError, UsageError
from lmeval_dispersion.harness.engines.engine import agreement
from lmeval_dispersion.harness.from_samples import stores_from_samples
from lmeval_dispersion.store import read_store

pytestmark = pytest.mark.usefixtures("in_world")

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Iterator[str]:
    """Address of a process that answers as both servers do, on the tiny model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, str(HERE / "engine_server.py"), str(model_folder), str(port)], env=environment()
    )
    try:
        for _ in range(1200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(timeout=30)


def test_engines_give_the_store_of_transformers(
    server: str, stock: Callable[..., Path], model_folder: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"gen_kwargs": {"max_gen_toks": 300}, "num_fewshot": 1, "limit": 6}
    tasks = ("mmlu_anatomy", "gsm8k", "wikitext")
    logged = stock(*tasks, families=("mmlu", "gsm8k", "wikitext"), **settings)
    given = arguments(model_folder)

    def store(name: str, backend: str, **options: Any) -> Path:
        options = {"base_url": f"{server}/{backend}", **options} if backend != "hf" else options
        return stores_from_samples(logged, given, tmp_path / name, backend=backend, **options)

    store("hf", "hf", layers="last+norm")
    for backend, layer in (("vllm", "norm"), ("sglang", "last")):
        store(backend, backend)
        for task in tasks:
            expected = read_store(tmp_path / "hf" / f"{task}_dispersion")
            found = read_store(tmp_path / backend / f"{task}_dispersion")
            assert found.layers == [layer]
            assert found.manifest["identity"] == expected.manifest["identity"]
            for column in expected.documents:
                values = expected.documents[column].tolist(), found.documents[column].tolist()
                if column == "query_perplexity":
                    assert np.isnan(values[1]).all()
                else:
                    assert repr(values[0]) == repr(values[1]), column
            np.testing.assert_allclose(found.vectors(layer), expected.vectors(layer), atol=1e-3)  # float16
            np.testing.assert_allclose(found.norms(layer), expected.norms(layer), rtol=1e-4)
            told = found.manifest["samples"]
            assert told["engine"] == backend
            assert told["engine_model"] == "tiny"
            assert told["engine_check"]["states"] >= 8
            assert told["engine_check"]["difference_max"] < 1e-4
            assert any("gives no log-probabilities" in note for note in told["notes"])
    truncated = read_store(tmp_path / "vllm" / "gsm8k_dispersion").documents["truncated"]
    assert truncated.any()

    for defect, backend, message in (
        ("unit", "vllm", r"differ by up to \d+.*the server divides states by their length.*vllm serve"),
        ("before-norm", "vllm", r"vllm does not give the states of transformers: \d+ states"),
        ("below", "sglang", r"sglang does not give the states of transformers: \d+ states"),
        (
            "shifted",
            "sglang",
            r"another model, precision, layer or tokenizer; start it with `python",
        ),
        (
            "off",
            "sglang",
            r"status 400\): .*not configured to return.*return-hidden-states-mode",
        ),
        ("short", "vllm", r"expected \d+ states from .* got \d+"),
        ("none/vllm", "sglang", r"status 404\): .*Not Found"),
    ):
        with pytest.raises(HarnessError, match=message):
            store("refused", backend, base_url=f"{server}/{defect}/{backend}", tasks=["mmlu_anatomy"])
        assert not list((tmp_path / "refused").rglob("manifest.json"))
    store("forced", "vllm", base_url=f"{server}/unit/vllm", tasks=["mmlu_anatomy"], force=True)
    notes = read_store(tmp_path / "forced").manifest["samples"]["notes"]
    assert any("does not give the states of transformers" in note for note in notes)
    with pytest.raises(UsageError, match="vllm gives the layer 'norm' alone, not 'last'"):
        store("refused", "vllm", layers="last")
    with pytest.raises(UsageError, match="expected --base-url beside --backend vllm; start a server"):
        store("refused", "vllm", base_url=None)
    with pytest.raises(UsageError, match="other samples, another model or other layers"):
        store("vllm", "hf", layers="norm")
    with pytest.raises(HarnessError, match=r"no server answers at http://127\.0\.0\.1:9/v1/models"):
        stores_from_samples(
            logged,
            given,
            tmp_path / "refused",
            backend="vllm",
            base_url="http://127.0.0.1:9",
            tasks=["gsm8k"],
        )


def test_the_check_knows_noise_from_another_state() -> None:
    random = np.random.default_rng(0)
    alone = random.normal(size=(8, 64)) + 3.0

    def moved(share: float) -> Any:
        noise = random.normal(size=alone.shape)
        return alone + share * noise * np.linalg.norm(alone, axis=1, keepdims=True) / np.linalg.norm(
            noise, axis=1, keepdims=True
        )

    assert agreement(moved(0.015), alone, alone).holds
    assert not agreement(moved(0.03), alone, alone).holds
    # Where transformers itself moves as much from batch to batch, bfloat16 is at work.
    assert agreement(moved(0.03), alone, moved(0.02)).holds
    # Parallel shifts move few vectors' directions much, and the dispersion all the same.
    shifted = alone + 0.018 * np.linalg.norm(alone, axis=1, keepdims=True) * np.ones(64) / 8.0
    both = agreement(shifted, alone, alone)
    assert both.vectors < 0.02
    assert both.holds == (abs(both.dispersions[0] - both.dispersions[1]) <= 1e-3)
    assert not both.holds
    # Noise of 4 % raises a small dispersion by 0.0015: as much as bfloat16 does to a real model.
    axes = np.linalg.qr(random.normal(size=(64, 64)))[0]
    alike = axes[0] + 0.3 * axes[1:9]
    noise = 0.04 * np.linalg.norm(alike, axis=1, keepdims=True) * axes[9:17]
    noisy = agreement(alike + noise, alike, alike + 0.75 * noise)
    assert noisy.dispersions[0] - noisy.dispersions[1] > 1e-3
    assert noisy.holds
    assert not agreement(alike + noise, alike, alike).holds
    # Less than the noise in every vector, but all of it to where they point: the same for every text.
    nearer = agreement(alike + 0.055 * alike.mean(axis=0), alike, alike + 0.75 * noise)
    assert nearer.vectors < 0.06
    assert not nearer.holds
    with pytest.raises(HarnessError, match="width 32, and the model has 64"):
        agreement(alone[:, :32], alone, alone)
    one = agreement(alone[:1], alone[:1], alone[:1])
    assert one.dispersions is None
    assert one.holds
