"""A race's checkpoints in order: a screening's short list, or all named checkpoints."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from lmeval_screener.result.result import Result
from lmeval_screener.screening import prepared
from lmeval_screener.selection import select
from lmeval_screener.shortlist.accuracies import Accuracies, Rated
from lmeval_screener.shortlist.choice import shortlist
from lmeval_screener.shortlist.loading import with_base
from lmeval_screener.shortlist.manifest import (
    DOWNLOADED,
    FILE,
    Candidate,
    manifest_dict,
    shortlist_manifest,
)
from lmeval_screener.targets.names import labelled
from lmeval_screener.tokens.answers import check_answers, first_known, tasks_in
from lmeval_screener.tokens.sets import AnswerSet
from lmeval_screener.weights.tensors import DTYPE_BITS

from lmeval_dispersion.errors import DispersionError, UsageError
from lmeval_dispersion.files import json_in
from lmeval_dispersion.layouts import Form, Label, Text
from lmeval_dispersion.output import progress_bar
from lmeval_dispersion.report.declared import listed
from lmeval_dispersion.store.identity import SUFFIX

_CHEAP = 2e9  # bytes of a checkpoint that loads in seconds
_BLOCK_IS_BETTER = [
    "Where loading is cheap, as here, a first block of all is the better screen (by block)."
]


_CHOSEN = ("rank", "audit", "named", "block", "base")
Why = Annotated[str, Form(lambda why: why in _CHOSEN, f"one of {', '.join(_CHOSEN)}")]


class Entry(NamedTuple):
    """One checkpoint in a race's list.

    ``chosen`` says why it races: by ``rank``, as ``audit``, as ``named``, for a ``block``; the ``base``
    cannot be the best.
    """

    label: Label
    arguments: Mapping[str, Text]  # lm-eval's arguments for loading it
    rank: Annotated[int, 1] | None  # in the screen's order, from 1
    chosen: Why | None  # None: it does not race

    @property
    def place(self) -> tuple[str, ...]:
        """The weights' identity, whatever their label: folder or name, adapter, revision, file."""
        keys = ("pretrained", "model", "peft", "revision", "gguf_file")
        return tuple(self.arguments[key] for key in keys if key in self.arguments)


class Lineup(NamedTuple):
    """A race's checkpoints in its order, then the others; names that could not be screened; the manifest.

    ``by`` orders those that race: ``rows``, or a first ``block`` of questions. ``bytes`` is the approximate
    size of their weights, 0 where the screen does not know it.
    """

    entries: Sequence[Entry]
    notes: Sequence[str] = ()
    manifest: Mapping[str, Any] | None = None
    by: str = "rows"
    failed: Sequence[str] = ()  # names of those that could not be screened
    bytes: int = 0

    @property
    def reference(self) -> str:
        """The label of the base; empty without one."""
        return next((entry.label for entry in self.entries if entry.chosen == "base"), "")

    def joined(self, later: Lineup) -> Lineup:
        """This list with a ``later`` one's checkpoints; those that raced before keep their labels."""
        entries = {entry.place: entry for entry in self.entries}
        labels = {entry.label for entry in self.entries}
        for entry in later.entries:
            if old := entries.get(entry.place):
                chosen = entry.chosen if entry.chosen == "named" else old.chosen or entry.chosen
                entries[entry.place] = old._replace(rank=entry.rank, chosen=chosen)
            else:
                label = "/".join(entry.place) if entry.label in labels else entry.label
                entries[entry.place] = entry._replace(label=label)
        found = sorted(entries.values(), key=lambda entry: entry.chosen is None)
        return self._replace(
            entries=found, notes=later.notes, manifest=later.manifest, failed=later.failed
        )

    def ordered(self, by: str | None, *, shared: bool) -> Lineup:
        """The list with its order: ``by``, else a block where all were named or rows give no order.

        Adapters that race by a block get their ``shared`` base as an entry.
        """
        named = all(entry.chosen in ("named", "base") for entry in self.entries)
        order = by or (
            "block" if named or any(e.chosen == "block" for e in self.entries) else "rows"
        )
        raced = [
            base_of(entry.arguments) for entry in self.entries if entry.chosen not in (None, "base")
        ]
        bases = [base for base in raced if base]  # merges and other whole models may be among them
        alike = len(bases) > 1 and bases == bases[:1] * len(bases)
        there = {entry.arguments.get("pretrained") for entry in self.entries}
        if order == "rows" or not (shared and alike) or bases[0]["pretrained"] in there:
            cheap = (alike and bases == raced) or 0 < self.bytes <= _CHEAP * len(raced)
            note = _BLOCK_IS_BETTER if by is None and shared and cheap and len(raced) > 1 else ()
            return self._replace(by=order, notes=[*self.notes, *note])
        name = bases[0]["pretrained"]
        label = f"{Path(name).name if Path(name).is_dir() else name} (base)"
        return self._replace(
            entries=[Entry(label, bases[0] | {"peft": ""}, None, "base"), *self.entries], by=order
        )


