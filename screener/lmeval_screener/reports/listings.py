"""What can be asked for by name: the families and the token sets, as tables."""

from __future__ import annotations

from lmeval_dispersion.report import Column, Document, Section, Table
from lmeval_screener.targets.selection import load_families
from lmeval_screener.tokens import bundled_token_sets, described_groups


def families_document(path: str | None = None) -> Document:
    """The families of a file, or the bundled ones."""
    rows = [
        {
            "family": name,
            "entries": len(family.checkpoints),
            "scales": ", ".join(family.scales),
            "note": family.note or None,
        }
        for name, family in load_families(path).items()
    ]
    columns = [
        Column("family", "Family"),
        Column("entries", "Checkpoints", "d", hint="a training trajectory counts as one"),
        Column("scales", "Scales", drop=1),
        Column("note", "Note", drop=2),
    ]
    return Document(
        "Families",
        answer=(f"{len(rows)} families; `--family NAME` screens one.",),
        sections=[Section("", [Table(rows, columns, "Families", "families")])],
        rows=rows,
        guide="docs/reference/token-sets.md",
    )


def domains_document() -> Document:
    """The bundled token sets, a row for each of their groups."""
    rows = [
        {
            "set": name,
            "group": key,
            "role": role,
            "words": len(group.items),
            "default": taken,
            "examples": " ".join(group.items[:5]),
        }
        for name in bundled_token_sets()
        for role, key, group, taken in described_groups(name)
    ]
    columns = [
        Column("set", "Set"),
        Column("group", "Group"),
        Column("role", "Role", drop=2),
        Column("words", "Words", "d"),
        Column("default", "Taken", hint="without being named; `--domain SET:GROUP,GROUP` names groups"),
        Column("examples", "Such as", drop=1),
    ]
    return Document(
        "Token sets",
        answer=(
            f"{len({row['set'] for row in rows})} token sets; `--domain SET` and `--reference SET` take one.",
        ),
        sections=[Section("", [Table(rows, columns, "Token sets and their groups", "token-sets")])],
        rows=rows,
        guide="docs/reference/token-sets.md",
    )
