"""A registry's file: every checkpoint's results, in an SQLite database that runs add to.

Every checkpoint is written as soon as it is read, in its own transaction: any number of runs may work
concurrently, and a killed run loses only the checkpoints that it was reading.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypedDict

import numpy as np

from lmeval_dispersion.errors import DispersionError, UsageError, without_secrets
from lmeval_dispersion.installation import __version__
from lmeval_dispersion.layouts import Form, Place, Text, checked
from lmeval_screener.checkpoints.snapshot import COMMIT, LocalSnapshot, Snapshot
from lmeval_screener.errors import GONE, OF_WEIGHTS, ScreeningError
from lmeval_screener.figures import figures_of, numbers_of
from lmeval_screener.formats import TOKENIZER_FILES
from lmeval_screener.orders import stored_order
from lmeval_screener.registry.states import UNKNOWN, cause_of, folder_is_gone, proven
from lmeval_screener.screened import Reading, Screened
from lmeval_screener.targets.names import Target, labelled, path_of, storable
from lmeval_screener.tokens.resolution import Resolution
from lmeval_screener.tokens.sets import TokenSet
from lmeval_screener.weights.body import are_body
from lmeval_screener.weights.copies import are_sketch

#: Words of --since that mean the end of an earlier run; its answer is given once.
NIGHTLY = ("last", "yesterday")
#: Raised when a figure, the rule that picks rows, or what is refused changes: results of an older method are
#: read again.
METHOD = 3
_ANEW = "begin a new registry: the checkpoints are then read again"
_BEGIN = "BEGIN IMMEDIATE"  # no other process writes until the block of a connection ends
_WAIT = 120.0  # seconds that a statement waits for another process; each holds the file for milliseconds
ANSWER = 10.0  # seconds from the end of a run to its answer, for which the next run waits
_STAMP = "%Y-%m-%d %H:%M:%S.%f"
_APPLICATION = 0x4C4D5352  # the mark of a registry in the file's header
#: File systems shared by several machines: SQLite's write-ahead log needs memory that all writers share.
_NETWORK = re.compile(
    "nfs4?|cifs|smb3|smbfs|9p|afs|ceph|lustre|gpfs|glusterfs|beegfs|virtiofs|sshfs"
)

if TYPE_CHECKING:
    from lmeval_screener.screening.selection import CompleteList


def _is_dtype(text: str) -> bool:
    """Whether a text may name a type: its bits, of which a rounding error is made, have three digits."""
    return 0 < len(text) <= 60 and re.search(r"\d{4}", text) is None


class _Shown(TypedDict):
    """What was measured, as columns of `results`; the view `checkpoints` shows them in this order.

    A new column belongs here or in `_Result`, and in `_CHANGES`.
    """

    repo: Place
    tokenizer: Place
    tensor: Text | None
    tensor_file: Text | None
    dtype: Annotated[str, Form(_is_dtype, "a type of tensors")]
    v_rows: Annotated[int, 1]
    width: Annotated[int, 1]
    tied: Literal[0, 1]
    parameters: Annotated[int, 0] | None
    ratio: float | None
    ratio_se: float | None
    gap_cosine: float | None
    gap_cosine_se: float | None
    gap_euclidean: float | None
    gap_euclidean_se: float | None
    warnings: Text
    bytes: int
    requests: int
    seconds: float


class _Result(_Shown):
    """All columns of `results` that hold a reading: what is stored of it, and checked when it is read."""

    revision: Place | None
    split: int
    numbers: bytes
    no_ratio: Text | None
    sketch: bytes | None
    base: Text | None
    body: bytes | None


# The change that brings a registry to each layout from the previous; its header has its own. Files of every
# released layout exist on users' disks: add changes here, edit none.
# Absent texts in keys are '' and never NULL. A row of `seen` covers all consecutive runs that saw a
# checkpoint unchanged.
_CHANGES = {
    1: """
CREATE TABLE runs (
    run PRIMARY KEY, started, ended, command, version, domain, reference, metric, tokens, screened, failed,
    bytes, requests, seconds
);
CREATE TABLE tokenizers (tokenizer, tokens, resolution, PRIMARY KEY (tokenizer, tokens));
CREATE TABLE names (asked PRIMARY KEY, identity, stamp);
CREATE TABLE results (
    identity, file, state, tokens, method, run, stamp, repo, revision, tokenizer, tensor, tensor_file,
    dtype, v_rows, width, tied, parameters, gap_cosine, gap_cosine_se, gap_euclidean, gap_euclidean_se,
    ratio, ratio_se, warnings, bytes, requests, seconds, split, numbers, no_ratio,
    PRIMARY KEY (identity, file, state, tokens, method)
);
CREATE TABLE seen (
    identity, requested, file, tokens, first, last, runs, run, state, family, scale, negative_control, method,
    version, error, message, PRIMARY KEY (identity, requested, file, tokens, first)
)""",
    # The end of the time that a nightly answer covers, '' until it is given; the sketch of the rows.
    2: "ALTER TABLE runs ADD COLUMN announced; ALTER TABLE results ADD COLUMN sketch BLOB",
    3: "ALTER TABLE results ADD COLUMN base; ALTER TABLE runs ADD COLUMN bases",
    # Whether the Hub called it private when it was seen, and the mark of the token that read it then; when a
    # name was found to be the former one.
    4: "ALTER TABLE seen ADD COLUMN private; ALTER TABLE seen ADD COLUMN token; "
    "ALTER TABLE names ADD COLUMN renamed; UPDATE seen SET error = 'Gone' "
    "WHERE error = 'FolderNotFound' AND message = 'the folder does not exist any more'",
    # The body in brief.
    5: "ALTER TABLE results ADD COLUMN body BLOB",
    # The start of the time that a nightly answer covers.
    6: "ALTER TABLE runs ADD COLUMN since",
    # The figure and the distance of G by which the family's file orders its members.
    7: "ALTER TABLE seen ADD COLUMN rank_by; ALTER TABLE seen ADD COLUMN metric",
}
_LAYOUT = max(_CHANGES)
# Columns of `seen` that a later run without a value keeps.
_KEPT = ("family", "scale", "rank_by", "metric", "private", "token")
_VIEWS = f"""
DROP VIEW IF EXISTS checkpoints;
DROP VIEW IF EXISTS sightings;
CREATE VIEW sightings AS
SELECT s.*, domain, reference, {", ".join(_Result.__annotations__)}
FROM seen s
LEFT JOIN results r ON s.error IS NULL AND r.identity = s.identity AND r.file = s.file
          AND r.state = s.state AND r.tokens = s.tokens AND r.method = s.method
