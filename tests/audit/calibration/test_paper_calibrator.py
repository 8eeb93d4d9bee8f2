"""The paper's protocol as a file: its predictions, its interval over mixtures, and what it refuses."""

import numpy as np
import pytest
from synthetic import planted_store

from lmeval_dispersion.audit.calibration.batches import mixture_batches
from lmeval_dispersion.audit.calibration.calibrator import (
    calibrator_json,
    check_worth,
    fit_paper_calibrator,
    predict_slices,
    read_calibrator,
)
from lmeval_dispersion.audit.calibration.regressors import regression_of
from lmeval_dispersion.audit.run import read_run
from lmeval_dispersion.errors import UsageError


def test_a_calibrator_predicts_mixtures_of_the_same_kind(tmp_path):
    fitted = fit_paper_calibrator(read_run(planted_store(tmp_path / "a", effect=0.8)), size=100)
    (tmp_path / "cal.json").write_text(calibrator_json(fitted))
    fitted = read_calibrator(tmp_path / "cal.json")
    inside = []
    for seed, accuracy in enumerate((0.1, 0.3, 0.5, 0.7, 0.9)):
        path = planted_store(tmp_path / f"b{seed}", n=600, effect=0.8, accuracy=accuracy, seed=seed + 9)
        row = predict_slices(fitted, read_run(path))["slices"][0]
        assert row["predicted"] == pytest.approx(row["true"], abs=0.12)
        inside.append(row["low"] <= row["true"] <= row["high"])
    assert sum(inside) >= 4
    assert 0 < fitted["interval"]["half_width"] < 0.3


def test_the_interval_covers_mixtures_as_it_says(tmp_path):
    """Of fresh batches drawn like the validation ones, about 95 % lie inside."""
    fitted = fit_paper_calibrator(read_run(planted_store(tmp_path / "a", effect=0.5)), size=100)
    run = read_run(planted_store(tmp_path / "b", effect=0.5, seed=5))
    batches = mixture_batches(run, run.labelled, 100, repeats=6, rng=np.random.default_rng(0))
    errors = np.abs(regression_of(fitted["regression"]).predict(batches.dispersion) - batches.accuracy)
    assert (errors <= fitted["interval"]["half_width"]).mean() > 0.88


def test_no_number_for_small_slices_nor_for_dispersions_never_seen(tmp_path):
    fitted = fit_paper_calibrator(read_run(planted_store(tmp_path / "a", n=2400)), size=100)
    assert fitted["slice_size"] == 100
    middle = predict_slices(fitted, read_run(planted_store(tmp_path / "c", n=300, seed=1)))
    assert middle["slices"][0]["reason"] is None
    small = middle["slices"][1:]
    assert {row["reason"] for row in small} == {
        "50 documents, and the calibrator was fitted for slices of 100"
    }
    far = read_run(planted_store(tmp_path / "d", n=1200, effect=4.0, seed=1))
    rows = predict_slices(fitted, far)["slices"]
    assert all(row["reason"].startswith("outside what was fitted: dispersion") for row in rows)
    assert all(np.isnan(row["predicted"]) for row in (*small, *rows))


def test_it_refuses_where_it_did_not_beat_the_blind_guess(tmp_path):
    noise = fit_paper_calibrator(read_run(planted_store(tmp_path / "a", effect=0.0)), size=100)
    with pytest.raises(UsageError, match="a blind guess"):
        check_worth(noise, "cal.json")
    check_worth(
        fit_paper_calibrator(read_run(planted_store(tmp_path / "b", effect=3.0)), size=100), "cal.json"
    )


def test_a_file_of_an_older_version_is_read(tmp_path):
    """It has neither `protocol` nor `identity`, and does not say which documents were labelled."""
    fitted = fit_paper_calibrator(read_run(planted_store(tmp_path / "a", effect=0.8)), size=100)
    old = {key: value for key, value in fitted.items() if key not in ("protocol", "identity")}
    old["labelled"] = {key: old["labelled"][key] for key in ("documents", "accuracy")}
    (tmp_path / "cal.json").write_text(calibrator_json(old))
    run = read_run(planted_store(tmp_path / "b", n=600, effect=0.8, seed=4))
    found = predict_slices(read_calibrator(tmp_path / "cal.json"), run)
    assert found["protocol"] == "paper"
    assert found["slices"][0]["documents"] == 600
