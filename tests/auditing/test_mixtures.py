"""Mixtures on stores whose truth is known: their curves, and the paper's protocol."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.ensemble import RandomForestRegressor
from synthetic import documents, planted_store, subjects_store, vectors, written

from lmeval_dispersion.auditing.mixtures.curves import Trend, mixture_curves, trend
from lmeval_dispersion.auditing.mixtures.protocol import (
    Batches,
    fit_all,
    mixture_batches,
    paper_protocol,
)
from lmeval_dispersion.auditing.run import read_run
from lmeval_dispersion.auditing.slices import slice_table, slicings
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.geometry import dispersion


def expected_dispersion(run, share):
    """Of a mixture with ``share`` of correct documents, from the mean unit vectors of the two pools."""
    u = run.vectors.rows.astype(np.float64) + run.vectors.mean
    a, b = u[run.right], u[~run.right]
    k = round(100 * share)
    same = k * (k - 1) * (1 - dispersion(a)) + (100 - k) * (99 - k) * (1 - dispersion(b))
    mixed = 2 * k * (100 - k) * float(a.mean(axis=0) @ b.mean(axis=0))
    return 1 - (same + mixed) / (100 * 99)


def test_mixtures_have_the_expected_dispersion_and_rise(planted):
    found = mixture_curves(planted)
    assert found.documents_per_mixture == 100
    assert found.seeds == 10
    assert [point.target_accuracy for point in found.curve] == list(range(0, 101, 10))
    assert found.unreachable_targets == []
    z = [
        (point.dispersion - expected_dispersion(planted, point.target_accuracy / 100))
        / point.dispersion_se
        for point in found.curve
    ]
    assert np.abs(z).max() < 5
    assert np.sqrt(np.mean(np.square(z))) < 2
    assert found.dispersion_trend.spearman > 0.98
    assert abs(found.query_perplexity_trend.spearman) < 0.9


def test_pools_inside_subjects_are_those_of_a_loop_over_pairs(tmp_path):
    """Slow: pairs of right documents, each pair weighted by the shares of its two subjects."""
    run = read_run(subjects_store(tmp_path, subjects=6, each=14, between=0.3, law=0.3, seed=2))
    u = run.vectors.rows.astype(np.float64) + run.vectors.mean
    subject = run.documents["subject"].to_numpy()
    kept = {}
    for s in set(subject):
        sides = [np.flatnonzero((subject == s) & (run.right == side)) for side in (True, False)]
        if min(map(len, sides)) > 1:
            kept[s] = sides
    assert 2 <= len(kept) <= 6
    weight = {s: min(map(len, sides)) for s, sides in kept.items()}
    expected = [0.0, 0.0]
    for side, s, t in itertools.product((0, 1), kept, kept):
        pairs = [(i, j) for i in kept[s][side] for j in kept[t][side] if i != j]
        mean = np.mean([1 - u[i] @ u[j] for i, j in pairs])
        expected[side] += weight[s] * weight[t] / sum(weight.values()) ** 2 * mean
    found = mixture_curves(run).inside["subject"].pools
    assert [found.correct, found.incorrect] == pytest.approx(expected, rel=1e-5)
    assert found.difference == pytest.approx(expected[0] - expected[1], rel=1e-4)


def test_few_documents_have_fewer_targets_and_no_interval(tmp_path):
    run = read_run(planted_store(tmp_path, n=200, accuracy=0.04))
    correct = int(run.right.sum())
    assert 0 < correct < 20
    found = mixture_curves(run)
    assert found.documents_per_mixture == 20
    reachable = [t for t in range(0, 101, 10) if t * 20 / 100 <= correct]
    assert [point.target_accuracy for point in found.curve] == reachable
    assert found.unreachable_targets == [t for t in range(0, 101, 10) if t not in reachable]
    assert np.isfinite(found.pools.difference)
    assert np.isnan(found.pools.difference_low)


def test_shapes_of_curves():
    """By hand; then pairs of neighbours as a loop, and rank correlation by scipy."""
    assert trend([0, 1, 2, 3], [1, 3, 2, 4]) == Trend(pytest.approx(0.8), "not monotone", 1)
    assert trend([0, 1, 2, 3], [1, math.nan, 2, 3]).shape == "increasing"
    assert "fewer than three known values" in trend([0, 1], [1, 2]).missing
    assert "all values of the curve are equal" in trend([0, 1, 2], [1, 1, 1]).missing
    rng = np.random.default_rng(0)
    for slope in (-9.0, -1.0, 0.0, 0.2, 1.0, 9.0):
        levels = rng.permutation(11)
        means = slope * levels + rng.normal(size=11).round(1)
        ordered = means[np.argsort(levels)]
        steps = [b - a for a, b in itertools.pairwise(ordered)]
        found, rho = trend(levels, means), spearmanr(levels, means).statistic
        assert found.spearman == pytest.approx(rho)
        falls, rises = sum(step < 0 for step in steps), sum(step > 0 for step in steps)
        assert (found.shape == "increasing") == (falls == 0)
        assert (found.shape == "decreasing") == (rises == 0)
        assert found.against == (falls if rho >= 0 else rises)


def estimators(report, kind):
    return {row.estimator: row for row in report.errors if row.kind == kind}


def test_a_relation_that_carries_over_to_slices_beats_the_trivial_predictor(tmp_path):
    """Subjects of very different accuracy, and nothing but the right answers moves the vectors."""
    rng = np.random.default_rng(0)
    n, subjects = 8000, 10
    subject = rng.integers(subjects, size=n)
    right = rng.random(n) < 0.05 + 0.5 * subject / (subjects - 1)
    frame = documents(right, rng=rng).assign(subject=[f"s{i}" for i in subject])
    x = vectors(np.where(right, 1.8, 1.0), rng=rng)
    run = read_run(written(tmp_path, frame, x))
    report = paper_protocol(run, seeds=4)
    slices = next(verdict for verdict in report.verdicts if verdict.kind == "slices")
    assert slices.better
    assert slices.winner == "dispersion"
    found = estimators(report, "slices")
    assert found["dispersion"].mae < 8
    # The accuracies of ten evenly spaced subjects lie 14 points from their mean on average.
    assert found["trivial"].mae == pytest.approx(14, abs=2)
    assert slice_table(run, slicings(run)["subject"]).association.low > 0.7


def test_confident_models_are_judged_by_their_confidence(tmp_path):
    """Where right answers are far more confident, ATC follows mixtures and is found to win."""
    rng = np.random.default_rng(0)
    right = rng.random(3000) < 0.5
    frame = documents(right, rng=rng, confidence=8.0)
    run = read_run(written(tmp_path, frame, vectors(np.ones(3000), rng=rng)))
    report = paper_protocol(run, seeds=4)
    assert sum(report.chosen.values()) == 4
    assert next(v for v in report.verdicts if v.kind == "mixtures").winner == "ATC"
    assert estimators(report, "mixtures")["ATC"].mae < 6


def test_every_mixture_has_its_exact_share_without_replacement(planted):
    rng = np.random.default_rng(0)
    rows = planted.labelled[:800]
    batches = mixture_batches(planted, rows, 100, repeats=2, rng=rng)
    assert len(batches.rows) == 102
    assert sorted(set(batches.accuracy.tolist())) == [k / 100 for k in range(0, 101, 2)]
    for chosen, accuracy, found in zip(
        batches.rows, batches.accuracy, batches.dispersion, strict=True
    ):
        assert len(set(chosen.tolist())) == 100
        assert set(chosen.tolist()) <= set(rows.tolist())
        assert planted.right[chosen].mean() == accuracy
        u = planted.vectors.rows[chosen] + planted.vectors.mean
        assert found == pytest.approx(dispersion(u), rel=1e-5)


def test_regressions_are_scikit_learns_and_take_falling_or_constant_data():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 51, size=300) / 50
    x = 0.4 + 0.1 * y**2 + 0.01 * rng.normal(size=300)
    new = np.linspace(x.min() - 0.05, x.max() + 0.05, 201)[:, None]
    fits = fit_all(Batches([], x, y), seed=3)
    standard = ((x - x.mean()) / x.std())[:, None]
    forest = RandomForestRegressor(n_estimators=50, min_samples_leaf=10, random_state=3).fit(
        standard, y
    )
    expected = forest.predict((new - x.mean()) / x.std())
    np.testing.assert_allclose(fits["random forest"].predict(new), expected, atol=1e-12)
    for kind, degree in (("linear", 1), ("polynomial", 3)):
        expected = np.polyval(np.polyfit(x - x.mean(), y, degree), new[:, 0] - x.mean())
        np.testing.assert_allclose(fits[kind].predict(new), expected, atol=1e-8)
    for data in (1 - x, np.full_like(x, 0.3)):
        for fit in fit_all(Batches([], data, y)).values():
            assert np.isfinite(fit.predict(new)).all()
    falling = fit_all(Batches([], 1 - x, y))["isotonic"].predict(np.array([[0.5], [0.6]]))
    assert falling[0] > falling[1]


def test_too_few_labels_are_one_sentence(tmp_path):
    with pytest.raises(
        UsageError,
        match=r"of 60 labelled documents, .* with only \d accurac.* at least 5 .*; label more",
    ):
        paper_protocol(read_run(planted_store(tmp_path, n=60)))
