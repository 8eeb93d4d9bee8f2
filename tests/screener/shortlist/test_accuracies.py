"""Accuracies from CSV files, lm-eval's results, matched to what is screened."""

from __future__ import annotations

import json
import re

import pytest
from lmeval_screener.shortlist.accuracies import read_accuracies
from lmeval_screener.targets.names import Target, labelled

from lmeval_dispersion.errors import UsageError

CHECKPOINTS = [
    *(Target("a/base"), Target("a/math"), Target("one/y", "v1")),
    *(Target("run/x", "step1"), Target("run/x", "step2")),
]
NAMES = ("demo/sums-00", "run1/checkpoint-5", "run1/checkpoint-10", "run2/checkpoint-10")
FOLDERS = [Target(f"/data/{name}", local=True) for name in NAMES]
FINALS = [Target(f"data/run{number}/final", local=True) for number in (1, 2)]
FILES = [Target("/data/gg", local=True, file=f"{name}.gguf") for name in "abc"]
VERSIONS = [Target("models:/sums/1"), Target("models:/sums/2"), Target("models:/other/2")]


def csv_file(folder, text):
    path = folder / "accuracy.csv"
    path.write_text(text, encoding="utf-8")
    return path


def found(source, targets):
    return [target.accuracy for target in read_accuracies(str(source)).of(labelled(targets))]


@pytest.mark.parametrize(
    ("targets", "text", "accuracies"),
    [
        # as they were asked for
        (
            CHECKPOINTS,
            "\ufeffRepo, accuracy ,revision,remark\nrun/x,0.5,step2,good\n"
            "a/math,49.8,,\none/y,3,,\n\nrun/x@step1,1e-1,,\n",
            [None, 49.8, 3.0, 0.1, 0.5],
        ),
        # as the tables print them
        (
            FOLDERS,
            "checkpoint,accuracy\nsums-00,1\nrun1/checkpoint-10,2\nrun1/checkpoint-5,3\n",
            [1.0, 3.0, 2.0, None],
        ),
        (CHECKPOINTS[3:], "name,accuracy\nstep2,1\n", [None, 1.0]),
        (
            CHECKPOINTS[3:],
            ",repo,accuracy\n0,run/x@step2,1\n",
            [None, 1.0],
        ),  # pandas, with its index
        (
            [*FILES, *VERSIONS],
            "repo,accuracy\ngg/a.gguf,1\ngg/c.gguf,3\nsums/2,5\n/data/gg:b.gguf,2\n",
            [1, 2, 3, None, 5, None],
        ),
        # a report of this command
        (FILES, "label,repo,revision,accuracy\ngg/a.gguf,gg,,1\ngg/b.gguf,gg,,2\n", [1, 2, None]),
        (CHECKPOINTS[:2], "label,repo,revision,accuracy\nelsewhere,a/math,,4\n", [None, 4]),
        (FILES, "label,accuracy\ngg/b.gguf,2\n", [None, 2, None]),
        # what a spreadsheet would run has an apostrophe in our CSV
        ([Target("/=runs", local=True)], "repo,accuracy\n'=runs,-2\n", [-2]),
        # of another machine, by the folders' names; folders of one name, by their paths
        (
            FOLDERS,
            "repo,accuracy\n/else/run1/checkpoint-5,2\n/else/sums-00,1\n",
            [1, 2, None, None],
        ),
        (FINALS, "repo,accuracy\n/data/run1/final,1\n/data/run2/final,2\n", [1, 2]),
    ],
)
def test_the_names_of_a_csv_file(tmp_path, monkeypatch, targets, text, accuracies):
    monkeypatch.chdir("/")
    assert found(csv_file(tmp_path, text), targets) == accuracies


