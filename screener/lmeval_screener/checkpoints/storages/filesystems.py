"""Every other file system that fsspec knows (``sftp://``, ``hdfs://``, ``smb://``, …): the fallback.

fsspec has no condition for a read, so a file's entry is looked up again after its ranges: if it changed in
between, nothing of them is believed. Calls are made in threads; one call counts as one request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from lmeval_screener.checkpoints.cache import Cache
from lmeval_screener.checkpoints.http import AgainError
from lmeval_screener.checkpoints.limits import Budget
from lmeval_screener.checkpoints.snapshot import FileEntry, Meter, Snapshot
from lmeval_screener.checkpoints.storages.store import (
    FolderListing,
    Store,
    StoreSnapshot,
    changed,
    in_thread,
    version_digest,
)
from lmeval_screener.errors import ScreeningError

T = TypeVar("T")

#: What file systems call the version of a file; the first that is there counts.
_VERSIONS = (
    "ETag",
    "etag",
    "version_id",
    "generation",
    "md5",
    "mtime",
    "modified",
    "LastModified",
    "created",
)
#: Calls at a time: file systems have one connection as a rule.
_CALLS = 8


class FileSystem:
    """One server or place of fsspec; a `Store`."""

    def __init__(self, address: str, cache: Cache) -> None:
        self.address = address
        self._cache = cache
        self._lock = asyncio.Lock()
        self._calls = asyncio.Semaphore(_CALLS)
        self._system: Any = None

    async def listed(self, path: str, meter: Meter) -> FolderListing:
        """The folders and files in a folder; see `Store.listed`."""
        system = await self._opened()
        place = system._strip_protocol(f"{self.address}/{path}")

        def look() -> list[dict[str, Any]]:
            system.invalidate_cache()
            found: list[dict[str, Any]] = system.ls(place, detail=True)
            return found

        try:
            entries = await self._call(look, path, meter)
        except FileNotFoundError:
            return FolderListing()
        folders, files = [], {}
        for entry in entries:
            name = str(entry["name"]).rstrip("/").rpartition("/")[2]
            if entry.get("type") == "directory":
                folders.append(name)
            elif type(entry.get("size")) is int:
                files[name] = FileEntry(name, entry["size"], self._digest(path, name, entry))
        return FolderListing(tuple(folders), files)

    def opened(
        self, repo: str, path: str, files: Mapping[str, FileEntry], budget: Budget, meter: Meter
    ) -> Snapshot:
        """A checkpoint of listed files; see `Store.opened`."""
        snapshot = _Files(self.read, repo, path, files, budget=budget, meter=meter, cache=self._cache)
        snapshot.is_same = self.is_same
        return snapshot

    async def read(
        self, path: str, entry: FileEntry, begin: int, end: int, received: bytearray, meter: Meter
    ) -> None:
        """Append bytes of a file; see `StoreSnapshot`."""
        system = await self._opened()
        place = system._strip_protocol(f"{self.address}/{path}")
        try:
            body = await self._call(lambda: bytes(system.cat_file(place, start=begin, end=end)), path, meter)
        except FileNotFoundError as error:
            raise changed(f"{self.address}/{path}") from error
        meter.bytes_read += len(body)
        received += body

    async def is_same(self, path: str, entry: FileEntry, meter: Meter) -> bool:
        """Whether a file is still the listed one."""
        folder, _, name = path.rpartition("/")
        listed = (await self.listed(folder, meter)).files.get(name)
        return listed is not None and (listed.size, listed.digest) == (entry.size, entry.digest)

    async def _call(self, work: Callable[[], T], path: str, meter: Meter) -> T:
        meter.requests += 1
        place = f"{self.address}/{path}"
        try:
            async with self._calls:
                return await in_thread(work)
        except FileNotFoundError:
            raise
        except PermissionError as error:
            raise ScreeningError(
                "AccessDenied", f"{place} may not be read ({error}); set what its server asks for"
            ) from error
        except Exception as error:
            raise _unreachable(f"{place} cannot be read", error, "check the address and network") from error

    def _digest(self, path: str, name: str, entry: Mapping[str, Any]) -> str | None:
        version = next((entry[key] for key in _VERSIONS if entry.get(key) is not None), None)
        return None if version is None else version_digest(self.address, path, name, entry["size"], version)

    async def _opened(self) -> Any:
        async with self._lock:
            if self._system is None:
                self._system = await in_thread(self._made)
            return self._system

    def _made(self) -> Any:
        scheme = self.address.partition("://")[0]
        try:
            import fsspec
        except ImportError:
            raise ScreeningError(
                "MissingExtra",
                f"{scheme}:// needs the package fsspec; pip install 'lmeval-dispersion[cloud]'",
            ) from None
        try:
            return fsspec.core.url_to_fs(self.address)[0]
        except ValueError as error:
            raise ScreeningError(
                "BadName",
                f"{scheme}:// is not read: neither obstore nor fsspec knows it ({error}); download the "
                "checkpoint and give its folder",
            ) from error
        except ImportError as error:
            raise ScreeningError(
                "MissingExtra", f"{scheme}:// needs another package ({error}); install it"
            ) from error
        except Exception as error:
            raise _unreachable(f"{self.address} cannot be opened", error, "check it") from error


def _unreachable(what: str, error: Exception, advice: str) -> AgainError:
    said = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return AgainError(ScreeningError("Unreachable", f"{what} ({said}); {advice}"))


class _Files(StoreSnapshot):
    """A checkpoint in a file system; see `Snapshot`."""

    is_same: Callable[[str, FileEntry, Meter], Awaitable[bool]]

    async def ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Bytes of a file that did not change while they were read; see `Snapshot.ranges`."""
        bodies = await super().ranges(path, ranges)
        place = f"{self._path}/{path}" if self._path else path
        if not await self.is_same(place, self.files[path], self.meter):
            raise changed(f"{path} of {self.repo}")
        return bodies


def finder(cache: Cache) -> Callable[[str], tuple[Store, str]]:
    """A function that finds the server and the path in it that an address names; one object a server."""
    systems: dict[str, FileSystem] = {}

    def find(address: str) -> tuple[Store, str]:
        scheme, _, rest = address.partition("://")
        host, _, path = rest.partition("/")
        name = f"{scheme}://{host}"
        if name not in systems:
            systems[name] = FileSystem(name, cache)
        return systems[name], path.strip("/")

    return find
