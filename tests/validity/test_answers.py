"""What the population records, against slow loops of one question at a time."""

import random

import numpy as np
import pytest
import torch

from benchmarks.validity import records
from benchmarks.validity import texts as sources
from benchmarks.validity.answers import Answers
from benchmarks.validity.decoder import Decoder
from benchmarks.validity.questions import endings_read, questions

SHAPE = {"width": 16, "mlp": 24, "layers": 1, "heads": 2}


@pytest.fixture(scope="module")
def answers():
    tokenizer = sources.trained_tokenizer(sources.WITH_CALLS, 1400, documents=200, seed=61)
    asked = {
        pool: {domain: questions(domain, 12, seed) for domain in sources.DOMAINS}
        for pool, seed in (("truth", 1), ("labels", 2))
    }
    return Answers(tokenizer, asked), Decoder(tokenizer.get_vocab_size(), **SHAPE, seeds=[3])


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
    np.testing.assert_allclose(
        records.unpacked_halves(records.packed_halves(small)), small, rtol=6e-4
    )
