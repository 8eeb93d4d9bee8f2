"""The paper's protocol on stores whose truth is known: what beats knowing nothing, and what does not."""

import numpy as np
import pytest
from sklearn.ensemble import RandomForestRegressor
from synthetic import documents, planted_store, vectors, written

from lmeval_dispersion.auditing.paper import Batches, fit_all, mixture_batches, paper_protocol
from lmeval_dispersion.auditing.run import read_run
from lmeval_dispersion.auditing.slices import slice_table, slicings
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.geometry import dispersion


def estimators(report, kind):
    return {row.estimator: row for row in report.errors if row.kind == kind}


def test_a_relation_that_carries_over_to_slices_beats_the_trivial_predictor(tmp_path):
    """Subjects of very different accuracy, and nothing but the right answers moves the vectors."""
    rng = np.random.default_rng(0)
    n, subjects = 8000, 10
    subject = rng.integers(subjects, size=n)
    right = rng.random(n) < 0.1 + 0.8 * subject / (subjects - 1)
    frame = documents(right, rng=rng).assign(subject=[f"s{i}" for i in subject])
    x = vectors(np.where(right, 1.8, 1.0), rng=rng)
    run = read_run(written(tmp_path, frame, x))
    report = paper_protocol(run, seeds=4)
    slices = next(verdict for verdict in report.verdicts if verdict.kind == "slices")
    assert slices.better
    assert slices.winner == "dispersion"
    found = estimators(report, "slices")
    assert found["dispersion"].mae < 8
    # The accuracies of ten evenly spaced subjects lie 22 points from their mean on average.
    assert found["trivial"].mae == pytest.approx(22, abs=2)
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
    for chosen, accuracy, found in zip(batches.rows, batches.accuracy, batches.dispersion, strict=True):
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
    forest = RandomForestRegressor(n_estimators=50, min_samples_leaf=10, random_state=3).fit(standard, y)
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
    with pytest.raises(UsageError, match=r"part of 60 labelled documents reaches \d target accuracies"):
        paper_protocol(read_run(planted_store(tmp_path, n=60)))
