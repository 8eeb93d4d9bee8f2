"""The perplexity law against a slow re-derivation: one text at a time, states as transformers gives them."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_states import mean_pair_distance, slow_pass, token_ids

from lmeval_dispersion import law
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.geometry import spectrum
from lmeval_dispersion.laboratory import models
from lmeval_dispersion.laboratory.perplexity_law import uniform_bins
from lmeval_dispersion.laboratory.segments import draw_segments
from lmeval_dispersion.model.loading import ModelChoice, load_model
from lmeval_dispersion.model.texts import Texts

LENGTH, BINS, SIZE, COUNT = 24, 8, 8, 90


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(0)
    # Texts of very different difficulty: from one repeated word to noise.
    rows = [" ".join(f"w{rng.integers(1 + i)}" for _ in range(LENGTH)) for i in range(COUNT)]
    return tiny_models.text_file(tmp_path_factory.mktemp("law") / "text.jsonl", rows)


@pytest.fixture(scope="module")
def result(model, data):
    options = {
        "bins": BINS,
        "bin_size": SIZE,
        "contexts": (8, 99),
        "control": ("shuffled", "untrained"),
    }
    return law(model, data, segment=LENGTH, layers="all", held_out=data, batch=7, **options)


@pytest.fixture(scope="module")
def slow(model, data):
    """Per text: NLL of every token after the first, hidden states of every depth."""
    loaded = load_model(model)
    return [slow_pass(loaded.model, ids) for ids in token_ids(data)]


def slow_algorithm_1(means, k):
    """The paper's pseudocode, line by line."""
    selected = set()
    for step in range(k):
        target = means[0] + (step / (k - 1) if k > 1 else 0) * (means[-1] - means[0])
        best = min(range(len(means)), key=lambda j: (abs(means[j] - target), j))
        selected.add(best)
    for j in range(len(means)):
        if len(selected) >= k:
            break
        selected.add(j)
    return sorted(selected)


def expected_bins(slow, kind):
    """Every text's value, and of each chosen bin its number and texts: sorted, then chosen, as loops.

    Bins of a single token's perplexity are chosen, and averaged, by its logarithm.
    """
    values = [np.exp(nll.mean()) if kind == "sequence" else nll[7] for nll, _ in slow]
    order = sorted(range(len(values)), key=lambda i: values[i])
    bins = [order[k * SIZE : (k + 1) * SIZE] for k in range(len(values) // SIZE)]
    means = [np.mean([values[i] for i in members]) for members in bins]
    return values, [(j, bins[j]) for j in slow_algorithm_1(means, BINS)]


@pytest.mark.parametrize("kind", ["sequence", "last@8"])
def test_points_are_the_papers_procedure_in_slow_motion(result, slow, kind):
    column = "mean_perplexity" if kind == "sequence" else "mean_nll"
    position = -1 if kind == "sequence" else 7
    rows = result.points.query("perplexity == @kind and split == 'data'")
    values, expected = expected_bins(slow, kind)
    assert rows["layer"].unique().tolist() == ["layer.0", "layer.1", "last"]
    for depth, (_, found) in enumerate(rows.groupby("layer", sort=False), 1):
        assert found["bin"].tolist() == [j for j, _ in expected]
        for (_, members), row in zip(expected, found.itertuples(), strict=True):
            assert getattr(row, column) == pytest.approx(
                np.mean([values[i] for i in members]), rel=1e-4
            )
            vectors = np.array([slow[i][1][depth][position] for i in members])
            assert row.dispersion == pytest.approx(mean_pair_distance(vectors), abs=1e-5)
            unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
            p = np.linalg.eigvalsh(unit @ unit.T / len(unit))
            p = p[p > 1e-12]
            assert row.vendi_score == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-4)
            for name, value in spectrum(vectors)._asdict().items():
                assert getattr(row, name) == pytest.approx(value, rel=1e-3), name
            if kind == "sequence":
                tokens = np.mean([mean_pair_distance(slow[i][1][depth]) for i in members])
                assert row.token_dispersion == pytest.approx(tokens, abs=1e-5)


def test_correlations_are_those_of_the_points(result):
    for row in result.to_frame().query("measure == 'dispersion'").itertuples():
        points = result.points.query(
            "split == @row.split and perplexity == @row.perplexity and layer == @row.layer"
        )
        leads = "mean_perplexity" if row.perplexity == "sequence" else "mean_nll"
        r = np.corrcoef(points[leads], points["dispersion"])[0, 1]
        assert row.pearson == pytest.approx(r, abs=1e-9)
        assert row.low <= row.pearson <= row.high
        # The second text is the first one here, so the line explains as much of it.
        assert row.line_r2 == pytest.approx(r**2, abs=1e-9)
    assert set(result.to_frame()["perplexity"]) == {
        "sequence",
        "last@8",
    }  # 99 does not fit into a segment


def test_the_overall_dispersion_is_that_of_all_texts(result, slow):
    for depth, row in enumerate(result.overall.query("split == 'data'").itertuples(), 1):
        vectors = np.array([states[depth][-1] for _, states in slow])
        assert row.dispersion == pytest.approx(mean_pair_distance(vectors), abs=1e-5)
        assert row.texts == COUNT
        assert row.perplexity == pytest.approx(
            np.exp(np.mean([nll.mean() for nll, _ in slow])), rel=1e-5
        )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"segment": 24},
            UsageError,
            r"at least 800 segments \(8 bins of 100\).*got 90 segments .* more text, or use",
        ),
        ({"segment": 24, "bin_size": 8, "segments": 63}, UsageError, "more segments .*, or"),
        ({}, UsageError, "takes at most 256 tokens, got segments of 512"),
        ({"bins": 7}, UsageError, "bins: expected at least 8, got 7"),
        (
            {"segment": 24, "bin_size": 8, "layers": "layer.9"},
            UsageError,
            r"layer\.2.*got 'layer\.9'",
        ),
    ],
)
def test_too_little_and_too_long_is_told_before_the_work(model, data, options, error, message):
    with pytest.raises(error, match=message):
        law(model, data, **options)


