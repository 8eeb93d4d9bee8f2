"""One checkpoint: which tensor, which rows, which gap."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lmeval_dispersion.errors import GeometryError
from lmeval_dispersion.geometry import Metric
from lmeval_screener.checkpoints.http import Budget
from lmeval_screener.checkpoints.hub import Hub
from lmeval_screener.checkpoints.snapshot import Meter, Snapshot
from lmeval_screener.checkpoints.source import Sources
from lmeval_screener.errors import ScreeningError, printable
from lmeval_screener.ranking.controls import CONTROLS, POOL, Controls, controls, random_ids
from lmeval_screener.ranking.gap import Gap, gaps
from lmeval_screener.ranking.measured import Gaps, Measured
from lmeval_screener.targets.names import REPOSITORY
from lmeval_screener.targets.target import Target, parse_target
from lmeval_screener.tokens.cache import ResolutionCache
from lmeval_screener.tokens.resolution import Resolution, resolve
from lmeval_screener.tokens.sets import TokenSet
from lmeval_screener.tokens.vocabulary import TOKENIZER_FILES, Vocabulary
from lmeval_screener.weights.adapters import Adapter, adapted_projection, is_adapter, read_adapter
from lmeval_screener.weights.gguf import choose_files, read_gguf, read_vocabulary
from lmeval_screener.weights.projection import (
    OutputProjection,
    find_projection,
    read_rows,
    read_rows_and_norm,
)
from lmeval_screener.weights.rows import PiecedRows
from lmeval_screener.weights.slices import sliced
from lmeval_screener.weights.tensors import row_bytes

#: Bytes of sampled rows; what lies between them and the final norm's weight comes on top, within 1 MB.
_SAMPLE_BYTES = 750_000
_SMALLEST_SAMPLE = 8
#: Bytes of rows of random tokens that lie in T's range of ids.
_RANDOM_BYTES = 150_000


@dataclass(frozen=True, eq=False)
class Reading:
    """What was read of one checkpoint, before it is known which others it may be compared with.

    Attributes:
        target: What was asked for.
        snapshot: Where it was read.
        projection: The matrix.
        tokenizer: Digest of the tokenizer's file.
        resolution: The rows of T and R in that tokenizer.
        gaps: The gap in every metric.
        seconds: From the first request to the last row.
        budget: The time that it may take.
        base: Where the base of an adapter was read; None for other checkpoints.
    """

    target: Target
    snapshot: Snapshot
    projection: OutputProjection
    tokenizer: str
    resolution: Resolution
    gaps: dict[Metric, Gap]
    seconds: float
    budget: Budget
    base: Snapshot | None = None

    @property
    def bytes_read(self) -> int:
        """Bytes that travelled for it, those of an adapter's base included."""
        return self.snapshot.meter.bytes_read + (self.base.meter.bytes_read if self.base else 0)

    @property
    def requests(self) -> int:
        """Requests likewise."""
        return self.snapshot.meter.requests + (self.base.meter.requests if self.base else 0)

    def measured(self) -> Measured:
        """What is kept of it: all but the snapshot and the header."""
        snapshot, projection = self.snapshot, self.projection
        return Measured(
            target=self.target,
            repo=printable(snapshot.repo),
            revision=snapshot.revision,
            tensor=projection.name,
            file=projection.file,
            dtype=projection.dtype,
            shape=projection.shape,
            tied=projection.tied,
            parameters=projection.parameters,
            tokenizer=self.tokenizer,
            resolution=self.resolution,
            gaps=Gaps.of(self.gaps),
            warnings=tuple(projection.warnings),
            bytes_read=self.bytes_read,
            requests=self.requests,
            seconds=self.seconds,
        )


#: What is known of a checkpoint as it was opened, an adapter with its base, so that it need not be read; None
#: for nothing.
Known = Callable[[Target, Snapshot, Snapshot | None], Measured | None]


