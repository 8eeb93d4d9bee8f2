"""One report as a terminal, Markdown, a notebook, CSV and JSON show it."""

import io
import json
import re
from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from markdown_it import MarkdownIt

from lmeval_dispersion.report import (
    Chart,
    Column,
    Document,
    Facts,
    Note,
    Section,
    Table,
    Text,
    render,
)
from lmeval_dispersion.report.cells import cell, guarded, is_numeric, shown, unguarded
from lmeval_dispersion.report.declared import nullable
from lmeval_dispersion.report.html_page import html_fragment
from lmeval_dispersion.report.terminal import spelled

COLUMNS = [
    Column("name", "Checkpoint"),
    Column("gap", "Gap", ".3f", error="se", hint="Larger is better."),
    Column("accuracy", "Accuracy", ".3f", short="Acc.", drop=1),
    Column("tied", "Tied", hint="Not separated.", drop=2),
    Column("cost", "Bytes read", "bytes", short="Read", drop=3),
]
ROWS = [
    {"name": "org/a", "gap": 1.25, "se": 0.021, "accuracy": 0.5, "tied": "2, 3", "cost": 802_344},
    {
        "name": "org/[bold]b[/] | c\nd",
        "gap": -0.125,
        "se": None,
        "accuracy": None,
        "tied": "",
        "cost": 0,
    },
]


def undrawn() -> None:
    raise AssertionError("only pages draw charts")


def document(rows=ROWS, columns=COLUMNS):
    table = Table(rows, columns, "Ranking", more="38 more.")
    return Document(
        "Checkpoints",
        answer=["Best: `org/a`.", "Second."],
        sections=[
            Section("Table", [table, Table(rows, columns, "Again"), Text("Word " * 40)]),
            Section("Only a picture", [Chart(undrawn, "c", "d")]),
            Section("Notes", [Note("Two\n\nparts")]),
            Section("Read <b>", [Facts({"Requests": 31})], details=True),
        ],
        limits=["No accuracy follows."],
        command="screen-checkpoints ```a",
        libraries=("numpy", "not-a-distribution"),
        guide="docs/reference/reports.md",
    )


# --- values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "spec", "text"),
    [
        ("x", "", "x"),
        (0.000123456, "", "0.0001235"),
        (1234, "", "1234"),
        (-1.5, ".2f", "-1.50"),
        (-0.001, ".2f", "0.00"),
        (-0.001, "+.2f", "+0.00"),
        (-0.0001, ".1%", "0.0%"),
        (-0.0001, "+.1%", "+0.0%"),
        (3.0, "d", "3"),
        (0.25, ".1%", "25.0%"),
        (True, "", "yes"),
        (["a/b", "c"], "", "a/b, c"),
        (None, ".3f", ""),
        (pd.NA, "d", ""),
        (float("nan"), ".3f", "undefined"),
        (float("inf"), "d", "inf"),
        (np.float32(0.5), "", "0.5"),
        (np.int64(7), "d", "7"),
        (999, "bytes", "999 B"),
        (1_310_000, "bytes", "1.31 MB"),
        (4.2e12, "bytes", "4.2e+03 GB"),
        (0.0009, "p-value", "< 0.001"),
        (0.03, "p-value", "0.030"),
    ],
)
def test_values(value, spec, text):
    assert shown(value, spec) == text


def test_an_error_stands_beside_a_number_only():
    column = Column("gap", "Gap", ".2f", error="se")
    cells = {
        "1.00 ± 0.50": (1.0, 0.5),
        "1.00": (1.0, float("nan")),
        "undefined": (float("nan"), 0.5),
    }
    assert [cell({"gap": gap, "se": se}, column) for gap, se in cells.values()] == list(cells)
    assert cell({}, column) == ""


def test_columns_of_numbers():
    rows = [
        {"a": 1, "b": "1", "c": None, "d": True, "e": float("nan"), "f": 1},
        {"a": None, "f": "x"},
    ]
    columns = {key: Column(key, key) for key in "abcdef"}
    table = Table(rows, list(columns.values()), "c")
    assert [key for key, column in columns.items() if is_numeric(table, column)] == ["a"]


# --- for programs ---------------------------------------------------------------------------------------

values = st.fixed_dictionaries(
    {
        "name": st.text(
            st.characters(codec="utf-8", exclude_characters="\r\0"), min_size=1, max_size=12
        ),
        "gap": st.floats(allow_infinity=False),
        "flag": st.booleans(),
        "count": st.integers(-(2**53), 2**53),
    }
)


@pytest.mark.filterwarnings(
    "ignore:invalid value encountered in cast:RuntimeWarning"
)  # pandas 2.0's own, on NaN
@given(st.lists(values, min_size=1, max_size=5))
def test_csv_equals_that_of_pandas(rows):
    stream = io.StringIO()
    named = [row | {"name": guarded(row["name"])} for row in rows]
    pd.DataFrame(named).to_csv(stream, index=False, lineterminator="\n")
    assert render(Document("t", rows=rows), "csv") == stream.getvalue()


