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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    is_redirect,
    retried,
)
from lmeval_screener.checkpoints.limits import Allowance, Budget
from lmeval_screener.checkpoints.snapshots import SMALL, RemoteSnapshot, open_download
from lmeval_screener.errors import ScreeningError
from lmeval_screener.targets import Listed, matching, step_key

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_TOKEN = re.compile(r"[!-~]+")
#: Listings of repositories with thousands of files have some megabytes.
_LISTING_LIMIT = 64 * 2**20
#: Texts that nearly every checkpoint needs, asked for beside the listing when nothing is cached.
_EARLY = ("config.json", "model.safetensors.index.json")


@dataclass(frozen=True, slots=True)
class RepoFiles:
    """A repository at one commit.

    Attributes:
        repo: Its name after renames.
        commit: 40 hex digits.
        files: By path.
        parameters: As the Hub counts them; None if it does not say.
    """

    repo: str
    commit: str
    files: Mapping[str, FileEntry]
    parameters: int | None

    def to_json(self) -> bytes:
        """The listing as an entry of the cache."""
        files = [[entry.path, entry.size, entry.digest] for entry in self.files.values()]
        return json.dumps([self.repo, self.commit, files, self.parameters]).encode()

    @classmethod
    def from_json(cls, content: bytes) -> RepoFiles:
        """The listing of an entry of the cache."""
        repo, commit, files, parameters = json.loads(content)
        return cls(repo, commit, {path: FileEntry(path, *known) for path, *known in files}, parameters)


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
        meter: All that travelled.
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

        self.endpoint = _endpoint(endpoint or constants.ENDPOINT)
        self.offline = constants.HF_HUB_OFFLINE if offline is None else offline
        self._token, self.allowance = token, allowance or Allowance()
        self.meter = Meter()
        self.cache = Cache(cache or Path(constants.HF_ASSETS_CACHE) / "screen-checkpoints")
        self.downloads = Path(constants.HF_HUB_CACHE)
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
            agent = f"screen-checkpoints/{__version__}"
            self.transport = Transport(self.endpoint, token, agent, self.allowance)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close every connection."""
        if self.transport:
            await self.transport.close()

    def has_token(self) -> bool:
        """Whether requests would carry a token."""
        return bool(self._token or _implicit_token())

    async def snapshot(
        self,
        repo: str,
        revision: str | None = None,
        budget: Budget | None = None,
        listed: Listed | None = None,
    ) -> Snapshot:
        """A checkpoint at a revision, pinned to its commit; at the listed commit, if it comes from a list."""
        budget, meter = budget or Budget(math.inf), Meter(above=self.meter)
        if not _NAME.fullmatch(repo):
            raise ScreeningError("RepoNotFound", f"expected a name such as org/model, got {repo!r}; check it")
        asked = listed.commit if listed else revision or "main"
        early: dict[str, bytes] = {}
        kept = self.cache.read("listings", self._key(repo, asked))
        listing = None if kept is None else RepoFiles.from_json(kept)
        if self.transport is None:
            if listing is None:
                downloaded = open_download(self.downloads, repo, asked)
                if downloaded is None:
                    raise _offline(f"{repo} at revision {asked}")
                return downloaded
        elif listing is None:
            if listed and listed.gated and self.transport.token is None:
                raise gated(repo, self.endpoint, token=False)
            # What a list names is not asked for in vain.
            texts = [path for path in _EARLY if listed is None or path in listed.files]
            listing, early = await self._listed(repo, asked, texts, budget, meter)
        elif not _COMMIT.fullmatch(asked) and not await self._unmoved(listing, repo, asked, budget, meter):
            listing = await self._listing(repo, asked, budget, meter)
        return HubSnapshot(self, listing, budget=budget, meter=meter, early=early)

    async def page(
        self, address: str, what: str, parse: Callable[[Any], T], budget: Budget
    ) -> tuple[T, str | None]:
        """One page of a list of repositories, understood, and the address of the next one."""
        address = address if "://" in address else f"{self.endpoint}{address}"
        if self.transport is None:
            kept = self.cache.read("pages", address)
            if kept is None:
                raise _offline(f"the list {address}")
            following, content = json.loads(kept)
            return parse(content), following

        page, response = await self.api(
            address, what, "main", budget, self.meter, lambda content: (parse(content), content)
        )
        following = self._next(response, "repositories")
        self.cache.write("pages", address, json.dumps([following, page[1]]).encode())
        return page[0], following

    async def revisions(self, repo: str, pattern: str, budget: Budget | None = None) -> list[str]:
        """Branches and tags that match a glob, in the order of the numbers in their names."""
        budget, key = budget or Budget(math.inf), f"{self.endpoint} {repo}"
        if self.transport is None:
            kept = self.cache.read("refs", key)
            if kept is None:
                raise _offline(f"the list of branches of {repo}")
            names = json.loads(kept)
        else:
            address = f"{self.endpoint}/api/models/{repo}/refs"
            names, _ = await self.api(address, repo, pattern, budget, self.meter, parse_references)
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
        self, address: str, what: str, revision: str, budget: Budget, meter: Meter, parse: Callable[[Any], T]
    ) -> tuple[T, aiohttp.ClientResponse]:
        """An answer of the API, understood; what is not the Hub's is asked for again."""
        transport, url = self.transport, URL(address, encoded=True)
        assert transport is not None

        async def attempt() -> tuple[T, aiohttp.ClientResponse]:
            body, response = await transport.body(
                url, meter, _LISTING_LIMIT, lambda refused: self.refusal(refused, what, revision), budget
            )
            return understood(body, what, parse), response

        return await retried(attempt, budget)

    async def pages(
        self, address: str, what: str, budget: Budget, meter: Meter, parse: Callable[[Any], list[T]]
    ) -> list[T]:
        """The items of all pages of a listing that begins at an address; see `api`."""
        items: list[T] = []
        following: str | None = address
        while following is not None:
            page, response = await self.api(following, what, "main", budget, meter, parse)
            items += page
            following = self._next(response, what)
        return items

    def refusal(self, response: aiohttp.ClientResponse, what: str, revision: str) -> ScreeningError:
        """The error that a final status means; see `refusal`."""
        token = self.transport is not None and self.transport.token is not None
        return refusal(response, what, revision, self.endpoint, token=token)

    def _next(self, response: aiohttp.ClientResponse, what: str) -> str | None:
        """Where a list goes on."""
        try:
            following = response.links.get("next")
            url = None if following is None else URL(following["url"])
        except ValueError:
            raise ScreeningError(
                "BadResponse", f"the listing of {what} goes on at what is no address; check HF_ENDPOINT"
            ) from None
        if url is not None and not (self.transport and self.transport.is_hub(url)):
            raise ScreeningError(
                "BadResponse", f"the listing of {what} goes on at another host; check HF_ENDPOINT"
            )
        return None if url is None else str(url)

    async def _listed(
        self, repo: str, revision: str, texts: Sequence[str], budget: Budget, meter: Meter
    ) -> tuple[RepoFiles, dict[str, bytes]]:
        """The listing, and texts that were asked for beside it."""
        tasks = {
            path: asyncio.ensure_future(self._early(repo, revision, path, meter, budget)) for path in texts
        }
        try:
            listing = await self._listing(repo, revision, budget, meter)
            # They left together; what is not here a moment later is asked for again when it is needed.
            if tasks:
                await asyncio.wait(tasks.values(), timeout=0.5)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        return listing, {path: task.result() for path, task in tasks.items() if not task.cancelled()}

    async def _listing(self, repo: str, revision: str, budget: Budget, meter: Meter) -> RepoFiles:
        address = f"{self.endpoint}/api/models/{repo}/revision/{quote(revision, safe='')}?blobs=true"
        listing, _ = await self.api(address, repo, revision, budget, meter, parse_listing)
        listing = replace(listing, repo=listing.repo or repo)
        if any(entry.size is None or not entry.digest for entry in listing.files.values()):
            # Some mirrors' listings have no sizes.
            address = f"{self.endpoint}/api/models/{listing.repo}/tree/{listing.commit}?recursive=true"
            entries = await self.pages(address, listing.repo, budget, meter, parse_tree)
            listing = replace(listing, files={entry.path: entry for entry in entries})
        content = listing.to_json()
        for name in {revision, listing.commit}:
            self.cache.write("listings", self._key(repo, name), content)
        return listing

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

    def _key(self, repo: str, revision: str) -> str:
        return f"{self.endpoint} {repo}@{revision}"


