"""Checkpoints on the Hub (or any server that speaks its protocol), read by ranges over pooled connections.

Token, endpoint, offline mode and places come from huggingface_hub. Its `HfApi` is not used: its import takes
as long as a small screening, and its requests are neither counted nor bounded by our time limit.

A large file is resolved by HEAD *without* Range: the address's signature then covers every range, not only
the requested range.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

from lmeval_dispersion.errors import UsageError, without_secrets
from lmeval_dispersion.report.declared import some
from lmeval_screener.checkpoints.account import CONTRADICTIONS, Account, RetryError, contradiction
from lmeval_screener.checkpoints.http import (
    Notice,
    Transport,
    is_redirect,
    natural,
    url_of,
)
from lmeval_screener.checkpoints.networks import Networks
from lmeval_screener.checkpoints.snapshot import COMMIT, SMALL, FileEntry, Snapshot, open_download
from lmeval_screener.checkpoints.web import FilePlace, RemoteSnapshot
from lmeval_screener.errors import ScreeningError
from lmeval_screener.targets.names import Listed
from lmeval_screener.targets.runs import matching, step_key

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

T = TypeVar("T")

#: No control characters, nor halves of characters, which JSON can state and nothing can store.
_TEXT = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,1024}")
#: Bytes or parameters that a server may state.
_MOST = 2**60
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DIGEST = re.compile(r"\b(?:[0-9a-f]{64}|[0-9a-f]{40})\b")
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
#: The Hub's tag for the base of a model, taken from its card.
_TRAINED_FROM = re.compile(r"base_model:(?:finetune|adapter):([\w.-]+/[\w.-]+)", re.ASCII)
_TOKEN = re.compile(r"[!-~]+")
#: Listings of repositories with thousands of files have several megabytes.
_LISTING_LIMIT = 64 * 2**20
#: Variables other than HF_TOKEN that give huggingface_hub a token.
_LOGINS = ("HF_OIDC_RESOURCE", "HUGGING_FACE_HUB_TOKEN", "COLAB_RELEASE_TAG")
#: The file whose headers give the commit of a branch.
_PROBE = "config.json"
_THE_HUB = "https://huggingface.co"


@dataclass(frozen=True, slots=True)
class RepoFiles:
    """The Hub's listing of a repository at one commit.

    Attributes:
        repo: Name of the repository, ``org/name``.
        commit: The commit, 40 hex digits.
        files: Every file, by its path in the repository.
        parameters: Number of parameters in the safetensors files; None if the Hub does not say.
        base: The model that this one was trained from, by its model card; empty if the card names
            none or several.
        private: Whether the repository is private; None if unknown.
    """

    repo: str
    commit: str
    files: Mapping[str, FileEntry]
    parameters: int | None
    base: str = ""
    private: bool | None = None

    def to_json(self) -> bytes:
        """Encode the listing as JSON, for the cache."""
        files = [[entry.path, entry.size, entry.digest] for entry in self.files.values()]
        known = [self.repo, self.commit, files, self.parameters, self.base, self.private]
        return json.dumps(known).encode()

    @classmethod
    def from_json(cls, content: bytes) -> RepoFiles:
        """Decode a listing that `to_json` has encoded."""
        repo, commit, files, *others = json.loads(content)
        return cls(repo, commit, {path: FileEntry(path, *known) for path, *known in files}, *others)


class Hub:
    """A client of the Hub, shared by all checkpoints of a screening.

    It is an asynchronous context manager: its connections are open inside the context. Endpoint,
    token, offline mode and folders are those of huggingface_hub, from ``HF_ENDPOINT``, ``HF_TOKEN``
    or ``$HF_HOME/token``, ``HF_HUB_DISABLE_IMPLICIT_TOKEN``, ``HF_HUB_OFFLINE``, ``HF_HOME`` and
    ``HF_HUB_CACHE``. Files that huggingface_hub has downloaded are read from its cache.

    Args:
        offline: Whether to send no requests; None for the setting of huggingface_hub.
        notice: Called with a server's name and a number of seconds when requests have to wait.

    Attributes:
        endpoint: Address of the Hub, without a slash at its end.
        networks: The hosts to which requests may be sent.
        mark: The endpoint without user name and password, as a part of cache keys.
        offline: Whether no requests are sent.
        account: Time budget and traffic of the whole screening (see `Account`).
        downloads: Folder in which huggingface_hub keeps downloaded files.
        transport: The HTTP connections; None in offline mode and outside the context.
        has_texts: Whether the endpoint has the Hub's cache of small files
            (``/api/resolve-cache``); False once a request has shown that it lacks that cache.

    Raises:
        UsageError: The endpoint is not a web address; or, on entering the context, the token has
            characters that cannot be sent.
    """

    def __init__(self, *, offline: bool | None = None, notice: Notice | None = None) -> None:
        from huggingface_hub import constants

        self.endpoint = _endpoint(constants.ENDPOINT)
        self.networks = Networks(self.endpoint)
        self.mark = without_secrets(self.endpoint)
        self.offline = constants.HF_HUB_OFFLINE if offline is None else offline
        self._notice = notice
        self.account = Account()
        self.downloads = Path(constants.HF_HUB_CACHE)
        self.transport: Transport | None = None
        self.has_texts = True  # whether small files are where the Hub's resolver redirects

    async def __aenter__(self) -> Hub:
        """Open the connections, unless offline mode is on."""
        if not self.offline:
            token = await asyncio.to_thread(_implicit_token)
            if token and not _TOKEN.fullmatch(token):
                # Refused here: a later error would show the token.
                raise UsageError(
                    "expected a token of printable ASCII characters without spaces, got one with "
                    "other characters; correct HF_TOKEN, or log in again (hf auth login)"
                )
            self.transport = Transport(self.endpoint, token, self._notice, self.networks)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close every connection."""
        if self.transport:
            await self.transport.close()

    def online(self, what: str) -> Transport:
        """Return the HTTP connections, to request what is not in the cache.

        Raises:
            ScreeningError: Offline mode is on; the message says that ``what`` is not in the cache.
        """
        if self.transport is None:
            raise ScreeningError(
                "Offline",
                f"offline mode is on and {what} is not in the cache; run once without "
                "HF_HUB_OFFLINE, so that it gets there",
            )
        return self.transport

    def has_token(self) -> bool:
        """Whether requests to the Hub carry a token."""
        return bool(self.transport.token if self.transport else _implicit_token())

    @property
    def token_mark(self) -> str:
        """A hash that identifies the Hub's token without revealing it; empty without a token."""
        token = self.transport.token if self.transport else None
        if not token:
            return ""
        return hashlib.sha256(f"{self.endpoint} {token}".encode()).hexdigest()[:16]

    async def snapshot(
        self, repo: str, revision: str | None, account: Account, listed: Listed | None = None
    ) -> Snapshot:
        """Open the checkpoint in a repository at one commit.

        In offline mode it comes from the cache, or from the files that huggingface_hub downloaded.

        Args:
            repo: Name of the repository, ``org/name``.
            revision: Branch, tag or commit; None for ``main``.
            account: Time budget and traffic of reading the checkpoint.
            listed: Entry of the repository in a list of the Hub, whose commit is then opened; None
                to look the revision up.

        Raises:
            ScreeningError: The repository or revision does not exist, is not accessible, or cannot
                be reached; or offline mode is on and neither place has it.
        """
        if not _NAME.fullmatch(repo):
            raise ScreeningError(
                "RepoNotFound",
                f"expected the name of a repository, such as org/model, got {repo!r}; check the name",
            )
        asked = listed.commit if listed else revision or "main"
        listing = self._kept(repo, asked)
        if listing is None:
            if self.transport is None:
                downloaded = open_download(self.downloads, repo, asked)
                if downloaded is not None:
                    return downloaded
            self.online(f"{repo} at revision {asked}")
            if listed is None:
                listing = await self._listing(repo, asked, account)
            elif listed.gated and not self.has_token():
                raise self._gated(repo)
            else:
                files = {path: FileEntry(path, -1, None) for path in listed.files}
                known = listed.parameters, listed.base, listed.private
                listing = RepoFiles(repo, listed.commit, files, *known)
        elif not await self._unmoved(listing, asked, account):
            listing = await self._listing(repo, asked, account)
        return HubSnapshot(self, listing, account)

    async def page(
        self, address: str, what: str, parse: Callable[[Any], T], account: Account
    ) -> tuple[T, str | None]:
        """Return one page of a list of the Hub, parsed, and the address of the next page.

        The address is None on the last page. In offline mode the page comes from the cache.

        Args:
            address: Address of the page, whole or without the endpoint.
            what: The thing that is listed, for messages.
            parse: Turns the page's JSON into the result.
            account: Time budget and traffic of the request.

        Raises:
            ScreeningError: The page cannot be read, or is not in the cache in offline mode.
        """
        key = f"{self.mark}{address}"
        if "://" in address:
            key = str(url_of(address).with_user(None))
        else:
            address = f"{self.endpoint}{address}"
        cache = self.account.cache
        kept = cache.read("pages", key) if self.transport is None else None
        if kept is not None:
            following, content = json.loads(kept)
            return parse(content), following
        self.online(f"the list {address}")
        (page, content), response = await self.api(
            address, what, "main", account, lambda content: (parse(content), content)
        )
        following = self._next(response, what)
        cache.write("pages", key, json.dumps([following, content]).encode())
        return page, following

    async def revisions(self, repo: str, pattern: str, account: Account) -> list[str]:
        """Return the branches and tags that match a glob, ordered by the numbers in their names.

        Raises:
            ScreeningError: No branch or tag matches, or they cannot be listed.
        """
        address = f"/api/models/{repo}/refs"
        names, _ = await self.page(address, repo, parse_references, account)
        matches = matching(names, pattern)
        if not matches:
            first_names = some(sorted(names, key=step_key), 6) or "none"
            raise ScreeningError(
                "RevisionNotFound",
                f"no branch or tag of {repo} matches {pattern!r}; choose from its branches and tags "
                f"({len(names)}): {first_names}",
            )
        return matches

    async def api(
        self, address: str, what: str, revision: str, account: Account, parse: Callable[[Any], T]
    ) -> tuple[T, aiohttp.ClientResponse]:
        """Request an address of the Hub's API; return the result and the response.

        ``parse`` turns the response's JSON into the result. ``account`` limits the time and counts
        the traffic. ``what`` and ``revision`` are named in messages.

        Raises:
            ScreeningError: The Hub refuses, the request fails after retries, ``parse`` raises an
                error, or offline mode is on.
        """
        transport = self.online(address)
        url = url_of(address)

        async def attempt() -> tuple[T, aiohttp.ClientResponse]:
            body, response = await transport.body(
                url, account, _LISTING_LIMIT, partial(self.refusal, repo=what, revision=revision)
            )
            try:
                return parse(json.loads(body)), response
            except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
                error = ScreeningError(
                    "BadResponse",
                    f"expected JSON of the Hub's API about {what}, got another response from "
                    f"{url.host}; check HF_ENDPOINT and any proxy",
                )
                raise RetryError(error, attempts=CONTRADICTIONS) from None

        return await account.retried(attempt)

    def refusal(self, response: aiohttp.ClientResponse, repo: str, revision: str) -> ScreeningError:
        """Return the error for a response of the Hub whose status is neither 2xx nor 3xx.

        The Hub states the reason in the header ``X-Error-Code``. Without that header, status 401
        means that the token is not accepted, or that ``repo`` is missing or private (the Hub does
        not say which).
        """
        status = response.status
        host = response.url.host
        code = response.headers.get("X-Error-Code", "")
        message = response.headers.get("X-Error-Message", "")
        if code == "GatedRepo":
            return self._gated(repo)
        if code == "RevisionNotFound":
            return ScreeningError(
                "RevisionNotFound",
                f"{repo} has no revision {revision!r}; see {self.endpoint}/{repo}/tree/main for its branches",
            )
        if code == "EntryNotFound":
            return ScreeningError(
                "FileNotFound", f"{repo} has no file {response.url.path}; choose another revision"
            )
        if status == 401 and message and not code and self.has_token():
            # With a valid token, the Hub answers 404 for missing repositories.
            return ScreeningError(
                "BadToken",
                f"{host} does not accept the token ({message[:200]}); log in again (hf auth login), "
                "correct HF_TOKEN, or unset it for public repositories",
            )
        if code == "RepoNotFound" or status in (401, 404):
            return ScreeningError(
                "RepoNotFound",
                f"{repo} is not on {self.endpoint}, or it is private; check the name, or {self._login}",
            )
        if status == 403 and "disabled" in message:
            return ScreeningError(
                "AccessDenied",
                f"{repo} is disabled on {self.endpoint}; screen another repository instead",
            )
        if status in (403, 451):
            return ScreeningError(
                "AccessDenied", f"{host} refuses access to {repo} ({status}); {self._login}"
            )
        return ScreeningError(
            "ServerError",
            f"{host} answered with status {status} when asked for {repo}; try again later",
        )

    def _gated(self, repo: str) -> ScreeningError:
        """The error of a repository whose files need accepted conditions."""
        place = f"{self.endpoint}/{repo}"
        return ScreeningError(
            "GatedRepo", f"{repo} is gated; accept its conditions at {place} and {self._login}"
        )

    @property
    def _login(self) -> str:
        if self.has_token():
            return "check that the token may read it"
        return "log in (hf auth login, or set HF_TOKEN)"

    def _next(self, response: aiohttp.ClientResponse, what: str) -> str | None:
        """The address of a list's next page."""
        why = "has an invalid address"
        with contextlib.suppress(ValueError):
            following = response.links.get("next")
            if following is None:
                return None
            url = url_of(str(following["url"]))
            if self.transport and self.transport.is_hub(url):
                return str(url)
            why = "is on another host"
        raise ScreeningError(
            "BadResponse", f"the next page of the listing of {what} {why}; check HF_ENDPOINT"
        )

    async def _listing(self, repo: str, revision: str, account: Account) -> RepoFiles:
        address = (
            f"{self.endpoint}/api/models/{repo}/revision/{quote(revision, safe='')}?blobs=true"
        )
        listing, _ = await self.api(address, repo, revision, account, parse_listing)
        listing = replace(listing, repo=listing.repo or repo)
        self.keep(listing, repo, revision)
        return listing

    def keep(self, listing: RepoFiles, repo: str, *revisions: str) -> None:
        """Write a repository's listing to the cache, under its commit and under ``revisions``."""
        for revision in {listing.commit, *revisions}:
            self.account.cache.write(
                "listings", f"{self.mark} {repo}@{revision}", listing.to_json()
            )

    def _kept(self, repo: str, revision: str) -> RepoFiles | None:
        """The kept listing of a revision: its commit's, which knows more about the files."""
        kept = self.account.cache.read("listings", f"{self.mark} {repo}@{revision}")
        if kept is None:
            return None
        listing = RepoFiles.from_json(kept)
        if listing.commit == revision:
            return listing
        return self._kept(listing.repo, listing.commit) or listing

    async def _unmoved(self, kept: RepoFiles, revision: str, account: Account) -> bool:
        """Whether a branch still has the same commit, by a request to the resolver, whose quota is larger."""
        transport = self.transport
        if transport is None or COMMIT.fullmatch(revision):
            return True
        name = f"{kept.repo}/resolve/{quote(revision, safe='')}/{_PROBE}"
        url = url_of(f"{self.endpoint}/{name}")
        if _PROBE not in kept.files:
            return False
        with contextlib.suppress(ScreeningError, RetryError):
            async with await transport.request("HEAD", url, {}, account) as response:
                transport.raise_if_transient(response)
                if response.status < 400:
                    return response.headers.get("X-Repo-Commit") == kept.commit
        return False


