"""The scale of a checkpoint: what a family states, what a name says, else the parameters, padding left out.

The rule, first match first:

1. the scale that the family file states;
2. a size in the repository's or folder's name (``-70m``, ``-7B``, ``-0.5B``), where the parameters that were
   counted are within a factor of two of it: nobody calls ``Qwen2.5-7B`` by its 7.6 billion;
3. the scale of a sibling that has one by 1 or 2 and as many parameters, to 4 %;
4. the count: the nearest scale of the bundled families, to 4 %, else two digits.

Counted are all parameters without the vocabulary's padding (rows beyond the tokenizer's last id, in both
vocabulary matrices). A fine-tune that adds or drops padding stays in the group of its siblings.
"""

from __future__ import annotations

import bisect
import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

_TOLERANCE = 0.04
_IN_NAME = re.compile(r"(?:^|[-_./])(?:(\d+)x)?(\d+(?:\.\d+)?)([kmb])(?=$|[-_./])", re.IGNORECASE)
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9}
# Scales that the bundled families lack.
_FURTHER = (
    *("1.3B", "4B", "9B", "13B", "20B", "27B", "30B", "34B", "40B", "65B", "104B", "110B", "123B", "180B"),
    *("235B", "405B", "671B"),
)


@dataclass(frozen=True, slots=True)
class Size:
    """What is known of a checkpoint's size.

    Attributes:
        name: Repository or folder.
        stated: Scale that the family states; None where none does.
        parameters: As stored, tied matrices once; None if not to be known.
        rows: Rows of the output projection.
        width: Its columns.
        tied: Whether it is the input embedding.
        vocabulary: Rows that the tokenizer names: its last id + 1.
    """

    name: str
    stated: str | None
    parameters: int | None
    rows: int
    width: int
    tied: bool
    vocabulary: int

    @property
    def count(self) -> int | None:
        """Parameters without the rows of padding; None if not to be known."""
        if self.parameters is None:
            return None
        padding = max(self.rows - self.vocabulary, 0) * self.width * (1 if self.tied else 2)
        return self.parameters - padding if self.parameters > padding else None

    @property
    def counts(self) -> tuple[int, ...]:
        """The count, and where the matrices are not tied also that without the second vocabulary matrix.

        Published names follow either: Pythia-70m has 70 million with both, Qwen2.5-7B 7.07 billion without
        its head; and a distilled sibling that was untied stays in its group.
        """
        if self.count is None:
            return ()
        second = 0 if self.tied else min(self.rows, self.vocabulary) * self.width
        return (self.count, self.count - second) if 0 < second < self.count else (self.count,)


def scale_names(sizes: Sequence[Size]) -> list[str]:
    """The scale of each of some checkpoints of one tokenizer, such as ``0.5B`` or ``70M``; ``unknown``.

    >>> pythia = Size("EleutherAI/pythia-70m", None, 70_426_624, 50304, 512, False, 50277)
    >>> copy = Size("./mine", None, 70_426_624 + 2 * 1024 * 512, 51328, 512, False, 50277)
    >>> scale_names([pythia, copy]), scale_names([copy])
    (['70M', '70M'], ['70M'])
    """
    named = [size.stated or _of_name(size) for size in sizes]
    # Sorted by their counts, so that the nearest of thousands is found at once.
    siblings = sorted(
        {
            (math.log(count), name)
            for size, name in zip(sizes, named, strict=True)
            if name is not None
            for count in size.counts[-1:]
        }
    )
    return [
        name or _of_sibling(size, siblings) or _of_count(size)
        for size, name in zip(sizes, named, strict=True)
    ]


def _of_name(size: Size) -> str | None:
    """The size in a name nearest to the count; None where none is, or all are off by more than twice."""
    last = size.name.replace("\\", "/").rstrip("/").rpartition("/")[2]
    found: list[tuple[float, str]] = []
    for experts, number, unit in _IN_NAME.findall(last):
        value = float(number) * _UNITS[unit.upper()] * int(experts or 1)
        if value:
            label = f"{experts}x{float(number):g}{unit.upper()}" if experts else _label(value)
            off = min((abs(math.log(count / value)) for count in size.counts), default=0.0)
            found.append((off, label))
    if not found or min(found)[0] > math.log(2):
        return None
    return min(found)[1]


def _of_sibling(size: Size, siblings: Sequence[tuple[float, str]]) -> str | None:
    """The name of the sibling nearest in the logarithm of its count, within the tolerance."""
    for count in size.counts[-1:]:  # without the second matrix: an untied copy is still a sibling
        own = math.log(count)
        at = bisect.bisect_left(siblings, (own,))
        near = [(abs(own - other), name) for other, name in siblings[max(at - 1, 0) : at + 2]]
        # The smaller name of two that are equally far, however many share a count.
        if at > 0:
            first = bisect.bisect_left(siblings, (siblings[at - 1][0],))
            near.append((abs(own - siblings[first][0]), siblings[first][1]))
        if near and min(near)[0] <= _TOLERANCE:
            return min(near)[1]
    return None


def _of_count(size: Size) -> str:
    for count in size.counts:
        value = min(_table(), key=lambda known: abs(math.log(count / known)))
        if abs(count / value - 1) <= _TOLERANCE:
            return _table()[value]
    return _label(size.counts[-1]) if size.counts else "unknown"


def _label(value: float) -> str:
    """A size as the bundled families spell it, else in two digits (above 2 billion: in whole billions)."""
    if (known := _table().get(value)) is not None:
        return known
    if value >= 2e9:
        return f"{value / 1e9:.0f}B" if value % 1e8 else f"{value / 1e9:g}B"
    if value >= 0.95e9:
        return f"{value / 1e9:.1f}B"
    unit = "M" if value >= 1e6 else "K"
    return f"{float(f'{value / _UNITS[unit]:.2g}'):g}{unit}"


@functools.cache
def _table() -> dict[float, str]:
    """Parameters → scale, of all bundled families."""
    from lmeval_screener.targets.selection import load_families

    scales = {scale for family in load_families().values() for scale in family.scales}
    # Counts alone cannot tell Pythia's 6.9B from the many 7B; by name it keeps its own.
    return {float(scale[:-1]) * _UNITS[scale[-1]]: scale for scale in (*scales - {"6.9B"}, *_FURTHER)}
