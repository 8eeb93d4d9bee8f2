"""The time that one checkpoint may take."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from lmeval_dispersion.errors import ScreeningError

T = TypeVar("T")


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
