"""Reads one checkpoint: rows of its output projection, from which G and the ratio are computed."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from lmeval_dispersion.errors import GeometryError, printable
from lmeval_dispersion.geometry import Metric
from lmeval_screener.checkpoints.account import Account
from lmeval_screener.checkpoints.concurrency import in_loop, lock, side_by_side
from lmeval_screener.checkpoints.snapshot import Snapshot
from lmeval_screener.checkpoints.source import Sources
from lmeval_screener.errors import NOT_OF_WEIGHTS, BaseError, ScreeningError, UnreadBaseError
from lmeval_screener.figures import Gap, Ratio, gaps, ratio
from lmeval_screener.formats import GGUF, TOKENIZER_FILES, own_weights, tokenizer_in
from lmeval_screener.screened import Reading
from lmeval_screener.targets.layouts import SAVE_TOKENIZER, layout_of
from lmeval_screener.targets.names import REPOSITORY, Target, label, parse_target
from lmeval_screener.tokens.resolution import RESOLUTIONS, Resolution, resolve_tokens
from lmeval_screener.tokens.sets import TokenSet
from lmeval_screener.tokens.vocabulary import Vocabulary
from lmeval_screener.weights.body import MOST, digest_of, read_body, weights_in
from lmeval_screener.weights.copies import sketch
from lmeval_screener.weights.projection import OutputProjection, find_projection, read_rows_and_norm
from lmeval_screener.weights.rows import PiecedRows, sliced_error

if TYPE_CHECKING:
    import asyncio

    from lmeval_screener.checkpoints.hub import Hub
    from lmeval_screener.weights.adapters.adapter import Adapter

#: Returns the known reading of an opened checkpoint (an adapter with its base), or None.
Known = Callable[[Target, Snapshot, Snapshot | None], Reading | None]


@dataclass(frozen=True)
class _Opened:
    """An opened checkpoint, and how its output projection is found."""

    target: Target
    snapshot: Snapshot
    find: Callable[[], Awaitable[OutputProjection]]
    named: str  # its base's ``place``; empty for none
    adapter: Adapter | None = None
    base: Snapshot | None = None  # an adapter's, if it is not in the same folder


class Reader:
    """Reads checkpoints for one pair of token sets.

    Checkpoints with the same tokenizer share its `Resolution`, which maps the sets' words to rows.

    Attributes:
        reached: Event that is set once the Hub has answered; None without a connection to the Hub.
        sources: Opens checkpoints, wherever they are stored.
        account: Counts the bytes and requests of the whole run.

    Args:
        hub: Connection to the Hub; None if every checkpoint is a folder.
        domain: The words of the domain, whose tokens are T.
        reference: The everyday words, whose tokens are R.
        known: Called with every opened checkpoint. It returns the reading that a registry has kept,
            raises the ScreeningError that it has kept, or returns None for a new checkpoint.
    """

    def __init__(
        self,
        hub: Hub | None,
        domain: TokenSet,
        reference: TokenSet,
        known: Known | None = None,
    ) -> None:
        self.reached: asyncio.Event | None = None  # set once the Hub answered
        if hub is not None:
            import asyncio

            self.reached = asyncio.Event()
        self._known = known
        self.sources = Sources(hub)
        self._domain = domain
        self._reference = reference
        self.account = Account() if hub is None else hub.account  # the whole run's account
        self._resolutions: dict[str, Resolution] = {}
        self._locks: dict[str, AbstractAsyncContextManager[object]] = {}
        # Those of adapters, and why one cannot be opened.
        self._bases: dict[Target, ScreeningError | None] = {}

    async def read(
        self, target: Target, account: Account, *, over: Resolution | None = None
    ) -> Reading:
        """Read the needed rows of a checkpoint and compute its figures.

        Args:
            target: The checkpoint.
            account: Counts the checkpoint's bytes and requests, and limits its time.
            over: The tokens whose rows are read, as resolved by another tokenizer. Default: by the
                checkpoint's own.

        Raises:
            ScreeningError: The checkpoint cannot be screened.
        """
        return await account.bounded(self._read(target, account, over))

    async def body(self, target: Target, account: Account) -> bytes:
        """Return a summary of the weights before the final norm, by which copies are recognised.

        Of a remote checkpoint at most `MOST` tensors are read; see `read_body`.

        Raises:
            ScreeningError: The files cannot be read.
        """
        snapshot = await account.bounded(self._open(target, account))
        most = None if snapshot.is_local else MOST
        if _is_gguf(snapshot, target):
            paths = list(await _gguf_files(snapshot, target))
        else:
            paths = await account.bounded(weights_in(snapshot))
        adapter = await account.bounded(adapter_on_weights(snapshot, target))
        if adapter is not None and not adapter.nothing:
            paths.append(adapter.file)
        return await account.bounded(read_body(snapshot, paths, most))

    async def _read(self, target: Target, account: Account, over: Resolution | None) -> Reading:
        start = time.perf_counter()
        if target.refused is not None:
            raise ScreeningError(*target.refused)
        snapshot = await self._open(target, account)
        opened = await self._with_adapter(target, snapshot, account)
        base = opened.base
        if over is None and self._known is not None:
            known = self._known(target, snapshot, base)
            if known is not None:
                return replace(known, base=opened.named)
        try:
            return await self._reading(opened, account, over, start)
        except ScreeningError as error:
            of_base = isinstance(error, BaseError) or error.code in NOT_OF_WEIGHTS
            if of_base and base is not None and opened.adapter is not None:
                raise _unread(opened.adapter, error.code, str(error)) from error
            raise

    async def _with_adapter(self, target: Target, snapshot: Snapshot, account: Account) -> _Opened:
        """An opened checkpoint, and if it is an adapter, with its base."""
        adapter = await adapter_on_weights(snapshot, target)
        base = None
        named = snapshot.base
        if adapter is None:
            adapted = await adapter_in(snapshot, target)
            if adapted is None:
                return _Opened(target, snapshot, partial(find_projection, snapshot), named)
            adapter, at = adapted
            base = await self._base_of(adapter, at, account)
            named = at.place if at.local else label(base.repo, at.revision)
        from lmeval_screener.weights.adapters.adapter import adapted_projection

        find = partial(adapted_projection, adapter, base or snapshot)
        return _Opened(target, snapshot, find, named, adapter, base)

    async def _reading(
        self, opened: _Opened, account: Account, over: Resolution | None, start: float
    ) -> Reading:
        target = opened.target
        snapshot = opened.snapshot
        if opened.base is None and _is_gguf(snapshot, target):
            from lmeval_screener.weights.files.gguf import read_gguf

            model = await read_gguf(snapshot, await _gguf_files(snapshot, target))
            projection = model.projection
            digest = model.tokenizer
            resolution = await self._resolution(digest, model.vocabulary, over)
        else:
            holder = (
                snapshot if opened.base is None or tokenizer_in(snapshot.files) else opened.base
            )
            if tokenizer_in(holder.files) is None:
                await opened.find()  # without weights, that is the error to raise
            file, digest = await _tokenizer(holder)
            projection, resolution = await side_by_side(
                [
                    opened.find(),
                    self._resolution(digest, lambda: _vocabulary(holder, file), over),
                ]
            )
        gaps, ratio, no_ratio, sketch = await _read_figures(projection, resolution)
        return Reading(
            target=target,
            repo=printable(snapshot.repo),
            revision=snapshot.revision,
            tensor=projection.name,
            file=projection.file,
            dtype=projection.dtype,
            shape=projection.shape,
            tied=projection.tied,
            parameters=projection.parameters,
            tokenizer=digest,
            resolution=resolution,
            gaps=gaps,
            warnings=tuple(projection.warnings),
            bytes_read=account.bytes_read,
            requests=account.requests,
            seconds=time.perf_counter() - start,
            ratio=ratio,
            no_ratio=no_ratio,
            sketch=sketch,
            base=opened.named,
            body=await self._body_in_brief(snapshot, opened, projection.files),
        )

    async def _body_in_brief(
        self, snapshot: Snapshot, opened: _Opened, files: Sequence[str]
    ) -> bytes:
        """Return the body of a local checkpoint for a registry; otherwise the digest of its files.

        ``files`` are the model's; an adapter's file is added to them.
        """
        paths = list(files)
        adapter = opened.adapter
        if adapter is not None and opened.base is not None:
            paths = [adapter.file]
        elif adapter is not None and not adapter.nothing:
            paths.append(adapter.file)
        # A registry compares bodies with those of later runs.
        if self._known is not None and snapshot.is_local:
            return await read_body(snapshot, paths)
        return digest_of(snapshot, paths)

    async def _base_of(self, adapter: Adapter, at: Target, account: Account) -> Snapshot:
        """Open an adapter's base; one that cannot be opened is tried once for all its adapters.

        Raises:
            ScreeningError: `_unread` of the failure.
        """
        async with self._locks.setdefault(f"base {at.place}@{at.revision}", lock()):
            failure = self._bases.get(at)
            if at not in self._bases:
                try:
                    base = await self._opened_in_half(at, account)
                except ScreeningError as error:
                    failure = error
                self._bases[at] = failure
                if failure is None:
                    return base
        if failure is None:
            return await self._open(at, account)
        # The base is missing, not the checkpoint.
        code = "BaseNotFound" if failure.code.endswith("NotFound") else failure.code
        start = "" if at.refused else "the base of the adapter: "
        raise _unread(adapter, code, str(failure), start) from failure

    async def _opened_in_half(self, at: Target, account: Account) -> Snapshot:
        """Open an adapter's base within half of the adapter's time: others wait for the answer."""
        if at.refused is not None:
            raise ScreeningError(*at.refused)
        if not in_loop():
            return await self._open(at, account)
        import asyncio

        seconds = account.remaining / 2
        limit = None if math.isinf(seconds) else seconds
        try:
            return await asyncio.wait_for(self._open(at, account), limit)
        except asyncio.TimeoutError:
            raise account.trouble or ScreeningError(
                "Timeout",
                f"the base model was not opened within {seconds:.0f} s; try again, or set "
                "DISPERSION_TIMEOUT to a larger number of seconds",
            ) from None

    async def _open(self, target: Target, account: Account) -> Snapshot:
        snapshot = await self.sources.snapshot(target, account)
        if snapshot.revision is not None and self.reached is not None:
            self.reached.set()
        return snapshot

    async def _resolution(
        self, digest: str, vocabulary: Callable[[], Awaitable[Vocabulary]], over: Resolution | None
    ) -> Resolution:
        """The rows of T and R, kept by the tokenizer's hash; its vocabulary is read once."""
        if over is not None:
            return over
        # One lock a tokenizer, not one shared task: if the first repository fails, the next
        # tries for itself.
        async with self._locks.setdefault(digest, lock()):
            if digest in self._resolutions:
                return self._resolutions[digest]
            key = f"{RESOLUTIONS} {digest} {self._domain.digest} {self._reference.digest}"
            kept = self.account.cache.read("tokens", key)
            if kept is not None:
                resolution = Resolution.from_json(kept)
            else:
                resolution = resolve_tokens(self._domain, self._reference, await vocabulary())
                self.account.cache.write("tokens", key, resolution.to_json().encode())
            self._resolutions[digest] = resolution
            return resolution


