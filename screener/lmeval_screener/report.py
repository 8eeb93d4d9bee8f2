"""A result as text: table, JSON, CSV, Markdown, HTML, or the short list."""

from __future__ import annotations

import json
from typing import Any

from lmeval_screener.accuracies import agreement_dict, agreements
from lmeval_screener.result import Result
from lmeval_screener.wording import (
    ACROSS_SCALES,
    SEPARATION,
    UNSUPPORTED,
    Grid,
    across_scales_grid,
    agreement_grid,
    failed_grid,
    group_grid,
    heading,
    lead,
    notes,
    read_line,
    tokens_line,
)


def report(result: Result, output_format: str, *, top: int | None, across_scales: bool, colour: bool) -> str:
    """The result in one format, ending in a newline.

    Args:
        result: What to report.
        output_format: ``table``, ``json``, ``csv``, ``markdown`` or ``html``.
        top: Only the labels of the ``top`` best of each group, one a line, whatever the format.
        across_scales: Whether to add one order over all groups.
        colour: Whether the table goes to a terminal.
    """
    if top is not None:
        return "".join(f"{c.label}\n" for group in result.groups for c in group.checkpoints[:top])
    if output_format == "json":
        return json_text(result)
    if output_format == "csv":
        return str(result.to_frame().to_csv(index=False))
    if output_format == "markdown":
        return markdown_text(result, across_scales=across_scales)
    if output_format == "html":
        from lmeval_screener.page import page_html

        return page_html(result, across_scales=across_scales)
    from lmeval_screener.table import table_text

    return table_text(result, across_scales=across_scales, colour=colour)


def json_text(result: Result) -> str:
    """The contract ``screen-checkpoints/1``, with ``agreement`` where accuracies were supplied."""
    document: dict[str, Any] = result.to_dict()
    found = agreements(result)
    if found:
        document["agreement"] = [agreement_dict(line) for line in found]
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def markdown_text(result: Result, *, across_scales: bool) -> str:
    """Tables for an issue or a README."""
    lines = [f"**{lead(result)}**"]
    for group in result.groups:
        lines += ["", f"### {heading(group)}", "", *_table(group_grid(group, result)), "", tokens_line(group)]
        lines += [f"- {note}" for note in notes(group)]
    if any(c.not_separated_from for c in result.checkpoints):
        lines += ["", SEPARATION]
    if across_scales and len(result.groups) > 1:
        lines += ["", "### across scales", "", f"**Warning:** {ACROSS_SCALES}", ""]
        lines += _table(across_scales_grid(result))
    found = agreements(result)
    if found:
        lines += ["", "### agreement with the supplied accuracies", "", *_table(agreement_grid(found))]
    if result.failed:
        lines += ["", "### not screened", "", *_table(failed_grid(result))]
    return "\n".join([*lines, "", read_line(result), "", UNSUPPORTED]) + "\n"


def _table(grid: Grid) -> list[str]:
    def line(cells: tuple[str, ...]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |"

    rule = "|" + "".join("--:|" if numeric else "---|" for numeric in grid.numeric)
    return [line(grid.columns), rule, *(line(row) for row in grid.rows)]
