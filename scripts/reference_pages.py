"""The sources of the reference pages, through cog: commands' helps, public names, a checkpoint's columns."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ["COLUMNS"] = "100"  # before argparse asks for the width

from lmeval_dispersion.cli import JOBS, _overview, parser_of


def every_help() -> Iterator[tuple[str, str]]:
    """Title and help of each command, in the order of the overview."""
    yield "dispersion", _overview()
    for commands in JOBS.values():
        for name in commands:
            parser, _ = parser_of(name)
            yield f"dispersion {name}", parser.format_help().rstrip()


def public_names() -> Iterator[tuple[str, list[str]]]:
    """Heading and paths of the public names, by what they are for; each name once.

    Raises:
        AssertionError: A public name has no heading here.
    """
    import inspect

    import lmeval_dispersion

    rooms = {
        "lmeval_screener": "Screen checkpoints",
        "lmeval_dispersion.geometry": "Geometry",
        "lmeval_dispersion.racing": "Find the best checkpoint",
        "lmeval_dispersion.harness": "Evaluate with dispersion",
        "lmeval_dispersion.auditing": "Judge a run",
        "lmeval_dispersion.store": "Judge a run",
        "lmeval_dispersion.model": "Look inside a model",
        "lmeval_dispersion.laboratory": "Look inside a model",
        "lmeval_dispersion.training": "Train",
        "lmeval_dispersion.watch": "Train",
        "lmeval_dispersion.errors": "Errors",
    }
    by_heading: dict[str, list[str]] = {heading: [] for heading in rooms.values()}
    for name in lmeval_dispersion.__all__:
        value = getattr(lmeval_dispersion, name)
        place = value.__name__ if inspect.ismodule(value) else value.__module__
        heading = next(heading for room, heading in rooms.items() if place.startswith(room))
        by_heading[heading].append(f"lmeval_dispersion.{name}")
    yield from ((heading, paths) for heading, paths in by_heading.items() if paths)


def checkpoint_columns() -> Iterator[tuple[str, str, str]]:
    """Key in JSON, column in CSV and meaning of each value of a checkpoint, metrics as one."""
    from lmeval_screener.result import columns

    only = {"": "", "base": "; only in the group of a base", "list": "; only with `--shortlist`"}
    for column in columns.COLUMNS:
        names = [f"`{name}`" if name else "" for name in (column.path, column.name)]
        if "euclidean" not in names[0]:
            key, csv = (name.replace("cosine", "METRIC") for name in names)
            yield key, csv, column.about + only[column.only]
