"""Slices: which documents belong to which, their numbers against loops, and their order."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import spearmanr
from scipy.stats import t as student
from synthetic import documents, planted_store, vectors, written

from lmeval_dispersion import audit
from lmeval_dispersion.auditing.run import read_run
from lmeval_dispersion.auditing.slices import (
    SliceRow,
    association,
    by_band,
    by_column,
    by_value,
    dispersion_bounds,
    in_order,
    slice_table,
    slicings,
    weakest,
)
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.geometry import Spectrum, dispersion_estimate, spectrum
from lmeval_dispersion.report.cells import whisker


def test_bands_hold_every_known_value_once_and_keep_ties_together():
    rng = np.random.default_rng(0)
    values = rng.integers(0, 12, size=200).astype(float)
    values[::17] = np.nan
    bands, known = by_band(values), np.flatnonzero(~np.isnan(values))
    np.testing.assert_array_equal(np.sort(np.concatenate([band.rows for band in bands])), known)
    for value in np.unique(values[known]):
        assert sum(value in values[band.rows] for band in bands) == 1
    assert [b.name for b in by_band(np.full(9, 3.0))] == ["3 to 3"]
    assert by_band(np.full(3, np.nan)) == []
    named = by_value(["b", "a", None, "b", math.nan])
    assert [(part.name, part.rows.tolist()) for part in named] == [("a", [1]), ("b", [0, 3])]


def test_slice_rows_are_those_of_a_loop(planted):
    table = slice_table(planted, slicings(planted)["subject"]).rows
    u = planted.vectors.rows.astype(np.float64) + planted.vectors.mean
    frame = planted.documents
    assert [row.slice for row in table] == sorted(set(frame["subject"]))
    for row in table:
        mask = (frame["subject"] == row.slice).to_numpy()
        estimate = dispersion_estimate(u[mask])
        assert row.dispersion == pytest.approx(estimate.mean, rel=1e-6)
        assert row.dispersion_se == pytest.approx(estimate.se, rel=1e-4)
        assert row.accuracy == pytest.approx(frame["correct"][mask].mean())
        assert row.query_perplexity == pytest.approx(frame["query_perplexity"][mask].mean())
        assert row.documents == mask.sum()


def test_slices_can_be_any_column_and_unusable_ones_are_refused(planted, tmp_path):
    run = read_run(
        planted_store(
            tmp_path, n=90, flag=[True, False] * 45, words=np.arange(90) / 7, note=["a", None] * 45
        )
    )
    assert [g.name for g in by_column(run, "flag")] == ["False", "True"]
    assert len(by_column(run, "words")) == 5
    assert [len(g.rows) for g in by_column(run, "note")] == [45]
    for name in ("absent", "text", "logprobs", "doc_id"):
        with pytest.raises(UsageError, match=f"no column '{name}'"):
            by_column(run, name)
    with pytest.raises(UsageError, match="the column 'confidence' is empty"):
        by_column(read_run(planted_store(tmp_path, n=9, logprobs=[[]] * 9)), "confidence")
    ways = list(slicings(run, ["words"]))
    assert ways[0] == "words"  # the answer speaks of what was asked for
    assert set(ways) == {"subject", "category", "length", "confidence", "words"}


def test_association_over_slices():
    def table(pairs, n=50):
        return [
            SimpleNamespace(dispersion=d, accuracy=a, documents=n, labelled=n) for d, a in pairs
        ]

    rng = np.random.default_rng(0)
    x = rng.random(30)
    noisy = table(zip(x, x + 0.2 * rng.random(30), strict=True))
    found = association(noisy)
    expected = spearmanr([r.dispersion for r in noisy], [r.accuracy for r in noisy]).statistic
    assert found.spearman == pytest.approx(expected)
    assert 0.5 < found.low < found.spearman < found.high <= 1
    null = association(table(zip(rng.random(30), rng.random(30), strict=True)))
    assert null.low < 0 < null.high
    few = association(noisy[:7])
    assert np.isnan(few.low)
    assert not np.isnan(few.spearman)
    assert "4 slices" in association(noisy[:3]).missing
    assert "same accuracy" in association(table([(k, 0.5) for k in range(6)])).missing


def test_slices_have_the_spectrum_of_their_own_vectors(tmp_path):
    rng = np.random.default_rng(4)
    x = vectors(np.ones(40), rng=rng, d=12) * rng.uniform(1, 30, size=(40, 1))
    frame = documents(np.arange(40) % 2, rng=rng, subjects=4)
    frame.loc[:1, "subject"] = "two"
    run = read_run(written(tmp_path, frame, x))
    np.testing.assert_allclose(
        run.raw_vectors, x, rtol=0, atol=2e-3 * np.abs(x).max()
    )  # float16 rows
    rows = slice_table(run, by_column(run, "subject"), run.raw_vectors).rows
    expected = spectrum(x[frame["subject"] == "subject 2"])
    assert [getattr(rows[2], name) for name in Spectrum._fields] == pytest.approx(
        expected, rel=1e-3
    )
    assert all(np.isnan(getattr(rows[-1], name)) for name in Spectrum._fields)
    assert not hasattr(slice_table(run, by_column(run, "subject")).rows[0], "rankme")


def test_intervals_of_dispersion_are_students_and_stay_in_its_range():
    row = SliceRow("few", 0.02, 0.03, 0.5, 0.1, 0.9, 0.5, 5, 5, 1.0, 0.5, 10, None)
    assert dispersion_bounds(row) == (0.0, pytest.approx(0.02 + student.ppf(0.975, 4) * 0.03))
    assert dispersion_bounds(replace(row, dispersion=1.2))[1] == 5 / 4
    assert np.isnan(dispersion_bounds(replace(row, documents=2))).all()


def test_the_weakest_slice_is_named_in_few_runs_without_one():
    rng = np.random.default_rng(0)
    named = 0
    for _ in range(200):
        shares = rng.binomial(30, 0.6, size=20) / 30
        rows = [
            SliceRow(str(i), 0.1, 0.01, a, 0, 1, 0.5, 30, 30, 1.0, 0.5, 10, None)
            for i, a in enumerate(shares)
        ]
        named += weakest(rows, replace(rows[0], accuracy=shares.mean())) is not None
    assert named <= 18  # 5 % and three standard errors
    assert weakest([*rows, replace(rows[0], slice="bad", accuracy=0.1)], rows[0]).slice == "bad"


def test_slices_with_an_order_keep_it_and_the_whole_run_is_not_on_their_axis(tmp_path):
    rng = np.random.default_rng(0)
    level = rng.integers(8, 12, 400)
    frame = documents(rng.random(400) < 0.5, rng=rng).assign(
        level=level, kind=np.where(level > 9, "b", "a")
    )
    # The higher the level, the less its documents spread.
    x = np.eye(1, 16) + rng.normal(size=(400, 16)) / (level[:, None] - 6) ** 2
    written(tmp_path, frame, x, {"model": "m"})
    found = audit(tmp_path, slice=["level", "kind"], short=True)
    tables = found.tables()
    names = [row["slice"] for row in tables["slices-level"].brief.rows]
    assert names == ["8", "9", "10", "11", "all documents"]
    assert tables["slices-level"].caption == "4 slices in order of level"
    assert [row["slice"] for row in tables["slices-kind"].rows] == ["b", "a", "all documents"]
    assert in_order(["0.2 to 0.4", "-1 to 0.1", "1e+03"]) == ["-1 to 0.1", "0.2 to 0.4", "1e+03"]
    assert in_order(["1", "two"]) == in_order(["1", "nan"]) == []
    table = tables["slices-level"].brief
    (column,) = [column for column in table.columns if column.key == "dispersion"]
    assert [whisker(row, column) is None for row in table.rows] == [False] * 4 + [True]
