"""The file of a registry: what was measured of every checkpoint, in a DuckDB file; runs add to it.

One process at a time opens the file, behind a lock, for as long as a merge or a query takes. A run itself
only appends to a segment of its own (`journal`), so any number of them may go on side by side, and one that
is killed loses no more than what was being read.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import math
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lmeval_dispersion.errors import DispersionError, MissingExtraError, UsageError
from lmeval_dispersion.geometry import METRICS
from lmeval_dispersion.version import __version__
from lmeval_screener.checkpoints.local import LocalSnapshot
from lmeval_screener.checkpoints.snapshot import Snapshot
from lmeval_screener.checkpoints.source import WithTokenizer
from lmeval_screener.errors import ScreeningError
from lmeval_screener.ranking.figures import figures_of, numbers_of
from lmeval_screener.reading import Reading
from lmeval_screener.registry.known import KnownRows
from lmeval_screener.registry.schema import METHOD, check, load, prepare
from lmeval_screener.targets.target import Target
from lmeval_screener.tokens.cache import resolution_of, resolution_text
from lmeval_screener.tokens.resolution import Resolution
from lmeval_screener.tokens.sets import TokenSet
from lmeval_screener.tokens.vocabulary import TOKENIZER_FILES

if TYPE_CHECKING:
    import duckdb

    from lmeval_screener.result import Result

_ROWS = 500  # rows that are taken out of the database at once
# A merge is no analysis: it needs neither many cores nor the share of memory that DuckDB would take.
_MODEST = {"threads": 1, "memory_limit": "256MB", "preserve_insertion_order": False}
_ROW_GROUP = 2048
_WAIT = 600.0  # seconds that a process waits for another one's merge or query
_COMMIT = re.compile(r"[0-9a-f]{40}")
#: Errors of a checkpoint as it is stored: the same commit fails the same way again.
LASTING = frozenset(
    {
        *("NoSafetensors", "AdapterOnly", "SeveralFiles", "BadArchive", "LegacyPickle", "UnsafePickle"),
        *("ScatteredRows", "QuantizedTensor", "SlicedTensor", "NoOutputProjection", "BadConfig", "BadIndex"),
        *("BadHeader", "BadRows", "BadTokenizer", "TokenizerNotFound", "TooFewTokens"),
    }
)


class Registry:
    """A registry's file.

    Args:
        path: The DuckDB file; made where it is not there yet, if somebody writes.

    Raises:
        MissingExtraError: duckdb or filelock is not installed.
        UsageError: The file cannot be in that folder.
    """

    def __init__(self, path: Path) -> None:
        try:
            import duckdb  # noqa: F401
            import filelock  # noqa: F401
        except ImportError as error:
            raise MissingExtraError(
                f"a registry needs {error.name}: pip install 'lmeval-dispersion[registry]'"
            ) from error
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise UsageError(f"expected --registry to be a file in an existing folder, got {path}")
        self.path = path

    @contextmanager
    def written(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """The database, to read and write, with all segments of ended processes merged.

        Raises:
            DispersionError: It cannot be opened, or another process holds it for too long.
        """
        from lmeval_screener.registry.journal import abandoned

        with self._alone(), self._opened(read_only=False) as connection:
            prepare(connection, self.path)
            for segment, _ in abandoned(self.path):
                load(connection, segment)
                # Only what the database has on disk may go.
                connection.execute("CHECKPOINT")
                segment.unlink()
                segment.with_name(segment.name + ".lock").unlink(missing_ok=True)
            yield connection

    def check_there(self) -> None:
        """Whether there is a registry yet.

        Raises:
            UsageError: There is none.
        """
        if not self.path.exists():
            raise UsageError(
                f"expected a registry, got {self.path}, which is not there; --registry makes one"
            )

    @contextmanager
    def read(self, memory: str = "256MB") -> Iterator[duckdb.DuckDBPyConnection]:
        """The database, for reading only: no statement can change it, or reach another file.

        Args:
            memory: What DuckDB may hold; what it needs beyond goes to a temporary folder.

        Raises:
            UsageError: There is no such registry.
            DispersionError: As :meth:`written`.
        """
        self.check_there()
        if os.access(self.path, os.W_OK) and os.access(self.path.absolute().parent, os.W_OK):
            with self.written():
                pass
        with self._alone(), self._opened(read_only=True) as connection:
            check(connection, self.path)
            connection.execute(f"SET memory_limit = '{memory}'")
            connection.execute("SET enable_external_access = false")
            connection.execute("SET lock_configuration = true")
            yield connection

    @contextmanager
    def _alone(self) -> Iterator[None]:
        from filelock import FileLock, Timeout

        try:
            with FileLock(f"{self.path}.lock", timeout=_WAIT):
                yield
        except Timeout as error:
            raise DispersionError(
                f"waited {_WAIT:.0f} seconds for another process that uses {self.path}; "
                "try again when it ended"
            ) from error
        except PermissionError as error:
            raise UsageError(f"expected --registry where writing is allowed, got {self.path}") from error

    @contextmanager
    def _opened(self, *, read_only: bool) -> Iterator[duckdb.DuckDBPyConnection]:
        import duckdb

        try:
            connection = duckdb.connect(config=_MODEST)
            place = str(self.path).replace("'", "''")
            # A group of rows is read and written as a whole: DuckDB's own groups would hold 250 MB.
            mode = "READ_ONLY" if read_only else f"ROW_GROUP_SIZE {_ROW_GROUP}"
            connection.execute(f"ATTACH '{place}' AS registry ({mode})")
            connection.execute("USE registry")
        except duckdb.Error as error:
            raise DispersionError(f"could not open the registry {self.path}: {error}") from error
        try:
            yield connection
        except duckdb.Error as error:
            raise DispersionError(f"the registry {self.path} failed: {error}") from error
        finally:
            connection.close()


def tokens_key(domain: TokenSet, reference: TokenSet) -> str:
    """What identifies a pair of token sets: a hash of all that decides which rows are read."""
    return hashlib.sha256(f"{domain.digest} {reference.digest}".encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Seen:
    """What a run found of one checkpoint.

    Attributes:
        identity: The repository, folder or address.
        requested: Branch, tag or commit that was asked for; empty for the default.
        file: The GGUF file that was asked for; empty for none.
        state: The commit, or a hash of a folder's listing; empty where it was not reached.
        error: Its code, empty where it was measured.
        message: And its sentence.
        measured: What was measured, where it was.
    """

    identity: str
    requested: str
    file: str
    state: str
    error: str
    message: str
    measured: Reading | None


class Session:
    """One run that takes from a registry what it has and adds what it reads.

    Args:
        registry: The registry.
        domain: T.
        reference: R.
        metric: Which gap ranks.
        command: The command, for the list of runs.
        refresh: Whether to read everything again.
    """

    def __init__(
        self,
        registry: Registry,
        domain: TokenSet,
        reference: TokenSet,
        *,
        metric: str = "cosine",
        command: str = "",
        refresh: bool = False,
    ) -> None:
        from lmeval_screener.registry.journal import Segment

        self.registry, self.refresh = registry, refresh
        self.tokens = tokens_key(domain, reference)
        self.run = f"{datetime.datetime.now(datetime.timezone.utc):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:6]}"
        #: Checkpoints that were taken from the registry.
        self.reused = 0
        self._known = KnownRows()
        self._resolutions: Mapping[str, Resolution] = {}
        #: What addresses that were asked for turned out to be, where that is another one.
        self._names: dict[str, str] = {}
        self._opened: dict[Target, tuple[str, str]] = {}
        self._taken: set[Target] = set()
        self._told: set[str] = set()
        with registry.written():  # to fail before anything is read
            pass
        self._segment = Segment(registry.path)
        self._entry = {
            "k": "runs", "run": self.run, "started": _now(), "command": command, "version": __version__,
            "domain": domain.name, "reference": reference.name, "metric": metric, "tokens": self.tokens,
        }  # fmt: skip
        self._segment.append(self._entry)

    def prepare(self, targets: Sequence[Target]) -> None:
        """Take in what the registry knows of some repositories and folders."""
        if self.refresh:
            return
        wanted = sorted({identity_of(item, item.repo) for item in targets})
        with self.registry.read(memory="64MB") as connection:
            self._resolutions = _resolutions(connection, self.tokens)
            connection.execute("CREATE TEMP TABLE wanted AS SELECT unnest(?) AS identity", [wanted])
            names = "SELECT asked, identity FROM names WHERE asked IN (SELECT identity FROM wanted)"
            self._names = dict(connection.execute(names).fetchall())
            connection.execute("INSERT INTO wanted SELECT unnest(?)", [sorted(set(self._names.values()))])
            self._known.take(((row[0], row[2], row[3]), row) for row in _every_state(connection, self.tokens))
            # What a checkpoint failed with in this version counts more than what an earlier one measured.
            failed = connection.execute(
                "SELECT identity, file, state, error, message FROM seen WHERE tokens = ? AND version = ? "
                "AND identity IN (SELECT identity FROM wanted) AND list_contains(?, error) AND state <> ''",
                [self.tokens, __version__, sorted(LASTING)],
            )
            while rows := failed.fetchmany(_ROWS):
                self._known.take(((row[0], row[1], row[2]), row[3:]) for row in rows)

    def pinned(self, target: Target) -> Reading | None:
        """What is known of a target whose commit is known before anything is asked.

        Raises:
            ScreeningError: It failed before, and that commit always will.
        """
        commit = target.listing.commit if target.listing else target.revision
        if not target.on_hub or target.tokenizer or commit is None or not _COMMIT.fullmatch(commit):
            return None
        asked = identity_of(target, target.repo)
        # The commit says what it is, whatever its repository is called now.
        return self._find(target, self._names.get(asked, asked), commit)

    def known(self, target: Target, snapshot: Snapshot, base: Snapshot | None = None) -> Reading | None:
        """What is known of a checkpoint as it was opened.

        Raises:
            ScreeningError: It failed before, and that commit always will.
        """
        identity, state = identity_of(target, snapshot.repo), state_of(target, snapshot, base)
        self._opened[target] = identity, state
        return self._find(target, identity, state)

    def _find(self, target: Target, identity: str, state: str) -> Reading | None:
        place = identity, target.file or "", state
        found = self._known.find(place)
        if found is None:
            return None
        if len(found) == 2:
            self._opened[target] = identity, state
            raise ScreeningError(*found)
        measured = _seen(found, self._resolutions).measured
        if measured is None:
            return None
        self._opened[target] = identity, state
        self._taken.add(target)
        self.reused += 1
        return replace(measured, target=target)

    def keep(self, target: Target, outcome: Reading | ScreeningError) -> None:
        """Put what came of a checkpoint on its way to the registry."""
        identity, state = self._opened.pop(target, (identity_of(target, target.repo), ""))
        failed = isinstance(outcome, ScreeningError)
        if isinstance(outcome, ScreeningError):
            if outcome.code == "Interrupted":
                return
        elif target in self._taken:
            self._taken.discard(target)
        else:
            if outcome.tokenizer not in self._told:
                self._told.add(outcome.tokenizer)
                text = resolution_text(outcome.resolution).decode()
                self._segment.append(
                    {
                        "k": "tokenizers",
                        "tokenizer": outcome.tokenizer,
                        "tokens": self.tokens,
                        "resolution": text,
                    }
                )
            self._segment.append(self._result(outcome, identity, target.file or "", state))
        asked = identity_of(target, target.repo)
        if not failed and self._names.get(asked, asked) != identity:
            self._names[asked] = identity
            self._segment.append({"k": "names", "asked": asked, "identity": identity, "stamp": _now()})
        self._segment.append(
            {
                "k": "seen", "run": self.run, "identity": identity, "requested": target.revision or "",
                "file": target.file or "", "tokens": self.tokens, "stamp": _now(), "state": state,
                "family": target.family, "scale": target.scale, "negative_control": target.negative_control,
                "method": METHOD, "version": __version__,
                "error": outcome.code if isinstance(outcome, ScreeningError) else None,
                "message": str(outcome) if failed else None,
            }
        )  # fmt: skip

    def _result(self, one: Reading, identity: str, file: str, state: str) -> dict[str, Any]:
        numbers: dict[str, float] = {}
        for metric in METRICS:
            gap = one.gaps[metric]
            numbers |= {f"gap_{metric}": gap.mean, f"gap_{metric}_se": gap.se}
            for name in ("within_domain", "between", "within_reference"):
                part = getattr(gap, name)
                numbers |= {f"{name}_{metric}": part.mean, f"{name}_{metric}_se": part.se}
        return {
            "k": "results", "identity": identity, "file": file, "state": state, "tokens": self.tokens,
            "method": METHOD, "run": self.run, "stamp": _now(), "repo": one.repo, "revision": one.revision,
            "tokenizer": one.tokenizer, "tensor": one.tensor, "tensor_file": one.file, "dtype": one.dtype,
            "v_rows": one.shape[0], "width": one.shape[1], "tied": one.tied, "parameters": one.parameters,
            **{name: _number(value) for name, value in numbers.items()},
            "warnings": list(one.warnings), "bytes": one.bytes_read, "requests": one.requests,
            "seconds": round(one.seconds, 3), "split": len(one.resolution.domain),
            "numbers": [_number(value) for value in numbers_of(one.gaps, one.ratio).tolist()],
        }  # fmt: skip

    def finished(self, result: Result) -> None:
        """Say of the run that it reached its end; one that did not was broken off."""
        self._segment.append(
            {
                **self._entry, "ended": _now(), "screened": len(result.checkpoints),
                "failed": len(result.failed), "bytes": result.bytes_read, "requests": result.requests,
                "seconds": round(result.seconds, 3),
            }
        )  # fmt: skip

    def end(self) -> None:
        """Merge what was kept."""
        self._segment.close()
        with self.registry.written():
            pass


def identity_of(target: Target, repo: str) -> str:
    """What a checkpoint is known by, whatever revision of it: its repository, address, or folder's place."""
    if target.local:
        return f"file://{Path(target.repo).resolve()}"
    return repo if "://" in repo else f"hf://{repo}"


