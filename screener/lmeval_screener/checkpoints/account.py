"""The account of reading one checkpoint: its time budget, attempts and traffic, and the cache of bytes."""

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
    """This user's cache, below huggingface_hub's folder for assets."""
    from huggingface_hub import constants

    return Cache(Path(constants.HF_ASSETS_CACHE) / "screen-checkpoints")


class Cache:
    """A folder of entries by kind and key, each with its checksum and written atomically.

    An entry is a file: one line of JSON (``{"key": …, "sha256": …}``), then the content. A damaged entry or
    one of another key counts as missing. After the folder is deleted, checkpoints are read again.
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
        """An entry's content; None if it is missing or damaged."""
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
        """Write an entry, its content in one piece or several; a full or read-only disk is ignored."""
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
    """A transient failure: retry after ``wait`` seconds (None: backoff); ``error`` after ``attempts``."""

    def __init__(
        self, error: ScreeningError, *, wait: float | None = None, attempts: int = ATTEMPTS
    ) -> None:
        super().__init__(str(error))
        self.error = error
        self.wait = wait
        self.attempts = attempts
        self.progressed = False  # whether it got further than the attempt before


def contradiction(what: str, code: str = "BadResponse") -> RetryError:
    """The RetryError of an answer that contradicts the request, the listing or an earlier answer."""
    if code == "BadResponse":
        what = f"{what}; try again, and check the endpoint and any proxy on the way"
    return RetryError(ScreeningError(code, what), attempts=CONTRADICTIONS)


class Account:
    """The account of one checkpoint, or of a whole run, which counts its checkpoints' traffic too.

    Attributes:
        seconds: Time budget; the clock runs only while the checkpoint is worked on.
        cache: Cache of bytes.
        bytes_read: Bytes of bodies as they travelled, failed attempts included, HTTP headers not.
        requests: HTTP requests, retries and redirect hops included.
        trouble: Why the last attempt failed; None if it did not.
        refusals: How often each quota had been refused when this account first used it.
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
        """A checkpoint's account in the same run."""
        return Account(seconds, self._run)

    def add(self, *, bytes_read: int = 0, requests: int = 0) -> None:
        """Count traffic."""
        for account in {self, self._run}:
            account.bytes_read += bytes_read
            account.requests += requests

    @contextlib.contextmanager
    def share(self) -> Iterator[int]:
        """Number of ranges that it may request at a time, fewer while other checkpoints are read.

        A request that waits for a connection costs a fifth more than one that is not yet made.
        """
        self._run._readers += 1
        try:
            yield max(RANGES // self._run._readers, FEWEST_RANGES)
        finally:
            self._run._readers -= 1

    @property
    def remaining(self) -> float:
        """Seconds left of its time budget; below 0 when it is overdrawn."""
        return self.seconds - self._elapsed()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock inside this context, such as during the wait for a server's quota."""
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
        """A coroutine's result, one at a time; ScreeningError when time runs out.

        In an event loop what waits is stopped then; work that does not wait stops at its next `check_time`.
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
                f"not read within {self.seconds:g} s; try again, or set more in DISPERSION_TIMEOUT",
            )
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def retried(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The result of ``attempt``, retried on RetryError with backoff; finally it raises that ``error``."""
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
