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

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.geometry import METRICS, Metric
from lmeval_screener.accuracies import Accuracies, read_accuracies
from lmeval_screener.checkpoints.http import Budget
from lmeval_screener.checkpoints.hub import Hub
from lmeval_screener.checkpoints.limits import Allowance
from lmeval_screener.checkpoints.snapshot import Meter
from lmeval_screener.errors import ScreeningError
from lmeval_screener.ranking.groups import common_tokenizers, mismatch, rank_readings, same_tokens
from lmeval_screener.reading import Reader, Reading, read_again, with_controls
from lmeval_screener.result import Failed, Result
from lmeval_screener.targets.demo import demo_targets
from lmeval_screener.targets.families import load_family
from lmeval_screener.targets.selection import Selected, Selection, select_targets
from lmeval_screener.targets.target import Target
from lmeval_screener.tokens.cache import ResolutionCache
from lmeval_screener.tokens.sets import TokenSet, load_token_set

T = TypeVar("T")

TIMEOUT = 60.0  # seconds for one checkpoint, everything included; the only time limit there is
_SIDE_BY_SIDE = 16  # checkpoints at once: their requests share one pool of connections
_SCOUTS = 3  # checkpoints that are tried alone while the Hub does not answer; when all fail, no more are
_PATIENCE = 0.25  # seconds without an answer or a failed connection after which nobody waits for the scouts

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
    controls: bool = False,
    accuracy: str | Path | None = None,
    demo: bool = False,
    progress: Progress | None = None,
    tokenizer: str | None = None,
    selection: Selection | None = None,
    allowance: Allowance | None = None,
) -> Result:
    """Rank checkpoints by their dispersion gap, reading only the rows that it needs.

    Args:
        checkpoints: ``REPO``, ``REPO@REVISION``, ``REPO@GLOB``, ``ORG/*``, pages of the Hub, folders, folders
            of training runs, files of weights, or addresses such as ``s3://bucket/run/checkpoint-*``.
        family: Name of a family whose checkpoints are added.
        families: A family file of your own in place of the bundled one.
        domain: Bundled token set or a YAML file.
        reference: The everyday token set, likewise.
        metric: ``cosine`` or ``euclidean``: which gap ranks. Both are computed.
        timeout: Seconds for one checkpoint.
        controls: Whether to read gauge controls too: at most 1 MB more for each checkpoint.
        accuracy: What to compare G with: a CSV file, lm-eval's results, or ``hub:TASK``; see
            :func:`lmeval_screener.accuracies.read_accuracies`.
        demo: Whether to add the bundled demo's checkpoints.
        progress: Called as ``progress(done, all, label)`` at the start and whenever a checkpoint ends.
        tokenizer: Where the tokenizer of checkpoints that store none is read: a repository, a folder, an
            address, or a tokenizer's file.
        selection: What is selected on the Hub beside what is named.
        allowance: What the run may cost.

    Returns:
        Screened checkpoints, ranked inside (family, scale), and the failed ones with their reasons.

    Raises:
        UsageError: A name, a file or a combination that cannot be used as given.
    """
    if isinstance(checkpoints, str):
        raise UsageError(f"expected a list of checkpoints, got the string {checkpoints!r}; put it in a list")
    selected = _in_a_loop_or_not(
        lambda: select_targets(
            list(checkpoints), selection or Selection(), allowance=allowance, tokenizer=tokenizer
        )
    )
    targets = selected.targets
    if family is not None:
        targets += load_family(family, families).checkpoints
    if demo:
        targets += demo_targets()
    return screen_targets(
        targets,
        domain=load_token_set(domain, "domain"),
        reference=load_token_set(reference, "reference"),
        metric=metric,
        timeout=timeout,
        controls=controls,
        accuracies=None if accuracy is None else read_accuracies(str(accuracy), targets),
        progress=progress,
        allowance=allowance,
        selected=selected,
    )


def screen_targets(
    targets: Sequence[Target],
    *,
    domain: TokenSet,
    reference: TokenSet,
    metric: Metric = "cosine",
    timeout: float = TIMEOUT,
    controls: bool = False,
    accuracies: Accuracies | None = None,
    progress: Progress | None = None,
    keep_on_interrupt: bool = False,
    allowance: Allowance | None = None,
    selected: Selected | None = None,
) -> Result:
    """:func:`screen` for targets and token sets that are already at hand.

    Args:
        targets: What to screen.
        domain: T.
        reference: R.
        metric: Which gap ranks.
        timeout: Seconds for one checkpoint.
        controls: Whether to read gauge controls too.
        accuracies: Accuracies of some of them, which the result carries.
        progress: See :func:`screen`.
        keep_on_interrupt: Whether Ctrl-C ends the reading and returns what is done (main thread only).
        allowance: What the run may cost.
        selected: The selection that the targets came of, whose cost counts too.

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
        async with Hub(allowance=allowance) as hub:
            reader = Reader(hub, domain, reference, ResolutionCache(hub.cache))
            run = _Run(hub, reader, timeout, accuracies, progress, keep_on_interrupt)
            readings = await run.comparable(targets)
            checkpoints = rank_readings(await with_controls(readings) if controls else readings, metric)
        listed = Meter(selected.bytes_read, selected.requests) if selected else Meter()
        meters = [hub.meter, listed, *(snapshot.meter for snapshot in reader.snapshots)]
        return Result(
            domain=domain.name,
            reference=reference.name,
            metric=metric,
            checkpoints=tuple(checkpoints),
            failed=run.failed,
            seconds=time.perf_counter() - start,
            bytes_read=sum(meter.bytes_read for meter in meters),
            requests=sum(meter.requests for meter in meters),
            domain_words=tuple(text for group in domain.groups.values() for text in group.texts()),
        )

    return _finished(work())


def _in_a_loop_or_not(act: Callable[[], T]) -> T:
    """Result of something that runs a loop of its own, also where a notebook's thread already runs one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return act()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(act).result()


