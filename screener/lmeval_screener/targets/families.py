"""Families of checkpoints that share a tokenizer, as YAML: which ones there are, and at which scale."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from lmeval_dispersion.errors import UsageError
from lmeval_screener.targets.target import Target, parse_target
from lmeval_screener.yaml_fields import Fields, load_yaml, nearest

_BUNDLED = Path(__file__).resolve().parent / "families.yaml"


@dataclass(frozen=True)
class Family:
    """Checkpoints with one tokenizer.

    Attributes:
        name: As ``--family`` takes it.
        checkpoints: In the file's order: scales ascending. Every one has its ``scale``; a revision may be a
            glob over branches and tags (a training trajectory).
        note: What a user should know of the family; empty for most.
        source: The file.
    """

    name: str
    checkpoints: tuple[Target, ...]
    note: str
    source: str

    @property
    def scales(self) -> tuple[str, ...]:
        """The scales, each once, in the file's order."""
        return tuple(dict.fromkeys(target.scale for target in self.checkpoints if target.scale))


def load_families(path: str | Path | None = None) -> dict[str, Family]:
    """All families of a file, by name.

    Args:
        path: A file in the bundled one's layout (``docs/reference/token-sets.md``); None: the bundled one.

    Raises:
        UsageError: The file is missing or has a mistake; the message names file, key, expected and given.
    """
    fields = load_yaml(_BUNDLED if path is None else Path(path))
    fields.only(("schema", "families", "notes"))
    families = fields.mapping("families")
    return {name: _family(name, families.mapping(name)) for name in families}


def load_family(name: str, path: str | Path | None = None) -> Family:
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
    checkpoints: list[Target] = []
    for position, entry in enumerate(fields.mappings("checkpoints")):
        # `kind` (base, instruct, trajectory, …) is a word for whoever reads the file.
        entry.only(("repo", "revision", "scale", "kind"))
        item = parse_target(entry.text("repo"))
        repo = item.repo
        revision = entry.text("revision") if "revision" in entry else item.revision
        if any((repo, revision) == (other.repo, other.revision) for other in checkpoints):
            raise fields.error(f"checkpoints[{position}]", "each checkpoint once", repo, "remove one")
        checkpoints.append(replace(item, revision=revision, family=name, scale=entry.text("scale")))
    note = fields.text("note") if "note" in fields else ""
    return Family(name, tuple(checkpoints), note, fields.source)
