"""The running evaluation: what it knows, request types for its model, methods shadowed for a while."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM

from lmeval_dispersion.errors import HarnessError


@dataclass(frozen=True)
class Surroundings:
    """What lm-eval knows of the running evaluation and does not hand to tasks.

    Every value may be None, so nothing here may decide a metric: it serves early refusals, the place of the
    store, and notes in its manifest.

    Attributes:
        lm: The model under evaluation, out of the wrapper that ``--use_cache`` puts around it.
        groups: Group name -> lm-eval's Group; None where it was not found, {} where there are none.
        tracker: lm-eval's EvaluationTracker, which knows ``--output_path``.
        model_args: ``--model_args`` as given.
        limit: ``--limit`` as given.
        fewshot_seed: Seed of the choice of few-shot examples.
        command_line: Whether lm-eval's own command runs, which ends with the process.
    """

    lm: Any = None
    groups: dict[str, Any] | None = None
    tracker: Any = None
    model_args: Any = None
    limit: Any = None
    fewshot_seed: Any = None
    command_line: bool = False

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
    """Read what lm-eval's ``evaluate`` and ``simple_evaluate`` know, if they are among the callers."""
    found: dict[str, Any] = {}
    frame = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("lm_eval."):
            scope = frame.f_locals
            if module.startswith(("lm_eval._cli", "lm_eval.__main__")):
                found["command_line"] = True
            elif frame.f_code.co_name == "evaluate" and "lm" in scope and "lm" not in found:
                found["lm"] = getattr(scope["lm"], "lm", scope["lm"])
                found["groups"] = scope.get("groups")
                found["limit"] = scope.get("limit_arg", scope.get("limit"))
            elif frame.f_code.co_name == "simple_evaluate" and "tracker" not in found:
                found["tracker"] = scope.get("evaluation_tracker")
                found["model_args"] = scope.get("model_args")
                found["limit"] = scope.get("limit")
                found["fewshot_seed"] = scope.get("fewshot_random_seed")
        frame = frame.f_back  # type: ignore[assignment]
    return Surroundings(**found)


def add_request_types(
    methods: Mapping[str, Callable[..., Any]], refusal: Callable[..., Any], needed: Sequence[str]
) -> None:
    """Add methods to lm-eval's model for transformers; doing it twice changes nothing.

    Args:
        methods: Request type -> method of HFLM. Its own methods stay as they are.
        refusal: Method that all other model classes get for each type.
        needed: Attributes of HFLM that the methods stand on.

    Raises:
        HarnessError: This lm-eval lacks one of them.
    """
    missing = [name for name in needed if not hasattr(HFLM, name)]
    if missing:
        raise HarnessError(
            f"lm-eval {version('lm_eval')} has no HFLM.{missing[0]}, which dispersion tasks need; "
            "install lm-eval 0.4.13 or a newer lmeval-dispersion"
        )
    for name, method in methods.items():
        setattr(LM, name, refusal)
        setattr(HFLM, name, method)


@contextmanager
def shadowed(lm: Any, replacements: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Put functions over methods of one model object; its own come back afterwards, whatever happens.

    Args:
        lm: lm-eval's model object.
        replacements: Name of a method -> function called in its place with the method as first argument.
    """
    own = {name: lm.__dict__[name] for name in replacements if name in lm.__dict__}
    try:
        for name, replacement in replacements.items():
            setattr(lm, name, partial(replacement, getattr(lm, name)))
        yield
    finally:
        for name in replacements:
            lm.__dict__.pop(name, None)
        lm.__dict__.update(own)


@contextmanager
def more_tasks(folder: Path | None) -> Iterator[None]:
    """Let lm-eval, which takes one ``--include_path``, find the tasks in ``folder`` beside the user's."""
    from lm_eval.tasks import TaskManager

    original = TaskManager.__init__

    def with_ours(self: Any, verbosity: Any = None, include_path: Any = None, **options: Any) -> None:
        given = include_path if isinstance(include_path, list | tuple) else [include_path]
        original(self, verbosity, [folder, *(path for path in given if path)], **options)

    try:
        if folder is not None:
            TaskManager.__init__ = with_ours
        yield
    finally:
        TaskManager.__init__ = original
