"""``--engine ray``: checkpoints in folders and buckets are read by the tasks of a Ray cluster.

Only a process of its own speaks with Ray, whose client waits for a lost cluster without limit, holds signals
back, and may end its process. It says every second that some node lives and how many tasks it has room for,
gets blocks of checkpoints for them, and gives back what was read. When it falls silent it is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from lmeval_dispersion.errors import DispersionError, MissingExtraError, UsageError
from lmeval_screener.checkpoints import Meter
from lmeval_screener.checkpoints.hub import Hub
from lmeval_screener.checkpoints.limits import Budget
from lmeval_screener.errors import ScreeningError
from lmeval_screener.reading import Reader
from lmeval_screener.screened import Reading
from lmeval_screener.targets import Target
from lmeval_screener.tokens import Resolution, TokenSet

_BLOCK = 100  # checkpoints of a task, at most
_RETRIES = 3  # of a task whose worker or node was lost
_SILENCE = 20.0  # seconds without a sign of life after which a cluster is lost
_START = 120.0  # seconds that one of this machine's own may take to start
_SLACK = 60.0  # seconds for a block's way to a worker and back

#: The reading of a checkpoint, or code and sentence of why there is none.
Outcome = Reading | tuple[str, str]
#: Number of a checkpoint, the checkpoint, its seconds.
_Asked = tuple[int, Target, float]
#: A sign of life with the room for tasks; what was read; why Ray failed; None for nothing within a second.
_Message = int | tuple[dict[int, Outcome], Meter] | str | None


def check_ray(targets: Sequence[Target]) -> None:
    """Whether Ray is there and of use."""
    hub = sum(target.on_hub and target.refused is None for target in targets)
    if hub:
        raise UsageError(
            f"expected checkpoints in folders or buckets with --engine ray, got {hub} on the Hub: its "
            "quota is the limit there, and more machines share the same one; leave --engine out"
        )
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("--engine ray needs Ray: pip install 'lmeval-dispersion[ray]'") from error


class RayReader(Reader):
    """Reads checkpoints on the cluster that ``RAY_ADDRESS`` names, else on one of this machine's own.

    It starts when the first checkpoint is to be read. Checkpoints over tokens of another tokenizer are read
    here.
    """

    side_by_side = 1_000_000  # all wait here; the cluster's cores decide how many are read at once

    def __init__(self, hub: Hub, domain: TokenSet, reference: TokenSet, *others: Any) -> None:
        super().__init__(hub, domain, reference, *others)
        self._settings = domain, reference, os.getcwd()
        self._address = os.environ.get("RAY_ADDRESS") or "local"
        self._process: multiprocessing.process.BaseProcess | None = None
        self._listening: asyncio.Task[None] | None = None
        self._asked: list[_Asked] = []
        self._waiting: dict[int, asyncio.Future[Outcome]] = {}
        self._numbers = count()
        self._openings = asyncio.Semaphore(Reader.side_by_side)
        self._lost: DispersionError | None = None
        self._patience = 0.0  # seconds in which a block must come back

    async def read(self, target: Target, budget: Budget, *, over: Resolution | None = None) -> Reading:
        """See `Reader.read`; the budget begins on the cluster."""
        if over is not None or target.refused is not None:
            return await super().read(target, budget, over=over)
        if self._known is not None:
            async with self._openings:
                known = (await budget.bounded(self._opened(target, budget, ask=True)))[-1]
            if known is not None:
                return known
        if self._lost is not None:
            raise self._lost
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen())
        place, tokenizer = target.repo, target.tokenizer
        if target.local:
            place = os.path.abspath(os.path.expanduser(place))
        if tokenizer is not None and os.path.exists(tokenizer):
            tokenizer = os.path.abspath(tokenizer)
        rounds = math.ceil(_BLOCK / Reader.side_by_side)
        self._patience = max(self._patience, rounds * budget.seconds + _SLACK)
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self._asked.append((number, replace(target, repo=place, tokenizer=tokenizer), budget.seconds))
        try:
            outcome = await self._waiting[number]
        finally:
            del self._waiting[number]
        if isinstance(outcome, Reading):
            return replace(outcome, target=target, repo=target.repo if target.local else outcome.repo)
        raise ScreeningError(*outcome)

    def close(self) -> None:
        """End the process that speaks with Ray, and with it a cluster that it started."""
        if self._listening is not None:
            self._listening.cancel()
        if self._process is not None:
            self._process.kill()  # Ray's own goodbye would wait for a cluster that is lost
            self._process.join()

    async def _listen(self) -> None:
        """Start the process that speaks with Ray, give it blocks, and take in what it says."""
        connection, there = multiprocessing.Pipe()
        # Spawned: a fork of a process that has threads may never wake.
        self._process = multiprocessing.get_context("spawn").Process(
            target=_speak_with_ray, args=(there, self._address, *self._settings), daemon=True
        )
        self._process.start()
        there.close()
        alive, progressed = time.monotonic(), math.inf  # patience begins with the first sign of life
        limit = _START if self._address == "local" else _SILENCE
        with connection, contextlib.suppress(EOFError, OSError, asyncio.TimeoutError):
            while True:
                message: _Message = await asyncio.to_thread(_next_message, connection)
                now = time.monotonic()
                if isinstance(message, str):
                    return self._lose(message)
                if message is not None:
                    alive, limit = now, _SILENCE
                if isinstance(message, tuple):
                    progressed = now
                    self._take(*message)
                elif message is not None:
                    progressed = min(progressed, now)
                    await self._deal(connection, message)
                if now - alive > limit:
                    return self._lose(f"no node of the Ray cluster has answered for {limit:.0f} s")
                if self._waiting and now - progressed > self._patience:
                    return self._lose(f"the Ray cluster has read nothing for {self._patience:.0f} s")
        self._lose("Ray's client ended")

    async def _deal(self, connection: Connection, room: int) -> None:
        """Give blocks to so many tasks; small lists are dealt out to all."""
        size = max(1, min(_BLOCK, math.ceil(len(self._asked) / max(room, 1))))
        for _ in range(room):
            block, self._asked = self._asked[:size], self._asked[size:]
            if block:
                await asyncio.wait_for(asyncio.to_thread(connection.send, block), _SILENCE)

    def _take(self, outcomes: dict[int, Outcome], meter: Meter) -> None:
        self.meters.append(meter)
        for number, outcome in outcomes.items():
            if (waiting := self._waiting.get(number)) is not None and not waiting.done():
                waiting.set_result(outcome)

    def _lose(self, reason: str) -> None:
        """End all that waits, for one reason."""
        if self.meters:  # a block came back
            self._lost = ScreeningError(
                "Interrupted", f"{reason}; what was read is kept, run the same command again"
            )
        else:
            self._lost = DispersionError(
                f"--engine ray: {reason}; check RAY_ADDRESS ({self._address}) with `ray status`, or leave "
                "--engine out"
            )
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._lost)


def _next_message(connection: Connection) -> Any:
    return connection.recv() if connection.poll(1) else None


def _speak_with_ray(
    connection: Connection, address: str, domain: TokenSet, reference: TokenSet, folder: str
) -> None:
    """Life of the process that speaks with Ray; it ends with the one that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    if not os.environ.get("DISPERSION_DEBUG"):
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    try:
        import ray

        logging.getLogger("ray").setLevel(logging.ERROR)
        # Without an address Ray would join the cluster that somebody started last on this machine.
        extra = {"include_dashboard": False} if address == "local" else {}
        ray.init(address=address, log_to_driver=False, configure_logging=False, **extra)
        _spread(connection, (domain, reference, folder))
    except (EOFError, BrokenPipeError):
        os._exit(0)
    except Exception as error:
        with contextlib.suppress(OSError):
            sentence = str(error).strip().partition("\n")[0]
            connection.send(f"Ray failed ({type(error).__name__}: {sentence})")
        os._exit(1)


