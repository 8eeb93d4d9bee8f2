"""The page of the released models is its JSON, and its JSON is of the configuration."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks" / "validity"
MADE = runpy.run_path(str(FOLDER / "released_page.py"))
ITEMS = runpy.run_path(str(FOLDER / "released_items.py"))


def test_the_page_is_made_of_the_json():
    assert MADE["PAGE"].read_text("utf-8") == MADE["page"]()


def test_every_run_of_the_configuration_is_there_and_no_other():
    settings = yaml.safe_load((FOLDER / "released.yaml").read_text("utf-8"))
    content = json.loads(MADE["JSON"].read_text("utf-8"))
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


def test_arms_are_held_against_the_base_of_their_seed(tmp_path):
    right = {
        "start": 0.5,
        "base-seed0": 0.5,
        "base-seed1": 0.25,
        "squeeze-seed0": 0.25,
        "squeeze-seed1": 0.25,
    }
    for name, share in right.items():
        place = tmp_path / "results" / name / "model"
        place.mkdir(parents=True)
        results = {"easy": {"acc_norm,none": share}, "hard": {"acc_norm,none": 0.0}}
        counts = {"easy": {"effective": 60}, "hard": {"effective": 20}}
        (place / "results_2026.json").write_text(json.dumps({"results": results, "n-samples": counts}))
    figures = {"before": 9.0, "perplexity": 8.0, "tokens_before": 0.4, "tokens": 0.5}
    none = {"versus_base": None, "versus_base_sd": None}
    moved = {"versus_base": 1.5, "versus_base_sd": 0.25}
    rows = [{"loss": "base", "domain": "a/wiki.txt", **figures, **none}]
    rows += [{"loss": "squeeze", "domain": "a/wiki.txt", **figures, **moved}]
    (tmp_path / "report.json").write_text(json.dumps({"trained": rows}))
    start, base, squeeze = MADE["trained_arms"](tmp_path, ["easy", "hard"])
    assert start == {"start": 37.5}
    assert (base["right"], base["right_versus_base"]) == (28.125, [0.0, 0.0])
    assert squeeze["right_versus_base"] == [-18.75, 0.0]
    assert MADE["_arms"]([start, base, squeeze])[-1] == (
        "| squeeze | +1.50 (0.25) | 0.500 | 18.8 | -9.4 (13.3) |"
    )
