"""Checkpoints on any web server: a file by its address, or a folder whose usual names are tried.

Read over the same connections as the Hub, by the same rules for what is believed, without its token. A web
server lists nothing, so the files of a folder are those of transformers' layout that answer; the shards come
from the index. A file's version is its ETag (``If-Match``), else its date and size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from yarl import URL

from lmeval_screener.checkpoints import FileEntry, Meter, Snapshot, single_file
from lmeval_screener.checkpoints.http import Transport, contradiction, drained, retried, side_by_side
from lmeval_screener.checkpoints.hub import Hub
from lmeval_screener.checkpoints.limits import Budget
from lmeval_screener.checkpoints.snapshots import FilePlace, RemoteSnapshot
from lmeval_screener.checkpoints.stores import changed, version_digest
from lmeval_screener.errors import ScreeningError
from lmeval_screener.targets import WEIGHTS, Target

if TYPE_CHECKING:
    import aiohttp

_SMALL = ("config.json", "tokenizer.json", "vocab.json")
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class WebServers:
    """Files and folders by their addresses; a `Source`."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def expand(self, target: Target, budget: Budget) -> list[Target]:
        """The address itself; see `Source.expand`. A web server lists no folders, so there are no globs."""
        if "*" in URL(target.repo).path:
            raise ScreeningError(
                "BadName",
                f"a web server lists no folders, so {target.shown} cannot be searched; name each checkpoint",
            )
        return [target]

    async def snapshot(self, target: Target, budget: Budget) -> Snapshot:
        """A file with what lies beside it, or a folder; see `Source.snapshot`."""
        transport = self._hub.transport
        if transport is None:
            raise ScreeningError(
                "Offline", f"offline mode is on and {target.shown} is on the network; unset HF_HUB_OFFLINE"
            )
        url = URL(target.repo, encoded="%" in target.repo)
        name = url.name if url.name.endswith(WEIGHTS) else ""
        base = url.parent if name else url
        meter = Meter(above=self._hub.meter)
        # A signature is of one file: nothing can be asked beside it.
        names = [name, *(() if url.query_string else _SMALL)] if name else [*_SMALL, *_INDICES, *_WEIGHTS]
        if name and not url.query_string and (split := _SPLIT.search(name)):
            stem = name.removesuffix(split[0])
            names += [f"{stem}-{n:05d}-of-{split[2]}.gguf" for n in range(1, min(int(split[2]), 1000) + 1)]
        addresses = {n: url if n == name else _below(base, n) for n in dict.fromkeys(names)}
        cache = self._hub.cache
        opened = partial(WebSnapshot, transport, target.shown, budget=budget, meter=meter, cache=cache)
        files, etags = await _probed(transport, addresses, budget, meter, must=name)
        index = None if name else next((n for n in _INDICES if n in files), None)
        if index and not any(n in files for n in _WEIGHTS):
            indexed = await opened(addresses, files, etags).small_file(index)
            shards = {n: _below(base, n) for n in _shards(indexed)}
            more, tags = await _probed(transport, shards, budget, meter)
            addresses, files, etags = {**addresses, **shards}, {**files, **more}, {**etags, **tags}
        if not any(n.endswith(WEIGHTS) for n in files):
            raise ScreeningError(
                "FolderNotFound",
                f"{target.shown} has none of {', '.join((*_WEIGHTS, *_INDICES))}; name the folder that "
                "has, or a file of weights",
            )
        return opened(addresses, files, etags)


class WebSnapshot(RemoteSnapshot):
    """Files at addresses; see `Snapshot`. Read as files of the Hub are, from where they are said to be."""

    def __init__(
        self,
        transport: Transport,
        repo: str,
        addresses: Mapping[str, URL],
        files: Mapping[str, FileEntry],
        etags: Mapping[str, str | None],
        **reading: Any,
    ) -> None:
        super().__init__(transport, repo, files, **reading)
        self._addresses = addresses
        self._places = {name: FilePlace(etag=etags.get(name)) for name in files}

    def _url(self, path: str) -> URL:
        return self._addresses[path]

    def _conditions(self, place: FilePlace) -> Mapping[str, str]:
        return {"If-Match": place.etag} if place.etag and not place.etag.startswith("W/") else {}

    def _refused(self, response: aiohttp.ClientResponse) -> ScreeningError:
        return _refusal(response, self.repo)


async def _probed(
    transport: Transport, addresses: Mapping[str, URL], budget: Budget, meter: Meter, *, must: str = ""
) -> tuple[dict[str, FileEntry], dict[str, str | None]]:
    """Those of the files that are there, and their ETags; one request for the first byte of each.

    Not HEAD: a signature is of one method, and it is that of reading.
    """

    async def probed(name: str, url: URL) -> tuple[FileEntry, str | None] | None:
        return await retried(lambda: _probe(transport, name, url, meter, must=name == must), budget)

    probes = await side_by_side(probed(name, url) for name, url in addresses.items())
    there = [probe for probe in probes if probe is not None]
    files = {entry.path: entry for entry, _ in there}
    return (single_file(files, must) if must else files), {entry.path: etag for entry, etag in there}


async def _probe(
    transport: Transport, name: str, start: URL, meter: Meter, *, must: bool
) -> tuple[FileEntry, str | None] | None:
    async with await transport.followed("GET", start, {"Range": "bytes=0-0"}, meter) as response:
        total = response.headers.get("Content-Range", "").rpartition("/")[2]
        if response.status == 200:
            total = response.headers.get("Content-Length", "")
            response.close()  # the whole file would follow
        else:
            await drained(response, meter)
        if response.status not in (200, 206):
            if must:
                raise _refusal(response, str(start))
            return None
        is_page = response.headers.get("Content-Type", "").startswith("text/html")
        if not total.isdigit() or is_page:
            if not must:
                return None
            host, what = response.url.host, "with a web page" if is_page else "without a size"
            raise contradiction(f"{host} answered {what} for {name}; give the address of the file itself")
        etag, date = response.headers.get("ETag"), response.headers.get("Last-Modified")
        version = version_digest(start.with_query(None), total, etag, date) if etag or date else None
        return FileEntry(name, int(total), version), etag


def _refusal(response: aiohttp.ClientResponse, what: str) -> ScreeningError:
    status, host = response.status, response.url.host
    what = str(URL(what).with_query(None))  # a signature is a secret
    if status in (401, 403, 407, 451):
        return ScreeningError(
            "AccessDenied",
            f"{host} refuses access to {what} ({status}); where the address is signed, it may have expired: "
            "ask for a new one",
        )
    if status in (404, 410):
        return ScreeningError("FileNotFound", f"there is no {what} ({status}); check the address")
    if status == 412:
        return changed(what)
    return ScreeningError(
        "BadResponse", f"{host} answered {status} for {what}; check the address and any proxy on the way"
    )


def _below(base: URL, name: str) -> URL:
    path = base.raw_path.rstrip("/")
    return URL(f"{base.origin()}{path}/{quote(name)}", encoded=True).with_query(base.query or None)


def _shards(index: bytes) -> list[str]:
    """The shards that an index names; none where it is broken, which is told when it is used."""
    try:
        names = set(json.loads(index)["weight_map"].values())
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return []
    return sorted(n for n in names if isinstance(n, str) and re.fullmatch(r"[\w.-]+", n))[:2000]
