"""Stores from samples: what goes on, what is refused or noted; `test_task.py` compares each kind of task."""

import json
import re

import numpy as np
import pytest
import transformers
from harness_world import tiny_llama

from lmeval_dispersion.errors import HarnessError, UsageError
from lmeval_dispersion.harness import recording
from lmeval_dispersion.harness.embedding import samples as module
from lmeval_dispersion.logs.runs import LoggedRun


def test_a_group_keeps_its_categories_and_the_judge_can_be_chosen(stock, from_samples):
    logged, _ = stock("mmlu_stem", families=("mmlu",), limit=2)
    assert set(from_samples(logged, "stem", tasks=["mmlu_anatomy"]).documents["category"]) == {
        "stem"
    }
    with pytest.raises(UsageError, match="has no samples of 'mmlu_law'; choose from mmlu_"):
        from_samples(logged, tasks=["mmlu_law"])
    logged, _ = stock(
        "gsm8k", families=("gsm8k",), out="gsm", gen_kwargs={"max_gen_toks": 8}, limit=3
    )
    with pytest.raises(
        HarnessError, match="name one of strict-match/exact_match, flexible-extract/exact_match"
    ):
        from_samples(logged, judge="exact-match")
    store = from_samples(logged, judge="flexible-extract/exact_match")
    assert store.manifest["figures"]["correct_by"] == "flexible-extract/exact_match"


def test_a_killed_run_goes_on_and_equal_prompts_run_once(
    stock, from_samples, tmp_path, monkeypatch
):
    logged, _ = stock("arc_easy", families=("arc",))
    file = next(logged.rglob("samples_*.jsonl"))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    # A second document with the first one's prompt and answers: one more row and no more work.
    lines[1] = {**lines[0], "doc_id": 1}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(module, "_PART", 3)
    prefill, ran, killed = recording.prefill, [], True

    def counted(lm, kind, prompts):
        if killed and ran:
            raise KeyboardInterrupt
        ran.append(len(prompts))
        prefill(lm, kind, prompts)

    monkeypatch.setattr(recording, "prefill", counted)
    with pytest.raises(KeyboardInterrupt):
        from_samples(logged)
    assert not list((tmp_path / "samples").rglob("manifest.json"))
    assert ran == [3]
    killed = False
    store = from_samples(logged)
    assert sum(ran) == len(lines) - 1
    assert len(store.documents) == len(lines)
    np.testing.assert_array_equal(store.vectors()[0], store.vectors()[1])
    assert not list((tmp_path / "samples").rglob(".parts"))
    ran.clear()
    from_samples(logged)
    assert not ran  # finished stores are kept
    with pytest.raises(UsageError, match="other samples, another model or other layers"):
        from_samples(logged, layers="layer.0")


