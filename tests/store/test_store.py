"""The store: what is written comes back; what is not a whole store of one model and one run is refused."""

import json
import math
import multiprocessing
import os
import resource
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from safetensors import SafetensorError

from lmeval_dispersion.errors import (
    MixedStoresError,
    PartialStoreError,
    StoreError,
    StoreVersionError,
)
from lmeval_dispersion.geometry import dispersion
from lmeval_dispersion.store import COLUMNS, begin_store, read_store, write_store
from lmeval_dispersion.store.documents import document_columns
from lmeval_dispersion.store.identity import (
    MODEL_KEYS,
    RUN_KEYS,
    TASK_KEYS,
    model_notes,
    prompt_differences,
    shown_differences,
)

PAGE = Path(__file__).parents[2] / "docs/reference/store.md"


def vectors(n=30, d=16, seed=0):
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32) * 7


def stored(path, *, x=None, task="t", manifest=None, **columns):
    """Write a store of the layer ``last`` or of those that ``x`` names, with further columns."""
    layers = x if isinstance(x, dict) else {"last": vectors() if x is None else x}
    ids = np.arange(len(next(iter(layers.values()))))
    frame = pd.DataFrame({"doc_id": ids, "task": task}).assign(**columns)
    return write_store(path, documents=frame, vectors=layers, manifest=manifest or {})


def written(path, n=30, task="t", **manifest):
    """Write a store of the model ``m``."""
    return stored(
        path, x=vectors(n), task=task, manifest={"model": "m", "revision": "r", **manifest}
    )


def test_everything_comes_back(tmp_path):
    x = {"last": vectors(), "layer.1.attn": vectors(d=5, seed=1)}
    words = np.arange(30) * 0.5
    stored(
        tmp_path,
        x=x,
        manifest={"model": "m", "limit": 3},
        subject=["a", "b", "c"] * 10,
        correct=[1.0, 0.0, np.nan] * 10,
        logprobs=[[-1.5, -0.5], [], [-3.0]] * 10,
        target=["A", None, "B"] * 10,
        text=["é" * 600, None, "short"] * 10,
        words=words,
        mixed=[1, "two", None] * 10,
    )
    store = read_store(tmp_path)
    assert (store.default_layer, store.model, store.manifest["limit"]) == ("last", "m", 3)
    assert store.manifest["width"] == {"last": 16, "layer.1.attn": 5}
    documents = store.documents
    assert documents["doc_id"].tolist() == list(range(30))
    assert [list(v) for v in documents["logprobs"][:3]] == [[-1.5, -0.5], [], [-3.0]]
    assert documents["target"].isna().sum() == documents["mixed"].isna().sum() == 10
    assert documents["text"].str.len().max() == 500
    assert documents["words"].tolist() == words.tolist()
    assert documents["mixed"][:2].tolist() == ["1", "two"]
    assert documents[["query_perplexity", "category"]].isna().all(axis=None)
    for name, rows in x.items():
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        u = store.vectors(name)
        assert u.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(u, axis=1), 1, atol=1e-6)
        np.testing.assert_allclose(u, rows / lengths, atol=5e-4)
        np.testing.assert_allclose(store.norms(name), lengths[:, 0], rtol=1e-6)
        assert dispersion(u) == pytest.approx(dispersion(rows), rel=1e-4)


@pytest.mark.parametrize("spread", [1.0, 0.02])
def test_half_precision_costs_less_than_a_thousandth_of_the_dispersion(tmp_path, spread):
    x = 1.0 + spread * vectors(400, 64) / 7
    assert dispersion(read_store(stored(tmp_path, x=x)).vectors()) == pytest.approx(
        dispersion(x), rel=1e-3
    )


def test_rows_without_direction_are_kept_and_come_back_as_nan_and_no_rows_as_none(tmp_path):
    x = vectors()
    x[3], x[5, 2], x[7, 1] = 0, np.nan, np.inf
    store = read_store(stored(tmp_path / "some", x=x))
    assert np.flatnonzero(np.isnan(store.vectors()).any(axis=1)).tolist() == [3, 5, 7]
    assert store.norms()[3] == 0
    assert read_store(stored(tmp_path / "none", x=np.empty((0, 4)))).vectors().shape == (0, 4)