def _finished(work: Coroutine[Any, Any, T]) -> T:
    results: list[T] = []

    async def kept() -> None:
        # Not returned: asyncio.run prints its task's result when it puts the signal handler back, which
        # takes 0.1 s for the arrays of a family.
        results.append(await work)

    _in_a_loop_or_not(lambda: asyncio.run(kept()))
    return results[0]


class _Run:
    def __init__(
        self,
        hub: Hub,
        reader: Reader,
        timeout: float,
        accuracies: Accuracies | None,
        progress: Progress | None,
        keep_on_interrupt: bool,
    ) -> None:
        self._errors: dict[Target, ScreeningError] = {}
        self._order: list[Target] = []
        self._hub, self._reader, self._timeout = hub, reader, timeout
        self._accuracies, self._progress, self._keep_on_interrupt = accuracies, progress, keep_on_interrupt
        self._scouts: list[Budget] = []
        self._unreachable: list[ScreeningError] = []

    @property
    def failed(self) -> tuple[Failed, ...]:
        """Those that could not be screened, in the order in which they were asked for."""
        return tuple(
            Failed(item.shown, item.revision, error.code, str(error), item.file)
            for item in self._order
            if (error := self._errors.get(item)) is not None
        )

    async def comparable(self, targets: Sequence[Target]) -> list[tuple[Reading, Reading]]:
        """All that could be read and compared, as asked for, each with the one of its common tokenizer."""
        families: dict[str | None, list[Reading]] = {}
        for reading in await self._readings(await self._expanded(targets)):
            families.setdefault(reading.target.family, []).append(reading)
        found = []
        for family, members in families.items():
            commons = common_tokenizers(family, members)
            for reading in members:
                common = next((c for c in commons if same_tokens(c, reading)), None)
                try:
                    if common is None:
                        raise mismatch(family, reading, commons[0])
                    if common.resolution != reading.resolution:
                        # Its tokenizer also has words that the others lack: rank it on the common ones.
                        reading = await read_again(reading, common.resolution)
                except ScreeningError as error:
                    self._fail(reading.target, error)
                else:
                    found.append((reading, common))
        return found

    async def _expanded(self, targets: Sequence[Target]) -> list[Target]:
        """The targets with globs replaced by the revisions that they stand for, each one once."""
        lists = await asyncio.gather(*(self._revisions(item) for item in targets))
        self._order = list(
            dict.fromkeys(
                one for item, found in zip(targets, lists, strict=True) for one in (found or [item])
            )
        )
        if self._accuracies is not None:
            failed = [item in self._errors for item in self._order]
            rated = self._accuracies.of(self._order)
            self._errors |= {
                new: self._errors[old]
                for new, old, bad in zip(rated, self._order, failed, strict=True)
                if bad
            }
            self._order = rated
        return [item for item in self._order if item not in self._errors]

    async def _revisions(self, item: Target) -> list[Target]:
        try:
            budget = Budget(self._timeout)
            return await budget.bounded(self._reader.sources.expand(item, budget))
        except ScreeningError as error:
            self._fail(item, error)
            return []

    async def _readings(self, targets: list[Target]) -> list[Reading]:
        limit = asyncio.Semaphore(_SIDE_BY_SIDE)
        done = 0

        async def one(item: Target) -> Reading | None:
            nonlocal done
            try:
                async with limit:
                    budget = Budget(self._timeout)
                    if item.on_hub:
                        await self._hub_answers(budget)
                    return await self._reader.read(item, budget)
            except ScreeningError as error:
                self._fail(item, error)
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

    async def _hub_answers(self, budget: Budget) -> None:
        """Wait while nothing of the Hub was reached and the first checkpoints have trouble reaching it.

        Raises:
            ScreeningError: ``Unreachable``, when none of them could.
        """
        if len(self._scouts) < _SCOUTS:
            self._scouts.append(budget)
            return
        start = time.monotonic()
        while all(snapshot.revision is None for snapshot in self._reader.snapshots):
            if len(self._unreachable) >= _SCOUTS:
                raise ScreeningError(
                    "Unreachable", f"not tried, as {_SCOUTS} others failed: {self._unreachable[0]}"
                )
            troubles = [scout.trouble for scout in self._scouts]
            failing = all(trouble is not None and trouble.code == "Unreachable" for trouble in troubles)
            if not failing and time.monotonic() - start > _PATIENCE:
                return
            await asyncio.sleep(0.01)

    def _fail(self, item: Target, error: ScreeningError) -> None:
        self._errors[item] = error
        if error.code == "Unreachable" and item.on_hub:
            self._unreachable.append(error)


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
