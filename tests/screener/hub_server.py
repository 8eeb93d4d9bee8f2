"""A Hub of our own on loopback: two servers, one that resolves and one that delivers, as the real one has.

Modelled on huggingface_hub's source and the Hub's documentation: resolve redirects large files to signed,
expiring addresses on another host, whose signature covers the range if the resolve request carried one;
small files go through a relative redirect; text comes gzip'ed; listings come in pages; renamed repositories
redirect; private ones look missing, gated ones list but do not deliver; every answer says what is left.
Files may be sparse and of any size. Digests of files over 64 MB are made up: no range can check them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from hub_wire import Loopback, Reply, Request, compressed, error, ranged

SECRET = b"loopback"
VERBS = ("resolve", "revision", "tree", "refs")
LARGE = (".safetensors", ".bin", ".gguf", ".h5", ".pth", ".model", ".parquet")


@dataclass
class Repository:
    """The commits under one name, and what lists and gates know of it."""

    commits: dict[str, Path] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    parameters: int | None = None
    labels: Sequence[str] = ()
    changed: str = "2026-01-01T00:00:00.000Z"


class Quotas:
    """Fixed windows (requests, seconds) of the Hub's three buckets; redirects count as what they lead to.

    A bucket that is not named has the Hub's own for free accounts, and next to no limit where none is.
    """

    def __init__(self, quotas: Mapping[str, tuple[int, float]]) -> None:
        usual = {"api": (1000, 300.0), "resolvers": (5000, 300.0), "pages": (200, 300.0)}
        unlimited = {} if quotas else {"pages": (10_000, 300.0), "api": (10_000, 300.0)}
        self.quotas = {**usual, **unlimited, **quotas}
        self.used = dict.fromkeys(self.quotas, 0)
        self.refusals = dict.fromkeys(self.quotas, 0)
        self.begun = dict.fromkeys(self.quotas, time.monotonic())

    def counted(self, path: str, reply: Reply) -> Reply:
        """The reply with the headers that say what is left, or the Hub's 429, which has no Retry-After."""
        name = "api" if path.startswith("/api/") else "pages"
        if "/resolve/" in path or path.startswith("/api/resolve-cache/"):
            name = "resolvers"
        most, window = self.quotas[name]
        now = time.monotonic()
        if now - self.begun[name] >= window:
            self.begun[name] += (now - self.begun[name]) // window * window
            self.used[name] = 0
        self.used[name] += 1
        left = most - self.used[name]
        if left < 0:
            self.refusals[name] += 1
            reply = Reply(
                429, {"Content-Type": "text/html"}, b"<!doctype html><h1>429</h1>Too many requests"
            )
        limits = {
            "RateLimit": f'"{name}";r={max(left, 0)};t={math.ceil(self.begun[name] + window - now)}',
            "RateLimit-Policy": f'"fixed window";"{name}";q={most};w={math.ceil(window)}',
        }
        return replace(reply, headers={**reply.headers, **limits})


