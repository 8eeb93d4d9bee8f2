"""Condensation, sub-layers and clusters against slow re-derivations on small models."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
import tiny_models
import torch

from lmeval_dispersion.errors import NonFiniteStateError, UsageError
from lmeval_dispersion.geometry import cluster_distances, dispersion
from lmeval_dispersion.laboratory import clusters, condensation, sublayers
from lmeval_dispersion.laboratory.condensing import similarity_counts
from lmeval_dispersion.laboratory.knn import _index, _Votes
from lmeval_dispersion.laboratory.ngrams import recurring_contexts, write_corpus
from lmeval_dispersion.model.loading import ModelChoice, load_model
from lmeval_dispersion.model.texts import Texts

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="module")
def model(place):
    return tiny_models.saved(place / "model", tiny_models.llama())


@pytest.fixture(scope="module")
def data(place):
    rng = np.random.default_rng(0)
    rows = [" ".join(f"w{i}" for i in rng.zipf(1.4, 30) % 90) for _ in range(60)]
    path = place / "text.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


def hidden_states(model, tokens):
    """Every depth's states of one text, as transformers returns them, float64."""
    with torch.no_grad():
        out = load_model(model).model(torch.tensor([tokens]), output_hidden_states=True)
    return [h[0].double().numpy() for h in out.hidden_states]


def token_ids(data):
    return [[tiny_models.VOCABULARY[w] for w in item.text.split()] for item in Texts(data)]


def test_condensation_is_the_mean_over_pairs_of_different_tokens(model, data):
    found = condensation(model, data, segment=30, texts=999, batch=7)
    states = [hidden_states(model, ids) for ids in token_ids(data)]
    for depth, row in enumerate(found.layers.itertuples()):
        total = []
        for text in states:
            u = text[depth] / np.linalg.norm(text[depth], axis=1, keepdims=True)
            total.append(np.mean([u[i] @ u[j] for i in range(len(u)) for j in range(i)]))
        assert row.mean == pytest.approx(np.mean(total), abs=1e-5)
        assert row.low < row.mean < row.high
        density = found.histogram.query("depth == @depth")
        assert (density["density"] * (density["high"] - density["low"])).sum() == pytest.approx(1)
        middle = (density["low"] + density["high"]) / 2
        assert (density["density"] * middle).sum() * 2 / 128 == pytest.approx(row.mean, abs=1 / 128)
    assert found.layers["layer"].tolist() == ["embeddings", "layer.0", "layer.1", "last"]
    wide = found.texts.pivot(index="text", columns="depth", values="mean")
    assert found.summary["last_mean"].item() == pytest.approx(wide.to_numpy()[:, -3:].mean(), abs=1e-9)


def test_the_released_variant_is_its_description(model, data):
    found = condensation(model, data, segment=30, texts=999, reference=True, batch=11)
    states = [hidden_states(model, ids) for ids in token_ids(data)]
    edges = np.linspace(-1, 1, 129)
    for depth in range(4):
        matrices = []
        for text in states:
            u = text[depth] / np.maximum(np.linalg.norm(text[depth], axis=1, keepdims=True), 1e-3)
            matrices.append(np.clip(u @ u.T, -1, 1))
        # Texts come in a drawn order; their average does not depend on it.
        average = np.mean(matrices, axis=0)
        row = found.layers.iloc[depth]
        assert row["reference_mean"] == pytest.approx(average.mean(), abs=1e-6)
        got = found.histogram.query("depth == @depth")["reference_density"].to_numpy()
        expected = np.histogram(average, bins=edges, density=True)[0]
        # Rounding may move a pair of tokens across an edge.
        assert np.abs(got - expected).sum() / 64 < 0.01


def test_histograms_count_every_pair_once():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(50, 4)).astype(np.float32)
    u = x / np.linalg.norm(x, axis=1, keepdims=True)
    pairs = [float(u[i] @ u[j]) for i in range(50) for j in range(i)]
    expected = np.histogram(pairs, bins=np.linspace(-1, 1, 129))[0]
    got = similarity_counts(torch.tensor(x))
    assert got.sum() == 50 * 49 // 2
    assert np.abs(got - expected).sum() <= 4
    same = similarity_counts(torch.ones(6, 3))
    assert same[-1] == 15
    assert similarity_counts(torch.tensor([[1.0, 0], [0, 0], [-1, 0]]))[0] == 1  # a zero row has no direction


