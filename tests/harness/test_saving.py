"""The store of a run: its documents, caches, who judged, the shape of prompts, what a full disk costs."""

import math
import os
from functools import partial
from operator import itemgetter
from types import SimpleNamespace

import pytest
from harness_world import ARC, check_vectors

from lmeval_dispersion.errors import HarnessError, UsageError
from lmeval_dispersion.harness import saving
from lmeval_dispersion.harness.saving import model_identity
from lmeval_dispersion.store import begin_store, read_store
from lmeval_dispersion.store.identity import prompt_manifest, source_text


def test_samples_limit_and_true_document_ids(world, tmp_path):
    lm = world.lm()
    world.run(lm, store=tmp_path / "some", samples={ARC: [1, 4, 6]})
    some = read_store(tmp_path / "some").documents
    assert some["doc_id"].tolist() == [1, 4, 6]
    world.run(lm, store=tmp_path / "all")
    every = read_store(tmp_path / "all").documents.set_index("doc_id")
    assert some["doc_hash"].tolist() == every.loc[[1, 4, 6], "doc_hash"].tolist()


def test_caches_of_answers_and_of_requests_change_nothing(world, tmp_path, monkeypatch):
    import lm_eval.caching.cache as cache

    monkeypatch.setattr(cache, "PATH", str(tmp_path / "requests"))
    lm = world.lm()
    figures = []
    for _ in range(2):  # the second run hits both caches
        results = world.run(lm, use_cache=str(tmp_path / "answers"), cache_requests=True)
        check_vectors(lm, results)
        figures.append(results["results"][ARC]["dispersion,none"])
    assert figures[0] == figures[1]
    assert list((tmp_path / "requests").glob(f"*{ARC}*"))
    assert list(tmp_path.glob("answers*.db"))


def test_a_run_with_a_cache_says_once_that_it_does_not_go_on_from_a_killed_run(
    world, tmp_path, caplog
):
    cache, said = str(tmp_path / "answers"), []
    for place, killed, options in (
        ("fresh", "", {"use_cache": cache}),
        ("no cache", f"no cache/{ARC}", {}),
        ("killed", f"killed/{ARC}", {"use_cache": cache}),
        ("stamped/dispersion_2", "stamped/dispersion_1/other", {"use_cache": cache}),
    ):
        if killed:
            begin_store(tmp_path / killed)
        caplog.clear()
        world.run(world.lm(), store=tmp_path / place, limit=2, **options)
        said.append([m for m in caplog.messages if "did not finish" in m])
    assert [len(lines) for lines in said] == [0, 0, 1, 1]
    assert said[2][0].startswith(
        f"{tmp_path / 'killed' / ARC} comes from a run that did not finish;"
    )


