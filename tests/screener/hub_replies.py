"""Replies of `hub_server`: signed addresses, errors, compressed text, files and ranges of them."""

from __future__ import annotations

import gzip
import hmac
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hub_wire import Reply, Request

SECRET = b"loopback"


def sign(address: str) -> str:
    return hmac.new(SECRET, address.encode(), "sha256").hexdigest()


def error(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> Reply:
    named = {"X-Error-Code": code, "X-Error-Message": message, **(headers or {})}
    return Reply(status, named, json.dumps({"error": message}).encode())


def compressed(request: Request, reply: Reply) -> Reply:
    if "gzip" not in request.headers.get("accept-encoding", "") or len(reply.body) < 200:
        return reply
    headers = {**reply.headers, "Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
    return replace(reply, headers=headers, body=gzip.compress(reply.body, 6))


def ranged(request: Request, place: Path, headers: Mapping[str, str]) -> Reply:
    """A file, or the range of it that was asked for."""
    size = place.stat().st_size
    asked = request.headers.get("range", "")
    if not asked.startswith("bytes=") or "," in asked:
        return Reply(200, dict(headers), place=place, begin=0, end=size)
    first, _, last = asked.removeprefix("bytes=").partition("-")
    begin = int(first) if first else size - int(last)
    end = min(int(last) + 1, size) if first and last else size
    if begin >= end:
        return Reply(416, {**headers, "Content-Range": f"bytes */{size}"})
    where = {**headers, "Content-Range": f"bytes {begin}-{end - 1}/{size}"}
    return Reply(206, where, place=place, begin=begin, end=end)
