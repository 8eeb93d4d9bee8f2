"""How the weight of a loss changes over a run."""

from __future__ import annotations

import math
from typing import Literal

from lmeval_dispersion.errors import UsageError

Schedule = Literal["constant", "linear", "cosine"]
SCHEDULES: tuple[Schedule, ...] = ("constant", "linear", "cosine")


def weight_factor(step: int, total: int, schedule: Schedule = "constant", warmup: int = 0) -> float:
    """Factor of the weight at a step, in [0, 1].

    Args:
        step: Number of the step, from 0.
        total: Number of steps of the run.
        schedule: ``constant``: 1. ``linear``: rises over ``warmup`` steps from 1/warmup to 1 and stays
            (warmup 0: over the whole run). ``cosine``: the same rise over ``warmup`` steps, then down to 0
            along half a cosine.
        warmup: Steps of the rise; ignored by ``constant``.

    Raises:
        UsageError: There is no such schedule.

    >>> [weight_factor(step, 4, "linear", 2) for step in range(4)]
    [0.5, 1.0, 1.0, 1.0]
    """
    if schedule == "constant":
        return 1.0
    if schedule == "linear":
        return min(1.0, (step + 1) / (warmup or total))
    if schedule == "cosine":
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))
    raise UsageError(f"expected a schedule of {', '.join(SCHEDULES)}, got {schedule!r}")
