"""A fitted calibration as a file: its predictions, its interval, and what it refuses."""

import numpy as np
import pytest
from synthetic import planted_store

from lmeval_dispersion.audit.batches import mixture_batches
from lmeval_dispersion.audit.calibrator import (
    calibrator_json,
    check_fits,
    fit_calibrator,
    predict_slices,
    read_calibrator,
)
from lmeval_dispersion.audit.regressors import regression_of
from lmeval_dispersion.audit.run import read_run
from lmeval_dispersion.audit.slices import by_column
from lmeval_dispersion.errors import UsageError


def test_a_calibrator_predicts_another_run_of_the_same_kind(tmp_path):
    fitted = fit_calibrator(read_run(planted_store(tmp_path / "a", effect=0.8)))
    (tmp_path / "cal.json").write_text(calibrator_json(fitted))
    fitted = read_calibrator(tmp_path / "cal.json")
    inside = []
    for seed, accuracy in enumerate((0.1, 0.3, 0.5, 0.7, 0.9)):
        path = planted_store(tmp_path / f"b{seed}", n=600, effect=0.8, accuracy=accuracy, seed=seed + 9)
        run = read_run(path)
        row = predict_slices(fitted, run, [])["slices"][0]
        assert row["predicted"] == pytest.approx(row["true"], abs=0.12)
        inside.append(row["low"] <= row["true"] <= row["high"])
    assert sum(inside) >= 4
    assert 0 < fitted["interval"]["half_width"] < 0.3


def test_the_interval_covers_as_it_says(tmp_path):
    """Of fresh batches drawn like the validation ones, about 95 % lie inside."""
    fitted = fit_calibrator(read_run(planted_store(tmp_path / "a", effect=0.5)))
    run = read_run(planted_store(tmp_path / "b", effect=0.5, seed=5))
    batches = mixture_batches(run, run.labelled, 100, repeats=6, rng=np.random.default_rng(0))
    errors = np.abs(regression_of(fitted["regression"]).predict(batches.dispersion) - batches.accuracy)
    assert (errors <= fitted["interval"]["half_width"]).mean() > 0.88


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "other/model"}, "fitted for model 'synthetic/model', and the run has 'other/model'"),
        ({"revision": "v2"}, "fitted for revision 'main', and the run has 'v2'"),
        ({"prompt_format": "p2"}, "fitted for prompt format 'p1', and the run has 'p2'"),
        ({"chat_template": "c"}, "fitted for chat template None"),
        ({"num_fewshot": 5}, "number of few-shot examples 0"),
        ({"tasks": {"other": 1}}, "the run has task 'other'"),
        ({"tasks": {"synthetic": 2}}, "fitted on version 1 of task 'synthetic'"),
    ],
)
def test_a_calibrator_refuses_another_setting_with_the_reason(tmp_path, change, message):
    fitted = fit_calibrator(read_run(planted_store(tmp_path / "a", n=1500)))
    run = read_run(planted_store(tmp_path / "b", n=300, manifest=change))
    with pytest.raises(UsageError, match=message):
        check_fits(fitted, run)


def test_a_calibrator_refuses_another_layer_and_smaller_slices(tmp_path):
    run = read_run(planted_store(tmp_path / "a", n=2400))
    fitted = fit_calibrator(run)
    assert fitted["slice_size"] == 100
    other = {**fitted, "layer": "layer.3"}
    with pytest.raises(UsageError, match=r"fitted for layer 'layer\.3', and the run has 'last'"):
        check_fits(other, run)
    with pytest.raises(UsageError, match="fitted for vector width 31, and the run has 32"):
        check_fits({**fitted, "width": 31}, run)
    small = read_run(planted_store(tmp_path / "b", n=90))
    with pytest.raises(UsageError, match="slices of 100 documents, and the run has 90"):
        predict_slices(fitted, small, [])
    middle = read_run(planted_store(tmp_path / "c", n=300))
    rows = predict_slices(fitted, middle, by_column(middle, "subject"))["slices"]
    assert rows[0]["reason"] is None
    reason = "50 documents, and the calibrator was fitted for slices of 100"
    assert {row["reason"] for row in rows[1:]} == {reason}
    assert all(np.isnan(row["predicted"]) for row in rows[1:])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a calibrator"),
        ("[1]", "is not a calibrator"),
        ('{"format": "dispersion-audit/1"}', "is not a calibrator"),
        ('{"format": "dispersion-calibrator/9"}', "written as 'dispersion-calibrator/9'"),
        ('{"format": "dispersion-calibrator/1"}', "lacks 'blind_mae'"),
    ],
)
def test_what_is_no_calibrator_is_refused(tmp_path, text, message):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_calibrator(tmp_path / "c.json")
    with pytest.raises(UsageError, match="expected a calibrator"):
        read_calibrator(tmp_path / "absent.json")
