"""The figures of vectors' spectra against singular values of the rows themselves, and planted spectra."""

import math

import numpy as np
import pytest

from lmeval_dispersion import geometry as g
from lmeval_dispersion.errors import GeometryError, TooFewVectorsError

SHAPES = [(40, 120), (120, 40), (30, 30), (7, 20)]


def rows(n, d, seed=0):
    rng = np.random.default_rng(seed)
    decay = np.arange(1, d + 1) ** -0.7
    return rng.normal(size=(n, d)) * decay + rng.normal(size=d) * 0.3


def slow(x):
    """Every figure from singular values of the rows themselves, by the papers' words."""
    x = np.asarray(x, dtype=np.float64)
    s = np.linalg.svd(x, compute_uv=False)
    p = s / s.sum() + 1e-7
    centred = x - x.mean(axis=0)
    values = np.linalg.svd(centred, compute_uv=False) ** 2
    values = values[values > 1e-13 * values[0]]
    unit = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    q = np.linalg.svd(unit, compute_uv=False) ** 2
    q = q[q > 1e-13] / q.sum()
    return g.Spectrum(
        rankme=math.exp(-(p * np.log(p)).sum()),
        effective_rank=math.exp(-(q * np.log(q)).sum()),
        participation_ratio=values.sum() ** 2 / (values**2).sum(),
        stable_rank=np.linalg.norm(x, "fro") ** 2 / np.linalg.norm(x, 2) ** 2,
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_every_figure_is_the_slow_one(shape, dtype):
    x = rows(*shape).astype(dtype)
    assert g.spectrum(x) == pytest.approx(slow(x), rel=1e-8)
    assert g.effective_rank(x) == g.spectrum(x).effective_rank


def test_planted_spectra_and_turned_ones():
    rng = np.random.default_rng(0)
    n, d = 600, 64
    basis = rng.normal(size=(n, d))
    basis = np.linalg.qr(basis - basis.mean(axis=0))[0]  # centred, orthonormal columns
    flat = g.spectrum(basis)
    assert [flat.rankme, flat.participation_ratio, flat.stable_rank] == pytest.approx([d] * 3, rel=1e-4)
    line = g.spectrum(np.outer(rng.normal(size=n), rng.normal(size=d)))
    assert line == pytest.approx((1, 1, 1, 1), abs=1e-3)
    x = rows(30, 50, 3)
    turn = np.linalg.qr(rng.normal(size=(50, 50)))[0]
    assert g.spectrum(x @ turn * 3) == pytest.approx(g.spectrum(x), rel=1e-6)


def test_what_is_not_defined_is_nan_and_bad_input_is_refused():
    same = g.spectrum(np.ones((6, 8)))
    assert math.isnan(same.effective_rank)
    assert math.isnan(same.participation_ratio)
    assert same.stable_rank == pytest.approx(1)
    assert math.isnan(g.spectrum(np.zeros((6, 8))).rankme)
    with pytest.raises(GeometryError, match="all the same"):
        g.effective_rank(np.ones((6, 8)))
    with pytest.raises(TooFewVectorsError, match="n >= 3"):
        g.spectrum(np.ones((2, 4)))
    with pytest.raises(GeometryError, match="finite"):
        g.spectrum([[1, 2], [np.nan, 1], [0, 1]])
    with pytest.raises(GeometryError, match="shape"):
        g.spectrum(np.ones(5))
