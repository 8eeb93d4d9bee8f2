"""Targets of a screening: repositories, revisions, globs of them, folders, addresses of storages."""

from __future__ import annotations

import fnmatch
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lmeval_dispersion.errors import printable
from lmeval_screener.errors import ScreeningError
from lmeval_screener.targets.names import parse_name

if TYPE_CHECKING:
    from lmeval_screener.checkpoints.hub_responses import RepoFiles


@dataclass(frozen=True, slots=True)
class Target:
    """One checkpoint to screen.

    Attributes:
        repo: Repository on the Hub, the path of a folder or file, or an address such as ``s3://bucket/run``.
        revision: Branch, tag or commit; None for the default branch or a folder; may be a glob before it
            is expanded.
        family: Name of the family that lists it; None where it was given by name.
        scale: Scale that the family states; None where the headers have to tell.
        local: Whether ``repo`` is a folder or a file.
        accuracy: Accuracy that somebody measured, None otherwise.
        negative_control: Whether it is known not to have learned what the others learned.
        file: A GGUF file of it, or a quantisation that names one; None for the checkpoint's own weights.
        refused: Code and sentence where ``repo`` is something that cannot be parse_name.
        tokenizer: Where a tokenizer is read if the checkpoint stores none: what may be written for a
            checkpoint, or a tokenizer's file; None for nowhere else.
        listing: Commit and files, where a list of repositories said them: then it costs no API call.
        labelled: Its name in reports (:func:`labelled`); None before all that is screened is known.
    """

    repo: str
    revision: str | None = None
    family: str | None = None
    scale: str | None = None
    local: bool = False
    accuracy: float | None = None
    negative_control: bool = False
    file: str | None = None
    refused: tuple[str, str] | None = None
    tokenizer: str | None = None
    listing: RepoFiles | None = field(default=None, compare=False, repr=False)
    labelled: str | None = field(default=None, compare=False, repr=False)

    @property
    def scheme(self) -> str | None:
        """The beginning of its address, such as ``s3``; None for a folder and a repository of the Hub."""
        scheme, mark, _ = self.repo.partition(":/")
        return scheme.lower() if mark and not self.local else None

    @property
    def on_hub(self) -> bool:
        """Whether ``repo`` is a repository of the Hub."""
        return not self.local and self.scheme is None

    @property
    def name(self) -> str:
        """``repo``, ``repo@revision`` or ``repo:file``, as a user would write it."""
        return label(self.shown, self.revision, self.file)

    @property
    def label(self) -> str:
        """Its name in reports; as the user wrote it before that is settled."""
        return self.labelled or self.name

    @property
    def shown(self) -> str:
        """``repo`` as a report may show it: no control characters, nor the signature of a signed address."""
        return printable(self.repo.partition("?")[0] if self.scheme in ("http", "https") else self.repo)

    @property
    def is_glob(self) -> bool:
        """Whether the revision stands for several."""
        return self.revision is not None and any(sign in self.revision for sign in "*?[")


def parse_target(text: str, tokenizer: str | None = None) -> Target:
    """The target that a repository's name or address, with a revision or glob or without, or a path names.

    What cannot be parse_name is a target that is ``refused``: it fails by itself and costs no other its run.
    """
    try:
        place = parse_name(text)
    except ScreeningError as error:
        return Target(text, refused=(error.code, str(error)))
    return Target(place.repo, place.revision, local=place.local, file=place.file, tokenizer=tokenizer)


def label(repo: str, revision: str | None, file: str | None = None) -> str:
    """``repo``, ``repo@revision``, or either with ``:file``."""
    name = repo if revision is None else f"{repo}@{revision}"
    return name if file is None else f"{name}:{file}"


def labelled(targets: Sequence[Target]) -> list[Target]:
    """The targets with the labels by which a report of them all tells them apart.

    A repository of the Hub is called by its name, anything else by the last parts of its path that tell it
    from the others: a GGUF file and a version of a registered model by two of them at least.

    >>> [t.label for t in labelled([Target("gg", local=True, file="a.gguf"), Target("models:/sums/2")])]
    ['gg/a.gguf', 'sums/2']
    """
    from lmeval_dispersion.report.cells import short_names

    paths = {target: _path(target) for target in targets if not target.on_hub}
    short = dict(zip(paths, short_names(list(paths.values())), strict=True))
    labels = []
    for target in targets:
        text = short.get(target, target.name)
        if target in paths and "/" not in text and (target.scheme == "models" or text.endswith(".gguf")):
            text = "/".join(paths[target].rsplit("/", 2)[-2:])
        labels.append(text)
    count, seen = Counter(labels), Counter[str]()
    for place, text in enumerate(labels):
        seen[text] += 1
        if count[text] > 1 and seen[text] > 1:
            labels[place] = f"{text} ({seen[text]})"
    return [replace(target, labelled=text) for target, text in zip(targets, labels, strict=True)]


def _path(target: Target) -> str:
    if target.local:
        path = printable(os.path.abspath(target.repo).replace(os.sep, "/"))  # so that `.` has a name
    else:
        path = target.shown.partition(":/")[2].strip("/")
    if target.file is None:
        return path
    return f"{path}/{target.file}" if target.file.endswith(".gguf") else f"{path}:{target.file}"


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
    number = re.search(r"step[-_=]?(\d+)", revision, re.IGNORECASE) or re.search(r"(\d+)", revision)
    return float(number.group(1)) if number else None