class HubSnapshot(RemoteSnapshot):
    """A checkpoint on the Hub at one commit.

    The Hub redirects requests for a file to the address where its content is stored.
    """

    _redirects = True

    def __init__(self, hub: Hub, listing: RepoFiles, account: Account) -> None:
        super().__init__(listing.repo, listing.files, account, hub.online)
        self.revision = listing.commit
        self.parameters = listing.parameters
        self.base = listing.base
        self.private = listing.private
        self.cache = account.cache  # files of a commit never change, with or without a digest
        self._hub = hub
        self._listing = listing

    def _url(self, path: str) -> URL:
        return url_of(f"{self._hub.endpoint}/{self.repo}/resolve/{self.revision}/{quote(path)}")

    def _refused(self, response: aiohttp.ClientResponse) -> ScreeningError:
        return self._hub.refusal(response, self.repo, self._listing.commit)

    def content_key(self, path: str) -> str:
        """Return the key under which a file is cached; see `Snapshot.content_key`.

        Keys for files of an endpoint other than the Hub begin with that endpoint. It may state a
        wrong digest, which byte ranges cannot reveal, and its content must not be taken for the
        Hub's.
        """
        key = super().content_key(path)
        if self._hub.mark != _THE_HUB:
            key = f"{self._hub.mark} {key}"
        return key

    async def _resolved(self, path: str) -> URL:
        """The address of a file, by HEAD."""
        transport = self._online(path)

        def checked(response: aiohttp.ClientResponse, *, final: bool) -> FileEntry:
            entry = self.entry(path)
            if problem := resolve_problem(response.headers, entry, self.revision, final=final):
                raise contradiction(_mismatch(path, self.repo, problem))
            if entry.size < 0:
                entry = completed(entry, response, final=final)
                self.files = {**self.files, path: entry}
            return entry

        def far_enough(response: aiohttp.ClientResponse) -> bool:
            entry = checked(response, final=False)
            return transport.leads_away(response) or (entry.size < 0 and is_known(entry))

        asked = transport.followed("HEAD", self._url(path), {}, self.account, far_enough)
        async with await asked as response:
            if is_redirect(response):
                return await transport.redirect(response, self.account)
            if not 200 <= response.status < 300:
                raise self._refused(response)
            checked(response, final=True)
            return response.url

    def _keep(self) -> None:
        """Keep the resolver's entries of texts, whose digests are checked, and of weights that were read."""
        if self.files is not self._listing.files:
            files = dict(self._listing.files)
            for path, entry in self.files.items():
                is_right = path in self._proven or path.endswith(".json")
                if is_right and path not in self.borrowed:
                    files[path] = entry
            self._hub.keep(replace(self._listing, files=files), self.repo)

    async def look_up(self, path: str) -> FileEntry:
        """Return a file's entry, after asking the Hub for a size or digest that is not listed.

        See `Snapshot.look_up`. The entry of a file borrowed from another checkpoint is returned as
        it is.

        Raises:
            ScreeningError: The file does not exist or cannot be requested, or the server does not
                state its size (nor its digest, which is enough for a JSON file).
        """
        if path not in self.borrowed and not is_known(self.entry(path)):
            await self._address(path, self._places.setdefault(path, FilePlace()))
            if not is_known(self.files[path]):
                raise ScreeningError(
                    "BadResponse",
                    f"the server does not state the size of {path} of {self.repo}; check "
                    "HF_ENDPOINT and any proxy",
                )
        return self.files[path]

    async def _fetched(self, path: str) -> bytes:
        """A small file; its digest comes with it if the listing has none."""
        entry = self.entry(path)
        transport = self._online(path)
        if (entry.digest or "").startswith("sha256:"):
            body = await self._range(path, 0, entry.size)
        else:
            body, response = await self._in_git(path, transport)
            if problem := resolve_problem(response.headers, entry, self.revision, final=False):
                raise contradiction(_mismatch(path, self.repo, problem))
            if not is_known(entry) and transport.is_hub(response.url):
                entry = completed(entry, response, final=False)
            if not is_known(entry):
                entry = await self.look_up(path)
        if entry.size < 0:
            entry = replace(entry, size=len(body))
        if not entry.fits(body):
            raise contradiction(
                f"the content of {path} of {self.repo} does not have the digest that the server states"
            )
        if entry != self.files[path]:
            self.files = {**self.files, path: entry}
        return body

    async def _in_git(
        self, path: str, transport: Transport
    ) -> tuple[bytes, aiohttp.ClientResponse]:
        """A text and its response, from the resolver's cache if there is one (some mirrors have none)."""
        if self._hub.has_texts:
            address = f"{self._hub.endpoint}/api/resolve-cache/models/{self.repo}/{self.revision}/{quote(path)}"
            with contextlib.suppress(ScreeningError):
                body, response = await transport.body(
                    url_of(address), self.account, SMALL, self._refused
                )
                if "X-Repo-Commit" in response.headers:
                    return body, response
        answer = await transport.body(self._url(path), self.account, SMALL, self._refused)
        self._hub.has_texts = False  # only the resolver itself has it
        return answer

    def _on_disk(self, entry: FileEntry) -> Path | None:
        """The file in huggingface_hub's cache, which names blobs by digest."""
        if not entry.digest:
            return None
        folder = self._hub.downloads / f"models--{self.repo.replace('/', '--')}"
        place = folder / "blobs" / entry.digest.partition(":")[2]
        if place.is_file() and place.stat().st_size == entry.size:
            return place
        return None


