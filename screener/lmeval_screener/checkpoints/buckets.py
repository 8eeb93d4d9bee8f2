"""Buckets of the Hub, ``hf://buckets/NAMESPACE/NAME``: listed by their tree, read like repositories.

A bucket has no revisions. The listing has the Xet hash of every file's content; resolving a file must return
the same hash, so a file that is replaced in between is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import quote

from lmeval_screener.checkpoints.http import Account, url_of
from lmeval_screener.checkpoints.hub import ResolvedSnapshot, items
from lmeval_screener.checkpoints.snapshot import FileEntry, Snapshot
from lmeval_screener.checkpoints.stores import Bucket, FolderListing
from lmeval_screener.errors import ScreeningError
from lmeval_screener.targets.runs import joined

if TYPE_CHECKING:
    from yarl import URL


class HubBucket(Bucket):
    """One bucket."""

    async def listed(self, path: str, account: Account) -> FolderListing:
        """Files and folders in a folder, page by page; see `Bucket.listed`."""
        account.online(self.address)
        below = f"/{quote(path, safe='')}" if path else ""
        name = self.address.removeprefix("hf://buckets/")
        url = f"{self.hub.endpoint}/api/buckets/{name}/tree{below}?recursive=false"
        try:
            tree = await self.hub.pages(url, self.address, account, items)
        except ScreeningError as error:
            if error.code == "FileNotFound":
                return FolderListing()
            raise
        folders: list[str] = []
        files: dict[str, FileEntry] = {}
        for item in tree:
            name = str(item.get("path", "")).removeprefix(f"{path}/" if path else "").strip("/")
            if "/" in name or not name:
                continue
            if item.get("type") == "directory":
                folders.append(name)
            elif type(item.get("size")) is int:
                content = item.get("xetHash")
                digest = f"xet:{content}" if isinstance(content, str) and content else None
                files[name] = FileEntry(name, item["size"], digest)
        return FolderListing(tuple(folders), files)

    def opened(self, repo: str, path: str, files: Mapping[str, FileEntry], account: Account) -> Snapshot:
        """A checkpoint of listed files; see `Bucket.opened`."""
        bucket = f"{self.hub.endpoint}/{self.address.removeprefix('hf://')}/resolve/"

        def url(file: str) -> URL:
            return url_of(bucket + quote(joined(path, file), safe=""))

        return ResolvedSnapshot(self.hub, repo, files, account, url)
