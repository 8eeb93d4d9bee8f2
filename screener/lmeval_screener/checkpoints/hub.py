"""Checkpoints on the Hub (or any server that speaks its protocol), read by ranges over pooled connections.

Token, endpoint, offline mode and places come from huggingface_hub. Its `HfApi` is not used: its import takes
as long as a small screening, its calls need a thread each, its requests are neither metered nor bounded by
our time budget, and it takes two round trips where one request says all: the pinned commit, the sizes and
the digests. config.json and the index travel beside that request, checked by the digests that it brings.

A large file is resolved by HEAD *without* Range: the signature of the address then covers every range (had
the request carried one, only that one).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from yarl import URL

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.version import __version__
from lmeval_screener.checkpoints import Cache, FileEntry, Meter, Snapshot
from lmeval_screener.checkpoints.http import (
    CONTRADICTIONS,
    AgainError,
    Transport,
    contradiction,
    drained,
    is_redirect,
    retried,
    side_by_side,
    unpacked,
)
from lmeval_screener.checkpoints.hub_responses import (
    RepoFiles,
    gated,
    parse_listing,
    parse_references,
    parse_tree,
    refusal,
    resolve_problem,
    resolved_entry,
)
from lmeval_screener.checkpoints.limits import Allowance, Budget, Quota
from lmeval_screener.checkpoints.snapshots import SMALL, RemoteSnapshot, open_download
from lmeval_screener.errors import ScreeningError
from lmeval_screener.targets import matching, step_key

if TYPE_CHECKING:
    import aiohttp

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
#: Where the Hub's own redirects of small files lead.
_TEXTS = "/api/resolve-cache/models"


class Hub:
    """One pool of connections for all checkpoints of a run; an asynchronous context manager.

    Endpoint, token, offline mode and places are those of huggingface_hub: ``HF_ENDPOINT``, ``HF_TOKEN`` or
    ``$HF_HOME/token``, ``HF_HUB_DISABLE_IMPLICIT_TOKEN``, ``HF_HUB_OFFLINE``, ``HF_HOME``, ``HF_HUB_CACHE``.
    Downloads of huggingface_hub are read from its cache.

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
        transport: The connections, for other places than repositories too; None in offline mode.
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
        self.transport: Transport | None = None

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
            self.transport = Transport(
                self.endpoint, token, f"screen-checkpoints/{__version__}", self.allowance
            )
            self.transport.shared = self.meter
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close every connection."""
        if self.transport:
            await self.transport.close()

    async def snapshot(
        self,
        repo: str,
        revision: str | None = None,
        budget: Budget | None = None,
        listing: RepoFiles | None = None,
    ) -> Snapshot:
        """A checkpoint at a revision, pinned to its commit."""
        budget, meter = budget or Budget(math.inf), Meter()
        if not _NAME.fullmatch(repo):
            raise ScreeningError("RepoNotFound", f"expected a name such as org/model, got {repo!r}; check it")
        early: dict[str, bytes] = {}
        try:
            if listing is not None:
                kept = self.cache.read("listings", self._key(listing.repo, listing.commit))
                if kept is not None:
                    known = RepoFiles.from_json(kept)
                    listing = replace(
                        known, gated=listing.gated, parameters=known.parameters or listing.parameters
                    )
                elif self.transport is None:
                    return self._from_cache(listing.repo, listing.commit, budget, meter)
            elif self.transport is None:
                return self._from_cache(repo, revision, budget, meter)
            else:
                listing, early = await self._listed(repo, revision, budget, meter)
            snapshot = HubSnapshot(self, listing, revision, budget=budget, meter=meter, early=early)
            if self.transport is not None:
                texts = _EARLY[:1] if _SINGLE in snapshot.files else _EARLY
                await snapshot.prepare(_TOKENIZERS, _SINGLE, texts)
            return snapshot
        except BaseException:
            self.meter.bytes_read += meter.bytes_read
            self.meter.requests += meter.requests
            raise

    async def page(
        self, address: str, what: str, parse: Callable[[bytes, str], T], budget: Budget | None = None
    ) -> tuple[T, str | None]:
        """One page of a list of repositories, understood, and the address of the next one."""
        address = address if "://" in address else f"{self.endpoint}{address}"
        if self.transport is None:
            kept = self.cache.read("pages", address)
            if kept is None:
                raise _offline(f"the list {address}")
            address, _, content = kept.decode().partition("\n")
            return parse(content.encode(), what), address or None
        url, budget = URL(address, encoded=True), budget or Budget(math.inf)

        def both(body: bytes, asked: str) -> tuple[T, bytes]:
            return parse(body, asked), body

        (page, body), response = await self.api(url, what, "main", budget, self.meter, both)
        following = self._next(response, "repositories")
        self.cache.write("pages", address, f"{following or ''}\n".encode(), body)
        return page, None if following is None else str(following)

    def has_token(self) -> bool:
        """Whether requests would carry a token."""
        return bool(self._token or _implicit_token())

    def knows(self, repo: str, commit: str) -> bool:
        """Whether the cache has files of a repository at a commit."""
        return self.cache.read("listings", self._key(repo, commit)) is not None

    def quotas(self) -> list[Quota]:
        """The Hub's quotas, as far as it has spoken of them."""
        return self.transport.quotas() if self.transport else []

    async def revisions(self, repo: str, pattern: str, budget: Budget | None = None) -> list[str]:
        """Branches and tags that match a glob, in the order of the numbers in their names."""
        budget, key = budget or Budget(math.inf), f"{self.endpoint} {repo}"
        if self.transport is None:
            kept = self.cache.read("refs", key)
            if kept is None:
                raise _offline(f"the list of branches of {repo}")
            names = json.loads(kept)
        else:
            url = URL(f"{self.endpoint}/api/models/{repo}/refs", encoded=True)
            names, _ = await self.api(url, repo, pattern, budget, self.meter, parse_references)
            self.cache.write("refs", key, json.dumps(names).encode())
        matches = matching(names, pattern)
        if not matches:
            some = ", ".join(sorted(names, key=step_key)[:6]) or "none"
            raise ScreeningError(
                "RevisionNotFound",
                f"no branch or tag of {repo} matches {pattern!r}; it has {len(names)}: {some}, …",
            )
        return matches

    async def api(
        self,
        url: URL,
        what: str,
        revision: str,
        budget: Budget,
        meter: Meter,
        parse: Callable[[bytes, str], T],
    ) -> tuple[T, aiohttp.ClientResponse]:
        """An answer of the API, understood; what is not the Hub's is asked for again."""
        transport = self.transport
        assert transport is not None

        async def attempt() -> tuple[T, aiohttp.ClientResponse]:
            body, response = await transport.body(
                url, meter, _LISTING_LIMIT, lambda refused: self.refusal(refused, what, revision), budget
            )
            try:
                return parse(body, what), response
            except ScreeningError as error:
                raise AgainError(error, attempts=CONTRADICTIONS) from error

        return await retried(attempt, budget)

    async def pages(
        self,
        url: URL,
        what: str,
        revision: str,
        budget: Budget,
        meter: Meter,
        parse: Callable[[bytes, str], T],
    ) -> list[T]:
        """Every page of a listing that begins at an address; see `api`."""
        pages: list[T] = []
        following: URL | None = url
        while following is not None:
            page, response = await self.api(following, what, revision, budget, meter, parse)
            pages.append(page)
            following = self._next(response, what)
        return pages

    def refusal(self, response: aiohttp.ClientResponse, what: str, revision: str) -> ScreeningError:
        """The error that a final status means; see `hub_responses.refusal`."""
        token = self.transport is not None and self.transport.token is not None
        return refusal(response, what, revision, self.endpoint, token=token)

    def _next(self, response: aiohttp.ClientResponse, what: str) -> URL | None:
        """Where a list goes on."""
        try:
            following = response.links.get("next")
        except ValueError:
            raise ScreeningError(
                "BadResponse", f"the listing of {what} goes on at what is no address; check HF_ENDPOINT"
            ) from None
        if following is None:
            return None
        url = URL(following["url"])
        if not self.transport or not self.transport.is_hub(url):
            raise ScreeningError(
                "BadResponse", f"the listing of {what} goes on at another host; check HF_ENDPOINT"
            )
        return url

    async def _listed(
        self, repo: str, revision: str | None, budget: Budget, meter: Meter
    ) -> tuple[RepoFiles, dict[str, bytes]]:
        """The listing, and texts that were asked for beside it."""
        name, key = revision or "main", self._key(repo, revision)
        kept = self.cache.read("listings", key)
        if kept is not None:
            known = RepoFiles.from_json(kept)
            if _COMMIT.fullmatch(name) or await self._unmoved(known, repo, name, budget, meter):
                return known, {}
        at = quote(name, safe="")
        url = URL(f"{self.endpoint}/api/models/{repo}/revision/{at}?blobs=true", encoded=True)
        tasks: dict[str, asyncio.Task[bytes]] = {}
        if kept is None:
            tasks = {
                path: asyncio.ensure_future(self._early(repo, name, path, meter, budget)) for path in _EARLY
            }
        try:
            listing, _ = await self.api(url, repo, name, budget, meter, parse_listing)
            if not listing.complete:
                # Some mirrors' listings have no sizes.
                address = f"{self.endpoint}/api/models/{listing.repo}/tree/{listing.commit}?recursive=true"
                pages = await self.pages(
                    URL(address, encoded=True), listing.repo, listing.commit, budget, meter, parse_tree
                )
                listing = replace(
                    listing, files={path: entry for page in pages for path, entry in page.items()}
                )
            if tasks:
                # They left together; what is not here a moment later is asked for again when it is needed.
                await asyncio.wait(tasks.values(), timeout=0.5)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        early = {path: task.result() for path, task in tasks.items() if not task.cancelled()}
        content = listing.to_json()
        if content != kept:
            self.cache.write("listings", key, content)
            self.cache.write("listings", self._key(repo, listing.commit), content)
        return listing, early

    async def _unmoved(self, kept: RepoFiles, repo: str, revision: str, budget: Budget, meter: Meter) -> bool:
        """Whether a branch is where it was, by one resolver request: more of them are allowed than API calls.

        One attempt; where the answer says something else or nothing, the listing is asked for.
        """
        transport = self.transport
        assert transport is not None
        url = URL(f"{self.endpoint}/{repo}/resolve/{quote(revision, safe='')}/{_EARLY[0]}", encoded=True)
        if _EARLY[0] not in kept.files or not transport.quota(url).affords():
            return False
        with contextlib.suppress(ScreeningError, AgainError):
            async with await transport.request("HEAD", url, {}, meter, budget) as response:
                transport.raise_if_passing(response)
                if response.status < 400:
                    return kept.repo == repo and response.headers.get("X-Repo-Commit") == kept.commit
        return False

    async def _early(self, repo: str, revision: str, path: str, meter: Meter, budget: Budget) -> bytes:
        """A text at a revision, empty if anything is wrong with it; one attempt.

        A favour: it is not asked for where the quota of pages comes near its end.
        """
        transport = self.transport
        assert transport is not None
        url = URL(f"{self.endpoint}/{repo}/raw/{quote(revision, safe='')}/{path}", encoded=True)
        with contextlib.suppress(ScreeningError, AgainError):
            if transport.quota(url).affords():
                body, _ = await transport.body(
                    url, meter, SMALL, lambda refused: self.refusal(refused, repo, revision), budget
                )
                return body
        return b""

    def _from_cache(self, repo: str, revision: str | None, budget: Budget, meter: Meter) -> Snapshot:
        """Offline: by our own cache, else by what huggingface_hub downloaded."""
        kept = self.cache.read("listings", self._key(repo, revision))
        if kept is not None:
            return HubSnapshot(self, RepoFiles.from_json(kept), revision, budget=budget, meter=meter)
        downloaded = open_download(self._downloads, repo, revision)
        if downloaded is None:
            raise _offline(f"{repo} at revision {revision or 'main'}")
        return downloaded

    def keep(self, listing: RepoFiles) -> None:
        """Keep what became known of a commit's files."""
        self.cache.write("listings", self._key(listing.repo, listing.commit), listing.to_json())

    def downloaded(self, repo: str, digest: str) -> Path:
        """Where huggingface_hub keeps a file of a repository, by its digest."""
        return self._downloads / f"models--{repo.replace('/', '--')}" / "blobs" / digest

    def _key(self, repo: str, revision: str | None) -> str:
        return f"{self.endpoint} {repo}@{revision or 'main'}"


