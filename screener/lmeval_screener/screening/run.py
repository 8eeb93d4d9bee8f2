"""Screening many checkpoints, read concurrently.

Each checkpoint is read over the rows of its own tokenizer, and tokenizers are compared only when all readings
have ended: a slow or a failed checkpoint does not hold up the others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lmeval_dispersion.arguments import takes
from lmeval_dispersion.errors import DispersionError, UsageError
from lmeval_dispersion.layouts import nearest
from lmeval_dispersion.output import progress_bar
from lmeval_screener.chance import read_slope
from lmeval_screener.checkpoints.concurrency import in_loop, lock, run, side_by_side
from lmeval_screener.errors import ScreeningError
from lmeval_screener.ranking import common_tokenizers, mismatch, named_base, ranked
from lmeval_screener.reading import Reader
from lmeval_screener.result.gate import Gate
from lmeval_screener.result.result import Result
from lmeval_screener.screened import Failed, Reading, Screened
from lmeval_screener.screening.arguments import ScreenArguments
from lmeval_screener.screening.selection import CompleteList, Selected, select, several
from lmeval_screener.targets.names import Target, labelled, parse_target, parse_targets
from lmeval_screener.tokens.resolution import load_domain
from lmeval_screener.tokens.sets import AnswerSet, load_token_set
from lmeval_screener.weights.copies import originals

if TYPE_CHECKING:
    import asyncio

    from lmeval_screener.checkpoints.account import Account
    from lmeval_screener.checkpoints.http import Notice
    from lmeval_screener.checkpoints.hub import Hub
    from lmeval_screener.registry.database import Seen, Session
    from lmeval_screener.shortlist.accuracies import Accuracies

T = TypeVar("T")

#: Variable with the seconds for one checkpoint, everything included; the only time limit there is.
TIMEOUT = "DISPERSION_TIMEOUT"
_TIMEOUT = 60.0
_IN_TURN = 64  # folders up to which reading them in turn is faster than starting an event loop
_SIDE_BY_SIDE = 16  # checkpoints that are read at a time, for each quota
_SCOUTS = 3  # checkpoints that are tried first; if none can reach the Hub, no others are tried

#: Called when a checkpoint ends: its reading or failure, the number ended, the number of all.
OnDone = Callable[[Reading | Failed, int, int], None]


@takes(ScreenArguments)
def screen(arguments: ScreenArguments) -> Result:
    """Rank checkpoints by how far apart a domain's tokens lie in their output projection.

    Only the needed rows are read, without labels or a GPU. The result has the screened checkpoints,
    ranked within groups of one family and scale, and those that failed, with the reasons.

    Raises:
        UsageError: A name, a file or a combination of arguments cannot be used.
        ScreeningError: A listing of the Hub cannot be read. The failure of a single checkpoint
            raises nothing.
        DispersionError: The registry is damaged, or another process has locked it.
    """
    run = Screening(arguments)
    if run.domain.remark:
        warnings.warn(run.domain.remark, stacklevel=3)
    names = several(arguments.checkpoints)
    arguments = replace(arguments, checkpoints=names)
    if names == ["demo"] and not Path("demo").exists():
        arguments = replace(arguments, checkpoints=(), demo=True)
    selected = select(arguments)
    progress = arguments.progress
    with (
        run.recorded("screen()") as session,
        progress_bar(hidden=progress is not None) as bar,
    ):
        report = progress or bar
        run.on_done = lambda outcome, done, count: report(done, count, outcome.label)
        result = run.result(selected)
    if session is not None and session.loss:
        warnings.warn(session.loss, stacklevel=3)
    return result


def floor_among(
    targets: Sequence[Target],
    text: str,
    tokenizer: str | None = None,
    argument: str = "fail_if_below",
) -> Target:
    """Return the target that an option such as ``--fail-if-below`` names.

    Args:
        targets: The targets of the screening.
        text: The option's value: the label or the name of a checkpoint.
        tokenizer: The tokenizer for checkpoints without one.
        argument: Name of the option, for errors.

    Returns:
        The member of ``targets`` that ``text`` means; a new target if none is meant.

    Raises:
        UsageError: ``text`` is a mistyped label, or names several checkpoints.
    """
    by_label = {target.label: target for target in labelled(targets)}
    if text in by_label:
        return by_label[text]
    near = nearest(text, by_label)
    if near and "/" not in text and not os.path.exists(text):  # the Hub is not asked
        raise UsageError(f"expected a checkpoint, got {text!r}{near}", argument=argument)
    wanted, *others = parse_targets(text, tokenizer)
    if others or wanted.is_glob:
        raise UsageError(
            f"expected one checkpoint, got {text!r}, which names several; name one of them",
            argument=argument,
        )
    for target in by_label.values():
        is_same_file = (target.revision, target.file) == (wanted.revision, wanted.file)
        if is_same_file and target.place == wanted.place:
            return target
    return wanted


@dataclass
class Screening:
    """One screening: its arguments, and its state while it runs.

    Attributes:
        arguments: The arguments of :func:`screen`.
        answers: A task's answers, used instead of ``arguments.tasks``; None to use that argument.
        fail_if_below: Label or name of the checkpoint that no other may be below; None if there is
            no such condition.
        notice: Called with a server's name and a number of seconds when the server's rate limit
            makes the run wait.
        keep_on_interrupt: Whether Ctrl-C and SIGTERM end the run with the results so far. It has
            an effect only in the main thread.
        on_done: Called when a checkpoint has been read or has failed; see `OnDone`.
        order: The figure that ranks and the distance of G, as the arguments ask for them.
        accuracies: The supplied accuracies; None if there are none.
        slope: The user's own slope; None if there is none.
        domain: The token set of the domain, with its tasks and their answers.
        reference: The token set of everyday words.
        session: This run in the registry; None without a registry.

    Raises:
        UsageError: An argument, a file that it names, or DISPERSION_TIMEOUT cannot be used.
    """

    arguments: ScreenArguments
    answers: AnswerSet | None = None
    fail_if_below: str | None = None
    notice: Notice | None = None
    keep_on_interrupt: bool = False
    on_done: OnDone | None = None

    def __post_init__(self) -> None:
        """Read the sets and files of the arguments."""
        arguments = self.arguments
        self.order = arguments.order
        self.accuracies: Accuracies | None = None
        if arguments.results is not None:
            from lmeval_screener.shortlist.accuracies import read_accuracies

            self.accuracies = read_accuracies(str(arguments.results))
        self.slope = None if arguments.slope is None else read_slope(arguments.slope)
        self.domain = load_domain(arguments.domain, self.answers or arguments.tasks)
        self.reference = load_token_set(arguments.reference, "reference")
        self.session: Session | None = None  # the registry's, with known readings
        given = os.environ.get(TIMEOUT) or _TIMEOUT
        try:
            self._seconds = float(given)
        except ValueError:
            self._seconds = 0.0
        if not self._seconds > 0:
            raise UsageError(
                f"{TIMEOUT}: expected a number of seconds above 0, got {given!r}; set it, for "
                "example, to 60"
            )
        self._failed: dict[Target, Failed] = {}
        self._scouts = 0  # of the Hub's checkpoints, begun
        self._unreachable: list[str] = []  # their errors, while none has reached it
        self._stopped = False
        self._done = 0

    @contextlib.contextmanager
    def recorded(self, command: str) -> Iterator[Session | None]:
        """Open the arguments' registry for this run; yields its session, or None without a registry.

        The news counts as announced only if the block ends without an error; otherwise the next run
        announces it again.

        Args:
            command: The command, as the registry records it.

        Raises:
            UsageError: The registry or ``since`` cannot be used.
            DispersionError: SQLite failed, as in `to_write`.
        """
        registry = self.arguments.registry
        since = self.arguments.since
        if registry is None:
            yield None
            return
        from lmeval_screener.registry.database import Session, to_write
        from lmeval_screener.registry.news import since_time

        with to_write(Path(registry)) as connection:
            session = self.session = Session(
                connection,
                self.domain,
                self.reference,
                command=command,
                path=Path(registry),
                since=since,
            )
            try:
                if since is not None:
                    since_time(connection, since, session.tokens)
                yield session
                session.announced()
            finally:
                session.connection.close()

    def result(self, selected: Selected) -> Result:
        """Screen the selected checkpoints and rank them.

        Raises:
            UsageError: No checkpoint is selected, or an option does not fit the checkpoints.
        """
        if not selected.targets:
            raise UsageError(
                "expected a checkpoint, got none; name a folder of checkpoints, ORG/NAME or a "
                "family (`screen-checkpoints --demo` shows an example, `--help` all options)"
            )
        results: list[Result] = []
        all_local = self._all_local(selected.targets)

        async def screened() -> None:
            # Not returned: asyncio.run prints its task's result when it puts the signal handler back, which
            # takes 0.1 s for the arrays of a family.
            results.append(await self._screened(selected, all_local))

        run(screened(), in_turn=all_local and len(selected.targets) <= _IN_TURN)
        result, session = results[0], self.session
        if session is None:
            return result
        session.finish(
            result.checkpoints,
            failed=len(result.failed),
            bytes_read=result.bytes_read,
            requests=result.requests,
            seconds=result.seconds,
        )
        if session.since is None:
            return result
        from lmeval_screener.registry.news import news, since_time

        # Only now: news that another run announced meanwhile are not repeated.
        since = since_time(session.connection, session.since, session.tokens)
        session.begun = since
        changes = news(
            session.connection,
            session.tokens,
            since,
            self.order,
            until=session.ended,
            others=[failed for failed in result.failed if not session.holds(failed.target)],
            own=self.slope,
        )
        return replace(result, news=replace(changes, gate=result.gate))

    async def _screened(self, selected: Selected, all_local: bool) -> Result:
        start = time.perf_counter()
        async with contextlib.nullcontext() if all_local else self._hub() as hub:
            known = None
            if self.session is not None:
                known = self.session.find
                self.session.token = hub.token_mark if hub else ""
            self._reader = Reader(hub, self.domain, self.reference, known)
            await self._check_tokenizer()
            targets, by_option = await self._expanded(selected.targets)
            base = by_option.get("base", "")
            readings = await self._readings(targets)
            if hub is not None:
                await self._look_for_missing(hub, selected.complete)
            checkpoints = await self._ranked(readings, base)
        ranked_by = self.order.rank_by or "ratio"
        if self.order.rank_by is None and checkpoints:
            ranked_by = checkpoints[0].ranked_by
        unread = [self._failed[target] for target in targets if target in self._failed]
        result = Result(
            domain=self.domain.name,
            task=self.domain.task,
            answers=self.domain.answers.name if self.domain.answers else "",
            reference=self.reference.name,
            checkpoints=tuple(checkpoints),
            failed=tuple(f for f in unread if not f.base),
            of_base=tuple(f for f in unread if f.base),
            seconds=time.perf_counter() - start,
            bytes_read=selected.account.bytes_read + self._reader.account.bytes_read,
            requests=selected.account.requests + self._reader.account.requests,
            accuracy=self._meaning_of_accuracies(targets),
            ranked_by=ranked_by,
            base=base or ", ".join(c.label for c in checkpoints if c.is_base),
            slope=self.slope,
        )
        if "fail_if_below" not in by_option:
            return result
        return replace(result, gate=Gate.of(result.groups, unread, by_option["fail_if_below"]))

    async def _ranked(self, readings: Sequence[Reading], base: str) -> list[Screened]:
        """The checkpoints, ranked, and the bases that they name, if ``base`` is empty."""
        named = [] if base else await self._named_bases(readings)
        comparable = await self._with_bodies(await self._comparable([*readings, *named]))
        bases = [base] if base else []
        checkpoints = ranked(comparable, self.order, bases)
        unused = {reading.target for reading in named}
        for c in checkpoints:
            if c.is_base:
                unused.discard(c.target)
        if not unused:
            return checkpoints
        comparable = [reading for reading in comparable if reading.target not in unused]
        return ranked(comparable, self.order, bases)

    def _hub(self) -> AbstractAsyncContextManager[Hub | None]:
        from lmeval_screener.checkpoints.hub import Hub

        return Hub(notice=self.notice)

    def _all_local(self, targets: Sequence[Target]) -> bool:
        """Whether all are folders and need nothing from elsewhere: neither a base nor a tokenizer.

        Then there are no connections: importing them takes a while.
        """
        return self.arguments.tokenizer is None and all(
            target.local
            and target.tokenizer is None
            and not Path(target.repo, "adapter_config.json").exists()
            for target in self.named(targets)[0]
        )

    async def _check_tokenizer(self) -> None:
        """Refuse a ``--tokenizer`` that cannot be opened; with a registry only a misspelt one."""
        tokenizer = self.arguments.tokenizer
        if tokenizer is None:
            return
        try:
            await self._reader.sources.tokenizer(tokenizer)
        except ScreeningError as error:
            if self.session is None or error.code.endswith(("NotFound", "Name")):
                raise UsageError(str(error)) from error

    def _meaning_of_accuracies(self, targets: Sequence[Target]) -> str:
        """Describe the supplied accuracies; without any, only the demo's targets have some."""
        if self.accuracies is not None:
            return self.accuracies.meaning
        if all(target.accuracy is None for target in targets):
            return ""
        return "measured when the demo was trained"

    def named(self, targets: Iterable[Target]) -> tuple[list[Target], dict[str, str]]:
        """Add the targets that options name, and label all targets.

        Returns:
            All targets, each once and with its label; and a dict from ``fail_if_below`` and
            ``base``, as far as they are given, to the label of the target that each names.

        Raises:
            UsageError: An option does not name exactly one checkpoint.
        """
        every = dict.fromkeys(targets)
        by_option: dict[str, Target] = {}
        for name, text in (("fail_if_below", self.fail_if_below), ("base", self.arguments.base)):
            if text is not None:
                target = floor_among([*every], text, self.arguments.tokenizer, name)
                by_option[name] = target
                every[target] = None
        with_labels = labelled([*every])
        labels = dict(zip(every, with_labels, strict=True))
        return with_labels, {name: labels[target].label for name, target in by_option.items()}

    async def _expanded(self, targets: Sequence[Target]) -> tuple[list[Target], dict[str, str]]:
        """The targets of `named`, with globs expanded and accuracies."""
        lists = await side_by_side(map(self._revisions, targets))
        expanded, by_option = self.named(chain.from_iterable(lists))
        if self.accuracies:
            expanded = self.accuracies.of(expanded)
        return expanded, by_option

    def _account(self) -> Account:
        """The account of one checkpoint."""
        return self._reader.account.part(self._seconds)

    async def _revisions(self, target: Target) -> list[Target]:
        account = self._account()
        try:
            return await account.bounded(self._reader.sources.expand(target, account)) or [target]
        except ScreeningError as error:
            return [replace(target, refused=(error.code, str(error)))]  # fails when it is read

    async def _named_bases(self, readings: Sequence[Reading]) -> list[Reading]:
        """The bases that groups name and the user did not; a base that cannot be read is skipped."""
        alike = defaultdict[tuple[object, ...], list[Reading]](list)
        for reading in readings:
            alike[reading.target.family, reading.target.scale, reading.shape].append(reading)
        targets = [reading.target for reading in readings]
        places = {reading.place for reading in readings}
        bases: list[Target] = []
        for members in alike.values():
            base = named_base(members)
            if base and base not in places:
                first = members[0].target
                target = replace(
                    parse_target(base), family=first.family, scale=first.scale, by_file=True
                )
                bases.append(target)
        with_labels = labelled([*targets, *bases])
        return await self._readings(with_labels[len(targets) :], asked=False)

    async def _readings(self, targets: Sequence[Target], *, asked: bool = True) -> list[Reading]:
        """The readings that succeeded, in the order of the targets; a failure stops no other."""
        # A checkpoint that waits for a quota holds a slot: each quota has its own slots.
        slots = defaultdict[str, AbstractAsyncContextManager[object]](lambda: lock(_SIDE_BY_SIDE))

        async def read(target: Target) -> Reading:
            async with slots[_quota_of(target)]:
                return await self._read(target)

        async def work(target: Target) -> Reading | None:
            outcome = await self._tried(read(target))
            if asked or isinstance(outcome, Reading):
                self._report(target, outcome, len(targets))
            if isinstance(outcome, Reading):
                return outcome
            if self.session is None:
                return None
            return self.session.last_known(target, outcome)

        readings = await self._until_stopped(work(target) for target in targets)
        return [reading for reading in readings if reading is not None]

    async def _tried(self, work: Awaitable[Reading]) -> Reading | ScreeningError:
        """A coroutine's reading, or the error that fails this checkpoint only."""
        try:
            return await work
        except ScreeningError as error:
            return error
        except DispersionError:
            raise  # it concerns the whole run
        except Exception as error:
            if os.environ.get("DISPERSION_DEBUG"):
                raise
            return ScreeningError(
                "InternalError",
                f"{type(error).__name__}: {error}; please report it with what DISPERSION_DEBUG=1 "
                "shows",
            )
        except BaseException:
            if not self._stopped:
                raise
            return _interrupted(self.session)

    async def _until_stopped(self, works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """Results of works, which Ctrl-C and SIGTERM cancel if results so far are to be kept."""
        tasks: list[asyncio.Task[T]] = []

        def stop() -> None:
            self._stopped = True
            for task in tasks:
                task.cancel()

        with _on_interrupt(stop) if self.keep_on_interrupt else contextlib.nullcontext():
            if not in_loop():
                return await side_by_side(works)
            import asyncio

            tasks += [asyncio.create_task(work) for work in works]
            return await side_by_side(tasks)

    async def _read(self, target: Target) -> Reading:
        if self._stopped:
            raise _interrupted(self.session)
        known = self.session and self.session.pinned(target)
        if known:
            return known
        if target.on_hub and target.refused is None:
            return await self._read_from_hub(target)
        return await self._reader.read(target, self._account())

    async def _read_from_hub(self, target: Target) -> Reading:
        """Read a checkpoint of the Hub; the first ones show whether it can be reached, the others wait."""
        reached = self._reader.reached
        assert reached is not None, "only folders need no hub"
        self._scouts += 1
        if self._scouts > _SCOUTS:
            await reached.wait()
        if len(self._unreachable) == _SCOUTS:
            why = (
                f"not tried, because {_SCOUTS} other checkpoints could not be reached: "
                f"{self._unreachable[0]}"
            )
            raise ScreeningError("Unreachable", why)
        try:
            return await self._reader.read(target, self._account())
        except ScreeningError as error:
            if error.code == "Unreachable" and not reached.is_set():
                self._unreachable.append(str(error))
            if error.code != "Unreachable" or len(self._unreachable) == _SCOUTS:
                reached.set()
            raise

    def _report(self, target: Target, outcome: Reading | ScreeningError, count: int) -> None:
        """Record a checkpoint's outcome, in the registry too, and call ``on_done``."""
        self._done += 1
        if self.session is not None:
            self.session.keep(target, outcome)
        ended = self._fail(target, outcome) if isinstance(outcome, ScreeningError) else outcome
        if self.on_done is not None:
            self.on_done(ended, self._done, count)

    def _fail(self, target: Target, error: ScreeningError) -> Failed:
        # Text, not the exception, which would keep every frame that it passed alive.
        failed = Failed(target, error.code, str(error), error.base, error.cause)
        self._failed[target] = failed
        return failed

    async def _look_for_missing(self, hub: Hub, lists: Sequence[CompleteList]) -> None:
        """Record the known checkpoints that a list lacks; the Hub is asked where its answer is evidence."""
        session = self.session
        if session is None or self._stopped:
            return

        async def look(seen: Seen, error: ScreeningError) -> None:
            if session.can_prove(seen, error):
                target = seen.target
                try:
                    snapshot = await hub.snapshot(target.repo, target.revision, self._account())
                except ScreeningError as answer:
                    error = answer
                else:
                    # A list that changes while it is read may lack a repository.
                    if snapshot.repo != target.repo:
                        session.rename(seen, snapshot.repo)
                    return
            session.lose(seen, error)

        await side_by_side((look(*missing) for missing in session.missing(lists)), _SIDE_BY_SIDE)

    async def _comparable(self, readings: Sequence[Reading]) -> list[Reading]:
        """The comparable readings, each with its common tokenizer."""
        families: dict[str | None, list[Reading]] = {}
        for reading in readings:
            families.setdefault(reading.target.family, []).append(reading)
        comparable = []
        for family, members in families.items():
            commons = common_tokenizers(family, members)
            for reading in members:
                outcome: Reading | ScreeningError = reading
                common = commons[reading.tokenizer]
                if common is None:
                    of_family = next(filter(None, commons.values()))
                    outcome = mismatch(family, reading, of_family.first)
                elif common.first.resolution != reading.resolution:
                    # Its tokenizer also has words that the others lack: rank it on the common words.
                    work = self._tried(self._read_over(reading, common.first))
                    (outcome,) = await self._until_stopped([work])
                if isinstance(outcome, ScreeningError):
                    self._fail(reading.target, outcome)
                elif common is not None:
                    comparable.append(replace(outcome, common=common.first.tokenizer))
        return comparable

    async def _with_bodies(self, readings: Sequence[Reading]) -> list[Reading]:
        """The readings, with bodies where rows are the same: only bodies show copies."""
        alike = defaultdict[tuple[object, ...], list[Reading]](list)
        for reading in readings:
            alike[reading.target.family, reading.common, reading.shape].append(reading)
        wanted: dict[Target, Reading] = {}
        for members in alike.values():
            for place, original in enumerate(originals(members)):
                if original.copied is None and original.place != place:
                    for reading in (members[place], members[original.place]):
                        wanted[reading.target] = reading
        found = await side_by_side(map(self._body, wanted.values()))
        bodies = dict(zip(wanted, found, strict=True))
        return [
            replace(reading, body=bodies.get(reading.target, reading.body)) for reading in readings
        ]

    async def _body(self, reading: Reading) -> bytes:
        """A reading's body; as it is where it cannot be read, as nothing is then called a copy."""
        with contextlib.suppress(ScreeningError):
            return await self._reader.body(_as_read(reading), self._account())
        return reading.body

    async def _read_over(self, reading: Reading, common: Reading) -> Reading:
        """Read the same checkpoint, at the same commit, over another tokenizer's tokens."""
        account = self._account()
        again = await self._reader.read(_as_read(reading), account, over=common.resolution)
        return replace(
            again,
            target=reading.target,
            bytes_read=again.bytes_read + reading.bytes_read,
            requests=again.requests + reading.requests,
            seconds=again.seconds + reading.seconds,
        )


def _as_read(reading: Reading) -> Target:
    """The target of a reading at the commit that was read."""
    return replace(reading.target, revision=reading.revision or reading.target.revision)


def _quota_of(target: Target) -> str:
    """The Hub quota that a checkpoint may wait for: the API's, unless a listing had it before."""
    if not target.on_hub:
        return "none"
    return "resolver" if target.listed is not None else "api"


def _interrupted(session: Session | None) -> ScreeningError:
    """The error of a checkpoint that a signal left unread."""
    kept = "cached" if session is None else "in the registry"
    return ScreeningError(
        "Interrupted",
        "stopped before the checkpoint was read; run the same command again to continue, as "
        f"finished readings are {kept}",
    )


@contextlib.contextmanager
def _on_interrupt(act: Callable[[], object]) -> Iterator[None]:
    """Call ``act`` on Ctrl-C and SIGTERM; if the loop takes no handlers, they end the process as usual."""
    signals = (signal.SIGINT, signal.SIGTERM)
    if not in_loop():
        before = [signal.signal(number, lambda *_: act()) for number in signals]
        try:
            yield
        finally:
            for number, handler in zip(signals, before, strict=True):
                signal.signal(number, handler)
        return
    import asyncio

    loop = asyncio.get_running_loop()
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
