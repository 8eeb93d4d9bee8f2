"""Selecting checkpoints to screen: names, lists, families, listings of the Hub.

One request lists commit, file names, parameters and gating of up to 1,000 repositories. A repository then
costs no further request if its commit is cached, or if it has no weights or may not be read.
"""

from __future__ import annotations

import datetime
import fnmatch
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO
from urllib.parse import urlencode

from lmeval_dispersion.errors import UsageError, count, listed_names, printable
from lmeval_dispersion.report.cells import unguarded
from lmeval_screener.budgets import PAGES
from lmeval_screener.checkpoints.account import Account
from lmeval_screener.checkpoints.concurrency import run
from lmeval_screener.errors import ScreeningError
from lmeval_screener.formats import holds_weights
from lmeval_screener.screening.arguments import ScreenArguments
from lmeval_screener.targets.families import demo_targets, load_family
from lmeval_screener.targets.names import Listed, Target, matching_paths, parse_targets

if TYPE_CHECKING:
    from lmeval_screener.checkpoints.http import Notice
    from lmeval_screener.checkpoints.hub import Hub

_PAGE = 1000  # repositories that one request may list
_SECONDS = 60.0  # time budget for one page of a listing
_EXPAND = ("sha", "siblings", "safetensors", "gated", "private", "lastModified", "tags")
_NAME_COLUMNS = ("repo", "checkpoint", "name", "model", "repository", "id", "model_id")
_AUTHOR = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)

#: A repository's name, time of the last change (ISO 8601), and the rest of its entry in a listing.
_Entry = tuple[str, str, Listed | None]


@dataclass(frozen=True)
class Query:
    """A listing of models to request from the Hub; each field that is set narrows it.

    Attributes:
        author: Organisation or user; None for any.
        tags: Tags that every model must have; empty for any.
        pattern: Shell pattern for the models' names without the author.
    """

    author: str | None = None
    tags: tuple[str, ...] = ()
    pattern: str = "*"

    @property
    def words(self) -> str:
        """The query in words, for messages, such as ``ORG/*, tag X``."""
        parts = [f"tag {tag}" for tag in self.tags]
        if self.author:
            parts.insert(0, f"{self.author}/{self.pattern}")
        return ", ".join(parts)

    def address(self, size: int) -> str:
        """Return path and query string of the listing's first page.

        The most recently changed repositories come first. ``size`` is the number of repositories on
        a page.
        """
        query: dict[str, Any] = {"sort": "lastModified", "limit": size, "expand": _EXPAND}
        if self.author:
            query["author"] = self.author
        if self.tags:
            query["filter"] = self.tags
        return f"/api/models?{urlencode(query, doseq=True)}"


@dataclass(frozen=True)
class CompleteList:
    """All repositories of an author that match a query and that the token may see.

    Attributes:
        query: The query.
        repos: Names of the repositories.
        without_weights: Names of the repositories among them that hold no weights.
    """

    query: Query
    repos: frozenset[str]
    without_weights: frozenset[str]

    def missing(self, repo: str) -> str:
        """Return why a known repository cannot be screened any more, as a clause.

        Empty if the list has the repository with weights, or if its name does not match the query.
        """
        author, _, name = repo.partition("/")
        if author != self.query.author or not fnmatch.fnmatchcase(name, self.query.pattern):
            return ""
        if repo in self.without_weights:
            return f"{repo} has no weights any more"
        if repo not in self.repos:
            return f"{repo} is not in the list of {self.query.words}"
        return ""


@dataclass
class Selected:
    """The checkpoints of a selection, and what else its folders and listings held.

    Attributes:
        targets: The checkpoints to screen.
        left_out: Folders that lie next to the checkpoints and hold no model.
        complete: Listings with all repositories of an author that match a pattern.
        listed: Number of repositories in all listings.
        skipped: Reason, ``empty`` or ``without weights`` -> number of listed repositories that are
            not screened for this reason.
        account: Requests and bytes of the listings.
    """

    targets: list[Target] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    complete: list[CompleteList] = field(default_factory=list)
    listed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    account: Account = field(default_factory=Account)

    @property
    def sentence(self) -> str:
        """A sentence on the listings: how many repositories were listed, selected and left out.

        Without a listing it names the folders that were left out; empty if there are none.
        """
        if self.left_out and not self.listed:
            names = printable(listed_names(self.left_out))
            return f"folders left out, as they hold no model (config.json and weights): {names}"
        if not self.listed:
            return ""
        chosen = sum(target.listed is not None for target in self.targets)
        sentence = (
            f"{count(self.listed, 'repository', 'repositories')} listed, {chosen} selected, each at "
            "its current commit"
        )
        if self.skipped:
            left_out = ", ".join(f"{number} {why}" for why, number in self.skipped.items())
            sentence += f"; left out: {left_out}"
        return sentence


