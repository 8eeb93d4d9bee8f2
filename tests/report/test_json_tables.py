"""JSON: a tool's own contract, or every table by name."""

import json

import numpy as np

from lmeval_dispersion.report import Column, Document, Section, Table, render


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
