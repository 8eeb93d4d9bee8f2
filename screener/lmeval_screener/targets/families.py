"""Families of checkpoints, bundled or of the user's own file, and the demo's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.layouts import mistake, nearest
from lmeval_screener.budgets import bundled_yaml, load_yaml
from lmeval_screener.orders import Distance, Order, RankBy
from lmeval_screener.targets.names import Target, parse_target


@dataclass(frozen=True)
class _Checkpoint:
    repo: str
    scale: str
    revision: str = ""
    kind: Any = None  # base, instruct, …; a group of bases only was trained from scratch


@dataclass(frozen=True)
class _Family:
    checkpoints: tuple[_Checkpoint, ...]
    note: str = ""


@dataclass(frozen=True)
class _File:
    schema: Literal[1]
    families: dict[str, _Family]
    rank_by: RankBy = "ratio"
    metric: Distance = "cosine"
    notes: Any = None


@dataclass(frozen=True)
class Family:
    """A bundled or user-defined family: checkpoints that share a tokenizer.

    Attributes:
        checkpoints: The checkpoints, in the order of the file.
        note: A remark to be shown in the list of families; may be empty.
        order: The figure that ranks the checkpoints.
    """

    checkpoints: tuple[Target, ...]
    note: str
    order: Order

    @property
    def scales(self) -> tuple[str, ...]:
        """The checkpoints' size classes, such as ``7B``: each once, in the order of the file."""
        return tuple(dict.fromkeys(target.scale for target in self.checkpoints if target.scale))


def load_families(path: str | Path | None = None) -> dict[str, Family]:
    """Read the families in a YAML file, by default in the bundled file.

    Returns:
        A mapping from the name of each family to the family, in the order of the file.

    Raises:
        UsageError: The file cannot be read or is not valid, or a family lists a checkpoint twice.
    """
    file = Path(path or Path(__file__).with_name("families.yaml"))
    content = load_yaml(_File, file)
    order = Order(content.rank_by, content.metric)
    families = {}
    for name, family in content.families.items():
        targets: list[Target] = []
        for position, entry in enumerate(family.checkpoints):
            target = parse_target(f"hf://{entry.repo}" if path is None else entry.repo)
            revision = entry.revision or target.revision
            target = replace(
                target,
                revision=revision,
                family=name,
                scale=entry.scale,
                kind=str(entry.kind or ""),
                order=order,
            )
            if target.name in (other.name for other in targets):
                key = f"families.{name}.checkpoints[{position}]"
                raise mistake(file, key, "each checkpoint once", target.name, "remove one")
            targets.append(target)
        families[name] = Family(tuple(targets), family.note, order)
    return families


def load_family(name: str, path: str | Path | None = None) -> Family:
    """Read one family from a YAML file, by default from the bundled one.

    Args:
        name: The family's name, in upper or lower case.
        path: The file; None for the bundled one.

    Raises:
        UsageError: No family has this name, or the file cannot be read or is not valid. For an
            unknown name, the message lists families with checkpoints whose names contain it, or
            else families with similar names.
    """
    families = load_families(path)
    for known, family in families.items():
        if known.lower() == name.lower():
            return family
    where = "" if path is None else f" in {path}"
    members = _families_with(name, families)
    if members:
        found = f"models with this name are in {', '.join(members)}"
        hint = f"; {found}; give `--family {members[0]}`"
    else:
        hint = nearest(name, families)
    raise UsageError(f"unknown family {name!r}{where}{hint}; known: {', '.join(families)}")


def _families_with(name: str, families: Mapping[str, Family]) -> list[str]:
    """Families with checkpoints whose names hold ``name``, most of them first."""
    sought = _letters(name)
    if not sought:
        return []
    counts = {}
    for known, family in families.items():
        held = [target for target in family.checkpoints if sought in _letters(target.repo)]
        if held:
            counts[known] = len(held)
    return sorted(counts, key=lambda known: -counts[known])


def _letters(name: str) -> str:
    """The letters and digits of a name, in lower case: ``Phi-3.5`` and ``phi35`` are one name."""
    return "".join(sign for sign in name.lower() if sign.isalnum())


def demo_targets() -> list[Target]:
    """Return the checkpoints of the demo, each with its measured accuracy."""
    folder = data_folder("demo")
    family = bundled_yaml(folder / "family.yaml")
    return [
        Target(
            str(folder / entry["folder"]),
            family=family["name"],
            local=True,
            accuracy=float(entry["accuracy"]["mean"]),
            negative_control=entry["answers"] != "right",
        )
        for entry in family["checkpoints"]
    ]
