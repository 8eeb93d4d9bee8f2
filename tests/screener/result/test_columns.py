"""A checkpoint's columns are declared once: each form has what the list says, and a new one is in all."""

from __future__ import annotations

from pathlib import Path

import lmeval_screener.result.columns as columns
import pytest
from lmeval_screener import screen
from reference_pages import checkpoint_columns
from schemas import nested

from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.report import Col

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "screening.md"
TOY = columns.CheckpointColumn("tensor.bits", int, "a toy", lambda c, group: 16, shown=Col("Bits"))


def test_a_column_is_in_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    result = screen([str(data_folder("demo") / name) for name in ("sums-00", "sums-80")])
    monkeypatch.setattr(columns, "COLUMNS", (*columns.COLUMNS, TOY))
    assert [row["tensor_bits"] for row in result.rows()] == [16, 16]
    assert [c["tensor"]["bits"] for c in result.to_dict()["checkpoints"]] == [16, 16]
    assert "Bits" in [column.heading for column in result.tables()["read"].columns]
    assert nested(columns.COLUMNS)["tensor"]["bits"] is int
    (row,) = (row for row in checkpoint_columns() if "`tensor.bits`" in row[0])
    assert row[0].endswith(", `tensor.bits`")
    assert row[1].endswith(", `tensor_bits`")
    assert row[2].endswith("; a toy")


def test_the_page_has_todays_columns() -> None:
    table = PAGE.read_text("utf-8").partition("| JSON | CSV | content |\n|---|---|---|\n")[2]
    rows = [f"| {' | '.join(row)} |" for row in checkpoint_columns()]
    assert table.partition("\n\n")[0].splitlines() == rows
