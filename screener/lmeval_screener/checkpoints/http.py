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
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TypeVar

import aiohttp
from yarl import URL

from lmeval_screener.checkpoints.limits import LONGEST_WAIT, Allowance, Bucket, asked_wait, rate_limited
from lmeval_screener.checkpoints.snapshot import Meter
from lmeval_screener.checkpoints.wire import Connection, Pool, Reply, request_bytes, request_start
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
_AS_STORED = {"Accept-Encoding": "identity"}


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


class Content(Protocol):
    """A body to come."""

    def iter_any(self) -> AsyncIterator[bytes]:
        """Piece by piece."""
        ...


class Answer(Protocol):
    """What is looked at of an answer, whichever client it came through."""

    @property
    def status(self) -> int:
        """Of HTTP."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """Fields, looked up without regard to case."""
        ...

    @property
    def url(self) -> URL:
        """What was asked."""
        ...

    @property
    def content(self) -> Content:
        """The body."""
        ...


class Slots:
    """Requests to one host at a time; who comes first is served first.

    Args:
        number: How many.
    """

    def __init__(self, number: int) -> None:
        self._free = number
        self._waiting: deque[Callable[[], bool]] = deque()  # each takes a slot or wants none any more

    async def acquire(self) -> None:
        """Wait for a slot; `release` must follow."""
        if self._free:
            self._free -= 1
            return
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take() -> bool:
            if ticket.done():
                return False
            ticket.set_result(None)
            return True

        self._waiting.append(take)
        try:
            await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled():
                self.release()
            raise

    def give(self, take: Callable[[], bool]) -> None:
        """Call something as soon as there is a slot for it; `release` must follow where it says yes."""
        self._waiting.append(take)
        if self._free:
            self._free -= 1
            self.release()

    def release(self) -> None:
        """A slot is free: the next one gets it."""
        while self._waiting:
            if self._waiting.popleft()():
                return
        self._free += 1


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """How one address is asked, as far as that is the same for every request.

    Attributes:
        url: The address.
        bucket: The quota that counts its requests.
        slots: Those of its host.
        counted: Whether it is of the Hub's own origin.
        own: The token, for that origin only.
        proxy: Which the environment names for it.
        pool: What its ranges are read over; None where aiohttp reads them too.
        start: First lines of a request over the pool.
    """

    url: URL
    bucket: Bucket
    slots: Slots
    counted: bool
    own: Mapping[str, str]
    proxy: str | None
    pool: Pool | None
    start: bytes


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
        self._agent = agent
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=SILENCE, sock_read=SILENCE),
            headers={"User-Agent": agent},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # bytes are counted as they travel; `unpacked` opens them
        )
        self._slots: dict[URL, Slots] = {}
        self._proxies: dict[URL, str | None] = {}
        self._buckets: dict[tuple[URL, str], Bucket] = {}
        self._pools: dict[URL, Pool] = {}

    async def close(self) -> None:
        """Close every connection."""
        for pool in self._pools.values():
            pool.close()
        await asyncio.sleep(0)  # their sockets are closed in the loop's next round
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
        route = self.route(url)
        async with (
            _Turn(self, route, meter, budget) as turn,
            self._session.request(
                method,
                url,
                headers={**headers, **route.own},
                allow_redirects=False,
                proxy=route.proxy,
                ssl=_tls_context() if url.scheme == "https" else True,
            ) as response,
        ):
            turn.answered(response.headers)
            yield response

    def route(self, url: URL) -> Route:
        """How an address is asked; worth keeping where it is asked often.

        Raises:
            ScreeningError: As `environment_proxy`.
        """
        origin = url.origin()
        if origin not in self._proxies:
            self._proxies[origin] = environment_proxy(url)
        if (slots := self._slots.get(origin)) is None:
            slots = self._slots[origin] = Slots(CONNECTIONS)
        counted = origin == self._origin
        own = {"Authorization": f"Bearer {self.token}"} if counted and self.token else {}
        fields = {"User-Agent": self._agent, "Accept": "*/*", **_AS_STORED, **own}
        pool, start = None, request_start(url, fields)
        if self._proxies[origin] is None and start is not None and (pool := self._pools.get(origin)) is None:
            pool = self._pools[origin] = Pool(origin, SILENCE, _tls_context)
        return Route(url, self.bucket(url), slots, counted, own, self._proxies[origin], pool, start or b"")

    def ranged(
        self,
        route: Route,
        headers: Mapping[str, str],
        meter: Meter,
        budget: Budget,
        wanted: int,
        whole: int,
    ) -> AbstractAsyncContextManager[Answer]:
        """`request` for a range, over our own connections where there is no proxy.

        Args:
            route: Where to.
            headers: Beside the usual ones, of which one asks for the bytes as they are stored.
            meter: Counts it.
            budget: Stands still while the quota is waited for.
            wanted: Bytes of the range.
            whole: Bytes of the body that are taken where the server sends the whole file.

        Raises:
            AgainError, ScreeningError: As `request`.
        """
        if route.pool is not None:
            content = request_bytes(route.start, headers)
            if content is not None:
                return _Ranged(_Turn(self, route, meter, budget), route.pool, content, wanted, whole)
        return self.request("GET", route.url, {**headers, **_AS_STORED}, meter, budget)

    def batch(
        self,
        route: Route,
        headers: Mapping[str, str],
        meter: Meter,
        spans: Sequence[tuple[int, int]],
        whole: int,
        fits: Callable[[Reply, int, int], bool],
        *,
        direct: bool = True,
    ) -> Batch:
        """Many ranges of one address at once; where our own connections cannot be used, all are left over.

        Args:
            route: Where to.
            headers: Beside the usual ones and ``Range``.
            meter: Counts them.
            spans: Bytes ``[begin, end)`` of each.
            whole: As for `ranged`.
            fits: Whether an answer is the range that was asked for, with all of its bytes.
            direct: Whether to ask for them; else all are left over too.
        """
        # The user's own limits are asked before every request: there a batch has no place.
        direct = direct and route.pool is not None and not self.allowance.limited
        start = request_bytes(route.start, headers, open_ended=True) if direct else None
        return Batch(route, start, meter, spans, whole, fits)

    async def body(
        self,
        url: URL,
        meter: Meter,
        limit: int,
        refused: Callable[[Answer], ScreeningError],
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

    def raise_if_passing(self, response: Answer) -> None:
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


class _Turn:
    """One request from the wait for its quota and for a slot to its end; an asynchronous context manager.

    Raises:
        AgainError: The connection failed or broke inside.
        ScreeningError: ``RateLimited`` or ``NotTried``, on entering.
    """

    __slots__ = ("_answered", "_budget", "_meter", "_transport", "route")

    def __init__(self, transport: Transport, route: Route, meter: Meter, budget: Budget | None) -> None:
        self._transport, self.route, self._meter, self._budget = transport, route, meter, budget
        self._answered = False

    async def __aenter__(self) -> _Turn:
        transport, route, meter, budget = self._transport, self.route, self._meter, self._budget
        allowance = transport.allowance
        if allowance.limited:
            running = budget if budget is not None and budget.runs and meter is not transport.shared else None
            if await allowance.admit(meter, running) and running is not None:
                running.at_end.append(functools.partial(allowance.release, meter))
        await route.bucket.turn(budget)
        try:
            await route.slots.acquire()
            try:
                if allowance.limited:
                    allowance.spend(meter, counted=route.counted)
            except BaseException:
                route.slots.release()
                raise
        except BaseException:
            route.bucket.done(None)
            raise
        meter.requests += 1
        return self

    def answered(self, headers: Mapping[str, str]) -> None:
        """A head came: the quota may be told in it."""
        self._answered = True
        self.route.bucket.done(headers)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.route.slots.release()
        if not self._answered:
            self.route.bucket.done(None)
        _raise_if_broken(self.route.url, error)


def _raise_if_broken(url: URL, error: BaseException | None) -> None:
    """Raise `AgainError` for what a connection fails with."""
    if isinstance(error, (aiohttp.ClientError, asyncio.TimeoutError, OSError)):
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        what = f"the connection to {url.host} failed ({reason}); check the network and the address"
        raise AgainError(ScreeningError("Unreachable", what)) from error


class _Ranged:
    """A range over our own connections; an asynchronous context manager, as `Transport.request` is."""

    __slots__ = ("_content", "_pool", "_reply", "_turn", "_wanted", "_whole")

    def __init__(self, turn: _Turn, pool: Pool, content: bytes, wanted: int, whole: int) -> None:
        self._turn, self._pool, self._content = turn, pool, content
        self._wanted, self._whole = wanted, whole
        self._reply: Reply | None = None

    async def __aenter__(self) -> Answer:
        turn = await self._turn.__aenter__()
        try:
            reply = await self._pool.ask(turn.route.url, self._content, self._wanted, self._whole)
        except BaseException as error:
            await turn.__aexit__(type(error), error, error.__traceback__)
            raise
        turn.answered(reply.headers)
        self._reply = reply
        return reply

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._reply is not None
        if error is None:
            self._pool.done(self._reply)
        else:
            self._pool.drop(self._reply.connection)
        await self._turn.__aexit__(kind, error, trace)


class Came:
    """An answer of a batch that is not as it should be, or the error that came in its place.

    An asynchronous context manager, as `Transport.ranged` is: who looks into it need not ask once more.

    Args:
        url: What was asked.
        outcome: What came.
    """

    def __init__(self, url: URL, outcome: Reply | Exception) -> None:
        self.url, self._outcome = url, outcome

    async def __aenter__(self) -> Answer:
        if isinstance(self._outcome, Exception):
            _raise_if_broken(self.url, self._outcome)
            raise self._outcome
        return self._outcome

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _raise_if_broken(self.url, error)


class Batch:
    """Ranges of one address, over our own connections and without a task for each; made by `Transport.batch`.

    An answer is looked at in the moment in which it comes, and its connection goes on with the next range,
    of this batch or of another one's, as the slots of the host are dealt out. What fits is kept. With the
    first that does not, nothing new is sent: it and all that were not asked for yet are left over, to be read
    one by one with all the patience that takes. A quota without room has the same effect.

    `close` must follow.

    Attributes:
        bodies: Of each range, once it came.
        left: Ranges that are left over, by their place, with what came of them if anything did.
    """

    def __init__(
        self,
        route: Route,
        start: bytes | None,
        meter: Meter,
        spans: Sequence[tuple[int, int]],
        whole: int,
        fits: Callable[[Reply, int, int], bool],
    ) -> None:
        self._route, self._start, self._meter, self._spans = route, start, meter, spans
        self._whole, self._fits = whole, fits
        self.bodies: list[bytes] = [b""] * len(spans)
        self.left: deque[tuple[int, Came | None]] = deque()
        self._next = 0
        self._flying: dict[Connection, int] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._single = 0  # read one by one meanwhile
        self._fewer = asyncio.Event()
        self._news: asyncio.Future[None] | None = None
        if start is None:
            self._leave()
        for _ in range(min(RANGES, len(spans) - self._next)):
            route.slots.give(self._take)

    async def settled(self) -> bool:
        """Wait until everything came, or something is left over; whether everything came."""
        while not self.left and (self._flying or self._opening or self._next < len(self._spans)):
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        return not self.left

    @contextlib.asynccontextmanager
    async def room(self) -> AsyncIterator[None]:
        """Wait until what is on its way and what is read one by one leave room for one more."""
        while len(self._flying) + len(self._opening) + self._single >= RANGES:
            self._fewer.clear()
            await self._fewer.wait()
        self._single += 1
        try:
            yield
        finally:
            self._single -= 1
            self._fewer.set()

    def close(self) -> None:
        """Stop what is still on its way."""
        self._leave()
        flying, self._flying = self._flying, {}
        opening, self._opening = self._opening, set()
        for task in opening:
            task.cancel()
        for connection in flying:
            self._pool.drop(connection)
        for _ in range(len(flying) + len(opening)):
            self._route.bucket.done(None)
            self._route.slots.release()

    @property
    def _pool(self) -> Pool:
        assert self._route.pool is not None
        return self._route.pool

    def _leave(self) -> None:
        """Send nothing new."""
        self.left.extend((at, None) for at in range(self._next, len(self._spans)))
        self._next = len(self._spans)

    def _take(self) -> bool:
        """There is a slot: ask for the next range, if there is one and the quota has room for it."""
        at = self._next
        if at == len(self._spans):
            return False
        if not self._route.bucket.left_at_once():
            self._leave()
            self._tell()
            return False
        self._next = at + 1
        self._meter.requests += 1
        connection = self._pool.rested()
        if connection is not None:
            self._send(connection, at)
        else:
            task = asyncio.get_running_loop().create_task(self._open(at))
            self._opening.add(task)
        return True

    async def _open(self, at: int) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            connection = await self._pool.opened()
        except Exception as error:
            if task in self._opening:  # else the batch was closed
                self._opening.discard(task)
                self._came(None, at, error)
        else:
            self._opening.discard(task)
            self._send(connection, at)

    def _send(self, connection: Connection, at: int) -> None:
        assert self._start is not None
        begin, end = self._spans[at]
        self._flying[connection] = at
        request = b"%bRange: bytes=%d-%d\r\n\r\n" % (self._start, begin, end - 1)
        connection.send(request, end - begin, self._whole, functools.partial(self._came, connection, at))

    def _came(self, connection: Connection | None, at: int, outcome: Reply | Exception) -> None:
        """The answer to a range, or why there is none."""
        url, pool, slots = self._route.url, self._pool, self._route.slots
        if connection is not None:
            del self._flying[connection]
        if isinstance(outcome, Exception):
            self._route.bucket.done(None)
            came: Came | None = Came(url, outcome)
            if connection is not None:
                pool.drop(connection)
                if isinstance(outcome, ConnectionError) and connection.served and connection.silent:
                    # A used connection that the server has closed meanwhile: nothing came of it at all.
                    came, self._meter.requests = None, self._meter.requests - 1
            self._odd(at, came)
        else:
            self._route.bucket.done(outcome.headers)
            if self._fits(outcome, *self._spans[at]):
                self._meter.bytes_read += len(outcome.body)
                self.bodies[at] = outcome.body
                pool.done(outcome)
            else:
                outcome.url = url
                if is_redirect(outcome):
                    pool.done(outcome)
                else:
                    pool.drop(outcome.connection)
                self._odd(at, Came(url, outcome))
        self._fewer.set()
        if self._next < len(self._spans):
            slots.give(self._take)
        elif not self._flying and not self._opening:
            self._tell()
        slots.release()

    def _odd(self, at: int, came: Came | None) -> None:
        self.left.append((at, came))
        self._leave()
        self._tell()

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


def is_redirect(response: Answer) -> bool:
    """Whether a response leads elsewhere."""
    return response.status in (301, 302, 303, 307, 308) and "Location" in response.headers


async def redirect(response: Answer, meter: Meter) -> URL:
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


async def pieces(response: Answer, meter: Meter) -> AsyncIterator[bytes]:
    """The body as it travels, piece by piece; the meter counts it."""
    async for piece in response.content.iter_any():
        meter.bytes_read += len(piece)
        yield piece


async def unpacked(response: Answer, meter: Meter) -> AsyncIterator[bytes]:
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


async def drained(response: Answer, meter: Meter) -> None:
    """Read a short body nobody needs: a connection with unread bytes would have to be closed."""
    received = 0
    async for piece in pieces(response, meter):
        received += len(piece)
        if received > 65_536:
            break


async def side_by_side(works: Iterable[Coroutine[Any, Any, T]], most: int | None = None) -> list[T]:
    """Results of works done at the same time; when one fails, the others are stopped before it is raised.

    Args:
        works: What is to be done.
        most: At most so many at a time, and no other is taken before; None: all.
    """
    if most is not None:
        results: dict[int, T] = {}
        waiting = enumerate(works)

        async def some() -> None:
            for place, work in waiting:
                results[place] = await work

        await side_by_side(some() for _ in range(most))
        return [results[place] for place in range(len(results))]
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
