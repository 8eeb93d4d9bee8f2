"""The study of a released base: true questions, false lines, scores as a slow loop has them."""

import random

import numpy as np
import pytest
import tiny_models
import torch
import yaml

from benchmarks.validity import records, smollm2
from benchmarks.validity.smollm2 import Material, Question, asked, figures, found, recipes


@pytest.fixture
def material(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("\n".join(["long " * 60, "short"]), "utf-8")
    return Material(file)


def test_the_first_answer_is_right_and_no_question_is_trained_on(material):
    questions = material.questions("math", 40, 10, 5)
    assert material.questions("math", 50, 0, 5)[10:] == questions
    for question in questions:
        sums = question.prompt.split(" ")
        assert eval(sums[-1].rstrip("=")) == int(question.answers[0][:-1])
        assert all(eval(s.split("=")[0]) == int(s.split("=")[1][:-1]) for s in sums[:-1])
        assert len(set(question.answers)) == 4
    trained = {material.line("sums", rng).split("=")[0] for rng in map(random.Random, range(400))}
    assert not trained & {q.prompt.split(" ")[-1].rstrip("=") for q in questions}
    for question in material.questions("code", 30, 0, 5):
        written = []
        program = question.prompt.split(">>> ")[-1].replace("\n>>> ", "\n")
        exec(program, {"print": lambda value, written=written: written.append(str(value))})
        assert question.answers[0] == f"{written[0]}\n"
        assert len(set(question.answers)) == 4


def test_false_lines_are_mostly_false_and_true_ones_true(material):
    def share(source):
        lines = [material.line(source, random.Random(i)).rstrip(". ") for i in range(300)]
        return np.mean([eval(line.split("=")[0]) == int(line.split("=")[1]) for line in lines])

    assert share("sums") == 1
    assert share("wrong_sums") < 0.05
    assert material.line("text", random.Random(0)).startswith("long long")


def test_recipes_are_half_true_and_drawn_once():
    study = yaml.safe_load(smollm2.CONFIGURATION.read_text("utf-8"))
    made = recipes(study)
    assert made == recipes(study)
    kinds = [recipe["kind"] for recipe in made]
    false = [bool({"wrong_sums", "wrong_code"} & set(r["shares"])) for r in made if r["kind"] == "full"]
    assert (kinds.count("full"), kinds.count("adapters"), sum(false)) == (24, 8, 12)


@torch.no_grad()
def test_scores_are_those_of_a_slow_loop():
    model, tokenizer = tiny_models.llama(seed=4), tiny_models.tokenizer(pad=True)
    words = tiny_models.WORDS
    questions = [
        Question(" ".join(words[i : i + 3 + i]), [words[i + 7], f"{words[i]} {words[1]}", words[5], words[i]])
        for i in range(5)
    ]
    out = asked(model, tokenizer, questions, [3, 4, 5], size=2)

    def logs(text):
        return torch.log_softmax(model(torch.tensor([tokenizer(text).input_ids])).logits[0].double(), -1)

    for i, question in enumerate(questions):
        scores, start = [], len(tokenizer(question.prompt).input_ids)
        for answer in question.answers:
            ids = tokenizer(f"{question.prompt} {answer}").input_ids
            after = logs(f"{question.prompt} {answer}")
            scores.append(sum(float(after[at - 1, ids[at]]) for at in range(start, len(ids))))
        shares = np.exp(scores) / np.exp(scores).sum()
        assert records.unpacked_shares(out["probability"])[i] == pytest.approx(shares[0], abs=2e-5)
        assert records.unpacked(out["right"], 5)[i] == (shares.argmax() == 0)
        squares = float(logs(question.prompt)[-1, [3, 4, 5]].exp().square().sum())
        assert records.unpacked_shares(out["squares"])[i] == pytest.approx(squares, abs=2e-5)
    mean = torch.stack([logs(q.prompt)[-1].exp() for q in questions]).mean(0)
    ids = found(model, tokenizer, [q.prompt for q in questions])
    assert set(ids) == set(mean.argsort(descending=True)[: len(ids)].tolist())


def test_figures_leave_tokens_of_the_set_out_of_the_everyday_words():
    head, norm = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)), torch.ones(4)
    same = figures(head, norm, {"a": [0, 1, 2]}, [2, 3, 4, 5])
    assert same == figures(head, norm, {"a": [0, 1, 2]}, [3, 4, 5])
    assert same["ratio_a"] == pytest.approx(
        float(torch.pdist(head[:3].double()).mean() / torch.pdist(head[3:6].double()).mean())
    )
