"""The worth of calibrations and of labels, and what is said of both on known truths."""

import numpy as np
import pytest
from synthetic import sliced_store, subjects_store

from lmeval_dispersion.auditing.calibrating.calibration import calibrate, labels_enough
from lmeval_dispersion.auditing.calibrating.calibrator import TRIVIAL, labelled_slices
from lmeval_dispersion.auditing.calibrating.prediction import predict
from lmeval_dispersion.auditing.report import audit
from lmeval_dispersion.auditing.run import labels_of, read_run

STORES = {
    "law": {},
    "reversed": {"effect": -0.5},  # no estimate assumes that right answers lie further apart
    "few": {"labelled": 12},
    "noise": {"effect": 0.0},  # accuracies differ, and nothing shows it
    "topics": {"effect": 0.0, "topics": 1.5},  # dispersions differ as well, on their own
    "alike": {"effect": 0.0, "spread_of_accuracy": 0.0},
}
LAWS = {"law", "reversed", "few"}


@pytest.fixture(scope="module")
def calibrations(tmp_path_factory):
    """Runs with their calibrations, by what was planted; the last one's model guesses."""
    folder = tmp_path_factory.mktemp("stores")
    paths = [
        sliced_store(folder / name, unlabelled=0, **options) for name, options in STORES.items()
    ]
    runs = [
        read_run(path) for path in [*paths, subjects_store(folder / "g", accuracy=0.25, law=0.5)]
    ]
    return {
        name: (run, calibrate(run)) for name, run in zip([*STORES, "guessing"], runs, strict=True)
    }


@pytest.fixture(scope="module")
def texts(calibrations):
    return {name: report.to_markdown() for name, (_, report) in calibrations.items()}


def where(words, texts):
    return {name for name, text in texts.items() if words in text}


def test_an_audit_says_how_well_accuracy_can_be_read_off_and_what_that_is_worth(calibrations):
    answers = {name: audit(calibrations[name][0], short=True).answer() for name in STORES}
    opened = {name: answer[name not in LAWS] for name, answer in answers.items()}
    assert where("Labels can be saved here: ", opened) == LAWS
    assert where("Dispersion cannot replace labels here: ", opened) == set(STORES) - LAWS
    assert where("as it is, does (", opened) == set()
    best = calibrations["law"][1].estimators[0]
    assert f"dispersion is {best.mae:.1f} points off on 40 subjects" in opened["law"]
    assert f"worth {best.worth:.0f} labels a slice" in opened["law"]


@pytest.mark.parametrize(
    ("sentence", "on"),
    [
        ("Do not use: ", {"noise", "topics", "alike", "guessing"}),
        ("12 slices allow intervals of 92 % at most", {"few"}),
        ("Dispersion is worth no labels here", {"noise", "topics", "alike"}),
        ("Dispersion beats the labelled accuracy alone by", LAWS),
        ("The worths below are therefore not findings", {"guessing"}),
        ("An estimate is about ±", LAWS),
        ("The whole run's accuracy within 5 points needs about", {*STORES, "guessing"}),
    ],
)
def test_each_sentence_stands_where_it_is_true_and_nowhere_else(texts, sentence, on):
    assert where(sentence, texts) == on


def test_its_errors_are_those_of_the_points_and_of_real_predictions(calibrations):
    """Each point is what `predict` would say of a slice whose labels were held back."""
    run, report = calibrations["few"]
    for other in (report, *(found for _, found in calibrations.values())):
        errors = [abs(point.predicted - point.true) for point in other.points]
        assert 100 * np.mean(errors) == pytest.approx(other.estimators[0].mae)
    out = run.documents["subject"] == report.points[3].slice
    others = calibrate(labels_of(run, np.flatnonzero(~out))).calibrator
    predicted = predict(others, run, where=f"subject == '{report.points[3].slice}'").slices[-1]
    assert predicted.predicted == pytest.approx(report.points[3].predicted)


@pytest.mark.parametrize("kind", ["right or wrong", "between"])
def test_as_many_labels_as_it_says_are_within_five_points(kind):
    rng = np.random.default_rng(0)
    scores = (
        (rng.random(2000) < 0.3).astype(float) if kind == "right or wrong" else rng.random(2000)
    )
    drawn = rng.permuted(np.tile(scores, (4000, 1)), axis=1)[:, : labels_enough(scores)].mean(
        axis=1
    )
    assert np.mean(np.abs(drawn - scores.mean()) <= 0.05) == pytest.approx(0.95, abs=0.015)


def test_the_file_holds_the_estimates(calibrations):
    run, report = calibrations["law"]
    rows = {row.estimator: row for row in report.estimators}
    assert report.calibrator.errors == (report.estimators[0].mae, rows[TRIVIAL].mae)
    parts = [part.rows for part in labelled_slices(run)[1]]
    accuracies = np.array([run.score[part].mean() for part in parts])
    confidences = [run.confidence[part].mean() for part in parts]
    mae = 100 * np.abs(confidences - accuracies).mean()
    assert rows["mean confidence, as it is"].mae == pytest.approx(mae)
    above = []
    for part in parts:
        rest = np.setdiff1d(np.concatenate(parts), part)
        threshold = np.quantile(run.confidence[rest], 1 - run.score[rest].mean())
        above.append((run.confidence[part] > threshold).mean())
    assert rows["ATC, as it is"].mae == pytest.approx(100 * np.abs(above - accuracies).mean())
