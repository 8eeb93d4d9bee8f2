"""The Hub's answers: listings as files, refusals as named errors, and which of them are to be believed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lmeval_screener.checkpoints import FileEntry
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
    """Files from ``/api/models/{repo}/revision/{revision}?blobs=true``."""
    # Whether its files can be had is for their server to say: a mirror may have a token of its own.
    return replace(_listing(_object(body, asked), asked), gated=False, changed="")


def parse_page(body: bytes, asked: str) -> list[RepoSummary]:
    """Repositories from one page of ``/api/models?expand=sha&expand=siblings&…``."""
    return [
        RepoSummary(
            info["id"],
            _text(info.get("lastModified")),
            # A repository without a commit is empty, and listed nevertheless.
            _listing(info, info["id"]) if info.get("sha") and info.get("siblings") is not None else None,
        )
        for info in _items(_parsed(body, asked), "id", asked)
    ]


def parse_collection(body: bytes, asked: str) -> tuple[list[RepoSummary], int]:
    """Models of ``/api/collections/{slug}``, and how many of its items are none."""
    items = _items(_object(body, asked).get("items"), "type", asked)
    models = [item for item in items if item["type"] == "model" and isinstance(item.get("id"), str)]
    summaries = [RepoSummary(model["id"], _text(model.get("lastModified")), None) for model in models]
    return summaries, len(items) - len(models)


def parse_tree(body: bytes, asked: str) -> dict[str, FileEntry]:
    """Files from one page of ``/api/models/{repo}/tree/{revision}?recursive=true``."""
    return {
        item["path"]: file_entry(item["path"], item.get("size"), _in(item, "lfs", "oid"), item.get("oid"))
        for item in _items(_parsed(body, asked), "path", asked)
        if item.get("type") == "file"
    }


def parse_folder(body: bytes, asked: str) -> list[dict[str, Any]]:
    """Items of one page of ``/api/buckets/{name}/tree/{folder}``."""
    return _items(_parsed(body, asked), "path", asked)


def parse_references(body: bytes, asked: str) -> list[str]:
    """Names of branches and tags from ``/api/models/{repo}/refs``."""
    refs = _object(body, asked)
    kinds = (_items(refs.get(kind) or [], "name", asked) for kind in ("branches", "tags"))
    return list(dict.fromkeys(ref["name"] for kind in kinds for ref in kind))


def _listing(info: Mapping[str, Any], asked: str) -> RepoFiles:
    commit, parameters = info.get("sha"), _in(info, "safetensors", "total")
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise _bad(asked)
    files = {
        path: file_entry(path, item.get("size"), _in(item, "lfs", "sha256"), item.get("blobId"))
        for item in _items(info.get("siblings", []), "rfilename", asked)
        if (path := item["rfilename"])
    }
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


def _in(item: Mapping[str, Any], name: str, key: str) -> Any:
    inner = item.get(name)
    return inner.get(key) if isinstance(inner, dict) else None


def _items(value: Any, key: str, asked: str) -> list[dict[str, Any]]:
    """A list of objects that all have a text under a key."""
    if not isinstance(value, list) or not all(isinstance(i, dict) and _text(i.get(key)) for i in value):
        raise _bad(asked)
    return value


def _object(body: bytes, asked: str) -> dict[str, Any]:
    value = _parsed(body, asked)
    if not isinstance(value, dict):
        raise _bad(asked)
    return value


def _parsed(body: bytes, asked: str) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise _bad(asked) from None


def _bad(asked: str) -> ScreeningError:
    return ScreeningError(
        "BadResponse",
        f"the server's answer about {asked} is not the Hub's JSON; check HF_ENDPOINT and any proxy",
    )
