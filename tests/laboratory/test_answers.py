"""Sentences of the laboratory: each on planted data where it must stand, and on data where it must not."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from lmeval_dispersion.laboratory.claims import bounds_together
from lmeval_dispersion.laboratory.context_clusters import ratio_interval
from lmeval_dispersion.laboratory.perplexity_law import control_correlations, correlations
from lmeval_dispersion.laboratory.reports.answers import (
    clusters_answer,
    comparison_answer,
    condensation_answer,
    law_answer,
    sublayers_answer,
    told_apart,
)
from lmeval_dispersion.laboratory.sublayer_choice import recommendation
from lmeval_dispersion.laboratory.token_condensation import model_tables
from lmeval_dispersion.statistics import fisher, resampled_correlations

LAYERS = [*(f"layer.{k}" for k in range(7)), "last"]
BINS = 30
NO_CONTROL = (
    "No control was run; `--control untrained --control shuffled` shows what does not come from training."
)


def law_result(rng, slopes, control=None, kinds=("sequence",), noise=0.3):
    """A law whose dispersion follows difficulty with a slope for each layer, and likewise a control's."""
    frames = []
    for kind in kinds:
        hard = np.linspace(0, 1, BINS)
        shared = rng.normal(size=BINS) * noise / 2  # layers of one model err together
        for layer, slope in zip(LAYERS, slopes, strict=True):
            columns = {
                "split": "data", "perplexity": kind, "layer": layer, "bin": np.arange(BINS),
                "mean_perplexity": 20 + 30 * hard, "mean_nll": np.log(20 + 30 * hard),
                "dispersion": 0.5 + slope * hard + shared + rng.normal(size=BINS) * noise / 2,
            }  # fmt: skip
            for name, steep in (control or {}).items():
                columns[f"dispersion.{name}"] = 0.5 + steep * hard + rng.normal(size=BINS) * noise / 2**0.5
            frames.append(pd.DataFrame(columns))
    points = pd.concat(frames)
    controls = control_correlations(points, list(control), 0) if control else None
    return SimpleNamespace(correlations=correlations(points, 0), controls=controls, manifest={})


def test_a_planted_law_is_found_where_it_is():
    slopes = [0, 0, 0, -1.5, -1.5, -1.5, 0, -1.5]
    answer = law_answer(law_result(np.random.default_rng(0), slopes))
    assert (
        "r of perplexity and dispersion is negative at 4 of 8 layers (layer.3 to layer.5, last) (r -0"
        in answer[0]
    )
    assert answer[-1] == NO_CONTROL
    reverse = law_answer(law_result(np.random.default_rng(0), [-s for s in slopes]))
    assert "is positive at 4 of 8 layers (layer.3 to layer.5, last) (r +0" in reverse[0]
    assert "negative" not in reverse[0]


def test_a_law_that_a_control_shows_too_is_not_the_models():
    rng = np.random.default_rng(1)
    answer = law_answer(law_result(rng, [-1.5] * 8, {"untrained": -1.5, "shuffled": 0.0}))
    assert "negative at all 8 layers, but not told apart from untrained (r -0.9" in answer[0]
    assert "; untrained -0." in answer[0]
    assert "; shuffled " in answer[0]
    assert NO_CONTROL not in answer
    own = law_answer(law_result(rng, [-1.5] * 8, {"untrained": 0.0, "shuffled": 0.0}))
    assert "negative at all 8 layers, more so than untrained and shuffled" in own[0]
    assert "not told apart" not in own[0]


def test_a_correlation_that_is_undefined_or_has_no_interval_is_said_so():
    result = law_result(np.random.default_rng(0), [-1.5] * 8)
    points = pd.DataFrame(
        {"perplexity": "sequence", "split": "data", "layer": "last", "mean_perplexity": [1.0, 2, 4]}
    )
    points["mean_nll"] = np.log(points["mean_perplexity"])
    for dispersion, words in (
        ([0.3, 0.3, 0.3], "undefined: a correlation with a constant"),
        ([3.0, 2.0, 2.5], "-0.33, without an interval at 3 bins"),
    ):
        result.correlations = correlations(points.assign(dispersion=dispersion), 0)
        answer = law_answer(result)[0]
        assert words in answer
        assert "nan" not in answer


def test_single_tokens_have_a_sentence_of_their_own():
    answer = law_answer(
        law_result(np.random.default_rng(0), [1.5] * 8, kinds=("sequence", "last@16", "last@32"))
    )
    assert answer[1].startswith(
        "Single tokens: after 16, r of log perplexity is positive at all 8 layers (r +0.8"
    )
    assert "; after 32, r of log perplexity is positive at all 8 layers" in answer[1]
    assert len(answer) == 3


def false_claims(count, make):
    return sum(make(np.random.default_rng([7, seed])) for seed in range(count)) / count


