"""A registry's queries, answered as reports: ranks across runs, a checkpoint's history, SQL."""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from lmeval_dispersion.errors import UsageError, without_secrets
from lmeval_dispersion.layouts import nearest
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
        return [row if isinstance(row, Mapping) else fields_of(row) for row in self.entries]

    def tables(self) -> dict[str, Table]:
        """One table, ``rows``; a line for each value if mappings are wider than 100 characters."""
        rows = self.rows()
        if rows and isinstance(self.entries[0], Mapping):
            return {"rows": Table(*_lines(rows), self.title, self.name)}
        row_type: type = type(self.entries[0]) if rows else object
        short = [{name: _short(value) for name, value in row.items()} for row in rows]
        columns = columns_of(row_type)
        table = Table.of(short, self.title, columns=columns, name=self.name, excerpt=self.places)
        return {"rows": table}

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract ``dispersion-registry/1`` as plain Python values: schema, answer and rows."""
        return {
            "schema": self.schema,
            "answer": list(self.sentences),
            "rows": json_value(self.rows()),
        }


def _lines(rows: list[Row]) -> tuple[list[Row], list[Column]]:
    """The rows and columns of a table of mappings; if it is wide, with a line for each value."""
    width = 0
    for name in rows[0]:
        width += 2 + max(len(name), *(len(str(row[name])) for row in rows))
    if width <= _WIDE:
        return rows, [Column(name, name) for name in rows[0]]
    lines: list[Row] = []
    for number, row in enumerate(rows, 1):
        for name, value in row.items():
            lines.append({"row": number, "column": name, "value": value})
    columns = [Column("row", "Row", "d"), Column("column", "Column"), Column("value", "Value")]
    return lines, columns


def _short(value: Any) -> Any:
    """A value as tables have it: a commit, or another hash, is known by its first twelve digits."""
    return _HASH.sub(r"\1", value) if isinstance(value, str) else value


def sets_of(connection: sqlite3.Connection, domain: str | None) -> tuple[str, str, str]:
    """The pair of token sets that a query is about: its key, and the names of domain and reference.

    It is that of the last run of ``domain``, by default of the domain with most results: another version of
    this package may have other words of everyday language under the same name. UsageError if there is none.
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
    pieces: dict[int, tuple[object, ...]] = {}  # by a resolution, which many checkpoints share
    first_tokenizers: dict[tuple[object, ...], str] = {}
    family_pieces: dict[str, tuple[object, ...]] = {}
    readings = []
    for entry in seen:
        reading = entry.reading
        if reading is None:
            continue
        compared = pieces.get(id(reading.resolution))
        if compared is None:
            compared = tuple((token.piece, token.id) for token in reading.resolution.compared)
            pieces[id(reading.resolution)] = compared
        target = reading.target
        if target.family and family_pieces.setdefault(target.family, compared) != compared:
            # Rows other than its family's: a group for its tokenizer.
            target = replace(target, family=None)
        common = first_tokenizers.setdefault(compared, reading.tokenizer)
        readings.append(replace(reading, target=target, common=common))
    return ranking.ranked(readings, order, bases)