LEFT JOIN (SELECT run, domain, reference FROM runs) u ON u.run = s.run;
CREATE VIEW checkpoints AS
SELECT s.identity, s.requested AS requested_revision, s.file, coalesce(revision, s.state) AS revision, domain,
       reference, s.family, s.scale, l.last AS seen, s.last AS measured, l.run, l.error, l.message,
       {", ".join(_Shown.__annotations__)}
FROM sightings s
JOIN seen l USING (identity, requested, file, tokens)
WHERE l.first = (SELECT max(first) FROM seen o WHERE o.identity = s.identity
                 AND o.requested = s.requested AND o.file = s.file AND o.tokens = s.tokens)
  AND s.first = (SELECT first FROM seen o WHERE o.identity = s.identity
                 AND o.requested = s.requested AND o.file = s.file AND o.tokens = s.tokens
                 ORDER BY coalesce(o.error, '') IN ({UNKNOWN}), first DESC LIMIT 1)
"""


@contextmanager
def to_write(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a registry for reading and writing; a missing one is created.

    On a full disk, the registry is copied into memory, and the run goes on with the copy.

    Raises:
        UsageError: The file is not a registry, cannot be written, lies in a folder that does not
            exist, or was written by a newer version of this package.
        DispersionError: SQLite failed, here or in the block: the file is damaged, or another
            process has locked it for 120 seconds.
    """
    if (path.exists() and not path.is_file()) or not path.absolute().parent.is_dir():
        advice = "name a file"
        if not path.exists():
            advice = f"create {path.absolute().parent} first"
        raise UsageError(
            f"expected a file in an existing folder, got {path}; {advice}", argument="registry"
        )
    with contextlib.suppress(OSError):  # of a folder that cannot be written, SQLite says more
        # It holds names of private repositories and folders.
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    with _opened(path, "rwc") as connection:
        try:
            _prepare(connection, path)
        except sqlite3.OperationalError as error:
            if not _is_full(error) or not path.stat().st_size:
                raise
            # On a full disk SQLite makes no journal: the registry is copied into memory, and the run goes on.
            with _opened(path, "ro&immutable=1") as stored:
                connection = _copied(stored, path)
        yield connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Make the tables of a new registry, update those of an older one to today's layout, set the journal."""
    # Of two processes that begin at once, the second waits, and then sees the tables.
    with connection:
        connection.execute(_BEGIN)
        if connection.execute("SELECT name FROM sqlite_master").fetchone() is None:
            connection.execute(f"PRAGMA application_id = {_APPLICATION}")
        _bring_up_to_date(connection, _layout_of(connection, path))
    # If machines share the file, use a journal without shared memory.
    is_shared = _NETWORK.fullmatch(file_system(path).removeprefix("fuse."))
    _set_journal(connection, "DELETE" if is_shared else "WAL")
    connection.execute("PRAGMA synchronous = NORMAL")


def _is_full(error: sqlite3.OperationalError) -> bool:
    """Whether a statement failed because the disk is full or broken."""
    return "full" in str(error) or "disk I/O" in str(error)


def _set_journal(connection: sqlite3.Connection, mode: str) -> None:
    """Set the kind of journal; SQLite itself does not wait for this while another process begins."""
    deadline = time.monotonic() + _WAIT
    while True:
        try:
            connection.execute(f"PRAGMA journal_mode = {mode}")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.01)


@contextmanager
def to_read(path: Path) -> Iterator[sqlite3.Connection]:
    """Open an existing registry read-only; statements can select from it and reach no other file.

    Raises:
        UsageError: The file does not exist, is not a registry, or was written by a newer version of
            this package.
        DispersionError: SQLite failed, as in `to_write`.
    """
    if not path.is_file():
        raise UsageError(
            f"expected a registry, but {path} does not exist; `screen-checkpoints … --registry "
            f"{path}` creates it"
        )
    # On a read-only disk no process writes, and SQLite could not register its readers.
    free = os.access(path, os.W_OK) and os.access(path.absolute().parent, os.W_OK)
    with _opened(path, "rw" if free else "ro&immutable=1") as connection:
        if _layout_of(connection, path) < _LAYOUT:
            connection = _copied(connection, path)  # a reader changes no file
        connection.set_authorizer(_allowed)
        yield connection


