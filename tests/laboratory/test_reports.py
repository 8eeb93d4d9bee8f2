"""Reports of the four analyses: every form says what the frames say.

Sentences stand on planted data where they must, and on data where they must not.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.laboratory.context_clusters import ClustersResult, ratio_interval
from lmeval_dispersion.laboratory.perplexity_law import LawResult, correlations
from lmeval_dispersion.laboratory.sublayer_choice import SublayersResult, recommendation
from lmeval_dispersion.laboratory.token_condensation import (
    CondensationResult,
    comparisons,
    rows_of,
    shape_of_curve,
)
from lmeval_dispersion.report import render

MANIFEST = {
    "kind": "planted",
    "models": [{"model": "planted", "data": "planted.txt", "dtype": "float32"}],
    "names": {"models": ["planted"], "texts": ["planted.txt"]},
    "settings": {},
}
OVERALL = pd.DataFrame({"split": ["data"], "layer": ["last"], "dispersion": [0.5]})
BINS = 30
NO_CONTROL = (
    "No control was run; `--control untrained --control shuffled` shows what remains "
    "without training or word order."
)


def law_result(rng, slopes, control=None, kinds=("sequence",), noise=0.3):
    """A law whose dispersion follows difficulty with a slope for each layer, and likewise a control's."""
    frames = []
    layers = [*(f"layer.{k}" for k in range(len(slopes) - 1)), "last"]
    for kind in kinds:
        hard = np.linspace(0, 1, BINS)
        shared = rng.normal(size=BINS) * noise / 2  # layers of one model err together
        for layer, slope in zip(layers, slopes, strict=True):
            columns = {
                "model": "planted",
                "data": "planted.txt",
                "split": "data",
                "perplexity": kind,
                "layer": layer,
                "bin": np.arange(BINS),
                "mean_perplexity": 20 + 30 * hard,
                "mean_nll": np.log(20 + 30 * hard),
                "dispersion": 0.5 + slope * hard + shared + rng.normal(size=BINS) * noise / 2,
            }
            for name, steep in (control or {}).items():
                columns[f"dispersion.{name}"] = (
                    0.5 + steep * hard + rng.normal(size=BINS) * noise / 2**0.5
                )
            frames.append(pd.DataFrame(columns))
    return law_of(pd.concat(frames), list(control or {}))


def law_of(points, controls=()):
    tables = {"controls": None, **correlations(points, controls, 0)}
    return LawResult(MANIFEST, points=points, overall=OVERALL, **tables)


KINDS = ("sequence", "last@16", "last@64")
ALL, SOME = [1] * 8, [0, 0, 0, 1, 1, 1, 0, 1]
SHARED, OWN = {"untrained": -1.5, "shuffled": 0.0}, {"untrained": 0.0, "shuffled": 0.0}


@pytest.mark.parametrize(
    ("slope", "layers", "controls", "words"),
    [
        (-1.5, SOME, None, "negative at 4 of 8 layers (layer.3 to layer.5, last) (r -0"),
        (1.5, SOME, None, "positive at 4 of 8 layers (layer.3 to layer.5, last) (r +0"),
        (
            -1.5,
            ALL,
            SHARED,
            "negative at all 8 layers, but not clearly more so than untrained (r -0",
        ),
        (-1.5, ALL, OWN, "negative at all 8 layers, more so than untrained and shuffled (r -0"),
    ],
)
def test_a_planted_law_is_the_models_where_it_is_and_no_control_shows_it(
    slope, layers, controls, words
):
    rng, kinds = np.random.default_rng(0), ("sequence", "last@16", "last@32")
    whole, tokens, *others = law_result(
        rng, [slope * there for there in layers], controls, kinds
    ).answer()
    assert whole.startswith(f"Whole segments: r of perplexity and dispersion is {words}")
    assert tokens.startswith(f"Single tokens: after 16, r of log perplexity is {words}")
    assert f"; after 32, r of log perplexity is {words}" in tokens
    assert all(f"; {name} " in whole for name in controls or ())
    assert "positive" not in whole or "negative" not in whole
    assert others == ([] if controls else [NO_CONTROL])


