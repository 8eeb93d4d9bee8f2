"""Geometry, subsets of centred vectors and spectra against slow loops."""

import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lmeval_dispersion import geometry as g
from lmeval_dispersion.errors import GeometryError, NoDirectionError
from lmeval_dispersion.geometry import pairs as pair_means
from lmeval_dispersion.geometry.centred import CentredVectors


def cosine(a, b):
    return 1 - float(a @ b) / (math.sqrt(float(a @ a)) * math.sqrt(float(b @ b)))


def euclidean(a, b):
    return math.sqrt(sum((float(p) - float(q)) ** 2 for p, q in zip(a, b, strict=True)))


DISTANCES = {"cosine": cosine, "euclidean": euclidean}


def slow_within(x, distance):
    return float(np.mean([distance(a, b) for a, b in itertools.combinations(x, 2)]))


def slow_between(x, y, distance):
    return float(np.mean([distance(a, b) for a in x for b in y]))


def rows(n, d, seed=0, shift=0.0):
    return np.random.default_rng(seed).normal(size=(n, d)) + shift


# No element is near 0, so every row has a direction.
matrices = st.tuples(st.integers(3, 9), st.integers(1, 6)).flatmap(
    lambda shape: arrays(
        np.float64,
        shape,
        elements=st.floats(-10, 10).map(lambda v: v + 0.5 if abs(v) < 1e-3 else v),
    )
)


@given(matrices)
@settings(max_examples=60)
def test_dispersion_is_the_mean_over_pairs(x):
    expected = slow_within(x, cosine)
    assert g.dispersion(x) == pytest.approx(expected, abs=1e-12)
    to_others = [
        np.mean([cosine(a, b) for j, b in enumerate(x) if j != i]) for i, a in enumerate(x)
    ]
    np.testing.assert_allclose(g.contributions(x), to_others, atol=1e-12)
    assert g.within(x).mean == pytest.approx(expected, abs=1e-12)
    assert -1e-12 <= g.dispersion(x) <= len(x) / (len(x) - 1) + 1e-12


@given(matrices, st.integers(0, 9), st.integers(2, 8))
@settings(max_examples=40)
def test_merged_parts_equal_the_whole(x, cut, groups):
    a, b = g.Dispersion(x.shape[1], groups), g.Dispersion(x.shape[1], groups)
    a.update(x[:cut])
    b.update(x[cut:])
    a.merge(g.Dispersion.from_state(b.state()))
    assert a.count == len(x)
    assert a.mean() == pytest.approx(g.dispersion(x), abs=1e-12)


@pytest.mark.parametrize("metric", g.METRICS)
def test_within_and_between_against_loops_with_their_errors(metric, monkeypatch):
    monkeypatch.setattr(pair_means, "_BLOCK", 4)  # so that several blocks are joined
    x, y, d = rows(9, 5), rows(6, 5, seed=1, shift=0.3), DISTANCES[metric]
    inside, across = g.within(x, metric), g.between(x, y, metric)
    assert inside.mean == pytest.approx(slow_within(x, d), abs=1e-12)
    assert across.mean == pytest.approx(slow_between(x, y, d), abs=1e-12)
    left = [slow_within(np.delete(x, i, 0), d) for i in range(9)]
    np.testing.assert_allclose(inside.left_out, left, atol=1e-12)
    assert inside.se == pytest.approx(
        math.sqrt(8 / 9 * sum((v - np.mean(left)) ** 2 for v in left))
    )
    left_x = [slow_between(np.delete(x, i, 0), y, d) for i in range(9)]
    left_y = [slow_between(x, np.delete(y, i, 0), d) for i in range(6)]
    np.testing.assert_allclose(across.left_out, left_x, atol=1e-12)
    np.testing.assert_allclose(across.left_out_other, left_y, atol=1e-12)
    variance = sum(
        (len(v) - 1) / len(v) * np.square(v - np.mean(v)).sum() for v in (left_x, left_y)
    )
    assert across.se == pytest.approx(math.sqrt(variance))
    pairs = [d(a, b) for a, b in itertools.combinations(x, 2)]
    assert inside.se_pairs == pytest.approx(np.std(pairs, ddof=1) / math.sqrt(len(pairs)))
    pairs = [d(a, b) for a in x for b in y]
    assert across.se_pairs == pytest.approx(np.std(pairs, ddof=1) / math.sqrt(len(pairs)))


def test_jackknife_of_dispersion_in_closed_form():
    x = rows(12, 6)
    assert g.dispersion_estimate(x) == pytest.approx((g.within(x).mean, g.within(x).se, 12))
    assert math.isnan(g.dispersion_estimate(x[:2]).se)


