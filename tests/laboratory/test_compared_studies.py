"""Comparisons of studies against their formulas, on tables made by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from lmeval_dispersion import compare_studies
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.laboratory.study import Study
from lmeval_dispersion.laboratory.token_condensation import model_tables


def compared(first, second):
    return compare_studies(first, second).differences


FIRST, SECOND = np.array([0.5, 0.52, 0.47, 0.55]), np.array([0.6, 0.58, 0.55, 0.69])


def study(folder, kind, pool, sha256, tables):
    made = Study.open(folder, kind, {})
    made.once(f"segments.{pool}", {"sha256": sha256})
    made.finish(tables)
    return folder


def sublayers_study(folder, values, sha256="same", layer="layer.0"):
    draws = {"layer": layer, "segments": 10, "draw": range(len(values)), "dispersion": values}
    return study(folder, "sublayers", "pool", sha256, {"draws": pd.DataFrame(draws)})


def condensation_study(folder, model, means, sha256="same"):
    tables = model_tables([f"layer.{k}" for k in range(4)], means, np.ones((4, 4)))
    named = {name: frame.assign(model=model, control="") for name, frame in tables.items()}
    return study(folder, "condensation", model, sha256, named)


@pytest.mark.parametrize("sha256", ["same", "another"])
def test_draws_of_the_same_segments_are_paired(tmp_path, sha256):
    a, b = sublayers_study(tmp_path / "a", FIRST), sublayers_study(tmp_path / "b", SECOND, sha256)
    row = compared(a, b).iloc[0]
    assert row["paired"] == (sha256 == "same")
    assert row["difference"] == pytest.approx(SECOND.mean() - FIRST.mean())
    spread = np.std(SECOND - FIRST, ddof=1)
    if sha256 == "another":
        spread = np.sqrt(FIRST.var(ddof=1) + SECOND.var(ddof=1))
    assert (row["high"] - row["low"]) / 2 == pytest.approx(1.959963984540054 * spread)


def test_the_same_texts_take_their_own_variation_out(tmp_path):
    rng = np.random.default_rng(0)
    means = rng.normal(size=(40, 4)) + np.arange(4)
    shifted = means + 0.1
    a = condensation_study(tmp_path / "a", "m", means)
    paired = compared(a, condensation_study(tmp_path / "b", "m", shifted))
    rows = paired[paired["figure"].isin(["mean", "last mean"])]
    assert len(rows) == 5
    for column in ("difference", "low", "high"):
        assert rows[column].to_numpy() == pytest.approx(0.1)
    assert paired[paired["figure"] == "trend"]["difference"].item() == 0
    apart = compared(a, condensation_study(tmp_path / "c", "m", shifted, "another"))
    rows = apart[apart["figure"] == "mean"]
    assert not rows["paired"].any()
    # Two means of 40 texts of spread 1: the difference's standard error is sqrt(2 / 40).
    widths = (rows["high"] - rows["low"]).to_numpy()
    assert widths == pytest.approx(2 * 1.96 * np.sqrt(2 / 40), rel=0.35)
    renamed = compared(a, condensation_study(tmp_path / "d", "n", shifted))
    assert set(renamed["model"]) == {"m → n"}
    assert renamed["paired"].all()


def test_what_cannot_be_compared_is_said(tmp_path):
    a = sublayers_study(tmp_path / "a", FIRST)
    other = condensation_study(tmp_path / "b", "m", np.ones((3, 4)))
    with pytest.raises(UsageError, match="two studies of one kind, got sublayers and condensation"):
        compared(a, other)
    with pytest.raises(UsageError, match=r"share no layer, split or model; run both with the same ones"):
        compared(a, sublayers_study(tmp_path / "c", SECOND, layer="last"))
