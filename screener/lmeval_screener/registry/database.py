"""The file of a registry: what was measured of every checkpoint, in an SQLite database that runs add to.

Every checkpoint is written as soon as it is read, in a transaction of its own: any number of runs may go on
side by side, and one that is killed loses no more than what was being read.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import math
import os
import re
import sqlite3
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lmeval_dispersion.errors import DispersionError, UsageError
from lmeval_dispersion.geometry import METRICS
from lmeval_dispersion.version import __version__
from lmeval_screener.checkpoints import Snapshot
from lmeval_screener.checkpoints.snapshots import LocalSnapshot
from lmeval_screener.checkpoints.source import WithTokenizer
from lmeval_screener.errors import ScreeningError
from lmeval_screener.ranking.figures import figures_of, numbers_of
from lmeval_screener.reading import Reading
from lmeval_screener.targets import Target
from lmeval_screener.tokens.cache import resolution_of, resolution_text
from lmeval_screener.tokens.resolution import Resolution
from lmeval_screener.tokens.sets import TokenSet
from lmeval_screener.tokens.vocabulary import TOKENIZER_FILES

if TYPE_CHECKING:
    from lmeval_screener.result import Result

#: Raised when G or the rule that picks rows changes: what an older method measured is read again.
METHOD = 2
#: Errors of a checkpoint as it is stored: the same commit fails the same way again.
LASTING = frozenset(
    {
        *("NoSafetensors", "AdapterOnly", "SeveralFiles", "BadArchive", "LegacyPickle", "UnsafePickle"),
        *("ScatteredRows", "QuantizedTensor", "SlicedTensor", "NoOutputProjection", "BadConfig", "BadIndex"),
        *("BadHeader", "BadRows", "BadTokenizer", "TokenizerNotFound", "TooFewTokens"),
    }
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_WAIT = 120.0  # seconds that a statement waits for another process; each holds the file for milliseconds
_APPLICATION, _LAYOUT = 0x4C4D5352, 1  # marks in the file's header; the layout is raised with the tables
_OTHER = "expected a registry of screen-checkpoints, got {}; name another file"
#: File systems that several machines share: SQLite's write-ahead log needs memory that all writers share.
_NETWORK = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "glusterfs"),
        *("beegfs", "fuse.sshfs", "fuse.glusterfs", "virtiofs"),
    }
)

_FIGURES = [*(f"gap_{metric}{end}" for metric in METRICS for end in ("", "_se")), "ratio", "ratio_se"]
# Absent texts that identify are '' and never NULL. A row of `seen` stands for all runs in a row that found a
# checkpoint alike.
_TABLES = f"""
CREATE TABLE runs (
    run TEXT PRIMARY KEY, started TEXT, ended TEXT, command TEXT, version TEXT, domain TEXT, reference TEXT,
    metric TEXT, tokens TEXT, screened INTEGER, failed INTEGER, bytes INTEGER, requests INTEGER, seconds REAL
);
CREATE TABLE tokenizers (
    tokenizer TEXT, tokens TEXT, resolution TEXT, PRIMARY KEY (tokenizer, tokens)
);
CREATE TABLE names (asked TEXT PRIMARY KEY, identity TEXT, stamp TEXT);
CREATE TABLE results (
    identity TEXT, file TEXT, state TEXT, tokens TEXT, method INTEGER, run TEXT, stamp TEXT, repo TEXT,
    revision TEXT, tokenizer TEXT, tensor TEXT, tensor_file TEXT, dtype TEXT, v_rows INTEGER, width INTEGER,
    tied INTEGER, parameters INTEGER, {", ".join(f"{name} REAL" for name in _FIGURES)}, warnings TEXT,
    bytes INTEGER, requests INTEGER, seconds REAL, split INTEGER, numbers BLOB, no_ratio TEXT,
    PRIMARY KEY (identity, file, state, tokens, method)
);
CREATE TABLE seen (
    identity TEXT, requested TEXT, file TEXT, tokens TEXT, first TEXT, last TEXT, runs INTEGER, run TEXT,
    state TEXT, family TEXT, scale TEXT, negative_control INTEGER, method INTEGER, version TEXT, error TEXT,
    message TEXT, PRIMARY KEY (identity, requested, file, tokens, first)
);
CREATE VIEW checkpoints AS
SELECT s.identity, s.requested AS requested_revision, s.file, coalesce(r.revision, s.state) AS revision,
       u.domain, u.reference, s.family, s.scale, s.last AS seen, s.run, s.error, s.message, r.repo,
       r.tokenizer, r.tensor, r.tensor_file, r.dtype, r.v_rows, r.width, r.tied, r.parameters,
       {", ".join(f"r.{name}" for name in _FIGURES)}, r.warnings, r.bytes, r.requests, r.seconds
