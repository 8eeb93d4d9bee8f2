"""Figures that lm-eval can average: a group's figure is then that of all its documents, not a mean of means.

lm-eval combines the sub-tasks of a group by ``sum(value * size) / sum(sizes)`` and their errors by a pooled
variance. Values here are floats that carry references to their vectors through exactly that arithmetic;
:func:`check_groups` runs lm-eval's own group code on two small tasks and refuses to go on if it does not come
out exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import HarnessError
from lmeval_dispersion.geometry import Estimate, dispersion_estimate, streamed_dispersion_estimate

# A matrix of raw vectors (n, d) and the indices of the rows that count.
Part = tuple[NDArray[np.float32], NDArray[np.int64]]

_BLOCK = 4096
_latest: list[tuple[tuple[Part, ...], Estimate]] = []  # a value and its error ask for the same one


def estimate(parts: tuple[Part, ...]) -> Estimate:
    """Dispersion over the rows of all parts with its jackknife error; NaN below two rows."""
    for known, found in _latest:
        if len(known) == len(parts) and all(
            a[0] is b[0] and a[1] is b[1] for a, b in zip(known, parts, strict=True)
        ):
            return found
    found = _estimate(parts)
    _latest[:] = [(parts, found), *_latest[:5]]
    return found


def _estimate(parts: tuple[Part, ...]) -> Estimate:
    n = sum(len(rows) for _, rows in parts)
    if n < 2:
        return Estimate(math.nan, math.nan, n)

    def blocks() -> Iterator[NDArray[np.float32]]:
        for matrix, rows in parts:
            for i in range(0, len(rows), _BLOCK):
                yield matrix[rows[i : i + _BLOCK]]

    return streamed_dispersion_estimate(blocks)


class _Carrying(float):
    """A float with the parts it was computed from. Use :class:`PooledDispersion` or :class:`PooledError`."""

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, parts: tuple[Part, ...]) -> Any:
        """The figure of ``parts``."""
        return cls._carrying(cls._figure(estimate(parts)), parts)

    @staticmethod
    def _figure(found: Estimate) -> float:
        raise NotImplementedError

    @classmethod
    def _carrying(cls, value: float, parts: tuple[Part, ...]) -> Any:
        new = cls(value)
        new.parts = parts
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (float(self),)

    def __deepcopy__(self, _memo: Any) -> Any:
        return self

    def __mul__(self, other: Any) -> Any:
        return self._carrying(math.nan, self.parts)

    def __rmul__(self, other: Any) -> Any:
        return self * other

    def __pow__(self, other: Any, _mod: Any = None) -> Any:
        return self * other

    def __add__(self, other: Any) -> Any:
        if isinstance(other, _Carrying):
            return self._carrying(math.nan, self.parts + other.parts)
        return self if other == 0 else NotImplemented

    __radd__ = __add__


class PooledDispersion(_Carrying):
    """A dispersion; ``sum(value * size) / sum(sizes)`` of several is the dispersion of all their vectors."""

    @staticmethod
    def _figure(found: Estimate) -> float:
        return found.mean

    def __truediv__(self, other: Any) -> Any:
        return self.of(self.parts)


class PooledError(_Carrying):
    """A jackknife error; lm-eval's pooled or unweighted error of several is that of all their vectors."""

    @staticmethod
    def _figure(found: Estimate) -> float:
        return found.se

    def __truediv__(self, other: Any) -> Any:
        return self if not math.isnan(self) else self._carrying(math.nan, self.parts)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """lm-eval's last step is numpy's square root: there the error of all vectors is computed."""
        if ufunc is np.sqrt and method == "__call__" and inputs == (self,):
            return self.of(self.parts)
        plain = [float(i) if isinstance(i, _Carrying) else i for i in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)


def check_groups() -> None:
    """Run lm-eval's group code on two made-up tasks and compare with the figures of all vectors.

    Raises:
        HarnessError: This lm-eval combines groups otherwise.
    """
    from lm_eval.api.group import Group
    from lm_eval.api.task import ConfigurableTask

    rng = np.random.default_rng(0)
    matrices = [rng.normal(1.0, 1.0, (n, 4)).astype(np.float32) for n in (3, 7)]
    expected = dispersion_estimate(np.concatenate(matrices))
    figures: dict[str, Any] = {}
    try:
        for weigh in (True, False):
            group = Group.from_config(
                {
                    "group": "check",
                    "aggregate_metric_list": [{"metric": "dispersion", "weight_by_size": weigh}],
                }
            )
            results = {}
            for i, matrix in enumerate(matrices):
                part = ((matrix, np.arange(len(matrix))),)
                leaf = object.__new__(ConfigurableTask)
                leaf._config = SimpleNamespace(task=f"leaf{i}")
                group.add(leaf)
                results[f"leaf{i}"] = {
                    "dispersion,none": PooledDispersion.of(part),
                    "dispersion_stderr,none": PooledError.of(part),
                    "sample_len": len(matrix),
                }
            figures = group.aggregate(results)
            good = math.isclose(figures["dispersion,none"], expected.mean, rel_tol=1e-9) and math.isclose(
                figures["dispersion_stderr,none"], expected.se, rel_tol=1e-9
            )
            if not good:
                break
    except Exception as error:
        raise HarnessError(_unknown_groups(f"{type(error).__name__}: {error}")) from error
    if not good:
        got = figures["dispersion,none"], figures["dispersion_stderr,none"]
        raise HarnessError(_unknown_groups(f"{got} instead of {(expected.mean, expected.se)}"))


def _unknown_groups(what: str) -> str:
    return (
        f"lm-eval {version('lm_eval')} combines the tasks of a group in a way that this version does not "
        f"know ({what}); run the tasks one by one, or use lm-eval 0.4.13"
    )
