"""Checkpoints probed with a few questions: lm-eval's own numbers, squares by a slow loop, the order."""

import json
import sys

import numpy as np
import pytest
import torch
import transformers
import yaml
from harness_world import child, evaluate, from_folder
from json_schemas import faults
from test_next_lm_eval import NEXT

from lmeval_dispersion import evidence
from lmeval_dispersion.cli import main
from lmeval_dispersion.errors import HarnessError, UsageError
from lmeval_dispersion.harness import install
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.probing.probe import Probe, probed
from lmeval_dispersion.probing.questions import Answered, Questions, check_decoder

DEMO = data_folder("demo")
FAMILIES = ["arc", "mmlu/default", "truthfulqa", "wikitext"]


@pytest.fixture(autouse=True)
def _no_tasks_but_named_ones(monkeypatch):
    """lm-eval reads all of its 10,000 task files each time: here it has none of its own."""
    monkeypatch.setattr("lm_eval.tasks.manager.__file__", "/none/manager.py")


@pytest.fixture
def stock():
    """The folders of some of its tasks."""
    return [str(install.harness_tasks() / name) for name in FAMILIES]


def run(tasks, *more, task="sums"):
    quiet = ("--include_path", tasks, "--batch_size", 16, "--device", "cpu", "-q")
    return main(["probe", "--task", task, *map(str, (*quiet, *more))])


def probabilities(lm, ids):
    """Of the next token, by the model itself."""
    with torch.inference_mode():
        return torch.softmax(lm.model(torch.tensor([ids])).logits[0, -1].double(), -1).numpy()


