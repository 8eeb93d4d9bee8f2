"""Declared reports: rows, charts and one template give every form; values are text, never markup."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.report import Chart, Col, Document, Note, Report, Table, Text, render
from lmeval_dispersion.report.cells import axis_of
from lmeval_dispersion.report.document import Column


@dataclass(frozen=True)
class Row:
    name: Annotated[str, Col("Name")]
    G: Annotated[float, Col("G", ".3f", error="G_se", dots="below", hint="higher is wider")]
    G_se: float
    note: Annotated[str | None, Col("Note", drop=1)] = None
    hidden: float = 0.5


@dataclass(frozen=True, repr=False)
class Ranked(Report):
    template = "declared.jinja"
    schema = "ranked/1"
    domain: str
    ranking: Sequence[Row]

    def tables(self) -> dict[str, Table]:
        return {"ranking": Table.of(self.ranking, "Ranking")}

    def charts(self) -> dict[str, Chart]:
        return {"ranking": Chart({"mark": "point"}, "G", "dots")} if self.ranking else {}


HIDDEN = "[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ue000-\ue003]+"
ROWS = [Row("a", 1.25, 0.01), Row("b", 1.0, 0.02), Row("c", 0.75, math.nan)]


def test_the_template_becomes_a_document():
    document = Ranked("math", ROWS).document()
    assert document.title == "Checkpoints for math"
    assert document.answer == ["Best: a.", "a, b and c 3 rows."]
    ranking, parts = document.sections
    assert (ranking.heading, ranking.name, ranking.details) == ("Ranking", "ranking", False)
    first, second, warning, table, chart = ranking.parts
    assert first == Text("First line, second line.")
    assert second == Text("Another paragraph.")
    assert warning == Note("Mind math.", "warning")
    assert [column.heading for column in table.columns] == ["Name", "G"]
    assert chart.caption == "G"
    assert (parts.heading, parts.details) == ("Parts", True)
    assert document.limits == ["It predicts nothing."]
    assert len(Ranked("math", ROWS[:1]).document().answer) == 1


def test_every_form_comes_from_it():
    result = Ranked("math", ROWS)
    document = result.document()
    content = json.loads(render(document, "json"))
    assert content["schema"] == "ranked/1"
    assert content["answer"] == document.answer
    assert content["ranking"][0] == {
        "name": "a",
        "G": 1.25,
        "G_se": 0.01,
        "note": None,
        "hidden": 0.5,
    }
    assert content["ranking"][2]["G_se"] is None
    assert render(document, "csv").splitlines()[:2] == [
        "name,G,G_se,note,hidden",
        "a,1.25,0.01,,0.5",
    ]
    assert "| a | 1.250 ± 0.010 |" in result.to_markdown()
    assert "<h3>Checkpoints for math</h3>" in result._repr_html_()
    assert list(result.to_frame().columns) == ["name", "G", "G_se", "note", "hidden"]
    assert result.plot()["mark"] == "point"
    with pytest.raises(UsageError, match="has none"):
        Ranked("math", []).plot()


def test_a_repr_is_the_title_and_an_answer_of_short_lines():
    title, first, _ = repr(Ranked("math", [Row("long " * 100, 1.0, 0.1), ROWS[0]])).splitlines()
    assert title == "<Ranked> Checkpoints for math"
    assert len(first) == 162
    assert first.endswith("…")


def test_a_terminal_shows_the_answer_and_no_details():
    document = Ranked("math", ROWS).document()
    short, whole = (
        render(document, "table", width=80, details=details) for details in (False, True)
    )
    assert short.splitlines()[0] == "Best: a."
    assert short.splitlines()[-1] == "More: --details, or -o page.html."
    assert "--details" not in whole
    for text in ("rows read: 3", "It predicts nothing."):
        assert (text in short, text in whole) == (False, True)


@pytest.mark.parametrize(("encoding", "dot"), [("utf-8", "●"), ("ascii", "o")])
def test_dots_stand_on_one_axis(encoding, dot):
    wide, narrow = (
        render(
            Ranked("math", ROWS).document(), "table", width=width, encoding=encoding
        ).splitlines()
        for width in (80, 24)
    )
    places = [
        line.index(dot) for line in wide if line.startswith(("a ", "b ", "c ")) and dot in line
    ]
    assert len(places) == 3
    assert places[0] - places[1] == pytest.approx(places[1] - places[2], abs=1)
    assert not any(dot in line for line in narrow if line.startswith(("b ", "c ")))


def test_an_axis_needs_spread_and_room():
    column = Column("x", "X", ".2f", dots="both", reach="r")
    for values, width in (([1.0], 20), ([1.0, 2.0], 5), ([None], 20)):
        assert axis_of([{"x": value} for value in values], column, width) is None
    axis = axis_of([{"x": 0.5, "r": 1.5}, {"x": 3}], column, 20)
    assert axis is not None
    assert (axis.low, axis.high, axis.heading) == (-1.0, 3.0, "-1.00           3.00")
    ends = Column("x", "X", ".2f", dots="both", reach="low high")
    assert (
        axis_of([{"x": 0.5, "low": -1.0, "high": 0.75}, {"x": 3.0, "low": None}], ends, 20) == axis
    )
    assert axis.drawn(3, 0, 0) == "     │             ●"
    assert axis.drawn(0.5, 1.5, 1.5) == "───────●───────     "
    # A row aside does not stretch it and is an arrow at its edge.
    rows = [{"x": 0.1, "r": 0.02}, {"x": 0.2, "r": 0.02}, {"x": 0.9, "r": 0.02, "aside": True}]
    axis = axis_of(rows, column, 20)
    assert axis.heading == "0.08            0.22"
    assert axis.drawn(0.9, 0.02, 0.02) == " " * 19 + "▸"
    assert axis.drawn(0.01, 0.02, 0.02) == "◂" + " " * 19
    signed = axis_of(rows[:2], Column("x", "X", "+.4f", dots="both", reach="r"), 12)
    assert signed.heading == "0    +0.2200"
    assert signed.drawn(0.2, 0.0, 0.0).startswith("│")


@given(st.text(min_size=1, max_size=30))
@example(" # a")
def test_values_are_text(text):
    document = Ranked(text, [Row(text, 1.0, 0.1), Row("other", 2.0, 0.1)]).document()
    assert isinstance(document, Document)
    assert len(document.answer) == 2
    assert [section.heading for section in document.sections] == ["Ranking", "Parts"]
    assert document.title == f"Checkpoints for {re.sub(HIDDEN, ' ', text)}".strip()


def test_a_result_has_length_items_names_and_files(tmp_path):
    result = Ranked("math", ROWS)
    assert len(result) == len(list(result)) == len(ROWS)
    assert result["b"] == result[1] == result.rows()[1]
    assert "b" in result
    assert "z" not in result
    with pytest.raises(LookupError, match="expected a name such as a, b, c, got 'z'"):
        result["z"]
    empty = Ranked("math", [])
    assert bool(empty)
    assert len(empty) == 0
    for suffix, form in (
        (".md", "markdown"),
        (".json", "json"),
        (".csv", "csv"),
        (".txt", "table"),
    ):
        result.save(tmp_path / f"x{suffix}")
        assert (tmp_path / f"x{suffix}").read_text("utf-8") == render(result.document(), form)
    with pytest.raises(UsageError, match="suffix"):
        result.save(tmp_path / "x.xlsx")
    pytest.importorskip("vl_convert")
    result.save(tmp_path / "x.pdf")
    assert (tmp_path / "x.pdf").read_bytes().startswith(b"%PDF")
