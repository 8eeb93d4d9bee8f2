"""Text for a terminal: its width, what goes where it is narrow, encodings, markup."""

import re

import pytest

from lmeval_dispersion.report import Code, Column, Document, Facts, Note, Section, Table, Text, render
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
    {"name": "org/[bold]b[/]", "gap": -0.125, "se": None, "accuracy": None, "tied": "", "cost": 0},
]


def document(rows=ROWS, columns=COLUMNS):
    table = Table(rows, columns, "Ranking", more="38 more.")
    return Document(
        "Checkpoints",
        answer=["Best: `org/a`."],
        sections=[
            Section("Table", [table, Table(rows, columns, "Again"), Text("Word " * 40), Note("Careful.")]),
            Section("Read", [Facts({"Requests": 31, "None": None}), Code("a  b")], details=True),
        ],
        limits=["No accuracy follows."],
        command="screen-checkpoints org/a",
    )


def heads(text: str) -> list[str]:
    return next(line.split("  ") for line in text.splitlines() if line.startswith("Checkpoint "))


def shown_heads(width: int) -> list[str]:
    return [head.strip() for head in heads(render(document(), "table", width=width)) if head.strip()]


def test_the_answer_is_the_first_line():
    assert render(document(), "table").startswith("Best: org/a.\nCheckpoints\n")
    assert render(Document("Only a title"), "table") == "Only a title\n"


@pytest.mark.parametrize("width", range(20, 130, 7))
def test_columns_go_whole_in_their_order_and_numbers_stay_whole(width):
    text = render(document(), "table", width=width)
    lines = text.splitlines()
    left = shown_heads(width)
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
    column = "".join(line[:40].split(" ")[0] for line in text.splitlines() if "x" in line or "END" in line)
    assert "END" in column
    assert max(map(len, text.splitlines())) <= 60


def test_names_are_no_markup():
    assert "org/[bold]b[/]" in render(document(), "table", colour=True)


def test_colour_is_escape_sequences_and_nothing_else():
    plain = render(document(), "table", width=80)
    coloured = render(document(), "table", width=80, colour=True)
    assert "\x1b[" not in plain
    assert "\x1b[" in coloured
    bare = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert [line.rstrip() for line in bare.splitlines()] == plain.splitlines()


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1"])
def test_what_an_encoding_lacks_is_spelled_out_and_columns_stay_aligned(encoding):
    text = render(document(), "table", width=100, encoding=encoding)
    text.encode(encoding)
    lines = text.splitlines()
    (end,) = {line.index("0.500") + 5 for line in lines if "0.500" in line}
    assert {line[:end].endswith("Accuracy") for line in lines if line.startswith("Checkpoint ")} == {True}


def test_spelling():
    assert spelled("±≈−é·…", "ascii") == "+/-~-e-..."
    assert spelled("± ≈ é", "cp1252") == "± ~ é"
    assert spelled("漢\udc80", "ascii") == "??"
    assert spelled("漢", "utf-8") == "漢"
    assert spelled("\udc80", "utf-8") == "?"


def test_an_empty_table_says_so():
    assert "\nnone\n" in render(document(rows=[]), "table")
