"""A registry's queries, answered as reports: ranks across runs, a checkpoint's history, SQL."""

from __future__ import annotations

import difflib
import os
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from lmeval_dispersion.errors import UsageError, without_secrets
from lmeval_dispersion.report import Col, Column, Report, Row, Table
from lmeval_dispersion.report.cells import json_value
from lmeval_dispersion.report.declared import count, listed, some
from lmeval_dispersion.report.document import columns_of, fields_of
from lmeval_screener import ranking
from lmeval_screener.orders import UNSAID, Order
from lmeval_screener.registry.database import Seen, identity_of, last_seen, plain_name
from lmeval_screener.registry.states import cause_of, folder_is_gone
from lmeval_screener.result.answer import sentences_of, unknown
from lmeval_screener.screened import Group, Screened, grouped
from lmeval_screener.targets.names import storable
from lmeval_screener.weights.copies import said

_TABLES = ("checkpoints", "results", "seen", "runs", "tokenizers", "names")
_STATEMENT = 10_000  # characters of a statement that are looked through for names of tables
_LIMIT = 60.0  # seconds that SQL may take
_LONG = 40  # rows of a table that a terminal shows whole
_HASH = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{20,52}\b")
_WIDE = 100  # characters of a line beyond which each value of a row gets its own line


@dataclass(frozen=True, repr=False)
class Answer(Report):
    """A query's answer: sentences and one table of rows.

    Attributes:
        title: Heading of the report.
        name: Anchor of the table.
        sentences: The answer's sentences.
        entries: Rows, as dataclasses or mappings.
        places: Positions of the rows that a terminal shows; empty for all.
    """

    template: ClassVar[str] = "answer.jinja"
    schema: ClassVar[str] = "dispersion-registry/1"
    guide: ClassVar[str] = "docs/reference/registry.md"
    each: ClassVar[str] = "entries"

    title: str
    name: str
    sentences: Sequence[str]
    entries: Sequence[Any]
    places: Sequence[int] = ()

    def rows(self) -> list[Row]:
        """The rows as mappings."""
        return [row if isinstance(row, dict) else fields_of(row) for row in self.entries]

    def tables(self) -> dict[str, Table]:
        """One table, ``rows``; a line for each value if mappings are wider than 100 characters."""
        rows = self.rows()
        if not rows or not isinstance(self.entries[0], dict):
            row_type: type = type(self.entries[0]) if rows else object
            short = [{name: _short(value) for name, value in row.items()} for row in rows]
            drawn = columns_of(row_type)
            table = Table.of(short, self.title, columns=drawn, name=self.name, excerpt=self.places)
            return {"rows": table}
        columns = [Column(column, column) for column in rows[0]]
        if sum(2 + max(len(n), *(len(str(row[n])) for row in rows)) for n in rows[0]) > _WIDE:
            columns = [
                Column("row", "Row", "d"),
                Column("column", "Column"),
                Column("value", "Value"),
            ]
            rows = [
                {"row": number, "column": column, "value": value}
                for number, row in enumerate(rows, 1)
                for column, value in row.items()
            ]
        return {"rows": Table(rows, columns, self.title, self.name)}

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract ``dispersion-registry/1`` as plain Python values: schema, answer and rows."""
        return {
            "schema": self.schema,
            "answer": list(self.sentences),
            "rows": json_value(self.rows()),
        }


def _short(value: Any) -> Any:
    """A value as tables have it: a commit, or another hash, is known by its first twelve digits."""
    return _HASH.sub(r"\1", value) if isinstance(value, str) else value


def sets_of(connection: sqlite3.Connection, domain: str | None) -> tuple[str, str, str]:
    """Key, domain, reference of ``domain``'s last run, else of the domain with most results; else UsageError.

    The last run, as another version may have other words of everyday language under the same name.
    """
    rows = connection.execute(
        "SELECT tokens, domain, reference, max(started), "
        "(SELECT count(*) FROM results r WHERE r.tokens = runs.tokens) AS results "
        "FROM runs GROUP BY tokens ORDER BY max(started) DESC, tokens"
    ).fetchall()
    if not rows:
        raise UsageError(
            "the registry has no results yet; `screen-checkpoints … --registry FILE` adds some"
        )
    if domain is None:
        domain = max(rows, key=lambda row: int(row["results"]))["domain"]
    chosen = next((row for row in rows if row["domain"] == domain), None)
    if chosen is None:
        names = ", ".join(sorted({row["domain"] for row in rows}))
        raise UsageError(f"expected a domain that the registry has, got {domain!r}; it has {names}")
    return chosen["tokens"], chosen["domain"], chosen["reference"]


def is_gone(seen: Seen) -> bool:
    """Whether a checkpoint is gone, by the last attempt to read it; a folder is looked for again now."""
    is_lost = seen.error in ("", "FolderNotFound") and folder_is_gone(seen.identity)
    return is_lost or cause_of(seen.error).state == "gone"


def ranked_rows(
    seen: Sequence[Seen], order: Order = UNSAID, bases: Collection[str] = ()
) -> list[Screened]:
    """All measured checkpoints, ranked in groups of one tokenizer and scale; ``bases`` are labels.

    Two tokenizers count as the same if every compared token is the same piece at the same row.
    """
    known: dict[int, tuple[object, ...]] = {}  # by a resolution, which many checkpoints share
    commons: dict[tuple[object, ...], str] = {}
    of_family: dict[str, tuple[object, ...]] = {}
    readings = []
    for reading in (entry.reading for entry in seen if entry.reading is not None):
        family = reading.target.family
        resolution = reading.resolution
        if id(resolution) not in known:
            known[id(resolution)] = tuple((token.piece, token.id) for token in resolution.compared)
        tokens = known[id(resolution)]
        target = reading.target
        if family is not None and of_family.setdefault(family, tokens) != tokens:
            # Rows other than its family's: a group for its tokenizer.
            target = replace(target, family=None)
        common = commons.setdefault(tokens, reading.tokenizer)
        readings.append(replace(reading, target=target, common=common))
    return ranking.ranked(readings, order, bases)


def bases_among(
    connection: sqlite3.Connection, tokens: str, seen: Sequence[Seen], asked: str | None
) -> list[str]:
    """Labels of the base ``asked`` for (UsageError if unknown), else of those in the last run with any."""
    if asked is not None:
        exact = [
            entry.target.label for entry in seen if asked in (entry.target.label, entry.target.name)
        ]
        identity = "" if exact else checkpoint_named(connection, asked)[0]
        return exact or [entry.target.label for entry in seen if entry.identity == identity]
    last = "SELECT bases, max(ended) FROM runs WHERE tokens = ? AND bases <> ''"
    (bases, _) = connection.execute(last, [tokens]).fetchone()
    places = {*(bases or "").splitlines()}
    return [entry.target.label for entry in seen if entry.reading and entry.reading.place in places]


@dataclass(frozen=True)
class Ranked:
    """A registry's checkpoint in `query`; figures are None if unknown or gone, a base has no rank."""

    checkpoint: Annotated[str, Col("Checkpoint")]
    family: str | None = None
    group: Annotated[str | None, Col("Group", drop=2)] = None
    rank: Annotated[int | None, Col("Rank", "d", short="#")] = None
    ratio: Annotated[
        float | None, Col("Ratio", ".3f", dots="page", hint="spread of T over that of R")
    ] = None
    G: Annotated[float | None, Col("G", ".3f", drop=1)] = None
    se: float | None = None  # of G
    metric: str | None = None  # the distance of G
    ranked_by: str | None = None  # ``gap`` or ``ratio``
    holds_best: float | None = None  # chance that ranks 1 to here hold it
    revision: Annotated[str | None, Col("Commit", drop=3)] = None  # None for a folder
    copy_of: Annotated[str | None, Col("Copy of")] = None  # label of its original
    note: Annotated[str | None, Col("Note")] = (
        None  # gone, the base, or `as of DAY: ERROR` for older figures
    )


