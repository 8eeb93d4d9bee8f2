"""The files of `screen-checkpoints --emit` run: stock lm_eval evaluates it, `dispersion verify` reads it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness_world import environment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def test_the_emitted_script_evaluates_what_has_no_results_and_can_be_verified(
    datasets_root: Path, tmp_path: Path
) -> None:
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    env = environment(
        PATH=path, HF_HOME=str(tmp_path / "hf"), HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1",
        XDG_CACHE_HOME=str(tmp_path / "cache"), PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'screener'}",
    )  # fmt: skip

    def run(*words: object, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(word) for word in words],
            env=env | more,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=250,
        )

    screen = [sys.executable, "-m", "lmeval_screener", "--demo", "--shortlist", "1", "--audit-sample", "1"]
    done = run(*screen, "--emit", "list", "--tasks", "arc_easy_dispersion")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
    # `datasets` takes "allenai/ai2_arc" for the folder of that name, where the script runs.
    shutil.copytree(datasets_root / "allenai" / "ai2_arc", tmp_path / "list" / "allenai" / "ai2_arc")
    # One of the two is there from an earlier run: it is left alone.
    configs = sorted((tmp_path / "list" / "models").glob("*.yaml"))
    earlier = tmp_path / "list" / "results" / configs[1].stem / "m"
    earlier.mkdir(parents=True)
    arguments = {"pretrained": done.stdout.splitlines()[1]}
    content = {"results": {"arc_easy_dispersion": {"acc,none": 0.25}}, "config": {"model_args": arguments}}
    (earlier / "results_1.json").write_text(json.dumps(content))
    done = run("bash", "list/run.sh", "--device", "cpu", "--limit", "4", "--batch_size", "4")
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{configs[0].stem}: evaluating" in done.stderr
    assert f"{configs[1].stem}: has results" in done.stderr
    (file,) = (tmp_path / "list" / "results" / configs[0].stem).rglob("results_*.json")
    results = json.loads(file.read_text())
    assert results["config"]["model_args"]["pretrained"].endswith("/sums-80")
    assert 0 <= results["results"]["arc_easy_dispersion"]["acc,none"] <= 1
    assert results["results"]["arc_easy_dispersion"]["dispersion,none"] > 0
    done = run(sys.executable, "-m", "lmeval_screener", "verify", "list", "list/results", "--format", "json")
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["answer"][0].startswith("Not enough results")
    assert [line["results"] for line in verdict["groups"]] == [2]
