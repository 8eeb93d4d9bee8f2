"""Storages of folders, afar: globs over them, training runs in them, checkpoints and single files.

A `Store` lists a folder and reads a range, which is all that S3, Azure, a bucket of the Hub or any file
system of fsspec has to do. What is listed names each file's version (an ETag, a generation); what is read
must be of that version, and what is kept is kept under it.

fsspec is the fallback for every other scheme (``sftp://``, ``hdfs://``, ``smb://``, …). It has no condition
for a read, so a file's entry is looked up again after its ranges: if it changed in between, nothing of them
is believed. Calls are made in threads; one call counts as one request.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import hashlib
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from lmeval_screener.checkpoints import Cache, FileEntry, Meter, Snapshot, single_file
from lmeval_screener.checkpoints.http import AgainError, retried, side_by_side
from lmeval_screener.checkpoints.limits import Allowance, Budget
from lmeval_screener.checkpoints.snapshots import RangedSnapshot
from lmeval_screener.errors import ScreeningError
from lmeval_screener.targets import DEPTH, STORE_FOLDERS, WEIGHTS, Target, is_step, run_checkpoints, step_key

T = TypeVar("T")

#: Folders that are listed at a time. A glob may stand for ten thousand: all at once are more than a server
#: answers before their connections count as dead.
LISTINGS = 32


@dataclass(frozen=True)
class FolderListing:
    """The content of a folder: the names of folders, and files by name."""

    folders: tuple[str, ...] = ()
    files: Mapping[str, FileEntry] = field(default_factory=dict)


class Store(Protocol):
    """One bucket, container or server.

    Attributes:
        address: What its paths are appended to: ``s3://bucket``.
    """

    address: str

    async def listed(self, path: str, meter: Meter) -> FolderListing:
        """The folders and files in a folder (none where it is not there), in one attempt.

        Raises:
            AgainError: It may pass.
            ScreeningError: It does not.
        """
        ...

    def opened(
        self, repo: str, path: str, files: Mapping[str, FileEntry], budget: Budget, meter: Meter
    ) -> Snapshot:
        """A checkpoint of listed files in a folder."""
        ...


class StoreSource:
    """Checkpoints in stores; a `Source`.

    Args:
        find: The store and the path in it that an address names.
        meter: Counts what travels for no checkpoint that came of it.
        allowance: The user's own limits, where the store's requests do not pass a `Transport`; else None.
    """

    def __init__(
        self,
        find: Callable[[str], tuple[Store, str]],
        meter: Meter,
        allowance: Allowance | None = None,
    ) -> None:
        self._find, self._meter, self._allowance = find, meter, allowance
        self._known: dict[tuple[str, str], FolderListing] = {}
        self._slots = asyncio.Semaphore(LISTINGS)

    async def expand(self, target: Target, budget: Budget) -> list[Target]:
        """The checkpoints that an address stands for; see `Source.expand`.

        ``*``, ``?`` and ``[…]`` match inside one part of the path; a training run is its checkpoints. The
        time that a checkpoint may take is each listing's: there are as many as folders.
        """
        store, path = self._find(target.repo)
        with budget.paused():
            places = await self._matching(store, path, budget) if _is_glob(path) else [path]
            if not places:
                raise ScreeningError(
                    "FolderNotFound",
                    f"nothing matches {target.repo}; check the address (a * stands for a name between "
                    "slashes)",
                )
            works = (self._checkpoints(store, place, budget) for place in places)
            checkpoints = await side_by_side(works, min(LISTINGS, len(places)))
        paths = [path for run in checkpoints for path in run]
        return [replace(target, repo=_address(store, path)) for path in dict.fromkeys(paths)]

    async def snapshot(self, target: Target, budget: Budget) -> Snapshot:
        """The checkpoint at an address; see `Source.snapshot`."""
        store, path = self._find(target.repo)
        folder, name = path.rpartition("/")[::2] if path.endswith(WEIGHTS) else (path, "")
        meter = Meter()
        try:
            listing = await self._listed(store, folder, budget, meter)
            if name and name not in listing.files:
                raise ScreeningError(
                    "FolderNotFound",
                    f"there is no file {_address(store, path)}; it lists {_some(listing)}: check the address",
                )
            if not listing.files:
                raise ScreeningError(
                    "FolderNotFound",
                    f"{_address(store, path)} holds no file; it lists {_some(listing)}: name a folder with "
                    "config.json and the weights, or a training run's folder",
                )
            files = single_file(listing.files, name) if name else listing.files
            snapshot = store.opened(target.repo, folder, files, budget, meter)
            if isinstance(snapshot, StoreSnapshot):
                snapshot.allowance = self._allowance
            if not name:
                self._known.pop((store.address, folder), None)  # a registry's listings would not be small
            return snapshot
        except BaseException:
            self._meter.bytes_read += meter.bytes_read
            self._meter.requests += meter.requests
            raise

    async def listing(self, address: str, budget: Budget) -> FolderListing:
        """The folders and files at an address."""
        store, path = self._find(address)
        return await self._listed(store, path, budget, self._meter)

    async def _listed(self, store: Store, path: str, budget: Budget, meter: Meter) -> FolderListing:
        key = store.address, path
        if key not in self._known:
            self._known[key] = await retried(lambda: store.listed(path, meter), budget)
        return self._known[key]

    async def _each_listed(self, store: Store, paths: Iterable[str], budget: Budget) -> list[FolderListing]:
        """Listings of some folders, each within the time of a budget: many are no longer a checkpoint's."""

        async def one(path: str) -> FolderListing:
            listing_budget = Budget(budget.seconds)
            async with self._slots:
                return await listing_budget.bounded(self._listed(store, path, listing_budget, self._meter))

        return await side_by_side(one(path) for path in paths)

    async def _matching(self, store: Store, pattern: str, budget: Budget) -> list[str]:
        places = [""]
        parts = pattern.split("/")
        for at, part in enumerate(parts):
            if not _is_glob(part):
                places = [_join(place, part) for place in places]
                continue
            listings = await self._each_listed(store, places, budget)
            places = [
                _join(place, name)
                for place, listing in zip(places, listings, strict=True)
                for name in (*listing.folders, *(listing.files if at == len(parts) - 1 else ()))
                if fnmatch.fnmatchcase(name, part) and (name in listing.folders or name.endswith(WEIGHTS))
            ]
        if not _is_glob(parts[-1]):
            listings = await self._each_listed(store, places, budget)
            places = [
                p for p, listing in zip(places, listings, strict=True) if listing.files or listing.folders
            ]
        return sorted(places, key=step_key)

    async def _checkpoints(self, store: Store, path: str, budget: Budget) -> list[str]:
        if path.endswith(WEIGHTS):
            return [path]
        tree = await self._tree(store, path, budget)
        return [folder.path for folder in run_checkpoints(_ListedPath(path, tree))] or [path]

    async def _tree(self, store: Store, path: str, budget: Budget) -> dict[str, FolderListing]:
        """Listings of a folder and, where it is a training run, of what `run_checkpoints` looks into."""
        tree: dict[str, FolderListing] = {}

        async def look(places: Sequence[str]) -> None:
            new = [place for place in places if place not in tree]
            listings = await self._each_listed(store, new, budget)
            tree.update(zip(new, listings, strict=True))

        await look([path])
        await look([_join(path, name) for name in STORE_FOLDERS if name in tree[path].folders])
        steps = [_join(p, name) for p, listing in tree.items() for name in listing.folders if is_step(name)]
        level = [*steps, *([path] if is_step(path.rpartition("/")[2]) else [])]
        for _ in range(DEPTH + 1):
            await look(level)
            level = [
                _join(place, name)
                for place in level
                if not _whole(tree[place])
                for name in tree[place].folders
                if not name.startswith(".")
            ]
        return tree


