"""The store of a run: its documents' numbers, caches, who judged, and what a full disk costs."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from harness_world import ARC, World, check_vectors

from lmeval_dispersion.errors import HarnessError, UsageError
from lmeval_dispersion.harness import saving
from lmeval_dispersion.store import read_store


def test_samples_limit_and_true_document_ids(world: World, tmp_path: Path) -> None:
    lm = world.lm()
    world.run(lm, store=tmp_path / "some", samples={ARC: [1, 4, 6]})
    some = read_store(tmp_path / "some").documents
    assert some["doc_id"].tolist() == [1, 4, 6]
    world.run(lm, store=tmp_path / "all")
    every = read_store(tmp_path / "all").documents.set_index("doc_id")
    assert some["doc_hash"].tolist() == every.loc[[1, 4, 6], "doc_hash"].tolist()


def test_caches_of_answers_and_of_requests_change_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_full_disk_costs_the_store_and_not_the_run(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_the_judge_may_be_a_filters_metric(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.models.huggingface import HFLM

    lm = world.lm()
    monkeypatch.setattr(HFLM, "max_gen_toks", 4)
    calls: list[int] = []
    lm.model.register_forward_hook(lambda *_: calls.append(1))
    task = "gsm8k_dispersion"
    has = "it has strict-match/exact_match, flexible-extract/exact_match"
    for wrong in ("flexible/exact_match", "acc"):
        with pytest.raises(HarnessError, match=f"has no '{wrong}' .* {has}"):
            world.run(lm, task, correct=wrong)
    assert not calls
    answer = "so 1,000,001 it is"  # a number, in no strict form

    def decoded(_: Any, tokens: Any, **__: Any) -> str:
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


def test_a_function_may_judge_by_the_name_of_what_it_gives(world: World, tmp_path: Path) -> None:
    lm, task = world.lm(max_length=1024), "humaneval_dispersion"
    settings: dict[str, Any] = {"families": ("humaneval",), "confirm_run_unsafe_code": True, "limit": 1}
    settings["gen_kwargs"] = {"max_gen_toks": 2}
    with pytest.raises(HarnessError, match=r"has no 'pass@2' .* it has pass_at_k, .*pass@1"):
        world.run(lm, task, correct="pass@2", **settings)
    for judge in ("pass@1", "pass_at_k"):
        world.run(lm, task, correct=judge, store=tmp_path / judge, **settings)
        store = read_store(tmp_path / judge)
        assert store.manifest["figures"]["correct_by"].endswith("pass@1")
        assert store.documents["correct"].tolist() == [0.0]