@pytest.mark.parametrize(
    ("kinds", "layers"), [(("sequence",), 1), (("sequence", "last@16"), 1), (KINDS, 4)]
)
def test_the_interval_beside_a_claim_is_that_of_the_claim(kinds, layers):
    """At a slope of the border: it leaves out 0 where r is called negative, and nowhere else."""
    said = {False: 0, True: 0}
    for seed in range(6):
        result = law_result(np.random.default_rng([5, seed]), [-0.4] * layers, kinds=kinds)
        rows = result.correlations.set_index(["perplexity", "layer"])
        for kind, sentence in zip(
            kinds, re.split(r"; after |\. Single tokens", " ".join(result.answer())), strict=True
        ):
            row = rows.loc[(kind, "last")]
            low, high = (f"{row[f'all_{end}']:+.2f}" for end in ("low", "high"))
            assert f", 95 % {low} to {high}" in sentence
            assert (f" jointly for all {len(kinds) * layers} correlations" in sentence) == (
                len(kinds) * layers > 1
            )
            claims = (
                re.search(r"negative at (all|\d of \d layers \([^)]*last)", sentence)
                if layers > 1
                else "negative" in sentence
            )
            assert bool(claims) == (row["all_high"] < 0)
            said[bool(claims)] += 1
    assert all(said.values()), said


def test_a_correlation_that_is_undefined_is_said_so():
    columns = {"model": "m", "data": "d", "perplexity": "sequence", "split": "data"}
    columns |= {"layer": "last", "bin": range(3)}
    easy = {"mean_perplexity": [1.0, 2, 4], "mean_nll": np.log([1.0, 2, 4])}
    result = law_of(pd.DataFrame({**columns, **easy, "dispersion": 0.3}))
    assert "undefined: a correlation with a constant" in result.answer()[0]
    assert "nan" not in result.answer()[0]
    assert "a correlation with a constant" in result.to_html()


def grid_result(rng, slopes, control=None):
    """A law of two models on two texts, whose slopes are given by (model, text)."""
    points = []
    for (model, text), slope in slopes.items():
        result = law_result(rng, [slope], control)
        points.append(result.points.assign(model=model, data=text))
    return law_of(pd.concat(points, ignore_index=True), list(control or {}))


CELLS = [("a", "wiki"), ("a", "news"), ("b", "wiki"), ("b", "news")]


@pytest.mark.parametrize(
    ("slopes", "words"),
    [
        (
            (-1.5, -1.5, -1.5, -1.5),
            "dispersion is negative in 4 of 4 pairs of a model and a text (r -0.",
        ),
        ((-1.5, -1.5, -1.5, 0), "negative in 3 of 4 pairs of a model and a text (r -0."),
        ((-1.5, 1.5, -1.5, -1.5), "negative in 3 of 4 pairs of a model and a text (r -0."),
        ((0, 0, 0, 0), "dispersion is not clearly different from 0 in a on wiki, a on news, b on"),
    ],
)
def test_a_law_of_models_and_texts_is_counted_over_its_cells(slopes, words):
    result = grid_result(np.random.default_rng(1), dict(zip(CELLS, slopes, strict=True)))
    first, *others = result.answer()
    assert first.startswith("Whole segments: r of perplexity and ")
    assert words in first
    assert "2 models on 2 texts (95 % intervals that hold jointly for all 4 correlations)." in first
    assert ("not clearly different from 0 in b on news" in first) == (slopes[3] == 0 != slopes[0])
    assert others == (["r is positive in a on news."] if slopes[1] > 0 else []) + [NO_CONTROL]
    assert ("positive" in first) == (1.5 in slopes)


@pytest.mark.parametrize(
    ("control", "sentence"),
    [
        (
            {"shuffled": 0.0},
            "Where r is negative, it is clearly more negative than with the control shuffled.",
        ),
        (
            {"shuffled": -1.5},
            "r is not clearly more negative than with the control shuffled in a on wiki, a on "
            "news, b on wiki and b on news.",
        ),
    ],
)
def test_a_law_of_models_and_texts_stands_beside_its_controls(control, sentence):
    result = grid_result(np.random.default_rng(2), dict.fromkeys(CELLS, -1.5), control)
    assert sentence in result.answer()


def test_a_law_of_models_and_texts_is_one_figure_with_a_panel_a_cell():
    result = grid_result(np.random.default_rng(3), dict.fromkeys(CELLS, -1.5))
    (chart,) = result.charts().values()
    specification = chart.specification()
    rows = specification["data"]["values"]
    assert len(rows) == 4 * BINS
    titles = list(dict.fromkeys(row["panel"] for row in rows))
    assert [title.partition(":")[0] for title in titles] == [f"{m}, {d}" for m, d in CELLS]
    for title, row in zip(titles, result.correlations.to_dict("records"), strict=True):
        assert title.endswith(f"r {row['pearson']:+.2f}")
    assert specification["columns"] == 2
    assert [column.key for column in result.tables()["layers"].columns][:2] == ["model", "data"]