@dataclass(frozen=True)
class _ListedPath:
    """A folder or file of listings, as `run_checkpoints` needs it."""

    path: str
    tree: Mapping[str, FolderListing]

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def __truediv__(self, name: str) -> _ListedPath:
        return _ListedPath(_join(self.path, name), self.tree)

    def iterdir(self) -> Iterator[_ListedPath]:
        listing = self.tree.get(self.path, FolderListing())
        return (self / name for name in (*listing.folders, *listing.files))

    def is_dir(self) -> bool:
        return self.path in self.tree or self.name in self._parent().folders

    def is_file(self) -> bool:
        return self.name in self._parent().files

    def _parent(self) -> FolderListing:
        return self.tree.get(self.path.rpartition("/")[0], FolderListing())


class StoreSnapshot(RangedSnapshot):
    """A checkpoint in a store that reads files by itself; see `Snapshot`.

    Args:
        read: Appends bytes ``[begin, end)`` of a listed file to what was received, as far as they come, in
            one attempt; raises AgainError for what may pass, and ScreeningError for what does not:
            ``BadResponse`` where the file is no longer the listed one.
        repo: Its address.
        path: Its folder in the store.
        files: By name.
        budget: Time for everything.
        meter: Counts what travels.
        cache: Where things are kept, under the versions of the files.
    """

    def __init__(
        self,
        read: Callable[[str, FileEntry, int, int, bytearray, Meter], Awaitable[None]],
        repo: str,
        path: str,
        files: Mapping[str, FileEntry],
        *,
        budget: Budget,
        meter: Meter,
        cache: Cache,
    ) -> None:
        super().__init__(repo, files, budget=budget, meter=meter, cache=cache)
        self.allowance: Allowance | None = None
        self._read_bytes, self._path = read, path

    async def _read(self, path: str, begin: int, end: int, received: bytearray) -> None:
        if self.allowance is not None:
            await self.allowance.admit(self.meter, self._budget)
            self.allowance.spend(self.meter, counted=False)
        entry = self._entry(path)
        await self._read_bytes(_join(self._path, path), entry, begin, end, received, self.meter)


def version_digest(*parts: object) -> str:
    """``etag:<hex>`` of an address and what its storage says of the version; see `FileEntry.digest`."""
    return "etag:" + hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()


def changed(what: str) -> ScreeningError:
    """The error of a file that is no longer the listed one."""
    return ScreeningError(
        "BadResponse", f"{what} changed while it was read; screen it again when nobody writes to it"
    )


async def in_thread(work: Callable[[], T]) -> T:
    """Result of a blocking call; a thread that hangs is left behind and holds up not even the exit."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def put(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # nobody waits any more: the loop is closed
            loop.call_soon_threadsafe(put, result, failure)

    threading.Thread(target=run, daemon=True).start()
    return await done


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _address(store: Store, path: str) -> str:
    return f"{store.address}/{path}" if path else store.address


def _is_glob(text: str) -> bool:
    return any(sign in text for sign in "*?[")


def _whole(listing: FolderListing) -> bool:
    return "config.json" in listing.files and any(n.endswith(".safetensors") for n in listing.files)


def _some(listing: FolderListing) -> str:
    names = [*(f"{name}/" for name in listing.folders), *listing.files]
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "") if names else "nothing"


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
