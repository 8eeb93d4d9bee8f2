"""A training run watched as it goes: G of the domains from the head in memory, the spread of a fixed batch.

    trainer.add_callback(DispersionCallback(trainer, domains=["math"]))  # Trainer, TRL
    watcher = watch(model, tokenizer, domains=["math"], folder="run")  # any loop: watcher.step() each step

``dispersion watch FOLDER`` draws what was written. The names below are loaded when they are asked for: the
page needs no torch. Its modules are private.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {"DispersionCallback": "callback", "Watcher": "watcher", "watch": "watcher"}

__all__ = ["DispersionCallback", "Watcher", "watch"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
