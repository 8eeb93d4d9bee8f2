"""A checkpoint on the Hub: small files whole, large ones by ranges from where the Hub redirects to.

A large file is resolved once, by HEAD *without* Range: the signature of the address then covers every
range (had the request carried one, only that one). Ranges are read from that address side by side. When it
is refused (expired), it is resolved once more; when the new one is refused too, every range is resolved by
itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
from yarl import URL

from lmeval_screener.checkpoints.cache import Cache
from lmeval_screener.checkpoints.http import (
    HOPS,
    RANGES,
    AgainError,
    Answer,
    Batch,
    Budget,
    Came,
    Route,
    Transport,
    drained,
    is_redirect,
    pieces,
    redirect,
    side_by_side,
    unpacked,
)
from lmeval_screener.checkpoints.hub_responses import (
    Listing,
    gated,
    range_problem,
    refusal,
    resolve_problem,
    resolved_entry,
)
from lmeval_screener.checkpoints.local import read_ranges
from lmeval_screener.checkpoints.snapshot import FileEntry, Meter, check_ranges
from lmeval_screener.checkpoints.wire import Reply
from lmeval_screener.errors import ScreeningError

#: Small files are at most so long: the largest tokenizers have some 40 MB.
SMALL = 64 * 2**20
#: A file up to this size is accepted whole from a server that ignores Range.
WHOLE = 4 * 2**20
#: Where the Hub's own redirects of small files lead.
_TEXTS = "/api/resolve-cache/models"


@dataclass
class _Source:
    """Where one file is read, as far as it is known."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    address: URL | None = None
    route: Route | None = None
    refused: int = 0
    etag: str | None = None
    whole: bytes | None = None


