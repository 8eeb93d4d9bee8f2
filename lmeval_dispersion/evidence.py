"""How many labelled questions a figure is worth, and where that was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

PLACE = "docs/results/fine-tunes.md"
#: Questions without their answers, or scored by the probability of the right answer -> as many scored right
#: or wrong that ordered fine-tunes as well; nothing is said of what was not measured.
WORTH: dict[Literal["squares", "probability"], Mapping[int, int]] = {"squares": {}, "probability": {}}
_ASKED = {"squares": "without answers", "probability": "scored by the probability of the right answer"}


def worth(figure: Literal["squares", "probability"], questions: int) -> str:
    """What a figure over so many questions, or fewer, was worth; empty where that was not measured."""
    count = max((count for count in WORTH[figure] if count <= questions), default=0)
    if not count:
        return ""
    labels = WORTH[figure][count]
    return f"{count} questions {_ASKED[figure]} ordered fine-tunes as well as {labels} labels ({PLACE})."
