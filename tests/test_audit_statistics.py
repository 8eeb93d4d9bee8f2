"""The audit's statistics against slow re-derivations: loops, scipy and scikit-learn."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr
from sklearn.ensemble import RandomForestRegressor
from sklearn.isotonic import IsotonicRegression
from sklearn.metrics import roc_auc_score

from lmeval_dispersion.audit.calibration import atc_threshold, t_interval
from lmeval_dispersion.audit.confidence import confidences
from lmeval_dispersion.audit.grouping import by_band, by_value
from lmeval_dispersion.audit.points import Points, left_out
from lmeval_dispersion.audit.ranking import auroc, auroc_difference
from lmeval_dispersion.audit.regressors import FITS, fitted, predicted
from lmeval_dispersion.audit.slices import association, wilson
from lmeval_dispersion.audit.tail import clustered
from lmeval_dispersion.audit.trend import rank_correlations, trend
from lmeval_dispersion.errors import TooFewVectorsError, UsageError
from lmeval_dispersion.geometry import contributions, dispersion, dispersion_estimate, unit_rows

TABLES = json.loads((Path(__file__).parent / "data" / "mixture_tables.json").read_text())


def rows(n=60, d=24, spread=1.0, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=d) + spread * rng.normal(size=(n, d))).astype(np.float32)


def points(x):
    return Points(unit_rows(x).astype(np.float32))


# --- points -------------------------------------------------------------------------------------------------


def pairwise_dispersion(x):
    u = [row / math.sqrt(float(row @ row)) for row in x.astype(np.float64)]
    distances = [1 - float(a @ b) for a, b in itertools.combinations(u, 2)]
    return sum(distances) / len(distances)


def test_dispersions_of_subsets_are_their_pairwise_means():
    x = rows()
    rng = np.random.default_rng(1)
    subsets = [rng.choice(60, size=size, replace=False) for size in (2, 3, 10, 59, 60)]
    expected = [pairwise_dispersion(x[subset]) for subset in subsets]
    np.testing.assert_allclose(points(x).dispersions(subsets), expected, rtol=2e-6)


@pytest.mark.parametrize("spread", [1.0, 1e-2, 1e-3, 3e-4])
def test_float32_storage_keeps_five_digits_of_the_dispersion(spread):
    """Down to a dispersion of 1e-7 the error is that of the float32 input itself."""
    x = rows(400, 256, spread)
    subsets = [np.random.default_rng(k).choice(400, size=100, replace=False) for k in range(20)]
    u32 = unit_rows(x).astype(np.float32)
    expected = [dispersion(u32[subset].astype(np.float64)) for subset in subsets]
    np.testing.assert_allclose(Points(u32.copy()).dispersions(subsets), expected, rtol=1e-5)


def test_wide_vectors_and_many_subsets_cross_the_blocks():
    x = rows(50, 1300)
    subsets = [np.random.default_rng(k).choice(50, size=7, replace=False) for k in range(1100)]
    found = points(x).dispersions(subsets)
    for k in (0, 1023, 1024, 1099):
        assert found[k] == pytest.approx(pairwise_dispersion(x[subsets[k]]), rel=1e-5)


@pytest.mark.parametrize("chosen", [None, np.arange(0, 60, 2), np.array([5, 3])])
def test_contributions_and_estimates_equal_geometry(chosen):
    x = rows()
    part = x if chosen is None else x[chosen]
    p = points(x)
    np.testing.assert_allclose(p.contributions(chosen), contributions(part), rtol=2e-6)
    found, expected = p.estimate(chosen), dispersion_estimate(part)
    assert found.mean == pytest.approx(expected.mean, rel=1e-6)
    assert found.se == pytest.approx(expected.se, rel=1e-4, nan_ok=True)


def test_left_out_values_are_dispersions_without_each_row():
    x = rows(12)
    expected = [dispersion(np.delete(x, i, axis=0)) for i in range(12)]
    np.testing.assert_allclose(left_out(contributions(x)), expected, rtol=1e-9)


def test_fewer_than_two_rows_are_refused():
    p = points(rows())
    with pytest.raises(TooFewVectorsError):
        p.dispersions([np.array([1])])
    with pytest.raises(TooFewVectorsError):
        p.contributions(np.array([1]))
    assert p.dispersions([]).shape == (0,)


# --- trends -------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-3, 3), min_size=3, max_size=12))
@settings(max_examples=60, deadline=None)
def test_rank_correlation_equals_scipy(values):
    x = np.arange(len(values))
    found = rank_correlations(x, [values])[0]
    if len(set(values)) == 1:
        assert math.isnan(found)
    else:
        assert found == pytest.approx(spearmanr(x, values).statistic)


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


# --- confidence ---------------------------------------------------------------------------------------------


def test_confidences_by_hand():
    logprobs = [
        [-1.0, -2.0, -3.0],
        [-5.0, -5.0],
        [],
        [-1.0],
        [-math.inf, -2.0],
        [-math.inf] * 2,
        [math.nan, 0],
    ]
    nan = [math.nan] * 2
    top, margin, entropy = confidences(logprobs)
    p = [math.exp(-k) / sum(math.exp(-j) for j in (1, 2, 3)) for k in (1, 2, 3)]
    np.testing.assert_allclose(top, [p[0], 0.5, *nan, 1.0, *nan])
    np.testing.assert_allclose(margin, [p[0] - p[1], 0.0, *nan, 1.0, *nan])
    hand = -sum(q * math.log(q) for q in p)
    np.testing.assert_allclose(entropy, [hand, math.log(2), *nan, 0.0, *nan], atol=1e-12)
    assert all(len(v) == 0 for v in confidences([]))


def test_confidences_do_not_move_with_a_constant():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(50, 4)) * 5
    for a, b in zip(confidences(values.tolist()), confidences((values - 800).tolist()), strict=True):
        np.testing.assert_allclose(a, b)


# --- grouping -----------------------------------------------------------------------------------------------


def test_bands_hold_every_known_value_once_and_keep_ties_together():
    rng = np.random.default_rng(0)
    values = rng.integers(0, 12, size=200).astype(float)
    values[::17] = np.nan
    bands = by_band(values)
    assert (
        sorted(np.concatenate([b.rows for b in bands]).tolist()) == np.flatnonzero(~np.isnan(values)).tolist()
    )
    for value in np.unique(values[~np.isnan(values)]):
        assert sum(value in values[b.rows] for b in bands) == 1
    assert [b.name for b in by_band(np.full(9, 3.0))] == ["3 to 3"]
    assert by_band(np.full(3, np.nan)) == []


def test_values_group_by_name_and_missing_ones_belong_nowhere():
    groups = by_value(["b", "a", None, "b", math.nan])
    assert [(g.name, g.rows.tolist()) for g in groups] == [("a", [1]), ("b", [0, 3])]


# --- slices -------------------------------------------------------------------------------------------------


def test_wilson_solves_its_equation():
    z = 1.959963984540054
    for share, n in ((0.0, 5), (0.3, 40), (1.0, 100)):
        for end in wilson(share, n):
            assert abs(share - end) == pytest.approx(z * math.sqrt(end * (1 - end) / n), abs=1e-9)


def test_association_over_slices():
    def table(pairs, n=50):
        return [{"dispersion": d, "accuracy": a, "documents": n, "labelled": n} for d, a in pairs]

    rng = np.random.default_rng(0)
    x = rng.random(30)
    noisy = table(zip(x, x + 0.2 * rng.random(30), strict=True))
    found = association(noisy)
    expected = spearmanr([r["dispersion"] for r in noisy], [r["accuracy"] for r in noisy]).statistic
    assert found["spearman"] == pytest.approx(expected)
    assert 0.5 < found["low"] < found["spearman"] < found["high"] <= 1
    null = association(table(zip(rng.random(30), rng.random(30), strict=True)))
    assert null["low"] < 0 < null["high"]
    few = association(noisy[:7])
    assert np.isnan(few["low"])
    assert not np.isnan(few["spearman"])
    assert "4 slices" in association(noisy[:3])["missing"]
    assert "same accuracy" in association(table([(k, 0.5) for k in range(6)]))["missing"]


# --- ranking ------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=4, max_size=40))
@settings(max_examples=60, deadline=None)
def test_auroc_equals_sklearn_and_the_loop(pairs):
    signal = np.array([float(s) for s, _ in pairs])
    right = np.array([r for _, r in pairs])
    if right.all() or not right.any():
        with pytest.raises(UsageError, match="right and wrong answers"):
            auroc(signal, right)
        return
    found = auroc(signal, right)
    wins = [1.0 if a > b else 0.5 if a == b else 0.0 for a in signal[right] for b in signal[~right]]
    assert found.value == pytest.approx(sum(wins) / len(wins))
    assert found.value == pytest.approx(roc_auc_score(right, signal))


def test_delongs_errors_match_the_spread_over_samples():
    rng = np.random.default_rng(0)
    values, errors, differences, difference_errors = [], [], [], []
    for _ in range(400):
        right = np.arange(150) < 90
        first = rng.normal(size=150) + right
        second = first + rng.normal(size=150)
        a, b = auroc(first, right), auroc(second, right)
        values.append(a.value)
        errors.append(a.se)
        difference, error = auroc_difference(a, b)
        differences.append(difference)
        difference_errors.append(error)
    assert np.mean(errors) == pytest.approx(np.std(values), rel=0.12)
    assert np.mean(difference_errors) == pytest.approx(np.std(differences), rel=0.12)


def test_auroc_difference_with_itself_is_exactly_zero():
    rng = np.random.default_rng(0)
    a = auroc(rng.normal(size=50), rng.random(50) < 0.5)
    assert auroc_difference(a, a) == (0.0, 0.0)


# --- calibration --------------------------------------------------------------------------------------------


def training(seed=0, n=300):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 51, size=n) / 50
    return 0.4 + 0.1 * y**2 + 0.01 * rng.normal(size=n), y


def test_portable_regressions_predict_what_sklearn_predicts():
    x, y = training()
    new = np.linspace(x.min() - 0.05, x.max() + 0.05, 2001)
    standard = ((x - x.mean()) / x.std()).astype(np.float32)[:, None]
    forest = RandomForestRegressor(n_estimators=50, min_samples_leaf=10, random_state=3).fit(standard, y)
    expected = forest.predict(((new - x.mean()) / x.std()).astype(np.float32)[:, None])
    found = predicted(json.loads(json.dumps(fitted("random forest", x, y, seed=3))), new)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    isotonic = IsotonicRegression(out_of_bounds="clip").fit(x, y)
    np.testing.assert_allclose(predicted(fitted("isotonic", x, y), new), isotonic.predict(new), atol=1e-12)
    for kind, degree in (("linear", 1), ("polynomial", 3)):
        expected = np.clip(np.polyval(np.polyfit(x - x.mean(), y, degree), new - x.mean()), 0, 1)
        np.testing.assert_allclose(predicted(fitted(kind, x, y), new), expected, atol=1e-8)


@pytest.mark.parametrize("kind", FITS)
def test_regressions_stay_in_the_unit_interval_and_take_falling_or_constant_data(kind):
    x, y = training()
    for data in (x, 1 - x, np.full_like(x, 0.3)):
        found = predicted(fitted(kind, data, y), np.linspace(-5, 5, 101))
        assert ((found >= 0) & (found <= 1)).all()
    falling = predicted(fitted(kind, 1 - x, y), np.array([0.5, 0.6]))
    assert falling[0] > falling[1]


def test_an_unknown_regression_is_refused():
    with pytest.raises(UsageError, match="newer version"):
        predicted({"kind": "spline"}, [0.1])


def test_atc_threshold_leaves_the_accuracy_above_it():
    confidence = np.random.default_rng(0).random(1000)
    for accuracy in (0.0, 0.25, 0.9, 1.0):
        assert (confidence > atc_threshold(confidence, accuracy)).mean() == pytest.approx(accuracy, abs=2e-3)


def test_t_interval_equals_scipy():
    from scipy import stats

    values = np.array([1.0, 2.0, 4.0, 8.0])
    expected = stats.t.interval(0.95, 3, loc=values.mean(), scale=stats.sem(values))
    assert t_interval(values) == pytest.approx(expected)
    assert all(math.isnan(v) for v in t_interval(np.array([1.0])))


# --- hard tail ----------------------------------------------------------------------------------------------


def test_clusters_that_are_there_are_found():
    rng = np.random.default_rng(0)
    centres = np.eye(6)[:3] * 4
    truth = rng.integers(3, size=300)
    x = (centres[truth] + 0.3 * rng.normal(size=(300, 6))).astype(np.float32)
    labels, distance = clustered(x, 3)
    for cluster in range(3):
        assert len(set(labels[truth == cluster])) == 1
    for i in (0, 7, 200):
        centre = x[labels == labels[i]].mean(axis=0)
        assert distance[i] == pytest.approx(float(((x[i] - centre) ** 2).sum()), rel=1e-4)


def test_clustering_takes_duplicates_and_single_rows():
    labels, distance = clustered(np.ones((5, 3), dtype=np.float32), 3)
    assert len(set(labels.tolist())) == 1
    np.testing.assert_allclose(distance, 0, atol=1e-6)
    assert clustered(np.ones((1, 3), dtype=np.float32), 1)[0].tolist() == [0]
