"""Many checkpoints, side by side.

Some checkpoints are read at once, each over the rows that its own tokenizer names, and only when all have
ended are tokenizers compared: the slowest holds up no other, and a failure stops no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lmeval_dispersion.errors import DispersionError, UsageError
from lmeval_dispersion.geometry import METRICS, Metric
from lmeval_screener.accuracies import Accuracies, read_accuracies
from lmeval_screener.checkpoints.hub import Hub
from lmeval_screener.checkpoints.limits import Allowance, Budget
from lmeval_screener.errors import ScreeningError
from lmeval_screener.ranking.gate import judged, reference_among
from lmeval_screener.ranking.groups import common_tokenizers, mismatch, ranked
from lmeval_screener.reading import Reader, Reading
from lmeval_screener.result import Result
from lmeval_screener.screened import Failed
from lmeval_screener.targets import Target, labelled
from lmeval_screener.targets.selection import Selected, Selection, demo_targets, load_family, select_targets
from lmeval_screener.tokens import ResolutionCache, TokenSet, load_token_set

if TYPE_CHECKING:
    from lmeval_screener.registry.database import Session

T = TypeVar("T")

TIMEOUT = 60.0  # seconds for one checkpoint, everything included; the only time limit there is
_SCOUTS = 3  # checkpoints that are tried alone while the Hub does not answer; when all fail, no more are
_PATIENCE = 0.25  # seconds without an answer or a failed connection after which the others go on

#: Called as ``progress(done, all, label)`` whenever a checkpoint ends.
Progress = Callable[[int, int, str], None]
#: Called when a checkpoint ends, with what was read of it or why nothing was, how many have ended, and how
#: many there are.
OnDone = Callable[[Reading | Failed, int, int], None]


@dataclass(frozen=True)
class Screening:
    """How targets are screened.

    Attributes:
        domain: T.
        reference: R.
        metric: Which gap ranks.
        timeout: Seconds for one checkpoint.
        tokenizer: Where the tokenizer of a checkpoint is read that stores none.
        accuracies: Accuracies of some of them, which the result carries.
        fail_if_below: The checkpoint that none may fall behind, as its label or as any is named; it is
            screened too.
        session: A registry's, which knows what need not be read again and keeps what is read.
        reader_type: What reads the checkpoints: this process, or those of a cluster.
        allowance: What the run may cost.
        selected: The selection that the targets came of, whose cost counts too.
        keep_on_interrupt: Whether Ctrl-C and SIGTERM end the reading and return what is done (main thread
            only).
    """

    domain: TokenSet
    reference: TokenSet
    metric: Metric = "cosine"
    timeout: float = TIMEOUT
    tokenizer: str | None = None
    accuracies: Accuracies | None = None
    fail_if_below: str | None = None
    session: Session | None = None
    reader_type: type[Reader] = Reader
    allowance: Allowance | None = None
    selected: Selected | None = None
    keep_on_interrupt: bool = False


def screen(
    checkpoints: str | Iterable[str] = (),
    *,
    family: str | None = None,
    families: str | Path | None = None,
    domain: str = "math",
    reference: str = "reference",
    metric: Metric = "cosine",
    timeout: float = TIMEOUT,
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
        checkpoints: One or several of ``REPO``, ``REPO@REVISION``, ``REPO@GLOB``, ``ORG/*``, folders, folders
            of training runs, files of weights, or addresses such as ``s3://bucket/run/checkpoint-*``.
        family: Name of a family whose checkpoints are added.
        families: A family file of your own in place of the bundled one.
        domain: Bundled token set or a YAML file.
        reference: The everyday token set, likewise.
        metric: ``cosine`` or ``euclidean``: which gap ranks. Both are computed.
        timeout: Seconds for one checkpoint.
        accuracy: What to compare G with: a CSV file, lm-eval's results, or ``hub:TASK``; see
            :func:`lmeval_screener.accuracies.read_accuracies`.
        demo: Whether to add the bundled demo's checkpoints.
        progress: Called as ``progress(done, all, label)`` whenever a checkpoint ends.
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
    from lmeval_screener.registry import kept_in

    names = [checkpoints] if isinstance(checkpoints, str) else list(checkpoints)
    selected = _in_a_loop_or_not(
        lambda: select_targets(names, selection or Selection(), allowance=allowance, tokenizer=tokenizer)
    )
    targets = selected.targets
    if family is not None:
        targets += load_family(family, families).checkpoints
    if demo:
        targets += demo_targets()
    sets = load_token_set(domain, "domain"), load_token_set(reference, "reference")
    place = None if registry is None else Path(registry)
    with kept_in(place, *sets, metric=metric, refresh=refresh, command="screen()") as session:
        settings = Screening(
            *sets,
            metric=metric,
            timeout=timeout,
            tokenizer=tokenizer,
            accuracies=None if accuracy is None else read_accuracies(str(accuracy), targets),
            session=session,
            allowance=allowance,
            selected=selected,
        )
        report = progress or (lambda done, count, label: None)
        result = screen_targets(
            targets, settings, lambda outcome, done, count: report(done, count, label_of(outcome))
        )
        if session is not None:
            session.finish(result)
    return result


def label_of(outcome: Reading | Failed) -> str:
    """What a checkpoint that ended is called."""
    return outcome.label if isinstance(outcome, Failed) else outcome.target.label


def screen_targets(targets: Sequence[Target], settings: Screening, on_done: OnDone | None = None) -> Result:
    """:func:`screen` for targets and token sets that are already at hand."""
    if not targets:
        raise UsageError("expected at least one checkpoint or a family, got none; see --list-families")
    if settings.metric not in METRICS:
        raise UsageError(f"expected a metric of {', '.join(METRICS)}, got {settings.metric!r}")
    if not settings.timeout > 0:
        raise UsageError(f"expected a timeout above 0 seconds, got {settings.timeout}")

    async def screened() -> Result:
        start = time.perf_counter()
        domain, reference, session = settings.domain, settings.reference, settings.session
        async with Hub(offline=_at_hand(targets) or None, allowance=settings.allowance) as hub:
            known = session.find if session is not None else None
            reader = settings.reader_type(hub, domain, reference, ResolutionCache(hub.cache), known)
            with contextlib.closing(reader):
                run = _Run(reader, settings, on_done)
                checkpoints = ranked(await run.comparable(targets), settings.metric)
        selected = settings.selected
        meters = [hub.meter, *([selected.meter] if selected else []), *reader.meters]
        result = Result(
            domain=domain.name,
            reference=reference.name,
            metric=settings.metric,
            checkpoints=tuple(checkpoints),
            failed=run.failed,
            seconds=time.perf_counter() - start,
            bytes_read=sum(meter.bytes_read for meter in meters),
            requests=sum(meter.requests for meter in meters),
            domain_words=tuple(text for group in domain.groups.values() for text in group.texts()),
        )
        if run.reference is None:
            return result
        return replace(result, gate=judged(result.groups, result.failed, run.reference.label))

    results: list[Result] = []

    async def kept() -> None:
        # Not returned: asyncio.run prints its task's result when it puts the signal handler back, which
        # takes 0.1 s for the arrays of a family.
        results.append(await screened())

    _in_a_loop_or_not(lambda: asyncio.run(kept()))
    return results[0]


def _at_hand(targets: Sequence[Target]) -> bool:
    """Whether all lie in folders, and none needs another place: then no connection and no token is needed."""
    return all(
        target.local and target.tokenizer is None and not Path(target.repo, "adapter_config.json").exists()
        for target in targets
    )


def _in_a_loop_or_not(act: Callable[[], T]) -> T:
    """Result of something that runs a loop of its own, also where a notebook's thread already runs one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return act()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(act).result()


