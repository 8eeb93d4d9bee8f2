"""The seams to lm-eval: all that works around it, and nothing else does.

lm-eval has no public way to do five things that a dispersion task needs. Each is done here, once:

===================================  ==================================================  ==================
a task needs                         what is done                                        upstream
===================================  ==================================================  ==================
a request type of its own            :func:`add_request_types`: methods on lm-eval's     issue 2871
                                     model for transformers
the tokens of a running batch        :func:`shadowed`: functions over one model's        issue 2871
                                     methods for a while
what the running evaluation knows,   :func:`surroundings`: the stack frames of the       issue 1119
and its end                          callers; ``dump_config``, asked for after the
                                     task's metrics, saves the run
a group's figure over all documents  :func:`pool_groups`: lm-eval's group computes it    issue 823,
                                     from floats that know their documents               pull request 2198
tasks from two folders               :func:`more_tasks`: lm-eval's task manager with     pull request 4015
                                     one more folder
===================================  ==================================================  ==================

How a task scores its documents differs between generations of lm-eval: the module of the
task has a base class for each, and the rest of the harness does not ask which lm-eval is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lm_eval.api.group import Group
from lm_eval.models.huggingface import HFLM

from lmeval_dispersion.errors import HarnessError

Parts = tuple[Any, ...]


@dataclass(frozen=True)
class Surroundings:
    """The running evaluation as lm-eval knows it and does not hand it to tasks.

    Every value may be None: nothing here may decide a metric.
    """

    lm: Any = None  # the model under evaluation, out of the wrapper that --use_cache puts around it
    groups: dict[str, Any] | None = None  # name -> lm-eval's Group
    tracker: Any = None  # lm-eval's EvaluationTracker, which knows --output_path
    model_args: Any = None  # as given
    limit: Any = None  # as given
    fewshot_seed: Any = None
    command_line: bool = False  # whether lm-eval's own command runs, which ends with the process

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
    known: dict[str, Any] = {}
    frame = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("lm_eval."):
            scope = frame.f_locals
            if module.startswith(("lm_eval._cli", "lm_eval.__main__")):
                known["command_line"] = True
            elif frame.f_code.co_name == "evaluate" and "lm" in scope and "lm" not in known:
                known["lm"] = getattr(scope["lm"], "lm", scope["lm"])
                known["groups"] = scope.get("groups")
                known["limit"] = scope.get("limit_arg", scope.get("limit"))
            elif frame.f_code.co_name == "simple_evaluate" and "tracker" not in known:
                known["tracker"] = scope.get("evaluation_tracker")
                known["model_args"] = scope.get("model_args")
                known["limit"] = scope.get("limit")
                known["fewshot_seed"] = scope.get("fewshot_random_seed")
        frame = frame.f_back  # type: ignore[assignment]
    return Surroundings(**known)


def add_request_types(methods: Mapping[str, Callable[..., Any]], needed: Sequence[str]) -> None:
    """Add methods to lm-eval's model for transformers; doing it twice changes nothing."""
    missing = [f"HFLM.{name}" for name in needed if not hasattr(HFLM, name)]
    missing += [f"Group.{name}" for name in ("aggregate", "get_all_tasks") if not hasattr(Group, name)]
    if missing:
        raise HarnessError(
            f"lm-eval {version('lm_eval')} has no {missing[0]}, which dispersion tasks need; "
            "install lm-eval 0.4.13 or a newer lmeval-dispersion"
        )
    for name, method in methods.items():
        setattr(HFLM, name, method)


@contextmanager
def shadowed(lm: Any, replacements: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Put functions over methods of one model object; its own come back afterwards, whatever happens."""
    originals = {name: lm.__dict__[name] for name in replacements if name in lm.__dict__}
    try:
        for name, replacement in replacements.items():
            setattr(lm, name, partial(replacement, getattr(lm, name)))
        yield
    finally:
        for name in replacements:
            lm.__dict__.pop(name, None)
        lm.__dict__.update(originals)


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


class Pooled(float):
    """A task's figure with the documents behind it and the measure that made it; it pickles as a float."""

    parts: Parts
    measure: Callable[[Parts], float]

    @classmethod
    def of(cls, parts: Parts, measure: Callable[[Parts], float]) -> Pooled:
        """The measure of ``parts``."""
        figure = cls(measure(parts))
        figure.parts, figure.measure = parts, measure
        return figure

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (float(self),)


def pool_groups() -> None:
    """Make a group's figure of ours that of all its tasks' documents, where lm-eval takes an average."""
    original = Group.aggregate
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def aggregate(self: Any, task_metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        # Without our errors, whose average lm-eval would divide by zero where tasks have one document.
        others = {
            name: {key: v for key, v in metrics.items() if "_stderr" not in key or not isinstance(v, Pooled)}
            for name, metrics in task_metrics.items()
        }
        combined: dict[str, Any] = original(self, others)
        # 0.5 puts a group's name before its tasks'.
        names = [getattr(task, "_qualified_name", None) or task.task_name for task in self.get_all_tasks()]
        for key in combined:
            figures = [task_metrics[name].get(key) for name in names if name in task_metrics]
            pooled = [figure for figure in figures if isinstance(figure, Pooled)]
            if pooled:
                combined[key] = pooled[0].measure(tuple(part for figure in pooled for part in figure.parts))
        return combined

    Group.aggregate = aggregate
