"""Many checkpoints, side by side.

Some checkpoints are read at once, each over the rows that its own tokenizer names, and only when all have
ended are tokenizers compared: nobody waits for the slowest, and nobody's failure stops the others. What is
kept of one that was read is its `Measured`, so that memory hardly grows with their number.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from array import array
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from lmeval_dispersion.errors import DispersionError, UsageError
from lmeval_dispersion.geometry import METRICS, Metric
from lmeval_screener.accuracies import Accuracies, read_accuracies
from lmeval_screener.checkpoints.http import Budget
from lmeval_screener.checkpoints.hub import Hub
from lmeval_screener.checkpoints.limits import Allowance
from lmeval_screener.checkpoints.snapshot import Meter
from lmeval_screener.errors import ScreeningError
from lmeval_screener.ranking.controls import Controls
from lmeval_screener.ranking.gate import judged, reference_among
from lmeval_screener.ranking.groups import common_tokenizers, mismatch, rank_measured
from lmeval_screener.ranking.measured import Measured, Spill
from lmeval_screener.reading import ControlRows, Reader, Reading, control_rows, read_controls
from lmeval_screener.result import Failed, Result
from lmeval_screener.targets.demo import demo_targets
from lmeval_screener.targets.families import load_family
from lmeval_screener.targets.selection import Selected, Selection, select_targets
from lmeval_screener.targets.target import Target, labelled
from lmeval_screener.tokens.cache import ResolutionCache
from lmeval_screener.tokens.sets import TokenSet, load_token_set

if TYPE_CHECKING:
    from lmeval_screener.registry.database import Session

T = TypeVar("T")

TIMEOUT = 60.0  # seconds for one checkpoint, everything included; the only time limit there is
_EXPANDED = 128  # names that are looked up at once, where they may stand for several checkpoints
_SPILLED = 500  # checkpoints from which on their figures wait on disk, not in memory, to be ranked
_SCOUTS = 3  # checkpoints that are tried alone while the Hub does not answer; when all fail, no more are
_PATIENCE = 0.25  # seconds without an answer or a failed connection after which nobody waits for the scouts

#: Called as ``progress(done, all, label)``: with 0 and an empty label before anything is read, then whenever
#: a checkpoint ends. With controls once more over those whose controls are read: with 0 and ``controls``,
#: then whenever one's are there.
Progress = Callable[[int, int, str], None]
#: Called when a checkpoint ends, with what came of it, how many have ended, and how many there are.
Ended = Callable[[Measured | Failed, int, int], None]


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
    registry: str | Path | None = None,
    refresh: bool = False,
) -> Result:
    """Rank checkpoints by their dispersion gap, reading only the rows that it needs.

    Args:
        checkpoints: ``REPO``, ``REPO@REVISION``, ``REPO@GLOB``, ``ORG/*``, folders, folders
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
        progress: Called as ``progress(done, all, label)`` at the start and whenever a checkpoint ends; with
            controls once more, from 0, while they are read.
        tokenizer: Where the tokenizer of checkpoints that store none is read: a repository, a folder, an
            address, or a tokenizer's file.
        selection: What is selected on the Hub beside what is named.
        allowance: What the run may cost.
        registry: The SQLite file that keeps what is measured; only what is new or changed is read.
        refresh: Whether to read again what the registry has.

    Returns:
        Screened checkpoints, ranked inside (family, scale), and the failed ones with their reasons.

    Raises:
        UsageError: A name, a file or a combination that cannot be used as given.
    """
    from lmeval_screener.registry.options import kept_in

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
    sets = load_token_set(domain, "domain"), load_token_set(reference, "reference")
    place = None if registry is None else Path(registry)
    with kept_in(place, *sets, metric=metric, refresh=refresh, command="screen()") as session:
        result = screen_targets(
            targets,
            domain=sets[0],
            reference=sets[1],
            metric=metric,
            timeout=timeout,
            controls=controls,
            accuracies=None if accuracy is None else read_accuracies(str(accuracy), targets),
            progress=progress,
            session=session,
            allowance=allowance,
            selected=selected,
        )
        if session is not None:
            session.finish(result)
    return result


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
    ended: Ended | None = None,
    session: Session | None = None,
    reader_type: type[Reader] = Reader,
    keep_on_interrupt: bool = False,
    allowance: Allowance | None = None,
    selected: Selected | None = None,
    fail_if_below: str | None = None,
    tokenizer: str | None = None,
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
        ended: Called whenever a checkpoint ends, before it is ranked.
        session: A registry's, which knows what need not be read again and keeps what is read.
        reader_type: What reads the checkpoints: this process, or those of a cluster.
        keep_on_interrupt: Whether Ctrl-C and SIGTERM end the reading and return what is done (main thread
            only).
        allowance: What the run may cost.
        selected: The selection that the targets came of, whose cost counts too.
        fail_if_below: The checkpoint that none may fall behind, as its label or as any is named; it is
            screened too.
        tokenizer: Where that one's tokenizer is read if it stores none.

    Raises:
        UsageError: No targets, an unknown metric, or a timeout that is not positive.
    """
    if not targets:
        raise UsageError("expected at least one checkpoint or a family, got none; see --list-families")
    if metric not in METRICS:
        raise UsageError(f"expected a metric of {', '.join(METRICS)}, got {metric!r}")
    if not timeout > 0:
        raise UsageError(f"expected a timeout above 0 seconds, got {timeout}")

    async def screened() -> Result:
        start = time.perf_counter()
        async with Hub(allowance=allowance) as hub:
            known = session.find if session is not None else None
            reader = reader_type(hub, domain, reference, ResolutionCache(hub.cache), known)
            with contextlib.closing(reader):
                run = _Run(
                    hub, reader, timeout, accuracies, progress, ended, session, keep_on_interrupt, controls
                )
                run.fail_if_below, run.tokenizer = fail_if_below, tokenizer
                checkpoints = rank_measured(await run.comparable(targets), metric)
        listed = Meter(selected.bytes_read, selected.requests) if selected else Meter()
        meters = [hub.meter, listed, *reader.meters]
        result = Result(
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
        return result if run.reference is None else judged(result, run.reference)

    return _finished(screened())


def _in_a_loop_or_not(act: Callable[[], T]) -> T:
    """Result of something that runs a loop of its own, also where a notebook's thread already runs one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return act()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(act).result()


class Controlled(NamedTuple):
    """What came of the controls of one checkpoint.

    Attributes:
        found: They, or code and sentence of why there are none.
        state: What they were read of, as a registry knows it; empty where it could not be opened.
        bytes_read: Bytes that travelled for them alone.
        requests: Requests likewise.
        seconds: From when it was opened to the last row.
    """

    found: Controls | tuple[str, str]
    state: str
    bytes_read: int
    requests: int
    seconds: float

    def beside(self, one: Measured) -> Measured:
        """A checkpoint with them, or with the sentence in their place."""
        return replace(
            one,
            controls=self.found if isinstance(self.found, Controls) else self.found[1],
            bytes_read=one.bytes_read + self.bytes_read,
            requests=one.requests + self.requests,
            seconds=one.seconds + self.seconds,
        )


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
        ended: Ended | None,
        session: Session | None,
        keep_on_interrupt: bool,
        controls: bool,
    ) -> None:
        # Words and sentences, not exceptions: those hold on to every frame that they passed.
        self.errors: dict[Target, tuple[str, str]] = {}
        self.fail_if_below: str | None = None
        self.tokenizer: str | None = None
        self.reference: Target | None = None
        self._order: list[Target] = []
        self._hub, self._reader, self._timeout = hub, reader, timeout
        self._accuracies, self._progress, self._keep_on_interrupt = accuracies, progress, keep_on_interrupt
        self._ended, self._session = ended, session
        # Controls need the snapshots once more when all are read: only then are they kept.
        self._readings: dict[Target, Reading] | None = {} if controls else None
        self._scouts: list[Budget] = []
        self._unreachable: list[str] = []
        self._stopped = False

    @property
    def failed(self) -> tuple[Failed, ...]:
        """Those that could not be screened, in the order in which they were asked for."""
        return tuple(
            Failed(item.shown, item.revision, *error, item.file, item.labelled)
            for item in self._order
            if (error := self.errors.get(item)) is not None
        )

    async def comparable(self, targets: Sequence[Target]) -> list[tuple[Measured, Measured]]:
        """All that could be read and compared, as asked for, each with the one of its common tokenizer."""
        families: dict[str | None, list[Measured]] = {}
        expanded = await self._expanded(targets)
        if self._ended is not None:
            for nothing in self.failed:  # what stands for no checkpoint ended too
                self._ended(nothing, 0, len(expanded))
        for one in await self.measured(expanded):
            families.setdefault(one.target.family, []).append(one)
        found = []
        for family, members in families.items():
            commons = common_tokenizers(family, members)
            for one in members:
                common = commons[one.tokenizer]
                try:
                    if common is None:
                        first = next(c for c in commons.values() if c is not None)
                        raise mismatch(family, one, first.first)
                    if common.first.resolution != one.resolution:
                        # Its tokenizer also has words that the others lack: rank it on the common ones.
                        one = await self._read_over(one, common.first)
                except ScreeningError as error:
                    self._fail(one.target, error)
                else:
                    found.append((one, common.first))
        return found if self._readings is None else await self._controlled(found, self._readings)

    async def _read_over(self, one: Measured, common: Measured) -> Measured:
        """The same checkpoint over the tokens of another tokenizer, at the commit that was read."""
        again = await self._again(one, common, Budget(self._timeout))
        if self._readings is not None:
            self._readings[one.target] = again
        found = again.measured()
        return replace(
            found,
            bytes_read=found.bytes_read + one.bytes_read,
            requests=found.requests + one.requests,
            seconds=found.seconds + one.seconds,
        )

    async def _again(self, one: Measured, common: Measured, budget: Budget) -> Reading:
        """The same checkpoint at the commit that was read, over the tokens of a tokenizer that is known."""
        at = replace(one.target, revision=one.revision) if one.revision is not None else one.target
        again = await self._reader.read(at, budget, over=common.resolution)
        if not isinstance(again, Reading):
            raise TypeError("a checkpoint that is read over given tokens is never taken as known")
        return replace(again, target=one.target)

    async def _controlled(
        self, found: list[tuple[Measured, Measured]], readings: dict[Target, Reading]
    ) -> list[tuple[Measured, Measured]]:
        """The checkpoints with their gauge controls."""
        rows = control_rows(found)
        controlled = list(found)
        work = [(one, rows[place]) for place, (one, _) in enumerate(found)]
        done = 0

        def came(at: int, outcome: Controlled) -> None:
            nonlocal done
            one, common = found[at]
            controlled[at] = outcome.beside(one), common
            done += 1
            if self._progress is not None:
                self._progress(done, len(work), f"controls of {one.target.label}")

        if self._progress is not None and work:
            self._progress(0, len(work), "controls")
        await self.controls_of(work, readings, came)
        return controlled

    async def controls_of(
        self,
        work: Sequence[tuple[Measured, ControlRows]],
        readings: dict[Target, Reading],
        came: Callable[[int, Controlled], None],
    ) -> None:
        """Read controls, some side by side.

        Args:
            work: Of which checkpoints.
            readings: Those that are open still, each taken out; the others are opened once more.
            came: Called with the place and what came of it, in the order in which they end.
        """

        def read(place: int) -> Coroutine[Any, Any, Controlled]:
            one, rows = work[place]
            return self._controls(one, readings.pop(one.target, None), rows)

        def ended(place: int, outcome: Controlled | ScreeningError) -> None:
            came(place, _no_controls(outcome) if isinstance(outcome, ScreeningError) else outcome)

        await self._side_by_side([range(len(work))], read, ended)

    async def _controls(self, one: Measured, reading: Reading | None, rows: ControlRows) -> Controlled:
        """The controls of a checkpoint as they are read now; one that is not open is opened once more."""
        start = time.perf_counter()
        before = (reading.bytes_read, reading.requests) if reading is not None else (0, 0)
        found: Controls | tuple[str, str]
        try:
            if reading is None:
                budget = Budget(self._timeout)
                if one.target.on_hub:
                    await self._hub_answers(budget)
                reading = await self._again(one, one, budget)
            found = await read_controls(reading, rows)
        except ScreeningError as error:
            found = error.code, str(error)
            if error.code == "Unreachable" and one.target.on_hub:
                self._unreachable.append(str(error))
        if reading is None:
            return Controlled(found, "", 0, 0, time.perf_counter() - start)
        from lmeval_screener.registry.database import state_of

        return Controlled(
            found,
            state_of(one.target, reading.snapshot, reading.base),
            reading.bytes_read - before[0],
            reading.requests - before[1],
            time.perf_counter() - start,
        )

    async def _expanded(self, targets: Sequence[Target]) -> list[Target]:
        """The targets with globs replaced by the revisions that they stand for, each one once."""
        order: dict[Target, None] = {}
        for begin in range(0, len(targets), _EXPANDED):
            # Some at a time: a task takes more memory than what is kept of a checkpoint.
            some = targets[begin : begin + _EXPANDED]
            lists = await asyncio.gather(*(self._revisions(item) for item in some))
            for item, found in zip(some, lists, strict=True):
                order.update(dict.fromkeys(found or [item]))
        self._order = list(order)
        if self._accuracies is not None:
            failed = [item in self.errors for item in self._order]
            rated = self._accuracies.of(self._order)
            self.errors |= {
                new: self.errors[old] for new, old, bad in zip(rated, self._order, failed, strict=True) if bad
            }
            self._order = rated
        if self.fail_if_below is not None:
            reference = reference_among(self._order, self.fail_if_below, self.tokenizer)
            if reference not in self._order:
                self._order.append(reference)
        self._order = labelled(self._order)
        if self.fail_if_below is not None:
            self.reference = self._order[self._order.index(reference)]
        return [item for item in self._order if item not in self.errors]

    async def _revisions(self, item: Target) -> list[Target]:
        try:
            budget = Budget(self._timeout)
            return await budget.bounded(self._reader.sources.expand(item, budget))
        except ScreeningError as error:
            self._fail(item, error)
            return []

    def _interrupted(self) -> ScreeningError:
        kept = "cached" if self._session is None else "in the registry"
        return ScreeningError(
            "Interrupted", f"stopped before it was read; what was read is {kept}, run the same command again"
        )

    async def measured(self, targets: Sequence[Target]) -> list[Measured]:
        """What could be read, in the order of the targets, some side by side."""
        done = 0
        found: list[Measured | None] = [None] * len(targets)
        spill = Spill() if len(targets) >= _SPILLED else None
        # Who waits for a quota holds a slot; those that need another quota or none have slots of their own.
        kinds: dict[str, array[int]] = {}
        for place, item in enumerate(targets):
            kinds.setdefault(_needs(item), array("l")).append(place)

        def came(place: int, outcome: Measured | ScreeningError) -> None:
            nonlocal done
            if isinstance(outcome, Measured):
                found[place] = outcome if spill is None else spill.kept(outcome)
            done += 1
            self._tell(targets[place], outcome, done, len(targets))

        if self._progress is not None:
            self._progress(0, len(targets), "")
        await self._side_by_side(kinds.values(), lambda place: self._measured(targets[place]), came)
        return [one for one in found if one is not None]

    async def _side_by_side(
        self,
        queues: Iterable[Sequence[int]],
        read: Callable[[int], Coroutine[Any, Any, T]],
        came: Callable[[int, T | ScreeningError], None],
    ) -> None:
        """Read something of many checkpoints: what goes wrong with one, or an interrupt, costs no other.

        Args:
            queues: Places of checkpoints; so many of each queue at a time.
            read: What is read of the checkpoint at a place.
            came: Called with what came of each, in the order in which they end.
        """
        running: set[asyncio.Task[T]] = set()

        async def worker(waiting: Iterator[int]) -> None:
            for place in waiting:
                outcome: T | ScreeningError
                try:
                    if self._stopped:
                        raise asyncio.CancelledError
                    # A task of its own, so that an interrupt stops the reading and not the worker.
                    task = asyncio.create_task(read(place))
                    running.add(task)
                    try:
                        outcome = await task
                    finally:
                        task.cancel()
                        running.discard(task)
                except ScreeningError as error:
                    outcome = error
                except asyncio.CancelledError:
                    if not self._stopped:
                        raise
                    outcome = self._interrupted()
                except DispersionError:
                    raise  # of all of them, not of this one
                except Exception as error:
                    # What nobody foresaw in one checkpoint must not cost the user all the others.
                    if os.environ.get("DISPERSION_DEBUG"):
                        raise
                    outcome = ScreeningError(
                        "InternalError",
                        f"{type(error).__name__}: {error}; please report it (DISPERSION_DEBUG=1 shows where)",
                    )
                came(place, outcome)

        def stop() -> None:
            self._stopped = True
            for task in running:
                task.cancel()

        with _on_interrupt(stop) if self._keep_on_interrupt else contextlib.nullcontext():
            await _all_or_none(
                worker(waiting)
                for places in queues
                for waiting in [iter(places)]
                for _ in range(min(self._reader.side_by_side, len(places)))
            )

    async def _measured(self, item: Target) -> Measured:
        if self._session is not None and (known := self._session.pinned(item)) is not None:
            return known
        budget = Budget(self._timeout)
        if item.on_hub:
            await self._hub_answers(budget)
        read = await self._reader.read(item, budget)
        if isinstance(read, Measured):
            return read
        if self._readings is not None:
            self._readings[item] = read
        return read.measured()

    def _tell(self, item: Target, outcome: Measured | ScreeningError, done: int, count: int) -> None:
        """Keep what came of a checkpoint and say so."""
        if self._session is not None:
            self._session.keep(item, outcome)
        if isinstance(outcome, ScreeningError):
            self._fail(item, outcome)
        if self._ended is not None:
            self._ended(
                Failed(item.shown, item.revision, outcome.code, str(outcome), item.file, item.labelled)
                if isinstance(outcome, ScreeningError)
                else outcome,
                done,
                count,
            )
        if self._progress is not None:
            self._progress(done, count, item.label)

    async def _hub_answers(self, budget: Budget) -> None:
        """Wait while nothing of the Hub was reached and the first checkpoints have trouble reaching it.

        Raises:
            ScreeningError: ``Unreachable``, when none of them could.
        """
        if len(self._scouts) < _SCOUTS:
            self._scouts.append(budget)
            return
        start = time.monotonic()
        while not self._reader.reached:
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
        self.errors[item] = error.code, str(error)
        if error.code == "Unreachable" and item.on_hub:
            self._unreachable.append(str(error))


def _no_controls(error: ScreeningError) -> Controlled:
    return Controlled((error.code, str(error)), "", 0, 0, 0.0)


def _needs(item: Target) -> str:
    """Which quotas a checkpoint may wait for: of the Hub's resolver, of its API too, or none of the Hub's."""
    if not item.on_hub:
        return "none"
    return "resolver" if item.listing is not None else "api"


async def _all_or_none(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for all; when one fails the others are stopped, not left running behind."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


@contextlib.contextmanager
def _on_interrupt(act: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C and SIGTERM call ``act``; without such handlers they end the process as ever."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    try:
        for number in signals:
            loop.add_signal_handler(number, act)
    except NotImplementedError:
        yield
        return
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