@pytest.mark.parametrize("name", ["manifest.json", "vectors.safetensors", "documents.parquet"])
def test_a_changed_byte_and_a_missing_file_are_noticed(tmp_path, name):
    file = written(tmp_path) / name
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    with pytest.raises(StoreError, match="manifest" if name == "manifest.json" else "checksum"):
        read_store(tmp_path).vectors()
    file.unlink()
    with pytest.raises(PartialStoreError, match="is partial"):
        read_store(tmp_path).vectors()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"format": "dispersion-store/2"}, StoreVersionError, "got 'dispersion-store/2'"),
        ({"format": None}, StoreError, "to be the manifest of a store, got another file"),
        (
            {"format": "dispersion-lab/1"},
            StoreError,
            "manifest of a store, got dispersion-lab/1",
        ),
        ({"complete": False}, PartialStoreError, "did not finish"),
        (
            {"n": "30"},
            StoreError,
            "is damaged .`n`: expected an integer of at least 0, got a string '30'",
        ),
        ({"n": -1}, StoreError, "is damaged .`n`"),
        ({"depth": "x"}, StoreError, "is damaged .`depth`"),
        ({"width": {"last": math.nan}}, StoreError, "is damaged .`width.last`"),
        ({"sha256": {"vectors.safetensors": 1}}, StoreError, "is damaged .`sha256.vectors"),
        ({"default_layer": "x"}, StoreError, "is damaged .`layers`"),
        ({"n": 31}, StoreError, "30 rows instead of 31"),
        ({"layers": []}, StoreError, "is damaged .`layers`"),
        ({"width": {"last": 17}}, StoreError, "in the shape \\[30, 17\\]"),
        ({"width": {"last": 2**31}}, StoreError, "in the shape \\[30, 2147483648\\]"),
        ("", StoreError, "manifest"),
        ("[" * 100_000, StoreError, "manifest"),
        ("[]", StoreError, "manifest"),
        ("\x00", StoreError, "manifest"),
    ],
)
def test_a_wrong_manifest_is_one_sentence(tmp_path, change, error, message):
    file = written(tmp_path) / "manifest.json"
    changed = (
        change if isinstance(change, str) else json.dumps(json.loads(file.read_text()) | change)
    )
    file.write_text(changed)
    with pytest.raises(error, match=message):
        read_store(tmp_path).vectors()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vectors": {"last": vectors(29)}}, "expected 30 vectors of layer 'last'"),
        ({"vectors": {}}, "at least one layer"),
        ({"documents": pd.DataFrame({"doc_id": range(30)})}, "column 'task'"),
        ({"manifest": {"default_layer": "x"}}, "default layer .* got 'x'"),
    ],
)
def test_the_writer_refuses_what_does_not_fit(tmp_path, change, message):
    documents = pd.DataFrame({"doc_id": range(30), "task": "t"})
    with pytest.raises(StoreError, match=message):
        write_store(
            tmp_path,
            **{"documents": documents, "vectors": {"last": vectors()}, "manifest": {}} | change,
        )
    assert list(tmp_path.iterdir()) == []


def test_stores_of_one_model_read_as_one(tmp_path):
    # As lm-eval's results hold them; two of one task are refused.
    run = tmp_path / "results" / "org__model" / "dispersion_2026-11-22T12-00-00"
    written(run / "b", 20, "b", tasks={"b": 2}, prompt_format="p")
    written(run / "a", 30, "a", tasks={"a": 1}, prompt_format="p")
    for folder in (run, run.parent, tmp_path / "results"):
        store = read_store(folder)
        assert store.documents["task"].tolist() == ["a"] * 30 + ["b"] * 20
    assert store.norms().shape == (50,)
    assert store.manifest["tasks"] == {"a": 1, "b": 2}
    assert (store.manifest["n"], store.manifest["prompt_format"]) == (50, "p")
    np.testing.assert_array_equal(store.vectors()[30:], read_store(run / "b").vectors())
    written(run / "c", task="b")
    with pytest.raises(MixedStoresError, match="task 'b' is in two stores"):
        read_store(run)
    with pytest.raises(StoreError, match="document 3 of task t twice"):
        read_store(stored(tmp_path / "double", doc_id=[3] * 30))


