"""Screening over a real cluster of two nodes, and what is no case for one."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_checkpoint
from lmeval_screener import screen
from lmeval_screener.cli import main

from lmeval_dispersion.paths import data_folder

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None or importlib.util.find_spec("duckdb") is None,
    reason="the extras [ray] and [registry] are not installed",
)


@needs_ray
@pytest.mark.slow
def test_a_cluster_reads_what_one_process_reads_though_a_node_dies(tmp_path):
    tokenizer = data_folder("demo") / "sums-00" / "tokenizer.json"
    rows = len(json.loads(tokenizer.read_text())["model"]["vocab"]) + 40
    for number in range(12):
        matrix = np.random.default_rng(number).normal(size=(rows, 16))
        place = write_checkpoint(tmp_path / f"model-{number:02d}", {"lm_head.weight": ("F32", matrix)})
        shutil.copy(tokenizer, place)
    script = Path(__file__).with_name("ray_cluster.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["nodes"], found["left"]) == (2, 1)
    alone = screen([str(place) for place in sorted(tmp_path.glob("model-*"))])
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
    done = subprocess.run(
        [sys.executable, tmp_path / "list" / "ray_shards.py", "--limit", "1"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "GPUS": "0", "HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    ran = sorted((tmp_path / "list" / "ran").read_text().split())
    assert ran == [f"models/00{i}-org_7B-{i}.yaml" for i in (1, 2, 3)], done.stderr
    assert done.returncode == 1
    assert "not evaluated: shards [1]" in done.stderr


@needs_ray
def test_controls_are_refused_and_the_way_that_is_told_gives_them(tmp_path, capsys):
    folder, registry = str(data_folder("demo") / "sums-00"), ["--registry", str(tmp_path / "r.duckdb")]
    assert main([folder, "--engine", "ray", "--controls", *registry]) == 2
    assert "known only when all checkpoints are read" in capsys.readouterr().err
    # The cluster's run leaves the same registry as a process's own.
    assert main([folder, *registry]) == 0
    capsys.readouterr()
    assert main([folder, "--controls", "--format", "json", *registry]) == 0
    answer = capsys.readouterr()
    assert "1 of 1 taken from" in answer.err
    (one,) = json.loads(answer.out)["checkpoints"]
    assert one["controls"]["centred"]["mean"] > 0
