"""The store: what is written comes back, and whatever is not a whole store of one model is refused."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from safetensors import SafetensorError

from lmeval_dispersion.errors import MixedStoresError, PartialStoreError, StoreError, StoreVersionError
from lmeval_dispersion.geometry import dispersion
from lmeval_dispersion.store import COLUMNS, begin_store, read_store, write_store

ROOT = Path(__file__).parents[2]


def documents(n=30, task="t", **extra):
    frame = pd.DataFrame({"doc_id": np.arange(n), "task": task})
    for name, values in extra.items():
        frame[name] = values
    return frame


def vectors(n=30, d=16, seed=0):
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32) * 7


def written(path, n=30, task="t", **manifest):
    return write_store(
        path,
        documents=documents(n, task),
        vectors={"last": vectors(n)},
        manifest={"model": "m", "revision": "r", **manifest},
    )


def test_everything_comes_back(tmp_path):
    x = {"last": vectors(), "layer.1.attn": vectors(d=5, seed=1)}
    frame = documents(
        subject=["a", "b", "c"] * 10,
        correct=[1.0, 0.0, np.nan] * 10,
        logprobs=[[-1.5, -0.5], [], [-3.0]] * 10,
        target=["A", None, "B"] * 10,
        text=["é" * 600, None, "short"] * 10,
        words=np.arange(30) * 0.5,
    )
    write_store(tmp_path / "s", documents=frame, vectors=x, manifest={"model": "m", "limit": 3})
    store = read_store(tmp_path / "s")
    assert store.default_layer == "last"
    assert store.model == "m"
    assert store.manifest["limit"] == 3
    assert store.manifest["width"] == {"last": 16, "layer.1.attn": 5}
    assert store.documents["doc_id"].tolist() == list(range(30))
    assert [list(v) for v in store.documents["logprobs"][:3]] == [[-1.5, -0.5], [], [-3.0]]
    assert store.documents["target"].isna().sum() == 10
    assert store.documents["text"].str.len().max() == 500
    assert store.documents["words"].tolist() == frame["words"].tolist()
    assert store.documents["query_perplexity"].isna().all()
    assert store.documents["category"].isna().all()
    for name, rows in x.items():
        u = store.vectors(name)
        assert u.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(u, axis=1), 1, atol=1e-6)
        np.testing.assert_allclose(u, rows / np.linalg.norm(rows, axis=1, keepdims=True), atol=5e-4)
        np.testing.assert_allclose(store.norms(name), np.linalg.norm(rows, axis=1), rtol=1e-6)
        assert dispersion(u) == pytest.approx(dispersion(rows), rel=1e-4)


def test_a_further_column_of_mixed_types_is_kept_as_text(tmp_path):
    mixed = [1, "two", None] * 10
    write_store(tmp_path, documents=documents(note=mixed), vectors={"last": vectors()}, manifest={})
    found = read_store(tmp_path).documents["note"]
    assert found[:2].tolist() == ["1", "two"]
    assert found.isna().sum() == 10


@pytest.mark.parametrize("spread", [1.0, 0.1, 0.02])
def test_half_precision_costs_less_than_a_thousandth_of_the_dispersion(tmp_path, spread):
    rng = np.random.default_rng(3)
    x = rng.normal(size=64) + spread * rng.normal(size=(400, 64))
    write_store(tmp_path, documents=documents(400), vectors={"last": x}, manifest={})
    assert dispersion(read_store(tmp_path).vectors()) == pytest.approx(dispersion(x), rel=1e-3)


def test_rows_without_direction_are_kept_and_come_back_as_nan(tmp_path):
    x = vectors()
    x[3], x[5, 2], x[7, 1] = 0, np.nan, np.inf
    write_store(tmp_path, documents=documents(), vectors={"last": x}, manifest={})
    store = read_store(tmp_path)
    assert np.flatnonzero(np.isnan(store.vectors()).any(axis=1)).tolist() == [3, 5, 7]
    assert store.norms()[3] == 0


def test_a_store_without_documents_can_be_written_and_read(tmp_path):
    write_store(tmp_path, documents=documents(0), vectors={"last": np.empty((0, 4))}, manifest={})
    assert read_store(tmp_path).vectors().shape == (0, 4)


@pytest.mark.parametrize("name", ["manifest.json", "vectors.safetensors", "documents.parquet"])
def test_a_missing_file_makes_the_store_partial(tmp_path, name):
    written(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(PartialStoreError, match="is partial"):
        read_store(tmp_path).vectors()


@pytest.mark.parametrize("name", ["vectors.safetensors", "documents.parquet"])
def test_a_changed_byte_is_noticed(tmp_path, name):
    written(tmp_path)
    content = bytearray((tmp_path / name).read_bytes())
    content[-9] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StoreError, match="checksum"):
        read_store(tmp_path).vectors()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"format": "dispersion-store/2"}, StoreVersionError, "written as 'dispersion-store/2'"),
        ({"format": None}, StoreError, "not the manifest of a store"),
        (
            {"format": "dispersion-lab/1"},
            StoreError,
            "not the manifest of a store, it holds 'dispersion-lab/1'",
        ),
        ({"complete": False}, PartialStoreError, "did not finish"),
        ({"n": "30"}, StoreError, "usable `n`"),
        ({"n": 31}, StoreError, "30 rows instead of 31"),
        ({"layers": []}, StoreError, "usable `layers`"),
        ({"width": {"last": 17}}, StoreError, "expected \\[30, 17\\]"),
    ],
)
def test_a_wrong_manifest_is_one_sentence(tmp_path, change, error, message):
    written(tmp_path)
    file = tmp_path / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(error, match=message):
        read_store(tmp_path).vectors()


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]", "\x00"])
def test_a_manifest_that_is_no_json_object_is_a_store_error(tmp_path, text):
    written(tmp_path)
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(StoreError, match="manifest"):
        read_store(tmp_path)


def test_no_store_and_no_folder(tmp_path):
    with pytest.raises(StoreError, match="holds no store"):
        read_store(tmp_path)
    with pytest.raises(StoreError, match="is no folder"):
        read_store(tmp_path / "absent")
    assert read_store(written(tmp_path / "s")).default_layer == "last"
    with pytest.raises(StoreError, match="no layer 'first'; it has last"):
        read_store(tmp_path / "s").vectors("first")


def test_the_writer_refuses_what_does_not_fit(tmp_path):
    with pytest.raises(StoreError, match="expected 30 vectors of layer 'last', got shape"):
        write_store(tmp_path, documents=documents(), vectors={"last": vectors(29)}, manifest={})
    with pytest.raises(StoreError, match="at least one layer"):
        write_store(tmp_path, documents=documents(), vectors={}, manifest={})
    with pytest.raises(StoreError, match="column 'task'"):
        write_store(
            tmp_path, documents=documents().drop(columns="task"), vectors={"l": vectors()}, manifest={}
        )
    with pytest.raises(StoreError, match="default layer 'x'"):
        write_store(
            tmp_path, documents=documents(), vectors={"l": vectors()}, manifest={"default_layer": "x"}
        )
    assert list(tmp_path.iterdir()) == []


def test_stores_of_one_model_read_as_one(tmp_path):
    written(tmp_path / "run" / "b", 20, "b", tasks={"b": 2}, prompt_format="p")
    written(tmp_path / "run" / "a", 30, "a", tasks={"a": 1}, prompt_format="p")
    store = read_store(tmp_path / "run")
    assert store.documents["task"].tolist() == ["a"] * 30 + ["b"] * 20
    assert store.vectors().shape == (50, 16)
    assert store.norms().shape == (50,)
    assert store.manifest["tasks"] == {"a": 1, "b": 2}
    assert store.manifest["n"] == 50
    assert store.manifest["prompt_format"] == "p"
    np.testing.assert_array_equal(store.vectors()[30:], read_store(tmp_path / "run" / "b").vectors())


def test_one_task_twice_is_refused(tmp_path):
    written(tmp_path / "a")
    written(tmp_path / "b")
    with pytest.raises(MixedStoresError, match="task 't' is in"):
        read_store(tmp_path)
    frame = documents()
    frame.loc[4, "doc_id"] = 3
    write_store(tmp_path / "a", documents=frame, vectors={"last": vectors()}, manifest={})
    with pytest.raises(StoreError, match="document 3 of task t twice"):
        read_store(tmp_path / "a")


def test_other_peoples_folders_are_not_entered(tmp_path):
    written(tmp_path / "a", task="a")
    partial = written(tmp_path / "somebody" / "experiments" / "run", task="c")
    (partial / "manifest.json").unlink()
    (tmp_path / "website").mkdir()
    (tmp_path / "website" / "manifest.json").write_text('{"name": "an app"}')
    assert read_store(tmp_path).documents["task"].unique().tolist() == ["a"]
    with pytest.raises(StoreError, match="holds no store, nor does a sub-folder"):
        read_store(tmp_path / "somebody")


def test_a_results_folder_is_read_through_the_folder_of_its_run(tmp_path):
    for task in "ab":
        written(tmp_path / "results" / "org__model" / "dispersion_2026-11-22T12-00-00" / task, task=task)
    for folder in ("results", "results/org__model"):
        assert read_store(tmp_path / folder).documents["task"].unique().tolist() == ["a", "b"]


def test_layers_in_common_are_kept(tmp_path):
    for task, layers in (("a", ["x", "last"]), ("b", ["last"])):
        write_store(
            tmp_path / task,
            documents=documents(task=task),
            vectors={name: vectors() for name in layers},
            manifest={},
        )
    assert read_store(tmp_path).layers == ["last"]
    write_store(tmp_path / "c", documents=documents(task="c"), vectors={"y": vectors()}, manifest={})
    with pytest.raises(MixedStoresError, match="share no layer"):
        read_store(tmp_path)
    write_store(tmp_path / "c", documents=documents(task="c"), vectors={"last": vectors(d=3)}, manifest={})
    with pytest.raises(MixedStoresError, match="different widths"):
        read_store(tmp_path)


def test_same_input_same_bytes(tmp_path):
    for name in "ab":
        written(tmp_path / name, created="2026-01-01T00:00:00+00:00")
    for file in ("manifest.json", "vectors.safetensors", "documents.parquet"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


# One process forks for every step, so that each begins as a fresh one and only the first import is paid.
KILLED = """
import os, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from lmeval_dispersion.errors import PartialStoreError
from lmeval_dispersion.store import read_store
from test_store import written

