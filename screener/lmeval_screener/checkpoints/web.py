"""Checkpoints at web addresses, read by ranges: the Hub's, and those of any web server.

A large file of the Hub is resolved once, and its ranges are read concurrently from the address to
which the Hub redirects. If that address is refused (because it has expired), the file is resolved
again; if the new address is refused too, every range is resolved by itself. A range has no checksum,
so only `range_problem` protects from wrong rows that a faulty server sends.

Files of other servers are read over the same connections, with the same checks, without the Hub's
token. Web servers list no folders: a folder's files are those of transformers' layout that exist, and
the shards of its index. A file's version is its ETag (``If-Match``), else its date and size.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from lmeval_dispersion.errors import without_secrets
from lmeval_screener.budgets import INDEX, parsed
from lmeval_screener.checkpoints.account import CONTRADICTIONS, Account, RetryError, contradiction
from lmeval_screener.checkpoints.concurrency import side_by_side
from lmeval_screener.checkpoints.http import Transport, drained, natural, piece_of, unpacked, url_of
from lmeval_screener.checkpoints.snapshot import (
    PART,
    FileEntry,
    RangedSnapshot,
    Snapshot,
    changed,
    version_digest,
)
from lmeval_screener.errors import ScreeningError
from lmeval_screener.formats import SUFFIXES, TOKENIZER_FILES, TRANSFORMERS
from lmeval_screener.targets.names import Target

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

#: A file up to this size is accepted whole from a server that ignores Range.
WHOLE = 4 * 2**20
_SMALL = ("config.json", *TOKENIZER_FILES)


@dataclass
class FilePlace:
    """Where a file's ranges are requested.

    Attributes:
        lock: Held while ``address`` is requested from the server.
        address: Address that serves the ranges (on the Hub, the signed address to which requests
            for the file are redirected); None until it is known, and after the server refused it.
        refused: How many signed addresses in a row the server refused. It does so once they have
            expired.
        etag: The file's ETag at ``address``; None until it is known.
    """

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    address: URL | None = None
    refused: int = 0
    etag: str | None = None


class RemoteSnapshot(RangedSnapshot):
    """A checkpoint whose files are read over HTTP.

    Args:
        repo: Name for messages and reports.
        files: Every file, by its path in the checkpoint.
        account: Time budget, traffic and cache for reading.
        online: Function that returns the HTTP connections; see `Hub.online`.
    """

    #: Whether a file's address leads to another one, which may expire: the file is then resolved again.
    _redirects = False

    def __init__(
        self,
        repo: str,
        files: Mapping[str, FileEntry],
        account: Account,
        online: Callable[[str], Transport],
    ) -> None:
        super().__init__(repo, files, account)
        self._connections = online
        self._places: dict[str, FilePlace] = {}

    def _url(self, path: str) -> URL:
        """The address of a file's path."""
        raise NotImplementedError

    def _refused(self, response: aiohttp.ClientResponse) -> ScreeningError:
        """The error for a response with a final status."""
        raise NotImplementedError

    def _etag(self, path: str) -> str | None:
        """The ETag on condition of which a file's ranges are requested; None for no condition."""
        return None

    async def _resolved(self, path: str) -> URL:
        """The address for a file's ranges, in one attempt."""
        return self._url(path)

    async def _read(self, path: str, begin: int, end: int, received: bytearray) -> None:
        """Append bytes ``[begin, end)``, as many as arrive, if the response matches the request."""
        transport = self._online(path)
        entry = self.entry(path)
        etag = self._etag(path)
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
                    raise contradiction(
                        f"{host} gave an invalid response for {path} of {self.repo}: {problem}"
                    )
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
                    raise contradiction(
                        f"{host} ignores the header Range and would send all {entry.size:,} bytes "
                        f"of {path} of {self.repo}; use another server, or download the checkpoint "
                        "and screen its folder",
                        "RangeNotSupported",
                    )
                body = await unpacked(response, self.account, entry.size)
                if not entry.fits(body):
                    raise contradiction(
                        f"expected {path} of {self.repo} with the listed size and digest, got "
                        f"another file from {host}"
                    )
                if entry.size <= WHOLE:
                    self._whole[path] = body
                received += body[begin:end]
            else:
                await drained(response, self.account)
                if not self._redirects or transport.is_hub(response.url):
                    raise self._refused(response)
                if response.status not in (401, 403):
                    raise contradiction(
                        f"{host} answered a request for a range of {path} of {self.repo} with status "
                        f"{response.status}"
                    )
                # Only the first refused range counts; for the others the address is already gone.
                if resolved is not None and place.address is resolved:
                    place.address = None
                    place.etag = None
                    place.refused += 1
                error = ScreeningError(
                    "AccessDenied",
                    f"{host} refuses the signed address of {path} of {self.repo}; try again later",
                )
                raise RetryError(error, wait=0.0)

    async def _address(self, path: str, place: FilePlace) -> URL:
        """The address for a file's ranges; ranges that ask at the same time share one request."""
        if place.address is None:
            async with place.lock:
                if place.address is None:
                    place.address = await self.account.retried(lambda: self._resolved(path))
        return place.address

    def _online(self, path: str) -> Transport:
        return self._connections(f"{path} of {self.repo}")


