"""Buckets of the Hub, ``hf://buckets/NAMESPACE/NAME``: listed by their tree, read like repositories.

A bucket has no revisions. The listing names the content of every file (its Xet hash); where a file is
resolved, the same hash has to be named again, so a file that is replaced in between is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from yarl import URL

from lmeval_screener.checkpoints import FileEntry, Meter, Snapshot
from lmeval_screener.checkpoints.hub import Hub, HubSnapshot
from lmeval_screener.checkpoints.hub_responses import RepoFiles, parse_folder
from lmeval_screener.checkpoints.limits import Budget
from lmeval_screener.checkpoints.snapshots import RemoteSnapshot
from lmeval_screener.checkpoints.stores import FolderListing, Store
from lmeval_screener.errors import ScreeningError

if TYPE_CHECKING:
    import aiohttp

_PREFIX = "hf://buckets/"


class HubBucket:
    """One bucket; a `Store`."""

    def __init__(self, name: str, hub: Hub) -> None:
        self.address = f"{_PREFIX}{name}"
        self._name, self._hub = name, hub

    async def listed(self, path: str, meter: Meter) -> FolderListing:
        """Files and folders in a folder, page by page; see `Store.listed`."""
        if self._hub.transport is None:
            raise ScreeningError(
                "Offline", f"offline mode is on and {self.address} is on the network; unset HF_HUB_OFFLINE"
            )
        below = f"/{quote(path, safe='')}" if path else ""
        url = URL(f"{self._hub.endpoint}/api/buckets/{self._name}/tree{below}?recursive=false", encoded=True)
        try:
            pages = await self._hub.pages(url, self.address, "main", Budget(math.inf), meter, parse_folder)
        except ScreeningError as error:
            if error.code == "FileNotFound":
                return FolderListing()
            raise
        folders: list[str] = []
        files: dict[str, FileEntry] = {}
        for item in (item for page in pages for item in page):
            name = item["path"].removeprefix(f"{path}/" if path else "").strip("/")
            if "/" in name or not name:
                continue
            if item.get("type") == "directory":
                folders.append(name)
            elif type(item.get("size")) is int:
                content = item.get("xetHash")
                digest = f"xet:{content}" if isinstance(content, str) and content else None
                files[name] = FileEntry(name, item["size"], digest)
        return FolderListing(tuple(folders), files)

    def opened(
        self, repo: str, path: str, files: Mapping[str, FileEntry], budget: Budget, meter: Meter
    ) -> Snapshot:
        """A checkpoint of listed files; see `Store.opened`."""
        return _BucketSnapshot(self._hub, self._name, repo, path, files, budget=budget, meter=meter)


class _BucketSnapshot(HubSnapshot):
    """A checkpoint in a bucket; see `Snapshot`."""

    def __init__(
        self,
        hub: Hub,
        name: str,
        repo: str,
        path: str,
        files: Mapping[str, FileEntry],
        *,
        budget: Budget,
        meter: Meter,
    ) -> None:
        super().__init__(hub, RepoFiles(repo, "", files, None), None, budget=budget, meter=meter)
        self.revision = None
        if not all(entry.digest for entry in files.values()):
            self.cache = None  # what has no version may be another file tomorrow
        self._folder = f"{hub.endpoint}/buckets/{name}/resolve/"
        self._path = f"{path}/" if path else ""

    def _url(self, path: str, verb: str = "resolve") -> URL:
        return URL(self._folder + quote(self._path + path, safe=""), encoded=True)

    async def _text(self, path: str, entry: FileEntry) -> bytes:
        return await RemoteSnapshot._text(self, path, entry)

    def _on_disk(self, entry: FileEntry) -> Path | None:
        return None

    def _refused(self, response: aiohttp.ClientResponse) -> ScreeningError:
        return self._hub.refusal(response, self.repo, "main")


def finder(hub: Hub) -> Callable[[str], tuple[Store, str]]:
    """A function that finds the bucket and the path in it that an address names."""

    def find(address: str) -> tuple[Store, str]:
        namespace, name, *below = address.removeprefix(_PREFIX).split("/")
        return HubBucket(f"{namespace}/{name}", hub), "/".join(below).strip("/")

    return find