class ResolvedSnapshot(RemoteSnapshot):
    """Files that the Hub resolves to addresses elsewhere, those of a repository or of a bucket."""

    def __init__(
        self, hub: Hub, repo: str, files: Mapping[str, FileEntry], *, budget: Budget, meter: Meter
    ) -> None:
        super().__init__(hub.transport, repo, files, budget=budget, meter=meter, cache=hub.cache)
        self._hub = hub

    async def _resolved(self, path: str) -> URL:
        """Where a file lies, by HEAD."""
        transport, entry = self._online(path), self._entry(path)

        def believe(response: aiohttp.ClientResponse, *, final: bool) -> None:
            if problem := resolve_problem(response.headers, entry, self.revision, final=final):
                raise contradiction(f"{path} of {self.repo} resolves wrongly: {problem}")

        def leads_away(response: aiohttp.ClientResponse) -> bool:
            believe(response, final=False)
            return transport.leads_away(response)

        asked = transport.followed("HEAD", self._url(path), {}, self.meter, self._budget, leads_away)
        async with await asked as response:
            if is_redirect(response):
                return await transport.redirect(response, self.meter)
            if not 200 <= response.status < 300:
                raise self._refused(response)
            believe(response, final=True)
            return response.url

    def _is_final(self, url: URL) -> bool:
        return self._transport is not None and self._transport.is_hub(url)

    def _refused(self, response: aiohttp.ClientResponse) -> ScreeningError:
        return self._hub.refusal(response, self.repo, self.revision or "main")


