"""Accuracies from CSV files, lm-eval's results and the Hub, matched to what is screened."""

from __future__ import annotations

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import ModuleType

import huggingface_hub
import pytest
from lmeval_screener.accuracies import read_accuracies
from lmeval_screener.targets import Target

from lmeval_dispersion.errors import UsageError

knows_published_results = pytest.mark.skipif(
    not hasattr(huggingface_hub, "parse_eval_result_entries"),
    reason="huggingface_hub reads .eval_results since 1.4",
)
CHECKPOINTS = [
    *(Target("a/base"), Target("a/math"), Target("one/y", "v1")),
    *(Target("run/x", "step1"), Target("run/x", "step2")),
]
FOLDERS = [
    Target("/data/demo/sums-00", local=True),
    Target("/data/run1/checkpoint-5", local=True),
    Target("/data/run1/checkpoint-10", local=True),
]


def csv_file(folder, text):
    path = folder / "accuracy.csv"
    path.write_text(text, encoding="utf-8")
    return path


def found(source, targets):
    accuracies = read_accuracies(str(source), targets)
    return [target.accuracy for target in accuracies.of(targets)]


def test_a_csv_file_names_checkpoints_as_they_were_asked_for(tmp_path):
    path = csv_file(
        tmp_path,
        "\ufeffRepo, accuracy ,revision,remark\nrun/x,0.5,step2,good\n"
        "a/math,49.8,,\none/y,3,,\n\nrun/x@step1,1e-1,,\n",
    )
    assert found(path, CHECKPOINTS) == [None, 49.8, 3.0, 0.1, 0.5]


def test_a_csv_file_names_them_as_the_tables_print_them(tmp_path):
    path = csv_file(tmp_path, "checkpoint,accuracy\nsums-00,1\ncheckpoint-10,2\nrun1/checkpoint-5,3\n")
    assert found(path, FOLDERS) == [1.0, 3.0, 2.0]
    path = csv_file(tmp_path, "name,accuracy\nstep2,1\n")
    assert found(path, CHECKPOINTS[3:]) == [None, 1.0]


FILES = [Target("/data/gg", local=True, file=f"{name}.gguf") for name in "abc"]


def test_labels_as_the_report_prints_them_name_files_of_one_folder_and_versions(tmp_path):
    versions = [Target("models:/sums/1"), Target("models:/sums/2"), Target("models:/other/2")]
    text = "repo,accuracy\ngg/a.gguf,1\ngg/c.gguf,3\nsums/2,5\n/data/gg:b.gguf,2\n"
    assert found(csv_file(tmp_path, text), [*FILES, *versions]) == [1, 2, 3, None, 5, None]
    with pytest.raises(UsageError, match=r"got 'gg/d\.gguf'; did you mean gg/.*; screened: gg/a\.gguf, gg/b"):
        found(csv_file(tmp_path, "repo,accuracy\ngg/d.gguf,1\n"), FILES)


def test_a_report_of_this_command_is_read_by_its_labels(tmp_path):
    text = "label,repo,revision,accuracy\ngg/a.gguf,gg,,1\ngg/b.gguf,gg,,2\n"
    assert found(csv_file(tmp_path, text), FILES) == [1, 2, None]
    text = "label,repo,revision,accuracy\nelsewhere,a/math,,4\n"
    assert found(csv_file(tmp_path, text), CHECKPOINTS) == [None, 4, *[None] * 3]
    assert found(csv_file(tmp_path, "label,accuracy\ngg/b.gguf,2\n"), FILES) == [None, 2, None]


def test_results_of_files_of_one_folder_are_told_apart_by_the_file(tmp_path):
    for name, accuracy in (("a", 0.1), ("c", 0.3)):
        arguments = {"pretrained": "/data/gg", "gguf_file": f"{name}.gguf"}
        results(tmp_path, arguments, {"gsm8k": {"acc,none": accuracy}}, name=f"results_{name}.json")
    assert found(str(tmp_path), FILES) == [0.1, None, 0.3]


