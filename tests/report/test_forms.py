"""The forms for programs: CSV as pandas writes it, JSON as a contract or every table by name."""

import io
import json

import hypothesis.strategies as st
import numpy as np
import pandas as pd
import pytest
from hypothesis import given

from lmeval_dispersion.report import Column, Document, Section, Table, render

values = st.fixed_dictionaries(
    {
        "name": st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), min_size=1, max_size=12),
        "gap": st.floats(allow_infinity=False),
        "flag": st.booleans(),
        "count": st.integers(-(2**53), 2**53),
    }
)


@pytest.mark.filterwarnings(
    "ignore:invalid value encountered in cast:RuntimeWarning"
)  # pandas 2.0's own, on NaN
@given(st.lists(values, min_size=1, max_size=5))
def test_equal_to_pandas(rows):
    stream = io.StringIO()
    pd.DataFrame(rows).to_csv(stream, index=False, lineterminator="\n")
    assert render(Document("t", rows=rows), "csv") == stream.getvalue()


def test_what_is_not_there_is_empty_and_numpy_values_are_plain():
    rows = [{"a": None, "b": float("nan"), "c": np.float64(0.1), "d": pd.NA}, {"e": np.int64(3), "a": "x,y"}]
    assert render(Document("t", rows=rows), "csv") == 'a,b,c,d,e\n,,0.1,,\n"x,y",,,,3\n'


@pytest.mark.parametrize("sections", [[], [Section("s", [])]])
def test_a_report_without_rows_or_tables_is_empty(sections):
    assert render(Document("t", sections=sections), "csv") == "\n"


def test_without_rows_the_first_table_is_written():
    table = Table([{"a": 1, "b": 0.5, "se": 0.25}], [Column("a", "A"), Column("b", "B", error="se")], "c")
    document = Document("t", sections=[Section("s", [table, Table([], [Column("z", "Z")], "other")])])
    assert render(document, "csv") == "a,b,se\n1,0.5,0.25\n"


def test_a_contract_is_passed_on_as_it_is():
    assert render(Document("t", contract=lambda: '{"a": 1}\n'), "json") == '{"a": 1}\n'


def test_tables_by_name_with_null_for_what_is_undefined():
    rows = [{"a": np.float32(0.5), "b": float("nan"), "c": [1, float("inf")], "d": {"x": None}, "é": True}]
    tables = [Table(rows, [Column("a", "A")], "Same name"), Table([], [Column("a", "A")], "Same name")]
    document = Document("T", ["A."], [Section("s", tables)], ["L."], "cmd")
    text = render(document, "json")
    assert "é" in text
    assert json.loads(text) == {
        "schema": "dispersion-tables/1",
        "title": "T",
        "answer": ["A."],
        "limits": ["L."],
        "command": "cmd",
        "tables": {
            "same-name": {
                "caption": "Same name",
                "rows": [{"a": 0.5, "b": None, "c": [1, None], "d": {"x": None}, "é": True}],
            },
            "same-name-2": {"caption": "Same name", "rows": []},
        },
    }
