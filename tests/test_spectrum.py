"""The rivals of dispersion against slow independent computations, planted spectra, and scikit-dimension."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

from lmeval_dispersion import geometry as g
from lmeval_dispersion.errors import GeometryError, TooFewVectorsError
from lmeval_dispersion.geometry import neighbours

SHAPES = [(40, 120), (120, 40), (30, 30), (7, 20)]


def rows(n, d, seed=0):
    rng = np.random.default_rng(seed)
    decay = np.arange(1, d + 1) ** -0.7
    return rng.normal(size=(n, d)) * decay + rng.normal(size=d) * 0.3


def slow(x):
    """Every metric from singular values and distances of the rows themselves, by the papers' words."""
    x = np.asarray(x, dtype=np.float64)
    n, d = x.shape
    s = np.linalg.svd(x, compute_uv=False)
    p = s / s.sum() + 1e-7
    centred = x - x.mean(axis=0)
    values = np.linalg.svd(centred, compute_uv=False) ** 2
    values = values[values > 1e-13 * values[0]]
    unit = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    q = np.linalg.svd(unit, compute_uv=False) ** 2
    q = q[q > 1e-13] / q.sum()
    found = {
        "rankme": math.exp(-(p * np.log(p)).sum()),
        "effective_rank": math.exp(-(q * np.log(q)).sum()),
        "participation_ratio": values.sum() ** 2 / (values**2).sum(),
        "stable_rank": np.linalg.norm(x, "fro") ** 2 / np.linalg.norm(x, 2) ** 2,
        "mean_share": np.square(x.mean(axis=0)).sum() / np.square(x).sum(axis=1).mean(),
    }
    ranks = np.arange(4, min(len(values), 100) + 1)
    found["alpha_req"] = math.nan
    if len(ranks) >= 3:  # numpy squares the weights
        slope = np.polyfit(np.log(ranks), np.log(values[ranks - 1]), 1, w=ranks**-0.5)[0]
        found["alpha_req"] = -slope
    # IsoScore step by step: PCA, diagonal of the covariance, its length sqrt(d), distance from (1, ..., 1).
    turned = centred @ np.linalg.svd(centred, full_matrices=True)[2].T
    diagonal = np.cov(turned.T).diagonal()
    diagonal = diagonal * math.sqrt(d) / np.linalg.norm(diagonal)
    defect = np.linalg.norm(diagonal - 1) / math.sqrt(2 * (d - math.sqrt(d)))
    dimensions = (d - defect**2 * (d - math.sqrt(d))) ** 2 / d
    found["isoscore"] = (dimensions - 1) / (d - 1)
    ratios = []
    for i in range(n):
        distances = sorted(math.dist(x[i], x[j]) for j in range(n) if j != i)
        ratios.append(distances[1] / distances[0])
    ratios = sorted(ratios)[: int(n * 0.9)]
    log = np.log(ratios)
    share = -np.log(1 - np.arange(1, len(ratios) + 1) / n)
    found["two_nn"] = np.linalg.lstsq(log[:, None], share, rcond=None)[0][0]
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_every_metric_is_the_slow_one(shape, dtype):
    x = rows(*shape).astype(dtype)
    found, expected = g.spectrum_metrics(x), slow(x)
    assert set(found) == set(g.SPECTRUM) == set(expected)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-8, nan_ok=True), name


