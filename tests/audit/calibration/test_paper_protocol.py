"""The paper's protocol on stores whose truth is known: what beats knowing nothing, and what does not."""

import numpy as np
import pytest
from synthetic import documents, vectors

from lmeval_dispersion.audit.calibration.batches import Batches
from lmeval_dispersion.audit.calibration.paper_protocol import ThresholdedConfidence, paper_protocol_report
from lmeval_dispersion.audit.run import read_run
from lmeval_dispersion.audit.slices import slice_table, slicings
from lmeval_dispersion.store import write_store


def estimators(report, protocol):
    return {row["estimator"]: row for row in report["protocols"][protocol]["estimators"]}


def test_a_relation_that_carries_over_to_slices_beats_the_trivial_predictor(tmp_path):
    """Subjects of very different accuracy, and nothing but the right answers moves the vectors."""
    rng = np.random.default_rng(0)
    n, subjects = 8000, 10
    subject = rng.integers(subjects, size=n)
    right = rng.random(n) < 0.1 + 0.8 * subject / (subjects - 1)
    frame = documents(right, rng=rng).assign(subject=[f"s{i}" for i in subject])
    x = vectors(np.where(right, 1.8, 1.0), rng=rng)
    write_store(tmp_path, documents=frame, vectors={"last": x}, manifest={"model": "m"})
    run = read_run(tmp_path)
    report = paper_protocol_report(run)
    judged = report["protocols"]["slices"]
    assert judged["better"]
    assert judged["winner"] == "dispersion"
    found = estimators(report, "slices")
    assert found["dispersion"]["mae"] < 8
    # The accuracies of ten evenly spaced subjects lie 22 points from their mean on average.
    assert found["trivial"]["mae"] == pytest.approx(22, abs=2)
    assert slice_table(run, slicings(run)["subject"])["association"]["low"] > 0.7


def test_the_trivial_error_is_what_binomial_sampling_says(noise):
    """|p_cal - p_test| of two independent shares: sqrt(2/pi) sd."""
    found = [estimators(paper_protocol_report(noise, seed=s), "whole")["trivial"]["mae"] for s in range(3)]
    n, p = len(noise.labelled), noise.right.mean()
    sd = np.sqrt(p * (1 - p) * (1 / (0.2 * n) + 1 / (0.7 * n)))
    # Over random splits of one sample this is exact up to the thirty splits that are averaged.
    assert np.mean(found) == pytest.approx(100 * np.sqrt(2 / np.pi) * sd, rel=0.35)


def test_confident_models_are_judged_by_their_confidence(tmp_path):
    """Where right answers are far more confident, ATC follows mixtures and is found to win."""
    rng = np.random.default_rng(0)
    right = rng.random(3000) < 0.5
    frame = documents(right, rng=rng, confidence=8.0)
    write_store(tmp_path, documents=frame, vectors={"last": vectors(np.ones(3000), rng=rng)}, manifest={})
    report = paper_protocol_report(read_run(tmp_path))
    assert report["protocols"]["mixtures"]["winner"] == "ATC"
    assert estimators(report, "mixtures")["ATC"]["mae"] < 6


def test_points_are_the_errors_again(planted):
    report = paper_protocol_report(planted, seeds=3)
    for protocol in ("whole", "slices", "mixtures"):
        points = [p for p in report["points"] if p["protocol"] == protocol]
        by_seed = [
            [abs(p["predicted"] - p["true"]) for p in points if p["seed"] == seed] for seed in range(3)
        ]
        mae = np.mean([100 * np.mean(errors) for errors in by_seed])
        assert mae == pytest.approx(estimators(report, protocol)["dispersion"]["mae"])
    assert sum(report["chosen"].values()) == 3


def test_atc_threshold_leaves_the_accuracy_above_it():
    confidence = np.random.default_rng(0).random(1000)
    for accuracy in (0.0, 0.25, 0.9, 1.0):
        estimator = ThresholdedConfidence.fit(confidence, np.arange(500), accuracy)
        batches = Batches([np.arange(500)], np.zeros(1), np.zeros(1))
        assert estimator.predict(batches) == pytest.approx([accuracy], abs=3e-3)
