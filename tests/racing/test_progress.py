"""What a race says while it runs: on a terminal a bar whose total falls, in a log a line now and then."""

from __future__ import annotations

import numpy as np
import pytest

from lmeval_dispersion import output
from lmeval_dispersion.racing.contest import Contest, Scores
from lmeval_dispersion.racing.folder import progress


def test_the_total_falls_with_each_that_is_dropped() -> None:
    contest, right = Contest(400), np.ones(400)
    contest.add("a", Scores(right, right))
    assert progress(contest, 3, "b") == (
        400,
        1200,
        "b at 0 of 400 questions, 2 of 3 checkpoints, best a",
    )
    contest.add("b", Scores(right[:50] - 1, right[:50]))
    assert contest.standing["b"] == "not better"
    assert progress(contest, 3, "c") == (
        450, 850, "c at 0 of 400 questions, 3 of 3 checkpoints, 1 dropped, last b, best a",
    )  # fmt: skip
    contest.fail("c")
    assert progress(contest, 3, "c")[:2] == (450, 450)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    return now


def test_a_log_has_a_line_at_most_each_half_minute(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with output.progress_bar(every=30.0) as update:
        for at, done, total in ((5, 1000, 9000), (20, 1025, 9000), (31, 1300, 9000), (45, 1325, 9000),
                                (61, 1400, 5000), (200, 1400, 5000)):  # fmt: skip
            clock[0] = at
            update(done, total, f"b at {done}")
    assert capsys.readouterr().err.splitlines() == [
        "b at 1300; 14%, at this pace 3 min left",
        "b at 1400; 28%, at this pace 18 min left",
    ]


@pytest.mark.parametrize(("hidden", "every"), [(True, 30.0), (False, None)])
def test_a_quiet_command_and_a_short_one_have_no_lines(
    hidden: bool, every: float | None, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with output.progress_bar(hidden=hidden, every=every) as update:
        clock[0] = 1000
        update(50, 100, "b")
    assert capsys.readouterr().err == ""