async def _read_figures(
    projection: OutputProjection, resolution: Resolution
) -> tuple[dict[Metric, Gap], Ratio | None, str, bytes]:
    """G in every metric, the ratio, why it is missing, and the sketch that identifies copies."""
    of_ratio = [token.id for token in resolution.of_ratio]
    # Answers come last: without any of their own, the rows are T's and R's alone.
    ids = list(dict.fromkeys([*resolution.domain_ids, *resolution.reference_ids, *of_ratio]))
    split = len(resolution.domain_ids)
    rows = projection.shape[0]
    if max(ids) >= rows:
        raise ScreeningError(
            "TokenizerMismatch",
            f"cannot be screened because its tokenizer has a token with id {max(ids)}, but "
            f"{projection.name} has only {rows} rows; save the tokenizer that belongs to these "
            "weights with them",
        )
    if isinstance(projection.rows, PiecedRows) and rows < resolution.vocabulary:
        raise sliced_error(
            projection.name,
            f"its {rows} rows are fewer than the {resolution.vocabulary} tokens of the tokenizer",
        )
    matrix, norm = await read_rows_and_norm(projection, ids)
    domain = matrix[:split]
    reference = matrix[split : split + len(resolution.reference_ids)]
    answers = matrix[[ids.index(row) for row in of_ratio]]
    try:
        if norm.weight is None:
            return gaps(domain, reference), None, norm.reason, b""
        found = ratio(answers, reference, norm, projection.dtype)
        return gaps(domain, reference), found, "", sketch(matrix, norm, projection.dtype)
    except GeometryError as error:
        raise ScreeningError(
            "BadRows",
            f"cannot be screened because rows of {projection.name} cannot be compared: {error}; "
            "screen another checkpoint",
        ) from error


