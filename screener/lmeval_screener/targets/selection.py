"""Which checkpoints are meant: lists of the Hub, lists in files, families, the demo.

A list of repositories brings commit, file names, parameters and gating of up to 1,000 of them in one request,
so that one whose commit is cached costs no request at all, and one without weights or rights neither.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.paths import data_folder
from lmeval_screener.checkpoints import Meter
from lmeval_screener.errors import ScreeningError
from lmeval_screener.targets import Listed, Target, matching_paths, parse_target, parse_targets
from lmeval_screener.yaml_fields import load_yaml, mistake, nearest

if TYPE_CHECKING:
    import datetime

    from lmeval_screener.checkpoints.hub import Hub
    from lmeval_screener.checkpoints.limits import Allowance

# The command's help needs this module's options at once: what else it takes is imported where it is used.

#: Repositories that one request may list.
PAGE = 1000
_SECONDS = 60.0  # for one page
_EXPAND = ("sha", "siblings", "safetensors", "gated", "lastModified")
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
_NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scheduler.bin")
_NAMES = ("repo", "checkpoint", "name", "model", "repository", "id", "model_id")
_AUTHOR = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_SLUG = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


@dataclass(frozen=True)
class Query:
    """One list of repositories to ask for; what is set narrows it.

    Attributes:
        author: Organisation or user.
        tags: Tags that all have.
        collection: ``OWNER/SLUG`` in place of all others.
        pattern: Glob that the name without its author has to match.
    """

    author: str | None = None
    tags: tuple[str, ...] = ()
    collection: str | None = None
    pattern: str | None = None

    @property
    def words(self) -> str:
        """The query as a user would say it."""
        if self.collection:
            return f"collection {self.collection}"
        parts = [f"{self.author}/{self.pattern or '*'}"] if self.author else []
        return ", ".join([*parts, *(f"tag {tag}" for tag in self.tags)])

    def address(self, size: int) -> str:
        """Path and query of its first page, the repositories that changed last first."""
        from urllib.parse import quote, urlencode

        if self.collection:
            return f"/api/collections/{quote(self.collection)}"
        asked: list[tuple[str, str]] = []
        asked += [("author", self.author)] if self.author else []
        asked += [("filter", tag) for tag in self.tags]
        asked += [("sort", "lastModified"), ("limit", str(size)), *(("expand", name) for name in _EXPAND)]
        return f"/api/models?{urlencode(asked)}"


@dataclass(frozen=True)
class Selection:
    """Lists of the Hub to screen beside what is named.

    Attributes:
        queries: Lists to ask for; what each names is added.
        since: Only what changed on that day (UTC) or later; None: all.
        limit: At most so many of all that is selected; None: all.
    """

    queries: tuple[Query, ...] = ()
    since: datetime.date | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        """Refuse limits that select nothing."""
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"expected --limit of at least 1, got {self.limit}")


@dataclass
class Selected:
    """The checkpoints of a selection.

    Attributes:
        targets: Checkpoints, each one once, in the order in which they were named and listed.
        listed: Repositories that the lists held.
        skipped: Why some are no target, and how many.
        meter: What the lists cost.
    """

    targets: list[Target]
    listed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    meter: Meter = field(default_factory=Meter)

    @property
    def sentence(self) -> str:
        """How many were selected and why others were not; empty where no list was asked for."""
        if not self.listed:
            return ""
        chosen = sum(target.listed is not None for target in self.targets)
        left_out = ", ".join(f"{count} {why}" for why, count in self.skipped.items())
        return f"{self.listed} repositories listed, {chosen} taken with their commits" + (
            f"; left out: {left_out}" if left_out else ""
        )


def add_selection_options(parser: argparse._ActionsContainer) -> None:
    """Add the options that select checkpoints of a registry; `selection_of` reads them."""
    parser.add_argument(
        "--author",
        action="append",
        default=[],
        metavar="NAME",
        help="all models of an organisation or user (default: none)",
    )
    parser.add_argument(
        "--tag",
        action="append",
        default=[],
        metavar="NAME",
        help="models with this tag of the Hub (default: none)",
    )
    parser.add_argument(
        "--base-model",
        action="append",
        default=[],
        metavar="CHECKPOINT",
        help="its fine-tunes, as the Hub knows them (default: none)",
    )
    parser.add_argument(
        "--collection",
        action="append",
        default=[],
        metavar="NAME",
        help="models of a collection, as its address names it (default: none)",
    )
    parser.add_argument(
        "--since",
        metavar="DATE",
        help="of what is listed: changed then or later; with --registry all is screened, and the answer is "
        "what is new since then: a date, yesterday, or a run of the registry (default: all)",
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="of what is listed: the N that changed last (default: all)"
    )
    parser.add_argument(
        "--from",
        dest="lists",
        action="append",
        default=[],
        metavar="FILE",
        help="a list of checkpoints, one a line or a CSV file's first column; - is standard input "
        "(default: none)",
    )


def selection_of(args: argparse.Namespace) -> Selection:
    """The selection that options describe."""
    import datetime

    tags = tuple(args.tag)
    for option, values, form in (
        ("--author", args.author, _AUTHOR),
        ("--collection", args.collection, _SLUG),
        ("--base-model", args.base_model, _SLUG),
    ):
        for value in values:
            if not form.fullmatch(value):
                example = "ORG" if form is _AUTHOR else "OWNER/SLUG" if "coll" in option else "ORG/NAME"
                raise UsageError(f"expected {option} such as {example}, got {value!r}; copy it from its page")
    queries = [
        Query(author, (*tags, *(f"base_model:finetune:{base}" for base in bases)))
        for author in args.author or [None]
        for bases in [[base] for base in args.base_model] or [[]]
    ]
    if not (args.author or tags or args.base_model):
        queries = []
    queries += [Query(collection=slug) for slug in args.collection]
    since = None
    if args.since is not None and getattr(args, "registry", None) is None:
        try:
            since = datetime.date.fromisoformat(args.since)
        except ValueError:
            raise UsageError(f"expected --since such as 2026-10-31, got {args.since!r}") from None
    return Selection(tuple(queries), since, args.limit)


def read_list(path: str) -> list[str]:
    """Checkpoints of a list, as a user would write each.

    One a line; empty lines and what follows ``#`` count for nothing. Of a CSV file the first column counts;
    with a header, the column ``repo``, ``checkpoint``, ``name`` or ``model``, and ``revision`` beside it.
    """
    import csv

    where = "standard input" if path == "-" else path
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"expected a list of checkpoints in {where}, one a line; {error}") from None
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines())
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(line for line in lines if line)]
    except csv.Error as error:
        raise UsageError(
            f"expected one checkpoint a line in {where}, got a line that is none: {error}"
        ) from None
    head = [cell.lower() for cell in rows[0]] if rows else []
    column, revision = next((head.index(name) for name in _NAMES if name in head), None), None
    if column is not None:
        rows, revision = rows[1:], head.index("revision") if "revision" in head else None
    checkpoints = []
    for row in rows:
        name = row[column or 0] if len(row) > (column or 0) else ""
        at = row[revision] if revision is not None and len(row) > revision else ""
        checkpoints += [f"{name}@{at}" if at else name] if name else []
    if not checkpoints:
        raise UsageError(f"expected checkpoints in {where}, one a line, got none; check what wrote it")
    return checkpoints


def select_targets(
    texts: Sequence[str],
    selection: Selection,
    lists: Iterable[str] = (),
    *,
    allowance: Allowance | None = None,
    tokenizer: str | None = None,
) -> Selected:
    """The targets that names, lists and selections stand for, together."""
    named: list[str] = []
    for text in (*texts, *(f"--from {path}" for path in lists)):
        path = text.removeprefix("--from ") if text.startswith("--from ") else "-" * (text == "-")
        named += read_list(path) if path else [text]
    parts: list[str | Query] = [query_of(text) or text for text in named]
    parts += selection.queries
    if not any(isinstance(part, Query) for part in parts):
        if selection.since is not None or selection.limit is not None:
            raise UsageError(
                "expected something to list with --since and --limit, got names only; add --author, "
                "--tag, --base-model, --collection or ORG/*"
            )
        return Selected(parse_targets(named, tokenizer))
    import asyncio

    from lmeval_screener.checkpoints.hub import Hub

    async def work() -> Selected:
        async with Hub(allowance=allowance) as hub:
            selected = await _gathered(hub, parts, selection, tokenizer)
            selected.meter = hub.meter
            return selected

    return asyncio.run(work())


def query_of(text: str) -> Query | None:
    """The query that ``ORG/*`` stands for; None for another text, and where it matches on disk.

    >>> query_of("Qwen/Qwen2.5-*").words, query_of("Qwen/Qwen2.5-7B")
    ('Qwen/Qwen2.5-*', None)
    """
    author, _, pattern = text.removeprefix("hf://").removeprefix("models/").partition("/")
    if "*" not in pattern or "/" in pattern or "@" in pattern or not _AUTHOR.fullmatch(author):
        return None
    return None if matching_paths(text) else Query(author, pattern=None if pattern == "*" else pattern)


async def _gathered(
    hub: Hub, parts: Sequence[str | Query], selection: Selection, tokenizer: str | None
) -> Selected:
    selected = Selected([])
    chosen: dict[Target, Target] = {}
    taken = 0
    for part in parts:
        if isinstance(part, str):
            for target in parse_targets([part], tokenizer):
                chosen.setdefault(target, target)
        elif selection.limit is None or taken < selection.limit:
            left = None if selection.limit is None else selection.limit - taken
            for target in await _listed(hub, part, selection.since, left, selected):
                taken += 1
                # One with its commit costs less than the same one by name.
                chosen[target] = target
    selected.targets = list(chosen.values())
    return selected


async def _listed(
    hub: Hub, query: Query, since: datetime.date | None, limit: int | None, selected: Selected
) -> list[Target]:
    """The targets of one query, page by page, as many as are wanted."""
    import fnmatch

    from lmeval_screener.checkpoints.limits import Budget

    targets: list[Target] = []
    seen: set[str] = set()
    address: str | None = query.address(PAGE if limit is None else min(limit, PAGE))
    parse = _parse_collection if query.collection else _parse_page
    while address is not None:
        budget = Budget(_SECONDS)
        try:
            page = hub.page(address, query.words, parse, budget)
            (entries, others), address = await budget.bounded(page)
        except ScreeningError as error:
            if error.code != "RepoNotFound":
                raise
            raise UsageError(
                f"expected something that the Hub lists, got {query.words}: {hub.endpoint} has no such list, "
                "or it is private; check the name, or log in (hf auth login, or set HF_TOKEN)"
            ) from None
        if others:
            selected.skipped["no models"] += others
        for entry in entries:
            if since is not None and entry.changed and entry.changed < since.isoformat():
                if not query.collection:
                    address = None  # the others changed earlier still
                    break
                selected.skipped["changed before"] += 1
                continue
            if entry.repo in seen:
                continue  # a list that moves while it is read names some of its entries twice
            seen.add(entry.repo)
            if query.pattern and not fnmatch.fnmatchcase(entry.repo.partition("/")[2], query.pattern):
                continue
            selected.listed += 1
            if entry.listed is None and not query.collection:
                selected.skipped["empty"] += 1
            elif entry.listed is not None and not has_weights(entry.listed.files):
                selected.skipped["without weights"] += 1
            else:
                targets.append(Target(entry.repo, listed=entry.listed))
            if len(targets) == limit:
                return targets
    if not seen:
        raise UsageError(
            f"expected models of {query.words} on the Hub, got none; check the spelling and --since"
        )
    return targets


@dataclass(frozen=True)
class _Entry:
    """One repository of a list."""

    repo: str
    changed: str
    listed: Listed | None


def _parse_page(page: Any) -> tuple[list[_Entry], int]:
    """Repositories from one page of ``/api/models?expand=sha&expand=siblings&…``; none is something else."""
    from lmeval_screener.checkpoints.hub import items, parse_listing, text

    entries = []
    for info in items(page):
        listed = None
        # A repository without a commit is empty, and listed nevertheless.
        if info.get("sha") and info.get("siblings") is not None:
            files = parse_listing(info)
            is_gated = info.get("gated") not in (None, False)
            listed = Listed(files.commit, tuple(files.files), files.parameters, is_gated)
        entries.append(_Entry(text(info["id"]), info.get("lastModified") or "", listed))
    return entries, 0


def _parse_collection(collection: Any) -> tuple[list[_Entry], int]:
    """Models of ``/api/collections/{slug}``, and how many of its items are none."""
    from lmeval_screener.checkpoints.hub import items, text

    entries = items(collection["items"])
    models = [item for item in entries if item["type"] == "model"]
    return [_Entry(text(m["id"]), m.get("lastModified") or "", None) for m in models], len(entries) - len(
        models
    )


def has_weights(files: Iterable[str]) -> bool:
    """Whether a file of a repository may hold weights: of a model or of an adapter."""
    return any(path.endswith(_WEIGHTS) and path.rpartition("/")[2] not in _NO_WEIGHTS for path in files)


_BUNDLED = Path(__file__).resolve().parent / "families.yaml"


@dataclass(frozen=True)
class _Checkpoint:
    repo: str
    scale: str
    revision: str = ""
    kind: Any = None  # base, instruct, trajectory, …: a word for readers of the file


@dataclass(frozen=True)
class _Family:
    checkpoints: tuple[_Checkpoint, ...]
    note: str = ""


@dataclass(frozen=True)
class _File:
    schema: Literal[1]
    families: dict[str, _Family]
    notes: Any = None


@dataclass(frozen=True)
class Family:
    """Checkpoints with one tokenizer.

    Attributes:
        name: As ``--family`` takes it.
        checkpoints: In the file's order: scales ascending. Every one has its ``scale``; a revision may be a
            glob over branches and tags (a training trajectory).
        note: Something that a user should know of the family; empty for most.
    """

    name: str
    checkpoints: tuple[Target, ...]
    note: str

    @property
    def scales(self) -> tuple[str, ...]:
        """The scales, each once, in the file's order."""
        return tuple(dict.fromkeys(target.scale for target in self.checkpoints if target.scale))


def load_families(path: str | Path | None = None) -> dict[str, Family]:
    """All families of a file, by name."""
    file = _BUNDLED if path is None else Path(path)
    families = {}
    for name, family in load_yaml(_File, file).families.items():
        checkpoints: dict[tuple[str, str | None], Target] = {}
        for position, entry in enumerate(family.checkpoints):
            target = parse_target(entry.repo)
            target = replace(
                target, revision=entry.revision or target.revision, family=name, scale=entry.scale
            )
            if checkpoints.setdefault((target.repo, target.revision), target) is not target:
                key = f"families.{name}.checkpoints[{position}]"
                raise mistake(file, key, "each checkpoint once", target.repo, "remove one")
        families[name] = Family(name, tuple(checkpoints.values()), family.note)
    return families


def load_family(name: str, path: str | Path | None = None) -> Family:
    """One family by name."""
    families = load_families(path)
    for known, family in families.items():
        if known.lower() == name.lower():
            return family
    where = "" if path is None else f" in {path}"
    raise UsageError(
        f"there is no family {name!r}{where}{nearest(name, families)}; known: {', '.join(families)}"
    )


def demo_targets() -> list[Target]:
    """The demo's checkpoints, with the accuracy that was measured when they were trained."""
    import yaml

    folder = data_folder("demo")
    family = yaml.safe_load((folder / "family.yaml").read_text(encoding="utf-8"))
    return [
        Target(
            str(folder / entry["folder"]),
            family=family["name"],
            local=True,
            accuracy=float(entry["accuracy"]["mean"]),
            negative_control=entry["answers"] != "right",
        )
        for entry in family["checkpoints"]
    ]
