"""Limits: the time of a checkpoint, the quotas of servers as their answers tell them, the user's own.

The Hub counts requests in windows of five minutes, by kind: ``api``, ``resolvers`` and ``pages``. Every
answer says what is left of its quota (``RateLimit: "api";r=12;t=87``) and how large it is
(``RateLimit-Policy: "fixed window";"api";q=500;w=300``). A request leaves when its quota has room for it and
for all that are on their way; else it waits for the next window, and the clock of its checkpoint stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import functools
import math
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from lmeval_dispersion.errors import UsageError
from lmeval_screener.checkpoints import Meter
from lmeval_screener.errors import ScreeningError

T = TypeVar("T")

#: Seconds that a server may ask to wait; the Hub's windows have 300.
LONGEST_WAIT = 900.0
#: Requests that are on their way while a quota has not yet said what is left.
UNTOLD = 16
#: Refusals of a quota for which one checkpoint's clock stands: a server that refuses on and on is no quota.
PATIENCE = 8
#: Share of a quota, and requests, below which nothing optional is asked for.
RESERVE, RESERVED = 0.25, 16
#: Share of a quota below which a refusal without a word means that it is empty.
_SPENT = 0.05
#: Servers tell seconds without fractions.
_ROUNDING = 0.5
#: Seconds of waiting that are not worth a word.
_WORTH_A_WORD = 2.0
#: What a checkpoint is taken to cost before one was read.
FIRST_REQUESTS, FIRST_BYTES = 6, 1_500_000

_LEFT = re.compile(r'"(?P<name>[^"]*)"\s*;\s*r\s*=\s*(?P<left>\d+)\s*;\s*t\s*=\s*(?P<seconds>\d+)')
_POLICY = re.compile(r"\bq\s*=\s*(?P<quota>\d+).*?\bw\s*=\s*(?P<window>\d+)")

Notice = Callable[[str, float], None]


class Budget:
    """Seconds that one checkpoint may take; the clock runs only while something is done for it.

    Attributes:
        seconds: The whole of it.
        trouble: Why what is being tried again failed the last time: the reason to give when time runs out.
        at_end: What to do when a work has ended.
        refusals: How often each quota had been refused when this budget met it first, see `Quota.turn`.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.trouble: ScreeningError | None = None
        self.at_end: list[Callable[[], None]] = []
        self.refusals: dict[object, int] = {}
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
        """Result of some work, if it comes in time; one work after the other."""
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