@pytest.mark.parametrize(
    ("task", "shots"), [("arc_easy", 0), ("arc_easy", 2), ("mmlu_anatomy", 1), ("truthfulqa_mc1", 0)]
)
def test_answers_are_those_of_lm_eval(task, shots, in_world, model_folder, task_manager, stock):
    lm = from_folder(model_folder)
    lm.batch_size_per_gpu = 1  # sums of a batch are rounded by its shape
    questions = Questions(task, 3, num_fewshot=shots, include_path=stock, seed=3)
    answered = questions.ask(lm)
    samples = evaluate(lm, [task], task_manager(*FAMILIES), num_fewshot=shots, log_samples=True)["samples"]
    by_document = {sample["doc_id"]: sample for sample in samples[task]}
    assert len(questions) < questions.evaluation.available == len(by_document)
    order = [doc_id for _, doc_id in questions.evaluation.questions]
    assert {*order} < {*by_document}
    assert sorted(order) != order
    for doc_id, right, probability, question in zip(
        order, answered.score, answered.probability, questions.built(), strict=True
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
    letters = Questions("sums_letter", 4, include_path=str(tasks))
    four = [demo.tok_encode(digit)[0] for digit in "0123"]
    found = letters.ask(demo).squares
    for question, squares in zip(letters.built(), found, strict=True):
        place = probabilities(demo, demo.tok_encode(question.context))
        assert squares == pytest.approx(np.square(place[four]).sum(), rel=1e-4)
    # Whole phrases have no tokens of their own, and the answers of ARC none either.
    facts = Questions("arc_easy", 4, include_path=stock).ask(lm)
    assert np.isnan(facts.squares).all()
    assert facts.no_squares.startswith("arc_easy has no answer tokens")
    digits = [demo.tok_encode(digit)[0] for digit in "0123456789"]
    for task in ("sums", "sums_written"):
        written = Questions(task, 5, include_path=str(tasks), answers=str(tasks / "digits.yaml"))
        answered = written.ask(demo)
        for question, squares in zip(written.built(), answered.squares, strict=True):
            place = probabilities(demo, demo.tok_encode(question.context))
            assert squares == pytest.approx(np.square(place[digits]).sum(), rel=1e-4)
    for question, probability in zip(written.built(), answered.probability, strict=True):
        ids, target = demo.tok_encode(question.context), demo.tok_encode(question.requests[0].args[1])
        steps = [probabilities(demo, [*ids, *target[:i]])[token] for i, token in enumerate(target)]
        assert probability == pytest.approx(np.prod(steps), rel=1e-4)


def test_a_space_that_is_a_token_stands_before_the_place(in_world, tasks, tmp_path):
    """The demo's tokenizer cuts `= 57` into =, a space and digits: digits are asked for behind the space."""
    spaced = yaml.safe_load((tasks / "sums_written.yaml").read_text()) | {"target_delimiter": " "}
    (tmp_path / "spaced.yaml").write_text(yaml.safe_dump(spaced))
    demo = from_folder(DEMO / "sums-80")
    questions = Questions("sums_written", 5, include_path=str(tmp_path), answers=str(tasks / "digits.yaml"))
    digits = [demo.tok_encode(digit)[0] for digit in "0123456789"]
    found = questions.ask(demo).squares
    for question, squares in zip(questions.built(), found, strict=True):
        place = probabilities(demo, demo.tok_encode(question.context + " "))
        assert squares == pytest.approx(np.square(place[digits]).sum(), rel=1e-4)


@pytest.mark.parametrize("task", ["sums_letter", "sums_written"])
def test_without_labels_only_the_score_and_the_right_answer_are_unknown(task, in_world, tasks, tmp_path):
    unlabelled = yaml.safe_load((tasks / f"{task}.yaml").read_text()) | {"doc_to_target": ""}
    (tmp_path / "unlabelled.yaml").write_text(yaml.safe_dump(unlabelled))
    demo, digits = from_folder(DEMO / "sums-80"), str(tasks / "digits.yaml")
    given, bare = (
        Questions(task, 5, include_path=str(folder), answers=digits).ask(demo) for folder in (tasks, tmp_path)
    )
    assert np.isnan(bare.score).all()
    assert np.isnan(bare.probability).all()
    assert np.isfinite(given.score).all()
    assert np.isfinite(given.probability).all()
    np.testing.assert_allclose(bare.squares, given.squares, rtol=1e-5)


def test_prompts_are_built_for_each_chat_template(in_world, model_folder, stock):
    lm = from_folder(model_folder)
    questions = Questions("arc_easy_dispersion", 3, include_path=stock, apply_chat_template=True)
    questions.ask(lm)
    first = questions.built()
    assert all("<|assistant|>" in question.context for question in first)
    other = from_folder(model_folder)
    other.tokenizer.chat_template = other.tokenizer.chat_template.replace("assistant", "robot")
    questions.ask(other)
    again = [question.context.replace("robot", "assistant") for question in questions.built()]
    assert again == [question.context for question in first]
    assert all("<|robot|>" in question.context for question in questions.built())


def test_the_demo_family_is_ordered_with_labels_and_without(in_world, tasks, tmp_path, capsys):
    models = [str(DEMO / f"sums-{n}") for n in ("00", "80", "10", "30")]
    assert run(tasks, *models, tmp_path / "gone", "--format", "json") == 3
    result = json.loads(capsys.readouterr().out)
    assert faults(result) == []
    assert [c["label"] for c in result["checkpoints"]] == ["sums-80", "sums-30", "sums-10", "sums-00"]
    assert result["answer"][0].startswith("Evaluate first: sums-80, sums-30, sums-10 (highest")
    assert result["answer"][-1] == "1 of 5 checkpoints could not be probed."
    assert "gone" in result["failed"][0]["label"]
    assert result["checkpoints"][0]["accuracy"] > 0.9 > result["checkpoints"][-1]["accuracy"]
    assert result["checkpoints"][0]["squares"] is None
    assert "`dispersion tokens`" in result["notes"][0]
    without = ("--answers", tasks / "digits.yaml", "--rank-by", "squares", "--format", "json")
    assert run(tasks, *models, *without, task="sums_written") == 0
    said = capsys.readouterr()
    assert said.err == ""  # nothing of lm-eval's
    written = json.loads(said.out)["checkpoints"]
    assert [c["label"] for c in written] == ["sums-80", "sums-30", "sums-10", "sums-00"]
    assert {c["accuracy"] for c in written} == {0}  # generated up to the full stop, which the target has


def test_one_checkpoint_copies_and_all_questions(in_world, tasks, capsys):
    assert run(tasks, DEMO / "sums-80", "--questions", 1000) == 0
    said = capsys.readouterr()
    assert said.out.startswith("Only sums-80 was probed; a probe orders siblings")
    assert "40 of 40 questions of sums" in said.out
    assert run(tasks, DEMO / "sums-80", DEMO / ".." / "demo" / "sums-80", "--format", "json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [(c["rank"], c["tied_with"]) for c in result["checkpoints"]] == [(1, [1]), (1, [1])]
    assert result["answer"][0].startswith("No checkpoint stands apart: sums-80")


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--model", "openai-chat-completions"], "needs log-likelihoods, which OpenAIChatCompletion"),
        (["--model", "nothing"], "--model: expected a model of `lm_eval run --help`, got 'nothing'"),
        (["--questions", "4"], "--questions: expected at least 5, got 4"),
        (
            ["--rank-by", "squares"],
            "expected questions that give squares: the task 'sums' has no bundled answer tokens",
        ),
        (["--answers", "none.yaml"], "none.yaml"),
    ],
)
def test_what_cannot_be_probed_is_one_sentence(more, sentence, in_world, tasks, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    assert run(tasks, DEMO / "sums-80", *more) in (1, 2)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("dispersion probe: ")
    assert sentence in last


def test_tasks_and_models_that_cannot_be_asked_are_refused(in_world, tmp_path, tasks, stock):
    with pytest.raises(UsageError, match="lm-eval has no task 'arc_eazy'; did you mean arc_easy"):
        Questions("arc_eazy", 25, include_path=stock)
    assert len(Questions("quail_dispersion", 5)) > 0  # a task that we alone have
    with pytest.raises(UsageError, match="wikitext: expected a score from 0 to 1 for each question"):
        Questions("wikitext", 25, include_path=stock)
    t5 = transformers.T5Config(vocab_size=99, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    transformers.T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "t5" / name).write_bytes((DEMO / name).read_bytes())
    assert run(tasks, tmp_path / "t5") == 1
    with pytest.raises(HarnessError, match="decoder-only"):
        check_decoder(type("LM", (), {"backend": "seq2seq"})())


def test_noise_orders_at_most_one_group_in_twenty():
    rng, none = np.random.default_rng(0), np.full(25, np.nan)
    clear = dict.fromkeys(("probability", "squares"), 0)
    for _ in range(300):
        # Hard questions are hard for all: what differs between checkpoints is chance.
        hard = rng.normal(size=25)
        for figure in clear:
            values = [1 / (1 + np.exp(-(hard + rng.normal(size=25)))) for _ in range(10)]
            answered = {
                str(i): Answered(none, **{"probability": none, "squares": none, figure: value})
                for i, value in enumerate(values)
            }
            ranked_by, rows = probed(answered)
            assert ranked_by == figure
            clear[figure] += any(len(row.tied_with) < 9 for row in rows)
    assert max(clear.values()) <= 300 * 0.05 + 2 * np.sqrt(300 * 0.05 * 0.95), clear
    better = {
        "a": Answered(none, hard / 9 + 0.7, none),
        "b": Answered(none, hard / 9 + 0.5 + hard**2 / 99, none),
    }
    assert [(row.label, row.tied_with) for row in probed(better)[1]] == [("a", ()), ("b", ())]


def test_the_worth_of_a_figure_is_said_where_it_was_measured(monkeypatch):
    values = np.linspace(0.1, 0.9, 25)
    figure, rows = probed({"a": Answered(values, values, values)})
    result = Probe("sums", 25, 40, 0, figure, rows, (), ())
    said = "25 questions scored by the probability of the right answer ordered small fine-tunes as well as"
    assert said in result.to_markdown()
    monkeypatch.setitem(evidence.WORTH, "probability", {})
    assert "labels" not in result.to_markdown()
    assert evidence.worth("squares", 24) == evidence.worth("probability", 4) == ""
    assert evidence.worth("squares", 60).startswith("In our studies 25 questions without answers")


@pytest.mark.slow
@pytest.mark.skipif(not NEXT, reason="LM_EVAL_NEXT names no folder with lm-eval 0.5")
@pytest.mark.parametrize("task", ["sums", "sums_written"])
def test_the_next_lm_eval_gives_the_same_figures(in_world, tasks, tmp_path, task):
    results = []
    for path in ("", NEXT):
        command = [sys.executable, "-W", "ignore", "-m", "lmeval_dispersion", "probe"]
        words = [*command, DEMO / "sums-80", DEMO / "sums-10", "--task", task, "--include_path", tasks]
        more = ["--answers", tasks / "digits.yaml", "--num_fewshot", 2]
        file = tmp_path / f"{len(results)}.json"
        child(*words, *more, "-o", file, path=path, cwd=in_world)
        results.append(json.loads(file.read_text()))
    assert results[0] == results[1]


def test_agreement_is_with_the_mean_answer_and_needs_three_checkpoints():
    rng = np.random.default_rng(3)
    answers = rng.random((4, 25, 5)) / 5
    none = np.full(25, np.nan)
    given = {
        str(i): Answered(none, none, np.square(each).sum(1), answers=tuple(each))
        for i, each in enumerate(answers)
    }
    figure, rows = probed(given, "agreement")
    mean = (answers / answers.sum(2, keepdims=True)).mean(0)
    slow = {str(i): float((each * mean).sum(1).mean()) for i, each in enumerate(answers)}
    assert figure == "agreement"
    assert {row.label: row.agreement for row in rows} == pytest.approx(slow)
    assert [row.label for row in rows] == sorted(slow, key=lambda label: -slow[label])
    assert probed(given)[0] == "agreement"
    assert probed({label: given[label] for label in "01"})[0] == "squares"
    with pytest.raises(UsageError, match="agreement"):
        probed({label: given[label] for label in "01"}, "agreement")
    given["3"] = given["3"]._replace(answers=tuple(answers[3][:, :4]))
    assert probed(given)[1][0].agreement is None