def measured(x, centre, count):
    """Squared distances to the nearest rows from differences, in extended precision."""
    wide = (np.asarray(x, dtype=np.float64) - centre).astype(np.longdouble)
    squared = np.array([np.square(wide - row).sum(axis=1) for row in wide])
    np.fill_diagonal(squared, np.inf)
    return np.sort(squared, axis=1)[:, :count], squared


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("kind", ["decaying", "far from 0", "lengths", "alike", "corners", "tiny", "huge"])
def test_proposals_in_float32_lose_no_neighbour(kind, dtype, monkeypatch):
    rng = np.random.default_rng(7)
    x = rows(90, 30)
    if kind == "far from 0":
        x += 100.0
    elif kind == "lengths":  # of very different sizes
        x *= np.exp(rng.uniform(-6, 2, size=(90, 1)))
    elif kind == "alike":  # nearer to each other than float32 tells, more of them than are proposed
        x[:40] = x[0] + 1e-5 * rng.normal(size=(40, 30))
    elif kind == "corners":  # every two equally far
        x = np.eye(90)
    elif kind in ("tiny", "huge") and dtype == np.float64:
        x *= 1e-60 if kind == "tiny" else 1e60
    x = x.astype(dtype)
    centre = x.mean(axis=0, dtype=np.float64)
    monkeypatch.setattr(neighbours, "_BLOCK", 32)
    whole = neighbours._Nearest._of_all
    against_all = []
    monkeypatch.setattr(
        neighbours._Nearest, "_of_all", lambda self, of: against_all.extend(of) or whole(self, of)
    )
    distance, place = neighbours.nearest_rows(x, centre, 5)
    expected, squared = measured(x, centre, 5)
    scale = np.square(x.astype(np.float64) - centre).sum(axis=1).max()
    np.testing.assert_allclose(distance, expected.astype(float), rtol=1e-9, atol=1e-14 * scale)
    named = np.take_along_axis(squared, place, axis=1).astype(float)
    np.testing.assert_allclose(named, distance, rtol=1e-9, atol=1e-14 * scale)
    assert all(len(set(one)) == 5 for one in place.tolist())
    if kind in ("decaying", "tiny", "huge"):
        assert not against_all
    elif kind == "corners":
        assert sorted(against_all) == list(range(90))
    elif kind == "alike":
        assert set(range(40)) <= set(against_all)


def test_blocks_change_nothing(monkeypatch):
    x = rows(50, 20)
    whole = g.spectrum_metrics(x)
    monkeypatch.setattr("lmeval_dispersion.geometry.spectrum._BLOCK", 7)
    assert g.spectrum_metrics(x) == pytest.approx(whole, rel=1e-10)


@pytest.mark.parametrize("shape", [(24, 60), (45, 12)])
def test_leaving_a_group_out_is_the_metric_of_the_others(shape):
    x = rows(*shape)
    estimates = g.spectrum_estimates(x)
    groups = g.jackknife_groups(*shape)
    assert groups == min(shape[0], 32)
    of = np.arange(len(x)) % groups
    left = [slow(x[of != group]) for group in range(groups)]
    for name, estimate in estimates.items():
        expected = [one[name] for one in left]
        np.testing.assert_allclose(estimate.left_out, expected, rtol=1e-7)
        spread = np.square(expected - np.mean(expected)).sum()
        assert estimate.se == pytest.approx(math.sqrt((groups - 1) / groups * spread), rel=1e-6)


def test_how_many_groups_the_jackknife_has():
    sizes = [(20, 896), (64, 896), (200, 896), (300, 896), (14_042, 896), (14_042, 4096)]
    assert [g.jackknife_groups(*size) for size in sizes] == [20, 32, 16, 10, 10, 0]
    without = g.spectrum_estimates(rows(12, 5), groups=0)
    assert without["rankme"].value == g.spectrum_metrics(rows(12, 5))["rankme"]
    assert math.isnan(without["rankme"].se)


def test_errors_are_about_as_large_as_the_values_scatter():
    rng = np.random.default_rng(5)
    decay, centre = np.arange(1, 17) ** -0.7, rng.normal(size=16) * 0.3
    drawn = [g.spectrum_estimates(rng.normal(size=(60, 16)) * decay + centre) for _ in range(60)]
    for name in g.SPECTRUM:
        scatter = np.std([one[name].value for one in drawn], ddof=1)
        told = np.sqrt(np.mean([one[name].se ** 2 for one in drawn]))
        # TwoNN depends on nearest neighbours, where a jackknife is too careful.
        assert 0.7 < told / scatter < (2.5 if name == "two_nn" else 1.5), name


