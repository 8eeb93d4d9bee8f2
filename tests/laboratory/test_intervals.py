"""Coverage of the laboratory's intervals on planted data."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from planted_law import bootstrap_correlation, planted_bins, planted_clusters
from scipy import stats

from lmeval_dispersion.laboratory.context_clusters import ratio_interval, within_interval
from lmeval_dispersion.laboratory.perplexity_law import SEQUENCE, correlations
from lmeval_dispersion.statistics import Interval, correlation_difference

FEW_AND_FULL = pytest.mark.parametrize("studies", [60, pytest.param(300, marks=pytest.mark.slow)])


def nominal(studies):
    """How many of them hold the truth at 95 %, in all but one of a thousand cases: 271 to 296 of 300."""
    low, high = stats.binom.ppf([0.0005, 0.9995], studies, 0.95)
    return range(int(low), int(high) + 1)


@FEW_AND_FULL
@pytest.mark.parametrize(
    ("kind", "bins", "rho"),
    [(SEQUENCE, 20, 0.0), (SEQUENCE, 10, -0.6), ("last@16", 20, -0.9), ("last@16", 40, 0.3)],
)
def test_the_interval_of_r_covers_a_planted_law(kind, bins, rho, studies):
    x, y = planted_bins(np.random.default_rng(0), rho, studies, bins=bins, kind=kind)
    found = [bootstrap_correlation(*pair, seed=i) for i, pair in enumerate(zip(x, y, strict=True))]
    assert sum(interval.low <= rho <= interval.high for interval in found) in nominal(studies)


def tables(x, y, control):
    """Both tables of a law whose bins have a model's and a control's dispersion."""
    about = {"model": "m", "data": "d", "perplexity": SEQUENCE, "layer": "last", "split": "data"}
    values = {
        "mean_perplexity": x,
        "mean_nll": np.log(x),
        "dispersion": y,
        "dispersion.shuffled": control,
    }
    points = pd.DataFrame({**values, **about})
    return [table.iloc[0] for table in correlations(points, ["shuffled"], 0).values()]


@FEW_AND_FULL
def test_the_tables_of_a_law_print_these_intervals_and_a_control_s_difference_covers(studies):
    rng, first, second = np.random.default_rng(1), -0.8, -0.2
    x, y = planted_bins(rng, first, studies, bins=20)
    control = second * (x - x.mean()) / x.std() + np.sqrt(1 - second**2) * rng.normal(size=x.shape)
    held = 0
    for each in zip(x, y, control, strict=True):
        mine, other = tables(*each)
        held += other["difference_low"] <= first - second <= other["difference_high"]
    assert held in nominal(studies)
    for row, values in ((mine, each[1]), (other, each[2])):
        expected = bootstrap_correlation(each[0], values)
        assert (row["pearson"], row["low"], row["high"]) == pytest.approx(tuple(expected))


@FEW_AND_FULL
@pytest.mark.parametrize(
    ("bins", "rho", "layers"), [(8, -0.6, 1), (20, -0.6, 1), (20, 0.0, 5), (20, -0.6, 5)]
)
def test_the_intervals_of_the_answer_cover_all_layers_at_once(bins, rho, layers, studies):
    """Of one layer, and of five independent ones, of which their own intervals cover all in 81 %."""
    rng, held = np.random.default_rng(bins + layers), 0
    for _ in range(studies):
        x = planted_bins(rng, 0.0, 1, bins=bins)[0][0]
        points = pd.concat(
            pd.DataFrame(
                {
                    **{"model": "m", "data": "d", "split": "data"},
                    **{"perplexity": SEQUENCE, "layer": f"layer.{layer}"},
                    **{"mean_perplexity": x, "mean_nll": np.log(x)},
                    "dispersion": rho * (x - x.mean()) / x.std()
                    + np.sqrt(1 - rho**2) * rng.normal(size=bins),
                }
            )
            for layer in range(layers)
        )
        rows = correlations(points, [], 0)["correlations"]
        held += bool(((rows["all_low"] <= rho) & (rho <= rows["all_high"])).all())
        assert ((rows["all_low"] <= rows["low"]) & (rows["high"] <= rows["all_high"])).all()
    assert held >= min(nominal(studies))


def test_a_difference_of_independent_correlations_is_that_of_their_distances():
    """Zou's interval by hand: r 0.5 (0.2 to 0.7) minus 0.1 (-0.3 to 0.4)."""
    first, second = Interval(0.1, -0.3, 0.4), Interval(0.5, 0.2, 0.7)
    bounds = correlation_difference(first, second, ([0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 1.0, 1.0]))
    assert bounds == pytest.approx((0.4 - np.hypot(0.3, 0.3), 0.4 + np.hypot(0.2, 0.4)))


@pytest.fixture(scope="module")
def true_clusters():
    within, apart = planted_clusters(np.random.default_rng(3), 10_000)
    return within.mean(), apart.mean() / within.mean()


@FEW_AND_FULL
@pytest.mark.parametrize("count", [10, 30])
def test_the_intervals_of_clusters_cover(true_clusters, count, studies):
    rng, held = np.random.default_rng(count), np.zeros(2, dtype=int)
    for _ in range(studies):
        within, apart = planted_clusters(rng, count)
        found = within_interval(within), ratio_interval(within, apart)
        held += [
            each.low <= truth <= each.high for each, truth in zip(found, true_clusters, strict=True)
        ]
    assert held[1] in nominal(studies)
    # Spreads are skewed, so that a mean over few clusters is held a little less often.
    assert held[0] >= (0.9 if studies == 300 else 0.85) * studies
