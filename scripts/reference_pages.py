"""The sources of the reference pages, through cog: commands' helps, public names, a checkpoint's columns."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator

os.environ["COLUMNS"] = "100"  # before argparse asks for the width

from lmeval_dispersion.cli import JOBS, _overview, parser_of
from lmeval_dispersion.options import add_output, command_parser

_OPTION = re.compile(r"^  -.*\n(?: {10,}.*\n)*", re.MULTILINE)
_NONE = re.compile(r"\s+\(default: none\)")


def every_help() -> Iterator[tuple[str, str]]:
    """Title and help of each command, in the order of the overview, after the options that several share."""
    yield "dispersion", _overview()
    reports = command_parser("dispersion", "")
    add_output(reports)
    known = _OPTION.findall(reports.format_help())
    yield "Options of every report (registry: no --details)", "".join(known).rstrip()
    for commands in JOBS.values():
        parsers = {name: parser_of(name)[0] for name in commands}
        for name, parser in parsers.items():
            yield f"dispersion {name}", _own(parser, known)


def _own(parser: argparse.ArgumentParser, shared: list[str]) -> str:
    """A command's help without its usage, its shared options, defaults that are none, and the last lines."""
    text = (
        parser.format_help()
        .removeprefix(parser.format_usage())
        .partition("\ndocumentation and shell")[0]
    )
    text = _NONE.sub(
        "", _OPTION.sub(lambda found: "" if found[0] in shared else found[0], f"{text}\n")
    )
    return re.sub(r"^[a-z][^\n]*:\n(?:\n|\Z)", "", text, flags=re.MULTILINE).strip()


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
        "lmeval_dispersion.errors": "Errors",
    }
    by_heading: dict[str, list[str]] = {heading: [] for heading in rooms.values()}
    for name in lmeval_dispersion.__all__:
        value = getattr(lmeval_dispersion, name)
        place = value.__name__ if inspect.ismodule(value) else value.__module__
        heading = next(heading for room, heading in rooms.items() if place.startswith(room))
        by_heading[heading].append(f"lmeval_dispersion.{name}")
    yield from ((heading, paths) for heading, paths in by_heading.items() if paths)


def slope_rows() -> Iterator[tuple[str, str, str, str]]:
    """Each kind of checkpoints, its slope, that of fresh groups, and how often the list held the best."""
    from lmeval_dispersion.evidence import SLOPES

    for of in SLOPES.values():
        measured = f"{of.k:.2f} ({of.low:.2f} to {of.high:.2f}), {of.groups} groups, {of.measured}"
        fresh = "{:.2f} ({:.2f} to {:.2f})".format(*of.fresh) if of.fresh else ""
        held = "; ".join(
            f"{row.held} of {row.cells}: {row.groups} ({row.measured})" for row in of.held
        )
        yield of.kind, measured, fresh, held


def state_rows() -> Iterator[tuple[str, str, str, str, str]]:
    """The causes of a checkpoint's state in a registry, with their sentences and exit status."""
    from lmeval_screener.registry.states import CAUSES

    events: dict[tuple[str, str, str, str], list[str]] = {}
    for of in CAUSES:
        first, later = (words and f"*{words[:-1].format('…')}*" for words in (of.first, of.later))
        events.setdefault((of.state, first, later, str(of.status)), []).append(of.event)
    for what, causes in events.items():
        yield "; or ".join(causes), *what


def budget_rows() -> Iterator[tuple[str, str, str]]:
    """What a file of each kind may hold, and the largest real one that we know: a quarter."""
    from lmeval_screener import budgets

    def mib(size: int) -> str:
        return f"{size / 2**20:.3g} MiB"

    header, index, tokenizer = (budgets.HEADER, budgets.INDEX, budgets.TOKENIZER)
    yield (
        "header of safetensors",
        f"{mib(header.size)}, {header.marks // 12:,} tensors of {budgets.DIMENSIONS} dimensions",
        "a LoRA of all linear layers of DeepSeek-V3: 90,000 tensors, 14 MB",
    )
    yield (
        "pickle of `pytorch_model.bin`",
        f"{mib(budgets.PICKLE)}, {budgets.PICKLE_STEPS:,} steps, {budgets.PICKLE_COPIED:,} copied values",
        "7,800 tensors, 32 steps and 15 values each",
    )
    yield (
        "header of GGUF",
        f"{mib(budgets.GGUF_HEADER)}, {budgets.GGUF_ELEMENTS:,} values in arrays",
        "Gemma 3: 262,144 tokens with scores and types, 514,906 merges",
    )
    yield (
        "`tokenizer.json`",
        f"{mib(tokenizer.size)}, {budgets.ADDED_TOKENS:,} added tokens",
        "Gemma 3: 33 MB; Llasa adds 65,536 tokens",
    )
    yield (
        "index of shards",
        f"{mib(index.size)}, {index.marks // 2:,} tensors",
        "Kimi-K3: 495,000, 54 MB",
    )
    yield "`config.json`", mib(budgets.CONFIG.size), "lists of modules that stay unquantised"
    yield (
        "YAML of words, answers, families",
        f"{mib(budgets.YAML)}, {budgets.YAML_NODES:,} values, aliases written out",
        "ten thousand different answers",
    )


def checkpoint_columns() -> Iterator[tuple[str, str, str]]:
    """Key in JSON, column in CSV and meaning of each value of a checkpoint; those of one object as one."""
    from lmeval_screener.result import columns

    only = {"": "", "base": " (only in the group of a base)", "list": " (only with `--shortlist`)"}
    found: dict[tuple[str, str], dict[tuple[str, str], list[str]]] = {}
    for column in columns.COLUMNS:
        key, csv = (
            re.sub("^(within_domain|within_reference|between)(?=[._])", "PART", name or "")
            for name in (column.path, column.name)
        )
        names = re.sub("cosine|euclidean", "METRIC", key), re.sub("cosine|euclidean", "METRIC", csv)
        whole = key.partition(".")[0] or csv.rpartition("_")[0]
        found.setdefault((whole, only[column.only]), {}).setdefault(names, []).append(column.about)
    for (_, when), values in found.items():
        keys, csvs = (
            ", ".join(f"`{n}`" for n in dict.fromkeys(of) if n) for of in zip(*values, strict=True)
        )
        abouts = (", ".join(dict.fromkeys(about)) for about in values.values())
        yield keys, csvs, "; ".join(abouts) + when
