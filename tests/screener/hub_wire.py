"""HTTP/1.1 under all servers of tests: sockets, latency, a shared line, broken deliveries, replies."""

from __future__ import annotations

import asyncio
import fnmatch
import functools
import gzip
import io
import json
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

#: Bytes that are sent in one go.
PIECE = 1 << 18


@dataclass
class Request:
    """A request as it arrived. `part` says what answered: api, raw, resolve or cdn."""

    method: str
    target: str
    headers: dict[str, str]
    on_cdn: bool
    part: str = ""

    @property
    def path(self) -> str:
        return unquote(urlsplit(self.target).path) if self.on_cdn else urlsplit(self.target).path

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.target).query, keep_blank_values=True)


@dataclass
class Reply:
    """An answer: status, headers, and bytes from memory or ``[begin, end)`` of a file; and how it breaks.

    Attributes:
        length: Content-Length to claim, if not the true one.
        cut: Body bytes after which the connection ends; -1 before even the status line.
        reset: Whether that end is a reset instead of a close.
        drip: Seconds between single bytes of the body.
        stall: Seconds of silence before the status line.
    """

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    place: Path | None = None
    begin: int = 0
    end: int = 0
    length: int | None = None
    cut: int | None = None
    reset: bool = False
    drip: float = 0.0
    stall: float = 0.0

    @property
    def size(self) -> int:
        return self.end - self.begin if self.place else len(self.body)


Change = Callable[[Reply, Request], Reply]


@dataclass
class Fault:
    """A change of the replies that match, `times` times (-1: always)."""

    change: Change
    where: str
    match: str
    times: int


class Loopback:
    """A server of some ports in a thread of its own, whose replies a test changes; a context manager.

    Subclasses say what the usual reply to a request is, and of which part of them it comes.
    """

    latency = bandwidth = 0.0
    tls: ssl.SSLContext | None = None
    ports = 1

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.sent = 0
        #: When the next bytes may leave over the line that all connections share.
        self.free = 0.0
        self.connections = [0, 0]
        self.open: set[asyncio.Transport] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def usual(self, request: Request) -> Reply:
        """The reply without faults; may set the request's `part`."""
        raise NotImplementedError

    def reply(self, request: Request) -> Reply:
        """The reply to a request, faults included."""
        reply = self.usual(request)
        self.requests.append(request)
        for fault in self.faults:
            if (
                fault.times
                and fault.where in ("*", request.part)
                and fnmatch.fnmatch(unquote(request.path), fault.match)
            ):
                fault.times -= 1
                return fault.change(reply, request)
        return reply

    def __enter__(self):
        self._thread.start()
        scheme = "https" if self.tls else "http"
        listening = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        # Another name for the same machine: to a client, another host.
        names = ("127.0.0.1", "localhost")
        self.addresses = [f"{scheme}://{name}:{port}" for name, port in zip(names, listening, strict=False)]
        self.endpoint = self.addresses[0]
        return self

    async def _listen(self) -> list[int]:
        self.servers = []
        for number in range(self.ports):
            connect = functools.partial(Connection, self, number > 0)
            server = await self._loop.create_server(connect, "127.0.0.1", 0, backlog=1024, ssl=self.tls)
            self.servers.append(server)
        return [server.sockets[0].getsockname()[1] for server in self.servers]

    def __exit__(self, *_: object) -> None:
        async def stop() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # A client that ended a moment ago may not have been noticed yet.
            for transport in [*self.open]:
                transport.abort()
            await asyncio.sleep(0)

        for server in self.servers:
            self._loop.call_soon_threadsafe(server.close)
        asyncio.run_coroutine_threadsafe(stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def fault(self, where: str, change: Change, *, match: str = "*", times: int = -1) -> None:
        """Change replies of a part, or of all, ``*``; `match` globs paths."""
        self.faults.append(Fault(change, where, match, times))

    def seen(self, part: str) -> list[Request]:
        """Requests that one part received."""
        return [request for request in self.requests if request.part == part]


class Connection(asyncio.Protocol):
    """One kept-alive connection; requests are answered one after the other."""

    def __init__(self, hub: Loopback, on_cdn: bool) -> None:
        self.hub, self.on_cdn = hub, on_cdn
        self.received = b""
        self.time = asyncio.get_running_loop().time
        # Opening a connection costs a round trip, which loopback does not have.
        self.open_at = self.time() + hub.latency
        self.writable = asyncio.Event()
        self.writable.set()
        self.tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.hub.connections[self.on_cdn] += 1
        self.hub.open.add(transport)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, error: Exception | None) -> None:
        self.hub.open.discard(self.transport)
        self.writable.set()
        for task in self.tasks:
            task.cancel()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        self.received += data
        while (end := self.received.find(b"\r\n\r\n")) >= 0:
            head, self.received = self.received[:end], self.received[end + 4 :]
            first, *lines = head.decode("latin-1").split("\r\n")
            method, target, _ = first.split(" ", 2)
            headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
            request = Request(method, target, headers, self.on_cdn)
            task = asyncio.ensure_future(self._answer(request, self.hub.reply(request)))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _answer(self, request: Request, reply: Reply) -> None:
        await asyncio.sleep(max(self.open_at - self.time(), 0.0) + self.hub.latency + reply.stall)
        length = reply.size if reply.length is None else reply.length
        if reply.cut is None or reply.cut >= 0:
            fields = {"Content-Length": length, **reply.headers}
            head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
            self.transport.write(f"HTTP/1.1 {reply.status} Status\r\n{head}\r\n".encode("latin-1"))
            if request.method != "HEAD":
                await self._send_body(reply)
        if reply.cut is not None or length != reply.size:
            self._end(reply)

    async def _send_body(self, reply: Reply) -> None:
        left = reply.size if reply.cut is None else min(reply.size, reply.cut)
        with reply.place.open("rb") if reply.place else io.BytesIO(reply.body) as file:
            file.seek(reply.begin if reply.place else 0)
            while left > 0 and (piece := file.read(min(1 if reply.drip else PIECE, left))):
                await asyncio.sleep(reply.drip or self._delay(len(piece)))
                await self.writable.wait()
                if self.transport.is_closing():
                    return
                self.transport.write(piece)
                self.hub.sent += len(piece)
                left -= len(piece)

    def _delay(self, size: int) -> float:
        if not self.hub.bandwidth:
            return 0.0
        self.hub.free = max(self.time(), self.hub.free) + size / self.hub.bandwidth
        return self.hub.free - self.time()

    def _end(self, reply: Reply) -> None:
        if reply.reset:
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
        else:
            self.transport.close()


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
