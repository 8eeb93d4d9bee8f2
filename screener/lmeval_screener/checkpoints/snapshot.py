"""One checkpoint at one revision: its files and their bytes, in a folder or read by ranges from a storage.

`Sources` (source.py) opens them: the Hub, a folder, an object store, a registry. Everything above
(tensors, rows, tokenizers) uses `Snapshot` only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from lmeval_screener.checkpoints.account import ATTEMPTS, Account, Cache, RetryError, contradiction
from lmeval_screener.checkpoints.concurrency import in_thread, lock, side_by_side
from lmeval_screener.errors import ScreeningError

#: The service of an address's scheme.
SERVICES = {
    "s3": "S3",
    "s3a": "S3",
    "gs": "Google Cloud Storage",
    "gcs": "Google Cloud Storage",
    "az": "Azure",
    "azure": "Azure",
    "abfs": "Azure",
    "abfss": "Azure",
}
#: End of the name of a GGUF model's part: its number, and how many there are.
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
#: Largest small file, in bytes: the largest tokenizers have some 40 MB. In a folder, files up to this size
#: get a digest from their content; weights do not need one.
SMALL = 64 * 2**20
#: Ends of the names of small files: configurations and tokenizers.
_TEXTS = (".json", ".model", ".txt", ".tiktoken")
#: A commit in full.
COMMIT = re.compile(r"[0-9a-f]{40}")
_DEEPEST = 6  # folders below a checkpoint in which files are listed to find its program
_MOST_NAMES = 2000  # names that are looked at for it, in each folder and in all
_LFS = b"version https://git-lfs"  # begins a pointer of git-lfs
_POINTER = 1024  # its largest size


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A checkpoint's file, as its listing gives it.

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
        """Whether ``body`` has this file's size and, if it is a hash of the content, its digest."""
        kind, _, digest = (self.digest or "").partition(":")
        if len(body) != self.size:
            return False
        if kind == "sha256":
            return hashlib.sha256(body).hexdigest() == digest
        if kind == "git":
            blob = b"blob %d\0" % len(body) + body
            return hashlib.sha1(blob, usedforsecurity=False).hexdigest() == digest
        return True


class Snapshot:
    """One checkpoint at one revision; each storage reads its files in its own way.

    Attributes:
        repo: ``org/name`` after renames were followed; the path for a folder, the address for a storage.
        files: Every file by path.
        revision: The commit, 40 hex digits; None for a folder and a storage.
        cache: Cache of rows and headers; None for a folder, and for files without a version.
        folders: Names of its subfolders, where its listing gives them.
        parameters: Parameters as the Hub counts them from the safetensors headers; None if it does not say.
        base: The repository that it was trained from, by the Hub's listing; empty if that names none.
        private: Whether only some tokens may read it, by the Hub's listing; None if unknown.
        borrowed: Files of another snapshot: path here -> that snapshot, and the path there.
        is_local: Whether its files are on this machine, where reading costs nothing.
    """

    parameters: int | None = None
    folders: tuple[str, ...] = ()
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
        self.repo = repo
        self.files = files
        self.revision = revision
        self.cache = cache
        self.borrowed: dict[str, tuple[Snapshot, str]] = {}

    def borrow(self, other: Snapshot, names: Mapping[str, str]) -> None:
        """Add files of another checkpoint; ``names`` maps their paths here to those there."""
        self.files = dict(self.files)
        for path, at in names.items():
            self.files[path] = replace(other.files[at], path=path)
            self.borrowed[path] = (other, at)

    def entry(self, path: str) -> FileEntry:
        """A file's listed entry; ScreeningError if it is not listed."""
        entry = self.files.get(path)
        if entry is None:
            at = f" at revision {self.revision}" if self.revision else ""
            raise ScreeningError("FileNotFound", f"{self.repo} has no {path}{at}; {self.next_step}")
        return entry

    def names_around(self) -> list[str]:
        """Its files, folders (with a ``/``) and, on this machine, some files below it and next to it.

        They tell which program left it; those next to it begin with ``../``.
        """
        return [*self.files, *(f"{name}/" for name in self.folders)]

    @property
    def next_step(self) -> str:
        """The advice for a checkpoint whose stored files are broken."""
        return "choose another revision" if self.revision else "copy, download or upload it again"

    def content_key(self, path: str) -> str:
        """A file's cache key: its digest, else repository, commit and path; see `entry`."""
        return self.entry(path).digest or f"{self.repo}@{self.revision}/{path}"

    async def look_up(self, path: str) -> FileEntry:
        """A file's entry, requested if its listing lacks a size (for JSON, a digest); or ScreeningError."""
        return self.entry(path)

    async def small_file(self, path: str) -> bytes:
        """A small file's content, such as a tokenizer, on the Hub checked by digest; or ScreeningError."""
        if path in self.borrowed:
            other, at = self.borrowed[path]
            return await other.small_file(at)
        return await self._text(path)

    async def _text(self, path: str) -> bytes:
        """Whole content of a small file of its own."""
        (body,) = await self.ranges(path, [(0, self.entry(path).size)])
        return body

    async def ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """A file's bytes ``[begin, end)`` for each range, in their order; ScreeningError if one fails."""
        raise NotImplementedError