def test_planted_spectra():
    rng = np.random.default_rng(0)
    n, d = 600, 64
    basis = np.linalg.qr(rng.normal(size=(n, d)))[0]
    basis -= basis.mean(axis=0)
    basis = np.linalg.qr(basis)[0]  # centred, orthonormal columns

    flat = g.spectrum_metrics(basis)
    for name in ("rankme", "participation_ratio", "stable_rank"):
        assert flat[name] == pytest.approx(d, rel=1e-4), name
    assert flat["isoscore"] == pytest.approx(1, abs=1e-9)
    assert flat["mean_share"] == pytest.approx(0, abs=1e-12)
    assert flat["alpha_req"] == pytest.approx(0, abs=1e-9)

    decaying = g.spectrum_metrics(basis * np.arange(1, d + 1) ** -0.6)  # variances fall with exponent 1.2
    assert decaying["alpha_req"] == pytest.approx(1.2, rel=1e-9)

    line = g.spectrum_metrics(np.outer(rng.normal(size=n), rng.normal(size=d)))
    assert line["isoscore"] == pytest.approx(0, abs=1e-9)
    assert line["rankme"] == pytest.approx(1, abs=1e-3)
    assert line["stable_rank"] == line["participation_ratio"] == pytest.approx(1)
    assert line["two_nn"] == pytest.approx(1, rel=0.15)

    five = g.spectrum_metrics(rng.uniform(size=(n, 5)) @ np.linalg.qr(rng.normal(size=(d, 5)))[0].T)
    assert five["two_nn"] == pytest.approx(5, rel=0.2)
    shifted = g.spectrum_metrics(basis + 10 * np.eye(1, d))
    assert shifted["mean_share"] == pytest.approx(100 / (100 + d / n), rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_two_nn_is_that_of_scikit_dimension(seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from skdim.id import TwoNN
    x = rows(150, 12, seed)
    assert g.spectrum_metrics(x)["two_nn"] == pytest.approx(TwoNN().fit(x).dimension_, rel=1e-9)


def test_of_unit_rows_the_mean_share_is_the_dispersion_and_turning_changes_nothing():
    x = rows(30, 50, 3)
    unit = g.unit_rows(x)
    found = g.spectrum_metrics(unit)
    assert found["mean_share"] == pytest.approx(1 - g.dispersion(x) * 29 / 30, rel=1e-12)
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(50, 50)))[0]
    turned = g.spectrum_metrics(x @ turn * 3)
    assert turned == pytest.approx(g.spectrum_metrics(x), rel=1e-6)


def test_what_is_not_defined_is_nan_and_bad_input_is_refused():
    same = g.spectrum_metrics(np.ones((6, 8)))
    assert {name for name, value in same.items() if math.isnan(value)} == {
        "effective_rank",
        "alpha_req",
        "participation_ratio",
        "isoscore",
        "two_nn",
    }
    assert same["mean_share"] == same["stable_rank"] == pytest.approx(1)
    repeated = np.repeat(rows(20, 8), 2, axis=0)  # every vector twice: no first distance
    assert math.isnan(g.spectrum_metrics(repeated)["two_nn"])
    with pytest.raises(TooFewVectorsError, match="n >= 3"):
        g.spectrum_metrics(np.ones((2, 4)))
    with pytest.raises(TooFewVectorsError, match="at least 4"):
        g.spectrum_estimates(np.ones((3, 4)))
    with pytest.raises(GeometryError, match="finite"):
        g.spectrum_metrics([[1, 2], [np.nan, 1], [0, 1]])
    with pytest.raises(GeometryError, match="shape"):
        g.spectrum_metrics(np.ones((5, 1)))
