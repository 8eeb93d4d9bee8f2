"""Reports before a screening: the bundled families, token sets and tasks, and the cost of a plan."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lmeval_dispersion.errors import count
from lmeval_dispersion.report import Column, Document, Section, Table
from lmeval_screener.formats import SAFETENSORS

if TYPE_CHECKING:
    from lmeval_screener.screening.selection import Selected
    from lmeval_screener.targets.names import Target
    from lmeval_screener.tokens.sets import TokenSet

#: The Hub's quotas as it documents them (autumn 2026), requests in 300 s: anonymous, with a token.
QUOTAS = {"api": (500, 1000), "resolvers": (3000, 5000)}
_WINDOW = 5.0  # minutes
#: Bytes of a checkpoint besides its rows: header, configuration, index.
_BESIDE = 40_000
_SLACK = 1.2
_GUIDE = "docs/reference/token-sets.md"


def plan_document(
    selected: Selected, targets: Sequence[Target], domain: TokenSet, reference: TokenSet
) -> Document:
    """Return a report that estimates how many requests and bytes a screening needs at most.

    A cache or a registry can only lower the cost.

    Args:
        selected: What was selected from a list of the Hub; empty if no list was asked for.
        targets: The checkpoints to screen.
        domain: Token set of the domain.
        reference: Token set of everyday words.
    """
    from lmeval_screener.checkpoints.hub import Hub

    has_token = Hub().has_token()
    words = 0
    for tokens in (domain, reference):
        words += sum(len(group.texts()) for group in tokens.groups.values())
    asked = domain.answers
    if asked is not None:  # a token has at least one character
        words += len(asked.pieces) or min(asked.most, sum(map(len, asked.answers)))
    rows = [_planned(target, words, has_token) for target in targets]
    kinds = Counter(row["what"] for row in rows)
    total = {name: sum(row[name] for row in rows) for name in ("api", "resolvers", "bytes")}
    waits = {}
    for name, quotas in QUOTAS.items():
        windows = math.ceil(total[name] / quotas[has_token]) - 1
        waits[name] = windows * _WINDOW
    slowest = max(waits, key=waits.__getitem__)
    wait = "That is within the Hub's quotas."
    if waits[slowest] > 0:
        kind = "API" if slowest == "api" else "resolver"
        wait = (
            f"The Hub's quota for {kind} requests makes the screening last "
            f"{waits[slowest]:.0f} min or more."
        )
    answer = [
        f"{kinds.pop('to read', 0)} of {count(len(rows), 'checkpoint')} would be read, with an "
        f"estimated maximum of {total['resolvers']} resolver requests, {total['api']} API requests "
        f"and {total['bytes'] / 1e6:.0f} MB. {wait}"
    ]
    if kinds:
        counts = ", ".join(f"{kinds[kind]} {kind}" for kind in sorted(kinds))
        answer.append(f"Without a request: {counts}.")
    if any(target.is_glob for target in targets):
        answer.append(
            "A pattern of revisions counts as one checkpoint; every further match costs the same again."
        )
    if selected.sentence:
        answer.append(f"{selected.sentence[0].upper()}{selected.sentence[1:]}.")
    columns = [
        Column("checkpoint", "Checkpoint"),
        Column("what", "What"),
        Column("api", "API", "d", hint="requests"),
        Column("resolvers", "Resolver", "d", hint="requests; new tokenizers need more"),
        Column(
            "bytes",
            "Bytes",
            ",d",
            hint="rows, header and configuration, estimated from the number of parameters (7 "
            "billion where it is unknown)",
        ),
    ]
    table = Table(rows, columns, "Planned reads", "plan")
    guide = "docs/reference/screening.md"
    return Document("Plan", answer=answer, sections=[Section("", [table])], rows=rows, guide=guide)


def _planned(target: Target, words: int, has_token: bool) -> dict[str, Any]:
    """The highest cost of a checkpoint."""
    listed = target.listed
    row = {"checkpoint": target.name, "what": "to read", "api": 0, "resolvers": 0, "bytes": 0}
    if target.refused is not None or target.local:
        return row | {"what": "refused" if target.refused else "local"}
    if listed is not None and listed.gated and not has_token:
        return row | {"what": "gated"}
    # Rows with two bytes per number, and a width that fits the number of parameters.
    parameters = (listed and listed.parameters) or 7e9
    width = 1.85 * parameters ** (1 / 3)
    row["bytes"] = int(words * width * 2 * _SLACK) + _BESIDE
    if not target.on_hub and target.scheme != "hf":
        return row
    # One for the configuration and for each weights file (head and norm may lie in two, which an index
    # names). A list leaves out the tokenizer's digest, which is one more; a name costs the listing.
    if listed is None:
        return row | {"api": 1, "resolvers": 4}
    return row | {"resolvers": 3 if SAFETENSORS.single in listed.files else 5}


def families_document() -> Document:
    """Return a report on the bundled families, one row for each."""
    from lmeval_screener.targets.families import load_families

    rows = []
    for name, family in load_families().items():
        rows.append(
            {
                "family": name,
                "entries": len(family.checkpoints),
                "scales": ", ".join(family.scales),
                "ranked_by": family.order.figure,
                "note": family.note or None,
            }
        )
    headings = {
        "family": "Family",
        "entries": "Checkpoints",
        "scales": "Scales",
        "ranked_by": "Ranked by",
        "note": "Note",
    }
    answer = f"{len(rows)} families; `--family NAME` screens one."
    return _listing("Families", answer, rows, headings)


def domains_document() -> Document:
    """Return a report on the bundled token sets, one row for each group of words."""
    from lmeval_screener.tokens.sets import bundled_token_sets, described_groups

    names = bundled_token_sets()
    rows = []
    for name in names:
        for role, key, group, taken in described_groups(name):
            rows.append(
                {
                    "set": name,
                    "group": key,
                    "role": role,
                    "words": len(group.items),
                    "default": taken,
                    "examples": _examples(group.texts()),
                }
            )
    headings = {
        "set": "Set",
        "group": "Group",
        "role": "Role",
        "words": "Words",
        "default": "Taken",
        "examples": "Such as",
    }
    answer = (
        f"{len(names)} token sets; `--domain SET` and `--reference SET` select one, and `SET:GROUP` "
        "one of its groups."
    )
    return _listing("Token sets", answer, rows, headings)


def tasks_document() -> Document:
    """Return a report on the bundled sets of answer tokens and their tasks, one row for each set.

    For a set without answer tokens, the row says why it has none.
    """
    from lmeval_screener.tokens.answers import bundled_answers

    rows = []
    for file in bundled_answers().values():
        more = ", …" if len(file.tasks) > 6 else ""
        rows.append(
            {
                "set": file.name,
                "names": ", ".join(file.tasks[:6]) + more,
                "domain": file.domain or None,
                "answers": len(file.answers) or None,
                "examples": _examples(file.answers) or None,
                "refused": file.refused or None,
            }
        )
    headings = {
        "set": "Set",
        "names": "Tasks",
        "answers": "Answers",
        "examples": "Such as",
        "refused": "No answer tokens",
        "domain": "Domain",
    }
    known = sum(not row["refused"] for row in rows)
    answer = (
        f"{known} of {len(rows)} sets have answer tokens; `--task NAME` selects a task. "
        "`dispersion tokens` makes sets for other tasks."
    )
    return _listing("Tasks", answer, rows, headings)


def _examples(texts: Iterable[str]) -> str:
    """The first five different texts."""
    different = dict.fromkeys(text.strip() for text in texts)
    return " ".join(itertools.islice(different, 5))


def _listing(
    title: str, answer: str, rows: list[dict[str, Any]], headings: dict[str, str]
) -> Document:
    columns = []
    for place, (key, heading) in enumerate(headings.items()):
        # On a narrow terminal the last columns go first.
        columns.append(Column(key, heading, drop=max(place - 1, 0)))
    sections = [Section("", [Table(rows, columns, "", name="listing")])]
    return Document(title, answer=[answer], sections=sections, rows=rows, guide=_GUIDE)