class LocalSnapshot(Snapshot):
    """A checkpoint in a folder. It needs no network and no cache."""

    is_local = True

    def __init__(
        self, repo: str, folder: Path, files: Mapping[str, FileEntry], revision: str | None = None
    ) -> None:
        super().__init__(repo, files, revision)
        self.folder = folder

    def names_around(self) -> list[str]:
        """Files in it, below it and next to it; see `Snapshot.names_around`."""
        names = [*self.files]
        for place, folders, files in os.walk(self.folder):
            inside = Path(place).relative_to(self.folder)
            if len(inside.parts) >= _DEEPEST or len(names) > _MOST_NAMES:
                folders.clear()
            folders.sort()
            names += [(inside / name).as_posix() for name in files[:_MOST_NAMES]]
        above = self.folder.resolve().parent
        with contextlib.suppress(OSError):
            names += [f"../{entry.name}" for entry in islice(os.scandir(above), _MOST_NAMES)]
        return names

    @property
    def next_step(self) -> str:
        """The advice for broken files; see `Snapshot.next_step`."""
        if self.revision is not None:
            return super().next_step
        cache = self.folder.resolve().parent.parent / "blobs"
        downloads = (self.folder / ".cache" / "huggingface" / "download", cache)
        if any(next(place.glob("*.incomplete"), None) for place in downloads):
            return "its download was not finished: `hf download` with the same arguments resumes it"
        return "wait until it is written, or save or copy it again"

    async def ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Bytes of a file; see `Snapshot.ranges`."""
        return await in_thread(lambda: read_ranges(self.folder / self.entry(path).path, ranges))


class RangedSnapshot(Snapshot):
    """Listed files, read by ranges with retries on an account. Subclasses define one attempt."""

    def __init__(self, repo: str, files: Mapping[str, FileEntry], account: Account) -> None:
        # A file without a version may change.
        cache = account.cache if all(entry.digest for entry in files.values()) else None
        super().__init__(repo, files, None, cache)
        self.account = account
        self._text_locks: dict[str, AbstractAsyncContextManager[object]] = {}
        self._proven: set[str] = set()  # files with a range that was correct
        self._whole: dict[str, bytes] = {}  # small files that a server sent instead of a range

    async def _read(self, path: str, begin: int, end: int, received: bytearray) -> None:
        """Append bytes ``[begin, end)`` of a file to ``received``, as many as arrive; one attempt."""
        raise NotImplementedError

    async def _fetched(self, path: str) -> bytes:
        """A small file from the network, in one attempt."""
        return await super()._text(path)

    def _on_disk(self, entry: FileEntry) -> Path | None:
        """The file on this disk, if another program has downloaded it."""
        return None

    def _keep(self) -> None:
        """Keep a server's entries of files, now that another file was correct."""

    async def _text(self, path: str) -> bytes:
        async with self._text_locks.setdefault(path, lock()):
            entry = self.entry(path)
            if entry.size > SMALL:
                raise ScreeningError(
                    "BadResponse",
                    f"{path} of {self.repo} has {entry.size} bytes, too many for its kind; check the file",
                )
            kept = self.cache.read("files", self.content_key(path)) if self.cache else None
            if kept is not None:
                return kept
            place = self._on_disk(entry)
            if place is not None:
                stored = await in_thread(place.read_bytes)
                if entry.fits(stored):
                    return stored
            body = await self.account.retried(lambda: self._fetched(path))
            if self.cache:
                self.cache.write("files", self.content_key(path), body)  # the digest may be new
            return body

    async def ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Bytes of a file; see `Snapshot.ranges`."""
        place = self._on_disk(await self.look_up(path))
        if place is not None:
            return await in_thread(lambda: read_ranges(place, ranges))
        works = (self._range(path, begin, end) for begin, end in ranges)
        with self.account.share() as most:
            return await side_by_side(works, min(most, len(ranges)))

    async def _range(self, path: str, begin: int, end: int) -> bytes:
        """One range; a body that breaks is resumed where it broke."""
        received = bytearray()

        async def attempt() -> bytes:
            if path in self._whole:
                return self._whole[path][begin:end]
            before = len(received)
            try:
                await self._read(path, begin + before, end, received)
                if len(received) != end - begin:
                    length = len(received)
                    received.clear()
                    raise contradiction(
                        f"a range of {path} of {self.repo} has the wrong length, {length} for {end - begin}"
                    )
            except RetryError as retry:
                retry.progressed = len(received) > before
                if path in self._proven:  # the server is usually right
                    retry.attempts = ATTEMPTS
                raise
            if path not in self._proven:
                self._proven.add(path)
                self._keep()
            return bytes(received)

        return await self.account.retried(attempt) if end > begin else b""


def open_folder(path: str | os.PathLike[str]) -> LocalSnapshot:
    """Open a folder's checkpoint, or a weights file with its folder's configuration and tokenizer, if any.

    A folder is laid out as by ``save_pretrained`` or in the Hub's cache (``…/snapshots/COMMIT``); a
    ScreeningError refuses an empty or missing one.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return LocalSnapshot(str(path), place.parent, single_file(_files(place.parent), place.name))
    if not place.is_dir():
        raise ScreeningError("FolderNotFound", f"{str(path)!r} is not a folder; check the path")
    files = _files(place)
    if not files and not any(place.iterdir()):
        raise ScreeningError(
            "FolderNotFound",
            f"{path} is empty; name a folder with config.json and *.safetensors, or a training run's folder "
            "with checkpoint-*, step_* or iter_* in it",
        )
    return LocalSnapshot(str(path), place, files)