class HubSnapshot(ResolvedSnapshot):
    """A checkpoint on the Hub at one commit; see `Snapshot`. Made by `Hub`."""

    def __init__(
        self,
        hub: Hub,
        listing: RepoFiles,
        *,
        budget: Budget,
        meter: Meter,
        early: Mapping[str, bytes] | None = None,
    ) -> None:
        super().__init__(hub, listing.repo, listing.files, budget=budget, meter=meter)
        self.revision, self.parameters = listing.commit, listing.parameters
        self.cache = hub.cache  # a commit's file is the same tomorrow, with or without a digest
        self._early = dict(early or {})

    async def _text(self, path: str) -> bytes:
        """A small file from the network.

        Texts in git are served by `raw` in one round trip, compressed; but they count as pages, of which
        few are allowed.
        """
        entry, body = self._entry(path), self._early.pop(path, b"")
        if body and entry.fits(body):
            return body
        transport, size, url = self._online(path), await self.size(path), self._url(path, "raw")
        in_git = not (entry.digest or "").startswith("sha256:")
        body = b""
        if in_git and transport.quota(url).affords():
            try:
                body, _ = await transport.body(url, self.meter, size, self._refused, self._budget)
            except ScreeningError as error:
                # Mirrors often know nothing but resolve.
                if error.code not in ("RepoNotFound", "RateLimited"):
                    raise
        if size and not body:
            body = await self._range(path, 0, size)
        if not entry.fits(body):
            raise contradiction(f"{path} of {self.repo} does not have the digest that the listing says")
        return body

    def _on_disk(self, entry: FileEntry) -> Path | None:
        """The file in the Hub's own cache, where blobs are named by their digest."""
        if not entry.digest:
            return None
        folder = self._hub.downloads / f"models--{self.repo.replace('/', '--')}"
        place = folder / "blobs" / entry.digest.partition(":")[2]
        return place if place.is_file() and place.stat().st_size == entry.size else None

    def _url(self, path: str, verb: str = "resolve") -> URL:
        address = f"{self._hub.endpoint}/{self.repo}/{verb}/{self.revision}/{quote(path)}"
        return URL(address, encoded=True)


def understood(body: bytes, asked: str, parse: Callable[[Any], T]) -> T:
    """An answer of the API; an `AgainError` where it is not the Hub's JSON."""
    try:
        return parse(json.loads(body))
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        error = ScreeningError(
            "BadResponse",
            f"the server's answer about {asked} is not the Hub's JSON; check HF_ENDPOINT and any proxy",
        )
        raise AgainError(error, attempts=CONTRADICTIONS) from None


def parse_listing(info: Any) -> RepoFiles:
    """Files from ``/api/models/{repo}/revision/{revision}?blobs=true``."""
    if not _COMMIT.fullmatch(info["sha"]):
        raise ValueError("no commit")
    entries = [
        file_entry(text(item["rfilename"]), item.get("size"), part(item, "lfs", "sha256"), item.get("blobId"))
        for item in items(info.get("siblings", []))
    ]
    parameters = part(info, "safetensors", "total")
    known = type(parameters) is int and parameters > 0
    files = {entry.path: entry for entry in entries}
    return RepoFiles(info.get("id") or "", info["sha"], files, parameters if known else None)


def parse_tree(tree: Any) -> list[FileEntry]:
    """Files from one page of ``/api/models/{repo}/tree/{revision}?recursive=true``."""
    return [
        file_entry(text(item["path"]), item.get("size"), part(item, "lfs", "oid"), item.get("oid"))
        for item in items(tree)
        if item.get("type") == "file"
    ]


