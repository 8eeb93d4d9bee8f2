"""`dispersion tokens`: answers against counts of the tasks' files, tokens found by a base against a loop."""

import ast
import json
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from datasets_layout import DATA, FACTS
from lmeval_screener.tokens.vocabulary import Vocabulary

from lmeval_dispersion.cli import main
from lmeval_dispersion.harness import answers, install
from lmeval_dispersion.harness.answers import counted_set
from lmeval_dispersion.harness.seams import loaded_tasks

EXCERPTS = json.loads((DATA / "excerpts.json").read_text("utf-8"))


def names_and_literals(document):
    """Names, constants and literals of a solution, by Python's syntax tree."""
    source = document["prompt"] + document["canonical_solution"]
    lines, first = source.splitlines(), document["prompt"].count("\n") + 1
    found = Counter()

    def add(text, row, column):
        line = lines[row - 1].encode()
        if row >= first:
            found[(" " if line[column - 1 : column] == b" " else "") + text] += 1

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            add(node.id, node.lineno, node.col_offset)
        elif isinstance(node, ast.Attribute):
            add(node.attr, node.end_lineno, node.end_col_offset - len(node.attr.encode()))
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            add(node.arg, node.lineno, node.col_offset)
        elif isinstance(node, ast.FunctionDef):
            add(node.name, node.lineno, node.col_offset + len("def "))
        elif isinstance(node, ast.alias):
            add(node.name, node.lineno, node.col_offset)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.lineno >= first and node.value.strip():
                found[node.value] += 1
        elif isinstance(node, ast.Constant):
            add(ast.get_source_segment(source, node), node.lineno, node.col_offset)
    return found


def expected(task):
    if task == "gsm8k":
        numbers = [document["answer"].rpartition("#### ")[2] for document in EXCERPTS["gsm8k"][6:]]
        return Counter(f" {number}" for number in numbers)
    if task == "humaneval":
        return Counter(
            word for document in EXCERPTS["humaneval"] for word in names_and_literals(document)
        )
    if task.startswith("mmlu"):
        rows = pd.read_parquet(DATA / "mmlu.parquet")
        asked = rows[(rows.split == "test") & ((task == "mmlu") | ("mmlu_" + rows.subject == task))]
        return Counter({f" {letter}": len(asked) for letter in "ABCD"})
    if task == "boolq":
        return Counter({" yes": len(FACTS), " no": len(FACTS)})
    return Counter(f" {choice}" for _, choices, _ in FACTS for choice in choices)


@pytest.fixture(scope="module")
def families(task_manager):
    """Finds the families of these tests alone: finding all takes lm-eval seconds."""
    names = ("gsm8k", "humaneval", "mmlu/default", "arc", "super_glue/boolq", "wikitext")
    return task_manager(*names)


@pytest.fixture
def tasks(in_world, monkeypatch, families):
    """lm-eval has the tasks of these families."""
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **_: families)
    monkeypatch.setattr(install, "status", lambda: install.Status("enabled", Path(), 0))
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "1")


@pytest.mark.parametrize(
    "task",
    ["gsm8k_dispersion", "humaneval", "mmlu_anatomy", "mmlu_dispersion", "arc_easy", "boolq"],
)
def test_a_set_holds_the_answers_of_the_tasks_documents(tasks, task, tmp_path, capsys):
    assert main(["tokens", task, "-o", str(tmp_path / "set.yaml")]) == 0
    made, name = (
        yaml.safe_load((tmp_path / "set.yaml").read_text()),
        task.removesuffix("_dispersion"),
    )
    counted = expected(name)
    assert made["answers"] == counted
    assert list(made["answers"].values()) == sorted(counted.values(), reverse=True)
    assert (made["name"], made["role"], made["tasks"][0]) == (name, "answers", name)
    shown = capsys.readouterr().out
    assert shown.startswith(
        f"{name}: {len(counted):,} distinct answers in {made['documents']} documents: "
    )


def test_a_set_names_the_version_of_a_task_that_has_one(tasks):
    (task,) = loaded_tasks("gsm8k").values()
    assert counted_set("gsm8k", [task])["revision"].startswith("task version 3.0, lm-eval 0.")
    task.VERSION = "Yaml"  # lm-eval's own, where a task has none
    assert counted_set("gsm8k", [task])["revision"].startswith("lm-eval 0.")


