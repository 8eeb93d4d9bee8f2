"""What the population of answers.yaml records, against slow loops of one question at a time."""

import random

import numpy as np
import pytest
import torch

from benchmarks.validity import records
from benchmarks.validity import texts as sources
from benchmarks.validity.answers import Answers, between, within
from benchmarks.validity.decoder import Decoder
from benchmarks.validity.questions import endings_read, questions
from benchmarks.validity.study import read_study

CONFIGURATION = records.ROOT / "benchmarks/validity/answers.yaml"
SHAPE = {"width": 16, "mlp": 24, "layers": 1, "heads": 2}


@pytest.fixture(scope="module")
def answers():
    tokenizer = sources.trained_tokenizer(sources.WITH_CALLS, 1400, documents=200, seed=61)
    asked = {
        pool: {skill: questions(skill, 12, seed, calls=True) for skill in sources.SKILLS}
        for pool, seed in (("truth", 1), ("labels", 2))
    }
    return Answers(tokenizer, asked), Decoder(tokenizer.get_vocab_size(), **SHAPE, scale=4.0, seeds=[3])


@torch.no_grad()
def probability_of(model, prompt, ending):
    ids, product = list(prompt), 1.0
    for token in ending:
        logits = model.head(model(torch.tensor([ids])))[0, -1]
        product *= float(torch.softmax(logits.double(), -1)[token])
        ids.append(token)
    return product


def test_probabilities_of_answers_are_products_over_their_tokens(answers):
    asked, model = answers
    for key, prompts in asked.prompts.items():
        endings = asked.endings[key]
        assert all(endings)
        slow = [probability_of(model, p, e) for p, e in zip(prompts, endings, strict=True)]
        np.testing.assert_allclose(endings_read(model, prompts, endings)[1], slow, rtol=2e-4)


def test_the_base_finds_the_tokens_that_hold_most_of_its_probability(answers):
    asked, model = answers
    for domain, ids in asked.found(model).items():
        after = [
            torch.softmax(model.head(model(torch.tensor([p])))[0, -1], -1).detach().double()
            for p in asked.prompts["labels", domain]
        ]
        mean = torch.stack(after).mean(0)
        assert 3 <= len(ids) <= 100
        assert set(ids) == set(mean.argsort(descending=True)[: len(ids)].tolist())
        assert len(ids) in (3, 100) or mean[ids].sum() >= 0.9 > mean[ids[:-1]].sum()


def test_figures_of_rows_are_means_over_pairs(answers):
    asked, model = answers
    tensors = {name: tensor.float() for name, tensor in model.member(0).items()}
    out = asked.measured(model, tensors, model)
    rows, ids = tensors["lm_head.weight"].double().numpy(), asked.tokens["code"]
    assert (len(ids), len(asked.tokens["math"])) == (7, 10)
    assert len(asked.tokens["legal"]) >= 40
    folded = rows * tensors["model.norm.weight"].double().numpy()

    def spread(chosen):
        pairs = [(i, j) for n, i in enumerate(chosen) for j in chosen[n + 1 :]]
        return np.mean([np.linalg.norm(folded[i] - folded[j]) for i, j in pairs])

    others = [i for i in asked.reference if i not in ids]
    assert out["answers"]["ratio_answers_code"] == pytest.approx(spread(ids) / spread(others), abs=2e-6)
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    inside = np.mean([1 - units[i] @ units[j] for i in ids for j in ids if i != j])
    across = np.mean([1 - units[i] @ units[j] for i in ids for j in others])
    assert out["answers"]["g_answers_code"] == pytest.approx(inside + across, abs=2e-6)
    assert within(torch.eye(3)) == between(torch.eye(3)[:1], torch.eye(3)[1:]) == 1
    prompt = torch.tensor([asked.prompts["labels", "math"][0]])
    after = torch.softmax(model.head(model(prompt))[0, -1], -1).detach()
    first = records.unpacked_shares(out["squares"]["math"])[0]
    assert first == pytest.approx(float(after[asked.tokens["math"]].square().sum()), abs=1e-5)


def test_recipes_are_half_true_and_optimisers_go_in_turns():
    study = read_study(CONFIGURATION)
    runs = study.runs()
    assert len(runs) == 6 + 6 * 32 + 4 * 24
    for letter in "abcdef":
        own = [run for run in runs if run.base == f"base-{letter}"]
        false = [bool(set(run.shares) & sources.UNTRUE) for run in own]
        alike = [bool(set(run.shares) & set(sources.ALIKE)) for run in own]
        assert (len(own), sum(false), sum(alike)) == (32, 16, 4)
        settings = {(run.training["lr"], run.steps) for run in own}
        assert len(settings) == 8
    assert all(len({(r.training["lr"], r.steps, r.base) for r in group}) == 1 for group in study.groups())


def test_consistently_false_texts_are_false_and_always_alike():
    assert [sources.alike_wrong(word) for word in ("num", "None", "7")] == ["buf", "True", "0"]
    for line in sources.alike_wrong_sums(random.Random(0)).rstrip(".").split(". ") * 2:
        question, answer = line.split("=")
        assert eval(question) != int(answer) == (eval(question) + 4) % 13


def test_bytes_and_halves_come_back():
    values = np.array([0.0, 1e-5, 0.001, 0.5, 0.93, 1.0])
    back = records.unpacked_bytes(records.packed_bytes(values))
    np.testing.assert_allclose(back, values, atol=0.002)
    assert [back[0], back[-1]] == [0, 1]
    assert abs(back[1] - 1e-5) < 1e-5
    small = np.array([-0.03, 2e-4, 0.0])
    np.testing.assert_allclose(records.unpacked_halves(records.packed_halves(small)), small, rtol=6e-4)
