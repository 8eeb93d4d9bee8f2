"""Dispersion from sums of integers."""

from __future__ import annotations

import numpy as np
import pytest

from lmeval_dispersion.geometry import dispersion, dispersion_estimate
from lmeval_dispersion.laboratory.measures.integer_sums import GROUPS, add_vectors, dispersion_of, empty_sums


def test_integer_sums_are_the_dispersion_in_any_order():
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(200, 17)) + 2).astype(np.float32)
    whole = empty_sums(1, 17)
    add_vectors(whole, 0, 0, x)
    parts = empty_sums(1, 17)
    for start in (150, 0, 50, 100):
        add_vectors(parts, 0, start, x[start : start + 50])
    assert np.array_equal(whole, parts)
    found = dispersion_of(whole[0])
    assert found.mean() == pytest.approx(dispersion(x), abs=1e-10)
    assert found.estimate().se == pytest.approx(dispersion_estimate(x).se, rel=0.35)
    near = np.ones((40, 17)) + 1e-5 * rng.normal(size=(40, 17))
    sums = empty_sums(1, 17)
    add_vectors(sums, 0, 0, near)
    assert dispersion_of(sums[0]).mean() == pytest.approx(dispersion(near), abs=1e-11)
    assert len(sums[0]) == GROUPS