def test_fewer_tokens_are_a_draw_that_does_not_depend_on_batches(model, data):
    one = condensation(model, data, segment=30, texts=40, tokens=12, batch=1)
    other = condensation(model, data, segment=30, texts=40, tokens=12, batch=40)
    assert np.allclose(one.layers["mean"], other.layers["mean"], atol=1e-6)
    every = condensation(model, data, segment=30, texts=40, tokens=30)
    assert not np.allclose(one.layers["mean"], every.layers["mean"], atol=1e-6)
    assert np.allclose(one.layers["mean"], every.layers["mean"], atol=0.05)


def test_several_models_stand_side_by_side(model, data, place):
    second = tiny_models.saved(place / "second", tiny_models.llama(seed=1, num_hidden_layers=2))
    found = condensation([model, ModelChoice(str(second))], data, segment=30, texts=20)
    assert found.summary["model"].tolist() == [str(model), str(second)]
    assert found.summary["depths"].tolist() == [4, 3]
    alone = condensation(second, data, segment=30, texts=20)
    both = found.layers.query("model == @second.__str__()")
    assert np.array_equal(both["mean"], alone.layers["mean"])
    with pytest.raises(UsageError, match=r"different models, got .*model twice"):
        condensation([model, model], data)


def test_sublayer_draws_are_those_of_the_same_segments(model, data):
    found = sublayers(model, data, segment=30, sizes=(5, 20, 50), batch=9)
    assert set(found.summary["layer"]) == {"layer.2.attn", "layer.2.ffn"}
    loaded = load_model(model)
    block = loaded.model.model.layers[2]
    vectors = {"layer.2.attn": [], "layer.2.ffn": []}
    seen = {}
    block.register_forward_hook(lambda m, a, out: seen.update(ffn=out[0] if isinstance(out, tuple) else out))
    block.post_attention_layernorm.register_forward_pre_hook(lambda m, a: seen.update(attn=a[0]))
    rows = {}
    for ids in token_ids(data):
        with torch.no_grad():
            loaded.model(torch.tensor([ids]))
        rows[tuple(ids)] = [seen[k].reshape(1, 30, -1)[0, -1].numpy().copy() for k in ("attn", "ffn")]
    # The pool's order is a draw of its own: read it as the study does.
    from lmeval_dispersion.laboratory.segments import write_segments

    pool = write_segments(data.parent, "again", Texts(data), loaded.tokenizer, length=30, count=500)
    for name, which in (("layer.2.attn", 0), ("layer.2.ffn", 1)):
        vectors[name] = np.array([rows[tuple(ids)][which] for ids in pool.tokens.tolist()])
        for size in (5, 50):
            expected = [
                dispersion(vectors[name][np.random.default_rng([0, size, r]).choice(60, size, replace=False)])
                for r in range(10)
            ]
            row = found.summary.query("layer == @name and segments == @size").iloc[0]
            assert row["mean"] == pytest.approx(np.mean(expected), abs=1e-5)
            assert row["sd"] == pytest.approx(np.std(expected, ddof=1), abs=1e-5)
    chosen = found.recommendation.iloc[0]
    by_hand = found.summary.query("segments == 50").sort_values("mean")["layer"].tolist()
    assert [chosen["second"], chosen["layer"]] == by_hand
    wide = found.draws.query("segments == 50").pivot(index="draw", columns="layer", values="dispersion")
    difference = wide[chosen["layer"]] - wide[chosen["second"]]
    assert chosen["margin"] == pytest.approx(difference.mean() / difference.std())


def test_draws_that_the_text_cannot_fill_are_left_out_and_said(model, data):
    found = sublayers(model, data, segment=30)
    assert sorted(found.summary["segments"].unique()) == [10, 50]
    assert found.manifest["left_out_sizes"] == [100]
    with pytest.raises(UsageError, match=r"at least 100 segments of 30 tokens, got 60"):
        sublayers(model, data, segment=30, sizes=(100,))


