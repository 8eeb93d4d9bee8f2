"""The results of the released models are of the configuration, and their items are well made."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "validity"
ITEMS = runpy.run_path(str(FOLDER / "released_items.py"))


def test_every_run_of_the_configuration_is_there_and_no_other():
    settings = yaml.safe_load((FOLDER / "released.yaml").read_text("utf-8"))
    content = json.loads((ROOT / "docs" / "results" / "released.json").read_text("utf-8"))
    assert [run["name"] for run in content["runs"]] == list(settings["runs"])
    assert content["claims"] == settings["claims"]
    assert all(run["answers"] for run in content["runs"])


def test_items_have_one_right_answer_which_follows_the_context():
    day = "The {} of them went to the market on the day {} before noon ."
    paragraphs = [" ".join(day.format(word, i) for word in "abcdefgh") for i in range(6)]
    text = "".join(f" = Title {n} = \n \n {p} \n" for n in range(3) for p in [*paragraphs])
    found = ITEMS["items"]([text])
    for item in found["easy"] + found["hard"]:
        assert len(set(item["choices"])) == 4
        right = item["choices"][item["label"]]
        assert not item["context"].endswith(right)
        assert any(f"{item['context']} {right}" in ITEMS["detokenized"](p) for p in paragraphs)
