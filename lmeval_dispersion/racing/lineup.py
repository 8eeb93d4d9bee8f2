"""Which checkpoints race, in which order, and how much they are asked.

A :class:`Plan` says what a race will load and ask: the phases of a budget, the fewest and the most
questions.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from lmeval_screener.result.result import Result
from lmeval_screener.screened import Failed
from lmeval_screener.screening.arguments import ScreenArguments
from lmeval_screener.screening.run import Screening
from lmeval_screener.screening.selection import Selected, query_of, select
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
from lmeval_screener.targets.names import labelled, parse_targets
from lmeval_screener.tokens.answers import check_answers, first_known, tasks_in
from lmeval_screener.tokens.sets import AnswerSet
from lmeval_screener.weights.tensors import DTYPE_BITS

from lmeval_dispersion.errors import DispersionError, UsageError
from lmeval_dispersion.errors import count as counted
from lmeval_dispersion.files import json_in
from lmeval_dispersion.layouts import Form, Label, Text
from lmeval_dispersion.output import progress_bar
from lmeval_dispersion.racing.arguments import Which
from lmeval_dispersion.racing.contest import LONG, Phase, phases
from lmeval_dispersion.racing.rule import SHARED, STEP
from lmeval_dispersion.report.declared import listed
from lmeval_dispersion.store.identity import SUFFIX

_CHEAP = 2e9  # bytes of a checkpoint that loads in seconds
_BLOCK_IS_BETTER = (
    "Loading is cheap here: asking all checkpoints the same first questions (`--by block`) would "
    "order them better than the screen does."
)


_CHOSEN = ("rank", "audit", "named", "block", "base")
Why = Annotated[str, Form(lambda why: why in _CHOSEN, f"one of {', '.join(_CHOSEN)}")]


class Entry(NamedTuple):
    """One checkpoint in the list of a race.

    Attributes:
        label: Name of the checkpoint in reports.
        arguments: lm-eval's arguments for loading it.
        rank: Rank by the screen, from 1; None if it was not screened.
        chosen: Why the checkpoint races: ``rank`` if the screen ranks it high enough, ``audit`` if
            it was drawn at random, ``named`` if the command names it, or ``block`` if all are asked
            the same questions first. A ``base`` is asked as well, but cannot be the best. None if
            the checkpoint does not race.
    """

    label: Label
    arguments: Mapping[str, Text]  # lm-eval's arguments for loading it
    rank: Annotated[int, 1] | None  # in the screen's order, from 1
    chosen: Why | None  # None: it does not race

    @property
    def place(self) -> tuple[str, ...]:
        """What identifies the weights: name, adapter, revision and GGUF file, as far as given."""
        parts = list[str]()
        for key in ("pretrained", "model", "peft", "revision", "gguf_file"):
            if key in self.arguments:
                parts.append(self.arguments[key])
        return tuple(parts)


class Lineup(NamedTuple):
    """The list of a race: the checkpoints that race, in their order, then those that do not.

    Attributes:
        entries: The checkpoints.
        notes: Sentences for the report.
        manifest: Content of the short list's ``manifest.json``; None without a screen.
        by: How the checkpoints that race are ordered: ``rows``, by the screen's ranking, or
            ``block``, by their scores on the shared questions.
        failed: Checkpoints that could not be screened.
        bytes: Approximate bytes of the weights of the checkpoints that race; 0 if unknown.
    """

    entries: Sequence[Entry]
    notes: Sequence[str] = ()
    manifest: Mapping[str, Any] | None = None
    by: str = "rows"
    failed: Sequence[Failed] = ()  # those that could not be screened
    bytes: int = 0

    @property
    def reference(self) -> str:
        """Label of the base; empty without one."""
        for entry in self.entries:
            if entry.chosen == "base":
                return entry.label
        return ""

    def joined(self, later: Lineup) -> Lineup:
        """Return this list with the checkpoints of a later list added.

        Checkpoints in both lists keep their label and take the rank that they have in ``later``. A
        new checkpoint whose label is already in use is labelled with its `Entry.place`. The notes,
        the manifest and the failures are those of ``later``.
        """
        entries = {entry.place: entry for entry in self.entries}
        labels = {entry.label for entry in self.entries}
        for entry in later.entries:
            old = entries.get(entry.place)
            if old is None:
                label = "/".join(entry.place) if entry.label in labels else entry.label
                entries[entry.place] = entry._replace(label=label)
                continue
            chosen = old.chosen or entry.chosen
            if entry.chosen == "named":
                chosen = "named"
            entries[entry.place] = old._replace(rank=entry.rank, chosen=chosen)
        return self._replace(
            entries=sorted(entries.values(), key=lambda entry: entry.chosen is None),
            notes=later.notes,
            manifest=later.manifest,
            failed=later.failed,
        )

    def ordered(self, by: str | None, *, shared: bool) -> Lineup:
        """Return this list with ``by`` set, the order in which its checkpoints race.

        A note that recommends ``block`` is added if ``by`` is None, the order is ``rows``,
        ``shared`` is True, and the checkpoints are cheap to load.

        Args:
            by: ``rows``, for the screen's ranking, or ``block``, for the scores on shared
                questions. None chooses ``block`` if all checkpoints were named or the screen cannot
                rank some of them, and ``rows`` otherwise.
            shared: Whether the race can ask shared questions. If so, and if the order is
                ``block``, a base that all adapters share is added to a list without it, to be asked
                too.
        """
        raced = [entry for entry in self.entries if entry.chosen not in (None, "base")]
        order = by or self._own_order()
        bases = [base_of(entry.arguments) for entry in raced]
        adapters = [base for base in bases if base]  # merges and other whole models have none
        is_one_base = len(adapters) > 1 and all(base == adapters[0] for base in adapters)
        if order == "block" and shared and is_one_base:
            base = adapters[0]
            names = {entry.arguments.get("pretrained") for entry in self.entries}
            if base["pretrained"] not in names:
                entries = [_base_entry(base), *self.entries]
                return self._replace(entries=entries, by=order)
        is_small = 0 < self.bytes <= _CHEAP * len(raced)
        is_cheap = is_small or (is_one_base and bases == adapters)
        if order == "rows" and by is None and shared and is_cheap and len(raced) > 1:
            notes = [*self.notes, _BLOCK_IS_BETTER]
            return self._replace(by=order, notes=notes)
        return self._replace(by=order)

    def _own_order(self) -> str:
        """The order where the command names none."""
        reasons = {entry.chosen for entry in self.entries}
        if "block" in reasons or reasons <= {"named", "base"}:
            return "block"
        return "rows"


def _base_entry(base: Mapping[str, str]) -> Entry:
    name = base["pretrained"]
    label = Path(name).name if Path(name).is_dir() else name
    return Entry(f"{label} (base)", {**base, "peft": ""}, None, "base")


@dataclass(frozen=True)
class Named:
    """The checkpoints that a command names.

    Attributes:
        words: The names as given, or the labels of the screening.
        family: Name of a family of checkpoints that are named too; None without one.
        screened: The screening, if one was given in place of names.
        manifest: Content of ``manifest.json`` in the folder of a short list or of a race that was
            named; empty without one.
    """

    words: Sequence[str]
    family: str | None = None
    screened: Result | None = None
    manifest: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        checkpoints: str | Path | Iterable[str | Path] | Result,
        family: str | None = None,
    ) -> Named:
        """Return the checkpoints that a command's argument ``checkpoints`` and its ``family`` name.

        Raises:
            UsageError: A single folder is named, and the manifest in it cannot be read.
        """
        if isinstance(checkpoints, Result):
            return cls([c.label for c in checkpoints.checkpoints], family, checkpoints)
        if isinstance(checkpoints, str | os.PathLike):
            checkpoints = [checkpoints]
        words = [os.fspath(place) for place in checkpoints]
        return cls(words, family, manifest=_manifest_in(words))

    @cached_property
    def selection(self) -> Selected:
        """The checkpoints of the words and the family; a list or a listing is read once.

        Raises:
            DispersionError: The names cannot be listed, for example without a connection.
        """
        return select(ScreenArguments(self.words, family=self.family))

    @property
    def candidates(self) -> list[Candidate]:
        """The checkpoints in the manifest; empty without a manifest.

        Those chosen for their rank come first, then the random sample, then those not chosen.
        """
        return _in_order(self.manifest) if self.manifest else []

    @property
    def tasks(self) -> Sequence[str]:
        """The tasks that the manifest names; empty without a manifest."""
        return shortlist_manifest(self.manifest, self.words[0]).tasks if self.manifest else ()

    def arguments(self, *, taken: bool) -> dict[str, dict[str, str]]:
        """Return for each named checkpoint, by name, lm-eval's arguments for loading it.

        Nothing is screened for this; a screening that is already there is used.

        Args:
            taken: Whether the words are names that a server knows, and are taken as they are.

        Raises:
            DispersionError: The names cannot be listed, for example without a connection.
        """
        if self.screened is not None:
            screened = dict[str, dict[str, str]]()
            for c in self.screened.checkpoints:
                target = c.target
                if not target.local:
                    target = replace(target, repo=c.repo)
                screened[c.target.name] = target.arguments(c.revision)
            return screened
        if self.manifest:
            return {c.target.name: self.arguments_of(c) for c in self.candidates}
        if taken:
            return {name: {"model": name} for name in self.words}
        return {str(target.name): target.arguments() for target in self.selection.targets}

    def check_there(self, *, all_of_them: bool) -> None:
        """Check that the named folders exist, before anything is loaded for them.

        Args:
            all_of_them: Whether every named folder has to exist. If False, an error is raised only
                if nothing that was named exists or is a name on the Hub; otherwise a missing folder
                is reported later, as a failed checkpoint.

        Raises:
            UsageError: A named folder does not exist (see ``all_of_them``).
        """
        if self.screened is not None or self.manifest or "-" in self.words:
            return
        reasons = list[str]()
        is_any_there = any(map(query_of, self.words))
        for word in self.words:
            for target in parse_targets(word):
                if target.refused is None:
                    is_any_there = True
                elif not query_of(word):
                    reasons.append(target.refused[1])
        if reasons and (all_of_them or not is_any_there):
            raise UsageError(reasons[0])

    def arguments_of(self, candidate: Candidate) -> dict[str, str]:
        """Return lm-eval's arguments for loading a candidate.

        An adapter that the script of a named short list has downloaded is loaded from the local
        folder.
        """
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
            f"expected the manifest of a short list, but {file} cannot be read ({error}); remove it, or "
            "write the short list again"
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
    """Return the list of a race: the checkpoints that race, then those that do not.

    If the command names the folder of a short list or of a race, the list is that of its manifest.
    Otherwise, if ``which.all`` is set and no screening was given, it has all named checkpoints, and
    all race. Otherwise it is that of a screening: the one given, or one made here. If that finds
    nothing but adapters whose base cannot be read, all of them race.

    Of the list of a manifest or a screening, the short list races, and so do checkpoints with equal
    rows, which the screen cannot rank, unless ``which.by`` is set. If ``which.all`` is set, or
    ``which.by`` is ``block``, the whole list races.

    Args:
        named: The named checkpoints.
        tasks: The race's tasks, ``NAME,NAME``.
        which: The options that say which of the checkpoints race.
        api: Whether the backend is a server, which knows the checkpoints by their names.
        count: Called to count the answers in the tasks' documents; returns the counts and the
            number of documents.

    Raises:
        UsageError: A name is not that of a checkpoint, no checkpoint can be screened, the tasks'
            answers have no tokens to screen by, or an option needs a screen and there is none.
    """
    if named.manifest:
        _check_unscreened(which)
        return Lineup(_entries(named, named.candidates, which), manifest=dict(named.manifest))
    if which.all and named.screened is None:
        _check_unscreened(which)
        return all_named(named, api=api)
    notes = list[str]()
    screened = named.screened
    if screened is None:
        screened, notes = _screened(named, tasks, which, count)
    failed = screened.failed
    if not screened.checkpoints and screened.of_base:
        # Adapters whose rows say nothing, even if their base cannot be read here: all are asked.
        names = [failure.target.name for failure in screened.of_base]
        return all_named(Named(names), api=api)._replace(failed=failed)
    # Next to others, an adapter whose base cannot be read fails as any that cannot be screened.
    failed = (*failed, *screened.of_base)
    if not screened.checkpoints:
        reasons = [_not_screened(failure) for failure in failed]
        reasons += _set_aside(screened)
        raise UsageError(reasons[0])
    notes += _set_aside(screened)
    chosen = screened.chosen or shortlist(screened.groups, audit_sample=which.audit_sample)
    content = manifest_dict(
        screened.head(), chosen, tasks=tasks_in(tasks), command="dispersion race"
    )
    entries = _entries(named, _in_order(content), which)
    return Lineup(entries, notes, content, failed=failed, bytes=_bytes(entries, screened))


def choice_of(which: Which) -> dict[str, Any]:
    """Return the options that say which checkpoints race, by name, as ``race.json`` keeps them."""
    names = ("family", "domain", "base", "all", "audit_sample")
    return {name: getattr(which, name) for name in names}


def _check_unscreened(which: Which) -> None:
    """Raise UsageError for an argument of a screen, where none is made."""
    for name in ("base", "domain", "audit_sample"):
        if getattr(which, name):
            raise UsageError(
                "needs a screen, but the checkpoints of a short list, or all checkpoints (`all`), "
                "race without a screen; leave this argument out",
                argument=name,
            )


def _screened(
    named: Named,
    tasks: str,
    which: Which,
    count: Callable[[], tuple[Counter[str], int]],
) -> tuple[Result, list[str]]:
    """The screening of the named checkpoints, and a note on tokens that the tasks' documents gave."""
    task = first_known(tasks)[0].removesuffix(SUFFIX)
    answers = None if task or which.domain else _counted(tasks, count)
    arguments = ScreenArguments(
        named.words,
        tasks=task or None,
        domain=which.domain,
        base=which.base,
        family=named.family,
    )
    with progress_bar() as update:
        run = Screening(arguments, answers)
        run.on_done = lambda outcome, done, count: update(done, count, outcome.label)
        screened = run.result(named.selection)
    if answers is None or not screened.checkpoints:
        return screened, []
    resolution = screened.checkpoints[0].resolution
    tokens = [token.text.strip() for token in resolution.of_ratio]
    return screened, [
        f"Screened by {counted(len(tokens), 'token')} from {answers.about}: {' '.join(tokens)}."
    ]


