"""The number of labelled questions that a figure is worth, and where that was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

PLACE = "docs/results/fine-tunes.md"
#: Questions without their answers, or scored by the probability of the right answer -> as many scored right
#: or wrong that ordered 192 small fine-tunes as well, with the 95 % interval; for other figures nothing.
WORTH: dict[Literal["squares", "probability"], Mapping[int, tuple[int, int, int]]] = {
    "squares": {25: (16, 11, 25)},
    "probability": {5: (25, 20, 30), 10: (44, 34, 56), 25: (61, 45, 86)},
}
#: Accuracy that the best of all has above the best of the screen's third; 95 % interval; on what.
LOST: tuple[float, float, float, str] | None = (
    *(0.002, 0.000, 0.003),
    "4 groups of 32 fine-tunes of small models, 0.012 (0.001 to 0.029) on 6 older ones, "
    "0.000 (0.000 to 0.001) on 8 groups of 24 random mixtures (docs/results/race.md)",
)
_ASKED = {"squares": "without answers", "probability": "scored by the probability of the right answer"}


def worth(figure: Literal["squares", "probability"], questions: int) -> str:
    """The measured worth of a figure over so many questions or fewer; empty if not measured."""
    count = max((count for count in WORTH[figure] if count <= questions), default=0)
    if not count:
        return ""
    labels, low, high = WORTH[figure][count]
    return (
        f"{count} questions {_ASKED[figure]} ordered small fine-tunes as well as {labels} labels "
        f"({low} to {high}; {PLACE})."
    )
