"""Reports of the four analyses and of a comparison: every form says what the frames say.

Sentences stand on planted data where they must, and on data where they must not.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from json_schemas import faults

from lmeval_dispersion import clusters, condensation, law, sublayers
from lmeval_dispersion.laboratory.comparison import StudiesCompared, bounds_together, told_apart
from lmeval_dispersion.laboratory.context_clusters import ClustersResult, ratio_interval
from lmeval_dispersion.laboratory.perplexity_law import LawResult, control_correlations, correlations
from lmeval_dispersion.laboratory.sublayer_choice import SublayersResult, agreement, recommendation
from lmeval_dispersion.laboratory.token_condensation import CondensationResult, model_tables
from lmeval_dispersion.report import render
from lmeval_dispersion.statistics import fisher, resampled_correlations

MANIFEST = {
    "models": [{"model": "planted"}], "names": {"models": ["planted"], "texts": ["planted.txt"]},
    "settings": {}, "versions": {}, "created": "2026-01-01",
}  # fmt: skip
OVERALL = pd.DataFrame({"split": ["data"], "layer": ["last"], "dispersion": [0.5]})
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
    return LawResult(MANIFEST, correlations(points, 0), points, OVERALL, controls)


def test_a_law_that_a_control_shows_too_is_not_the_models():
    rng = np.random.default_rng(1)
    answer = law_result(rng, [-1.5] * 8, {"untrained": -1.5, "shuffled": 0.0}).answer()
    assert "negative at all 8 layers, but not clearly more so than untrained (r -0.9" in answer[0]
    assert "; untrained -0." in answer[0]
    assert "; shuffled " in answer[0]
    assert NO_CONTROL not in answer
    own = law_result(rng, [-1.5] * 8, {"untrained": 0.0, "shuffled": 0.0}).answer()
    assert "negative at all 8 layers, more so than untrained and shuffled" in own[0]
    assert "not clearly" not in own[0]


@pytest.mark.parametrize(("slope", "word", "sign"), [(-1.5, "negative", "-"), (1.5, "positive", "+")])
def test_a_planted_law_is_found_where_it_is(slope, word, sign):
    rng = np.random.default_rng(0)
    answer = law_result(rng, [slope * at for at in (0, 0, 0, 1, 1, 1, 0, 1)]).answer()
    places = f"{word} at 4 of 8 layers (layer.3 to layer.5, last) (r {sign}0"
    assert f"r of perplexity and dispersion is {places}" in answer[0]
    assert "positive" not in answer[0] or "negative" not in answer[0]
    assert answer[-1] == NO_CONTROL


@pytest.mark.parametrize(
    ("dispersion", "words"),
    [
        ([0.3, 0.3, 0.3], "undefined: a correlation with a constant"),
        ([3.0, 2.0, 2.5], "-0.33, without an interval at 3 bins"),
    ],
)
def test_a_correlation_that_is_undefined_or_has_no_interval_is_said_so(dispersion, words):
    columns = {"perplexity": "sequence", "split": "data", "layer": "last", "bin": range(3)}
    easy = {"mean_perplexity": [1.0, 2, 4], "mean_nll": np.log([1.0, 2, 4])}
    points = pd.DataFrame({**columns, **easy, "dispersion": dispersion})
    result = LawResult(MANIFEST, correlations(points, 0), points, OVERALL, None)
    assert words in result.answer()[0]
    assert "nan" not in result.answer()[0]
    assert ("a correlation with a constant" in result.to_html()) == ("undefined" in words)


def test_single_tokens_have_a_sentence_of_their_own():
    kinds = ("sequence", "last@16", "last@32")
    answer = law_result(np.random.default_rng(0), [1.5] * 8, kinds=kinds).answer()
    start = "Single tokens: after 16, r of log perplexity is positive at all 8 layers (r +0.8"
    assert answer[1].startswith(start)
    assert "; after 32, r of log perplexity is positive at all 8 layers" in answer[1]
    assert len(answer) == 3


def sublayer_result(rng, lead, pool=500, knn=None):
    draws = pd.DataFrame(
        [
            {"layer": layer, "segments": 50, "draw": draw, "dispersion": base + rng.normal() * 0.01}
            for draw in range(10)
            for layer, base in (("layer.2.attn", 0.8 + lead), ("layer.2.ffn", 0.8))
        ]
    )
    chosen = recommendation(draws, pool)
    summary = draws.groupby(["layer", "segments"])["dispersion"].agg(mean="mean", sd="std", draws="count")
    measured = differences = None
    if knn is not None:
        names = {"first": "layer.2.attn", "second": "layer.2.ffn"}
        differences = pd.DataFrame([{**names, "difference": sum(knn) / 2, "low": knn[0], "high": knn[1]}])
        chosen = chosen.assign(knn=agreement(chosen["layer"].item(), differences))
        columns = ("base_perplexity", "perplexity", "gain", "gain_low", "gain_high", "keys")
        measured = pd.DataFrame({"layer": list(names.values())}).assign(**dict.fromkeys(columns, 1.0))
    return SublayersResult(MANIFEST, summary.reset_index(), chosen, draws, measured, differences)


def test_a_key_is_recommended_only_where_the_draws_tell_it_apart():
    (clear,) = sublayer_result(np.random.default_rng(0), 0.1).answer()
    assert clear.startswith("Key the datastore by layer.2.attn: layer.2.attn lies above layer.2.ffn by 0.")
    assert clear.endswith("(10 of 10 draws).")
    (open_,) = sublayer_result(np.random.default_rng(0), 0.0).answer()
    assert open_.startswith("No recommendation: ")
    (whole,) = sublayer_result(np.random.default_rng(0), 0.1, pool=50).answer()
    assert whole.startswith("No recommendation: ")
    assert "a draw is the whole text, so nothing says how sure that is" in whole


@pytest.mark.parametrize(
    ("low", "high", "start"),
    [
        (-0.03, -0.01, "The measured kNN-LM agrees with this recommendation: layer.2.attn costs -0.0200 ("),
        (0.01, 0.03, "The measured kNN-LM contradicts this recommendation: layer.2.attn costs +0.0200 ("),
        (-0.01, 0.03, "The measured kNN-LMs do not clearly differ: layer.2.attn costs +0.0100 (-0.0100 to"),
    ],
)
def test_a_measured_key_agrees_only_where_it_is_sure(low, high, start):
    result = sublayer_result(np.random.default_rng(0), 0.1, knn=(low, high))
    assert result.answer()[1].startswith(start)


def condensation_result(rng, slopes, noise=0.05, texts=40):
    """Similarity that moves with depth by a slope, for each (model, control)."""
    parts = {}
    for (model, control), slope in slopes.items():
        means = 0.3 + slope * np.linspace(0, 1, 6) + rng.normal(size=(texts, 6)) * noise
        names = ["embeddings", *(f"layer.{k}" for k in range(4)), "last"]
        counts = np.ones((6, 4))
        for table, frame in model_tables(names, means, counts).items():
            parts.setdefault(table, []).append(frame.assign(model=model, control=control))
    tables = {table: pd.concat(frames) for table, frames in parts.items() if table != "trends"}
    return CondensationResult(manifest=MANIFEST, **tables)


def test_condensation_is_claimed_where_planted_and_beside_its_controls():
    rng = np.random.default_rng(0)
    answer = condensation_result(rng, {("m", ""): 0.3}).answer()
    assert answer[0].startswith(
        "Tokens of a text grow alike with depth: Spearman of a text's similarity and depth +0."
    )
    assert answer[1] == NO_CONTROL
    assert "grow apart with depth" in condensation_result(rng, {("m", ""): -0.3}).answer()[0]
    same = condensation_result(rng, {("m", ""): 0.2, ("m", "shuffled"): 0.2}).answer()
    assert same[0].startswith("Tokens of a text grow alike, but no more than shuffled, with depth: ")
    more = condensation_result(rng, {("m", ""): 0.2, ("m", "shuffled"): -0.1}).answer()
    assert more[0].startswith("Tokens of a text grow alike, more so than shuffled, with depth")
    assert "; shuffled -0." in more[0]
    several = condensation_result(rng, {("a", ""): 0.2, ("b", ""): -0.2, ("c", ""): 0.2}).answer()
    assert several[0] == "Tokens of a text grow alike with depth in a and c; grow apart with depth in b."


@pytest.mark.parametrize(
    ("sign", "words"), [(1, "rises to depth 2 of 5, then falls"), (-1, "falls to depth 2 of 5, then rises")]
)
def test_a_curve_that_turns_early_is_no_steady_growth(sign, words):
    rng = np.random.default_rng(0)
    result = condensation_result(rng, {("m", ""): 0.0, ("m", "shuffled"): 0.0}, noise=0.01)
    curve = np.array([0.0, 0.2, 0.4, 0.35, 0.3, 0.25])
    result.texts["mean"] += sign * curve[result.texts["depth"]] * (result.texts["control"] == "")
    (answer,) = result.answer()
    assert answer.startswith("Tokens of a text show no steady trend with depth: ")
    assert words in answer
    late = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.3])
    result.texts["mean"] += sign * (late - curve)[result.texts["depth"]] * (result.texts["control"] == "")
    assert " grow alike, more" in result.answer()[0] or sign < 0


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
        each.append(pd.DataFrame({"model": model, "layer": "last", "within": within, "apart": apart}))
    ngrams = pd.DataFrame({"cluster": [0], "ngram": ["a b"], "occurrences": [9]})
    return ClustersResult(MANIFEST, pd.DataFrame(summaries), pd.concat(each), ngrams)


def test_clusters_are_compared_with_the_first_model():
    rng = np.random.default_rng(0)
    (answer,) = clusters_result(rng, {"a": 1.0, "b": 1.5, "c": 1.0, "d": 0.5}).answer()
    assert answer == (
        "Against a, clusters lie further apart in b; closer together in d; not clearly differently in c "
        "(between over within 60 clusters at last)."
    )
    (alone,) = clusters_result(rng, {"a": 1.5}).answer()
    assert alone.startswith(
        "Clusters lie further apart than their members lie from their centre: between over"
    )
    assert clusters_result(rng, {"a": 0.5}).answer()[0].startswith("Clusters lie closer together than")


def differences(values, half):
    values = np.asarray(values, dtype=float)
    bounds = {"difference": values, "low": values - half, "high": values + half}
    rows = {
        "layer": [f"layer.{k}" for k in range(len(values))],
        "figure": "mean",
        "first": 0.0,
        "second": values,
    }
    return pd.DataFrame({**rows, **bounds, "paired": True})


def test_a_comparison_counts_only_what_is_sure_among_all_rows():
    frame = differences([0.1, 0.5, -0.6, 0.0, np.nan], 0.2)
    result = StudiesCompared(frame, "runs/x", "runs/y")
    answer = result.answer()
    assert answer[0] == "y minus x: 2 of 5 differences are clear of 0, all taken together."
    assert answer[1] == "The clearest of each metric: layer.2, mean -0.6 (-0.8 to -0.4)."
    report = json.loads(render(result.document(), "json"))
    assert list(report) == ["schema", "answer", "first", "second", "rows"]
    assert faults(report) == []
    assert faults({**report, "rows": [{"layer": "layer.0"}]})
    assert report["rows"][0] == {**frame.iloc[0].to_dict(), "paired": True}
    assert report["rows"][4]["difference"] is None
    assert render(result.document(), "csv").splitlines()[1].startswith("layer.0,mean,0.0,0.1,0.1,-0.1")
    assert [row["row"] for row in result.plot()["data"]["values"]] == frame["layer"].tolist()
    # Alone 0.21 leaves 0 out, among five it does not.
    none = StudiesCompared(differences([0.21, 0.1, 0, 0, 0], 0.2), "x", "y").answer()
    assert none == ["y minus x: none of 5 differences is clear of 0."]
    assert told_apart(differences([0.21], 0.2)).all()


def false_claim(what, rng):
    """Whether a report of noise, or of a law that a control shares, claims something."""
    if what in ("a law", "a shared law"):
        slope, control = (0, None) if what == "a law" else (-0.8, {"untrained": -0.8})
        claims = law_result(rng, [slope] * 8, control).context()["kinds"][0]["claims"]
        return any(claim["beyond"] or not control for claim in claims)
    if what == "a key":
        return bool(sublayer_result(rng, 0.0).recommendation["told_apart"].item())
    if what == "condensation":
        noise = condensation_result(rng, {("m", ""): 0.0, ("m", "shuffled"): 0.0})
        return noise.context()["trends"][0].verdict != "none"
    if what == "clusters":
        return "not" not in clusters_result(rng, {"a": 1.0, "b": 1.0}).context()["against"][0][0]
    return told_apart(differences(rng.normal(size=30), 1.96)).any()


@pytest.mark.parametrize(
    ("what", "draws", "most"),
    [
        ("a law", 15, 4),
        ("a shared law", 15, 4),
        ("a key", 200, 10),
        ("condensation", 15, 3),
        ("clusters", 150, 15),
        ("a difference", 400, 32),
        # At most 5 % of all layers together: of 60 draws at most 8 with 99 % probability.
        pytest.param("a law", 60, 8, marks=pytest.mark.slow),
        pytest.param("a shared law", 60, 8, marks=pytest.mark.slow),
        pytest.param("condensation", 150, 15, marks=pytest.mark.slow),
    ],
)
def test_noise_is_rarely_a_claim(what, draws, most):
    assert sum(bool(false_claim(what, np.random.default_rng([7, seed]))) for seed in range(draws)) <= most


@pytest.mark.parametrize(("count", "least"), [(40, 0.85), pytest.param(200, 0.9, marks=pytest.mark.slow)])
def test_bounds_together_cover_all_correlations_at_once(count, least):
    truth, covered = -0.6, 0
    for seed in range(count):
        rng = np.random.default_rng([3, seed])
        x, shared = rng.normal(size=(2, 40))
        own = rng.normal(size=(10, 40))
        ys = truth * x + np.sqrt(1 - truth**2) * (0.9 * shared + np.sqrt(1 - 0.81) * own)
        r = [np.corrcoef(x, y)[0, 1] for y in ys]
        samples = np.stack([fisher(resampled_correlations(x, y)) for y in ys], axis=1)
        low, high = bounds_together(fisher(r), samples)
        covered += bool(((low <= np.arctanh(truth)) & (np.arctanh(truth) <= high)).all())
    assert covered / count >= least


BOTH = ("untrained", "shuffled")
KINDS = ("law", "sublayers", "condensation", "clusters")


@pytest.fixture(scope="module")
def results(model, data, repeating):
    contexts = {"ngram": 4, "occurrences": 20, "segment": 6, "layers": "layer.1,last"}
    return {
        "law": law(model, data, segment=30, bins=4, bin_size=10, layers="all", contexts=(8,), control=BOTH),
        "sublayers": sublayers(model, data, segment=30, sizes=(5, 20)),
        "condensation": condensation(model, data, segment=30, segments=20, control=BOTH),
        "clusters": clusters(model, repeating, **contexts),
    }


def test_studies_are_compared_without_torch():
    code = "import sys, lmeval_dispersion.laboratory.comparison; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("kind", KINDS)
def test_json_is_the_manifest_and_every_frame_and_csv_the_main_one(results, kind):
    result = results[kind]
    found = json.loads(render(result.document(), "json"))
    assert list(found) == ["schema", "answer", "kind", "manifest", "tables"]
    assert faults(found) == []
    assert all(faults({key: found[key] for key in found if key != left}) for left in list(found)[1:])
    assert faults({**found, "tables": {f"{name}_new": rows for name, rows in found["tables"].items()}})
    assert found["answer"] == result.answer()
    assert found["manifest"] == result.manifest
    frames = {name: value for name, value in vars(result).items() if isinstance(value, pd.DataFrame)}
    assert "controls" in frames or kind != "law"
    assert list(found["tables"]) == list(frames)
    for name, frame in frames.items():
        again = pd.DataFrame(found["tables"][name], columns=frame.columns)
        pd.testing.assert_frame_equal(again, frame.reset_index(drop=True), check_dtype=False)
    table = io.StringIO(render(result.document(), "csv"))
    rows = pd.read_csv(table, keep_default_na=False, na_values=["nan", "NaN"])
    main = result.to_frame().reset_index(drop=True)
    assert list(rows.columns) == list(main.columns)
    for column in main.select_dtypes("number"):
        assert np.allclose(pd.to_numeric(rows[column]), main[column], rtol=1e-8, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_default_answer_fits_one_look_and_details_hold_the_rest(results, kind):
    document = results[kind].document()
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
                    assert format(row[column.key], column.format) in whole
    assert all(" ".join(limit.replace("`", "").split()) in whole for limit in document.limits)
    page = results[kind].to_html()
    assert "Content-Security-Policy" in page
    assert page.count("<svg") >= 2 * len(document.charts())
    assert results[kind].plot()["data"]["values"]


def test_thirty_layers_are_a_dozen_rows_and_a_few_panels():
    rng = np.random.default_rng(0)
    layers = [*(f"layer.{k}" for k in range(29)), "last"]
    mean = np.linspace(10, 90, 20)
    columns = {"split": "data", "perplexity": "sequence", "mean_perplexity": mean, "mean_nll": np.log(mean)}
    columns["bin"] = np.arange(20)
    frames = [pd.DataFrame({**columns, "layer": x, "dispersion": rng.normal(size=20)}) for x in layers]
    points = pd.concat(frames)
    result = LawResult(MANIFEST, correlations(points, 0), points, OVERALL, None)
    text = render(result.document(), "table", width=100)
    assert len(text.splitlines()) <= 30
    assert "12 of 30 rows; --details shows all." in text
    shown = [line.split()[0] for line in text.splitlines() if line.startswith(("layer.", "last"))]
    assert (len(shown), shown[0], shown[-1]) == (12, "layer.0", "last")
    lines, bins = (chart.specification()["data"]["values"] for chart in result.charts().values())
    assert {row["layer"] for row in lines} == set(layers)
    assert len({row["panel"] for row in bins}) == 6
