"""A result as tables for a terminal."""

from __future__ import annotations

import io
import shutil

from rich import box
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table

from lmeval_screener.accuracies import agreements
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

_WIDE = 160  # of what goes to files and pipes, which have no width
_NARROW = 130  # below this a terminal gets the short table: a wrapped figure is hard to read


def table_text(result: Result, *, across_scales: bool, colour: bool) -> str:
    """The whole result for a terminal.

    Args:
        result: What to print.
        across_scales: Whether to add one order over all groups.
        colour: Whether it goes to a terminal: colours, and tables as wide as that is.
    """
    buffer = io.StringIO()
    width = shutil.get_terminal_size().columns if colour else _WIDE
    console = Console(file=buffer, force_terminal=colour, no_color=not colour, width=width, highlight=False)
    console.print(f"[bold]{escape(lead(result))}[/]")
    for group in result.groups:
        console.print()
        console.print(_table(heading(group), group_grid(group, result, narrow=width < _NARROW)))
        console.print(f"[dim]{escape(tokens_line(group))}[/]")
        for note in notes(group):
            console.print(f"[yellow]note[/] {escape(note)}")
    if any(c.not_separated_from for c in result.checkpoints):
        console.print(f"\n{SEPARATION}")
    if across_scales and len(result.groups) > 1:
        console.print()
        console.print(_table("across scales", across_scales_grid(result)))
        console.print(f"[yellow]warning[/] {ACROSS_SCALES}")
    found = agreements(result)
    if found:
        console.print()
        console.print(_table("agreement with the supplied accuracies", agreement_grid(found)))
    if result.failed:
        console.print()
        console.print(_table("not screened", failed_grid(result), style="bold red"))
    console.print(f"\n[dim]{read_line(result)}\n{UNSUPPORTED}[/]")
    return "".join(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines())


def _table(title: str, grid: Grid, style: str = "bold") -> Table:
    table = Table(title=escape(title), title_justify="left", title_style=style, box=box.SIMPLE_HEAD)
    for column, numeric in zip(grid.columns, grid.numeric, strict=True):
        least = None if numeric or column == "≈" else 20
        justify: JustifyMethod = "right" if numeric else "left"
        table.add_column(column, justify=justify, no_wrap=numeric, overflow="fold", min_width=least)
    for row in grid.rows:
        table.add_row(*(escape(cell) for cell in row))
    return table
