"""The results of the released models are of the configuration."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_every_run_of_the_configuration_is_there_and_no_other():
    settings = yaml.safe_load((ROOT / "benchmarks" / "validity" / "released.yaml").read_text("utf-8"))
    content = json.loads((ROOT / "docs" / "results" / "released.json").read_text("utf-8"))
    assert [run["name"] for run in content["runs"]] == list(settings["runs"])
    assert content["claims"] == settings["claims"]
    assert all(run["answers"] for run in content["runs"])