def test_group_jackknife_agrees_with_repeated_sampling():
    generator = np.random.default_rng(5)
    means, errors = [], []
    for _ in range(60):
        part = g.Dispersion(8)
        part.update(generator.normal(size=(400, 8)) * np.linspace(0.2, 1, 8) + 0.4)
        estimate = part.estimate()
        means.append(estimate.mean)
        errors.append(estimate.se)
    assert np.mean(errors) == pytest.approx(np.std(means, ddof=1), rel=0.3)


def test_nearly_parallel_vectors_keep_their_digits():
    base, noise = np.ones(64), rows(50, 64) * 1e-6
    x = base + noise
    centred = x / np.linalg.norm(x, axis=1, keepdims=True)
    exact = sum(
        float(np.square(a - b).sum()) / 2
        for a, b in itertools.combinations(centred.astype(np.longdouble), 2)
    ) / (50 * 49 / 2)
    assert g.dispersion(x) == pytest.approx(exact, rel=1e-6)
    assert g.contributions(x).mean() == pytest.approx(exact, rel=1e-6)


def test_small_euclidean_distances_far_from_the_origin():
    x = rows(8, 5) * 1e-3 + 1e4
    assert g.within(x, "euclidean").mean == pytest.approx(slow_within(x, euclidean), rel=1e-8)


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_extreme_lengths_neither_overflow_nor_vanish(scale):
    x = rows(5, 3)
    assert g.dispersion(x * scale) == pytest.approx(g.dispersion(x), rel=1e-12)


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
def test_a_vector_without_direction_raises_and_names_the_row(bad):
    x = rows(5, 3)
    x[3] = bad
    quantities = [g.dispersion, g.contributions, g.within, g.vendi_score, g.Dispersion(3).update]
    for quantity in [*quantities, functools.partial(g.contrasts, np.eye(3))]:
        with pytest.raises(NoDirectionError, match=r"rows 3\b") as caught:
            quantity(x)
        assert caught.value.rows == [3]
    assert g.valid_rows(x).tolist() == [True, True, True, False, True]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: g.dispersion(np.ones((1, 896))), r"least 2 vectors, .* \(1, 896\); pass more"),
        (lambda: g.within(np.ones((2, 3))), "at least 3 vectors"),
        (lambda: g.Dispersion(3).mean(), "at least 2 vectors, got 0"),
        (lambda: g.dispersion(np.ones(5)), "expected"),
        (lambda: g.between(np.ones((3, 2)), np.ones((3, 4))), "expected"),
        (lambda: g.within(np.ones((3, 2)), "manhattan"), "expected"),
        (lambda: g.Dispersion(3).update(np.ones((2, 4))), "expected"),
        (lambda: g.Dispersion(3).merge(g.Dispersion(4)), "expected"),
    ],
)
def test_too_few_vectors_and_wrong_shapes_raise(call, message):
    with pytest.raises(GeometryError, match=message):
        call()


def test_vendi_score_counts_directions_on_either_side():
    assert g.vendi_score(np.eye(5)) == pytest.approx(5)
    assert g.vendi_score(np.tile(np.eye(3), (4, 1))) == pytest.approx(3)
    assert g.vendi_score(np.ones((6, 4))) == pytest.approx(1)
    x = rows(6, 9)
    u = x / np.linalg.norm(x, axis=1, keepdims=True)
    values = np.linalg.svd(u, compute_uv=False) ** 2 / 6
    assert g.vendi_score(x) == pytest.approx(math.exp(-sum(v * math.log(v) for v in values)))


# Rows around the origin, two clouds, and one cloud far from the origin, in one piece and in two.
@pytest.mark.parametrize(
    ("width", "shifts"), [(40, (0.0, 0.0)), (40, (0.0, 30.0)), (40, (1e3, 1e3)), (1500, (1e3, 1e3))]
)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_contrasts_are_within_and_between_of_both(dtype, scale, width, shifts):
    draw = np.random.default_rng(3)
    x = (scale * (draw.normal(size=(7, width)) + shifts[0])).astype(dtype)
    y = (scale * (draw.normal(size=(11, width)) + shifts[1])).astype(dtype)
    found = g.contrasts(x, y)
    assert list(found) == ["cosine", "euclidean"]
    for metric, three in found.items():
        expected = g.within(x, metric), g.between(x, y, metric), g.within(y, metric)
        for mine, other in zip(three, expected, strict=True):
            assert mine.pairs == other.pairs
            for field in ("mean", "se", "se_pairs", "left_out", "left_out_other"):
                a, b = getattr(mine, field), getattr(other, field)
                np.testing.assert_allclose(
                    a, b, rtol=1e-9, atol=1e-13 * (scale if metric != "cosine" else 1)
                )


