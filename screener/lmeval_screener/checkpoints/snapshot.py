"""One checkpoint at one revision, in any storage: its files and their bytes.

`Sources` (source.py) opens them: the Hub, a folder, an object store, a registry. Everything above
(tensors, rows, tokenizers) uses `Snapshot` only.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lmeval_screener.checkpoints.cache import Cache
from lmeval_screener.errors import ScreeningError

#: The service of an address's scheme.
SERVICES = {
    **dict.fromkeys(("s3", "s3a"), "S3"),
    **dict.fromkeys(("gs", "gcs"), "Google Cloud Storage"),
    **dict.fromkeys(("az", "azure", "abfs", "abfss"), "Azure"),
}
#: End of the name of a GGUF model's part: its number, and how many there are.
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
#: Largest small file, in bytes: the largest tokenizers have some 40 MB. In a folder, files up to this size
#: get a digest from their content; weights do not need one.
SMALL = 64 * 2**20


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a checkpoint, as its listing gives it.

    Attributes:
        path: Path inside the repository or folder, with ``/``.
        size: Bytes; negative if its listing does not say, see `Snapshot.look_up`.
        digest: ``sha256:<hex>`` of the content (large files of the Hub, small files of a folder), or
            ``git:<hex>``, the git blob id, which is a hash of the content too.
            ``etag:<hex>`` is a hash of the file's address and its version in the storage. None if
            unknown. Files with equal digests are equal; digests of different kinds say nothing.
    """

    path: str
    size: int
    digest: str | None

    def fits(self, body: bytes) -> bool:
        """Whether some content is this file's, by size and digest."""
        kind, _, digest = (self.digest or "").partition(":")
        if len(body) != self.size:
            return False
        if kind == "sha256":
            return hashlib.sha256(body).hexdigest() == digest
        if kind == "git":
            return hashlib.sha1(b"blob %d\0" % len(body) + body, usedforsecurity=False).hexdigest() == digest
        return True


class Snapshot:
    """One checkpoint at one revision; each storage reads its files in its own way.

    Attributes:
        repo: ``org/name`` after renames were followed; the path for a folder, the address for a storage.
        files: Every file by path.
        revision: The commit, 40 hex digits; None for a folder and a storage.
        cache: Where rows and headers are kept; None for a folder, and for files without a version.
        parameters: Parameters as the Hub counts them from the safetensors headers; None if it does not say.
        base: The repository that it was trained from, by the Hub's listing; empty if that names none.
        private: Whether only some tokens read it, by the Hub's listing; None if nobody says.
        borrowed: Files that belong to another snapshot, which is given with their paths there.
        is_local: Whether its files are on this machine, where reading costs nothing.
    """

    parameters: int | None = None
    base = ""
    private: bool | None = None
    is_local = False

    def __init__(
        self,
        repo: str,
        files: Mapping[str, FileEntry],
        revision: str | None = None,
        cache: Cache | None = None,
    ) -> None:
        self.repo, self.files, self.revision, self.cache = repo, files, revision, cache
        self.borrowed: dict[str, tuple[Snapshot, str]] = {}

    def borrow(self, other: Snapshot, names: Mapping[str, str]) -> None:
        """Add files of another checkpoint, given by their paths here, with their paths there."""
        added = {path: replace(other.files[at], path=path) for path, at in names.items()}
        self.files = {**self.files, **added}
        self.borrowed |= {path: (other, at) for path, at in names.items()}

    def entry(self, path: str) -> FileEntry:
        """A file as listed; a ScreeningError if it is not there."""
        if (entry := self.files.get(path)) is None:
            at = f" at revision {self.revision}" if self.revision else ""
            raise ScreeningError("FileNotFound", f"{self.repo} has no {path}{at}; {self.next_step}")
        return entry

    @property
    def next_step(self) -> str:
        """The next step for a user whose stored files are broken."""
        return "choose another revision" if self.revision else "copy, download or upload it again"

    def content_key(self, path: str) -> str:
        """The cache key of a file: by its content, else by commit and path."""
        return self.entry(path).digest or f"{self.repo}@{self.revision}/{path}"

    async def look_up(self, path: str) -> FileEntry:
        """A file with its digest and, for weights, its size; requested if the listing lacks them."""
        return self.entry(path)

    async def small_file(self, path: str) -> bytes:
        """Whole content of a small file (config, index, tokenizer), checked against its digest."""
        if path in self.borrowed:
            other, at = self.borrowed[path]
            return await other.small_file(at)
        return await self._text(path)

    async def _text(self, path: str) -> bytes:
        """Whole content of a small file of its own."""
        (body,) = await self.ranges(path, [(0, self.entry(path).size)])
        return body

    async def ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Bytes ``[begin, end)`` of a file for each range, in the order given, read concurrently."""
        raise NotImplementedError


def single_file(files: Mapping[str, FileEntry], name: str) -> dict[str, FileEntry]:
    """The files of a checkpoint that is one weights file: the file or its parts, small files, no index."""
    whole = PART.sub(".gguf", name)
    parts = {path for path in files if name.endswith(".gguf") and PART.sub(".gguf", path) == whole}
    return {
        path: entry
        for path, entry in files.items()
        if path == name or path in parts or path.endswith((".json", ".txt", ".model", ".tiktoken"))
        if not path.endswith(".index.json")
    }
