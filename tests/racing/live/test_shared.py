"""What shared questions add to lm-eval's answers: the right answer's probability, and the answer tokens'."""

import numpy as np
import pytest
import torch
import yaml
from harness_world import evaluate, from_folder
from lmeval_screener.tokens.answers import load_answers

from lmeval_dispersion.asking import Asking
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.harness import install
from lmeval_dispersion.harness.seams import logged_line
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.racing.evaluation import Evaluation
from lmeval_dispersion.racing.shared import agreement, check_agreement, complete, question_of

pytestmark = pytest.mark.usefixtures("named_tasks_alone")
DEMO = data_folder("demo")
FAMILIES = ["arc", "mmlu/default", "truthfulqa", "wikitext"]


@pytest.fixture
def stock():
    """The folders of some of its tasks."""
    return [str(install.harness_tasks() / name) for name in FAMILIES]


class Asked:
    """What a model answers to the first block, and the questions as it was asked them."""

    def __init__(self, lm, task, count, answers=None, **options):
        self.evaluation = Evaluation(Asking(tasks=task, limit=count, **options))
        results = self.evaluation.ask(lm, range(count))
        given = load_answers(str(answers)) if answers else UsageError("no set")
        complete(self.evaluation, lm, results, given)
        samples = {
            (task, s["doc_id"]): s for task, each in results["samples"].items() for s in each
        }
        self.samples = [samples[question] for question in self.evaluation.questions]
        self.blocks = [sample.get("block", {}) for sample in self.samples]
        self.squares = [
            float(np.square(block["tokens"]).sum()) for block in self.blocks if "tokens" in block
        ]
        self.questions = [
            question_of(*self.evaluation.requests_of(question), bool(self.evaluation.chat))
            for question in self.evaluation.questions
        ]


def probabilities(lm, ids):
    """Of the next token, by the model itself."""
    with torch.inference_mode():
        return torch.softmax(lm.model(torch.tensor([ids])).logits[0, -1].double(), -1).numpy()


@pytest.mark.parametrize(
    ("task", "shots"),
    [("arc_easy", 0), ("arc_easy", 2), ("mmlu_anatomy", 1), ("truthfulqa_mc1", 0)],
)
def test_answers_are_those_of_lm_eval(task, shots, in_world, model_folder, task_manager, stock):
    lm = from_folder(model_folder)
    lm.batch_size_per_gpu = 1  # sums of a batch are rounded by its shape
    asked = Asked(lm, task, 3, num_fewshot=shots, include_path=stock, seed=3)
    samples = evaluate(lm, [task], task_manager(*FAMILIES), num_fewshot=shots, log_samples=True)[
        "samples"
    ]
    by_document = {sample["doc_id"]: sample for sample in samples[task]}
    assert len(asked.questions) < asked.evaluation.available == len(by_document)
    order = [doc_id for _, doc_id in asked.evaluation.questions]
    assert {*order} < {*by_document}
    assert sorted(order) != order
    lines = "".join(map(logged_line, asked.samples))
    found = asked.evaluation.scores(
        "", None, {task: lines}, {task: {"output_type": "multiple_choice"}}
    )
    for doc_id, right, probability, question in zip(
        order, found.score, found.probability, asked.questions, strict=True
    ):
        sample = by_document[doc_id]
        logs = [float(pair[0]) for pair in sample["filtered_resps"]]
        assert [pair[0] for pair in lm.loglikelihood(list(question.requests))] == logs
        shares = np.exp(np.array(logs) - max(logs))
        assert right == sample["acc"]
        assert probability == shares[int(sample["target"])] / shares.sum()


def test_squares_are_those_of_the_softmax(in_world, model_folder, tasks, stock):
    lm = from_folder(model_folder)
    demo = from_folder(DEMO / "sums-80")
    letters = Asked(demo, "sums_letter", 4, include_path=str(tasks))
    four = [demo.tok_encode(digit)[0] for digit in "0123"]
    for question, squares in zip(letters.questions, letters.squares, strict=True):
        place = probabilities(demo, demo.tok_encode(question.context))
        assert squares == pytest.approx(np.square(place[four]).sum(), rel=1e-4)
    # Whole phrases have no tokens of their own, and the answers of ARC none either.
    facts = Asked(lm, "arc_easy", 4, include_path=stock)
    assert facts.squares == []
    assert {block["why"] for block in facts.blocks} == {"no set"}
    digits = [demo.tok_encode(digit)[0] for digit in "0123456789"]
    for task in ("sums", "sums_written"):
        written = Asked(demo, task, 5, tasks / "digits.yaml", include_path=str(tasks))
        for question, squares in zip(written.questions, written.squares, strict=True):
            place = probabilities(demo, demo.tok_encode(question.context))
            assert squares == pytest.approx(np.square(place[digits]).sum(), rel=1e-4)
    for question, block in zip(written.questions, written.blocks, strict=True):
        ids, target = (
            demo.tok_encode(question.context),
            demo.tok_encode(question.requests[0].args[1]),
        )
        steps = [probabilities(demo, [*ids, *target[:i]])[token] for i, token in enumerate(target)]
        assert block["probability"] == pytest.approx(np.prod(steps), rel=1e-4)


def test_a_space_that_is_a_token_stands_before_the_place(in_world, tasks, tmp_path):
    """The demo's tokenizer cuts `= 57` into =, a space and digits: digits are asked for behind the space."""
    spaced = yaml.safe_load((tasks / "sums_written.yaml").read_text()) | {"target_delimiter": " "}
    (tmp_path / "spaced.yaml").write_text(yaml.safe_dump(spaced))
    demo = from_folder(DEMO / "sums-80")
    asked = Asked(demo, "sums_written", 5, tasks / "digits.yaml", include_path=str(tmp_path))
    digits = [demo.tok_encode(digit)[0] for digit in "0123456789"]
    for question, squares in zip(asked.questions, asked.squares, strict=True):
        place = probabilities(demo, demo.tok_encode(question.context + " "))
        assert squares == pytest.approx(np.square(place[digits]).sum(), rel=1e-4)


def test_prompts_are_built_for_each_chat_template(in_world, model_folder, stock):
    lm = from_folder(model_folder)
    options = {"include_path": stock, "apply_chat_template": True}
    asked = Asked(lm, "arc_easy", 3, **options)
    first = [question.context for question in asked.questions]
    assert all("<|assistant|>" in context for context in first)
    other = from_folder(model_folder)
    other.tokenizer.chat_template = other.tokenizer.chat_template.replace("assistant", "robot")
    asked.evaluation.ask(other, range(3))
    again = [
        asked.evaluation.requests_of(question)[1][0].args[0]
        for question in asked.evaluation.questions
    ]
    assert all("<|robot|>" in context for context in again)
    assert [context.replace("robot", "assistant") for context in again] == first


def test_agreement_is_with_the_mean_answer() -> None:
    answers = np.random.default_rng(3).random((4, 25, 5)) / 5
    mean = (answers / answers.sum(2, keepdims=True)).mean(0)
    found = [values.mean() for values in agreement([list(each) for each in answers])]
    assert found == pytest.approx([float((each * mean).sum(1).mean()) for each in answers])
    unlike = [list(each) for each in answers]
    unlike[3] = [each[:4] for each in unlike[3]]
    with pytest.raises(UsageError, match="that share a tokenizer"):
        agreement(unlike)
    for checkpoints, questions in ((2, 25), (3, 4)):
        with pytest.raises(UsageError, match="at least 3 checkpoints and 5 questions"):
            check_agreement(checkpoints, questions)