def test_of_targets_that_cannot_be_expanded_no_name_is_unknown(tmp_path):
    closed = [Target("run/x", "step*", refused=("Unreachable", "no connection"))]
    path = csv_file(tmp_path, "repo,revision,accuracy\nrun/x,step2,7\n")
    assert found(path, closed) == [None]
    with pytest.raises(UsageError, match="'run/x@step2'"):
        found(path, CHECKPOINTS[:2])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, " does not exist; give results of lm-eval"),
        (b"repo,accuracy\n\xff\xfe,1\n", "expected a CSV file in UTF-8"),
        ("repo,score\na/base,1\n", "repo, accuracy and optionally revision, got repo, score"),
        ("", "got nothing"),
        ("repo,accuracy\n", "a line for each checkpoint, got only the header"),
        ("repo,accuracy\na/bose,1\n", "got 'a/bose'; did you mean a/base?"),
        (
            "repo,accuracy\na/base,1\na/math,49.8%\n",
            "line 3: expected a number as the accuracy",
        ),
        ("repo,accuracy\na/base,nan\n", "got 'nan'"),
        ("repo,accuracy\na/base\n", "got ''"),
        ("repo,accuracy\na/base,1,2\n", "line 2: expected 2 values"),
        ("repo,accuracy\na/base,1\na/base,1\n", "line 3: a/base occurs twice"),
        (
            "repo,accuracy\nrun/x,1\n",
            "run/x fits 2 screened checkpoints (run/x@step1 and run/x@step2); name one",
        ),
        ("repo,accuracy,revision\nrun/x,1,step3\n", "got 'run/x@step3'; did you mean run/x@step"),
    ],
)
def test_mistakes_in_an_accuracy_file(tmp_path, text, message):
    path = tmp_path / "accuracy.csv"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=re.escape(message)) as error:
        found(path, CHECKPOINTS)
    assert str(path) in str(error.value)


# --- lm-eval's results ----------------------------------------------------------------------------------


def results(folder, arguments, tasks, *, date=1.0, name="results_1.json", subtasks=None):
    folder.mkdir(parents=True, exist_ok=True)
    content = {"results": tasks, "config": {"model": "hf", "model_args": arguments}, "date": date}
    (folder / name).write_text(json.dumps(content | {"group_subtasks": subtasks or {}}))
    return folder / name


GSM8K = {
    "exact_match,strict-match": 0.4,
    "exact_match_stderr,strict-match": 0.1,
    "exact_match,flexible-extract": 0.9,
}


def test_a_folder_of_results_is_matched_by_the_models_names_and_files(tmp_path):
    results(tmp_path / "a", "pretrained=a/base,dtype=bfloat16", {"gsm8k": GSM8K})
    newer = GSM8K | {"exact_match,strict-match": 0.5}
    results(
        tmp_path / "a", {"pretrained": "a/base"}, {"gsm8k": newer}, date=2.0, name="results_0.json"
    )
    results(tmp_path / "b", {"pretrained": "run/x", "revision": "step2"}, {"gsm8k": GSM8K})
    results(tmp_path / "c", {"pretrained": "not/screened"}, {"gsm8k": GSM8K})
    for name, value in (("a", 0.1), ("c", 0.2)):
        file = {"pretrained": "/data/gg", "gguf_file": f"{name}.gguf"}
        results(tmp_path / f"gg-{name}", file, {"gsm8k": {"exact_match,strict-match": value}})
    accuracies = read_accuracies(str(tmp_path))
    values = [target.accuracy for target in accuracies.of(labelled([*CHECKPOINTS, *FILES]))]
    assert values == [0.5, None, None, None, 0.4, 0.1, None, 0.2]
    assert accuracies.meaning == "gsm8k, exact_match,strict-match (6 files of lm-eval's results)"


def test_one_task_is_meant_and_a_group_is_one_task(tmp_path):
    both = {"mmlu": {"acc,none": 0.6}, "mmlu_law": {"acc,none": 0.3}}
    file = results(tmp_path, "pretrained=a/base", both, subtasks={"mmlu": ["mmlu_law"]})
    assert found(file, CHECKPOINTS)[0] == 0.6
    assert found(f"{file}:mmlu_law", CHECKPOINTS)[0] == 0.3
    results(tmp_path / "b", "pretrained=a/math", {"gsm8k": GSM8K})
    with pytest.raises(
        UsageError, match=r"holds 2 tasks \(gsm8k and mmlu\); choose one with .*:TASK"
    ):
        found(tmp_path, CHECKPOINTS)
    assert found(f"{tmp_path}:gsm8k", CHECKPOINTS)[1] == 0.4
    with pytest.raises(
        UsageError, match=r"expected results of the task gsm, got .*did you mean gsm8k"
    ):
        found(f"{tmp_path}:gsm", CHECKPOINTS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON that lm-eval wrote"),
        ('{"a": 1}', "has no `results`"),
        (
            '{"results": {"wiki": {"word_perplexity,none": 9.5}}}',
            "an accuracy of wiki .*got word_perplexity",
        ),
        ('{"results": {"arc": {"acc,none": 0.5}}}', "the model's name in config.model_args"),
        (
            '{"results": {"arc": {"acc,none": 0.5}}, "model_name": "b/other"}',
            "got those of b/other",
        ),
    ],
)
def test_results_that_say_nothing_of_what_is_screened(tmp_path, content, message):
    (tmp_path / "results_1.json").write_text(content)
    with pytest.raises(UsageError, match=message):
        found(tmp_path / "results_1.json", CHECKPOINTS)
