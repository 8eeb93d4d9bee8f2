"""Token sets: a domain's words (T) or the reference's (R), in groups, as YAML.

``math`` is a bundled set, ``my.yaml`` a file in the same layout, and ``math:digits,operators`` takes other
groups than the set's defaults; ``reference:bare`` takes the words in another variant than the file says. What
each key means is in ``docs/reference/token-sets.md``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.paths import data_folder
from lmeval_screener.yaml_fields import load_yaml, mistake, nearest

Role = Literal["domain", "reference"]
Variant = Literal["bare", "space"]

_CASES: dict[str, Callable[[str], str]] = {
    "exact": str,
    "lower": str.lower,
    "upper": str.upper,
    "title": str.capitalize,
}
_SELECTION = re.compile(r"(?P<name>.+):(?P<groups>[\w\-]+(,[\w\-]+)*)")


@dataclass(frozen=True)
class Group:
    """Words of one token set that are looked up the same way.

    Attributes:
        variant: ``bare`` looks ``7`` up, ``space`` looks ``␣the`` up.
        items: Surface forms without a leading space, all different.
        case: What is done to an item first.
        require_all: A vocabulary that lacks one of the items is refused.
        optional: Taken only when it is selected by name.
    """

    variant: Variant
    items: tuple[str, ...]
    case: Literal["exact", "lower", "upper", "title"] = "exact"
    require_all: bool = False
    optional: bool = False

    def texts(self) -> list[str]:
        """The surface forms that are looked up, leading space included, in the order of ``items``."""
        space = " " if self.variant == "space" else ""
        return [space + _CASES[self.case](item) for item in self.items]


@dataclass(frozen=True)
class _File:
    """The layout of a token set's file, see ``docs/reference/token-sets.md``."""

    schema: int
    name: str
    role: Role
    default_groups: tuple[str, ...]
    min_tokens: Annotated[int, 2]
    groups: dict[str, Group]
    sources: Any = None
    notes: Any = None


@dataclass(frozen=True)
class TokenSet:
    """A domain's (T) or the reference's (R) words.

    Attributes:
        name: What reports call the set; with selected groups ``math:digits,operators``.
        role: ``domain`` or ``reference``.
        min_tokens: The set is refused where fewer of its words resolve.
        groups: The groups that *are* taken, by name, in order.
        digest: sha256 over all that decides a resolution (not over notes).
    """

    name: str
    role: Role
    min_tokens: int
    groups: dict[str, Group]
    digest: str


def bundled_token_sets() -> list[str]:
    """Names of the token sets that come with the package, sorted."""
    return sorted(path.stem for path in data_folder("token_sets").glob("*.yaml"))


def described_groups(name: str) -> list[tuple[Role, str, Group, bool]]:
    """Every group of a bundled set: the set's role, the group's name, the group, and whether it is taken."""
    file = load_yaml(_File, data_folder("token_sets") / f"{name}.yaml")
    return [(file.role, key, group, key in file.default_groups) for key, group in file.groups.items()]


def load_token_set(name_or_path: str, role: Role = "domain") -> TokenSet:
    """A token set by name, by file, or with chosen groups."""
    name, selected = name_or_path, None
    path = _path(name)
    if path is None and (match := _SELECTION.fullmatch(name_or_path)):
        name, selected = match["name"], tuple(match["groups"].split(","))
        path = _path(name)
    if path is None:
        names = bundled_token_sets()
        raise UsageError(
            f"there is no token set {name!r}{nearest(name, names)}; bundled: {', '.join(names)}; "
            "a file of your own is given by its path, ending in .yaml"
        )
    return _read(path, role, selected)


def _path(name: str) -> Path | None:
    """The file that ``name`` means, or None for what is neither a bundled name nor looks like a path."""
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    return data_folder("token_sets") / f"{name}.yaml" if name in bundled_token_sets() else None


def _read(path: Path, role: Role, selected: tuple[str, ...] | None) -> TokenSet:
    file = load_yaml(_File, path)
    groups = file.groups
    for name, group in groups.items():
        for position, item in enumerate(group.items):
            if item != item.strip() or not item.isprintable():
                spaces = item != item.strip()
                expected = "a word without spaces around it" if spaces else "printable signs"
                step = "use `variant: space`" if spaces else ""
                raise mistake(path, f"groups.{name}.items[{position}]", expected, item, step)
    for position, default in enumerate(file.default_groups):
        if default not in groups or groups[default].optional:
            known = f"one of the groups {', '.join(groups)}"
            expected = "a group that is not optional" if default in groups else known
            raise mistake(path, f"default_groups[{position}]", expected, default)
    if file.role != role:
        raise mistake(path, "role", f"{role} (it is used as the {role} set)", file.role)
    # A group of that name wins: it is the file's own word.
    variants = [name for name in selected or () if name in get_args(Variant) and name not in groups]
    if len(variants) > 1:
        raise UsageError(f"{path}: expected one variant, got {' and '.join(variants)}; take one")
    chosen = [name for name in selected or () if name not in variants]
    for name in chosen:
        if name not in groups:
            raise UsageError(
                f"{path}: there is no group {name!r}{nearest(name, groups)}; there are "
                f"{', '.join(groups)}, and the variants bare and space"
            )
    taken = {key: groups[key] for key in dict.fromkeys(chosen or file.default_groups)}
    for variant in variants:
        taken = {key: replace(group, variant=cast(Variant, variant)) for key, group in taken.items()}
    size = sum(len(group.items) for group in taken.values())
    if size < file.min_tokens:
        raise UsageError(
            f"{path}: expected at least {file.min_tokens} words (`min_tokens`) in {', '.join(taken)}, got "
            f"{size}; take more groups"
        )
    return TokenSet(
        name=f"{file.name}:{','.join(dict.fromkeys(selected))}" if selected else file.name,
        role=role,
        min_tokens=file.min_tokens,
        groups=taken,
        digest=_digest(file.min_tokens, taken),
    )


def _digest(min_tokens: int, groups: dict[str, Group]) -> str:
    content = [min_tokens, [[name, group.require_all, group.texts()] for name, group in groups.items()]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
