"""One checkpoint at one revision: its files and their bytes, on this disk or read by ranges.

`Sources` (source.py) opens checkpoints on the Hub, in folders, in object stores and in registries.
Everything above (tensors, rows, tokenizers) uses `Snapshot` only.
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
    """A file of a checkpoint, as the repository or folder lists it.

    Attributes:
        path: Path inside the repository or folder, with ``/``.
        size: Size in bytes; negative if the listing does not state it (see `Snapshot.look_up`).
        digest: A hash that identifies the content; None if unknown. It is ``sha256:<hex>`` or
            ``git:<hex>`` (a git blob id) of the content, or ``etag:<hex>``, made of the file's
            address and its version there. Files with equal digests have equal content; digests
            of different kinds cannot be compared.
    """

    path: str
    size: int
    digest: str | None

    def fits(self, body: bytes) -> bool:
        """Whether ``body`` can be this file's content: its size and its hash are as listed.

        Only the size is compared if no hash of the content is listed: the digest is None or an
        ``etag:``.
        """
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
    """One checkpoint at one revision. Subclasses read the files of one kind of place.

    Attributes:
        repo: A repository's present name, ``org/name``; the path of a folder; else the address.
        files: Every file, by its path in the checkpoint.
        revision: The commit, 40 hex digits; None outside the Hub.
        cache: Cache for what is read; None for a folder, and if a file's version is unknown.
        parameters: Number of parameters in the safetensors files, as the Hub counts them; None if
            unknown.
        base: The repository that the checkpoint was trained from, as the Hub states it; empty if
            unknown.
        private: Whether the repository is private, as the Hub states it; None if unknown.
        borrowed: Files added from other checkpoints: maps the path here to the other checkpoint and
            the path there.
        is_local: Whether the files are on this machine, where reading them costs no requests.
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
        self.repo = repo
        self.files = files
        self.revision = revision
        self.cache = cache
        self.borrowed: dict[str, tuple[Snapshot, str]] = {}

    def borrow(self, other: Snapshot, names: Mapping[str, str]) -> None:
        """Add files of another checkpoint, such as those of its tokenizer.

        ``names`` maps the path of each file here to its path in ``other``.
        """
        self.files = dict(self.files)
        for path, at in names.items():
            self.files[path] = replace(other.files[at], path=path)
            self.borrowed[path] = (other, at)

    def entry(self, path: str) -> FileEntry:
        """Return the entry of a file.

        Raises:
            ScreeningError: The checkpoint has no such file.
        """
        entry = self.files.get(path)
        if entry is None:
            at = f" at revision {self.revision}" if self.revision else ""
            raise ScreeningError("FileNotFound", f"{self.repo} has no {path}{at}; {self.next_step}")
        return entry

    def names_around(self) -> list[str]:
        """Return the names of files and folders in and around the checkpoint.

        Names of subfolders end with ``/``, and names next to the checkpoint's folder begin with
        ``../``. The names show which program wrote the checkpoint. For a folder on this machine,
        some files in subfolders and some names next to the folder are included.
        """
        return [*self.files]

    @property
    def next_step(self) -> str:
        """What a user can do about missing or broken files, as the end of a message."""
        return "choose another revision" if self.revision else "copy, download or upload it again"

    def content_key(self, path: str) -> str:
        """Return the key under which a file is cached.

        The key is the file's digest or, if that is unknown, its repository, commit and path.

        Raises:
            ScreeningError: The checkpoint has no such file.
        """
        return self.entry(path).digest or f"{self.repo}@{self.revision}/{path}"

    async def look_up(self, path: str) -> FileEntry:
        """Return a file's entry, after asking the server for a size or digest that is not listed.

        Raises:
            ScreeningError: The checkpoint has no such file, or the server cannot be asked.
        """
        return self.entry(path)

    async def small_file(self, path: str) -> bytes:
        """Return the content of a small file, such as ``config.json`` or a tokenizer.

        Files of the Hub are checked against their digest.

        Raises:
            ScreeningError: The file is missing, broken, or cannot be read, or a file on a server is
                larger than 64 MiB.
        """
        if path in self.borrowed:
            other, at = self.borrowed[path]
            return await other.small_file(at)
        return await self._text(path)

    async def _text(self, path: str) -> bytes:
        """The content of a small file that is not borrowed."""
        (body,) = await self.ranges(path, [(0, self.entry(path).size)])
        return body

    async def ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes ``[begin, end)`` of a file for each of ``ranges``, in the same order.

        Raises:
            ScreeningError: The file is missing, or a range cannot be read.
        """
        raise NotImplementedError


class LocalSnapshot(Snapshot):
    """A checkpoint in a folder on this machine.

    Args:
        repo: Name for messages and reports.
        folder: The folder that contains the files.
        files: Files of the checkpoint, by name.
        revision: The commit if `open_download` opened the checkpoint; else None.
    """

    is_local = True

    def __init__(
        self, repo: str, folder: Path, files: Mapping[str, FileEntry], revision: str | None = None
    ) -> None:
        super().__init__(repo, files, revision)
        self.folder = folder

    def names_around(self) -> list[str]:
        """Return names of files in the folder and its subfolders, and names next to the folder.

        See `Snapshot.names_around`. In very large folders some are left out.
        """
        names = [*self.files]
        for place, folders, files in os.walk(self.folder):
            inside = Path(place).relative_to(self.folder)
            if len(inside.parts) >= _DEEPEST or len(names) > _MOST_NAMES:
                folders.clear()
            folders.sort()
            names += [(inside / name).as_posix() for name in files[:_MOST_NAMES]]
        above = self.folder.resolve().parent
        with contextlib.suppress(OSError), os.scandir(above) as entries:
            names += [f"../{entry.name}" for entry in islice(entries, _MOST_NAMES)]
        return names

    @property
    def next_step(self) -> str:
        """What a user can do about missing or broken files; see `Snapshot.next_step`."""
        if self.revision is not None:
            return super().next_step
        cache = self.folder.resolve().parent.parent / "blobs"
        downloads = (self.folder / ".cache" / "huggingface" / "download", cache)
        if any(next(place.glob("*.incomplete"), None) for place in downloads):
            return "its download is not finished; run `hf download` again with the same arguments"
        return "wait until it is complete, or save or copy it again"

    async def ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return byte ranges of a file; see `Snapshot.ranges`."""
        return await in_thread(lambda: read_ranges(self.folder / self.entry(path).path, ranges))