class HubServer(Loopback):
    """See the module's text; settings are its attributes, and quotas those of `Quotas`."""

    ports = 2
    token = "hf_opensesame"  # opens private and gated repositories
    expired = "hf_yesterday"  # opens nothing, not even public ones
    any_range = (
        True  # whether an address resolved without Range serves every range, as the Hub's do
    )
    page = 1000  # files per page of the tree, repositories per page of a list
    # Whether the listing has sizes, and small files lie behind a redirect: not with all mirrors.
    blobs_in_api = texts_apart = True

    def __init__(
        self, *, quotas: Mapping[str, tuple[int, float]] | None = None, **settings: Any
    ) -> None:
        super().__init__()
        for name, value in settings.items():
            assert hasattr(self, name), name
            setattr(self, name, value)
        self.quotas = Quotas(quotas or {})
        self.repositories: dict[str, Repository] = {}
        self.renamed: dict[str, str] = {}
        self._digests: dict[tuple[Path, int, int], str] = {}
        self._delivered: dict[str, Path] = {}

    def add(
        self,
        name: str,
        folder: Path,
        *,
        branch: str = "main",
        tag: str | None = None,
        **settings: Any,
    ) -> str:
        """Serve a folder as the head of a branch, or as a tag; the commit, 40 hex digits.

        A dataset's name begins with ``datasets/``. Settings are those of a `Repository`.
        """
        before = self.repositories.get(name, Repository())
        repository = Repository(before.commits, before.branches, before.tags, **settings)
        self.repositories[name] = repository
        commit = hashlib.sha1(
            f"{name} {branch} {tag} {len(repository.commits)}".encode()
        ).hexdigest()
        repository.commits[commit] = Path(folder)
        (repository.tags if tag else repository.branches)[tag or branch] = commit
        return commit

    def rename(self, old: str, new: str) -> None:
        """Redirect requests for an old name, as after a rename; what was there keeps its commits."""
        self.renamed[old] = new
        if old in self.repositories:
            self.repositories[new] = self.repositories.pop(old)

    def usual(self, request: Request) -> Reply:
        """The reply without faults; see `Loopback`."""
        if request.on_cdn:
            request.part, reply = self._cdn(request)
            return reply
        request.part, reply = self._hub(request)
        return self.quotas.counted(request.path, reply)

    def _hub(self, request: Request) -> tuple[str, Reply]:
        path = request.path
        if request.headers.get("authorization") == f"Bearer {self.expired}":
            message = "Invalid credentials in Authorization header"
            return "api", Reply(401, {"X-Error-Message": message}, message.encode())
        if path == "/api/models":
            return "list", self._list(request)
        if path.startswith("/api/resolve-cache/") and self.texts_apart:
            name, (commit, *file) = split_name(path.removeprefix("/api/resolve-cache/"))
            return "resolve", self._content(request, name, commit, "/".join(file))
        is_api = path.startswith(("/api/models/", "/api/datasets/"))
        asked, rest = split_name(path.removeprefix("/api/" if is_api else "/"))
        verb, *tail = rest or [""]
        part = "api" if is_api else verb or "page"
        name = self.renamed.get(asked) or asked
        if name not in self.repositories:
            name = next(
                (known for known in self.repositories if known.lower() == name.lower()), name
            )
        if name != asked:
            # Percent-escapes stay as they came: a revision may hold an escaped slash.
            return part, Reply(307, {"Location": request.target.replace(asked, name, 1)})
        repository = self.repositories.get(name)
        entitled = request.headers.get("authorization") == f"Bearer {self.token}"
        if repository is None or (repository.private and not entitled):
            if "authorization" in request.headers:
                return part, error(404, "RepoNotFound", "Repository not found")
            return part, Reply(401, {}, b"Invalid username or password.")
        if verb == "refs":
            refs = {
                kind: [
                    {"name": n, "ref": f"refs/{kind}/{n}", "targetCommit": c}
                    for n, c in pairs.items()
                ]
                for kind, pairs in (("branches", repository.branches), ("tags", repository.tags))
            }
            return part, self._json(request, {**refs, "converts": []})
        revision = unquote(tail[0]) if tail else "main"
        commit = repository.branches.get(revision) or repository.tags.get(revision) or revision
        if len(commit) < 40:
            commit = next(
                (c for c in repository.commits if len(commit) > 6 and c.startswith(commit)), commit
            )
        if commit not in repository.commits:
            return part, error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if part == "api":
            if verb == "tree":
                return part, self._paged(request, self._entries(name, commit))
            return part, self._json(request, self._info(name, commit, "blobs" in request.query))
        if repository.gated and not entitled:
            status = 403 if "authorization" in request.headers else 401
            return part, error(status, "GatedRepo", f"Access to model {name} is restricted.")
        file = "/".join(tail[1:])
        return part, self._resolve(request, name, commit, file)

    def _signed(self, place: Path, path: str, covered: str, headers: Mapping[str, str]) -> Reply:
        """The redirect to where a file is delivered for some time."""
        self._delivered[unquote(path)] = place
        address = f"{path}?expires={time.time() + 3600}&range={quote(covered)}"
        return Reply(
            302, {**headers, "Location": f"{self.addresses[1]}{address}&signature={sign(address)}"}
        )

    def _resolve(self, request: Request, name: str, commit: str, file: str) -> Reply:
        place = self.repositories[name].commits[commit] / unquote(file)
        if not place.is_file():
            return error(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        headers = {"X-Repo-Commit": commit, "ETag": f'"{self.digest(place)}"'}
        if not self.is_large(place) and not self.texts_apart:
            return self._content(request, name, commit, file)
        if not self.is_large(place):
            kind = "" if name.startswith("datasets/") else "models/"
            place_of_it = (
                f"/api/resolve-cache/{kind}{name}/{commit}/{file}?etag={quote(headers['ETag'])}"
            )
            return Reply(307, {"X-Repo-Commit": commit, "Location": place_of_it})
        covered = request.headers.get("range", "" if self.any_range else "none")
        headers |= {
            "X-Linked-Size": str(place.stat().st_size),
            "X-Linked-ETag": f'"{self.digest(place)}"',
        }
        return self._signed(place, f"/{name}/{commit}/{file}", covered, headers)

    def _cdn(self, request: Request) -> tuple[str, Reply]:
        address, _, signature = request.target.rpartition("&signature=")
        if not hmac.compare_digest(signature, sign(address)):
            return "cdn", Reply(403, {}, b"SignatureDoesNotMatch")
        covered = request.query.get("range", [""])[0]
        if covered and covered != request.headers.get("range"):
            return "cdn", Reply(403, {}, b"Auth failed: invalid range")
        place = self._delivered[request.path]
        return "cdn", ranged(
            request, place, {"ETag": f'"{self.digest(place)}"', "Accept-Ranges": "bytes"}
        )

    def _content(self, request: Request, name: str, commit: str, file: str) -> Reply:
        place = self.repositories[name].commits[commit] / unquote(file)
        if not place.is_file():
            return error(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        headers = {"X-Repo-Commit": commit, "ETag": f'"{self.digest(place)}"'}
        if self.is_large(place):
            pointer = f"oid sha256:{self.digest(place)}\nsize {place.stat().st_size}\n"
            return Reply(
                200, headers, f"version https://git-lfs.github.com/spec/v1\n{pointer}".encode()
            )
        if "range" in request.headers:
            return ranged(request, place, headers)
        return compressed(request, Reply(200, headers, place.read_bytes()))

    def _info(self, name: str, commit: str, blobs: bool) -> Mapping[str, object]:
        repository = self.repositories[name]
        siblings = []
        for entry in self._entries(name, commit):
            sibling = {"rfilename": entry["path"]}
            if blobs and self.blobs_in_api:
                sibling |= {"blobId": entry["oid"], "size": entry["size"]}
                if len(entry["oid"]) == 64:
                    sibling["lfs"] = {
                        "sha256": entry["oid"],
                        "size": entry["size"],
                        "pointerSize": 135,
                    }
            siblings.append(sibling)
        info = {
            "_id": "6" * 24,
            "id": name.removeprefix("datasets/"),
            "sha": commit,
            "siblings": siblings,
        }
        if repository.parameters:
            info["safetensors"] = {"total": repository.parameters}
        gated = "auto" if repository.gated else False
        return {
            **info,
            "private": repository.private,
            "gated": gated,
            "tags": list(repository.labels),
        }

    def _list(self, request: Request) -> Reply:
        """Repositories by author, words and tags, the last changed first if asked so; without sizes."""
        asked, found = request.query, []
        entitled = request.headers.get("authorization") == f"Bearer {self.token}"
        for name, repository in self.repositories.items():
            author = asked.get("author", [name.partition("/")[0]])[0]
            words = asked.get("search", [""])[0].lower()
            labelled = all(tag in repository.labels for tag in asked.get("filter", []))
            visible = entitled or not repository.private
            if visible and labelled and name.startswith(f"{author}/") and words in name.lower():
                found.append((repository.changed, name))
        if asked.get("sort") == ["lastModified"]:
            found.sort(key=lambda item: item[0], reverse=True)
        size = min(int(asked.get("limit", ["1000"])[0]), self.page)
        return self._paged(
            request, [self._listed(n, asked.get("expand", [])) for _, n in found], size
        )

    def _listed(self, name: str, expand: Sequence[str]) -> Mapping[str, object]:
        repository, everything = self.repositories[name], {}
        if commit := repository.branches.get("main"):
            everything = {**self._info(name, commit, False), "lastModified": repository.changed}
        return {"_id": "6" * 24, "id": name, **{k: v for k, v in everything.items() if k in expand}}

    def _entries(self, name: str, commit: str) -> list[dict[str, Any]]:
        folder = self.repositories[name].commits[commit]
        entries = []
        for place in sorted(p for p in folder.rglob("*") if p.is_file()):
            size, digest = place.stat().st_size, self.digest(place)
            path = place.relative_to(folder).as_posix()
            entry: dict[str, Any] = {"type": "file", "path": path, "size": size, "oid": digest}
            if self.is_large(place):
                entry["lfs"] = {"oid": digest, "size": size, "pointerSize": 135}
            entries.append(entry)
        return entries

    def _paged(self, request: Request, entries: Sequence[object], size: int = 0) -> Reply:
        """The page that a cursor names, and the link to the next one."""
        size = size or self.page
        start = int(request.query.get("cursor", ["0"])[0])
        reply = self._json(request, entries[start : start + size])
        if start + size < len(entries):
            query = "&".join(
                p for p in request.target.partition("?")[2].split("&") if "cursor=" not in p
            )
            following = f"{self.endpoint}{request.path}?{query}&cursor={start + size}"
            reply.headers["Link"] = f'<{following}>; rel="next"'
        return reply

    def is_large(self, place: Path) -> bool:
        """Whether a file is kept outside git, behind a redirect to the other host."""
        return place.suffix in LARGE or place.stat().st_size > 10_000_000

    def digest(self, place: Path) -> str:
        """sha256 of a large file, git blob id of a small one."""
        stat = place.stat()
        key = (place, stat.st_size, stat.st_mtime_ns)
        if key not in self._digests:
            if stat.st_size > 64_000_000:
                digest = hashlib.sha256(str(key).encode()).hexdigest()
            elif self.is_large(place):
                digest = hashlib.sha256(place.read_bytes()).hexdigest()
            else:
                digest = hashlib.sha1(b"blob %d\0" % stat.st_size + place.read_bytes()).hexdigest()
            self._digests[key] = digest
        return self._digests[key]

    def _json(self, request: Request, value: object) -> Reply:
        kind = {"Content-Type": "application/json"}
        return compressed(request, Reply(200, kind, json.dumps(value).encode()))


def split_name(path: str) -> tuple[str, list[str]]:
    """The name of a repository at the beginning of a path, and the parts behind it."""
    pieces = path.removeprefix("models/").split("/")
    cut = 2 if len(pieces) > 1 and pieces[1] not in VERBS else 1
    cut = 3 if pieces[0] == "datasets" else cut
    return "/".join(pieces[:cut]), pieces[cut:]


def sign(address: str) -> str:
    return hmac.new(SECRET, address.encode(), "sha256").hexdigest()
