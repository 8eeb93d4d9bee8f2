"""The shrunken regression against refits, its intervals and its unit against draws from a known truth."""

import numpy as np
import pytest

from lmeval_dispersion.auditing.calibrating import shrinkage
from lmeval_dispersion.auditing.calibrating.shrinkage import PENALTIES, Pairs, _Ridge, families


def drawn(rng, slices=30, documents=50, slope=0.0, between=0.1, features=3):
    """Slices whose accuracy is 0.5 + slope times the first feature, and something that no feature tells."""
    z = rng.normal(size=(slices, features))
    n = np.broadcast_to(np.asarray(documents), (slices,)).astype(float)
    tends_to = np.clip(0.5 + slope * z[:, 0] + between * rng.normal(size=slices), 0.02, 0.98)
    accuracy = rng.binomial(n.astype(int), tends_to) / n
    return Pairs(z, accuracy, n, accuracy * (1 - accuracy) * n / (n - 1))


def slow_ridge(z, y, weight, penalty):
    """The same problem by the normal equations, with an unshrunk intercept."""
    x = np.column_stack([np.ones(len(z)), z])
    ridge = penalty * np.diag([0.0] + [1.0] * z.shape[1])
    return np.linalg.solve(x.T @ (weight[:, None] * x) + ridge, x.T @ (weight * y))


def test_held_out_losses_are_those_of_refits():
    rng = np.random.default_rng(0)
    pairs = drawn(rng, slices=12, documents=rng.integers(10, 40, size=12), slope=0.1)
    for columns in [(), (1,), (0, 1, 2)]:
        ridge = _Ridge(pairs, columns)
        found = ridge.held_out_losses()
        weight = pairs.documents / pairs.documents.sum()
        z = pairs.z[:, list(columns)] - weight @ pairs.z[:, list(columns)]
        for row, penalty in zip(found, PENALTIES, strict=True):
            for i in range(12):
                rest = np.arange(12) != i
                b = slow_ridge(z[rest], pairs.accuracy[rest], weight[rest], penalty)
                # The closed form centres the features once and shrinks around that; the refit as well.
                assert row[i] == pytest.approx((b[0] + z[i] @ b[1:] - pairs.accuracy[i]) ** 2, rel=1e-8)
        fit = ridge.fit(0.3)
        b = slow_ridge(pairs.z[:, list(columns)], pairs.accuracy, weight, 0.3)
        np.testing.assert_allclose([fit.intercept, *np.array(fit.coefficients)[list(columns)]], b, atol=1e-10)


def test_every_slice_is_estimated_by_a_fit_that_never_saw_it():
    pairs = drawn(np.random.default_rng(1), slope=0.2)
    folds = shrinkage.cross_fitted(pairs, families(3))
    for k in (0, 7, 29):
        changed = pairs.accuracy.copy()
        changed[k] = 1 - changed[k]
        again = shrinkage.cross_fitted(Pairs(pairs.z, changed, pairs.documents, pairs.variance), families(3))
        assert again.estimate[k] == folds.estimate[k]
    assert folds.estimate != pytest.approx(again.estimate)


@pytest.mark.parametrize("slope", [0.2, -0.2])
def test_isotonic_calibration_is_the_least_of_the_greatest_means_of_the_other_slices(slope):
    """Barlow's max-min formula over all runs of neighbours, against sklearn's pooling."""
    pairs = drawn(np.random.default_rng(3), slices=14, documents=np.arange(20, 34), slope=slope)
    found, rises = shrinkage.cross_fitted(pairs, [(0,)], shrinkage.isotonic_fit).estimate, slope > 0
    for i, estimate in enumerate(found):
        others = np.delete(np.arange(14), i)
        order = others[np.argsort(pairs.z[others, 0])][:: 1 if rises else -1]
        y, n = pairs.accuracy[order], pairs.documents[order]
        fit = [
            max(
                min(np.average(y[a : b + 1], weights=n[a : b + 1]) for b in range(k, 13))
                for a in range(k + 1)
            )
            for k in range(13)
        ]
        x, fit = (np.array(values)[:: 1 if rises else -1] for values in (pairs.z[order, 0], fit))
        assert estimate == pytest.approx(np.interp(pairs.z[i, 0], x, fit))


@pytest.mark.parametrize(("slope", "low", "high"), [(0.0, 0.0, 0.2), (0.15, 0.95, 1.0)])
def test_noise_leaves_the_labelled_accuracy_and_a_law_does_not(slope, low, high):
    rng = np.random.default_rng(0)
    fits = [shrinkage.shrunken_fit(drawn(rng, slope=slope), families(3)) for _ in range(100)]
    assert low <= np.mean([np.any(fit.coefficients) for fit in fits]) <= high


def test_jackknife_plus_is_the_published_quantiles():
    rng = np.random.default_rng(0)
    centres, half = rng.uniform(0.3, 0.6, size=24), rng.uniform(0, 0.2, size=24)
    low, high = shrinkage.jackknife_plus(centres, half, 0.9)
    # floor(0.1 * 25) = 2nd smallest, ceil(0.9 * 25) = 23rd smallest.
    assert low == sorted(centres - half)[1]
    assert high == sorted(centres + half)[22]


@pytest.mark.parametrize(("slope", "between"), [(0.0, 0.2), (0.2, 0.03), (0.0, 0.0)])
def test_the_labels_that_it_is_worth_are_as_far_off_as_labels_drawn_at_random(slope, between):
    rng = np.random.default_rng(3)
    pairs = drawn(rng, slices=400, documents=40, slope=slope, between=between)
    estimate = shrinkage.cross_fitted(pairs, [(0,)]).estimate
    found = shrinkage.Estimator.of("ours", pairs, estimate, estimate)
    assert found.rmse == pytest.approx(100 * np.sqrt(np.square(estimate - pairs.accuracy).mean()))
    assert found.worth_low < found.worth < found.worth_high
    right = [np.arange(40) < round(40 * a) for a in pairs.accuracy]
    errors = {}
    for k in range(1, 41):
        samples = [rng.permuted(np.tile(r, (30, 1)), axis=1)[:, :k].mean(axis=1) for r in right]
        errors[k] = np.mean([np.square(s - r.mean()).mean() for s, r in zip(samples, right, strict=True)])
    aim = np.square(estimate - pairs.accuracy).mean()
    direct = next(k for k in range(1, 41) if errors[k] <= aim)
    assert found.worth == pytest.approx(direct, abs=1.5)
    if between == slope == 0:
        assert found.worth == pytest.approx(20, abs=1.5)  # half of a slice that is noise around one accuracy


def test_a_shift_is_found_and_chance_is_not():
    rng = np.random.default_rng(0)
    calls = [
        shrinkage.shift(rng.normal(size=(30, 4)), rng.normal(size=(30, 4))) is not None for _ in range(300)
    ]
    assert np.mean(calls) <= 0.02
    moved = rng.normal(size=(30, 4)) + np.array([0, 0, 2.0, 0])
    assert shrinkage.shift(rng.normal(size=(30, 4)), moved) == 2
    assert shrinkage.shift(np.empty((30, 0)), np.empty((3, 0))) is None
