"""A store from samples of the stock task is the one that the dispersion task fills, on a vLLM server as well.

The server here plants defects (`engine_server.py`); `scripts/try_vllm.sh` runs the real one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from engine_server import serving
from harness_world import World, arguments, check_same_documents, from_folder, tiny_llama

from lmeval_dispersion.errors import HarnessError, UsageError
from lmeval_dispersion.harness import from_samples, recording
from lmeval_dispersion.harness.from_samples import stores_from_samples
from lmeval_dispersion.harness.vllm import agreement
from lmeval_dispersion.store import Store, read_store

pytestmark = pytest.mark.usefixtures("in_world")

LAYERS = "last+layer.0.attn"
Stock = Callable[..., Path]


@pytest.fixture
def make(model_folder: Path, tmp_path: Path) -> Callable[..., Store]:
    """Makes stores of logged samples under a name, and reads them."""

    def made(logged: Path, name: str = "s", model: Path = model_folder, **options: Any) -> Store:
        stores_from_samples(logged, arguments(model), tmp_path / name, **options)
        return read_store(tmp_path / name)

    return made


@pytest.mark.parametrize(
    ("task", "family", "settings"),
    [
        ("mmlu_anatomy", "mmlu", {"num_fewshot": 2}),
        ("arc_challenge", "arc", {}),
        ("hellaswag", "hellaswag", {"apply_chat_template": True}),
        ("gsm8k", "gsm8k", {"gen_kwargs": {"max_gen_toks": 8}, "num_fewshot": 1}),
        ("humaneval", "humaneval", {"gen_kwargs": {"max_gen_toks": 480}, "confirm_run_unsafe_code": True}),
        ("wikitext", "wikitext", {}),
    ],
)
def test_it_equals_the_store_of_the_dispersion_task(
    task: str,
    family: str,
    settings: dict[str, Any],
    stock: Stock,
    model_folder: Path,
    world: World,
    make: Callable[..., Store],
    tmp_path: Path,
) -> None:
    logged = stock(task, families=(family,), **settings)
    world.run(
        from_folder(model_folder), f"{task}_dispersion", store=tmp_path / "ours", layers=LAYERS, **settings
    )
    expected, store = read_store(tmp_path / "ours"), make(logged, layers=LAYERS)
    assert list(store.documents.columns) == list(expected.documents.columns)
    check_same_documents(store, expected, but="query_perplexity")
    perplexities = (s.documents["query_perplexity"].tolist() for s in (store, expected))
    np.testing.assert_allclose(*perplexities, rtol=1e-4)
    assert store.layers == expected.layers
    for layer in expected.layers:
        np.testing.assert_allclose(store.vectors(layer), expected.vectors(layer), atol=1e-3)  # float16
        np.testing.assert_allclose(store.norms(layer), expected.norms(layer), rtol=1e-4)
    for key in ("identity", "prompt_format", "tasks", "num_fewshot", "chat_template", "default_layer"):
        assert store.manifest[key] == expected.manifest[key], key
    assert store.manifest["figures"]["correct_by"] == expected.manifest["figures"]["correct_by"]
    assert expected.documents["truncated"].any() == (task == "humaneval")
    checked = store.manifest["samples"]
    assert checked.get("first_token_agreement", 1.0) == 1.0
    assert checked.get("logprob_difference_max", 0.0) < 1e-3


def test_a_group_keeps_its_categories_and_the_judge_can_be_chosen(
    stock: Stock, make: Callable[..., Store]
) -> None:
    logged = stock("mmlu_stem", families=("mmlu",), limit=2)
    assert set(make(logged, "stem", tasks=["mmlu_anatomy"]).documents["category"]) == {"stem"}
    with pytest.raises(UsageError, match="has no samples of 'mmlu_law'; it has mmlu_"):
        make(logged, tasks=["mmlu_law"])
    logged = stock("gsm8k", families=("gsm8k",), out="gsm", gen_kwargs={"max_gen_toks": 8}, limit=3)
    with pytest.raises(HarnessError, match="it has strict-match/exact_match, flexible-extract/exact_match"):
        make(logged, judge="exact-match")
    store = make(logged, "gsm8k", judge="flexible-extract/exact_match")
    assert store.manifest["figures"]["correct_by"] == "flexible-extract/exact_match"


def test_a_killed_run_goes_on_and_equal_prompts_run_once(
    stock: Stock, make: Callable[..., Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = stock("arc_easy", families=("arc",))
    file = next(logged.rglob("samples_*.jsonl"))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    # A second document with the first one's prompt and answers: one more row and no more work.
    lines[1] = {**lines[0], "doc_id": 1}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(from_samples, "_PART", 3)
    prefill, ran, killed = recording.prefill, list[int](), True

    def counted(lm: Any, kind: str, prompts: Any, recorders: Any) -> None:
        if killed and ran:
            raise KeyboardInterrupt
        ran.append(len(prompts))
        prefill(lm, kind, prompts, recorders)

    monkeypatch.setattr(recording, "prefill", counted)
    with pytest.raises(KeyboardInterrupt):
        make(logged)
    assert not list((tmp_path / "s").rglob("manifest.json"))
    assert ran == [3]
    killed = False
    store = make(logged)
    assert sum(ran) == len(lines) - 1
    assert len(store.documents) == len(lines)
    np.testing.assert_array_equal(store.vectors()[0], store.vectors()[1])
    assert not list((tmp_path / "s").rglob(".parts"))
    ran.clear()
    make(logged)
    assert not ran  # finished stores are kept
    with pytest.raises(UsageError, match="other samples, another model or other layers"):
        make(logged, layers="layer.0")


def test_samples_that_are_not_whole_are_refused(
    stock: Stock, make: Callable[..., Store], tmp_path: Path
) -> None:
    logged = stock("arc_easy", families=("arc",), limit=4)
    file = next(logged.rglob("samples_*.jsonl"))
    whole = file.read_text().splitlines()
    first = json.loads(whole[0])
    changed = {**first, "doc": {**first["doc"], "question": "another?"}}
    older = {key: value for key, value in first.items() if key != "filtered_resps"}
    for lines, message in (
        ([*whole, whole[0]], "holds document 0 twice"),
        ([*whole[:3], whole[3][:90]], "line 4 is cut off"),
        ([json.dumps(changed), *whole[1:]], "document 0 is not the one that was run"),
        ([json.dumps(older), *whole[1:]], "has no 'filtered_resps': another lm-eval wrote it"),
        ([], "is empty"),
        ([*whole[:2], whole[3]], r"lacks 1 of 4 documents \(2\)"),
    ):
        file.write_text("\n".join(lines) + "\n")
        with pytest.raises(HarnessError, match=message):
            make(logged)
        assert not (tmp_path / "s").exists()
    store = make(logged, force=True)
    assert store.documents["doc_id"].tolist() == [0, 1, 3]
    assert store.manifest["samples"]["notes"] == ["1 of 4 documents are not in the samples (2)"]
    stock("arc_easy", families=("arc",), limit=4)
    with pytest.raises(HarnessError, match=r"holds the samples of 2 runs; name one of them: .*results_"):
        make(logged, "two")
    make(max(logged.rglob("results_*.json")), "two")
    with pytest.raises(HarnessError, match="has no samples of lm-eval"):
        make(tmp_path / "two", "three")


def test_samples_of_another_model_or_tokenizer_are_refused(
    stock: Stock, make: Callable[..., Store], tokenizer: Any, model_folder: Path, tmp_path: Path
) -> None:
    logged, other = stock("arc_easy", families=("arc",)), tmp_path / "other"
    model = tiny_llama(tokenizer)
    for parameter in model.parameters():
        parameter.data = parameter.data.flip(0)
    model.save_pretrained(other)
    tokenizer.save_pretrained(other)
    with pytest.raises(HarnessError, match=r"log-probabilities differ .* another model"):
        make(logged, model=other)
    notes = " ".join(make(logged, model=other, force=True).manifest["samples"]["notes"])
    assert "another model, tokenizer or precision" in notes
    assert "the samples are of" in notes
    renamed = transformers.AutoTokenizer.from_pretrained(model_folder)
    renamed.eos_token = "<|end|>"
    renamed.save_pretrained(other)
    with pytest.raises(HarnessError, match="the samples are of another tokenizer: its eos token is"):
        make(logged, "s2", other)


def test_what_the_results_do_not_tell_is_noted(stock: Stock, make: Callable[..., Store]) -> None:
    logged = stock("arc_easy", families=("arc",), limit=3)
    file = next(logged.rglob("results_*.json"))
    results = json.loads(file.read_text())
    results |= dict.fromkeys(("max_length", "tokenizer_eos_token", "tokenizer_bos_token"))
    results["configs"]["arc_easy"]["doc_to_text"] = "def doc_to_text(doc):\n    return doc['question']\n"
    file.write_text(json.dumps(results))
    store = make(logged)
    assert store.documents["text"].isna().all()
    notes = " ".join(store.manifest["samples"]["notes"])
    for part in ("do not tell the tokenizer", "do not tell the backend's context length", "from a function"):
        assert part in notes


def test_several_launched_processes_are_refused(
    stock: Stock, make: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="several processes were launched"):
        make(stock("arc_easy", families=("arc",), limit=2))


def test_a_server_gives_the_store_of_transformers(
    stock: Stock, make: Callable[..., Store], model_folder: Path, tmp_path: Path
) -> None:
    tasks = ["mmlu_anatomy", "gsm8k", "wikitext"]
    settings: dict[str, Any] = {"gen_kwargs": {"max_gen_toks": 300}, "num_fewshot": 1, "limit": 6}
    logged = stock(*tasks, families=("mmlu", "gsm8k", "wikitext"), **settings)

    with serving(model_folder) as server:
        for task in tasks:
            expected = make(logged, f"{task}/hf", layers="last+norm", tasks=[task])
            store = make(logged, f"{task}/vllm", base_url=server, tasks=[task])
            assert store.layers == ["norm"]
            assert store.manifest["identity"] == expected.manifest["identity"]
            check_same_documents(store, expected, but="query_perplexity")
            assert store.documents["query_perplexity"].isna().all()
            np.testing.assert_allclose(store.vectors("norm"), expected.vectors("norm"), atol=1e-3)  # float16
            np.testing.assert_allclose(store.norms("norm"), expected.norms("norm"), rtol=1e-4)
            told = store.manifest["samples"]
            assert (told["engine"], told["engine_model"]) == ("vllm", "tiny")
            assert told["engine_check"]["states"] > 1
            assert told["engine_check"]["difference_max"] < 1e-4
            assert any("gives no log-probabilities" in note for note in told["notes"])
            assert store.documents["truncated"].any() == (task == "gsm8k")
        with pytest.raises(UsageError, match="other samples, another model or other layers"):
            make(logged, "gsm8k/vllm", layers="norm", tasks=["gsm8k"])

        for defect, message in (
            ("unit", r"differ by up to \d+.*it divides them by their length.*vllm serve"),
            ("below", r"vllm does not give the states of transformers: \d+ states"),
            ("shifted", r"another model, precision, layer or tokenizer; start it with `vllm"),
            ("short", r"expected \d+ states from .* got \d+"),
            ("none/other", r"status 404\): .*Not Found"),
        ):
            with pytest.raises(HarnessError, match=message):
                make(logged, "refused", base_url=f"{server}/{defect}", tasks=tasks[:1])
            assert not list((tmp_path / "refused").rglob("manifest.json"))
        store = make(logged, "forced", base_url=f"{server}/unit", tasks=tasks[:1], force=True)
        assert "does not give the states of transformers" in " ".join(store.manifest["samples"]["notes"])
        with pytest.raises(UsageError, match="vllm gives the layer 'norm' alone, not 'last'"):
            make(logged, "refused", base_url=server, layers="last")
    with pytest.raises(HarnessError, match=r"no server answers at http://127\.0\.0\.1:9/v1/models"):
        make(logged, "refused", base_url="http://127.0.0.1:9", tasks=tasks[:1])


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
