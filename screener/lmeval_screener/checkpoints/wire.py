"""Ranged GETs at the speed of the network: keep-alive HTTP/1.1 connections to one host, nothing more.

One checkpoint's rows are a hundred small ranges. httpx spends some 5 ms of processor time on each once
dozens of connections are open, which is more than the network does; this takes a fraction of a millisecond.
It knows only what a range needs: a GET, an answer with a length, a connection that is used again. For
anything else (a proxy, an answer without a length) it says so with `UnsupportedError`, and the caller goes
through httpx.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import ssl
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping

import httpx

_PIECE = 1 << 16


class UnsupportedError(Exception):
    """The host speaks in a way that this module leaves to httpx."""


class Answer:
    """Status and headers of an answer, and its body piece by piece; the part of httpx.Response that we use.

    Attributes:
        status_code: HTTP status.
        headers: Looked up without regard to case.
        url: What was asked for.
        num_bytes_downloaded: Bytes of the body so far.
    """

    def __init__(self, url: httpx.URL, status: int, headers: httpx.Headers, connection: _Connection) -> None:
        self.url, self.status_code, self.headers = url, status, headers
        self.num_bytes_downloaded = 0
        self._connection = connection
        self._length = int(headers.get("Content-Length", "0"))

    @property
    def has_redirect_location(self) -> bool:
        """Whether it leads elsewhere."""
        return self.status_code in (301, 302, 303, 307, 308) and "Location" in self.headers

    @property
    def complete(self) -> bool:
        """Whether the whole body was read."""
        return self.num_bytes_downloaded == self._length

    @property
    def again(self) -> bool:
        """Whether the connection can serve another request."""
        return self.complete and self.headers.get("Connection", "").lower() != "close"

    async def aiter_raw(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises OSError or EOFError when it breaks."""
        while not self.complete:
            piece = await self._connection.read(min(_PIECE, self._length - self.num_bytes_downloaded))
            self.num_bytes_downloaded += len(piece)
            yield piece

    # A range is asked for with Accept-Encoding: identity, so there is nothing to unpack.
    aiter_bytes = aiter_raw


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silence: float) -> None:
        self.reader, self.writer, self.silence = reader, writer, silence

    async def read(self, limit: int) -> bytes:
        with self._watched():
            piece = await self.reader.read(limit)
        if not piece:
            raise EOFError("the connection was closed in mid-body")
        return piece

    async def head(self) -> tuple[int, httpx.Headers]:
        """Status and headers of the next answer."""
        while True:
            with self._watched():
                lines = (await self.reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
            version, _, rest = lines[0].partition(b" ")
            if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
                raise UnsupportedError(f"an answer that begins {lines[0][:40]!r}")
            status = int(rest[:3])
            if status >= 200:
                pairs = [line.partition(b":") for line in lines[1:] if line]
                headers = httpx.Headers([(name.strip(), value.strip()) for name, _, value in pairs])
                if version == b"HTTP/1.0":
                    headers.setdefault("Connection", "close")
                return status, headers

    def close(self) -> None:
        self.writer.transport.abort()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        # Cheaper than a timeout around every read: an aborted transport ends the read with an error.
        watch = asyncio.get_running_loop().call_later(self.silence, self.close)
        try:
            yield
        finally:
            watch.cancel()


class Wire:
    """Connections to one origin.

    Args:
        url: Any URL of the origin.
        agent: User-Agent.
        silence: Seconds without a byte after which a connection counts as dead.
    """

    def __init__(self, url: httpx.URL, agent: str, silence: float) -> None:
        self._host, self._port = url.host, url.port or (443 if url.scheme == "https" else 80)
        self._ssl = tls_context() if url.scheme == "https" else None
        self._netloc, self._agent, self._silence = url.netloc.decode(), agent, silence
        self._idle: list[_Connection] = []
        self._opening: list[asyncio.Task[_Connection]] = []
        self._used = 0
        self._closed = False

    def open_ahead(self, count: int, limit: int) -> None:
        """Begin to open connections, until `count` are free: the next requests need not wait for them.

        Args:
            count: Free connections that are wanted.
            limit: Connections that there may be in all.
        """
        free = len(self._idle) + len(self._opening)
        missing = min(count - free, limit - free - self._used)
        self._opening += [asyncio.ensure_future(self._opened()) for _ in range(missing)]

    @contextlib.asynccontextmanager
    async def get(self, url: httpx.URL, headers: Mapping[str, str]) -> AsyncIterator[Answer]:
        """One GET.

        Raises:
            UnsupportedError: Before anything of the body was given out.
            OSError, EOFError, asyncio.LimitOverrunError: The connection failed or broke.
        """
        lines = {"Host": self._netloc, "User-Agent": self._agent, **headers}
        if any(sign in value for value in lines.values() for sign in "\r\n"):
            raise UnsupportedError("a header with a line break")
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._used += 1
        connection = answer = None
        try:
            connection = await self._connection()
            connection.writer.write(
                b"GET " + url.raw_path + b" HTTP/1.1\r\n" + head.encode("latin-1") + b"\r\n"
            )
            status, received = await connection.head()
            length = received.get("Content-Length", "" if status != 304 else "0")
            if "Transfer-Encoding" in received or not re.fullmatch("[0-9]{1,18}", length):
                raise UnsupportedError("an answer without a length")
            answer = Answer(url, status, received, connection)
            yield answer
        finally:
            self._used -= 1
            again = answer is not None and answer.again and not self._closed
            if connection is not None:
                self._idle.append(connection) if again else connection.close()

    async def close(self) -> None:
        """Close every connection; those in use when they are done with."""
        self._closed = True
        for task in self._opening:
            task.cancel()
        opened = await asyncio.gather(*self._opening, return_exceptions=True)
        for connection in (*self._idle, *opened):
            if isinstance(connection, _Connection):
                connection.close()
        self._idle.clear()
        self._opening.clear()

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.reader.at_eof() and not connection.writer.is_closing():
                return connection
            connection.close()
        if self._opening:
            return await self._opening.pop(0)
        return await self._opened()

    async def _opened(self) -> _Connection:
        opening = asyncio.open_connection(
            self._host, self._port, ssl=self._ssl, server_hostname=self._host if self._ssl else None
        )
        reader, writer = await asyncio.wait_for(opening, self._silence)
        return _Connection(reader, writer, self._silence)


def proxied(url: httpx.URL) -> bool:
    """Whether the environment sends requests for a URL through a proxy."""
    proxies = urllib.request.getproxies()
    through = proxies.get(url.scheme) or proxies.get("all")
    return bool(through) and not urllib.request.proxy_bypass(url.host)


@functools.cache
def tls_context() -> ssl.SSLContext:
    """The context that httpx would use, with its certificates and environment variables; made once."""
    context = httpx.create_ssl_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