def test_neighbours_vote_as_a_slow_knn_would():
    pytest.importorskip("faiss")
    rng = np.random.default_rng(2)
    keys, queries = (
        rng.normal(size=(4, 6, 5)).astype(np.float32),
        rng.normal(size=(2, 3, 5)).astype(np.float32),
    )
    values, targets = rng.integers(0, 3, 24), rng.integers(0, 3, (2, 3))
    votes = _Votes(_index(keys), queries, values, targets)
    nearest = []
    for q in queries.reshape(-1, 5):
        nearest.append(min(float(((q - k) ** 2).sum()) for k in keys.reshape(-1, 5)))
    scale = np.median(nearest)
    for temperature in (0.3, 2.0):
        got = votes.probability(temperature).ravel()
        for q, t, p in zip(queries.reshape(-1, 5), targets.ravel(), got, strict=True):
            w = [math.exp(-float(((q - k) ** 2).sum()) / scale / temperature) for k in keys.reshape(-1, 5)]
            expected = sum(x for x, v in zip(w, values, strict=True) if v == t) / sum(w)
            assert p == pytest.approx(expected, rel=1e-3)
    model = np.full((2, 3), 0.25)
    mixed = votes.losses(model, 0.4, 0.3)
    assert mixed == pytest.approx(-np.log(0.6 * 0.25 + 0.4 * votes.probability(0.3)))
    weight, temperature = votes.best(model)
    assert votes.losses(model, weight, temperature).mean() <= mixed.mean() + 1e-12


def test_a_knn_lm_is_built_and_measured_on_segments_of_its_own(model, data):
    pytest.importorskip("faiss")
    found = sublayers(model, data, segment=30, sizes=(20,), knn=True)
    knn = found.knn.set_index("layer")
    assert knn["keys"].tolist() == [(60 - 2 * 6) * 29] * 2
    assert knn["base_perplexity"].nunique() == 1
    assert (knn["perplexity"] < knn["base_perplexity"]).all()  # a random model knows less than its neighbours
    best = knn["perplexity"].idxmin()
    assert found.recommendation["lowest_perplexity"].item() == best
    assert found.recommendation["agrees"].item() == (found.recommendation["layer"].item() == best)
    difference = found.knn_differences.iloc[0]
    expected = np.log(
        knn.loc[difference["first"], "perplexity"] / knn.loc[difference["second"], "perplexity"]
    )
    assert difference["difference"] == pytest.approx(expected, abs=1e-9)


def test_a_model_without_the_sub_layer_lists_what_there_is(place, data):
    from transformers import MambaConfig, MambaForCausalLM

    settings = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    path = tiny_models.saved(place / "mamba", tiny_models.model(MambaConfig, MambaForCausalLM, **settings))
    with pytest.raises(
        UsageError, match=r"layers among last.*layer\.0 \.\.\. layer\.1.*got 'layer\.-1\.attn'"
    ):
        sublayers(path, data, segment=30)
    found = sublayers(path, data, segment=30, layers="layer.0,last", sizes=(20,))
    assert set(found.summary["layer"]) == {"layer.0", "last"}


def slow_ngrams(documents, n, before):
    """Counts of n-grams with whole contexts before them."""
    return Counter(tuple(ids[i : i + n]) for ids in documents for i in range(before, len(ids) - n + 1))


@pytest.fixture(scope="module")
def repeating(place):
    rng = np.random.default_rng(3)
    phrases = [[int(i) for i in rng.integers(0, 90, 4)] for _ in range(4)]
    rows = []
    for _ in range(80):
        row = []
        for _ in range(3):
            row += [*rng.integers(0, 90, 9).tolist(), *phrases[rng.integers(4)]]
        rows.append(" ".join(f"w{i}" for i in row))
    path = place / "repeating.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


def test_recurring_ngrams_are_found_with_their_contexts(repeating, tmp_path):
    tokenizer = tiny_models.tokenizer()
    write_corpus(tmp_path, Texts(repeating), tokenizer, pack=False)
    settings = {"ngram": 4, "occurrences": 20, "contexts": 12, "context": 6, "clusters": 9, "seed": 0}
    found = recurring_contexts(tmp_path, tokenizer, **settings)
    documents = token_ids(repeating)
    counts = slow_ngrams(documents, 4, 6)
    expected = {gram: c for gram, c in counts.items() if c >= 20}
    assert {
        tuple(g): int(c) for g, c in zip(found.ngrams.tolist(), found.occurrences, strict=True)
    } == expected
    assert found.occurrences.tolist() == sorted(found.occurrences, reverse=True)
    whole = {tuple(ids[i - 6 : i + 4]) for ids in documents for i in range(6, len(ids) - 3)}
    for gram, contexts in zip(found.ngrams.tolist(), found.tokens.tolist(), strict=True):
        assert all((*context, *gram) in whole for context in contexts)


def test_a_longer_phrase_is_one_cluster_and_not_its_shifted_copies(repeating, tmp_path):
    write_corpus(tmp_path, Texts(repeating), tiny_models.tokenizer(), pack=False)
    settings = {"ngram": 3, "occurrences": 20, "contexts": 12, "context": 6, "clusters": 99, "seed": 0}
    found = recurring_contexts(tmp_path, tiny_models.tokenizer(), **settings)
    assert len(found.ngrams) == 4  # four phrases of four tokens hold eight frequent 3-grams