def _not_screened(failed: Failed) -> str:
    return f"Not raced, because it could not be screened: {failed.label} ({failed.message})."


def _set_aside(screened: Result) -> list[str]:
    """Notes on the checkpoints that could be read and that the screen does not rank."""
    notes = list[str]()
    for group in screened.groups:
        for c in group.set_aside:
            notes.append(
                f"{c.label} is not raced, because the screen gives it no rank (no ratio: "
                f"{c.no_ratio}); to race it too, race all checkpoints without a screen (`--all`)."
            )
    return notes


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
    sizes = dict[str, int]()
    for c in screened.checkpoints:
        bits = DTYPE_BITS.get(c.dtype, 0)
        sizes[c.label] = (c.parameters or 0) * bits // 8
    loads = dict[str, int]()
    for entry in entries:
        if entry.chosen:
            weights = base_of(entry.arguments) or entry.arguments
            key = json.dumps(weights, sort_keys=True)
            loads[key] = sizes.get(entry.label, 0)
    if not all(loads.values()):
        return 0
    return sum(loads.values())


def base_of(arguments: Mapping[str, str]) -> dict[str, str]:
    """Return the arguments for loading an adapter's base.

    The result is empty if the checkpoint is a whole model, or if its base is not known.
    """
    if "pretrained" not in arguments:
        return {}
    try:
        base = with_base(arguments)
    except DispersionError:  # loading it says why
        return {}
    is_adapter = base.pop("peft", None) is not None
    return base if is_adapter else {}


