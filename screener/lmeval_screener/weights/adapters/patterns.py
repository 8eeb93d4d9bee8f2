"""Which of PEFT's patterns for modules, those of ``alpha_pattern`` and ``rank_pattern``, matches a name.

PEFT takes the first key whose expression matches the whole name or its end, after a dot. An
expression may keep a backtracking engine busy for ever, and here it comes from a stranger's file: a
pattern is followed by sets of places, in time linear in its length times the name's. Expressions
beyond names, classes of characters, their repetition and alternatives are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import product
from typing import NamedTuple

#: A character of a pattern: an escaped sign, a class, any sign, or itself; then how often.
_ATOM = re.compile(
    r"(\\[dwDWsS]|\\[^A-Za-z0-9]|\[\^?\]?[^\[\]\\]*\]|[^\\()\[\]{}|*+?^$])([*+?]?)(?![*+?{])"
)
_GROUP = re.compile(r"\((?:\?:)?([^()\[\]]*)\)(?![*+?{])")
_LONGEST = 200  # characters of a pattern
_MOST = 32  # patterns without alternatives that come of one


class _Atom(NamedTuple):
    fits: Callable[[str], object]
    optional: bool
    repeated: bool


class UnknownPattern(ValueError):
    """A pattern of PEFT uses regular-expression syntax that is not supported.

    Supported are names, character classes, repetition and alternatives.
    """


def first_match(patterns: Iterable[str], module: str) -> str | None:
    """Return the first pattern that matches a module's name by PEFT's rules, or None.

    A pattern is a regular expression that must match the whole name, or its end after a dot.

    Args:
        patterns: The keys of ``alpha_pattern`` or ``rank_pattern``, in their order.
        module: The module's name, such as ``model.layers.0.self_attn.q_proj``.

    Raises:
        UnknownPattern: A pattern before the match is an expression that is not supported.
    """
    for pattern in patterns:
        if _matches(pattern, module):
            return pattern
    return None


def _matches(pattern: str, module: str) -> bool:
    r"""Whether ``(.*\.)?(PATTERN)$`` matches from the name's first character on."""
    anchored = pattern.startswith("^")
    starts = [0]
    if not anchored:
        starts += [place + 1 for place, sign in enumerate(module) if sign == "."]
    return any(_ends_at_end(atoms, module, starts) for atoms in _flat(pattern))


def _ends_at_end(atoms: list[_Atom], name: str, starts: list[int]) -> bool:
    """Whether the atoms take the name from one of ``starts`` to its end."""
    begins = set(starts)
    places: set[int] = set()
    for at in range(len(name) + 1):
        if at in begins:
            places.add(0)
        for place in sorted(places):
            while place < len(atoms) and atoms[place].optional:
                place += 1
                places.add(place)
        if at == len(name):
            break
        following = set()
        for place in places:
            if place < len(atoms) and atoms[place].fits(name[at]):
                following.add(place + 1)
                if atoms[place].repeated:
                    following.add(place)
        places = following
    return len(atoms) in places


def _flat(pattern: str) -> list[list[_Atom]]:
    """The atoms of every pattern without alternatives that comes of this one."""
    if len(pattern) > _LONGEST:
        raise UnknownPattern(pattern)
    inner = pattern.removeprefix("^")
    if inner.endswith("$") and not inner.endswith("\\$"):
        inner = inner.removesuffix("$")
    pieces = _GROUP.split(inner)
    choices = [piece.split("|") if place % 2 else [piece] for place, piece in enumerate(pieces)]
    if len(pieces) == 1 and inner == pattern:
        choices = [inner.split("|")]
    count = 1
    for options in choices:
        count *= len(options)
    if count > _MOST:
        raise UnknownPattern(pattern)
    return [_atoms("".join(parts), pattern) for parts in product(*choices)]


def _atoms(text: str, pattern: str) -> list[_Atom]:
    atoms = []
    place = 0
    while place < len(text):
        match = _ATOM.match(text, place)
        if match is None:
            raise UnknownPattern(pattern)
        sign, often = match.groups()
        try:
            fits = re.compile(sign, re.DOTALL).fullmatch
        except re.error as error:
            raise UnknownPattern(pattern) from error
        atoms.append(_Atom(fits, often in ("*", "?"), often in ("*", "+")))
        place = match.end()
    return atoms
