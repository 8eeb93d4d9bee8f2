"""The seams to lm-eval: all that works around it, and nothing else does.

lm-eval has no public way to do six things that a dispersion task needs. Each is done here, once:

===================================  ==================================================  ==================
a task needs                         what is done                                        upstream
===================================  ==================================================  ==================
a request type of its own            :func:`add_request_types`: methods on lm-eval's     issue 2871
                                     model classes
the tokens of a running batch        :func:`shadowed`: functions over one model's        issue 2871
                                     methods for a while
what the running evaluation knows,   :func:`surroundings`: the stack frames of the       issue 1119
and its end                          callers; ``dump_config``, asked for after the
                                     task's metrics, saves the run
states that come with answers        :func:`with_state`: answers that carry them         pull request 3988
                                                                                         would drop them
a group's figure over all documents  :func:`pooled`: floats that carry documents         issue 823,
                                     through lm-eval's average                           pull request 2198
tasks from two folders               :func:`more_tasks`: lm-eval's task manager with     pull request 4015
                                     one more folder
===================================  ==================================================  ==================

How a task scores its documents differs between generations of lm-eval: :mod:`.task_04` and :mod:`.task_05`
have a ``HookedTask`` each, and the rest of the harness does not ask which lm-eval is installed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM

from lmeval_dispersion.errors import HarnessError

if TYPE_CHECKING:
    from lmeval_dispersion.harness.records import DocState

Parts = tuple[Any, ...]
Measure = Callable[[Parts], float]


@dataclass(frozen=True)
class Surroundings:
    """The running evaluation as lm-eval knows it and does not hand it to tasks.

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


def add_request_types(
    methods: Mapping[str, Callable[..., Any]], refusal: Callable[..., Any], needed: Sequence[str]
) -> None:
    """Add methods to lm-eval's model for transformers; doing it twice changes nothing."""
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


def _same(value: Any) -> Any:
    return value


class _Answer:
    """Mixin of answers with a state; pickles as the plain answer, so that states travel only once."""

    plain: Any
    state: DocState
    filter: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self.plain,)


class _Tuple(_Answer, tuple):  # type: ignore[type-arg]
    pass


class _Text(_Answer, str):
    pass


class _Number(_Answer, float):
    pass


class _List(_Answer, list):  # type: ignore[type-arg]
    pass


class _Other(_Answer):
    def __init__(self, value: Any) -> None:
        self.plain = value

    def __repr__(self) -> str:
        return repr(self.plain)


def with_state(answer: Any, state: DocState, filter_name: str = "none") -> Any:
    """``answer`` as an equal object with its state, the filter it came through, and itself as ``.plain``."""
    carrier: type[_Answer] = _Other
    # bool and int stay out: a float would print differently where lm-eval logs the answer.
    for base, kind in ((tuple, _Tuple), (str, _Text), (float, _Number), (list, _List)):
        if isinstance(answer, base):
            carrier = kind
            break
    carried: Any = carrier(answer)  # type: ignore[call-arg]
    carried.plain = answer
    carried.state = state
    carried.filter = filter_name
    return carried


def state_of(answer: Any) -> DocState | None:
    """The state that an answer carries, or None."""
    return getattr(answer, "state", None) if isinstance(answer, _Answer) else None


def filter_of(answer: Any) -> str:
    """The filter that an answer came through."""
    return answer.filter if isinstance(answer, _Answer) else "none"


def plain(answer: Any) -> Any:
    """The answer without its state."""
    return answer.plain if isinstance(answer, _Answer) else answer


class _Pooled(float):
    """A float with the parts it was computed from and the measure that made it."""

    parts: Parts
    measure: Measure

    @classmethod
    def of(cls, parts: Parts, measure: Measure, value: float | None = None) -> Any:
        """The measure of ``parts``, or ``value`` on the way through lm-eval's arithmetic."""
        new = cls(measure(parts) if value is None else value)
        new.parts, new.measure = parts, measure
        return new

    def _underway(self, parts: Parts) -> Any:
        return self.of(parts, self.measure, math.nan)

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (float(self),)

    def __deepcopy__(self, _memo: Any) -> Any:
        return self

    def __mul__(self, other: Any) -> Any:
        return self._underway(self.parts)

    def __rmul__(self, other: Any) -> Any:
        return self * other

    def __pow__(self, other: Any, _mod: Any = None) -> Any:
        return self * other

    def __add__(self, other: Any) -> Any:
        if isinstance(other, _Pooled):
            return self._underway(self.parts + other.parts)
        return self if other == 0 else NotImplemented

    __radd__ = __add__


class _PooledValue(_Pooled):
    """A value; ``sum(value * size) / sum(sizes)`` of several is the measure of all their parts."""

    def __truediv__(self, other: Any) -> Any:
        return self.of(self.parts, self.measure)


class _PooledError(_Pooled):
    """An error; lm-eval's pooled or unweighted error of several is the measure of all their parts."""

    def __truediv__(self, other: Any) -> Any:
        return self if not math.isnan(self) else self._underway(self.parts)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """lm-eval's last step is numpy's square root: there the error of all parts is computed."""
        if ufunc is np.sqrt and method == "__call__" and inputs == (self,):
            return self.of(self.parts, self.measure)
        unwrapped = [float(i) if isinstance(i, _Pooled) else i for i in inputs]
        return getattr(ufunc, method)(*unwrapped, **kwargs)


def pooled(parts: Parts, measure: Measure, *, error: bool = False) -> Any:
    """The measure of ``parts`` as a float that lm-eval's group arithmetic turns into that of all parts."""
    return (_PooledError if error else _PooledValue).of(parts, measure)


def check_groups() -> None:
    """Run lm-eval's group code on two made-up tasks and compare with the measure of all their parts."""
    from lm_eval.api.group import Group
    from lm_eval.api.task import ConfigurableTask

    sizes = (3, 7)
    # No mean of the tasks' own values, weighted or not, gives this value of all parts.
    expected = _check_measure(sizes)
    try:
        for weigh in (True, False):
            group = Group.from_config(
                {
                    "group": "check",
                    "aggregate_metric_list": [{"metric": "dispersion", "weight_by_size": weigh}],
                }
            )
            results = {}
            for i, size in enumerate(sizes):
                leaf = object.__new__(ConfigurableTask)
                leaf._config = SimpleNamespace(task=f"leaf{i}", _qualified_name=None)
                group.add(leaf)
                results[f"leaf{i}"] = {
                    "dispersion,none": pooled((size,), _check_measure),
                    "dispersion_stderr,none": pooled((size,), _check_measure, error=True),
                    "sample_len": size,
                }
            combined = group.aggregate(results)
            got = float(combined["dispersion,none"]), float(combined["dispersion_stderr,none"])
            if got != (expected, expected):
                raise HarnessError(f"{got} instead of {(expected, expected)}")
    except Exception as error:
        what = str(error) if isinstance(error, HarnessError) else f"{type(error).__name__}: {error}"
        raise HarnessError(
            f"lm-eval {version('lm_eval')} combines the tasks of a group in a way that this version does not "
            f"know ({what}); run the tasks one by one, or use lm-eval 0.4.13"
        ) from error


def _check_measure(parts: Parts) -> float:
    return 1.0 + float(sum(parts)) ** 2