class Reader:
    """Reads checkpoints for one pair of token sets; resolutions are shared by checkpoints of one tokenizer.

    Args:
        hub: Where repositories are read; its connections and cache serve other places too.
        domain: T.
        reference: R.
        cache: Where resolutions are kept between runs.
        known: Asked for every checkpoint that was opened; may raise a `ScreeningError` that is known too.

    Attributes:
        meters: What travelled for each checkpoint that was opened.
        reached: Whether any repository was.
        side_by_side: Checkpoints to read at once: their requests share one pool of connections.
    """

    side_by_side = 16

    def __init__(
        self,
        hub: Hub,
        domain: TokenSet,
        reference: TokenSet,
        cache: ResolutionCache,
        known: Known | None = None,
    ) -> None:
        self.meters: list[Meter] = []
        self.reached = False
        self._known = known
        self.sources = Sources(hub)
        self._domain, self._reference, self._cache = domain, reference, cache
        self._resolutions: dict[str, Resolution] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def read(
        self, target: Target, budget: Budget, *, over: Resolution | None = None
    ) -> Reading | Measured:
        """Read one checkpoint within a time budget; what is known of it instead, where that is enough.

        Args:
            target: The checkpoint.
            budget: Its time.
            over: Tokens of another tokenizer that agrees with its own on them; None for its own.

        Raises:
            ScreeningError: With a stable word for whatever is wrong with it.
        """
        return await budget.bounded(self._read(target, budget, over))

    async def _read(self, target: Target, budget: Budget, over: Resolution | None) -> Reading | Measured:
        start = time.perf_counter()
        if target.refused is not None:
            raise ScreeningError(*target.refused)
        snapshot, adapter, base, known = await self._opened(target, budget, ask=over is None)
        if known is not None:
            return known
        if adapter is not None and base is not None:
            projection = await adapted_projection(adapter, base)
            holder = snapshot if any(name in snapshot.files for name in TOKENIZER_FILES) else base
            file, digest = _tokenizer(holder)
            resolution = over or await self._resolution(digest, lambda: _vocabulary(holder, file))
        elif _is_gguf(snapshot, target):
            model = await read_gguf(snapshot, choose_files(list(snapshot.files), target.file, snapshot.repo))
            projection, digest = model.projection, model.tokenizer
            resolution = over or await self._resolution(digest, lambda: read_vocabulary(model))
        else:
            if not any(name in snapshot.files for name in TOKENIZER_FILES):
                # An adapter comes without a tokenizer too: then that is what to say.
                await find_projection(snapshot)
            file, digest = _tokenizer(snapshot)
            if over is not None:
                projection, resolution = await find_projection(snapshot), over
            else:
                projection, resolution = await _both(
                    find_projection(snapshot),
                    self._resolution(digest, lambda: _vocabulary(snapshot, file)),
                )
        gaps = await _read_gaps(projection, resolution)
        seconds = time.perf_counter() - start
        return Reading(target, snapshot, projection, digest, resolution, gaps, seconds, budget, base=base)

    async def _opened(
        self, target: Target, budget: Budget, *, ask: bool
    ) -> tuple[Snapshot, Adapter | None, Snapshot | None, Measured | None]:
        """A checkpoint, an adapter with its base, and what is known of it if that is asked."""
        snapshot = await self._open(target, budget)
        adapter = await read_adapter(snapshot) if target.file is None and is_adapter(snapshot) else None
        base = await self._open(_base_target(adapter, target), budget) if adapter else None
        known = self._known(target, snapshot, base) if ask and self._known is not None else None
        return snapshot, adapter, base, known

    async def _open(self, target: Target, budget: Budget) -> Snapshot:
        snapshot = await self.sources.snapshot(target, budget)
        self.meters.append(snapshot.meter)
        self.reached |= snapshot.revision is not None
        return snapshot

    def close(self) -> None:
        """End what reads elsewhere: nothing here."""

    async def _resolution(self, digest: str, vocabulary: Callable[[], Awaitable[Vocabulary]]) -> Resolution:
        """By the tokenizer's hash where it is known, else from its vocabulary, which is read once for all."""
        # One lock a tokenizer, not one shared task: where the repository that came first fails, the next one
        # tries for itself.
        async with self._locks.setdefault(digest, asyncio.Lock()):
            if digest not in self._resolutions:
                known = self._cache.find(digest, self._domain, self._reference)
                if known is None:
                    known = resolve(self._domain, self._reference, await vocabulary())
                    self._cache.put(digest, self._domain, self._reference, known)
                self._resolutions[digest] = known
            return self._resolutions[digest]


@dataclass(frozen=True)
class ControlRows:
    """Rows that the controls of a checkpoint are made of, beside those of T and R.

    Attributes:
        sample: Ids of a sample of the whole matrix.
        most: Random tokens that may be read beside them.
    """

    sample: tuple[int, ...]
    most: int

    def key(self, resolution: Resolution) -> str:
        """What tells the controls of one commit apart: a digest of all that picks their rows."""
        domain, reference = resolution.domain_ids, resolution.reference_ids
        # No more are ever read, so a larger limit picks the same.
        most = min(self.most, POOL * len(domain))
        picked = [CONTROLS, self.sample, most, resolution.vocabulary, domain, reference]
        return hashlib.sha256(json.dumps(picked).encode()).hexdigest()[:32]