def _is_gguf(snapshot: Snapshot, target: Target) -> bool:
    """Whether to read a GGUF file: it was named, or no other weights can be read."""
    if target.file is not None:
        return True
    has_blocks = any(path.endswith(GGUF.suffix) for path in snapshot.files)
    return has_blocks and not own_weights(snapshot.files)


async def _gguf_files(snapshot: Snapshot, target: Target) -> tuple[str, ...]:
    """The GGUF file that the target names, or the only one of a model, in its parts."""
    from lmeval_screener.weights.files.gguf import choose_files, models_among

    files = list(snapshot.files) if target.file is not None else await models_among(snapshot)
    return choose_files(files, target.file, snapshot.repo)


async def adapter_in(snapshot: Snapshot, target: Target) -> tuple[Adapter, Target] | None:
    """Return the adapter in a snapshot and the target of its base.

    None if there is no adapter, or if the target names a single file. In a folder, an adapter next
    to a whole model does not count: that model is its base (`adapter_on_weights`). In a repository
    of the Hub it counts, as transformers then loads the base that the adapter names.

    Raises:
        ScreeningError: The adapter's files are broken.
    """
    if target.file is not None or "adapter_config.json" not in snapshot.files:
        return None
    from lmeval_screener.weights.adapters.adapter import holds_adapter, is_adapter, read_adapter

    counts = holds_adapter if target.on_hub else is_adapter
    if not counts(snapshot):
        return None
    adapter = await read_adapter(snapshot)
    return adapter, _base_target(adapter, target)