def forked(run):
    child = os.fork()
    if not child:
        os._exit(run())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def old():
    for file in folder.iterdir():
        file.unlink()
    written(folder, created="old")
    return 0

def killed():
    left = step
    def hook(event, _):
        nonlocal left
        if event in ("os.rename", "os.remove"):
            left -= 1
            if left < 0:
                os._exit(7)
    sys.addaudithook(hook)
    written(folder, 20, created="new")
    return 0

def read():
    try:
        store = read_store(folder)
    except PartialStoreError:
        return 3
    return 0 if len(store.vectors()) == (20 if store.manifest["created"] == "new" else 30) else 4

folder = Path(sys.argv[1])
for step in range(40):
    assert forked(old) == 0
    code = forked(killed)
    print(code, forked(read))
    if code == 0:
        break
"""


def test_a_writer_killed_at_any_moment_leaves_a_whole_store_or_a_partial_one(tmp_path):
    """A process dies before each of its renames and removals in turn; the reader sees old, new or refuses."""
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(ROOT), str(ROOT / "tests/store")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    steps = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert steps[-1] == (0, 0)
    assert {code for code, _ in steps[:-1]} == {7}
    assert {outcome for _, outcome in steps} == {0, 3}
    assert len(steps) > 6


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
    x = vectors()
    write_store(
        tmp_path, documents=documents(correct=[1.0, 0.0] * 15), vectors={"last": x}, manifest={"model": "m"}
    )
    page = (ROOT / "docs" / "reference" / "store.md").read_text()
    names = {"folder": tmp_path}
    snippet = page.split("```python\n")[1].split("```")[0]
    assert "lmeval_dispersion" not in snippet
    exec(snippet, names)
    assert names["dispersion"] == pytest.approx(dispersion(x), rel=1e-4)
    assert names["accuracy"] == 0.5


def test_every_column_and_key_of_a_store_is_documented(tmp_path):
    written(tmp_path, tasks={}, num_fewshot=0, limit=None, chat_template=None, prompt_format="p")
    page = (ROOT / "docs" / "reference" / "store.md").read_text()
    for name in [*COLUMNS, *json.loads((tmp_path / "manifest.json").read_text())]:
        assert f"`{name}`" in page, name
