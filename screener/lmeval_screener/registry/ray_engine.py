"""``--engine ray``: the same screening over a cluster, for storages whose limit is the machine.

Blocks of checkpoints go to a few actors, which read them as a process of its own would; at most two blocks
wait at each, so that nothing piles up. What comes back is kept by one writer, the process that started it.
An actor that is lost costs the blocks that it had: another reads them once more.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from lmeval_dispersion.errors import MissingExtraError, UsageError
from lmeval_screener.errors import ScreeningError
from lmeval_screener.ranking.measured import Measured
from lmeval_screener.screening import read_block
from lmeval_screener.targets.target import Target
from lmeval_screener.tokens.sets import TokenSet

_BLOCK = 100  # checkpoints
_WAITING = 2  # blocks at an actor
_TRIES = 2

#: Called for each checkpoint that ended: its place, what came of it, its identity and state.
Came = Callable[[int, Measured | ScreeningError, str, str], None]


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

    Args:
        domain: T.
        reference: R.
        timeout: Seconds for one checkpoint.
        block: Checkpoints that are given away at once.
    """

    def __init__(self, domain: TokenSet, reference: TokenSet, timeout: float, *, block: int = _BLOCK) -> None:
        self._sets, self._timeout, self._block = (domain, reference), timeout, block
        self._stopped = False
        #: Bytes and requests of all workers together.
        self.bytes_read = self.requests = 0

    def stop(self) -> None:
        """Wait for nothing any more; what was not read is not told of."""
        self._stopped = True

    def read(self, targets: Sequence[Target], came: Came) -> None:
        """Read checkpoints; ``came`` is called in this thread, as blocks come back."""
        import ray

        started = not ray.is_initialized()
        if started:
            address = os.environ.get("RAY_ADDRESS")
            ray.init(address=address, log_to_driver=False, logging_level="error", configure_logging=False)
        try:
            self._read(ray, targets, came)
        finally:
            if started:
                ray.shutdown()

    def _read(self, ray: Any, targets: Sequence[Target], came: Came) -> None:
        places = list(range(len(targets)))
        # Small lists are dealt out to all.
        count = max(1, int(ray.cluster_resources().get("CPU", 1)))
        size = max(1, min(self._block, -(-len(places) // count)))
        blocks = deque((places[at : at + size], 1) for at in range(0, len(places), size))
        worker = ray.remote(num_cpus=1, max_restarts=0)(_Worker)
        actors = [worker.remote(*self._sets, self._timeout) for _ in range(min(count, len(blocks)))]
        load = dict.fromkeys(range(len(actors)), 0)  # of those that live
        running: dict[Any, tuple[int, list[int], int]] = {}
        while (blocks or running) and not self._stopped:
            for at in sorted(load, key=lambda at: load[at]):
                while blocks and load[at] < _WAITING:
                    block, tries = blocks.popleft()
                    reference = actors[at].read.remote([targets[place] for place in block])
                    running[reference] = at, block, tries
                    load[at] += 1
            done, _ = ray.wait(list(running), num_returns=1, timeout=0.5)
            for reference in done:
                at, block, tries = running.pop(reference)
                if at in load:
                    load[at] -= 1
                try:
                    found, bytes_read, requests = ray.get(reference)
                except ray.exceptions.RayError as error:
                    if isinstance(error, ray.exceptions.RayActorError):
                        # The others take its blocks: its place may be gone with its machine.
                        load.pop(at, None)
                        if not load:
                            actors.append(worker.remote(*self._sets, self._timeout))
                            load[len(actors) - 1] = 0
                    if tries < _TRIES:
                        blocks.append((block, tries + 1))
                        continue
                    lost = f"its workers were lost ({type(error).__name__}); run the same command again"
                    for place in block:
                        came(place, ScreeningError("Interrupted", lost), "", "")
                    continue
                self.bytes_read += bytes_read
                self.requests += requests
                for place, (outcome, identity, state) in zip(block, found, strict=True):
                    came(
                        place,
                        outcome if isinstance(outcome, Measured) else ScreeningError(*outcome),
                        identity,
                        state,
                    )


class _Worker:
    """One actor."""

    def __init__(self, domain: TokenSet, reference: TokenSet, timeout: float) -> None:
        self._domain, self._reference, self._timeout = domain, reference, timeout

    def read(self, block: list[Target]) -> Any:
        """What came of each checkpoint of a block, with its identity and state; bytes and requests of all."""
        return read_block(block, self._domain, self._reference, self._timeout)
