"""Which checkpoints race, in which order: those of a screening's short list, or all that are named."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmeval_screener.result.result import Result
from lmeval_screener.screening import add_named, screen
from lmeval_screener.selection import Selection, select_targets
from lmeval_screener.shortlist.choice import shortlist
from lmeval_screener.shortlist.manifest import FILE, manifest_dict, manifest_of
from lmeval_screener.targets import labelled
from lmeval_screener.tokens.answers import load_answers

from lmeval_dispersion.errors import UsageError


@dataclass(frozen=True)
class Entry:
    """One checkpoint of a list.

    Attributes:
        arguments: With which lm-eval loads it.
        rank: In the screen's order, from 1; None without a screen.
        chosen: Why it is raced: ``rank``, ``tied``, ``audit``, or ``named``; None where it is not.
    """

    label: str
    arguments: Mapping[str, str]
    rank: int | None
    chosen: str | None


@dataclass(frozen=True)
class Lineup:
    """The checkpoints of a race in its order, then the others of the list.

    Attributes:
        notes: What could not be screened.
        manifest: Of the screening, which `dispersion verify` reads; None without one.
    """

    entries: Sequence[Entry]
    notes: Sequence[str] = ()
    manifest: Mapping[str, Any] | None = None


def manifest_in(checkpoints: Sequence[str] | Result) -> dict[str, Any] | None:
    """The manifest of the folder that alone is named, one of ``--emit`` or of a race; None for another."""
    if isinstance(checkpoints, Result) or len(checkpoints) != 1:
        return None
    path = Path(checkpoints[0]).expanduser()
    file = path if path.name == FILE else path / FILE
    content: dict[str, Any] | None = json.loads(file.read_text("utf-8")) if file.is_file() else None
    return content


def lineup(
    checkpoints: Sequence[str] | Result,
    tasks: str,
    *,
    family: str | None = None,
    domain: str | None = None,
    base: str | None = None,
    all: bool = False,
    audit_sample: int = 0,
) -> Lineup:
    """Screen what is named and take a third of each group; or take the list of a manifest, or all.

    Raises:
        UsageError: Nothing is named, or it is not known which tokens the tasks' answers consist of.
    """
    content, notes = manifest_in(checkpoints), list[str]()
    if content is None and all and not isinstance(checkpoints, Result):
        return _named(checkpoints, family)
    if content is None:
        if not isinstance(checkpoints, Result):
            checkpoints = screen(checkpoints, family=family, base=base, **_tokens(tasks, domain))
        notes = [f"Not screened, so not raced: {f.label} ({f.message})." for f in checkpoints.failed]
        if not checkpoints.checkpoints:
            raise UsageError(notes[0])
        chosen = checkpoints.chosen or shortlist(
            checkpoints.groups, checkpoints.metric, None, audit_sample=audit_sample
        )
        content = manifest_dict(checkpoints.head(), chosen, tasks=tuple(tasks.split(",")), command="race")
    candidates = manifest_of(content, FILE).candidates
    entries = [
        Entry(target.label, target.arguments(c.revision), c.rank, c.chosen or ("named" if all else None))
        for target, c in zip(labelled([c.target for c in candidates]), candidates, strict=True)
    ]
    # The best of each group first; what was drawn at random comes last.
    last = {"audit": 1, None: 2}
    entries.sort(key=lambda entry: (last.get(entry.chosen, 0), entry.rank))
    return Lineup(entries, notes, content)


def _tokens(tasks: str, domain: str | None) -> dict[str, Any]:
    """Domain and task of the screen: the first task whose answer tokens are known, else the domain."""
    refused = []
    for task in tasks.split(","):
        try:
            load_answers(task)
        except UsageError as error:
            refused.append(str(error))
        else:
            return {"domain": domain, "task": task}
    if domain is None:
        raise UsageError(
            f"expected --domain SET, by whose tokens to screen: {refused[0]}; or --all, which races all in "
            "the order given"
        )
    return {"domain": domain}


def _named(checkpoints: Sequence[str], family: str | None) -> Lineup:
    """All that is named, in the order given."""
    selected = select_targets(checkpoints, Selection())
    add_named(selected, family, demo=False)
    targets = labelled(list(dict.fromkeys(selected.targets)))
    for target in targets:
        if target.refused or target.is_glob:
            raise UsageError(target.refused[1] if target.refused else f"name each revision of {target.name}")
    return Lineup([Entry(target.label, target.arguments(), None, "named") for target in targets])
