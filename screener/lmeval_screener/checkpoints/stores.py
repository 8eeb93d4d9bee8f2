"""Remote storages that list folders: globs, training runs, checkpoints and single files in them.

A `Bucket` lists a folder and reads a range: S3, Azure or any file system of fsspec. A listing names
each file's version (an ETag, a generation); the bytes read must belong to that version, and are
cached under it.

fsspec is the fallback for every other scheme (``sftp://``, ``hdfs://``, ``smb://``, …). It cannot
read on condition, so a file's entry is checked again after its ranges. One call, in a thread, counts
as a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import glob
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from lmeval_dispersion.errors import without_secrets
from lmeval_dispersion.report.declared import some
from lmeval_screener.checkpoints.account import Account, RetryError
from lmeval_screener.checkpoints.concurrency import in_thread, side_by_side
from lmeval_screener.checkpoints.snapshot import (
    FileEntry,
    RangedSnapshot,
    Snapshot,
    changed,
    single_file,
    version_digest,
)
from lmeval_screener.errors import ScreeningError, cannot
from lmeval_screener.formats import SUFFIXES, holds_weights
from lmeval_screener.targets.layouts import layout_of
from lmeval_screener.targets.names import Target
from lmeval_screener.targets.runs import Run, joined, run_checkpoints, step_key

T = TypeVar("T")

#: Folders that are listed at a time. A glob may match ten thousand: all at once are more than a server
#: answers before their connections count as dead.
LISTINGS = 32
#: Calls of fsspec at a time: file systems usually have one connection.
_CALLS = 8
#: Subfolders that are listed to tell which program left a folder without weights.
_BELOW = 4
#: File systems' names for a file's version; the first that exists is used.
_VERSIONS = ("ETag", "etag", "version_id", "generation", "md5", "mtime", "modified", "LastModified")


@dataclass(frozen=True)
class FolderListing:
    """The content of a folder: the names of its subfolders, and its files by name."""

    folders: tuple[str, ...] = ()
    files: Mapping[str, FileEntry] = field(default_factory=dict)


class Bucket:
    """One bucket, container or file server; subclasses define how folders and files are read.

    Methods raise RetryError for a failure that may be temporary, and ScreeningError for a lasting
    one.

    Args:
        address: Address of the bucket or server, such as ``s3://BUCKET``.
    """

    def __init__(self, address: str) -> None:
        self.address = address

    async def listed(self, path: str, account: Account) -> FolderListing:
        """List the subfolders and files of a folder, in one attempt.

        The listing is empty if the folder does not exist.
        """
        raise NotImplementedError

    async def read(
        self,
        path: str,
        entry: FileEntry,
        begin: int,
        end: int,
        received: bytearray,
        account: Account,
    ) -> None:
        """Append the bytes ``[begin, end)`` of a file to ``received``, in one attempt.

        Raises:
            ScreeningError: The file is no longer the version in ``entry``, or cannot be read.
            RetryError: The attempt failed, perhaps temporarily.
        """
        raise NotImplementedError

    async def is_same(self, path: str, entry: FileEntry, account: Account) -> bool:
        """Whether a file still has the version in ``entry``.

        If `read` checks the version itself, True is returned without a request.
        """
        return True


class BucketSource:
    """Checkpoints in buckets and on file servers; a `Source`.

    Args:
        make: Makes the `Bucket` for the address of a bucket or server.
    """

    def __init__(self, make: Callable[[str], Bucket]) -> None:
        self._make = make
        self._stores: dict[str, Bucket] = {}
        self._listings: dict[tuple[str, str], FolderListing] = {}
        self._slots = asyncio.Semaphore(LISTINGS)

    async def expand(self, target: Target, account: Account) -> list[Target]:
        """Return one target for each checkpoint at an address; see `Source.expand`.

        ``*``, ``?`` and ``[…]`` match inside one part of the path. For the folder of a training
        run, its checkpoints are returned. Each folder is listed within the time budget of one
        checkpoint.

        Raises:
            ScreeningError: Nothing matches, or a folder cannot be listed.
        """
        store, path = self._store_and_path(target.address)
        with account.paused():
            places = await self._matching(store, path, account) if glob.has_magic(path) else [path]
            if not places:
                raise ScreeningError(
                    "FolderNotFound",
                    f"no folder or weights file matches {target.repo}; check the address (a * does "
                    "not match a slash)",
                )
            runs = await side_by_side(self._run_at(store, place, account) for place in places)
        targets: dict[str, Target] = {}
        for run in runs:
            for place in run.checkpoints:
                tokenizer = target.tokenizer
                if tokenizer is None and place in run.tokenizers:
                    tokenizer = joined(store.address, run.tokenizers[place])
                at = target.at(joined(store.address, place))
                targets.setdefault(place, replace(at, tokenizer=tokenizer))
        return list(targets.values())

    async def snapshot(self, target: Target, account: Account) -> Snapshot:
        """Open the checkpoint at an address; see `Source.snapshot`."""
        store, path = self._store_and_path(target.address)
        address = joined(store.address, path)
        folder = path
        name = ""
        if path.endswith(SUFFIXES):
            folder, _, name = path.rpartition("/")
        listing = await self._listed(store, folder, account)
        if name and name not in listing.files:
            raise ScreeningError(
                "FolderNotFound",
                f"{address} does not exist; check the address (its folder contains "
                f"{_first_names(listing)})",
            )
        around: list[str] = []
        if not name and not holds_weights(listing.files):
            around = await self._names_around(store, folder, listing, account)
        if not listing.files:
            known = layout_of(around, address, is_local=False)
            if known is not None:
                raise cannot(*known)
            if not listing.folders:
                raise ScreeningError(
                    "FolderNotFound",
                    f"{address} is empty or does not exist; check the address",
                )
            raise ScreeningError(
                "FolderNotFound",
                f"{address} has no files of its own, only the folders {_first_names(listing)}; give "
                "a folder with config.json and the weights, or the folder of a training run",
            )
        if not name:
            self._listings.pop((store.address, folder), None)  # ten thousand would need much memory
        files = single_file(listing.files, name) if name else listing.files
        snapshot = BucketSnapshot(store, target.repo, folder, files, account)
        if not name:
            snapshot.around = [*(f"{inner}/" for inner in listing.folders), *around]
        return snapshot

    async def _names_around(
        self, store: Bucket, folder: str, listing: FolderListing, account: Account
    ) -> list[str]:
        """Files next to a folder without weights, and in its first subfolders."""
        inner = sorted(listing.folders)[:_BELOW]
        places = [folder.rpartition("/")[0], *(joined(folder, name) for name in inner)]
        names: list[str] = []
        with contextlib.suppress(ScreeningError):  # what may not be listed tells nothing
            listings = await self._each_listed(store, places, account)
            for place, inside in zip(["..", *inner], listings, strict=True):
                names += [f"{place}/{name}" for name in inside.files]
        return names

    def _store_and_path(self, address: str) -> tuple[Bucket, str]:
        """The store of an address (one object per bucket or server) and the path in it."""
        scheme, _, rest = address.partition("://")
        bucket, _, path = rest.partition("/")
        name = f"{scheme}://{bucket}"
        if name not in self._stores:
            self._stores[name] = self._make(name)
        return self._stores[name], path.strip("/")

    async def _listed(self, store: Bucket, path: str, account: Account) -> FolderListing:
        """The listing of a folder, requested once."""
        key = store.address, path
        if key not in self._listings:
            self._listings[key] = await account.retried(lambda: store.listed(path, account))
        return self._listings[key]

    async def _each_listed(
        self, store: Bucket, paths: Iterable[str], account: Account
    ) -> list[FolderListing]:
        """Listings of some folders, each within its own time: together they may take longer."""

        async def listed(path: str) -> FolderListing:
            fresh = account.part(account.seconds)
            async with self._slots:
                return await fresh.bounded(self._listed(store, path, fresh))

        return await side_by_side(listed(path) for path in paths)

    async def _matching(self, store: Bucket, pattern: str, account: Account) -> list[str]:
        """The folders and weights files that match a glob, by step."""
        places = [""]
        *parts, last = pattern.split("/")
        for part in parts:
            if glob.has_magic(part):
                listings = await self._each_listed(store, places, account)
                places = _matches(places, listings, part)
            else:
                places = [joined(place, part) for place in places]
        if not glob.has_magic(last):
            places = [joined(place, last) for place in places]
        listings = await self._each_listed(store, places, account)
        if glob.has_magic(last):
            places = _matches(places, listings, last, with_files=True)
        else:
            listed = zip(places, listings, strict=True)
            places = [place for place, listing in listed if listing.files or listing.folders]
        return sorted(places, key=step_key)

    async def _run_at(self, store: Bucket, path: str, account: Account) -> Run:
        """The checkpoints of a training run's folder, or the path itself if it holds no run."""
        if path.endswith(SUFFIXES):
            return Run([path])
        search = run_checkpoints(path, path.rpartition("/")[0])
        try:
            wanted = next(search)
            while True:
                listings = await self._each_listed(store, wanted, account)
                wanted = search.send([(listing.folders, listing.files) for listing in listings])
        except StopIteration as end:
            run: Run = end.value
            return run if run.checkpoints else replace(run, checkpoints=[path])


