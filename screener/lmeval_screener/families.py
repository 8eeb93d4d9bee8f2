"""Families of checkpoints that share a tokenizer, as YAML: which ones there are, and at which scale."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmeval_dispersion.errors import UsageError
from lmeval_screener.schema import Fields, nearest, yaml_file

_BUNDLED = Path(__file__).resolve().parent / "families.yaml"


@dataclass(frozen=True)
class Entry:
    """One line of a family.

    Attributes:
        repo: Repository id on the Hub, or a local folder.
        revision: Branch, tag or commit; with ``*``, ``?`` or ``[…]`` a pattern over the repository's branches
            and tags (a training trajectory); None means the main branch.
        scale: Checkpoints are ranked inside one scale, such as ``7B``.
        kind: A word for the reader: ``base``, ``instruct``, ``math``, ``distill``, ``trajectory``.
    """

    repo: str
    revision: str | None
    scale: str
    kind: str


@dataclass(frozen=True)
class Family:
    """Checkpoints with one tokenizer.

    Attributes:
        name: As ``--family`` takes it.
        checkpoints: Its entries in the file's order: scales ascending.
        note: What a user should know of the family; empty for most.
        source: The file.
    """

    name: str
    checkpoints: tuple[Entry, ...]
    note: str
    source: str

    @property
    def scales(self) -> tuple[str, ...]:
        """The scales, each once, in the file's order."""
        return tuple(dict.fromkeys(entry.scale for entry in self.checkpoints))


def load_families(path: str | Path | None = None) -> dict[str, Family]:
    """All families of a file, by name.

    Args:
        path: A file in the bundled one's layout (``docs/token-sets.md``); None reads the bundled one.

    Raises:
        UsageError: The file is missing or has a mistake; the message names file, key, expected and given.
    """
    fields = yaml_file(_BUNDLED if path is None else Path(path))
    fields.only(("schema", "families", "notes"))
    families = fields.mapping("families")
    return {name: _family(name, families.mapping(name)) for name in families}


def family(name: str, path: str | Path | None = None) -> Family:
    """One family by name.

    Args:
        name: As the file spells it; another case is understood.
        path: As in ``load_families``.

    Raises:
        UsageError: The file has no such family (the nearest names are suggested), or a mistake.
    """
    families = load_families(path)
    for known, found in families.items():
        if known.lower() == name.lower():
            return found
    where = "" if path is None else f" in {path}"
    raise UsageError(
        f"there is no family {name!r}{where}{nearest(name, families)}; known: {', '.join(families)}"
    )


def _family(name: str, fields: Fields) -> Family:
    fields.only(("note", "checkpoints"))
    entries = tuple(_entry(part) for part in fields.mappings("checkpoints"))
    seen = set()
    for position, entry in enumerate(entries):
        if (entry.repo, entry.revision) in seen:
            raise fields.error(f"checkpoints[{position}]", "each checkpoint once", entry.repo, "remove one")
        seen.add((entry.repo, entry.revision))
    return Family(name, entries, fields.text("note") if "note" in fields else "", fields.source)


def _entry(fields: Fields) -> Entry:
    fields.only(("repo", "revision", "scale", "kind"))
    return Entry(
        repo=fields.text("repo"),
        revision=fields.text("revision") if "revision" in fields else None,
        scale=fields.text("scale"),
        kind=fields.text("kind"),
    )
