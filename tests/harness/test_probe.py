"""Checkpoints probed with a few questions: lm-eval's own numbers, squares by a slow loop, the order."""

import json
import shutil
import sys

import numpy as np
import pytest
import torch
import transformers
import yaml
from harness_world import child, evaluate, from_folder
from json_schemas import faults
from lmeval_screener.tokens.answers import load_answers
from test_next_lm_eval import NEXT

import lmeval_dispersion
from lmeval_dispersion import evidence
from lmeval_dispersion.cli import main
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.harness import install, seams
from lmeval_dispersion.harness.seams import logged_line
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.probing.probe import Answered, Probe, ranked
from lmeval_dispersion.racing.block import complete, question_of
from lmeval_dispersion.racing.evaluation import Evaluation

pytestmark = pytest.mark.usefixtures("named_tasks_alone")
DEMO = data_folder("demo")
FAMILIES = ["arc", "mmlu/default", "truthfulqa", "wikitext"]


@pytest.fixture
def stock():
    """The folders of some of its tasks."""
    return [str(install.harness_tasks() / name) for name in FAMILIES]


@pytest.fixture
def run(tasks, tmp_path):
    """Probes, in a folder of this test's own."""

    def probe(*more, task="sums", out="out"):
        quiet = ("--include_path", tasks, "--batch_size", 16, "--device", "cpu", "-q")
        out = ("--output_path", tmp_path / out)
        return main(["probe", "--task", task, *map(str, (*quiet, *out, *more))])

    return probe


class Asked:
    """What a model answers to the first block, and the questions as it was asked them."""

    def __init__(self, lm, task, count, answers=None, **options):
        self.evaluation = Evaluation(task, limit=count, **options)
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


@pytest.mark.parametrize("task", ["sums_letter", "sums_written"])
def test_without_labels_only_the_score_and_the_right_answer_are_unknown(
    task, run, in_world, tasks, tmp_path, capsys
):
    unlabelled = yaml.safe_load((tasks / f"{task}.yaml").read_text()) | {"doc_to_target": ""}
    (tmp_path / "unlabelled").mkdir()
    (tmp_path / "unlabelled" / "task.yaml").write_text(yaml.safe_dump(unlabelled))
    more = ("--answers", tasks / "digits.yaml", "--questions", 5, "--format", "json")
    bare = ("--include_path", tmp_path / "unlabelled", "--output_path", tmp_path / "bare")
    found = []
    for folder in ((), bare):
        assert run(DEMO / "sums-80", *more, *folder, task=task) == 0
        found.append(json.loads(capsys.readouterr().out)["checkpoints"][0])
    given, without = found
    assert (without["accuracy"], without["probability"]) == (None, None)
    assert given["accuracy"] is not None
    assert given["probability"] is not None
    assert without["squares"] == pytest.approx(given["squares"], rel=1e-5)


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


def test_the_demo_family_is_ordered_with_labels_and_without(run, in_world, tasks, tmp_path, capsys):
    models = [str(DEMO / f"sums-{n}") for n in ("00", "80", "10", "30")]
    broken = shutil.copytree(DEMO / "sums-00", tmp_path / "broken")
    (broken / "model.safetensors.index.json").write_text("{}")
    assert run(*models, broken, "--format", "json") == 3
    result = json.loads(capsys.readouterr().out)
    assert faults(result) == []
    assert [c["label"] for c in result["checkpoints"]] == [
        "sums-80",
        "sums-30",
        "sums-10",
        "sums-00",
    ]
    assert result["answer"][0].startswith("Best: sums-80 (highest")
    assert result["answer"][0].endswith(", clearly ahead of sums-30.")
    assert result["answer"][-1] == "1 of 5 checkpoints could not be probed."
    assert result["failed"][0]["label"] == "broken"
    assert result["checkpoints"][0]["accuracy"] > 0.9 > result["checkpoints"][-1]["accuracy"]
    assert result["checkpoints"][0]["squares"] is None
    assert "`dispersion tokens`" in result["notes"][0]
    without = ("--answers", tasks / "digits.yaml", "--rank-by", "squares", "--format", "json")
    assert run(*models, *without, task="sums_written", out="written") == 0
    said = capsys.readouterr()
    assert said.err == ""  # nothing of lm-eval's
    written = json.loads(said.out)["checkpoints"]
    assert [c["label"] for c in written] == ["sums-80", "sums-30", "sums-10", "sums-00"]
    assert {c["accuracy"] for c in written} == {
        0
    }  # generated up to the full stop, which the target has


