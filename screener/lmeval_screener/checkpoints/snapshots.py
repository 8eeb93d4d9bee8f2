"""Checkpoints in a folder and behind addresses; see `Snapshot`.

A large remote file is resolved once, and its ranges are read side by side from where that leads. When that
address is refused (expired), it is resolved once more; when the new one is refused too, every range is
resolved by itself. There is no checksum of a range, so `range_problem` is all that stands between a faulty
server and wrong rows: nothing is read from an answer that contradicts what was asked or listed.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from yarl import URL

from lmeval_screener.checkpoints import Cache, FileEntry, Meter, single_file
from lmeval_screener.checkpoints.http import (
    ATTEMPTS,
    RANGES,
    AgainError,
    Transport,
    contradiction,
    drained,
    piece_of,
    retried,
    side_by_side,
    unpacked,
)
from lmeval_screener.checkpoints.limits import Budget
from lmeval_screener.errors import ScreeningError

if TYPE_CHECKING:
    import aiohttp

#: Small files are at most so long: the largest tokenizers have some 40 MB. In a folder, those up to this size
#: get a digest from their content; weights do not need one.
SMALL = 64 * 2**20
#: A file up to this size is accepted whole from a server that ignores Range.
WHOLE = 4 * 2**20
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass
class LocalSnapshot:
    """A checkpoint in a folder; see `Snapshot`. Nothing travels, nothing is cached."""

    repo: str
    folder: Path
    files: Mapping[str, FileEntry]
    revision: str | None = None
    meter: Meter = field(default_factory=Meter)
    parameters: int | None = None
    cache: Cache | None = None

    async def small_file(self, path: str) -> bytes:
        """Whole content of a file; see `Snapshot.small_file`."""
        place = self._place(path)
        try:
            return await asyncio.to_thread(place.read_bytes)
        except OSError as error:
            raise ScreeningError("FileNotFound", f"cannot read {path} of {self.repo}: {error}") from error

    async def ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Bytes of a file; see `Snapshot.ranges`."""
        return await asyncio.to_thread(read_ranges, self._place(path), ranges)

    async def size(self, path: str) -> int:
        """Size of a file; see `Snapshot.size`."""
        try:
            return self._place(path).stat().st_size
        except OSError as error:
            raise ScreeningError("FileNotFound", f"cannot read {path} of {self.repo}: {error}") from error

    def _place(self, path: str) -> Path:
        if path not in self.files:
            raise ScreeningError("FileNotFound", f"{self.repo} has no {path}; is the download complete?")
        return self.folder / path


def open_folder(path: str | os.PathLike[str]) -> LocalSnapshot:
    """A checkpoint in a folder.

    Three layouts are understood:

    - transformers' own (``save_pretrained``): config.json and the safetensors files side by side;
    - a snapshot of the Hub's cache (``…/snapshots/<commit>``), whose files are symbolic links;
    - a repository of the Hub's cache (``models--org--name``): the commit that ``refs/main`` names, or
      the only snapshot there is.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ScreeningError(
            "FolderNotFound", f"expected a folder, got {str(path)!r}, which is none; check the path"
        )
    if not any(folder.iterdir()):
        raise ScreeningError(
            "FolderNotFound",
            f"{path} is empty; name a folder with config.json and *.safetensors, or a training run's folder "
            "with checkpoint-*, step_* or iter_* in it",
        )
    if folder.name.startswith("models--") and (folder / "snapshots").is_dir():
        commit = _cached_commit(folder, "main")
        snapshots = sorted(place for place in (folder / "snapshots").iterdir() if place.is_dir())
        if commit is None and len(snapshots) != 1:
            names = ", ".join(place.name for place in snapshots) or "none"
            raise ScreeningError(
                "FolderNotFound",
                f"{folder} holds several snapshots or none ({names}); name one: {folder}/snapshots/…",
            )
        folder = folder / "snapshots" / commit if commit else snapshots[0]
    return LocalSnapshot(str(path), folder, _files(folder))


def open_file(path: str | os.PathLike[str]) -> LocalSnapshot:
    """A checkpoint that is one file of weights, with the configuration and tokenizer beside it, if any."""
    place = Path(path).expanduser()
    if not place.is_file():
        raise ScreeningError("FolderNotFound", f"there is no file {str(path)!r}; check the path")
    return LocalSnapshot(str(path), place.parent, single_file(_files(place.parent), place.name))


def open_download(cache: Path, repo: str, revision: str | None) -> LocalSnapshot | None:
    """A checkpoint that huggingface_hub downloaded; None if this revision is not in its cache."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    if (commit := _cached_commit(folder, revision or "main")) is None:
        return None
    place = folder / "snapshots" / commit
    return LocalSnapshot(repo, place, _files(place), revision=commit)


def _cached_commit(folder: Path, revision: str) -> str | None:
    """The commit that a revision names in a repository of the Hub's cache, if its files are there."""
    reference = folder / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    there = _COMMIT.fullmatch(commit) and (folder / "snapshots" / commit).is_dir()
    return commit if there else None


