"""A kNN-LM against a slow one: every distance by itself, in float64, one token at a time."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest
import tiny_models
from slow_states import slow_pass, token_ids

from lmeval_dispersion import sublayers
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.laboratory import knn
from lmeval_dispersion.laboratory.sublayer_choice import judgement, knn_sentence
from lmeval_dispersion.model.loading import load_model
from lmeval_dispersion.statistics import jackknife_se, student_bounds

KEYS = ["layer.2.attn", "layer.2.ffn", "last"]
DOCUMENTS = {"datastore": range(36), "tune": range(36, 42), "test": range(42, 60)}
NEAREST = 12


@pytest.fixture(scope="module")
def repeated(place):
    """Sixty texts of two segments, each of which holds one of six phrases."""
    rng = np.random.default_rng(0)
    phrases = rng.integers(0, 90, (6, 7)).tolist()
    rows = []
    for number in range(60):
        row = []
        for half in range(2):
            # Another first word in every segment of the datastore, so that no two keys are equal.
            first = (number + 36 * half) % 90
            row += [first, *phrases[(number + half) % 6], *rng.integers(0, 90, 2).tolist()]
        rows.append(row)
    texts = (" ".join(f"w{word}" for word in row) for row in rows)
    return tiny_models.text_file(place / "repeated.jsonl", texts)


@pytest.fixture(scope="module")
def result(model, repeated):
    options = {"datastore": 0.6, "tune": 0.1, "test": 0.3, "neighbours": NEAREST, "batch": 7}
    return sublayers(model, repeated, segment=10, sizes=(10,), knn=True, quiet=True, **options)


@pytest.fixture(scope="module")
def slow(model, repeated):
    """Of each segment its tokens, its NLL, and the states of every key; by document."""
    loaded = load_model(model)
    block = loaded.model.model.layers[2]
    seen = {}
    block.register_forward_hook(lambda m, a, out: seen.update(ffn=out if out.ndim == 3 else out[0]))
    block.post_attention_layernorm.register_forward_pre_hook(lambda m, a: seen.update(attn=a[0]))
    documents = []
    for ids in token_ids(repeated):
        segments = []
        for start in (0, 10):
            tokens = ids[start : start + 10]
            nll, states = slow_pass(loaded.model, tokens)
            keys = [seen["attn"][0].double().numpy(), seen["ffn"][0].double().numpy(), states[-1]]
            segments.append((tokens, nll, dict(zip(KEYS, keys, strict=True))))
        documents.append(segments)
    return documents


def slow_shares(slow, key, part):
    """For every token of a part: its share of the neighbours by temperature, and its NLL."""
    store = [
        (segment[2][key][place], segment[0][place + 1])
        for document in DOCUMENTS["datastore"]
        for segment in slow[document]
        for place in range(9)
    ]
    vectors = np.array([vector for vector, _ in store])
    values = np.array([value for _, value in store])
    variance = np.square(vectors - vectors.mean(axis=0)).sum(axis=1).mean()
    shares, losses, documents = [], [], []
    for document in DOCUMENTS[part]:
        for tokens, nll, states in slow[document]:
            for place in range(9):
                distances = np.square(vectors - states[key][place]).sum(axis=1)
                nearest = np.argsort(distances, kind="stable")[:NEAREST]
                row = []
                for temperature in knn.TEMPERATURES:
                    weights = np.exp(
                        -(distances[nearest] - distances.min()) / variance / temperature
                    )
                    right = values[nearest] == tokens[place + 1]
                    row.append(weights[right].sum() / weights.sum())
                shares.append(row)
                losses.append(nll[place])
                documents.append(document)
    return np.array(shares), np.array(losses), np.array(documents)


@pytest.mark.parametrize("key", KEYS)
def test_a_knn_lm_is_a_slow_one_token_by_token(result, slow, key):
    shares, nll, _ = slow_shares(slow, key, "tune")
    best = (np.inf, None, None)
    for (place, temperature), weight in itertools.product(
        enumerate(knn.TEMPERATURES), np.arange(20) / 20
    ):
        loss = -np.log(weight * shares[:, place] + (1 - weight) * np.exp(-nll)).mean()
        if loss < best[0] - 1e-12:
            best = (loss, weight, temperature)
    row = result.knn.set_index("layer").loc[key]
    assert (row["weight"], row["temperature"]) == best[1:]
    shares, nll, documents = slow_shares(slow, key, "test")
    place = knn.TEMPERATURES.tolist().index(best[2])
    losses = -np.log(best[1] * shares[:, place] + (1 - best[1]) * np.exp(-nll))
    assert row["perplexity"] == pytest.approx(np.exp(losses.mean()), rel=1e-5)
    assert row["without"] == pytest.approx(np.exp(nll.mean()), rel=1e-5)
    assert row["tokens"] == len(nll)
    moved = [(losses - nll)[documents != left].mean() for left in DOCUMENTS["test"]]
    level = 1 - 0.05 / 5  # three keys, and one of them against two
    value = (losses - nll).mean()
    bounds = student_bounds(value, jackknife_se(np.array(moved)), len(moved), level)
    ends = [row[f"change{end}"] for end in ("", "_low", "_high")]
    assert ends == pytest.approx(100 * np.expm1([value, *bounds]), abs=1e-3)
    assert result.manifest["models"][0]["parts"] == {"datastore": 72, "tune": 12, "test": 36}


def test_repeated_texts_are_worth_their_neighbours(result):
    """Planted: seven of ten tokens repeat, which a model of random weights cannot know."""
    assert (result.knn["change_high"] < 0).all()
    assert any(line.startswith("A kNN-LM keyed by ") for line in result.answer())


def test_noise_has_no_neighbours_and_parts_may_be_texts_of_their_own(model, place, repeated):
    rng = np.random.default_rng(5)
    texts = (" ".join(f"w{word}" for word in rng.integers(0, 90, 10)) for _ in range(30))
    noise = tiny_models.text_file(place / "noise.jsonl", texts)
    options = {"segment": 10, "sizes": (10,), "knn": True, "neighbours": 8, "quiet": True}
    found = sublayers(model, repeated, test=noise, tune=noise, **options)
    assert found.manifest["names"]["texts"] == [str(repeated), str(noise), str(noise)]
    assert found.manifest["models"][0]["parts"]["test"] == 30
    for row in found.knn.to_dict("records"):
        assert row["change_high"] >= 0 or row["weight"] == 0
    with pytest.raises(UsageError, match=r"add up to at most 1, got 1\.4"):
        sublayers(model, repeated, **options, datastore=0.9, tune=0.3, test=0.2)
    with pytest.raises(UsageError, match="expected knn together with"):
        sublayers(model, repeated, segment=10, test=0.2)


def losses(rng, better, noise=0.05, documents=40):
    """Losses of three keys by document, of which ``attn`` is better than ``ffn`` by so much a token."""
    level = 3 + 0.5 * rng.normal(size=documents)
    table = []
    for key, mean in (("attn", -better), ("ffn", 0.0), ("last", 0.2)):
        values = level + mean + noise * rng.normal(size=documents)
        table.append(
            pd.DataFrame(
                {
                    "layer": key,
                    "document": range(documents),
                    "tokens": 100,
                    "without": 100 * level,
                    "nll": 100 * values,
                }
            )
        )
    return pd.concat(table, ignore_index=True)


@pytest.mark.parametrize(
    ("better", "recommended", "words"),
    [
        (0.1, True, "The recommendation holds here: attn, the most dispersed key, gives "),
        (-0.1, True, "The recommendation does not hold here: attn, "),
        (
            0.0,
            True,
            "It is unclear whether the recommendation holds here: the perplexity of attn, ",
        ),
        (0.1, False, "Perplexity agrees with dispersion: attn, the most dispersed key, gives "),
        (-0.1, False, "Perplexity disagrees with dispersion: attn, the most dispersed key, gives "),
        (0.0, False, "The perplexities do not decide: the perplexity of attn, "),
    ],
)
def test_the_recommendation_is_judged_by_planted_losses(better, recommended, words):
    table = losses(np.random.default_rng(0), better)
    rows = knn.against(table, "attn").to_dict("records")
    sentence = judgement(rows, recommended=recommended)
    assert sentence.startswith(words)
    assert ("lower perplexity" in sentence) == (better > 0)
    assert ("higher perplexity than ffn" in sentence) == (better < 0)


@pytest.mark.parametrize("better", [0.1, 0.0])
def test_a_lower_perplexity_is_claimed_where_it_is_planted(better):
    table = losses(np.random.default_rng(1), better)
    settings = pd.DataFrame({"layer": ["attn", "ffn", "last"], "unit": "document", "weight": 0.5})
    settings["temperature"] = 0.1
    rows = knn.summary_of(table, settings).to_dict("records")
    sentence = knn_sentence(rows)
    assert sentence.startswith("A kNN-LM keyed by attn lowers" if better else "No key of a kNN-LM")


def test_noise_is_rarely_a_judgement():
    """At most 5 % of all claims together: of 200 at most 20 with 99.9 % probability."""
    claims = 0
    for seed in range(200):
        rng = np.random.default_rng([9, seed])
        table = losses(rng, 0.0)
        table = table[table["layer"] != "last"]
        row = knn.against(table, "attn").iloc[0]
        claims += bool(row["change_low"] > 0 or row["change_high"] < 0)
    assert claims <= 20