def _allowed(action: int, *_: object) -> int:
    """SQLite's answer to an action of a statement: a reader selects, and nothing else."""
    if action in (
        sqlite3.SQLITE_SELECT,
        sqlite3.SQLITE_READ,
        sqlite3.SQLITE_FUNCTION,
        sqlite3.SQLITE_RECURSIVE,
    ):
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def file_system(path: Path) -> str:
    """Return the type of the file system that holds a path, as Linux names it; empty if unknown."""
    place = path.resolve()
    kinds = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text("utf-8", "replace").splitlines():
            mount, kind = line.split(" ")[1:3]
            kinds[Path(mount.replace("\\040", " "))] = kind
    for folder in (place, *place.parents):
        if folder in kinds:
            return kinds[folder]
    return ""


@contextmanager
def _opened(path: Path, mode: str) -> Iterator[sqlite3.Connection]:
    """A database whose errors are sentences."""
    address = f"{path.absolute().as_uri()}?mode={mode}"
    try:
        # In a notebook, one thread may open it and another close it.
        with closing(
            sqlite3.connect(
                address, uri=True, timeout=_WAIT, isolation_level=None, check_same_thread=False
            )
        ) as connection:
            connection.row_factory = sqlite3.Row
            yield connection
    except sqlite3.Error as error:
        reason = str(error)
        # Only now: closing a file that SQLite has open would release its locks.
        if "not a database" in reason:
            with path.open("rb") as file:
                if not file.read(16).startswith(b"SQLite format 3"):
                    raise _other(path) from error
        if "unable to open" in reason:
            raise UsageError(
                f"the registry {path} cannot be opened; check the permissions of the file and of its "
                "folder, where SQLite creates a journal, or name another registry",
                argument="registry",
            ) from error
        place = path if path.exists() else path.absolute().parent
        if "readonly" in reason or not os.access(place, os.W_OK):
            raise UsageError(
                f"expected a writable file, got {path}; check its permissions", argument="registry"
            ) from error
        advice = "if the file is damaged, begin a new registry: the checkpoints are then read again"
        if "locked" in reason or "locking" in reason:
            advice = (
                f"another process has locked it for {_WAIT:.0f} seconds; try again when that "
                "process has ended. If no other process uses it, the file system "
                f"({file_system(path) or 'of unknown type'}) cannot lock files: name a registry on "
                "a local disk"
            )
        elif "full" in reason or "disk I/O" in reason:
            advice = "free some space, or name a registry on another disk"
        raise DispersionError(f"the registry {path} failed ({reason}): {advice}") from error


def _copied(connection: sqlite3.Connection, path: Path) -> sqlite3.Connection:
    """A copy of a registry in memory, in today's layout."""
    layout = _layout_of(connection, path)
    copy = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    copy.row_factory = sqlite3.Row
    connection.backup(copy)
    _bring_up_to_date(copy, layout)
    return copy


def _layout_of(connection: sqlite3.Connection, path: Path) -> int:
    """The layout of a registry; 0 for a new registry."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (layout,) = connection.execute("PRAGMA user_version").fetchone()
    if application != _APPLICATION:
        raise _other(path)
    if layout > _LAYOUT:
        raise UsageError(
            f"{path} was written by a newer version of lmeval-dispersion (expected layout "
            f"{_LAYOUT} or older, got {layout}); update this installation"
        )
    return int(layout)


def _bring_up_to_date(connection: sqlite3.Connection, layout: int) -> None:
    """Bring a registry from some layout to today's."""
    if layout == _LAYOUT:
        return
    changes = [_CHANGES[number] for number in range(layout + 1, _LAYOUT + 1)]
    for statement in ";".join([*changes, _VIEWS, f"PRAGMA user_version = {_LAYOUT}"]).split(";"):
        connection.execute(statement)


def _other(path: Path) -> UsageError:
    return UsageError(f"expected a registry of screen-checkpoints, got {path}; name another file")


class Opened(NamedTuple):
    """What identifies an opened checkpoint in a registry.

    Attributes:
        identity: The checkpoint's repository, folder or address, as `identity_of` returns it.
        state: The commit, or a hash of the files, as `state_of` returns it; empty if the checkpoint
            could not be opened.
        private: Whether the Hub calls the repository private; None if unknown.
    """

    identity: str
    state: str
    private: bool | None = None


