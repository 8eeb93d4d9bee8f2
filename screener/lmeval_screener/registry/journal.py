"""Lines of JSON that a process appends beside the registry while it runs, and that nobody can lose.

A registry has one writer at a time, and a run may take hours: what is read goes into a *segment* of the run's
own, a file in the folder ``REGISTRY.journal``, and reaches the registry when it is merged. A line is the
system's before the next checkpoint is begun; a process that is killed leaves at most one broken last line,
which is skipped. A segment is locked by the process that writes it; one that nobody locks was left by a dead
process, and whoever opens the registry next merges it.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from lmeval_dispersion.errors import DispersionError

_SYNC = 1.0  # seconds between two waits for the disk: a crash of the machine loses no more


def journal_folder(registry: Path) -> Path:
    """Where the segments of a registry lie."""
    return registry.with_name(registry.name + ".journal")


class Segment:
    """A segment that this process writes.

    Args:
        registry: The registry's file.

    Raises:
        DispersionError: The folder cannot be written.
    """

    def __init__(self, registry: Path) -> None:
        folder = journal_folder(registry)
        try:
            folder.mkdir(exist_ok=True)
            name = (
                f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}-{uuid.uuid4().hex[:8]}.jsonl"
            )
            self.path = folder / name
            self._lock = FileLock(f"{self.path}.lock")
            self._lock.acquire(timeout=0)
            self._file: IO[bytes] = self.path.open("ab", buffering=0)
        except OSError as error:
            raise _failed(registry, error) from error
        self._registry, self._synced = registry, time.monotonic()

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write one entry; it is whole in the file when this returns.

        Raises:
            DispersionError: The disk is full, or the file cannot be written.
        """
        try:
            self._file.write(json.dumps(entry, separators=(",", ":")).encode() + b"\n")
            if time.monotonic() - self._synced > _SYNC:
                os.fsync(self._file.fileno())
                self._synced = time.monotonic()
        except OSError as error:
            raise _failed(self._registry, error) from error

    def close(self) -> None:
        """Write all to the disk and let others merge the segment."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()
            self._lock.release()


def abandoned(registry: Path) -> Iterator[tuple[Path, FileLock]]:
    """Segments that no process writes any more, each with its lock, held until the next is asked for."""
    folder = journal_folder(registry)
    for path in sorted(folder.glob("*.jsonl")) if folder.is_dir() else []:
        lock = FileLock(f"{path}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        try:
            if path.exists():
                yield path, lock
        finally:
            lock.release()


def _failed(registry: Path, error: OSError) -> DispersionError:
    return DispersionError(
        f"could not write the journal of {registry}: {error.strerror or error}; free some space or name a "
        "--registry in a folder that can be written"
    )