@given(st.text(min_size=1, max_size=12))
def test_a_text_that_a_spreadsheet_would_run_is_guarded_and_read_back(text):
    assert guarded(text)[0] not in "=+-@\t\r\n"
    assert unguarded(guarded(text)) == text


def test_formulas_of_csv_are_texts_and_numbers_stay_numbers():
    rows = [{"=head": "=cmd|' /C calc'!A0", "text": ["-a", "b"], "number": -1.5, "ranks": (-1, 2)}]
    expected = "'=head,text,number,ranks\n'=cmd|' /C calc'!A0,'-a b,-1.5,-1 2\n"
    assert render(Document("t", rows=rows), "csv") == expected


def test_csv_of_holes_of_a_table_and_of_nothing():
    rows = [
        {"a": None, "b": float("nan"), "c": np.float64(0.1), "d": pd.NA},
        {"e": np.int64(3), "a": "x,y"},
    ]
    assert render(Document("t", rows=rows), "csv") == 'a,b,c,d,e\n,,0.1,,\n"x,y",,,,3\n'
    table = Table(
        [{"a": 1, "b": 0.5, "se": 0.25}], [Column("a", "A"), Column("b", "B", error="se")], "c"
    )
    first = Section("s", [table, Table([], [Column("z", "Z")], "other")])
    assert render(Document("t", sections=[first]), "csv") == "a,b,se\n1,0.5,0.25\n"
    assert render(Document("t", sections=[Section("s", [])]), "csv") == "\n"


def test_frames_have_nullable_types_and_floats_stay():
    columns = {
        "i": [1, 2],
        "f": [1.0, float("nan")],
        "t": ["a", None],
        "b": [True, None],
        "n": [None, None],
    }
    frame = nullable(pd.DataFrame(columns))
    assert [str(kind) for kind in frame.dtypes] == [
        "Int64",
        "float64",
        "string",
        "boolean",
        "string",
    ]
    assert frame["b"].isna().tolist() == [False, True]


def test_json_is_the_contract_or_tables_by_name_with_null_for_what_is_undefined():
    assert render(Document("t", contract=lambda: '{"a": 1}\n'), "json") == '{"a": 1}\n'
    rows = [
        {
            "a": np.float32(0.5),
            "b": float("nan"),
            "c": [1, float("inf")],
            "d": {"x": None},
            "é": True,
        }
    ]
    tables = [
        Table(rows, [Column("a", "A")], "Same name"),
        Table([], [Column("a", "A")], "Same name"),
    ]
    text = render(Document("T", ["A."], [Section("s", tables)], ["L."], "cmd"), "json")
    assert "é" in text
    plain = [{"a": 0.5, "b": None, "c": [1, None], "d": {"x": None}, "é": True}]
    assert json.loads(text) == {
        "schema": "dispersion-tables/1",
        "title": "T",
        "answer": ["A."],
        "limits": ["L."],
        "command": "cmd",
        "tables": {
            "same-name": {"caption": "Same name", "rows": plain},
            "same-name-2": {"caption": "Same name", "rows": []},
        },
    }


# --- Markdown and notebooks -----------------------------------------------------------------------------


def test_a_name_that_looks_like_html_stays_text_in_markdown():
    text = render(
        replace(document(), answer=["Best: <img src=x onerror=a()>.", "p < 0.01"]), "markdown"
    )
    assert "Best: &lt;img src=x" in text
    assert "p < 0.01" in text


def test_markdown_is_read_back_by_a_parser():
    text = render(document(columns=COLUMNS[:2]), "markdown")
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    cells = [
        token.content for before, token in pairwise(tokens) if before.type in ("td_open", "th_open")
    ]
    assert cells[:4] == ["Checkpoint", "Gap", "org/a", "1.250 ± 0.021"]
    assert cells[4].endswith("| c d")
    (fence,) = [token.content for token in tokens if token.type == "fence"]
    assert fence == "screen-checkpoints ```a\n"
    assert text.startswith("## Checkpoints\n\n**Best: `org/a`.**\n\nSecond.\n")
    assert text.count("Larger is better.") == 1
    assert "Only a picture" not in text
    assert "<details><summary>Read &lt;b></summary>" in text
    assert "> **Note:** Two\n> \n> parts" in text
    assert "- No accuracy follows." in text
    end = text.rpartition("### How this was made")[2]
    assert re.search(
        r"^- How to read it: https://lmeval-dispersion\S+/reference/reports/$", end, re.M
    )
    assert re.search(
        r"^- Made with: lmeval-dispersion \S+, Python \d+\.\d+\.\d+, numpy \d\S*$", end, re.M
    )