def bases_among(
    connection: sqlite3.Connection, tokens: str, seen: Sequence[Seen], asked: str | None
) -> list[str]:
    """Labels of the base ``asked`` for (UsageError if unknown), else of those in the last run with any."""
    if asked is None:
        last = "SELECT bases, max(ended) FROM runs WHERE tokens = ? AND bases <> ''"
        (bases, _) = connection.execute(last, [tokens]).fetchone()
        places = (bases or "").splitlines()
        return [e.target.label for e in seen if e.reading and e.reading.place in places]
    exact = [e.target.label for e in seen if asked in (e.target.label, e.target.name)]
    if exact:
        return exact
    identity, _ = checkpoint_named(connection, asked)
    return [e.target.label for e in seen if e.identity == identity]


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
    # Gone, the base, or `as of DAY: ERROR` for older figures.
    note: Annotated[str | None, Col("Note")] = None


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
    exact = {*asked, *(row["identity"] for row in renamed)}
    seen: list[Seen] = []
    for row in connection.execute("SELECT DISTINCT tokens FROM seen").fetchall():
        seen += last_seen(connection, row["tokens"])
    matches = {(entry.identity, "") for entry in seen if entry.identity in exact}
    if not matches:
        # A label is the end of a path, followed by a revision or a file.
        for entry in seen:
            file = storable(entry.target.file or "")
            is_label = text in (entry.target.label, entry.target.name)
            if is_label or f"{entry.identity}/{file}" in exact:
                matches.add((entry.identity, file))
    if not matches:
        end = f"/{text.strip('/')}"
        matches = {(entry.identity, "") for entry in seen if entry.identity.endswith(end)}
    if not matches:
        near = nearest(text, {entry.target.label for entry in seen})
        raise UsageError(
            f"expected a checkpoint that the registry has seen (query lists them), got {text}{near}"
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
    gone: list[str] = []
    failed: list[str] = []
    older: dict[str, str] = {}
    there: list[Seen] = []
    for entry in seen:
        label = entry.target.label
        if is_gone(entry):
            gone.append(label)
            continue
        there.append(entry)
        if entry.error:
            failed.append(f"{label} ({entry.error})")
        if entry.as_of:
            older[label] = f"as of {entry.as_of}: {entry.error}"
    bases = bases_among(connection, tokens, seen, base)
    checkpoints = ranked_rows(there, order, bases)
    groups = grouped(c for c in checkpoints if scale in (None, c.scale))
    rows = []
    for group in groups:
        for c in _best(group, top):
            rows.append(_ranked(c, group, older.get(c.label)))
    if scale is None and top is None:
        rows += [Ranked(label, note="gone") for label in gone]
    number = sum(len(group.checkpoints) for group in groups)
    members = [c for group in groups for c in group.checkpoints]
    best = sentences_of(groups, domain, domain) + unknown(members, alone=number == len(groups))
    sentence = (
        f"{count(number, 'checkpoint')} in {count(len(groups), 'group')} for {domain} against "
        f"{reference}; {len(gone)} gone, {len(failed)} failed when last seen"
    )
    if failed:
        sentence += f": {some(failed)}"
    places = () if top else excerpt([row.group for row in rows])
    return Answer(
        "Checkpoints of the registry", "checkpoints", [*best, f"{sentence}."], rows, places
    )


def _ranked(c: Screened, group: Group, note: str | None) -> Ranked:
    """A member's row; without a ``note``, one says why it has no rank."""
    if note is None and c.is_base:
        note = "the base"
    elif note is None and c.is_set_aside:
        note = f"set aside, no ratio: {c.no_ratio}"
    return Ranked(
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
        note=note,
    )


def excerpt(kinds: Sequence[object]) -> tuple[int, ...]:
    """Positions of the rows that a terminal shows: the first few of each kind; empty (all) for up to 40."""
    if len(kinds) <= _LONG:
        return ()
    most = max(1, _LONG // len(set(kinds)))
    counts: Counter[object] = Counter()
    first = []
    for place, kind in enumerate(kinds):
        counts[kind] += 1
        if counts[kind] <= most:
            first.append(place)
    return tuple(first[:_LONG])


def _best(group: Group, top: int | None) -> Sequence[Screened]:
    """The best checkpoints of a group, with their copies, which do not count."""
    originals = 0
    for place, c in enumerate(group.checkpoints):
        if not (c.copy_of or c.is_base):
            if originals == top:
                return group.checkpoints[:place]
            originals += 1
    return group.checkpoints


def sql_answer(connection: sqlite3.Connection, statement: str) -> Answer:
    """The rows of an SQL SELECT; UsageError if SQLite refuses it or it takes over 60 seconds."""
    deadline = time.monotonic() + _LIMIT
    connection.set_progress_handler(lambda: time.monotonic() > deadline, 100_000)
    try:
        cursor = connection.execute(statement)
        # Columns with the same name are numbered: SELECT 1 a, 2 a.
        names: list[str] = []
        counts: Counter[str] = Counter()
        for name, *_ in cursor.description or ():  # None without a statement
            names.append(f"{name}:{counts[name]}" if counts[name] else name)
            counts[name] += 1
        rows = [dict(zip(names, map(_no_bytes, row), strict=True)) for row in cursor]
    except (sqlite3.Error, sqlite3.Warning) as error:
        reason = str(error)
        tables = ""
        if "no such table" in reason:
            tables = f"of {listed(_TABLES, 'or')} "
        elif "no such column" in reason:
            reason += _columns_for(connection, statement)
        raise UsageError(
            f"the registry could not answer: {reason}; it takes one SQLite SELECT {tables}that ends "
            f"within {_LIMIT:.0f} seconds"
        ) from error
    return Answer("Answer of the registry", "answer", [f"{count(len(rows), 'row')}."], rows)


def _no_bytes(value: object) -> object:
    """A value of a row, with a number of bytes in place of bytes."""
    return f"{len(value)} bytes" if isinstance(value, bytes) else value


def _columns_for(connection: sqlite3.Connection, statement: str) -> str:
    """The columns of the tables that a statement names, as the end of a clause; empty for none."""
    words = re.findall(r"\w+", statement[:_STATEMENT].lower())
    clauses = ""
    for table in _TABLES:
        if table in words:
            cursor = connection.execute(f"SELECT * FROM {table} LIMIT 0")
            clauses += f"; {table} has {', '.join(name for name, *_ in cursor.description)}"
    return clauses


def history(connection: sqlite3.Connection, text: str) -> Answer:
    """The history of the checkpoint named by ``text``, newest first; raises as :func:`checkpoint_named`."""
    identity, file = checkpoint_named(connection, text)
    sightings = connection.execute(
        "SELECT requested, file, state, domain, reference, ratio, ratio_se, gap_cosine, gap_cosine_se, "
        "gap_euclidean, gap_euclidean_se, tensor, dtype, first, last, runs, error, message "
        "FROM sightings WHERE identity = ? AND ? IN ('', file) ORDER BY last DESC",
        [identity, file],
    )
    rows = []
    for sighting in sightings:
        row = Sighting(*sighting)
        rows.append(replace(row, first=row.first[:16], last=row.last[:16]))
    last = rows[0]
    commits = {row.state for row in rows if row.state}
    sentence = f"{text}: {count(len(commits), 'commit')} seen, last on {last.last}"
    if last.error:
        state = cause_of(last.error).state
        failed = "is gone" if state == "gone" else "failed then"
        sentence += f"; it {failed} ({last.error})"
        if state == "unknown" and len(rows) > 1 and not rows[1].error:
            sentence += f", and its figures as of {rows[1].last[:10]} still hold"
    sentences = [f"{sentence}."]
    renamed = "SELECT asked FROM names WHERE identity = ? AND renamed IS NOT NULL ORDER BY renamed"
    former = [plain_name(asked) for (asked,) in connection.execute(renamed, [identity])]
    if former:
        sentences.append(f"Renamed: {' → '.join([*former, plain_name(identity)])}.")
    everyone = ranked_rows(last_seen(connection, sets_of(connection, last.domain)[0]))
    labels = set()
    for c in everyone:
        if (identity_of(c.target, c.repo), storable(c.target.file or "")) == (identity, file):
            labels.add(c.label)
    sentences += said([c for c in everyone if c.label in labels or c.equals in labels])
    return Answer(f"History of {text}", "history", [" ".join(sentences)], rows)