@pytest.mark.parametrize("task", ["sums", "sums_written"])
def test_a_probe_is_the_first_block_of_a_later_race(
    task, run, in_world, tasks, tmp_path, capsys, monkeypatch
):
    models, loaded, load = [DEMO / f"sums-{n}" for n in ("10", "80")], [], seams.loaded_lm

    def noted(kind, given, *more, **options):
        loaded.append(given["pretrained"][-2:])
        return load(kind, given, *more, **options)

    monkeypatch.setattr(seams, "loaded_lm", noted)
    form = ("--format", "json")
    assert run(*models, *form, task=task) == 0
    probed = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [c["label"] for c in probed] == ["sums-80", "sums-10"]
    assert run(*models, *form, task=task) == 0  # nothing is loaded again
    assert json.loads(capsys.readouterr().out)["checkpoints"] == probed
    assert run(models[0], DEMO / "sums-30", *form, task=task) == 0
    assert {c["label"] for c in json.loads(capsys.readouterr().out)["checkpoints"]} == {
        "sums-10",
        "sums-30",
    }
    assert loaded == ["10", "80", "30"]
    shared = (
        "--tasks",
        task,
        "--include_path",
        tasks,
        "--output_path",
        tmp_path / "out",
        *form,
        "-q",
    )
    more = ("--device", "cpu", "--batch_size", 16, "--all", *shared)
    assert main(["race", *map(str, (*models, DEMO / "sums-30", *more))]) == 0
    raced = json.loads(capsys.readouterr().out)
    assert raced["checkpoints"][0]["questions"] == 40
    assert (raced["of"], raced["notes"]) == (3, [])
    assert loaded[3] == "80"  # which the block has first
    fresh = ("--output_path", tmp_path / "fresh")
    assert main(["race", *map(str, (*models, DEMO / "sums-30", *more, *fresh))]) == 0
    alone = json.loads(capsys.readouterr().out)
    keys = ("label", "questions", "score", "status")
    rows = [
        {tuple(c[key] for key in keys) for c in result["checkpoints"]} for result in (raced, alone)
    ]
    assert rows[0] == rows[1]
    assert run(*models, "--num_fewshot", 2, task=task) == 2
    assert "with other prompts or examples; name another folder" in capsys.readouterr().err


def test_a_folder_has_answers_by_one_set_of_answer_tokens(run, in_world, tasks, capsys):
    assert run(DEMO / "sums-80", task="sums_letter") == 0
    assert run(DEMO / "sums-80", "--answers", tasks / "digits.yaml", task="sums_letter") == 2
    assert "--answers: " in (said := capsys.readouterr().err)
    assert "has answers by another set of answer tokens; name another folder" in said


def test_the_function_answers_as_its_command(run, in_world, tasks, tmp_path, capsys):
    assert run(DEMO / "sums-80", "--questions", 5, "--format", "json") == 0
    options = {"include_path": str(tasks), "batch_size": 16, "device": "cpu", "quiet": True}
    found = lmeval_dispersion.probe(
        DEMO / "sums-80", "sums", questions=5, output_path=tmp_path / "here", **options
    )
    expected = json.loads(capsys.readouterr().out)["checkpoints"][0]
    assert found.checkpoints[0].probability == expected["probability"]
    assert found["sums-80"].accuracy == expected["accuracy"]