def test_a_glob_is_matched_before_it_is_expanded(tmp_path):
    path = csv_file(tmp_path, "repo,revision,accuracy\nrun/x,step2,7\n")
    accuracies = read_accuracies(str(path), [Target("run/x", "step*")])
    assert [target.accuracy for target in accuracies.of(CHECKPOINTS)] == [None] * 4 + [7.0]
    with pytest.raises(UsageError, match="'run/x@main'"):
        read_accuracies(
            str(csv_file(tmp_path, "repo,revision,accuracy\nrun/x,main,7\n")), [Target("run/x", "step*")]
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("repo,score\na/base,1\n", "repo, accuracy and optionally revision, got repo, score"),
        ("", "got nothing"),
        ("repo,accuracy\n", "a line for each checkpoint, got none"),
        ("repo,accuracy\na/bose,1\n", "a checkpoint that is screened, got 'a/bose'; did you mean a/base?"),
        ("repo,accuracy\na/base,1\na/math,high\n", "line 3: expected an accuracy that is a number"),
        ("repo,accuracy\na/base,49.8%\n", "got '49.8%'"),
        ("repo,accuracy\na/base,nan\n", "got 'nan'"),
        ("repo,accuracy\na/base\n", "got ''"),
        ("repo,accuracy\na/base,1,2\n", "line 2: expected 2 values"),
        ("repo,accuracy\na/base,1\na/base,1\n", "line 3: a/base is there twice"),
        (
            "repo,accuracy\nrun/x,1\n",
            "line 2: run/x is screened 2 times, as run/x@step1, run/x@step2; name one",
        ),
        ("repo,accuracy,revision\nrun/x,1,step3\n", "got 'run/x@step3'; did you mean run/x@step"),
        ("repo,accuracy,revision\na/base,1,v2\n", "got 'a/base@v2'"),
    ],
)
def test_mistakes_in_an_accuracy_file(tmp_path, text, message):
    path = csv_file(tmp_path, text)
    with pytest.raises(UsageError, match=re.escape(message)) as error:
        read_accuracies(str(path), CHECKPOINTS)
    assert str(error.value).startswith(str(path))


def test_accuracy_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match="expected a readable CSV file, got No such file"):
        read_accuracies(str(tmp_path / "none.csv"), CHECKPOINTS)
    (tmp_path / "x.csv").write_bytes(b"repo,accuracy\n\xff\xfe,1\n")
    with pytest.raises(UsageError, match="expected a CSV file in UTF-8"):
        read_accuracies(str(tmp_path / "x.csv"), CHECKPOINTS)


# --- lm-eval's results ----------------------------------------------------------------------------------


def results(folder, arguments, tasks, *, date=1.0, name="results_1.json", subtasks=None):
    folder.mkdir(parents=True, exist_ok=True)
    content = {"results": tasks, "config": {"model": "hf", "model_args": arguments}, "date": date}
    (folder / name).write_text(json.dumps(content | {"group_subtasks": subtasks or {}}))
    return folder / name


GSM8K = {
    "exact_match,flexible-extract": 0.9,
    "exact_match,strict-match": 0.4,
    "exact_match_stderr,strict-match": 0.1,
}


def test_a_folder_of_results_is_matched_by_the_models_names(tmp_path):
    results(tmp_path / "a", "pretrained=a/base,dtype=bfloat16", {"gsm8k": GSM8K})
    newer = GSM8K | {"exact_match,strict-match": 0.5}
    results(tmp_path / "a", {"pretrained": "a/base"}, {"gsm8k": newer}, date=2.0, name="results_0.json")
    results(tmp_path / "b", {"pretrained": "run/x", "revision": "step2"}, {"gsm8k": GSM8K})
    results(tmp_path / "c", {"pretrained": "not/screened"}, {"gsm8k": GSM8K})
    accuracies = read_accuracies(str(tmp_path), CHECKPOINTS)
    assert [target.accuracy for target in accuracies.of(CHECKPOINTS)] == [0.5, None, None, None, 0.4]
    assert accuracies.meaning == "gsm8k, exact_match,strict-match (4 of lm-eval's result files)"


def test_results_of_another_machine_are_matched_by_the_folders_names(tmp_path):
    results(tmp_path / "a", {"pretrained": "/elsewhere/run1/checkpoint-5"}, {"arc": {"acc,none": 0.25}})
    results(tmp_path / "b", {"pretrained": "/elsewhere/sums-00"}, {"arc": {"acc,none": 0.5}})
    assert found(tmp_path, FOLDERS) == [0.5, 0.25, None]


def test_folders_of_one_name_are_told_apart_by_their_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    targets = [Target("run1/final", local=True), Target("run2/final", local=True)]
    for number in (1, 2):
        arguments = {"pretrained": str(tmp_path / f"run{number}" / "final")}
        results(tmp_path / f"r{number}", arguments, {"arc": {"acc,none": number / 10}})
    assert found(tmp_path, targets) == [0.1, 0.2]