class Quota:
    """One quota of one host.

    Args:
        name: See below.
        notice: Called with the name and the seconds, once a window, where requests have to wait for it.

    Attributes:
        name: As the server calls it, else by the kind of address.
        quota: Requests of a whole window; None while the server has not said.
        window: Seconds of a window, likewise.
        waited: Seconds that requests could not leave, all together.
    """

    def __init__(self, name: str, notice: Notice | None = None) -> None:
        self.name, self._notice = name, notice
        self.quota: int | None = None
        self.window: float | None = None
        self.waited = 0.0
        self._left: int | None = None
        self._resets = 0.0
        self._silent = False
        self._held_until = 0.0
        self._refusals = 0
        self._noticed = 0.0
        self._flying = self._waiting = 0
        self._news = asyncio.Event()

    def room(self) -> float:
        """How many requests may leave now."""
        now = time.monotonic()
        if now < self._held_until:
            return 0
        if self._left is not None and now >= self._resets + _ROUNDING:
            self._left = None
        if self._left is None:
            return math.inf if self._silent else UNTOLD - self._flying
        return self._left - self._flying

    def affords(self) -> bool:
        """Whether there is so much room that something optional may be asked for."""
        if self._waiting:
            return False
        if self._left is None:
            return self.room() > 0
        return self.room() > max(RESERVED, RESERVE * (self.quota or 0))

    async def turn(self, budget: Budget | None) -> None:
        """Wait until one request may leave; `done` must follow.

        The budget's clock stands meanwhile, unless the quota was refused `PATIENCE` times since the budget
        met it.
        """
        if self.room() <= 0:
            start = time.monotonic()
            self._waiting += 1
            try:
                await self._room(budget)
            finally:
                self._waiting -= 1
                self.waited += time.monotonic() - start
        self._flying += 1

    async def _room(self, budget: Budget | None) -> None:
        while self.room() <= 0:
            now = time.monotonic()
            if self._held_until - now > LONGEST_WAIT:
                raise rate_limited(self.name, self._held_until - now)
            opens = max(self._held_until, self._resets + _ROUNDING if self._left is not None else 0.0)
            if self._notice is not None and opens - now > _WORTH_A_WORD and opens > self._noticed:
                self._noticed = opens + _WORTH_A_WORD
                self._notice(self.name, opens - now)
            stands = budget is not None and (
                self._refusals - budget.refusals.setdefault(self, self._refusals) < PATIENCE
            )
            self._news.clear()
            clock = budget.paused() if budget is not None and stands else contextlib.nullcontext()
            with clock, contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), opens - now + 0.001 if opens > now else None)

    def done(self, headers: Mapping[str, str] | None) -> None:
        """One request has been answered, with these headers, or has failed (None)."""
        self._flying -= 1
        if headers is not None:
            self._hear(headers)
        self._news.set()

    def hold(self, seconds: float) -> None:
        """The server asked to wait: no request of this quota leaves before."""
        now = time.monotonic()
        self._refusals += now >= self._held_until
        self._held_until = max(self._held_until, now + seconds)
        self._left = None
        self._news.set()

    def asked_wait(self, headers: Mapping[str, str]) -> float | None:
        """Seconds that a refusal asks to wait; where it does not say, those of a window that is spent."""
        if (wait := asked_wait(headers)) is not None:
            return wait
        if self._left is None or self._left > _SPENT * (self.quota or 0):
            return None  # some edge refuses for reasons of its own
        left = self._resets - time.monotonic()
        return left + _ROUNDING if left > 0 else None

    def _hear(self, headers: Mapping[str, str]) -> None:
        stated = _LEFT.search(headers.get("RateLimit", ""))
        if stated is None:
            self._silent = self._left is None
            return
        self.name, left, resets = (
            stated["name"],
            int(stated["left"]),
            time.monotonic() + int(stated["seconds"]),
        )
        # Answers overtake one another: inside a window only the least that was said counts.
        same = self._left is not None and abs(resets - self._resets) <= 1.5
        self._left = min(left, self._left) if same and self._left is not None else left
        self._resets = min(resets, self._resets) if same else resets
        if policy := _POLICY.search(headers.get("RateLimit-Policy", "")):
            self.quota, self.window = int(policy["quota"]), float(policy["window"])