def parse_listing(info: Any) -> RepoFiles:
    """Parse the Hub's response from ``/api/models/{repo}/revision/{revision}?blobs=true``.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: ``info`` is not such a response.
    """
    if not COMMIT.fullmatch(info["sha"]):
        raise ValueError("no commit")
    entries = [file_entry(item) for item in items(info.get("siblings", []))]
    weights = info.get("safetensors")
    parameters = weights.get("total") if isinstance(weights, dict) else None
    if type(parameters) is not int or not 0 < parameters < _MOST:
        parameters = None
    bases = set()
    for tag in items(info.get("tags") or []):
        match = _TRAINED_FROM.fullmatch(tag) if isinstance(tag, str) else None
        if match is not None:
            bases.add(match[1])
    private = info.get("private")
    return RepoFiles(
        repository_name(info["id"]) if info.get("id") else "",
        info["sha"],
        {entry.path: entry for entry in entries},
        parameters,
        bases.pop() if len(bases) == 1 else "",
        private if isinstance(private, bool) else None,
    )


def parse_references(refs: Any) -> list[str]:
    """Return the names of branches and tags in the Hub's response from ``/api/models/{repo}/refs``.

    Raises:
        TypeError, KeyError, AttributeError: ``refs`` is not such a response.
    """
    kinds = [items(refs.get(kind) or []) for kind in ("branches", "tags")]
    return list(dict.fromkeys(text(ref["name"]) for kind in kinds for ref in kind))