def test_noise_claims_no_law():
    """For all layers together at most 5 % (here: 60 draws, so at most 8 with 99 % probability)."""
    assert (
        false_claims(
            60, lambda rng: "not told apart from 0 at any" not in law_answer(law_result(rng, [0] * 8))[0]
        )
        <= 8 / 60
    )


def test_a_shared_law_is_rarely_said_to_be_more_than_the_control():
    def claimed(rng):
        return "more so than" in law_answer(law_result(rng, [-0.8] * 8, {"untrained": -0.8}))[0]

    assert false_claims(60, claimed) <= 8 / 60


def test_bounds_together_cover_all_correlations_at_once():
    truth = -0.6
    covered = 0
    for seed in range(200):
        rng = np.random.default_rng([3, seed])
        x, shared = rng.normal(size=(2, 40))
        own = rng.normal(size=(10, 40))
        ys = truth * x + np.sqrt(1 - truth**2) * (0.9 * shared + np.sqrt(1 - 0.81) * own)
        r = [np.corrcoef(x, y)[0, 1] for y in ys]
        samples = np.stack([fisher(resampled_correlations(x, y)) for y in ys], axis=1)
        low, high = bounds_together(fisher(r), samples)
        covered += bool(((low <= np.arctanh(truth)) & (np.arctanh(truth) <= high)).all())
    assert 0.9 <= covered / 200 <= 1.0


def sublayer_result(rng, lead, pool=500, knn=None):
    draws = pd.DataFrame(
        [
            {"layer": layer, "segments": 50, "draw": draw, "dispersion": base + rng.normal() * 0.01}
            for draw in range(10)
            for layer, base in (("layer.2.attn", 0.8 + lead), ("layer.2.ffn", 0.8))
        ]
    )
    chosen = recommendation(draws, pool)
    differences = None
    if knn is not None:
        names = dict(first="layer.2.attn", second="layer.2.ffn")
        differences = pd.DataFrame([{**names, "difference": sum(knn) / 2, "low": knn[0], "high": knn[1]}])
        from lmeval_dispersion.laboratory.knn import agreement

        chosen = chosen.assign(knn=agreement(chosen["layer"].item(), differences))
    return SimpleNamespace(recommendation=chosen, knn=differences, knn_differences=differences)


def test_a_key_is_recommended_only_where_the_draws_tell_it_apart():
    (clear,) = sublayers_answer(sublayer_result(np.random.default_rng(0), 0.1))
    assert clear.startswith("Key the datastore by layer.2.attn: layer.2.attn lies above layer.2.ffn by 0.")
    assert clear.endswith("(10 of 10 draws).")
    (open_,) = sublayers_answer(sublayer_result(np.random.default_rng(0), 0.0))
    assert open_.startswith("No recommendation: ")
    (whole,) = sublayers_answer(sublayer_result(np.random.default_rng(0), 0.1, pool=50))
    assert whole.startswith("No recommendation: ")
    assert "a draw is the whole text, so nothing says how sure that is" in whole
    noise = false_claims(200, lambda rng: "Key the" in sublayers_answer(sublayer_result(rng, 0.0))[0])
    assert noise <= 0.05


@pytest.mark.parametrize(
    ("knn", "sentence"),
    [
        (
            (-0.03, -0.01),
            "The measured kNN-LM agrees with this recommendation: layer.2.attn costs -0.0200 (-0.0300 to",
        ),
        (
            (0.01, 0.03),
            "The measured kNN-LM contradicts this recommendation: layer.2.attn costs +0.0200 (+0.0100 to",
        ),
        (
            (-0.01, 0.03),
            "The measured kNN-LMs are not told apart: layer.2.attn costs +0.0100 (-0.0100 to +0.0300)",
        ),
    ],
)
def test_a_measured_key_agrees_only_where_it_is_sure(knn, sentence):
    answer = sublayers_answer(sublayer_result(np.random.default_rng(0), 0.1, knn=knn))
    assert answer[1].startswith(sentence)


def condensation_result(rng, slopes, noise=0.05, texts=40):
    """Similarity that moves with depth by a slope, for each (model, control)."""
    parts = {}
    for (model, control), slope in slopes.items():
        means = 0.3 + slope * np.linspace(0, 1, 6) + rng.normal(size=(texts, 6)) * noise
        names = ["embeddings", *(f"layer.{k}" for k in range(4)), "last"]
        counts = np.ones((6, 4))
        for table, frame in model_tables(model, names, means, counts, {"seed": 0, "last": 3}).items():
            frame.insert(1, "control", control)
            parts.setdefault(table, []).append(frame)
    return SimpleNamespace(**{table: pd.concat(frames) for table, frames in parts.items()})