async def adapter_on_weights(snapshot: Snapshot, target: Target) -> Adapter | None:
    """Return the adapter that transformers puts on the model in the same folder.

    None if the folder does not hold both an adapter and a whole model, or if the target is a single
    file or a repository of the Hub.

    Raises:
        ScreeningError: transformers cannot load such a folder, or the adapter's files are broken.
    """
    if target.file is not None or target.on_hub or "adapter_config.json" not in snapshot.files:
        return None
    from lmeval_screener.weights.adapters.adapter import holds_both, read_adapter

    return await read_adapter(snapshot, has_base=True) if holds_both(snapshot) else None


def _base_target(adapter: Adapter, target: Target) -> Target:
    """The target of an adapter's base; a folder only for an adapter that is in a folder itself."""
    base = parse_target(adapter.base)
    if target.local and base.refused is None:
        if base.local:
            return base
        return replace(base, revision=adapter.revision or base.revision, by_file=True)
    if REPOSITORY.fullmatch(adapter.base):
        return Target(adapter.base, adapter.revision)
    why = f"its base is {adapter.base!r}, a path on the machine that trained the adapter"
    step = (
        "write the base's repository into adapter_config.json, or merge the adapter into its base"
    )
    if target.local:
        why += f", or a path relative to another folder than {os.getcwd()}"
        step = (
            "run the command in the folder to which the path is relative, write the base's "
            "repository or folder into adapter_config.json (base_model_name_or_path), or merge the "
            "adapter into its base"
        )
    return Target(adapter.base, refused=("AdapterOnly", f"{why}; {step}"))


def _unread(adapter: Adapter, code: str, why: str, start: str = "") -> ScreeningError:
    """Return the error for an adapter whose base cannot be read because of ``why``.

    It is ``RowsOfBase`` if the adapter's names alone show that it keeps its base's output
    projection. Otherwise ``start`` stands before ``why``.
    """
    if not adapter.leaves_head:
        return ScreeningError(code, f"{start}{why}")
    if adapter.nothing:
        rows = f"the adapter changes nothing ({adapter.nothing}), so its rows are those of its base"
    else:
        rows = "the names of the adapter's tensors show that it keeps the output rows of its base"
    return UnreadBaseError(rows, adapter.label, why)


async def _vocabulary(snapshot: Snapshot, file: str) -> Vocabulary:
    return Vocabulary.from_file(file, await snapshot.small_file(file))


async def _tokenizer(snapshot: Snapshot) -> tuple[str, str]:
    """Name and digest of the vocabulary file."""
    name = tokenizer_in(snapshot.files)
    if name is None:
        raise _no_tokenizer(snapshot)
    digest = (await snapshot.look_up(name)).digest
    if digest is None:
        # A file without a version may change: only its content identifies it.
        digest = f"sha256:{hashlib.sha256(await snapshot.small_file(name)).hexdigest()}"
    return name, digest


def _no_tokenizer(snapshot: Snapshot) -> ScreeningError:
    """The error for a checkpoint without a tokenizer whose rows can be looked up."""
    reason = f"it has no {' or '.join(TOKENIZER_FILES)} to find the rows of its tokens"
    step = SAVE_TOKENIZER
    known = layout_of(snapshot.files, snapshot.repo, "tokenizers")
    if known is not None:
        _, reason, step = known
    return ScreeningError(
        "TokenizerNotFound",
        f"cannot be screened because {reason}; name a tokenizer (`--tokenizer NAME`), or {step}",
    )
