"""Studies: work that is stopped anywhere goes on to the same bits, and a folder is taken for what it is."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pandas as pd
import pytest

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.laboratory.study import Study, read_study

UNITS = 23


def worked(folder, stop_at=None):
    """A study whose units write a row and add to a sum; stops in the middle of unit ``stop_at``."""
    study = Study.open(folder, "law", {"seed": 1})
    rows = study.rows("values", (UNITS,))
    sums = {"total": np.zeros(3, dtype=np.int64)}

    def do(unit):
        if unit == stop_at:
            rows[unit] = -1  # half done
            raise KeyboardInterrupt
        rows[unit] = unit**2
        sums["total"] += [1, unit, 7**unit % 1000]

    total = study.work("squares", UNITS, do, sums)["total"]
    return study, np.array(rows), total


def test_a_study_stopped_again_and_again_ends_like_one_that_was_not(tmp_path):
    _, expected, total = worked(tmp_path / "whole")
    for stop in (0, 5, 6, 22):
        with pytest.raises(KeyboardInterrupt):
            worked(tmp_path / "stopped", stop)
    _, rows, again = worked(tmp_path / "stopped")
    assert np.array_equal(rows, expected)
    assert np.array_equal(total, again)
    assert total.tolist() == [UNITS, sum(range(UNITS)), sum(7**u % 1000 for u in range(UNITS))]


def test_finished_units_are_not_done_again(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        worked(tmp_path / "r", 10)
    study = Study.open(tmp_path / "r", "law", {"seed": 1})
    again = []
    study.work("squares", UNITS, again.append)
    assert again == list(range(10, UNITS))


def test_a_stop_while_records_are_merged_counts_nothing_twice(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        worked(tmp_path / "r", 12)
    old = tmp_path / "r" / "work" / "squares.0.npz"
    shutil.copy(old, tmp_path / "kept.npz")
    with pytest.raises(KeyboardInterrupt):
        worked(tmp_path / "r", 12)
    # As if the process died after the base was written and before the old record was removed.
    shutil.copy(tmp_path / "kept.npz", tmp_path / "r" / "work" / "squares.7.npz")
    _, _, total = worked(tmp_path / "r")
    assert total[0] == UNITS


def test_a_folder_with_something_else_is_refused(tmp_path):
    worked(tmp_path / "r")
    with pytest.raises(UsageError, match=r"other settings \(seed 1, now 2\); pass another --run"):
        Study.open(tmp_path / "r", "law", {"seed": 2})
    with pytest.raises(UsageError, match="a study of law, not of clusters"):
        Study.open(tmp_path / "r", "clusters", {"seed": 1})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(UsageError, match="exists and holds no study"):
        Study.open(tmp_path / "mine", "law", {})
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "manifest.json").write_text(json.dumps({"format": "dispersion-store/1"}))
    with pytest.raises(UsageError, match="expected a study of format dispersion-lab/2"):
        Study.open(tmp_path / "store", "law", {})


def test_results_replace_the_work(tmp_path):
    study, _, _ = worked(tmp_path / "r")
    with pytest.raises(UsageError, match="not complete; give its command again"):
        read_study(tmp_path / "r")
    frame = pd.DataFrame({"a": [1.0, np.nan], "b": ["x", "y"]})
    study.finish({"points": frame}, model={"name": "m"})
    again = read_study(tmp_path / "r")
    pd.testing.assert_frame_equal(again.tables()["points"], frame)
    assert again.complete
    assert again.manifest["model"] == {"name": "m"}
    assert sorted(p.name for p in (tmp_path / "r").iterdir()) == ["manifest.json", "points.parquet"]
    assert Study.open(tmp_path / "r", "law", {"seed": 1}).complete