def listed_results(named: Sequence[str], models: Sequence[str]) -> list[str]:
    """Return the evaluated ``models`` that are on a short list, in the order of their ranks.

    Models of the list's random sample come last.

    Args:
        named: The words of a command, which name the folder of the short list's manifest.
        models: Names of the models whose evaluations are finished.

    Raises:
        UsageError: No manifest is named, it lacks one of the models, or a listed checkpoint was not
            evaluated.
    """
    candidates = Named.of(named).candidates
    if not candidates:
        raise UsageError(
            f"expected the folder of a short list or of a race, got {', '.join(named)}; name no "
            "CHECKPOINT to race all results"
        )
    # Matched like supplied accuracies; the number in place of an accuracy is the model's position.
    rated = list[Rated]()
    for position, model in enumerate(models):
        label = model.rpartition(f"{DOWNLOADED}/")[2]
        rated.append(Rated(model, None, position, FILE, label=label))
    positions = Accuracies(tuple(rated), "")
    targets = positions.of([c.target for c in candidates])
    raced = list[str]()
    missing = list[str]()
    for target, candidate in zip(targets, candidates, strict=True):
        if not candidate.chosen:
            continue
        if target.accuracy is None:
            missing.append(target.label)
        else:
            raced.append(models[int(target.accuracy)])
    if missing:
        raise UsageError(
            f"expected results of all checkpoints that the short list in {named[0]} names, got "
            f"none for {listed(missing)}; evaluate these as well"
        )
    return raced


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
            f"expected a token set to screen by, as the tasks' answers give none ({error}); name "
            "one, or race all checkpoints without a screen (`all`)",
            argument="domain",
        ) from error
    about = f"the answers of {name} ({counted(documents, 'document')})"
    return AnswerSet(name, tasks_in(tasks), about=about, answers=dict(answers))


