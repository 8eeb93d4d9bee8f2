"""Many checkpoints, side by side.

Every checkpoint is a task of its own. It reads the rows that its own tokenizer names, and only when all
have ended are tokenizers compared: nobody waits for the slowest, and nobody's failure stops the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from lmeval_dispersion.errors import ScreeningError, UsageError
from lmeval_dispersion.geometry import METRICS, Metric
from lmeval_screener.checkpoints.hub import Hub
from lmeval_screener.families import family as family_named
from lmeval_screener.ranking import by_tokenizer, mismatch, ranked, screened
from lmeval_screener.reading import Reader, Reading, with_rows_of
from lmeval_screener.result import Failed, Result, Screened
from lmeval_screener.targets import Target, target
from lmeval_screener.tokens.cache import ResolutionCache
from lmeval_screener.tokens.resolution import TokenSet, token_set

T = TypeVar("T")

TIMEOUT = 60.0  # seconds for one checkpoint, everything included
_SIDE_BY_SIDE = 16  # checkpoints at once: their requests share one pool of connections

Progress = Callable[[int, int, str], None]


def screen(
    checkpoints: Iterable[str] = (),
    *,
    family: str | None = None,
    families: str | Path | None = None,
    domain: str = "math",
    reference: str = "reference",
    metric: Metric = "cosine",
    timeout: float = TIMEOUT,
    progress: Progress | None = None,
) -> Result:
    """Rank checkpoints by their dispersion gap, reading only the rows that it needs.

    Args:
        checkpoints: ``REPO``, ``REPO@REVISION``, ``REPO@GLOB`` or folders.
        family: Name of a family whose checkpoints are added.
        families: A family file of your own in place of the bundled one.
        domain: Bundled token set or a YAML file.
        reference: The everyday token set, likewise.
        metric: ``cosine`` or ``euclidean``: which gap ranks. Both are computed.
        timeout: Seconds for one checkpoint.
        progress: Called as ``progress(done, all, label)`` at the start and whenever a checkpoint ends.

    Returns:
        Screened checkpoints, ranked inside (family, scale), and the failed ones with their reasons.

    Raises:
        UsageError: A name, a file or a combination that cannot be used as given.
    """
    if isinstance(checkpoints, str):
        raise UsageError(f"expected a list of checkpoints, got the string {checkpoints!r}; put it in a list")
    targets = [target(text) for text in checkpoints]
    if family is not None:
        targets += family_targets(family, families)
    return screen_targets(
        targets,
        domain=token_set(domain, "domain"),
        reference=token_set(reference, "reference"),
        metric=metric,
        timeout=timeout,
        progress=progress,
    )


def family_targets(name: str, families: str | Path | None = None) -> list[Target]:
    """The checkpoints that a family lists. Raises UsageError where there is no such family or file."""
    found = family_named(name, families)
    return [
        Target(
            entry.repo, entry.revision, family=found.name, scale=entry.scale, local=Path(entry.repo).is_dir()
        )
        for entry in found.checkpoints
    ]


def screen_targets(
    targets: Sequence[Target],
    *,
    domain: TokenSet,
    reference: TokenSet,
    metric: Metric = "cosine",
    timeout: float = TIMEOUT,
    progress: Progress | None = None,
    keep_on_interrupt: bool = False,
) -> Result:
    """:func:`screen` for targets and token sets that are already at hand.

    Args:
        targets: What to screen.
        domain: T.
        reference: R.
        metric: Which gap ranks.
        timeout: Seconds for one checkpoint.
        progress: See :func:`screen`.
        keep_on_interrupt: Whether Ctrl-C ends the reading and returns what is done (main thread only).

    Raises:
        UsageError: No targets, an unknown metric, or a timeout that is not positive.
    """
    if not targets:
        raise UsageError("expected at least one checkpoint or a family, got none; see --list-families")
    if metric not in METRICS:
        raise UsageError(f"expected a metric of {', '.join(METRICS)}, got {metric!r}")
    if not timeout > 0:
        raise UsageError(f"expected a timeout above 0 seconds, got {timeout}")

    async def work() -> Result:
        start = time.perf_counter()
        async with Hub(timeout=timeout) as hub:
            reader = Reader(hub, domain, reference, ResolutionCache(hub.cache))
            run = _Run(hub, reader, timeout, progress, keep_on_interrupt)
            checkpoints = ranked(await run.screened(targets), metric)
        meters = [hub.meter, *(snapshot.meter for snapshot in reader.snapshots)]
        return Result(
            domain=domain.name,
            reference=reference.name,
            metric=metric,
            checkpoints=tuple(checkpoints),
            failed=tuple(run.failed),
            seconds=time.perf_counter() - start,
            bytes_read=sum(meter.bytes_read for meter in meters),
            requests=sum(meter.requests for meter in meters),
        )

    return _finished(work())


def _finished(work: Coroutine[Any, Any, T]) -> T:
    results: list[T] = []

    async def kept() -> None:
        # Not returned: asyncio.run prints its task's result when it puts the signal handler back, which
        # takes 0.1 s for the arrays of a family.
        results.append(await work)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(kept())
    else:
        # A notebook's thread already runs a loop, which cannot run another one.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(asyncio.run, kept()).result()
    return results[0]


class _Run:
    def __init__(
        self, hub: Hub, reader: Reader, timeout: float, progress: Progress | None, keep_on_interrupt: bool
    ) -> None:
        self.failed: list[Failed] = []
        self._hub, self._reader, self._timeout = hub, reader, timeout
        self._progress, self._keep_on_interrupt = progress, keep_on_interrupt

    async def screened(self, targets: Sequence[Target]) -> list[Screened]:
        """All checkpoints that could be read and compared, in the order in which they were asked for."""
        readings = await self._readings(await self._expanded(targets))
        families: dict[str | None, list[Reading]] = {}
        for reading in readings:
            families.setdefault(reading.target.family, []).append(reading)
        found = []
        for family, members in families.items():
            for reading, common in by_tokenizer(family, members):
                if common is None:
                    self._fail(reading.target, mismatch(family, reading, members))
                    continue
                try:
                    if common.resolution != reading.resolution:
                        # Its tokenizer also has words that the others lack: rank it on the common ones.
                        reading = await with_rows_of(reading, common.resolution)
                except ScreeningError as error:
                    self._fail(reading.target, error)
                else:
                    found.append(screened(reading, family, common.tokenizer))
        return found

    async def _expanded(self, targets: Sequence[Target]) -> list[Target]:
        """The targets with globs replaced by the revisions that they stand for, each one once."""
        lists = await asyncio.gather(*(self._revisions(item) for item in targets))
        return list(dict.fromkeys(item for found in lists for item in found))

    async def _revisions(self, item: Target) -> list[Target]:
        if not item.is_glob or item.revision is None:
            return [item]
        try:
            names = await self._hub.revisions(item.repo, item.revision)
        except ScreeningError as error:
            self._fail(item, error)
            return []
        return [Target(item.repo, name, item.family, item.scale) for name in names]

    async def _readings(self, targets: list[Target]) -> list[Reading]:
        limit = asyncio.Semaphore(_SIDE_BY_SIDE)
        done = 0

        async def one(item: Target) -> Reading | None:
            nonlocal done
            try:
                async with limit:
                    return await asyncio.wait_for(self._reader.reading(item), self._timeout)
            except ScreeningError as error:
                self._fail(item, error)
            except asyncio.TimeoutError:
                message = f"not read within {self._timeout:g} s; try again, or allow more with --timeout"
                self._fail(item, ScreeningError("Timeout", message))
            except asyncio.CancelledError:
                if not self._keep_on_interrupt:
                    raise
                message = "stopped before it was read; what was read is cached, run the same command again"
                self._fail(item, ScreeningError("Interrupted", message))
            except Exception as error:
                # What nobody foresaw in one checkpoint must not cost the user all the others.
                if os.environ.get("DISPERSION_DEBUG"):
                    raise
                message = (
                    f"{type(error).__name__}: {error}; please report it (DISPERSION_DEBUG=1 shows where)"
                )
                self._fail(item, ScreeningError("InternalError", message))
            finally:
                done += 1
                if self._progress is not None:
                    self._progress(done, len(targets), item.label)
            return None

        if self._progress is not None:
            self._progress(0, len(targets), "")
        tasks = [asyncio.create_task(one(item)) for item in targets]
        await asyncio.sleep(0)  # a task that is cancelled before its first step would not reach its handler
        if not self._keep_on_interrupt:
            found = await asyncio.gather(*tasks)
        else:
            with _on_interrupt(lambda: [task.cancel() for task in tasks]):
                found = await asyncio.gather(*tasks)
        return [reading for reading in found if reading is not None]

    def _fail(self, item: Target, error: ScreeningError) -> None:
        self.failed.append(Failed(item.repo, item.revision, error.code, str(error)))


@contextlib.contextmanager
def _on_interrupt(act: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C calls ``act`` in place of raising; where the platform has no such handlers it raises as ever."""
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGINT, act)
    except NotImplementedError:
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
