"""Prompts that processes share, processes that are killed, and beginnings of prompts that run once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from harness_world import arguments, environment, hflm, tiny_llama

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.harness import requests
from lmeval_dispersion.harness.engines import shared_prefix
from lmeval_dispersion.harness.engines.parts import Share, share_of
from lmeval_dispersion.harness.engines.prefill import on_transformers
from lmeval_dispersion.harness.from_samples import stores_from_samples
from lmeval_dispersion.store import read_store

pytestmark = pytest.mark.usefixtures("in_world")

LAYERS = "last+layer.0.attn"
# The command in a process that has written one part and then stands still, until it is killed.
HALTED = """
import time
from lmeval_dispersion.cli import main
from lmeval_dispersion.harness.engines import parts
save = parts._save
def once(*given):
    save(*given)
    time.sleep(600)
parts._save = once
raise SystemExit(main())
"""
FEWSHOT = "Question: What do bees make? Answer: honey in the hive. " * 4


def instances(kind: str, texts: list[str], **settings: Any) -> list[Any]:
    from lm_eval.api.instance import Instance

    second: Any = {"until": ["\n"], "max_gen_toks": 8, **settings} if kind == "generate_until" else " honey"
    found = []
    for i, text in enumerate(texts):
        one = Instance(
            request_type=requests.REQUEST_TYPES[kind],
            doc={},
            arguments=(text, second),
            idx=0,
            metadata=("t", i, 1),
        )
        one.query = text.removeprefix(FEWSHOT)
        one.dispersion_layers = tuple(LAYERS.split("+"))
        found.append(one)
    return found


def finished_parts(folder: Path) -> set[Path]:
    return {file for file in folder.rglob("*.npz") if ".tmp." not in file.name}


@pytest.mark.parametrize("kind", ["loglikelihood", "generate_until"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "mistral-window"])
def test_shared_beginnings_run_once_and_change_nothing(
    kind: str, family: str, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": len(tokenizer), "eos_token_id": 1, "pad_token_id": 2}
    wide = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    if family == "llama":
        model = tiny_llama(tokenizer)
    elif family == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=512, **shape)
        model = transformers.GPT2LMHeadModel(config).eval()
    elif family == "mixtral":
        config = transformers.MixtralConfig(
            **shape, **wide, num_key_value_heads=2, num_local_experts=4, max_position_embeddings=512
        )
        model = transformers.MixtralForCausalLM(config).eval()
    else:  # a window shorter than what is shared
        config = transformers.MistralConfig(
            **shape, **wide, num_key_value_heads=2, sliding_window=16, max_position_embeddings=512
        )
        model = transformers.MistralForCausalLM(config).eval()
    lm = hflm(model, tokenizer, batch_size=3, max_length=300)
    texts = [
        f"{FEWSHOT}Question: {q}" for q in ("What is ice?", "Where do fish live in?", "Why?", "Who is it")
    ]
    given = instances(kind, texts)
    ran: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda _m, args, kwargs: ran.append((args[0] if args else kwargs["input_ids"]).numel()),
        with_kwargs=True,
    )
    apart = on_transformers(lm, share=False)(given)
    alone, ran[:] = sum(ran), []
    together = on_transformers(lm)(given)
    handle.remove()
    assert sum(ran) < 0.75 * alone  # the first batch's check included
    assert not caplog.records or "run for each of them" not in caplog.text
    for one, other in zip(apart, together, strict=True):
        for layer, rows in one.state.vectors.items():
            np.testing.assert_allclose(other.state.vectors[layer], rows, atol=1e-4, rtol=1e-4)
        np.testing.assert_allclose(other.state.perplexity, one.state.perplexity, rtol=1e-4)
        assert other.state.prompt_tokens == one.state.prompt_tokens
        assert other.answer == (
            one.answer if isinstance(one.answer, str) else pytest.approx(one.answer, abs=1e-3)
        )


def test_beginnings_that_cannot_be_shared_are_run(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_llama(tokenizer)
    lm = hflm(model, tokenizer, batch_size=3, max_length=300)
    given = instances(
        "loglikelihood", [f"{FEWSHOT}Question: {q}" for q in ("What is ice?", "Where?", "Why?")]
    )
    expected = on_transformers(lm, share=False)(given)
    logits = shared_prefix.SharedPrefix.logits

    def wrong(self: Any, rows: Any) -> Any:
        return logits(self, rows.flip(1))

    monkeypatch.setattr(shared_prefix.SharedPrefix, "logits", wrong)
    found = on_transformers(lm)(given)
    assert "shared beginnings of prompts are run for each of them: logits differ by" in caplog.text
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other.state.vectors["last"], one.state.vectors["last"], atol=1e-5)


def test_which_share_a_process_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert share_of(None, one_model=False) == Share(0, 1, True)
    for bad in ("0/2", "3/2", "1", "a/b", "1/", "-1/2"):
        with pytest.raises(UsageError, match="expected --shard I/N with I from 1 to N"):
            share_of(bad, one_model=False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert share_of(None, one_model=False) == Share(1, 2, True)
    assert share_of(None, one_model=True) == Share(0, 1, False)
    with pytest.raises(UsageError, match="2 processes were launched, which share the prompts"):
        share_of("1/2", one_model=False)


def test_shards_and_a_killed_process_make_the_store_of_one(
    stock: Callable[..., Path], model_folder: Path, tmp_path: Path
) -> None:
    logged = stock("mmlu_anatomy", "wikitext", families=("mmlu", "wikitext"), num_fewshot=1)
    given = arguments(model_folder)
    stores_from_samples(logged, given, tmp_path / "one")
    first = stores_from_samples(logged, given, tmp_path / "two", shard="1/2")
    task = "mmlu_anatomy_dispersion"
    assert not list(first.rglob("manifest.json"))
    # The second shard as a process of its own, killed when it has written its first part: nothing is lost.
    command = [sys.executable, "-W", "ignore", "-c", HALTED, "embed", "--from-samples", str(logged)]
    command += ["--model", str(model_folder), "--dtype", "float32"]
    command += ["--device", "cpu", "--shard", "2/2", "-o", str(tmp_path / "two")]
    before = finished_parts(tmp_path / "two")
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while not finished_parts(tmp_path / "two") - before and process.poll() is None:
        time.sleep(0.02)
    process.kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, output  # it ran when the signal came
    assert len(finished_parts(tmp_path / "two") - before) == 1
    assert not list(first.rglob("manifest.json"))
    stores_from_samples(logged, given, tmp_path / "two", shard="2/2")
    for name in (task, "wikitext_dispersion"):
        one, two = (read_store(tmp_path / folder / name) for folder in ("one", "two"))
        np.testing.assert_allclose(two.vectors(), one.vectors(), atol=1e-3)
        for column in one.documents:
            values = one.documents[column].tolist(), two.documents[column].tolist()
            if column == "query_perplexity":
                np.testing.assert_allclose(*values, rtol=1e-4)
            else:
                assert repr(values[0]) == repr(values[1]), column
        left = {file.name for file in (tmp_path / "two" / name).iterdir()}
        assert left == {"documents.parquet", "manifest.json", "vectors.safetensors"}


@pytest.mark.slow
def test_launched_processes_share_the_prompts(
    stock: Callable[..., Path], model_folder: Path, tmp_path: Path
) -> None:
    logged = stock("arc_easy", "wikitext", families=("arc", "wikitext"))
    given = arguments(model_folder)
    stores_from_samples(logged, given, tmp_path / "one")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["embed", "--from-samples", str(logged), "--model", str(model_folder), "--dtype", "float32"]
    options += ["--device", "cpu", "-o", str(tmp_path / "two")]
    script = tmp_path / "run.py"
    script.write_text("from lmeval_dispersion.cli import main\nraise SystemExit(main())\n")
    done = subprocess.run(
        [*launch, str(script), *options],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for task in ("arc_easy_dispersion", "wikitext_dispersion"):
        one, two = (read_store(tmp_path / folder / task) for folder in ("one", "two"))
        np.testing.assert_allclose(two.vectors(), one.vectors(), atol=1e-3)
        assert json.dumps(two.manifest["identity"]) == json.dumps(one.manifest["identity"])
