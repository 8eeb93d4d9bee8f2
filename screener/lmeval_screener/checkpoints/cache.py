"""The cache of bytes read from checkpoints: a folder of entries with checksums."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from pathlib import Path

# Unique names of files being written, even if processes share the folder over a network.
_TOKEN = os.urandom(4).hex()
_NUMBERS = itertools.count()


def usual_cache() -> Cache:
    """This user's cache, below huggingface_hub's folder for assets."""
    from huggingface_hub import constants

    return Cache(Path(constants.HF_ASSETS_CACHE) / "screen-checkpoints")


class Cache:
    """A folder of entries by kind and key, each with its checksum and written atomically.

    An entry is a file: one line of JSON (``{"key": …, "sha256": …}``), then the content. A damaged entry or
    one of another key counts as missing. After the folder is deleted, checkpoints are read again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _place(self, kind: str, key: str) -> tuple[str, str]:
        """Folder and name of an entry."""
        name = hashlib.sha256(key.encode()).hexdigest()[:40]
        return f"{self.folder}/{kind}/{name[:2]}", name

    def _make(self, folder: str) -> None:
        """Make an entry's folder and those above it, for this user alone: private repositories have rows."""
        os.makedirs(self.folder.parent, exist_ok=True)
        for place in (self.folder, os.path.dirname(folder), folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir(place, 0o700)

    def read(self, kind: str, key: str) -> bytes | None:
        """An entry's content; None if it is missing or damaged."""
        try:
            with open("/".join(self._place(kind, key)), "rb") as file:
                raw = file.read()
        except OSError:
            return None
        head, newline, content = raw.partition(b"\n")
        try:
            entry = json.loads(head)
        except (ValueError, RecursionError):
            return None
        if not newline or not isinstance(entry, dict) or entry.get("key") != key:
            return None
        if entry.get("sha256") != hashlib.sha256(content).hexdigest():
            return None
        return content

    def write(self, kind: str, key: str, *content: bytes) -> None:
        """Write an entry, its content in one piece or several; a full or read-only disk is ignored."""
        folder, name = self._place(kind, key)
        digest = hashlib.sha256()
        for piece in content:
            digest.update(piece)
        head = json.dumps({"key": key, "sha256": digest.hexdigest()}).encode()
        # The final name appears only once the whole content is written, whatever interrupts us.
        temporary = f"{folder}/.new-{os.getpid()}-{_TOKEN}-{next(_NUMBERS)}"
        try:
            if not os.path.isdir(folder):  # a hundred times as fast as trying to make it
                self._make(folder)
            with open(temporary, "xb", opener=_private) as file:
                file.write(head + b"\n")
                file.writelines(content)
            os.replace(temporary, f"{folder}/{name}")
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