class HubSnapshot(RemoteSnapshot):
    """A checkpoint on the Hub at one commit; see `Snapshot`. Made by `Hub`."""

    def __init__(
        self,
        hub: Hub,
        listing: RepoFiles,
        requested_revision: str | None,
        *,
        budget: Budget,
        meter: Meter,
        early: Mapping[str, bytes] | None = None,
    ) -> None:
        self._known = dict(listing.files)
        super().__init__(
            hub.transport, listing.repo, self._known, budget=budget, meter=meter, cache=hub.cache
        )
        self.requested_revision, self.revision = requested_revision, listing.commit
        self.parameters = listing.parameters
        self.cache = hub.cache  # a commit's file is the same tomorrow, with or without a digest
        self._hub, self._listing, self._early = hub, listing, dict(early or {})
        self._gathering = False

    async def prepare(self, tokenizers: Sequence[str], weights: str, texts: Sequence[str]) -> None:
        """Ask side by side for what nearly every checkpoint needs and a list of repositories does not say."""
        wanted = [*texts, *[path for path in tokenizers if path in self.files][:1], weights]
        unknown = [path for path in wanted if path in self.files and self.files[path].size is None]
        works: list[Coroutine[Any, Any, object]] = []
        for path in unknown:
            if path == weights:
                works.append(self.size(path))
            elif self.files[path].digest is None:
                works.append(self.small_file(path) if path in texts else self._digested(path))
        if not works:
            return
        before = dict(self.files)
        self._gathering = True
        try:
            await side_by_side(works)
        finally:
            self._gathering = False
            if self.files != before:
                self._hub.keep(replace(self._listing, files=self.files))

    async def _digested(self, path: str) -> None:
        """Learn the digest of a file, by one request if the server tells it where it redirects."""
        async with self._text_locks.setdefault(path, asyncio.Lock()):
            if self._entry(path).digest is None:
                self._online(path)
                await retried(lambda: self._resolved(path, wanted="digest"), self._budget)

    async def _text(self, path: str, entry: FileEntry) -> bytes:
        """A small file from the network.

        Texts in git are served by `raw` in one round trip, compressed; but they count as pages, of which
        few are allowed.
        """
        if entry.size is None:
            return await self._unlisted_text(path)
        body = self._early.pop(path, b"")
        if body and entry.fits(body):
            return body
        transport, size, url = self._online(path), entry.size, self._url(path, "raw")
        in_git = not (entry.digest or "").startswith("sha256:")
        body = b""
        if in_git and transport.quota(url).affords():
            try:
                body, _ = await transport.body(url, self.meter, size, self._refused, self._budget)
            except ScreeningError as error:
                # Mirrors often know nothing but resolve.
                if error.code not in ("RepoNotFound", "RateLimited"):
                    raise
        if not in_git or (size and not body):
            body = await self._range(path, 0, size)
        if not entry.fits(body):
            raise self._other_content(path)
        return body

    async def _unlisted_text(self, path: str) -> bytes:
        """A small file of which nothing is known but that it is there; its digest comes with it.

        The Hub redirects from `resolve` to where such texts lie. When it was seen to do so once, the others
        are asked for there: one request that counts in place of two.
        """
        transport = self._online(path)
        direct = URL(f"{self._hub.endpoint}{_TEXTS}/{self.repo}/{self.revision}/{quote(path)}", encoded=True)
        at_once = transport.texts_lie_there
        url = direct if at_once else self._url(path)

        def believed(response: aiohttp.ClientResponse) -> bool:
            if transport.is_hub(response.url):
                self._believe(path, response, final=False)
            return False

        gzip = {"Accept-Encoding": "gzip"}
        async with await transport.followed("GET", url, gzip, self.meter, self._budget, believed) as response:
            there = response.url.raw_path == direct.raw_path and "ETag" in response.headers
            if response.status != 200 or (at_once and not there):
                await drained(response, self.meter)
                if not at_once:
                    raise self._refused(response)
                transport.texts_lie_there = False
                return await self._unlisted_text(path)
            believed(response)
            transport.texts_lie_there = there and transport.is_hub(response.url)
            body, entry = await unpacked(response, self.meter, SMALL), self._entry(path)
        if not entry.fits(body):
            raise self._other_content(path)
        self._know(FileEntry(path, len(body), entry.digest))
        return body

    def _other_content(self, path: str) -> AgainError:
        return contradiction(f"{path} of {self.repo} does not have the digest that the listing says")

    async def _resolved(self, path: str, *, wanted: str = "size") -> URL:
        """Where a file lies, by HEAD; what the answers say of it is kept."""
        transport = self._online(path)

        def far_enough(response: aiohttp.ClientResponse) -> bool:
            self._believe(path, response, final=False)
            entry = self._entry(path)
            if wanted == "digest" and entry.digest is not None:
                return True
            return entry.size is not None and transport.leads_away(response)

        asked = transport.followed("HEAD", self._url(path), {}, self.meter, self._budget, far_enough)
        async with await asked as response:
            if is_redirect(response):
                return await transport.redirect(response, self.meter)
            if not 200 <= response.status < 300:
                raise self._refused(response)
            self._believe(path, response, final=True)
            return response.url

    def _believe(self, path: str, response: aiohttp.ClientResponse, *, final: bool) -> None:
        """Check what a file resolves to against what is known of it, and keep what is new."""
        entry = self._entry(path)
        if problem := resolve_problem(response.headers, entry, self.revision, final=final):
            raise contradiction(f"{path} of {self.repo} resolves wrongly: {problem}")
        if entry.size is None or entry.digest is None:
            self._know(resolved_entry(response.headers, entry, final=final))

    def _know(self, entry: FileEntry) -> None:
        if entry != self.files[entry.path]:
            self._known[entry.path] = entry
            if not self._gathering:
                self._hub.keep(replace(self._listing, files=self.files))

    def _is_final(self, url: URL) -> bool:
        return self._transport is not None and self._transport.is_hub(url)

    def _on_disk(self, entry: FileEntry) -> Path | None:
        """The file in the Hub's own cache, where blobs are named by their digest."""
        if not entry.digest:
            return None
        place = self._hub.downloaded(self.repo, entry.digest.partition(":")[2])
        return place if place.is_file() and place.stat().st_size == entry.size else None

    def _online(self, path: str) -> Transport:
        transport = super()._online(path)
        if self._listing.gated and transport.token is None:
            # The list of repositories said so: there is no need to ask.
            raise gated(self.repo, self._hub.endpoint, token=False)
        return transport

    def _url(self, path: str, verb: str = "resolve") -> URL:
        address = f"{self._hub.endpoint}/{self.repo}/{verb}/{self.revision}/{quote(path)}"
        return URL(address, encoded=True)

    def _refused(self, response: aiohttp.ClientResponse) -> ScreeningError:
        return self._hub.refusal(response, self.repo, str(self.revision))


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
