"""Checkpoints behind addresses, read by ranges; see `Snapshot`.

A large remote file is resolved once, and its ranges are read concurrently from that address. If the address
is refused (expired), the file is resolved again; if the new address is refused too, every range is resolved
by itself. A range has no checksum, so only `range_problem` protects from a faulty server's wrong rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lmeval_screener.checkpoints.account import Account
from lmeval_screener.checkpoints.concurrency import in_thread, side_by_side
from lmeval_screener.checkpoints.folder import read_ranges
from lmeval_screener.checkpoints.http import (
    ATTEMPTS,
    RetryError,
    contradiction,
    drained,
    piece_of,
    retried,
    unpacked,
)
from lmeval_screener.checkpoints.snapshot import SMALL, FileEntry, Snapshot
from lmeval_screener.errors import ScreeningError

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

    from lmeval_screener.checkpoints.http import Transport

#: A file up to this size is accepted whole from a server that ignores Range.
WHOLE = 4 * 2**20


class RangedSnapshot(Snapshot):
    """Listed files, read by ranges with retries on an account. Subclasses define one attempt."""

    def __init__(self, repo: str, files: Mapping[str, FileEntry], account: Account) -> None:
        # A file without a version may change.
        cache = account.cache if all(entry.digest for entry in files.values()) else None
        super().__init__(repo, files, None, cache)
        self.account = account
        self._text_locks: dict[str, asyncio.Lock] = {}
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
        async with self._text_locks.setdefault(path, asyncio.Lock()):
            entry = self.entry(path)
            if entry.size > SMALL:
                raise ScreeningError(
                    "BadResponse",
                    f"{path} of {self.repo} has {entry.size} bytes, too many for its kind; check the file",
                )
            if self.cache and (kept := self.cache.read("files", self.content_key(path))) is not None:
                return kept
            place = self._on_disk(entry)
            if place and entry.fits(stored := await in_thread(place.read_bytes)):
                return stored
            body = await retried(lambda: self._fetched(path), self.account)
            if self.cache:
                self.cache.write("files", self.content_key(path), body)  # the digest may be new
            return body

    async def ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Bytes of a file; see `Snapshot.ranges`."""
        if place := self._on_disk(await self.look_up(path)):
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

        return await retried(attempt, self.account) if end > begin else b""


@dataclass
class FilePlace:
    """A file's resolved address and ETag, if known."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    address: URL | None = None
    refused: int = 0  # how often such an address was refused in a row
    etag: str | None = None


class RemoteSnapshot(RangedSnapshot):
    """Files at addresses.

    Args:
        repo: Name for messages.
        files: Every file by path.
        account: What they are read with.
        online: The connections to request some item; see `Hub.online`.
        url: The address that a file is requested from, by its path.
        refused: The error of a response with a final status.
        etags: ETags of files; their ranges are requested on condition of these.
    """

    #: Whether a file's address leads to another one, which may expire: the file is then resolved again.
    _redirects = False

    def __init__(
        self,
        repo: str,
        files: Mapping[str, FileEntry],
        account: Account,
        online: Callable[[str], Transport],
        url: Callable[[str], URL],
        refused: Callable[[aiohttp.ClientResponse], ScreeningError],
        etags: Mapping[str, str | None] | None = None,
    ) -> None:
        super().__init__(repo, files, account)
        self._connections, self._url, self._refused = online, url, refused
        self._etags = etags or {}
        self._places: dict[str, FilePlace] = {}

    async def _resolved(self, path: str) -> URL:
        """The address for a file's ranges, in one attempt."""
        return self._url(path)

    async def _read(self, path: str, begin: int, end: int, received: bytearray) -> None:
        """Append bytes ``[begin, end)``, as many as arrive, if the response matches the request."""
        transport, entry = self._online(path), self.entry(path)
        etag = self._etags.get(path)
        place = self._places.setdefault(path, FilePlace(etag=etag))
        headers = {"Range": f"bytes={begin}-{end - 1}"}
        if etag and not etag.startswith("W/"):
            headers["If-Match"] = etag
        resolved = await self._address(path, place) if place.refused < 2 else None
        url = resolved or self._url(path)
        async with await transport.followed("GET", url, headers, self.account) as response:
            host = response.url.host
            if response.status == 206:
                if problem := range_problem(response, begin, end, entry.size, place.etag):
                    raise contradiction(f"{host} answered wrongly for {path} of {self.repo}: {problem}")
                while piece := await piece_of(response, self.account):
                    received += piece
                    begin += len(piece)
                    if begin > end:
                        return
                place.etag = place.etag or response.headers.get("ETag")
                place.refused = place.refused if resolved is None else 0
            elif response.status == 200:
                if entry.size > WHOLE and (begin, end) != (0, entry.size):
                    # Mirrors that ignore Range; small files may come whole.
                    what = (
                        f"{host} ignores Range and would send all {entry.size} bytes of {path} of {self.repo}"
                    )
                    advice = "use the Hub itself or download the checkpoint and screen the folder"
                    raise contradiction(f"{what}; {advice}", "RangeNotSupported")
                body = await unpacked(response, self.account, entry.size)
                if not entry.fits(body):
                    raise contradiction(f"{path} of {self.repo} came as another file")
                if entry.size <= WHOLE:
                    self._whole[path] = body
                received += body[begin:end]
            else:
                await drained(response, self.account)
                if not self._redirects or transport.is_hub(response.url):
                    raise self._refused(response)
                if response.status not in (401, 403):
                    what = f"{host} answered {response.status} to a range of {path} of {self.repo}"
                    raise contradiction(what)
                # Only the first refused range counts; for the others the address is already gone.
                if resolved is not None and place.address is resolved:
                    place.address, place.etag, place.refused = None, None, place.refused + 1
                what = f"{host} refuses the signed address of {path} of {self.repo}; try again later"
                raise RetryError(ScreeningError("AccessDenied", what), wait=0.0)

    async def _address(self, path: str, place: FilePlace) -> URL:
        """The address for a file's ranges; ranges that ask at the same time share one request."""
        if place.address is None:
            async with place.lock:
                if place.address is None:
                    place.address = await retried(lambda: self._resolved(path), self.account)
        return place.address

    def _online(self, path: str) -> Transport:
        return self._connections(f"{path} of {self.repo}")


def range_problem(
    response: aiohttp.ClientResponse, begin: int, end: int, size: int, etag: str | None
) -> str | None:
    """Why a 206 is not bytes ``[begin, end)`` of the listed file as stored; None if it is."""
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