def test_other_peoples_folders_are_not_entered_and_what_holds_no_store_is_said(tmp_path):
    store = read_store(written(tmp_path / "a", task="a"))
    partial = written(tmp_path / "somebody" / "experiments" / "run", task="c")
    (partial / "manifest.json").unlink()
    (tmp_path / "website").mkdir()
    (tmp_path / "website" / "manifest.json").write_text('{"name": "an app"}')
    assert read_store(tmp_path).documents["task"].unique().tolist() == ["a"]
    with pytest.raises(StoreError, match="hold no store; name the folder of a run"):
        read_store(tmp_path / "somebody")
    (tmp_path / "results").mkdir()
    with pytest.raises(StoreError, match=r"resuls is not a folder; did you mean results\?"):
        read_store(tmp_path / "resuls")
    with pytest.raises(StoreError, match="is not a folder"):
        read_store(tmp_path / "absent")
    with pytest.raises(StoreError, match="no layer 'first'; name "):
        store.vectors("first")


def test_layers_in_common_are_kept(tmp_path):
    stored(tmp_path / "a", task="a", x={"x": vectors(), "last": vectors()})
    stored(tmp_path / "b", task="b")
    assert read_store(tmp_path).layers == ["last"]
    for x, message in (({"y": vectors()}, "share no layer"), (vectors(d=3), "different widths")):
        stored(tmp_path / "c", task="c", x=x)
        with pytest.raises(MixedStoresError, match=message):
            read_store(tmp_path)


def test_same_input_same_bytes(tmp_path):
    a, b = (written(tmp_path / name, created="2026-01-01T00:00:00+00:00") for name in "ab")
    for file in ("manifest.json", "vectors.safetensors", "documents.parquet"):
        assert (a / file).read_bytes() == (b / file).read_bytes()


BASE = {"weights": "sha256:1", "dtype": "bfloat16", "prompt_template": "p", "num_fewshot": "0"}


@pytest.mark.parametrize("key", ["model", "revision", *MODEL_KEYS, *RUN_KEYS])
def test_other_models_and_other_runs_are_not_merged(tmp_path, key):
    other = {key: "other"} if key in ("model", "revision") else {"identity": BASE | {key: "other"}}
    written(tmp_path / "a", task="a", identity=BASE)
    written(tmp_path / "b", task="b", **{"identity": BASE, **other})
    with pytest.raises(MixedStoresError, match=f"the stores in a and b differ in {key} \\("):
        read_store(tmp_path)


def test_tasks_of_one_run_may_be_asked_in_their_own_ways_and_older_stores_are_read_alone(tmp_path):
    written(tmp_path / "a", task="a", identity=BASE)
    written(tmp_path / "b", task="b", identity=BASE | {"num_fewshot": "5", "fewshot_seed": "1"})
    joint = read_store(tmp_path).manifest["identity"]
    assert (joint["weights"], joint["prompt_template"]) == ("sha256:1", "p")
    assert joint["num_fewshot"].startswith("several:")
    assert read_store(tmp_path / "a").manifest["identity"] == BASE
    for task in "cd":
        written(tmp_path / "old" / task, task=task)
    assert "identity" not in read_store(tmp_path / "old").manifest
    written(tmp_path / "c", task="c")
    with pytest.raises(
        MixedStoresError, match="was written by a version that did not record the weights"
    ):
        read_store(tmp_path)


def compared(tmp_path, **changes):
    """Notes on two stores' models, and the settings of their prompts that differ."""
    a = read_store(written(tmp_path / "a", identity=BASE, tasks={"t": 1})).parts
    b = read_store(written(tmp_path / "b", identity=BASE | changes, tasks={"t": 1})).parts
    notes = [note.split(" (")[0] for note in model_notes(a, b)]
    prompts, template = prompt_differences(a, b)
    return notes, list(prompts), list(template)


@pytest.mark.parametrize("key", [*MODEL_KEYS, *RUN_KEYS, *TASK_KEYS])
def test_models_are_compared_with_a_note_and_other_prompts_are_not(tmp_path, key):
    found = compared(tmp_path, **{key: "other"})
    if key in MODEL_KEYS:
        assert found == ([f"The models differ in {key}"], [], [])
    else:
        assert found == ([], [key], [])


def test_two_models_may_have_their_own_chat_templates(tmp_path):
    found = compared(tmp_path, weights="sha256:2", chat_template="c")
    assert found == (["The models differ in weights"], [], ["chat_template"])
    found = compared(tmp_path, dtype="float32", chat_template="c")
    assert found == (["The models differ in dtype"], ["chat_template"], [])


