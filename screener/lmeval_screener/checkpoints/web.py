"""Checkpoints on any web server: a file by its address, or a folder, by trying the usual file names.

Files are read over the Hub's connections, with the same checks, without its token. Web servers list no
folders: a folder's files are those of transformers' layout that answer, and the shards of its index. A file's
version is its ETag (``If-Match``), else its date and size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from yarl import URL

from lmeval_screener.checkpoints.account import Account
from lmeval_screener.checkpoints.concurrency import side_by_side
from lmeval_screener.checkpoints.http import Transport, contradiction, drained, retried
from lmeval_screener.checkpoints.hub import Hub
from lmeval_screener.checkpoints.ranged import RemoteSnapshot
from lmeval_screener.checkpoints.snapshot import PART, FileEntry, Snapshot
from lmeval_screener.checkpoints.stores import changed, version_digest
from lmeval_screener.errors import ScreeningError
from lmeval_screener.formats import SUFFIXES, TRANSFORMERS
from lmeval_screener.targets.names import Target
from lmeval_screener.tokens.vocabulary import TOKENIZER_FILES

if TYPE_CHECKING:
    import aiohttp

_SMALL = ("config.json", *TOKENIZER_FILES)


class WebFile(NamedTuple):
    """A file that exists: its address, size and version, and its ETag as the server writes it."""

    url: URL
    entry: FileEntry
    etag: str | None


class WebServers:
    """Files and folders by their addresses; a `Source`."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def expand(self, target: Target, account: Account) -> list[Target]:
        """The address itself; see `Source.expand`. A web server lists no folders, so there are no globs."""
        if "*" in URL(target.repo).path:
            raise ScreeningError(
                "BadName",
                f"a web server lists no folders, so {target.shown} cannot be searched; name each checkpoint",
            )
        return [target]

    async def snapshot(self, target: Target, account: Account) -> Snapshot:
        """A file with the files next to it, or a folder; see `Source.snapshot`."""
        transport = self._hub.online(target.shown)
        url = URL(target.repo, encoded="%" in target.repo and target.repo.isascii())
        file = url.name if url.name.endswith((*SUFFIXES, ".json")) else ""
        base = url.parent if file else url

        async def probed(name: str) -> WebFile | None:
            is_named = name == file
            address = url if is_named else _below(base, name)
            return await retried(
                lambda: _probe(transport, name, address, account, required=is_named), account
            )

        async def existing(names: Iterable[str]) -> dict[str, WebFile]:
            files = await side_by_side(probed(name) for name in dict.fromkeys(names))
            return {file.entry.path: file for file in files if file is not None}

        if file:
            names = [file]
            if not url.query_string:  # a signature covers one file, no file next to it
                names += _SMALL
                if part := PART.search(file):
                    stem, parts = file.removesuffix(part[0]), min(int(part[2]), 1000)
                    names += [f"{stem}-{number:05d}-of-{part[2]}.gguf" for number in range(1, parts + 1)]
            return web_snapshot(target.shown, await existing(names), account, self._hub.online)
        usual = [*(kind.single for kind in TRANSFORMERS), *(k.index for k in TRANSFORMERS if k.index)]
        files = await existing([*_SMALL, *usual])
        for kind in TRANSFORMERS:
            if kind.single in files:
                return web_snapshot(target.shown, files, account, self._hub.online)
            if kind.index in files:
                index = await web_snapshot(target.shown, files, account, self._hub.online).small_file(
                    kind.index
                )
                files |= await existing(_shards(index))
                return web_snapshot(target.shown, files, account, self._hub.online)
        raise ScreeningError(
            "FolderNotFound",
            f"{target.shown} has none of {', '.join(usual)}; name the folder that has one, or a weights file",
        )


def web_snapshot(
    repo: str, files: Mapping[str, WebFile], account: Account, online: Callable[[str], Transport]
) -> RemoteSnapshot:
    """A checkpoint of files, each of which is read at the address where it was probed."""
    entries = {path: file.entry for path, file in files.items()}
    etags = {path: file.etag for path, file in files.items()}
    refused = partial(_refusal, what=repo)
    return RemoteSnapshot(repo, entries, account, online, lambda path: files[path].url, refused, etags)


async def _probe(
    transport: Transport, name: str, address: URL, account: Account, *, required: bool
) -> WebFile | None:
    """A file if it exists, by a GET of its first byte: a signature covers one method, GET."""
    async with await transport.followed("GET", address, {"Range": "bytes=0-0"}, account) as response:
        total = response.headers.get("Content-Range", "").rpartition("/")[2]
        if response.status == 200:
            total = response.headers.get("Content-Length", "")
            response.close()  # the whole file would follow
        else:
            await drained(response, account)
        is_page = response.headers.get("Content-Type", "").startswith("text/html")
        exists = response.status in (200, 206) and total.isdigit() and not is_page
        if not exists and not required:
            return None
        if response.status not in (200, 206):
            raise _refusal(response, str(address))
        if not exists:
            host, what = response.url.host, "with a web page" if is_page else "without a size"
            raise contradiction(f"{host} answered {what} for {name}; give the address of the file itself")
        etag, date = response.headers.get("ETag"), response.headers.get("Last-Modified")
        version = version_digest(address.with_query(None), total, etag, date) if etag or date else None
        return WebFile(address, FileEntry(name, int(total), version), etag)


def _refusal(response: aiohttp.ClientResponse, what: str) -> ScreeningError:
    status, host = response.status, response.url.host
    what = str(URL(what).with_query(None).with_user(None))  # signatures and passwords are secrets
    if status in (401, 403, 407, 451):
        return ScreeningError(
            "AccessDenied",
            f"{host} refuses access to {what} ({status}); a signed address may have expired: "
            "ask for a new one",
        )
    if status in (404, 410):
        return ScreeningError("FileNotFound", f"{what} does not exist ({status}); check the address")
    if status == 412:
        return changed(what)
    return ScreeningError(
        "BadResponse", f"{host} answered {status} for {what}; check the address and any proxy on the way"
    )


def _below(base: URL, name: str) -> URL:
    path = f"{base.raw_path.rstrip('/')}/{quote(name)}"
    return base.with_path(path, encoded=True).with_query(base.query or None)


def _shards(index: bytes) -> list[str]:
    """The shards that an index names; none if it is broken, which is refused when it is used."""
    try:
        names = set(json.loads(index)["weight_map"].values())
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return []
    return sorted(n for n in names if isinstance(n, str) and re.fullmatch(r"[\w.-]+", n))[:2000]
