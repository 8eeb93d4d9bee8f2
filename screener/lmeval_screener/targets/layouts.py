"""Layouts that programs leave behind: how each is seen, where its model is, and the command that makes one.

The layouts are data, in ``layouts.yaml``: a new program is an entry there. One table serves the
refusals of folders without weights that can be read, and the reference in the docs.
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
    """Files that a program leaves behind, and what a user can do with them.

    Attributes:
        program: The name of the program, or of several.
        signs: Names of files or folders by which the layout is recognised, for the docs.
        model: Where the model lies in it, for the docs.
        step: The command or action that makes the model readable, or how to name it. ``{folder}``
            stands for the folder that holds the sign, ``{name}`` for the name of the file.
        seen: Regular expression of a path, relative to the checkpoint, that shows the layout. Its
            group ``folder``, if it has one, is the folder for ``step``. Empty for a layout that can
            be read.
        reason: Why the layout cannot be read, as a clause.
        code: Code of the error that refuses it.
        next_to: Whether a file in the folder above the checkpoint shows the layout, too.
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
    """Return the error for a folder that a known program left without weights that can be read.

    Args:
        paths: The checkpoint's files relative to its folder. Known files below it and next to it
            (with ``../``) help as well.
        place: The folder, repository or address.
        section: The section of layouts.yaml to look in; the first layout that fits is taken.
        is_local: Whether the files are on this machine. If not, the advice begins with a download.

    Returns:
        The error's code, its reason and the next step; None if no layout fits.
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
    """Return the rows of the table in the docs: program, signs, place of the model, command."""
    table = _table()
    return [
        (row.program, row.signs, row.model, row.step.format(folder="FOLDER", name="FILE"))
        for row in (*table.programs, *table.stopped, *table.tokenizers)
    ]