class _Run:
    def __init__(self, reader: Reader, settings: Screening, on_done: OnDone | None) -> None:
        self.reference: Target | None = None
        self._reader, self._settings, self._on_done = reader, settings, on_done
        self._session = settings.session
        # Words and sentences, not exceptions: those hold on to every frame that they passed.
        self._errors: dict[Target, tuple[str, str]] = {}
        self._order: list[Target] = []
        self._scouts: list[Budget] = []
        self._unreachable: list[str] = []
        self._stopped = False

    @property
    def failed(self) -> tuple[Failed, ...]:
        """Those that could not be screened, in the order in which they were asked for."""
        return tuple(
            _failed(target, *self._errors[target]) for target in self._order if target in self._errors
        )

    async def comparable(self, targets: Sequence[Target]) -> list[tuple[Reading, Reading]]:
        """All that could be read and compared, as asked for, each with the one of its common tokenizer."""
        expanded = await self._expanded(targets)
        if self._on_done is not None:
            for nothing in self.failed:  # a glob that matched nothing counts as ended
                self._on_done(nothing, 0, len(expanded))
        families: dict[str | None, list[Reading]] = {}
        for reading in await self._read_all(expanded):
            families.setdefault(reading.target.family, []).append(reading)
        comparable = []
        for family, members in families.items():
            commons = common_tokenizers(family, members)
            for reading in members:
                common = commons[reading.tokenizer]
                try:
                    if common is None:
                        first = next(c for c in commons.values() if c is not None)
                        raise mismatch(family, reading, first.first)
                    if common.first.resolution != reading.resolution:
                        # Its tokenizer also has words that the others lack: rank it on the common ones.
                        reading = await self._read_over(reading, common.first)
                except ScreeningError as error:
                    self._fail(reading.target, error)
                else:
                    comparable.append((reading, common.first))
        return comparable

    async def _read_over(self, reading: Reading, common: Reading) -> Reading:
        """The same checkpoint over the tokens of another tokenizer, at the commit that was read."""
        target = reading.target
        at = replace(target, revision=reading.revision) if reading.revision is not None else target
        again = await self._reader.read(at, Budget(self._settings.timeout), over=common.resolution)
        return replace(
            again,
            target=target,
            bytes_read=again.bytes_read + reading.bytes_read,
            requests=again.requests + reading.requests,
            seconds=again.seconds + reading.seconds,
        )

    async def _expanded(self, targets: Sequence[Target]) -> list[Target]:
        """The targets with globs replaced by the revisions that they stand for, each one once."""
        order: dict[Target, None] = {}
        lists = await asyncio.gather(*(self._revisions(target) for target in targets))
        for target, revisions in zip(targets, lists, strict=True):
            order.update(dict.fromkeys(revisions or [target]))
        expanded = list(order)
        if self._settings.accuracies is not None:
            rated = self._settings.accuracies.of(expanded)
            self._errors |= {
                new: self._errors[old]
                for new, old in zip(rated, expanded, strict=True)
                if old in self._errors
            }
            expanded = rated
        text, reference = self._settings.fail_if_below, None
        if text is not None:
            reference = reference_among(expanded, text, self._settings.tokenizer)
            expanded += [reference] if reference not in expanded else []
        self._order = labelled(expanded)
        if reference is not None:
            self.reference = self._order[self._order.index(reference)]
        return [target for target in self._order if target not in self._errors]

    async def _revisions(self, target: Target) -> list[Target]:
        try:
            budget = Budget(self._settings.timeout)
            return await budget.bounded(self._reader.sources.expand(target, budget))
        except ScreeningError as error:
            self._fail(target, error)
            return []

    def _interrupted(self) -> ScreeningError:
        kept = "cached" if self._session is None else "in the registry"
        return ScreeningError(
            "Interrupted", f"stopped before it was read; what was read is {kept}, run the same command again"
        )

    async def _read_all(self, targets: Sequence[Target]) -> list[Reading]:
        """What could be read, in the order of the targets, some side by side.

        What goes wrong with one, or an interrupt, costs no other.
        """
        readings: dict[int, Reading] = {}
        done = 0
        running: set[asyncio.Task[Reading]] = set()
        # Who waits for a quota holds a slot; those that need another quota or none have slots of their own.
        queues: dict[bool, list[int]] = {}  # what is not on the Hub waits for none of its quotas
        for place, target in enumerate(targets):
            queues.setdefault(target.on_hub, []).append(place)

        async def worker(waiting: Iterator[int]) -> None:
            nonlocal done
            for place in waiting:
                outcome: Reading | ScreeningError
                try:
                    if self._stopped:
                        raise asyncio.CancelledError
                    # A task of its own, so that an interrupt stops the reading and not the worker.
                    task = asyncio.create_task(self._read(targets[place]))
                    running.add(task)
                    try:
                        outcome = readings[place] = await task
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
                    # An unexpected error fails this checkpoint only.
                    if os.environ.get("DISPERSION_DEBUG"):
                        raise
                    outcome = ScreeningError(
                        "InternalError",
                        f"{type(error).__name__}: {error}; please report it (DISPERSION_DEBUG=1 shows where)",
                    )
                done += 1
                self._report(targets[place], outcome, done, len(targets))

        def stop() -> None:
            self._stopped = True
            for task in running:
                task.cancel()

        with _on_interrupt(stop) if self._settings.keep_on_interrupt else contextlib.nullcontext():
            await _all_or_none(
                worker(waiting)
                for places in queues.values()
                for waiting in [iter(places)]
                for _ in range(min(self._reader.side_by_side, len(places)))
            )
        return [readings[place] for place in sorted(readings)]

    async def _read(self, target: Target) -> Reading:
        if self._session is not None and (known := self._session.pinned(target)) is not None:
            return known
        budget = Budget(self._settings.timeout)
        if target.on_hub:
            await self._hub_answers(budget)
        return await self._reader.read(target, budget)

    def _report(self, target: Target, outcome: Reading | ScreeningError, done: int, count: int) -> None:
        """Keep what came of a checkpoint and say so."""
        if self._session is not None:
            self._session.keep(target, outcome)
        if isinstance(outcome, ScreeningError):
            self._fail(target, outcome)
        if self._on_done is not None:
            if isinstance(outcome, ScreeningError):
                self._on_done(_failed(target, outcome.code, str(outcome)), done, count)
            else:
                self._on_done(outcome, done, count)

    async def _hub_answers(self, budget: Budget) -> None:
        """Wait while nothing of the Hub was reached and the first checkpoints have trouble reaching it."""
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
        self._errors[item] = error.code, str(error)
        if error.code == "Unreachable" and item.on_hub:
            self._unreachable.append(str(error))


def _failed(target: Target, code: str, message: str) -> Failed:
    return Failed(target.shown, target.revision, code, message, target.file, target.labelled)


async def _all_or_none(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for all; when one fails the others are stopped, not left running behind."""
    tasks = [asyncio.create_task(item) for item in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


@contextlib.contextmanager
def _on_interrupt(act: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C and SIGTERM call ``act``; without such handlers they end the process as usual."""
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