def file_entry(item: Any) -> FileEntry:
    """Parse the entry of one file in a listing of the Hub.

    The size is -1, and the digest None, if ``item`` states none or an invalid one.

    Raises:
        TypeError, KeyError, AttributeError: ``item`` is not an entry with a file name.
    """
    size = item.get("size")
    oid = item.get("blobId")
    sha256 = (item.get("lfs") or {}).get("sha256")
    digest = None
    if isinstance(sha256, str) and _SHA256.fullmatch(sha256):
        digest = f"sha256:{sha256}"
    elif isinstance(oid, str) and COMMIT.fullmatch(oid):
        digest = f"git:{oid}"
    if type(size) is not int or not 0 <= size < _MOST:
        size = -1
    return FileEntry(text(item["rfilename"]), size, digest)


def text(value: Any) -> str:
    """Return ``value`` if it is a text without control characters; for parsers of the Hub's JSON.

    Raises:
        TypeError: ``value`` is not such a text, is empty, or has more than 1,024 characters.
    """
    if not isinstance(value, str) or not _TEXT.fullmatch(value):
        raise TypeError("expected a text")
    return value


def repository_name(value: Any) -> str:
    """Return ``value`` if it can be a repository's name; for parsers of the Hub's JSON.

    Raises:
        TypeError: ``value`` is not a text.
        ValueError: ``value`` is a text that cannot be a repository's name.
    """
    name = text(value)
    if not _NAME.fullmatch(name) or ".." in name:
        raise ValueError("not a repository's name")
    return name


