"""What makes an answer acceptable: nothing is read from one that contradicts what was asked or listed.

There is no checksum of a range, so these checks are all that stands between a faulty server and wrong rows.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from lmeval_screener.checkpoints.snapshot import FileEntry


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
    if size and size != str(entry.size):
        return f"expected {entry.size} bytes, got {size}"
    if headers.get("X-Repo-Commit", commit) != commit:
        return f"expected commit {commit}, got {headers.get('X-Repo-Commit')}"
    hashed = re.fullmatch(r'(?:W/)?"?([0-9a-f]{64})"?', headers.get("X-Linked-ETag", ""))
    if hashed and (entry.digest or "").startswith("sha256:") and entry.digest != f"sha256:{hashed[1]}":
        return f"expected {entry.digest}, got sha256:{hashed[1]}"
    return None


def fits(entry: FileEntry, body: bytes) -> bool:
    """Whether a whole content is the listed one, by size and digest."""
    kind, _, digest = (entry.digest or "").partition(":")
    if entry.size is not None and len(body) != entry.size:
        return False
    if kind == "sha256":
        return hashlib.sha256(body).hexdigest() == digest
    if kind == "git":
        return hashlib.sha1(b"blob %d\0" % len(body) + body, usedforsecurity=False).hexdigest() == digest
    return True
