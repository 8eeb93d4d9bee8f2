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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

#: Bytes that are sent in one go.
PIECE = 1 << 18


@dataclass
class Request:
    """A request as it arrived. `part` says what answered: api, resolve or cdn."""

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
        raw: Bytes, and seconds of silence, in place of an answer; then the connection ends where `cut` is.
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
    raw: Sequence[bytes | float] | None = None

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

    latency = 0.0  # seconds of one round trip; opening a connection costs one more
    bandwidth = 0.0  # bytes per second of the line that all connections share; 0: unlimited
    tls: ssl.SSLContext | None = None
    ports = 1

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.sent = 0
        #: When the next bytes may leave over the line that all connections share.
        self.free = 0.0
        self.connections = [0, 0]
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
        self._servers = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        scheme = "https" if self.tls else "http"
        # Another name for the same machine: to a client, another host.
        self.addresses = [
            f"{scheme}://{name}:{server.sockets[0].getsockname()[1]}"
            for name, server in zip(("127.0.0.1", "localhost"), self._servers, strict=False)
        ]
        self.endpoint = self.addresses[0]
        return self

    async def _listen(self) -> list[asyncio.Server]:
        return [
            await asyncio.start_server(
                functools.partial(self._serve, number > 0),
                "127.0.0.1",
                0,
                backlog=1024,
                ssl=self.tls,
            )
            for number in range(self.ports)
        ]

    def __exit__(self, *_: object) -> None:
        async def stop() -> None:
            for server in self._servers:
                self._loop.remove_reader(server.sockets[0])
            # What was just accepted takes three turns to begin, and only then closes itself.
            for _ in range(3):
                await asyncio.sleep(0)
            while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            for server in self._servers:
                server.close()
            await asyncio.sleep(0)

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

    async def _serve(
        self, on_cdn: bool, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One kept-alive connection; requests are answered one after the other."""
        self.connections[on_cdn] += 1
        try:
            await asyncio.sleep(self.latency)
            is_open = True
            while is_open:
                head = (await reader.readuntil(b"\r\n\r\n"))[:-4].decode("latin-1")
                first, *lines = head.split("\r\n")
                method, target, _ = first.split(" ", 2)
                headers = {
                    k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)
                }
                request = Request(method, target, headers, on_cdn)
                is_open = await self._answer(request, self.reply(request), writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # a client that goes away, and a server that ends: streams would report them
        finally:
            writer.transport.abort()  # also one that waits for a client to take its last bytes

    async def _answer(self, request: Request, reply: Reply, writer: asyncio.StreamWriter) -> bool:
        """Send a reply as it says; whether the connection goes on."""
        await asyncio.sleep(self.latency + reply.stall)
        length = reply.size if reply.length is None else reply.length
        if reply.raw is not None:
            await self._send_raw(reply.raw, writer)
        elif reply.cut is None or reply.cut >= 0:
            fields = {"Content-Length": length, **reply.headers}
            head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
            writer.write(f"HTTP/1.1 {reply.status} Status\r\n{head}\r\n".encode("latin-1"))
            if request.method != "HEAD":
                await self._send_body(reply, writer)
        if reply.cut is None and length == reply.size:
            return True
        if reply.reset:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        writer.close()
        await writer.wait_closed()
        return False

    async def _send_raw(self, raw: Sequence[bytes | float], writer: asyncio.StreamWriter) -> None:
        for step in raw:
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                writer.write(step)
                await writer.drain()

    async def _send_body(self, reply: Reply, writer: asyncio.StreamWriter) -> None:
        left = reply.size if reply.cut is None else min(reply.size, reply.cut)
        with reply.place.open("rb") if reply.place else io.BytesIO(reply.body) as file:
            file.seek(reply.begin if reply.place else 0)
            while left > 0 and (piece := file.read(min(1 if reply.drip else PIECE, left))):
                await asyncio.sleep(reply.drip or self._delay(len(piece)))
                writer.write(piece)
                await writer.drain()
                self.sent += len(piece)
                left -= len(piece)

    def _delay(self, size: int) -> float:
        if not self.bandwidth:
            return 0.0
        now = self._loop.time()
        self.free = max(now, self.free) + size / self.bandwidth
        return self.free - now


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
