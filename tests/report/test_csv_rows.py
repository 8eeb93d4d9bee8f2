"""CSV: byte for byte what pandas writes for the same rows."""

import io

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
@given(st.lists(values, min_size=1, max_size=5), st.sampled_from(["", "%.9g", "%.7g"]))
def test_equal_to_pandas(rows, float_format):
    stream = io.StringIO()
    pd.DataFrame(rows).to_csv(stream, index=False, float_format=float_format or None, lineterminator="\n")
    assert render(Document("t", rows=rows, float_format=float_format), "csv") == stream.getvalue()


def test_what_is_not_there_is_empty_and_numpy_values_are_plain():
    rows = [{"a": None, "b": float("nan"), "c": np.float64(0.1), "d": pd.NA}, {"e": np.int64(3), "a": "x,y"}]
    assert render(Document("t", rows=rows), "csv") == 'a,b,c,d,e\n,,0.1,,\n"x,y",,,,3\n'


def test_fields_are_the_header_also_without_rows():
    assert render(Document("t", fields=["a", "b"]), "csv") == "a,b\n"
    assert render(Document("t", fields=["b"], rows=[{"a": 1, "b": 2}]), "csv") == "b\n2\n"


@pytest.mark.parametrize("sections", [[], [Section("s", [])]])
def test_a_report_without_rows_or_tables_is_empty(sections):
    assert render(Document("t", sections=sections), "csv") == "\n"


def test_without_rows_the_first_table_is_written():
    table = Table([{"a": 1, "b": 0.5, "se": 0.25}], [Column("a", "A"), Column("b", "B", error="se")], "c")
    document = Document("t", sections=[Section("s", [table, Table([], [Column("z", "Z")], "other")])])
    assert render(document, "csv") == "a,b,se\n1,0.5,0.25\n"