class BucketSnapshot(RangedSnapshot):
    """A checkpoint in a bucket or on a file server.

    Attributes:
        around: Names of subfolders and, if the checkpoint has no weights, of files in them and
            next to it.
    """

    def __init__(
        self, store: Bucket, repo: str, path: str, files: Mapping[str, FileEntry], account: Account
    ) -> None:
        super().__init__(repo, files, account)
        self._store = store
        self._path = path
        self.around: Sequence[str] = ()

    def names_around(self) -> list[str]:
        """Return the names of the checkpoint's files, and the names in ``around``.

        See `Snapshot.names_around`.
        """
        return [*super().names_around(), *self.around]

    async def ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return byte ranges of a file; see `Snapshot.ranges`.

        Raises:
            ScreeningError: A range cannot be read, or the file changed meanwhile.
        """
        bodies = await super().ranges(path, ranges)
        account = self.account
        place = joined(self._path, path)
        entry = self.files[path]
        if not await account.retried(lambda: self._store.is_same(place, entry, account)):
            raise changed(f"{path} of {self.repo}")
        return bodies

    async def _read(self, path: str, begin: int, end: int, received: bytearray) -> None:
        entry = self.entry(path)
        await self._store.read(joined(self._path, path), entry, begin, end, received, self.account)


class FileSystem(Bucket):
    """A `Bucket` for any file system that fsspec supports, such as SFTP or HDFS."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._lock = asyncio.Lock()
        self._calls = asyncio.Semaphore(_CALLS)
        self._system: Any = None

    async def listed(self, path: str, account: Account) -> FolderListing:
        """List the subfolders and files of a folder; see `Bucket.listed`."""

        def look(system: Any, place: str) -> list[dict[str, Any]]:
            system.invalidate_cache()
            entries: list[dict[str, Any]] = system.ls(place, detail=True)
            # Some list the folder itself, and most list a file when asked for it as a folder.
            itself = place.strip("/")
            return [entry for entry in entries if str(entry["name"]).strip("/") != itself]

        try:
            entries = await self._call(look, path, account)
        except FileNotFoundError:
            return FolderListing()
        address = without_secrets(self.address)
        folders = []
        files = {}
        for entry in entries:
            name = str(entry["name"]).rstrip("/").rpartition("/")[2]
            size = entry.get("size")
            if entry.get("type") == "directory":
                folders.append(name)
            elif type(size) is int:
                versions = [entry[key] for key in _VERSIONS if entry.get(key) is not None]
                digest = None
                if versions:
                    digest = version_digest(address, path, name, size, versions[0])
                files[name] = FileEntry(name, size, digest)
        return FolderListing(tuple(folders), files)

    async def read(
        self,
        path: str,
        entry: FileEntry,
        begin: int,
        end: int,
        received: bytearray,
        account: Account,
    ) -> None:
        """Append bytes of a file to ``received``; see `Bucket.read`."""
        try:
            body = await self._call(
                lambda system, place: bytes(system.cat_file(place, start=begin, end=end)),
                path,
                account,
            )
        except FileNotFoundError as error:
            raise changed(joined(self.address, path)) from error
        account.add(bytes_read=len(body))
        received += body

    async def is_same(self, path: str, entry: FileEntry, account: Account) -> bool:
        """Whether a file still has the version in ``entry``; see `Bucket.is_same`."""
        folder, _, name = path.rpartition("/")
        return (await self.listed(folder, account)).files.get(name) == entry

    async def _call(self, work: Callable[[Any, str], T], path: str, account: Account) -> T:
        async with self._lock:
            if self._system is None:
                self._system = await in_thread(self._new_system)
        place = f"{self.address}/{path}"
        inside = self._system._strip_protocol(place)
        account.add(requests=1)
        try:
            async with self._calls:
                return await in_thread(lambda: work(self._system, inside))
        except FileNotFoundError:
            raise
        except PermissionError as error:
            raise ScreeningError(
                "AccessDenied",
                f"access to {place} is denied ({error}); set the credentials that fsspec reads for "
                "such addresses",
            ) from error
        except Exception as error:
            raise _unreachable(f"{place} cannot be read", error) from error

    def _new_system(self) -> Any:
        scheme = self.address.partition("://")[0]
        try:
            import fsspec
        except ImportError as error:
            raise ScreeningError(
                "MissingExtra",
                f"addresses with {scheme}:// need the package fsspec; run: pip install "
                "'lmeval-dispersion[cloud]'",
            ) from error
        try:
            return fsspec.core.url_to_fs(self.address)[0]
        except ImportError as error:
            raise ScreeningError(
                "MissingExtra",
                f"addresses with {scheme}:// need a package that is not installed ({error}); run "
                "pip install with the name of the package",
            ) from error
        except ValueError as error:
            raise ScreeningError(
                "BadName",
                f"addresses with {scheme}:// are not supported ({error}); download the checkpoint "
                "and give its folder",
            ) from error
        except Exception as error:
            raise _unreachable(f"{self.address} cannot be opened", error) from error


def _unreachable(what: str, error: Exception) -> RetryError:
    reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return RetryError(
        ScreeningError("Unreachable", f"{what} ({reason}); check the address and the network")
    )


def _matches(
    places: Sequence[str],
    listings: Sequence[FolderListing],
    pattern: str,
    *,
    with_files: bool = False,
) -> list[str]:
    """The folders in some folders that match a glob, and their weights files if these count too."""
    matches = []
    for place, listing in zip(places, listings, strict=True):
        names = list(listing.folders)
        if with_files:
            names += [name for name in listing.files if name.endswith(SUFFIXES)]
        matches += [joined(place, name) for name in names if fnmatch.fnmatchcase(name, pattern)]
    return matches


def _first_names(listing: FolderListing) -> str:
    return some([*(f"{name}/" for name in listing.folders), *listing.files], 4) or "nothing"
