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
from typing import Literal, cast

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.paths import data_folder
from lmeval_screener.yaml_fields import Fields, load_yaml, nearest

Role = Literal["domain", "reference"]
Variant = Literal["bare", "space"]

_VARIANTS = ("bare", "space")
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
        name: The group's name, as ``--domain SET:GROUP`` selects it.
        variant: ``bare`` looks ``7`` up, ``space`` looks ``␣the`` up.
        case: What is done to an item first: ``exact``, ``lower``, ``upper`` or ``title``.
        items: Surface forms without a leading space, all different.
        require_all: A vocabulary that lacks one of the items is refused.
        optional: Taken only when it is selected by name.
    """

    name: str
    variant: Variant
    case: str
    items: tuple[str, ...]
    require_all: bool = False
    optional: bool = False

    def texts(self) -> list[str]:
        """The surface forms that are looked up, leading space included, in the order of ``items``."""
        space = " " if self.variant == "space" else ""
        return [space + _CASES[self.case](item) for item in self.items]


@dataclass(frozen=True)
class TokenSet:
    """A domain's (T) or the reference's (R) words.

    Attributes:
        name: What reports call the set; with selected groups ``math:digits,operators``.
        role: ``domain`` or ``reference``.
        min_tokens: The set is refused where fewer of its words resolve.
        groups: The groups that *are* taken, by name, in order.
        source: The file.
        digest: sha256 over all that decides a resolution (not over notes).
    """

    name: str
    role: Role
    min_tokens: int
    groups: dict[str, Group]
    source: str
    digest: str


def bundled_token_sets() -> list[str]:
    """Names of the token sets that come with the package, sorted."""
    return sorted(path.stem for path in data_folder("token_sets").glob("*.yaml"))


def described_groups(name: str) -> list[tuple[Role, Group, bool]]:
    """Every group of a bundled set: the set's role, the group, and whether it is taken unnamed."""
    fields = load_yaml(data_folder("token_sets") / f"{name}.yaml")
    role = cast(Role, fields.choice("role", ("domain", "reference")))
    groups, defaults = fields.mapping("groups"), fields.texts("default_groups")
    return [(role, _group(key, groups.mapping(key)), key in defaults) for key in groups]


def load_token_set(name_or_path: str, role: Role = "domain") -> TokenSet:
    """A token set by name, by file, or with chosen groups.

    Args:
        name_or_path: ``math`` (bundled), ``my.yaml`` (a file), and either with ``:group1,group2`` to take
            these groups in place of the file's defaults; ``bare`` or ``space`` among them looks all words up
            in that variant.
        role: What the set is to be used as.

    Raises:
        UsageError: No such set or file, an unknown group, another role, or a mistake in the file; the message
            names file, key, expected and given.
    """
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
    fields = load_yaml(path)
    fields.only(("schema", "name", "role", "default_groups", "min_tokens", "groups", "sources", "notes"))
    name = fields.text("name")
    given = cast(Role, fields.choice("role", ("domain", "reference")))
    groups_of_file = fields.mapping("groups")
    groups = {key: _group(key, groups_of_file.mapping(key)) for key in groups_of_file}
    defaults = fields.texts("default_groups")
    for position, default in enumerate(defaults):
        if default not in groups:
            raise fields.error(
                f"default_groups[{position}]", f"one of the groups {', '.join(groups)}", default
            )
        if groups[default].optional:
            raise fields.error(f"default_groups[{position}]", "a group that is not optional", default)
    min_tokens = fields.integer("min_tokens", low=2)
    if given != role:
        raise fields.error("role", f"{role} (it is used as the {role} set)", given)
    # A group of that name wins: it is the file's own word.
    variants = [name for name in selected or () if name in _VARIANTS and name not in groups]
    if len(variants) > 1:
        raise UsageError(f"{path}: expected one variant, got {' and '.join(variants)}; take one")
    chosen = [group for group in selected or () if group not in variants]
    for group in chosen:
        if group not in groups:
            raise UsageError(
                f"{path}: there is no group {group!r}{nearest(group, groups)}; there are "
                f"{', '.join(groups)}, and the variants bare and space"
            )
    taken = {key: groups[key] for key in dict.fromkeys(chosen or defaults)}
    for variant in variants:
        taken = {key: replace(group, variant=cast(Variant, variant)) for key, group in taken.items()}
    size = sum(len(group.items) for group in taken.values())
    if size < min_tokens:
        raise UsageError(
            f"{path}: expected at least {min_tokens} words (`min_tokens`) in {', '.join(taken)}, got {size}; "
            "take more groups"
        )
    return TokenSet(
        name=f"{name}:{','.join(dict.fromkeys(selected))}" if selected else name,
        role=role,
        min_tokens=min_tokens,
        groups=taken,
        source=str(path),
        digest=_digest(min_tokens, taken),
    )


def _group(name: str, fields: Fields) -> Group:
    fields.only(("variant", "case", "require_all", "optional", "items"))
    items = fields.texts("items")
    for position, item in enumerate(items):
        if item != item.strip():
            raise fields.error(
                f"items[{position}]", "a word without spaces around it", item, "use `variant: space`"
            )
        if not item.isprintable():
            raise fields.error(f"items[{position}]", "printable signs", item)
    return Group(
        name=name,
        variant=cast(Variant, fields.choice("variant", _VARIANTS)),
        case=fields.choice("case", tuple(_CASES), default="exact"),
        items=items,
        require_all=fields.flag("require_all"),
        optional=fields.flag("optional"),
    )


def _digest(min_tokens: int, groups: dict[str, Group]) -> str:
    content = [min_tokens, [[name, group.require_all, group.texts()] for name, group in groups.items()]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