def items(value: Any) -> list[Any]:
    """Return ``value`` if it is a list; for parsers of the Hub's JSON.

    Raises:
        TypeError: ``value`` is not a list.
    """
    if not isinstance(value, list):
        raise TypeError("expected a list")
    return value


def resolve_problem(
    headers: Mapping[str, str], entry: FileEntry, commit: str | None, *, final: bool
) -> str | None:
    """Return why a response for a file contradicts its listing; None if the two agree.

    Args:
        headers: Headers of the response.
        entry: The file as listed.
        commit: The commit as listed; a response that states no commit agrees with any.
        final: Whether the response carries the file itself, so that its Content-Length is the
            file's size; false for a redirect.
    """
    size = headers.get("X-Linked-Size") or (headers.get("Content-Length") if final else None)
    if size and entry.size >= 0 and size != str(entry.size):
        return f"expected {entry.size} bytes, got {size}"
    if headers.get("X-Repo-Commit", commit) != commit:
        return f"expected commit {commit}, got {headers.get('X-Repo-Commit')}"
    hashed = re.fullmatch(r'(?:W/)?"?([0-9a-f]{64})"?', headers.get("X-Linked-ETag", ""))
    digest = entry.digest or ""
    if hashed and digest.startswith("sha256:") and digest != f"sha256:{hashed[1]}":
        return f"expected {digest}, got sha256:{hashed[1]}"
    return None


