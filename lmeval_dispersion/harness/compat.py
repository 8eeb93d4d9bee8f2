"""What lm-eval knows of the running evaluation and does not hand to tasks, read from its stack frames.

Read-only, and every value may be None: lm-eval has no interface for this yet, so nothing that is found here
may decide a figure. It serves early refusals, the place of the store, and notes in its manifest.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Surroundings:
    """What was found.

    Attributes:
        lm: The model under evaluation.
        groups: Group name -> lm-eval's Group; None where it was not found, {} where there are none.
        tracker: lm-eval's EvaluationTracker, which knows ``--output_path``.
        model_args: ``--model_args`` as given.
        limit: ``--limit`` as given.
    """

    lm: Any = None
    groups: dict[str, Any] | None = None
    tracker: Any = None
    model_args: Any = None
    limit: Any = None

    def category(self, task: str) -> str | None:
        """Alias of the group that holds ``task`` directly; None without one."""
        for name, group in (self.groups or {}).items():
            if any(getattr(child, "task_name", None) == task for child in group):
                return str(getattr(group, "alias", None) or name)
        return None

    def output_folder(self) -> Path | None:
        """The folder, a model's own, that lm-eval will write its results to; None without one."""
        output = getattr(self.tracker, "output_path", None)
        if not output:
            return None
        path = Path(str(output))
        if path.suffix == ".json":
            return path.parent
        model = getattr(getattr(self.tracker, "general_config_tracker", None), "model_name_sanitized", None)
        return path / str(model) if model else path


def surroundings() -> Surroundings:
    """Look for lm-eval's ``evaluate`` and ``simple_evaluate`` among the callers."""
    found: dict[str, Any] = {}
    frame = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("lm_eval."):
            scope = frame.f_locals
            if frame.f_code.co_name == "evaluate" and "lm" in scope and "lm" not in found:
                found["lm"] = scope["lm"]
                found["groups"] = scope.get("groups")
                found["limit"] = scope.get("limit_arg", scope.get("limit"))
            elif frame.f_code.co_name == "simple_evaluate":
                found["tracker"] = scope.get("evaluation_tracker")
                found["model_args"] = scope.get("model_args")
                found["limit"] = scope.get("limit")
                break
        frame = frame.f_back  # type: ignore[assignment]
    return Surroundings(**found)