def test_clusters_are_geometrys_distances(model, repeating, tmp_path):
    options = {"ngram": 4, "occurrences": 20, "contexts": 12, "context": 6, "layers": "layer.1,last"}
    found = clusters(model, repeating, batch=5, **options)
    write_corpus(tmp_path, Texts(repeating), tiny_models.tokenizer(), pack=False)
    settings = {"ngram": 4, "occurrences": 20, "contexts": 12, "context": 6, "clusters": 500, "seed": 0}
    contexts = recurring_contexts(tmp_path, tiny_models.tokenizer(), **settings)
    labels = np.repeat(np.arange(len(contexts.tokens)), 12)
    for depth, layer in ((2, "layer.1"), (3, "last")):
        vectors = [hidden_states(model, c)[depth][-1] for group in contexts.tokens.tolist() for c in group]
        expected = cluster_distances(np.array(vectors), labels)
        row = found.summary[found.summary["layer"] == layer].iloc[0]
        assert row["within"] == pytest.approx(expected.within, abs=1e-5)
        assert row["between"] == pytest.approx(expected.between, abs=1e-5)
        assert row["clusters"] == expected.clusters
        each = found.clusters[found.clusters["layer"] == layer]
        assert each["within"].mean() == pytest.approx(row["within"])
        assert each["apart"].mean() == pytest.approx(row["between"])
    assert all(len(text.split()) == 4 for text in found.ngrams["ngram"])


def test_clusters_need_recurrence_and_one_tokenizer(model, repeating, place):
    with pytest.raises(UsageError, match=r"at least 2 9-grams that occur 20 times .* lower --ngram"):
        clusters(model, repeating, ngram=9, occurrences=20, contexts=12, context=6)
    with pytest.raises(UsageError, match=r"as many occurrences as contexts"):
        clusters(model, repeating, ngram=4, occurrences=20, contexts=30, context=6)
    other = tiny_models.saved(place / "other-words", tiny_models.llama(seed=4))
    path = other / "tokenizer.json"
    path.write_text(path.read_text().replace('"w7"', '"x7"'))
    with pytest.raises(UsageError, match="checkpoints with one tokenizer"):
        clusters([model, other], repeating, ngram=4, occurrences=20, contexts=12, context=6)


def test_nan_states_are_told_with_layer_and_text(place, data):
    broken = tiny_models.llama()
    with torch.no_grad():
        broken.model.embed_tokens.weight[tiny_models.VOCABULARY["w1"], 0] = float("inf")
    path = tiny_models.saved(place / "broken", broken)
    with pytest.raises(NonFiniteStateError, match=r"at embeddings in text \d+ of .*; check the checkpoint"):
        condensation(path, data, segment=30, texts=20)
    with pytest.raises(NonFiniteStateError, match=r"at layer\.2\.(attn|ffn) in text \d+"):
        sublayers(path, data, segment=30, sizes=(10,))


def test_plots_are_charts(model, data):
    for found in (
        condensation(model, data, segment=30, texts=5),
        sublayers(model, data, segment=30, sizes=(5,)),
    ):
        assert "vega-lite" in found.plot().to_dict()["$schema"]


def test_half_precision_and_adapters_are_the_same_study(model, data, place):
    peft = pytest.importorskip("peft")
    plain = condensation(model, data, segment=30, texts=30)
    half = condensation(ModelChoice(str(model), dtype="bfloat16"), data, segment=30, texts=30)
    assert half.manifest["models"][0]["dtype"] == "bfloat16"
    assert np.allclose(plain.layers["mean"], half.layers["mean"], atol=0.02)
    assert not np.array_equal(plain.layers["mean"], half.layers["mean"])
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=2, target_modules=["down_proj"], layers_to_transform=[2], init_lora_weights=False
    )
    peft.get_peft_model(tiny_models.llama(), config).save_pretrained(place / "adapter")
    tuned = condensation(ModelChoice(str(model), adapter=str(place / "adapter")), data, segment=30, texts=30)
    assert tuned.summary["model"].item() == f"{model} + {place / 'adapter'}"
    assert np.allclose(plain.layers["mean"][:3], tuned.layers["mean"][:3], atol=1e-6)  # the last block has it
    assert abs(plain.layers["mean"][3] - tuned.layers["mean"][3]) > 1e-4
