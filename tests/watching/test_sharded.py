"""A head that FSDP2 shards over two gloo processes: what is logged is what the unsharded run logs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lmeval_screener import screen
from processes import torchrun

from lmeval_dispersion.watching.report import read_records

HERE = Path(__file__).parent

pytestmark = [pytest.mark.slow]


def logs_of(folder, processes):
    folder.mkdir()
    done = torchrun(processes, HERE / "sharded_worker.py", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "logs.json").read_text())


def test_two_processes_log_what_one_logs(tmp_path):
    one, two = logs_of(tmp_path / "one", 1), logs_of(tmp_path / "two", 2)
    assert len(one) == len(two) == 2
    for whole, sharded in zip(one, two, strict=True):
        names = [name for name in whole if name.startswith("watch/")]
        assert len(names) == 5
        for name in names:
            assert sharded[name] == pytest.approx(whole[name], rel=1e-6, abs=1e-6), name
    assert abs(one[0]["watch/gap_math"] - one[1]["watch/gap_math"]) > 1e-5  # it trained
    records = read_records(tmp_path / "two" / "run")
    assert [record["step"] for record in records] == [1, 2]  # one of the processes writes
    checkpoint = tmp_path / "two" / "run" / "checkpoint-2"
    screened = screen([str(checkpoint)]).groups[0].checkpoints[0].gaps["cosine"]
    assert two[1]["watch/gap_math"] == pytest.approx(screened.mean, abs=1e-6)