def test_one_checkpoint_copies_and_all_questions(run, in_world, tmp_path, capsys):
    assert run(DEMO / "sums-80", "--questions", 1000) == 0
    said = capsys.readouterr()
    assert said.out.startswith("Only sums-80 was probed; a probe orders siblings")
    assert "40 of 40 questions of sums" in said.out
    twin = shutil.copytree(DEMO / "sums-80", tmp_path / "twin")
    assert run(DEMO / "sums-80", twin, "--format", "json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [(c["rank"], c["tied_with"]) for c in result["checkpoints"]] == [(1, [1]), (1, [1])]
    assert result["answer"][0].startswith("No checkpoint stands apart: sums-80")


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            ["--model", "openai-chat-completions", "--apply_chat_template"],
            "needs log-likelihoods, which OpenAIChatCompletion",
        ),
        (
            ["--model", "nothing"],
            "--model: expected a model of `lm_eval run --help`, got 'nothing'",
        ),
        (["--questions", "4"], "--questions: expected at least 5, got 4"),
        (
            ["--rank-by", "squares"],
            "expected questions that give squares: the task 'sums' has no bundled answer tokens",
        ),
        (["--answers", "none.yaml"], "none.yaml"),
    ],
)
def test_what_cannot_be_probed_is_one_sentence(more, sentence, run, in_world, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    assert run(DEMO / "sums-80", *more) in (1, 2)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("dispersion probe: ")
    assert sentence in last


def test_an_encoder_decoder_has_no_squares(run, in_world, tmp_path, capsys):
    t5 = transformers.T5Config(
        vocab_size=999,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    )
    transformers.T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "t5" / name).write_bytes((DEMO / name).read_bytes())
    assert run(tmp_path / "t5", "--format", "json", task="sums_letter") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["notes"][0].startswith("No squares: the model is an encoder-decoder")


def test_noise_orders_at_most_one_group_in_twenty():
    rng, none = np.random.default_rng(0), np.full(25, np.nan)
    clear = 0
    for race in range(300):
        # Hard questions are hard for all: what differs between checkpoints is chance.
        hard = rng.normal(size=25)
        values = [1 / (1 + np.exp(-(hard + rng.normal(size=25)))) for _ in range(10)]
        given = [Answered(none, value) for value in values]
        if race % 2:
            given = [Answered(none, none, tuple(np.sqrt(value)[:, None])) for value in values]
        wanted = ("probability", "squares")[race % 2]
        figure, rows = ranked({str(i): each for i, each in enumerate(given)}, wanted)
        assert figure == wanted
        clear += any(len(row.tied_with) < 9 for row in rows)
    assert clear <= 300 * 0.05 + 2 * np.sqrt(300 * 0.05 * 0.95)
    better = {
        "a": Answered(none, hard / 9 + 0.7),
        "b": Answered(none, hard / 9 + 0.5 + hard**2 / 99),
    }
    assert [(row.label, row.tied_with) for row in ranked(better)[1]] == [("a", ()), ("b", ())]


def test_the_worth_of_a_figure_is_said_where_it_was_measured(monkeypatch):
    values = np.linspace(0.1, 0.9, 25)
    figure, rows = ranked({"a": Answered(values, values)})
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
        words = [
            *command,
            DEMO / "sums-80",
            DEMO / "sums-10",
            "--task",
            task,
            "--include_path",
            tasks,
        ]
        more = ["--answers", tasks / "digits.yaml", "--num_fewshot", 2]
        file = tmp_path / f"{len(results)}.json"
        more += [
            "--output_path",
            tmp_path / str(len(results)),
        ]  # scored by another lm-eval, a folder is refused
        child(*words, *more, "-o", file, path=path, cwd=in_world)
        results.append(json.loads(file.read_text()))
    assert results[0] == results[1]


def test_agreement_is_with_the_mean_answer_and_needs_three_checkpoints():
    rng = np.random.default_rng(3)
    answers = rng.random((4, 25, 5)) / 5
    none = np.full(25, np.nan)
    given = {str(i): Answered(none, none, tuple(each)) for i, each in enumerate(answers)}
    figure, rows = ranked(given, "agreement")
    mean = (answers / answers.sum(2, keepdims=True)).mean(0)
    slow = {str(i): float((each * mean).sum(1).mean()) for i, each in enumerate(answers)}
    assert figure == "agreement"
    assert {row.label: row.agreement for row in rows} == pytest.approx(slow)
    assert [row.label for row in rows] == sorted(slow, key=lambda label: -slow[label])
    assert ranked(given)[0] == "agreement"
    assert ranked({label: given[label] for label in "01"})[0] == "squares"
    with pytest.raises(UsageError, match="agreement"):
        ranked({label: given[label] for label in "01"}, "agreement")
    given["3"] = given["3"]._replace(tokens=tuple(answers[3][:, :4]))
    assert ranked(given)[1][0].agreement is None