def test_a_notebook_gets_text_and_tables_without_scripts_styles_or_charts():
    text = html_fragment(document())
    tags = set(re.findall(r"<(\w+)", text))
    assert not {"script", "style", "html", "body", "button", "figure", "b"} & tags
    assert {"table", "details", "h3"} <= tags
    assert text.count("<table") == text.count("</table")
    assert "Read &lt;b&gt;" in text
    assert "No accuracy follows." in text
    assert "Only a picture" not in text


def test_a_table_without_a_caption_has_no_empty_line_in_bold():
    bare = Document("Title", sections=[Section("One", [Table(ROWS, COLUMNS, "", "ranks")])])
    assert "****" not in render(bare, "markdown")
    page = render(bare, "html")
    assert "<caption" not in page
    assert 'aria-label="ranks"' in page


# --- terminals ------------------------------------------------------------------------------------------


def test_the_answer_is_the_first_line_and_an_empty_table_says_so():
    assert render(document(), "table").startswith("Best: org/a.\nSecond.\nCheckpoints\n")
    assert render(Document("Only a title"), "table") == "Only a title\n"
    assert "\nnone\n" in render(document(rows=[]), "table")
    nothing = Document("t", sections=[Section("s", [Table.of([], "No rows of any class")])])
    assert ["none" in render(nothing, form) for form in ("table", "markdown", "html")] == [True] * 3


def test_a_text_moves_no_cursor_and_breaks_no_line():
    table = Table(
        [{"a": "x\x1b[31my\u2028z\x85", "b": 1}], [Column("a", "A"), Column("b", "B")], "c"
    )
    text = render(Document("t", sections=[Section("s", [table])]), "table")
    assert text.splitlines()[-1].split() == ["x", "[31my", "z", "1"]


@pytest.mark.parametrize("width", range(20, 130, 7))
def test_columns_go_whole_in_their_order_and_numbers_stay_whole(width):
    text = render(document(), "table", width=width)
    lines = text.splitlines()
    heads = next(line.split("  ") for line in lines if line.startswith("Checkpoint "))
    left = [head.strip() for head in heads if head.strip()]
    order = ["Checkpoint", "Gap", "Accuracy", "Tied", "Bytes read"]
    short = ["Checkpoint", "Gap", "Acc.", "Tied", "Read"]
    assert left in (order[: len(left)], short[: len(left)])
    assert "1.250 ± 0.021" in text
    assert "-0.125" in text
    if width >= 27:
        assert max(map(len, lines)) <= width
    assert ("Tied: Not separated." in text) == ("Tied" in left)


def test_long_names_are_folded_not_cut():
    rows = [{"name": "organisation/" + "x" * 80 + "END", "gap": 1.25, "se": 0.021}]
    text = render(document(rows, COLUMNS[:2]), "table", width=60)
    parts = [
        line.split(" ")[0] for line in text.splitlines() if re.match("organisation|x|END", line)
    ]
    assert "".join(parts) == 2 * rows[0]["name"]
    assert max(map(len, text.splitlines())) <= 60


def test_a_name_is_whole_while_a_column_can_be_left_out_and_an_error_stays_with_its_value():
    name = "many/" + "lr1e-5-seed8-" * 3 + "end"
    rows = [{**row, "name": name + str(number)} for number, row in enumerate(ROWS)]
    rows[0]["tied"] = ", ".join("2345678")
    text = render(document(rows), "table", width=98)
    assert f"{name}0" in text
    assert "802 kB" not in text  # the first to go
    for width in range(30, 60):
        text = render(
            Document(f"It is higher by {'x' * 20} 0.5 ± 0.1 (95 % of draws)"), "table", width=width
        )
        assert "0.5 ± 0.1" in text
        assert "95 %" in text


def test_colour_is_escape_sequences_and_nothing_else():
    plain, coloured = (
        render(document(), "table", width=80, colour=colour) for colour in (False, True)
    )
    assert "\x1b[" in coloured
    assert "\x1b[" not in plain
    assert "org/[bold]b[/]" in plain  # a name is no markup
    bare = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert [line.rstrip() for line in bare.splitlines()] == plain.splitlines()


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1"])
def test_what_an_encoding_lacks_is_spelled_out_and_columns_stay_aligned(encoding):
    text = render(document(), "table", width=120, encoding=encoding)
    text.encode(encoding)
    lines = text.splitlines()
    (end,) = {line.index("0.500") + 5 for line in lines if "0.500" in line}
    assert {
        line[:end].endswith("Accuracy") for line in lines if line.startswith("Checkpoint ")
    } == {True}


@pytest.mark.parametrize(
    ("text", "encoding", "spelling"),
    [
        ("±≈−é·…", "ascii", "+/-~-e-..."),
        ("± ≈ é", "cp1252", "± ~ é"),
        ("漢\udc80", "ascii", "??"),
        ("漢\udc80", "utf-8", "漢?"),
    ],
)
def test_spelling(text, encoding, spelling):
    assert spelled(text, encoding) == spelling
