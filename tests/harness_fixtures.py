"""A small world for the harness: data sets in their layouts, a tiny model with a tokenizer of its own."""

from __future__ import annotations

import gc
import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from datasets_layout import write_all
from forks import OF_A_RACE, Forks
from harness_world import (
    World,
    environment,
    from_folder,
    tiny_llama,
    trained_tokenizer,
    trimmed_copy,
)

from lmeval_dispersion.harness import install, seams
from lmeval_dispersion.store import read_store

# HumanEval's metric comes from the Hub; in its place one that does not run what a model wrote.
CODE_EVAL = """
import datasets
import evaluate


class CodeEval(evaluate.Metric):
    def _info(self):
        text = datasets.Value("string")
        features = {"predictions": datasets.Sequence(text), "references": text}
        return evaluate.MetricInfo(
            description="", citation="", inputs_description="", features=datasets.Features(features)
        )

    def _compute(self, predictions, references, k):
        return {"pass@1": sum(first.endswith("\\n") for first, *_ in predictions) / len(predictions)}, {}
"""
DIGITS: dict[str, Any] = {"schema": 1, "name": "digits", "role": "answers", "tasks": ["sums"]}
DIGITS["answers"] = {f" {digit}": 1 for digit in range(10)}


@pytest.fixture(autouse=True)
def _no_description_of_this_machine(monkeypatch):
    """lm-eval asks pip, lscpu and others about the machine in every run, for seconds each time."""
    import lm_eval.evaluator

    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda _results: None)


