"""``--engine ray``: checkpoints in folders and buckets are read by the tasks of a Ray cluster.

Only a process of its own speaks with Ray, whose client waits for a lost cluster without limit, holds signals
back, and may end the process that it lives in. That process gets checkpoints, gives back what was read of
them, and says every second that some node lives; when it falls silent, or nobody waits any more, it is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import multiprocessing
import os
import queue
import signal
import threading
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
from lmeval_screener.tokens import Resolution, ResolutionCache, TokenSet

_BLOCK = 100  # checkpoints of a task, at most
_RETRIES = 3  # of a task whose worker or node was lost
_SILENCE = 20.0  # seconds without a sign of life after which a cluster is lost
_START = 120.0  # seconds that one of this machine's own may take to start
_SLACK = 60.0  # seconds for a block's way to a worker and back

#: The reading of a checkpoint, or code and sentence of why there is none.
Outcome = Reading | tuple[str, str]
#: Number of a checkpoint, the checkpoint, its seconds.
_Asked = tuple[int, Target, float]


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
        self._address = os.environ.get("RAY_ADDRESS") or "local"
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None
        self._waiting: dict[int, asyncio.Future[Outcome | None]] = {}
        self._numbers = count()
        self._openings = asyncio.Semaphore(Reader.side_by_side)
        self._lost: DispersionError | None = None
        self._alive = self._progressed = (
            0.0  # when it last gave a sign of life, when something to show for it
        )
        self._connected = self._some_read = False
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
        if self._connection is None:
            self._connection = self._started()
        place, tokenizer = target.repo, target.tokenizer
        if target.local:
            place = os.path.abspath(os.path.expanduser(place))
        if tokenizer is not None and os.path.exists(tokenizer):
            tokenizer = os.path.abspath(tokenizer)
        rounds = math.ceil(_BLOCK / Reader.side_by_side)
        self._patience = max(self._patience, rounds * budget.seconds + _SLACK)
        number = next(self._numbers)
        outcome: asyncio.Future[Outcome | None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = outcome
        try:
            if self._lost is None:
                asked = number, replace(target, repo=place, tokenizer=tokenizer), budget.seconds
                with contextlib.suppress(OSError):  # what ended is noticed where it is heard
                    self._connection.send(asked)
            read = await outcome if self._lost is None else None
        finally:
            del self._waiting[number]
        if isinstance(read, Reading):
            return replace(read, target=target, repo=target.repo if target.local else read.repo)
        if read is not None:
            raise ScreeningError(*read)
        raise self._lost or TypeError("nothing was read, and no cluster lost")

    def close(self) -> None:
        """End the process that speaks with Ray, and with it a cluster that it started."""
        if self._process is not None and self._connection is not None:
            asyncio.get_running_loop().remove_reader(self._connection.fileno())
            self._connection.close()
            self._process.kill()  # Ray's own goodbye would wait for a cluster that is lost
            self._process.join()

    def _started(self) -> Connection:
        here, there = multiprocessing.Pipe()
        # Spawned: a fork of a process that has threads may never wake.
        self._process = multiprocessing.get_context("spawn").Process(
            target=_speak_with_ray,
            args=(there, self._address, self._domain, self._reference, os.getcwd()),
            daemon=True,
        )
        self._process.start()
        there.close()
        loop = asyncio.get_running_loop()
        self._alive = self._progressed = time.monotonic()
        loop.add_reader(here.fileno(), self._hear, here)
        loop.call_later(1, self._watch)
        return here

    def _hear(self, connection: Connection) -> None:
        """Take in what the other process says: an error, a sign of life, or what was read."""
        try:
            while self._lost is None and connection.poll():
                said = connection.recv()
                if isinstance(said, str):
                    self._lose(said)
                    return
                self._alive = time.monotonic()
                if not self._connected:
                    self._connected, self._progressed = True, self._alive
                if said is not None:
                    self._take(*said)
        except (EOFError, OSError):
            self._lose("Ray's client ended")

    def _take(self, read: dict[int, Outcome], meter: Meter) -> None:
        self._progressed, self._some_read = self._alive, True
        self.meters.append(meter)
        for number, outcome in read.items():
            if (waiting := self._waiting.get(number)) is not None and not waiting.done():
                waiting.set_result(outcome)

    def _watch(self) -> None:
        """Look once a second whether the cluster lives and gets anywhere."""
        if self._lost is not None or self._connection is None or self._connection.closed:
            return
        now = time.monotonic()
        limit = _SILENCE if self._connected or self._address != "local" else _START
        if now - self._alive > limit:
            self._lose(f"no node of the Ray cluster has answered for {limit:.0f} s")
        elif self._waiting and now - self._progressed > self._patience:
            self._lose(f"the Ray cluster has read nothing for {self._patience:.0f} s")
        else:
            asyncio.get_running_loop().call_later(1, self._watch)

    def _lose(self, reason: str) -> None:
        """End all that waits, for one reason."""
        if self._connection is not None:
            asyncio.get_running_loop().remove_reader(
                self._connection.fileno()
            )  # its end is readable for ever
        if self._some_read:
            self._lost = ScreeningError(
                "Interrupted", f"{reason}; what was read is kept, run the same command again"
            )
        else:
            self._lost = DispersionError(
                f"--engine ray: {reason}; check RAY_ADDRESS ({self._address}) with `ray status`, or leave "
                "--engine out"
            )
        for outcome in self._waiting.values():
            if not outcome.done():
                outcome.set_result(None)


def _speak_with_ray(
    connection: Connection, address: str, domain: TokenSet, reference: TokenSet, folder: str
) -> None:
    """Life of the process that speaks with Ray; it ends with the one that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    if not os.environ.get("DISPERSION_DEBUG"):
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    asked: queue.SimpleQueue[_Asked] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, asked), daemon=True).start()
    try:
        import ray

        logging.getLogger("ray").setLevel(logging.ERROR)
        # Without an address Ray would join the cluster that somebody started last on this machine.
        extra = {"include_dashboard": False} if address == "local" else {}
        ray.init(address=address, log_to_driver=False, configure_logging=False, **extra)
        _spread(connection, asked, (domain, reference, folder))
    except Exception as error:
        with contextlib.suppress(OSError):
            sentence = str(error).strip().partition("\n")[0]
            connection.send(f"Ray failed ({type(error).__name__}: {sentence})")
        os._exit(1)