def test_one_task_is_meant_and_a_group_is_one_task(tmp_path):
    both = {"mmlu": {"acc,none": 0.6}, "mmlu_law": {"acc,none": 0.3}}
    file = results(tmp_path, "pretrained=a/base", both, subtasks={"mmlu": ["mmlu_law"]})
    assert found(file, CHECKPOINTS)[0] == 0.6
    assert found(f"{file}:mmlu_law", CHECKPOINTS)[0] == 0.3
    results(tmp_path / "b", "pretrained=a/math", {"gsm8k": GSM8K})
    with pytest.raises(UsageError, match=r"holds 2 tasks \(gsm8k, mmlu\); name one: .*:TASK"):
        found(tmp_path, CHECKPOINTS)
    assert found(f"{tmp_path}:gsm8k", CHECKPOINTS)[1] == 0.4
    with pytest.raises(UsageError, match=r"expected the task gsm, got .*did you mean gsm8k"):
        found(f"{tmp_path}:gsm", CHECKPOINTS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "as JSON"),
        ('{"a": 1}', "the key `results`"),
        ('{"results": {"wiki": {"word_perplexity,none": 9.5}}}', "an accuracy of wiki .*got word_perplexity"),
        ('{"results": {"arc": {"acc,none": 0.5}}}', "the model's name in config.model_args"),
        (
            '{"results": {"arc": {"acc,none": 0.5}}, "model_name": "b/other"}',
            "accuracies of what is screened .*got those of b/other",
        ),
    ],
)
def test_results_that_say_nothing_of_what_is_screened(tmp_path, content, message):
    (tmp_path / "results_1.json").write_text(content)
    with pytest.raises(UsageError, match=message):
        read_accuracies(str(tmp_path / "results_1.json"), CHECKPOINTS)


# --- the Hub --------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """A Hub that knows the results of two repositories; what it was asked."""
    published = {
        "a/base": [("openai/gsm8k", "gsm8k", 40.0), ("cais/hle", "hle", 3.0)],
        "a/math": [("openai/gsm8k", "gsm8k", 60.0)],
    }
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path.startswith("/api/models/"):
                asked.append(self.path)
            name = self.path.partition("?")[0].removeprefix("/api/models/")
            entries = [
                {"filename": "x.yaml", "data": {"dataset": {"id": a, "task_id": b}, "value": c}}
                for a, b, c in published.get(name, [])
            ]
            body = json.dumps({"id": name, "evalResults": entries}).encode()
            self.send_response(200 if name in published else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield asked
    server.shutdown()
    server.server_close()


@knows_published_results
@pytest.mark.parametrize("task", ["gsm8k", "openai/gsm8k", "GSM8K"])
def test_results_that_repositories_publish(hub, task):
    targets = [Target("a/base"), Target("a/math"), Target("a/none")]
    accuracies = read_accuracies(f"hub:{task}", targets)
    assert [target.accuracy for target in accuracies.of(targets)] == [40.0, 60.0, None]
    assert accuracies.meaning == "openai/gsm8k/gsm8k, as 2 repositories publish it"
    assert len(hub) == 3
    assert all("expand=evalResults" in path for path in hub)


@knows_published_results
def test_what_no_repository_publishes(hub):
    with pytest.raises(
        UsageError, match="none of the 1 repositories publishes it; they publish cais/hle/hle"
    ):
        read_accuracies("hub:mmlu", [Target("a/base")])
    with pytest.raises(UsageError, match="hub:TASK and repositories of the Hub"):
        read_accuracies("hub:mmlu", FOLDERS)


@knows_published_results
def test_a_hub_that_does_not_answer(monkeypatch):
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UsageError, match=r"the Hub gave no results .*supply a CSV file"):
        read_accuracies("hub:gsm8k", [Target("a/base")])


def test_an_older_huggingface_hub_is_named(monkeypatch):
    older = ModuleType("huggingface_hub")
    older.__version__ = "1.3.0"
    monkeypatch.setitem(sys.modules, "huggingface_hub", older)
    with pytest.raises(UsageError, match=r"1\.4 or newer.*, got 1\.3\.0; run: pip install -U"):
        read_accuracies("hub:gsm8k", CHECKPOINTS)