def test_a_full_disk_costs_the_store_and_not_the_run(world, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(saving, "failures", [])
    blocked = tmp_path / ARC / f".vectors.safetensors.{os.getpid()}.tmp"
    (blocked / "in the way").mkdir(parents=True)
    results = world.run(world.lm(), store=tmp_path)
    assert saving.failures == [tmp_path / ARC]
    assert math.isfinite(results["results"][ARC]["dispersion,none"])
    assert results["configs"][ARC]["metadata"]["dispersion"]["store"] is None
    assert "could not be written" in caplog.text
    with pytest.raises(UsageError, match="partial"):
        read_store(tmp_path / ARC)


def test_the_judge_may_be_a_filters_metric(world, tmp_path, monkeypatch):
    from lm_eval.models.huggingface import HFLM

    lm = world.lm()
    monkeypatch.setattr(HFLM, "max_gen_toks", 4)
    calls = []
    lm.model.register_forward_hook(lambda *_: calls.append(1))
    task = "gsm8k_dispersion"
    has = "name one of strict-match/exact_match, flexible-extract/exact_match"
    for wrong in ("flexible/exact_match", "acc"):
        with pytest.raises(HarnessError, match=f"got '{wrong}'; {has}"):
            world.run(lm, task, correct=wrong)
    assert not calls
    answer = "so 1,000,001 it is"  # a number, in no strict form

    def decoded(_, tokens, **__):
        return "</s>" if isinstance(tokens, int) else answer

    monkeypatch.setattr(HFLM, "tok_decode", decoded)
    strict, flexible = "strict-match/exact_match", "flexible-extract/exact_match"
    for judge, by in ((None, strict), ("exact_match", strict), (flexible, flexible)):
        folder = tmp_path / str(judge).replace("/", "-")
        results = world.run(lm, task, store=folder, correct=judge, limit=3)
        store = read_store(folder)
        assert store.manifest["figures"]["correct_by"] == by
        assert results["configs"][task]["metadata"]["dispersion"]["correct_by"] == by
        judged = [s for s in results["samples"][task] if s["filter"] == by.split("/")[0]]
        assert store.documents["correct"].tolist() == [s["exact_match"] for s in judged]
        assert store.documents["prediction"].tolist() == [s["filtered_resps"][0] for s in judged]
        assert set(store.documents["prediction"] == "[invalid]") == {by == strict}


def test_a_function_may_judge_by_the_name_of_what_it_gives(world, tmp_path):
    lm, task = world.lm(max_length=1024), "humaneval_dispersion"
    settings = {"families": ("humaneval",), "confirm_run_unsafe_code": True, "limit": 1}
    settings["gen_kwargs"] = {"max_gen_toks": 2}
    with pytest.raises(HarnessError, match=r"got 'pass@2'; name one of pass_at_k, .*pass@1"):
        world.run(lm, task, correct="pass@2", **settings)
    for judge in ("pass@1", "pass_at_k"):
        world.run(lm, task, correct=judge, store=tmp_path / judge, **settings)
        store = read_store(tmp_path / judge)
        assert store.manifest["figures"]["correct_by"].endswith("pass@1")
        assert store.documents["correct"].tolist() == [0.0]


CONFIG = {
    "doc_to_text": "{{question}}\nAnswer:",
    "description": "Questions about high school biology.\n\n",
    "dataset_name": "high_school_biology",
    "target_delimiter": " ",
    "fewshot_delimiter": "\n\n",
    "num_fewshot": 2,
}
OPTIONS = {"fewshot_seed": 1, "chat_template": "c", "multiturn": False, "system": "Be brief."}


def asked(**change):
    config = {key: change.get(key, value) for key, value in CONFIG.items()}
    return prompt_manifest(
        config, **{key: change.get(key, value) for key, value in OPTIONS.items()}
    )


def render(doc):
    return str(doc["question"])


def test_functions_are_their_source_and_never_an_address():
    assert source_text(render).startswith("def render(")
    assert source_text(partial(render, option=1)) == f"{source_text(render)}(option=1)"
    assert source_text(itemgetter("question")) == "operator.itemgetter"
    assert asked(doc_to_text=render) == asked(doc_to_text=source_text(render))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"doc_to_text": "{{question}}"}, "prompt_template"),
        ({"description": "Other.\n\n"}, "prompt_template"),
        ({"target_delimiter": ""}, "prompt_template"),
        ({"num_fewshot": 3}, "num_fewshot"),
        ({"fewshot_seed": 2}, "fewshot_seed"),
        ({"chat_template": "d"}, "chat_template"),
        ({"multiturn": True}, "multiturn"),
        ({"system": "Be long."}, "system_prompt"),
    ],
)
def test_each_change_is_seen_in_its_own_key(change, key):
    other, base = asked(**change)["identity"], asked()["identity"]
    assert {k for k in other if other[k] != base[k]} == {key}


def test_subjects_of_one_benchmark_have_one_template():
    assert asked(dataset_name="anatomy", description="Questions about anatomy.\n\n") == asked()
    bare = asked(num_fewshot=0, chat_template=None, system=None)["identity"]
    assert bare.keys() == {"prompt_template", "num_fewshot"}


def test_the_models_arguments_that_change_vectors_are_in_its_identity(tmp_path):
    keys = ("peft", "delta", "add_bos_token", "model")
    lm = SimpleNamespace(pretrained=str(tmp_path), revision="main", **dict.fromkeys(keys))
    (tmp_path / "config.json").write_text("{}")
    for name in ("model.safetensors", "a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(name.encode())
    base = model_identity(lm, {})
    assert base.keys() == {"weights"}
    a, b = (
        model_identity(lm, f"pretrained={tmp_path},gguf_file={name}")
        for name in ("a.gguf", "b.gguf")
    )
    assert (a["gguf"], b["gguf"]) == ("a.gguf", "b.gguf")
    assert len({base["weights"], a["weights"], b["weights"]}) == 3
    assert model_identity(lm, {"tokenizer": "org/other"})["tokenizer"] == "org/other"
    assert model_identity(lm, {"tokenizer": str(tmp_path)}) == base
    lm.add_bos_token, lm.peft = True, "org/adapter-that-is-not-cached"
    changed = model_identity(lm, {})
    assert (changed["add_bos_token"], changed["adapter"]) == ("true", lm.peft)
    config = SimpleNamespace(_commit_hash="0" * 40)
    lm.pretrained, lm.model = "org/name", SimpleNamespace(config=config, dtype="float32")
    assert model_identity(lm, {})["weights"] == f"org/name@{'0' * 40}"