class Session:
    """One run of the screener, which takes known readings from a registry and adds new ones.

    A reading holds the figures of a checkpoint (see `Reading`).

    Attributes:
        connection: The database; a copy in memory once the disk is full.
        run: Name of the run.
        since: The text of ``--since``; None without that option.
        ended: When the run ended (UTC); empty before :meth:`finish`.
        begun: Start (UTC) of the period that the run's news covers; None before the news is made.
        tokens: Key of the run's pair of token sets, 32 hex digits.
        token: Short hash that identifies the Hub token of the run; empty without a token.
        reused: Number of checkpoints whose readings were taken from the registry.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        domain: TokenSet,
        reference: TokenSet,
        *,
        command: str = "",
        path: Path = Path(),
        since: str | None = None,
    ) -> None:
        self.connection = connection
        self._path = path
        # Everything that decides which rows are read.
        self.tokens = _key(f"{domain.digest} {reference.digest}")
        now = datetime.datetime.now(datetime.timezone.utc)
        self.run = f"{now:%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:6]}"
        self.reused = 0
        self.token = ""
        self._resolutions: dict[str, Resolution] = {}
        self._opened: dict[Target, Opened] = {}
        self._taken: set[Target] = set()
        self._recorded: set[Target] = set()
        self.ended = ""
        self.since = since
        self.begun: str | None = None
        (stored,) = connection.execute("SELECT file FROM pragma_database_list")
        self._full_since = "" if stored["file"] else _now()
        self._started = _now()
        values = {
            "run": self.run,
            "started": self._started,
            "command": command,
            "version": __version__,
            "domain": domain.title,
            "reference": reference.name,
            "metric": "cosine",
            "tokens": self.tokens,
            "announced": "" if since in NIGHTLY else None,
        }
        self._write(lambda: self._put("runs", values))

    def pinned(self, target: Target) -> Reading | None:
        """Return the reading that the registry holds for a target's commit, without any request.

        None if the registry has no reading of the commit, if the commit is not known in advance, or
        if the target names a tokenizer.

        Raises:
            ScreeningError: The error that the registry holds for this commit.
            UsageError: The stored reading is damaged.
        """
        commit = target.revision
        private = None
        if target.listed:
            commit = target.listed.commit
            private = target.listed.private
        if not target.on_hub or target.tokenizer or commit is None or not COMMIT.fullmatch(commit):
            return None
        # The commit identifies it, whatever its repository is called now.
        identity = self._known_as(identity_of(target, target.repo))
        return self._find(target, Opened(identity, commit, private))

    def find(
        self, target: Target, snapshot: Snapshot, base: Snapshot | None = None
    ) -> Reading | None:
        """Return the reading that the registry holds for a checkpoint with these very files.

        None if the registry has no reading of these files.

        Args:
            target: The checkpoint.
            snapshot: The checkpoint's files.
            base: The files of its base, for an adapter whose base lies elsewhere.

        Raises:
            ScreeningError: The error that the registry holds for these files.
            UsageError: The stored reading is damaged.
        """
        state = state_of(target, snapshot, base)
        opened = Opened(identity_of(target, snapshot.repo), state, snapshot.private)
        self._opened[target] = opened
        return self._find(target, opened)

    def _known_as(self, asked: str) -> str:
        """The identity behind an address."""
        row = self.connection.execute(
            "SELECT identity FROM names WHERE asked = ?", [asked]
        ).fetchone()
        return asked if row is None else str(row[0])

    def _find(self, target: Target, opened: Opened) -> Reading | None:
        same = "identity = ? AND file = ? AND state = ? AND tokens = ?"
        place = [opened.identity, storable(target.file or ""), opened.state, self.tokens]
        # A failure in this version counts more than an earlier version's results.
        failed = self.connection.execute(
            f"SELECT error, message FROM seen WHERE {same} AND version = ? AND error IS NOT NULL "
            "ORDER BY last DESC",
            [*place, __version__],
        ).fetchone()
        if failed is not None and failed["error"] in OF_WEIGHTS:
            self._opened[target] = opened
            raise ScreeningError(*failed)
        row = self.connection.execute(
            f"SELECT * FROM results WHERE {same} AND method = ?", [*place, METHOD]
        ).fetchone()
        if row is None:
            return None
        if row["tokenizer"] not in self._resolutions:
            self._resolutions |= _resolutions(self.connection, self.tokens)
        self._opened[target] = opened
        self._taken.add(target)
        self.reused += 1
        return _reading_of(row, target, self._resolutions)

    def keep(self, target: Target, outcome: Reading | ScreeningError) -> None:
        """Record the outcome of reading a checkpoint.

        Some outcomes are not recorded: ``Interrupted``; ``RowsOfBase``, since an adapter whose base
        cannot be read has not failed and has no figures; and the refusal of a name that the
        registry does not know.
        """
        asked = identity_of(target, target.repo)
        opened = self._opened.pop(target, None) or Opened(self._known_as(asked), "")
        error = outcome if isinstance(outcome, ScreeningError) else None
        if error is not None and error.code in ("Interrupted", "RowsOfBase"):
            return
        if target.refused is not None and self._last(target, opened.identity) is None:
            return
        is_new = isinstance(outcome, Reading) and target not in self._taken

        def write() -> None:
            if isinstance(outcome, Reading):
                if is_new:
                    self._keep_result(
                        outcome, opened.identity, storable(target.file or ""), opened.state
                    )
                if self._known_as(asked) != opened.identity:
                    self._name(asked, opened.identity)
            self._keep_seen(target, opened, error)

        self._write(write)
        if error is not None:
            self._recorded.add(target)
        self._taken.discard(target)
        if isinstance(outcome, Reading):
            self._resolutions.setdefault(outcome.tokenizer, outcome.resolution)

    def _write(self, write: Callable[[], object]) -> None:
        """Write in its own transaction; once the disk is full, into a copy in memory."""
        try:
            with self.connection:
                self.connection.execute(_BEGIN)
                write()
        except sqlite3.OperationalError as error:
            if self._full_since or not _is_full(error):
                raise
            self._full_since = _now()
            self.connection = _copied(self.connection, self._path)
            self._write(write)

    @property
    def loss(self) -> str:
        """A sentence on the results that could not be written to the registry; empty if all were."""
        if not self._full_since:
            return ""
        return (
            f"the registry {self._path} could not be written after {self._full_since[:16]} UTC "
            "because its disk is full or failing; free some space, and the next run reads and "
            "announces the later results again"
        )

    def holds(self, target: Target) -> bool:
        """Whether this run has recorded a failure of the checkpoint in the registry."""
        return target in self._recorded

    def last_known(self, target: Target, error: ScreeningError) -> Reading | None:
        """Return the last reading of a checkpoint that cannot be read now.

        None if the checkpoint was never read, or if ``error`` shows that its weights cannot be
        screened or that it is gone.
        """
        if cause_of(error.code).state != "unknown":
            return None
        identity = self._known_as(identity_of(target, target.repo))
        place = target.revision, target.file
        for seen in last_seen(self.connection, self.tokens, identity=identity):
            if (seen.target.revision, seen.target.file) == place and seen.reading is not None:
                # A path that does not exist was not seen to be local.
                target = replace(target, local=seen.target.local, refused=None)
                return replace(seen.reading, target=target)
        return None

    def _keep_result(self, reading: Reading, identity: str, file: str, state: str) -> None:
        if reading.tokenizer not in self._resolutions:
            resolution = {
                "tokenizer": reading.tokenizer,
                "tokens": self.tokens,
                "resolution": reading.resolution.to_json(),
            }
            self._put("tokenizers", resolution)
        place = {
            "identity": identity,
            "file": file,
            "state": state,
            "tokens": self.tokens,
            "method": METHOD,
            "run": self.run,
            "stamp": _now(),
        }
        self._put("results", {**place, **_result_of(reading)})

    def _place(self, target: Target, identity: str) -> dict[str, str]:
        requested = storable(target.revision or "")
        file = storable(target.file or "")
        return {"identity": identity, "requested": requested, "file": file, "tokens": self.tokens}

    def _last(self, target: Target, identity: str) -> sqlite3.Row | None:
        """The last row of a checkpoint, and whether it was ever read."""
        same = (
            "identity = :identity AND requested = :requested AND file = :file AND tokens = :tokens"
        )
        row: sqlite3.Row | None = self.connection.execute(
            f"SELECT *, EXISTS (SELECT 1 FROM seen WHERE {same} AND error IS NULL) AS was_read FROM seen "
            f"WHERE {same} ORDER BY first DESC",
            self._place(target, identity),
        ).fetchone()
        return row

    def _keep_seen(self, target: Target, opened: Opened, error: ScreeningError | None) -> None:
        """Extend the checkpoint's last row if it is unchanged, or begin another."""
        identity, state, private = opened
        now = self._moment()
        row = self._last(target, identity)
        error = error and proven(error, identity, row, self.token)
        code = error and error.code
        last = dict.fromkeys(_KEPT) if row is None else dict(row)
        first = now
        runs = 1
        if row is not None and (row["state"], row["error"]) == (state, code):
            first = row["first"]
            runs = row["runs"]
            if row["run"] != self.run:
                runs += 1
        if private is None:
            private = last["private"]
        token = self.token or None
        if error:
            token = last["token"]
        elif private == 0:
            token = None  # for a public checkpoint the token does not matter
        sighting = {
            "first": first,
            "last": now,
            "runs": runs,
            "run": self.run,
            "state": state,
            "family": target.family or last["family"],
            "scale": target.scale or last["scale"],
            "rank_by": target.order.rank_by or last["rank_by"],
            "metric": target.order.metric or last["metric"],
            "negative_control": target.negative_control,
            "method": METHOD,
            "version": __version__,
            "error": code,
            "message": error and str(error),
            "private": private,
            "token": token,
        }
        self._put("seen", self._place(target, identity) | sighting)

    def _name(self, asked: str, identity: str) -> None:
        """Record the identity behind an address; a checkpoint that had this address keeps its past."""
        was = self.connection.execute("SELECT 1 FROM seen WHERE identity = ?", [asked]).fetchone()
        renamed = self._moment() if was else None
        self._put(
            "names", {"asked": asked, "identity": identity, "stamp": _now(), "renamed": renamed}
        )
        self.connection.execute(
            "UPDATE names SET identity = ? WHERE identity = ?", [identity, asked]
        )
        if not was:
            return
        self.connection.execute("DELETE FROM seen WHERE identity = ? AND error = ?", [asked, GONE])
        for table in ("results", "seen"):
            self.connection.execute(
                f"UPDATE OR IGNORE {table} SET identity = ? WHERE identity = ?", [identity, asked]
            )
            self.connection.execute(f"DELETE FROM {table} WHERE identity = ?", [asked])
        repo = "UPDATE results SET repo = ? WHERE identity = ?"
        self.connection.execute(repo, [plain_name(identity), identity])

    def missing(self, lists: Sequence[CompleteList]) -> list[tuple[Seen, ScreeningError]]:
        """Return the known checkpoints that complete listings lack, or list without weights.

        Checkpoints that this run has seen, or that are known to be gone, are left out.

        Args:
            lists: Listings with all repositories of an author.

        Returns:
            The last known state of each checkpoint, with the error to record.
        """
        missing: list[tuple[Seen, ScreeningError]] = []
        if not lists:
            return missing
        for seen in last_seen(self.connection, self.tokens):
            repo = seen.target.repo
            was_seen = seen.looked >= self._started
            if not seen.target.on_hub or was_seen or cause_of(seen.error).state == "gone":
                continue
            for names in lists:
                reason = names.missing(repo)
                if reason:
                    code = GONE if repo in names.without_weights else "RepoNotFound"
                    missing.append((seen, ScreeningError(code, reason)))
        return missing

    def can_prove(self, seen: Seen, error: ScreeningError) -> bool:
        """Whether an answer of the Hub would prove that a missing checkpoint is gone.

        It would if the checkpoint was public when last seen, or if this run's token has read it
        before. False if ``error`` already says that the checkpoint is gone.
        """
        return error.code != GONE and (
            seen.private == 0 or bool(self.token and seen.token == self.token)
        )

    def rename(self, seen: Seen, repo: str) -> None:
        """Record the new name ``repo`` (``ORG/NAME``) of a known repository."""
        self._write(lambda: self._name(seen.identity, f"hf://{repo}"))

    def lose(self, seen: Seen, error: ScreeningError) -> None:
        """Record that a known checkpoint failed.

        The recorded error is ``Gone`` if `states.proven` shows that the checkpoint is gone, and
        ``error`` otherwise.
        """
        self._write(lambda: self._keep_seen(seen.target, Opened(seen.identity, ""), error))

    def _follow(self) -> None:
        """Join what is gone since this run to a new name in the same state: a commit, or files with times."""
        renamed = self.connection.execute(
            "SELECT g.identity, n.identity FROM seen g JOIN seen r USING (identity, requested, file, tokens) "
            "JOIN seen n ON n.tokens = g.tokens AND n.state = r.state AND n.error IS NULL "
            "WHERE g.tokens = ? AND g.error = ? AND g.first > ? AND r.error IS NULL "
            "GROUP BY n.identity HAVING (SELECT min(first) FROM seen WHERE identity = n.identity) > ?",
            [self.tokens, GONE, self._started, self._started],
        )
        for former, new in renamed.fetchall():
            self._name(former, new)

    def _put(self, table: str, row: Mapping[str, Any]) -> None:
        """Insert a row, or replace the row with the same key."""
        names = ", ".join(row)
        marks = ", ".join("?" * len(row))
        values = [storable(value) if isinstance(value, str) else value for value in row.values()]
        self.connection.execute(
            f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({marks})", values
        )

    def finish(
        self,
        checkpoints: Sequence[Screened],
        *,
        failed: int,
        bytes_read: int,
        requests: int,
        seconds: float,
    ) -> None:
        """Record the end of the run with its totals, deleted folders, and renamed checkpoints.

        With ``--since last`` or ``yesterday`` the call then waits, for 10 seconds at most, until
        runs that ended shortly before have announced their news.

        Args:
            checkpoints: The ranked checkpoints.
            failed: Number of checkpoints that failed.
            bytes_read: Bytes transferred.
            requests: Number of requests.
            seconds: Wall time of the run.
        """
        for seen in last_seen(self.connection, self.tokens):
            if seen.reading is not None and folder_is_gone(seen.identity):
                self.lose(
                    seen, ScreeningError("FolderNotFound", "the folder does not exist any more")
                )

        def write() -> None:
            self._follow()
            # No other process writes now: every other sighting and new name is before this moment, or after.
            self.ended = self._moment(
                "SELECT max(first) FROM seen UNION ALL SELECT max(renamed) FROM names"
            )
            totals = [len(checkpoints), failed, bytes_read, requests, round(seconds, 3)]
            bases = storable("\n".join(c.place for c in checkpoints if c.is_base))
            self.connection.execute(
                "UPDATE runs SET ended = ?, screened = ?, failed = ?, bytes = ?, requests = ?, seconds = ?, "
                "bases = ? WHERE run = ?",
                [self.ended, *totals, bases, self.run],
            )
            # Bodies on the Hub are read only once rows are seen to be equal.
            self.connection.executemany(
                "UPDATE results SET body = ? WHERE tokens = ? AND repo = ? AND revision = ? AND sketch = ?",
                [
                    (c.body, self.tokens, c.repo, c.revision, c.sketch)
                    for c in checkpoints
                    if c.equals
                ],
            )

        self._write(write)
        # News that a run which ended just before announces are not this run's; a killed run never answers.
        since = datetime.datetime.fromisoformat(self.ended) - datetime.timedelta(seconds=ANSWER)
        where = "tokens = ? AND announced = '' AND ended > ? AND ended < ?"
        others = [self.tokens, f"{since:{_STAMP}}", self.ended]
        if self.since not in NIGHTLY:
            return
        deadline = time.monotonic() + ANSWER
        while time.monotonic() < deadline:
            if not self.connection.execute(f"SELECT 1 FROM runs WHERE {where}", others).fetchone():
                return
            time.sleep(0.05)

    def _moment(self, also: str = "SELECT NULL") -> str:
        """Now, or after the end of every run and all that ``also`` selects, if another clock is ahead."""
        query = f"SELECT max(stamp) FROM (SELECT max(ended) AS stamp FROM runs UNION ALL {also})"
        (last,) = self.connection.execute(query).fetchone()
        now = _now()
        if last is None or now > last:
            return now
        after = datetime.datetime.fromisoformat(last) + datetime.timedelta(microseconds=1)
        return f"{after:{_STAMP}}"

    def announced(self) -> None:
        """Record that this run has announced its news, so that later runs do not repeat it."""
        announced = "UPDATE runs SET announced = ended, since = ? WHERE run = ? AND announced = ''"
        self._write(lambda: self.connection.execute(announced, [self.begun, self.run]))