def _mismatch(path: str, repo: str, problem: str) -> str:
    return (
        f"the server's headers for {path} of {repo} contradict the repository's listing: {problem}"
    )


def is_known(entry: FileEntry) -> bool:
    """Whether enough is known about a file to read it without asking the Hub for its size.

    The size is enough, and so is the digest of a JSON file.
    """
    return entry.size >= 0 or (entry.digest is not None and entry.path.endswith(".json"))


def completed(entry: FileEntry, response: aiohttp.ClientResponse, *, final: bool) -> FileEntry:
    """Return ``entry`` with the size and digest that the Hub states in a response for the file.

    The digest of a large file is in ``X-Linked-ETag``. That of a small text file is in ``ETag``,
    or, if the response redirects to the text, in the query of the new address. Without a digest, a
    JSON file's entry is returned unchanged. A size that is not stated is -1. ``final`` is as in
    `resolve_problem`.
    """
    headers = response.headers
    size = headers.get("X-Linked-Size", "")
    if final and not size:
        size = headers.get("Content-Length", "")
    etag = headers.get("ETag", "")
    if is_redirect(response):
        inside, _, tag = headers["Location"].partition("etag=")
        etag = unquote(tag) if inside.startswith("/") else ""
    match = _DIGEST.search(headers.get("X-Linked-ETag", etag))
    digest = entry.digest
    if match is not None:
        kind = "sha256" if len(match[0]) == 64 else "git"
        digest = f"{kind}:{match[0]}"
    elif entry.path.endswith(".json"):
        return entry  # without a digest, a text may be a proxy's page
    stated = natural(size)
    if stated is None:
        stated = -1
    return replace(entry, size=stated, digest=digest)


def _endpoint(endpoint: str) -> str:
    """A valid endpoint, without a slash at its end."""
    with contextlib.suppress(ValueError):
        url = urlsplit(endpoint)
        if url.scheme in ("http", "https") and url.hostname:
            return endpoint.rstrip("/")
    raise UsageError(
        f"expected HF_ENDPOINT such as https://huggingface.co, got {endpoint!r}; correct or unset it"
    )


def _implicit_token() -> str | None:
    from huggingface_hub import constants

    if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
        return None
    if not any(map(os.environ.get, _LOGINS)) and "google.colab" not in sys.modules:
        # `get_token` imports another HTTP client, which takes a tenth of a checkpoint's time.
        token = os.environ.get("HF_TOKEN", "")
        if _TOKEN.fullmatch(token):
            return token
        if not token and not Path(constants.HF_TOKEN_PATH).exists():
            return None
    from huggingface_hub import get_token

    return get_token()