FROM seen s
LEFT JOIN results r ON s.error IS NULL AND r.identity = s.identity AND r.file = s.file
          AND r.state = s.state AND r.tokens = s.tokens AND r.method = s.method
LEFT JOIN runs u ON u.run = s.run
WHERE s.first = (SELECT max(first) FROM seen o WHERE o.identity = s.identity
                 AND o.requested = s.requested AND o.file = s.file AND o.tokens = s.tokens)
"""


@contextmanager
def written(path: Path) -> Iterator[sqlite3.Connection]:
    """A registry to read and write; made where it is not there yet."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(f"expected --registry to be a file in an existing folder, got {path}")
    with _sentences(path), closing(_connect(f"{path.absolute().as_uri()}?mode=rwc")) as connection:
        # Two that begin at once both find nothing: the second waits, and finds the tables.
        with transaction(connection):
            if connection.execute("SELECT name FROM sqlite_master").fetchone() is None:
                for statement in _TABLES.split(";"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {_APPLICATION}")
                connection.execute(f"PRAGMA user_version = {_LAYOUT}")
            _check(connection, path)
        # Where machines share the file, its journal is one that needs no memory of theirs.
        mode = "DELETE" if file_system(path) in _NETWORK else "WAL"
        connection.execute(f"PRAGMA journal_mode = {mode}")
        connection.execute("PRAGMA synchronous = NORMAL")
        yield connection


@contextmanager
def read(path: Path) -> Iterator[sqlite3.Connection]:
    """A registry, for reading only: no statement can change it, or reach another file."""
    if not path.is_file():
        raise UsageError(f"expected a registry, got {path}, which is not there; --registry makes one")
    # Where nothing can be written no process writes, and SQLite could keep no account of its readers.
    free = os.access(path, os.W_OK) and os.access(path.absolute().parent, os.W_OK)
    mode = "rw" if free else "ro&immutable=1"
    with _sentences(path), closing(_connect(f"{path.absolute().as_uri()}?mode={mode}")) as connection:
        _check(connection, path)
        allowed = {
            *(sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
        }
        connection.set_authorizer(
            lambda act, *_: sqlite3.SQLITE_OK if act in allowed else sqlite3.SQLITE_DENY
        )
        yield connection


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All that is written inside, or nothing of it; no other process writes meanwhile."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        if connection.in_transaction:  # a full disk has ended it
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def file_system(path: Path) -> str:
    """The type of the file system that a path lies on, as Linux names it; empty where that is not known."""
    place, best, kind = str(path.resolve()), "", ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text("utf-8", "replace").splitlines():
            mount, this = line.split(" ")[1:3]
            mount = mount.replace("\\040", " ")
            inside = place == mount or place.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best):
                best, kind = mount, this
    return kind


def _connect(address: str) -> sqlite3.Connection:
    # A notebook's thread may begin it and another end it.
    connection = sqlite3.connect(
        address, uri=True, timeout=_WAIT, isolation_level=None, check_same_thread=False
    )
    connection.row_factory = sqlite3.Row
    return connection


@contextmanager
def _sentences(path: Path) -> Iterator[None]:
    """Errors of SQLite as sentences."""
    try:
        yield
    except sqlite3.Error as error:
        reason, head = str(error), b""
        if "not a database" in reason:
            # Only now: to close a file that SQLite has open would let go of its locks.
            head = path.read_bytes()[:16]
        if head[8:12] == b"DUCK":
            raise UsageError(
                f"{path} was made by an earlier version, in DuckDB's format, which is no longer read; name a "
                "new file and run the same screenings again: they fill it"
            ) from error
        if head and not head.startswith(b"SQLite format 3"):
            raise UsageError(_OTHER.format(path)) from error
        if "readonly" in reason or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise UsageError(f"expected --registry where writing is allowed, got {path}") from error
        if "locked" in reason or "locking" in reason:
            advice = (
                f"waited {_WAIT:.0f} seconds for another process; try again when it ended, and if there is "
                f"none, its file system{f' ({file_system(path)})' if file_system(path) else ''} cannot lock "
                "files: name a --registry on a local disk"
            )
        elif "full" in reason or "disk I/O" in reason:
            advice = "free some space, or name a --registry on another disk"
        else:
            advice = "if it is damaged, begin a new one: what it held is then read again"
        raise DispersionError(f"the registry {path} failed ({reason}): {advice}") from error


def _check(connection: sqlite3.Connection, path: Path) -> None:
    """Whether a database is a registry of this layout."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (layout,) = connection.execute("PRAGMA user_version").fetchone()
    if application != _APPLICATION:
        raise UsageError(_OTHER.format(path))
    if layout != _LAYOUT:
        raise UsageError(
            f"expected a registry of layout {_LAYOUT}, got {layout} in {path}; use the version of "
            "lmeval-dispersion that wrote it, or begin a new registry"
        )


def tokens_key(domain: TokenSet, reference: TokenSet) -> str:
    """Key of a pair of token sets: a hash of all that decides which rows are read."""
    return hashlib.sha256(f"{domain.digest} {reference.digest}".encode()).hexdigest()[:32]


class Session:
    """One run that takes from a registry what it has and adds what it reads.

    Args:
        connection: Of :func:`written`.
        domain: T.
        reference: R.
        metric: Which gap ranks.
        command: The command, for the list of runs.
        refresh: Whether to read everything again.

    Attributes:
        connection: The registry.
        tokens: Key of the pair of token sets.
        run: Its name in the registry.
        reused: Checkpoints that were taken from the registry.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        domain: TokenSet,
        reference: TokenSet,
        *,
        metric: str = "cosine",
        command: str = "",
        refresh: bool = False,
    ) -> None:
        self.connection, self._refresh = connection, refresh
        self.tokens = tokens_key(domain, reference)
        self.run = f"{datetime.datetime.now(datetime.timezone.utc):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:6]}"
        self.reused = 0
        self._resolutions: dict[str, Resolution] = {}
        self._opened: dict[Target, tuple[str, str]] = {}
        self._taken: set[Target] = set()
        _put(
            connection, "runs", run=self.run, started=_now(), command=command, version=__version__,
            domain=domain.name, reference=reference.name, metric=metric, tokens=self.tokens,
        )  # fmt: skip

    def pinned(self, target: Target) -> Reading | None:
        """The reading that is kept of a target whose commit is known before anything is asked."""
        commit = target.listed.commit if target.listed else target.revision
        if not target.on_hub or target.tokenizer or commit is None or not _COMMIT.fullmatch(commit):
            return None
        # The commit says what it is, whatever its repository is called now.
        asked = identity_of(target, target.repo)
        return self._find(target, self._name(asked) or asked, commit)

    def find(self, target: Target, snapshot: Snapshot, base: Snapshot | None = None) -> Reading | None:
        """The reading that is kept of a checkpoint as it was opened."""
        identity, state = identity_of(target, snapshot.repo), state_of(target, snapshot, base)
        self._opened[target] = identity, state
        return self._find(target, identity, state)

    def _name(self, asked: str) -> str | None:
        """The identity that an address turned out to have, where that is another."""
        row = self.connection.execute("SELECT identity FROM names WHERE asked = ?", [asked]).fetchone()
        return None if row is None else str(row[0])

    def _find(self, target: Target, identity: str, state: str) -> Reading | None:
        if self._refresh:
            return None
        place = [identity, target.file or "", state, self.tokens]
        # A failure in this version counts more than what an earlier version measured.
        failed = self.connection.execute(
            "SELECT error, message FROM seen WHERE identity = ? AND file = ? AND state = ? AND tokens = ? "
            "AND version = ? AND error IS NOT NULL ORDER BY last DESC",
            [*place, __version__],
        ).fetchone()
        if failed is not None and failed["error"] in LASTING:
            self._opened[target] = identity, state
            raise ScreeningError(*failed)
        row = self.connection.execute(
            "SELECT * FROM results WHERE identity = ? AND file = ? AND state = ? AND tokens = ? "
            "AND method = ?",
            [*place, METHOD],
        ).fetchone()
        if row is None:
            return None
        if row["tokenizer"] not in self._resolutions:
            self._resolutions |= resolutions(self.connection, self.tokens)
        self._opened[target] = identity, state
        self._taken.add(target)
        self.reused += 1
        return measured_of(row, target, self._resolutions)

    def keep(self, target: Target, outcome: Reading | ScreeningError) -> None:
        """Write what came of a checkpoint."""
        asked = identity_of(target, target.repo)
        identity, state = self._opened.pop(target, (asked, ""))
        error, message = None, None
        if isinstance(outcome, ScreeningError):
            error, message = outcome.code, str(outcome)
            if error == "Interrupted":
                return
        with transaction(self.connection):
            if isinstance(outcome, Reading):
                if target in self._taken:
                    self._taken.discard(target)
                else:
                    self._keep_result(outcome, identity, target.file or "", state)
                if (self._name(asked) or asked) != identity:
                    _put(self.connection, "names", asked=asked, identity=identity, stamp=_now())
            self._keep_seen(target, identity, state, error, message)

    def _keep_result(self, measured: Reading, identity: str, file: str, state: str) -> None:
        if measured.tokenizer not in self._resolutions:
            self._resolutions[measured.tokenizer] = measured.resolution
            text = resolution_text(measured.resolution).decode()
            _put(
                self.connection, "tokenizers",
                tokenizer=measured.tokenizer, tokens=self.tokens, resolution=text,
            )  # fmt: skip
        gaps, ratio = measured.gaps, measured.ratio
        values = [value for metric in METRICS for value in (gaps[metric].mean, gaps[metric].se)]
        values += [math.nan, math.nan] if ratio is None else [ratio.mean, ratio.se]
        figures = [value if math.isfinite(value) else None for value in values]
        _put(
            self.connection, "results", identity=identity, file=file, state=state, tokens=self.tokens,
            method=METHOD, run=self.run, stamp=_now(), repo=measured.repo, revision=measured.revision,
            tokenizer=measured.tokenizer, tensor=measured.tensor, tensor_file=measured.file,
            dtype=measured.dtype, v_rows=measured.shape[0], width=measured.shape[1], tied=measured.tied,
            parameters=measured.parameters, **dict(zip(_FIGURES, figures, strict=True)),
            warnings=json.dumps(measured.warnings), bytes=measured.bytes_read, requests=measured.requests,
            seconds=round(measured.seconds, 3), split=len(measured.resolution.domain),
            numbers=numbers_of(gaps, ratio).astype("<f8").tobytes(), no_ratio=measured.no_ratio,
        )  # fmt: skip

    def _keep_seen(
        self, target: Target, identity: str, state: str, error: str | None, message: str | None
    ) -> None:
        """Add to the last row of a checkpoint that was found as it is now, or begin another."""
        place = {
            "identity": identity, "requested": target.revision or "", "file": target.file or "",
            "tokens": self.tokens,
        }  # fmt: skip
        now = _now()
        last = self.connection.execute(
            "SELECT * FROM seen WHERE identity = :identity AND requested = :requested AND file = :file "
            "AND tokens = :tokens ORDER BY first DESC",
            place,
        ).fetchone()
        alike = last is not None and (last["state"], last["error"]) == (state, error)
        _put(
            self.connection, "seen", **place, first=last["first"] if alike else now, last=now,
            runs=last["runs"] + (last["run"] != self.run) if alike else 1, run=self.run, state=state,
            family=target.family or (last["family"] if last else None),
            scale=target.scale or (last["scale"] if last else None),
            negative_control=target.negative_control, method=METHOD, version=__version__, error=error,
            message=message,
        )  # fmt: skip

    def finish(self, result: Result) -> None:
        """Say of the run that it reached its end, and which folders that it knew are no longer there."""
        for entry in stored(self.connection, self.tokens):
            if entry.measured is not None and folder_is_gone(entry.identity):
                with transaction(self.connection):
                    self._keep_seen(
                        entry.target, entry.identity, "", "FolderNotFound", "the folder is no longer there"
                    )
        self.connection.execute(
            "UPDATE runs SET ended = ?, screened = ?, failed = ?, bytes = ?, requests = ?, seconds = ? "
            "WHERE run = ?",
            [
                *(_now(), len(result.checkpoints), len(result.failed), result.bytes_read, result.requests),
                *(round(result.seconds, 3), self.run),
            ],
        )