@pytest.mark.parametrize("control", ["untrained", "shuffled"])
@pytest.mark.parametrize(("kind", "length"), [("sequence", LENGTH), ("last@8", 8)])
def test_controls_change_the_states_and_nothing_else(
    result, slow, model, data, kind, length, control
):
    loaded = load_model(model)
    other = loaded.model
    if control == "untrained":
        torch.manual_seed(0)
        other = type(loaded.model)._from_config(loaded.model.config, dtype=torch.float32).eval()
    # Segments lie in the study in the order in which they were drawn, which shuffling depends on.
    drawn = draw_segments(Texts(data), loaded.tokenizer, length=LENGTH, most=COUNT)
    numbers, texts = np.argsort(drawn["origins"][:, 0]), token_ids(data)
    rows = result.points.query("perplexity == @kind and split == 'data' and layer == 'last'")
    _, expected = expected_bins(slow, kind)
    for (_, members), (_, row) in zip(expected, rows.iterrows(), strict=True):
        states = []
        for text in members:
            ids = np.array(texts[text][:length])
            if control == "shuffled":
                ids = ids[np.random.default_rng([0, numbers[text]]).permutation(length)]
            states.append(slow_pass(other, ids)[1][-1])
        apart = mean_pair_distance([each[-1] for each in states])
        assert row[f"dispersion.{control}"] == pytest.approx(apart, abs=1e-5)
        if kind == "sequence":
            spread = np.mean([mean_pair_distance(each) for each in states])
            assert row[f"token_dispersion.{control}"] == pytest.approx(spread, abs=1e-5)


@settings(max_examples=100)
@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=40, unique=True), st.integers(1, 45))
def test_uniform_bins_are_algorithm_1(means, k):
    means = sorted(means)
    chosen = uniform_bins(means, k).tolist()
    assert len(chosen) == min(k, len(means))
    assert chosen == slow_algorithm_1(means, k)


@pytest.fixture(scope="module")
def halved(tmp_path_factory):
    """The tiny model, saved in bfloat16 as released ones are."""
    return tiny_models.saved(
        tmp_path_factory.mktemp("halved") / "m", tiny_models.llama().bfloat16()
    )


def test_the_law_runs_in_float32_unless_another_dtype_is_given(halved, data):
    """The points are those of float32, from weights that are stored in bfloat16."""
    options = {"segment": LENGTH, "bins": BINS, "bin_size": SIZE, "contexts": (), "quiet": True}
    exact = law(halved, data, **options)
    assert exact.manifest["models"][0]["dtype"] == "float32"
    assert "bfloat16" not in " ".join(exact.answer())
    loaded = load_model(halved, dtype="float32")
    slow = [slow_pass(loaded.model, ids) for ids in token_ids(data)]
    _, expected = expected_bins(slow, "sequence")
    for (number, members), row in zip(expected, exact.points.itertuples(), strict=True):
        assert row.bin == number
        apart = mean_pair_distance([slow[text][1][-1][-1] for text in members])
        assert row.dispersion == pytest.approx(apart, abs=1e-5)
    rounded = law(ModelChoice(str(halved), dtype="bfloat16"), data, **options)
    assert rounded.manifest["models"][0]["dtype"] == "bfloat16"
    (sentence,) = [line for line in rounded.answer() if "bfloat16" in line]
    assert "from bin to bin" in sentence
    assert law(load_model(halved), data, **options).answer() == rounded.answer()


def test_a_model_that_does_not_fit_in_float32_is_refused_before_it_is_loaded(
    halved, data, monkeypatch
):
    count = sum(p.numel() for p in load_model(halved).model.parameters())
    assert models.weights_count(halved) == count
    monkeypatch.setattr(models, "free_bytes", lambda _device: 4 * count - 1)
    options = {"segment": LENGTH, "bins": BINS, "bin_size": SIZE}
    with monkeypatch.context() as patch:
        patch.setattr(models, "loaded_model", None)
        with pytest.raises(UsageError, match=r"takes 0\.0 GB in float32 .*dtype=bfloat16"):
            law(halved, data, **options)
    assert law(ModelChoice(str(halved), dtype="bfloat16"), data, **options)
    monkeypatch.setattr(models, "free_bytes", lambda _device: 4 * count)
    assert law(halved, data, **options)
