"""How values are written, the same in every format for readers."""

import numpy as np
import pandas as pd
import pytest

from lmeval_dispersion.report import Column, Table
from lmeval_dispersion.report.cells import cell, is_numeric, shown


@pytest.mark.parametrize(
    ("value", "spec", "text"),
    [
        ("x", "", "x"),
        (0.000123456, "", "0.0001235"),
        (1234, "", "1234"),
        (-1.5, ".2f", "-1.50"),
        (3.0, "d", "3"),
        (0.25, ".1%", "25.0%"),
        (True, "", "yes"),
        (["a/b", "c"], "", "a/b, c"),
        (None, ".3f", ""),
        (pd.NA, "d", ""),
        (pd.NaT, "", ""),
        (float("nan"), ".3f", "undefined"),
        (float("inf"), "d", "inf"),
        (np.float32(0.5), "", "0.5"),
        (np.int64(7), "d", "7"),
        (0, "bytes", "0 B"),
        (999, "bytes", "999 B"),
        (802_344, "bytes", "802 kB"),
        (1_310_000, "bytes", "1.31 MB"),
        (4.2e12, "bytes", "4.2e+03 GB"),
        (0.0009, "p-value", "< 0.001"),
        (0.03, "p-value", "0.030"),
        (float("nan"), "p-value", "undefined"),
    ],
)
def test_values(value, spec, text):
    assert shown(value, spec) == text


def test_an_error_stands_beside_a_number_only():
    column = Column("gap", "Gap", ".2f", error="se")
    assert cell({"gap": 1.0, "se": 0.5}, column) == "1.00 ± 0.50"
    assert cell({"gap": 1.0, "se": float("nan")}, column) == "1.00"
    assert cell({"gap": float("nan"), "se": 0.5}, column) == "undefined"
    assert cell({}, column) == ""


def test_columns_of_numbers():
    rows = [{"a": 1, "b": "1", "c": None, "d": True, "e": float("nan"), "f": 1}, {"a": None, "f": "x"}]
    columns = {key: Column(key, key) for key in "abcdef"}
    table = Table(rows, list(columns.values()), "c")
    assert [key for key, column in columns.items() if is_numeric(table, column)] == ["a"]