def test_an_undefined_cell_of_a_law_is_said_so():
    points = grid_result(np.random.default_rng(3), dict.fromkeys(CELLS, -1.5)).points
    points.loc[points["model"] == "b", "dispersion"] = 0.3
    result = law_of(points)
    answer = result.answer()[0]
    assert "is negative in 2 of 4 pairs of a model and a text (r -0." in answer
    assert "undefined in b on wiki and b on news (a correlation with a constant" in answer
    (chart,) = result.charts().values()
    titles = {row["panel"] for row in chart.specification()["data"]["values"]}
    assert "b, wiki: r undefined" in titles


def test_studies_of_a_law_are_resampled_independently():
    """The first as if it were alone; equal points have other resamples in the second."""
    result = law_result(np.random.default_rng(4), [-0.5])
    twice = pd.concat([result.points, result.points.assign(data="other")], ignore_index=True)
    both = law_of(twice).correlations
    ends = ["pearson", "low", "high"]
    assert both[ends].iloc[0].tolist() == result.correlations[ends].iloc[0].tolist()
    assert both["pearson"].nunique() == 1
    assert both["low"].nunique() == 2
    wider = both["all_high"].iloc[0] - both["all_low"].iloc[0]
    assert wider >= result.correlations["all_high"][0] - result.correlations["all_low"][0]


def sublayer_draws(rng, lead, noise=0.01):
    """Draws of candidates of which attn leads by ``lead``."""
    candidates = {"layer.2.attn": 0.8 + lead, "layer.2.ffn": 0.8, "layer.1": 0.2}
    rows = [
        (layer, 50, draw, base + rng.normal() * noise)
        for draw in range(10)
        for layer, base in candidates.items()
    ]
    return pd.DataFrame(rows, columns=["layer", "segments", "draw", "dispersion"])


def sublayer_result(rng, lead, pool=500, noise=0.01):
    draws = sublayer_draws(rng, lead, noise)
    chosen = pd.DataFrame([recommendation(draws, pool)])
    summary = draws.groupby(["layer", "segments"])["dispersion"].agg(
        mean="mean", sd="std", draws="count"
    )
    return SublayersResult(MANIFEST, summary.reset_index(), chosen, draws)


@pytest.mark.parametrize(
    ("lead", "options", "words"),
    [
        (0.1, {}, "Key the datastore by layer.2.attn: layer.2.attn lies above layer.2.ffn by 0."),
        (0.0, {}, "No recommendation: "),
        (0.1, {"pool": 50}, ", without a standard deviation, as each draw"),
        # Two names of one layer.
        (
            0.0,
            {"noise": 0.0},
            "do not clearly differ (layer.2.attn lies above layer.2.ffn by 0.0000 in every draw).",
        ),
    ],
)
def test_a_key_is_recommended_only_where_it_is_sure(lead, options, words):
    answer = sublayer_result(np.random.default_rng(0), lead, **options).answer()
    assert words in answer[-1]
    assert len(answer) == 1
    assert ("(10 of 10 draws)" in answer[0]) == answer[0].startswith("Key ")


def condensation_of(means, parameters=None, tokens=None, teacher=""):
    """The result for the means (texts, depths) of each (model, control)."""
    tables = {}
    sizes = {model: 1000 for model, _ in means} | (parameters or {})
    tokens = tokens or dict.fromkeys(sizes, "tokens")
    for (model, control), of_texts in means.items():
        depths = of_texts.shape[1]
        names = ["embeddings", *(f"layer.{k}" for k in range(depths - 2)), "last"]
        for table, row in rows_of(names, of_texts, np.ones((depths, 4))):
            if table == "summary":
                row["parameters"] = sizes[model]
            tables.setdefault(table, []).append({"model": model, "control": control, **row})
    frames = {table: pd.DataFrame(rows) for table, rows in tables.items()}
    compared = comparisons(frames["texts"], frames["summary"], tokens, teacher)
    return CondensationResult(MANIFEST, **frames, **compared)


def condensation_result(rng, slopes, noise=0.05, texts=40):
    """Similarity that moves with depth by a slope, for each (model, control)."""
    return condensation_of(
        {
            about: 0.3 + slope * np.linspace(0, 1, 6) + rng.normal(size=(texts, 6)) * noise
            for about, slope in slopes.items()
        }
    )


