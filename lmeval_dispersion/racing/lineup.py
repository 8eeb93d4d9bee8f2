"""Which checkpoints race, in which order: those of a screening's short list, or all that are named."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lmeval_screener.result.result import Result
from lmeval_screener.screening import add_named, screen
from lmeval_screener.shortlist.choice import shortlist
from lmeval_screener.shortlist.manifest import FILE, manifest_dict, shortlist_manifest
from lmeval_screener.targets.labels import labelled
from lmeval_screener.targets.selection import Selection, select_targets
from lmeval_screener.tokens.answers import load_answers

from lmeval_dispersion.errors import UsageError


class Entry(NamedTuple):
    """One checkpoint of a list: it races by ``rank``, ``tied``, as ``audit`` or as ``named``."""

    label: str
    arguments: Mapping[str, str]  # with which lm-eval loads it
    rank: int | None  # in the screen's order, from 1
    chosen: str | None  # None: it does not race


class Lineup(NamedTuple):
    """The checkpoints of a race in its order, then the others; what could not be screened; the manifest."""

    entries: Sequence[Entry]
    notes: Sequence[str] = ()
    manifest: Mapping[str, Any] | None = None


def manifest_in(named: Sequence[str] | Result) -> dict[str, Any]:
    """The manifest of the folder that alone is named, one of ``--emit`` or of a race; empty for another."""
    if isinstance(named, Result) or len(named) != 1:
        return {}
    path = Path(named[0]).expanduser()
    file = path if path.name == FILE else path / FILE
    content: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    return content


def lineup(
    named: Sequence[str] | Result,
    tasks: str,
    *,
    family: str | None,
    domain: str | None,
    base: str | None,
    all: bool,
    audit_sample: int,
) -> Lineup:
    """Screen what is named and take a third of each group; or take the list of a manifest, or all.

    Raises:
        UsageError: Nothing is named, or it is not known which tokens the tasks' answers consist of.
    """
    content, notes = manifest_in(named), list[str]()
    unscreened = content or (all and not isinstance(named, Result))
    of_screen = {"base": base, "domain": domain, "audit-sample": audit_sample}
    if unscreened and (unused := [name for name, value in of_screen.items() if value]):
        raise UsageError(f"--{unused[0]} is of a screen, which --all and a list go without; leave it out")
    if not content and all and not isinstance(named, Result):
        return _named(named, family)
    if not content:
        if not isinstance(named, Result):
            named = screen(named, family=family, base=base, domain=domain, task=_task(tasks, domain))
        notes = [f"Not screened, so not raced: {f.label} ({f.message})." for f in named.failed]
        if not named.checkpoints:
            raise UsageError(notes[0])
        chosen = named.chosen or shortlist(named.groups, named.metric, None, audit_sample=audit_sample)
        content = manifest_dict(
            named.head(), chosen, tasks=tuple(tasks.split(",")), command="dispersion race"
        )
    candidates = shortlist_manifest(content, FILE).candidates
    entries = [
        Entry(target.label, target.arguments(c.revision), c.rank, "named" if all else c.chosen)
        for target, c in zip(labelled([c.target for c in candidates]), candidates, strict=True)
    ]
    # The best of each group first; what was drawn at random comes last.
    last = {"audit": 1, None: 2}
    return Lineup(sorted(entries, key=lambda e: (last.get(e.chosen, 0), e.rank)), notes, content)


def _task(tasks: str, domain: str | None) -> str | None:
    """The first task whose answer tokens are known, which the screen's ratio is over."""
    refused = []
    for task in tasks.split(","):
        try:
            load_answers(task)
        except UsageError as error:
            refused.append(str(error))
        else:
            return task
    if domain is None:
        raise UsageError(
            f"expected --domain SET, by whose tokens to screen: {refused[0]}; or --all, which races all in "
            "the order given"
        )
    return None


def _named(names: Sequence[str], family: str | None) -> Lineup:
    """All that is named, in the order given."""
    selected = select_targets(names, Selection())
    add_named(selected, family, demo=False)
    targets = labelled(list(dict.fromkeys(selected.targets)))
    for target in targets:
        if target.refused or target.is_glob:
            raise UsageError(target.refused[1] if target.refused else f"name each revision of {target.name}")
    return Lineup([Entry(target.label, target.arguments(), None, "named") for target in targets])