@dataclass(frozen=True)
class Sighting:
    """One state of a checkpoint, seen by one or more consecutive runs; figures are None where it failed."""

    requested: Annotated[str, Col("Revision")]
    file: Annotated[str, Col("File")]
    state: Annotated[str, Col("Commit")]  # or a hash of a listing; empty if it was not reached
    domain: Annotated[str, Col("Domain")]
    reference: str
    ratio: Annotated[float | None, Col("Ratio", ".3f", error="ratio_se")]
    ratio_se: float | None
    cosine: Annotated[float | None, Col("G cosine", ".3f")]
    cosine_se: float | None
    euclidean: Annotated[float | None, Col("G euclidean", ".3f", drop=1)]
    euclidean_se: float | None
    tensor: str | None
    dtype: str | None
    first: Annotated[str, Col("First seen", drop=2)]  # as 2026-11-23 02:17, UTC; so is the next
    last: Annotated[str, Col("Last seen")]
    runs: Annotated[int, Col("Runs", "d", drop=3)]
    error: Annotated[str | None, Col("Error")]  # a code; None if it was read, as the next
    message: Annotated[str | None, Col("Why", drop=4)]


def checkpoint_named(connection: sqlite3.Connection, text: str) -> tuple[str, str]:
    """Identity and file (or "") of the one checkpoint with this label, path or address; else UsageError."""
    place = storable(f"file://{Path(os.path.expanduser(text)).resolve()}")
    text = storable(without_secrets(text))
    asked = [text, f"hf://{text}", place]
    renamed = connection.execute("SELECT identity FROM names WHERE asked IN (?, ?, ?)", asked)
    exact = {*asked, *(row[0] for row in renamed)}
    keys = [row[0] for row in connection.execute("SELECT DISTINCT tokens FROM seen")]
    seen = [entry for tokens in keys for entry in last_seen(connection, tokens)]
    matches = {(entry.identity, "") for entry in seen if entry.identity in exact}
    if not matches:
        # A label is the end of a path, followed by a revision or a file.
        files = [(entry, storable(entry.target.file or "")) for entry in seen]
        matches = {
            (entry.identity, file)
            for entry, file in files
            if text in (entry.target.label, entry.target.name)
            or f"{entry.identity}/{file}" in exact
        } or {
            (entry.identity, "") for entry in seen if entry.identity.endswith(f"/{text.strip('/')}")
        }
    if not matches:
        near = difflib.get_close_matches(text, {entry.target.label for entry in seen}, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise UsageError(
            f"expected a checkpoint that the registry has seen, got {text}; {meant}query lists them"
        )
    if len(matches) > 1:
        names = ", ".join("/".join(filter(None, match)) for match in sorted(matches)[:5])
        raise UsageError(f"expected one checkpoint, got {text}, which {len(matches)} have: {names}")
    return matches.pop()


def query(
    connection: sqlite3.Connection,
    order: Order,
    base: str | None,
    domain: str | None,
    scale: str | None = None,
    top: int | None = None,
) -> Answer:
    """The checkpoints' latest states, ranked across runs; raises as `sets_of` and `bases_among`."""
    tokens, domain, reference = sets_of(connection, domain)
    seen = last_seen(connection, tokens)
    gone = dict.fromkeys(entry.target.label for entry in seen if is_gone(entry))
    bases = bases_among(connection, tokens, seen, base)
    checkpoints = ranked_rows([e for e in seen if e.target.label not in gone], order, bases)
    groups = grouped(c for c in checkpoints if scale in (None, c.scale))
    kept = {
        entry.target.label: f"as of {entry.as_of}: {entry.error}" for entry in seen if entry.as_of
    }
    rows = [
        Ranked(
            checkpoint=c.label,
            family=c.family,
            group=group.title,
            rank=c.rank if group.has_place(c) else None,
            ratio=None if c.ratio is None else c.ratio.mean,
            G=c.gap.mean,
            se=c.gap.se,
            metric=c.metric,
            ranked_by=c.ranked_by,
            holds_best=group.holds_best(c),
            revision=c.revision,
            copy_of=c.copy_of,
            note=kept.get(c.label) or _note(c),
        )
        for group in groups
        for c in _best(group, top)
    ]
    if scale is None and top is None:
        rows += [Ranked(label, note="gone") for label in gone]
    failed = [
        f"{entry.target.label} ({entry.error})"
        for entry in seen
        if entry.error and entry.target.label not in gone
    ]
    members = [c for group in groups for c in group.checkpoints]
    best = sentences_of(groups, domain, domain) + unknown(
        members, alone=len(members) == len(groups)
    )
    total = f"{count(len(members), 'checkpoint')} in {count(len(groups), 'group')}"
    sentence = f"{total} for {domain} against {reference}; {len(gone)} gone, {len(failed)} failed when last seen"
    sentence += f": {some(failed)}." if failed else "."
    places = () if top else excerpt([row.group for row in rows])
    return Answer("Checkpoints of the registry", "checkpoints", [*best, sentence], rows, places)


def _note(c: Screened) -> str | None:
    """Why a member has no rank; None for others."""
    if c.is_base:
        return "the base"
    return f"set aside, no ratio: {c.no_ratio}" if c.is_set_aside else None


def excerpt(kinds: Sequence[object]) -> tuple[int, ...]:
    """Positions of the rows that a terminal shows: the first few of each kind; empty (all) for up to 40."""
    most, before = max(1, _LONG // max(1, len(set(kinds)))), Counter[object]()
    if len(kinds) <= _LONG:
        return ()
    first = []
    for place, kind in enumerate(kinds):
        before[kind] += 1
        first += [place] if before[kind] <= most else []
    return tuple(first[:_LONG])


def _best(group: Group, top: int | None) -> Sequence[Screened]:
    """The best checkpoints of a group, with their copies, which do not count."""
    originals = [place for place, c in enumerate(group.checkpoints) if not (c.copy_of or c.is_base)]
    return group.checkpoints[: originals[top] if top is not None and top < len(originals) else None]


def sql_answer(connection: sqlite3.Connection, statement: str) -> Answer:
    """The rows of an SQL SELECT; UsageError if SQLite refuses it or it takes over 60 seconds."""
    deadline = time.monotonic() + _LIMIT
    connection.set_progress_handler(lambda: time.monotonic() > deadline, 100_000)
    try:
        cursor = connection.execute(statement)
        # Columns with the same name are numbered: SELECT 1 a, 2 a.
        heads = [name for name, *_ in cursor.description or ()]  # None without a statement
        before = [heads[:place].count(name) for place, name in enumerate(heads)]
        names = [
            f"{name}:{number}" if number else name
            for name, number in zip(heads, before, strict=True)
        ]
        rows = [dict(zip(names, row, strict=True)) for row in cursor]
    except (sqlite3.Error, sqlite3.Warning) as error:
        tables = f"of {listed(_TABLES, 'or')} " if "no such table" in str(error) else ""
        there = _columns_for(connection, statement) if "no such column" in str(error) else ""
        raise UsageError(
            f"the registry could not answer: {error}{there}; it takes one SQLite SELECT {tables}that ends "
            f"within {_LIMIT:.0f} seconds"
        ) from error
    for row in rows:
        row |= {
            key: f"{len(value)} bytes" for key, value in row.items() if isinstance(value, bytes)
        }
    return Answer("Answer of the registry", "answer", [f"{count(len(rows), 'row')}."], rows)


def _columns_for(connection: sqlite3.Connection, statement: str) -> str:
    """The columns of the tables that a statement names, as the end of a clause; empty for none."""
    named = {word.lower() for word in re.findall(r"\w+", statement[:_STATEMENT])}
    kinds = [table for table in _TABLES if table in named]
    there = []
    for table in kinds:
        cursor = connection.execute(f"SELECT * FROM {table} LIMIT 0")
        there.append(f"{table} has {', '.join(name for name, *_ in cursor.description)}")
    return "".join(f"; {columns}" for columns in there)


def history(connection: sqlite3.Connection, text: str) -> Answer:
    """The history of the checkpoint named by ``text``, newest first; raises as :func:`checkpoint_named`."""
    identity, file = checkpoint_named(connection, text)
    sightings = connection.execute(
        "SELECT requested, file, state, domain, reference, ratio, ratio_se, gap_cosine, gap_cosine_se, "
        "gap_euclidean, gap_euclidean_se, tensor, dtype, first, last, runs, error, message "
        "FROM sightings WHERE identity = ? AND ? IN ('', file) ORDER BY last DESC",
        [identity, file],
    )
    rows = [Sighting(*row) for row in sightings]
    rows = [replace(row, first=row.first[:16], last=row.last[:16]) for row in rows]
    commits = len({row.state for row in rows if row.state})
    sentence = f"{text}: {count(commits, 'commit')} seen, last on {rows[0].last}"
    if rows[0].error:
        state = "is gone" if cause_of(rows[0].error).state == "gone" else "failed then"
        sentence += f"; it {state} ({rows[0].error})"
        stands = cause_of(rows[0].error).state == "unknown" and len(rows) > 1 and not rows[1].error
        sentence += f", and its figures as of {rows[1].last[:10]} still hold" if stands else ""
    sentence += "."
    renamed = "SELECT asked FROM names WHERE identity = ? AND renamed IS NOT NULL ORDER BY renamed"
    former = [plain_name(asked) for (asked,) in connection.execute(renamed, [identity])]
    sentence += f" Renamed: {' → '.join([*former, plain_name(identity)])}." if former else ""
    everyone = ranked_rows(last_seen(connection, sets_of(connection, rows[0].domain)[0]))
    mine = {
        c.label
        for c in everyone
        if (identity_of(c.target, c.repo), storable(c.target.file or "")) == (identity, file)
    }
    copies = said([c for c in everyone if c.label in mine or c.equals in mine])
    sentence = " ".join([sentence, *copies])
    return Answer(f"History of {text}", "history", [sentence], rows)
