"""Measured evidence that reports cite: worths in labelled questions, and slopes of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

#: Questions -> equivalent number of right/wrong labels, with its 95 % interval (192 small fine-tunes).
WORTH: dict[Literal["squares", "probability"], Mapping[int, tuple[int, int, int]]] = {
    "squares": {25: (16, 11, 25)},
    "probability": {5: (25, 20, 30), 10: (44, 34, 56), 25: (61, 45, 86)},
}
#: Gain in accuracy by racing all instead of the screen's list; 95 % interval; data.
LOST: tuple[float, float, float, str] | None = (
    *(0.001, 0.000, 0.002),
    "6 groups of 32 fine-tunes of small models, nothing on 6 groups of 24 random mixtures",
)
_ASKED = {"squares": "without answers", "probability": "scored by the probability of the right answer"}


def worth(figure: Literal["squares", "probability"], questions: int) -> str:
    """A sentence on the worth in labels of ``questions`` questions (or the next fewer measured), or ""."""
    count = max((count for count in WORTH[figure] if count <= questions), default=0)
    if not count:
        return ""
    labels, low, high = WORTH[figure][count]
    return (
        f"In our studies {count} questions {_ASKED[figure]} ordered small fine-tunes as well as {labels} "
        f"labels ({low} to {high})."
    )


# --- order by the ratio -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """How many ``cells`` (a group in a task) ``held`` one within 0.01 of the best in their short list.

    ``measured`` is the day. ``again``: the groups are parts of others that are counted already.
    """

    groups: str
    held: int
    cells: int
    measured: str
    again: bool = False


@dataclass(frozen=True)
class Slope:
    """How well ranks by the ratio order accuracies: the slope k of `lmeval_screener.chance`.

    Attributes:
        kind: The checkpoints on which it was measured, such as ``fine-tunes``.
        k: The slope.
        low, high: Its 95 % interval, over groups; for a user's own results, over checkpoints.
        spread: Standard deviation of k between cells, which are groups in a task.
        measured: The day of the measurement.
        groups: Number of groups; for a user's own results, of checkpoints.
        fresh: k with its interval by groups that were trained afterwards to test it.
        held: Counts of cells whose short list held one within 0.01 of the best.
        right: Upper chance of a bin, and the share of its pairs that were in the right order.
    """

    kind: str
    k: float
    low: float
    high: float
    spread: float
    measured: str
    groups: int
    fresh: tuple[float, float, float] | None = None
    held: tuple[Held, ...] = ()
    right: tuple[tuple[float, float], ...] = ()

    def was_right(self, chance: float) -> float | None:
        """Share of the measured pairs with about this chance in the right order; None if not measured."""
        return next((share for most, share in self.right if chance <= most), None)

    def counts(self, first: int, chance: float, places: int) -> str:
        """A sentence on the success of lists of ``first`` places and of pairs of this ``chance``, or ""."""
        right = self.was_right(chance)
        said = []
        if self.held and first < places:
            counted = [(row.held, row.cells) for row in self.held if not row.again]
            held, cells = map(sum, zip(*counted, strict=True))
            ranks = f"ranks 1–{first}" if first > 1 else "rank 1"
            said.append(
                f"such a list ({ranks}) held one within 0.01 of the best in {held} of {cells} groups and "
                "tasks"
            )
        if right is not None and places > 1:
            far = f"ranks 1 and {first if first > 1 else places}"
            said.append(f"{100 * right:.0f} of 100 pairs as far apart as {far} were in order")
        return f"Of our {self.kind}, {'; '.join(said)}." if said else ""


FINE_TUNES, FROM_SCRATCH = "fine-tunes", "models trained from scratch"
#: Kind -> slope. A group of unknown kind counts as fine-tunes, whose slope is smaller.
SLOPES = {
    slope.kind: slope
    for slope in (
        Slope(
            *(FINE_TUNES, 0.70, 0.47, 0.79, 0.35, "2026-11-23", 15, (0.80, 0.62, 1.05)),
            (
                Held("15 groups of 16 to 32 fine-tunes", 38, 44, "2026-11-23"),
                Held("6 fresh groups of 32 fine-tunes", 17, 18, "2026-11-24"),
                Held("20 draws of 8 of each of these", 346, 360, "2026-11-24", again=True),
            ),
            ((0.6, 0.58), (0.7, 0.68), (0.8, 0.76), (0.9, 0.83), (0.97, 0.89), (1.0, 0.94)),
        ),
        Slope(
            *(FROM_SCRATCH, 1.05, 1.03, 1.21, 0.25, "2026-11-23", 13, (0.98, 0.90, 1.09)),
            (
                Held("13 groups of random mixtures", 39, 39, "2026-11-23"),
                Held("6 fresh groups of 24 mixtures", 18, 18, "2026-11-24"),
                Held("20 draws of 8 of each of these", 340, 360, "2026-11-24", again=True),
            ),
            ((0.6, 0.62), (0.7, 0.72), (0.8, 0.81), (0.9, 0.88), (0.97, 0.94), (1.0, 0.99)),
        ),
    )
}
