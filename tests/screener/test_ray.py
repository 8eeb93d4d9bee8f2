"""Screening over a real cluster of two nodes, and what is no case for one."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_checkpoint
from lmeval_screener import screen
from lmeval_screener.cli import main
from test_controls import LLAMA

from lmeval_dispersion.paths import data_folder

# As important as the tests themselves: Ray's workers would be starved on a machine that is busy.
RAY_SETTINGS = {"RAY_worker_niceness": "0"}

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None or importlib.util.find_spec("duckdb") is None,
    reason="the extras [ray] and [registry] are not installed",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Twelve checkpoints, two of them without a final norm and one with rows of half the bytes."""
    place = tmp_path_factory.mktemp("checkpoints")
    tokenizer = data_folder("demo") / "sums-00" / "tokenizer.json"
    rows = len(json.loads(tokenizer.read_text())["model"]["vocab"]) + 40
    for number in range(12):
        draw = np.random.default_rng(number)
        kind = "BF16" if number == 5 else "F32"
        tensors = {"lm_head.weight": (kind, draw.normal(size=(rows, 16)) + number / 10)}
        if number not in (3, 4):
            tensors["model.norm.weight"] = (kind, draw.uniform(0.5, 2, size=16))
        shutil.copy(tokenizer, write_checkpoint(place / f"model-{number:02d}", tensors, config=LLAMA))
    return place


@pytest.fixture(scope="module")
def cluster(folders):
    """What `ray_cluster` found; one cluster for all tests of this module."""
    script = Path(__file__).with_name("ray_cluster.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folders)],
        env=os.environ | RAY_SETTINGS, capture_output=True, text=True, timeout=570,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@needs_ray
@pytest.mark.slow
def test_a_cluster_reads_what_one_process_reads_though_a_node_dies(cluster, folders):
    found = cluster
    assert (found["nodes"], found["left"]) == (2, 1)
    alone = screen(names_of(folders))
    gaps = {c.repo: c.gaps["cosine"].mean for c in alone.checkpoints}
    names = sorted(gaps)
    assert found["told"] == [[place, gaps[name]] for place, name in enumerate(names)]
    for status, document, _ in (found["run-0"], found["run-1"]):
        assert status == 3
        ranks = [(c["repo"], c["rank"]) for c in document["checkpoints"]]
        assert ranks == [(c.repo, c.rank) for c in alone.checkpoints]
        assert [f["error"] for f in document["failed"]] == ["FolderNotFound"]
    assert "taken from" not in found["run-0"][2]
    assert "12 of 12 taken from" in found["run-1"][2]


@needs_ray
@pytest.mark.slow
def test_a_second_run_over_a_bucket_reads_nothing_on_the_cluster(cluster, folders):
    names = names_of(folders)[:3]
    gaps = [c.gaps["cosine"].mean for c in screen(names).checkpoints]
    for number, said in ((0, ""), (1, "3 of 3 taken from")):
        status, document, err = cluster[f"bucket-{number}"]
        assert status == 0, err
        assert [c["gap"]["cosine"]["mean"] for c in document["checkpoints"]] == gaps
        assert said in err
        assert bool(said) == ("taken from" in err)


def names_of(folders):
    return [str(place) for place in sorted(folders.glob("model-*"))]


def figures(document):
    """All that a document says of its checkpoints, but for what reading cost."""
    return [
        {name: value for name, value in one.items() if name not in ("bytes_read", "requests", "seconds")}
        for one in document["checkpoints"]
    ]


@needs_ray
@pytest.mark.slow
def test_controls_of_a_cluster_are_those_of_one_process_and_stay_in_the_registry(cluster, folders):
    names = names_of(folders)
    for run, some in (("controls-0", names[:8]), ("controls-1", names[:8]), ("controls-2", names)):
        status, document, said = cluster[run]
        assert status == 0, said
        alone = json.loads(json.dumps(screen(some, controls=True).to_dict()))
        assert figures(document) == figures(alone)
        assert document["control_warnings"] == alone["control_warnings"]
    first, second = cluster["controls-0"], cluster["controls-1"]
    parts = [one["controls"]["centred"]["mean"] for one in first[1]["checkpoints"]]
    assert len(set(parts)) == 8
    assert "taken from" not in first[2]
    assert "8 of 8 taken from" in second[2]
    # What the registry has is not read again: the third run read four, and their controls.
    import duckdb

    with duckdb.connect(str(folders / "c.duckdb"), read_only=True) as connection:
        for table in ("results", "controls"):
            runs = connection.execute(f"SELECT run, count(*) FROM {table} GROUP BY run ORDER BY run")
            assert [count for _, count in runs.fetchall()] == [8, 4]


@needs_ray
def test_on_the_hub_the_quota_is_the_limit_and_ray_does_not_start(capsys):
    assert main(["org/a", "org/b", str(data_folder("demo") / "sums-00"), "--engine", "ray"]) == 2
    assert "got 2 on the Hub: its quota is the limit there" in capsys.readouterr().err


def test_without_ray_a_sentence_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main([str(data_folder("demo") / "sums-00"), "--engine", "ray"]) == 1
    assert "pip install 'lmeval-dispersion[ray]'" in capsys.readouterr().err


@needs_ray
@pytest.mark.slow
def test_the_ray_script_of_a_short_list_evaluates_every_checkpoint(tmp_path):
    from lmeval_screener.shortlist.choice import shortlist
    from lmeval_screener.shortlist.emit import emit
    from test_shortlist import group, result_of

    result = result_of(*group(3))
    emit(tmp_path / "list", result, shortlist(result, 3), tasks=("gsm8k",), command="")
    runner = tmp_path / "lm_eval"
    runner.write_text('#!/bin/sh\necho "$3" >> ran\ncase "$3" in *-2.yaml) exit 1;; esac\n')
    runner.chmod(0o755)
    (tmp_path / "dispersion").write_text("#!/bin/sh\necho enabled: 1 task file\n")
    (tmp_path / "dispersion").chmod(0o755)
    # Somebody's cluster that ended: what Ray would join. Names of sockets have to be short.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as place:
        (Path(place) / "ray").mkdir()
        (Path(place) / "ray" / "ray_current_cluster").write_text("127.0.0.1:9")
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "GPUS": "0", "HOME": str(tmp_path), "RAY_TMPDIR": place}
        done = subprocess.run(
            [sys.executable, tmp_path / "list" / "ray_shards.py", "--limit", "1"],
            env=env | RAY_SETTINGS, capture_output=True, text=True, timeout=570,
        )  # fmt: skip
    assert (tmp_path / "list" / "ran").exists(), done.stderr[-3000:]
    ran = sorted((tmp_path / "list" / "ran").read_text().split())
    assert ran == [f"models/00{i}-org_7B-{i}.yaml" for i in (1, 2, 3)], done.stderr
    assert done.returncode == 1
    assert "not evaluated: shards [1]" in done.stderr
