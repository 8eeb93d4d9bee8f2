"""The store of a run: its documents' numbers, caches, and what a full disk costs."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness_world import check_vectors, evaluate, hflm, tiny_llama

from lmeval_dispersion.errors import UsageError
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
from lmeval_dispersion.harness.compat import Surroundings
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
