"""A server in front of another one, whose replies a test changes: the faults of the Hub for any storage.

with FaultyProxy(port) as proxy:
    proxy.fault(truncated(7), times=1)      # the next reply breaks off
    …                                       # the storage's endpoint: proxy.endpoint
    proxy.requests                          # what arrived
"""

from __future__ import annotations

import asyncio
import fnmatch
import http.client
import threading
from collections.abc import Callable
from dataclasses import replace
from urllib.parse import unquote

import hub_faults
from hub_wire import Connection, Line, Reply, Request

Change = Callable[[Reply, Request], Reply]


class FaultyProxy:
    """See the module's text.

    Args:
        port: Of the server behind, on loopback.
    """

    latency = bandwidth = 0.0
    tls = None

    def __init__(self, port: int) -> None:
        self.port = port
        self.requests: list[Request] = []
        self._open: list[Connection] = []
        self.sent = 0
        self.connections = [0, 0]
        self._faults: list[tuple[Change, str, list[int]]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> FaultyProxy:
        self._thread.start()
        listening = asyncio.run_coroutine_threadsafe(self._listen(), self._loop)
        self.endpoint = f"http://127.0.0.1:{listening.result()}"
        return self

    async def _listen(self) -> int:
        line = Line(self)

        def connection() -> Connection:
            self._open.append(Connection(self, line, False))
            return self._open[-1]

        self._server = await self._loop.create_server(connection, "127.0.0.1", 0, backlog=1024)
        return int(self._server.sockets[0].getsockname()[1])

    def __exit__(self, *_: object) -> None:
        async def stop() -> None:
            self._server.close()
            for connection in self._open:  # clients keep theirs for later
                connection.transport.abort()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def fault(self, change: Change, *, match: str = "*", times: int = -1) -> None:
        """Change the replies to requests whose target matches, `times` times (-1: always)."""
        self._faults.append((change, match, [times]))

    def heal(self) -> None:
        """No more faults."""
        self._faults.clear()
        self.requests.clear()

    def ranges(self) -> list[Request]:
        """Requests for a range."""
        return [request for request in self.requests if "range" in request.headers]

    def reply(self, request: Request) -> Reply:
        self.requests.append(request)
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        # As it came, the Host too: signatures cover it.
        connection.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
        for name, value in request.headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        dropped = ("content-length", "transfer-encoding", "connection", "keep-alive", "date", "server")
        headers = {name: value for name, value in answer.getheaders() if name.lower() not in dropped}
        length = answer.getheader("Content-Length")
        body = answer.read()
        connection.close()
        is_head = request.method == "HEAD" and length is not None
        reply = Reply(answer.status, headers, body, length=int(length) if is_head else None)
        for change, match, left in self._faults:
            if left[0] and fnmatch.fnmatch(unquote(request.target), match):
                left[0] -= 1
                return change(reply, request)
        return reply


def shifted(by: int) -> Change:
    """A range beside the one that was asked for, which says so."""

    def change(reply: Reply, request: Request) -> Reply:
        where = next((v for k, v in reply.headers.items() if k.lower() == "content-range"), None)
        if where is None:
            return reply
        span, _, total = where.removeprefix("bytes ").partition("/")
        begin, end = (int(part) + by for part in span.split("-"))
        headers = {k: v for k, v in reply.headers.items() if k.lower() != "content-range"}
        return replace(reply, headers={**headers, "Content-Range": f"bytes {begin}-{end}/{total}"})

    return change


def other_version(reply: Reply, request: Request) -> Reply:
    """An ETag of another version."""
    headers = {k: v for k, v in reply.headers.items() if k.lower() != "etag"}
    return replace(reply, headers={**headers, "ETag": '"other"'})


def whole(reply: Reply, request: Request) -> Reply:
    """200 for a range."""
    if reply.place is not None:
        return hub_faults.whole(reply, request)
    headers = {k: v for k, v in reply.headers.items() if k.lower() != "content-range"}
    return Reply(200, headers, reply.body)