@pytest.fixture(autouse=True)
def _what_was_imported_is_not_looked_through_again():
    """What the last test imported: garbage is collected wherever a model is let go."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _a_template_is_compiled_once():
    """Also in runs of lm-eval without us."""
    seams.compile_templates_once()


@pytest.fixture
def named_tasks_alone(monkeypatch):
    """lm-eval reads all of its 10,000 task files each time, and ours: here those of --include_path alone."""
    monkeypatch.setattr("lm_eval.tasks.manager.__file__", "/none/manager.py")
    there = install.Status("enabled", Path("/none"), 0)
    monkeypatch.setattr(install, "status", lambda: there)


@pytest.fixture(scope="session")
def datasets_root(tmp_path_factory):
    """A folder with ORG/NAME folders of data sets, and the metric that comes from the Hub."""
    root = tmp_path_factory.mktemp("datasets")
    write_all(root)
    (root / "code_eval").mkdir()
    (root / "code_eval" / "code_eval.py").write_text(CODE_EVAL)
    return root


@pytest.fixture(scope="module")
def forks(datasets_root):
    """Forks of one process that has imported what a race needs, to be killed."""
    cache = datasets_root.parent / "datasets-cache"
    variables = environment(HF_DATASETS_CACHE=str(cache))
    with Forks(*OF_A_RACE, cwd=datasets_root, env=variables) as made:
        yield made


@pytest.fixture(scope="session")
def tokenizer():
    """A byte-level BPE of 600 tokens trained on the excerpts, with a chat template."""
    return trained_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tokenizer, tmp_path_factory):
    """The tiny Llama and its tokenizer as a folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_llama(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def in_world(datasets_root, monkeypatch):
    """Run in the folder of the data sets: `datasets` takes "cais/mmlu" for the folder of that name."""
    import datasets
    import evaluate
    import nltk

    cache = datasets_root.parent / "datasets-cache"
    monkeypatch.setattr(evaluate.config, "HF_MODULES_CACHE", str(cache / "modules"))
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", str(cache / "metrics"))
    monkeypatch.chdir(datasets_root)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", str(cache / "modules"))
    # IFEval's checks look for this resource at import; the instructions used here do without it.
    (cache / "nltk/tokenizers/punkt_tab/english").mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(nltk.data, "path", [str(cache / "nltk")])
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.delenv("LMEVAL_DISPERSION_STORE", raising=False)
    datasets.disable_progress_bars()
    return datasets_root


@pytest.fixture(scope="session")
def task_manager():
    """Makes task managers that know our tasks and, of lm-eval's, those that a test names."""
    from lm_eval.tasks import TaskManager

    theirs = install.harness_tasks()

    def make(*families, **metadata):
        paths = [str(theirs / family) for family in families]
        return TaskManager(
            include_path=[*paths, str(install.tasks_path())],
            include_defaults=False,
            metadata=metadata,
        )

    return make


@pytest.fixture
def harness_copy(tmp_path, monkeypatch):
    """A folder of tasks as lm-eval has it, with two families; ours find it in place of the real one."""
    tasks = trimmed_copy(tmp_path / "site") / "lm_eval/tasks"
    monkeypatch.setattr(install, "harness_tasks", lambda: tasks)
    return tasks


@pytest.fixture
def world(in_world, tokenizer, task_manager):
    """Runs of the dispersion tasks in the folder of the data sets."""
    return World(tokenizer, task_manager)


@pytest.fixture(scope="session")
def stock_runs():
    """Runs of stock tasks so far: folder and results by tasks and settings."""
    return {}


@pytest.fixture
def stock(world, model_folder, tmp_path, tmp_path_factory, stock_runs):
    """Runs stock tasks on the tiny model and logs them as the command does; returns folder and results.

    A test has a copy of the folder of an equal run; a second run into the same folder is made anew.
    """
    from lm_eval.loggers import EvaluationTracker

    def made(place, *tasks, **settings):
        tracker = EvaluationTracker(output_path=str(place))
        logged = {"evaluation_tracker": tracker, "model_args": f"pretrained={model_folder}"}
        results = world.run(from_folder(model_folder), *tasks, **logged, **settings)
        samples = deepcopy(results["samples"])  # lm-eval turns its numbers into texts to write them
        figures = {key: value for key, value in results.items() if key != "samples"}
        tracker.save_results_aggregated(results=figures, samples=samples)
        for task in results["configs"]:
            tracker.save_results_samples(task_name=task, samples=samples[task])
        return results

    def run(*tasks, out="out", **settings):
        place, key = tmp_path / out, repr((tasks, sorted(settings.items())))
        if place.exists():
            return place, made(place, *tasks, **settings)
        if key not in stock_runs:
            kept = tmp_path_factory.mktemp("stock")
            stock_runs[key] = kept, made(kept, *tasks, **settings)
        kept, results = stock_runs[key]
        shutil.copytree(kept, place)
        return place, results

    return run


@pytest.fixture
def from_samples(model_folder, tmp_path):
    """Makes stores of logged samples under a name, and reads them."""
    from lmeval_dispersion.harness.embedding.samples import stores_from_samples

    def made(logged, name="samples", model=model_folder, **options):
        arguments = {"pretrained": str(model), "device": "cpu", "dtype": "float32"}
        stores_from_samples(logged, arguments, tmp_path / name, **options)
        return read_store(tmp_path / name)

    return made


@pytest.fixture(scope="session")
def tasks(tmp_path_factory):
    """A folder with sums: one task of choices, one that generates."""
    folder, rng = tmp_path_factory.mktemp("tasks"), np.random.default_rng(0)
    rows = []
    for _ in range(40):
        a, b = (int(n) for n in rng.integers(13, 40, 2))
        label = int(rng.integers(4))
        choices = [f"{a + b + step}." for step in rng.permutation([1, 2, 10])]
        choices.insert(label, f"{a + b}.")
        rows.append(
            {"q": f"7+5=12. {a}+{b}=", "choices": choices, "label": label, "answer": f"{a + b}."}
        )
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "sums.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{q}}",
        "target_delimiter": "",
    }
    choice = {"task": "sums", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}"}
    mean = {"aggregation": "mean", "higher_is_better": True}
    choice |= {"doc_to_target": "{{label}}", "metric_list": [{"metric": "acc", **mean}]}
    written = {
        "task": "sums_written",
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
    }
    written |= {
        "generation_kwargs": {"until": ["."]},
        "metric_list": [{"metric": "exact_match", **mean}],
    }
    letter = choice | {"task": "sums_letter", "doc_to_choice": [*"0123"]}
    for task in (choice, letter, written):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(shared | task))
    (folder / "digits.yaml").write_text(yaml.safe_dump(DIGITS))
    return folder
