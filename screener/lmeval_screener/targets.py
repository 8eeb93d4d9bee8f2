"""What the user asks to screen: repositories, revisions, globs of revisions, folders."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lmeval_dispersion.errors import UsageError

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Target:
    """One checkpoint to screen.

    Attributes:
        repo: Repository on the Hub, or the path of a folder.
        revision: Branch, tag or commit; None for the default branch or a folder; may be a glob before it
            is expanded.
        family: Name of the family that lists it; None where it was given by name.
        scale: Scale that the family states; None where the headers have to tell.
        local: Whether ``repo`` is a folder.
        accuracy: Accuracy that somebody measured, None otherwise.
    """

    repo: str
    revision: str | None = None
    family: str | None = None
    scale: str | None = None
    local: bool = False
    accuracy: float | None = None

    @property
    def label(self) -> str:
        """``repo`` or ``repo@revision``."""
        return label(self.repo, self.revision)

    @property
    def is_glob(self) -> bool:
        """Whether the revision stands for several."""
        return self.revision is not None and any(sign in self.revision for sign in "*?[")


def parse_target(text: str) -> Target:
    """The target that ``REPO``, ``REPO@REVISION``, ``REPO@GLOB`` or a folder's path names.

    A folder is what exists as one, or what is written like a path (``./x``, ``/x``, ``~/x``).

    Raises:
        UsageError: It is neither a folder nor the name of a repository.
    """
    path = Path(text).expanduser()
    if text and path.is_dir():
        return Target(str(path), local=True)
    if text.startswith((".", "/", "~")):
        raise UsageError(f"expected a folder or a repository, got {text!r}; there is no such folder")
    repo, at, revision = text.partition("@")
    if not _REPO.fullmatch(repo) or ".." in repo or (at and not revision):
        raise UsageError(f"expected ORGANISATION/NAME, ORGANISATION/NAME@REVISION or a folder, got {text!r}")
    return Target(repo, revision or None)


def label(repo: str, revision: str | None) -> str:
    """``repo`` or ``repo@revision``."""
    return repo if revision is None else f"{repo}@{revision}"


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """The revisions that a glob stands for, in the order of their steps."""
    return sorted({n for n in names if fnmatch.fnmatchcase(n, pattern)}, key=step_key)


def step_key(revision: str) -> tuple[tuple[int, str], ...]:
    """Sort key that puts ``step1000`` before ``step2000`` before ``step10000``."""
    parts = re.split(r"(\d+)", revision)
    return tuple((int(part), "") if index % 2 else (-1, part) for index, part in enumerate(parts))


def step_number(revision: str) -> float | None:
    """The training step that a revision's name carries: the number after ``step``, else its first number.

    >>> step_number("stage1-step140000-tokens588B"), step_number("main")
    (140000.0, None)
    """
    found = re.search(r"step[-_]?(\d+)", revision, re.IGNORECASE) or re.search(r"(\d+)", revision)
    return float(found.group(1)) if found else None
