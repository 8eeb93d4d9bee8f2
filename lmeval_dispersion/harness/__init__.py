"""The lm-evaluation-harness plugin: tasks that report representation dispersion beside their own metrics.

``DispersionTask`` is loaded when it is asked for, because it needs torch and lm-eval. Its modules are
private.
"""

from __future__ import annotations

from typing import Any

__all__ = ["DispersionTask"]


def __getattr__(name: str) -> Any:
    if name == "DispersionTask":
        from lmeval_dispersion.harness.task import DispersionTask

        return DispersionTask
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
