"""A training's charts: its figures by step, with the accuracies and how they agree."""

from __future__ import annotations

import re

import pytest
from scipy.stats import spearmanr
from screenings import ranked, ratio_of, result, screened

from lmeval_dispersion.report.forms import file_bytes

ACCURACIES = {5: 0.2, 10: 0.5, 15: 0.4, 20: 0.7, 25: None, 30: 0.9}


def training(accuracies, *, by_ratio=True):
    """Steps whose figure rises; every other one's G falls."""
    members = []
    for place, (step, accuracy) in enumerate(accuracies.items()):
        values = {"ratio": ratio_of(1 + place / 10, seed=place)} if by_ratio else {}
        members.append(
            screened(
                f"/x/run1/checkpoint-{step}",
                1 + place % 3,
                commit=None,
                accuracy=accuracy,
                **values,
            )
        )
    return result(ranked(members))


@pytest.mark.parametrize("name", ["ranking0", "gap0"])
def test_a_figure_stands_by_step_beside_the_accuracy_with_their_correlation(name):
    found = training(ACCURACIES)
    chart = found.charts()[name]
    figures, line = chart.specification()["layer"]
    (group,) = found.groups
    assert [row["step"] for row in figures["data"]["values"]] == list(ACCURACIES)
    rated = {step: accuracy for step, accuracy in ACCURACIES.items() if accuracy is not None}
    drawn = {row["step"]: row["accuracy"] for row in line["data"]["values"]}
    assert drawn == rated
    members = [c for c in group.steps if c.accuracy is not None]
    values = [c.ratio.mean if name == "ranking0" else c.gap.mean for c in members]
    rho = spearmanr(values, list(rated.values())).statistic
    assert f"and the accuracy (Spearman {rho:.3f}, p 0." in chart.caption
    assert chart.caption.endswith("of 5 checkpoints)")


def test_a_saved_picture_has_the_correlation_in_it():
    found = training(ACCURACIES, by_ratio=False)
    svg = file_bytes(found.document(), "svg").decode("utf-8")
    (drawn,) = re.findall(r">([^<>]*Spearman[^<>]*)</text>", svg)
    assert drawn == found.charts()["ranking0"].caption


def test_one_accuracy_or_equal_ones_have_no_correlation():
    one = dict.fromkeys(ACCURACIES) | {5: 0.5}
    assert "(fewer than two checkpoints to compare)" in training(one).charts()["gap0"].caption
    equal = dict.fromkeys(ACCURACIES, 0.5)
    assert "(all accuracies are equal)" in training(equal).charts()["ranking0"].caption


def test_without_accuracies_the_charts_are_the_figures_alone():
    charts = training(dict.fromkeys(ACCURACIES)).charts()
    for name, called in (("ranking0", "Ratio"), ("gap0", "G")):
        assert charts[name].caption == f"{called} along the training of run1"
        assert "resolve" not in charts[name].specification()
    assert "gap0" not in training(ACCURACIES, by_ratio=False).charts()
