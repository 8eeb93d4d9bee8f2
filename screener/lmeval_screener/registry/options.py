"""``--registry``, ``--refresh`` and ``--engine`` of a screening."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lmeval_dispersion.errors import UsageError

if TYPE_CHECKING:
    from lmeval_screener.reading import Reader
    from lmeval_screener.registry.database import Session
    from lmeval_screener.targets import Target
    from lmeval_screener.tokens.sets import TokenSet


def add_registry_options(parser: argparse._ActionsContainer) -> None:
    """Add ``--registry FILE``, ``--refresh`` and ``--engine``."""
    parser.add_argument(
        "--registry",
        type=Path,
        metavar="FILE",
        help="keep what is measured in this SQLite file, and read only what is new (default: none)",
    )
    parser.add_argument("--refresh", action="store_true", help="read again what the registry has")
    parser.add_argument(
        "--engine",
        choices=("process", "ray"),
        default="process",
        help="ray: over a cluster (RAY_ADDRESS), for folders and buckets (default: process)",
    )


def reader_type_of(engine: str, targets: Sequence[Target]) -> type[Reader]:
    """The class that reads checkpoints by ``--engine``."""
    if engine == "ray":
        from lmeval_screener.ray_reader import RayReader, check_ray

        check_ray(targets)
        return RayReader
    from lmeval_screener.reading import Reader

    return Reader


@contextmanager
def kept_in(
    registry: Path | None,
    domain: TokenSet,
    reference: TokenSet,
    *,
    metric: str,
    refresh: bool,
    command: str,
) -> Iterator[Session | None]:
    """A run's session; None without a registry."""
    if registry is None:
        if refresh:
            raise UsageError("expected --registry FILE with --refresh, got none; without one all is read")
        yield None
        return
    from lmeval_screener.registry.database import Session, written

    with written(registry) as connection:
        yield Session(connection, domain, reference, metric=metric, command=command, refresh=refresh)