def all_named(named: Named, *, api: bool) -> Lineup:
    """Return a list of all named checkpoints, in the order named.

    Args:
        named: The named checkpoints.
        api: Whether the names are those by which a server knows its models.

    Raises:
        UsageError: A name is not that of a checkpoint, such as a folder that does not exist, or is
            a pattern of revisions.
        DispersionError: The names cannot be listed, for example without a connection.
    """
    if api and not named.family:
        names = dict.fromkeys(named.words)
        entries = [Entry(name, {"model": name}, None, "named") for name in names]
        return Lineup(entries, by="block")
    targets = labelled(named.selection.targets)
    for target in targets:
        if target.refused:
            raise UsageError(target.refused[1])
        if target.is_glob:
            raise UsageError(
                f"expected single revisions of {target.name}, got a pattern; name each revision"
            )
    entries = [Entry(target.label, target.arguments(), None, "named") for target in targets]
    return Lineup(entries, by="block")


# --- what they will be asked ---------------------------------------------------------------------


def questions_of(budget: int | str, everything: int) -> int:
    """Return a budget as a number of questions.

    Args:
        budget: A number, or a share ``N%`` of ``everything``.
        everything: Number of questions, summed over the checkpoints.

    Raises:
        UsageError: The budget is neither a whole number of at least 1 nor a share above 0 % and up
            to 100 %.
    """
    text = str(budget).strip()
    try:
        if text.endswith("%"):
            share = float(text[:-1])
            if not 0 < share <= 100:
                raise ValueError
            return max(1, int(everything * share / 100))
        number = int(text)
        if number < 1:
            raise ValueError
    except ValueError:
        raise UsageError(
            f"expected a number of questions, or a share such as 10%, got {text}", argument="budget"
        ) from None
    return number


