"""Families of checkpoints that share a tokenizer, as YAML: which ones there are, and at which scale."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmeval_dispersion.errors import UsageError
from lmeval_screener.targets.target import Target, parse_target
from lmeval_screener.yaml_fields import load_yaml, mistake, nearest

_BUNDLED = Path(__file__).resolve().parent / "families.yaml"


@dataclass(frozen=True)
class _Checkpoint:
    repo: str
    scale: str
    revision: str = ""
    kind: Any = None  # base, instruct, trajectory, …: a word for readers of the file


@dataclass(frozen=True)
class _Family:
    checkpoints: tuple[_Checkpoint, ...]
    note: str = ""


@dataclass(frozen=True)
class _File:
    schema: int
    families: dict[str, _Family]
    notes: Any = None


@dataclass(frozen=True)
class Family:
    """Checkpoints with one tokenizer.

    Attributes:
        name: As ``--family`` takes it.
        checkpoints: In the file's order: scales ascending. Every one has its ``scale``; a revision may be a
            glob over branches and tags (a training trajectory).
        note: Something that a user should know of the family; empty for most.
    """

    name: str
    checkpoints: tuple[Target, ...]
    note: str

    @property
    def scales(self) -> tuple[str, ...]:
        """The scales, each once, in the file's order."""
        return tuple(dict.fromkeys(target.scale for target in self.checkpoints if target.scale))


def load_families(path: str | Path | None = None) -> dict[str, Family]:
    """All families of a file, by name."""
    file = _BUNDLED if path is None else Path(path)
    families = {}
    for name, family in load_yaml(_File, file).families.items():
        checkpoints: dict[tuple[str, str | None], Target] = {}
        for position, entry in enumerate(family.checkpoints):
            target = parse_target(entry.repo)
            target = replace(
                target, revision=entry.revision or target.revision, family=name, scale=entry.scale
            )
            if checkpoints.setdefault((target.repo, target.revision), target) is not target:
                key = f"families.{name}.checkpoints[{position}]"
                raise mistake(file, key, "each checkpoint once", target.repo, "remove one")
        families[name] = Family(name, tuple(checkpoints.values()), family.note)
    return families


def load_family(name: str, path: str | Path | None = None) -> Family:
    """One family by name."""
    families = load_families(path)
    for known, family in families.items():
        if known.lower() == name.lower():
            return family
    where = "" if path is None else f" in {path}"
    raise UsageError(
        f"there is no family {name!r}{where}{nearest(name, families)}; known: {', '.join(families)}"
    )