def state_of(target: Target, snapshot: Snapshot, base: Snapshot | None = None) -> str:
    """The commit; of what has none a hash of its listing, with the time at which each file was changed.

    An adapter's is that of its base too, and where a tokenizer was named, that tokenizer's.
    """
    states = [_state(snapshot.own if isinstance(snapshot, WithTokenizer) else snapshot)]
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


def stored(connection: duckdb.DuckDBPyConnection, tokens: str, *, until: str = "") -> list[Seen]:
    """What was last seen of every checkpoint with some token sets.

    Args:
        connection: Of :meth:`Registry.read`.
        tokens: See :func:`tokens_key`.
        until: Only by runs that began until this time (UTC, as the registry writes it); empty for all.
    """
    resolutions = _resolutions(connection, tokens)
    cursor = connection.execute(
        "SELECT s.identity, s.requested, s.file, s.state, s.error, s.message, s.family, s.scale, "
        # A folder or repository that was once screened as one of a family stays in it when it is named alone.
        f"s.negative_control, {_FIGURES} FROM (SELECT * REPLACE ("
        "coalesce(family, arg_max(family, stamp) OVER same) AS family, "
        "coalesce(scale, arg_max(scale, stamp) OVER same) AS scale, "
        "bool_or(negative_control) OVER same AS negative_control) FROM seen WHERE tokens = ? "
        + ("AND run IN (SELECT run FROM runs WHERE started <= CAST(? AS TIMESTAMP)) " if until else "")
        + "WINDOW same AS (PARTITION BY identity) "
        + "QUALIFY row_number() OVER (PARTITION BY identity, requested, file "
        + "ORDER BY stamp DESC, run DESC) = 1) s "
        "LEFT JOIN results r ON s.error IS NULL AND r.identity = s.identity AND r.file = s.file "
        "AND r.state = s.state AND r.tokens = s.tokens AND r.method = s.method "
        "ORDER BY s.identity, s.requested, s.file",
        [tokens, until] if until else [tokens],
    )
    found = []
    while rows := cursor.fetchmany(_ROWS):
        found += [_seen(row, resolutions) for row in rows]
    return found