class WebFile(NamedTuple):
    """A file that exists on a web server.

    Attributes:
        url: Address of the file.
        entry: The file's name, size, and a digest of its version.
        etag: The ETag that the server stated; None if it stated none.
    """

    url: URL
    entry: FileEntry
    etag: str | None


class WebSnapshot(RemoteSnapshot):
    """A checkpoint on a web server, each of whose files has an address of its own.

    Args:
        repo: Name for messages and reports.
        files: Every file that exists, by its path in the checkpoint.
        account: Time budget, traffic and cache for reading.
        online: Function that returns the HTTP connections; see `Hub.online`.
    """

    def __init__(
        self,
        repo: str,
        files: Mapping[str, WebFile],
        account: Account,
        online: Callable[[str], Transport],
    ) -> None:
        entries = {path: file.entry for path, file in files.items()}
        super().__init__(repo, entries, account, online)
        self._probed = files

    def _url(self, path: str) -> URL:
        return self._probed[path].url

    def _etag(self, path: str) -> str | None:
        return self._probed[path].etag

    def _refused(self, response: aiohttp.ClientResponse) -> ScreeningError:
        return _refusal(response, self.repo)


class WebServers:
    """Checkpoints at ``http://`` and ``https://`` addresses; a `Source`.

    Args:
        online: Function that returns the HTTP connections; see `Hub.online`.
    """

    def __init__(self, online: Callable[[str], Transport]) -> None:
        self._online = online

    async def expand(self, target: Target, account: Account) -> list[Target]:
        """Return the target unchanged; see `Source.expand`.

        Raises:
            ScreeningError: The address contains ``*``, but web servers list no folders.
        """
        if "*" in url_of(target.address).path:
            raise ScreeningError(
                "BadName",
                f"web servers list no folders, so that the * in {target.shown} cannot be matched; "
                "give the address of each checkpoint",
            )
        return [target]

    async def snapshot(self, target: Target, account: Account) -> Snapshot:
        """Open the checkpoint in a folder of a web server, or in a weights file.

        A weights file is opened with the configuration and tokenizer files next to it. If its
        address has a query, such as a signature, it is opened alone. See `Source.snapshot`.
        """
        transport = self._online(target.shown)
        address = target.address
        url = url_of(address, encoded="%" in address and address.isascii())
        file = url.name if url.name.endswith((*SUFFIXES, ".json")) else ""
        base = url.parent if file else url

        async def probed(name: str) -> WebFile | None:
            is_named = name == file
            place = url if is_named else _below(base, name)
            return await account.retried(
                lambda: _probe(transport, name, place, account, required=is_named)
            )

        async def existing(names: Iterable[str]) -> dict[str, WebFile]:
            files = await side_by_side(probed(name) for name in dict.fromkeys(names))
            return {file.entry.path: file for file in files if file is not None}

        def opened(files: Mapping[str, WebFile]) -> WebSnapshot:
            return WebSnapshot(target.shown, files, account, self._online)

        if file:
            names = [file]
            if not url.query_string:  # a signature covers one file and none next to it
                names += [*_SMALL, *_parts(file)]
            return opened(await existing(names))
        usual: list[str] = []
        for kind in TRANSFORMERS:
            usual += filter(None, (kind.single, kind.index))
        files = await existing([*_SMALL, *usual])
        for kind in TRANSFORMERS:
            if kind.single in files:
                return opened(files)
            if kind.index in files:
                shards = _shards(await opened(files).small_file(kind.index))
                return opened(files | await existing(shards))
        raise ScreeningError(
            "FolderNotFound",
            f"{target.shown} has none of {', '.join(usual)}; check the address, which must be that "
            "of a folder with one of these files, or of a weights file",
        )


