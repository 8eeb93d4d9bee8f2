"""Stores of different identity: never merged, never compared without a word."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lmeval_dispersion.errors import MixedStoresError
from lmeval_dispersion.store import check_comparable, read_store, write_store
from lmeval_dispersion.store.identity import MODEL_KEYS, RUN_KEYS, TASK_KEYS

BASE = {"weights": "sha256:1", "dtype": "bfloat16", "prompt_template": "p", "num_fewshot": "0"}
CHANGES = {key: {key: "other"} for key in (*MODEL_KEYS, *RUN_KEYS, *TASK_KEYS)}


def written(path: Path, task: str = "t", identity: dict[str, str] | None = None, **more: str) -> Path:
    manifest = {"model": "m", "revision": "r", "tasks": {task: 1}, **more}
    rows = np.random.default_rng(0).normal(size=(20, 8))
    return write_store(
        path,
        documents=pd.DataFrame({"doc_id": range(20), "task": task}),
        vectors={"last": rows},
        manifest=manifest if identity is None else {**manifest, "identity": identity},
    )


@pytest.mark.parametrize("key", [*MODEL_KEYS, *RUN_KEYS])
def test_other_models_and_other_runs_are_not_merged(tmp_path: Path, key: str) -> None:
    written(tmp_path / "a", "a", BASE)
    written(tmp_path / "b", "b", {**BASE, **CHANGES[key]})
    with pytest.raises(MixedStoresError, match=f"the stores in a and b differ in {key} \\("):
        read_store(tmp_path)


@pytest.mark.parametrize("identity", [None, BASE])
@pytest.mark.parametrize("key", ["model", "revision"])
def test_other_names_and_revisions_are_not_merged(
    tmp_path: Path, key: str, identity: dict[str, str] | None
) -> None:
    written(tmp_path / "a", "a", identity)
    written(tmp_path / "b", "b", identity, **{key: "other"})
    with pytest.raises(MixedStoresError, match=f"the stores in a and b differ in {key} \\("):
        read_store(tmp_path)


def test_tasks_of_one_run_may_be_asked_in_their_own_ways(tmp_path: Path) -> None:
    written(tmp_path / "a", "a", BASE)
    written(tmp_path / "b", "b", {**BASE, "num_fewshot": "5", "fewshot_seed": "1"})
    joint = read_store(tmp_path).manifest["identity"]
    assert joint["weights"] == "sha256:1"
    assert joint["prompt_template"] == "p"
    assert joint["num_fewshot"].startswith("several:")
    assert read_store(tmp_path / "a").manifest["identity"] == BASE


def test_stores_without_identity_are_read_and_not_mixed_with_others(tmp_path: Path) -> None:
    written(tmp_path / "a", "a")
    written(tmp_path / "b", "b")
    assert "identity" not in read_store(tmp_path).manifest
    written(tmp_path / "c", "c", BASE)
    with pytest.raises(MixedStoresError, match="was written before stores had an identity"):
        read_store(tmp_path)


def compared(tmp_path: Path, other: dict[str, str] | None, first: dict[str, str] | None = BASE) -> list[str]:
    a, b = (written(tmp_path / name, identity=own) for name, own in (("a", first), ("b", other)))
    return check_comparable(read_store(a).parts, read_store(b).parts)


@pytest.mark.parametrize("key", MODEL_KEYS)
def test_comparing_models_says_how_they_differ(tmp_path: Path, key: str) -> None:
    notes = compared(tmp_path, {**BASE, **CHANGES[key]})
    assert len(notes) == 1
    assert notes[0].startswith(f"the models differ in {key} (")


@pytest.mark.parametrize("key", [*RUN_KEYS, *TASK_KEYS])
def test_one_model_asked_in_another_way_is_not_compared(tmp_path: Path, key: str) -> None:
    with pytest.raises(MixedStoresError, match=f"asked in other ways, they differ in {key} \\("):
        compared(tmp_path, {**BASE, **CHANGES[key]})


def test_two_models_may_have_their_own_chat_templates(tmp_path: Path) -> None:
    notes = compared(tmp_path, {**BASE, "weights": "sha256:2", "chat_template": "c"})
    assert [note.split(" (")[0] for note in notes] == [
        "the models differ in weights",
        "the runs differ in chat_template",
    ]
    with pytest.raises(MixedStoresError, match="chat_template"):
        compared(tmp_path, {**BASE, "dtype": "float32", "chat_template": "c"})


def test_equal_and_unknown_identities(tmp_path: Path) -> None:
    assert compared(tmp_path, dict(BASE)) == []
    assert compared(tmp_path, None, None) == []
    assert "before stores had an identity" in compared(tmp_path, None)[0]


def test_only_tasks_that_both_have_need_one_prompt(tmp_path: Path) -> None:
    written(tmp_path / "a" / "x", "x", BASE)
    written(tmp_path / "a" / "y", "y", {**BASE, "num_fewshot": "5"})
    written(tmp_path / "b", "x", {**BASE, "weights": "sha256:2"})
    first, second = read_store(tmp_path / "a"), read_store(tmp_path / "b")
    assert len(check_comparable(first.parts, second.parts)) == 1