def may_cut(entries: Sequence[Entry]) -> bool:
    """Whether a list is so long that only its best third may go on after the shared questions.

    A list with checkpoints that were named by the command or drawn at random is never cut.
    """
    reasons = [entry.chosen for entry in entries if entry.chosen not in (None, "base")]
    if "named" in reasons or "audit" in reasons:
        return False
    return len(reasons) >= LONG


@dataclass(frozen=True)
class Plan:
    """Which checkpoints race, and how many questions each of them may be asked.

    Attributes:
        entries: The checkpoints that race, and the base, if it is asked.
        questions: The most questions that one checkpoint is asked.
        phases: The phases in which a budget is spent; empty for a race without a budget.
        by: How the checkpoints are ordered: ``rows``, by the screen's ranking, or ``block``, by
            their scores on the shared questions.
        resident: Whether all checkpoints stay loaded, as the adapters of one base and the models of
            a server do.
        answered: Label -> number of questions to which the folder has answers.
    """

    entries: Sequence[Entry]
    questions: int
    phases: Sequence[Phase] = ()
    by: str = "rows"
    resident: bool = False
    answered: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        lineup: Lineup,
        entries: Sequence[Entry],
        questions: int,
        *,
        budget: int | None,
        api: bool,
        top: int = 1,
        answered: Mapping[str, int] = MappingProxyType({}),
    ) -> Plan:
        """Return the plan for the race of a list.

        Args:
            lineup: The list.
            entries: The checkpoints that race, and the base.
            questions: The most questions that one checkpoint is asked.
            budget: Maximum number of questions, summed over all checkpoints and spent on shared
                ones; None to race to the end.
            api: Whether the backend is a server.
            top: Number of best checkpoints wanted.
            answered: Label -> number of questions to which the folder has answers.

        Raises:
            UsageError: The budget is less than one question for each checkpoint.
        """
        others = [entry for entry in entries if entry.chosen != "base"]
        are_adapters = all(base_of(entry.arguments) for entry in others)
        resident = api or (bool(lineup.reference) and are_adapters)
        planned: Sequence[Phase] = ()
        if budget is not None:
            planned = phases(
                len(others),
                questions,
                budget,
                top=top,
                kept=resident,
                reference=len(others) < len(entries),
            )
        return cls(entries, questions, planned, lineup.by, resident, answered)

    def _counts(self, *, base: bool) -> list[int]:
        """Questions answered by each checkpoint, or by the base alone; the most first."""
        counts = list[int]()
        for entry in self.entries:
            is_base = entry.chosen == "base"
            if is_base == base:
                counts.append(self.answered.get(entry.label, 0))
        return sorted(counts, reverse=True)

    @property
    def checkpoints(self) -> int:
        """Number of checkpoints that race, without the base."""
        return len(self._counts(base=False))

    @property
    def expected(self) -> tuple[int, int]:
        """The fewest and the most questions still to be asked, summed over checkpoints and base."""
        counts = self._counts(base=False)
        bases = self._counts(base=True)
        if not self.phases:
            begin = SHARED if self.by == "block" else STEP
            first = min(begin, self.questions)
            of_bases = _missing(bases, self.questions)
            # At best the one that was asked most is the best, and the others are soon dropped.
            fewest = _missing(counts[:1], self.questions) + _missing(counts[1:], first)
            most = _missing(counts, self.questions)
            return fewest + of_bases, most + of_bases
        most = _missing(bases, self.phases[0].questions)
        fewest = most
        for phase in self.phases:
            # At best those that were asked most stay.
            fewest += _missing(counts[: phase.checkpoints], phase.questions)
            most += _missing(counts[-phase.checkpoints :], phase.questions)
            counts = [max(count, phase.questions) for count in counts]
        return fewest, most

    @property
    def loads(self) -> int:
        """Maximum number of times that weights are loaded, for all checkpoints and the base."""
        if self.resident:
            return 1
        if self.phases:
            counts = self._counts(base=False)
            loads = _asked_on(self._counts(base=True), self.phases[0].questions)
            for phase in self.phases:
                loads += min(phase.checkpoints, _asked_on(counts, phase.questions))
            return loads
        unfinished = list[Entry]()
        for entry in self.entries:
            if self.answered.get(entry.label, 0) < self.questions:
                unfinished.append(entry)
        if self.by != "block":
            return len(unfinished)
        if self.checkpoints == len(self.entries):
            return 2 * len(unfinished)
        # Adapters share their base; another one takes its place, and is loaded again at its turn.
        whole = 0
        for entry in unfinished:
            if entry.chosen != "base" and not base_of(entry.arguments):
                whole += 1
        return 4 * whole + 1

    def words(self, size: str = "") -> str:
        """Return a sentence on what the race would load and ask, for a dry run.

        ``size`` is the size of the weights in words, such as ``3 GB``; empty if unknown.
        """
        few, many = self.expected
        questions = f"{many:,}" if few == many else f"{few:,} to {many:,}"
        known = sum(self.answered.values())
        if known:
            loading = f"weights at most {counted(self.loads, 'time')}"
            asking = f"{questions} more questions ({known:,} are answered)"
        else:
            loading = counted(self.checkpoints, "checkpoint")
            if size:
                loading = f"{loading} (about {size})"
            asking = f"{questions} questions"
        race = f"Dry run, nothing was loaded: the race would load {loading} and ask {asking}"
        if not self.phases:
            return f"{race}."
        steps = list[str]()
        for phase in self.phases:
            checkpoints = counted(phase.checkpoints, "checkpoint")
            steps.append(f"{checkpoints} up to {counted(phase.questions, 'shared question')} each")
        return (
            f"{race}, with {counted(self.loads, 'load')} in {counted(len(steps), 'phase')}: "
            f"{listed(steps)}."
        )

    def forecast(self, load: float, ask: float) -> str:
        """Return a sentence on what the race will cost: loads, questions and time.

        Args:
            load: Seconds that loading a checkpoint takes.
            ask: Seconds that asking it a question takes.
        """
        few, many = self.expected
        time = time_words(self.loads * load + many * ask)
        shares = ""
        if self.checkpoints < len(self.entries):
            shares = f" (for {counted(self.checkpoints, 'checkpoint')}; adapters share their base)"
        questions = f"{many:,}" if few == many else f"{few:,} to {many:,}"
        return (
            f"The race will take up to about {time}: {counted(self.loads, 'model load')}{shares} and "
            f"{questions} questions."
        )


def time_words(seconds: float) -> str:
    """Return a time as text, such as ``40 s``, ``12 min``, ``2.5 h`` or ``7 h``."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 7200:
        return f"{round(seconds / 60)} min"
    hours = seconds / 3600
    if hours < 5:
        return f"{hours:.1f}".removesuffix(".0") + " h"
    return f"{round(hours)} h"


def _missing(counts: Sequence[int], upto: int) -> int:
    """Questions that checkpoints with so many answers need to have ``upto`` each."""
    return sum(max(0, upto - count) for count in counts)


def _asked_on(counts: Sequence[int], upto: int) -> int:
    """How many of these have fewer answers than ``upto``."""
    return sum(count < upto for count in counts)