@pytest.mark.parametrize(
    ("slopes", "words"),
    [
        ({("m", ""): 0.3}, "alike with depth: similarity rises from 0."),
        ({("m", ""): -0.3}, "apart with depth: similarity falls from 0."),
        (
            {("m", ""): 0.2, ("m", "shuffled"): 0.2},
            "alike, but no more than shuffled, with depth: ",
        ),
        ({("m", ""): 0.2, ("m", "shuffled"): -0.1}, "alike, more so than shuffled, with depth: "),
        (
            {("a", ""): 0.2, ("b", ""): -0.2, ("c", ""): 0.2},
            "alike with depth in a and c; grow apart with depth in b.",
        ),
    ],
)
def test_condensation_is_claimed_where_planted_and_beside_its_controls(slopes, words):
    first, *others = condensation_result(np.random.default_rng(0), slopes).answer()
    assert first.startswith(f"Tokens of a text grow {words}")
    shuffled = ("m", "shuffled") in slopes
    assert ("; shuffled " in first) == shuffled
    assert others == ([] if shuffled else [NO_CONTROL])


SIZES = {"s": 10**6, "m": 10**7, "l": 10**8}


def family(levels, noise=0.02, seed=0):
    """Models whose similarity rises from 0.3 to a level; their texts go up and down together."""
    rng = np.random.default_rng(seed)
    shared = rng.normal(size=(40, 1)) * 0.1
    means = {}
    for model, level in levels.items():
        curve = 0.3 + (level - 0.3) * np.linspace(0, 1, 6)
        means[model, ""] = curve + shared + rng.normal(size=(40, 6)) * noise
    return means


@pytest.mark.parametrize(
    ("levels", "words"),
    [
        (
            {"s": 0.9, "m": 0.7, "l": 0.5},
            "Among s, m and l, on these texts, larger models condense less, at each step in size: "
            "the similarity of tokens in the last 3 layers falls by 0.3",
        ),
        (
            {"s": 0.9, "m": 0.5, "l": 0.6},
            "larger models condense less, except for l compared with m: ",
        ),
        ({"s": 0.5, "m": 0.7, "l": 0.9}, "larger models condense more, at each step in size: "),
        ({"s": 0.7, "m": 0.7, "l": 0.7}, "larger models do not clearly condense less or more: "),
        ({"s": 0.9, "l": 0.5}, "Among s and l, on these texts, larger models condense less: "),
    ],
)
def test_larger_models_condense_less_where_it_is_planted(levels, words):
    result = condensation_of(family(levels), SIZES)
    (sentence,) = [line for line in result.answer() if "larger models" in line]
    assert words in sentence
    row = result.sizes.iloc[0]
    ends = sorted(levels, key=SIZES.__getitem__)
    steps = np.log10([SIZES[name] for name in ends])
    # The mean of the last three of six points on a line from 0.3 to the level.
    slope = np.polyfit(steps, [0.3 + 0.8 * (levels[name] - 0.3) for name in ends], 1)[0]
    assert row["change_low"] <= slope * np.ptp(steps) <= row["change_high"]


@pytest.mark.parametrize(
    ("parameters", "tokens"),
    [
        ({}, None),
        ({"s": 1000, "m": 1050, "l": 1090}, None),
        (SIZES, {"s": "those", "m": "others", "l": "more"}),
    ],
    ids=["of one size", "of nearly one size", "of other tokenizers"],
)
def test_models_that_cannot_be_compared_by_size_are_not(parameters, tokens):
    result = condensation_of(family({"s": 0.9, "m": 0.7, "l": 0.5}), parameters, tokens)
    assert not [line for line in result.answer() if "larger" in line]
    assert "pairs" not in result.tables()
    with pytest.raises(UsageError, match="a teacher that reads the same tokens as m, got s"):
        condensation_of(family({"s": 0.9, "m": 0.7}), {}, {"s": "a", "m": "b"}, teacher="s")


@pytest.mark.parametrize(
    ("level", "verdict"),
    [
        (0.8, "condenses more than"),
        (0.4, "condenses less than"),
        (0.6, "condenses neither clearly more nor clearly less than"),
    ],
)
def test_a_student_stands_beside_its_teacher(level, verdict):
    result = condensation_of(family({"teacher": 0.6, "student": level}), teacher="teacher")
    assert any(
        line.startswith(f"student {verdict} its teacher teacher: ") for line in result.answer()
    )
    alone = condensation_of(family({"teacher": 0.6, "student": level}))
    assert not [line for line in alone.answer() if "its teacher" in line]


