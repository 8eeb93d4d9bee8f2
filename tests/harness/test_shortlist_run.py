"""The files of `screen-checkpoints --emit` run: stock lm_eval evaluates it, `dispersion verify` reads it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from harness_world import ARC, child

pytestmark = pytest.mark.slow


def test_the_emitted_script_evaluates_what_has_no_results_and_can_be_verified(
    in_world: Path, tmp_path: Path
) -> None:
    def run(*words: object) -> Any:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return child(*words, cwd=tmp_path, PATH=path, HF_HOME=str(tmp_path / "hf"), HF_HUB_OFFLINE="1")

    screen = (sys.executable, "-m", "lmeval_screener")
    chosen = ("--demo", "--shortlist", "1", "--audit-sample", "1", "--emit", "list", "--tasks", ARC)
    listed = run(*screen, *chosen).stdout.splitlines()
    assert len(listed) == 2
    # `datasets` takes "allenai/ai2_arc" for the folder of that name, where the script runs.
    shutil.copytree(in_world / "allenai/ai2_arc", tmp_path / "list/allenai/ai2_arc")
    # One of the two is there from an earlier run: it is left alone.
    first, second = (config.stem for config in sorted((tmp_path / "list/models").glob("*.yaml")))
    earlier = tmp_path / "list/results" / second / "m"
    earlier.mkdir(parents=True)
    content = {"results": {ARC: {"acc,none": 0.25}}, "config": {"model_args": {"pretrained": listed[1]}}}
    (earlier / "results_1.json").write_text(json.dumps(content))
    said = run("bash", "list/run.sh", "--device", "cpu", "--limit", "4", "--batch_size", "4").stderr
    assert f"{first}: evaluating" in said
    assert f"{second}: has results" in said
    (file,) = (tmp_path / "list/results" / first).rglob("results_*.json")
    results = json.loads(file.read_text())
    assert results["config"]["model_args"]["pretrained"].endswith("/sums-80")
    assert 0 <= results["results"][ARC]["acc,none"] <= 1
    assert results["results"][ARC]["dispersion,none"] > 0
    verdict = json.loads(run(*screen, "verify", "list", "list/results", "--format", "json").stdout)
    assert verdict["answer"][0].startswith("Not enough results")
    assert [line["results"] for line in verdict["groups"]] == [2]
