"""How much a server may be asked: its quotas, as its answers tell them, and the limits of the user.

The Hub counts requests in windows of five minutes, in *buckets*: ``api``, ``resolvers`` and ``pages``. Every
answer says what is left of its bucket (``RateLimit: "api";r=12;t=87``) and how large it is
(``RateLimit-Policy: "fixed window";"api";q=500;w=300``). A request leaves when its bucket has room for it and
for all that are on their way; else it waits for the next window, and the clock of its checkpoint stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from lmeval_dispersion.errors import UsageError
from lmeval_screener.checkpoints.snapshot import Meter
from lmeval_screener.errors import ScreeningError

#: Seconds that a server may ask to wait; the Hub's windows have 300.
LONGEST_WAIT = 900.0
#: Requests that are on their way while a bucket has not yet said what is left.
UNTOLD = 16
#: Share of a bucket, and requests, below which nothing optional is asked for.
RESERVE, RESERVED = 0.25, 16
#: Share of a bucket below which a refusal without a word means that it is empty.
_SPENT = 0.05
#: Servers tell seconds without fractions.
_ROUNDING = 0.5
#: Seconds of waiting that nobody is told about.
_WORTH_A_WORD = 2.0
#: What a checkpoint is taken to cost before one was read.
FIRST_REQUESTS, FIRST_BYTES = 6, 1_500_000

_LEFT = re.compile(r'"(?P<name>[^"]*)"\s*;\s*r\s*=\s*(?P<left>\d+)\s*;\s*t\s*=\s*(?P<seconds>\d+)')
_POLICY = re.compile(r"\bq\s*=\s*(?P<quota>\d+).*?\bw\s*=\s*(?P<window>\d+)")


class Clock(Protocol):
    """What stands still while a request waits for its turn: a `Budget`."""

    def paused(self) -> AbstractContextManager[None]:
        """A span of time that does not count."""
        ...


Notice = Callable[[str, float], None]


class Bucket:
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
        self._flying = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

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
        if self._queue:
            return False
        if self._left is None:
            return self.room() > 0
        return self.room() > max(RESERVED, RESERVE * (self.quota or 0))

    def left_at_once(self) -> bool:
        """Let one request leave if there is room for it now; `done` must follow then."""
        if self._queue or self.room() <= 0:
            return False
        self._flying += 1
        return True

    async def turn(self, clock: Clock | None) -> None:
        """Wait until one request may leave; `done` must follow.

        Raises:
            ScreeningError: ``RateLimited``, where the server wants to be left alone for too long.
        """
        if self.left_at_once():
            return
        self._refuse_long_waits()
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(ticket)
        self._wake()
        start = time.monotonic()
        try:
            with clock.paused() if clock else contextlib.nullcontext():
                await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled() and ticket.exception() is None:
                self._flying -= 1
                self._wake()
            raise
        finally:
            self.waited += time.monotonic() - start

    def done(self, headers: Mapping[str, str] | None) -> None:
        """One request has been answered, with these headers, or has failed (None)."""
        self._flying -= 1
        if headers is not None:
            self._hear(headers)
        if self._queue:
            self._wake()

    def hold(self, seconds: float) -> None:
        """The server asked to wait: nothing of this bucket leaves before."""
        self._held_until = max(self._held_until, time.monotonic() + seconds)
        self._left = None
        if seconds > LONGEST_WAIT:
            while self._queue:
                ticket = self._queue.popleft()
                if not ticket.done():
                    ticket.set_exception(rate_limited(self.name, seconds))

    def asked_wait(self, headers: Mapping[str, str]) -> float | None:
        """Seconds that a refusal asks to wait; where it does not say, those of a window that is spent."""
        if (wait := asked_wait(headers)) is not None:
            return wait
        if self._left is None or self._left > _SPENT * (self.quota or 0):
            return None  # some edge refuses for reasons of its own
        left = self._resets - time.monotonic()
        return left + _ROUNDING if left > 0 else None

    def _hear(self, headers: Mapping[str, str]) -> None:
        told = _LEFT.search(headers.get("RateLimit", ""))
        if told is None:
            self._silent = self._left is None
            return
        self.name, left, resets = told["name"], int(told["left"]), time.monotonic() + int(told["seconds"])
        # Answers overtake one another: inside a window only the least that was said counts.
        same = self._left is not None and abs(resets - self._resets) <= 1.5
        self._left = min(left, self._left) if same and self._left is not None else left
        self._resets = min(resets, self._resets) if same else resets
        if policy := _POLICY.search(headers.get("RateLimit-Policy", "")):
            self.quota, self.window = int(policy["quota"]), float(policy["window"])

    def _refuse_long_waits(self) -> None:
        if (wait := self._held_until - time.monotonic()) > LONGEST_WAIT:
            raise rate_limited(self.name, wait)

    def _wake(self) -> None:
        """Let those go that have room; the others when the window opens, or when an answer comes."""
        while self._queue and self.room() > 0:
            ticket = self._queue.popleft()
            if not ticket.done():
                self._flying += 1
                ticket.set_result(None)
        if self._queue and self._timer is None:
            now = time.monotonic()
            opens = max(self._held_until, self._resets + _ROUNDING if self._left is not None else 0.0)
            if opens > now:
                if self._notice is not None and opens - now > _WORTH_A_WORD:
                    self._notice(self.name, opens - now)
                self._timer = asyncio.get_running_loop().call_later(opens - now + 0.001, self._open)

    def _open(self) -> None:
        self._timer = None
        self._wake()


class Allowance:
    """What a run may cost, by the user's own limits; shared by all that a command does.

    A checkpoint that begins sets aside what one has cost so far at most, so that those that were begun come
    to their end. What is in the cache costs nothing and is read all the same.

    Args:
        requests: Requests to the Hub itself, which its quotas count; None: any number.
        bytes_read: Bytes of bodies, from wherever they come; None: any number.
        notice: Told when requests have to wait for a server's quota, see `Bucket`.

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
        self.requests = 0
        self._done = 0
        self._running: dict[int, _Share] = {}
        self._lists: dict[int, Meter] = {}
        self._typical: tuple[int, int] | None = None
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def limited(self) -> bool:
        """Whether there is any limit."""
        return self.most_requests is not None or self.most_bytes is not None

    @property
    def bytes_read(self) -> int:
        """Bytes so far."""
        lists = sum(meter.bytes_read for meter in self._lists.values())
        return self._done + lists + sum(share.cost[1] for share in self._running.values())

    async def admit(self, meter: Meter, clock: Clock | None) -> bool:
        """Wait until a checkpoint may begin: until others have ended, where it is not known what they leave.

        Args:
            meter: Of the checkpoint.
            clock: Stands still meanwhile; None for what belongs to no checkpoint, such as lists.

        Returns:
            Whether it begins now: `release` must follow at its end.

        Raises:
            ScreeningError: ``NotTried``, where a limit leaves no room for it.
        """
        if id(meter) in self._running or id(meter) in self._lists:
            return False
        if clock is None:
            self._lists[id(meter)] = meter
            return False
        while (full := self._full()) is not None:
            if not self._running or self._used_up() is not None:
                raise self._refusal(*full)
            ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(ticket)
            with clock.paused():
                await ticket
            if id(meter) in self._running:
                return False  # another request of the same checkpoint was let in
        self._running[id(meter)] = _Share(meter, meter.bytes_read)
        return True

    def spend(self, meter: Meter, *, counted: bool) -> None:
        """Say that one request is about to leave.

        Args:
            meter: Of the checkpoint.
            counted: Whether a quota of the Hub counts it.

        Raises:
            ScreeningError: ``NotTried``, where a limit is used up.
        """
        full = self._used_up()
        if full is not None and (counted or full[0] != "--max-requests"):
            raise self._refusal(*full)
        if counted:
            self.requests += 1
            if id(meter) in self._running:
                self._running[id(meter)].requests += 1

    def release(self, meter: Meter) -> None:
        """A checkpoint has ended: what it has cost is what the next one is taken to cost."""
        share = self._running.pop(id(meter))
        self._done += share.cost[1]
        if any(share.cost):
            before = self._typical or (0, 0)
            self._typical = (max(before[0], share.cost[0]), max(before[1], share.cost[1]))
        waiting, self._waiting = self._waiting, []
        for ticket in waiting:
            if not ticket.done():
                ticket.set_result(None)

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
    """What one running checkpoint has cost."""

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