def test_samples_that_are_not_whole_are_refused_or_noted(
    stock, from_samples, tmp_path, monkeypatch
):
    logged, _ = stock("arc_easy", families=("arc",), limit=4)
    file, results_file = next(logged.rglob("samples_*.jsonl")), next(logged.rglob("results_*.json"))
    whole, results = file.read_text().splitlines(), json.loads(results_file.read_text())
    first = json.loads(whole[0])
    changed = {**first, "doc": {**first["doc"], "question": "another?"}}
    older = {key: value for key, value in first.items() if key != "filtered_resps"}
    strange = json.dumps({**first, "note": "no end of a line: \x85\u2028"}, ensure_ascii=False)
    for lines, message in (
        ([*whole, json.dumps({**first, "acc": 0.5})], "line 5 has another record of document 0"),
        ([*whole[:3], whole[3][:90]], "line 4 is cut off"),
        ([json.dumps(changed), *whole[1:]], "document 0 was changed after the run"),
        (
            [json.dumps(older), *whole[1:]],
            "has no 'filtered_resps', which lm-eval 0.4.0 and later log",
        ),
        ([], "is empty"),
        ([strange, whole[1], whole[3]], r"lacks 1 of 4 documents \(2\)"),
    ):
        file.write_text("\n".join(lines) + "\n")
        with pytest.raises(HarnessError, match=message):
            from_samples(logged)
        assert not (tmp_path / "samples").exists()

    results |= dict.fromkeys(("max_length", "tokenizer_eos_token", "tokenizer_bos_token"))
    results["configs"]["arc_easy"]["doc_to_text"] = (
        "def doc_to_text(doc):\n    return doc['question']\n"
    )
    results_file.write_text(json.dumps(results))
    store = from_samples(logged, force=True)
    assert store.documents["doc_id"].tolist() == [0, 1, 3]
    assert store.documents["text"].isna().all()
    parts = (
        "with a function",
        r"1 of 4 documents \(2\)",
        "do not name their tokenizer",
        "context length",
    )
    for note, part in zip(store.manifest["samples"]["notes"], parts, strict=True):
        assert re.search(part, note)

    stock("arc_easy", families=("arc",), limit=4)
    with pytest.raises(
        HarnessError, match=r"holds the samples of 2 runs; name one of them: .*results_"
    ):
        from_samples(logged, "two")
    latest = max(logged.rglob("results_*.json"))
    from_samples(latest, "two")
    with pytest.raises(HarnessError, match="has no samples of lm-eval"):
        from_samples(tmp_path / "two", "three")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="expected a single process, got several"):
        from_samples(latest, "three")


def test_samples_without_results_get_their_vectors(stock, from_samples):
    logged, _ = stock("arc_easy", families=("arc",), limit=4)
    whole = from_samples(logged, "whole")
    file = next(logged.rglob("samples_*.jsonl"))
    next(logged.rglob("results_*.json")).unlink()
    for place in (logged, file):
        store = from_samples(place, place.name)
        np.testing.assert_array_equal(store.vectors(), whole.vectors())
        assert store.documents["correct"].tolist() == whole.documents["correct"].tolist()


def test_names_of_digits_stay_names_and_other_arguments_become_numbers(
    monkeypatch, tmp_path, model_folder
):
    with pytest.raises(
        HarnessError, match=r"cannot be loaded: .* unexpected keyword argument 'dtipe'"
    ):
        module._model(
            LoggedRun(tmp_path, {}, {}), {"pretrained": str(model_folder), "dtipe": "float32"}
        )

    def refuse(**options):
        raise ValueError(repr(options))

    monkeypatch.setattr("lm_eval.models.huggingface.HFLM", refuse)
    given = {"pretrained": "2024", "revision": "1000", "batch_size": "4", "parallelize": "true"}
    with pytest.raises(HarnessError, match=r"'batch_size': 4, .*'2024', .*'1000', .*: True"):
        module._model(LoggedRun(tmp_path, {}, {}), given)


def test_samples_of_another_model_or_tokenizer_are_refused(
    stock, from_samples, tokenizer, model_folder, tmp_path
):
    logged, _ = stock("arc_easy", families=("arc",))
    model, other = tiny_llama(tokenizer), tmp_path / "other"
    for parameter in model.parameters():
        parameter.data = parameter.data.flip(0)
    model.save_pretrained(other)
    tokenizer.save_pretrained(other)
    with pytest.raises(HarnessError, match=r"log-probabilities differ .* another model"):
        from_samples(logged, model=other)
    notes = " ".join(from_samples(logged, model=other, force=True).manifest["samples"]["notes"])
    assert "another model, tokenizer, prompt template or precision" in notes
    assert "the samples come from" in notes
    renamed = transformers.AutoTokenizer.from_pretrained(model_folder)
    renamed.eos_token = "<|end|>"
    renamed.save_pretrained(other)
    with pytest.raises(
        HarnessError, match="the samples come from another tokenizer: expected the eos token"
    ):
        from_samples(logged, "renamed", other)
