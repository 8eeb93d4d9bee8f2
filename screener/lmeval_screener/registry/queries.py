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

from lmeval_dispersion.errors import UsageError, count, without_secrets
from lmeval_dispersion.layouts import nearest
from lmeval_dispersion.report import Col, Column, Report, Row, Table
from lmeval_dispersion.report.cells import json_value
from lmeval_dispersion.report.declared import listed, some
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
    """The answer to a query of a registry: sentences and one table.

    Attributes:
        title: Heading of the report.
        name: Anchor of the table on a page.
        sentences: The answer in sentences.
        entries: Rows of the table, as dataclasses or mappings.
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
        """Return the rows as mappings from columns to values."""
        return [row if isinstance(row, Mapping) else fields_of(row) for row in self.entries]

    def tables(self) -> dict[str, Table]:
        """Return one table, ``rows``.

        If the rows are mappings and wider than 100 characters, each value gets a line of its own.
        """
        rows = self.rows()
        if rows and isinstance(self.entries[0], Mapping):
            return {"rows": Table(*_lines(rows), self.title, self.name)}
        row_type: type = type(self.entries[0]) if rows else object
        short = [{name: _short(value) for name, value in row.items()} for row in rows]
        columns = columns_of(row_type)
        table = Table.of(short, self.title, columns=columns, name=self.name, excerpt=self.places)
        return {"rows": table}

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain Python values, in the layout of ``dispersion-registry/1``.

        The keys are ``schema``, ``answer`` (the sentences) and ``rows``.
        """
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
    """Return the pair of token sets that a query is about.

    The pair is that of the last run for ``domain``: runs of another version of this package may
    have had other words under the same name.

    Args:
        connection: The registry.
        domain: Name of the domain; None for the domain with the most results.

    Returns:
        The pair's key, the name of the domain, and the name of the reference.

    Raises:
        UsageError: The registry has no results, or none for ``domain``.
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
        raise UsageError(
            f"expected a domain of the registry, got {domain!r}; choose from {names}",
        )
    return chosen["tokens"], chosen["domain"], chosen["reference"]


def is_gone(seen: Seen) -> bool:
    """Whether a checkpoint is gone, by the last attempt to read it.

    A folder is also gone if it has been deleted since (`folder_is_gone`).
    """
    is_lost = seen.error in ("", "FolderNotFound") and folder_is_gone(seen.identity)
    return is_lost or cause_of(seen.error).state == "gone"


def ranked_rows(
    seen: Sequence[Seen], order: Order = UNSAID, bases: Collection[str] = ()
) -> list[Screened]:
    """Rank all checkpoints that have figures, in groups of one family (or tokenizer) and scale.

    Two tokenizers count as the same if every compared token is the same piece at the same row.

    Args:
        seen: The checkpoints' last known states.
        order: The figure that ranks, and the distance of G; a field that is None is taken from each
            family's file.
        bases: Labels of the base models.

    Returns:
        The checkpoints, group by group, each group best first.
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
    """Return the labels of the checkpoints that count as base models.

    Args:
        connection: The registry.
        tokens: Key of the pair of token sets.
        seen: The checkpoints' last known states.
        asked: Label, path or address of the base; None for the bases of the last run with these
            token sets that had any.

    Raises:
        UsageError: No checkpoint of the registry matches ``asked``, or several do.
    """
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
    """A checkpoint of the registry, as `query` ranks it.

    Attributes:
        checkpoint: Label.
        family: Family; None if the checkpoint is gone.
        group: Title of its group; None if it is gone.
        rank: Rank in the group; None for the base, for a checkpoint with the rows of the base or
            without the figure that ranks its group, and if the checkpoint is gone.
        ratio: Ratio of the checkpoint; None if unknown or if the checkpoint is gone.
        G: Gap G of the checkpoint; None if it is gone.
        se: Standard error of G; None if the checkpoint is gone.
        metric: Distance of G; None if the checkpoint is gone.
        ranked_by: The figure that ranks the group, ``gap`` or ``ratio``; None if the checkpoint is
            gone.
        holds_best: Chance that the best checkpoint of the group has this rank or a better one; None
            if unknown.
        revision: The commit; None outside the Hub, and if the checkpoint is gone.
        copy_of: Label of the checkpoint of which this one is a copy; None if it is not a copy, and
            if it is gone.
        note: ``gone``, ``the base``, ``as of DAY: ERROR`` for older figures, or why the checkpoint
            lacks the figure that ranks its group; otherwise None.
    """

    checkpoint: Annotated[str, Col("Checkpoint")]
    family: str | None = None
    group: Annotated[str | None, Col("Group", drop=2)] = None
    rank: Annotated[int | None, Col("Rank", "d", short="#")] = None
    ratio: Annotated[
        float | None,
        Col(
            "Ratio",
            ".3f",
            dots="page",
            hint="spread of the answer tokens, or the domain's, divided by that of everyday tokens",
        ),
    ] = None
    G: Annotated[float | None, Col("G", ".3f", drop=1)] = None
    se: float | None = None
    metric: str | None = None
    ranked_by: str | None = None
    holds_best: float | None = None
    revision: Annotated[str | None, Col("Commit", drop=3)] = None
    copy_of: Annotated[str | None, Col("Copy of")] = None
    note: Annotated[str | None, Col("Note")] = None