def test_only_tasks_that_both_have_need_one_prompt_and_unknown_identities_are_noted(tmp_path):
    assert compared(tmp_path) == ([], [], [])
    old = read_store(written(tmp_path / "old")).parts
    assert model_notes(old, old) == []
    assert "did not record the weights" in model_notes(read_store(tmp_path / "a").parts, old)[0]
    for task, shots in (("t", "0"), ("other", "5")):
        written(
            tmp_path / "two" / task,
            task=task,
            tasks={task: 1},
            identity=BASE | {"num_fewshot": shots},
        )
    changed = written(tmp_path / "b", tasks={"t": 1}, identity=BASE | {"weights": "sha256:2"})
    two = read_store(tmp_path / "two").parts
    assert len(model_notes(two, read_store(changed).parts)) == 1
    assert prompt_differences(two, read_store(changed).parts) == ({}, {})


def killed_writer(folder, step):
    """Write a newer store, and die before the rename or removal of this number."""
    left = step

    def hook(event, _):
        nonlocal left
        if event in ("os.rename", "os.remove"):
            left -= 1
            if left < 0:
                os._exit(7)

    sys.addaudithook(hook)
    written(folder, 20, created="new")


def test_a_writer_killed_at_any_moment_leaves_a_whole_store_or_a_partial_one(tmp_path):
    """A process dies before each of its renames and removals in turn; the reader sees old, new or refuses."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(
        ["pytest", "pandas", "pyarrow.parquet", "lmeval_dispersion.store"]
    )
    outcomes, codes = [], []
    while not codes or codes[-1]:
        folder = tmp_path / str(len(codes))
        written(folder, created="old")
        writer = processes.Process(target=killed_writer, args=(folder, len(codes)))
        writer.start()
        writer.join(60)
        codes.append(writer.exitcode)
        try:
            store = read_store(folder)
        except PartialStoreError:
            outcomes.append("partial")
        else:
            outcomes.append(store.manifest["created"])
            assert len(store.vectors()) == {"new": 20, "old": 30}[outcomes[-1]]
    assert set(codes[:-1]) == {7}
    assert len(codes) > 6
    assert (outcomes[0], outcomes[-1], set(outcomes)) == ("old", "new", {"old", "new", "partial"})


def test_a_full_disk_leaves_no_file_behind_and_a_store_that_is_partial(tmp_path):
    begin_store(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard))
    try:
        with pytest.raises((OSError, SafetensorError)):
            written(tmp_path, 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [file.name for file in tmp_path.iterdir()] == ["documents.parquet"]
    with pytest.raises(PartialStoreError, match="its run did not finish"):
        read_store(tmp_path)


def test_the_snippet_of_the_page_reads_a_store(tmp_path):
    """docs/reference/store.md promises that pandas and safetensors are enough."""
    stored(tmp_path, correct=[1.0, 0.0] * 15)
    names = {"folder": tmp_path}
    snippet = PAGE.read_text().split("```python\n")[1].split("```")[0]
    assert "lmeval_dispersion" not in snippet
    exec(snippet, names)
    assert names["dispersion"] == pytest.approx(dispersion(vectors()), rel=1e-4)
    assert names["accuracy"] == 0.5


def test_every_column_and_key_of_a_store_is_documented(tmp_path):
    written(tmp_path, tasks={}, num_fewshot=0, limit=None, chat_template=None, prompt_format="p")
    for name in [*COLUMNS, *json.loads((tmp_path / "manifest.json").read_text())]:
        assert f"`{name}`" in PAGE.read_text(), name


def test_a_documents_numbers_flags_and_short_texts_are_columns():
    """Not its long texts and lists, nor what has the name of a column of every store."""
    document = {
        "kind": "big",
        "level": 3,
        "hard": True,
        "question": "What is it? " * 9,
        "choices": ["a"],
    }
    document |= {"correct": 0.5, "target": "A", "segment": 1, "": None}
    given = document_columns(document, "p", ["A"], target="B", options=[], alias=None)
    plain = document_columns({}, "p", ["A"], target="B", options=[], alias=None)
    assert {name: given[name] for name in given.keys() - plain.keys()} == {
        "kind": "big",
        "level": 3,
        "hard": True,
    }
    assert given["target"] == "B"
    many = document_columns(
        {f"f{i}": i for i in range(99)}, "p", ["A"], target="", options=[], alias=None
    )
    assert len(many) < len(plain) + 99


def test_long_values_that_differ_at_their_end_are_shown_whole():
    half, brain = (f'{{"load_in_4bit": true, "compute": "{name}"}}' for name in ("f16", "bf16"))
    assert (
        shown_differences({"quantization": (half, brain)}) == f"quantization ({half} and {brain})"
    )
    assert "…" in shown_differences({"quantization": (half, "none")})
