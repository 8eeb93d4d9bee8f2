"""Layouts that programs leave behind: how each is seen, where its model is, and the command that makes one.

The layouts are data, in ``layouts.yaml``: a new program is an entry there. One table serves the refusals of
folders without weights that can be read, and the reference in the docs.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from lmeval_screener.budgets import load_yaml

Section = Literal["programs", "stopped", "tokenizers"]
SAVE_TOKENIZER = (
    "save it with `AutoTokenizer.from_pretrained(...).save_pretrained(...)` and screen that folder"
)


@dataclass(frozen=True)
class ProgramLayout:
    """A layout of files.

    Attributes:
        program: The program, or several.
        signs: Names by which it is seen, for readers.
        model: Where its model is, for readers.
        step: What makes it readable, or how it is named; ``{folder}`` is the folder that holds the sign,
            ``{name}`` the file's name.
        seen: Regular expression of a path, relative to the checkpoint, that shows the layout; a group
            ``folder`` is the folder in question, where it is not the sign's own. Empty for a layout that is
            read as it is.
        reason: Why it cannot be read, as a clause.
        code: Error code of the refusal.
        next_to: Whether files in the folder above show it too.
    """

    program: str
    signs: str
    model: str
    step: str
    seen: str = ""
    reason: str = ""
    code: str = "NoSafetensors"
    next_to: bool = False


@dataclass(frozen=True)
class _Table:
    """The layout of layouts.yaml."""

    schema: Literal[1]
    programs: tuple[ProgramLayout, ...]
    stopped: tuple[ProgramLayout, ...]
    tokenizers: tuple[ProgramLayout, ...]

    def of(self, section: Section) -> tuple[ProgramLayout, ...]:
        """The layouts of one section."""
        layouts: tuple[ProgramLayout, ...] = getattr(self, section)
        return layouts


@cache
def _table() -> _Table:
    return load_yaml(_Table, Path(__file__).with_name("layouts.yaml"))


def layout_of(
    paths: Iterable[str],
    place: str,
    section: Section = "programs",
    *,
    is_local: bool = True,
) -> tuple[str, str, str] | None:
    """The refusal for a checkpoint without weights that can be read: code, reason and step; None if unknown.

    Args:
        paths: The checkpoint's files, relative to it; also those below it and next to it, where known.
        place: Its folder or address.
        section: The section of layouts.yaml whose layouts are looked for, in their order.
        is_local: Whether the files are on this machine; else a command of the step has them copied first.
    """
    known = sorted(paths, key=lambda path: (path.count("/"), path))
    for layout in _table().of(section):
        if not layout.seen:
            continue
        pattern = re.compile(layout.seen)
        for path in known:
            match = pattern.fullmatch(path)
            if match is None or (path.startswith("../") and not layout.next_to):
                continue
            inside = match.groupdict().get("folder")
            if inside is None:
                inside = posixpath.dirname(path)
            folder = _joined(place, inside)
            copied = ""
            if not is_local and "{folder}" in layout.step:
                copied, folder = _copied(place, inside)
            step = layout.step.format(folder=folder, name=posixpath.basename(path))
            return layout.code, layout.reason.format(path=path), f"{copied}{step}"
    return None


def _copied(place: str, inside: str) -> tuple[str, str]:
    """The step that brings an address or a repository to this machine, and where ``inside`` is then."""
    if "://" in place:
        return f"copy {_joined(place, inside)} to FOLDER, and ", "FOLDER"
    return f"download it: `hf download {place} --local-dir FOLDER`; then ", _joined(
        "FOLDER", inside
    )


def _joined(place: str, inside: str) -> str:
    """A path below a folder or an address."""
    scheme, mark, rest = place.replace("\\", "/").rpartition("://")
    return f"{scheme}{mark}{posixpath.normpath(posixpath.join(rest, inside))}"


def rows() -> list[tuple[str, str, str, str]]:
    """The table for the docs: program, how it is seen, where the model is, command."""
    table = _table()
    return [
        (row.program, row.signs, row.model, row.step.format(folder="FOLDER", name="FILE"))
        for row in (*table.programs, *table.stopped, *table.tokenizers)
    ]
