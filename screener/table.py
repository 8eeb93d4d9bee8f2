"""A result as tables for a terminal."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from screener.agreement import Agreement
from screener.result import Group, Result, Screened
from screener.wording import (
    ACROSS_SCALES,
    UNSUPPORTED,
    digits_for,
    figure,
    heading,
    not_separated,
    read_line,
    size,
    tokens_line,
)


def table_text(result: Result, agreements: Sequence[Agreement], *, across_scales: bool, plain: bool) -> str:
    """The whole result for a terminal.

    Args:
        result: What to print.
        agreements: Agreement with supplied accuracies; empty without them.
        across_scales: Whether to add one order over all groups.
        plain: Whether to leave colours out and to use as much width as the tables want (files, pipes).
    """
    buffer = io.StringIO()
    width = 160 if plain else shutil.get_terminal_size().columns
    console = Console(file=buffer, force_terminal=not plain, no_color=plain, width=width, highlight=False)
    console.print(
        f"[bold]{escape(result.domain)}[/]: {result.metric} gap G = within(T) + between(T, R), "
        f"reference {escape(result.reference)}; ± is one jackknife standard error"
    )
    for group in result.groups:
        console.print()
        console.print(_group_table(group, result))
        console.print(f"[dim]{escape(tokens_line(group))}[/]")
        for checkpoint in group.checkpoints:
            for note in checkpoint.notes:
                console.print(f"[yellow]note[/] {escape(checkpoint.label)}: {escape(note)}")
    if any(c.not_separated_from for c in result.checkpoints):
        console.print("\n≈ ranks whose G is within two paired standard errors: not separated")
    if across_scales and len(result.groups) > 1:
        console.print()
        console.print(_across_table(result))
        console.print(f"[yellow]warning[/] {ACROSS_SCALES}")
    if agreements:
        console.print()
        console.print(_agreement_table(agreements))
    if result.failed:
        console.print()
        failures = Table(title="not screened", title_justify="left", box=box.SIMPLE_HEAD, title_style="bold red")
        failures.add_column("checkpoint", overflow="fold")
        failures.add_column("error", no_wrap=True)
        failures.add_column("why, and what to do", overflow="fold")
        for failed in result.failed:
            failures.add_row(escape(failed.label), failed.error, escape(failed.message))
        console.print(failures)
    console.print()
    console.print(f"[dim]{read_line(result)}[/]")
    console.print(f"[dim]{UNSUPPORTED}[/]")
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def on_terminal() -> bool:
    """Whether standard output is a person's terminal."""
    return sys.stdout.isatty()


def _group_table(group: Group, result: Result) -> Table:
    trajectory = group.trajectory()
    members: Sequence[Screened] = trajectory or group.checkpoints
    with_accuracy = any(c.accuracy is not None for c in members)
    digits = digits_for(members, result)
    table = Table(title=escape(heading(group)), title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    table.add_column("rank", justify="right")
    table.add_column("revision, by step" if trajectory else "checkpoint", overflow="fold")
    table.add_column("G", justify="right", no_wrap=True)
    table.add_column("≈", justify="left")
    if with_accuracy:
        table.add_column("accuracy", justify="right")
    table.add_column("within T", justify="right", no_wrap=True)
    table.add_column("between T,R", justify="right", no_wrap=True)
    table.add_column("control: within R", justify="right", no_wrap=True)
    table.add_column("read", justify="right")
    table.add_column("requests", justify="right")
    table.add_column("s", justify="right")
    for c in members:
        gap = c.gaps[result.metric]
        parts = (gap.within_domain, gap.between, gap.within_reference)
        cells = [
            str(c.rank),
            escape((c.requested_revision if trajectory else c.label) or c.label),
            f"[bold]{figure(gap.mean, gap.se, digits)}[/]",
            not_separated(c, group),
        ]
        if with_accuracy:
            cells.append("" if c.accuracy is None else f"{c.accuracy:.4g}")
        cells += [figure(part.mean, part.se, digits) for part in parts]
        table.add_row(*cells, size(c.bytes_read), str(c.requests), f"{c.seconds:.2f}")
    return table


def _across_table(result: Result) -> Table:
    table = Table(title="across scales", title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for name in ("", "checkpoint", "family", "scale"):
        table.add_column(name, overflow="fold")
    table.add_column("G", justify="right", no_wrap=True)
    digits = digits_for(result.checkpoints, result)
    for place, c in enumerate(across_scales_order(result), start=1):
        gap = c.gaps[result.metric]
        table.add_row(
            str(place), escape(c.label), escape(c.family), c.scale, figure(gap.mean, gap.se, digits)
        )
    return table


def across_scales_order(result: Result) -> list[Screened]:
    """All checkpoints by G, whatever their group."""
    return sorted(result.checkpoints, key=lambda c: (-c.gaps[result.metric].mean, c.label))


def _agreement_table(agreements: Sequence[Agreement]) -> Table:
    raise NotImplementedError