def _receive(connection: Connection, asked: queue.SimpleQueue[_Asked]) -> None:
    """Take in what is asked at once, so that nobody waits; end with the process that asks."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            asked.put(connection.recv())
    os._exit(0)


def _spread(connection: Connection, asked: queue.SimpleQueue[_Asked], settings: tuple[Any, ...]) -> None:
    """Give blocks to tasks, two for each core of the cluster, and send back what they read."""
    import ray

    task = ray.remote(num_cpus=1, max_retries=_RETRIES, scheduling_strategy="SPREAD")(read_block)
    waiting: list[_Asked] = []
    running: dict[Any, list[int]] = {}
    cores, looked = 0, 0.0
    while True:
        if time.monotonic() - looked > 1:
            nodes = ray.nodes()
            cores = int(sum(node["Resources"].get("CPU", 0) for node in nodes if node["Alive"]))
            looked = time.monotonic()
            if cores:
                connection.send(None)
        with contextlib.suppress(queue.Empty):
            while True:
                waiting.append(asked.get_nowait())
        # Small lists are dealt out to all.
        size = max(1, min(_BLOCK, math.ceil(len(waiting) / max(2 * cores, 1))))
        while waiting and len(running) < 2 * cores:
            block, waiting = waiting[:size], waiting[size:]
            answer = task.remote([item[1:] for item in block], *settings)
            running[answer] = [number for number, *_ in block]
        if not running:
            time.sleep(0.05)
            continue
        for answer in ray.wait(list(running), timeout=0.2)[0]:
            numbers = running.pop(answer)
            try:
                outcomes, meter = ray.get(answer)
            except ray.exceptions.RayError as error:
                lost = f"its workers were lost ({type(error).__name__}); run the same command again"
                outcomes, meter = [("Interrupted", lost)] * len(numbers), Meter()
            connection.send((dict(zip(numbers, outcomes, strict=True)), meter))


def read_block(
    block: Sequence[tuple[Target, float]], domain: TokenSet, reference: TokenSet, folder: str
) -> tuple[list[Outcome], Meter]:
    """Some checkpoints, each within its time, as a worker reads them.

    Returns:
        What came of each; then what travelled for all.
    """
    with contextlib.suppress(OSError):
        os.chdir(folder)

    async def read_all() -> tuple[list[Outcome], Meter]:
        async with Hub() as hub:
            reader = Reader(hub, domain, reference, ResolutionCache(hub.cache))
            places = asyncio.Semaphore(Reader.side_by_side)

            async def read(target: Target, seconds: float) -> Outcome:
                async with places:
                    try:
                        reading = await reader.read(target, Budget(seconds))
                    except ScreeningError as error:
                        return error.code, str(error)
                    except Exception as error:
                        # A defect that shows in one checkpoint must not cost the user all the others.
                        return "InternalError", f"{type(error).__name__}: {error}; please report it"
                    return reading

            outcomes = await asyncio.gather(*(read(*item) for item in block))
        return outcomes, Meter(hub.meter.bytes_read, hub.meter.requests)

    return asyncio.run(read_all())
