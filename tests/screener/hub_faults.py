"""Ways in which a delivery goes wrong, for `Loopback.fault`."""

from __future__ import annotations

import gzip
from dataclasses import replace

from hub_wire import Change, Reply, Request

HTML = b"<!doctype html><title>Please wait</title><h1>Something is being checked</h1>"


def status(code: int, headers: dict[str, str] | None = None, body: bytes = HTML) -> Change:
    """Another status, an HTML page for a body."""
    return lambda reply, request: Reply(
        code, {"Content-Type": "text/html", **(headers or {})}, body
    )


def closed(*, reset: bool = False) -> Change:
    """The connection ends before anything is said."""
    return truncated(-1, reset=reset)


def truncated(after: int, *, reset: bool = False) -> Change:
    """The body breaks off after some bytes."""
    return lambda reply, request: replace(reply, cut=after, reset=reset)


def longer(by: int) -> Change:
    """A range with more bytes than were asked for, or fewer: Content-Length contradicts Content-Range."""
    return lambda reply, request: replace(reply, end=reply.end + by)


def claimed(by: int) -> Change:
    """A Content-Length that is not the body's."""
    return lambda reply, request: replace(reply, length=max(reply.size + by, 0))


def shifted(by: int, longer: int = 0) -> Change:
    """A range beside the one that was asked for, or of a longer file, which says so."""

    def change(reply: Reply, request: Request) -> Reply:
        where = next((v for k, v in reply.headers.items() if k.lower() == "content-range"), None)
        if where is None or reply.begin + by < 0:
            return reply
        span, _, total = where.removeprefix("bytes ").partition("/")
        begin, end = (int(part) + by for part in span.split("-"))
        moved = replace(reply, begin=reply.begin + by, end=reply.end + by)
        return header("Content-Range", f"bytes {begin}-{end}/{int(total) + longer}")(moved, request)

    return change


def whole(reply: Reply, request: Request) -> Reply:
    """200 for a range: the whole file, where it is at hand."""
    end = reply.place.stat().st_size if reply.place else 0
    return without("Content-Range")(replace(reply, status=200, begin=0, end=end), request)


def header(name: str, value: str) -> Change:
    """One header says something else."""
    return lambda reply, request: replace(
        reply, headers={**without(name)(reply, request).headers, name: value}
    )


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
    return replace(
        reply, headers={**reply.headers, "Content-Encoding": "gzip"}, body=body, place=None
    )


def content(body: bytes) -> Change:
    """Other bytes under the same headers."""
    return lambda reply, request: replace(reply, body=body, place=None)


def drip(seconds: float) -> Change:
    """One byte at a time."""
    return lambda reply, request: replace(reply, drip=seconds)


def stalled(seconds: float) -> Change:
    """Silence."""
    return lambda reply, request: replace(reply, stall=seconds)
