"""A store from the samples of the stock task is the store that the dispersion task fills."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from harness_world import arguments, evaluate, from_folder, tiny_llama

from lmeval_dispersion.errors import HarnessError, UsageError
from lmeval_dispersion.harness import from_samples, requests
from lmeval_dispersion.harness.from_samples import stores_from_samples
from lmeval_dispersion.store import read_store

pytestmark = pytest.mark.usefixtures("in_world")

LAYERS = "last+layer.0.attn"


def counted(run: Callable[..., Any], sizes: list[int], stop_after: int = 99) -> Callable[..., Any]:
    """``requests.prefilled`` that notes how many prompts it runs, and is interrupted after some calls."""

    def noted(lm: Any, kind: str, prompts: Any, recorders: Any) -> None:
        if len(sizes) == stop_after:
            raise KeyboardInterrupt
        sizes.append(len(prompts))
        run(lm, kind, prompts, recorders)

    return noted


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
    stock: Callable[..., Path],
    model_folder: Path,
    task_manager: Callable[..., Any],
    tmp_path: Path,
) -> None:
    logged = stock(task, families=(family,), **settings)
    manager = task_manager(dispersion_layers=LAYERS, dispersion_store=str(tmp_path / "ours"))
    evaluate(from_folder(model_folder), [f"{task}_dispersion"], manager, **settings)
    stores_from_samples(logged, arguments(model_folder), tmp_path / "theirs", layers=LAYERS)
    expected, found = (read_store(tmp_path / name / f"{task}_dispersion") for name in ("ours", "theirs"))
    assert list(found.documents.columns) == list(expected.documents.columns)
    for column in expected.documents:
        values = expected.documents[column].tolist(), found.documents[column].tolist()
        if column == "query_perplexity":
            np.testing.assert_allclose(*values, rtol=1e-4)
        elif column == "logprobs":
            assert [list(v) for v in values[0]] == [list(v) for v in values[1]]
        else:
            assert repr(values[0]) == repr(values[1]), column  # NaN and None are told apart
    assert found.layers == expected.layers
    for layer in expected.layers:
        np.testing.assert_allclose(found.vectors(layer), expected.vectors(layer), atol=1e-3)  # float16
        np.testing.assert_allclose(found.norms(layer), expected.norms(layer), rtol=1e-4)
    for key in ("identity", "prompt_format", "tasks", "num_fewshot", "chat_template", "default_layer"):
        assert found.manifest[key] == expected.manifest[key], key
    assert found.manifest["figures"]["correct_by"] == expected.manifest["figures"]["correct_by"]
    assert expected.documents["truncated"].any() == (task in ("humaneval",))
    checked = found.manifest["samples"]
    assert checked.get("first_token_agreement", 1.0) == 1.0
    assert checked.get("logprob_difference_max", 0.0) < 1e-3


def test_a_group_keeps_its_categories_and_the_judge_can_be_chosen(
    stock: Callable[..., Path], model_folder: Path, tmp_path: Path
) -> None:
    logged = stock("mmlu_stem", families=("mmlu",), limit=2)
    stores_from_samples(logged, arguments(model_folder), tmp_path / "stem", tasks=["mmlu_anatomy"])
    assert set(read_store(tmp_path / "stem").documents["category"]) == {"stem"}
    with pytest.raises(UsageError, match="has no samples of 'mmlu_law'; it has mmlu_"):
        stores_from_samples(logged, arguments(model_folder), tmp_path / "x", tasks=["mmlu_law"])
    logged = stock("gsm8k", families=("gsm8k",), out="gsm", gen_kwargs={"max_gen_toks": 8}, limit=3)
    with pytest.raises(HarnessError, match="it has strict-match/exact_match, flexible-extract/exact_match"):
        stores_from_samples(logged, arguments(model_folder), tmp_path / "x", judge="exact-match")
    stores_from_samples(
        logged, arguments(model_folder), tmp_path / "gsm8k", judge="flexible-extract/exact_match"
    )
    figures = read_store(tmp_path / "gsm8k").manifest["figures"]
    assert figures["correct_by"] == "flexible-extract/exact_match"


def test_a_killed_run_goes_on_and_equal_prompts_run_once(
    stock: Callable[..., Path], model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = stock("arc_easy", families=("arc",))
    file = next(logged.rglob("samples_*.jsonl"))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    # A second document with the first one's prompt and answers: one more row and no more work.
    lines[1] = {**lines[0], "doc_id": 1}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ran: list[int] = []
    monkeypatch.setattr(from_samples, "_PART", 3)
    prefilled = requests.prefilled
    monkeypatch.setattr(requests, "prefilled", counted(prefilled, ran, stop_after=1))
    with pytest.raises(KeyboardInterrupt):
        stores_from_samples(logged, arguments(model_folder), tmp_path / "s")
    assert not list((tmp_path / "s").rglob("manifest.json"))
    rest: list[int] = []
    monkeypatch.setattr(requests, "prefilled", counted(prefilled, rest))
    stores_from_samples(logged, arguments(model_folder), tmp_path / "s")
    assert ran == [3]
    assert sum(rest) == len(lines) - 1 - 3
    store = read_store(tmp_path / "s")
    assert len(store.documents) == len(lines)
    np.testing.assert_array_equal(store.vectors()[0], store.vectors()[1])
    assert not list((tmp_path / "s").rglob(".parts"))
    rest.clear()
    stores_from_samples(logged, arguments(model_folder), tmp_path / "s")
    assert not rest  # finished stores are kept
    with pytest.raises(UsageError, match="other samples, another model or other layers"):
        stores_from_samples(logged, arguments(model_folder), tmp_path / "s", layers="layer.0")


def test_samples_that_are_not_whole_are_refused(
    stock: Callable[..., Path], model_folder: Path, tmp_path: Path
) -> None:
    logged = stock("arc_easy", families=("arc",), limit=4)
    file = next(logged.rglob("samples_*.jsonl"))
    whole = file.read_text().splitlines()

    def refused(lines: list[str], message: str, **options: Any) -> None:
        file.write_text("\n".join(lines) + "\n")
        with pytest.raises(HarnessError, match=message):
            stores_from_samples(logged, arguments(model_folder), tmp_path / "s", **options)
        assert not (tmp_path / "s").exists()

    refused([*whole[:2], whole[3]], r"lacks 1 of 4 documents \(2\)")
    refused([*whole, whole[0]], "holds document 0 twice")
    refused([*whole[:3], whole[3][:90]], "line 4 is cut off")
    changed = json.loads(whole[0])
    changed["doc"]["question"] += "?"
    refused([json.dumps(changed), *whole[1:]], "document 0 is not the one that was run")
    other = {key: value for key, value in json.loads(whole[0]).items() if key != "filtered_resps"}
    refused([json.dumps(other), *whole[1:]], "has no 'filtered_resps': another lm-eval wrote it")
    refused([], "is empty")
    file.write_text("\n".join([*whole[:2], whole[3]]) + "\n")
    stores_from_samples(logged, arguments(model_folder), tmp_path / "s", force=True)
    store = read_store(tmp_path / "s")
    assert store.documents["doc_id"].tolist() == [0, 1, 3]
    assert store.manifest["samples"]["notes"] == ["1 of 4 documents are not in the samples (2)"]
    stock("arc_easy", families=("arc",), limit=4)
    with pytest.raises(HarnessError, match=r"holds the samples of 2 runs; name one of them: .*results_"):
        stores_from_samples(logged, arguments(model_folder), tmp_path / "two")
    newest = max(logged.rglob("results_*.json"))
    stores_from_samples(newest, arguments(model_folder), tmp_path / "two")
    with pytest.raises(HarnessError, match="has no samples of lm-eval"):
        stores_from_samples(tmp_path / "two", arguments(model_folder), tmp_path / "three")


def test_samples_of_another_model_or_tokenizer_are_refused(
    stock: Callable[..., Path], model_folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    logged = stock("arc_easy", families=("arc",))
    other = tmp_path / "other"
    model = tiny_llama(tokenizer)
    for parameter in model.parameters():
        parameter.data = parameter.data.flip(0)
    model.save_pretrained(other)
    tokenizer.save_pretrained(other)
    with pytest.raises(HarnessError, match=r"log-probabilities differ .* another model"):
        stores_from_samples(logged, arguments(other), tmp_path / "s")
    stores_from_samples(logged, arguments(other), tmp_path / "s", force=True)
    notes = read_store(tmp_path / "s").manifest["samples"]["notes"]
    assert any("another model, tokenizer or precision" in note for note in notes)
    assert any("the samples are of" in note for note in notes)
    renamed = transformers.AutoTokenizer.from_pretrained(model_folder)
    renamed.eos_token = "<|end|>"
    renamed.save_pretrained(other)
    with pytest.raises(HarnessError, match="the samples are of another tokenizer: its eos token is"):
        stores_from_samples(logged, arguments(other), tmp_path / "s2")


def test_what_the_results_do_not_tell_is_noted(
    stock: Callable[..., Path], model_folder: Path, tmp_path: Path
) -> None:
    logged = stock("arc_easy", families=("arc",), limit=3)
    file = next(logged.rglob("results_*.json"))
    results = json.loads(file.read_text())
    results["max_length"] = None
    results["tokenizer_eos_token"] = results["tokenizer_bos_token"] = None
    results["configs"]["arc_easy"]["doc_to_text"] = "def doc_to_text(doc):\n    return doc['question']\n"
    file.write_text(json.dumps(results))
    stores_from_samples(logged, arguments(model_folder), tmp_path / "s")
    store = read_store(tmp_path / "s")
    assert store.documents["text"].isna().all()
    notes = " ".join(store.manifest["samples"]["notes"])
    for part in ("do not tell the tokenizer", "do not tell the backend's context length", "from a function"):
        assert part in notes


def test_several_launched_processes_are_refused(
    stock: Callable[..., Path], model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = stock("arc_easy", families=("arc",), limit=2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="several processes were launched"):
        stores_from_samples(logged, arguments(model_folder), tmp_path / "s")
