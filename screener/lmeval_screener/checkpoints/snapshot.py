"""One checkpoint at one revision, wherever it is: its files, and bytes of them.

Two things fulfil `Snapshot`: `Hub.snapshot` reads a repository of the Hub, and
`open_folder` a folder. Everything above (which tensor, which rows, which tokenizer) is
written against this protocol only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lmeval_screener.checkpoints.cache import Cache


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a checkpoint, as its listing gives it.

    Attributes:
        path: Path inside the repository or folder, with ``/``.
        size: Bytes; None where the listing does not say.
        digest: ``sha256:<hex>`` of the content (large files of the Hub, small files of a folder), or
            ``git:<hex>``, the git blob id, which is a hash of the content too. None if unknown. Two files
            with equal digests are equal; two digests of different kinds say nothing.
    """

    path: str
    size: int | None
    digest: str | None

    def fits(self, body: bytes) -> bool:
        """Whether a whole content is this file's, by size and digest."""
        kind, _, digest = (self.digest or "").partition(":")
        if self.size is not None and len(body) != self.size:
            return False
        if kind == "sha256":
            return hashlib.sha256(body).hexdigest() == digest
        if kind == "git":
            return hashlib.sha1(b"blob %d\0" % len(body) + body, usedforsecurity=False).hexdigest() == digest
        return True


@dataclass
class Meter:
    """What travelled over the network for one checkpoint; stays zero for a folder and a cached one.

    Attributes:
        bytes_read: Bytes of bodies as they travelled (compressed where the server compresses), API calls
            and failed attempts included, HTTP headers not.
        requests: HTTP requests, retries and redirect hops included.
    """

    bytes_read: int = 0
    requests: int = 0


class Snapshot(Protocol):
    """One checkpoint at one revision.

    Attributes:
        repo: ``org/name`` after renames were followed; the path for a folder.
        requested_revision: What was asked for; None for the default branch and for folders.
        revision: The commit, 40 hex digits; None for a folder.
        files: Every file by path.
        meter: What travelled so far.
        parameters: Parameters as the Hub counts them from the safetensors headers; None if it does not say.
        cache: Where rows and headers are kept; None where reading costs nothing.
    """

    repo: str
    requested_revision: str | None
    revision: str | None
    files: Mapping[str, FileEntry]
    meter: Meter
    parameters: int | None
    cache: Cache | None

    async def small_file(self, path: str) -> bytes:
        """Whole content of a small file (config, index, tokenizer), checked against its digest.

        Raises:
            ScreeningError: ``FileNotFound``, or an error of the connection.
        """
        ...

    async def ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Bytes ``[begin, end)`` of a file for each range, in the order given, read side by side.

        Raises:
            ScreeningError: ``RangeNotSupported``, ``BadResponse``, or an error of the connection.
        """
        ...

    async def size(self, path: str) -> int:
        """Size of a file in bytes.

        Raises:
            ScreeningError: ``FileNotFound``, or an error of the connection.
        """
        ...


def content_key(snapshot: Snapshot, path: str) -> str:
    """Name under which what was read from a file may be cached: by its content, else by commit and path."""
    digest = snapshot.files[path].digest
    return digest if digest else f"{snapshot.repo}@{snapshot.revision}/{path}"
