"""Checkpoints on the Hub (or any server that speaks its protocol), read by ranges over pooled connections.

Token, endpoint, offline mode and places come from huggingface_hub. Its listing functions are not used: they
are synchronous, keep one thread and one connection per call, and take two round trips (`model_info`, then
`list_repo_tree` for sizes) where one request to the same endpoint says all; and what they raise for a broken
connection is not bounded by our time budget. The pinned commit, the sizes and the digests come from that
one request, and config.json and the index travel beside it, checked by the digests that it brings.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TypeVar
from urllib.parse import quote

import aiohttp
from yarl import URL

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.version import __version__
from lmeval_screener.checkpoints.cache import Cache
from lmeval_screener.checkpoints.http import AgainError, Answer, Budget, Transport
from lmeval_screener.checkpoints.hub_responses import (
    Listing,
    parse_listing,
    parse_references,
    parse_tree,
    refusal,
)
from lmeval_screener.checkpoints.limits import Allowance, Bucket
from lmeval_screener.checkpoints.local import open_download
from lmeval_screener.checkpoints.remote import HubSnapshot
from lmeval_screener.checkpoints.snapshot import FileEntry, Meter, Snapshot
from lmeval_screener.errors import ScreeningError
from lmeval_screener.targets.target import matching, step_key

T = TypeVar("T")

_COMMIT = re.compile(r"[0-9a-f]{40}")
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_TOKEN = re.compile(r"[!-~]+")
#: Listings of repositories with thousands of files have some megabytes.
_LISTING_LIMIT = 64 * 2**20
#: Texts that nearly every checkpoint needs, asked for beside the listing when nothing is cached.
_EARLY = ("config.json", "model.safetensors.index.json")
#: What is asked of a checkpoint from a list, which names files without sizes and digests.
_SINGLE, _TOKENIZERS = "model.safetensors", ("tokenizer.json", "vocab.json")


class Hub:
    """One pool of connections for all checkpoints of a run; an asynchronous context manager.

    Endpoint, token, offline mode and places are those of huggingface_hub: ``HF_ENDPOINT``, ``HF_TOKEN`` or
    ``$HF_HOME/token``, ``HF_HUB_DISABLE_IMPLICIT_TOKEN``, ``HF_HUB_OFFLINE``, ``HF_HOME``, ``HF_HUB_CACHE``.
    What was already downloaded by huggingface_hub is read from its cache.

    Args:
        offline: Whether to make no request at all; None: as huggingface_hub is set.
        cache: Where listings, headers, small files and rows are kept; None: under huggingface_hub's folder
            for other libraries' data, ``$HF_HOME/assets/screen-checkpoints``.
        endpoint: Origin of the Hub; None: as huggingface_hub is set.
        token: A token; None: as huggingface_hub finds it.
        allowance: The user's own limits; None: none.

    Raises:
        UsageError: The endpoint is no address, or (on entering) the token no token.

    Attributes:
        meter: What travelled for no checkpoint that came of it: for `revisions`, and for refused ones.
        cache: Where everything that was read once is kept.
        allowance: The user's own limits.
    """

    def __init__(
        self,
        *,
        offline: bool | None = None,
        cache: Path | None = None,
        endpoint: str | None = None,
        token: str | None = None,
        allowance: Allowance | None = None,
    ) -> None:
        from huggingface_hub import constants

        self.endpoint = _address(endpoint or constants.ENDPOINT)
        self.offline = constants.HF_HUB_OFFLINE if offline is None else offline
        self.meter = Meter()
        self._token, self.allowance = token, allowance
        self.cache = Cache(cache or Path(constants.HF_ASSETS_CACHE) / "screen-checkpoints")
        self._downloads = Path(constants.HF_HUB_CACHE)
        self._transport: Transport | None = None

    async def __aenter__(self) -> Hub:
        """Open the pool."""
        if not self.offline:
            token = self._token or await asyncio.to_thread(_implicit_token)
            if token and not _TOKEN.fullmatch(token):
                # Refused here: what refuses it later would show it.
                raise UsageError(
                    "expected a token of ASCII letters, digits and signs, got another; check HF_TOKEN, "
                    "or log in again (hf auth login)"
                )
            self._transport = Transport(
                self.endpoint, token, f"screen-checkpoints/{__version__}", self.allowance
            )
            self._transport.shared = self.meter
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close every connection."""
        if self._transport:
            await self._transport.close()

    @property
    def transport(self) -> Transport | None:
        """The connections, for other places than repositories; None in offline mode."""
        return self._transport

    async def snapshot(
        self,
        repo: str,
        revision: str | None = None,
        budget: Budget | None = None,
        listing: Listing | None = None,
    ) -> Snapshot:
        """A checkpoint at a revision, pinned to its commit.

        Args:
            repo: ``org/name``; renamed repositories are followed.
            revision: Branch, tag or commit; None: the default branch.
            budget: Time for everything that is read of it: no retry waits beyond it; None: no limit.
            listing: What a list of many repositories said of it: then no API call is made.

        Raises:
            ScreeningError: ``RepoNotFound``, ``RevisionNotFound``, ``Offline``, or an error of the
                connection.
        """
        budget, meter = budget or Budget(math.inf), Meter()
        if not _NAME.fullmatch(repo):
            raise ScreeningError("RepoNotFound", f"expected a name such as org/model, got {repo!r}; check it")
        if self._transport is None and listing is None:
            return self._from_cache(repo, revision, budget, meter)
        try:
            if listing is not None:
                return await self._listed(listing, revision, budget, meter)
            found, early = await self._found(repo, revision, budget, meter)
            return await self._prepared(self._snapshot(found, revision, budget, meter, early))
        except BaseException:
            self.meter.bytes_read += meter.bytes_read
            self.meter.requests += meter.requests
            raise

    async def _listed(self, listing: Listing, revision: str | None, budget: Budget, meter: Meter) -> Snapshot:
        """A checkpoint that a list of repositories named, with what was found out of its files before."""
        if (kept := self.cache.read("listings", self._key(listing.repo, listing.commit))) is not None:
            found = replace(Listing.from_json(kept), gated=listing.gated)
            found = replace(found, parameters=found.parameters or listing.parameters)
        elif self._transport is None:
            return self._from_cache(listing.repo, listing.commit, budget, meter)
        else:
            found = listing
        return await self._prepared(self._snapshot(found, revision, budget, meter, {}))

    async def _prepared(self, snapshot: HubSnapshot) -> HubSnapshot:
        """A snapshot that knows of its files what nearly every checkpoint needs."""
        if self._transport is not None:
            texts = _EARLY[:1] if _SINGLE in snapshot.files else _EARLY
            await snapshot.prepare(_TOKENIZERS, _SINGLE, texts)
        return snapshot

    async def page(
        self, address: str, what: str, parse: Callable[[bytes, str], T], budget: Budget | None = None
    ) -> tuple[T, str | None]:
        """One page of a list of repositories, understood, and the address of the next one.

        Args:
            address: Path and query at the endpoint, or the address of a next page.
            what: What is listed, in words.
            parse: What understands its content.
            budget: See `snapshot`.

        Raises:
            ScreeningError: ``BadResponse`` if it goes on elsewhere; ``RepoNotFound`` if there is no such
                list, or an error of the connection.
        """
        address = address if "://" in address else f"{self.endpoint}{address}"
        if self._transport is None:
            kept = self.cache.read("pages", address)
            if kept is None:
                raise _offline(f"the list {address}")
            address, _, content = kept.decode().partition("\n")
            return parse(content.encode(), what), address or None
        bodies: list[bytes] = []

        def both(body: bytes, asked: str) -> T:
            bodies[:] = [body]
            return parse(body, asked)

        url, budget = URL(address, encoded=True), budget or Budget(math.inf)
        found, response = await self._api(url, what, "main", budget, self.meter, both)
        following = self._next(response, "repositories")
        self.cache.write("pages", address, f"{following or ''}\n".encode() + bodies[0])
        return found, None if following is None else str(following)

    def _next(self, response: aiohttp.ClientResponse, what: str) -> URL | None:
        """Where a list goes on."""
        try:
            following = response.links.get("next")
        except ValueError:
            raise ScreeningError(
                "BadResponse",
                f"the listing of {what} goes on at what is no address; check HF_ENDPOINT",
            ) from None
        if following is None:
            return None
        url = URL(following["url"])
        if not self._transport or not self._transport.is_hub(url):
            raise ScreeningError("BadResponse", f"the listing of {what} goes on at another host")
        return url

    def has_token(self) -> bool:
        """Whether requests would carry a token."""
        return bool(self._token or _implicit_token())

    def knows(self, repo: str, commit: str) -> bool:
        """Whether the cache has files of a repository at a commit."""
        return self.cache.read("listings", self._key(repo, commit)) is not None

    def quotas(self) -> list[Bucket]:
        """What the Hub has said of its quotas so far."""
        return self._transport.quotas() if self._transport else []

    async def revisions(self, repo: str, pattern: str, budget: Budget | None = None) -> list[str]:
        """Branches and tags that match a glob, in the order of the numbers in their names.

        Args:
            repo: ``org/name``.
            pattern: A glob such as ``step*``.
            budget: See `snapshot`.

        Raises:
            ScreeningError: ``RevisionNotFound`` if none matches, or an error of the connection.
        """
        budget, key = budget or Budget(math.inf), f"{self.endpoint} {repo}"
        url = URL(f"{self.endpoint}/api/models/{repo}/refs", encoded=True)
        if self._transport is None:
            kept = self.cache.read("refs", key)
            if kept is None:
                raise _offline(f"the list of branches of {repo}")
            names = json.loads(kept)
        else:
            names, _ = await self._api(url, repo, pattern, budget, self.meter, parse_references)
            self.cache.write("refs", key, json.dumps(names).encode())
        found = matching(names, pattern)
        if not found:
            some = ", ".join(sorted(names, key=step_key)[:6]) or "none"
            raise ScreeningError(
                "RevisionNotFound",
                f"no branch or tag of {repo} matches {pattern!r}; it has {len(names)}: {some}, …",
            )
        return found

    async def _found(
        self, repo: str, revision: str | None, budget: Budget, meter: Meter
    ) -> tuple[Listing, dict[str, bytes]]:
        """The listing, and texts that were asked for beside it."""
        name, key = revision or "main", self._key(repo, revision)
        kept = self.cache.read("listings", key)
        if kept is not None and _COMMIT.fullmatch(name):
            return Listing.from_json(kept), {}
        if kept is not None and await self._unmoved(Listing.from_json(kept), repo, name, budget, meter):
            return Listing.from_json(kept), {}
        url = URL(
            f"{self.endpoint}/api/models/{repo}/revision/{quote(name, safe='')}?blobs=true", encoded=True
        )
        tasks = (
            {}
            if kept
            else {
                path: asyncio.ensure_future(self._early(repo, name, path, meter, budget)) for path in _EARLY
            }
        )
        try:
            found, _ = await self._api(url, repo, name, budget, meter, parse_listing)
            if not found.complete:
                found = Listing(
                    found.repo, found.commit, await self._tree(found, budget, meter), found.parameters
                )
            if tasks:
                # They left together; what is not here a moment later is asked for again when it is needed.
                await asyncio.wait(tasks.values(), timeout=0.5)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        early = {path: task.result() for path, task in tasks.items() if not task.cancelled()}
        content = found.to_json()
        if content != kept:
            self.cache.write("listings", key, content)
            self.cache.write("listings", self._key(repo, found.commit), content)
        return found, early

    async def _unmoved(self, kept: Listing, repo: str, revision: str, budget: Budget, meter: Meter) -> bool:
        """Whether a branch is where it was, by one resolver request: more of them are allowed than API calls.

        One attempt; where the answer says something else or nothing, the listing is asked for.
        """
        transport = self._transport
        assert transport is not None
        url = URL(f"{self.endpoint}/{repo}/resolve/{quote(revision, safe='')}/{_EARLY[0]}", encoded=True)
        if _EARLY[0] not in kept.files or not transport.bucket(url).affords():
            return False
        with contextlib.suppress(ScreeningError, AgainError):
            async with transport.request(
                "HEAD", url, {"Accept-Encoding": "identity"}, meter, budget
            ) as response:
                transport.raise_if_passing(response)
                if response.status < 400:
                    return kept.repo == repo and response.headers.get("X-Repo-Commit") == kept.commit
        return False

    async def _early(self, repo: str, revision: str, path: str, meter: Meter, budget: Budget) -> bytes:
        """A text at a revision, empty if anything is wrong with it; one attempt.

        A favour: it is not asked for where the quota of pages comes near its end.
        """
        transport, name = self._transport, quote(revision, safe="")
        assert transport is not None
        url = URL(f"{self.endpoint}/{repo}/raw/{name}/{path}", encoded=True)
        with contextlib.suppress(ScreeningError, AgainError):
            if transport.bucket(url).affords():
                body, _ = await transport.body(
                    url, meter, _LISTING_LIMIT, lambda r: self._refused(r, repo, revision), budget
                )
                return body
        return b""

    async def _tree(self, found: Listing, budget: Budget, meter: Meter) -> dict[str, FileEntry]:
        """Files by the tree's pages: for mirrors whose listing has no sizes."""
        url = URL(f"{self.endpoint}/api/models/{found.repo}/tree/{found.commit}?recursive=true", encoded=True)
        files: dict[str, FileEntry] = {}
        while True:
            page, response = await self._api(url, found.repo, found.commit, budget, meter, parse_tree)
            files |= page
            following = self._next(response, found.repo)
            if following is None:
                return files
            url = following

    async def _api(
        self,
        url: URL,
        repo: str,
        revision: str,
        budget: Budget,
        meter: Meter,
        parse: Callable[[bytes, str], T],
    ) -> tuple[T, aiohttp.ClientResponse]:
        """What the API says, understood; an answer that is not the Hub's is asked for once more."""
        transport = self._transport
        assert transport is not None

        def refused(response: Answer) -> ScreeningError:
            return self._refused(response, repo, revision)

        async def attempt() -> tuple[T, aiohttp.ClientResponse]:
            body, response = await transport.body(url, meter, _LISTING_LIMIT, refused, budget)
            try:
                return parse(body, repo), response
            except ScreeningError as error:
                raise AgainError(error, last=True) from error

        return await transport.retried(attempt, budget)

    def _refused(self, response: Answer, repo: str, revision: str) -> ScreeningError:
        token = self._transport is not None and self._transport.token is not None
        return refusal(response, repo, revision, self.endpoint, token=token)

    def _from_cache(self, repo: str, revision: str | None, budget: Budget, meter: Meter) -> Snapshot:
        """Offline: by our own cache, else by what huggingface_hub downloaded."""
        kept = self.cache.read("listings", self._key(repo, revision))
        if kept is not None:
            return self._snapshot(Listing.from_json(kept), revision, budget, meter, {})
        downloaded = open_download(self._downloads, repo, revision)
        if downloaded is None:
            raise _offline(f"{repo} at revision {revision or 'main'}")
        return downloaded

    def _snapshot(
        self, found: Listing, revision: str | None, budget: Budget, meter: Meter, early: dict[str, bytes]
    ) -> HubSnapshot:
        key = self._key(found.repo, found.commit)

        def learnt(files: Mapping[str, FileEntry]) -> None:
            self.cache.write("listings", key, replace(found, files=files).to_json())

        downloads = self._downloads / f"models--{found.repo.replace('/', '--')}"
        return HubSnapshot(
            self._transport,
            self.endpoint,
            found,
            revision,
            budget=budget,
            meter=meter,
            cache=self.cache,
            downloads=downloads,
            early=early,
            learnt=learnt,
        )

    def _key(self, repo: str, revision: str | None) -> str:
        return f"{self.endpoint} {repo}@{revision or 'main'}"


def _address(endpoint: str) -> str:
    """An endpoint that requests can be sent to, without a slash at its end."""
    try:
        url = URL(endpoint)
    except ValueError:
        url = URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise UsageError(
            f"expected HF_ENDPOINT such as https://huggingface.co, got {endpoint!r}; correct or unset it"
        )
    return endpoint.rstrip("/")


def _implicit_token() -> str | None:
    from huggingface_hub import constants, get_token

    return None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()


def _offline(what: str) -> ScreeningError:
    return ScreeningError(
        "Offline",
        f"offline mode is on and {what} is not in the cache; screen it once with a network, or unset "
        "HF_HUB_OFFLINE",
    )