def identity_of(target: Target, repo: str) -> str:
    """The name of a checkpoint in all its revisions: its repository, address, or folder's place."""
    if target.local:
        return f"file://{Path(target.repo).resolve()}"
    return repo if "://" in repo else f"hf://{repo}"


def folder_is_gone(identity: str) -> bool:
    """Whether a folder or file is no longer there, though a folder above it is.

    Where there is none of these either, the registry has come to another machine.
    """
    place = Path(identity.removeprefix("file://"))
    return identity.startswith("file://") and not place.exists() and place.parent.parent.exists()


def state_of(target: Target, snapshot: Snapshot, base: Snapshot | None = None) -> str:
    """The commit; of what has none a hash of its listing, with the time at which each file was changed.

    An adapter's is that of its base too, and where a tokenizer was named, that tokenizer's.
    """
    states = [_state(snapshot.checkpoint if isinstance(snapshot, WithTokenizer) else snapshot)]
    if base is not None:
        states.append(_state(base))
    if target.tokenizer is not None:
        digests = [
            f"{name}:{entry.digest or time.time()}"
            for name, entry in sorted(snapshot.files.items())
            if name in TOKENIZER_FILES
        ]
        states.append(f"{target.tokenizer} {' '.join(digests)}")
    return "+".join(states)


