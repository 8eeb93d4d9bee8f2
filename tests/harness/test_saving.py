"""The store of a run: its documents' numbers, caches, and what a full disk costs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
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
    evaluate(lm, ["arc_easy_dispersion"], task_manager(dispersion_store=str(tmp_path / "two")), limit=2)
    assert read_store(tmp_path / "two").documents["doc_id"].tolist() == [0, 1]


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


FULL_DISK = """
import resource, sys
from pathlib import Path
from types import SimpleNamespace
import numpy as np
from lmeval_dispersion.harness import saving
from lmeval_dispersion.harness.seams import Surroundings
from lmeval_dispersion.harness.metrics import TaskMetrics
from lmeval_dispersion.harness.records import DocRecord, DocState
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # as a disk with 50 kB left
rows = np.random.default_rng(0).normal(size=(2000, 1, 32)).astype(np.float32)
states = [DocState(i, {"last": row}, [3], [False], [2.0], "h") for i, row in enumerate(rows)]
records = [DocRecord(s, s.doc_id, 1.0, None, None, [], "d", None) for s in states]
config = SimpleNamespace(doc_to_text="", num_fewshot=0, target_delimiter=" ", fewshot_delimiter="")
task = SimpleNamespace(task_name="t", VERSION=1, config=config)
run = saving.begin("t", {"dispersion_store": sys.argv[1]}, Surroundings(), {})
assert run.folder == Path(sys.argv[1]) / "t"
assert saving.save(run, task, TaskMetrics("t", records, ["last"]), {}) is None
assert saving.failures == [run.folder]
"""


def test_a_store_that_does_not_fit_is_partial(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "store")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "could not be written" in done.stderr
    assert not list((tmp_path / "store/t").glob("*.tmp"))
    with pytest.raises(UsageError, match="partial"):
        read_store(tmp_path / "store")


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


@pytest.mark.parametrize("task", ["arc_easy_dispersion", "gsm8k_dispersion", "wikitext_dispersion"])
def test_a_cache_that_keeps_plain_answers_only_loses_no_states(
    task: str,
    tokenizer: Any,
    task_manager: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    import lm_eval.api.model

    from lmeval_dispersion.harness.seams import plain

    kept: dict[str, str] = {}

    class JsonCache:
        """A response cache for every request type, whose answers go through JSON."""

        def __init__(self, lm: Any, _: str) -> None:
            self.lm = lm

        def __getattr__(self, name: str) -> Any:
            found = getattr(self.lm, name)
            if not name.startswith("dispersion_"):
                return found

            def cached(requests: Any) -> list[Any]:
                keys = [json.dumps([name, request.args]) for request in requests]
                if any(key not in kept for key in keys):
                    answers = found(requests)
                    kept.update(zip(keys, (json.dumps(plain(a)) for a in answers), strict=True))
                return [json.loads(kept[key]) for key in keys]

            return cached

    lm = hflm(tiny_llama(tokenizer), tokenizer, batch_size=3, max_length=512)
    settings = {"limit": 3, "gen_kwargs": {"max_gen_toks": 4}} if "gsm8k" in task else {"limit": 3}
    evaluate(lm, [task], task_manager(dispersion_store=str(tmp_path / "plain")), **settings)
    monkeypatch.setattr(lm_eval.api.model, "CachingLM", JsonCache)
    expected = read_store(tmp_path / "plain")
    for run in ("filling", "filled"):
        caplog.clear()
        manager = task_manager(dispersion_store=str(tmp_path / run))
        evaluate(lm, [task], manager, use_cache="anywhere", **settings)
        store = read_store(tmp_path / run)
        assert "answers came from a cache without states" in caplog.text
        assert store.documents["correct"].equals(expected.documents["correct"])
        assert store.documents["prediction"].equals(expected.documents["prediction"])
        assert store.documents["prompt_tokens"].equals(expected.documents["prompt_tokens"])
        first, second = store.documents["logprobs"], expected.documents["logprobs"]
        assert [list(v) for v in first] == [list(v) for v in second]
        np.testing.assert_allclose(store.vectors(), expected.vectors(), atol=1e-3)
    assert kept