DEPTH = np.linspace(0, 1, 12)
HILL = 0.7 * np.minimum(DEPTH, 1.4 * (1 - DEPTH))  # 0.38 at depth 6
STEADY, ALIKE, APART, NONE = (
    "show no steady trend",
    "grow alike",
    "grow apart",
    "show no clear trend",
)
SHAPES = {
    "rises": (0.4 * DEPTH, ALIKE, "similarity rises from 0.30 to 0.70; Spearman"),
    "falls": (-0.2 * DEPTH, APART, "similarity falls from 0.30 to 0.10; Spearman"),
    "hill": (
        HILL,
        STEADY,
        "rises from 0.30 to 0.68 at depth 6 of 11, then falls to 0.30; Spearman",
    ),
    "valley": (
        -HILL / 2,
        STEADY,
        "falls from 0.30 to 0.11 at depth 6 of 11, then rises to 0.30; Spearman",
    ),
    "late": (
        HILL * (DEPTH > 0.7),
        STEADY,
        "rises from 0.30 to 0.57 at depth 8 of 11, then falls to 0.30; S",
    ),
    "dented": (
        np.where(DEPTH == 6 / 11, 0.0, 0.4 * DEPTH),
        STEADY,
        "rises from 0.30 to 0.48 at depth 5 of 11, then falls to 0.30 at depth 6 of 11, then rises to 0.70",
    ),
    "wobbles": (
        0.4 * DEPTH + 0.01 * np.cos(20 * DEPTH),
        ALIKE,
        "similarity rises from 0.31 to 0.70; S",
    ),
    "flat": (0 * DEPTH, NONE, "depth: Spearman"),
}


def of_texts(means, control=""):
    """The table of texts for one model's means (texts, depths)."""
    table = pd.DataFrame(means).stack().rename_axis(["text", "depth"]).reset_index(name="mean")
    return table.assign(control=control)


def curved(curve, noise, texts, seed=0):
    """Means of one model's texts that follow a curve of similarity, each from its own level."""
    rng = np.random.default_rng(seed)
    means = 0.3 + curve + rng.normal(size=(texts, len(curve))) * noise
    return means + (level := rng.normal(size=(texts, 1)) * 0.1) - level.mean()


@pytest.mark.parametrize(("curve", "verdict", "words"), SHAPES.values(), ids=SHAPES)
def test_the_answer_on_condensation_is_the_shape_of_its_curve(curve, verdict, words):
    answer = condensation_of({("m", ""): curved(curve, noise=0.01, texts=40)}).answer()[0]
    assert answer.startswith(f"Tokens of a text {verdict} with depth: ")
    assert words in answer


@pytest.mark.parametrize("shape", ["hill", "valley", "late", "dented", "flat"])
def test_a_curve_that_turns_is_never_called_steady(shape):
    """However few the texts: where a turn is not shown for sure, neither is the trend."""
    for texts, noise in ((3, 0.02), (3, 0.1), (10, 0.1), (40, 0.1)):
        means = (curved(SHAPES[shape][0], noise, texts, seed) for seed in range(15))
        verdicts = [shape_of_curve("m", of_texts(each), 1)["verdict"] for each in means]
        assert sum(verdict in ("alike", "apart") for verdict in verdicts) <= 1


def clusters_result(rng, ratios, clusters=60):
    summaries, each = [], []
    shared = rng.normal(size=(2, clusters)) * 0.02
    for model, ratio in ratios.items():
        within = 0.3 + shared[0] + rng.normal(size=clusters) * 0.01
        apart = 0.3 * ratio + shared[1] + rng.normal(size=clusters) * 0.01
        found = ratio_interval(within, apart)
        ratio = {"ratio": found.value, "ratio_low": found.low, "ratio_high": found.high}
        others = dict.fromkeys(("within", "between", "between_se", "perplexity"), 1.0)
        summaries.append({"model": model, "layer": "last", "clusters": clusters, **ratio, **others})
        each.append(
            pd.DataFrame({"model": model, "layer": "last", "within": within, "apart": apart})
        )
    ngrams = pd.DataFrame({"model": ["a"], "cluster": [0], "ngram": ["a b"], "occurrences": [9]})
    return ClustersResult(MANIFEST, pd.DataFrame(summaries), pd.concat(each), ngrams)


