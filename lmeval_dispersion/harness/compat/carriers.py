"""Values that carry through lm-eval's pipeline what it would drop.

Answers carry the states that came back with them. A group's metrics carry the vectors they were computed
from: lm-eval combines the tasks of a group by ``sum(value * size) / sum(sizes)`` and their errors by a pooled
variance, and a dispersion over all vectors is not a mean of the tasks' dispersions. So values are floats that
collect the vectors through exactly that arithmetic; :func:`check_groups` runs lm-eval's own group code first
and refuses to go on if it does not come out exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.metadata import version
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from lmeval_dispersion.errors import HarnessError

if TYPE_CHECKING:
    from lmeval_dispersion.harness.records import DocState

Parts = tuple[Any, ...]
Measure = Callable[[Parts], float]


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
    """The measure of ``parts`` as a float that comes out of lm-eval's group arithmetic as that of all parts.

    Args:
        parts: Whatever the measure takes; parts of several tasks are concatenated.
        measure: Function of parts.
        error: Whether lm-eval combines it as a standard error.
    """
    return (_PooledError if error else _PooledValue).of(parts, measure)


def check_groups() -> None:
    """Run lm-eval's group code on two made-up tasks and compare with the measure of all their parts.

    Raises:
        HarnessError: This lm-eval combines groups otherwise.
    """
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
