"""What a registry knows of some checkpoints, in a temporary file: a run looks it up there."""

from __future__ import annotations

import pickle
import sqlite3
import weakref
from collections.abc import Iterable
from typing import Any

Place = tuple[str, ...]


class KnownRows:
    """Results and failures by identity, file and state, or what else tells them apart.

    They lie on disk, in a file that is gone when this is.

    The registry itself cannot be asked during a run: one process at a time opens it.
    """

    def __init__(self) -> None:
        # Without a name it is a temporary file. What a cluster read is kept by another thread.
        self._database = sqlite3.connect("", check_same_thread=False)
        weakref.finalize(self, self._database.close)
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("CREATE TABLE known (place TEXT PRIMARY KEY, content BLOB) WITHOUT ROWID")

    def take(self, entries: Iterable[tuple[Place, Any]]) -> None:
        """Take entries in; a later one takes the place of an earlier."""
        with self._database:
            self._database.executemany(
                "INSERT OR REPLACE INTO known VALUES (?, ?)",
                (("\0".join(place), pickle.dumps(content)) for place, content in entries),
            )

    def find(self, place: Place) -> Any:
        """What was taken in for a place; None for nothing."""
        query = "SELECT content FROM known WHERE place = ?"
        found = self._database.execute(query, ["\0".join(place)]).fetchone()
        return None if found is None else pickle.loads(found[0])
