"""A plain web server of a folder on loopback, with ranges, ETags and conditions, and with faults."""

from __future__ import annotations

import hashlib
from pathlib import Path

from faulty_proxy import FaultyProxy
from hub_wire import Reply, Request, ranged


class WebServer(FaultyProxy):
    """Files of a folder by their paths.

    Args:
        folder: What is served.
        secret: A value of ``?signature=`` without which nothing is; None for no such thing.
    """

    def __init__(self, folder: Path, *, secret: str | None = None) -> None:
        super().__init__(0)
        self.folder, self.secret = folder, secret

    def usual(self, request: Request) -> Reply:
        place = self.folder / request.path.lstrip("/")
        if self.secret is not None and request.query.get("signature") != [self.secret]:
            return Reply(403, {}, b"<Error><Code>AccessDenied</Code></Error>")
        if not place.is_file():
            return Reply(404, {"Content-Type": "text/html"}, b"<h1>Not found</h1>")
        etag = f'"{hashlib.md5(place.read_bytes()).hexdigest()}"'
        if request.headers.get("if-match", etag) != etag:
            return Reply(412, {}, b"changed")
        return ranged(request, place, {"ETag": etag, "Accept-Ranges": "bytes"})