def identity_of(target: Target, repo: str) -> str:
    """Return the name under which a registry holds all revisions of a checkpoint.

    It is ``hf://ORG/NAME``, ``file://`` with the absolute path, or the address. ``repo`` is the
    present name of the target's repository, or the address.
    """
    if target.local or (target.refused and target.refused[0] == "FolderNotFound"):
        return storable(f"file://{Path(target.repo).resolve()}")
    return repo if "://" in repo else f"hf://{repo}"


def plain_name(identity: str) -> str:
    """Return an identity as commands take it: ``ORG/NAME``, a path or an address."""
    return re.sub("^(hf|file)://", "", identity)


def state_of(target: Target, snapshot: Snapshot, base: Snapshot | None = None) -> str:
    """Return a text that changes with the files of a checkpoint.

    It also changes with the files of ``base``, if given, and with those of a tokenizer that was
    named for the checkpoint. For a repository without either it is the commit.
    """
    states = [_state(snapshot)]
    if base is not None:
        states.append(_state(base))
    if target.tokenizer is not None:
        digests = []
        for name, entry in sorted(snapshot.files.items()):
            if name in TOKENIZER_FILES:
                digests.append(f"{name}:{entry.digest or time.time()}")
        states.append(f"{without_secrets(target.tokenizer)} {' '.join(digests)}")
    return "+".join(states)