class Allowance:
    """The user's own limits of a run's cost; shared by all that a command does.

    A checkpoint that begins sets aside what one has cost so far at most, so that those that were begun come
    to their end. What is in the cache costs nothing and is read all the same.

    Args:
        requests: Requests to the Hub itself, which its quotas count; None: any number.
        bytes_read: Bytes of bodies, from wherever they come; None: any number.
        notice: Told when requests have to wait for a server's quota, see `Quota`.

    Raises:
        UsageError: A limit below 1.
    """

    def __init__(
        self,
        requests: int | None = None,
        bytes_read: int | None = None,
        notice: Notice | None = None,
    ) -> None:
        for option, limit in (("--max-requests", requests), ("--max-bytes", bytes_read)):
            if limit is not None and limit < 1:
                raise UsageError(f"expected {option} of at least 1, got {limit}")
        self.most_requests, self.most_bytes, self.notice = requests, bytes_read, notice
        self.limited = requests is not None or bytes_read is not None
        self.requests = 0
        self._done = 0
        self._running: dict[int, _Share] = {}
        self._lists: dict[int, Meter] = {}
        self._typical: tuple[int, int] | None = None
        self._ended = asyncio.Event()

    @property
    def bytes_read(self) -> int:
        """Bytes so far."""
        lists = sum(meter.bytes_read for meter in self._lists.values())
        return self._done + lists + sum(share.cost[1] for share in self._running.values())

    async def admit(self, meter: Meter, budget: Budget | None) -> None:
        """Wait until a checkpoint may begin: until others have ended, while their cost is unknown."""
        if not self.limited or id(meter) in self._running or id(meter) in self._lists:
            return
        if budget is None or not budget.runs:
            self._lists[id(meter)] = meter
            return
        while (full := self._full()) is not None:
            if not self._running or self._used_up() is not None:
                raise self._refusal(*full)
            self._ended.clear()
            with budget.paused():
                await self._ended.wait()
            if id(meter) in self._running:
                return  # another request of the same checkpoint was let in
        self._running[id(meter)] = _Share(meter, meter.bytes_read)
        budget.at_end.append(functools.partial(self._release, meter))

    def spend(self, meter: Meter, *, counted: bool) -> None:
        """Say that one request is about to leave."""
        full = self._used_up()
        if full is not None and (counted or full[0] != "--max-requests"):
            raise self._refusal(*full)
        if counted:
            self.requests += 1
            if id(meter) in self._running:
                self._running[id(meter)].requests += 1

    def _release(self, meter: Meter) -> None:
        """A checkpoint has ended: what it has cost is what the next one is taken to cost."""
        share = self._running.pop(id(meter))
        self._done += share.cost[1]
        if any(share.cost):
            before = self._typical or (0, 0)
            self._typical = (max(before[0], share.cost[0]), max(before[1], share.cost[1]))
        self._ended.set()

    def _used_up(self) -> tuple[str, int] | None:
        if self.most_requests is not None and self.requests >= self.most_requests:
            return "--max-requests", self.most_requests
        if self.most_bytes is not None and self.bytes_read >= self.most_bytes:
            return "--max-bytes", self.most_bytes
        return None

    def _full(self) -> tuple[str, int] | None:
        """The limit that leaves no room for one more checkpoint; one alone needs no more than something."""
        if (full := self._used_up()) is not None or not self._running:
            return full
        typical = self._typical or (FIRST_REQUESTS, FIRST_BYTES)
        for at, most, used in (
            (0, self.most_requests, self.requests),
            (1, self.most_bytes, self.bytes_read),
        ):
            aside = sum(max(typical[at] - share.cost[at], 0) for share in self._running.values())
            if most is not None and used + aside + typical[at] > most:
                return ("--max-requests", "--max-bytes")[at], most
        return None

    def _refusal(self, option: str, most: int) -> ScreeningError:
        return ScreeningError(
            "NotTried",
            f"not tried, as {option} {most} leaves no room for it; give the command again: what was read "
            "comes from the cache, and it goes on from here",
        )


@dataclass
class _Share:
    """Cost of one running checkpoint."""

    meter: Meter
    before: int
    requests: int = 0

    @property
    def cost(self) -> tuple[int, int]:
        return self.requests, self.meter.bytes_read - self.before


def asked_wait(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks to wait, by ``Retry-After`` or ``RateLimit``; None if it does not say."""
    value = headers.get("Retry-After", "")
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    if value:
        with contextlib.suppress(ValueError):
            return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    seconds = re.search(r"\bt\s*=\s*(\d+)", headers.get("RateLimit", ""))
    return float(seconds[1]) + _ROUNDING if seconds else None


def rate_limited(host: str | None, wait: float | None) -> ScreeningError:
    """The error of a server that allows no more requests."""
    until = f"in {wait:.0f} s" if wait else "later"
    return ScreeningError(
        "RateLimited", f"{host} allows no more requests now (429); try again {until}, or log in"
    )
