"""A server whose replies a test changes in front of a storage, and a plain web server of a folder."""

from __future__ import annotations

import hashlib
import http.client
import ssl
from pathlib import Path
from urllib.parse import unquote

from hub_wire import Loopback, Reply, Request, ranged


class FaultyProxy(Loopback):
    """A proxy in front of a port of loopback."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        super().__init__()
        self.port, self.tls = port, tls

    def ranges(self) -> list[Request]:
        """Requests for a range."""
        return [request for request in self.requests if "range" in request.headers]

    def usual(self, request: Request) -> Reply:
        """The answer of the server behind."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        # As it came, the Host too: signatures cover it.
        connection.putrequest(
            request.method, request.target, skip_host=True, skip_accept_encoding=True
        )
        for name, value in request.headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        dropped = (
            "content-length",
            "transfer-encoding",
            "connection",
            "keep-alive",
            "date",
            "server",
        )
        headers = {
            name: value for name, value in answer.getheaders() if name.lower() not in dropped
        }
        length = answer.getheader("Content-Length")
        body = answer.read()
        connection.close()
        is_head = request.method == "HEAD" and length is not None
        return Reply(answer.status, headers, body, length=int(length) if is_head else None)


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
        place = self.folder / unquote(request.path).lstrip("/")
        if self.secret is not None and request.query.get("signature") != [self.secret]:
            return Reply(403, {}, b"<Error><Code>AccessDenied</Code></Error>")
        if not place.is_file():
            return Reply(404, {"Content-Type": "text/html"}, b"<h1>Not found</h1>")
        etag = f'"{hashlib.md5(place.read_bytes()).hexdigest()}"'
        if request.headers.get("if-match", etag) != etag:
            return Reply(412, {}, b"changed")
        return ranged(request, place, {"ETag": etag, "Accept-Ranges": "bytes"})
