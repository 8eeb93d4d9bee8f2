"""Markdown, read back by a Markdown parser."""

from itertools import pairwise

from markdown_it import MarkdownIt

from lmeval_dispersion.report import Chart, Code, Column, Document, Facts, Note, Section, Table, Text, render

PARSER = MarkdownIt("commonmark").enable("table")
TABLE = Table(
    [{"name": "a | b\nc", "gap": 1.0, "se": 0.5}, {"name": "`d`", "gap": None}],
    [Column("name", "Name"), Column("gap", "Gap", ".1f", error="se", hint="Larger is better.")],
    "Ranking",
    more="One more.",
)


def undrawn() -> None:
    raise AssertionError("Markdown draws no chart")


def test_tables_sections_and_details():
    text = render(
        Document(
            "Title",
            answer=["First.", "Second."],
            sections=[
                Section("", [Facts({"Requests": 3})]),
                Section("One", [TABLE, Table(TABLE.rows, TABLE.columns, "Again"), Note("Two\n\nparts")]),
                Section("Only a picture", [Chart(undrawn, "c", "d")]),
                Section("Cost <b>", [Code("```\nfenced\n```"), Text("Words.")], details=True),
            ],
            limits=["Limit."],
            command="dispersion audit run",
        ),
        "markdown",
    )
    tokens = PARSER.parse(text)
    cells = [token.content for before, token in pairwise(tokens) if before.type in ("td_open", "th_open")]
    assert cells[:6] == ["Name", "Gap", "a | b c", "1.0 ± 0.5", "`d`", ""]
    assert [token.content for token in tokens if token.type == "fence"] == [
        "```\nfenced\n```\n",
        "dispersion audit run\n",
    ]
    assert text.startswith("## Title\n\n**First.**\n\nSecond.\n")
    assert "--:" in text
    assert text.count("Larger is better.") == 1
    assert "Only a picture" not in text
    assert "<details><summary>Cost &lt;b></summary>" in text
    assert "> **Note:** Two\n> \n> parts" in text
    assert "- Limit." in text


def test_a_table_without_a_caption_has_no_empty_line_in_bold():
    document = Document("Title", sections=[Section("One", [Table(TABLE.rows, TABLE.columns, "", "ranks")])])
    assert "****" not in render(document, "markdown")
    page = render(document, "html")
    assert "<caption" not in page
    assert 'aria-label="ranks"' in page
