"""Ways in which a delivery goes wrong, for `HubServer.fault`."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import replace

from hub_wire import Reply, Request

Change = Callable[[Reply, Request], Reply]
HTML = b"<!doctype html><title>Please wait</title><h1>Something is being checked</h1>"


def status(code: int, headers: dict[str, str] | None = None, body: bytes = HTML) -> Change:
    """Another status, an HTML page for a body."""
    return lambda reply, request: Reply(code, {"Content-Type": "text/html", **(headers or {})}, body)


def closed(*, reset: bool = False) -> Change:
    """The connection ends before anything is said."""
    return lambda reply, request: replace(reply, cut=-1, reset=reset)


def truncated(after: int, *, reset: bool = False) -> Change:
    """The body breaks off after some bytes."""
    return lambda reply, request: replace(reply, cut=after, reset=reset)


def shorter(by: int) -> Change:
    """A body that is too short and says so: Content-Length contradicts Content-Range."""
    return lambda reply, request: replace(reply, end=reply.end - by)


def shifted(by: int) -> Change:
    """The range before or after the one that was asked for."""

    def change(reply: Reply, request: Request) -> Reply:
        if reply.begin + by < 0:
            return reply
        begin, end = reply.begin + by, reply.end + by
        total = reply.headers["Content-Range"].rpartition("/")[2]
        where = {**reply.headers, "Content-Range": f"bytes {begin}-{end - 1}/{total}"}
        return replace(reply, headers=where, begin=begin, end=end)

    return change


def whole(reply: Reply, request: Request) -> Reply:
    """200 and the whole file: Range was ignored."""
    headers = {k: v for k, v in reply.headers.items() if k != "Content-Range"}
    assert reply.place is not None
    return Reply(200, headers, place=reply.place, begin=0, end=reply.place.stat().st_size)


def header(name: str, value: str) -> Change:
    """One header says something else."""
    return lambda reply, request: replace(reply, headers={**reply.headers, name: value})


def without(name: str) -> Change:
    """One header is missing."""
    return lambda reply, request: replace(
        reply, headers={k: v for k, v in reply.headers.items() if k.lower() != name.lower()}
    )


def zipped(reply: Reply, request: Request) -> Reply:
    """A range that is compressed on its way."""
    assert reply.place is not None
    with reply.place.open("rb") as file:
        file.seek(reply.begin)
        body = gzip.compress(file.read(reply.end - reply.begin))
    return replace(reply, headers={**reply.headers, "Content-Encoding": "gzip"}, body=body, place=None)


def content(body: bytes) -> Change:
    """Other bytes under the same headers."""
    return lambda reply, request: replace(reply, body=body, place=None)


def drip(seconds: float) -> Change:
    """One byte at a time."""
    return lambda reply, request: replace(reply, drip=seconds)


def stalled(seconds: float) -> Change:
    """Silence."""
    return lambda reply, request: replace(reply, stall=seconds)
