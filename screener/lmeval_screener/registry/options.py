"""``--registry``, ``--refresh`` and ``--engine`` of a screening."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lmeval_dispersion.errors import UsageError

if TYPE_CHECKING:
    from lmeval_screener.registry.ray_engine import RayEngine
    from lmeval_screener.registry.store import Session
    from lmeval_screener.targets.target import Target
    from lmeval_screener.tokens.sets import TokenSet


def add_store_options(parser: argparse._ActionsContainer) -> None:
    """Add ``--registry FILE``, ``--refresh`` and ``--engine``."""
    parser.add_argument(
        "--registry",
        type=Path,
        metavar="FILE",
        help="keep what is measured in this DuckDB file, and read only what is new (default: none)",
    )
    parser.add_argument("--refresh", action="store_true", help="read again what the registry has")
    parser.add_argument(
        "--engine",
        choices=("process", "ray"),
        default="process",
        help="ray: over a cluster (RAY_ADDRESS), for folders and buckets (default: process)",
    )


def engine_of(
    args: argparse.Namespace, domain: TokenSet, reference: TokenSet, targets: Sequence[Target]
) -> RayEngine | None:
    """The engine of a run; None where this process reads.

    Raises:
        UsageError: It is of no use for these targets.
        MissingExtraError: Ray is not installed.
    """
    if args.engine == "process":
        return None
    from lmeval_screener.registry.ray_engine import RayEngine, check_engine

    if args.controls:
        raise UsageError("expected --engine ray without --controls, which it does not read, got both")
    check_engine(targets)
    return RayEngine(domain, reference, args.timeout)


@contextmanager
def session_of(
    args: argparse.Namespace, domain: TokenSet, reference: TokenSet, targets: Sequence[Target]
) -> Iterator[Session | None]:
    """The run's session, None without ``--registry``; however it ends, what it kept is merged.

    Raises:
        UsageError: ``--refresh`` without a registry, or a file that is none.
        MissingExtraError: duckdb is not installed.
    """
    if args.registry is None:
        if args.refresh:
            raise UsageError(
                "expected --registry FILE with --refresh, got none; without a registry all is read"
            )
        yield None
        return
    from lmeval_screener.registry.store import Registry, Session

    session = Session(
        Registry(args.registry),
        domain,
        reference,
        metric=args.metric,
        command=args.command,
        refresh=args.refresh,
    )
    try:
        session.prepare(targets)
        yield session
    finally:
        session.end()