def _state(snapshot: Snapshot) -> str:
    """Return the commit; else a hash of the listing, with the time of each file's last change."""
    if snapshot.revision is not None:
        return snapshot.revision
    lines = []
    for path, entry in sorted(snapshot.files.items()):
        if path in snapshot.borrowed:
            continue
        changed: float | None = None
        if isinstance(snapshot, LocalSnapshot):
            with contextlib.suppress(OSError):
                changed = (snapshot.folder / path).stat().st_mtime_ns
        elif entry.digest is None:
            changed = time.time()  # a file without a version may change
        lines.append(f"{path} {entry.size} {entry.digest} {changed}")
    listing = "\n".join(lines)
    return f"files:{_key(listing)}"


def _key(text: str) -> str:
    """A digest of a text, 32 hex digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]


@dataclass(frozen=True)
class Seen:
    """The last known state of a checkpoint.

    Days are texts such as ``2026-11-23``; times are UTC.

    Attributes:
        target: The checkpoint as requested, by its present name.
        identity: The checkpoint's repository, folder or address, as `identity_of` returns it.
        state: The commit, or a hash of a folder's listing; empty if the checkpoint could not be
            reached.
        error: Code of the last error; empty if the checkpoint was read.
        message: The error in a sentence; empty if there is none.
        reading: The figures; if the checkpoint cannot be read now, the last known ones. None if
            there are none.
        as_of: Last day on which the checkpoint could be read; empty if it can be read now, or has
            no reading.
        since: Day since which the checkpoint has failed; empty if it does not fail.
        looked: When a run last tried to read the checkpoint.
        private: 1 if the Hub called the checkpoint private, 0 if public; None if unknown.
        token: Short hash that identifies the Hub token that read the checkpoint; None for a public
            checkpoint or without a token.
    """

    target: Target
    identity: str
    state: str
    error: str
    message: str
    reading: Reading | None
    as_of: str = ""
    since: str = ""
    looked: str = ""
    private: int | None = None
    token: str | None = None

    @property
    def key(self) -> int:
        """A number that identifies the figures of the reading, before and after they are ranked.

        It is defined only for a state with a ``reading``.
        """
        assert self.reading is not None
        return id(self.reading.gaps)

    def called(self, target: Target) -> Seen:
        """Return a copy of this state, and of its reading, with ``target`` in place of its own."""
        reading = self.reading and replace(self.reading, target=target)
        return replace(self, target=target, reading=reading)


def last_seen(
    connection: sqlite3.Connection, tokens: str, *, until: str = "9", identity: str | None = None
) -> list[Seen]:
    """Return the last known state of every checkpoint, the earliest known first.

    Each combination of an identity, a requested revision and a file is one checkpoint.

    Args:
        connection: The registry.
        tokens: Key of the pair of token sets.
        until: A time (UTC); states that were first seen later are left out. Default: none are left
            out.
        identity: Only the checkpoints of this identity. Default: all.

    Raises:
        UsageError: A row of the registry is damaged.
    """
    resolutions = _resolutions(connection, tokens)
    values = [tokens, until]
    of_identity = ""
    if identity is not None:
        values.append(identity)
        of_identity = "AND identity = ?"
    rows = connection.execute(
        # A folder or repository that was once screened in a family stays in it when it is named alone.
        "SELECT * FROM (SELECT *, coalesce(family, max(family) OVER same) AS of_family, "
        "coalesce(scale, max(scale) OVER same) AS of_scale, "
        "coalesce(rank_by, max(rank_by) OVER same) AS of_rank_by, "
        "coalesce(metric, max(metric) OVER same) AS of_metric, "
        "max(negative_control) OVER same AS control, "
        "min(first) OVER same AS known, "
        "first_value(error) OVER latest AS last_error, first_value(message) OVER latest AS last_message, "
        "first_value(last) OVER latest AS looked, "
        "min(CASE WHEN reads = 0 THEN first END) OVER (PARTITION BY identity, requested, file) AS failing, "
        f"row_number() OVER (PARTITION BY identity, requested, file "
        f"ORDER BY coalesce(error, '') IN ({UNKNOWN}), first DESC) AS age "
        # How often it was read in this row or since.
        "FROM (SELECT *, sum(error IS NULL) OVER "
        "(PARTITION BY identity, requested, file ORDER BY first DESC) AS reads FROM sightings "
        f"WHERE tokens = ? AND first <= ? {of_identity}) "
        "WINDOW same AS (PARTITION BY identity), "
        "latest AS (PARTITION BY identity, requested, file ORDER BY first DESC)) "
        # Among copies, the one in the earliest run is the original.
        "WHERE age = 1 ORDER BY coalesce((SELECT min(ended) FROM runs WHERE ended >= known), '9'), "
        "identity, requested, file",
        values,
    ).fetchall()
    latest = []
    for row, target in zip(rows, labelled([_target_of(row) for row in rows]), strict=True):
        reading = None
        if row["repo"] is not None:
            reading = _reading_of(row, target, resolutions)
        # An error of the weights, or their deletion, counts more than a later failure to look.
        kind = "" if row["error"] else "last_"
        error = row[f"{kind}error"] or ""
        message = row[f"{kind}message"] or ""
        as_of = ""
        if reading is not None and error:
            as_of = row["last"][:10]
            warning = f"figures as of {as_of}; the checkpoint has not been readable since ({error})"
            reading = replace(reading, warnings=(*reading.warnings, warning))
        latest.append(
            Seen(
                target,
                row["identity"],
                row["state"],
                error,
                message,
                reading,
                as_of,
                since=row["failing"][:10] if error else "",
                looked=row["looked"],
                private=row["private"],
                token=row["token"],
            )
        )
    return latest


def _target_of(row: sqlite3.Row) -> Target:
    """The target of a row of `last_seen`."""
    return Target(
        path_of(plain_name(row["identity"])),
        row["requested"] or None,
        row["of_family"],
        row["of_scale"],
        order=stored_order(row["of_rank_by"], row["of_metric"]),
        local=row["identity"].startswith("file://"),
        negative_control=bool(row["control"]),
        file=path_of(row["file"]) or None,
    )


def _result_of(reading: Reading) -> _Result:
    """A reading as columns of `results`."""
    cosine = reading.gaps["cosine"]
    euclidean = reading.gaps["euclidean"]
    ratio = reading.ratio
    ratio_mean = None
    ratio_se = None
    if ratio is not None:
        ratio_mean = _finite(ratio.mean)
        ratio_se = _finite(ratio.se)
    return {
        "repo": reading.repo,
        "tokenizer": reading.tokenizer,
        "tensor": reading.tensor,
        "tensor_file": reading.file,
        "dtype": reading.dtype,
        "v_rows": reading.shape[0],
        "width": reading.shape[1],
        "tied": 1 if reading.tied else 0,
        "parameters": reading.parameters,
        "ratio": ratio_mean,
        "ratio_se": ratio_se,
        "gap_cosine": _finite(cosine.mean),
        "gap_cosine_se": _finite(cosine.se),
        "gap_euclidean": _finite(euclidean.mean),
        "gap_euclidean_se": _finite(euclidean.se),
        "warnings": json.dumps(reading.warnings),
        "bytes": reading.bytes_read,
        "requests": reading.requests,
        "seconds": round(reading.seconds, 3),
        "revision": reading.revision,
        "split": len(reading.resolution.domain),
        "numbers": numbers_of(reading.gaps, ratio).astype("<f8").tobytes(),
        "no_ratio": reading.no_ratio,
        "sketch": reading.sketch or None,
        "base": reading.base or None,
        "body": reading.body or None,
    }


def _finite(figure: float) -> float | None:
    return figure if math.isfinite(figure) else None


def _resolutions(connection: sqlite3.Connection, tokens: str) -> dict[str, Resolution]:
    """The rows of T and R in every known tokenizer; UsageError for a damaged one."""
    rows = connection.execute(
        "SELECT tokenizer, resolution FROM tokenizers WHERE tokens = ?", [tokens]
    )
    resolutions = {}
    for tokenizer, text in rows:
        try:
            resolutions[tokenizer] = Resolution.from_json(text)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(
                f"the registry is damaged (its rows for tokenizer {tokenizer}: {error}); {_ANEW}"
            ) from error
    return resolutions


def _reading_of(row: sqlite3.Row, target: Target, resolutions: dict[str, Resolution]) -> Reading:
    """A stored row as a reading; it cost nothing this time. UsageError for a damaged row."""
    place = f"the registry's row of {target.label}"
    result = checked(_Result, dict(row), place, _ANEW)
    resolution = resolutions.get(result["tokenizer"])
    sketch = result["sketch"] or b""
    body = result["body"] or b""
    try:
        warnings = checked(Sequence[Text], json.loads(result["warnings"]), place, _ANEW)  # type: ignore[type-abstract]
        if resolution is None:
            raise ValueError("its tokenizer is missing")
        if not (are_sketch(sketch) and are_body(body)):
            raise ValueError("its stored fingerprint is truncated")
        sizes = map(len, (resolution.domain, resolution.reference, resolution.of_ratio))
        gaps, ratio = figures_of(np.frombuffer(result["numbers"], dtype="<f8"), *sizes)
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{place} is damaged ({error}); {_ANEW}") from error
    return Reading(
        target=target,
        repo=result["repo"],
        revision=result["revision"],
        tensor=result["tensor"] or "",
        file=result["tensor_file"] or "",
        dtype=result["dtype"],
        shape=(result["v_rows"], result["width"]),
        tied=bool(result["tied"]),
        parameters=result["parameters"],
        tokenizer=result["tokenizer"],
        resolution=resolution,
        gaps=gaps,
        warnings=tuple(warnings),
        bytes_read=0,
        requests=0,
        seconds=0.0,
        ratio=ratio,
        no_ratio=result["no_ratio"] or "",
        sketch=sketch,
        base=result["base"] or "",
        body=body,
    )


def _now() -> str:
    return f"{datetime.datetime.now(datetime.timezone.utc):{_STAMP}}"
