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
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import httpx

from lmeval_dispersion.errors import ScreeningError
from screener import lanes
from screener.snapshot import Meter

T = TypeVar("T")

#: Fruitless attempts at one thing before giving up; the waits between them grow from `FIRST_WAIT`.
ATTEMPTS = 5
FIRST_WAIT = 0.25
#: Connections to one host at a time.
CONNECTIONS = 48
#: Redirects of one request.
HOPS = 6
#: Seconds without a byte after which a connection counts as dead.
SILENCE = 15.0


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


class Budget:
    """Seconds that one checkpoint may take; the clock runs only while something is done for it.

    Attributes:
        seconds: The whole of it.
        trouble: Why what is being tried again failed the last time: the reason to give when time runs out.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.trouble: ScreeningError | None = None
        self._spent, self._since, self._running = 0.0, 0.0, 0

    @property
    def remaining(self) -> float:
        """Seconds left."""
        running = time.monotonic() - self._since if self._running else 0.0
        return self.seconds - self._spent - running

    @contextlib.contextmanager
    def _clock(self) -> Iterator[None]:
        if not self._running:
            self._since = time.monotonic()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._spent += time.monotonic() - self._since

    async def bounded(self, work: Coroutine[Any, Any, T]) -> T:
        """Result of some work, if it comes in time.

        Raises:
            ScreeningError: ``Timeout``, or the trouble that the time went into.
        """
        with self._clock():
            try:
                return await asyncio.wait_for(work, max(self.remaining, 0.0))
            except asyncio.TimeoutError:
                raise self.trouble or ScreeningError(
                    "Timeout", f"took longer than {self.seconds:g} s; allow more time or try again later"
                ) from None


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
            timeout=httpx.Timeout(SILENCE, pool=None),
            transport=lanes.transport(),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=30),
        )
        self._places: dict[object, asyncio.Semaphore] = {}
        self._not_before: dict[object, float] = {}

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    def is_hub(self, url: httpx.URL) -> bool:
        """Whether a URL is of the Hub's own origin."""
        return _origin(url) == self._origin

    @contextlib.asynccontextmanager
    async def answer(
        self, method: str, url: httpx.URL, headers: Mapping[str, str], meter: Meter
    ) -> AsyncIterator[httpx.Response]:
        """One request, no retries, no redirects: status and headers are there, the body is not yet read.

        Raises:
            AgainError: The connection failed or broke, also while the body is read; or the server has asked
                to be left alone for a while.
        """
        origin = _origin(url)
        if origin == self._origin and self.token:
            headers = {**headers, "Authorization": f"Bearer {self.token}"}
        async with self._places.setdefault(origin, asyncio.Semaphore(CONNECTIONS)):
            # A server that asked one of us to wait means all of us.
            if (wait := self._not_before.get(origin, 0.0) - time.monotonic()) > 0:
                raise AgainError(_rate_limited(url.host, wait), wait=wait, fruitful=True)
            meter.requests += 1
            response: httpx.Response | None = None
            try:
                async with self._client.stream(method, url, headers=headers) as response:
                    yield response
            except httpx.DecodingError as error:
                raise AgainError(
                    ScreeningError(
                        "BadResponse",
                        f"{url} came compressed and cannot be unpacked ({error}); try again later",
                    ),
                    last=True,
                ) from error
            except httpx.TransportError as error:
                reason = f"{type(error).__name__}: {error}".rstrip(": ")
                raise AgainError(
                    ScreeningError(
                        "Unreachable", f"the connection to {url.host} failed ({reason}); check the network"
                    )
                ) from error
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

    def raise_if_passing(self, response: httpx.Response) -> None:
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


async def redirect(response: httpx.Response) -> httpx.URL:
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


async def drained(response: httpx.Response) -> None:
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
