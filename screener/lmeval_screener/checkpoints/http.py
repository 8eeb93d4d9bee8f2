"""HTTP as the screener needs it: one pool, measured, retried, bounded in time, careful with the token.

Answers that may pass (429, 5xx, broken connections, deliveries that contradict themselves) are tried again
with growing waits; what stays wrong ends in a `ScreeningError`. The token goes to the Hub's own origin only.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import random
import ssl
import time
import urllib.request
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import aiohttp
from yarl import URL

from lmeval_screener.checkpoints.limits import LONGEST_WAIT, Allowance, Bucket, asked_wait, rate_limited
from lmeval_screener.checkpoints.snapshot import Meter
from lmeval_screener.errors import ScreeningError

T = TypeVar("T")

#: Fruitless attempts at one thing before giving up; the waits between them grow from `FIRST_WAIT`.
ATTEMPTS = 5
FIRST_WAIT = 0.25
#: Requests to one host at a time, all checkpoints together; and ranges of one checkpoint at a time. More
#: connections save round trips; each costs one to open (and a TLS handshake).
CONNECTIONS = 128
RANGES = 64
#: Redirects of one request.
HOPS = 6
#: Seconds without a byte after which a connection counts as dead.
SILENCE = 15.0


class Budget:
    """Seconds that one checkpoint may take; the clock runs only while something is done for it.

    Attributes:
        seconds: The whole of it.
        trouble: Why what is being tried again failed the last time: the reason to give when time runs out.
        at_end: What to do when a work has ended.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.trouble: ScreeningError | None = None
        self.at_end: list[Callable[[], None]] = []
        self._spent = 0.0
        self._since: float | None = None
        self._pauses = 0

    @property
    def remaining(self) -> float:
        """Seconds left."""
        return self.seconds - self._elapsed()

    @property
    def runs(self) -> bool:
        """Whether something is being done."""
        return self._since is not None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A span of time that does not count: somebody waits for a server's quota."""
        if not self._pauses:
            self._spent = self._elapsed()
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses and self._since is not None:
                self._since = time.monotonic()

    async def bounded(self, work: Coroutine[Any, Any, T]) -> T:
        """Result of some work, if it comes in time; one work after the other.

        Raises:
            ScreeningError: ``Timeout``, or the trouble that the time went into.
        """
        self._since = time.monotonic()
        task = asyncio.ensure_future(work)
        try:
            while not task.done() and (self.remaining > 0 or self._pauses):
                # The clock may have stood meanwhile: then there is more time than was left here.
                left = None if math.isinf(self.seconds) else max(self.remaining, 0.05)
                await asyncio.wait((task,), timeout=left)
            if task.done():
                return task.result()
            raise self.trouble or ScreeningError(
                "Timeout",
                f"not read within {self.seconds:g} s; try again, or allow more with --timeout",
            )
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            self._spent = self._elapsed()
            self._since = None
            while self.at_end:
                self.at_end.pop()()

    def _elapsed(self) -> float:
        running = 0.0 if self._since is None or self._pauses else time.monotonic() - self._since
        return self._spent + running


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
    """One pool of connections for all checkpoints of a run; made inside a running event loop.

    Args:
        endpoint: Origin of the Hub, such as ``https://huggingface.co``.
        token: Sent to that origin and nowhere else; None: anonymous.
        agent: User-Agent.
        allowance: The user's own limits; None: none.

    Attributes:
        shared: Counts what is done for no single checkpoint.
        texts_lie_there: Whether this server was seen to redirect small files to its store of texts.
    """

    def __init__(
        self, endpoint: str, token: str | None, agent: str, allowance: Allowance | None = None
    ) -> None:
        self.endpoint = endpoint
        self.allowance = allowance or Allowance()
        self.shared = Meter()
        self.texts_lie_there = False
        self.token = token
        self._origin = URL(endpoint).origin()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=SILENCE, sock_read=SILENCE),
            headers={"User-Agent": agent},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # bytes are counted as they travel; `unpacked` opens them
        )
        self._slots: dict[URL, asyncio.Semaphore] = {}
        self._proxies: dict[URL, str | None] = {}
        self._buckets: dict[tuple[URL, str], Bucket] = {}

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    def is_hub(self, url: URL) -> bool:
        """Whether a URL is of the Hub's own origin."""
        return url.origin() == self._origin

    def bucket(self, url: URL) -> Bucket:
        """The quota that counts a request."""
        origin = url.origin()
        kind = "" if origin != self._origin else _kind(url.raw_path)
        if (found := self._buckets.get((origin, kind))) is None:
            found = self._buckets[origin, kind] = Bucket(kind or url.host or "", self.allowance.notice)
        return found

    def quotas(self) -> list[Bucket]:
        """The buckets of the Hub, as far as they were met."""
        return [bucket for (origin, _), bucket in self._buckets.items() if origin == self._origin]

    @contextlib.asynccontextmanager
    async def request(
        self,
        method: str,
        url: URL,
        headers: Mapping[str, str],
        meter: Meter,
        budget: Budget | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request when its quota and a slot are free, no retries, no redirects; the body is not yet read.

        Args:
            method: Of HTTP.
            url: Where to.
            headers: Beside the usual ones.
            meter: Counts it.
            budget: Stands still while the quota is waited for.

        Raises:
            AgainError: The connection failed or broke, also while the body is read.
            ScreeningError: ``RateLimited``, where the server wants to be left alone for too long;
                ``NotTried``, where the user's own limits are used up.
        """
        origin = url.origin()
        counted = origin == self._origin
        if counted and self.token:
            headers = {**headers, "Authorization": f"Bearer {self.token}"}
        if origin not in self._proxies:
            self._proxies[origin] = environment_proxy(url)
        bucket = self.bucket(url)
        if (slots := self._slots.get(origin)) is None:
            slots = self._slots[origin] = asyncio.Semaphore(CONNECTIONS)
        if self.allowance.limited:
            running = budget if budget is not None and budget.runs and meter is not self.shared else None
            if await self.allowance.admit(meter, running) and running is not None:
                running.at_end.append(functools.partial(self.allowance.release, meter))
        await bucket.turn(budget)
        answered = False
        try:
            async with slots:
                if self.allowance.limited:
                    self.allowance.spend(meter, counted=counted)
                meter.requests += 1
                async with self._session.request(
                    method,
                    url,
                    headers=headers,
                    allow_redirects=False,
                    proxy=self._proxies[origin],
                    ssl=_tls_context() if url.scheme == "https" else True,
                ) as response:
                    answered = True
                    bucket.done(response.headers)
                    yield response
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            what = f"the connection to {url.host} failed ({reason}); check the network and the address"
            raise AgainError(ScreeningError("Unreachable", what)) from error
        finally:
            if not answered:
                bucket.done(None)

    async def body(
        self,
        url: URL,
        meter: Meter,
        limit: int,
        refused: Callable[[aiohttp.ClientResponse], ScreeningError],
        budget: Budget | None = None,
    ) -> tuple[bytes, aiohttp.ClientResponse]:
        """A whole small body, redirects followed, in one attempt; and the response it came with.

        Args:
            url: Where to start; text may come compressed.
            meter: Counts every hop.
            limit: Bytes that the body may have, unpacked.
            refused: The error that a final status other than 200 means.
            budget: Stands still while a quota is waited for.

        Raises:
            AgainError: As `request` and `raise_if_passing`; also for a body beyond the limit.
            ScreeningError: As `refused` says.
        """
        for _ in range(HOPS):
            async with self.request("GET", url, {"Accept-Encoding": "gzip"}, meter, budget) as response:
                if is_redirect(response):
                    url = await redirect(response, meter)
                    continue
                self.raise_if_passing(response)
                if response.status != 200:
                    await drained(response, meter)
                    raise refused(response)
                received = bytearray()
                async for piece in unpacked(response, meter):
                    received += piece
                    if len(received) > limit:
                        what = f"{url} sends more than the {limit} bytes it has; try again later"
                        raise AgainError(ScreeningError("BadResponse", what), last=True)
                return bytes(received), response
        raise ScreeningError("BadResponse", f"{url.host} redirects in circles; check HF_ENDPOINT")

    @staticmethod
    async def retried(attempt: Callable[[], Awaitable[T]], budget: Budget) -> T:
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

    def raise_if_passing(self, response: aiohttp.ClientResponse) -> None:
        """Raise `AgainError` for an answer that may pass: 408, 429 and 5xx.

        How long to wait is in ``Retry-After``, or (the Hub's 429 has none) in ``RateLimit: …;t=<seconds>``.
        After a 429 the next attempt waits for its turn, as all others of its bucket do.

        Raises:
            ScreeningError: ``RateLimited``, where that is longer than `LONGEST_WAIT`.
        """
        status, host = response.status, response.url.host
        if status == 429:
            bucket = self.bucket(response.url)
            wait = bucket.asked_wait(response.headers)
            if wait:
                bucket.hold(wait)
                if wait > LONGEST_WAIT:
                    raise rate_limited(host, wait)
            raise AgainError(rate_limited(host, wait), wait=None if wait is None else 0.0)
        if status == 408 or status >= 500:
            raise AgainError(
                ScreeningError("ServerError", f"{host} answered {status} again and again; try again later"),
                wait=asked_wait(response.headers) if status == 503 else None,
            )


def is_redirect(response: aiohttp.ClientResponse) -> bool:
    """Whether a response leads elsewhere."""
    return response.status in (301, 302, 303, 307, 308) and "Location" in response.headers


async def redirect(response: aiohttp.ClientResponse, meter: Meter) -> URL:
    """Where a redirect leads; its body is read so that the connection can serve the next request.

    Raises:
        ScreeningError: ``BadResponse`` if that is no address.
    """
    await drained(response, meter)
    try:
        # Signed addresses are taken as they are: quoting them anew would break the signature.
        url = response.url.join(URL(response.headers["Location"], encoded=True)).with_user(None)
        if url.scheme not in ("http", "https"):
            raise ValueError(url.scheme)
        (url.host or "").encode("idna")  # what name resolution would stumble on
        return url
    except ValueError:
        raise ScreeningError(
            "BadResponse", f"{response.url.host} redirects to what is no address; check HF_ENDPOINT"
        ) from None


async def pieces(response: aiohttp.ClientResponse, meter: Meter) -> AsyncIterator[bytes]:
    """The body as it travels, piece by piece; the meter counts it."""
    async for piece in response.content.iter_any():
        meter.bytes_read += len(piece)
        yield piece


async def unpacked(response: aiohttp.ClientResponse, meter: Meter) -> AsyncIterator[bytes]:
    """The body piece by piece, opened where it came compressed.

    Raises:
        AgainError: It cannot be opened.
    """
    coding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if coding in ("identity", ""):
        async for piece in pieces(response, meter):
            yield piece
        return
    try:
        if coding not in ("gzip", "x-gzip"):
            raise zlib.error(f"unknown Content-Encoding {coding}")
        opened = zlib.decompressobj(16 + zlib.MAX_WBITS)
        async for packed in pieces(response, meter):
            while packed and not opened.eof:
                yield opened.decompress(packed, 1 << 20)  # a bounded step: a few bytes may open to gigabytes
                packed = opened.unconsumed_tail
        yield opened.flush()
    except zlib.error as error:
        what = f"{response.url} came compressed and cannot be unpacked ({error}); try again later"
        raise AgainError(ScreeningError("BadResponse", what), last=True) from error


async def drained(response: aiohttp.ClientResponse, meter: Meter) -> None:
    """Read a short body nobody needs: a connection with unread bytes would have to be closed."""
    received = 0
    async for piece in pieces(response, meter):
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


def environment_proxy(url: URL) -> str | None:
    """The proxy that the environment names for a URL; None for none.

    Asked once an origin: aiohttp's own ``trust_env`` asks at each request, and reads ~/.netrc too.

    Raises:
        ScreeningError: ``Unreachable`` if it is of a kind that is not spoken here, such as SOCKS.
    """
    proxies = urllib.request.getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if not proxy or urllib.request.proxy_bypass(url.host or ""):
        return None
    if "://" not in proxy:
        proxy = f"http://{proxy}"
    if not proxy.startswith(("http://", "https://")):
        kind = proxy.partition("://")[0]
        raise ScreeningError(
            "Unreachable",
            f"expected an HTTP proxy for {url.host}, got a {kind} one; set "
            f"{url.scheme.upper()}_PROXY or NO_PROXY",
        )
    return proxy


@functools.cache
def _tls_context() -> ssl.SSLContext:
    """Certifi's certificates, or those of SSL_CERT_FILE and SSL_CERT_DIR; made once, which takes 40 ms."""
    import certifi

    file, folder = os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")
    if file or folder:
        return ssl.create_default_context(cafile=file, capath=folder)
    return ssl.create_default_context(cafile=certifi.where())


def _kind(path: str) -> str:
    """Which of the Hub's quotas counts a path."""
    if "/resolve/" in path or path.startswith("/api/resolve-cache/"):
        return "resolvers"
    return "api" if path.startswith("/api/") else "pages"
