"""What was read once is kept on disk: entries that check themselves, written atomically.

An entry is a file: one line of JSON (``{"key": …, "sha256": …}``), then the content. A damaged entry, one of
another key, or one that another program writes to, is noticed and counts as missing. Nothing in here is
needed: deleting the folder costs only the reading again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path


class Cache:
    """A folder of entries, each found by its kind and key.

    Args:
        folder: Where the entries live; created when the first one is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _place(self, kind: str, key: str) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()[:40]
        return self.folder / kind / name[:2] / name

    def read(self, kind: str, key: str) -> bytes | None:
        """Content of an entry; None if there is none, or it is damaged."""
        try:
            raw = self._place(kind, key).read_bytes()
        except OSError:
            return None
        head, newline, content = raw.partition(b"\n")
        try:
            entry = json.loads(head)
        except (ValueError, RecursionError):
            return None
        if not newline or not isinstance(entry, dict) or entry.get("key") != key:
            return None
        return content if entry.get("sha256") == hashlib.sha256(content).hexdigest() else None

    def write(self, kind: str, key: str, content: bytes) -> None:
        """Keep content. A full or read-only disk is no reason to fail: then nothing is kept."""
        place = self._place(kind, key)
        head = json.dumps({"key": key, "sha256": hashlib.sha256(content).hexdigest()}).encode()
        temporary: str | None = None
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            # The final name appears only with all of the content behind it, whatever interrupts us.
            descriptor, temporary = tempfile.mkstemp(dir=place.parent, prefix=".new-")
            with os.fdopen(descriptor, "wb") as file:
                file.write(head + b"\n" + content)
            os.replace(temporary, place)
        except OSError:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