def centred(x):
    return CentredVectors(g.unit_rows(x).astype(np.float32))


def directed(n=60, d=24, spread=1.0):
    rng = np.random.default_rng(0)
    return (rng.normal(size=d) + spread * rng.normal(size=(n, d))).astype(np.float32)


@pytest.mark.parametrize("spread", [1.0, 1e-2, 3e-4])
def test_float32_storage_keeps_five_digits_of_the_dispersion_of_subsets(spread):
    """Down to a dispersion of 1e-7 the error is that of the float32 input itself."""
    u32 = g.unit_rows(directed(400, 256, spread)).astype(np.float32)
    rng = np.random.default_rng(1)
    subsets = [rng.choice(400, size=size, replace=False) for size in (2, 3, 100, 250, 400)]
    expected = [g.dispersion(u32[subset].astype(np.float64)) for subset in subsets]
    np.testing.assert_allclose(CentredVectors(u32.copy()).dispersions(subsets), expected, rtol=1e-5)


@pytest.mark.parametrize("chosen", [None, np.arange(0, 60, 2), np.array([5, 3])])
def test_contributions_and_estimates_of_subsets_are_those_of_their_vectors(chosen):
    x, vectors = directed(), centred(directed())
    part = x if chosen is None else x[chosen]
    np.testing.assert_allclose(vectors.contributions(chosen), g.contributions(part), rtol=2e-6)
    found, expected = vectors.estimate(chosen), g.dispersion_estimate(part)
    assert found.mean == pytest.approx(expected.mean, rel=1e-6)
    assert found.se == pytest.approx(expected.se, rel=1e-4, nan_ok=True)
    if chosen is None:
        # One part with the share 1 is the plain estimate, but for the jackknife's (m-1)/(m-2).
        composed = vectors.composed([np.arange(60)], np.array([1.0]))
        assert composed.mean == pytest.approx(expected.mean, rel=1e-5)
        assert composed.se == pytest.approx(expected.se, rel=0.06)


def test_the_error_of_a_composition_is_its_spread_over_stores():
    rng = np.random.default_rng(4)
    centres = np.repeat([[2.0, 0, 0, 0], [0, 2.0, 0, 0]], [12, 25], axis=0)
    parts, shares = [np.arange(12), np.arange(12, 37)], np.array([0.7, 0.3])
    found = [
        centred(centres + rng.normal(size=(37, 4))).composed(parts, shares) for _ in range(300)
    ]
    errors, values = [each.se for each in found], [each.mean for each in found]
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(np.std(values), rel=0.12)


def decaying(n, d):
    rng = np.random.default_rng(0)
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


@pytest.mark.parametrize("shape", [(40, 120), (120, 40), (30, 30), (7, 20)])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_every_figure_is_the_slow_one(shape, dtype):
    x = decaying(*shape).astype(dtype)
    assert g.spectrum(x) == pytest.approx(slow(x), rel=1e-8)
    assert g.effective_rank(x) == g.spectrum(x).effective_rank


def test_planted_spectra():
    rng = np.random.default_rng(0)
    n, d = 600, 64
    basis = rng.normal(size=(n, d))
    basis = np.linalg.qr(basis - basis.mean(axis=0))[0]  # centred, orthonormal columns
    flat = g.spectrum(basis)
    assert [flat.rankme, flat.participation_ratio, flat.stable_rank] == pytest.approx(
        [d] * 3, rel=1e-4
    )
    line = g.spectrum(np.outer(rng.normal(size=n), rng.normal(size=d)))
    assert line == pytest.approx((1, 1, 1, 1), abs=1e-3)


def test_what_is_not_defined_is_nan_and_bad_input_is_refused():
    same = g.spectrum(np.ones((6, 8)))
    assert math.isnan(same.effective_rank)
    assert math.isnan(same.participation_ratio)
    assert same.stable_rank == pytest.approx(1)
    assert math.isnan(g.spectrum(np.zeros((6, 8))).rankme)
    with pytest.raises(GeometryError, match="rows that differ"):
        g.effective_rank(np.ones((6, 8)))
    with pytest.raises(GeometryError, match="at least 3 vectors"):
        g.spectrum(np.ones((2, 4)))
    with pytest.raises(GeometryError, match="finite"):
        g.spectrum([[1, 2], [np.nan, 1], [0, 1]])
    with pytest.raises(GeometryError, match="shape"):
        g.spectrum(np.ones(5))