def select(arguments: ScreenArguments, notice: Notice | None = None) -> Selected:
    """Find the checkpoints that the arguments name, and request listings of the Hub.

    Args:
        arguments: The arguments of the screening.
        notice: Called when the Hub's rate limit makes a listing wait, as in `Screening`.

    Raises:
        ScreeningError: A listing cannot be read.
        UsageError: An argument, or the list on standard input, cannot be used as given, or a
            listing has no models.
    """
    limit = arguments.limit
    options = _queries(arguments)
    first = None if arguments.registry else _first_day(arguments.since)
    parts: list[Query | str] = []
    for text in several(arguments.checkpoints):
        for name in read_list(sys.stdin) if text == "-" else [text]:
            parts.append(query_of(name) or name)
    parts += options
    queries = [part for part in parts if isinstance(part, Query)]
    if not queries and (first is not None or limit is not None):
        step = "add an author, a tag, a base_model or ORG/*"
        if limit is None:
            step += ", or a registry, which knows what has changed"
        raise UsageError(
            f"expected a listing of the Hub, got only names; {step}",
            argument="limit" if first is None else "since",
        )
    selected = Selected()
    chosen: dict[Target, Target] = {}
    listings: list[list[Target]] = []
    if queries:
        listings = run(_listings(queries, first, limit, notice, selected))
    for part in parts:
        if isinstance(part, Query):  # a target with its commit costs less than the same one by name
            for target in listings.pop(0):
                chosen[target] = target
        else:
            for target in parse_targets(part, arguments.tokenizer, selected.left_out):
                chosen.setdefault(target, target)
    selected.targets = list(chosen.values())
    if arguments.family is not None:
        file, _, name = arguments.family.rpartition(":")
        selected.targets += load_family(name, file or None).checkpoints
    if arguments.demo:
        selected.targets += demo_targets()
    return selected


def _queries(arguments: ScreenArguments) -> list[Query]:
    """The listings that options ask for: of each author and base model, with all tags."""
    authors = _checked("author", arguments.author, _AUTHOR, "ORG")
    bases = _checked("base_model", arguments.base_model, _REPOSITORY, "ORG/NAME")
    tags = several(arguments.tag)
    if not (authors or tags or bases):
        return []
    tuned = [f"base_model:finetune:{base}" for base in bases]
    queries = []
    each: list[str | None] = [*authors] or [None]
    for author in each:
        queries += [Query(author, (*tags, tag)) for tag in tuned] or [Query(author, (*tags,))]
    return queries


def several(given: str | Iterable[str]) -> list[str]:
    """Return as a list the values of an argument that takes one text or several."""
    return [given] if isinstance(given, str) else list(given)


def _checked(
    name: str, given: str | Sequence[str], form: re.Pattern[str], example: str
) -> list[str]:
    """The values of an argument; UsageError for one that is not of the form."""
    values = several(given)
    for value in values:
        if not form.fullmatch(value):
            raise UsageError(
                f"expected {example}, got {value!r}; copy the name from a page of the Hub",
                argument=name,
            )
    return values


def _first_day(since: str | None) -> datetime.date | None:
    """The day (UTC) of a date or of ``yesterday``."""
    if since is None:
        return None
    if since == "last":
        raise UsageError(
            "'last' needs a registry, which knows the last run; name one (`--registry`)",
            argument="since",
        )
    if since == "yesterday":
        return datetime.datetime.now(datetime.timezone.utc).date() - datetime.timedelta(1)
    try:
        return datetime.date.fromisoformat(since)
    except ValueError:
        raise UsageError(
            f"expected a date such as 2026-10-31, or yesterday, got {since!r}; for a run or a time "
            "of day, name a registry (`--registry`)",
            argument="since",
        ) from None


def read_list(file: TextIO) -> list[str]:
    """Read the names of checkpoints from a list, one per line.

    Empty lines and text after ``#`` are ignored. In CSV the names are in the first column or, with
    a header, in the column ``repo``, ``checkpoint``, ``name``, ``model``, ``repository``, ``id`` or
    ``model_id``; a name gets the value of the column ``revision``, if any, as ``@REVISION``.

    Raises:
        UsageError: The list cannot be read, or names no checkpoint.
    """
    import csv

    try:
        text = file.read().removeprefix("\ufeff")
        lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines())
        table = csv.reader(line for line in lines if line)
        rows = [[unguarded(cell).strip() for cell in row] for row in table]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(
            "expected a list of checkpoints on standard input, one per line, but it cannot be "
            f"read ({error}); give plain text or CSV in UTF-8"
        ) from None
    heading = [cell.lower() for row in rows[:1] for cell in row]
    column = next((name for name in _NAME_COLUMNS if name in heading), None)
    if column is None:
        checkpoints = [row[0] for row in rows if row[0]]
    else:
        checkpoints = []
        for row in rows[1:]:
            cells = dict(zip(heading, row, strict=False))
            repo = cells.get(column)
            if repo and cells.get("revision"):
                repo += f"@{cells['revision']}"
            if repo:
                checkpoints.append(repo)
    if not checkpoints:
        raise UsageError(
            "expected checkpoints on standard input, one per line, got none; check the command "
            "before the pipe"
        )
    return checkpoints


