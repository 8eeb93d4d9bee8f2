"""The tables of a registry, and how a segment of the journal becomes rows of them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

from lmeval_dispersion.errors import UsageError

if TYPE_CHECKING:
    import duckdb

#: Raised when the tables change.
LAYOUT = "screen-registry/1"
#: Raised when G or the rule that picks rows changes: what an older method measured is read again.
METHOD = 1

_LINES = 500  # of a segment that are put into the tables at once
# What DuckDB may hold meanwhile. Less does not suffice for its own buffers, and DuckDB 1.4 needs more.
_MERGING = ("48MB", "96MB", "256MB")
_LONGEST = 2_000_000  # bytes of one: a tokenizer's tokens, with a sample of its rows

_NUMBERS = ", ".join(
    f"{name}_{metric}{end} DOUBLE"
    for metric in ("cosine", "euclidean")
    for name in ("gap", "within_domain", "between", "within_reference")
    for end in ("", "_se")
)
# Table -> its columns and those that identify a row. Absent texts that identify are '' and never NULL.
TABLES = {
    "runs": (
        "run VARCHAR, started TIMESTAMP, ended TIMESTAMP, command VARCHAR, version VARCHAR, domain VARCHAR, "
        "reference VARCHAR, metric VARCHAR, tokens VARCHAR, screened BIGINT, failed BIGINT, bytes BIGINT, "
        "requests BIGINT, seconds DOUBLE",
        "run",
    ),
    "tokenizers": ("tokenizer VARCHAR, tokens VARCHAR, resolution VARCHAR", "tokenizer, tokens"),
    "results": (
        "identity VARCHAR, file VARCHAR, state VARCHAR, tokens VARCHAR, method INTEGER, run VARCHAR, "
        "stamp TIMESTAMP, repo VARCHAR, revision VARCHAR, tokenizer VARCHAR, tensor VARCHAR, "
        f"tensor_file VARCHAR, dtype VARCHAR, v_rows BIGINT, width BIGINT, tied BOOLEAN, parameters BIGINT, "
        f"{_NUMBERS}, warnings VARCHAR[], bytes BIGINT, requests BIGINT, seconds DOUBLE, split INTEGER, "
        "numbers DOUBLE[]",
        "identity, file, state, tokens, method",
    ),
    "controls": (
        "identity VARCHAR, file VARCHAR, state VARCHAR, tokens VARCHAR, method INTEGER, sample VARCHAR, "
        "run VARCHAR, stamp TIMESTAMP, version VARCHAR, centred DOUBLE, final_norm DOUBLE, row_norm DOUBLE, "
        "effective_rank DOUBLE, z DOUBLE, content VARCHAR",
        "identity, file, state, tokens, method, sample",
    ),
    # What an address that was asked for turned out to be: a repository that has another name now.
    "names": ("asked VARCHAR, identity VARCHAR, stamp TIMESTAMP", "asked"),
    "seen": (
        "run VARCHAR, identity VARCHAR, requested VARCHAR, file VARCHAR, tokens VARCHAR, stamp TIMESTAMP, "
        "state VARCHAR, family VARCHAR, scale VARCHAR, negative_control BOOLEAN, method INTEGER, "
        "version VARCHAR, error VARCHAR, message VARCHAR",
        "run, identity, requested, file, tokens",
    ),
}
# What a query sees: the last that was seen of every checkpoint, with its figures or with its error.
_VIEW = """
CREATE OR REPLACE VIEW checkpoints AS
SELECT s.identity, s.requested AS requested_revision, s.file, coalesce(r.revision, s.state) AS revision,
       u.domain, u.reference, s.family, s.scale, s.stamp AS seen, s.run, s.error, s.message,
       r.* EXCLUDE (identity, file, state, tokens, method, run, revision, stamp, numbers, split),
       c.centred, c.final_norm, c.row_norm, c.effective_rank, c.z
FROM (SELECT * FROM seen QUALIFY row_number() OVER (
          PARTITION BY identity, requested, file, tokens ORDER BY stamp DESC, run DESC) = 1) s
LEFT JOIN results r ON s.error IS NULL AND r.identity = s.identity AND r.file = s.file
          AND r.state = s.state AND r.tokens = s.tokens AND r.method = s.method
LEFT JOIN (SELECT * FROM controls QUALIFY row_number() OVER (
          PARTITION BY identity, file, state, tokens, method ORDER BY stamp DESC, sample) = 1) c
          ON c.identity = r.identity AND c.file = r.file AND c.state = r.state AND c.tokens = r.tokens
          AND c.method = r.method