def test_clusters_are_compared_with_the_first_model():
    rng = np.random.default_rng(0)
    (answer,) = clusters_result(rng, {"a": 1.0, "b": 1.5, "c": 1.0, "d": 0.5}).answer()
    assert answer == (
        "Against a, clusters lie further apart in b; closer together in d; "
        "neither clearly further apart nor closer together in c "
        "(ratio of the distances between and within 60 clusters at last)."
    )
    (alone,) = clusters_result(rng, {"a": 1.5}).answer()
    assert alone.startswith(
        "Clusters lie further apart than their members lie from their centre: ratio of"
    )
    assert (
        clusters_result(rng, {"a": 0.5}).answer()[0].startswith("Clusters lie closer together than")
    )


def false_claim(what, rng):
    """Whether a report of noise, or of a law that a control shares, claims something."""
    if what in ("a law", "a shared law"):
        slope, control = (0, None) if what == "a law" else (-0.8, {"untrained": -0.8})
        claims = law_result(rng, [slope] * 8, control).context()["kinds"][0]["claims"]
        return any(claim["beyond"] or not control for claim in claims)
    if what == "a key":
        return recommendation(sublayer_draws(rng, 0.0), 500)["told_apart"]
    if what == "condensation":
        noise = [of_texts(rng.normal(size=(40, 6)) * 0.05, control) for control in ("", "shuffled")]
        return shape_of_curve("m", pd.concat(noise), 1)["verdict"] != "none"
    ((words, _),) = clusters_result(rng, {"a": 1.0, "b": 1.0}).context()["against"]
    return not words.startswith("neither")


@pytest.mark.parametrize(
    ("what", "draws", "most"),
    [
        ("a law", 15, 4),
        ("a shared law", 15, 4),
        ("a key", 200, 10),
        ("condensation", 15, 3),
        ("clusters", 150, 15),
        # At most 5 % of all layers together: of 60 draws at most 8 with 99 % probability.
        pytest.param("a law", 60, 8, marks=pytest.mark.slow),
        pytest.param("a shared law", 60, 8, marks=pytest.mark.slow),
        pytest.param("condensation", 150, 15, marks=pytest.mark.slow),
    ],
)
def test_noise_is_rarely_a_claim(what, draws, most):
    assert (
        sum(bool(false_claim(what, np.random.default_rng([7, seed]))) for seed in range(draws))
        <= most
    )


@pytest.mark.parametrize(
    "planted",
    [
        lambda rng: law_result(rng, [-1.5] * 4, SHARED, kinds=("sequence", "last@16")),
        lambda rng: sublayer_result(rng, 0.1),
        lambda rng: condensation_result(
            rng, {("a", ""): 0.2, ("b", ""): 0.3, ("b", "shuffled"): 0.0}
        ),
        lambda rng: clusters_result(rng, {"a": 1.0, "b": 1.5}),
    ],
)
def test_a_default_answer_fits_one_look_and_details_hold_the_rest(planted):
    result = planted(np.random.default_rng(0))
    document = result.document()
    for width in (80, 120):
        lines = render(document, "table", width=width).splitlines()
        assert len(lines) <= 30
        assert max(map(len, lines)) <= width
        assert any("●" in line for line in lines)
        assert " ".join(document.answer[0].split()[:9]) in " ".join(" ".join(lines).split())
    whole = " ".join(render(document, "table", width=250, details=True).split())
    for table in document.tables().values():
        for row in table.rows:
            for column in table.columns:
                if column.format.endswith("f") and not column.drop and np.isfinite(row[column.key]):
                    # Rounded to nothing, a value has no sign to be held to.
                    assert format(row[column.key], column.format).lstrip("+-") in whole
    assert all(" ".join(limit.replace("`", "").split()) in whole for limit in document.limits)
    page = result.to_html()
    assert "Content-Security-Policy" in page
    assert page.count("<svg") >= 2 * len(result.charts())
    assert result.plot()["data"]["values"]


def test_thirty_layers_are_a_dozen_rows_and_a_few_panels():
    result = law_result(np.random.default_rng(0), [0.0] * 30)
    text = render(result.document(), "table", width=100)
    assert len(text.splitlines()) <= 30
    assert "12 of 30 rows; the details show all." in text
    shown = [line.split()[0] for line in text.splitlines() if line.startswith(("layer.", "last"))]
    assert (len(shown), shown[0], shown[-1]) == (12, "layer.0", "last")
    lines, bins = (chart.specification()["data"]["values"] for chart in result.charts().values())
    assert len({row["layer"] for row in lines}) == 30
    assert len({row["panel"] for row in bins}) == 6
