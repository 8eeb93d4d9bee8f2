"""Opening checkpoints: folders, repositories, and a `Source` for each kind of address.

A source lists the checkpoints to which a glob or a training run's folder expands, and opens one as a
`Snapshot`, so that modules above need not know where it is stored. The libraries of a source are
imported when its scheme is first used.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from lmeval_screener.checkpoints.account import Account
from lmeval_screener.checkpoints.concurrency import lock
from lmeval_screener.checkpoints.snapshot import SERVICES, Snapshot, open_folder
from lmeval_screener.errors import ScreeningError
from lmeval_screener.formats import GGUF, TOKENIZER_FILES, tokenizer_in
from lmeval_screener.targets.names import Target, parse_target

if TYPE_CHECKING:
    from lmeval_screener.checkpoints.hub import Hub

#: Errors of a name that the Hub does not know, or cannot be asked for.
_NOT_HERE = ("RepoNotFound", "Unreachable", "Offline")


class Source(Protocol):
    """How checkpoints in one kind of place, such as object stores, are listed and opened."""

    async def expand(self, target: Target, account: Account) -> list[Target]:
        """Return one target for each checkpoint that ``target`` names, ordered by step.

        A glob, or the folder of a training run, names several. A target of a single checkpoint is
        returned unchanged.

        Raises:
            ScreeningError: There is no checkpoint, or the checkpoints cannot be listed.
        """
        ...

    async def snapshot(self, target: Target, account: Account) -> Snapshot:
        """Open the checkpoint of a target.

        Raises:
            ScreeningError: The checkpoint does not exist or cannot be read.
        """
        ...


class Sources:
    """A `Source` for every target: folders, repositories of the Hub, and all other addresses.

    Args:
        hub: Client of the Hub; None if every target is a folder.
    """

    def __init__(self, hub: Hub | None) -> None:
        self._given = hub
        self._sources: dict[str, Source] = {}
        self._tokenizers: dict[str, tuple[Snapshot, dict[str, str]]] = {}
        self._locks: dict[str, AbstractAsyncContextManager[object]] = {}

    async def expand(self, target: Target, account: Account) -> list[Target]:
        """Return one target for each checkpoint that ``target`` names; see `Source.expand`."""
        if target.scheme is not None and not target.refused:
            self._hub.networks.name(target.address)
            return await self._source(target.scheme).expand(target, account)
        if target.refused or target.local or not target.is_glob or target.revision is None:
            return [target]  # a run's folders were listed when the target was parsed
        names = await self._hub.revisions(target.repo, target.revision, account)
        return [replace(target, revision=name) for name in names]

    async def snapshot(self, target: Target, account: Account) -> Snapshot:
        """Open a checkpoint; see `Source.snapshot`.

        If the target names a tokenizer and the checkpoint has no tokenizer files, those of the
        named tokenizer are added; but not to GGUF files, which contain their tokenizer.
        """
        snapshot = await self._opened(target, account)
        files = snapshot.files
        if (
            target.tokenizer is None
            or tokenizer_in(files)
            or all(path.endswith(GGUF.suffix) for path in files)
        ):
            return snapshot
        snapshot.borrow(*await self.tokenizer(target.tokenizer))
        return snapshot

    async def _opened(self, target: Target, account: Account) -> Snapshot:
        if target.scheme is not None:
            await self._may_ask(target)
            return await self._source(target.scheme).snapshot(target, account)
        if not target.local:
            try:
                return await self._hub.snapshot(
                    target.repo, target.revision, account, target.listed
                )
            except ScreeningError as error:
                if "/" in target.repo or error.code not in _NOT_HERE or Path(target.repo).exists():
                    raise
                # A bare name is more often a folder's than a repository's.
                why = f"no folder here is called {target.repo}, and {error}"
                raise ScreeningError(error.code, why) from error
        return open_folder(target.repo)

    async def _may_ask(self, target: Target) -> None:
        """Refuse a host in a private network that a file or a registry names, not the user."""
        networks = self._hub.networks
        if not target.by_file:
            networks.name(target.address)
            return
        if target.scheme == "models" or target.scheme in SERVICES:
            return  # their servers are the user's settings
        host = urlsplit(target.address).hostname
        if network := await networks.private(host):
            raise ScreeningError(
                "BadName",
                f"{target.shown} is in a {network} network, and you did not name it (a file or "
                "registry did); if the address is right, add it to the checkpoints to screen",
            )

    @property
    def _hub(self) -> Hub:
        assert self._given is not None, "only folders need no hub"
        return self._given

    def _source(self, scheme: str) -> Source:
        kind = SERVICES.get(scheme, scheme)
        if kind not in self._sources:
            self._sources[kind] = self._made(scheme)
        return self._sources[kind]

    def _made(self, scheme: str) -> Source:
        if scheme in ("http", "https"):
            from lmeval_screener.checkpoints.web import WebServers

            return WebServers(self._hub.online)
        if scheme == "models":
            from lmeval_screener.checkpoints.mlflow_models import RegisteredModels

            return RegisteredModels(self.snapshot)
        from lmeval_screener.checkpoints.stores import BucketSource, FileSystem

        if scheme in SERVICES:
            from lmeval_screener.checkpoints.object_store import ObjectStore

            return BucketSource(ObjectStore)
        return BucketSource(FileSystem)

    async def tokenizer(self, text: str) -> tuple[Snapshot, dict[str, str]]:
        """Open the tokenizer that ``text`` names: a folder, a repository, an address or a file.

        Returns the checkpoint that contains the tokenizer, and a dict that maps the usual name of
        each tokenizer file to its name in that checkpoint. Each tokenizer is opened only once.

        Raises:
            ScreeningError: The place cannot be opened, or has no tokenizer files.
        """
        async with self._locks.setdefault(text, lock()):
            if text not in self._tokenizers:
                self._tokenizers[text] = await self._found(text)
            return self._tokenizers[text]

    async def _found(self, text: str) -> tuple[Snapshot, dict[str, str]]:
        target = parse_target(text)
        folder, slash, name = text.rpartition("/")
        if not name.endswith(".json"):
            name = ""
        elif target.scheme not in ("http", "https"):  # which list no folders
            target = parse_target(folder or slash or ".")
        try:
            if target.refused is not None:
                raise ScreeningError(*target.refused)
            # On the run's account: all share it, and each reads it within its own time.
            snapshot = await self._opened(target, self._hub.account)
        except ScreeningError as error:
            begin = f"tokenizer {text}"
            if target.on_hub and error.code in _NOT_HERE:
                begin += " is not an existing folder or file, and cannot be read from the Hub"
            raise ScreeningError(error.code, f"{begin}: {error}") from error
        usual = {file: file for file in TOKENIZER_FILES if file in snapshot.files}
        names = {TOKENIZER_FILES[0]: name} if name else usual
        if not names or not set(names.values()) <= set(snapshot.files):
            raise ScreeningError(
                "TokenizerNotFound",
                f"tokenizer {text} has no {name or ' or '.join(TOKENIZER_FILES)}; give a repository, "
                "folder or file that has one",
            )
        return snapshot, names
