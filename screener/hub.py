"""Checkpoints on the Hub (or any server that speaks its protocol), read by ranges over pooled connections."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from screener.snapshot import Snapshot


class Hub:
    """One pool of connections for all checkpoints of a run; an asynchronous context manager.

    Endpoint, token, offline mode and cache locations are those of huggingface_hub: ``HF_ENDPOINT``,
    ``HF_TOKEN`` or ``$HF_HOME/token``, ``HF_HUB_DISABLE_IMPLICIT_TOKEN``, ``HF_HUB_OFFLINE``, ``HF_HOME``.

    Args:
        timeout: Seconds that one checkpoint may take in all, waiting for retries included.
        offline: Whether to make no request at all; None: as huggingface_hub is set.
        cache: Where listings, headers, small files and rows are kept; None: under huggingface_hub's folder
            for other libraries' data (``$HF_HOME/assets/screen-checkpoints``).
    """

    def __init__(
        self, *, timeout: float = 60, offline: bool | None = None, cache: Path | None = None
    ) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Hub:
        """Open the pool."""
        raise NotImplementedError

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close every connection."""
        raise NotImplementedError

    async def snapshot(self, repo: str, revision: str | None = None) -> Snapshot:
        """A checkpoint at a revision, pinned to its commit; its time budget starts here.

        Args:
            repo: ``org/name``; renamed repositories are followed.
            revision: Branch, tag or commit; None: the default branch.

        Raises:
            ScreeningError: ``RepoNotFound``, ``RevisionNotFound``, ``Offline``, or whatever the way came to.
        """
        raise NotImplementedError

    async def revisions(self, repo: str, pattern: str) -> list[str]:
        """Branches and tags that match a glob, in the order of the numbers in their names.

        Args:
            repo: ``org/name``.
            pattern: A glob such as ``step*``.

        Raises:
            ScreeningError: ``RevisionNotFound`` if none matches, or whatever the way there came to.
        """
        raise NotImplementedError
