"""A checkpoint without the figure that ranks: named in every output, without a rank; the others as before."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from lmeval_screener import screen

from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.racing.arguments import Which
from lmeval_dispersion.racing.lineup import Named, lineup

STEPS = ("sums-00", "sums-05", "sums-20")


@pytest.fixture
def siblings(tmp_path):
    """Three of the demo's checkpoints, and one more whose architecture no table has."""
    folder = tmp_path / "siblings"
    for name in STEPS:
        shutil.copytree(data_folder("demo") / name, folder / name)
    other = shutil.copytree(data_folder("demo") / "sums-30", folder / "aaa-remote")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "our_own"}))
    return folder


@pytest.fixture
def command(in_process):
    return partial(in_process, endpoint="http://127.0.0.1:9", offline=True)


def names(folder: Path) -> list[str]:
    return sorted(str(place) for place in folder.iterdir())


def test_result_keeps_the_order_and_lists_it_last(siblings):
    result = screen(names(siblings), domain="math")
    alone = screen([str(siblings / name) for name in STEPS], domain="math")
    (group,) = result.groups
    assert [c.label for c in group.placed] == [c.label for c in alone.groups[0].placed]
    (aside,) = group.set_aside
    content = result.to_dict()
    entry = content["checkpoints"][-1]
    assert entry["label"] == aside.label
    assert entry["rank"] is None
    assert entry["ratio"]["mean"] is None
    assert "our_own" in entry["ratio"]["reason"]
    assert result.rows()[-1]["rank"] is None
    page = result.to_html()
    assert "set aside, without a rank" in page
    assert result.exit_code == 0


def test_short_lists_and_races_leave_it_out_with_the_reason(siblings):
    result = screen(names(siblings), domain="math")
    for k in (1, 2, 9):
        chosen = result.shortlist(k, audit_sample=5)
        assert "aaa-remote" not in {Path(c.label).name for c in chosen.chosen}
    line = lineup(Named.of(result), "sums", Which(), api=False, count=lambda: (Counter(), 0))
    assert "aaa-remote" not in {Path(entry.label).name for entry in line.entries}
    assert any("aaa-remote" in note for note in line.notes)


def test_the_registry_and_its_news_say_so(siblings, tmp_path, command):
    registry = tmp_path / "registry.db"
    words = ("--domain", "math", "--registry", registry, "--since", "last")
    done = command(siblings, *words)
    assert "set aside, as it has no ratio" in " ".join(done.stdout.split())
    again = command(siblings, *words[:4], "--format", "json")  # of the registry
    rows = {Path(row["label"]).name: row["rank"] for row in json.loads(again.stdout)["checkpoints"]}
    assert rows["aaa-remote"] is None
    assert sorted(rank for rank in rows.values() if rank) == [1, 2, 3]


def test_a_gate_at_one_that_is_set_aside_cannot_be_judged(siblings, command):
    done = command(siblings, "--domain", "math", "--fail-if-below", siblings / "aaa-remote")
    assert done.returncode == 1
    assert "has no ratio" in done.stdout
    other = command(
        siblings, "--domain", "math", "--fail-if-below", siblings / "sums-00", "--format", "json"
    )
    gate = json.loads(other.stdout)["gate"]
    assert gate["not_compared"] == 1
    assert gate["compared"] == 2
