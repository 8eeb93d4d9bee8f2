"""Results in Python: a short repr, the contract, a page, a chart, frames of nullable types."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest

from lmeval_dispersion import audit, calibrate, compare, predict, rank, screen
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.report import Report

BEFORE, AFTER = (data_folder("demo_runs") / name for name in ("sums-20", "sums-30"))


@pytest.fixture(scope="module")
def results() -> dict[str, Report]:
    calibrator = calibrate(BEFORE, where="subject not in ('0x + 0x', '4x + 4x')")
    return {
        "screening": screen(demo=True),
        "audit": audit(BEFORE),
        "comparison": compare([BEFORE, AFTER]),
        "calibration": calibrator,
        "predictions": predict(replace(calibrator.calibrator, beats_trivial=True), BEFORE),
        "worst": rank(BEFORE, worst=3),
    }


@pytest.mark.parametrize(
    "name", ["screening", "audit", "comparison", "calibration", "predictions", "worst"]
)
def test_a_result_is_short_in_python_and_whole_in_every_form(results, name):
    result = results[name]
    assert len(repr(result)) < 1000
    assert result._repr_html_().startswith("<h3>")
    assert json.loads(json.dumps(result.to_dict())) == json.loads(result.document().contract())
    assert pickle.loads(pickle.dumps(result)).to_markdown() == result.to_markdown()
    frame = result.to_frame()
    assert len(frame) == len(result.document().rows)
    assert {str(kind) for kind in frame.dtypes} <= {"string", "Int64", "float64", "boolean"}


def test_a_screening_has_a_page_a_chart_and_what_was_read(results):
    screened = results["screening"]
    assert screened.to_html().startswith("<!DOCTYPE html>")
    assert "sums-80" in screened._repr_html_()
    assert "layer" in screened.plot()
    assert len(repr(screened.groups)) < 1000
    assert max(len(repr(c)) for c in screened.checkpoints) < 400
    kinds = screened.to_frame().dtypes
    assert [str(kinds[name]) for name in ("rank", "tied", "revision")] == [
        "Int64",
        "boolean",
        "string",
    ]
    tables = screened.document().tables()
    assert [row["label"] for row in tables["read"].rows] == [c.label for c in screened.checkpoints]
    assert [len(row["tokens"].split()) for row in tables["tokens"].rows] == [10, 58]
