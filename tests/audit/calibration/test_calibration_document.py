"""What `calibrate` and `predict` say: each sentence on data where it is true, and not elsewhere."""

import json

import numpy as np
import pytest
from synthetic import planted_store, sliced_store

from lmeval_dispersion.audit.calibration.calibrator import (
    fit_calibrator,
    fit_paper_calibrator,
    predict_slices,
)
from lmeval_dispersion.audit.calibration.document import calibrator_document, prediction_document
from lmeval_dispersion.audit.calibration.selection import labels_of, rows_where
from lmeval_dispersion.audit.run import read_run
from lmeval_dispersion.report import render


def found(path, **options):
    run = read_run(sliced_store(path, **options))
    fitted = fit_calibrator(labels_of(run, rows_where(run, "part == 'labelled'")))
    return run, fitted


@pytest.fixture(scope="module")
def law(tmp_path_factory):
    return found(tmp_path_factory.mktemp("law") / "s")


@pytest.fixture(scope="module")
def noise(tmp_path_factory):
    return found(tmp_path_factory.mktemp("noise") / "s", effect=0.0)


def test_the_first_line_says_what_it_is_worth_or_not_to_use_it(law, noise):
    first = calibrator_document(law[1]).answer[0]
    validation, worth = law[1]["validation"], law[1]["worth"]
    gain = validation["trivial_mae"] - validation["mae"]
    assert f"knowing nothing by {gain:.1f} points" in first
    assert f"worth {worth['labels']:.0f} labelled documents a slice (95 % " in first
    assert first.startswith("Dispersion")
    assert "Do not use" not in first
    assert calibrator_document(noise[1]).answer[0].startswith("Do not use: ")
    for _, fitted in (law, noise):
        assert json.loads(render(calibrator_document(fitted), "json")) == fitted


def test_few_slices_say_the_level_that_they_reach(tmp_path, law):
    _, few = found(tmp_path / "s", labelled=12)
    assert "12 slices allow intervals of 92 % at most" in render(calibrator_document(few), "markdown")
    assert "intervals of" not in render(calibrator_document(law[1]), "markdown")


def test_predictions_say_first_what_can_be_said(tmp_path, law, noise):
    run, fitted = law
    some = predict_slices(fitted, run)
    given = sum(row["reason"] is None for row in some["slices"][1:])
    document = prediction_document(some)
    if given < 40:
        assert document.answer[0].startswith(f"The accuracy of {given} of 40 slices can be estimated; ")
    else:
        assert document.answer[0] == "The accuracy of all 40 slices can be estimated."
    assert f"together: {some['slices'][0]['predicted']:.3f} (95 %" in document.answer[1]
    assert "exchangeable" in document.limits[0]
    assert "forced" not in render(document, "markdown")
    forced = render(prediction_document(predict_slices(noise[1], noise[0], force=True)), "markdown")
    assert "did not beat knowing nothing when it was validated; its numbers were forced" in forced
    moved, fitted = found(tmp_path / "moved", shift=2.0)
    none = prediction_document(predict_slices(fitted, moved))
    assert none.answer[0].startswith("The accuracy of none of the 40 slices can be estimated: they differ")
    assert "undefined" in render(none, "markdown")


def test_small_slices_are_told_what_to_do(law):
    run, fitted = law
    few = np.concatenate([rows_where(run, f"subject == 'slice 0{i}'")[:12] for i in range(41, 60)])
    text = render(prediction_document(predict_slices(fitted, run, rows=few)), "markdown")
    assert "calibrate with --slice-size N" in text
    assert "19 too small" in text


def test_one_slice_is_one_sentence(law):
    run, fitted = law
    rows = rows_where(run, "subject == 'slice 050'")
    one = prediction_document(predict_slices(fitted, run, rows=rows))
    assert one.answer[0].startswith(f"The accuracy of {len(rows)} documents can be estimated: 0.")
    assert len(one.rows) == 1


def test_the_papers_protocol_speaks_of_mixtures_only(tmp_path):
    for effect, expected in ((0.0, True), (3.0, False)):
        run = read_run(planted_store(tmp_path / f"{effect}", n=1500, effect=effect))
        fitted = fit_paper_calibrator(run, size=100)
        document = calibrator_document(fitted)
        assert document.answer[0].startswith("Do not use: ") == expected
        assert json.loads(render(document, "json")) == fitted
        assert "mixtures" in document.limits[0]