async def _probe(
    transport: Transport, name: str, address: URL, account: Account, *, required: bool
) -> WebFile | None:
    """A file if it exists, by a GET of its first byte: a signature covers one method, GET."""
    async with await transport.followed(
        "GET", address, {"Range": "bytes=0-0"}, account
    ) as response:
        stated = response.headers.get("Content-Range", "").rpartition("/")[2]
        if response.status == 200:
            stated = response.headers.get("Content-Length", "")
            response.close()  # the whole file would follow
        else:
            await drained(response, account)
        is_page = response.headers.get("Content-Type", "").startswith("text/html")
        total = natural(stated)
        exists = response.status in (200, 206) and total is not None and not is_page
        if not exists and not required:
            return None
        if response.status not in (200, 206):
            raise _refusal(response, str(address))
        if total is None or is_page:
            what = "a web page" if is_page else "a file without a size"
            error = ScreeningError(
                "BadResponse",
                f"expected the file {name} with its size, got {what} from {response.url.host}; give "
                "the address of the file itself",
            )
            raise RetryError(error, attempts=CONTRADICTIONS)
        etag = response.headers.get("ETag")
        date = response.headers.get("Last-Modified")
        version = None
        if etag or date:
            version = version_digest(without_secrets(str(address)), total, etag, date)
        return WebFile(address, FileEntry(name, total, version), etag)


def _refusal(response: aiohttp.ClientResponse, what: str) -> ScreeningError:
    status = response.status
    host = response.url.host
    if status in (401, 403, 407, 451):
        return ScreeningError(
            "AccessDenied",
            f"{host} refuses access to {what} ({status}); check the address, and if its signature "
            "has expired, ask for a new one",
        )
    if status in (404, 410):
        return ScreeningError(
            "FileNotFound", f"{what} does not exist ({status}); check the address"
        )
    if status == 412:
        return changed(what)
    return ScreeningError(
        "BadResponse",
        f"{host} answered with status {status} for {what}; check the address and any proxy on the way",
    )


def _parts(file: str) -> list[str]:
    """All parts of a GGUF model of which a file is one, at most a thousand; empty for any other file."""
    part = PART.search(file)
    if part is None:
        return []
    stem = file.removesuffix(part[0])
    numbers = range(1, min(int(part[2]), 1000) + 1)
    return [f"{stem}-{number:05d}-of-{part[2]}.gguf" for number in numbers]


def _below(base: URL, name: str) -> URL:
    path = f"{base.raw_path.rstrip('/')}/{quote(name)}"
    return base.with_path(path, encoded=True).with_query(base.query or None)


def _shards(index: bytes) -> list[str]:
    """The shards that an index names; none if it is broken, which is refused when it is used."""
    try:
        names = set(parsed(index, INDEX)["weight_map"].values())
    except (ValueError, TypeError, KeyError, AttributeError):
        return []
    return sorted(n for n in names if isinstance(n, str) and re.fullmatch(r"[\w.-]+", n))[:2000]


def range_problem(
    response: aiohttp.ClientResponse, begin: int, end: int, size: int, etag: str | None
) -> str | None:
    """Return why a partial response (206) is not what was requested; None if it is.

    Args:
        response: The response.
        begin: First byte that was requested.
        end: First byte after the range that was requested.
        size: Size of the whole file as listed, in bytes.
        etag: ETag of the file in an earlier response; None to accept any.
    """
    headers = response.headers
    expected = f"bytes {begin}-{end - 1}/{size}"
    stated = headers.getall("Content-Range", [])
    if stated != [expected]:
        got = ", ".join(map(repr, stated)) or "no such header"
        return f"expected Content-Range {expected!r}, got {got}"
    count = str(end - begin)
    length = headers.get("Content-Length", count)
    if length != count:
        return f"expected {count} bytes, got Content-Length {length}"
    encoding = headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        return f"expected no Content-Encoding, got {encoding}"
    if headers.get("Content-Type", "").startswith("text/html"):
        return "expected bytes of the file, got a web page"
    if etag and headers.get("ETag", etag) != etag:
        return f"the ETag changed from {etag} to {headers.get('ETag')}"
    return None