def _files(folder: Path) -> dict[str, FileEntry]:
    files = {}
    for place in sorted(folder.iterdir()):
        name = place.name
        if name.startswith(".") or not place.is_file():
            continue
        size, digest = place.stat().st_size, None
        if name.endswith((".json", ".model", ".txt", ".tiktoken")) and size <= SMALL:
            digest = f"sha256:{hashlib.sha256(place.read_bytes()).hexdigest()}"
        files[name] = FileEntry(name, size, digest)
    return files


def read_ranges(place: Path, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Bytes ``[begin, end)`` of a file on disk, for each range."""
    bodies = []
    try:
        with place.open("rb") as file:
            for begin, end in ranges:
                file.seek(begin)
                bodies.append(file.read(end - begin))
    except OSError as error:
        raise ScreeningError("FileNotFound", f"cannot read {place}: {error}") from error
    for (begin, end), body in zip(ranges, bodies, strict=True):
        if len(body) != end - begin:
            raise ScreeningError(
                "BadResponse", f"{place} ended before byte {end}; is it still being written?"
            )
    return bodies


class RangedSnapshot:
    """Listed files, read by ranges in attempts; see `Snapshot`. Subclasses say how one attempt goes.

    Args:
        repo: Its name, or the address that was asked for.
        files: Those that are there.
        budget: Time for everything.
        meter: Counts what travels.
        cache: Where things are kept, under the versions of the files.
    """

    def __init__(
        self, repo: str, files: Mapping[str, FileEntry], *, budget: Budget, meter: Meter, cache: Cache
    ) -> None:
        self.repo = repo
        self.revision: str | None = None
        self.files = files
        self.meter = meter
        self.parameters: int | None = None
        # A file without a version may be another one tomorrow.
        self.cache: Cache | None = cache if all(entry.digest for entry in files.values()) else None
        self._budget = budget
        self._text_locks: dict[str, asyncio.Lock] = {}
        self._proven: set[str] = set()  # files of which a range came right
        self._whole: dict[str, bytes] = {}  # small files that a server sent in place of a range

    async def _read(self, path: str, begin: int, end: int, received: bytearray) -> None:
        """Append bytes ``[begin, end)`` of a file to what was received, as far as they come; one attempt."""
        raise NotImplementedError

    async def _text(self, path: str) -> bytes:
        """A small file from the network."""
        return await self._range(path, 0, await self.size(path))

    def _on_disk(self, entry: FileEntry) -> Path | None:
        """The file where another program has already put it."""
        return None

    async def small_file(self, path: str) -> bytes:
        """Whole content of a small file; see `Snapshot.small_file`."""
        entry = self._entry(path)
        if entry.size is not None and entry.size > SMALL:
            raise ScreeningError(
                "BadResponse",
                f"{path} of {self.repo} has {entry.size} bytes, too many for its kind; check it",
            )
        key = entry.digest or f"{self.repo}@{self.revision}/{path}"
        async with self._text_locks.setdefault(path, asyncio.Lock()):
            if self.cache and (kept := self.cache.read("files", key)) is not None:
                return kept
            place = self._on_disk(entry)
            if place and entry.fits(stored := await asyncio.to_thread(place.read_bytes)):
                return stored
            body = await retried(lambda: self._text(path), self._budget)
            if self.cache:
                self.cache.write("files", key, body)
            return body

    async def size(self, path: str) -> int:
        """Size of a file; see `Snapshot.size`."""
        if (size := self._entry(path).size) is None:
            raise contradiction(f"nothing says how large {path} of {self.repo} is").error
        return size

    async def ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Bytes of a file; see `Snapshot.ranges`."""
        if place := self._on_disk(self._entry(path)):
            return await asyncio.to_thread(read_ranges, place, ranges)
        return await side_by_side(
            (self._range(path, begin, end) for begin, end in ranges), min(RANGES, len(ranges))
        )

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
            except AgainError as again:
                again.fruitful = len(received) > before
                if path in self._proven:  # the server is right as a rule
                    again.attempts = ATTEMPTS
                raise
            self._proven.add(path)
            return bytes(received)

        return await retried(attempt, self._budget) if end > begin else b""

    def _entry(self, path: str) -> FileEntry:
        if (entry := self.files.get(path)) is None:
            at = f" at revision {self.revision}; ask for another revision" if self.revision else ""
            where = at or "; is the upload complete?"
            raise ScreeningError("FileNotFound", f"{self.repo} has no {path}{where}")
        return entry


@dataclass
class FilePlace:
    """Where one file is read, as far as it is known.

    Attributes:
        lock: Of the one that resolves it.
        address: Where its ranges are read; None until it was resolved.
        refused: How often such an address was refused in a row.
        etag: The version of all ranges; None where the server names none.
    """

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    address: URL | None = None
    refused: int = 0
    etag: str | None = None


class RemoteSnapshot(RangedSnapshot):
    """Files at addresses; see `Snapshot`. Subclasses say where a file is and what a refusal means."""

    def __init__(
        self,
        transport: Transport | None,
        repo: str,
        files: Mapping[str, FileEntry],
        *,
        budget: Budget,
        meter: Meter,
        cache: Cache,
    ) -> None:
        super().__init__(repo, files, budget=budget, meter=meter, cache=cache)
        self._transport = transport
        self._places: dict[str, FilePlace] = {}

    def _url(self, path: str) -> URL:
        """Where a file is asked for."""
        raise NotImplementedError

    def _refused(self, response: aiohttp.ClientResponse) -> ScreeningError:
        """The error that a final status means."""
        raise NotImplementedError

    async def _resolved(self, path: str) -> URL:
        """Where the ranges of a file are read, in one attempt."""
        return self._url(path)

    def _conditions(self, place: FilePlace) -> Mapping[str, str]:
        """Headers of a range beside Range."""
        return {}

    def _is_final(self, url: URL) -> bool:
        """Whether a refusal from here is final, not one of an address that may be resolved anew."""
        return True

    async def _read(self, path: str, begin: int, end: int, received: bytearray) -> None:
        """Append bytes ``[begin, end)`` as far as they come, if the answer is what was asked for."""
        transport, size = self._online(path), await self.size(path)
        place = self._places.setdefault(path, FilePlace())
        headers = {"Range": f"bytes={begin}-{end - 1}", **self._conditions(place)}
        resolved = await self._address(path, place) if place.refused < 2 else None
        url = resolved or self._url(path)
        async with await transport.followed("GET", url, headers, self.meter, self._budget) as response:
            host = response.url.host
            if response.status == 206:
                if problem := range_problem(response, begin, end, size, place.etag):
                    raise contradiction(f"{host} answered wrongly for {path} of {self.repo}: {problem}")
                while piece := await piece_of(response, self.meter):
                    received += piece
                    begin += len(piece)
                    if begin > end:
                        return
                place.etag = place.etag or response.headers.get("ETag")
                place.refused = place.refused if resolved is None else 0
            elif response.status == 200:
                if size > WHOLE and (begin, end) != (0, size):
                    # Mirrors that ignore Range; small files may come whole.
                    raise contradiction(
                        f"{host} ignores Range and would send all {size} bytes of {path} of {self.repo}; use "
                        "the Hub itself or download the checkpoint and screen the folder",
                        "RangeNotSupported",
                    )
                body = await unpacked(response, self.meter, size)
                if len(body) != size or not self._entry(path).fits(body):
                    raise contradiction(f"{path} of {self.repo} came as another file")
                if size <= WHOLE:
                    self._whole[path] = body
                received += body[begin:end]
            else:
                await drained(response, self.meter)
                if self._is_final(response.url):
                    raise self._refused(response)
                if response.status not in (401, 403):
                    what = f"{host} answered {response.status} to a range of {path} of {self.repo}"
                    raise contradiction(what)
                # The first one that is refused says so; the others find the address already gone.
                if resolved is not None and place.address is resolved:
                    place.address, place.etag, place.refused = None, None, place.refused + 1
                what = f"{host} refuses the signed address of {path} of {self.repo}; try again later"
                raise AgainError(ScreeningError("AccessDenied", what), wait=0.0)

    async def _address(self, path: str, place: FilePlace) -> URL:
        """Where the ranges of a file are read; resolved by one request for all that ask at the same time."""
        if place.address is None:
            async with place.lock:
                if place.address is None:
                    place.address = await retried(lambda: self._resolved(path), self._budget)
        return place.address

    def _online(self, path: str) -> Transport:
        """The pool."""
        if self._transport is None:
            raise ScreeningError(
                "Offline",
                f"offline mode is on and what is needed of {path} of {self.repo} is not in the cache; "
                "screen it once with a network, or unset HF_HUB_OFFLINE",
            )
        return self._transport


def range_problem(
    response: aiohttp.ClientResponse, begin: int, end: int, size: int, etag: str | None
) -> str | None:
    """Why a 206 is not bytes ``[begin, end)`` of the file that is meant, as it is stored; None if it is."""
    headers = response.headers
    expected = f"bytes {begin}-{end - 1}/{size}"
    if (got := headers.getall("Content-Range", [])) != [expected]:
        return f"expected Content-Range {expected!r}, got {', '.join(map(repr, got)) or None}"
    if (length := headers.get("Content-Length", str(end - begin))) != str(end - begin):
        return f"expected {end - begin} bytes, got Content-Length {length}"
    if (encoding := headers.get("Content-Encoding", "identity")) != "identity":
        return f"the range came with Content-Encoding {encoding}"
    if headers.get("Content-Type", "").startswith("text/html"):
        return "the body is a web page"
    if etag and headers.get("ETag", etag) != etag:
        return f"the ETag changed from {etag} to {headers.get('ETag')}"
    return None