def query_of(text: str) -> Query | None:
    """Return the query for the listing that a text such as ``ORG/*`` means.

    None for any other text. Also None if a local path matches the text, or if there is a local
    folder ORG and the text does not begin with ``hf://``.

    >>> query_of("Qwen/Qwen2.5-*").words, query_of("Qwen/Qwen2.5-7B")
    ('Qwen/Qwen2.5-*', None)
    """
    author, _, pattern = text.removeprefix("hf://").removeprefix("models/").partition("/")
    if "*" not in pattern or "/" in pattern or "@" in pattern or not _AUTHOR.fullmatch(author):
        return None
    if matching_paths(text) or (not text.startswith("hf://") and os.path.isdir(author)):
        return None
    return Query(author, pattern=pattern)


async def _listings(
    queries: Iterable[Query],
    since: datetime.date | None,
    limit: int | None,
    notice: Notice | None,
    selected: Selected,
) -> list[list[Target]]:
    """The targets of each query, up to the limit together."""
    from lmeval_screener.checkpoints.hub import Hub

    listings: list[list[Target]] = []
    async with Hub(notice=notice) as hub:
        selected.account = hub.account
        for query in queries:
            targets: list[Target] = []
            if limit != 0:
                targets = await _listed(hub, query, since, limit, selected)
            if limit is not None:
                limit -= len(targets)
            listings.append(targets)
    return listings


async def _listed(
    hub: Hub, query: Query, since: datetime.date | None, limit: int | None, selected: Selected
) -> list[Target]:
    """The targets of one query, page by page, up to the limit."""
    targets: list[Target] = []
    seen = set[str]()
    empty = set[str]()
    address: str | None = query.address(_PAGE if limit is None else min(limit, _PAGE))
    pages = set[str]()
    while address is not None:
        if address in pages or len(pages) == PAGES:
            why = "repeats a page" if address in pages else f"has more than {PAGES} pages"
            raise ScreeningError(
                "BadResponse",
                f"the listing of {query.words} {why}; set a limit (`--limit`), and check "
                "HF_ENDPOINT",
            )
        pages.add(address)
        account = hub.account.part(_SECONDS)
        entries, address = await account.bounded(
            hub.page(address, query.words, _parse_page, account)
        )
        for repo, changed, listed in entries:
            if since is not None and changed and changed < since.isoformat():
                address = None  # the others changed earlier still
                break
            # A list that changes while it is read may name a repository twice.
            if repo in seen or not fnmatch.fnmatchcase(repo.partition("/")[2], query.pattern):
                continue
            seen.add(repo)
            selected.listed += 1
            if listed is None or not holds_weights(listed.files):
                selected.skipped["without weights" if listed else "empty"] += 1
                empty.add(repo)
            else:
                targets.append(Target(repo, listed=listed))
            if len(targets) == limit:
                return targets
    if not seen:
        step = "check the spelling" if since is None else "check the spelling and the date"
        raise UsageError(f"expected models on the Hub for {query.words}, got none; {step}")
    if query.author and not query.tags and since is None:
        selected.complete.append(CompleteList(query, frozenset(seen), frozenset(empty)))
    return targets


def _parse_page(page: Any) -> list[_Entry]:
    """Repositories from one page of ``/api/models?expand=sha&expand=siblings&…``."""
    from lmeval_screener.checkpoints.hub import items, parse_listing, repository_name

    entries: list[_Entry] = []
    for info in items(page):
        listed = None
        # A repository without a commit is empty, and listed nevertheless.
        if info.get("sha") and info.get("siblings") is not None:
            files = parse_listing(info)
            listed = Listed(
                files.commit,
                tuple(files.files),
                files.parameters,
                gated=info.get("gated") not in (None, False),
                base=files.base,
                private=files.private,
            )
        changed = info.get("lastModified")
        if not isinstance(changed, str):
            changed = ""
        entries.append((repository_name(info["id"]), changed, listed))
    return entries
