"""The lm-evaluation-harness plugin; its modules are private, its task class is loaded when it is needed."""

from __future__ import annotations

from typing import Any

__all__ = ["DispersionTask"]


def __getattr__(name: str) -> Any:
    if name == "DispersionTask":
        from lmeval_dispersion.harness.task import DispersionTask

        return DispersionTask
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
