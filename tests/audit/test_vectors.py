"""Closed forms of centred vectors against loops over pairs."""

import itertools
import math

import numpy as np
import pytest

from lmeval_dispersion.auditing.vectors import CentredVectors
from lmeval_dispersion.geometry import contributions, dispersion, dispersion_estimate, unit_rows


def rows(n=60, d=24, spread=1.0, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=d) + spread * rng.normal(size=(n, d))).astype(np.float32)


def points(x):
    return CentredVectors(unit_rows(x).astype(np.float32))


def pairwise_dispersion(x):
    u = [row / math.sqrt(float(row @ row)) for row in x.astype(np.float64)]
    return np.mean([1 - float(a @ b) for a, b in itertools.combinations(u, 2)])


def test_dispersions_of_subsets_are_their_pairwise_means():
    x = rows()
    rng = np.random.default_rng(1)
    subsets = [rng.choice(60, size=size, replace=False) for size in (2, 3, 10, 59, 60)]
    expected = [pairwise_dispersion(x[subset]) for subset in subsets]
    np.testing.assert_allclose(points(x).dispersions(subsets), expected, rtol=2e-6)


@pytest.mark.parametrize("spread", [1.0, 1e-2, 3e-4])
def test_float32_storage_keeps_five_digits_of_the_dispersion(spread):
    """Down to a dispersion of 1e-7 the error is that of the float32 input itself."""
    u32 = unit_rows(rows(400, 256, spread)).astype(np.float32)
    subsets = [np.random.default_rng(k).choice(400, size=100, replace=False) for k in range(20)]
    expected = [dispersion(u32[subset].astype(np.float64)) for subset in subsets]
    np.testing.assert_allclose(CentredVectors(u32.copy()).dispersions(subsets), expected, rtol=1e-5)


@pytest.mark.parametrize("chosen", [None, np.arange(0, 60, 2), np.array([5, 3])])
def test_contributions_and_estimates_equal_geometry(chosen):
    x, p = rows(), points(rows())
    part = x if chosen is None else x[chosen]
    np.testing.assert_allclose(p.contributions(chosen), contributions(part), rtol=2e-6)
    found, expected = p.estimate(chosen), dispersion_estimate(part)
    assert found.mean == pytest.approx(expected.mean, rel=1e-6)
    assert found.se == pytest.approx(expected.se, rel=1e-4, nan_ok=True)
    if chosen is None:
        # One part with the share 1 is the plain estimate, but for the jackknife's (m-1)/(m-2).
        composed = p.composed([np.arange(60)], np.array([1.0]))
        assert composed.mean == pytest.approx(expected.mean, rel=1e-5)
        assert composed.se == pytest.approx(expected.se, rel=0.06)


def test_the_error_of_a_composition_is_its_spread_over_stores():
    rng = np.random.default_rng(4)
    centres = np.repeat([[2.0, 0, 0, 0], [0, 2.0, 0, 0]], [12, 25], axis=0)
    parts, shares = [np.arange(12), np.arange(12, 37)], np.array([0.7, 0.3])
    found = [points(centres + rng.normal(size=(37, 4))).composed(parts, shares) for _ in range(300)]
    errors, values = [each.se for each in found], [each.mean for each in found]
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(np.std(values), rel=0.12)