def test_the_head_lists_the_tokens_of_a_tokenizer(tasks, model_folder, capsys):
    assert main(["tokens", "mmlu_anatomy", "--tokenizer", str(model_folder)]) == 0
    head, _, text = capsys.readouterr().out.partition("\n")
    assert head.startswith("# mmlu_anatomy: ")
    assert " tokens in tiny's tokenizer: " in head
    assert yaml.safe_load(text)["answers"] == expected("mmlu_anatomy")


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("task", ["gsm8k", "arc_easy", ""])
def test_tokens_found_by_a_base_are_those_of_a_slow_loop(
    tasks, task, chat, model_folder, tokenizer, tmp_path, capsys
):
    from transformers import AutoModelForCausalLM

    # Sharper than a random model, which spreads its probability over more than a hundred tokens.
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(7)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    questions = [q for q, _, _ in FACTS]
    (tmp_path / "facts.jsonl").write_text(
        "".join(json.dumps({"text": q}) + "\n" for q in questions)
    )
    texts = {
        "gsm8k": [
            f"Question: {document['question']}\nAnswer:" for document in EXCERPTS["gsm8k"][6:]
        ],
        "arc_easy": [f"Question: {q}\nAnswer:" for q in questions],
        "": questions,
    }[task]
    source = [task, "--num_fewshot", "0"] if task else ["--data", str(tmp_path / "facts.jsonl")]
    words = ["tokens", "--base", str(tmp_path / "base"), "--device", "cpu", *source]
    assert main([*words, "-o", str(tmp_path / "set.yaml"), *["--apply_chat_template"] * chat]) == 0
    made = yaml.safe_load((tmp_path / "set.yaml").read_text())
    mean = torch.zeros(len(tokenizer), dtype=torch.float64)
    for text in texts:
        if chat:
            turn = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            mean += model(torch.tensor([ids])).logits[0, -1].double().softmax(-1) / len(texts)
    found = []
    for row in mean.argsort(descending=True).tolist():
        if len(found) < 3 or (mean[found].sum() < 0.9 and len(found) < 100):
            found.append(row)
    assert 3 < len(found) < 100
    assert made["pieces"] == tokenizer.convert_ids_to_tokens(found)
    assert made["coverage"] == pytest.approx(float(mean[found].sum()), abs=1e-3)
    assert made["tokenizer"] == Vocabulary.of(tokenizer).digest
    assert (made["documents"], made["base"]) == (len(texts), str(tmp_path / "base"))
    assert made["revision"].startswith("sha256:")
    assert ("chat template" in made["source"]) == chat
    name = task or "facts"
    assert capsys.readouterr().out.startswith(f"{name}: ")
    from lmeval_screener.tokens.answers import load_answers

    about = f"answers of {name} as {tmp_path / 'base'} begins them ({len(texts)} questions)"
    assert load_answers(str(tmp_path / "set.yaml")).about == about


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["arc_eazy"], "lm-eval has no task 'arc_eazy'; did you mean arc_easy"),
        (["wikitext"], "wikitext has no answers, as it scores whole texts"),
        ([], "expected the name of a task, or a base"),
        (["arc_easy", "--data", "q.txt"], "expected the name of a task, or a base"),
        (["arc_easy", "--tokenizer", "./nowhere"], "nowhere"),
        (["arc_easy", "-o", "nowhere/set.yaml"], "--output: expected a file in an existing folder"),
    ],
)
def test_what_cannot_be_counted_is_a_sentence(tasks, words, says, capsys, monkeypatch):
    assert main(["tokens", *words]) in (1, 2)
    assert says in capsys.readouterr().err


def test_answers_that_are_running_text_are_refused(tasks, monkeypatch, capsys):
    monkeypatch.setattr(answers, "counted_answers", lambda _: (Counter(EXCERPTS["wikitext"]), 3))
    assert main(["tokens", "arc_easy"]) == 1
    assert "arc_easy: 100% of its answers are sentences" in capsys.readouterr().err


def test_the_command_says_what_it_does_and_warns_unless_it_is_quiet(
    in_world, model_folder, tmp_path, capfd, caplog, monkeypatch
):
    """An own task without a version, whose answers are mostly form."""
    monkeypatch.setattr(
        "lm_eval.tasks.manager.__file__", "/none/manager.py"
    )  # not its own 10,000 tasks
    rows = [
        {"q": str(i), "a": f"SELECT {name} FROM t;"}
        for i, name in enumerate(["ice", "bee", "sun", "fly"] * 9)
    ]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = {
        "task": "mine",
        "dataset_path": "json",
        "test_split": "test",
        "output_type": "generate_until",
    }
    content |= {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "mine.jsonl")}}}
    content |= {"doc_to_text": "{{q}}", "doc_to_target": "{{a}}"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    words = ["tokens", "mine", "--include_path", str(tmp_path), "--tokenizer", str(model_folder)]
    assert main(words) == 0
    out, err = capfd.readouterr()
    made = yaml.safe_load(out)
    assert made["revision"].startswith("lm-eval ")
    assert err.startswith("dispersion tokens: loading the documents of mine with lm-eval …\nnote: ")
    assert err.endswith("`dispersion race --all --budget 5% --task mine`)\n")
    assert "generation_kwargs" not in err + caplog.text
    assert "SELECT" not in out.partition("\n")[0]
    assert main([*words, "--quiet"]) == 0
    assert capfd.readouterr() == (out, "")
