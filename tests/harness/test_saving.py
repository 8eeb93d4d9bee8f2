"""The store of a run: its documents' numbers, caches, and what a full disk costs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness_world import check_vectors, evaluate, hflm, tiny_llama

from lmeval_dispersion.errors import HarnessError, UsageError
from lmeval_dispersion.store import read_store

pytestmark = pytest.mark.usefixtures("in_world")


def test_samples_limit_and_true_document_ids(
    tokenizer: Any, task_manager: Callable[..., Any], tmp_path: Path
) -> None:
    lm = hflm(tiny_llama(tokenizer), tokenizer)
    manager = task_manager(dispersion_store=str(tmp_path / "some"))
    evaluate(lm, ["arc_easy_dispersion"], manager, samples={"arc_easy_dispersion": [1, 4, 6]})
    some = read_store(tmp_path / "some").documents
    assert some["doc_id"].tolist() == [1, 4, 6]
    evaluate(lm, ["arc_easy_dispersion"], task_manager(dispersion_store=str(tmp_path / "all")))
    every = read_store(tmp_path / "all").documents.set_index("doc_id")
    assert some["doc_hash"].tolist() == every.loc[[1, 4, 6], "doc_hash"].tolist()


def test_caches_of_answers_and_of_requests_change_nothing(
    tokenizer: Any, task_manager: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval.caching.cache as cache

    monkeypatch.setattr(cache, "PATH", str(tmp_path / "requests"))
    lm = hflm(tiny_llama(tokenizer), tokenizer)
    settings = {"use_cache": str(tmp_path / "answers"), "cache_requests": True}
    figures = []
    for _ in range(2):  # the second run hits both caches
        results = evaluate(lm, ["arc_easy_dispersion"], task_manager(), **settings)
        check_vectors(lm, results, "arc_easy_dispersion")
        figures.append(results["results"]["arc_easy_dispersion"]["dispersion,none"])
    assert figures[0] == figures[1]
    assert list((tmp_path / "requests").glob("*arc_easy_dispersion*"))
    assert list(tmp_path.glob("answers*.db"))


def test_a_full_disk_costs_the_store_and_not_the_run(
    tokenizer: Any, task_manager: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from lmeval_dispersion.harness import saving

    lm = hflm(tiny_llama(tokenizer), tokenizer)
    folder = tmp_path / "arc_easy_dispersion"
    blocked = folder / f".vectors.safetensors.{os.getpid()}.tmp"
    (blocked / "in the way").mkdir(parents=True)
    try:
        results = evaluate(lm, ["arc_easy_dispersion"], task_manager(dispersion_store=str(tmp_path)))
        assert saving.failures == [folder]
    finally:
        saving.failures.clear()
    assert math.isfinite(results["results"]["arc_easy_dispersion"]["dispersion,none"])
    assert results["configs"]["arc_easy_dispersion"]["metadata"]["dispersion"]["store"] is None
    assert "could not be written" in caplog.text
    with pytest.raises(UsageError, match="partial"):
        read_store(folder)


def test_the_judge_may_be_a_filters_metric(
    tokenizer: Any, task_manager: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.models.huggingface import HFLM

    lm = hflm(tiny_llama(tokenizer), tokenizer)
    monkeypatch.setattr(HFLM, "max_gen_toks", 4)
    calls: list[int] = []
    lm.model.register_forward_hook(lambda *_: calls.append(1))
    task = "gsm8k_dispersion"
    for wrong in ("flexible/exact_match", "flexible-extract/acc", "acc"):
        manager = task_manager(dispersion_correct=wrong)
        with pytest.raises(
            HarnessError,
            match=f"has no '{wrong}' .* it has strict-match/exact_match, flexible-extract/exact_match",
        ):
            evaluate(lm, [task], manager)
    assert not calls
    answer = "so 1,000,001 it is"  # a number, in no strict form
    monkeypatch.setattr(
        HFLM, "tok_decode", lambda _, tokens, **__: "</s>" if isinstance(tokens, int) else answer
    )
    for judge, by in (
        (None, "strict-match/exact_match"),
        ("exact_match", "strict-match/exact_match"),
        ("flexible-extract/exact_match", "flexible-extract/exact_match"),
    ):
        folder = tmp_path / str(judge).replace("/", "-")
        metadata = {"dispersion_store": str(folder)}
        if judge:
            metadata["dispersion_correct"] = judge
        results = evaluate(lm, [task], task_manager(**metadata), limit=3)
        store = read_store(folder)
        assert store.manifest["figures"]["correct_by"] == by
        assert results["configs"][task]["metadata"]["dispersion"]["correct_by"] == by
        chosen = by.split("/")[0]
        own = [s for s in results["samples"][task] if s["filter"] == chosen]
        assert store.documents["correct"].tolist() == [s["exact_match"] for s in own]
        assert store.documents["prediction"].tolist() == [s["filtered_resps"][0] for s in own]
        strict = chosen == "strict-match"
        assert set(store.documents["prediction"] == "[invalid]") == {strict}


def test_a_function_may_judge_by_the_name_of_what_it_gives(
    tokenizer: Any, task_manager: Callable[..., Any], tmp_path: Path
) -> None:
    lm = hflm(tiny_llama(tokenizer), tokenizer, max_length=1024)
    settings = {"gen_kwargs": {"max_gen_toks": 2}, "confirm_run_unsafe_code": True, "limit": 1}
    with pytest.raises(HarnessError, match=r"has no 'pass@2' .* it has pass_at_k, .*pass@1"):
        evaluate(
            lm, ["humaneval_dispersion"], task_manager("humaneval", dispersion_correct="pass@2"), **settings
        )
    for judge in ("pass@1", "pass_at_k"):
        metadata = {"dispersion_correct": judge, "dispersion_store": str(tmp_path / judge)}
        evaluate(lm, ["humaneval_dispersion"], task_manager("humaneval", **metadata), **settings)
        store = read_store(tmp_path / judge)
        assert store.manifest["figures"]["correct_by"].endswith("pass@1")
        assert store.documents["correct"].tolist() == [0.0]
