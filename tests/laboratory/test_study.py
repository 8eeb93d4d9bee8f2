"""Studies: work that is stopped anywhere goes on to the same bits, and a folder is taken for what it is."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.laboratory.study import Study, read_study

UNITS = 23


def worked(folder, stop_at=None, done=None):
    """A study whose units keep two arrays; stops in the middle of unit ``stop_at``."""
    study = Study.open(folder, "law", {"seed": 1})

    def do(unit):
        if unit == stop_at:
            raise KeyboardInterrupt
        if done is not None:
            done.append(unit)
        return {"square": np.array(unit**2), "rows": np.full(unit % 3, unit / 7)}

    return study, study.units("squares", UNITS, do)


def test_a_study_stopped_again_and_again_ends_like_one_that_was_not(tmp_path):
    _, expected = worked(tmp_path / "whole")
    done = []
    for stop in (0, 5, 6, 22):
        with pytest.raises(KeyboardInterrupt):
            worked(tmp_path / "stopped", stop, done)
    (tmp_path / "stopped" / "work" / "squares" / "22.part").write_bytes(b"PK")  # as a kill leaves it
    _, units = worked(tmp_path / "stopped", done=done)
    assert done == list(range(UNITS))  # each once
    assert units.stacked("square").tolist() == [unit**2 for unit in range(UNITS)]
    assert np.array_equal(units.joined("rows"), expected.joined("rows"))


def test_processes_share_what_is_not_done(tmp_path):
    """Two processes that list the files at the same time, as the barrier has it."""
    study, _ = worked(tmp_path / "r")
    for unit in (0, 3, 4):
        (tmp_path / "r" / "work" / "squares" / f"{unit}.npz").unlink()
    shares = []
    for index in (1, 0):
        study.processes.index, study.processes.count = index, 2
        shares.append([])
        waited = []
        study.processes.wait = lambda waited=waited, index=index: waited.append(index)
        study.units("squares", UNITS, lambda unit: shares[-1].append(unit) or {"square": np.array(0)})
        for unit in shares[-1]:
            if index:
                (tmp_path / "r" / "work" / "squares" / f"{unit}.npz").unlink()
        assert waited == [index, index]
    assert shares == [[3], [0, 4]]


def test_a_folder_with_something_else_is_refused(tmp_path):
    worked(tmp_path / "r")
    for name, file, content in (
        ("mine", "thesis.txt", "x"),
        ("store", "manifest.json", '{"format": "dispersion-store/1"}'),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(content)
    for name, analysis, seed, message in (
        ("r", "law", 2, r"other settings \(seed 1, now 2\); pass another folder="),
        ("r", "clusters", 1, "a study of law, not of clusters"),
        ("mine", "law", 1, "exists and holds no study"),
        ("store", "law", 1, "the folder of a study, got .*store, which holds none"),
    ):
        with pytest.raises(UsageError, match=message):
            Study.open(tmp_path / name, analysis, {"seed": seed})


def test_results_replace_the_work(tmp_path):
    study, _ = worked(tmp_path / "r")
    with pytest.raises(UsageError, match="not complete; give its command again"):
        read_study(tmp_path / "r")
    frame = pd.DataFrame({"a": [1.0, np.nan], "b": ["x", "y"]})
    study.finish({"points": frame}, model={"name": "m"})
    again = read_study(tmp_path / "r")
    pd.testing.assert_frame_equal(again.tables()["points"], frame)
    assert again.manifest["complete"]
    assert again.manifest["model"] == {"name": "m"}
    assert sorted(p.name for p in (tmp_path / "r").iterdir()) == ["manifest.json", "points.parquet"]
    assert Study.open(tmp_path / "r", "law", {"seed": 1}).manifest["complete"]
