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
    "save the tokenizer with `AutoTokenizer.from_pretrained(...).save_pretrained(...)` and screen "
    "that folder"
)


@dataclass(frozen=True)
class ProgramLayout:
    """Files that a program leaves behind, and what a user can do with them.

    Attributes:
        program: The name of the program, or the names of several.
        signs: Names of files or folders by which the layout is recognised; for the docs.
        model: Where the model lies in the layout; for the docs.
        step: The command or action that makes the model readable, or, if it is readable, how to
            name it on the command line. ``{folder}`` is replaced by the folder in which the layout
            was recognised, ``{name}`` by the name of the recognised file.
        seen: Regular expression for a path, relative to the checkpoint, by which the layout is
            recognised. Its group ``folder``, if it has one, is the folder for ``step``. Empty for a
            layout that can be read.
        reason: Why the layout cannot be read, as a clause; ``{path}`` is replaced by the recognised
            path. Empty for a layout that can be read.
        code: Code of the error for a checkpoint in this layout.
        next_to: Whether the layout is also recognised by a file in the folder above the checkpoint.
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
    """Return the error for a folder in which a known program left files that cannot be screened.

    An example of such files is a training framework's own shards.

    Args:
        paths: The checkpoint's files, relative to its folder. Files of subfolders and of the folder
            above (``../NAME``) may be among them.
        place: The folder, repository or address of the checkpoint.
        section: Section of layouts.yaml; the first layout in it that fits decides.
        is_local: Whether the files are on this machine; if not, the next step begins with
            downloading them.

    Returns:
        Code, reason and next step of the error; None if no layout in the section fits.
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
    """Return the rows of the table of known layouts in the docs.

    Each row has the program, the names by which its layout is recognised, the place of the model,
    and what to do.
    """
    table = _table()
    return [
        (row.program, row.signs, row.model, row.step.format(folder="FOLDER", name="FILE"))
        for row in (*table.programs, *table.stopped, *table.tokenizers)
    ]
