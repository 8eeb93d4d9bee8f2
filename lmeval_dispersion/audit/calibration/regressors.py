"""Regressions from dispersion to accuracy that can be written down as numbers and evaluated without sklearn.

Each is fitted by scikit-learn or numpy and keeps plain parameters, from which alone it predicts: a prediction
made later from a file is the one that was judged. A random forest of one variable is a step function: it is
written as its steps, which is exact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.statistics import rank_correlations

if TYPE_CHECKING:
    from typing_extensions import Self

Array = NDArray[np.float64]

_TREES, _LEAF = 50, 10


class Regression(ABC):
    """A fitted regression; its fields are its parameters, plain numbers and lists."""

    kind: ClassVar[str]

    @classmethod
    @abstractmethod
    def fit(cls, dispersion: Array, accuracy: Array, *, seed: int = 0) -> Self:
        """Fit to pairs of dispersion and accuracy, both (n,)."""

    def predict(self, dispersion: ArrayLike) -> Array:
        """Accuracy in [0, 1] for each dispersion."""
        return np.asarray(np.clip(self._value(np.asarray(dispersion, dtype=np.float64)), 0.0, 1.0))

    def parameters(self) -> dict[str, Any]:
        """What :func:`regression_of` takes back."""
        return {"kind": self.kind, **asdict(self)}  # type: ignore[call-overload]

    @abstractmethod
    def _value(self, dispersion: Array) -> Array: ...


@dataclass(frozen=True)
class Linear(Regression):
    """A straight line."""

    kind: ClassVar[str] = "linear"
    degree: ClassVar[int] = 1

    centre: float
    scale: float
    coefficients: list[float]

    @classmethod
    def fit(cls, dispersion: Array, accuracy: Array, *, seed: int = 0) -> Self:
        """Least squares on the standardised dispersion; fewer distinct values lower the degree."""
        centre, scale = _standard(dispersion)
        usable = min(cls.degree, len(np.unique(dispersion)) - 1)
        found = np.polynomial.polynomial.polyfit((dispersion - centre) / scale, accuracy, usable)
        return cls(centre, scale, [float(c) for c in found])

    def _value(self, dispersion: Array) -> Array:
        coefficients = np.asarray(self.coefficients, dtype=np.float64)
        x = (dispersion - self.centre) / self.scale
        return np.asarray(np.polynomial.polynomial.polyval(x, coefficients))


@dataclass(frozen=True)
class Polynomial(Linear):
    """A cubic."""

    kind: ClassVar[str] = "polynomial"
    degree: ClassVar[int] = 3


@dataclass(frozen=True)
class Isotonic(Regression):
    """A curve that only rises or only falls: straight lines through its points, constant outside."""

    kind: ClassVar[str] = "isotonic"

    dispersion: list[float]
    accuracy: list[float]

    @classmethod
    def fit(cls, dispersion: Array, accuracy: Array, *, seed: int = 0) -> Self:
        """scikit-learn's isotonic regression, in the direction of the rank correlation."""
        from sklearn.isotonic import IsotonicRegression

        rising = not rank_correlations(dispersion, accuracy[None])[0] < 0  # a constant counts as rising
        model = IsotonicRegression(increasing=rising, out_of_bounds="clip").fit(dispersion, accuracy)
        return cls(model.X_thresholds_.tolist(), model.y_thresholds_.tolist())

    def _value(self, dispersion: Array) -> Array:
        return np.asarray(np.interp(dispersion, self.dispersion, self.accuracy))


@dataclass(frozen=True)
class RandomForest(Regression):
    """Fifty trees of one variable as the one step function that they are."""

    kind: ClassVar[str] = "random forest"

    centre: float
    scale: float
    steps: list[float]
    accuracy: list[float]

    @classmethod
    def fit(cls, dispersion: Array, accuracy: Array, *, seed: int = 0) -> Self:
        """scikit-learn's random forest on the standardised dispersion."""
        from sklearn.ensemble import RandomForestRegressor

        centre, scale = _standard(dispersion)
        # sklearn's trees compare float32 values; the same rounding here and in `_value` keeps it exact.
        rows = ((dispersion - centre) / scale).astype(np.float32)[:, None]
        model = RandomForestRegressor(n_estimators=_TREES, min_samples_leaf=_LEAF, random_state=seed)
        model.fit(rows, accuracy)
        splits = np.concatenate([e.tree_.threshold[e.tree_.feature >= 0] for e in model.estimators_])
        steps = splits.astype(np.float32)
        # x <= t holds for the same float32 numbers x as x <= (the largest float32 that is at most t).
        steps = np.where(steps > splits, np.nextafter(steps, np.float32(-np.inf)), steps)
        steps = np.unique(steps)
        values = model.predict(np.append(steps, np.float32(np.inf))[:, None].clip(max=np.float32(1e30)))
        return cls(centre, scale, steps.tolist(), values.tolist())

    def _value(self, dispersion: Array) -> Array:
        x = ((dispersion - self.centre) / self.scale).astype(np.float32)
        steps = np.asarray(self.steps, dtype=np.float32)
        return np.asarray(self.accuracy, dtype=np.float64)[np.searchsorted(steps, x, side="left")]


REGRESSIONS: dict[str, type[Regression]] = {r.kind: r for r in (Linear, Polynomial, Isotonic, RandomForest)}


def fit_all(dispersion: Array, accuracy: Array, *, seed: int = 0) -> list[Regression]:
    """Every regression, fitted to pairs of dispersion and accuracy, both (n,)."""
    return [kind.fit(dispersion, accuracy, seed=seed) for kind in REGRESSIONS.values()]


def best_regression(fits: list[Regression], dispersion: Array, accuracy: Array) -> Regression:
    """The one with the smallest mean absolute error on these pairs, both (n,); the first of equals."""
    return min(fits, key=lambda fit: float(np.abs(fit.predict(dispersion) - accuracy).mean()))


def regression_of(parameters: Mapping[str, Any]) -> Regression:
    """The regression that :meth:`Regression.parameters` wrote down.

    Raises:
        UsageError: Parameters of a kind that this version does not know.
    """
    fields = dict(parameters)
    kind = fields.pop("kind", None)
    try:
        return REGRESSIONS[kind](**fields)
    except (KeyError, TypeError):
        raise UsageError(
            f"expected the parameters of a regression, {', '.join(REGRESSIONS)}, got {kind!r} with "
            f"{', '.join(fields) or 'none'}; use a newer version"
        ) from None


def _standard(x: Array) -> tuple[float, float]:
    return float(x.mean()), float(x.std()) or 1.0
