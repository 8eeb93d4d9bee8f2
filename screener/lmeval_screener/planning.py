"""The cost of a screening before it is done, and the options that limit it."""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmeval_dispersion.report import Document
    from lmeval_screener.checkpoints.limits import Allowance
    from lmeval_screener.targets import Target
    from lmeval_screener.targets.selection import Selected
    from lmeval_screener.tokens import TokenSet

#: The Hub's quotas as it documents them (autumn 2026), requests in 300 s: anonymous, with a token.
QUOTAS = {"api": (500, 1000), "resolvers": (3000, 5000)}
_WINDOW = 300.0  # seconds
#: Bytes of a checkpoint beside its rows: header, configuration, index.
_BESIDE = 40_000
_SLACK = 1.2


def add_limit_options(parser: argparse._ActionsContainer) -> None:
    """Add the options that limit what a run costs; `allowance_of` reads them."""
    parser.add_argument(
        "--max-requests",
        type=int,
        metavar="N",
        help="begin no checkpoint after so many requests to the Hub, as its quota counts; those begun "
        "come to their end; give each of several processes its share (default: no limit)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="say what would be read at most, what it costs and how long the Hub's quota makes it, and stop",
    )


def allowance_of(args: argparse.Namespace) -> Allowance:
    """The limits of a run by its options."""
    from lmeval_screener.checkpoints.limits import Allowance

    def notice(name: str, seconds: float) -> None:
        message = f"the server's quota of {name} is used up; going on in {seconds:.0f} s"
        print(f"screen-checkpoints: {message}", file=sys.stderr, flush=True)

    return Allowance(args.max_requests, None if args.quiet else notice)


def plan_document(
    selected: Selected, targets: Sequence[Target], domain: TokenSet, reference: TokenSet
) -> Document:
    """The most that the screening of some targets costs: from a cache or a registry it costs less."""
    from lmeval_dispersion.report import Column, Document, Section, Table
    from lmeval_screener.checkpoints.hub import Hub

    has_token = Hub().has_token()
    words = sum(len(group.texts()) for tokens in (domain, reference) for group in tokens.groups.values())
    rows = [_planned(target, words, has_token) for target in targets]
    kinds = Counter(row["what"] for row in rows)
    api, resolvers, size = (sum(row[name] for row in rows) for name in ("api", "resolvers", "bytes"))
    waits = {
        name: (math.ceil(requests / QUOTAS[name][has_token]) - 1) * _WINDOW / 60
        for name, requests in (("api", api), ("resolvers", resolvers))
    }
    slowest = max(waits, key=lambda name: waits[name])
    wait = f"The quota of {slowest} makes it at least {waits[slowest]:.0f} min."
    wait = wait if waits[slowest] > 0 else "No quota binds."
    answer = [
        f"{kinds.pop('to read', 0)} of {len(rows)} checkpoints to read: at most about {resolvers} resolver "
        f"and {api} API requests, {size / 1e6:.0f} MB. " + wait
    ]
    if kinds:
        answer.append(f"Without a request: {', '.join(f'{kinds[kind]} {kind}' for kind in sorted(kinds))}.")
    if selected.sentence:
        answer.append(f"{selected.sentence[0].upper()}{selected.sentence[1:]}.")
    columns = [
        Column("checkpoint", "Checkpoint"),
        Column("what", "What"),
        Column("api", "API", "d", hint="requests"),
        Column("resolvers", "Resolver", "d", hint="requests; tokenizers that are new come on top"),
        Column("bytes", "Bytes", "d", hint="about: rows for its parameters, header, configuration"),
    ]
    table = Table(rows, columns, "What would be read", "plan")
    guide = "docs/reference/screening.md"
    return Document("Plan", answer=answer, sections=[Section("", [table])], rows=rows, guide=guide)


def _planned(target: Target, words: int, has_token: bool) -> dict[str, Any]:
    """The most that a checkpoint costs."""
    listed = target.listed
    row = {"checkpoint": target.label, "what": "to read", "api": 0, "resolvers": 0, "bytes": 0}
    if target.refused is not None or target.local:
        return row | {"what": "refused" if target.refused else "local"}
    if listed is not None and listed.gated and not has_token:
        return row | {"what": "gated"}
    # Rows of two bytes a number, of a width that fits the parameters.
    width = 1.85 * ((listed.parameters if listed else None) or 7e9) ** (1 / 3)
    sharded = listed is not None and "model.safetensors" not in listed.files
    size = int(words * width * 2 * _SLACK) + _BESIDE
    return row | {"api": 1, "resolvers": 4 if sharded else 3, "bytes": size}