def _spread(connection: Connection, settings: tuple[Any, ...]) -> None:
    """Give blocks to tasks, two for each core of the cluster, and send back what they read."""
    import ray

    task = ray.remote(num_cpus=1, max_retries=_RETRIES, scheduling_strategy="SPREAD")(read_block)
    running: dict[Any, list[int]] = {}
    last_sign = 0.0
    while True:
        while connection.poll(0 if running else 0.2):
            block: list[_Asked] = connection.recv()
            answer = task.remote([item[1:] for item in block], *settings)
            running[answer] = [number for number, *_ in block]
        done = ray.wait(list(running), timeout=0.2)[0] if running else []
        for answer in done:
            numbers = running.pop(answer)
            try:
                outcomes, meter = ray.get(answer)
            except ray.exceptions.RayError as error:
                lost = f"its workers were lost ({type(error).__name__}); run the same command again"
                outcomes, meter = [("Interrupted", lost)] * len(numbers), Meter()
            connection.send((dict(zip(numbers, outcomes, strict=True)), meter))
        if done or time.monotonic() - last_sign > 1:
            nodes = ray.nodes()
            cores = int(sum(node["Resources"].get("CPU", 0) for node in nodes if node["Alive"]))
            last_sign = time.monotonic()
            if cores:
                connection.send(max(0, 2 * cores - len(running)))


def read_block(
    block: Sequence[tuple[Target, float]], domain: TokenSet, reference: TokenSet, folder: str
) -> tuple[list[Outcome], Meter]:
    """The outcomes of some checkpoints, each within its time, in a worker; and the traffic of all."""
    with contextlib.suppress(OSError):
        os.chdir(folder)

    async def read_all() -> tuple[list[Outcome], Meter]:
        async with Hub() as hub:
            reader, places = Reader(hub, domain, reference), asyncio.Semaphore(Reader.side_by_side)
            outcomes = await asyncio.gather(*(_outcome(reader, places, *item) for item in block))
        return outcomes, Meter(hub.meter.bytes_read, hub.meter.requests)

    return asyncio.run(read_all())


async def _outcome(reader: Reader, places: asyncio.Semaphore, target: Target, seconds: float) -> Outcome:
    async with places:
        try:
            return await reader.read(target, Budget(seconds))
        except ScreeningError as error:
            return error.code, str(error)
        except Exception as error:
            # A defect that shows in one checkpoint must not cost the user all the others.
            return "InternalError", f"{type(error).__name__}: {error}; please report it"
