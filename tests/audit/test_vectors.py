"""Closed forms of centred vectors against loops over pairs."""

import itertools
import math

import numpy as np
import pytest

from lmeval_dispersion.auditing.vectors import CentredVectors
from lmeval_dispersion.geometry import contributions, dispersion, dispersion_estimate, unit_rows
from lmeval_dispersion.geometry.dispersion import left_out


def rows(n=60, d=24, spread=1.0, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=d) + spread * rng.normal(size=(n, d))).astype(np.float32)


def points(x):
    return CentredVectors(unit_rows(x).astype(np.float32))


def pairwise_dispersion(x):
    u = [row / math.sqrt(float(row @ row)) for row in x.astype(np.float64)]
    distances = [1 - float(a @ b) for a, b in itertools.combinations(u, 2)]
    return sum(distances) / len(distances)


def test_dispersions_of_subsets_are_their_pairwise_means():
    x = rows()
    rng = np.random.default_rng(1)
    subsets = [rng.choice(60, size=size, replace=False) for size in (2, 3, 10, 59, 60)]
    expected = [pairwise_dispersion(x[subset]) for subset in subsets]
    np.testing.assert_allclose(points(x).dispersions(subsets), expected, rtol=2e-6)


@pytest.mark.parametrize("spread", [1.0, 1e-2, 1e-3, 3e-4])
def test_float32_storage_keeps_five_digits_of_the_dispersion(spread):
    """Down to a dispersion of 1e-7 the error is that of the float32 input itself."""
    x = rows(400, 256, spread)
    subsets = [np.random.default_rng(k).choice(400, size=100, replace=False) for k in range(20)]
    u32 = unit_rows(x).astype(np.float32)
    expected = [dispersion(u32[subset].astype(np.float64)) for subset in subsets]
    np.testing.assert_allclose(CentredVectors(u32.copy()).dispersions(subsets), expected, rtol=1e-5)


@pytest.mark.parametrize("chosen", [None, np.arange(0, 60, 2), np.array([5, 3])])
def test_contributions_and_estimates_equal_geometry(chosen):
    x = rows()
    part = x if chosen is None else x[chosen]
    p = points(x)
    np.testing.assert_allclose(p.contributions(chosen), contributions(part), rtol=2e-6)
    found, expected = p.estimate(chosen), dispersion_estimate(part)
    assert found.mean == pytest.approx(expected.mean, rel=1e-6)
    assert found.se == pytest.approx(expected.se, rel=1e-4, nan_ok=True)


def test_left_out_values_are_dispersions_without_each_row():
    x = rows(12)
    expected = [dispersion(np.delete(x, i, axis=0)) for i in range(12)]
    np.testing.assert_allclose(left_out(contributions(x)), expected, rtol=1e-9)


def test_the_dispersion_of_one_part_is_the_plain_one():
    """A single part with the share 1: the same mean, and the jackknife's error but for its (m-1)/(m-2)."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(60, 8)) + 1
    u = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
    vectors = CentredVectors(u.copy())
    rows = np.arange(5, 45)
    plain, composed = vectors.estimate(rows), vectors.composed([rows], np.array([1.0]))
    assert composed.mean == pytest.approx(plain.mean, rel=1e-5)
    assert composed.se == pytest.approx(plain.se, rel=0.06)


def test_the_error_of_a_composition_is_its_spread_over_stores():
    rng = np.random.default_rng(4)
    shares, values, errors = np.array([0.7, 0.3]), [], []
    centres = np.array([[2.0, 0, 0, 0], [0, 2.0, 0, 0]])
    for _ in range(300):
        x = np.concatenate([centres[0] + rng.normal(size=(12, 4)), centres[1] + rng.normal(size=(25, 4))])
        u = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
        found = CentredVectors(u).composed([np.arange(12), np.arange(12, 37)], shares)
        values.append(found.mean)
        errors.append(found.se)
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(np.std(values), rel=0.12)
