"""Limits: a checkpoint's time budget, and servers' rate limits.

The Hub counts requests in windows of five minutes, by kind: ``api``, ``resolvers`` and ``pages``. Every
answer states the rest of its quota (``RateLimit: "api";r=12;t=87``) and its size. A request is sent when the
quota also covers those in flight; else it waits, and its checkpoint's clock stops.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, TypeVar

from lmeval_screener.checkpoints.concurrency import in_loop
from lmeval_screener.errors import ScreeningError

T = TypeVar("T")

#: Longest wait that a server may ask for, in seconds; the Hub's windows have 300.
LONGEST_WAIT = 900.0
#: Requests in flight until a server has stated the rest of its quota.
UNSTATED = 16
#: Refusals (429) that stop a checkpoint's clock: a server that keeps refusing has no quota.
PATIENCE = 8
#: Servers state whole seconds.
_ROUNDING = 0.5
#: Waits shorter than this, in seconds, are not reported.
_REPORTED_WAIT = 2.0

_LEFT = re.compile(r'"(?P<name>[^"]*)"\s*;\s*r\s*=\s*(?P<left>\d+)\s*;\s*t\s*=\s*(?P<seconds>\d+)')

Notice = Callable[[str, float], None]


class Budget:
    """Seconds that a checkpoint may take; the clock runs only while it is worked on."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.trouble: ScreeningError | None = None  # why the last attempt failed
        self.refusals: dict[Quota, int] = {}  # of each quota, when this budget first used it
        self._spent = 0.0
        self._since: float | None = None
        self._pauses = 0

    @property
    def remaining(self) -> float:
        """Seconds left."""
        return self.seconds - self._elapsed()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A span of time that does not count, such as the wait for a server's quota."""
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
        """Result of some work, if it ends in time; one piece of work at a time, in turn without a limit."""
        if not in_loop():
            return await work
        import asyncio

        self._since = time.monotonic()
        task = asyncio.ensure_future(work)
        try:
            while not task.done() and (self.remaining > 0 or self._pauses):
                # The clock may have been stopped meanwhile: then more time is left.
                left = None if math.isinf(self.seconds) else max(self.remaining, 0.05)
                await asyncio.wait((task,), timeout=left)
            if task.done():
                return task.result()
            raise self.trouble or ScreeningError(
                "Timeout",
                f"not read within {self.seconds:g} s; try again, or set more in DISPERSION_TIMEOUT",
            )
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            self._spent = self._elapsed()
            self._since = None

    def _elapsed(self) -> float:
        running = 0.0 if self._since is None or self._pauses else time.monotonic() - self._since
        return self._spent + running


class Quota:
    """The rate limit of one host for one kind of request."""

    def __init__(self, name: str, notice: Notice | None = None) -> None:
        self.name, self._notice = name, notice
        self._left: int | None = None
        self._resets = self._throttled_until = self._noticed = 0.0
        self._unlimited = False
        self._refusals = self._in_flight = 0
        import asyncio

        self._changed = asyncio.Event()

    def available(self) -> float:
        """How many requests may be sent now."""
        now = time.monotonic()
        if now < self._throttled_until:
            return 0
        if self._left is not None and now >= self._resets:
            self._left = None
        if self._left is None:
            return math.inf if self._unlimited else UNSTATED - self._in_flight
        return self._left - self._in_flight

    async def acquire(self, budget: Budget) -> None:
        """Wait until one request may be sent; `release` must follow.

        The budget's clock stops meanwhile, unless the quota was refused `PATIENCE` times since the budget
        met it.
        """
        import asyncio

        while self.available() <= 0:
            now = time.monotonic()
            if self._throttled_until - now > LONGEST_WAIT:
                raise rate_limited(self.name, self._throttled_until - now)
            opens = self._resets if self._left is not None else 0.0
            opens = self._throttled_until if now < self._throttled_until else opens
            if self._notice is not None and opens - now > _REPORTED_WAIT and opens > self._noticed:
                self._noticed = opens + _REPORTED_WAIT
                self._notice(self.name, opens - now)
            clock: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if self._refusals - budget.refusals.setdefault(self, self._refusals) < PATIENCE:
                clock = budget.paused()
            self._changed.clear()
            with clock, contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), opens - now + 0.001 if opens > now else None)
        self._in_flight += 1

    def release(self, headers: Mapping[str, str] | None) -> None:
        """Record the end of one request, with its response headers or, if it failed, None."""
        self._in_flight -= 1
        if headers is not None:
            self._update(headers)
        self._changed.set()

    def throttle(self, seconds: float) -> None:
        """Send no request of this quota for some seconds, as the server asks."""
        now = time.monotonic()
        self._refusals += now >= self._throttled_until
        self._throttled_until = max(self._throttled_until, now + seconds)
        self._left = None
        self._changed.set()

    def _update(self, headers: Mapping[str, str]) -> None:
        stated = _LEFT.search(headers.get("RateLimit", ""))
        if stated is None:
            self._unlimited = self._left is None
            return
        self.name, left = stated["name"], int(stated["left"])
        resets = time.monotonic() + int(stated["seconds"]) + _ROUNDING
        if self._left is not None and abs(resets - self._resets) <= 1.5:
            # Responses overtake one another: inside a window only the smallest value counts.
            left, resets = min(left, self._left), min(resets, self._resets)
        self._left, self._resets = left, resets


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait before a retry, by ``Retry-After`` or ``RateLimit``; None if neither says."""
    value = headers.get("Retry-After", "")
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    if value:
        import email.utils

        with contextlib.suppress(ValueError):
            return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    seconds = re.search(r"\bt\s*=\s*(\d+)", headers.get("RateLimit", ""))
    return float(seconds[1]) + _ROUNDING if seconds else None


def rate_limited(host: str | None, wait: float | None) -> ScreeningError:
    """The error of a reached rate limit."""
    until = f"in {wait:.0f} s" if wait else "later"
    return ScreeningError(
        "RateLimited", f"{host} allows no more requests now (429); try again {until}, or log in"
    )