def control_rows(found: Sequence[tuple[Measured, Measured]]) -> list[ControlRows]:
    """The rows of each checkpoint's controls: at most 1 MB more for each.

    Args:
        found: Each with the one of its common tokenizer, whose sample of rows is taken for all.
    """
    # One size of the sample for all of a width, or the means would differ by that alone.
    wide: dict[tuple[str, int], int] = {}
    for one, common in found:
        key = common.tokenizer, one.shape[1]
        wide[key] = max(wide.get(key, 0), row_bytes(one.dtype, one.shape[1]))
    samples = {common.tokenizer: common.resolution.sample for _, common in found}
    rows = {
        (tokenizer, width): ControlRows(samples[tokenizer][: _SAMPLE_BYTES // size], _RANDOM_BYTES // size)
        for (tokenizer, width), size in wide.items()
    }
    return [rows[common.tokenizer, one.shape[1]] for one, common in found]


async def read_controls(reading: Reading, rows: ControlRows) -> Controls:
    """The gauge controls of a checkpoint that was read, in what is left of its time.

    Raises:
        ScreeningError: They cannot be read; that costs no checkpoint its rank.
    """
    try:
        return await reading.budget.bounded(_read_controls(reading, rows.sample, rows.most))
    except GeometryError as error:
        raise ScreeningError("BadRows", str(error)) from error


async def _read_controls(reading: Reading, sample: Sequence[int], most: int) -> Controls:
    projection, resolution = reading.projection, reading.resolution
    rows = projection.shape[0]
    if len(sample) < _SMALLEST_SAMPLE or max(sample) >= rows:
        raise ScreeningError(
            "BadRows", f"a sample of rows cannot be taken from {projection.name} of {rows} rows"
        )
    domain, reference = resolution.domain_ids, resolution.reference_ids
    taken = [*domain, *reference]
    # Padding is no token, and the same ids serve every checkpoint of the tokenizer.
    near, others = random_ids(domain, taken, sample, min(rows, resolution.vocabulary), most)
    _, norm = await read_rows_and_norm(projection, taken)
    matrix = await read_rows(projection, [*taken, *sample, *others], directions=False)
    t, r, s, o = np.split(matrix, np.cumsum([len(domain), len(reference), len(sample)]))
    at = {i: place for place, i in enumerate(sample)}
    known = norm.reason if norm.weight is None else norm
    return controls(t, r, s, known, np.concatenate([s[[at[i] for i in near]], o]))


async def _read_gaps(projection: OutputProjection, resolution: Resolution) -> dict[Metric, Gap]:
    ids = [*resolution.domain_ids, *resolution.reference_ids]
    split, rows = len(resolution.domain_ids), projection.shape[0]
    if max(ids) >= rows:
        raise ScreeningError(
            "TokenizerMismatch",
            f"cannot be screened because its tokenizer names row {max(ids)} and {projection.name} has "
            f"{rows}; tokenizer and weights do not belong together",
        )
    if isinstance(projection.rows, PiecedRows) and rows < resolution.vocabulary:
        raise sliced(
            projection.name, f"its {rows} rows are fewer than the tokenizer's {resolution.vocabulary}"
        )
    matrix = await read_rows(projection, ids)
    try:
        return gaps(matrix[:split], matrix[split:])
    except GeometryError as error:
        raise ScreeningError(
            "BadRows", f"cannot be screened because of {projection.name}: {error}"
        ) from error


async def _both(
    first: Coroutine[Any, Any, OutputProjection], second: Coroutine[Any, Any, Resolution]
) -> tuple[OutputProjection, Resolution]:
    """Both side by side; when one fails the other is stopped, not left running behind."""
    tasks = asyncio.create_task(first), asyncio.create_task(second)
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return tasks[0].result(), tasks[1].result()


def _is_gguf(snapshot: Snapshot, target: Target) -> bool:
    """Whether a GGUF file is meant: it was named, or there are no other weights that can be read."""
    if target.file is not None:
        return True
    others = (".safetensors", ".bin")
    names = list(snapshot.files)
    return any(n.endswith(".gguf") for n in names) and not any(n.endswith(others) for n in names)


def _base_target(adapter: Adapter, target: Target) -> Target:
    """Where the base of an adapter is read: a folder only for an adapter that is in a folder itself.

    Raises:
        ScreeningError: ``AdapterOnly`` where a repository names a path of the machine that trained it.
    """
    base = parse_target(adapter.base)
    if target.local and base.refused is None:
        return replace(base, revision=adapter.revision or base.revision) if not base.local else base
    if not REPOSITORY.fullmatch(adapter.base):
        raise ScreeningError(
            "AdapterOnly",
            f"cannot be screened because its base is {adapter.base!r}, a path on the machine that trained "
            "the adapter; write the base's repository into adapter_config.json, or merge the adapter and "
            "screen the result",
        )
    return Target(adapter.base, adapter.revision)


async def _vocabulary(snapshot: Snapshot, file: str) -> Vocabulary:
    return Vocabulary.from_file(file, await snapshot.small_file(file))


def _tokenizer(snapshot: Snapshot) -> tuple[str, str]:
    """Name and digest of the file that has the vocabulary."""
    for name in TOKENIZER_FILES:
        if name in snapshot.files:
            # Without a hash, only the very file is known to be itself.
            return name, snapshot.files[name].digest or f"{snapshot.repo}@{snapshot.revision}:{name}"
    raise ScreeningError(
        "TokenizerNotFound",
        f"cannot be screened because it has no {' or '.join(TOKENIZER_FILES)}, which tells the tokens' rows; "
        "name another place of it with --tokenizer, or save it with "
        "`AutoTokenizer.from_pretrained(...).save_pretrained(...)` and screen that folder",
    )
