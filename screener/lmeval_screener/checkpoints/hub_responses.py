"""What the Hub's answers mean: listings as files, refusals as named errors, and which are to be believed.

There is no checksum of a range, so `range_problem` and `resolve_problem` are all that stands between a faulty
server and wrong rows: nothing is read from an answer that contradicts what was asked or listed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lmeval_screener.checkpoints.http import Answer
from lmeval_screener.checkpoints.snapshot import FileEntry
from lmeval_screener.errors import ScreeningError

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository at one commit.

    Attributes:
        repo: Its name after renames.
        commit: 40 hex digits.
        files: By path; sizes and digests are known where the listing says them, or a file was asked for.
        parameters: As the Hub counts them; None if it does not say.
        gated: Whether its files need accepted conditions; only a list of many repositories says it here.
        changed: When it changed last (ISO 8601, UTC), likewise; empty if nobody says.
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
    def from_json(cls, content: bytes) -> Listing:
        """The listing of an entry of the cache."""
        repo, commit, files, parameters = json.loads(content)
        return cls(
            repo, commit, {path: FileEntry(path, size, digest) for path, size, digest in files}, parameters
        )


class FileNames(Mapping[str, FileEntry]):
    """Files of which only the names are known, in a tenth of a dictionary's memory.

    Args:
        names: Paths; none holds a line break.
    """

    __slots__ = ("_lines",)

    def __init__(self, names: Iterable[str]) -> None:
        self._lines = "\n".join(["", *names, ""])

    def __getitem__(self, path: str) -> FileEntry:
        if "\n" in path or f"\n{path}\n" not in self._lines:
            raise KeyError(path)
        return FileEntry(path, None, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines[1:-1].split("\n") if len(self._lines) > 1 else ())

    def __len__(self) -> int:
        return max(self._lines.count("\n") - 1, 0)


def parse_listing(body: bytes, asked: str) -> Listing:
    """Listing from ``/api/models/{repo}/revision/{revision}?blobs=true``.

    Raises:
        ScreeningError: ``BadResponse`` if it is something else.
    """
    return _listing(_parsed(body, dict, asked), asked)


@dataclass(frozen=True, slots=True)
class Listed:
    """One repository of a list of many.

    Attributes:
        repo: Its name.
        changed: When it changed last, as the Hub writes it (ISO 8601, UTC); empty if it does not say.
        listing: Its files by name, without sizes; None where the list holds names only.
    """

    repo: str
    changed: str
    listing: Listing | None


def parse_page(body: bytes, asked: str) -> list[Listed]:
    """Repositories from one page of ``/api/models?expand=sha&expand=siblings&…``.

    Raises:
        ScreeningError: ``BadResponse`` if it is something else.
    """
    found = []
    for info in _parsed(body, list, asked):
        name = info.get("id") if isinstance(info, dict) else None
        if not isinstance(name, str) or not name:
            raise _bad(asked)
        # A repository without a commit is empty, and listed nevertheless.
        listing = None
        if info.get("sha") and info.get("siblings") is not None:
            listing = _listing(info, name)
            names = FileNames(path for path in listing.files if "\n" not in path)
            gated, changed = info.get("gated") not in (None, False), _text(info.get("lastModified"))
            listing = replace(listing, files=names, gated=gated, changed=changed)
        found.append(Listed(name, _text(info.get("lastModified")), listing))
    return found


def parse_collection(body: bytes, asked: str) -> tuple[list[Listed], int]:
    """Models of ``/api/collections/{slug}``, and how many of its items are none.

    Raises:
        ScreeningError: ``BadResponse`` if it is something else.
    """
    items = _parsed(body, dict, asked).get("items")
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise _bad(asked)
    models = [item for item in items if item.get("type") == "model" and isinstance(item.get("id"), str)]
    return [Listed(m["id"], _text(m.get("lastModified")), None) for m in models], len(items) - len(models)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _listing(info: Mapping[str, Any], asked: str) -> Listing:
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
        files[path] = _entry(path, sibling.get("size"), oid, sibling.get("blobId"))
    name, counted = info.get("id"), info.get("safetensors")
    parameters = counted.get("total") if isinstance(counted, dict) else None
    return Listing(
        name if isinstance(name, str) and name else asked,
        commit,
        files,
        parameters if type(parameters) is int and parameters > 0 else None,
    )


def parse_tree(body: bytes, asked: str) -> dict[str, FileEntry]:
    """Files from one page of ``/api/models/{repo}/tree/{revision}?recursive=true``.

    Raises:
        ScreeningError: ``BadResponse`` if it is something else.
    """
    files = {}
    for item in _parsed(body, list, asked):
        path = item.get("path") if isinstance(item, dict) else None
        if not isinstance(path, str):
            raise _bad(asked)
        if item.get("type") == "file":
            large = item.get("lfs")
            oid = large.get("oid") if isinstance(large, dict) else None
            files[path] = _entry(path, item.get("size"), oid, item.get("oid"))
    return files


def parse_references(body: bytes, asked: str) -> list[str]:
    """Names of branches and tags from ``/api/models/{repo}/refs``.

    Raises:
        ScreeningError: ``BadResponse`` if it is something else.
    """
    refs = _parsed(body, dict, asked)
    names = []
    for kind in ("branches", "tags"):
        listed = refs.get(kind) or []
        for ref in listed if isinstance(listed, list) else [None]:
            if not isinstance(ref, dict) or not isinstance(ref.get("name"), str):
                raise _bad(asked)
            names.append(ref["name"])
    return list(dict.fromkeys(names))


def refusal(response: Answer, repo: str, revision: str, endpoint: str, *, token: bool) -> ScreeningError:
    """What a final status other than 2xx and 3xx of the Hub means.

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
        said = "".join(sign for sign in response.headers["X-Error-Message"] if sign.isprintable())[:200]
        return ScreeningError(
            "BadToken",
            f"{response.url.host} does not accept the token ({said}); log in again (hf auth login), correct "
            "HF_TOKEN, or unset it for public repositories",
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


def range_problem(
    headers: Mapping[str, str], begin: int, end: int, size: int, etag: str | None
) -> str | None:
    """Why a 206 is not bytes ``[begin, end)`` of the file that is meant, as it is stored; None if it is.

    Args:
        headers: Of the answer; looked up without regard to case.
        begin: First byte asked for.
        end: Byte after the last one asked for.
        size: Size of the whole file.
        etag: ETag of earlier ranges of the same file from the same address; None if there was none.
    """
    expected = f"bytes {begin}-{end - 1}/{size}"
    if (got := headers.get("Content-Range")) != expected:
        return f"expected Content-Range {expected!r}, got {got!r}"
    if (length := headers.get("Content-Length", str(end - begin))) != str(end - begin):
        return f"expected {end - begin} bytes, got Content-Length {length}"
    if (encoding := headers.get("Content-Encoding", "identity")) != "identity":
        return f"the range came with Content-Encoding {encoding}"
    if headers.get("Content-Type", "").startswith("text/html"):
        return "the body is a web page"
    if etag and headers.get("ETag", etag) != etag:
        return f"the ETag changed from {etag} to {headers.get('ETag')}"
    return None


def resolve_problem(
    headers: Mapping[str, str], entry: FileEntry, commit: str | None, *, final: bool
) -> str | None:
    """Why what a file resolves to is not the file that was listed; None if it is.

    Args:
        headers: Of the answer to HEAD; looked up without regard to case.
        entry: The file as listed.
        commit: The commit that was asked for.
        final: Whether the answer is of the file itself, not a redirect.
    """
    size = headers.get("X-Linked-Size") or (headers.get("Content-Length") if final else None)
    if entry.size is None and "Location" not in headers:
        # What comes here is kept: no page that a proxy puts in between may stand for a file or for its size.
        told = any(name in headers for name in ("X-Repo-Commit", "X-Linked-ETag", "ETag"))
        page = headers.get("Content-Type", "").startswith("text/html") and not entry.path.endswith("html")
        if page or not told:
            return f"expected the file with its version, got {'a page' if page else 'neither'}"
    if size and entry.size is not None and size != str(entry.size):
        return f"expected {entry.size} bytes, got {size}"
    if headers.get("X-Repo-Commit", commit) != commit:
        return f"expected commit {commit}, got {headers.get('X-Repo-Commit')}"
    hashed = re.fullmatch(r'(?:W/)?"?([0-9a-f]{64})"?', headers.get("X-Linked-ETag", ""))
    if hashed and (entry.digest or "").startswith("sha256:") and entry.digest != f"sha256:{hashed[1]}":
        return f"expected {entry.digest}, got sha256:{hashed[1]}"
    return None


def resolved_entry(headers: Mapping[str, str], entry: FileEntry, *, final: bool) -> FileEntry:
    """A file as its listing and the answer of `resolve` together know it.

    The digest of a small file is its ETag, which the redirect to its content carries in the address.

    Args:
        headers: Of the answer; looked up without regard to case.
        entry: The file as listed, maybe without size and digest.
        final: Whether the answer is of the file itself, not a redirect.
    """
    size = headers.get("X-Linked-Size") or (headers.get("Content-Length") if final else None)
    tag = headers.get("X-Linked-ETag") or headers.get("ETag")
    if tag is None and (found := re.search(r"[?&]etag=(?:%22)?([0-9a-f]+)", headers.get("Location", ""))):
        tag = found[1]
    digest = re.sub(r'^W/|"', "", tag or "")
    known = _entry(entry.path, int(size) if size and size.isdigit() else None, digest, digest)
    return FileEntry(
        entry.path,
        known.size if entry.size is None else entry.size,
        entry.digest or known.digest,
    )


def _entry(path: str, size: Any, sha256: Any, oid: Any) -> FileEntry:
    digest = None
    if isinstance(sha256, str) and _SHA256.fullmatch(sha256):
        digest = f"sha256:{sha256}"
    elif isinstance(oid, str) and _COMMIT.fullmatch(oid):
        digest = f"git:{oid}"
    return FileEntry(path, size if type(size) is int and size >= 0 else None, digest)


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