def named_arguments(
    named: Sequence[str] | Result, family: str | None, *, taken: bool
) -> dict[str, dict[str, str]]:
    """lm-eval's arguments of all named checkpoints by name, before a screen.

    ``taken``: the names in ``named`` are a server's, as they are.
    """
    if isinstance(named, Result):
        screened = [
            (c, c.target if c.target.local else replace(c.target, repo=c.repo))
            for c in named.checkpoints
        ]
        return {c.target.name: target.arguments(c.revision) for c, target in screened}
    if content := manifest_in(named):
        candidates = shortlist_manifest(content, str(Path(named[0]))).candidates
        return {c.target.name: _arguments(c, named) for c in candidates}
    if taken:
        return {name: {"model": name} for name in named}
    return {str(target.name): target.arguments() for target in select(named, family=family).targets}


def manifest_in(named: Sequence[str] | Result) -> dict[str, Any]:
    """The manifest in a single named folder, of ``--emit`` or of a race; else empty."""
    if isinstance(named, Result) or len(named) != 1:
        return {}
    path = Path(named[0]).expanduser()
    file = path if path.name == FILE else path / FILE
    try:
        content = json_in(file) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise UsageError(
            f"expected a manifest, but {file} cannot be read ({error}); remove or mend it"
        ) from error
    return content if isinstance(content, dict) else {}  # another program's


def lineup(
    named: Sequence[str] | Result,
    tasks: str,
    *,
    family: str | None,
    domain: str | None,
    base: str | None,
    all: bool,
    by: str | None,
    audit_sample: int,
    api: bool,
    count: Callable[[], tuple[Counter[str], int]],
) -> Lineup:
    """Screen the named checkpoints and take the short list; or take a manifest's list, or all.

    Of checkpoints with equal rows, and of those that a block will order, all are taken.

    With ``api``, a server knows ``all`` by their names. ``count`` gives the tasks' answers, and the number of
    their documents.

    Raises:
        UsageError: Nothing is named, or the tasks' answers have no tokens to screen by.
    """
    content, notes, failed = manifest_in(named), list[str](), list[str]()
    unscreened = content or (all and not isinstance(named, Result))
    of_screen = {"base": base, "domain": domain, "audit_sample": audit_sample}
    if unscreened and (unused := [name for name, value in of_screen.items() if value]):
        raise UsageError(
            "needs a screen, which a list and all checkpoints go without; leave it out",
            argument=unused[0],
        )
    if not content and all and not isinstance(named, Result):
        return all_named(named, family, api=api)
    if not content:
        if not isinstance(named, Result):
            task = first_known(tasks)[0].removesuffix(SUFFIX) or (
                None if domain else _counted(tasks, count)
            )
            with progress_bar() as update:
                run = prepared(domain, task, base=base)
                run.on_done = lambda outcome, done, count: update(done, count, outcome.label)
                named = run.result(select(named, family=family))
            if isinstance(task, AnswerSet) and named.checkpoints:
                tokens = [token.text.strip() for token in named.checkpoints[0].resolution.of_ratio]
                notes.append(
                    f"Screened by the {len(tokens)} tokens of {task.about}: {' '.join(tokens)}."
                )
        notes += [f"Not screened, so not raced: {f.label} ({f.message})." for f in named.failed]
        notes += [
            f"Set aside by the screen, so not raced: {c.label} (no ratio: {c.no_ratio})."
            for group in named.groups
            for c in group.set_aside
        ]
        failed = [f.target.name for f in named.failed]
        notes += [f"Not screened, so not raced: {f.label} ({f.message})." for f in named.of_base]
        if not named.checkpoints and named.of_base:
            # Adapters whose rows say nothing, even if their base cannot be read here: all are asked.
            taken = all_named([f.target.name for f in named.of_base], None, api=api)
            return taken._replace(failed=failed)
        if not named.checkpoints:
            raise UsageError(notes[0])
        chosen = named.chosen or shortlist(named.groups, audit_sample=audit_sample)
        content = manifest_dict(
            named.head(), chosen, tasks=tasks_in(tasks), command="dispersion race"
        )

    def why(c: Candidate) -> str | None:
        of_block = by == "block" or (c.equal_rows and by is None)
        return "named" if all else "block" if of_block else c.chosen

    entries = [
        Entry(c.target.label, _arguments(c, named), c.rank, why(c)) for c in _in_order(content)
    ]
    size = _bytes(entries, named) if isinstance(named, Result) else 0
    entries.sort(key=lambda entry: entry.chosen is None)
    return Lineup(entries, notes, content, failed=failed, bytes=size)