def _state(snapshot: Snapshot) -> str:
    if snapshot.revision is not None:
        return snapshot.revision
    lines = []
    for path, entry in sorted(snapshot.files.items()):
        changed: float | None = None
        if isinstance(snapshot, LocalSnapshot):
            with contextlib.suppress(OSError):
                changed = (snapshot.folder / path).stat().st_mtime_ns
        elif entry.digest is None:
            changed = time.time()  # what has no version may be another file tomorrow
        lines.append(f"{path} {entry.size} {entry.digest} {changed}")
    return "files:" + hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Seen:
    """The last that was found of a checkpoint.

    Attributes:
        target: As it was asked for, by its present name.
        identity: The repository, folder or address.
        state: The commit, or a hash of a folder's listing; empty where it was not reached.
        error: Its code, empty where it was measured.
        message: And its sentence.
        measured: The reading, where there is entry.
    """

    target: Target
    identity: str
    state: str
    error: str
    message: str
    measured: Reading | None

    def called(self, target: Target) -> Seen:
        """The same with a target that has a label."""
        measured = None if self.measured is None else replace(self.measured, target=target)
        return replace(self, target=target, measured=measured)


def stored(connection: sqlite3.Connection, tokens: str, *, until: str = "9") -> list[Seen]:
    """The last that was seen of every checkpoint with some token sets."""
    known = resolutions(connection, tokens)
    rows = connection.execute(
        "SELECT s.*, r.* FROM (SELECT identity, requested, file, state, error, message, method, "
        # A folder or repository that was once screened as one of a family stays in it when it is named alone.
        "coalesce(family, max(family) OVER same) AS family, coalesce(scale, max(scale) OVER same) AS scale, "
        "max(negative_control) OVER same AS negative_control, row_number() OVER "
        "(PARTITION BY identity, requested, file ORDER BY first DESC) AS age "
        "FROM seen WHERE tokens = :tokens AND first <= :until WINDOW same AS (PARTITION BY identity)) s "
        "LEFT JOIN results r ON s.error IS NULL AND r.identity = s.identity AND r.file = s.file "
        "AND r.state = s.state AND r.tokens = :tokens AND r.method = s.method WHERE s.age = 1 "
        "ORDER BY s.identity, s.requested, s.file",
        {"tokens": tokens, "until": until},
    )
    return [_seen(row, known) for row in rows]


