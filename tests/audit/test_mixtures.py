"""Mixture curves on stores whose truth is known, and the paper's tables by the same code."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr
from synthetic import planted_store

from lmeval_dispersion.audit.mixtures import mixture_curves, trend
from lmeval_dispersion.audit.run import read_run
from lmeval_dispersion.geometry import dispersion, dispersion_estimate

TABLES = json.loads((Path(__file__).parents[1] / "data" / "mixture_tables.json").read_text())


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    return read_run(planted_store(tmp_path_factory.mktemp("planted") / "s", effect=0.5))


@pytest.fixture(scope="module")
def noise(tmp_path_factory):
    return read_run(planted_store(tmp_path_factory.mktemp("noise") / "s", effect=0.0, seed=1))


def expected_dispersion(run, share):
    """Of a mixture with ``share`` of correct documents, from the mean unit vectors of the two pools."""
    u = run.vectors.rows.astype(np.float64) + run.vectors.mean
    a, b = u[run.right], u[~run.right]
    mean_pair = {
        "aa": 1 - dispersion(a),
        "bb": 1 - dispersion(b),
        "ab": float(a.mean(axis=0) @ b.mean(axis=0)),
    }
    pairs = 100 * 99
    k = round(100 * share)
    same = k * (k - 1) * mean_pair["aa"] + (100 - k) * (99 - k) * mean_pair["bb"]
    return 1 - (same + 2 * k * (100 - k) * mean_pair["ab"]) / pairs


def test_mixtures_have_the_expected_dispersion_and_rise(planted):
    found = mixture_curves(planted)
    assert found["documents_per_mixture"] == 100
    assert found["seeds"] == 10
    assert [point["target_accuracy"] for point in found["curve"]] == list(range(0, 101, 10))
    assert found["unreachable_targets"] == []
    z = [
        (point["dispersion"] - expected_dispersion(planted, point["target_accuracy"] / 100))
        / point["dispersion_se"]
        for point in found["curve"]
    ]
    assert np.abs(z).max() < 5
    assert np.sqrt(np.mean(np.square(z))) < 2
    assert found["dispersion_trend"]["spearman"] > 0.98
    assert abs(found["query_perplexity_trend"]["spearman"]) < 0.9


def test_pools_have_the_dispersions_of_their_documents(planted, noise):
    u = planted.vectors.rows.astype(np.float64) + planted.vectors.mean
    found = mixture_curves(planted)["pools"]
    first, second = dispersion_estimate(u[planted.right]), dispersion_estimate(u[~planted.right])
    assert found["correct"] == pytest.approx(first.mean, rel=1e-5)
    assert found["incorrect_se"] == pytest.approx(second.se, rel=1e-3)
    half = 1.959964 * np.hypot(first.se, second.se)
    assert found["difference_high"] == pytest.approx(first.mean - second.mean + half, rel=1e-3)
    assert found["difference_low"] > 0
    none = mixture_curves(noise)["pools"]
    assert none["difference_low"] < 0 < none["difference_high"]


def test_mixtures_of_noise_have_no_trend(noise):
    found = mixture_curves(noise)["dispersion_trend"]
    assert found["shape"] == "not monotone"
    assert found["low"] < 0.5


def test_the_spread_of_the_curve_is_that_of_independent_draws(planted):
    """Standard errors over seeds agree with the spread between runs of another seed."""
    curves = [mixture_curves(planted, seed=s)["curve"] for s in range(1, 9)]
    means = np.array([[point["dispersion"] for point in curve] for curve in curves])
    errors = np.array([[point["dispersion_se"] for point in curve] for curve in curves])
    assert np.sqrt((errors**2).mean()) == pytest.approx(means.std(axis=0, ddof=1).mean(), rel=0.35)


def test_unreachable_targets_are_named_and_nothing_is_drawn_twice(tmp_path):
    run = read_run(planted_store(tmp_path, n=200, accuracy=0.04))
    correct = int(run.right.sum())
    assert 0 < correct < 20
    found = mixture_curves(run)
    assert found["documents_per_mixture"] == 20
    reachable = [t for t in range(0, 101, 10) if t * 20 / 100 <= correct]
    assert [point["target_accuracy"] for point in found["curve"]] == reachable
    assert found["unreachable_targets"] == [t for t in range(0, 101, 10) if t not in reachable]


def test_shapes_of_curves():
    assert trend([0, 1, 2], [1, 2, 2], [0, 0, 0]).shape == "increasing"
    assert trend([0, 1, 2], [3, 2, 1], [0, 0, 0]).shape == "decreasing"
    found = trend([0, 1, 2, 3], [1, 3, 2, 4], [0.0, 0.3, 0.4, 0.0])
    assert found.shape == "not monotone"
    assert found.against == [(1.0, 2.0, -1.0, pytest.approx(-1 / 0.5))]
    assert trend([2, 0, 1], [3.0, 1.0, 2.0], [0, 0, 0]).spearman == pytest.approx(1.0)
    assert trend([0, 1], [1, 2], [0, 0]).shape == "undefined"
    assert trend([0, 1, 2], [1, 1, 1], [0, 0, 0]).shape == "undefined"
    assert trend([0, 1, 2, 3], [1, math.nan, 2, 3], [0, 0, 0, 0]).shape == "increasing"


def test_the_interval_widens_with_the_errors_and_holds_the_estimate():
    levels, means = np.arange(11), np.arange(11.0)
    widths = []
    for error in (0.01, 1.0, 5.0):
        found = trend(levels, means, np.full(11, error))
        assert found.low <= found.spearman <= found.high
        widths.append(found.high - found.low)
    assert widths[0] == 0
    assert widths[0] < widths[1] < widths[2]
    assert trend(levels, means, np.full(11, 0.01)).share_monotone == 1.0
    assert trend(levels, means, np.full(11, 5.0)).share_monotone < 0.05


def paper_curves():
    """Every printed curve: (name, levels, means, errors)."""
    for table in ("table3", "table4"):
        for model, lines in TABLES[table]["models"].items():
            for quantity in ("dispersion", "perplexity"):
                yield (
                    f"{table} {model} {quantity}",
                    [line["frac_correct"] for line in lines],
                    [line[quantity]["mean"] for line in lines],
                    [line[quantity]["pm"] for line in lines],
                )
    for table in ("table6", "table7", "table8"):
        for model in [key for key in TABLES[table]["rows"][0] if key != "frac_correct"]:
            lines = TABLES[table]["rows"]
            yield (
                f"{table} {model} dispersion",
                [line["frac_correct"] for line in lines],
                [line[model]["mean"] for line in lines],
                [line[model]["pm"] for line in lines],
            )


@pytest.mark.parametrize(("name", "levels", "means", "errors"), list(paper_curves()), ids=str)
def test_the_papers_tables(name, levels, means, errors):
    """Slow: pairs of neighbours by hand, rank correlation by scipy."""
    found = trend(levels, means, errors)
    ordered = [mean for _, mean in sorted(zip(levels, means, strict=True))]
    steps = [b - a for a, b in itertools.pairwise(ordered)]
    rho = spearmanr(levels, means).statistic
    assert found.spearman == pytest.approx(rho)
    falls = sum(step < 0 for step in steps)
    rises = sum(step > 0 for step in steps)
    assert (found.shape == "increasing") == (falls == 0)
    assert (found.shape == "decreasing") == (rises == 0)
    assert len(found.against) == (falls if rho >= 0 else rises)


def test_what_the_papers_tables_say():
    shapes = {name: trend(levels, means, errors) for name, levels, means, errors in paper_curves()}
    dispersions = {name: found for name, found in shapes.items() if name.endswith("dispersion")}
    not_monotone = sorted(name for name, found in dispersions.items() if found.shape != "increasing")
    # The text says the trend is the same everywhere; IFEval's curves and one of QuAIL's are not monotone.
    assert not_monotone == [
        "table7 Llama-3.1-8B-Instruct dispersion",
        "table7 Llama-3.2-1B-Instruct dispersion",
        "table7 Llama-3.2-3B-Instruct dispersion",
        "table8 Llama-3.2-1B-Instruct dispersion",
    ]
    assert all(found.spearman > 0.9 for found in dispersions.values())
    # No step goes back by more than the printed errors allow.
    assert all(abs(step.z) < 2 for found in dispersions.values() for step in found.against)
    # Perplexity is not flat: in five of six curves it rises with the share of correct answers.
    perplexities = [found.spearman for name, found in shapes.items() if name.endswith("perplexity")]
    assert sum(rho > 0.35 for rho in perplexities) == 5