def _bytes(entries: Sequence[Entry], screened: Result) -> int:
    """Approximate bytes of weights that the race loads, adapters of one base once; 0 if not known."""
    known = {
        c.label: (c.parameters or 0) * DTYPE_BITS.get(c.dtype, 0) // 8 for c in screened.checkpoints
    }
    loads = {
        json.dumps(base_of(entry.arguments) or entry.arguments, sort_keys=True): known.get(
            entry.label, 0
        )
        for entry in entries
        if entry.chosen
    }
    return sum(loads.values()) if all(loads.values()) else 0


def base_of(arguments: Mapping[str, str]) -> dict[str, str]:
    """The arguments of an adapter's base; empty of a whole model, or where its base is not known."""
    try:
        found = with_base(arguments) if "pretrained" in arguments else {}
    except DispersionError:  # loading it says why
        found = {}
    return {key: value for key, value in found.items() if key != "peft"} if "peft" in found else {}


def listed_results(named: Sequence[str], models: Sequence[str]) -> list[str]:
    """The ``models`` (of finished evaluations) that a manifest lists: by rank, its random sample last.

    Raises:
        UsageError: No manifest is named, a model is not in it, or a listed one was not evaluated.
    """
    if not (content := manifest_in(named)):
        raise UsageError(
            f"expected a short list's folder or a race's to replay, got {', '.join(named)}"
        )
    candidates = _in_order(content)
    # Matched like supplied accuracies; the number in place of an accuracy is the model's position.
    rated = [
        Rated(model, None, position, FILE, label=model.rpartition(f"{DOWNLOADED}/")[2])
        for position, model in enumerate(models)
    ]
    targets = Accuracies(tuple(rated), "").of([c.target for c in candidates])
    raced = [(t.label, t.accuracy) for t, c in zip(targets, candidates, strict=True) if c.chosen]
    if missing := [name for name, at in raced if at is None]:
        raise UsageError(
            f"expected results of all that the screen of {named[0]} lists, got none of "
            f"{listed(missing)}; evaluate them"
        )
    return [models[int(at)] for _, at in raced if at is not None]


def _in_order(content: Mapping[str, Any]) -> list[Candidate]:
    """A manifest's candidates: the best of its groups first, the random sample last, then the others."""
    last = {"audit": 1, None: 2}
    candidates = shortlist_manifest(content, FILE).candidates
    return sorted(candidates, key=lambda c: (last.get(c.chosen, 0), c.rank))


def _arguments(c: Candidate, named: Sequence[str] | Result) -> dict[str, str]:
    """lm-eval's arguments of a candidate; an adapter that the list's script downloaded is a folder."""
    if not isinstance(named, Result):
        place = Path(named[0]).expanduser()
        folder = (place.parent if place.name == FILE else place) / DOWNLOADED / c.target.name
        if (folder / "adapter_config.json").is_file():
            return {"pretrained": str(folder.resolve())}
    return c.target.arguments(c.revision)


def _counted(tasks: str, count: Callable[[], tuple[Counter[str], int]]) -> AnswerSet:
    """The answers that the tasks' own documents have."""
    name = ",".join(tasks_in(tasks))
    try:
        answers, documents = count()
        check_answers(name, answers)
    except DispersionError as error:
        raise UsageError(
            f"expected the token set to screen by: {error}; or race all, in the order given",
            argument="domain",
        ) from error
    about = f"the answers of {name} ({documents:,} documents)"
    return AnswerSet(name, tasks_in(tasks), about=about, answers=dict(answers))


def all_named(
    names: Sequence[str], family: str | None = None, *, api: bool, chosen: str = "named"
) -> Lineup:
    """All named checkpoints in that order (``api``: a server's names); UsageError for a refused one."""
    if api and not family:
        entries = [Entry(name, {"model": name}, None, chosen) for name in dict.fromkeys(names)]
        return Lineup(entries, by="block")
    targets = labelled(select(names, family=family).targets)
    for target in targets:
        if target.refused or target.is_glob:
            raise UsageError(
                target.refused[1] if target.refused else f"name each revision of {target.name}"
            )
    entries = [Entry(target.label, target.arguments(), None, chosen) for target in targets]
    return Lineup(entries, by="block")
