"""Buckets of the Hub, ``hf://buckets/NAMESPACE/NAME``: listed by their tree, read like repositories.

A bucket has no revisions. The listing names the content of every file (its Xet hash); where a file is
resolved, the same hash has to be named again, so a file that is replaced in between is an error.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
from yarl import URL

from lmeval_screener.checkpoints.http import AgainError, Answer, Budget
from lmeval_screener.checkpoints.hub import Hub
from lmeval_screener.checkpoints.hub_responses import Listing as Repository
from lmeval_screener.checkpoints.remote import HubSnapshot
from lmeval_screener.checkpoints.snapshot import FileEntry, Meter, Snapshot
from lmeval_screener.checkpoints.storages.store import Listing, Store
from lmeval_screener.errors import ScreeningError

_PREFIX = "hf://buckets/"
_LISTING_LIMIT = 64 * 2**20


class Bucket:
    """One bucket; a `Store`.

    Args:
        name: ``NAMESPACE/NAME``.
        hub: For its connections, token and cache.
    """

    def __init__(self, name: str, hub: Hub) -> None:
        self.address = f"{_PREFIX}{name}"
        self._name, self._hub = name, hub

    async def listed(self, path: str, meter: Meter) -> Listing:
        """What lies in a folder, page by page; see `Store.listed`."""
        transport = self._hub.transport
        if transport is None:
            raise ScreeningError(
                "Offline", f"offline mode is on and {self.address} is on the network; unset HF_HUB_OFFLINE"
            )
        below = f"/{quote(path, safe='')}" if path else ""
        url = URL(f"{self._hub.endpoint}/api/buckets/{self._name}/tree{below}?recursive=false", encoded=True)
        folders: list[str] = []
        files: dict[str, FileEntry] = {}
        while True:
            try:
                body, response = await transport.body(url, meter, _LISTING_LIMIT, self._refused)
            except ScreeningError as error:
                if error.code == "FileNotFound":
                    return Listing()
                raise
            for item in _items(body, self.address):
                name = item["path"].removeprefix(f"{path}/" if path else "").strip("/")
                if "/" in name or not name:
                    continue
                if item.get("type") == "directory":
                    folders.append(name)
                elif type(item.get("size")) is int:
                    content = item.get("xetHash")
                    digest = f"xet:{content}" if isinstance(content, str) and content else None
                    files[name] = FileEntry(name, item["size"], digest)
            try:
                following = response.links.get("next")
            except ValueError:
                following = None
            if following is None:
                return Listing(tuple(folders), files)
            url = URL(following["url"])
            if not transport.is_hub(url):
                raise ScreeningError(
                    "BadResponse", f"the listing of {self.address} goes on at another host; check HF_ENDPOINT"
                )

    def opened(
        self, repo: str, path: str, files: Mapping[str, FileEntry], budget: Budget, meter: Meter
    ) -> Snapshot:
        """A checkpoint of listed files; see `Store.opened`."""
        return _BucketSnapshot(self._hub, self._name, repo, path, files, budget=budget, meter=meter)

    def _refused(self, response: Answer) -> ScreeningError:
        return refusal(response, self.address, self._hub)


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
        super().__init__(
            hub.transport,
            hub.endpoint,
            Repository(repo, "", files, None),
            None,
            budget=budget,
            meter=meter,
            cache=hub.cache,
            downloads=Path(),
            early={},
        )
        self.revision = None
        if not all(entry.digest for entry in files.values()):
            self.cache = None  # what has no version may be another file tomorrow
        self._hub, self._bucket, self._path = hub, name, path

    def _url(self, verb: str, path: str) -> URL:
        place = f"{self._path}/{path}" if self._path else path
        return URL(f"{self._endpoint}/buckets/{self._bucket}/resolve/{quote(place, safe='')}", encoded=True)

    async def _text(self, path: str, entry: FileEntry) -> bytes:
        return await self._range(path, 0, await self.size(path))

    def _downloaded(self, entry: FileEntry) -> Path | None:
        return None

    def _resolve_problem(
        self, response: aiohttp.ClientResponse, entry: FileEntry, *, final: bool
    ) -> str | None:
        content = response.headers.get("X-Xet-Hash")
        if content and entry.digest and entry.digest != f"xet:{content}":
            return "it changed while it was read"
        return super()._resolve_problem(response, entry, final=final)

    def _refused(self, response: Answer) -> ScreeningError:
        return refusal(response, self.repo, self._hub)


def refusal(response: Answer, what: str, hub: Hub) -> ScreeningError:
    """What a final status of the Hub means for a bucket."""
    token = hub.transport is not None and hub.transport.token is not None
    login = "check that the token may read it" if token else "log in (hf auth login, or set HF_TOKEN)"
    status, code = response.status, response.headers.get("X-Error-Code", "")
    if code == "EntryNotFound":
        return ScreeningError("FileNotFound", f"{response.url.path} is not in {what}; check the address")
    if status in (401, 404):
        return ScreeningError(
            "RepoNotFound", f"{what} is not on {hub.endpoint}, or it is private; check the name, or {login}"
        )
    if status in (403, 451):
        return ScreeningError("AccessDenied", f"{hub.endpoint} refuses access to {what} ({status}); {login}")
    return ScreeningError("ServerError", f"{hub.endpoint} answered {status} for {what}; try again later")


def _items(body: bytes, what: str) -> list[dict[str, Any]]:
    items: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        items = json.loads(body)
    good = isinstance(items, list) and all(
        isinstance(item, dict) and isinstance(item.get("path"), str) for item in items
    )
    if not good:
        raise AgainError(
            ScreeningError(
                "BadResponse", f"the listing of {what} is not the Hub's JSON; check HF_ENDPOINT and any proxy"
            ),
            last=True,
        )
    found: list[dict[str, Any]] = items
    return found


def finder(hub: Hub) -> Callable[[str], tuple[Store, str]]:
    """What finds the bucket and the path in it that an address names."""

    def find(address: str) -> tuple[Store, str]:
        namespace, name, *below = address.removeprefix(_PREFIX).split("/")
        return Bucket(f"{namespace}/{name}", hub), "/".join(below).strip("/")

    return find
