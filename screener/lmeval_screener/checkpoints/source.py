"""Where checkpoints are opened: folders, repositories, and a `Source` for each kind of address.

A source lists, expands an address with a glob or a training run, and opens a checkpoint as a `Snapshot`,
which tells sizes, reads ranges and names the version under which bytes may be kept. Nothing above knows where
a checkpoint lies. A source's libraries are imported when an address of its scheme is met.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from lmeval_screener.checkpoints import SERVICES, Cache, FileEntry, Meter, Snapshot
from lmeval_screener.checkpoints.hub import Hub
from lmeval_screener.checkpoints.limits import Budget
from lmeval_screener.checkpoints.snapshots import open_file, open_folder
from lmeval_screener.errors import ScreeningError
from lmeval_screener.targets import Target, parse_target

#: The files that a tokenizer is read from, best first.
_TOKENIZERS = ("tokenizer.json", "vocab.json")


class Source(Protocol):
    """One kind of address at which checkpoints lie."""

    async def expand(self, target: Target, budget: Budget) -> list[Target]:
        """The checkpoints that a target stands for, in the order of their steps; itself where it is one."""
        ...

    async def snapshot(self, target: Target, budget: Budget) -> Snapshot:
        """The checkpoint that a target is."""
        ...


class Sources:
    """Folders, repositories and every kind of address, each opened once a run; a `Source` for all targets.

    Args:
        hub: For repositories and buckets, and for its connections, cache and meter.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._sources: dict[str, Source] = {}
        self._tokenizers: dict[str, tuple[Snapshot, dict[str, str]]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def expand(self, target: Target, budget: Budget) -> list[Target]:
        """The checkpoints that a target stands for; see `Source.expand`."""
        if target.scheme is not None and not target.refused:
            return await self._source(target.scheme).expand(target, budget)
        if target.refused or target.local or not target.is_glob or target.revision is None:
            return [target]  # a run's folders were found when the target was parsed
        names = await self._hub.revisions(target.repo, target.revision, budget)
        return [replace(target, revision=name) for name in names]

    async def snapshot(self, target: Target, budget: Budget) -> Snapshot:
        """The checkpoint that a target is, with the target's tokenizer if it stores none."""
        snapshot = await self._opened(target, budget)
        files = snapshot.files
        if (
            target.tokenizer is None
            or any(name in files for name in _TOKENIZERS)
            or all(path.endswith(".gguf") for path in files)
        ):
            return snapshot
        return WithTokenizer(snapshot, *await self._tokenizer(target.tokenizer))

    async def names(self, target: Target, budget: Budget) -> tuple[set[str], set[str]]:
        """The folders and files of a target's folder; empty where they cannot be listed."""
        if target.local:
            places = list(Path(target.repo).iterdir()) if Path(target.repo).is_dir() else []
            return {p.name for p in places if p.is_dir()}, {p.name for p in places if p.is_file()}
        from lmeval_screener.checkpoints.stores import StoreSource

        source = self._source(target.scheme) if target.scheme is not None else None
        if not isinstance(source, StoreSource):
            return set(), set()
        listing = await source.listing(target.repo, budget)
        return set(listing.folders), set(listing.files)

    async def _opened(self, target: Target, budget: Budget) -> Snapshot:
        if target.scheme is not None:
            return await self._source(target.scheme).snapshot(target, budget)
        if not target.local:
            return await self._hub.snapshot(target.repo, target.revision, budget, target.listed)
        is_file = Path(target.repo).expanduser().is_file()
        return open_file(target.repo) if is_file else open_folder(target.repo)

    def _source(self, scheme: str) -> Source:
        kind = SERVICES.get(scheme, scheme)
        if kind not in self._sources:
            self._sources[kind] = self._made(scheme)
        return self._sources[kind]

    def _made(self, scheme: str) -> Source:
        if scheme in ("http", "https"):
            from lmeval_screener.checkpoints.web import WebServers

            return WebServers(self._hub)
        if scheme == "models":
            from lmeval_screener.checkpoints.mlflow_models import RegisteredModels

            return RegisteredModels(self.snapshot, self.names)
        from lmeval_screener.checkpoints.stores import FileSystem, StoreSource

        if scheme == "hf":
            from lmeval_screener.checkpoints.buckets import HubBucket

            return StoreSource(HubBucket, self._hub)
        if scheme in SERVICES:
            from lmeval_screener.checkpoints.object_store import ObjectStore

            return StoreSource(ObjectStore, self._hub)
        return StoreSource(FileSystem, self._hub)

    async def _tokenizer(self, text: str) -> tuple[Snapshot, dict[str, str]]:
        """Where a tokenizer is, opened once for all, and its file by the name that it stands for."""
        async with self._locks.setdefault(text, asyncio.Lock()):
            if text not in self._tokenizers:
                folder, slash, name = text.rpartition("/") if text.endswith(".json") else (text, "", "")
                target = parse_target(folder or slash or ".") if name else parse_target(text)
                if target.refused is not None:
                    raise ScreeningError(target.refused[0], f"--tokenizer {text}: {target.refused[1]}")
                # No checkpoint's own budget: the next one reads it too, each within its own time.
                snapshot = await self._opened(target, Budget(math.inf))
                names = {_TOKENIZERS[0]: name} if name else {n: n for n in _TOKENIZERS if n in snapshot.files}
                if not names or not set(names.values()) <= set(snapshot.files):
                    raise ScreeningError(
                        "TokenizerNotFound",
                        f"--tokenizer {text} has no {name or ' or '.join(_TOKENIZERS)}; name a repository, a "
                        "folder or a file that has one",
                    )
                self._tokenizers[text] = snapshot, names
            return self._tokenizers[text]


class WithTokenizer:
    """A checkpoint with the tokenizer of another place; see `Snapshot`.

    Args:
        checkpoint: The checkpoint.
        other: Where the tokenizer is.
        names: The tokenizer's files there, by the names that they are to have here.

    Attributes:
        checkpoint: The checkpoint without that tokenizer.
    """

    def __init__(self, checkpoint: Snapshot, other: Snapshot, names: Mapping[str, str]) -> None:
        self.repo, self.revision = checkpoint.repo, checkpoint.revision
        added = {name: replace(other.files[there], path=name) for name, there in names.items()}
        self.files: Mapping[str, FileEntry] = {**checkpoint.files, **added}
        self.meter: Meter = checkpoint.meter
        self.parameters = checkpoint.parameters
        self.cache: Cache | None = checkpoint.cache
        self.checkpoint, self._other, self._names = checkpoint, other, dict(names)

    def _of(self, path: str) -> tuple[Snapshot, str]:
        return (self._other, self._names[path]) if path in self._names else (self.checkpoint, path)

    async def small_file(self, path: str) -> bytes:
        """Whole content of a file; see `Snapshot.small_file`."""
        snapshot, name = self._of(path)
        return await snapshot.small_file(name)

    async def ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Bytes of a file; see `Snapshot.ranges`."""
        snapshot, name = self._of(path)
        return await snapshot.ranges(name, ranges)

    async def size(self, path: str) -> int:
        """Size of a file; see `Snapshot.size`."""
        snapshot, name = self._of(path)
        return await snapshot.size(name)
