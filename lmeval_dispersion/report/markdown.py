"""A report as Markdown for an issue, a pull request or a README."""

from __future__ import annotations

from collections.abc import Iterator

from lmeval_dispersion.errors import printable
from lmeval_dispersion.report.cells import cell, is_numeric, shown, text_rows
from lmeval_dispersion.report.document import LIMITS, Document, Facts, Note, Part, Table, Text


def markdown_text(document: Document) -> str:
    """The report in GitHub's Markdown; details are folded, charts are left out.

    Backticks in sentences stay code; everything that stands in a table's cell is text.
    """
    blocks = [f"## {document.title}"]
    blocks += [
        f"**{sentence}**" if place == 0 else sentence for place, sentence in enumerate(document.answer)
    ]
    seen: set[tuple[str, str]] = set()
    for section in document.sections:
        parts = [block for part in section.parts for block in _blocks(part, seen)]
        if not parts:
            continue
        if section.details:
            heading = section.heading.replace("&", "&amp;").replace("<", "&lt;")
            blocks += [f"<details><summary>{heading}</summary>", *parts, "</details>"]
        else:
            blocks += [*([f"### {section.heading}"] if section.heading else []), *parts]
    if document.limits:
        blocks += [f"### {LIMITS}", "\n".join(f"- {limit}" for limit in document.limits)]
    blocks.append("### How this was made")
    if document.command:
        blocks.append(_fenced(printable(document.command)))
    blocks.append("\n".join(f"- {name}: {value}" for name, value in document.origin().items()))
    return "\n\n".join(blocks) + "\n"


def _blocks(part: Part, seen: set[tuple[str, str]]) -> Iterator[str]:
    if isinstance(part, Text):
        yield part.text
    elif isinstance(part, Note):
        yield f"> **{part.kind.capitalize()}:** " + part.text.replace("\n", "\n> ")
    elif isinstance(part, Facts):
        yield "\n".join(f"- {name}: {shown(value)}" for name, value in part.facts.items())
    elif isinstance(part, Table):
        if part.caption:
            yield f"**{part.caption}**"
        yield _table(part)
        if more := text_rows(part)[1]:
            yield more
        hints = {(c.heading, c.hint) for c in part.columns if c.hint}
        new = [f"- {c.heading}: {c.hint}" for c in part.columns if (c.heading, c.hint) in hints - seen]
        seen |= hints
        if new:
            yield "\n".join(new)


def _table(table: Table) -> str:
    rule = "".join("--:|" if is_numeric(table, column) else "---|" for column in table.columns)
    lines = [_line([column.heading for column in table.columns]), f"|{rule}"]
    for row in text_rows(table)[0]:
        lines.append(_line(["…"] if row is None else [cell(row, column) for column in table.columns]))
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(' '.join(text.split()).replace('|', chr(92) + '|') for text in cells)} |"


def _fenced(text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text.rstrip()}\n{fence}"
