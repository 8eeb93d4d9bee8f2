"""HTTP as the screener needs it: one pool, measured, retried, bounded in time, careful with the token.

Answers that may pass (429, 5xx, broken connections, deliveries that contradict themselves) are tried again
with growing waits; what stays wrong ends in a `ScreeningError`. The token goes to the Hub's own origin only.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

import httpx

from lmeval_dispersion.errors import ScreeningError
from lmeval_screener.checkpoints.budget import Budget
from lmeval_screener.checkpoints.snapshot import Meter
from lmeval_screener.checkpoints.wire import Answer, UnsupportedError, Wire, proxied, tls_context

T = TypeVar("T")
R = TypeVar("R", bound="httpx.Response | Answer")

#: Fruitless attempts at one thing before giving up; the waits between them grow from `FIRST_WAIT`.
ATTEMPTS = 5
FIRST_WAIT = 0.25
#: Requests to one host at a time, all checkpoints together; and ranges of one checkpoint at a time. More
#: connections save round trips; each costs one to open (and a TLS handshake). `AHEAD` of them are opened
#: while the first range of a file, its header, is on its way.
CONNECTIONS = 128
RANGES = 64
AHEAD = 48
#: Redirects of one request.
HOPS = 6
#: Seconds without a byte after which a connection counts as dead.
SILENCE = 15.0
#: What a broken connection raises on our own wire (a TLS error is an OSError).
_BROKEN = (OSError, EOFError, asyncio.LimitOverrunError, asyncio.TimeoutError)


class AgainError(Exception):
    """An attempt failed in a way that may pass.

    Attributes:
        error: What to raise if it does not.
        wait: Seconds that the server asked for; None if it did not.
        fruitful: Whether the attempt got further than the one before.
        last: Whether one more attempt is the last worth making.
    """

    def __init__(
        self, error: ScreeningError, *, wait: float | None = None, fruitful: bool = False, last: bool = False
    ) -> None:
        super().__init__(str(error))
        self.error, self.wait, self.fruitful, self.last = error, wait, fruitful, last


class Transport:
    """One pool of connections for all checkpoints of a run.

    Args:
        endpoint: Origin of the Hub, such as ``https://huggingface.co``.
        token: Sent to that origin and nowhere else; None: anonymous.
        agent: User-Agent.
    """

    def __init__(self, endpoint: str, token: str | None, agent: str) -> None:
        self.endpoint = endpoint
        self.token = token
        self._origin = _origin(httpx.URL(endpoint))
        self._client = httpx.AsyncClient(
            headers={"User-Agent": agent},
            verify=tls_context(),  # shared with our own wire: making one takes 40 ms
            timeout=httpx.Timeout(SILENCE, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=30),
        )
        self._agent = agent
        self._wires: dict[object, Wire | None] = {}
        self._places: dict[object, asyncio.Semaphore] = {}
        self._not_before: dict[object, float] = {}

    async def close(self) -> None:
        """Close every connection."""
        for wire in self._wires.values():
            if wire is not None:
                await wire.close()
        await self._client.aclose()

    def is_hub(self, url: httpx.URL) -> bool:
        """Whether a URL is of the Hub's own origin."""
        return _origin(url) == self._origin

    def answer(
        self, method: str, url: httpx.URL, headers: Mapping[str, str], meter: Meter
    ) -> contextlib.AbstractAsyncContextManager[httpx.Response]:
        """One request, no retries, no redirects: status and headers are there, the body is not yet read.

        Raises:
            AgainError: The connection failed or broke, also while the body is read; or the server has asked
                to be left alone for a while.
        """
        return self._gated(url, headers, meter, lambda h: self._client.stream(method, url, headers=h))

    def ranged(
        self, url: httpx.URL, headers: Mapping[str, str], meter: Meter
    ) -> contextlib.AbstractAsyncContextManager[httpx.Response | Answer]:
        """`answer` to a GET of a range: over our own wire where that is possible, else through httpx."""
        wire = self._wire(url)
        if wire is None:
            return self.answer("GET", url, headers, meter)
        return self._gated(url, headers, meter, lambda h: wire.get(url, h))

    def open_ahead(self, url: httpx.URL) -> None:
        """Open connections for many ranges while the first is on its way: saves one round trip or three."""
        if wire := self._wire(url):
            wire.open_ahead(AHEAD, CONNECTIONS)

    def _wire(self, url: httpx.URL) -> Wire | None:
        origin = _origin(url)
        if origin not in self._wires:
            self._wires[origin] = None if proxied(url) else Wire(url, self._agent, SILENCE)
        return self._wires[origin]

    @contextlib.asynccontextmanager
    async def _gated(
        self,
        url: httpx.URL,
        headers: Mapping[str, str],
        meter: Meter,
        send: Callable[[Mapping[str, str]], contextlib.AbstractAsyncContextManager[R]],
    ) -> AsyncIterator[R]:
        """One request when a place is free, with the token if it goes to the Hub; what breaks may pass."""
        origin = _origin(url)
        if origin == self._origin and self.token:
            headers = {**headers, "Authorization": f"Bearer {self.token}"}
        async with self._places.setdefault(origin, asyncio.Semaphore(CONNECTIONS)):
            # A server that asked one of us to wait means all of us.
            if (wait := self._not_before.get(origin, 0.0) - time.monotonic()) > 0:
                raise AgainError(_rate_limited(url.host, wait), wait=wait, fruitful=True)
            meter.requests += 1
            response: R | None = None
            try:
                async with send(headers) as response:
                    yield response
            except httpx.DecodingError as error:
                what = f"{url} came compressed and cannot be unpacked ({error}); try again later"
                raise AgainError(ScreeningError("BadResponse", what), last=True) from error
            except UnsupportedError as error:
                # From now on this host is httpx's.
                if wire := self._wires.get(origin):
                    self._wires[origin] = None
                    await wire.close()
                what = f"{url.host} speaks in a way that is not understood ({error}); check any proxy"
                raise AgainError(ScreeningError("BadResponse", what), wait=0.0) from error
            except (*_BROKEN, httpx.TransportError) as error:
                reason = f"{type(error).__name__}: {error}".rstrip(": ")
                what = f"the connection to {url.host} failed ({reason}); check the network and HF_ENDPOINT"
                raise AgainError(ScreeningError("Unreachable", what)) from error
            finally:
                if response is not None:
                    meter.bytes_read += response.num_bytes_downloaded

    async def body(
        self,
        url: httpx.URL,
        meter: Meter,
        limit: int,
        refused: Callable[[httpx.Response], ScreeningError],
    ) -> tuple[bytes, httpx.Response]:
        """A whole small body, redirects followed, in one attempt; and the answer it came with.

        Args:
            url: Where to start; text may come compressed.
            meter: Counts every hop.
            limit: Bytes that the body may have, unpacked.
            refused: The error that a final status other than 200 means.

        Raises:
            AgainError: As `answer` and `raise_if_passing`; also for a body beyond the limit.
            ScreeningError: As `refused` says.
        """
        for _ in range(HOPS):
            async with self.answer("GET", url, {"Accept-Encoding": "gzip"}, meter) as response:
                if response.has_redirect_location:
                    url = await redirect(response)
                    continue
                self.raise_if_passing(response)
                if response.status_code != 200:
                    await drained(response)
                    raise refused(response)
                received = bytearray()
                async for piece in response.aiter_bytes():
                    received += piece
                    if len(received) > limit:
                        raise AgainError(
                            ScreeningError(
                                "BadResponse",
                                f"{url} sends more than the {limit} bytes it has; try again later",
                            ),
                            last=True,
                        )
                return bytes(received), response
        raise ScreeningError("BadResponse", f"{url.host} redirects in circles; check HF_ENDPOINT")

    async def retried(self, attempt: Callable[[], Awaitable[T]], budget: Budget) -> T:
        """Result of the first attempt that succeeds.

        Raises:
            ScreeningError: The error of the last attempt, after `ATTEMPTS` fruitless ones, or as soon as the
                wait before the next would exceed the time budget.
        """
        fruitless = 0
        while True:
            try:
                result = await attempt()
                budget.trouble = None
                return result
            except AgainError as again:
                budget.trouble = again.error
                fruitless = 0 if again.fruitful else fruitless + 1
                wait = again.wait
                if wait is None:
                    wait = FIRST_WAIT * 2 ** max(fruitless - 1, 0)
                wait *= 1 + random.random() / 2
                if fruitless >= (2 if again.last else ATTEMPTS) or wait > budget.remaining:
                    raise again.error from again
            await asyncio.sleep(wait)

    def raise_if_passing(self, response: httpx.Response | Answer) -> None:
        """Raise `AgainError` for an answer that may pass: 408, 429 and 5xx.

        How long to wait is in ``Retry-After``, or (the Hub's 429 has none) in ``RateLimit: …;t=<seconds>``.
        """
        status, host = response.status_code, response.url.host
        if status == 429:
            wait = _asked_wait(response.headers)
            if wait:
                self._not_before[_origin(response.url)] = time.monotonic() + min(wait, 300.0)
            raise AgainError(_rate_limited(host, wait), wait=wait)
        if status == 408 or status >= 500:
            raise AgainError(
                ScreeningError("ServerError", f"{host} answered {status} again and again; try again later"),
                wait=_asked_wait(response.headers) if status == 503 else None,
            )


