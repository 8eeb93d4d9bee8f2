"""Many connections to one host without the cost of many: every connection is a pool of its own.

httpcore's pool looks at every connection it has whenever a request begins or ends. With the dozens of
connections of one checkpoint that costs as much as the requests themselves (docs/reading.md has the figures).
Here a free connection is taken from a stack, the most recently used first.
"""

from __future__ import annotations

import functools
import ssl
import urllib.request
from collections.abc import AsyncIterator, Callable

import httpx

#: Seconds for which an unused connection is kept: less than servers do, so that we close first.
_KEPT = 30.0


@functools.cache
def _trust() -> ssl.SSLContext:
    """Certificates, loaded once and only when they are needed: it takes longer than a round trip."""
    return httpx.create_ssl_context()


class Lanes(httpx.AsyncBaseTransport):
    """Transport of an `httpx.AsyncClient`: each connection is opened when no open one is free."""

    def __init__(self) -> None:
        self._free: dict[tuple[str, str, int | None], list[httpx.AsyncHTTPTransport]] = {}
        self._all: set[httpx.AsyncHTTPTransport] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request over a free connection; it is free again when the body was read or closed."""
        url = request.url
        free = self._free.setdefault((url.scheme, url.host, url.port), [])
        if free:
            lane = free.pop()
        else:
            verify = _trust() if url.scheme == "https" else False
            limits = httpx.Limits(max_connections=1, keepalive_expiry=_KEPT)
            lane = httpx.AsyncHTTPTransport(verify=verify, limits=limits)
            self._all.add(lane)
        try:
            response = await lane.handle_async_request(request)
        except BaseException:
            self._all.discard(lane)
            await lane.aclose()
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Body(response.stream, lambda: free.append(lane))
        return response

    async def aclose(self) -> None:
        """Close every connection."""
        for lane in self._all:
            await lane.aclose()


class _Body(httpx.AsyncByteStream):
    """A body that says when it is done with."""

    def __init__(self, stream: httpx.AsyncByteStream, done: Callable[[], None]) -> None:
        self._stream, self._done = stream, done

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()
        self._done()


def transport() -> httpx.AsyncBaseTransport | None:
    """The transport for a client; None where a proxy is set, which httpx itself knows how to use."""
    return None if set(urllib.request.getproxies()) - {"no"} else Lanes()