class RangedSnapshot(Snapshot):
    """A checkpoint on a server that lists its files, read by byte ranges with retries.

    Subclasses define one attempt to read a range.

    Args:
        repo: Name for messages and reports.
        files: Every file, by its path in the checkpoint.
        account: Time budget, traffic and cache for reading.
    """

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
                    f"expected at most {SMALL:,} bytes in {path} of {self.repo}, got {entry.size:,}; "
                    "check that the file is a configuration or a tokenizer",
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
        """Return byte ranges of a file, from this disk if it is there; see `Snapshot.ranges`."""
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
                        f"expected {end - begin} bytes of {path} of {self.repo}, got {length}"
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
    """Open the checkpoint in a folder, or in a weights file and the small files next to it.

    A folder is laid out as ``save_pretrained`` does it, or as a snapshot in the Hub's cache
    (``…/snapshots/COMMIT``).

    Raises:
        ScreeningError: The path does not exist, or the folder is empty or cannot be read.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return LocalSnapshot(str(path), place.parent, single_file(_files(place.parent), place.name))
    if not place.is_dir():
        raise ScreeningError(
            "FolderNotFound",
            f"expected an existing folder or file, got {str(path)!r}; check the path",
        )
    files = _files(place)
    if not files and not any(place.iterdir()):
        raise ScreeningError(
            "FolderNotFound",
            f"{path} is empty; give a folder with config.json and *.safetensors, or the folder of a "
            "training run, with folders such as checkpoint-*, step_* or iter_* in it",
        )
    return LocalSnapshot(str(path), place, files)


def open_download(cache: Path, repo: str, revision: str) -> LocalSnapshot | None:
    """Open a checkpoint in huggingface_hub's cache; None if the cache does not have the revision.

    Args:
        cache: The folder of the cache, such as ``HF_HUB_CACHE``.
        repo: Name of the repository, ``org/name``.
        revision: Branch, tag or commit.

    Raises:
        ScreeningError: The folder of the revision cannot be read.
    """
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
    """Return the bytes ``[begin, end)`` of a file on disk, for each of ``ranges``.

    Raises:
        ScreeningError: The file cannot be read, is too short, or is a pointer of git-lfs.
    """
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
                f"{place} ends before byte {end:,}; wait until it is complete, or copy it again",
            )
    return bodies


def _unreadable(place: Path, error: OSError) -> ScreeningError:
    if place.is_symlink() and not place.exists():
        return ScreeningError(
            "FileNotFound",
            f"{place} links to {os.readlink(place)}, which is gone (perhaps a purged cache); "
            "download it again, or copy the folder with its links followed (cp -rL)",
        )
    return ScreeningError(
        "FileNotFound",
        f"cannot read {place}: {error}; check that it exists and that you may read it",
    )


def version_digest(*parts: object) -> str:
    """Return a digest ``etag:<hex>`` from a file's address, size and version on its server.

    See `FileEntry.digest`; files with equal ``parts`` get equal digests.
    """
    return "etag:" + hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()


def changed(what: str) -> ScreeningError:
    """Return the error for a file that was changed after it was listed; ``what`` names the file."""
    return ScreeningError(
        "BadResponse",
        f"{what} changed while it was read; screen it again once it is fully written",
    )


def single_file(files: Mapping[str, FileEntry], name: str) -> dict[str, FileEntry]:
    """Select from a folder's files those of the checkpoint whose weights are in the file ``name``.

    These are ``name`` itself (or, if it is one part of a split GGUF model, all parts), and the
    configuration and tokenizer files next to it. Shard indexes are left out.
    """
    whole = PART.sub(".gguf", name)
    chosen = {}
    for path, entry in files.items():
        is_part = name.endswith(".gguf") and PART.sub(".gguf", path) == whole
        is_text = path.endswith(_TEXTS) and not path.endswith(".index.json")
        if path == name or is_part or is_text:
            chosen[path] = entry
    return chosen
