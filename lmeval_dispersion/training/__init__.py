"""Dispersion losses for anyone's training loop: functions, hooks for any model, a Trainer, a command.

The names below are imported when they are asked for: settings and schedules do without torch. Its modules
are private, but for ``losses``.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "DispersionConfig": "trainer",
    "DispersionRegularizer": "regularizer",
    "DispersionTrainer": "trainer",
    "DispersionTrainerMixin": "trainer",
    "loss_named": "losses",
}

__all__ = [
    "DispersionConfig",
    "DispersionRegularizer",
    "DispersionTrainer",
    "DispersionTrainerMixin",
    "loss_named",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
