"""The Hub's answers: listings as files, refusals as named errors, and which of them are to be believed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lmeval_screener.checkpoints.snapshot import FileEntry
from lmeval_screener.errors import ScreeningError

if TYPE_CHECKING:
    import aiohttp

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RepoFiles:
    """A repository at one commit.

    Attributes:
        repo: Its name after renames.
        commit: 40 hex digits.
        files: By path; sizes and digests are known where the listing says them, or a file was asked for.
        parameters: As the Hub counts them; None if it does not say.
        gated: Whether its files need accepted conditions; only a list of many repositories says it here.
        changed: When it changed last (ISO 8601, UTC), likewise; empty if unknown.
    """

    repo: str
    commit: str
    files: Mapping[str, FileEntry]
    parameters: int | None
    gated: bool = False
    changed: str = ""

    @property
    def complete(self) -> bool:
        """Whether sizes and digests are known; else the tree has to be asked."""
        return all(entry.size is not None and entry.digest for entry in self.files.values())

    def to_json(self) -> bytes:
        """The listing as an entry of the cache."""
        files = [[entry.path, entry.size, entry.digest] for entry in self.files.values()]
        return json.dumps([self.repo, self.commit, files, self.parameters]).encode()

    @classmethod
    def from_json(cls, content: bytes) -> RepoFiles:
        """The listing of an entry of the cache."""
        repo, commit, files, parameters = json.loads(content)
        return cls(repo, commit, {path: FileEntry(path, *known) for path, *known in files}, parameters)


@dataclass(frozen=True, slots=True)
class RepoSummary:
    """One repository of a list of many."""

    repo: str
    changed: str
    listing: RepoFiles | None


def parse_listing(body: bytes, asked: str) -> RepoFiles:
    """Files from ``/api/models/{repo}/revision/{revision}?blobs=true``.

    Raises:
        ScreeningError: ``BadResponse`` if it is something else; so do all of these functions.
    """
    # Whether its files can be had is for their server to say: a mirror may have a token of its own.
    return replace(_listing(_parsed(body, dict, asked), asked), gated=False, changed="")


def parse_page(body: bytes, asked: str) -> list[RepoSummary]:
    """Repositories from one page of ``/api/models?expand=sha&expand=siblings&…``."""
    summaries = []
    for info in _parsed(body, list, asked):
        name = info.get("id") if isinstance(info, dict) else None
        if not isinstance(name, str) or not name:
            raise _bad(asked)
        # A repository without a commit is empty, and listed nevertheless.
        with_files = info.get("sha") and info.get("siblings") is not None
        summaries.append(
            RepoSummary(name, _text(info.get("lastModified")), _listing(info, name) if with_files else None)
        )
    return summaries


def parse_collection(body: bytes, asked: str) -> tuple[list[RepoSummary], int]:
    """Models of ``/api/collections/{slug}``, and how many of its items are none."""
    items = _parsed(body, dict, asked).get("items")
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise _bad(asked)
    models = [item for item in items if item.get("type") == "model" and isinstance(item.get("id"), str)]
    summaries = [RepoSummary(model["id"], _text(model.get("lastModified")), None) for model in models]
    return summaries, len(items) - len(models)


def parse_tree(body: bytes, asked: str) -> dict[str, FileEntry]:
    """Files from one page of ``/api/models/{repo}/tree/{revision}?recursive=true``."""
    files = {}
    for item in _parsed(body, list, asked):
        path = item.get("path") if isinstance(item, dict) else None
        if not isinstance(path, str):
            raise _bad(asked)
        if item.get("type") == "file":
            large = item.get("lfs")
            oid = large.get("oid") if isinstance(large, dict) else None
            files[path] = file_entry(path, item.get("size"), oid, item.get("oid"))
    return files


def parse_folder(body: bytes, asked: str) -> list[dict[str, Any]]:
    """Items of one page of ``/api/buckets/{name}/tree/{folder}``."""
    items: list[dict[str, Any]] = _parsed(body, list, asked)
    if not all(isinstance(item, dict) and isinstance(item.get("path"), str) for item in items):
        raise _bad(asked)
    return items


def parse_references(body: bytes, asked: str) -> list[str]:
    """Names of branches and tags from ``/api/models/{repo}/refs``."""
    refs = _parsed(body, dict, asked)
    names = []
    for kind in ("branches", "tags"):
        listed = refs.get(kind) or []
        for ref in listed if isinstance(listed, list) else [None]:
            if not isinstance(ref, dict) or not isinstance(ref.get("name"), str):
                raise _bad(asked)
            names.append(ref["name"])
    return list(dict.fromkeys(names))


def _listing(info: Mapping[str, Any], asked: str) -> RepoFiles:
    commit, siblings = info.get("sha"), info.get("siblings", [])
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit) or not isinstance(siblings, list):
        raise _bad(asked)
    files = {}
    for sibling in siblings:
        path = sibling.get("rfilename") if isinstance(sibling, dict) else None
        if not isinstance(path, str):
            raise _bad(asked)
        large = sibling.get("lfs")
        oid = large.get("sha256") if isinstance(large, dict) else None
        files[path] = file_entry(path, sibling.get("size"), oid, sibling.get("blobId"))
    counted = info.get("safetensors")
    parameters = counted.get("total") if isinstance(counted, dict) else None
    return RepoFiles(
        _text(info.get("id")) or asked,
        commit,
        files,
        parameters if type(parameters) is int and parameters > 0 else None,
        info.get("gated") not in (None, False),
        _text(info.get("lastModified")),
    )


def refusal(
    response: aiohttp.ClientResponse, repo: str, revision: str, endpoint: str, *, token: bool
) -> ScreeningError:
    """The error that a final status other than 2xx and 3xx of the Hub means.

    The Hub names its reasons in ``X-Error-Code``; without one, 401 to a request without a token stands for a
    repository that is missing or private (it does not tell which), and 401 with an ``X-Error-Message`` to one
    with a token for a token that it does not accept.
    """
    status, code = response.status, response.headers.get("X-Error-Code", "")
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
            f"{response.url.host} does not accept the token ({reason}); log in again (hf auth login), "
            "correct HF_TOKEN, or unset it for public repositories",
        )
    if code == "RepoNotFound" or status in (401, 404):
        return ScreeningError(
            "RepoNotFound", f"{repo} is not on {endpoint}, or it is private; check the name, or {login}"
        )
    if status in (403, 451):
        return ScreeningError(
            "AccessDenied", f"{response.url.host} refuses access to {repo} ({status}); {login}"
        )
    return ScreeningError("ServerError", f"{response.url.host} answered {status} for {repo}; try again later")


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
    if entry.size is None and "Location" not in headers:
        # It is kept: no page that a proxy puts in between may stand for a file or for its size.
        versioned = any(name in headers for name in ("X-Repo-Commit", "X-Linked-ETag", "ETag"))
        page = headers.get("Content-Type", "").startswith("text/html") and not entry.path.endswith("html")
        if page or not versioned:
            return f"expected the file with its version, got {'a page' if page else 'neither'}"
    if size and entry.size is not None and size != str(entry.size):
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


def resolved_entry(headers: Mapping[str, str], entry: FileEntry, *, final: bool) -> FileEntry:
    """A file as its listing and the answer of `resolve` together know it.

    The digest of a small file is its ETag, which the redirect to its content carries in the address.
    """
    size = headers.get("X-Linked-Size") or (headers.get("Content-Length") if final else None)
    tag = headers.get("X-Linked-ETag") or headers.get("ETag")
    if tag is None and (
        in_address := re.search(r"[?&]etag=(?:%22)?([0-9a-f]+)", headers.get("Location", ""))
    ):
        tag = in_address[1]
    digest = re.sub(r'^W/|"', "", tag or "")
    known = file_entry(entry.path, int(size) if size and size.isdigit() else None, digest, digest)
    return FileEntry(
        entry.path,
        known.size if entry.size is None else entry.size,
        entry.digest or known.digest,
    )


def file_entry(path: str, size: Any, sha256: Any, oid: Any) -> FileEntry:
    """A file as the Hub names it; sizes and digests that are none count as unknown."""
    digest = None
    if isinstance(sha256, str) and _SHA256.fullmatch(sha256):
        digest = f"sha256:{sha256}"
    elif isinstance(oid, str) and _COMMIT.fullmatch(oid):
        digest = f"git:{oid}"
    return FileEntry(path, size if type(size) is int and size >= 0 else None, digest)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _parsed(body: bytes, kind: type, asked: str) -> Any:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise _bad(asked) from None
    if not isinstance(value, kind):
        raise _bad(asked)
    return value


def _bad(asked: str) -> ScreeningError:
    return ScreeningError(
        "BadResponse",
        f"the server's answer about {asked} is not the Hub's JSON; check HF_ENDPOINT and any proxy",
    )