def test_condensation_is_claimed_where_planted_and_beside_its_controls():
    rng = np.random.default_rng(0)
    answer = condensation_answer(condensation_result(rng, {("m", ""): 0.3}))
    assert answer[0].startswith(
        "Tokens of a text grow alike with depth: Spearman of a text's similarity and depth +0."
    )
    assert answer[1] == NO_CONTROL
    assert "grow apart with depth" in condensation_answer(condensation_result(rng, {("m", ""): -0.3}))[0]
    same = condensation_answer(condensation_result(rng, {("m", ""): 0.2, ("m", "shuffled"): 0.2}))
    assert same[0].startswith("Tokens of a text grow alike, but no more than shuffled, with depth")
    more = condensation_answer(condensation_result(rng, {("m", ""): 0.2, ("m", "shuffled"): -0.1}))
    assert more[0].startswith("Tokens of a text grow alike, more so than shuffled, with depth")
    assert "; shuffled -0." in more[0]
    several = condensation_answer(condensation_result(rng, {("a", ""): 0.2, ("b", ""): -0.2, ("c", ""): 0.2}))
    assert several[0] == "Tokens of a text grow alike with depth in a and c; grow apart with depth in b."


@pytest.mark.parametrize(
    ("sign", "words"), [(1, "rises to depth 2 of 5, then falls"), (-1, "falls to depth 2 of 5, then rises")]
)
def test_a_curve_that_turns_early_is_no_steady_growth(sign, words):
    rng = np.random.default_rng(0)
    result = condensation_result(rng, {("m", ""): 0.0, ("m", "shuffled"): 0.0}, noise=0.01)
    curve = np.array([0.0, 0.2, 0.4, 0.35, 0.3, 0.25])
    result.texts["mean"] += sign * curve[result.texts["depth"]] * (result.texts["control"] == "")
    (answer,) = condensation_answer(result)
    assert answer.startswith("Tokens of a text show no steady trend with depth: ")
    assert words in answer
    late = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.3])
    result.texts["mean"] += sign * (late - curve)[result.texts["depth"]] * (result.texts["control"] == "")
    assert " grow alike, more" in condensation_answer(result)[0] or sign < 0


def test_noise_claims_no_condensation():
    def claimed(rng):
        answer = condensation_answer(condensation_result(rng, {("m", ""): 0.0, ("m", "shuffled"): 0.0}))[0]
        return "show no trend that is told apart from none" not in answer

    assert false_claims(150, claimed) <= 0.1


def clusters_result(rng, ratios, clusters=60):
    summaries, each = [], []
    shared = rng.normal(size=(2, clusters)) * 0.02
    for model, ratio in ratios.items():
        within = 0.3 + shared[0] + rng.normal(size=clusters) * 0.01
        apart = 0.3 * ratio + shared[1] + rng.normal(size=clusters) * 0.01
        found = ratio_interval(within, apart)
        ratio = {"ratio": found.value, "ratio_low": found.low, "ratio_high": found.high}
        summaries.append({"model": model, "layer": "last", "clusters": clusters, **ratio})
        each.append(pd.DataFrame({"model": model, "layer": "last", "within": within, "apart": apart}))
    return SimpleNamespace(summary=pd.DataFrame(summaries), clusters=pd.concat(each))


def test_clusters_are_compared_with_the_first_model():
    rng = np.random.default_rng(0)
    answer = clusters_answer(clusters_result(rng, {"a": 1.0, "b": 1.5, "c": 1.0, "d": 0.5}))
    assert (
        answer[0] == "Against a, clusters lie further apart in b; closer together in d; not told apart in c."
    )
    assert answer[1].startswith("Between over within 60 clusters at last: a 1.0")
    one = clusters_answer(clusters_result(rng, {"a": 1.5}))
    assert one[0] == "Clusters lie further apart than their members lie from their centre."
    assert clusters_answer(clusters_result(rng, {"a": 0.5}))[0].startswith(
        "Clusters lie closer together than"
    )
    noise = false_claims(
        150,
        lambda r: "not told apart in b" not in clusters_answer(clusters_result(r, {"a": 1.0, "b": 1.0}))[0],
    )
    assert noise <= 0.1


def differences(values, half):
    values = np.asarray(values, dtype=float)
    return pd.DataFrame({"figure": "mean", "difference": values, "low": values - half, "high": values + half})


def test_a_comparison_counts_only_what_is_sure_among_all_rows():
    frame = differences([0.1, 0.5, -0.6, 0.0, np.nan], 0.2)
    answer = comparison_answer(frame, list("abcde"), "x", "y")
    assert answer[0] == "y minus x: 2 of 5 differences are told apart from 0, all taken together."
    assert answer[1] == "The surest of each metric: c -0.6 (-0.8 to -0.4)."
    # Alone 0.21 leaves 0 out, among five it does not.
    none = comparison_answer(differences([0.21, 0.1, 0, 0, 0], 0.2), list("abcde"), "x", "y")
    assert none == ["y minus x: none of 5 differences is told apart from 0."]
    assert told_apart(differences([0.21], 0.2)).all()


def test_noise_is_no_difference():
    def claimed(rng):
        return told_apart(differences(rng.normal(size=30), 1.96)).any()

    assert false_claims(400, claimed) <= 0.08