def open_download(cache: Path, repo: str, revision: str) -> LocalSnapshot | None:
    """Open a checkpoint that huggingface_hub downloaded; None if this revision is not in its cache."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    reference = folder / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    place = folder / "snapshots" / commit
    if not COMMIT.fullmatch(commit) or not place.is_dir():
        return None
    return LocalSnapshot(repo, place, _files(place), revision=commit)


def _files(folder: Path) -> dict[str, FileEntry]:
    files = {}
    try:
        for place in sorted(folder.iterdir()):
            name = place.name
            broken = place.is_symlink() and not place.exists()  # reading it raises the error
            if name.startswith(".") or not (place.is_file() or broken):
                continue
            size = 0 if broken else place.stat().st_size
            digest = None
            if name.endswith(_TEXTS) and size <= SMALL and not broken:
                digest = f"sha256:{hashlib.sha256(place.read_bytes()).hexdigest()}"
            files[name] = FileEntry(name, size, digest)
    except OSError as error:
        raise _unreadable(folder, error) from error
    return files


def read_ranges(place: Path, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Bytes ``[begin, end)`` of a file on disk, for each range; ScreeningError if unreadable or shorter."""
    bodies = []
    try:
        with place.open("rb") as file:
            if os.fstat(file.fileno()).st_size < _POINTER and file.read(len(_LFS)) == _LFS:
                why = f"{place} is a git-lfs pointer, not the file itself; run: git lfs pull"
                raise ScreeningError("FileNotFound", why)
            for begin, end in ranges:
                file.seek(begin)
                bodies.append(file.read(end - begin))
    except OSError as error:
        raise _unreadable(place, error) from error
    for (begin, end), body in zip(ranges, bodies, strict=True):
        if len(body) != end - begin:
            raise ScreeningError(
                "BadResponse",
                f"{place} ended before byte {end}; wait until it is written, or copy it again",
            )
    return bodies


def _unreadable(place: Path, error: OSError) -> ScreeningError:
    if place.is_symlink() and not place.exists():
        return ScreeningError(
            "FileNotFound",
            f"{place} links to {os.readlink(place)}, which is gone (perhaps a purged cache); download it "
            "again, or copy the folder with its links followed (cp -rL)",
        )
    return ScreeningError(
        "FileNotFound",
        f"cannot read {place}: {error}; check that it exists and that you may read it",
    )


def version_digest(*parts: object) -> str:
    """``etag:<hex>`` of an address and its storage's version; see `FileEntry.digest`."""
    return "etag:" + hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()


def changed(what: str) -> ScreeningError:
    """The error for a file that changed after it was listed."""
    return ScreeningError(
        "BadResponse",
        f"{what} changed while it was read; screen it again when it is no longer written",
    )


def single_file(files: Mapping[str, FileEntry], name: str) -> dict[str, FileEntry]:
    """The files to read for one weights file: itself or all its parts, and small files but for an index."""
    whole = PART.sub(".gguf", name)
    chosen = {}
    for path, entry in files.items():
        is_part = name.endswith(".gguf") and PART.sub(".gguf", path) == whole
        is_text = path.endswith(_TEXTS) and not path.endswith(".index.json")
        if path == name or is_part or is_text:
            chosen[path] = entry
    return chosen
