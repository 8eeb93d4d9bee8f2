"""What a case of the field is: an input as others leave it, and what a screening must say of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

#: Values of a checkpoint, ``gap`` and ``ratio``, each within 1e-6 of the figure that is reported.
Values = Mapping[str, float]


@dataclass(frozen=True)
class Expected:
    """What a screening of an input must give.

    Attributes:
        target: What the user names, below the case's folder; empty for the folder itself.
        options: Further words of the command line.
        values: Right values by the label's last part, the folder's name.
        refused: For a folder's name, words of its error: the cause, and the command that mends it.
        notes: For a folder's name, words that its notes must hold.
        silent: Words that nothing printed may hold.
        said: Words that the report or standard error must hold.
        order: Names in the order of their ranks; empty where it does not matter.
        set_aside: Names that must have no rank.
        copies: For a folder's name, the name of the checkpoint that it is a copy of.
        same_rank: For a folder's name, the name of the checkpoint whose rank it shares.
    """

    target: str = ""
    options: tuple[str, ...] = ()
    values: Mapping[str, Values] = field(default_factory=dict)
    refused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    set_aside: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    same_rank: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """An input, the public address of a report of it, and the function that makes it in a folder."""

    name: str
    source: str
    make: Callable[[Path], Expected]


class Cases(list[Case]):
    """Cases of one kind; the decorator of the functions that make them."""

    def case(
        self, source: str
    ) -> Callable[[Callable[[Path], Expected]], Callable[[Path], Expected]]:
        """Add a function that makes an input in an empty folder and returns what is expected of it."""

        def add(make: Callable[[Path], Expected]) -> Callable[[Path], Expected]:
            self.append(Case(make.__name__, source, make))
            return make

        return add