@dataclass(frozen=True)
class Sighting:
    """One state of a checkpoint, as one or more consecutive runs saw it.

    All figures, ``tensor`` and ``dtype`` are None if the checkpoint failed. Times are UTC, such as
    ``2026-11-23 02:17``.

    Attributes:
        requested: The requested revision; empty for the default branch.
        file: The requested file; empty for none.
        state: The commit, or a hash of a folder's listing; empty if the checkpoint could not be
            reached.
        domain: Name of the domain's token set.
        reference: Name of the token set of everyday words.
        ratio: The ratio; None if unknown.
        ratio_se: Standard error of the ratio.
        cosine: G in the cosine distance.
        cosine_se: Standard error of ``cosine``.
        euclidean: G in the Euclidean distance.
        euclidean_se: Standard error of ``euclidean``.
        tensor: Name of the output projection.
        dtype: Element type in which the output projection is stored.
        first: When the checkpoint was first seen in this state.
        last: When the checkpoint was last seen in this state.
        runs: Number of runs that saw the checkpoint in this state.
        error: Code of the error; None if the checkpoint was read.
        message: The error in a sentence; None if the checkpoint was read.
    """

    requested: Annotated[str, Col("Revision")]
    file: Annotated[str, Col("File")]
    state: Annotated[str, Col("Commit")]
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
    first: Annotated[str, Col("First seen", drop=2)]
    last: Annotated[str, Col("Last seen")]
    runs: Annotated[int, Col("Runs", "d", drop=3)]
    error: Annotated[str | None, Col("Error")]
    message: Annotated[str | None, Col("Why", drop=4)]


def checkpoint_named(connection: sqlite3.Connection, text: str) -> tuple[str, str]:
    """Find the one checkpoint that a label, path or address names.

    Returns:
        The checkpoint's identity (see `identity_of`) and file; an empty file means every file.

    Raises:
        UsageError: No checkpoint of the registry matches ``text``, or several do.
    """
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
            "expected a checkpoint of the registry (`dispersion registry query FILE` lists them), "
            f"got {text}{near}"
        )
    if len(matches) > 1:
        names = ", ".join("/".join(filter(None, match)) for match in sorted(matches)[:5])
        raise UsageError(
            f"{text} matches {len(matches)} checkpoints ({names}); give the whole name of one"
        )
    return matches.pop()


def query(
    connection: sqlite3.Connection,
    order: Order,
    base: str | None,
    domain: str | None,
    scale: str | None = None,
    top: int | None = None,
) -> Answer:
    """Rank the latest states of all checkpoints across runs.

    Args:
        connection: The registry.
        order: The figure that ranks, and the distance of G; a field that is None is taken from each
            family's file.
        base: Label, path or address of the base model; None for the base of the last run with the
            same token sets that had one.
        domain: Name of the domain; None for the domain with the most results.
        scale: Only groups of this scale, such as ``7B``. Default: all.
        top: Only the first ``top`` checkpoints of each group, not counting the base and copies.
            Default: all.

    Raises:
        UsageError: The registry does not know the domain or the base, has no results, or is
            damaged; or several checkpoints match ``base``.
    """
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
        f"{count(number, 'checkpoint')} in {count(len(groups), 'group')}, by {domain} against "
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
    """Return the positions of the rows that a terminal shows: the first few of each kind.

    Up to 40 rows are all shown, and the result is then empty.

    Args:
        kinds: The kind of each row, such as its group.
    """
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
    """Run an SQL SELECT on the registry and return its rows.

    Raises:
        UsageError: SQLite refuses the statement, or the statement takes over 60 seconds.
    """
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
        step = "give one SELECT statement in SQLite's dialect"
        if "interrupted" in reason:
            step = f"the statement took more than {_LIMIT:.0f} seconds: narrow it by WHERE or LIMIT"
        elif "no such table" in reason:
            step = f"select from {listed(_TABLES, 'or')}"
        elif "no such column" in reason:
            reason += _columns_for(connection, statement)
        raise UsageError(f"the registry could not answer: {reason}; {step}") from error
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
    """Return the states in which runs have seen one checkpoint, newest first.

    Args:
        connection: The registry.
        text: Label, path or address of the checkpoint.

    Raises:
        UsageError: No checkpoint of the registry matches ``text``, or several do.
    """
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
    sentence = f"{text}: {count(len(commits), 'version')} seen, last on {last.last} UTC"
    if last.error:
        state = cause_of(last.error).state
        failed = "is gone" if state == "gone" else "failed then"
        sentence += f"; it {failed} ({last.error})"
        if state == "unknown" and len(rows) > 1 and not rows[1].error:
            sentence += f", and is still ranked by its figures of {rows[1].last[:10]}"
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
