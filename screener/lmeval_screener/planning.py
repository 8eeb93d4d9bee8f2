"""What a screening will cost before it is done, and the options that limit it."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmeval_dispersion.errors import UsageError

if TYPE_CHECKING:
    from lmeval_dispersion.report import Document
    from lmeval_screener.checkpoints.limits import Allowance
    from lmeval_screener.targets.selection import Selected
    from lmeval_screener.targets.target import Target
    from lmeval_screener.tokens.sets import TokenSet

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)b?", re.IGNORECASE)
_COMMIT = re.compile(r"[0-9a-f]{40}")
#: The Hub's quotas as it documents them (autumn 2026), requests in 300 s: anonymous, with a token.
QUOTAS = {"api": (500, 1000), "resolvers": (3000, 5000), "pages": (100, 200)}
WINDOW = 300.0
#: Bytes of a checkpoint beside its rows: header, configuration, index.
_BESIDE = 40_000
_SLACK = 1.2


def add_limit_options(parser: argparse._ActionsContainer) -> None:
    """Add the options that limit what a run costs; `allowance_of` reads them."""
    parser.add_argument(
        "--max-requests",
        type=int,
        metavar="N",
        help="stop before more requests to the Hub, which its quota counts; several processes share a quota "
        "by each having a part of it (default: no limit)",
    )
    parser.add_argument(
        "--max-bytes", metavar="SIZE", help="stop before more is read, such as 500M or 2G (default: no limit)"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="say what would be read, what it costs and how long the Hub's quota makes it, and stop",
    )


def allowance_of(args: argparse.Namespace) -> Allowance:
    """What a run may cost, by its options.

    Raises:
        UsageError: A limit that is none.
    """
    from lmeval_screener.checkpoints.limits import Allowance

    size = None
    if args.max_bytes is not None:
        if not (found := _SIZE.fullmatch(args.max_bytes)):
            raise UsageError(f"expected --max-bytes such as 500M or 2G, got {args.max_bytes!r}")
        size = int(float(found[1]) * 1000 ** " kmg".index(found[2].lower() or " "))

    def notice(name: str, seconds: float) -> None:
        message = f"the server's quota of {name} is used up; going on in {seconds:.0f} s"
        print(f"screen-checkpoints: {message}", file=sys.stderr, flush=True)

    return Allowance(args.max_requests, size, None if args.quiet else notice)


def plan_document(
    selected: Selected,
    targets: Sequence[Target],
    domain: TokenSet,
    reference: TokenSet,
    *,
    timeout: float,
) -> Document:
    """What the screening of some targets will cost.

    Args:
        selected: The selection that they came of.
        targets: All that would be screened.
        domain: T.
        reference: R.
        timeout: Seconds for one checkpoint.
    """
    import asyncio

    from lmeval_dispersion.report import Column, Document, Section, Table
    from lmeval_screener.checkpoints.hub import Hub

    hub = Hub()
    cached = asyncio.run(_cached(targets, domain, reference, timeout))
    words = sum(len(group.texts()) for tokens in (domain, reference) for group in tokens.groups.values())
    rows = []
    for target in targets:
        requests = dict.fromkeys(QUOTAS, 0)
        kind, size = "to read", _bytes(target, words)
        if target.refused is not None:
            kind, size = "refused", 0
        elif target.local:
            kind, size = "local", 0
        elif target in cached:
            kind, size = "cached", 0
        elif target.listing is not None and target.listing.gated and not hub.has_token():
            kind, size = "gated", 0
        elif target.listing is not None:
            sharded = "model.safetensors" not in target.listing.files
            requests["resolvers"] = 4 if sharded else 3
        else:
            requests |= {"api": 1, "resolvers": 3}
        rows.append({"checkpoint": target.label, "what": kind, **requests, "bytes": size})
    totals = {name: sum(int(str(row[name])) for row in rows) for name in QUOTAS}
    size = sum(int(str(row["bytes"])) for row in rows)
    seconds = {name: _waiting(count, QUOTAS[name][hub.has_token()]) for name, count in totals.items()}
    slowest = max(seconds, key=lambda name: seconds[name])
    reading = sum(row["what"] == "to read" for row in rows)
    others = ", ".join(
        f"{count} {kind}"
        for kind in ("cached", "local", "gated", "refused")
        if (count := sum(row["what"] == kind for row in rows))
    )
    wait = (
        f"The quota of {slowest} makes it at least {seconds[slowest] / 60:.0f} min."
        if seconds[slowest]
        else "No quota binds."
    )
    answer = [
        f"{reading} of {len(rows)} checkpoints to read: about {totals['resolvers']} resolver and "
        f"{totals['api']} API requests, {size / 1e6:.0f} MB. {wait}"
    ]
    if others:
        answer.append(f"Without a request: {others}.")
    if selected.sentence:
        answer.append(f"{selected.sentence[0].upper()}{selected.sentence[1:]}.")
    columns = [
        Column("checkpoint", "Checkpoint"),
        Column("what", "What", hint="cached: everything that is needed is kept from an earlier run"),
        Column("api", "API", "d", hint="requests"),
        Column("resolvers", "Resolver", "d", hint="requests; tokenizers that are new come on top"),
        Column("bytes", "Bytes", "d", hint="about: rows for its parameters, header, configuration"),
    ]
    return Document(
        "Plan",
        answer=tuple(answer),
        sections=[Section("", [Table(rows, columns, "What would be read", "plan")])],
        rows=rows,
        guide="docs/reference/screening.md",
    )


async def _cached(
    targets: Sequence[Target], domain: TokenSet, reference: TokenSet, timeout: float
) -> set[Target]:
    """Those of which nothing has to be asked: they are pinned, and can be read offline."""
    from lmeval_screener.checkpoints.http import Budget
    from lmeval_screener.checkpoints.hub import Hub
    from lmeval_screener.errors import ScreeningError
    from lmeval_screener.reading import Reader
    from lmeval_screener.tokens.cache import ResolutionCache

    found = set()
    async with Hub(offline=True) as hub:
        for target in targets:
            commit = target.listing.commit if target.listing is not None else target.revision or ""
            if target.local or target.refused is not None or not _COMMIT.fullmatch(commit):
                continue
            if not hub.knows(target.repo, commit):
                continue
            reader = Reader(hub, domain, reference, ResolutionCache(hub.cache))
            try:
                await reader.read(target, Budget(timeout))
            except ScreeningError as error:
                if error.code == "Offline":
                    continue
            found.add(target)  # what fails by what is stored fails without a request too
    return found


def _bytes(target: Target, words: int) -> int:
    """About what is read of a checkpoint: rows of two bytes a number, of a width that fits its parameters."""
    parameters = target.listing.parameters if target.listing is not None else None
    width = 1.85 * (parameters or 7e9) ** (1 / 3)
    return int(words * width * 2 * _SLACK) + _BESIDE


def _waiting(requests: int, quota: int) -> float:
    """Seconds of windows that have to end before the last request may leave."""
    return max(math.ceil(requests / quota) - 1, 0) * WINDOW
