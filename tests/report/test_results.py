"""Results in Python: a short repr, a notebook's view, Markdown, a page, a chart, frames of nullable types."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pandas as pd
import pytest

from lmeval_dispersion import audit, calibrate, compare_runs, predict, rank, screen
from lmeval_dispersion.report import (
    Chart,
    Column,
    Document,
    Note,
    Report,
    Section,
    Table,
    nullable,
    render,
)

RUN = Path(__file__).parent.parent.parent / "examples" / "mmlu_before"
TABLE = Table(
    [{"name": "<b>", "x": 1}, {"name": "c", "x": 2}], [Column("name", "Name"), Column("x", "X")], "T"
)


CHART = {"mark": {"type": "point"}, "data": {"values": [{"x": 1}]}}


class Found(Report):
    def document(self) -> Document:
        chart = Chart(CHART, "C", "d", name="curve")
        return Document(
            "Two <things>",
            answer=["First & best.", "long " * 100],
            sections=[
                Section("Rows", [TABLE, chart]),
                Section("Only a picture", [Chart(CHART, "D", "d")]),
                Section("Folded", [Note("Careful.")], details=True),
            ],
            limits=["No promise."],
            libraries=("numpy", "not-a-distribution"),
            guide="docs/explanation/reports.md",
        )


def test_a_repr_is_the_title_and_the_answer():
    lines = repr(Found()).splitlines()
    assert lines[:2] == ["<Found> Two <things>", "  First & best."]
    assert len(lines) == 3
    assert len(lines[2]) == 162
    assert lines[2].endswith("…")


def test_a_notebook_gets_text_and_tables_without_scripts_or_styles_of_the_page():
    text = Found()._repr_html_()
    tags = set(re.findall(r"<(\w+)", text))
    assert not {"script", "style", "html", "body", "button", "figure"} & tags
    assert {"table", "details", "h3"} <= tags
    assert text.count("<table") == text.count("</table")
    assert "Two &lt;things&gt;" in text
    assert "No promise." in text
    assert "Only a picture" not in text
    assert "<b>" not in text


def test_a_report_ends_with_what_made_it():
    text = Found().to_markdown()
    assert text == render(Found().document(), "markdown")
    end = text.rpartition("### How this was made")[2]
    assert re.search(r"^- How to read it: docs/explanation/reports.md$", end, re.M)
    assert re.search(r"^- Made with: lmeval-dispersion \S+, Python \d+\.\d+\.\d+, numpy \d\S*$", end, re.M)
    assert "not-a-distribution" not in end
    page = Found().to_html().rpartition("<footer")[2]
    assert "docs/explanation/reports.md" in page
    assert re.search(r"numpy \d", page)
    assert Found().to_html() == Found().to_html()


def test_frames_have_nullable_types_and_floats_stay():
    columns = {"i": [1, 2], "f": [1.0, float("nan")], "t": ["a", None], "b": [True, None], "n": [None, None]}
    frame = nullable(pd.DataFrame(columns))
    assert [str(kind) for kind in frame.dtypes] == ["Int64", "float64", "string", "boolean", "string"]
    assert frame["b"].isna().tolist() == [False, True]


# --- the results that there are ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def screened():
    return screen(demo=True)


def test_a_screening_is_short_and_complete(screened):
    assert len(repr(screened)) < 1000
    assert len(repr(screened.groups)) < 1000
    assert max(len(repr(c)) for c in screened.checkpoints) < 400
    assert screened.to_html().startswith("<!DOCTYPE html>")
    assert "sums-80" in screened._repr_html_()
    assert "layer" in screened.plot()
    kinds = {name: str(kind) for name, kind in screened.to_frame().dtypes.items()}
    assert set(kinds.values()) == {"string", "Int64", "float64", "boolean"}
    assert (kinds["rank"], kinds["tied"], kinds["revision"]) == ("Int64", "boolean", "string")


def test_what_was_read_is_a_table_of_the_report(screened):
    table = screened.document().tables()["read"]
    assert [row["label"] for row in table.rows] == [c.label for c in screened.checkpoints]
    tokens = screened.document().tables()["tokens"]
    assert [len(row["tokens"].split()) for row in tokens.rows] == [10, 78]


@pytest.fixture(scope="module")
def audited():
    return audit(RUN)


def test_the_audit_is_a_result_and_a_report(audited):
    assert json.loads(json.dumps(audited.to_dict()))["schema"] == "dispersion-audit/3"
    assert audited.to_dict() == json.loads(audited.document().contract())
    assert pickle.loads(pickle.dumps(audited)).to_markdown() == audited.to_markdown()
    assert len(repr(audited)) < 1000
    frame = audited.to_frame()
    assert {"string", "Int64", "float64"} >= {str(kind) for kind in frame.dtypes}
    assert len(frame) == len(audited.document().rows)


def test_a_comparison_a_calibrator_and_a_prediction():
    compared = compare_runs([RUN, RUN.parent / "mmlu_after"])
    assert compared.to_dict() == json.loads(compared.document().contract())
    calibrator = calibrate(RUN, where="subject not in ('anatomy', 'marketing')")
    predicted = predict(calibrator, RUN, force=True)
    assert {row.slice for row in predicted.slices} >= {"anatomy", "marketing"}
    assert predicted.to_dict() == json.loads(predicted.document().contract())
    ranked = rank(RUN, count=3).to_frame()
    assert ranked["contribution"].is_monotonic_increasing
    assert len(ranked) == compared.documents
    for found in (compared, calibrator, predicted):
        assert len(repr(found).splitlines()) < 6
        assert found._repr_html_().startswith("<h3>")