class HubSnapshot:
    """A checkpoint on the Hub at one commit; see `Snapshot`. Made by `Hub`.

    Args:
        transport: The pool; None in offline mode.
        endpoint: Origin of the Hub.
        found: The listing.
        requested_revision: What was asked for.
        budget: Time for everything.
        meter: Counts what travels.
        cache: Where things are kept.
        downloads: Folder of the repository in the Hub's own cache, whose blobs are read from disk.
        early: Texts that were asked for before the commit was known, by path; checked by digest like all.
        learnt: Called with the files whenever the size or digest of one became known.
    """

    def __init__(
        self,
        transport: Transport | None,
        endpoint: str,
        found: Listing,
        requested_revision: str | None,
        *,
        budget: Budget,
        meter: Meter,
        cache: Cache,
        downloads: Path,
        early: Mapping[str, bytes],
        learnt: Callable[[Mapping[str, FileEntry]], None] = lambda files: None,
    ) -> None:
        self.repo = found.repo
        self.requested_revision = requested_revision
        self.revision: str | None = found.commit
        self._files = dict(found.files)
        self.files: Mapping[str, FileEntry] = self._files
        self.meter = meter
        self.parameters = found.parameters
        self.cache: Cache | None = cache
        self._transport, self._endpoint, self._budget = transport, endpoint, budget
        self._downloads, self._early, self._learnt = downloads, dict(early), learnt
        self._gathering = False
        self._closed = found.gated and transport is not None and transport.token is None
        self._sources: dict[str, _Source] = {}
        self._text_locks: dict[str, asyncio.Lock] = {}

    async def prepare(self, tokenizers: Sequence[str], weights: str, texts: Sequence[str]) -> None:
        """Ask side by side for what nearly every checkpoint needs and a list of repositories does not say.

        Args:
            tokenizers: Files that may hold the vocabulary, best first: the digest of the first one that is
                there is asked for.
            weights: The file of weights whose size and address are asked for, if it is there.
            texts: What is read whole, if it is there.

        Raises:
            ScreeningError: As `small_file` and `ranges`.
        """
        wanted = [*texts, *[path for path in tokenizers if path in self.files][:1], weights]
        unknown = [path for path in wanted if path in self.files and self.files[path].size is None]
        works: list[Coroutine[Any, Any, object]] = []
        for path in unknown:
            if path == weights:
                works.append(self.size(path))
            elif self.files[path].digest is None:
                works.append(self.small_file(path) if path in texts else self._digested(path))
        if not works:
            return
        before = dict(self.files)
        self._gathering = True
        try:
            await side_by_side(works)
        finally:
            self._gathering = False
            if self.files != before:
                self._learnt(self.files)

    async def small_file(self, path: str) -> bytes:
        """Whole content of a small file; see `Snapshot.small_file`."""
        entry = self._entry(path)
        if entry.size is not None and entry.size > SMALL:
            raise ScreeningError(
                "BadResponse", f"{path} of {self.repo} has {entry.size} bytes, too many for its kind"
            )
        async with self._text_locks.setdefault(path, asyncio.Lock()):
            entry = self._entry(path)
            if self.cache and (kept := self.cache.read("files", self._file_key(entry))) is not None:
                return kept
            place, body = self._downloaded(entry), self._early.pop(path, b"")
            if place and entry.fits(stored := await asyncio.to_thread(place.read_bytes)):
                return stored
            if entry.size is None or not entry.fits(body):
                body = await self._transport_or_offline(path).retried(
                    lambda: self._text(path, entry), self._budget
                )
            if self.cache:
                self.cache.write("files", self._file_key(self._entry(path)), body)
            return body

    def _file_key(self, entry: FileEntry) -> str:
        return entry.digest or f"{self.repo}@{self.revision}/{entry.path}"

    async def _text(self, path: str, entry: FileEntry) -> bytes:
        """A small file from the network.

        Texts in git are served by `raw` in one round trip, compressed; but they count as pages, of which
        few are allowed.
        """
        if entry.size is None:
            return await self._unlisted_text(path)
        transport, size = self._transport_or_offline(path), entry.size
        in_git = not (entry.digest or "").startswith("sha256:")
        body, url = b"", self._url("raw", path)
        if in_git and transport.bucket(url).affords():
            try:
                body, _ = await transport.body(url, self.meter, size, self._refused, self._budget)
            except ScreeningError as error:
                # Mirrors often know nothing but resolve.
                if error.code not in ("RepoNotFound", "RateLimited"):
                    raise
        if not in_git or (size and not body):
            body = await self._range(path, 0, size) if size else b""
        if not entry.fits(body):
            raise self._other_content(path)
        return body

    async def _unlisted_text(self, path: str) -> bytes:
        """A small file of which nothing is known but that it is there; its digest comes with it.

        The Hub redirects from `resolve` to where such texts lie. When it was seen to do so once, the others
        are asked for there: one request that counts in place of two.
        """
        transport, entry = self._transport_or_offline(path), self._entry(path)
        direct = URL(f"{self._endpoint}{_TEXTS}/{self.repo}/{self.revision}/{quote(path)}", encoded=True)
        url = direct if transport.texts_lie_there else self._url("resolve", path)
        for _ in range(HOPS):
            async with transport.request(
                "GET", url, {"Accept-Encoding": "gzip"}, self.meter, self._budget
            ) as response:
                transport.raise_if_passing(response)
                final, there = response.status == 200, response.url.raw_path == direct.raw_path
                if there and not (final and "ETag" in response.headers) and transport.texts_lie_there:
                    transport.texts_lie_there = False
                    await drained(response, self.meter)
                    url = self._url("resolve", path)
                    continue
                if not (final or is_redirect(response)):
                    await drained(response, self.meter)
                    raise self._refused(response)
                if transport.is_hub(response.url):
                    self._believe(path, response, final=False)
                    entry = self._entry(path)
                if not final:
                    url = await redirect(response, self.meter)
                    continue
                if there and "ETag" in response.headers:
                    counts = (
                        transport.bucket(response.url).name
                        == transport.bucket(self._url("resolve", path)).name
                    )
                    transport.texts_lie_there = counts
                body = bytearray()
                async for piece in unpacked(response, self.meter):
                    body += piece
                    if len(body) > SMALL:
                        break
                if len(body) > SMALL or not entry.fits(bytes(body)):
                    raise self._other_content(path)
                self._know(FileEntry(path, len(body), entry.digest))
                return bytes(body)
        raise _contradiction(f"{url.host} redirects in circles for {path} of {self.repo}")

    def _other_content(self, path: str) -> AgainError:
        return AgainError(
            _contradiction(f"{path} of {self.repo} does not have the digest that the listing says"), last=True
        )

    async def _digested(self, path: str) -> None:
        """Learn the digest of a file, by one request if the server tells it where it redirects."""
        async with self._text_locks.setdefault(path, asyncio.Lock()):
            if self._entry(path).digest is None:
                transport = self._transport_or_offline(path)
                await transport.retried(lambda: self._resolved(path, wanted="digest"), self._budget)

    def _know(self, entry: FileEntry) -> None:
        if entry != self.files[entry.path]:
            self._files[entry.path] = entry
            if not self._gathering:
                self._learnt(self.files)

    async def size(self, path: str) -> int:
        """Size of a file; see `Snapshot.size`."""
        if (size := self._entry(path).size) is not None:
            return size
        await self._address(path, self._sources.setdefault(path, _Source()))
        if (size := self._entry(path).size) is None:
            raise _contradiction(f"nobody says how large {path} of {self.repo} is")
        return size

    async def ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Bytes of a file; see `Snapshot.ranges`."""
        size = await self.size(path)
        check_ranges(path, size, ranges)
        if place := self._downloaded(self._entry(path)):
            return await asyncio.to_thread(read_ranges, place, ranges)
        if len(ranges) == 1:
            return [await self._range(path, *ranges[0])]
        batch = await self._batch(path, size, ranges)

        async def some() -> None:
            async with batch.room():
                while batch.left:
                    at, came = batch.left.popleft()
                    batch.bodies[at] = await self._range(path, *ranges[at], came)

        try:
            while not await batch.settled():
                await side_by_side(some() for _ in range(min(RANGES, len(batch.left))))
        finally:
            batch.close()
        return batch.bodies

    async def _batch(self, path: str, size: int, ranges: Sequence[tuple[int, int]]) -> Batch:
        """Many ranges, on their way where all can be asked for at one address."""
        transport, source = self._transport_or_offline(path), self._sources.setdefault(path, _Source())

        def fits(reply: Reply, begin: int, end: int) -> bool:
            right = (
                reply.status == 206
                and reply.trouble is None
                and len(reply.body) == end - begin
                and range_problem(reply.headers, begin, end, size, source.etag) is None
            )
            if right:
                source.etag = source.etag or reply.headers.get("ETag")
                source.refused = 0
            return right

        direct = source.whole is None and source.refused < 2 and all(end > begin for begin, end in ranges)
        url = self._url("resolve", path)
        if direct:
            url = source.address or await self._address(path, source)
        route, whole = self._route(transport, source, url), size if size <= WHOLE else 0
        return transport.batch(
            route, self._conditions(source), self.meter, ranges, whole, fits, direct=direct
        )

    @staticmethod
    def _route(transport: Transport, source: _Source, url: URL) -> Route:
        if source.route is None or source.route.url is not url:
            source.route = transport.route(url)
        return source.route

    async def _range(self, path: str, begin: int, end: int, came: Came | None = None) -> bytes:
        """One range; a body that breaks is resumed where it broke.

        Args:
            path: The file.
            begin: Of the range.
            end: Likewise.
            came: An answer to it that is there already.
        """
        transport, received = self._transport_or_offline(path), bytearray()
        source = self._sources.setdefault(path, _Source())

        async def attempt() -> bytes:
            nonlocal came
            before = len(received)
            first, came = came, None
            try:
                if source.whole is not None:
                    return source.whole[begin:end]
                await self._read(path, source, begin + before, end, received, first)
            except AgainError as again:
                again.fruitful = len(received) > before
                raise
            return bytes(received)

        return await transport.retried(attempt, self._budget) if end > begin else b""

    async def _read(
        self,
        path: str,
        source: _Source,
        begin: int,
        end: int,
        received: bytearray,
        came: Came | None = None,
    ) -> None:
        """Append bytes ``[begin, end)`` as far as they come, if the answer is what was asked for."""
        transport, size = self._transport_or_offline(path), await self.size(path)
        headers = {"Range": f"bytes={begin}-{end - 1}", **self._conditions(source)}
        resolved = None
        if came is not None:
            resolved = came.url
        elif source.refused < 2:
            resolved = source.address or await self._address(path, source)
        url = resolved or self._url("resolve", path)
        wanted, whole = end - begin, size if size <= WHOLE or (begin, end) == (0, size) else 0
        for _ in range(HOPS):
            asked: AbstractAsyncContextManager[Answer]
            if came is not None:
                asked, came = came, None
            else:
                route = self._route(transport, source, url)
                asked = transport.ranged(route, headers, self.meter, self._budget, wanted, whole)
            async with asked as response:
                if is_redirect(response):
                    url = await redirect(response, self.meter)
                    continue
                transport.raise_if_passing(response)
                if response.status == 206:
                    problem = range_problem(response.headers, begin, end, size, source.etag)
                    if problem:
                        got = f"{url.host} answered wrongly for {path} of {self.repo}: {problem}"
                        raise AgainError(_contradiction(got), last=True)
                    source.etag = source.etag or response.headers.get("ETag")
                    async for piece in pieces(response, self.meter):
                        received += piece
                        begin += len(piece)
                        if begin > end:
                            received.clear()
                            break
                    if begin != end:
                        raise AgainError(
                            _contradiction(f"a range of {path} of {self.repo} has the wrong length")
                        )
                    source.refused = source.refused if resolved is None else 0
                    return
                if response.status == 200:
                    received += (await self._whole(response, path, source, (begin, end)))[begin:end]
                    return
                await drained(response, self.meter)
                if self._has_last_word(response.url):
                    raise self._refused(response)
                if response.status in (401, 403):
                    # Whoever is refused first says so; the others find the address already gone.
                    if resolved is not None and source.address is resolved:
                        source.address, source.etag, source.refused = None, None, source.refused + 1
                    what = f"{url.host} refuses the signed address of {path} of {self.repo}; try again later"
                    raise AgainError(ScreeningError("AccessDenied", what), wait=0.0)
                what = f"{url.host} answered {response.status} to a range of {path} of {self.repo}"
                raise AgainError(_contradiction(what), last=True)
        raise _contradiction(f"{url.host} redirects in circles for {path} of {self.repo}")

    async def _whole(self, response: Answer, path: str, source: _Source, span: tuple[int, int]) -> bytes:
        """A whole file where a range was asked for: from mirrors that ignore Range, if it is small."""
        entry, size = self._entry(path), await self.size(path)
        if size > WHOLE and span != (0, size):
            raise AgainError(
                ScreeningError(
                    "RangeNotSupported",
                    f"{response.url.host} ignores Range and would send all {size} bytes of {path} of "
                    f"{self.repo}; use the Hub itself or download the checkpoint and screen the folder",
                ),
                last=True,
            )
        body = bytearray()
        async for piece in unpacked(response, self.meter):
            body += piece
            if len(body) > size:
                break
        if len(body) != size or not entry.fits(bytes(body)):
            raise AgainError(_contradiction(f"{path} of {self.repo} came as another file"), last=True)
        source.whole = bytes(body) if size <= WHOLE else None
        return bytes(body)

    async def _address(self, path: str, source: _Source) -> URL:
        """Where the ranges of a file are read; resolved by one request for all that ask at the same time."""
        transport = self._transport_or_offline(path)
        async with source.lock:
            if source.address is None:
                source.address = await transport.retried(lambda: self._resolved(path), self._budget)
            return source.address

    async def _resolved(self, path: str, *, wanted: str = "size") -> URL:
        """Where a file lies, by HEAD; what the answers say of it is kept.

        Args:
            path: The file.
            wanted: ``size`` or ``digest``: what has to be known before the Hub's own redirects are left.
        """
        transport, url = self._transport_or_offline(path), self._url("resolve", path)
        for _ in range(HOPS):
            async with transport.request(
                "HEAD", url, {"Accept-Encoding": "identity"}, self.meter, self._budget
            ) as response:
                transport.raise_if_passing(response)
                final = 200 <= response.status < 300
                if not (final or is_redirect(response)):
                    raise self._refused(response)
                self._believe(path, response, final=final)
                if final:
                    return response.url
                url = await redirect(response, self.meter)
                if wanted == "digest" and self._entry(path).digest is not None:
                    return url
                if not transport.is_hub(url) and self._entry(path).size is not None:
                    return url
        raise _contradiction(f"{url.host} redirects in circles for {path} of {self.repo}")

    def _conditions(self, source: _Source) -> Mapping[str, str]:
        """Headers of a range beside the usual ones."""
        return {}

    def _has_last_word(self, url: URL) -> bool:
        """Whether a refusal by this server is final, not one of an address that may be resolved anew."""
        return self._transport is not None and self._transport.is_hub(url)

    def _resolve_problem(
        self, response: aiohttp.ClientResponse, entry: FileEntry, *, final: bool
    ) -> str | None:
        return resolve_problem(response.headers, entry, self.revision, final=final)

    def _believe(self, path: str, response: aiohttp.ClientResponse, *, final: bool) -> None:
        """Check what a file resolves to against what is known of it, and keep what is new.

        Raises:
            AgainError: It contradicts.
        """
        entry = self._entry(path)
        if problem := self._resolve_problem(response, entry, final=final):
            raise AgainError(_contradiction(f"{path} of {self.repo} resolves wrongly: {problem}"), last=True)
        if entry.size is None or entry.digest is None:
            self._know(resolved_entry(response.headers, entry, final=final))

    def _entry(self, path: str) -> FileEntry:
        if (entry := self.files.get(path)) is None:
            raise ScreeningError(
                "FileNotFound",
                f"{self.repo} has no {path} at revision {self.revision}; ask for another revision",
            )
        return entry

    def _downloaded(self, entry: FileEntry) -> Path | None:
        """The file in the Hub's own cache, where blobs are named by their digest."""
        place = self._downloads / "blobs" / (entry.digest or "none").partition(":")[2]
        return place if entry.digest and place.is_file() and place.stat().st_size == entry.size else None

    def _transport_or_offline(self, path: str) -> Transport:
        if self._transport is None:
            raise ScreeningError(
                "Offline",
                f"offline mode is on and what is needed of {path} of {self.repo} is not in the cache; "
                "screen it once with a network, or unset HF_HUB_OFFLINE",
            )
        if self._closed:
            # The list of repositories said so: nobody needs to ask.
            raise gated(self.repo, self._endpoint, token=False)
        return self._transport

    def _url(self, verb: str, path: str) -> URL:
        return URL(f"{self._endpoint}/{self.repo}/{verb}/{self.revision}/{quote(path)}", encoded=True)

    def _refused(self, response: Answer) -> ScreeningError:
        token = self._transport is not None and self._transport.token is not None
        return refusal(response, self.repo, str(self.revision), self._endpoint, token=token)


def _contradiction(what: str) -> ScreeningError:
    return ScreeningError(
        "BadResponse", f"{what}; try again, and check the endpoint and any proxy on the way"
    )