async def redirect(response: httpx.Response | Answer) -> httpx.URL:
    """Where a redirect leads; its body is read so that the connection can serve the next request.

    Raises:
        ScreeningError: ``BadResponse`` if that is no address.
    """
    await drained(response)
    try:
        return response.url.join(response.headers["Location"])
    except (httpx.InvalidURL, ValueError):
        raise ScreeningError(
            "BadResponse", f"{response.url.host} redirects to what is no address; check HF_ENDPOINT"
        ) from None


async def drained(response: httpx.Response | Answer) -> None:
    """Read a short body nobody needs: a connection with unread bytes would have to be closed."""
    received = 0
    async for piece in response.aiter_raw():
        received += len(piece)
        if received > 65_536:
            break


async def side_by_side(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of works done at the same time; when one fails, the others are stopped before it is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _rate_limited(host: str, wait: float | None) -> ScreeningError:
    until = f"in {wait:.0f} s" if wait else "later"
    return ScreeningError(
        "RateLimited", f"{host} allows no more requests now (429); try again {until}, or log in"
    )


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _asked_wait(headers: httpx.Headers) -> float | None:
    """Seconds that a server asks to wait; None if it does not say."""
    value = headers.get("Retry-After", "")
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    if value:
        with contextlib.suppress(ValueError):
            return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    seconds = re.search(r"\bt=(\d+)", headers.get("RateLimit", ""))
    return float(seconds[1]) if seconds else None
