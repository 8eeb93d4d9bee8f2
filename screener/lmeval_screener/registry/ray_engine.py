"""``--engine ray``: the same screening over a cluster, for storages whose limit is the machine.

Blocks of checkpoints go to a few actors, which read them as a process of its own would; at most two blocks
wait at each, so that nothing piles up. What comes back is kept by one writer, the process that started it.
An actor that is lost costs the blocks that it had: another reads them once more.

Controls are a second pass: which rows they are made of is known only when all checkpoints are read. A block
is then figures and rows, and no actor keeps a checkpoint open in between: each opens it once more.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

from lmeval_dispersion.errors import MissingExtraError, UsageError
from lmeval_screener.errors import ScreeningError
from lmeval_screener.screening import (
    BlockRead,
    Controlled,
    ControlWork,
    read_block,
    read_control_block,
)
from lmeval_screener.targets.target import Target
from lmeval_screener.tokens.sets import TokenSet

T = TypeVar("T")

_BLOCK = 100  # checkpoints
_WAITING = 2  # blocks at an actor
_TRIES = 2


def check_engine(targets: Sequence[Target]) -> None:
    """Whether Ray is there and of use.

    Raises:
        MissingExtraError: Ray is not installed.
        UsageError: Some checkpoints are on the Hub, whose quota no number of machines changes.
    """
    hub = sum(not item.local and item.refused is None and "://" not in item.repo for item in targets)
    if hub:
        raise UsageError(
            f"expected checkpoints in folders or buckets with --engine ray, got {hub} on the Hub: its "
            "quota is the limit there, and more machines share the same one; leave --engine out"
        )
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("--engine ray needs Ray: pip install 'lmeval-dispersion[ray]'") from error


class RayEngine:
    """Reads checkpoints on a cluster: the one that ``RAY_ADDRESS`` names, else one of this machine.

    A context manager: the actors live until its end, and so does a cluster that it started.

    Args:
        domain: T.
        reference: R.
        timeout: Seconds for one checkpoint.
        block: Checkpoints that are given away at once.

    Attributes:
        bytes_read: Of all workers together.
        requests: Likewise.
    """

    def __init__(self, domain: TokenSet, reference: TokenSet, timeout: float, *, block: int = _BLOCK) -> None:
        self._settings, self._block = (domain, reference, timeout), block
        self._stopped = self._started = False
        self._actors: list[Any] = []
        self._load: dict[int, int] = {}  # blocks at each actor that lives
        self.bytes_read = self.requests = 0

    def __enter__(self) -> RayEngine:
        """Nothing starts before something is to be read."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the actors go, and end what was started."""
        self._actors, self._load = [], {}
        if self._started:
            import ray

            ray.shutdown()
            self._started = False

    def stop(self) -> None:
        """Wait for nothing any more; what was not read is not told of."""
        self._stopped = True

    def read(
        self, targets: Sequence[Target], came: Callable[[int, BlockRead | ScreeningError], None]
    ) -> None:
        """Read checkpoints.

        Args:
            targets: Which.
            came: Called in this thread as blocks come back, with each one's place and what came of it; an
                error where the workers that had it were lost.
        """
        self._spread("read", targets, came)

    def read_controls(
        self, work: ControlWork, came: Callable[[int, Controlled | ScreeningError], None]
    ) -> None:
        """Read the controls of checkpoints whose figures are known; ``came`` as for `read`."""
        self._spread("read_controls", work, came)

    def _spread(self, method: str, work: Sequence[Any], came: Callable[[int, Any], None]) -> None:
        """Give blocks of some work to the actors."""
        if self._stopped or not work:
            return
        import ray

        if not ray.is_initialized():
            # Its remark that SIGTERM is not its own here: it is ours.
            logging.getLogger("ray").setLevel(logging.ERROR)
            # Without an address Ray would join the cluster that somebody started last on this machine.
            address = os.environ.get("RAY_ADDRESS") or "local"
            ray.init(address=address, log_to_driver=False, logging_level="error", configure_logging=False)
            self._started = True
        # Small lists are dealt out to all.
        count = max(1, int(ray.cluster_resources().get("CPU", 1)))
        size = max(1, min(self._block, -(-len(work) // count)))
        blocks = deque((range(at, min(at + size, len(work))), 1) for at in range(0, len(work), size))
        while len(self._load) < min(count, len(blocks)):
            self._add_actor()
        running: dict[Any, tuple[int, range, int]] = {}
        while (blocks or running) and not self._stopped:
            for at in sorted(self._load, key=lambda at: self._load[at]):
                while blocks and self._load[at] < _WAITING:
                    block, tries = blocks.popleft()
                    actor = getattr(self._actors[at], method)
                    running[actor.remote([work[place] for place in block])] = at, block, tries
                    self._load[at] += 1
            done, _ = ray.wait(list(running), num_returns=1, timeout=0.5)
            for reference in done:
                at, block, tries = running.pop(reference)
                if at in self._load:
                    self._load[at] -= 1
                try:
                    found, bytes_read, requests = ray.get(reference)
                except ray.exceptions.RayError as error:
                    if isinstance(error, ray.exceptions.RayActorError):
                        # The others take its blocks: its place may be gone with its machine.
                        self._load.pop(at, None)
                        if not self._load:
                            self._add_actor()
                    if tries < _TRIES:
                        blocks.append((block, tries + 1))
                        continue
                    lost = f"its workers were lost ({type(error).__name__}); run the same command again"
                    for place in block:
                        came(place, ScreeningError("Interrupted", lost))
                    continue
                self.bytes_read += bytes_read
                self.requests += requests
                for place, outcome in zip(block, found, strict=True):
                    came(place, outcome)

    def _add_actor(self) -> None:
        import ray

        worker = ray.remote(num_cpus=1, max_restarts=0)(_Worker)
        self._load[len(self._actors)] = 0
        self._actors.append(worker.remote(*self._settings))


class _Worker:
    """One actor."""

    def __init__(self, domain: TokenSet, reference: TokenSet, timeout: float) -> None:
        self._settings = domain, reference, timeout

    def read(self, block: list[Target]) -> Any:
        """What came of each checkpoint of a block; bytes and requests of all."""
        return read_block(block, *self._settings)

    def read_controls(self, block: ControlWork) -> Any:
        """What came of the controls of each; bytes and requests of all."""
        return read_control_block(block, *self._settings)
