"""The account of reading one checkpoint: time budget, retries, traffic, and the cache of bytes."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from lmeval_screener.budgets import timed
from lmeval_screener.checkpoints.concurrency import in_loop
from lmeval_screener.errors import ScreeningError

T = TypeVar("T")

#: Attempts without progress before giving up; the backoff between retries doubles from `FIRST_BACKOFF` (s).
ATTEMPTS = 5
FIRST_BACKOFF = 0.25
#: Attempts after answers that contradict the request, until a range of the same file is correct.
CONTRADICTIONS = 3
#: Ranges of one checkpoint at a time: alone, and the minimum when several are read.
RANGES = 64
FEWEST_RANGES = 16
# Unique names of files being written, even if processes share the folder over a network.
_TOKEN = os.urandom(4).hex()
_NUMBERS = itertools.count()


def usual_cache() -> Cache:
    """Return the default cache, whose folder is inside huggingface_hub's ``HF_ASSETS_CACHE``."""
    from huggingface_hub import constants

    return Cache(Path(constants.HF_ASSETS_CACHE) / "screen-checkpoints")


class Cache:
    """A cache on disk that keeps bytes under a kind, such as ``headers``, and a key.

    Each entry is one file: a line of JSON (``{"key": …, "sha256": …}``), then the content. Entries
    are written atomically, and a damaged entry counts as missing. Users may delete the folder at
    any time; checkpoints are then read from their source again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _place(self, kind: str, key: str) -> tuple[str, str]:
        """Folder and name of an entry."""
        name = hashlib.sha256(key.encode()).hexdigest()[:40]
        return f"{self.folder}/{kind}/{name[:2]}", name

    def _make(self, folder: str) -> None:
        """Make an entry's folder and those above it, for this user alone: private repositories have rows."""
        os.makedirs(self.folder.parent, exist_ok=True)
        for place in (self.folder, os.path.dirname(folder), folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir(place, 0o700)

    def read(self, kind: str, key: str) -> bytes | None:
        """Return the content of an entry; None if the entry is missing or damaged."""
        try:
            with open("/".join(self._place(kind, key)), "rb") as file:
                raw = file.read()
        except OSError:
            return None
        head, newline, content = raw.partition(b"\n")
        try:
            entry = json.loads(head)
        except (ValueError, RecursionError):
            return None
        if not newline or not isinstance(entry, dict) or entry.get("key") != key:
            return None
        if entry.get("sha256") != hashlib.sha256(content).hexdigest():
            return None
        return content

    def write(self, kind: str, key: str, *content: bytes) -> None:
        """Write an entry; the pieces of ``content`` are joined.

        If the disk is full or read-only, nothing is written and no error is raised.
        """
        folder, name = self._place(kind, key)
        digest = hashlib.sha256()
        for piece in content:
            digest.update(piece)
        head = json.dumps({"key": key, "sha256": digest.hexdigest()}).encode()
        # The final name appears only once the whole content is written, whatever interrupts us.
        temporary = f"{folder}/.new-{os.getpid()}-{_TOKEN}-{next(_NUMBERS)}"
        try:
            if not os.path.isdir(folder):  # a hundred times as fast as trying to make it
                self._make(folder)
            with open(temporary, "xb", opener=_private) as file:
                file.write(head + b"\n")
                file.writelines(content)
            os.replace(temporary, f"{folder}/{name}")
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class RetryError(Exception):
    """A failure that may be temporary, after which `Account.retried` tries again.

    Attributes:
        error: The error to raise once there are no attempts left.
        wait: Seconds until the next attempt; None for exponential backoff.
        attempts: Number of attempts in a row without progress after which ``error`` is raised.
        progressed: Whether this attempt got further than the one before, such as by more bytes.
    """

    def __init__(
        self, error: ScreeningError, *, wait: float | None = None, attempts: int = ATTEMPTS
    ) -> None:
        super().__init__(str(error))
        self.error = error
        self.wait = wait
        self.attempts = attempts
        self.progressed = False


def contradiction(what: str, code: str = "BadResponse") -> RetryError:
    """Return the RetryError for a response that contradicts the request or an earlier response.

    ``what`` says what is wrong, and ``code`` is the code of the error. With the code
    ``BadResponse``, the message also advises to try again and to check the endpoint and any proxy.
    """
    if code == "BadResponse":
        what = f"{what}; try again, and check the endpoint and any proxy on the way"
    return RetryError(ScreeningError(code, what), attempts=CONTRADICTIONS)


class Account:
    """Time budget, retries and traffic of reading one checkpoint, or of a whole screening.

    Traffic of a checkpoint is also added to the account of the screening that it is part of.

    Args:
        seconds: Time budget in seconds.
        run: Account of the screening; None for the account of a screening itself.

    Attributes:
        seconds: Time budget in seconds, infinite for no limit. The clock runs only while the
            checkpoint is being read.
        cache: Cache for the content that is read.
        bytes_read: Bytes of response bodies as transferred (perhaps compressed), including failed
            attempts, without HTTP headers.
        requests: Number of HTTP requests, including retries and redirects.
        trouble: Error of the last attempt; None if that attempt succeeded, or before the first.
        refusals: For each `Quota` that this account had to wait for, how often the server had
            asked for a pause (status 429) when the first wait began.
    """

    def __init__(self, seconds: float = math.inf, run: Account | None = None) -> None:
        self.seconds = seconds
        self.cache: Cache = run.cache if run else usual_cache()
        self.bytes_read = self.requests = 0
        self.trouble: ScreeningError | None = None
        self.refusals: dict[object, int] = {}
        self._run = run or self
        self._readers = 0  # number of checkpoints being read, which share connections
        self._spent = 0.0
        self._since: float | None = None
        self._pauses = 0

    def part(self, seconds: float) -> Account:
        """Return an account for one checkpoint of the same screening.

        ``seconds`` is the checkpoint's time budget.
        """
        return Account(seconds, self._run)

    def add(self, *, bytes_read: int = 0, requests: int = 0) -> None:
        """Add bytes and requests to this account and to that of the screening."""
        for account in {self, self._run}:
            account.bytes_read += bytes_read
            account.requests += requests

    @contextlib.contextmanager
    def share(self) -> Iterator[int]:
        """Yield the number of byte ranges that this checkpoint may request at a time.

        The more checkpoints are inside this context at the same time, the smaller the number.
        """
        # A request that waits for a connection costs a fifth more than one that is not yet made.
        self._run._readers += 1
        try:
            yield max(RANGES // self._run._readers, FEWEST_RANGES)
        finally:
            self._run._readers -= 1

    @property
    def remaining(self) -> float:
        """Seconds left of the time budget; negative if more were used."""
        return self.seconds - self._elapsed()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock inside this context, for example while waiting for a server's quota."""
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
        """Await ``work`` within the time budget and return its result.

        Only one coroutine of an account may be awaited at a time. When time runs out, a coroutine
        that waits in an event loop is cancelled; one that computes stops at its next call of
        `budgets.check_time`.

        Raises:
            ScreeningError: Time ran out (``Timeout``, or the error of the last failed attempt).
        """
        self._since = time.monotonic()
        try:
            with timed(lambda: math.inf if self._pauses else self.remaining):
                return await self._bounded(work) if in_loop() else await work
        finally:
            self._spent = self._elapsed()
            self._since = None

    async def _bounded(self, work: Coroutine[Any, Any, T]) -> T:
        import asyncio

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
                f"reading took longer than {self.seconds:g} s; try again, or set "
                "DISPERSION_TIMEOUT to a larger number of seconds",
            )
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def retried(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Call ``attempt`` until it succeeds, and return its result.

        After a RetryError, this method waits for about the seconds that the RetryError states, or
        with exponential backoff, and calls ``attempt`` again. The ``error`` of the RetryError is
        raised if no attempts are left, or if the wait is longer than the rest of the time budget.
        """
        failures = 0
        while True:
            try:
                result = await attempt()
                self.trouble = None
                return result
            except RetryError as retry:
                self.trouble = retry.error
                failures = 0 if retry.progressed else failures + 1
                wait = retry.wait
                if wait is None:
                    wait = FIRST_BACKOFF * 2 ** max(failures - 1, 0)
                wait *= 1 + random.random() / 2
                if failures >= retry.attempts or wait > self.remaining:
                    raise retry.error from retry
            import asyncio

            await asyncio.sleep(wait)

    def _elapsed(self) -> float:
        if self._since is None or self._pauses:
            return self._spent
        return self._spent + time.monotonic() - self._since
