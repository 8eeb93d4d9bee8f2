"""Regressions from dispersion to accuracy that can be written down as numbers and evaluated without sklearn.

Each is fitted by scikit-learn or numpy, turned into plain parameters and evaluated from these alone, so a
prediction made later from a file is the one that was judged. A random forest of one variable is a step
function: it is written as its steps, which is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmeval_dispersion.audit.trend import rank_correlations
from lmeval_dispersion.errors import MissingExtraError, UsageError

Array = NDArray[np.float64]

_DEGREE = 3
_TREES, _LEAF = 50, 10


def predicted(parameters: dict[str, Any], dispersion: ArrayLike) -> Array:
    """Accuracy in [0, 1] for each dispersion, from the parameters of a fitted regression.

    Raises:
        UsageError: Parameters of a kind that this version does not know.
    """
    d = np.asarray(dispersion, dtype=np.float64)
    kind = parameters.get("kind")
    if kind in ("linear", "polynomial"):
        x = (d - parameters["centre"]) / parameters["scale"]
        y = np.polynomial.polynomial.polyval(x, np.asarray(parameters["coefficients"], dtype=np.float64))
    elif kind == "isotonic":
        y = np.interp(d, parameters["dispersion"], parameters["accuracy"])
    elif kind == "random forest":
        x = ((d - parameters["centre"]) / parameters["scale"]).astype(np.float32)
        steps = np.asarray(parameters["steps"], dtype=np.float32)
        y = np.asarray(parameters["accuracy"], dtype=np.float64)[np.searchsorted(steps, x, side="left")]
    else:
        raise UsageError(f"expected a regression of {', '.join(FITS)}, got {kind!r}; use a newer version")
    return np.asarray(np.clip(y, 0.0, 1.0))


def fitted(kind: str, dispersion: Array, accuracy: Array, *, seed: int = 0) -> dict[str, Any]:
    """Parameters of one regression, as plain numbers and lists; ``kind`` is a key of :data:`FITS`."""
    return {"kind": kind, **FITS[kind](dispersion, accuracy, seed)}


def _polynomial(degree: int) -> Callable[[Array, Array, int], dict[str, Any]]:
    def fit(x: Array, y: Array, seed: int) -> dict[str, Any]:
        centre, scale = _standard(x)
        usable = min(degree, len(np.unique(x)) - 1)
        coefficients = np.polynomial.polynomial.polyfit((x - centre) / scale, y, usable)
        return {"centre": centre, "scale": scale, "coefficients": [float(c) for c in coefficients]}

    return fit


def _isotonic(x: Array, y: Array, seed: int) -> dict[str, Any]:
    rising = not rank_correlations(x, y[None])[0] < 0  # a constant counts as rising
    model = _sklearn("isotonic").IsotonicRegression(increasing=rising, out_of_bounds="clip").fit(x, y)
    return {"dispersion": model.X_thresholds_.tolist(), "accuracy": model.y_thresholds_.tolist()}


def _random_forest(x: Array, y: Array, seed: int) -> dict[str, Any]:
    centre, scale = _standard(x)
    # sklearn's trees compare float32 values; the same rounding here and in `predicted` keeps it exact.
    rows = ((x - centre) / scale).astype(np.float32)[:, None]
    model = _sklearn("ensemble").RandomForestRegressor(
        n_estimators=_TREES, min_samples_leaf=_LEAF, random_state=seed
    )
    model.fit(rows, y)
    splits = np.concatenate([e.tree_.threshold[e.tree_.feature >= 0] for e in model.estimators_])
    steps = splits.astype(np.float32)
    # x <= t holds for the same float32 numbers x as x <= (the largest float32 that is at most t).
    steps = np.where(steps > splits, np.nextafter(steps, np.float32(-np.inf)), steps)
    steps = np.unique(steps)
    values = model.predict(np.append(steps, np.float32(np.inf))[:, None].clip(max=np.float32(1e30)))
    return {"centre": centre, "scale": scale, "steps": steps.tolist(), "accuracy": values.tolist()}


FITS: dict[str, Callable[[Array, Array, int], dict[str, Any]]] = {
    "linear": _polynomial(1),
    "polynomial": _polynomial(_DEGREE),
    "isotonic": _isotonic,
    "random forest": _random_forest,
}


def _standard(x: Array) -> tuple[float, float]:
    return float(x.mean()), float(x.std()) or 1.0


def _sklearn(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(f"sklearn.{module}")
    except ImportError:
        raise MissingExtraError(
            "calibration needs scikit-learn, which is not installed; "
            "run: pip install 'lmeval-dispersion[audit]'"
        ) from None
