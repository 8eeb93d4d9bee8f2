"""A registry of screenings: the command against the loopback Hub, killed, repeated, side by side."""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing

import numpy as np
import pytest
from checkpoints import write_with_words
from hub_faults import status
from lmeval_screener.cli import main as screen_checkpoints
from lmeval_screener.screening.run import TIMEOUT
from safetensors.numpy import load_file, save_file

from benchmarks.shared import without_hub
from lmeval_dispersion.cli import main
from lmeval_dispersion.installation import data_folder


@pytest.fixture
def add(hub, tmp_path):
    """Serves a checkpoint that differs from all others: ``add(name, spread=1.0)``."""
    numbers = itertools.count()

    def serve(name, spread=1.0):
        number = next(numbers)
        return hub.add(name, write_with_words(tmp_path / "repos" / str(number), number, 1 / spread))

    return serve


@pytest.fixture
def start(hub, tmp_path):
    """Starts the command in a process of its own, each time with an empty cache."""
    begun = []

    def popen(*args):
        process = subprocess.Popen(
            [sys.executable, "-m", "lmeval_screener", *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=without_hub(HF_ENDPOINT=hub.endpoint, HF_HOME=str(tmp_path / f"hf-{len(begun)}")),
        )
        begun.append(process)
        return process

    yield popen
    for process in begun:
        process.kill()
        process.communicate()


@pytest.fixture
def run(night):
    """The commands in this process, each time with an empty cache; ``run("registry", …)`` asks."""
    return lambda *words: night.run(
        *words, main=main if words[0] == "registry" else screen_checkpoints
    )


@pytest.fixture
def registry(run):
    """``dispersion registry``."""
    return functools.partial(run, "registry")


def rows_of(store, statement):
    with closing(sqlite3.connect(store)) as connection:
        return connection.execute(statement).fetchall()


def kept(store):
    """Results so far, which a run may be adding to."""
    try:
        return rows_of(store, "SELECT count(*) FROM results")[0][0]
    except sqlite3.OperationalError:
        return 0  # it has no tables yet


def signalled(process, number, store, more_than=0):
    """Output of a command that got a signal once the registry held more results than so many."""
    deadline = time.monotonic() + 60
    while kept(store) <= more_than and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(number)
    return process.communicate(timeout=60)


def test_killed_twice_nothing_is_lost_or_doubled(hub, add, start, run, tmp_path):
    names = [f"org/model-{number:02d}" for number in range(24)]
    for number, name in enumerate(names):
        add(name, 1 + number / 24)
    store = tmp_path / "nightly.db"
    hub.latency = 0.05
    stored = set()
    for _ in range(2):
        first, before = len(hub.requests), len(stored)
        signalled(
            start(*names, "--registry", store, "--format", "json"), signal.SIGKILL, store, before
        )
        read = {r.path for r in hub.requests[first:] if r.part == "resolve"}
        # Nothing that an earlier, killed run had read is read again.
        assert not [path for path in read for name in stored if f"/{name}/" in path]
        assert run("registry", "query", store).returncode == 0
        stored = {row[0] for row in rows_of(store, "SELECT repo FROM results")}
        assert len(stored) > before
    hub.latency = 0.0
    done = run(*names, "--registry", store, "--format", "json")
    assert done.returncode == 0, done.stderr
    assert f"already had the results of {len(stored)} of 24 checkpoints" in done.stderr
    assert rows_of(store, "SELECT count(*), count(DISTINCT identity) FROM results") == [(24, 24)]
    assert rows_of(store, "PRAGMA integrity_check") == [("ok",)]
    fresh = json.loads(run(*names, "--format", "json").stdout)["checkpoints"]
    cost = ("bytes_read", "requests", "seconds")
    for one, other in zip(json.loads(done.stdout)["checkpoints"], fresh, strict=True):
        assert [key for key in one if one[key] != other[key] and key not in cost] == []


def test_only_what_is_new_or_changed_is_read(hub, add, run, tmp_path):
    for name in ("org/a", "org/b"):
        add(name)
    store = tmp_path / "s.db"
    assert run("org/a", "org/b", "--registry", store).returncode == 0
    first = len(hub.requests)
    again = run("org/a", "org/b", "--registry", store, "--format", "json")
    assert {r.part for r in hub.requests[first:]} <= {"api", "resolve"}
    assert "already had the results of 2 of 2 checkpoints" in again.stderr
    old = hub.repositories["org/a"].branches["main"]
    new = add("org/a", 3.0)
    add("org/c", 0.5)
    first = len(hub.requests)
    moved = json.loads(
        run("org/a", "org/b", "org/c", "--registry", store, "--format", "json").stdout
    )
    read = [r.path for r in hub.requests[first:] if r.part == "resolve"]
    assert [path for path in read if "/org/a/" in path]
    assert [path for path in read if "/org/c/" in path]
    assert not [path for path in read if "/org/b/" in path]
    assert {c["repo"]: c["revision"] for c in moved["checkpoints"]}["org/a"] == new != old
    # A commit that is known costs no request at all.
    first = len(hub.requests)
    assert run(f"org/a@{new}", f"org/a@{old}", "--registry", store).returncode == 0
    assert len(hub.requests) == first
    # Another token set is another measurement.
    first = len(hub.requests)
    assert run("org/b", "--registry", store, "--reference", "reference:nouns,verbs").returncode == 0
    assert [r for r in hub.requests[first:] if r.part == "resolve"]


def test_failures_are_kept_and_tried_again_by_kind(hub, add, run, registry, tmp_path, monkeypatch):
    monkeypatch.setenv(TIMEOUT, "4")
    for name in ("org/good", "org/broken", "org/busy"):
        add(name)
    broken = hub.repositories["org/broken"].commits[hub.repositories["org/broken"].branches["main"]]
    (broken / "model.safetensors").write_bytes(b"\xff" * 4096)
    hub.fault("cdn", status(503), match="*busy*")
    hub.fault("resolve", status(503), match="*busy*")
    store = tmp_path / "s.db"
    names = ("org/good", "org/broken", "org/busy", "org/none")
    first = json.loads(run(*names, "--registry", store, "--format", "json").stdout)["failed"]
    errors = {f["repo"]: f["error"] for f in first}
    assert errors["org/broken"] == "BadHeader"
    assert errors["org/none"] == "RepoNotFound"
    assert errors["org/busy"] in ("ServerError", "Timeout")
    hub.faults.clear()
    begin = len(hub.requests)
    second = run(*names, "--registry", store, "--format", "json")
    failed = {f["repo"]: f for f in json.loads(second.stdout)["failed"]}
    read = [r.path for r in hub.requests[begin:] if r.part == "resolve"]
    assert set(failed) == {"org/broken", "org/none"}
    assert failed["org/broken"] == next(f for f in first if f["repo"] == "org/broken")
    assert not [path for path in read if "broken" in path]
    assert [path for path in read if "busy" in path]
    # Another commit is another chance.
    add("org/broken")
    assert run(*names[:3], "--registry", store).returncode == 0
    shown = registry("show", store, "org/broken", "--format", "json")
    assert "BadHeader" in shown.stdout


def test_query_ranks_across_runs_and_diff_says_what_moved(hub, add, run, registry, tmp_path):
    store = tmp_path / "s.db"
    add("org/a", 2.0)
    add("org/b", 1.0)
    add("org/gone", 0.7)
    run("org/a", "--registry", store)
    run("org/b", "org/gone", "--registry", store)
    answer = json.loads(registry("query", store, "--format", "json").stdout)
    assert answer["answer"][0].startswith(
        "Evaluate first: org/a, org/b, org/gone (all 3, highest G first; math)."
    )
    assert answer["answer"][3].endswith("is stored; the order is by G alone.")
    assert answer["answer"][4].startswith("3 checkpoints in 1 group, by math")
    rows = answer["rows"]
    together = json.loads(run("org/a", "org/b", "org/gone", "--format", "json").stdout)[
        "checkpoints"
    ]
    assert [(row["checkpoint"], row["rank"], row["G"]) for row in rows] == [
        (c["repo"], c["rank"], c["gap"]["cosine"]["mean"]) for c in together
    ]
    (last,) = rows_of(store, "SELECT run FROM runs ORDER BY started DESC")[0]
    assert "no changes" in registry("diff", store, last).stdout.splitlines()[0]

    add("org/b", 4.0)  # the same repository, trained on
    add("org/best", 9.0)
    add("org/new", 0.5)
    del hub.repositories["org/gone"]
    assert (
        run("org/a", "org/b", "org/gone", "org/new", "org/best", "--registry", store).returncode
        == 3
    )
    document = json.loads(registry("diff", store, last, "--format", "json").stdout)
    assert {
        row["checkpoint"]: (row["what"], row["rank"], row["standing"]) for row in document["rows"]
    } == {
        "org/best": ("new", 1, "above"),
        "org/new": ("new", 4, "below"),
        "org/b": ("changed", 2, "above"),
        "org/gone": ("gone", None, None),
    }
    assert {row["chance"] for row in document["rows"]} == {None}  # by G no chance is known
    assert document["answer"][0] == (
        "Worth evaluating, above the former best: org/best (rank 1) and org/b (rank 2, changed)."
    )
    assert document["worth"] == ["org/best", "org/b"]
    assert document["answer"][-1].endswith(": 2 new, 1 changed, 1 gone.")
    best = registry("query", store, "--top", "1", "--format", "csv").stdout.splitlines()
    assert [line.split(",")[0] for line in best] == ["checkpoint", "org/best"]


def test_sql_is_read_only_and_shows_every_column(add, run, registry, tmp_path):
    store, other = tmp_path / "s.db", tmp_path / "other.txt"
    add("org/a")
    run("org/a", "--registry", store)
    for statement in (
        "DROP TABLE seen",
        "DELETE FROM seen",
        f"ATTACH '{other}' AS other",
        "no SQL",
    ):
        done = registry("query", store, statement)
        assert done.returncode == 2, statement
        assert "could not answer" in done.stderr
    assert not other.exists()
    assert rows_of(store, "SELECT count(*) FROM seen") == [(1,)]
    every = "SELECT * FROM checkpoints"
    (row,) = json.loads(registry("query", store, every, "--format", "json").stdout)["rows"]
    assert row["repo"] == "org/a"
    assert [*row].index("ratio") < [*row].index("gap_cosine")
    shown = registry("query", store, every).stdout
    assert [name for name in row if f" {name}" not in shown] == []
    assert "hf://org/a" in shown


def test_what_is_no_registry_is_refused_and_left_alone(run, registry, tmp_path):
    wrong = {
        "text": (b"no database, but a text", "expected a registry of screen-checkpoints"),
        "cut.db": (b"SQLite format 3\0" + bytes(50), "begin a new registry"),
    }
    for name, (content, sentence) in wrong.items():
        place = tmp_path / name
        place.write_bytes(content)
        assert registry("query", place).returncode in (1, 2)
        done = run(data_folder("demo") / "sums-00", "--registry", place)
        assert done.returncode in (1, 2)
        assert sentence in done.stderr
        assert place.read_bytes() == content
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as connection:
        connection.execute("CREATE TABLE runs (name)")
    assert "expected a registry of screen" in registry("query", tmp_path / "mlflow.db").stderr
    assert registry("query", tmp_path / "none.db").returncode == 2
    assert registry("query", tmp_path).returncode == 2


def test_a_deleted_folder_is_marked_and_does_not_rank(add, run, registry, tmp_path):
    for number in range(3):
        add(f"org/{number}", 1 + number)
    store, folders = tmp_path / "s.db", [tmp_path / "repos" / str(number) for number in range(3)]
    assert run(*folders, "--registry", store).returncode == 0
    shutil.rmtree(folders[1])
    for _ in range(2):  # before and after a run notices
        rows = json.loads(registry("query", store, "--format", "json").stdout)["rows"]
        found = {(row["checkpoint"], row["rank"], row["note"]) for row in rows}
        assert found == {("0", 2, None), ("1", None, "gone"), ("2", 1, None)}
        assert run(folders[0], folders[2], "--registry", store).returncode == 0
    (last,) = rows_of(store, "SELECT run FROM runs ORDER BY started")[0]
    moved = json.loads(registry("diff", store, last, "--format", "json").stdout)["rows"]
    assert [(row["what"], row["checkpoint"]) for row in moved] == [("gone", "1")]
    # By the label that was printed, by the path, and a label that several share.
    for name in ("1", str(folders[1]), f"repos/{1}"):
        assert "; it is gone (Gone)." in registry("show", store, name).stdout
    run(shutil.copytree(folders[0], tmp_path / "else" / "0"), "--registry", store)
    assert "matches 2 checkpoints" in registry("show", store, "0").stderr


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_an_interrupt_keeps_what_is_done_and_says_how_to_go_on(
    hub, add, start, run, tmp_path, number
):
    names = [f"org/model-{index:02d}" for index in range(30)]
    for name in names:
        add(name)
    hub.latency = 0.1
    store = tmp_path / "s.db"
    process = start(*names, "--registry", store, "--format", "json")
    out, err = signalled(process, number, store)
    assert process.returncode == 3, err
    assert "run the same command again to continue" in err
    document = json.loads(out)
    done = {row["repo"] for row in document["checkpoints"]}
    assert {row["error"] for row in document["failed"]} == {"Interrupted"}
    assert done
    assert len(done) + len(document["failed"]) == 30
    assert {row[0] for row in rows_of(store, "SELECT repo FROM results")} == done
    hub.latency = 0.0
    again = run(*names, "--registry", store)
    assert f"already had the results of {len(done)} of 30 checkpoints" in again.stderr


def adapter_of(base, folder):
    """An adapter of rank 2 on the output projection of ``base``."""
    rows = load_file(base / "model.safetensors")["lm_head.weight"].shape[0]
    tensors = {"A": np.ones((2, 16)), "B": np.random.default_rng(0).normal(size=(rows, 2))}
    folder.mkdir()
    save_file(
        {f"base_model.model.lm_head.lora_{x}.weight": m.astype("f4") for x, m in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["lm_head"]}
    (folder / "adapter_config.json").write_text(
        json.dumps(settings | {"base_model_name_or_path": str(base)})
    )
    return folder


@pytest.mark.parametrize("changed", ["the base of an adapter", "the tokenizer that was named"])
def test_a_checkpoint_is_read_again_when_what_it_rests_on_changed(run, tmp_path, changed):
    base = write_with_words(tmp_path / "base")
    if changed == "the base of an adapter":
        words, place = [adapter_of(base, tmp_path / "adapter")], base / "model.safetensors"
    else:
        place = (base / "tokenizer.json").rename(tmp_path / "tokenizer.json")
        words = [base, "--tokenizer", place]
    words += ["--registry", tmp_path / "s.db"]
    assert run(*words).returncode == 0
    assert "the results of 1 of 1 checkpoint" in run(*words).stderr
    if place.suffix == ".json":
        place.write_text(json.dumps(json.loads(place.read_text()), indent=1))
    else:
        os.utime(place, ns=(1, 1))
    read_again = run(*words)
    assert (read_again.returncode, "already had" in read_again.stderr) == (0, False)
    assert "the results of 1 of 1 checkpoint" in run(*words).stderr