LEFT JOIN runs u ON u.run = s.run
"""


def prepare(connection: duckdb.DuckDBPyConnection, path: Path) -> None:
    """Make the tables where there are none.

    Raises:
        UsageError: The file is a database of something else, or of another layout.
    """
    tables = {
        row[0] for row in connection.execute("SELECT table_name FROM information_schema.tables").fetchall()
    }
    if "layout" not in tables:
        if tables:
            raise UsageError(
                f"expected a registry of screen-checkpoints, got {path}, a database with the tables "
                f"{', '.join(sorted(tables)[:5])}; name another file"
            )
        connection.execute("BEGIN")
        for name, (columns, _) in TABLES.items():
            connection.execute(f"CREATE TABLE {name} ({columns})")
        connection.execute(_VIEW)
        connection.execute("CREATE TABLE layout (name VARCHAR)")
        connection.execute("INSERT INTO layout VALUES (?)", [LAYOUT])
        connection.execute("COMMIT")
    check(connection, path)
    missing = [name for name in TABLES if tables and name not in tables]
    if missing:
        # A table that came later changes none of the others: a registry of before goes on.
        connection.execute("BEGIN")
        for name in missing:
            connection.execute(f"CREATE TABLE {name} ({TABLES[name][0]})")
        connection.execute(_VIEW)
        connection.execute("COMMIT")


def check(connection: duckdb.DuckDBPyConnection, path: Path) -> None:
    """Whether a database is a registry of this layout.

    Raises:
        UsageError: It is not.
    """
    tables = connection.execute("SELECT table_name FROM information_schema.tables").fetchall()
    if ("layout",) not in tables:
        raise UsageError(
            f"expected a registry of `screen-checkpoints --registry`, got {path}; name another file"
        )
    found = connection.execute("SELECT name FROM layout").fetchall()
    if found != [(LAYOUT,)]:
        raise UsageError(
            f"expected a registry of layout {LAYOUT}, got {found[0][0] if found else 'none'} in {path}; use "
            "the version of lmeval-dispersion that wrote it, or begin a new registry"
        )


def load(connection: duckdb.DuckDBPyConnection, segment: Path) -> None:
    """Put a segment of the journal into the tables, some lines at a time; once more changes nothing.

    A row that is there already is replaced, a broken line is skipped. Each part is put in wholly or not at
    all; of a process that is killed meanwhile the segment is left, and the next one puts it in once more.
    """
    import duckdb

    for memory in _MERGING:
        connection.execute(f"SET memory_limit = '{memory}'")
        try:
            _load_parts(connection, segment)
            break
        except duckdb.OutOfMemoryException:
            if memory == _MERGING[-1]:
                raise
    connection.execute(f"SET memory_limit = '{_MERGING[-1]}'")


def _load_parts(connection: duckdb.DuckDBPyConnection, segment: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, segment.open("rb") as file:
        while places := _parted(file, Path(folder)):
            connection.execute("BEGIN")
            try:
                for table, place in places.items():
                    _load(connection, table, place)
                connection.execute("COMMIT")
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("CHECKPOINT")  # what is on disk need not stay in memory


def _load(connection: duckdb.DuckDBPyConnection, table: str, place: Path) -> None:
    columns, key = TABLES[table]
    spec = ", ".join(f"'{name}': '{kind}'" for name, kind in (c.rsplit(" ", 1) for c in columns.split(", ")))
    newest = {"runs": "coalesce(ended, started)", "tokenizers": "1"}.get(table, "stamp")
    connection.execute(
        f"CREATE OR REPLACE TEMP TABLE fresh AS SELECT * FROM read_json(?, "
        f"format = 'newline_delimited', ignore_errors = true, maximum_object_size = {_LONGEST}, "
        f"columns = {{{spec}}}) WHERE {key.split(',')[0]} IS NOT NULL "
        f"QUALIFY row_number() OVER (PARTITION BY {key} ORDER BY {newest} DESC) = 1",
        [str(place)],
    )
    same = " AND ".join(f"{table}.{name} = fresh.{name}" for name in key.split(", "))
    connection.execute(f"DELETE FROM {table} USING fresh WHERE {same}")
    connection.execute(f"INSERT INTO {table} SELECT * FROM fresh")
    connection.execute("DROP TABLE fresh")


def _parted(segment: IO[bytes], folder: Path) -> dict[str, Path]:
    """The next lines of a segment in one file for each table, until its end; the last only if it is whole."""
    files: dict[str, IO[bytes]] = {}
    taken = 0
    try:
        while not files or taken < _LINES:
            if not (line := segment.readline()):
                break
            table = line[6 : line.find(b'"', 6)].decode("ascii", "replace")
            if not line.endswith(b"}\n") or not line.startswith(b'{"k":"') or table not in TABLES:
                continue
            if table not in files:
                files[table] = (folder / f"{table}.jsonl").open("wb")
            files[table].write(line)
            taken += 1
    finally:
        for opened in files.values():
            opened.close()
    return {table: folder / f"{table}.jsonl" for table in files}
