"""A race's checkpoints in order: a screening's short list, or all named checkpoints."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from lmeval_screener.result.result import Result
from lmeval_screener.screening.arguments import ScreenArguments
from lmeval_screener.screening.run import Screening
from lmeval_screener.screening.selection import select
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

from lmeval_dispersion.asking import Which
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


class Named(NamedTuple):
    """The checkpoints that a command names: words, a screening, or a folder with a manifest.

    ``words`` are the labels where they are a screening's; ``manifest`` is empty without one.
    """

    words: Sequence[str]
    screened: Result | None = None
    manifest: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    def of(cls, checkpoints: str | Path | Iterable[str | Path] | Result) -> Named:
        """What is named; UsageError for a manifest that cannot be read."""
        if isinstance(checkpoints, Result):
            return cls([c.label for c in checkpoints.checkpoints], checkpoints)
        if isinstance(checkpoints, str | os.PathLike):
            checkpoints = [checkpoints]
        words = [os.fspath(place) for place in checkpoints]
        return cls(words, None, _manifest_in(words))

    @property
    def candidates(self) -> list[Candidate]:
        """The candidates of the manifest: the best of its groups first, its random sample last."""
        return _in_order(self.manifest) if self.manifest else []

    @property
    def tasks(self) -> Sequence[str]:
        """The tasks in the manifest; none without one."""
        return shortlist_manifest(self.manifest, self.words[0]).tasks if self.manifest else ()

    def arguments(self, family: str | None, *, taken: bool) -> dict[str, dict[str, str]]:
        """lm-eval's arguments of all checkpoints by name, before a screen.

        ``taken``: the words are a server's names, as they are.
        """
        if self.screened is not None:
            screened = dict[str, dict[str, str]]()
            for c in self.screened.checkpoints:
                target = c.target if c.target.local else replace(c.target, repo=c.repo)
                screened[c.target.name] = target.arguments(c.revision)
            return screened
        if self.manifest:
            return {c.target.name: self.arguments_of(c) for c in self.candidates}
        if taken:
            return {name: {"model": name} for name in self.words}
        targets = select(ScreenArguments(self.words, family=family)).targets
        return {str(target.name): target.arguments() for target in targets}

    def arguments_of(self, candidate: Candidate) -> dict[str, str]:
        """lm-eval's arguments of a candidate; an adapter that a list's script downloaded is a folder."""
        if self.manifest:
            place = Path(self.words[0]).expanduser()
            folder = place.parent if place.name == FILE else place
            downloaded = folder / DOWNLOADED / candidate.target.name
            if (downloaded / "adapter_config.json").is_file():
                return {"pretrained": str(downloaded.resolve())}
        return candidate.target.arguments(candidate.revision)


def _manifest_in(words: Sequence[str]) -> dict[str, Any]:
    """The manifest in a single named folder, of ``--emit`` or of a race; else empty."""
    if len(words) != 1:
        return {}
    path = Path(words[0]).expanduser()
    file = path if path.name == FILE else path / FILE
    try:
        content = json_in(file) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise UsageError(
            f"expected a manifest, but {file} cannot be read ({error}); remove or mend it"
        ) from error
    return content if isinstance(content, dict) else {}  # another program's


def lineup(
    named: Named,
    tasks: str,
    which: Which,
    *,
    api: bool,
    count: Callable[[], tuple[Counter[str], int]],
) -> Lineup:
    """Screen the named checkpoints and take the short list; or take a manifest's list, or all.

    Of checkpoints with equal rows, and of those that a block will order, all are taken.

    With ``api``, a server knows all by their names. ``count`` gives the tasks' answers, and the number of
    their documents.

    Raises:
        UsageError: Nothing is named, or the tasks' answers have no tokens to screen by.
    """
    if named.manifest:
        _check_unscreened(which)
        return Lineup(_entries(named, named.candidates, which), manifest=dict(named.manifest))
    if which.all and named.screened is None:
        _check_unscreened(which)
        return all_named(named.words, which.family, api=api)
    notes = list[str]()
    screened = named.screened
    if screened is None:
        screened, notes = _screened(named, tasks, which, count)
    notes += _set_aside(screened)
    failed = [f.target.name for f in screened.failed]
    if not screened.checkpoints and screened.of_base:
        # Adapters whose rows say nothing, even if their base cannot be read here: all are asked.
        taken = all_named([f.target.name for f in screened.of_base], None, api=api)
        return taken._replace(failed=failed)
    if not screened.checkpoints:
        raise UsageError(notes[0])
    chosen = screened.chosen or shortlist(screened.groups, audit_sample=which.audit_sample)
    content = manifest_dict(
        screened.head(), chosen, tasks=tasks_in(tasks), command="dispersion race"
    )
    entries = _entries(named, _in_order(content), which)
    return Lineup(entries, notes, content, failed=failed, bytes=_bytes(entries, screened))


def _check_unscreened(which: Which) -> None:
    """Raise UsageError for an argument of a screen, where none is made."""
    for name in ("base", "domain", "audit_sample"):
        if getattr(which, name):
            raise UsageError(
                "needs a screen, which a list and all checkpoints go without; leave it out",
                argument=name,
            )


def _screened(
    named: Named, tasks: str, which: Which, count: Callable[[], tuple[Counter[str], int]]
) -> tuple[Result, list[str]]:
    """The screening of the named checkpoints, and a note on tokens that the tasks' documents gave."""
    task = first_known(tasks)[0].removesuffix(SUFFIX)
    answers = None if task or which.domain else _counted(tasks, count)
    arguments = ScreenArguments(
        named.words,
        task=task or None,
        domain=which.domain,
        base=which.base,
        family=which.family,
    )
    with progress_bar() as update:
        run = Screening(arguments, answers)
        run.on_done = lambda outcome, done, count: update(done, count, outcome.label)
        screened = run.result(select(arguments))
    if answers is None or not screened.checkpoints:
        return screened, []
    tokens = [token.text.strip() for token in screened.checkpoints[0].resolution.of_ratio]
    return screened, [
        f"Screened by the {len(tokens)} tokens of {answers.about}: {' '.join(tokens)}."
    ]


