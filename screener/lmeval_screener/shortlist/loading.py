"""lm-eval's arguments for loading a checkpoint: for an adapter, with its base."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmeval_screener.checkpoints.concurrency import run
from lmeval_screener.checkpoints.hub import Hub
from lmeval_screener.checkpoints.snapshot import Snapshot
from lmeval_screener.checkpoints.source import Sources
from lmeval_screener.errors import ScreeningError
from lmeval_screener.formats import TOKENIZER_FILES
from lmeval_screener.reading import adapter_in
from lmeval_screener.targets.names import REPOSITORY, Base, Target

_SECONDS = 20.0  # to open one checkpoint


def with_base(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model arguments with which lm-eval loads a checkpoint.

    For an adapter in ``pretrained`` these are the arguments of its base, with the adapter as
    ``peft``. For other checkpoints, or with ``peft`` or ``gguf_file``, ``arguments`` are unchanged.

    Args:
        arguments: lm-eval's ``model_args``.

    Raises:
        ScreeningError: An error of :func:`on_base`.
    """
    given = dict(arguments)
    place = str(given.get("pretrained", ""))
    is_local = Path(place).is_dir()
    is_place = is_local or REPOSITORY.fullmatch(place)
    if not is_place or "peft" in given or "gguf_file" in given:
        return given
    revision = given.get("revision")
    target = on_base(Target(place, revision and str(revision), local=is_local))
    if target.on is None:
        return given
    given.pop("pretrained")
    given.pop("revision", None)
    return target.arguments() | given


def on_base(target: Target) -> Target:
    """Return an adapter's target with its commit and its base.

    The target of a whole model, or of a repository that cannot be read, is returned unchanged.

    Raises:
        ScreeningError: The adapter names no usable base (AdapterOnly), its configuration is broken
            (BadConfig), or its folder cannot be read.
    """
    if target.local and not Path(target.repo, "adapter_config.json").is_file():
        return target
    for offline in (None, True):  # where the Hub cannot be reached, what was downloaded
        try:
            return run(_on_base(target, offline))
        except ScreeningError as error:
            if target.local or error.code in ("AdapterOnly", "BadConfig"):
                raise
    return target


async def _on_base(target: Target, offline: bool | None) -> Target:
    async with Hub(offline=offline) as hub:
        sources = Sources(hub)

        async def opened(place: Target) -> Snapshot:
            account = hub.account.part(_SECONDS)
            return await account.bounded(sources.snapshot(place, account))

        snapshot = await opened(target)
        adapted = await adapter_in(snapshot, target)
        if adapted is None:
            return target
        _, at = adapted
        if at.refused is not None:
            raise ScreeningError(*at.refused)
        with contextlib.suppress(ScreeningError):  # loading it says why
            base = await opened(at)
            at = replace(at, repo=at.repo if at.local else base.repo, revision=base.revision)
    has_tokenizer = any(name in snapshot.files for name in (*TOKENIZER_FILES, "tokenizer.model"))
    shared = not has_tokenizer or "tokenizer_config.json" not in snapshot.files
    return replace(target, revision=snapshot.revision, on=Base(at.place, at.revision, shared))