def parse_references(refs: Any) -> list[str]:
    """Names of branches and tags from ``/api/models/{repo}/refs``."""
    kinds = [items(refs.get(kind) or []) for kind in ("branches", "tags")]
    return list(dict.fromkeys(text(ref["name"]) for kind in kinds for ref in kind))


def file_entry(path: str, size: Any, sha256: Any, oid: Any) -> FileEntry:
    """A file as the Hub names it; sizes and digests that are none count as unknown."""
    digest = None
    if isinstance(sha256, str) and _SHA256.fullmatch(sha256):
        digest = f"sha256:{sha256}"
    elif isinstance(oid, str) and _COMMIT.fullmatch(oid):
        digest = f"git:{oid}"
    return FileEntry(path, size if type(size) is int and size >= 0 else None, digest)


def text(value: Any) -> str:
    """A text of an answer that is not empty; see `understood`."""
    if not isinstance(value, str) or not value:
        raise TypeError("expected a text")
    return value


def items(value: Any) -> list[Any]:
    """A list of an answer; see `understood`."""
    if not isinstance(value, list):
        raise TypeError("expected a list")
    return value


def part(item: Any, name: str, key: str) -> Any:
    """A part of an object of an answer; None where there is none."""
    inner = item.get(name)
    return inner.get(key) if isinstance(inner, dict) else None


def refusal(
    response: aiohttp.ClientResponse, repo: str, revision: str, endpoint: str, *, token: bool
) -> ScreeningError:
    """The error that a final status other than 2xx and 3xx of the Hub means.

    The Hub names its reasons in ``X-Error-Code``; without one, 401 to a request without a token stands for a
    repository that is missing or private (it does not tell which), and 401 with an ``X-Error-Message`` to one
    with a token for a token that it does not accept.
    """
    status, code, host = response.status, response.headers.get("X-Error-Code", ""), response.url.host
    login = _login(token=token)
    if code == "GatedRepo":
        return gated(repo, endpoint, token=token)
    if code == "RevisionNotFound":
        return ScreeningError(
            "RevisionNotFound",
            f"{repo} has no revision {revision!r}; see {endpoint}/{repo}/tree/main for its branches",
        )
    if code == "EntryNotFound":
        return ScreeningError(
            "FileNotFound", f"{response.url.path} is not in {repo}; ask for another revision"
        )
    if status == 401 and token and not code and "X-Error-Message" in response.headers:
        # With a token that it knows, the Hub answers 404 for what is missing; only one it refuses gets a 401.
        reason = response.headers["X-Error-Message"][:200]
        return ScreeningError(
            "BadToken",
            f"{host} does not accept the token ({reason}); log in again (hf auth login), "
            "correct HF_TOKEN, or unset it for public repositories",
        )
    if code == "RepoNotFound" or status in (401, 404):
        return ScreeningError(
            "RepoNotFound", f"{repo} is not on {endpoint}, or it is private; check the name, or {login}"
        )
    if status in (403, 451):
        return ScreeningError("AccessDenied", f"{host} refuses access to {repo} ({status}); {login}")
    return ScreeningError("ServerError", f"{host} answered {status} for {repo}; try again later")


def gated(repo: str, endpoint: str, *, token: bool) -> ScreeningError:
    """The error of a repository whose files need accepted conditions."""
    return ScreeningError(
        "GatedRepo", f"{repo} is gated; accept its conditions at {endpoint}/{repo} and {_login(token=token)}"
    )


def _login(*, token: bool) -> str:
    return "check that the token may read it" if token else "log in (hf auth login, or set HF_TOKEN)"


def resolve_problem(
    headers: Mapping[str, str], entry: FileEntry, commit: str | None, *, final: bool
) -> str | None:
    """Why what a file resolves to is not the file that was listed; None if it is."""
    size = headers.get("X-Linked-Size") or (headers.get("Content-Length") if final else None)
    if size and size != str(entry.size):
        return f"expected {entry.size} bytes, got {size}"
    if headers.get("X-Repo-Commit", commit) != commit:
        return f"expected commit {commit}, got {headers.get('X-Repo-Commit')}"
    hashed = re.fullmatch(r'(?:W/)?"?([0-9a-f]{64})"?', headers.get("X-Linked-ETag", ""))
    if hashed and (entry.digest or "").startswith("sha256:") and entry.digest != f"sha256:{hashed[1]}":
        return f"expected {entry.digest}, got sha256:{hashed[1]}"
    content = headers.get("X-Xet-Hash")
    if content and (entry.digest or "").startswith("xet:") and entry.digest != f"xet:{content}":
        return "it changed while it was read"
    return None


def _endpoint(endpoint: str) -> str:
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