def _seen(row: sqlite3.Row, known: dict[str, Resolution]) -> Seen:
    identity = row["identity"]
    target = Target(
        re.sub("^(hf|file)://", "", identity), row["requested"] or None, row["family"], row["scale"],
        local=identity.startswith("file://"), negative_control=bool(row["negative_control"]),
        file=row["file"] or None,
    )  # fmt: skip
    measured = None if row["repo"] is None else measured_of(row, target, known)
    return Seen(target, identity, row["state"], row["error"] or "", row["message"] or "", measured)


def resolutions(connection: sqlite3.Connection, tokens: str) -> dict[str, Resolution]:
    """The rows of T and R in every tokenizer that was met."""
    rows = connection.execute("SELECT tokenizer, resolution FROM tokenizers WHERE tokens = ?", [tokens])
    return {tokenizer: resolution_of(text) for tokenizer, text in rows}


def measured_of(row: sqlite3.Row, target: Target, known: dict[str, Resolution]) -> Reading:
    """A row of the table ``results`` as a reading; it cost nothing this time."""
    gaps, ratio = figures_of(np.frombuffer(row["numbers"], dtype="<f8"), row["split"])
    return Reading(
        target, row["repo"], row["revision"], row["tensor"], row["tensor_file"], row["dtype"],
        (row["v_rows"], row["width"]), bool(row["tied"]), row["parameters"], row["tokenizer"],
        known[row["tokenizer"]], gaps, tuple(json.loads(row["warnings"])), 0, 0, 0.0, ratio,
        row["no_ratio"],
    )  # fmt: skip


def _put(connection: sqlite3.Connection, table: str, **values: Any) -> None:
    """Insert a row, or replace the one of the same key."""
    marks = ", ".join("?" * len(values))
    connection.execute(
        f"INSERT OR REPLACE INTO {table} ({', '.join(values)}) VALUES ({marks})", list(values.values())
    )


def _now() -> str:
    return f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M:%S.%f}"