_FIGURES = (
    "r.repo, r.revision, r.tensor, r.tensor_file, r.dtype, r.v_rows, r.width, r.tied, r.parameters, "
    "r.tokenizer, r.split, r.numbers, r.warnings"
)


def _resolutions(connection: duckdb.DuckDBPyConnection, tokens: str) -> dict[str, Resolution]:
    """The rows of T and R in every tokenizer that was met."""
    rows = connection.execute(
        "SELECT tokenizer, resolution FROM tokenizers WHERE tokens = ?", [tokens]
    ).fetchall()
    return {tokenizer: resolution_of(text) for tokenizer, text in rows}


def _every_state(connection: duckdb.DuckDBPyConnection, tokens: str) -> Iterator[Sequence[Any]]:
    """Rows for `_seen` of all that was ever measured of the checkpoints in the table ``wanted``."""
    last = connection.execute("SELECT coalesce(max(rowid), -1) FROM results").fetchone()
    # A query's answer is held as a whole: so it is asked for in parts.
    for begin in range(0, (last or (-1,))[0] + 1, _ROWS):
        yield from connection.execute(
            "SELECT r.identity, '', r.file, r.state, NULL, NULL, NULL, NULL, false, "
            f"{_FIGURES} FROM results r WHERE r.rowid >= ? AND r.rowid < ? "
            "AND r.tokens = ? AND r.method = ? AND r.identity IN (SELECT identity FROM wanted)",
            [begin, begin + _ROWS, tokens, METHOD],
        ).fetchall()


def _seen(row: Sequence[Any], resolutions: Mapping[str, Resolution]) -> Seen:
    identity, requested, file, state, error, message, family, scale, control, *figures = row
    seen = Seen(identity, requested, file, state, error or "", message or "", None)
    resolution = resolutions.get(figures[9])
    if error is not None or figures[0] is None or resolution is None:
        return seen
    repo, revision, tensor, tensor_file, dtype, rows, width, tied, parameters, tokenizer, split, *rest = (
        figures
    )
    target = Target(
        repo, requested or None, family, scale, local=identity.startswith("file://"),
        negative_control=bool(control), file=file or None,
    )  # fmt: skip
    numbers = np.array([math.nan if value is None else value for value in rest[0]], dtype=np.float64)
    gaps, ratio = figures_of(numbers, split)
    measured = Reading(
        target, repo, revision, tensor, tensor_file, dtype, (rows, width), tied, parameters, tokenizer,
        resolution, gaps, tuple(rest[1] or ()), 0, 0, 0.0, ratio,
        "" if ratio else "as the registry says",
    )  # fmt: skip
    return replace(seen, measured=measured)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _now() -> str:
    return f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M:%S.%f}"