def _set_aside(screened: Result) -> list[str]:
    """Notes on the checkpoints that the screen does not rank."""
    notes = [f"Not screened, so not raced: {f.label} ({f.message})." for f in screened.failed]
    for group in screened.groups:
        notes += [
            f"Set aside by the screen, so not raced: {c.label} (no ratio: {c.no_ratio})."
            for c in group.set_aside
        ]
    return notes + [
        f"Not raced, as its base could not be read: {f.label} ({f.cause})."
        for f in screened.of_base
    ]


def _entries(named: Named, candidates: Sequence[Candidate], which: Which) -> list[Entry]:
    """A list's entries: those that race first, each with the reason why it does."""
    entries = list[Entry]()
    for c in candidates:
        why = c.chosen
        if which.all:
            why = "named"
        elif which.by == "block" or (c.equal_rows and which.by is None):
            why = "block"
        entries.append(Entry(c.target.label, named.arguments_of(c), c.rank, why))
    entries.sort(key=lambda entry: entry.chosen is None)
    return entries


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
    candidates = Named.of(named).candidates
    if not candidates:
        raise UsageError(
            f"expected a short list's folder or a race's to replay, got {', '.join(named)}"
        )
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
    targets = labelled(select(ScreenArguments(names, family=family)).targets)
    for target in targets:
        if target.refused or target.is_glob:
            raise UsageError(
                target.refused[1] if target.refused else f"name each revision of {target.name}"
            )
    entries = [Entry(target.label, target.arguments(), None, chosen) for target in targets]
    return Lineup(entries, by="block")
