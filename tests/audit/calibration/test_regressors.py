"""Regressions from dispersion to accuracy against scikit-learn and numpy."""

import json

import numpy as np
import pytest
from sklearn.ensemble import RandomForestRegressor
from sklearn.isotonic import IsotonicRegression

from lmeval_dispersion.audit.calibration.regressors import (
    REGRESSIONS,
    best_regression,
    fit_all,
    regression_of,
)
from lmeval_dispersion.errors import UsageError


def training(seed=0, n=300):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 51, size=n) / 50
    return 0.4 + 0.1 * y**2 + 0.01 * rng.normal(size=n), y


def test_portable_regressions_predict_what_sklearn_predicts():
    x, y = training()
    new = np.linspace(x.min() - 0.05, x.max() + 0.05, 2001)
    standard = ((x - x.mean()) / x.std()).astype(np.float32)[:, None]
    forest = RandomForestRegressor(n_estimators=50, min_samples_leaf=10, random_state=3).fit(standard, y)
    expected = forest.predict(((new - x.mean()) / x.std()).astype(np.float32)[:, None])
    read_again = {
        fit.kind: regression_of(json.loads(json.dumps(fit.parameters()))) for fit in fit_all(x, y, seed=3)
    }
    np.testing.assert_allclose(read_again["random forest"].predict(new), expected, atol=1e-12)
    isotonic = IsotonicRegression(out_of_bounds="clip").fit(x, y)
    np.testing.assert_allclose(read_again["isotonic"].predict(new), isotonic.predict(new), atol=1e-12)
    for kind, degree in (("linear", 1), ("polynomial", 3)):
        expected = np.clip(np.polyval(np.polyfit(x - x.mean(), y, degree), new - x.mean()), 0, 1)
        np.testing.assert_allclose(read_again[kind].predict(new), expected, atol=1e-8)


@pytest.mark.parametrize("kind", REGRESSIONS.values(), ids=REGRESSIONS)
def test_regressions_stay_in_the_unit_interval_and_take_falling_or_constant_data(kind):
    x, y = training()
    for data in (x, 1 - x, np.full_like(x, 0.3)):
        found = kind.fit(data, y).predict(np.linspace(-5, 5, 101))
        assert ((found >= 0) & (found <= 1)).all()
    falling = kind.fit(1 - x, y).predict(np.array([0.5, 0.6]))
    assert falling[0] > falling[1]


def test_the_best_one_has_the_smallest_error_on_other_pairs():
    fits, (x, y) = fit_all(*training()), training(seed=1)
    errors = {fit.kind: np.abs(fit.predict(x) - y).mean() for fit in fits}
    assert best_regression(fits, x, y).kind == min(errors, key=errors.get)
    assert errors["linear"] > errors["polynomial"]


@pytest.mark.parametrize(
    "parameters", [{}, {"kind": "spline"}, {"kind": "linear"}, {"kind": "isotonic", "knots": [1]}]
)
def test_what_is_no_regression_is_refused(parameters):
    with pytest.raises(UsageError, match="newer version"):
        regression_of(parameters)
